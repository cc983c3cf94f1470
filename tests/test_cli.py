"""Bad input to every stage, as a person gives it: a command, its output and its exit status.

What is right each time: one line on stderr that begins with "error:" and names what is wrong, an
exit status that is not 0, no traceback, and nothing lost or half-written.

Proved alive by: an error that keeps its traceback, ends with status 0 or goes to stdout; argparse's
own message; abbreviated flags; weights_only=False; the format mark not looked at; a preference
model taken as a policy, a language model as a preference model; vocabularies not compared;
checkpoints without a model; the folder not tried first, or made where a file is; written in place;
the torn file left; the config not compared, or not in collect; --samples not divided; a line's
number not told; no comparisons trained on; a device's error not caught; a progress bar that the
error is glued to.
"""

import dataclasses
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest
import torch
from tiny import NEEDS, PATIENCE, ROOT, SCRIPT, SCRIPTS, STAGES, checkpoint, contents, same

from common import save_checkpoint

LOOPS = [s for s in STAGES if s != "collect"]
# every flag that names a checkpoint of a model
READERS = [("distill", "init"), ("distill", "teacher"), ("collect", "policy"), ("pmp", "init"),
           ("ppo", "policy"), ("ppo", "pm"), ("sample", "ckpt"), ("sample", "compare")]


def refused(done, *words):
    """The command failed as it should, and its only error names these words."""
    lines = [x for x in done.err.replace("\r", "\n").splitlines() if x.strip()]
    errors = [x for x in lines if x.startswith("error:")]
    assert done.code > 0, done
    assert "Traceback" not in done.err and "Error" not in done.last, done.err
    assert len(errors) == 1 and errors[0] == done.last, done.err
    for word in words:
        assert str(word) in done.last, done.last
    return True


def command(tiny, stage, out, **flags):
    """argv of a stage or of sample.py."""
    if stage != "sample":
        return tiny.command(stage, out, **flags)
    flags = dict(dict(ckpt=tiny.whole("distill"), prompt="What?", device="cpu"), **flags)
    return ["sample.py", *(x for k, v in flags.items() for x in (f"--{k}", str(v)))]


# ---------------------------------------------------------------- flags

@pytest.mark.parametrize("script", SCRIPTS)
def test_unknown_and_malformed_flags(nursery, tmp_path, script):
    argvs = (["--bogus", "1"], ["--see", "1"], ["--seed", "x"], ["--seed", "1.5"], ["stray"],
             ["--seed"], ["--no-seed"])
    argvs = [a for a in argvs if a != ["stray"] or script != "eval"]     # a claim's name there
    commands = [[f"{script}.py", *argv, "--device", "none"] for argv in argvs]  # none begins
    for argv, done in zip(argvs, nursery.run_all(commands)):
        assert refused(done, argv[0] if argv[0] != "stray" else "stray", "--help")
        assert done.code == 2 and done.out == "" and done.err.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_tells_every_flag_and_the_commands(nursery, script):
    """Each field of Config with the comment of its line and its default; the docstring above."""
    done = nursery.run([f"{script}.py", "--help"], env=dict(COLUMNS="200"))
    module = importlib.import_module(script)
    assert (done.code, done.err) == (0, "")
    assert module.__doc__.strip() in done.out
    source = (ROOT / f"{script}.py").read_text()
    for field in dataclasses.fields(module.Config):
        comment = re.search(rf"^    {field.name}: .*?# (.*)$", source, re.M)[1]
        flag = "" if field.metadata.get("bare") else "--" + field.name.replace("_", "-")
        assert re.search(rf"^  {flag or 'NAME'}\b", done.out, re.M), flag
        assert comment + (f" (default {field.default!r})" if flag else "") in done.out, flag


