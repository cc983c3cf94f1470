"""Bradley-Terry: scores from who won against whom (HH B.5; Hunter 2004): numpy in, numbers out.

    P(i beats j) = sigmoid(r_i - r_j)

Wins are a table W [n, n], W[i, j] those of i over j, a tie half a win each. The scores r are the
most likely ones, told in Elo points, 400 / ln 10 a nat, less those of one player, the reference.
An interval of a difference holds the values whose likelihood, with all other scores at their best
for it, is within chi^2's 95% of the largest (profile likelihood).

All functions raise ValueError for a table that is not square and counts that are negative or not
finite.
"""

import numpy as np

from measures import sigmoid

NAT = 400 / np.log(10)         # Elo points
DROP = 3.841458820694124 / 2   # of log-likelihood at an interval's ends: chi^2, one degree, 95%


# ---------------------------------------------------------------- the unit

def win_rate(difference):
    """Chance to be preferred at an Elo difference: 1 / (1 + 10^(-difference / 400))."""
    return sigmoid(np.asarray(difference) / NAT)


def of_win_rate(rate):
    """Elo difference at which one is preferred with this chance, 0 to 1; infinite at both ends."""
    with np.errstate(divide="ignore"):
        return NAT * (np.log(rate) - np.log1p(-np.asarray(rate, dtype=np.float64)))


def of_pm(difference):
    """A difference of PM scores in Elo points: 174 a point, 400 / ln 10.

    An identity and no empirical figure: both say sigmoid(difference), in two units (HH 2.4, B.5).
    """
    return NAT * np.asarray(difference, dtype=np.float64)


# ---------------------------------------------------------------- the likelihood

def checked(W):
    """Win counts as float64 with no wins over oneself. ValueError if they are none."""
    W = np.array(W, dtype=np.float64)
    if W.ndim != 2 or len({*W.shape}) != 1:
        raise ValueError(f"wins must be a square table, not of shape {W.shape}")
    if not (np.isfinite(W).all() and (W >= 0).all()):
        raise ValueError("wins must be numbers from 0 on: one is negative, nan or inf")
    np.fill_diagonal(W, 0)
    return W


def reachable(edges):
    """Whether a path leads from i to j, along edges [n, n] that are True; i reaches itself."""
    found = edges | np.eye(len(edges), dtype=bool)
    for _ in range(len(edges).bit_length()):
        found = (found.astype(int) @ found) > 0
    return found


def likelihood(W, r):
    """Log-likelihood of the scores r [n], in nats: the sum of W_ij log sigmoid(r_i - r_j)."""
    return -(W * np.logaddexp(0, r[None] - r[:, None])).sum()


def slopes(W, r):
    """Gradient [n] and curvature [n, n] (less the Hessian) of the log-likelihood."""
    p = sigmoid(r[:, None] - r[None])                    # p.T is 1 - p, with all its digits
    weight = (W + W.T) * p * p.T
    return (W * p.T - W.T * p).sum(1), np.diag(weight.sum(1)) - weight


def maximum(W, fixed):
    """The most likely scores [n], nats, with those of fixed {i: r_i} held, by Newton's method.

    All must be connected with a fixed one, and the maximum finite.
    """
    r, free = np.zeros(len(W)), np.array([i not in fixed for i in range(len(W))])
    r[list(fixed)] = list(fixed.values())
    for _ in range(200 if free.any() else 0):
        slope, curve = (x[free] for x in slopes(W, r))
        step = np.linalg.solve(curve[:, free], slope)
        now, size = likelihood(W, r), min(1.0, 5 / max(np.abs(step).max(), 1e-9))
        there = r.copy()
        there[free] += size * step
        while likelihood(W, there) < now - 1e-12 * (1 - now):
            size /= 2
            there[free] = r[free] + size * step
        r = there
        if slope @ step < 1e-16:  # squared at each step: the next is past the last digit
            break
    return r


# ---------------------------------------------------------------- intervals and scores

