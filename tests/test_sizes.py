"""The counted memory against what torch allocates, and the tables made of it.

The profiler's memory events are every allocation of a step, those inside an operation too. The
GPU's column is measured on the CPU, in bf16 by autocast and with torch's own gelu; what differs on
a GPU, its attention and its allocator, nobody has measured.

Proved alive by: a block without its output, with another gelu, without the mask; the last block's
gathered rows, passing gradients of a block and of its attention, and the head's of the embedding
left out; two classes of distillation as one; a checkpointed block with its input twice; bf16 copies
never, or for ever; caches of 4 bytes on GPUs, not copied; prompts read for nothing; moments not
cut; FLOPs of half the attention; a wire's time halved, or of another machine's; a full card.
"""

import json
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import distill
import model as model_file
import ppo
import preference
import pretrain
import sft
from common import UserError, adamw, load_checkpoint, parse_flags, start, update
from data.tokenizer import loads
from model import PYTHIA, SIZES, GPTConfig, generate, sized
from parallel import Team
from runs import sizes
from runs.counts import Job, block, cache, parameters, peak, phases, scalar

ROOT = Path(__file__).resolve().parent.parent
TOK = SimpleNamespace(pad=0, eod=1, eoc=2, eot=3, stops=(), decode=lambda ids: "it")
GPT2 = GPTConfig(500, 97, 3, 4, 64)
NEOX = GPTConfig(1100, 81, 2, 3, 48, **PYTHIA)


# ---------------------------------------------------------------- measured

