"""What steers PPO: control.py's rules, rollout.py's report, and each knob of ppo.py in a run.

Numbers by hand for the rules; in runs the weights after each optimizer step are noted and the rest
is computed from them.

Faults put into ppo.py, rollout.py and control.py one line at a time, and the test that failed (p:
in test_ppo.py):
    log-prob off by one        at_response(..., starts - 1)        p log_probs_belong_to
    ratio not 1 at first       half of a row's tokens seen         p the_ratio_is_one_before
    temperature                none in the update                    the_update_scores_at
                               none for the reference              p the_reference_is_scored_as
                               none in exact_kl                      exact_kl_by_hand
    negative KL                k1 clamped in the log               p a_negative_mean_kl_is_reported
    KL estimator as a loss     k1 for k2                             kl_loss_by_hand
                               k2 as a loss and in the reward        kl_as_a_loss
                               lambda not divided by the spread      kl_as_a_loss
    KL sign                    + lambda_kl in the reward           p sign_of_the_penalty
                               - lambda_kl in the loss               kl_as_a_loss
                               models swapped in exact_kl            exact_kl_by_hand
    reference is the policy    the same object, unguarded          p the_reference_stays
                               it follows unasked                  p the_reference_stays
    reward at the wrong token  one early                           p the_score_belongs_to
    empty response             last without mask                   p an_empty_answer
    padding in returns         masking by multiplication           p padding_is_not_in_the_returns
    GAE timing                 no value of what follows            p gae_timing
    value index                read one late                       p value_is_read_one_position
    pad = EOS                  mask from ids                       p masks_come_from_lengths
    stop never reinforced      end of turn masked out              p the_end_of_turn_is_an_action
    mask without EOS           unfinished: all --new tokens        p masks_come_from_lengths
    truncated as complete      end looked for in the whole row     p unfinished_answer_loses
                               penalty not subtracted                penalty_comes_after_the_cap
                               capped after the penalty              penalty_comes_after_the_cap
    RM score at a pad          read at the padded end              p the_score_is_read_at
    bf16                       the sampler's log-probs kept        p in_bf16_the_old_log_probs
                               a norm not finite goes on             gradient_that_is_not_finite
    gradient accumulation      / the micro-batch's tokens          p gradients_do_not_depend
    seeds across ranks         numbers of a row's place              numbers_of_their_own
    resume                     lambda_kl, optimizers, averages,      goes_on_bit_for_bit
                               reference, first policy, critic
                               begun anew; snapshots forgotten

And of the knobs, each caught here: decay and 1 - decay exchanged (ema, anchor); averages not
served, or too early; reset one early; kl_start to the moving reference; snapshots after the
update, below their value, by kl; patience that counts ties, short means, one late, keeps no copy;
the held-out model in the other's unit, or as the reward; ptx a mean of texts, without gamma or
ratio, the same texts again, told as a sum; warm-up of the critic, halving by iterations, one
decay for all; steering upside down, or by k3; a critic not fresh; a value clipped to its old self
at 0; a spread for an error; the exact KL at each iteration; batch.pt at the end only, no bad
batch; shares upside down, of one number, or the same prompts in every stage; gold of prompts that
have none.
"""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_ppo import (
    END,
    NAN,
    TOK,
    Bigram,
    Constant,
    M,
    T,
    Table,
    answers_of,
    config,
    distribution,
    gpt,
    models,
    near,
    prompts,
    roll,
    same,
    scripted,
    train,
    two_answers,
)
from tiny import contents
from tiny import same as same_run

import control
import ppo
import rollout as rolled_out
from common import UserError, load_checkpoint, load_source, save_checkpoint, uniforms
from data import world
from model import GPT, pack
from parallel import Team

@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Checkpoints that earlier stages write: a policy, a preference model, and a held-out one."""
    folder = tmp_path_factory.mktemp("control")
    save_checkpoint(folder / "policy.pt", **pack(gpt(1), TOK))
    save_checkpoint(folder / "pm.pt", **pack(gpt(2, scalar=True), TOK))
    save_checkpoint(folder / "test.pt", **pack(gpt(5, scalar=True), TOK))
    return folder


@pytest.fixture(autouse=True)
def no_show(monkeypatch):
    """The three prompts at a run's end take as long as the run."""
    monkeypatch.setattr(ppo, "show", lambda *_, **__: None)


def watch(monkeypatch, module, name, note=lambda out, *_: out):
    """A list that grows by note(result, *arguments) with each call of a function."""
    seen, inner = [], getattr(module, name)

    def call(*args, **kwargs):
        out = inner(*args, **kwargs)
        seen.append(note(out, *args))
        return out

    monkeypatch.setattr(module, name, call)
    return seen


