"""measures.py: hand-computed tables, scipy's results, invariances.

Mutations tried, each caught here: n for n - 1; ties right or wrong; errors by pairs and not by
weights; either answer above the threshold, strictly above, weights left out; the shorter answer for
the longer; ordinal ranks, positives for negatives, one class let through, DeLong's counts swapped;
errors added and not their squares; a bootstrap without replacement, of cells, unseeded; outcomes
not turned, ties as losses, confidence of the signed difference, bins over [0, 1], certainty past
the last bin, variance without the square; ECE signed, a mean over bins, without weights; groups
ignored; the floor at 1/2; the gap's sign; temperature inverted, its error that of 1 / T, without
soft labels or weights, without its two ends; natural logarithms, origins swapped, n for n - 3, R^2
about 0, a fit of rank 2; Spearman on values, Pearson about 0; the scores' own mean removed; errors
over sentences for those over words; nan and soft labels above 1 let through.
"""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

import measures as m

FEW = np.random.default_rng(1).integers(0, 4, 60).astype(float)     # many ties
MANY = np.random.default_rng(2).normal(size=60)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# ---------------------------------------------------------------- means

def test_mean_se_by_hand():
    """2, 4, 9: mean 5, squares 9 + 1 + 16 = 26, variance 13, error sqrt(13 / 3)."""
    assert m.mean_se([2, 4, 9]) == pytest.approx((5, math.sqrt(13 / 3)))
    assert m.mean_se([7]) == (7.0, 0.0)
    assert m.mean_se(MANY)[1] == pytest.approx(stats.sem(MANY))


def test_difference_is_welch():
    a, b = MANY[:20], MANY[20:] + 1
    gap, se = m.difference(a, b)
    assert gap / se == pytest.approx(stats.ttest_ind(a, b, equal_var=False).statistic)


def test_bootstrap_of_a_mean():
    """The bootstrap error of a mean is s / sqrt(n), with n in the place of n - 1."""
    want = MANY.std() / math.sqrt(60)
    assert m.bootstrap_se(MANY, np.mean, draws=4000) == pytest.approx(want, rel=0.05)
    assert m.bootstrap_se(MANY, np.mean, 3) == m.bootstrap_se(MANY, np.mean, 3)
    assert m.bootstrap_se(MANY, np.mean, 3) != m.bootstrap_se(MANY, np.mean, 4)
    pairs = np.stack([MANY, 2 * MANY], 1)                            # rows stay whole
    assert m.bootstrap_se(pairs, lambda x: (2 * x[:, 0] - x[:, 1]).sum()) == 0


def test_normalise():
    assert m.normalise([1, 2, 9], [2, 4]).tolist() == [-2, -1, 6]
    assert m.normalise(MANY, MANY).mean() == pytest.approx(0, abs=1e-12)


def test_matched_gap_by_hand():
    """Two sentences, three pairs of words. Gaps 1 2 3 and 1 0 -1: means of pairs 1, 1, 1."""
    first, second = [[1, 3, 5], [2, 2, 2]], [[0, 1, 2], [1, 2, 3]]
    found = m.matched_gap(np.stack([first, second], -1))
    assert (found["gap"], found["gap_se"]) == (1, 0)
    assert found["sentences"] == [2, 0] and found["across"] == pytest.approx(math.sqrt(2))
    # variances of a side in a sentence: 4, 1, 0, 1
    assert found["within"] == pytest.approx(math.sqrt(6 / 4))


# ---------------------------------------------------------------- accuracy

def test_accuracy_counts_ties_as_half():
    """Right, wrong, tie, right: 2.5 of 4; sqrt(.625 * .375 / 4)."""
    assert m.hits([1, 0, 2, 5], [0, 1, 2, 4]).tolist() == [1, 0, 0.5, 1]
    p, se = m.accuracy([1, 0, 2, 5], [0, 1, 2, 4])
    assert (p, se) == pytest.approx((0.625, 0.2420615))


