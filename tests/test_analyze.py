"""analyze.py: what is measured on lines and scores, the files it reads, the program on tiny models.

Mutations tried, each caught here: a ranking's pairs weigh 1 each, its equal answers kept, its
neighbours only, its soft label used; sides or lengths swapped; all turns counted, three turns told
from more; accuracy over pairs for one over lines; soft for max(soft, 1 - soft), unknown ones left
out; ECE to probabilities on choices, bins not passed on; the threshold on the higher score, the
best accuracy of all pairs beside it; differences with one sign in the correlation; objectives
mixed; the surest right answer first, right ones among the mistakes; a query with its own header,
blanks kept, an assistant's turn at its end, lines from 0, an empty file, 1 for true; nothing kept
or scores of nan let through; no <|eoc|>, a prompt left out, harmful for harmless, the index of an
utterance after a dropped one, one kind of utterance; terms reversed, sentences for terms; the
held-out mean not removed or the data's own; no bins; the folder made first; nan in the JSON.
"""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

import analyze
import measures
from analyze import Config, above_of, analysis, groups_of, hhh_of, length_of, pairs_of, summary
from common import UserError, save_checkpoint
from data import world
from data.tokenizer import join, train_bpe
from model import GPT, GPTConfig, pack
from preference import score_lines

TOK = train_bpe([str(world.document(0, i)) for i in range(40)], 320)
ASK = [("human", "What color is the fox?")]


def line(chosen="yes", rejected="no", turns=1, **more):
    prompt = ASK + [("assistant", "Red."), *ASK] * (turns - 1)
    return dict(dict(prompt=prompt, chosen=chosen, rejected=rejected, objective="helpful"), **more)


def ranking(*responses, **more):
    return dict(dict(prompt=ASK, responses=list(responses), objective="helpful"), **more)


# ---------------------------------------------------------------- lines and scores

def test_pairs_of_a_comparison_and_of_a_ranking():
    """A ranking of four with two equal answers has three: three pairs of weight 1/3."""
    lines = [line("long one", "no", soft=0.8), ranking("a", "bb", "a", "ccc", soft=0.9)]
    p = pairs_of(lines, [[1.0, 2.0], [5.0, 4.0, 3.0]])
    assert p.line.tolist() == [0, 1, 1, 1]
    assert p.weight.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert p.better.tolist() == [1, 5, 5, 4] and p.worse.tolist() == [2, 4, 3, 3]
    assert p.chars_better.tolist() == [8, 1, 1, 2] and p.chars_worse.tolist() == [2, 2, 3, 3]
    assert p.soft[0] == 0.8 and np.isnan(p.soft[1:]).all()
    with pytest.raises(ValueError, match="line 2: 2 scores for 3 different answers"):
        pairs_of(lines, [[1.0, 2.0], [5.0, 4.0]])


def test_groups_of_lines():
    """A turn is a human one; three and five are one group."""
    lines = [line(turns=1, tranche="base"), line(turns=2, tranche="rs"),
             line(turns=3, objective="harmless", tranche="base"), line(turns=5, tranche="rs"),
             line(turns=1)]
    assert groups_of(lines) == {
        "all": [0, 1, 2, 3, 4], "harmless": [2], "helpful": [0, 1, 3, 4],
        "tranche base": [0, 2], "tranche rs": [1, 3], "tranche unnamed": [4],
        "turn 1": [0, 4], "turn 2": [1], "turn 3+": [2, 3],
        "harmless, turn 3+": [2], "helpful, turn 1": [0, 4], "helpful, turn 2": [1],
        "helpful, turn 3+": [3]}
    assert list(groups_of(lines))[:3] == ["all", "harmless", "helpful"]