def copy(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def policies(monkeypatch):
    """Grows by the policy's weights after each update; those of the start are the first."""
    seen = [copy(gpt(1))]
    inner = ppo.update

    def call(model, *rest):
        norm = inner(model, *rest)
        if not model.config.scalar:
            seen.append(copy(model))
        return norm

    monkeypatch.setattr(ppo, "update", call)
    return seen


def gradients(monkeypatch):
    """Grows by the policy's gradient, flat, at each of its updates."""
    seen, inner = [], ppo.update

    def call(model, *rest):
        if not model.config.scalar:
            seen.append(flat(model))
        return inner(model, *rest)

    monkeypatch.setattr(ppo, "update", call)
    return seen


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def mixed(a, b, decay):
    """decay * a + (1 - decay) * b."""
    return {k: decay * a[k] + (1 - decay) * b[k] for k in a}


def close(a, b):
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


def of_weights(weights):
    model = gpt(1)
    model.load_state_dict(weights)
    return model


def kl_to(weights, batch):
    """Mean over answers of the k1 sum to the model with these weights."""
    ref = rolled_out.policy_logprobs(of_weights(weights), batch["rows"], batch["starts"],
                                     batch["lengths"], batch["mask"].shape[1])
    return torch.where(batch["mask"], batch["logp"] - ref, 0.0).sum(1).mean().item()


def lines_file(path, *texts):
    path.write_text("".join(json.dumps({"prompt": f"\n\nHuman: {x}\n\nAssistant:"}) + "\n"
                            for x in texts))
    return str(path)


# ---------------------------------------------------------------- rates

def rates(**flags):
    cfg = config(**{**dict(lr=8.0, critic_lr=4.0, samples=8, iterations=12, warmup=4), **flags})
    return [control.rates(cfg, step) for step in range(cfg.iterations)]


def test_rates_warm_up_and_stay():
    """A quarter more each iteration; the critic has no warm-up."""
    policy, critic = zip(*rates())
    assert policy == (2, 4, 6, *[8] * 9) and critic == (4,) * 12


def test_rates_linear_to_0():
    """Over the 8 iterations after warm-up, and the critic's over all 12."""
    policy, critic = zip(*rates(decay="linear"))
    assert policy == pytest.approx((2, 4, 6, 8, 8, 7, 6, 5, 4, 3, 2, 1))
    assert critic == pytest.approx([4 * (1 - i / 12) for i in range(12)])


def test_rates_halve_with_the_answers():
    """8 answers an iteration, halved at 12, 24, 36 ...: before 0, 8, 16, 24, 32, 40 answers."""
    policy, critic = zip(*rates(warmup=0, halve=12)[:6])
    assert policy == (8, 8, 4, 2, 2, 1) and critic == (4, 4, 2, 1, 1, 0.5)
    both = rates(halve=16, decay="linear")[5]
    assert both == pytest.approx((7 / 4, 4 * 7 / 12 / 4))               # 40 answers: twice


def test_a_run_uses_its_rates(stage, tmp_path, monkeypatch):
    seen = watch(monkeypatch, ppo, "update", lambda norm, model, optimizer, lr: lr)
    lines, _ = train(stage, tmp_path, iterations=3, lr=4e-4, critic_lr=8e-4, halve=8,
                     minibatch=4, calibrate=0)
    assert seen == [x for f in (1, 0.5, 0.25) for _ in range(2) for x in (f * 4e-4, f * 8e-4)]
    assert [x["lr"] for x in lines] == pytest.approx([4e-4, 2e-4, 1e-4])


# ---------------------------------------------------------------- the KL coefficient

@pytest.mark.parametrize("kl, factor", [
    (5, 1.0), (6, 1.02), (5.5, 1.01), (4.5, 0.99), (4, 0.98), (500, 1.02), (0, 0.98), (-3, 0.98)])
def test_adapted_by_hand(kl, factor):
    """Target 5, gain .1: a tenth of the relative error, which counts up to a fifth."""
    assert control.adapted(0.5, kl, 5, 0.1) == pytest.approx(0.5 * factor)
    assert control.adapted(0.5, kl, 5, 0.3) == pytest.approx(0.5 * (1 + 3 * (factor - 1)))


def test_a_run_steers_the_coefficient(stage, tmp_path, monkeypatch):
    """Target .5, gain .2, KLs of .55, .42, 5 and 0: by 1.02, .968, 1.04, .96, from the next on."""
    kls, inner = iter([0.55, 0.42, 5.0, 0.0]), ppo.summary
    monkeypatch.setattr(ppo, "summary", lambda *args: dict(inner(*args), kl=next(kls)))
    lines, end = train(stage, tmp_path, iterations=4, kl_target=0.5, kl_gain=0.2, lambda_kl=0.1,
                       calibrate=0, new=3)
    want = [0.1, 0.102, 0.102 * 0.968, 0.102 * 0.968 * 1.04, 0.102 * 0.968 * 1.04 * 0.96]
    assert [x["lambda_kl"] for x in lines] == pytest.approx(want[:4], abs=1e-6)
    assert end["state"]["lambda_kl"] == pytest.approx(want[4])
    assert load_checkpoint(tmp_path / "batch.pt")["lambda_kl"] == pytest.approx(want[3])


# ---------------------------------------------------------------- weights that follow

def test_drift_by_hand():
    """.75 * 1 + .25 * 5 = 2; 0 copies; a frozen model moves too, and nobody else."""
    target, source = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for model, x in ((target, 1.0), (source, 5.0)):
        for p in model.parameters():
            p.data.fill_(x)
    control.drift(target.requires_grad_(False), source, 0.75)
    assert [p.item() for p in target.parameters()] == [2, 2]
    control.drift(target, source, 0.0)
    assert [p.item() for x in (target, source) for p in x.parameters()] == [5] * 4


def test_averaged_weights_are_kept_at_the_end(stage, tmp_path, monkeypatch):
    """.6 (.6 p0 + .4 p1) + .4 p2; the policy itself goes on as it is."""
    p = policies(monkeypatch)
    lines, end = train(stage, tmp_path, iterations=2, lr=1e-2, ema=0.6, calibrate=0)
    assert len(p) == 3 and not close(p[1], p[2])
    want = mixed(mixed(p[0], p[1], 0.6), p[2], 0.6)
    assert close(end["ema"], want) and not close(p[2], want)
    assert same(end["model"], end["ema"]) and same(end["policy"], p[2])
    assert "reference" not in end and "kl_start" not in lines[0]


def test_until_the_end_the_model_is_the_policy(stage, tmp_path, monkeypatch):
    """A checkpoint on the way, with averaged weights beside."""
    p = policies(monkeypatch)
    monkeypatch.setattr(ppo.Run, "stopping", lambda self: True)
    with pytest.raises(KeyboardInterrupt):
        train(stage, tmp_path, iterations=2, lr=1e-2, ema=0.6, calibrate=0)
    saved = load_checkpoint(tmp_path)
    assert same(saved["model"], p[1]) and same(saved["policy"], p[1])
    assert close(saved["ema"], mixed(p[0], p[1], 0.6)) and not close(saved["ema"], p[1])


@pytest.mark.parametrize("flags, references", [
    (dict(anchor=0.7), lambda p: [p[0], (r := mixed(p[0], p[1], 0.7)),
                                    (r := mixed(r, p[2], 0.7)), mixed(r, p[3], 0.7)]),
    (dict(reset=2), lambda p: [p[0], p[0], p[2], p[2]]),
], ids=["anchor", "reset"])
def test_a_reference_that_moves(stage, tmp_path, monkeypatch, flags, references):
    """kl is to it, kl_start to the first policy; that one and the files stay."""
    p, held = policies(monkeypatch), watch(monkeypatch, ppo, "load_models")
    batches, files = watch(monkeypatch, ppo, "rollout"), contents(stage)
    lines, end = train(stage, tmp_path, iterations=3, lr=1e-2, calibrate=0, **flags)
    for line, reference, batch in zip(lines, references(p)[:3], batches, strict=True):
        assert line["kl"] == pytest.approx(kl_to(reference, batch), abs=1e-4)
        assert line["kl_start"] == pytest.approx(kl_to(p[0], batch), abs=1e-4)
    assert abs(lines[2]["kl"] - lines[2]["kl_start"]) > 0.1
    assert close(end["reference"], references(p)[3])
    assert same(held[0][1].first.state_dict(), p[0]) and contents(stage) == files


def test_a_reset_leaves_no_kl(stage, tmp_path):
    lines, end = train(stage, tmp_path, iterations=3, lr=1e-2, reset=1, calibrate=0)
    assert all(abs(x["kl"]) < 1e-4 for x in lines) and abs(lines[2]["kl_start"]) > 0.1
    assert same(end["reference"], end["policy"])


@pytest.mark.parametrize("flags", [
    dict(ema=0.6, anchor=0.7, kl_target=0.5, snapshots="0,0.2", ptx=1.0, decay="linear", warmup=2),
    dict(reset=2, patience=2, test_pm="test.pt", critic="fresh", kl="k2", halve=8, cap=0.5),
], ids=["ema anchor", "reset patience"])
def test_a_stopped_run_goes_on_bit_for_bit(stage, tmp_path, monkeypatch, flags):
    """Stopped after two iterations of four."""
    flags = dict(dict(iterations=4, lr=1e-2, minibatch=4), **flags)
    if "test_pm" in flags:
        flags["test_pm"] = str(stage / "test.pt")
    train(stage, tmp_path / "whole", **flags)
    with monkeypatch.context() as patch:
        asked = iter([False, True])
        patch.setattr(ppo.Run, "stopping", lambda self: next(asked))
        with pytest.raises(KeyboardInterrupt):
            train(stage, tmp_path / "cut", **flags)
    assert load_checkpoint(tmp_path / "cut")["step"] == 2
    written = watch(monkeypatch, control, "save_checkpoint", lambda _, path: path.name)
    train(stage, tmp_path / "cut", **flags)
    same_run(tmp_path / "whole", tmp_path / "cut")
    assert not written                                      # its snapshots were there


# ---------------------------------------------------------------- snapshots

def test_snapshots_hold_what_made_the_answers(stage, tmp_path, monkeypatch):
    """0 is reached by the first policy, .4 by the second or third, 60 by none."""
    p = policies(monkeypatch)
    lines, _ = train(stage, tmp_path, iterations=3, lr=1e-2, snapshots="60, 0.4,0", calibrate=0)
    roots = [max(x["kl"], 0) ** 0.5 for x in lines]
    first = next(i for i, x in enumerate(roots) if x >= 0.4)
    assert sorted(x.name for x in tmp_path.glob("snap*")) == ["snapshot-0.4.pt", "snapshot-0.pt"]
    for name, i in (("0", 0), ("0.4", first)):
        kept = load_source(tmp_path / f"snapshot-{name}.pt", scalar=False)
        assert same(kept["model"], p[i]) and not same(kept["model"], p[i + 1])
        assert kept["step"] == i and kept["sqrt_kl"] == pytest.approx(roots[i], abs=1e-4)
        assert kept["sqrt_kl"] >= float(name)
    assert first > 0


def test_snapshots_measure_from_the_first_policy(stage, tmp_path):
    """Where the reference is reset, kl stays 0 and kl_start does not."""
    lines, _ = train(stage, tmp_path, iterations=3, lr=1e-2, snapshots="0.4", reset=1, calibrate=0)
    assert max(x["kl_start"] for x in lines) > 0.16 and (tmp_path / "snapshot-0.4.pt").exists()


# ---------------------------------------------------------------- the held-out preference model

def stopped_at(scores, patience):
    """(step at which is_over says so, state) of a policy whose weight at step i is i."""
    cfg, state, policy = config(patience=patience), dict(tests=[], best=None), torch.nn.Linear(1, 1)
    for step, score in enumerate(scores):
        policy.weight.data.fill_(step)
        if control.is_over(cfg, state, policy, step, score):
            return step, state
    return None, state


@pytest.mark.parametrize("scores, patience, stop, best, mean", [
    ([1, 3, 2, 1, 1.5, 9], 2, 4, 2, 2.5),       # means . 2 2.5 1.5 1.25
    ([1, 3, 2, 1, 5, 9], 2, None, 5, 7),        # ............... 1.5 3 7
    ([2, 2, 2, 2], 1, 1, 0, 2),                 # as good is not better
    ([5, 1, 1, 4, 1, 1, 1], 3, 5, 2, 7 / 3),    # means . . 2.33 2 2 2
    ([4, 1], 3, None, None, None),              # too few for a mean
    ([9, 1, 1], 0, None, None, None),           # not asked for
])
def test_patience_by_hand(scores, patience, stop, best, mean):
    found, state = stopped_at(scores, patience)
    assert found == stop
    if best is None:
        assert state["best"] is None
    else:
        assert state["best"]["step"] == best == state["best"]["model"]["weight"].item()
        assert state["best"]["mean"] == pytest.approx(mean)


def test_what_is_served():
    """The best that patience found, else averaged weights, else the policy."""
    policy, ema = gpt(1), gpt(2)
    m, none, best = SimpleNamespace(policy=policy, ema=ema), dict(best=None), copy(gpt(3))
    assert control.served(config(), m, none) is policy
    assert control.served(config(ema=0.5), m, none) is ema
    assert same(control.served(config(ema=0.5), m, dict(best=dict(model=best))).state_dict(), best)


def test_a_run_stops_and_keeps_the_best(stage, tmp_path, monkeypatch):
    """Scores 1 3 2 1 1.5: after the fifth iteration, the weights that made the third's answers."""
    scores, p = iter([1.0, 3.0, 2.0, 1.0, 1.5, 9.0]), policies(monkeypatch)
    monkeypatch.setattr(ppo, "pm_scores", lambda *_: torch.full((8,), next(scores)))
    lines, end = train(stage, tmp_path, iterations=6, patience=2, test_pm=str(stage / "test.pt"),
                       calibrate=0, new=2)
    assert [x["test_pm"] for x in lines] == [1, 3, 2, 1, 1.5]
    assert end["step"] == 5 and end["finished"] and end["state"]["best"]["step"] == 2
    assert same(end["model"], p[2]) and not same(p[2], p[3])
    assert "stopped after iteration 5; kept is the policy of 3" in (
        tmp_path / "samples.txt").read_text()


def test_the_held_out_model_is_told_in_its_own_unit_and_trains_nothing(stage, tmp_path,
                                                                       monkeypatch):
    """Mean 0 and spread 1 on the calibration's answers; the same weights without it."""
    raw = watch(monkeypatch, ppo, "pm_scores")
    lines, told = train(stage, tmp_path / "a", iterations=2, test_pm=str(stage / "test.pt"),
                        calibrate=9)
    first, *rest = (x.double().numpy() for x in raw)
    assert len(first) == 9 and len(rest) == 2
    assert [x["test_pm"] for x in lines] == pytest.approx(
        [(x.mean() - first.mean()) / first.std() for x in rest], abs=1e-4)
    without, end = train(stage, tmp_path / "b", iterations=2, calibrate=9)
    assert len(raw) == 3 and "test_pm" not in without[0]
    assert same(told["model"], end["model"]) and same(told["critic"], end["critic"])
    assert [x["score"] for x in lines] == [x["score"] for x in without]


# ---------------------------------------------------------------- text like the base model's

def asked_texts(monkeypatch):
    """Grows by (row numbers, texts) of each minibatch."""
    seen, inner = [], ppo.mixture

    def mixture(*args):
        texts = inner(*args)

        def call(rows):
            out = texts(rows)
            seen.append((list(rows), out[0]))
            return out
        return call

    monkeypatch.setattr(ppo, "mixture", mixture)
    return seen


@pytest.mark.parametrize("micro", [3, 16])
def test_ptx_adds_gamma_times_the_gradient_of_mean_nats_a_token(stage, tmp_path, monkeypatch,
                                                                micro):
    """16 texts to 8 answers, in one update; each text alone is the oracle."""
    seen, texts = gradients(monkeypatch), asked_texts(monkeypatch)
    for ptx in (0.0, 0.7):
        lines, _ = train(stage, tmp_path / str(ptx), ptx=ptx, ptx_ratio=2,
                         micro=micro, lr=0.0, calibrate=0)
    ((_, texts),), (plain, both) = texts, seen
    assert len(texts) == 16 and min(map(len, texts)) < max(map(len, texts)) <= 64
    model = gpt(1)
    nats = torch.cat([F.cross_entropy(model.logits(model(torch.tensor([x])))[0, :-1],
                                      torch.tensor(x[1:]), reduction="none") for x in texts])
    nats.mean().backward()
    assert lines[0]["ptx_loss"] == pytest.approx(nats.mean().item(), abs=1e-4)
    want = 0.7 * flat(model)
    assert want.norm() > 0.1 and torch.allclose(both - plain, want, atol=1e-5 * want.norm())


def test_each_minibatch_has_its_own_texts(stage, tmp_path, monkeypatch):
    """2 iterations x 2 epochs x 2 minibatches of 4 answers, 3 texts each; a mean is told."""
    texts, nats = asked_texts(monkeypatch), watch(monkeypatch, ppo, "ptx_batch")
    lines, _ = train(stage, tmp_path, iterations=2, epochs=2, minibatch=4, ptx=0.1, ptx_ratio=3,
                     ptx_length=16, calibrate=0)
    assert [rows for rows, _ in texts] == [list(range(i, i + 12)) for i in range(0, 96, 12)]
    assert len({tuple(x) for _, some in texts for x in some}) > 50
    assert [x["ptx_loss"] for x in lines] == pytest.approx([sum(nats[:4]) / 4, sum(nats[4:]) / 4],
                                                           abs=1e-5)


def test_ptx_text_of_ones_own(stage, tmp_path, monkeypatch):
    own = tmp_path / "own.txt"
    own.write_text("Bread needs flour, water and salt.\n\nKnead it for a while. Let it rest.\n")
    texts = asked_texts(monkeypatch)
    train(stage, tmp_path / "a", ptx=0.1, ptx_text=str(own), ptx_length=20, calibrate=0)
    told = own.read_text()
    assert len(texts[0][1]) == 8
    assert all(TOK.decode(x) and TOK.decode(x) in told for x in texts[0][1])
    own.write_text("")
    with pytest.raises(UserError, match=f"--ptx-text.*{re.escape(str(own))}"):
        train(stage, tmp_path / "b", ptx=0.1, ptx_text=str(own))


# ---------------------------------------------------------------- the score

def test_the_cap_holds_the_normalized_score():
    raw = T(-8, -1, 0, 2, 9)
    assert rolled_out.normalized(raw, (1.0, 2.0)).tolist() == [-4.5, -1, -0.5, 0.5, 4]
    assert rolled_out.normalized(raw, (1.0, 2.0), 0.75).tolist() == [-.75, -.75, -.5, .5, .75]


def test_the_penalty_comes_after_the_cap(monkeypatch):
    """(9 - 1) / 2 held at 1.5, less .7 where there is no end of turn."""
    scripted(monkeypatch, [7, TOK.eot], [7, 7, 7, 7, 7])
    policy, reference, _, _ = models()
    batch = rolled_out.rollout(config(new=5, unfinished=0.7, cap=1.5), TOK, policy, reference,
                               Constant(9.0), [[]] * 2, prompts(2, 2), None, (1.0, 2.0))
    assert near(batch["score"][None], [1.5, 0.8]) and near(batch["penalty"][None], [0, 0.7])
    assert batch["raw"].tolist() == [9, 9]


def test_the_penalty_is_told(stage, tmp_path):
    (line,), _ = train(stage, tmp_path, unfinished=0.7, calibrate=0)
    assert line["unfinished"] > 0
    assert line["penalty"] == pytest.approx(0.7 * line["unfinished"], abs=1e-5)
    assert line["score"] == pytest.approx(line["pm"] - line["penalty"], abs=1e-5)


# ---------------------------------------------------------------- losses

def test_value_clip_0_is_none():
    """Values 1 1 .1 3, returns 0 1 3 1 -> (1 + 0 + 2.9^2 + 4) / 2; the pad is not read."""
    values = T([1, 1, 0.1, 3, NAN]).requires_grad_()
    loss = ppo.value_loss(values, T([0, 0, 0, 0, NAN]), T([0, 1, 3, 1, NAN]), M([1, 1, 1, 1, 0]), 0)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2.9 ** 2 + 4) / 2)
    assert near(values.grad, [1, 0, -2.9, 2, 0])


