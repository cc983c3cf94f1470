"""What is wrong with a run, and what to change.

    python doctor.py out/laptop            # a run: the folder that holds its stages' folders
    python doctor.py out/laptop/ppo        # one stage
    python doctor.py --metrics             # what each number of metrics.jsonl is (docs/metrics.md)

Each check says fine, look or broken with its number and, where it is not fine, the likely cause and
what to change. A check whose metric the run lacks, an older one for example, is told as not
possible. Reads config.json, metrics.jsonl, ckpt.pt and PPO's batch.pt, and writes nothing.

"At first" and "at the end" are means over the first and the last tenth of the lines. Exit status: 1
if anything is broken, 2 if there is no run to read, else 0.
"""

import importlib
import json
import math
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from common import UserError, load_checkpoint
from data.program import flags

# ---------------------------------------------------------------- what the numbers are

NORM = ("", "L2 norm of all gradients before clipping; not finite where the step was skipped")
TOKENS = ("nats a token", "mean -log p(x_t \\| x_<t) over the tokens of the step's {}")
OVER = " over answers to {} prompts (toy world)"
METRICS = {  # stage -> metric -> (unit, formula); the only place that says what a metric is
    "pretrain": {
        "loss": (TOKENS[0], TOKENS[1].format("documents, all but each one's first")),
        "lr": ("", "learning rate of the step"),
        "grad_norm": NORM,
        "heldout_loss": (TOKENS[0], "the loss on documents that are not trained on")},
    "distill": {
        "loss": ("nats a token", "mean KL(teacher behind the HHH prompt \\|\\| student) over the "
                 "step's text tokens, over the teacher's likeliest `top` tokens and one class for "
                 "all the rest"),
        "grad_norm": NORM,
        "heldout_kl": ("nats a token", "the loss on texts that are not trained on; at step -1 "
                       "before training")},
    "sft": {
        "loss": (TOKENS[0], TOKENS[1].format("answers, end of turn included; of mixed-in text, "
                                             "all its tokens")),
        "lr": ("", "learning rate of the step"),
        "grad_norm": NORM,
        "heldout_loss": (TOKENS[0], "mean -log p over the answers of held-out demonstrations"),
        "pm": ("PM score", "mean over sampled answers to validation prompts"),
        "epoch": ("", "passes done where heldout_loss and pm are taken"),
        "picked_epoch": ("", "the epoch whose weights are kept: that of the best pm, else the "
                         "last")},
    "preference": {
        "loss": ("nats a comparison", "weighted mean over the step's comparisons of "
                 "-p log sigmoid(d) - (1 - p) log sigmoid(-d), d = s(chosen) - s(rejected), p = 1 "
                 "unless `--soft`; of a ranking, the mean over its pairs"),
        "accuracy": ("share", "mean over the step's comparisons of 1 where s(chosen) > "
                     "s(rejected), 1/2 on ties, else 0; of a ranking, the mean over its pairs"),
        "grad_norm": NORM,
        "<test>_accuracy": ("share", "accuracy on the held-out comparisons of that name"),
        "<test>_longer": ("share", "accuracy there of \"the longer answer in tokens is better\", "
                          "1/2 on ties")},
    "prompts": {
        "generated": ("prompts", "written by the model"),
        "kept": ("prompts", "of them in prompts.jsonl"),
        "<reason>": ("prompts", "dropped for that reason; all reasons and kept add up to "
                     "generated")},
    "ppo": {
        "score": ("normalized PM score", "mean over answers of (s - mean) / spread, after `--cap`, "
                  "minus `--unfinished` where there is no end of turn"),
        "pm": ("PM score", "mean raw score s over answers"),
        "penalty": ("normalized PM score", "mean subtracted for unfinished answers"),
        "kl": ("nats an answer", "mean over answers of sum_t (log pi - log pi0): k1"),
        "kl_se": ("nats an answer", "standard error of kl over answers"),
        "kl_k3": ("nats an answer", "mean over answers of sum_t (e^-d - 1 + d), "
                  "d = log pi - log pi0"),
        "kl_exact": ("nats an answer", "mean over answers of sum_t KL(pi(. \\| state_t) \\|\\| "
                     "pi0(. \\| state_t)) over the whole vocabulary; on some iterations"),
        "kl_gap": ("nats an answer", "mean over the same answers of the k1 sum minus the exact "
                   "sum; 0 is expected"),
        "kl_gap_se": ("nats an answer", "standard error of kl_gap over answers"),
        "kl_start": ("nats an answer", "kl to pi0 as the run began, where the reference moves"),
        "entropy": ("nats a token", "mean over response tokens of -log pi"),
        "length": ("tokens", "mean over answers, end of turn included"),
        "unfinished": ("share", "answers without an end of turn"),
        "refused_helpful": ("share", "refusals" + OVER.format("helpful")),
        "pm_helpful": ("PM score", "mean s" + OVER.format("helpful")),
        "pm_harmless": ("PM score", "mean s" + OVER.format("harmful")),
        "gold_helpful": ("gold utility", "mean helpfulness" + OVER.format("helpful")),
        "gold_harmless": ("gold utility", "mean harmlessness" + OVER.format("harmful")),
        "test_pm": ("normalized PM score", "mean over answers by the held-out PM of `--test-pm`"),
        "explained": ("", "1 - mean (return - value)^2 / variance of returns, over tokens, before "
                      "the update"),
        "value_loss": ("score^2", "mean over tokens and passes of half the squared error of the "
                       "value, the worse of it and its clipped self"),
        "clip_fraction": ("share", "tokens, over all passes, that the ratio's clipping holds back"),
        "first_log_ratio": ("nats", "largest \\|log pi - log pi_old\\| of a token before the first "
                            "update; 0 to rounding"),
        "grad_norm": ("", "policy's gradient norm at the iteration's last update"),
        "critic_norm": ("", "critic's gradient norm at the iteration's last update"),
        "ptx_loss": ("nats a token", "mean -log pi(x_t) on the pretraining mix of `--ptx`"),
        "lambda_kl": ("score a nat", "KL coefficient in force"),
        "lr": ("", "policy's learning rate of the iteration")},
    "online": {
        "lines": ("comparisons", "in all lots so far, held-out ones among them"),
        "accuracy_<lot>": ("share", "accuracy of the round's PM on the held-out part of that lot"),
        **{name: (unit, f"mean over the last three iterations of the round's PPO of its {name}")
           for name, unit in (("kl", "nats an answer"), ("score", "normalized PM score"),
                              ("gold_helpful", "gold utility"), ("gold_harmless", "gold utility"),
                              ("refused_helpful", "share"))}},
    "harm": {
        "loss": ("points squared", "mean over the step's attacks of (score - rating)^2"),
        "grad_norm": NORM,
        "<test>_r2": ("share", "1 - squared errors of the scores / squares of the ratings less "
                      "their mean, on the rated attacks of that name"),
        "<test>_correlation": ("-", "Pearson correlation there of the scores with the success that "
                               "nobody's strictness or noise has blurred")},
    "constitution": {
        **{name: ("share", f"answers to red-team prompts after so many rounds that {what}") for
           name, what in dict(complies="hold a step of help with harm", preaches="preach",
                              evades="neither comply, nor give a reason, nor offer anything",
                              rude="are rude", commonest="hold the commonest sentence").items()},
        "gold": ("gold utility", "their mean harmlessness"),
        "position_bias": ("probability", "mean of P(A) over both orders less 1/2; the step after "
                          "the rounds is that of feedback"),
        "confidence": ("probability", "mean over pairs of the larger of p and 1 - p"),
        "gold_agreement": ("share", "pairs of unequal gold in which the label prefers the better")},
}


