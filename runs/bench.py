"""How fast this project trains, generates and compares here, beside transformers on the same work.

    python runs/bench.py                                      # all: a few minutes on two cores
    python runs/bench.py --items lm_train --out bench.jsonl   # one; the JSON lines into a file too

Speed is told in units (tokens, new tokens, comparisons) a second, in GFLOP/s, and as a fraction of
what torch.mm of two 2048 x 2048 matrices reaches on this machine. The operations counted are the
fewest that the work needs, whoever does it: no padding, a prompt read once, the head only where it
is asked for, backward as twice the forward.

Each repeat runs the matrix product and every implementation once, in an order that turns round
each time; fractions and ratios are medians of those within a repeat, so a machine that slows down
does so for all. Without transformers there are no ratios. All is float32 on the CPU, with random
weights and tokens and the same optimizer. Other work on the machine spoils the numbers: its load
is told.

    lm_train         cross-entropy, backward and AdamW on [16, 256] tokens
    generate         128 prompts of 24 tokens, 32 new tokens each, T = 1, no stop
    generate_ragged  the same with prompts of 8 to 40 tokens
    reward           a step on 64 comparisons: prompt 96, two answers of 32 tokens; one row each
                     that shares the prompt, against two rows in transformers
    ranking          a step on 16 rankings of 4 answers, the same lengths: one row each, against the
                     six pairs of each in twelve rows, by this project and by transformers
"""

import contextlib
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NAME = "nanoHH"
SIZES = {
    "small": dict(n_layer=4, n_head=4, n_embd=128, vocab=512, ctx=256, batch=16),
    "large": dict(n_layer=6, n_head=6, n_embd=384, vocab=4096, ctx=256, batch=8),
    "tiny": dict(n_layer=1, n_head=2, n_embd=16, vocab=64, ctx=128, batch=2),  # to try this file
}
PAD, FIRST = 0, 3  # tokens are drawn from FIRST up
LR = 3e-4


@dataclass(frozen=True)
class Config:
    items: str = "lm_train,generate,generate_ragged,reward,ranking"  # which, separated by commas
    size: str = "small"                # small or large; tiny only tries the program
    repeats: int = 7                   # of each implementation, after one that does not count
    threads: int = 0                   # of torch; 0: its own choice
    out: str = ""                      # file for the JSON lines


# ---------------------------------------------------------------- the work

def work(item, size):
    """The item's tokens, the same every time."""
    import torch
    generator = torch.Generator().manual_seed(1234)

    def ids(*shape):
        return torch.randint(FIRST, size["vocab"], shape, generator=generator)

    if item == "lm_train":
        return dict(tokens=ids(size["batch"], size["ctx"]))
    if item == "generate":
        return dict(prompts=ids(128, 24).tolist(), new=32)
    if item == "generate_ragged":
        lengths = torch.randint(8, 41, (128,), generator=generator).tolist()
        lengths[:2] = 8, 40  # both ends occur
        return dict(prompts=[ids(n).tolist() for n in lengths], new=32)
    if item == "ranking":
        return dict(prompt=ids(16, 96), answers=ids(16, 4, 32))
    return dict(prompt=ids(64, 96), chosen=ids(64, 32), rejected=ids(64, 32))


def amount(item, size, w):
    """How many units the work has, and the fewest operations of its matrix products.

    A token costs 24 C^2 in each layer, 4 C there for each position that it sees, and 2 C V where
    its successor is asked for; a multiplication and an addition are two operations.
    """
    C = size["n_embd"]

    def cost(first, last, predictions):  # of the tokens at positions first .. last, from 1
        n, seen = last - first + 1, (last * (last + 1) - first * (first - 1)) / 2
        layer = 24 * n * C ** 2 + 4 * C * seen
        return size["n_layer"] * layer + 2 * C * size["vocab"] * predictions

    if item == "lm_train":
        B, T = w["tokens"].shape
        return B * T, 3 * B * cost(1, T, T - 1)
    if item == "reward":
        (B, P), R = w["prompt"].shape, w["chosen"].shape[1]
        return B, 3 * B * (cost(1, P, 0) + 2 * cost(P + 1, P + R, 0))
    if item == "ranking":
        (B, P), (_, K, R) = w["prompt"].shape, w["answers"].shape
        return B * K * (K - 1) // 2, 3 * B * (cost(1, P, 0) + K * cost(P + 1, P + R, 0))
    prompts, new = w["prompts"], w["new"]
    return len(prompts) * new, sum(cost(1, len(p) + new - 1, new) for p in prompts)


