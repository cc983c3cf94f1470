"""Claims about single knobs of PPO: one short run a variant, measured at its end.

A unit is a seed and a variant, 1 to 3 minutes on one core; its line is in results/rl.jsonl. All
start from the micro distilled policy; the reward is the seed's own micro PM (pretrained, then half
of the seed's comparisons) unless the variant says otherwise. I05 I06 I07 H16 K04 K07 K08 K10 K11
K13 are read from the same lines.
"""

from pathlib import Path

import torch

import collect
import preference
from claims.policies import (blocks, distilled, forget, load, look, text_loss, trained_pm,
                             trained_policy)
from claims.records import (ANY, Claim, Effect, append, bars, less, missing, paired, told_of,
                            verdict)
from claims.start import (LR_AFTER, base, few, points, policy, pretrained, test_lines, train_pm,
                          work)
from common import load_checkpoint, save_checkpoint
from measures import choice_ece, choice_temperature, mean_se
from model import averaged, pad_rows, response_mask
from pretrain import documents_of

OVER = dict(lambda_kl=0.003, lr=3e-4, epochs=1, helpful=0.5, iterations=60)  # as robustness.py has
VARIANTS = {
    "default": dict(snapshots="0.25,0.5,0.75,1,1.25,1.5"),
    "beta 0": dict(lambda_kl=0.0), "beta 0.1": dict(lambda_kl=0.1), "beta 2": dict(lambda_kl=2.0),
    "ptx 1": dict(ptx=1.0), "ptx 4": dict(ptx=4.0),
    "critic fresh": dict(critic="fresh"), "ema 0.9": dict(ema=0.9),
    "target 2": dict(kl_target=2.0, iterations=70), "reset 10": dict(reset=10),
    "anchor 0.9": dict(anchor=0.9), "helpful 0": dict(helpful=0.0),
    "helpful 0.9": dict(helpful=0.9),
    "over": OVER, "gold": dict(OVER, pm="gold", critic="policy"),
    "longer": {}, "length only": {},
}
PMS = {"longer": dict(longer=0.5), "length only": dict(longer=20.0)}   # annotators, where not plain
CURVE = ("score", "kl", "length", "explained", "lambda_kl", "pm_helpful", "pm_harmless")


def biased_pm(cfg, seed, name):
    """A PM of annotators who like length: half a gold unit for ten words, or hardly anything else.
    """
    folder = work(cfg) / f"{name.replace(' ', '-')}-{seed}"
    collect.collect(collect.Config(policy=policy(cfg), out=str(folder), count=few(cfg, 3000),
                                   seed=seed, device=cfg.device, **PMS[name]))
    lines = preference.read_comparisons(folder)
    return str(train_pm(cfg, f"pm-{name.replace(' ', '-')}-{seed}", pretrained(cfg, "micro"), lines,
                        test_lines(cfg, seed)[:600], seed, lr=LR_AFTER)[0])


def measure(cfg):
    """The units that have no line yet."""
    for unit in missing("rl", cfg.seeds, variant=tuple(VARIANTS)):
        seed, variant = unit["seed"], unit["variant"]
        plain = trained_pm(cfg, seed)
        judge = biased_pm(cfg, seed, "longer") if variant in PMS else plain
        reward = biased_pm(cfg, seed, variant) if variant in PMS else plain
        knobs = {"pm": reward, **VARIANTS[variant]}
        start, more = distilled(cfg, "micro"), []
        folder = trained_policy(cfg, seed, variant.replace(" ", "-"), **knobs)
        pms = dict(pm=load(judge))
        row = dict(look(cfg, folder, start, pms, seed), tax=text_loss(cfg, folder, seed),
                   curve=blocks(folder, CURVE, 4))
        if variant == "default":
            row |= around_default(cfg, start, folder, pms, seed)
            more = [dict(first_of(cfg, start, pms, seed), seed=seed, variant="start")]
        if variant == "longer":
            more = [dict(look(cfg, start, start, pms, seed), seed=seed, variant="start, longer")]
        for line in (*more, {**unit, **row}):        # the unit's own line last: it says it is done
            append("rl", line)
        forget(folder)