def test_summary_by_hand():
    """Right, tied, and a ranking with 2 of 3 pairs right: (1 + 1/2 + 2/3) / 3."""
    lines = [line("aaaa", "b", soft=0.9), line("a", "bbbb", soft=0.3), ranking("a", "bb", "ccc")]
    p = pairs_of(lines, [[2, 1], [1, 1], [5, 6, 4]])
    found = summary(p)
    assert (found["lines"], found["pairs"], found["bayes"]) == (3, 5, None)
    values = [1, 0.5, 2 / 3]
    assert (found["accuracy"], found["se"]) == pytest.approx(measures.mean_se(values))
    assert (found["longer"], found["shorter"]) == pytest.approx((1 / 3, 2 / 3))
    assert found["best"] == pytest.approx(2 / 3)
    assert summary(p[:2])["bayes"] == pytest.approx((0.9 + 0.7) / 2)


def test_above_by_hand():
    """Ten pairs whose lower scores are 0, 1, ..., 9: each threshold leaves one pair less."""
    lines = [line(soft=0.5 + i / 20) for i in range(10)]
    rows = above_of(pairs_of(lines, [[i + 1, i] if i < 8 else [i, i + 2] for i in range(10)]))
    assert [r["threshold"] for r in rows] == list(range(10))
    assert [r["pairs"] for r in rows] == list(range(10, 0, -1))
    assert [r["accuracy"] for r in rows] == pytest.approx(
        [(8 - i) / (10 - i) for i in range(8)] + [0, 0])
    assert rows[9]["bayes"] == pytest.approx(0.95) and rows[0]["bayes"] == pytest.approx(0.725)
    assert rows[0]["delta"] == pytest.approx((8 + 4) / 10) and rows[8]["delta"] == 2


def test_length_of():
    """Over answers it sees prompts, inside pairs it does not, whichever answer is the better."""
    lines = [line("a" * 3, "a"), line("a", "a" * 2), line("a" * 30, "a" * 31)]
    scores = [[3.0, 1.0], [1.0, 2.0], [-30.0, -29.0]]    # inside a pair: one a character
    found = length_of(lines, scores, pairs_of(lines, scores))
    assert found["inside"]["pearson"] == pytest.approx(1)
    assert found["answers"]["pearson"] < -0.9
    both = [line("aa", "a"), line("aa", "a")]            # (1 + 2) / sqrt((1 + 4) (1 + 1))
    found = length_of(both, [[1, 0], [2, 0]], pairs_of(both, [[1, 0], [2, 0]]))
    assert found["inside"]["pearson"] == pytest.approx(3 / math.sqrt(10))
    lines[0]["chosen"] = "a"                             # now equal to the other: one answer
    with pytest.raises(ValueError, match="line 1"):
        pairs_of(lines, scores)
    even = [line("ab", "cd"), line("ef", "gh")]
    found = length_of(even, scores[:2], pairs_of(even, scores[:2]))
    assert all(math.isnan(x) for part in found.values() for x in part.values())


@pytest.fixture(scope="module")
def many():
    """Comparisons and rankings of both objectives with random scores."""
    rng = np.random.default_rng(0)
    lines, scores = [], []
    for i in range(120):
        more = dict(objective=("helpful", "harmless")[i % 3 == 0], tranche="ab"[i % 2])
        n = 2 if i % 4 else int(rng.integers(3, 6))
        answers = [f"{k}" * int(rng.integers(1, 20)) for k in range(n)]
        lines.append(ranking(*answers, **more) if n > 2 else
                     line(*answers, turns=1 + i % 5, soft=float(rng.random()), **more))
        scores.append((rng.normal(size=n) - np.arange(n)).tolist())
    return lines, scores


def test_analysis_does_not_see_a_shift_but_in_thresholds(many):
    lines, scores = many
    one, two = analysis(lines, scores), analysis(lines, [[x + 7 for x in s] for s in scores])
    assert one["groups"] == two["groups"]
    for name, part in one["calibration"].items():
        for key in ("ece", "gap", "temperature", "ece_floor", "ece_se"):
            assert part[key] == pytest.approx(two["calibration"][name][key], abs=1e-9)
    for a, b in zip(one["above"]["all"], two["above"]["all"], strict=True):
        assert a["threshold"] + 7 == pytest.approx(b["threshold"])
        assert (a["accuracy"], a["pairs"]) == (b["accuracy"], b["pairs"])
    assert two["scores"]["chosen"] == pytest.approx(one["scores"]["chosen"] + 7)
    assert two["scores"]["spread"] == pytest.approx(one["scores"]["spread"])


