"""Stage 3: reinforcement learning from human feedback with PPO (HH 4, B.1; InstructGPT 3.5, eq. 2).

The policy answers prompts; the preference model (PM) scores the answers; a per-token KL penalty
holds the policy near the distilled model pi0 that it starts from. For response tokens y_1 .. y_n

    r_t = -lambda_kl * ( log pi(y_t) - log pi0(y_t) )  +  [t = n] * score              (HH 4.1)
    A_t = sum_k (gamma lam)^k delta_{t+k},  delta_t = r_t + gamma V_{t+1} - V_t        (GAE)
    L   = -mean_t min( rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ),  rho = pi / pi_old

Each iteration: 1. sample, 2. score, 3. compare with the reference, 4. advantages, 5. update.
The lines that matter: `rewards_of`, `gae`, `whiten`, `policy_loss`, `value_loss`.

    python ppo.py --policy out/laptop/distill --pm out/laptop/pm --out out/laptop/ppo
    torchrun --nproc_per_node=2 ppo.py --policy out/laptop/distill --pm out/laptop/pm  # the same
    python ppo.py --trace --policy out/laptop/ppo --reference out/laptop/distill \
                  --pm out/laptop/pm                        # one answer as a table, token by token

About 1.5 minutes on two cores: gold helpfulness up by 0.6 or more, harmlessness by 1.2 or more.
"""

from dataclasses import dataclass

import torch

from common import (Run, UserError, adamw, entry, keyed, load_source, mine, prepare, start, total,
                    uniforms, update)
from data import world
from data.tokenizer import loads
from model import AUTOCAST, by_length, generate, pack, pad_rows, response_mask, unpack
from pretrain import show


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill"  # checkpoint to start from
    reference: str = ""                # checkpoint of pi0; empty: a frozen copy of policy
    pm: str = "out/laptop/pm"          # checkpoint of the preference model; the critic starts there
    out: str = "out/laptop/ppo"        # the stage's folder
    iterations: int = 30               # rounds of sampling and updating
    samples: int = 128                 # prompts in an iteration, one answer each
    helpful: float = 0.6               # share of helpful prompts, the rest is harmful
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # of sampling, and of both sides of the ratio
    epochs: int = 2                    # passes over an iteration's samples (K of HH B.1)
    minibatch: int = 64                # samples in an optimizer step
    micro: int = 32                    # samples in one forward pass, like lengths together
    lr: float = 1e-4                   # policy's learning rate, after warm-up constant
    critic_lr: float = 3e-4            # critic's learning rate
    warmup: int = 5                    # iterations of linear warm-up
    lambda_kl: float = 0.03            # KL penalty, in units of normalized score per nat
    gamma: float = 1.0                 # discount (HH B.1: 1)
    lam: float = 0.95                  # lambda of GAE
    clip: float = 0.2                  # epsilon of the ratio's and the value's clipping (HH B.1)
    unfinished: float = 1.0            # subtracted from the score of an answer with no end of turn
    calibrate: int = 256               # first answers that give the score mean 0, spread 1; 0: raw
    seed: int = 0                      # of prompts, answers and order
    every: int = 10                    # iterations between samples and checkpoints
    trace: bool = False                # print one rollout as a table, then stop
    checkpoint: bool = False           # compute blocks again in the backward pass: less memory
    compile: bool = False              # torch.compile of the blocks: a minute to start, for GPUs
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics
# All are [B, R]: B answers, R response tokens, mask True at real tokens; the rest is never read.

def kl_estimates(logp, ref):
    """Per-token estimates of KL(pi || pi0) from tokens drawn from pi, with d = log pi - log pi0:

    k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d. All three are [B, R], in nats.
    """
    d = logp - ref
    return d, d * d / 2, torch.expm1(-d) + d


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


def whiten(x, mask, summed=total):
    """Mean 0, population variance 1 over valid tokens of all ranks; `summed` adds over ranks."""
    device = x.device
    x, mask = torch.where(mask, x, 0.0).cpu().double(), mask.cpu()   # float64, which mps lacks
    count, first = summed(mask.sum(), x.sum())
    mean = first / max(count, 1)
    square = summed(torch.where(mask, (x - mean) ** 2, 0.0).sum())
    spread = max((square / max(count, 1)) ** 0.5, 1e-8)
    return torch.where(mask, (x - mean) / spread, 0.0).float().to(device)


