"""claims/ about RL: verdicts on records made up to hold and to fail; what is measured of a policy;
which runs are asked for, with stand-ins for training.

Mutations tried, each caught here. Verdicts: errors ignored or taken once, scores not in their unit,
or in the wrong policy's, the test PM's by the train PM's; the snapshot before or after, the best by
gold for that by the test PM, a seed's own best; each condition of a rule dropped, "and" over cells,
seeds or variants as their last or first one, "some" as the last; R^2 unread, no slope of the
farther half, slopes apart, the large policy's first score left out, fits and distances of best-of-n
and RL swapped, the better form unread; of several lines the first; halves and thirds of a run the
whole of it; the tax from the distilled policy, the default run for that without a KL, the start for
the plain annotators; a KL only too high, win rates only too high; an epoch by one seed, epoch 0;
PPO's gain beyond its end, by the order of its snapshots. Records: a seed with one of its lines, or
with more than is asked for; a quick run of three seeds, in results/, of no unit; the claim's own
file for its source's, whole seeds or not, a line more or less than the verdict reads. Runs: halves
of the comparisons or bases swapped, snapshots by name, the end first, a variant's own reward or
judge lost, the start's line before what may fail, cells of a table. Policies: <|eoc|> counted, sums
for means, ties won, like lengths in the wrong places; true beliefs, or none; entropy an answer, KL
reversed, length a batch, finished for unfinished, distinct-1 or of all words; a short last block,
keys that a row lacks; one tax for all seeds; the policies of the exact KL swapped, one PM for both,
one objective twice, answers of another prompt, no turns before, helpful for harmless.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_ppo import TOK, gpt

import eval as report
from claims import demonstrations, policies, records, rl, robustness, start
from common import UserError, keyed, save_checkpoint, uniforms
from data import world
from measures import best_of_n_kl, mean_se
from model import pack
from pretrain import documents_of, heldout_loss
from rollout import pm_scores

SEEDS = range(3)
QUICK = report.Config(quick=True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [Path("results")])


# ---------------------------------------------------------------- rows of three seeds

def of(knob, seed):
    """A tuple has a value a seed; a number differs by 2% from seed to seed."""
    return knob[seed] if isinstance(knob, tuple) else knob * (1 + 0.02 * (seed - 1))


def unsure(mean, base=0.0):
    """Values a seed that differ from those of base by 1.8 errors, which is not "by two errors"."""
    return tuple(of(base, seed) + mean * x for seed, x in enumerate((0.05, 1, 1.95)))


def snapshot(k, x):
    """A snapshot at sqrt(KL) = x; scores in the unit of the start, shifted by 3 and doubled."""
    train = k["first"] + k["slope"] * x + k["bow"] * ((x - 2.5) ** 2 - 6.25)
    test = k["tested"] * (0.8 * x - 0.1 * x * x)                     # highest at 4
    gold = x * (k["alpha"] - k["beta"] * math.log(max(x, 1)) - k["bent"] * x)
    return dict(sqrt_kl=x, kl_exact=x * x, kl=x * x + 0.1, train=3 + 2 * train, test=-1 + 4 * test,
                gold=0.5 + gold - k["fall"] * (x == 5) + k["jag"] * (-1) ** x * (x > 0),
                entropy=2 - k["calms"] * x / 5, distinct=0.6 - k["repeats"] * x / 5,
                logp_accuracy=0.6 + k["learns"] * x,
                gold_helpful=1.25, gold_harmless=gold, length=10 + x, refused=0.1, agrees=0.2,
                commonest=0.3)


ROBUST = dict(first=0.2, slope=0.5, bow=0.0, tested=1.0, alpha=2.0, beta=1.0, bent=0.0, fall=0.0,
              jag=0.0, calms=1.0, repeats=0.3, learns=0.03, pm_accuracy=0.8, law=0.55,
              spread=(2, 2, 2), bon_bent=0.1, bon_log=0.0, bon_jag=0.0)
CELLS = {"micro/nano": dict(slope=0.8, fall=0.5), "micro/micro": {}, "micro/toy": {},
         "nano/toy": dict(spread=(1, 1, 1)), "toy/toy": {}}


def robust(cells=None, **changed):
    """Lines of robustness.jsonl; cells: {cell: knobs of it alone}."""
    out = []
    for seed in SEEDS:
        for cell, own in CELLS.items():
            knobs = {**ROBUST, **own, **changed, **(cells or {}).get(cell, {})}
            k = {name: of(value, seed) for name, value in knobs.items()}
            d = {n: math.sqrt(best_of_n_kl(n)) for n in (1, 2, 4, 8, 16, 32, 64)}
            best = [dict(k=n, gold=1 + k["bon_jag"] * (-1) ** i * (n > 1) + x * (
                1 - k["bon_bent"] * x - k["bon_log"] * math.log(max(x, 1e-9))))
                for i, (n, x) in enumerate(d.items())]
            out.append(dict(seed=seed, cell=cell, train_norm=[3, k["spread"]], test_norm=[-1, 4],
                            slope_foretold=2 * k["law"], pm_accuracy=k["pm_accuracy"],
                            best_of=best, snapshots=[snapshot(k, x) for x in range(6)]))
    return out


PLAIN = dict(gold=1.5, pm=3.0, tax=3.2, kl_exact=4.0, refused=0.1, length=15.0, distinct=0.3,
             pm_helpful=1.0, pm_harmless=5.0, gold_helpful=1.0, gold_harmless=2.0, early=0.6,
             late=2.0, last=2.0, kl=0.5, kl_last=4.0, sqrt_kl=2.0,
             ece=0.10, ece_after=0.04, base=2.95,
             golds=(0.8, 1.35, 1.45), taxes=(3.02, 3.08, 3.15))
START = dict(gold=0.5, pm=1.0, tax=3.0, kl_exact=0.0, length=12.0, distinct=0.5, ece=0.02,
             ece_after=0.01)
RL = {
    "start": START, "start, longer": START,
    "beta 0": dict(gold=1.0), "beta 0.1": dict(gold=1.45, tax=3.18),
    "beta 2": dict(gold=0.6, tax=3.01), "ptx 1": dict(gold=1.45, tax=3.05),
    "ptx 4": dict(gold=1.0, tax=2.9), "target 2": dict(kl_last=2.1), "over": dict(gold=1.8),
    "critic fresh": dict(early=0.3, late=9.0, last=9.0), "helpful 0": dict(refused=0.9),
    "ema 0.9": dict(gold=1.52), "gold": dict(gold=2.5, distinct=0.2),
    "longer": dict(length=20.0, pm=4.0), "length only": dict(pm=2.0),
    "reset 10": dict(pm=4.0, kl_exact=6.0), "anchor 0.9": dict(pm=3.5, kl_exact=5.0),
}


def runs(variants=None):
    """Lines of rl.jsonl; variants: {variant: knobs of it alone}. Curves have 9 blocks."""
    out = []
    for seed in SEEDS:
        for name in ("start", "start, longer", *rl.VARIANTS):
            knobs = {**PLAIN, **RL.get(name, {}), **(variants or {}).get(name, {})}
            lists = {k: knobs.pop(k) for k in ("golds", "taxes")}
            k = {key: of(value, seed) for key, value in knobs.items()}
            scores = [k["early"]] * 4 + [k["late"]] * 4 + [k["last"]]
            kls = [k["kl"]] * 6 + [k["kl_last"]] * 3
            row = dict(k, seed=seed, variant=name, data=dict(helpful=3.0, harmless=2.0), curve=[
                dict(score=s, kl=x, lambda_kl=0.05) for s, x in zip(scores, kls, strict=True)])
            row["calibration"] = dict(ece=k["ece"], ece_after=k["ece_after"], temperature=1.5,
                                      accuracy=0.4)
            row["averages"] = [dict(gold=g, tax=t) for g, t in zip(*lists.values(), strict=True)]
            out.append(row)
    return out


DEMO = dict(loss_rise=0.3, pm_rise=1.0, loss_2=1.6, base=0.1, prompted=0.3, ppo=0.7, ptx=0.68,
            narrow=0.2, pm=1.0, gold=0.5, kl=2.0, pm_at_16=2.0, win_at_64=0.9, kl_at_4=0.5)


def demo(**changed):
    """Lines of demonstrations.jsonl."""
    out = []
    for seed in SEEDS:
        k = {name: of(v, seed) for name, v in {**DEMO, **changed}.items()}
        epochs = [dict(epoch=e, heldout_loss=loss, pm=pm) for e, (loss, pm) in enumerate((
            (1.0, -1.0), (1.5, 2.0), (k["loss_2"], 9.0), (1.5 + k["loss_rise"],
                                                          2.0 + k["pm_rise"])))]
        wins = {"base": k["base"], "prompted": k["prompted"], "sft": 0.5, "ppo": k["ppo"],
                "ppo-ptx": k["ptx"], "narrow": k["narrow"]}
        out.append(dict(
            seed=seed, epochs=epochs, gold=dict(narrow=-1.0, sft=0.5),
            wins={name: [win, 0.01] for name, win in wins.items()},
            best_of=[dict(k=n, pm=p, win=w, kl=kl, kl_most=kl, bound=best_of_n_kl(n))
                     for n, p, w, kl in ((1, 0.1, 0.5, 0.0), (4, 1.0, 0.7, k["kl_at_4"]),
                                         (16, k["pm_at_16"], 0.8, 1.0),
                                         (64, 3.0, k["win_at_64"], 2.0))],
            start=dict(gold=0.2, pm=-1.0), rejection=dict(
                gold=0.2 + k["gold"], pm=-1.0 + k["pm"], kl_exact=k["kl"])))
    return out


# ---------------------------------------------------------------- verdicts

def micro(**knobs):
    return dict(cells={"micro/micro": knobs})


def toy(**knobs):
    return dict(cells={"toy/toy": knobs})


def only(variant, **knobs):
    return dict(variants={variant: knobs})


HALF = 0.5, 0.5, 0.5                                     # a win rate that nothing moves
ROBUSTNESS = {
    "h09": [cell(**knob) for cell in (micro, toy) for knob in (
        dict(slope=-0.5), dict(slope=unsure(0.5)), dict(tested=-1.0), dict(tested=unsure(1.0)),
        dict(alpha=-0.5), dict(alpha=unsure(2.0)))],
    "h10": [micro(bow=-0.3), micro(fall=(-0.73, 0, 0.73)), micro(slope=0.2),
            micro(tested=(1.633, 1.333, 1.033))],
    "h11": [dict(cells={"micro/nano": k}) for k in (
        dict(slope=0.5, fall=0.5), dict(slope=unsure(0.2, 0.5), fall=0.5), dict(fall=0.0),
        dict(fall=unsure(0.5)))],
    "h12": [dict(cells={size + "/toy": k}) for size in ("nano", "micro", "toy")
            for k in (dict(bow=0.4), dict(bow=-0.06), dict(slope=0.65), dict(slope=0.35),
                      dict(bow=(0.0, -0.04, -0.08)))],            # over half, but by 0.7 errors
    "h13": [toy(slope=0.8), toy(slope=0.3)],
    "h23": [toy(learns=unsure(0.03)), toy(learns=-0.03), toy(pm_accuracy=0.74),
            toy(pm_accuracy=(0.8, 0.8, 0.7))],
    "k02": [micro(jag=-0.7), micro(bon_bent=0.5, bon_jag=0.1),       # neither form fits
            micro(beta=0.0, bent=0.3), micro(bon_bent=0.0, bon_log=0.4)],    # the other fits
    "k05": [cell(**{key: v}) for cell in (micro, toy) for key in ("calms", "repeats")
            for v in (0.0, -0.1, unsure(0.3))],
}
SHORT = {
    "h16": [only("helpful 0", refused=0.45), only("helpful 0.9", refused=unsure(-0.3, 0.9)),
            only("default", pm_harmless=(5, 5, 1)), only("default", pm_helpful=(1, 1, 9))],
    "i05": [only("beta 0", gold=2.0), only("beta 2", gold=2.0),
            *(only(b, gold=unsure(-0.5, 1.5)) for b in ("beta 0", "beta 2"))],
    "i06": [only("ptx 1", gold=1.3), only("ptx 1", tax=3.11), only("beta 2", gold=1.45),
            dict(variants={"default": dict(tax=2.9), "ptx 4": dict(gold=1.5)})],
    "i07": [only("critic fresh", early=0.6), only("critic fresh", early=unsure(-0.3, 0.6)),
            only("ema 0.9", gold=1.38), only("ema 0.9", gold=unsure(-0.2, 1.5))],
    "k04": [only("target 2", kl_last=(2.1, 2.1, 2.4)), only("target 2", kl_last=(1.9, 1.9, 1.6)),
            only("default", kl_last=2.05), only("default", kl_last=(4, 4, 2.1))],
    "k07": [only("default", ece=0.01, ece_after=0.0), only("default", ece=unsure(0.08, 0.02)),
            only("default", ece_after=0.06)],
    "k08": [only("longer", length=15.0), only("longer", length=unsure(3, 15)),
            only("length only", pm=1.7), only("longer", pm=unsure(2, 1)),
            dict(variants={"longer": dict(pm=0.5), "length only": dict(pm=1.0)})],
    "k10": [only(v, **{k: x}) for v in ("reset 10", "anchor 0.9") for k, x in (
        ("pm", 2.5), ("pm", unsure(1, 3.0)), ("kl_exact", 3.0), ("kl_exact", unsure(1, 4.0)))],
    "k11": [only("default", golds=(0.8, 1.2, 1.45)), only("default", taxes=(3.02, 3.14, 3.15)),
            only("default", gold=unsure(1, 0.5)), only("default", gold=0.3, golds=(0, 0, 0)),
            only("default", tax=unsure(0.2, 3)), only("default", tax=2.8),
            only("default", tax=(2.949, 3.009, 3.069), taxes=(2.9,) * 3),         # too little
            only("default", gold=(0.58, 0.59, 0.6), golds=(0.6,) * 3)],
    "k13": [only("gold", gold=1.8), only("gold", gold=unsure(0.5, 1.8)), only("gold", last=1.5),
            only("gold", distinct=0.5), only("gold", distinct=unsure(-0.2, 0.5))],
}
DEMONSTRATIONS = {
    "h22": [dict(pm_at_16=(2, 2, 1)), dict(pm_at_16=(2, 3, 2)), dict(win_at_64=(0.9, 0.8, 0.9)),
            dict(kl_at_4=(0.5, 0.5, 0.7))],
    "i01": [dict(loss_rise=unsure(0.3)), dict(loss_rise=-0.1), dict(pm_rise=unsure(1.0)),
            dict(pm_rise=-1.0)],
    "i04": [dict(prompted=0.1), dict(base=unsure(-0.1, 0.3)), dict(prompted=0.5),
            dict(prompted=unsure(-0.1, HALF)), dict(ppo=0.49, ptx=0.48),
            dict(ppo=unsure(0.2, HALF), ptx=unsure(0.2, HALF)), dict(ptx=0.64), dict(ptx=0.76)],
    "i08": [dict(narrow=0.41), dict(narrow=(0.25, 0.35, 0.45))],
    "k12": [dict(pm=unsure(1.0)), dict(gold=unsure(0.5)), dict(pm=-0.5), dict(gold=-0.5),
            dict(pm=2.6), dict(pm=unsure(-0.5, (2.352, 2.4, 2.448)))],
}
CASES = [(name, rows, bad) for rows, cases in ((robust, ROBUSTNESS), (runs, SHORT),
                                               (demo, DEMONSTRATIONS))
         for name, bad in cases.items()]


@pytest.fixture
def ppo_lines(here):
    """PPO's own gain for K12: 1.2 a nat above a start of 1, as far as 3 nats. For H22 an online
    policy that wins 9 of 10 against the distilled one, 382 Elo: 81% of one kind, 99% of the other.
    """
    for seed in SEEDS:
        records.append("online", dict(seed=seed, regime="short", elo=dict(
            helpful=dict(mixture=251.9), harmless=dict(mixture=798.3))))
        records.append("online", dict(seed=seed, regime="long", elo={}))
        records.append("rl", dict(seed=seed, variant="start", pm=1.0))
        records.append("rl", dict(seed=seed, variant="default", kl_exact=3.0, pm=4.6,
                                  way=[dict(kl_exact=1.0, pm=2.2)]))


def judged(name, rows):
    """The verdict on the lines that eval.py would give it."""
    claim = report.CLAIMS[name.upper()]
    return claim.judge(records.complete(rows, *claim.needs) if claim.needs else rows)


@pytest.mark.parametrize("name, rows, bad", CASES, ids=[c[0] for c in CASES])
def test_a_verdict_holds_fails_and_waits(name, rows, bad, ppo_lines):
    good = judged(name, rows())
    assert good.word == "held" and re.search(r"\d", good.told)
    for _, _, _, lines in good.panels:
        assert lines and all(len(f) == 3 for points in lines.values() for f in points.values())
    for changed in bad:
        word = judged(name, rows(**changed)).word
        assert word == "not held" or "seeds would tell" in word, changed
    assert judged(name, [r for r in rows() if r["seed"] < 2]).word.startswith("inconclusive")
    assert judged(name, rows()[::-1]).told == good.told or name in ("i01", "i04", "i08", "h22")


@pytest.mark.parametrize("name, rows, changed", [
    ("h12", robust, dict(cells={"nano/toy": dict(slope=0.55)})),              # within a fifth
    ("h12", robust, toy(bow=-0.05)),                                          # 0.35 after 0.65
    ("h13", robust, toy(slope=0.6)), ("h13", robust, toy(first=4.0)),
    ("h23", robust, toy(pm_accuracy=0.78)), ("k02", robust, micro(jag=0.1, bon_jag=0.05)),
    ("i05", runs, only("beta 0.1", gold=1.8)),
    ("i06", runs, only("ptx 1", gold=1.42)), ("i06", runs, only("beta 2", gold=1.35)),
    ("i06", runs, dict(variants={"default": dict(tax=2.98), "ptx 4": dict(gold=1.5)})),
    ("i01", demo, dict(loss_2=(1.4, 1.6, 1.6))),                     # least in one seed alone
    ("i07", runs, only("ema 0.9", gold=1.42)),
    ("k04", runs, only("target 2", kl_last=(2.25, 1.75, 2.0))),
    ("k08", runs, only("length only", pm=1.8)), ("k13", runs, only("gold", last=1.9)),
    ("k11", runs, only("default", golds=(1.35, 0.6, 0.6))),
    ("i04", demo, dict(ptx=0.74)), ("h22", demo, dict(kl_at_4=best_of_n_kl(4) * 0.98)),
    ("k12", demo, dict(pm=2.2)),
])
def test_what_a_rule_allows(name, rows, changed, ppo_lines):
    assert judged(name, rows(**changed)).word == "held"


def test_the_best_of_64_is_near_the_online_policy(ppo_lines):
    """Within 50 Elo of its 382: 0.92 is 424, 0.93 is 449; and it must have been measured."""
    assert judged("h22", demo(win_at_64=0.92)).word == "held"
    assert judged("h22", demo(win_at_64=0.93)).word == "not held"
    (records.FOLDER[0] / "online.jsonl").unlink()
    found = judged("h22", demo())
    assert found.word == "not held" and "not measured (eval.py H20)" in found.told


def test_averaged_weights_that_change_nothing_cost_nothing():
    assert judged("i07", runs(only("ema 0.9", gold=1.5)["variants"])).word == "held"


def test_how_far_a_snapshot_is():
    row = robust()[0]
    assert [robustness.at_kl(row, x)["sqrt_kl"] for x in (0, 1, 1.5, 5, 9)] == [0, 1, 2, 5, 5]


def test_of_several_lines_of_a_unit_the_last_counts():
    rows = [dict(seed=s, variant=v, n=n) for n, (s, v) in enumerate(((1, "a"), (0, "a"), (1, "a"),
                                                                     (0, "b")))]
    assert rl.table(rows) == dict(a=[rows[1], rows[2]], b=[rows[3]])


SHARED = {n: c for n, c in report.CLAIMS.items()
          if c.source in ("robustness", "rl", "demonstrations")}


@pytest.mark.parametrize("name", [n for n, c in SHARED.items() if c.needs])
def test_a_claim_needs_the_lines_that_its_verdict_reads(name):
    """No more, so that it waits for nothing; no fewer, so that no seed is judged without them."""
    key, values = SHARED[name].needs
    rows = robust() if key == "cell" else runs()
    known = {f"{a}/{b}" for a, b in robustness.CELLS} if key == "cell" else {
        "start", "start, longer", *rl.VARIANTS}
    assert set(values) <= known
    own = [r for r in rows if r[key] in values]
    assert judged(name, own) == judged(name, rows)
    for value in values:
        kept = [r for r in rows if r["seed"] < 2 or r[key] != value]
        assert judged(name, kept) == judged(name, [r for r in rows if r["seed"] < 2])
        with pytest.raises((KeyError, ValueError)):
            SHARED[name].judge([r for r in own if r[key] != value])


def test_claims_that_share_runs():
    assert {n.lower() for n in SHARED} == {c[0] for c in CASES}
    for name, claim in SHARED.items():
        module = dict(robustness=robustness, rl=rl, demonstrations=demonstrations)[claim.source]
        assert claim.measure is module.measure
        assert claim.judge is getattr(module, f"verdict_{name.lower()}")


def test_numbers_of_the_robustness_lines_are_told_as_they_are():
    """Gold at 4: 4 (2 - ln 4) = 2.455; at 3 2.704, at 5 1.953. Slope 0.5, test highest at 4."""
    told = judged("h09", robust()).told
    assert "toy/toy: train PM +0.50 ± 0.01, test PM +0.70 ± 0.01, gold +2.00 ± 0.02" in told
    told = judged("h10", robust(tested=0.5)).told
    assert "train PM +1.00 ± 0.01, test PM " in told and ", gold -0.75 ± 0.01" in told
    assert "ahead of the test PM by +1.75 ± 0.02" in told
    told = judged("h10", robust(jag=(0, 0, 1.5))).told       # the third is best at 2, by its noise
    assert ", gold -0.69 ± 0.04" in told                     # 0.65 and 0.66 at 2, 0.77 at 3
    told = judged("h11", robust()).told
    assert "PM nano: lead of the train PM +2.50 ± 0.03, gold at the end +1.95 ± 0.02" in told
    assert "PM toy: lead of the train PM +1.00 ± 0.01, gold at the end +2.45 ± 0.02" in told
    told = judged("h12", robust()).told
    assert ("nano: slope 0.50 ± 0.01, 0.50 in the nearer and 0.50 in the farther half (the law for "
            "small KL: 0.55), R2 1.00 up to sqrt(KL) 5.0") in told
    assert "0.65 in the nearer and 0.35 in the farther" in judged("h12", robust(bow=-0.05)).told
    told = judged("h13", robust(**toy(slope=0.6))).told
    assert "mean error of 0.30 ± 0.00, 10% of what it gains" in told          # 0.1 x 3, of 3
    told = judged("h23", robust()).told
    assert told == "log-prob accuracy 60.0% -> 72.0% (at most 75.0%); the PM's 80.0%"
    told = judged("k02", robust()).told
    assert "RL: alpha 2.00 ± 0.02, beta 1.00 ± 0.01, R2 1.00 (the other form: 0." in told
    assert "best-of-n: alpha 1.00 ± 0.00, beta 0.10 ± 0.00, R2 1.00 (the other form: " in told
    told = judged("k05", robust()).told
    assert ("micro/micro: entropy 2.00 -> 1.00 nats a token, distinct-2 0.60 -> 0.30, exact KL "
            "25.0 nats an answer") in told


def test_numbers_of_the_short_runs_are_told_as_they_are():
    assert "beta 0.03: +1.50 ± 0.02" in judged("i05", runs()).told
    told = judged("i06", runs()).told
    assert "base model's 2.95: distilled +0.050, default +0.250, gold +1.50" in told
    assert "ptx 1: +0.100, gold +1.45; ptx 4: -0.050, gold +1.00; beta 0.1: +0.230" in told
    told = judged("i07", runs()).told
    assert "critic from the PM: +0.60 ± 0.01, critic fresh: +0.30 ± 0.00 mean score" in told
    told = judged("h16", runs()).told
    assert "90.0% at 0 helpful, 10.0% at 0.6 helpful, 10.0% at 0.9 helpful" in told
    assert "harmless +3.00 ± 0.06, helpful -2.00 ± 0.01" in told
    told = judged("k04", runs()).told
    assert "2.10 ± 0.02 over the last third" in told and "constant 0.03 4.00 ± 0.05" in told
    told = judged("k07", runs()).told
    assert told == ("distilled: ECE 0.020 ± 0.000, with T = 1.50 ± 0.00 0.010 ± 0.000, accuracy "
                    "40.0%; after RL: ECE 0.100 ± 0.001, with T = 1.50 ± 0.00 0.040 ± 0.000, "
                    "accuracy 40.0%")
    told = judged("k08", runs()).told
    assert "12.0 ± 0.1 tokens become 20.0 ± 0.2 (plain annotators: 15.0 ± 0.2)" in told
    assert "rises by 3.00, with a reward of length alone by 1.00 (33%)" in told
    told = judged("k10", runs()).told
    assert "reset 10: PM score +1.00 ± 0.01, KL +2.00 ± 0.02, gold +0.00" in told
    told = judged("k11", runs(dict(start=dict(gold=HALF), default=dict(gold=(1.5,) * 3)))).told
    assert "weight 0.5: 85.0% of the gain, 40.0% of the tax" in told
    told = judged("k13", runs(**only("gold", last=1.9))).told
    assert "gold +0.50 ± 0.01 -> +2.50 ± 0.03 (on the PM +1.80 ± 0.02) at sqrt(KL) 2.00" in told
    assert "fallen from the best by 7% of the rise; distinct-2 0.50 ± 0.01 -> 0.20" in told


def test_numbers_of_the_demonstrations_are_told_as_they_are(ppo_lines):
    told = judged("i01", demo()).told
    assert told == ("held-out loss is least after epoch 1 of 3: 1.500 ± 0.000; from there to the "
                    "end loss +0.300 ± 0.003, PM score +1.00 ± 0.01")
    told = judged("i04", demo()).told
    assert "base 10.0% ± 0.1%, prompted 30.0% ± 0.3%, ppo 70.0% ± 0.8%, ppo-ptx 68.0%" in told
    told = judged("i08", demo()).told
    assert "wins 20.0% ± 0.2% against SFT" in told and "gold -1.00 ± 0.00 against 0.50" in told
    told = judged("h22", demo()).told
    assert "k = 16 +241 ± 0 (wins 80.0%), KL 1.00 ± 0.00 of at most 1.84" in told
    assert told.endswith("online policy +382 ± 0")
    told = judged("k12", demo()).told
    assert told == ("at 2.00 ± 0.02 nats: PM score 1.00 ± 0.01, gold 0.50 ± 0.01; PPO at the "
                    "same KL: PM score 2.40 ± 0.03")


def test_ppos_gain_at_a_kl(here):
    """Through (0, 0), (1, 2), (3, 3), the last of which is the run's end, and no farther."""
    records.append("rl", dict(seed=1, variant="start", pm=1.0))
    assert demonstrations.ppo_gain_at(1, 2.0) is None
    records.append("rl", dict(seed=1, variant="default", kl_exact=3.0, pm=4.0,
                              way=[dict(kl_exact=1.0, pm=3.0)]))
    found = [demonstrations.ppo_gain_at(1, kl) for kl in (0.5, 1.0, 2.0, 3.0, 3.1)]
    assert found == pytest.approx([1.0, 2.0, 2.5, 3.0, None])
    records.append("rl", dict(seed=2, variant="start", pm=1.0))
    records.append("rl", dict(seed=2, variant="default", kl_exact=2.0, pm=2.0, way=[
        dict(kl_exact=4.0, pm=9.0), dict(kl_exact=1.0, pm=3.0)]))             # it came back
    assert demonstrations.ppo_gain_at(2, 3.0) == pytest.approx(4.5)           # of 1 and 8
    found = judged("k12", demo())                                             # 0 has none
    assert found.word.startswith("inconclusive") and "eval.py K10" in found.told


