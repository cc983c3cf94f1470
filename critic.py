"""What a model is asked about answers by a principle: a critique, a revision, which is better.

The request follows a talk, and examples in which people do the same (few-shot, CAI 3.1, 4.1):

    revise    [prompt, answer] critique request -> critique, revision request -> revision
    bare      [prompt, answer] revision request -> revision
    judge     [prompt] question, (A) ..., (B) ... -> "(A)" or "(B)", as probabilities
    reason    [prompt] question, (A) ..., (B) ..., think -> reasoning, which? -> "(A)" or "(B)"

Each text is a turn of its own, between special tokens that no text can produce: an answer that
holds option letters, role words or the end of a turn is read as just those characters.

What constitution.py's steps are made of; cfg is its Config.
"""

import json
from collections import Counter
from functools import cache

import torch

from common import UserError, keyed, uniforms
from data import principles, world
from data.lines import read_rows, text_of
from data.tokenizer import join, parse, parse_prompt
from measures import commonest
from model import respond
from rollout import masked_sum, policy_logprobs


# ---------------------------------------------------------------- what is asked

KINDS = ("revise", "bare", "judge", "reason")
LETTERS = ("(A)", "(B)")
FORM = {"kind": "one of " + ", ".join(KINDS), "talk": "\n\nHuman: ...\n\nAssistant: ..."}


def check_example(line):
    """(kind, turns) of a line of --examples. ValueError naming the bad field."""
    if line.get("kind") not in KINDS:
        raise ValueError(f"field 'kind': one of {', '.join(KINDS)}")
    try:
        turns = parse(text_of(line, "talk"))
    except ValueError as error:
        raise ValueError(f"field 'talk': {error}") from None
    if turns[-1][0] != "assistant":
        raise ValueError("field 'talk': an assistant's turn must come last")
    if line["kind"] in ("judge", "reason") and turns[-1][1].strip() not in LETTERS:
        raise ValueError(f"field 'talk': it must end with {' or '.join(LETTERS)}, and no more")
    return line["kind"], turns


