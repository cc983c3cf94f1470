"""Data parallelism and sharding: the weights of one process, from any number of them, cut any way.

The oracle is the run on one process without torch.distributed: weights to 1e-5 after 10 optimizer
steps, the norm of all gradients at each. A rank that hangs is named by the others in less than a
minute; one that is killed loses nothing, also under torchrun's elastic agent.

Proved alive by: gradients averaged over ranks; summed in the first pass, in none; a dummy pass of
weight 1, no dummy pass; as many passes as the rank's own rows need; all rows on each rank; buckets
laid out by the first real step; blocks that are not cut; tensors of a checkpoint lost, those of the
whole copy not collected, moments not cut at loading; no groups made at the start, waits without a
limit, a collective's failure not caught, a killed rank not looked for; other ranks' steps not
compared; a step with a gradient that is not finite; --shard held against a resumed run; PPO's
gradients of text summed over ranks twice, as many of its passes as the rank has; an hour's wait of
rank 0 for one that hangs; three options at once not refused; harm.py's shards evaluated, its
optimizer lost; a row that no rank has.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from test_ranks import close, losses
from tiny import PATIENCE, ROOT, checkpoint, distance, same

import common
from data.tokenizer import loads
from model import GPT, GPTConfig, pack
from parallel import even, portions

LOOPS = ("pretrain", "distill", "sft", "pmp", "pm", "ppo", "harm")
SHARD = ["--shard"]
PYTHIA = dict(n_ctx=320, n_layer=2, n_head=2, n_embd=32, rotary=0.25, parallel=True, tied=False,
              exact_gelu=True)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def cuts(stages):
    """Stage, ranks and micro-batch so that each two of them meet: half of all triples."""
    return [((slow if (i + j) % 3 == 0 else long)(stage, (2, 4)[(i + j) % 2], micro))
            for i, stage in enumerate(stages) for j, micro in enumerate((1, 2, 8))]


def well(ranks):
    for rank, done in enumerate(ranks):
        assert done.code == 0, f"rank {rank}: {done.err}"


def norms(folder):
    return [x[2] for x in losses(folder, "grad_norm", "critic_norm")]


def equal(tiny, stage, folder):
    """Weights after 10 optimizer steps or more, and gradients' norms, which Adam doesn't see."""
    networks = 2 if stage == "ppo" else 1
    assert len(tiny.report(stage)["sums"]) - 1 >= 10 * networks
    close(tiny.whole(stage), folder)
    assert norms(folder) == pytest.approx(norms(tiny.whole(stage)), rel=1e-3)


# ---------------------------------------------------------------- any number, any cut

@pytest.mark.parametrize("stage, world, micro", [("sft", 2, 3), *cuts(LOOPS)])
def test_weights_are_those_of_one_process(tiny, nursery, tmp_path, stage, world, micro):
    well(nursery.ranks(world, tiny.command(stage, tmp_path / "run", micro=micro)))
    equal(tiny, stage, tmp_path / "run")


@pytest.mark.parametrize("stage, world, micro", [
    ("pretrain", 2, 3), ("ppo", 2, 3), *cuts(LOOPS)])
def test_sharded_weights_are_those_of_one_process(tiny, nursery, tmp_path, stage, world, micro):
    """With checkpoints, samples and evaluations by rank 0 between the steps."""
    argv = [*tiny.command(stage, tmp_path / "run", micro=micro), "--shard"]
    well(nursery.ranks(world, argv))
    equal(tiny, stage, tmp_path / "run")


@pytest.fixture(scope="module")
def pythia(tiny, tmp_path_factory):
    """A checkpoint of GPT-NeoX's form with the tiny base's tokenizer."""
    folder = tmp_path_factory.mktemp("pythia")
    tok = loads(checkpoint(tiny.whole("base"))["tokenizer"])
    model = GPT(GPTConfig(tok.vocab, **PYTHIA)).reset(3)
    common.save_checkpoint(folder / "ckpt.pt", **pack(model, tok))
    return folder


@pytest.mark.parametrize("stage, world, micro, more", [
    ("pretrain", 2, 3, ["--shard", "--checkpoint"]), long("pretrain", 4, 2, []),
    slow("ppo", 2, 2, ["--shard", "--checkpoint"]), long("distill", 2, 2, ["--shard"])])
def test_a_model_of_pythias_form(tiny, nursery, tmp_path, pythia, stage, world, micro, more):
    """Rotary positions, a parallel residual, an untied head; its blocks computed twice."""
    flags = {"ppo": dict(policy=pythia, critic="policy")}.get(stage, dict(init=pythia))
    one = nursery.run(tiny.command(stage, tmp_path / "one", **flags))
    assert one.code == 0, one.err
    flags["micro"] = micro
    well(nursery.ranks(world, [*tiny.command(stage, tmp_path / "run", **flags), *more]))
    assert ("lm_head.weight" in checkpoint(tmp_path / "one")["model"]) and norms(tmp_path / "one")
    close(tmp_path / "one", tmp_path / "run")
    assert norms(tmp_path / "run") == pytest.approx(norms(tmp_path / "one"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard"]])
def test_a_rank_without_rows_takes_part(tiny, nursery, tmp_path, more):
    """One row a step for two ranks, with blocks computed again in the backward pass."""
    flags = dict(steps=3, batch=1)
    assert nursery.run(tiny.command("pretrain", tmp_path / "one", **flags)).code == 0
    argv = [*tiny.command("pretrain", tmp_path / "two", **flags), "--checkpoint", *more]
    well(nursery.ranks(2, argv))
    assert distance(*(checkpoint(tmp_path / x)["model"] for x in ("one", "two"))) <= 1e-5


@pytest.mark.parametrize("world, more", [(2, []), slow(3, ["--shard"])])
def test_ppo_with_text_and_averages_gives_the_weights_of_one_process(tiny, nursery, tmp_path, world,
                                                                     more):
    """Two losses of one policy in a step, summed over ranks once; ptx texts that a rank lacks; and
    weights that follow the policy. One critic's weight has a gradient so near 0 that Adam makes a
    step of its rounding, so the steps are small.
    """
    flags = dict(iterations=2, minibatch=2, ptx=0.5, ema=0.5, anchor=0.5, every=10, critic_lr=1e-4)
    assert nursery.run(tiny.command("ppo", tmp_path / "one", **flags)).code == 0
    well(nursery.ranks(world, [*tiny.command("ppo", tmp_path / "all", **flags), *more]))
    close(tmp_path / "one", tmp_path / "all")
    ends = [{k: checkpoint(tmp_path / x)[k] for k in ("ema", "reference")} for x in ("one", "all")]
    assert distance(*ends) <= 1e-5


@pytest.mark.parametrize("stage, before, world, more", [
    ("distill", [], 2, []), ("sft", SHARD, 1, []), slow("pm", [], 2, SHARD),
    long("pretrain", [], 1, []), slow("pretrain", SHARD, 2, SHARD), long("harm", SHARD, 2, []),
    long("pm", SHARD, 2, []), long("sft", [], 2, SHARD), long("distill", SHARD, 2, SHARD),
    long("ppo", [], 2, []), slow("ppo", SHARD, 1, []), long("ppo", SHARD, 2, SHARD)])
def test_what_four_ranks_wrote_goes_on_on_fewer(tiny, nursery, tmp_path, stage, before, world,
                                                more):
    """Sharded or not, before and after: rank 1 asks all to stop, in the midst of a run."""
    argv, step = tiny.command(stage, tmp_path / "run"), 2 if stage in ("ppo", "harm") else 3
    hooks = [("at_step", [step, "SIGTERM", 1])]
    for done in nursery.ranks(4, [*argv, *before], hooks):
        assert done.code == 130, done.err
    half, whole = checkpoint(tmp_path / "run"), checkpoint(tiny.whole(stage))
    assert half["step"] == step + 1 and half["model"].keys() == whole["model"].keys()
    assert whole.keys() <= half.keys() and {"optimizer", "optimizers"} & half.keys()
    well(nursery.ranks(world, [*argv, *more]) if world > 1 else [nursery.run(argv)])
    close(tiny.whole(stage), tmp_path / "run")


# ---------------------------------------------------------------- passes

def test_each_rank_gets_as_many_passes(monkeypatch):
    """7 rows on 3 ranks in micro-batches of 2: 3 + 2 + 2 rows, two passes each."""
    rows, seen = ["a" * n for n in (5, 3, 9, 1, 8, 2, 7)], []
    monkeypatch.setattr("parallel.dist.is_initialized", lambda: True)
    monkeypatch.setattr("parallel.dist.get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr("parallel.dist.get_rank", lambda rank=rank: rank)
        parts = portions(rows, 2)
        seen += [len(row) for part, weight in parts if weight for row in part]
        assert len(parts) == 2 and parts[0][1] == 1.0
        assert parts[1] == ((["a" * 7], 1.0) if rank == 0 else (rows[:1], 0.0))
    assert seen == [1, 5, 7, 3, 8, 2, 9]
    assert even([], 1, [4]) == [([4], 0.0)]


BAD = """
import json, torch
from common import adamw, start, update
from parallel import Team, passes
from torch.distributed.fsdp import FSDPModule
from model import GPT, GPTConfig
from pretrain import lm_loss
rank, world, device = start("cpu")
found = []
for shard in (False, True):
    model = GPT(GPTConfig(20, 16, 1, 2, 16))
    before = model.wte.weight.detach().clone()
    team = Team(model, shard, device)
    assert all(isinstance(block, FSDPModule) == shard for block in model.h)
    optimizer = adamw(model, 0.1)
    for bad in (True, False):
        for ids, weight in passes([(torch.ones(2, 8, dtype=torch.long), 1.0)], team):
            loss = team(lm_loss, ids, torch.tensor([8, 4]))
            (loss * (float("nan") if bad and rank == 1 else 1.0)).backward()
        norm = update(model, optimizer, 0.1)
        weights = team.state(optimizer)[0]
        found.append([norm == norm, rank > 0 or torch.equal(weights["wte.weight"], before)])