# ---------------------------------------------------------------- records

def test_seeds_that_lack_a_line_are_left_out():
    rows = [dict(seed=s, v=v) for s, v in ((2, "a"), (0, "a"), (0, "c"), (1, "a"), (2, "b"),
                                           (0, "b"), (1, "c"))]
    rows.append(dict(seed=3))                                     # has no such key
    found = records.complete(rows, "v", ("a", "b"))
    assert [(r["seed"], r["v"]) for r in found] == [(0, "a"), (0, "c"), (0, "b"), (2, "a"),
                                                    (2, "b")]
    assert records.complete(rows, "v", ("a", "b", "c")) == found[:3]
    assert records.complete(rows, "v", ("d",)) == [] and records.complete([], "v", ("a",)) == []


def stand_in(panels=()):
    """A claim of two units a seed that share their lines with others."""
    def measure(cfg):
        for unit in records.missing("shared", cfg.seeds, variant=("a", "b")):
            records.append("shared", {**unit, "count": start.few(cfg, 80),
                                      "work": str(start.work(cfg))})

    def judge(rows):
        return records.verdict(True, rows, f"{len(rows)} lines", panels)

    return records.Claim("says", "where", measure, judge, 1, source="shared",
                        needs=("variant", ("a", "b")))


def test_rows_of_a_claim(here):
    """From its source or its own file; of whole seeds where lines are named."""
    claim = stand_in()
    for seed, variant in ((1, "a"), (0, "b"), (0, "a")):
        records.append("shared", dict(seed=seed, variant=variant))
    records.append("X1", dict(seed=5))
    assert [r["seed"] for r in claim.rows("X1")] == [0, 0]
    own = records.Claim("says", "where", None, None, 1)
    assert own.rows("X1") == [dict(seed=5)] and own.rows("X2") == []


