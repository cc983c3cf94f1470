"""HH-RLHF's rows: every reason to drop one, bytes that come back, the real files' exact counts.

Mutations tried, each caught here: chosen and rejected swapped, blanks of answers stripped,
`diverges` not looked for, looked for after `empty`, `empty` for both answers only or without
blanks, `no_answer` of one side only, a row kept that does not come back, without a human turn, with
other fields or half a surrogate pair, bad UTF-8 replaced, deep nesting not caught, `malformed` not
counted or without its row, a cut archive read as whole, a wrong checksum not caught, an empty file
taken, the limit too high or one too low, room one token too small or too large, the shorter answer
measured, no older turn left out, the split by the whole prompt, the last human turn, the place,
Python's hash() or without the seed, unknown folders labelled helpful, known ones not known, a file
named twice read twice, one file in place before the other is written.
"""

import gzip
import json
import os
import random
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from data import hh, lines
from data.hh import REASONS, fits, load, reason_of, split, to_comparison, to_row, total
from data.lines import LIMIT, read_rows
from data.tokenizer import Tokenizer, parse, parse_prompt

PROGRAM = hh
BYTES = Tokenizer({bytes([b]): b for b in range(256)})
H, A = "\n\nHuman: ", "\n\nAssistant: "


def row(chosen, rejected, start=H + "q" + A):
    return dict(chosen=start + chosen, rejected=start + rejected)


def write(path, rows, end="\n"):
    """Rows (dicts, or bytes as they are) as a .jsonl or .jsonl.gz file."""
    data = b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + end.encode()
                    for r in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# ---------------------------------------------------------------- a row and its reason

def test_a_row_by_hand():
    start = f"{H}hi\n\nsecond{A}a\n\nb{H}He wrote Human: hi{A}"
    line, reason = to_comparison(row(" é\r\n\r\n x ", "I\nHuman: no  \n", start), "harmless", "rs")
    assert reason == "" and line == {
        "prompt": "\n\nHuman: hi\n\nsecond\n\nAssistant: a\n\nb\n\nHuman: He wrote Human: hi"
                  "\n\nAssistant:",
        "chosen": " é\r\n\r\n x ", "rejected": "I\nHuman: no  \n", "objective": "harmless",
        "tranche": "rs", "annotator": "hh"}
    assert to_row(line) == row(" é\r\n\r\n x ", "I\nHuman: no  \n", start)
    assert parse_prompt(line["prompt"]) == [("human", "hi\n\nsecond"), ("assistant", "a\n\nb"),
                                            ("human", "He wrote Human: hi")]


REJECTED = {
    "no_answer": [row("x", "x" + H + "y"), row("x" + H + "y", "x"), row("x" + H, "x" + H + "z"),
                  dict(chosen=H + "q", rejected=H + "q")],
    # a naive cut by the length of chosen's prompt would leave ' zz' as the worse answer
    "diverges": [dict(chosen=f"{H}A{A}xx{H}B{A}y", rejected=f"{H}A{A}zzzz zzzz zzzz zz"),
                 dict(chosen=f"{H}A{A}x{H}B{A}y", rejected=f"{H}A{A}x{H}C{A}y"),
                 dict(chosen=f"{H}A{A}", rejected=f"{H}B{A}"),
                 dict(chosen=f"{H}A{H}B{A}y", rejected=f"{H}A{A}B{A}z")],
    "empty": [row("", "x"), row("x", ""), row(" \n\t", "x"), row("", ""),
              dict(chosen=f"{H}q\n\nAssistant:", rejected=f"{H}q{A}x")],
    "identical": [row("x", "x"), row("x\n\ny ", "x\n\ny ")],
}


@pytest.mark.parametrize("reason, bad", [(k, r) for k, rows in REJECTED.items() for r in rows])
def test_a_row_has_one_reason(reason, bad):
    assert to_comparison(bad) == (None, reason)


def test_answers_that_differ_a_little_are_two():
    for chosen, rejected in (("x", "x "), ("x", "X"), ("é", "e\u0301"), ("x\n", "x")):
        line, reason = to_comparison(row(chosen, rejected))
        assert not reason and (line["chosen"], line["rejected"]) == (chosen, rejected)


@pytest.mark.parametrize("start", [
    f"{H}a{H}b{A}", f"{H}a{A}x{A}", f"{H}a{A}{H}b{H}c{A}", f"{A}hello{H}b{A}", f"{H}{A}",
    f"{H}a\n{A}"])