def policy_loss(logp, old, advantages, mask, clip):
    """Sum over tokens of PPO's clipped loss, and how many tokens the clip holds back."""
    ratio = torch.where(mask, logp - old, 0.0).exp()
    advantages = torch.where(mask, advantages, 0.0)
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    loss = torch.where(mask, -torch.minimum(plain, clipped), 0.0).sum()
    return loss, ((clipped < plain) & mask).sum()


def value_loss(values, old, returns, mask, clip):
    """Sum over tokens of squared error / 2, the worse of the value and its clipped self."""
    values, old, returns = (torch.where(mask, x, 0.0) for x in (values, old, returns))
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


# ---------------------------------------------------------------- data

def prompts_of(cfg, tok, rows, stage="rl"):
    """Dialogues that end with a request, and their ids, each a function of (seed, row)."""
    turns = [world.prompt(f"{stage}/{cfg.seed}", r, world.TRAIN, p_harm=1 - cfg.helpful)
             for r in rows]
    return turns, [tok.render(t, answer=True) for t in turns]


def at_response(x, starts, R):
    """x [B, T] -> [B, R]: position starts + j at column j; what is past a row's end, masks hide."""
    index = starts[:, None] + torch.arange(R, device=x.device)
    return x.gather(1, index.clamp(max=x.shape[1] - 1))


def policy_logprobs(model, rows, starts, lengths, R, temperature=1.0):
    """log pi of each response token [B, R] of rows (lists prompt + response)."""
    ids, sizes = pad_rows(rows, 0, model.device)
    mask = response_mask(starts, lengths, ids.shape[1])
    return at_response(model.logprobs(ids, mask, temperature, sizes), starts, R)


def critic_values(critic, rows, starts, R):
    """V [B, R]: that of response token j is read one position before it, where it is chosen."""
    ids, sizes = pad_rows(rows, 0, critic.device)
    before = response_mask(starts - 1, sizes - starts, ids.shape[1])
    values = torch.zeros(ids.shape, device=ids.device)
    read = critic.score(critic(ids, sizes, at=before))
    return at_response(values.masked_scatter(before, read), starts - 1, R)


@torch.no_grad()
def pm_scores(pm, tok, rows, micro=32):
    """PM score [B] of rows (prompt + response), read at an <|eoc|> appended, finished or not."""
    out = torch.empty(len(rows), device=pm.device)
    for some in by_length(rows, micro):
        ids, lengths = pad_rows([rows[i] + [tok.eoc] for i in some], tok.pad, pm.device)
        out[some] = pm.score(pm(ids, lengths, at=(torch.arange(len(some)), lengths - 1)))
    return out


# ---------------------------------------------------------------- rollouts

@torch.no_grad()
def rollout(cfg, tok, policy, reference, critic, pm, dialogues, prompts, uniform, norm):
    """Sample and score one batch of answers. `norm` (mean, spread) gives every PM the same unit.

    Returns a dict of [B, R] tensors (logp, ref, values, mask), [B] ones (raw PM score, score,
    lengths, starts, finished) and lists (dialogues, texts, rows of ids).
    """
    policy.eval()
    tokens, lengths, old = generate(policy, prompts, cfg.new, uniform, stops=tok.stops,
                                    temperature=cfg.temperature, pad=tok.pad)        # 1. sample
    answers = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    starts = torch.tensor([len(p) for p in prompts], device=policy.device)
    finished = torch.tensor([row[-1] == tok.eot for row in rows], device=policy.device)
    raw = pm_scores(pm, tok, rows)                                                   # 2. score
    score = (raw - norm[0]) / norm[1] - cfg.unfinished * (~finished).float()
    logp, ref, values = old.clone(), torch.zeros_like(old), torch.zeros_like(old)
    for some in by_length(rows, cfg.micro):                                          # 3. compare
        part = [rows[i] for i in some]
        told = part, starts[some], lengths[some], cfg.new, cfg.temperature
        ref[some] = policy_logprobs(reference, *told)
        if policy.device.type in AUTOCAST:   # the sampler's bf16 rounds otherwise than the scorer's
            logp[some] = policy_logprobs(policy, *told)
        values[some] = critic_values(critic, *told[:2], cfg.new)
    mask = response_mask(torch.zeros_like(lengths), lengths, cfg.new)
    return dict(dialogues=dialogues, texts=[tok.decode(a).strip() for a in answers], rows=rows,
                starts=starts, lengths=lengths, mask=mask, logp=logp, ref=ref, finished=finished,
                values=torch.where(mask, values, 0.0), raw=raw, score=score)


