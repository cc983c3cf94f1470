"""ppo.py: its mathematics against hand-computed numbers, its loop against a closed form.

The cases are faults that people met in other code: each test states the right numbers, and those
of a common wrong version. Letters: B answers, R response tokens, P prompt tokens, V vocabulary.

Mutations tried, each caught here: k2 without its half, k3 backwards, k1 clamped, arguments of the
KL swapped, sign of the penalty, beta doubled, score one token early or late, score in place of the
penalty, an empty answer that wraps round, masking by multiplication; advantages without bootstrap,
lambda or gamma, rewards for returns; sample variance, mean or spread of one rank, no whitening;
ratio upside down, no minimum, optimistic policy or value loss, sign of the loss, count of clipped
tokens, value clip off centre; pads read by any of these; value one late, log-prob one early, policy
or reference without the temperature; score at the pad, one early, without <|eoc|> or in another
order; an end of turn looked for in the prompt, any special id as an end, penalty in place of the
score, order of shift and scale, end token masked, masks from ids; variance for spread, scores not
normalized; the reference the policy itself, shared in part, not frozen, or read from the resumed
policy; mean of means in either loss, one minibatch for all, no warm-up, ratio not reported, KL
clamped in the log, k3 per token, gold in the advantages, unkeyed numbers; critic, optimizers or
normalization not resumed.
"""

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import control
import model
import ppo
import rollout as rolled_out
from common import (
    UserError,
    adamw,
    keyed,
    load_checkpoint,
    save_checkpoint,
    schedule,
    uniforms,
    update,
)
from data import world
from data.tokenizer import train_bpe
from model import GPT, GPTConfig, pack, response_mask
from control import need_separate
from ppo import (
    advantages_of,
    critic_values,
    gae,
    moments,
    policy_loss,
    rewards_of,
    value_loss,
    whiten,
)
from rollout import kl_estimates, pm_scores, policy_logprobs, rollout

NAN = float("nan")


def T(*rows):
    """Rows of numbers -> a tensor, in float64."""
    return torch.tensor(rows, dtype=torch.float64)


def M(*rows):
    """Rows of 0 and 1 -> a mask."""
    return torch.tensor(rows, dtype=torch.bool)


def whitened(x, mask, summed=ppo.total):
    return whiten(x, mask, *moments(x, mask, summed))


def near(x, *rows):
    """Whether a tensor [B, R] holds these rows, to four decimals."""
    return x.shape == T(*rows).shape and torch.allclose(x.double(), T(*rows), rtol=0, atol=5e-5)


# ---------------------------------------------------------------- KL

def test_kl_estimates_table():
    """pi = (1/2, 1/2), pi0 = (.9, .1): the KL is 0.5108; k1 and k3 average to it, k2 does not."""
    k1, k2, k3 = kl_estimates(T([.5, .5]).log(), T([.9, .1]).log())
    assert near(k1, [-0.5878, 1.6094]) and k1.mean().item() == pytest.approx(0.5108, abs=5e-5)
    assert near(k2, [0.1727, 1.2951]) and k2.mean().item() == pytest.approx(0.7339, abs=5e-5)
    assert near(k3, [0.2122, 0.8094]) and k3.mean().item() == pytest.approx(0.5108, abs=5e-5)


def test_kl_in_the_reward_has_the_gradient_of_the_kl_and_as_a_loss_it_does_not():
    """d KL / dz at one logit z, pi = (1/2, 1/2): -0.5493. As a loss only k2 gives it."""
    ref = T([.9], [.1]).log()                     # each token once: the exact mean over both

    def gradient(loss):
        z = torch.zeros((), dtype=torch.float64, requires_grad=True)
        logp = torch.stack([F.logsigmoid(z), F.logsigmoid(-z)])[:, None]
        loss(logp).backward()
        return z.grad.item()

    def in_the_reward(logp):
        old, mask = logp.detach(), M([1], [1])
        rewards = rewards_of(old, ref, mask, T(0, 0), lambda_kl=1.0)
        return policy_loss(logp, old, gae(rewards, 0 * rewards, mask)[0], mask, 0.2)[0] / 2

    assert gradient(in_the_reward) == pytest.approx(-0.5493, abs=5e-5)
    as_loss = [gradient(lambda logp, i=i: kl_estimates(logp, ref)[i].mean()) for i in range(3)]
    assert as_loss == pytest.approx([0.0, -0.5493, -0.4000], abs=5e-5)


def test_a_negative_k1_is_legal():
    """pi = (.75, .25), pi0 = (.85, .15): token 0 has k1 = -0.1252, the KL is +0.0338. No clamp."""
    k1, _, k3 = kl_estimates(T([.75, .25]).log(), T([.85, .15]).log())
    assert k1[0, 0].item() == pytest.approx(-0.1252, abs=5e-5)
    assert (T(.75, .25) * k1).sum().item() == pytest.approx(0.0338, abs=5e-5)
    assert (k3 >= 0).all()
    rewards = rewards_of(T([.75]).log(), T([.85]).log(), M([1]), T(0), 1.0)
    assert rewards.item() == pytest.approx(0.1252, abs=5e-5)


def test_sign_of_the_penalty():
    """beta 0.1: more likely than in the reference costs, less likely gains."""
    assert near(rewards_of(T([-1, -3]), T([-3, -1]), M([1, 1]), T(0), 0.1), [-0.2, 0.2])


# ---------------------------------------------------------------- rewards

def test_the_score_belongs_to_the_last_real_token():
    zero = torch.zeros(2, 5, dtype=torch.float64)
    mask = M([1, 1, 1, 0, 0], [1, 1, 1, 1, 1])
    rewards = rewards_of(zero, zero, mask, T(2, 3), 0.0)
    assert near(rewards, [0, 0, 2, 0, 0], [0, 0, 0, 0, 3])
    advantages, _ = gae(rewards, zero, mask)             # one slot late: [1.7148, 1.805, 1.9]
    assert near(advantages[:1], [1.805, 1.9, 2, 0, 0])


