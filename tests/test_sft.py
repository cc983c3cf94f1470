"""sft.py: which tokens are learned, what is held out and dropped, which epoch is kept, resuming.

Proved alive by: the mask one early, without the end of turn, or the whole row; a mean in place of
the sum; the loss divided by one rank's tokens, or by rows; text rows without their second token,
one too many of them; the rejected side for the chosen one; blank answers kept, the dropped not
counted; a split by line, held-out lines trained on; both sets of the world under one key, goodness
unread; one prompt asked twice; the worst or the latest equal epoch kept, its weights shared with
the model, the last weights under its number, the model before training kept; best or optimizer not
resumed; other numbers for each epoch's answers, answers scored without their prompts; linear decay,
no floor; an epoch's line one step late.
"""

import json
import math

import pytest
import torch

import sft
from common import UserError, load_checkpoint, save_checkpoint, schedule, uniforms
from data import world
from data.tokenizer import join, train_bpe
from model import GPT, GPTConfig, generate, pack, pad_rows, respond, unpack
from pretrain import show
from sft import chunks, encode, heldout_loss, pick, prompts_of, sft_loss, split

TEXTS = [text for i in range(60) for _, text in world.document(0, i)[1]]
TOK = train_bpe(TEXTS, 420)
ASK = [("human", "What color is the fox?")]


def gpt(seed=1, scalar=False, tok=TOK, n_ctx=160):
    """A small model; with a scalar head one that likes some rows better than others."""
    model = GPT(GPTConfig(tok.vocab, n_ctx, 2, 2, 24, scalar)).reset(seed)
    if scalar:
        torch.nn.init.normal_(model.score_head.weight, 0, 0.5, torch.Generator().manual_seed(seed))
    return model


class Table:
    """A model whose logits at position t are row t of a table, whatever it reads."""
    logprobs = GPT.logprobs

    def __init__(self, table):
        self.table, self.device = torch.tensor(table, dtype=torch.float32), "cpu"

    def __call__(self, ids, lengths, at):
        return self.table[:ids.shape[1]].expand(*ids.shape, -1)[at]

    def logits(self, hidden):
        return hidden


def near(x, y, tolerance=5e-5):
    return float(x) == pytest.approx(y, abs=tolerance)


# ---------------------------------------------------------------- which tokens are learned

def test_loss_of_a_table():
    """Prompt [0, 1], answer [2, 0]: -log p 0.4076 and 0.2395, so 0.3236 a token."""
    model = Table([[0, 0, 0], [1, 2, 3], [2, 0, 0], [9, 9, 9]])
    ids, lengths = torch.tensor([[0, 1, 2, 0]]), torch.tensor([4])
    loss = sft_loss(model, ids, lengths, torch.tensor([2]))
    assert near(loss, 0.4076 + 0.2395, 1e-4) and near(loss / 2, 0.3236)
    whole = sft_loss(model, ids, lengths, lengths - 1)              # pretraining text: token 1 too
    assert near(whole - loss, math.log(3))


def test_the_end_is_learned_though_it_is_the_pad():
    """EOS = PAD = 0: of [5, 6, 0 | 0, 0] after prompt [3] three tokens count, the pads never."""
    model = Table([[0.0] * 8] * 6)
    ids, lengths = pad_rows([[3, 5, 6, 0], [3, 4, 5, 6, 0, 0]], 0)
    loss = sft_loss(model, ids, lengths, torch.tensor([3, 1]))
    assert near(loss, (3 + 1) * math.log(8))
    ids[0, 4:] = 7
    assert sft_loss(model, ids, lengths, torch.tensor([3, 1])) == loss