print(json.dumps(found))
"""


def test_a_bad_gradient_of_one_rank_skips_the_step_on_all(nursery):
    """Not finite on rank 1: no weight moves, plain or sharded; the next step is taken."""
    first, second = (json.loads(done.out) for done in nursery.ranks(2, ["-c", BAD]))
    assert [x for x, _ in first] == [x for x, _ in second] == [False, True] * 2
    assert [x for _, x in first] == [True, False] * 2


THREE = """
from common import start
from parallel import Team
from model import GPT, GPTConfig
*_, device = start("cpu")
for flags in ((True, False), (False, True), (True, True)):
    model = GPT(GPTConfig(20, 16, 1, 2, 16))
    model.checkpoint = flags[0]
    if flags[1]:
        model.h[0].compile()             # when it is first called
    Team(model, True, device)
    print(flags)
"""


def test_what_torch_cannot_shard_is_told(nursery):
    for done in nursery.ranks(2, ["-c", THREE]):
        assert done.out == "(True, False)\n(False, True)\n", done.err
        assert "UserError: --shard and --compile: not on GPUs" in done.last


# ---------------------------------------------------------------- hung, killed, started again

def test_the_limits_leave_less_than_a_minute():
    assert common.LIMIT * 1.25 < 60


@pytest.mark.parametrize("stage, more, what, number, victim", [
    ("pretrain", [], "model.pad_rows", 12, 1), ("ppo", SHARD, "rollout.generate", 2, 1),
    long("pretrain", [], "step", 4, 1), slow("pretrain", [], "step", 4, 0),
    long("pretrain", [], "common.update", 3, 2), long("pretrain", SHARD, "model.pad_rows", 12, 1),
    slow("pretrain", SHARD, "parallel.full", 40, 1),
    long("pretrain", SHARD, "model.pad_rows", 9, 0), long("distill", [], "common.update", 3, 1),
    long("sft", SHARD, "common.update", 3, 1), long("pm", [], "common.update", 3, 0),
    long("harm", SHARD, "common.update", 3, 1),
    long("ppo", [], "rollout.generate", 3, 1), long("ppo", [], "rollout.generate", 3, 0),
    long("ppo", [], "rollout.pm_scores", 2, 1), long("ppo", SHARD, "common.update", 3, 1),
    long("distill", [], "common.Run.save", 1, 1), slow("ppo", SHARD, "common.Run.save", 1, 1)])
def test_a_rank_that_hangs_is_named(tiny, nursery, tmp_path, stage, more, what, number, victim):
    """In a micro-batch, before a sum of losses, before its step; while blocks' weights are
    collected; while it answers, or reads answers; when rank 0 saves.
    """
    lost, argv = f"rank {victim}", [*tiny.command(stage, tmp_path / "run"), *more]
    hook = ("at_call", [what, number, "SIGSTOP", victim])
    hook = ("at_step", [number, "SIGSTOP", victim]) if what == "step" else hook
    jobs = nursery.start_ranks(max(2, victim + 1), argv, [("waits", 3), hook])
    told = [job.wait(60) for rank, job in enumerate(jobs) if rank != victim]
    jobs[victim].kill(signal.SIGKILL)
    assert all(done.code == 1 and "Traceback" not in done.err for done in told)
    assert told[0].last.startswith("error: " + lost) and " lost" in told[0].last


WAIT = """
import time
from common import ALONE, meet, start, total
rank, *_ = start("cpu")
for limit in (ALONE, None):
    time.sleep(5 if rank == 0 else 0)
    meet(limit)
    print(total(1))