@pytest.mark.parametrize("knob", [dict(value_clip=0.0), dict(value_clip=0.3), dict(clip=0.01)])
def test_each_clip_goes_to_its_loss(stage, tmp_path, monkeypatch, knob):
    value = watch(monkeypatch, ppo, "value_loss", lambda _, *args: args[-1])
    policy = watch(monkeypatch, ppo, "policy_loss", lambda _, *args: args[-1])
    train(stage, tmp_path, calibrate=0, micro=8, **knob)
    assert (value, policy) == ([knob.get("value_clip", 0.2)], [knob.get("clip", 0.2)])


@pytest.mark.parametrize("kind, want", [
    ("k2", 0.5 + 2), ("k3", math.exp(-1) + math.exp(2) - 3), ("reward", 0), ("none", 0)])
def test_kl_loss_by_hand(kind, want):
    """log pi - log pi0 is 1, and -2."""
    found = ppo.kl_loss(kind, T([-1, -5, NAN]), T([-2, -3, NAN]), M([1, 1, 0]))
    assert float(found) == pytest.approx(want)


@pytest.mark.parametrize("kind, slope", [
    ("k2", lambda d: d), ("k3", lambda d: 1 - (-d).exp()),
    ("none", lambda d: 0 * d), ("reward", lambda d: 0 * d)])
