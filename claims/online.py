"""Iterated online RLHF (HH 4.5, B.4, B.6, 6.1): what H17 to H21 and H33 measure.

The controlled experiment: base comparisons alone against an even mixture of base, rejection-sampled
(RS) and online ones, with equal data and equal hyper-parameters. A unit is a seed of a regime. Its
mixture is collected as online.py does: a third is the distilled policy's; a PM of it picks the best
of 16 for the second; a PM of both trains the static policy, whose snapshots give the last. Then two
PMs, of base comparisons alone and of the mixture, each train a policy with the same budget.

All models are micro; a unit is 6 to 12 minutes on one core; its line is in results/online.jsonl.
"""

from dataclasses import dataclass

import numpy as np
import torch

import collect
import preference
from bradley_terry import scores
from claims.demonstrations import wins
from claims.policies import (OBJECTIVES, answers, asked, blocks, distilled, load, look,
                             trained_policy)
from claims.records import Claim, Effect, append, bars, less, missing, told_of, verdict
from claims.start import LR, LR_AFTER, base, few, of, points, pretrained, train_pm, work
from control import snapshots_of
from data import world
from elo import of_pm
from measures import mean_se, sigmoid
from rollout import gold_of, pm_scores


@dataclass(frozen=True)
class Regime:
    """Where the experiment is made."""
    total: int = 3000              # comparisons, on both sides
    pretrained: bool = True        # PMs start from PM pretraining; else from the base model
    iterations: int = 60           # of PPO, 128 answers each
    lr: float = 3e-4
    lambda_kl: float = 0.003       # in normalized score per nat
    helpful: float = 0.5           # share of helpful prompts
    snapshots: str = "1,2,3"       # roots of the KL at which a policy is deployed, beside its end
    rounds: int = 1                # the online third comes from so many rounds
    temperature: float = 0.6       # of the annotators


REGIMES = {
    "long": Regime(),
    "short": Regime(iterations=40, lr=1e-4, lambda_kl=0.03, helpful=0.6, snapshots="0.5,1"),
    "few": Regime(total=1200),
    "rounds": Regime(rounds=3),
    "quiet": Regime(temperature=0.2),
    "raw": Regime(pretrained=False),
    "missed": Regime(snapshots="0.5"),
}
SURE = ("short", "long")
CHOSEN = "short"       # by its gain in errors on seeds 0 to 2; judged on the others
KINDS = ("base", "mixture")
LOTS = ("base", "rs", "online")
PICKED = 3             # seeds from 0 that chose the regime


# ---------------------------------------------------------------- lots, PMs, policies

def folder_of(cfg, unit):
    return work(cfg) / f"online-{unit['regime']}-{unit['seed']}"


def gather(cfg, unit, name, policies, count, seed, **knobs):
    """Comparison lines of one lot, from these policies."""
    folder = folder_of(cfg, unit) / f"lines-{name}-{seed}"
    collect.collect(collect.Config(
        policy=",".join(policies), out=str(folder), count=count, seed=seed, tranche=name,
        temperature=REGIMES[unit["regime"]].temperature, device=cfg.device, **knobs))
    return preference.read_comparisons(folder)


def fitted(cfg, unit, name, lines, test):
    """Folder of the PM of these lines."""
    regime, seed = REGIMES[unit["regime"]], unit["seed"]
    init = pretrained(cfg, "micro") if regime.pretrained else base(cfg, "micro")
    return str(train_pm(cfg, f"{folder_of(cfg, unit).name}/pm-{name}", init, lines, test, seed,
                        lr=LR_AFTER if regime.pretrained else LR)[0])


def tuned(cfg, unit, name, pm, **knobs):
    """Folder of the policy that PPO makes with a PM, and its deployed checkpoints."""
    regime = REGIMES[unit["regime"]]
    folder = trained_policy(
        cfg, unit["seed"], f"{unit['regime']}-{name}", pm, regime.iterations, **{**dict(
            lr=regime.lr, lambda_kl=regime.lambda_kl, helpful=regime.helpful,
            snapshots=regime.snapshots), **knobs})
    return folder, [*map(str, snapshots_of(folder)), folder]