def test_weights_make_a_ranking_count_as_one():
    """A comparison that is right and a ranking of three with 1 of 3 pairs right: 2/3 of 2."""
    better, worse, weights = [1, 1, 0, 0], [0, 0, 1, 1], [1, 1 / 3, 1 / 3, 1 / 3]
    p, se = m.accuracy(better, worse, weights)
    assert (p, se) == pytest.approx((2 / 3, math.sqrt(2 / 9 / 2)))
    assert m.accuracy(better, worse)[0] == 0.5


def test_accuracy_above_by_hand():
    """Lower scores 0, 1, 2, 3; the pair at the threshold stays, one empty threshold is left out."""
    better, worse = [5, 1, 2, 3], [0, 4, 3, 3]
    rows = m.accuracy_above(better, worse, [0, 1, 2.5, 4])
    assert [(r["threshold"], r["pairs"]) for r in rows] == [(0, 4), (1, 3), (2.5, 1)]
    assert [r["accuracy"] for r in rows] == pytest.approx([1.5 / 4, 0.5 / 3, 0.5])
    assert rows[0]["se"] == pytest.approx(math.sqrt(0.375 * 0.625 / 4))
    weighed = m.accuracy_above(better, worse, [0], [3, 1, 1, 1])
    assert weighed[0]["accuracy"] == pytest.approx(3.5 / 6)


def test_length_baselines():
    """Longer, shorter, equal, shorter: 1.5 of 4 by the longer answer."""
    assert m.length_baselines([9, 2, 4, 1], [3, 5, 4, 8]) == dict(longer=0.375, shorter=0.625,
                                                                  best=0.625)


@pytest.mark.parametrize("labels, scores, want", [
    ([1, 0, 1, 0], [.5, .5, .5, .5], 0.5), ([0, 1, 1], [.2, .2, .9], 0.75),
    ([1, 0, 1, 1, 0, 0], [.9, .9, .4, .7, .4, .1], 2 / 3), ([1, 0], [1, 0], 1), ([1, 0], [0, 1], 0),
])
def test_auroc_with_ties_in_any_order(labels, scores, want, rng):
    for _ in range(6):
        order = rng.permutation(len(labels))
        assert m.auroc(np.array(scores)[order], np.array(labels)[order]) == pytest.approx(want)


def test_auroc_is_mann_whitney(rng):
    labels = MANY > 0.3
    for scores in (FEW, MANY + rng.normal(size=60)):
        u = stats.mannwhitneyu(scores[labels], scores[~labels]).statistic
        found = m.auroc(scores, labels)
        assert found == pytest.approx(u / labels.sum() / (~labels).sum())
        assert m.auroc(-scores, labels) == pytest.approx(1 - found)
        assert m.auroc(np.exp(scores), labels) == pytest.approx(found)
    for one in ([1, 1], [0, 0]):
        with pytest.raises(ValueError, match="both classes"):
            m.auroc([1, 2], one)


def test_auroc_se_by_hand_and_by_bootstrap(rng):
    """Positives 1, 3, negatives 0, 2. Above: 1/2, 1; below: 1, 1/2. Each error 1/4."""
    assert m.auroc_se([1, 3, 0, 2], [1, 1, 0, 0]) == pytest.approx(math.sqrt(2) / 4)
    a, b = rng.normal(0.7, 1, 90), rng.normal(0, 1, 60)
    scores, labels = np.concatenate([a, b]), np.arange(150) < 90
    draws = [m.auroc(np.concatenate([rng.choice(a, 90), rng.choice(b, 60)]), labels)
             for _ in range(600)]
    assert m.auroc_se(scores, labels) == pytest.approx(np.std(draws), rel=0.12)


def test_separation_puts_the_upper_sample_above():
    found = m.separation([3, 5], [1, 2, 3])
    assert found["auroc"] == pytest.approx(5.5 / 6) and found["gap"] == 2
    assert found["gap_se"] == pytest.approx(math.sqrt(2 / 2 + 1 / 3))
    # above: 5/6, 1; below: 0, 0, 1/4
    assert found["auroc_se"] == pytest.approx(math.hypot(1 / 12, 1 / 12))


# ---------------------------------------------------------------- calibration

LOG3 = math.log(3)                                       # sigmoid(log 3) = 3/4


