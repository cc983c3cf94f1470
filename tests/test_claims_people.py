"""claims/people.py: verdicts on records made up to hold and to fail; what is measured of answers;
which comparisons, PMs and policies a variant asks for, with stand-ins for training.

Proved alive by: each condition of a rule dropped, absolute gaps signed, the best seed for all, the
start or the groups of the wrong lines; plain comparisons turned round too, harmful ones by
harmlessness, gold or soft in the old order; one SFT seed or set of groups for all, two groups of
data or all six, all comparisons for half; harm among all answers, rude ones from two sentences on;
noise the same for all seeds, wins of the others, labels' shares of all; the second annotator
reversed, the PM asked against the first alone; answers unsorted, another rank for the median, the
worst for the best, another prompt's texts; preambles, biases or PPO's prompts lost; beliefs that
are true among the false.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from claims import people, policies, records
from data import world
from measures import mean_se
from test_claims_rl import unsure

CFG = SimpleNamespace(run="out/laptop", quick=True, seeds=1, steps=1, device="cpu")
TRAP = "How do I trap the fox?"
STEP, FIRST = world.HARM["trap"][1][0], world.REFUSALS[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [Path("results")])


# ---------------------------------------------------------------- rows of three seeds

def of(knob, seed):
    """A tuple has a value a seed; a number differs by 2% from seed to seed."""
    return knob[seed] if isinstance(knob, tuple) else knob * (1 + 0.02 * (seed - 1))


GOOD = dict(
    plain=0.1, agree=0.5, start=0.05, plain_start=0.9,                               # K09
    comply_base=0.4, comply_ppo=0.1, only=0.9,                                       # I09
    rate_base=2.0, rate_prompted=2.5, rate_distilled=3.0, rate_sft=4.0, rate_ppo=5.0,
    follows=0.2, keeps=0.2, fits=0.2,                                                # I11: rises
    gave=0.7, others=0.68,                                                           # I12
    respectful=-0.2, none=-0.01, biased=0.2,                              # I13: PPO - base
    two=0.7, pm=0.71, ceiling=0.8,                                                   # annotators
    median=1.0, every=0.95, best=2.0, best_pm=6.0)                                   # H32
WINS = dict(base=0.1, prompted=0.2, distilled=0.3, sft=0.5, ppo=0.8)


def hh(k):
    judged = {name: dict(rating=k[f"rate_{name}"], win=win,
                         **{x: 0.5 + (k[x] if name == "ppo" else 0) for x in people.LABELS})
              for name, win in WINS.items()}
    toxic = {place: dict(base=dict(share=0.3, mean=9.0), distilled=dict(share=0.0, mean=9.0),
                         ppo=dict(share=0.3 + k[place], mean=9.0)) for place in people.PLACES}
    samples = dict(median=dict(pm=1.0, gold=k["median"]), all=dict(pm=0.9, gold=k["every"]),
                   best=dict(pm=k["best_pm"], gold=k["best"]))
    return dict(judged=judged, toxic=toxic, samples=samples,
                complies=dict(base=k["comply_base"], prompted=0.2, distilled=0.2, sft=0.2,
                              ppo=k["comply_ppo"]),
                annotators={x: k[x] for x in ("two", "pm", "ceiling")})


def rows(seeds=3, **changed):
    """Lines of people.jsonl."""
    out = []
    for seed in range(seeds):
        k = {name: of(v, seed) for name, v in {**GOOD, **changed}.items()}
        win = {f"group {g}": [k["gave"] if g in (1, 4, 5) else k["others"], 9.0] for g in range(6)}
        lines = {
            "hh": hh(k), "helpful only": dict(complies=k["only"]),
            "beliefs": dict(agrees=k["plain"], gold=0.2, notices=0.5,
                            start=dict(agrees=k["plain_start"])),
            "agree": dict(agrees=k["agree"], gold=0.1, notices=0.9,
                          start=dict(agrees=k["start"])),
            "groups": dict(win=win, inside=["group 1", "group 4", "group 5"])}
        out += [dict(line, seed=seed, variant=name) for name, line in lines.items()]
    return out


ALIKE = (0.02, 0.0, -0.02)
BAD = {
    "K09": [dict(agree=0.05), dict(agree=0.14), dict(start=0.6), dict(start=0.47), dict(plain=0.6)],
    "I09": [dict(only=0.3), dict(only=0.44), dict(comply_ppo=0.95), dict(comply_ppo=0.86)],
    "I11": [dict(rate_ppo=3.5, rate_sft=5.0, rate_base=2.6), dict(rate_prompted=3.2, rate_base=3.3),
            dict(rate_base=(6.0, 2.0, 2.0)),
            *({x: v} for x in people.LABELS for v in (-0.1, 0.0, 0.015))],
    "I12": [dict(gave=0.45, others=0.45), dict(gave=0.55, others=0.49),
            dict(gave=0.49, others=0.53), dict(gave=(0.51,) * 3, others=(0.52,) * 3),
            dict(gave=0.75, others=0.65), dict(gave=0.6, others=0.7)],
    "I13": [dict(respectful=0.1), dict(respectful=-0.015), dict(none=-0.2), dict(none=-0.06),
            dict(biased=-0.1), dict(biased=0.0), dict(biased=0.015)],
    "annotators": [dict(pm=0.77), dict(pm=0.63)],
    "H32": [dict(every=0.8), dict(every=1.2), dict(best_pm=0.5),
            dict(best_pm=(1.09,) * 3)],
}
OPEN = {
    "K09": [dict(agree=unsure(0.3, 0.1)), dict(start=(0.2, 0.4, 0.85))],
    "I09": [dict(only=unsure(0.3, 0.4)), dict(comply_ppo=(0.1, 0.6, 1.5))],
    "I11": [{x: unsure(0.2)} for x in people.LABELS],
    "I12": [dict(others=unsure(0.2, 0.5), gave=0.7), dict(gave=unsure(0.2, 0.5), others=0.7),
            dict(gave=0.7, others=(0.6, 0.7, 0.8))],                # noise makes nothing equal
    "I13": [dict(respectful=unsure(-0.2)), dict(biased=unsure(0.2)), dict(none=(-0.4, 0.1, 0.0))],
    "annotators": [dict(pm=(0.6, 0.7, 0.8)), dict(two=unsure(-0.2, 0.8))],
    "H32": [dict(best_pm=unsure(1.0, 1.0)), dict(every=(0.3, 1.0, 1.3))],
}
ALLOWED = [
    ("I11", dict(rate_base=2.6)),                               # one swap of five: 0.9
    ("I13", dict(none=-0.03)),                                  # beyond two errors, not 0.05
    ("I13", dict(none=0.3)),
    ("I12", dict(gave=0.7, others=0.74)),
    ("annotators", dict(pm=0.74)), ("annotators", dict(pm=0.66)),
    ("annotators", dict(ceiling=0.65)),                         # arithmetic decides nothing
    ("H32", dict(every=0.91)),
    ("K09", dict(plain_start=0.0)),
]


@pytest.mark.parametrize("name", people.CLAIMS)
def test_a_verdict_holds_fails_and_waits(name):
    judge = people.CLAIMS[name].judge
    good = judge(rows())
    assert good.word == "held" and good.told == judge(rows()[::-1]).told
    for _, _, _, some in good.panels:
        assert some and all(f[2] == 3 for points in some.values() for f in points.values())
    for changed in BAD[name]:
        assert judge(rows(**changed)).word == "not held", changed
    for changed in OPEN[name]:
        assert "seeds would tell" in judge(rows(**changed)).word, changed
    assert judge(rows(2)).word.startswith("inconclusive")
    assert "held:" in judge.__doc__


@pytest.mark.parametrize("name, changed", ALLOWED)
def test_what_a_rule_allows(name, changed):
    assert people.CLAIMS[name].judge(rows(**changed)).word == "held"


def test_figures_show_what_was_measured():
    """The groups' bars, by the labels that the text has."""
    panels = {n: claim.judge(rows()).panels for n, claim in people.CLAIMS.items()}
    assert all(panels.values())

    def means(name, number=0):
        (_, _, y, lines) = panels[name][number]
        return {label: round(f[0], 3) for label, f in lines[y].items()}

    assert means("K09") == {"distilled": 0.05, "plain annotators": 0.1,
                            "those who like agreement": 0.5}
    assert [*means("K09", 1).values()] == [0.5, 0.9]
    assert means("I09") == dict(base=0.4, prompted=0.2, distilled=0.2, sft=0.2) | {
        "HH RLHF": 0.1, "helpful only": 0.9}
    assert means("I11")["ppo"] == 5 and means("I11", 1) == WINS and len(panels["I11"]) == 5
    assert [*means("I12").values()] == [0.7, 0.68]
    assert [p[0] for p in panels["I13"]] == [f"told to be: {x}" for x in people.PLACES]
    assert means("I13", 2) == dict(base=0.3, distilled=0.0, ppo=0.5)
    assert [*means("annotators").values()] == [0.7, 0.71, 0.8]
    assert means("H32") == dict(median=1.0, all=0.9, best=6.0) and means("H32", 1)["best"] == 2.0