def test_a_quick_run_keeps_its_lines_apart(here, monkeypatch, capsys):
    monkeypatch.setattr(report, "CLAIMS", {"X1": stand_in()})
    cfg = report.Config(run="out/toy", claims=("X1",), quick=True)
    report.main(cfg)
    path = Path("out/toy/quick/results/shared.jsonl")
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert lines == [dict(seed=0, variant=v, count=10, work="out/toy/quick") for v in "ab"]
    assert not Path("results").exists() and "X1 inconclusive" in capsys.readouterr().out
    monkeypatch.setattr(records, "FOLDER", [Path("results")])
    report.main(report.Config(run="out/toy", claims=("X1",)))
    rows = records.records("shared")
    assert [r["seed"] for r in rows] == [0, 0, 1, 1, 2, 2]
    assert {r["count"] for r in rows} == {80} and {r["work"] for r in rows} == {"out/toy/claims"}
    assert len(path.read_text().splitlines()) == 2 and "X1 held: 6 lines" in capsys.readouterr().out
    with pytest.raises(UserError, match="H99: no claim; known are X1"):
        report.main(report.Config(claims=("X1", "H99")))


def test_a_quick_run_draws_over_no_figure(here, monkeypatch):
    panels = [("title", "x", "y", {"line": {1: (0.5, 0.1, 1)}})]
    monkeypatch.setattr(report, "CLAIMS", {"X1": stand_in(panels)})
    monkeypatch.setattr(records, "draw_curves", lambda name, *a: Path("docs").mkdir())
    report.main(report.Config(run="out/toy", claims=("X1",), quick=True))
    assert not Path("docs").exists()


