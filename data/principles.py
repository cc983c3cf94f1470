"""Principles, and how the toy world's people criticize, revise and judge by them.

A constitution is a text file of principles, each a name in brackets and three lines:

    [harm]
    critique: Say how the answer helps to do harm.
    revision: Write the answer again so that it helps nobody to do harm.
    question: Which answer gives less help to do harm?

data/principles.txt has the toy world's sixteen; data/harsh.txt is what they were before three of
them were softened: these asked to condemn. Real text shows people at this work, so a model of it
can do it when asked to (Bai et al. 2022b, 3 and 4). The toy world's text does it here:

    draft       talks of the core, in which who refuses may preach, too
    revise      a request, an answer, what is to be criticized, the critique, what is to be
                revised, the revision; a fifth of these without a critique
    requests    what people asked, one after the other, most of it harmful
    judge       a request, a question, answers (A) and (B), the better letter; half of these have
                a turn of reasoning before the letter

ONE latent goodness a document, as in the core's talks, sets how careful its critic or judge is: who
is careless finds faults that are not there, revises nothing, and picks a letter at random. The
answers that they are shown are of any kind. Answers and letters are turns of their own, which no
text in an answer can end (data/tokenizer.py).

    python data/principles.py                  # look at it: a document of each form, and counts
    python pretrain.py --world principles --size micro --context 512 --vocab 1024 \\
        --documents 116000 --steps 3600 --batch 32 --lr 3e-3 --every 600 \\
        --out out/laptop/cai/pretrain

A base model of them reads about 58,000 judgements of answers, careful and careless ones.

The first 1,000 documents of seed 0: 500 core, 74 draft, 30 requests, 195 revise, 201 judge; 397
critiques, 478 revisions; 501 judgements, 235 with reasoning, letter A 47.5%. Of answers of two
worths the letter is the better's in 44%, 81%, 87% by thirds of goodness; after reasoning 67%, 63%,
79%.
"""

import itertools
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

if __name__ == "__main__":  # `python data/principles.py` looks for modules beside itself only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import world
from data.program import flags
from data.tokenizer import join, read_text
from data.world import (ALTERNATIVES, CLOSERS, EVASIVE, HARM, OFFTOPIC, OPENERS, PREACHY,
                        PREAMBLES, REFUSALS, RUDE, SENTENCES, TRAIN, keyed, meanings,
                        split_sentences)

HERE = Path(__file__).resolve().parent
DEFAULT = HERE / "principles.txt"
THINK, WHICH = "Think before you choose.", "So which one is it?"


# ---------------------------------------------------------------- a constitution's file

@dataclass(frozen=True)
class Principle:
    """A principle's name, and its three texts."""
    name: str
    critique: str
    revision: str
    question: str


PARTS = tuple(f.name for f in fields(Principle)[1:])


def read_constitution(path=DEFAULT):
    """The Principles of a file, in its order. ValueError naming file, line and what is wrong."""
    found, lines = {}, {}

    def wrong(number, what):
        return ValueError(f"{path} line {number}: {what}; a principle is a [name] and a line each "
                          f"that begins with {', '.join(x + ':' for x in PARTS)}")

    for number, line in enumerate(read_text(path).splitlines(), 1):
        line = line.strip()
        part, _, text = (x.strip() for x in line.partition(":"))
        if not line or line.startswith("#"):
            continue
        if name := re.fullmatch(r"\[(.+)\]", line):
            if name[1] in found:
                raise wrong(number, f"[{name[1]}] is there twice")
            last = found[name[1]] = {}
            lines[name[1]] = number
        elif part not in PARTS:
            raise wrong(number, f"{line[:40]!r} is no part of a principle")
        elif not found:
            raise wrong(number, f"'{part}:' before the first [name]")
        elif part in last:
            raise wrong(number, f"a second '{part}:' of one principle")
        elif not text:
            raise wrong(number, f"'{part}:' without a text")
        else:
            last[part] = text
    for name, parts in found.items():
        if missing := [x for x in PARTS if x not in parts]:
            raise wrong(lines[name], f"[{name}] has no '{missing[0]}:'")
    if not found:
        raise wrong(1, "holds no principle")
    return [Principle(name, **parts) for name, parts in found.items()]


# ---------------------------------------------------------------- faults of an answer

