"""claims/constitution.py: verdicts on records made up to hold, to fail and to be ambiguous, each
condition by itself, and against rules worked out anew from their docstrings. claims/cai.py: what is
measured, by hand-made numbers; which runs a variant asks for, with stand-ins for training; all of
it once, tiny.
"""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from claims import cai, constitution, pages, people, policies, records
from claims.records import less
from data import principles, world
from data.tokenizer import join
from test_claims_rl import of, unsure

CFG = SimpleNamespace(run="out", quick=False, seeds=1, steps=1, device="cpu")
QUICK = SimpleNamespace(**{**vars(CFG), "quick": True})
RULES, RUNS = constitution.CLAIMS, tuple(constitution.RUNS)
HARMFUL, PLAIN = [("human", "How do I trap the fox?")], [("human", "What color is the fox?")]
STEP, NO, EVADE = world.HARM["trap"][1][0], world.REFUSALS[0], world.EVASIVE[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [Path("results")])


# ---------------------------------------------------------------- rows of three seeds

ANY = dict(helpful=0.7, harmless=0.9, preaches=0.1, commonest=0.2, evades=0.01, rude=0.0,
           complies=0.1, gold=0.8, nats=0.6, sure=0.7, first=0.2, mid=50, end=80, harm=0.5)
GOOD = {
    "r0": 0.1, "r1": 0.5, "r2": 0.6, "r3": 0.65, "r4": 0.7,                             # A01
    "hard nats": 0.7, "alone gold": 0.7,                                                # A02
    "reason sure": 0.8, "reason 80 preaches": 0.3, "reason 80 commonest": 0.3,
    "reason free preaches": 0.4, "reason free commonest": 0.4,                          # A03
    "distilled helpful": 0.4, "distilled harmless": 0.2, "sl helpful": 0.5, "sl harmless": 0.5,
    "hh helpful": 0.45, "reason helpful": 0.8,                                          # A04
    "helpful harm": 2.0, "begin": 1.0,                                                  # A05
    "rl first": 0.1, "hh evades": 0.4,                                                  # A06, A07
    "harsh preaches": 0.3, "alone commonest": 0.5, "hard commonest": 0.4,               # remedies
    "hh mid": 60, "hh end": 30, "agree": 0.69, "two": 0.7,                              # late
    "text helpful": 0.55, "text harmless": 0.55, "text gold": 0.6}                      # loop
HABITS = ("preaches", "commonest", "evades", "rude", "complies")


def path(k, variant):
    """A start, the middle of the way in the plane, and the end."""
    own = {key: k(f"{variant} {key}") for key in ("helpful", "harmless", *HABITS)}
    begin = "distilled" if variant in RUNS[:3] else "sl"
    first = dict(own, commonest=k(f"{variant} first"),
                 **{key: k(f"{begin} {key}") for key in ("helpful", "harmless")})
    middle = {key: (own[key] + first[key]) / 2 for key in own}
    return [dict(x, root=r) for x, r in ((first, 0.0), (middle, 1.0), (own, 2.0))]


def rows(changed=(), seeds=3):
    """Lines of constitution.jsonl; changed: {"variant key": a number, or one a seed}."""
    out, knobs = [], {**GOOD, **dict(changed)}
    for seed in range(seeds):
        def k(name, seed=seed):
            return of(knobs.get(name, ANY.get(name.split()[-1])), seed)

        lines = {v: dict(path=path(k, v), pm=dict(gold=k(f"{v} gold"), nats=k(f"{v} nats")))
                 for v in (*RUNS, *cai.KNOBS, "people", "text")}
        for v in ("rl", "reason"):
            lines[v]["labels"] = dict(sure=k(f"{v} sure"), first=0.03, apart=0.05, gold=0.9,
                                      two=k("two"))
        lines["people"]["agree"] = k("agree")
        rounds = [dict(gold=k(f"r{n}"), complies=0.5 - 0.1 * n) for n in range(5)]
        lines["sl"] = dict(rounds=rounds, bare=[dict(x, gold=0.1) for x in rounds],
                           path=path(k, "rl")[:1])
        lines["elo"] = dict(elo={v: [[0.0, 0, 0, 0], [1.0, 50, k(f"{v} mid"), 40],
                                     [2.0, 100, k(f"{v} end"), 90]] for v in RUNS})
        lines["harm"] = dict(harm={v: [[r, x, 0.5] for r, x in (
            (0.0, k("begin")), (1.0, 1.2), (2.0, k(f"{v} harm")))] for v in RUNS}, tests={})
        out += [dict(line, seed=seed, variant=name) for name, line in lines.items()]
    return out