def test_turns_stay_as_they_are_written(start):
    """The same speaker twice, an empty turn before the last, an assistant that begins."""
    line, reason = to_comparison(row("x", "y", start))
    assert not reason and line["prompt"] + " " == start and to_row(line) == row("x", "y", start)
    assert parse_prompt(line["prompt"]) == parse(start)[:-1]


@pytest.mark.parametrize("bad, words", [
    (dict(chosen=H + "q" + A + "x"), "no field 'rejected'"),
    (dict(row("x", "y"), prompt="q"), "'prompt'.* no other"),
    (dict(row("x", "y"), chosen=["x"]), "'chosen' must be text, not list"),
    (dict(row("x", "y"), rejected=None), "'rejected' must be text, not NoneType"),
    (dict(chosen="x", rejected="y"), "'chosen': a dialogue must begin"),
    (dict(chosen=A + "x", rejected=A + "y"), "no human turn"),
    (row("x", "y", "\n\nHuman:q" + A), "a blank must follow"),
    (row("\ud800", "y"), "half of a surrogate"),
    (row("x", "y" * LIMIT), "'rejected' has 1,000,023 characters, over the limit of 1,000,000"),
])
def test_what_is_malformed(bad, words):
    with pytest.raises(ValueError, match=words):
        to_comparison(bad)


def test_a_long_text_below_the_limit():
    longest = "y" * (LIMIT - len(H + "q" + A))
    assert to_comparison(row("x", longest))[0]["rejected"] == longest


def test_random_rows_come_back_or_have_their_reason():
    """Dialogues made from turns, damaged in a known way; nothing is carried from row to row."""
    rng, seen = random.Random(0), Counter()
    words = ["a", "é", "\n", "\n\n", "Human:", " ", "\r\n", "x y", "\u2028"]
    for _ in range(3000):
        texts = ["".join(rng.choices(words, k=rng.randint(1, 5))) + "." for _ in range(7)]
        start = "".join(rng.choice((H, A)) + t for t in texts[:rng.randint(0, 4)]) + H + texts[4]
        good, bad = (rng.choice((texts[5], texts[6], "", " ")) for _ in range(2))
        other = start + rng.choice(["", "", "", "", "!"])
        ends = [rng.choice(["", "", "", "", H + "and?"]) for _ in range(2)]
        if any(h in t for t in texts for h in ("\n\nHuman:", "\n\nAssistant:")):
            continue
        made = dict(chosen=start + A + good + ends[0], rejected=other + A + bad + ends[1])
        expected = ("no_answer" if any(ends) else "diverges" if other != start else
                    "empty" if not (good.strip() and bad.strip()) else
                    "identical" if good == bad else "")
        line, reason = to_comparison(made)
        seen[reason] += 1
        assert reason == expected and (line is None) == bool(reason)
        if line:
            assert to_row(line) == made
            assert (line["prompt"], line["chosen"], line["rejected"]) == (start + A[:-1], good, bad)
    assert set(seen) == {"", "no_answer", "diverges", "empty", "identical"}
    assert min(seen.values()) > 50


# ---------------------------------------------------------------- Anthropic's files

def test_the_real_files(data_dir):
    """The exact counts, and each row's bytes from its line."""
    lines, counts = load([data_dir / "hh-rlhf"])
    harmless, helpful = counts.values()
    nothing = dict.fromkeys(REASONS, 0)
    assert helpful == dict(objective="helpful", tranche="base", rows=2354, kept=2339,
                           **{**nothing, "diverges": 9, "empty": 4, "identical": 2})
    assert harmless == dict(objective="harmless", tranche="base", rows=2312, kept=2303,
                            **{**nothing, "diverges": 5, "empty": 4})
    assert total(counts) == dict(rows=4666, kept=4642, **{
        **nothing, "diverges": 14, "empty": 8, "identical": 2})
    assert Counter(x["objective"] for x in lines) == dict(helpful=2339, harmless=2303)
    written = [json.dumps(to_row(line), ensure_ascii=False).encode() + b"\n" for line in lines]
    raw = [x for path in counts for x in gzip.open(path)]
    kept = [x for x in raw if to_comparison(json.loads(x))[0]]
    assert written == kept and len(raw) == 4666
    longer = Counter(x["objective"] for x in lines if len(x["chosen"]) > len(x["rejected"]))
    assert [round(longer[k] / n, 2) for k, n in (("helpful", 2354), ("harmless", 2312))] == [.59,
                                                                                            .44]


