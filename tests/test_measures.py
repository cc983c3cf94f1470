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

Choices: T multiplied, not above 0; bins over [1/2, 1], certainty past the last, signed, a mean over
bins, confidence of the true choice; the slope's sign, the best choice for the true one, 1 / T, its
two ends.

Best of k and of n: weights with replacement, of one k later, not scaled on; the lowest score, the
value's own order, values sorted apart from scores; ties in any order, summed, of values; errors
over samples; log n, log2, n / (n + 1) for (n - 1) / n; the lowest of n, P^n, n + 1; ties apart,
outcomes unsorted, not summed to 1; KL reversed, weighed by P, with 0 log 0; n, tables and
distributions unchecked. The slope: without its 2, by n, over all samples, over prompts, the mean of
spreads, squared, of one sample. Win rate turned round, without ties, with a binomial error. n-grams
one too few, past the end, apart, across texts, of letters, of empty words, over all words, of none.
Sentences counted each time, the first by alphabet or the rarest, over answers that have one, over
sentences. Fits: as many points as coefficients, residuals by n and n - 1, columns not scaled or
not scaled back, errors without the square or as one, R^2 about 0 or of a constant, any rank, a and
b swapped; d = 0 kept, beta's sign, an intercept, no factor d, log10, the two forms swapped, peaks
without their 2 or 1, below 0, overflowing, of beta < 0; d < 0 and unknown kinds let through.
Frontiers swept from the left or in the order given, points below the corner taken off, the corner
left out, what is dominated added again, bad points and corners let through.
"""

import itertools
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


# ---------------------------------------------------------------- calibration of choices

def log(*rows):
    return [np.log(row) for row in rows]


def test_choice_probabilities_by_hand():
    """Odds 9 : 1 at T 2 are 3 : 1; constants added to log-probs, huge ones too, change nothing."""
    rows = [np.log([0.9, 0.1]), 800 + np.log([1, 2, 5]), [0.0, -2000.0]]
    assert [p.tolist() for p in m.choice_probabilities(rows)] == [
        pytest.approx(want) for want in ([0.9, 0.1], [0.125, 0.25, 0.625], [1, 0])]
    assert m.choice_probabilities(rows[:1], 2)[0] == pytest.approx([0.75, 0.25])
    assert m.choice_probabilities(rows[:1], 0.5)[0] == pytest.approx([81 / 82, 1 / 82])
    assert m.choice_probabilities(rows, math.inf)[1] == pytest.approx([1 / 3] * 3)


def test_choice_ece_by_hand():
    """Of ten bins: .72, right, and .78, wrong, share one, .28 - .78; .95, right, is alone: .05."""
    rows, right = log([.72, .28], [.78, .22], [.02, .95, .03]), [0, 1, 1]
    assert m.choice_ece(rows, right) == pytest.approx((0.5 + 0.05) / 3)
    assert m.choice_ece(rows, right, bins=1) == pytest.approx(abs(0.28 - 0.78 + 0.05) / 3)
    assert m.choice_ece(rows[:2], right[:2], bins=1000) == pytest.approx((0.28 + 0.78) / 2)
    assert m.choice_ece(log([.9, .1]), [0], 2) == pytest.approx(0.25)         # 3/4, and right
    assert m.choice_ece([[0, -1000]], [1]) == 1 and m.choice_ece([[0, -1000]], [0]) == 0
    assert m.choice_ece([[0, -1000], *log([.95, .05])], [1, 0]) == pytest.approx(0.95 / 2)
    assert m.choice_ece(log([.4, .3, .3]), [1]) == pytest.approx(0.4)         # below 1/2


def answered(rng, n, scale):
    """Log-probs of 2 to 5 choices, and answers drawn from softmax(scale * logp)."""
    rows = [special.log_softmax(rng.normal(0, 2, rng.integers(2, 6))) for _ in range(n)]
    return rows, [rng.choice(len(r), p=special.softmax(scale * r)) for r in rows]


@pytest.mark.parametrize("scale", [0.4, 1.0, 2.5])
def test_choice_temperature_is_the_minimum(rng, scale):
    rows, right = answered(rng, 150, scale)

    def loss(T):
        return -np.mean([special.log_softmax(x / T)[r] for x, r in zip(rows, right)])

    best = optimize.minimize_scalar(loss, bounds=(0.05, 50), method="bounded",
                                    options=dict(xatol=1e-9)).x
    T = m.choice_temperature(rows, right)
    assert T == pytest.approx(best, rel=1e-5) and T == pytest.approx(1 / scale, rel=0.3)
    if scale != 1:
        assert m.choice_ece(rows, right, T) < m.choice_ece(rows, right) / 2
    scaled = m.choice_temperature([3 * x - 1 for x in rows], right)
    assert scaled == pytest.approx(3 * T)


def test_choice_temperature_by_hand_and_of_pairs(rng):
    """Odds 9 : 1, right in 3 of 4: 3 : 1 at T 2. Two choices are a comparison of scores."""
    assert m.choice_temperature(log(*[[.9, .1]] * 4), [0, 0, 1, 0]) == pytest.approx(2)
    deltas = drawn(200, 0.6, seed=8)
    pairs, right = np.stack([deltas, 0 * deltas], 1), [0] * 200
    assert m.choice_temperature(pairs, right) == pytest.approx(m.temperature(deltas)[0])
    assert m.choice_temperature(pairs, [1] * 200) == math.inf                 # turned round


def test_choice_temperature_at_its_ends():
    rows = log([.6, .4], [.2, .5, .3])
    assert m.choice_temperature(rows, [0, 1]) == 0.0
    for right in ([1, 0], [1, 2]):
        assert m.choice_temperature(rows, right) == math.inf
    assert m.choice_temperature(log([.5, .5]), [0]) == math.inf


def test_choice_temperature_where_two_are_likeliest():
    """The second question is answered as well as can be at any T."""
    assert m.choice_temperature(log([.9, .1], [.5, .5]), [0, 1]) == 0.0


@pytest.mark.parametrize("call", [
    lambda: m.choice_ece([], []), lambda: m.choice_temperature([], []),
    lambda: m.choice_ece([[0, 1]], [2]), lambda: m.choice_temperature([[0, 1]], [-1]),
])
def test_choices_that_have_no_meaning(call):
    with np.errstate(all="ignore"), pytest.raises(ValueError):
        call()


# ---------------------------------------------------------------- reinforcement learning

def test_best_of_k_by_hand():
    """3, 1, 2: of two, 3 in two of three draws and 2 in one. 5, 5, 8: 8 in two, 5 in one."""
    rows = m.best_of_k([[3, 1, 2], [5, 5, 8]])
    assert [r["k"] for r in rows] == [1, 2, 3]
    assert [r["value"] for r in rows] == pytest.approx([4, (8 / 3 + 7) / 2, 5.5])
    assert [r["se"] for r in rows] == pytest.approx([2, (7 - 8 / 3) / 2, 2.5])
    rows = m.best_of_k([[3, 1, 2]], [[0, 9, 6]])                     # 0 in two of three, 6 in one
    assert [r["value"] for r in rows] == pytest.approx([5, 2, 0])
    assert m.best_of_k([[4]]) == [dict(k=1, value=4, se=0)]
    tied = m.best_of_k([[0, 1, 1]], [[5, 2, 8]])                     # 2 and 8 share their weights
    assert [r["value"] for r in tied] == pytest.approx([5, 5, 5])


def test_best_of_k_is_the_mean_over_all_draws(rng):
    """Every subset of k of 7; among equal scores any is the best as likely as another."""
    scores, values = rng.integers(0, 3, (5, 7)), rng.normal(size=(5, 7))

    def best(s, v, some):
        some = np.array(some)
        return v[some][s[some] == s[some].max()].mean()

    for row in m.best_of_k(scores, values):
        want = [np.mean([best(s, v, some) for some in itertools.combinations(range(7), row["k"])])
                for s, v in zip(scores, values)]
        assert row["value"] == pytest.approx(np.mean(want))
        assert row["se"] == pytest.approx(stats.sem(want))


def test_best_of_k_of_a_thousand(rng):
    """The highest of k of 1..n is k (n + 1) / (k + 1) on average; pass@k; scipy's weights."""
    n = 1000
    k = np.arange(1, n + 1)
    scores = rng.permutation(n) + 1
    found = [r["value"] for r in m.best_of_k([scores])]
    assert found == pytest.approx((k * (n + 1) / (k + 1)).tolist(), rel=1e-11)
    passed = [r["value"] for r in m.best_of_k([scores > 990])]       # 10 of 1000 pass
    failed = [math.comb(990, j) / math.comb(n, j) for j in range(1, 1001)]
    assert passed == pytest.approx([1 - f for f in failed], rel=1e-11)
    values = rng.normal(size=n)
    for j in (2, 17, 500, 999):
        log = [special.gammaln(a + 1) - special.gammaln(b + 1) - special.gammaln(a - b + 1)
               for a, b in ((np.arange(j - 1, n), j - 1), (n, j))]
        want = np.exp(log[0] - log[1]) @ values[np.argsort(scores)][j - 1:]
        assert m.best_of_k([scores], [values])[j - 1]["value"] == pytest.approx(want, rel=1e-8)


