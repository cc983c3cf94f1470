"""Model-generated prompts for RL (HH 4.1).

About ten collected human queries are put in the context of a language model, which writes another:

    x ~ p( . | <|human|> q_1 <|eot|> ... <|human|> q_10 <|eot|> <|human|> )   up to its <|eot|>

The paper's RL prompts are 137k collected and 369k generated ones. It does not say which of what
the model writes is left out; here it is what is

    unended      without an end of turn in --new tokens, or with another special token before it
    empty        nothing but blanks
    header       a text with a role header after a blank line: on disk it would be two turns
    shown        one of the requests in its own context
    heldout      about a held-out animal, in any of its sentences           (toy world only)
    no_request   no request that the world knows: "What does it eat?"       (toy world only)
    repeated     the text of one kept before                                (--unique only)
    surplus      a row of the last chunk after the last that was needed

by the first that holds. One JSON line each: {"prompt", "source": "generated"}, and in the toy
world "objective". Others read them with `read_prompts`.

    python prompts.py --model out/laptop/pretrain --out out/laptop/prompts
    python prompts.py --unique --prompts out/hh.jsonl --model out/mine/base --out out/mine/prompts
    torchrun --nproc_per_node=2 prompts.py --out out/laptop/prompts        # the same lines

About half a minute on one core for 2,000 of about 5,600: a half of what the toy model writes is no
request, an eighth is held out. Repeats are kept there: it knows 270 requests of one sentence, so a
repeat says how often a thing is asked, and --unique would go on with what is ever less like them.
"""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common import (Run, UserError, entry, everyones, keyed, load_source, mine, start, uniforms,
                    write_atomically)
from data import world
from data.lines import read_rows, text_of
from data.tokenizer import fit, join, loads, parse_prompt
from model import respond, unpack


@dataclass(frozen=True)
class Config:
    model: str = "out/laptop/pretrain"  # plain language model that writes
    out: str = "out/laptop/prompts"    # the stage's folder; the lines go to prompts.jsonl
    prompts: str = ""                  # files of collected prompts, by commas; "": the toy world's
    collected: int = 1000              # the toy world's requests to show from
    harmful: float = 0.4               # share of harmful ones among these
    shots: int = 10                    # collected requests in a context (HH 4.1: about 10)
    count: int = 2000                  # prompts to keep
    new: int = 40                      # tokens of a prompt at most, its end of turn included
    temperature: float = 1.0           # of sampling
    unique: bool = False               # keep no text twice; the toy world's requests would run out
    seed: int = 0                      # of what is shown and of what is sampled
    device: str = "auto"               # auto, cpu, cuda or mps


REASONS = ("unended", "empty", "header", "shown", "heldout", "no_request", "repeated", "surplus")
HELD_OUT = re.compile(rf"\b(?:{'|'.join(world.HELD_OUT)})s?\b", re.IGNORECASE)
CHUNK = 128     # rows sampled at a time
PATIENCE = 20   # rows for each prompt to keep, after which there will never be enough


# ---------------------------------------------------------------- data

FORM = {"prompt": "\n\nHuman: ...\n\nAssistant:"}


def check_prompt(line):
    """The turns of a line's prompt. ValueError naming the bad field."""
    text = text_of(line, "prompt")
    try:
        turns = parse_prompt(text)
    except ValueError as error:
        raise ValueError(f"field 'prompt': {error}") from None
    if not turns or turns[-1][0] != "human":
        raise ValueError("field 'prompt': a human turn must come last, before 'Assistant:'")
    return turns


def read_prompts(paths):
    """Prompts as lists of turns, each ending with a human one, of the JSON lines of files, or of
    folders' prompts.jsonl, commas between. Other fields are not read: comparisons will do.

    Raises UserError naming file, line and field.
    """
    prompts = []
    for path in map(Path, str(paths).split(",")):
        path = path / "prompts.jsonl" if path.is_dir() else path
        try:
            prompts += read_rows(path, check_prompt, Counter())
        except OSError as error:
            raise UserError(f"{path}: not read ({error.strerror or error}); prompts.py writes "
                            "such files") from None
        except ValueError as error:
            raise UserError(f"{error}; a line is {json.dumps(FORM)}") from None
    return prompts


