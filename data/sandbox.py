"""Runs Python programs that a model wrote: in a cell without files, network and other processes.

Only inside Linux namespaces, and nothing else ever runs them: where the kernel forbids these, on
macOS and on Windows, `run` refuses. Three processes for each program:

    warden     makes user, mount, process, network, ipc and host-name namespaces, is nobody in
               there, and pivots into an empty read-only tmpfs whose old root is unmounted
    examiner   process 1 in there: runs the tests, and ends everything in there when it ends
    candidate  process 2: runs the program and answers calls of its function

Examiner and candidate have no capabilities, no new privileges, no memory over the limit, no new
file, descriptor or process, and may use only the system calls in CALLS. The program's output goes
nowhere. Examiner and candidate share two pipes, over which they send literals: so a program can
neither see its tests nor say that it passed; it can only return values, and the examiner compares
them. (Without a check, "passed" is the candidate's own word that the program ended.)

What a cell can't keep out is a fault in the kernel. Time is wall-clock time: on a crowded machine
a slow program may be told as a timeout.

    outcome   passed, failed: the exception's name, timeout, memory, killed

70 to 100 ms a program on one core, most of it for Python to start.
"""

import ast
import builtins
import contextlib
import ctypes
import json
import math
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time

# What programs may import: all that is in memory before the files are gone.
MODULES = (
    "abc array bisect calendar cmath collections collections.abc contextlib copy csv dataclasses "
    "datetime decimal enum fractions functools hashlib heapq io itertools json keyword math "
    "numbers operator os pprint queue random re resource secrets statistics string struct sys "
    "textwrap threading time typing unicodedata uuid warnings zlib _strptime encodings.ascii "
    "encodings.latin_1 encodings.utf_16 encodings.idna").split()

# System calls that a program which only computes needs: name -> number on x86_64, on aarch64.
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "nanosleep": (35, 101),
    "getpid": (39, 172), "exit": (60, 93), "wait4": (61, 260), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "times": (100, 153), "sigaltstack": (131, 132), "gettid": (186, 178),
    "futex": (202, 98), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "getrandom": (318, 278)}
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}    # names in the kernel's audit.h

NEW = dict(user=0x10000000, mount=0x20000, pid=0x20000000, net=0x40000000, ipc=0x08000000,
           uts=0x04000000)
NOBODY, START, LONGEST = 65534, 60, 1 << 20                 # seconds to start, bytes of a message
OUTCOME = re.compile(r"passed|failed: \w{1,60}|timeout|memory|killed")


# ---------------------------------------------------------------- values between two processes

def plain(value):
    """A value as the text of a literal; TypeError for what is none. Subclasses become the builtin.
    """
    if value is None or isinstance(value, (bool, str, bytes, complex)):
        return repr(value) if value is None or type(value) in (bool, bytes, complex) else repr(
            str(value))
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return f"{'-' * (value < 0)}1e999" if math.isinf(value) else repr(float(value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{plain(k)}: {plain(v)}' for k, v in value.items())}}}"
    inner = ", ".join(map(plain, value)) if isinstance(value, (list, tuple, set)) else None
    if isinstance(value, list):
        return f"[{inner}]"
    if isinstance(value, tuple):
        return f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, set):
        return f"{{{inner}}}" if value else "set()"
    raise TypeError(f"a {type(value).__name__} is no literal")


def send(fd, **message):
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data):]


def receive(fd, buffer):
    """The next message of at most LONGEST bytes, or None at the end; buffer: a bytearray."""
    while b"\n" not in buffer:
        if len(buffer) > LONGEST:
            raise OverflowError("a message without an end")
        data = os.read(fd, 1 << 16)
        if not data:
            return None
        buffer += data
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return json.loads(line)


# ---------------------------------------------------------------- the warden: walls

def call(name, *args):
    """A function of the C library. OSError naming it if it says -1."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)


def write_file(path, text):
    with open(path, "w") as file:
        file.write(text)


def wall_in():
    """New namespaces for this process and its children; an empty root. It stays without rights."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", 4, 1, 0, 0, 0)                        # PR_SET_DUMPABLE: /proc/self is its own
    uid, gid = os.getuid(), os.getgid()
    call("unshare", sum(NEW.values()))
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{NOBODY} {uid} 1")
    write_file("/proc/self/gid_map", f"{NOBODY} {gid} 1")
    call("mount", None, b"/", None, 0x4000 | 0x40000, None)              # MS_REC | MS_PRIVATE
    safe = 2 | 4 | 8                                                     # no suid, device, program
    call("mount", b"none", b"/tmp", b"tmpfs", safe, b"size=4k,nr_inodes=2,mode=0555")
    os.chdir("/tmp")
    call("pivot_root", b".", b".")                          # the old root lies over the new one
    call("umount2", b".", 2)                                # MNT_DETACH
    os.chdir("/")
    call("mount", None, b"/", None, safe | 1 | 32, None)    # MS_RDONLY | MS_REMOUNT


