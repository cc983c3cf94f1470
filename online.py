"""Stage 4: iterated online RLHF (HH 4.5, B.3): better policies give better answers to choose from.

    lots = base comparisons, and comparisons between bests of k under a PM of them (rs, k = 16)
    each round:  PM      from its pretrained start, on all lots so far
                 policy  from the distilled start, by PPO on that PM
                 lot     its snapshots and its end answer side by side, annotators choose

Every round trains new models ("online" is not the usual word for it, says HH), with the same
hyper-parameters, so that only the data differ. The first round's policy is the static one. Several
snapshots at once keep the answers diverse where RL makes each policy surer of its own, and show the
annotators what a policy does once it has gone too far: a PM can only unlearn to like what it has
seen punished.

    python online.py                                        # laptop: two rounds
    python online.py --rounds 4 --count 3000 --snapshots 0.5,1,2,3 --iterations 60
    python online.py --human 200 --out out/human            # a person chooses in each round
    torchrun --nproc_per_node=2 online.py

Each step has a folder in --out and is skipped once it is there; killed anywhere, the same command
goes on and asks nothing twice. At the end it plays all policies against each other (elo.py).
"""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import collect
import elo
import ppo
import preference
from common import (ALONE, Run, UserError, entry, load_source, meet, metrics_of, start,
                    write_atomically)
from control import snapshots_of
from data.tokenizer import loads
from model import unpack


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill"  # distilled policy: answers first, each round starts from it
    pmp: str = "out/laptop/pmp"        # pretrained PM that each round's PM starts from
    data: str = "out/laptop/comparisons"  # the base lot, or several by commas
    pm: str = ""                       # PM of the base lot that picks for rs; empty: trained here
    out: str = "out/laptop/online"     # the loop's folder, with a folder of each step
    rs: int = 1000                     # comparisons between bests of --best; 0: no such lot
    best: int = 16                     # answers of which the best is shown in that lot (HH: 16)
    rounds: int = 2                    # PMs and policies; between them a lot of each policy
    count: int = 1500                  # comparisons of such a lot
    human: int = 0                     # a person's choices of such a lot instead (feedback.py)
    even: bool = False                 # PMs learn as much of each lot as of the smallest (HH 4.5)
    held: float = 0.1                  # last share of each lot: never trained on, tests the PMs
    snapshots: str = "0.5,1"           # sqrt(KL) values at which a policy is deployed too
    iterations: int = 30               # of PPO in a round
    samples: int = 128                 # answers in an iteration
    lr: float = 1e-4                   # policy's learning rate
    lambda_kl: float = 0.03            # KL penalty, in normalized score per nat
    helpful: float = 0.6               # share of helpful prompts, of PPO
    pm_lr: float = 3e-4                # PMs' learning rate
    temperature: float = 0.6           # of the annotators, gold units
    matches: int = 200                 # prompts of a kind on which two policies meet; 0: no Elo
    seed: int = 0                      # of prompts, answers, choices and orders
    shard: bool = False                # cut what is trained over the processes: less memory
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- lots

def parts(cfg, lots):
    """(what PMs learn, what tests them), {lot: lines} each: the last share `held` of a lot tests.

    even: all lots are cut to what the smallest leaves to learn.
    """
    cut = {name: len(lines) - round(cfg.held * len(lines)) for name, lines in lots.items()}
    least = min(cut.values())
    learn = {name: lines[:least if cfg.even else cut[name]] for name, lines in lots.items()}
    return learn, {name: lines[cut[name]:] for name, lines in lots.items()}


def base_lot(paths):
    """The lines of all files, dealt in proportion: the last share holds some of each."""
    files = [preference.read_comparisons(path) for path in paths.split(",")]
    placed = [((i + 0.5) / len(lines), x) for lines in files for i, x in enumerate(lines)]
    return [x for _, x in sorted(placed, key=lambda pair: pair[0])]


def simulated(cfg, name, policies, count, **knobs):
    """The lines of a lot: these policies answer side by side, simulated annotators choose."""
    folder = Path(cfg.out) / f"lot-{name}"
    collect.collect(collect.Config(
        policy=",".join(policies), out=str(folder), count=count, tranche=name,
        temperature=cfg.temperature, seed=cfg.seed, device=cfg.device, **knobs))
    meet(ALONE)      # rank 0 has written before others read
    return preference.read_comparisons(folder)