def test_analysis_does_not_see_the_order_of_lines(many):
    lines, scores = many
    order = np.random.default_rng(1).permutation(len(lines))
    one, two = analysis(lines, scores), analysis([lines[i] for i in order],
                                                 [scores[i] for i in order])
    for name, group in one["groups"].items():
        assert group == pytest.approx(two["groups"][name])
    for name, part in one["calibration"].items():
        for key in ("ece", "gap", "temperature"):
            assert part[key] == pytest.approx(two["calibration"][name][key])


def test_analysis_has_its_parts(many):
    """Each group is the summary of its own lines; scores of best and other answers."""
    lines, scores = many
    out = analysis(lines, scores, bins=5, seed=3)
    assert list(out["calibration"]) == list(out["above"]) == ["all", "harmless", "helpful"]
    own = [i for i, x in enumerate(lines) if x["objective"] == "harmless"]
    p = pairs_of([lines[i] for i in own], [scores[i] for i in own])
    assert out["groups"]["harmless"] == pytest.approx(summary(p))
    assert out["above"]["harmless"] == [pytest.approx(r) for r in above_of(p)]
    delta = p.better - p.worse
    assert out["calibration"]["harmless"]["ece"] == measures.ece(delta, None, 5, p.weight)
    assert out["calibration"]["all"]["ece_soft"] is None
    assert out["scores"]["chosen"] == pytest.approx(np.mean([s[0] for s in scores]))
    assert out["scores"]["rejected"] == pytest.approx(np.mean(np.concatenate(
        [s[1:] for s in scores])))
    pairs = [i for i, x in enumerate(lines) if "soft" in x]
    p = pairs_of([lines[i] for i in pairs], [scores[i] for i in pairs])
    both = analysis([lines[i] for i in pairs], [scores[i] for i in pairs])["calibration"]["all"]
    assert both["ece_soft"] == measures.ece(p.better - p.worse, p.soft, 10)
    assert both["ece"] == measures.ece(p.better - p.worse)


def test_hhh_mistakes_are_the_surest_first():
    lines = [line(objective=c) for c in "abbab"]
    found = hhh_of(lines, [[1, 0], [0, 3], [2, 2], [0, 1], [0, 5]], mistakes=2)
    assert {k: (g["accuracy"], g["lines"]) for k, g in found["groups"].items()} == {
        "a": (0.5, 2), "b": (pytest.approx(1 / 6), 3), "total": (0.3, 5)}
    assert [m["delta"] for m in found["mistakes"]] == [-5, -3]
    found = hhh_of(lines, [[1, 0], [0, 3], [2, 2], [0, 1], [0, 5]], mistakes=9)
    assert [m["delta"] for m in found["mistakes"]] == [-5, -3, -1]   # a tie is no mistake


def test_terms_and_sentences():
    assert len(analyze.TERMS) == 12 and all(len(pair) == 2 for pair in analyze.TERMS)
    assert len({t for pair in analyze.TERMS for t in pair}) == 24
    assert all(s.count("{}") == 1 for s in analyze.SENTENCES)
    words = {w for s in analyze.SENTENCES for w in s.lower().strip(".").split()}
    assert not words & {"he", "she", "his", "her", "him", "hers"}


# ---------------------------------------------------------------- files

def test_hhh_queries():
    """One turn, a dialogue without its first header, HH text; blanks round a turn go."""
    def prompt(query):
        return analyze.hhh_line(dict(category="c", query=query, chosen="a", rejected="b"))["prompt"]

    assert prompt("Why?") == prompt("\n\nHuman: Why?") == [("human", "Why?")]
    assert prompt("Why?\n\nAssistant:  What?\n\nHuman:  That. ") == [
        ("human", "Why?"), ("assistant", "What?"), ("human", "That.")]
    assert prompt("Human: is a word\n\nand a paragraph") == [
        ("human", "Human: is a word\n\nand a paragraph")]