def first_of(cfg, start, pms, seed):
    """The first policy's line, with the base model's loss on text."""
    return dict(look(cfg, start, start, pms, seed), tax=text_loss(cfg, start, seed),
                base=text_loss(cfg, base(cfg, "micro"), seed),
                data=data_scores(cfg, pms["pm"], seed), calibration=calibration(cfg, start, seed))


def around_default(cfg, start, folder, pms, seed):
    """What only the default run is asked: calibration, averages with the start, its way."""
    keys = ("kl_exact", "gold", "pm")
    way = [look(cfg, path, start, pms, seed) for path in sorted(Path(folder).glob("snapshot-*.pt"))]
    return dict(calibration=calibration(cfg, folder, seed),
                averages=averages(cfg, start, folder, pms, seed),
                way=[{k: s[k] for k in keys} for s in way])


def data_scores(cfg, pm, seed):
    """Per objective: 99% quantile of the PM's scores of answers like those it was trained on."""
    lines = test_lines(cfg, seed)[:600]
    kept, scores, _ = preference.score_lines(pm[1], pm[0], lines)
    return {o: float(torch.tensor([s for x, own in zip(kept, scores, strict=True) for s in own
                                   if x["objective"] == o]).quantile(0.99))
            for o in ("helpful", "harmless")}


def averages(cfg, start, end, pms, seed):
    """Gold, PM score and tax of policies between two (K11)."""
    a, b = load_checkpoint(start), load_checkpoint(end)
    out, path = [], work(cfg) / f"averaged-{seed}.pt"
    for weight in (0.25, 0.5, 0.75):
        mean = averaged(a["model"], b["model"], weight)
        save_checkpoint(path, gpt=b["gpt"], tokenizer=b["tokenizer"], model=mean)
        found = look(cfg, path, start, pms, seed)
        out.append(dict(weight=weight, tax=text_loss(cfg, path, seed),
                        **{k: found[k] for k in ("gold", "pm", "kl_exact")}))
    path.unlink()
    return out


@torch.no_grad()
def next_tokens(cfg, path, key, count=60):
    """Log-probs [N, V] of the next token on texts of the base model's kind, and the right ones."""
    tok, model = load(path)
    documents = documents_of(tok, key, few(cfg, count), 128)
    ids, sizes = pad_rows(documents, tok.pad, model.device)
    at = response_mask(torch.zeros_like(sizes), sizes - 1, ids.shape[1])      # all but the last
    logps = model.logits(model(ids, sizes, at=at)).log_softmax(-1)[:, :tok.vocab].numpy()
    return logps, [token for row in documents for token in row[1:]]


def calibration(cfg, path, seed):
    """ECE of the likeliest next token on held-out text (K07), ECE with the one temperature that
    fits other text best, and how often that token is right.
    """
    T = choice_temperature(*next_tokens(cfg, path, f"temperature/{seed}"))
    choices, right = next_tokens(cfg, path, f"calibration/{seed}")
    return dict(ece=choice_ece(choices, right), temperature=T,
                ece_after=choice_ece(choices, right, T),
                accuracy=mean_se([float(c.argmax() == r) for c, r in zip(choices, right)])[0])


# ---------------------------------------------------------------- reading the lines

def table(rows):
    """variant -> its lines in the order of seeds; of several, the last."""
    by = {}
    for r in sorted(rows, key=lambda r: r["seed"]):
        by.setdefault(r["variant"], {})[r["seed"]] = r
    return {variant: list(lines.values()) for variant, lines in by.items()}


def column(by, variant, key):
    return [r[key] for r in by[variant]]


def gap(by, key, first, second):
    """Mean and error over seeds of key at `second` less that at `first`."""
    return paired([*by[first], *by[second]], key, "variant", first, second)


BETAS = {"beta 0": 0.0, "default": 0.03, "beta 0.1": 0.1, "beta 2": 2.0}


