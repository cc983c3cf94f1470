"""The shape of the code: who imports whom, what an import does, sizes, knobs, commands told.

Proved alive by: common importing data; model importing common; distill importing preference;
pretrain importing distill's loss in a function; ppo importing preference.train; a package beside
the listed ones at the top of a file; a file that at import prints, writes, starts a thread, seeds
torch or takes Ctrl-C over; a function of 61 lines, a line of 101 characters, a stage of 401 lines;
a field that nothing reads, one without a comment, a Config that is not frozen; a flag misspelled in
README.md, a docstring and runs/laptop.sh, and a script's name; `--flag` in prose that no script
has; a link to nowhere; an absolute path; a marker deleted.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A stage may use what an earlier one defines, never a later one.
ORDER = ("pretrain", "distill", "collect", "preference", "prompts", "sft", "rejection", "ppo",
         "elo", "harm", "online", "constitution", "ood")
PARTS = ("rollout", "control", "tasks", "guard", "attacks",
         "critic")                                        # of stages, without own commands
PROGRAMS = ("eval", "sample", "analyze", "feedback", "doctor",
            "benchmark")                               # use any stage, and none uses them
PURE = ("common", "parallel", "model", "attention", "measures", "bradley_terry")
DRIVERS = ("online", "constitution", "eval")            # may call a whole stage's train()
PACKAGES = {"torch", "numpy", "tiktoken", "tqdm"}       # at the top of a file
OPTIONAL = {"matplotlib", "safetensors", "transformers", "trl", "datasets",
            "tokenizers"}                              # only where they are used
WITHOUT = {"attention": "triton"}                       # a file that needs an optional package


def files(*patterns):
    """The repository's own files, committed or about to be, that match any of the patterns."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                           capture_output=True)
    if names.returncode:  # no git, or an archive without its folder
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()
                 and not set(p.relative_to(ROOT).parts) & {"out", ".venv", ".git", "__pycache__"}]
    else:
        names = [n for n in names.stdout.splitlines() if (ROOT / n).is_file()]
    return sorted(ROOT / n for n in names if any(Path(n).match(p) for p in patterns))


def sources():
    """name -> path of the code that is not tests: common, data.world, runs.bench, ..."""
    found = [p for p in files("*.py") if "tests" not in p.relative_to(ROOT).parts]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in found}


SOURCES = sources()
STAGES = [s for s in ORDER if s in SOURCES]
WITH_CONFIG = [s for s in SOURCES if re.search(r"^class Config\b", SOURCES[s].read_text(), re.M)]


def imports(name):
    """(module, names, whether at the top of the file) of each import of a project file."""
    tree = ast.parse(SOURCES[name].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, (), node in tree.body) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            names = tuple(a.name for a in node.names)
            if node.module in ("data", "runs", "claims"):  # from data import world
                yield from ((f"{node.module}.{n}", (), node in tree.body) for n in names)
            else:
                yield node.module, names, node in tree.body


def whose(name):
    """Project files that a project file imports, each with the names taken from it."""
    return [(m, names) for m, names, _ in imports(name) if m in SOURCES]


# ---------------------------------------------------------------- the import graph

def test_the_files_are_there():
    assert {"common", "model", "pretrain", "distill", "preference", "ppo", "eval", "sample",
            "data.world", "data.tokenizer"} <= set(SOURCES)
    strangers = {s for s in SOURCES if "." not in s} - {*ORDER, *PROGRAMS, *PURE, *PARTS}
    assert not strangers, f"no place in the import graph: {strangers}"


def test_what_all_share_imports_no_project_file():
    assert whose("common") == []
    assert {m for m, _ in whose("model")} <= {"attention"}
    assert all(m.startswith("data.") for s in SOURCES if s.startswith("data.") for m, _ in whose(s))
    for i, part in enumerate(PARTS):
        assert all(m in (*PURE, *PARTS[:i]) or m.startswith("data.") for m, _ in whose(part)), part


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_earlier_ones(stage):
    earlier = ORDER[:ORDER.index(stage)]
    for module, names in whose(stage):
        known = module in (*PURE, *PARTS, *earlier) or module.startswith("data.")
        assert known, f"{stage} -> {module}"
        if module in earlier and stage not in DRIVERS:
            assert names, f"{stage}: say which functions of {module}"
            for name in names:
                thing = getattr(importlib.import_module(module), name)
                assert inspect.isfunction(thing) and not name.startswith("_"), f"{module}.{name}"
                assert name not in ("train", "main", "collect"), f"{stage} runs {module}"


def test_nobody_imports_a_program():
    for name in SOURCES:
        taken = {m for m, _ in whose(name)} & set(PROGRAMS)
        assert not taken or name.startswith("runs."), f"{name} -> {taken}"