@pytest.mark.parametrize("stage", [*STAGES, "sample"])
def test_devices_that_are_not_there(tiny, nursery, tmp_path, stage):
    names = ("nonsense", "cuda", "cuda:99")
    commands = [command(tiny, stage, tmp_path / "run", device=name) for name in names]
    for name, done in zip(names, nursery.run_all(commands)):
        assert refused(done, f"--device {name.split(':')[0]}")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage, flags, words", [
    ("pretrain", dict(size="huge"), ["--size huge", "nano"]),
    ("pretrain", dict(documents=7), ["7 rows", "--batch", "8"]),
    ("pretrain", dict(vocab=100), ["--vocab 100", "262"]),
    ("distill", dict(texts=5), ["5 rows", "--batch", "6"]),
    ("pmp", dict(pairs=5), ["5 comparisons", "--batch", "6"]),
    ("ppo", dict(samples=8, minibatch=3), ["--samples 8", "--minibatch 3"]),
])
def test_sizes_that_do_not_fit(tiny, nursery, tmp_path, stage, flags, words):
    assert refused(nursery.run(tiny.command(stage, tmp_path / "run", **flags)), *words)
    assert not (tmp_path / "run" / "ckpt.pt").exists()


# ---------------------------------------------------------------- checkpoints that are read

class Code:
    """Runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture(scope="module")
def bad(tiny, tmp_path_factory):
    """name -> (path of a file that is no checkpoint of a model, words of the error)."""
    folder = tmp_path_factory.mktemp("bad")
    whole = (tiny.whole("base") / "ckpt.pt").read_bytes()
    (folder / "empty.pt").write_bytes(b"")
    (folder / "truncated.pt").write_bytes(whole[:len(whole) // 2])
    (folder / "text.pt").write_text("no checkpoint\n")
    torch.save(dict(model={"w": torch.ones(3)}), folder / "foreign.pt")
    save_checkpoint(folder / "nomodel.pt", taught=[1, 2])
    torch.save(dict(format="nanohh-1", x=Code(folder / "marker")), folder / "code.pt")
    (folder / "pickle.pt").write_bytes(pickle.dumps(Code(folder / "marker")))
    words = dict(empty="not a readable", truncated="not a readable", text="not a readable",
                 code="not a readable", pickle="not a readable", foreign="another program",
                 nomodel="no model", missing="no checkpoint here")
    return {name: (folder / f"{name}.pt", word) for name, word in words.items()}


@pytest.mark.parametrize("stage, flag", READERS)
def test_files_that_are_no_checkpoint(tiny, nursery, bad, tmp_path, stage, flag):
    """Missing, cut, foreign, empty, text, with code that would run: told, and nothing is run."""
    commands = [command(tiny, stage, tmp_path / name, **{flag: path})
                for name, (path, _) in bad.items()]
    for (name, (path, word)), done in zip(bad.items(), nursery.run_all(commands)):
        assert refused(done, path, word)
        assert not (path.parent / "marker").exists()
        left = contents(tmp_path / name)
        assert not {"ckpt.pt", "comparisons.jsonl", "teacher.pt"} & left.keys()
    if stage in ("collect", "ppo"):  # the right flag in the same folder
        assert nursery.run(tiny.command(stage, tmp_path / "missing")).code == 0
        same(tiny.whole(stage), tmp_path / "missing")


@pytest.mark.parametrize("stage, flag, given, words", [
    ("distill", "init", "pm", "a preference model, not a language model"),
    ("distill", "teacher", "pm", "a preference model, not a language model"),
    ("collect", "policy", "pm", "a preference model, not a language model"),
    ("ppo", "policy", "pm", "a preference model, not a language model"),
    ("ppo", "pm", "distill", "a language model, not a preference model"),
    ("sample", "ckpt", "pm", "a preference model"),
    ("ppo", "pm", "collect", "no model"),
    ("pmp", "init", "collect", "no model"),
    ("distill", "teacher", "pretrain", "different vocabularies"),
])
def test_checkpoints_of_another_kind(tiny, nursery, tmp_path, stage, flag, given, words):
    folder = tiny.whole(given)
    before = contents(folder)
    done = nursery.run(command(tiny, stage, tmp_path / "run", **{flag: folder}))
    assert refused(done, folder, words)
    assert contents(folder) == before and "ckpt.pt" not in contents(tmp_path / "run")


def test_a_preference_model_of_another_vocabulary(tiny, nursery, tmp_path):
    """As many ids, other words: the sizes alone would not show it."""
    content = checkpoint(tiny.whole("pm"))
    content.pop("format")
    lines = content["tokenizer"].splitlines()
    lines[300], lines[301] = (f"{a.split()[0]} {b.split()[1]}"
                              for a, b in ((lines[300], lines[301]), (lines[301], lines[300])))
    content["tokenizer"] = "".join(x + "\n" for x in lines)
    save_checkpoint(tmp_path / "other.pt", **content)
    done = nursery.run(tiny.command("ppo", tmp_path / "run", pm=tmp_path / "other.pt"))
    assert refused(done, "different vocabularies", tmp_path / "other.pt", tiny.whole("distill"))


def test_a_teacher_without_room_for_the_prompt(tiny, nursery, tmp_path):
    done = nursery.run(tiny.command("distill", tmp_path / "run", init=tiny.whole("pretrain")))
    assert refused(done, tiny.whole("pretrain"), "128 tokens", "HHH prompt")


# ---------------------------------------------------------------- the stage's folder

@pytest.mark.parametrize("stage", STAGES)
def test_a_file_in_the_folders_place(tiny, nursery, tmp_path, stage):
    (tmp_path / "taken").write_text("mine")
    for out in (tmp_path / "taken", tmp_path / "taken" / "run"):
        assert refused(nursery.run(tiny.command(stage, out)), f"--out {out}", "cannot be written")
        assert contents(tmp_path) == {"taken": b"mine"}


@pytest.fixture
def mounted(tmp_path):
    """mount(options) -> a folder that is a disk of its own. Skips where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder],
                              capture_output=True) if shutil.which("mount") else None
        if done is None or done.returncode:
            pytest.skip("mounting a disk needs root")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", folder], check=True)


