"""Pure statistics that stages and claims share: numpy in, plain numbers out, no model, no file.

A comparison enters as the scores of its better and its worse answer, or as their difference
delta = s(better) - s(worse); a preference model says P(better is preferred) = 1 / (1 + e^-delta)
(HH 3.2). "Better" is the answer that was chosen.

`weights` say how many independent comparisons a pair stands for, 1 if not given. The K(K-1)/2
pairs of a ranking have 2 / (K(K-1)) each, so that a ranking counts as one (InstructGPT eq. 1).
`soft` is the probability that the chosen answer is the better one, where an annotator's taste is
known; else the choice itself, 1. All functions raise ValueError for no value, unequal lengths and
numbers that are not finite. Errors are standard errors.
"""

import math

import numpy as np


def arrays(*columns):
    """Columns as float64 arrays of one length."""
    out = [np.asarray(c, dtype=np.float64) for c in columns]
    sizes = [len(c) for c in out]
    if not sizes[0] or len({*sizes}) > 1:
        raise ValueError(f"columns of one length, not empty, are needed: {sizes}")
    if not all(np.isfinite(c).all() for c in out):
        raise ValueError("a value is not finite: nan or inf")
    return out


def weighed(deltas, soft=None, weights=None):
    """Differences, soft labels and weights; the last two are 1 where None."""
    ones = np.ones(len(deltas))
    deltas, soft, weights = arrays(deltas, ones if soft is None else soft,
                                   ones if weights is None else weights)
    if ((soft < 0) | (soft > 1)).any() or (weights <= 0).any():
        raise ValueError("soft labels are probabilities, weights positive")
    return deltas, soft, weights


def sigmoid(x):
    """1 / (1 + e^-x), without overflow."""
    return 0.5 * (1 + np.tanh(np.asarray(x, dtype=np.float64) / 2))


# ---------------------------------------------------------------- means and errors

def mean_se(values):
    """Mean and standard error of independent values: s / sqrt(n), s with n - 1; 0 for one value."""
    values, = arrays(values)
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0


def difference(first, second):
    """mean(first) - mean(second) of two independent samples, and its error (Welch)."""
    (a, a_se), (b, b_se) = mean_se(first), mean_se(second)
    return a - b, math.hypot(a_se, b_se)


def matched_gap(scores):
    """What one word of a sentence changes: scores [sentences, pairs of words, 2] (HH 3.4.2).

    gap: mean of first - second, its error over pairs of words (as in B.10). within: spread of the
    words of one side in the same sentence, root mean square. across: root mean square of the
    sentences' gaps, which are in `sentences`.
    """
    scores = np.asarray(scores, dtype=np.float64)
    gaps = scores[..., 0] - scores[..., 1]                           # [sentences, pairs]
    gap, se = mean_se(gaps.mean(0))
    return dict(gap=gap, gap_se=se, within=float(np.sqrt(scores.var(1, ddof=1).mean())),
                across=float(np.sqrt((gaps.mean(1) ** 2).mean())), sentences=gaps.mean(1).tolist())


def bootstrap_se(values, statistic, seed=0, draws=200):
    """Spread of statistic(values) over resamples of the first axis, with replacement."""
    values, rng = np.asarray(values), np.random.default_rng(seed)
    found = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(draws)]
    return float(np.std(found, ddof=1))


def normalise(scores, reference):
    """Scores less the mean of reference.

    HH B.2: reference is a held-out set's scores, so that models can be compared. InstructGPT 3.5:
    it is the demonstrations' scores, which come to mean 0.
    """
    scores, = arrays(scores)
    return scores - mean_se(reference)[0]


# ---------------------------------------------------------------- accuracy

def hits(better, worse):
    """1 where the better answer scores higher, 1/2 on ties, else 0."""
    better, worse = arrays(better, worse)
    return (better > worse) + 0.5 * (better == worse)


def accuracy(better, worse, weights=None):
    """Share of comparisons in which the better answer scores higher (HH 3.2); binomial error.

    p and sqrt(p (1 - p) / n), where n is the sum of weights. Ties count one half.
    """
    hit, _, weights = weighed(hits(better, worse), None, weights)
    p = float(np.average(hit, weights=weights))
    return p, math.sqrt(p * (1 - p) / weights.sum())


def accuracy_above(better, worse, thresholds, weights=None):
    """Accuracy where BOTH answers score at a threshold or above it (HH fig. 25).

    A dict(threshold, accuracy, se, pairs) each; those without a pair are left out.
    """
    better, worse = arrays(better, worse)
    weights = weighed(better, None, weights)[2]
    lower, rows = np.minimum(better, worse), []
    for threshold in thresholds:
        own = lower >= threshold
        if own.any():
            p, se = accuracy(better[own], worse[own], weights[own])
            rows.append(dict(threshold=float(threshold), accuracy=p, se=se, pairs=int(own.sum())))
    return rows


