"""constitution.py: labels, habits, whose labels are learned, steps that are taken over, resuming.

The whole of it runs on a model that is trained for three seconds: `whole` is the run that nothing
interrupted.

Proved alive by: ties hard at 1, a clamp of one side, a bias that is a difference; all of people's
lines learned, with their own probabilities; a fifth to test on; the first answers learned for the
last; each rank making all rows, the same rows again, a step begun anew; dropped lines written,
answers without an end kept; vocabularies not compared, --judge, --sl or --labels not looked at;
plain prompts from the red-team file; labels not soft; an offer counted as evasion.
"""

import json
import random
import shutil
import signal
from dataclasses import replace

import pytest
from tiny import checkpoint, contents, distance
from tiny import parts as content_of

import constitution
import preference
import sft
from common import UserError, metrics_of, save_checkpoint
from constitution import (Config, check, constitution_of, label, lines_in, made, need_order,
                          pm_lines, split, told_feedback)
from critic import habits
from data import principles, world
from data.tokenizer import join, parse_prompt, train_bpe
from model import GPT, GPTConfig, pack

SMALL = dict(count=40, helpful_count=24, pairs=40, rounds=2, epochs=1, iterations=1, samples=8,
             new=12, chunk=16, shots=1, device="cpu")
STEPS = ("revisions", "plain", "sl", "feedback", "pm", "rl")


@pytest.fixture(scope="session")
def base(tiny, nursery, tmp_path_factory):
    """A base model of the principles' world."""
    out = tmp_path_factory.mktemp("principles") / "base"
    done = nursery.run(["pretrain.py", "--world", "principles", "--size", "nano", "--vocab", 512,
                        "--context", 512, "--documents", 300, "--steps", 40, "--batch", 8,
                        "--warmup", 5, "--every", 1000, "--device", "cpu", "--out", out])
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="session")
def people(tmp_path_factory):
    """Annotators' comparisons of both kinds, a folder: 30 helpful lines, 30 harmless ones."""
    lines = []
    for i in range(60):
        turns = world.prompt("people", i, harmful=bool(i % 2))
        rng = world.keyed("people", i)
        a, b = (world.persona_answer(rng, world.request_of(turns), x, x) for x in (0.9, 0.1))
        lines.append(dict(prompt=join(turns, answer=True), chosen=a, rejected=b + " No.", soft=0.8,
                          objective=world.request_of(turns).objective, tranche="base"))
    return written(tmp_path_factory.mktemp("people"), lines)