def test_a_read_only_folder(tiny, nursery, tmp_path, mounted):
    if os.geteuid():
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
    else:
        folder = mounted("ro,size=1m")
    outs = [folder, folder / "run"] * len(STAGES)
    commands = [tiny.command(stage, out) for stage in STAGES for out in outs[:2]]
    for out, done in zip(outs, nursery.run_all(commands)):
        assert refused(done, f"--out {out}", "cannot be written")


@pytest.mark.parametrize("stage, changed", [
    ("pretrain", dict(lr=1e-3)), ("distill", dict(top=49)), ("collect", dict(count=43)),
    ("pmp", dict(seed=3)), ("pm", dict(epochs=2)), ("ppo", dict(lambda_kl=0.5)),
])
def test_a_folder_of_other_flags(tiny, nursery, tmp_path, stage, changed):
    """Finished or half way: the flag, its old and its new value are told, and the run is kept."""
    (name, value), = changed.items()
    shutil.copytree(tiny.whole(stage), tmp_path / "done")
    old = checkpoint(tmp_path / "done")["config"][name]
    folders = [tmp_path / "done"]
    if stage != "collect":
        step = 3 if stage == "ppo" else 4
        folders.append(tmp_path / "half")
        done = nursery.run(tiny.command(stage, folders[1]),
                           hooks=[("at_step", [step, "SIGINT", 0])])
        assert done.code == 130
    for folder in folders:
        before = contents(folder)
        done = nursery.run(tiny.command(stage, folder, **changed))
        assert refused(done, folder, f"{name}={old!r}", repr(value))
        assert contents(folder) == before


def test_the_folder_of_another_stage(tiny, nursery, tmp_path):
    shutil.copytree(tiny.whole("pretrain"), tmp_path / "run")
    before = contents(tmp_path / "run")
    for stage in ("distill", "collect", "pmp", "ppo"):
        done = nursery.run(tiny.command(stage, tmp_path / "run"))
        assert refused(done, tmp_path / "run", "stage='pretrain'")
        assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_whose_checkpoint_cannot_be_read(tiny, nursery, bad, tmp_path, stage):
    """It may be the only copy of somebody's work: told and left alone."""
    (tmp_path / "run").mkdir()
    for name in ("empty", "truncated", "foreign", "nomodel", "code"):
        shutil.copy(bad[name][0], tmp_path / "run" / "ckpt.pt")
        before = contents(tmp_path / "run")
        assert refused(nursery.run(tiny.command(stage, tmp_path / "run")), tmp_path / "run")
        assert contents(tmp_path / "run") == before
    assert not (bad["code"][0].parent / "marker").exists()