def give_up_rights():
    """No capability, and none to get; nobody may look into this process."""
    call("prctl", 4, 0, 0, 0, 0)                            # PR_SET_DUMPABLE
    call("prctl", 38, 1, 0, 0, 0)                           # PR_SET_NO_NEW_PRIVS
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)           # _LINUX_CAPABILITY_VERSION_3
    call("capset", header, (ctypes.c_uint32 * 6)())


def limit(memory, seconds):
    import resource  # not on Windows, where this file must import
    for name, most in (("AS", memory), ("CPU", seconds), ("FSIZE", 0), ("NOFILE", 0), ("NPROC", 0),
                       ("CORE", 0), ("MEMLOCK", 0), ("MSGQUEUE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def allow_calls():
    """From now on each system call outside CALLS fails with EPERM (seccomp)."""
    machine = platform.machine()
    numbers = [pair[list(MACHINES).index(machine)] for pair in CALLS.values()]
    load, equal, back = 0x20, 0x15, 0x06                    # BPF_LD | W | ABS, BPF_JEQ | K, BPF_RET
    lines = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[machine]), (back, 0, 0, 0x80000000),  # kill
             (load, 0, 0, 0)]
    lines += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(back, 0, 0, 0x00050001), (back, 0, 0, 0x7FFF0000)]        # EPERM; allow
    code = b"".join(a.to_bytes(2, sys.byteorder) + bytes((jt, jf)) + k.to_bytes(4, sys.byteorder)
                    for a, jt, jf, k in lines)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]

    call("prctl", 22, 2, ctypes.byref(Program(len(lines), code)), 0, 0)  # PR_SET_SECCOMP


# ---------------------------------------------------------------- the candidate and the examiner

def answer(source, target):
    """The candidate: runs the code that it is sent, then calls what it is asked to."""
    space, buffer = {"__name__": "program"}, bytearray()
    while job := receive(source, buffer):
        try:
            if "code" in job:
                exec(compile(job["code"], "program", "exec"), space)
                reply = dict(value="None")
            else:
                args, named = ast.literal_eval(job["args"])
                reply = dict(value=plain(space[job["entry"]](*args, **named)))
        except BaseException as error:  # SystemExit too: it must not pass for an answer
            reply = dict(error=type(error).__name__)
        send(target, **reply)


class Gone(BaseException):
    """The candidate has ended; no `except Exception` of a test catches it."""


class Candidate:
    """The examiner's side of the candidate: what it can't tell from a function of its own."""

    def __init__(self, pid, source, target, entry):
        self.pid, self.source, self.target, self.entry = pid, source, target, entry
        self.buffer = bytearray()

    def ask(self, **message):
        """The value that comes back; the exception that came instead, by its name."""
        try:
            send(self.target, **message)
            reply = receive(self.source, self.buffer)
        except BrokenPipeError:
            reply = None
        if reply is None:
            status = os.waitpid(self.pid, 0)[1]
            by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            raise Gone({0: "failed: SystemExit", signal.SIGXCPU: "timeout"}.get(by, "killed"))
        if "error" in reply:
            name = re.sub(r"\W", "_", str(reply["error"]))[:60] or "_"
            known = getattr(builtins, name, None)
            plain_one = isinstance(known, type) and issubclass(known, (
                ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError,
                RuntimeError, TypeError, ValueError)) and not issubclass(known, UnicodeError)
            raise known if plain_one else type(name, (Exception,), {})
        return ast.literal_eval(reply["value"])

    def __call__(self, *args, **named):
        return self.ask(entry=self.entry, args=plain((args, named)))


def examine(candidate, code, check):
    """The outcome."""
    try:
        candidate.ask(code=code)
        exec(compile(check, "check", "exec"), {"__name__": "check", "candidate": candidate})
    except Gone as gone:
        return str(gone)
    except MemoryError:
        return "memory"
    except BaseException as error:
        return f"failed: {type(error).__name__[:60]}"
    return "passed"


