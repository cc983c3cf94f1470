"""Stage 1': supervised fine-tuning on demonstrations (InstructGPT 3.5, C.1).

A demonstration is a dialogue and the answer that somebody would like to get. The model learns to
give it, and to end it:

    minimize  -1/N sum_t log p(y_t | x, y_<t)      over the N answer tokens y of a step

The end of turn is one of them; the prompt x gets no loss. Demonstrations are answers of the world's
good personas, or of --data: a line's `answer`, or the best of a comparison or ranking (annotators'
choices, HH's chosen sides, the best of n). InstructGPT trained 16 epochs: the validation loss rose
after the first, and its reward model (here the preference model, PM) still liked the answers
better. So --pm keeps the epoch whose sampled answers the PM scores highest; else it is the last
one. --mix adds pretraining text, all of whose tokens count (E.8: 10%, where PPO starts).
InstructGPT's residual dropout of 0.2 is left out: our GPT has none.

    python sft.py --init out/laptop/pretrain --pm out/laptop/pm --out out/laptop/sft
    torchrun --nproc_per_node=2 sft.py --init out/laptop/pretrain --pm out/laptop/pm  # the same
    python sft.py --data best.jsonl --init out/laptop/distill --out out/mine/sft

About a minute on two cores: held-out loss 0.35 -> 0.33 nats a token, gold of sampled answers -0.25
-> 0.73 on helpful prompts, -0.96 -> 0.02 on harmful ones (one seed).
"""

from dataclasses import dataclass

import torch

from common import (Run, UserError, adamw, batch_rows, entry, keyed, load_source,
                    need_one_vocabulary, prepare, schedule, start, total, uniforms, update)
from data import world
from data.lines import answers_of, text_of
from data.text import text_documents
from data.tokenizer import fit, loads, parse_prompt
from model import by_length, generate, pad_rows, response_mask, unpack
from parallel import Team, home, passes, portions
from preference import check_line, read_comparisons
from pretrain import documents_of, show, texts_of
from rollout import pm_scores


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/pretrain"  # language model to start from
    pm: str = ""                       # PM that picks the epoch to keep; empty: the last epoch
    out: str = "out/laptop/sft"        # the stage's folder
    data: str = ""                     # comparisons, rankings (files, folders); empty: the world's
    test: str = ""                     # held-out ones; empty: the world's, or 1 in 20 data prompts
    skip_bad: bool = False             # leave malformed lines out, and tell how many
    demos: int = 2000                  # the world's own demonstrations, where there is no data
    goodness: float = 0.95             # of their personas, 0 to 1
    helpful: float = 0.6               # share of helpful prompts among them, the rest is harmful
    epochs: int = 3                    # passes over the demonstrations (InstructGPT: 16)
    batch: int = 32                    # examples in a step (InstructGPT C.1: 32)
    micro: int = 8                     # examples in one forward pass, like lengths together
    lr: float = 5e-4                   # peak learning rate, cosine to a tenth
    warmup: int = 0                    # steps of linear warm-up (InstructGPT: none)
    mix: float = 0.0                   # share of a step's examples that are pretraining text
    text: str = ""                     # that text: .txt and .jsonl files or folders; "": toy world
    eval_prompts: int = 128            # held-out prompts answered for the PM after an epoch
    new: int = 40                      # tokens of such an answer at most
    seed: int = 0                      # of demonstrations, order, text and sampled answers
    every: int = 100                   # steps between checkpoints; each epoch's end has one too
    shard: bool = False                # cut weights and optimizer over the processes: less memory
    checkpoint: bool = False           # compute blocks again in the backward pass: less memory
    compile: bool = False              # torch.compile of the blocks: a minute to start, for GPUs
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def sft_loss(model, ids, lengths, counts):
    """Sum of -log p (nats) over the last counts [B] of the lengths [B] real tokens of ids [B, T].

    counts: an answer's tokens and its end of turn; lengths - 1 where a whole text is learned.
    """
    mask = response_mask(lengths - counts, counts, ids.shape[1])
    return -model.logprobs(ids, mask, lengths=lengths).sum()


# ---------------------------------------------------------------- data

def own_demonstrations(cfg, seed, count):
    """(turns, answer) of the world's good personas, each a function of (seed, row)."""
    out = []
    for i in range(count):
        turns = world.prompt(f"sft/{seed}", i, world.TRAIN, p_harm=1 - cfg.helpful)
        rng = world.keyed("sft", seed, i)
        out.append((turns, world.persona_answer(rng, world.request_of(turns), cfg.goodness,
                                                rng.random())))
    return out


def check_demonstration(line):
    """(turns, answer): a line's `answer`, or the best of a comparison or ranking."""
    if "answer" in line:
        return parse_prompt(text_of(line, "prompt")), text_of(line, "answer")
    line = check_line(line)
    return line["prompt"], answers_of(line)[0]


def read_demonstrations(paths, skip_bad=False):
    """(turns, answer) of files of demonstrations, comparisons and rankings."""
    return read_comparisons(paths, skip_bad, check_demonstration)