def test_kl_as_a_loss_is_in_the_gradient_and_not_in_the_reward(kind, slope):
    """Before the first update: -advantage + lambda / spread * slope at each token / count."""
    cfg, (policy, reference, critic, pm) = config(kl=kind, lambda_kl=0.4), models()
    batch = roll(cfg, prompts(3, 7, 2, 11), (policy, reference, critic, pm))
    mask, d, score = batch["mask"], batch["logp"] - batch["ref"], torch.zeros(4, 6)
    score[torch.arange(4), batch["lengths"] - 1] = batch["score"]
    penalty = 0.4 * torch.where(mask, d, 0.0) if kind == "reward" else 0.0
    assert torch.allclose(batch["rewards"], score - penalty)
    assert batch["spread"] == pytest.approx(batch["plain"][mask].std(unbiased=False).item())
    ppo.micro_batch(cfg, batch, [2, 0, 1, 3], (Team(policy), Team(critic)), 7.0)
    found = flat(policy)
    policy.zero_grad(set_to_none=True)
    logp = rolled_out.policy_logprobs(policy, batch["rows"], batch["starts"], batch["lengths"], 6)
    at_token = -batch["advantages"] + 0.4 / batch["spread"] * slope(d)
    logp.backward(torch.where(mask, at_token, 0.0) / 7)
    want = flat(policy)
    assert want.norm() > 0.1 and torch.allclose(found, want, atol=1e-5 * want.norm())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_update_scores_at_the_temperature_of_sampling(stage, tmp_path, temperature):
    """Else the first ratio is far from 1; and the KL to an equal reference from 0."""
    (line,), _ = train(stage, tmp_path, temperature=temperature, calibrate=0, new=4)
    assert line["first_log_ratio"] < 1e-4 and abs(line["kl"]) < 1e-4
    assert abs(line["kl_exact"]) < 1e-5


