"""runs/1gpu.sh and runs/8gpu.sh: what they would run, and a rehearsal of all they do.

A Python that only notes its arguments shows every command of a script; each is read by the stage's
own flags, and what the paper says of a stage is compared with what it would get. The rehearsals
(long) do all of it in small, with the real tokenizers' forms and real dialogues: ranks are killed
in each stage and the script is killed, too.

Proved alive by: rates of distillation, PPO and a size; families of one shape mixed up, a rate of 7;
lambda_KL, the score's unit, the critic's rate, a policy or PM from another start; less text, the
teacher's classes kept, a flag that no stage has; done again what is there, done by each machine,
one id for all starts, no restarts; comparisons or tests of the last lot alone; a silent wait, a
wait for a machine that failed, names split at blanks, --text from our folder, a rehearsal that
overrides flags, no iteration.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from test_neox_tokenizer import trained
from test_structure import parse
from tiny import PATIENCE, ROOT, checkpoint

from data.lines import lines_of
from model import SIZES
from runs import rates

NOTES = """for word in "$@"; do printf '%s\\t' "$word" >> "$NOTES"; done
echo >> "$NOTES"
[ "$1" != "${FAILS:-}" ] || exit 3
case "$1" in runs/rates.py) exec "$REAL" "$@" ;; esac
"""


# ---------------------------------------------------------------- learning rates

def test_rates_of_published_sizes():
    """By hand: pretraining's, times 0.05, 0.1, 0.01, 0.01."""
    assert [rates.rate("gpt2", s) for s in ("pretrain", "distill", "pmp", "pm", "ppo")] == [
        6e-4, 3e-5, 6e-5, 6e-6, 6e-6]
    assert [rates.rate("pythia-6.9b", s) for s in ("distill", "pmp", "pm", "ppo", "dialogues")] == [
        6e-6, 1.2e-5, 1.2e-6, 1.2e-6, 1.2e-5]
    assert rates.rate("2.5e-4", "ppo") == 2.5e-6
    known = {n for n in SIZES if n.startswith(("gpt2", "pythia"))}
    assert set(rates.RATES) == known
    for family in ("gpt2", "pythia"):                       # larger models, never larger rates
        found = [r for name, r in rates.RATES.items() if name.startswith(family)]
        assert all(a >= b for a, b in pairwise(found))
    assert rates.RATES["pythia-70m"] == 1e-3 and rates.RATES["pythia-12b"] == 1.2e-4
    assert [*rates.RATES.values()][:4] == [6e-4, 3e-4, 2.5e-4, 2e-4]