# ---------------------------------------------------------------- the implementations
# setup(size, work) -> a function of no arguments that does the work once

def ours():
    """The modules common and model, from the folder above this one."""
    root = str(Path(__file__).resolve().parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    import common
    import model
    return common, model


def our_gpt(size, scalar=False):
    _, model = ours()
    shape = [size[k] for k in ("vocab", "ctx", "n_layer", "n_head", "n_embd")]
    return model.GPT(model.GPTConfig(*shape, scalar))


def their_gpt(kind, size, **more):
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.GPT2Config(
        vocab_size=size["vocab"], n_positions=size["ctx"], n_embd=size["n_embd"],
        n_layer=size["n_layer"], n_head=size["n_head"], resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=PAD,
        attn_implementation="sdpa", **more))


def stepper(network, loss_of):
    """A function that takes one optimizer step on loss_of()."""
    common, _ = ours()
    optimizer = common.adamw(network, LR)

    def step():
        loss_of().backward()
        common.update(network, optimizer, LR)
    return step


def our_lm_train(size, w):
    import torch
    gpt, ids = our_gpt(size), w["tokens"]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    return stepper(gpt, lambda: -gpt.logprobs(ids, mask).sum() / mask.sum())


def their_lm_train(size, w):
    gpt, ids = their_gpt("GPT2LMHeadModel", size).train(), w["tokens"]
    return stepper(gpt, lambda: gpt(input_ids=ids, labels=ids, use_cache=False).loss)


def our_generate(size, w):
    common, model = ours()
    gpt, rows = our_gpt(size).eval(), range(len(w["prompts"]))

    def step():
        uniform = common.uniforms(rows, w["new"], 0, "bench")
        _, lengths, _ = model.generate(gpt, w["prompts"], w["new"], uniform, pad=PAD)
        assert (lengths == w["new"]).all()
    return step


def their_generate(size, w):
    import torch
    gpt, width = their_gpt("GPT2LMHeadModel", size).eval(), max(map(len, w["prompts"]))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in w["prompts"]])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in w["prompts"]])
    settings = dict(max_new_tokens=w["new"], do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    use_cache=True, eos_token_id=None, pad_token_id=PAD)

    def step():
        out = gpt.generate(input_ids=ids, attention_mask=mask, **settings)
        assert out.shape == (len(ids), width + w["new"])
    return step


def preference_loss(chosen, rejected):
    import torch.nn.functional as F
    return -F.logsigmoid(chosen - rejected).mean()


def our_scores(gpt, prompts, answers):
    """[B, K] of the answers' scores, one row a prompt."""
    _, model = ours()
    import torch
    *rows, ends = model.shared_prompt_rows(prompts, answers, PAD)
    return gpt.score(gpt(*rows, at=(torch.arange(len(ends))[:, None], ends)))


def our_reward(size, w):
    gpt, prompts = our_gpt(size, scalar=True), w["prompt"].tolist()
    answers = list(zip(w["chosen"].tolist(), w["rejected"].tolist()))
    return stepper(gpt, lambda: preference_loss(*our_scores(gpt, prompts, answers).unbind(1)))


def their_reward(size, w):
    import torch
    gpt = their_gpt("GPT2ForSequenceClassification", size, num_labels=1).train()
    ids = torch.cat([torch.cat([w["prompt"], w[side]], 1) for side in ("chosen", "rejected")])
    return stepper(gpt, lambda: preference_loss(*gpt(ids, use_cache=False).logits.chunk(2)))


def pairs_apart(w):
    """Token rows [12 B, T] of the six pairs of each ranking: the better ones, then the worse."""
    import torch
    i, j = torch.triu_indices(w["answers"].shape[1], w["answers"].shape[1], 1)
    sides = [torch.cat([w["prompt"].repeat_interleave(len(i), 0), w["answers"][:, k].flatten(0, 1)],
                       1) for k in (i, j)]
    return torch.cat(sides)


def our_ranking(size, w):
    import torch
    ours()
    import preference
    gpt, prompts, answers = our_gpt(size, scalar=True), w["prompt"].tolist(), w["answers"].tolist()
    counts = torch.full((len(prompts),), w["answers"].shape[1])

    def loss():
        scores = our_scores(gpt, prompts, answers)
        return preference.over_pairs(preference.preference_loss, scores, counts).mean()
    return stepper(gpt, loss)


def our_ranking_apart(size, w):
    gpt, ids = our_gpt(size, scalar=True), pairs_apart(w)
    return stepper(gpt, lambda: preference_loss(*gpt.score(gpt(ids)[:, -1]).chunk(2)))


