"""claims/: which units are left; verdicts on records made up to hold, to fail, to be too few.

Mutations tried, each caught here: a unit that is recorded measured again, another's key taken for
it, an error of one seed instead of over seeds, fewer than three seeds called held, each of a
rule's conditions dropped.
"""

import json
import math
import re
from pathlib import Path

import pytest

import eval as report
from claims import pages, records
from claims.distillation import verdict_h01
from claims.pm_scores import verdict_h04, verdict_h05, verdict_h06, verdict_h07, verdict_h08
from claims.pm_training import (verdict_h02, verdict_h03, verdict_h14, verdict_h15, verdict_h27,
                                verdict_i02, verdict_i03)

SEEDS = range(3)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- records

def test_units_without_a_record_are_left(here):
    grid = dict(size=("nano", "toy"), pairs=(10, 20))
    assert len(list(records.missing("X", 3, **grid))) == 12
    records.append("X", dict(seed=1, size="toy", pairs=10, found=1 / 3))
    records.append("X", dict(seed=7, size="toy", pairs=10, found=0.5))
    left = list(records.missing("X", 3, **grid))
    assert len(left) == 11 and dict(seed=1, size="toy", pairs=10) not in left
    assert left[0] == dict(seed=0, size="nano", pairs=10)
    assert json.loads(Path("results/X.jsonl").read_text().splitlines()[0])["found"] == 0.3333
    assert list(records.missing("X", 0, **grid)) == [] and records.records("Y") == []


def test_errors_are_over_seeds():
    rows = [dict(seed=s, size=z, found=v) for s, z, v in (
        (0, "a", 1.0), (1, "a", 2.0), (2, "a", 3.0), (0, "b", 5.0))]
    found = records.over_seeds(rows, "found", "size")
    assert found[("a",)] == pytest.approx((2.0, 1 / 3 ** 0.5, 3)) and found[("b",)] == (5.0, 0.0, 1)
    assert records.seeds_of(rows) == 3


def test_too_few_seeds_decide_nothing():
    assert records.verdict(True, [dict(seed=0), dict(seed=1)] * 2, "x").word.startswith("inconcl")
    assert records.verdict(True, [dict(seed=s) for s in SEEDS], "x").word == "held"
    assert records.verdict(False, [dict(seed=s) for s in SEEDS], "x").word == "not held"


def test_figures_are_drawn(here):
    curves = {"one": {1: (0.5, 0.1, 3), 10: (0.6, 0.1, 3)}, "two": {1: (1, 0, 1)}}
    panels = [("a", "x", "y", curves)]
    records.draw_curves("X", panels, log_x=True)
    assert Path("docs/claims/X.png").read_bytes()[:4] == b"\x89PNG"


# ---------------------------------------------------------------- verdicts

def grid(**keys):
    """Rows over seeds and keys, each with a little noise of its seed for a positive error."""
    import itertools
    for seed, *values in itertools.product(SEEDS, *keys.values()):
        yield dict(zip(("seed", *keys), (seed, *values), strict=True)), 0.002 * (seed - 1)


def h01(own=0.01, small=0.03):
    return [{**u, "before": 0.6, "after": (own if u["size"] == "toy" else small) + e}
            for u, e in grid(size=("toy", "micro", "nano"))]


def h02(gain=0.05):
    return [{**u, "helpful": 0.6 + gain * (u["start"] == "pmp") + e, "harmless": 0.8 + e}
            for u, e in grid(start=("base", "pmp"), pairs=(10, 20))]


def h03(b=0.03, c=0.04, bend=0.0):
    out = []
    for u, e in grid(parameters=(1e5, 1e6, 4e6), pairs=(100, 1000, 3000)):
        p, d = u["parameters"] / 1e6, u["pairs"] / 1e3
        value = 0.6 + b * math.log10(p) + c * math.log10(d) + bend * (u["pairs"] == 1000) + e
        out.append({**u, "size": str(u["parameters"]), "helpful": value, "harmless": value})
    return out