def test_the_real_files_in_a_context(data_dir):
    """By bytes: a row is too long if and only if its last human turn and its answer are."""
    lines, _ = load([data_dir / "hh-rlhf/helpful-base"])
    kept, counts = load([data_dir / "hh-rlhf/helpful-base"], tok=BYTES, context=1000)
    expected = [x for x in lines if len(last_human(x).encode()) + 6 + max(
        len(x[s].encode()) for s in hh.SIDES) <= 1000]
    assert kept == expected and 50 < total(counts)["too_long"] == 2339 - len(kept) < 500


def last_human(line):
    """The last human turn and all after it, each turn's two marks as characters."""
    turns = parse_prompt(line["prompt"])
    last = max(i for i, (role, _) in enumerate(turns) if role == "human")
    return "..".join(text for _, text in turns[last:])


def test_the_real_files_split(data_dir):
    lines, _ = load([data_dir / "hh-rlhf"])
    train, test = split(lines, 0.1)
    firsts = [{parse_prompt(x["prompt"])[0][1] for x in side} for side in (train, test)]
    assert not firsts[0] & firsts[1] and len(train) + len(test) == 4642
    assert 0.08 < len(test) / 4642 < 0.12


# ---------------------------------------------------------------- the context

def test_room_by_hand():
    """Bytes: <|eod|> <|human|> abc <|eot|> <|assistant|> are 7, 'xy' <|eot|> <|eoc|> 4 more."""
    for chosen, rejected in (("xy", "z"), ("z", "xy")):
        line = to_comparison(row(chosen, rejected, f"{H}abc{A}"))[0]
        assert [fits(BYTES, line, n) for n in (10, 11, 12, 1, 0, -5)] == [False, True, True] + [
            False] * 3


def test_the_oldest_turns_make_room():
    """Only the last human turn and the longer answer count: 11 tokens again."""
    line = to_comparison(row("xy", "z", f"{H}{'old ' * 9}{A}{'older' * 9}{H}abc{A}"))[0]
    assert [fits(BYTES, line, n) for n in (10, 11)] == [False, True]


def test_too_long_is_the_last_reason(tmp_path):
    path = write(tmp_path / "helpful-base/a.jsonl", [
        row("x" * 99, "y"), row("x" * 99, "x" * 99), row("x" * 99, " "), row("x", "y")])
    lines, counts = load([path], tok=BYTES, context=50)
    assert [to_row(x) for x in lines] == [row("x", "y")]
    assert {k: v for k, v in total(counts).items() if v} == dict(
        rows=4, kept=1, too_long=1, identical=1, empty=1)


# ---------------------------------------------------------------- files

def test_folders_tell_objective_and_tranche(tmp_path):
    names = {"helpful-base": ("helpful", "base"), "helpful-rejection-sampled": ("helpful", "rs"),
             "helpful-online": ("helpful", "online"), "harmless-base": ("harmless", "base"),
             "mine": ("harmless", "base")}
    for i, name in enumerate(names):
        write(tmp_path / "all" / name / f"train.jsonl{'.gz' * (i % 2)}", [row(name, str(i))])
        (tmp_path / "all" / name / "README.md").write_text("no rows here")
    lines, counts = load([tmp_path / "all"], objective="harmless")
    assert {x["chosen"]: (x["objective"], x["tranche"]) for x in lines} == names
    assert [c["rows"] for c in counts.values()] == [1] * 5 and list(counts) == sorted(counts)
    inner = tmp_path / "all/mine/train.jsonl"
    assert load([inner, tmp_path / "all"], "harmless")[1][str(inner)] == load(
        [inner], "harmless")[1][str(inner)]
    again = load([tmp_path / "all/mine", inner, tmp_path / "all"], objective="harmless")[0]
    assert len(again) == 5                                   # a file named twice is read once
    with pytest.raises(ValueError, match="mine/train.jsonl: .*--objective"):
        load([tmp_path / "all"])


