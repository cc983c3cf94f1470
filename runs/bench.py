"""How fast this project trains, generates and compares here, beside transformers and trl.

    python runs/bench.py                                      # all: ten minutes on two cores
    python runs/bench.py --items lm_train --out bench.jsonl   # one; the JSON lines into a file too
    python runs/bench.py --size gpt2 --items lm_train,decode,attention    # on a GPU

Speed is told in units (tokens, new tokens, comparisons) a second, in GFLOP/s, and as a fraction of
what torch.mm of two square matrices reaches on this machine. The operations counted are the fewest
that the work needs, whoever does it: no padding, a prompt read once, the head and the last block
only where they are asked for, backward as twice the forward.

Each repeat runs the matrix product and every implementation once, in an order that turns round
each time; fractions and ratios are medians of those within a repeat, so a machine that slows down
does so for all. Without transformers or trl there are no ratios to them. Weights and tokens are
random, the optimizer is the same; float32 on the CPU, bf16 products on a GPU. Other work on the
machine spoils the numbers: its load is told.

    lm_train         cross-entropy, backward and AdamW on [16, 256] tokens
    generate         128 prompts of 24 tokens, 32 new tokens each, T = 1, no stop
    generate_ragged  the same with prompts of 8 to 40 tokens
    generate_shared  16 samples for each of 8 prompts of 96 tokens, 32 new tokens
    reward           a step on 64 comparisons: prompt 96, two answers of 32 tokens; one row each
                     that shares the prompt, against two rows
    ranking          a step on 16 rankings of 4 answers, the same lengths: one row each, against the
                     six pairs of each in twelve rows
    ppo              128 prompts of 24 tokens, answers of 32, one epoch in two minibatches: policy,
                     reference, preference model and critic
    attention        forward and backward by layout: causal rows (of `size`'s context), and prompts
                     with 4 answers (half the context, and a sixteenth each) in one row against
                     separate rows
    decode           one token for each of 256 rows with a full cache; of_bandwidth: the share of
                     the memory bandwidth that weights and cache need
    start            seconds of a whole process that does one PPO update
    ranks            lm_train by one process with all threads, against processes of torchrun that
                     share the rows: as many as GPUs, or two on the CPU with half the threads each
"""

import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

NAME = "nanoHH"
SIZES = {
    "small": dict(n_layer=4, n_head=4, n_embd=128, vocab=512, ctx=256, batch=16, micro=1024),
    "large": dict(n_layer=6, n_head=6, n_embd=384, vocab=4096, ctx=256, batch=8, micro=2048),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, vocab=50257, ctx=1024, batch=32, micro=16384),
    "tiny": dict(n_layer=1, n_head=2, n_embd=16, vocab=64, ctx=128, batch=2, micro=4096),
}  # micro: tokens that go through this project's models at a time; tiny only tries this file
PAD, FIRST = 0, 3  # tokens are drawn from FIRST up
LR = 3e-4
DEVICE = ["cpu"]   # where main() was told to work


@dataclass(frozen=True)
class Config:
    items: str = ""                    # which, by commas; empty: all, decode on a GPU only
    size: str = "small"                # small, large or gpt2; tiny only tries the program
    repeats: int = 7                   # of each implementation, after one that does not count
    threads: int = 0                   # of torch; 0: its own choice
    device: str = "auto"               # auto, cpu, cuda or mps
    keep_memory: bool = False          # as this project's stages do; here it helps all alike
    out: str = ""                      # file for the JSON lines
    show: str = ""                     # print such files as Markdown tables, by commas, and stop


# ---------------------------------------------------------------- the work

