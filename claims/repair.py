"""Can online rounds mend a policy that has learned to refuse? (HH 4.4, 4.5, as a question of ours.)

A PM straight from the base model on 3,000 comparisons of the distilled policy knows nothing bad
about refusing a plain question: nobody refused one in them. PPO for long and nearly without a
penalty finds that out. Each round shows annotators more pairs and trains a new PM and policy:

    end      of the policy's snapshots at sqrt(KL) 1, 2, 3 and of its end, cheat and all
    early    of the snapshots alone, where the cheat is not there yet

A unit is a seed of one of the two: 8 minutes on one core; its line is in results/repair.jsonl.
"""

from claims.online import fitted, gather, tuned
from claims.policies import distilled, load, look
from claims.records import Claim, Effect, append, complete, less, missing, told_of, verdict
from claims.start import few, points
from measures import mean_se

BASE, ROUNDS, COUNT = 3000, 3, 1000       # 300 a round were tried first, on one seed
HELPFUL = 0.3          # share of helpful prompts: more of them hide the cheat, HH 4.4
SHOWN = ("end", "early")


def measure(cfg):
    """The units that have no line yet; the first PM and policy are the same for both."""
    for unit in missing("repair", cfg.seeds, shown=SHOWN, count=(COUNT,)):
        seed, shown, start = unit["seed"], unit["shown"], distilled(cfg, "micro")
        own = dict(regime="raw", seed=seed)
        test = gather(cfg, own, "base", [start], few(cfg, 600), seed + 1000)
        lines, rounds = gather(cfg, own, "base", [start], few(cfg, BASE), seed), []
        for r in range(ROUNDS + 1):
            name = f"repair-{shown}-{r}" if r else "repair"
            pm = fitted(cfg, own, name, lines, test)
            folder, deployed = tuned(cfg, own, name, pm, helpful=HELPFUL)
            found = look(cfg, folder, start, dict(pm=load(pm)), seed)
            rounds.append({"lines": len(lines), **{k: found[k] for k in (
                "sqrt_kl", "gold_helpful", "gold_harmless", "refused")}})
            if r < ROUNDS:
                some = deployed if shown == "end" else deployed[:-1]
                lines = lines + gather(cfg, own, f"{name}-lot-{shown}", some,
                                       few(cfg, unit["count"]), seed)
        append("repair", {**unit, "rounds": rounds})


def verdict_repair(rows):
    """held: where the first policy refuses over half of the plain prompts, rounds that show its end
    leave under 20% refused after the last, and rounds that show early snapshots alone leave more,
    by two errors over those seeds and a tenth. Inconclusive without three such seeds, both kinds
    measured.
    """
    rows = complete([r for r in rows if r["count"] == COUNT], "shown", SHOWN)
    by = {s: [r for r in rows if r["shown"] == s] for s in SHOWN}
    sick = [i for i, r in enumerate(by["end"]) if r["rounds"][0]["refused"] > 0.5]
    told = []
    for s, own in by.items():
        for name, places in (("refused", 2), ("gold_helpful", 2)):
            way = [told_of([own[i]["rounds"][r][name] for i in sick], "", places)
                   for r in range(ROUNDS + 1)] if sick else []
            told.append(f"{s}: {name.replace('_', ' ')} by round " + ", ".join(way))
    left = {s: [own[i]["rounds"][-1]["refused"] for i in sick] for s, own in by.items()}
    more = less(left["early"], left["end"])
    holds = [mean_se(left["end"])[0] < 0.2, Effect(mean_se(more), 0.1)] if sick else False
    told = (f"{len(sick)} of {len(by['end'])} first policies refuse most plain prompts ("
            + ", ".join(points(r["rounds"][0]["refused"]) for r in by["end"]) + "); of these: "
            + "; ".join(told))
    panels = [(f"lots of {COUNT} that show", "round", name.replace("_", " "), {
        s: {r: (*mean_se([x["rounds"][r][name] for x in own]), len(own))
            for r in range(ROUNDS + 1)} for s, own in by.items()})
        for name in ("refused", "gold_helpful")]
    return verdict(holds, [by["end"][i] for i in sick], told, panels)


CLAIMS = {
    "repair": Claim("rounds whose snapshots show a cheat unlearn it, rounds that miss it do not",
                    "our question on HH 4.5", measure, verdict_repair, 50,
                    why="one round that shows the cheat ends it (1% refused); it comes back in "
                        "part (29 ± 17%) and is at 3% after the third. Rounds that miss it end it "
                        "at first too, but two policies of three refuse again after the third: 66 "
                        "± 33% is not told from 3% by two errors of three seeds"),
}