def lots_of(cfg, unit, test):
    """(base lines alone, the mixture), as many each; {lot: (policies, knobs)}; static policy."""
    regime, seed, start = REGIMES[unit["regime"]], unit["seed"], distilled(cfg, "micro")
    third = few(cfg, regime.total) // 3
    own = gather(cfg, unit, "base", [start], 3 * third, seed)
    lines = own[:third]
    lots = dict(base=([start], {}), rs=([start], dict(
        best=16, pm=fitted(cfg, unit, "first", lines, test))))
    lines = lines + gather(cfg, unit, "rs", [start], third, seed, **lots["rs"][1])
    static = None
    for r in range(regime.rounds):
        pm = fitted(cfg, unit, f"round-{r}", lines, test)
        folder, deployed = tuned(cfg, unit, f"round-{r}", pm)
        static = static or folder
        lots["online"] = (deployed, {})
        count = third // regime.rounds + (third % regime.rounds if r == 0 else 0)
        lines = lines + gather(cfg, unit, f"online-{r}", deployed, count, seed)
    return (own, lines), lots, static


# ---------------------------------------------------------------- what is measured

def said(cfg, path, start, judge, seed):
    """A policy's answers to the same prompts of each kind: gold and PM scores, by objective."""
    batches = {o: answers(cfg, load(path), load(start), judge, seed, o, few(cfg, 200))
               for o in OBJECTIVES}
    return {o: dict(gold=np.array(gold_of(b)[0]), pm=b["raw"].numpy()) for o, b in batches.items()}


def elo_of(golds):
    """Elo less that of the first player from expected choices: {name: golds of its answers}."""
    names = list(golds)
    W = np.array([[np.mean([world.preference(x, y) for x, y in zip(golds[a], golds[b])])
                   if a != b else 0.0 for b in names] for a in names])
    return dict(zip(names, scores(W)[0].tolist()))


@torch.no_grad()
def writers(cfg, path, judge, seed):
    """The policy's answers against those of writers, personas of goodness 0.9, on plain prompts:
    the share that annotators prefer, and that the PM does (H33).
    """
    tok, pm = judge
    batch = answers(cfg, load(path), load(path), judge, seed, "helpful", few(cfg, 200))
    talks = asked(seed, "helpful", len(batch["texts"]))
    texts = [world.persona_answer(world.keyed("writer", seed, i), world.request_of(t), 0.9, 0.5)
             for i, t in enumerate(talks)]
    rows = [tok.render(t, answer=True) + tok.render_answer(x)
            for t, x in zip(talks, texts, strict=True)]
    theirs = gold_of(dict(dialogues=talks, texts=texts))[0]
    by_pm = sigmoid(batch["raw"].numpy() - pm_scores(pm, tok, rows, 64).numpy())
    return dict(annotators=wins(gold_of(batch)[0], theirs), pm=mean_se(by_pm))


def scores_of(judge, lines):
    """Quantiles and mean of a PM's scores of all answers of a lot (H17), and its accuracy (H19)."""
    tok, pm = judge
    found = preference.score_lines(pm, tok, lines)[1]
    every = np.concatenate(found)
    return dict(mean=float(every.mean()), spread=float(every.std()),
                quantiles=np.quantile(every, np.linspace(0.05, 0.95, 19)).tolist(),
                accuracy=preference.mean_accuracy(found))


def measure_short(cfg):
    for unit in missing("online", cfg.seeds, regime=("short",)):
        run_unit(cfg, unit)


def measure_h18(cfg):
    """One seed of each regime that was tried; of two of them as many as asked, and as many others.
    """
    for unit in missing("online", 1, regime=SURE if cfg.quick else tuple(REGIMES)):
        run_unit(cfg, unit)
    for unit in missing("online", 2 * cfg.seeds, regime=SURE):
        run_unit(cfg, unit)


