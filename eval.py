"""The report of a run, and the claims of the papers measured.

    python eval.py --run out/laptop            the report: terminal, report.md, .json and .png
    python eval.py --run out/laptop --record   the same, and its numbers to results/laptop.jsonl
    python eval.py --claim H01 --seeds 3       measure a claim: results/H01.jsonl and the verdict
    python eval.py --readme                    rewrite the README's tables from results/

Report: gold utilities (the world's own, read from the text) of base, base behind the HHH prompt,
distilled and RLHF on prompts about animals that no comparison and no RL prompt ever named; the
preference model beside the best possible accuracy and the longer-answer baseline. About 1 minute
on two cores. H01: 12 minutes a seed.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

import distill
import preference
import pretrain
from common import UserError, device_of, entry, load_checkpoint, uniforms, write_atomically
from data import world
from data.tokenizer import loads
from model import generate, pad_rows, response_mask, unpack

POLICIES = {"base": "pretrain", "prompted": "pretrain", "distilled": "distill", "rlhf": "ppo"}


@dataclass(frozen=True)
class Config:
    run: str = "out/laptop"            # folder of a run: its stages' folders are inside
    prompts: int = 400                 # held-out prompts of each kind, helpful and harmful
    new: int = 40                      # tokens of an answer at most
    record: bool = False               # append the report's numbers to results/laptop.jsonl
    claim: str = ""                    # measure this claim instead; known: H01
    seeds: int = 3                     # seeds of a claim
    steps: int = 800                   # pretraining steps of a claim's base models
    readme: bool = False               # rewrite the README's tables from results/ instead
    seed: int = 0                      # of the report's prompts and answers
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def mean_se(values):
    """Mean and standard error of independent values (0 for a single one)."""
    n = len(values)
    mean = sum(values) / n
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else 0.0


# ---------------------------------------------------------------- policies

@torch.no_grad()
def answers_of(model, tok, prompts, new, uniform, reference=None, chunk=64):
    """An answer a prompt: (text, whether it ended its turn, sum of log pi - log pi0 or 0.0)."""
    out = []
    for i in range(0, len(prompts), chunk):
        part = prompts[i:i + chunk]
        tokens, lengths, logps = generate(model, part, new, uniform[i:i + chunk], stops=tok.stops,
                                          pad=tok.pad)
        kl = [0.0] * len(part)
        if reference:
            rows = [p + t[:n]
                    for p, t, n in zip(part, tokens.tolist(), lengths.tolist(), strict=True)]
            ids, _ = pad_rows(rows, tok.pad, model.device)
            starts = torch.tensor([len(p) for p in part], device=model.device)
            mask = response_mask(starts, lengths, ids.shape[1])
            kl = (logps.sum(1) - reference.logprobs(reference(ids), ids, mask).sum(1)).tolist()
        out += [(tok.decode(t[:n]).strip(), t[n - 1] == tok.eot, d)
                for t, n, d in zip(tokens.tolist(), lengths.tolist(), kl, strict=True)]
    return out


def measure_policies(cfg, folder, device):
    """name -> numbers of each policy; the prompts; the answers.

    All policies get the same prompts and random numbers.
    """
    sets = {o: [world.prompt(f"report/{cfg.seed}", i, world.HELD_OUT, harmful=o == "harmless")
                for i in range(cfg.prompts)] for o in ("helpful", "harmless")}
    numbers, texts, reference = {}, {}, None
    for name, stage in POLICIES.items():
        source = load_checkpoint(folder / stage)
        tok, model = loads(source["tokenizer"]), unpack(source, device, scalar=False).eval()
        if name == "distilled":
            reference = model
        preamble, before = world.hhh_prompt() if name == "prompted" else ("", [])
        row = numbers[name] = {}
        for objective, dialogues in sets.items():
            prompts = [tok.render(before + turns, preamble, answer=True) for turns in dialogues]
            found = answers_of(model, tok, prompts, cfg.new,
                               uniforms(range(len(prompts)), cfg.new, cfg.seed, "report"),
                               reference if name == "rlhf" else None)
            requests = [world.request_of(t) for t in dialogues]
            golds = [world.gold(r, a)[r.harmful]
                     for r, (a, _, _) in zip(requests, found, strict=True)]
            row[objective], row[objective + "_se"] = mean_se(golds)
            row["unfinished_" + objective] = sum(not f[1] for f in found) / len(found)
            row["length_" + objective] = sum(len(tok.encode(f[0])) for f in found) / len(found)
            if objective == "helpful":
                refused = [world.refuses(r, f[0]) for r, f in zip(requests, found, strict=True)]
                row["refused_helpful"] = sum(refused) / len(found)
            if name == "rlhf":
                row["kl_" + objective] = mean_se([f[2] for f in found])[0]
            texts[name, objective] = [f[0] for f in found]
    rlhf = numbers["rlhf"]
    rlhf["sqrt_kl"] = math.sqrt(max(0.0, (rlhf["kl_helpful"] + rlhf["kl_harmless"]) / 2))
    return numbers, sets, texts


# ---------------------------------------------------------------- the preference model

PM_SETS = {"heldout": "about animals never named in a comparison", "test": "new prompts"}


def measure_pm(folder, device):
    """Accuracy of the PM on two sets of comparisons, and on pairs that differ in one fact only."""
    source = load_checkpoint(folder / "pm")
    tok, pm = loads(source["tokenizer"]), unpack(source, device).eval()
    out = {name: measure_pairs(pm, tok, folder / name) for name in PM_SETS}
    for key, animals in (("truth", world.TRAIN), ("truth_heldout_animals", world.HELD_OUT)):
        pairs = preference.truth_rows(tok, animals, 1000, seed=1)
        right = preference.accuracy(*preference.score_pairs(pm, tok, pairs).unbind(1)).tolist()
        out[key], out[key + "_se"] = mean_se(right)
    return out


def measure_pairs(pm, tok, path):
    """Per objective: accuracy, the annotators' Bayes accuracy, and that of "the longer one"."""
    lines, out = preference.read_comparisons(path), {}
    rows, lines, dropped = preference.encode_comparisons(tok, lines, pm.config.n_ctx)
    if any(dropped.values()):
        raise UserError(f"{path}: {dropped} rows cannot be scored")
    hits = preference.accuracy(*preference.score_pairs(pm, tok, rows).unbind(1)).tolist()
    sizes = torch.tensor([[len(x["chosen"]), len(x["rejected"])] for x in lines])
    longer = preference.accuracy(*sizes.unbind(1)).tolist()
    for objective in ("helpful", "harmless"):
        own = [i for i, x in enumerate(lines) if x["objective"] == objective]
        accuracy, se = mean_se([hits[i] for i in own])
        best = [max(lines[i]["soft"], 1 - lines[i]["soft"]) for i in own]
        out[objective] = dict(pairs=len(own), accuracy=accuracy, se=se,
                              longer=mean_se([longer[i] for i in own])[0], bayes=mean_se(best)[0])
    return out


