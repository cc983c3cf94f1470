"""bradley_terry.py: scores by hand, scipy's optimum, likelihoods at the intervals' ends, coverage.

Proved alive by: pseudo-wins between those who never met, for the winner alone, always, or only if
asked for; another unit, 174 for it; wins over oneself; bounds changed over or everywhere; 90% or
twice the drop; other scores not fitted again at an end; an interval without its score; 0 across
groups; games of the wins alone; an early end of Newton's method; half a pseudo-win in the
intervals; paths of two games at most; the reference's place in its group; negative counts, nan.
"""

import itertools

import numpy as np
import pytest
from scipy import optimize, special

from bradley_terry import (DROP, NAT, fit, interval, likelihood, maximum, of_pm, of_win_rate,
                           scores, win_rate)

CHAIN = [[0, 3, 0], [0, 0, 2], [0, 1, 0]]    # 0 beat 1 always; 1 and 2 beat each other


def random_wins(seed, n=4, games=12):
    rng = np.random.default_rng(seed)
    r = rng.normal(0, 1, n)
    played = rng.poisson(games, (n, n)) + 1
    W = np.triu(rng.binomial(played, special.expit(r[:, None] - r)), 1)
    return W + np.tril((np.triu(played, 1) - W).T, -1) + 0.5 * (1 - np.eye(n))   # and a tie each


def scipys(W, held):
    """scipy's largest log-likelihood and its scores, those of held {i: nats} fixed."""
    free = [i for i in range(len(W)) if i not in held]

    def whole(x):
        r = np.zeros(len(W))
        r[free], r[list(held)] = x, list(held.values())
        return r

    def loss(x):
        r = whole(x)
        return -(np.asarray(W) * special.log_expit(r[:, None] - r)).sum()

    if not free:
        return -loss([]), whole([])
    found = optimize.minimize(loss, np.zeros(len(free)), method="BFGS", options=dict(gtol=1e-8))
    return -found.fun, whole(found.x)


# ---------------------------------------------------------------- the unit

def test_the_unit_by_hand():
    """400 points are odds of 10 to 1; a nat, or a PM point, is 174."""
    assert win_rate(0) == 0.5 and win_rate(400) == pytest.approx(10 / 11)
    assert win_rate([-400, 800]) == pytest.approx([1 / 11, 100 / 101])
    assert of_win_rate(0.75) == pytest.approx(190.848502)
    assert of_win_rate([0.0, 0.5, 1.0]).tolist() == [-np.inf, 0, np.inf]
    assert of_win_rate(1e-300) == pytest.approx(-120000)
    assert of_pm(1.0) == pytest.approx(173.7178) == NAT
    d = np.linspace(-5, 5, 7)
    assert win_rate(of_pm(d)) == pytest.approx(special.expit(d))     # an identity
    assert of_win_rate(win_rate(d * 100)) == pytest.approx(d * 100)


# ---------------------------------------------------------------- scores

def test_two_players_by_hand():
    found = fit([[0, 1], [3, 0]])
    assert found["elo"] == pytest.approx([0, 190.848502], abs=1e-6)
    assert (found["games"], found["separated"], found["note"]) == ([4, 4], False, "")
    assert found["groups"] == [[0, 1]]
    assert fit([[0, 1], [1, 0]])["elo"] == [0, 0]
    assert fit([[7, 1], [3, 9]])["elo"] == found["elo"]              # nobody plays against oneself
    assert fit([[0, 0.5], [1.5, 0]])["elo"] == pytest.approx(found["elo"])   # halves are ties


def test_three_players_by_hand():
    """Odds 2, 3 and 6 to 1 are those of r = ln 6, ln 3, 0: the maximum, whatever the counts."""
    W = [[0, 2, 12], [1, 0, 3], [2, 1, 0]]
    assert scores(W, 2)[0] == pytest.approx(NAT * np.log([6, 3, 1]), abs=1e-9)
    assert scores(W)[0] == pytest.approx(NAT * np.log([1, 1 / 2, 1 / 6]), abs=1e-9)
    cycle = [[0, 2, 1], [1, 0, 2], [2, 1, 0]]                        # nobody is better
    assert scores(cycle)[0] == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_scipys(seed):
    W = random_wins(seed)
    top, r = scipys(W, {1: 0.0})
    assert scores(W, 1)[0] / NAT == pytest.approx(r, abs=1e-5)
    assert likelihood(W, maximum(W, {1: 0.0})) == pytest.approx(top, abs=1e-9)
    assert likelihood(W, maximum(W, {1: 0.0})) >= top - 1e-12