def test_only_programs_use_the_claims():
    """claims.* may drive whole stages; those who report may use them: programs, and themselves."""
    for name in SOURCES:
        taken = {m for m, _ in whose(name) if m.split(".")[0] == "claims"}
        assert not taken or name in PROGRAMS or name.startswith("claims."), f"{name} -> {taken}"


@pytest.mark.parametrize("name", SOURCES)
def test_packages(name):
    for module, _, top in imports(name):
        package = module.split(".")[0]
        if module in SOURCES or package in sys.stdlib_module_names:
            continue
        allowed = {*PACKAGES, *filter(None, [WITHOUT.get(name)]), *(() if top else OPTIONAL)}
        assert package in allowed, f"{name} imports {package}"


IMPORT = """
import sys, threading, signal, os, random, json
sys.path.insert(0, sys.argv[1])
import numpy, torch, tiktoken, tqdm
opened = []
sys.addaudithook(lambda event, args: opened.append([str(a) for a in args[:2]]) if (
    event == "open" and ({*str(args[1] or "")} & {*"wax+"} or (args[2] or 0) & (
        os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and "__pycache__" not in str(args[0])
    or event in ("os.mkdir", "subprocess.Popen", "socket.connect", "os.fork", "os.system")) else 0)
def state():
    tasks = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    return dict(threads=threading.active_count(), tasks=tasks, environ=dict(os.environ),
                path=list(sys.path), signals=[str(signal.getsignal(s)) for s in (2, 15)],
                random=random.getstate(), torch=torch.get_rng_state().tolist(), cwd=os.getcwd(),
                numpy=str(numpy.random.get_state()), torch_threads=torch.get_num_threads(),
                strict=torch.are_deterministic_algorithms_enabled(), files=os.listdir("."),
                grad=torch.is_grad_enabled(), dtype=str(torch.get_default_dtype()))
before, changed = state(), {}
for name in sys.argv[2:]:
    __import__(name)
    after = state()
    if opened or after != before:
        changed[name] = opened + [k for k in before if before[k] != after[k]]
    before, opened[:] = after, []
json.dump(changed, sys.stderr)
"""


def test_importing_a_file_has_no_side_effect(tmp_path):
    """No output, no file, no thread, no process, no random number drawn, no handler, no setting."""
    done = subprocess.run([sys.executable, "-B", "-c", IMPORT, str(ROOT), *SOURCES], text=True,
                          cwd=tmp_path, capture_output=True, timeout=120,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "{}")


# ---------------------------------------------------------------- sizes

LIMIT = int(re.search(r"line-length = (\d+)", (ROOT / "pyproject.toml").read_text())[1])


def test_lines_are_short():
    assert LIMIT <= 100
    for limit, names in ((LIMIT, ("*.py",)), (120, ("*.sh", ".ci/run"))):
        long = [f"{p.relative_to(ROOT)}:{i}" for p in files(*names)
                for i, line in enumerate(p.read_text().splitlines(), 1) if len(line) > limit]
        assert not long, f"{len(long)} lines over {limit} characters: {long[:20]}"


def test_stages_are_short():
    sizes = {s: len(SOURCES[s].read_text().splitlines()) for s in STAGES}
    assert not {s: n for s, n in sizes.items() if n > 400}


def test_functions_are_short():
    long = {}
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 60:
                long[f"{name}.{node.name}"] = node.end_lineno - node.lineno + 1
    assert not long


# ---------------------------------------------------------------- knobs

def config_of(name):
    """The Config class of a program, its syntax tree and the file's."""
    tree = ast.parse(SOURCES[name].read_text())
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config"), tree


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_every_knob_is_one_line_that_says_what_it_is(name):
    node, _ = config_of(name)
    lines = SOURCES[name].read_text().splitlines()
    assert ast.unparse(node.decorator_list[0]) == "dataclass(frozen=True)" and not node.bases
    Config = importlib.import_module(name).Config
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            assert item.lineno == item.end_lineno
            comment = lines[item.lineno - 1].partition("#")[2].strip()
            assert len(comment) > 8, f"{name}: {item.target.id} has no comment"
    for field in dataclasses.fields(Config):
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        assert kind == type(field.default).__name__
        assert kind in ("str", "int", "float", "bool", "tuple")