def test_best_of_n_kl_by_hand():
    """log 2 - 1/2; HH B.6's k = 64: 3.17 nats, not its log 64 = 4.16."""
    assert [m.best_of_n_kl(n) for n in (1, 2, 64)] == pytest.approx([0, 0.1931472, 3.1745081])
    # Two outcomes of 1/2: the best of 2 is the higher in 3 of 4 draws. KL(3/4 || 1/2) = 0.1308
    assert m.best_of_n_kl_exact([.5, .5], 2) == pytest.approx(0.1308120)
    assert m.best_of_n_kl_exact([.5, .5], 2, [7, 7]) == 0
    assert m.best_of_n_kl_exact([.25, .5, .25], 2, [1, 0, 1]) == pytest.approx(0.1308120)
    assert m.best_of_n_kl_exact([.25, .75], 3, [1, 0]) == pytest.approx(
        37 / 64 * math.log(37 / 16) + 27 / 64 * math.log(27 / 48))
    assert m.best_of_n_kl_exact([0, 1, 0], 5) == 0
    assert m.best_of_n_kl_exact([.25, .75], 10 ** 6) == pytest.approx(math.log(4 / 3))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_kl_exact_by_enumeration(rng, n):
    """All draws of n of 4 outcomes; of equal scores any draw is the best as likely as another."""
    scores = [2, 1, 2, 0]
    for p in rng.dirichlet(np.ones(4), 3):
        q = np.zeros(4)
        for draw in itertools.product(range(4), repeat=n):
            top = [y for y in draw if scores[y] == max(scores[y] for y in draw)]
            for y in top:
                q[y] += p[list(draw)].prod() / len(top)
        assert m.best_of_n_kl_exact(p, n, scores) == pytest.approx(special.rel_entr(q, p).sum())