def test_the_gradient_is_0_to_the_last_digit():
    """Wins are as many as are expected: what the most likely scores mean. Far start included."""
    for W in (random_wins(5, 6), np.array([[0, 1, 0], [99999, 0, 1], [0, 99999, 0]])):
        elo = scores(W)[0]
        expected = ((W + W.T) * win_rate(elo[:, None] - elo)).sum(1)
        assert W.sum(1) == pytest.approx(expected - np.diag(W + W.T) / 2, abs=1e-8)


def test_names_and_order_do_not_matter():
    W = random_wins(7)
    whole = fit(W, 2)
    for order in itertools.permutations(range(4)):
        own = fit(W[np.ix_(order, order)], order.index(2))
        for key in ("elo", "low", "high", "games"):
            assert own[key] == pytest.approx([whole[key][i] for i in order], abs=1e-7)
    assert scores(10 * W)[0] == pytest.approx(scores(W)[0])


# ---------------------------------------------------------------- intervals

def test_an_interval_of_two_players_by_hand():
    """3 wins to 1: 3 log p + log(1 - p) is 1.9207 under its largest value at both ends."""
    low, high = interval([[0, 1], [3, 0]], 1, 0)
    assert DROP == pytest.approx(1.96 ** 2 / 2, abs=1e-4)
    for end in (low, high):
        p = win_rate(end)
        fall = 3 * np.log(0.75 / p) + np.log(0.25 / (1 - p))
        assert fall == pytest.approx(1.920729, abs=1e-6)
    assert low < 190.8 < high
    assert interval([[0, 1], [3, 0]], 0, 1) == pytest.approx((-high, -low))
    assert fit([[0, 1], [3, 0]])["low"] == [0, low] and fit([[0, 1], [3, 0]])["high"] == [0, high]


@pytest.mark.parametrize("pair", [(0, 1), (3, 1), (2, 0)])
def test_the_likelihood_falls_by_192_at_the_ends(pair):
    """With all other scores at their best by scipy; any pair, not only those to a reference."""
    i, j = pair
    W = random_wins(11)
    top, r = scipys(W, {j: 0.0})
    low, high = interval(W, i, j)
    assert low < r[i] * NAT < high
    for end in (low, high):
        there, _ = scipys(W, {j: 0.0, i: end / NAT})
        assert top - there == pytest.approx(1.920729, abs=1e-5)


def test_many_games_are_wald():
    W = random_wins(3, 4, 20000)
    elo, (low, high) = scores(W, 0)[0][2], interval(W, 2, 0)
    assert high - elo == pytest.approx(elo - low, rel=0.02)
    two = interval([[0, 5000], [5000, 0]], 0, 1)[1]
    assert two == pytest.approx(NAT * 1.959964 / np.sqrt(2500), rel=1e-3)


def test_intervals_cover_the_truth_in_95_of_100():
    rng, truth = np.random.default_rng(0), np.array([0.0, 0.5, -1.0])
    p, inside = special.expit(truth[:, None] - truth), []
    for _ in range(400):
        W = np.triu(rng.binomial(25, p), 1)
        W = W + np.tril(25 - W.T, -1)
        for i, j in ((1, 0), (2, 1)):
            low, high = interval(W, i, j)
            inside.append(low <= NAT * (truth[i] - truth[j]) <= high)
    assert 0.93 <= np.mean(inside) <= 0.97


# ---------------------------------------------------------------- separation, groups

def test_ten_to_none_by_hand():
    """Half a win each way: 10.5 to 0.5. Data alone: 10 log p = -1.92 below, no bound above."""
    found = fit([[0, 0], [10, 0]])
    assert found["elo"] == pytest.approx([0, 528.887718], abs=1e-5)
    assert found["separated"] and "separated" in found["note"] and "0.5 wins" in found["note"]
    assert found["low"][1] == pytest.approx(of_win_rate(np.exp(-DROP / 10)), abs=1e-2)
    assert found["high"] == [0, np.inf]
    found = fit([[0, 10], [0, 0]], prior=1)
    assert found["elo"][1] == pytest.approx(of_win_rate(1 / 12)) and found["low"][1] == -np.inf


def test_pseudo_wins_only_when_they_are_needed():
    W = [[0, 2], [6, 0]]
    assert fit(W)["elo"][1] == pytest.approx(NAT * np.log(3))
    forced = fit(W, always=True)
    assert forced["elo"][1] == pytest.approx(NAT * np.log(6.5 / 2.5)) and not forced["separated"]
    assert forced["low"] == fit(W)["low"] and forced["note"] == ""
    # between those who met, and nobody else: 3.5 to 0.5 and 2.5 to 1.5 in a row
    elo = fit(CHAIN)["elo"]
    assert elo[0] - elo[1] == pytest.approx(NAT * np.log(7))
    assert elo[1] - elo[2] == pytest.approx(NAT * np.log(2.5 / 1.5))


