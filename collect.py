"""Stage 2, first half: the policy answers, annotators choose (HH 2; InstructGPT 3.4).

Prompts are the toy world's; a policy gives two answers to each (or K of them), and a simulated
annotator prefers one by Bradley-Terry over what it likes: the world's gold utility, and where told
so a bias to long answers, to what the person believes, to what the policy finds likely, a taste of
its group, and carelessness. --no-engaged: of answers to harmful requests it weighs the harm alone,
and an evasion is worth as much as a refusal with a reason (Bai et al. 2022b, 4.4, on who judged
before).

    P(a before b) = sigmoid( (u(a) - u(b)) / temperature )

Of several policies, each answer's is drawn anew: HH 4.5 deploys snapshots side by side. With --best
an answer is the best of so many under a preference model (PM): HH's second tranche, k = 16.

One JSON line each: {"prompt", "chosen", "rejected", "objective", "tranche", "annotator", "gold",
"soft", "models"}, where soft is that probability and models are the policies that answered; a
ranking has "responses", best first.

    python collect.py --policy out/laptop/distill --out out/laptop/comparisons
    python collect.py --count 600 --answers 4-9 --out out/laptop/rankings
    python collect.py --count 1500 --best 16 --pm out/laptop/pm --tranche rs --out out/laptop/rs
    torchrun --nproc_per_node=2 collect.py --policy out/laptop/distill --out out/laptop/comparisons

Half a minute on two cores for 6,000 comparisons, two for 1,500 between bests of 16.
"""

import json
import re
from dataclasses import dataclass
from string import ascii_lowercase as LETTERS

import torch

from common import (Run, UserError, entry, everyones, load_source, mine, need_one_vocabulary, start,
                    uniforms, write_atomically)
from data import world
from data.lines import answers_of
from data.tokenizer import join, loads
from model import generate, unpack
from rollout import pm_scores, ranking


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill"  # policies that answer, commas between: each answer of one
    out: str = "out/laptop/comparisons"  # the stage's folder; the lines go to comparisons.jsonl
    count: int = 6000                  # comparisons, or rankings
    answers: str = "2"                 # to a prompt: 2 a comparison, 4 or 4-9 rankings of so many
    best: int = 1                      # an answer is the best of so many under --pm (HH 4.5: 16)
    pm: str = ""                       # preference model that picks it
    tranche: str = "base"              # name of the lot in each line; each has its own prompts
    harmful: float = 0.5               # share of harmful prompts
    beliefs: float = 0.0               # share of plain prompts in which the person states a belief
    heldout: bool = False              # ask about the held-out animals
    new: int = 40                      # tokens of an answer at most
    temperature: float = 0.6           # of the annotators, gold units; 0 is noise-free
    groups: int = 0                    # groups of annotators with tastes of their own; 0: no taste
    longer: float = 0.0                # annotators' bias to length, gold units for ten words
    agree: float = 0.0                 # their bias to what the person believes, gold units
    typical: float = 0.0               # their bias to the likely, gold units for a nat of log-prob
    careless: float = 0.0              # share of their choices that are turned round
    engaged: bool = True               # of equally harmless answers they prefer the engaged one
    every: int = 1024                  # lines between checkpoints
    seed: int = 0                      # of prompts, answers and choices
    device: str = "auto"               # auto, cpu, cuda or mps