def test_penalty_at_every_token_and_score_at_the_last():
    """lambda 0.5; k1 = 1, -2, 3 -> -0.5, 1, -1.5, and the score 4 on top of the last."""
    rewards = rewards_of(T([-1, -3, -1, NAN]), T([-2, -1, -4, NAN]), M([1, 1, 1, 0]), T(4), 0.5)
    assert near(rewards, [-0.5, 1.0, 2.5, 0.0])


def test_an_empty_answer_has_no_reward_and_does_not_touch_its_peers():
    zero, mask = torch.zeros(2, 3, dtype=torch.float64), M([0, 0, 0], [1, 1, 0])
    rewards = rewards_of(zero, zero, mask, T(10, 1), 0.1)
    assert near(rewards, [0, 0, 0], [0, 1, 0])
    both, _ = gae(rewards, zero, mask)
    alone, _ = gae(rewards[1:], zero[1:], mask[1:])
    assert torch.equal(both[1:], alone) and near(both[:1], [0, 0, 0])
    assert torch.equal(whitened(both, mask)[1:], whitened(alone, mask[1:]))


# ---------------------------------------------------------------- advantages

def test_gae_timing():
    """Rewards [0, 0, 1], values 1/2. Wrong (reward - value): [-.5, -.5, .5]."""
    rewards, values, mask = T([0, 0, 1]), T([.5, .5, .5]), M([1, 1, 1])
    advantages, returns = gae(rewards, values, mask, lam=1.0)
    assert near(advantages, [.5, .5, .5]) and near(returns, [1, 1, 1])
    advantages, returns = gae(rewards, values, mask, lam=0.95)
    assert near(advantages, [.45125, .475, .5]) and near(returns, [.95125, .975, 1.0])


def test_gae_equals_its_definition():
    """A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), by O(T^2) sums."""
    B, R, gamma, lam = 5, 11, 0.97, 0.9
    rng = keyed("gae")
    rewards, values = (torch.from_numpy(rng.standard_normal((B, R))) for _ in range(2))
    lengths = [11, 7, 1, 0, 3]
    mask = response_mask(torch.zeros(B, dtype=torch.long), torch.tensor(lengths), R)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for b, n in enumerate(lengths):
        r, v = rewards[b].tolist(), [*values[b, :n].tolist(), 0.0]
        for t in range(R):
            want = sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k])
                       for k in range(t, n))
            assert advantages[b, t].item() == pytest.approx(want, abs=1e-12)
            assert returns[b, t].item() == pytest.approx(want + v[t] if t < n else 0.0, abs=1e-12)


def test_padding_is_not_in_the_returns():
    """Rewards [1, 2 | 7, 7], gamma 1: returns [3, 2, 0, 0] (wrong: [17, 16, 14, 7])."""
    for pad in (7.0, NAN):
        rewards, values = T([1, 2, pad, pad]), T([0, 0, pad, pad])
        advantages, returns = gae(rewards, values, M([1, 1, 0, 0]), lam=1.0)
        assert near(returns, [3, 2, 0, 0]) and near(advantages, [3, 2, 0, 0])


# ---------------------------------------------------------------- whitening

def test_whiten():
    """[1, 2, 3 | pad] -> population variance 1: [-1.2247, 0, 1.2247]."""
    for pad in (1e6, NAN, math.inf):
        white = whitened(T([1, 2, 3, pad]), M([1, 1, 1, 0]))
        assert near(white, [-1.2247, 0, 1.2247, 0]) and white.dtype == torch.float32
    assert near(whitened(T([5, 5]), M([1, 1])), [0, 0])            # no spread: zeros and not NaN
    assert near(whitened(T([5, 5]), M([0, 0])), [0, 0])


@pytest.mark.parametrize("x, mask, own, white", [
    ([[1, NAN]], [[1, 0]], [[1, 1], [1]], [[-1.2247, 0]]),   # rank 0: count 1, sum 1; (1-2)^2
    ([[2, 3]], [[1, 1]], [[2, 5], [1]], [[0, 1.2247]]),      # rank 1: count 2, sum 5; 0 + (3-2)^2
])
def test_whitening_is_over_the_tokens_of_all_ranks(x, mask, own, white):
    """[1, 2, 3] with the 1 on rank 0: over both, count 3, sum 6, then squares 2."""
    told, answers = [], iter([[3.0, 6.0], 2.0])

    def summed(*values):
        told.append([float(v) for v in values])
        return next(answers)

    assert near(whitened(T(*x), M(*mask), summed), *white)
    assert told == own


# ---------------------------------------------------------------- losses

def test_policy_loss_by_hand():
    """eps 0.2. Ratio 1.5: A=1 is held at 1.2, A=-1 is not. Ratio 0.5: A=-1 is held at 0.8."""
    logp = T([1.5, 1.5, 0.5, 0.5, 1.1]).log().requires_grad_()
    old, advantages = T([0, 0, 0, 0, 0]), T([1, -1, 1, -1, 2])
    loss, held = policy_loss(logp, old, advantages, M([1, 1, 1, 1, 1]), 0.2)
    assert loss.item() == pytest.approx(-1.2 + 1.5 - 0.5 + 0.8 - 2.2)
    assert held.item() == 2
    loss.backward()                                                # -ratio * A where not held
    assert near(logp.grad, [0, 1.5, -0.5, 0, -2.2])


def test_policy_loss_at_the_old_policy_is_reinforce():
    """Ratio 1: the gradient is -A at each token, nothing is held."""
    logp, advantages = T([-1, -2, -3]).requires_grad_(), T([0.5, -4, 3])
    loss, held = policy_loss(logp, logp.detach(), advantages, M([1, 1, 0]), 0.2)
    loss.backward()
    assert near(logp.grad, [-0.5, 4, 0]) and held.item() == 0 and loss.item() == 3.5


def test_value_loss_by_hand():
    """Value 1, old 0, clip .2. Return 0: max(1, .2^2) / 2; return 1: max(0, .8^2) / 2."""
    mask = M([1, 1, 1])
    values = T([1, 1, 0.1]).requires_grad_()
    loss = value_loss(values, T([0, 0, 0]), T([0, 1, 3]), mask, 0.2)
    assert loss.item() == pytest.approx(0.5 + 0.32 + 2.9 ** 2 / 2)
    loss.backward()
    assert near(values.grad, [1.0, 0.0, -2.9])


