"""The stages at toy sizes, run as processes that cost a fork.

    Nursery     imports torch and the project once, then forks a worker for each command. A worker
                is what `python pretrain.py --flags` is: the file runs as __main__ with its own
                argv, output and exit status, and dies of its own signals.
    Pipeline    the uninterrupted run of each stage, made when a test first asks for it.
    hooks       what a test can plant in a worker: a signal at a certain moment, a spy, a limit.
"""

import hashlib
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = float(os.environ.get("NANOHH_PATIENCE", 1))  # times all limits, on a busy machine
SCRIPTS = ("pretrain", "distill", "collect", "preference", "ppo", "eval", "sample", "analyze",
           "feedback", "online", "elo", "harm", "ood", "benchmark", "constitution")
STAGES = ("pretrain", "distill", "collect", "pmp", "pm", "ppo")  # in the pipeline's order

# 10 optimizer steps each, checkpoints between them, and micro-batches that do not divide a batch
FLAGS = {
    "base": dict(size="nano", vocab=512, context=320, documents=300, steps=40, batch=8, warmup=5,
                 every=1000),
    "pretrain": dict(size="nano", vocab=400, context=128, documents=60, steps=10, batch=8, micro=3,
                     warmup=3, every=3),
    "distill": dict(texts=24, length=40, steps=10, batch=6, micro=4, every=3),
    "collect": dict(count=44, new=10),
    "pmp": dict(pairs=62, batch=6, micro=4, warmup=2, every=5),
    "pm": dict(pairs=0, batch=4, micro=3, warmup=2, every=5),
    "sft": dict(demos=80, epochs=1, batch=8, micro=3, mix=0.25, eval_prompts=4, new=8, every=3),
    "harm": dict(count=40, test=4, prompts=2, samples=2, new=8, batch=4, micro=3, every=4),
    "ppo": dict(iterations=5, samples=8, minibatch=4, epochs=1, micro=3, calibrate=8, new=8,
                warmup=2, every=2),
}
SCRIPT = dict(base="pretrain", pmp="preference", pm="preference")
NEEDS = {  # flag -> the run that it names
    "sft": dict(init="base", pm="pmp"), "harm": dict(init="base", attacked="base"),
    "distill": dict(init="base"), "collect": dict(policy="distill"), "pmp": dict(init="base"),
    "pm": dict(init="pmp", data="collect"), "ppo": dict(policy="distill", pm="pm"),
}


# ---------------------------------------------------------------- commands as forked processes

@dataclass
class Done:
    """A command that has ended: its exit status (-9: killed), output, and what its hooks saw."""
    code: int
    out: str
    err: str
    report: dict

    @property
    def last(self):
        """The last line on stderr that a person sees."""
        lines = [x for x in self.err.replace("\r", "\n").splitlines() if x.strip()]
        return lines[-1] if lines else ""


class Job:
    """A command that runs."""

    def __init__(self, folder, server):
        self.folder, self.server = folder, server

    def file(self, name, timeout):
        """Text of one of the job's files, once it is there."""
        path, end = self.folder / name, time.monotonic() + timeout * PATIENCE
        while not path.exists():
            late = time.monotonic() > end
            if late or self.server.poll() is not None:
                if late and name == "code":
                    self.kill(signal.SIGKILL)
                said = contents(self.folder).get("err", b"").decode(errors="replace")[-2000:]
                raise TimeoutError(f"no {name} after {timeout} s, or no server any more\n{said}")
            time.sleep(0.005)
        return path.read_text(errors="replace")

    @property
    def pid(self):
        return int(self.file("pid", 60))

    def kill(self, number):
        os.kill(self.pid, number)

    def wait(self, timeout=120):
        code = int(self.file("code", timeout))
        report = self.folder / "report"
        return Done(code, self.file("out", 1), self.file("err", 1),
                    json.loads(report.read_text()) if report.exists() else {})