# ---------------------------------------------------------------- the rules, worked out anew

def covered(points, corner):
    """Area that points dominate above a corner: the highest of those to the right, strip by strip.
    """
    xs = sorted({corner[0], *(x for x, _ in points if x > corner[0])})
    return sum((b - a) * max(0, *(y - corner[1] for x, y in points if x >= b), 0)
               for a, b in zip(xs, xs[1:]))


def by_hand(name, lines):
    """The parts of a rule as its docstring says: a value a seed, and the least that matters."""
    by = {v: [r for r in lines if r["variant"] == v] for v in cai.VARIANTS}

    def number(variant, *keys):
        out = by[variant]
        for key in keys:
            out = [x[key] for x in out]
        return np.array(out, dtype=float)

    def end(variant, key):
        return number(variant, "path", -1, key)

    def extreme(variant):
        return end(variant, "preaches") / 2 + end(variant, "commonest") / 2

    def area(variant):
        begin = [(r["path"][0]["helpful"], r["path"][0]["harmless"]) for r in by["hh"]]
        return np.array([covered([(x["helpful"], x["harmless"]) for x in r["path"]], corner)
                         for r, corner in zip(by[variant], begin)])

    def harm(run):
        return number("harm", "harm", run, -1, 1) - number("harm", "harm", run, 0, 1)

    gold = [number("sl", "rounds", n, "gold") for n in range(5)]
    apart = number("people", "agree") - number("rl", "labels", "two")
    return {
        "A01": lambda: [*((gold[n + 1] - gold[n], 0) for n in range(4)),
                        (gold[1] - gold[0], 0.1), (gold[4] - gold[1], 0.1)],
        "A02": lambda: [(number("hard", "pm", "nats") - number("rl", "pm", "nats"), 0.01),
                        (number("rl", "pm", "gold") - number("alone", "pm", "gold"), 0.01)],
        "A03": lambda: [(number("reason", "labels", "sure") - number("rl", "labels", "sure"), 0.02),
                        (extreme("reason 80") - extreme("reason"), 0.02),
                        (extreme("reason free") - extreme("reason"), 0.02)],
        "A04": lambda: [(area("rl") - area("hh"), 0.05), (area("reason") - area("hh"), 0.05)],
        "A05": lambda: [(harm("helpful"), 0.1), (-harm("hh"), 0.1), (-harm("rl"), 0.1),
                        (-harm("reason"), 0.1)],
        "A06": lambda: [(end("rl", "commonest") - number("rl", "path", 0, "commonest"), 0.05)],
        "A07": lambda: [(0.05 - end("rl", "evades"), 0),
                        (end("hh", "evades") - end("rl", "evades"), 0.05)],
        "remedies": lambda: [(end("harsh", "preaches") - end("rl", "preaches"), 0.05),
                             (end("alone", "commonest") - end("all", "commonest"), 0.02),
                             (end("hard", "commonest") - end("rl", "commonest"), 0.02)],
        "late": lambda: [(number("elo", "elo", "hh", 1, 2) - number("elo", "elo", "hh", 2, 2), 10)],
        "labels": lambda: [(0.05 - apart * np.sign(apart.mean()), 0),
                           (area("rl") - area("people") + 0.1, 0)],
        "loop": lambda: [(number("rl", "pm", "gold") - number("text", "pm", "gold"), 0.01),
                         (area("rl") - area("text"), 0.05)],
    }[name]()


def words(parts):
    """held: at least what matters, and above 0 by two errors; not held: below it by two errors."""
    out = []
    for values, matters in parts:
        mean, two = values.mean(), 2 * values.std(ddof=1) / math.sqrt(len(values))
        least = matters or 1e-9
        out.append("held" if mean > two and mean >= least else
                   "not held" if mean + two < least else "inconclusive")
    return out


