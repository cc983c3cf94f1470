"""common.py on one process: keyed numbers, optimizer step, checkpoints, flags, the run's folder.

Oracles: hand-computed numbers, another library's optimizer step, the uninterrupted sequence.

Mutations tried, each caught here: key cut short or glued, uniforms that ignore the row or its
type, one order for all epochs, numpy's global state, too few rows accepted; shares of ranks that
lose rows, rows gathered out of order; sums or gradients of one rank, averaged, in float32; a rank
without rows that stays out, a step on NaN, no clipping, learning rate not set, gradients kept, no
decay, decay of vectors, frozen weights optimized; warm-up from 0 or left out of the rest, no floor,
cosine doubled; write in place, by copy, temporary file left, a full disk's traceback, weights_only
off, format mark or type not looked at, empty or missing file; abbreviated flags, help without
comments or with a bare %, no --no-x, status 0 after an error or Ctrl-C; metrics of repeated steps
kept, a torn line kept, `out` compared, a changed flag accepted, a checkpoint of no run continued,
all ranks save, second signal ignored, SIGTERM not taken, coarse metrics, full disk not looked at,
a run that never finishes or starts over.
"""

import dataclasses
import errno
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import common
from common import (
    Run,
    UserError,
    adamw,
    batch_rows,
    entry,
    everyones,
    keyed,
    load_checkpoint,
    metrics_of,
    mine,
    parse_flags,
    save_checkpoint,
    schedule,
    total,
    uniforms,
    update,
    write_atomically,
)


@dataclasses.dataclass(frozen=True)
class Config:
    out: str = "out/x"      # the stage's folder
    steps: int = 5          # optimizer steps
    lr: float = 1e-3        # learning rate, 100% of it
    warm_up: bool = True    # whether to warm up
    fast: bool = False      # whether to hurry
    device: str = "cpu"     # cpu or cuda


@pytest.fixture(autouse=True)
def signals():
    """A Run takes over Ctrl-C; give it back after each test."""
    kept = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


# ---------------------------------------------------------------- keyed numbers

def test_keyed_numbers_are_a_function_of_the_whole_key():
    assert keyed(1, "rl", 2).random() == keyed(1, "rl", 2).random()
    keys = [(seed, stage, step, row) for seed in (0, 1) for stage in ("rl", "pm", "rl1")
            for step in range(5) for row in range(7)]
    drawn = {float(keyed(*key).random()) for key in keys}
    assert len(drawn) == len(keys)
    assert keyed(1, 23).random() != keyed(12, 3).random()         # no gluing of neighbours


def test_seed_1_rank_1_is_not_seed_2_rank_0():
    ranks = [mine(range(8), rank, 4) for rank in range(4)]
    drawn = [uniforms(ranks[rank], 32, seed, "rl") for seed in (1, 2) for rank in range(4)]
    rows = torch.cat(drawn)
    assert len({tuple(row) for row in rows.tolist()}) == 16


def test_keyed_numbers_do_not_change_between_versions():
    """A resumed or repeated run needs the very same numbers, also after an upgrade."""
    first = [0.1841800672713041, 0.776191857777054]
    assert keyed(0, "rl", 3).random(2).tolist() == pytest.approx(first, abs=1e-15)


def test_uniforms_depend_on_the_global_row_and_not_on_the_cut():
    whole = uniforms(range(6), 5, 0, "rl")
    assert whole.dtype == torch.float32 and whole.shape == (6, 5)
    assert torch.equal(whole[[4, 1]], uniforms([4, 1], 5, 0, "rl"))
    assert torch.equal(whole[3:], uniforms(np.arange(3, 6), 5, 0, "rl"))    # ints of any library


