"""Best-of-n sampling, and the demonstrations of rejection-sampling fine-tuning (HH 4.5, B.6).

A policy gives n answers to each prompt, the preference model (PM) scores them, the best is kept:

    y* = argmax of PM(x, y_j) over j = 1 .. n,   KL(best of n || policy) <= log n - (n - 1) / n

HH's second tranche of comparisons came from models that answered so with n = 16; fig. 36 draws
their Elo for n = 1, 4, 16, 64. An answer with no end of turn is the best only if all have none.

    python rejection.py --policy out/laptop/distill --pm out/laptop/pm --out out/laptop/rejection
    torchrun --nproc_per_node=2 rejection.py --policy out/laptop/distill --pm out/laptop/pm
    python rejection.py --prompts out/laptop/comparisons/comparisons.jsonl     # others' prompts

out/demonstrations.jsonl has a comparison a line, {"prompt", "chosen": the best answer, "rejected":
the worst, "objective" where known, "tranche": "rs", "models": the policy twice}; bestof.json and
bestof.png have the best of k = 1, 2, 4 .. n by PM score and, for the log only, by gold.

15 seconds of one core for 200 prompts: from k = 1 to 16 the distilled policy's score rises from
4.6 to 6.6, gold harmless from -0.3 to 1.5, gold helpful from 0.3 to 0.9, no higher than at 8.
"""

import io
import json
import math
from dataclasses import dataclass

import numpy as np
import torch

from common import (Run, UserError, entry, everyones, load_source, mine, need_one_vocabulary, start,
                    uniforms, write_atomically)
from data import world
from data.tokenizer import fit, join, loads
from measures import best_of_k, best_of_n_kl
from model import generate, unpack
from prompts import read_prompts
from rollout import pm_scores, ranking


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill"  # policy that answers
    pm: str = "out/laptop/pm"          # preference model that picks
    out: str = "out/laptop/rejection"  # the stage's folder
    prompts: str = ""                  # files of lines with a "prompt", commas; empty: the world's
    count: int = 2000                  # prompts to answer at most; 0, with prompts: all
    answers: int = 16                  # answers to a prompt, of which the best is kept
    helpful: float = 0.5               # share of helpful ones of the world's prompts
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # of sampling
    chunk: int = 16                    # prompts answered at once, n answers each
    micro: int = 64                    # answers scored in one forward pass, like lengths together
    every: int = 512                   # prompts between checkpoints
    seed: int = 0                      # of prompts and answers
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def pick(texts, ranks):
    """(best, worst) of a prompt's answers, of equal ones the first; None if all are one text.

    The worst is the lowest of those whose text is not the best one's.
    """
    best = int(np.argmax(ranks))
    others = [j for j, text in enumerate(texts) if text != texts[best]]
    return (best, min(others, key=lambda j: ranks[j])) if others else None


def best_of(answered):
    """Rows of bestof.json, for k = 1, 2, 4 .. n: what the best of k answers is worth.

    Each is a dict of k, the bound `kl` of KL(best of k || policy) in nats and its root `sqrt_kl`,
    and, each with a standard error over prompts (`_se`), the PM `score` and, over the prompts of
    its objective, `gold_helpful` or `gold_harmless` of the answer that `ranking` picks.
    """
    scores = np.array([x["scores"] for x in answered])
    ranks = ranking(scores, [x["finished"] for x in answered])
    n = scores.shape[1]
    kls = {k: best_of_n_kl(k) for k in sorted({n, *(2 ** i for i in range(n.bit_length()))})}
    rows = [dict(k=k, kl=kl, sqrt_kl=math.sqrt(kl)) for k, kl in kls.items()]
    columns = dict(score=(ranks, scores))
    for objective in ("helpful", "harmless"):
        some = [i for i, x in enumerate(answered) if x["objective"] == objective]
        if some:
            golds = np.array([answered[i]["gold"] for i in some])
            columns[f"gold_{objective}"] = ranks[some], golds
    for name, (by, values) in columns.items():
        found = {x["k"]: x for x in best_of_k(by, values)}
        for row in rows:
            row |= {name: found[row["k"]]["value"], f"{name}_se": found[row["k"]]["se"]}
    return rows


# ---------------------------------------------------------------- data

