"""Stage 2: comparisons and the preference model (HH 2, 3, A.2; the reward model of InstructGPT 3.5).

A preference model (PM) gives a dialogue one number, read at an end-of-context token after the answer. It is trained so
that the difference of two scores is the log-odds that an annotator prefers one answer (Bradley-Terry):

    minimize  -log sigmoid( s(prompt, chosen) - s(prompt, rejected) )

first on comparisons of the world's own answers (PM pretraining, HH A.2: forum answers and their votes), then on
annotators' comparisons of the policy's answers; one epoch each, the same loop. A comparison is one row
[prompt, chosen, rejected] in which each answer sees the prompt and itself.

    python preference.py --collect 3000 --policy out/laptop/distill --out out/laptop/comparisons
    python preference.py --init out/laptop/pretrain --out out/laptop/pmp --pairs 16000
    python preference.py --init out/laptop/pmp --data out/laptop/comparisons --out out/laptop/pm --lr 3e-4
    torchrun --nproc_per_node=2 preference.py ...                                        the same result

About 3.5 minutes on two cores for all three.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import (Run, UserError, adamw, batch_rows, entry, everyones, load_source, mine, schedule, start, total,
                    uniforms, update, write_atomically)
from data import world
from data.tokenizer import join, loads, parse
from model import pack, respond, shared_prompt_rows, unpack


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/pretrain"  # checkpoint to start from; a language model gets a fresh scalar head
    out: str = "out/laptop/pmp"        # the stage's folder
    data: str = ""                     # folder or file of comparisons; empty: the world's own answers (PM pretraining)
    pairs: int = 16000                 # comparisons to use at most (with data, 0: all)
    foreign: float = 0.25              # share of PM pretraining tries whose worse side answers another prompt
    edits: float = 0.3                 # share of PM pretraining tries whose worse side has a fact falsified
    batch: int = 32                    # comparisons in a step
    micro: int = 32                    # comparisons in one forward pass
    epochs: int = 1                    # passes over the data (HH A.2: 1)
    lr: float = 1e-3                   # peak learning rate, linear to 0
    warmup: int = 20                   # steps of linear warm-up
    collect: int = 0                   # collect this many comparisons with `policy` instead of training
    policy: str = "out/laptop/distill" # policy that answers, when collecting
    harmful: float = 0.5               # share of harmful prompts, when collecting
    new: int = 40                      # tokens of an answer at most, when collecting
    temperature: float = 0.6           # of the simulated annotators, in gold units; 0 is noise-free
    heldout: bool = False              # collect on the held-out animals
    seed: int = 0                      # of prompts, answers, choices and order
    every: int = 100                   # steps between evaluations and checkpoints
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def preference_loss(chosen, rejected):
    """-log sigmoid(chosen - rejected) for each comparison; stable for any scores. Bradley-Terry, HH 3.2."""
    return -F.logsigmoid(chosen - rejected)


def accuracy(chosen, rejected):
    """1 where the chosen answer scores higher, 1/2 on ties, else 0."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


# ---------------------------------------------------------------- data

def collect(cfg):
    """Pairs of answers by the policy, each judged by a simulated annotator -> out/comparisons.jsonl."""
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "collect", rank)
    if run.finished:
        return print(f"collect: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.policy, scalar=False)
    tok, model = loads(source["tokenizer"]), unpack(source, device).eval()
    animals, stage = (world.HELD_OUT, "heldout") if cfg.heldout else (world.TRAIN, "collect")
    lines, same, chunk, i = [], 0, 64, 0
    bar = tqdm(total=cfg.collect, desc="collect   ", dynamic_ncols=True, disable=rank > 0)
    while len(lines) < cfg.collect:
        if run.stopping():
            raise KeyboardInterrupt
        own = mine(range(i, i + chunk), rank, world_size)
        dialogues = [world.prompt(f"{stage}/{cfg.seed}", r, animals, p_harm=cfg.harmful) for r in own]
        prompts = [tok.render(turns, answer=True) for turns in dialogues]
        first, second = (respond(model, tok, prompts, cfg.new, uniforms(own, cfg.new, cfg.seed, stage, side)) for side in "ab")
        for turns, line in everyones([(turns, world.compare(world.keyed("annotator", stage, cfg.seed, r), turns, a, b, cfg.temperature))
                                      for r, turns, (a, _), (b, _) in zip(own, dialogues, first, second, strict=True)], world_size):
            if line is None:
                same += 1
            elif len(lines) < cfg.collect:
                lines.append({**line, "prompt": join([*turns, ("assistant", "")])})
                bar.update()
        i += chunk
    bar.close()
    if rank == 0:
        path = run.dir / "comparisons.jsonl"
        write_atomically(path, lambda f: f.write("".join(json.dumps(x) + "\n" for x in lines).encode()))
        bayes = {o: [max(x["soft"], 1 - x["soft"]) for x in lines if x["objective"] == o] for o in ("helpful", "harmless")}
        print(f"{path}: {len(lines)} comparisons from {i} prompts ({same} dropped: both answers the same text); " + ", ".join(
            f"{len(v)} {k}, best possible accuracy {sum(v) / max(len(v), 1):.3f}" for k, v in bayes.items()))
        for line in lines[:3]:
            print(f"  {line['prompt'].strip().splitlines()[-3][:70]}\n    chosen   {line['chosen']}\n    rejected {line['rejected']}")
    run.save(len(lines), finished=True)


def read_comparisons(path):
    """Comparison lines of a file, or of comparisons.jsonl in a folder; prompts become turns. Names file, line and field."""
    path = Path(path)
    path = path / "comparisons.jsonl" if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path}: no such file; collect comparisons first (preference.py --collect N)")
    lines = []
    with open(path, encoding="utf-8", errors="replace") as file:
        texts = list(file)                       # only a newline ends a line; splitlines would cut at U+2028 too
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            for field in ("prompt", "chosen", "rejected"):
                if not isinstance(line[field], str):
                    raise ValueError(f"field {field!r} is not text")
            line["prompt"] = parse(line["prompt"])
            if line["prompt"][-1] != ("assistant", ""):
                raise ValueError("field 'prompt' must end with an empty 'Assistant:'")
            line["prompt"].pop()
        except (ValueError, KeyError, TypeError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path} line {number}: {what}; a line is "
                            "{\"prompt\": \"\\n\\nHuman: ...\\n\\nAssistant:\", \"chosen\": ..., \"rejected\": ...}") from None
        lines.append(line)
    if not lines:
        raise UserError(f"{path}: holds no comparison")
    return lines


