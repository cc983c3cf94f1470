"""Claims about learning from good answers: SFT, RL after it, narrow tasks, best of n.

A unit is a seed, about 6 minutes on one core; its line is in results/demonstrations.jsonl. All
policies are micro; the PM is the seed's own (claims/policies.py). I01 I04 I08 H22 K12 are read from
the same lines.
"""

from collections import Counter

import numpy as np

import rejection
import sft
from claims.policies import (OBJECTIVES, answers, distilled, load, look, many_answers, trained_pm,
                             trained_policy)
from claims.records import (Claim, Effect, append, bars, less, missing, passes, records,
                            told_of, verdict)
from claims.start import base, few, points, work
from common import metrics_of
from data import probes, world
from data.lines import write_lines
from data.tokenizer import join
from elo import of_win_rate, win_rate
from measures import best_of_k, best_of_n_kl, best_of_n_kl_exact, mean_se
from rollout import gold_of

KS = (1, 4, 16, 64)


def narrow_tasks(cfg, seed, count):
    """Lines of tasks in the style of public sets: sum up a text, judge a statement."""
    lines = [probes.summary(f"narrow/{seed}", i) for i in range(count)]
    for i in range(count):
        rng = world.keyed("narrow", seed, i)
        _, true, false = world.true_false_pair(rng, world.TRAIN)
        said, right = rng.choice(((true, "good"), (false, "wrong")))
        marks = [world.REACTIONS[right], world.REACTIONS["wrong" if right == "good" else "good"]]
        lines.append(dict(prompt=[("human", said)], chosen=marks[0], rejected=marks[1]))
    return [{**x, "prompt": x["prompt"] if isinstance(x["prompt"], str)
             else join(x["prompt"], answer=True)} for x in lines]


def measure(cfg):
    """The units that have no line yet."""
    for unit in missing("demonstrations", cfg.seeds):
        seed = unit["seed"]
        pm, root = trained_pm(cfg, seed), work(cfg)
        small, start = base(cfg, "micro"), distilled(cfg, "micro")
        common = dict(seed=seed, device=cfg.device, every=10**6)
        tuned = str(root / f"sft-{seed}")
        sft.train(sft.Config(init=small, pm=pm, out=tuned, demos=few(cfg, 1000), epochs=8,
                             **common))
        epochs = [{k: r[k] for k in ("epoch", "heldout_loss", "pm")}
                  for r in metrics_of(tuned) if "heldout_loss" in r]
        tasks = root / f"narrow-{seed}.jsonl"
        write_lines({tasks: narrow_tasks(cfg, seed, few(cfg, 1000))})
        narrow = str(root / f"sft-narrow-{seed}")
        sft.train(sft.Config(init=small, out=narrow, data=str(tasks), epochs=2, **common))
        policies = {"base": small, "prompted": small, "sft": tuned, "narrow": narrow,
                    "ppo": trained_policy(cfg, seed, "from-sft", pm, policy=tuned),
                    "ppo-ptx": trained_policy(cfg, seed, "from-sft-ptx", pm, policy=tuned, ptx=1.0)}
        judge = load(pm)
        golds = {name: golds_of(cfg, path, small, judge, seed, world.hhh_prompt()
                                if name == "prompted" else ("", []))
                 for name, path in policies.items()}
        append("demonstrations", {
            **unit, "epochs": epochs, "wins": {name: wins(own, golds["sft"])
                                               for name, own in golds.items()},
            "gold": {name: mean_se(own)[0] for name, own in golds.items()},
            **best_of(cfg, start, pm, seed), **rejection_tuned(cfg, start, pm, seed, common)})


def golds_of(cfg, path, reference, pm, seed, before):
    """Gold of each answer to the same prompts of both kinds."""
    policy, origin = load(path), load(reference)
    return [g for o in OBJECTIVES for g in gold_of(answers(
        cfg, policy, origin, pm, seed, o, few(cfg, 200), before))[0]]


def wins(golds, others):
    """Chance that an annotator prefers these answers to others, over prompts: mean, error."""
    return mean_se([world.preference(a, b) for a, b in zip(golds, others, strict=True)])


def rejection_tuned(cfg, start, pm, seed, common):
    """Best of 16 by the PM, then SFT on them, from the distilled policy (K12)."""
    picked = work(cfg) / f"rejection-{seed}"
    rejection.sample(rejection.Config(policy=start, pm=pm, out=str(picked), count=few(cfg, 1200),
                                      seed=seed, device=cfg.device))
    tuned = str(work(cfg) / f"rejection-sft-{seed}")
    sft.train(sft.Config(init=start, data=str(picked / "demonstrations.jsonl"), out=tuned, epochs=2,
                         lr=3e-4, **common))
    pms = dict(pm=load(pm))
    first, found = (look(cfg, path, start, pms, seed) for path in (start, tuned))
    keys = ("gold", "pm", "kl_exact", "kl", "kl_se")
    return dict(start={k: first[k] for k in keys}, rejection={k: found[k] for k in keys})


