"""Programs that attack their cell, at each layer that shall hold: namespaces alone (0), with limits
(1), with the filter of system calls (2, what `run` does).

Proved alive by: no network or process namespace, the old root left under the new one, a root that
can be written, capabilities kept, no "no new privileges", an examiner that can be read or is not
deaf to signals, does not end with its warden, or keeps the candidate's descriptors open; room for
children, an environment, a filter that allows all, one call more, or is not there; a candidate that
ended or an expression that passes, values by repr, a message without an end, a cell that goes on
after its time, an entry point that is the prompt's own, output that is kept, memory as a failure, a
refusal that is not told.
"""

import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data import sandbox
from data.items import read_humaneval
from data.sandbox import CALLS, OUTCOME, cut, line_of, plain, run, solve

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def cell():
    """run(...), with time for a crowded machine. Skips where it refuses, and fails there in CI."""
    try:
        assert run("x = 1", seconds=60) == "passed"
    except ValueError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    return lambda code, *args, **more: run(code, *args, **{"seconds": 20, **more})


def denied(cell, *attacks, layers=LAYERS, by="OSError"):
    """Each attack ends with an exception of the class `by`, at each layer, in one cell of them."""
    code = f"""
for number, attack in enumerate({attacks!r}):
    try: exec(attack, {{}})
    except {by}: continue
    raise type(f"Worked{{number}}", (Exception,), {{}})
"""
    assert [cell(code, layers=n) for n in layers] == ["passed"] * len(layers), attacks


# ---------------------------------------------------------------- outcomes

@pytest.mark.parametrize("code, outcome", [
    ("x = 1", "passed"), ("", "passed"), ("1 / 0", "failed: ZeroDivisionError"),
    ("x = (", "failed: SyntaxError"), ("assert False", "failed: AssertionError"),
    ("import sys; sys.exit()", "failed: SystemExit"), ("raise KeyboardInterrupt",
                                                       "failed: KeyboardInterrupt"),
    ("import os; os._exit(0)", "failed: SystemExit"), ("import numpy",
                                                       "failed: ModuleNotFoundError"),
    ("class Odd(Exception): pass\nraise Odd", "failed: Odd"),
    ("raise type('x' * 999, (Exception,), {})", f"failed: {'x' * 60}"),
    ("raise type('a\\npassed', (Exception,), {})", "failed: a_passed"),
    ("x = '\0'", "failed: ValueError|failed: SyntaxError"), ("s = 'é\u2028ﬁ'", "passed"),
    ("x = '\ud800'", "failed: UnicodeEncodeError"),
    ("def f(n): return f(n + 1)\nf(0)", "failed: RecursionError"),
    ("raise MemoryError", "memory"), ("print(1, flush=True); input()", "failed: EOFError")])
def test_outcomes(cell, code, outcome):
    assert cell(code) in outcome.split("|")


def test_what_programs_may_import(cell):
    names = ("math collections itertools functools re typing string random heapq bisect operator "
             "hashlib copy datetime fractions decimal statistics json").split()
    uses = ("hashlib.md5(b'x').hexdigest(); random.random(); datetime.datetime.strptime('1', '%d');"
            "json.loads('[1]'); decimal.Decimal(2).sqrt(); re.findall('a+', 'aa'); 'é'.encode("
            "'latin-1'); copy.deepcopy([{}]); statistics.stdev([1, 2])")
    assert cell(f"import {', '.join(names)}\n{uses}") == "passed"


def test_time_ends(cell):
    """Loops in Python, in C and in the regular expressions; a sleep; a program deaf to signals."""
    for code in ("while True: pass", "10 ** 10 ** 10", "import re; re.match('(a+)+b', 'a' * 99)",
                 "import time; time.sleep(99)", "while True:\n    try: 1 / 0\n    except: pass",
                 "import signal\nfor s in (1, 2, 3, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
                 "while True: pass"):
        start = time.monotonic()
        assert cell(code, seconds=0.5) == "timeout", code
        assert time.monotonic() - start < 15


