"""Data parallelism and sharding: the weights of one process, from any number, with any cut.

The oracle is the run on one process without torch.distributed. Gradients here are made to differ by
rank, by rows, by micro-batches; a collective that a rank does not reach must end and name it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_ranks import close
from tiny import PATIENCE, ROOT, checkpoint, distance, parts

SHARDED = ("pretrain", "distill", "pm", "ppo")
HERE = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def ended(ranks):
    for rank, done in enumerate(ranks):
        assert done.code == 0, f"rank {rank}: {done.err}"


def flags_on(argv, *more):
    return [*argv, *more]


# ---------------------------------------------------------------- sharded

@pytest.mark.parametrize("stage, world, micro", [
    ("pretrain", 2, 3), ("ppo", 2, 3), ("pm", 2, 1),
    *(pytest.param(s, w, m, marks=pytest.mark.slow) for s in SHARDED for w in (2, 4)
      for m in (1, 2, 8))])
def test_sharded_weights_are_those_of_one_process(tiny, nursery, tmp_path, stage, world, micro):
    """10 steps, with checkpoints, samples and evaluations by rank 0 between them."""
    argv = flags_on(tiny.command(stage, tmp_path / "run", micro=micro), "--shard")
    ended(nursery.ranks(world, argv))
    close(tiny.whole(stage), tmp_path / "run")