def advantages_of(cfg, batch):
    """The rollout with its rewards, advantages (not yet whitened) and returns."""
    mask, values = batch["mask"], batch["values"]
    rewards = rewards_of(batch["logp"], batch["ref"], mask, batch["score"], cfg.lambda_kl)
    advantages, returns = gae(rewards, values, mask, cfg.gamma, cfg.lam)
    return dict(batch, rewards=rewards, advantages=advantages, returns=returns)


def calibration(cfg, sample, rank, world_size, device):
    """Mean and spread of the PM's score on the first policy's answers; (0, 1) leaves it raw."""
    if not cfg.calibrate:
        return 0.0, 1.0
    rows = mine(range(cfg.calibrate), rank, world_size)
    raw = sample(rows, "calibrate", (0.0, 1.0))["raw"].cpu().double()
    first, second = total(raw.sum(), (raw ** 2).sum(), device=device)
    mean = first / cfg.calibrate
    spread = max((second / cfg.calibrate - mean ** 2) ** 0.5, 1e-6)
    if rank == 0:
        print(f"ppo: PM score on the first policy's answers {mean:+.3f}, spread {spread:.3f}")
    return mean, spread


# ---------------------------------------------------------------- evaluate

def gold_of(batch):
    """Gold of each answer on its prompt's objective, whether that is helpfulness. For the log."""
    requests = [world.request_of(t) for t in batch["dialogues"]]
    golds = [world.gold(r, a)[r.harmful] for r, a in zip(requests, batch["texts"], strict=True)]
    return golds, [not r.harmful for r in requests]


def summary(batch, device):
    """Means over the iteration's answers of all ranks. Formulas:

    kl mean over answers of sum_t (log pi - log pi0); kl_k3 the same of k3; entropy mean over
    tokens of -log pi; explained 1 - mean (return - value)^2 / variance of returns; *_helpful and
    *_harmless over the prompts of that kind; unfinished, refused_helpful shares of answers.
    """
    golds, helpful = gold_of(batch)
    refused = torch.tensor([world.refuses(world.request_of(t), a)
                            for t, a in zip(batch["dialogues"], batch["texts"], strict=True)])
    h, gold, pm = torch.tensor(helpful, dtype=torch.bool), torch.tensor(golds), batch["raw"]
    mask, returns, every = batch["mask"], batch["returns"], torch.ones_like(h)
    k1, _, k3 = (torch.where(mask, k, 0.0) for k in kl_estimates(batch["logp"], batch["ref"]))
    left = torch.where(mask, returns - batch["values"], 0.0)
    over = dict(score=(batch["score"], every), pm=(pm, every), kl=(k1.sum(1), every),
                kl_k3=(k3.sum(1), every), length=(mask.sum(1), every),
                unfinished=(~batch["finished"], every), refused_helpful=(refused, h),
                pm_helpful=(pm, h), pm_harmless=(pm, ~h), gold_helpful=(gold, h),
                gold_harmless=(gold, ~h))                                # what, over which answers
    *sums, tokens, nats, error, first, second = total(
        *(x for what, of in over.values() for x in (what.cpu()[of].sum(), of.sum())), mask.sum(),
        -torch.where(mask, batch["logp"], 0.0).sum(), (left ** 2).sum(), returns.sum(),
        (returns ** 2).sum(), device=device)
    means = {k: x / max(n, 1) for k, x, n in zip(over, sums[::2], sums[1::2])}
    variance = second / tokens - (first / tokens) ** 2
    return dict(means, entropy=nats / tokens, explained=1 - error / tokens / max(variance, 1e-8))