def test_the_processor_time_ends_too(cell):
    """Without the clock outside: the limit inside is the seconds' next whole number and one."""
    assert cell("while True: pass", seconds=0.2) == "timeout"
    code = "import resource; assert resource.getrlimit(resource.RLIMIT_CPU) == (3, 3)"
    assert cell(code, seconds=1.5, layers=1) in ("passed", "timeout")


@pytest.mark.parametrize("code", [
    "x = [0] * 10 ** 9", "x = bytes(10 ** 9)", "x = []\nwhile True: x.append('a' * 10 ** 6)",
    "x = 'a'\nwhile True: x += x", "x = {i: str(i) * 9 for i in range(10 ** 8)}"])
def test_memory_ends(cell, code):
    """Freed or not, what was asked for is told."""
    assert cell(code, seconds=60) == "memory"


def test_memory_that_the_system_gives(cell):
    for layers in (1, 2):
        for code in ("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(99)]",
                     "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void"
                     "_p\nx = [libc.malloc(1 << 26) for _ in range(99)]\nassert all(x)"):
            assert cell(code, layers=layers) in ("memory", "failed: ModuleNotFoundError",
                                                 "failed: AssertionError", "failed: OSError")
    assert cell("x = bytearray(10 ** 8)") == "passed"
    assert cell("x = bytearray(10 ** 8)", memory=96 << 20) == "memory"


# ---------------------------------------------------------------- what can't be seen

ROOT = str(sandbox.__file__).rsplit("/", 2)[0]


def c(call):
    """An attack through the C library: OSError if the call says that it failed."""
    return f"import ctypes\nx = ctypes.CDLL(None).{call}\nif x < 0: raise OSError"


def test_files_are_not_there(cell):
    paths = ("/etc/passwd", "/proc", "/proc/1/mem", "/sys", "/dev/null", "/tmp", "/usr", "/bin/sh",
             ROOT, sys.executable, "/proc/self/environ", "/proc/self/fd/0")
    assert all(map(os.path.exists, paths))
    stats, opens = ([f"import os; {do}({p!r})" for p in paths] for do in ("os.stat", "open"))
    denied(cell, *stats, layers=(0, 1), by="FileNotFoundError")
    denied(cell, *opens, layers=(0,), by="FileNotFoundError")
    denied(cell, *opens, layers=(1,))                                # no descriptor is left
    denied(cell, *stats, *opens, layers=(2,), by="PermissionError")
    assert cell("import os; assert os.listdir('/') == os.listdir('.') == []\n"
                "assert os.getcwd() == '/' and os.stat('/..').st_ino == os.stat('/').st_ino",
                layers=0) == "passed"


def test_ways_back_to_the_old_root(cell):
    """`..`, a chroot and a pivot need what is not there; no descriptor is of a directory."""
    fchdir = ("import os\nfor fd in range(9999):\n    try: os.fchdir(fd)\n"
              "    except OSError: continue\n    assert False\nraise OSError")
    denied(cell, "import os; os.chroot('/')", fchdir, *map(c, (
        "umount2(b'/', 2)", "mount(b'none', b'/', b'proc', 0, None)", "setns(0, 0)",
        "mount(b'none', b'/', b'tmpfs', 0, None)", "mount(None, b'/', None, 32, None)",
        "pivot_root(b'/', b'/')", "sethostname(b'x', 1)", "open_by_handle_at(0, b'x' * 64, 0)")))


def test_nothing_can_be_written(cell):
    attacks = ("open('/x', 'w')", "import os; os.mkdir('/x')", "import os; os.mkfifo('/x')",
               "import os; os.symlink('/', '/x')", "import os; os.chmod('/', 0o777)")
    denied(cell, *attacks, layers=(0, 1))
    denied(cell, *attacks, layers=(2,), by="PermissionError")
    denied(cell, "import os; fd = os.memfd_create('x'); os.write(fd, b'x' * 99)", layers=(1, 2))