def test_best_of_n_kl_exact_is_under_its_bound(rng):
    """And reaches it where outcomes are many and equally likely; ties can only lower it."""
    for n in (1, 2, 7, 64, 1000):
        for size in (1, 3, 50):
            p, scores = rng.dirichlet(np.ones(size) / 2), rng.integers(0, 5, size)
            tied = m.best_of_n_kl_exact(p, n, scores)
            apart = m.best_of_n_kl_exact(p, n, scores + np.arange(size) / 100)
            assert -1e-12 <= tied <= apart + 1e-12 and apart <= m.best_of_n_kl(n) + 1e-12
        found = [m.best_of_n_kl_exact(np.full(k, 1 / k), n) for k in (10, 1000, 10 ** 6)]
        assert found == sorted(found) and found[-1] <= m.best_of_n_kl(n) + 1e-9
        assert found[-1] == pytest.approx(m.best_of_n_kl(n), abs=1e-3)


def test_slope_within_by_hand():
    """Variances 2, 0 and 8: their mean 10 / 3. What differs between prompts plays no part."""
    assert m.slope_within([[1, 3], [50, 50], [0, 4]]) == pytest.approx(math.sqrt(20 / 3))


def test_slope_within_is_the_slope_of_a_tilt(rng):
    """pi ~ pi0 e^(t r), one t for all prompts: mean gain against the root of the mean KL."""
    r = rng.normal(size=(11, 6)) * np.arange(1, 12)[:, None] + rng.normal(0, 9, (11, 1))
    n = r.shape[1]

    def gain_per_root(t):
        pi = special.softmax(t * r, 1)
        kl = special.rel_entr(pi, 1 / n).sum(1).mean()
        return (pi * r).sum(1).mean() - r.mean(), math.sqrt(kl)

    # these n answers are all there are: their variance is with n, not n - 1
    want = m.slope_within(r) * math.sqrt((n - 1) / n)
    for t, close in ((1e-3, 0.02), (1e-4, 0.002)):
        gain, root = gain_per_root(t)
        assert gain / root == pytest.approx(want, rel=close)
    many = rng.normal(3, 2, (400, 50))                               # Gaussian: 2 sqrt(2)
    assert m.slope_within(many) == pytest.approx(2 * math.sqrt(2), rel=0.02)