def sizes_of(text):
    """--answers: "2" -> (2, 2), "4-9" -> (4, 9)."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 2 <= least <= most <= len(LETTERS):
        raise UserError(f"--answers {text}: a number from 2 to {len(LETTERS)}, or two, as in 4-9")
    return least, most


def stage_of(cfg):
    """What keys the random numbers beside the seed: each lot has prompts of its own."""
    stage = "heldout" if cfg.heldout else "collect"
    return stage if cfg.tranche == "base" else f"{stage}/{cfg.tranche}"


def best_of(cfg, tok, pm, prompts, answers):
    """Indices of those answers (lists of ids, cfg.best in a row to a prompt) that the PM picks."""
    if cfg.best == 1:
        return list(range(len(answers)))
    rows = [prompts[i // cfg.best] + ids for i, ids in enumerate(answers)]
    scores = pm_scores(pm, tok, rows, 64).view(-1, cfg.best).cpu().numpy()
    finished = [[answers[i + j][-1] == tok.eot for j in range(cfg.best)]
                for i in range(0, len(answers), cfg.best)]
    return [i * cfg.best + int(j) for i, j in enumerate(ranking(scores, finished).argmax(1))]


def answer(cfg, tok, models, pm, rows, prompts, most):
    """`most` answers to each global row's prompt: (text, log-prob, index of the policy) each.

    Which policy gives it and what it says are functions of (seed, lot, row, answer) alone.
    """
    stage = stage_of(cfg)
    keys = [(x,) if cfg.best == 1 else (x, j) for x in LETTERS[:most] for j in range(cfg.best)]
    random = torch.stack([uniforms(rows, cfg.new, cfg.seed, stage, *key) for key in keys], 1)
    random = random.unflatten(1, (most, cfg.best))                       # [B, most, best, new]
    whose = (uniforms(rows, most, cfg.seed, stage, "whose") * len(models)).int()     # [B, most]
    out = [[None] * most for _ in rows]
    for k, model in enumerate(models):
        own = whose == k
        for times in sorted({*own.sum(1).tolist()} - {0}):   # a prompt is read once for all of them
            some = (own.sum(1) == times).nonzero().flatten().tolist()
            places = [(i, slot) for i in some for slot in range(most) if own[i, slot]]
            uniform = random[some][own[some]].flatten(0, 1)
            tokens, lengths, logps = generate(model, [prompts[i] for i in some], cfg.new, uniform,
                                              times * cfg.best, stops=tok.stops, pad=tok.pad)
            told = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
            kept = best_of(cfg, tok, pm, [prompts[i] for i, _ in places], told)
            for (i, slot), j in zip(places, kept, strict=True):
                out[i][slot] = tok.decode(told[j]).strip(), logps[j].sum().item(), k
    return out


def answer_and_judge(cfg, tok, models, pm, annotators, rows):
    """One line, or None where all answers are the same text, for each global row."""
    if not rows:                                         # a rank without any
        return []
    least, most = sizes_of(cfg.answers)
    animals, stage = world.HELD_OUT if cfg.heldout else world.TRAIN, stage_of(cfg)
    asked = [world.prompt(f"{stage}/{cfg.seed}", r, animals, p_harm=cfg.harmful,
                          beliefs=cfg.beliefs) for r in rows]
    prompts = [tok.render(turns, answer=True) for turns in asked]
    answered, lines = answer(cfg, tok, models, pm, rows, prompts, most), []
    for row, turns, answers in zip(rows, asked, answered, strict=True):
        rng = world.keyed("annotator", stage, cfg.seed, row)
        person = annotators[row % len(annotators)]
        few = least if least == most else world.keyed("few", cfg.seed, row).randint(least, most)
        texts, logps, whose = zip(*answers[:few])
        names = [policies_of(cfg)[k] for k in whose]
        lines.append(world.judge(rng, turns, texts, person, logps, cfg.tranche, names))
    return lines


def policies_of(cfg):
    return [x for x in cfg.policy.split(",") if x]


def load_models(cfg, device):
    """tok, policies, PM or None. Raises UserError unless all read the same tokens."""
    if cfg.best < 1 or (cfg.best > 1) != bool(cfg.pm):
        raise UserError("--best 2 or more needs a --pm that picks, and --pm a --best")
    sources = {path: load_source(path, scalar=False) for path in policies_of(cfg)}
    if not sources:
        raise UserError("--policy: name one or more, commas between")
    judge = {cfg.pm: load_source(cfg.pm, scalar=True)} if cfg.pm else {}
    first, source = next(iter(sources.items()))
    need_one_vocabulary(first, source, {**sources, **judge})
    models = [unpack(sources[path], device).eval() for path in policies_of(cfg)]
    return loads(source["tokenizer"]), models, *(unpack(x, device).eval() for x in judge.values())


def show_lines(lines):
    """How well the choices can be foretold at best, and the first three of them."""
    for objective in ("helpful", "harmless"):
        p = [max(x["soft"], 1 - x["soft"]) for x in lines
             if x["objective"] == objective and "soft" in x]
        if p:
            print(f"  {len(p)} {objective}, best possible accuracy {sum(p) / len(p):.3f}")
    for line in lines[:3]:
        print(f"  {line['prompt'].strip().splitlines()[-3][:80]}")
        answers = answers_of(line)
        for name, text in zip(("chosen", *["rejected"] * len(answers)), answers):
            print(f"    {name:<8} {text}")


def collect(cfg):
    """The policies' answers, judged by simulated annotators -> out/comparisons.jsonl."""
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "collect", rank)
    if run.finished:
        return print(f"collect: {run.dir} is finished, skipped") if rank == 0 else None
    tok, models, *pm = load_models(cfg, device)
    annotators = world.annotators(cfg.groups, cfg.temperature, cfg.longer, cfg.agree, cfg.typical,
                                  cfg.careless, cfg.engaged)
    done = run.resume or dict(lines=[], dropped=dict(identical=0, surplus=0), asked=0)
    lines, dropped, i = done["lines"], done["dropped"], done["asked"]
    chunk = max(1, 128 // cfg.best)
    bar = run.bar(cfg.count, len(lines))
    while len(lines) < cfg.count:
        before, own = len(lines), mine(range(i, i + chunk), rank, world_size)
        judged = answer_and_judge(cfg, tok, models, *(pm or [None]), annotators, own)
        i += chunk
        for line in everyones(judged, world_size):
            if line is None:
                dropped["identical"] += 1
            elif len(lines) == cfg.count:
                dropped["surplus"] += 1
            else:
                lines.append({**line, "prompt": join(line["prompt"], answer=True)})
        bar.update(len(lines) - before)
        if not lines:                                    # it would never end
            raise UserError(f"{cfg.policy}: all answers to each of {i} prompts are the same text")
        stopping = run.stopping()
        if stopping or len(lines) // cfg.every > before // cfg.every:
            run.save(len(lines), lines=lines, dropped=dropped, asked=i)
        if stopping and len(lines) < cfg.count:
            raise KeyboardInterrupt
    bar.close()
    if rank == 0:
        text = "".join(json.dumps(x) + "\n" for x in lines)
        write_atomically(run.dir / "comparisons.jsonl", lambda f: f.write(text.encode()))
        print(f"collect: {i} prompts, {len(lines)} lines, dropped {dropped}")
        show_lines(lines)
    run.save(len(lines), finished=True)


if __name__ == "__main__":
    entry(collect, Config, __doc__)
