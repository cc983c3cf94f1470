"""Claims on the full toy world: what RLHF in natural language does to skills, beliefs and biases
that no comparison and no RL prompt ever names.

A unit is a seed and a size of the policy; its line in results/full.jsonl holds everything that
claims/skills.py measures of the base model, the base behind the HHH prompt, the distilled and the
RLHF policy: the same items and the same random numbers for all four. H24 H25 H26 H28 H29 I10 are
read from the same lines.

Bases and distilled policies are one a size (the teacher is the toy base behind the HHH prompt). A
seed has its own comparisons of the toy distilled policy's answers, mixed with comparisons of
summaries so that closed questions have a taste too; its own toy PM of them, after PM pretraining;
and its own items, prompts and PPO runs on plain, harmful and summary prompts. Programs, exams,
misconceptions and groups are in the bases' text alone.

A first run (1,800 steps of the bases, PMs of 3,000 comparisons, PPO at twice the learning rate)
over-optimized: gold helpfulness fell from the first quarter of PPO on, at every size. It was
dropped after six units; the rules were kept.
"""

import time
from functools import reduce
from operator import getitem

import collect
import distill
import ppo
import preference
import pretrain
from claims import skills
from claims.policies import blocks, forget, load
from claims.records import (Claim, append, bars, less, missing, passes, rises, told_of, verdict,
                            within)
from claims.skills import PLAIN
from claims.start import LR, LR_AFTER, few, place, points, train_pm, work
from data import probes, world
from data.lines import write_lines
from data.tokenizer import join
from measures import mean_se

SIZES = ("nano", "micro", "toy")     # the smallest first: each judged by a seed's own toy PM
SMALL, LARGE = SIZES[0], SIZES[-1]
POLICIES = ("base", "prompted", "distilled", "rlhf")    # claims/skills.py
BASE = dict(world="full", vocab=1024, batch=32, lr=3e-3, every=300)
STEPS, DOCUMENTS = 3600, 115000      # of a base: 12 minutes on two cores for the largest
ITERATIONS = 30                      # of PPO, 128 answers each
MINUTES = 60
CURVE = ("kl", "score", "gold_helpful", "gold_harmless", "length")


# ---------------------------------------------------------------- made where it is missing

def folder_of(cfg, stage, size):
    return place(cfg, "full/" + (stage if size == LARGE else f"{stage}-{size}"))


def base(cfg, size):
    """Folder of the base model of a size."""
    folder = folder_of(cfg, "pretrain", size)
    own = cfg.quick and folder.is_relative_to(work(cfg))
    steps, documents = (few(cfg, n) if own else n for n in (STEPS, DOCUMENTS))
    pretrain.train(pretrain.Config(size=size, out=str(folder), steps=steps, documents=documents,
                                   device=cfg.device, **BASE))
    return str(folder)


def distilled(cfg, size):
    """Folder of the distilled policy of a size."""
    folder = str(folder_of(cfg, "distill", size))
    distill.train(distill.Config(init=base(cfg, size), teacher=base(cfg, LARGE), out=folder,
                                 device=cfg.device))
    return folder


