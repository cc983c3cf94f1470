"""Claims about what preference models learn from: many PMs are trained, each tested once.

H02 PM pretraining, H03 size and data, H14 one objective against the other, H15 lambda, H27 a skill
beside, I02 rankings in one element, I03 annotators who gave no data. `hXX(cfg)` measures the units
that have no record yet; `verdict_hXX(rows)` reads the records alone.
"""

import shutil

import preference
from claims.records import (ANY, Claim, Effect, append, bars, curves, missing, over_seeds, paired,
                            passes, told_of, verdict)
from claims.start import (LR_AFTER, LR, base, few, measure, of, points, pool, pretrained,
                          test_lines, train_lines, train_pm)
from common import load_checkpoint
from data import probes
from data.tokenizer import loads
from measures import log_linear_fit, mean_se
from model import unpack

SIZES = ("nano", "micro", "toy", "mini")
PAIRS = (375, 750, 1500, 3000)


# ---------------------------------------------------------------- H02 H03: pretraining, size, data

def parameters(folder):
    """Weights of a model without its embeddings, as the paper counts them."""
    model = unpack(load_checkpoint(folder))
    return sum(p.numel() for n, p in model.named_parameters() if not n.startswith(("wte", "wpe")))


def averaged(rows, name):
    """The rows with the mean of both objectives' accuracies under a name."""
    return [{**r, name: (r["helpful"] + r["harmless"]) / 2} for r in rows]


def h02(cfg):
    for unit in missing("H02", cfg.seeds, start=("base", "pmp"), pairs=PAIRS):
        init = base(cfg, "toy") if unit["start"] == "base" else pretrained(cfg, "toy")
        measure(cfg, "H02", unit, init, train_lines(cfg, unit["seed"])[:unit["pairs"]],
                test_lines(cfg, unit["seed"]), lr=LR if unit["start"] == "base" else LR_AFTER)


def verdict_h02(rows):
    """held: at each amount of feedback PM pretraining is ahead by 2 errors of the seeds'
    differences and half a point, on the mean of both objectives.
    """
    rows = averaged(rows, "mean")
    found = over_seeds(rows, "mean", "start", "pairs")
    panels = [(o, "comparisons", "held-out accuracy", curves(rows, o, "start", "pairs"))
              for o in ("helpful", "harmless")]
    sizes = sorted({r["pairs"] for r in rows})
    gaps = {p: paired([r for r in rows if r["pairs"] == p], "mean", "start", "base", "pmp")
            for p in sizes}
    holds = [Effect(gap, 0.005) for gap in gaps.values()]
    fewest = next((p for p in sizes if found["pmp", p][0] >= found["base", sizes[-1]][0]), None)
    told = ", ".join(f"+{points(g)} ± {points(se)} at {p}" for p, (g, se) in gaps.items())
    told = (f"PM pretraining adds {told} comparisons; {fewest or 'no number'} "
            f"after it match {sizes[-1]} without it")
    return verdict(holds, rows, told, panels, log_x=True)


def h03(cfg):
    for unit in missing("H03", cfg.seeds, size=SIZES, pairs=PAIRS):
        init = pretrained(cfg, unit["size"])
        measure(cfg, "H03", unit, init, train_lines(cfg, unit["seed"])[:unit["pairs"]],
                test_lines(cfg, unit["seed"]), dict(parameters=parameters(init)), lr=LR_AFTER)


def verdict_h03(rows):
    """held: helpful accuracy is fit by a + b log10 P + c log10 D with b and c, a fit a seed, above
    0 by two errors over seeds, and a mean R2 of 0.7 or more.
    """
    panels = [(o, *axis) for o in ("helpful", "harmless") for axis in (
        ("comparisons", "held-out accuracy", curves(rows, o, "size", "pairs")),
        ("parameters", "held-out accuracy", curves(rows, o, "pairs", "parameters")))]
    told, fits = [], {}
    for o in ("helpful", "harmless"):
        by = [[r for r in rows if r["seed"] == s] for s in sorted({r["seed"] for r in rows})]
        found = [log_linear_fit(*([r[k] for r in own] for k in ("parameters", "pairs", o)),
                                at=(1e6, 1e3)) for own in by]
        fits[o] = {k: [f[k] for f in found] for k in ("a", "b", "c", "r2")}
        told.append("{} {} + {} log10(P/1e6) + {} log10(D/1e3), R2 {}".format(
            o, *(told_of(fits[o][k], "", 3) for k in "abc"), told_of(fits[o]["r2"], "")))
    holds = [*(passes(fits["helpful"][k]) for k in "bc"), mean_se(fits["helpful"]["r2"])[0] >= 0.7]
    return verdict(holds, rows, "; ".join(told), panels, log_x=True)