def test_uniforms_are_uniform():
    u = uniforms(range(200), 100, 7)
    assert 0 <= u.min() and u.max() < 1
    counts = torch.histc(u, 10, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9          # chi-squared(9), p = 0.001


def test_ranks_share_the_rows_without_overlap():
    shares = [list(mine(range(7), rank, 3)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]


# ---------------------------------------------------------------- order of the data

def test_each_epoch_is_a_permutation_of_its_own():
    epochs = [np.concatenate([batch_rows(64, 4, e * 16 + i, 0, "x") for i in range(16)])
              for e in range(3)]
    assert all(sorted(e) == list(range(64)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert not np.array_equal(batch_rows(64, 64, 0, 0, "x"), batch_rows(64, 64, 0, 1, "x"))


def test_resume_goes_on_where_the_order_was():
    """64 items, batch 4, stopped in epoch 1 after 5 batches: the ids of 3 epochs agree."""
    def steps(first, last):
        return [batch_rows(64, 4, step, 0, "x").tolist() for step in range(first, last)]

    uninterrupted = steps(0, 48)
    before = steps(0, 16 + 5)
    np.random.seed(0)                       # a new process: the global state is of no account
    torch.manual_seed(1)
    assert before + steps(21, 48) == uninterrupted


def test_a_short_last_batch_is_left_for_the_next_epoch_and_too_few_rows_are_refused():
    rows = [batch_rows(10, 4, step, 0) for step in range(2)]
    assert [len(r) for r in rows] == [4, 4] and len(set(np.concatenate(rows))) == 8
    with pytest.raises(UserError, match="3 rows are fewer than one batch of 4"):
        batch_rows(3, 4, 0, 0)


# ---------------------------------------------------------------- sums over ranks

class TwoRanks:
    """Stands in for torch.distributed: the other rank's tensor is added to ours."""

    def __init__(self, other):
        self.other = torch.tensor(other)

    def is_initialized(self):
        return True

    def get_backend(self):
        return "gloo"

    def all_reduce(self, tensor, group):
        tensor += self.other


def test_total_of_one_value_is_a_number_and_of_more_a_list(monkeypatch):
    assert total(3) == 3.0 and total(True, torch.tensor(2.5)) == [1.0, 2.5]
    assert total(0.1) == 0.1                                            # float64
    monkeypatch.setattr(common, "dist", TwoRanks([1.0, 10.0]))
    monkeypatch.setattr(common, "groups", lambda: dict(small=None))
    assert total(2, 3) == [3.0, 13.0]


def test_rows_of_all_ranks_come_back_in_order(monkeypatch):
    shares = [mine("abcdefg", rank, 3) for rank in range(3)]

    class Gather(TwoRanks):
        def all_gather_object(self, parts, own, group):
            assert own == "be"
            parts[:] = shares

    monkeypatch.setattr(common, "dist", Gather(0))
    monkeypatch.setattr(common, "groups", lambda: dict(small=None))
    assert everyones("be", 3) == list("abcdefg")
    assert everyones([5, 6], 1) == [5, 6]


# ---------------------------------------------------------------- the optimizer step

def weights(*values):
    """A model with one vector of weights."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.tensor(values))
    return model


def plain(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr)


def test_loss_and_step_do_not_depend_on_the_micro_batches():
    """Micro-batch A: 1 token, loss 4. B: 3 tokens, sum 3. Mean 7/4; mean of means 2.5."""
    after = []
    for parts in ([[4.0], [1.0, 1.0, 1.0]], [[4.0, 1.0, 1.0, 1.0]], [[4.0, 1.0], [1.0, 1.0]]):
        model = weights(1.0)
        for part in parts:
            (model.w * torch.tensor(part)).sum().div(4).backward()       # divided by ALL tokens
        assert update(model, plain(model), 1.0, max_norm=10.0) == 1.75
        after.append(model.w.item())
    assert after == [-0.75] * 3


def test_the_norm_is_that_before_clipping():
    model = weights(0.0, 0.0)
    (model.w * torch.tensor([3.0, 4.0])).sum().backward()
    assert update(model, plain(model), 1.0, max_norm=1.0) == pytest.approx(5.0)
    assert model.w.tolist() == pytest.approx([-0.6, -0.8], abs=1e-5)
    assert model.w.grad is None                           # nothing leaks into the next step


def test_the_learning_rate_of_this_step_is_used():
    model = weights(0.0)
    model.w.sum().backward()
    update(model, plain(model, lr=123.0), 0.25)
    assert model.w.item() == pytest.approx(-0.25)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_reported(bad):
    model = weights(1.0, 2.0)
    optimizer = adamw(model, 0.1)
    model.w.grad = torch.tensor([bad, 1.0])
    assert not np.isfinite(update(model, optimizer, 0.1))
    assert model.w.tolist() == [1.0, 2.0] and not optimizer.state      # moments untouched too
    model.w.grad = torch.ones(2)
    assert np.isfinite(update(model, optimizer, 0.1)) and model.w.isfinite().all()


def test_adamw_moves_a_weight_that_bf16_cannot():
    """Weight 1, gradient .01, lr 1e-5, 100 steps: 0.9990 in fp32; in bf16 every step is lost."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = weights(1.0).to(dtype)
        optimizer = adamw(model, 1e-5)
        for _ in range(100):
            model.w.grad = torch.full_like(model.w, 0.01)
            update(model, optimizer, 1e-5)
        ends[dtype] = model.w.item()
    assert ends[torch.float32] == pytest.approx(0.9990, abs=1e-5)
    assert ends[torch.bfloat16] == 1.0                                  # so weights stay fp32


def test_adamw_first_step_and_decay_of_matrices_only():
    """The first Adam step is lr * sign(g); a matrix of weight 2 also loses lr * decay * 2."""
    model = weights(2.0)
    model.m = torch.nn.Parameter(torch.full((1, 1), 2.0))
    model.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = adamw(model, 0.1, weight_decay=0.5)
    model.w.grad, model.m.grad = torch.tensor([1e-3]), torch.tensor([[-1e-3]])
    update(model, optimizer, 0.1)
    assert model.w.item() == pytest.approx(1.9, abs=1e-4)
    assert model.m.item() == pytest.approx(2.1 - 0.1, abs=1e-4)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 2


def test_five_steps_saved_and_five_more_equal_ten(tmp_path):
    """Parameters, both moments and the schedule go on bit for bit."""
    def steps(model, optimizer, first, last):
        for step in range(first, last):
            x = torch.from_numpy(keyed(0, step).standard_normal(3)).float()
            ((model.w * x).sum() ** 2).backward()
            update(model, optimizer, schedule(step, 10, 0.1, warmup=3))

    model = weights(1.0, 2.0, 3.0)
    steps(model, adamw(model, 0.1), 0, 10)
    half = weights(1.0, 2.0, 3.0)
    optimizer = adamw(half, 0.1)
    steps(half, optimizer, 0, 5)
    save_checkpoint(tmp_path / "ckpt.pt", model=half.state_dict(), optimizer=optimizer.state_dict())

    content, new = load_checkpoint(tmp_path), weights(0.0, 0.0, 0.0)
    new.load_state_dict(content["model"])
    optimizer = adamw(new, 0.1)
    optimizer.load_state_dict(content["optimizer"])
    assert optimizer.state[new.w]["exp_avg_sq"].min() > 0
    steps(new, optimizer, 5, 10)
    assert torch.equal(new.w, model.w)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_kept():
    """Without it, four tensors of 16 MB are up to 16384 new pages, most times. With it the least of
    three tries counts: a machine may take idle pages back.
    """
    code = ("import resource, torch, common\nif {}: common.keep_memory()\n"
            "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
            "def four(n): kept = [torch.ones(2 ** n) for _ in range(4)]\n"
            "for n in range(18, 23): four(n)\n"
            "tries = [faults()]\nfor _ in range(3): four(22), tries.append(faults())\n"
            "print({}(b - a for a, b in zip(tries, tries[1:])))")
    found = [int(subprocess.run([sys.executable, "-c", code.format(on, pick)], text=True,
                                check=True, capture_output=True,
                                cwd=Path(common.__file__).parent).stdout)
             for on, pick in ((False, "max"), (True, "min"))]
    assert found[1] < 100 < found[0]


def test_a_model_that_cannot_be_compiled_is_one_line():
    class Model:
        def use(self, checkpoint, compile):
            self.told = checkpoint, compile
            if compile:
                raise RuntimeError("no compiler found\nand a page about it")

    model = Model()
    assert common.prepare(model, True, False) is model and model.told == (True, False)
    with pytest.raises(UserError, match="^--compile: no compiler found$"):
        common.prepare(model, False, True)


def test_schedule():
    assert [schedule(s, 10, 1.0, warmup=4) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [schedule(s, 10, 1.0) for s in (0, 5, 10, 11)] == [1.0, 0.5, 0.0, 0.0]
    assert schedule(7, 10, 1.0, warmup=4) == pytest.approx(0.5)          # half of the 6 steps left
    cosine = [schedule(s, 10, 2.0, 0, 0.1, "cosine") for s in (0, 5, 10)]
    assert cosine == pytest.approx([2.0, 1.1, 0.2])
    assert schedule(5, 20, 1.0, 0, 0.0, "cosine") == pytest.approx(0.8536, abs=1e-4)
    assert schedule(9, 10, 3.0, shape="constant") == 3.0


# ---------------------------------------------------------------- checkpoints

def test_a_checkpoint_comes_back(tmp_path):
    content = dict(step=3, x=torch.arange(4.0), names=["a", "é"], more={"k": (1, 2.5, None, True)})
    save_checkpoint(tmp_path / "ckpt.pt", **content)
    for place in (tmp_path, tmp_path / "ckpt.pt", str(tmp_path)):
        back = load_checkpoint(place)
        assert torch.equal(back.pop("x"), content["x"])
        assert back.pop("format") == common.FORMAT
        assert back == {k: v for k, v in content.items() if k != "x"}


def test_a_write_that_dies_half_way_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"old")

    def die(file):
        file.write(b"new, but only ha")
        assert path.read_bytes() == b"old"                # nothing is written in place
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, die)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["ckpt.pt"]
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["ckpt.pt"]


def test_what_a_kill_left_half_written_is_no_hindrance(tmp_path, monkeypatch):
    """A process killed in the middle of a write cleans nothing up; the leftovers do not pile up."""
    class Killed(BaseException):
        pass

    def die(file):
        file.write(b"only ha")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(common.Path, "unlink", lambda *_, **__: None)
        for _ in range(3):
            with pytest.raises(Killed):
                write_atomically(tmp_path / "x", die)
    write_atomically(tmp_path / "x", lambda file: file.write(b"whole"))
    assert (tmp_path / "x").read_bytes() == b"whole" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("error, seen", [
    (RuntimeError("PytorchStreamWriter failed writing file data/0\nstack"), UserError),
    (OSError(errno.ENOSPC, "No space left on device"), UserError),
    (KeyboardInterrupt(), KeyboardInterrupt),
])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, error, seen):
    save_checkpoint(tmp_path / "ckpt.pt", step=1)

    def full(content, file):
        file.write(b"PK half")
        raise error

    monkeypatch.setattr(common.torch, "save", full)
    with pytest.raises(seen) as caught:
        save_checkpoint(tmp_path / "ckpt.pt", step=2)
    if seen is UserError:
        message = str(caught.value)
        assert "ckpt.pt" in message and "old file is intact" in message and "\n" not in message
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


def as_pickle(content, path):
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("write", [torch.save, as_pickle])
def test_loading_a_checkpoint_runs_no_code(tmp_path, write):
    path, marker = tmp_path / "ckpt.pt", tmp_path / "marker"
    write(dict(format=common.FORMAT, model=Bomb(marker)), path)
    with pytest.raises(UserError, match="not a readable checkpoint"):
        load_checkpoint(path)
    assert not marker.exists()
    if write is torch.save:
        torch.load(path, weights_only=False)
    else:
        pickle.loads(path.read_bytes())
    assert marker.exists()                                # the bomb is a live one


def test_truncated_foreign_and_missing_checkpoints_are_named(tmp_path):
    save_checkpoint(tmp_path / "good.pt", x=torch.zeros(1000))
    whole = (tmp_path / "good.pt").read_bytes()
    half = whole[:len(whole) // 2]
    for name, data in (("half.pt", half), ("empty.pt", b""), ("text.pt", b"hello\n")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=f"{name}: not a readable checkpoint") as caught:
            load_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value)
    foreign = {"list.pt": [1], "dict.pt": dict(model=1), "old.pt": dict(format="x")}
    for name, content in foreign.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match=f"{name}: written by another program"):
            load_checkpoint(tmp_path / name)
    for place in (tmp_path / "no.pt", tmp_path / "no", tmp_path):
        with pytest.raises(UserError, match="no checkpoint here"):
            load_checkpoint(place)


# ---------------------------------------------------------------- flags

def test_flags_set_fields_of_their_types():
    assert parse_flags(Config, []) == Config()
    cfg = parse_flags(Config, "--steps 7 --lr=2e-4 --no-warm-up --fast --out".split() + ["a b"])
    assert cfg == Config(out="a b", steps=7, lr=2e-4, warm_up=False, fast=True)
    assert type(cfg.lr) is float and type(cfg.steps) is int


@dataclasses.dataclass(frozen=True)
class Several:
    names: tuple = ("a", "b")    # one or more
    steps: int = 5               # another


def test_a_flag_of_several_values():
    assert parse_flags(Several, []) == Several()
    assert parse_flags(Several, "--names x y --steps 2".split()) == Several(("x", "y"), 2)
    assert parse_flags(Several, ["--names", "x,y"]) == Several(("x,y",))
    with pytest.raises(SystemExit):
        parse_flags(Several, ["--names"])


@pytest.mark.parametrize("argv", [["--stepz", "3"], ["--step", "3"], ["--steps", "x"],
                                  ["--steps", "1.5"], ["stray"], ["--lr"]])
def test_unknown_or_malformed_flags_are_errors(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags(Config, argv)
    assert stop.value.code == 2 and argv[0].strip("-")[:4] in capsys.readouterr().err


def test_a_config_cannot_be_changed_or_misspelled():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3
    with pytest.raises(TypeError):
        Config(stepz=3)


def test_help_shows_each_comment_and_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags(Config, ["--help"], doc="What it does.\n  indented")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "What it does.\n  indented" in text
    for line in ("--steps INT", "optimizer steps (default 5)", "the stage's folder",
                 "learning rate, 100% of it (default 0.001)", "--warm-up, --no-warm-up",
                 "whether to hurry (default False)"):
        assert line in text, line


@pytest.mark.parametrize("name", ["pretrain", "distill", "preference", "ppo"])
def test_every_knob_of_a_stage_has_a_comment_that_becomes_its_help(name, capsys):
    Config = importlib.import_module(name).Config
    with pytest.raises(SystemExit):
        parse_flags(Config, ["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        flag, default = field.name.replace("_", "-"), re.escape(repr(field.default))
        shown = rf"--{flag}(?: [A-Z]+|, --no-{flag})\s+[^\s(].* \(default {default}\)"
        assert re.search(shown, text), field.name


# ---------------------------------------------------------------- a program's end

FULL = errno.ENOSPC, "No space left on device"


@pytest.mark.parametrize("error, status, said", [
    (UserError("a bad value"), "error: a bad value", ""),
    (OSError(*FULL, "x.pt"), "error: x.pt: No space left on device", ""),
    (OSError(*FULL), "error: output: No space left on device", ""),
    (KeyboardInterrupt(), "130", "the same command goes on"),
])
def test_a_program_ends_in_one_clear_line(monkeypatch, capsys, error, status, said):
    def main(cfg):
        raise error

    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as stop:
        entry(main, Config)
    assert str(stop.value.code).startswith(status) and "\n" not in str(stop.value.code)
    assert said in capsys.readouterr().err


def test_a_defect_keeps_its_traceback(monkeypatch):
    """Only mistakes that a person can mend are shortened."""
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(ZeroDivisionError):
        entry(lambda cfg: 1 / 0, Config)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="--device nonsense"):
        common.device_of("nonsense")


# ---------------------------------------------------------------- a run's folder

def test_a_run_is_made_resumed_and_found_finished(tmp_path):
    cfg = Config(out=str(tmp_path / "a" / "b"))
    run = Run(cfg, "stage")
    assert (run.step, run.resume, run.finished) == (0, None, False)
    assert json.loads((run.dir / "config.json").read_text()) == dict(stage="stage", **vars(cfg))
    for step in range(4):
        run.log(step, loss=step / 3, count=step)
        if step == 1:
            run.save(2, x=torch.ones(1))

    run = Run(cfg, "stage")
    assert (run.step, run.finished) == (2, False) and torch.equal(run.resume["x"], torch.ones(1))
    assert [m["step"] for m in metrics_of(run.dir)] == [0, 1]     # steps 2 and 3 are done again
    for step in range(2, 5):
        run.log(step, loss=step / 3, count=step)
    assert metrics_of(run.dir) == [
        dict(step=s, loss=float(f"{s / 3:.6g}"), count=s) for s in range(5)]
    run.save(5, finished=True)

    run = Run(cfg, "stage")
    assert run.finished and run.step == 5 and len(metrics_of(run.dir)) == 5


def test_a_line_torn_by_a_kill_is_dropped(tmp_path):
    cfg = Config(out=str(tmp_path))
    run = Run(cfg, "stage")
    run.log(0, loss=1.0)
    run.save(3)
    with open(run.dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    run = Run(cfg, "stage")
    run.log(3, loss=2.0)
    assert metrics_of(run.dir) == [dict(step=0, loss=1.0), dict(step=3, loss=2.0)]


def test_metrics_of_a_run_that_never_saved_are_dropped(tmp_path):
    Run(Config(out=str(tmp_path)), "stage").log(0, loss=1.0)
    assert metrics_of(Run(Config(out=str(tmp_path)), "stage").dir) == []


def test_a_run_with_other_flags_is_refused_and_the_flag_named(tmp_path):
    Run(Config(out=str(tmp_path)), "stage").save(1)
    with pytest.raises(UserError, match="made with steps=5, now 6"):
        Run(Config(out=str(tmp_path), steps=6), "stage")
    with pytest.raises(UserError, match="stage='stage', now 'other'"):
        Run(Config(out=str(tmp_path)), "other")


def test_a_moved_run_and_another_device_may_go_on(tmp_path):
    Run(Config(out=str(tmp_path / "a")), "stage").save(1)
    os.rename(tmp_path / "a", tmp_path / "b")
    assert Run(Config(out=str(tmp_path / "b"), device="cuda"), "stage").step == 1


def test_a_folder_that_cannot_take_the_run_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out .*file/x: cannot be written"):
        Run(Config(out=str(tmp_path / "file" / "x")), "stage")
    save_checkpoint(tmp_path / "ckpt.pt", taught=[1])
    with pytest.raises(UserError, match="is no run to continue"):
        Run(Config(out=str(tmp_path)), "stage")
    usage = common.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(common.shutil, "disk_usage", lambda _: usage._replace(free=10**7))
    with pytest.raises(UserError, match="less than 50 MB free"):
        Run(Config(out=str(tmp_path / "new")), "stage")


def test_only_rank_0_writes(tmp_path):
    run = Run(Config(out=str(tmp_path)), "stage", rank=1)
    run.log(0, loss=1.0)
    run.say("hello")
    run.save(1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_once_and_then_insists(tmp_path, number):
    run = Run(Config(out=str(tmp_path)), "stage")
    assert not run.stopping()
    os.kill(os.getpid(), number)
    assert run.stopping()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_samples_are_kept(tmp_path, capsys):
    run = Run(Config(out=str(tmp_path)), "stage")
    run.say("one")
    run.say("two")
    assert (tmp_path / "samples.txt").read_text() == "one\ntwo\n"
    assert "one" in capsys.readouterr().out