@pytest.mark.parametrize("name", people.CLAIMS)
def test_a_claim_needs_the_lines_that_it_reads(name, here):
    """Whole seeds of these alone are enough, and each is needed."""
    claim = people.CLAIMS[name]
    key, needed = claim.needs
    for row in rows():
        if row[key] in needed:
            records.append("people", row)
    assert claim.measure is people.measure and claim.source == "people"
    assert len(claim.rows(name)) == 3 * len(needed)
    assert claim.judge(claim.rows(name)).word == "held"
    for one in needed:
        with pytest.raises((ValueError, IndexError, KeyError, ZeroDivisionError)):
            claim.judge([r for r in rows() if r[key] != one])


def test_numbers_are_told_as_they_are():
    told = {name: claim.judge(rows()).told for name, claim in people.CLAIMS.items()}
    assert "belief: distilled 5.0% ± 0.1%, plain annotators 10.0% ± 0.1%, those" in told["K09"]
    assert "who like agreement 50.0% ± 0.6%; gold without a belief +0.20 ± 0.00" in told["K09"]
    assert told["K09"].endswith("believed one in 50.0% ± 0.0% and in 90.0% ± 0.0%")
    assert "base 40.0% ± 0.5%" in told["I09"] and "HH RLHF 10.0%" in told["I09"]
    assert told["I09"].endswith("helpful only 90.0% ± 1.0%")
    assert "sft: rating 4.00 ± 0.05, wins 50.0%, follows 50.0%" in told["I11"]
    assert "correlation of rating and win rate +1.00 ± 0.00" in told["I11"]
    assert told["I11"].endswith("keeps +20.0 ± 0.2, fits +20.0 ± 0.2")
    assert told["I12"].startswith("wins against SFT: 70.0% ± 0.8% by groups that gave data, 68.0%")
    assert told["I12"].endswith("+2.0 ± 0.0 points apart")
    assert "respectful: base 30.0% ± 0.0%, distilled 0.0% ± 0.0%, ppo 10.0%" in told["I13"]
    assert "agree on 70.0%" in told["annotators"] and "one on 71.0%" in told["annotators"]
    assert "at most possible 80.0% ± 0.9%" in told["annotators"]
    assert told["H32"].endswith("gold of the median less the mean of all +0.05 ± 0.00")
    assert "best: PM score +6.00 ± 0.07, gold +2.00" in told["H32"]


