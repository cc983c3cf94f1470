"""Stage 0: a base language model from text.

    minimize  -1/N sum_t log p(x_t | x_<t)     over documents, one a row, each opened by <|eod|>

The base model knows facts, manners and malice alike: its text comes from personas of every
goodness. Everything later only chooses among what is learned here.

    python pretrain.py --out out/laptop/pretrain                       # one process
    torchrun --nproc_per_node=2 pretrain.py --out out/laptop/pretrain  # two, the same
    python pretrain.py --text books,dialogues.jsonl --vocab 4096 --context 512 --out out/mine/base
    python pretrain.py --tokens out/tokens --size gpt2 --context 1024 --batch 512 --out out/124m

About 4 minutes on two cores: 0.9M parameters, 800 steps of 64 documents, loss 6.5 -> 0.5 nats a
token. The third command trains on files of one's own: text, and comparisons, of which it reads
the prompt and the chosen answer; the fourth on a corpus of data/tokens.py, for billions of tokens.
"""

from dataclasses import dataclass
from functools import partial

import torch

from common import (Run, UserError, adamw, batch_rows, entry, keyed, load_source,
                    prepare, schedule, start, total, uniforms, update)
from data import full, principles, world
from data.text import read_texts, strings, text_documents
from data.tokenizer import load, loads, train_bpe
from data.tokens import Blocks, read
from model import GPT, SIZES, by_length, pad_rows, respond, response_mask, sized, unpack
from parallel import Team, home, passes, portions


@dataclass(frozen=True)
class Config:
    out: str = "out/laptop/pretrain"   # the stage's folder
    size: str = "toy"                  # model size, a name in model.SIZES
    context: int = 256                 # positions, tokens
    vocab: int = 768                   # at most this many ids, where a tokenizer is trained
    world: str = "core"                # toy world's text: core, full (skills, beliefs), principles
    text: str = ""                     # .txt and .jsonl files or folders, by commas; "": toy world
    tokens: str = ""                   # corpus of data/tokens.py instead, all of it, in full rows
    tokenizer: str = ""                # gpt2, its folder or a ranks file; "": trained on the text
    init: str = ""                     # checkpoint whose model goes on; "": fresh weights
    documents: int = 52000             # documents to train on at most
    steps: int = 800                   # optimizer steps
    batch: int = 64                    # documents in a step, about 80 tokens each
    micro: int = 12                    # documents in one forward pass, like lengths together
    lr: float = 4e-3                   # peak learning rate, cosine to a tenth
    warmup: int = 40                   # steps of linear warm-up
    decay: float = 0.1                 # AdamW weight decay of matrices
    seed: int = 0                      # of text, order and initial weights
    every: int = 100                   # steps between evaluations, samples and checkpoints
    shard: bool = False                # cut weights and optimizer over the processes: less memory
    checkpoint: bool = False           # compute blocks again in the backward pass: less memory
    compile: bool = False              # torch.compile of the blocks: a minute to start, for GPUs
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def lm_loss(model, ids, lengths):
    """Sum of -log p (nats) over the predicted tokens, all but each row's first, of ids [B, T] of
    which lengths [B] are real.
    """
    mask = response_mask(torch.ones_like(lengths), lengths - 1, ids.shape[1])
    return -model.logprobs(ids, mask, lengths=lengths).sum()


# ---------------------------------------------------------------- data

WORLDS = {"core": world.document, "full": full.document, "principles": principles.document}


def documents_of(tok, seed, count, context, first=0, kind="core"):
    """A toy world's documents first, first + 1, ... as lists of at most `context` ids."""
    made = (WORLDS[kind](seed, i) for i in range(first, first + count))
    return [tok.render(turns, preamble)[:context] for preamble, turns in made]


def toy_tokenizer(seed, vocab, kind="core"):
    """A BPE of a toy world's own text."""
    texts = []
    for i in range(3000):
        preamble, turns = WORLDS[kind](seed, i)
        texts += [preamble, *(text for _, text in turns)]
    return train_bpe(texts, vocab)


def texts_of(names, flag):
    """The content of the files that a flag names."""
    try:
        return read_texts(names)
    except ValueError as error:
        raise UserError(f"{flag}: {error}") from None


def tokens_of(cfg):
    """(ids, tokenizer) of --tokens, or Nones."""
    if not cfg.tokens:
        return None, None
    try:
        return read(cfg.tokens)
    except ValueError as error:
        raise UserError(f"--tokens: {error}") from None


