"""Talk to a checkpoint in a terminal, or to two of them side by side.

    python sample.py --ckpt out/laptop/ppo                                a chat
    python sample.py --ckpt out/laptop/pretrain --hhh                     behind the HHH prompt
    python sample.py --ckpt out/laptop/ppo --prompt "What does the fox eat?"   one answer, no more
    python sample.py --ckpt out/laptop/distill --compare out/laptop/ppo   two columns
    python sample.py --ckpt out/laptop/ppo < questions.txt                one answer a line
    python sample.py --ckpt out/laptop/ppo --guard out/laptop/guard       declines what is unlike
    python sample.py --ckpt out/laptop/ppo --export FOLDER                for transformers
    python sample.py --import-hf FOLDER --tokenizer gpt2 --out out/gpt2   GPT-2, for an --init
    python sample.py --ckpt out/laptop/distill --average out/laptop/ppo --out out/half

In a chat /reset forgets the conversation; /quit, Ctrl-D and Ctrl-C leave. With --compare each
model goes on from its OWN answers: the conversations share the person's messages, nothing else.
With --guard (ood.py makes one) a message that is out of distribution is declined before anything
is generated, for all models if in one's conversation, and leaves no trace in the history.

What is typed is content: `Tokenizer.render` encodes it without special tokens, so no text can
forge a turn. The random numbers are a function of (seed, "sample", turn): the same chat gives the
same answers again, and compared models draw with the same numbers. Starts in seconds.
"""

import contextlib
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field

from common import Run, UserError, device_of, entry, load_source, uniforms
from data import hf, tokenizer, world
from data.screen import Stream, columns, printable
from data.tokenizer import Tokenizer, loads
from guard import load as load_guard
from model import GPT, averaged, generate, pack, unpack


@dataclass(frozen=True)
class Config:
    ckpt: str = "out/laptop/ppo"       # checkpoint to talk to: a stage's folder, or a file
    compare: str = ""                  # second checkpoint, answers side by side
    prompt: str = ""                   # answer this message and stop; empty: a chat
    guard: str = ""                    # guard of ood.py, which declines messages unlike its own
    hhh: bool = False                  # put the toy world's HHH prompt (HH A.1) in front
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # sampling temperature, 0.01 to 100
    top_p: float = 1.0                 # sample from the smallest set of tokens that has this mass
    greedy: bool = False               # the likeliest token each time, nothing random
    gold: bool = False                 # utilities of answers to requests that the toy world knows
    seed: int = 0                      # of the random numbers
    device: str = "auto"               # auto, cpu, cuda or mps
    export: str = ""                   # write ckpt as a new Hugging Face folder and stop
    import_hf: str = ""                # read a GPT-2 or Pythia from a Hugging Face folder, and stop
    tokenizer: str = "gpt2"            # of import_hf: gpt2, a folder (Pythia's own), a ranks file
    average: str = ""                  # write the mean of ckpt's weights and its own into out, stop
    weight: float = 0.5                # of average: its share in the mean, 0 to 1
    out: str = "out/gpt2"              # of import_hf and average: the folder of the new checkpoint


@dataclass
class Speaker:
    """A checkpoint and its side of the conversation: each message adds two turns."""
    name: str
    tok: Tokenizer
    model: GPT
    preamble: str = ""
    turns: list = field(default_factory=list)


# ---------------------------------------------------------------- the conversation

def read(path, device, scalar=None):
    """(tokenizer, model) of a checkpoint; scalar as in `load_source`. UserError if it has none."""
    try:
        content = load_source(path, scalar)
        tok, model = loads(content["tokenizer"]), unpack(content, device).eval()
        if model.config.vocab != tok.vocab:
            raise ValueError(f"{model.config.vocab} ids, {tok.vocab} in its tokenizer")
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:100]
        kind = "model" if scalar is None else "language model"
        raise UserError(f"{path}: holds no {kind} ({reason})") from None
    return tok, model


