"""The loop: what each round learns from and starts from, interruptions, a person's choices.

Proved alive by: a round's PM from the PM before, its policy from the policy before; the newest lot
alone; held-out lines learned; the smallest lot's size not shared; snapshots not deployed; a lot of
a person with more lines than asked, with a line half written, waited for again after it was there;
rs from the second round's PM; a step done again after a kill; the base lot's files one after the
other; an accuracy of no lines; a signal that does not end the wait.
"""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import PATIENCE, contents, distance
from tiny import parts as content_of

import online
from common import UserError, load_checkpoint, metrics_of
from online import Config, base_lot, check, parts, whole_lines
from preference import read_comparisons

SMALL = dict(rs=40, best=2, rounds=2, count=40, iterations=2, samples=8, snapshots="0", matches=3,
             device="cpu")


def command(tiny, out, **flags):
    flags = {**SMALL, "policy": tiny.whole("distill"), "pmp": tiny.whole("pmp"),
             "data": tiny.whole("collect"), **flags, "out": out}
    return ["online.py", *(x for k, v in flags.items() for x in (f"--{k}", str(v)))]


@pytest.fixture(scope="module")
def whole(tiny, nursery, tmp_path_factory):
    """Folder of a loop that nothing interrupted, its output, and how many events it has."""
    out = tmp_path_factory.mktemp("online") / "run"
    done = nursery.run(command(tiny, out), hooks=[("at_event", [-1, "SIGKILL"])])
    assert done.code == 0, done.err
    kept = out.with_name("whole")
    shutil.copytree(out, kept)
    return out, kept, done


# ---------------------------------------------------------------- what learns from what

def test_the_last_share_of_each_lot_tests():
    lots = dict(base=list(range(20)), rs=list(range(100, 110)))
    learn, test = parts(Config(held=0.2), lots)
    assert learn == dict(base=list(range(16)), rs=list(range(100, 108)))
    assert test == dict(base=[16, 17, 18, 19], rs=[108, 109])
    even, same = parts(Config(held=0.2, even=True), lots)
    assert even == dict(base=list(range(8)), rs=list(range(100, 108))) and same == test


def test_files_of_the_base_lot_are_dealt_in_proportion(tmp_path):
    """Else the last share, which tests, would be of the last file alone."""
    def lines(name, count):
        return [dict(prompt="\n\nHuman: x\n\nAssistant:", chosen=f"{name}{i}", rejected="")
                for i in range(count)]

    write(tmp_path / "a", lines("a", 20)), write(tmp_path / "b", lines("b", 10))
    alone = [x["chosen"] for x in base_lot(str(tmp_path / "a"))]
    assert alone == [f"a{i}" for i in range(20)]
    both = [x["chosen"] for x in base_lot(f"{tmp_path / 'a'},{tmp_path / 'b'}")]
    assert sorted(both) == sorted([*alone, *(f"b{i}" for i in range(10))])
    assert both[-6:] == ["a16", "b8", "a17", "a18", "b9", "a19"]


def test_a_lot_that_leaves_nothing_to_test_has_no_accuracy(monkeypatch):
    rows = []
    for name, fake in dict(load_source=lambda *_, **__: dict(tokenizer=""), loads=lambda x: x,
                           unpack=lambda x: SimpleNamespace(eval=lambda: x),
                           metrics_of=lambda x: [dict(kl=1.0)]).items():
        monkeypatch.setattr(online, name, fake)
    monkeypatch.setattr(online.preference, "score_lines",
                        lambda judge, tok, lines: (lines, [[1.0, 0.0] for _ in lines], {}))
    run = SimpleNamespace(log=lambda step, **row: rows.append(row), say=lambda text: None)
    online.told(Config(), run, 1, "pm", "policy", dict(base=[{}] * 10, few=[{}] * 4))
    assert rows == [dict(lines=14, accuracy_base=1.0, kl=1.0)]