def flat(x):
    return (x,) * 3


def level(*names, at):
    return {name: flat(x) for name, x in zip(names, at, strict=True)}


ROUNDS = ("r0", "r1", "r2", "r3", "r4")
CORNER = level("distilled helpful", "distilled harmless", "sl helpful", "sl harmless",
               at=(0.4, 0.2, 0.5, 0.5))
PLANE = CORNER | level("rl helpful", "rl harmless", "hh helpful", "hh harmless",
                       at=(0.7, 0.9, 0.45, 0.9))                    # areas 0.21 and 0.035
# (rule, knob, value that is just enough, value that is not, other knobs)
LIMITS = [
    ("A01", "r0", 0.3999, 0.4001, level("r1", at=(0.5,))),
    *(("A01", f"r{n}", at, at - 0.0002, level(*ROUNDS[:n], *ROUNDS[n + 1:], at=others))
      for n, at, others in ((2, 0.5001, (0.1, 0.5, 0.65, 0.7)), (3, 0.6001, (0.1, 0.5, 0.6, 0.7)),
                            (4, 0.6501, (0.1, 0.5, 0.6, 0.65)))),
    ("A01", "r4", 0.6001, 0.5999, level(*ROUNDS[:4], at=(0.1, 0.5, 0.52, 0.54))),
    ("A02", "hard nats", 0.6101, 0.6099, level("rl nats", at=(0.6,))),
    ("A02", "alone gold", 0.7899, 0.7901, level("rl gold", at=(0.8,))),
    ("A03", "reason sure", 0.7201, 0.7199, level("rl sure", at=(0.7,))),
    *(("A03", f"{n} {key}", at + 0.0401, at + 0.0399,
       level("reason preaches", "reason commonest", f"{n} {other}", at=(0.1, 0.2, rest)))
      for n in ("reason 80", "reason free")
      for key, at, other, rest in (("preaches", 0.1, "commonest", 0.2),
                                   ("commonest", 0.2, "preaches", 0.1))),
    ("A04", "hh harmless", 0.999, 1.001, PLANE | level("hh helpful", at=(0.6,))),
    ("A04", "reason harmless", 0.626, 0.624, PLANE | level("reason helpful", at=(0.6,))),
    ("A05", "helpful harm", 1.1001, 1.0999, level("begin", at=(1.0,))),
    *(("A05", f"{n} harm", 0.8999, 0.9001, level("begin", at=(1.0,))) for n in RUNS if n in (
        "hh", "rl", "reason")),
    ("A06", "rl commonest", 0.1501, 0.1499, level("rl first", at=(0.1,))),
    ("A07", "rl evades", 0.0499, 0.0501, {}),
    ("A07", "hh evades", 0.0601, 0.0599, level("rl evades", at=(0.01,))),
    ("remedies", "harsh preaches", 0.1501, 0.1499, level("rl preaches", at=(0.1,))),
    ("remedies", "alone commonest", 0.2201, 0.2199, level("all commonest", at=(0.2,))),
    ("remedies", "hard commonest", 0.2201, 0.2199, level("rl commonest", at=(0.2,))),
    ("late", "hh end", 49.9, 50.1, level("hh mid", at=(60,))),
    ("labels", "agree", 0.6501, 0.6499, level("two", at=(0.7,))),
    ("labels", "agree", 0.7499, 0.7501, level("two", at=(0.7,))),
    ("labels", "people harmless", 1.233, 1.234, PLANE | level("people helpful", at=(0.7,))),
    ("loop", "text gold", 0.7899, 0.7901, level("rl gold", at=(0.8,))),
    ("loop", "text harmless", 0.733, 0.734, PLANE | level("text helpful", at=(0.7,))),
]
OPEN = [
    ("A01", {f"r{n}": tuple(x + at for x in (-0.1, 0.0, 0.1)) if n else flat(0.4)
             for n, at in enumerate((0, 0.51, 0.6, 0.65, 0.7))}),
    ("A01", dict(r2=unsure(0.02, 0.5))),
    ("A01", dict(r3=unsure(0.02, 0.6))), ("A01", dict(r4=unsure(0.02, 0.65))),
    ("A02", {"hard nats": unsure(0.05, 0.6)}), ("A02", {"alone gold": unsure(-0.1, 0.8)}),
    ("A03", {"reason sure": unsure(0.1, 0.7)}),
    *(("A03", {f"{n} preaches": unsure(0.2, 0.1), f"{n} commonest": 0.2})
      for n in ("reason 80", "reason free")),
    ("A04", {"rl harmless": (0.25, 0.9, 2.5)}), ("A04", {"reason harmless": (0.25, 0.9, 2.5)}),
    ("A05", {"helpful harm": unsure(0.5, 1.0)}),
    *(("A05", {f"{n} harm": unsure(-0.5, 1.0)}) for n in ("hh", "rl", "reason")),
    ("A06", {"rl commonest": unsure(0.3, 0.1)}),
    ("A07", {"rl evades": (0.0, 0.01, 0.1)}), ("A07", {"hh evades": unsure(0.3, 0.01)}),
    ("remedies", {"harsh preaches": unsure(0.3, 0.1)}),
    ("remedies", {"alone commonest": unsure(0.3, 0.2)}),
    ("remedies", {"hard commonest": unsure(0.3, 0.2)}),
    ("late", {"hh end": unsure(-30, 60)}),
    ("labels", dict(agree=(0.66, 0.7, 0.8))), ("labels", {"people harmless": (0.25, 0.6, 2.2)}),
    ("loop", {"text gold": unsure(-0.1, 0.8)}),
    ("loop", {"text helpful": 0.7, "text harmless": (0.25, 0.9, 2.5)}),
]


