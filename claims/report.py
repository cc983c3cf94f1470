"""The report of a run: gold utilities of its policies and the accuracy of its preference model.

Gold (the world's own, read from the text) of base, base behind the HHH prompt, distilled and RLHF
on prompts about animals that no comparison and no RL prompt ever named; the preference model beside
the best possible accuracy and the longer-answer baseline. About 1 minute on two cores.
`eval.py --report` writes it.
"""

import json
import math
from pathlib import Path

import torch

import preference
from claims import loop, records
from common import UserError, device_of, load_checkpoint, metrics_of, uniforms, write_atomically
from data import world
from data.tokenizer import loads
from measures import mean_se
from model import generate, pad_rows, response_mask, unpack

POLICIES = {"base": "pretrain", "prompted": "pretrain", "distilled": "distill", "rlhf": "ppo"}


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
            ids, sizes = pad_rows(rows, tok.pad, model.device)
            starts = torch.tensor([len(p) for p in part], device=model.device)
            mask = response_mask(starts, lengths, ids.shape[1])
            kl = (logps.sum(1) - reference.logprobs(ids, mask, lengths=sizes).sum(1)).tolist()
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

def metrics(folder, stage):
    path = folder / stage / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path}: missing; run the {stage} stage first")
    return metrics_of(folder / stage)


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
    kl = [r["heldout_kl"] for r in metrics(folder, "distill") if "heldout_kl" in r]
    ppo = metrics(folder, "ppo")
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
        records.append("laptop", dict(seed=cfg.seed, **rest))
        if (folder / "online").exists():
            records.append("loop", dict(seed=cfg.seed, **loop.loop_of(folder / "online")))


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