# ---------------------------------------------------------------- H14 H15: two objectives

def h14(cfg, mixed=1200, alone=2900):
    """11 mixtures of equal size; and one objective alone, all that there is of it."""
    sizes, shares = ("nano", "toy"), [i / 10 for i in range(11)]
    for unit in (*missing("H14", cfg.seeds, size=sizes, helpful_share=shares, pairs=(mixed,)),
                 *missing("H14", cfg.seeds, size=sizes, helpful_share=(0.0, 1.0), pairs=(alone,))):
        lines, total = train_lines(cfg, unit["seed"]), unit["pairs"]
        helpful = round(total * unit["helpful_share"])
        measure(cfg, "H14", unit, base(cfg, unit["size"]),
                of(lines, "helpful", helpful) + of(lines, "harmless", total - helpful),
                test_lines(cfg, unit["seed"])[:1000])


def verdict_h14(rows):
    """held: a PM of one objective alone, with the most data, is under chance on the other by 2
    errors and a point, at both sizes, and the larger loses less in the even mixture against its
    own best on each objective.
    """
    most = max(r["pairs"] for r in rows)
    end = {o: over_seeds([r for r in rows if r["pairs"] == most], o, "size", "helpful_share")
           for o in ("helpful", "harmless")}
    rows = [r for r in rows if r["pairs"] == min(r["pairs"] for r in rows)]
    found = {o: curves(rows, o, "size", "helpful_share") for o in ("helpful", "harmless")}
    panels = [(o, "helpful share", "held-out accuracy", found[o]) for o in found]
    told, holds, lost = [], [], {}
    for size in ("nano", "toy"):
        ends = {"helpful": end["helpful"][size, 0.0], "harmless": end["harmless"][size, 1.0]}
        holds += [Effect((0.5 - m, se), 0.01) for m, se, _ in ends.values()]
        told.append(f"{size}, {most} of one: harmless-only " + " on helpful, helpful-only ".join(
            f"{points(m)} ± {points(se)}" for m, se, _ in ends.values()) + " on harmless")
        lost[size] = sum(max(f[0] for f in found[o][size].values()) - found[o][size][0.5][0]
                         for o in found) / 2
    holds.append(lost["toy"] < lost["nano"])
    told = (f"{'; '.join(told)}; lost in the even mixture: nano "
            f"{points(lost['nano'])}, toy {points(lost['toy'])}")
    return verdict(holds, rows, told, panels)