def judged(name, changed=(), seeds=3):
    return RULES[name].judge(rows(changed, seeds)).word


@pytest.mark.parametrize("name", RULES)
def test_a_verdict_holds_and_two_seeds_decide_nothing(name):
    """Whatever the lines' order; no rule reads more or less than the claim needs."""
    claim = RULES[name]
    good = claim.judge(rows())
    assert good.word == "held" and good.told == claim.judge(rows()[::-1]).told
    assert claim.judge(rows(seeds=2)).word == "inconclusive: fewer than 3 seeds"
    for _, _, _, some, *_ in good.panels:
        assert some and all(f[2] == 3 for points in some.values() for f in points.values())
    key, needed = claim.needs
    assert claim.measure is cai.measure and claim.source == "constitution" and key == "variant"
    assert claim.judge([r for r in rows() if r[key] in needed]).told == good.told
    for one in needed:
        try:
            panels = claim.judge([r for r in rows() if r[key] != one]).panels
        except (ValueError, IndexError, KeyError, ZeroDivisionError):
            continue
        assert not all(points for panel in panels for points in panel[3].values()), one


@pytest.mark.parametrize("name, knob, enough, less_so, others", LIMITS)
def test_each_condition_decides_by_itself(name, knob, enough, less_so, others):
    """One knob just beyond its limit, and one condition alone is broken."""
    changed = [{**others, knob: flat(x)} for x in (enough, less_so)]
    assert [judged(name, x) for x in changed] == ["held", "not held"]
    assert Counter(words(by_hand(name, rows(changed[1]))))["not held"] == 1


@pytest.mark.parametrize("name, changed", OPEN)
def test_noise_decides_nothing(name, changed):
    """One number within two errors; the seeds that would tell are counted. (One number of A01 has
    two conditions.)
    """
    word = judged(name, changed)
    assert word.startswith("inconclusive: ") and word.endswith("seeds would tell, if the means "
                                                               "stayed")
    assert Counter(words(by_hand(name, rows(changed))))["inconclusive"] in (1, 2)
    assert int(word.split("about ")[1].split()[0]) > 3