def prompts_of(cfg, tok, n_ctx):
    """(row, turns, ids) of each prompt that fits once its oldest turns are cut; how many do not.

    The row is the prompt's number in the world's set or in the files.
    """
    if cfg.prompts:
        asked = read_prompts(cfg.prompts)[:cfg.count or None]
    else:
        asked = [world.prompt(f"rejection/{cfg.seed}", row, world.TRAIN, p_harm=1 - cfg.helpful)
                 for row in range(cfg.count)]
    fitted = [(row, turns, fit(tok, turns, n_ctx - cfg.new - 1))     # 1: the PM's <|eoc|>
              for row, turns in enumerate(asked)]
    kept = [x for x in fitted if x[2]]
    if not kept:
        raise UserError(f"{cfg.prompts or '--count'}: none of {len(asked)} prompts leaves room for "
                        f"{cfg.new} tokens in a context of {n_ctx}; a smaller --new leaves more")
    return kept, len(asked) - len(kept)


def answer(cfg, tok, policy, pm, some):
    """n scored answers to each of the (row, turns, ids): dicts of turns, lists of n, objective.

    Answer j to a row depends on (seed, row, j) alone, so more answers only add to fewer.
    """
    if not some:                                         # a rank without rows
        return []
    rows, _, prompts = zip(*some, strict=True)
    random = torch.stack([uniforms(rows, cfg.new, cfg.seed, "rejection", j)
                          for j in range(cfg.answers)], 1)                             # [B, n, new]
    tokens, lengths, _ = generate(policy, list(prompts), cfg.new, random.flatten(0, 1), cfg.answers,
                                  temperature=cfg.temperature, stops=tok.stops, pad=tok.pad)
    told = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    scores = pm_scores(pm, tok, [prompts[i // cfg.answers] + ids for i, ids in enumerate(told)],
                       cfg.micro).tolist()
    out = []
    for i, (_, turns, _) in enumerate(some):
        own = slice(i * cfg.answers, (i + 1) * cfg.answers)
        texts = [tok.decode(ids).strip() for ids in told[own]]
        out.append(dict(turns=turns, texts=texts, scores=scores[own],
                        finished=[ids[-1] == tok.eot for ids in told[own]],
                        **gold_of(turns, texts)))
    return out


def gold_of(turns, texts):
    """Objective of a prompt and the answers' gold on it, for the log; None if it is unknown."""
    request = world.request_of(turns)
    if request is None:
        return dict(objective=None, gold=None)
    return dict(objective=request.objective,
                gold=[world.gold(request, x)[request.harmful] for x in texts])


def lines_of(answered, policy):
    """Comparison lines of what was answered; counts of the dropped, and of unfinished answers."""
    lines, found = [], dict(identical=0, unfinished=0, unfinished_picked=0)
    for x in answered:
        picked = pick(x["texts"], ranking(x["scores"], x["finished"]))
        found["unfinished"] += x["finished"].count(False)
        if picked is None:
            found["identical"] += 1
            continue
        best, worst = picked
        found["unfinished_picked"] += not x["finished"][best]
        known = dict(objective=x["objective"]) if x["objective"] else {}
        lines.append(dict(prompt=join(x["turns"], answer=True), chosen=x["texts"][best],
                          rejected=x["texts"][worst], **known, tranche="rs", models=[policy] * 2))
    return lines, found


# ---------------------------------------------------------------- evaluate

def table(rows):
    """The rows of `best_of` as text."""
    names = [k for k in rows[0] if f"{k}_se" in rows[0]]
    lines = [f"{'k':>5}  KL <=" + "".join(f"{name.replace('_', ' '):>18}" for name in names)]
    for row in rows:
        cells = (f"{row[x]:+.3f} ± {row[f'{x}_se']:.3f}" for x in names)
        lines.append(f"{row['k']:>5}  {row['kl']:.3f}" + "".join(f"{x:>18}" for x in cells))
    return "\n".join(lines)


def draw(rows, n, file):
    """PM score, and the picked answers' gold where it is known, against the root of the bound."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    golds = [name for name in ("gold_helpful", "gold_harmless") if name in rows[0]]
    panels = {"PM score": ["score"], **({"gold utility": golds} if golds else {})}
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained",
                                squeeze=False)
    for ax, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name in names:
            ax.errorbar([r["sqrt_kl"] for r in rows], [r[name] for r in rows],
                        yerr=[r[f"{name}_se"] for r in rows], marker="o", capsize=3,
                        label=name.replace("_", " "))
        ax.set(xlabel="sqrt(log k - (k - 1) / k), at least sqrt(KL)", ylabel=f"{title} ± error",
               title=f"{title}, best of k = 1, 2, 4 .. {n}")
        ax.legend(frameon=False)
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def show_picks(run, answered, count=3):
    """The best and the worst answer to the first few prompts."""
    for x in answered[:count]:
        run.say(f"  {x['turns'][-1][1][:80]}")
        picked = pick(x["texts"], ranking(x["scores"], x["finished"]))
        for name, j in zip(("best", "worst"), picked or (0,)):
            run.say(f"    {name:<6}{x['scores'][j]:+.2f}  {' '.join(x['texts'][j].split())}")


def report(cfg, run, answered, too_long):
    """Writes demonstrations.jsonl, bestof.json and bestof.png, and tells what is in them."""
    lines, found = lines_of(answered, cfg.policy)
    if not lines:
        raise UserError(f"{cfg.policy}: all answers to each of {len(answered)} prompts are the "
                        "same text; a higher --temperature makes them differ")
    counts = dict(prompts=len(answered) + too_long, lines=len(lines), too_long=too_long, **found)
    rows, picture = best_of(answered), io.BytesIO()
    draw(rows, cfg.answers, picture)
    out = dict(policy=cfg.policy, pm=cfg.pm, n=cfg.answers, **counts, rows=rows)
    written = {"demonstrations.jsonl": "".join(json.dumps(x) + "\n" for x in lines).encode(),
               "bestof.json": json.dumps(out, indent=1).encode(), "bestof.png": picture.getvalue()}
    for name, content in written.items():
        write_atomically(run.dir / name, lambda f, content=content: f.write(content))
    run.say(f"rejection: {counts['prompts']} prompts, {len(lines)} lines, dropped "
            f"{dict(identical=found['identical'], too_long=too_long)}; of "
            f"{len(answered) * cfg.answers} answers {found['unfinished']} are unfinished, "
            f"{found['unfinished_picked']} of them picked\n{table(rows)}")
    show_picks(run, answered)


# ---------------------------------------------------------------- sample

def load_models(cfg, device):
    """tok, policy, pm. Raises UserError if they read different vocabularies."""
    source, judge = load_source(cfg.policy, scalar=False), load_source(cfg.pm, scalar=True)
    need_one_vocabulary(cfg.policy, source, {cfg.pm: judge})
    return loads(source["tokenizer"]), *(unpack(x, device).eval() for x in (source, judge))


def sample(cfg):
    """The policy's answers, the best of n by the PM -> out/demonstrations.jsonl, out/bestof.*."""
    rank, world_size, device = start(cfg.device)
    least = min(cfg.chunk, cfg.micro, cfg.every)
    if cfg.answers < 2 or least < 1 or cfg.count < (not cfg.prompts):
        raise UserError("--answers must be at least 2, --chunk, --micro, --every at least 1, and "
                        "so --count without --prompts")
    run = Run(cfg, "rejection", rank)
    if run.finished:
        return print(f"rejection: {run.dir} is finished, skipped") if rank == 0 else None
    tok, policy, pm = load_models(cfg, device)
    n_ctx = min(policy.config.n_ctx, pm.config.n_ctx)
    asked, too_long = prompts_of(cfg, tok, n_ctx)
    answered = run.resume["answered"] if run.resume else []
    bar = run.bar(len(asked), len(answered))
    while len(answered) < len(asked):
        done, size = len(answered), cfg.chunk * world_size
        own = mine(asked[done:done + size], rank, world_size)
        answered += everyones(answer(cfg, tok, policy, pm, own), world_size)
        bar.update(len(answered) - done)
        if len(answered) < len(asked) and run.stopping():
            run.save(len(answered), answered=answered)
            raise KeyboardInterrupt
        if len(answered) // cfg.every > done // cfg.every:
            run.save(len(answered), answered=answered)
    bar.close()
    if rank == 0:
        report(cfg, run, answered, too_long)
    run.save(len(answered), finished=True)


if __name__ == "__main__":
    entry(sample, Config, __doc__)
