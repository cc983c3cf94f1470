"""Stage 1: context distillation of the HHH prompt (HH A.1).

The teacher reads the HHH prompt before each text, the student reads the text alone, and learns to
predict as if it had read the prompt:

    minimize  1/N sum_t KL( p(. | prompt, x_<t) || q(. | x_<t) )

over 51 classes: the teacher's 50 likeliest tokens and one class for all the rest. Half of the
texts are documents of the pretraining text, half are questions with fine answers (the part that
StackExchange plays in the paper). The teacher's top-50 log-probs are computed once and kept in
teacher.pt: 400 bytes a token. For many texts, --no-cache asks the teacher at each step.

    python distill.py --init out/laptop/pretrain --out out/laptop/distill
    torchrun --nproc_per_node=2 distill.py --init out/laptop/pretrain --out out/laptop/distill
    python distill.py --init out/mine/base --prompt data/hhh.txt --tokens out/tokens \
                      --dialogues out/hh/train.jsonl --no-cache --out out/mine/distill

About 1 minute on two cores; the loss to the teacher falls more than tenfold.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from common import (ALONE, Run, UserError, adamw, batch_rows, entry, keyed, load_checkpoint,
                    load_source, meet, prepare, save_checkpoint, schedule, start, total, update)
from data import world
from data.text import dialogue, read_dialogues, read_prompt, text_files
from data.tokenizer import loads
from data.tokens import Blocks, read
from model import pad_rows, response_mask, unpack
from parallel import Team, home, passes, portions
from pretrain import show, shown_for


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/pretrain"  # the student's starting checkpoint
    teacher: str = ""                  # the teacher's checkpoint; empty: the same as init
    out: str = "out/laptop/distill"    # the stage's folder
    texts: int = 3840                  # texts in the teacher's cache, half of them documents
    prompt: str = ""                   # file of an HHH prompt (data/hhh.txt); "": the toy world's
    tokens: str = ""                   # corpus of data/tokens.py: documents of other text
    dialogues: str = ""                # .jsonl of prompts and chosen answers, by commas: its talks
    cache: bool = True                 # keep the teacher's classes; or ask it at each step
    top: int = 50                      # teacher's log-probs kept of a token; the rest is one class
    length: int = 128                  # tokens of a text at most
    steps: int = 120                   # optimizer steps
    batch: int = 32                    # texts in a step (HH A.1: 32)
    micro: int = 8                     # texts in one forward pass, like lengths together
    lr: float = 5e-4                   # learning rate, linear to 0
    seed: int = 0                      # of texts and order
    every: int = 60                    # steps between evaluations, samples and checkpoints
    shard: bool = False                # cut weights and optimizer over the processes: less memory
    checkpoint: bool = False           # compute blocks again in the backward pass: less memory
    compile: bool = False              # torch.compile of the blocks: a minute to start, for GPUs
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def top_and_rest(logits, top):
    """logits [N, V] -> the teacher's classes: log-probs, ids, both [N, top], likeliest first."""
    return logits.log_softmax(-1).topk(top, -1)


def distill_loss(logits, top_logps, top_ids):
    """KL(teacher || student) in nats for each of N tokens, over top + 1 classes.

    logits [N, V] are the student's; top_logps, top_ids [N, top] the teacher's. The last class is
    "any other token".
    """
    logq = logits.log_softmax(-1)                                       # [N, V]
    q_top = logq.gather(-1, top_ids)                                    # [N, top]
    q_rest = logq.scatter(-1, top_ids, -torch.inf).logsumexp(-1)        # [N]
    p_rest = (1 - top_logps.exp().sum(-1)).clamp(min=0)                 # [N]
    kl_top = (top_logps.exp() * (top_logps - q_top)).sum(-1)
    if top_ids.shape[-1] == logits.shape[-1]:                           # there is no other token
        return kl_top
    return kl_top + torch.where(p_rest > 0, p_rest * (p_rest.clamp(min=1e-30).log() - q_rest), 0.0)


# ---------------------------------------------------------------- data

