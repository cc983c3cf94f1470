"""Documents to pretrain on, from files of one's own: text in windows, comparisons as dialogues."""

import re
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from pathlib import Path

from data.lines import read_rows, text_of
from data.tokenizer import fit, parse, parse_prompt, read_text


def text_files(names, kinds=(".txt", ".jsonl")):
    """Paths of the .txt and .jsonl files that `names` (commas between) names; a folder is all its
    own. ValueError for a name that leads to none.
    """
    paths = []
    for name in filter(None, (x.strip() for x in names.split(","))):
        path = Path(name)
        if not path.exists():
            raise ValueError(f"{name}: no such file or folder")
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found = [p for p in inside if p.name.endswith(kinds) and p.is_file()]
        if not found:
            raise ValueError(f"{name}: not a {' or '.join(kinds)} file, nor a folder with one")
        paths += found
    return paths


def read_dialogues(path):
    """(turns of the prompt, chosen answer) of each comparison line. ValueError names a bad line."""
    def check(row):
        return parse_prompt(text_of(row, "prompt")), text_of(row, "chosen")
    return list(read_rows(path, check, Counter()))


def read_prompt(path):
    """(preamble, dialogues) of a file: text, then dialogues in HH's form, a line of dashes before
    each. ValueError if it has none, or a part that is no dialogue.
    """
    preamble, *parts = re.split(r"^-{3,}\s*$", read_text(path), flags=re.M)
    if not parts:
        raise ValueError("no dialogue; a line of dashes comes before each")
    return preamble.strip(), [[(role, text.strip()) for role, text in parse("\n\n" + part.strip())]
                              for part in parts if part.strip()]


def read_texts(names):
    """The content of each file of `text_files`: a string, or a list of dialogues."""
    return [read_text(p) if p.suffix == ".txt" else read_dialogues(p) for p in text_files(names)]


def strings(texts):
    """All text of `texts` without its structure: what a BPE is trained on."""
    for content in texts:
        if isinstance(content, str):
            yield content
        else:
            for turns, answer in content:
                yield from (text for _, text in turns)
                yield answer


def windows(tok, text, room):
    """Text -> consecutive lists of at most `room` ids that together are its ids.

    Each ends with a paragraph (a blank line) if one ends in its second half, else with a line,
    else where it is full.
    """
    ids, borders = tok.encode(text), []
    parts = tok.encoding.decode_tokens_bytes(ids)
    ends, data = list(accumulate(map(len, parts))), b"".join(parts)     # as read: NFC for Pythia
    for border in (rb"\n\s*\n", rb"\n"):
        found = {match.end() for match in re.finditer(border, data)}
        borders.append([i for i, end in enumerate(ends, 1) if end in found])  # tokens before it
    out, first = [], 0
    while first < len(ids):
        stop = full = min(first + room, len(ids))
        for some in borders if full < len(ids) else ():
            last = some[bisect_right(some, full) - 1] if some else 0
            if first + room // 2 < last <= full:
                stop = last
                break
        out.append(ids[first:stop])
        first = stop
    return out


def dialogue(tok, turns, answer, context):
    """Ids of a dialogue in at most `context` tokens, and what was done to it, "" if nothing.

    The oldest turns go first. Where the last ones don't fit either, the end is cut.
    """
    whole, tail = tok.render([*turns, ("assistant", answer)]), tok.render_answer(answer)
    if len(whole) <= context:
        return whole, ""
    prompt = fit(tok, turns, context - len(tail))
    return (prompt + tail, "oldest turns left out") if prompt else (whole[:context], "end cut")


def text_documents(tok, texts, context):
    """Documents of at most `context` ids, each opened by <|eod|>; a Counter of what was done."""
    documents, done = [], Counter()
    for content in texts:
        if isinstance(content, str):
            parts = windows(tok, content, context - 1)
            documents += [[tok.eod, *ids] for ids in parts]
            done["windows of text"] += len(parts)
            done["empty files"] += not parts
        else:
            for turns, answer in content:
                if answer.strip():
                    ids, change = dialogue(tok, turns, answer, context)
                    documents.append(ids)
                    done[change] += 1
                    done["dialogues"] += 1
                else:
                    done["empty answers left out"] += 1
    del done[""]
    return documents, done
