"""Stage 2: comparisons and the preference model (HH 2, 3, A.2; InstructGPT 3.5's reward model).

A preference model (PM) gives a dialogue one number, read at an end-of-context token after the
answer. It is trained so that the difference of two scores is the log-odds that an annotator
prefers one answer to the other (Bradley-Terry):

    minimize  -log sigmoid( s(prompt, chosen) - s(prompt, rejected) )

first on comparisons of the world's own answers (PM pretraining, HH A.2: forum answers and edits),
then on annotators' comparisons of the policy's answers; one epoch each, by the same loop. A
comparison is one row [prompt, chosen, rejected] in which each answer sees the prompt and itself.

    python preference.py --collect 6000 --policy out/laptop/distill --out out/laptop/comparisons
    python preference.py --init out/laptop/pretrain --out out/laptop/pmp
    python preference.py --init out/laptop/pmp --data out/laptop/comparisons --pairs 0 \
                         --lr 3e-4 --out out/laptop/pm
    torchrun --nproc_per_node=2 preference.py --init out/laptop/pretrain --out out/laptop/pmp

About 3 minutes on two cores for all three; accuracy 0.5 -> 0.87 on the world's own pairs.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import (Run, UserError, adamw, batch_rows, entry, everyones, load_source, mine,
                    schedule, start, total, uniforms, update, write_atomically)
from data import world
from data.tokenizer import join, loads, parse_prompt
from model import pack, respond, shared_prompt_rows, unpack


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/pretrain"  # checkpoint to start from; a fresh head for a language model
    out: str = "out/laptop/pmp"        # the stage's folder
    data: str = ""                     # comparisons (file or folder); empty: the world's own
    pairs: int = 16000                 # comparisons to use at most; 0, with data: all
    foreign: float = 0.25              # PM pretraining: share of worse sides for another prompt
    edits: float = 0.25                # PM pretraining: share of worse sides with a false fact
    batch: int = 32                    # comparisons in a step
    micro: int = 8                     # comparisons in one forward pass, like lengths together
    epochs: int = 1                    # passes over the data (HH A.2: 1)
    lr: float = 1e-3                   # peak learning rate, linear to 0
    warmup: int = 20                   # steps of linear warm-up
    collect: int = 0                   # collect so many comparisons with policy; 0: train instead
    policy: str = "out/laptop/distill"  # policy that answers, when collecting
    harmful: float = 0.5               # share of harmful prompts, when collecting
    new: int = 40                      # tokens of an answer at most, when collecting
    temperature: float = 0.6           # of the simulated annotators, gold units; 0 is noise-free
    heldout: bool = False              # collect on the held-out animals
    seed: int = 0                      # of prompts, answers, choices and order
    every: int = 100                   # steps between evaluations and checkpoints
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def preference_loss(chosen, rejected):
    """-log sigmoid(chosen - rejected) of each comparison, stable for any scores (HH 3.2)."""
    return -F.logsigmoid(chosen - rejected)


def accuracy(chosen, rejected):
    """1 where the chosen answer scores higher, 1/2 on ties, else 0."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


# ---------------------------------------------------------------- data

