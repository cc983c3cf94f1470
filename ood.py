"""Stage 5: prompts unlike those that a model was tuned to help with are seen from inside it, and
declined before anything is generated (HH 5.4, B.9, figs. 22, 23, 39).

x is an activation of one layer at a prompt's last token. From helpful prompts alone, with mean mu,
covariance S and its diagonal D:

    plain        (x - mu)' S^-1 (x - mu)                                        Mahalanobis
    relative     (x - mu)' S^-1 (x - mu) - (x - mu)' D^-1 (x - mu)              HH's simplified form
    exposure     sigmoid(w x + b), fitted to N helpful prompts and N // M copies of M harmful ones

Of N prompts in d dimensions S is noise where N is not much above d: it is shrunk, S <- (1 - s) S +
s D, by Ledoit and Wolf's s (2004, for standardized features) or --shrink. Features that do not vary
are left out. A score above the one that --fpr of other helpful prompts exceed is declined.

    python ood.py --ckpt out/laptop/pretrain,out/laptop/distill,out/laptop/pm
    python ood.py --ckpt out/laptop/distill --layer 3 --out out/laptop/guard
    python sample.py --ckpt out/laptop/ppo --guard out/laptop/guard
    python ood.py --ckpt out/mine/base --inside helpful.jsonl --outside harmless.jsonl \\
        --check xstest_prompts.csv --out out/mine/ood

Layer 0 is the sum of the embeddings, k what leaves block k. ood.json, ood.png: AUROC of helpful
against harmful prompts, mean and standard deviation over splits, by layer; --layer writes a guard
of that layer instead. Files are HH-RLHF's rows, of which the first human turn counts, or lines with
a "prompt"; --check takes a CSV with prompt and label, safe or unsafe (XSTest).

Half a minute of one core for three models. In the toy world harm in the last request is told apart
without error from layer 1 on; --earlier asks for harm in an earlier turn: relative 0.87 to 0.96,
plain 0.94 to 0.99 by size (claims/ood.py). On half of HH-RLHF's two test files, after 300 steps on
4 MB of English and the other half, nothing is seen: relative 0.48 to 0.49, plain 0.51 to 0.54, 100
shown up to 0.57 (HH's smallest model: 0.55, 0.86 with 10 shown). results/ood_hh.jsonl is of

    python data/hh.py hh-rlhf/helpful-base --test 0.5 --out out/ood-hh/helpful      # and harmless
    python pretrain.py --text TEXT,out/ood-hh/helpful/train.jsonl,out/ood-hh/harmless/train.jsonl \\
        --vocab 4096 --batch 16 --micro 8 --steps 300 --lr 3e-3 --out out/ood-hh/base
    python ood.py --ckpt out/ood-hh/base --inside out/ood-hh/helpful/test.jsonl --count 0 \\
        --outside out/ood-hh/harmless/test.jsonl --check xstest_prompts.csv --out out/ood-hh/ood
"""

import csv
import io
import json
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import LOOKS, Run, UserError, device_of, entry, keyed, load_source, write_atomically
from data import world
from data.hh import dialogue
from data.lines import read_rows
from data.tokenizer import fit as fit_turns, loads
from guard import (KINDS, POOLS, activations, as_content, exposure, fingerprint, fit, fpr_at,
                   placed, score, standardized, threshold)
from measures import auroc
from model import unpack
from prompts import check_prompt


@dataclass(frozen=True)
class Config:
    ckpt: str = "out/laptop/pretrain"  # policies or preference models that read, commas between
    out: str = "out/laptop/ood"        # the stage's folder
    inside: str = ""                   # file of ordinary prompts; empty: the toy world's helpful
    outside: str = ""                  # file of prompts to tell from them; empty: its harmful ones
    check: str = ""                    # CSV of prompts labelled safe or unsafe: is it over-careful?
    count: int = 9000                  # prompts to draw or read of each kind; 0, with files: all
    earlier: bool = False              # the toy world's harm is in earlier turns, not the last one
    layer: int = -1                    # write a guard of this layer; below 0: compare all layers
    kind: str = "relative"             # of the guard: plain, diagonal, relative, exposure
    fpr: float = 0.05                  # share of ordinary prompts that may be declined
    shots: str = "1,10,100,1000"       # outside prompts that exposure is fitted to; guard: the last
    pool: str = "last"                 # activations of the last token, or mean over the last turn
    shrink: float = -1.0               # covariance to its diagonal, 0 to 1; below 0: Ledoit-Wolf
    ridge: float = 1e-3                # of exposure: penalty ridge / 2 |w|^2 on the mean loss
    splits: int = 3                    # random splits into prompts to fit, to calibrate, to test
    micro: int = 64                    # prompts in one forward pass, like lengths together
    seed: int = 0                      # of prompts and splits
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- data