def h04(first=0.05, last=0.0, seed=1):
    return [{**u, "accuracy": 0.7 + first * (u["turn"] == 1) + last * (u["turn"] == 3) + seed * e,
             "bayes": 0.8} for u, e in grid(turn=(1, 2, 3))]


def h05(ece=0.03, gap=0.02):
    return [{**u, "ece": ece + e, "floor": 0.01, "gap": gap + e}
            for u, e in grid(kind=("helpful", "mixed"))]


def h06(helpful=0.2, harmless=0.2):
    drop = dict(helpful=helpful, harmless=harmless)
    return [{**u, "quantiles": [0, 0.9], "accuracy": [0.8, 0.8 - drop[u["objective"]] + e]}
            for u, e in grid(objective=("helpful", "harmless"))]


def h07(total=0.86, honest=0.6, wrong=2.0):
    return [{**u, "helpful": 0.9, "honest": honest + e, "harmless": 1.0, "other": 0.95,
             "accuracy": total + e, "honest_wrong_by": wrong, "right_by": 3.0} for u, e in grid()]


def h08(gap=2.0):
    return [{**u, "gap": gap + e, "auroc": 0.99} for u, e in grid()]


def h14(under=0.4, loss=0.02):
    out = []
    for u, e in grid(size=("nano", "toy"), helpful_share=(0.0, 0.5, 1.0), pairs=(10, 20)):
        lost = (2 if u["size"] == "nano" else 1) * loss if loss > 0 else (
            0.02 if u["size"] == "nano" else 0.04)
        at, under_now = u["helpful_share"], under if u["pairs"] == 20 else 0.55
        out.append({**u, "helpful": {0.0: under_now, 0.5: 0.7 - lost, 1.0: 0.7}[at] + e,
                    "harmless": {1.0: under, 0.5: 0.8 - lost, 0.0: 0.8}[at] + e})
    return out


def h15(nano=-0.07, toy=-0.01):
    drop = dict(nano=nano, toy=toy)
    return [{**u, "helpful": 0.7 + drop[u["size"]] * (u["weight"] == 10) + e * (u["weight"] == 10),
             "harmless": 0.8} for u, e in grid(size=("nano", "toy"), weight=(1, 3, 10))]


def h27(cost=0.0, seed=1):
    out = []
    for u, e in grid(data=("hh", "summary", "both")):
        e = e * seed
        both = u["data"] == "both"
        hh = 0.5 if u["data"] == "summary" else 0.75 - cost * both
        out.append({**u, "helpful": hh + e, "harmless": hh + e,
                    "summary": 0.5 if u["data"] == "hh" else 0.7 - cost * both + e})
    return out


def i02(worse=0.05, more=0.1):
    return [{**u, "helpful": 0.7 - worse * (u["mode"] == "shuffled") + e, "harmless": 0.8 + e,
             "train": 0.75 + (more if u["mode"] == "shuffled" else 0)}
            for u, e in grid(mode=("grouped", "shuffled"))]


def i03(gap=0.03):
    return [{**u, "known_groups": 0.72 + e, "new_group": 0.72 - gap + e * 2}
            for u, e in grid(fold=range(5))]