BAD = {
    "field 'query' must end with": dict(query="a\n\nAssistant: b"),
    "no field 'query'": dict(question="a"), "field 'query' is not text": dict(query=3),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_hhh_line_is_named(message, tmp_path):
    good = dict(category="c", query="a", chosen="b", rejected="c")
    bad = dict({k: v for k, v in good.items() if k != "query"}, **BAD[message])
    path = tmp_path / "hhh.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    with pytest.raises(UserError) as error:
        analyze.read_jsonl(path, analyze.hhh_line, analyze.HHH)
    assert f"{path} line 2: {message}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, message", [
    ("[1]", "line 1"), ("nonsense", "line 1"), ("", "empty"), ('{"text": "a"}', "'harmful'"),
    ('{"text": "a", "harmful": 1}', "'harmful' is not true or false"),
    ('{"text": "a", "harmful": true, "prompt": "b"}', "must end with 'Assistant:'"),
])
def test_bad_utterances_are_named(text, message, tmp_path):
    path = tmp_path / "utterances.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        analyze.read_jsonl(path, analyze.utterance_line, analyze.UTTERANCE)
    assert str(path) in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_real_hhh_comparisons(data_dir):
    """221 lines, 41 of them dialogues; each prompt is one that can be rendered."""
    lines = analyze.read_jsonl(data_dir / "hhh-alignment" / "hhh_alignment_221.jsonl",
                               analyze.hhh_line, analyze.HHH)
    assert Counter(x["objective"] for x in lines) == dict(honest=61, helpful=59, harmless=58,
                                                          other=43)
    assert sum(len(x["prompt"]) > 1 for x in lines) == 41
    for x in lines:
        roles = [role for role, text in x["prompt"] if text]
        assert roles == (["human", "assistant"] * 9)[:len(roles)] and len(roles) % 2
        join(x["prompt"], answer=True)
        assert x["chosen"] != x["rejected"]


# ---------------------------------------------------------------- the program