@pytest.mark.parametrize("name", WITH_CONFIG)
def test_every_knob_is_read(name):
    """`cfg.field`, or `self.field` in a property; `out` by Run(cfg, ...), which is common's."""
    node, tree = config_of(name)
    owners = {"cfg": tree, "config": tree, "self": node}
    read = {a.attr for owner, where in owners.items() for a in ast.walk(where)
            if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Load)
            and isinstance(a.value, ast.Name) and a.value.id == owner}
    if "Run(cfg," in SOURCES[name].read_text():
        read.add("out")
    given = [m for m, _ in whose(name) if m in PARTS]  # those that are given the whole Config
    given += {"ppo": ["prompts", "pretrain"]}.get(name, [])
    if "claims" in {m.split(".")[0] for m, _ in whose(name)}:
        given += [s for s in SOURCES if s.startswith("claims.")]
    for other in given:
        read |= set(re.findall(r"\bcfg\.(\w+)", SOURCES[other].read_text()))
    unread = {f.name for f in dataclasses.fields(importlib.import_module(name).Config)} - read
    assert not unread, f"{name}: nothing reads {unread}"


# ---------------------------------------------------------------- commands that are told

# a command as a text shows it: at a line's start, in backquotes, after a prompt or a variable
COMMAND = re.compile(r"(?:(?<![\w/.-])python3?|\.venv/bin/python|\$\{?PY(?:THON)?\}?|"
                     r"ranks|torchrun(?: +--[\w-]+(?:=\S+)?)+) +((?:[\w/]+/)?\w+\.py)\b([^\n`]*)")
SHELL = re.compile(r"\bbash +(runs/\w+\.sh)([^\n`]*)")


def told():
    """(where, script, arguments as text) of the commands in README, docstrings and runs/*.sh."""
    for path in files("README.md", "*.sh", ".ci/run", "*.py"):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        text = path.read_text()
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        text = re.sub(r"\\\n\s*", " ", text)
        for found in (*COMMAND.finditer(text), *SHELL.finditer(text)):
            yield path.relative_to(ROOT), found[1], found[2]


def arguments(text):
    """The words of a command's rest: up to a comment, a pipe, prose after blanks, "..." or ")"."""
    text = re.sub(r"\$\{\w+:\+([^}]*)\}", r"\1", text)      # ${X:+--flag "$X"}
    text = re.sub(r"\$\{?\w+\}?", "1", text)
    text = re.split(r"\s#|[<>|;&()]|\s\.\.\.|\s{2,}(?=[^-\s])", re.sub(r"^\s+", " ", text))[0]
    return shlex.split(text.strip().rstrip(".,:"))


class Parsed(Exception):
    """Raised in place of the program, once its arguments are read."""


def parse(script, argv, monkeypatch):
    """Read argv with the script's own flags, without running it. SystemExit if they are refused."""
    name = script.removesuffix(".py").replace("/", ".")
    assert name in SOURCES, f"no file {script}"
    module = importlib.import_module(name)
    if name in WITH_CONFIG:
        from common import parse_flags
        return parse_flags(module.Config, argv)
    if "parse_args" not in SOURCES[name].read_text():
        assert not argv, f"{script} takes no arguments"
        return None
    inner = argparse.ArgumentParser.parse_args

    def parse_args(self, *args):
        raise Parsed(inner(self, argv))

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Parsed):
            module.main()


def test_commands_that_are_told_are_understood(monkeypatch, capsys):
    seen = set()
    for where, script, rest in told():
        try:
            words = arguments(rest)
            seen.add(script)
            if script.endswith(".sh"):
                text = (ROOT / script).read_text()
                flags = [w for w in words if w.startswith("--")]
                passed_on = '"$@"' in text.splitlines()[-1]  # runs/test.sh: to pytest
                known = [f for f in flags if re.search(rf"(?<![\w-]){f}\b", text)]
                assert passed_on or flags == known, f"no flag {set(flags) - set(known)}"
            else:
                parse(script, words, monkeypatch)
        except (SystemExit, AssertionError, ValueError, OSError) as error:
            pytest.fail(f"{where}: `{script}{rest}`: {error} {capsys.readouterr().err[-300:]}")
    programs = {p.name for s, p in SOURCES.items() if s in (*ORDER, *PROGRAMS)}
    assert programs <= seen, f"no command shows {programs - seen}"


def test_arguments_of_a_line():
    for text, words in {
        "": [], "   --out x --lr 3e-4": ["--out", "x", "--lr", "3e-4"],
        ' --out "$OUT/pm" --seed "$SEED"   #  2 min  --this': ["--out", "1/pm", "--seed", "1"],
        ' --prompt "What?"   one answer, no more': ["--prompt", "What?"],
        " --ckpt out/ppo < questions.txt": ["--ckpt", "out/ppo"], " ...   the same": [],
        "   --trace --policy out/ppo ...": ["--trace", "--policy", "out/ppo"],
        ' ${HHH:+--hhh "$HHH"} --gender': ["--hhh", "1", "--gender"],
        ' --text "${TEXT:+$TEXT,}x"': ["--text", "1,x"],
        " --all --durations=10": ["--all", "--durations=10"], " --collect 3).": ["--collect", "3"],
    }.items():
        assert arguments(text) == words, text