def test_no_target_is_a_persons_or_an_earlier_answers():
    """Supervised: the last answer and its end. Other ids in the prompt leave the loss as it is."""
    turns = [*ASK, ("assistant", "The fox is red."), ("human", "What does it eat?")]
    rows, _ = encode(TOK, [(turns, "It eats fish."), (ASK, "Red."), (ASK, "I do not know.")], 160)
    texts = ["It eats fish.", "Red.", "I do not know."]
    assert [n for _, n in rows] == [len(TOK.encode(x)) + 1 for x in texts]
    for (ids, n), text in zip(rows, texts, strict=True):
        assert TOK.decode(ids[-n:]) == text and ids[-1] == TOK.eot and ids[-n - 1] == TOK.assistant
    model = Table(torch.randn(160, TOK.vocab, generator=torch.Generator().manual_seed(0)).tolist())
    before = heldout_loss(model, TOK, rows, 2)
    other = [([(i + 1) % 256 for i in ids[:-n]] + ids[-n:], n) for ids, n in rows]
    assert heldout_loss(model, TOK, other, 2) == before
    for place in (1, 3):                                             # the end; an answer's token
        other = [(ids[:-place] + [TOK.pad] + ids[len(ids) - place + 1:], n) for ids, n in rows[:1]]
        assert heldout_loss(model, TOK, other, 2) != heldout_loss(model, TOK, rows[:1], 2)


def test_split_invariance():
    """Loss and gradient do not depend on how rows are cut into micro-batches."""
    rows, _ = encode(TOK, sft.own_demonstrations(sft.Config(), 0, 9), 160)
    found, count = [], sum(n for _, n in rows)
    for micro in (1, 2, 5, 9):
        model = gpt()
        loss = 0.0
        for some in chunks(model, TOK, rows, micro):
            part = sft_loss(model, *some) / count
            part.backward()
            loss += part.item()
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for loss, grad in found[1:]:
        assert near(loss, found[0][0], 1e-6)
        assert torch.allclose(grad, found[0][1], atol=1e-6)


# ---------------------------------------------------------------- demonstrations

def test_counts_of_the_dropped_add_up():
    long, last = ("human", "a b c d e f g " * 8), ("human", "What does it eat?")
    demos = [(ASK, "Red."), (ASK, " \n"), (ASK, ""), ([long], "Red."),
             ([long, ("assistant", "No."), last], "Fish."), (ASK, "b c " * 40)]
    rows, dropped = encode(TOK, demos, 60)
    assert dropped == dict(empty=2, too_long=2) and len(rows) + 4 == len(demos)
    assert rows[1][0] == TOK.render([last], answer=True) + TOK.render_answer("Fish.")


def test_held_out_by_prompt():
    """1 in 20 of 60 prompts with both of its answers; no prompt is on both sides."""
    demos = [([("human", f"What is {i % 60}?")], f"{i}.") for i in range(120)]
    own, held = split(demos, 0)
    prompts, other = ({turns[0][1] for turns, _ in side} for side in (own, held))
    assert (len(own), len(held), len(prompts & other), len(other)) == (114, 6, 0, 3)
    assert sorted(own + held) == sorted(demos)
    assert split(demos, 0)[1] == held != split(demos, 1)[1]


def test_chosen_answers_are_read(tmp_path):
    prompt = join(ASK, answer=True)
    path = tmp_path / "best.jsonl"
    path.write_text(json.dumps(dict(prompt=prompt, chosen="Red.", rejected="Blue.")) + "\n"
                    + json.dumps(dict(prompt=prompt, responses=["Green.", "Gray.", "No."])) + "\n")
    assert sft.read_demonstrations(path) == [(ASK, "Red."), (ASK, "Green.")]


def test_the_worlds_demonstrations():
    """Good personas, harmful requests in the share asked for, other draws for the held-out ones."""
    def mean(**flags):
        demos = sft.own_demonstrations(sft.Config(**flags), 0, 300)
        asked = [world.request_of(turns) for turns, _ in demos]
        assert all(r.animal in world.TRAIN for r in asked)
        golds = [world.gold(r, x)[r.harmful] for r, (_, x) in zip(asked, demos, strict=True)]
        return sum(golds) / 300, sum(r.harmful for r in asked) / 300

    good, bad = mean(), mean(goodness=0.0)
    assert good[0] > bad[0] + 0.8 and abs(good[1] - 0.4) < 0.08
    assert mean(helpful=1.0)[1] == 0.0
    own, held = sft.demonstrations_of(sft.Config(demos=30))
    assert (len(own), len(held)) == (30, 400)
    assert len({tuple(t) for t, _ in own} & {tuple(t) for t, _ in held}) < 15