def load(cfg, path):
    """The Speaker of a checkpoint. Raises UserError if it holds no language model, or no room."""
    tok, model = read(path, device_of(cfg.device), scalar=False)
    speaker = Speaker(path, tok, model, *(world.hhh_prompt() if cfg.hhh else ()))
    ids_of(cfg, speaker, "")  # no room for an empty message is none for any
    return speaker


def ids_of(cfg, speaker, message):
    """The conversation and a message as a prompt. Raises UserError if it leaves no room."""
    turns, n_ctx = [*speaker.turns, ("human", message)], speaker.model.config.n_ctx
    ids = speaker.tok.render(turns, speaker.preamble, answer=True)
    if len(ids) + cfg.new > n_ctx:
        raise UserError(f"the context of {speaker.name} is full: {len(ids)} tokens and {cfg.new} "
                        f"for an answer are more than {n_ctx}; a smaller --new leaves more room")
    return ids


def answer(cfg, speaker, ids, turn, write):
    """(text, whether it ended by itself); `write` is told the text piece by piece."""
    tok, stream = speaker.tok, Stream(speaker.tok, write)
    uniform = None if cfg.greedy else uniforms([turn], cfg.new, cfg.seed, "sample")
    tokens, lengths, _ = generate(
        speaker.model, [ids], cfg.new, uniform, temperature=cfg.temperature, top_p=cfg.top_p,
        stops=tok.stops, pad=tok.pad, on_token=stream)
    stream.close()
    return stream.text, tokens[0, lengths[0] - 1].item() in tok.stops


def refused(cfg, speakers, message, guard):
    """Why the guard declines a message in one of the conversations; "" if in none, or no guard.

    It is told what was said here, without the HHH prompt.
    """
    given = len(world.hhh_prompt()[1]) if cfg.hhh else 0
    found = [guard.refusal([*s.turns[given:], ("human", message)]) for s in speakers if guard]
    return next(filter(None, found), "")


def exchange(cfg, speakers, message, turn, label="", guard=None):
    """A message and its answers: printed, a single one as it comes; then part of the histories.

    False if it was declined: then it is no part of them.
    """
    prompts = [ids_of(cfg, s, message) for s in speakers]  # all must fit before one answers
    alone, cells = len(speakers) == 1, []
    say(label)
    if refusal := refused(cfg, speakers, message, guard):
        say(f"[{refusal}]\n")
        return False
    for speaker, ids in zip(speakers, prompts, strict=True):
        text, ended = answer(cfg, speaker, ids, turn, say if alone else lambda piece: None)
        speaker.turns = [*speaker.turns, ("human", message), ("assistant", text)]
        request = world.request_of(speaker.turns) if cfg.gold else None
        gold = world.gold(request, text) if request else ()
        after = ["[gold helpful {:+.2f} harmless {:+.2f}]".format(*gold)] if gold else []
        after += [] if ended else [f"[cut off at --new {cfg.new} tokens]"]
        cells.append("\n".join((speaker.name, "", printable(text), *after)))
    if alone:
        say("\n")
        note(*after)
    else:
        say(columns(cells, shutil.get_terminal_size().columns) + "\n")
    return True


def chat(cfg, speakers, guard=None):
    """Messages from the terminal, or the lines of a pipe, until the input ends."""
    person = sys.stdin.isatty()
    labels = ("\nHuman: ", "\nAssistant: " if len(speakers) == 1 else "\n") if person else ("", "")
    first, turn, declined = [s.turns for s in speakers], 0, 0
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - arrow keys
        note(" and ".join(s.name for s in speakers) + ": /reset starts anew, /quit leaves")
    while True:
        try:
            message = input(labels[0]).strip()
        except EOFError:
            note(*[""] * person)
            break
        if message == "/quit":
            break
        if message == "/reset":
            for speaker, turns in zip(speakers, first, strict=True):
                speaker.turns = turns
            note("a new conversation")
        elif message:
            try:
                answered = exchange(cfg, speakers, message, turn, labels[1], guard)
                turn += answered  # goes on over /reset: the same question again, another answer
                declined += not answered
            except UserError as error:
                note(f"{error}; /reset starts anew")
    if guard:
        note(f"declined: {declined} of {turn + declined} messages")