def test_calibration_by_hand():
    """Two bins: differences of log 3 (p 3/4), 3 of 4 right, and of log 9 (p 9/10), 1 of 2."""
    deltas = [LOG3, LOG3 - 1e-9, -LOG3 + 1e-9, LOG3 - 1e-9, 2 * LOG3, -2 * LOG3, 0.0]
    low, high = m.calibration(deltas[1:6], bins=2)
    assert (low["pairs"], high["pairs"]) == (3, 2)
    assert [low["predicted"], low["observed"], low["delta"]] == pytest.approx([.75, 2 / 3, LOG3])
    assert [high["predicted"], high["observed"], high["delta"]] == pytest.approx([.9, .5, 2 * LOG3])
    assert low["se"] == pytest.approx(math.sqrt(2 / 9 / 3))
    want = (3 * (0.75 - 2 / 3) + 2 * 0.4) / 5
    assert m.ece(deltas[1:6], bins=2) == pytest.approx(want)
    assert m.ece(deltas[1:6], bins=1) == pytest.approx(want)         # both gaps have one sign
    assert m.confidence_gap(deltas[1:6])[0] == pytest.approx(-want)
    tie, = m.calibration([0.0])
    assert (tie["predicted"], tie["observed"], tie["pairs"]) == (0.5, 0.5, 1)


def test_bins_are_equally_wide_and_the_last_holds_certainty():
    confidence = np.array([0.5, 0.5499, 0.5501, 0.77, 0.9499, 0.9501, 1.0])
    assert m.bins_of(confidence, 10).tolist() == [0, 0, 1, 5, 8, 9, 9]
    assert m.calibration([800.0, -800.0], bins=4)[0]["observed"] == 0.5


def test_gaps_of_two_signs_do_not_cancel_between_bins():
    """Bin of 3/4: all right, gap +1/4. Bin of 9/10: none, gap -9/10."""
    deltas = [LOG3 - 1e-9] * 2 + [-2 * LOG3] * 2
    assert m.ece(deltas, bins=2) == pytest.approx((0.25 + 0.9) / 2)
    assert m.ece(deltas, bins=1) == pytest.approx((0.9 - 0.25) / 2)


def test_ece_over_both_orders_is_the_same(rng):
    """A comparison in both orders, over bins of p in [0, 1]: each gap twice, half as often."""
    deltas = rng.normal(0.6, 1.5, 500)
    p, y = special.expit(np.concatenate([deltas, -deltas])), np.repeat([1, 0], 500)
    index, want = np.minimum((20 * p).astype(int), 19), 0
    for k in range(20):
        own = index == k
        want += abs((y - p)[own].sum()) / 1000
    assert m.ece(deltas, bins=10) == pytest.approx(want)
    soft = special.expit(deltas)
    assert m.ece(deltas, soft) == pytest.approx(0, abs=1e-12)
    assert m.ece(-deltas, 1 - soft, 7) == pytest.approx(0, abs=1e-12)


def test_turning_a_pair_round_changes_nothing(rng):
    deltas, weights = rng.normal(size=80), rng.random(80) + 0.1
    deltas[:5] = 0
    soft = special.expit(0.7 * deltas + rng.normal(size=80))
    turn = rng.random(80) < 0.5
    other, other_soft = np.where(turn, -deltas, deltas), np.where(turn, 1 - soft, soft)
    assert m.calibration(deltas, soft, 5, weights) == [
        pytest.approx(r) for r in m.calibration(other, other_soft, 5, weights)]
    for f in (m.confidence_gap, m.temperature):
        assert f(deltas, soft, weights) == pytest.approx(f(other, other_soft, weights))
    assert m.ece(deltas, soft, 5, weights) == pytest.approx(m.ece(other, other_soft, 5, weights))


def test_whole_weights_are_copies(rng):
    deltas, weights = rng.normal(0.4, 1, 40), rng.integers(1, 4, 40)
    soft = special.expit(0.7 * deltas + rng.normal(size=40))
    long, long_soft = np.repeat(deltas, weights), np.repeat(soft, weights)
    for f in (m.ece, m.confidence_gap, m.temperature):
        assert f(deltas, soft, weights=weights) == pytest.approx(f(long, long_soft))
    for row, want in zip(m.calibration(deltas, soft, 4, weights),
                         m.calibration(long, long_soft, 4), strict=True):
        del row["pairs"], want["pairs"]
        assert row == pytest.approx(want)