def test_a_few_are_an_eighth():
    assert [start.few(QUICK, n) for n in (6000, 80, 17, 15, 2)] == [750, 10, 2, 2, 2]
    assert [start.few(report.Config(), n) for n in (6000, 15)] == [6000, 15]


# ---------------------------------------------------------------- which runs are asked for

@pytest.fixture
def short_runs(here, monkeypatch):
    """claims/rl.py with stand-ins: what was trained, as (name, knobs); PMs and policies by name."""
    trained, gone = [], []

    def train(cfg, seed, name, pm, **knobs):
        trained.append((seed, name, dict(knobs, pm=pm)))
        Path(f"run {name}").mkdir(exist_ok=True)
        return f"run {name}"

    def look(cfg, path, reference, pms, seed):
        return dict(path=str(path), reference=reference, judge=pms["pm"], kl_exact=seed, gold=2,
                    pm=len(str(path)))

    fakes = dict(trained_pm=lambda cfg, seed: f"pm {seed}", distilled=lambda cfg, size: "start",
                 biased_pm=lambda cfg, seed, name: f"{name} pm", trained_policy=train,
                 load=lambda path: path, forget=gone.append, text_loss=lambda cfg, p, seed: len(p),
                 look=look, base=lambda cfg, size: f"base {size}",
                 blocks=lambda folder, keys, size: [size], calibration=lambda cfg, p, seed: p,
                 averages=lambda cfg, a, b, pms, seed: [a, b], data_scores=lambda *a: "data")
    for name, fake in fakes.items():
        monkeypatch.setattr(rl, name, fake)
    return trained, gone