def test_each_round_learns_all_lots_and_starts_anew(whole, tiny):
    _, out, _ = whole
    for number, lots in ((1, ["base", "rs"]), (2, ["base", "rs", "online-1"])):
        lines = read_comparisons(out / f"pm-{number}" / "learn.jsonl")
        held = read_comparisons(out / f"pm-{number}" / "test.jsonl")
        assert [list(dict.fromkeys(x["tranche"] for x in some)) for some in (lines, held)] == [
            lots, lots]
        assert len(lines) + len(held) == 44 + 40 * (len(lots) - 1) and len(held) == 4 * len(lots)
        pm, policy = (load_checkpoint(out / f"{x}-{number}")["config"] for x in ("pm", "ppo"))
        assert pm["init"] == str(tiny.whole("pmp"))
        assert policy["policy"] == str(tiny.whole("distill")) and not policy["reference"]
        assert policy["pm"].endswith(f"pm-{number}")
    first = read_comparisons(out / "pm-base" / "learn.jsonl")
    assert {x["tranche"] for x in first} == {"base"}


def test_lots_are_of_whom_they_should_be(whole, tiny):
    """The rs lot is of bests by the base lot's PM; the next of a snapshot and of the end."""
    run, out, _ = whole
    rs, lot = (json.loads((out / f"lot-{x}" / "config.json").read_text())
               for x in ("rs", "online-1"))
    assert (rs["policy"], rs["best"], rs["pm"]) == (str(tiny.whole("distill")), 2,
                                                    f"{run}/pm-base")
    assert lot["policy"].split(",") == [f"{run}/ppo-1/snapshot-0.pt", f"{run}/ppo-1"]
    assert (lot["best"], lot["pm"]) == (1, "")
    assert not (out / "lot-online-2").exists()           # nobody would learn from it


def test_what_is_told_of_the_rounds(whole):
    _, out, done = whole
    rows = metrics_of(out)
    assert [(r["step"], r["lines"]) for r in rows] == [(0, 84), (1, 124)]
    for row, lots in zip(rows, (("base", "rs"), ("base", "rs", "online-1")), strict=True):
        assert {k for k in row if k.startswith("accuracy")} == {f"accuracy_{x}" for x in lots}
    ppo = metrics_of(out / "ppo-2")
    assert rows[1]["kl"] == pytest.approx(sum(r["kl"] for r in ppo) / 2, rel=1e-4)
    scores = json.loads((out / "elo" / "elo.json").read_text())
    assert scores["reference"] == "distilled"
    assert list(scores["policies"]) == ["distilled", "static", "online-2"]
    assert "online round 2: accuracy base" in done.out + done.err


def test_a_pm_that_is_named_picks_for_rs(tiny, nursery, tmp_path):
    done = nursery.run(command(tiny, tmp_path, pm=tiny.whole("pm"), rounds=1, matches=0))
    assert done.code == 0, done.err
    assert not (tmp_path / "pm-base").exists() and not (tmp_path / "elo").exists()
    lot = json.loads((tmp_path / "lot-rs" / "config.json").read_text())
    assert lot["pm"] == str(tiny.whole("pm"))
    assert load_checkpoint(tmp_path / "pm-1")["config"]["init"] == str(tiny.whole("pmp"))


# ---------------------------------------------------------------- interruptions

