"""Benchmarks as functions of a model: multiple choice, cloze, programs (HH 4.6.1, 5.3, E).

    multiple choice  the choice of highest log p(choice | query), three ways:
                     sum       log p                the community's "acc"
                     token     log p / its tokens
                     byte      log p / its bytes    the community's "acc_norm"
                     several of one score share the hit: the true one gets one over their number
    cloze            whether the likeliest next tokens are the continuation (LAMBADA's accuracy),
                     and perplexity exp(-mean log p(continuation)), a word and not a token
    programs         how many of n sampled answers pass; `measures.pass_at_k` goes on from there

A document opens with <|eod|> and is "query\\nAnswer: choice", examples before it with a blank line
between. As a dialogue the human asks the query, less a "Question: ", and the assistant answers:
policies of RLHF know no other form. The end of the turn is no part of a choice's log p there, as a
document has none either.

What is too long for the context is never cut. Fewer examples are used, the last drawn go first;
an item that does not fit without any is left out. Both are counted: items = used + too_long, and
of the used ones `fewer` have fewer examples than asked.
"""

import math

import numpy as np
import torch

from common import keyed, uniforms
from measures import choice_probabilities, mean_se
from model import by_length, generate, pad_rows, response_mask

NORMS = ("sum", "token", "byte")


# ---------------------------------------------------------------- the pure mathematics

def share(scores, gold):
    """1 if scores[gold] alone is the highest, 1 over their number if it is one of several, else 0.
    """
    best = [i for i, score in enumerate(scores) if score == max(scores)]
    return (gold in best) / len(best)


def chance(items):
    """Accuracy of a blind guess, the mean over items of 1 / choices."""
    return float(np.mean([1 / len(item["choices"]) for item in items]))


def judged(logps, tokens, texts, gold):
    """A choice item's row from its choices' log-probs (sums), numbers of tokens, and texts.

    hits: {norm: `share`} of NORMS; p: softmax of log p over the choices.
    """
    lengths = dict(sum=[1] * len(texts), token=tokens, byte=[len(t.encode()) for t in texts])
    hits = {norm: share([x / n for x, n in zip(logps, lengths[norm], strict=True)], gold)
            for norm in NORMS}
    return dict(hits=hits, logps=list(logps), p=choice_probabilities([logps])[0].tolist(),
                gold=gold)


def of_choices(rows):
    """{norm: (accuracy, error)} over the rows of `multiple_choice`, and "p", of the true choice."""
    found = {norm: mean_se([row["hits"][norm] for row in rows]) for norm in NORMS}
    return dict(**found, p=mean_se([row["p"][row["gold"]] for row in rows]))


def of_cloze(rows):
    """Accuracy and log p (nats, a continuation), each (mean, error), of `cloze`; perplexity."""
    logp = mean_se([row["logp"] for row in rows])
    return dict(accuracy=mean_se([row["hit"] for row in rows]), logp=logp,
                perplexity=math.exp(min(700.0, -logp[0])))


# ---------------------------------------------------------------- prompts

def question_of(item):
    """What no example may share with an item."""
    return item["query"] if "query" in item else item["context"]


def drawn(item, pool, shots, *key):
    """`shots` examples of a pool for an item, never its own question: a function of the key.

    ValueError if the pool has not so many.
    """
    if not shots:
        return []
    order = keyed(*key, "shots", question_of(item)).permutation(len(pool))
    others = [pool[i] for i in order if question_of(pool[i]) != question_of(item)]
    if len(others) < shots:
        raise ValueError(f"{shots} examples a prompt are asked for, {len(others)} are there")
    return others[:shots]