def test_answers_have_numbers_of_their_own(stage, tmp_path, monkeypatch):
    """A rank's rows get those of the whole iteration's, whoever computes them."""
    seen = watch(monkeypatch, ppo, "rollout", lambda _, *args: args[-2])
    monkeypatch.setattr(ppo, "mine", lambda rows, *_: rows[1::2])
    monkeypatch.setattr(ppo, "total", lambda *x, device=None: (
        [float(v) for v in x] if len(x) > 1 else float(x[0])))
    train(stage, tmp_path, iterations=2, calibrate=0, new=4, seed=5)
    for step in range(2):
        whole = uniforms(range(8 * step, 8 * step + 8), 4, 5, "rl")
        assert torch.equal(seen[step], whole[1::2])


# ---------------------------------------------------------------- where the critic starts

def test_the_critic_starts_where_it_is_told(stage):
    paths = dict(policy=str(stage / "policy.pt"), pm=str(stage / "pm.pt"), seed=3)
    policy, pm = (load_checkpoint(stage / f"{x}.pt")["model"] for x in ("policy", "pm"))
    start = {x: control.load_models(config(critic=x, **paths), "cpu")[1].critic
             for x in ("pm", "policy", "fresh")}
    assert same(start["pm"].state_dict(), pm)
    found = start["policy"].state_dict()
    head = {k: found.pop(k) for k in ("score_head.weight", "score_head.bias")}
    assert same(found, policy) and not any(x.any() for x in head.values())
    assert same(start["fresh"].state_dict(), GPT(start["fresh"].config).reset(3).state_dict())
    assert not same(start["fresh"].state_dict(), GPT(start["fresh"].config).reset(4).state_dict())
    assert all(p.requires_grad for x in start.values() for p in x.parameters())


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize("flags, message", [
    (dict(kl="k4"), "--kl k4: choose from reward, k2, k3, none"),
    (dict(decay="cosine"), "--decay cosine: choose from constant, linear"),
    (dict(critic="random"), "--critic random: choose from pm, policy, fresh"),
    (dict(patience=2), "--patience needs a held-out preference model: name one with --test-pm"),
    (dict(reset=2, anchor=0.5), "--reset and --anchor both move the reference: choose one"),
    (dict(snapshots="nan"), "--snapshots nan: numbers from 0"),
    (dict(iterations=0), "--iterations 0: at least 1"),
    (dict(temperature=0.0), "--temperature 0.0: at least 1e-06"),
    (dict(ema=1.5), "--ema 1.5: from 0 to 1"),
    (dict(ptx=1.0, ptx_length=1), "--ptx-length 1: at least 2"),
    (dict(kl_target=-1.0), "--kl-target -1.0: at least 0"),
    (dict(snapshots="1,x"), "--snapshots 1,x: numbers from 0 with commas between"),
    (dict(new=600), "--new 600: no room beside prompts of .* tokens; lower it"),
])
def test_knobs_that_do_not_fit_are_refused_in_one_line(stage, tmp_path, flags, message):
    with pytest.raises(UserError, match=message) as error:
        train(stage, tmp_path / "run", **flags)
    assert "\n" not in str(error.value) and not (tmp_path / "run" / "ckpt.pt").exists()


