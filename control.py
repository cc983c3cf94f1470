"""What a PPO run holds, and what steers it from iteration to iteration: its models, learning rates,
the KL coefficient, weights that follow the policy, snapshots, early stopping. ppo.py has the knobs.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import torch

from common import (UserError, load_source, need_one_vocabulary, prepare, save_checkpoint,
                    schedule)
from data.tokenizer import loads
from model import pack, unpack
from parallel import home
from rollout import keep_batch


# ---------------------------------------------------------------- knobs

CHOICES = dict(kl=("reward", "k2", "k3", "none"), decay=("constant", "linear"),
               critic=("pm", "policy", "fresh"))
RANGES = ((1, math.inf, "iterations samples minibatch micro epochs new every ptx_ratio"),
          (2, math.inf, "ptx_length"), (1e-6, math.inf, "temperature"),
          (0, 1, "helpful mix ema anchor gamma lam"), (0, 4.9, "kl_gain"),
          (0, math.inf, "lr critic_lr lambda_kl halve patience reset kl_target calibrate cap clip "
                        "value_clip ptx"))


def check(cfg, world_size):
    """UserError for knobs out of range, or that don't fit together."""
    for name, known in CHOICES.items():
        if getattr(cfg, name) not in known:
            raise UserError(f"--{name} {getattr(cfg, name)}: choose from {', '.join(known)}")
    for least, most, names in RANGES:
        for name in names.split():
            if not least <= getattr(cfg, name) <= most:
                known = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
                raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: {known}")
    if cfg.samples % cfg.minibatch:
        raise UserError(f"--samples {cfg.samples} is not divisible by --minibatch {cfg.minibatch}")
    if world_size > min(cfg.samples, cfg.calibrate or cfg.samples):
        raise UserError(f"{world_size} processes need that many --samples and --calibrate")
    if cfg.patience and not cfg.test_pm:
        raise UserError("--patience needs a held-out preference model: name one with --test-pm")
    if cfg.pm == "gold" and (cfg.critic == "pm" or cfg.prompts or cfg.generated):
        raise UserError("--pm gold is no model and knows the toy world's own prompts only: take "
                        "--critic policy or fresh, and no --prompts or --generated")
    if cfg.kl_target and not cfg.lambda_kl:
        raise UserError("--kl-target needs a --lambda-kl above 0 to begin with: it is multiplied")
    if cfg.reset and cfg.anchor:
        raise UserError("--reset and --anchor both move the reference: choose one")
    wanted_snapshots(cfg)


# ---------------------------------------------------------------- models

def load_models(cfg, device, resume=None):
    """tok and a namespace: policy, reference (a copy that shares nothing), critic, pm; where asked
    for test_pm, ema (averaged weights) and first (pi0 as it was, where the reference moves).
    """
    source = load_source(cfg.policy, scalar=False)
    judge = source if cfg.pm == "gold" else load_source(cfg.pm, scalar=True)
    pi0 = load_source(cfg.reference, scalar=False) if cfg.reference else source
    test = load_source(cfg.test_pm, scalar=True) if cfg.test_pm else judge
    need_one_vocabulary(cfg.policy, source, {cfg.pm: judge, cfg.reference: pi0, cfg.test_pm: test})
    if cfg.ptx and cfg.ptx_length > source["gpt"]["n_ctx"]:
        raise UserError(f"--ptx-length {cfg.ptx_length}: {cfg.policy} has {source['gpt']['n_ctx']} "
                        "positions")
    tok, kept = loads(source["tokenizer"]), resume or {}

    def model(content, name, scalar=False, device=device):
        weights = {"model": kept[name]} if name in kept else {}
        return unpack({**content, **weights}, device, scalar=scalar)

    beginning = dict(pm=judge, policy=source).get(cfg.critic, judge)
    trained = home(device, cfg.shard)
    m = SimpleNamespace(policy=model(source, "policy", device=trained),
                        reference=model(pi0, "reference").eval(),
                        critic=model(beginning, "critic", True, trained),
                        pm=None if cfg.pm == "gold" else unpack(judge, device).eval(),
                        test_pm=unpack(test, device).eval() if cfg.test_pm else None,
                        ema=model(source, "ema").eval() if cfg.ema else None,
                        first=unpack(pi0, device, scalar=False).eval() if moves(cfg) else None)
    if cfg.critic == "fresh" and "critic" not in kept:
        m.critic.reset(cfg.seed)
    need_separate(m.policy, m.reference)
    for frozen in filter(None, (m.reference, m.pm, m.test_pm, m.ema, m.first)):
        frozen.requires_grad_(False)
    m.policy, m.critic = (prepare(x, cfg.checkpoint, cfg.compile) for x in (m.policy, m.critic))
    return tok, m


def in_score_units(critic, norm):
    """Puts a PM's head into the unit of normalized scores, which the critic foretells: else its
    first values are off by the PM's mean, and all first advantages with them.
    """
    with torch.no_grad():
        critic.score_head.bias.sub_(norm[0]).div_(norm[1])
        critic.score_head.weight.div_(norm[1])


def need_separate(policy, reference):
    """The reference must be another object with storage of its own, or the KL is 0 for ever."""
    owned = {p.data_ptr() for p in policy.parameters()}
    if any(p.data_ptr() in owned for p in reference.parameters()):
        raise ValueError("policy and reference share weights: the reference must be a copy")