class Nursery:
    """Forks commands from one process that has imported torch and the project."""

    def __init__(self, folder):
        self.folder, self.numbers = Path(folder), itertools.count()
        env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            env.pop(name, None)
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True,
                                       env=env, cwd=ROOT)

    def close(self):
        self.server.kill()  # its workers have ended, or will by themselves
        self.server.wait()

    def start(self, argv, hooks=(), env=None):
        """Start `python ARGV` (a script, or -c and code). hooks: [(name, argument)]."""
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        for name in ("out", "err"):  # there even if it is killed before its first line
            (folder / name).touch()
        job = dict(argv=list(map(str, argv)), hooks=list(hooks), env=env or {}, folder=str(folder))
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return Job(folder, self.server)

    def run(self, argv, hooks=(), env=None, timeout=120):
        return self.start(argv, hooks, env).wait(timeout)

    def run_all(self, argvs):
        """Commands side by side, each with its outcome in the order given."""
        return [job.wait() for job in [self.start(argv) for argv in argvs]]

    def start_ranks(self, world, argv, hooks=()):
        """The processes of `torchrun --nproc_per_node=WORLD ARGV`, with the environment it sets."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = dict(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        return [self.start(argv, hooks, {k: str(v) for k, v in dict(
            env, RANK=r, LOCAL_RANK=r).items()}) for r in range(world)]

    def ranks(self, world, argv, hooks=(), timeout=120):
        jobs = self.start_ranks(world, argv, hooks)
        return [j.wait(timeout) for j in jobs]


def serve():
    """The server's loop: a line of JSON is a job. Each gets a parent that notes pid and status."""
    sys.path.insert(0, str(ROOT))
    for name in (*SCRIPTS, "torch._dynamo", "torch._inductor.config", "torch.distributed.tensor",
                 "torch.distributed.fsdp"):        # the first step's imports
        importlib.import_module(name)
    sys.argv = sys.argv[:1]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            job = json.loads(line)
            folder = Path(job["folder"])
            pid = os.fork()
            if pid == 0:
                work(job, folder)
            note(folder / "pid", pid)
            status = os.waitpid(pid, 0)[1]
            note(folder / "code", os.waitstatus_to_exitcode(status))
            os._exit(0)


def note(path, value):
    """A file that is there only with its content."""
    path.with_suffix(".part").write_text(str(value))
    path.with_suffix(".part").rename(path)


