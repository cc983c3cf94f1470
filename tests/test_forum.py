"""Votes to scores, scores to comparisons, counts that add up on three levels.

Mutations tried, each caught here: floor and ceil for round, log of votes and of 2 + votes, the
natural logarithm, nothing for accepted, accepted on top of -1, 0 below zero votes, the lower score
chosen, equal scores kept, pairs in the order of the answers, the best answer first, no seed in the
order, no limit, a title twice, a title with one line break, no title, HH text wrapped in a human
turn, headers accepted where title and question meet or in an answer, questions of two sites or
with two texts joined, objective dropped, an answer that comes twice kept, booleans as votes.
"""

import gzip
import json
import math
import random
from collections import Counter

import pytest

from data import forum
from data.forum import COUNTS, load, pairs_of, prompt_of, score, to_answer

PROGRAM = forum
H, A = "\n\nHuman: ", "\n\nAssistant:"


def answer(text, votes=0, accepted=False, question_id="1", **more):
    return {"site": "s", "question_id": question_id, "title": "", "question": "q",
            "answer_id": "7", "answer": text, "answer_score": votes, "accepted": accepted, **more}


@pytest.fixture
def lines_of(tmp_path):
    """Writes rows into a file and loads it: (lines, counts)."""
    def call(rows, **options):
        path = tmp_path / "qa.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return load([path], **options)
    return call


def adds_up(counts):
    """Whether each level's reasons sum to its first count."""
    return all(counts[first] == sum(counts[r] for r in rest) for first, *rest in COUNTS.values())


# ---------------------------------------------------------------- the score

def test_scores_by_hand():
    """2^1.5 - 1 = 1.83 and 2^2.5 - 1 = 4.66 and 2^3.5 - 1 = 10.3: there the score steps."""
    table = {0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 10: 3, 11: 4, 21: 4, 22: 5, 1000: 10}
    for votes, points in table.items():
        assert score(votes) == points and score(votes, True) == points + 1
    assert score(-1) == score(-50) == score(-1, True) == -1


def test_scores_step_where_the_rounding_does():
    """No integer is at a half: score s holds for 2^(s - 1/2) < 1 + votes < 2^(s + 1/2)."""
    for votes in range(5000):
        s = score(votes)
        assert type(s) is int and 2 ** (2 * s - 1) < (1 + votes) ** 2 < 2 ** (2 * s + 1)


# ---------------------------------------------------------------- the prompt

@pytest.mark.parametrize("title, question, prompt", [
    ("T", "a\n\nb", f"{H}T\n\na\n\nb{A}"), ("", "q", f"{H}q{A}"), (" ", "q", f"{H}q{A}"),
    ("T", "is T here", f"{H}is T here{A}"), ("T", "", f"{H}T{A}"), ("T", " \n", f"{H}T{A}"),
    ("", " ", ""), ("T", f"{H}q{A}", f"{H}q{A}"),
    ("T", f"{H}q{A} x{H}r{A}", f"{H}q{A} x{H}r{A}"), ("T", "Human: q", None),
    ("", "Human: q", f"{H}Human: q{A}"), ("T", f"q{A}", None), ("T", f"{A}", None),
    ("", f"x{H}y", None), (f"t{A}", "q", None)])
def test_prompts_by_hand(title, question, prompt):
    """None: a role header inside, also where title and question meet."""
    if prompt is None:
        with pytest.raises(ValueError, match="role header"):
            prompt_of(title, question)
        assert to_answer(answer("x", title=title, question=question))[3] == "header"
    else:
        assert prompt_of(title, question) == prompt


# ---------------------------------------------------------------- comparisons

def test_a_question_by_hand(lines_of):
    """Scores: a 4 (11 votes), b 1 (0, accepted), c 1 (1 vote), d -1."""
    rows = [answer("a", 11, title="T"), answer("b", 0, True, title="T"), answer("c", 1, title="T"),
            answer("d", -3, title="T")]
    lines, counts = lines_of(rows, per_question=9)
    assert {(x["chosen"], x["rejected"]) for x in lines} == {
        ("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")} and len(lines) == 5
    assert {k: v for k, v in counts.items() if v} == dict(
        rows=4, used=4, questions=1, with_pairs=1, pairs=6, kept=5, equal_scores=1)
    for line in lines:
        assert {**line, "chosen": "", "rejected": ""} == {
            "prompt": "\n\nHuman: T\n\nq\n\nAssistant:", "chosen": "", "rejected": "",
            "objective": "helpful", "tranche": "forum", "annotator": "votes"}


