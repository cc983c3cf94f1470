"""SL-CAI and RL-CAI: harmlessness from a constitution, not from annotators (Bai et al. 2022b).

    SL-CAI   1. a policy that was trained to be helpful alone answers red-team prompts,
             2. criticizes its answer by a principle drawn anew, and revises it: 1 to 4 rounds
             3. the plain model learns the last revisions, and helpful answers of that policy
    RL-CAI   4. SL-CAI answers red-team prompts twice (in a share --foreign the second answer is one
                to a plain prompt: nothing else says that an answer must fit); a feedback model is
                asked under a principle which is better, in both orders (position bias cancels):

                    p(a, b) = ( P(A | a, b) + 1 - P(A | b, a) ) / 2,
                    P(A | a, b) = p("(A)") / ( p("(A)") + p("(B)") )

             5. a preference model (PM) learns these soft labels, and annotators' helpful choices
             6. PPO with it, from SL-CAI

No annotator's harmlessness label is read: of --data the helpful comparisons alone are, and --policy
and --pmp must have seen none. What is asked follows a few examples (--shots): of the toy world's
careful people, or those of a file. Each text is a turn of its own, so no answer can end it or forge
the next. The paper lets the helpful policy reason (--judge); by default the plain model does.

    python constitution.py --out out/mine/run                     # the toy world, 16 principles
    python constitution.py --constitution data/harsh.txt --out out/mine/harsh
    python constitution.py --reason --clamp 0.6 --sl out/mine/run/sl --out out/mine/reason
    python constitution.py --init out/mine/base --policy out/mine/helpful --data out/mine/lines \\
        --constitution mine.txt --examples mine.jsonl --prompts red.jsonl --plain plain.jsonl
    torchrun --nproc_per_node=2 constitution.py --out out/mine/run

Each step has a folder in --out and is skipped once it is there; killed anywhere, the same command
goes on. runs/constitution.sh makes what it starts from.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import ppo
import preference
import sft
from common import (ALONE, Run, UserError, entry, everyones, load_source, meet, mine,
                    need_one_vocabulary, start, write_atomically)
from critic import (check_examples, facts_of, feedback, longest_request, revise, rounds_of,
                    spoken)
from data import principles
from data.lines import write_lines
from data.tokenizer import join, loads
from model import unpack
from prompts import asker

EVERY = 512     # lines of a step between what is saved of them


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/cai/pretrain"  # plain language model: SL-CAI starts from it
    policy: str = "out/laptop/cai/helpful/snapshot-1.2.pt"  # helpful-only RLHF: answers, revises
    data: str = "out/laptop/cai/choices-helpful"  # comparisons: only the helpful ones are read
    pmp: str = ""                      # PM to start from (preference.py --harmful 0); empty: init
    judge: str = ""                    # feedback model; empty: init (CAI: a pretrained model)
    out: str = "out/laptop/cai/run"    # the run's folder, with a folder of each step
    sl: str = ""                       # SL-CAI policy of another run to start RL from
    labels: str = ""                   # folder of another run's feedback to take
    constitution: str = ""             # file of principles; empty: data/principles.txt
    examples: str = ""                 # file of examples that show the work; empty: the toy world's
    prompts: str = ""                  # red-team prompts, .jsonl by commas; empty: the toy world's
    plain: str = ""                    # plain prompts, .jsonl by commas; empty: the toy world's
    generated: str = ""                # model-generated red-team prompts (prompts.py), by commas
    mix: float = 0.5                   # share of generated red-team prompts, where there are any
    count: int = 1500                  # red-team prompts that are answered and revised
    rounds: int = 4                    # of critique and revision, a principle drawn anew in each
    critique: bool = True              # criticize before revising
    shots: int = 3                     # examples before what is asked
    temperature: float = 0.4           # of critiques, revisions and reasoning; of answers it is 1
    helpful_count: int = 1500          # helpful answers to learn beside the revisions
    epochs: int = 3                    # of SL-CAI
    sl_lr: float = 5e-4                # learning rate of SL-CAI
    pairs: int = 4500                  # pairs of answers to ask about
    foreign: float = 0.2               # share of pairs whose second answer is one to a plain prompt
    principle: str = ""                # asked by: empty, one drawn for each pair; all, or a name
    reason: bool = False               # the feedback model reasons first
    hard: bool = False                 # labels of 0 and 1 instead of probabilities
    clamp: float = 1.0                 # labels are held in 1 - clamp .. clamp (with --reason: 0.6)
    pm_lr: float = 6e-4                # learning rate of the PM
    iterations: int = 50               # of PPO; 0: no RL
    samples: int = 128                 # answers in an iteration
    lr: float = 1e-4                   # policy's learning rate
    lambda_kl: float = 0.03            # KL penalty, in normalized score per nat
    helpful: float = 0.6               # share of helpful prompts, of PPO in the toy world
    snapshots: str = ""                # sqrt(KL) values by commas: weights are kept at each
    new: int = 40                      # tokens of an answer, critique or revision at most
    chunk: int = 64                    # prompts sampled at a time
    seed: int = 0                      # of prompts, principles, answers and orders
    shard: bool = False                # cut what is trained over the processes: less memory
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def label(p, hard=False, clamp=1.0):
    """Soft label of a probability: held in 1 - clamp .. clamp; hard: 0, 1/2 or 1 before that."""
    p = float((p > 0.5) + 0.5 * (p == 0.5)) if hard else p
    return min(max(p, 1 - clamp), clamp)


# ---------------------------------------------------------------- data

def constitution_of(cfg):
    """The Principles of the run, of which --principle is one."""
    try:
        found = principles.read_constitution(cfg.constitution or principles.DEFAULT)
    except ValueError as error:
        raise UserError(str(error)) from None
    if any(p.name == "all" for p in found):
        raise UserError(f"{cfg.constitution}: [all] is no name: --principle all asks each")
    if cfg.principle not in ("", "all", *(p.name for p in found)):
        raise UserError(f"--principle {cfg.principle}: all, or a name of the constitution, as "
                        f"{found[0].name}; left out, one is drawn for each pair")
    return found


def asker_of(cfg, tok, n_ctx, rank):
    """ask(rows, stage, kind) -> talks and their ids: "red" is of red-team prompts, or "plain"."""
    kinds = dict(red=replace(cfg, helpful=0.0),
                 plain=replace(cfg, helpful=1.0, prompts=cfg.plain, generated=""))
    room = n_ctx - cfg.new - 1
    if cfg.prompts:                      # what is asked about them must fit, too
        room = n_ctx - 1 - longest_request(cfg, tok, constitution_of(cfg))
    asks = {kind: asker(own, tok, room, rank) for kind, own in kinds.items()}
    return lambda rows, stage, kind="red": asks[kind](rows, stage)


def sources_of(paths):
    """The language models' checkpoints of these folders, their tokenizer, the context all have."""
    found = {path: load_source(path, scalar=False) for path in paths}
    first = found[paths[0]]
    need_one_vocabulary(paths[0], first, found)
    return found, loads(first["tokenizer"]), min(x["gpt"]["n_ctx"] for x in found.values())