# ---------------------------------------------------------------- comparisons that are read

GOOD = dict(prompt="\n\nHuman: Hi\n\nAssistant:", chosen="a", rejected="b")


@pytest.mark.parametrize("text, words", [
    ('{"prompt": ', ["line 2"]), ("", ["line 2"]), ("[]", ["line 2"]), ("null", ["line 2"]),
    ("5", ["line 2"]), ('"x"', ["line 2"]),
    *((json.dumps({k: v for k, v in GOOD.items() if k != name}), ["line 2", f"no field '{name}'"])
      for name in GOOD),
    (json.dumps({**GOOD, "chosen": 3}), ["line 2", "field 'chosen' must be text"]),
    (json.dumps({**GOOD, "rejected": None}), ["line 2", "field 'rejected' must be text"]),
    (json.dumps({**GOOD, "prompt": "Hi"}), ["line 2", "blank line"]),
    (json.dumps({**GOOD, "prompt": "\n\nHuman: Hi"}), ["line 2", "must end with 'Assistant:'"]),
    (json.dumps({**GOOD, "prompt": GOOD["prompt"] + " yes"}),
     ["line 2", "must end with 'Assistant:'"]),
])
def test_malformed_comparisons(tiny, nursery, tmp_path, text, words):
    """File, line and field are told, and the form that a line should have."""
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + text + "\n" + json.dumps(GOOD) + "\n")
    done = nursery.run(tiny.command("pm", tmp_path / "run", data=path))
    assert refused(done, path, *words, '{"prompt": "\\n\\nHuman: ...\\n\\nAssistant:"')
    assert "ckpt.pt" not in contents(tmp_path / "run")


def test_too_few_comparisons(tiny, nursery, tmp_path):
    """None, fewer than a batch, none that teaches: refused, and not trained on for 0 steps."""
    path, line = tmp_path / "mine.jsonl", json.dumps(GOOD) + "\n"
    alike = json.dumps({**GOOD, "rejected": "a"}) + "\n"
    long = json.dumps({**GOOD, "chosen": "word " * 400}) + "\n"
    for text, words in (("", ["the file is empty"]), (line * 3, ["3 comparisons", "--batch of 4"]),
                        (alike * 9, ["0 comparisons of 9", "'identical': 9"]),
                        (long * 9, ["0 comparisons of 9", "'too_long': 9"])):
        path.write_text(text)
        done = nursery.run(tiny.command("pm", tmp_path / "run", data=path, test=path))
        assert refused(done, *words)
    for place in (tmp_path / "no.jsonl", tmp_path / "run"):
        done = nursery.run(tiny.command("pm", tmp_path / "run", data=place))
        assert refused(done, place, "no such file")
    path.write_text(line * 8)
    done = nursery.run(tiny.command("pm", tmp_path / "run", data=path))
    assert refused(done, path, "not about the toy world", "--test")
    assert nursery.run(tiny.command("pm", tmp_path / "run", data=path, test=path)).code == 0


# ---------------------------------------------------------------- a full disk

@pytest.mark.parametrize("stage", ["pretrain", "distill", "ppo", *(
    pytest.param(s, marks=pytest.mark.slow) for s in ("pmp", "pm"))])
