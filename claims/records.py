"""What claims share: the records of their units under results/, and the figure of a curve.

A unit is one seed of one setting. Its record is a JSON line in results/<claim>.jsonl; a unit that
has one is skipped, so an interrupted claim goes on where it was.
"""

import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common import LOOKS, UserError
from data.lines import read_rows
from measures import mean_se


ANY = 1e-9                      # least size of an Effect that matters however small it is
FOLDER = [Path("results")]     # eval.py --quick names another, so that its lines mix with none


def append(name, row):
    """One JSON line in results/<name>.jsonl; numbers to four digits."""
    FOLDER[0].mkdir(parents=True, exist_ok=True)
    with open(FOLDER[0] / f"{name}.jsonl", "a") as file:
        rounded = json.loads(json.dumps(row), parse_float=lambda x: round(float(x), 4))
        file.write(json.dumps(rounded) + "\n")


def records(name):
    """The lines of results/<name>.jsonl; UserError naming file and line of one that is broken."""
    path = FOLDER[0] / f"{name}.jsonl"
    try:
        return list(read_rows(path, dict, Counter())) if path.exists() else []
    except ValueError as error:
        raise UserError(f"{error}: mend or delete the line, its unit is measured again") from None


def complete(rows, key, values):
    """The rows of the seeds that have one for each of the values of key, in the order of seeds."""
    by = {}
    for r in rows:
        by.setdefault(r["seed"], set()).add(r.get(key))
    return sorted((r for r in rows if by[r["seed"]] >= set(values)), key=lambda r: r["seed"])


def missing(name, seeds, **grid):
    """The units of grid x seeds that have no record yet, as dicts; tells how many are left."""
    cells = itertools.product(range(seeds), *grid.values())
    units = [dict(zip(("seed", *grid), cell, strict=True)) for cell in cells]
    done = [{k: r.get(k) for k in ("seed", *grid)} for r in records(name)]
    left = [u for u in units if u not in done]
    for i, unit in enumerate(left):
        told = ", ".join(f"{k} {v}" for k, v in unit.items())
        print(f"{name}: {told}   ({len(units) - len(left) + i + 1} of {len(units)})", flush=True)
        yield unit


def over_seeds(rows, value, *keys):
    """(values of keys) -> (mean, standard error over seeds, seeds) of row[value]."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row[value])
    return {key: (*mean_se(values), len(values)) for key, values in sorted(groups.items())}


def curves(rows, value, key, x):
    """{x: (mean, error, seeds)} of row[value] for each value of key, in the order of the rows."""
    found = over_seeds(rows, value, key, x)
    return {k: {at: f for (own, at), f in found.items() if own == k}
            for k in dict.fromkeys(r[key] for r in rows)}


def paired(rows, value, key, first, second):
    """Mean and error over seeds of value at key = second less that at first, seed by seed.

    The seed's comparisons and tests are the same on both sides, so their noise cancels.
    """
    one, two = ({r["seed"]: r[value] for r in rows if r[key] == k} for k in (first, second))
    return mean_se([two[s] - one[s] for s in sorted(one.keys() & two.keys())])


def less(one, other):
    """one - other, seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]


def above(found, by=2):
    """Whether a (mean, error) is above 0 by so many errors."""
    return found[0] > by * found[1] and found[0] > 0


def told_of(values, sign="+", places=2):
    """Mean and error of values as text, of one value itself; sign "" for what is no gain, loss or
    gold.
    """
    mean, se = mean_se(values)
    return f"{mean:{sign}.{places}f}" + (f" ± {se:.{places}f}" if len(values) > 1 else "")


def seeds_of(rows):
    return len({row["seed"] for row in rows})


@dataclass(frozen=True)
class Verdict:
    """held, not held or inconclusive: why; the numbers in a sentence; what a figure shows."""
    word: str
    told: str
    panels: tuple = ()     # (title, x label, y label, {label: {x: (mean, error, seeds)}}), of paths
                           # in a plane with True behind: their points are joined in their order
    log_x: bool = False


@dataclass(frozen=True)
class Effect:
    """What a rule asks to be above 0 by two errors over seeds, and the least that would matter."""
    found: tuple           # mean, error over seeds
    matters: float         # in the same unit, above 0

    @property
    def word(self):
        """held; not held: less than what matters, by two errors; or inconclusive."""
        mean, se = self.found
        if above(self.found) and mean >= self.matters:
            return "held"
        return "not held" if mean + 2 * se < self.matters else "inconclusive"

    def seeds(self, n):
        """Seeds that would decide it, if the mean stayed, from n with this error."""
        mean, se = self.found
        room = mean if mean >= self.matters else self.matters - mean
        return math.ceil(n * (2 * se / room) ** 2)