def work(item, size):
    """The item's tokens, the same every time."""
    import torch
    generator = torch.Generator().manual_seed(1234)

    def ids(*shape):
        return torch.randint(FIRST, size["vocab"], shape, generator=generator)

    if item in ("lm_train", "ranks"):
        return dict(tokens=ids(size["batch"], size["ctx"]))
    if item in ("generate", "ppo"):
        return dict(prompts=ids(128, 24).tolist(), new=32, n=1, minibatch=64)
    if item == "generate_ragged":
        lengths = torch.randint(8, 41, (128,), generator=generator).tolist()
        lengths[:2] = 8, 40  # both ends occur
        return dict(prompts=[ids(n).tolist() for n in lengths], new=32, n=1)
    if item == "generate_shared":
        return dict(prompts=ids(8, min(96, size["ctx"] - 32)).tolist(), new=32, n=16)
    if item == "ranking":
        return dict(prompt=ids(16, 96), answers=ids(16, 4, 32))
    if item == "reward":
        return dict(prompt=ids(64, 96), chosen=ids(64, 32), rejected=ids(64, 32))
    return {}


def amount(item, size, w):
    """How many units the work has, and the fewest operations of its matrix products.

    A token costs 24 C^2 in each layer and 4 C there for each position that it sees; in the last
    layer 4 C^2 unless it is asked for; and 2 C V where its successor is. A multiplication and an
    addition are two operations.
    """
    C, L = size["n_embd"], size["n_layer"]

    def cost(first, last, asked, predictions=0):  # of the tokens at positions first .. last, from 1
        def seen(a, b):
            return (b * (b + 1) - a * (a - 1)) / 2
        n = last - first + 1
        layer = 24 * n * C ** 2 + 4 * C * seen(first, last)
        final = (4 * n + 20 * asked) * C ** 2 + 4 * C * seen(last - asked + 1, last)
        return (L - 1) * layer + final + 2 * C * size["vocab"] * predictions

    def sampling(P, new, n=1):
        return cost(1, P, 1, 1) + n * cost(P + 1, P + new - 1, new - 1, new - 1)

    if item in ("lm_train", "ranks"):
        B, T = w["tokens"].shape
        return B * T, 3 * B * cost(1, T, T, T - 1)
    if item == "reward":
        (B, P), R = w["prompt"].shape, w["chosen"].shape[1]
        return B, 3 * B * (cost(1, P, 0) + 2 * cost(P + 1, P + R, 1))
    if item == "ranking":
        (B, P), (_, K, R) = w["prompt"].shape, w["answers"].shape
        return B * K * (K - 1) // 2, 3 * B * (cost(1, P, 0) + K * cost(P + 1, P + R, 1))
    if item == "ppo":  # sample; PM; reference and its head; critic; then both of them three times
        B, P, R = len(w["prompts"]), len(w["prompts"][0]), w["new"]
        return B, B * (sampling(P, R) + cost(1, P + R, 1) + 4 * cost(1, P + R, R, R)
                       + 4 * cost(1, P + R, R))
    prompts, new, n = w["prompts"], w["new"], w["n"]
    return len(prompts) * n * new, sum(sampling(len(p), new, n) for p in prompts)


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
    return model.GPT(model.GPTConfig(*shape, scalar)).to(here())


def here():
    """The device that main() chose."""
    import torch
    return torch.device(DEVICE[0])


def their_gpt(kind, size, **more):
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    gpt = getattr(transformers, kind)(transformers.GPT2Config(
        vocab_size=size["vocab"], n_positions=size["ctx"], n_embd=size["n_embd"],
        n_layer=size["n_layer"], n_head=size["n_head"], resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=PAD,
        attn_implementation="sdpa", **more))
    return gpt.to(here())


def products():
    """bf16 matrix products for theirs too, where ours have them."""
    _, model = ours()
    return model.autocast(here())


def stepper(network, *losses):
    """A function that takes one optimizer step on the sum of what the functions `losses` give."""
    common, _ = ours()
    optimizer = common.adamw(network, LR)

    def step():
        for loss in losses:
            loss().backward()
        common.update(network, optimizer, LR)
    return step