def test_the_environment_is_empty_and_descriptors_are_closed(cell, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    with open(__file__) as file, socket.socket() as other:
        for fd in (file.fileno(), other.fileno()):
            os.set_inheritable(fd, True)
        code = ("import os\nassert {*os.environ} <= {'LC_CTYPE'}, os.environ\n"
                "for fd in range(4096):\n"
                "    if fd not in (0, 1, 2, 100, 101):\n        try: os.fstat(fd)\n"
                "        except OSError: continue\n        raise Exception(fd)\n"
                "for fd in (0, 1, 2): assert os.fstat(fd).st_rdev == 0x103\n")
        assert [cell(code, layers=n) for n in (0, 1)] == ["passed"] * 2


def test_the_network_is_not_there(cell):
    """A listener of this test on 127.0.0.1, and one with an abstract name, hear nothing."""
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(f"\0nanohh-test-{os.getpid()}")
    listeners[1].listen()
    port, name = listeners[0].getsockname()[1], listeners[1].getsockname()
    inet = 2 .to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + bytes((127, 0, 0, 1, *[0] * 8))
    unix = 1 .to_bytes(2, sys.byteorder) + name
    raw = ("import ctypes\nlibc = ctypes.CDLL(None)\nfd = libc.socket({}, 1, 0)\n"
           "if fd < 0 or libc.connect(fd, {}, {}): raise OSError")
    attacks = [raw.format(family, x, len(x)) for family, x in ((2, inet), (1, unix))]
    for one, attack in zip(listeners, attacks, strict=True):         # they work outside
        one.settimeout(0.2)
        exec(attack, {})
        one.accept()[0].close()
    denied(cell, *attacks)
    for one in listeners:
        with pytest.raises(TimeoutError):
            one.accept()
        one.close()


# ---------------------------------------------------------------- other processes

def test_no_child_and_no_thread(cell):
    denied(cell, "import os; os.fork()", layers=(1, 2))
    denied(cell, "import threading; threading.Thread(target=print).start()", layers=(1, 2),
           by="RuntimeError")
    denied(cell, "import os; os.execv('/bin/sh', ['sh'])",
           "import os; os.posix_spawn('/bin/sh', ['sh'], {})")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    start = time.monotonic()
    assert [cell(bomb, seconds=0.5, layers=n) for n in (1, 2)] == ["timeout"] * 2
    assert time.monotonic() - start < 30


def processes(mark=sandbox.__file__):
    """Ids of all processes whose command names the file of the cell."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.add(path.parent.name)
    return found


def gone(before):
    """Whether in a while all processes are those that were there before."""
    end = time.monotonic() + 60
    while processes() - before and time.monotonic() < end:
        time.sleep(0.05)
    return not processes() - before


@pytest.mark.parametrize("ending", ["", "while True: time.sleep(1)", "os._exit(0)"])
def test_no_child_outlives_its_cell(cell, ending):
    """Namespaces alone: a grandchild with a session of its own ends with process 1."""
    code = ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
            f"        while True: time.sleep(1)\n    os._exit(0)\n{ending}")
    before = processes()
    cell(code, layers=0, seconds=2)
    assert gone(before)


@pytest.mark.parametrize("killed", ["asking", "warden"])
def test_the_cell_ends_with_who_is_killed(cell, killed):
    """Neither leaves a warden, an examiner, a candidate or one of its children behind."""
    before = processes()
    code = ("from data.sandbox import run; run('import os, time; os.fork(); os.setsid()\\n"
            "while True: time.sleep(1)', seconds=99, layers=0)")
    asking = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    end = time.monotonic() + 60
    while len(processes() - before) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(processes() - before) == 4
    first = min(map(int, processes() - before))
    os.kill(asking.pid if killed == "asking" else first, signal.SIGKILL)
    asking.wait()
    assert gone(before)


def test_other_processes_can_not_be_reached(cell, monkeypatch):
    """Process 1 is the examiner: no signal ends it, no one may read it; the rest has no name."""
    me, popen = os.getpid(), subprocess.Popen
    pids = (me, os.getppid(), me + 10 ** 5, -1)
    finds = [f"import os; os.kill({pid}, 0)" for pid in pids]        # 0 only asks: no harm if found
    denied(cell, *finds, layers=(0, 1), by="ProcessLookupError")
    denied(cell, *finds, "import os; os.kill(1, 0)", layers=(2,), by="PermissionError")
    monkeypatch.setattr(sandbox.subprocess, "Popen", lambda *a, **k: popen(*a, **k, preexec_fn=(
        lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))))      # as in a terminal
    kill = ("import os, signal\nassert os.getpid() == 2\nfor s in range(1, 65):\n"
            "    if s not in (32, 33): os.kill(1, s)\n"
            "assert os.getppid() == 1")
    assert [cell(kill, layers=n) for n in (0, 1)] == ["passed"] * 2
    read = ("import ctypes\nx = ctypes.create_string_buffer(8)\n"
            "v, w = ((ctypes.c_size_t * 2)(at, 8) for at in (ctypes.addressof(x), id(0)))\n"
            "if ctypes.CDLL(None).process_vm_readv({}, v, 1, w, 1, 0) < 8: raise OSError")
    exec(read.format(me), {})                                        # it works outside
    denied(cell, *[attack for pid in (1, me) for attack in (
        read.format(pid), c(f"ptrace(16, {pid}, 0, 0)"))])
    denied(cell, "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
           layers=(1, 2), by="(ValueError, OSError)")


def test_no_right_comes_back(cell):
    """No capability in any set, none to get, no user of the machine: also after a setuid."""
    caps = ("import ctypes\nh = (ctypes.c_uint32 * 2)(0x20080522, 0)\nd = (ctypes.c_uint32 * 6)()\n"
            "assert ctypes.CDLL(None).capget(h, d) == 0 and not any(d), [*d]\n"
            "assert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1\n"
            "assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0\n"
            "import os; assert os.getresuid() == os.getresgid() == (65534,) * 3\n")
    assert [cell(caps, layers=n) for n in (0, 1)] == ["passed"] * 2
    denied(cell, "import os; os.setuid(0)", "import os; os.setgroups([0])")
    eperm = ("import ctypes\nx = ctypes.CDLL(None, use_errno=True).{}\n"
             "if x < 0 and ctypes.get_errno() == 1: raise OSError")   # so the filter itself said no
    denied(cell, *map(eperm.format, ("unshare(0x10000000)", "shmget(0, 4096, 0o1600)",
                                     "msgget(0, 0o1600)", "semget(0, 1, 0o1600)", "getppid()",
                                     "syscall(425, 1, 0)", "syscall(250, 0, 0)", "personality(0)",
                                     "socket(1, 1, 0)", "ptrace(0, 0, 0, 0)")), layers=(2,))


def test_the_filter_has_the_numbers_of_this_machine():
    here = ("x86_64", "aarch64").index(platform.machine())
    numbers = [pair[here] for pair in CALLS.values()]
    assert len({*numbers}) == len(numbers) < 200
    libc = ctypes.CDLL(None)
    assert libc.syscall(CALLS["getpid"][here]) == os.getpid()
    assert libc.syscall(CALLS["gettid"][here]) == threading.get_native_id()


# ---------------------------------------------------------------- no forged verdict

CHECK = "assert candidate(2) == 4\nassert candidate(3) == 9"
RIGHT = "def f(x): return x * x"


def test_a_check(cell):
    assert cell(RIGHT, CHECK, "f") == "passed"
    assert cell("def f(x): return x + x", CHECK, "f") == "failed: AssertionError"
    assert cell("def g(x): return x", CHECK, "f") == "failed: KeyError"
    assert cell("def f(x): return [][x]", CHECK, "f") == "failed: IndexError"
    assert cell("def f(x):\n    while True: pass", CHECK, "f", seconds=0.5) == "timeout"
    assert cell("def f(x): return [0] * 10 ** 9", CHECK, "f") == "memory"
    assert cell("def f(x):\n    import os; os._exit(0)", CHECK, "f") == "failed: SystemExit"
    assert cell("def f(x): return (i for i in [x])", CHECK, "f") == "failed: TypeError"
    assert cell("import ctypes\ndef f(x): ctypes.string_at(0)", CHECK, "f") == "killed"
    flood = "import os\ndef f(x):\n    while True: os.write(101, b'x' * 4096)"
    assert cell(flood, CHECK, "f") == "failed: OverflowError"


def test_checks_see_values_and_exceptions(cell):
    """What goes over the pipes and back: literals, of all kinds; exceptions by their class."""
    check = ("for x in (None, True, 3, -1.5, 'é\\n\\'\"', b'\\x00', 1j, [], (), (1,), [1, (2, [3])]"
             ", {}, {1: 'a', (1, 2): None}, {1, 2}, set(), float('inf'), -float('inf'), 9 ** 99):\n"
             "    y = candidate(x)\n    assert x == y and type(x) is type(y), (x, y)\n"
             "assert candidate(x=1, y=[2]) == {'x': 1, 'y': [2]}\n"
             "try: candidate('bad')\nexcept ValueError: pass\nelse: assert False\n")
    code = ("def f(*x, **y):\n    if x == ('bad',): raise ValueError\n    return x[0] if x else y")
    assert cell(code, check, "f") == "passed"


@pytest.mark.parametrize("attack", [
    "print('passed', flush=True)", "import os; os.write(1, b'passed\\n'); os._exit(0)",
    "import os\nfor fd in range(300):\n    try: os.write(fd, b'passed\\n')\n"
    "    except OSError: pass",
    "import os\nfor fd in range(300):\n    try: os.write(fd, b'{\"value\": \"4\"}\\n' * 3)\n"
    "    except OSError: pass\nos._exit(0)",
    "import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit(0)",
    "class f(int):\n    def __new__(cls, x): return int.__new__(cls, 0)\n"
    "    def __eq__(self, other): return True",
    "class Yes:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __eq__\n"
    "def f(x): return Yes()",
    "class Yes(str):\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
    "class Yes(int):\n    def __eq__(self, other): return True\n"
    "    def __repr__(self): return '4'\n    __index__ = __int__ = lambda self: 0\n"
    "def f(x): return Yes()",
    "import builtins\nbuiltins.AssertionError = builtins.exec = print\ndef f(x): return None",
    "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and "
    "'check' in o: return 4 if x == 2 else 9\n    raise LookupError",
    "import sys\ndef f(x):\n    g = sys._getframe()\n    while g:\n        if 'check' in g.f_locals"
    " or 'assert' in repr(g.f_locals): return 4 if x == 2 else 9\n        g = g.f_back\n"
    "    raise LookupError",
    "import json\nyes = \"type('Y', (), {'__eq__': lambda *x: True})()\"\n"
    "json.dumps = lambda *a, **k: '{\"value\": \"' + yes + '\"}'\ndef f(x): return None",
    "import json\njson.dumps = lambda *a, **k: '{\"value\": \"__import__(1)\"}'\n"
    "def f(x): return 1",
    "import json\njson.dumps = lambda *a, **k: '[' * 10 ** 5\ndef f(x): return 1",
    "import os\ndef f(x):\n    while True: os.write(101, b'x' * 4096)",
    "import json\njson.dumps = lambda *a, **k: '{\"error\": \"Gone\"}'\ndef f(x): return 1",
    "def f(x): return 'x' * 10 ** 8", "def f(x):\n    y = []\n    y.append(y)\n    return y"])
def test_no_verdict_is_forged(cell, attack):
    outcome = cell(attack, CHECK, "f", layers=1)
    assert outcome != "passed" and OUTCOME.fullmatch(outcome), outcome


def test_a_flood_of_output_costs_nothing(cell):
    code = "import sys\nfor _ in range(200): print('x' * 10 ** 5); sys.stderr.write('y' * 9999)"
    assert cell(code) == "passed"


def test_plain():
    class Text(str):
        __str__ = __repr__ = lambda self: "__import__('os')"
    assert plain([1, "a", (2.5,), {"x": {3}}, None]) == "[1, 'a', (2.5,), {'x': {3}}, None]"
    assert plain(float("-inf")) == "-1e999" and plain(set()) == "set()"
    for odd in (object(), range(3), [len], {1: iter([])}):
        with pytest.raises(TypeError, match="is no literal"):
            plain(odd)


def test_a_line_from_outside():
    read, write = os.pipe()
    assert line_of(read, 0.01) is None
    os.write(write, b"ready\npassed\n")
    assert line_of(read, 1) == "ready" and line_of(read, 1) == "passed"
    os.write(write, b"half")
    os.close(write)
    assert line_of(read, 1) == ""
    os.close(read)


def test_a_process_with_many_files(cell):
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1400), hard))
    try:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        assert cell("x = 1") == "passed"
    finally:
        for file in files:      # no range: others' files may lie between
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------- never without

@pytest.mark.parametrize("name, value", [("platform", "darwin"), ("platform", "win32")])
def test_other_systems_are_refused(monkeypatch, name, value):
    monkeypatch.setattr(sandbox.sys, name, value)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=f"only in Linux namespaces.*{value}") as error:
        run("x = 1")
    assert "\n" not in str(error.value)


def test_other_machines_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ValueError, match="riscv64"):
        run("x = 1")


FORBIDS = """
import sys
source = open({path!r}).read().replace("if __name__ ==", "if 0 and __name__ ==")
space = dict(__name__="warden")
exec(source, space)
inner = space["call"]
def call(name, *args):
    if name == {name!r}: raise OSError(1, "Operation not permitted", name)
    inner(name, *args)
space["call"] = call
space["warden"](*map(int, sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["unshare", "mount", "pivot_root", "umount2", "capset", "prctl"])
def test_a_kernel_that_forbids_is_refused(cell, monkeypatch, tmp_path, name):
    """Whatever step fails, nothing runs, and the one line says which."""
    (tmp_path / "warden.py").write_text(FORBIDS.format(path=sandbox.__file__, name=name))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "warden.py"))
    with pytest.raises(ValueError, match=f"does not give: .*{name}") as error:
        cell("x = 1")
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- HumanEval