def test_losses_against_finite_differences():
    """Random tokens in float64, away from the corners of the clipping; pads in between."""
    rng = keyed("finite differences")
    logp, old, advantages, returns = (torch.from_numpy(rng.standard_normal((3, 5)) * 0.3)
                                      for _ in range(4))
    mask = M([1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0])
    loss, held = policy_loss(logp, old, advantages, mask, 0.2)
    assert 0 < held.item() < 10                                   # both branches occur
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, mask, 0.2)[0], logp.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old, returns, mask, 0.2), logp.detach().requires_grad_())


@pytest.mark.parametrize("poison", ["nan", "inf", "random"])
def test_pads_of_every_tensor_may_hold_anything(poison):
    """Loss and gradients are the same to the last bit, from rewards to both losses."""
    B, R = 5, 7
    mask = response_mask(torch.zeros(B, dtype=torch.long), torch.tensor([7, 3, 1, 0, 5]), R)

    def everything(fill):
        rng = np.random.default_rng(0)
        x = {k: torch.from_numpy(rng.standard_normal((B, R)).astype("f"))
             for k in ("old", "ref", "values", "logp", "new values")}
        for k in x:
            x[k] = torch.where(mask, x[k], fill(k)).requires_grad_(k in ("logp", "new values"))
        rewards = rewards_of(x["old"], x["ref"], mask, torch.arange(5.0), 0.1)
        advantages, returns = gae(torch.where(mask, rewards, fill("r")), x["values"], mask)
        white = whitened(torch.where(mask, advantages, fill("a")), mask)
        white = torch.where(mask, white, fill("w"))
        loss, held = policy_loss(x["logp"], x["old"], white, mask, 0.2)
        returns = torch.where(mask, returns, fill("g"))
        v_loss = value_loss(x["new values"], x["values"], returns, mask, 0.2)
        (loss + v_loss).backward()
        return [rewards, loss, v_loss, held, x["logp"].grad, x["new values"].grad]

    def fill(name):
        if poison == "random":
            return torch.from_numpy(keyed(name).standard_normal((B, R)).astype("f")) * 100
        return torch.full((B, R), float(poison))

    clean, dirty = everything(lambda _: torch.zeros(B, R)), everything(fill)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert clean[-1].abs().sum() > 0 and clean[-2].abs().sum() > 0


# ---------------------------------------------------------------- which token, which value

class Table:
    """A model whose hidden state at position t is row t of a table, the same in every row."""

    device = torch.device("cpu")
    logprobs = GPT.logprobs

    def __init__(self, table):
        self.table = torch.tensor(table, requires_grad=True)

    def __call__(self, ids, lengths=None, at=...):
        return self.table[:ids.shape[1]].expand(len(ids), *self.table[:ids.shape[1]].shape)[at]

    def logits(self, hidden):
        return hidden

    def score(self, hidden):
        return hidden.squeeze(-1)


def test_log_probs_belong_to_their_tokens():
    """Vocabulary 3, [0, 1 | 2, 0]. One late, it would be [-2.2394, -1.0986]."""
    model = Table([[0., 0., 0.], [1., 2., 3.], [2., 0., 0.], [9., 9., 9.]])
    logp = policy_logprobs(model, [[0, 1, 2, 0]], torch.tensor([2]), torch.tensor([2]), 2)
    assert near(logp, [-0.4076, -0.2395])


def test_temperature_divides_the_logits():
    """Logits [ln 3, 0], T 1/2, token 0: ln .9 = -0.1054 (untempered: -0.2877)."""
    model = Table([[math.log(3), 0.0], [0.0, 0.0]])
    one = torch.tensor([1])
    logp = policy_logprobs(model, [[1, 0]], one, one, 1, temperature=0.5)
    assert near(logp, [-0.1054])


def test_a_response_tokens_value_is_read_one_position_before_it():
    critic = Table([[10.], [11.], [12.], [13.]])
    assert near(critic_values(critic, [[5, 5, 5, 5]], torch.tensor([2]), 2), [11, 12])


def test_the_critic_learns_at_the_states_that_choose_a_token():
    """Length 6, response 3: positions 2, 3, 4; not 5, the state after the last token."""
    critic = Table([[0.5]] * 6)
    values = critic_values(critic, [[1] * 6], torch.tensor([3]), 3)
    value_loss(values, values.detach(), values.detach() - 1, M([1, 1, 1]), 0.2).backward()
    assert critic.table.grad[:, 0].tolist() == [0, 0, 1, 1, 1, 0]


def test_short_rows_of_a_batch_keep_their_own_places():
    """Prompts of 1 and 3, responses of 3 and 1."""
    critic = Table([[0.], [1.], [2.], [3.]])
    values = critic_values(critic, [[7] * 4, [7] * 4], torch.tensor([1, 3]), 3)
    assert values[0].tolist() == [0, 1, 2] and values[1, 0].item() == 2


# ---------------------------------------------------------------- rollouts with a real model

TOK = train_bpe([str(world.document(0, i)) for i in range(60)], 320)


def gpt(seed, scalar=False):
    """A small random model, lively enough to prefer some tokens."""
    model = GPT(GPTConfig(TOK.vocab, 512, 2, 2, 24, scalar))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.3 if name == "score_head.weight" else 0.12, generator=generator)
    return model


def config(**flags):
    return ppo.Config(**{**dict(new=6, micro=4, temperature=1.0, unfinished=0.0), **flags})


def prompts(*lengths, seed=0):
    """Prompts of given numbers of tokens that end at an assistant header."""
    rng = keyed("prompts", seed)
    return [[*rng.integers(0, 256, n - 1).tolist(), TOK.assistant] for n in lengths]


def roll(cfg, rows, models, key=0):
    policy, reference, critic, pm = models
    talks = [[("human", "What color is the fox?")]] * len(rows)
    batch = rollout(cfg, TOK, policy, reference, pm, talks, rows,
                    uniforms(range(len(rows)), cfg.new, "u", key), (0.0, 1.0))
    return advantages_of(cfg, batch, critic, cfg.lambda_kl)


