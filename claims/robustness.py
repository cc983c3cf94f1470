"""The robustness experiment (HH 4.2, 4.3): RL against a PM while another, held-out one looks on.

A seed's comparisons are split in two halves. A train PM learns the first, from the base model; a
test PM learns the second, from a base model of its own. PPO climbs the train PM's score almost
without a KL penalty; at each snapshot both scores, gold by objective, KL, entropy, length,
refusals, agreement and boilerplate are measured on prompts drawn apart from PPO's.

A unit is a seed, a policy size and a PM size: 1 to 5 minutes on one core; its line is in
results/robustness.jsonl. H09 H10 H11 H12 H13 H23 K02 K05 are read from the same lines.
"""

import math
from pathlib import Path

import numpy as np

import preference
import pretrain
from claims.policies import (blocks, distilled, forget, load, logp_accuracy, look, many_answers,
                             trained_policy)
from claims.records import Claim, Effect, append, bars, less, missing, passes, told_of, verdict
from claims.start import (base, few, place, points, steps_of, test_lines, train_lines,
                          train_pm)
from common import load_checkpoint, load_source, write_atomically
from control import snapshots_of
from measures import best_of_k, best_of_n_kl, gao_fit, linear_fit, mean_se, slope_within

CELLS = (("micro", "micro"), ("micro", "nano"), ("micro", "toy"), ("nano", "toy"), ("toy", "toy"))
AT = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5)    # sqrt(KL)
ITERATIONS, BLOCK = 60, 3


def other_base(cfg):
    """A base model with its own text and weights, and the same tokenizer: the test PM's start."""
    folder = place(cfg, "pretrain-test")
    ranks = Path(cfg.run) / "tokenizer.txt"
    text = load_source(base(cfg, "toy"))["tokenizer"]
    write_atomically(ranks, lambda file: file.write(text.encode()))
    pretrain.train(pretrain.Config(out=str(folder), seed=100, steps=steps_of(cfg, folder),
                                   device=cfg.device, tokenizer=str(ranks)))
    return str(folder)


def two_pms(cfg, seed, size):
    """Folders of the train PM of a size and of the test PM."""
    lines, test = train_lines(cfg, seed), test_lines(cfg, seed)[:600]
    half = len(lines) // 2
    return (train_pm(cfg, f"train-{size}-{seed}", base(cfg, size), lines[:half], test, seed)[0],
            train_pm(cfg, f"other-{seed}", other_base(cfg), lines[half:], test, seed)[0])


def measure(cfg):
    """The units that have no line yet."""
    cells = [f"{policy}/{pm}" for policy, pm in CELLS]
    for unit in missing("robustness", cfg.seeds, cell=cells):
        seed, (size, pm_size) = unit["seed"], unit["cell"].split("/")
        train, test = two_pms(cfg, seed, pm_size)
        start, name = distilled(cfg, size), f"robust-{size}-{pm_size}"
        folder = trained_policy(cfg, seed, name, str(train), ITERATIONS, policy=start, epochs=1,
                                test_pm=str(test), lambda_kl=0.003, lr=3e-4, helpful=0.5,
                                snapshots=",".join(map(str, AT)))
        pms, pairs = dict(train=load(train), test=load(test)), test_lines(cfg, seed)[:400]
        rows = preference.encode_comparisons(pms["train"][0], pairs, 256)[0]
        snapshots = []
        for path in (*snapshots_of(folder), folder):
            found = look(cfg, path, start, pms, seed)
            snapshots.append(dict(found, logp_accuracy=logp_accuracy(load(path), rows)))
        append("robustness", {
            **unit, "policy": size, "pm": pm_size, "iterations": few(cfg, ITERATIONS),
            "pm_accuracy": preference.accuracy_of(pms["train"][1], pms["train"][0], rows),
            **norms_of(folder), **best_of_many(cfg, start, pms["train"], seed),
            "snapshots": snapshots, "curve": blocks(folder, CURVE, BLOCK)})
        forget(folder)


