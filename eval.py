"""The report of a run, and the claims of the papers measured.

    python eval.py --run out/laptop            the report: terminal, report.md, .json and .png
    python eval.py --run out/laptop --record   the same, and its numbers to results/laptop.jsonl
    python eval.py --claim H02,H05             measure claims: results/<id>.jsonl and the verdicts
    python eval.py --readme                    rewrite the README's tables from results/

Report: gold utilities (the world's own, read from the text) of base, base behind the HHH prompt,
distilled and RLHF on prompts about animals that no comparison and no RL prompt ever named; the
preference model beside the best possible accuracy and the longer-answer baseline. About 1 minute
on two cores. `--claim` runs what has no record yet, each unit under a quarter of an hour; it starts
from the base, the policy and the comparisons of --run.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import preference
from claims import (closed_forms, demonstrations, distillation, loop, online, pm_scores,
                    pm_training, records, repair, rl, robustness)
from claims.records import Claim
from common import (UserError, device_of, entry, load_checkpoint, metrics_of, uniforms,
                    write_atomically)
from data import world
from data.tokenizer import loads
from measures import mean_se
from model import generate, pad_rows, response_mask, unpack

POLICIES = {"base": "pretrain", "prompted": "pretrain", "distilled": "distill", "rlhf": "ppo"}


@dataclass(frozen=True)
class Config:
    run: str = "out/laptop"            # folder of a run: its stages' folders are inside
    prompts: int = 400                 # held-out prompts of each kind, helpful and harmful
    new: int = 40                      # tokens of an answer at most
    record: bool = False               # append the report's numbers to results/laptop.jsonl
    claim: str = ""                    # measure these claims instead (commas), or "all" of them
    seeds: int = 3                     # seeds of a claim
    quick: bool = False                # an eighth of the work and one seed: does it run at all?
    steps: int = 800                   # pretraining steps of a claim's base models
    readme: bool = False               # rewrite the README's tables from results/ instead
    seed: int = 0                      # of the report's prompts and answers
    device: str = "auto"               # auto, cpu, cuda or mps


CLAIMS = {
    "H01": Claim("distillation's loss falls to near zero for the teacher's own size, and ends "
                 "higher for smaller students", "HH A.1, fig. 30", distillation.h01,
                 distillation.verdict_h01, 36),
    "H02": Claim("PM pretraining makes human feedback more sample-efficient", "HH 3.1, A.2",
                 pm_training.h02, pm_training.verdict_h02, 6),
    "H03": Claim("PM accuracy grows log-linearly with parameters and data", "HH 3.2, fig. 7, A.3",
                 pm_training.h03, pm_training.verdict_h03, 20,
                 "both slopes of helpful accuracy are above 0 by two errors, but all 16 cells lie "
                 "within 6 points, and one seed's test scatters by 1 to 2; harmless accuracy is at "
                 "its ceiling after PM pretraining (best possible 85%)"),
    "H04": Claim("accuracy is a little higher on the first turn, flat after it", "HH fig. 8",
                 pm_scores.h04, pm_scores.verdict_h04, 4,
                 "turns 1 and 2 agree, and the third is lower by less than two errors: there are "
                 "only 300 test comparisons of it a seed"),
    "H05": Claim("a helpful-only PM is well calibrated, a mixed one slightly under-confident",
                 "HH 3.3, fig. 9", pm_scores.h05, pm_scores.verdict_h05, 2,
                 "both are calibrated within 0.05, but the mixed one is not under-confident"),
    "H06": Claim("accuracy falls when both answers score above a rising threshold", "HH fig. 25",
                 pm_scores.h06, pm_scores.verdict_h06, 1),
    "H07": Claim("PMs prefer the better HHH answer; the failures are confident: helpful-looking "
                 "and wrong over honest", "HH 3.4.1, figs 10, 11", pm_scores.h07,
                 pm_scores.verdict_h07, 1,
                 "the friendly falsehood wins as in the paper, but by a little less than half of "
                 "what right choices win by; the toy annotators' own taste is that way (a polite "
                 "falsehood -0.7, an admission -0.8)"),
    "H08": Claim("PMs score harmful utterances lower", "HH 3.4.2, fig. 12", pm_scores.h08,
                 pm_scores.verdict_h08, 1),
    "H14": Claim("a PM of one objective is under chance on the other; larger PMs mind the mixture "
                 "less", "HH 5.1.1, figs 19, 26", pm_training.h14, pm_training.verdict_h14, 12,
                 "a harmless-only PM is at chance on helpful pairs, not under it: it learns that "
                 "refusing is good, and few pairs of the distilled policy differ in that; nano's "
                 "helpful-only PM depends on the seed (39 to 65%)"),
    "H15": Claim("up-weighting the harmless loss costs small PMs more", "HH 5.1.2, fig. 27",
                 pm_training.h15, pm_training.verdict_h15, 6,
                 "the smallest PM is near chance on helpful comparisons (55%) and has less to "
                 "lose"),
    "H27": Claim("mixing in a summary skill costs neither task accuracy", "HH 5.2, fig. 20",
                 pm_training.h27, pm_training.verdict_h27, 4),
    "I02": Claim("all pairs of a prompt in one element do not overfit in an epoch, shuffled pairs "
                 "do", "InstructGPT 3.5", pm_training.i02, pm_training.verdict_i02, 5,
                 "in one epoch 0.9M parameters do not memorize 600 prompts: neither is further "
                 "ahead on its training rankings"),
    "I03": Claim("accuracy on annotators who gave no data is slightly lower",
                 "InstructGPT 3.5, E.2", pm_training.i03, pm_training.verdict_i03, 6,
                 "the five groups differ in taste (manners, length) by half a unit of utility and "
                 "share the rest, and that rest is what the PM learns"),
    "H09": Claim("RLHF raises the train PM's score, the test PM's and, here, the gold utility",
                 "HH 4.2", robustness.measure, robustness.verdict_h09, 60,
                 source="robustness", needs=("cell", ("micro/micro", "toy/toy"))),
    "H10": Claim("train-PM and test-PM scores part as training goes on; gold turns over",
                 "HH 4.2, fig. 4", robustness.measure, robustness.verdict_h10, 60,
                 source="robustness", needs=("cell", ("micro/micro",)),
                 why="gold turns over in every seed, but the held-out PM goes up almost as "
                     "far: it learned from other comparisons on another base, and shares the "
                     "blind spots. In two seeds of three the policy ends by refusing nearly all "
                     "plain questions"),
    "H11": Claim("larger PMs are more robust reward models",
                 "HH 4.2, fig. 33", robustness.measure, robustness.verdict_h11, 60,
                 source="robustness", needs=("cell", ("micro/nano", "micro/micro", "micro/toy")),
                 why="gold at the end is higher under the toy PM by means, but there too the "
                     "policy refuses nearly all plain questions in two seeds of three, and the "
                     "leads over the test PM do not differ beyond their errors"),
    "H12": Claim("reward is about linear in sqrt(KL), with parallel slopes across policy sizes",
                 "HH 4.3, figs 4, 13", robustness.measure, robustness.verdict_h12, 60,
                 source="robustness", needs=("cell", ("nano/toy", "micro/toy", "toy/toy")),
                 why="the slopes of the three sizes are parallel, but the curves bend: the "
                     "PM's score saturates (the best of 64 answers is hardly above the best "
                     "of 16), so the toy policy's farther half rises by half of its nearer "
                     "one, or a little less"),
    "H13": Claim("a small policy's slope and a large one's first score foretell the large one's "
                 "curve",
                 "HH 4.3", robustness.measure, robustness.verdict_h13, 60,
                 source="robustness", needs=("cell", ("micro/toy", "toy/toy"))),
    "H16": Claim("in RL the harmless score leaves its data, the helpful one does not; too few "
                 "helpful prompts give a policy that refuses everything",
                 "HH 4.4, fig. 14", rl.measure, rl.verdict_h16, 60,
                 source="rl",
                 needs=("variant", ("start", "default", "helpful 0",
                                    "helpful 0.9")),
                 why="without helpful prompts a third of the plain ones is refused, not half: "
                     "PM pretraining with foreign answers has taught the PM that an answer "
                     "must fit its question; and the mean scores stay under the 99% quantile, "
                     "which the first policy's best answers reach"),
    "H17": Claim("base, RS and online answers have PM scores further to the right in that "
                 "order",
                 "HH 4.5, fig. 15 left", online.measure_short, online.verdict_h17, 24,
                 source="online", needs=("regime", ("short",)),
                 why="bests of 16 score a little above the answers of snapshots at sqrt(KL) 0.5 to "
                     "1.7: the mixture's PM shares its base comparisons with the one that picked"),
    "H18": Claim("at equal data and hyper-parameters the iterated mixture beats base comparisons "
                 "alone in Elo", "HH 4.5, fig. 16", online.measure_h18, online.verdict_h18, 110,
                 source="online", needs=("regime", ("short",))),
    "H19": Claim("the PM's accuracy falls from base to RS to online comparisons",
                 "HH 4.5", online.measure_short, online.verdict_h19, 24,
                 source="online", needs=("regime", ("short",)),
                 why="bests of 16 are the hardest lot, online answers lie between: a PM of the "
                     "same base comparisons picked both sides of an RS pair, which tie in what it "
                     "knows"),
    "H20": Claim("online > static > distilled; helpful-only RLHF is the most helpful and less "
                 "harmless",
                 "HH fig. 1", online.measure_short, online.verdict_h20, 24,
                 source="online", needs=("regime", ("short",)),
                 why="static is above distilled, but online above static by 1.8 errors of six "
                     "seeds alone; and helpful-only RLHF is not the most helpful on plain "
                     "prompts: it had half of the comparisons, and what it gains, help with "
                     "harm, is not asked there"),
    "H21": Claim("Elo foretold by PM scores is above Elo from choices",
                 "HH B.4, figs 15, 35", online.measure_short, online.verdict_h21, 24,
                 source="online", needs=("regime", ("short",)),
                 why="mean PM scores foretell 1.7 times the harmless Elo, but so do gold's own "
                     "means: a choice levels off where the difference is large, whoever judges"),
    "H22": Claim("best-of-k grows with k at a KL of at most log k - (k - 1) / k; the online policy "
                 "is near k = 64",
                 "HH B.6, fig. 36", demonstrations.measure, demonstrations.verdict_h22, 20,
                 source="demonstrations",
                 why="the PM's score goes on rising, but the chance to beat one answer is "
                     "flat from 16 to 64: best-of-n over-optimizes this PM too (see K02). The "
                     "online policy is near k = 64"),
    "H23": Claim("the policy's mean log-prob accuracy rises in RL and stays under the PM's",
                 "HH B.3, fig. 34", robustness.measure, robustness.verdict_h23, 60,
                 source="robustness", needs=("cell", ("toy/toy",)),
                 why="it rises at first and falls when the policy over-optimizes; where the "
                     "held-out PM is highest it is back under the start in two seeds of three"),
    "H33": Claim("the PM prefers the policy's answers to writers' by more than annotators do",
                 "HH 6.1, fig. 24", online.measure_short, online.verdict_h33, 24,
                 source="online", needs=("regime", ("short",))),
    "repair": Claim("rounds whose snapshots show a cheat unlearn it, rounds that miss it do not",
                    "our question on HH 4.5", repair.measure, repair.verdict_repair, 50,
                    why="one round that shows the cheat ends it (1% refused); it comes back in "
                        "part (29 ± 17%) and is at 3% after the third. Rounds that miss it end it "
                        "at first too, but two policies of three refuse again after the third: 66 "
                        "± 33% is not told from 3% by two errors of three seeds"),
    "I01": Claim("SFT's validation loss is best after one epoch, more epochs still raise the RM's "
                 "score",
                 "InstructGPT 3.5", demonstrations.measure, demonstrations.verdict_i01, 20,
                 source="demonstrations",
                 why="the loss is least after the first epoch, and the PM's score is higher "
                     "at the end, but by no more than its error"),
    "I04": Claim("win rate against SFT: base < prompted < SFT < PPO, PPO-ptx like PPO",
                 "InstructGPT 4.1, fig. 1", demonstrations.measure, demonstrations.verdict_i04, 20,
                 source="demonstrations"),
    "I05": Claim("the KL coefficient has an optimum: 0 and 2 are worse",
                 "InstructGPT E.6", rl.measure, rl.verdict_i05, 60,
                 source="rl",
                 needs=("variant", ("default", "beta 0", "beta 0.1", "beta 2"))),
    "I06": Claim("the pretraining mix repays the tax, a larger KL coefficient does not",
                 "InstructGPT 4.2, E.6", rl.measure, rl.verdict_i06, 60,
                 source="rl",
                 needs=("variant", ("start", "default", "ptx 1", "ptx 4", "beta 0.1",
                                    "beta 2"))),
    "I07": Claim("a critic that starts from the RM learns sooner than a fresh one; averaged "
                 "weights cost nothing",
                 "InstructGPT C.4", rl.measure, rl.verdict_i07, 60,
                 source="rl", needs=("variant", ("default", "critic fresh", "ema 0.9"))),
    "I08": Claim("tuning on narrow public-style tasks loses to SFT on the users' prompts",
                 "InstructGPT 4.1, fig. 5", demonstrations.measure, demonstrations.verdict_i08, 20,
                 source="demonstrations"),
    "K01": Claim("PPO reaches pi0 exp(r / beta) / Z, and J = beta log Z",
                 "Korbak et al. 2022", closed_forms.k01, closed_forms.verdict_k01, 5),
    "K02": Claim("gold fits d (a - b log d) along RL and d (a - b d) along best-of-n, d = "
                 "sqrt(KL)",
                 "Gao et al. 2022", robustness.measure, robustness.verdict_k02, 60,
                 source="robustness", needs=("cell", ("micro/micro",))),
    "K03": Claim("k1, k2, k3 as values and as losses against the exact KL",
                 "Schulman 2020", closed_forms.k03, closed_forms.verdict_k03, 5),
    "K04": Claim("the adaptive coefficient holds its KL target",
                 "Ziegler et al. 2019, 2.2", rl.measure, rl.verdict_k04, 60,
                 source="rl", needs=("variant", ("default", "target 2"))),
    "K05": Claim("entropy and diversity fall in RL",
                 "RL with a KL penalty", robustness.measure, robustness.verdict_k05, 60,
                 source="robustness", needs=("cell", ("micro/micro", "toy/toy"))),
    "K06": Claim("a reward of alpha log pi0 sharpens to the power 1 + alpha / beta",
                 "Korbak et al. 2022", closed_forms.k06, closed_forms.verdict_k06, 5),
    "K07": Claim("calibration worsens in RL; one temperature repairs most of it",
                 "GPT-4 report, fig. 8", rl.measure, rl.verdict_k07, 60,
                 source="rl", needs=("variant", ("start", "default"))),
    "K08": Claim("reward follows length when annotators like it; a reward of length alone brings "
                 "part of it",
                 "Singhal et al. 2023", rl.measure, rl.verdict_k08, 60,
                 source="rl",
                 needs=("variant", ("start, longer", "longer", "length only", "default"))),
    "K10": Claim("reference resets and moving anchors buy reward and cost distance from the start",
                 "RL with a KL penalty", rl.measure, rl.verdict_k10, 60,
                 source="rl", needs=("variant", ("default", "reset 10", "anchor 0.9"))),
    "K11": Claim("averaging weights before and after RLHF trades better than either end",
                 "Lin et al. 2024", rl.measure, rl.verdict_k11, 60,
                 source="rl", needs=("variant", ("start", "default"))),
    "K12": Claim("rejection-sampling fine-tuning gets part of PPO's gain at the same KL",
                 "RL with a KL penalty", demonstrations.measure, demonstrations.verdict_k12, 20,
                 source="demonstrations",
                 why="it gets all of what PPO gets at that KL: the best of 16 is close to the "
                     "best trade of score for KL, and three seeds show no loss in the fine-"
                     "tuning"),
    "K13": Claim("control: PPO on gold itself does not turn over, and still loses diversity",
                 "RL with a KL penalty", rl.measure, rl.verdict_k13, 60,
                 source="rl", needs=("variant", ("start", "over", "gold"))),
}


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


def claims_table():
    """One row a claim that has records."""
    lines = ["| claim | the paper says | here | measured | seeds |", "|---|---|---|---|---|"]
    for name, claim in CLAIMS.items():
        rows = claim.rows(name)
        if rows:
            found = claim.judge(rows)
            figure = f"[{name}](docs/claims/{name}.png)" if found.panels else name
            lines.append(f"| {figure} | {claim.says} ({claim.where}) | **{found.word}** "
                         f"| {claim.told(found)} | {records.seeds_of(rows)} |")
    return "\n".join(lines)


def hh_table():
    """The last report of runs/hh.sh that was recorded (RECORD=hh)."""
    if not records.records("hh"):
        return "Not measured yet."
    row = records.records("hh")[-1]
    groups, calibration = row["groups"], row["calibration"]
    lines = ["| held-out comparisons | accuracy | longer answer | shorter answer | pairs | ECE |",
             "|---|---|---|---|---|---|"]
    for o in ("helpful", "harmless", "all"):
        g = groups[o]
        lines.append(f"| {o} | {g['accuracy']:.1%} ± {g['se']:.1%} | {g['longer']:.1%} "
                     f"| {g['shorter']:.1%} | {g['pairs']} | {calibration[o]['ece']:.3f} |")
    return "\n".join(lines)


def fill(path, parts):
    """Replaces what stands between a file's markers, `<!-- name: begin -->` and its end."""
    text = Path(path).read_text()
    for name, body in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in text or end not in text:
            raise UserError(f"{path}: the markers {begin} and {end} are missing")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"
    write_atomically(path, lambda f: f.write(text.encode()))