@pytest.mark.parametrize("path", files("*.sh", ".ci/run"), ids=lambda p: p.name)
def test_scripts_parse(path):
    bash = shutil.which("bash")
    if not bash:
        pytest.skip("no bash here")
    done = subprocess.run([bash, "-n", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()


# ---------------------------------------------------------------- README

@pytest.fixture(scope="module")
def readme():
    path = ROOT / "README.md"
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail("README.md is missing")
        pytest.skip("no README.md yet")
    return path.read_text()


def test_flags_in_prose_exist(readme):
    known = {"--" + f.name.replace("_", "-") for n in WITH_CONFIG
             for f in dataclasses.fields(importlib.import_module(n).Config)}
    known |= {"--help", "--nproc_per_node", *re.findall(
        r"--[a-z][\w-]*", "".join(p.read_text() for p in files("*.sh")))}
    known |= {flag for p in files("*.py") for flag in re.findall(
        r'add_argument\("(--[a-z][\w-]*)"', p.read_text())}
    prose = re.sub(r"<!--.*?-->", "", readme, flags=re.S)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose))
    assert named <= known, f"README.md names {named - known}"


def test_files_and_functions_that_it_names_exist(readme):
    """Links, `file.py` in backquotes, and the functions in a row of the map beside their file."""
    for target in re.findall(r"\]\(([^)#\s]+)\)", readme):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / target).exists(), f"README.md links to {target}"
    for name in re.findall(r"`([\w./-]+\.(?:py|sh))`", readme):
        assert (ROOT / name).exists(), f"README.md names {name}"
    for row in re.findall(r"^\| `([\w/]+\.py)` \|(.*)$", readme, re.M):
        text = (ROOT / row[0]).read_text()
        for name in re.findall(r"`([\w.]+)`", row[1]):
            pattern = rf"^\s*(?:def|class) {name.split('.')[-1]}\b"
            assert re.search(pattern, text, re.M), f"README.md: no {name} in {row[0]}"


def test_its_tables_have_their_markers(readme, tmp_path, monkeypatch, capsys):
    """eval.py --readme finds them, fills them, and fills them again the same."""
    import eval as report
    (tmp_path / "README.md").write_text(readme)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report.records, "records", lambda name: [dict(prompts=400)])
    pages = report.pages
    monkeypatch.setattr(report, "save", dict)
    monkeypatch.setattr(pages.report, "over_seeds", lambda rows: rows[0])
    monkeypatch.setattr(pages.report, "as_markdown", lambda row: "THE TABLE")
    monkeypatch.setattr(pages, "claims_table", lambda done: "THE VERDICT")
    monkeypatch.setattr(pages, "hh_table", lambda: "THE REAL DATA")
    monkeypatch.setattr(pages.robustness, "table", lambda rows: "THE RUNS")
    for name in ("loop", "regimes", "repair"):
        monkeypatch.setattr(pages.loop, f"{name}_table", lambda rows, name=name: f"THE {name}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "online.md").write_text((ROOT / "docs" / "online.md").read_text())
    texts = []
    for _ in range(2):
        report.main(report.Config(readme=True))
        texts.append((tmp_path / "README.md").read_text())
        texts.append((tmp_path / "docs" / "online.md").read_text())
    assert texts[:2] == texts[2:]
    told = ("TABLE", "VERDICT", "REAL DATA", "loop")
    assert [texts[0].count(f"THE {x}") for x in told] == [1] * 4
    assert [texts[1].count(f"THE {x}") for x in ("regimes", "repair")] == [1, 1]
    for marker in re.findall(r"<!-- (\w+): begin -->", texts[0]):
        assert texts[0].count(f"<!-- {marker}: end -->") == 1
    begin, end = (readme.find(f"<!-- laptop: {x} -->") for x in ("begin", "end"))
    assert 0 <= begin < end and texts[0].startswith(readme[:begin])


def test_no_placeholder_is_left(readme):
    assert not re.findall(r"@@\w+@@|\bTODO\b|\bFIXME\b|\bXXX\b", readme)


# ---------------------------------------------------------------- what is told to nobody

def test_no_file_names_a_place_on_somebodys_machine():
    machine = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt)/[\w.]")
    for path in files("*"):
        text = path.read_bytes().decode(errors="ignore")
        found = machine.search(text)
        assert not found, f"{path.relative_to(ROOT)}: {text[found.start():found.end() + 30]!r}"


def test_results_are_json_lines():
    for path in files("results/*.jsonl"):
        for line in path.read_text().splitlines():
            assert isinstance(json.loads(line), dict), path.name
