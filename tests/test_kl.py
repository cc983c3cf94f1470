"""Each variant of the KL in ppo.py ends at its own optimum (docs/kl.md), on tables; exact_kl.

The steps are ppo.py's and control.py's own (claims/closed_forms.solve calls them); the optima are
computed here from the derivations of docs/kl.md. Letters as in ppo.py; p0 is pi0.

Mutations tried, each caught here: the KL loss not over the spread, detached, k2 and k3 exchanged;
k2 without its half, k3 backwards; the KL in the reward for every `kl`, doubled, its sign turned;
the reference without the temperature; cap ignored; the coefficient steered the wrong way; a reset
half way, an anchor that stays; ptx doubled, its sign turned; a critic that doesn't learn, half of
the next value; exact_kl's arguments swapped, one token late, without the temperature; in K03 a
gradient through the samples' weights, a lattice of two rounds.
"""

import math

import pytest
import torch

from claims import closed_forms
from claims.closed_forms import (Policy, answers_of, config, distance, distribution, drawn, lattice,
                                 objective, solve, tables)
from common import keyed
from model import GPT, GPTConfig, response_mask
from ppo import advantages_of, kl_loss
from rollout import exact_kl, kl_estimates, masked_sum, policy_logprobs

BETA = 0.2


# ---------------------------------------------------------------- the optima

def tilted(p0, r, beta=BETA):
    """p0 exp(r / beta) / Z."""
    return torch.softmax(p0.log() + r / beta, -1)


def forward(p0, r, beta=BETA):
    """The optimum of E[r] - beta KL(p0 || p): beta p0 / (mu - r), mu by bisection."""
    low, high = r.max(), r.max() + beta
    for _ in range(60):
        mu = (low + high) / 2
        low, high = (mu, high) if (beta * p0 / (mu - r)).sum() > 1 else (low, mu)
    return beta * p0 / (high - r)


def backwards(rule, table, r, soft=False):
    """The policy that is rule(p0, Q) at each state of answers of up to two tokens, from the last
    token back; a state is worth its expected reward, or what it is worth less the KL there (soft).
    """
    p0 = torch.from_numpy(table)[:, 1:5].softmax(-1)                    # next token after a token
    last = [rule(p0[a], q) for a, q in zip((1, 2, 3), r[1:].view(3, 4))]
    worth = [(p * (q - (BETA * (p / p0[a]).log() if soft else 0))).sum()
             for a, p, q in zip((1, 2, 3), last, r[1:].view(3, 4))]
    first = rule(p0[0], torch.stack([*worth, r[0]]))
    return torch.cat([first[3:], *(first[a] * last[a] for a in range(3))])


def argmax(r):
    return (r == r.max()).double()


def mixed(p0, r, texts, g, beta=BETA):
    """The optimum of E[r] - beta KL(p || p0) + g E_texts[log p]: at each answer
    beta log p - g texts / p = r + beta log p0 - mu, whose left side grows with p; mu by bisection.
    """
    low, high = torch.tensor(-9.0), torch.tensor(9.0)
    for _ in range(50):
        mu, small, large = (low + high) / 2, torch.full_like(r, -40), torch.full_like(r, 5)
        for _ in range(50):                                             # log p
            x = (small + large) / 2
            over = beta * x - g * texts * (-x).exp() > r + beta * p0.log() - mu
            small, large = torch.where(over, small, x), torch.where(over, x, large)
        low, high = (mu, high) if x.exp().sum() > 1 else (low, mu)
    return x.exp()


# ---------------------------------------------------------------- training

def problem(new, seed=4):
    """Table of pi0, models, exact pi0 of the answers, their rewards."""
    table, r = drawn("KL", seed, new)
    r = 0.4 * torch.from_numpy(r)
    m = tables(table, r, new)
    return table, m, distribution(m.reference, new), r


def trained(m, new, mix=None, **knobs):
    """The policy's distribution over answers, and the last lambda_kl, after PPO."""
    cfg = config(**{**dict(samples=64 * new, iterations=40, lr=0.15, lambda_kl=BETA), **knobs},
                 new=new)
    lambda_kl = solve(cfg, m, mix)
    return distribution(m.policy, new, cfg.temperature), lambda_kl