GOOD = json.dumps(row("x", "y")).encode()
BAD = {
    "json": (b'{"chosen": "a" "b"}', "no JSON at column 16"), "blank": (b"", "no JSON at column 1"),
    "list": (b"[1]", "must be a JSON object, not list"), "number": (b"3", "not int"),
    "keys": (b'{"chosen": "a", "reject": "b"}', "'reject'"),
    "type": (b'{"chosen": 1, "rejected": "b"}', "'chosen' must be text, not int"),
    "utf8": (GOOD.replace(b"x", b"\xff"), "invalid start byte"),
    "cut": (GOOD[:-9], "no JSON"), "deep": (b"[" * 100_000, "recursion"),
    "5 MB": (json.dumps(row("x" * 5_000_000, "y")).encode(), "over the limit of 1,000,000"),
    "no dialogue": (b'{"chosen": "Human: a", "rejected": "b"}', "'chosen': a dialogue must begin"),
}


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_line(tmp_path, program, kind, gz):
    """One line that names file, line and reason; with --skip-bad a count."""
    bad, words = BAD[kind]
    path = write(tmp_path / f"helpful-base/my.jsonl{gz}", [GOOD, GOOD, bad, GOOD])
    code, out, err = program(path, "--out", tmp_path / "out")
    assert (code, out) == (1, "") and err.startswith(f"error: {path} line 3: ")
    assert words in err and err.count("\n") == 1 and len(err) < 400
    assert not (tmp_path / "out").exists()
    code, out, err = program(path, "--skip-bad", "--json", "--out", tmp_path / "out")
    report = json.loads(out)
    assert code == 0 and {k: v for k, v in report["total"].items() if v} == dict(
        rows=4, kept=3, malformed=1)
    assert report["train"] + report["test"] == 3


