"""An absolute score of harm: what attackers would say of their success (Bai et al. 2022b, 4.5).

Elo only ranks policies. Here people attack a policy in a conversation x and rate their own success
y, 0 to 4; attacks.py simulates them. A language model with a scalar head, read at <|eoc|> after the
whole conversation, learns to foretell the rating of a rater whom it does not know:

    minimize  mean (s(x) - y)^2

Then each policy answers 64 harmful prompts about animals that no rated attack named, n times each;
fig. 10 has the mean score of every snapshot of an RL run. Its error is over prompts: the samples of
one prompt are not independent. A score is a mean rating by these raters, not the success itself,
and not held within 0 to 4.

    python harm.py --policies out/laptop/cai/distill --out out/mine/harm
    python harm.py --policies rl:1=out/a/snapshot-1.pt rl:2=out/a --out out/b/harm    # a curve
    python harm.py --count 0 --init out/laptop/cai/harm --policies out/a --out out/a/harm
    torchrun --nproc_per_node=2 harm.py --policies out/laptop/cai/distill

--count 0 scores with the scorer of an earlier run. attacks.jsonl has the rated attacks. harm.json
has, of those held out ("test"; "heldout" are about other animals), R^2 and the most that is
possible, the correlation with the noise-free success, means by rater, calibration; of each policy
the score, its error, means by prompt, and the true success. harm.png has bars, and a curve over
STEP where names are NAME:STEP.

27 seconds of one core for 3,000 attacks on two policies of size micro and the scores of both: R^2
0.84 of 0.85, correlation 0.99; base 1.38 (error 0.04), distilled 0.86 (0.03), where the true
success is 1.41 and 0.80.
"""

import io
import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from attacks import answers_of, attacked, longest, measured, raters, success
from attacks import prompts as held_out
from common import (LOOKS, Run, UserError, adamw, batch_rows, entry, everyones, load_source, mine,
                    need_one_vocabulary, schedule, start, total, update, write_atomically)
from data.tokenizer import fit, loads
from elo import plain
from measures import mean_se
from model import by_length, pad_rows, unpack
from parallel import Team, home, passes, portions


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/cai/pretrain"  # language model that becomes the scorer
    attacked: str = "out/laptop/cai/pretrain,out/laptop/cai/distill"  # equal shares, commas
    policies: tuple = ()               # to score: PATH, NAME=PATH, NAME:STEP=PATH; blanks, commas
    out: str = "out/laptop/cai/harm"  # the stage's folder
    count: int = 3000                  # rated attacks to learn from; 0: --init is a scorer already
    test: int = 300                    # further ones to test on, and as many about other animals
    raters: int = 5                    # attackers who rate, each on a scale of their own
    strictness: float = 0.5            # spread of what they take off, points of the scale
    noise: float = 0.5                 # deviation of their noise, points of the scale
    prompts: int = 64                  # held-out harmful prompts that policies answer
    samples: int = 32                  # answers to each (the paper: 256)
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # of sampling
    chunk: int = 256                   # answers sampled at once
    batch: int = 32                    # rated attacks in a step
    micro: int = 32                    # of them in one forward pass, like lengths together
    epochs: int = 1                    # passes over them
    lr: float = 1e-3                   # peak learning rate, linear to 0
    warmup: int = 10                   # steps of linear warm-up
    every: int = 50                    # steps between evaluations and checkpoints
    seed: int = 0                      # of attacks, ratings' order, prompts and answers
    shard: bool = False                # cut weights and optimizer over the processes: less memory
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def rating_loss(scores, ratings, count):
    """Sum of (s - y)^2 over some conversations, over the count of all that are in the mean."""
    return ((scores - ratings) ** 2).sum() / count


def over_prompts(scores):
    """Mean score of a policy, and its error over prompts: scores [prompts, samples]."""
    means = [float(np.mean(own)) for own in scores]
    mean, se = mean_se(means)
    return dict(mean=mean, se=se, prompts=means)


# ---------------------------------------------------------------- scores

def conversation(tok, turns, n_ctx):
    """Ids of a talk that ends with an answer, and <|eoc|>; what has no room goes: the end of an
    answer that fills the context with its request alone, then the oldest turns.
    """
    *before, (_, text) = turns
    asked = tok.render(before[-1:], answer=True)
    if len(asked) >= n_ctx - 1:
        raise ValueError(f"a request of {len(asked)} tokens in a context of {n_ctx}")
    answer = tok.render_answer(text)[:n_ctx - 1 - len(asked)]
    return [*fit(tok, before, n_ctx - 1 - len(answer)), *answer, tok.eoc]


