"""Readers of benchmark files: the form of items, counts that add up, bad lines by name.

Proved alive by: a gold one past the choices, and True as one; a repeated answer that is kept, a
reason that is not counted, one reason for another, no best answer, an item twice, a row with more
fields than columns, a line number one too low.
"""

import gzip
import json

import pytest

from data import items
from data.items import read_any, read_arc, read_humaneval, read_lambada, read_truthfulqa

PROGRAM = items
ARC = dict(query="Question: Which?", choices=["a", "b", "c"], gold=1)
LAMBADA = dict(context="He saw the", continuation="fox")
CODE = dict(task_id="t/0", prompt="def f(x):\n", entry_point="f",
            canonical_solution="    return x\n", test="def check(f):\n    assert f(1) == 1\n")
HEAD = "Type,Question,Best Answer,Incorrect Answers\n"
REASONS = ("used", "repeated", "empty", "few")


def write(path, rows):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows))
    return path


def adds_up(counts):
    return counts["rows"] == sum(counts[k] for k in REASONS)


def test_arc(tmp_path):
    rows = [ARC, dict(ARC, choices=["a", " a ", "b"]), dict(ARC, choices=["a", " "]), ARC,
            dict(ARC, choices=["a"], gold=0), dict(ARC, query=" "), dict(ARC, gold=2),
            dict(ARC, query=" Question: Who?\n", choices=[" x", "y\n"], other=3)]
    found, counts = read_arc(write(tmp_path / "x.jsonl", rows))
    assert found == [ARC, dict(ARC, gold=2),
                     dict(query="Question: Who?", choices=["x", "y"], gold=1)]
    assert counts == dict(rows=8, used=3, repeated=2, empty=2, few=1) and adds_up(counts)


@pytest.mark.parametrize("bad, told", [
    ('{"query": "q"}', "field 'choices' must be a list, not NoneType"),
    (dict(choices=["a", "b"], gold=0), "no field 'query'"),
    (dict(ARC, choices="abc"), "'choices' must be a list, not str"),
    (dict(ARC, choices=["a", 3]), r"field 'choices\[1\]' must be text, not int"),
    (dict(ARC, choices=["a", None]), r"field 'choices\[1\]' must be text"),
    (dict(ARC, gold=3), "field 'gold' must be .* one of 3 choices"),
    (dict(ARC, gold=-1), "field 'gold'"), (dict(ARC, gold=True), "field 'gold'"),
    (dict(ARC, gold="1"), "field 'gold'"), (dict(ARC, query=["q"]), "field 'query' must be text"),
    ("{", "no JSON at column"), ("[]", "must be a JSON object")])
def test_bad_lines_are_named(tmp_path, bad, told):
    with pytest.raises(ValueError, match=rf"x\.jsonl line 2: .*{told}") as error:
        read_arc(write(tmp_path / "x.jsonl", [ARC, bad]))
    assert "\n" not in str(error.value)


def test_lambada(tmp_path):
    rows = [LAMBADA, dict(context=" He saw the \n", continuation="\n\nfox "), LAMBADA,
            dict(context="", continuation="a"), dict(context="b", continuation="  ")]
    found, counts = read_lambada(write(tmp_path / "x.jsonl", rows))
    assert found == [LAMBADA, dict(context=" He saw the", continuation="fox")]
    assert counts == dict(rows=5, used=2, repeated=1, empty=2, few=0)
    with pytest.raises(ValueError, match="line 1: no field 'continuation'"):
        read_lambada(write(tmp_path / "y.jsonl", [dict(context="x")]))
    with pytest.raises(ValueError, match="y.jsonl: the file is empty"):
        read_lambada(write(tmp_path / "y.jsonl", []))