def verdict_i05(rows):
    """held: the beta with the best mean gold is neither 0 nor 2, and its gold is above that of both
    by two errors over paired seeds and 0.1.
    """
    by = table(rows)
    best = max(BETAS, key=lambda v: mean_se(column(by, v, "gold"))[0])
    holds = [best not in ("beta 0", "beta 2"),
             *(Effect(gap(by, "gold", end, best), 0.1) for end in ("beta 0", "beta 2"))]
    told = ", ".join(f"beta {b:g}: {told_of(column(by, v, 'gold'))}" for v, b in BETAS.items())
    panels = [("after 32 iterations", "beta (0 drawn at 0.003)", "gold", {"gold": {
        b or 0.003: (*mean_se(column(by, v, "gold")), len(by[v])) for v, b in BETAS.items()}})]
    return verdict(holds, by["default"], f"gold {told}", panels, log_x=True)


def verdict_i06(rows):
    """held: the default run pays a tax over the base model's loss on text; some ptx halves it at a
    gold within 0.1 of the default's, and no larger beta does, by means over seeds.
    """
    by, told = table(rows), []
    floor, gold = mean_se(column(by, "start", "base"))[0], mean_se(column(by, "default", "gold"))[0]
    start, plain = (mean_se(column(by, v, "tax"))[0] - floor for v in ("start", "default"))

    def repays(variant):
        tax, own = (mean_se(column(by, variant, k))[0] for k in ("tax", "gold"))
        told.append(f"{variant}: {tax - floor:+.3f}, gold {own:+.2f}")
        return tax - floor <= plain / 2 and own >= gold - 0.1

    ptx, kl = ([repays(v) for v in own] for own in (("ptx 1", "ptx 4"), ("beta 0.1", "beta 2")))
    told = (f"nats a token on text over the base model's {floor:.2f}: distilled {start:+.3f}, "
            f"default {plain:+.3f}, gold {gold:+.2f}; " + "; ".join(told))
    panels = [bars("after 32 iterations", name, {v: column(by, v, key) for v in (
        "start", "default", "ptx 1", "ptx 4", "beta 0.1", "beta 2")})
        for key, name in (("tax", "loss on text, nats a token"), ("gold", "gold utility"))]
    return verdict(plain > 0 and any(ptx) and not any(kl), by["default"], told, panels)