def test_a_checkpoint_that_does_not_fit(tiny, nursery, tmp_path, stage):
    """The write fails half way (a limit on the size of files): the old checkpoint goes on."""
    out = tmp_path / "run"
    argv = tiny.command(stage, out)
    assert nursery.run(argv, hooks=[("at_step", [2, "SIGINT", 0])]).code == 130
    before = contents(out)
    done = nursery.run(argv, hooks=[("file_limit", len(before["ckpt.pt"]) // 2)])
    assert refused(done, out / "ckpt.pt")
    after = contents(out)
    assert after["ckpt.pt"] == before["ckpt.pt"]
    assert after.keys() - before.keys() <= {"samples.txt"}  # pm evaluates before it saves
    assert nursery.run(argv).code == 0
    same(tiny.whole(stage), out)


@pytest.mark.parametrize("stage, file, size", [
    ("distill", "teacher.pt", 5000), ("collect", "comparisons.jsonl", 3000),
    ("pretrain", "config.json", 100), ("ppo", "metrics.jsonl", 900),
])
def test_other_files_that_do_not_fit(tiny, nursery, tmp_path, stage, file, size):
    out = tmp_path / "run"
    done = nursery.run(tiny.command(stage, out), hooks=[("file_limit", size)])
    assert refused(done, "large" if file == "metrics.jsonl" else file)
    assert not [name for name in contents(out) if name.endswith(".part")]
    assert nursery.run(tiny.command(stage, out)).code == 0
    same(tiny.whole(stage), out)


def test_a_full_disk(tiny, nursery, tmp_path, mounted):
    """A real one, filled before the second checkpoint; once there is room the run goes on."""
    disk = mounted("size=60m")
    argv = tiny.command("pretrain", disk / "run")
    done = nursery.run(argv, hooks=[("fill_disk", [str(disk), 2])])
    assert refused(done, disk / "run")
    assert checkpoint(disk / "run")["step"] == 3
    assert not [name for name in contents(disk) if name.endswith(".part")]
    assert refused(nursery.run(argv), "--out", disk / "run")
    (disk / "filler").unlink()
    assert nursery.run(argv).code == 0
    same(tiny.whole("pretrain"), disk / "run")


def test_a_disk_that_is_too_small(tiny, nursery, mounted):
    disk = mounted("size=40m")
    commands = [tiny.command(stage, disk / stage) for stage in STAGES]
    for stage, done in zip(STAGES, nursery.run_all(commands)):
        assert refused(done, f"--out {disk / stage}", "50 MB free")


# ---------------------------------------------------------------- other programs

def test_the_report_of_nothing(nursery, tmp_path):
    """Also: a claim that is unknown, and a README without its markers or its records."""
    done = nursery.run(["eval.py", "--report", "--run", tmp_path / "no", "--device", "cpu"])
    assert refused(done, tmp_path / "no", "no checkpoint here")
    assert refused(nursery.run(["eval.py", "H99"]), "H99: no claim", "H01")
    assert contents(tmp_path) == {}


def test_the_tokenizer_program(nursery, tmp_path):
    (tmp_path / "text").write_text("some words")
    for argv, words in ((["--train", tmp_path / "no"], "no"),
                        (["--train", tmp_path / "text", "--vocab", 10], "vocab 10")):
        done = nursery.run(["data/tokenizer.py", *argv, "--out", tmp_path / "out.tiktoken"])
        assert refused(done, words)
    assert contents(tmp_path).keys() == {"text"}


@pytest.mark.parametrize("argv", [["distill.py", "--init", "nowhere"], pytest.param(
    ["ppo.py", "--bogus"], marks=pytest.mark.slow)])
def test_a_command_in_a_shell(nursery, tmp_path, argv):
    """What the forked commands of these tests stand for: the same status and the same words."""
    argv = [*argv, "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True,
                          timeout=120 * PATIENCE, env=dict(os.environ, OMP_NUM_THREADS="1"))
    forked = nursery.run(argv)
    assert refused(forked)
    assert (done.returncode, done.stdout, done.stderr) == (forked.code, forked.out, forked.err)


def test_the_stages_are_all_here():
    """A stage that is added to runs/laptop.sh needs a place in these tests."""
    text = (ROOT / "runs" / "laptop.sh").read_text()
    used = set(re.findall(r"^\$PY (\w+)\.py", text, re.M))
    assert used <= set(SCRIPTS) and {SCRIPT.get(s, s) for s in STAGES} <= used
    assert set(NEEDS) <= {*STAGES, "sft", "harm"}
