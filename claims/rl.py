"""Claims about single knobs of PPO: one short run a variant, measured at its end.

A unit is a seed and a variant, 1 to 3 minutes on one core; its line is in results/rl.jsonl. All
start from the micro distilled policy; the reward is the seed's own micro PM (pretrained, then half
of the seed's comparisons) unless the variant says otherwise. I05 I06 I07 H16 K04 K07 K08 K10 K11
K13 are read from the same lines.
"""

import torch

import collect
import preference
from claims.policies import (blocks, distilled, forget, load, look, text_loss, trained_pm,
                             trained_policy)
from claims.records import append, missing, verdict
from claims.start import LR_AFTER, few, points, policy, pretrained, test_lines, train_pm, work
from common import load_checkpoint, save_checkpoint
from measures import choice_ece, choice_temperature, mean_se
from model import averaged, pad_rows, response_mask
from pretrain import documents_of

OVER = dict(lambda_kl=0.003, lr=3e-4, epochs=1, helpful=0.5)       # as in claims/robustness.py
VARIANTS = {
    "default": {}, "beta 0": dict(lambda_kl=0.0), "beta 0.1": dict(lambda_kl=0.1),
    "beta 0.3": dict(lambda_kl=0.3), "beta 2": dict(lambda_kl=2.0),
    "ptx 0.3": dict(ptx=0.3), "ptx 1": dict(ptx=1.0), "ptx 4": dict(ptx=4.0),
    "critic fresh": dict(critic="fresh"), "ema 0.9": dict(ema=0.9),
    "target 2": dict(kl_target=2.0, iterations=70), "reset 10": dict(reset=10),
    "anchor 0.9": dict(anchor=0.9),
    "helpful 0": dict(helpful=0.0), "helpful 0.3": dict(helpful=0.3),
    "helpful 0.9": dict(helpful=0.9),
    "gold": dict(pm="gold", critic="policy", **OVER),
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
        start = distilled(cfg, "micro")
        folder = trained_policy(cfg, seed, variant.replace(" ", "-"), **knobs)
        pms = dict(pm=load(judge))
        row = dict(look(cfg, folder, start, pms, seed), tax=text_loss(cfg, folder, seed),
                   curve=blocks(folder, CURVE, 4))
        if variant == "default":
            first = dict(look(cfg, start, start, pms, seed), tax=text_loss(cfg, start, seed))
            append("rl", dict(first, seed=seed, variant="start",
                              data=data_scores(cfg, pms["pm"], seed),
                              calibration=calibration(cfg, start, seed)))
            row |= dict(calibration=calibration(cfg, folder, seed),
                        averages=averages(cfg, start, folder, pms, seed))
        if variant == "longer":
            append("rl", dict(look(cfg, start, start, pms, seed), seed=seed,
                              variant="start, longer"))
        append("rl", {**unit, **row})
        forget(folder)


def data_scores(cfg, pm, seed):
    """Per objective: 99% quantile of the PM's scores of the answers that it was trained on."""
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
def calibration(cfg, path, seed, count=60):
    """ECE of the likeliest next token on held-out text of the base model's kind (K07), the one
    temperature that fits best, ECE with it, and how often that token is right.
    """
    tok, model = load(path)
    documents = documents_of(tok, f"calibration/{seed}", few(cfg, count), 128)
    ids, sizes = pad_rows(documents, tok.pad, model.device)
    at = response_mask(torch.zeros_like(sizes), sizes - 1, ids.shape[1])      # all but the last
    choices = model.logits(model(ids, sizes, at=at)).log_softmax(-1)[:, :tok.vocab].numpy()
    right = [token for row in documents for token in row[1:]]
    T = choice_temperature(choices, right)
    return dict(ece=choice_ece(choices, right), temperature=T,
                ece_after=choice_ece(choices, right, T),
                accuracy=mean_se([float(c.argmax() == r) for c, r in zip(choices, right)])[0])


# ---------------------------------------------------------------- reading the lines

def table(rows):
    """variant -> its lines in the order of seeds."""
    by = {}
    for r in sorted(rows, key=lambda r: r["seed"]):
        by.setdefault(r["variant"], []).append(r)
    return by


def column(by, variant, key):
    return [r[key] for r in by[variant]]


def gap(by, key, first, second):
    """Mean and error over seeds of key at `second` less that at `first`."""
    return mean_se([b - a for a, b in zip(column(by, first, key), column(by, second, key),
                                          strict=True)])


def above(found, by=2):
    """Whether a (mean, error) is above 0 by so many errors."""
    return found[0] > by * found[1] and found[0] > 0


def told_of(values, sign="+", places=2):
    mean, se = mean_se(values)
    return f"{mean:{sign}.{places}f} ± {se:.{places}f}"


BETAS = {"beta 0": 0.0, "default": 0.03, "beta 0.1": 0.1, "beta 0.3": 0.3, "beta 2": 2.0}


def verdict_i05(rows):
    """held: the beta with the best mean gold is neither 0 nor 2, and its gold is above that of both
    by two errors over paired seeds.
    """
    by = table(rows)
    best = max(BETAS, key=lambda v: mean_se(column(by, v, "gold"))[0])
    holds = best not in ("beta 0", "beta 2") and all(
        above(gap(by, "gold", end, best)) for end in ("beta 0", "beta 2"))
    told = ", ".join(f"beta {b:g}: {told_of(column(by, v, 'gold'))}" for v, b in BETAS.items())
    panels = [("after 32 iterations", "beta (0 drawn at 0.003)", "gold", {"gold": {
        b or 0.003: (*mean_se(column(by, v, "gold")), 3) for v, b in BETAS.items()}})]
    return verdict(holds, by["default"], f"gold {told}", panels, log_x=True)


def verdict_i06(rows):
    """held: some ptx halves the default's tax at a gold within 0.1 of the default's, and no larger
    beta does, by means over seeds.
    """
    by, told = table(rows), []
    start, plain = mean_se(column(by, "start", "tax"))[0], mean_se(column(by, "default", "tax"))[0]
    gold = mean_se(column(by, "default", "gold"))[0]

    def repays(variant):
        tax, own = (mean_se(column(by, variant, k))[0] for k in ("tax", "gold"))
        told.append(f"{variant}: tax {tax - start:+.3f}, gold {own:+.2f}")
        return tax - start <= (plain - start) / 2 and own >= gold - 0.1

    ptx = [repays(v) for v in ("ptx 0.3", "ptx 1", "ptx 4")]
    kl = [repays(v) for v in ("beta 0.1", "beta 0.3", "beta 2")]
    told = f"default: tax {plain - start:+.3f} nats a token, gold {gold:+.2f}; " + "; ".join(told)
    return verdict(plain > start and any(ptx) and not any(kl), by["default"], told)


def first_half(row, key):
    curve = row["curve"][:max(1, len(row["curve"]) // 2)]
    return sum(c[key] for c in curve) / len(curve)


def verdict_i07(rows):
    """held: with the critic from the PM the mean score of the run's first half is above that with
    a fresh critic, by two errors over paired seeds, and averaged weights end with no lower gold.
    """
    by = table(rows)
    half = {v: [first_half(r, "score") for r in by[v]] for v in
            ("default", "critic fresh")}
    lead = mean_se([a - b for a, b in zip(half["default"], half["critic fresh"], strict=True)])
    ema = gap(by, "gold", "default", "ema 0.9")
    told = (", ".join(f"{v.replace('default', 'critic from the PM')}: {told_of(s)}"
                      for v, s in half.items()) + " mean score in the first half; gold at the end "
            f"{told_of(column(by, 'default', 'gold'))}, with averaged weights (0.9) "
            f"{told_of(column(by, 'ema 0.9', 'gold'))}")
    return verdict(above(lead) and ema[0] > -2 * ema[1], by["default"], told)


def verdict_h16(rows):
    """held: with no helpful prompts over half of plain prompts are refused at the end and with 0.9
    fewer by two errors; and in the default run the mean PM score of harmless answers ends above the
    99% quantile of the PM's own data while that of helpful ones does not, in every seed.
    """
    by, shares = table(rows), {"helpful 0": 0.0, "helpful 0.3": 0.3, "default": 0.6,
                               "helpful 0.9": 0.9}
    fewer = gap(by, "refused", "helpful 0.9", "helpful 0")
    leaves = [(r["pm_harmless"] > s["data"]["harmless"], r["pm_helpful"] > s["data"]["helpful"])
              for r, s in zip(by["default"], by["start"], strict=True)]
    holds = (mean_se(column(by, "helpful 0", "refused"))[0] > 0.5 and above(fewer)
             and all(a and not b for a, b in leaves))
    told = "plain prompts refused: " + ", ".join(
        f"{points(mean_se(column(by, v, 'refused'))[0])} at {s:g} helpful"
        for v, s in shares.items()) + "; PM score at the end less the 99% quantile of its data: " \
        + ", ".join(f"{o} " + told_of([r[f"pm_{o}"] - s["data"][o] for r, s in zip(
            by["default"], by["start"], strict=True)]) for o in ("harmless", "helpful"))
    panels = [("after 32 iterations", "share of helpful prompts", name, {name: {
        s: (*mean_se(column(by, v, key)), 3) for v, s in shares.items()}})
        for key, name in (("refused", "plain prompts refused"), ("gold_helpful", "gold helpful"),
                          ("gold_harmless", "gold harmless"))]
    return verdict(holds, by["default"], told, panels)


def verdict_k04(rows):
    """held: over the last third of the run the mean KL is within 15% of the target in every seed,
    and the constant coefficient ends further from it.
    """
    by, target = table(rows), 2.0
    last = [mean_se([c["kl"] for c in r["curve"][-len(r["curve"]) // 3:]])[0]
            for r in by["target 2"]]
    plain = column(by, "default", "kl_exact")
    holds = all(abs(x - target) < 0.15 * target for x in last) and all(
        abs(p - target) > abs(x - target) for p, x in zip(plain, last, strict=True))
    beta = [r["curve"][-1]["lambda_kl"] for r in by["target 2"]]
    told = (f"target {target:g} nats: {told_of(last, '')} over the last third, beta 0.03 -> "
            f"{told_of(beta, '', 3)}; with a constant 0.03 {told_of(plain, '')} nats")
    panels = [("adaptive coefficient", "iteration", "KL, nats an answer", {
        f"seed {r['seed']}": {4 * i: (c["kl"], 0.0, 1) for i, c in enumerate(r["curve"])}
        for r in by["target 2"]})]
    return verdict(holds, by["target 2"], told, panels)


def verdict_k07(rows):
    """held: ECE of the next token on held-out text rises in RL by two errors over seeds, and one
    temperature takes away half of what it rose by or more.
    """
    by = table(rows)
    before, after = (column(by, v, "calibration") for v in ("start", "default"))
    worse = mean_se([b["ece"] - a["ece"] for a, b in zip(before, after, strict=True)])
    repaired = mean_se([b["ece"] - b["ece_after"] for b in after])[0]
    told = (f"ECE {told_of([a['ece'] for a in before], '', 3)} -> "
            f"{told_of([b['ece'] for b in after], '', 3)}; with T = "
            f"{told_of([b['temperature'] for b in after], '')} "
            f"{told_of([b['ece_after'] for b in after], '', 3)}; accuracy "
            f"{points(mean_se([a['accuracy'] for a in before])[0])} -> "
            f"{points(mean_se([b['accuracy'] for b in after])[0])}")
    return verdict(above(worse) and repaired >= worse[0] / 2, by["default"], told)


def verdict_k08(rows):
    """held: under annotators who like length answers get longer by two errors over seeds, and a
    reward of length alone brings a quarter or more of the score that their PM gives.
    """
    by = table(rows)
    longer = gap(by, "length", "start, longer", "longer")
    gain = mean_se([b - a for a, b in zip(column(by, "start, longer", "pm"),
                                          column(by, "longer", "pm"), strict=True)])
    alone = gap(by, "pm", "start, longer", "length only")
    told = (f"answers of {told_of(column(by, 'start, longer', 'length'), '', 1)} tokens become "
            f"{told_of(column(by, 'longer', 'length'), '', 1)} (plain annotators: "
            f"{told_of(column(by, 'default', 'length'), '', 1)}); their PM's score rises by "
            f"{gain[0]:.2f}, with a reward of length alone by {alone[0]:.2f} "
            f"({100 * alone[0] / gain[0]:.0f}%)")
    return verdict(above(longer) and alone[0] >= gain[0] / 4, by["longer"], told)


def verdict_k10(rows):
    """held: with resets and with a moving anchor both the PM's score and the KL to the first policy
    end above the default's, by two errors over paired seeds.
    """
    by, told, holds = table(rows), [], True
    for variant in ("reset 10", "anchor 0.9"):
        score, kl = (gap(by, k, "default", variant) for k in ("pm", "kl_exact"))
        holds &= above(score) and above(kl)
        told.append(f"{variant}: PM score {score[0]:+.2f} ± {score[1]:.2f}, KL {kl[0]:+.2f} ± "
                    f"{kl[1]:.2f}, gold {gap(by, 'gold', 'default', variant)[0]:+.2f}")
    return verdict(holds, by["default"], "against a fixed reference: " + "; ".join(told))


def verdict_k11(rows):
    """held: some average keeps 80% of the gain in gold at under 60% of the tax, by means."""
    by = table(rows)
    start, end = by["start"], by["default"]
    told, holds = [], False
    for i, weight in enumerate((0.25, 0.5, 0.75)):
        gold = mean_se([(e["averages"][i]["gold"] - s["gold"]) / (e["gold"] - s["gold"])
                        for s, e in zip(start, end, strict=True)])[0]
        paid = mean_se([e["averages"][i]["tax"] - s["tax"] for s, e in zip(start, end)])[0]
        tax = paid / mean_se([e["tax"] - s["tax"] for s, e in zip(start, end)])[0]
        holds |= gold >= 0.8 and tax < 0.6
        told.append(f"weight {weight:g}: {points(gold)} of the gain, {points(tax)} of the tax")
    return verdict(holds, end, "; ".join(told))


def verdict_k13(rows):
    """held: PPO on gold itself ends with more gold than the PM's run by two errors, without having
    fallen from its best, and its distinct-2 falls from the start's by two errors.
    """
    by = table(rows)
    scores = [[c["score"] for c in r["curve"]] for r in by["gold"]]
    fallen = mean_se([max(s) - s[-1] for s in scores])
    spread = mean_se([max(s) - s[0] for s in scores])[0]
    less = gap(by, "distinct", "gold", "start")
    holds = above(gap(by, "gold", "default", "gold")) and fallen[0] < 0.1 * spread and above(less)
    told = (f"gold {told_of(column(by, 'start', 'gold'))} -> {told_of(column(by, 'gold', 'gold'))} "
            f"(with the PM {told_of(column(by, 'default', 'gold'))}); fallen from the best by "
            f"{100 * fallen[0] / spread:.0f}% of the rise; distinct-2 "
            f"{told_of(column(by, 'start', 'distinct'), '')} -> "
            f"{told_of(column(by, 'gold', 'distinct'), '')}")
    return verdict(holds, by["gold"], told)
