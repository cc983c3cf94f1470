"""Answers and what is known about them: sampled, scored, compared with a reference, told.

What ppo.py trains on, what rejection.py picks from and what claims measure is made here. Letters: B
answers, R response tokens, V vocabulary; mask [B, R] is True at real tokens, the rest is never
read. Log-probs are in nats, at the sampling temperature.
"""

from functools import partial

import numpy as np
import torch

from common import save_checkpoint, total
from data import world
from model import AUTOCAST, by_length, generate, pad_rows, response_mask


# ---------------------------------------------------------------- KL

def kl_estimates(logp, ref):
    """Per-token estimates of KL(pi || pi0) from tokens drawn from pi, with d = log pi - log pi0:

    k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d. All three are [B, R], in nats. The means of k1 and k3
    are the KL; as losses they have other gradients than it (docs/kl.md).
    """
    d = logp - ref
    return d, d * d / 2, torch.expm1(-d) + d


def masked_sum(x, mask):
    """Sum over each answer's real tokens: [B, R] -> [B]."""
    return torch.where(mask, x, 0.0).sum(1)


# ---------------------------------------------------------------- what a model says of given rows

def at_response(x, starts, R):
    """x [B, T] -> [B, R]: position starts + j at column j; what is past a row's end, masks hide."""
    index = starts[:, None] + torch.arange(R, device=x.device)
    return x.gather(1, index.clamp(max=x.shape[1] - 1))


def policy_logprobs(model, rows, starts, lengths, R, temperature=1.0):
    """log pi of each response token [B, R] of rows (lists prompt + response)."""
    ids, sizes = pad_rows(rows, 0, model.device)
    mask = response_mask(starts, lengths, ids.shape[1])
    return at_response(model.logprobs(ids, mask, temperature, sizes), starts, R)


def exact_kl(policy, reference, rows, starts, lengths, R, temperature=1.0):
    """KL(pi || pi0) of the next token over the whole vocabulary, [B, R], where the response's
    tokens are chosen. Its sum over an answer has the mean of k1's and less noise.
    """
    ids, sizes = pad_rows(rows, 0, policy.device)
    before = response_mask(starts - 1, lengths, ids.shape[1])       # where each token is chosen
    p, q = ((m.logits(m(ids, sizes, at=before)) / temperature).log_softmax(-1)
            for m in (policy, reference))                           # [tokens, V]
    told = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)
    out = torch.zeros(ids.shape, device=ids.device).masked_scatter(before, told)
    return at_response(out, starts - 1, R)


@torch.no_grad()
def pm_scores(pm, tok, rows, micro=32):
    """PM score [B] of rows (prompt + response), read at an <|eoc|> appended, finished or not."""
    out = torch.empty(len(rows), device=pm.device)
    for some in by_length(rows, micro):
        ids, lengths = pad_rows([rows[i] + [tok.eoc] for i in some], tok.pad, pm.device)
        out[some] = pm.score(pm(ids, lengths, at=(torch.arange(len(some)), lengths - 1)))
    return out


def ranking(scores, finished):
    """What picks an answer, [N, n]: its score, raised so that finished ones beat all others."""
    scores = np.asarray(scores, dtype=np.float64)
    return scores + np.asarray(finished) * (1 + np.ptp(scores, axis=-1, keepdims=True))


def normalized(raw, norm, cap=0.0):
    """PM scores [B] less the mean, over the spread of `norm`; held within +-cap, 0 is none."""
    score = (raw - norm[0]) / norm[1]
    return score.clamp(-cap, cap) if cap else score


# ---------------------------------------------------------------- rollouts

@torch.no_grad()
def rollout(cfg, tok, policy, reference, pm, dialogues, prompts, uniform, norm):
    """Sample and score one batch of answers. `norm` (mean, spread) gives every PM the same unit;
    without a PM the score is the gold utility, as a control.

    cfg: new, temperature, micro, cap, unfinished. Returns a dict of [B, R] tensors (logp, ref,
    mask), [B] ones (raw PM score, penalty for no end of turn, score: normalized less penalty,
    lengths, starts, finished) and lists (dialogues, texts, rows of ids).
    """
    policy.eval()
    tokens, lengths, old = generate(policy, prompts, cfg.new, uniform, stops=tok.stops,
                                    temperature=cfg.temperature, pad=tok.pad)        # 1. sample
    answers = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    starts = torch.tensor([len(p) for p in prompts], device=policy.device)
    finished = torch.tensor([row[-1] == tok.eot for row in rows], device=policy.device)
    texts = [tok.decode(a).strip() for a in answers]
    raw = (pm_scores(pm, tok, rows, cfg.micro) if pm else torch.tensor(              # 2. score
        gold_of(dict(dialogues=dialogues, texts=texts))[0], dtype=torch.float32).to(old.device))
    mask = response_mask(torch.zeros_like(lengths), lengths, cfg.new)
    penalty = cfg.unfinished * (~finished).float()
    batch = dict(dialogues=dialogues, texts=texts, rows=rows, starts=starts, lengths=lengths,
                 mask=mask, logp=old.clone(), finished=finished, raw=raw, penalty=penalty,
                 score=normalized(raw, norm, cfg.cap) - penalty)
    if policy.device.type in AUTOCAST:       # the sampler's bf16 rounds otherwise than the scorer's
        batch["logp"] = over_rows(partial(policy_logprobs, policy), cfg, batch)
    return dict(batch, ref=over_rows(partial(policy_logprobs, reference), cfg, batch))  # 3. compare


