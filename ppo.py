"""Stage 3: reinforcement learning from human feedback with PPO (HH 4, B.1; InstructGPT 3.5, eq. 2).

The policy answers prompts; the preference model (PM) scores the answers; a per-token KL penalty
holds the policy near the distilled model pi0 that it starts from. For response tokens y_1 .. y_n

    r_t = -lambda_kl * ( log pi(y_t) - log pi0(y_t) )  +  [t = n] * score              (HH 4.1)
    A_t = sum_k (gamma lam)^k delta_{t+k},  delta_t = r_t + gamma V_{t+1} - V_t        (GAE)
    L   = -mean_t min( rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ),  rho = pi / pi_old
          - ptx * mean_t log pi(x_t) on text like the base model's                     (eq. 2)

Each iteration: 1. sample, 2. score, 3. compare with the reference, 4. advantages, 5. update.
The lines that matter: `rewards_of`, `gae`, `whiten`, `policy_loss`, `value_loss`; what the KL does
as a loss, docs/kl.md. Where the default is another than the paper's, the comment says so.

    python ppo.py --policy out/laptop/distill --pm out/laptop/pm --out out/laptop/ppo
    torchrun --nproc_per_node=2 ppo.py --policy out/laptop/distill --pm out/laptop/pm  # the same
    python ppo.py --trace --policy out/laptop/ppo --reference out/laptop/distill \
                  --pm out/laptop/pm                        # one answer as a table, token by token

About 1.5 minutes on two cores: gold helpfulness up by 0.6 or more, harmlessness by 1.2 or more.
"""

import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from common import Run, adamw, entry, highest, keyed, mine, start, total, uniforms, update
from control import (adapted, bad_batch, check, follow, in_score_units, is_over, keep_snapshots,
                     load_models, moves, own_critic, progress, rates, save_run, served)
from model import by_length, pad_rows, response_mask
from parallel import Team, even, passes, portions
from pretrain import lm_loss, mixture, show, shown_for
from prompts import asker
from rollout import (at_response, exact_kl, kl_estimates, normalized, over_rows, pm_scores,
                     policy_logprobs, rollout, samples, summary, trace)


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill"  # checkpoint to start from
    reference: str = ""                # checkpoint of pi0; empty: a frozen copy of policy
    pm: str = "out/laptop/pm"          # the preference model; gold: the toy utility, a control
    test_pm: str = ""                  # a PM that was held out: scored and logged, never a reward
    out: str = "out/laptop/ppo"        # the stage's folder
    iterations: int = 30               # rounds of sampling and updating
    samples: int = 128                 # prompts in an iteration, one answer each
    prompts: str = ""                  # collected prompts, .jsonl by commas; "": the toy world's
    generated: str = ""                # model-generated prompts (prompts.py), .jsonl by commas
    mix: float = 0.5                   # share of generated prompts, where there are any (HH: 0.73)
    helpful: float = 0.6               # share of helpful prompts, the rest is harmful
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # of sampling, and of both sides of the ratio
    epochs: int = 2                    # passes over an iteration's samples (K of HH B.1: 1, 2, 4)
    minibatch: int = 64                # samples in an optimizer step
    micro: int = 32                    # samples in one forward pass, like lengths together
    lr: float = 1e-4                   # policy's learning rate
    critic_lr: float = 3e-4            # critic's learning rate, without warm-up
    warmup: int = 5                    # iterations of linear warm-up (InstructGPT: 10)
    decay: str = "constant"            # of both rates, after warm-up: constant, or linear to 0
    halve: int = 0                     # answers after which both rates halve, again and again
    kl: str = "reward"                 # where the KL stands: reward (k1), k2, k3 (losses), none
    lambda_kl: float = 0.03            # KL penalty, in normalized score per nat (HH: 0.001)
    kl_target: float = 0.0             # nats an answer that lambda_kl is steered to; 0: constant
    kl_gain: float = 0.1               # of that steering, an iteration
    gamma: float = 1.0                 # discount (HH B.1: 1)
    lam: float = 0.95                  # lambda of GAE
    clip: float = 0.2                  # epsilon of the ratio's clipping (HH B.1)
    value_clip: float = 0.2            # epsilon of the value's clipping; 0: none
    critic: str = "pm"                 # where it starts: pm, policy (with a new head), or fresh
    calibrate: int = 256               # first answers that give the score mean 0, spread 1; 0: raw
    cap: float = 0.0                   # normalized scores are held within +- this; 0: free
    unfinished: float = 1.0            # subtracted from the score of an answer with no end of turn
    ptx: float = 0.0                   # gamma of PPO-ptx, on mean nats a token (InstructGPT: 27.8)
    ptx_ratio: int = 1                 # texts for each answer and pass (InstructGPT: 8)
    ptx_length: int = 64               # tokens of such a text at most
    ptx_text: str = ""                 # their .txt and .jsonl files, by commas; "": toy world
    ema: float = 0.0                   # decay an iteration of averaged weights, kept at the end
    reset: int = 0                     # iterations after which pi0 becomes the policy; 0: never
    anchor: float = 0.0                # decay an iteration with which pi0 follows the policy; 0: no
    snapshots: str = ""                # sqrt(KL) values by commas: weights are kept at each
    patience: int = 0                  # iterations without a better mean test_pm: the best is kept
    seed: int = 0                      # of prompts, answers and order
    every: int = 10                    # iterations between samples and checkpoints
    trace: bool = False                # print one rollout as a table, then stop
    shard: bool = False                # cut weights and optimizer over the processes: less memory
    checkpoint: bool = False           # compute blocks again in the backward pass: less memory
    compile: bool = False              # torch.compile of the blocks: a minute to start, for GPUs
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics
# All are [B, R]: B answers, R response tokens, mask True at real tokens; the rest is never read.

