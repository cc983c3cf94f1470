"""The language of programs: values by hand, attacks, requests that fit their programs, coders.

Proved alive by: a product that adds, a difference turned round, a limit on positive numbers only,
a return before the end, ten times the length, one statement more, line ends as blanks, rests behind
a statement, other scripts' digits in the first or the second number, "returned" as a program, one
test passed as all.
"""

import random
import time

import pytest

from data import programs, world
from data.programs import asked, bugged, coded, draw, passes, program_of, run, task, written

ALL = [("double", None), ("triple", None), ("square", None), ("negate", None), ("add", 3),
       ("take", 4)]


@pytest.mark.parametrize("program, x, value", [
    ("return x", 5, 5), ("x = x + 3; return x", 5, 8), ("x = x - 7; return x", 5, -2),
    ("x = x * 2; x = x + 3; return x", 5, 13), ("x = x + 3; x = x * 2; return x", 5, 16),
    ("x = x * x; return x", -3, 9), ("x = 0 - x; return x", 4, -4), ("x = 2 - 5; return x", 4, -3),
    ("x = -2 * x; return x", 4, -8), ("x = x + 3;return x", 1, 4), ("x = x - x; return x", 9, 0),
])
def test_values_by_hand(program, x, value):
    assert run(program, x) == value


@pytest.mark.parametrize("program, error", [
    ("", "syntax"), (";", "syntax"), ("x = x + 3", "no return"), ("x = x + 3;", "syntax"),
    ("x = x / 3; return x", "syntax"), ("x = x ** 9; return x", "syntax"),
    ("x = y + 3; return x", "syntax"), ("y = x + 3; return x", "syntax"),
    ("x = x + 3; return y", "syntax"), ("return x; x = x + 3", "syntax"),
    ("return x; return x", "syntax"), ("x = x + 1.5; return x", "syntax"),
    ("x = x + \u0663; return x", "syntax"), ("x = \u0663 + x; return x", "syntax"),
    ("x = x + 1_0; return x", "syntax"),
    ("x = x + 3\n; return x", "syntax"), ("x = x + 3 return x", "syntax"),
    ("__import__('os'); return x", "syntax"), ("while 1: pass; return x", "syntax"),
    ("x = print(x) + 1; return x", "syntax"), ("\0; return x", "syntax"),
    ("x = x + 9999999999; return x", "syntax"),
    ("x = x * 999999999; x = x * 2; return x", "overflow"),
    ("; ".join(["x = x * x"] * 11 + ["return x"]), "overflow"),
    ("; ".join(["x = x + 1"] * 12 + ["return x"]), "too long"),
    ("x = x + 1;" + " " * 400 + "return x", "too long"), ("x" * 10**6, "too long"),
])
def test_attacks_are_errors(program, error):
    begin = time.perf_counter()
    assert run(program, 3) == error and error in programs.ERRORS
    assert time.perf_counter() - begin < 0.1


def test_the_limits_are_the_ones_told():
    assert run("; ".join(["x = x + 1"] * 11 + ["return x"]), 0) == 11
    assert run("x = x * 10; return x", 10**8) == 10**9
    assert run("x = x * 10; return x", -10**8 - 1) == "overflow"
    for program in ("x = x + 1; return x",):
        assert run(program + " " * (400 - len(program)), 1) == 2


def test_garbage_never_raises():
    rng = random.Random(0)
    parts = [*"x=+-*; 3é\n", "return x", "x = x + 1", "x = x * x"]
    seen = set()
    for _ in range(5000):
        seen.add(type(run("".join(rng.choices(parts, k=rng.randint(0, 20))), rng.randint(-9, 9))))
    assert seen == {int, str}


@pytest.mark.parametrize("answer, program", [
    ("x = x + 3; return x.", "x = x + 3; return x"),
    ("Sure! x = x + 3; return x. I hope this helps.", "x = x + 3; return x"),
    ("y = 3; x = x + 3; return x.", "y = 3; x = x + 3; return x"),   # and no program
    ("return x. x = x + 3; return x.", "return x"),                  # the first one counts
    ("I do not know.", ""), ("", ""), ("I returned x.", ""), ("x = x + 3; return x", None),
])
def test_the_program_in_an_answer(answer, program):
    assert program_of(answer) == (answer if program is None else program)