def micros(rows, tokens, size):
    """Slices of `rows` rows of so many tokens, size["micro"] tokens in each."""
    some = max(1, size.get("micro", 1024) // tokens)
    return [slice(i, min(i + some, rows)) for i in range(0, rows, some)]


def our_lm_train(size, w):
    import torch
    gpt, ids = our_gpt(size), w["tokens"].to(here())
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    count = mask.sum()
    return stepper(gpt, *(lambda cut=cut: -gpt.logprobs(ids[cut], mask[cut]).sum() / count
                          for cut in micros(*ids.shape, size)))


def their_lm_train(size, w):
    gpt, ids = their_gpt("GPT2LMHeadModel", size).train(), w["tokens"].to(here())

    def loss():
        with products():
            return gpt(input_ids=ids, labels=ids, use_cache=False).loss
    return stepper(gpt, loss)


def our_generate(size, w):
    common, model = ours()
    gpt, rows = our_gpt(size).eval(), range(len(w["prompts"]) * w.get("n", 1))

    def step():
        uniform = common.uniforms(rows, w["new"], 0, "bench")
        _, lengths, _ = model.generate(gpt, w["prompts"], w["new"], uniform, w.get("n", 1), pad=PAD)
        assert (lengths == w["new"]).all()
    return step


def their_generate(size, w):
    import torch
    gpt, width = their_gpt("GPT2LMHeadModel", size).eval(), max(map(len, w["prompts"]))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in w["prompts"]], device=here())
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in w["prompts"]],
                        device=here())
    settings = dict(max_new_tokens=w["new"], do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    use_cache=True, eos_token_id=None, pad_token_id=PAD,
                    num_return_sequences=w["n"])

    def step():
        with products():
            out = gpt.generate(input_ids=ids, attention_mask=mask, **settings)
        assert out.shape == (len(ids) * w["n"], width + w["new"])
    return step


def preference_loss(chosen, rejected):
    import torch.nn.functional as F
    return -F.logsigmoid(chosen - rejected).sum()


def our_scores(gpt, prompts, answers):
    """[B, K] of the answers' scores, one row a prompt."""
    import torch
    _, model = ours()
    *rows, ends = model.shared_prompt_rows(prompts, answers, PAD, here())
    return gpt.score(gpt(*rows, at=(torch.arange(len(ends))[:, None], ends)))


def their_scores(gpt, ids):
    with products():
        return gpt(ids, use_cache=False).logits.float()


def our_reward(size, w):
    gpt, prompts = our_gpt(size, scalar=True), w["prompt"].tolist()
    answers, B = list(zip(w["chosen"].tolist(), w["rejected"].tolist())), len(prompts)
    return stepper(gpt, *(
        lambda cut=cut: preference_loss(*our_scores(gpt, prompts[cut], answers[cut]).unbind(1)) / B
        for cut in micros(B, 160, size)))


def their_reward(size, w):
    import torch
    gpt = their_gpt("GPT2ForSequenceClassification", size, num_labels=1).train()
    ids = torch.cat([torch.cat([w["prompt"], w[side]], 1) for side in ("chosen", "rejected")])
    ids = ids.to(here())
    return stepper(gpt, lambda: preference_loss(*their_scores(gpt, ids).chunk(2)) * 2 / len(ids))


def pairs_apart(w):
    """Token rows [12 B, T] of the six pairs of each ranking: the better ones, then the worse."""
    import torch
    i, j = torch.triu_indices(w["answers"].shape[1], w["answers"].shape[1], 1)
    sides = [torch.cat([w["prompt"].repeat_interleave(len(i), 0), w["answers"][:, k].flatten(0, 1)],
                       1) for k in (i, j)]
    return torch.cat(sides).to(here())


def our_ranking(size, w):
    import torch
    ours()
    import preference
    gpt, prompts, answers = our_gpt(size, scalar=True), w["prompt"].tolist(), w["answers"].tolist()
    B = len(prompts)
    counts = torch.full((B,), w["answers"].shape[1], device=here())

    def loss(cut):
        scores = our_scores(gpt, prompts[cut], answers[cut])
        return preference.over_pairs(preference.preference_loss, scores, counts[cut]).sum() / B
    return stepper(gpt, *(lambda cut=cut: loss(cut) for cut in micros(B, 224, size)))


def our_ranking_apart(size, w):
    gpt, ids = our_gpt(size, scalar=True), pairs_apart(w)
    better, worse = ids.chunk(2)

    def loss(cut):
        return preference_loss(*(gpt.score(gpt(x[cut])[:, -1]) for x in (better, worse)))
    return stepper(gpt, *(lambda cut=cut: loss(cut) / len(better)
                          for cut in micros(len(better), 256, size)))


