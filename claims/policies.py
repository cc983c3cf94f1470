"""What claims about RL share: short PPO runs, and everything that is measured of a policy.

Policies and preference models of claims are `micro` where nothing else is said: a run is a minute
or two on one core. A seed has its own comparisons, PM, PPO prompts and answers; bases and distilled
policies are one a size. The prompts that measure a policy are drawn apart from those of PPO, about
the same animals: short ones recur.
"""

import math
import shutil
from types import SimpleNamespace

import torch

import distill
import ppo
from claims.start import (LR_AFTER, base, few, place, policy, pretrained, test_lines,
                          train_lines, train_pm, work)
from common import load_checkpoint, metrics_of, uniforms
from data import world
from data.tokenizer import loads
from elo import OBJECTIVES
from measures import commonest, distinct, hits, mean_se
from model import by_length, generate, response_mask, unpack
from pretrain import documents_of, heldout_loss
from rollout import (exact_kl, gold_of, masked_sum, over_rows, pm_scores, policy_logprobs,
                     rollout)

ASKED = SimpleNamespace(new=40, temperature=1.0, micro=64, cap=0.0, unfinished=0.0)


# ---------------------------------------------------------------- made where it is missing

def distilled(cfg, size):
    """Folder of the distilled policy of a size; the teacher is the toy base behind the prompt."""
    if size == "toy":
        return policy(cfg)
    folder = place(cfg, f"distill-{size}")
    distill.train(distill.Config(init=base(cfg, size), teacher=base(cfg, "toy"), out=str(folder),
                                 device=cfg.device))
    return str(folder)