def test_bounds_follow_the_chains_of_wins():
    """0 beat 1, 1 and 2 each other: how far 0 is above them nobody knows, the rest is bounded."""
    assert interval(CHAIN, 0, 2)[1] == np.inf and np.isfinite(interval(CHAIN, 0, 2)[0])
    assert interval(CHAIN, 2, 0)[0] == -np.inf and np.isfinite(interval(CHAIN, 2, 0)[1])
    alone = interval([[0, 2], [1, 0]], 0, 1)             # what 0 won says nothing of 1 and 2
    assert interval(CHAIN, 1, 2) == pytest.approx(alone, abs=1e-2)
    two = interval([[0, 1, 0], [0, 0, 0], [0, 1, 0]], 0, 2)          # both beat 1, never met
    assert two == (-np.inf, np.inf)
    assert interval([[0, 1, 1], [0, 0, 1], [0, 0, 0]], 0, 2)[1] == np.inf


def test_a_long_chain_of_games_joins_its_ends():
    W = np.zeros((9, 9))
    for i in range(8):
        W[i, i + 1], W[i + 1, i] = 3, 1
    found = fit(W)
    assert len(found["groups"]) == 1 and not found["separated"]
    assert found["elo"] == pytest.approx([-i * 190.848502 for i in range(9)], abs=1e-5)
    assert np.isfinite(found["low"]).all() and np.isfinite(found["high"]).all()


def test_two_groups_one_of_which_only_lost():
    W = np.zeros((4, 4))
    W[0, 1] = W[1, 0] = W[2, 3] = W[3, 2] = 4
    W[:2, 2:] = 2
    found = fit(W)
    assert found["separated"] and found["elo"][1] == pytest.approx(0, abs=1e-6)
    assert found["elo"][2] == pytest.approx(-NAT * np.log(5), abs=1e-6)      # 2.5 to 0.5
    assert found["low"][2] == -np.inf and np.isfinite(found["high"][2])


def test_an_interval_holds_its_score():
    """Few games in a row that all went one way: pseudo-wins would take the score out of it."""
    W = [[1, 0, 0, 0], [3, 0, 4, 3], [1, 0, 1, 0], [0, 0, 2, 2]]
    found = fit(W)
    assert interval(W, 1, 0)[0] > found["elo"][1] == found["low"][1]
    for seed in range(40):
        W = np.random.default_rng(seed).poisson(0.7, (4, 4))
        found = {k: np.array(v) for k, v in fit(W).items() if k in ("elo", "low", "high")}
        met = ~np.isnan(found["elo"])
        assert (found["low"] <= found["elo"])[met].all()
        assert (found["high"] >= found["elo"])[met].all()


def test_groups_that_never_met_have_no_common_scale():
    W = np.zeros((5, 5))
    W[0, 3], W[3, 0], W[1, 4] = 1, 3, 5
    found = fit(W)
    assert found["groups"] == [[0, 3], [1, 4], [2]] and not found["separated"]
    for key in ("elo", "low", "high"):
        assert np.isnan(found[key]).tolist() == [False, True, True, False, True]
    assert found["elo"][3] == pytest.approx(190.848502)
    assert found["note"] == "3 groups that never met: no score outside the reference's"
    other = fit(W, 4)                                    # where it is the reference's group
    assert other["separated"] and other["elo"][1] == pytest.approx(NAT * np.log(11))
    assert "separated" in other["note"] and "3 groups" in other["note"]
    assert np.isnan(interval(W, 0, 1)).all() and interval(W, 2, 2) == (0, 0)
    assert fit(W, 2)["elo"][2] == 0 and fit([[0]])["elo"] == [0]


@pytest.mark.parametrize("W, knobs, words", [
    ([[0, np.nan], [1, 0]], {}, "nan"),
    ([[0, np.inf], [1, 0]], {}, "inf"),
    ([[0, -1], [1, 0]], {}, "negative"),
    ([[0, 1]], {}, "square"),
    ([0, 1], {}, "square"),
    ([[0, 1], [1, 0]], dict(reference=2), "no policy 2 of 2"),
    ([[0, 1], [1, 0]], dict(reference=-1), "no policy -1"),
    ([[0, 1], [0, 0]], dict(prior=0), "prior"),
    ([[0, 1], [0, 0]], dict(prior=np.nan), "prior"),
    ([], {}, "square"),
])
def test_bad_counts_are_refused(W, knobs, words):
    with pytest.raises(ValueError, match=words):
        fit(W, **knobs)
