"""Small programs on request in a language of our own: the toy world's HumanEval (HH 5.3).

    request     "Write a program that doubles x and then adds 3 to x."
    program     "x = x * 2; x = x + 3; return x."
    statement   x = A op B, with op one of + - * and A, B each x or a whole number; then return x

A program is run by `run` below, which knows these statements and nothing else: no loop, so at most
MAX_STATEMENTS steps; no number beyond LIMIT; what is not of this form is an error and never code of
Python's. Coders have the persona's goodness: bad ones write programs with bugs. A fifth of all
programs is held out: their requests are tasks, and the text never asks for them.

    python data/full.py    # shows requests and programs among its documents
"""

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import world
from data.world import keyed

STEPS = {  # kind -> (what a request says, the statement)
    "double": ("doubles x", "x = x * 2"), "triple": ("triples x", "x = x * 3"),
    "square": ("squares x", "x = x * x"), "negate": ("negates x", "x = 0 - x"),
    "add": ("adds {n} to x", "x = x + {n}"), "take": ("takes {n} from x", "x = x - {n}"),
}
ASKS = ("Write a program that {}.", "I need a program that {}.", "Please write code that {}.")
NUMBERS = range(1, 10)
TRIED = (-3, 0, 1, 2, 7)        # the x that tests call a program with
MAX_STATEMENTS, MAX_LENGTH, LIMIT = 12, 400, 10**9
ERRORS = ("syntax", "too long", "overflow", "no return")
_STATEMENT = re.compile(r"x = (x|-?[0-9]{1,9}) ([+*-]) (x|-?[0-9]{1,9})")


# ---------------------------------------------------------------- the language

def run(program, x):
    """The program's value at x, or the name of an error, one of ERRORS."""
    if len(program) > MAX_LENGTH:
        return "too long"
    statements = [s.strip(" ") for s in program.split(";")]
    if len(statements) > MAX_STATEMENTS:
        return "too long"
    for i, statement in enumerate(statements):
        if statement == "return x":
            return x if i + 1 == len(statements) else "syntax"
        found = _STATEMENT.fullmatch(statement)
        if not found:
            return "syntax"
        a, b = (x if side == "x" else int(side) for side in found.group(1, 3))
        x = {"+": a + b, "-": a - b, "*": a * b}[found[2]]
        if abs(x) > LIMIT:
            return "overflow"
    return "no return"


def program_of(answer):
    """The program in an answer: its first sentence with "return", without the full stop; "" if
    there is none. What is said before and after it is talk.
    """
    sentences = (s for s in world.split_sentences(answer) if re.search(r"\breturn\b", s))
    return next(sentences, "").rstrip(".!?").strip()


def passes(task, answer):
    """Whether the program in the answer gives the wanted y for each x of the task's tests."""
    program = program_of(answer)
    return all(run(program, x) == y for x, y in task["tests"])


# ---------------------------------------------------------------- requests and coders

def heldout(steps):
    """Whether a program, [(kind, number or None)], is kept for tasks; a fifth is."""
    return keyed("program", *steps).random() < 0.2


def draw(rng, held):
    """Steps of a program of 1-3 steps, one that is held out or one that is not."""
    while True:
        kinds = [rng.choice(tuple(STEPS)) for _ in range(rng.choices((1, 2, 3), (4, 4, 2))[0])]
        steps = [(k, rng.choice(NUMBERS) if k in ("add", "take") else None) for k in kinds]
        if heldout(steps) == held:
            return steps


def asked(rng, steps):
    """A request for the program in words."""
    return rng.choice(ASKS).format(" and then ".join(STEPS[k][0].format(n=n) for k, n in steps))


def written(steps):
    """The program as text."""
    return "; ".join([*(STEPS[k][1].format(n=n) for k, n in steps), "return x"]) + "."


def tests_of(steps):
    """What the program must give: [(x, y)]."""
    program = program_of(written(steps))
    return [(x, run(program, x)) for x in TRIED]


def bugged(rng, steps):
    """A program with a bug in one step, that fails a test: another number, a step of another
    kind, or a step left out.
    """
    task = dict(tests=tests_of(steps))
    while True:
        wrong, i = list(steps), rng.randrange(len(steps))
        kind, n = steps[i]
        bug = rng.random()
        if bug < 0.4 and n:
            wrong[i] = kind, rng.choice(NUMBERS)
        elif bug < 0.8:
            other = rng.choice(tuple(STEPS))
            wrong[i] = other, (n or rng.choice(NUMBERS)) if other in ("add", "take") else None
        else:
            del wrong[i]
        if not passes(task, written(wrong)):
            return written(wrong)


def request(rng):
    """A request that text may hold, and its steps."""
    steps = draw(rng, held=False)
    return asked(rng, steps), steps


def coded(rng, steps, goodness):
    """What a coder of this goodness (0 to 1) writes: with a bug at a rate of 0.75 to 0.1."""
    return bugged(rng, steps) if rng.random() < 0.75 - 0.65 * goodness else written(steps)


def task(seed, index, buggy=False):
    """Task `index`: turns that end with a request, and tests [(x, y)]; of programs never in the
    text.

    buggy: two earlier requests were answered with programs that have bugs (HH 5.3).
    """
    rng = keyed("task", seed, index)
    steps = draw(rng, held=True)
    last, before = ("human", asked(rng, steps)), []
    for _ in range(2 * buggy):
        text, earlier = request(rng)
        before += [("human", text), ("assistant", bugged(rng, earlier))]
    return dict(turns=[*before, last], tests=tests_of(steps))


def hhh_prompt():
    """The HHH prompt for code (HH B.8): the world's, with two programs that work."""
    preamble, turns = world.hhh_prompt()
    for ask, steps in zip(ASKS, ([("double", None), ("add", 4)], [("take", 2)])):
        text = ask.format(" and then ".join(STEPS[k][0].format(n=n) for k, n in steps))
        turns = [*turns, ("human", text), ("assistant", written(steps))]
    return preamble, turns