def allocated(f):
    """The most bytes that live at once in f(): all of torch's allocations on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profile:
        f()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def model_of(c, checkpoint=False, trained=True):
    model = model_file.GPT(c).train(trained).requires_grad_(trained)
    model.use(checkpoint)
    return model


def ids(c, *shape):
    return torch.randint(6, c.vocab, shape)


def losses(job):
    """f(team): the loss of a micro-batch of rows that are all as long as they may be."""
    c, B, T, new = job.model, job.micro, job.length, job.new
    full = torch.full((B,), T)
    if job.stage == "pretrain":
        return lambda team: team(pretrain.lm_loss, ids(c, B, T), full)
    if job.stage == "sft":
        return lambda team: team(sft.sft_loss, ids(c, B, T), full, torch.full((B,), new))
    if job.stage == "distill":
        texts = ids(c, B, T - 1).tolist()
        taught = [(torch.randn(T - 1, 50).log_softmax(-1), ids(c, T - 1, 50).int())] * B
        return lambda team: team(distill.student_loss, *distill.student_batch(
            TOK, texts, taught, range(B), "cpu"))
    rows = [(ids(c, T - 2 * new).tolist(), ids(c, 2, new).tolist()) for _ in range(B)]
    return lambda team: team(preference.rows_loss, TOK, rows, torch.ones(B), torch.ones(B))[0]


def step_of(job):
    """Two optimizer steps of a stage, of one micro-batch and of two, as its train() does them."""
    def run():
        held = [model_of(job.model, trained=False)] if job.stage == "distill" else []
        c = scalar(job.model) if job.stage == "preference" else job.model
        team = Team(model_of(c, job.checkpoint), job.shard, torch.device("cpu"))
        loss = losses(job)
        optimizer = adamw(team.model, 1e-3)
        for micros in (1, 2):
            for _ in range(micros):
                loss(team).backward()
            update(team.model, optimizer, 1e-3)
        return held
    return run


def ppo_of(job):
    """Two iterations of ppo.py; no answer ends before its last token."""
    c, made = job.model, scalar(job.model)
    cfg = ppo.Config(samples=job.samples, minibatch=job.samples, micro=job.micro, new=job.new,
                     epochs=1)

    def ask(own, stage):
        return [[("human", "?")] for _ in own], ids(c, len(own), job.length - job.new).tolist()

    def run():
        m = SimpleNamespace(
            policy=model_of(c, job.checkpoint), critic=model_of(made, job.checkpoint), first=None,
            reference=model_of(c, trained=False), pm=model_of(made, trained=False), test_pm=None)
        teams = Team(m.policy), Team(m.critic)
        optimizers = [adamw(x.model, 1e-4) for x in teams]
        for step in range(2):
            own = range(step * job.samples, (step + 1) * job.samples)
            with ppo.reading(m, teams) as seen:
                batch = ppo.scored(cfg, TOK, seen, ask, own, "rl", dict(norm=(0.0, 1.0)), step == 1)
                batch = ppo.advantages_of(cfg, batch, seen.critic, 0.03)
            m.policy.train()
            ppo.improve(cfg, TOK, batch, list(own), step, teams, optimizers)
    return run


def jobs():
    for checkpoint in (False, True):
        for stage in ("pretrain", "distill", "sft", "preference"):
            yield Job(stage, GPT2, 6, 96, 24, checkpoint=checkpoint, cuda=False)
            yield Job(stage, NEOX, 5, 80, 16, checkpoint=checkpoint, cuda=False)
        yield Job("sft", GPTConfig(300, 200, 4, 3, 48), 2, 200, 150, checkpoint=checkpoint,
                  cuda=False)
        yield Job("pretrain", GPTConfig(4000, 64, 2, 2, 96), 4, 64, checkpoint=checkpoint,
                  cuda=False)
        yield Job("preference", GPTConfig(300, 300, 2, 2, 32), 2, 300, 20, checkpoint=checkpoint,
                  cuda=False)
        yield Job("ppo", GPT2, 4, 96, 8, 8, checkpoint=checkpoint, cuda=False)
        yield Job("ppo", NEOX, 4, 80, 6, 8, checkpoint=checkpoint, cuda=False)
    yield Job("ppo", GPTConfig(300, 97, 6, 2, 32), 4, 96, 12, 48, cuda=False)      # caches


def name_of(job):
    return f"{job.stage}-{'neox' if job.model.parallel else 'gpt2'}-{job.model.n_embd}" + (
        "-again" if job.checkpoint else "")


@pytest.mark.parametrize("job", [*jobs()], ids=name_of)
def test_a_stage_takes_the_counted_memory(job):
    real = allocated((ppo_of if job.stage == "ppo" else step_of)(job))
    # No answer of these ends early, so none is copied.
    counted = peak(job, ("copies",))[0]
    assert abs(counted / real - 1) < 0.06


@pytest.mark.parametrize("c, rows, new", [(GPTConfig(500, 96, 4, 4, 64), 40, 24),
                                          (GPTConfig(200, 100, 8, 3, 48, **PYTHIA), 12, 50),
                                          (GPTConfig(4000, 96, 3, 2, 96), 8, 24)])
@pytest.mark.parametrize("ending", [0, 4])
def test_sampling_takes_the_counted_memory(c, rows, new, ending):
    """With a quarter of the rows ending at once, caches of the others are copied."""
    job = Job("sampling", c, length=c.n_ctx, new=new, samples=rows, cuda=False)
    uniform = torch.full((rows, new), 0.5)
    uniform[:rows // 4 if ending else 0] = 0                  # draws token 0, which stops a row
    prompts = ids(c, rows, c.n_ctx - new).tolist()
    real = allocated(lambda: generate(model_of(c, trained=False), prompts, new, uniform,
                                      stops=(0,)))
    assert abs(peak(job, () if ending else ("copies",))[0] / real - 1) < 0.08


@pytest.mark.parametrize("c, stage, checkpoint", [
    (GPT2, "pretrain", False), (GPT2, "sft", True), (NEOX, "distill", False), (NEOX, "sft", True)])
def test_the_gpus_column_is_that_of_bf16(c, stage, checkpoint, monkeypatch):
    monkeypatch.setitem(model_file.AUTOCAST, "cpu", torch.bfloat16)
    monkeypatch.setattr(model_file, "gelu", lambda x: F.gelu(x, approximate="tanh"))
    job = Job(stage, c, 6, 80, 20, checkpoint=checkpoint)
    assert peak(job)[0] == pytest.approx(allocated(step_of(job)), rel=0.06)


WIDE = GPTConfig(300, 64, 8, 4, 192)
ASK = "import sys; sys.path[:0] = sys.argv[1:3]; import test_sizes; test_sizes.told(*sys.argv[3:])"


def told(checkpoint, shard):
    """As one rank of torchrun's: what a step allocates, on stdout."""
    rank, world, _ = start("cpu")
    most = allocated(step_of(Job("pretrain", WIDE, 2, 64, checkpoint=bool(int(checkpoint)),
                                 ranks=world, shard=bool(int(shard)), cuda=False)))
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(most)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint, shard", [(0, 0), (0, 1), (1, 1)])
def test_a_rank_of_two_takes_the_counted_memory(checkpoint, shard):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-c", ASK, ROOT, ROOT / "tests", str(checkpoint), str(shard)]
    ranks = [subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, env=dict(
        os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port))) for r in range(2)]
    most = int([x.communicate(timeout=120)[0] for x in ranks][0].split()[-1])
    job = Job("pretrain", WIDE, 2, 64, checkpoint=bool(checkpoint), ranks=2, shard=bool(shard),
              cuda=False)
    assert peak(job)[0] == pytest.approx(most, rel=0.1)