def samples(run, step, batch, count=3):
    """Three answers with PM score, KL and gold."""
    golds, _ = gold_of(batch)
    kl = torch.where(batch["mask"], batch["logp"] - batch["ref"], 0.0).sum(1)
    run.say(f"\nppo iteration {step}:")
    for i in range(min(count, len(golds))):
        run.say(f"  {batch['dialogues'][i][-1][1]}\n    -> {batch['texts'][i]}   "
                f"[score {batch['score'][i]:+.2f} KL {kl[i]:.2f} gold {golds[i]:+.2f}]")


def trace(tok, batch, row=0):
    """One rollout as text: each token's log-probs, KL, reward, value, advantage and return."""
    columns = ("logp", "ref", "rewards", "values", "advantages", "returns")
    heads = ("log pi", "log pi0", "KL (k1)", "reward", "value", "advantage", "return")
    lines = [f"prompt: {batch['dialogues'][row][-1][1]}", f"answer: {batch['texts'][row]}",
             f"PM score {batch['raw'][row]:+.3f}, normalized {batch['score'][row]:+.3f}", "",
             f"{'token':>12}" + "".join(f"{h:>10}" for h in heads)]
    first, length = int(batch["starts"][row]), int(batch["lengths"][row])
    for j in range(length):
        lp, ref, *rest = (batch[c][row, j].item() for c in columns)
        lines.append(f"{tok.show(batch['rows'][row][first + j]):>12}"
                     + "".join(f"{v:10.3f}" for v in (lp, ref, lp - ref, *rest)))
    kl = (batch["logp"] - batch["ref"])[row, :length].sum()
    return "\n".join([*lines, f"{'sum':>12}{'':>20}{kl:10.3f}{batch['rewards'][row].sum():10.3f}"])


# ---------------------------------------------------------------- train

def load_models(cfg, device, resume=None):
    """tok, policy, reference, critic, pm. The reference is a copy that shares nothing."""
    source, judge = load_source(cfg.policy, scalar=False), load_source(cfg.pm, scalar=True)
    anchor = load_source(cfg.reference, scalar=False) if cfg.reference else source
    for path, other in ((cfg.pm, judge), (cfg.reference, anchor)):
        if source["tokenizer"] != other["tokenizer"]:
            raise UserError(f"{cfg.policy} and {path} have different vocabularies: "
                            "both must come from one base model")
    policy = unpack(resume or source, device, scalar=False)
    reference, pm = unpack(anchor, device, scalar=False).eval(), unpack(judge, device).eval()
    need_separate(policy, reference)
    for frozen in (reference, pm):
        frozen.requires_grad_(False)
    critic = unpack(dict(judge, model=resume["critic"]) if resume else judge, device)
    policy, critic = (prepare(m, cfg.checkpoint, cfg.compile) for m in (policy, critic))
    return loads(source["tokenizer"]), policy, reference, critic, pm


def need_separate(policy, reference):
    """The reference must be another object with storage of its own, or the KL is 0 for ever."""
    owned = {p.data_ptr() for p in policy.parameters()}
    if any(p.data_ptr() in owned for p in reference.parameters()):
        raise ValueError("policy and reference share weights: the reference must be a copy")


