"""Anthropic's comparisons (HH-RLHF; HH 2.2, 2.3): their rows, our lines, what is dropped and why.

A published row is two whole dialogues; a comparison of ours holds their common part once:

    {"chosen": "\\n\\nHuman: Hi\\n\\nAssistant: Good",
     "rejected": "\\n\\nHuman: Hi\\n\\nAssistant: Bad"}

    {"prompt": "\\n\\nHuman: Hi\\n\\nAssistant:", "chosen": "Good", "rejected": "Bad",
     "objective": "helpful", "tranche": "base", "annotator": "hh"}

`to_row` turns a line back into its row, byte for byte. Turns stay as they are written: where the
same speaker comes twice in a row, these are two turns. Each row that is dropped has one reason,
the first of:

    malformed   no JSON, other fields, no text, over a million characters, no dialogue in HH form
    no_answer   a dialogue ends with a human turn
    diverges    the dialogues differ before the last turn: the answers have different prompts
    empty       an answer has nothing but blanks
    identical   both answers are the same
    too_long    with a tokenizer: the last human turn and the longer answer exceed the context,
                though all older turns were left out (answers are never cut)

A malformed row ends the program in one line, and nothing is written, unless --skip-bad counts it.
Objective and tranche come from the folder's name (helpful-base, helpful-rejection-sampled,
helpful-online, harmless-base).

    python data/hh.py out/hh-rlhf                               # look at it: rows by reason
    python data/hh.py out/hh-rlhf --out out/hh --test 0.1       # and write train.jsonl, test.jsonl

Your own comparisons: one such row a line, in a .jsonl or .jsonl.gz file. Both texts begin with
"\\n\\nHuman: ", are equal up to the last "\\n\\nAssistant: ", and the answer after it ends them.
Then

    python data/hh.py my.jsonl --objective helpful --out out/mine

To expect: helpful-base/test 2354 rows, 2339 kept (9 diverge, 4 empty, 2 identical);
harmless-base/test 2312 rows, 2303 kept (5 diverge, 4 empty).
"""

import hashlib
import json
import sys
from pathlib import Path

from tqdm import tqdm

if __name__ == "__main__":  # `python data/hh.py` looks for modules beside itself only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.lines import read_rows, text_of, write_lines
from data.program import flags, outcome
from data.tokenizer import fit, join, loads, parse, parse_prompt

SIDES = ("chosen", "rejected")
REASONS = ("malformed", "no_answer", "diverges", "empty", "identical", "too_long")
FOLDERS = {"helpful-base": ("helpful", "base"), "harmless-base": ("harmless", "base"),
           "helpful-rejection-sampled": ("helpful", "rs"), "helpful-online": ("helpful", "online")}


def uniform(*key):
    """A number in [0, 1), a function of the key alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


# ---------------------------------------------------------------- rows and comparisons

def dialogue(row, side):
    """The turns of the row's text; ValueError naming the field."""
    text = text_of(row, side)
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"field {side!r}: {error}") from None


def reason_of(chosen, rejected):
    """Why two dialogues (lists of turns) are no comparison, or "" if they are one."""
    if "human" in (chosen[-1][0], rejected[-1][0]):
        return "no_answer"
    if chosen[:-1] != rejected[:-1]:
        return "diverges"
    if not (chosen[-1][1].strip() and rejected[-1][1].strip()):
        return "empty"
    return "identical" if chosen == rejected else ""


def to_comparison(row, objective="helpful", tranche="base"):
    """A published row {"chosen", "rejected"} as (line, ""), or (None, reason).

    ValueError if it is malformed.
    """
    if row.keys() - set(SIDES):
        raise ValueError(f"fields {sorted(row)}: a row has 'chosen' and 'rejected' and no other")
    chosen, rejected = (dialogue(row, side) for side in SIDES)
    reason = reason_of(chosen, rejected)
    if reason:
        return None, reason
    if all(role != "human" for role, _ in chosen):
        raise ValueError("no human turn before the answer")
    # The red-team workers of the paper chose the MORE harmful answer (HH 2.2). The published
    # harmless files have that turned round already: their `chosen` is the less harmful answer. So
    # nothing is turned here, and `chosen` is the better answer of every line in this project.
    line = dict(prompt=join(chosen[:-1], answer=True), chosen=chosen[-1][1],
                rejected=rejected[-1][1], objective=objective, tranche=tranche, annotator="hh")
    if to_row(line) != row:
        raise ValueError("a blank must follow each 'Human:' and 'Assistant:'")
    return line, ""


def to_row(line):
    """The published row of a comparison: two whole dialogues."""
    return {side: f"{line['prompt']} {line[side]}" for side in SIDES}