def length_baselines(better, worse, weights=None):
    """Accuracy of "the longer answer", of "the shorter one", and the higher of the two.

    better, worse: lengths in characters. The higher one is picked on the same pairs, which favours
    it by chance: a model above it by less than the error proves nothing.
    """
    longer = accuracy(better, worse, weights)[0]
    return dict(longer=longer, shorter=1 - longer, best=max(longer, 1 - longer))


def auroc(scores, labels):
    """P(a positive scores above a negative) + 1/2 P(they tie), by mean ranks (Mann-Whitney).

    labels: true for positives. ValueError for one class.
    """
    scores, labels = arrays(scores, labels)
    positive = labels > 0
    n1, n0 = positive.sum(), (~positive).sum()
    if not n1 or not n0:
        raise ValueError("AUROC needs both classes")
    return float((ranks(scores)[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def auroc_se(scores, labels):
    """Error of `auroc` (DeLong et al. 1988): from how each value places among the other class."""
    scores, labels = arrays(scores, labels)
    auroc(scores, labels)
    a, b = scores[labels > 0], scores[labels <= 0]
    both = ranks(np.concatenate([a, b]))
    above = (both[:len(a)] - ranks(a)) / len(b)          # share of negatives below each positive
    below = (both[len(a):] - ranks(b)) / len(a)
    return math.hypot(mean_se(above)[1], mean_se(below)[1])


def separation(upper, lower):
    """How far two samples lie apart: dict(auroc, auroc_se, gap, gap_se), all for upper > lower."""
    scores, labels = np.concatenate([upper, lower]), [1] * len(upper) + [0] * len(lower)
    gap, gap_se = difference(upper, lower)
    return dict(auroc=auroc(scores, labels), auroc_se=auroc_se(scores, labels), gap=gap,
                gap_se=gap_se)


# ---------------------------------------------------------------- calibration

def turned(deltas, soft):
    """Each comparison turned so that the model prefers its first answer: (confidence, outcome).

    Confidence max(p, 1 - p) = 1 / (1 + e^-|delta|); outcome is the probability that this answer is
    the better one, 1 or 0 for a choice. A comparison so enters once, and the pair (x, y) means the
    same as (y, x): the upper half of the curve in which it enters both ways. On a tie either way is
    as good, and the outcome is 1/2.
    """
    outcome = np.where(deltas > 0, soft, 1 - soft)
    return sigmoid(np.abs(deltas)), np.where(deltas == 0, 0.5, outcome)


def bins_of(confidence, bins):
    """Index of the bin, of `bins` equally wide ones in [1/2, 1]."""
    return np.minimum(((2 * confidence - 1) * bins).astype(int), bins - 1)


def calibration(deltas, soft=None, bins=10, weights=None):
    """Predicted and observed frequency of "the preferred answer is the better one" (HH fig. 9).

    A dict a bin that holds a pair: `delta` mean |delta|, `predicted` mean 1 / (1 + e^-|delta|),
    `observed`, its binomial error `se`, `pairs`. Convention: see `turned`. Observed above predicted
    is an under-confident model.
    """
    deltas, soft, weights = weighed(deltas, soft, weights)
    confidence, outcome = turned(deltas, soft)
    index = bins_of(confidence, bins)
    n = np.bincount(index, weights, bins)
    used = n > 0

    def mean(x):
        return np.bincount(index, weights * x, bins)[used] / n[used]

    observed = mean(outcome)
    variance = np.maximum(mean(outcome ** 2) - observed ** 2, 0)
    columns = dict(delta=mean(np.abs(deltas)), predicted=mean(confidence), observed=observed,
                   se=np.sqrt(variance / n[used]), pairs=np.bincount(index, minlength=bins)[used])
    return [dict(zip(columns, row, strict=True))
            for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def ece(deltas, soft=None, bins=10, weights=None):
    """Expected calibration error: |observed - predicted| of `calibration`, weighed by counts.

    Chance alone makes it positive: compare it with `ece_floor`.
    """
    deltas, soft, weights = weighed(deltas, soft, weights)
    confidence, outcome = turned(deltas, soft)
    gap = np.bincount(bins_of(confidence, bins), weights * (outcome - confidence), bins)
    return float(np.abs(gap).sum() / weights.sum())


def ece_se(deltas, soft=None, bins=10, weights=None, groups=None, seed=0, draws=200):
    """Bootstrap error of `ece` over comparisons, or over groups of them (a ranking's pairs).

    groups: the same number for neighbours that belong together.
    """
    deltas, soft, weights = weighed(deltas, soft, weights)
    groups = np.arange(len(deltas)) if groups is None else np.asarray(groups)
    where = np.split(np.arange(len(deltas)), np.flatnonzero(np.diff(groups)) + 1)

    def resampled(some):
        i = np.concatenate([where[g] for g in some])
        return ece(deltas[i], soft[i], bins, weights[i])

    return bootstrap_se(np.arange(len(where)), resampled, seed, draws)


def ece_floor(deltas, bins=10, weights=None, seed=0, draws=200):
    """What `ece` would be, on average, were the choices drawn from the model's own probabilities.

    Mean and spread over draws.
    """
    deltas, _, weights = weighed(deltas, None, weights)
    size, rng = np.abs(deltas), np.random.default_rng(seed)
    found = [ece(np.where(rng.random(len(size)) < sigmoid(size), size, -size), None, bins, weights)
             for _ in range(draws)]
    return float(np.mean(found)), float(np.std(found, ddof=1))


def confidence_gap(deltas, soft=None, weights=None):
    """Mean of observed - predicted and its error: above 0 is under-confident (HH 3.3)."""
    deltas, soft, weights = weighed(deltas, soft, weights)
    confidence, outcome = turned(deltas, soft)
    gap = np.average(outcome - confidence, weights=weights)
    spread = np.average((outcome - confidence - gap) ** 2, weights=weights)
    return float(gap), math.sqrt(spread / weights.sum())


def temperature(deltas, soft=None, weights=None):
    """The T that minimises the mean of -log sigmoid(delta / T), and its error.

    Under 1 the model is under-confident. With a = 1 / T the loss is convex; its slope,
    mean((sigmoid(a delta) - soft) delta), is bisected. Error: from the curvature, for choices. T is
    0 where every choice agrees with the model, inf where the model is no better than chance; the
    error is then nan.
    """
    deltas, soft, weights = weighed(deltas, soft, weights)

    def slope(a):
        return np.average((sigmoid(a * deltas) - soft) * deltas, weights=weights)

    if slope(0.0) >= 0:
        return math.inf, math.nan
    if not (((deltas > 0) - soft) * deltas).any():       # the slope at a = inf
        return 0.0, math.nan
    low, high = 0.0, 1 / np.abs(deltas).max()
    while slope(high) < 0:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    p = sigmoid(high * deltas)
    return float(1 / high), float(high ** -2 / math.sqrt((weights * p * (1 - p) * deltas**2).sum()))


def calibration_summary(deltas, soft=None, bins=10, weights=None, groups=None, seed=0):
    """Curve, ECE with its error and floor, confidence gap and temperature, in one dict."""
    floor, floor_spread = ece_floor(deltas, bins, weights, seed)
    gap, gap_se = confidence_gap(deltas, soft, weights)
    T, T_se = temperature(deltas, soft, weights)
    return dict(bins=calibration(deltas, soft, bins, weights), ece=ece(deltas, soft, bins, weights),
                ece_se=ece_se(deltas, soft, bins, weights, groups, seed), ece_floor=floor,
                ece_floor_spread=floor_spread, gap=gap, gap_se=gap_se, temperature=T,
                temperature_se=T_se)


# ---------------------------------------------------------------- correlations and fits

def ranks(values):
    """Ranks from 1; equal values share the mean of theirs."""
    values, = arrays(values)
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def pearson(x, y):
    """Linear correlation; nan where a column is constant."""
    x, y = arrays(x, y)
    if not np.ptp(x) or not np.ptp(y):
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def spearman(x, y):
    """Correlation of ranks; ties share the mean of theirs."""
    return pearson(ranks(x), ranks(y))


def log_linear_fit(parameters, data, values, at=(1.0, 1.0)):
    """Least squares of values = a + b log10(P / at[0]) + c log10(D / at[1]) (HH fig. 7, A.3).

    Returns dict(a, b, c, a_se, b_se, c_se, r2). With at=(1e11, 8e4) a compares with the paper's
    0.72; b and c are then a gain per factor of ten. Errors are from the residuals, n - 3 degrees of
    freedom. ValueError for under 4 points, or sizes that do not vary apart from each other.
    """
    P, D, y = arrays(parameters, data, values)
    if len(y) < 4 or (P <= 0).any() or (D <= 0).any():
        raise ValueError("a fit of 3 coefficients needs 4 points or more, and positive sizes")
    X = np.stack([np.ones(len(y)), np.log10(P / at[0]), np.log10(D / at[1])], 1)
    coefficients, _, rank, _ = np.linalg.lstsq(X, y, rcond=None)
    if rank < 3:
        raise ValueError("parameters and data must vary, and not together")
    left = y - X @ coefficients
    covariance = np.linalg.inv(X.T @ X) * (left @ left) / (len(y) - 3)
    total = ((y - y.mean()) ** 2).sum()
    fit = dict(zip("abc", coefficients.tolist(), strict=True))
    errors = np.sqrt(np.diag(covariance)).tolist()
    return fit | {f"{k}_se": e for k, e in zip("abc", errors, strict=True)} | dict(
        r2=float(1 - (left @ left) / total) if np.ptp(y) else math.nan)
