"""Stage 2, first half: the policy answers, annotators choose (HH 2; InstructGPT 3.4).

Prompts are the toy world's; a policy gives two answers to each (or K of them), and a simulated
annotator prefers one by Bradley-Terry over what it likes: the world's gold utility, and where told
so a bias to long answers, to what the person believes, to what the policy finds likely, a taste of
its group, and carelessness.

    P(a before b) = sigmoid( (u(a) - u(b)) / temperature )

One JSON line each: {"prompt", "chosen", "rejected", "objective", "tranche", "annotator", "gold",
"soft"}, where soft is that probability; a ranking has "responses", best first.

    python collect.py --policy out/laptop/distill --out out/laptop/comparisons
    python collect.py --count 600 --answers 4-9 --out out/laptop/rankings
    torchrun --nproc_per_node=2 collect.py --policy out/laptop/distill --out out/laptop/comparisons

Half a minute on two cores for 6,000 comparisons.
"""

import json
import re
from dataclasses import dataclass
from string import ascii_lowercase as LETTERS

import torch
from tqdm import tqdm

from common import (Run, UserError, entry, everyones, load_source, mine, start, uniforms,
                    write_atomically)
from data import world
from data.lines import answers_of
from data.tokenizer import join, loads
from model import generate, unpack


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill"  # policy that answers
    out: str = "out/laptop/comparisons"  # the stage's folder; the lines go to comparisons.jsonl
    count: int = 6000                  # comparisons, or rankings
    answers: str = "2"                 # to a prompt: 2 a comparison, 4 or 4-9 rankings of so many
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
    seed: int = 0                      # of prompts, answers and choices
    device: str = "auto"               # auto, cpu, cuda or mps


def sizes_of(text):
    """--answers: "2" -> (2, 2), "4-9" -> (4, 9)."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 2 <= least <= most <= len(LETTERS):
        raise UserError(f"--answers {text}: a number from 2 to {len(LETTERS)}, or two, as in 4-9")
    return least, most


def answer_and_judge(cfg, tok, model, annotators, rows):
    """One line, or None where all answers are the same text, for each global row."""
    least, most = sizes_of(cfg.answers)
    animals, stage = (world.HELD_OUT, "heldout") if cfg.heldout else (world.TRAIN, "collect")
    asked = [world.prompt(f"{stage}/{cfg.seed}", r, animals, p_harm=cfg.harmful,
                          beliefs=cfg.beliefs) for r in rows]
    prompts = [tok.render(turns, answer=True) for turns in asked]
    random = torch.stack([uniforms(rows, cfg.new, cfg.seed, stage, letter)
                          for letter in LETTERS[:most]], 1)
    tokens, lengths, logps = generate(model, prompts, cfg.new, random.flatten(0, 1), most,
                                      stops=tok.stops, pad=tok.pad)
    texts = [tok.decode(t[:n]).strip() for t, n in zip(tokens.tolist(), lengths.tolist())]
    logps, lines = logps.sum(1).tolist(), []
    for i, (row, turns) in enumerate(zip(rows, asked)):
        rng = world.keyed("annotator", stage, cfg.seed, row)
        person = annotators[row % len(annotators)]
        few = least if least == most else world.keyed("few", cfg.seed, row).randint(least, most)
        cut = slice(i * most, i * most + few)
        lines.append(world.judge(rng, turns, texts[cut], person, logps[cut]))
    return lines


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
    """The policy's answers, judged by simulated annotators -> out/comparisons.jsonl."""
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "collect", rank)
    if run.finished:
        return print(f"collect: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.policy, scalar=False)
    tok, model = loads(source["tokenizer"]), unpack(source, device).eval()
    annotators = world.annotators(cfg.groups, cfg.temperature, cfg.longer, cfg.agree, cfg.typical,
                                  cfg.careless)
    lines, dropped, chunk, i = [], dict(identical=0, surplus=0), 128, 0
    bar = tqdm(total=cfg.count, desc="collect   ", dynamic_ncols=True, disable=rank > 0)
    while len(lines) < cfg.count:
        if run.stopping():
            raise KeyboardInterrupt
        own = mine(range(i, i + chunk), rank, world_size)
        judged = answer_and_judge(cfg, tok, model, annotators, own)
        for line in everyones(judged, world_size):
            if line is None:
                dropped["identical"] += 1
            elif len(lines) == cfg.count:
                dropped["surplus"] += 1
            else:
                lines.append({**line, "prompt": join(line["prompt"], answer=True)})
                bar.update()
        i += chunk
        if not lines:                                    # it would never end
            raise UserError(f"{cfg.policy}: all answers to each of {i} prompts are the same text")
    bar.close()
    if rank == 0:
        text = "".join(json.dumps(x) + "\n" for x in lines)
        write_atomically(run.dir / "comparisons.jsonl", lambda f: f.write(text.encode()))
        print(f"collect: {i} prompts, {len(lines)} lines, dropped {dropped}")
        show_lines(lines)
    run.save(len(lines), finished=True)


if __name__ == "__main__":
    entry(collect, Config, __doc__)