@pytest.mark.parametrize("judge, rows, bad", [
    (verdict_h01, h01, [dict(own=0.1), dict(small=0.005)]),
    (verdict_h02, h02, [dict(gain=0.0), dict(gain=-0.05)]),
    (verdict_h03, h03, [dict(b=0.0), dict(c=0.0), dict(b=-0.03), dict(bend=0.3)]),
    (verdict_h04, h04, [dict(first=0.0), dict(first=-0.05), dict(last=0.05)]),
    (verdict_h05, h05, [dict(ece=0.06), dict(gap=0.0), dict(gap=-0.02)]),
    (verdict_h06, h06, [dict(helpful=0.0), dict(harmless=0.0), dict(helpful=-0.1)]),
    (verdict_h07, h07, [dict(total=0.7), dict(honest=0.97), dict(wrong=0.5)]),
    (verdict_h08, h08, [dict(gap=0.0), dict(gap=-2.0)]),
    (verdict_h14, h14, [dict(under=0.5), dict(loss=-1)]),
    (verdict_h15, h15, [dict(nano=0.0), dict(toy=-0.09)]),
    (verdict_h27, h27, [dict(cost=0.05), dict(cost=0.012)]),
    (verdict_i02, i02, [dict(worse=0.0, more=0.1), dict(worse=0.05, more=-0.1)]),
    (verdict_i03, i03, [dict(gap=0.0), dict(gap=-0.03)]),
])
def test_a_verdict_holds_fails_and_waits(judge, rows, bad):
    good = judge(rows())
    assert good.word == "held" and re.search(r"\d", good.told)
    for _, _, _, curves in good.panels:
        assert all(len(f) == 3 for points in curves.values() for f in points.values()) and curves
    for changed in bad:
        assert judge(rows(**changed)).word == "not held", changed
    assert judge([r for r in rows() if r["seed"] < 2]).word.startswith("inconclusive")


def test_seeds_are_paired():
    """What a seed's tests share takes nothing from a difference, nor hides a loss of 2 points."""
    assert verdict_h04(h04(seed=50)).word == "held" == verdict_h27(h27(0.005, seed=50)).word
    assert verdict_h27(h27(0.02, seed=50)).word == "not held"
    told = verdict_h27(h27(0.02, seed=50)).told
    assert "75.0% ± 5.8% alone, 73.0% ± 5.8% mixed, 2.0% ± 0.0% lost; summary: 70.0%" in told
    mixed = sorted(h04(seed=50), key=lambda r: r["seed"] * (r["turn"] - 2))
    assert verdict_h04(mixed).word == "held"
    noisy = [{**r, "accuracy": r["accuracy"] + 0.05 * (r["seed"] - 1) * (r["turn"] == 3)}
             for r in h04(first=0.3)]
    assert "seeds would tell" in verdict_h04(noisy).word             # noise makes no turns equal


def test_slopes_have_errors_over_seeds():
    """A slope that is another in each seed, though each fit is exact."""
    rows = [{**r, "helpful": 0.6 + 0.02 * (1 + 0.95 * (r["seed"] - 1)) * math.log10(
        r["parameters"] / 1e6) + 0.04 * math.log10(r["pairs"] / 1e3)} for r in h03()]
    found = verdict_h03(rows)
    assert found.told.startswith("helpful 0.600 ± 0.000 + 0.020 ± 0.011 log10(P/1e6) + 0.040 ± 0.0")
    assert "R2 1.00 ± 0.00;" in found.told and "seeds would tell" in found.word


def test_numbers_are_told_as_they_are():
    told = verdict_h02(h02(0.05)).told
    assert "+2.5% ± 0.0% at 10" in told                 # half of the gain; the seeds share noise
    assert "10 after it match 20 without it" in told
    told = verdict_i03(i03(0.03)).told
    assert "72.0% ± 0.1%" in told and "69.0% ± 0.2%" in told and "3.0% ± 0.1% lower" in told


def test_every_claim_has_its_row():
    for name, claim in report.CLAIMS.items():
        shared = claim.source or name == "repair"
        assert claim.measure.__name__.startswith("measure" if shared else name.lower())
        assert claim.judge.__name__ == f"verdict_{name.lower()}"
        assert claim.says and claim.where and claim.minutes > 0


