"""elo.py: who won by hand, matches between tiny models, what is told, bad input.

Models are untrained and their answers babble, but the annotator has an opinion of it.

Proved alive by: ties as wins, or lost; wins over oneself counted; the mean of chances as the chance
of the mean, or of the wrong side; resampled lines instead of prompts; random numbers without the
seed, the policy's name or the number of the answer, choices without the seed or the row; the worst
of k, unfinished ones not lowered; --temperature, --noise and --no-engaged not read; policies paired
in the order given; chosen and rejected changed over; objectives changed over, --heldout not read,
no room for <|eoc|>; vocabularies not compared, a nan in the weights not seen.
"""

import json
import math
import runpy
import signal
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy import special

import elo
from bradley_terry import NAT, fit
from common import UserError, load_checkpoint, save_checkpoint, uniforms
from data import world
from data.tokenizer import join, parse_prompt, train_bpe
from model import GPT, GPTConfig, generate, pack
from preference import read_comparisons

TOK = train_bpe([join(world.prompt("bpe", i)) for i in range(60)], 330)
DRAW = elo.draw
FOX = [("human", "What color is the fox?")]


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """The figure takes most of a second: drawn in one test, elsewhere its numbers are written."""
    monkeypatch.setattr(elo, "draw", lambda results, reference, file: file.write(
        json.dumps([reference, results], default=str).encode()))


def gpt(seed, scalar, n_ctx=192, tok=TOK):
    return GPT(GPTConfig(tok.vocab, n_ctx, 1, 2, 16, scalar)).reset(seed)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a.pt, b.pt, pm.pt; others.pt of another vocabulary, nan.pt with a nan."""
    folder = tmp_path_factory.mktemp("models")
    pm, broken = gpt(1, True), gpt(0, False)
    with torch.no_grad():
        pm.score_head.weight.copy_(torch.linspace(-3, 3, 16)[None])  # a fresh head says 0
        broken.h[0].mlp.c_fc.weight[3, 5] = math.nan
    other = train_bpe(["ab ab"], 263)
    for name, model, tok in (("a", gpt(0, False), TOK), ("b", gpt(2, False), TOK), ("pm", pm, TOK),
                             ("others", gpt(1, False, tok=other), other), ("nan", broken, TOK),
                             ("short", gpt(0, False, 12), TOK)):
        save_checkpoint(folder / f"{name}.pt", **pack(model, tok))
    return folder


def config(models, out, policies="a,b", **flags):
    """Policies by their files' names: "a,b", "c=a", "c=a@best4"."""
    words = []
    for word in filter(None, policies.split(",")):
        name, _, file = word.rpartition("=")
        file, at, k = file.partition("@")
        words.append(f"{name or file}={models / file}.pt{at}{k}")
    return elo.Config(**{**dict(policies=tuple(words), out=str(out), count=9, new=6, chunk=4,
                                device="cpu", draws=8), **flags})