def test_every_reason(lines_of):
    rows = [answer("x", 5), answer("y", 1), answer("x", 0), answer(" ", 3), answer(f"n{A} x"),
            answer("z", 0, question=f"{H}q"), answer("z", 1, question=" "),    # no prompt in these
            answer("one", 0, question_id="2"), answer("e", 2, question_id=3),
            answer("f", 3, question_id="3"),
            answer("x", 9, site="t"), answer("x", 9, question="edited")]
    lines, counts = lines_of(rows)
    assert [(x["chosen"], x["rejected"]) for x in lines] == [("x", "y")] and adds_up(counts)
    assert counts == dict(rows=12, used=7, malformed=0, header=2, empty=2, identical=1,
                          questions=5, with_pairs=1, single=3, unpaired=1,
                          pairs=2, kept=1, equal_scores=1, surplus=0)


def test_hh_questions_and_objectives(lines_of):
    """A dialogue is the prompt as it is; `objective` is kept, and parts what differs in it."""
    start = f"{H}hi{A} hello{H}how?{A}"
    rows = [dict(answer(t, v, objective=o), question=start) for t, v, o in (
        ("a", 3, "harmless"), ("b", 0, "harmless"), ("c", 9, "helpful"))]
    for row in rows:
        del row["title"], row["site"], row["answer_id"]
    lines, counts = lines_of(rows)
    assert lines == [dict(prompt=start, chosen="a", rejected="b", objective="harmless",
                          tranche="forum", annotator="votes")]
    assert counts["single"] == 1


def test_at_most_so_many_of_a_question(lines_of):
    """Any pair may be chosen: over 600 questions each of 10 pairs is, and no answer is always."""
    rows = [answer(f"{a}", 4 ** i, question_id=q, question=f"q {q}")
            for q in range(600) for i, a in enumerate("abcde")]
    lines, counts = lines_of(rows)
    assert adds_up(counts) and counts["kept"] == 2400 and counts["surplus"] == 3600
    assert all(line["chosen"] > line["rejected"] for line in lines)
    assert max(Counter(line["prompt"] for line in lines).values()) == 4
    drawn = Counter((line["chosen"], line["rejected"]) for line in lines)
    error = math.sqrt(600 * 0.4 * 0.6)                                     # 4 of 10: 240 +- 12
    assert len(drawn) == 10 and all(abs(n - 240) < 4 * error for n in drawn.values())
    lead = [line["chosen"] for line in lines[::4]]                         # the first of a question
    assert 150 < lead.count("e") < 330 and lead.count("b") > 20            # 240 and 60


def test_the_choice_is_a_function_of_the_seed(lines_of):
    rows = [answer(f"{q} {a}", 4 ** i, question_id=q, question=f"q {q}")
            for q in range(30) for i, a in enumerate("abcde")]
    first = lines_of(rows)[0]
    mixed = lines_of(random.Random(0).sample(rows, len(rows)))[0]
    assert sorted(map(str, first)) == sorted(map(str, mixed)) and first == lines_of(rows)[0]
    other = lines_of(rows, seed=1)[0]
    assert len(first) == 120 and 20 < sum(x in first for x in other) < 80   # 48 by chance
    fewer = lines_of(rows, per_question=1)[0]
    assert fewer == first[::4]                                             # a prefix of the order
    scores = dict(a=1, b=2, c=3)
    counts = dict(pairs=0, kept=0, equal_scores=0, surplus=0)
    assert pairs_of(scores, counts, 2, 5) == pairs_of(dict(reversed(scores.items())), counts, 2, 5)
    assert counts == dict(pairs=6, kept=4, equal_scores=0, surplus=2)