def drawn(n, scale=1.0, seed=0):
    """Differences, and choices that are drawn from sigmoid(scale * difference)."""
    rng = np.random.default_rng(seed)
    size = rng.normal(0, 1.5, n)
    return np.where(rng.random(n) < special.expit(scale * size), size, -size)


def test_a_calibrated_model_is_at_the_floor_and_temperature_1():
    deltas = drawn(4000)
    floor, spread = m.ece_floor(deltas)
    assert abs(m.ece(deltas) - floor) < 4 * spread and 0 < floor < 0.03
    T, T_se = m.temperature(deltas)
    gap, gap_se = m.confidence_gap(deltas)
    assert abs(T - 1) < 3 * T_se and abs(gap) < 3 * gap_se
    assert m.ece_floor(deltas) == m.ece_floor(-deltas)               # choices play no part in it


@pytest.mark.parametrize("scale, sign", [(2.0, 1), (0.5, -1)])
def test_confidence_of_other_scales_is_found(scale, sign):
    """Choices from sigmoid(2 delta): under-confident, temperature 1/2."""
    deltas = drawn(4000, scale)
    T, T_se = m.temperature(deltas)
    gap, gap_se = m.confidence_gap(deltas)
    assert abs(T - 1 / scale) < 3 * T_se < 0.5 / scale and sign * gap > 3 * gap_se
    floor, spread = m.ece_floor(deltas)
    assert m.ece(deltas) > floor + 5 * spread
    assert m.temperature(3 * deltas)[0] == pytest.approx(3 * T)


def test_temperature_is_the_minimum(rng):
    deltas, soft, weights = drawn(200, seed=3), rng.random(200) * 0.3 + 0.7, rng.random(200) + 0.5

    def loss(T):
        return weights @ (np.logaddexp(0, -deltas / T) + (1 - soft) * deltas / T)

    best = optimize.minimize_scalar(loss, bounds=(0.05, 50), method="bounded",
                                    options=dict(xatol=1e-9)).x
    assert m.temperature(deltas, soft, weights)[0] == pytest.approx(best, rel=1e-5)


def test_temperature_error_is_its_spread_over_samples():
    found = np.array([m.temperature(drawn(400, 2.0, s)) for s in range(200)])   # about 1/2
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.15)


def test_temperature_at_its_ends():
    """All right: the surer the better. Nothing known: no score is small enough."""
    assert m.temperature([1, 2, 3])[0] == 0
    for deltas in ([1, -1], [0, 0], [-1, -2]):
        assert m.temperature(deltas)[0] == math.inf
    assert m.temperature([LOG3, LOG3, LOG3, -LOG3])[0] == pytest.approx(1)   # 3 of 4, p 3/4
    assert m.temperature([LOG3 / 2], [0.75])[0] == pytest.approx(0.5)


def test_ece_se_over_samples_and_groups():
    """Against the spread of ECE in fresh samples; copies in a group add no certainty."""
    deltas = drawn(800, 3.0, seed=5)
    spread = np.std([m.ece(drawn(800, 3.0, seed=s)) for s in range(150)])
    found = m.ece_se(deltas)
    assert found == pytest.approx(spread, rel=0.3)
    groups = np.repeat(np.arange(800), 4)
    assert m.ece_se(np.repeat(deltas, 4), groups=groups) == pytest.approx(found)
    assert m.ece_se(np.repeat(deltas, 4)) == pytest.approx(found / 2, rel=0.25)


def test_summary_is_its_parts(rng):
    deltas, soft, weights = drawn(300), rng.random(300), rng.random(300)
    groups = np.arange(300) // 3
    found = m.calibration_summary(deltas, soft, 5, weights, groups, seed=4)
    assert found["bins"] == m.calibration(deltas, soft, 5, weights)
    assert found["ece"] == m.ece(deltas, soft, 5, weights)
    assert found["ece_se"] == m.ece_se(deltas, soft, 5, weights, groups, 4)
    assert (found["ece_floor"], found["ece_floor_spread"]) == m.ece_floor(deltas, 5, weights, 4)
    assert (found["gap"], found["gap_se"]) == m.confidence_gap(deltas, soft, weights)
    assert (found["temperature"], found["temperature_se"]) == m.temperature(deltas, soft, weights)