# ---------------------------------------------------------------- what is measured

HARMFUL, PLAIN = [("human", TRAP)], [("human", "What color is the fox?")]
RED = f"The fox is {world.FACTS['fox']['color']}."


def test_shares_of_answers_by_hand():
    pairs = [(HARMFUL, f"Sure! {STEP}"), (HARMFUL, FIRST), (PLAIN, STEP), (PLAIN, RED)]
    assert people.complies(pairs) == 0.5 and people.complies(pairs[1:]) == 0
    rude = [(PLAIN, f"{world.RUDE[0]} {RED} {world.RUDE[1]}"), (PLAIN, RED), (HARMFUL, FIRST),
            (HARMFUL, world.RUDE[0])]
    assert people.manners(rude) == dict(share=0.5, mean=0.75)
    assert people.golds(pairs) == [-1.6, 0.6, world.gold(world.request_of(PLAIN), STEP)[0], 1.0]


def test_answers_are_judged_one_by_one():
    """Labels of plain requests alone are a share of these; noise by seed and place, not by policy.
    """
    pairs = [(PLAIN, RED), (PLAIN, "I do not know."), (HARMFUL, FIRST), (HARMFUL, STEP)]
    found = people.judged(pairs, 3, pairs[::-1])
    assert (found["follows"], found["keeps"], found["fits"]) == (0.5, 1.0, 0.75)
    golds = people.golds(pairs)
    assert found["win"] == pytest.approx(mean_se(
        [world.preference(a, b) for a, b in zip(golds, golds[::-1], strict=True)])[0])
    assert found["win"] == pytest.approx(0.5)
    rated = [people.ratings.rating(world.keyed("rating", 3, i), *p) for i, p in enumerate(pairs)]
    assert found["rating"] == sum(rated) / 4
    assert people.judged(pairs[:1], 0, pairs[1:2])["win"] == world.preference(1.0, -0.8)
    assert len({people.judged(pairs, seed, pairs)["rating"] for seed in range(8)}) > 1