def test_answers_of_a_question_in_two_files(tmp_path):
    for name, rows in (("a.jsonl", [answer("x", 3)]), ("b.jsonl.gz", [answer("y", 0)])):
        data = "".join(json.dumps(r) + "\n" for r in rows).encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    lines, counts = load([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"])
    assert len(lines) == 1 and counts["rows"] == 2


def test_real_answers(data_dir):
    """Three sites' answers; each pair's scores, read anew from the rows, differ the right way."""
    path = data_dir / "stackexchange/qa.jsonl"
    lines, counts = load([path])
    assert counts == dict(rows=2240, used=2235, malformed=0, header=0, empty=5, identical=0,
                          questions=1053, with_pairs=521, single=489, unpaired=43,
                          pairs=3054, kept=1116, equal_scores=834, surplus=1104)
    rows = [json.loads(x) for x in path.open(encoding="utf-8")]
    for line in lines:
        body = line["prompt"].removeprefix(H).removesuffix(A)
        chosen, rejected = (next(r for r in rows if r["answer"] == line[side]
                                 and body.endswith(r["question"])) for side in
                            ("chosen", "rejected"))
        assert chosen["question_id"] == rejected["question_id"]
        assert chosen["title"] in body
        assert chosen["accepted"] or chosen["answer_score"] > rejected["answer_score"]
    assert max(Counter(x["prompt"] for x in lines).values()) == 4


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("change, words", [
    (dict(answer=None), "'answer' must be text, not NoneType"), (dict(question=3), "'question'"),
    (dict(site=1), "'site' must be text"), (dict(title=["x"]), "'title' must be text"),
    (dict(question_id=None), "'question_id' must be str or int, found 'None'"),
    (dict(question_id=True), "'question_id'"), (dict(answer_score="11"), "'answer_score' must be "
                                                                         "int, found '11'"),
    (dict(answer_score=1.5), "'answer_score'"), (dict(answer_score=True), "'answer_score'"),
    (dict(accepted=1), "'accepted' must be bool, found '1'"), (dict(accepted="no"), "'accepted'"),
    (dict(objective="honest"), "'objective' must be helpful or harmless, found 'honest'"),
    (dict(answer="x" * 5_000_000), "'answer' has 5,000,000 characters"),
    (dict(title="\udfff"), "'title' holds half of a surrogate pair")])
def test_what_is_malformed(tmp_path, program, change, words):
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (
        answer("x", 5), answer("y"), {**answer("z"), **change})))
    code, out, err = program(path, "--out", tmp_path / "out.jsonl")
    assert (code, out) == (1, "") and err.startswith(f"error: {path} line 3: ") and words in err
    assert err.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()
    code, out, err = program(path, "--out", tmp_path / "out.jsonl", "--skip-bad")
    assert (code, err) == (0, "") and "2 used, 1 malformed" in out
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_missing_fields_and_other_bad_input(tmp_path, program):
    path, empty = tmp_path / "qa.jsonl", tmp_path / "empty.jsonl"
    empty.write_text("")
    for field in ("question_id", "question", "answer", "answer_score", "accepted"):
        row = answer("x")
        del row[field]
        path.write_text(json.dumps(row))
        code, out, err = program(path)
        assert (code, out) == (1, "") and f"{path} line 1: " in err and repr(field) in err
    path.write_text(json.dumps(answer("x")) + "\n")
    for argv, words in (([tmp_path / "no"], "no: No such file"), ([empty], "the file is empty"),
                        ([path, "--out", tmp_path / "o"], "no comparison to write"),
                        ([path, "--per-question", 0], "--per-question 0"), ([tmp_path], "director"),
                        ([path, "--bogus"], "--bogus"), ([], "FILE")):
        code, out, err = program(*argv)
        assert code in (1, 2) and out == "" and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "o").exists()


def test_the_program(tmp_path, program):
    """The preference model reads what it writes; without --out it only counts."""
    from preference import read_comparisons
    path, out_path = tmp_path / "qa.jsonl", tmp_path / "out/forum.jsonl"
    path.write_text("".join(json.dumps(answer(t, v, title="T")) + "\n" for t, v in (
        ("a", 9), ("b", 1), ("c", 0))))
    code, counted, err = program(path)
    assert (code, err) == (0, "") and not out_path.exists()
    code, out, err = program(path, "--out", out_path, "--per-question", 2, "--seed", 3)
    assert (code, err) == (0, "") and f"{out_path}: 2 comparisons" in out
    assert "pairs           3: 2 kept, 0 equal_scores, 1 surplus" in out
    lines = load([path], 2, 3)[0]
    assert [json.loads(x) for x in out_path.open()] == lines
    assert [x["prompt"] for x in read_comparisons(out_path)] == [[("human", "T\n\nq")]] * 2
    assert "answers         3: 3 used, 0 malformed" in counted
