"""Pure statistics that stages and claims share: numpy in, plain numbers out, no model, no file.

A comparison enters as the scores of its better and its worse answer, or as their difference
delta = s(better) - s(worse); a preference model says P(better is preferred) = 1 / (1 + e^-delta)
(HH 3.2). "Better" is the answer that was chosen.

`weights` say how many independent comparisons a pair stands for, 1 if not given. The K(K-1)/2
pairs of a ranking have 2 / (K(K-1)) each, so that a ranking counts as one (InstructGPT eq. 1).
`soft` is the probability that the chosen answer is the better one, where an annotator's taste is
known; else the choice itself, 1.

A policy enters as a table of its samples' scores, [N prompts, n samples each].

All functions raise ValueError for no value, unequal lengths and numbers that are not finite. Errors
are standard errors.
"""

import math
from collections import Counter

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


# ---------------------------------------------------------------- calibration of choices

def choice_probabilities(choices, T=1.0):
    """Log-probs of the choices of each question (lists of any lengths) -> softmax(logp / T), T > 0.
    """
    if not T > 0:
        raise ValueError(f"a temperature is above 0: {T}")
    out = []
    for own in choices:
        scaled = arrays(own)[0] / T
        odds = np.exp(scaled - scaled.max())
        out.append(odds / odds.sum())
    return out


def need_true(choices, right):
    """ValueError unless each question, and there is one, has the index of its true choice."""
    if not len(choices) or any(not 0 <= r < len(x) for x, r in zip(choices, right, strict=True)):
        raise ValueError("each question needs the index of its true choice")


def choice_ece(choices, right, T=1.0, bins=10):
    """Expected calibration error of the likeliest choice: |share right - mean confidence| in equal
    bins of [0, 1], weighed by counts (Guo et al. 2017). right: index of the true choice.
    """
    need_true(choices, right)
    p = choice_probabilities(choices, T)
    confidence = np.array([x.max() for x in p])
    gap = np.array([float(x.argmax() == r) for x, r in zip(p, right, strict=True)]) - confidence
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(index, gap, bins)).sum() / len(gap))


def choice_temperature(choices, right):
    """The T that minimises the mean of -log softmax(logp / T) of the true choice. With a = 1 / T
    the loss is convex; its slope, mean over questions of E_p[logp] - logp(true), is bisected. inf
    if the true choices are no likelier than others, 0 if every one is the likeliest.
    """
    need_true(choices, right)
    rows = [arrays(own)[0] for own in choices]

    def slope(a):
        p = choice_probabilities(rows, 1 / a) if a else [np.full(len(x), 1 / len(x)) for x in rows]
        return np.mean([q @ x - x[r] for q, x, r in zip(p, rows, right, strict=True)])

    if slope(0.0) >= 0:
        return math.inf
    if all(x[r] == x.max() for x, r in zip(rows, right, strict=True)):
        return 0.0
    low, high = 0.0, 1.0
    while slope(high) < 0:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return float(1 / high)


# ---------------------------------------------------------------- reinforcement learning

def samples(*tables):
    """Tables [N prompts, n samples each] as float64 arrays of one shape, not empty."""
    out = arrays(*tables)
    if out[0].ndim != 2 or not out[0].size or len({t.shape for t in out}) > 1:
        raise ValueError(f"tables [prompts, samples] of one shape: {[t.shape for t in out]}")
    return out


def best_of_k(scores, values=None):
    """Value of the sample that scores highest among k of n, for each k from 1 to n (HH B.6).

    scores, values: [N prompts, n samples]; values are the scores if not given. The k are drawn
    without replacement, over all choices of them, which is unbiased for k fresh samples:

        sum_i w_i v_i,    w_i = C(i - 1, k - 1) / C(n, k),    v_i of the i-th lowest score

    (Nakano et al. 2021, app. I). Ties share their weights equally. Scores of 0 and 1 give pass@k.
    Returns dict(k, value, se) each: mean and error over prompts. ValueError for tables of two
    shapes.
    """
    scores, values = samples(scores, scores if values is None else values)
    n = scores.shape[1]
    order = np.argsort(scores, 1)
    scores, values = (np.take_along_axis(t, order, 1) for t in (scores, values))
    for own, v in zip(scores, values):                               # ties have their mean value
        _, tie, counts = np.unique(own, return_inverse=True, return_counts=True)
        v[:] = (np.bincount(tie, v) / counts)[tie]
    rows, i, w = [], np.arange(1, n + 1), np.full(n, 1 / n)
    for k in i.tolist():
        value, se = mean_se(values @ w)
        rows.append(dict(k=k, value=value, se=se))
        w = w * np.maximum(i - k, 0) / k * ((k + 1) / max(n - k, 1))  # to k + 1: no large binomials
    return rows