def test_cut():
    assert cut("    return 1\n\ndef g():\n    pass") == "    return 1\n"
    assert cut("    return 1") == "    return 1" and cut("") == ""
    for stop in ("class A", "# x", "if x", "print(1)"):
        assert cut(f"    a\n{stop}\ndef") == "    a"
    inside = "    if x:\n        print(1)\n    # def\n"
    assert cut(inside) == inside


ITEM = dict(task_id="t", prompt="def two(x):\n    return 2\n\ndef f(x):\n    ''' Twice. '''\n",
            entry_point="f", canonical_solution="    return two(x) * x\n",
            test="def check(candidate):\n    assert candidate(2) == 4 and f(two(0)) == 4\n")


def test_an_item(cell):
    assert solve(ITEM, ITEM["canonical_solution"], seconds=20) == "passed"
    assert solve(ITEM, "    return 2 * x\nprint(1 / 0)", seconds=20) == "passed"
    assert solve(ITEM, "    return x\n", seconds=20) == "failed: AssertionError"
    assert solve(ITEM, "    return (", seconds=20) == "failed: SyntaxError"
    assert solve(ITEM, "    pass\ndef check(f): pass\n", seconds=20) == "failed: AssertionError"


def humaneval(data_dir):
    path = data_dir / "humaneval" / "HumanEval.jsonl.gz"
    if not path.exists():
        pytest.skip("no humaneval in NANOHH_DATA")
    return read_humaneval(path)[0]


def test_some_of_humaneval(cell, data_dir):
    """Its own solutions pass; one whose first return is another value fails."""
    items = humaneval(data_dir)
    for item in items[::20] + [items[32], items[38], items[50]]:     # these three call their prompt
        assert solve(item, item["canonical_solution"], seconds=30) == "passed", item["task_id"]
        assert solve(item, "    return 'x'\n", seconds=30).startswith("failed: "), item["task_id"]


@pytest.mark.slow
def test_all_of_humaneval(cell, data_dir):
    """15 seconds on one core."""
    for item in humaneval(data_dir):
        assert solve(item, item["canonical_solution"], seconds=30) == "passed", item["task_id"]
        assert solve(item, "    return None\n", seconds=30) != "passed", item["task_id"]
