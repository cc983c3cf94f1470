"""Several processes do the work of one and get its weights; so do other micro-batches.

The oracle is the run on one process: weights to 1e-5 after 10 optimizer steps, the same rollouts,
the same comparisons. Between ranks: weights bit for bit, and as many collectives.

Proved alive by: gradients not summed, or averaged, over ranks; the loss divided by the rank's own
count, or by the micro-batches; whitening, calibration or PPO's token count of one rank; rows that
overlap; random numbers keyed by the place in the rank's batch; answers of one rank only;
comparisons of one rank only; an evaluation by rank 0 that calls `total`; a rank that leaves its
loop without rows; signals heard by rank 0 only.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny import PATIENCE, ROOT, STAGES, checkpoint, distance

LOOPS = [s for s in STAGES if s != "collect"]
SPY = [("spy", 0)]


def weights(folder):
    """Policy or model, and PPO's critic."""
    content = checkpoint(folder)
    return {k: content[k] for k in ("model", "critic") if k in content}


def losses(folder, *names):
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], k, m[k]) for m in lines for k in names if k in m]


def close(whole, folder):
    """Weights to 1e-5; what was logged of each step to 1e-4."""
    far = distance(weights(whole), weights(folder))
    assert far <= 1e-5, far
    names = ("loss", "accuracy", "score", "kl", "length", "unfinished", "refused_helpful",
             "gold_helpful", "gold_harmless", "pm_helpful", "pm_harmless", "entropy", "value_loss",
             "clip_fraction", "heldout_loss", "heldout_kl")
    a, b = losses(whole, *names), losses(folder, *names)
    assert [x[:2] for x in a] == [x[:2] for x in b] and a
    for (step, name, x), (_, _, y) in zip(a, b):
        assert x == pytest.approx(y, abs=2e-4, rel=1e-3), (step, name)


def agree(ranks, world):
    """All ended well, with the same weights after each step and the same number of collectives."""
    for r, done in enumerate(ranks):
        assert done.code == 0, f"rank {r}: {done.err}"
        assert done.report["sums"] == ranks[0].report["sums"]
        assert done.report["calls"] == ranks[0].report["calls"]
        assert r == 0 or done.out == done.err == ""


def together(ranks, call):
    """The rows that the ranks sampled in their call-th call, in global order."""
    parts = [done.report["drawn"][call] for done in ranks]
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]


# ---------------------------------------------------------------- one process, two, four

@pytest.mark.parametrize("stage, world", [
    ("pretrain", 2), ("ppo", 2), pytest.param("distill", 2, marks=pytest.mark.slow),
    pytest.param("pmp", 2, marks=pytest.mark.slow), pytest.param("pm", 2, marks=pytest.mark.slow),
    pytest.param("ppo", 4, marks=pytest.mark.slow),
])
def test_ranks_give_the_weights_of_one_process(tiny, nursery, tmp_path, stage, world):
    """With checkpoints, samples and evaluations by rank 0 between the steps."""
    ranks = nursery.ranks(world, tiny.command(stage, tmp_path / "run"), hooks=SPY)
    agree(ranks, world)
    assert len(ranks[0].report["sums"]) >= 11 and len(ranks[0].report["calls"]) >= 20
    assert ranks[0].report["sums"][0] == tiny.report(stage)["sums"][0]       # the initial weights
    close(tiny.whole(stage), tmp_path / "run")
    if stage == "ppo":
        alone = tiny.report("ppo")["drawn"]
        for call in range(6):                                               # calibration, 5 times
            assert together(ranks, call) == alone[call]
            rows = [tuple(row) for row in alone[call]]
            assert len(set(rows)) == len(rows) == 8                         # all differ


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_collect_the_comparisons_of_one_process(tiny, nursery, tmp_path, world):
    ranks = nursery.ranks(world, tiny.command("collect", tmp_path / "run"), hooks=SPY)
    agree(ranks, world)
    alone = tiny.report("collect")["drawn"]
    assert [together(ranks, call) for call in range(len(alone))] == alone
    whole, mine = (p / "comparisons.jsonl" for p in (tiny.whole("collect"), tmp_path / "run"))
    assert whole.read_bytes() == mine.read_bytes()


@pytest.mark.slow
def test_torchrun_itself(tiny, tmp_path):
    """The command of the docstrings."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
            "--standalone", *tiny.command("pretrain", tmp_path / "run")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300 * PATIENCE,
                          env=dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 0, done.stderr
    assert "2 process(es)" in done.stdout
    close(tiny.whole("pretrain"), tmp_path / "run")


# ---------------------------------------------------------------- micro-batches

@pytest.mark.parametrize("stage, micro", [
    ("pretrain", 1), ("distill", 2), ("ppo", 8),
    *(pytest.param(s, m, marks=pytest.mark.slow) for s in LOOPS for m in (1, 2, 8)
      if (s, m) not in [("pretrain", 1), ("distill", 2), ("ppo", 8)]),
])
def test_micro_batches_change_nothing(tiny, nursery, tmp_path, stage, micro):
    done = nursery.run(tiny.command(stage, tmp_path / "run", micro=micro))
    assert done.code == 0, done.err
    close(tiny.whole(stage), tmp_path / "run")


@pytest.mark.parametrize("stage", LOOPS)
def test_what_no_loss_sees_does_not_move(tiny, stage):
    """The keys' bias, and in the PM's loss the score's: Adam would walk them along roundings."""
    found = weights(tiny.whole(stage))
    for network in found.values():
        for name, bias in network.items():
            if name.endswith("c_attn.bias"):
                query, key, value = bias.chunk(3)
                assert query.any() and value.any() and not key.any()
    if stage in ("pmp", "pm"):
        assert found["model"]["score_head.weight"].any()
        assert not found["model"]["score_head.bias"].any()


