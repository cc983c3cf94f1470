"""What must be right in every stage: flags, processes, random numbers, the optimizer step, folders.

The loops are not here: each stage shows its own. This file imports no other file of the project.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

FORMAT = "nanohh-1"  # the first key of every checkpoint; a file without it is foreign
LIMIT = float(os.environ.get("NANOHH_LIMIT", 40))  # seconds that ranks wait for one another
ALONE = 3600                                       # and for what rank 0 does alone
LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v"),
         ("#E69F00", "P"), ("#000000", "x"))      # of curves: for the colour-blind, and in grey


class UserError(Exception):
    """A mistake that a person can mend: printed as one line, without a traceback."""


# ---------------------------------------------------------------- flags

def parse_flags(Config, argv=None, doc=None):
    """A frozen dataclass from the command line: one flag a field, its comment is the help.

    `--no-x` turns a boolean field off; an unknown flag is an error in one line, exit status 2.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the flags\n")
    comments = dict(re.findall(r"^ +(\w+):.*?#\s*(.*)$", inspect.getsource(Config), re.M))
    for field in dataclasses.fields(Config):
        flag = "--" + field.name.replace("_", "-")
        text = f"{comments.get(field.name, '')} (default {field.default!r})".replace("%", "%%")
        if field.metadata.get("bare"):        # values without a flag, none or more
            parser.add_argument(field.name, nargs="*", default=field.default, metavar="NAME",
                                help=comments.get(field.name, ""))
        elif field.type in (bool, "bool"):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text,
                                default=field.default)
        elif field.type in (tuple, "tuple"):  # one value or more, blanks between
            parser.add_argument(flag, nargs="+", default=field.default, help=text, metavar="STR")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default, help=text,
                                metavar=type(field.default).__name__.upper())
    found = vars(parser.parse_args(argv))
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})