def metrics_page():
    """METRICS as Markdown: docs/metrics.md."""
    page = ["# Metrics", "", "Each line of a stage's metrics.jsonl has its step and some of these. "
            "Made by `python doctor.py --metrics`."]
    for stage, metrics in METRICS.items():
        page += ["", f"## {stage}", "", "| metric | unit | formula |", "| --- | --- | --- |"]
        page += [f"| `{name}` | {unit or '-'} | {text} |" for name, (unit, text) in metrics.items()]
    return "\n".join(page)


# ---------------------------------------------------------------- thresholds: look, broken

RATIO = 1e-4, 0.05          # nats: fp32 rounds to 1e-5, bf16 to 1e-2
KL_SIGN = 3.0               # standard errors: one iteration in 700 by chance
KL_GAP = 3.0, 4.0           # standard errors of the run's mean: one run in 400, in 16,000
ROUNDING = 1e-4             # nats an answer, scores: what fp32 and the log's 6 digits leave
UNFINISHED = 0.1, 0.5       # share of answers: the laptop run has 0.02 at most
CLIPPED = 0.3, 0.5          # share of tokens: the laptop run has 0.01 at most
ENTROPY = 0.3, 0.1          # of the first: the laptop run keeps half
LENGTH = 1.5, 3.0           # factor either way: the laptop runs are at 1.5
TEST_FALL = 2.0             # standard errors below the held-out PM's best
DISTANCE = 5.0              # sqrt(nats): a run that had collapsed was there, good ones end near 2
REFUSED = 0.2, 0.6          # share of plain requests: the distilled model has 0.05
MARGIN = 0.02, 0.0          # accuracy above length alone: a standard error on 600 comparisons
EXPLAINED = 0.0, -1.0       # 0: no better than a constant; -1: twice its error
VALUE_RISE = 10.0           # factor of the value loss, end to first: it should fall
LAMBDA_MOVED = 100.0        # between the largest and the smallest: 25 iterations at --kl-gain 1
FEW = 10                    # lines below which a loss or a critic has no trend


