"""claims/online.py and claims/repair.py: verdicts on records made up to hold and to fail; which
lots, PMs and policies a unit asks for, with stand-ins for training.

Proved alive by: each condition of a rule dropped; errors ignored; lots, players, objectives or
kinds swapped; the seeds that chose the regime judging it, or none of their own told; another
regime's lines; base comparisons fewer than the mixture's, a lot of another lot's size; the last
round's PM or policy for the static one; snapshots that show the end in early; both kinds of rounds
from one lot; a policy that never refused among those to be mended; seeds with one kind of rounds
alone; a PM that foretells no more than gold would.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eval as report
from claims import loop, online, records, repair
from claims.demonstrations import wins
from claims.online import OBJECTIVES, REGIMES, elo_of
from data import world
from test_claims_rl import unsure

QUANTILES = list(np.linspace(-1, 1, 19))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [Path("results")])


def of(knob, seed):
    """A tuple has a value a seed; a number is a little different from seed to seed."""
    return knob[seed % 3] if isinstance(knob, tuple) else knob + (seed % 3 - 1) * 0.02 * abs(knob)


GOOD = dict(base=-1.0, rs=0.0, online=1.0, right_base=0.75, right_rs=0.6, right_online=0.5,
            distilled=0.0, static=100.0, mixture=200.0, only=300.0, harmless_static=100.0,
            harmless_mixture=220.0, harmless_only=-50.0, foretold=400.0, gold=1.0, by_pm=0.8,
            annotators=0.6, gain=60.0)


def short(**changed):
    """Records of the regime short, three seeds."""
    out = []
    for seed in range(3):
        k = {name: of(v, seed) for name, v in {**GOOD, **changed}.items()}
        lots = {n: dict(mean=k[n], quantiles=QUANTILES, accuracy=k[f"right_{n}"])
                for n in ("base", "rs", "online")}
        elo = dict(helpful={"distilled": 0.0, "static": k["static"], "mixture": k["mixture"],
                            "base": 0.0, "helpful only": k["only"]},
                   harmless={"distilled": 0.0, "static": k["harmless_static"], "base": 0.0,
                             "mixture": k["harmless_mixture"],
                             "helpful only": k["harmless_only"]})
        out.append(dict(
            seed=seed, regime="short", elo=elo,
            lots=dict(mixture=lots, base={n: dict(x, mean=0.0, accuracy=0.5)
                                          for n, x in lots.items()}),
            start=dict(gold_helpful=0.25, gold_harmless=-0.5),
            mixture=dict(way=[{}, dict(gold_helpful=0.25 + k["gold"],
                                       gold_harmless=k["gold"] - 0.5)]),
            pm_elo={o: dict(mixture=k["foretold"], base=0.0) for o in OBJECTIVES},
            writers=dict(pm=[k["by_pm"], 0.01], annotators=[k["annotators"], 0.01])))
    return out


def regimes(**changed):
    """Records of the chosen regime on six seeds, where the first three gained 500, and of another.
    """
    out = []
    for regime, seed in (*(("short", s) for s in range(6)), *(("few", s) for s in range(3))):
        gain = dict(few=-100.0).get(regime, 500.0 if seed < 3 else of(
            changed.get("gain", GOOD["gain"]), seed))
        curve = [dict(gold_helpful=0.5, gold_harmless=1.0)] * 2
        end = dict(way=[dict(gold=9.0), dict(gold=0.25)], curve=curve)
        out.append(dict(seed=seed, regime=regime, base=end, mixture=end, elo={
            "helpful": dict(base=-30.0, mixture=-30.0 + gain - 10),
            "harmless": dict(base=50.0, mixture=50.0 + gain + 10)}))
    return out


CASES = {
    "h17": [dict(rs=-1.5), dict(online=-0.5), dict(rs=unsure(0.5, -1.0)),
            dict(online=unsure(0.5, 0.0))],
    "h18": [dict(gain=-60.0), dict(gain=unsure(60.0))],
    "h19": [dict(right_rs=0.8), dict(right_online=0.7), dict(right_rs=unsure(-0.1, 0.75)),
            dict(right_online=unsure(-0.05, 0.6))],
    "h20": [dict(static=-10.0), dict(static=250.0, only=400.0), dict(only=150.0),
            dict(harmless_static=-10.0), dict(harmless_static=250.0), dict(harmless_only=250.0),
            dict(mixture=unsure(60.0, 100.0)), dict(harmless_only=unsure(-60.0, 220.0)),
            dict(only=unsure(60.0, 200.0))],
    "h21": [dict(foretold=150.0), dict(foretold=210.0), dict(foretold=unsure(150.0, 220.0)),
            dict(gold=0.5, foretold=190.0), dict(gold=0.5, foretold=210.0),
            dict(gold=1.5), dict(foretold=(280.0, 390.0, 500.0)), dict(foretold=285.0)],
    "h33": [dict(by_pm=0.5), dict(by_pm=unsure(0.1, 0.6))],
}


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_holds_fails_and_waits(name):
    judge, rows = getattr(online, f"verdict_{name}"), regimes if name == "h18" else short
    good = judge(rows())
    assert good.word == "held" and good == judge(rows()[::-1])
    others = [dict(r, regime="raw") for r in rows() if r["seed"] < 3]
    assert judge([*rows(), *others]).word == "held"
    for changed in CASES[name]:
        word = judge(rows(**changed)).word
        assert word == "not held" or "seeds would tell" in word, changed
    few = [r for r in rows() if r["seed"] not in (2, 5)]
    assert judge(few).word.startswith("inconclusive")
    for _, _, _, lines in good.panels:
        assert lines and all(len(f) == 3 for points in lines.values() for f in points.values())


def test_numbers_are_told_as_they_are():
    told = online.verdict_h18(regimes()).told
    assert "regime (seeds): short +500 ± 0 (3)" in told and "few -100 ± 0 (3)" in told
    assert "short on 3 other seeds: +60 ± 1, gold +0.25 ± 0.00 against +0.25 ± 0.00" in told
    assert "judged" not in told and online.verdict_h18(regimes()[:3]).word.startswith("inconcl")
    assert online.verdict_h20(short()).told.endswith(
        "static +100 ± 1 / +100 ± 1; online +200 ± 2 / +220 ± 3; helpful only +300 ± 3 / -50 ± 1")
    assert "base 75.0% ± 0.9%, rs 60.0%" in online.verdict_h19(short()).told
    assert "helpful: foretold +400 ± 5 (by gold itself +290 ± 3), chosen +200 ± 2" in (
        online.verdict_h21(short()).told)
    assert "by the PM 80.0%" in online.verdict_h33(short()).told


# ---------------------------------------------------------------- repair

def rounds(first=0.9, end=0.05, early=0.7):
    out = []
    for seed in range(4):
        for shown, last in (("end", of(end, seed)), ("early", of(early, seed))):
            sick = first if seed < 3 else 0.1
            out.append(dict(seed=seed, shown=shown, count=repair.COUNT, rounds=[
                dict(lines=3000 + 300 * r, refused=x, gold_helpful=-x)
                for r, x in enumerate((sick, 0.5, 0.4, last if seed < 3 else 1.0))]))
    return out


def test_repair_is_judged_on_policies_that_refuse():
    found = repair.verdict_repair(rounds())
    assert found.word == "held" and "3 of 4 first policies refuse" in found.told
    assert "end: refused by round 0.90 ± 0.00, 0.50 ± 0.00, 0.40 ± 0.00, 0.05" in found.told
    for changed in (dict(end=0.3), dict(early=0.04), dict(early=unsure(0.3, 0.05))):
        word = repair.verdict_repair(rounds(**changed)).word
        assert word == "not held" or "seeds would tell" in word, changed
    assert repair.verdict_repair(rounds(first=0.4)).word.startswith("inconclusive")


def test_a_seed_of_one_kind_of_rounds_alone_is_no_repair_yet():
    """Interrupted between the two kinds of a seed: it neither counts nor shifts the others."""
    some = rounds()
    assert repair.verdict_repair(some[:5]).word.startswith("inconclusive")
    late = [dict(r, seed=5) for r in some if r["seed"] == 0 and r["shown"] == "early"]
    assert repair.verdict_repair([*late, *some]).told == repair.verdict_repair(some).told


@pytest.fixture
def staged(here, monkeypatch):
    """Stand-ins: a lot's lines are (lot, number), a PM is named by what it has seen, a policy by
    its PM.
    """
    asked = []

    def gather(cfg, unit, name, policies, count, seed, **knobs):
        asked.append((name, tuple(policies), count, seed, knobs))
        return [dict(lot=name, objective=OBJECTIVES[i % 2], number=i) for i in range(count)]

    def fitted(cfg, unit, name, lines, test):
        lots, kinds = [x["lot"] for x in lines], {x["objective"] for x in lines}
        return "+".join(f"{lots.count(n)}{n}" for n in dict.fromkeys(lots)) + (
            " of " + kinds.pop() if len(kinds) == 1 else "")

    def tuned(cfg, unit, name, pm, **knobs):
        asked.append(("policy", name, pm, knobs))
        return f"<{pm}>", [f"<{pm}>@1", f"<{pm}>"]

    def said(cfg, path, start, judge, seed):
        asked.append(("said", path, judge))
        return {o: dict(gold=np.full(4, len(path) / 100), pm=np.full(4, 1.0)) for o in OBJECTIVES}

    for module in (online, repair):
        for name, fake in dict(
                gather=gather, fitted=fitted, tuned=tuned, distilled=lambda cfg, size: "start",
                load=lambda path: path, look=lambda cfg, path, start, pms, seed: {
                    **dict.fromkeys(online.KEPT, 0.0), "sqrt_kl": len(path)}).items():
            monkeypatch.setattr(module, name, fake)
    for name, fake in dict(said=said, scores_of=lambda judge, lines: len(lines),
                           blocks=lambda folder, keys, size: folder,
                           writers=lambda *args: args[1:3]).items():
        monkeypatch.setattr(online, name, fake)
    return asked


CFG = SimpleNamespace(run="out/laptop", quick=False, device="cpu", seeds=3, steps=8)


def test_both_sides_have_equal_data_and_budget(staged):
    online.run_unit(CFG, dict(seed=4, regime="long"))
    row, = records.records("online")
    assert row["lines"] == [3000, 3000]
    first, both = "<1000base+1000rs>", "1000base+1000rs+1000online-0"
    lots = [x for x in staged if x[0] not in ("policy", "said")]
    assert lots[:4] == [
        ("base", ("start",), 600, 1004, {}), ("base", ("start",), 3000, 4, {}),
        ("rs", ("start",), 1000, 4, dict(best=16, pm="1000base")),
        ("online-0", (f"{first}@1", first), 1000, 4, {})]
    assert [x[:4] for x in lots[4:]] == [("rs-held", ("start",), 600, 1004),
                                         ("online-held", (f"{first}@1", first), 600, 1004)]
    assert [x[1:] for x in staged if x[0] == "policy"] == [
        ("round-0", "1000base+1000rs", {}), ("base", "3000base", {}), ("mixture", both, {})]
    assert row["base"]["curve"] == "<3000base>" and row["mixture"]["curve"] == f"<{both}>"
    assert set(row["elo"]["helpful"]) == {"distilled", "static", "base", "mixture"}
    assert row["elo"]["helpful"]["mixture"] > row["elo"]["helpful"]["static"] > 0
    assert "writers" not in row and all(row["win"][o][0] > 0.5 for o in OBJECTIVES)


def test_the_short_regime_has_a_helpful_only_policy(staged):
    online.run_unit(CFG, dict(seed=0, regime="short"))
    row, = records.records("online")
    (_, name, pm, knobs), = [x for x in staged if x[0] == "policy" and x[3]]
    assert (name, knobs) == ("helpful", dict(helpful=1.0))
    assert pm == "500base+500rs+500online-0 of helpful" and "helpful only" in row["elo"]["harmless"]
    assert row["writers"] == ["<1000base+1000rs+1000online-0>", "1000base+1000rs+1000online-0"]


def test_the_online_third_may_come_from_several_rounds(staged):
    online.run_unit(CFG, dict(seed=0, regime="rounds"))
    row, = records.records("online")
    assert row["lines"] == [3000, 3000]
    lots = [(x[0], x[2]) for x in staged if x[0].startswith("online-") and "held" not in x[0]]
    assert [name for name, _ in lots] == ["online-0", "online-1", "online-2"]
    assert sum(count for _, count in lots) == 1000
    rounds_of = [x[2] for x in staged if x[0] == "policy"][:3]
    assert rounds_of[0] == "1000base+1000rs" and rounds_of[1].endswith("334online-0")
    assert [x[1] for x in staged if x[0] == "said"][:2] == ["start", "<1000base+1000rs>"]
    assert len({x[2] for x in staged if x[0] == "said"}) == 1     # all by the mixture's PM


def test_which_units_are_measured(here, monkeypatch):
    asked = []
    monkeypatch.setattr(online, "run_unit", lambda cfg, unit: asked.append(
        (unit["regime"], unit["seed"])) or records.append("online", unit))
    online.measure_short(CFG)
    assert asked == [("short", s) for s in range(3)]
    online.measure_h18(CFG)
    assert len(asked) == len({*asked}) == 2 * 6 + len(REGIMES) - 2
    assert all({s for r, s in asked if r == name} == set(range(6 if name in online.SURE else 1))
               for name in REGIMES) and online.CHOSEN in online.SURE
    monkeypatch.setattr(records, "FOLDER", [Path("quick")])
    asked.clear()
    online.measure_h18(SimpleNamespace(**{**vars(CFG), "quick": True, "seeds": 1}))
    assert len(asked) == 4 and {r for r, _ in asked} == {*online.SURE}


def test_rounds_that_miss_the_end(staged):
    repair.measure(SimpleNamespace(**{**vars(CFG), "seeds": 1}))
    rows = records.records("repair")
    assert [(r["shown"], [x["lines"] for x in r["rounds"]]) for r in rows] == [
        (shown, [3000, 4000, 5000, 6000]) for shown in ("end", "early")]
    lots = [x for x in staged if "lot" in x[0]]
    assert [len(x[1]) for x in lots] == [2] * 3 + [1] * 3
    assert lots[0][1] == ("<3000base>@1", "<3000base>") and lots[3][1] == ("<3000base>@1",)
    assert len({x[0] for x in lots}) == 6                  # no lot is the other kind's
    names = [x[1] for x in staged if x[0] == "policy"]
    assert len({*names}) == 7 and names.count("repair") == 2   # nor a policy, but the first
    assert all(x[3] == dict(helpful=0.3) for x in staged if x[0] == "policy")


# ---------------------------------------------------------------- what is computed

def test_elo_of_expected_choices():
    """Golds apart by 0.6 log 3: three of four choices, 190.85 Elo; equal ones, half."""
    gap = 0.6 * np.log(3)
    golds = {"a": [0.0, 1.0], "b": [gap, 1 + gap], "c": [0.0, 1.0]}
    found = elo_of(golds)
    assert found["a"] == 0 and found["b"] == pytest.approx(190.85, abs=0.01)
    assert found["c"] == pytest.approx(0, abs=1e-6)
    mean, se = wins([gap, 0.0], [0.0, 0.0])
    assert (mean, se) == (pytest.approx(0.625), pytest.approx(0.125))


def test_writers_are_judged_on_the_same_prompts(monkeypatch):
    """The policy says nothing, which is worth -1; a PM that scores by length."""
    from test_ppo import TOK
    talks = [world.prompt("x", i, harmful=False) for i in range(5)]
    batch = dict(dialogues=talks, texts=[""] * 5, raw=np.zeros(5))
    monkeypatch.setattr(online, "load", lambda path: path)
    monkeypatch.setattr(online, "asked", lambda seed, objective, count: talks[:count])
    monkeypatch.setattr(online, "answers", lambda *args: {
        **batch, "raw": SimpleNamespace(numpy=lambda: np.zeros(5))})
    seen = []
    monkeypatch.setattr(online, "pm_scores", lambda pm, tok, rows, micro: seen.append(rows) or
                        SimpleNamespace(numpy=lambda: np.full(5, np.log(3))))
    found = online.writers(CFG, "p", (TOK, None), 0)
    assert found["pm"] == (pytest.approx(0.25), pytest.approx(0))
    texts = [TOK.decode(row) for row in seen[0]]
    theirs = [world.persona_answer(world.keyed("writer", 0, i), world.request_of(t), 0.9, 0.5)
              for i, t in enumerate(talks)]
    assert all(text.endswith(said) for text, said in zip(texts, theirs, strict=True))
    want = [world.preference(-1.0, world.gold(world.request_of(t), x)[0])
            for t, x in zip(talks, theirs, strict=True)]
    assert found["annotators"][0] == pytest.approx(np.mean(want))


@pytest.mark.parametrize("name", [n.upper() for n in CASES])
def test_a_claim_is_judged_on_the_lines_it_needs(name):
    """Of the seeds that have its regime, whatever else they have; by its own measure and rule."""
    claim, rows = report.CLAIMS[name], regimes() if name == "H18" else short()
    assert claim.needs == ("regime", ("short",)) and claim.source == "online"
    assert claim.judge is getattr(online, f"verdict_{name.lower()}")
    assert claim.measure is (online.measure_h18 if name == "H18" else online.measure_short)
    others = [dict(r, regime="raw", seed=9) for r in rows[:1]]
    assert claim.judge(records.complete([*rows, *others], *claim.needs)).word == "held"


def test_the_claims_are_told(here):
    for name, row in (("H17", short()), ("H18", regimes())):
        for r in row:
            records.append("online", r)
        assert report.CLAIMS[name].judge(report.CLAIMS[name].rows(name)).word == "held"


# ---------------------------------------------------------------- what is told

def test_the_table_of_the_loop(tmp_path):
    """One run with its intervals, two with errors over seeds; a held-out share for each lot."""
    import json
    (tmp_path / "elo").mkdir()
    own = dict(names=["distilled", "static"], elo=[0.0, 100.0], low=[0.0, 60.0], high=[0.0, 140.0],
               gold=[0.2, 0.9], wins=[[0, 1], [2, 0]])
    (tmp_path / "elo" / "elo.json").write_text(json.dumps(dict(helpful=own, harmless=dict(
        own, elo=[0.0, -20.0], low=[0.0, None], high=[0.0, 9.0]))))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(dict(
        step=0, lines=84, accuracy_base=0.75, accuracy_rs=0.5, kl=1.0)) + "\n")
    row = loop.loop_of(tmp_path)
    assert row["helpful"]["static"] == dict(elo=100.0, low=60.0, high=140.0, gold=0.9)
    text = loop.loop_table([row])
    assert "| static | +100 (+60 to +140) | +0.90 | -20 (no bound to +9) | +0.90 |" in text
    assert "| distilled | +0 | +0.20 | +0 | +0.20 |" in text
    assert "round 1, 84 comparisons: base 75.0%, rs 50.0%." in text
    other = json.loads(json.dumps(row))
    other["helpful"]["static"]["elo"] = 120.0
    assert "| static | +110 ± 10 | +0.90 | -20 ± 0 | +0.90 |" in loop.loop_table([row, other])
    assert loop.loop_table([]) == "Not measured yet."


def test_the_tables_of_regimes_and_rounds():
    rows = [dict(r, base=dict(r["base"], way=[dict(gold=0.9, sqrt_kl=1.0),
                                              dict(gold=0.25, sqrt_kl=4.0)]),
                 mixture=dict(r["mixture"], way=[dict(gold=0.7, sqrt_kl=1.0),
                                                 dict(gold=0.5, sqrt_kl=3.0)])) for r in regimes()]
    knobs = loop.differs(REGIMES["short"])
    assert knobs == ("iterations 40, lr 0.0001, lambda kl 0.03, helpful 0.6, snapshots 0.5,1")
    assert loop.differs(REGIMES["long"]) == "the defaults"
    lines = loop.regimes_table(rows).splitlines()
    assert len(lines) == 2 + 3 and all(line.count("|") == 10 for line in lines)
    assert lines[2].startswith(f"| short | {knobs} | 0, 1, 2 | +490 ± 0 | +510 ± 0 | +500 ± 0 |")
    assert lines[3].startswith(f"| short | {knobs} | 3, 4, 5 | +50 ± 1 | +70 ± 1 | +60 ± 1 |")
    assert lines[2].endswith("| +0.25 ± 0.00 / +0.50 ± 0.00 | 4.0 / 3.0 | +0.90 ± 0.00 / "
                             "+0.70 ± 0.00 |")
    assert lines[4].startswith("| few | total 1200 | 0, 1, 2 | -110 ± 0 |")
    own = [dict(r, rounds=[dict(x, gold_harmless=1.0) for x in r["rounds"]]) for r in rounds()]
    lines = loop.repair_table(own).splitlines()
    assert len(lines) == 2 + 8
    assert lines[2].startswith("| 1000 | 0 | end | 90.0%, -0.90 / +1.00 | 50.0%")
    assert lines[3].startswith("| 1000 | 0 | early |")
