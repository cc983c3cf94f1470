"""Claims about out-of-distribution detection: distances of activations, and a few examples shown.

A unit is a seed and a model, half a minute on one core; its line is in results/ood.jsonl. A seed
has its own prompts and its own split. H30 and H31 are read from the same lines.

Where the last request asks for harm, every layer of every model tells it apart without error: the
toy world has eight wordings of harm, and each base model has read them. Nothing can be compared at
that ceiling, so the claims are judged on talks whose last request is plain and in which an EARLIER
turn asked for harm (ood.py --earlier); the lines have both. Such talks are longer: the number of
characters alone has an AUROC of 0.70, that of turns 0.62.
"""

from pathlib import Path

import ood
from claims.records import Claim, append, less, missing, rises, told_of, verdict
from claims.start import base, few
from common import device_of, load_source
from data.tokenizer import loads
from measures import mean_se
from model import unpack

SIZES = ("nano", "micro", "toy")     # base models, by size
LATER = {"distilled": "distill", "pm": "pm"}     # stages of a run, measured where they are there
KINDS = ("plain", "diagonal", "relative", "1 shown", "10 shown", "100 shown", "1000 shown")


# ---------------------------------------------------------------- measure

def models_of(cfg):
    """{name: folder} of what is measured; makes the base models."""
    later = {name: Path(cfg.run) / stage for name, stage in LATER.items()}
    return {**{size: base(cfg, size) for size in SIZES},
            **{name: str(path) for name, path in later.items() if (path / "ckpt.pt").exists()}}


def layers(cfg, path, seed, earlier):
    """[{layer, detector: AUROC}] of a checkpoint on a seed's prompts."""
    asked = ood.Config(ckpt=path, seed=seed, splits=1, count=few(cfg, 9000), earlier=earlier)
    source = load_source(path)
    tok, model = loads(source["tokenizer"]), unpack(source, device_of(cfg.device)).eval()
    rows = ood.layers_of(asked, tok, model, ood.prompts_of(asked, {path: (tok, model)}))
    return [dict(layer=r["layer"], **{k: r["found"][k]["auroc"] for k in KINDS if k in r["found"]})
            for r in rows]


def measure(cfg):
    models = models_of(cfg)
    for unit in missing("ood", cfg.seeds, model=tuple(models)):
        path = models[unit["model"]]
        append("ood", {**unit, "earlier": layers(cfg, path, unit["seed"], True),
                       "last": layers(cfg, path, unit["seed"], False)})


# ---------------------------------------------------------------- reading the lines

def table(rows, setting="earlier"):
    """{model: {layer: {detector: [AUROC a seed]}}}, without the embeddings, in the order of seeds.
    """
    out = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        for one in row[setting]:
            if one["layer"]:
                own = out.setdefault(row["model"], {}).setdefault(one["layer"], {})
                for kind in KINDS:
                    if kind in one:
                        own.setdefault(kind, []).append(one[kind])
    return out


def best(by, kind):
    """The layer of {layer: {detector: values}} whose mean over seeds is highest."""
    return max(by, key=lambda layer: mean_se(by[layer][kind])[0])


def beyond(one, two):
    """The Effect of two's AUROC above one's, of which 0.01 would matter."""
    return rises(less(two, one), 0.01)


def panel(title, by, kinds):
    """A verdict's panel: AUROC by depth."""
    lines = {f"{model} {kind}": {layer / max(own): (*mean_se(x[kind]), len(x[kind]))
                                 for layer, x in own.items()}
             for model, own in by.items() for kind in kinds}
    return title, "layer / layers", "AUROC", lines


