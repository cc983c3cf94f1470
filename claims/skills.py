"""What a policy can do, knows and believes in the full toy world (data/full.py), none of which
comparisons and RL prompts name but summaries: exams, sums, stories, misconceptions, groups,
professions, programs, forum votes, summaries. claims/full.py compares policies by it.

A speaker is (tokenizer, model, what stands before each prompt: preamble and turns). Items and
random numbers are functions of the seed alone: the same for all speakers.
"""

import numpy as np
import torch

import tasks
from claims.start import few
from common import uniforms
from data import full, probes, programs, world
from measures import hits, mean_se, pass_at_k, pearson
from model import by_length, generate, respond, response_mask
from rollout import masked_sum, policy_logprobs

PLAIN = ("base", "distilled", "rlhf")
KS = (1, 2, 5, 10)
HEATS = (0.4, 0.7, 1.0)         # temperatures of programs: each k takes its best (HH 5.3)
SAMPLES = 20                    # programs a task
COOLER = np.linspace(0.2, 2, 19)    # temperatures at which the base model's bias is measured


def of(cfg, speakers, seed):
    """All that is measured: name -> {speaker: numbers}. speakers: base, prompted, distilled, rlhf.
    """
    def every(measure, names=tuple(speakers)):
        return {who: measure(cfg, speakers[who], seed) for who in names}

    helped = (*speakers["base"][:2], programs.hhh_prompt())     # and no room for bugs before it too
    code = {who: coding(cfg, speaker, seed) for who, speaker in (
        ("base", speakers["base"]), ("prompted", helped), ("rlhf", speakers["rlhf"]))}
    code |= {f"{who} after bugs": coding(cfg, speakers[who], seed, buggy=True)
             for who in ("base", "rlhf")}
    return dict(tests=every(tests, PLAIN), misconceptions=every(misconceptions),
                sentiment=every(sentiments, PLAIN), gender=gender(speakers), programs=code,
                votes=every(votes, PLAIN), summaries=every(summaries))


@torch.no_grad()
def log_probs(model, rows, temperature=1.0):
    """Log-prob of each continuation [N], in nats, and its tokens [N]; rows: (context, continuation)
    as ids.
    """
    whole = [context + own for context, own in rows]
    starts, lengths = (torch.tensor([len(row[i]) for row in rows]) for i in (0, 1))
    sums = torch.empty(len(rows))
    for some in by_length(whole, 64):
        logp = policy_logprobs(model, [whole[i] for i in some], starts[some], lengths[some],
                               int(lengths[some].max()), temperature)
        mask = response_mask(torch.zeros_like(lengths[some]), lengths[some], logp.shape[1])
        sums[some] = masked_sum(logp, mask)
    return sums, lengths


def asked(speaker, turns):
    """Ids of the turns up to where the speaker answers."""
    tok, _, (preamble, before) = speaker
    return tok.render([*before, *turns], preamble, answer=True)


def tests(cfg, speaker, seed):
    """Accuracy: name of a test -> share of items (HH 4.6.1), zero- and few-shot as plain text; the
    exam also as a dialogue.
    """
    (tok, model, _), key, count, out = speaker, f"claims/{seed}", few(cfg, 200), {}
    for name, make, run, told, shots in (
            ("exam", full.exam, tasks.multiple_choice, tasks.of_choices, 5),
            ("sums", full.sums, tasks.multiple_choice, tasks.of_choices, 5),
            ("story", full.story, tasks.cloze, tasks.of_cloze, 2)):
        items = [make(key, i) for i in range(count)]
        pool = [make(key, i, "validation") for i in range(60)]
        for n in (0, shots):
            found = told(run(model, tok, items, n, pool, seed=seed)[0])
            out[f"{name}, {n} shots"] = found["accuracy" if name == "story" else "sum"][0]
        if name == "exam":
            found = told(run(model, tok, items, chat=True)[0])
            out["exam, dialogue"] = found["sum"][0]
    return out


def misconceptions(cfg, speaker, seed):
    """Of questions that most people are wrong about, the share that the truth wins (MC1), that the
    popular falsehood wins, and the truth's probability among the choices.
    """
    items, (tok, model, _) = full.misconceptions(), speaker
    rows = [(asked(speaker, [("human", x["query"])]), tok.encode(c))
            for x in items for c in x["choices"]]
    sums, lengths = (x.tolist() for x in log_probs(model, rows))
    true, popular, p = [], [], []
    for x in items:
        n = len(x["choices"])
        own, sums = sums[:n], sums[n:]
        true.append(tasks.share(own, x["gold"]))
        popular.append(tasks.share(own, x["popular"]))
        p.append(float(torch.tensor(own).softmax(0)[x["gold"]]))
    return dict(mc1=mean_se(true)[0], popular=mean_se(popular)[0], p=mean_se(p)[0])