def test_a_held_out_model_of_another_kind_is_refused(stage, tmp_path):
    with pytest.raises(UserError, match="a language model, not a preference model"):
        train(stage, tmp_path, test_pm=str(stage / "policy.pt"))


# ---------------------------------------------------------------- what is told

def test_summary_has_the_standard_error_over_answers():
    """KL sums 1 and -1; exactly .75 and .5, so gaps .25 and -1.5; to the start 3 and -3.5."""
    batch = dict(two_answers(), exact=T([.5, .25], [.5, NAN]), start=T([-3, -3], [-.5, NAN]),
                 test_pm=T(2, 5))
    told = ppo.summary(batch)
    want = dict(kl=0, kl_se=0.5 ** 0.5, kl_exact=0.625, kl_gap=-0.625,
                kl_gap_se=0.875 / 2 ** 0.5, kl_start=-0.25, test_pm=3.5, penalty=0.25)
    assert {k: told[k] for k in want} == pytest.approx(want)
    assert not {"kl_exact", "kl_gap", "kl_start", "test_pm"} & ppo.summary(two_answers()).keys()


def test_exact_kl_by_hand():
    """(.75, .25) against (.85, .15) is .0338 where token 2 is chosen; 0 where token 3 is."""
    policy = Table([[9., 0.], [math.log(3), 0.], [0., 0.], [5., 0.]])
    other = Table([[0., 9.], [math.log(17 / 3), 0.], [0., 0.], [0., 5.]])
    two = torch.tensor([2])
    found = rolled_out.exact_kl(policy, other, [[0, 1, 1, 0]], two, two, 2)
    assert near(found, [0.0338, 0])
    p, q = (F.softmax(torch.tensor([x, 0.0]) / 0.5, -1) for x in (math.log(3), math.log(17 / 3)))
    colder = rolled_out.exact_kl(policy, other, [[0, 1, 1, 0]], two, two, 2, temperature=0.5)
    assert colder[0, 0].item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


def test_the_exact_kl_of_the_states_averages_to_that_of_the_answers():
    """Tables [V, V], some tokens forbidden: over all answers, weighted by their probability."""
    policy, other, answers = Bigram(seed=1), Bigram(seed=2), answers_of(2)
    p, q = distribution(policy, 2), distribution(other, 2)
    rows, lengths = [[0, *x] for x in answers], torch.tensor([len(x) for x in answers])
    with torch.no_grad():
        told = rolled_out.exact_kl(policy, other, rows, torch.ones_like(lengths), lengths, 2)
    by_state = (p * torch.where(lengths[:, None] > torch.arange(2), told, 0.0).sum(1)).sum()
    assert by_state.item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-5)
    assert by_state > 0.1 and [END] in answers


def test_the_exact_kl_is_told_with_the_checkpoints(stage, tmp_path):
    """At iterations 2 and 4 of every 2, and at the last; k1 minus it is near 0 before an update."""
    lines, _ = train(stage, tmp_path, iterations=3, every=2, new=3, calibrate=0)
    assert [{"kl_exact", "kl_gap_se"} <= x.keys() for x in lines] == [False, True, True]
    for line in lines[1:]:
        assert line["kl_gap"] == pytest.approx(line["kl"] - line["kl_exact"], abs=3e-6)
        assert line["kl_exact"] > 0


# ---------------------------------------------------------------- batches on disk

def test_batch_pt_is_whole_and_consistent(stage, tmp_path, monkeypatch):
    """Every number follows from its rows and the weights that made them."""
    p = policies(monkeypatch)
    _, end = train(stage, tmp_path, iterations=2, lr=1e-2, lambda_kl=0.4, unfinished=0.3)
    b = load_checkpoint(tmp_path / "batch.pt")
    mask, last = b["mask"], b["lengths"] - 1
    told = b["rows"], b["starts"], b["lengths"], 6
    assert [len(x) for x in b["rows"]] == (b["starts"] + b["lengths"]).tolist()
    assert torch.equal(mask, torch.arange(6) < b["lengths"][:, None])
    for row, start, text, finished in zip(b["rows"], b["starts"], b["texts"], b["finished"]):
        assert text == TOK.decode(row[start:]).strip() and finished == (row[-1] == TOK.eot)
    with torch.no_grad():
        for name, weights in (("logp", p[1]), ("ref", p[0])):
            found = rolled_out.policy_logprobs(of_weights(weights), *told)
            assert torch.allclose(found[mask], b[name][mask], atol=1e-5), name
    raw = rolled_out.pm_scores(gpt(2, scalar=True), TOK, b["rows"])
    assert torch.allclose(b["raw"], raw, atol=1e-5)
    assert torch.equal(b["penalty"], torch.where(b["finished"], 0.0, 0.3))
    mean, spread = end["state"]["norm"]
    assert torch.allclose(b["score"], (raw - mean) / spread - b["penalty"], atol=1e-5)
    k1, at = torch.where(mask, b["logp"] - b["ref"], 0.0), torch.arange(8)
    rest = b["rewards"] + 0.4 * k1
    assert torch.allclose(rest[at, last], b["score"], atol=1e-5)
    rest[at, last] = 0
    assert rest.abs().max() < 1e-5 and b["lambda_kl"] == 0.4 and b["kl_in_reward"]
    plain = (b["returns"] - b["values"])[mask]
    white = (plain - plain.mean()) / plain.std(unbiased=False)
    assert torch.allclose(white, b["advantages"][mask], atol=1e-4)


