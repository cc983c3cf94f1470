"""rejection.py: what is picked and what the best of k is worth, against numbers by hand.

`scripted` replaces the sampler and the preference model: each prompt's answers, whether they end
and their scores are given, so every number of the report follows by hand.

Mutations tried, each caught here: the lowest score picked, the last of equal ones; unfinished
answers not lowered, or by less than scores differ, or raised scores reported; a worst answer that
is the best one's text, or the second best; identical prompts kept; score and gold changed over,
gold of the other objective or of all prompts; all k from 1, k = n left out; log k for the bound;
answers keyed by the place in the chunk, all n by one key, or without the seed, or rows and answers
changed over; an answer scored behind another prompt; --temperature, --helpful, --micro not read;
any special id an end of turn, or only the first token; --count not applied to a file, or 0 as none;
no room for <|eoc|>, or one too much, or the PM's context forgotten; too long ones, unfinished ones
miscounted; a checkpoint without the answers, none, or not read; a rank without rows; vocabularies
not compared; best and worst changed over.
"""

import dataclasses
import io
import json
import math

import pytest
import torch

import rejection
from common import UserError, everyones, load_checkpoint, mine, save_checkpoint, uniforms
from data import world
from data.tokenizer import fit, join, parse_prompt, train_bpe
from model import GPT, GPTConfig, generate, pack
from preference import encode_comparisons, read_comparisons

TOK = train_bpe([join(world.prompt("bpe", i)) for i in range(60)], 330)
DRAW = rejection.draw
FOX, OWL, HARM = "What color is the fox?", "Where does the owl live?", "How can I poison the fox?"


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """The figure takes most of a second: drawn in one test, elsewhere its numbers are written."""
    monkeypatch.setattr(rejection, "draw", lambda rows, n, file: file.write(repr(rows).encode()))


def gpt(seed, scalar, n_ctx=192, tok=TOK):
    return GPT(GPTConfig(tok.vocab, n_ctx, 1, 2, 16, scalar)).reset(seed)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with policy.pt, pm.pt and others.pt, a PM of another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    pm = gpt(1, True)
    with torch.no_grad():
        pm.score_head.weight.copy_(torch.linspace(-3, 3, 16)[None])  # a fresh head says 0
    save_checkpoint(folder / "policy.pt", **pack(gpt(0, False), TOK))
    save_checkpoint(folder / "pm.pt", **pack(pm, TOK))
    other = train_bpe(["ab ab"], 263)
    save_checkpoint(folder / "others.pt", **pack(gpt(1, True, tok=other), other))
    return folder


def config(models, out="", **flags):
    return rejection.Config(**{**dict(policy=str(models / "policy.pt"), pm=str(models / "pm.pt"),
                                      out=str(out), count=7, answers=3, new=6, chunk=2,
                                      device="cpu"), **flags})


def sampled(models, out, **flags):
    """(lines, bestof.json) of a run."""
    rejection.sample(config(models, out, **flags))
    lines = [json.loads(x) for x in (out / "demonstrations.jsonl").read_text().splitlines()]
    return lines, json.loads((out / "bestof.json").read_text())


def file_of(path, *questions):
    text = "".join(json.dumps(dict(prompt=join([("human", q)], answer=True), other=7)) + "\n"
                   for q in questions)
    path.write_text(text)
    return str(path)


@pytest.fixture
def scripted(models, tmp_path, monkeypatch):
    """scripted({question: [(answer, finished, score)]}, **flags) -> lines, bestof.json."""
    def run(answers, out="out", **flags):
        def generate(model, prompts, new, uniform, n, stops=(), pad=0, **sampling):
            told = [(TOK.encode(text)[:new - 1] + ([TOK.eot] if end else [TOK.eod]))
                    for ids in prompts for text, end, _ in answers[question(ids)]]
            rows = torch.tensor([x + [pad] * (new - len(x)) for x in told])
            return rows, torch.tensor([len(x) for x in told]), None

        def pm_scores(pm, tok, rows, micro):
            return torch.tensor([scores[question(row), TOK.decode(tail(row))] for row in rows])

        scores = {(q, text): score for q, some in answers.items() for text, _, score in some}
        monkeypatch.setattr(rejection, "generate", generate)
        monkeypatch.setattr(rejection, "pm_scores", pm_scores)
        path = file_of(tmp_path / "prompts.jsonl", *answers)
        return sampled(models, tmp_path / out, **{**dict(
            prompts=path, answers=len(answers[next(iter(answers))]), new=60), **flags})
    return run