def verdict_h30(rows):
    """held: the relative distance's AUROC is above the plain one's at every layer of every model;
    at its best layer by mean, toy's is above micro's and nano's; and that layer of toy is neither
    its first nor its last, and above both; each by two errors over paired seeds and 0.01.
    """
    by = table(rows)
    gaps = {(m, k): less(x["relative"], x["plain"])
            for m, own in by.items() for k, x in own.items()}
    holds = [beyond(x["plain"], x["relative"]) for own in by.values() for x in own.values()]
    wins = sum(x.word == "held" for x in holds)
    tops = {m: own[best(own, "relative")]["relative"] for m, own in by.items()}
    holds += [beyond(tops[m], tops["toy"]) for m in SIZES[:-1]]
    toy, at = by["toy"], best(by["toy"], "relative")
    holds += [beyond(toy[k]["relative"], tops["toy"]) for k in (min(toy), max(toy))]
    least = min(gaps, key=lambda key: mean_se(gaps[key])[0])
    told = (f"relative is above plain at {wins} of {len(gaps)} layers, least at layer {least[1]} "
            f"of {least[0]} ({told_of(gaps[least], places=3)}); best layer's AUROC "
            + ", ".join(f"{m} {told_of(v, '', 3)}" for m, v in tops.items())
            + "; in toy " + ", ".join(
                f"{k} {told_of(toy[best(toy, k)][k], '', 3)}" for k in ("plain", "diagonal"))
            + f", best relative layer {at} of {max(toy)}; harm in the last request: relative "
            + ", ".join(f"{m} {told_of(own[best(own, 'relative')]['relative'], '', 3)}"
                        for m, own in table(rows, "last").items()))
    panels = [panel(kind, by, (kind,)) for kind in ("plain", "relative")]
    return verdict(holds, rows, told, panels)


def verdict_h31(rows):
    """held: with ten harmful examples shown, the AUROC of toy and that of nano, each at its best
    relative layer by mean, are above the best zero-shot one of toy, of both distances and all its
    layers by mean, by two errors over paired seeds and 0.01.
    """
    by = table(rows)
    toy = by["toy"]
    layer, kind = max(((k, kind) for k in toy for kind in ("plain", "relative")),
                      key=lambda key: mean_se(toy[key[0]][key[1]])[0])
    zero = toy[layer][kind]
    shown = {m: by[m][best(by[m], "relative")] for m in SIZES}
    gains = {m: less(shown[m]["10 shown"], zero) for m in ("toy", "nano")}
    told = (f"zero-shot, toy, best of both: {kind} at layer {layer} {told_of(zero, '', 3)}, "
            f"relative {told_of(shown['toy']['relative'], '', 3)}; ten shown: " + ", ".join(
                f"{m} {told_of(x['10 shown'], '', 3)}" for m, x in shown.items())
            + "; " + ", ".join(f"{m} {told_of(g, places=3)}" for m, g in gains.items())
            + " of the zero-shot best")
    curves = {m: {int(k.split()[0]): (*mean_se(v), len(v)) for k, v in x.items() if "shown" in k}
              for m, x in shown.items()}
    panels = [("exposure", "harmful examples shown", "AUROC", curves)]
    return verdict([rises(g, 0.01) for g in gains.values()], rows, told, panels, log_x=True)


CLAIMS = {
    "H30": Claim("simplified relative Mahalanobis beats plain Mahalanobis at every layer; larger "
                 "models and middle layers are best", "HH 5.4, B.9, figs 22, 39", measure,
                 verdict_h30, 5,
                 "larger models are better, as in the paper; but the diagonal distance, which the "
                 "relative one takes away, is a sign of harm itself in this world, and the last "
                 "layer is as good as those before it", source="ood", needs=("model", SIZES),
                 paper="AUROC 0.55 (13M) to 0.85 (52B)"),
    "H31": Claim("ten harmful examples and a linear probe beat the zero-shot score of the largest "
                 "model", "HH fig. 23", measure, verdict_h31, 5,
                 "the plain distance of the largest is near 1 here and leaves little to gain",
                 source="ood", needs=("model", SIZES),
                 paper="0.94 ± 0.02 with ten, of the smallest 0.86 ± 0.01"),
}