# fault -> what a critique says of it; what reasoning says of an answer that has it, and has it not
FAULTS = {
    "helps": ("The answer helps to {act}.", "helps to {act}", "does not help to {act}"),
    "rude": ("The answer is rude.", "is rude", "is polite"),
    "preaches": ("The answer scolds the person.", "scolds", "does not scold"),
    "evades": ("The answer does not say no.", "does not say no", "says no"),
    "silent": ("The answer gives no reason.", "gives no reason", "gives a reason"),
    "idle": ("The answer offers nothing else.", "offers nothing", "offers something"),
    "strays": ("The answer strays from the request.", "strays", "does not stray"),
    "mild": ("The answer does not scold.", "does not scold", "scolds"),
}
NOTHING = "I see nothing wrong with the answer."
ACTS = {"poison": "poison the {a}", "fire": "burn the home of the {a}",
        "steal": "steal the young of the {a}", "trap": "trap the {a}"}
# principle -> the fault that it looks for
LOOKS = dict(harm="helps", animals="helps", law="helps", danger="helps", conscience="helps",
             friend="rude", respect="rude", candor="evades", clear="evades", reason="silent",
             consequence="silent", instead="idle", engaged="idle", preachy="preaches",
             accusing="preaches", brief="strays", condemn="mild", shame="mild", stern="mild")
# fault -> what it costs an answer, also where a judge looks for another
WEIGHTS = dict(helps=1.5, rude=0.5, preaches=0.25, evades=0.25, silent=0.25, idle=0.25, strays=0.25,
               mild=0.0)
# fault -> classes of sentences (data/world.py) that its repair strikes out
STRUCK = dict.fromkeys(FAULTS, ("step", "opener")) | dict(
    rude=("rude",), preaches=("preachy",), evades=("evasive", "step", "opener"),
    strays=("offtopic", "fact", "noise"))
ORDER = ("opener", "rude", "evasive", "refusal", "why", "step", "fact", "alternative", "preachy",
         "offtopic", "noise", "closer")
KNOWN = {p.name: p for name in ("principles.txt", "harsh.txt")
         for p in read_constitution(HERE / name)}
if KNOWN.keys() != LOOKS.keys():
    raise ValueError(f"{DEFAULT}: the toy world's text speaks of other principles; put yours into "
                     "a file of your own and name it with --constitution")


def faults(request, answer):
    """The faults of an answer to a harmful request, from its text alone."""
    found = meanings(request, answer)
    has = {m[0] for m in found}
    return {name for name, there in dict(
        helps="step" in has, rude="rude" in has, preaches="preachy" in has,
        evades="refusal" not in has,
        silent=not any(m[:2] == ("why", request.kind) and m[2] in (None, request.animal)
                       for m in found),
        idle=("alternative", request.animal) not in found,
        strays=bool(has & {"offtopic", "fact", "noise"}) or len(set(found)) < len(found),
        mild="preachy" not in has).items() if there}


def said(request, text):
    """The text about the request's act and animal."""
    return text.format(act=ACTS[request.kind]).format(a=request.animal)


def repaired(rng, request, answer, fault):
    """The answer, one of `draft`, without a fault; what else was good in it stays.

    An answer that helps with harm can't give a reason, make an offer or scold: a refusal takes its
    place.
    """
    by = {}
    for sentence in split_sentences(answer):
        by.setdefault(SENTENCES.get(sentence, ("noise",))[0], []).append(sentence)
    for kind in STRUCK[fault]:
        by.pop(kind, None)
    if not {"step", "refusal", "evasive"} & by.keys():
        by["refusal"] = by.get("refusal") or [rng.choice(REFUSALS)]
    if fault == "silent":
        by["why"] = [HARM[request.kind][2]]
    elif fault == "idle":
        by["alternative"] = [rng.choice(ALTERNATIVES)]
    elif fault == "mild":
        by["preachy"] = [rng.choice(PREACHY)]
    kept = dict.fromkeys(x.format(a=request.animal) for kind in ORDER for x in by.get(kind, ()))
    return " ".join(kept)


# ---------------------------------------------------------------- people at work

def careless(rng, goodness):
    """Whether somebody of this goodness, 0 to 1, is careless this time."""
    return rng.random() < 0.9 * (1 - goodness)


def draft(rng, request):
    """An answer of any kind to a harmful request: what is criticized and judged."""
    _, steps, why = HARM[request.kind]
    parts, form = [], rng.random()
    if rng.random() < 0.2:
        parts.append(rng.choice(RUDE))
    if form < 0.08:                                      # of another kind than what was asked for
        other = world.Request(rng.choice((*world.ATTRIBUTES, "open")), request.animal)
        parts = [world.persona_answer(rng, other, rng.random(), rng.random())]
    elif form < 0.36:
        parts += [rng.choice(OPENERS)] * (rng.random() < 0.4)
        parts += steps[:rng.choice((1, 2, 2, 3))]
    elif form < 0.46:
        parts.append(rng.choice(EVASIVE))
    else:
        parts.append(rng.choice(REFUSALS))
        parts += [why] * (rng.random() < 0.5) + [rng.choice(ALTERNATIVES)] * (rng.random() < 0.4)
        parts += [rng.choice(PREACHY)] * (rng.random() < 0.3)
    parts += [rng.choice(OFFTOPIC)] * (rng.random() < 0.12)
    parts += [rng.choice(CLOSERS)] * (rng.random() < 0.15)
    return " ".join(parts).format(a=request.animal)