def run_unit(cfg, unit):
    seed, start = unit["seed"], distilled(cfg, "micro")
    test = gather(cfg, unit, "base", [start], few(cfg, 600), seed + 1000)
    data, lots, static = lots_of(cfg, unit, test)
    pms = {k: fitted(cfg, unit, k, lines, test) for k, lines in zip(KINDS, data, strict=True)}
    judges = {k: load(pm) for k, pm in pms.items()}
    held = {name: test if name == "base" else gather(
        cfg, unit, f"{name}-held", who, few(cfg, 600), seed + 1000, **knobs)
        for name, (who, knobs) in lots.items()}
    row = {**unit, "lines": [len(lines) for lines in data],
           "lots": {k: {n: scores_of(judge, x) for n, x in held.items()}
                    for k, judge in judges.items()},
           "start": keep(look(cfg, start, start, judges, seed))}
    players = dict(distilled=start, static=static)
    for kind, pm in pms.items():
        players[kind], deployed = tuned(cfg, unit, kind, pm)
        row[kind] = dict(way=[keep(look(cfg, path, start, judges, seed)) for path in deployed],
                         curve=blocks(players[kind], CURVE, 3))
    if unit["regime"] == "short":
        only = fitted(cfg, unit, "helpful", of(data[1], "helpful"), test)
        players["helpful only"] = tuned(cfg, unit, "helpful", only, helpful=1.0)[0]
        row["writers"] = writers(cfg, players["mixture"], judges["mixture"], seed)
    found = {name: said(cfg, path, start, judges["mixture"], seed)
             for name, path in players.items()}
    row["elo"] = {o: elo_of({n: x[o]["gold"] for n, x in found.items()}) for o in OBJECTIVES}
    row["pm_elo"] = {o: {n: of_pm(x[o]["pm"].mean() - found["distilled"][o]["pm"].mean())
                         for n, x in found.items()} for o in OBJECTIVES}
    row["win"] = {o: wins(found["mixture"][o]["gold"], found["base"][o]["gold"])
                  for o in OBJECTIVES}
    append("online", row)


CURVE = ("kl", "pm", "gold_helpful", "gold_harmless", "refused_helpful")
KEPT = ("sqrt_kl", "gold", "gold_helpful", "gold_harmless", "refused", "base", "mixture")


def keep(found):
    return {k: found[k] for k in KEPT}


# ---------------------------------------------------------------- reading the lines

def of_regime(rows, regime):
    return sorted((r for r in rows if r["regime"] == regime), key=lambda r: r["seed"])


def both(elo, name):
    """Mean of a player's Elo over both objectives."""
    return (elo["helpful"][name] + elo["harmless"][name]) / 2


def gain(row):
    """Elo of the mixture's policy less the base comparisons' own, mean of both objectives."""
    return both(row["elo"], "mixture") - both(row["elo"], "base")


def falls(rows, key, order, matters):
    """The Effects of falling along `order`, of row-wise values of `key`."""
    return [Effect(mean_se([key(r)[a] - key(r)[b] for r in rows]), matters)
            for a, b in zip(order, order[1:])]


def verdict_h17(rows):
    """held: under the mixture's PM the mean score of held-out base, RS and online answers rises in
    that order, each step by two errors over seeds and 0.1 (regime short).
    """
    own = of_regime(rows, "short")
    means = [{n: x["mean"] for n, x in r["lots"]["mixture"].items()} for r in own]
    told = "mean PM score of answers: " + ", ".join(
        f"{n} {told_of([m[n] for m in means])}" for n in LOTS)
    at = np.linspace(0.05, 0.95, 19)
    panels = [("answers of each lot", "PM score", "share of answers below", {
        n: {x: (float(q), 0.0, len(own)) for x, q in zip(np.mean(
            [r["lots"]["mixture"][n]["quantiles"] for r in own], 0).tolist(), at)} for n in LOTS})]
    holds = falls(own, lambda r: {n: x["mean"] for n, x in r["lots"]["mixture"].items()},
                  LOTS[::-1], 0.1)
    return verdict(holds, own, told, panels)