def scores_of(model, tok, rows):
    """Scores [B], read at each row's last token."""
    ids, lengths = pad_rows(rows, tok.pad, model.device)
    at = torch.arange(len(rows), device=model.device), lengths - 1
    return model.score(model(ids, lengths, at=at))


def rows_loss(model, tok, rows, ratings, count):
    """rating_loss of the scores of rows."""
    scores = scores_of(model, tok, rows)
    return rating_loss(scores, ratings.to(scores.device), count)


@torch.no_grad()
def score_conversations(model, tok, talks, micro=64):
    """Predicted ratings, a list of floats; talks: turns that end with an answer."""
    rows = [conversation(tok, turns, model.config.n_ctx) for turns in talks]
    out = [0.0] * len(rows)
    for some in by_length(rows, micro):
        for i, score in zip(some, scores_of(model, tok, [rows[i] for i in some]).tolist()):
            out[i] = score
    return out


def harm_scores(model, tok, prompts, answers, micro=64):
    """Predicted ratings [prompts, samples]: prompts are turns that end with a request, answers a
    list of texts to each. What is said more than once is scored once.
    """
    talks = [[(*turns, ("assistant", text)) for text in own]
             for turns, own in zip(prompts, answers, strict=True)]
    different = list(dict.fromkeys(talk for own in talks for talk in own))
    found = dict(zip(different, score_conversations(model, tok, different, micro)))
    return [[found[talk] for talk in own] for own in talks]


# ---------------------------------------------------------------- policies

def policies_of(words):
    """{name: path} of --policies; UserError for a blank name, path, or one that is there twice."""
    out = {}
    for word in (x for given in words for x in given.split(",") if x.strip()):
        name, given, path = word.partition("=")
        name, path = (name.strip(), path.strip()) if given else (Path(word).name, word.strip())
        if not name or not path:
            raise UserError(f"--policies {word}: a blank name or path, where NAME=PATH is meant")
        if name in out:
            raise UserError(f"--policies {word}: a second one named {name}; NAME={path} renames it")
        out[name] = path
    return out


def checked(cfg):
    """The policies to score. UserError for knobs that can't be."""
    policies = policies_of(cfg.policies)
    if min(cfg.raters, cfg.prompts, cfg.samples, cfg.new, cfg.chunk, cfg.batch, cfg.micro,
           cfg.epochs, cfg.every) < 1:
        raise UserError("--raters, --prompts, --samples, --new, --chunk, --batch, --micro, "
                        "--epochs, --every must be at least 1")
    if not cfg.temperature > 0 or not 0 < cfg.lr < np.inf or cfg.warmup < 0:
        raise UserError("--temperature and --lr must be above 0, --warmup at least 0")
    if not (0 <= cfg.noise < np.inf and 0 <= cfg.strictness < np.inf):
        raise UserError("--noise and --strictness must be at least 0")
    if cfg.count and (cfg.count < cfg.batch or cfg.test < 2):
        raise UserError(f"--count {cfg.count}, --test {cfg.test}: at least a --batch of "
                        f"{cfg.batch}, and 2 to test on")
    if cfg.count and not all(cfg.attacked.split(",")):
        raise UserError(f"--attacked {cfg.attacked!r}: a policy or more, commas between")
    if not cfg.count and not policies:
        raise UserError("--count 0 without --policies: nothing to learn, nothing to score")
    return policies


def policy_of(path, init, source):
    """The checkpoint of a policy that reads the scorer's tokens. UserError if it is no such one."""
    content = load_source(path, scalar=False)
    need_one_vocabulary(init, source, {path: content})
    if not all(torch.isfinite(x).all() for x in content["model"].values()):
        raise UserError(f"{path}: a weight is nan or inf: its training diverged")
    return content


def scorer_of(cfg):
    """The checkpoint to start from, with --count 0 a finished scorer's."""
    source = load_source(cfg.init, scalar=None if cfg.count else True)
    if not cfg.count and source.get("config", {}).get("stage") != "harm":
        raise UserError(f"--init {cfg.init}: no scorer of harm.py; --count above 0 makes one of it")
    return source


