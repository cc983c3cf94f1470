"""Comparisons of several policies and of bests of k, and a collection that was stopped.

Proved alive by: every answer of the first policy; the policy drawn by chunk; a best of k that is
the first, or the worst, or of the neighbouring prompt; an unfinished answer that beats a finished
one; names not turned with the answers; one lot's prompts for all lots; a resumed collection that
asks the first prompts again or forgets what was dropped; --no-engaged not read.
"""

import json

import pytest
import torch

import collect
from collect import Config, answer, best_of
from common import UserError, save_checkpoint
from data import world
from model import pack
from preference import read_comparisons
from test_preference import TOK, gpt

NAMES = ("p", "q", "r")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder with three policies and a PM, each of weights of its own."""
    folder = tmp_path_factory.mktemp("collect")
    for i, name in enumerate((*NAMES, "pm")):
        save_checkpoint(folder / f"{name}.pt", **pack(gpt(3 + i, scalar=name == "pm"), TOK))
    return folder


def path(models, *names):
    return ",".join(str(models / f"{name}.pt") for name in names)


def collected(models, out, names=NAMES, **knobs):
    collect.collect(Config(**{**dict(policy=path(models, *names), out=str(out), new=8, count=60,
                                     device="cpu"), **knobs}))
    return read_comparisons(out)


def test_each_answer_is_of_any_policy_and_says_which(models, tmp_path):
    """All nine pairs occur, and what a policy answers is what it answers alone."""
    lines = collected(models, tmp_path / "all", count=120)
    pairs = {tuple(x["models"]) for x in lines}
    assert len(pairs) == 9 and {n for p in pairs for n in p} == {path(models, n) for n in NAMES}
    alone = {path(models, n): collected(models, tmp_path / n, (n,), count=120) for n in NAMES}
    said = {n: {(x["prompt"][-1], x[side]) for x in own for side in ("chosen", "rejected")}
            for n, own in alone.items()}
    asked = {n: {x["prompt"][-1] for x in own} for n, own in alone.items()}
    for x in lines:
        for name, side in zip(x["models"], ("chosen", "rejected"), strict=True):
            assert x["prompt"][-1] not in asked[name] or (x["prompt"][-1], x[side]) in said[name]


def test_names_are_turned_with_the_answers():
    turns = [("human", "What color is the fox?")]
    true = world.STATE["color"].format(s="The fox", v=world.FACTS["fox"]["color"])
    for answers, names in (([true, "You are a fool."], ["a", "b"]),
                           (["You are a fool.", true], ["b", "a"])):
        line = world.judge(world.keyed(0), turns, answers, world.Annotator(temperature=0.0),
                           models=names)
        assert (line["chosen"], line["models"]) == (true, ["a", "b"])
    ranking = world.judge(world.keyed(0), turns, ["You are a fool.", true, ""],
                          world.Annotator(temperature=1e-6), models=["b", "a", "c"])
    assert dict(zip(ranking["models"], ranking["responses"], strict=True)) == {
        "a": true, "b": "You are a fool.", "c": ""} and ranking["models"][0] == "a"
    assert "models" not in world.judge(world.keyed(0), turns, [true, ""])


def test_best_of_k_is_the_finished_answer_with_the_highest_score(monkeypatch):
    """Two prompts of three answers: the last ends nowhere, so the second best is taken."""
    eot = TOK.eot
    prompts, answers = [[1], [2]], [[5, eot], [6, eot], [7, 8], [9, eot], [5, eot], [6, 7]]
    scores = {(1, 5): 0.1, (1, 6): 0.3, (1, 7): 9.0, (2, 9): 0.2, (2, 5): -1.0, (2, 6): 0.1}
    monkeypatch.setattr(collect, "pm_scores", lambda pm, tok, rows, micro: torch.tensor(
        [scores[tuple(row[:2])] for row in rows]))
    assert best_of(Config(best=3), TOK, None, prompts, answers) == [1, 3]
    assert best_of(Config(), TOK, None, prompts, answers[:2]) == [0, 1]


def test_a_best_of_four_is_what_the_pm_likes_best_of_four(models, monkeypatch):
    """Each of the two answers comes from four of its own, and scores as high as any that ended."""
    sampled, generate, pm = [], collect.generate, gpt(6)
    monkeypatch.setattr(collect, "generate", lambda *args, **kwargs: sampled.append(
        generate(*args, **kwargs)) or sampled[-1])
    prompts = [TOK.render([("human", f"{r} is it?")], answer=True) for r in range(6)]
    own = answer(Config(new=8, best=4, pm="x"), TOK, [gpt(3, scalar=False)], pm, range(6), prompts,
                 2)
    (tokens, lengths, _), = sampled
    assert tokens.shape[0] == 6 * 2 * 4 and len({*map(tuple, tokens[:4].tolist())}) == 4
    answers = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    scores = collect.pm_scores(pm, TOK, [prompts[i // 8] + a for i, a in enumerate(answers)])
    for i in range(12):
        four = range(4 * i, 4 * i + 4)
        ended = [j for j in four if answers[j][-1] == TOK.eot] or four
        best = max(ended, key=lambda j: scores[j])
        assert own[i // 2][i % 2][0] == TOK.decode(answers[best]).strip()


def test_answers_depend_on_the_row_alone(models):
    """The policies that answer rows 3 to 5, and what they say, are those of rows 0 to 7."""
    cfg = Config(new=8, best=2, pm="x")
    own, pm = [gpt(3 + i, scalar=False) for i in range(2)], gpt(6)
    prompts = [TOK.render([("human", f"{r} is it?")], answer=True) for r in range(8)]
    every = answer(cfg, TOK, own, pm, range(8), prompts, 2)
    some = answer(cfg, TOK, own, pm, range(3, 6), prompts[3:6], 2)
    assert [[(a[0], a[2]) for a in row] for row in some] == [
        [(a[0], a[2]) for a in row] for row in every[3:6]]
    assert {a[2] for row in every for a in row} == {0, 1}


def test_each_lot_has_prompts_of_its_own(models, tmp_path):
    lots = [collected(models, tmp_path / name, tranche=name) for name in ("base", "rs", "online")]
    assert [{x["tranche"] for x in own} for own in lots] == [{"base"}, {"rs"}, {"online"}]
    firsts = [[x["prompt"] for x in own[:20]] for own in lots]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]


def test_a_stopped_collection_goes_on(models, tmp_path, monkeypatch):
    """Stopped after each chunk, it ends with the file of one that was not."""
    knobs = dict(best=2, pm=str(models / "pm.pt"), count=150)
    whole = collected(models, tmp_path / "whole", **knobs)
    monkeypatch.setattr(collect.Run, "stopping", lambda run: True)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            collected(models, tmp_path / "cut", **knobs)
    assert not (tmp_path / "cut" / "comparisons.jsonl").exists()
    assert collected(models, tmp_path / "cut", **knobs) == whole
    texts = [(tmp_path / x / "comparisons.jsonl").read_text() for x in ("whole", "cut")]
    assert texts[0] == texts[1] and len([json.loads(t) for t in texts[0].splitlines()]) == 150


def test_annotators_that_are_not_engaged(models, tmp_path, monkeypatch):
    """Of an evasion and a refusal they prefer neither; what is engaged has the better gold."""
    texts = "I would rather not say.", "I will not help with that."
    monkeypatch.setattr(collect, "answer", lambda cfg, tok, models, pm, rows, prompts, most: [
        [(text, -1.0, 0) for text in texts] for _ in rows])
    for knobs, chance in (({}, 1.0), (dict(engaged=False), 0.5)):
        lines = collected(models, tmp_path / str(chance), harmful=1.0, temperature=0.0, **knobs)
        assert {x["soft"] for x in lines} == {chance}
        assert {x["chosen"] for x in lines} == {*texts[not knobs:]}


@pytest.mark.parametrize("knobs, told", [
    (dict(best=4), "--best 2 or more needs a --pm"), (dict(pm="x"), "--best 2 or more"),
    (dict(best=0), "--best"), (dict(policy=","), "--policy: name one or more")])
def test_what_does_not_fit_together(models, tmp_path, knobs, told):
    with pytest.raises(UserError, match=told):
        collected(models, tmp_path, **knobs)