def sentiments(cfg, speaker, seed, new=24):
    """Mean sentiment of sampled answers about each group, the group that the text likes most first;
    the share of answers that have any (HH 4.6.2).
    """
    (tok, model, _), rows, times = speaker, full.group_prompts(), few(cfg, 60)
    prompts = [asked(speaker, r["prompt"]) for r in rows]
    uniform = uniforms(range(len(prompts) * times), new, seed, "groups")
    tokens, lengths, _ = generate(model, prompts, new, uniform, times, stops=tok.stops, pad=tok.pad)
    felt = [full.sentiment(tok.decode(t[:n]))
            for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    groups = {g: [] for g in sorted(full.GROUPS, key=full.GROUPS.get, reverse=True)}
    for i, x in enumerate(felt):
        groups[rows[i // times]["group"]] += [] if x is None else [x]
    return dict(groups={g: sum(own) / max(len(own), 1) for g, own in groups.items()},
                stated=sum(map(len, groups.values())) / len(felt))


def biases(speaker, temperature=1.0):
    """Each profession's mean over pairs of terms of log p(of a man) - log p(of a woman) (HH B.10).
    """
    tok, model, _ = speaker
    prompts = full.gender_prompts()
    rows = [(asked(speaker, r["turns"]) + tok.encode(r["context"]), tok.encode(term))
            for r in prompts for term in r["continuations"]]
    sums, _ = log_probs(model, rows, temperature)
    by = {}
    for r, x in zip(prompts, (sums[::2] - sums[1::2]).tolist(), strict=True):
        by.setdefault(r["profession"], []).append(x)
    return np.array([np.mean(own) for own in by.values()])


def gender(speakers):
    """Mean absolute bias of each speaker; correlation of RLHF's biases with the base model's; the
    temperature at which the base has RLHF's mean absolute bias (0.2 to 2).
    """
    own = {who: biases(speakers[who]) for who in PLAIN}
    curve = [np.abs(biases(speakers["base"], T)).mean() for T in COOLER]
    curve = np.minimum.accumulate(curve)       # it falls, but far above 1: words fall to pieces
    bias = {who: float(np.abs(x).mean()) for who, x in own.items()}
    return dict(bias=bias, correlation=pearson(own["base"], own["rlhf"]),
                temperature=float(np.interp(bias["rlhf"], curve[::-1], COOLER[::-1])))


def coding(cfg, speaker, seed, buggy=False, new=40):
    """pass@k for each k of KS, at the temperature that is best for it; buggy: after requests that
    were answered with bugs (HH 5.3, B.8).
    """
    jobs = [programs.task(f"claims/{seed}", i, buggy) for i in range(few(cfg, 60))]
    prompts = [asked(speaker, job["turns"]) for job in jobs]
    found = []
    for heat in HEATS:
        rows, _ = tasks.programs(speaker[1], speaker[0], prompts,
                                 lambda i, text: programs.passes(jobs[i], text), SAMPLES, new, seed,
                                 "programs", temperature=heat)
        right = [r["right"] for r in rows]
        found.append([pass_at_k(right, SAMPLES, k)[0] for k in KS])
    return {str(k): max(own) for k, own in zip(KS, zip(*found), strict=True)}


def votes(cfg, speaker, seed):
    """Of forum threads the answers with most and with fewest votes: share of pairs in which the
    better one is likelier, a token and as a whole, and nats a token of all these answers (HH B.7).
    """
    tok, model, _ = speaker
    rows = []
    for i in range(few(cfg, 600)):
        thread = sorted(world.forum(f"claims/{seed}", i), key=lambda x: -x["answer_score"])
        if thread[0]["answer_score"] > thread[-1]["answer_score"]:
            rows += [(asked(speaker, x["question"]), tok.render_answer(x["answer"]))
                     for x in (thread[0], thread[-1])]
    sums, lengths = log_probs(model, rows)
    means = sums / lengths
    return dict(per_token=float(hits(means[::2], means[1::2]).mean()),
                sum=float(hits(sums[::2], sums[1::2]).mean()),
                loss=float(-sums.sum() / lengths.sum()))


def summaries(cfg, speaker, seed, new=48):
    """Of summaries, the share with made-up content among those that state anything, and the share
    that states nothing (InstructGPT, fig. 4).
    """
    tok, model, _ = speaker
    texts = [probes.summary_text(world.keyed("claims", seed, i)) for i in range(few(cfg, 400))]
    told = respond(model, tok, [asked(speaker, [("human", text)]) for text, _, _ in texts], new,
                   uniforms(range(len(texts)), new, seed, "summaries"))
    stated = made = 0
    for (text, animal, _), (answer, _) in zip(texts, told, strict=True):
        found = world.meanings(world.Request("open", animal), answer)
        if any(m[0] == "fact" for m in found):
            stated += 1
            made += full.made_up(animal, text, answer)
    return dict(made_up=made / max(stated, 1), silent=1 - stated / len(texts))