def made(cfg, name, count, paths, make):
    """Folder of a step's lines, comparisons.jsonl: make(tok, *models, ask, rows) gives those of
    some of `count` global rows, None for one that is dropped. A killed run goes on after what it
    last saved.
    """
    rank, world_size, device = start(cfg.device)
    run = Run(replace(cfg, out=f"{cfg.out}/{name}"), name, rank)
    if not run.finished:
        sources, tok, n_ctx = sources_of(paths)
        models = [unpack(sources[path], device).eval() for path in paths]
        ask = asker_of(cfg, tok, n_ctx, rank)
        lines = run.resume["lines"] if run.resume else []
        bar = run.bar(count, len(lines))
        while len(lines) < count:
            rows = range(len(lines), min(len(lines) + cfg.chunk, count))
            own = mine(rows, rank, world_size)
            lines += everyones(make(tok, *models, ask, own) if own else [], world_size)
            bar.update(len(rows))
            stopping = run.stopping()
            if stopping or len(lines) // EVERY > (len(lines) - len(rows)) // EVERY:
                run.save(len(lines), lines=lines)
            if stopping:
                raise KeyboardInterrupt
        bar.close()
        if rank == 0:
            kept = [x for x in lines if x]
            text = "".join(json.dumps(x) + "\n" for x in kept)
            write_atomically(run.dir / "comparisons.jsonl", lambda f: f.write(text.encode()))
            print(f"{name}: {len(kept)} lines, {count - len(kept)} dropped")
        run.save(count, finished=True)
    meet(ALONE)      # rank 0 has written before others read
    return run.dir