def rewards_of(logp, ref, mask, scores, lambda_kl):
    """Token rewards: -lambda_kl * k1 at each response token, the score [B] at the last (HH 4.1)."""
    rewards = torch.where(mask, -lambda_kl * (logp - ref), 0.0)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # none in an empty answer
    return rewards + torch.where(last, scores[:, None], 0.0)


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Advantages and returns (advantage + value), [B, R]; the value after the last token is 0."""
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    running = following = torch.zeros_like(rewards[:, 0])         # A_{t+1}, V_{t+1}
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, 0.0)
        advantages[:, t], following = running, values[:, t]
    return advantages, torch.where(mask, advantages + values, 0.0)


def moments(x, mask, summed=total):
    """Mean and population spread (at least 1e-8) over valid tokens of all ranks; `summed` adds up
    over ranks.
    """
    x, mask = torch.where(mask, x, 0.0).cpu().double(), mask.cpu()   # float64, which mps lacks
    count, first = summed(mask.sum(), x.sum())
    mean = first / max(count, 1)
    square = summed(torch.where(mask, (x - mean) ** 2, 0.0).sum())
    return mean, max((square / max(count, 1)) ** 0.5, 1e-8)


def whiten(x, mask, mean, spread):
    """Mean 0, variance 1 over valid tokens, given their moments."""
    return torch.where(mask, (x - mean) / spread, 0.0).float()


def policy_loss(logp, old, advantages, mask, clip):
    """Sum over tokens of PPO's clipped loss, and how many tokens the clip holds back."""
    ratio = torch.where(mask, logp - old, 0.0).exp()
    advantages = torch.where(mask, advantages, 0.0)
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    loss = torch.where(mask, -torch.minimum(plain, clipped), 0.0).sum()
    return loss, ((clipped < plain) & mask).sum()


def kl_loss(kind, logp, ref, mask):
    """Sum over tokens of k2 or k3 as a loss, 0 for other kinds. Only k2's gradient is that of the
    KL to pi0, token by token; k3's is that of KL(pi0 || pi) (docs/kl.md).
    """
    if kind not in ("k2", "k3"):
        return 0.0
    logp, ref = (torch.where(mask, x, 0.0) for x in (logp, ref))
    return kl_estimates(logp, ref)[1 if kind == "k2" else 2].sum()       # 0 where both are 0