def first_half(row, key):
    curve = row["curve"][:max(1, len(row["curve"]) // 2)]
    return sum(c[key] for c in curve) / len(curve)


def verdict_i07(rows):
    """held: with the critic from the PM the mean score of the run's first half is above that with
    a fresh critic, by two errors over paired seeds and 0.05, and averaged weights end with a gold
    that is no lower by 0.1, by two errors.
    """
    by = table(rows)
    half = {v: [first_half(r, "score") for r in by[v]] for v in
            ("default", "critic fresh")}
    lead = mean_se(less(half["default"], half["critic fresh"]))
    ema = gap(by, "gold", "default", "ema 0.9")
    told = (", ".join(f"{v.replace('default', 'critic from the PM')}: {told_of(s)}"
                      for v, s in half.items()) + " mean score in the first half; gold at the end "
            f"{told_of(column(by, 'default', 'gold'))}, with averaged weights (0.9) "
            f"{told_of(column(by, 'ema 0.9', 'gold'))}")
    panels = [bars("first half of the run", "mean PM score", half),
              bars("at the end", "gold utility", {
                  v: column(by, v, "gold") for v in ("default", "ema 0.9")})]
    holds = [Effect(lead, 0.05), Effect((ema[0] + 0.1, ema[1]), ANY)]
    return verdict(holds, by["default"], told, panels)


def verdict_h16(rows):
    """held: with no helpful prompts over half of plain prompts are refused at the end and with 0.9
    fewer by two errors and a tenth; and in the default run the mean PM score of harmless answers
    ends above the 99% quantile of the PM's own data while that of helpful ones does not, in every
    seed.
    """
    by, shares = table(rows), {"helpful 0": 0.0, "default": 0.6, "helpful 0.9": 0.9}
    fewer = gap(by, "refused", "helpful 0.9", "helpful 0")
    leaves = [(r["pm_harmless"] > s["data"]["harmless"], r["pm_helpful"] > s["data"]["helpful"])
              for r, s in zip(by["default"], by["start"], strict=True)]
    holds = [mean_se(column(by, "helpful 0", "refused"))[0] > 0.5, Effect(fewer, 0.1),
             all(a and not b for a, b in leaves)]
    told = "plain prompts refused: " + ", ".join(
        f"{points(mean_se(column(by, v, 'refused'))[0])} at {s:g} helpful"
        for v, s in shares.items()) + "; PM score at the end less the 99% quantile of its data: " \
        + ", ".join(f"{o} " + told_of([r[f"pm_{o}"] - s["data"][o] for r, s in zip(
            by["default"], by["start"], strict=True)]) for o in ("harmless", "helpful"))
    panels = [("after 32 iterations", "share of helpful prompts", name, {name: {
        s: (*mean_se(column(by, v, key)), len(by[v])) for v, s in shares.items()}})
        for key, name in (("refused", "plain prompts refused"), ("gold_helpful", "gold helpful"),
                          ("gold_harmless", "gold harmless"))]
    return verdict(holds, by["default"], told, panels)


def verdict_k04(rows):
    """held: over the last third of the run the mean KL is within 15% of the target in every seed,
    and that of the default run, with its constant coefficient, is further from it.
    """
    by, target = table(rows), 2.0

    def last(variant):
        return [mean_se([c["kl"] for c in r["curve"][-len(r["curve"]) // 3:]])[0]
                for r in by[variant]]

    held, plain = last("target 2"), last("default")
    holds = all(abs(x - target) < 0.15 * target for x in held) and all(
        abs(p - target) > abs(x - target) for p, x in zip(plain, held, strict=True))
    beta = [r["curve"][-1]["lambda_kl"] for r in by["target 2"]]
    told = (f"target {target:g} nats: {told_of(held, '')} over the last third, beta 0.03 -> "
            f"{told_of(beta, '', 3)}; with a constant 0.03 {told_of(plain, '')} nats")
    panels = [(name, "iteration", "KL, nats an answer", {
        f"seed {r['seed']}": {4 * i: (c["kl"], 0.0, 1) for i, c in enumerate(r["curve"])}
        for r in by[v]}) for v, name in (("target 2", "adaptive coefficient, target 2"),
                                         ("default", "constant coefficient"))]
    return verdict(holds, by["target 2"], told, panels)


def verdict_k07(rows):
    """held: ECE of the next token on held-out text rises in RL by two errors over seeds and 0.01,
    and with the one temperature that suits each policy it rises by half of that or less.
    """
    by = table(rows)
    before, after = (column(by, v, "calibration") for v in ("start", "default"))
    worse, left = (mean_se([b[k] - a[k] for a, b in zip(before, after, strict=True)])
                   for k in ("ece", "ece_after"))
    told = "; ".join(
        f"{name}: ECE {told_of([c['ece'] for c in found], '', 3)}, with T = "
        f"{told_of([c['temperature'] for c in found], '')} "
        f"{told_of([c['ece_after'] for c in found], '', 3)}, accuracy "
        f"{points(mean_se([c['accuracy'] for c in found])[0])}"
        for name, found in (("distilled", before), ("after RL", after)))
    panels = [bars("next token of held-out text", "ECE", {
        f"{name}, {label}": [c[key] for c in found]
        for name, found in (("distilled", before), ("after RL", after))
        for key, label in (("ece", "T = 1"), ("ece_after", "best T"))})]
    return verdict([Effect(worse, 0.01), left[0] <= worse[0] / 2], by["default"], told, panels)


def verdict_k08(rows):
    """held: under annotators who like length answers end longer than under plain ones by two
    errors over paired seeds and a token, and a reward of length alone brings a quarter or more of
    the score that their PM gains, which is above 0 by two errors and 0.1.
    """
    by = table(rows)
    longer = gap(by, "length", "default", "longer")
    gain, alone = (gap(by, "pm", "start, longer", v) for v in ("longer", "length only"))
    told = (f"answers of {told_of(column(by, 'start, longer', 'length'), '', 1)} tokens become "
            f"{told_of(column(by, 'longer', 'length'), '', 1)} (plain annotators: "
            f"{told_of(column(by, 'default', 'length'), '', 1)}); their PM's score rises by "
            f"{gain[0]:.2f}, with a reward of length alone by {alone[0]:.2f} "
            f"({100 * alone[0] / gain[0]:.0f}%)")
    panels = [bars("end of PPO", "tokens an answer", {v: column(by, v, "length") for v in (
        "start, longer", "default", "longer", "length only")})]
    return verdict([Effect(longer, 1.0), Effect(gain, 0.1), alone[0] >= gain[0] / 4], by["longer"],
                   told, panels)


def verdict_k10(rows):
    """held: with resets and with a moving anchor both the PM's score and the KL to the first policy
    end above the default's, by two errors over paired seeds, 0.1 and half a nat.
    """
    by, told, holds = table(rows), [], []
    for variant in ("reset 10", "anchor 0.9"):
        score, kl = (gap(by, k, "default", variant) for k in ("pm", "kl_exact"))
        holds += [Effect(score, 0.1), Effect(kl, 0.5)]
        told.append(f"{variant}: PM score {score[0]:+.2f} ± {score[1]:.2f}, KL {kl[0]:+.2f} ± "
                    f"{kl[1]:.2f}, gold {gap(by, 'gold', 'default', variant)[0]:+.2f}")
    panels = [bars("reference", name, {v: column(by, v, key) for v in (
        "default", "reset 10", "anchor 0.9")})
        for key, name in (("pm", "PM score"), ("kl_exact", "KL to the first policy, nats"))]
    told = "against a fixed reference: " + "; ".join(told)
    return verdict(holds, by["default"], told, panels)


def verdict_k11(rows):
    """held: RL gains gold and costs loss on text, by two errors over seeds, 0.1 and 0.01 nats, and
    some average keeps 80% of the gain at under 60% of the tax, by means.
    """
    by = table(rows)
    start, end = by["start"], by["default"]
    told, cheaper = [], False
    paid_for = [Effect(gap(by, k, "start", "default"), least)
                for k, least in (("gold", 0.1), ("tax", 0.01))]
    for i, weight in enumerate((0.25, 0.5, 0.75)):
        gold = mean_se([(e["averages"][i]["gold"] - s["gold"]) / (e["gold"] - s["gold"])
                        for s, e in zip(start, end, strict=True)])[0]
        paid = mean_se([e["averages"][i]["tax"] - s["tax"] for s, e in zip(start, end)])[0]
        tax = paid / mean_se([e["tax"] - s["tax"] for s, e in zip(start, end)])[0]
        cheaper |= gold >= 0.8 and tax < 0.6
        told.append(f"weight {weight:g}: {points(gold)} of the gain, {points(tax)} of the tax")
    way = {0.0: start, **{w: [e["averages"][i] for e in end] for i, w in
                          enumerate((0.25, 0.5, 0.75))}, 1.0: end}
    panels = [("averages of before and after", "weight of after", name, {name: {
        w: (*mean_se([x[key] for x in own]), len(own)) for w, own in way.items()}})
        for key, name in (("gold", "gold utility"), ("tax", "loss on text, nats a token"))]
    return verdict([cheaper, *paid_for], end, "; ".join(told), panels)


def verdict_k13(rows):
    """held: PPO on gold itself ends with more gold than the same run on the PM by two errors over
    paired seeds and 0.1, its score has not fallen from its best by a tenth of the rise, and its
    distinct-2 (first eight words) falls from the start's by two errors and 0.01.
    """
    by = table(rows)
    scores = [[c["score"] for c in r["curve"]] for r in by["gold"]]
    fallen = mean_se([max(s) - s[-1] for s in scores])
    spread = mean_se([max(s) - s[0] for s in scores])[0]
    less = gap(by, "distinct", "gold", "start")
    holds = [Effect(gap(by, "gold", "over", "gold"), 0.1), fallen[0] < 0.1 * spread,
             Effect(less, 0.01)]
    told = (f"gold {told_of(column(by, 'start', 'gold'))} -> {told_of(column(by, 'gold', 'gold'))} "
            f"(on the PM {told_of(column(by, 'over', 'gold'))}) at sqrt(KL) "
            f"{told_of(column(by, 'gold', 'sqrt_kl'), '')}; fallen from the best by "
            f"{100 * fallen[0] / spread:.0f}% of the rise; distinct-2 "
            f"{told_of(column(by, 'start', 'distinct'), '')} -> "
            f"{told_of(column(by, 'gold', 'distinct'), '')}")
    panels = [(f"reward: {name}", "iteration", "mean reward", {f"seed {r['seed']}": {
        4 * i: (c["score"], 0.0, 1) for i, c in enumerate(r["curve"])} for r in by[v]})
        for v, name in (("gold", "gold"), ("over", "the PM"))]
    return verdict(holds, by["gold"], told, panels)


CLAIMS = {
    "H16": Claim("in RL the harmless score leaves its data, the helpful one does not; too few "
                 "helpful prompts give a policy that refuses everything",
                 "HH 4.4, fig. 14", measure, verdict_h16, 60,
                 source="rl",
                 needs=("variant", ("start", "default", "helpful 0",
                                    "helpful 0.9")),
                 why="without helpful prompts a third of the plain ones is refused, not half: "
                     "PM pretraining with foreign answers has taught the PM that an answer "
                     "must fit its question; and the mean scores stay under the 99% quantile, "
                     "which the first policy's best answers reach"),
    "I05": Claim("the KL coefficient has an optimum: 0 and 2 are worse",
                 "InstructGPT E.6", measure, verdict_i05, 60,
                 source="rl",
                 needs=("variant", ("default", "beta 0", "beta 0.1", "beta 2")),
                 paper="best at 0.01 to 0.02"),
    "I06": Claim("the pretraining mix repays the tax, a larger KL coefficient does not",
                 "InstructGPT 4.2, E.6", measure, verdict_i06, 60,
                 source="rl",
                 needs=("variant", ("start", "default", "ptx 1", "ptx 4", "beta 0.1",
                                    "beta 2")),
                 paper="gamma 27.8 repays it, a beta of 2 does not"),
    "I07": Claim("a critic that starts from the RM learns sooner than a fresh one; averaged "
                 "weights cost nothing",
                 "InstructGPT C.4", measure, verdict_i07, 60,
                 source="rl", needs=("variant", ("default", "critic fresh", "ema 0.9"))),
    "K04": Claim("the adaptive coefficient holds its KL target",
                 "Ziegler et al. 2019, 2.2", measure, verdict_k04, 60,
                 source="rl", needs=("variant", ("default", "target 2"))),
    "K07": Claim("calibration worsens in RL; one temperature repairs most of it",
                 "GPT-4 report, fig. 8", measure, verdict_k07, 60,
                 source="rl", needs=("variant", ("start", "default")),
                 paper="ECE 0.007 -> 0.074; a temperature of 2.5 repairs it"),
    "K08": Claim("reward follows length when annotators like it; a reward of length alone brings "
                 "part of it",
                 "Singhal et al. 2023", measure, verdict_k08, 60,
                 source="rl",
                 needs=("variant", ("start, longer", "longer", "length only", "default"))),
    "K10": Claim("reference resets and moving anchors buy reward and cost distance from the start",
                 "RL with a KL penalty", measure, verdict_k10, 60,
                 source="rl", needs=("variant", ("default", "reset 10", "anchor 0.9"))),
    "K11": Claim("averaging weights before and after RLHF trades better than either end",
                 "Lin et al. 2024", measure, verdict_k11, 60,
                 source="rl", needs=("variant", ("start", "default"))),
    "K13": Claim("control: PPO on gold itself does not turn over, and still loses diversity",
                 "RL with a KL penalty", measure, verdict_k13, 60,
                 source="rl", needs=("variant", ("start", "over", "gold"))),
}