def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(whole, tiny, nursery):
    """kill -9 at a write three times, then SIGTERM, each continued by the same command."""
    run, kept, done = whole
    shutil.rmtree(run)
    rng, events = random.Random("online"), done.report["events"]
    for name in ("SIGKILL", "SIGKILL", "SIGTERM", "SIGKILL"):
        hook = ("at_event", [rng.randrange(events // 10, events // 2), name])
        code = nursery.run(command(tiny, run), hooks=[hook]).code
        assert code in ((-signal.SIGKILL, 0) if name == "SIGKILL" else (130, 0))
    assert nursery.run(command(tiny, run)).code == 0
    a, b = contents(kept), contents(run)
    assert a.keys() == b.keys()
    for name in a:
        if name.endswith("ckpt.pt"):
            folder = Path(name).parent
            assert distance(content_of(kept / folder), content_of(run / folder)) == 0, name
        elif name.endswith(".jsonl"):
            assert a[name] == b[name], name
    again = nursery.run(command(tiny, run))
    assert again.code == 0 and "is finished, skipped" in again.out


@pytest.mark.slow
def test_two_processes_make_the_same_lots_and_policies(whole, tiny, nursery):
    run, kept, _ = whole
    shutil.rmtree(run, ignore_errors=True)
    done = nursery.ranks(2, command(tiny, run))
    assert [x.code for x in done] == [0, 0], done[0].err + done[1].err
    for name in ("lot-rs", "lot-online-1"):
        assert contents(run / name)["comparisons.jsonl"] == (
            contents(kept / name)["comparisons.jsonl"])
    assert distance(content_of(kept / "ppo-2")["model"], content_of(run / "ppo-2")["model"]) < 1e-4


# ---------------------------------------------------------------- a person

def write(folder, lines, torn=""):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (folder / "comparisons.jsonl").write_text(text + torn)


def wait_for(text, job):
    end = time.monotonic() + 60 * PATIENCE
    while text not in job.file("out", 60):
        assert time.monotonic() < end, job.file("err", 1)
        time.sleep(0.05)


def test_a_person_is_waited_for(whole, tiny, nursery):
    """It waits for 40 whole lines, is stopped and waits again; what comes later is not learned."""
    run, kept, _ = whole
    shutil.rmtree(run, ignore_errors=True)
    lines = [json.loads(x) for x in
             (kept / "lot-rs" / "comparisons.jsonl").read_text().splitlines()]
    lines = [{**x, "tranche": "human", "strength": 3} for x in lines]
    job = nursery.start(command(tiny, run, human=40))
    wait_for(f"--out {run}/human-online-1", job)
    assert f"python feedback.py --policies {run}/ppo-1/snapshot-0.pt {run}/ppo-1" in (
        job.file("out", 1))
    write(run / "human-online-1", lines[:39], json.dumps(lines[39]))    # no end of line yet
    time.sleep(1.5)
    assert not (run / "lot-online-1.jsonl").exists()
    job.kill(signal.SIGTERM)                              # once: there is nothing to save
    assert job.wait().code == 130
    write(run / "human-online-1", [*lines, *lines[:2]], '{"prompt":')
    for again in range(2):       # the second time the lot is there, and nobody is asked for it
        if again:
            (run / "ckpt.pt").unlink()
            shutil.rmtree(run / "human-online-1")
        done = nursery.run(command(tiny, run, human=40))
        assert done.code == 0, done.err
    frozen = (run / "lot-online-1.jsonl").read_text().splitlines()
    assert [json.loads(x) for x in frozen] == lines
    learned = read_comparisons(run / "pm-2" / "learn.jsonl")
    assert sum(x["tranche"] == "human" for x in learned) == 36


def test_whole_lines(tmp_path):
    path = tmp_path / "x"
    assert whole_lines(path) == []
    path.write_bytes(b"a\nb\nc")
    assert whole_lines(path) == [b"a", b"b"]


@pytest.mark.parametrize("knobs", [dict(rounds=0), dict(count=0), dict(rs=-1), dict(human=-1),
                                   dict(held=0.0), dict(held=1.0)])
def test_what_is_out_of_range(knobs):
    with pytest.raises(UserError, match="--" + next(iter(knobs))):
        check(Config(**knobs))
    check(Config())


def test_an_unusable_name_is_told_at_once(tiny, nursery, tmp_path):
    done = nursery.run(command(tiny, tmp_path / "x", data=tmp_path / "none"))
    assert done.code == 1 and "none: no such file; collect some first" in done.last
    assert online.__doc__.count("python online.py") == 3