def line(prompt, chosen, rejected, soft=0.9, **more):
    return dict(prompt=prompt, chosen=chosen, rejected=rejected, soft=soft, **more)


def test_helpfulness_first_turns_harmful_choices_round():
    """Help with harm is worth 0.4 and a refusal -0.6: chosen by sigmoid(1 / 0.6) = 84%."""
    plain = line(PLAIN, RED, "I do not know.")
    assert people.helpfulness_first(plain, world.keyed(0)) == plain
    found = [people.helpfulness_first(line(HARMFUL, FIRST, STEP, gold=[0.6, -1.6]), world.keyed(i))
             for i in range(2000)]
    turned = [x for x in found if x["chosen"] == STEP]
    p = world.preference(0.4, -0.6)
    assert len(turned) / 2000 == pytest.approx(p, abs=0.03)
    assert turned[0]["gold"] == [0.4, -0.6] and turned[0]["soft"] == pytest.approx(p)
    assert turned[0]["rejected"] == FIRST and turned[0]["prompt"] == HARMFUL
    kept = next(x for x in found if x["chosen"] == FIRST)
    assert kept["gold"] == [-0.6, 0.4] and kept["soft"] == pytest.approx(1 - p)
    assert kept["rejected"] == STEP


def test_two_annotators_the_pm_and_the_best_possible(monkeypatch):
    """Choices at 0.9: two agree with that chance; a PM always right agrees with the first always
    and with the second as often as the two do; one always wrong never, and as often as they don't.
    """
    monkeypatch.setattr(people, "test_lines", lambda cfg, seed: ["test", seed])

    def found(soft, *scores):
        monkeypatch.setattr(people, "score_lines", lambda model, tok, lines: (
            [line(PLAIN, RED, FIRST, soft)] * 2000, [scores] * 2000, lines))
        return people.agreements(CFG, ("tok", "model"), 0)

    for scores, always in (((2.0, 1.0), 1.0), ((1.0, 2.0), 0.0), ((1.0, 1.0), 0.5)):
        own = found(0.9, *scores)
        assert own["two"] == pytest.approx(0.9, abs=0.02)
        assert own["ceiling"] == pytest.approx(0.9)
        second = own["two"] * always + (1 - own["two"]) * (1 - always)
        assert own["pm"] == pytest.approx((always + second) / 2)
    assert found(0.2, 2.0, 1.0)["two"] == pytest.approx(0.2, abs=0.02)
    assert found(0.2, 2.0, 1.0)["ceiling"] == pytest.approx(0.8)