def models():
    return gpt(1), gpt(2), gpt(3, scalar=True), gpt(4, scalar=True)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_the_ratio_is_one_before_the_first_update(temperature, monkeypatch):
    """Sampled in chunks of 1; scored together, in any order, with 5 more columns of padding."""
    cfg, all_models = config(temperature=temperature), models()
    asked = prompts(3, 7, 13)
    parts = [roll(cfg, [p], all_models, key=i) for i, p in enumerate(asked)]
    batch = {k: torch.cat([p[k] for p in parts]) for k in ("starts", "lengths", "logp", "mask")}
    rows = [p["rows"][0] for p in parts]

    def check(order):
        logp = policy_logprobs(all_models[0], [rows[i] for i in order], batch["starts"][order],
                               batch["lengths"][order], cfg.new, temperature)
        old, mask = batch["logp"][order], batch["mask"][order]
        assert (logp - old)[mask].abs().max() < 1e-5
        advantages = torch.ones_like(logp)
        assert policy_loss(logp, old, advantages, mask, 1e-5)[1] == 0
        assert kl_estimates(logp, old)[2][mask].mean() < 1e-5

    for order in itertools.permutations(range(3)):
        check(list(order))
    pad_rows = rolled_out.pad_rows

    def wider(rows, pad, device):
        ids, lengths = pad_rows(rows, pad, device)
        return F.pad(ids, (0, 5), value=pad), lengths

    monkeypatch.setattr(rolled_out, "pad_rows", wider)
    check([2, 0, 1])


def test_in_bf16_the_old_log_probs_are_the_scorer_s(monkeypatch):
    """The sampler's products round otherwise; then the ratio is 1 only against the scorer."""
    cfg, all_models, told = config(), models(), []
    monkeypatch.setitem(model.AUTOCAST, "cpu", torch.bfloat16)
    sampler = rolled_out.generate
    monkeypatch.setattr(rolled_out, "generate",
                        lambda *a, **k: told.append(sampler(*a, **k)) or told[0])
    batch = roll(cfg, prompts(3, 7, 2, 11), all_models)
    again = policy_logprobs(all_models[0], batch["rows"], batch["starts"], batch["lengths"], 6)
    mask, sampled = batch["mask"], told[0][2]
    assert batch["logp"].dtype == again.dtype == torch.float32
    assert torch.equal(batch["logp"][mask], again[mask])
    assert not torch.equal(batch["logp"], sampled)
    assert (batch["logp"] - sampled)[mask].abs().max() < 0.1


def test_the_reference_is_scored_as_the_policy_is():
    """With the policy for a reference the KL of a rollout is 0, at any temperature and chunking."""
    policy, _, critic, pm = models()
    for temperature, micro in ((1.0, 1), (0.5, 2), (0.5, 5)):
        cfg = config(temperature=temperature, micro=micro)
        batch = roll(cfg, prompts(3, 7, 2, 11, 5), (policy, policy, critic, pm))
        assert (batch["logp"] - batch["ref"])[batch["mask"]].abs().max() < 1e-5


def test_a_rollout_does_not_depend_on_chunks_or_neighbours():
    asked = prompts(3, 7, 2, 11, 5)
    whole = roll(config(micro=5), asked, models())
    for micro in (1, 2, 3):
        cut = roll(config(micro=micro), asked, models())
        for k in ("ref", "values", "raw", "score"):
            real = whole["mask"] if whole[k].ndim == 2 else ...
            assert torch.allclose(whole[k][real], cut[k][real], atol=1e-5), k


def test_pads_of_the_rows_may_be_any_token(monkeypatch):
    """Log-probs, values and gradients are the same to the last bit whatever fills short rows."""
    policy, _, critic, _ = models()
    rows, starts = prompts(3, 9, 5), torch.tensor([1, 4, 2])
    lengths = torch.tensor([2, 5, 3])
    mask = response_mask(torch.zeros(3, dtype=torch.long), lengths, 6)

    def passes(fill):
        def padded(rows, pad, device):
            T = max(map(len, rows))
            pads = [keyed(fill, len(r)).integers(0, TOK.vocab, T - len(r)).tolist() for r in rows]
            ids = torch.tensor([r + p for r, p in zip(rows, pads, strict=True)])
            return ids, torch.tensor([len(r) for r in rows])

        monkeypatch.setattr(rolled_out, "pad_rows", padded)
        monkeypatch.setattr(ppo, "pad_rows", padded)
        logp = policy_logprobs(policy, rows, starts, lengths, 6)
        values = critic_values(critic, rows, starts, 6)
        zero, weights = torch.zeros(3, 6), [*policy.parameters(), *critic.parameters()]
        loss = policy_loss(logp, logp.detach(), zero + 1, mask, 0.2)[0]
        loss = loss + value_loss(values, zero, zero + 1, mask, 0.2)
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
        return [loss, logp[mask], values[mask], *(g for g in grads if g is not None)]

    one, two = passes("a"), passes("b")
    assert len(one) > 40 and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def scripted(monkeypatch, *answers, new=5):
    """Replaces the sampler by given answers."""
    tokens = torch.tensor([a + [TOK.pad] * (new - len(a)) for a in answers])
    lengths = torch.tensor([len(a) for a in answers])
    monkeypatch.setattr(rolled_out, "generate",
                        lambda *_, **__: (tokens, lengths, torch.zeros(len(answers), new)))


class Constant(torch.nn.Module):
    """A preference model that scores everything alike."""

    device = torch.device("cpu")

    def __init__(self, score):
        super().__init__()
        self.value = score

    def forward(self, ids, lengths=None, at=...):
        return torch.full((*ids.shape, 1), self.value)[at]

    def score(self, hidden):
        return hidden.squeeze(-1)


def test_the_end_of_turn_is_an_action(monkeypatch):
    """[7, 8, END] and [7, 8, 9, 9, END]: masks of 3 and 5, and END has a gradient."""
    scripted(monkeypatch, [7, 8, TOK.eot], [7, 8, 9, 9, TOK.eot])
    all_models = models()
    batch = roll(config(new=5), prompts(3, 4), all_models)
    assert batch["mask"].sum(1).tolist() == [3, 5] and batch["finished"].tolist() == [True, True]
    logp = policy_logprobs(all_models[0], batch["rows"], batch["starts"], batch["lengths"], 5)
    logp.retain_grad()
    policy_loss(logp, logp.detach(), torch.ones(2, 5), batch["mask"], 0.2)[0].backward()
    assert near(logp.grad, [-1, -1, -1, 0, 0], [-1, -1, -1, -1, -1])