def improve(cfg, batch, own, step, policy, critic, optimizers, device):
    """Step 5: K passes of PPO over an iteration's rollout, in minibatches cut from all ranks' rows.

    Returns the sums (clipped tokens, tokens, critic's loss), the largest |log ratio| before the
    first update (0 to rounding), and the gradient norms of the last update.
    """
    clipped = seen = critic_sum = first_ratio = 0.0
    warm = min(1.0, (step + 1) / max(cfg.warmup, 1))
    for epoch in range(cfg.epochs):
        order = keyed(cfg.seed, "ppo", step, epoch).permutation(cfg.samples)
        for i in range(0, cfg.samples, cfg.minibatch):
            taken = {step * cfg.samples + int(r) for r in order[i:i + cfg.minibatch]}
            local = [j for j, r in enumerate(own) if r in taken]
            count = total(batch["mask"][local].sum(), device=device)     # tokens of all ranks
            for chunk in by_length([batch["rows"][j] for j in local], cfg.micro):
                some = [local[j] for j in chunk]
                rows, starts = [batch["rows"][j] for j in some], batch["starts"][some]
                mask, old = batch["mask"][some], batch["logp"][some]
                logp = policy_logprobs(policy, rows, starts, batch["lengths"][some], cfg.new,
                                       cfg.temperature)
                loss, held = policy_loss(logp, old, batch["advantages"][some], mask, cfg.clip)
                (loss / count).backward()
                v_loss = value_loss(critic_values(critic, rows, starts, cfg.new),
                                    batch["values"][some], batch["returns"][some], mask, cfg.clip)
                (v_loss / count).backward()
                if epoch == i == 0:
                    ratio = torch.where(mask, logp - old, 0.0).abs().max().item()
                    first_ratio = max(first_ratio, ratio)
                clipped, seen = clipped + held.item(), seen + mask.sum().item()
                critic_sum += v_loss.item()
            norms = (update(policy, optimizers[0], warm * cfg.lr),
                     update(critic, optimizers[1], cfg.critic_lr))
    return (clipped, seen, critic_sum), first_ratio, norms


def train(cfg):
    rank, world_size, device = start(cfg.device)
    if cfg.samples % cfg.minibatch:
        raise UserError(f"--samples {cfg.samples} is not divisible by --minibatch {cfg.minibatch}")
    if world_size > min(cfg.samples, cfg.calibrate or cfg.samples):
        raise UserError(f"{world_size} processes need that many --samples and --calibrate")
    run = None if cfg.trace else Run(cfg, "ppo", rank)
    if run and run.finished:
        return print(f"ppo: {run.dir} is finished, skipped") if rank == 0 else None
    resume = run.resume if run else load_source(cfg.policy, scalar=False)
    resume = resume if resume and "critic" in resume else None   # a trace takes the policy's critic
    tok, policy, reference, critic, pm = load_models(cfg, device, resume)
    optimizers = adamw(policy, cfg.lr), adamw(critic, cfg.critic_lr)

    def sample(rows, stage, norm):
        dialogues, prompts = prompts_of(cfg, tok, rows, stage)
        return rollout(cfg, tok, policy, reference, critic, pm, dialogues, prompts,
                       uniforms(rows, cfg.new, cfg.seed, stage), norm)

    def save(step, finished=False):
        run.save(step, finished, **pack(policy, tok), critic=critic.state_dict(), norm=list(norm),
                 optimizers=[optimizer.state_dict() for optimizer in optimizers])

    norm = tuple(resume["norm"]) if resume else calibration(cfg, sample, rank, world_size, device)
    if cfg.trace:
        return print(trace(tok, advantages_of(cfg, sample(range(1), "trace", norm))))
    for optimizer, state in zip(optimizers, resume["optimizers"] if resume else []):
        optimizer.load_state_dict(state)

    bar = run.bar(cfg.iterations, run.step)
    for step in range(run.step, cfg.iterations):
        own = mine(range(step * cfg.samples, (step + 1) * cfg.samples), rank, world_size)
        batch = advantages_of(cfg, sample(own, "rl", norm))                      # 1. 2. 3.
        batch["advantages"] = whiten(batch["advantages"], batch["mask"])         # 4. advantages
        policy.train()
        sums, first, norms = improve(cfg, batch, own, step, policy, critic, optimizers, device)
        clipped, seen, critic_sum = total(*sums, device=device)
        row = summary(batch, device)
        run.log(step, **row, clip_fraction=clipped / seen, value_loss=critic_sum / seen,
                first_log_ratio=first, grad_norm=norms[0], critic_norm=norms[1])
        bar.set_postfix_str(f"score {row['score']:+.2f} sqrt(KL) {max(row['kl'], 0) ** 0.5:.2f} "
                            f"gold {row['gold_helpful']:+.2f} / {row['gold_harmless']:+.2f}",
                            refresh=False)
        bar.update()
        if (step + 1) % cfg.every == 0 and step + 1 < cfg.iterations:
            save(step + 1)
            if rank == 0:
                samples(run, step + 1, batch)
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    if rank == 0:
        show(run, policy, tok, cfg.seed, "ppo done:")
    save(cfg.iterations, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