def trained_pm(cfg, seed, size="micro"):
    """Folder of a seed's PM: pretrained (HH A.2), then half of the seed's comparisons."""
    lines = train_lines(cfg, seed)
    return str(train_pm(cfg, f"pm-{size}-{seed}", pretrained(cfg, size), lines[:len(lines) // 2],
                        test_lines(cfg, seed)[:600], seed, lr=LR_AFTER)[0])


def trained_policy(cfg, seed, name, pm, iterations=32, **knobs):
    """Folder of a PPO run of a claim: 128 answers an iteration from the distilled policy."""
    folder = work(cfg) / f"ppo-{name}-{seed}"
    iterations = few(cfg, iterations)
    ppo.train(ppo.Config(**{**dict(policy=distilled(cfg, "micro"), pm=pm, out=str(folder),
                                   iterations=iterations, lr=2e-4, warmup=3, seed=seed,
                                   every=iterations, micro=64, device=cfg.device), **knobs}))
    return str(folder)


def forget(folder):
    """Deletes a run that is recorded."""
    shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- what is measured

def asked(seed, objective, count, beliefs=0.0):
    return [world.prompt(f"claims/{seed}/{beliefs}", i, world.TRAIN, beliefs=beliefs,
                         harmful=objective == "harmless") for i in range(count)]


def load(path, device="cpu"):
    """Tokenizer and model of a checkpoint."""
    source = load_checkpoint(path)
    return loads(source["tokenizer"]), unpack(source, device).eval()


@torch.no_grad()
def answers(cfg, policy, reference, pm, seed, objective, count=100, before=("", []), beliefs=0.0):
    """A rollout of `count` prompts of one kind, with exact KL to the reference.

    before: preamble and turns that stand before each prompt. The random numbers are the same for
    every policy of a seed.
    """
    (tok, model), (_, origin), (_, judge) = policy, reference, pm
    talks = asked(seed, objective, count, beliefs)
    prompts = [tok.render(before[1] + t, before[0], answer=True) for t in talks]
    uniform = uniforms(range(count), ASKED.new, seed, "claims", objective)
    batch = rollout(ASKED, tok, model, origin, judge, talks, prompts, uniform, (0.0, 1.0))
    batch["exact"] = over_rows(lambda *told: exact_kl(model, origin, *told), ASKED, batch)
    return batch


def rates_of(batches):
    """Numbers of rollouts together: KL, entropy, length, refusals, boilerplate, diversity."""
    both = {k: torch.cat([masked_sum(b[k], b["mask"]) for b in batches])
            for k in ("logp", "ref", "exact")}
    k1, tokens = both["logp"] - both["ref"], sum(b["mask"].sum().item() for b in batches)
    texts = [t for b in batches for t in b["texts"]]
    kl, kl_se = mean_se(k1.tolist())
    return dict(kl=kl, kl_se=kl_se, kl_exact=both["exact"].mean().item(),
                entropy=-both["logp"].sum().item() / tokens, length=tokens / len(texts),
                unfinished=mean_se([float(not f) for b in batches for f in b["finished"]])[0],
                commonest=commonest([world.split_sentences(t) for t in texts])[0],
                # of the first words alone: longer answers have fewer different pairs
                distinct=distinct([" ".join(t.split()[:8]) for t in texts], 2))


def agreement(cfg, policy, reference, pm, seed, count=60):
    """Share of answers that repeat what the person believes, where that is false (K09)."""
    batch = answers(cfg, policy, reference, pm, seed, "helpful", few(cfg, count), beliefs=1.0)
    said = []
    for turns, answer in zip(batch["dialogues"], batch["texts"], strict=True):
        request = world.request_of(turns)
        if request.kind in world.ATTRIBUTES:
            value = world.FACTS[request.animal][request.kind]
            fact = world.STATE[request.kind].format(s=f"The {request.animal}", v=value)
            if not world.agrees(turns, fact):
                said.append(world.agrees(turns, answer))
    return sum(said) / max(len(said), 1)


def look(cfg, path, reference, pms, seed, count=100, before=("", [])):
    """Everything that a snapshot's record holds: gold by objective, PM scores by name, rates.

    path, reference: checkpoints of policies; pms: {name: (tok, model)}, the first the train PM's.
    """
    count = few(cfg, count)
    policy, origin = load(path), load(reference)
    pm = next(iter(pms.values()))
    batches = {o: answers(cfg, policy, origin, pm, seed, o, count, before) for o in OBJECTIVES}
    out = rates_of(list(batches.values()))
    for o, batch in batches.items():
        gold, refused, _ = gold_of(batch)
        out[f"gold_{o}"] = mean_se(gold)[0]
        if o == "helpful":
            out["refused"] = mean_se([float(r) for r in refused])[0]
        for name, (tok, judge) in pms.items():
            raw = batch["raw"] if judge is pm[1] else pm_scores(judge, tok, batch["rows"], 64)
            out[f"{name}_{o}"] = raw.mean().item()
    out["gold"] = (out["gold_helpful"] + out["gold_harmless"]) / 2
    for name in pms:
        out[name] = (out[f"{name}_helpful"] + out[f"{name}_harmless"]) / 2
    out["agrees"] = agreement(cfg, policy, origin, pm, seed)
    out["sqrt_kl"] = math.sqrt(max(out["kl_exact"], 0))
    return out


@torch.no_grad()
def sampled(cfg, policy, pm, seed, count=64, n=16):
    """n answers to each of `count` prompts, half of them harmful: the prompts' turns; of each
    answer, a prompt's first, its text and its PM score.
    """
    (tok, model), (_, judge) = policy, pm
    talks = [t for o in OBJECTIVES for t in asked(seed, o, few(cfg, count) // 2)]
    prompts = [tok.render(t, answer=True) for t in talks]
    uniform = uniforms(range(len(prompts) * n), ASKED.new, seed, "claims", "many")
    tokens, lengths, _ = generate(model, prompts, ASKED.new, uniform, n, stops=tok.stops,
                                  pad=tok.pad)
    own = [t[:k] for t, k in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    scores = pm_scores(judge, tok, [prompts[i // n] + a for i, a in enumerate(own)], ASKED.micro)
    return talks, [tok.decode(a).strip() for a in own], scores


def many_answers(cfg, policy, pm, seed, count=64, n=16):
    """Those answers' PM scores and gold: [count, n]."""
    talks, texts, scores = sampled(cfg, policy, pm, seed, count, n)
    gold = gold_of(dict(dialogues=[talks[i // n] for i in range(len(texts))], texts=texts))[0]
    return scores.view(-1, n).tolist(), torch.tensor(gold).view(-1, n).tolist()


def text_loss(cfg, path, seed, count=200):
    """The alignment tax: nats a token on held-out text of the base model's kind."""
    tok, model = load(path)
    documents = documents_of(tok, f"tax/{seed}", few(cfg, count), 128)
    return heldout_loss(model, tok, documents, 32)


@torch.no_grad()
def logp_accuracy(policy, rows):
    """Share of comparisons whose chosen answer has the higher mean log-prob a token (HH B.3)."""
    _, model = policy
    flat = [(p + a[:-1], len(p)) for p, answers in rows for a in answers]      # without <|eoc|>
    means = torch.empty(len(flat))
    for some in by_length([row for row, _ in flat], 64):
        part, starts = [flat[i][0] for i in some], torch.tensor([flat[i][1] for i in some])
        lengths = torch.tensor([len(row) for row in part]) - starts
        logp = policy_logprobs(model, part, starts, lengths, int(lengths.max()))
        mask = response_mask(torch.zeros_like(lengths), lengths, logp.shape[1])
        means[some] = masked_sum(logp, mask) / lengths
    return float(hits(means[::2], means[1::2]).mean())


def blocks(folder, keys, size):
    """Means of a run's metrics over consecutive iterations, `size` together."""
    rows = metrics_of(folder)
    parts = [rows[i:i + size] for i in range(0, len(rows), size)]
    return [{k: sum(r[k] for r in part) / len(part) for k in keys if all(k in r for r in part)}
            for part in parts]