def entry(main, Config, doc=None, interrupted="the same command goes on from here"):
    """Run `main(cfg)` as a program: bad input, a full disk, Ctrl-C end in one line, non-zero."""
    cfg = parse_flags(Config, doc=doc)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until a Run takes both
    try:
        try:
            main(cfg)
        finally:
            for bar in list(tqdm._instances):  # or it would be drawn again after the line
                bar.close()
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"interrupted: {interrupted}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        sys.exit(f"error: {error.filename or 'output'}: {error.strerror or error}")
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        sys.exit(f"error: {lost(error)}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# ---------------------------------------------------------------- processes and devices

def device_of(name="auto"):
    """cuda, else mps, else cpu; under torchrun each process takes the GPU of its local rank."""
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: not usable here ({reason})") from None
    return torch.device(name)


def keep_memory():
    """Tells glibc to keep what is freed: else a step's tensors are new pages each time, which costs
    a training step on the CPU 5 to 10%. Elsewhere nothing.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2 ** 30)   # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 25)   # M_MMAP_THRESHOLD, its largest value


def start(device="auto"):
    """Join torchrun's processes (gloo on CPU, nccl on GPUs). Returns (rank, world, device).

    All must come within ALONE seconds; from then on they wait LIMIT seconds for one another.
    """
    device = device_of(device)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        store, rank, world = next(dist.rendezvous("env://"))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun keeps the store over restarts, with addresses of processes that are gone. On
            # several machines, which may count apart, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps.
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=world, timeout=timedelta(seconds=ALONE))
        groups()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    keep_memory()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms takes 2 s to import
    torch.utils.deterministic.fill_uninitialized_memory = False  # else each new tensor is written
    return (dist.get_rank(), world, device) if dist.is_initialized() else (0, 1, device)


@functools.cache
def groups():
    """Groups of all ranks, each with its limit: for gradients; by gloo, also beside nccl, for small
    things; and one a limit for `meet`, whose connections no failed collective has broken. There all
    but rank 0 wait as long as the group's own limit says.
    """
    made = [("gradients", None, LIMIT), ("small", "gloo", LIMIT),
            *((limit, "gloo", limit) for limit in (LIMIT / 4, LIMIT, ALONE))]
    return {name: dist.new_group(backend=backend, timeout=timedelta(seconds=limit))
            for name, backend, limit in made}


def meet(limit=None, first=None):
    """Every rank waits here for all others, `limit` seconds at most: LIMIT, LIMIT / 4 or ALONE.
    UserError that names the lost: a rank that hangs, or was killed, or is elsewhere.

    first: seconds that rank 0 waits, not more than LIMIT if it isn't given: with ALONE it is rank 0
    that comes late.
    """
    if not dist.is_initialized():
        return
    limit = limit or LIMIT
    try:
        dist.monitored_barrier(groups()[limit], timedelta(seconds=first or min(limit, LIMIT)),
                               wait_all_ranks=True)
    except RuntimeError as error:
        found, world = re.search(r"Ranks? ([\d, ]*\d) failed", str(error)), dist.get_world_size()
        gone = found[1] if found else ", ".join(str(r) for r in range(1, world) if closed(r, limit))
        who = f"rank {gone} is" if gone else "rank 0 or one it waits for is"
        raise UserError(f"{who} lost: it hangs, or has ended (says rank {dist.get_rank()} of "
                        f"{world}); the same command goes on from the last "
                        "checkpoint") from None


def closed(rank, limit):
    """Whether a rank's connection to rank 0, where this is asked, has ended with its process."""
    if dist.get_rank() != 0:
        return False
    try:
        dist.isend(torch.zeros(1), rank, group=groups()[limit])
    except RuntimeError:
        return True
    return False


def lost(error):
    """What to tell of a collective that failed: who is missing, if anybody is."""
    try:
        meet(LIMIT / 4)
    except UserError as missing:
        return missing
    return f"the ranks lost contact ({str(error).splitlines()[0][:120]})"


def total(*values):
    """Sums over all ranks of a few numbers, in float64. One value in, one float out; more a list.
    """
    sums = torch.tensor([float(v) for v in values], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(sums, group=groups()["small"])
    return sums.tolist() if len(values) > 1 else sums.item()


def highest(value):
    """The largest of all ranks' values, a float."""
    return max(everyones([float(value)], dist.get_world_size())) if dist.is_initialized() else value


def mine(rows, rank, world):
    """This rank's share of a step's global rows: the ranks' shares are disjoint and cover them."""
    return rows[rank::world]


def everyones(own, world):
    """The rows of all ranks in global order, on every rank: the inverse of `mine`."""
    if world == 1:
        return own
    parts = [None] * world
    dist.all_gather_object(parts, own, group=groups()["small"])
    return [parts[i % world][i // world] for i in range(sum(map(len, parts)))]


# ---------------------------------------------------------------- keyed random numbers

def keyed(*key):
    """A numpy Generator, a function of the key alone: (seed, stage, step, row), never the rank."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))


def uniforms(rows, width, *key):
    """Uniform float32 numbers in [0, 1), [len(rows), width]: row i depends on (key, rows[i])."""
    out = np.stack([keyed(*key, int(r)).random(width, dtype=np.float32) for r in rows])
    return torch.from_numpy(out)


@functools.lru_cache(2)
def epoch_order(n, *key):
    """The rows of one epoch in keyed order; kept, since of many rows it takes longer than a step.
    """
    return keyed(*key).permutation(n)


def batch_rows(n, batch, step, *key):
    """The row indices of one step: slices of a fresh permutation an epoch, a function of the key.

    Each epoch has n // batch whole batches; n must be at least `batch`.
    """
    per_epoch = n // batch
    if not per_epoch:
        raise UserError(f"{n} rows are fewer than one batch of {batch}: lower --batch")
    epoch, i = divmod(step, per_epoch)
    return epoch_order(n, *key, "epoch", epoch)[i * batch:(i + 1) * batch].copy()


# ---------------------------------------------------------------- the optimizer step

def adamw(model, lr, weight_decay=0.0, betas=(0.9, 0.95)):
    """AdamW; matrices decay, vectors do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in params if p.ndim >= 2], weight_decay=weight_decay),
              dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0)]
    fused = params[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)