def ends_at(best, found, *others):
    """Whether the policy ends at `best` and far from other candidates."""
    assert best.sum().item() == pytest.approx(1, abs=1e-6)
    assert distance(found, best) < 0.02
    assert all(distance(found, other) > 0.05 for other in others)


# ---------------------------------------------------------------- the KL in the reward

@pytest.mark.parametrize("new, knobs", [(1, {}), (2, {}),
                                        (2, dict(epochs=4, value_clip=0.02, lr=0.1))], ids=str)
def test_k1_in_the_reward_ends_at_the_closed_form(new, knobs):
    _, m, p0, r = problem(new)
    found, _ = trained(m, new, **knobs)
    ends_at(tilted(p0, r), found, p0)
    J = BETA * (p0 * (r / BETA).exp()).sum().log().item()
    assert objective(found, p0, r, BETA) == pytest.approx(J, abs=0.005)
    assert m.critic.table[0].item() == pytest.approx(J, abs=0.02)        # the soft value


def test_the_closed_form_is_the_soft_value_backwards():
    table, _, p0, r = problem(2)
    assert distance(backwards(tilted, table, r, soft=True), tilted(p0, r)) < 1e-7


def test_at_another_temperature_pi_and_pi0_both_have_it():
    _, m, plain, r = problem(2)
    p0 = distribution(m.reference, 2, 0.7)
    found, _ = trained(m, 2, temperature=0.7)
    ends_at(tilted(p0, r), found, tilted(plain, r))


def test_a_cap_tilts_by_the_capped_score():
    _, m, p0, r = problem(2)
    ends_at(tilted(p0, r.clamp(-0.2, 0.2)), trained(m, 2, cap=0.2)[0], tilted(p0, r))


def test_an_adapted_coefficient_ends_where_the_kl_is_the_target():
    """The closed form of the one beta that has that KL, found by bisection."""
    _, m, p0, r = problem(1)
    low, high = 0.01, 10.0
    for _ in range(60):
        beta = (low * high) ** 0.5
        p = tilted(p0, r, beta)
        low, high = (beta, high) if (p * (p / p0).log()).sum() > 0.2 else (low, beta)
    found, lambda_kl = trained(m, 1, kl_target=0.2, kl_gain=0.05, lambda_kl=0.3, lr=0.2,
                               iterations=70)
    ends_at(p, found, tilted(p0, r, 0.3))
    assert lambda_kl == pytest.approx(beta, rel=0.05)


def test_a_reset_tilts_again():
    """n rounds: pi0 exp(n r / beta)."""
    _, m, p0, r = problem(1)
    once, _ = trained(m, 1, reset=40)
    assert torch.equal(m.reference.table, m.policy.table)
    ends_at(tilted(p0, r), once, tilted(p0, 2 * r))
    ends_at(tilted(p0, 2 * r), trained(m, 1)[0], tilted(p0, r))


def test_an_anchor_that_follows_ends_at_the_argmax():
    _, m, p0, r = problem(1)
    found, _ = trained(m, 1, anchor=0.8, decay="constant")
    ends_at(argmax(r), found, tilted(p0, r))


def test_without_a_kl_the_policy_ends_at_the_argmax():
    _, m, p0, r = problem(2)
    ends_at(argmax(r), trained(m, 2, kl="none", lr=0.25)[0], tilted(p0, r))


# ---------------------------------------------------------------- the KL as a loss

def test_kl_loss_by_hand():
    """pi = (1/2, 1/2), pi0 = (.9, .1), a pad: sums of k2 and k3; slopes d and 1 - e^-d."""
    ref, mask = torch.tensor([[.9, .1, 7.]]).log(), torch.tensor([[True, True, False]])
    for kind, value, slopes in (("k2", 1.4678, [-0.5878, 1.6094, 0]),
                                ("k3", 1.0217, [-0.8000, 0.8000, 0])):
        logp = torch.tensor([[.5, .5, .5]]).log().requires_grad_()
        loss = kl_loss(kind, logp, ref, mask)
        loss.backward()
        assert loss.item() == pytest.approx(value, abs=1e-4)
        assert logp.grad[0].tolist() == pytest.approx(slopes, abs=1e-4)
    assert kl_loss("reward", logp, ref, mask) == kl_loss("none", logp, ref, mask) == 0


