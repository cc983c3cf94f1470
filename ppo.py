"""Stage 3: reinforcement learning from human feedback with PPO (HH 4, B.1; InstructGPT 3.5, eq. 2 without its last term).

The policy answers prompts; the preference model scores the answers; a per-token KL penalty holds the policy near the
distilled model pi0 that it starts from. With response tokens y_1 .. y_n, the reward of token t is

    r_t = -lambda_kl * ( log pi(y_t) - log pi0(y_t) )   +   [t = n] * score

    A_t   = sum_k (gamma lam)^k delta_{t+k},   delta_t = r_t + gamma V_{t+1} - V_t          (GAE)
    L(pi) = -mean_t min( rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ),   rho = pi / pi_old  (PPO)

Each iteration: sample, score, compare with the reference, compute advantages, update (steps 1 to 5 in `train`).

    python ppo.py --policy out/laptop/distill --pm out/laptop/pm --out out/laptop/ppo
    torchrun --nproc_per_node=2 ppo.py ...                                               the same result
    python ppo.py --trace --policy out/laptop/ppo ...                                    one rollout as a table

About 2 minutes on two cores. See `rewards_of`, `gae`, `policy_loss` for the ten lines that matter.
"""

from dataclasses import dataclass

import torch

from common import (Run, UserError, adamw, entry, keyed, load_checkpoint, mine, schedule, start, total, uniforms, update)
from data import world
from data.tokenizer import loads
from model import by_length, generate, pack, pad_rows, response_mask, unpack
from pretrain import show


@dataclass(frozen=True)
class Config:
    policy: str = "out/laptop/distill" # checkpoint of the policy to start from; its frozen copy is the reference
    pm: str = "out/laptop/pm"          # checkpoint of the preference model; the critic starts from it too
    out: str = "out/laptop/ppo"        # the stage's folder
    iterations: int = 40               # rounds of sampling and updating
    samples: int = 128                 # prompts in an iteration, one answer each
    helpful: float = 0.6               # share of helpful prompts, the rest is harmful
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # sampling temperature, the same in both sides of the ratio
    epochs: int = 2                    # passes over an iteration's samples (K of HH B.1)
    minibatch: int = 64                # samples in an optimizer step
    micro: int = 16                    # samples in one forward pass
    lr: float = 1e-4                   # policy's learning rate, after warm-up constant
    critic_lr: float = 3e-4            # critic's learning rate
    warmup: int = 5                    # iterations of linear warm-up
    lambda_kl: float = 0.03            # weight of the KL penalty, in units of normalized score per nat
    gamma: float = 1.0                 # discount (HH B.1: 1)
    lam: float = 0.95                  # lambda of GAE
    clip: float = 0.2                  # epsilon of the ratio's and the value's clipping (HH B.1: 0.2)
    unfinished: float = 1.0            # subtracted from the score of an answer that did not end its turn
    calibrate: int = 256               # answers of the first policy on which the score gets mean 0 and spread 1; 0: raw
    seed: int = 0                      # of prompts, answers and order
    every: int = 10                    # iterations between samples and checkpoints
    trace: bool = False                # print one rollout as a table, then stop
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics
# All are [B, R]: B answers, R response tokens, mask True at real tokens. Nothing outside the mask is ever read.

def kl_estimates(logp, ref):
    """Per-token estimates of KL(pi || pi0) from tokens drawn from pi: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d."""
    d = logp - ref
    return d, d * d / 2, torch.expm1(-d) + d


def rewards_of(logp, ref, mask, scores, lambda_kl):
    """Token rewards: -lambda_kl * k1 at every response token, the score [B] added at the last one (HH 4.1)."""
    rewards = torch.where(mask, -lambda_kl * (logp - ref), 0.0)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))      # an empty answer has no last token
    return rewards + torch.where(last, scores[:, None], 0.0)


def gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """Generalized advantage estimates and returns (advantage + value), [B, R]; the value after the last token is 0."""
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    running = following = torch.zeros_like(rewards[:, 0])            # A_{t+1}, V_{t+1}
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, 0.0)
        advantages[:, t], following = running, values[:, t]
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(x, mask, summed=total):
    """Mean 0 and population variance 1 over the valid tokens of all ranks; `summed` adds numbers over ranks."""
    x = torch.where(mask, x, 0.0).double()
    count, first = summed(mask.sum(), x.sum())
    mean = first / max(count, 1)
    square = summed(torch.where(mask, (x - mean) ** 2, 0.0).sum())
    return torch.where(mask, (x - mean) / max((square / max(count, 1)) ** 0.5, 1e-8), 0.0).float()


def policy_loss(logp, old, advantages, mask, clip):
    """Sum over tokens of PPO's clipped loss, and the number of tokens where the clip holds the ratio back."""
    ratio = torch.where(mask, logp - old, 0.0).exp()
    advantages = torch.where(mask, advantages, 0.0)
    plain, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return torch.where(mask, -torch.minimum(plain, clipped), 0.0).sum(), ((clipped < plain) & mask).sum()


def value_loss(values, old, returns, mask, clip):
    """Sum over tokens of the critic's squared error / 2, pessimistic within `clip` of the old value."""
    values, old, returns = (torch.where(mask, x, 0.0) for x in (values, old, returns))
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


# ---------------------------------------------------------------- data

def prompts_of(cfg, tok, rows, stage="rl"):
    """Dialogues that end with a request, and their ids; prompt `row` is a function of (seed, row)."""
    turns = [world.prompt(f"{stage}/{cfg.seed}", r, world.TRAIN, p_harm=1 - cfg.helpful) for r in rows]
    return turns, [tok.render(t, answer=True) for t in turns]


def at_response(x, starts, R):
    """x [B, T] -> [B, R]: position starts + j at column j (the rest of a short row is some value that masks hide)."""
    index = starts[:, None] + torch.arange(R, device=x.device)
    return x.gather(1, index.clamp(max=x.shape[1] - 1))


def policy_logprobs(model, rows, starts, lengths, R, temperature=1.0):
    """log pi of each response token [B, R] of rows (lists prompt + response)."""
    ids, _ = pad_rows(rows, 0, model.device)
    mask = response_mask(starts, lengths, ids.shape[1])
    return at_response(model.logprobs(model(ids), ids, mask, temperature), starts, R)


def critic_values(critic, rows, starts, R):
    """V [B, R]: the value of response token j is read one position before it, where it is about to be chosen."""
    ids, _ = pad_rows(rows, 0, critic.device)
    return at_response(critic.score(critic(ids)), starts - 1, R)


@torch.no_grad()
def pm_scores(pm, tok, rows, micro=32):
    """PM score [B] of rows (prompt + response), read at an <|eoc|> appended to each, finished or not."""
    out = torch.empty(len(rows), device=pm.device)
    for some in by_length(rows, micro):
        ids, lengths = pad_rows([rows[i] + [tok.eoc] for i in some], tok.pad, pm.device)
        hidden = pm(ids)[torch.arange(len(some), device=pm.device), lengths - 1]
        out[some] = pm.score(hidden)
    return out


# ---------------------------------------------------------------- rollouts