def interval(W, i, j):
    """95% profile-likelihood interval of the Elo of i less that of j: (low, high).

    An end is infinite where the choices set no bound: the high one if no chain of wins leads from j
    to i, so that i may be better by any amount. nan where no chain of games joins them.
    """
    W, wins = checked(W), reachable(np.asarray(W) > 0)
    met = reachable(W + W.T > 0)[i]
    if i == j or not met[j]:
        return (0.0, 0.0) if i == j else (np.nan, np.nan)
    places = np.flatnonzero(met).tolist()
    own, a, b = W[np.ix_(met, met)], places.index(i), places.index(j)
    if not wins[np.ix_(met, met)].all():   # the largest likelihood is a limit: come close to it
        own = own + 1e-7 * (own + own.T > 0)
    best = maximum(own, {b: 0.0})
    keep = np.arange(len(own)) != b
    spread = np.linalg.inv(slopes(own, best)[1][keep][:, keep]).diagonal()[a - (a > b)] ** 0.5
    out = []
    for sign, bounded in ((-1, wins[i, j]), (1, wins[j, i])):
        d = best[a] + sign * min(2 * spread, 5)
        for _ in range(100 if bounded else 0):  # Newton's method on a convex function of d
            r = maximum(own, {b: 0.0, a: d})
            fallen, slope = likelihood(own, best) - likelihood(own, r), slopes(own, r)[0][a]
            step = np.clip((fallen - DROP) / slope, -5, 5)
            d += step
            if abs(step) < 1e-11:
                break
        out.append(float(NAT * d) if bounded else sign * np.inf)
    return tuple(out)


def scores(W, reference=0, prior=0.5, always=False):
    """Elo [n] less the reference's, whether the choices separate its group, and the groups.

    Separated: some policies only won, or only lost, against all others, so that the most likely
    difference is infinite. Then, or with `always`, each pair that met is given `prior` wins each
    way. A group is joined by games; those outside the reference's have nan.
    """
    W = checked(W)
    if not 0 <= reference < len(W) or not prior > 0:
        raise ValueError(f"no policy {reference} of {len(W)}, or no prior above 0: {prior}")
    joined = reachable(W + W.T > 0)
    met = joined[reference]
    own = W[np.ix_(met, met)]
    separated = not reachable(own > 0).all()
    if separated or always:
        own = own + prior * (own + own.T > 0)
    elo = np.full(len(W), np.nan)
    elo[met] = NAT * maximum(own, {int(met[:reference].sum()): 0.0})
    groups = sorted({tuple(np.flatnonzero(row).tolist()) for row in joined})
    return elo, separated, [list(g) for g in groups]


def fit(W, reference=0, prior=0.5, always=False):
    """Elo scores of win counts W [n, n], W[i, j] wins of i over j, ties half each (HH B.5).

    Returns a dict: elo, low and high [n], less the reference's; games [n]; separated, groups as in
    `scores`; note, a sentence if there is something to know, else "". Intervals are of the choices
    without pseudo-wins (widened to the score if those moved it out): an end is infinite where the
    choices set no bound. A game is taken to be independent of the others; `bootstrap` takes only
    prompts to be. ValueError for bad counts.
    """
    elo, separated, groups = scores(W, reference, prior, always)
    low, high = np.array([interval(W, i, reference) for i in range(len(elo))]).T
    low, high = np.minimum(low, elo), np.maximum(high, elo)   # pseudo-wins may leave them, if few
    W, notes = checked(W), []
    if separated:
        notes.append("separated: some only won or only lost, so the most likely difference is "
                     f"infinite; each pair that met was given {prior:g} wins each way")
    if len(groups) > 1:
        notes.append(f"{len(groups)} groups that never met: no score outside the reference's")
    return dict(elo=elo.tolist(), low=low.tolist(), high=high.tolist(),
                games=(W + W.T).sum(1).tolist(), separated=separated, groups=groups,
                note="; ".join(notes))