def whole_lines(path):
    """Lines of a file that another program appends to: what has no end of line yet is left out."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def asked(cfg, name, policies, rank):
    """The lines of a lot: a person's choices (feedback.py), waited for, then frozen in a file."""
    folder, lot = Path(cfg.out) / f"human-{name}", Path(cfg.out) / f"lot-{name}.jsonl"
    chosen = folder / "comparisons.jsonl"
    for kind in (signal.SIGINT, signal.SIGTERM):         # nothing is to be saved: stop at once
        signal.signal(kind, signal.default_int_handler)
    if rank == 0 and not lot.exists():
        print(f"online: waiting for {cfg.human} choices in {chosen}; in another terminal:\n    "
              f"python feedback.py --policies {' '.join(policies)} --out {folder}", flush=True)
        while len(whole_lines(chosen)) < cfg.human:
            time.sleep(1)
        lines = b"".join(x + b"\n" for x in whole_lines(chosen)[:cfg.human])
        write_atomically(lot, lambda file: file.write(lines))
    while not lot.exists():                              # a collective would give up after a while
        time.sleep(1)
    meet(ALONE)
    return preference.read_comparisons(lot)


# ---------------------------------------------------------------- a round

def train_pm(cfg, name, lots, rank):
    """The folder of the PM of these lots."""
    folder = Path(cfg.out) / f"pm-{name}"
    learn, test = ([x for lines in part.values() for x in lines] for part in parts(cfg, lots))
    if rank == 0:
        preference.write_comparisons({folder / "learn.jsonl": learn, folder / "test.jsonl": test})
    meet(ALONE)
    preference.train(preference.Config(
        init=cfg.pmp, data=str(folder / "learn.jsonl"), test=str(folder / "test.jsonl"), pairs=0,
        lr=cfg.pm_lr, out=str(folder), seed=cfg.seed, shard=cfg.shard, device=cfg.device))
    meet(ALONE)
    return str(folder)


def train_policy(cfg, name, pm):
    """The folder of the policy that PPO makes with this PM, and all that is deployed of it."""
    folder = Path(cfg.out) / f"ppo-{name}"
    ppo.train(ppo.Config(
        policy=cfg.policy, pm=pm, out=str(folder), iterations=cfg.iterations, samples=cfg.samples,
        minibatch=min(ppo.Config.minibatch, cfg.samples), lr=cfg.lr, lambda_kl=cfg.lambda_kl,
        helpful=cfg.helpful, snapshots=cfg.snapshots, seed=cfg.seed, shard=cfg.shard,
        device=cfg.device))
    meet(ALONE)
    return str(folder), [*map(str, snapshots_of(folder)), str(folder)]


def told(cfg, run, number, pm, policy, lots):
    """Logs what a round is worth: the PM's accuracy on each lot, the policy's last iterations."""
    content = load_source(pm, scalar=True)
    tok, judge = loads(content["tokenizer"]), unpack(content).eval()
    accuracy = {f"accuracy_{name}": preference.mean_accuracy(preference.score_lines(
        judge, tok, lines)[1]) for name, lines in parts(cfg, lots)[1].items() if lines}
    last = metrics_of(policy)[-3:]
    means = {k: sum(r[k] for r in last) / len(last) for k in
             ("kl", "score", "gold_helpful", "gold_harmless", "refused_helpful") if k in last[-1]}
    run.log(number - 1, lines=sum(map(len, lots.values())), **accuracy, **means)
    run.say(f"online round {number}: " + ", ".join(
        f"{k.replace('_', ' ')} {v:.2f}" for k, v in {**accuracy, **means}.items()))


# ---------------------------------------------------------------- the loop

def check(cfg):
    if cfg.rounds < 1 or min(cfg.rs, cfg.count - 1, cfg.human, cfg.matches) < 0:
        raise UserError("--rounds and --count are at least 1; --rs, --human, --matches at least 0")
    if not 0 < cfg.held < 1:
        raise UserError(f"--held {cfg.held}: a share of each lot between 0 and 1")


def loop(cfg):
    rank, _, _ = start(cfg.device)
    check(cfg)
    run = Run(cfg, "online", rank)
    if run.finished:
        return print(f"online: {run.dir} is finished, skipped") if rank == 0 else None
    lots = {"base": base_lot(cfg.data)}
    if cfg.rs:
        pm = cfg.pm or train_pm(cfg, "base", lots, rank)
        lots["rs"] = simulated(cfg, "rs", [cfg.policy], cfg.rs, best=cfg.best, pm=pm)
    players = {"distilled": cfg.policy}
    for number in range(1, cfg.rounds + 1):
        pm = train_pm(cfg, number, lots, rank)
        policy, deployed = train_policy(cfg, number, pm)
        players["static" if number == 1 else f"online-{number}"] = policy
        if number > run.step:
            told(cfg, run, number, pm, policy, lots)
        run.save(number)
        if number < cfg.rounds:
            name = f"online-{number}"
            lots[name] = (asked(cfg, name, deployed, rank) if cfg.human else
                          simulated(cfg, name, deployed, cfg.count))
    if cfg.matches:
        elo.rate(elo.Config(
            policies=tuple(f"{name}={path}" for name, path in players.items()), pm=pm,
            count=cfg.matches, heldout=True, noise=cfg.temperature, out=str(run.dir / "elo"),
            seed=cfg.seed, device=cfg.device))
    run.save(cfg.rounds, finished=True)


if __name__ == "__main__":
    entry(loop, Config, __doc__)