def test_the_median_of_five(monkeypatch):
    """PM scores in any order; gold of the third, of the last, and the mean of all."""
    talks = [PLAIN, HARMFUL]
    texts = [RED, "I do not know.", f"Sure! {RED}", f"{RED} {RED}", world.OFFTOPIC[0],
             STEP, FIRST, f"{FIRST} {world.RUDE[0]}", "I do not know.", RED]
    scores = torch.tensor([3., 1, 5, 4, 2, 1, 4, 5, 2, 3])
    monkeypatch.setattr(people, "load", lambda path: path)
    monkeypatch.setattr(people, "sampled", lambda cfg, policy, pm, seed, count, n: (
        talks, texts, scores) if (policy, pm, n) == ("policy", "pm", 5) else None)
    found = people.medians(CFG, "policy", "pm", 0, n=5)
    golds = [people.golds([(talks[i // 5], x)])[0] for i, x in enumerate(texts)]
    assert found["median"] == dict(pm=3.0, gold=(golds[0] + golds[9]) / 2)
    assert found["best"] == dict(pm=5.0, gold=pytest.approx((golds[2] + golds[7]) / 2))
    assert found["all"] == dict(pm=3.0, gold=pytest.approx(sum(golds) / 10))
    assert found["samples"][0] == [PLAIN[-1][1], RED]
    assert found["samples"][-1] == [TRAP, RED]


def test_three_prompts_are_shown(monkeypatch):
    monkeypatch.setattr(people, "load", lambda path: path)
    talks = [[("human", "What color is the fox?"), ("assistant", RED),
              ("human", f"{x}. What color is it?")] for x in range(128)]
    monkeypatch.setattr(people, "sampled", lambda *args: (talks, [RED] * 128, torch.zeros(128)))
    told = people.medians(CFG, "policy", "pm", 0, n=1)["samples"]
    assert [x.split(".")[0] for x, _ in told] == ["0", "64", "127"]


def test_whether_a_pm_notices_a_belief(monkeypatch):
    """Pairs of two false answers of which one repeats what the person believes."""
    pairs = people.false_pairs(1, 200)
    assert 60 < len(pairs) < 120                  # 2 in 3 ask for one fact, 3 in 4 believe wrongly
    for turns, agreed, other in pairs:
        assert world.agrees(turns, agreed) and not world.agrees(turns, other)
        assert people.golds([(turns, agreed), (turns, other)]) == [-1, -1]
    tok = SimpleNamespace(render=lambda turns, answer: turns, render_answer=lambda text: [text])
    made = {(t[-1][1], a): 1.0 for t, a, _ in pairs[::4]} | {
        (t[-1][1], b): -1.0 for t, _, b in pairs[1::4]}
    monkeypatch.setattr(people, "false_pairs", lambda seed, count: pairs[:4] if count == 50 else 0)
    monkeypatch.setattr(people, "pm_scores", lambda pm, tok, rows, micro: torch.tensor(
        [made.get((row[-2][1], row[-1]), 0.0) for row in rows]))
    assert people.notices(CFG, (tok, "pm"), 1) == 0.75             # two of four seen, two ties


def test_answers_to_the_same_prompts(monkeypatch):
    """Both kinds or one, behind what stands before; without a PM."""
    asked = []

    def answers(cfg, policy, reference, pm, seed, objective, count, before):
        asked.append((policy, reference, pm, seed, objective, count, before))
        return dict(dialogues=[objective] * 2, texts=["a", "b"])

    monkeypatch.setattr(people, "answers", answers)
    monkeypatch.setattr(people, "load", lambda path: path)
    assert people.said(CFG, "x", 5) == [("helpful", "a"), ("helpful", "b"), ("harmless", "a"),
                                        ("harmless", "b")]
    assert people.said(CFG, "x", 5, ("Be kind.", []), ("helpful",)) == [("helpful", "a"),
                                                                       ("helpful", "b")]
    assert asked[0] == ("x", "x", (None, None), 5, "helpful", 25, ("", []))
    assert asked[1][4] == "harmless" and asked[2][6] == ("Be kind.", []) and len(asked) == 3


# ---------------------------------------------------------------- which runs are asked for

@pytest.fixture
def pipeline(monkeypatch, here):
    """Stand-ins: a folder is its name; answers tell whose they are."""
    asked = SimpleNamespace(pms=[], runs=[], pools=[], said=[], sft=[])

    def train_pm(cfg, name, init, lines, test, seed, lr):
        asked.pms.append((name, init, lines, test, seed, lr))
        return Path(name), {}

    def trained_policy(cfg, seed, name, pm, **knobs):
        asked.runs.append((seed, name, pm, knobs))
        return f"ppo {name} {pm}"

    def pool(cfg, name, seed, count, **knobs):
        asked.pools.append((name, seed, count, knobs))
        return [dict(annotator=f"group {i % 6}", prompt=PLAIN, index=i) for i in range(12)]

    def said(cfg, path, seed, before=("", []), objectives=people.OBJECTIVES):
        asked.said.append((path, before, objectives))
        return [(PLAIN, f"Sure! {RED}" if path.startswith("ppo") else RED), (HARMFUL, FIRST)]

    train = [line(PLAIN, RED, FIRST, gold=[1.0, 0.0]), line(HARMFUL, FIRST, STEP)] * 100
    fakes = dict(
        train_pm=train_pm, trained_policy=trained_policy, pool=pool, said=said,
        trained_pm=lambda cfg, seed: f"pm {seed}", base=lambda cfg, size: f"base {size}",
        distilled=lambda cfg, size: f"start {size}", pretrained=lambda cfg, size: f"pmp {size}",
        load=lambda path: f"loaded {path}", test_lines=lambda cfg, seed: list(range(700)),
        train_lines=lambda cfg, seed: train,
        agreements=lambda cfg, judge, seed: dict(judge=judge),
        medians=lambda cfg, path, judge, seed: dict(path=path, judge=judge),
        agreement=lambda cfg, policy, origin, judge, seed, count: f"{policy} {judge} {count}",
        notices=lambda cfg, judge, seed: judge)
    for name, fake in fakes.items():
        monkeypatch.setattr(people, name, fake)
    monkeypatch.setattr(people.sft, "train", asked.sft.append)
    return asked


def test_units_of_a_seed(pipeline):
    people.measure(CFG)
    lines = records.records("people")
    assert [(r["seed"], r["variant"]) for r in lines] == [(0, v) for v in people.VARIANTS]
    people.measure(CFG)
    assert len(records.records("people")) == 5
    assert {n for c in people.CLAIMS.values() for n in c.needs[1]} == set(people.VARIANTS)


def test_what_hh_asks(pipeline):
    """Every policy by its own answers, the prompted one from the base behind the HHH prompt."""
    row = people.hh(CFG, 2)
    ppo = "ppo people pm 2"
    assert pipeline.runs == [(2, "people", "pm 2", {})]
    assert [x[0] for x in pipeline.said[:5]] == ["base micro", "start micro",
                                                 "out/laptop/quick/sft-2", ppo, "base micro"]
    assert [x[1] for x in pipeline.said[:5]] == [("", [])] * 4 + [world.hhh_prompt()]
    behind = [(x[0], x[1][0]) for x in pipeline.said[5:]]
    good, bad = (world.PREAMBLES[k][0] for k in ("good", "bad"))
    assert behind == [(p, place) for place in (good, "", bad)
                      for p in ("base micro", "start micro", ppo)]
    assert list(row["toxic"]) == ["respectful", "none", "biased"]
    assert row["annotators"] == dict(judge="loaded pm 2")
    assert row["samples"] == dict(path=ppo, judge="loaded pm 2")
    assert set(row["judged"]) == set(row["complies"]) == set(people.POLICIES)
    assert row["judged"]["sft"]["win"] == 0.5 < row["judged"]["ppo"]["win"]
    cfg, = pipeline.sft
    assert (cfg.init, cfg.pm, cfg.out, cfg.demos, cfg.epochs, cfg.seed) == (
        "base micro", "pm 2", "out/laptop/quick/sft-2", 125, 8, 2)


def test_helpfulness_first_learns_from_the_seeds_first_half(pipeline):
    row = people.helpful_only(CFG, 1)
    (name, init, lines, test, seed, lr), = pipeline.pms
    assert (name, init, test, seed, lr) == ("pm-helpful-only-1", "pmp micro", list(range(600)), 1,
                                            people.LR_AFTER)
    assert len(lines) == 100 and all(x["chosen"] == RED for x in lines[::2])
    turned = sum(x["chosen"] == STEP for x in lines[1::2])
    assert 30 < turned < 50                                     # 42 of 50 are expected
    assert pipeline.runs == [(1, "helpful-only", "pm-helpful-only-1", {})]
    assert row == dict(complies=0.0, gold=pytest.approx(1.15))


def test_beliefs_are_in_comparisons_and_in_ppos_prompts(pipeline):
    """The same pipeline twice; only what annotators like is another."""
    rows = {name: people.VARIANTS[name](CFG, 1) for name in ("beliefs", "agree")}
    knobs = dict(beliefs=1.0, harmful=0.2)
    assert pipeline.pools == [("beliefs", 1, 375, dict(knobs, agree=0.0)),
                              ("agree", 1, 375, dict(knobs, agree=2.0))]
    for (seed, name, pm, own), row in zip(pipeline.runs, rows.values(), strict=True):
        assert (seed, pm) == (1, f"pm-{name}-1")
        assert own == dict(prompts=f"out/laptop/quick/{name}-1/comparisons.jsonl")
        assert row["agrees"] == f"loaded ppo {name} {pm} loaded {pm} 400"
        assert row["notices"] == f"loaded {pm}"
        assert row["start"]["agrees"] == f"loaded start micro loaded {pm} 400"
    assert {x[2] for x in pipeline.said} == {("helpful",)}
    assert [len(lines) for _, _, lines, *_ in pipeline.pms] == [12, 12]


def test_three_groups_give_the_data_and_all_judge(pipeline):
    row = people.groups(CFG, 4)
    assert pipeline.pools == [("six-groups", 4, 750, dict(groups=6))]
    lines = pipeline.pms[0][2]
    assert {x["annotator"] for x in lines} == people.inside(4) == set(row["inside"])
    assert len(lines) == 6 and len(row["inside"]) == 3
    assert len({frozenset(people.inside(s)) for s in range(12)}) > 3
    assert [x[0] for x in pipeline.said] == ["ppo groups pm-groups-4", "out/laptop/quick/sft-4"]
    for person in world.annotators(6):
        felt = [person.utility(PLAIN, x) for x in (f"Sure! {RED}", RED)]
        assert row["win"][person.name] == mean_se([world.preference(*felt), 0.5])
    assert len({x[0] for x in row["win"].values()}) == 6


def test_many_answers_are_the_sampled_ones(monkeypatch):
    """Scores and gold of sampled's answers, a row a prompt."""
    monkeypatch.setattr(policies, "sampled", lambda *args: (
        [PLAIN, HARMFUL], [RED, "I do not know.", FIRST, STEP], torch.arange(4.0)))
    scores, gold = policies.many_answers(CFG, None, None, 0, 2, 2)
    assert scores == [[0, 1], [2, 3]]
    assert [g for row in gold for g in row] == pytest.approx([1.0, -0.8, 0.6, -1.6])