def test_humaneval(tmp_path):
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        file.write(json.dumps(dict(CODE, more=1)) + "\n" + json.dumps(CODE) + "\n")
    found, counts = read_humaneval(tmp_path / "x.jsonl.gz")
    assert found == [CODE] and counts == dict(rows=2, used=1, repeated=1, empty=0, few=0)
    for bad, told in ((dict(CODE, entry_point="f()"), "field 'entry_point' must be a name"),
                      ({k: v for k, v in CODE.items() if k != "test"}, "no field 'test'"),
                      (dict(CODE, prompt=3), "field 'prompt' must be text")):
        with pytest.raises(ValueError, match=f"y.jsonl line 1: {told}"):
            read_humaneval(write(tmp_path / "y.jsonl", [bad]))


def test_truthfulqa(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(HEAD + 'A,Why?,It is,"No; Never;; no;No ;It is;"\n'
                    'A,"Who,\nthen?",Me," You"\nA,What?,,Me; You\nA,When?,Now,"; ;"\n'
                    'A,Where?,Here,Here\n', encoding="utf-8-sig")
    found, counts = read_truthfulqa(path)
    assert found == [dict(query="Question: Why?", choices=["It is", "No", "Never", "no"], gold=0),
                     dict(query="Question: Who,\nthen?", choices=["Me", "You"], gold=0)]
    assert {k: counts[k] for k in ("rows", *REASONS)} == dict(rows=5, used=2, repeated=0, empty=1,
                                                             few=2)
    assert (counts["answers"], counts["answers_used"], counts["answers_repeated"],
            counts["answers_empty"]) == (8 + 2 + 3 + 4 + 2, 4 + 2 + 2 + 1 + 1, 3, 2 + 1 + 3)


@pytest.mark.parametrize("text, told", [
    ("Type,Question,Best Answer\nA,b,c\n", "x.csv line 1: no column 'Incorrect Answers'"),
    ("", "x.csv line 1: no column 'Question'"), (HEAD, "x.csv: no row"),
    (HEAD + "A,b\n", "x.csv line 2: no field 'Best Answer'"),
    (HEAD + "A,b,c,d\nA,b,c,d,e\n", "x.csv line 3: more fields than columns"),
    (HEAD + 'A,b,"c"d,e\n', "x.csv line 2: ")])
def test_a_bad_table_is_named(tmp_path, text, told):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=told):
        read_truthfulqa(tmp_path / "x.csv")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(HEAD.encode() + b"A,\xff,b,c\n")
    with pytest.raises(ValueError, match="x.csv line 2: not UTF-8"):
        read_truthfulqa(tmp_path / "x.csv")


def test_the_program_tells_the_form_by_the_file(tmp_path, program):
    files = [write(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate((ARC, LAMBADA, CODE))]
    (tmp_path / "3.csv").write_text(HEAD + "A,b,c,d\n")
    assert [read_any(f)[0] for f in files] == [[ARC], [LAMBADA], [CODE]]
    code, told, _ = program(*files, tmp_path / "3.csv")
    assert code == 0 and told.count("1 rows, 1 used, 0 repeated") == 4 and '"gold": 1' in told
    code, told, error = program(write(tmp_path / "bad.jsonl", ['{"choices": 1}']))
    assert code == 1 and not told and error.startswith("error: ") and error.count("\n") == 1


def test_the_real_files(data_dir):
    """Their sizes; every counted row is used or has a reason."""
    for name, read, rows, used in (
            ("arc/arc_easy.jsonl", read_arc, 2376, 2369),
            ("arc/arc_challenge.jsonl", read_arc, 1172, 1168),
            ("lambada/lambada_openai.jsonl", read_lambada, 5153, 5151),
            ("truthfulqa/TruthfulQA.csv", read_truthfulqa, 817, 817),
            ("humaneval/HumanEval.jsonl.gz", read_humaneval, 164, 164)):
        if not (data_dir / name).exists():
            pytest.skip(f"no {name} in NANOHH_DATA")
        found, counts = read(data_dir / name)
        assert (counts["rows"], counts["used"], len(found)) == (rows, used, used), (name, counts)
        assert adds_up(counts)