CURVE = ("kl", "pm", "test_pm", "gold_helpful", "gold_harmless", "refused_helpful", "entropy",
         "length")


def norms_of(folder):
    """Mean and spread of both PMs on the first policy's answers."""
    state = load_checkpoint(folder)["state"]
    return dict(train_norm=list(state["norm"]), test_norm=list(state["test_norm"]))


def best_of_many(cfg, start, pm, seed, n=64):
    """Of the first policy: PM score and gold of the best of k, and the slope that the law foretells
    for reward against sqrt(KL), sqrt(2 E Var(score | prompt)).
    """
    scores, gold = many_answers(cfg, load(start), pm, seed, 64, n)
    found = [dict(k=a["k"], pm=a["value"], gold=b["value"], gold_se=b["se"])
             for a, b in zip(best_of_k(scores), best_of_k(scores, gold), strict=True)
             if a["k"] & (a["k"] - 1) == 0]                                     # 1, 2, 4, ...
    return dict(best_of=found, slope_foretold=slope_within(scores))


# ---------------------------------------------------------------- reading the lines

def rows_of(rows, cell):
    """Lines of a cell by seed."""
    return sorted((r for r in rows if r["cell"] == cell), key=lambda r: r["seed"])


def unit(row, name, value):
    """A PM score in the spread of the first policy's answers, 0 at their mean."""
    mean, spread = row[f"{name}_norm"]
    return (value - mean) / spread


def gained(row, found):
    """What a snapshot has gained over the first policy: train and test score, gold."""
    first = row["snapshots"][0]
    return dict(train=unit(row, "train", found["train"]) - unit(row, "train", first["train"]),
                test=unit(row, "test", found["test"]) - unit(row, "test", first["test"]),
                gold=found["gold"] - first["gold"])


def best_by_test(row):
    """The snapshot that the held-out PM likes best: picked without gold."""
    return max(row["snapshots"], key=lambda s: s["test"])


def rises(values, matters=0.1):
    """The Effect of values over seeds."""
    return Effect(mean_se(values), matters)


def at_kl(row, root):
    """The first snapshot that has come so far from the first policy, or the last one."""
    return next((s for s in row["snapshots"] if s["sqrt_kl"] >= root), row["snapshots"][-1])


def verdict_h09(rows):
    """held: from the first policy to a sqrt(KL) of 1, train score, test score and gold all rise by
    two errors over seeds and 0.1, in the micro/micro and the toy/toy cell.
    """
    told, holds, panels = [], [], []
    for cell in ("micro/micro", "toy/toy"):
        gains = [gained(r, at_kl(r, 1.0)) for r in rows_of(rows, cell)]
        own = {k: [g[k] for g in gains] for k in ("train", "test", "gold")}
        holds += [rises(v) for v in own.values()]
        panels.append(bars(f"policy/PM {cell}, sqrt(KL) 1", "gain over the start", own))
        told.append(f"{cell}: train PM {told_of([g['train'] for g in gains])}, test PM "
                    f"{told_of([g['test'] for g in gains])}, gold "
                    f"{told_of([g['gold'] for g in gains])}")
    return verdict(holds, rows, "gains at sqrt(KL) 1: " + "; ".join(told)
                   + " (scores in the spread of the start's answers)", panels)