def test_k2_as_a_loss_has_the_same_optimum_for_one_token():
    _, m, p0, r = problem(1)
    ends_at(tilted(p0, r), trained(m, 1, kl="k2")[0], forward(p0, r))


def test_k3_as_a_loss_has_another_optimum_even_for_one_token():
    _, m, p0, r = problem(1)
    ends_at(forward(p0, r), trained(m, 1, kl="k3")[0], tilted(p0, r))


def unwhitened(*args):
    batch = advantages_of(*args)
    assert not 0.7 < batch["spread"] < 1.4                # where whitening would change nothing
    return dict(batch, advantages=batch["plain"], spread=1.0)


@pytest.mark.parametrize("kl, rule, white", [("k2", tilted, True), ("k2", tilted, False),
                                             ("k3", forward, True)])
def test_as_a_loss_over_two_tokens_no_token_pays_for_later_kl(kl, rule, white, monkeypatch):
    """Whitened or not: lambda_kl over the advantages' spread keeps the unit of the score."""
    table, m, p0, r = problem(2)
    if not white:
        monkeypatch.setattr(closed_forms, "advantages_of", unwhitened)
    found, _ = trained(m, 2, kl=kl)
    ends_at(backwards(rule, table, r), found, tilted(p0, r),
            backwards(forward if kl == "k2" else tilted, table, r))
    J = BETA * (p0 * (r / BETA).exp()).sum().log().item()
    assert objective(found, p0, r, BETA) < J - 0.02


# ---------------------------------------------------------------- PPO-ptx

TEXTS = torch.tensor([1, 2, 8, 5]) / 16                      # shares of the four answers


def texts_of(rows):
    """What ppo.mixture gives: this rank's texts, the number of tokens with a loss on all ranks."""
    assert len(rows) == 64
    texts = [[0, *y] for y, n in zip(answers_of(1), (64 * TEXTS).tolist()) for _ in range(int(n))]
    return texts, len(texts)


def chi(p):
    """Spread over answers of texts / p."""
    return ((TEXTS ** 2 / p).sum() - 1).sqrt().item()


def test_ptx_moves_the_optimum_by_gamma_times_the_spread():
    """The gradient of ptx is not over the spread: its weight is g = ptx * spread, and at the
    optimum spread = g * chi, so ptx = 1 / chi.
    """
    _, m, p0, r = problem(1)
    best = mixed(p0, r, TEXTS, g=0.1)
    assert distance(mixed(p0, r, TEXTS, g=0.0), tilted(p0, r)) < 1e-6
    ends_at(best, trained(m, 1, mix=texts_of, ptx=1 / chi(best))[0], tilted(p0, r))


def test_a_small_ptx_moves_no_optimum():
    """Less than 1 / chi at the closed form, which whitened advantages then hold."""
    _, m, p0, r = problem(1)
    best = tilted(p0, r)
    ends_at(best, trained(m, 1, mix=texts_of, ptx=0.5 / chi(best))[0], p0)


# ---------------------------------------------------------------- the KL of a token, exactly

def gpt(seed):
    """A lively GPT of 5 ids."""
    model, generator = GPT(GPTConfig(5, 16, 1, 1, 8)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5, generator=generator)
    return model


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_kl_by_enumeration(temperature):
    """Prompts of 1 and 3 tokens, answers of 3 and 1; ids that don't exist have no share."""
    policy, reference = gpt(1), gpt(2)
    rows, starts, lengths = [[4, 1, 0, 2], [3, 3, 1, 0]], [1, 3], [3, 1]
    found = exact_kl(policy, reference, rows, *map(torch.tensor, (starts, lengths)), 3, temperature)
    for row, start, length, kls in zip(rows, starts, lengths, found.tolist()):
        for j in range(length):
            p, q = ([math.exp(x / temperature) for x in
                     m.logits(m(torch.tensor([row[:start + j]]))[:, -1])[0, :5].tolist()]
                    for m in (policy, reference))
            want = sum(a / sum(p) * math.log(a / sum(p) * sum(q) / b) for a, b in zip(p, q))
            assert want > 0.01 and kls[j] == pytest.approx(want, abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["gpt", "table"])