def test_rates_of_a_folder(tmp_path):
    def folder(**content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return str(tmp_path)

    gpt2 = dict(model_type="gpt2", n_layer=24, n_head=16, n_embd=1024)
    neox = dict(model_type="gpt_neox", num_hidden_layers=12, num_attention_heads=12,
                hidden_size=768)
    assert rates.pretraining(folder(**gpt2)) == 3e-4
    assert rates.size_of(folder(**neox)) == "pythia-160m"      # GPT-2's shape has it too
    for content, words in (({**gpt2, "n_layer": 3}, "no published size"), ({}, "no config.json of"),
                           ({**gpt2, "model_type": "llama"}, "no config.json of")):
        with pytest.raises(ValueError, match=words):
            rates.pretraining(folder(**content))
    for name in ("nano", "0", "7", "nan"):
        with pytest.raises(ValueError, match=name):
            rates.pretraining(name)


def test_rates_as_a_program(capsys, monkeypatch):
    for argv, told in (["gpt2", "ppo"], "6e-06\n"), (["4e-4", "distill"], "2e-05\n"):
        monkeypatch.setattr(sys, "argv", ["rates.py", *argv])
        rates.main()
        assert capsys.readouterr().out == told
    monkeypatch.setattr(sys, "argv", ["rates.py", "gpt2"])
    rates.main()
    assert dict(x.split() for x in capsys.readouterr().out.splitlines()) == {
        stage: f"{rates.rate('gpt2', stage):g}" for stage in rates.SHARES}
    assert len(rates.table()) == 2 + len(rates.RATES) and rates.table()[2].startswith("| gpt2 | 0.")


# ---------------------------------------------------------------- what the scripts would run

def environment_of(folder, python):
    """A folder that runs/setup.sh takes for a finished environment, whose python is this script."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{python}\n")
    (folder / "bin" / "python").chmod(0o755)
    with open(ROOT / "requirements.txt", "rb") as file:
        stamp = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True).stdout
    (folder / "stamp-requirements.txt").write_text(stamp)
    return str(folder)


@pytest.fixture
def told(tmp_path):
    """told(script, flags...) -> the commands, [(script, its words, torchrun's)]."""
    venv, notes = environment_of(tmp_path / "venv", NOTES), tmp_path / "notes"
    for name in ("hh", "model", "gpt2"):
        (tmp_path / name).mkdir()
    for name in ("forum", "hhh", "lambada", "arc", "text"):
        (tmp_path / name).touch()

    def call(script, *words, code=0, patience=60, cwd=ROOT, **env):
        notes.write_text("")
        done = subprocess.run(
            ["bash", str(ROOT / "runs" / f"{script}.sh"), *words, "--out", str(tmp_path / "out")],
            cwd=cwd,
            text=True, capture_output=True, timeout=patience * PATIENCE,
            env=dict(os.environ, VENV=venv, NOTES=str(notes), REAL=sys.executable, **env))
        assert done.returncode == code, done.stderr
        if code:
            return done.stderr
        lines = [line.split("\t")[:-1] for line in notes.read_text().splitlines()]
        return [split(line) for line in lines]

    call.folder = tmp_path
    return call


def split(words):
    """A command's script, its words, and torchrun's."""
    n = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[n], words[n + 1:], words[:n]


def configs(commands, monkeypatch):
    """[(stage, its Config)] of the commands that have one; the others' flags are read, too."""
    found = [(script.removesuffix(".py"), parse(script, words, monkeypatch))
             for script, words, _ in commands]
    return [(stage, cfg) for stage, cfg in found if cfg]


def flags(told, *names):
    """--name PATH of each name."""
    return [x for name in names for x in (f"--{name}", str(told.folder / name))]


def stages(commands):
    return [script.removesuffix(".py").removeprefix("data/") for script, *_ in commands]


def the_papers(stage, cfg, rate):
    """What the papers say of a stage, and that a step's rows divide as they must."""
    out = Path(cfg.out).name
    if stage == "distill":                                      # HH A.1
        assert (cfg.batch, cfg.lr) == (32, pytest.approx(0.05 * rate)) and not cfg.cache
        assert cfg.steps * cfg.batch == cfg.texts
        assert cfg.texts * cfg.length == pytest.approx(350e6, rel=1e-3)
    elif stage == "preference":                                 # HH A.2, InstructGPT C.2
        share = 0.1 if out == "pmp" else 0.01
        assert (cfg.lr, cfg.epochs) == (pytest.approx(share * rate), 1)
        assert (cfg.batch, cfg.pairs, bool(cfg.test)) == (64, 0, True)
    elif stage == "ppo":                                        # HH 4.1, B.1, InstructGPT C.4
        assert cfg.lr == cfg.critic_lr == pytest.approx(0.01 * rate)
        assert (cfg.kl, cfg.lambda_kl, cfg.clip, cfg.gamma) == ("reward", 0.001, 0.2, 1)
        assert (cfg.new, cfg.temperature, cfg.ptx, cfg.decay) == (128, 1, 0, "constant")
        assert (cfg.calibrate, cfg.unfinished, cfg.cap) == (0, 0, 0)      # the PM's own score
        assert (cfg.samples, cfg.minibatch, cfg.iterations) == (512, 64, 200)


def test_1gpu_from_text(told, monkeypatch):
    commands = told("1gpu", *flags(told, "text", "hh", "forum", "hhh", "lambada", "arc"))
    assert stages(commands) == ["runs/rates", "hh", "forum", "tokens", "pretrain", "distill",
                                "preference", "preference", "ppo", "analyze", "benchmark", "doctor"]
    cfgs = configs(commands, monkeypatch)
    for stage, cfg in cfgs:
        the_papers(stage, cfg, 6e-4)
    base = dict(cfgs)["pretrain"]
    assert (base.size, base.lr, base.context, base.micro) == ("gpt2", 6e-4, 1024, 16)
    assert base.batch * base.context == 524288
    assert base.steps * 524288 == pytest.approx(5e9, rel=1e-3)
    assert [Path(c.init).name for s, c in cfgs if s == "preference"] == ["base", "pmp"]
    assert not any(before for *_, before in commands)           # no torchrun for one GPU


def test_1gpu_from_weights(told, monkeypatch):
    shape = dict(model_type="gpt2", n_layer=36, n_head=20, n_embd=1280)
    (told.folder / "gpt2" / "config.json").write_text(json.dumps(shape))
    commands = told("1gpu", *flags(told, "gpt2", "hh"))
    assert stages(commands) == ["runs/rates", "hh", "tokens", "sample", "tokens", "pretrain",
                                "distill", "preference", "ppo", "analyze", "doctor"]
    cfgs = configs(commands, monkeypatch)
    for stage, cfg in cfgs:
        the_papers(stage, cfg, 2.5e-4)
    base = dict(cfgs)["pretrain"]
    assert (base.lr, base.steps, base.batch) == (pytest.approx(2.5e-5), 100, 64)
    assert Path(base.init).name == "import" and Path(base.tokens).name == "dialogues"


def test_8gpu(told, monkeypatch):
    commands = told("8gpu", *flags(told, "model", "hh", "forum", "text"),
                    "--rate", "2e-4", "--shard", "yes", "--checkpoint", "yes")
    assert stages(commands) == ["runs/rates", "hh", "sample", "tokens", "pretrain", "forum",
                                "tokens", "distill", "preference", "prompts", "preference", "ppo",
                                "analyze", "doctor"]
    for stage, cfg in configs(commands, monkeypatch):
        the_papers(stage, cfg, 2e-4)
        assert getattr(cfg, "shard", True) and getattr(cfg, "checkpoint", True)
    ppo = dict(configs(commands, monkeypatch))["ppo"]
    assert (ppo.epochs, ppo.mix, bool(ppo.generated)) == (1, 0.73, True)
    launched = {script: before for script, _, before in commands if before}
    assert set(launched) == {f"{s}.py" for s in ("pretrain", "distill", "preference", "prompts",
                                                 "ppo")}
    assert all(before == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8",
                          "--max-restarts=10"] for before in launched.values())


def test_8gpu_in_rounds(told, monkeypatch):
    """A lot more each round; each PM from the same start, each policy from the distilled one."""
    for name in ("helpful-base", "harmless-base", "helpful-rejection-sampled", "helpful-online"):
        (told.folder / "hh" / name).mkdir()
    commands = told("8gpu", *flags(told, "model", "hh"), "--rate", "2e-4", "--k", "4",
                    "--rounds", "base,rs,online", "--generated", "0")
    assert stages(commands) == ["runs/rates", "hh", "hh", "hh", "sample", "tokens", "pretrain",
                                "distill", *["preference", "ppo", "analyze", "doctor"] * 3]
    assert [len([w for w in words if "helpful" in w or "harmless" in w])
            for script, words, _ in commands if script == "data/hh.py"] == [2, 1, 1]
    lots = ["base", "rs", "online"]
    for i, (stage, cfg) in enumerate(x for x in configs(commands, monkeypatch)
                                     if x[0] in ("preference", "ppo")):
        the_papers(stage, cfg, 2e-4)
        names = cfg.data if stage == "preference" else cfg.prompts
        learned = [f"{told.folder}/out/data-{lot}/train.jsonl" for lot in lots[:i // 2 + 1]]
        assert names.split(",") == learned
        assert stage == "ppo" or cfg.test == cfg.data.replace("train", "test")
        assert Path(cfg.out).name == f"{'pm' if stage == 'preference' else 'ppo'}-{lots[i // 2]}"
        if stage == "ppo":
            assert (cfg.epochs, cfg.halve, cfg.generated) == (4, 100000, "")
            assert Path(cfg.policy).name == "distill"
        else:
            assert Path(cfg.init).name == "base"


def test_8gpu_on_two_machines(told):
    """The second runs the stages that all ranks run, once the first has made what they read."""
    out, env = told.folder / "out", dict(NNODES="2", ENDPOINT="host:29500")
    words = [*flags(told, "model", "hh"), "--rate", "2e-4", "--gpus", "4"]
    first = told("8gpu", *words, **env)
    alone = [x for x in first if not x[2]]
    for name in ("data-all/test.jsonl", "import/ckpt.pt", "dialogues/tokens.json",
                 "report-all/analysis.png"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    second = told("8gpu", *words, NODE="1", **env)
    assert stages(alone) == ["runs/rates", "hh", "sample", "tokens", "analyze", "doctor"]
    assert [x for x in second if x[2]] == [x for x in first if x[2]]
    assert stages(x for x in second if not x[2]) == ["runs/rates"]
    again = told("8gpu", *words, **env)                    # what is there is not made again
    assert stages(x for x in again if not x[2]) == ["runs/rates", "doctor"]
    for number, (*_, before) in enumerate((x for x in second if x[2]), 1):
        assert before == ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=4",
                          "--rdzv_backend=c10d", "--rdzv_endpoint=host:29500",
                          f"--rdzv_id={number}", "--max-restarts=10"]


def test_the_second_machine_waits_for_the_first(told):
    with pytest.raises(subprocess.TimeoutExpired) as waits:
        told("8gpu", *flags(told, "model", "hh"), "--rate", "2e-4", NNODES="2", NODE="1",
             ENDPOINT="host:29500", patience=2)
    assert (told.folder / "notes").read_text().startswith("runs/rates.py\t2e-4\t\n")
    assert (told.folder / "notes").read_text().count("\n") == 1
    assert waits.value.stdout.decode() == (
        f"waiting for {told.folder}/out/data-all/test.jsonl, which the machine with NODE=0 makes; "
        "--out must be on a disk that all share\n")


@pytest.mark.parametrize("fails", ["data/hh.py", "-m"])
def test_the_second_machine_ends_when_the_first_fails(told, fails):
    words, env = [*flags(told, "model", "hh"), "--rate", "2e-4"], dict(
        NNODES="2", ENDPOINT="host:29500")
    told("8gpu", *words, code=3, FAILS=fails, **env)
    assert (told.folder / "out" / "failed").exists()
    error = told("8gpu", *words, code=2, NODE="1", **env)
    assert error.endswith("failed: the machine with NODE=0 ended in an error; start it again "
                          "first, then this one\n")
    told("8gpu", *words, **env)
    assert not (told.folder / "out" / "failed").exists()


@pytest.mark.parametrize("script, given", [("1gpu", "gpt2"), ("8gpu", "model"), ("hh", "gpt2")])
def test_names_with_blanks_from_the_callers_folder(told, script, given):
    """Of one name after the other; the folder has a blank, too."""
    here = told.folder / "my stuff"
    here.mkdir()
    names = dict(hh="h h", forum="f f", hhh="3 h", lambada="l l", arc="a a", prompt="p p")
    names = {k: v for k, v in names.items() if script != "hh" or k in ("hh", "forum", "hhh")}
    for name in (*names.values(), "a a.txt", "b.txt", given):
        (here / name).touch()
    words = [x for k, v in {given: given, **names}.items() for x in (f"--{k}", v)]
    rate = ["--rate", "2e-4"] if script != "hh" else []
    commands = told(script, *words, *rate, "--text", "a a.txt,b.txt", cwd=here)
    said = [word for _, words, _ in commands for word in words]
    assert all(str(here / v) in said for v in names.values())
    if script != "hh":                                       # whose GPT-2 needs no text
        assert f"{here}/a a.txt,{here}/b.txt" in said
    error = told(script, *words, *rate, "--text", "a a.txt,c.txt", cwd=here, code=2)
    assert error == f"error: {here}/c.txt: no such file or folder\n"


@pytest.mark.parametrize("script, given", [("1gpu", "gpt2"), ("8gpu", "model")])
def test_a_rehearsals_numbers_come_first(told, monkeypatch, script, given):
    words = [*flags(told, given, "hh"), "--rate", "2e-4", "--micro", "2"]
    rehearsed = told(script, "--rehearse", *words)
    assert told(script, *words, "--rehearse") == rehearsed
    assert {c.micro for s, c in configs(rehearsed, monkeypatch) if s in ("ppo", "pretrain")} == {2}


@pytest.mark.parametrize("script, given", [("1gpu", "gpt2"), ("8gpu", "model")])
def test_weights_that_need_a_package(told, script, given):
    """Told before any data is read; pytorch_model.bin needs none."""
    words, folder = [*flags(told, given, "hh"), "--rate", "2e-4"], told.folder / given
    (folder / "model.safetensors").touch()
    assert told(script, *words, code=2, FAILS="-c") == (
        f"error: {folder}: its weights are in a form that needs a package: "
        f"{told.folder}/venv/bin/pip install safetensors\n")
    (folder / "pytorch_model.bin").touch()
    assert told(script, *words, FAILS="-c")


@pytest.mark.parametrize("script, words, line", [
    ("1gpu", ["--text", "x"], "--hh FOLDER is missing"),
    ("1gpu", ["--hh", "x"], "--text NAMES is missing"),
    ("1gpu", ["--bogus", "1"], "unknown flag --bogus"),
    ("8gpu", ["--hh", "x"], "--model FOLDER is missing"),
    ("8gpu", ["--model", "x"], "--hh FOLDER is missing"),
    ("8gpu", ["--model", "/x", "--hh", "/y"], "/x: no such file or folder"),
    ("8gpu", ["--bogus", "1"], "unknown flag --bogus"),
    ("8gpu", ["--model", "/", "--hh", "/", "--samples", "511"], "--samples 511: fewer than"),
    ("8gpu", ["--model", "/", "--hh", "/", "--rounds", "week"], "--rounds week: all, or of base")])
def test_what_the_scripts_refuse(told, script, words, line):
    assert f"error: {line}" in told(script, *words, code=2)


def test_machines_without_an_endpoint(told):
    told_ = told("8gpu", *flags(told, "model", "hh"), code=2, NNODES="2")
    assert "error: NNODES=2 needs ENDPOINT=host:port" in told_


# ---------------------------------------------------------------- rehearsals

KILLER = '''"""Kills rank 1 once in each stage, when it has a checkpoint to go on from."""
import os, pathlib, signal, sys, threading, time

def watch():
    while not getattr(sys, "argv", None):
        time.sleep(0.01)
    if "--out" not in sys.argv or os.environ.get("RANK") != "1":
        return
    out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    mark = pathlib.Path(os.environ["KILLED"]) / out.name
    while not mark.exists():
        if (out / "ckpt.pt").exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
'''


@pytest.fixture
def rows(data_dir, tmp_path):
    """The first rows of HH-RLHF's real files, and some of a forum's."""
    for name in ("helpful-base", "harmless-base"):
        source = next((data_dir / "hh-rlhf" / name).glob("test.jsonl*"))
        (tmp_path / "hh" / name).mkdir(parents=True)
        lines = [line for line, _ in zip(lines_of(source), range(250))]
        (tmp_path / "hh" / name / "train.jsonl").write_bytes(b"".join(lines))
    lines = (data_dir / "stackexchange" / "qa.jsonl").read_text().splitlines(True)
    (tmp_path / "forum.jsonl").write_text("".join(lines[:400]))
    return tmp_path


def whole(folder):
    """The stage is finished; its metrics tell each of its steps, three or more, once, in order."""
    content = checkpoint(folder)
    steps = content["step"]
    assert content["finished"] and steps >= 3, folder
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    done = [x["step"] for x in lines if "grad_norm" in x]
    assert done == [*range(steps)], (folder, done)


def pythia(transformers, folder, text):
    """A tiny GPT-NeoX with random weights, and a tokenizer in Pythia's form, made of the text."""
    made = trained(text, 700)
    transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=made.get_vocab_size(), hidden_size=24, num_hidden_layers=2,
        num_attention_heads=3, intermediate_size=96, rotary_pct=0.25, max_position_embeddings=512,
        bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))


def gpt2(transformers, folder, bpe):
    """A tiny GPT-2 with random weights and its real tokenizer."""
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=512)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copy(bpe / name, folder / name)


class Script:
    """A script of runs/ that runs, its output in a file."""

    def __init__(self, folder, name, *words, **env):
        self.out, self.log = folder / name, folder / f"{name}.log"
        env = dict(os.environ, VENV=str(folder / "venv"), CUDA_VISIBLE_DEVICES="",
                   OMP_NUM_THREADS="1", **env)
        with open(self.log, "a") as log:
            self.job = subprocess.Popen(
                ["bash", f"runs/{name}.sh", "--rehearse", *map(str, words), "--out", self.out],
                cwd=ROOT, env=env, start_new_session=True, stdout=log, stderr=log)

    def wait(self):
        assert self.job.wait(600 * PATIENCE) == 0, self.log.read_text()[-3000:]
        return self.log.read_text()

    def kill(self):
        os.killpg(self.job.pid, signal.SIGKILL)
        self.job.wait()


@pytest.fixture
def script(rows):
    """script(name, flags...) -> a Script; what still runs at the end is killed."""
    begun = []

    def start(*args, **env):
        begun.append(Script(rows, *args, **env))
        return begun[-1]

    yield start
    for one in begun:
        if one.job.poll() is None:
            one.kill()


@pytest.mark.long
def test_rehearsals(transformers, data_dir, rows, script):
    """Side by side: 8gpu.sh from Pythia's form on two processes, of which rank 1 dies once in each
    stage and torchrun starts both again; 1gpu.sh from GPT-2's with votes, killed as a whole in
    distillation.
    """
    environment_of(rows / "venv", f'exec "{sys.executable}" "$@"')
    pythia(transformers, rows / "pythia", (rows / "hh/helpful-base/train.jsonl").read_text())
    gpt2(transformers, rows / "gpt2", data_dir / "gpt2-bpe")
    for name in ("site", "killed"):
        (rows / name).mkdir()
    (rows / "site" / "sitecustomize.py").write_text(KILLER)
    many = script("8gpu", "--gpus", 2, "--model", rows / "pythia", "--hh", rows / "hh",
                  "--rate", 1e-3, PYTHONPATH=str(rows / "site"), KILLED=str(rows / "killed"))
    words = ("--gpt2", rows / "gpt2", "--hh", rows / "hh", "--forum", rows / "forum.jsonl",
             "--rate", 1e-3)
    one, end = script("1gpu", *words), time.monotonic() + 300 * PATIENCE
    while not (one.out / "distill" / "ckpt.pt").exists():
        assert one.job.poll() is None and time.monotonic() < end, one.log.read_text()[-3000:]
        time.sleep(0.01)
    one.kill()
    one = script("1gpu", *words)
    assert "base is finished, skipped" in one.wait()
    many.wait()
    assert {p.name for p in (rows / "killed").iterdir()} == {"base", "distill", "pm-all", "ppo-all"}
    for out, suffix in ((one.out, ""), (many.out, "-all")):
        for stage in ("base", "distill", f"pm{suffix}", f"ppo{suffix}"):
            whole(out / stage)
        assert "helpful" in (out / f"report{suffix}" / "analysis.md").read_text()
    assert checkpoint(one.out / "pmp")["finished"]
    turned = checkpoint(many.out / "ppo-all")["gpt"]
    assert turned["rotary"] == 0.25 and not turned["tied"]