def verdict_h10(rows):
    """held: in the micro/micro cell, from the snapshot with the best gold to the end, the train PM
    rises and gold falls, each by two errors over seeds, and the train PM gains more than the test
    PM from the start to the end, by two errors; each by 0.1. A seed's best snapshot is that of the
    other seeds' mean gold, so that it is not picked on its own noise.
    """
    found = rows_of(rows, "micro/micro")
    up, down, apart, test = [], [], [], []
    shared = min(len(r["snapshots"]) for r in found)
    for r in found:
        others = [o for o in found if o is not r] or [r]
        best = max(range(shared), key=lambda i: sum(o["snapshots"][i]["gold"] for o in others))
        peak, last = (gained(r, r["snapshots"][i]) for i in (best, -1))
        up.append(last["train"] - peak["train"])
        test.append(last["test"] - peak["test"])
        down.append(peak["gold"] - last["gold"])
        apart.append(last["train"] - last["test"])
    holds = [rises(up), rises(down), rises(apart)]
    told = (f"from the best gold to the end: train PM {told_of(up)}, test PM {told_of(test)}, gold "
            f"{told_of([-d for d in down])}; at the end the train PM is ahead of the test PM by "
            f"{told_of(apart)}")
    panels = [(f"seed {r['seed']}", "sqrt(KL)", "gain over the start", {
        name: {round(s["sqrt_kl"], 3): (gained(r, s)[k], 0.0, 1) for s in r["snapshots"]}
        for k, name in (("train", "train PM, spreads"), ("test", "test PM, spreads"),
                        ("gold", "gold"))}) for r in found]
    return verdict(holds, found, told, panels)


def verdict_h11(rows):
    """held: under one micro policy, the train PM's lead over the test PM at the end is smaller for
    the toy PM than for nano, and gold at the end higher, both by two errors over paired seeds and
    0.1.
    """
    lead, gold = {}, {}
    for size in ("nano", "micro", "toy"):
        found = rows_of(rows, f"micro/{size}")
        ends = [gained(r, r["snapshots"][-1]) for r in found]
        lead[size] = [g["train"] - g["test"] for g in ends]
        gold[size] = [r["snapshots"][-1]["gold"] for r in found]
    holds = [rises(less(lead["nano"], lead["toy"])),
             rises(less(gold["toy"], gold["nano"]))]
    told = "; ".join(f"PM {s}: lead of the train PM {told_of(lead[s])}, gold at the end "
                     f"{told_of(gold[s])}" for s in lead)
    panels = [("micro policy", "sqrt(KL)", "gold", {f"{s} PM": curve_of(rows, f"micro/{s}", "gold")
                                                    for s in lead}),
              ("micro policy", "sqrt(KL)", "train less test score", {
                  f"{s} PM": curve_of(rows, f"micro/{s}", "lead") for s in lead})]
    return verdict(holds, rows, told, panels)


def curve_of(rows, cell, key):
    """{nominal sqrt(KL): (mean, error, seeds)} over the snapshots that all seeds reached."""
    by = {}
    for r in rows_of(rows, cell):
        for at, s in zip(AT, r["snapshots"][:-1]):
            g = gained(r, s)
            value = dict(g, lead=g["train"] - g["test"], gold=s["gold"])[key]
            by.setdefault(at, []).append(value)
    most = max(map(len, by.values()))
    return {at: (*mean_se(v), len(v)) for at, v in by.items() if len(v) == most}


def fit_of(row, spread):
    """Train score (over `spread`) = a + b sqrt(KL) over the different snapshots: the fit, slopes of
    the nearer and the farther half of the way, and how far they reach.
    """
    points = sorted({s["sqrt_kl"]: s["train"] / spread for s in row["snapshots"]}.items())
    reach = points[-1][0]
    near, far = ([p for p in points if keep(p[0])] for keep in (
        lambda d: d <= reach / 2, lambda d: d >= reach / 2))
    slopes = {name: linear_fit(*zip(*own))["b"] if len(own) > 2 else math.nan
              for name, own in (("near", near), ("far", far))}
    return dict(linear_fit(*zip(*points)), reach=reach, **slopes)