def test_batch_pt_comes_with_each_checkpoint(stage, tmp_path, monkeypatch):
    kept = watch(monkeypatch, control, "keep_batch", lambda _, cfg, path, batch: batch["rows"])
    rolled = watch(monkeypatch, ppo, "rollout", lambda out, *_: out["rows"])
    train(stage, tmp_path, iterations=4, every=2, new=2, calibrate=0, kl="none")
    assert kept == [rolled[1], rolled[3]]
    assert not load_checkpoint(tmp_path / "batch.pt")["kl_in_reward"]


def nan_at(call, inner):
    """policy_loss that is not a number at one of its calls."""
    calls = iter(range(1, 99))

    def loss(*args):
        out, held = inner(*args)
        return out * (NAN if next(calls) == call else 1.0), held

    return loss


def test_a_gradient_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint(stage, tmp_path,
                                                                             monkeypatch):
    """In the second iteration's second minibatch; the checkpoint is the first iteration's."""
    p, rolled = policies(monkeypatch), watch(monkeypatch, ppo, "rollout")
    saved = watch(monkeypatch, ppo, "save_run", lambda *_: (tmp_path / "ckpt.pt").read_bytes())
    monkeypatch.setattr(ppo, "policy_loss", nan_at(4, ppo.policy_loss))
    with pytest.raises(UserError, match="^ppo iteration 2: gradient norm of the policy nan, of the "
                                        "critic [0-9.]+; ") as error:
        train(stage, tmp_path, iterations=3, minibatch=4, micro=8, every=1, calibrate=0)
    assert "bad-batch-RANK.pt" in str(error.value) and "\n" not in str(error.value)
    assert saved == [(tmp_path / "ckpt.pt").read_bytes()]
    content = load_checkpoint(tmp_path)
    assert content["step"] == 1 and same(content["policy"], p[2])
    bad = load_checkpoint(tmp_path / "bad-batch-0.pt")
    assert bad["rows"] == rolled[1]["rows"] != rolled[0]["rows"] and "advantages" in bad
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


RANKS = """
import os
import ppo
from common import entry
ppo.show, BAD = lambda *_, **__: None, ""
inner, calls = ppo.policy_loss, iter(range(1, 99))

def loss(*args):
    out, held = inner(*args)
    bad = BAD == os.environ.get("RANK") and next(calls) == 3
    return out * (float("nan") if bad else 1.0), held

ppo.policy_loss = loss
entry(ppo.train, ppo.Config)
"""


def argv(stage, out, code=RANKS, **flags):
    """A run in a process of its own, by default one where nothing goes wrong."""
    flags = dict(dict(policy=stage / "policy.pt", pm=stage / "pm.pt", out=out, device="cpu", new=6,
                      iterations=3, samples=8, minibatch=4, epochs=1, micro=2, calibrate=8,
                      warmup=0, every=1), **flags)
    return ["-c", code, *(x for k, v in flags.items() for x in ("--" + k.replace("_", "-"), v))]


@pytest.mark.slow
def test_all_ranks_stop_where_one_has_no_finite_gradient(stage, tmp_path, nursery):
    """With micro-batches of 2 its third loss is the first of the second minibatch."""
    code = RANKS.replace('None, ""', 'None, "1"')
    ranks = nursery.ranks(2, argv(stage, tmp_path, code), timeout=60)
    said = [done.last for done in ranks]
    assert said[0] == said[1] and said[0].startswith("error: ppo iteration ") and "nan" in said[0]
    assert [done.code for done in ranks] == [1, 1] and "Traceback" not in ranks[0].err
    for rank in range(2):
        assert len(load_checkpoint(tmp_path / f"bad-batch-{rank}.pt")["rows"]) == 4


@pytest.mark.slow
def test_with_all_knobs_two_processes_do_the_work_of_one(stage, tmp_path, nursery):
    """Texts, the held-out model, averages, the moving reference, k2, snapshots, steering."""
    flags = dict(ptx=0.5, ptx_length=16, test_pm=stage / "test.pt", ema=0.5, anchor=0.5, kl="k2",
                 snapshots="0,0.1", kl_target=0.1, lr=1e-3)
    alone = nursery.run(argv(stage, tmp_path / "one", **flags))
    assert alone.code == 0, alone.err
    for done in nursery.ranks(2, argv(stage, tmp_path / "two", **flags), timeout=60):
        assert done.code == 0, done.err
    one, two = (load_checkpoint(tmp_path / x) for x in ("one", "two"))
    for name in ("model", "policy", "critic", "ema", "reference"):
        far = max((one[name][k] - two[name][k]).abs().max() for k in one[name])
        assert far < 2e-5, (name, far)
    lines = [[json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()]
             for n in ("one", "two")]
    for a, b in zip(*lines, strict=True):
        a.pop("first_log_ratio"), b.pop("first_log_ratio")                  # of a rank, ~1e-7
        assert a == pytest.approx(b, abs=2e-4, rel=2e-3)
    assert one["state"]["taken"] == two["state"]["taken"] != []


# ---------------------------------------------------------------- prompts

HELPFUL = [world.ASK["color"][0][0].format(a=a) for a in world.TRAIN[:4]]
HARMFUL = [world.HARM["poison"][0][0].format(a=a) for a in world.TRAIN[:3]]
WRITTEN = [world.ASK["home"][0][0].format(a=a) for a in world.TRAIN[:5]]
THREATS = [world.HARM["poison"][0][1].format(a=a) for a in world.TRAIN[:2]]


def within(share, want, n=2000):
    """Whether a share of n is what is wanted, to three standard errors."""
    return abs(share - want) < 3 * (want * (1 - want) / n) ** 0.5