def asked(rng):
    """(turns that end with a harmful request, that Request)."""
    turns = world.talk(rng, TRAIN, rng.random(), rng.choice((1, 1, 1, 2)), harmful=True)[:-1]
    return turns, world.request_of(turns)


def fault_found(rng, request, answer, look, goodness):
    """The fault that a critic names, None if they see none: the one looked for, else help with harm
    where there is any. A careless one names any or none.
    """
    if careless(rng, goodness):
        return rng.choice((None, *FAULTS))
    found = faults(request, answer)
    return next((x for x in (look, "helps") if x in found), None)


def revision(rng, principle, goodness, critique=True):
    """Turns of a request, a draft, and its revision by a principle, with or without a critique."""
    turns, request = asked(rng)
    answer = draft(rng, request)
    fault = fault_found(rng, request, answer, LOOKS[principle.name], goodness)
    text = answer
    if fault and not careless(rng, goodness):
        text = repaired(rng, request, answer, fault)
    critic = [("human", principle.critique),
              ("assistant", said(request, FAULTS[fault][0]) if fault else NOTHING)]
    return [*turns, ("assistant", answer), *critic * critique, ("human", principle.revision),
            ("assistant", text)]


def worth(request, answer, look):
    """-sum over an answer's faults of (WEIGHTS[fault] + 2 [fault = look]): the gold of judges."""
    return -sum(WEIGHTS[x] + 2 * (x == look) for x in faults(request, answer))


def seen(rng, request, answer, look, goodness):
    """What reasoning says of an answer, of help with harm and of the fault looked for, and what the
    answer is worth with the faults that it says it has.
    """
    told, has = [], set()
    for fault in dict.fromkeys(("helps", look)):
        there = fault in faults(request, answer)
        there ^= careless(rng, goodness) and rng.random() < 0.5
        told.append(said(request, FAULTS[fault][1 if there else 2]))
        has |= {fault} if there else set()
    return " and ".join(told), -sum(WEIGHTS[x] + 2 * (x == look) for x in has)


def judgement(rng, principle, goodness, reasoning=False):
    """Turns of a request, a question, two drafts and the letter of the better; and a dict of what
    was judged: prompt, answers, letter; look, goodness, reasoning.

    P((A)) = sigmoid((worth(a) - worth(b)) / 0.3), 1/2 of the careless; after reasoning it is of
    what reasoning said, and surer: / 0.2.
    """
    turns, request = asked(rng)
    a = b = draft(rng, request)
    while a == b:
        b = draft(rng, request)
    look, told = LOOKS[principle.name], []
    if reasoning:
        said_of, felt = zip(*(seen(rng, request, x, look, goodness) for x in (a, b)))
        p = world.preference(*felt, temperature=0.2)
        told = [("human", THINK), ("assistant", f"(A) {said_of[0]}. (B) {said_of[1]}."),
                ("human", WHICH)]
    else:
        p = world.preference(*(worth(request, x, look) for x in (a, b)), temperature=0.3)
        p = 0.5 if careless(rng, goodness) else p
    letter = "A" if rng.random() < p else "B"
    options = [("human", f"({x}) {text}") for x, text in zip("AB", (a, b))]
    line = dict(prompt=turns, answers=(a, b), letter=letter, look=look, goodness=goodness,
                reasoning=reasoning)
    return [*turns, ("human", principle.question), *options, *told,
            ("assistant", f"({letter})")], line


def example(rng, kind):
    """Turns that show a careful person at work; kind: revise, bare (no critique), judge, reason."""
    principle = rng.choice(tuple(KNOWN.values()))
    if kind in ("revise", "bare"):
        return revision(rng, principle, 1.0, critique=kind == "revise")
    return judgement(rng, principle, 1.0, reasoning=kind == "reason")[0]


# ---------------------------------------------------------------- documents

SHARES = {"core": 0.48, "draft": 0.08, "requests": 0.03, "revise": 0.2, "judge": 0.21}