def verdict_h12(rows):
    """held: under the toy PM, train score (in the spread of the toy policy's first answers) against
    sqrt(KL) has a mean R2 of 0.8 or more for each policy size and a slope in the farther half of
    over half of that in the nearer one, by two errors over seeds; and the slopes of nano, micro and
    toy policies differ by under a fifth of their mean. (Halves were compared by means until the
    records were in.)
    """
    told, slopes, holds = [], {}, []
    spread = {r["seed"]: r["train_norm"][1] for r in rows_of(rows, "toy/toy")}
    for size in ("nano", "micro", "toy"):
        found = rows_of(rows, f"{size}/toy")
        fits = [fit_of(r, spread[r["seed"]]) for r in found]
        slopes[size] = [f["b"] for f in fits]
        r2, near, far, reach = (float(np.nanmean([f[k] for f in fits]))
                                for k in ("r2", "near", "far", "reach"))
        halves = [f["far"] - f["near"] / 2 for f in fits if math.isfinite(f["far"] + f["near"])]
        holds += [r2 >= 0.8, passes(halves) if halves else False]    # too few snapshots to halve
        law = mean_se([r["slope_foretold"] / spread[r["seed"]] for r in found])[0]
        told.append(f"{size}: slope {told_of(slopes[size], '')}, {near:.2f} in the nearer and "
                    f"{far:.2f} in the farther half (the law for small KL: {law:.2f}), R2 {r2:.2f} "
                    f"up to sqrt(KL) {reach:.1f}")
    means = [mean_se(v)[0] for v in slopes.values()]
    same = max(means) - min(means) < 0.2 * sum(means) / 3
    panels = [("toy PM", "sqrt(KL)", "train PM score gained", {
        f"{s} policy": curve_of(rows, f"{s}/toy", "train") for s in slopes})]
    return verdict([*holds, same], rows, "; ".join(told), panels)


def verdict_h13(rows):
    """held: the micro policy's slope and the toy policy's first score foretell the toy policy's
    train score with a mean error under a fifth of what it gains.
    """
    errors, gains = [], []
    for small, large in zip(rows_of(rows, "micro/toy"), rows_of(rows, "toy/toy"), strict=True):
        spread = large["train_norm"][1]
        slope, first = fit_of(small, spread)["b"], large["snapshots"][0]["train"] / spread
        own = {s["sqrt_kl"]: s["train"] / spread for s in large["snapshots"][1:]}
        errors.append(float(np.mean([abs(s - first - slope * d) for d, s in own.items()])))
        gains.append(max(own.values()) - first)
    share = [e / g for e, g in zip(errors, gains, strict=True)]
    told = (f"the toy policy's score is foretold with a mean error of {told_of(errors, '')}, "
            f"{100 * mean_se(share)[0]:.0f}% of what it gains")
    panels = [bars("toy policy under the toy PM", "mean score", {"error foretold": errors,
                                                                 "gained": gains})]
    return verdict(mean_se(share)[0] < 0.2, rows, told, panels)


def verdict_h23(rows):
    """held: in the toy/toy cell, the policy's mean log-prob accuracy on held-out pairs rises from
    the first policy to the snapshot that the test PM likes best, by two errors over seeds and a
    point, and stays under the train PM's accuracy.
    """
    found = rows_of(rows, "toy/toy")
    first = [r["snapshots"][0]["logp_accuracy"] for r in found]
    best = [best_by_test(r)["logp_accuracy"] for r in found]
    most = [max(s["logp_accuracy"] for s in r["snapshots"]) for r in found]
    pm = [r["pm_accuracy"] for r in found]
    holds = [rises(less(best, first), 0.01),
             all(m < p for m, p in zip(most, pm, strict=True))]
    told = (f"log-prob accuracy {points(mean_se(first)[0])} -> {points(mean_se(best)[0])} (at most "
            f"{points(mean_se(most)[0])}); the PM's {points(mean_se(pm)[0])}")
    panels = [bars("held-out pairs", "accuracy", {"first policy": first, "best by test PM": best,
                                                  "highest": most, "train PM": pm})]
    return verdict(holds, found, told, panels)