def test_an_answer_that_ends_at_once_has_length_one(monkeypatch):
    scripted(monkeypatch, [TOK.eot])
    batch = roll(config(new=5), prompts(3), models())
    assert batch["mask"].tolist() == [[True, False, False, False, False]]
    assert batch["rewards"][0, 0] != 0 and batch["texts"] == [""]


def test_masks_come_from_lengths_and_not_from_ids(monkeypatch):
    """A cut answer, one with the pad id inside, a full one without an end."""
    scripted(monkeypatch, [5, 6], [TOK.pad, TOK.pad, TOK.eot], [5, 6, 7, 8, 9])
    batch = roll(config(new=5), prompts(3, 3, 3), models())
    assert batch["mask"].int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


def test_an_unfinished_answer_loses_the_penalty(monkeypatch):
    """Score 1.5, penalty 1 -> 0.5: subtracted. Only the answer's own end of turn counts."""
    scripted(monkeypatch, [7, 8, 9, 9, 9], [7, TOK.eot], [7, TOK.eod])
    policy, reference, critic, _ = models()
    asked = [[4, TOK.eot, TOK.assistant]] * 3
    batch = roll(config(new=5, unfinished=1.0), asked, (policy, reference, critic, Constant(1.5)))
    assert batch["finished"].tolist() == [False, True, False]
    assert batch["raw"].tolist() == [1.5] * 3 and batch["score"].tolist() == [0.5, 1.5, 0.5]


def test_the_score_is_shifted_and_scaled_before_the_penalty(monkeypatch):
    """(5 - 1) / 2 - 1 where unfinished."""
    scripted(monkeypatch, [7, TOK.eot], [7, 7, 7, 7, 7])
    policy, reference, critic, _ = models()
    batch = rollout(config(new=5, unfinished=1.0), TOK, policy, reference, Constant(5.0), [[]] * 2,
                    prompts(2, 2), None, (1.0, 2.0))
    assert batch["score"].tolist() == [2.0, 1.0]


# ---------------------------------------------------------------- the preference model's score

class WhereRead(Table):
    """Its score is the position that is read; it checks that <|eoc|> stands there."""

    def __init__(self):
        pass

    def __call__(self, ids, lengths, at):
        self.ids = ids
        return torch.arange(ids.shape[1]).expand(ids.shape)[at][..., None].float()

    def score(self, hidden):
        read = hidden.squeeze(-1).long()
        assert (self.ids[torch.arange(len(read)), read] == TOK.eoc).all()
        return read.float()


def test_the_score_is_read_at_the_end_of_context():
    """Of rows of 5, 7 and 2 tokens, pad and end ids among them: at indices 5, 7 and 2."""
    rows = [[3, TOK.pad, 4, TOK.eoc, TOK.pad], [1, 2, TOK.eot, 4, 5, 6, TOK.eot], [TOK.eoc, 1]]
    assert pm_scores(WhereRead(), TOK, rows).tolist() == [5, 7, 2]


def test_the_score_does_not_depend_on_batch_or_padding():
    pm = gpt(5, scalar=True)
    rows = [r[:-1] + [TOK.eot] for r in prompts(5, 8, 15, 3, 40)]
    alone = torch.cat([pm_scores(pm, TOK, [r]) for r in rows])
    assert alone.std() > 0.1
    for micro, order in ((2, [0, 1, 2, 3, 4]), (5, [4, 3, 2, 1, 0]), (3, [2, 0, 4, 1, 3])):
        scores = pm_scores(pm, TOK, [rows[i] for i in order], micro)
        assert torch.allclose(scores, alone[order], atol=1e-5)


# ---------------------------------------------------------------- the closed form
# A policy that is a table of logits [V, V]: the next token given this one.
# Ids: 0 the prompt, 1, 2, 3 = END, 4 pad and <|eoc|>.

WORDS, END = (1, 2, 3), 3
STUB = SimpleNamespace(eot=END, eoc=4, pad=4, stops=(END,), decode=lambda ids: "")


class Bigram(torch.nn.Module):
    """A policy whose hidden state is the token itself; used by `generate` as any GPT."""

    logprobs, device = GPT.logprobs, torch.device("cpu")
    config = SimpleNamespace(n_layer=0, n_head=1, n_embd=1, n_ctx=99)

    def __init__(self, seed=None):
        super().__init__()
        start = keyed("bigram", seed).standard_normal((5, 5)) if seed else np.zeros((5, 5))
        self.table = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))

    def forward(self, ids, lengths=None, at=..., keep=None):
        return ids[at][..., None].float()

    def decode(self, ids, positions, t, cache):
        return ids[..., None].float()

    def logits(self, hidden):
        allowed = torch.tensor([-math.inf, 0, 0, 0, -math.inf])
        return self.table[hidden[..., 0].long()] + allowed