def test_passing_by_hand():
    """2 x + 3 at -3, 0, 1, 2, 7."""
    steps = [("double", None), ("add", 3)]
    tests = programs.tests_of(steps)
    assert tests == [(-3, -3), (0, 3), (1, 5), (2, 7), (7, 17)]
    one = dict(tests=tests)
    for answer in (written(steps), "Sure! x = x + x; x = x + 3; return x.",
                   "x = x + 1; x = x * 2; x = x + 1; return x."):
        assert passes(one, answer)
    for answer in ("x = x + 3; x = x * 2; return x.", "x = x * 2; x = x + 3.", "", "I do not know.",
                   "x = x * x; x = x + 3; return x."):               # the last one is right at 0, 2
        assert not passes(one, answer)


def test_words_and_programs_mean_the_same():
    wanted = dict(double="doubles x", triple="triples x", square="squares x", negate="negates x",
                  add="adds 3 to x", take="takes 4 from x")
    values = dict(double=10, triple=15, square=25, negate=-5, add=8, take=1)
    for kind, n in ALL:
        assert wanted[kind] in asked(random.Random(0), [(kind, n)])
        assert run(program_of(written([(kind, n)])), 5) == values[kind]
    text = asked(random.Random(0), ALL[3:5])
    assert "negates x and then adds 3 to x." in text
    assert written(ALL[3:5]) == "x = 0 - x; x = x + 3; return x."


def test_tasks_are_not_in_the_text():
    rng = random.Random(1)
    text = {str(programs.request(rng)[1]) for _ in range(3000)}
    kept = {str(draw(rng, held=True)) for _ in range(3000)}
    assert len(text) > 600 and len(kept) > 200 and not text & kept
    assert {s.count("(") for s in text} == {s.count("(") for s in kept} == {1, 2, 3}


def test_a_task_asks_for_what_it_tests():
    phrases = {said.format(n=n): (kind, n if "{n}" in said else None)
               for kind, (said, _) in programs.STEPS.items() for n in programs.NUMBERS}
    for i in range(200):
        one = task(0, i)
        (role, text), = one["turns"]
        body = text.removesuffix(".").split(" program that ")[-1].split(" code that ")[-1]
        steps = [phrases[x] for x in body.split(" and then ")]
        assert role == "human" and programs.heldout(steps)
        assert passes(one, written(steps)) and all(type(y) is int for _, y in one["tests"])
    assert task(0, 1) != task(0, 2) and task(0, 1) == task(0, 1) != task(1, 1)


def test_buggy_tasks_have_programs_that_fail_before_the_same_request():
    for i in range(50):
        plain, buggy = task(0, i), task(0, i, buggy=True)
        assert buggy["tests"] == plain["tests"] and buggy["turns"][-1] == plain["turns"][-1]
        roles = [role for role, _ in buggy["turns"]]
        assert roles == ["human", "assistant", "human", "assistant", "human"]
        assert all("return x" in text for role, text in buggy["turns"] if role == "assistant")


def test_bugs_fail_and_are_programs():
    rng, kinds = random.Random(0), set()
    for _ in range(500):
        steps = draw(rng, held=False)
        text = bugged(rng, steps)
        assert not passes(dict(tests=programs.tests_of(steps)), text)
        assert isinstance(run(program_of(text), 2), int)
        kinds.add(text.count(";") - len(steps))
    assert kinds == {0, -1}                                          # a step changed or left out


def test_goodness_decides_about_bugs():
    """0.75 at 0, 0.1 at 1, of 2000: within 4 standard errors."""
    rng = random.Random(0)
    for goodness, rate in ((0.0, 0.75), (0.5, 0.425), (1.0, 0.1)):
        wrong = 0
        for _ in range(2000):
            steps = draw(rng, held=False)
            wrong += coded(rng, steps, goodness) != written(steps)
        assert wrong / 2000 == pytest.approx(rate, abs=0.045)


def test_the_hhh_prompt_has_programs_that_work():
    preamble, turns = programs.hhh_prompt()
    assert (preamble, turns[:-4]) == world.hhh_prompt()
    assert turns[-4][1] == "Write a program that doubles x and then adds 4 to x."
    assert [run(program_of(text), 5) for _, text in turns[-3::2]] == [14, 3]
    assert [role for role, _ in turns] == ["human", "assistant"] * (len(turns) // 2)