# ---------------------------------------------------------------- the report

def metrics_of(folder, stage):
    path = folder / stage / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path}: missing; run the {stage} stage first")
    return [json.loads(x) for x in path.read_text().splitlines()]


def draw_report(report, ppo, path):
    """Left: gold of the four policies. Right: PPO's PM score and gold against sqrt(KL)."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    blue, orange, gray = "#0072B2", "#D55E00", "#666666"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    looks = (("helpful", blue, ""), ("harmless", orange, "//"))
    for k, (objective, color, hatch) in enumerate(looks):
        left.bar([i + 0.38 * k for i in range(4)], [report[n][objective] for n in POLICIES], 0.36,
                 yerr=[report[n][objective + "_se"] for n in POLICIES], capsize=3,
                 color=color, hatch=hatch, edgecolor="white",
                 label=f"{objective} ({'plain' if k == 0 else 'harmful'} prompts)")
    left.set_xticks([i + 0.19 for i in range(4)], list(POLICIES))
    left.set(ylabel="gold utility of an answer", title="held-out prompts, mean ± standard error")
    left.axhline(0, color="black", linewidth=0.8)
    left.legend(frameon=False)
    x = [math.sqrt(max(r["kl"], 0)) for r in ppo]
    for key, label, color, marker in (("gold_helpful", "gold, helpful", blue, "o"),
                                      ("gold_harmless", "gold, harmless", orange, "s"),
                                      ("score", "PM score (spread 1 at the start)", gray, "^")):
        right.plot(x, [r[key] for r in ppo], color=color, marker=marker, markersize=5,
                   linestyle="", alpha=0.8, label=label)
    right.set(xlabel="sqrt(KL(policy || distilled)), nats^0.5",
              ylabel="mean of an iteration's answers", title="PPO")
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def as_markdown(report):
    """The report's tables."""
    lines = ["| policy | gold helpful (plain prompts) | gold harmless (harmful prompts) "
             "| refuses plain prompts |", "|---|---|---|---|"]
    for name in POLICIES:
        r = report[name]
        lines.append(f"| {name} | {r['helpful']:+.2f} ± {r['helpful_se']:.2f} "
                     f"| {r['harmless']:+.2f} ± {r['harmless_se']:.2f} "
                     f"| {r['refused_helpful']:.1%} |")
    pm, loss = report["pm"], report["distill"]
    lines += ["", "| preference model, on comparisons | accuracy | best possible | longer answer "
              "| pairs |", "|---|---|---|---|---|"]
    for o, name in ((o, name) for name in PM_SETS for o in ("helpful", "harmless")):
        r = pm[name][o]
        lines.append(f"| {o}, {PM_SETS[name]} | {r['accuracy']:.1%} ± {r['se']:.1%} "
                     f"| {r['bayes']:.1%} | {r['longer']:.1%} | {r['pairs']} |")
    lines += ["", f"The true fact is preferred in {pm['truth']:.1%} of pairs that differ in "
              f"nothing else ({pm['truth_heldout_animals']:.1%} for animals never named in a "
              "comparison). "
              f"Distillation: {loss['before']:.3f} -> {loss['after']:.4f} nats a token from the "
              "prompted teacher. "
              f"RLHF: sqrt(KL) {report['rlhf']['sqrt_kl']:.2f} from the distilled model."]
    return "\n".join(lines)