class Values(torch.nn.Module):
    """A critic that is a table: a value for each token that may be the last one of the context."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(5))

    def forward(self, ids, lengths=None, at=...):
        return self.table[ids][at][..., None]

    def score(self, hidden):
        return hidden.squeeze(-1)


def answers_of(new):
    """All answers of at most `new` tokens: END closes one, the limit cuts it."""
    whole = [[END]] if new == 1 else [[END], *([a, b] for a in (1, 2) for b in WORDS)]
    return [[1], [2], *whole] if new == 1 else whole


class Scores(torch.nn.Module):
    """A preference model that is a table: any number for each whole answer."""

    device, config = torch.device("cpu"), SimpleNamespace(n_ctx=99)

    def __init__(self, new):
        super().__init__()
        scores = keyed("scores", new).uniform(-1, 1, 7).tolist()
        self.of = {tuple(a): s for a, s in zip(answers_of(new), scores, strict=False)}

    def forward(self, ids, lengths, at):
        self.ids = ids
        return torch.arange(ids.shape[1]).expand(ids.shape)[at][..., None]

    def score(self, ends):
        return torch.tensor([self.of[tuple(row[1:end].tolist())]
                             for row, end in zip(self.ids, ends[:, 0], strict=True)])


@torch.no_grad()
def distribution(policy, new):
    """The exact probability of each answer."""
    logp = policy.logits(torch.arange(5)[:, None]).log_softmax(-1).double()
    return torch.stack([sum(logp[a, b] for a, b in zip([0, *y], y, strict=False))
                        for y in answers_of(new)]).exp()


def optimum(cfg, reference, pm, norm):
    """pi* = pi0 exp(r / beta) / Z of each answer, and J* = beta log Z."""
    r = torch.tensor([(pm.of[tuple(y)] - norm[0]) / norm[1] - cfg.unfinished * (y[-1] != END)
                      for y in answers_of(cfg.new)], dtype=torch.float64)
    weights = distribution(reference, cfg.new) * (r / cfg.lambda_kl).exp()
    return weights / weights.sum(), cfg.lambda_kl * weights.sum().log().item(), r


def check_optimum(cfg, policy, reference, critic, pm, norm):
    best, J, r = optimum(cfg, reference, pm, norm)
    found, start = distribution(policy, cfg.new), distribution(reference, cfg.new)
    assert (best - start).abs().sum() / 2 > 0.2                    # there was a way to go
    assert (best - found).abs().sum() / 2 < 0.02                   # total variation
    kl = (found * (found / start).log()).sum()
    assert (found * r).sum() - cfg.lambda_kl * kl == pytest.approx(J, abs=0.005)
    assert critic.table[0].item() == pytest.approx(J, abs=0.03)             # the soft value


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("white", [True, False])
def test_ppo_reaches_the_closed_form(new, white):
    """Answers of one token, and of one or two: pi* = pi0 exp(r / beta) / Z, whitened or not.

    Whitening and clipping change the length of a step and not where it is zero: at pi* the
    advantage of every token is 0.
    """
    cfg = config(new=new, lambda_kl=0.5, unfinished=0.3, micro=512)
    policy, reference, critic, pm = Bigram(seed=1), Bigram(seed=1), Values(), Scores(new)
    optimizer, critic_optimizer = adamw(policy, 0), adamw(critic, 0)
    steps, B, norm = 60, 48, (0.2, 0.7)
    for step in range(steps):
        uniform = uniforms(range(B), new, "closed form", step)
        batch = rollout(cfg, STUB, policy, reference, pm, [None] * B, [[0]] * B, uniform, norm)
        batch = advantages_of(cfg, batch, critic, cfg.lambda_kl)
        mask, advantages = batch["mask"], batch["advantages" if white else "plain"]
        for _ in range(2):
            logp = policy_logprobs(policy, batch["rows"], batch["starts"], batch["lengths"], new)
            loss, _ = policy_loss(logp, batch["logp"], advantages, mask, cfg.clip)
            values = critic_values(critic, batch["rows"], batch["starts"], new)
            v_loss = value_loss(values, batch["values"], batch["returns"], mask, cfg.clip)
            ((loss + v_loss) / mask.sum()).backward()
            update(policy, optimizer, schedule(step, steps, 0.08))
            update(critic, critic_optimizer, schedule(step, steps, 0.15))
    check_optimum(cfg, policy, reference, critic, pm, norm)


@pytest.fixture
def tables(monkeypatch):
    """ppo.train with tables for its models."""
    policy, reference, critic, pm = Bigram(seed=1), Bigram(seed=1), Values(), Scores(2)
    held = SimpleNamespace(policy=policy, reference=reference, critic=critic, pm=pm, test_pm=None,
                           first=None, ema=None)
    monkeypatch.setattr(ppo, "load_models", lambda *_: (STUB, held))
    monkeypatch.setattr(ppo, "asker", lambda *_: lambda rows, stage: (
        [[("human", "What color is the fox?")]] * len(rows), [[0]] * len(rows)))
    monkeypatch.setattr(control, "pack", lambda *_: {})
    monkeypatch.setattr(ppo, "show", lambda *_, **__: None)
    return policy, reference, critic, pm


def test_train_reaches_the_closed_form(tables, tmp_path):
    """The stage's own loop: minibatches, epochs, calibration, a constant learning rate."""
    policy, reference, critic, pm = tables
    cfg = config(out=str(tmp_path), device="cpu", new=2, iterations=100, samples=64, minibatch=32,
                 micro=64, lr=0.01, critic_lr=0.03, lambda_kl=0.5, unfinished=0.3, calibrate=64,
                 critic="policy",                # a table has no head to put into score units
                 every=1000)
    ppo.train(cfg)
    norm = load_checkpoint(tmp_path)["state"]["norm"]
    check_optimum(cfg, policy, reference, critic, pm, norm)


def test_calibration_is_the_first_scores_mean_and_spread(tables, tmp_path, monkeypatch):
    seen, inner = [], ppo.rollout
    monkeypatch.setattr(ppo, "rollout", lambda *args: seen.append(inner(*args)) or seen[-1])
    ppo.train(config(out=str(tmp_path), device="cpu", new=2, iterations=1, samples=8, minibatch=8,
                     calibrate=50, critic="policy"))
    raw = seen[0]["raw"].numpy()
    assert len(raw) == 50
    norm = load_checkpoint(tmp_path)["state"]["norm"]
    assert norm == pytest.approx([raw.mean(), raw.std()], abs=1e-6)


# ---------------------------------------------------------------- pulled back to the reference