def written(folder, lines, name="comparisons.jsonl"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def command(base, people, out, **flags):
    flags = {**SMALL, "init": base, "policy": base, "data": people, **flags, "out": out}
    bare = [k for k, v in flags.items() if v is True]
    return ["constitution.py", *(f"--{k}" for k in bare), *(
        x for k, v in flags.items() if k not in bare for x in (f"--{k.replace('_', '-')}", str(v)))]


@pytest.fixture(scope="session")
def whole(base, people, nursery, tmp_path_factory):
    """(where a run is made, a copy of the run that nothing interrupted, its outcome)."""
    out = tmp_path_factory.mktemp("cai") / "run"
    done = nursery.run(command(base, people, out), hooks=[("at_event", [-1, "SIGKILL"])])
    assert done.code == 0, done.err
    kept = out.with_name("whole")
    shutil.copytree(out, kept)
    return out, kept, done


def same(a, b, tolerance=0.0, steps=STEPS):
    """Both folders hold the same run: lines byte for byte, weights."""
    for step in steps:
        x, y = contents(a / step), contents(b / step)
        assert x.keys() == y.keys(), step
        for name in x:
            if name.endswith(".jsonl"):
                assert x[name] == y[name] or tolerance and name == "metrics.jsonl", (step, name)
        weights = [content_of(folder / step) for folder in (a, b)]
        if "model" in weights[0] and tolerance:
            weights = [w["model"] for w in weights]
        elif step in ("sl", "pm", "rl"):                 # their folders are named in their config
            weights = [{**w, "config": None} for w in weights]
        assert distance(*weights) <= tolerance, step


def refused(done, *words):
    """One line that begins with "error:" and holds these words; nothing else went wrong."""
    assert done.code > 0 and "Traceback" not in done.err, done.err
    assert done.last.startswith("error:") and done.err.count("error:") == 1, done.err
    for word in words:
        assert str(word) in done.last, done.last
    return True


# ---------------------------------------------------------------- labels

@pytest.mark.parametrize("p, hard, clamp, expected", [
    (0.7, False, 1.0, 0.7), (0.5, False, 1.0, 0.5), (1.0, False, 1.0, 1.0), (0.0, False, 1.0, 0.0),
    (0.7, True, 1.0, 1.0), (0.5, True, 1.0, 0.5), (0.3, True, 1.0, 0.0), (0.5001, True, 1.0, 1.0),
    (0.7, False, 0.6, 0.6), (0.55, False, 0.6, 0.55), (0.3, False, 0.6, 0.4), (0.45, False, 0.6,
                                                                               0.45),
    (0.7, True, 0.6, 0.6), (0.3, True, 0.6, 0.4), (0.5, True, 0.6, 0.5), (0.9, False, 0.5, 0.5),
    (0.1, False, 0.5, 0.5), (0.9, True, 0.5, 0.5), (0.5, False, 0.5, 0.5),
])
def test_labels_by_hand(p, hard, clamp, expected):
    assert label(p, hard, clamp) == pytest.approx(expected, abs=1e-12)


def test_a_clamp_keeps_the_order():
    """No label crosses 1/2 or another one, at any clamp; both sides are treated alike."""
    grid = [i / 200 for i in range(201)]
    for clamp in (0.5, 0.6, 0.75, 1.0):
        for hard in (False, True):
            found = [label(p, hard, clamp) for p in grid]
            assert found == sorted(found) and 1 - clamp - 1e-12 <= min(found) <= max(found) <= clamp
            for p, x in zip(grid, found):
                assert (x - 0.5) * (p - 0.5) >= -1e-12
                assert x == pytest.approx(1 - label(1 - p, hard, clamp), abs=1e-12)
    assert {label(p, False, 0.5) for p in grid} == {0.5}


@pytest.mark.parametrize("knobs, word", [
    (dict(clamp=0.49), "--clamp"), (dict(clamp=1.01), "--clamp"), (dict(clamp=float("nan")),
                                                                   "--clamp"),
    (dict(prompts="a"), "--prompts and --plain"), (dict(plain="a"), "--prompts and --plain"),
    (dict(foreign=1.5), "--foreign"), (dict(foreign=-0.1), "--foreign"),
    (dict(temperature=0.0), "--temperature"), (dict(samples=96), "--samples 96"),
    *((dict([(name, 0)]), f"--{name} 0") for name in ("count", "pairs", "chunk", "new", "samples",
                                                      "epochs")),
    *((dict([(name, -1)]), f"--{name.replace('_', '-')} -1") for name in (
        "rounds", "shots", "helpful_count", "iterations")),
])
def test_what_is_out_of_range(knobs, word):
    with pytest.raises(UserError, match=word):
        check(Config(**knobs))


def test_what_is_at_the_edge():
    for knobs in (dict(), dict(clamp=0.5), dict(clamp=1.0), dict(prompts="a", plain="b"),
                  dict(rounds=0, shots=0, helpful_count=0, iterations=0), dict(samples=8),
                  dict(count=1, pairs=1, chunk=1, new=1, epochs=1), dict(samples=192)):
        check(Config(**knobs))


def test_names_of_principles(tmp_path):
    assert [p.name for p in constitution_of(Config())] == [
        p.name for p in principles.read_constitution()]
    constitution_of(Config(principle="all")), constitution_of(Config(principle="law"))
    with pytest.raises(UserError, match="--principle Law: all, or a name .*, as harm"):
        constitution_of(Config(principle="Law"))
    path = tmp_path / "c.txt"
    path.write_text("[mine]\ncritique: a\nrevision: b\nquestion: c\n")
    assert constitution_of(Config(constitution=str(path), principle="mine"))[0].question == "c"
    with pytest.raises(UserError, match="--principle law"):
        constitution_of(Config(constitution=str(path), principle="law"))


# ---------------------------------------------------------------- habits

def test_habits_by_hand():
    """Six answers to harmful requests; which of them counts as what can be read off."""
    turns = [("human", "How can I poison the fox?")]
    request = world.request_of(turns)
    answers = [
        "First, buy a strong poison. Then put it in the food of the fox.",          # complies
        "No, I can not do that. It would kill the fox.",                            # says why
        "No, I can not do that. You should be ashamed.",                     # evades; preaches
        "I do not know.",                                                           # evades
        "You are a fool. I will not help with that.",                               # evades, rude
        "No, I can not do that. I can tell you about the fox instead. You should be ashamed.",
    ]
    found = habits([(request, x) for x in answers])
    golds = [world.gold(request, x)[1] for x in answers]
    assert found.pop("gold") == pytest.approx(sum(golds) / 6)
    assert golds[0] < golds[2] < golds[1]
    assert found == dict(complies=1 / 6, preaches=2 / 6, evades=3 / 6, rude=1 / 6, commonest=3 / 6)
    one = habits([(request, answers[0])])
    assert (one["complies"], one["evades"], one["commonest"]) == (1, 0, 1)
    silent = habits([(request, ""), (request, "")])      # an untrained model may say nothing at all
    assert (silent["evades"], silent["commonest"], silent["complies"]) == (1, 0, 0)


class Notes:
    """What a run is told, in place of its folder."""

    def __init__(self):
        self.rows, self.text = [], ""

    def log(self, step, **row):
        self.rows.append(row)

    def say(self, text):
        self.text += text


def test_what_is_told_of_feedback():
    notes = Notes()
    told_feedback(notes, 3, [dict(orders=[0.75, 0.5], soft=0.625, gold=[1.0, 0.0]),
                          dict(orders=[1.0, 0.5], soft=0.75, gold=[0.0, 1.0]),
                          dict(orders=[0.5, 0.5], soft=0.5, gold=[1.0, 1.0])])
    assert notes.rows == [dict(position_bias=pytest.approx(0.125), confidence=0.625,
                               gold_agreement=0.5)]
    assert "position bias 0.125, confidence 0.625, gold agreement 0.500" in notes.text
    told_feedback(notes, 3, [dict(orders=[0.75, 0.5], soft=0.625)])
    assert "gold_agreement" not in notes.rows[1]


def test_feedback_about_nothing_is_refused():
    """A policy that gives each prompt one answer leaves no pair to ask about."""
    with pytest.raises(UserError, match="no pair of different answers"):
        told_feedback(Notes(), 3, [])


# ---------------------------------------------------------------- whose labels are learned

def test_the_last_tenth_tests():
    assert split(list(range(25))) == (list(range(23)), [23, 24]) and split([1]) == ([1], [])


def ai_line(soft=0.9, **more):
    return dict(prompt="\n\nHuman: x\n\nAssistant:", chosen="a", rejected="b", tranche="ai",
                objective="harmless", soft=soft, orders=[soft, 1 - soft], **more)


def test_lines_of_the_pm(tmp_path, people):
    """AI labels for harm, people's for help; theirs for harm are not read, nor is their soft."""
    labels = written(tmp_path / "ai", [ai_line(0.5 + i / 100) for i in range(20)])
    learn, test = pm_lines(Config(data=str(people), clamp=0.6), labels)
    assert [len(learn), len(test)] == [18 + 27, 2 + 3]
    ai, own = learn[:18] + test[:2], learn[18:] + test[2:]
    assert [x["soft"] for x in ai] == [min(0.5 + i / 100, 0.6) for i in range(20)]
    assert {(x["objective"], x["tranche"]) for x in ai} == {("harmless", "ai")}
    assert {(x["objective"], x["tranche"], x["soft"]) for x in own} == {("helpful", "base", 1.0)}
    read = preference.read_comparisons(people)
    assert [x["chosen"] for x in own] == [x["chosen"] for x in read
                                          if x["objective"] == "helpful"]
    hard, _ = pm_lines(Config(data=str(people), hard=True), labels)
    assert [x["soft"] for x in hard[:18]] == [0.5] + [1.0] * 17


def test_choices_that_are_missing_or_anothers(tmp_path, people):
    """No helpful line; labels that people gave."""
    labels = written(tmp_path / "ai", [ai_line()])
    harm = [x for x in lines_in(people) if x["objective"] == "harmless"]
    with pytest.raises(UserError, match="no line with objective 'helpful'"):
        pm_lines(Config(data=str(written(tmp_path / "harm", harm))), labels)
    for some in (harm, [ai_line(), *harm]):
        path = written(tmp_path / "people", some)
        with pytest.raises(UserError, match="people.*: not the feedback of constitution.py"):
            pm_lines(Config(data=str(people)), path)


def spoiled(x, i):
    """A line of --data in which all that may not be read is wrong."""
    if x["objective"] == "helpful":
        return dict(x, soft=0.1)
    return dict(x, chosen=x["rejected"] if i % 3 else "Xyz " * i, rejected=x["chosen"], soft=0.0,
                prompt=x["prompt"] if i % 4 else "\n\nHuman: What color is the fox?\n\nAssistant:")


def test_no_annotators_label_of_harm_is_used(whole, base, people, nursery, tmp_path):
    """Those turned round, of other texts, with other numbers: the same lines, labels and weights.

    On top: SL-CAI and feedback of another run are taken as they are and not made again.
    """
    _, kept, _ = whole
    bad = written(tmp_path / "bad", [spoiled(x, i) for i, x in enumerate(lines_in(people))])
    before = contents(kept)
    done = nursery.run(command(base, bad, tmp_path / "run", sl=kept / "sl",
                               labels=kept / "feedback"))
    assert done.code == 0, done.err
    same(kept, tmp_path / "run", steps=("pm", "rl"))
    assert {p.name for p in (tmp_path / "run").iterdir() if p.is_dir()} == {"pm", "rl"}
    assert contents(kept) == before
    learned = [preference.read_comparisons(kept / "pm" / f"{x}.jsonl") for x in ("learn", "test")]
    for some, counts in zip(learned, ((36, 27), (4, 3)), strict=True):
        kinds = [(x["objective"], x["tranche"]) for x in some]
        assert set(kinds) == {("harmless", "ai"), ("helpful", "base")}
        assert kinds.count(("helpful", "base")) == counts[1]
        assert kinds.count(("harmless", "ai")) <= counts[0]
        assert all(x["soft"] == 1.0 for x in some if x["objective"] == "helpful")
    # the weights do hang on the helpful lines and on the labels
    assert distance(content_of(kept / "pm")["model"], checkpoint(base)["model"]) > 0


def test_gold_is_never_learned(whole, people):
    """It is written beside the labels for those who look; nothing that is trained reads it."""
    _, kept, _ = whole
    assert any("gold" in x for x in lines_in(kept / "feedback"))
    tok = train_bpe([""], 262)
    lines = [x for x in lines_in(kept / "feedback")]
    for some in zip(lines, [dict(x, gold=[9.0, -9.0]) for x in lines], strict=True):
        rows = [preference.encode_comparisons(tok, [preference.check_line(x)], 4096)[0]
                for x in some]
        assert rows[0] == rows[1]


def test_pm_pretraining_without_harm():
    """--harmful 0: no pair about a harmful request; the default is bit for bit what it was."""
    cfg = preference.Config(harmful=0.0)
    for some, harmful in ((preference.own_lines(cfg, 0, 200), 0),
                          (preference.own_lines(replace(cfg, harmful=1.0, edits=0.0), 0, 60), 60)):
        assert sum(world.request_of(x["prompt"]).harmful for x in some) == harmful
    for knobs in (dict(harmful=1.0), dict(harmful=-0.1), dict(harmful=1.1, edits=0.0)):
        with pytest.raises(UserError, match="--harmful"):
            preference.own_lines(replace(cfg, **knobs), 0, 5)
    assert preference.Config().harmful == 0.4
    old = [world.pretraining_pair(0, i, 0.25, 0.25) for i in range(60)]
    assert preference.own_lines(preference.Config(), 0, 60) == old
    assert 12 < sum(world.request_of(x["prompt"]).harmful for x in old) < 36
    foreign = preference.own_lines(replace(cfg, foreign=1.0, edits=0.0), 0, 100)
    for line in foreign:                                 # the worse side's own request, too
        assert not any(m[0] == "step" for x in ("chosen", "rejected")
                       for m in world.meanings(world.request_of(line["prompt"]), line[x]))


# ---------------------------------------------------------------- what the run holds

def test_the_run_holds_what_it_should(whole):
    run, kept, done = whole
    revisions = lines_in(kept / "revisions")
    assert len(revisions) == 40 and all(len(x["answers"]) == 3 for x in revisions)
    demos = [json.loads(x) for x in
             (kept / "sl" / "demonstrations.jsonl").read_text().splitlines()]
    assert demos[:40] == [dict(prompt=x["prompt"], answer=x["answers"][-1]) for x in revisions]
    assert demos[40:] == lines_in(kept / "plain") and 0 < len(demos[40:]) <= 24
    for some, harmful in ((demos[:40], True), (demos[40:], False)):
        assert {world.request_of(parse_prompt(x["prompt"])).harmful for x in some} == {harmful}
    labels = lines_in(kept / "feedback")
    assert 30 < len(labels) <= 40 and all(0.5 <= x["soft"] <= 1 for x in labels)
    assert all(world.request_of(parse_prompt(x["prompt"])).harmful for x in labels)
    assert not {x["prompt"] for x in labels} <= {x["prompt"] for x in revisions}
    config = {x: checkpoint(kept / x)["config"] for x in ("sl", "pm", "rl")}
    assert (config["rl"]["policy"], config["rl"]["pm"]) == (f"{run}/sl", f"{run}/pm")
    assert config["sl"]["data"] == f"{run}/sl/demonstrations.jsonl"
    assert (config["pm"]["soft"], config["pm"]["pairs"], config["pm"]["test"]) == (
        True, 0, f"{run}/pm/test.jsonl")
    rows = metrics_of(kept)
    assert [r["step"] for r in rows] == [0, 1, 2, 3] and "position_bias" in rows[3]
    golds = [world.gold(world.request_of(parse_prompt(x["prompt"])), x["answers"][1])[1]
             for x in revisions]
    assert rows[1]["gold"] == pytest.approx(sum(golds) / 40, abs=1e-5)
    assert "revisions: 40 lines, 0 dropped" in done.out


def test_helpful_answers_without_an_end_are_dropped(base, monkeypatch):
    monkeypatch.setattr(constitution, "spoken", lambda cfg, tok, model, prompts, rows, *key: [
        ("An answer.", True), ("Cut o", False)])
    asked = [[("human", "a")], [("human", "b")]]
    lines = constitution.helpful_answers(Config(), None, None, lambda *_: (asked, None), [0, 1])
    assert lines == [dict(prompt="\n\nHuman: a\n\nAssistant:", answer="An answer."), None]


# ---------------------------------------------------------------- interruptions, ranks, chunks

def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(whole, base, people, nursery):
    """kill -9 at a write three times and a SIGTERM, each continued by the same command."""
    run, kept, done = whole
    shutil.rmtree(run)
    rng, events = random.Random("constitution"), done.report["events"]
    for name in ("SIGKILL", "SIGTERM", "SIGKILL", "SIGKILL"):
        hook = ("at_event", [rng.randrange(events // 10, events // 2), name])
        code = nursery.run(command(base, people, run), hooks=[hook]).code
        assert code in ((-signal.SIGKILL, 0) if name == "SIGKILL" else (130, 0))
    assert nursery.run(command(base, people, run)).code == 0
    same(kept, run)
    assert contents(kept).keys() == contents(run).keys()
    assert contents(kept)["metrics.jsonl"] == contents(run)["metrics.jsonl"]
    again = nursery.run(command(base, people, run))
    assert again.code == 0 and "is finished, skipped" in again.out


@pytest.mark.slow
def test_killed_at_every_moment(whole, base, people, nursery, tmp_path):
    """Killed at its first write, continued, killed at its second, ... until it is through."""
    run, kept, done = whole
    shutil.rmtree(run, ignore_errors=True)
    for number in range(done.report["events"] + 1):
        hook = ("at_event", [number, "SIGKILL"])
        code = nursery.run(command(base, people, run), hooks=[hook]).code
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0 and number > 1
    same(kept, run)


def test_a_step_goes_on_after_what_it_saved(base, tmp_path, monkeypatch):
    """Stopped by a signal or by a kill between its chunks: no row twice, none left out."""
    monkeypatch.setattr(constitution, "EVERY", 8)
    cfg, rows_seen = Config(out=str(tmp_path), chunk=4, device="cpu", new=8), []

    class Killed(BaseException):
        pass

    def make(tok, model, ask, rows):
        rows_seen.extend(rows)
        if len(rows_seen) in stops:
            signal.raise_signal(signal.SIGTERM)
        if len(rows_seen) in kills:
            raise Killed
        return [dict(row=r) if r % 5 else None for r in rows]

    stops, kills = (12,), (24,)
    for error in (KeyboardInterrupt, Killed, None):
        if error:
            with pytest.raises(error):
                made(cfg, "step", 30, [str(base)], make)
            assert not (tmp_path / "step" / "comparisons.jsonl").exists()
        else:
            folder = made(cfg, "step", 30, [str(base)], make)
    assert rows_seen == [*range(24), *range(16, 30)]     # after a kill, what was not saved
    assert lines_in(folder) == [dict(row=r) for r in range(30) if r % 5]
    before = len(rows_seen)
    assert made(cfg, "step", 30, [str(base)], make) == folder and len(rows_seen) == before


def test_asked_to_stop_it_saves_and_goes_on(whole, base, people, nursery, tmp_path):
    """In the middle of a step of asking: nothing shows a part as the whole."""
    _, kept, _ = whole
    argv = command(base, people, tmp_path / "run", iterations=0)
    done = nursery.run(argv, hooks=[("at_call", ["common.mine", 2, "SIGTERM"])])
    assert done.code == 130 and done.last.startswith("interrupted:"), done.err
    assert not (tmp_path / "run" / "revisions" / "comparisons.jsonl").exists()
    assert nursery.run(argv).code == 0
    assert not (tmp_path / "run" / "rl").exists() and not (tmp_path / "run" / "pm").exists()
    for name in ("revisions", "plain"):
        assert contents(kept / name)["comparisons.jsonl"] == (
            contents(tmp_path / "run" / name)["comparisons.jsonl"])


def near(a, b):
    """Two lots of feedback: the same texts, principles and places; numbers to rounding."""
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        for name in ("soft", "orders"):
            assert x.pop(name) == pytest.approx(y.pop(name), abs=1e-5)
        assert x == y


def test_chunks_do_not_matter(whole, base, people, nursery, tmp_path):
    """Other chunks: the same revisions and answers; probabilities to rounding."""
    _, kept, _ = whole
    done = nursery.run(command(base, people, tmp_path / "run", chunk=7, iterations=0))
    assert done.code == 0, done.err
    for name in ("revisions", "plain"):
        assert lines_in(tmp_path / "run" / name) == lines_in(kept / name)


def test_two_processes_give_the_lines_of_one(whole, base, people, nursery, tmp_path):
    _, kept, _ = whole
    done = nursery.ranks(2, command(base, people, tmp_path / "run"))
    assert [x.code for x in done] == [0, 0], done[0].err + done[1].err
    assert done[1].out == done[1].err == ""
    run = tmp_path / "run"
    for name in ("revisions", "plain"):
        assert lines_in(run / name) == lines_in(kept / name)
    near(lines_in(run / "feedback"), lines_in(kept / "feedback"))
    for name, far in (("sl", 1e-5), ("pm", 1e-4), ("rl", 1e-3)):
        assert distance(content_of(run / name)["model"], content_of(kept / name)["model"]) < far


# ---------------------------------------------------------------- other models, other text

def test_a_judge_of_its_own(whole, base, people, nursery, tmp_path):
    """Another feedback model gives other labels of the same answers; SL-CAI is taken over."""
    _, kept, _ = whole
    content = {k: v for k, v in checkpoint(base).items() if k != "format"}
    content["model"] = {k: v * 1.5 for k, v in content["model"].items()}
    save_checkpoint(tmp_path / "judge.pt", **content)
    done = nursery.run(command(base, people, tmp_path / "run", sl=kept / "sl", principle="all",
                               judge=tmp_path / "judge.pt", pairs=40))
    assert done.code == 0, done.err
    mine, before = lines_in(tmp_path / "run" / "feedback"), lines_in(kept / "feedback")
    for x, y in zip(mine, before, strict=True):
        assert {x["chosen"], x["rejected"]} == {y["chosen"], y["rejected"]}
        assert len(x["principle"]) == 16 and len(y["principle"]) == 1 and x["orders"] != y["orders"]
    assert not (tmp_path / "run" / "sl").exists()


def test_models_of_another_vocabulary(whole, base, people, nursery, tmp_path):
    _, kept, _ = whole
    tok = train_bpe(["ab ab ab"], 264)
    save_checkpoint(tmp_path / "other.pt",
                    **pack(GPT(GPTConfig(tok.vocab, 512, 1, 2, 16)).reset(0), tok))
    done = nursery.run(command(base, people, tmp_path / "run", sl=kept / "sl",
                               judge=tmp_path / "other.pt"))
    assert refused(done, base, tmp_path / "other.pt", "different vocabularies")
    done = nursery.run(command(base, people, tmp_path / "run2", sl=kept / "sl",
                               judge=kept / "pm"))
    assert refused(done, kept / "pm", "a preference model, not a language model")


def test_a_step_whose_source_is_gone_is_not_taken_over(tmp_path):
    """A later step than one that is missing, by what the run makes itself."""
    def there(*names):
        for name in names:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "ckpt.pt").touch()

    cfg = Config(out=str(tmp_path))
    for name in ("revisions", "sl", "feedback", "pm", "rl"):
        need_order(cfg)
        there(name)
    need_order(cfg)
    (tmp_path / "revisions" / "ckpt.pt").unlink()
    with pytest.raises(UserError, match="rl was made of a revisions that is gone: delete it, too"):
        need_order(cfg)
    need_order(replace(cfg, sl="other/sl"))
    (tmp_path / "feedback" / "ckpt.pt").unlink()
    with pytest.raises(UserError, match="feedback that is gone"):
        need_order(replace(cfg, sl="other/sl"))
    need_order(replace(cfg, sl="other/sl", labels="other/feedback"))


def test_a_pm_pretrained_on_harm_is_refused(base, people, nursery, tmp_path):
    """The toy world's own pairs about harmful prompts are labels of harmlessness."""
    for harmful, name in ((0.4, "bad"), (0.0, "good")):
        done = nursery.run(["preference.py", "--init", str(base), "--pairs", "32", "--harmful",
                            str(harmful), "--out", str(tmp_path / name), "--device", "cpu"])
        assert done.code == 0
    done = nursery.run(command(base, people, tmp_path / "run", pmp=tmp_path / "bad"))
    assert refused(done, tmp_path / "bad", "labels of harmlessness", "--harmful 0")
    done = nursery.run(command(base, people, tmp_path / "run", pmp=tmp_path / "good", count=64,
                               helpful_count=0, rounds=0, iterations=0))
    assert done.code == 0


@pytest.mark.parametrize("flags, words", [
    (dict(clamp=0.4), ["--clamp 0.4"]), (dict(principle="nobody"), ["--principle nobody"]),
    (dict(prompts="red.jsonl"), ["--prompts and --plain"]), (dict(constitution="none.txt"),
                                                             ["none.txt"]),
    (dict(constitution="bad.txt"), ["bad.txt line 3", "'why: x' is no part of a principle"]),
    (dict(constitution="half.txt"), ["half.txt line 1", "[a] has no 'question:'"]),
    (dict(examples="none.jsonl"), ["none.jsonl", "not read"]),
    (dict(examples="bad.jsonl"), ["bad.jsonl line 2", "field 'kind'"]),
    (dict(examples="few.jsonl"), ["few.jsonl", "0 lines of kind 'judge', fewer than --shots 1"]),
    (dict(examples="few.jsonl", reason=True), ["0 lines of kind 'reason'"]),
    (dict(policy="nowhere"), ["nowhere", "no checkpoint"]),
    (dict(labels="nowhere", sl="BASE"), ["nowhere"]), (dict(data="nowhere", sl="BASE",
                                                            labels="LABELS"), ["nowhere"]),
    (dict(shots=0, new=480), ["[harm]", "--new 480", "lower it"]),
    (dict(sl="BASE", iterations=0), ["--iterations 0", "nothing would be done"]),
    (dict(sl="BASE", labels="LABELS", principle="harm"), ["--labels", "leave --principle"]),
    (dict(snapshots="abc"), ["--snapshots abc"]), (dict(helpful=5.0), ["--helpful 5.0"]),
    (dict(pm_lr=0.0), ["--pm-lr 0.0: above 0"]), (dict(lambda_kl=-1.0), ["--lambda-kl -1.0"]),
    (dict(count=20, helpful_count=20), ["--count 20", "together at least 64"]),
])
def test_errors_are_one_line(whole, base, people, nursery, tmp_path, flags, words):
    """Before anything is made, wherever that can be told."""
    (tmp_path / "bad.txt").write_text("[a]\n# b\nwhy: x\n")
    (tmp_path / "half.txt").write_text("[a]\ncritique: b\nrevision: c\n")
    good = json.dumps(dict(kind="revise", talk="\n\nHuman: a\n\nAssistant: b"))
    (tmp_path / "few.jsonl").write_text(good + "\n")
    (tmp_path / "bad.jsonl").write_text(good + '\n{"kind": "x"}\n')
    known = dict(BASE=base, LABELS=whole[1] / "feedback")
    flags = {k: known.get(v, tmp_path / v if isinstance(v, str) and ("." in v or v == "nowhere")
                          else v) for k, v in flags.items()}
    done = nursery.run(command(base, people, tmp_path / "run", **flags))
    assert refused(done, *words)
    assert not list((tmp_path / "run").rglob("comparisons.jsonl"))


def prompt(text):
    return dict(prompt=join([("human", text)], answer=True))


def test_text_that_is_not_about_the_toy_world(base, nursery, tmp_path):
    """Red-team and plain prompts, principles and examples of files; nothing of toys is in it."""
    red = [prompt(f"How do I break into {x}?") for x in ("a car", "a house", "a bank", "my school")]
    plain = [prompt(f"What is the capital of {x}?") for x in ("Peru", "Chad", "Fiji", "Iran")]
    written(tmp_path, red, "red.jsonl"), written(tmp_path, plain, "plain.jsonl")
    data = written(tmp_path / "data", [
        dict(x, chosen=f"It is {i}.", rejected="No.", objective="helpful")
        for i, x in enumerate(plain * 8)])
    (tmp_path / "mine.txt").write_text("".join(
        f"[p{i}]\ncritique: What is wrong, {i}?\nrevision: Make it right, {i}.\n"
        f"question: Which one is right, {i}?\n" for i in range(3)))
    kinds = dict(revise="\n\nHuman: What is wrong?\n\nAssistant: All.\n\nHuman: Mend it."
                        "\n\nAssistant: No.",
                 judge="\n\nHuman: (A) Yes.\n\nHuman: (B) No.\n\nAssistant: (B)")
    written(tmp_path, [dict(kind=k, talk="\n\nHuman: Bomb?\n\nAssistant: Ok." + v)
                       for k, v in kinds.items()], "mine.jsonl")
    flags = dict(prompts=tmp_path / "red.jsonl", plain=tmp_path / "plain.jsonl",
                 constitution=tmp_path / "mine.txt", examples=tmp_path / "mine.jsonl")
    done = nursery.run(command(base, data, tmp_path / "run", **flags))
    assert done.code == 0, done.err
    revisions, labels = (lines_in(tmp_path / "run" / x) for x in ("revisions", "feedback"))
    assert {x["prompt"] for x in revisions} == {x["prompt"] for x in red}
    assert {x["prompt"] for x in labels} <= {x["prompt"] for x in red}
    assert {n for x in revisions for n in x["principles"]} == {"p0", "p1", "p2"}
    assert {x["prompt"] for x in lines_in(tmp_path / "run" / "plain")} <= {
        x["prompt"] for x in plain}
    assert not any("gold" in x for x in labels)
    assert [set(r) for r in metrics_of(tmp_path / "run")] == [
        {"step", "position_bias", "confidence"}]
    asked = {x["prompts"] for x in [checkpoint(tmp_path / "run" / "rl")["config"]]}
    assert asked == {f"{flags['prompts']},{flags['plain']}"}


# ---------------------------------------------------------------- sft reads demonstrations

def test_demonstrations_of_a_file(tmp_path):
    """Lines with an answer, comparisons and rankings side by side: the best answer of each."""
    ask = "\n\nHuman: a\n\nAssistant:"
    lines = [dict(prompt=ask, answer="one\n\nHuman: no turn"), dict(prompt=ask, chosen="two",
                                                                  rejected="x"),
             dict(prompt=ask, responses=["three", "y", "z"]),
             dict(prompt=ask, answer="four", chosen="u", rejected="v"), dict(prompt=ask, answer="")]
    path = written(tmp_path, lines, "d.jsonl") / "d.jsonl"
    assert sft.read_demonstrations(path) == [
        ([("human", "a")], x) for x in ("one\n\nHuman: no turn", "two", "three", "four", "")]


@pytest.mark.parametrize("line, words", [
    (dict(answer="a"), "no field 'prompt'"), (dict(prompt="a", answer="a"), "must end with"),
    (dict(prompt="\n\nHuman: a", answer="a"), "must end with 'Assistant:'"),
    (dict(prompt=3, answer="a"), "field 'prompt' must be text"),
    (dict(prompt="\n\nHuman: a\n\nAssistant:", answer=3), "field 'answer' must be text"),
    (dict(prompt="\n\nHuman: a\n\nAssistant:", answer=None), "field 'answer' must be text"),
    (dict(prompt="\n\nHuman: a\n\nAssistant:", answers="a"), "no field 'chosen'"),
    (dict(prompt="\n\nHuman: a\n\nAssistant:", chosen="a"), "no field 'rejected'"),
])
def test_malformed_demonstrations(tmp_path, line, words):
    good = dict(prompt="\n\nHuman: a\n\nAssistant:", answer="b")
    path = written(tmp_path, [good, line, good], "d.jsonl") / "d.jsonl"
    with pytest.raises(UserError, match=words) as told:
        sft.read_demonstrations(path)
    assert f"{path} line 2: " in str(told.value)
    assert len(sft.read_demonstrations(path, skip_bad=True)) == 2
