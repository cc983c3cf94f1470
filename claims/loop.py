"""What is told of online rounds: the loop of runs/laptop.sh in the README, and docs/online.md with
the regimes of the controlled experiment (claims/online.py) and the rounds that mend a policy
(claims/repair.py).
"""

import json

from claims.online import KINDS, OBJECTIVES, PICKED, REGIMES, Regime, gain, of_regime
from claims.records import told_of
from claims.start import points
from common import metrics_of
from measures import mean_se


def loop_of(folder):
    """What results/loop.jsonl holds of a run of online.py: Elo and gold by policy, the rounds."""
    found = json.loads((folder / "elo" / "elo.json").read_text())
    players = {o: {name: {k: found[o][k][i] for k in ("elo", "low", "high", "gold")}
                   for i, name in enumerate(found[o]["names"])} for o in OBJECTIVES}
    return dict(players, rounds=metrics_of(folder))


def loop_table(rows):
    """Markdown: Elo over the distilled policy and gold of each policy, and each round's PM."""
    if not rows:
        return "Not measured yet."
    lines = ["| policy | " + " | ".join(f"{o} Elo | {o} gold" for o in OBJECTIVES) + " |",
             "|---" * 5 + "|"]
    for name in rows[0]["helpful"]:
        cells = []
        for o in OBJECTIVES:
            own = [r[o][name] for r in rows]
            elo = f"{mean_se([x['elo'] for x in own])[0]:+.0f}"
            if len(rows) > 1:
                elo += f" ± {mean_se([x['elo'] for x in own])[1]:.0f}"
            elif name != "distilled":
                ends = ("no bound" if x is None else f"{x:+.0f}"
                        for x in (own[0]["low"], own[0]["high"]))
                elo += f" ({' to '.join(ends)})"
            cells += [elo, f"{mean_se([x['gold'] for x in own])[0]:+.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    told = []
    for i, first in enumerate(rows[0]["rounds"]):
        own = {k.removeprefix("accuracy_"): points(mean_se([r["rounds"][i][k] for r in rows])[0])
               for k in first if k.startswith("accuracy_")}
        told.append(f"round {i + 1}, {first['lines']:.0f} comparisons: "
                    + ", ".join(f"{lot} {share}" for lot, share in own.items()))
    return "\n".join(lines) + ("\n\nAccuracy of each round's preference model on held-out "
                               f"comparisons of each lot: {'; '.join(told)}.")


# ---------------------------------------------------------------- docs/online.md

def differs(regime):
    """The knobs of a regime that are not at their defaults, as text."""
    own = {k: v for k, v in vars(regime).items() if v != getattr(Regime, k)}
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in own.items()) or "the defaults"


def regime_row(name, rows):
    """A line of the table of regimes."""
    cells = [name, differs(REGIMES[name]), ", ".join(str(r["seed"]) for r in rows)]
    cells += [told_of([r["elo"][o]["mixture"] - r["elo"][o]["base"] for r in rows], places=0)
              for o in OBJECTIVES]
    cells += [told_of([gain(r) for r in rows], places=0)]
    ends = [[r[kind]["way"][-1] for r in rows] for kind in KINDS]
    cells += [" / ".join(told_of([x["gold"] for x in own]) for own in ends),
              " / ".join(f"{mean_se([x['sqrt_kl'] for x in own])[0]:.1f}" for own in ends),
              " / ".join(told_of([max(x["gold"] for x in r[kind]["way"]) for r in rows])
                         for kind in KINDS)]
    return "| " + " | ".join(map(str, cells)) + " |"


def regimes_table(rows):
    """Markdown: a line for each regime's seeds, those that chose and those that judge apart."""
    lines = ["| regime | differs in | seeds | helpful gain | harmless gain | gain | gold, base / "
             "mixture | sqrt(KL) | best gold |", "|---" * 9 + "|"]
    for name in REGIMES:
        own = of_regime(rows, name)
        for part in ([r for r in own if r["seed"] < PICKED],
                     [r for r in own if r["seed"] >= PICKED]):
            lines += [regime_row(name, part)] if part else []
    return "\n".join(lines)


def repair_table(rows):
    """Markdown: refusals and gold of each round's policy, a line for each seed and kind of lots."""
    lines = ["| comparisons a round | seed | lots show | first policy | round 1 | round 2 | "
             "round 3 |", "|---" * 7 + "|"]
    for r in sorted(rows, key=lambda r: (-r["count"], r["seed"], r["shown"] != "end")):
        cells = [f"{points(x['refused'])}, {x['gold_helpful']:+.2f} / {x['gold_harmless']:+.2f}"
                 for x in r["rounds"]]
        lines.append(f"| {r['count']:.0f} | {r['seed']} | {r['shown']} | {' | '.join(cells)} |")
    return "\n".join(lines)