def sets_of(tok, names, room, rank=0):
    """{objective: [(turns, ids)]} of prompt files; the oldest turns go where `room` is small."""
    kept, dropped = {}, 0
    for turns in read_prompts(names):
        ids, request = fit(tok, turns, room), world.request_of(turns)
        if ids:
            kept.setdefault(request.objective if request else "any", []).append((turns, ids))
        dropped += ids is None
    if rank == 0:
        print(f"{names}: " + ", ".join(f"{len(v)} {k}" for k, v in kept.items())
              + f" prompts, {dropped} too long")
    if not kept:
        raise UserError(f"{names}: no prompt fits: lower --new, or name others")
    return kept


def asker(cfg, tok, room, rank=0):
    """ask(rows, stage) -> dialogues that end with a request, and their ids of at most `room`
    tokens: each a function of (seed, stage, row). A share `mix` is from the generated prompts; of
    those whose objective the world knows, a share `helpful` asks for help (HH 4.1, 4.4).
    """
    sets = {name: sets_of(tok, name, room, rank)
            for name in (cfg.prompts, cfg.generated) if name}

    flat = {name: [x for some in kept.values() for x in some] for name, kept in sets.items()}

    def one(row, stage):
        rng = keyed(cfg.seed, "prompts", stage, row)
        from_model, helps, known, pick = rng.random(4)
        name = cfg.generated if cfg.generated and from_model < cfg.mix else cfg.prompts
        if not name:
            turns = world.prompt(f"{stage}/{cfg.seed}", row, world.TRAIN, p_harm=1 - cfg.helpful)
            return turns, tok.render(turns, answer=True)
        objective = "helpful" if helps < cfg.helpful else "harmless"
        some, unknown = sets[name].get(objective) or flat[name], sets[name].get("any", ())
        if known < len(unknown) / len(flat[name]):           # their share of the set, as it is
            some = unknown
        return some[int(pick * len(some))]

    def ask(rows, stage):
        dialogues, prompts = zip(*(one(r, stage) for r in rows), strict=True)
        if max(map(len, prompts)) > room:
            raise UserError(f"--new {cfg.new}: no room beside prompts of "
                            f"{max(map(len, prompts))} tokens; lower it")
        return dialogues, prompts

    return ask


def collected(cfg, tok, n_ctx):
    """First human turns, any --shots of which leave room for a new one, and counts of the dropped.

    Repeats stay in: how often a thing is asked is part of what the model shall go on with.
    """
    if cfg.prompts:
        dialogues = read_prompts(cfg.prompts)
    else:
        rows = (world.prompt(f"prompts/{cfg.seed}", r, world.TRAIN, p_harm=cfg.harmful)
                for r in itertools.count())
        dialogues = itertools.islice((turns for turns in rows if len(turns) == 1), cfg.collected)
    room = (n_ctx - cfg.new - 2) // cfg.shots          # 2: <|eod|> opens the row, <|human|> ends it
    texts, dropped = [], dict(empty=0, too_long=0)
    for turns in dialogues:
        text = next(text for role, text in turns if role == "human").strip()
        if not text:
            dropped["empty"] += 1
        elif len(tok.encode(text)) + 2 > room:         # its header and its end of turn
            dropped["too_long"] += 1
        else:
            texts.append(text)
    if len(texts) < cfg.shots:
        raise UserError(f"{cfg.prompts or '--collected'}: {len(texts)} requests of at most "
                        f"{room - 2} tokens (dropped {dropped}) are fewer than --shots {cfg.shots}:"
                        " lower it, or --new, or name more")
    return texts, dropped


# ---------------------------------------------------------------- sampling

def shots_of(cfg, texts, row):
    """The requests that a row's context shows, drawn without replacement."""
    chosen = keyed(cfg.seed, "shots", int(row)).choice(len(texts), cfg.shots, replace=False)
    return [texts[i] for i in chosen]


def write(cfg, tok, model, texts, rows):
    """(text, whether it ended its turn) that the model writes for each global row."""
    contexts = [tok.render([("human", x) for x in shots_of(cfg, texts, r)]) + [tok.human]
                for r in rows]
    random = uniforms(rows, cfg.new, cfg.seed, "prompts")
    return respond(model, tok, contexts, cfg.new, random, temperature=cfg.temperature)