# ---------------------------------------------------------------- evaluate

def evaluate(cfg, run, model, tok, step, lots):
    """{lot: `measured`} of the lots to test on, logged and told."""
    people, found = raters(cfg.raters, cfg.strictness, cfg.noise), {}
    for lot in ("test", "heldout"):
        scores = score_conversations(model, tok, [x["turns"] for x in lots[lot]])
        if not np.isfinite(scores).all():
            raise UserError(f"{run.dir}: a score is nan or inf; a lower --lr may help")
        found[lot] = measured(scores, lots[lot], people)
    run.log(step, **{f"{lot}_r2": x["r2"] for lot, x in found.items()},
            **{f"{lot}_correlation": x["correlation"] for lot, x in found.items()})
    run.say("harm: " + "; ".join(
        f"{lot} R^2 {x['r2']:.3f} of {x['possible']:.3f}, correlation with the success "
        f"{x['correlation']:.3f}" for lot, x in found.items()))
    return found


def show(run, model, tok, lines):
    """Conversations with their rating, success and score."""
    for line, score in zip(lines, score_conversations(model, tok, [x["turns"] for x in lines])):
        for role, text in line["turns"]:
            run.say(f"  {role:<10} {' '.join(text.split())[:84]}")
        run.say(f"    {line['rater']} says {line['rating']}, predicted {score:.2f}, "
                f"success {line['success']:.2f}")


def score_policy(cfg, tok, scorer, policy, room, rank, world_size):
    """`over_prompts` of a policy's answers to the held-out prompts, and of their true success."""
    prompts = held_out(cfg.seed, cfg.prompts)
    rows = mine(range(len(prompts)), rank, world_size)
    own = [prompts[row] for row in rows]
    texts = answers_of(cfg, tok, policy, rows, [fit(tok, turns, room) for turns in own])
    true = [[success([("assistant", x)]) for x in some] for some in texts]
    found = [everyones(x, world_size) for x in (harm_scores(scorer, tok, own, texts), true)]
    score, true = map(over_prompts, found)
    return dict(score, success=true["mean"], success_se=true["se"])


def table(policies):
    """The policies' scores as text."""
    width = max(10, *map(len, policies))
    return "\n".join([f"{'':<{width}}  harm, predicted   true success"] + [
        f"{name:<{width}}  {x['mean']:+.3f} ± {x['se']:.3f}   {x['success']:.3f} ± "
        f"{x['success_se']:.3f}" for name, x in policies.items()])


def curves_of(names):
    """({name: [(step, full name), ..]} of names NAME:STEP, the other names)."""
    curves, others = {}, []
    for full in names:
        if found := re.fullmatch(r"(.+):(\d+)", full):
            curves.setdefault(found[1], []).append((int(found[2]), full))
        else:
            others.append(full)
    return {name: sorted(points) for name, points in curves.items()}, others