@torch.no_grad()
def rollout(cfg, tok, policy, reference, critic, pm, dialogues, prompts, uniform, norm):
    """Sample and score one batch of answers. `norm` (mean, spread) makes the PM's unit comparable between PMs.

    Returns a dict of [B, R] tensors (logp, ref, values, mask) and [B] ones (raw PM score, score, lengths, starts, ...).
    """
    policy.eval()
    tokens, lengths, logp = generate(policy, prompts, cfg.new, uniform, temperature=cfg.temperature, stops=tok.stops,
                                     pad=tok.pad)                                                            # 1. sample
    rows = [p + t[:n] for p, t, n in zip(prompts, tokens.tolist(), lengths.tolist(), strict=True)]
    starts = torch.tensor([len(p) for p in prompts], device=policy.device)
    finished = torch.tensor([row[-1] == tok.eot for row in rows], device=policy.device)
    raw = pm_scores(pm, tok, rows)                                                                           # 2. score
    score = (raw - norm[0]) / norm[1] - cfg.unfinished * (~finished).float()
    ref, values = torch.zeros_like(logp), torch.zeros_like(logp)
    for some in by_length(rows, cfg.micro):                                                                  # 3. compare
        part = [rows[i] for i in some]
        ref[some] = policy_logprobs(reference, part, starts[some], lengths[some], cfg.new, cfg.temperature)
        values[some] = critic_values(critic, part, starts[some], cfg.new)
    mask = response_mask(torch.zeros_like(lengths), lengths, cfg.new)
    texts = [tok.decode(t[:n]).strip() for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return dict(dialogues=dialogues, rows=rows, starts=starts, lengths=lengths, mask=mask, logp=logp, ref=ref,
                values=torch.where(mask, values, 0.0), raw=raw, score=score, finished=finished, texts=texts)


def advantages_of(cfg, batch):
    """Adds rewards, advantages (not yet whitened) and returns to a rollout."""
    batch["rewards"] = rewards_of(batch["logp"], batch["ref"], batch["mask"], batch["score"], cfg.lambda_kl)
    batch["advantages"], batch["returns"] = gae(batch["rewards"], batch["values"], batch["mask"], cfg.gamma, cfg.lam)
    return batch


def gold_of(batch):
    """Gold of each answer on its own objective, and whether it is helpful: for the log only, nothing trains on it."""
    requests = [world.request_of(t) for t in batch["dialogues"]]
    golds = [world.gold(r, a)[r.harmful] for r, a in zip(requests, batch["texts"], strict=True)]
    return golds, [not r.harmful for r in requests]


def trace(tok, batch, row=0):
    """One rollout as text: each token's log-probs, KL, reward, value, advantage and return."""
    lines = [f"prompt: {batch['dialogues'][row][-1][1]}", f"answer: {batch['texts'][row]}",
             f"PM score {batch['raw'][row]:+.3f}, after normalization {batch['score'][row]:+.3f}", "",
             f"{'token':>12} {'log pi':>8} {'log pi0':>8} {'KL (k1)':>8} {'reward':>8} {'value':>8} {'advant.':>8} {'return':>8}"]
    start = int(batch["starts"][row])
    for j in range(int(batch["lengths"][row])):
        lp, ref, r, v, a, g = (batch[k][row, j].item() for k in ("logp", "ref", "rewards", "values", "advantages",
                                                                   "returns"))
        lines.append(f"{tok.show(batch['rows'][row][start + j]):>12} {lp:8.3f} {ref:8.3f} {lp - ref:8.3f} {r:8.3f} {v:8.3f} "
                     f"{a:8.3f} {g:8.3f}")
    kl = (batch["logp"] - batch["ref"])[row][batch["mask"][row]].sum()
    return "\n".join([*lines, f"{'sum':>12} {'':>8} {'':>8} {kl:8.3f} {batch['rewards'][row].sum():8.3f}"])


# ---------------------------------------------------------------- train

def load_models(cfg, device, resume=None):
    """tok, policy, reference, critic, pm. The reference is a copy that shares nothing with the policy."""
    source, judge = load_checkpoint(cfg.policy), load_checkpoint(cfg.pm)
    if source["tokenizer"] != judge["tokenizer"]:
        raise UserError(f"{cfg.policy} and {cfg.pm} have different vocabularies: train the PM from the policy's base model")
    if not judge["gpt"]["scalar"]:
        raise UserError(f"{cfg.pm}: a language model, not a preference model; train one with preference.py")
    critic_from = dict(judge, model=resume["critic"]) if resume else judge
    policy, reference = unpack(resume or source, device, scalar=False), unpack(source, device, scalar=False).eval()
    need_separate(policy, reference)
    for frozen in (reference, pm := unpack(judge, device).eval()):
        frozen.requires_grad_(False)
    return loads(source["tokenizer"]), policy, reference, unpack(critic_from, device), pm


def need_separate(policy, reference):
    """The reference must be another object with storage of its own, or the KL is 0 for ever."""
    owned = {p.data_ptr() for p in policy.parameters()}
    if policy is reference or any(p.data_ptr() in owned for p in reference.parameters()):
        raise ValueError("policy and reference share weights: the reference must be a copy")


def train(cfg):
    rank, world_size, device = start(cfg.device)
    if cfg.samples % cfg.minibatch:
        raise UserError(f"--samples {cfg.samples} is not divisible by --minibatch {cfg.minibatch}")
    run = None if cfg.trace else Run(cfg, "ppo", rank)
    if run and run.finished:
        return print(f"ppo: {run.dir} is finished, skipped") if rank == 0 else None
    resume = run.resume if run else None
    tok, policy, reference, critic, pm = load_models(cfg, device, resume)
    optimizer, critic_optimizer = adamw(policy, cfg.lr), adamw(critic, cfg.critic_lr)

    def sample(rows, stage, norm):
        dialogues, prompts = prompts_of(cfg, tok, rows, stage)
        return rollout(cfg, tok, policy, reference, critic, pm, dialogues, prompts,
                       uniforms(rows, cfg.new, cfg.seed, stage), norm)

    if resume:
        optimizer.load_state_dict(resume["optimizer"])
        critic_optimizer.load_state_dict(resume["critic_optimizer"])
        norm = tuple(resume["norm"])
    elif cfg.calibrate:                                  # the PM's shift and spread on the first policy's answers
        raw = sample(mine(range(cfg.calibrate), rank, world_size), "calibrate", (0.0, 1.0))["raw"].double()
        first, second = total(raw.sum(), (raw ** 2).sum(), device=device)
        mean = first / cfg.calibrate
        norm = (mean, max((second / cfg.calibrate - mean ** 2) ** 0.5, 1e-6))
    else:
        norm = (0.0, 1.0)
    if cfg.trace:
        return print(trace(tok, advantages_of(cfg, sample(range(1), "trace", norm))))
    if rank == 0 and not resume:
        print(f"ppo: PM score on the first policy's answers {norm[0]:+.3f}, spread {norm[1]:.3f}")

    def save(step, finished=False):
        run.save(step, finished, **pack(policy, tok), critic=critic.state_dict(), optimizer=optimizer.state_dict(),
                 critic_optimizer=critic_optimizer.state_dict(), norm=list(norm))

    bar = run.bar(cfg.iterations, run.step)
    for step in range(run.step, cfg.iterations):
        own = mine(range(step * cfg.samples, (step + 1) * cfg.samples), rank, world_size)
        batch = advantages_of(cfg, sample(own, "rl", norm))                             # 1.-3. and
        batch["advantages"] = whiten(batch["advantages"], batch["mask"])                # 4. advantages
        policy.train()
        clipped = seen = first_ratio = losses = 0.0
        for epoch in range(cfg.epochs):                                                 # 5. update
            order = keyed(cfg.seed, "ppo", step, epoch).permutation(cfg.samples)
            for i in range(0, cfg.samples, cfg.minibatch):
                taken = {int(r) for r in order[i:i + cfg.minibatch]}
                local = [j for j, r in enumerate(own) if r - step * cfg.samples in taken]
                count = total(batch["mask"][local].sum(), device=device)                # tokens of all ranks
                for some in by_length([batch["rows"][j] for j in local], cfg.micro):
                    some = [local[j] for j in some]
                    rows, starts, lengths = [batch["rows"][j] for j in some], batch["starts"][some], batch["lengths"][some]
                    mask, old = batch["mask"][some], batch["logp"][some]
                    logp = policy_logprobs(policy, rows, starts, lengths, cfg.new, cfg.temperature)
                    loss, held = policy_loss(logp, old, batch["advantages"][some], mask, cfg.clip)
                    (loss / count).backward()
                    values = critic_values(critic, rows, starts, cfg.new)
                    v_loss = value_loss(values, batch["values"][some], batch["returns"][some], mask, cfg.clip)
                    (v_loss / count).backward()
                    if epoch == 0 and i == 0:
                        first_ratio = max(first_ratio, (logp - old)[mask].abs().max().item())
                    clipped, seen, losses = clipped + held.item(), seen + mask.sum().item(), losses + v_loss.item()
                scale = min(1.0, (step + 1) / max(cfg.warmup, 1))
                norms = update(policy, optimizer, scale * cfg.lr), update(critic, critic_optimizer, cfg.critic_lr)
        row = summary(batch, device)
        clipped, seen, losses = total(clipped, seen, losses, device=device)
        run.log(step, **row, clip_fraction=clipped / seen, value_loss=losses / seen, first_log_ratio=first_ratio,
                grad_norm=norms[0], critic_norm=norms[1])
        bar.set_postfix_str(f"score {row['score']:+.2f} sqrt(KL) {max(row['kl'], 0) ** 0.5:.2f} "
                            f"gold {row['gold_helpful']:+.2f} / {row['gold_harmless']:+.2f}", refresh=False)
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


def summary(batch, device):
    """Means over the iteration's answers of all ranks. kl: sum over tokens of k1; entropy: mean of -log pi."""
    golds, helpful = gold_of(batch)
    k1, _, k3 = (torch.where(batch["mask"], k, 0.0) for k in kl_estimates(batch["logp"], batch["ref"]))
    n, tokens = len(golds), batch["mask"].sum()
    left = torch.where(batch["mask"], batch["returns"] - batch["values"], 0.0)
    names = ("n", "tokens", "score", "pm", "kl", "kl_k3", "entropy", "unfinished", "refused", "n_helpful", "gold_helpful",
             "gold_harmless", "pm_helpful", "pm_harmless", "error", "returns", "returns2")
    refused = [world.refuses(world.request_of(t), a) for t, a in zip(batch["dialogues"], batch["texts"], strict=True)]
    h = torch.tensor(helpful, device=batch["raw"].device)
    s = dict(zip(names, total(
        n, tokens, batch["score"].sum(), batch["raw"].sum(), k1.sum(), k3.sum(), -batch["logp"][batch["mask"]].sum(),
        (~batch["finished"]).sum(), sum(r and y for r, y in zip(refused, helpful, strict=True)), sum(helpful),
        sum(g for g, y in zip(golds, helpful, strict=True) if y), sum(g for g, y in zip(golds, helpful, strict=True) if not y),
        batch["raw"][h].sum(), batch["raw"][~h].sum(), (left ** 2).sum(), batch["returns"].sum(),
        (batch["returns"] ** 2).sum(), device=device), strict=True))
    harmful = max(s["n"] - s["n_helpful"], 1)
    variance = s["returns2"] / s["tokens"] - (s["returns"] / s["tokens"]) ** 2
    return dict(score=s["score"] / s["n"], pm=s["pm"] / s["n"], kl=s["kl"] / s["n"], kl_k3=s["kl_k3"] / s["n"],
                entropy=s["entropy"] / s["tokens"], length=s["tokens"] / s["n"], unfinished=s["unfinished"] / s["n"],
                refused_helpful=s["refused"] / max(s["n_helpful"], 1), pm_helpful=s["pm_helpful"] / max(s["n_helpful"], 1),
                pm_harmless=s["pm_harmless"] / harmful, gold_helpful=s["gold_helpful"] / max(s["n_helpful"], 1),
                gold_harmless=s["gold_harmless"] / harmful, explained=1 - s["error"] / s["tokens"] / max(variance, 1e-8))


def samples(run, step, batch, count=3):
    """Three answers with PM score, KL and gold."""
    golds, _ = gold_of(batch)
    kl = torch.where(batch["mask"], batch["logp"] - batch["ref"], 0.0).sum(1)
    run.say(f"\nppo iteration {step}:")
    for i in range(min(count, len(golds))):
        run.say(f"  {batch['dialogues'][i][-1][1]}\n    -> {batch['texts'][i]}   "
                f"[score {batch['score'][i]:+.2f} KL {kl[i]:.2f} gold {golds[i]:+.2f}]")


if __name__ == "__main__":
    entry(train, Config, __doc__)