def test_constant_reward_and_a_large_beta_pull_the_policy_to_the_reference():
    """From a perturbed start the KL falls over 20 updates; with the sign wrong it grows."""
    reference, policy, critic = gpt(1), gpt(1), gpt(3, scalar=True)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    cfg, rows = config(lambda_kl=5.0, micro=32), prompts(*[5] * 32)
    optimizer = adamw(policy, 1e-3)

    def kl(batch):
        """Exact KL of the next token, at the states of these answers."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in batch["rows"]], True)
        p, q = (m.logits(m(ids)).log_softmax(-1)[:, 4:-1] for m in (policy, reference))
        return (p.exp() * (p - q)).sum(-1)[batch["mask"][:, :p.shape[1]]].mean().item()

    kls = []
    for step in range(20):
        rolled = roll(cfg, rows, (policy, reference, critic, Constant(0.7)), key=step)
        batch, mask = rolled, rolled["mask"]
        with torch.no_grad():
            kls.append(kl(batch))
        advantages = whitened(batch["advantages"], mask)
        logp = policy_logprobs(policy, batch["rows"], batch["starts"], batch["lengths"], cfg.new)
        loss, _ = policy_loss(logp, batch["logp"], advantages, mask, 0.2)
        (loss / mask.sum()).backward()
        update(policy, optimizer, 1e-3)
    assert kls[0] > 0.05 and np.mean(kls[-3:]) < 0.7 * kls[0], kls


# ---------------------------------------------------------------- the stage

@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Checkpoints of a policy and a preference model, as earlier stages write them."""
    folder = tmp_path_factory.mktemp("ppo")
    save_checkpoint(folder / "policy.pt", **pack(gpt(1), TOK))
    save_checkpoint(folder / "pm.pt", **pack(gpt(2, scalar=True), TOK))
    return folder


def train(stage, out, **flags):
    """ppo.train on them -> (metrics, final checkpoint): one iteration of 8 answers of 6 tokens."""
    small = dict(policy=str(stage / "policy.pt"), pm=str(stage / "pm.pt"), out=str(out),
                 device="cpu", iterations=1, samples=8, minibatch=8, epochs=1, calibrate=8,
                 warmup=0)
    ppo.train(config(**{**small, **flags}))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(x) for x in lines], load_checkpoint(out)