def draw(policies, file):
    """Scores with their errors over prompts: a curve over STEP for each NAME, bars for the rest."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    curves, bars = curves_of(policies)
    panels = [x for x in (curves, bars) if x]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False,
                                layout="constrained", sharey=True)
    for (name, points), (color, marker) in zip(curves.items(), cycle(LOOKS)):
        own = [policies[full] for _, full in points]
        axes[0, 0].errorbar([step for step, _ in points], [x["mean"] for x in own],
                            [x["se"] for x in own], color=color, marker=marker, capsize=3,
                            label=name)
    if curves:
        axes[0, 0].set(xlabel="step")
        axes[0, 0].legend(frameon=False)
    if bars:
        axes[0, -1].bar(bars, [policies[x]["mean"] for x in bars], color=LOOKS[0][0], alpha=0.7,
                        yerr=[policies[x]["se"] for x in bars], capsize=3)
        axes[0, -1].tick_params("x", rotation=30)
    axes[0, 0].set(ylabel="predicted rating of the attack, 0 to 4")
    figure.suptitle("Harm, ± error over held-out prompts")
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def report(cfg, run, lots, tested, policies):
    """Writes harm.json, attacks.jsonl, and harm.png of what was scored."""
    out = dict(init=cfg.init, attacked=cfg.attacked, count=cfg.count, seed=cfg.seed, tests=tested,
               prompts=cfg.prompts, samples=cfg.samples, policies=policies)
    lines = "".join(json.dumps(dict(lot=lot, **x)) + "\n" for lot in lots for x in lots[lot])
    written = {"harm.json": json.dumps(plain(out), indent=1).encode(),
               "attacks.jsonl": lines.encode()}
    if policies:
        picture = io.BytesIO()
        draw(policies, picture)
        written["harm.png"] = picture.getvalue()
        run.say(table(policies))
    for name, content in written.items():
        write_atomically(run.dir / name, lambda f, content=content: f.write(content))


# ---------------------------------------------------------------- train

def learn(cfg, run, team, tok, lots, save):
    """The scorer's steps on the rated attacks, from where the run is."""
    lines = lots["train"]
    rows = [conversation(tok, x["turns"], team.model.config.n_ctx) for x in lines]
    ratings = torch.tensor([float(x["rating"]) for x in lines])
    steps, optimizer = cfg.epochs * (len(rows) // cfg.batch), adamw(team.model, cfg.lr)
    team.load(optimizer, run.resume and run.resume.get("optimizer"))
    bar = run.bar(steps, run.step)
    for step in range(run.step, steps):
        batch = batch_rows(len(rows), cfg.batch, step, cfg.seed, "harm")
        summed = 0.0
        for some, weight in passes(portions(batch, cfg.micro, lambda r: len(rows[r])), team):
            loss = weight * team(rows_loss, tok, [rows[r] for r in some], ratings[some], len(batch))
            loss.backward()
            summed += loss.item()
        norm = update(team.model, optimizer, schedule(step, steps, cfg.lr, cfg.warmup))
        loss = total(summed)
        run.log(step, loss=loss, grad_norm=norm)
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        bar.update()
        if step + 1 == steps:
            save(step + 1, optimizer, lots=lots)
        elif (step + 1) % cfg.every == 0:
            with team.whole() as whole:                          # before the save: it logs
                if run.rank == 0:
                    evaluate(cfg, run, whole, tok, step, lots)
            save(step + 1, optimizer, lots=lots)
        elif run.stopping():
            save(step + 1, optimizer, lots=lots)
            raise KeyboardInterrupt
    bar.close()
    return steps


def train(cfg):
    rank, world_size, device = start(cfg.device)
    policies = checked(cfg)
    run = Run(cfg, "harm", rank)
    if run.finished:
        return print(f"harm: {run.dir} is finished, skipped") if rank == 0 else None
    source = scorer_of(cfg)
    opened, tok = partial(policy_of, init=cfg.init, source=source), loads(source["tokenizer"])
    paths = [*policies.values(), *(cfg.attacked.split(",") if cfg.count else ())]
    room = min(x["gpt"]["n_ctx"] for x in (source, *map(opened, paths))) - cfg.new - 1
    need = max(len(tok.render([("human", x)], answer=True)) for x in longest())
    if need > room:
        raise UserError(f"--new {cfg.new}: leaves {room} tokens for a request, {need} are needed")
    model = unpack(run.resume or source, home(device, cfg.shard), scalar=True)
    lots = run.resume["lots"] if run.resume else attacked(cfg, run, tok, opened, room, device,
                                                          rank, world_size)
    if not (run.resume or source["gpt"]["scalar"]):   # a fresh head: Adam's steps are small
        model.score_head.bias.data.fill_(np.mean([x["rating"] for x in lots["train"]]))
    team = Team(model, cfg.shard, device)

    def save(step, optimizer=None, finished=False, **more):
        run.save(step, finished, **team.content(tok, optimizer), **more)

    steps = learn(cfg, run, team, tok, lots, save) if cfg.count else 0
    told = dict(run.resume.get("told", {})) if run.resume else {}
    bar = run.bar(len(policies), len(told))
    with team.whole() as scorer:
        for name in [x for x in policies if x not in told]:
            if run.stopping():
                raise KeyboardInterrupt
            policy = unpack(opened(policies[name]), device).eval()
            told[name] = dict(path=policies[name], **score_policy(cfg, tok, scorer, policy, room,
                                                                  rank, world_size))
            save(steps, lots=lots, told=told)
            bar.update()
        bar.close()
        if rank == 0:
            tested = evaluate(cfg, run, scorer, tok, steps, lots) if cfg.count else {}
            show(run, scorer, tok, lots["test"][:3])
            report(cfg, run, lots, tested, told)
    save(steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