def work(job, folder):
    """Be the command: run its file as __main__ and end as Python would."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # a fresh one: the server has read from its own
    os.environ.update(job["env"])
    code, finish = 0, []
    try:
        for name, argument in job["hooks"]:
            finish.append(HOOKS[name](argument))
        sys.argv = job["argv"]
        if sys.argv[0] == "-c":
            exec(sys.argv.pop(1), dict(__name__="__main__"))
        else:
            runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    report = {k: v for tell in finish if tell for k, v in tell().items()}
    report["cpu"] = round(sum(os.times()[:2]), 2)
    note(folder / "report", json.dumps(report))  # whole or not there: it may be killed here
    sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------- hooks

def at_event(argument):
    """Send a signal to this process at its event `number`; the report counts the events.

    Events: before and after each rename of a file into place, metrics line and sample; and, for
    SIGKILL, a metrics line of which only a part reached the disk.
    """
    import common
    number, name = argument
    counter, Run = itertools.count(), common.Run
    replace, log, say = os.replace, Run.log, Run.say

    def event(before=None):
        if next(counter) == number:
            if before:
                before()
            os.kill(os.getpid(), getattr(signal, name))

    def torn(path):
        os.truncate(path, path.stat().st_size - 7)

    def replaced(*args):
        event()
        replace(*args)
        event()

    def logged(self, *args, **metrics):
        event()
        log(self, *args, **metrics)
        if self.rank == 0 and name == "SIGKILL":
            event(lambda: torn(self.dir / "metrics.jsonl"))
        event()

    def said(self, text):
        event()
        say(self, text)
        event()

    os.replace, Run.log, Run.say = replaced, logged, said
    return lambda: dict(events=next(counter))


def at_step(argument):
    """Send a signal to this process after the metrics line of a step; [step, signal, rank]."""
    import common
    step, name, rank = argument
    log = common.Run.log

    def logged(self, now, **metrics):
        log(self, now, **metrics)
        if now == step and self.rank == rank:
            common.Run.log = log  # once: an evaluation logs the same step again
            os.kill(os.getpid(), getattr(signal, name))

    common.Run.log = logged
    return None


def at_call(argument):
    """Send a signal to this process when it calls a function the n-th time: [name, n, signal], and
    maybe the only rank that does.
    """
    name, number, sent, *ranks = argument
    if ranks and os.environ.get("RANK") != str(ranks[0]):
        return None
    *place, called_name = name.split(".")                 # module.function, module.Class.function
    module = importlib.import_module(place[0])
    for part in place[1:]:
        module = getattr(module, part)
    inner, counter = getattr(module, called_name), itertools.count(1)

    def called(*args, **kwargs):
        if next(counter) == number:
            os.kill(os.getpid(), getattr(signal, sent))
        return inner(*args, **kwargs)

    setattr(module, called_name, called)
    return None


def spy(_):
    """Report what was sampled, a checksum of the weights after each step, and the collectives."""
    import torch.distributed as dist

    import common
    import model
    import rollout
    drawn, sums, calls = [], [], []
    generate, update = model.generate, common.update

    def generated(network, prompts, *args, **kwargs):
        out = generate(network, prompts, *args, **kwargs)
        each = len(out[0]) // len(prompts)
        asked = [p for p in prompts for _ in range(each)]
        rows = [p + t[:n] for p, t, n in zip(asked, out[0].tolist(), out[1].tolist())]
        drawn.append([rows[i:i + each] for i in range(0, len(rows), each)] if each > 1 else rows)
        return out

    def updated(network, *args, **kwargs):
        start = [digest(network)] if not sums else []
        norm = update(network, *args, **kwargs)
        sums.extend([*start, digest(network)])
        return norm

    def counted(name, inner):
        def call(*args, **kwargs):
            calls.append(name)
            return inner(*args, **kwargs)
        return call

    model.generate = rollout.generate = generated     # rollout is no script: it is there already
    common.update = updated
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "gather",
                 "monitored_barrier", "broadcast_object_list", "reduce", "scatter"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    return lambda: dict(drawn=drawn, sums=sums, calls=calls)


def digest(network):
    content = b"".join(p.detach().numpy().tobytes() for p in network.parameters())
    return hashlib.sha256(content).hexdigest()[:16]


def waits(seconds):
    """How long ranks wait for one another."""
    import common
    common.LIMIT = seconds * PATIENCE


def file_limit(size):
    """No file may grow beyond `size` bytes: a write fails in its middle, as on a full disk."""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def fill_disk(argument):
    """Fill the disk of folder `place` before the n-th checkpoint; remove `place`/filler after."""
    import common
    place, number = argument
    inner, counter = common.save_checkpoint, itertools.count(1)

    def saved(*args, **kwargs):
        if next(counter) == number:
            with open(Path(place) / "filler", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(2**16)):
                        pass
                except OSError:
                    pass
        return inner(*args, **kwargs)

    common.save_checkpoint = saved
    return None


HOOKS = dict(at_event=at_event, at_step=at_step, at_call=at_call, spy=spy, file_limit=file_limit,
             fill_disk=fill_disk, waits=waits)


# ---------------------------------------------------------------- the runs

class Pipeline:
    """`whole(stage)` is the folder of that stage's uninterrupted run on one process."""

    def __init__(self, root, nursery):
        self.root, self.nursery, self.seconds = root, nursery, {}

    def command(self, stage, out, **flags):
        """argv of a stage, with its inputs made; `flags` beside or instead of those of FLAGS."""
        needs = {k: v if k in flags else self.whole(v) for k, v in NEEDS.get(stage, {}).items()}
        flags = {**needs, **FLAGS[stage], "device": "cpu", **flags, "out": out}
        return [SCRIPT.get(stage, stage) + ".py",
                *(x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v)))]

    def whole(self, stage):
        folder = self.root / stage
        if stage not in self.seconds:
            argv = self.command(stage, folder)
            begin = time.monotonic()
            done = self.nursery.run(argv, hooks=[("spy", 0), ("at_event", [-1, "SIGKILL"])])
            assert done.code == 0, done.err
            self.seconds[stage] = time.monotonic() - begin
            (self.root / f"{stage}.json").write_text(json.dumps(done.report))
        return folder

    def report(self, stage):
        """What the hooks saw in the uninterrupted run: events, drawn, sums, calls."""
        self.whole(stage)
        return json.loads((self.root / f"{stage}.json").read_text())


def contents(folder):
    """name -> bytes of all files of a folder, or {} if there is none."""
    folder = Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def checkpoint(folder):
    import common
    return common.load_checkpoint(folder)


def distance(a, b):
    """Largest difference of the numbers in two nested contents; inf where anything else differs."""
    import torch
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((distance(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return max(map(distance, a, b), default=0.0)
    if torch.is_tensor(a) and torch.is_tensor(b) and (a.shape, a.dtype) == (b.shape, b.dtype):
        far = 0.0 if torch.equal(a, b) else (a.double() - b.double()).abs().max().item()
        return far if far == far else float("inf")
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) if abs(a - b) == abs(a - b) else float("inf")
    return 0.0 if a == b else float("inf")


def parts(folder):
    """What must not depend on interruptions: all of the checkpoint but the folder's own name."""
    content = checkpoint(folder)
    return dict(content, config={k: v for k, v in content["config"].items() if k != "out"})


def same(whole, folder, tolerance=0.0):
    """Both folders hold the same run; only samples.txt may tell a sample twice."""
    a, b = contents(whole), contents(folder)
    assert a.keys() == b.keys()
    if "ckpt.pt" in a:
        assert distance(parts(whole), parts(folder)) <= tolerance
        assert checkpoint(folder)["finished"]
    for name in a.keys() & {"metrics.jsonl", "comparisons.jsonl"}:
        assert tolerance or a[name] == b[name], name


if __name__ == "__main__":
    serve()