def divided(items, most=100, seed=0):
    """(examples, test): a tenth of a file without a validation part, at most `most`, by the key."""
    order = keyed(seed, "divided").permutation(len(items))
    few = {*order[:min(most, len(items) // 10)].tolist()}
    return ([x for i, x in enumerate(items) if i in few],
            [x for i, x in enumerate(items) if i not in few])


def choice_prompt(tok, examples, item, chat=False, mark="\nAnswer:"):
    """Ids up to where a choice begins."""
    if chat:
        turns = []
        for x in examples:
            turns += [("human", x["query"].removeprefix("Question: ")),
                      ("assistant", x["choices"][x["gold"]])]
        turns.append(("human", item["query"].removeprefix("Question: ")))
        return tok.render(turns, answer=True)
    done = "".join(f"{x['query']}{mark} {x['choices'][x['gold']]}\n\n" for x in examples)
    return tok.render([], f"{done}{item['query']}{mark}")


def cloze_prompt(tok, examples, item):
    """Ids up to where the continuation begins."""
    done = "".join(f"{x['context']} {x['continuation']}\n\n" for x in examples)
    return tok.render([], done + item["context"])


def fitted(prompt, examples, room):
    """(ids, number of examples) of prompt(examples) with as many as fit in `room` ids, or None."""
    for number in range(len(examples), -1, -1):
        ids = prompt(examples[:number])
        if len(ids) <= room:
            return ids, number
    return None


# ---------------------------------------------------------------- what a model finds likely

@torch.no_grad()
def logps_of(model, contexts, continuations, pad, micro=16):
    """log p of each token of each continuation after its context (lists of ids): float32 arrays.

    `micro` rows of like lengths go through the model at once.
    """
    rows = [a + b for a, b in zip(contexts, continuations, strict=True)]
    out = [None] * len(rows)
    for chunk in by_length(rows, micro):
        ids, lengths = pad_rows([rows[i] for i in chunk], pad, model.device)
        starts = torch.tensor([len(contexts[i]) for i in chunk], device=model.device)
        mask = response_mask(starts, lengths - starts, ids.shape[1])
        logps = model.logprobs(ids, mask, lengths=lengths).cpu().numpy()
        for i, own in zip(chunk, logps, strict=True):
            out[i] = own[len(contexts[i]):len(rows[i])]
            if not np.isfinite(out[i]).all():
                raise ValueError("a log-prob is not finite: nan or inf")
    return out


def multiple_choice(model, tok, items, shots=0, examples=(), chat=False, seed=0, mark="\nAnswer:",
                    micro=16):
    """(rows, counts): a row of `judged` for each item {"query", "choices", "gold"} that fits.

    A row also has `item`, the item's number, and `shots`, how many examples its prompt has. mark:
    what stands between a query and a choice in a document. MC1 is this on TruthfulQA's items.
    """
    counts = dict(items=len(items), used=0, too_long=0, fewer=0)
    asked, contexts, choices = [], [], []
    for number, item in enumerate(items):
        own = [tok.encode(text if chat else f" {text}") for text in item["choices"]]
        fit = fitted(lambda some, item=item: choice_prompt(tok, some, item, chat, mark),
                     drawn(item, examples, shots, seed), model.config.n_ctx - max(map(len, own)))
        if fit is None:
            counts["too_long"] += 1
            continue
        counts["used"] += 1
        counts["fewer"] += fit[1] < shots
        asked.append((number, item, fit[1]))
        contexts += [fit[0]] * len(own)
        choices += own
    logps = iter(logps_of(model, contexts, choices, tok.pad, micro))
    rows = []
    for number, item, used in asked:
        own = [next(logps) for _ in item["choices"]]
        row = judged([float(x.sum(dtype=np.float64)) for x in own], [len(x) for x in own],
                     item["choices"], item["gold"])
        rows.append(dict(item=number, shots=used, **row))
    return rows, counts


def cloze(model, tok, items, shots=0, examples=(), seed=0, micro=16):
    """(rows, counts): for each item {"context", "continuation"} that fits, its number `item`, its
    `shots`, whether greedy decoding gives the continuation (`hit`), its `logp` and its `tokens`.
    """
    counts = dict(items=len(items), used=0, too_long=0, fewer=0)
    rows, contexts, endings = [], [], []
    for number, item in enumerate(items):
        ending = tok.encode(f" {item['continuation']}")
        fit = fitted(lambda some, item=item: cloze_prompt(tok, some, item),
                     drawn(item, examples, shots, seed), model.config.n_ctx - len(ending))
        if fit is None:
            counts["too_long"] += 1
            continue
        counts["used"] += 1
        counts["fewer"] += fit[1] < shots
        rows.append(dict(item=number, shots=fit[1], tokens=len(ending)))
        contexts.append(fit[0])
        endings.append(ending)
    logps = logps_of(model, contexts, endings, tok.pad, micro)
    likeliest = greedy(model, contexts, [len(x) for x in endings], tok.pad, micro)
    for row, logp, own, ending in zip(rows, logps, likeliest, endings, strict=True):
        row.update(hit=int(own == ending), logp=float(logp.sum(dtype=np.float64)))
    return rows, counts


def greedy(model, contexts, lengths, pad, micro=16):
    """The likeliest next tokens, lengths[i] of them after contexts[i], one by one."""
    out = [None] * len(contexts)
    for new in sorted({*lengths}):                       # so that each prompt leaves room for its
        own = [i for i, n in enumerate(lengths) if n == new]
        for chunk in by_length([contexts[i] for i in own], micro):
            some = [own[j] for j in chunk]
            tokens, _, _ = generate(model, [contexts[i] for i in some], new, pad=pad)
            for i, ids in zip(some, tokens.tolist(), strict=True):
                out[i] = ids
    return out


# ---------------------------------------------------------------- programs

def programs(model, tok, prompts, passes, samples, new, *key, rows=128, **sampling):
    """(rows, counts): for each prompt (ids) that fits, its number `item`, of how many `samples`
    passes(item, text) is true (`right`), and their `texts`.

    new: tokens of an answer at most. key: of the random numbers, with the item and the sample.
    sampling: `temperature`, `top_p`, `top_k` as `model.generate` takes them.
    """
    fits = [i for i, ids in enumerate(prompts) if len(ids) + new <= model.config.n_ctx]
    counts = dict(items=len(prompts), used=len(fits), too_long=len(prompts) - len(fits))
    many, out = max(1, rows // samples), []
    for start in range(0, len(fits), many):
        some = fits[start:start + many]
        uniform = torch.cat([uniforms(range(samples), new, *key, i) for i in some])
        tokens, lengths, _ = generate(model, [prompts[i] for i in some], new, uniform, samples,
                                      stops=tok.stops, pad=tok.pad, **sampling)
        texts = [tok.decode(ids[:n])
                 for ids, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        for j, i in enumerate(some):
            own = texts[j * samples:(j + 1) * samples]
            right = sum(bool(passes(i, text)) for text in own)
            out.append(dict(item=i, right=right, samples=samples, texts=own))
    return out, counts