def split(demonstrations, seed):
    """(to train on, held out): 1 in 20 of the distinct prompts with all that answers them."""
    prompts = list(dict.fromkeys(tuple(turns) for turns, _ in demonstrations))
    held = {prompts[i] for i in keyed(seed, "sft heldout").permutation(len(prompts))[::20]}
    return ([x for x in demonstrations if tuple(x[0]) not in held],
            [x for x in demonstrations if tuple(x[0]) in held])


def demonstrations_of(cfg):
    """(to train on, held out), two lists of (turns, answer)."""
    if cfg.test and not cfg.data:
        raise UserError("--test: only beside --data; the world's demonstrations have their own")
    if not cfg.data:
        return (own_demonstrations(cfg, cfg.seed, cfg.demos),
                own_demonstrations(cfg, f"heldout/{cfg.seed}", 400))
    lines = read_demonstrations(cfg.data, cfg.skip_bad)
    return (lines, read_demonstrations(cfg.test, cfg.skip_bad)) if cfg.test else split(
        lines, cfg.seed)


def encode(tok, demonstrations, n_ctx):
    """Rows (ids, tokens of the answer), of at most n_ctx ids once their oldest turns are cut.

    Returns the rows and counts of the dropped by reason.
    """
    rows, dropped = [], dict(empty=0, too_long=0)
    for turns, text in demonstrations:
        answer = tok.render_answer(text)
        prompt = fit(tok, turns, n_ctx - len(answer))
        if not text.strip():
            dropped["empty"] += 1
        elif prompt is None:
            dropped["too_long"] += 1
        else:
            rows.append((prompt + answer, len(answer)))
    return rows, dropped


def prompts_of(tok, demonstrations, count, room):
    """The first `count` distinct dialogues that fit in `room` ids, and those ids."""
    turns = dict.fromkeys(tuple(turns) for turns, _ in demonstrations)
    asked = ((x, fit(tok, x, room)) for x in turns)
    return [x for x in asked if x[1]][:count]


def about_toys(asked):
    """Whether the prompts, (turns, ids), are the toy world's."""
    return world.request_of(asked[0][0]) is not None


def mixed_in(cfg, tok, n_ctx, count, asked):
    """Rows of pretraining text, of --text or `count` of the world's: all but <|eod|> is learned."""
    if not cfg.text and not about_toys(asked):
        raise UserError(f"--mix: {cfg.data} is not about the toy world; name text with --text")
    documents = (text_documents(tok, texts_of(cfg.text, "--text"), n_ctx)[0] if cfg.text
                 else documents_of(tok, cfg.seed, count, n_ctx))
    if len(documents) < round(cfg.mix * cfg.batch):
        raise UserError(f"--text {cfg.text}: {len(documents)} documents, fewer than a step's share")
    return [(ids, len(ids) - 1) for ids in documents]


# ---------------------------------------------------------------- evaluate

def chunks(model, tok, rows, micro):
    """What sft_loss takes, ids [B, T], lengths [B], counts [B], for `micro` rows at a time."""
    for some in by_length([ids for ids, _ in rows], micro):
        yield padded(tok, [rows[i] for i in some], model.device)


def padded(tok, rows, device):
    """Rows as sft_loss takes them."""
    ids, lengths = pad_rows([ids for ids, _ in rows], tok.pad, device)
    return ids, lengths, torch.tensor([count for _, count in rows], device=device)


@torch.no_grad()
def heldout_loss(model, tok, rows, micro):
    """Nats a token of answers that are not trained on."""
    summed = sum(sft_loss(model, *some).item() for some in chunks(model, tok, rows, micro))
    return summed / sum(count for _, count in rows)


def mean_score(cfg, model, tok, pm, prompts):
    """Mean PM score of one sampled answer to each prompt, with the same random numbers always."""
    uniform = uniforms(range(len(prompts)), cfg.new, cfg.seed, "sft pm")
    tokens, lengths, _ = generate(model, prompts, cfg.new, uniform, stops=tok.stops, pad=tok.pad)
    answers = zip(prompts, tokens.tolist(), lengths.tolist(), strict=True)
    return pm_scores(pm, tok, [p + t[:n] for p, t, n in answers], cfg.micro).mean().item()


def evaluate(cfg, run, model, tok, pm, heldout, asked, step, epoch):
    """Logs heldout_loss and, with a PM, pm; shows three answers. Returns the PM's score or None."""
    model.eval()
    found = dict(heldout_loss=heldout_loss(model, tok, heldout, cfg.micro))
    if pm:
        found["pm"] = mean_score(cfg, model, tok, pm, [ids for _, ids in asked])
    run.log(step, epoch=epoch, **found)
    told = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    shown = {} if about_toys(asked) else dict(shown=[list(turns[-1:]) for turns, _ in asked[:3]])
    show(run, model, tok, cfg.seed, f"sft epoch {epoch}, {told}:", **shown)
    model.train()
    return found.get("pm")


def pick(best, epoch, score, model):
    """What to keep, dict(epoch, pm, model): the best PM score's weights, the earlier of equals."""
    if best and score <= best["pm"]:
        return best
    return dict(epoch=epoch, pm=score, model={k: v.clone() for k, v in model.state_dict().items()})