def pairs_as_text(sets, texts, count=3):
    """The first prompts, answered by base and by RLHF: chosen before anything was measured."""
    lines = []
    for i in range(count):
        objective = "harmless" if i == 1 else "helpful"
        lines += [f"Human: {sets[objective][i][-1][1]}", f"  base: {texts['base', objective][i]}",
                  f"  rlhf: {texts['rlhf', objective][i]}", ""]
    return "\n".join(lines)


def report(cfg):
    folder, device = Path(cfg.run), device_of(cfg.device)
    numbers, sets, texts = measure_policies(cfg, folder, device)
    kl = [r["heldout_kl"] for r in metrics_of(folder, "distill") if "heldout_kl" in r]
    ppo = metrics_of(folder, "ppo")
    kept = ("kl", "score", "pm", "gold_helpful", "gold_harmless")
    out = dict(numbers, pm=measure_pm(folder, device), distill=dict(before=kl[0], after=kl[-1]),
               prompts=cfg.prompts, seed=cfg.seed, ppo=[{k: r[k] for k in kept} for r in ppo])
    table, pairs = as_markdown(out), pairs_as_text(sets, texts)
    draw_report(out, ppo, folder / "report.png")
    write_atomically(folder / "report.json", lambda f: f.write(json.dumps(out, indent=1).encode()))
    text = (f"# Report of {cfg.run}\n\n{cfg.prompts} held-out prompts of each kind, "
            f"one sampled answer each.\n\n{table}\n\n![gold utilities of the four policies; "
            f"PM score and gold against sqrt(KL)](report.png)\n\n```\n{pairs}```\n")
    write_atomically(folder / "report.md", lambda f: f.write(text.encode()))
    print(f"{table}\n\n{pairs}\nwritten: {folder}/report.md, report.json, report.png")
    if cfg.record:
        rest = {k: v for k, v in out.items() if k not in ("ppo", "seed")}
        append("laptop", dict(seed=cfg.seed, **rest))


# ---------------------------------------------------------------- claims

def append(name, row):
    """One JSON line in results/<name>.jsonl; numbers to four digits."""
    Path("results").mkdir(exist_ok=True)
    with open(f"results/{name}.jsonl", "a") as file:
        rounded = json.loads(json.dumps(row), parse_float=lambda x: round(float(x), 4))
        file.write(json.dumps(rounded) + "\n")


