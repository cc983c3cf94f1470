"""doctor.py: a healthy run is all fine, and each failure changes the word of its own check only.

Every threshold is met from both sides. The metrics that the stages log are read from their source.

Mutations tried, each caught here: look before broken, a bound that counts as beyond; first for
last, a single value for a mean, the last tenth for the last third; NaN not left out of the means,
infinity not counted, skipped steps counted by metric or in all metrics, a bad batch not seen; a
torn line raised, tolerated anywhere, not told, a line without step, text for a number. Ratio of the
first iteration only; KL of the first iteration too, sign, no slack for rounding, its mean; the gap
signed, in absolute values, without slack, errors added, an exact 0 error. In the batch: KL
subtracted, at pads, though not in the reward, another coefficient, the end one late, the mask taken
for the lengths, NaN as right, each fault not counted. Clip fraction of 0 fine, of any 0, at rate 0,
with one update, at the very end only; entropy that rises, at the very end only; longer answers
only; the shorter answer not tried, the best test, the first evaluation; a score that need not rise,
that rises over the whole run, errors of one value, of one mean, a fall from the first, no held-out
PM as fine; KL for its root; value loss not looked at, upside down, critic and loss of few steps,
loss that rises a little, or must; coefficient to the end only, up only, 0. Always finished, a
damaged checkpoint raised; defaults in the command, another folder, no quotes, any module; status 1
for look, 0 for broken, 1 for bad usage; impossible checks counted, advice to what is fine, foreign
folders left out in silence, another order; a metric missing, a formula changed, a bar that ends a
table's cell, a flag that is not there.
"""

import ast
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import doctor as PROGRAM  # what the fixture `program` runs
from common import save_checkpoint
from doctor import CHECKS, METRICS, Stage, examine, grade, misplaced

ROOT = Path(__file__).resolve().parent.parent
NAMES = {check.__name__: what for check, _, what, *_ in CHECKS}


# ---------------------------------------------------------------- synthetic runs