class Texts:
    """Lists of ids without the opening <|eod|>, of pools in turn: row i is of pool i mod pools.

    pools: [(sequence of rows that begin with one id more, its order)].
    """

    def __init__(self, pools, count):
        self.pools, self.count = pools, count

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        if not 0 <= row < self.count:
            raise IndexError(row)
        pool, order = self.pools[row % len(self.pools)]
        return pool[int(order[row // len(self.pools) % len(order)])][1:]


def real_texts(cfg, tok, length):
    """cfg.texts texts of the corpus `tokens` and of `dialogues`, in turn where both are given, and
    256 that are held out: of each pool a 50th at least.
    """
    pools = []
    try:
        if cfg.tokens:
            ids, own = read(cfg.tokens)
            if own.fingerprint != tok.fingerprint:
                raise ValueError(f"{cfg.tokens} has another tokenizer than {cfg.init}")
            pools.append(Blocks(ids, length + 1))
        if cfg.dialogues:
            lines = [line for path in text_files(cfg.dialogues) for line in read_dialogues(path)]
            pools.append([dialogue(tok, *line, length + 1)[0] for line in lines])
    except ValueError as error:
        raise UserError(f"--tokens or --dialogues: {error}") from None
    if min(map(len, pools)) < 2:
        raise UserError("--tokens or --dialogues: fewer than two texts")
    orders = [keyed(cfg.seed, "texts", i).permutation(len(x)) for i, x in enumerate(pools)]
    held = [max(1, min(256, len(x) // 50)) for x in orders]
    return (Texts([(p, x[n:]) for p, x, n in zip(pools, orders, held)], cfg.texts),
            Texts([(p, x[:n]) for p, x, n in zip(pools, orders, held)], 256))


def prompt_of(cfg, tok, room):
    """Ids of the HHH prompt in at most `room` tokens: its last dialogues go first."""
    if not cfg.prompt:
        preamble, turns = world.hhh_prompt()
        return tok.render(turns, preamble)
    try:
        preamble, dialogues = read_prompt(cfg.prompt)
    except (OSError, ValueError) as error:
        raise UserError(f"--prompt {cfg.prompt}: {error}") from None
    for n in range(len(dialogues), 0, -1):
        ids = tok.render([turn for some in dialogues[:n] for turn in some], preamble)
        if len(ids) <= room:
            return ids
    raise UserError(f"--prompt {cfg.prompt}: {len(ids)} tokens with one dialogue, and texts of "
                    f"--length {cfg.length} leave room for {room}")


def texts_of(tok, seed, count, length, first=0):
    """Lists of ids without the opening <|eod|>: even rows documents, odd rows questions with fine
    answers.
    """
    rows = []
    for i in range(first, first + count):
        if i % 2 == 0:
            preamble, turns = world.document(f"distill/{seed}", i)
        else:
            rng = world.keyed("forum", seed, i)
            preamble, turns = "", world.talk(rng, world.ANIMALS, 1.0, rng.randint(1, 2))
        rows.append(tok.render(turns, preamble)[1:length + 1])
    return rows


def toy_texts(cfg, tok, length):
    """cfg.texts texts of the toy world, and 256 that are held out."""
    return (texts_of(tok, cfg.seed, cfg.texts, length),
            texts_of(tok, cfg.seed, 256, length, first=10**8))


@torch.no_grad()
def teach(teacher, prompt, texts, top, micro, rank=0):
    """The teacher behind the prompt: for each text (log-probs [L, top], ids [L, top]) of its L
    tokens.
    """
    order, out = sorted(range(len(texts)), key=lambda i: len(texts[i])), [None] * len(texts)
    for i in tqdm(range(0, len(order), micro), desc="teacher   ", disable=rank > 0,
                  dynamic_ncols=True):
        some = order[i:i + micro]
        ids, lengths = pad_rows([prompt + texts[j] for j in some], 0, teacher.device)
        before = torch.full_like(lengths, len(prompt) - 1)   # predicts a text's first token
        asked = response_mask(before, lengths - len(prompt), ids.shape[1])
        logps, tops = top_and_rest(teacher.logits(teacher(ids, lengths, at=asked)), top)
        sizes = [len(texts[j]) for j in some]
        for j, *found in zip(some, logps.cpu().split(sizes), tops.int().cpu().split(sizes)):
            out[j] = tuple(x.clone() for x in found)
    return out


def student_loss(model, ids, lengths, predicts, logps, tops):
    """Sum of distill_loss over the tokens of what student_batch gives."""
    return distill_loss(model.logits(model(ids, lengths, at=predicts)), logps, tops).sum()


def student_batch(tok, texts, taught, rows, device):
    """ids [B, T] of <|eod|> + text, lengths [B], mask [B, T] of the N positions that predict a text
    token, and the teacher's classes there (log-probs [N, top], ids [N, top]).
    """
    ids, lengths = pad_rows([[tok.eod] + texts[r] for r in rows], tok.pad, device)
    predicts = response_mask(torch.zeros_like(lengths), lengths - 1, ids.shape[1])
    logps = torch.cat([taught[r][0] for r in rows]).to(device)
    tops = torch.cat([taught[r][1] for r in rows]).long().to(device)
    return ids, lengths, predicts, logps, tops


# ---------------------------------------------------------------- evaluate

@torch.no_grad()
def heldout_kl(model, tok, texts, taught, micro=32):
    """KL to the teacher in nats a token, on texts that are not trained on."""
    summed = count = 0
    for i in range(0, len(texts), micro):
        rows = range(i, min(i + micro, len(texts)))
        ids, lengths, predicts, logps, tops = student_batch(tok, texts, taught, rows, model.device)
        summed += student_loss(model, ids, lengths, predicts, logps, tops).item()
        count += len(logps)
    return summed / count


# ---------------------------------------------------------------- train

def load_models(cfg, device, resume=None):
    """tok, teacher, model (the student), and the checkpoint that the teacher comes from."""
    source = load_source(cfg.init, scalar=False)
    guide = load_source(cfg.teacher, scalar=False) if cfg.teacher else source
    tok = loads(source["tokenizer"])
    if guide["tokenizer"] != source["tokenizer"]:
        raise UserError(f"{cfg.teacher} and {cfg.init} have different vocabularies: "
                        "distil between models of one tokenizer")
    model = prepare(unpack(resume or source, home(device, cfg.shard)), cfg.checkpoint, cfg.compile)
    return tok, unpack(guide, device).eval(), model, guide


def text_length(cfg, teacher, prompt):
    """Tokens of a text at most: cfg.length, or what the teacher's context leaves behind prompt."""
    room = teacher.config.n_ctx - len(prompt)
    if room < 16:
        raise UserError(f"{cfg.teacher or cfg.init}: a context of {teacher.config.n_ctx} tokens "
                        f"has no room behind the HHH prompt of {len(prompt)}")
    return min(cfg.length, room)


def cached_teach(cfg, guide, ask, texts, length, rank):
    """What ask(texts), which is teach(), returns; from teacher.pt if that was made the same way."""
    cache = Path(cfg.out) / "teacher.pt"
    key = [cfg.teacher or cfg.init, guide.get("config"), guide.get("step"), cfg.texts, cfg.top,
           length, cfg.seed, *filter(None, [cfg.prompt, cfg.tokens, cfg.dialogues])]
    meet(ALONE, ALONE)             # or a rank that comes late would find what rank 0 has written
    cached = load_checkpoint(cache) if cache.exists() else {}
    if cached.get("key") == key:
        return cached["taught"]
    taught = ask(texts, rank=rank)
    if rank == 0:
        save_checkpoint(cache, key=key, taught=taught)
    return taught


def check(cfg):
    """UserError for knobs that don't fit together."""
    real = cfg.tokens or cfg.dialogues
    if bool(real) != bool(cfg.prompt):
        raise UserError("--prompt goes with --tokens, --dialogues or both: the toy world's prompt "
                        "with its own texts, another with others")


def train(cfg):
    rank, world_size, device = start(cfg.device)
    check(cfg)
    run = Run(cfg, "distill", rank)
    if run.finished:
        return print(f"distill: {run.dir} is finished, skipped") if rank == 0 else None
    tok, teacher, model, guide = load_models(cfg, device, run.resume)
    prompt = prompt_of(cfg, tok, teacher.config.n_ctx - cfg.length)
    length = text_length(cfg, teacher, prompt)
    texts, heldout = (real_texts if cfg.prompt else toy_texts)(cfg, tok, length)
    ask = partial(teach, teacher, prompt, top=cfg.top, micro=cfg.micro)
    taught = (cached_teach(cfg, guide, ask, [*texts, *heldout], length, rank) if cfg.cache
              else [None] * cfg.texts + ask(heldout, rank=rank))
    team = Team(model, cfg.shard, device)
    optimizer = adamw(model, cfg.lr)

    def save(step, finished=False):
        run.save(step, finished, **team.content(tok, optimizer))

    def batch(rows):
        known = taught if cfg.cache else dict(zip(rows, ask([texts[r] for r in rows], rank=1)))
        return student_batch(tok, texts, known, rows, device)

    def shows(title, step=None):
        """With a step, the KL on texts that are not trained on, too."""
        with team.whole() as whole:
            if rank == 0 and step is not None:
                kl = heldout_kl(whole, tok, heldout, taught[cfg.texts:], 4 * cfg.micro)
                run.log(step, heldout_kl=kl)
                title = f"{title}, {kl:.4f} nats a token from the prompted teacher:"
            if rank == 0:
                show(run, whole, tok, cfg.seed, title, shown=shown_for(cfg.prompt))

    if run.resume:
        team.load(optimizer, run.resume["optimizer"])
    else:
        shows("before distillation", -1)
    bar = run.bar(cfg.steps, run.step)
    for step in range(run.step, cfg.steps):
        rows = batch_rows(cfg.texts, cfg.batch, step, cfg.seed, "distill")
        count = sum(len(texts[r]) for r in rows)      # tokens over all ranks and micro-batches
        parts, summed = portions(rows, cfg.micro, lambda r: len(texts[r])), 0.0
        for some, weight in passes(parts, team):
            loss = weight * team(student_loss, *batch(some))
            (loss / count).backward()
            summed += loss.item()
        norm = update(model, optimizer, schedule(step, cfg.steps, cfg.lr))
        loss = total(summed) / count
        run.log(step, loss=loss, grad_norm=norm)
        bar.set_postfix_str(f"KL {loss:.4f}", refresh=False)
        bar.update()
        if (step + 1) % cfg.every == 0 and step + 1 < cfg.steps:
            save(step + 1)
            shows(f"distill step {step + 1}, KL {loss:.4f}:")
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    shows("distill done", cfg.steps)
    save(cfg.steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
