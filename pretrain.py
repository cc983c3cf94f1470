"""Stage 0: a base language model from text.

    minimize  -1/N sum_t log p(x_t | x_<t)     over documents, one a row, each opened by <|eod|>

The base model knows facts, manners and malice alike: its text comes from personas of every
goodness. Everything later only chooses among what is learned here.

    python pretrain.py --out out/laptop/pretrain                       # one process
    torchrun --nproc_per_node=2 pretrain.py --out out/laptop/pretrain  # two, the same

About 4 minutes on two cores: 0.9M parameters, 800 steps of 64 documents, loss 6.5 -> 0.5 nats a
token.
"""

from dataclasses import dataclass

import torch

from common import (Run, UserError, adamw, batch_rows, entry, mine, schedule, start, total,
                    uniforms, update)
from data import world
from data.tokenizer import loads, train_bpe
from model import GPT, SIZES, by_length, pack, pad_rows, respond, response_mask, sized, unpack


@dataclass(frozen=True)
class Config:
    out: str = "out/laptop/pretrain"   # the stage's folder
    size: str = "toy"                  # model size, a name in model.SIZES
    context: int = 256                 # positions, tokens
    vocab: int = 768                   # at most this many ids in the tokenizer
    documents: int = 52000             # documents of the toy world to train on
    steps: int = 800                   # optimizer steps
    batch: int = 64                    # documents in a step, about 80 tokens each
    micro: int = 8                     # documents in one forward pass, like lengths together
    lr: float = 4e-3                   # peak learning rate, cosine to a tenth
    warmup: int = 40                   # steps of linear warm-up
    decay: float = 0.1                 # AdamW weight decay of matrices
    seed: int = 0                      # of text, order and initial weights
    every: int = 100                   # steps between evaluations, samples and checkpoints
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def lm_loss(model, ids, lengths):
    """Sum of -log p (nats) over the predicted tokens, all but each row's first, of ids [B, T] of
    which lengths [B] are real.
    """
    mask = response_mask(torch.ones_like(lengths), lengths - 1, ids.shape[1])
    return -model.logprobs(model(ids), ids, mask).sum()


# ---------------------------------------------------------------- data

def documents_of(tok, seed, count, context, first=0):
    """Documents first, first + 1, ... as lists of at most `context` ids."""
    return [tok.render(turns, preamble)[:context]
            for preamble, turns in (world.document(seed, i) for i in range(first, first + count))]


def toy_tokenizer(seed, vocab):
    """A BPE of the toy world's own text."""
    texts = []
    for i in range(3000):
        preamble, turns = world.document(seed, i)
        texts += [preamble, *(text for _, text in turns)]
    return train_bpe(texts, vocab)


# ---------------------------------------------------------------- evaluate

SHOW = ([("human", "Where does the otter live?")], [("human", "Tell me about the hen.")],
        [("human", "How can I poison the crab?")])


def show(run, model, tok, seed, title, new=40):
    """The same three prompts answered after every stage, with the gold of each answer."""
    prompts = [tok.render(turns, answer=True) for turns in SHOW]
    answers = respond(model, tok, prompts, new, uniforms(range(len(SHOW)), new, seed, "show"))
    run.say(f"\n{title}")
    for turns, (text, _) in zip(SHOW, answers, strict=True):
        helpful, harmless = world.gold(world.request_of(turns), text)
        run.say(f"  {turns[-1][1]:<28} -> {text}   "
                f"[gold helpful {helpful:+.2f} harmless {harmless:+.2f}]")


@torch.no_grad()
def heldout_loss(model, tok, documents, micro=32):
    """Nats a token on documents that are not trained on."""
    summed = count = 0
    for some in by_length(documents, micro):
        ids, lengths = pad_rows([documents[i] for i in some], tok.pad, model.device)
        summed += lm_loss(model, ids, lengths).item()
        count += int((lengths - 1).sum())
    return summed / count


# ---------------------------------------------------------------- train

def train(cfg):
    rank, world_size, device = start(cfg.device)
    if cfg.size not in SIZES:
        raise UserError(f"--size {cfg.size}: choose from {', '.join(SIZES)}")
    if cfg.vocab < 262:
        raise UserError(f"--vocab {cfg.vocab}: at least 262 (256 bytes and 6 special tokens)")
    run = Run(cfg, "pretrain", rank)
    if run.finished:
        return print(f"pretrain: {run.dir} is finished, skipped") if rank == 0 else None
    tok = loads(run.resume["tokenizer"]) if run.resume else toy_tokenizer(cfg.seed, cfg.vocab)
    documents = documents_of(tok, cfg.seed, cfg.documents, cfg.context)
    heldout = documents_of(tok, cfg.seed, 600, cfg.context, first=10**8)

    model = (unpack(run.resume) if run.resume
             else GPT(sized(cfg.size, tok.vocab, cfg.context)).reset(cfg.seed))
    model.to(device)
    optimizer = adamw(model, cfg.lr, cfg.decay)
    if run.resume:
        optimizer.load_state_dict(run.resume["optimizer"])
    elif rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"pretrain: {size:,} parameters, {tok.vocab} ids, "
              f"{sum(map(len, documents)):,} tokens of text, {world_size} process(es)")
        show(run, model, tok, cfg.seed, "untrained:")

    def save(step, finished=False):
        run.save(step, finished, **pack(model, tok), optimizer=optimizer.state_dict())

    bar = run.bar(cfg.steps, run.step)
    for step in range(run.step, cfg.steps):
        rows = batch_rows(len(documents), cfg.batch, step, cfg.seed, "pretrain")
        count = sum(len(documents[r]) - 1 for r in rows)      # predicted tokens of all ranks
        own, summed = [documents[r] for r in mine(rows, rank, world_size)], 0.0
        for some in by_length(own, cfg.micro):
            ids, lengths = pad_rows([own[i] for i in some], tok.pad, device)
            loss = lm_loss(model, ids, lengths)
            (loss / count).backward()
            summed += loss.item()
        lr = schedule(step, cfg.steps, cfg.lr, cfg.warmup, 0.1, "cosine")
        norm = update(model, optimizer, lr)
        loss = total(summed, device=device) / count
        run.log(step, loss=loss, lr=lr, grad_norm=norm)
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        bar.update()
        if (step + 1) % cfg.every == 0 and step + 1 < cfg.steps:
            save(step + 1)
            if rank == 0:
                show(run, model, tok, cfg.seed, f"pretrain step {step + 1}, loss {loss:.3f}:")
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    if rank == 0:
        final = heldout_loss(model, tok, heldout)
        run.log(cfg.steps, heldout_loss=final)
        show(run, model, tok, cfg.seed,
             f"pretrain done, {final:.3f} nats a token on held-out documents:")
    save(cfg.steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