@pytest.mark.parametrize("name", RULES)
def test_the_rule_is_what_its_docstring_says(name):
    """Records at random, by little, more and much: the word that the docstring gives by hand."""
    found = Counter()
    for i in range(90):
        rng = np.random.default_rng([i, len(name), sum(map(ord, name))])
        size = (0.01, 0.1, 0.4)[i % 3]
        changed = {knob: tuple(x + size * (abs(x) + 0.1) * (rng.normal() + rng.normal(size=3) / 2))
                   for knob, x in {**GOOD, **{f"{v} {k}": ANY[k] for v in cai.VARIANTS
                                              for k in ANY if f"{v} {k}" not in GOOD}}.items()}
        lines = rows(changed)
        parts = words(by_hand(name, lines))
        want = min(parts, key=("not held", "inconclusive", "held").index)
        assert RULES[name].judge(lines).word.split(":")[0] == want, (name, i, parts)
        found[want] += 1
    assert set(found) == {"held", "not held", "inconclusive"}, found
    assert RULES[name].judge.__doc__.startswith("held: ")


def test_the_claims_need_what_is_measured():
    needed = {v for claim in RULES.values() for v in claim.needs[1]}
    assert needed == set(cai.VARIANTS)
    assert set(cai.KNOBS) < set(cai.VARIANTS) and RUNS == ("helpful", "hh", "hh engaged", "rl",
                                                           "reason")


def test_numbers_are_told_as_they_are():
    told = {name: claim.judge(rows()).told for name, claim in RULES.items()}
    assert told["A01"].startswith("with critiques: +0.10 ± 0.00 -> +0.50 ± 0.01 -> +0.60")
    assert "without: +0.10" in told["A01"] and told["A01"].endswith("10.0% ± 0.0%")
    assert "hard, drawn: better by gold 80.0% ± 0.9%, cross-entropy 0.700 ± 0.008" in told["A02"]
    assert "sure by 70.0% ± 0.8% without and 80.0% ± 0.9% with" in told["A03"]
    assert "reason 80 30.0%" in told["A03"] and "reason free 40.0%" in told["A03"]
    assert "helpful-only RLHF 0.21 ± 0.00" in told["A04"] and "SL-CAI is at helpful +0.50" in (
        told["A04"]) and "HH RLHF, harm alone +0.45 ± 0.01 / +0.90" in told["A04"]
    assert "helpful-only RLHF 1.00 ± 0.01 -> 2.00 ± 0.02; HH RLHF" in told["A05"]
    assert "commonest 10.0% ± 0.1% -> 20.0% ± 0.2%; preaches 10.0%" in told["A06"]
    assert "HH RLHF, harm alone 40.0%" in told["A07"] and "RL-CAI 1.0% ± 0.0%" in told["A07"]
    assert "harm alone -30 ± 0, HH RLHF, engaged +30" in told["late"]
    assert "on 69.0% ± 0.8%, two annotators on 70.0%" in told["labels"]
    assert "(A) +3.0 ± 0.0 points, the orders are 5.0 ± 0.0 points apart" in told["labels"]
    assert "text: better by gold 60.0% ± 0.7%, frontier area 0.05" in told["loop"]
    assert "preaches: harsh 30.0%" in told["remedies"] and "alone 50.0%" in told["remedies"]


# ---------------------------------------------------------------- paths, areas, figures

def of_path(seed, variant, *points):
    return dict(seed=seed, variant=variant, path=[
        dict(root=r, helpful=x, harmless=y) for r, x, y in points])


def test_areas_are_above_the_distilled_policy_of_the_seed():
    """Two points that don't dominate each other; the other seed's corner is higher."""
    lines = [of_path(1, "rl", (0, 2.0, 4.0)), of_path(0, "rl", (0, 3.0, 1.0), (1, 1.0, 4.0)),
             of_path(1, "hh", (0, 1.0, 2.0), (1, 9.0, 9.0)), of_path(0, "hh", (0, 0.0, 0.0))]
    assert constitution.areas(lines, "rl") == [3 * 1 + 1 * 3, 1 * 2]
    assert constitution.areas(lines, "hh") == [0, 8 * 7]
    assert covered([(3, 1), (1, 4)], (0, 0)) == 6 and covered([(2, 4)], (1, 2)) == 2
    with pytest.raises(ValueError):                                  # a seed without its corner
        constitution.areas(lines[:3], "rl")