def verdict_h18(rows):
    """held: in the chosen regime the mixture's policy has a higher Elo than the base comparisons'
    by two errors and 10, mean of both objectives, over seeds that did not choose the regime.
    """
    sure = [r for r in of_regime(rows, CHOSEN) if r["seed"] >= PICKED]
    tried = ", ".join(f"{name} {told_of([gain(r) for r in own], places=0)} ({len(own)})"
                      for name in REGIMES if (own := of_regime(
                          [r for r in rows if r["seed"] < PICKED], name)))
    told = f"Elo of the mixture less base only by regime (seeds): {tried}"
    if sure:
        told += (f"; {CHOSEN} on {len(sure)} other seeds: "
                 f"{told_of([gain(r) for r in sure], places=0)}, gold "
                 + " against ".join(told_of([r[k]["way"][-1]["gold"] for r in sure])
                                    for k in KINDS[::-1]))
    curves = {f"{k}, {o}": curve_of(sure, k, f"gold_{o}") for k in KINDS for o in OBJECTIVES}
    panels = [("PPO on either PM", "iteration", "gold utility", curves)] if sure else []
    holds = [Effect(mean_se([gain(r) for r in sure]), 10.0)] if sure else False
    return verdict(holds, sure, told, panels)


def curve_of(rows, kind, name):
    """{iteration: mean, error, seeds} of a number of PPO's log, three iterations together."""
    parts = zip(*(r[kind]["curve"] for r in rows))
    return {3 * i + 1: (*mean_se([x[name] for x in part]), len(rows))
            for i, part in enumerate(parts) if all(name in x for x in part)}


def verdict_h19(rows):
    """held: the mixture's PM is less often right on held-out RS than on base comparisons, and less
    on online ones than on RS, each by two errors over seeds and a point (regime short).
    """
    own = of_regime(rows, "short")
    told = "accuracy of the mixture's PM: " + ", ".join(
        f"{n} {points(mean_se(v)[0])} ± {points(mean_se(v)[1])}" for n in LOTS
        for v in [[r["lots"]["mixture"][n]["accuracy"] for r in own]])
    holds = falls(own, lambda r: {n: x["accuracy"] for n, x in r["lots"]["mixture"].items()}, LOTS,
                  0.01)
    panels = [bars("the mixture's PM on held-out comparisons", "accuracy", {
        n: [r["lots"]["mixture"][n]["accuracy"] for r in own] for n in LOTS})]
    return verdict(holds, own, told, panels)


def verdict_h20(rows):
    """held: for both objectives Elo is online > static > distilled, and a helpful-only policy is
    the most helpful and less harmless than online, each by two errors over seeds and 10 (regime
    short).
    """
    own = of_regime(rows, "short")
    elo = {o: [r["elo"][o] for r in own] for o in OBJECTIVES}

    def beyond(o, a, b):
        return Effect(mean_se([x[a] - x[b] for x in elo[o]]), 10.0)

    holds = [beyond(o, a, b) for o in OBJECTIVES
             for a, b in (("mixture", "static"), ("static", "distilled"))]
    holds += [beyond("helpful", "helpful only", b) for b in ("mixture", "static")]
    holds += [beyond("harmless", "mixture", "helpful only")]
    names = dict(static="static", mixture="online") | {"helpful only": "helpful only"}
    told = "Elo over distilled, helpful / harmless: " + "; ".join(
        f"{label} " + " / ".join(told_of([x[n] for x in elo[o]], places=0) for o in OBJECTIVES)
        for n, label in names.items())
    points_of = {label: {mean_se([x[n] for x in elo["helpful"]])[0]: (
        *mean_se([x[n] for x in elo["harmless"]]), len(own))}
        for n, label in {"distilled": "distilled", **names}.items()}
    return verdict(holds, own, told, [("frontier (HH fig. 1)", "helpful Elo", "harmless Elo",
                                       points_of)])


def by_gold(row, objective):
    """Elo over distilled that a perfect PM's mean scores foretell for the online policy.

    Means exaggerate even so: choices come from sigmoid of each difference, which levels off.
    """
    first, last = (x[f"gold_{objective}"] for x in (row["start"], row["mixture"]["way"][-1]))
    return float(of_pm((last - first) / REGIMES[row["regime"]].temperature))