def tail(row):
    return row[row.index(TOK.assistant) + 1:]


def question(row):
    return TOK.decode(row[:row.index(TOK.assistant)])


# ---------------------------------------------------------------- picking

def test_finished_answers_beat_all_others():
    """Scores 1, 5, 3, of which the 5 has no end: it comes last, and the two keep their distance."""
    assert rejection.ranking([[1.0, 5.0, 3.0]], [[1, 0, 1]]).tolist() == [[6.0, 5.0, 8.0]]
    for ended in (0, 1):                                 # all alike: the order of the scores
        ranks = rejection.ranking([1.0, 5.0, 3.0], [ended] * 3)
        assert (ranks - ranks.min()).tolist() == [0.0, 4.0, 2.0]
    huge = rejection.ranking([-1e3, 1e3], [True, False])
    assert huge[0] > huge[1]


def test_picking_by_hand():
    assert rejection.pick("abc", [0.5, 2.0, -1.0]) == (1, 2)
    assert rejection.pick("abcd", [2.0, 0.0, 2.0, 0.0]) == (0, 1)      # the first of equal ones
    assert rejection.pick("abab", [-1.0, 0.0, 3.0, 1.0]) == (2, 1)     # "a" is the best: not itself
    assert rejection.pick("aaa", [0.0, 1.0, 2.0]) is None


# ---------------------------------------------------------------- the report by hand

def gold(question, answer):
    request = world.request_of([("human", question)])
    return world.gold(request, answer)[request.harmful]


def color(value, animal="fox"):
    return world.STATE["color"].format(s=f"The {animal}", v=value)


def test_lines_and_the_best_of_k_by_hand(scripted, capsys):
    """Scores 1 2 3, 6 4 5, 0 0 0; k of 3 at a time: the i-th lowest is the best of
    C(i-1, k-1) / C(3, k) draws, which is thirds, then 0, 1/3, 2/3, then the highest alone.
    """
    truth = world.FACTS["fox"]["color"]
    false = next(v for v in world.VALUES["color"] if v != truth)
    right, wrong, no = color(truth), color(false), world.REFUSALS[0]
    lines, out = scripted({FOX: [("I do not know.", True, 1.0), (right, True, 2.0),
                                 (wrong, True, 3.0)],
                           HARM: [(no, True, 6.0), ("You are a fool.", True, 4.0),
                                  (right, True, 5.0)],
                           OWL: [("Hm", True, 0.0)] * 3})
    want = [dict(prompt=f"\n\nHuman: {q}\n\nAssistant:", chosen=a, rejected=b, objective=o,
                 tranche="rs", models=[out["policy"]] * 2) for q, a, b, o in (
        (FOX, wrong, "I do not know.", "helpful"), (HARM, no, "You are a fool.", "harmless"))]
    assert lines == want
    assert {k: out[k] for k in ("n", "prompts", "lines", "identical", "too_long", "unfinished",
                                "unfinished_picked")} == dict(
        n=3, prompts=3, lines=2, identical=1, too_long=0, unfinished=0, unfinished_picked=0)
    fox = [gold(FOX, x) for x in ("I do not know.", right, wrong)]
    bad = [gold(HARM, x) for x in ("You are a fool.", right, no)]
    hm = gold(OWL, "Hm")
    assert fox == pytest.approx([-0.8, 1.0, -1.0]) and bad == pytest.approx([-0.6, 0.0, 0.6])
    rows = out["rows"]
    assert [r["k"] for r in rows] == [1, 2, 3]
    for r, weights in zip(rows, ((1, 1, 1), (0, 1, 2), (0, 0, 3)), strict=True):
        def worth(values, weights=weights):
            return sum(w * v for w, v in zip(weights, values, strict=True)) / 3
        scores = [worth([1, 2, 3]), worth([4, 5, 6]), 0.0]
        assert r["score"] == pytest.approx(sum(scores) / 3)
        spread = sum((x - r["score"]) ** 2 for x in scores) / 2
        assert r["score_se"] == pytest.approx(math.sqrt(spread / 3))
        assert r["gold_helpful"] == pytest.approx((worth(fox) + hm) / 2)
        assert r["gold_helpful_se"] == pytest.approx(abs(worth(fox) - hm) / 2)
        assert r["gold_harmless"] == pytest.approx(worth(bad)) and r["gold_harmless_se"] == 0
    assert [r["kl"] for r in rows] == pytest.approx([0, 0.1931, 0.4319], abs=5e-5)
    assert [r["sqrt_kl"] for r in rows] == pytest.approx([0, 0.4395, 0.6572], abs=5e-5)
    said = capsys.readouterr().out
    assert "3 prompts, 2 lines, dropped {'identical': 1, 'too_long': 0}" in said
    assert f"best  +6.00  {no}" in said and "worst +4.00  You are a fool." in said
    assert "    3  0.432    +3.000" in said