def test_win_rate_by_hand():
    """Win, tie, loss, win: 2.5 of 4; squares about .625: 2 * .140625 + .015625 + .390625."""
    assert m.win_rate([2, 1, 0, 5], [1, 1, 1, 4]) == pytest.approx(
        (0.625, math.sqrt(0.6875 / 3 / 4)))


def test_distinct_by_hand():
    """a b a b | a c: of 6 words 3 differ; of bigrams ab ba ab ac 3 of 4; of trigrams 2 of 2."""
    texts = ["a b  a b", "a c", ""]
    assert [m.distinct(texts, n) for n in (1, 2, 3)] == [0.5, 0.75, 1]
    assert m.distinct(["x y", "x y", "x y"], 2) == pytest.approx(1 / 3)


def test_commonest_by_hand():
    """C is in 3 of 4 answers, though A is said most often; of equal ones the first counts."""
    assert m.commonest([["A", "A", "A", "A", "C"], ["B", "C"], [], ["C", "A"]]) == (0.75, "C")
    assert m.commonest([["Z", "A"], ["A", "Z"]]) == (1, "Z")
    assert m.commonest([["only"], [], []]) == (pytest.approx(1 / 3), "only")


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
    with pytest.raises(ValueError, match="3 points"):
        m.linear_fit([1, 2], [3, 4])
    for x in ([.1] * 5, [0] * 5):
        with pytest.raises(ValueError, match="must vary"):
            m.linear_fit(x, [1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="3 points or more, not 2"):
        m.gao_fit([0, 0, 1, 2], [0, 0, 1, 2], "bon")
    for kind, d in (("bon", 3), ("rl", 3), ("rl", 1)):
        with pytest.raises(ValueError, match="must vary"):
            m.gao_fit([d, d, d], [1, 2, 3], kind)
    with pytest.raises(ValueError, match="'bon' or 'rl'"):
        m.gao_fit([1, 2, 3], [1, 2, 3], "ppo")
    with pytest.raises(ValueError, match="at least 0"):
        m.gao_fit([-1, 2, 3, 4], [1, 2, 3, 4], "bon")


def test_linear_fit_by_hand():
    """x 0 1 2, y 1 2 6: slope 5 / 2, left 1/2 -1 1/2, of squares 3/2; 14 about the mean."""
    fit = m.linear_fit([0, 1, 2], [1, 2, 6])
    assert (fit["a"], fit["b"]) == pytest.approx((0.5, 2.5))
    assert fit["b_se"] == pytest.approx(math.sqrt(1.5 / 2))
    assert fit["a_se"] == pytest.approx(math.sqrt(1.5 * (1 / 3 + 1 / 2)))
    assert fit["r2"] == pytest.approx(1 - 1.5 / 14)
    flat = m.linear_fit([0, 1, 2], [4, 4, 4])
    assert flat["b"] == pytest.approx(0, abs=1e-12) and math.isnan(flat["r2"])


@pytest.mark.parametrize("size, offset", [(1, 0), (1e-9, 0), (1e15, 0), (1, 1e4)])
def test_linear_fit_is_scipys(size, offset):
    x = size * FEW + offset
    fit, want = m.linear_fit(x, FEW + MANY), stats.linregress(x, FEW + MANY)
    assert [fit["a"], fit["b"]] == pytest.approx([want.intercept, want.slope], rel=1e-6)
    assert [fit["a_se"], fit["b_se"]] == pytest.approx([want.intercept_stderr, want.stderr],
                                                       rel=1e-6)
    assert fit["r2"] == pytest.approx(want.rvalue ** 2)


FORMS = dict(bon=lambda d, alpha, beta: d * (alpha - beta * d),
             rl=lambda d, alpha, beta: d * (alpha - beta * np.log(d)))


@pytest.mark.parametrize("kind", FORMS)
def test_gao_fit_recovers_the_papers_forms(rng, kind):
    """Exactly, and where it peaks; then with noise, against scipy's fit of the form."""
    d, form = np.sqrt(np.linspace(0.1, 30, 23)), FORMS[kind]
    fit = m.gao_fit(np.append(0, d), np.append(99, form(d, 0.7, 0.25)), kind)   # d = 0: left out
    assert (fit["alpha"], fit["beta"], fit["r2"]) == pytest.approx((0.7, 0.25, 1))
    assert fit["peak"] == pytest.approx(dict(bon=1.4, rl=math.exp(1.8))[kind])
    top = optimize.minimize_scalar(lambda x: -form(x, 0.7, 0.25), bounds=(0.1, 50),
                                   method="bounded").x
    assert fit["peak"] == pytest.approx(top, rel=1e-4)
    noisy = form(d, 0.7, 0.25) + rng.normal(0, 0.1, 23)
    fit = m.gao_fit(d, noisy, kind)
    want, covariance = optimize.curve_fit(form, d, noisy)
    assert [fit["alpha"], fit["beta"]] == pytest.approx(want.tolist(), rel=1e-5)
    assert [fit["alpha_se"], fit["beta_se"]] == pytest.approx(np.sqrt(np.diag(covariance)).tolist(),
                                                              rel=1e-5)
    left = noisy - form(d, *want)
    assert fit["r2"] == pytest.approx(1 - (left @ left) / (23 * noisy.var()))


def test_gao_fit_by_hand_and_its_peak_at_the_ends():
    """bon through (1, 1), (2, 0), (3, -3): d (2 - d). rl through (1, 1), (e, 0): d (1 - log d)."""
    fit = m.gao_fit([1, 2, 3], [1, 0, -3], "bon")
    assert (fit["alpha"], fit["beta"], fit["peak"]) == pytest.approx((2, 1, 1))
    e = math.e
    fit = m.gao_fit([1, e, e * e], [1, 0, -e * e], "rl")
    assert (fit["alpha"], fit["beta"], fit["peak"]) == pytest.approx((1, 1, 1))
    d = np.arange(1, 8)
    for kind, form in FORMS.items():
        assert m.gao_fit(d, form(d, 1, -0.5), kind)["peak"] == math.inf
    assert m.gao_fit(d, FORMS["bon"](d, -1, 0.5), "bon")["peak"] == 0
    assert m.gao_fit(d, FORMS["rl"](d, 1, 1e-4), "rl")["peak"] == math.inf      # e^9999


# ---------------------------------------------------------------- frontiers

@pytest.mark.parametrize("points, worst, area", [
    ([(2, 3)], (0, 0), 6), ([(2, 3)], (1, -1), 4), ([(2, 3)], (2, 0), 0), ([(2, 3)], (3, 0), 0),
    ([(2, 3)], (0, 5), 0), ([(-1, -2)], (-3, -7), 2 * 5),
    ([(2, 3), (5, 1)], (0, 0), 5 * 1 + 2 * 2),           # two steps
    ([(2, 3), (5, 1)], (1, 0), 4 * 1 + 1 * 2),
    ([(2, 3), (5, 1)], (0, 2), 2 * 1),                   # the second is below the corner
    ([(2, 3), (5, 1)], (3, 0), 2 * 1),                   # the first is left of it
    ([(2, 3), (1, 2)], (0, 0), 6), ([(2, 3), (2, 1)], (0, 0), 6), ([(2, 3), (1, 3)], (0, 0), 6),
    ([(2, 3), (2, 3)], (0, 0), 6),
    ([(1, 5), (2, 3), (3, 3.5), (5, 1)], (0, 0), 5 * 1 + 3 * 2.5 + 1 * 1.5),
])
def test_frontier_area_by_hand(points, worst, area):
    for order in itertools.permutations(points):
        assert m.frontier_area(order, worst) == pytest.approx(area)


def test_frontier_area_is_the_share_that_is_dominated(rng):
    """Of a grid of cells' middles over the unit square, above the corner (0.2, 0.1)."""
    points = rng.random((6, 2))
    grid = (np.arange(400) + 0.5) / 400
    x, y = np.meshgrid(grid, grid)
    under = ((x[..., None] < points[:, 0]) & (y[..., None] < points[:, 1])).any(-1)
    want = (under & (x > 0.2) & (y > 0.1)).mean()
    assert m.frontier_area(points, (0.2, 0.1)) == pytest.approx(want, abs=0.005)
    assert isinstance(m.frontier_area(points, (0.2, 0.1)), float)


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize("call", [
    lambda: m.mean_se([]), lambda: m.mean_se([1, math.nan]), lambda: m.hits([1], [1, 2]),
    lambda: m.accuracy([], []), lambda: m.accuracy([1, 2], [0, 0], [1]),
    lambda: m.ece([1, math.inf]), lambda: m.ece([1, 2], [0.5, 1.5]),
    lambda: m.calibration([1, 2], weights=[1, 0]), lambda: m.temperature([1, 2], [1]),
    lambda: m.pearson([1, 2], [1]), lambda: m.ranks([math.nan]), lambda: m.auroc([1, 2, 3], [1, 0]),
    lambda: m.auroc([1, math.nan], [1, 0]), lambda: m.normalise([1], []),
    lambda: m.best_of_k([1, 2]), lambda: m.best_of_k([]), lambda: m.best_of_k([[], []]),
    lambda: m.best_of_k([[1, 2], [3]]), lambda: m.best_of_k([[1, 2]], [[1, 2, 3]]),
    lambda: m.best_of_k([[1, 2]], [[1], [2]]), lambda: m.best_of_k([[1, math.nan]]),
    lambda: m.best_of_n_kl(0), lambda: m.best_of_n_kl(math.inf), lambda: m.best_of_n_kl(math.nan),
    lambda: m.best_of_n_kl_exact([.5, .5], 0), lambda: m.best_of_n_kl_exact([.5, .6], 2),
    lambda: m.best_of_n_kl_exact([1.5, -.5], 2), lambda: m.best_of_n_kl_exact([.5, .5], 2, [1]),
    lambda: m.best_of_n_kl_exact([], 2), lambda: m.slope_within([[1], [2]]),
    lambda: m.slope_within([1, 2]), lambda: m.win_rate([], []), lambda: m.win_rate([1], [1, 2]),
    lambda: m.distinct(["a b", "c"], 3), lambda: m.distinct([], 1), lambda: m.distinct(["a"], 0),
    lambda: m.commonest([[], []]), lambda: m.commonest([]), lambda: m.linear_fit([1, 2], [1]),
    lambda: m.gao_fit([1, 2, 3], [1, 2, math.nan], "bon"),
    lambda: m.choice_probabilities([[0, 1], []]), lambda: m.choice_probabilities([[0, math.nan]]),
    lambda: m.choice_probabilities([[0, 1]], 0), lambda: m.choice_probabilities([[0, 1]], -1),
    lambda: m.choice_probabilities([[0, 1]], math.nan), lambda: m.choice_ece([[0, 1]], [0, 1]),
    lambda: m.choice_ece([[0, -math.inf]], [0]), lambda: m.choice_temperature([[0, 1]], []),
    lambda: m.choice_temperature([[0, 1], []], [1, 0]), lambda: m.frontier_area([], (0, 0)),
    lambda: m.frontier_area([(1, 2, 3)], (0, 0)), lambda: m.frontier_area([1, 2], (0, 0)),
    lambda: m.frontier_area([(1, math.nan)], (0, 0)), lambda: m.frontier_area([(1, 2)], (0,)),
    lambda: m.frontier_area([(1, 2)], (0, math.inf)), lambda: m.frontier_area([1, 2, 3], (0, 0)),
])
def test_what_has_no_meaning_is_refused(call):
    with pytest.raises(ValueError):
        call()
