"""What the claims about preference models start from, made where it is missing.

One base model a size (`<run>/pretrain`, `<run>/pretrain-<size>`) and one policy (`<run>/distill`):
after `runs/laptop.sh` they are there. A seed has its own comparisons, order and annotators. Test
comparisons are on other prompts about the same animals.
"""

import shutil
from pathlib import Path

import collect
import distill
import preference
import pretrain
from claims.records import append
from common import metrics_of

LR = 1e-3          # from a base model or in PM pretraining
LR_AFTER = 3e-4    # on feedback after PM pretraining


def few(cfg, count):
    """`count`, or an eighth of it (at least 2) for a quick look (eval.py --quick)."""
    return max(2, count // 8) if cfg.quick else count


def work(cfg):
    """Folder of what claims make and may throw away."""
    return Path(cfg.run) / ("quick" if cfg.quick else "claims")


def place(cfg, name):
    """Folder of a model that the run may have; a quick look makes its own where it has none."""
    folder = Path(cfg.run) / name
    return work(cfg) / name if cfg.quick and not (folder / "ckpt.pt").exists() else folder


def steps_of(cfg, folder):
    """Pretraining steps of a model there: an eighth of a quick look's own ones."""
    return few(cfg, cfg.steps) if folder.parent == work(cfg) else cfg.steps


def base(cfg, size):
    """Folder of the base model of a size."""
    folder = place(cfg, "pretrain" if size == "toy" else f"pretrain-{size}")
    pretrain.train(pretrain.Config(out=str(folder), size=size, steps=steps_of(cfg, folder),
                                   device=cfg.device))
    return str(folder)


def policy(cfg):
    """Folder of the distilled policy, which answers in all comparisons."""
    folder = place(cfg, "distill")
    distill.train(distill.Config(init=base(cfg, "toy"), out=str(folder), device=cfg.device))
    return str(folder)


def pretrained(cfg, size):
    """Folder of a PM pretrained on 8,000 of the world's own comparisons (HH A.2)."""
    folder = work(cfg) / f"pmp-{size}"
    preference.train(preference.Config(init=base(cfg, size), out=str(folder), lr=LR,
                                       pairs=few(cfg, 8000), device=cfg.device))
    return str(folder)


def pool(cfg, name, seed, count, **knobs):
    """Comparison lines of a seed, collected once."""
    folder = work(cfg) / f"{name}-{seed}"
    collect.collect(collect.Config(policy=policy(cfg), out=str(folder), count=count, seed=seed,
                                   device=cfg.device, **knobs))
    return preference.read_comparisons(folder)


def train_lines(cfg, seed):
    return pool(cfg, "train", seed, few(cfg, 6000))


def test_lines(cfg, seed):
    return pool(cfg, "test", seed + 1000, few(cfg, 2000))


def of(lines, objective, count=None):
    """The first `count` lines of one objective."""
    return [x for x in lines if x["objective"] == objective][:count]


def train_pm(cfg, name, init, lines, test, seed, **knobs):
    """Train a PM on lines; its folder and, for each objective of `test`, its accuracy."""
    folder = work(cfg) / name
    preference.write_comparisons({folder / "lines.jsonl": lines, folder / "test.jsonl": test})
    preference.train(preference.Config(**{**dict(
        init=init, data=str(folder / "lines.jsonl"), test=str(folder / "test.jsonl"),
        out=str(folder), pairs=0, lr=LR, batch=16, warmup=5, every=10**6, seed=seed,
        device=cfg.device), **knobs}))
    last = metrics_of(folder)[-1]
    return folder, {k.removesuffix("_accuracy"): v for k, v in last.items()
                    if k.endswith("_accuracy")}


def measure(cfg, claim, unit, init, lines, test, more=None, **knobs):
    """One unit: train, record the accuracies, forget the model."""
    name = "-".join([claim, *(str(v) for v in unit.values())])
    folder, found = train_pm(cfg, name, init, lines, test, unit["seed"], **knobs)
    append(claim, {**unit, **(more or {}), **found})
    shutil.rmtree(folder)


def points(x):
    return f"{100 * x:.1f}%"