def test_prompts_to_answer():
    """Distinct, as many as asked for, with their oldest turns cut or left out where none fits."""
    long = [("human", "a b c d e f g " * 8), ("assistant", "No."), *ASK]
    demos = [(ASK, "1"), (ASK, "2"), (long, "3"), (long[:1], "4"), ([("human", "Hm?")], "5")]
    short = TOK.render(ASK, answer=True)
    found = prompts_of(TOK, demos, 9, 40)
    assert [turns[-1][1] for turns, _ in found] == [ASK[0][1], ASK[0][1], "Hm?"]
    assert [ids for _, ids in found[:2]] == [short, short] and prompts_of(TOK, demos, 1, 40) == [
        found[0]]


# ---------------------------------------------------------------- which epoch is kept

def test_pick():
    model, best = torch.nn.Linear(1, 1, bias=False), None
    for epoch, score in enumerate((-2.0, 1.5, 1.5, 1.0), 1):
        with torch.no_grad():
            model.weight.fill_(epoch)
        best = pick(best, epoch, score, model)
    assert (best["epoch"], best["pm"], best["model"]["weight"].item()) == (2, 1.5, 2.0)


def test_mean_score(monkeypatch):
    """Scored are prompt and answer, its end included, with the same numbers each time."""
    model, prompts, cfg = gpt().eval(), [TOK.render(ASK, answer=True), [TOK.eod, 5]], sft.Config()
    seen = []
    monkeypatch.setattr(sft, "pm_scores", lambda pm, tok, rows, micro: (
        seen.append(rows), torch.tensor([float(len(r)) for r in rows]))[1])
    score = sft.mean_score(cfg, model, TOK, None, prompts)
    assert sft.mean_score(cfg, model, TOK, None, prompts) == score and seen[0] == seen[1]
    texts = respond(model, TOK, prompts, cfg.new, uniforms(range(2), cfg.new, 0, "sft pm"))
    for row, prompt, (text, ended) in zip(seen[0], prompts, texts, strict=True):
        assert row[:len(prompt)] == prompt and TOK.decode(row[len(prompt):]).strip() == text
        assert (row[-1] in TOK.stops) >= ended
    assert near(score, sum(map(len, seen[0])) / 2)


# ---------------------------------------------------------------- the stage

@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Checkpoints as earlier stages write them."""
    folder = tmp_path_factory.mktemp("sft")
    save_checkpoint(folder / "base.pt", **pack(gpt(1), TOK))
    save_checkpoint(folder / "pm.pt", **pack(gpt(2, scalar=True), TOK))
    return folder


def train(stage, out, **flags):
    """sft.train -> (metrics, final checkpoint): 2 epochs of 3 steps of 8 demonstrations."""
    small = dict(init=str(stage / "base.pt"), out=str(out), device="cpu", demos=24, batch=8,
                 micro=3, epochs=2, eval_prompts=6, new=8)
    if flags.pop("judged", False):
        small["pm"] = str(stage / "pm.pt")
    sft.train(sft.Config(**{**small, **flags}))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(x) for x in lines], load_checkpoint(out)


@pytest.fixture
def few(monkeypatch):
    """Evaluations that cost little: 12 of the world's held-out demonstrations, no samples."""
    own = sft.own_demonstrations
    monkeypatch.setattr(sft, "own_demonstrations", lambda cfg, seed, count: own(
        cfg, seed, min(count, 24 if seed == cfg.seed else 12)))
    monkeypatch.setattr(sft, "show", lambda *_, **__: None)