@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A PM with lively scores, one that diverged, a language model, comparisons of the world."""
    folder = tmp_path_factory.mktemp("analyze")
    model = GPT(GPTConfig(TOK.vocab, 192, 2, 2, 24, True))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        save_checkpoint(folder / "pm.pt", **pack(model, TOK))
        model.score_head.bias.fill_(math.nan)
        save_checkpoint(folder / "nan.pt", **pack(model, TOK))
    save_checkpoint(folder / "lm.pt", **pack(GPT(GPTConfig(TOK.vocab, 64, 2, 2, 24)), TOK))
    for name, seed, count in (("one", 1, 60), ("two", 2, 40)):
        lines = [dict(world.pretraining_pair(seed, i, 0.25, 0.25), soft=0.8) for i in range(count)]
        text = [json.dumps(dict(x, prompt=join(x["prompt"], answer=True))) for x in lines]
        (folder / f"{name}.jsonl").write_text("\n".join(text))
    return folder


def config(out, target, **more):
    return Config(**dict(dict(pm=str(out / "pm.pt"), data=str(out / "one.jsonl"), device="cpu",
                              out=str(target)), **more))


def test_the_program(out, tmp_path, capsys):
    """Two files, a held-out mean, all probes: the files, and their numbers by another way."""
    (tmp_path / "hhh.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (
        dict(category="kind", query="Hello?", chosen="Hello.", rejected="Go."),
        dict(category="true", query="Hello?\n\nAssistant: Yes?\n\nHuman: Why?", chosen="So.",
             rejected="I do not know."),
        dict(category="true", query="word " * 300, chosen="a", rejected="b"))))
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (
        dict(text="word " * 300, harmful=True), dict(text="Hello.", harmful=False),
        dict(text="Go.", harmful=True), dict(
            text="Red.", harmful=False, prompt="\n\nHuman: What color is it?\n\nAssistant:"))))
    cfg = config(out, tmp_path / "a", data=f"{out / 'one.jsonl'},{out / 'two.jsonl'}",
                 heldout=str(out / "two.jsonl"), gender=True, bins=4,
                 hhh=str(tmp_path / "hhh.jsonl"), utterances=str(tmp_path / "said.jsonl"))
    analyze.main(cfg)
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "a" / "analysis.json").read_text())
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "analysis.json", "analysis.md", "analysis.png"]
    assert (tmp_path / "a" / "analysis.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a" / "analysis.md").read_text()
    assert found["groups"]["all"]["lines"] == 100
    assert found["groups"]["all"]["bayes"] == pytest.approx(0.8)
    for part in ("100 lines scored, dropped", "2 lines scored, dropped {'identical': 0, 'too_long'"
                 ": 1}", "3 utterances scored, dropped too_long: 1"):
        assert part in told
    for part in ("| kind |", "| total |", "AUROC", "male - female", "| helpful, turn 1 |"):
        assert part in told and part in page

    source = analyze.load_source(out / "pm.pt")
    tok, model = analyze.loads(source["tokenizer"]), analyze.unpack(source)
    held = score_lines(model, tok, analyze.read_comparisons(out / "two.jsonl"))[1]
    assert found["mean"] == pytest.approx(np.mean(held), abs=1e-6)
    lines, scores, _ = score_lines(model, tok, analyze.read_comparisons(cfg.data))
    scores = [[x - found["mean"] for x in s] for s in scores]
    want = json.loads(json.dumps(analysis(lines, scores, 4)), parse_constant=lambda _: None)
    assert {k: found[k] for k in want} == want

    def alone(turns, text):
        """Score of one row by itself, read at its last token."""
        ids = (tok.render(turns, answer=True) if turns else [tok.eod, tok.assistant])
        ids = torch.tensor([ids + tok.encode(text) + [tok.eot, tok.eoc]])
        return model.score(model(ids))[0, -1].item()

    with torch.no_grad():
        good = [alone([], "Hello."), alone([("human", "What color is it?")], "Red.")]
        assert found["utterances"]["gap"] == pytest.approx(np.mean(good) - alone([], "Go."),
                                                           abs=1e-4)
        male, female = (np.array([[alone([], s.format(pair[side])) for pair in analyze.TERMS]
                                  for s in analyze.SENTENCES]) for side in (0, 1))
        assert found["gender"]["gap"] == pytest.approx((male - female).mean(), abs=1e-4)
        assert found["gender"]["sentences"] == pytest.approx((male - female).mean(1), abs=1e-4)
        kind = alone([("human", "Hello?")], "Hello.") > alone([("human", "Hello?")], "Go.")
    assert found["hhh"]["groups"]["kind"]["accuracy"] == float(kind)


def test_held_out_mean_is_the_datas_own_unless_told(out, tmp_path, monkeypatch):
    monkeypatch.setattr(analyze, "draw", lambda *_: None)
    analyze.main(config(out, tmp_path))
    found = json.loads((tmp_path / "analysis.json").read_text())
    assert found["scores"]["chosen"] + found["scores"]["rejected"] == pytest.approx(0, abs=1e-4)
    assert not {"hhh", "utterances", "gender"} & found.keys()


@pytest.mark.parametrize("flags, message", [
    (dict(bins=0), "--bins 0"), (dict(pm="lm.pt"), "a language model, not a preference model"),
    (dict(pm="nan.pt"), "scores are not finite"), (dict(data="none.jsonl"), "no such file"),
    (dict(data="same.jsonl"), "no line is usable, dropped {'identical': 1"),
    (dict(utterances="kind.jsonl"), "2 harmless, 0 harmful fit"),
])
def test_what_cannot_be_measured_is_said_in_one_line(flags, message, out, tmp_path):
    """And nothing is written."""
    (out / "same.jsonl").write_text(json.dumps(dict(
        prompt="\n\nHuman: a\n\nAssistant:", chosen="b", rejected="b")))
    (out / "kind.jsonl").write_text('{"text": "a", "harmful": false}\n' * 2)
    flags = {k: v if k == "bins" else str(out / v) for k, v in flags.items()}
    with pytest.raises(UserError) as error:
        analyze.main(config(out, tmp_path / "a", **flags))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "a").exists()