def best_of(cfg, start, pm, seed, n=256):
    """Best of k of n answers: PM score, chance to beat one answer, the KL of the best of k to the
    distribution of the n answers themselves (equal scores are one answer), and its bound (H22).
    """
    scores, gold = many_answers(cfg, load(start), load(pm), seed, 24, n)
    scores = np.round(scores, 4)
    beats = [[float(np.mean([world.preference(g, other) for other in own])) for g in own]
             for own in gold]
    by_score, by_win = ({r["k"]: r for r in best_of_k(scores, values)}
                        for values in (scores, beats))
    out = []
    for k in KS:
        kls = []
        for own in scores.tolist():
            counts = Counter(own)
            kls.append(best_of_n_kl_exact([c / n for c in counts.values()], k, list(counts)))
        out.append(dict(k=k, pm=by_score[k]["value"], win=by_win[k]["value"],
                        kl=float(np.mean(kls)), kl_most=max(kls), bound=best_of_n_kl(k)))
    return dict(best_of=out)


# ---------------------------------------------------------------- reading the lines

def verdict_i01(rows):
    """held: the last epoch has a higher held-out loss and a higher PM score than the epoch whose
    mean loss over seeds is least, each by two errors over seeds, by 0.005 nats and 0.05.
    """
    by = {e: [next(x for x in r["epochs"] if x["epoch"] == e) for r in rows]
          for e in range(1, max(x["epoch"] for x in rows[0]["epochs"]) + 1)}
    least = min(by, key=lambda e: mean_se([x["heldout_loss"] for x in by[e]])[0])
    last, found = max(by), {}
    for key in ("heldout_loss", "pm"):
        found[key] = mean_se([b[key] - a[key] for a, b in zip(by[least], by[last], strict=True)])
    told = (f"held-out loss is least after epoch {least} of {last}: "
            f"{told_of([x['heldout_loss'] for x in by[least]], '', 3)}; from there to the end loss "
            f"{found['heldout_loss'][0]:+.3f} ± {found['heldout_loss'][1]:.3f}, PM score "
            f"{found['pm'][0]:+.2f} ± {found['pm'][1]:.2f}")
    panels = [(name, "epoch", name, {name: {e: (*mean_se([x[key] for x in own]), len(own))
                                            for e, own in by.items()}})
              for key, name in (("heldout_loss", "held-out loss"), ("pm", "PM score"))]
    holds = [Effect(found["heldout_loss"], 0.005), Effect(found["pm"], 0.05)]
    return verdict(holds, rows, told, panels)


def verdict_i04(rows):
    """held: win rates against SFT are ordered base < prompted < 1/2 < PPO by two errors over paired
    seeds and 2 points, and PPO-ptx is within 0.05 of PPO.
    """
    rate = {n: [r["wins"][n][0] for r in rows] for n in ("base", "prompted", "ppo", "ppo-ptx")}

    def beyond(a, b):
        return Effect(mean_se([y - x for x, y in zip(a, b, strict=True)]), 0.02)

    half = [0.5] * len(rows)
    near = abs(mean_se(rate["ppo-ptx"])[0] - mean_se(rate["ppo"])[0]) < 0.05
    holds = [beyond(rate["base"], rate["prompted"]), beyond(rate["prompted"], half),
             beyond(half, rate["ppo"]), near]
    told = "win rate against SFT: " + ", ".join(
        f"{n} {points(mean_se(v)[0])} ± {points(mean_se(v)[1])}" for n, v in rate.items())
    return verdict(holds, rows, told, [bars("against SFT", "win rate", rate)])


def verdict_i08(rows):
    """held: the policy tuned on narrow tasks wins under 40% against SFT, by two errors over seeds.
    """
    rate = mean_se([r["wins"]["narrow"][0] for r in rows])
    gold = [told_of([r["gold"][name] for r in rows], "") for name in ("narrow", "sft")]
    told = (f"tuned on narrow tasks it wins {points(rate[0])} ± {points(rate[1])} against SFT on "
            f"the users' prompts; gold {gold[0]} against {gold[1]}")
    panels = [bars("tuned on", "gold utility", {
        label: [r["gold"][name] for r in rows] for label, name in (("narrow tasks", "narrow"),
                                                                   ("users' prompts", "sft"))})]
    return verdict([passes([0.4 - r["wins"]["narrow"][0] for r in rows])], rows, told, panels)