def value_loss(values, old, returns, mask, clip):
    """Sum over tokens of squared error / 2, the worse of the value and its clipped self (clip 0:
    the value's own).
    """
    values, old, returns = (torch.where(mask, x, 0.0) for x in (values, old, returns))
    near = old + (values - old).clamp(-clip, clip) if clip else values
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


# ---------------------------------------------------------------- data

def critic_values(critic, rows, starts, R):
    """V [B, R]: that of response token j is read one position before it, where it is chosen."""
    ids, sizes = pad_rows(rows, 0, critic.device)
    before = response_mask(starts - 1, sizes - starts, ids.shape[1])
    values = torch.zeros(ids.shape, device=ids.device)
    read = critic.score(critic(ids, sizes, at=before))
    return at_response(values.masked_scatter(before, read), starts - 1, R)


def advantages_of(cfg, batch, critic, lambda_kl):
    """Step 4: the rollout with its values, rewards, returns and advantages (`spread` is theirs
    before they were whitened).
    """
    mask, logp = batch["mask"], batch["logp"]
    values = over_rows(lambda rows, starts, *_: critic_values(critic, rows, starts, cfg.new), cfg,
                       batch)
    rewards = rewards_of(logp, batch["ref"], mask, batch["score"],
                         lambda_kl if cfg.kl == "reward" else 0.0)
    plain, returns = gae(rewards, values, mask, cfg.gamma, cfg.lam)
    mean, spread = moments(plain, mask)
    return dict(batch, values=torch.where(mask, values, 0.0), rewards=rewards, returns=returns,
                advantages=whiten(plain, mask, mean, spread), plain=plain, spread=spread,
                lambda_kl=lambda_kl)


# ---------------------------------------------------------------- train

def policy_part(policy, cfg, batch, some):
    """The policy's loss over some rows, summed over tokens; clipped tokens; largest |log ratio|."""
    rows, mask, old = [batch["rows"][i] for i in some], batch["mask"][some], batch["logp"][some]
    logp = policy_logprobs(policy, rows, batch["starts"][some], batch["lengths"][some], cfg.new,
                           cfg.temperature)
    loss, held = policy_loss(logp, old, batch["advantages"][some], mask, cfg.clip)
    loss = loss + (batch["lambda_kl"] / batch["spread"]      # the unit of whitened advantages
                   * kl_loss(cfg.kl, logp, batch["ref"][some], mask))
    return loss, held, torch.where(mask, logp.detach() - old, 0.0).abs().max()


def critic_part(critic, cfg, batch, some):
    """The critic's loss over some rows, summed over tokens."""
    values = critic_values(critic, [batch["rows"][i] for i in some], batch["starts"][some], cfg.new)
    return value_loss(values, batch["values"][some], batch["returns"][some], batch["mask"][some],
                      cfg.value_clip)


def micro_batch(cfg, batch, some, teams, count, weight=1.0):
    """Gradients of both losses over some rows, summed over their tokens / count. Returns (clipped
    tokens, tokens, critic's loss, largest |log ratio|), all times weight.
    """
    loss, held, ratio = teams[0](policy_part, cfg, batch, some)
    (weight * loss / count).backward()
    v_loss = teams[1](critic_part, cfg, batch, some)
    (weight * v_loss / count).backward()
    return [weight * x.item() for x in (held, batch["mask"][some].sum(), v_loss, ratio)]


def ptx_batch(cfg, tok, team, texts, count):
    """Gradients of ptx * mean nats a token of all ranks' texts; this rank's share of that mean. The
    policy's other losses come after them: there the ranks' gradients are summed.
    """
    summed = 0.0
    for some, weight in passes(portions(texts, cfg.micro), team, end=False):
        loss = weight * team(lm_loss, *pad_rows(some, tok.pad, team.model.device))
        (cfg.ptx * loss / count).backward()
        summed += loss.item() / count
    return summed