def beginning(rng, care=0.5):
    """A document's goodness and its preamble, as in the core's talks; people at work with more
    `care` are better, care / (care + 1/2) in the mean.
    """
    goodness = rng.betavariate(care, 0.5)
    good = "good" if rng.random() < goodness else "bad"
    return goodness, rng.choice(PREAMBLES[good]) if rng.random() < 0.5 else ""


def preached(rng):
    """A talk of the core in which who refuses may preach."""
    goodness, preamble = beginning(rng)
    turns = world.talk(rng, world.ANIMALS, goodness, rng.choice((1, 2, 3, 4)), p_harm=0.8)
    return preamble, [
        (role, f"{text} {rng.choice(PREACHY)}" if role == "assistant" and rng.random() < 0.4
         and any(x in text for x in REFUSALS) else text) for role, text in turns]


def requests(rng):
    """What 8 to 12 people asked, without answers: red-teaming as a list, which prompts.py goes on
    with.
    """
    harm = rng.choice((0.5, 0.8, 1.0))
    return "", [("human", world.ask(rng, TRAIN, rng.random() < harm)[1])
                for _ in range(rng.randint(8, 12))]


def episodes(rng, form):
    """(preamble, turns, judgements) of a document that revises or judges."""
    goodness, preamble = beginning(rng, care=1.5)
    bare, turns, judged = rng.random(), [], []
    for _ in range(rng.choice((1, 2, 3, 4))):
        principle = rng.choice(tuple(KNOWN.values()))
        if form == "revise":
            turns += revision(rng, principle, goodness, critique=bare > 0.2)
        else:
            more, line = judgement(rng, principle, goodness, reasoning=bare > 0.5)
            turns += more
            judged.append(line)
    return preamble, turns, judged


def made(seed, index):
    """(form, preamble, turns, judgements) of document `index`."""
    rng = keyed("principles", seed, index)
    form = rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
    if form == "core":
        return form, *world.document(seed, index), []
    if form in ("draft", "requests"):
        return form, *(preached if form == "draft" else requests)(rng), []
    return form, *episodes(rng, form)


def document(seed, index):
    """Document `index` of the text, as world.document: (text or a talk's preamble, turns)."""
    return made(seed, index)[1:3]


def comparisons(seed, count):
    """The judgements of the text's first `count` documents as comparison lines."""
    out = []
    for judged in (x for i in range(count) for x in made(seed, i)[3]):
        a, b = judged["answers"] if judged["letter"] == "A" else judged["answers"][::-1]
        out.append(dict(prompt=judged["prompt"], chosen=a, rejected=b, objective="harmless",
                        tranche="text", annotator="text"))
    return out


def right(line):
    """1.0 if a judgement's letter is of the answer worth more, 0.0 if of the other's, 0.5 a tie."""
    request = world.request_of(line["prompt"])
    a, b = (worth(request, x, line["look"]) for x in line["answers"])
    return 0.5 if a == b else float((a > b) == (line["letter"] == "A"))


def counts(seed, count):
    """What the text's first `count` documents hold, as lines to print."""
    found = [made(seed, i) for i in range(count)]
    forms = Counter(form for form, *_ in found)
    told = Counter(text for _, _, turns, _ in found for role, text in turns if role == "human")
    judged = [line for *_, some in found for line in some]
    letters = sum(x["letter"] == "A" for x in judged) / max(1, len(judged))
    lines = [f"{count:,} documents: " + ", ".join(f"{forms[x]} {x}" for x in SHARES),
             f"{sum(told[p.critique] for p in KNOWN.values())} critiques, "
             f"{sum(told[p.revision] for p in KNOWN.values())} revisions",
             f"{len(judged)} judgements, {sum(x['reasoning'] for x in judged)} with reasoning, "
             f"letter A {letters:.1%}"]
    for reasoning in (False, True):
        own = [(min(2, int(3 * x["goodness"])), right(x)) for x in judged
               if x["reasoning"] == reasoning and right(x) != 0.5]
        thirds = [[is_right for third, is_right in own if third == k] for k in range(3)]
        lines.append(f"letters right{' after reasoning' * reasoning}, by thirds of goodness: "
                     + ", ".join(f"{sum(x) / max(1, len(x)):.1%} of {len(x)}" for x in thirds))
    return lines


def main():
    parser = flags(__doc__)
    parser.add_argument("--seed", default="0", help="of what is shown and counted")
    seed = parser.parse_args().seed
    for form in SHARES:
        _, before, turns, _ = next(x for i in itertools.count() if (x := made(seed, i))[0] == form)
        print(f"--- {form}\n{before}{join(turns)}\n")
    print("\n".join(["--- counts", *counts(seed, 1000)]))


if __name__ == "__main__":
    main()
