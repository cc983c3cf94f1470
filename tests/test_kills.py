"""Any rank killed, again and again, in the midst of whatever it does: the finished run is the same.

The oracle is the unbroken run on as many processes, cut in the same way: weights, moments, state
and metrics, bit for bit. Where a rank dies: a file written but not yet in place, renamed or about
to be; an answer being sampled; gradients summed, weights collected; and by the clock, where no line
of the code chose the moment. What survives must end by itself, and soon.

Proved alive by: moments not cut when they are loaded, those of PPO's critic lost, metrics of a
repeated step kept.
"""

import random
import signal
import time

import pytest
from tiny import PATIENCE, checkpoint, same

WRITE, RENAME = ("os.fsync", 5, (0,)), ("os.replace", 5, (0,))     # rank 0 alone writes
STEP, JOIN = ("common.update", 4, (0, 1)), ("parallel.full", 60, (0, 1))
ROLLOUT, SCORE = ("rollout.generate", 4, (0, 1)), ("rollout.pm_scores", 3, (0, 1))
CLOCK = None
FLAGS = dict(pretrain=dict(steps=25, every=2), ppo=dict(iterations=10, every=1), pm=dict(every=2),
             sft=dict(every=2), distill=dict(every=2), harm=dict(every=1))


def written(path):
    return path.stat().st_mtime_ns if path.exists() else 0


def killed(nursery, argv, folder, moment, rng):
    """Two ranks of which one is killed at a moment; the other ends by itself. Whether one was.

    The clock starts with config.json, when the ranks have met: before, it is torchrun who sees it.
    """
    victim = rng.randrange(2)
    hooks = [("waits", 15)]
    if moment:
        name, most, ranks = moment
        victim = ranks[rng.randrange(len(ranks))]
        hooks.append(("at_call", [name, rng.randint(most // 2 + 1, most), "SIGKILL", victim]))
    before = written(folder / "config.json")
    jobs = nursery.start_ranks(2, argv, hooks)
    if not moment:
        end = time.monotonic() + 60 * PATIENCE
        while written(folder / "config.json") == before and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 1.0))
        try:
            jobs[victim].kill(signal.SIGKILL)
        except ProcessLookupError:                       # already through
            pass
    codes = [job.wait(60).code for job in jobs]
    assert codes[victim] in (-signal.SIGKILL, 0), jobs[victim].wait().err
    assert codes[1 - victim] in (0, 1), jobs[1 - victim].wait().err
    return codes[victim] == -signal.SIGKILL


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("stage, more, moments", [
    ("ppo", ["--shard"], [ROLLOUT, WRITE]),
    slow("pretrain", ["--shard"], [STEP, WRITE, JOIN, RENAME, *4 * [CLOCK], JOIN, WRITE]),
    long("ppo", ["--shard"], [ROLLOUT, WRITE, JOIN, RENAME, SCORE, *4 * [CLOCK], ROLLOUT]),
    long("ppo", [], [ROLLOUT, WRITE, SCORE, RENAME, *2 * [CLOCK]]),
    long("pm", ["--shard"], [STEP, WRITE, CLOCK]), long("pm", [], [RENAME, CLOCK, STEP]),
    long("sft", ["--shard"], [JOIN, RENAME, CLOCK]), long("sft", [], [WRITE, STEP, CLOCK]),
    long("distill", ["--shard"], [WRITE, JOIN, CLOCK]), long("distill", [], [STEP, RENAME, CLOCK]),
    long("harm", ["--shard"], [WRITE, STEP, CLOCK])])
def test_killed_again_and_again_it_ends_the_same(tiny, nursery, tmp_path, stage, more, moments):
    rng, flags = random.Random(f"{stage} {more}"), dict(FLAGS[stage])
    if stage == "ppo" and len(moments) < 5:
        flags["iterations"] = 4
    argv = [*tiny.command(stage, tmp_path / "run", **flags), *more]
    deaths = [killed(nursery, argv, tmp_path / "run", moment, rng) for moment in moments]
    assert sum(deaths) >= len([x for x in moments if x])   # the clock may come too late
    argvs = argv, [*tiny.command(stage, tmp_path / "whole", **flags), *more]
    for done in (x for argv in argvs for x in nursery.ranks(2, argv)):
        assert done.code == 0, done.err
    same(tmp_path / "whole", tmp_path / "run")
    assert checkpoint(tmp_path / "run")["finished"]