@pytest.mark.parametrize("where", ["middle", "trailer", "sum", "garbage"])
def test_a_damaged_archive(tmp_path, program, where):
    """The rows before the cut are kept, the cut is one malformed row; without --skip-bad none."""
    rng = random.Random(1)
    rows = [row(str(rng.random()), str(rng.random())) for _ in range(3000)]
    path = write(tmp_path / "helpful-base/my.jsonl.gz", rows)
    whole = path.read_bytes()
    damaged = {"middle": whole[:len(whole) // 2], "trailer": whole[:-4],
               "sum": whole[:-8] + b"1234" + whole[-4:], "garbage": b"<html>no such file</html>"}
    path.write_bytes(damaged[where])
    kept = {"middle": zlib.decompressobj(31).decompress(damaged["middle"]).count(b"\n"),
            "garbage": 0}.get(where, 3000)
    code, out, err = program(path, "--out", tmp_path / "out")
    assert (code, out) == (1, "") and f"{path} line {kept + 1}: the archive is cut" in err
    lines, counts = load([path], skip_bad=True)
    assert [to_row(x) for x in lines] == rows[:kept] and kept != 1500
    assert {k: v for k, v in total(counts).items() if v} == {
        k: v for k, v in dict(rows=kept + 1, kept=kept, malformed=1).items() if v}


def test_other_bad_input(tmp_path, program):
    path = write(tmp_path / "helpful-base/my.jsonl", [GOOD])
    empty = write(tmp_path / "helpful-base2/none.jsonl", [])
    (tmp_path / "nothing").mkdir()
    (tmp_path / "tok").write_text("not a tokenizer")
    for argv, words in (
            ([tmp_path / "no.jsonl"], "no.jsonl: no such file"),
            ([tmp_path / "nothing"], "nothing: no .jsonl or .jsonl.gz file"),
            ([empty, "--objective", "helpful"], "none.jsonl: the file is empty"),
            ([empty, "--objective", "helpful", "--skip-bad", "--out", tmp_path / "o"],
             "no comparison to write"),
            ([empty], "--objective"), ([path, "--test", "1.5"], "--test 1.5"),
            ([path, "--test", "nan"], "--test nan"),
            ([path, "--tokenizer", tmp_path / "tok"], "tok line 1: expected 'base64 rank'"),
            ([path, "--out", path], "my.jsonl")):
        code, out, err = program(*argv)
        assert (code, out) == (1, "") and words in err and err.count("\n") == 1, err
    for argv in ([], [path, "--bogus"], [path, "--objective", "honest"], [path, "--test", "x"]):
        code, out, err = program(*argv)
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert path.read_bytes() == GOOD + b"\n"


def test_a_generator_of_rows(tmp_path):
    """Any check may be handed in; lines end where \\n does, not at U+2028."""
    path = write(tmp_path / "a.jsonl", ['{"a": "\u2028\u0085"}'.encode(), b'{"a": 2}'], "\r\n")
    counts = dict(rows=0, malformed=0)
    assert list(read_rows(path, lambda r: r["a"], counts)) == ["\u2028\x85", 2]
    assert counts == dict(rows=2, malformed=0)


# ---------------------------------------------------------------- train and test

def dialogues(count):
    """Lines with `count` first prompts, several each, with other turns after them."""
    return [to_comparison(row("x", "y", f"{H}first {i % count}{A}a{H}more {i}{A}"))[0]
            for i in range(4 * count)]


def test_no_first_prompt_is_on_both_sides():
    lines = dialogues(500)
    train, test = split(lines, 0.2)
    firsts = [{hh.first_prompt(x) for x in side} for side in (train, test)]
    assert not firsts[0] & firsts[1] and len(firsts[0] | firsts[1]) == 500
    assert len(test) == 4 * len(firsts[1]) and 70 < len(firsts[1]) < 130      # 100 +- 9
    assert [x for x in lines if x in train] == train


def test_the_split_is_a_function_of_prompt_and_seed():
    lines = dialogues(200)
    train, test = split(lines, 0.3, seed=1)
    mixed = random.Random(0).sample(lines, len(lines))
    for side, again in zip((train, test), split(mixed, 0.3, seed=1)):
        assert sorted(map(str, side)) == sorted(map(str, again))
    assert split(lines[:100], 0.3, seed=1)[1] == [x for x in test if x in lines[:100]]
    other = split(lines, 0.3, seed=2)[1]
    both = sum(x in test for x in other) / len(other)
    assert other != test and 0.1 < both < 0.5                                 # 0.3 by chance
    assert split(lines, 0)[1] == [] and split(lines, 1)[0] == []


def test_the_split_is_fixed_forever():
    """Another hash would mix the test rows of an older run into training."""
    assert hh.uniform("split", 0, "hello") == 280987231509320 / 2**48
    draws = sorted(hh.uniform(1, i) for i in range(2000))
    assert max(abs(u - (i + .5) / 2000) for i, u in enumerate(draws)) < 1.63 / 2000**.5  # KS, 1%


# ---------------------------------------------------------------- the program

def test_the_program(tmp_path, program):
    write(tmp_path / "in/helpful-base/a.jsonl.gz", [row(str(i), "y", f"{H}{i}{A}")
                                                    for i in range(50)] + [row("x", "x")])
    write(tmp_path / "in/harmless-base/a.jsonl", [row("", "y"), row("x", "z")])
    code, out, err = program(tmp_path / "in", "--out", tmp_path / "out", "--test", "0.2")
    assert (code, err) == (0, "")
    head, *body = [x.split() for x in out.splitlines()]
    assert head == ["objective", "tranche", "rows", "kept", *REASONS, "file"]
    assert [x[2:10] for x in body[:2]] == [["2", "1", "0", "0", "0", "1", "0", "0"],
                                           ["51", "50", "0", "0", "0", "0", "1", "0"]]
    assert body[2][:9] == ["total", "53", "51", "0", "0", "0", "1", "1", "0"]
    files = {p.name: [json.loads(x) for x in p.open()] for p in (tmp_path / "out").iterdir()}
    lines, _ = load([tmp_path / "in"])
    assert (files["train.jsonl"], files["test.jsonl"]) == split(lines, 0.2)
    assert files.keys() == {"train.jsonl", "test.jsonl"}
    assert body[3][1] == str(len(files["train.jsonl"])) and body[3][-3] == str(
        len(files["test.jsonl"]))


def test_the_program_in_a_shell(tmp_path):
    """From any folder, and the lines are what the preference model reads."""
    from preference import read_comparisons
    write(tmp_path / "my.jsonl", [row(str(i), "y\u2028", f"{H}{i}{A}") for i in range(9)])
    (tmp_path / "bytes.tiktoken").write_text(BYTES.dumps())
    done = subprocess.run(
        [sys.executable, Path(hh.__file__), "my.jsonl", "--objective", "harmless", "--out", "out",
         "--tokenizer", "bytes.tiktoken", "--context", "12", "--test", "0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "9 comparisons in train.jsonl, 0 in test.jsonl" in done.stdout
    read = read_comparisons(tmp_path / "out/train.jsonl")
    assert [x["prompt"] for x in read] == [[("human", str(i))] for i in range(9)]
    assert {(x["rejected"], x["objective"]) for x in read} == {("y\u2028", "harmless")}


def test_nothing_is_half_written(tmp_path, monkeypatch):
    """A write that fails in the second file leaves both as they were, and nothing beside them."""
    files = {tmp_path / "a": [1], tmp_path / "b": [2]}
    lines.write_lines(files)

    def full(number):
        raise OSError(28, "No space left on device")

    calls, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: full(n) if calls else calls.append(sync(n)))
    with pytest.raises(OSError):
        lines.write_lines({path: [7, 8] for path in files})
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == dict(a="1\n", b="2\n")


def test_reasons_are_those_that_are_told():
    assert all(f"    {reason:<11} " in hh.__doc__ for reason in REASONS)
    assert reason_of([("assistant", "x")], [("assistant", "y")]) == ""