def first_turn(row):
    """The first human turn of a line with a prompt, or of HH-RLHF's row, as turns."""
    turns = check_prompt(row) if "prompt" in row else dialogue(row, "chosen")
    return [next(((role, text) for role, text in turns if role == "human"), ("human", ""))]


def drawn(cfg, side):
    """The toy world's prompts of a side, or why one is none: "mixed" if it asks for harm in another
    turn than it should, "single" if it has no earlier turn though these are asked for.
    """
    harmful = side == "outside"
    for i in range(cfg.count):
        turns = world.prompt(f"ood/{cfg.seed}/{side}", i, harmful=harmful and not cfg.earlier)
        before = [world.request_of(turns[:j + 1]).harmful for j in range(0, len(turns) - 1, 2)]
        if cfg.earlier and not before:
            yield "single"
        else:
            yield turns if any(before) == (harmful and cfg.earlier) else "mixed"


def read(path, count):
    """Prompts of a file. UserError naming file and line."""
    try:
        return list(read_rows(path, first_turn, Counter()))[:count or None]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: {reason}" if isinstance(error, OSError) else error) from None


def read_check(path):
    """{"safe" or "unsafe": prompts} of a CSV with the columns prompt and label."""
    sides = {"safe": [], "unsafe": []}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                if row.get("label") not in sides or not row.get("prompt"):
                    raise UserError(f"{path} line {number}: columns 'prompt' and 'label' are "
                                    "needed, the label safe or unsafe")
                sides[row["label"]].append([("human", row["prompt"])])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: no CSV in UTF-8 ({error})") from None
    if not any(sides.values()):
        raise UserError(f"{path}: no prompt below the columns")
    return {side: prompts for side, prompts in sides.items() if prompts}


def prompts_of(cfg, sources):
    """{side: prompts as turns}; of each what is dropped is counted, by reason, and printed.

    sources: {name: (tok, model)}; what is too long for one is dropped for all.
    """
    sets, seen = {}, set()
    for side in ("inside", "outside"):
        path = getattr(cfg, side)
        sets[side] = read(path, cfg.count) if path else drawn(cfg, side)
    sets |= read_check(cfg.check) if cfg.check else {}
    for side, found in sets.items():
        counts, kept = Counter(), []
        for turns in found:
            key = repr(turns)
            reason = (turns if isinstance(turns, str) else "empty" if not turns[-1][1].strip() else
                      "repeated" if key in seen else "too_long" if any(
                          fit_turns(tok, turns, model.config.n_ctx) is None
                          for tok, model in sources.values()) else "kept")
            counts[reason] += 1
            if reason == "kept":
                seen.add(key)
                kept.append(turns)
        print(f"{side}: {counts.total()} prompts, " + ", ".join(
            f"{n} {reason}" for reason, n in sorted(counts.items())))
        if len(kept) < 8 and side in ("inside", "outside"):
            raise UserError(f"{side}: {len(kept)} prompts are left, 8 or more are needed")
        sets[side] = kept
    return sets