def test_the_tables_of_the_readme(here):
    """Of the last report on real data; of the claims that have records, and why one failed."""
    assert pages.hh_table() == "Not measured yet."
    assert pages.claims_table(report.verdicts()).count("\n") == 3
    for right in (0.9, 0.6):
        part = dict(accuracy=right, se=0.03, longer=0.55, shorter=0.45, pairs=200)
        names = ("helpful", "harmless", "all")
        records.append("hh", dict(groups=dict.fromkeys(names, part),
                                  calibration=dict.fromkeys(names, dict(ece=0.02))))
    assert pages.hh_table().count("| 60.0% ± 3.0% | 55.0% | 45.0% | 200 | 0.020 |") == 3
    for row in h05(gap=0.0):
        records.append("H05", row)
    done = report.verdicts()
    table = pages.claims_table(done)
    assert table.startswith("1 claims measured: 1 not held.")
    assert "[H05](docs/claims.md#h05)" in table and table.endswith("| **not held** | 3 |")
    page = pages.claims_page(report.CLAIMS, done, {"H05": ()})
    assert "**Not held.** helpful: ECE" in page and "Why: both are calibrated" in page
    assert "Held means: ECE of both under 0.05" in page and "`python eval.py H05`, 3 seeds" in page
    assert "The paper's figures: the curve lies on" in page and "![" not in page
    assert "came when most records were in: the least sizes that matter" in page


def test_an_effect_is_held_refuted_or_open():
    """Above 0 by two errors and as large as matters; under what matters by two errors; neither."""
    effects = {(0.5, 0.1): "held", (0.1, 0.01): "not held", (-0.5, 0.1): "not held",
               (0.0, 0.05): "not held", (0.5, 0.3): "inconclusive", (0.15, 0.05): "inconclusive",
               (0.0, 0.2): "inconclusive", (-0.1, 0.2): "inconclusive"}
    for found, word in effects.items():
        assert records.Effect(found, 0.2).word == word, found
    assert records.Effect((0.5, 0.3), 0.2).seeds(3) == 5          # 3 x (0.6 / 0.5)^2 = 4.3
    assert records.Effect((0.15, 0.05), 0.2).seeds(3) == 12       # 3 x (0.1 / 0.05)^2
    assert records.Effect((0.2, 0.0), 0.2).word == "held"         # without an error, all is told
    assert records.Effect((0.19, 0.0), 0.2).word == "not held"


def test_effects_of_values():
    """Mean 2, error 0.5 of (1.134, 2, 2.866): above by two errors and 1.9; within 3.1, over 0.9."""
    some = [1.1339746, 2.0, 2.8660254]
    assert [records.rises(some, x).word for x in (1.9, 2.1, 3.1)] == [
        "held", "inconclusive", "not held"]
    assert records.rises(some, 3.1).found == pytest.approx((2.0, 0.5))
    for sign in (1, -1):
        words = [records.within([sign * x for x in some], most).word for most in (3.1, 2.5, 0.9)]
        assert words == ["held", "inconclusive", "not held"]
    shifted = [[x - by for x in some] for by in (0.9, 1.5, 3.1)]
    assert [records.passes(x).word for x in shifted] == ["held", "inconclusive", "not held"]
    assert records.within([-9.0, 0.0, 9.0], 1.0).word == "inconclusive"    # noise is no equality


def test_one_seed_has_no_error():
    assert records.told_of([1.5]) == "+1.50" and records.told_of([1.0, 2.0], "", 1) == "1.5 ± 0.5"


def test_a_rule_of_parts():
    """All hold; one fails, whatever is open; else as many seeds as the slowest part needs."""
    three = [dict(seed=s) for s in SEEDS]
    yes, no, wide = (records.Effect(f, 0.2) for f in ((0.5, 0.1), (0.0, 0.05), (0.5, 0.3)))
    wider = records.Effect((0.5, 0.5), 0.2)
    for parts, word in (([yes, True], "held"), ([yes, False], "not held"), ([no, wide], "not held"),
                        ([wide, False], "not held"),
                        ([yes, wide, wider], "inconclusive: about 12 "),
                        ([wide, records.passes([0.0, 1.0, -1.0])], "inconclusive: over 1000 ")):
        found = records.verdict(parts, three, "x").word
        assert found == word or word.endswith(" ") and found.startswith(word), parts
    assert records.verdict([yes], three[:2], "x").word == "inconclusive: fewer than 3 seeds"