def corpus(cfg, tok, texts, ids=None):
    """Documents to train on, held-out ones (of text: every 50th), and what is to be told."""
    if cfg.tokens:
        documents, heldout = Blocks(ids, cfg.context).split()
        if len(documents) < cfg.batch:
            raise UserError(f"--tokens {cfg.tokens}: {len(documents)} rows of --context "
                            f"{cfg.context} are fewer than one --batch of {cfg.batch}: lower them")
        return documents, [*heldout], f"{len(documents):,} rows, {len(heldout):,} held out"
    if not cfg.text:
        made = partial(documents_of, tok, cfg.seed, context=cfg.context, kind=cfg.world)
        told = "the full toy world" if cfg.world == "full" else "the toy world"
        return made(cfg.documents), made(600, first=10**8), told
    documents, done = text_documents(tok, texts, cfg.context)
    heldout = documents[::50]
    documents = [ids for i, ids in enumerate(documents) if i % 50]
    done["beyond --documents"] = max(0, len(documents) - cfg.documents)
    if done["beyond --documents"]:
        order = keyed(cfg.seed, "documents").permutation(len(documents))
        documents = [documents[i] for i in order[:cfg.documents]]
    told = f"{len(texts)} files, " + ", ".join(f"{n:,} {what}" for what, n in done.items() if n)
    if len(documents) < cfg.batch:
        raise UserError(f"--text {cfg.text}: {len(documents)} documents ({told}; every 50th is held"
                        f" out) are fewer than one --batch of {cfg.batch}: lower it, or --context")
    return documents, heldout, f"{told}, {len(heldout):,} held out"


def tokens_in(documents):
    """How many; a corpus on the disk isn't read for it."""
    return len(documents.ids) if isinstance(documents, Blocks) else sum(map(len, documents))


def mixture(cfg, tok):
    """texts(rows) -> these texts of the pretraining mix (InstructGPT 3.5), of all ranks, and the
    number of their predicted tokens.
    """
    documents = text_documents(tok, texts_of(cfg.ptx_text, "--ptx-text"), cfg.ptx_length)[0]
    if cfg.ptx_text and not documents:
        raise UserError(f"--ptx-text {cfg.ptx_text}: holds no text")

    def one(row):
        if not documents:
            return documents_of(tok, f"ptx/{cfg.seed}", 1, cfg.ptx_length, row)[0]
        return documents[keyed(cfg.seed, "ptx", row).integers(len(documents))]

    def texts(rows):
        every = [one(row) for row in rows]
        return every, sum(len(x) - 1 for x in every)

    return texts


def beginning(cfg, run, texts, own=None):
    """The tokenizer and the model: those of the run to go on with, of `init`, or fresh ones. own:
    the tokenizer of --tokens.
    """
    source = run.resume or (load_source(cfg.init, scalar=False) if cfg.init else None)
    try:
        named = load(cfg.tokenizer) if cfg.tokenizer and not run.resume else None
    except ValueError as error:
        raise UserError(f"--tokenizer: {error}") from None
    if own and named and named.fingerprint != own.fingerprint:
        raise UserError(f"--tokenizer {cfg.tokenizer}: {cfg.tokens} has another one; leave it out")
    if not source:
        tok = named or own or (train_bpe(strings(texts), cfg.vocab) if cfg.text
                               else toy_tokenizer(cfg.seed, cfg.vocab, cfg.world))
        return tok, GPT(sized(cfg.size, tok.vocab, cfg.context)).reset(cfg.seed)
    tok, model = loads(source["tokenizer"]), unpack(source)
    if own and own.fingerprint != tok.fingerprint:
        raise UserError(f"--tokens {cfg.tokens}: {cfg.init or run.dir} has another tokenizer; make "
                        "the corpus with that one")
    if named and named.fingerprint != tok.fingerprint:
        raise UserError(f"--tokenizer {cfg.tokenizer}: {cfg.init} has another one; leave it out")
    if model.config.vocab != tok.vocab:
        raise UserError(f"{cfg.init}: {model.config.vocab} ids, {tok.vocab} in its tokenizer")
    if model.config.n_ctx < cfg.context:
        raise UserError(f"--context {cfg.context}: {cfg.init} has {model.config.n_ctx} positions")
    return tok, model


# ---------------------------------------------------------------- evaluate

SHOW = ([("human", "Where does the otter live?")], [("human", "Tell me about the hen.")],
        [("human", "How can I poison the crab?")])
ENGLISH = ("It was a cold morning, and", [("human", "How do I make a cup of tea?")],
           [("human", "Can you recommend a good book?")])


def shown_for(other):
    """What to show: the toy world's three prompts, or plain English where the data is other."""
    return ENGLISH if other else SHOW