def grade(x, look, broken=math.inf):
    """How bad a number is that should be low."""
    return "broken" if x > broken else "look" if x > look else "fine"


def mean(x):
    return sum(x) / len(x)


def first(x):
    return mean(x[:max(1, len(x) // 10)])


def last(x, parts=10):
    return mean(x[-max(1, len(x) // parts):])


# ---------------------------------------------------------------- a stage's folder

class Missing(Exception):
    """A check is not possible, and why."""


@dataclass(frozen=True)
class Stage:
    dir: Path
    config: dict
    rows: list         # of metrics.jsonl
    torn: bool         # whether its last line was cut

    @property
    def name(self):
        return self.config["stage"]

    def columns(self, *names):
        """Tuples of finite values, one of each line that has all the names. Raises Missing."""
        found = [tuple(r[n] for n in names) for r in self.rows if all(n in r for n in names)]
        lacking = [n for n in names if not any(n in r for r in self.rows)]
        if not found:
            raise Missing("not in this run's metrics: " + ", ".join(lacking or names))
        found = [values for values in found if all(map(math.isfinite, values))]
        if not found:
            raise Missing("no finite value of " + ", ".join(names))
        return found

    def values(self, name, least=1):
        """A metric's finite values. Raises Missing where they are fewer than `least`."""
        found = [x for (x,) in self.columns(name)]
        if len(found) < least:
            raise Missing(f"{name} on fewer than {least} lines so far")
        return found


def read_json(path):
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: no JSON ({error}); start the stage again to write it") from None


def read_metrics(path):
    """(rows, whether the last line is torn). UserError naming file, line and field."""
    text = path.read_text(errors="replace") if path.exists() else ""
    lines, rows = text.splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                return rows, True
            raise UserError(f"{path} line {number}: no JSON; delete the line") from None
        if not isinstance(row, dict) or "step" not in row:
            raise UserError(f"{path} line {number}: no field 'step'; delete the line")
        wrong = [k for k, v in row.items() if not isinstance(v, (int, float))]
        if wrong:
            raise UserError(f"{path} line {number}: field {wrong[0]!r} is no number; "
                            "delete the line")
        rows.append(row)
    return rows, False


def stages_of(folder):
    """The stages of a run: the folder itself or those in it; and folders that are none, told."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a stage's --out, or the one above")
    inside = [folder] if (folder / "config.json").exists() else sorted(
        p for p in folder.iterdir() if (p / "config.json").exists())
    found, foreign = [], []
    for path in inside:
        config = read_json(path / "config.json")
        if isinstance(config, dict) and isinstance(config.get("stage"), str):
            found.append(Stage(path, config, *read_metrics(path / "metrics.jsonl")))
        else:
            foreign.append(path)
    if not found:
        raise UserError(f"{folder}: no run; neither it nor a folder in it has a stage's "
                        "config.json; name a stage's --out, or the folder above")
    order = [*METRICS, *(s.name for s in found)]               # as the pipeline has them
    return sorted(found, key=lambda s: order.index(s.name)), foreign


# ---------------------------------------------------------------- checks of every stage
# Each returns (word, number told). Its docstring is the fault; what to do is in CHECKS.

def command(run):
    """The command that made the folder: its flags that are not at their defaults."""
    known = run.name.isidentifier() and (Path(__file__).parent / f"{run.name}.py").is_file()
    Config = getattr(importlib.import_module(run.name), "Config", None) if known else None
    if not Config:
        return "the same command again"
    words = ["python", f"{run.name}.py"]
    for field in fields(Config):
        value = str(run.dir) if field.name == "out" else run.config.get(field.name, field.default)
        flag = "--" + field.name.replace("_", "-")
        if value != field.default:
            words += ([flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else
                      [f"{flag}={shlex.quote(str(value))}"])
    return " ".join(words)


def is_finished(run):
    """Half a stage taken for a whole one."""
    if not (run.dir / "ckpt.pt").exists():
        return "look", "no checkpoint yet"
    try:
        content = load_checkpoint(run.dir)
    except UserError as error:
        return "broken", str(error)
    word, told = ("fine", "finished") if content.get("finished") else ("look", "stopped")
    return word, f"{told} at step {content.get('step')}"


def is_finite(run):
    """One NaN in a loss, and every number after it means nothing."""
    if any(run.dir.glob("bad-batch-*.pt")):
        return "broken", "PPO stopped at a gradient that is not finite, and left bad-batch-*.pt"
    if not run.rows:
        raise Missing("no line in metrics.jsonl")
    bad = [(row["step"], k) for row in run.rows for k, v in row.items() if not math.isfinite(v)]
    skipped = len({step for step, k in bad if k in ("grad_norm", "critic_norm")})
    return ("broken", f"{len(bad)} not finite, the first is {bad[0][1]} at step {bad[0][0]}; "
            f"{skipped} steps skipped for their gradient norm") if bad else ("fine", "all finite")


def loss_fell(run):
    """A loop that runs and learns nothing: wrong mask, frozen weights, learning rate 0."""
    x = run.values("loss", FEW)
    return ("fine" if last(x) < first(x) else "broken",
            f"{first(x):.4f} at first, {last(x):.4f} at the end")


def above_length(run):
    """A preference model that learned how long an answer is, and little else."""
    tests = {k.removesuffix("_longer") for row in run.rows for k in row if k.endswith("_longer")}
    if not tests:
        raise Missing("not in this run's metrics: <test>_longer")
    found = []
    for test in sorted(tests):
        accuracy, longer = run.columns(f"{test}_accuracy", f"{test}_longer")[-1]
        found.append((accuracy - max(longer, 1 - longer), test, accuracy))
    margin, test, accuracy = min(found)
    return (grade(-margin, -MARGIN[0], -MARGIN[1]),
            f"{test} accuracy {accuracy:.3f}, {margin:+.3f} above length alone")


# ---------------------------------------------------------------- checks of PPO

def ratio_is_one(run):
    """Sampler and trainer disagree before any update: temperature, positions or masks differ."""
    x = max(run.values("first_log_ratio"))
    return grade(x, *RATIO), f"largest |log ratio| {x:.1e}"


def kl_is_positive(run):
    """A KL estimate that stays negative: what is sampled is not the policy that is scored."""
    x = run.columns("kl", "kl_se")[1:]
    low = sum(kl < -KL_SIGN * se - ROUNDING for kl, se in x)
    return ("broken" if low else "fine",
            f"below -{KL_SIGN:.0f} standard errors on {low} of {len(x)} iterations")


def kl_is_exact(run):
    """The mean of k1 is not the KL: a biased sampler, or log-probs read one slot off."""
    gaps, errors = zip(*run.columns("kl_gap", "kl_gap_se"))
    beyond = max(0.0, abs(sum(gaps)) - len(gaps) * ROUNDING)
    error = math.sqrt(sum(se ** 2 for se in errors))
    z = beyond / error if error else math.inf if beyond else 0.0
    return (grade(z, *KL_GAP), f"gap {mean(gaps):+.4f} nats on {len(gaps)} iterations, {z:.1f} "
            "standard errors")


def misplaced(batch):
    """Counts of what is wrong in a PPO batch, fault -> number; all are 0 in a right one.

    batch: rewards, logp, ref, mask [B, R], score, lengths, starts [B], rows, lambda_kl and
    kl_in_reward. The rewards without the KL must be the score at each last token, else 0.
    """
    mask, rest, lengths = batch["mask"], batch["rewards"], batch["lengths"]
    at = torch.arange(mask.shape[1])
    real, end = at < lengths[:, None], at == lengths[:, None] - 1
    if batch["kl_in_reward"]:
        kl = batch["lambda_kl"] * (batch["logp"] - batch["ref"])
        rest = torch.where(real, rest + kl, rest)
    right = torch.where(end, batch["score"][:, None], 0.0)
    off = ~((rest - right).abs() <= ROUNDING)              # true where it is not a number
    sizes = torch.tensor([len(row) for row in batch["rows"]])
    return {"pads with a reward": int((off & ~real).sum()),
            "tokens with a score before the last": int((off & real & ~end).sum()),
            "last tokens without theirs": int((off & end).sum()),
            "mask slots unlike the lengths": int((mask != real).sum()),
            "rows that are not prompt + answer": int((sizes != batch["starts"] + lengths).sum())}


def score_is_last(run):
    """The score one slot late is masked away; one slot early, the end is never rewarded."""
    path = run.dir / "batch.pt"
    if not path.exists():
        raise Missing("no batch.pt: an older run, or none saved yet")
    try:
        batch = load_checkpoint(path)
        faults = [f"{n} {what}" for what, n in misplaced(batch).items() if n]
    except UserError as error:
        return "broken", str(error)
    except KeyError as error:
        raise Missing(f"batch.pt has no {error}") from None
    return "broken" if faults else "fine", ", ".join(faults) or f"{len(batch['rows'])} answers"


def answers_finish(run):
    """Cut answers that are scored as whole ones; a policy that never stops."""
    x = last(run.values("unfinished"))
    return grade(x, *UNFINISHED), f"{x:.3f} unfinished at the end"


def clip_is_moderate(run):
    """Updates so large that the clip holds most tokens back, or so small that none ever is."""
    x, cfg = run.values("clip_fraction"), run.config
    one_update = cfg.get("epochs") == 1 and cfg.get("minibatch") == cfg.get("samples")
    if not any(x) and cfg.get("lr", 0) > 0 and not one_update:   # the ratio of one update is 1
        return "look", "0 throughout: nothing moves"
    return grade(last(x, 3), *CLIPPED), f"{last(x, 3):.4f} of the tokens in the last third"


def entropy_lives(run):
    """Entropy collapse: one answer to everything, and nothing left to explore."""
    x = run.values("entropy")
    left = last(x, 3) / max(first(x), 1e-9)
    return (grade(-left, -ENTROPY[0], -ENTROPY[1]),
            f"{left:.2f} of the first is left in the last third")


def length_stays(run):
    """The cheapest way to please a preference model: longer answers, or shorter ones."""
    x = run.values("length")
    factor = max(last(x), 1e-9) / max(first(x), 1e-9)
    return (grade(max(factor, 1 / factor), *LENGTH),
            f"{first(x):.1f} tokens at first, {last(x):.1f} at the end, factor {factor:.2f}")


def held_out_agrees(run):
    """Over-optimization (HH 4.2): the score goes on rising while a held-out PM's falls."""
    if not any("test_pm" in row for row in run.rows):
        return "look", "no held-out PM: give --test-pm"
    score, test = zip(*run.columns("score", "test_pm"))
    width = max(1, len(test) // 10)
    means = [mean(test[i:i + width]) for i in range(len(test) - width + 1)]
    steps = [(b - a) ** 2 for a, b in zip(test, test[1:])] or [0.0]   # mean: twice the noise^2,
    error = math.sqrt(mean(steps) / width)                # so this is a difference of two means'
    fall = (max(means) - means[-1]) / max(error, 1e-9)
    third = score[-max(2, len(score) // 3):]
    half = max(1, len(third) // 2)
    rise = mean(third[-half:]) - mean(third[:half])
    return ("look" if rise > 0 and fall > TEST_FALL else "fine", f"held-out PM {fall:.1f} standard "
            f"errors below its best, score {rise:+.3f} in the last third")


def stays_near(run):
    """A policy so far from its reference that the preference model never saw the like."""
    x = math.sqrt(max(last(run.values("kl")), 0.0))
    return grade(x, DISTANCE), f"sqrt(KL) {x:.2f} at the end"


def plain_requests_are_answered(run):
    """Refusing everything: safe and useless (HH 4.4)."""
    x = last(run.values("refused_helpful"))
    return grade(x, *REFUSED), f"{x:.3f} refused at the end"


def critic_lives(run):
    """A dead critic: advantages that are noise, or values that run away."""
    x, loss = last(run.values("explained", FEW)), run.values("value_loss")
    rise = last(loss) / max(first(loss), 1e-9)
    return ("broken" if rise > VALUE_RISE else grade(-x, -EXPLAINED[0], -EXPLAINED[1]),
            f"explained {x:.2f} at the end, value loss times {rise:.2g}")


def coefficient_is_sane(run):
    """An adaptive KL coefficient at an end of its range: the penalty is all or nothing."""
    x = run.values("lambda_kl")
    factor = max(x) / min(x) if min(x) else math.inf if max(x) else 1.0
    return (grade(factor, LAMBDA_MOVED),
            f"{x[0]:.3g} at first, {x[-1]:.3g} at the end, factor {factor:.3g} between extremes")


CHECKS = (  # check, its stages (none: all), what it is told as, likely cause, what to change
    (is_finished, (), "finished",
     "it was killed or still runs; or, if it can't be read, the file is damaged",
     "go on (delete a damaged file first): {command}"),
    (is_finite, (*METRICS,), "numbers are finite",
     "a learning rate that is too high, or a start from a checkpoint that is broken already",
     "--lr down threefold; python doctor.py on the stage before"),
    (loss_fell, ("pretrain", "distill", "sft", "preference"), "loss fell",
     "the learning rate is too high or 0, or the data has nothing to learn",
     "--lr down threefold, or up if the loss stands still; read a few lines of the data"),
    (above_length, ("preference",), "PM above length alone",
     "too few comparisons, ones of the other objective, or annotators who like length",
     "more comparisons of what is tested (--count of collect.py); --init with a pretrained PM"),
    (ratio_is_one, ("ppo",), "ratio 1 at the first update",
     "below 0.05 bf16's rounding; else temperature, positions or masks differ",
     "see whether --device cpu (fp32) has it; compare generate() with policy_logprobs()"),
    (kl_is_positive, ("ppo",), "KL is not negative",
     "tokens are drawn from another distribution than the log-probs' (a filter, greedy)",
     "--temperature 1, no filter in the sampler; --trace shows the tokens"),
    (kl_is_exact, ("ppo",), "KL equals the exact KL",
     "tokens are not drawn by the policy's probabilities, or log-probs are one slot off",
     "--temperature 1, no filter in the sampler; look at at_response() and the masks"),
    (score_is_last, ("ppo",), "score at the last token",
     "the end's index is off by one, or the mask is not that of the lengths",
     "look at rewards_of() and response_mask(); --trace shows a row; a damaged file: {command}"),
    (answers_finish, ("ppo",), "answers finish",
     "answers have no room, or stopping pays too little",
     "--new up, or --unfinished up"),
    (clip_is_moderate, ("ppo",), "clip fraction",
     "an iteration's updates go too far from its samples; at 0, not at all",
     "--lr down, --epochs down, --minibatch up (--clip up only hides it); at 0: --lr up"),
    (entropy_lives, ("ppo",), "entropy",
     "the score is pushed too hard against the KL",
     "--lambda-kl up, --lr down, --epochs down"),
    (length_stays, ("ppo",), "length",
     "longer: the PM likes length, or truth takes words; shorter: it fears to be cut or refuses",
     "read the answers in samples.txt and <test>_longer of the PM; --lambda-kl up, --new"),
    (held_out_agrees, ("ppo",), "held-out PM agrees",
     "the policy finds what only its own PM likes, or nothing is there that would show it",
     "--test-pm with comparisons and base of its own; --iterations down, --lambda-kl up"),
    (stays_near, ("ppo",), "distance to the reference",
     "the KL penalty is too weak for the PM's spread",
     "--lambda-kl up, or --kl-target; --lr down"),
    (plain_requests_are_answered, ("ppo",), "plain requests are answered",
     "the PM pays more for a refusal than for help",
     "--helpful up, --lambda-kl up; comparisons whose worse side refuses a plain request"),
    (critic_lives, ("ppo",), "critic",
     "explained is low: it learns too slowly; value loss rises: it diverges",
     "--critic-lr up where it is slow, down where it diverges; --critic pm"),
    (coefficient_is_sane, ("ppo",), "KL coefficient",
     "the target is out of reach, or the steering is too fast",
     "--kl-target nearer to the KL that is reached, --kl-gain down"),
)


# ---------------------------------------------------------------- the report

def examine(run):
    """(word, what, number told, cause, change) of each check that concerns the stage."""
    for check, stages, what, cause, change in CHECKS:
        if not stages or run.name in stages or (check is is_finite and run.rows):
            try:
                yield *check(run), what, cause, change
            except Missing as reason:
                yield "not possible", str(reason), what, cause, change


def report(run):
    """The stage's text, and how often each word is said."""
    lines, words = [f"{run.dir}: {run.name}, {len(run.rows)} lines of metrics"], Counter()
    if run.torn:
        lines.append("  the last line of metrics.jsonl is torn, as a kill leaves it: left out")
    for word, told, what, cause, change in examine(run):
        words[word] += 1
        lines.append(f"  {word:<14}{what:<29}{told}")
        if word in ("look", "broken"):
            change = change.replace("{command}", command(run)) if "{" in change else change
            lines += [f"      likely cause: {cause}", f"      change: {change}"]
    return "\n".join(lines), words


def main():
    parser = flags(__doc__)
    parser.add_argument("run", nargs="?", help="a stage's folder, or the one that holds several")
    parser.add_argument("--metrics", action="store_true", help="print what each metric is")
    args = parser.parse_args()
    if args.metrics:
        return print(metrics_page())
    if not args.run:
        parser.error("name a run's folder")
    words = Counter()
    try:
        stages, foreign = stages_of(Path(args.run))
        for run in stages:
            text, said = report(run)
            words += said
            print(text + "\n")
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except OSError as error:
        parser.exit(2, f"error: {error.filename}: {error.strerror}\n")
    for path in foreign:
        print(f"{path}: no stage's folder (its config.json has no 'stage'), left out")
    said = ", ".join(f"{words[w]} {w}" for w in ("fine", "look", "broken"))
    impossible = words.pop("not possible", 0)
    print(f"{sum(words.values())} checks: {said}, {impossible} not possible")
    if words["broken"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