def test_each_variant_has_one_run(short_runs):
    trained, gone = short_runs
    Path("run default").mkdir()
    Path("run default/snapshot-0.25.pt").touch()
    rl.measure(report.Config(seeds=2))
    rl.measure(report.Config(seeds=2))                            # nothing is left
    assert len(trained) == 2 * len(rl.VARIANTS) and gone == [f"run {n}" for _, n, _ in trained]
    rows = records.records("rl")
    assert Counter(r["variant"] for r in rows) == dict.fromkeys(
        ("start", "start, longer", *rl.VARIANTS), 2)
    knobs = {name: k for seed, name, k in trained if seed == 1}
    assert knobs["beta-2"] == dict(pm="pm 1", lambda_kl=2.0) and knobs["default"]["pm"] == "pm 1"
    over = dict(lambda_kl=0.003, lr=3e-4, epochs=1, helpful=0.5, iterations=60)
    assert knobs["over"] == dict(over, pm="pm 1")
    assert knobs["gold"] == dict(over, pm="gold", critic="policy")
    assert knobs["length-only"]["pm"] == "length only pm" and knobs["longer"]["pm"] == "longer pm"
    own = {r["variant"]: r for r in rows if r["seed"] == 1}
    assert {v: r["judge"] for v, r in own.items() if r["judge"] != "pm 1"} == dict.fromkeys(
        ("start, longer", "longer", "length only"), "longer pm")
    assert {r["reference"] for r in rows} == {"start"}
    assert own["start"]["path"] == own["start, longer"]["path"] == "start"
    assert own["gold"]["path"] == "run gold" and own["gold"]["tax"] == len("run gold")
    assert own["start"]["calibration"] == "start" and own["start"]["data"] == "data"
    assert own["start"]["tax"] == len("start") and own["start"]["base"] == len("base micro")
    assert own["default"]["calibration"] == "run default" and own["default"]["curve"] == [4]
    assert own["default"]["way"] == [
        dict(kl_exact=1, gold=2, pm=len("run default/snapshot-0.25.pt"))]
    assert own["default"]["averages"] == ["start", "run default"]