@torch.no_grad()
def over_rows(f, cfg, batch):
    """f(rows, starts, lengths, R, temperature) -> [B, R], a micro-batch at a time."""
    out = torch.zeros_like(batch["logp"])
    for some in by_length(batch["rows"], cfg.micro):
        out[some] = f([batch["rows"][i] for i in some], batch["starts"][some],
                      batch["lengths"][some], cfg.new, cfg.temperature)
    return out


# ---------------------------------------------------------------- what is told

def gold_of(batch):
    """Lists of each answer's gold on its prompt's objective, of whether it refuses, and of the
    requests; None where a prompt is not the toy world's. For the log: only the control --pm gold
    trains on it.
    """
    requests = [world.request_of(t) for t in batch["dialogues"]]
    pairs = list(zip(requests, batch["texts"], strict=True))
    return ([world.gold(r, a)[r.harmful] if r else None for r, a in pairs],
            [world.refuses(r, a) if r else None for r, a in pairs], requests)


def columns_of(batch):
    """name -> (a number an answer, over which answers) of what is reported as a mean."""
    golds, refused, requests = gold_of(batch)
    harmful = torch.tensor([r is not None and r.harmful for r in requests])
    helpful = torch.tensor([r is not None and not r.harmful for r in requests])
    gold = torch.tensor([0.0 if g is None else g for g in golds])
    refused = torch.tensor([bool(x) for x in refused])
    mask, raw = batch["mask"], batch["raw"]
    k1, _, k3 = (masked_sum(k, mask) for k in kl_estimates(batch["logp"], batch["ref"]))
    out = dict(score=batch["score"], pm=raw, penalty=batch["penalty"], kl=k1, kl_se=k1,
               kl_k3=k3, length=mask.sum(1), unfinished=~batch["finished"])
    if "test_pm" in batch:
        out["test_pm"] = batch["test_pm"]
    if "start" in batch:
        out["kl_start"] = masked_sum(batch["logp"] - batch["start"], mask)
    if "exact" in batch:
        exact = masked_sum(batch["exact"], mask)
        out |= dict(kl_exact=exact, kl_gap=k1 - exact, kl_gap_se=k1 - exact)
    out = {k: (x, torch.ones_like(helpful)) for k, x in out.items()}
    return out | dict(refused_helpful=(refused, helpful), pm_helpful=(raw, helpful),
                      pm_harmless=(raw, harmful), gold_helpful=(gold, helpful),
                      gold_harmless=(gold, harmful))


def summary(batch):
    """Means over the answers of all ranks, of what there is any; `x_se` is x's standard error.

    entropy is over tokens; explained, of a batch with returns: 1 - mean (return - value)^2 /
    variance of returns. doctor.METRICS has a formula for each.
    """
    columns, mask = columns_of(batch), batch["mask"]
    picked = [what.cpu()[of].double() for what, of in columns.values()]
    sums = [(x.sum(), (x ** 2).sum(), len(x)) for x in picked]
    nats = -torch.where(mask, batch["logp"], 0.0).sum()
    returns, values = (batch.get(k, torch.zeros_like(batch["logp"])) for k in ("returns", "values"))
    left = torch.where(mask, returns - values, 0.0)
    *sums, tokens, nats, error, first, second = total(
        *(x for three in sums for x in three), mask.sum(), nats, (left ** 2).sum(),
        returns.sum(), (returns ** 2).sum())
    out = {}
    for name, x, xx, n in zip(columns, sums[::3], sums[1::3], sums[2::3], strict=True):
        if n:                                    # of all ranks: every rank has the same names
            spread = (max(xx / n - (x / n) ** 2, 0) / n) ** 0.5
            out[name] = spread if name.endswith("_se") else x / n
    variance = second / tokens - (first / tokens) ** 2
    explained = dict(explained=1 - error / tokens / max(variance, 1e-8))
    return dict(out, entropy=nats / tokens, **(explained if "returns" in batch else {}))


def samples(run, step, batch, count=3):
    """Three answers with PM score, KL and gold, told by rank 0."""
    if run.rank:
        return
    golds, _, _ = gold_of(batch)
    kl = masked_sum(batch["logp"] - batch["ref"], batch["mask"])
    run.say(f"\nppo iteration {step}:")
    for i in range(min(count, len(golds))):
        gold = "" if golds[i] is None else f" gold {golds[i]:+.2f}"
        run.say(f"  {batch['dialogues'][i][-1][1]}\n    -> {batch['texts'][i]}   "
                f"[score {batch['score'][i]:+.2f} KL {kl[i]:.2f}{gold}]")


def trace(tok, batch, row=0):
    """One rollout as text: each token's log-probs, KL, reward, value, advantage and return."""
    columns = ("logp", "ref", "rewards", "values", "plain", "returns")
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


TENSORS = ("starts", "lengths", "mask", "finished", "logp", "ref", "values", "rewards",
           "advantages", "returns", "raw", "score", "penalty")


def keep_batch(cfg, path, batch):
    """One rank's batch as a file that doctor.py reads, and a person."""
    save_checkpoint(path, rows=batch["rows"], texts=batch["texts"], lambda_kl=batch["lambda_kl"],
                    kl_in_reward=cfg.kl == "reward",
                    **{k: batch[k].detach().cpu() for k in TENSORS if k in batch})