def their_ranking(size, w):
    gpt = their_gpt("GPT2ForSequenceClassification", size, num_labels=1).train()
    ids = pairs_apart(w)
    return stepper(gpt, lambda: preference_loss(*gpt(ids, use_cache=False).logits.chunk(2)))


UNITS = dict(lm_train="tokens/s", generate="new tokens/s", generate_ragged="new tokens/s",
             reward="comparisons/s", ranking="comparisons/s")
CASES = dict(lm_train=our_lm_train, generate=our_generate, generate_ragged=our_generate,
             reward=our_reward, ranking=our_ranking)
THEIRS = dict(lm_train=their_lm_train, generate=their_generate, generate_ragged=their_generate,
              reward=their_reward, ranking=their_ranking)
APART = dict(ranking=our_ranking_apart)  # the same work without what this project does for it


# ---------------------------------------------------------------- measuring

def matrix_product():
    """A function that multiplies two 2048 x 2048 matrices."""
    import torch
    a, b, out = torch.randn(3, 2048, 2048, generator=torch.Generator().manual_seed(0))
    return lambda: torch.mm(a, b, out=out)


def measure(item, size, repeats):
    """A dict of results for each implementation."""
    w, median = work(item, size), statistics.median
    count, operations = amount(item, size, w)
    steps = {"torch.mm": matrix_product(), NAME: CASES[item](size, w)}
    if item in APART:
        steps[NAME + ", apart"] = APART[item](size, w)
    with contextlib.suppress(ImportError):
        steps["transformers"] = THEIRS[item](size, w)
    took = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name in list(steps)[::-1 if repeat % 2 else 1]:
            start = time.perf_counter()
            steps[name]()
            took[name].append(time.perf_counter() - start)
    took = {name: times[1:] for name, times in took.items()}  # the first call allocates
    machine = [2 * 2048 ** 3 / t / 1e9 for t in took.pop("torch.mm")]
    for name, times in took.items():
        speeds, gflops = [count / t for t in times], [operations / t / 1e9 for t in times]
        yield dict(item=item, impl=name, unit=UNITS[item], median=median(speeds), min=min(speeds),
                   max=max(speeds), n=repeats, gflops=median(gflops), mm_gflops=median(machine),
                   of_mm=median(g / m for g, m in zip(gflops, machine)),
                   ratio=median(t / u for t, u in zip(times, took[NAME])), load=os.getloadavg()[0])


def environment(cfg):
    """What the numbers depend on."""
    import torch
    cpu, info, versions = platform.processor(), Path("/proc/cpuinfo"), {}
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
    for name in ("torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return dict(item="environment", cpu=cpu, cores=os.cpu_count(), threads=torch.get_num_threads(),
                python=platform.python_version(), **versions, size=cfg.size, repeats=cfg.repeats,
                load=os.getloadavg(), when=time.strftime("%Y-%m-%d %H:%M:%S"))


def main(cfg):
    import torch
    common, _ = ours()
    items, known = cfg.items.split(","), ",".join(CASES)
    if not set(items) <= set(CASES) or cfg.size not in SIZES or cfg.repeats < 1:
        raise common.UserError(f"--items {known}; --size {' or '.join(SIZES)}; --repeats from 1")
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    file = open(cfg.out, "w") if cfg.out else None

    def line(row):
        row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        for stream in filter(None, (sys.stdout, file)):
            print(json.dumps(row), file=stream, flush=True)

    line(environment(cfg))
    rows = []
    for item in items:
        for row in measure(item, SIZES[cfg.size], cfg.repeats):
            line(row)
            rows.append(row)
    print(f"\n{'item':<16} {'implementation':<14} {'median':>9} {'min':>9} {'max':>9} {'unit':<14}"
          f"{'GFLOP/s':>8} {'of mm':>6} {NAME + ' is':>9}")
    for r in rows:
        print(f"{r['item']:<16} {r['impl']:<14} {r['median']:>9,.0f} {r['min']:>9,.0f} "
              f"{r['max']:>9,.0f} {r['unit']:<14}{r['gflops']:>8.1f} {r['of_mm']:>6.1%} "
              f"{r['ratio']:>8.2f}x")
    if os.getloadavg()[0] > 1.5 * torch.get_num_threads():
        print("\nthe machine has other work: these speeds are too low", file=sys.stderr)


if __name__ == "__main__":
    ours()[0].entry(main, Config, __doc__)