def verdict_k02(rows):
    """held: in the micro/micro cell, gold gained along RL fits d (a - b log d) and along best-of-n
    d (a - b d), d = sqrt(KL), each with a mean R2 of 0.8 or more and above the other form's.
    """
    found, fits = rows_of(rows, "micro/micro"), {"rl": [], "bon": []}
    for r in found:
        own = {s["sqrt_kl"]: s["gold"] - r["snapshots"][0]["gold"] for s in r["snapshots"]}
        fits["rl"].append({k: gao_fit(list(own), list(own.values()), k) for k in fits})
        own = {math.sqrt(best_of_n_kl(b["k"])): b["gold"] - r["best_of"][0]["gold"]
               for b in r["best_of"]}
        fits["bon"].append({k: gao_fit(list(own), list(own.values()), k) for k in fits})
    told, holds = [], True
    for kind, other, name in (("rl", "bon", "RL"), ("bon", "rl", "best-of-n")):
        r2, swapped = (mean_se([f[k]["r2"] for f in fits[kind]])[0] for k in (kind, other))
        holds &= r2 >= 0.8 and r2 > swapped
        told.append(f"{name}: alpha {told_of([f[kind]['alpha'] for f in fits[kind]], '')}, beta "
                    f"{told_of([f[kind]['beta'] for f in fits[kind]], '')}, R2 {r2:.2f} (the other "
                    f"form: {swapped:.2f})")
    panels = [bars("fit of gold gained", "R2", {
        f"{name}, {form}": [f[k]["r2"] for f in fits[kind]]
        for kind, name in (("rl", "RL"), ("bon", "best-of-n"))
        for k, form in (("rl", "d (a - b log d)"), ("bon", "d (a - b d)"))})]
    return verdict(holds, found, "; ".join(told), panels)


def verdict_k05(rows):
    """held: in the micro/micro and toy/toy cells entropy and distinct-2 fall from the first policy
    to the end by two errors over seeds, and by 0.01.
    """
    told, holds, ways = [], [], {}
    for cell in ("micro/micro", "toy/toy"):
        ends = [(r["snapshots"][0], r["snapshots"][-1]) for r in rows_of(rows, cell)]
        for key in ("entropy", "distinct"):
            holds.append(rises([a[key] - b[key] for a, b in ends], 0.01))
            for i, at in enumerate(("start", "end")):
                ways.setdefault(key, {})[f"{cell} {at}"] = [e[i][key] for e in ends]
        told.append(f"{cell}: entropy " + " -> ".join(
            f"{mean_se([e[i]['entropy'] for e in ends])[0]:.2f}" for i in (0, 1))
            + " nats a token, distinct-2 " + " -> ".join(
            f"{mean_se([e[i]['distinct'] for e in ends])[0]:.2f}" for i in (0, 1))
            + f", exact KL {mean_se([b['kl_exact'] for _, b in ends])[0]:.1f} nats an answer")
    names = dict(entropy="entropy, nats a token", distinct="distinct-2")
    panels = [bars("PPO", names[key], own) for key, own in ways.items()]
    return verdict(holds, rows, "; ".join(told), panels)