# ---------------------------------------------------------------- whole processes

RESIDENT = r"""
import re, runpy, sys
del sys.argv[0]
sys.path.insert(0, sys.argv.pop(0))
import common
common.keep_memory = lambda: None
runpy.run_path(sys.argv[0], run_name="__main__")
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
"""


def resident(script, **flags):
    """Peak resident bytes of a stage's process, whose malloc gives freed tensors back at once."""
    argv = [x for k, v in flags.items()
            for x in ("--" + k.replace("_", "-"), *([] if v is True else [v]))]
    done = subprocess.run([sys.executable, "-c", RESIDENT, ROOT, ROOT / script, *map(str, argv)],
                          text=True, capture_output=True, cwd=ROOT, timeout=300,
                          env=dict(os.environ, OMP_NUM_THREADS="1",
                                   MALLOC_MMAP_THRESHOLD_="262144"))
    assert done.returncode == 0, done.stderr[-500:]
    return int(done.stdout.split()[-1]) * 1024


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with text of long documents, and comparisons of long prompts."""
    folder, rng = tmp_path_factory.mktemp("sizes"), random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(60)]
    (folder / "text.txt").write_text(
        "\n\n".join(" ".join(rng.choices(words, k=2000)) for _ in range(40)))
    lines = [[" ".join(rng.choices(words, k=k)) for k in (200, 20, 20)] for _ in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(dict(
        prompt=f"\n\nHuman: {prompt}\n\nAssistant:", chosen=a, rejected=b)) + "\n"
        for prompt, a, b in lines))
    return folder


def pretraining(begun, out, size, micro=8, **more):
    return dict(text=begun / "text.txt", vocab=400, context=512, size=size, steps=2, batch=16,
                micro=micro, device="cpu", out=begun / out, **more)


linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as on Linux")


@linux
@pytest.mark.long
@pytest.mark.parametrize("more", [{}, dict(checkpoint=True)])
def test_a_process_of_pretraining(begun, more):
    """Beyond what the process of a tiny model takes: imports, text, tokenizer."""
    name = f"{len(more)}"
    rest = resident("pretrain.py", **pretraining(begun, f"nano{name}", "nano", 1))
    real = resident("pretrain.py", **pretraining(begun, f"small{name}", "small", **more)) - rest
    vocab = load_checkpoint(begun / f"small{name}")["gpt"]["vocab"]
    job = Job("pretrain", sized("small", vocab, 512), 8, 512, cuda=False, **more)
    assert peak(job)[0] > 4e8 * (0.9 if more else 2)
    assert peak(job)[0] == pytest.approx(real, rel=0.1)


@linux
@pytest.mark.long
def test_a_process_of_the_preference_model(begun):
    """The checkpoint that it began from stays in its file, weights and moments."""
    found = []
    for size, micro in (("nano", 1), ("small", 8)):
        resident("pretrain.py", **pretraining(begun, f"base-{size}", size))
        found.append(resident(
            "preference.py", init=begun / f"base-{size}", data=begun / "pairs.jsonl",
            test=begun / "pairs.jsonl", pairs=0, batch=16, micro=micro, device="cpu",
            out=begun / f"pm-{size}"))
    source = load_checkpoint(begun / "base-small")
    tok, c = loads(source["tokenizer"]), GPTConfig(**source["gpt"])
    lines = preference.read_comparisons(begun / "pairs.jsonl")
    row = max(map(preference.size_of, preference.encode_comparisons(tok, lines, 512)[0]))
    job = Job("preference", c, 8, row, cuda=False)
    assert peak(job)[0] == pytest.approx(found[1] - found[0], rel=0.1)


# ---------------------------------------------------------------- by hand

def test_counts_by_hand():
    """GPT-2's 124M: bytes of a token in a block, of a row's cache, of a step's phases."""
    c = sized("gpt2", 50262, 1024)
    assert block(c, False) == (4 * (6 * 768 + 14), 4 * (14 * 768 + 2))
    assert block(c, True) == (14 * 768 + 4 * 12 + 8, 22 * 768 + 8)
    assert block(NEOX, False, 7) == (4 * (6 * 48 + 5) + 7, 4 * (9 * 48 + 2))
    assert block(NEOX, True) == (14 * 48 + 20, 18 * 48 + 8)
    assert cache(c, 1024, True) == 37_748_736 and cache(c, 1024, False) == 75_497_472
    N, V = 124_475_904, 50_304
    job = Job("pretrain", c, 16)
    assert phases(job)["update"] == dict(weights=4 * N, adam=8 * N, gradients=4 * N)
    head = phases(job)["head"]
    assert head["logits"] == 3 * 4 * V * 16 * 1023
    assert head["bf16"] == 2 * 12 * 12 * 768 ** 2 + 2 * V * 768
    assert head["kept"] == (16384 * (12 * 10808 + 11 * 16904)
                            + 16368 * (16904 + 2 * 768 + 6 * 768 + 8))
    kept = phases(Job("sft", NEOX, 5, 80, 16))["head"]["kept"]      # of 400 tokens, 80 are asked
    assert kept == 2 * 400 * 692 + 872 * 400 + 80 * (872 + 6 * 48 + 6 * 48 + 8)
    again = phases(replace(job, checkpoint=True))["a block"]
    assert again["kept"] == 11 * 16384 * 3072 and again["table"] == 4 * V * 768
    assert again["again"] == 16384 * (10808 + 16904 - 3072)
    assert again["passing"] == 16384 * 16 * 768 and again["bf16"] == 2 * 12 * 768 ** 2