def fits(tok, line, context):
    """Whether prompt and longer answer fit after the oldest turns went.

    An answer costs its tokens, the end of its turn and the end of context where the preference
    model is read (HH A.2).
    """
    longest = max(len(tok.render_answer(line[side])) + 1 for side in SIDES)
    return fit(tok, parse_prompt(line["prompt"]), context - longest) is not None


def files_of(names):
    """The .jsonl and .jsonl.gz files of files and folders (and those below), each once, sorted."""
    found = {}
    for name in map(Path, names):
        if not name.exists():
            raise ValueError(f"{name}: no such file or folder")
        inside = [name] if not name.is_dir() else sorted(
            p for p in name.rglob("*") if p.name.endswith((".jsonl", ".jsonl.gz")))
        if not inside:
            raise ValueError(f"{name}: no .jsonl or .jsonl.gz file in this folder")
        for path in inside:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def load(names, objective="", tok=None, context=512, skip_bad=False):
    """Comparisons of files and folders: (lines, counts).

    objective: "helpful" or "harmless" where the folder's name does not tell. tok, context: drop
    what is too long for so many tokens. counts: {file: {"objective", "tranche", "rows", "kept",
    reason: ...}}, in which rows = kept + the reasons' sum. ValueError naming file, line, reason.
    """
    lines, counts = [], {}
    for path in files_of(names):
        labels = FOLDERS.get(path.resolve().parent.name, (objective, "base"))
        if not labels[0]:
            raise ValueError(f"{path}: its folder's name tells no objective; say --objective "
                             "helpful or harmless")
        count = dict(objective=labels[0], tranche=labels[1],
                     **dict.fromkeys(("rows", "kept", *REASONS), 0))
        rows = read_rows(path, lambda row, to=labels: to_comparison(row, *to), count, skip_bad)
        for line, reason in tqdm(rows, str(path), unit=" rows", leave=False, disable=None):
            if line and tok and not fits(tok, line, context):
                reason = "too_long"
            count[reason or "kept"] += 1
            if not reason:
                lines.append(line)
        counts[str(path)] = count
    return lines, counts


def first_prompt(line):
    """The first human turn of a comparison."""
    return next(text for role, text in parse_prompt(line["prompt"]) if role == "human")


def split(lines, share=0.1, seed=0):
    """(train, test), each in the order of `lines`; about `share` of the first prompts are test.

    A dialogue's side depends on its first prompt and the seed alone: whatever else is there, in
    whatever order, no first prompt is on both sides. HH has many dialogues with one beginning.
    """
    sides = [], []
    for line in lines:
        sides[uniform("split", seed, first_prompt(line)) < share].append(line)
    return sides


# ---------------------------------------------------------------- the program

def total(counts):
    """The sums over files."""
    return {k: sum(count[k] for count in counts.values()) for k in ("rows", "kept", *REASONS)}


def table(counts):
    """The counts as text: a line a file, and the sums."""
    rows = [["objective", "tranche", "rows", "kept", *REASONS, "file"]]
    rows += [[*map(str, count.values()), name] for name, count in counts.items()]
    rows += [["total", "", *map(str, total(counts).values()), f"{len(counts)} files"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[cell.ljust(w) if i in (0, 1, len(row) - 1) else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def run(args):
    tok = None
    if not 0 <= args.test <= 1:
        raise ValueError(f"--test {args.test}: a share between 0 and 1")
    if args.tokenizer:
        text = Path(args.tokenizer).read_text(encoding="utf-8", errors="replace")
        tok = loads(text, args.tokenizer)
    lines, counts = load(args.paths, args.objective, tok, args.context, args.skip_bad)
    report = dict(files=counts, total=total(counts))
    if args.out:
        if not lines:
            raise ValueError(f"no comparison to write: {report['total']}")
        train, test = split(lines, args.test, args.seed)
        out = Path(args.out)
        write_lines({out / "train.jsonl": train, out / "test.jsonl": test})
        report.update(train=len(train), test=len(test))
    if args.json:
        return print(json.dumps(report, indent=1))
    print(table(counts))
    if args.out:
        print(f"{args.out}: {len(train)} comparisons in train.jsonl, {len(test)} in test.jsonl")


def main():
    parser = flags(__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders of them")
    parser.add_argument("--objective", choices=("helpful", "harmless"), default="",
                        help="of files in other folders than Anthropic's")
    parser.add_argument("--tokenizer", metavar="FILE", default="",
                        help="drop what is too long for --context; ranks as of data/tokenizer.py")
    parser.add_argument("--context", type=int, default=512, help="tokens (default %(default)s)")
    parser.add_argument("--out", metavar="DIR", default="", help="write train.jsonl, test.jsonl")
    parser.add_argument("--test", type=float, default=0.1,
                        help="share of the first prompts for test.jsonl (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of that choice (default %(default)s)")
    parser.add_argument("--skip-bad", action="store_true",
                        help="count malformed lines and leave them out")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    outcome(run, parser.parse_args())


if __name__ == "__main__":
    main()