def test_the_unfinished_are_picked_only_where_all_are(scripted):
    """9 has no end, so 2 is the best; where none has one, the best of them, which is counted."""
    lines, out = scripted({FOX: [("a", True, 1.0), ("b", True, 2.0), ("c", False, 9.0)],
                           OWL: [("d", False, 1.0), ("e", False, 2.0), ("f", False, 0.0)]})
    assert [(x["chosen"], x["rejected"]) for x in lines] == [("b", "c"), ("e", "f")]
    assert (out["unfinished"], out["unfinished_picked"]) == (4, 1)
    best = out["rows"][-1]
    assert best["score"] == pytest.approx((2 + 2) / 2) and out["rows"][0]["score"] == 2.5
    assert out["rows"][1]["score"] == pytest.approx(((9 * 0 + 1 + 2 * 2) / 3 + (1 + 2 * 2) / 3) / 2)


def test_what_the_world_does_not_know_has_no_gold(scripted):
    lines, out = scripted({"What is it?": [("a", True, 1.0), ("b", True, 2.0)]})
    assert lines[0].keys() == {"prompt", "chosen", "rejected", "tranche", "models"}
    assert not [k for r in out["rows"] for k in r if "gold" in k]


def test_the_same_text_everywhere_is_an_error(scripted, tmp_path):
    with pytest.raises(UserError, match="all answers to each of 2 prompts are the same text"):
        scripted({FOX: [("a", True, 1.0), ("a", True, 2.0)], OWL: [("b", True, 1.0)] * 2})
    assert not (tmp_path / "out" / "demonstrations.jsonl").exists()


def test_powers_of_two_and_n():
    """k = 1, 2, 4 .. and n; with one prompt the errors are 0."""
    for n, ks in ((2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])):
        one = dict(scores=[*range(n)], finished=[True] * n, objective=None, gold=None)
        rows = rejection.best_of([one])
        assert [r["k"] for r in rows] == ks
        assert all(r["score"] == pytest.approx(r["k"] * (n + 1) / (r["k"] + 1) - 1)
                   for r in rows)                        # the highest of k from 0 .. n - 1


# ---------------------------------------------------------------- real models