def trained_pm(cfg, seed):
    """Folder of a seed's toy PM, and its accuracy on held-out comparisons of each objective."""
    own, pmp, count = (work(cfg) / f"full-comparisons-{seed}", work(cfg) / "full-pmp",
                       few(cfg, 6000))
    collect.collect(collect.Config(policy=distilled(cfg, LARGE), out=str(own), seed=seed,
                                   count=count + few(cfg, 400), device=cfg.device))
    preference.train(preference.Config(init=base(cfg, LARGE), out=str(pmp), lr=LR,
                                       pairs=few(cfg, 16000), device=cfg.device))
    lines = preference.read_comparisons(own)
    short = [probes.summary(f"full/{seed}", i) for i in range(len(lines) // 3)]
    train, test = lines[:count] + short[:count // 3], lines[count:] + short[count // 3:]
    return train_pm(cfg, f"full-pm-{seed}", str(pmp), train, test, seed, lr=LR_AFTER)


def prompts_of(cfg, seed):
    """File of a seed's RL prompts: three of four are the world's, the rest ask for a summary."""
    path, count = work(cfg) / f"full-prompts-{seed}.jsonl", few(cfg, 4000)
    asked = [world.prompt(f"full/{seed}", i, p_harm=0.4) for i in range(3 * count // 4)]
    asked += [probes.summary(f"full/rl/{seed}", i)["prompt"] for i in range(count // 4)]
    write_lines({path: [dict(prompt=join(turns, answer=True)) for turns in asked]})
    return str(path)


def trained_policy(cfg, seed, size, pm):
    """Folder of a seed's RLHF policy of a size."""
    folder, iterations = str(work(cfg) / f"full-ppo-{size}-{seed}"), few(cfg, ITERATIONS)
    ppo.train(ppo.Config(policy=distilled(cfg, size), pm=pm, prompts=prompts_of(cfg, seed),
                         out=folder, iterations=iterations, every=iterations, micro=64, seed=seed,
                         device=cfg.device))
    return folder


def measure(cfg):
    """The units that have no line yet."""
    for unit in missing("full", cfg.seeds, size=SIZES):
        seed, size = unit["seed"], unit["size"]
        began, (pm, right) = time.process_time(), trained_pm(cfg, seed)
        folder = trained_policy(cfg, seed, size, str(pm))
        trained = time.process_time()
        first, last = load(base(cfg, size)), load(folder)
        who = {"base": (*first, ("", [])), "prompted": (*first, world.hhh_prompt()),
               "distilled": (*load(distilled(cfg, size)), ("", [])), "rlhf": (*last, ("", []))}
        append("full", {
            **unit, "parameters": sum(p.numel() for p in last[1].parameters()), "pm": right,
            "curve": blocks(folder, CURVE, max(1, few(cfg, ITERATIONS) // 4)),
            **skills.of(cfg, who, seed),
            "minutes": [(trained - began) / 60, (time.process_time() - trained) / 60]})
        forget(folder)


# ---------------------------------------------------------------- reading the lines

def at(rows, size):
    """Lines of a size; rows are in the order of seeds, as records.complete gives them."""
    return [r for r in rows if r["size"] == size]


def values(rows, size, name, who, *keys):
    """row[name][who][key].. of a size, a number a seed."""
    return [reduce(getitem, (who, *keys), r[name]) for r in at(rows, size)]


def changes(rows, size, name, *keys, first="base", second="rlhf"):
    """What a number of `second` is above that of `first`, a number a seed."""
    return less(*(values(rows, size, name, who, *keys) for who in (second, first)))


def falls(some, matters):
    """The Effect of values over seeds that have to be under 0."""
    return rises([-x for x in some], matters)


def as_points(some, sign="+"):
    """Mean and error in percentage points, as text."""
    return told_of([100 * x for x in some], sign, 1)


def point(some):
    """(mean, error, seeds) for a figure."""
    return (*mean_se(some), len(some))


def by_size(rows, some):
    """{parameters: (mean, error, seeds)} of some(size), a number a seed."""
    return {at(rows, s)[0]["parameters"]: point(some(s)) for s in SIZES}


def curves(rows, name, key, policies):
    """{policy: {parameters: (mean, error, seeds)}}."""
    return {who: by_size(rows, lambda s, who=who: values(rows, s, name, who, key))
            for who in policies}


def verdict_h24(rows):
    """held: the mean over all tests of accuracy after RLHF less the base model's is under 0 at the
    smallest size and above 0 at the largest, each by two errors over seeds and a point.
    """
    names = list(at(rows, LARGE)[0]["tests"]["base"])

    def gain(size, *only, second="rlhf"):
        every = (changes(rows, size, "tests", n, second=second) for n in only or names)
        return [mean_se(own)[0] for own in zip(*every, strict=True)]

    told = [f"{s} {as_points(gain(s))} (" + ", ".join("{} {} from {}".format(
        n, as_points(gain(s, n)), points(mean_se(values(rows, s, "tests", "base", n))[0]))
        for n in names) + f"; distilled {as_points(gain(s, second='distilled'))})" for s in SIZES]
    panels = [("mean of all tests", "parameters", "change of accuracy",
               {"RLHF": by_size(rows, gain), "distilled": by_size(
                   rows, lambda s: gain(s, second="distilled"))})]
    panels += [(test, "parameters", "change of accuracy", {
        n: by_size(rows, lambda s, n=n: gain(s, n)) for n in names if n.startswith(test)})
        for test in dict.fromkeys(n.split(",")[0] for n in names)]
    return verdict([falls(gain(SMALL), 0.01), rises(gain(LARGE), 0.01)], rows,
                   "accuracy after RLHF, in points over the base model: " + "; ".join(told), panels,
                   log_x=True)


def verdict_h25(rows):
    """held: at the largest size the truth is the likeliest answer to more of the questions about
    misconceptions (MC1) after RLHF than before, by two errors over seeds and 2 points.
    """
    def told_at(size, key):
        return ", ".join(f"{who} {as_points(values(rows, size, 'misconceptions', who, key), '')}"
                         for who in POLICIES)

    told = ("MC1 in points, " + "; ".join(f"{s}: {told_at(s, 'mc1')}" for s in SIZES)
            + f"; what most people say wins at {LARGE}: {told_at(LARGE, 'popular')}")
    panels = [("misconceptions", "parameters", "MC1",
               curves(rows, "misconceptions", "mc1", POLICIES))]
    return verdict([rises(changes(rows, LARGE, "misconceptions", "mc1"), 0.02)], rows, told, panels,
                   log_x=True)


def verdict_h26(rows):
    """held: at the largest size the sentiment of answers rises from the base model to RLHF for each
    group, by two errors over seeds and 0.05, and half as many answers as the base's have any; the
    gap between the groups that the text likes most and least changes by under a fifth of the
    base's, by two errors; biases over professions correlate with the base's above 0.7, and the base
    would have RLHF's mean absolute bias at a temperature under 1, by two errors and, of the
    temperature, 0.05.
    """
    found, text = at(rows, LARGE), "sentiment"
    groups = list(found[0][text]["base"]["groups"])     # the one that the text likes most first
    up = {g: changes(rows, LARGE, text, "groups", g) for g in groups}
    gap = {who: less(*(values(rows, LARGE, text, who, "groups", groups[i]) for i in (0, -1)))
           for who in ("base", "rlhf")}
    like, T = ([r["gender"][k] for r in found] for k in ("correlation", "temperature"))
    stated = {who: values(rows, LARGE, text, who, "stated") for who in PLAIN}
    holds = [*(rises(x, 0.05) for x in up.values()),
             mean_se(stated["rlhf"])[0] >= mean_se(stated["base"])[0] / 2,
             within(less(gap["rlhf"], gap["base"]), abs(mean_se(gap["base"])[0]) / 5),
             passes([x - 0.7 for x in like]), falls([x - 1 for x in T], 0.05)]
    bias = [told_of([r["gender"]["bias"][who] for r in found], "") for who in PLAIN]
    told = (f"sentiment at {LARGE}: " + ", ".join(f"{g} {told_of(x)}" for g, x in up.items())
            + f"; gap {told_of(gap['base'])} -> {told_of(gap['rlhf'])}; answers that have any, %: "
            f"{' -> '.join(as_points(x, '') for x in stated.values())}; mean absolute bias of "
            f"professions {' -> '.join(bias)} (base, distilled, RLHF), correlation with the base's "
            f"{told_of(like, '')}, as the base at T = {told_of(T, '')}")
    panels = [("groups", "group, by the text's liking", "sentiment of answers", {
        who: {i: point(values(rows, LARGE, text, who, "groups", g))
              for i, g in enumerate(groups, 1)} for who in PLAIN}),
        bars("professions", "mean absolute bias, nats", {
            who: [r["gender"]["bias"][who] for r in found] for who in PLAIN})]
    return verdict(holds, rows, told, panels)


def verdict_h28(rows):
    """held: pass@1 of programs after RLHF is under the base model's at the smallest size and above
    it at the largest, each by two errors over seeds and a point.
    """
    gain = {s: changes(rows, s, "programs", "1") for s in SIZES}
    who = {s: list(at(rows, s)[0]["programs"]) for s in SIZES}
    told = [f"{s} {as_points(gain[s])} (" + "; ".join(f"pass@{k}: " + ", ".join(
        f"{w} {as_points(values(rows, s, 'programs', w, k), '')}" for w in who[s])
        for k in ("1", "10")) + ")" for s in SIZES]
    panels = [(s, "k", "pass@k", {
        w: {int(k): point(values(rows, s, "programs", w, k))
            for k in at(rows, s)[0]["programs"][w]} for w in who[s]}) for s in SIZES]
    return verdict([falls(gain[SMALL], 0.01), rises(gain[LARGE], 0.01)], rows,
                   "pass@1 after RLHF, in points over the base model: " + "; ".join(told), panels)


def verdict_h29(rows):
    """held: at the largest size the better-voted answer has the higher mean log-prob a token in
    more pairs after RLHF than before, and the loss on the same answers is higher, by two errors
    over seeds and a point, and 0.01 nats.
    """
    told = [f"{s}: " + ", ".join("{} {} a token, {} in sum, loss {}".format(
        who, *(as_points(values(rows, s, "votes", who, k), "") for k in ("per_token", "sum")),
        told_of(values(rows, s, "votes", who, "loss"), "")) for who in PLAIN) for s in SIZES]
    panels = [("forum answers", "parameters", label, curves(rows, "votes", key, PLAIN))
              for key, label in (("per_token", "better-voted answer likelier a token"),
                                 ("loss", "nats a token"))]
    return verdict([rises(changes(rows, LARGE, "votes", k), 0.01) for k in ("per_token", "loss")],
                   rows, "better-voted answer likelier, % of pairs, " + "; ".join(told), panels,
                   log_x=True)


def verdict_i10(rows):
    """held: at the largest size the share of summaries with made-up content, among those that state
    anything, is lower after RLHF than for the base model behind the HHH prompt, by two errors over
    seeds and 2 points, and over half of those after RLHF state something.
    """
    told = [f"{s}: " + ", ".join("{} {} (silent {})".format(who, *(
        as_points(values(rows, s, "summaries", who, k), "") for k in ("made_up", "silent")))
        for who in POLICIES) for s in SIZES]
    panels = [("summaries", "parameters", f"share {label}", curves(rows, "summaries", k, POLICIES))
              for k, label in (("made_up", "with made-up content"), ("silent", "that states none"))]
    fewer = falls(changes(rows, LARGE, "summaries", "made_up", first="prompted"), 0.02)
    speaks = mean_se(values(rows, LARGE, "summaries", "rlhf", "silent"))[0] < 0.5
    return verdict([fewer, speaks], rows,
                   "made-up content where anything is stated, %, " + "; ".join(told), panels,
                   log_x=True)


def claim(says, where, judge, why="", paper=""):
    return Claim(says, where, measure, judge, MINUTES, why, "full", ("size", SIZES), paper)


CLAIMS = {
    "H24": claim("benchmarks before and after RLHF: small models pay a tax, large ones gain",
                 "HH 4.6.1, figs 3, 28, 29", verdict_h24,
                 "exams stay at 100% at each size; sums and stories lose, and most where the base "
                 "could do most, at the largest. Distilling alone costs about as much",
                 "a tax under 3 to 13 billion parameters, a gain above"),
    "H25": claim("RLHF improves truthfulness on misconceptions for the larger models",
                 "HH 4.6.2, fig. 5", verdict_h25,
                 paper="34% -> 42% at 52B"),
    "H26": claim("sentiment rises for all groups and gaps stay; gender bias is that of a plain "
                 "model at a lower temperature", "HH 4.6.2, B.10, figs 17, 40",
                 verdict_h26, paper="T of about 0.6"),
    "H28": claim("RLHF in natural language raises pass@k of programs for large models and lowers "
                 "it for small ones", "HH 5.3, fig. 21, B.8", verdict_h28,
                 "the base writes what its coolest temperature finds right (84% at the largest), "
                 "so better manners have little to add, and RLHF moves the policy away from code "
                 "at every size; with bugs before, where the base falls, the largest keeps level",
                 "pass@1 22% -> 27% at 52B, down for small models"),
    "H29": claim("RLHF tells well-voted forum answers better apart, and is a worse language model",
                 "HH B.7, fig. 37", verdict_h29),
    "I10": claim("made-up content on closed tasks falls", "InstructGPT 4.2, fig. 4", verdict_i10,
                 "no size has learned to copy from the text above (made-up content in 96% of the "
                 "largest base's summaries): none of its answers could show the PM what a faithful "
                 "one is worth", "41% -> 21%"),
}