def ppo_row(i):
    """A healthy iteration of 30."""
    row = dict(step=i, score=0.1 + 0.02 * i, pm=5 + 0.05 * i, penalty=0.01, kl=0.1 * i,
               kl_se=0.02 * (i > 0), kl_k3=0.1 * i, entropy=0.4 - 0.005 * i, length=13 + 0.1 * i,
               unfinished=0.01, refused_helpful=0.02, pm_helpful=5.0, pm_harmless=6.0,
               gold_helpful=1.0, gold_harmless=1.0, test_pm=0.1 + 0.01 * i + 0.01 * (i % 2),
               explained=-4 + 0.16 * i, value_loss=6 / (i + 1), clip_fraction=0.01,
               first_log_ratio=3e-6, grad_norm=0.3, critic_norm=0.5, lambda_kl=0.03, lr=1e-4)
    if i % 10 == 9:
        row |= dict(kl_exact=0.1 * i, kl_gap=0.05 * (-1) ** (i // 10), kl_gap_se=0.1)
    return row


def falling(i):
    return dict(step=i, loss=6 - 0.05 * i, lr=1e-3, grad_norm=1.0)


ROWS = {
    "pretrain": [falling(i) for i in range(40)] + [dict(step=40, heldout_loss=4.0)],
    "distill": [dict(step=-1, heldout_kl=0.7), *map(falling, range(40))],
    "sft": [dict(falling(i), pm=1.0, heldout_loss=2.0) for i in range(40)],
    "preference": [*map(falling, range(40)), dict(
        step=40, helpful_accuracy=0.7, helpful_longer=0.55, harmless_accuracy=0.8,
        harmless_longer=0.4)],
    "ppo": [ppo_row(i) for i in range(30)],
}


def ppo_batch(**changes):
    """Three answers of 3, 1 and 0 tokens in 4 slots; pads hold NaN where nothing may be read."""
    lengths, starts = torch.tensor([3, 1, 0]), torch.tensor([2, 3, 5])
    mask = torch.arange(4) < lengths[:, None]
    logp = torch.where(mask, torch.tensor([-0.5, -1.0, -2.0, 0.0]), math.nan)
    ref = torch.where(mask, torch.tensor([-1.0, -0.5, -2.5, 0.0]), math.nan)
    score = torch.tensor([2.0, -1.0, 7.0])
    # k1 is 0.5, -0.5, 0.5: rewards -0.1 k1, and the score at the last token
    rewards = torch.tensor([[-0.05, 0.05, 1.95, 0], [-1.05, 0, 0, 0], [0, 0, 0, 0]])
    rows = [[9] * n for n in (starts + lengths).tolist()]
    return dict(rows=rows, starts=starts, lengths=lengths, mask=mask, logp=logp, ref=ref,
                rewards=rewards, score=score, lambda_kl=0.1, kl_in_reward=True) | changes


def write(folder, stage, rows=None, batch=None, finished=True, **config):
    """A stage's folder."""
    folder.mkdir(parents=True)
    config = dict(stage=stage, lr=1e-4, out="where/it/was/made") | config
    (folder / "config.json").write_text(json.dumps(config))
    if rows is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if finished is not None:
        save_checkpoint(folder / "ckpt.pt", step=30, finished=finished, config=config)
    if batch:
        save_checkpoint(folder / "batch.pt", **batch)
    return folder


def healthy(folder, stage, **changes):
    batch = dict(batch=ppo_batch()) if stage == "ppo" else {}
    return write(folder, stage, **(dict(rows=ROWS[stage], **batch) | changes))


def said_of(run):
    """What is told of a stage: check -> word."""
    return {what: word for word, _, what, *_ in examine(run)}


def words(folder):
    (run,), _ = PROGRAM.stages_of(folder)
    return said_of(run)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """stage -> a healthy folder; tests of other metrics read its checkpoint and its batch."""
    base = tmp_path_factory.mktemp("healthy")
    return {stage: healthy(base / stage, stage) for stage in ROWS}


def edited(stage, edit):
    """The healthy lines with edit(row) merged into each that has metrics of a step."""
    return [dict(row, **{k: v for k, v in edit(row).items() if k in row}) for row in ROWS[stage]]


def test_healthy_stages_are_all_fine(checkpoints):
    for stage in ROWS:
        said = words(checkpoints[stage])
        expected = {what for _, stages, what, *_ in CHECKS if not stages or stage in stages}
        assert set(said) == expected and set(said.values()) == {"fine"}, said
    assert len(said) == 15


# ---------------------------------------------------------------- each failure, from both sides

def at_end(name, value, count=3):
    """The metric's value on the last `count` of 30 iterations."""
    return lambda row: {name: value} if row["step"] >= 30 - count else {}


def always(**values):
    return lambda row: values


def on(step, **values):
    return lambda row: values if row["step"] == step else {}


def overoptimized(row):
    """The held-out PM climbs to iteration 20 and falls then."""
    i = row["step"]
    return dict(test_pm=0.02 * min(i, 40 - i) + zigzag(i))


def zigzag(i):
    return 0.1 + 0.01 * (i % 2)


CASES = [
    ("ratio_is_one", on(7, first_log_ratio=0.9e-4), "fine"),
    ("ratio_is_one", on(7, first_log_ratio=1.1e-4), "look"),
    ("ratio_is_one", on(7, first_log_ratio=0.049), "look"),
    ("ratio_is_one", on(7, first_log_ratio=0.051), "broken"),
    ("kl_is_positive", on(5, kl=-0.059), "fine"),              # kl_se is 0.02
    ("kl_is_positive", on(5, kl=-0.061), "broken"),
    ("kl_is_positive", on(0, kl=-0.5), "fine"),                # the first iteration's is rounding
    ("kl_is_positive", lambda r: dict(kl=-1e-5, kl_se=0.0) if r["step"] == 1 else {}, "fine"),
    ("kl_is_exact", always(kl_gap=0.17), "fine"),              # sum 0.51, its error 0.1732: 2.94
    ("kl_is_exact", always(kl_gap=-0.18), "look"),             # 3.12
    ("kl_is_exact", always(kl_gap=0.225), "look"),             # 3.90
    ("kl_is_exact", always(kl_gap=-0.235), "broken"),          # 4.07
    ("kl_is_exact", lambda r: dict(kl_gap=0.2 * (-1) ** (r["step"] // 10)), "fine"),  # 1.15
    ("kl_is_exact", always(kl_gap=9e-5, kl_gap_se=0.0), "fine"),
    ("kl_is_exact", always(kl_gap=2e-4, kl_gap_se=0.0), "broken"),
    ("answers_finish", at_end("unfinished", 0.099), "fine"),
    ("answers_finish", at_end("unfinished", 0.101), "look"),
    ("answers_finish", at_end("unfinished", 0.25, 1), "fine"),          # (0.01 + 0.01 + 0.25) / 3
    ("answers_finish", at_end("unfinished", 0.499), "look"),
    ("answers_finish", at_end("unfinished", 0.501), "broken"),
    ("answers_finish", lambda r: dict(unfinished=0.9) if r["step"] < 27 else {}, "fine"),
    ("clip_is_moderate", at_end("clip_fraction", 0.299, 10), "fine"),
    ("clip_is_moderate", at_end("clip_fraction", 0.301, 10), "look"),
    ("clip_is_moderate", at_end("clip_fraction", 0.9), "fine"),         # 0.277 in the last third
    ("clip_is_moderate", at_end("clip_fraction", 0.501, 10), "broken"),
    ("clip_is_moderate", always(clip_fraction=0.0), "look"),
    ("clip_is_moderate", lambda r: dict(clip_fraction=0.01 * (r["step"] == 3)), "fine"),
    ("entropy_lives", at_end("entropy", 0.31 * 0.395, 10), "fine"),
    ("entropy_lives", at_end("entropy", 0.29 * 0.395, 10), "look"),
    ("entropy_lives", at_end("entropy", 0.0), "fine"),                  # 0.51 in the last third
    ("entropy_lives", at_end("entropy", 0.11 * 0.395, 10), "look"),
    ("entropy_lives", at_end("entropy", 0.09 * 0.395, 10), "broken"),
    ("length_stays", at_end("length", 1.49 * 13.1), "fine"),
    ("length_stays", at_end("length", 1.51 * 13.1), "look"),
    ("length_stays", at_end("length", 2.99 * 13.1), "look"),
    ("length_stays", at_end("length", 3.01 * 13.1), "broken"),
    ("length_stays", at_end("length", 13.1 / 1.49), "fine"),
    ("length_stays", at_end("length", 13.1 / 1.51), "look"),
    ("length_stays", at_end("length", 13.1 / 3.01), "broken"),
    ("held_out_agrees", overoptimized, "look"),
    ("held_out_agrees", lambda r: dict(overoptimized(r), score=0.5 - 0.01 * r["step"]), "fine"),
    ("held_out_agrees", lambda r: dict(overoptimized(r), score=min(r["step"], 40 - r["step"])),
     "fine"),                                                   # both fall in the last third
    ("held_out_agrees", always(test_pm=0.3), "fine"),
    # 0.10, 0.11, 0.10 ...: noise 0.0071, so the error of a difference of means of 3 is 0.0057
    ("held_out_agrees", lambda r: dict(test_pm=zigzag(r["step"]) - 0.0110 * (r["step"] > 26)),
     "fine"),                                                                  # 1.94 errors
    ("held_out_agrees", lambda r: dict(test_pm=zigzag(r["step"]) - 0.0125 * (r["step"] > 26)),
     "look"),                                                                  # 2.20
    ("stays_near", at_end("kl", 24.9), "fine"),
    ("stays_near", at_end("kl", 25.1), "look"),
    ("plain_requests_are_answered", at_end("refused_helpful", 0.19), "fine"),
    ("plain_requests_are_answered", at_end("refused_helpful", 0.21), "look"),
    ("plain_requests_are_answered", at_end("refused_helpful", 0.59), "look"),
    ("plain_requests_are_answered", at_end("refused_helpful", 0.61), "broken"),
    ("critic_lives", at_end("explained", 0.01), "fine"),
    ("critic_lives", at_end("explained", -0.01), "look"),
    ("critic_lives", at_end("explained", -0.99), "look"),
    ("critic_lives", at_end("explained", -1.01), "broken"),
    ("critic_lives", at_end("value_loss", 9.9 * 11 / 3), "fine"),       # the first: (6 + 3 + 2) / 3
    ("critic_lives", at_end("value_loss", 10.1 * 11 / 3), "broken"),
    ("coefficient_is_sane", on(29, lambda_kl=2.99), "fine"),
    ("coefficient_is_sane", on(29, lambda_kl=3.01), "look"),
    ("coefficient_is_sane", on(29, lambda_kl=0.0299e-2), "look"),
    ("coefficient_is_sane", on(29, lambda_kl=0.0), "look"),
    ("coefficient_is_sane", always(lambda_kl=0.0), "fine"),
    ("is_finite", on(12, score=math.nan), "broken"),
    ("is_finite", on(12, grad_norm=math.inf), "broken"),
]


@pytest.mark.parametrize("check, edit, word", CASES)
def test_one_check_changes_its_word(checkpoints, check, edit, word):
    rows = edited("ppo", edit)
    said = said_of(Stage(checkpoints["ppo"], dict(stage="ppo", lr=1e-4), rows, False))
    assert {w for w in said if said[w] != "fine"} == ({NAMES[check]} if word != "fine" else set())
    assert said[NAMES[check]] == word


def test_every_check_of_a_stage_fails_somewhere_here():
    tried = {check for check, _, word in CASES if word != "fine"}
    alone = {"is_finished", "loss_fell", "above_length", "score_is_last"}       # below
    assert tried | alone == set(NAMES)


@pytest.mark.parametrize("stage", ["pretrain", "distill", "sft", "preference"])
def test_a_loss_that_does_not_fall_is_broken(checkpoints, stage):
    for end, word in ((5.92, "fine"), (5.93, "broken"), (7.0, "broken")):   # at first 5.925
        rows = edited(stage, lambda r, end=end: dict(loss=end) if r["step"] >= 36 else {})
        said = said_of(Stage(checkpoints[stage], dict(stage=stage), rows, False))
        assert said.pop("loss fell") == word and set(said.values()) == {"fine"}
    for few, word in ((9, "not possible"), (10, "fine")):
        rows = [r for r in ROWS[stage] if "loss" in r][:few]
        said = said_of(Stage(checkpoints[stage], dict(stage=stage), rows, False))
        assert said["loss fell"] == word


def test_a_pm_is_measured_against_length_either_way(checkpoints):
    for (accuracy, word), longer in itertools.product(
            ((0.61, "fine"), (0.59, "look"), (0.57, "broken")), (0.58, 0.42)):
        rows = edited("preference", always(harmless_accuracy=accuracy, harmless_longer=longer))
        said = said_of(Stage(checkpoints["preference"], dict(stage="preference"), rows, False))
        assert said.pop("PM above length alone") == word and set(said.values()) == {"fine"}


def test_a_pm_is_judged_by_its_last_evaluation(checkpoints):
    rows = [dict(step=1, helpful_accuracy=0.5, helpful_longer=0.55), *ROWS["preference"]]
    said = said_of(Stage(checkpoints["preference"], dict(stage="preference"), rows, False))
    assert said["PM above length alone"] == "fine"
    said = said_of(Stage(checkpoints["preference"], dict(stage="preference"), rows[:-1], False))
    assert said["PM above length alone"] == "broken"
    rows = [{k: v for k, v in r.items() if "_longer" not in k} for r in rows]
    with pytest.raises(PROGRAM.Missing, match="metrics: <test>_longer$"):
        PROGRAM.above_length(Stage(checkpoints["preference"], {}, rows, False))


def test_no_held_out_pm_is_told(checkpoints):
    rows = [{k: v for k, v in r.items() if k != "test_pm"} for r in ROWS["ppo"]]
    said = said_of(Stage(checkpoints["ppo"], dict(stage="ppo", lr=1e-4), rows, False))
    assert said.pop("held-out PM agrees") == "look" and set(said.values()) == {"fine"}


def test_a_clip_fraction_of_0_is_right_where_it_must_be(checkpoints):
    rows = edited("ppo", always(clip_fraction=0.0))
    for lr, epochs, minibatch, word in ((0.0, 2, 32, "fine"), (1e-4, 1, 64, "fine"),
                                        (1e-4, 2, 64, "look"), (1e-4, 1, 32, "look")):
        config = dict(stage="ppo", lr=lr, epochs=epochs, minibatch=minibatch, samples=64)
        assert said_of(Stage(checkpoints["ppo"], config, rows, False))["clip fraction"] == word


def test_a_run_of_few_iterations_is_not_blamed_for_its_critic(checkpoints):
    for few, word in ((9, "not possible"), (10, "broken")):     # explained begins at -4
        said = said_of(Stage(checkpoints["ppo"], dict(stage="ppo"), ROWS["ppo"][:few], False))
        assert said["critic"] == word


def test_a_run_that_stopped_is_to_be_looked_at(tmp_path, program):
    config = dict(policy="a b", lr=2e-4, checkpoint=True, samples=128)
    folder = healthy(tmp_path / "ppo", "ppo", finished=False, **config)
    said = words(folder)
    assert said.pop("finished") == "look" and set(said.values()) == {"fine"}
    code, out, _ = program(folder)
    assert code == 0 and "stopped at step 30" in out
    assert f"python ppo.py --policy='a b' --out={folder} --lr=0.0002 --checkpoint\n" in out
    (folder / "ckpt.pt").unlink()
    code, out, _ = program(folder)
    assert code == 0 and "no checkpoint yet" in out and "1 look" in out
    (folder / "ckpt.pt").write_bytes(b"half a file")
    code, out, _ = program(folder)
    assert code == 1 and re.search("broken +finished .*not a readable checkpoint", out)


def test_a_stage_of_no_known_script_is_told_to_go_on(tmp_path):
    for stage in ("import", "data/world", "doctor"):            # no file, no name, no Config
        run = Stage(tmp_path, dict(stage=stage), [], False)
        assert PROGRAM.command(run) == "the same command again"


def test_what_is_not_finite_is_told_where_and_how_often(tmp_path, program):
    rows = edited("ppo", lambda r: dict(grad_norm=math.inf, critic_norm=math.nan)
                  if r["step"] in (4, 9) else dict(score=math.nan) if r["step"] == 6 else {})
    code, out, _ = program(healthy(tmp_path / "ppo", "ppo", rows=rows))
    assert code == 1
    assert "5 not finite, the first is grad_norm at step 4; 2 steps skipped" in out
    rows = edited("sft", always(heldout_loss=math.nan))
    said = words(healthy(tmp_path / "sft", "sft", rows=rows))
    assert said.pop("numbers are finite") == "broken" and set(said.values()) == {"fine"}


def test_a_batch_that_stopped_ppo_is_told(tmp_path):
    folder = healthy(tmp_path / "ppo", "ppo")
    (folder / "bad-batch-0.pt").touch()
    said = words(folder)
    assert said.pop("numbers are finite") == "broken" and set(said.values()) == {"fine"}


def test_a_metric_of_nothing_but_nan_makes_a_check_impossible(checkpoints):
    rows = edited("ppo", always(entropy=math.nan))
    said = said_of(Stage(checkpoints["ppo"], dict(stage="ppo"), rows, False))
    assert said["entropy"] == "not possible" and said["numbers are finite"] == "broken"


def test_grades_at_their_bounds():
    assert [grade(x, 1, 2) for x in (1, 1.1, 2, 2.1)] == ["fine", "look", "look", "broken"]
    assert grade(1e9, 1) == "look"


# ---------------------------------------------------------------- batch.pt

def moved(by):
    """ppo_batch's rewards with the first answer's score `by` slots from its last token."""
    rewards = ppo_batch()["rewards"].clone()
    rewards[0, 2] -= 2
    rewards[0, 2 + by] += 2
    return dict(rewards=rewards)


def cell(name, i, j, value):
    x = ppo_batch()[name].clone()
    x[i, j] = value
    return {name: x}


BATCHES = {
    "right": ({}, {}),
    "no KL in the reward": (dict(kl_in_reward=False, rewards=torch.tensor(
        [[0, 0, 2.0, 0], [-1, 0, 0, 0], [0] * 4])), {}),
    "KL in it all the same": (dict(kl_in_reward=False), dict(before=2, last=2)),
    "another coefficient": (dict(lambda_kl=0.2), dict(before=2, last=2)),
    "one slot late": (moved(1), dict(pads=1, last=1)),
    "one slot early": (moved(-1), dict(before=1, last=1)),
    "other score": (dict(score=torch.tensor([2.1, -1.0, 7.0])), dict(last=1)),
    "score of nan": (dict(score=torch.tensor([math.nan, -1.0, 7.0])), dict(last=1)),
    "reward of nan at a pad": (cell("rewards", 1, 3, math.nan), dict(pads=1)),
    "KL at a pad": (cell("rewards", 1, 1, 0.05), dict(pads=1)),
    "empty answer with a score": (cell("rewards", 2, 3, 7.0), dict(pads=1)),
    "mask too long": (cell("mask", 0, 3, True), dict(mask=1)),
    "mask too short": (cell("mask", 0, 2, False), dict(mask=1)),
    "row too long": (dict(rows=[[9] * 6, [9] * 4, [9] * 5]), dict(rows=1)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_score_is_at_the_last_token(tmp_path, name):
    changes, faults = BATCHES[name]
    found = misplaced(ppo_batch(**changes))
    short = dict(zip(("pads", "before", "last", "mask", "rows"), found.values(), strict=True))
    assert {k: n for k, n in short.items() if n} == faults
    save_checkpoint(tmp_path / "batch.pt", **ppo_batch(**changes))
    word, told = PROGRAM.score_is_last(Stage(tmp_path, dict(stage="ppo"), [], False))
    assert (word, told == "3 answers") == (("broken", False) if faults else ("fine", True))


def test_a_batch_that_is_not_there_or_not_whole(tmp_path):
    folder = healthy(tmp_path / "ppo", "ppo", batch=ppo_batch(**moved(1)))
    said = words(folder)
    assert said.pop("score at the last token") == "broken" and set(said.values()) == {"fine"}
    batch = ppo_batch()
    del batch["score"]
    save_checkpoint(folder / "batch.pt", **batch)
    assert words(folder)["score at the last token"] == "not possible"
    (folder / "batch.pt").write_bytes(b"half")
    assert words(folder)["score at the last token"] == "broken"
    (folder / "batch.pt").unlink()
    assert words(folder)["score at the last token"] == "not possible"


def test_a_batch_of_ppo_itself_is_right(tmp_path):
    """The rewards of the real function, on real lengths."""
    from ppo import rewards_of
    b = ppo_batch()
    b["rewards"] = rewards_of(b["logp"], b["ref"], b["mask"], b["score"], b["lambda_kl"])
    assert not any(misplaced(b).values())


# ---------------------------------------------------------------- the report

def test_what_an_older_run_lacks_is_told_and_counted(tmp_path, program):
    new = ("kl_se", "kl_gap", "kl_gap_se", "lambda_kl", "test_pm")
    rows = [{k: v for k, v in r.items() if k not in new} for r in ROWS["ppo"]]
    code, out, _ = program(healthy(tmp_path / "ppo", "ppo", rows=rows, batch=None))
    assert code == 0
    for name in ("kl_se", "kl_gap, kl_gap_se", "lambda_kl"):
        assert f"not in this run's metrics: {name}\n" in out
    assert out.endswith("11 checks: 10 fine, 1 look, 0 broken, 4 not possible\n")


def test_the_report_of_a_run(tmp_path, program):
    """Stages in the pipeline's order, one line a check, two more where it is not fine."""
    rows = edited("ppo", at_end("refused_helpful", 0.3))
    healthy(tmp_path / "a-ppo", "ppo", rows=rows)
    healthy(tmp_path / "z-base", "pretrain")
    write(tmp_path / "collected", "collect")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "notes").mkdir()
    code, out, err = program(tmp_path)
    assert (code, err) == (0, "")
    heads = [x for x in out.splitlines() if x.startswith(str(tmp_path))]
    assert heads == [f"{tmp_path}/z-base: pretrain, 41 lines of metrics",
                     f"{tmp_path}/a-ppo: ppo, 30 lines of metrics",
                     f"{tmp_path}/collected: collect, 0 lines of metrics",
                     f"{tmp_path}/hf: no stage's folder (its config.json has no 'stage'), left out"]
    told = re.search(r"\n  look .*\n      likely cause: .*\n      change: .*", out)[0].split("\n")
    assert told[1] == f"  {'look':<14}{'plain requests are answered':<29}0.300 refused at the end"
    assert "--helpful" in told[3]
    assert out.count("likely cause") == out.count("change:") == 1
    assert out.count("\n  fine ") == 3 + 14 + 1
    assert out.endswith("\n19 checks: 18 fine, 1 look, 0 broken, 0 not possible\n")


def test_a_torn_last_line_is_told_and_left_out(tmp_path, program):
    folder = healthy(tmp_path / "ppo", "ppo")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 30, "score": 0.')
    code, out, _ = program(folder)
    assert code == 0 and "ppo, 30 lines" in out and "last line of metrics.jsonl is torn" in out
    assert "is torn" not in program(healthy(tmp_path / "other", "ppo"))[1]


def test_exit_status_is_1_only_where_something_is_broken(tmp_path, program):
    for name, value, code in (("fine", 0.1, 0), ("look", 0.3, 0), ("broken", 0.9, 1)):
        rows = edited("ppo", at_end("refused_helpful", value))
        assert program(healthy(tmp_path / name, "ppo", rows=rows))[0] == code
    code, out, _ = program(tmp_path)                       # any of them
    assert code == 1 and "45 checks: 43 fine, 1 look, 1 broken, 0 not possible" in out


def test_bad_usage_is_one_line_and_status_2(tmp_path, program):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"stage": ')
    folder = healthy(tmp_path / "ppo", "ppo")
    metrics = folder / "metrics.jsonl"
    cases = [([tmp_path / "none"], "none: no such folder"), ([tmp_path / "empty"], "no run"),
             ([metrics], "no such folder"), ([tmp_path / "torn"], "config.json: no JSON"),
             ([], "name a run's folder"), (["--bogus"], "--bogus"), (["a", "b"], "b")]
    for argv, told in cases:
        code, out, err = program(*argv)
        assert (code, out) == (2, "") and err.startswith("error: ") and told in err, err
        assert err.count("\n") == 1
    for line, told in (('{"step": 3', "line 2: no JSON"), ("[1]", "line 2: no field 'step'"),
                       ('{"loss": 3}', "line 2: no field 'step'"),
                       ('{"step": 3, "loss": "x"}', "line 2: field 'loss' is no number")):
        metrics.write_text(f'{{"step": 0}}\n{line}\n{{"step": 4}}\n')
        code, out, err = program(folder)
        assert (code, out) == (2, "") and err.startswith(f"error: {metrics} ") and told in err
    assert err.count("\n") == 1


def test_it_runs_as_a_program_and_writes_nothing(tmp_path):
    folder = healthy(tmp_path / "ppo", "ppo")
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    done = subprocess.run([sys.executable, ROOT / "doctor.py", folder], capture_output=True,
                          text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "15 checks: 15 fine" in done.stdout
    assert before == {p: p.stat().st_mtime_ns for p in folder.iterdir()}


# ---------------------------------------------------------------- METRICS

def written(place):
    """Names in the dicts of "file.function", or only of a variable there: "file.function.variable".

    They are in dict(name=...) and in x["name"] = ...
    """
    file, name, *variable = place.split(".")
    tree = next(node for node in ast.walk(ast.parse((ROOT / f"{file}.py").read_text()))
                if isinstance(node, ast.FunctionDef) and node.name == name)
    names = set()
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if variable and re.split(r"\W", ast.unparse(target or node))[0] != variable[0]:
            continue
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            names.add(target.slice.value)
        names |= {k.arg for call in ast.walk(node) if isinstance(call, ast.Call)
                  and ast.unparse(call.func) == "dict" for k in call.keywords if k.arg}
    return names


# what `run.log(..., **name)` of a stage holds: the functions that make it, or names
SPREAD = {("ppo", "row"): ("rollout.summary", "rollout.columns_of"),
          ("ppo", "done"): ("ppo.improve",), ("sft", "found"): ("sft.evaluate.found",),
          ("prompts", "counts"): {"<reason>"}, ("online", "accuracy"): {"accuracy_<lot>"},
          ("constitution", "found"): ("critic.habits", "critic.facts_of"),
          ("online", "means"): {"kl", "score", "gold_helpful", "gold_harmless",
                                "refused_helpful"}}


def logged(stage):
    """The names of the metrics that a stage's file gives to run.log."""
    names = set()
    calls = [node for node in ast.walk(ast.parse((ROOT / f"{stage}.py").read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "run.log"]
    for keyword in (k for call in calls for k in call.keywords):
        value = keyword.value
        if keyword.arg:
            names.add(keyword.arg)
        elif isinstance(value, ast.DictComp):                # {f"{name}_accuracy": ...}
            names.add(re.sub(r"\{\w+\}", "<test>", ast.literal_eval(ast.unparse(value.key)[1:])))
        elif isinstance(SPREAD[stage, value.id], set):
            names |= SPREAD[stage, value.id]
        else:
            names |= set().union(*map(written, SPREAD[stage, value.id]))
    return names


LOGGING = [p.stem for p in sorted(ROOT.glob("*.py")) if re.search(r"\brun\.log\(", p.read_text())]


@pytest.mark.parametrize("stage", LOGGING)
def test_every_metric_that_is_logged_is_documented(stage):
    names = logged(stage)
    assert names, f"{stage}: nothing was found; has run.log changed?"
    assert not names - set(METRICS.get(stage, ())), "say what they are in doctor.METRICS"


def test_the_scan_finds_what_is_there():
    assert {"pretrain", "distill", "preference", "ppo"} <= set(LOGGING)
    assert {"loss", "lr", "grad_norm", "heldout_loss"} == logged("pretrain")
    assert {"<test>_accuracy", "accuracy", "loss", "grad_norm"} <= logged("preference")
    assert {"score", "kl", "kl_exact", "test_pm", "gold_harmless", "entropy", "explained",
            "value_loss", "first_log_ratio"} <= logged("ppo")


def test_the_checks_read_only_metrics_that_are_documented():
    read = set()
    for node in ast.walk(ast.parse((ROOT / "doctor.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
                and node.func.attr in ("values", "columns"):
            read |= {a.value for a in node.args if isinstance(a, ast.Constant)
                     and isinstance(a.value, str)}
    assert len(read) > 12 and read <= set(METRICS["ppo"]) | {"loss"}


def test_the_page_is_what_the_program_prints(program):
    code, out, _ = program("--metrics")
    assert code == 0 and out == (ROOT / "docs" / "metrics.md").read_text()
    for stage, metrics in METRICS.items():
        part = out.split(f"## {stage}\n")[1].split("\n## ")[0]
        for name, (_, formula) in metrics.items():
            assert f"| `{name}` | " in part and len(formula) > 10
    rows = [x for x in out.splitlines() if x.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", x)) == 4 for x in rows)


def test_the_flags_and_functions_that_it_names_exist():
    text = "".join(p.read_text() for p in ROOT.glob("*.py"))
    flags, called = (set(re.findall(pattern, text, re.M)) for pattern in (
        r"^    (\w+): \w+ = ", r"^def (\w+)\("))
    for *_, cause, change in CHECKS:
        for flag in re.findall(r"--([\w-]+)", cause + change):
            assert flag.replace("-", "_") in flags, flag
        assert set(re.findall(r"(\w+)\(\)", cause + change)) <= called