def table(rows):
    """docs/robustness.md: every cell at its start, at the snapshot the test PM likes best, and at
    its end; means over seeds.
    """
    columns = dict(sqrt_kl="sqrt(KL)", kl_exact="KL, exact", kl="KL, k1", train="train PM",
                   test="test PM", gold_helpful="gold helpful", gold_harmless="gold harmless",
                   entropy="entropy", length="tokens", refused="refused", agrees="agrees",
                   commonest="commonest sentence", distinct="distinct-2")
    lines = ["# The robustness experiment", "",
             "Made by `python eval.py --readme` from results/robustness.jsonl. Policy / train PM; "
             "scores in the spread of the first policy's answers; KL in nats an answer, from the "
             "distilled policy; entropy in nats a token; `refused`: share of plain prompts; "
             "`agrees`: share of answers that repeat a person's false belief; the share of answers "
             "with the commonest sentence; means over seeds. (Made when the critic still began in "
             "the unit of the PM's raw scores.)", "",
             "| policy / PM | at | seeds | " + " | ".join(columns.values()) + " |",
             "|---" * (len(columns) + 3) + "|"]
    for cell in dict.fromkeys(r["cell"] for r in rows):
        own = rows_of(rows, cell)
        for at, pick in (("start", lambda r: r["snapshots"][0]), ("best test PM", best_by_test),
                         ("end", lambda r: r["snapshots"][-1])):
            found = [{**pick(r), **{k: unit(r, k, pick(r)[k]) for k in ("train", "test")}}
                     for r in own]
            cells = (f"{mean_se([s[k] for s in found])[0]:.2f}" for k in columns)
            lines.append(f"| {cell} | {at} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


CLAIMS = {
    "H09": Claim("RLHF raises the train PM's score, the test PM's and, here, the gold utility",
                 "HH 4.2", measure, verdict_h09, 60,
                 source="robustness", needs=("cell", ("micro/micro", "toy/toy"))),
    "H10": Claim("train-PM and test-PM scores part as training goes on; gold turns over",
                 "HH 4.2, fig. 4", measure, verdict_h10, 60,
                 source="robustness", needs=("cell", ("micro/micro",)),
                 why="gold turns over in every seed, but the held-out PM goes up almost as "
                     "far: it learned from other comparisons on another base, and shares the "
                     "blind spots. In two seeds of three the policy ends by refusing nearly all "
                     "plain questions",
                 paper="the two scores part after about 150k samples, sqrt(KL) near 3.5"),
    "H11": Claim("larger PMs are more robust reward models",
                 "HH 4.2, fig. 33", measure, verdict_h11, 60,
                 source="robustness", needs=("cell", ("micro/nano", "micro/micro", "micro/toy")),
                 why="gold at the end is higher under the toy PM by means, but there too the "
                     "policy refuses nearly all plain questions in two seeds of three, and the "
                     "leads over the test PM do not differ beyond their errors"),
    "H12": Claim("reward is about linear in sqrt(KL), with parallel slopes across policy sizes",
                 "HH 4.3, figs 4, 13", measure, verdict_h12, 60,
                 source="robustness", needs=("cell", ("nano/toy", "micro/toy", "toy/toy")),
                 why="the slopes of the three sizes are parallel, but the curves bend: the "
                     "PM's score saturates (the best of 64 answers is hardly above the best "
                     "of 16), so the toy policy's farther half rises by half of its nearer "
                     "one, or a little less",
                 paper="straight and parallel up to sqrt(KL) of about 5"),
    "H13": Claim("a small policy's slope and a large one's first score foretell the large one's "
                 "curve",
                 "HH 4.3", measure, verdict_h13, 60,
                 source="robustness", needs=("cell", ("micro/toy", "toy/toy")),
                 paper="said, never tested"),
    "H23": Claim("the policy's mean log-prob accuracy rises in RL and stays under the PM's",
                 "HH B.3, fig. 34", measure, verdict_h23, 60,
                 source="robustness", needs=("cell", ("toy/toy",)),
                 why="it rises at first and falls when the policy over-optimizes; where the "
                     "held-out PM is highest it is back under the start in two seeds of three"),
    "K02": Claim("gold fits d (a - b log d) along RL and d (a - b d) along best-of-n, d = "
                 "sqrt(KL)",
                 "Gao et al. 2022", measure, verdict_k02, 60,
                 source="robustness", needs=("cell", ("micro/micro",)),
                 paper="d (a - b log d) for RL, d (a - b d) for best-of-n"),
    "K05": Claim("entropy and diversity fall in RL",
                 "RL with a KL penalty", measure, verdict_k05, 60,
                 source="robustness", needs=("cell", ("micro/micro", "toy/toy"))),
}