def verdict_h22(rows):
    """held: PM score and chance to beat one answer rise from each k to the next (1, 4, 16, 64) in
    every seed, and the online policy of results/online.jsonl (regime short) is within 50 Elo of
    k = 64. That no prompt's KL is above log k - (k - 1) / k is a check of the code.
    """
    by = {k: [next(b for b in r["best_of"] if b["k"] == k) for r in rows] for k in KS}
    grows = all(b[key] > a[key] for key in ("pm", "win") for one, two in zip(KS, KS[1:])
                for a, b in zip(by[one], by[two], strict=True))
    under = all(b["kl_most"] <= b["bound"] + 1e-6 for v in by.values() for b in v)
    elo = {k: [of_win_rate(b["win"]) for b in v] for k, v in by.items()}
    online = [of_win_rate(np.mean([win_rate(x["elo"][o]["mixture"]) for o in OBJECTIVES]))
              for x in records("online") if x["regime"] == "short"]   # of one chance, as elo is
    near = bool(online) and abs(mean_se(online)[0] - mean_se(elo[64])[0]) < 50
    told = "Elo over one answer: " + "; ".join(
        f"k = {k} {told_of(elo[k], places=0)} (wins {points(mean_se([b['win'] for b in v])[0])}), "
        f"KL {told_of([b['kl'] for b in v], '')} of at most {v[0]['bound']:.2f}"
        for k, v in by.items() if k > 1) + "; online policy " + (
        told_of(online, places=0) if online else "not measured (eval.py H20)")
    panels = [("best of k", "k", name, {name: {k: (*mean_se(x), len(x)) for k, x in own.items()}})
              for name, own in (("Elo over one answer", elo), *(
                  (label, {k: [b[key] for b in v] for k, v in by.items()})
                  for key, label in (("pm", "PM score"), ("kl", "KL, nats"))))]
    return verdict(grows and under and near, rows, told, panels, log_x=True)


def ppo_gain_at(seed, kl):
    """PM score that the default PPO run of results/rl.jsonl has gained at this exact KL, on the
    same prompts, between its snapshots; None where it has none so far out, or no line.
    """
    own = {r["variant"]: r for r in records("rl") if r["seed"] == seed}
    if not {"start", "default"} <= own.keys():
        return None
    way = sorted((s["kl_exact"], s["pm"]) for s in [*own["default"]["way"], own["default"]])
    if kl > way[-1][0]:
        return None
    first = own["start"]["pm"]
    return float(np.interp(kl, [0.0, *(d for d, _ in way)], [0.0, *(s - first for _, s in way)]))


def verdict_k12(rows):
    """held: rejection-sampling fine-tuning raises PM score and gold by two errors over seeds, and
    gets less of the PM's score than PPO at the same KL (results/rl.jsonl), by two errors; each by
    0.05.
    """
    pm, gold = ([r["rejection"][k] - r["start"][k] for r in rows] for k in ("pm", "gold"))
    kl = [r["rejection"]["kl_exact"] for r in rows]
    ppo = [ppo_gain_at(r["seed"], k) for r, k in zip(rows, kl, strict=True)]
    told = f"at {told_of(kl, '')} nats: PM score {told_of(pm, '')}, gold {told_of(gold, '')}"
    if None in ppo:
        return verdict(False, [], told + "; no PPO run (eval.py K10) has gone so far")
    up = [Effect(mean_se(x), 0.05) for x in (pm, gold, less(ppo, pm))]
    told += f"; PPO at the same KL: PM score {told_of(ppo, '')}"
    panels = [bars("at the same KL", "PM score gained", {"rejection + SFT": pm, "PPO": ppo})]
    return verdict(up, rows, told, panels)


CLAIMS = {
    "H22": Claim("best-of-k grows with k at a KL of at most log k - (k - 1) / k; the online policy "
                 "is near k = 64",
                 "HH B.6, fig. 36", measure, verdict_h22, 20,
                 source="demonstrations",
                 why="the PM's score goes on rising, but the chance to beat one answer is "
                     "flat from 16 to 64: best-of-n over-optimizes this PM too (see K02). The "
                     "online policy is near k = 64",
                 paper="+275 at k = 64"),
    "I01": Claim("SFT's validation loss is best after one epoch, more epochs still raise the RM's "
                 "score",
                 "InstructGPT 3.5", measure, verdict_i01, 20,
                 source="demonstrations",
                 why="the loss is least after the first epoch, and the PM's score is higher "
                     "at the end, but by no more than its error",
                 paper="best after the first of 16 epochs"),
    "I04": Claim("win rate against SFT: base < prompted < SFT < PPO, PPO-ptx like PPO",
                 "InstructGPT 4.1, fig. 1", measure, verdict_i04, 20,
                 source="demonstrations",
                 paper="85 ± 3% against the base model"),
    "I08": Claim("tuning on narrow public-style tasks loses to SFT on the users' prompts",
                 "InstructGPT 4.1, fig. 5", measure, verdict_i08, 20,
                 source="demonstrations",
                 paper="27 to 30% against 73%"),
    "K12": Claim("rejection-sampling fine-tuning gets part of PPO's gain at the same KL",
                 "RL with a KL penalty", measure, verdict_k12, 20,
                 source="demonstrations",
                 why="it gets all of what PPO gets at that KL, and nine tenths of what best-of-k "
                     "itself has there (the lines of H22, on other prompts)"),
}