def records(name):
    path = Path(f"results/{name}.jsonl")
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def h01(cfg, sizes=("toy", "micro", "nano")):
    """H01 (HH A.1, fig. 30): distillation's loss falls to near zero for the teacher's size.

    And it ends higher for smaller students. One base of each size a seed; the teacher is the toy
    one. A unit is a (seed, size) and takes 2 to 6 minutes.
    """
    for seed in range(cfg.seeds):
        for size in sizes:
            if any(r["seed"] == seed and r["size"] == size and r["steps"] == cfg.steps
                   for r in records("H01")):
                print(f"H01 seed {seed} {size}: recorded, skipped")
                continue
            root = Path(cfg.run) / "h01" / str(seed)
            for s in dict.fromkeys((sizes[0], size)):
                pretrain.train(pretrain.Config(out=str(root / s), size=s, steps=cfg.steps,
                                               seed=seed, device=cfg.device))
            distill.train(distill.Config(init=str(root / size), teacher=str(root / sizes[0]),
                                         out=str(root / f"distill-{size}"), seed=seed,
                                         device=cfg.device))
            kl = [r["heldout_kl"] for r in metrics_of(root, f"distill-{size}")
                  if "heldout_kl" in r]
            append("H01", dict(seed=seed, size=size, steps=cfg.steps, before=kl[0], after=kl[-1]))
    print(verdict_h01([r for r in records("H01") if r["steps"] == cfg.steps], sizes))


def verdict_h01(rows, sizes=("toy", "micro", "nano")):
    """held: in every seed the own-size loss ends under a tenth of its start,

    and each smaller student ends above it.
    """
    ordered = sorted(rows, key=lambda r: r["seed"])
    after = {s: [r["after"] for r in ordered if r["size"] == s] for s in sizes}
    own = [r for r in rows if r["size"] == sizes[0]]
    text = "; ".join(f"{s} {mean_se(v)[0]:.4f} ± {mean_se(v)[1]:.4f}"
                     for s, v in after.items() if v)
    if min(map(len, after.values())) < 3:
        return f"H01 inconclusive: fewer than 3 seeds ({text})"
    small = all(r["after"] < 0.1 * r["before"] for r in own)
    higher = all(x > y for s in sizes[1:] for x, y in zip(after[s], after[sizes[0]], strict=True))
    start = mean_se([r["before"] for r in own])[0]
    return (f"H01 {'held' if small and higher else 'not held'}: loss to the teacher "
            f"{start:.4f} -> {text} nats a token, {len(own)} seeds"
            + ("" if small else "; the own size keeps more than a tenth")
            + ("" if higher else "; a smaller student ended lower"))


# ---------------------------------------------------------------- the README

def over_seeds(rows):
    """The report's numbers as means over seeds; standard errors are over seeds."""
    def merge(values):
        if isinstance(values[0], dict):
            return {k: merge([v[k] for v in values]) for k in values[0]}
        return mean_se(values)[0] if isinstance(values[0], (int, float)) else values[0]
    merged = merge(rows)
    for name in POLICIES:
        for o in ("helpful", "harmless"):
            merged[name][o + "_se"] = mean_se([r[name][o] for r in rows])[1]
    for name, o in ((name, o) for name in PM_SETS for o in ("helpful", "harmless")):
        found = [r["pm"][name][o] for r in rows]
        merged["pm"][name][o].update(se=mean_se([r["accuracy"] for r in found])[1],
                                     pairs=sum(r["pairs"] for r in found))
    return merged


def readme():
    """Replace what stands between the README's markers by tables of results/."""
    rows = records("laptop")
    if not rows:
        raise UserError("results/laptop.jsonl: no record; "
                        "run `python eval.py --run out/laptop --record` first")
    parts = {"laptop": f"Means of {len(rows)} seeds, ± standard error over seeds; "
                       f"{int(rows[0]['prompts'])} held-out prompts of each kind a seed.\n\n"
                       f"{as_markdown(over_seeds(rows))}",
             "claims": verdict_h01(records("H01"))}
    text = Path("README.md").read_text()
    for name, body in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            raise UserError(f"README.md: the markers {begin} and {end} are missing")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"
    write_atomically("README.md", lambda f: f.write(text.encode()))
    print("README.md: tables rewritten from results/")


def main(cfg):
    if cfg.readme:
        return readme()
    if cfg.claim == "H01":
        return h01(cfg)
    if cfg.claim:
        raise UserError(f"--claim {cfg.claim}: known here: H01")
    return report(cfg)


if __name__ == "__main__":
    entry(main, Config, __doc__)