def test_lines_are_comparisons(models, tmp_path):
    lines, out = sampled(models, tmp_path)
    read = read_comparisons(tmp_path / "demonstrations.jsonl")
    assert [x["chosen"] for x in read] == [x["chosen"] for x in lines]
    assert len(lines) == 7 - out["identical"] > 4
    rows, _, dropped = encode_comparisons(TOK, read, 192)
    assert len(rows) + dropped["identical"] == len(lines)
    for row, x in enumerate(read[:3]):                   # the world's prompts of this seed
        asked = world.prompt("rejection/0", row, world.TRAIN, p_harm=0.5)
        assert x["prompt"] == asked and x["objective"] == world.request_of(asked).objective
    DRAW(out["rows"], 3, picture := io.BytesIO())
    assert picture.getvalue()[:4] == b"\x89PNG" and (tmp_path / "bestof.png").stat().st_size > 99
    when = (tmp_path / "bestof.json").stat().st_mtime_ns
    rejection.sample(config(models, tmp_path))           # finished: nothing is done again
    assert (tmp_path / "bestof.json").stat().st_mtime_ns == when


def records(models, rows, **flags):
    cfg = config(models, **flags)
    tok, policy, pm = rejection.load_models(cfg, "cpu")
    asked, _ = rejection.prompts_of(cfg, tok, 192)
    return rejection.answer(cfg, tok, policy, pm, [asked[r] for r in rows])


def close(a, b):
    """The same answers; scores to rounding."""
    drop = [{k: v for k, v in x.items() if k != "scores"} for x in a]
    assert drop == [{k: v for k, v in x.items() if k != "scores"} for x in b]
    for x, y in zip(a, b, strict=True):
        assert x["scores"] == pytest.approx(y["scores"], abs=1e-4)