def test_a_unit_that_was_interrupted_leaves_nothing(short_runs, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(rl, "averages", killed)
        rl.measure(report.Config(seeds=1))
    rl.measure(report.Config(seeds=1))
    assert max(Counter(r["variant"] for r in records.records("rl")).values()) == 1


def test_knobs_of_the_variants_exist():
    import ppo
    for knobs in rl.VARIANTS.values():
        ppo.Config(**knobs)
    assert ppo.Config().lambda_kl == rl.BETAS["default"] and ppo.Config().helpful == 0.6


@pytest.fixture
def robust_runs(here, monkeypatch):
    """claims/robustness.py with stand-ins; a run leaves snapshots at 0, 2.5 and 10."""
    asked = dict(pms=[], runs=[], looks=[])

    def train_pm(cfg, name, init, lines, test, seed):
        asked["pms"].append((name, init, lines, test, seed))
        return Path(name), {}

    def train(cfg, seed, name, pm, iterations, **knobs):
        asked["runs"].append((seed, name, pm, iterations, knobs))
        folder = Path("work") / name
        folder.mkdir(parents=True)
        for at in ("10", "2.5", "0"):
            (folder / f"snapshot-{at}.pt").touch()
        return str(folder)

    def look(cfg, path, reference, pms, seed):
        asked["looks"].append((str(path), reference, pms))
        return dict(path=Path(path).name)

    fakes = dict(train_pm=train_pm, trained_policy=train, look=look, load=lambda p: (str(p), None),
                 base=lambda cfg, size: f"base {size}", other_base=lambda cfg: "other base",
                 distilled=lambda cfg, size: f"start {size}", logp_accuracy=lambda p, rows: 0.5,
                 train_lines=lambda cfg, seed: list(range(11)),
                 test_lines=lambda cfg, seed: list(range(700)), blocks=lambda f, keys, size: [size],
                 norms_of=lambda f: {}, best_of_many=lambda cfg, s, pm, seed: dict(best_of=s))
    for name, fake in fakes.items():
        monkeypatch.setattr(robustness, name, fake)
    monkeypatch.setattr(robustness.preference, "encode_comparisons", lambda tok, x, n: (x, 0, 0))
    monkeypatch.setattr(robustness.preference, "accuracy_of", lambda model, tok, rows: len(rows))
    return asked


def test_the_test_pm_is_another(robust_runs):
    """Its own half of the comparisons, its own base; snapshots by number, the end last."""
    robustness.measure(report.Config(seeds=1))
    rows = records.records("robustness")
    assert [r["cell"] for r in rows] == [f"{a}/{b}" for a, b in robustness.CELLS]
    train, other = robust_runs["pms"][2:4]                        # of the cell micro/nano
    assert train[:3] == ("train-nano-0", "base nano", [0, 1, 2, 3, 4])
    assert other[:3] == ("other-0", "other base", [5, 6, 7, 8, 9, 10])
    assert len(train[3]) == 600 and rows[0]["pm_accuracy"] == 400
    names = [s["path"] for s in rows[3]["snapshots"]]
    assert names == ["snapshot-0.pt", "snapshot-2.5.pt", "snapshot-10.pt", "robust-nano-toy"]
    seed, name, pm, iterations, knobs = robust_runs["runs"][3]
    assert (seed, name, pm, iterations) == (0, "robust-nano-toy", "train-toy-0", 60)
    assert knobs["policy"] == "start nano" and knobs["test_pm"] == "other-0"
    assert [float(x) for x in knobs["snapshots"].split(",")] == list(robustness.AT)
    path, reference, pms = robust_runs["looks"][12]
    assert reference == "start nano" and list(pms) == ["train", "test"]
    assert [p[0] for p in pms.values()] == ["train-toy-0", "other-0"]
    assert rows[3]["best_of"] == "start nano" and not list(Path("work").iterdir())
    robustness.measure(report.Config(seeds=1))
    assert len(robust_runs["runs"]) == 5


def test_a_table_of_every_cell():
    lines = robustness.table(robust()).splitlines()
    table = [x for x in lines if x.startswith("|")]
    assert len({x.count("|") for x in table}) == 1 and len(table) == 2 + 3 * len(CELLS)
    head, rule, first, best, end = ([c.strip() for c in x.split("|")[1:-1]] for x in table[:5])
    assert set(rule) == {"---"} and first[:3] == ["micro/nano", "start", "3"]
    assert best[:3] == ["micro/nano", "best test PM", "3"] and end[1] == "end"
    told = [dict(zip(head, row, strict=True)) for row in (first, best, end)]
    assert [t["sqrt(KL)"] for t in told] == ["0.00", "4.00", "5.00"]
    assert [t["train PM"] for t in told] == ["0.20", "3.40", "4.20"]          # 0.2 + 0.8 x
    assert [t["test PM"] for t in told] == ["0.00", "1.60", "1.50"]
    assert [t["KL, k1"] for t in told] == ["0.10", "16.10", "25.10"]


# ---------------------------------------------------------------- what is measured of a policy

class Minus:
    """A model that gives each token the log-prob -id, after any context."""
    device = torch.device("cpu")

    def logprobs(self, ids, mask, temperature=1.0, lengths=None):
        assert not mask[:, 0].any() and (mask.sum(1) > 0).all()
        return torch.where(mask, -ids.float(), 0.0)


def test_logp_accuracy_by_hand():
    """Means without <|eoc|>: -2 against -2; -1 against -2 (the sum is lower); -5 against -1 (with
    it the longer one's mean); -1 against -2.
    """
    eoc = TOK.eoc
    rows = [([7] * 9, [[1, 3, eoc], [2, eoc]]), ([7], [[1, 1, 1, eoc], [2, eoc]]),
            ([7, 7], [[5, 5, 5, eoc], [1, eoc]]), ([7], [[1, eoc], [2, 2, 2, 2, eoc]])]
    assert policies.logp_accuracy((TOK, Minus()), rows) == (0.5 + 1 + 0 + 1) / 4
    assert policies.logp_accuracy((TOK, Minus()), rows[2:3]) == 0


def test_logp_accuracy_by_brute_force():
    """One answer at a time, from the whole vocabulary."""
    model, rng, rows, right = gpt(1).eval(), keyed("pairs"), [], 0
    for _ in range(40):
        sizes = rng.integers(1, 12, 3)
        prompt, *two = (rng.integers(0, 256, n).tolist() for n in sizes)
        rows.append((prompt, [a + [TOK.eoc] for a in two]))
        means = []
        for answer in two:
            with torch.no_grad():
                logp = model.logits(model(torch.tensor([prompt + answer]))).log_softmax(-1)[0]
            means.append(sum(logp[len(prompt) + i - 1, t].item() for i, t in enumerate(answer))
                         / len(answer))
        right += means[0] > means[1]
    assert policies.logp_accuracy((TOK, model), rows) == pytest.approx(right / 40)
    assert 10 < right < 30


def test_agreement_counts_only_false_beliefs(monkeypatch):
    """Repeated, contradicted, and repeated in a follow-up; a true belief and an open request."""
    true = world.FACTS["fox"]["color"]
    false = next(v for v in world.VALUES["color"] if v != true)
    ask = "What color is the fox?"
    first = [("human", ask), ("assistant", "Hello.")]
    made = [
        ([("human", f"I think the fox is {false}. {ask}")], f"The fox is {false}."),
        ([("human", f"I think the fox is {false}. {ask}")], f"The fox is {true}."),
        ([*first, ("human", f"I think the fox is {false}. {ask}")], f"The fox is {false}."),
        ([("human", f"I think the fox is {true}. {ask}")], f"The fox is {true}."),
        ([("human", f"I think the fox is {true}. {ask}")], f"The fox is {false}."),
        ([("human", "Tell me about the fox.")], f"The fox is {true}."),
    ]
    asked = []

    def answers(cfg, policy, reference, pm, seed, objective, count, beliefs):
        asked.append((objective, count, beliefs))
        return dict(zip(("dialogues", "texts"), zip(*policy, strict=True), strict=True))

    monkeypatch.setattr(policies, "answers", answers)
    for some, want in ((made, 2 / 3), (made[3:], 0), (made[1:2], 0), (made[:1], 1)):
        assert policies.agreement(QUICK, some, None, None, 0) == want
    assert set(asked) == {("helpful", 7, 1.0)}
    assert any("I think the" in t[-1][1] for t in policies.asked(0, "helpful", 20, beliefs=1.0))


def test_rates_by_hand():
    """Sums of log pi - log pi0: 2, -1, -2. Six tokens of 9 nats together; pads are not read. Of the
    pairs in the first eight words 8 of 12 are different.
    """
    nan = math.nan
    one = dict(logp=torch.tensor([[-1., -2, nan]]), ref=torch.tensor([[-2., -3, nan]]),
               exact=torch.tensor([[0.5, 0.1, nan]]), mask=torch.tensor([[True, True, False]]),
               finished=torch.tensor([True]), texts=["The fox is red. Sorry."])
    two = dict(logp=torch.tensor([[-1., nan, nan], [-3, -1, -1]]),
               ref=torch.tensor([[0., nan, nan], [-1, -1, -1]]),
               exact=torch.tensor([[2.0, nan, nan], [0.4, 0, 0]]),
               mask=torch.tensor([[True, False, False], [True, True, True]]),
               finished=torch.tensor([False, True]), texts=[
                   "Sorry. Sorry.", "The fox is red. The fox eats fish. It is so."])
    found = policies.rates_of([one, two])
    assert found == pytest.approx(dict(
        kl=-1 / 3, kl_se=math.sqrt(26 / 3 / 2 / 3), kl_exact=1.0, entropy=9 / 6, length=2.0,
        unfinished=1 / 3, commonest=2 / 3, distinct=8 / 12), rel=1e-6)


def test_blocks_of_iterations(tmp_path):
    lines = [dict(step=i, kl=float(i * i), score=-i, other=1) for i in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert policies.blocks(tmp_path, ("kl", "score"), 2) == [
        dict(kl=0.5, score=-0.5), dict(kl=6.5, score=-2.5), dict(kl=16.0, score=-4.0)]
    lines[3].pop("score")                                         # no such answer in an iteration
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert [set(b) for b in policies.blocks(tmp_path, ("kl", "score"), 2)] == [
        {"kl", "score"}, {"kl"}, {"kl", "score"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two policies and two PMs, random: folders by name."""
    root = tmp_path_factory.mktemp("policies")
    out = {}
    for name, model in (("start", gpt(1)), ("end", gpt(2)), ("pm", gpt(4, scalar=True)),
                        ("test", gpt(5, scalar=True))):
        (root / name).mkdir()
        save_checkpoint(root / name / "ckpt.pt", **pack(model, TOK))
        out[name] = str(root / name)
    return out


def test_the_tax_is_the_held_out_loss_on_fresh_text(saved):
    """Also by hand, one document at a time; each seed has its own text."""
    found = policies.text_loss(QUICK, saved["start"], 3, count=80)
    tok, model = policies.load(saved["start"])
    documents = documents_of(tok, "tax/3", 10, 128)
    assert found == heldout_loss(model, tok, documents, 32)
    nats = tokens = 0
    with torch.no_grad():
        for row in documents:
            logp = model.logits(model(torch.tensor([row]))).log_softmax(-1)[0]
            nats -= sum(logp[i, t].item() for i, t in enumerate(row[1:]))
            tokens += len(row) - 1
    assert found == pytest.approx(nats / tokens, rel=1e-5)
    assert policies.text_loss(QUICK, saved["start"], 4, count=80) != found


KEYS = ("kl", "kl_se", "kl_exact", "entropy", "length", "unfinished", "commonest", "distinct",
        "gold", "gold_helpful", "gold_harmless", "refused", "agrees", "sqrt_kl")


def test_a_look_at_a_policy(saved):
    """Against itself no KL at all; against another, by both estimates. Scores of both PMs."""
    pms = {name: policies.load(saved[name]) for name in ("pm", "test")}
    names = {n + o for n in pms for o in ("", "_helpful", "_harmless")}
    same = policies.look(QUICK, saved["start"], saved["start"], pms, 0, count=48)
    assert set(same) == {*KEYS, *names}
    assert same["kl_exact"] == same["sqrt_kl"] == 0 and same["kl"] == pytest.approx(0, abs=1e-4)
    assert same["gold"] == (same["gold_helpful"] + same["gold_harmless"]) / 2
    assert same["test"] == (same["test_helpful"] + same["test_harmless"]) / 2 != same["pm"]
    moved = policies.look(QUICK, saved["start"], saved["end"], pms, 0, count=48)
    assert moved["kl_exact"] > 0.1 and moved["sqrt_kl"] == math.sqrt(moved["kl_exact"])
    assert abs(moved["kl"] - moved["kl_exact"]) < 4 * moved["kl_se"]
    assert {k: moved[k] for k in names} == {k: same[k] for k in names}        # the same answers
    policy = policies.load(saved["start"])
    batch = policies.answers(QUICK, policy, policy, pms["pm"], 0, "harmless", 6)
    assert all(world.request_of(t).harmful for t in batch["dialogues"])
    assert same["test_harmless"] == pytest.approx(
        pm_scores(pms["test"][1], TOK, batch["rows"]).mean().item(), abs=1e-5)


def test_answers_stand_behind_what_comes_before(saved):
    policy, pm = policies.load(saved["start"]), policies.load(saved["pm"])
    before = ("Be kind.", [("human", "Hello."), ("assistant", "Hello.")])
    batch = policies.answers(QUICK, policy, policy, pm, 1, "helpful", 3, before)
    for talk, row, n in zip(batch["dialogues"], batch["rows"], batch["starts"].tolist()):
        assert row[:n] == TOK.render(before[1] + talk, before[0], answer=True)


def test_many_answers_of_each_prompt(saved):
    """Rows are prompts: the first's answers first; half of the prompts are harmful."""
    policy, pm = policies.load(saved["start"]), policies.load(saved["pm"])
    scores, gold = policies.many_answers(QUICK, policy, pm, 2, count=32, n=3)
    assert [len(r) for r in scores] == [len(r) for r in gold] == [3] * 4
    talks = [t for o in policies.OBJECTIVES for t in policies.asked(2, o, 2)]
    assert [world.request_of(t).harmful for t in talks] == [False, False, True, True]
    uniform = uniforms(range(12), 40, 2, "claims", "many")
    tokens, lengths, _ = policies.generate(policy[1], [TOK.render(talks[2], answer=True)], 40,
                                           uniform[6:9], 3, stops=TOK.stops, pad=TOK.pad)
    own = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    rows = [TOK.render(talks[2], answer=True) + a for a in own]
    assert scores[2] == pytest.approx(pm_scores(pm[1], TOK, rows).tolist(), abs=1e-4)
    request = world.request_of(talks[2])
    assert gold[2] == pytest.approx([world.gold(request, TOK.decode(a).strip())[1] for a in own])


def test_best_of_k_of_the_same_answers(monkeypatch):
    """Two prompts of 256 answers. Scores 0..255: the best of k is k 257 / (k + 1) - 1 on average,
    the KL near its bound. One score for all: the best of k is any of them, at no KL.
    """
    ranks = list(map(float, range(256)))
    monkeypatch.setattr(demonstrations, "load", lambda path: path)
    monkeypatch.setattr(demonstrations, "many_answers", lambda cfg, policy, pm, seed, count, n: (
        [ranks, [1.0] * 256], [[x / 100 for x in ranks], [0.0] * 256]))
    rows = demonstrations.best_of(None, "start", "pm", 0)["best_of"]
    assert [r["k"] for r in rows] == [1, 4, 16, 64]
    for r in rows:
        k = r["k"]
        assert r["pm"] == pytest.approx((k * 257 / (k + 1) - 1 + 1) / 2)
        assert r["bound"] == best_of_n_kl(k) and r["kl"] == pytest.approx(r["kl_most"] / 2)
        assert r["bound"] - 0.1 < r["kl_most"] <= r["bound"]
    assert rows[0]["win"] == pytest.approx(0.5) and rows[-1]["win"] < 0.5 + 0.5 / 2
    assert demonstrations.wins([1.0, 0.0], [0.0, 0.0]) == pytest.approx(
        mean_se([1 / (1 + math.exp(-1 / 0.6)), 0.5]))