def shares(cfg, batch, own, taken, step, world_size):
    """This rank's micro-batches of a minibatch, numbers of its rows, with weights (parallel.py)."""
    local = [j for j, r in enumerate(own) if r in taken]
    most = max(Counter((r - step * cfg.samples) % world_size for r in taken).values())
    parts = by_length([batch["rows"][j] for j in local], cfg.micro)
    return local, even([[local[j] for j in part] for part in parts], -(-most // cfg.micro), [0])


def improve(cfg, tok, batch, own, step, teams, optimizers, mix=None):
    """Step 5: K passes of PPO over an iteration's rollout, in minibatches cut from all ranks' rows.

    Returns its metrics. FloatingPointError on all ranks if a gradient is not finite.
    """
    held, seen, v_loss, ptx, first_ratio = 0.0, 0.0, 0.0, 0.0, 0.0
    updates, per_epoch = cfg.epochs * cfg.samples // cfg.minibatch, cfg.samples // cfg.minibatch
    lrs = rates(cfg, step)
    for k in range(updates):
        epoch, i = divmod(k, per_epoch)
        order = keyed(cfg.seed, "ppo", step, epoch).permutation(cfg.samples)
        taken = {step * cfg.samples + int(r)
                 for r in order[i * cfg.minibatch:(i + 1) * cfg.minibatch]}
        local, parts = shares(cfg, batch, own, taken, step, teams[0].world)
        count = total(batch["mask"][local].sum())                        # tokens of all ranks
        if mix:
            texts = cfg.minibatch * cfg.ptx_ratio
            begin = (step * updates + k) * texts
            ptx += ptx_batch(cfg, tok, teams[0], *mix(range(begin, begin + texts))) / updates
        for some, weight in passes(parts, *teams):
            found = micro_batch(cfg, batch, some, teams, count, weight)
            held, seen, v_loss = held + found[0], seen + found[1], v_loss + found[2]
            first_ratio = max(first_ratio, found[3]) if k == 0 else first_ratio
        norms = [update(x.model, o, lr) for x, o, lr in zip(teams, optimizers, lrs)]
        if not math.isfinite(sum(norms)):
            raise FloatingPointError(f"gradient norm of the policy {norms[0]}, of the critic "
                                     f"{norms[1]}")
    held, seen, v_loss, ptx = total(held, seen, v_loss, ptx)
    return dict(clip_fraction=held / seen, value_loss=v_loss / seen, grad_norm=norms[0],
                critic_norm=norms[1], lr=lrs[0], first_log_ratio=highest(first_ratio),
                **(dict(ptx_loss=ptx) if mix else {}))


def scored(cfg, tok, m, ask, rows, stage, state, exact=False):
    """Steps 1 to 3: a rollout of these rows, and what else is known about it."""
    uniform = uniforms(rows, cfg.new, cfg.seed, stage)
    batch = rollout(cfg, tok, m.policy, m.reference, m.pm, *ask(rows, stage), uniform,
                    state["norm"])
    if m.test_pm:
        raw = pm_scores(m.test_pm, tok, batch["rows"], cfg.micro)
        batch["test_pm"] = normalized(raw, state["test_norm"])
    if m.first:
        batch["start"] = over_rows(partial(policy_logprobs, m.first), cfg, batch)
    if exact:
        batch["exact"] = over_rows(partial(exact_kl, m.policy, m.reference), cfg, batch)
    return batch


@contextlib.contextmanager
def reading(m, teams):
    """m with whole models, for what takes no gradients; all ranks must come here."""
    with teams[0].whole() as policy, teams[1].whole() as critic:
        yield SimpleNamespace(**{**vars(m), "policy": policy, "critic": critic})


def beginning(cfg, rank, world_size, sample):
    """The state of a fresh run: what is saved beside weights. PMs are calibrated on the first
    policy's answers: mean 0, spread 1.
    """
    state = dict(norm=(0.0, 1.0), test_norm=(0.0, 1.0), lambda_kl=cfg.lambda_kl, taken=[], tests=[],
                 best=None)
    if cfg.calibrate:
        batch = sample(mine(range(cfg.calibrate), rank, world_size), "calibrate", state)
        for name, key in (("norm", "raw"), ("test_norm", "test_pm")):
            if key in batch:
                every = torch.ones_like(batch[key], dtype=torch.bool)
                state[name] = moments(batch[key], every)
        if rank == 0:
            print("ppo: PM score on the first policy's answers {:+.3f}, spread {:.3f}".format(
                *state["norm"]))
    return state


def iteration(cfg, run, tok, m, teams, ask, own, state, step):
    """Steps 1 to 4: a batch, its metrics, the KL's root, and whether this is the last iteration."""
    exact = step + 1 == cfg.iterations or (step + 1) % cfg.every == 0
    with reading(m, teams) as seen:
        batch = scored(cfg, tok, seen, ask, own, "rl", state, exact)             # 1. 2. 3.
        batch = advantages_of(cfg, batch, seen.critic, state["lambda_kl"])       # 4.
        row = summary(batch)
        root = max(row.get("kl_start", row["kl"]), 0) ** 0.5
        keep_snapshots(cfg, run, tok, seen.policy, state, root, step)
        return batch, row, root, is_over(cfg, state, seen.policy, step, row.get("test_pm"))


def told(cfg, tok, m, teams, ask, state):
    """One answer as a table."""
    with reading(m, teams) as seen:
        batch = scored(cfg, tok, seen, ask, range(1), "trace", state)
        print(trace(tok, advantages_of(cfg, batch, seen.critic, state["lambda_kl"])))


def train(cfg):
    rank, world_size, device = start(cfg.device)
    check(cfg, world_size)
    run = None if cfg.trace else Run(cfg, "ppo", rank)
    if run and run.finished:
        return print(f"ppo: {run.dir} is finished, skipped") if rank == 0 else None
    resume = run.resume if run else own_critic(cfg)
    tok, m = load_models(cfg, device, resume)
    readers = filter(None, (m.policy, m.reference, m.pm, m.test_pm))
    room = min(x.config.n_ctx for x in readers) - cfg.new - 1
    ask = asker(cfg, tok, room, rank)
    mix = mixture(cfg, tok) if cfg.ptx else None
    teams = Team(m.policy, cfg.shard, device), Team(m.critic, cfg.shard, device)
    with reading(m, teams) as seen:
        sample = partial(scored, cfg, tok, seen, ask)
        state = resume["state"] if resume else beginning(cfg, rank, world_size, sample)
    if not resume and cfg.critic == "pm":
        in_score_units(m.critic, state["norm"])
    if cfg.trace:
        return told(cfg, tok, m, teams, ask, state)
    optimizers = adamw(m.policy, cfg.lr), adamw(m.critic, cfg.critic_lr)
    for team, optimizer, old in zip(teams, optimizers, resume["optimizers"] if resume else []):
        team.load(optimizer, old)
    save = partial(save_run, cfg, run, tok, m, state, teams, optimizers)

    bar = run.bar(cfg.iterations, run.step)
    for step in range(run.step, cfg.iterations):
        own = mine(range(step * cfg.samples, (step + 1) * cfg.samples), rank, world_size)
        batch, row, root, over = iteration(cfg, run, tok, m, teams, ask, own, state, step)
        m.policy.train()
        try:
            done = improve(cfg, tok, batch, own, step, teams, optimizers, mix)   # 5.
        except FloatingPointError as error:                                      # on every rank
            raise bad_batch(cfg, run, step, batch, error) from None
        run.log(step, **row, **done, lambda_kl=state["lambda_kl"])
        if cfg.ema or moves(cfg):
            with reading(m, teams) as seen:
                follow(cfg, seen, step)
        if cfg.kl_target:
            state["lambda_kl"] = adapted(state["lambda_kl"], row["kl"], cfg.kl_target, cfg.kl_gain)
        bar.set_postfix_str(progress(row, root), refresh=False)
        bar.update()
        if over or step + 1 == cfg.iterations:
            break
        if (step + 1) % cfg.every == 0:
            save(step + 1, batch)
            samples(run, step + 1, batch)
        elif run.stopping():
            save(step + 1, batch)
            raise KeyboardInterrupt
    bar.close()
    if over and rank == 0:
        run.say(f"ppo: stopped after iteration {step + 1}; kept is the policy of "
                f"{state['best']['step'] + 1}, which the held-out PM liked best")
    with reading(m, teams) as seen:
        if rank == 0:
            kept, shown = served(cfg, seen, state), shown_for(cfg.prompts)
            show(run, kept, tok, cfg.seed, "ppo done:", shown=shown)
    save(step + 1, batch, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