def h15(cfg, total=1200):
    for unit in missing("H15", cfg.seeds, size=("nano", "toy"), weight=(1, 2, 3, 4, 10)):
        lines = train_lines(cfg, unit["seed"])
        measure(cfg, "H15", unit, base(cfg, unit["size"]),
                of(lines, "helpful", total // 2) + of(lines, "harmless", total // 2),
                test_lines(cfg, unit["seed"])[:1000], lambda_harmless=float(unit["weight"]))


def verdict_h15(rows):
    """held: helpful accuracy falls from lambda 1 to 10, by 2 errors and a point at nano, less at
    toy.
    """
    panels = [(o, "lambda", "held-out accuracy", curves(rows, o, "size", "weight"))
              for o in ("helpful", "harmless")]
    change = {size: paired([r for r in rows if r["size"] == size], "helpful", "weight", 1, 10)
              for size in ("nano", "toy")}
    told = ", ".join(f"{s} {points(m)} ± {points(se)}" for s, (m, se) in change.items())
    (fall, se), more = change["nano"], change["toy"][0] > change["nano"][0]
    holds = [Effect((-fall, se), 0.01), more]
    told = f"helpful accuracy from lambda 1 to 10: {told}"
    return verdict(holds, rows, told, panels, log_x=True)


# ---------------------------------------------------------------- H27 I02 I03

def h27(cfg, total=1500):
    for unit in missing("H27", cfg.seeds, data=("hh", "summary", "both")):
        seed = unit["seed"]
        hh = train_lines(cfg, seed)[:total]
        skill = [probes.summary(f"train/{seed}", i) for i in range(total)]
        lines = dict(hh=hh, summary=skill, both=hh + skill)[unit["data"]]
        test = test_lines(cfg, seed) + [probes.summary(f"test/{seed}", i) for i in range(1000)]
        measure(cfg, "H27", unit, pretrained(cfg, "toy"), lines, test, lr=LR_AFTER)


def verdict_h27(rows):
    """held: the PM of both loses less than a point to each specialist on its own task, by 2 errors
    over paired seeds. (Until the records were in, a loss within 2 errors of unpaired means passed.)
    """
    rows = averaged(rows, "hh")
    told, holds = [], []
    for task in ("hh", "summary"):
        found = over_seeds(rows, task, "data")
        (own, own_se, _), (both, both_se, _) = found[task,], found["both",]
        lost, error = paired(rows, task, "data", "both", task)
        holds.append(Effect((0.01 - lost, error), ANY))
        told.append(f"{task}: {points(own)} ± {points(own_se)} alone, {points(both)} ± "
                    f"{points(both_se)} mixed, {points(lost)} ± {points(error)} lost")
    panels = [bars(f"on {task} comparisons", "accuracy", {
        data: [r[task] for r in rows if r["data"] == data] for data in (task, "both")})
        for task in ("hh", "summary")]
    return verdict(holds, rows, "; ".join(told), panels)


def i02(cfg):
    for unit in missing("I02", cfg.seeds, mode=("grouped", "shuffled")):
        lines = pool(cfg, "rankings", unit["seed"], few(cfg, 600), answers="4-9")
        pairs = sum(len(x["responses"]) * (len(x["responses"]) - 1) // 2 for x in lines)
        shuffled = unit["mode"] == "shuffled"
        batch = round(16 * pairs / len(lines)) if shuffled else 16   # the same pairs in a step
        folder, found = train_pm(cfg, f"I02-{unit['mode']}-{unit['seed']}", base(cfg, "toy"), lines,
                                 test_lines(cfg, unit["seed"]), unit["seed"], batch=batch, micro=4,
                                 shuffle_pairs=shuffled, epochs=1)
        source = load_checkpoint(folder)
        tok, pm = loads(source["tokenizer"]), unpack(source).eval()
        rows, _, _ = preference.encode_comparisons(tok, lines, pm.config.n_ctx)
        append("I02", {**unit, "pairs": pairs, **found,
                       "train": preference.accuracy_of(pm, tok, rows)})
        shutil.rmtree(folder)


def verdict_i02(rows):
    """held: after one epoch the PM of shuffled pairs is further ahead on its training rankings than
    on test comparisons, and worse on those, both by 2 errors and a point.
    """
    rows = [{**r, "ahead": r["train"] - r["test"]} for r in averaged(rows, "test")]
    test, seen = (over_seeds(rows, k, "mode") for k in ("test", "train"))
    worse, worse_se = paired(rows, "test", "mode", "shuffled", "grouped")
    more, more_se = paired(rows, "ahead", "mode", "grouped", "shuffled")
    told = "; ".join(f"{m}: {points(test[m,][0])} ± {points(test[m,][1])} on test comparisons, "
                     f"{points(seen[m,][0])} on its training rankings"
                     for m in ("grouped", "shuffled"))
    panels = [bars(title, "accuracy", {m: [r[key] for r in rows if r["mode"] == m]
                                       for m in ("grouped", "shuffled")})
              for title, key in (("test comparisons", "test"), ("training rankings", "train"))]
    return verdict([Effect((worse, worse_se), 0.01), Effect((more, more_se), 0.01)], rows, told,
                   panels)


def i03(cfg, groups=5):
    for unit in missing("I03", cfg.seeds, fold=range(groups)):
        seed, name = unit["seed"], f"group {unit['fold']}"
        lines = pool(cfg, "groups", seed, few(cfg, 2000), groups=groups)
        test = [{**x, "objective": "new_group" if x["annotator"] == name else "known_groups"}
                for x in pool(cfg, "groups-test", seed + 1000, few(cfg, 2000), groups=groups)]
        measure(cfg, "I03", unit, pretrained(cfg, "toy"),
                [x for x in lines if x["annotator"] != name], test, lr=LR_AFTER)


def verdict_i03(rows):
    """held: accuracy on the group that gave no data is lower, by 2 errors over seeds of the mean
    over folds and half a point.
    """
    by = {}
    for r in rows:
        by.setdefault(r["seed"], []).append((r["known_groups"], r["new_group"]))
    means = [[sum(c) / len(c) for c in zip(*found, strict=True)] for found in by.values()]
    (known, known_se), (new, new_se) = (mean_se(c) for c in zip(*means, strict=True))
    gap, se = mean_se([k - n for k, n in means])
    told = (f"{points(known)} ± {points(known_se)} on groups that gave "
            f"data, {points(new)} ± {points(new_se)} on the fifth that "
            f"did not: {points(gap)} ± {points(se)} lower")
    panels = [bars("annotators", "accuracy", {name: [m[i] for m in means] for i, name in
                                              enumerate(("gave data", "gave none"))})]
    return verdict([Effect((gap, se), 0.005)], rows, told, panels)


CLAIMS = {
    "H02": Claim("PM pretraining makes human feedback more sample-efficient", "HH 3.1, A.2",
                 h02, verdict_h02, 6),
    "H03": Claim("PM accuracy grows log-linearly with parameters and data", "HH 3.2, fig. 7, A.3",
                 h03, verdict_h03, 20,
                 "both slopes of helpful accuracy are above 0 by two errors, but all 16 cells lie "
                 "within 6 points, and one seed's test scatters by 1 to 2; harmless accuracy is at "
                 "its ceiling after PM pretraining (best possible 85%)",
                 paper="helpful accuracy 0.72 + 0.007 log(P/1e11) + 0.015 log(D/8e4)"),
    "H14": Claim("a PM of one objective is under chance on the other; larger PMs mind the mixture "
                 "less", "HH 5.1.1, figs 19, 26", h14, verdict_h14, 12,
                 "a harmless-only PM is at chance on helpful pairs, not under it: it learns that "
                 "refusing is good, and few pairs of the distilled policy differ in that; nano's "
                 "helpful-only PM depends on the seed (39 to 65%)",
                 paper="37% and 35% on the other objective"),
    "H15": Claim("up-weighting the harmless loss costs small PMs more", "HH 5.1.2, fig. 27",
                 h15, verdict_h15, 6,
                 "the smallest PM is near chance on helpful comparisons (55%) and has less to "
                 "lose",
                 paper="-7.4% at 13M, -1.5% at 52B"),
    "H27": Claim("mixing in a summary skill costs neither task accuracy", "HH 5.2, fig. 20",
                 h27, verdict_h27, 4,
                 paper="76% and 71%, mixed or not"),
    "I02": Claim("all pairs of a prompt in one element do not overfit in an epoch, shuffled pairs "
                 "do", "InstructGPT 3.5", i02, verdict_i02, 5,
                 "in one epoch 0.9M parameters do not memorize 600 prompts: neither is further "
                 "ahead on its training rankings"),
    "I03": Claim("accuracy on annotators who gave no data is slightly lower",
                 "InstructGPT 3.5, E.2", i03, verdict_i03, 6,
                 "the five groups differ in taste (manners, length) by half a unit of utility and "
                 "share the rest, and that rest is what the PM learns",
                 paper="72.4 -> 69.6%"),
}
