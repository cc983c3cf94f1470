"""runs/bench.py: what it counts, against torch's own counter; that it runs; the rows it tells.

Mutations tried, each caught here: the head counted everywhere, the last block counted everywhere,
backward left out, a prompt counted once a sample, attention counted twice, ratios turned round,
speeds of the whole run instead of a step.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common import entry

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "runs"))
import bench  # noqa: E402

PROGRAM = SimpleNamespace(main=lambda: entry(bench.main, bench.Config))
ITEMS = ("lm_train", "generate", "generate_ragged", "generate_shared", "reward", "ranking", "ppo")
SIZE = dict(bench.SIZES["small"], ctx=160, batch=3)


@pytest.mark.parametrize("item", ITEMS)
def test_the_operations_are_the_fewest_and_nearly_what_is_done(item):
    """torch's counter sees padding and whole attention squares too: more, but not twice as much."""
    w = bench.work(item, SIZE)
    for key in ("prompts", "prompt", "chosen", "rejected", "answers"):
        if key in w and item != "ppo":
            w[key] = w[key][:6]
    count, fewest = bench.amount(item, SIZE, w)
    step, aten = bench.CASES[item](SIZE, w), torch.ops.aten

    def square(q, *more, out_shape=None, **kwargs):   # torch's counter leaves the CPU's kernel out
        B, H, T, D = q
        return 4 * B * H * T * T * D

    def its_gradient(grad, *more, out_shape=None, **kwargs):
        return 2 * square(grad)

    with FlopCounterMode(display=False, custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: square,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: its_gradient}) as counter:
        step()
    # More is done: whole squares of attention, and pads; and in the last block queries and
    # attention where nobody asked.
    assert fewest < counter.get_total_flops() < 1.3 * fewest
    assert count == dict(lm_train=480, ranking=36, reward=6, ppo=128, generate_shared=6 * 16 * 32
                         ).get(item, 6 * 32)


def test_one_token_by_hand():
    """One layer of width 2, vocabulary 3, a prompt of 1 token and 1 new one: 24 C^2 + 4 C + 2 C V.
    """
    size = dict(n_layer=1, n_embd=2, vocab=3)
    assert bench.amount("generate", size, dict(prompts=[[5]], new=1, n=1)) == (1, 96 + 8 + 12)
    # a second one: its own token, which sees two, and its head; two samples share the first
    assert bench.amount("generate", size, dict(prompts=[[5]], new=2, n=2)) == (4, 116 + 2 * 124)


def test_a_run_tells_its_rows(program, tmp_path):
    code, out, _ = program("--size", "tiny", "--repeats", 1, "--device", "cpu", "--items",
                           "lm_train,reward,attention,decode", "--out", tmp_path / "rows.jsonl")
    rows = [json.loads(x) for x in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert code == 0 and rows[0]["item"] == "environment" and rows[0]["torch"] == torch.__version__
    found = {(r["item"], r["impl"]): r for r in rows[1:]}
    assert {i for i, _ in found} == {"lm_train", "reward", "attention, causal", "decode",
                                     "attention, shared"}
    assert all(r["min"] <= r["median"] <= r["max"] and r["n"] == 1 for r in rows[1:])
    assert all(r["ratio"] == 1 for (_, impl), r in found.items() if impl == bench.NAME)
    assert 0 < found["decode", bench.NAME]["of_bandwidth"] < 2
    if ("lm_train", "transformers") in found:
        ours, theirs = (found["lm_train", x] for x in (bench.NAME, "transformers"))
        assert theirs["ratio"] == pytest.approx(ours["median"] / theirs["median"], rel=1e-2)
    assert "nanoHH" in out.splitlines()[-1] or "bandwidth" in out


@pytest.mark.parametrize("argv", [("--items", "lm_train,nothing"), ("--size", "huge"),
                                  ("--repeats", "0")])
def test_bad_flags(program, argv):
    code, _, errors = program(*argv)
    assert code == 1 and errors.startswith("error: --items lm_train,") and errors.count("\n") == 1


def test_repeats_alternate_and_the_first_is_left_out():
    calls = []
    steps = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "abc"}
    assert bench.interleaved(steps, 2) == {"a": [6.0, 7.0], "b": [5.0, 8.0], "c": [4.0, 9.0]}
    assert "".join(calls) == "abccbaabc"


@pytest.mark.slow
def test_a_process_does_one_update(tmp_path):
    """The process that `start` times trains: it prints a finished run's samples."""
    import subprocess
    argv = [sys.executable, *bench.START[next(iter(bench.START))][1:]]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path,
                          env=dict(os.environ, OMP_NUM_THREADS="2"))
    assert done.returncode == 0 and "ppo done:" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
