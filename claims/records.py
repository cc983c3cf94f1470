"""What claims share: the records of their units under results/, and the figure of a curve.

A unit is one seed of one setting. Its record is a JSON line in results/<claim>.jsonl; a unit that
has one is skipped, so an interrupted claim goes on where it was.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from elo import LOOKS
from measures import mean_se


FOLDER = [Path("results")]     # eval.py --quick names another, so that its lines mix with none


def append(name, row):
    """One JSON line in results/<name>.jsonl; numbers to four digits."""
    FOLDER[0].mkdir(parents=True, exist_ok=True)
    with open(FOLDER[0] / f"{name}.jsonl", "a") as file:
        rounded = json.loads(json.dumps(row), parse_float=lambda x: round(float(x), 4))
        file.write(json.dumps(rounded) + "\n")


def records(name):
    path = FOLDER[0] / f"{name}.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


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


def above(found, by=2):
    """Whether a (mean, error) is above 0 by so many errors."""
    return found[0] > by * found[1] and found[0] > 0


def told_of(values, sign="+", places=2):
    """Mean and error of values as text; sign "" for what is no gain, loss or gold."""
    mean, se = mean_se(values)
    return f"{mean:{sign}.{places}f} ± {se:.{places}f}"


def seeds_of(rows):
    return len({row["seed"] for row in rows})


@dataclass(frozen=True)
class Verdict:
    """held, not held or inconclusive; the numbers in a sentence; what a figure of them shows."""
    word: str
    told: str
    panels: tuple = ()     # (title, x label, y label, {label: {x: (mean, error, seeds)}})
    log_x: bool = False


def verdict(holds, rows, told, panels=(), log_x=False, least=3):
    """The verdict on records of at least `least` seeds; with fewer it is inconclusive."""
    word = "held" if holds else "not held"
    word = word if seeds_of(rows) >= least else f"inconclusive: fewer than {least} seeds"
    return Verdict(word, told, tuple(panels), log_x)


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

    def rows(self, name):
        """The records that judge it: of whole seeds."""
        rows = records(self.source or name)
        return complete(rows, *self.needs) if self.needs else rows

    def told(self, found):
        return found.told + (f". Why: {self.why}" if self.why and found.word == "not held" else "")


def draw_curves(name, panels, log_x=False):
    """docs/claims/<name>.png of a verdict's panels."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False,
                                layout="constrained")
    for ax, (title, x_label, y_label, lines) in zip(axes[0], panels, strict=True):
        for (label, points), (color, marker) in zip(lines.items(), itertools.cycle(LOOKS)):
            x, found = list(points), list(points.values())
            ax.errorbar(x, [f[0] for f in found], [f[1] for f in found], marker=marker, ms=4,
                        color=color, capsize=2, label=str(label))
        ax.set(title=title, xlabel=x_label, ylabel=y_label)
        if log_x:
            ax.set_xscale("log")
        if len(lines) > 1:
            ax.legend(fontsize=8)
    Path("docs/claims").mkdir(parents=True, exist_ok=True)
    figure.savefig(f"docs/claims/{name}.png", dpi=110)
    plt.close(figure)