def lock(memory, seconds, layers):
    if layers > 0:
        limit(memory, seconds)
    give_up_rights()
    if layers > 1:
        allow_calls()


def process_1(job, null, memory, seconds, layers):
    """Forks the candidate before it reads the job, so that the candidate never had the tests."""
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)               # PR_SET_PDEATHSIG: ends with the warden
    signal.signal(signal.SIGINT, signal.SIG_DFL)            # process 1 gets what it has handlers of
    (source, reply), (asked, target) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        for old, new in ((null, 0), (null, 1), (null, 2), (asked, 100), (reply, 101)):
            os.dup2(old, new)
        os.closerange(3, 100)
        os.closerange(102, 1 << 12)
        lock(memory, seconds, layers)
        answer(100, 101)
        os._exit(0)
    os.close(reply)
    os.close(asked)
    lock(memory, seconds, layers)
    os.write(1, b"ready\n")
    data = bytearray()
    while part := os.read(job, 1 << 16):
        data += part
    job = json.loads(data)
    outcome = examine(Candidate(pid, source, target, job["entry"]), job["code"], job["check"])
    os.write(1, outcome.encode() + b"\n")


def warden(job, memory, seconds, layers):
    """Main of the process that `run` starts. It ends, and all else with it, when its stdin does."""
    try:
        for name in MODULES:
            __import__(name)
        null = os.open(os.devnull, os.O_RDWR)
        wall_in()
        pid = os.fork()
        if pid == 0:
            process_1(job, null, memory, seconds, layers)
            os._exit(0)
    except Exception as error:  # whatever it is, nothing was run
        os.write(1, f"refused: {error}\n".encode())
        os._exit(1)
    os.close(1)
    os.close(job)
    os.read(0, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# ---------------------------------------------------------------- from outside

def line_of(fd, seconds):
    """The next line, "" if the other side ended without one, None after so many seconds."""
    line, end, poll = bytearray(), time.monotonic() + seconds, select.poll()
    poll.register(fd, select.POLLIN)                        # select.select refuses fd 1024 and more
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            return None
        data = os.read(fd, 1)
        if not data:
            return ""
        line += data
    return line.decode(errors="replace").strip()


def run(code, check="", entry="", seconds=1.0, memory=256 << 20, layers=2):
    """The outcome of a program, in a cell of its own.

    code: its text. check: text of the tests, run by the examiner, in which `candidate` calls the
    program's function `entry`; arguments and results are literals. seconds: wall-clock time from
    when the cell stands. memory: bytes of addresses, Python's own 25 MiB among them. layers: fewer
    than 2 is for tests of what holds alone: 1 without the filter of calls, 0 without limits too.

    ValueError, and nothing ran, where there are no such namespaces.
    """
    need = "programs that a model wrote run only in Linux namespaces"
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise ValueError(f"{need}, on {' or '.join(MACHINES)}: this is {sys.platform}, "
                         f"{platform.machine()}")
    job_out, job_in = os.pipe()
    words = map(str, (job_out, memory, math.ceil(seconds) + 1, layers))
    process = subprocess.Popen([sys.executable, "-I", "-S", "-B", "-X", "utf8", __file__, *words],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={},
                               stderr=subprocess.DEVNULL, pass_fds=[job_out])
    with process, open(job_in, "wb") as job:
        os.close(job_out)
        report = process.stdout.fileno()
        first = line_of(report, START)
        if first != "ready":
            told = first or "it did not start"
            raise ValueError(f"{need}, which this machine does not give: "
                             f"{told.removeprefix('refused: ')}")
        with contextlib.suppress(BrokenPipeError):
            job.write(json.dumps(dict(code=code, check=check, entry=entry)).encode())
            job.close()
        outcome = line_of(report, seconds)
    if outcome is None:
        return "timeout"
    return outcome if OUTCOME.fullmatch(outcome) else "killed"


# ---------------------------------------------------------------- HumanEval

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")      # Chen et al. 2021, 3.2


def cut(completion):
    """The completion up to where it begins something new."""
    return completion[:min([i for i in map(completion.find, STOPS) if i >= 0], default=None)]


def solve(item, completion, **limits):
    """The outcome of a completion of an item of HumanEval."""
    entry = item["entry_point"]
    check = f"{item['prompt']}\n{item['test']}\n{entry} = candidate\ncheck(candidate)\n"
    return run(item["prompt"] + cut(completion), check, entry, **limits)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("error: data.sandbox.run starts this file; there is nothing to start by hand")
    warden(*map(int, sys.argv[1:]))