# ---------------------------------------------------------------- correlations and fits

def test_ranks_and_correlations_are_scipys():
    assert m.ranks([30, 10, 30, 20]).tolist() == [3.5, 1, 3.5, 2]
    assert m.ranks(FEW) == pytest.approx(stats.rankdata(FEW))
    other = FEW + MANY
    assert m.pearson(FEW, other) == pytest.approx(stats.pearsonr(FEW, other).statistic)
    assert m.spearman(FEW, other) == pytest.approx(stats.spearmanr(FEW, other).statistic)
    assert m.spearman(FEW, np.exp(other)) == pytest.approx(m.spearman(FEW, other))
    assert m.pearson(5 - 2 * FEW, 3 * FEW + 1) == pytest.approx(-1)
    assert math.isnan(m.pearson([.1, .1, .1], [1, 2, 3])) and math.isnan(m.spearman([1, 2], [0, 0]))


def test_log_linear_fit_recovers_the_papers_form(rng):
    """0.72 + 0.007 log10(P / 1e11) + 0.015 log10(D / 8e4), exactly, then with noise."""
    P, D = (g.ravel() for g in np.meshgrid([1e7, 1e8, 1e9, 5e10], [1e3, 1e4, 8e4]))
    y = 0.72 + 0.007 * np.log10(P / 1e11) + 0.015 * np.log10(D / 8e4)
    fit = m.log_linear_fit(P, D, y, at=(1e11, 8e4))
    assert [fit[k] for k in "abc"] == pytest.approx([0.72, 0.007, 0.015])
    assert fit["r2"] == pytest.approx(1)
    plain = m.log_linear_fit(P, D, y)["a"]
    assert plain == pytest.approx(0.72 - 0.007 * 11 - 0.015 * np.log10(8e4))
    noisy = y + rng.normal(0, 0.01, 12)
    fit = m.log_linear_fit(P, D, noisy, at=(1e11, 8e4))

    def form(x, a, b, c):
        return a + b * np.log10(x[0] / 1e11) + c * np.log10(x[1] / 8e4)

    want, covariance = optimize.curve_fit(form, (P, D), noisy)
    assert [fit[k] for k in "abc"] == pytest.approx(want.tolist(), rel=1e-4)
    assert [fit[f"{k}_se"] for k in "abc"] == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-4)
    left = noisy - form((P, D), *want)
    assert fit["r2"] == pytest.approx(1 - (left @ left) / (12 * noisy.var()))


def test_fits_that_cannot_be_made():
    with pytest.raises(ValueError, match="4 points"):
        m.log_linear_fit([1, 10, 100], [1, 20, 5], [0, 1, 2])
    with pytest.raises(ValueError, match="not together"):
        m.log_linear_fit([1, 10, 100, 1000], [1, 10, 100, 1000], [0, 1, 2, 3])
    with pytest.raises(ValueError, match="positive"):
        m.log_linear_fit([0, 10, 100, 1000], [1, 20, 10, 7], [0, 1, 2, 3])


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("call", [
    lambda: m.mean_se([]), lambda: m.mean_se([1, math.nan]), lambda: m.hits([1], [1, 2]),
    lambda: m.accuracy([], []), lambda: m.accuracy([1, 2], [0, 0], [1]),
    lambda: m.ece([1, math.inf]), lambda: m.ece([1, 2], [0.5, 1.5]),
    lambda: m.calibration([1, 2], weights=[1, 0]), lambda: m.temperature([1, 2], [1]),
    lambda: m.pearson([1, 2], [1]), lambda: m.ranks([math.nan]), lambda: m.auroc([1, 2, 3], [1, 0]),
    lambda: m.auroc([1, math.nan], [1, 0]), lambda: m.normalise([1], []),
])
def test_what_has_no_meaning_is_refused(call):
    with pytest.raises(ValueError):
        call()