def own_critic(cfg):
    """For a trace: critic and state of the policy's own run, where it had one."""
    source = load_source(cfg.policy, scalar=False)
    return {k: source[k] for k in ("critic", "state")} if "critic" in source else None


def served(cfg, m, state):
    """What a finished run is used as: the policy, or its averaged weights, or the weights that the
    held-out PM liked best.
    """
    if state["best"]:
        m.policy.load_state_dict(state["best"]["model"])
    return m.ema if cfg.ema and not state["best"] else m.policy


def save_run(cfg, run, tok, m, state, teams, optimizers, step, batch, finished=False):
    """The checkpoint, and rank 0's last batch (batch.pt). `model` is what others use, as `served`
    has it; all ranks must call it.
    """
    if run.rank == 0:
        keep_batch(cfg, run.dir / "batch.pt", batch)
    (policy, critic), kept = zip(*(x.state(o) for x, o in zip(teams, optimizers, strict=True)))
    if finished and state["best"]:
        policy = state["best"]["model"]
    others = {name: getattr(m, name).state_dict() for name, given in
              (("ema", cfg.ema), ("reference", moves(cfg))) if given}
    model = others["ema"] if finished and cfg.ema and not state["best"] else policy
    run.save(step, finished, **dict(pack(m.policy, tok), model=model), state=state,
             optimizers=list(kept), policy=policy, critic=critic, **others)


def bad_batch(cfg, run, step, batch, error):
    """Keeps a batch whose gradient was not finite and tells what to do."""
    keep_batch(cfg, run.dir / f"bad-batch-{run.rank}.pt", batch)
    return UserError(f"ppo iteration {step + 1}: {error}; the batch is in {run.dir}/bad-batch-RANK"
                     ".pt, ckpt.pt is the last good one; go on with another --out, a lower --lr, "
                     f"--policy {run.dir} and --reference {cfg.reference or cfg.policy}")


# ---------------------------------------------------------------- rates

def rates(cfg, step):
    """Learning rates of policy and critic at an iteration."""
    halved = 0.5 ** (step * cfg.samples // cfg.halve) if cfg.halve else 1.0
    return tuple(halved * schedule(step, cfg.iterations, lr, warmup, shape=cfg.decay)
                 for lr, warmup in ((cfg.lr, cfg.warmup), (cfg.critic_lr, 0)))


def adapted(lambda_kl, kl, target, gain):
    """The coefficient steered to a KL target (Ziegler et al. 2019, 2.2): times
    1 + gain * clip(kl / target - 1, -0.2, 0.2).
    """
    return lambda_kl * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))


# ---------------------------------------------------------------- weights that follow the policy

def moves(cfg):
    """Whether the reference leaves pi0."""
    return bool(cfg.reset or cfg.anchor)


def drift(target, source, decay):
    """Weights of target: decay * target + (1 - decay) * source, in place."""
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.lerp_(new, 1 - decay)


def follow(cfg, m, step):
    """What follows the policy after an iteration: averaged weights, and a reference that moves."""
    if cfg.ema:
        drift(m.ema, m.policy, cfg.ema)
    if cfg.anchor:
        drift(m.reference, m.policy, cfg.anchor)
    if cfg.reset and (step + 1) % cfg.reset == 0:
        drift(m.reference, m.policy, 0.0)


# ---------------------------------------------------------------- snapshots and the end

def progress(row, root):
    """The numbers beside the progress bar."""
    gold = "".join(f" {k} {row[k]:+.2f}" for k in ("gold_helpful", "gold_harmless") if k in row)
    return f"score {row['score']:+.2f} sqrt(KL) {root:.2f}{gold}"


def wanted_snapshots(cfg):
    """The values of --snapshots, rising."""
    try:
        values = sorted(float(x) for x in cfg.snapshots.split(",") if x.strip())
    except ValueError:
        values = [-1.0]
    if not all(0 <= v < math.inf for v in values):
        raise UserError(f"--snapshots {cfg.snapshots}: numbers from 0 with commas between, as in "
                        "0.5,1,2")
    return values


def keep_snapshots(cfg, run, tok, policy, state, root_kl, step):
    """The weights, once the KL's root reaches a value of --snapshots: snapshot-VALUE.pt."""
    for value in wanted_snapshots(cfg):
        if value <= root_kl and value not in state["taken"]:
            state["taken"].append(value)
            if run.rank == 0:
                save_checkpoint(run.dir / f"snapshot-{value:g}.pt", step=step, sqrt_kl=root_kl,
                                **pack(policy, tok))


def snapshots_of(folder):
    """Paths of a run's snapshots, the nearest to its start first."""
    return sorted(Path(folder).glob("snapshot-*.pt"), key=lambda path: float(path.stem[9:]))


def is_over(cfg, state, policy, step, score):
    """Early stopping: keeps the policy whose mean test_pm over `patience` iterations is the best so
    far; true once none of the last `patience` iterations was better.
    """
    if not cfg.patience:
        return False
    state["tests"] = [*state["tests"], score][-cfg.patience:]
    mean = sum(state["tests"]) / cfg.patience
    if len(state["tests"]) == cfg.patience and (not state["best"] or mean > state["best"]["mean"]):
        weights = {k: v.clone() for k, v in policy.state_dict().items()}
        state["best"] = dict(mean=mean, step=step, model=weights)
    return bool(state["best"]) and step - state["best"]["step"] >= cfg.patience