def update(model, optimizer, lr, max_norm=1.0):
    """One step on the gradients, which are those of all ranks (parallel.py). Returns their norm, a
    float; of a sharded model's too it is that of all of them.

    Each loss has been divided by the count over ALL ranks and micro-batches, so a plain sum is the
    mean gradient and nothing depends on how the batch was cut. A norm that is not finite skips the
    step on every rank and is returned.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    if np.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def prepare(model, checkpoint, compile):
    """The model with its knobs for training. Raises UserError if it can't be compiled."""
    try:
        model.use(checkpoint, compile)
    except Exception as error:  # no compiler, no Python headers, a torch without it: many types
        raise UserError(f"--compile: {str(error).strip().splitlines()[0][:120]}") from None
    return model


def schedule(step, steps, lr, warmup=0, floor=0.0, shape="linear"):
    """Learning rate at `step` of `steps`: linear warm-up, then `shape` (to floor * lr).

    shape: "linear", "cosine" or "constant".
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    if shape == "constant":
        return lr
    left = 1 - done if shape == "linear" else 0.5 * (1 + np.cos(np.pi * done))
    return lr * (floor + (1 - floor) * float(left))


# ---------------------------------------------------------------- checkpoints

def write_atomically(path, write):
    """write(file) into a hidden file beside it, sync, rename: the old file or the new, whole."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")  # always the same: what a kill left is overwritten
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        cause = error  # torch's writer hides "no space left" in a RuntimeError
        while cause and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause or isinstance(error, RuntimeError):
            reason = cause.strerror if cause else str(error).splitlines()[0]
            raise UserError(f"{path}: not written ({reason}); the old file is intact") from None
        raise


def save_checkpoint(path, **content):
    """Tensors, numbers, strings and containers of them; atomic."""
    write_atomically(path, lambda file: torch.save(dict(format=FORMAT, **content), file))


def load_checkpoint(path, device="cpu"):
    """Read a checkpoint file or the ckpt.pt of a folder. Runs no code from it (weights_only). Its
    tensors stay in the file until they are used (mmap), and ranks of one machine share them there.

    Raises UserError for a missing, truncated or foreign file.
    """
    path = Path(path)
    path = path / "ckpt.pt" if path.is_dir() or not path.suffix else path
    if not path.exists():
        raise UserError(f"{path}: no checkpoint here; run the stage that writes it first")
    try:
        content = torch.load(path, map_location=device, weights_only=True, mmap=True)
    except Exception as error:  # a truncated zip, a pickle with code, text: torch raises many types
        reason = (str(error) or "it is empty").splitlines()[0][:120]
        raise UserError(f"{path}: not a readable checkpoint ({reason})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: written by another program or version (no {FORMAT!r} mark)")
    return content


def load_source(path, scalar=None):
    """The checkpoint of a model to start from.

    scalar False: a language model, True: a preference model, None: either. Raises UserError if it
    holds another kind, or no model.
    """
    content = load_checkpoint(path)
    if not {"gpt", "model", "tokenizer"} <= content.keys():
        raise UserError(f"{path}: holds no model; name the folder of a stage that trains one")
    if scalar is not None and content["gpt"]["scalar"] != scalar:
        raise UserError(f"{path}: " + ("a language model, not a preference model; train one with "
                                       "preference.py" if scalar else "a preference model, not a "
                                       "language model: it scores answers and can't give them"))
    return content


def need_one_vocabulary(path, content, others):
    """UserError unless all `others`, {path: checkpoint's content}, read the tokens of the first."""
    for other, it in others.items():
        if it["tokenizer"] != content["tokenizer"]:
            raise UserError(f"{path} and {other} have different vocabularies: both must come from "
                            "one base model")


# ---------------------------------------------------------------- a run's folder

def metrics_of(folder):
    """The metric lines of a stage's folder, [] before the first."""
    path = Path(folder) / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


