"""Every stage may be stopped at any moment; the same command goes on to the same bits (CPU).

The oracle is the uninterrupted run: its checkpoint (weights, optimizers, PPO's score shift) and its
metrics.jsonl, compared exactly; and the folder's list of files, so that no half-written one stays.

Proved alive by: the optimizer not saved or not loaded; the step saved one too small; PPO's norm
measured anew; its critic taken from the PM; order drawn from the resumed step; metrics of repeated
steps kept, kept in a run that never saved, a torn line kept; saved before the evaluation that logs;
written in place; the temporary file of a killed write left; SIGTERM not handled, SIGINT without a
save or with status 0; a finished stage that runs again; a teacher's cache of other texts used.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tiny import PATIENCE, ROOT, STAGES, checkpoint, contents, same

LOOPS = [s for s in STAGES if s != "collect"]  # those with steps and checkpoints


def interrupted(done):
    """The run ended because it was asked to, and says so in a line."""
    assert done.code == 130, done.err
    assert done.last.startswith("interrupted:") and "Traceback" not in done.err
    return True


# ---------------------------------------------------------------- killed

@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) if s == "pmp" else s
                                   for s in STAGES])  # pm is the same loop
def test_killed_at_random_moments_and_continued(tiny, nursery, tmp_path, stage):
    """kill -9 three times, each at a random write of the process; then to the end."""
    rng, out = random.Random(f"kill {stage}"), tmp_path / "run"
    events, codes = tiny.report(stage)["events"], []
    for _ in range(3):
        hook = ("at_event", [rng.randrange(events // 8, events // 2), "SIGKILL"])
        codes.append(nursery.run(tiny.command(stage, out), hooks=[hook]).code)
    done = nursery.run(tiny.command(stage, out))
    assert done.code == 0, done.err
    assert codes[:2] == [-signal.SIGKILL] * 2 and codes[2] in (-signal.SIGKILL, 0)
    same(tiny.whole(stage), out)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_every_moment(tiny, nursery, tmp_path, stage):
    """Killed at its first write, continued, killed at its second, ... until it is through."""
    out, events = tmp_path / "run", tiny.report(stage)["events"]
    for number in range(events + 1):
        hook = ("at_event", [number, "SIGKILL"])
        done = nursery.run(tiny.command(stage, out), hooks=[hook])
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL, f"at write {number}: {done.err}"
    assert done.code == 0 and number > 1
    same(tiny.whole(stage), out)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_killed_by_the_clock(tiny, nursery, tmp_path, stage):
    """The same from outside, at moments that no line of the code chose."""
    rng, out = random.Random(f"clock {stage}"), tmp_path / "run"
    tiny.whole(stage)
    for _ in range(3):
        job = nursery.start(tiny.command(stage, out))
        job.file("pid", 60)
        time.sleep(rng.uniform(0.02, 0.9 * tiny.seconds[stage]))
        try:
            job.kill(signal.SIGKILL)
        except ProcessLookupError:  # already through
            pass
        assert job.wait().code in (-signal.SIGKILL, 0)
    assert nursery.run(tiny.command(stage, out)).code == 0
    same(tiny.whole(stage), out)


@pytest.mark.slow
def test_a_real_process_killed_and_continued(tiny, tmp_path):
    """Nothing forked: `python pretrain.py`, killed after its first checkpoint, and again."""
    argv = [sys.executable, *tiny.command("pretrain", tmp_path / "run")]
    env = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    first = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120 * PATIENCE
    while not (tmp_path / "run" / "ckpt.pt").exists() and time.monotonic() < end:
        time.sleep(0.001)
    first.kill()
    assert first.wait() == -signal.SIGKILL and 0 < checkpoint(tmp_path / "run")["step"]
    again = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True,
                           timeout=120 * PATIENCE)
    assert again.returncode == 0, again.stderr
    same(tiny.whole("pretrain"), tmp_path / "run")


# ---------------------------------------------------------------- asked to stop

@pytest.mark.parametrize("stage, step, name", [
    ("pretrain", 4, "SIGINT"), ("distill", 3, "SIGTERM"), ("pm", 10, "SIGTERM"),
    ("ppo", 2, "SIGINT"), pytest.param("pmp", 6, "SIGINT", marks=pytest.mark.slow),
])
def test_asked_to_stop_it_saves_and_goes_on(tiny, nursery, tmp_path, stage, step, name):
    """Step 10 of pm is its last: only the evaluation is left. Lines after the save are dropped."""
    out = tmp_path / "run"
    argv = tiny.command(stage, out)
    assert interrupted(nursery.run(argv, hooks=[("at_step", [step, name, 0])]))
    half = checkpoint(out)
    assert half["step"] == step + 1 and not half["finished"]
    if "optimizer" in half:
        moments = [s["exp_avg_sq"].abs().max() for s in half["optimizer"]["state"].values()]
        assert max(moments) > 0
    with open(out / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step + 1}, "loss": 9.0}}\n{{"step": {step + 2}, "lo')
    assert nursery.run(argv).code == 0
    same(tiny.whole(stage), out)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_collecting_is_interrupted_without_a_trace(tiny, nursery, tmp_path, name):
    """It has no steps: it starts anew, and never shows a part as the whole."""
    argv = tiny.command("collect", tmp_path / "run", count=130)  # more than a chunk of prompts
    assert interrupted(nursery.run(argv, hooks=[("at_call", ["model.generate", 1, name])]))
    assert not (tmp_path / "run" / "comparisons.jsonl").exists()
    assert nursery.run(argv).code == 0
    assert nursery.run(tiny.command("collect", tmp_path / "whole", count=130)).code == 0
    same(tmp_path / "whole", tmp_path / "run")


def test_asked_while_the_teacher_reads(tiny, nursery, tmp_path):
    """A wish to stop before the first step is kept: one step, saved, then the end."""
    out = tmp_path / "run"
    argv = tiny.command("distill", out)
    assert interrupted(nursery.run(argv, hooks=[("at_call", ["model.pad_rows", 2, "SIGTERM"])]))
    assert checkpoint(out)["step"] == 1
    assert nursery.run(argv).code == 0
    same(tiny.whole("distill"), out)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_asked_before_it_began(tiny, nursery, tmp_path, name):
    for stage in ("pretrain", "ppo"):
        argv = tiny.command(stage, tmp_path / stage)
        assert interrupted(nursery.run(argv, hooks=[("at_call", ["common.start", 1, name])]))
        assert not (tmp_path / stage).exists()


@pytest.mark.parametrize("stage", ["pretrain", "collect"])
def test_asked_when_all_is_done_it_finishes_and_stops_the_script(tiny, nursery, tmp_path, stage):
    """During the last evaluation, or the last chunk: the work is kept, the status is not 0."""
    out, calls = tmp_path / "run", len(tiny.report(stage)["drawn"])
    argv = tiny.command(stage, out)
    assert interrupted(nursery.run(argv, hooks=[("at_call", ["model.generate", calls, "SIGINT"])]))
    same(tiny.whole(stage), out)
    assert nursery.run(argv).out.endswith("is finished, skipped\n")


# ---------------------------------------------------------------- finished, moved, changed

@pytest.mark.parametrize("stage", STAGES)
def test_a_finished_stage_is_skipped_and_says_so(tiny, nursery, stage):
    folder = tiny.whole(stage)
    before, times = contents(folder), {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    done = nursery.run(tiny.command(stage, folder))
    assert (done.code, done.err) == (0, "") and done.out.endswith("is finished, skipped\n")
    assert done.out.count("\n") == 1 and str(folder) in done.out
    assert contents(folder) == before
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == times


@pytest.mark.parametrize("flag", [
    dict(texts=18), dict(seed=1), pytest.param(dict(length=30), marks=pytest.mark.slow),
    pytest.param(dict(top=20), marks=pytest.mark.slow),
])
def test_the_teachers_cache_belongs_to_its_texts(tiny, nursery, tmp_path, flag):
    """Killed before the first checkpoint and started with other texts: as if it were the first."""
    argv = tiny.command("distill", tmp_path / "run", steps=2)
    assert nursery.run(argv, hooks=[("at_step", [0, "SIGKILL", 0])]).code == -signal.SIGKILL
    assert (tmp_path / "run" / "teacher.pt").exists()
    for name in ("run", "fresh"):
        done = nursery.run(tiny.command("distill", tmp_path / name, steps=2, **flag))
        assert done.code == 0, done.err
    same(tmp_path / "fresh", tmp_path / "run")