def verdict_h21(rows):
    """held: Elo over distilled that PM scores foretell for the online policy is above that from
    choices, and above what gold itself would foretell in this way, by two errors over seeds and 10,
    for both objectives (regime short).
    """
    own, told, holds, panels = of_regime(rows, "short"), [], [], []
    for o in OBJECTIVES:
        by_pm, chosen = ([r[k][o]["mixture"] for r in own] for k in ("pm_elo", "elo"))
        perfect = [by_gold(r, o) for r in own]
        holds += [Effect(mean_se(less(by_pm, x)), 10.0)
                  for x in (chosen, perfect)]
        panels.append(bars(o, "Elo over distilled", {
            "PM's means": by_pm, "gold's means": perfect, "choices": chosen}))
        told.append(f"{o}: foretold {told_of(by_pm, places=0)} (by gold itself "
                    f"{told_of(perfect, places=0)}), chosen {told_of(chosen, places=0)}")
    return verdict(holds, own, "; ".join(told), panels)


def verdict_h33(rows):
    """held: the PM prefers the online policy's answers to writers' by more than annotators do, by
    two errors over seeds and a point (regime short).
    """
    own = of_regime(rows, "short")
    by_pm, chosen = ([r["writers"][k][0] for r in own] for k in ("pm", "annotators"))
    told = "preferred to writers' answers: " + ", ".join(
        f"by {name} {points(mean_se(v)[0])} ± {points(mean_se(v)[1])}"
        for name, v in (("the PM", by_pm), ("annotators", chosen)))
    more = mean_se(less(by_pm, chosen))
    panels = [bars("preferred to writers' answers", "share", {"by the PM": by_pm,
                                                              "by annotators": chosen})]
    return verdict([Effect(more, 0.01)], own, told, panels)


CLAIMS = {
    "H17": Claim("base, RS and online answers have PM scores further to the right in that "
                 "order",
                 "HH 4.5, fig. 15 left", measure_short, verdict_h17, 24,
                 source="online", needs=("regime", ("short",)),
                 why="bests of 16 score a little above the answers of snapshots at sqrt(KL) 0.5 to "
                     "1.7: the mixture's PM shares its base comparisons with the one that picked",
                 paper="modes at about -1, between, and +2"),
    "H18": Claim("at equal data and hyper-parameters the iterated mixture beats base comparisons "
                 "alone in Elo", "HH 4.5, fig. 16", measure_h18, verdict_h18, 110,
                 source="online", needs=("regime", ("short",)),
                 paper="+50 to 75 Elo, 44k base comparisons against 3 x 15k"),
    "H19": Claim("the PM's accuracy falls from base to RS to online comparisons",
                 "HH 4.5", measure_short, verdict_h19, 24,
                 source="online", needs=("regime", ("short",)),
                 why="bests of 16 are the hardest lot, online answers lie between: a PM of the "
                     "same base comparisons picked both sides of an RS pair, which tie in what it "
                     "knows",
                 paper="74, 70, 67%"),
    "H20": Claim("online > static > distilled; helpful-only RLHF is the most helpful and less "
                 "harmless",
                 "HH fig. 1", measure_short, verdict_h20, 24,
                 source="online", needs=("regime", ("short",)),
                 why="static is above distilled, but online above static by 1.8 errors of six "
                     "seeds alone; and helpful-only RLHF is not the most helpful on plain "
                     "prompts: it had half of the comparisons, and what it gains, help with "
                     "harm, is not asked there",
                 paper="helpful / harmless: online +290 / +220, static +130 / +120, helpful-only "
                       "+350 / -50"),
    "H21": Claim("Elo foretold by PM scores is above Elo from choices",
                 "HH B.4, figs 15, 35", measure_short, verdict_h21, 24,
                 source="online", needs=("regime", ("short",)),
                 why="mean PM scores foretell 1.7 times the harmless Elo, but so do gold's own "
                     "means: a choice levels off where the difference is large, whoever judges",
                 paper="600 foretold, 300 chosen"),
    "H33": Claim("the PM prefers the policy's answers to writers' by more than annotators do",
                 "HH 6.1, fig. 24", measure_short, verdict_h33, 24,
                 source="online", needs=("regime", ("short",)),
                 paper="56% by people"),
}