def test_rows_do_not_depend_on_the_chunk_the_micro_batch_or_the_rank(models, monkeypatch):
    told, inner = [], rejection.pm_scores
    monkeypatch.setattr(rejection, "pm_scores",
                        lambda *args: told.append(args[3]) or inner(*args))
    whole = records(models, range(7))
    assert len({tuple(x["texts"]) for x in whole}) == 7 and len({*whole[0]["texts"]}) == 3
    close(whole, records(models, range(3)) + records(models, range(3, 7)))
    close(whole, records(models, range(7), micro=1))
    close(whole, records(models, range(7), micro=5))
    assert told == [64, 64, 64, 1, 5]
    halves = [records(models, mine(range(7), rank, 2)) for rank in range(2)]
    close(whole, [halves[i % 2][i // 2] for i in range(7)])
    assert records(models, []) == [] and everyones(whole, 1) is whole


def test_more_answers_only_add(models):
    few, many = records(models, range(4), answers=2), records(models, range(4), answers=5)
    assert [x["texts"] for x in few] == [x["texts"][:2] for x in many]
    for flags in (dict(temperature=0.5), dict(seed=1)):
        assert records(models, range(4), answers=2, **flags) != few


def test_answers_and_scores_by_another_way(models):
    """Each answer drawn alone from the same numbers, each scored alone behind its own prompt."""
    tok, policy, pm = rejection.load_models(config(models), "cpu")
    some = records(models, range(5), temperature=0.7)
    for row, x in enumerate(some):
        ids = tok.render(x["turns"], answer=True)
        for j in range(3):
            tokens, lengths, _ = generate(policy, [ids], 6, uniforms([row], 6, 0, "rejection", j),
                                          temperature=0.7, stops=tok.stops)
            told = tokens[0, :lengths[0]].tolist()
            assert tok.decode(told).strip() == x["texts"][j]
            with torch.no_grad():
                score = pm.score(pm(torch.tensor([ids + told + [TOK.eoc]])))[0, -1].item()
            assert score == pytest.approx(x["scores"][j], abs=1e-4)
    assert len({round(s, 3) for x in some for s in x["scores"]}) > 10


# ---------------------------------------------------------------- stopping

def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()
            if p.name not in ("ckpt.pt", "config.json", "samples.txt")}


def test_a_run_that_was_stopped_goes_on(models, tmp_path, monkeypatch):
    sampled(models, tmp_path / "whole")
    for way in ("asked", "killed"):
        out, calls, inner = tmp_path / way, [], rejection.answer

        def answer(*args, way=way, calls=calls, inner=inner):
            calls.append([x[0] for x in args[-1]])
            if way == "killed" and len(calls) == 3:      # what is saved stands, the rest is lost
                raise MemoryError
            return inner(*args)

        with monkeypatch.context() as patch:
            patch.setattr(rejection, "answer", answer)
            if way == "asked":
                patch.setattr(rejection.Run, "stopping", lambda self, calls=calls: len(calls) == 2)
            with pytest.raises(KeyboardInterrupt if way == "asked" else MemoryError):
                rejection.sample(config(models, out, every=3))
        assert load_checkpoint(out)["step"] == 4 and not (out / "bestof.json").exists()
        again = []
        with monkeypatch.context() as patch:
            patch.setattr(rejection, "answer", lambda *args, inner=inner, again=again: (
                again.append([x[0] for x in args[-1]]) or inner(*args)))
            rejection.sample(config(models, out, every=3))
        assert calls[:2] == [[0, 1], [2, 3]] and again == [[4, 5], [6]]
        assert files(out) == files(tmp_path / "whole")


# ---------------------------------------------------------------- prompts, refusals

def test_prompts_of_a_file(models, tmp_path):
    """The oldest turns are cut where a prompt is long; what does not fit is counted."""
    turns = [("human", "z " * 90), ("assistant", "No."), ("human", FOX)]
    long = json.dumps(dict(prompt=join(turns, answer=True))) + "\n"
    path = tmp_path / "p.jsonl"
    file_of(path, FOX, "z " * 200, OWL)
    path.write_text(path.read_text() + long)
    cfg = config(models, prompts=str(path), count=0)
    asked, too_long = rejection.prompts_of(cfg, TOK, 100)
    assert [x[0] for x in asked] == [0, 2, 3] and too_long == 1
    assert asked[2][1] == turns and asked[2][2] == asked[0][2] == fit(TOK, [("human", FOX)], 93)
    assert [len(rejection.prompts_of(config(models, prompts=str(path), count=k), TOK, 100)[0])
            for k in (1, 2, 3, 9)] == [1, 1, 2, 3]
    need = len(asked[0][2]) + cfg.new + 1                # its tokens, the answer, <|eoc|>
    first = config(models, prompts=str(path), count=1)
    assert rejection.prompts_of(first, TOK, need)[1] == 0
    with pytest.raises(UserError, match="none of 1 prompts leaves room for 6 tokens"):
        rejection.prompts_of(first, TOK, need - 1)
    lines, out = sampled(models, tmp_path / "out", prompts=str(path), count=0)
    assert (out["prompts"], out["too_long"]) == (4, 1)
    assert parse_prompt(lines[-1]["prompt"]) == turns
    save_checkpoint(models / "short.pt", **pack(gpt(1, True, len(asked[0][2]) + 7), TOK))
    cfg = config(models, tmp_path / "short", prompts=str(path), pm=str(models / "short.pt"), new=7)
    with pytest.raises(UserError, match="in a context of"):          # the PM's, one token short
        rejection.sample(dataclasses.replace(cfg, count=1))


@pytest.mark.parametrize("flags, words", [
    (dict(answers=1), "--answers must be at least 2"),
    (dict(count=0), "--count"),
    (dict(micro=0), "--micro"),
    (dict(chunk=0), "--chunk"),
    (dict(every=0), "--every"),
    (dict(policy="pm.pt"), "a preference model, not a language model"),
    (dict(pm="policy.pt"), "a language model, not a preference model"),
    (dict(pm="others.pt"), "different vocabularies"),
    (dict(prompts="nowhere.jsonl"), "nowhere.jsonl"),
    (dict(prompts="bad.jsonl"), "bad.jsonl line 2.*'prompt'"),
    (dict(new=190), "none of 7 prompts"),
])
def test_bad_input_is_told_in_one_line(models, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(models)
    good = json.dumps(dict(prompt=join([("human", FOX)], answer=True)))
    (models / "bad.jsonl").write_text(f'{good}\n{{"chosen": "x"}}\n')
    with pytest.raises(UserError, match=words) as told:
        rejection.sample(config(models, tmp_path, **flags))
    assert "\n" not in str(told.value)