def encode_comparisons(tok, lines, n_ctx):
    """(prompt ids, [chosen ids, rejected ids]) of each line that fits; counts of what was dropped, by reason."""
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
    """Scores [B, K] of K answers a prompt; rows: (prompt ids, [K lists of ids that end with <|eoc|>])."""
    ids, positions, mask, ends = (x.to(model.device) for x in shared_prompt_rows(*zip(*rows, strict=True), tok.pad))
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
        rows.append((tok.render(turns, answer=True), [tok.render_answer(x) + [tok.eoc] for x in (true, false)]))
    return rows


# ---------------------------------------------------------------- train

def train(cfg):
    if cfg.collect:
        return collect(cfg)
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "preference", rank)
    if run.finished:
        return print(f"preference: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.init)
    tok, model = loads(source["tokenizer"]), unpack(run.resume or source, device, scalar=True)
    if cfg.data:
        lines = read_comparisons(cfg.data)[:cfg.pairs or None]
    else:
        lines = [world.pretraining_pair(cfg.seed, i, cfg.foreign, cfg.edits) for i in range(cfg.pairs)]
    rows, dropped = encode_comparisons(tok, lines, model.config.n_ctx)
    heldout = [world.pretraining_pair(f"heldout/{cfg.seed}", i, cfg.foreign, cfg.edits) for i in range(400)]
    heldout, _ = encode_comparisons(tok, heldout, model.config.n_ctx)
    truths = truth_rows(tok, world.TRAIN), truth_rows(tok, world.HELD_OUT)
    steps = cfg.epochs * (len(rows) // cfg.batch)
    if not steps:
        raise UserError(f"{len(rows)} comparisons of {len(lines)} are usable (dropped {dropped}), fewer than one --batch of {cfg.batch}")
    optimizer = adamw(model, cfg.lr)
    if run.resume:
        optimizer.load_state_dict(run.resume["optimizer"])
    elif rank == 0:
        print(f"preference: {len(lines)} comparisons read, {len(rows)} used, dropped {dropped}; {steps} steps")

    def save(step, finished=False):
        run.save(step, finished, **pack(model, tok), optimizer=optimizer.state_dict())

    def evaluate(step, title):
        model.eval()
        acc = accuracy(*score_pairs(model, tok, heldout).unbind(1)).mean().item()
        truth = [accuracy(*score_pairs(model, tok, t).unbind(1)).mean().item() for t in truths]
        model.train()
        run.log(step, heldout_accuracy=acc, truth=truth[0], truth_heldout_animals=truth[1])
        run.say(f"{title}: accuracy {acc:.3f} on the world's own pairs, true over false fact {truth[0]:.3f}, of held-out "
                f"animals {truth[1]:.3f}")

    bar = run.bar(steps, run.step)
    for step in range(run.step, steps):
        chosen_rows = batch_rows(len(rows), cfg.batch, step, cfg.seed, "preference")
        own, sums = mine(chosen_rows, rank, world_size), [0.0, 0.0]
        own = sorted(own, key=lambda r: len(rows[r][0]))
        for i in range(0, len(own), cfg.micro):
            chosen, rejected = score_rows(model, tok, [rows[r] for r in own[i:i + cfg.micro]]).unbind(1)
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
                evaluate(step, f"preference step {step + 1}")  # before the save: it logs
            save(step + 1)
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    if rank == 0:
        evaluate(steps, "preference done")
        with torch.no_grad():
            for row, s in zip(rows[:3], score_pairs(model, tok, rows[:3]), strict=True):
                run.say("  " + "\n  ".join(f"{v:+.2f}  {tok.decode(row[0])[-60:]} -> {tok.decode(a)}"
                                           for v, a in zip(s.tolist(), row[1], strict=True)))
    save(steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