def their_ranking(size, w):
    gpt = their_gpt("GPT2ForSequenceClassification", size, num_labels=1).train()
    ids = pairs_apart(w)
    return stepper(gpt, lambda: preference_loss(*their_scores(gpt, ids).chunk(2)) * 2 / len(ids))


def our_ppo(size, w):
    """One iteration of ppo.py by its own functions; the answers are ids that nobody reads."""
    common, _ = ours()
    import parallel
    import ppo
    import rollout
    n, prompts = len(w["prompts"]), w["prompts"]
    cfg = ppo.Config(samples=n, minibatch=w["minibatch"], epochs=1, new=w["new"],
                     micro=max(1, size.get("micro", 1024) // (len(prompts[0]) + w["new"])))
    tok = SimpleNamespace(stops=(), pad=PAD, eot=-1, eoc=1, decode=lambda ids: "")
    m = SimpleNamespace(policy=our_gpt(size), reference=our_gpt(size).eval().requires_grad_(False),
                        critic=our_gpt(size, True),
                        pm=our_gpt(size, True).eval().requires_grad_(False))
    teams = parallel.Team(m.policy), parallel.Team(m.critic)
    optimizers = common.adamw(m.policy, cfg.lr), common.adamw(m.critic, cfg.critic_lr)

    spent, sampler = dict(generation=[], scoring=[], update=[]), rollout.generate

    def generate(*args, **knobs):
        begin = clock()
        out = sampler(*args, **knobs)
        spent["generation"].append(clock() - begin)
        return out

    def step():
        uniform, begin = common.uniforms(range(n), w["new"], 0, "bench"), clock()
        rollout.generate = generate
        batch = rollout.rollout(cfg, tok, m.policy, m.reference, m.pm, [], prompts, uniform,
                                (0.0, 1.0))
        rollout.generate = sampler
        batch, scored = ppo.advantages_of(cfg, batch, m.critic, cfg.lambda_kl), clock()
        m.policy.train()
        ppo.improve(cfg, tok, batch, range(n), 0, teams, optimizers)
        spent["scoring"].append(scored - begin - spent["generation"][-1])
        spent["update"].append(clock() - scored)
    step.spent = spent
    return step


# ---------------------------------------------------------------- trl, for whole trainers

def trl_tokenizer(size):
    import tokenizers
    import transformers
    words = {f"w{i}": i for i in range(size["vocab"])}
    model = tokenizers.models.WordLevel(words, unk_token="w2")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token=f"w{PAD}", eos_token="w1",
        unk_token="w2", padding_side="left")


def trl_arguments(kind, **more):
    """float32 and no recomputation, as ours; nothing is written or reported."""
    return kind(output_dir=os.path.join(tempfile.gettempdir(), "bench-trl"), bf16=False,
                gradient_checkpointing=False, report_to="none", save_strategy="no",
                logging_strategy="no", use_cpu=here().type == "cpu", disable_tqdm=True, **more)


def trl_train(trainer):
    """Runs it silently; the times at which its optimizer steps ended."""
    import transformers
    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append(time.perf_counter())
    trainer.add_callback(Clock())
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return times


def trl_reward(size, w):
    """Seconds of one step of RewardTrainer.train(): the mean of the second and the third."""
    import datasets
    import torch
    import trl
    tok, rows = trl_tokenizer(size), {
        f"{side}_ids": torch.cat([w["prompt"], w[side]], 1).tolist() * 3
        for side in ("chosen", "rejected")}

    def step():
        trainer = trl.RewardTrainer(
            model=their_gpt("GPT2ForSequenceClassification", size, num_labels=1),
            args=trl_arguments(trl.RewardConfig, max_steps=3,
                               per_device_train_batch_size=len(w["prompt"])),
            train_dataset=datasets.Dataset.from_dict(rows), processing_class=tok)
        first, _, third = trl_train(trainer)
        return (third - first) / 2
    return step


def trl_ranking(size, w):
    """The six pairs of each ranking as comparisons."""
    better, worse = pairs_apart(w).chunk(2)
    P = w["prompt"].shape[1]
    return trl_reward(size, dict(prompt=better[:, :P], chosen=better[:, P:], rejected=worse[:, P:]))


def trl_ppo_trainer(size, w, updates):
    import datasets
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    n = len(w["prompts"])
    arguments = trl_arguments(
        PPOConfig, per_device_train_batch_size=n, gradient_accumulation_steps=1,
        num_mini_batches=n // w["minibatch"], num_ppo_epochs=1, total_episodes=n * updates,
        response_length=w["new"], temperature=1.0, local_rollout_forward_batch_size=n,
        num_sample_generations=0)
    scalar = [their_gpt("GPT2ForSequenceClassification", size, num_labels=1) for _ in "rv"]
    return PPOTrainer(
        args=arguments, processing_class=trl_tokenizer(size), model=their_gpt(
            "GPT2LMHeadModel", size), ref_model=their_gpt("GPT2LMHeadModel", size),
        reward_model=scalar[0], value_model=scalar[1],
        train_dataset=datasets.Dataset.from_dict({"input_ids": w["prompts"]}))


def trl_ppo(size, w):
    """Seconds of one update: of a run of three less one of one, halved."""
    def run(updates):
        start = time.perf_counter()
        trl_train(trl_ppo_trainer(size, w, updates))
        return time.perf_counter() - start
    return lambda: (-run(1) + run(3)) / 2


# ---------------------------------------------------------------- whole processes

def one_update(size="small"):
    """A process: fresh models on disk, one iteration of ppo.py, its report and checkpoint."""
    common, model = ours()
    import ppo
    from data import tokenizer, world
    tok = tokenizer.train_bpe([str(world.document(0, i)) for i in range(60)], SIZES[size]["vocab"])
    with tempfile.TemporaryDirectory() as folder:
        for name, scalar in (("policy", False), ("pm", True)):
            gpt = our_gpt(dict(SIZES[size], vocab=tok.vocab), scalar)
            common.save_checkpoint(Path(folder, f"{name}.pt"), **model.pack(gpt, tok))
        ppo.train(ppo.Config(policy=f"{folder}/policy.pt", pm=f"{folder}/pm.pt", epochs=1, new=32,
                             out=f"{folder}/ppo", iterations=1, calibrate=0, device=DEVICE[0]))


def one_trl_update(size="small"):
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    trl_train(trl_ppo_trainer(SIZES[size], work("ppo", SIZES[size]), 1))


def process(function, arguments=""):
    """The arguments of a process that calls a function of this file, for the same device."""
    folder = str(Path(__file__).resolve().parent)
    return ["python", "-c", f"import sys; sys.path.insert(0, {folder!r}); import bench; "
                            f"bench.DEVICE[0] = {DEVICE[0].split(':')[0]!r}; "
                            f"bench.{function}({arguments})"]


def starter(function):
    def setup(size, w):
        if function == "one_trl_update":
            import trl  # noqa: F401 - without it there is nothing to time
        argv = [sys.executable, *process(function)[1:]]

        def step():
            start = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return time.perf_counter() - start
        return step
    return setup


def train_together(size="small", steps=6):
    """A process of torchrun, or the only one: seconds a step of lm_train, which rank 0 prints."""
    common, _ = ours()
    import torch

    import pretrain
    from parallel import Team, passes, portions
    rank, world, device = common.start(DEVICE[0])
    torch.set_num_threads(max(1, int(os.environ["BENCH_THREADS"]) // world))
    size, times = SIZES[size], []
    rows = work("lm_train", size)["tokens"].tolist()
    team = Team(our_gpt(size).to(device))
    optimizer, micro = common.adamw(team.model, LR), max(1, size["micro"] // size["ctx"])
    for _ in range(steps + 2):
        begin = clock()
        for some, weight in passes(portions(rows, micro), team):
            ids = torch.tensor(some, device=device)
            lengths = torch.full((len(ids),), ids.shape[1], device=device)
            (weight * team(pretrain.lm_loss, ids, lengths) / len(rows)).backward()
        common.update(team.model, optimizer, LR)
        times.append(clock() - begin)
    if rank == 0:
        print(statistics.median(times[2:]))


def together(alone):
    """One process, or more: GPUs, or two on the CPU."""
    def setup(size, w):
        import torch
        world = 1 if alone else torch.cuda.device_count() if here().type == "cuda" else 2
        name = next(k for k, v in SIZES.items() if v is size)
        code = process("train_together", repr(name))
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python",
                f"--nproc_per_node={world}", sys.executable, *code[1:]]
        env = dict(os.environ, BENCH_THREADS=str(torch.get_num_threads()), GOMP_SPINCOUNT="1000")

        def step():
            out = subprocess.run(argv, check=True, stdout=subprocess.PIPE, env=env,
                                 stderr=subprocess.DEVNULL)
            return float(out.stdout)
        return step
    return setup


START = {f"one PPO update ({NAME}), whole process": process("one_update")}


# ---------------------------------------------------------------- kernels

def attention_cases(size):
    """layout -> (units, operations, {implementation: step}): forward and backward."""
    import torch
    import torch.nn.functional as F
    _, model = ours()
    B, T, H = size["batch"], size["ctx"], size["n_head"]
    D, answer = size["n_embd"] // H, size["ctx"] // 16
    P, dtype = T // 2, model.AUTOCAST.get(here().type, torch.float32)
    K, shared = 4, T // 2 + 4 * (T // 16)
    gpt = SimpleNamespace(config=SimpleNamespace(n_embd=H * D, n_head=H), device=here())
    kernels = model.fused(gpt)

    def tensors(B, T):
        qkv = torch.randn(B, T, 3, H, D, device=here(), dtype=dtype, requires_grad=True)
        return qkv, torch.randn(B, H, T, D, device=here(), dtype=dtype)

    def both(B, T, f):
        qkv, grad = tensors(B, T)

        def step():
            qkv.grad = None
            f(*qkv.permute(2, 0, 3, 1, 4).unbind(0)).backward(grad)
        return step

    def torchs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    until = model.shared_prompt_rows([[0] * P] * B, [[[0] * answer] * K] * B, 0, here())[3]
    layout = (kernels.plan(until, D, dtype) if kernels
              else model.Rows(until.shape, model.layout_of(until)))
    cases = {"causal": (B * T, 3 * 2 * B * T * T * H * D, {"torch": both(B, T, torchs)}),
             "shared": (B * shared, 3 * 4 * B * H * D * (P * P / 2 + K * answer * (
                 P + answer / 2)), {
                 NAME: both(B, shared, lambda q, k, v: model.attention(q, k, v, layout)),
                 "torch, apart": both(B * K, P + answer, torchs)})}
    if kernels:
        plain = kernels.plan(torch.full((B, T), T, device=here()), D, dtype)
        cases["causal"][2][NAME] = both(B, T, lambda q, k, v: kernels.attention(q, k, v, plain))
        cases["shared"][2]["flex"] = both(B, shared, flex(until))
    return cases


def flex(until):
    """torch's flex_attention, compiled, with the same mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    B, T = until.shape
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i < until[b, j]), B, None, T, T,
                             device=until.device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def our_decode(size, w):
    """256 rows, the context full but for the token; the fewest bytes: weights and cache once."""
    import torch
    _, model = ours()
    gpt, new = our_gpt(size).eval(), 2
    prompts = [[FIRST] * (min(size["ctx"], 512) - new)] * 256
    with torch.no_grad():
        _, cache = model.prefill(gpt, prompts, 1, new, PAD)
        ids, slot = torch.full((256,), FIRST, device=here()), torch.tensor([1], device=here())
        slot = slot if cache.ours else 1
        f = lambda ids, at, slot: model.GPT.decode(gpt, ids, at, slot, cache)  # noqa: E731
        if here().type == "cuda" and cache.ours:
            f = model.replayed(f, ids.clone(), cache.lengths.clone(), slot)
    number = sum(p.numel() * p.element_size() for p in gpt.parameters())
    number += sum(x.numel() * x.element_size() for kv in cache.prompt for x in kv)

    def step():
        with torch.no_grad():
            f(ids, cache.lengths, slot)
    step.bytes = number
    return step


UNITS = dict(lm_train="tokens/s", generate="new tokens/s", generate_ragged="new tokens/s",
             generate_shared="new tokens/s", reward="comparisons/s", ranking="comparisons/s",
             ppo="samples/s", start="processes/s", decode="new tokens/s", ranks="tokens/s")
CASES = dict(lm_train=our_lm_train, generate=our_generate, generate_ragged=our_generate,
             generate_shared=our_generate, reward=our_reward, ranking=our_ranking, ppo=our_ppo,
             start=starter("one_update"), decode=our_decode, ranks=together(alone=True))
OTHERS = {  # name -> item -> setup; apart: the same work without what this project does for it
    NAME + ", apart": dict(ranking=our_ranking_apart),
    NAME + ", processes": dict(ranks=together(alone=False)),
    "transformers": dict(lm_train=their_lm_train, generate=their_generate,
                         generate_ragged=their_generate, generate_shared=their_generate,
                         reward=their_reward, ranking=their_ranking),
    "trl": dict(reward=trl_reward, ranking=trl_ranking, ppo=trl_ppo,
                start=starter("one_trl_update"))}


# ---------------------------------------------------------------- measuring

def matrix_product():
    """Operations of a square matrix product, and a function that does it."""
    import torch
    _, model = ours()
    n, dtype = (8192, model.AUTOCAST["cuda"]) if here().type == "cuda" else (2048, torch.float32)
    a, b, out = torch.randn(3, n, n, generator=torch.Generator().manual_seed(0)).to(here(), dtype)
    return 2 * n ** 3, lambda: torch.mm(a, b, out=out)


def clock():
    """Seconds, once the device has done what it was told."""
    import torch
    if here().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(step):
    """What a step took; it may return seconds of its own."""
    start, own = clock(), step()
    return own if isinstance(own, float) else clock() - start


def interleaved(steps, repeats):
    """name -> seconds of each repeat; a first one of each, which allocates, is left out."""
    took = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name in list(steps)[::-1 if repeat % 2 else 1]:
            took[name].append(seconds(steps[name]))
    return {name: times[1:] for name, times in took.items()}


def measure(item, size, repeats):
    """A dict of results for each implementation, and for attention of each layout."""
    if item == "attention":
        for layout, (count, operations, steps) in attention_cases(size).items():
            yield from told(f"{item}, {layout}", "tokens/s", count, operations, steps, repeats)
        return
    w = work(item, size)
    count, operations = amount(item, size, w) if w else (256 if item == "decode" else 1, 0)
    steps = {NAME: CASES[item](size, w)}
    for name, cases in OTHERS.items():
        if item in cases:
            with contextlib.suppress(ImportError):
                steps[name] = cases[item](size, w)
    yield from told(item, UNITS[item], count, operations, steps, repeats)


def told(item, unit, count, operations, steps, repeats):
    median, (of_product, product) = statistics.median, matrix_product()
    took = interleaved({"torch.mm": product, **steps}, repeats)
    machine = [of_product / t / 1e9 for t in took.pop("torch.mm")]
    first = took.get(NAME) or next(iter(took.values()))
    for name, times in took.items():
        speeds, gflops = [count / t for t in times], [operations / t / 1e9 for t in times]
        row = dict(item=item, impl=name, unit=unit, median=median(speeds), min=min(speeds),
                   max=max(speeds), n=repeats, gflops=median(gflops), mm_gflops=median(machine),
                   of_mm=median(g / m for g, m in zip(gflops, machine)),
                   ratio=median(t / u for t, u in zip(times, first)), load=os.getloadavg()[0])
        if hasattr(steps[name], "bytes"):
            row["of_bandwidth"] = steps[name].bytes / median(times) / bandwidth()
        for part, own in getattr(steps[name], "spent", {}).items():     # the first does not count
            row[f"in_{part}"] = median(own[1:]) / median(times)
        yield row


def bandwidth():
    """Bytes a second that a large copy reads and writes."""
    import torch
    a = torch.empty(2 ** 28 if here().type == "cuda" else 2 ** 26, device=here())
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / min(seconds(lambda: b.copy_(a)) for _ in range(9))


def environment(cfg):
    """What the numbers depend on."""
    import torch
    cpu, info, versions = platform.processor(), Path("/proc/cpuinfo"), {}
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
    for name in ("torch", "triton", "transformers", "trl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpu = torch.cuda.get_device_name() if here().type == "cuda" else None
    return dict(item="environment", gpu=gpu, cpu=cpu, cores=os.cpu_count(),
                threads=torch.get_num_threads(),
                python=platform.python_version(), **versions, size=cfg.size, repeats=cfg.repeats,
                load=os.getloadavg(), when=time.strftime("%Y-%m-%d %H:%M:%S"))


def markdown(path):
    """The table of a file of JSON lines, with what it depends on."""
    told, *rows = (json.loads(line) for line in Path(path).read_text().splitlines())
    versions = ", ".join(f"{k} {told[k]}" for k in (
        "python", "torch", "triton", "transformers", "trl") if k in told)
    product = statistics.median(r["mm_gflops"] for r in rows)
    lines = [f"{told['gpu'] or told['cpu']}, {told['threads']} threads; {versions}; size "
             f"{told['size']}, {told['repeats']} repeats, {told['when'][:10]}; torch.mm reaches "
             f"{product:,.0f} GFLOP/s.", "",
             f"| item | | median | min to max | unit | GFLOP/s | of torch.mm | {NAME} is |",
             "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        speed = [f"{r[k]:,.0f}" if r[k] >= 20 else f"{r[k]:.3g}" for k in ("median", "min", "max")]
        work = (f"{r['gflops']:,.0f}", f"{r['of_mm']:.1%}") if r["gflops"] else ("", "")
        cells = (r["item"], r["impl"], speed[0], f"{speed[1]} to {speed[2]}", r["unit"], *work,
                 f"{r['ratio']:.2f}x")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(cfg):
    import torch
    common, _ = ours()
    if cfg.show:
        return print("\n".join(map(markdown, cfg.show.split(","))))
    warnings.simplefilter("ignore")
    os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false",
                      HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    DEVICE[0] = str(common.device_of(cfg.device))
    if cfg.keep_memory:
        common.keep_memory()
    known = [*CASES, "attention"]
    items = cfg.items.split(",") if cfg.items else [
        i for i in known if i != "decode" or here().type == "cuda"]
    if not set(items) <= set(known) or cfg.size not in SIZES or cfg.repeats < 1:
        raise common.UserError(f"--items {','.join(known)}; --size {' or '.join(SIZES)}; "
                               "--repeats from 1")
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
    print(f"\n{'item':<17} {'implementation':<14} {'median':>9} {'min':>9} {'max':>9} {'unit':<14}"
          f"{'GFLOP/s':>8} {'of mm':>6} {NAME + ' is':>9}")
    for r in rows:
        speeds = [f"{r[k]:,.0f}" if r[k] > 20 else f"{r[k]:.3f}" for k in ("median", "min", "max")]
        work = f"{r['gflops']:>8.1f} {r['of_mm']:>6.1%}" if r["gflops"] else f"{'':>15}"
        print(f"{r['item']:<17} {r['impl']:<14} {speeds[0]:>9} {speeds[1]:>9} {speeds[2]:>9} "
              f"{r['unit']:<14}{work} {r['ratio']:>8.2f}x"
              + (f"  {r['of_bandwidth']:.1%} of the bandwidth" if "of_bandwidth" in r else "")
              + "".join(f"  {k[3:]} {v:.0%}" for k, v in r.items() if k.startswith("in_")))
    if os.getloadavg()[0] > 1.5 * torch.get_num_threads():
        print("\nthe machine has other work: these speeds are too low", file=sys.stderr)


if __name__ == "__main__":
    ours()[0].entry(main, Config, __doc__)