"""


def test_only_for_rank_0_alone_the_others_wait_for_long(nursery):
    """5 seconds are more than the limit of 2."""
    hooks = [("waits", 2 / PATIENCE)]
    for done in nursery.ranks(2, ["-c", WAIT], hooks):
        assert done.code == 1 and done.out == "2.0\n"
        assert "UserError: rank" in done.last and " lost" in done.last


def test_a_killed_rank_is_named(tiny, nursery, tmp_path):
    hooks = [("waits", 20), ("at_step", [4, "SIGKILL", 1])]
    left, killed = nursery.ranks(2, tiny.command("pretrain", tmp_path / "run"), hooks)
    assert killed.code == -signal.SIGKILL and left.code == 1
    assert left.last.startswith("error: rank 1 is lost")


@pytest.mark.parametrize("more", [slow([]), long(["--shard"])])
def test_four_ranks_go_on_to_the_same_bits(tiny, nursery, tmp_path, more):
    """Sums of four numbers depend on their order, which must not change with a new start."""
    for name, hooks in (("whole", []), ("run", [("at_step", [4, "SIGKILL", 3])])):
        argv = [*tiny.command("pretrain", tmp_path / name), *more]
        nursery.ranks(4, argv, [("waits", 10), *hooks])
    assert checkpoint(tmp_path / "run")["step"] == 3
    well(nursery.ranks(4, argv))
    same(tmp_path / "whole", tmp_path / "run")


KILLER = """
import os, random, runpy, signal, sys, threading
sys.path.insert(0, os.getcwd())
sys.argv = sys.argv[1:]
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
rng = random.Random(start)
if start < int(os.environ["KILLS"]) and rank == rng.randrange(2):
    import common
    inner, left = common.Run.log, [rng.randrange(1, 3)]
    def die():
        open(os.environ["KILLED"] + str(start), "w")
        os.kill(os.getpid(), signal.SIGKILL)
    def log(*args, **metrics):        # up to a step, then any moment of it
        left[0] -= 1
        if left[0] == 0:
            threading.Timer(rng.uniform(0, 0.05), die).start()
        inner(*args, **metrics)
    common.Run.log = log
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("stage, kills", [slow("pretrain", 10), long("ppo", 2)])
def test_torchrun_starts_again_what_was_killed(tiny, nursery, tmp_path, stage, kills):
    """Any rank at random moments: the finished run is the unbroken one, bit for bit."""
    driver, flags = tmp_path / "driver.py", dict(pretrain=dict(steps=25), ppo={})[stage]
    driver.write_text(KILLER)
    well(nursery.ranks(2, tiny.command(stage, tmp_path / "whole", every=1, **flags)))
    argv = tiny.command(stage, tmp_path / "run", every=1, **flags)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone",
         f"--max-restarts={kills}", str(driver), *argv], cwd=ROOT, text=True, capture_output=True,
        timeout=900 * PATIENCE, env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                                         KILLS=str(kills), KILLED=str(tmp_path / "killed-")))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len([*tmp_path.glob("killed-*")]) == kills
    same(tmp_path / "whole", tmp_path / "run")


def test_ranks_that_see_other_checkpoints_are_told(tmp_path, monkeypatch):
    """Machines without a common disk: rank 0 would go on at step 7, another start anew."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Config:
        out: str = str(tmp_path)

    monkeypatch.setattr(common.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(common.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(common, "everyones", lambda own, world: [7, *own, 7])
    with pytest.raises(common.UserError, match="step 7 for rank 0 and of 0 for another"):
        common.Run(Config(), "x", rank=1)