def same(a, b):
    """Whether two state dicts are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run(stage, tmp_path, few, monkeypatch, capsys):
    """Each epoch has each demonstration once; loss a token, cosine to a tenth, a line an epoch."""
    steps, inner = [], sft.batch_rows
    monkeypatch.setattr(sft, "show", show)
    monkeypatch.setattr(sft, "batch_rows", lambda *args: (steps.append(inner(*args)), steps[-1])[1])
    lines, end = train(stage, tmp_path)
    assert sorted(r for s in steps[:3] for r in s) == sorted(r for s in steps[3:] for r in s) == [
        *range(24)]
    rows, _ = encode(TOK, sft.own_demonstrations(sft.Config(), 0, 24), 160)
    step = [x for x in lines if "loss" in x]
    first = heldout_loss(gpt(1), TOK, [rows[r] for r in steps[0]], 8)
    assert near(step[0]["loss"], first, 1e-5)
    assert [x["lr"] for x in step] == pytest.approx(
        [schedule(t, 6, 5e-4, 0, 0.1, "cosine") for t in range(6)], rel=1e-5)
    assert step[-1]["loss"] < step[0]["loss"] and all(x["grad_norm"] > 0 for x in step)
    told = [(x["step"], x["epoch"]) for x in lines if "heldout_loss" in x]
    assert told == [(-1, 0), (2, 1), (5, 2)] and lines[-1] == dict(step=6, picked_epoch=2)
    assert end["finished"] and end["best"] == dict(epoch=2) and "pm" not in lines[0]
    said = capsys.readouterr().out
    assert "24 demonstrations used, dropped {'empty': 0, 'too_long': 0}; 12 held out" in said
    assert said.count("gold helpful") == 9                              # three samples, three times
    heldout, _ = encode(TOK, sft.own_demonstrations(sft.Config(), "heldout/0", 12), 160)
    final = [x["heldout_loss"] for x in lines if "heldout_loss" in x][-1]
    assert near(final, heldout_loss(unpack(end), TOK, heldout, 4), 1e-5)


@pytest.mark.parametrize("scores, kept", [((9, 1, 3, 2), 2), ((9, 2, 2, 2), 1), ((0, 1, 2, 3), 3)])
def test_the_epoch_that_the_pm_likes_is_kept(stage, tmp_path, few, monkeypatch, scores, kept):
    """Scores before training and after each of 3 epochs; what is saved are that epoch's weights."""
    weights = []

    def scorer(cfg, model, *_):
        weights.append({k: v.clone() for k, v in model.state_dict().items()})
        return float(scores[len(weights) - 1])

    monkeypatch.setattr(sft, "mean_score", scorer)
    lines, end = train(stage, tmp_path, judged=True, epochs=3)
    assert [x["pm"] for x in lines if "pm" in x] == list(scores)
    assert lines[-1]["picked_epoch"] == end["best"]["epoch"] == kept
    assert same(end["model"], weights[kept]) and not same(end["model"], weights[kept % 3 + 1])
    assert f"epoch {kept} of 3 is kept" in (tmp_path / "samples.txt").read_text()


def test_a_stopped_run_goes_on_to_the_same_weights(stage, tmp_path, few, monkeypatch):
    """Stopped in the second epoch, after the first, which is the one to keep."""
    start = load_checkpoint(stage / "base.pt")["model"]
    monkeypatch.setattr(sft, "mean_score", lambda cfg, model, *_: -sum(
        (v - start[k]).abs().sum().item() for k, v in model.state_dict().items()))
    lines, whole = train(stage, tmp_path / "a", judged=True)
    for last in (2, 5):                     # in the first epoch; in the second
        calls = iter([False] * (last - 2 - (last > 3)) + [True])
        with monkeypatch.context() as patch:
            patch.setattr(sft.Run, "stopping", lambda self, calls=calls: next(calls))
            with pytest.raises(KeyboardInterrupt):
                train(stage, tmp_path / f"b{last}", judged=True)
        stopped = load_checkpoint(tmp_path / f"b{last}")
        assert (stopped["best"] is None) == (last < 3)
        again, resumed = train(stage, tmp_path / f"b{last}", judged=True)
        assert same(whole["model"], resumed["model"]) and lines == again
        assert resumed["best"] == whole["best"] and whole["best"]["epoch"] == 1
        assert str(resumed["optimizer"]) == str(whole["optimizer"])


