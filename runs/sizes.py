"""What each named size costs: memory of each stage, tokens, hours; counted, not measured.

    python runs/sizes.py                             # memory of every size and stage, one GPU
    python runs/sizes.py --table hours               # also: sizes, scan, gpus, ppo, ranks, wire
    python runs/sizes.py --stage ppo --size gpt2 --micro 8 --length 512 --ranks 8 --shard

The last prints one estimate term by term. runs/counts.py has the memory's formula; on CPUs
tests/test_sizes.py holds it to 10% of what torch allocates. No GPU has confirmed any of it.

    FLOPs of a trained token    6 * 12 L C^2 + 12 L C T + 6 V C where the head is applied
    hours                       FLOPs / (--flops * --mfu)
    a sampled token's           8 N + rows * caches bytes / --bandwidth, whatever the rows: weights
                                are read in float32, written and read in bf16

L layers, C width, V ids, T tokens of a row, N parameters. GB are 10^9 bytes. Tokens are those of
the papers: PAPERS. A second; nothing is trained.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":  # run as a program, the folder above this one holds `model`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import UserError, entry
from model import SIZES, GPTConfig, sized
from runs.counts import (STAGES, Job, cache, of_a_block, parameters, peak, phases, rows,
                         scalar)


@dataclass(frozen=True)
class Config:
    table: str = "memory"              # memory, sizes, hours, gpus, ppo, ranks or wire
    stage: str = ""                    # instead, one estimate: pretrain, distill, ..., sampling
    size: str = "gpt2"                 # of the estimate: a name in model.SIZES, or hh-52b
    micro: int = 0                     # rows of a micro-batch; 0: the scripts'
    length: int = 0                    # tokens of a row at most; 0: all positions
    new: int = 128                     # tokens of an answer, of these
    samples: int = 64                  # answers that a rank samples at once
    ranks: int = 1                     # processes
    shard: bool = False                # weights, gradients, optimizer cut over them
    checkpoint: bool = False           # blocks computed again in the backward pass
    device: str = "cuda"               # cuda, or cpu, where all is float32
    flops: float = 989e12              # peak FLOP/s of a GPU in bf16 (H100)
    mfu: float = 0.35                  # share of it that training reaches
    bandwidth: float = 3.35e12         # bytes/s of its memory
    memory: float = 80e9               # bytes of its memory, of which 90% count
    link: float = 450e9                # bytes/s between GPUs of one machine
    network: float = 25e9              # and of two


# Rows of a micro-batch as runs/8gpu.sh has them, pretraining's as runs/1gpu.sh, which has 16 for
# preference model and PPO, too; tokens of a row (all positions).
MICRO = dict(pretrain=16, distill=8, sft=8, preference=8, ppo=8, sampling=8)
LENGTH = dict(distill=512)
LARGEST = GPTConfig(50262, 2048, 64, 64, 8192)         # hh-52b: the paper's, in GPT-2's form
LADDER = [*(x for x in SIZES if x.startswith("gpt2")),
          *[x for x in SIZES if x.startswith("pythia")][2:], "hh-52b"]
SCAN = tuple(f"pythia-{x}" for x in "31m 70m 160m 410m 1.4b 6.9b".split())
SOME = ("gpt2", "gpt2-xl", "pythia-1.4b", "pythia-12b", "hh-52b")
# Rows, and their mean tokens: HH A.1 (350M tokens), InstructGPT 3.5 (13k demonstrations, 16 epochs;
# their length is a guess), HH 3 (160k comparisons) and fig. 4 (some 100k samples). A dialogue of
# HH-RLHF's test files has a median of 150 GPT-2 tokens, a comparison's second answer some 60 more.
PAPERS = dict(distill=(350e6 / 512, 512), sft=(13e3 * 16, 300), preference=(160e3, 250),
              ppo=(100e3, 150 + 128))
EPOCHS = 1                                              # of PPO over its samples (K)
PROMPT = 421                       # tokens before each text for the teacher: data/hhh.txt, GPT-2's


def published(name):
    """(vocabulary, positions) that a size is published with; the toy ones, as pretrain.py trains.

    GPT-2's and Pythia's tokenizers with our special ids: 50,262 and 50,281, in 50,304 rows.
    """
    family = name.split("-")[0]
    return {"gpt2": (50262, 1024), "pythia": (50281, 2048)}.get(family, (768, 256))


def shape(name):
    """The GPTConfig of a size as published. Raises UserError for a name that is none."""
    try:
        return LARGEST if name == "hh-52b" else sized(name, *published(name))
    except ValueError as error:
        raise UserError(f"--size: {error}, or hh-52b") from None


def memory(c):
    """Bytes of training, by what: weights, gradients, adam (two moments), and all."""
    weights = 4 * parameters(c)
    return dict(weights=weights, gradients=weights, adam=2 * weights, all=4 * weights)


def job(cfg, stage, name, **other):
    """The Job of a stage at a size, with the flags' settings unless others are given."""
    c = shape(name)
    length = cfg.length or min(c.n_ctx, LENGTH.get(stage, c.n_ctx))
    settings = dict(micro=cfg.micro or MICRO[stage], length=length, new=min(cfg.new, length // 2),
                    samples=cfg.samples, ranks=cfg.ranks, shard=cfg.shard,
                    checkpoint=cfg.checkpoint, cuda=cfg.device != "cpu")
    return Job(stage, c, **{**settings, **other})


# ---------------------------------------------------------------- tokens and hours

def training(c, tokens, T, asked=1.0, passes=3):
    """FLOPs of `passes` products of a matrix, each 2 a parameter: forward 1, with backward 3."""
    L, C = c.n_layer, c.n_embd
    token = passes * (24 * L * C * C + 4 * L * C * T + 2 * rows(c) * C * asked)
    return tokens * token


def pretrained(c):
    """Tokens: 20 a parameter (Hoffmann et al. 2022), and 10 billion at least: GPT-2's in a night.
    """
    return max(10e9, 20 * parameters(c))


def seconds(cfg, stage, c):
    """Seconds of a stage on one GPU."""
    rate = cfg.flops * cfg.mfu
    if stage == "pretrain":
        return training(c, pretrained(c), c.n_ctx) / rate
    count, T = PAPERS[stage]
    if stage == "ppo":
        return count * sum(of_a_sample(cfg, c).values())
    asked = dict(distill=1, sft=0.5, preference=0)[stage]
    whole, teacher = PROMPT + T, 0
    if stage == "distill":                              # the head at the text alone
        teacher = training(c, count * whole, whole, T / whole, 1)
    return (training(c, count * T, T, asked) + teacher) / rate


def of_a_sample(cfg, c):
    """Seconds of PPO for each of cfg.samples answers on a rank, by what. An answer is read by four
    models and learned from EPOCHS times by two.
    """
    rate, (_, T), new = cfg.flops * cfg.mfu, PAPERS["ppo"], cfg.new
    caches = cfg.samples * cache(c, T - new / 2, True)
    sampling = new * (8 * parameters(c) + caches) / cfg.bandwidth / cfg.samples
    reading = training(c, T - new, T - new, 0, 1) / rate
    scoring = training(c, T, T, new / T, 1) * 2 + training(c, T, T, 0, 1) * 2
    update = EPOCHS * (training(c, T, T, new / T) + training(c, T, T, 0))
    return dict(sampling=sampling + reading, scoring=scoring / rate, update=update / rate)


def wire(cfg, c, ranks):
    """Seconds in which a step's gradients are summed: each goes out and comes in nearly once."""
    speed = cfg.link if ranks <= 8 else cfg.network
    return 2 * 4 * parameters(c) * (ranks - 1) / ranks / speed


# ---------------------------------------------------------------- tables

def markdown(heads, lines):
    """Rows of cells, the first to the left, as lines."""
    return [f"| {' | '.join(x)} |" for x in (heads, ["---", *["--:"] * (len(heads) - 1)], *lines)]


def short(number):
    """Two digits, or all before the point."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def gb(number):
    """GB in three digits, or all before the point; "0.001" for a megabyte."""
    return f"{number / 1e9:,.0f}" if number >= 1e11 else f"{max(number / 1e9, 0.001):.3g}"


def table():
    """Lines of Markdown, a size each."""
    return markdown(
        ["size", "layers", "heads", "width", "parameters", "weights, GB", "+ gradients, Adam, GB"],
        [[name, *map(str, given), f"{parameters(shape(name)):,}",
          *(gb(memory(shape(name))[k]) for k in ("weights", "all"))]
         for name, given in SIZES.items()])


def memory_table(cfg):
    """GB of each stage, whole and with --checkpoint, and a row's keys and values."""
    def cell(stage, name):
        return " / ".join(gb(peak(job(cfg, stage, name, checkpoint=x))[0]) for x in (False, True))

    return markdown(
        ["size", *STAGES[:-1], "sampling", "a row's cache"],
        [[name, *(cell(stage, name) for stage in STAGES[:-1]),
          gb(peak(job(cfg, "sampling", name))[0]),
          gb(cache(shape(name), shape(name).n_ctx, cfg.device != "cpu"))]
         for name in (*SIZES, "hh-52b")])


def hours_table(cfg):
    def line(name):
        c = shape(name)
        tokens = pretrained(c)
        spent = [seconds(cfg, stage, c) for stage in STAGES[:-1]]
        return [name, f"{tokens / 1e9:,.0f}", f"{tokens / spent[0]:,.0f}",
                *(short(x / 3600) for x in spent)]

    return markdown(["size", "tokens, 10^9", "tokens/s", *(f"{x}, h" for x in STAGES[:-1])],
                    [line(name) for name in LADDER])


def fewest(cfg, stage, name, without=()):
    """The smallest number of GPUs: 1, or a power of two that shares the model; "-": none to 1,024.

    One row in a micro-batch, blocks computed again, 8 answers sampled at once.
    """
    for ranks in (2 ** i for i in range(11)):
        least = job(cfg, stage, name, micro=1, samples=8, checkpoint=True, ranks=ranks,
                    shard=ranks > 1)
        if peak(least, without)[0] <= 0.9 * cfg.memory:
            return str(ranks)
    return "-"


def gpus_table(cfg):
    return markdown(["size", "parameters", *STAGES[:-1]],
                    [[name, f"{parameters(shape(name)) / 1e9:.3g}e9",
                      *(fewest(cfg, stage, name) for stage in STAGES[:-1])] for name in LADDER])


ENGINE = ("frozen", "whole", "caches", "copies", "reading")    # what an engine elsewhere holds


def ppo_table(cfg):
    """What fills PPO's memory in GB, and how many GPUs it takes as terms go elsewhere."""
    def line(name):
        c = shape(name)
        both = parameters(c) + parameters(scalar(c))
        return [name, gb(16 * both), gb(4 * both), gb(4 * both), gb(64 * cache(c, c.n_ctx, True)),
                *(fewest(cfg, "ppo", name, x) for x in ((), ("frozen",), ENGINE))]

    return markdown(["size", "trained", "frozen", "whole copies", "64 caches", "GPUs",
                     "frozen away", "and an engine"], [line(x) for x in LADDER])


def ranks_table(cfg):
    """Answers a second of PPO with 512 an iteration, and where the time goes on 1 and on 64."""
    def line(name):
        spent = {r: of_a_sample(replace(cfg, samples=512 // r), shape(name)) for r in RANKS}
        speed = [short(r / sum(x.values())) for r, x in spent.items()]
        share = [" + ".join(f"{100 * x / sum(spent[r].values()):.0f}" for x in spent[r].values())
                 for r in (1, 64)]
        return [name, *speed, *share]

    return markdown(["size", *(f"{r} GPUs" for r in RANKS), "%, 1 GPU", "%, 64"],
                    [line(x) for x in SOME])


RANKS = (1, 2, 8, 64)


def wire_table(cfg):
    """Seconds on the wire, and tokens whose backward pass takes as long: on 8 and on 64 GPUs."""
    def line(name):
        c = shape(name)
        token = training(c, 1, c.n_ctx, passes=2) / cfg.flops / cfg.mfu
        spent = [wire(cfg, c, ranks) for ranks in (8, 64)]
        return [name, *(f"{x:.3g}" for x in spent), *(f"{x / token:,.0f}" for x in spent)]

    return markdown(["size", "8 GPUs, s", "64 GPUs, s", "8 GPUs, tokens", "64 GPUs, tokens"],
                    [line(name) for name in SOME])


def scan_table(cfg):
    """The sizes that grow by about 4x, as the paper's do, without embeddings and head."""
    blocks = [c.n_layer * of_a_block(c) for c in map(shape, SCAN)]
    steps = ["", *(f"{b / a:.1f}" for a, b in zip(blocks, blocks[1:]))]
    return markdown(["size", "parameters of blocks", "times the one before"],
                    [[name, f"{n / 1e6:,.1f}e6", step]
                     for name, n, step in zip(SCAN, blocks, steps)])


TABLES = dict(memory=memory_table, sizes=lambda cfg: table(), scan=scan_table, hours=hours_table,
              gpus=gpus_table, ppo=ppo_table, ranks=ranks_table, wire=wire_table)


def estimate(cfg):
    """Lines: each phase's sum, and the terms of the largest."""
    one = job(cfg, cfg.stage, cfg.size)
    most, name, terms = peak(one)
    others = [f"{phase} {gb(sum(x.values()))}" for phase, x in phases(one).items() if phase != name
              and "critic" not in phase]
    return [f"{cfg.stage}, {cfg.size}: {gb(most)} GB, most in the phase '{name}'",
            *(f"{gb(n):>10} {term}" for term, n in terms.items()), "others: " + ", ".join(others)]


def check_numbers(cfg):
    """UserError for a number out of its range."""
    for name in ("new", "samples", "ranks", "flops", "mfu", "bandwidth", "memory", "link",
                 "network"):
        if not getattr(cfg, name) > 0:
            raise UserError(f"--{name} {getattr(cfg, name):g}: above 0")
    for name in ("micro", "length"):
        if getattr(cfg, name) < 0:
            raise UserError(f"--{name} {getattr(cfg, name)}: 0 or more")
    if cfg.mfu > 1:
        raise UserError(f"--mfu {cfg.mfu:g}: a share, 1 at most")
    length = cfg.length or (shape(cfg.size).n_ctx if cfg.stage else PAPERS["ppo"][1])
    if cfg.new >= length and cfg.stage not in ("pretrain", "distill"):
        raise UserError(f"--new {cfg.new}: fewer than the {length} tokens of a row")


def main(cfg):
    if cfg.table not in TABLES:
        raise UserError(f"--table {cfg.table}: choose from {', '.join(TABLES)}")
    if cfg.stage and cfg.stage not in STAGES:
        raise UserError(f"--stage {cfg.stage}: choose from {', '.join(STAGES)}")
    if cfg.device not in ("cuda", "cpu"):
        raise UserError(f"--device {cfg.device}: cuda or cpu")
    check_numbers(cfg)
    print("\n".join(estimate(cfg) if cfg.stage else TABLES[cfg.table](cfg)))


if __name__ == "__main__":
    entry(main, Config, __doc__)