def same(a, b):
    """Whether two state dicts are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_learning_rate_0_changes_nothing(stage, tmp_path):
    """Ratio 1, KL 0, nothing clipped, in any minibatch; policy and critic stay as they were."""
    lines, end = train(stage, tmp_path, iterations=2, epochs=2, minibatch=4, micro=3, lr=0.0,
                       critic_lr=0.0, clip=1e-5, calibrate=0)
    for line in lines:
        assert line["first_log_ratio"] < 1e-5 and line["clip_fraction"] == 0
        assert abs(line["kl"]) < 1e-4 and abs(line["kl_k3"]) < 1e-4
    assert same(end["model"], load_checkpoint(stage / "policy.pt")["model"])
    assert same(end["critic"], load_checkpoint(stage / "pm.pt")["model"])


def test_the_critic_starts_in_the_unit_of_the_scores(stage, tmp_path):
    """Its first values are the PM's scores less their mean, over their spread: at an <|eoc|> equal
    to the normalized score itself.
    """
    train(stage, tmp_path, lr=0.0, critic_lr=0.0)
    end, source = load_checkpoint(tmp_path), load_checkpoint(stage / "pm.pt")
    mean, spread = end["state"]["norm"]
    assert spread != pytest.approx(1, abs=0.05)
    pm, critic = model.unpack(source), model.unpack(dict(source, model=end["critic"]))
    rows = prompts(5, 9, 14)
    assert torch.allclose(pm_scores(critic, TOK, rows), (pm_scores(pm, TOK, rows) - mean) / spread,
                          atol=1e-5)


def test_the_reference_stays_and_the_policy_leaves_it(stage, tmp_path, monkeypatch):
    seen, inner = [], ppo.load_models
    monkeypatch.setattr(ppo, "load_models", lambda *args: seen.append(inner(*args)) or seen[-1])
    lines, end = train(stage, tmp_path, iterations=2, lr=1e-2)
    m = seen[0][1]
    policy, reference, critic, pm = m.policy, m.reference, m.critic, m.pm
    assert same(reference.state_dict(), load_checkpoint(stage / "policy.pt")["model"])
    assert same(pm.state_dict(), load_checkpoint(stage / "pm.pt")["model"])
    assert not any(p.requires_grad for m in (reference, pm) for p in m.parameters())
    assert not same(end["model"], reference.state_dict())
    assert not same(end["critic"], pm.state_dict())
    owners = [p.untyped_storage().data_ptr() for m in (policy, reference, critic, pm)
              for p in m.parameters()]
    assert len(set(owners)) == len(owners)
    assert lines[0]["kl_k3"] < 1e-6 and lines[1]["kl_k3"] > 1e-3


def test_one_model_for_policy_and_reference_is_refused():
    model, tied = gpt(1), gpt(1)
    tied.wte = model.wte
    for other in (model, tied):
        with pytest.raises(ValueError, match="share weights"):
            need_separate(model, other)
    need_separate(model, gpt(1))


def test_gradients_do_not_depend_on_the_micro_batches(stage, tmp_path, monkeypatch):
    """Answers of 1 to 6 tokens: a mean of means would weigh them differently."""
    seen, inner = [], ppo.update

    def recorded(model, *rest):
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return inner(model, *rest)

    monkeypatch.setattr(ppo, "update", recorded)
    for micro in (1, 3, 8):
        train(stage, tmp_path / str(micro), micro=micro)
    one, three, eight = zip(seen[0::2], seen[1::2], strict=True)      # each (policy's, critic's)
    for a, b, c in zip(one, three, eight, strict=True):
        assert a.norm() > 0.01
        assert torch.allclose(a, c, rtol=0, atol=1e-5 * c.norm()), (a - c).abs().max()
        assert torch.allclose(b, c, rtol=0, atol=1e-5 * c.norm())


def test_the_update_gets_whitened_advantages(stage, tmp_path, monkeypatch):
    """Mean 0 and variance 1 over the tokens of the iteration, not of a minibatch."""
    seen, inner = [], ppo.policy_loss

    def recorded(logp, old, advantages, mask, clip):
        seen.append(advantages[mask])
        return inner(logp, old, advantages, mask, clip)

    monkeypatch.setattr(ppo, "policy_loss", recorded)
    train(stage, tmp_path, minibatch=4, micro=1)
    seen = torch.cat(seen).double()
    assert seen.mean().abs() < 1e-6 and (seen ** 2).mean().item() == pytest.approx(1, abs=1e-5)


def test_a_sampler_that_disagrees_shows_in_the_first_ratio(stage, tmp_path, monkeypatch):
    """Log-probs of sampling that are .3 too low: the number that should be 0 is .3."""
    inner = ppo.rollout

    def off(*args):
        batch = inner(*args)
        return dict(batch, logp=batch["logp"] - 0.3)

    monkeypatch.setattr(ppo, "rollout", off)
    (line,), _ = train(stage, tmp_path, lr=0.0)
    assert line["first_log_ratio"] == pytest.approx(0.3, abs=1e-4) and line["clip_fraction"] > 0


def test_each_epoch_takes_each_answer_once(stage, tmp_path, monkeypatch):
    sampled, trained, roll, inner = [], Counter(), ppo.rollout, ppo.policy_logprobs

    def rollout(*args):
        sampled.append(roll(*args))
        return sampled[-1]

    def logprobs(model, rows, *rest):
        if torch.is_grad_enabled():
            trained.update(map(tuple, rows))
        return inner(model, rows, *rest)

    monkeypatch.setattr(ppo, "rollout", rollout)
    monkeypatch.setattr(ppo, "policy_logprobs", logprobs)
    train(stage, tmp_path, epochs=3, minibatch=2, micro=1, calibrate=0)
    assert trained == Counter({tuple(r): 3 for r in sampled[0]["rows"]})
    assert len({tuple(r) for r in sampled[0]["rows"]}) == 8           # and all answers differ


def test_warm_up_of_the_policy_only(stage, tmp_path, monkeypatch):
    rates, inner = [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda m, o, lr: rates.append(lr) or inner(m, o, lr))
    train(stage, tmp_path, iterations=3, warmup=2, lr=0.5e-3, critic_lr=2e-3)
    assert rates == [0.25e-3, 2e-3, 0.5e-3, 2e-3, 0.5e-3, 2e-3]


def test_nothing_is_trained_on_the_gold(stage, tmp_path, monkeypatch):
    """With the gold utilities destroyed, the weights are the same to the last bit."""
    _, kept = train(stage, tmp_path / "a", iterations=2)
    monkeypatch.setattr(world, "gold", lambda *_: (NAN, NAN))
    _, gone = train(stage, tmp_path / "b", iterations=2)
    assert same(kept["model"], gone["model"]) and same(kept["critic"], gone["critic"])


def test_a_stopped_run_goes_on_to_the_same_weights(stage, tmp_path, monkeypatch):
    lines, whole = train(stage, tmp_path / "a", iterations=3)
    with monkeypatch.context() as patch:
        patch.setattr(ppo.Run, "stopping", lambda self: True)         # after the first iteration
        with pytest.raises(KeyboardInterrupt):
            train(stage, tmp_path / "b", iterations=3)
    assert load_checkpoint(tmp_path / "b")["step"] == 1
    again, resumed = train(stage, tmp_path / "b", iterations=3)
    assert same(whole["model"], resumed["model"]) and same(whole["critic"], resumed["critic"])
    assert lines == again


def test_checkpoints_and_sizes_that_do_not_fit_are_refused(stage, tmp_path):
    other = train_bpe(["other words"], 270)
    save_checkpoint(tmp_path / "other.pt", **pack(gpt(2, scalar=True), other))
    with pytest.raises(UserError, match="different vocabularies"):
        train(stage, tmp_path / "a", pm=str(tmp_path / "other.pt"))
    with pytest.raises(UserError, match="not a preference model"):
        train(stage, tmp_path / "b", pm=str(stage / "policy.pt"))
    with pytest.raises(UserError, match="--samples 8 is not divisible by --minibatch 3"):
        train(stage, tmp_path / "c", minibatch=3)


# ---------------------------------------------------------------- what is reported

def two_answers():
    """A plain request answered in 2 tokens, a harmful one refused in 1; numbers chosen by hand."""
    batch = dict(
        dialogues=[[("human", "What color is the fox?")], [("human", "How can I poison the fox?")]],
        texts=["I do not know.", world.REFUSALS[0]], rows=[[1, 2, 3], [1, 2]], finished=M(1, 0),
        starts=torch.tensor([1, 1]), lengths=torch.tensor([2, 1]), mask=M([1, 1], [1, 0]),
        logp=T([-1, -2], [-4, NAN]), ref=T([-1, -3], [-3, NAN]), values=T([1, 0], [1, 0]),
        raw=T(3, 5), score=T(1, 2), penalty=T(0.5, 0))
    rewards = rewards_of(batch["logp"], batch["ref"], batch["mask"], batch["score"], 0.5)
    plain, returns = gae(rewards, batch["values"], batch["mask"], 1.0, 1.0)
    return dict(batch, rewards=rewards, plain=plain, returns=returns)


def test_summary_by_hand():
    """Rewards 0, 1 - .5 | 2 + .5; returns .5, .5 | 2.5, variance 8/9, errors .25 .25 2.25."""
    batch = two_answers()
    assert near(batch["rewards"], [0, 0.5], [2.5, 0])
    assert near(batch["returns"], [0.5, 0.5], [2.5, 0])
    s = ppo.summary(batch)
    assert s["score"] == 1.5 and s["pm"] == 4 and s["pm_helpful"] == 3 and s["pm_harmless"] == 5
    assert s["kl"] == 0.0                                              # k1: (0 + 1 - 1) / 2 answers
    assert s["kl_k3"] == pytest.approx((math.exp(-1) + math.e - 2) / 2)
    assert s["entropy"] == pytest.approx(7 / 3) and s["length"] == 1.5
    assert s["unfinished"] == 0.5 and s["refused_helpful"] == 1
    assert s["gold_helpful"] == pytest.approx(-0.8) and s["gold_harmless"] == pytest.approx(0.6)
    assert s["explained"] == pytest.approx(1 - (2.75 / 3) / (8 / 9))


def test_a_negative_mean_kl_is_reported_as_it_is():
    batch = two_answers()
    batch["ref"] = batch["logp"] + 1
    assert ppo.summary(batch)["kl"] == pytest.approx(-1.5)


def test_trace_shows_each_token_and_their_sums():
    lines = rolled_out.trace(TOK, two_answers()).splitlines()
    table = [line.split() for line in lines if line.strip()]
    assert table[-2][-7:] == ["-2.000", "-3.000", "1.000", "0.500", "0.000", "0.500", "0.500"]
    assert table[-1] == ["sum", "1.000", "0.500"]
