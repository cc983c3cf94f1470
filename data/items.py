"""Benchmark items from their published files: choices, cloze, TruthfulQA, programs (HH 4.6, 5.3).

    ARC's form      {"query": "Question: Which ...?", "choices": ["a", "b"], "gold": 0} a line
    LAMBADA's form  {"context": "... I don't care about", "continuation": "signs"} a line
    TruthfulQA.csv  columns Question, Best Answer, Incorrect Answers; MC1: the best answer against
                    the incorrect ones, which ";" separates (Lin et al. 2022)
    HumanEval       {"task_id", "prompt", "entry_point", "canonical_solution", "test"} a line

Each reader returns (items, counts), where rows = used + the other reasons' sum:

    repeated      two of its choices, or the whole item and an earlier one, are the same text
    empty         a choice, the query, the context or the continuation has nothing but blanks
    few           fewer than two choices are left

and of TruthfulQA also answers = answers_used + answers_repeated + answers_empty, of what stands
between semicolons. A malformed line is a ValueError that names file, line and field.

    python data/items.py arc_easy.jsonl lambada_openai.jsonl TruthfulQA.csv     # look at them
"""

import csv
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # `python data/items.py` looks for modules beside itself only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.lines import lines_of, read_rows, text_of
from data.program import flags, outcome
from data.tokenizer import read_text

PROGRAM = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
COLUMNS = ("Question", "Best Answer", "Incorrect Answers")


# ---------------------------------------------------------------- one item

def choice_item(row):
    """A line in ARC's form as an item. ValueError naming the field that is malformed."""
    query, choices, gold = text_of(row, "query"), row.get("choices"), row.get("gold")
    if not isinstance(choices, list):
        raise ValueError(f"field 'choices' must be a list, not {type(choices).__name__}")
    choices = [text_of({f"choices[{i}]": text}, f"choices[{i}]") for i, text in enumerate(choices)]
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f"field 'gold' must be a number of one of {len(choices)} choices, from 0: "
                         f"found {str(gold)[:40]!r}")
    return dict(query=query.strip(), choices=[text.strip() for text in choices], gold=gold)


def cloze_item(row):
    """A line in LAMBADA's form as an item, one blank between its texts left out."""
    return dict(context=text_of(row, "context").rstrip(),
                continuation=text_of(row, "continuation").strip())


def program_item(row):
    """A line of HumanEval as an item: its five fields, blanks as they are."""
    item = {field: text_of(row, field) for field in PROGRAM}
    if not item["entry_point"].isidentifier():
        raise ValueError(f"field 'entry_point' must be a name: {item['entry_point'][:40]!r}")
    return item


def truth_item(row, counts):
    """A row of TruthfulQA.csv as a choice item, its best answer first. The answers are counted."""
    best, choices = row["Best Answer"].strip(), []
    for text in (best, *row["Incorrect Answers"].split(";")):
        counts["answers"] += 1
        text = text.strip()
        reason = "used" if text and text not in choices else "repeated" if text else "empty"
        counts[f"answers_{reason}"] += 1
        if reason == "used":
            choices.append(text)
    # Without a best answer the first choice would be a wrong one: `reason_of` sees the blank.
    choices = choices if best else ["", *choices]
    return dict(query=f"Question: {row['Question'].strip()}", choices=choices, gold=0)


def reason_of(item, seen):
    """Why an item is left out, "" if it is not; seen: the earlier ones."""
    texts = item.get("choices", [v for k, v in item.items() if k in ("context", "continuation",
                                                                     "prompt", "test")])
    if not all(text.strip() for text in (item.get("query", "-"), *texts)):
        return "empty"
    if len(texts) < 2:
        return "few"
    repeated = "choices" in item and len({*texts}) < len(texts)
    return "repeated" if repeated or json.dumps(item) in seen else ""


def sift(found, counts):
    """The items of an iterable that are used; counts["used"] and the reasons grow."""
    items, seen = [], set()
    for item in found:
        reason = reason_of(item, seen)
        counts[reason or "used"] += 1
        if not reason:
            items.append(item)
            seen.add(json.dumps(item))
    return items


# ---------------------------------------------------------------- the files

def nothing():
    return dict.fromkeys(("rows", "used", "repeated", "empty", "few"), 0)


def read_arc(path):
    """(items {"query", "choices", "gold"}, counts) of a file in ARC's form."""
    counts = nothing()
    return sift(read_rows(path, choice_item, counts), counts), counts


def read_lambada(path):
    """(items {"context", "continuation"}, counts) of a file in LAMBADA's form."""
    counts = nothing()
    return sift(read_rows(path, cloze_item, counts), counts), counts


def read_humaneval(path):
    """(items with the fields of PROGRAM, counts) of HumanEval.jsonl or HumanEval.jsonl.gz."""
    counts = nothing()
    return sift(read_rows(path, program_item, counts), counts), counts


def read_truthfulqa(path):
    """(items {"query", "choices", "gold": 0}, counts) of TruthfulQA.csv."""
    counts = {**nothing(), **dict.fromkeys(
        ("answers", "answers_used", "answers_repeated", "answers_empty"), 0)}

    def rows():
        lines = read_text(path).splitlines(keepends=True)
        reader = csv.DictReader(lines, strict=True)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} line 1: no column {missing[0]!r}: is it TruthfulQA.csv?")
        try:
            for row in reader:
                lacks = [c for c in COLUMNS if row[c] is None]
                if lacks or None in row:
                    what = f"no field {lacks[0]!r}" if lacks else "more fields than columns"
                    raise ValueError(f"{path} line {reader.line_num}: {what}")
                counts["rows"] += 1
                yield truth_item(row, counts)
        except csv.Error as error:
            number = min(reader.line_num + 1, len(lines))            # counted after it is read
            raise ValueError(f"{path} line {number}: {error}") from None
        if not counts["rows"]:
            raise ValueError(f"{path}: no row below its columns")

    return sift(rows(), counts), counts


def read_any(path):
    """(items, counts) of a file by its form: a .csv is TruthfulQA's, else its first line tells."""
    if Path(path).suffix == ".csv":
        return read_truthfulqa(path)
    first = next(iter(lines_of(Path(path))), b"") or b""
    for field, read in ((b'"choices"', read_arc), (b'"continuation"', read_lambada)):
        if field in first:
            return read(path)
    return read_humaneval(path)


# ---------------------------------------------------------------- the program

def run(args):
    for path in args.paths:
        items, counts = read_any(path)
        print(f"{path}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        for item in items[:args.show]:
            print("  " + json.dumps(item, ensure_ascii=False)[:400])


def main():
    parser = flags(__doc__)
    parser.add_argument("paths", nargs="+", metavar="FILE", help="files of items")
    parser.add_argument("--show", type=int, default=1, help="items to print (default %(default)s)")
    outcome(run, parser.parse_args())


if __name__ == "__main__":
    main()