def line_of(cfg, text, ended, shots, seen):
    """(the line of a text, "") or (None, why it is dropped, one of REASONS).

    shots: what its context showed; seen: the set of texts kept before.
    """
    if not ended:
        return None, "unended"
    if not text:
        return None, "empty"
    try:
        line = dict(prompt=join([("human", text)], answer=True), source="generated")
    except ValueError:
        return None, "header"
    if text in shots:
        return None, "shown"
    if not cfg.prompts:
        if HELD_OUT.search(text):
            return None, "heldout"
        request = world.request_of([("human", text)])
        if not request:
            return None, "no_request"
        line["objective"] = request.objective
    return (None, "repeated") if cfg.unique and text in seen else (line, "")


# ---------------------------------------------------------------- evaluate

def show(run, cfg, texts, kept):
    """How the kept ones, {row: text}, are spread, and the first three with what they were shown."""
    found, size, known = list(kept.values()), len(kept), set(texts)
    run.say(f"  {len(set(found))} different; {sum(x in known for x in found) / size:.0%} are the "
            "text of a collected one that was not shown")
    if not cfg.prompts:
        requests = [world.request_of([("human", x)]) for x in found]
        kinds = ", ".join(f"{kind} {n / size:.0%}" for kind, n
                          in Counter(r.kind for r in requests).most_common())
        run.say(f"  {sum(r.harmful for r in requests) / size:.0%} harmful; {kinds}")
    for row, text in list(kept.items())[:3]:
        run.say("\n" + "".join(f"  {x}\n" for x in shots_of(cfg, texts, row)) + f"    -> {text}")


# ---------------------------------------------------------------- the stage

def check(cfg):
    """UserError for a knob out of its range."""
    for name in ("shots", "count", "new"):
        if getattr(cfg, name) < 1:
            raise UserError(f"--{name} {getattr(cfg, name)}: at least 1")
    if not cfg.temperature > 0:
        raise UserError(f"--temperature {cfg.temperature}: above 0")


def generate_prompts(cfg):
    """The model's requests, sifted -> out/prompts.jsonl."""
    check(cfg)
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "prompts", rank)
    if run.finished:
        return print(f"prompts: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.model, scalar=False)
    tok, model = loads(source["tokenizer"]), unpack(source, device).eval()
    texts, dropped = collected(cfg, tok, model.config.n_ctx)
    if rank == 0:
        print(f"prompts: {len(texts)} collected requests to show, dropped {dropped}")
    lines, kept, seen, counts, i = [], {}, set(), dict.fromkeys(REASONS, 0), 0
    bar = tqdm(total=cfg.count, desc="prompts   ", dynamic_ncols=True, disable=rank > 0)
    while len(lines) < cfg.count:
        if run.stopping():
            raise KeyboardInterrupt
        if i >= PATIENCE * cfg.count:
            raise UserError(f"{cfg.model}: {len(lines)} of --count {cfg.count} prompts kept after "
                            f"{i} were written, dropped {counts}: lower --count"
                            + (", or leave out --unique" if cfg.unique else ""))
        rows = range(i, i + CHUNK)
        own = write(cfg, tok, model, texts, mine(rows, rank, world_size))
        for row, (text, ended) in zip(rows, everyones(own, world_size), strict=True):
            if len(lines) == cfg.count:
                counts["surplus"] += 1
                continue
            line, reason = line_of(cfg, text, ended, shots_of(cfg, texts, row), seen)
            if reason:
                counts[reason] += 1
            else:
                lines.append(line)
                kept[row] = text
                seen.add(text)
                bar.update()
        i += CHUNK
    bar.close()
    if rank == 0:
        content = "".join(json.dumps(x) + "\n" for x in lines)
        write_atomically(run.dir / "prompts.jsonl", lambda f: f.write(content.encode()))
        run.log(len(lines), generated=i, kept=len(lines), **counts)
        run.say(f"prompts: {i} written, {len(lines)} kept, dropped {counts}")
        show(run, cfg, texts, kept)
    run.save(len(lines), finished=True)


if __name__ == "__main__":
    entry(generate_prompts, Config, __doc__)