def test_what_ranks_hold():
    """Sharding cuts what is trained, and nothing else; plain ranks keep room for gradients."""
    c = GPT2
    N, S = parameters(c), parameters(scalar(c))
    alone, plain, cut = (phases(Job("ppo", c, ranks=r, shard=s))
                         for r, s in ((1, False), (4, False), (4, True)))
    frozen = 4 * (N + S)
    assert alone["update"] == plain["update"] == dict(
        weights=frozen, adam=2 * frozen, gradients=frozen, frozen=frozen)
    assert cut["update"] == dict(weights=frozen // 4, adam=frozen // 2, gradients=frozen // 4,
                                 frozen=frozen)
    assert "gradients" not in alone["sampling"] and plain["sampling"]["gradients"] == frozen
    assert cut["sampling"]["whole"] == frozen and "whole" not in plain["sampling"]
    tables, blocks = 4 * (512 + 97 + 2) * 64, 4 * (12 * 64 * 64 + 13 * 64)
    assert cut["head"]["gathered"] == 2 * tables + 4 * blocks
    assert sum(cut["head, critic"].values()) < sum(cut["head"].values())
    assert alone["scoring"]["logits"] == 6 * 4 * 512 * 8 * 128
    job = Job("ppo", c, ranks=4, shard=True)
    assert peak(job)[0] - peak(job, ("frozen",))[0] == frozen


def test_hours_by_hand():
    c, cfg = sized("gpt2", 50262, 1024), sizes.Config()
    token = 6 * 12 * 12 * 768 ** 2 + 12 * 12 * 768 * 1024 + 6 * 50304 * 768
    assert sizes.training(c, 1, 1024) == token
    rate = 989e12 * 0.35
    assert sizes.seconds(cfg, "pretrain", c) == pytest.approx(1e10 * token / rate)
    assert sizes.pretrained(sized("pythia-1b", 50281, 2048)) == 20 * 1_011_781_632
    assert sizes.seconds(cfg, "preference", c) == pytest.approx(
        160e3 * 250 * (6 * 12 * 12 * 768 ** 2 + 12 * 12 * 768 * 250) / rate)
    student, teacher = (24 * 12 * 768 ** 2 + 4 * 12 * 768 * T for T in (512, 512 + 421))
    head = 2 * 50304 * 768
    assert sizes.seconds(cfg, "distill", c) == pytest.approx(
        350e6 * (3 * student + 933 / 512 * teacher + 4 * head) / rate)
    spent = sizes.of_a_sample(cfg, c)
    step = 8 * 124_475_904 + 64 * 36_864 * (278 - 64)        # bytes a token of all rows
    body = 24 * 12 * 768 ** 2 + 4 * 12 * 768 * 278
    prompt = 24 * 12 * 768 ** 2 + 4 * 12 * 768 * 150
    assert spent["sampling"] == pytest.approx(128 * step / 3.35e12 / 64 + 150 * prompt / rate)
    assert spent["scoring"] == pytest.approx((4 * 278 * body + 2 * 128 * head) / rate)
    assert spent["update"] == pytest.approx(3 * (2 * 278 * body + 128 * head) / rate)
    assert sizes.wire(cfg, c, 8) == pytest.approx(7 * 124_475_904 / 450e9)
    assert sizes.wire(cfg, c, 16) == pytest.approx(7.5 * 124_475_904 / 25e9)