def split(cfg, sides, number):
    """Row numbers of a split: inside to fit (1/2), calibrate (1/4), test; outside to expose, test.
    """
    order = {s: keyed(cfg.seed, "ood", number, s).permutation(len(sides[s]))
             for s in ("inside", "outside")}
    n, m = (len(order[s]) for s in ("inside", "outside"))
    return dict(fit=order["inside"][:n // 2], calibrate=order["inside"][n // 2:3 * n // 4],
                test=order["inside"][3 * n // 4:], expose=order["outside"][:m // 2],
                outside=order["outside"][m // 2:])


# ---------------------------------------------------------------- evaluate

def shots_of(cfg):
    """--shots as numbers."""
    if not all(x.isdecimal() and int(x) for x in cfg.shots.split(",")):
        raise UserError(f"--shots {cfg.shots}: numbers from 1, commas between")
    return [int(x) for x in cfg.shots.split(",")]


def detector(cfg, kind, x, rows, shots=0):
    """`fit` of one layer's activations x = {side: [prompts, C]}, with exposure's weights."""
    fitted = fit(x["inside"][rows["fit"]], cfg.shrink)
    if kind == "exposure":
        sides = x["inside"][rows["fit"]], x["outside"][rows["expose"][:shots]]
        fitted["weights"] = exposure(*(standardized(fitted, side) for side in sides), cfg.ridge)
    return fitted


def measure(cfg, fitted, kind, x, rows):
    """A detector's numbers on a split, and its scores by side; threshold from `calibrate`."""
    at = threshold(score(fitted, kind, x["inside"][rows["calibrate"]]), cfg.fpr)
    asked = {**x, "inside": x["inside"][rows["test"]], "outside": x["outside"][rows["outside"]]}
    scores = {side: score(fitted, kind, own) for side, own in asked.items()}
    one, two = scores["inside"], scores["outside"]
    found = dict(auroc=auroc([*one, *two], [0] * len(one) + [1] * len(two)), threshold=at,
                 fpr95=fpr_at(one, two), **{k: fitted[k] for k in ("shrink", "constant")})
    return {**found, **{f"declined_{s}": float((v > at).mean()) for s, v in scores.items()}}, scores


def detectors(cfg, rows):
    """{name: (kind, shots)}: what is compared, as far as there are prompts to show."""
    most = min(len(rows["fit"]), len(rows["expose"]))
    shown = {f"{m} shown": ("exposure", m) for m in shots_of(cfg) if m <= most}
    return {**{kind: (kind, 0) for kind in KINDS if kind != "exposure"}, **shown}


def over_splits(cfg, x):
    """{detector: {number: mean over splits, number_sd: deviation}} of one layer; the relative
    detector's scores on the last split.
    """
    found, told = {}, None
    for number in range(cfg.splits):
        rows = split(cfg, x, number)
        for name, (kind, shots) in detectors(cfg, rows).items():
            numbers, scores = measure(cfg, detector(cfg, kind, x, rows, shots), kind, x, rows)
            found.setdefault(name, []).append(numbers)
            told = scores if name == "relative" else told
    spread = {name: {k: [r[k] for r in many] for k in many[0]} for name, many in found.items()}
    return {name: {**{k: round(float(np.mean(v)), 5) for k, v in columns.items()},
                   **{f"{k}_sd": round(float(np.std(v, ddof=1)), 5) if len(v) > 1 else 0.0
                      for k, v in columns.items()}} for name, columns in spread.items()}, told


def as_text(name, rows):
    """The rows of a checkpoint as text."""
    names = list(rows[0]["found"])
    lines = [f"{name}: AUROC by layer (mean, deviation over splits)",
             "layer" + "".join(f"{x:>14}" for x in names) + "   declined, in / out of relative"]
    for row in rows:
        cells = [f"{x['auroc']:.3f} ± {x['auroc_sd']:.3f}" for x in row["found"].values()]
        it = row["found"]["relative"]
        lines.append(f"{row['layer']:>5}" + "".join(f"{x:>14}" for x in cells)
                     + f"   {it['declined_inside']:.1%} / {it['declined_outside']:.1%}"
                     + f"   (shrunk by {it['shrink']:.3f}, {it['constant']:.0f} constant)")
    row = max(rows, key=lambda row: row["found"]["relative"]["auroc"])
    for kind, it in row["found"].items():
        told = [f"{s} {it[f'declined_{s}']:.1%}" for s in ("safe", "unsafe")
                if f"declined_{s}" in it]
        lines += [f"  layer {row['layer']}, {kind}: declines of --check {', '.join(told)}"] * bool(
            told)
    return "\n".join(lines)


def draw(results, file):
    """AUROC by depth for each checkpoint, and the relative scores at its best layer."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(1, 1 + len(results), figsize=(4.4 * (1 + len(results)), 3.8),
                                layout="constrained", squeeze=False)
    for i, (name, rows) in enumerate(results.items()):
        color, marker = LOOKS[i % len(LOOKS)]
        for kind, line in (("plain", ":"), ("relative", "-")):
            own = [row["found"][kind] for row in rows]
            axes[0, 0].errorbar([row["layer"] / max(rows[-1]["layer"], 1) for row in rows],
                                [x["auroc"] for x in own], [x["auroc_sd"] for x in own],
                                color=color, marker=marker, ls=line, capsize=2,
                                label=f"{Path(name).name} {kind}")
        best = max(rows, key=lambda row: row["found"]["relative"]["auroc"])
        both = np.concatenate([best["scores"]["inside"], best["scores"]["outside"]])
        bins = np.linspace(*np.quantile(both, [0.005, 0.995]), 40)
        for (side, hatch), look in zip((("inside", None), ("outside", "//")), LOOKS, strict=False):
            axes[0, 1 + i].hist(np.clip(best["scores"][side], bins[0], bins[-1]), bins, alpha=0.5,
                                density=True, color=look[0], hatch=hatch, label=side)
        axes[0, 1 + i].set(title=f"{Path(name).name}, layer {best['layer']}",
                           xlabel="relative score", ylabel="density")
        axes[0, 1 + i].legend(fontsize=8)
    axes[0, 0].set(xlabel="layer / layers", ylabel="AUROC", title="outside above inside")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(file, dpi=110, format="png")
    plt.close(figure)


# ---------------------------------------------------------------- the two programs

def layers_of(cfg, tok, model, sets):
    """[{layer, found, scores}] of a checkpoint: what `over_splits` finds; tells what it can't."""
    x, rows = activations_of(cfg, tok, model, sets), []
    for layer in range(model.config.n_layer + 1):
        try:
            found, scores = over_splits(cfg, {side: own[layer] for side, own in x.items()})
            rows.append(dict(layer=layer, found=found, scores=scores))
        except ValueError as error:
            print(f"layer {layer} is left out: {error}")
    if not rows:
        raise UserError("no layer can be measured")
    return rows


def evaluate(cfg, run, sources, sets):
    """All layers of all checkpoints -> ood.json, ood.png."""
    results = {}
    for name, (tok, model) in sources.items():
        results[name] = layers_of(cfg, tok, model, sets)
        print(as_text(name, results[name]), flush=True)
    picture = io.BytesIO()
    draw(results, picture)
    told = dict(config=run.config, prompts={side: len(found) for side, found in sets.items()},
                checkpoints={name: [dict(layer=r["layer"], **r["found"]) for r in rows]
                             for name, rows in results.items()})
    for name, content in (("ood.json", json.dumps(told, indent=1).encode()),
                          ("ood.png", picture.getvalue())):
        write_atomically(run.dir / name, lambda f, content=content: f.write(content))
    run.save(0, finished=True)


def make_guard(cfg, run, sources, sets):
    """A guard of one layer -> ckpt.pt."""
    (name, (tok, model)), = sources.items()
    if not cfg.layer <= model.config.n_layer:
        raise UserError(f"--layer {cfg.layer}: {name} has layers 0 (embeddings) to "
                        f"{model.config.n_layer}")
    x = {s: own[cfg.layer] for s, own in activations_of(cfg, tok, model, sets).items()}
    rows, shots = split(cfg, x, 0), shots_of(cfg)[-1]
    if cfg.kind == "exposure" and shots > len(rows["expose"]):
        raise UserError(f"--shots {shots}: {len(rows['expose'])} outside prompts can be shown")
    try:
        fitted = detector(cfg, cfg.kind, x, rows, shots)
        numbers, _ = measure(cfg, fitted, cfg.kind, x, rows)
    except ValueError as error:
        raise UserError(f"{name} layer {cfg.layer}: {error}") from None
    guard = dict(kind=cfg.kind, layer=cfg.layer, pool=cfg.pool, fpr=cfg.fpr, ckpt=name,
                 threshold=numbers["threshold"], fingerprint=fingerprint(load_source(name)),
                 history=any(len(turns) > 1 for turns in sets["inside"]),
                 fitted=as_content(fitted))
    run.save(0, finished=True, guard=guard)
    print(f"{run.dir}: {cfg.kind} guard by layer {cfg.layer} of {name}: " + ", ".join(
        f"{k.replace('_', ' ')} {v:.4g}" for k, v in numbers.items()))


def activations_of(cfg, tok, model, sets):
    """{side: activations [layers + 1, prompts, C]}."""
    room = model.config.n_ctx
    return {side: activations(model, [placed(tok, turns, room, cfg.pool) for turns in found],
                              tok.pad, cfg.micro) for side, found in sets.items()}


def main(cfg):
    names = [x for x in cfg.ckpt.split(",") if x]
    if not names or cfg.layer >= 0 and len(names) > 1:
        raise UserError("--ckpt: name one or more, commas between; with --layer just one")
    if cfg.kind not in KINDS or cfg.pool not in POOLS:
        raise UserError(f"--kind is one of {', '.join(KINDS)}; --pool {' or '.join(POOLS)}")
    if (not 0 <= cfg.fpr < 1 or not cfg.shrink <= 1 or not 0 < cfg.ridge < np.inf
            or min(cfg.splits, cfg.micro) < 1 or cfg.count < 0):
        raise UserError("--fpr goes from 0 to under 1, --shrink up to 1, --ridge above 0, --splits "
                        "and --micro from 1, --count from 0")
    shots_of(cfg)
    if bool(cfg.inside) != bool(cfg.outside):
        raise UserError("--inside and --outside: both, or none for the toy world")
    run = Run(cfg, "ood")
    if run.finished:
        return print(f"ood: {run.dir} is finished, skipped")
    for number in (signal.SIGINT, signal.SIGTERM):  # at once: there is no step to save after
        signal.signal(number, signal.default_int_handler)
    device, sources = device_of(cfg.device), {name: load_source(name) for name in names}
    sources = {name: (loads(it["tokenizer"]), unpack(it, device).eval())
               for name, it in sources.items()}
    sets = prompts_of(cfg, sources)
    (evaluate if cfg.layer < 0 else make_guard)(cfg, run, sources, sets)


if __name__ == "__main__":
    entry(main, Config, __doc__, interrupted="the same command starts anew")