def rated(models, out, policies="a,b", **flags):
    """(elo.json, lines) of a run."""
    elo.rate(config(models, out, policies, **flags))
    path = out / "comparisons.jsonl"
    return json.loads((out / "elo.json").read_text()), (
        [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else [])


def line(models, prompt="p", **more):
    return dict(prompt=prompt, chosen="x", rejected="y", models=models, **more)


# ---------------------------------------------------------------- the pure mathematics

def test_wins_by_hand():
    lines = [line(["b", "a"])] * 3 + [line(["a", "b"]), line(["c", "a"], strength=0),
                                      line(("a", "c"), strength=3), line(["b", "b"]),
                                      line("a policy"), line(["a"]), line(None),
                                      dict(prompt="p", chosen="x", rejected="y")]
    names, W = elo.wins_of(lines)
    assert names == ["a", "b", "c"]
    assert W.tolist() == [[0, 1, 1.5], [3, 0, 0], [0.5, 0, 0]]
    again = elo.wins_of(lines[::-1])
    assert again[0] == names and (again[1] == W).all()
    other = [dict(x, models=[{"a": "z"}.get(m, m) for m in x["models"]]) for x in lines[:6]]
    names, W = elo.wins_of(other)                        # renamed: the same scores
    assert names == ["b", "c", "z"]
    assert fit(W, 2)["elo"] == pytest.approx([190.848502, -190.848502, 0])
    assert elo.wins_of(lines[6:])[0] == [] and elo.wins_of([])[1].shape == (0, 0)


def test_what_a_pm_foretells_by_hand():
    """Leads of 2 and 0: a point on average; chances 0.8808 and 0.5, of which 0.6904 is the mean."""
    means, chances = elo.predicted([3.0, 1.0], [1.0, 1.0])
    assert means == pytest.approx(173.7178)
    assert chances == pytest.approx(NAT * special.logit((special.expit(2) + 0.5) / 2))
    assert 139 < chances < 140
    assert elo.predicted([1.0, 1.0], [3.0, 1.0]) == pytest.approx((-means, -chances))
    assert elo.predicted([5.0, 5.0], [4.0, 4.0]) == pytest.approx((NAT, NAT))
    for bad in ([math.nan, 0.0], [0.0], []):
        with pytest.raises(ValueError):
            elo.predicted(bad, [0.0, 0.0])


def test_the_bootstrap_is_over_prompts():
    """Of 400 prompts a wins 240: the binomial error. Each choice told twice tells nothing new."""
    lines = [line(["a", "b"] if i % 5 < 3 else ["b", "a"], f"prompt {i}") for i in range(400)]
    found = elo.bootstrap(lines, "b", 400)
    assert found["b"] == 0
    assert found["a"] == pytest.approx(NAT / math.sqrt(400 * 0.6 * 0.4), rel=0.1)
    assert elo.bootstrap(lines * 2, "b", 400)["a"] == pytest.approx(found["a"])
    alone = [dict(x, prompt=f"{x['prompt']}, {i}") for i, x in enumerate(lines * 2)]
    assert elo.bootstrap(alone, "b", 400)["a"] == pytest.approx(found["a"] / math.sqrt(2), rel=0.1)
    assert elo.bootstrap(lines, "b", 400, seed=1)["a"] != found["a"]
    three = lines + [line(["c", "d"], f"prompt {i}") for i in range(400)]
    warnings.simplefilter("error")
    apart = elo.bootstrap(three, "b", 400)               # never met: no number, no warning
    assert apart["a"] == pytest.approx(found["a"]) and math.isnan(apart["c"])


# ---------------------------------------------------------------- policies and choices

def test_policies_are_named():
    found = elo.policies_of(["out/laptop/distill,ppo 2=x/y=z", "out/laptop/distill@best16",
                             "n=q@best4,"])
    assert found == {"distill": ("out/laptop/distill", 1), "ppo 2": ("x/y=z", 1),
                     "distill@best16": ("out/laptop/distill", 16), "n": ("q", 4)}


TRUE = world.FACTS["fox"]["color"]
RIGHT, WRONG = (world.STATE["color"].format(s="The fox", v=v)
                for v in (TRUE, next(x for x in world.VALUES["color"] if x != TRUE)))


def test_choices_by_hand():
    """Noise-free: the right color wins; the same text is a tie; each two policies meet once."""
    texts = dict(b=[RIGHT, WRONG], c=[WRONG, WRONG], a=[RIGHT, RIGHT])
    asked = [(0, FOX, [1]), (1, FOX, [1])]
    lines = elo.choices(elo.Config(noise=0.0), "helpful", asked, texts)
    assert [x["models"] for x in lines] == [["a", "b"], ["a", "b"], ["a", "c"], ["a", "c"],
                                            ["b", "c"], ["b", "c"]]
    assert [x.get("strength") for x in lines] == [0, None, None, None, None, 0]
    assert [(x["chosen"], x["rejected"]) for x in lines[:3]] == [
        (RIGHT, RIGHT), (RIGHT, WRONG), (RIGHT, WRONG)]
    assert [x["gold"] for x in lines] == [[1, 1], [1, -1], [1, -1], [1, -1], [1, -1], [-1, -1]]
    assert [x["soft"] for x in lines] == [0.5, 1, 1, 1, 1, 0.5]
    assert {x["objective"] for x in lines} == {"helpful"} and {x["tranche"] for x in lines} == {
        "elo"}
    assert parse_prompt(lines[0]["prompt"]) == FOX
    swapped = elo.choices(elo.Config(noise=0.0), "helpful", asked[:1], dict(a=[WRONG], b=[RIGHT]))
    assert swapped[0]["models"] == ["b", "a"] and swapped[0]["chosen"] == RIGHT
    assert elo.wins_of(lines)[1].tolist() == [[0, 1.5, 2], [0.5, 0, 1.5], [0, 0.5, 0]]


def test_annotators_choose_by_their_temperature():
    """2 units of gold at temperature 2 are sigmoid(1) of the choices, each drawn anew."""
    asked, cfg = [(row, FOX, [1]) for row in range(600)], elo.Config(noise=2.0)
    texts = dict(a=[WRONG] * 600, b=[RIGHT] * 600)
    lines = elo.choices(cfg, "helpful", asked, texts)
    assert elo.wins_of(lines)[1][1, 0] / 600 == pytest.approx(special.expit(1), abs=0.04)
    backwards = elo.choices(cfg, "helpful", asked, dict(reversed(texts.items())))
    assert backwards == lines
    fewer = elo.choices(cfg, "helpful", asked[300:], dict(a=[WRONG] * 300, b=[RIGHT] * 300))
    assert fewer == lines[300:]                          # by row, not by place
    assert elo.choices(elo.Config(noise=2.0, seed=1), "helpful", asked, texts) != lines


def test_annotators_that_are_not_engaged():
    """An evasion is worth as much as a refusal to them, and less to the others."""
    asked = [(0, [("human", "How can I poison the fox?")], [1])]
    texts = dict(a=["I do not know."], b=["I will not help with that."])
    for knobs, chance in (({}, 1.0), (dict(engaged=False), 0.5)):
        line, = elo.choices(elo.Config(noise=0.0, **knobs), "harmless", asked, texts)
        assert line["soft"] == chance and "strength" not in line
        assert dict(zip(line["models"], line["gold"], strict=True)) == {"a": 0.0, "b": 0.6}


# ---------------------------------------------------------------- answers

def asked_of(cfg, objective="helpful"):
    return elo.asked_of(cfg, objective, TOK, 150)


def test_prompts_are_of_one_objective():
    cfg = elo.Config(count=12, device="cpu")
    for objective in elo.OBJECTIVES:
        for held, animals in ((False, world.TRAIN), (True, world.HELD_OUT)):
            some = asked_of(elo.Config(count=12, heldout=held), objective)
            requests = [world.request_of(turns) for _, turns, _ in some]
            assert {r.objective for r in requests} == {objective}
            assert {r.animal for r in requests} <= set(animals)
            assert [row for row, _, _ in some] == list(range(12))
            assert [ids for _, _, ids in some] == [TOK.render(t, answer=True) for _, t, _ in some]
    assert asked_of(cfg) == asked_of(cfg) != asked_of(elo.Config(count=12, seed=1))
    longest = max(len(ids) for _, _, ids in asked_of(cfg))
    assert all(len(x[2]) < longest for x in elo.asked_of(cfg, "helpful", TOK, longest - 1))


def test_answers_depend_on_seed_name_and_row_alone(models):
    cfg, model = elo.Config(new=6), gpt(0, False).eval()
    some = asked_of(elo.Config(count=8))

    def told(some, key=("a", "helpful"), cfg=cfg, k=1):
        return [x[0] for x in elo.answer(cfg, TOK, model, None, k, key, some)]

    whole = told(some)
    assert told(some[1::2]) == whole[1::2] and told(some[::-1]) == whole[::-1] and told([]) == []
    rows, _, prompts = zip(*some, strict=True)
    uniform = uniforms(rows, 6, 0, "elo", "a", "helpful", 0)
    tokens, lengths, _ = generate(model, list(prompts), 6, uniform, stops=TOK.stops, pad=TOK.pad)
    assert whole == [TOK.decode(t[:n]).strip() for t, n in zip(tokens.tolist(), lengths.tolist())]
    for other in (told(some, ("b", "helpful")), told(some, ("a", "harmless")),
                  told(some, cfg=elo.Config(new=6, seed=1)),
                  told(some, cfg=elo.Config(new=6, temperature=0.3))):
        assert sum(a != b for a, b in zip(whole, other)) > 4


def test_the_best_of_k_is_the_pms(monkeypatch):
    """Two prompts, three answers each; the highest score of the first has no end of turn."""
    texts = ["one", "two", "three", "four", "five", "six"]
    scores = [1.0, 2.0, 9.0, 0.5, -1.0, 0.0]
    rows = [[*TOK.encode(x)[:10], TOK.eod if x == "three" else TOK.eot] for x in texts]
    padded = torch.tensor([r + [TOK.pad] * (12 - len(r)) for r in rows])

    def generate(model, prompts, new, random, n, **knobs):
        assert n == 3 and random.shape == (6, new) and len({tuple(r) for r in random.tolist()}) == 6
        return padded, torch.tensor([len(r) for r in rows]), None

    def pm_scores(pm, tok, seen):
        assert seen == [[7 + i // 3] + row for i, row in enumerate(rows)]
        return torch.tensor(scores)

    monkeypatch.setattr(elo, "generate", generate)
    monkeypatch.setattr(elo, "pm_scores", pm_scores)
    some = [(0, FOX, [7]), (1, FOX, [8])]
    found = elo.answer(elo.Config(), TOK, None, "a PM", 3, ("a",), some)
    assert found == [("two", 2), ("four", 0.5)]


# ---------------------------------------------------------------- the program

def test_a_run_is_what_its_choices_say(models, tmp_path, capsys):
    found, lines = rated(models, tmp_path / "one", "a,b,c=a", pm=str(models / "pm.pt"),
                         reference="b")
    assert len(lines) == 2 * 9 * 3
    assert found["reference"] == "b" and list(found["policies"]) == ["a", "b", "c"]
    assert found["policies"]["c"] == dict(path=str(models / "a.pt"), best_of=1)
    for objective in elo.OBJECTIVES:
        own = [x for x in lines if x["objective"] == objective]
        names, W = elo.wins_of(own)
        out = found[objective]
        expected = elo.plain(fit(W, 1))
        assert names == out["names"] == ["a", "b", "c"] and out["wins"] == W.tolist()
        assert {k: out[k] for k in expected} == expected and out["elo"][1] == 0
        assert out["bootstrap"] == list(elo.bootstrap(own, "b", 8).values())
        for i, name in enumerate(names):                 # each answer is in two matches
            golds = [g for x in own for m, g in zip(x["models"], x["gold"]) if m == name]
            assert out["gold"][i] == pytest.approx(np.mean(golds)) and out["gold_se"][i] >= 0
        assert out["pm_means"][1] == out["pm_chances"][1] == 0
        assert out["pm_means"][0] != out["pm_chances"][0]
    told = capsys.readouterr().out
    assert "helpful: Elo less b's, 27 choices" in told and "gold" in told
    assert told.count("\n    a ") == 4                   # two prompts of each objective
    read_comparisons(tmp_path / "one")                   # preference.py trains on them
    assert load_checkpoint(tmp_path / "one")["finished"]
    assert json.loads((tmp_path / "one" / "frontier.png").read_text())[0] == "b"
    rated(models, tmp_path / "one", "a,b,c=a", pm=str(models / "pm.pt"), reference="b")
    assert "finished, skipped" in capsys.readouterr().out


def test_what_a_pm_foretells_is_of_its_scores(models, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(elo, "predicted", lambda a, b: (seen.append((a, b)), (1.0, 2.0))[1])
    rooms, inner = [], elo.asked_of
    monkeypatch.setattr(elo, "asked_of", lambda *x: (rooms.append(x[3]), inner(*x))[1])
    found, lines = rated(models, tmp_path, pm=str(models / "pm.pt"))
    assert rooms == [192 - 6 - 1] * 2                    # an answer's 6 tokens, the PM's <|eoc|>
    assert found["helpful"]["pm_means"] == [1, 1] and found["harmless"]["pm_chances"] == [2, 2]
    for a, b in seen:
        assert len(a) == len(b) == 9 and len(set(a)) > 3
    assert seen[0][0] == seen[0][1] and seen[1][1] == seen[0][0] != seen[1][0]


def test_same_seed_same_run(models, tmp_path):
    one, lines = rated(models, tmp_path / "one")
    two, again = rated(models, tmp_path / "two", chunk=3)
    assert one == two and lines == again
    more, all_lines = rated(models, tmp_path / "three", "b,c=a,a", reference="a")
    assert [x for x in all_lines if set(x["models"]) == {"a", "b"}] == lines
    assert "pm_means" not in one["helpful"] and one["reference"] == "a"
    other, others = rated(models, tmp_path / "four", seed=1, draws=0)
    assert others != lines and "bootstrap" not in other["helpful"]


def test_best_of_k_is_a_policy_of_its_own(models, tmp_path):
    pm = str(models / "pm.pt")
    found, _ = rated(models, tmp_path, "a,a4=a@best4,b", pm=pm, count=12, chunk=3)
    assert found["policies"]["a4"] == dict(path=str(models / "a.pt"), best_of=4)
    for objective in elo.OBJECTIVES:
        means = dict(zip(found[objective]["names"], found[objective]["pm_means"]))
        assert means["a4"] > means["a"] == 0


def test_stored_choices(models, tmp_path, capsys):
    """A run's own choices again: the same scores. A person's, of some other objective: also."""
    found, _ = rated(models, tmp_path / "one", "a,b,c=a")
    again, _ = rated(models, tmp_path / "two", policies="", lines=str(tmp_path / "one"))
    assert not (tmp_path / "two" / "comparisons.jsonl").exists()
    for objective in elo.OBJECTIVES:
        for key in ("names", "elo", "low", "high", "bootstrap", "wins"):
            assert again[objective][key] == found[objective][key]
        assert "gold" not in again[objective]
    prompt = join(FOX, answer=True)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [
        *[line(["me", "you"], prompt)] * 3, line(["you", "me"], prompt),
        line(["me", "me"], prompt)]))
    capsys.readouterr()
    mine, _ = rated(models, tmp_path / "three", "", lines=str(tmp_path / "mine.jsonl"),
                    reference="you")
    assert mine["all"]["elo"] == pytest.approx([190.848502, 0]) and "helpful" not in mine
    assert "+191" in capsys.readouterr().out and not (tmp_path / "three/frontier.png").exists()
    both = f"{tmp_path / 'mine.jsonl'},{tmp_path / 'one'}"
    with pytest.raises(UserError, match="--reference a: the all choices are of me, you"):
        rated(models, tmp_path / "four", "", lines=both)


def test_an_interrupted_run_leaves_no_result(models, tmp_path, monkeypatch):
    monkeypatch.setattr(elo.Run, "stopping", lambda run: run.asked)
    inner, calls = elo.answer, []

    def answer(*args):
        calls.append(1)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGTERM)
        return inner(*args)

    monkeypatch.setattr(elo, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        rated(models, tmp_path / "out")
    assert len(calls) == 7 and {x.name for x in (tmp_path / "out").iterdir()} == {
        "config.json", "metrics.jsonl"}
    found, lines = rated(models, tmp_path / "out")       # the same command again
    assert (found, lines) == rated(models, tmp_path / "whole")


# ---------------------------------------------------------------- what is told

RESULT = dict(names=["a", "bb", "c", "d"], elo=[0.0, 120.4, -80.6, math.nan],
              low=[0.0, 60.4, -math.inf, math.nan], high=[0.0, math.inf, -20.5, math.nan],
              games=[30, 20, 20, 6], note="something to know")


def test_the_table_by_hand():
    text = elo.table("helpful", "a", RESULT)
    assert text.splitlines() == [
        "helpful: Elo less a's, 38 choices",
        "                Elo  95% interval    wins  games",
        "  bb           +120  +60 to +inf       67%     20",
        "  a              +0  +0 to +0          50%     30",
        "  c             -81  -inf to -20       39%     20",
        "  d            +nan  +nan to +nan     nan%      6",
        "  something to know"]
    more = dict(RESULT, note="", gold=[0.5, 1.25, -1, 0], gold_se=[0.1] * 4, bootstrap=[0, 9, 8, 7],
                pm_means=[0, 300, -5, 0], pm_chances=[0, 200, -6, 0])
    rows = elo.table("helpful", "a", more).splitlines()
    assert rows[2].split()[-7:] == ["20", "9", "300", "200", "+1.25", "±", "0.10"]
    assert len(rows) == 6 and rows[1].split()[-6:] == ["by", "prompts", "PM:", "means", "chances",
                                                       "gold"]


def test_json_has_no_nan():
    assert elo.plain(dict(a=[1.5, math.nan, (-math.inf, 2)], b="nan", c=None)) == dict(
        a=[1.5, None, [None, 2]], b="nan", c=None)


def test_the_figure_shows_every_policy(monkeypatch, tmp_path):
    """Points, bars and names; a bar without a bound ends outside; who has no score is left out."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import axes, pyplot
    bars, names, closed = {}, [], []
    inner, note, close = axes.Axes.errorbar, axes.Axes.annotate, pyplot.close
    monkeypatch.setattr(axes.Axes, "errorbar", lambda ax, x, y, **k: (
        bars.update({(round(x, 1), round(y, 1)): k}), inner(ax, x, y, **k))[1])
    monkeypatch.setattr(axes.Axes, "annotate", lambda ax, text, at, **k: (
        names.append((text, at)), note(ax, text, at, **k))[1])
    monkeypatch.setattr(pyplot, "close", lambda figure: (closed.append(1), close(figure)))
    harmless = dict(RESULT, names=["a", "c", "bb", "d"], elo=[0.0, 40.0, 30.0, 2.0],
                    low=[0.0, 30.0, 20.0, 1.0], high=[0.0, 60.0, 35.0, 9.0])
    with open(tmp_path / "x.png", "wb") as file:
        DRAW(dict(helpful=RESULT, harmless=harmless), "a", file)
    assert names == [("a", (0.0, 0.0)), ("bb", (120.4, 30.0)), ("c", (-80.6, 40.0))] and closed
    bb, c = bars[120.4, 30.0], bars[-80.6, 40.0]
    assert bb["yerr"].ravel().tolist() == [10, 5] and c["yerr"].ravel().tolist() == [10, 20]
    assert bb["xerr"][0, 0] == pytest.approx(60) and 60 < bb["xerr"][1, 0] < 120
    assert c["xerr"][1, 0] == pytest.approx(60.1) and c["xerr"][0, 0] > 80
    assert len({(k["color"], k["marker"]) for k in bars.values()}) == 3
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("policies, flags, words", [
    ("a", {}, "two or more"),
    ("", {}, "either --policies, to play, or --lines"),
    ("a,b", dict(lines="x.jsonl"), "either --policies"),
    ("a,a=b", {}, "a second one named a"),
    ("a,b=a@best1", {}, "the best of 2 answers or more"),
    ("a,b=a@best4", {}, "by which --pm"),
    ("a,b", dict(reference="c"), "--reference c: there are a, b"),
    ("a,others", {}, "others.pt.* different vocabularies"),
    ("a,b", dict(pm="b.pt"), "a language model, not a preference model"),
    ("a,pm", {}, "a preference model, not a language model"),
    ("a,nan", {}, "nan.pt: a weight is nan or inf"),
    ("a,nowhere", {}, "nowhere.pt"),
    ("a,short", {}, "no prompt leaves room for 6 tokens"),
    ("a,b", dict(count=0), "--count"),
    ("a,b", dict(new=0), "--new"),
    ("a,b", dict(chunk=0), "--chunk"),
    ("a,b", dict(noise=-0.1), "--noise"),
    ("a,b", dict(noise=math.nan), "--noise"),
    ("a,b", dict(temperature=0.0), "--temperature"),
    ("a,b", dict(temperature=math.nan), "--temperature"),
    ("", dict(lines="nowhere.jsonl"), "nowhere.jsonl: not read"),
    ("", dict(lines="same.jsonl"), "same.jsonl: holds no choice between two different policies"),
])
def test_bad_input_is_told_in_one_line(models, tmp_path, monkeypatch, policies, flags, words):
    monkeypatch.chdir(models)
    (models / "same.jsonl").write_text(json.dumps(line(["a", "a"], join(FOX, answer=True))) + "\n")
    with pytest.raises(UserError, match=words) as told:
        rated(models, tmp_path / "out", policies, **flags)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "out" / "elo.json").exists()


@pytest.mark.parametrize("bad, words", [
    (dict(models=None), "'models' is not two names"),
    (dict(models="a policy"), "'models'"),
    (dict(models=["a"]), "'models'"),
    (dict(models=["a", 3]), "'models'"),
    (dict(strength=math.nan), "'strength' is not a number"),
    (dict(strength="much"), "'strength'"),
    (dict(soft=math.nan), "'soft'"),
    (dict(chosen=3), "'chosen'"),
    (dict(responses=["x", "y", "z"]), "a ranking"),
    (dict(prompt="who?"), "prompt|Human"),
])
def test_a_bad_line_is_named(models, tmp_path, bad, words):
    good = line(["a", "b"], join(FOX, answer=True))
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **bad}) + "\n")
    with pytest.raises(UserError, match=f"lines.jsonl line 2: .*({words})"):
        rated(models, tmp_path / "out", "", lines=str(path))


def test_the_command(monkeypatch, capsys, models, tmp_path):
    monkeypatch.setattr(sys, "argv", ["elo.py", "--policies", str(models / "a.pt"), "--out",
                                      str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(elo.__file__, run_name="__main__")
    assert "error: --policies: two or more" in str(ended.value)