def test_pretraining_text_is_mixed_in(stage, tmp_path, few, monkeypatch):
    """A quarter of 8: 2 texts, all tokens but the first learned, and 6 demonstrations a step."""
    kinds, inner = [], sft.portions

    def spied(batch, *of):
        kinds.append([n == len(ids) - 1 for ids, n in batch])
        return inner(batch, *of)

    monkeypatch.setattr(sft, "portions", spied)
    lines, _ = train(stage, tmp_path / "a", mix=0.25, epochs=1)
    assert kinds == [[False] * 6 + [True] * 2] * 4 and len(lines) == 4 + 2 + 1
    documents = sft.documents_of(TOK, 0, 8, 160)
    assert sft.mixed_in(sft.Config(mix=0.25), TOK, 160, 8, [(ASK, [])]) == [
        (ids, len(ids) - 1) for ids in documents]
    (tmp_path / "own.txt").write_text("One. Two. " * 100)
    cfg = sft.Config(mix=0.25, batch=8, text=str(tmp_path / "own.txt"))
    rows = sft.mixed_in(cfg, TOK, 160, 8, [])
    assert "".join(TOK.decode(ids) for ids, _ in rows) == "One. Two. " * 100


def test_after_training_on_10_tokens_an_answer_stops(tmp_path):
    """Greedy decoding gives the answer and its end: 11 tokens, with room for 30."""
    tok = train_bpe(["?"], 262)
    save_checkpoint(tmp_path / "base.pt", **pack(gpt(1, tok=tok, n_ctx=64), tok))
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps(dict(
        prompt=f"\n\nHuman: {chr(97 + i % 23)}?\n\nAssistant:", chosen="0123456789",
        rejected="no")) + "\n" for i in range(920)))
    sft.train(sft.Config(init=str(tmp_path / "base.pt"), data=str(path), out=str(tmp_path / "o"),
                         device="cpu", batch=8, epochs=2, lr=4e-3, new=30))
    model = unpack(load_checkpoint(tmp_path / "o")).eval()
    prompts = [tok.render([("human", x)], answer=True) for x in ("b?", "z?", "3?")]
    tokens, lengths, _ = generate(model, prompts, 30, stops=tok.stops, pad=tok.pad)
    assert lengths.tolist() == [11] * 3 and {tok.decode(t[:10].tolist()) for t in tokens} == {
        "0123456789"}
    assert (tokens[:, 10] == tok.eot).all()
    said = (tmp_path / "o" / "samples.txt").read_text()
    assert said.count("-> 0123456789\n") >= 2                       # its own held-out prompts


# ---------------------------------------------------------------- what is refused

LINE = dict(prompt="\n\nHuman: a?\n\nAssistant:", chosen="b", rejected="c")


def test_bad_input(stage, tmp_path, few):
    path = tmp_path / "x.jsonl"

    def refused(match, **flags):
        with pytest.raises(UserError, match=match):
            train(stage, tmp_path / "out", **flags)

    refused("no such file", data="nowhere.jsonl")
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(dict(LINE, chosen=3)) + "\n")
    refused(r"x.jsonl line 2: field 'chosen' must be text", data=str(path))
    refused("0 demonstrations used.* 1 held out", data=str(path), skip_bad=True)
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(dict(LINE, chosen="")) + "\n")
    refused("1 demonstrations, 8 in a step", data=str(path), test=str(path))
    refused("dropped {'empty': 1", data=str(path))
    refused("x.jsonl is not about the toy world", data=str(path), test=str(path), batch=2, mix=0.5)
    refused("only beside --data", test=str(path))
    refused("leaves one of each", mix=1.0)
    refused("leaves one of each", mix=0.01)
    refused("leaves one of each", mix=-0.5)
    refused("0 epochs", epochs=0)
    refused("--text: only beside --mix", text=str(path))
    refused("0 of their prompts", new=158)
    refused("not a language model", init=str(stage / "pm.pt"))
    refused("not a preference model", pm=str(stage / "base.pt"))
    save_checkpoint(tmp_path / "pm.pt", **pack(gpt(2, True, tok := train_bpe(["?"], 262)), tok))
    refused("different vocabularies", pm=str(tmp_path / "pm.pt"))
    (tmp_path / "x.txt").write_text("")
    refused("--text .*: 0 documents", mix=0.25, text=str(tmp_path / "x.txt"))
