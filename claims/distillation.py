"""Claims about context distillation: H01. A unit is a seed and a size, 2 to 6 minutes."""

from pathlib import Path

import distill
import pretrain
from claims.records import Claim, append, bars, missing, verdict
from claims.start import few, work
from common import metrics_of
from measures import mean_se


def h01(cfg, sizes=("toy", "micro", "nano")):
    """One base of each size a seed; the teacher is the toy one behind the HHH prompt."""
    for unit in missing("H01", cfg.seeds, size=sizes, steps=(few(cfg, cfg.steps),)):
        seed, size = unit["seed"], unit["size"]
        root = (work(cfg) if cfg.quick else Path(cfg.run)) / "h01" / str(seed)
        for s in dict.fromkeys((sizes[0], size)):
            pretrain.train(pretrain.Config(out=str(root / s), size=s, steps=unit["steps"],
                                           seed=seed, device=cfg.device))
        distill.train(distill.Config(init=str(root / size), teacher=str(root / sizes[0]),
                                     out=str(root / f"distill-{size}"), seed=seed,
                                     device=cfg.device))
        kl = [r["heldout_kl"] for r in metrics_of(root / f"distill-{size}") if "heldout_kl" in r]
        append("H01", {**unit, "before": kl[0], "after": kl[-1]})


def verdict_h01(rows, sizes=("toy", "micro", "nano")):
    """held: in every seed the own-size loss ends under a tenth of its start, and each smaller
    student ends above it.
    """
    ordered = sorted(rows, key=lambda r: r["seed"])
    after = {s: [r["after"] for r in ordered if r["size"] == s] for s in sizes}
    own = [r for r in rows if r["size"] == sizes[0]]
    small = all(r["after"] < 0.1 * r["before"] for r in own)
    higher = all(x > y for s in sizes[1:] for x, y in zip(after[s], after[sizes[0]]))
    told = "; ".join(f"{s} {mean_se(v)[0]:.4f} ± {mean_se(v)[1]:.4f}" for s, v in after.items())
    told = (f"loss to the teacher {mean_se([r['before'] for r in own])[0]:.4f} -> {told} nats a "
            "token" + ("" if small else "; the own size keeps more than a tenth")
            + ("" if higher else "; a smaller student ended lower"))
    panels = [bars("distilled students", "loss to the teacher, nats a token", after)]
    return verdict(small and higher, rows, told, panels)


CLAIMS = {
    "H01": Claim("distillation's loss falls to near zero for the teacher's own size, and ends "
                 "higher for smaller students", "HH A.1, fig. 30", h01,
                 verdict_h01, 36),
}