def readme():
    """Replace what stands between the markers of the README and of docs/ by tables of results/."""
    rows = records.records("laptop")
    if not rows:
        raise UserError("results/laptop.jsonl: no record; "
                        "run `python eval.py --run out/laptop --record` first")
    fill("README.md", {
        "laptop": f"Means of {len(rows)} seeds, ± standard error over seeds; "
                  f"{int(rows[0]['prompts'])} held-out prompts of each kind a seed.\n\n"
                  f"{as_markdown(over_seeds(rows))}",
        "claims": claims_table(), "hh": hh_table(),
        "loop": loop.loop_table(records.records("loop"))})
    if records.records("online"):
        fill("docs/online.md", {"regimes": loop.regimes_table(records.records("online")),
                                "repair": loop.repair_table(records.records("repair"))})
    if records.records("robustness"):
        runs = robustness.table(records.records("robustness")).encode()
        write_atomically("docs/robustness.md", lambda f: f.write(runs))
    print("README.md, docs/: tables rewritten from results/")


def measure_claims(cfg):
    if cfg.quick:
        records.FOLDER[0] = Path(cfg.run) / "quick" / "results"
        cfg = replace(cfg, seeds=1)
    names = list(CLAIMS) if cfg.claim == "all" else cfg.claim.split(",")
    for name in names:
        if name not in CLAIMS:
            raise UserError(f"--claim {name}: known are {', '.join(CLAIMS)}")
    for name in names:
        CLAIMS[name].measure(cfg)
        found = CLAIMS[name].judge(CLAIMS[name].rows(name))
        if found.panels and not cfg.quick:
            records.draw_curves(name, found.panels, found.log_x)
        print(f"{name} {found.word}: {CLAIMS[name].told(found)}")


def main(cfg):
    if cfg.readme:
        return readme()
    return measure_claims(cfg) if cfg.claim else report(cfg)


if __name__ == "__main__":
    entry(main, Config, __doc__)