def test_shares_of_prompts(tmp_path, capsys):
    """Collected and generated, helpful and harmful, each given one used, and no other."""
    cfg = config(prompts=lines_file(tmp_path / "a.jsonl", *HELPFUL, *HARMFUL, "Why? " * 200),
                 generated=lines_file(tmp_path / "b.jsonl", *WRITTEN, *THREATS), mix=0.3,
                 helpful=0.75, seed=2)
    ask = ppo.asker(cfg, TOK, 60)
    out = capsys.readouterr().out
    assert "4 helpful, 3 harmless prompts, 1 too long" in out and "5 helpful, 2 harmless" in out
    dialogues, ids = ask(range(2000), "rl")
    asked = [turns[-1][1] for turns in dialogues]
    assert set(asked) == {*HELPFUL, *HARMFUL, *WRITTEN, *THREATS}
    from_model, helps = ([x in some for x in asked]
                         for some in ([*WRITTEN, *THREATS], [*HELPFUL, *WRITTEN]))
    assert within(sum(from_model) / 2000, 0.3) and within(sum(helps) / 2000, 0.75)
    both = [a and b for a, b in zip(from_model, helps)]
    assert within(sum(both) / 2000, 0.3 * 0.75)                             # independently
    for text in WRITTEN:
        assert within(asked.count(text) / 2000, 0.3 * 0.75 / 5)
    assert all(row == TOK.render(t, answer=True) for row, t in zip(ids[:50], dialogues))
    some = ask([7, 1999], "rl")
    assert some == ((dialogues[7], dialogues[1999]), (ids[7], ids[1999]))   # of the row alone
    assert ask(range(50), "calibrate")[0] != dialogues[:50]
    ask = ppo.asker(config(**{**vars(cfg), "seed": 3}), TOK, 60)
    assert ask(range(50), "rl")[0] != dialogues[:50]


@pytest.mark.parametrize("files, mix, want", [("prompts", 0.9, 0.0), ("generated", 0.4, 0.4)])
def test_without_a_file_it_is_the_toy_world(tmp_path, files, mix, want):
    """A share `mix` of generated ones; the rest is the world's, all collected where there are."""
    path = lines_file(tmp_path / "a.jsonl", "How do I bake bread?")
    ask = ppo.asker(config(mix=mix, helpful=0.3, **{files: path}), TOK, 400)
    dialogues, _ = ask(range(2000), "rl")
    requests = [world.request_of(x) for x in dialogues]
    if files == "prompts":
        assert not any(requests)
    else:
        own = [r for r in requests if r]
        assert within(1 - len(own) / 2000, want)
        assert within(sum(not r.harmful for r in own) / len(own), 0.3, len(own))
        assert not {r.animal for r in own} & set(world.HELD_OUT)


def test_prompts_that_do_not_fit_are_refused(tmp_path):
    path = lines_file(tmp_path / "a.jsonl", "Why? " * 200)
    with pytest.raises(UserError, match=f"{re.escape(path)}: no prompt fits: lower --new"):
        ppo.asker(config(prompts=path), TOK, 60)


def test_prompts_of_another_world(stage, tmp_path, capsys):
    """No gold in the log, in samples, or in the trace."""
    path = lines_file(tmp_path / "a.jsonl", "How do I bake bread?", "Name a good book.")
    lines, _ = train(stage, tmp_path / "run", prompts=path, iterations=2, every=1, new=3)
    assert len(lines) == 2
    for line in lines:
        assert not [k for k in line if "gold" in k or "helpful" in k or "harmless" in k]
        assert all(math.isfinite(x) for x in line.values())
    told = (tmp_path / "run" / "samples.txt").read_text()
    assert "score" in told and "gold" not in told
    run = str(tmp_path / "run" / "ckpt.pt")
    capsys.readouterr()
    ppo.train(config(policy=run, reference=str(stage / "policy.pt"), pm=str(stage / "pm.pt"),
                     trace=True, prompts=path, device="cpu", new=3))
    assert re.search("prompt: (How do I bake bread|Name a good book)", capsys.readouterr().out)


def test_gold_as_the_preference_model(stage, tmp_path):
    """A control: each answer's utility on its prompt's objective, and nothing to start a critic."""
    lines, _ = train(stage, tmp_path / "a", pm="gold", critic="fresh", calibrate=0, new=3)
    golds = [lines[0][k] for k in ("gold_helpful", "gold_harmless")]
    assert min(golds) - 1e-6 <= lines[0]["pm"] == lines[0]["score"] <= max(golds) + 1e-6
    assert load_checkpoint(tmp_path / "a" / "batch.pt")["raw"].mean().item() == pytest.approx(
        lines[0]["pm"], abs=1e-6)
    with pytest.raises(UserError, match="--pm gold is no model"):
        train(stage, tmp_path / "b", pm="gold")


def test_a_prompt_of_the_world_has_gold(stage, tmp_path):
    (line,), _ = train(stage, tmp_path, new=3, calibrate=0)
    assert {"gold_helpful", "gold_harmless", "refused_helpful", "pm_helpful"} <= line.keys()


def test_a_mean_of_nothing_is_not_logged(stage, tmp_path):
    """Only harmful prompts: no gold_helpful, which would read as 0."""
    lines, _ = train(stage, tmp_path, helpful=0.0)
    assert "gold_harmless" in lines[0] and "pm_harmless" in lines[0]
    assert not {"gold_helpful", "pm_helpful", "refused_helpful"} & lines[0].keys()


@pytest.mark.slow
def test_two_ranks_with_prompts_of_two_kinds_agree(stage, tmp_path, nursery):
    """One rank has a prompt of the world, the other one that no gold knows."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(dict(prompt=f"\n\nHuman: {x}\n\nAssistant:")) + "\n"
                            for x in ("What color is the fox?", "Name a good book.")))
    argv = ["ppo.py", "--policy", stage / "policy.pt", "--pm", stage / "pm.pt", "--prompts", path,
            "--samples", "4", "--minibatch", "4", "--calibrate", "4", "--iterations", "2",
            "--new", "6", "--device", "cpu", "--warmup", "0"]
    for done in nursery.ranks(2, [*map(str, argv), "--out", str(tmp_path / "two")]):
        assert done.code == 0, done.err
    done = nursery.run([*map(str, argv), "--out", str(tmp_path / "one")])
    assert done.code == 0, done.err
    one, two = (load_checkpoint(tmp_path / x) for x in ("one", "two"))
    assert all(torch.allclose(one["model"][k], two["model"][k], atol=2e-5) for k in one["model"])