def lines_in(folder):
    return [json.loads(x) for x in (Path(folder) / "comparisons.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- SL-CAI

def helpful_answers(cfg, tok, model, ask, rows):
    """Demonstrations of plain rows: what the helpful policy says; None where it comes to no end."""
    talks, prompts = ask(rows, "plain", "plain")
    told = spoken(cfg, tok, model, prompts, rows, "plain")
    return [dict(prompt=join(turns, answer=True), answer=text) if ended else None
            for turns, (text, ended) in zip(talks, told, strict=True)]


def told_rounds(run, lines):
    """Logs the habits of each round's answers, and shows one talk of revisions."""
    for number, found in enumerate(rounds_of(lines)):
        run.log(number, **found)
        run.say(f"round {number}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()))
    line = lines[0]
    run.say(f"{line['prompt'].strip()} {line['answers'][0]}")
    for name, critique, text in zip_longest(line["principles"], line["critiques"],
                                            line["answers"][1:]):
        run.say(f"  [{name}] {critique or ''}\n    -> {text}")


def supervised(cfg, run, found):
    """The folder of SL-CAI: the plain model learns revisions and helpful answers."""
    revised = made(cfg, "revisions", cfg.count, [cfg.policy], partial(revise, cfg, found))
    plain = made(cfg, "plain", cfg.helpful_count, [cfg.policy],
                 partial(helpful_answers, cfg)) if cfg.helpful_count else None
    lines, folder = lines_in(revised), Path(cfg.out) / "sl"
    if run.rank == 0:
        demos = [dict(prompt=x["prompt"], answer=x["answers"][-1]) for x in lines]
        told_rounds(run, lines)
        cut = sum(not x["ended"] for x in lines)
        run.say(f"SL-CAI learns {len(demos)} last revisions, {cut} of them cut off at --new; "
                f"{sum(x['kept'] for x in lines)} revisions without end or text were passed over")
        write_lines({folder / "demonstrations.jsonl": demos + (lines_in(plain) if plain else [])})
    meet(ALONE)
    sft.train(sft.Config(init=cfg.init, data=str(folder / "demonstrations.jsonl"), out=str(folder),
                         epochs=cfg.epochs, lr=cfg.sl_lr, seed=cfg.seed, shard=cfg.shard,
                         device=cfg.device))
    meet(ALONE)
    return str(folder)


# ---------------------------------------------------------------- RL-CAI

def told_feedback(run, step, lines):
    """Logs and tells the facts of labels. UserError where there are none."""
    if not lines:
        raise UserError("feedback: no pair of different answers to ask about; does the policy give "
                        "each prompt one answer?")
    found = facts_of(lines)
    run.log(step, **found)
    run.say("feedback: " + ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in found.items()))


def split(lines):
    """(what the PM learns, what tests it): the last tenth tests."""
    cut = len(lines) - len(lines) // 10
    return lines[:cut], lines[cut:]


def helpful_choices(cfg):
    """The helpful comparisons of annotators. Their harmless ones are not used."""
    people = [dict(x, soft=1.0) for x in preference.read_comparisons(cfg.data)
              if x.get("objective") == "helpful"]
    if not people:
        raise UserError(f"{cfg.data}: no line with objective 'helpful'; collect some first")
    return people


def ai_labels(path):
    """The lines of a folder of feedback. UserError if they are anybody else's."""
    lines = preference.read_comparisons(path)
    if any(x.get("tranche") != "ai" for x in lines):
        raise UserError(f"{path}: not the feedback of constitution.py; name such a folder")
    return lines


def pm_lines(cfg, labels):
    """Lines to learn and to test on: AI labels, made --hard or held by --clamp, and people's."""
    ai = [dict(x, soft=label(x["soft"], cfg.hard, cfg.clamp)) for x in ai_labels(labels)]
    return [x + y for x, y in zip(split(ai), split(helpful_choices(cfg)))]


def preference_model(cfg, run, learn, test):
    """The folder of the PM that learns these lines."""
    folder = Path(cfg.out) / "pm"
    if run.rank == 0:
        preference.write_comparisons({folder / "learn.jsonl": learn, folder / "test.jsonl": test})
    meet(ALONE)
    preference.train(preference.Config(
        init=cfg.pmp or cfg.init, data=str(folder / "learn.jsonl"), soft=True, pairs=0,
        test=str(folder / "test.jsonl"), lr=cfg.pm_lr, out=str(folder), seed=cfg.seed,
        shard=cfg.shard, device=cfg.device))
    meet(ALONE)
    return str(folder)


def rl_config(cfg, policy, pm):
    """The Config of PPO from SL-CAI with this PM; its folder is RL-CAI."""
    return ppo.Config(
        policy=policy, pm=pm, out=f"{cfg.out}/rl", iterations=cfg.iterations, samples=cfg.samples,
        minibatch=min(ppo.Config.minibatch, cfg.samples), lr=cfg.lr, lambda_kl=cfg.lambda_kl,
        prompts=",".join(filter(None, (cfg.prompts, cfg.plain))), generated=cfg.generated,
        mix=cfg.mix, helpful=cfg.helpful, new=cfg.new, snapshots=cfg.snapshots, seed=cfg.seed,
        shard=cfg.shard, device=cfg.device)


# ---------------------------------------------------------------- train

def check(cfg, world_size=1):
    """UserError for knobs out of range, or that don't fit together."""
    if cfg.iterations > 0:
        ppo.check(rl_config(cfg, "", ""), world_size)
    elif cfg.sl:
        raise UserError("--sl with --iterations 0: nothing would be done")
    if cfg.labels and (cfg.principle or cfg.reason):
        raise UserError("--labels: what is asked was asked; leave --principle and --reason out")
    if not (cfg.sl_lr > 0 and cfg.pm_lr > 0):
        raise UserError(f"--sl-lr {cfg.sl_lr}, --pm-lr {cfg.pm_lr}: above 0")
    if not cfg.sl and cfg.count + cfg.helpful_count < 2 * sft.Config.batch:
        raise UserError(f"--count {cfg.count} and --helpful-count {cfg.helpful_count}: together at "
                        f"least {2 * sft.Config.batch}, to learn from")
    if not 0 <= cfg.foreign <= 1:
        raise UserError(f"--foreign {cfg.foreign}: a share, from 0 to 1")
    for least, names in ((1, "count pairs chunk new samples epochs"),
                         (0, "rounds shots helpful_count iterations")):
        for name in names.split():
            if getattr(cfg, name) < least:
                raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: at least "
                                f"{least}")
    if not 0.5 <= cfg.clamp <= 1:
        raise UserError(f"--clamp {cfg.clamp}: from 0.5 to 1; 0.6 holds labels in 0.4 to 0.6")
    if not cfg.temperature > 0:
        raise UserError(f"--temperature {cfg.temperature}: above 0")
    if bool(cfg.prompts) != bool(cfg.plain):
        raise UserError("--prompts and --plain: both, or the toy world's own")


def need_order(cfg):
    """UserError where a step is there and one that it was made of is not: it would be stale."""
    names = [*["revisions", "sl"] * (not cfg.sl), *["feedback"] * (not cfg.labels), "pm", "rl"]
    there = [(Path(cfg.out) / name / "ckpt.pt").exists() for name in names]
    if False in there and True in there[there.index(False):]:
        last = names[len(there) - 1 - there[::-1].index(True)]
        raise UserError(f"{cfg.out}/{last} was made of a {names[there.index(False)]} that is gone: "
                        "delete it, too")


def prepared(cfg, found):
    """UserError, now and not after hours, for what the steps would miss."""
    check_examples(cfg)
    need_order(cfg)
    _, tok, n_ctx = sources_of([x for x in (cfg.init, cfg.sl or cfg.policy, cfg.judge) if x])
    for principle in found:
        if longest_request(cfg, tok, [principle]) + 16 > n_ctx:
            raise UserError(f"[{principle.name}]: it and answers of --new {cfg.new} don't fit into "
                            f"{n_ctx} tokens: lower it, or shorten the principle")
    if cfg.iterations:
        helpful_choices(cfg)
        if cfg.labels:
            ai_labels(cfg.labels)
        made_of = load_source(cfg.pmp or cfg.init).get("config", {})
        if made_of.get("stage") == "preference" and not made_of["data"] and made_of.get(
                "harmful", 0.4):
            raise UserError(f"--pmp {cfg.pmp}: pretrained on pairs about harm, which are labels of "
                            "harmlessness: make one with preference.py --harmful 0")


def train(cfg):
    rank, world_size, _ = start(cfg.device)
    check(cfg, world_size)
    run = Run(cfg, "constitution", rank)
    if run.finished:
        return print(f"constitution: {run.dir} is finished, skipped") if rank == 0 else None
    found = constitution_of(cfg)
    prepared(cfg, found)
    policy = cfg.sl or supervised(cfg, run, found)                             # 1. 2. 3.
    labels = cfg.labels
    if cfg.iterations:
        labels = labels or made(cfg, "feedback", cfg.pairs, [policy, cfg.judge or cfg.init],
                                partial(feedback, cfg, found))                 # 4.
        if rank == 0 and not cfg.labels:
            told_feedback(run, cfg.rounds + 1, lines_in(labels))
        pm = preference_model(cfg, run, *pm_lines(cfg, labels))                # 5.
        ppo.train(rl_config(cfg, policy, pm))                                  # 6.
    run.save(1, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