def pass_at_k(right, n, k):
    """Chance that at least one of k samples passes, of which c of n did: 1 - C(n-c, k) / C(n, k).

    Unbiased for k fresh samples, as 1 - (1 - c/n)^k is not (Chen et al. 2021). right: c of each
    task; n: samples of each task, or of all. Returns mean and error over tasks. ValueError for k
    above an n or under 1, and for c outside of 0 .. n.
    """
    right, n = arrays(right, np.broadcast_to(n, np.shape(right)))
    whole = all((x == np.round(x)).all() for x in (right, n)) and k == int(k)
    if not whole or not 1 <= k <= n.min() or (right < 0).any() or (right > n).any():
        raise ValueError(f"pass@{k} needs whole 0 <= c <= n of each task and 1 <= k <= n, the "
                         f"fewest samples are {n.min():g}")
    return mean_se([1 - math.comb(int(m - c), k) / math.comb(int(m), k)
                    for c, m in zip(right, n, strict=True)])


def best_of_n_kl(n):
    """log n - (n - 1) / n: the most that best of n can move from its base, KL(best || base), nats.

    Reached where no two samples ever tie, as with ever more outcomes equally likely; an upper bound
    otherwise (Beirami et al. 2024). HH takes log n (4.3), above it by (n - 1) / n.
    ValueError for n under 1.
    """
    if not 1 <= n < math.inf:
        raise ValueError(f"best of n needs n of 1 or more: {n}")
    return math.log(n) - (n - 1) / n


def best_of_n_kl_exact(probabilities, n, scores=None):
    """KL(best of n || base) in nats, where the base draws one of finitely many outcomes.

    probabilities [outcomes], sum 1. The best of n has score s with probability Q(s) = F(s)^n -
    F(s-)^n, F the base's cumulative distribution; outcomes of one score have P(s) in the base, and
    share Q(s) as they share P(s). So KL = sum_s Q(s) log(Q(s) / P(s)). scores: distinct and rising
    if not given. ValueError for n under 1 and what is no distribution.
    """
    p, scores = arrays(probabilities, np.arange(len(probabilities)) if scores is None else scores)
    best_of_n_kl(n)                                                  # refuses n
    if (p < 0).any() or abs(p.sum() - 1) > 1e-6:
        raise ValueError(f"probabilities are 0 or more and sum to 1, not to {p.sum()}")
    cdf = np.cumsum(np.bincount(np.unique(scores, return_inverse=True)[1], p))
    cdf /= cdf[-1]
    P, Q = np.diff(cdf, prepend=0), np.diff(cdf ** n, prepend=0)
    own = Q > 0                                                      # 0 log 0 = 0
    return float(Q[own] @ np.log(Q[own] / P[own]))


def slope_within(scores):
    """Slope of the mean score against sqrt(KL) that samples of the base predict, to first order.

    A small tilt of the base, pi ~ pi0 e^(t r), gains t Var(r) and costs KL = t^2 Var(r) / 2, Var
    within a prompt under pi0; with one t for all prompts both are means over prompts, and

        gain = sqrt(2 mean Var) sqrt(KL)

    exactly where r is Gaussian (HH 4.3 sees the line; no other policy gains more for its KL).
    scores: [N prompts, n samples each], n of 2 or more, else ValueError. Variances with n - 1.
    """
    scores, = samples(scores)
    if scores.shape[1] < 2:
        raise ValueError("a variance within prompts needs 2 samples of each")
    return math.sqrt(2 * scores.var(1, ddof=1).mean())


def win_rate(a, b):
    """Mean of 1 where a > b, 1/2 where a == b, else 0, over paired values; and its error."""
    return mean_se(hits(a, b))


def frontier_area(points, worst):
    """Area between a path's frontier and a corner: of what its points dominate (hypervolume in 2D).

    points: [N, 2], across and up, more is better. (x, y) dominates x0..x by y0..y, where worst =
    (x0, y0); the areas' union is summed as a staircase, from the right. A point not above the
    corner both ways counts nothing.
    """
    x, y = arrays(*np.reshape(points, (len(points), 2)).T)
    (x0, best), = arrays(worst)
    area = 0.0
    for i in np.argsort(-x):
        area += max(x[i] - x0, 0.0) * max(y[i] - best, 0.0)
        best = max(best, y[i])
    return float(area)


def distinct(texts, n):
    """distinct-n: different n-grams of words over all of them, in (0, 1]; low is repetitive.

    Words lie between blanks, n-grams within a text. Falls with the amount of text: compare equal
    amounts. Li et al. 2016 divide by all words, which differs little. ValueError where no text has
    n words.
    """
    words = [text.split() for text in texts]
    grams = [tuple(w[i:i + n]) for w in words for i in range(len(w) - n + 1)]
    if n < 1 or not grams:
        raise ValueError(f"no {n}-gram of words in {len(words)} texts")
    return len(set(grams)) / len(grams)