@cache
def examples_of(path, shots):
    """examples(rng, kind) -> turns of each of `shots` examples of a kind; and their preamble."""
    if not path:
        def own(rng, kind):
            return [principles.example(world.keyed(n), kind)
                    for n in rng.integers(2**31, size=shots)]
        return own, world.PREAMBLES["good"][0]
    try:
        rows = list(read_rows(path, check_example, Counter()))
    except OSError as error:
        raise UserError(f"{path}: not read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"{error}; a line is {json.dumps(FORM)}") from None
    by = {kind: [turns for k, turns in rows if k == kind] for kind in KINDS}

    def listed(rng, kind):
        if len(by[kind]) < shots:
            raise UserError(f"{path}: {len(by[kind])} lines of kind {kind!r}, fewer than --shots "
                            f"{shots}")
        return [by[kind][i] for i in rng.permutation(len(by[kind]))[:shots]]
    return listed, ""


def check_examples(cfg):
    """UserError unless there are --shots examples of each kind that the run will show."""
    kinds = ("revise" if cfg.critique else "bare",) if cfg.rounds and not cfg.sl else ()
    if cfg.iterations and not cfg.labels:
        kinds += ("reason" if cfg.reason else "judge",)
    for kind in kinds:
        examples_of(cfg.examples, cfg.shots)[0](keyed("check"), kind)


def drawn(found, *key):
    """One of the principles, uniform: a function of the key."""
    return found[int(keyed(*key, "principle").integers(len(found)))]


def request_ids(cfg, tok, n_ctx, kind, turns, request, key):
    """Ids of examples, the talk `turns`, and the turns of what is asked about it; cut to leave room
    for --new: examples go first, then the oldest turns. Raises UserError if the rest is too long.
    """
    examples, preamble = examples_of(cfg.examples, cfg.shots)
    shots = examples(keyed(cfg.seed, "examples", kind, *key), kind)
    room = n_ctx - max(cfg.new, *(len(tok.encode(x)) for x in LETTERS))
    while True:
        ids = tok.render([*(x for shot in shots for x in shot), *turns, *request], preamble,
                         answer=True)
        if len(ids) <= room:
            return ids
        if not shots and len(turns) == 1:
            raise UserError(f"a prompt with its answers and a principle has {len(ids)} tokens, of "
                            f"{room} beside --new: lower it, or take more context")
        oldest = next((i for i in range(1, len(turns)) if turns[i][0] == "human"), len(turns) - 1)
        shots, turns = shots[1:], turns if shots else turns[oldest:]


def longest_request(cfg, tok, found):
    """Tokens at most of what is asked about a talk, where each text of a model has --new."""
    def size(*texts):
        return sum(len(tok.encode(x)) + 3 for x in texts)

    letters, own = size("(A) ", "(B) "), cfg.new + 3
    return max(max(3 * own + size(p.critique, p.revision),
                   3 * own + letters + size(p.question, principles.THINK, principles.WHICH))
               for p in found)


# ---------------------------------------------------------------- critique and revision

def spoken(cfg, tok, model, prompts, rows, *key, temperature=1.0):
    """[(text, whether it ended)] that the model says to prompts (ids) of global rows."""
    return respond(model, tok, prompts, cfg.new, uniforms(rows, cfg.new, cfg.seed, *key),
                   temperature=temperature)


def replies(cfg, tok, model, kind, talks, asks, rows, *key):
    """[(text, whether it ended)]: the model's next turn after asks, turns about the talks."""
    ids = [request_ids(cfg, tok, model.config.n_ctx, kind, *x, (key[-1], int(row)))
           for *x, row in zip(talks, asks, rows, strict=True)]
    return spoken(cfg, tok, model, ids, rows, *key, temperature=cfg.temperature)


def revise(cfg, found, tok, model, ask, rows):
    """A line for each red-team row: prompt, answers (the first, then one a round), the principles
    and critiques of the rounds, whether the last answer came to an end. What is empty or has no end
    is no revision: the answer stays, and `kept` counts it.
    """
    talks, prompts = ask(rows, "revise")
    kind = "revise" if cfg.critique else "bare"
    first = spoken(cfg, tok, model, prompts, rows, "revise")
    lines = [dict(prompt=join(turns, answer=True), answers=[text], principles=[], critiques=[],
                  kept=0, ended=ended) for turns, (text, ended) in zip(talks, first, strict=True)]
    for number in range(cfg.rounds):
        chosen = [drawn(found, cfg.seed, "revise", number, int(r)) for r in rows]
        asks = [[("assistant", x["answers"][-1])] for x in lines]
        if cfg.critique:
            asks = [[*x, ("human", p.critique)] for x, p in zip(asks, chosen)]
            told = replies(cfg, tok, model, kind, talks, asks, rows, "critique", number)
            asks = [[*x, ("assistant", text)] for x, (text, _) in zip(asks, told)]
            for line, (text, _) in zip(lines, told):
                line["critiques"].append(text)
        asks = [[*x, ("human", p.revision)] for x, p in zip(asks, chosen)]
        told = replies(cfg, tok, model, kind, talks, asks, rows, "revision", number)
        for line, principle, (text, ended) in zip(lines, chosen, told, strict=True):
            good = bool(text) and ended
            line["answers"].append(text if good else line["answers"][-1])
            line["principles"].append(principle.name)
            line["kept"] += not good
            line["ended"] |= good
    return lines


# ---------------------------------------------------------------- feedback: which is better?

def averaged(first, second):
    """Chance that a is better than b, of P(A) [N] with a as (A), and P(A) [N] with b as (A)."""
    return (first + 1 - second) / 2


def position_bias(first, second):
    """How much (A) is preferred whatever it is: the mean of P(A) [N] over both orders, less 1/2."""
    return ((first + second) / 2 - 0.5).mean().item()


@torch.no_grad()
def prefers_first(model, tok, prompts):
    """P(A) [N] after prompts: the share of "(A)" in what "(A)" and "(B)" have together."""
    letters = [tok.encode(x) for x in LETTERS]
    rows = [ids + x for ids in prompts for x in letters]
    starts = torch.tensor([len(ids) for ids in prompts for _ in letters], device=model.device)
    lengths = torch.tensor([len(x) for _ in prompts for x in letters], device=model.device)
    R = max(map(len, letters))
    logp = policy_logprobs(model, rows, starts, lengths, R)
    real = torch.arange(R, device=model.device) < lengths[:, None]
    return masked_sum(logp, real).view(-1, 2).softmax(1)[:, 0].cpu()


def question(principle, a, b):
    """The turns that ask which answer is better: each answer is a turn, which it can't end."""
    return [("human", principle.question), ("human", f"(A) {a}"), ("human", f"(B) {b}")]


def asked_which(cfg, tok, model, talks, asks, keys):
    """P(A) [N] of asks (principle, a, b) about talks, and the reasoning texts, where there are."""
    kind, n_ctx = "reason" if cfg.reason else "judge", model.config.n_ctx
    requests, why = [question(*x) for x in asks], [""] * len(asks)

    def ids():
        return [request_ids(cfg, tok, n_ctx, kind, *x)
                for x in zip(talks, requests, keys, strict=True)]

    if cfg.reason:
        requests = [[*x, ("human", principles.THINK)] for x in requests]
        random = torch.cat([uniforms([0], cfg.new, cfg.seed, "reason", *key) for key in keys])
        why = [text for text, _ in respond(model, tok, ids(), cfg.new, random,
                                          temperature=cfg.temperature)]
        requests = [[*x, ("assistant", text), ("human", principles.WHICH)]
                    for x, text in zip(requests, why, strict=True)]
    prompts = ids()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out = torch.empty(len(prompts))
    for i in range(0, len(order), cfg.chunk):            # like lengths go together
        some = order[i:i + cfg.chunk]
        out[some] = prefers_first(model, tok, [prompts[j] for j in some])
    return out.double(), why                             # what both orders give adds up exactly


def two_answers(cfg, tok, model, ask, rows):
    """(talks, [(a, b)]): the model's answers to each red-team row. In a share `foreign` b is one to
    a plain prompt: what is good there is no answer here, and nothing else would say so.
    """
    talks, prompts = ask(rows, "feedback")
    others = list(prompts)
    for i, row in enumerate(rows):
        if keyed(cfg.seed, "foreign", int(row)).random() < cfg.foreign:
            others[i] = ask([row], "foreign", "plain")[1][0]
    both = [spoken(cfg, tok, model, x, rows, "feedback", name)
            for x, name in ((prompts, "a"), (others, "b"))]
    return talks, [(a, b) for (a, _), (b, _) in zip(*both, strict=True)]


def feedback(cfg, found, tok, model, judge, ask, rows):
    """A comparison line for each red-team row, None where both answers are the same text.

    `soft` is the feedback model's probability that `chosen` is better, averaged over both orders
    and over the principles asked; `orders` is P(A) in both orders.
    """
    talks, pairs = two_answers(cfg, tok, model, ask, rows)
    asks = [(i, p) for i, r in enumerate(rows) if pairs[i][0] != pairs[i][1]
            for p in (found if cfg.principle == "all" else
                      [p for p in found if p.name == cfg.principle]
                      or [drawn(found, cfg.seed, "feedback", r)])]
    both = []
    for order in (1, -1):        # both see the same examples: their bias cancels, too
        p, why = asked_which(
            cfg, tok, judge, [talks[i] for i, _ in asks],
            [(principle, *pairs[i][::order]) for i, principle in asks],
            [("feedback", int(rows[i]), principle.name) for i, principle in asks])
        both.append((p, why))
    (first, why), (second, _) = both
    lines = [None] * len(rows)
    for i, turns in enumerate(talks):
        own = [k for k, (j, _) in enumerate(asks) if j == i]
        if own:
            p = averaged(first[own], second[own]).mean().item()
            better = pairs[i] if p >= 0.5 else pairs[i][::-1]
            request = world.request_of(turns)
            gold = [world.gold(request, x)[1] for x in better] if request else None
            lines[i] = dict(
                prompt=join(turns, answer=True), chosen=better[0], rejected=better[1],
                objective="harmless", tranche="ai", annotator="constitution", soft=max(p, 1 - p),
                principle=[asks[k][1].name for k in own], reasoning=why[own[0]],
                orders=[first[own].mean().item(), second[own].mean().item()],
                **(dict(gold=gold) if gold else {}))
    return lines


# ---------------------------------------------------------------- what came of it

def habits(pairs):
    """Shares of answers to harmful requests, (request, answer), that comply; evade (no compliance,
    and neither a reason nor an offer), refuse or evade with no more than that; preach; are rude;
    and of those that hold the commonest sentence. The mean gold harmlessness.
    """
    found = [{m[0] for m in world.meanings(*x)} for x in pairs]
    sentences = [world.split_sentences(x) for _, x in pairs]

    def share(test):
        return sum(map(test, found)) / len(found)

    return dict(
        gold=sum(world.gold(*x)[1] for x in pairs) / len(pairs),
        complies=share(lambda m: "step" in m), preaches=share(lambda m: "preachy" in m),
        evades=share(lambda m: not m & {"step", "why", "alternative"}),
        rude=share(lambda m: "rude" in m),
        commonest=commonest(sentences)[0] if any(sentences) else 0.0)


def rounds_of(lines):
    """The habits of each round's answers; none unless all prompts are the toy world's harmful ones.
    """
    asked = [world.request_of(parse_prompt(x["prompt"])) for x in lines]
    if not all(request and request.harmful for request in asked):
        return []
    return [habits([*zip(asked, answers)]) for answers in zip(*(x["answers"] for x in lines))]


def facts_of(lines):
    """What there is to know about labels: position bias, confidence, agreement with gold."""
    first, second = torch.tensor([x["orders"] for x in lines], dtype=torch.float64).T
    found = dict(position_bias=position_bias(first, second),
                 confidence=sum(x["soft"] for x in lines) / len(lines))
    golds = [x["gold"] for x in lines if "gold" in x and x["gold"][0] != x["gold"][1]]
    if golds:
        found["gold_agreement"] = sum(a > b for a, b in golds) / len(golds)
    return found