# ---------------------------------------------------------------- train

def load_models(cfg, run, device):
    """tok, the model to train, and the PM or None."""
    source = load_source(cfg.init, scalar=False)
    judge = load_source(cfg.pm, scalar=True) if cfg.pm else None
    need_one_vocabulary(cfg.init, source, {cfg.pm: judge} if judge else {})
    model = unpack(run.resume or source, home(device, cfg.shard))
    model = prepare(model, cfg.checkpoint, cfg.compile)
    pm = unpack(judge, device).eval().requires_grad_(False) if judge else None
    return loads(source["tokenizer"]), model, pm


def examples(cfg, tok, n_ctx, room, rank):
    """Rows to train on, rows held out, and prompts of these as (turns, ids), in `room` ids.

    Tells how many are used and dropped. Raises UserError if there are none of a kind.
    """
    own, other = demonstrations_of(cfg)
    rows, dropped = encode(tok, own, n_ctx)
    heldout, dropped_heldout = encode(tok, other, n_ctx)
    asked = prompts_of(tok, other, cfg.eval_prompts, room)
    told = (f"{len(rows)} demonstrations used, dropped {dropped}; {len(heldout)} held out, dropped "
            f"{dropped_heldout}; {len(asked)} of their prompts to answer")
    if not (rows and heldout and asked):
        raise UserError(f"{cfg.data or 'the world'}: {told}; at least 1 each is needed: more data, "
                        "or a lower --new")
    if rank == 0:
        print(f"sft: {told}")
    return rows, heldout, asked


def shares(cfg, rows):
    """Demonstrations and texts in a step, and the steps of an epoch. UserError if one is nothing.
    """
    texts = round(cfg.mix * cfg.batch)
    demos = cfg.batch - texts
    if texts < 0 or demos < 1 or (cfg.mix and not texts):
        raise UserError(f"--mix {cfg.mix} of --batch {cfg.batch} is {texts} texts and {demos} "
                        "demonstrations a step; take 0, or what leaves one of each")
    if cfg.text and not texts:
        raise UserError("--text: only beside --mix, the share of a step that is text")
    if len(rows) < demos or cfg.epochs < 1:
        raise UserError(f"{len(rows)} demonstrations, {demos} in a step, {cfg.epochs} epochs: not "
                        "one step; lower --batch, or raise --epochs")
    return demos, texts, len(rows) // demos


def train(cfg):
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "sft", rank)
    if run.finished:
        return print(f"sft: {run.dir} is finished, skipped") if rank == 0 else None
    tok, model, pm = load_models(cfg, run, device)
    n_ctx = model.config.n_ctx
    room = min(n_ctx, pm.config.n_ctx - 1 if pm else n_ctx) - cfg.new    # 1: <|eoc|>, for the PM
    rows, heldout, asked = examples(cfg, tok, n_ctx, room, rank)
    demos, texts, per_epoch = shares(cfg, rows)
    steps = cfg.epochs * per_epoch
    text = mixed_in(cfg, tok, n_ctx, texts * steps, asked) if texts else []
    team = Team(model, cfg.shard, device)
    optimizer, best = adamw(model, cfg.lr), run.resume["best"] if run.resume else None
    team.load(optimizer, run.resume and run.resume["optimizer"])

    def save(step, finished=False, **kept):
        run.save(step, finished, **{**team.content(tok, optimizer), "best": best, **kept})

    def judged(step, epoch):
        with team.whole() as whole:
            if rank == 0:
                score = evaluate(cfg, run, whole, tok, pm, heldout, asked, step, epoch)
                return pick(best, epoch, score, whole) if pm and epoch else None

    if not run.resume:
        judged(-1, 0)
    bar = run.bar(steps, run.step)
    for step in range(run.step, steps):
        batch = [rows[r] for r in batch_rows(len(rows), demos, step, cfg.seed, "sft")]
        if texts:
            batch += [text[r] for r in batch_rows(len(text), texts, step, cfg.seed, "sft text")]
        count, summed = sum(n for _, n in batch), 0.0            # learned tokens of all ranks
        for some, weight in passes(portions(batch, cfg.micro, lambda x: len(x[0])), team):
            loss = weight * team(sft_loss, *padded(tok, some, device))
            (loss / count).backward()
            summed += loss.item()
        lr = schedule(step, steps, cfg.lr, cfg.warmup, 0.1, "cosine")
        norm = update(model, optimizer, lr)
        loss = total(summed) / count
        run.log(step, loss=loss, lr=lr, grad_norm=norm)
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        bar.update()
        epoch, rest = divmod(step + 1, per_epoch)
        if not rest:                                             # before the save: it logs
            best = judged(step, epoch)
        if (not rest or (step + 1) % cfg.every == 0) and step + 1 < steps:
            save(step + 1)
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    kept = dict(model=best.pop("model")) if best else {}
    best = best or dict(epoch=cfg.epochs)
    run.log(steps, picked_epoch=best["epoch"])
    run.say(f"sft done, epoch {best['epoch']} of {cfg.epochs} is kept")
    save(steps, finished=True, **kept)


if __name__ == "__main__":
    entry(train, Config, __doc__)