def say(text):
    print(text, end="", flush=True)


def note(*lines):
    """What is no answer goes to stderr."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- to and from transformers

def export(cfg):
    """The checkpoint as a Hugging Face folder."""
    tok, model = read(cfg.ckpt, "cpu")
    try:
        hf.save(cfg.export, asdict(model.config), model.state_dict(), tok)
    except ValueError as error:
        raise UserError(error) from None
    print(f"{cfg.export}: {cfg.ckpt} with {tok.vocab} ids")


def import_hf(cfg):
    """A Hugging Face folder as a checkpoint, which any stage's --init takes."""
    run = Run(cfg, "import")
    if run.finished:
        return print(f"import: {run.dir} is finished, skipped")
    try:
        tok = tokenizer.load(cfg.tokenizer)
        gpt, weights, left_out = hf.load(cfg.import_hf, tok)
    except ValueError as error:
        raise UserError(error) from None
    run.save(0, finished=True, gpt=gpt, model=weights, tokenizer=tok.dumps())
    print(f"{run.dir}: {cfg.import_hf} with {tok.vocab} ids; tensors left out: "
          f"{left_out or 'none'}")


# ---------------------------------------------------------------- the mean of two models

def average(cfg):
    """Two language models of one shape and vocabulary as a checkpoint between them.

    Weights between those before and after RLHF trade its gains against what it costs elsewhere
    (Lin et al. 2024, "Mitigating the Alignment Tax of RLHF").
    """
    if not 0 <= cfg.weight <= 1 or cfg.out == Config.out:
        raise UserError("--average needs a --weight from 0 to 1, and an --out of its own")
    run = Run(cfg, "average")
    if run.finished:
        return print(f"average: {run.dir} is finished, skipped")
    (tok, first), (other, second) = (read(x, "cpu", scalar=False) for x in (cfg.ckpt, cfg.average))
    for what, a, b in (("sizes", first.config, second.config),
                       ("vocabularies", tok.dumps(), other.dumps())):
        if a != b:
            raise UserError(f"{cfg.ckpt} and {cfg.average} have different {what}: both must come "
                            "from one base model")
    mean = averaged(first.state_dict(), second.state_dict(), cfg.weight)
    run.save(0, finished=True, **dict(pack(first, tok), model=mean))
    print(f"{run.dir}: {1 - cfg.weight:g} of {cfg.ckpt} and {cfg.weight:g} of {cfg.average}")


def main(cfg):
    if cfg.new < 1 or cfg.prompt.isspace():
        raise UserError("--new must be at least 1, and --prompt no blank")
    if not 0.01 <= cfg.temperature <= 100 or not 0 < cfg.top_p <= 1:
        raise UserError("--temperature goes from 0.01 to 100 (--greedy for its limit), "
                        "--top-p from above 0 to 1")
    for stream in filter(None, (sys.stdin, sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # input that is no UTF-8, a terminal that is ASCII
    jobs = [job for job, asked in ((export, cfg.export), (import_hf, cfg.import_hf),
                                   (average, cfg.average)) if asked]
    if len(jobs) > 1:
        raise UserError("--export, --import-hf and --average: one at a time")
    if jobs:
        return jobs[0](cfg)
    try:
        speakers = [load(cfg, path) for path in (cfg.ckpt, *filter(None, [cfg.compare]))]
        guard = load_guard(cfg.guard, device_of(cfg.device)) if cfg.guard else None
        if cfg.prompt:
            exchange(cfg, speakers, cfg.prompt.strip(), turn=0, guard=guard)
        elif sys.stdin:
            chat(cfg, speakers, guard)
    except KeyboardInterrupt:
        note("")
        sys.exit(130 if cfg.prompt else 0)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    entry(main, Config, __doc__)