class Run:
    """The folder of one stage: config.json, metrics.jsonl, samples.txt, ckpt.pt.

    `resume` is the checkpoint to continue from, or None. Ctrl-C and SIGTERM ask the loop to stop at
    the next step's end (`stopping()`), where it saves; the same command goes on, bit for bit.
    """

    def __init__(self, cfg, stage, rank=0):
        self.dir, self.stage, self.rank, self.asked = Path(cfg.out), stage, rank, False
        config = dict(stage=stage, **dataclasses.asdict(cfg))
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                with tempfile.TemporaryFile(dir=self.dir):
                    pass
        except OSError as error:
            raise UserError(f"--out {self.dir}: cannot be written ({error.strerror})") from None
        if shutil.disk_usage(self.dir).free < 50e6:
            raise UserError(f"--out {self.dir}: less than 50 MB free on that disk")
        self.resume = load_checkpoint(self.dir) if (self.dir / "ckpt.pt").exists() else None
        if self.resume:
            if "config" not in self.resume:
                raise UserError(f"{self.dir}: its checkpoint is no run to continue; choose another "
                                "--out")
            defaults = {f.name: f.default for f in dataclasses.fields(cfg)}
            old = {**defaults, **self.resume["config"]}  # a younger knob was at its default
            free = ("out", "device", "shard", "checkpoint")    # what changes no number
            changed = [k for k in config if k not in free and old.get(k) != config[k]]
            if changed:
                k = changed[0]
                raise UserError(f"{self.dir} was made with {k}={old.get(k)!r}, now {config[k]!r}: "
                                "choose another --out or delete the folder")
        self.config = config
        self.step = self.resume["step"] if self.resume else 0
        steps = everyones([self.step], dist.get_world_size()) if dist.is_initialized() else [0]
        if len(set(steps)) > 1:
            raise UserError(f"--out {self.dir}: its checkpoint is of step {steps[0]} for rank 0 and"
                            f" of {max(steps[1:], key=lambda x: x != steps[0])} for another: it "
                            "must be on a disk that all machines share")
        self.finished = bool(self.resume and self.resume["finished"])
        if self.finished:
            return
        if rank == 0:
            text = json.dumps(config, indent=1).encode()
            write_atomically(self.dir / "config.json", lambda f: f.write(text))
            self._forget_after(self.step if self.resume else -math.inf)
        signal.signal(signal.SIGINT, self._ask)  # on every rank: torchrun tells them all
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _forget_after(self, step):
        """Drops metrics of steps that the resumed run will do again: each step has one line."""
        path = self.dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [x for x in lines if x.endswith("}") and json.loads(x)["step"] < step]
        write_atomically(path, lambda f: f.write("".join(x + "\n" for x in kept).encode()))

    def stopping(self):
        """Whether any rank was asked to stop; every rank gets the same answer."""
        return total(self.asked) > 0

    def log(self, step, **metrics):
        """One JSON line of plain numbers."""
        if self.rank == 0:
            row = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in metrics.items()}
            with open(self.dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(dict(step=step, **row)) + "\n")

    def save(self, step, finished=False, **content):
        """Checkpoint after `step` steps, by rank 0. All ranks call it and wait until it is there.

        Raises KeyboardInterrupt after the last one if the run was asked to stop meanwhile.
        """
        if self.rank == 0:
            save_checkpoint(self.dir / "ckpt.pt", step=step, finished=finished,
                            config=self.config, **content)
        meet(ALONE)
        if finished and self.asked:  # too late to stop this stage, but a script shall not go on
            raise KeyboardInterrupt

    def say(self, text):
        """Text above the progress bar, and into samples.txt."""
        if self.rank == 0:
            tqdm.write(text)
            with open(self.dir / "samples.txt", "a") as file:
                file.write(text + "\n")

    def bar(self, steps, done):
        return tqdm(total=steps, initial=done, desc=f"{self.stage:<10}", disable=self.rank > 0,
                    dynamic_ncols=True, smoothing=0.1, mininterval=0.5)