def commonest(texts_sentences):
    """Share of answers that contain the sentence which most of them contain, and that sentence.

    texts_sentences: a list of sentences an answer; how often one has a sentence makes no
    difference, and of equally common ones the first counts. Boilerplate of an over-trained policy
    brings the share near 1 (Bai et al. 2022b, 4.3). ValueError where there is no sentence.
    """
    counts = Counter(s for sentences in texts_sentences for s in dict.fromkeys(sentences))
    if not counts:
        raise ValueError("no sentence in any answer")
    sentence, count = counts.most_common(1)[0]
    return count / len(texts_sentences), sentence


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


def least_squares(X, y):
    """The c that minimise |y - X c|^2, their errors, and R^2 about the mean of y.

    X [points, coefficients]. Errors are from the residuals, by points - coefficients degrees of
    freedom. R^2 is nan where y is constant, below 0 where its mean fits better. ValueError for no
    more points than coefficients, or columns of X that do not vary apart from each other.
    """
    n, k = X.shape
    if n <= k:
        raise ValueError(f"a fit of {k} coefficients needs {k + 1} points or more, not {n}")
    scale = np.linalg.norm(X, axis=0)
    scale[scale == 0] = 1
    if np.linalg.matrix_rank(X / scale) < k:
        raise ValueError("what a fit depends on must vary, and not together")
    inverse = np.linalg.pinv(X / scale) / scale[:, None]             # [coefficients, points]
    c = inverse @ y
    left = y - X @ c
    errors = np.sqrt((inverse ** 2).sum(1) * (left @ left) / (n - k))
    r2 = 1 - (left @ left) / ((y - y.mean()) ** 2).sum() if np.ptp(y) else math.nan
    return c.tolist(), errors.tolist(), float(r2)


def linear_fit(x, y):
    """Least squares of y = a + b x: dict(a, b, a_se, b_se, r2), see `least_squares`.

    ValueError for under 3 points, or x that does not vary.
    """
    x, y = arrays(x, y)
    (a, b), (a_se, b_se), r2 = least_squares(np.stack([np.ones(len(x)), x], 1), y)
    return dict(a=a, b=b, a_se=a_se, b_se=b_se, r2=r2)


def log_linear_fit(parameters, data, values, at=(1.0, 1.0)):
    """Least squares of values = a + b log10(P / at[0]) + c log10(D / at[1]) (HH fig. 7, A.3).

    Returns dict(a, b, c, a_se, b_se, c_se, r2). With at=(1e11, 8e4) a compares with the paper's
    0.72; b and c are then a gain per factor of ten. ValueError for under 4 points, or sizes that do
    not vary apart from each other or are not positive.
    """
    P, D, y = arrays(parameters, data, values)
    if (P <= 0).any() or (D <= 0).any():
        raise ValueError("sizes must be positive")
    X = np.stack([np.ones(len(y)), np.log10(P / at[0]), np.log10(D / at[1])], 1)
    (a, b, c), (a_se, b_se, c_se), r2 = least_squares(X, y)
    return dict(a=a, b=b, c=c, a_se=a_se, b_se=b_se, c_se=c_se, r2=r2)


def gao_fit(d, gold, kind):
    """Over-optimization: the gold score's gain as a function of d = sqrt(KL) (Gao et al. 2022).

        "bon": d (alpha - beta d)        "rl": d (alpha - beta log d)

    gold: the gold score less its value at d = 0. Both forms are linear in (alpha, beta) and 0 at
    d = 0, so they are fitted without intercept, and points with d = 0 say nothing: left out. `peak`
    is the d where the fit is highest, inf where beta <= 0: alpha / (2 beta), and not under 0;
    e^(alpha / beta - 1). Returns dict(alpha, beta, alpha_se, beta_se, r2, peak), see
    `least_squares`. ValueError for d < 0, another kind, under 3 points above 0, or d that does not
    vary.
    """
    d, gold = arrays(d, gold)
    if kind not in ("bon", "rl") or (d < 0).any():
        raise ValueError(f"kind is 'bon' or 'rl', d = sqrt(KL) at least 0: {kind}, {d.min()}")
    d, gold = d[d > 0], gold[d > 0]
    bend = d if kind == "bon" else np.log(d)
    (alpha, beta), (alpha_se, beta_se), r2 = least_squares(np.stack([d, -d * bend], 1), gold)
    peak = math.inf
    if beta > 0:
        with np.errstate(over="ignore"):                             # inf is what it means
            peak = max(alpha / (2 * beta), 0.0) if kind == "bon" else np.exp(alpha / beta - 1)
    return dict(alpha=alpha, beta=beta, alpha_se=alpha_se, beta_se=beta_se, r2=r2,
                peak=float(peak))
