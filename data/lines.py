"""Files of JSON lines in and out: plain or .gz, each bad line named, nothing half-written."""

import gzip
import json
import os
import zlib
from pathlib import Path

LIMIT = 1_000_000  # characters of a text: more is a broken file and no dialogue


def lines_of(path):
    """The lines of a file as bytes; of a damaged .gz those before the damage, and then None."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            yield from file
        except (EOFError, zlib.error, gzip.BadGzipFile):
            yield None


def read_rows(path, check, counts, skip_bad=False):
    """Yields check(row) of each line of a .jsonl or .jsonl.gz file.

    check: takes the line's JSON object; raises ValueError if it is malformed. counts: a dict whose
    "rows" grows by each line and whose "malformed" by each that skip_bad leaves out; the place
    where an archive is cut counts as such a line. Without skip_bad it is a ValueError naming file,
    line and reason, as is a file without lines. OSError if the file can't be read.
    """
    path, number = Path(path), 0
    for number, line in enumerate(lines_of(path), 1):
        counts["rows"] += 1
        try:
            if line is None:
                raise ValueError("the archive is cut or damaged here; fetch it again")
            row = json.loads(line.decode())
            if not isinstance(row, dict):
                raise ValueError(f"a line must be a JSON object, not {type(row).__name__}")
            row = check(row)
        except (ValueError, RecursionError) as error:
            if not skip_bad:
                bad_json = isinstance(error, json.JSONDecodeError)
                what = f"no JSON at column {error.colno} ({error.msg})" if bad_json else error
                raise ValueError(f"{path} line {number}: {what}") from None
            counts["malformed"] += 1
            continue
        yield row
    if not number and not skip_bad:
        raise ValueError(f"{path}: the file is empty")


def text_of(row, field):
    """The row's text; ValueError naming the field if it is missing, no text, or no sane one."""
    if field not in row:
        raise ValueError(f"no field {field!r}")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} must be text, not {type(text).__name__}")
    if len(text) > LIMIT:
        raise ValueError(f"field {field!r} has {len(text):,} characters, over the limit of "
                         f"{LIMIT:,}")
    if any("\ud800" <= c <= "\udfff" for c in set(text)):
        raise ValueError(f"field {field!r} holds half of a surrogate pair")  # JSON can, UTF-8 not
    return text


def answers_of(line):
    """The answers of a comparison or of a ranking, best first."""
    return line.get("responses") or [line["chosen"], line["rejected"]]


def write_lines(files):
    """{path: rows} -> JSON lines: hidden files beside them, then renames, so none is half there."""
    parts = {Path(path).with_name(f".{Path(path).name}.part"): path for path in files}
    try:
        for part, path in parts.items():
            part.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in files[path])
                file.flush()
                os.fsync(file.fileno())
        for part, path in parts.items():
            os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