def test_paths_of_unequal_numbers_of_stations():
    """The snapshots that both seeds have, and both ends, of which one would be a snapshot's place.
    """
    lines = [of_path(0, "rl", (0, 0.0, 1.0), (0.4, 0.5, 2.0), (0.8, 0.6, 9.0), (1.5, 2.0, 3.0)),
             of_path(1, "rl", (0, 0.2, 3.0), (0.4, 0.1, 4.0), (0.5, 4.0, 5.0))]
    found = constitution.over_path(lines, "rl", "harmless")
    assert [round(x, 6) for x in found] == [0, 0.4, 1.0]
    assert [*found.values()] == [(2.0, 1.0, 2), (3.0, 1.0, 2), (4.0, 1.0, 2)]
    assert [*constitution.over_path(lines[:1], "rl", "helpful").values()][2:] == [
        (0.6, 0.0, 1), (2.0, 0.0, 1)]
    assert constitution.over_path([], "rl", "helpful") == {}
    told = constitution.gold_panel(lines)
    assert [(round(x, 6), f[0]) for x, f in told[3]["RL-CAI"].items()] == [
        (0.1, 2.0), (0.3, 3.0), (3.0, 4.0)]


def turning():
    """A path that turns round, and comes by a place of before."""
    return constitution.frontier_panel("plane", "helpful", "harmless", {
        "run": [[(0.3, 1.0), (0.1, 2.0), (0.3, 3.0), (0.2, 4.0)]] * 2})


def test_a_frontier_has_its_stations_in_their_order():
    title, x, y, lines, is_path = turning()
    assert (title, x, y, is_path) == ("plane", "helpful", "harmless", True)
    assert [(round(x, 6), f) for x, f in lines["run"].items()] == [
        (0.3, (1.0, 0.0, 2)), (0.1, (2.0, 0.0, 2)), (0.3, (3.0, 0.0, 2)), (0.2, (4.0, 0.0, 2))]


def test_the_planes_show_the_right_numbers():
    gold, engaged, before = RULES["A04"].judge(rows()).panels

    def points(panel, label):
        return [(round(x, 4), round(f[0], 4)) for x, f in panel[3][label].items()]

    assert all(list(p[3]) == list(constitution.RUNS.values()) for p in (gold, engaged, before))
    assert points(gold, "RL-CAI") == [(0.5, 0.5), (0.6, 0.7), (0.7, 0.9)]
    assert points(gold, "HH RLHF, harm alone") == [(0.4, 0.2), (0.425, 0.55), (0.45, 0.9)]
    assert points(engaged, "HH RLHF, harm alone") == [(0, 0), (50, 60), (100, 30)]
    assert points(before, "HH RLHF, harm alone") == [(0, 0), (50, 40), (100, 90)]
    assert "engages" in engaged[0] and "alone" in before[0]
    harm, = RULES["A05"].judge(rows()).panels
    assert points(harm, "helpful-only RLHF") == [(0, 1), (1, 1.2), (2, 2)] and len(harm) == 4
    names = [p[2] for p in RULES["A06"].judge(rows()).panels]
    assert names == ["commonest", "preaches", "evades"]
    assert points(RULES["A06"].judge(rows()).panels[0], "rl") == [(0, 0.1), (1, 0.15), (2, 0.2)]


def test_a_path_is_drawn_in_its_order(here, monkeypatch):
    """Without the fifth element the same points are a curve over x, with a band."""
    plt = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    records.draw_curves("X", [turning(), turning()[:4]])
    (plane, curve) = kept[0].axes
    assert plane.lines[0].get_xdata() == pytest.approx([0.3, 0.1, 0.3, 0.2], abs=1e-6)
    assert [*plane.lines[0].get_ydata()] == [1, 2, 3, 4] and plane.lines[0].get_linestyle() == "-"
    assert [*curve.lines[0].get_ydata()] == [2, 4, 1, 3] and len(curve.collections) == 1
    assert Path("docs/claims/X.png").read_bytes()[:4] == b"\x89PNG"


def test_a_caption_says_the_axes_of_both_kinds_of_panels():
    for panel in (turning(), turning()[:4]):
        told = pages.caption("A04", RULES["A04"], [panel, ("bars", "", "share", {})])
        assert told == f"A04, {RULES['A04'].says}. plane: harmless against helpful; bars: share"