def rises(values, matters):
    """The Effect of values over seeds."""
    return Effect(mean_se(values), matters)


def passes(values):
    """The Effect of values whose mean has to be above 0, by however little: a bound is passed."""
    return rises(values, ANY)


def within(values, most):
    """The Effect of a mean that has to lie within `most` of 0 by two errors: noise does not help.
    """
    mean, se = mean_se(values)
    return Effect((most - abs(mean), se), ANY)


def verdict(holds, rows, told, panels=(), log_x=False, least=3):
    """The verdict on records of at least `least` seeds; with fewer it is inconclusive.

    holds: whether the rule holds, or its parts, booleans and Effects. It is held if all are, not
    held if any is not; else inconclusive, with the seeds that it would need.
    """
    parts = holds if isinstance(holds, list) else [bool(holds)]
    words = [p.word if isinstance(p, Effect) else "held" if p else "not held" for p in parts]
    word = next((w for w in ("not held", "inconclusive") if w in words), "held")
    if word == "inconclusive":
        need = max(p.seeds(seeds_of(rows)) for p, w in zip(parts, words) if w == word)
        many = f"about {need}" if need <= 1000 else "over 1000"
        word = f"inconclusive: {many} seeds would tell, if the means stayed"
    word = word if seeds_of(rows) >= least else f"inconclusive: fewer than {least} seeds"
    return Verdict(word, told, tuple(panels), log_x)


def bars(title, y, values):
    """A panel of a point a label: {label: its values over seeds}."""
    return title, "", y, {y: {label: (*mean_se(v), len(v)) for label, v in values.items()}}


@dataclass(frozen=True)
class Claim:
    """What a paper says and where; how it is measured here, judged, and in about how many minutes
    of two cores for three seeds, after runs/laptop.sh.
    """
    says: str
    where: str
    measure: object        # cfg -> appends the missing records
    judge: object          # records -> Verdict
    minutes: int           # of all claims with the same source together
    why: str = ""          # what the records show of the reason, where it does not hold here
    source: str = ""       # results/<source>.jsonl, where claims share their runs; else by its id
    needs: tuple = ()      # (key, values): the lines that a seed must have there
    paper: str = ""        # the figures that the paper gives

    @property
    def rule(self):
        """When it is held, in the words of its verdict function."""
        return " ".join(self.judge.__doc__.split())

    def rows(self, name):
        """The records that judge it: of whole seeds."""
        rows = records(self.source or name)
        return complete(rows, *self.needs) if self.needs else rows

    def told(self, found):
        return found.told + (f". Why: {self.why}" if self.why and found.word == "not held" else "")


def draw_curves(name, panels, log_x=False):
    """docs/claims/<name>.png of a verdict's panels: lines with a band of one error over seeds, or,
    where x are words, points with bars. Told apart by color, marker and dashes.
    """
    if not panels:
        return
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    wide = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = math.ceil(len(panels) / wide)
    figure, axes = plt.subplots(rows, wide, figsize=(4.6 * wide, 3.6 * rows), squeeze=False,
                                layout="constrained")
    for ax in axes.flat[len(panels):]:
        ax.set_axis_off()
    for ax, (title, x_label, y_label, lines, *path) in zip(axes.flat, panels):
        words = any(isinstance(x, str) for points in lines.values() for x in points)
        looks = zip(itertools.cycle(LOOKS), itertools.cycle(("-", "--", ":", "-.")))
        for (label, points), ((color, marker), dashes) in zip(lines.items(), looks):
            order = list(points) if words or path else sorted(points)
            mean, se = zip(*(points[x][:2] for x in order))
            look = dict(marker=marker, ms=5, color=color, label=str(label))
            if words or path:
                ax.errorbar(order, mean, se, linestyle="" if words else dashes, capsize=3, **look)
            else:
                ax.plot(order, mean, linestyle=dashes, **look)
                ax.fill_between(order, [m - e for m, e in zip(mean, se)],
                                [m + e for m, e in zip(mean, se)], color=color, alpha=0.2, lw=0)
        ax.set(title=title, xlabel=x_label, ylabel=y_label)
        if words:
            ax.tick_params(axis="x", rotation=20)
            ax.margins(x=0.15)
        elif log_x:
            ax.set_xscale("log")
            at = sorted({x for points in lines.values() for x in points})
            if len(at) < 8:
                ax.set_xticks(at, [f"{x:g}" if x < 1000 else f"{x / 1000:.0f}k" for x in at])
                ax.set_xticks([], minor=True)
        if len(lines) > 1:
            ax.legend(fontsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    Path("docs/claims").mkdir(parents=True, exist_ok=True)
    figure.savefig(f"docs/claims/{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)