# ---------------------------------------------------------------- what is printed

def output(capsys, **flags):
    sizes.main(sizes.Config(**flags))
    return capsys.readouterr().out.strip().splitlines()


def test_the_default_table_has_all_sizes(capsys):
    lines = output(capsys)
    assert [x.split(" | ")[0].strip("| ") for x in lines[2:]] == [*SIZES, "hh-52b"]
    row = next(x for x in lines if x.startswith("| gpt2 ")).strip("| ").split(" | ")
    c = sized("gpt2", 50262, 1024)
    for cell, (stage, micro, length) in zip(row[1:], [
            ("pretrain", 16, 1024), ("distill", 8, 512), ("sft", 8, 1024), ("preference", 8, 1024),
            ("ppo", 8, 1024)]):
        assert cell == " / ".join(f"{peak(Job(stage, c, micro, length, checkpoint=x))[0] / 1e9:.3g}"
                                  for x in (False, True))


def test_one_estimate_term_by_term(capsys):
    lines = output(capsys, stage="ppo", micro=8, length=512, ranks=8, shard=True, device="cpu")
    job = Job("ppo", sized("gpt2", 50262, 1024), 8, 512, ranks=8, shard=True, cuda=False)
    most, name, terms = peak(job)
    assert lines[0] == f"ppo, gpt2: {most / 1e9:.3g} GB, most in the phase '{name}'"
    assert [x.split()[1] for x in lines[1:-1]] == [*terms]
    assert sum(float(x.split()[0]) for x in lines[1:-1]) == pytest.approx(most / 1e9, rel=0.01)
    assert lines[-1].startswith("others: update ")


def test_the_fewest_gpus():
    """1 while it fits, then a power of two that shares; none where what is not cut is too much."""
    cfg = sizes.Config()
    assert sizes.fewest(cfg, "pretrain", "gpt2") == "1"
    ranks = int(sizes.fewest(cfg, "pretrain", "pythia-6.9b"))
    c = sizes.shape("pythia-6.9b")
    most = [peak(Job("pretrain", c, 1, 2048, samples=8, ranks=r, shard=r > 1, checkpoint=True))[0]
            for r in (ranks // 2, ranks)]
    assert ranks in (2, 4, 8, 16) and most[0] > 72e9 >= most[1]
    assert sizes.fewest(cfg, "ppo", "hh-52b") == "-"


def test_what_a_person_may_mistake():
    for flags, words in ((dict(table="x"), "--table x: choose from memory"),
                         (dict(stage="x"), "--stage x: choose from pretrain"),
                         (dict(stage="ppo", size="x"), "--size: size 'x'"),
                         (dict(device="tpu"), "--device tpu: cuda or cpu"),
                         (dict(ranks=0), "--ranks 0: above 0"), (dict(mfu=2.0), "--mfu 2: a share"),
                         (dict(memory=float("nan")), "--memory nan: above 0"),
                         (dict(micro=-1), "--micro -1: 0 or more"),
                         (dict(length=-1), "--length -1: 0 or more"),
                         (dict(table="hours", new=278), "--new 278: fewer than the 278 tokens"),
                         (dict(stage="ppo", new=1024), "--new 1024: fewer than the 1024 tokens"),
                         *((dict({name: 0}), f"--{name} 0: above 0") for name in (
                             "new", "samples", "flops", "mfu", "bandwidth", "link", "network"))):
        with pytest.raises(UserError, match=re.escape(words)):
            sizes.main(sizes.Config(**flags))


def test_the_documents_tables_are_those_of_their_commands(capsys):
    """Each table of docs/scale.md stands under its command, and is what that prints."""
    text = (ROOT / "docs" / "scale.md").read_text()
    found = re.findall(r"^    python runs/sizes\.py(.*)\n\n((?:[|].*\n)+|```\n[^`]*```\n)", text,
                       re.M)
    assert len(found) >= 5 and len(found) == text.count("python runs/sizes.py")
    for flags, shown in found:
        lines = [x for x in shown.splitlines() if x != "```"]
        assert lines == output(capsys, **vars(parse_flags(sizes.Config, flags.split()))), flags