def test_exact_kl_has_the_mean_of_k1(kind, temperature):
    """Over all answers, each with its probability; the table's are of one token or two."""
    table = keyed("KL tables").standard_normal((2, 6, 6))
    policy, reference = (gpt(1), gpt(2)) if kind == "gpt" else map(Policy, table)
    answers = answers_of(2) if kind == "table" else [(a, b) for a in range(5) for b in range(5)]
    rows, lengths = [[0, *y] for y in answers], torch.tensor([len(y) for y in answers])
    told = (rows, torch.ones_like(lengths), lengths, 2, temperature)
    logp, ref = (policy_logprobs(m, *told) for m in (policy, reference))
    mask = response_mask(torch.zeros_like(lengths), lengths, 2)
    p = masked_sum(logp, mask).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    k1, k2, k3 = ((p * masked_sum(k, mask)).sum().item() for k in kl_estimates(logp, ref))
    exact = masked_sum(exact_kl(policy, reference, *told), mask)
    assert (p * exact).sum().item() == pytest.approx(k1, abs=1e-5) == k3 and k1 > 0.1
    assert abs(k2 - k1) > 0.01
    spread = [(p * (x - k1) ** 2).sum() for x in (exact, masked_sum(logp - ref, mask))]
    assert spread[0] < spread[1] / 2                                      # and less noise


# ---------------------------------------------------------------- the claims

def test_a_lattice_fills_evenly():
    for new in (1, 2):
        u = lattice(10, new, "x")
        assert u.shape == (10, new) and (u >= 0).all() and (u < 1).all()
        assert (u[:, 0].sort().values.diff() - 0.1).abs().max() < 1e-6
    assert not torch.equal(u, lattice(10, 2, "y"))


def test_distribution_by_hand():
    """First token 1/4 each; after 1: END at 3/6."""
    table = torch.zeros(6, 6)
    table[1, 4] = math.log(3)
    found = dict(zip(answers_of(2), distribution(Policy(table), 2).tolist()))
    assert found[(4,)] == pytest.approx(1 / 4) and found[1, 4] == pytest.approx(1 / 8)
    assert found[1, 2] == pytest.approx(1 / 24) and found[2, 4] == pytest.approx(1 / 16)
    assert sum(found.values()) == pytest.approx(1) and len(found) == 13


def test_verdicts():
    def words(judge, rows, **wrong):
        rows = [{**row, "seed": s} for s in range(3) for row in rows]
        return judge(rows).word, judge([{**rows[0], **wrong}, *rows[1:]]).word

    one = dict(tokens=1, start=0.5, tv=0.001, J=0.3, best=0.3, value=0.3)
    for wrong in (dict(tv=0.02), dict(J=0.28)):
        assert words(closed_forms.verdict_k01, [one], **wrong) == ("held", "not held")
    powers = [dict(ratio=a, power=1 + a, entropy=1.0) for a in (0.0, 0.5, 1.0)]
    for wrong in (dict(power=1.1), dict(power=0.94)):
        assert words(closed_forms.verdict_k06, powers, **wrong) == ("held", "not held")
    sizes = [dict(size=s, **closed_forms.estimators(0, s, pairs=9)) for s in (2.0, 0.1)]
    for wrong in (dict(k1_bias=-0.01), dict(k3_bias=0.01), dict(k1_norm=0.01), dict(k2_bias=0.05),
                  dict(k2_off_reverse=0.01), dict(k3_off_forward=0.01), dict(k3_off_reverse=0.0)):
        assert words(closed_forms.verdict_k03, sizes, **wrong) == ("held", "not held")
    assert words(closed_forms.verdict_k03, sizes[::-1], k3_sd=99.0) == ("held", "not held")