def collect(cfg):
    """Pairs of the policy's answers, judged by a simulated annotator -> out/comparisons.jsonl."""
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "collect", rank)
    if run.finished:
        return print(f"collect: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.policy, scalar=False)
    tok, model = loads(source["tokenizer"]), unpack(source, device).eval()
    animals, stage = (world.HELD_OUT, "heldout") if cfg.heldout else (world.TRAIN, "collect")
    lines, dropped, chunk, i = [], dict(identical=0, surplus=0), 128, 0
    bar = tqdm(total=cfg.collect, desc="collect   ", dynamic_ncols=True, disable=rank > 0)
    while len(lines) < cfg.collect:
        if run.stopping():
            raise KeyboardInterrupt
        own = mine(range(i, i + chunk), rank, world_size)
        asked = [world.prompt(f"{stage}/{cfg.seed}", r, animals, p_harm=cfg.harmful) for r in own]
        prompts = [tok.render(turns, answer=True) for turns in asked]
        first, second = (respond(model, tok, prompts, cfg.new,
                                 uniforms(own, cfg.new, cfg.seed, stage, side)) for side in "ab")
        judged = [world.compare(world.keyed("annotator", stage, cfg.seed, r), turns, a, b,
                                cfg.temperature)
                  for r, turns, (a, _), (b, _) in zip(own, asked, first, second, strict=True)]
        for line in everyones(judged, world_size):
            if line is None:
                dropped["identical"] += 1
            elif len(lines) == cfg.collect:
                dropped["surplus"] += 1
            else:
                lines.append({**line, "prompt": join(line["prompt"], answer=True)})
                bar.update()
        i += chunk
        if not lines:                                    # it would never end
            raise UserError(f"{cfg.policy}: both answers to each of {i} prompts are the same text")
    bar.close()
    if rank == 0:
        text = "".join(json.dumps(x) + "\n" for x in lines)
        write_atomically(run.dir / "comparisons.jsonl", lambda f: f.write(text.encode()))
        print(f"collect: {i} prompts, {len(lines)} comparisons, dropped {dropped}")
        for objective in ("helpful", "harmless"):
            p = [max(x["soft"], 1 - x["soft"]) for x in lines if x["objective"] == objective]
            print(f"  {len(p)} {objective}, best possible accuracy {sum(p) / max(len(p), 1):.3f}")
        for line in lines[:3]:
            print(f"  {line['prompt'].strip().splitlines()[-3][:80]}\n"
                  f"    chosen   {line['chosen']}\n    rejected {line['rejected']}")
    run.save(len(lines), finished=True)


def read_comparisons(path):
    """Comparison lines of a file, or of a folder's comparisons.jsonl; prompts become turns.

    Raises UserError naming file, line and field.
    """
    path = Path(path)
    path = path / "comparisons.jsonl" if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path}: no such file; collect first (preference.py --collect N)")
    lines, form = [], {"prompt": "\n\nHuman: ...\n\nAssistant:", "chosen": "...", "rejected": "..."}
    with open(path, encoding="utf-8", errors="replace") as file:
        texts = list(file)                       # unlike splitlines, this does not cut at U+2028
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            for field in form:
                if not isinstance(line[field], str):
                    raise ValueError(f"field {field!r} is not text")
            line["prompt"] = parse_prompt(line["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path} line {number}: {what}; a line is {json.dumps(form)}") from None
        lines.append(line)
    if not lines:
        raise UserError(f"{path}: holds no comparison")
    return lines


def encode_comparisons(tok, lines, n_ctx):
    """(prompt ids, [chosen, rejected]) of each line that fits; counts of the dropped, by reason."""
    rows, dropped = [], dict(identical=0, too_long=0)
    for line in lines:
        prompt = tok.render(line["prompt"], answer=True)
        answers = [tok.render_answer(line[side]) + [tok.eoc] for side in ("chosen", "rejected")]
        if answers[0] == answers[1]:
            dropped["identical"] += 1
        elif len(prompt) + max(map(len, answers)) > n_ctx:
            dropped["too_long"] += 1
        else:
            rows.append((prompt, answers))
    return rows, dropped


def score_rows(model, tok, rows):
    """Scores [B, K]; rows: (prompt ids, [K answers' ids, each ended by <|eoc|>])."""
    laid_out = shared_prompt_rows(*zip(*rows, strict=True), tok.pad)
    ids, positions, mask, ends = (x.to(model.device) for x in laid_out)
    hidden = model(ids, positions, mask)
    return model.score(hidden.gather(1, ends[..., None].expand(-1, -1, hidden.shape[-1])))


# ---------------------------------------------------------------- evaluate

@torch.no_grad()
def score_pairs(model, tok, rows, micro=64):
    """Scores [N, K] on the CPU of many rows, like lengths together, in the order given."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + sum(map(len, rows[i][1])))
    out = torch.empty(len(rows), len(rows[0][1]))
    for i in range(0, len(order), micro):
        some = order[i:i + micro]
        out[some] = score_rows(model, tok, [rows[j] for j in some]).cpu()
    return out


def truth_rows(tok, animals, count=400, seed=0):
    """Pairs that differ in one fact only, the true one first."""
    rows = []
    for i in range(count):
        turns, true, false = world.true_false_pair(world.keyed("truth", seed, i), animals)
        answers = [tok.render_answer(x) + [tok.eoc] for x in (true, false)]
        rows.append((tok.render(turns, answer=True), answers))
    return rows


def evaluate(run, model, tok, step, title, heldout, truths):
    """Accuracy on the world's own held-out pairs, and on pairs that differ in one fact only."""
    model.eval()
    acc, *truth = (accuracy(*score_pairs(model, tok, rows).unbind(1)).mean().item()
                   for rows in (heldout, *truths))
    model.train()
    run.log(step, heldout_accuracy=acc, truth=truth[0], truth_heldout_animals=truth[1])
    run.say(f"{title}: accuracy {acc:.3f} on the world's own pairs, true over false fact "
            f"{truth[0]:.3f}, of held-out animals {truth[1]:.3f}")


def show_scores(run, model, tok, rows):
    """Comparisons with the scores of their two answers."""
    for (prompt, answers), scores in zip(rows, score_pairs(model, tok, rows).tolist(), strict=True):
        run.say(f"  {tok.decode(prompt)[-70:]}")
        for answer, score in zip(answers, scores, strict=True):
            run.say(f"    {score:+.2f}  {tok.decode(answer)}")


# ---------------------------------------------------------------- train

def own_pairs(cfg, tok, n_ctx, seed, count):
    """`count` of the world's own comparisons as rows; what was dropped."""
    lines = [world.pretraining_pair(seed, i, cfg.foreign, cfg.edits) for i in range(count)]
    return encode_comparisons(tok, lines, n_ctx)


def training_rows(cfg, tok, n_ctx):
    """The comparisons of `data`, or the world's own, as rows; what was dropped."""
    if not cfg.data:
        return own_pairs(cfg, tok, n_ctx, cfg.seed, cfg.pairs)
    return encode_comparisons(tok, read_comparisons(cfg.data)[:cfg.pairs or None], n_ctx)


def train(cfg):
    if cfg.collect:
        return collect(cfg)
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "preference", rank)
    if run.finished:
        return print(f"preference: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.init)
    tok, model = loads(source["tokenizer"]), unpack(run.resume or source, device, scalar=True)
    model.score_head.bias.requires_grad_(False)  # differences cancel it: rounding would move it
    rows, dropped = training_rows(cfg, tok, model.config.n_ctx)
    heldout = own_pairs(cfg, tok, model.config.n_ctx, f"heldout/{cfg.seed}", 400)[0]
    truths = truth_rows(tok, world.TRAIN), truth_rows(tok, world.HELD_OUT)
    steps = cfg.epochs * (len(rows) // cfg.batch)
    if not steps:
        raise UserError(f"{len(rows)} comparisons of {len(rows) + sum(dropped.values())} are usable"
                        f" (dropped {dropped}), fewer than one --batch of {cfg.batch}")
    optimizer = adamw(model, cfg.lr)
    if run.resume:
        optimizer.load_state_dict(run.resume["optimizer"])
    elif rank == 0:
        print(f"preference: {len(rows)} comparisons used, dropped {dropped}; {steps} steps")

    def save(step, finished=False):
        run.save(step, finished, **pack(model, tok), optimizer=optimizer.state_dict())

    def size(r):
        return len(rows[r][0]) + sum(map(len, rows[r][1]))

    bar = run.bar(steps, run.step)
    for step in range(run.step, steps):
        chosen_rows = batch_rows(len(rows), cfg.batch, step, cfg.seed, "preference")
        own, sums = sorted(mine(chosen_rows, rank, world_size), key=size), [0.0, 0.0]
        for i in range(0, len(own), cfg.micro):
            scores = score_rows(model, tok, [rows[r] for r in own[i:i + cfg.micro]])
            chosen, rejected = scores.unbind(1)
            loss = preference_loss(chosen, rejected).sum()
            (loss / cfg.batch).backward()
            sums[0] += loss.item()
            sums[1] += accuracy(chosen, rejected).sum().item()
        norm = update(model, optimizer, schedule(step, steps, cfg.lr, cfg.warmup))
        loss, acc = (x / cfg.batch for x in total(*sums, device=device))
        run.log(step, loss=loss, accuracy=acc, grad_norm=norm)
        bar.set_postfix_str(f"loss {loss:.3f} accuracy {acc:.2f}", refresh=False)
        bar.update()
        if (step + 1) % cfg.every == 0 and step + 1 < steps:
            if rank == 0:
                title = f"preference step {step + 1}"       # before the save: it logs
                evaluate(run, model, tok, step, title, heldout, truths)
            save(step + 1)
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    if rank == 0:
        evaluate(run, model, tok, steps, "preference done", heldout, truths)
        show_scores(run, model, tok, rows[:3])
    save(steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