# ---------------------------------------------------------------- numbers by hand

SUMS = """
import json, torch
from common import everyones, start, total, update
from parallel import Team, even as filled, passes
rank, world, _ = start("cpu")

def gradient(micros, count):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    team, summed = Team(model), 0.0
    for x, weight in passes(filled(micros, 2, [9.0]), team):
        loss = weight * team(lambda model: (model.weight * torch.tensor(x)).sum())
        (loss / count).backward()
        summed += loss.item()
    update(model, torch.optim.SGD(model.parameters(), lr=1.0), 1.0, max_norm=1e9)
    return 1 - model.weight.item(), total(summed) / count

uneven = [[[4.0]], [[1.0, 1.0, 1.0]]][rank]
even = [[[1.0], [3.0]], [[5.0], [7.0]]][rank]
empty = [[[2.0]], []][rank]
counts = [total(sum(map(len, x))) for x in (uneven, even, empty)]
found = [gradient(x, c) for x, c in zip((uneven, even, empty), counts)]
print(json.dumps([counts, everyones([found], world)]))
"""


def test_a_mean_over_ranks_is_that_of_all_tokens(nursery):
    """One token of loss 4 on rank 0, three of loss 1 on rank 1: 7/4, not the mean of means 5/2.

    Inputs [1, 3] and [5, 7] at weight 1: gradient 4 on both ranks. A rank without any: the other's.
    """
    for done in nursery.ranks(2, ["-c", SUMS]):
        assert done.code == 0, done.err
        counts, found = json.loads(done.out)
        assert counts == [4, 4, 1]
        assert found == [[[1.75, 1.75], [4.0, 4.0], [2.0, 2.0]]] * 2


DRAWS = """
import json
from common import everyones, mine, start, uniforms
from model import GPT, GPTConfig, generate
rank, world, _ = start("cpu")
rows = mine(range(8), rank, world)
tokens = [generate(GPT(GPTConfig(50, 40, 1, 2, 16)), [[1, 2, 3]] * len(rows), 32,
                   uniforms(rows, 32, seed, "rl"))[0].tolist() for seed in (1, 2)]
print(json.dumps([everyones(x, world) for x in tokens]))
"""


def test_ranks_draw_different_answers_to_one_prompt(nursery):
    """Those that one process draws; and seed 1 on rank 1 is not seed 2 on rank 0."""
    alone = json.loads(nursery.run(["-c", DRAWS]).out)
    ranks = nursery.ranks(4, ["-c", DRAWS])
    assert [json.loads(done.out) for done in ranks] == [alone] * 4
    assert len({tuple(row) for rows in alone for row in rows}) == 16


# ---------------------------------------------------------------- ranks without rows, lost ranks

@pytest.mark.parametrize("stage, flags", [
    ("pretrain", dict(steps=3, batch=1)), ("ppo", dict(iterations=2, samples=3, minibatch=1)),
    pytest.param("distill", dict(steps=3, batch=1), marks=pytest.mark.slow),
    pytest.param("pm", dict(batch=1, pairs=3), marks=pytest.mark.slow),
])
def test_a_rank_without_rows_takes_part(tiny, nursery, tmp_path, stage, flags):
    alone = nursery.run(tiny.command(stage, tmp_path / "one", **flags))
    assert alone.code == 0, alone.err
    ranks = nursery.ranks(2, tiny.command(stage, tmp_path / "two", **flags), SPY, timeout=60)
    agree(ranks, 2)
    close(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [dict(samples=2, minibatch=2), dict(calibrate=2)])
def test_more_ranks_than_answers_are_refused(tiny, nursery, tmp_path, flags):
    for done in nursery.ranks(3, tiny.command("ppo", tmp_path / "run", **flags), timeout=60):
        assert done.code == 1 and done.last.startswith("error: ")
        assert "3 processes" in done.last and "Traceback" not in done.err


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_any_rank_that_is_asked_stops_all_and_one_process_goes_on(tiny, nursery, tmp_path, name):
    argv = tiny.command("pretrain", tmp_path / "run")
    for done in nursery.ranks(2, argv, hooks=[("at_step", [4, name, 1])], timeout=60):
        assert done.code == 130 and "Traceback" not in done.err
    assert checkpoint(tmp_path / "run")["step"] == 5
    assert nursery.run(argv).code == 0
    close(tiny.whole("pretrain"), tmp_path / "run")


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_loses_nothing(tiny, nursery, tmp_path):
    argv = tiny.command("pmp", tmp_path / "run")
    lost, killed = nursery.ranks(2, argv, hooks=[("at_step", [7, "SIGKILL", 1])], timeout=60)
    assert killed.code == -signal.SIGKILL and lost.code not in (0, None)
    assert checkpoint(tmp_path / "run")["step"] == 5
    for done in nursery.ranks(2, argv):
        assert done.code == 0, done.err
    close(tiny.whole("pmp"), tmp_path / "run")


@pytest.mark.slow
def test_torchrun_interrupted_saves_and_goes_on(tiny, tmp_path):
    """Ctrl-C in a terminal reaches torchrun, which passes it to its workers."""
    argv = tiny.command("pretrain", tmp_path / "run")
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    run = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
                            "--standalone", *argv], cwd=ROOT, env=env,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120 * PATIENCE
    while not (tmp_path / "run" / "ckpt.pt").exists() and time.monotonic() < end:
        time.sleep(0.002)
    run.send_signal(signal.SIGINT)
    assert run.wait(60 * PATIENCE) != 0
    assert checkpoint(tmp_path / "run")["step"] >= 3
    again = subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, capture_output=True,
                           text=True, timeout=120 * PATIENCE)
    assert again.returncode == 0, again.stderr
    close(tiny.whole("pretrain"), tmp_path / "run")