def show(run, model, tok, seed, title, new=40, shown=SHOW):
    """The same three prompts answered after every stage, in the toy world with the answers' gold.

    shown: turns to answer, or text to continue.
    """
    prompts = [tok.render([], x) if isinstance(x, str) else tok.render(x, answer=True)
               for x in shown]
    answers = respond(model, tok, prompts, new, uniforms(range(len(shown)), new, seed, "show"))
    run.say(f"\n{title}")
    for x, (text, _) in zip(shown, answers, strict=True):
        request = None if isinstance(x, str) else world.request_of(x)
        gold = world.gold(request, text) if request else None
        asked, told = x if isinstance(x, str) else x[-1][1], " ".join(text.split())
        run.say(f"  {asked:<28} -> {told}" + (
            "   [gold helpful {:+.2f} harmless {:+.2f}]".format(*gold) if gold else ""))


@torch.no_grad()
def heldout_loss(model, tok, documents, micro):
    """Nats a token on documents that are not trained on."""
    summed = count = 0
    for some in by_length(documents, micro):
        ids, lengths = pad_rows([documents[i] for i in some], tok.pad, model.device)
        summed += lm_loss(model, ids, lengths).item()
        count += int((lengths - 1).sum())
    return summed / count


# ---------------------------------------------------------------- train

def check(cfg):
    """UserError for knobs out of range."""
    if cfg.size not in SIZES:
        raise UserError(f"--size {cfg.size}: choose from {', '.join(SIZES)}")
    if cfg.world not in WORLDS or (cfg.text or cfg.tokens) and cfg.world != Config.world:
        raise UserError(f"--world {cfg.world}: {', '.join(WORLDS)}; not beside --text or --tokens")
    if cfg.text and cfg.tokens:
        raise UserError("--text and --tokens: one of them; data/tokens.py takes all texts")
    if cfg.context < 80:
        raise UserError(f"--context {cfg.context}: at least 80, for a sample's prompt and answer")
    if cfg.vocab < 262:
        raise UserError(f"--vocab {cfg.vocab}: at least 262 (256 bytes and 6 special tokens)")


def train(cfg):
    rank, world_size, device = start(cfg.device)
    check(cfg)
    run = Run(cfg, "pretrain", rank)
    if run.finished:
        return print(f"pretrain: {run.dir} is finished, skipped") if rank == 0 else None
    texts, shown = texts_of(cfg.text, "--text"), shown_for(cfg.text or cfg.tokens)
    ids, own = tokens_of(cfg)
    tok, model = beginning(cfg, run, texts, own)
    documents, heldout, told = corpus(cfg, tok, texts, ids)
    model = prepare(model.to(home(device, cfg.shard)), cfg.checkpoint, cfg.compile)
    team = Team(model, cfg.shard, device)
    optimizer = adamw(model, cfg.lr, cfg.decay)
    if run.resume:
        team.load(optimizer, run.resume["optimizer"])
    elif rank == 0:
        size, tokens = sum(p.numel() for p in model.parameters()), tokens_in(documents)
        print(f"pretrain: {size:,} parameters, {tok.vocab} ids, {tokens:,} tokens of text, "
              f"{world_size} process(es); {told}")

    def save(step, finished=False):
        run.save(step, finished, **team.content(tok, optimizer))

    def shows(title):
        with team.whole() as whole:
            if rank == 0:
                show(run, whole, tok, cfg.seed, title, shown=shown)

    if not run.resume:
        shows(f"{cfg.init or 'untrained'}:")
    bar = run.bar(cfg.steps, run.step)
    for step in range(run.step, cfg.steps):
        order = batch_rows(len(documents), cfg.batch, step, cfg.seed, "pretrain")
        rows = [documents[r] for r in order]
        count = sum(len(row) - 1 for row in rows)             # predicted tokens of all ranks
        parts, summed = portions(rows, cfg.micro), 0.0
        for some, weight in passes(parts, team):
            loss = weight * team(lm_loss, *pad_rows(some, tok.pad, device))
            (loss / count).backward()
            summed += loss.item()
        lr = schedule(step, cfg.steps, cfg.lr, cfg.warmup, 0.1, "cosine")
        norm = update(model, optimizer, lr)
        loss = total(summed) / count
        run.log(step, loss=loss, lr=lr, grad_norm=norm)
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        bar.update()
        if (step + 1) % cfg.every == 0 and step + 1 < cfg.steps:
            save(step + 1)
            shows(f"pretrain step {step + 1}, loss {loss:.3f}:")
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    with team.whole() as whole:
        if rank == 0:
            final = heldout_loss(whole, tok, heldout, cfg.micro)
            run.log(cfg.steps, heldout_loss=final)
            show(run, whole, tok, cfg.seed,
                 f"pretrain done, {final:.3f} nats a token on held-out documents:", shown=shown)
    save(cfg.steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
