"""Stage 2: the preference model (HH 2, 3, A.2; InstructGPT 3.5's reward model).

A preference model (PM) gives a dialogue one number, read at an end-of-context token after the
answer. It is trained so that the difference of two scores is the log-odds that an annotator
prefers one answer to the other (Bradley-Terry):

    minimize  -log sigmoid( s(prompt, chosen) - s(prompt, rejected) )

first on comparisons of the world's own answers (PM pretraining, HH A.2: forum answers and edits),
then on annotators' comparisons of the policy's answers; one epoch each, by the same loop. A
comparison is one row [prompt, chosen, rejected] in which each answer sees the prompt and itself;
a ranking of K answers is one row too, its loss the mean over its K(K-1)/2 pairs (InstructGPT
eq. 1).

    python preference.py --init out/laptop/pretrain --out out/laptop/pmp
    python preference.py --init out/laptop/pmp --data out/laptop/comparisons --pairs 0 \
                         --lr 3e-4 --out out/laptop/pm
    torchrun --nproc_per_node=2 preference.py --init out/laptop/pretrain --out out/laptop/pmp

About 2 minutes on two cores for the first two; accuracy 0.5 -> 0.87 on the world's own pairs.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from common import (ALONE, Run, UserError, adamw, batch_rows, entry, keyed, load_source, meet,
                    prepare, schedule, start, total, update)
from data import world
from data.lines import answers_of, read_rows, text_of, write_lines
from data.tokenizer import fit, join, loads, parse_prompt
from model import shared_prompt_rows, unpack
from parallel import Team, home, passes, portions


@dataclass(frozen=True)
class Config:
    init: str = "out/laptop/pretrain"  # checkpoint to start from; a fresh head for a language model
    out: str = "out/laptop/pmp"        # the stage's folder
    data: str = ""                     # comparisons, rankings (files, folders); empty: the world's
    test: str = ""                     # held-out ones to evaluate on; empty: the world's own
    skip_bad: bool = False             # leave malformed lines out, and tell how many
    pairs: int = 16000                 # comparisons to use at most; 0, with data: all
    soft: bool = False                 # learn the annotators' probabilities, not their choices
    shuffle_pairs: bool = False        # rankings as pairs in any order, not one row (it overfits)
    lambda_harmless: float = 1.0       # weight of a harmless comparison to a helpful one (HH 5.1.2)
    center: str = ""                   # comparisons whose chosen answers end with mean score 0
    harmful: float = 0.4               # PM pretraining: share of harmful prompts
    foreign: float = 0.25              # PM pretraining: share of worse sides for another prompt
    edits: float = 0.25                # PM pretraining: share of worse sides with a false fact
    batch: int = 32                    # comparisons in a step
    micro: int = 16                    # comparisons in one forward pass, like lengths together
    epochs: int = 1                    # passes over the data (HH A.2: 1)
    lr: float = 1e-3                   # peak learning rate, linear to 0
    warmup: int = 20                   # steps of linear warm-up
    seed: int = 0                      # of the world's own comparisons and of the order
    every: int = 100                   # steps between evaluations and checkpoints
    shard: bool = False                # cut weights and optimizer over the processes: less memory
    checkpoint: bool = False           # compute blocks again in the backward pass: less memory
    compile: bool = False              # torch.compile of the blocks: a minute to start, for GPUs
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def preference_loss(chosen, rejected, soft=1.0):
    """-log sigmoid(chosen - rejected) of each comparison, stable for any scores (HH 3.2).

    soft is the probability that chosen is the better one: -p log sigmoid(d) - (1-p) log sigmoid(-d)
    """
    return -F.logsigmoid(chosen - rejected) + (1 - soft) * (chosen - rejected)


def accuracy(chosen, rejected):
    """1 where the chosen answer scores higher, 1/2 on ties, else 0."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected).float()


def over_pairs(f, scores, counts, *more):
    """Mean of f(better, worse, *more) over all pairs of a row's answers (InstructGPT eq. 1): [B].

    scores [B, K], best answer first, of which counts [B] are real.
    """
    K = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(K >= counts[:, None], 0)
    better, worse = torch.triu_indices(len(K), len(K), 1, device=scores.device)
    real = worse < counts[:, None]                                   # [B, K (K - 1) / 2]
    return (f(scores[:, better], scores[:, worse], *more) * real).sum(1) / real.sum(1)


# ---------------------------------------------------------------- data

FORM = {"prompt": "\n\nHuman: ...\n\nAssistant:", "chosen": "...", "rejected": "..."}


def check_line(line):
    """A comparison or ranking with its prompt as turns. ValueError naming the bad field."""
    text_of(line, "prompt")
    if "responses" in line:
        texts = line["responses"]
        if not isinstance(texts, list) or len(texts) < 2 or not all(
                isinstance(x, str) for x in texts):
            raise ValueError("field 'responses' is not a list of two texts or more")
    else:
        text_of(line, "chosen"), text_of(line, "rejected")
    p = line.get("soft", 1.0)
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError("field 'soft' is not a probability")
    return {**line, "prompt": parse_prompt(line["prompt"])}


def read_comparisons(paths, skip_bad=False, check=check_line):
    """Comparison and ranking lines of files, or of folders' comparisons.jsonl, commas between.

    Prompts become turns, or lines what `check` makes of them. Raises UserError naming file, line
    and field; skip_bad leaves such lines out and tells their number.
    """
    lines = []
    for path in map(Path, str(paths).split(",")):
        path = path / "comparisons.jsonl" if path.is_dir() else path
        if not path.exists():
            raise UserError(f"{path}: no such file; collect some first (collect.py)")
        counts = dict(rows=0, malformed=0)
        try:
            lines += read_rows(path, check, counts, skip_bad)
        except ValueError as error:
            raise UserError(f"{error}; a line is {json.dumps(FORM)}") from None
        if counts["malformed"]:
            print(f"{path}: {counts['malformed']} malformed of {counts['rows']} lines left out")
    if not lines:
        raise UserError(f"{paths}: holds no comparison")
    return lines


def write_comparisons(files):
    """{path: lines as they are read} -> JSON lines, all or none."""
    write_lines({path: [{**x, "prompt": join(x["prompt"], answer=True)} for x in lines]
                 for path, lines in files.items()})


def encode_comparisons(tok, lines, n_ctx):
    """(prompt ids, answers' ids, best first) of each line that fits once its oldest turns are cut.

    Returns the rows, their lines, and counts of the dropped by reason.
    """
    rows, kept, dropped = [], [], dict(identical=0, too_long=0)
    for line in lines:
        answers = []
        for text in answers_of(line):
            ids = tok.render_answer(text) + [tok.eoc]
            if ids not in answers:               # of two equal ones, the better rank counts
                answers.append(ids)
        prompt = fit(tok, line["prompt"], n_ctx - max(map(len, answers)))
        if len(answers) < 2:
            dropped["identical"] += 1
        elif prompt is None:
            dropped["too_long"] += 1
        else:
            rows.append((prompt, answers))
            kept.append(line)
    return rows, kept, dropped


def split_pairs(rows, lines):
    """Each ranking as its pairs, rows of their own: what InstructGPT 3.5 found to overfit."""
    pairs = [((prompt, [answers[i], answers[j]]), line)
             for (prompt, answers), line in zip(rows, lines)
             for i in range(len(answers)) for j in range(i + 1, len(answers))]
    return [row for row, _ in pairs], [line for _, line in pairs]


def size_of(row):
    """Tokens of a row."""
    return len(row[0]) + sum(map(len, row[1]))


def score_rows(model, tok, rows):
    """Scores [B, K]; rows: (prompt ids, [at most K answers' ids, each ended by <|eoc|>]).

    What lies beyond a row's own number of answers has no meaning.
    """
    *laid_out, ends = shared_prompt_rows(*zip(*rows, strict=True), tok.pad, model.device)
    every = torch.arange(len(rows), device=model.device)[:, None]
    return model.score(model(*laid_out, at=(every, ends)))


def rows_loss(model, tok, rows, weights, softs):
    """Sum over rows of weights [B] * their pairs' mean loss, and of their pairs' mean accuracy."""
    scores, counts = score_rows(model, tok, rows), counts_of(rows).to(model.device)
    w, p = weights.to(model.device), softs[:, None].to(model.device)
    return (over_pairs(preference_loss, scores, counts, p) @ w,
            over_pairs(accuracy, scores, counts).sum())


def counts_of(rows):
    """Answers of each row, [B]."""
    return torch.tensor([len(answers) for _, answers in rows])


# ---------------------------------------------------------------- evaluate

@torch.no_grad()
def score_all(model, tok, rows, micro=64):
    """Scores of many rows, lists of K floats in the order given; like lengths go together."""
    order, out = sorted(range(len(rows)), key=lambda i: size_of(rows[i])), [None] * len(rows)
    for i in range(0, len(order), micro):
        some = order[i:i + micro]
        scores = score_rows(model, tok, [rows[j] for j in some]).tolist()
        for j, row in zip(some, scores):
            out[j] = row[:len(rows[j][1])]
    return out


def score_pairs(model, tok, rows, micro=64):
    """Scores [N, 2] of comparisons."""
    return torch.tensor(score_all(model, tok, rows, micro)).view(-1, 2)


def mean_accuracy(scores):
    """Mean over rows of the share of pairs in which the better answer scores higher."""
    hits = [over_pairs(accuracy, torch.tensor([s]), torch.tensor([len(s)])).item() for s in scores]
    return sum(hits) / max(len(hits), 1)


def accuracy_of(model, tok, rows):
    """The mean accuracy of the model's scores."""
    return mean_accuracy(score_all(model, tok, rows))


def longer_accuracy(rows):
    """The mean accuracy of "the longer answer in tokens is the better one"."""
    return mean_accuracy([[float(len(a)) for a in answers] for _, answers in rows])


def score_lines(model, tok, lines):
    """(lines that fit the context, their answers' scores, counts of the dropped by reason)."""
    rows, kept, dropped = encode_comparisons(tok, lines, model.config.n_ctx)
    return kept, score_all(model, tok, rows), dropped


def truth_rows(tok, animals, count=400, seed=0):
    """Pairs that differ in one fact only, the true one first."""
    rows = []
    for i in range(count):
        turns, true, false = world.true_false_pair(world.keyed("truth", seed, i), animals)
        answers = [tok.render_answer(x) + [tok.eoc] for x in (true, false)]
        rows.append((tok.render(turns, answer=True), answers))
    return rows


def tests_of(cfg, run, tok, n_ctx):
    """What to evaluate on, name -> rows: the lines of `test`, or the world's pairs and facts."""
    if cfg.test:
        lines = read_comparisons(cfg.test, cfg.skip_bad)
        rows, kept, dropped = encode_comparisons(tok, lines, n_ctx)
        run.say(f"{cfg.test}: {len(rows)} held-out lines, dropped {dropped}")
        out = {}
        for row, line in zip(rows, kept):
            out.setdefault(line.get("objective", "unnamed"), []).append(row)
        return out
    own = own_lines(cfg, f"heldout/{cfg.seed}", 400)
    return dict(heldout=encode_comparisons(tok, own, n_ctx)[0],
                truth=truth_rows(tok, world.TRAIN),
                truth_heldout_animals=truth_rows(tok, world.HELD_OUT))


def evaluate(run, model, tok, step, title, tests):
    """Accuracy on each of the tests, and that of preferring the longer answer."""
    model.eval()
    found = {name: accuracy_of(model, tok, rows) for name, rows in tests.items()}
    model.train()
    run.log(step, **{f"{name}_accuracy": acc for name, acc in found.items()},
            **{f"{name}_longer": longer_accuracy(rows) for name, rows in tests.items()})
    told = ", ".join(f"{name.replace('_', ' ')} {acc:.3f}" for name, acc in found.items())
    run.say(f"{title}: accuracy {told}")


def show_scores(run, model, tok, rows):
    """Comparisons with the scores of their answers."""
    for (prompt, answers), scores in zip(rows, score_all(model, tok, rows), strict=True):
        run.say(f"  {tok.decode(prompt)[-70:]}")
        for answer, score in zip(answers, scores, strict=True):
            run.say(f"    {score:+.2f}  {tok.decode(answer)[:90]}")


# ---------------------------------------------------------------- train

def own_lines(cfg, seed, count):
    """`count` of the world's own comparisons."""
    if not 0 <= cfg.harmful <= 1 or cfg.harmful == 1 and cfg.edits:
        raise UserError(f"--harmful {cfg.harmful}: from 0 to 1; 1 with --edits 0 only: an answer "
                        "about harm holds no fact")
    return [world.pretraining_pair(seed, i, cfg.foreign, cfg.edits, cfg.harmful)
            for i in range(count)]


def training_rows(cfg, tok, n_ctx):
    """Rows of `data`, or of the world's own comparisons; weights; soft labels; the dropped."""
    if cfg.data:
        lines = read_comparisons(cfg.data, cfg.skip_bad)
        if not cfg.test and world.request_of(lines[0]["prompt"]) is None:
            raise UserError(f"{cfg.data}: not about the toy world; name held-out lines with --test")
        if 0 < cfg.pairs < len(lines):           # any of them: files may be in an order
            order = keyed(cfg.seed, "pairs").permutation(len(lines))
            lines = [lines[i] for i in order[:cfg.pairs]]
    else:
        lines = own_lines(cfg, cfg.seed, cfg.pairs)
    rows, lines, dropped = encode_comparisons(tok, lines, n_ctx)
    if cfg.shuffle_pairs:
        rows, lines = split_pairs(rows, lines)
    weights = torch.tensor([cfg.lambda_harmless if x.get("objective") == "harmless" else 1.0
                            for x in lines])
    if cfg.soft and not all("soft" in x for x in lines):
        raise UserError(f"{cfg.data}: --soft needs the field 'soft' in every line")
    softs = torch.tensor([x["soft"] if cfg.soft else 1.0 for x in lines])
    return rows, weights, softs, dropped


def center(run, team, tok, path):
    """Shifts all scores so that the chosen answers' mean is 0 (InstructGPT 3.5, demonstrations)."""
    with team.whole() as whole:
        _, scores, dropped = score_lines(whole, tok, read_comparisons(path))
        meet(ALONE, ALONE)         # each has read all, at a speed of its own
    if not scores:
        raise UserError(f"--center {path}: no line is usable, dropped {dropped}")
    run.say(f"{path}: {len(scores)} demonstrations come to mean 0, dropped {dropped}")
    with torch.no_grad():
        team.model.score_head.bias -= sum(s[0] for s in scores) / len(scores)


def train(cfg):
    rank, world_size, device = start(cfg.device)
    run = Run(cfg, "preference", rank)
    if run.finished:
        return print(f"preference: {run.dir} is finished, skipped") if rank == 0 else None
    source = load_source(cfg.init)
    tok, model = loads(source["tokenizer"]), unpack(
        run.resume or source, home(device, cfg.shard), scalar=True)
    model = prepare(model, cfg.checkpoint, cfg.compile)
    model.score_head.bias.requires_grad_(False)  # differences cancel it: rounding would move it
    rows, weights, softs, dropped = training_rows(cfg, tok, model.config.n_ctx)
    tests = tests_of(cfg, run, tok, model.config.n_ctx)
    steps = cfg.epochs * (len(rows) // cfg.batch)
    if not steps:
        raise UserError(f"{len(rows)} comparisons of {len(rows) + sum(dropped.values())} are usable"
                        f" (dropped {dropped}), fewer than one --batch of {cfg.batch}")
    team = Team(model, cfg.shard, device)
    optimizer = adamw(model, cfg.lr)
    team.load(optimizer, run.resume and run.resume["optimizer"])
    if rank == 0 and not run.resume:
        print(f"preference: {len(rows)} comparisons used, dropped {dropped}; {steps} steps")

    def save(step, finished=False):
        run.save(step, finished, **team.content(tok, optimizer))

    bar = run.bar(steps, run.step)
    for step in range(run.step, steps):
        batch = batch_rows(len(rows), cfg.batch, step, cfg.seed, "preference")
        weight = weights[batch].sum().item()                     # of all ranks' rows
        parts, sums = portions(batch, cfg.micro, lambda r: size_of(rows[r])), [0.0, 0.0]
        for some, share in passes(parts, team):
            loss, right = team(rows_loss, tok, [rows[r] for r in some], weights[some], softs[some])
            loss = share * loss / weight
            loss.backward()
            sums[0] += loss.item()
            sums[1] += share * right.item() / cfg.batch
        norm = update(model, optimizer, schedule(step, steps, cfg.lr, cfg.warmup))
        loss, acc = total(*sums)
        run.log(step, loss=loss, accuracy=acc, grad_norm=norm)
        bar.set_postfix_str(f"loss {loss:.3f} accuracy {acc:.2f}", refresh=False)
        bar.update()
        if (step + 1) % cfg.every == 0 and step + 1 < steps:
            with team.whole() as whole:                        # before the save: it logs
                if rank == 0:
                    evaluate(run, whole, tok, step, f"preference step {step + 1}", tests)
            save(step + 1)
        elif run.stopping():
            save(step + 1)
            raise KeyboardInterrupt
    bar.close()
    if cfg.center:
        center(run, team, tok, cfg.center)
    with team.whole() as whole:
        if rank == 0:
            evaluate(run, whole, tok, steps, "preference done", tests)
            show_scores(run, whole, tok, rows[:3])
    save(steps, finished=True)


if __name__ == "__main__":
    entry(train, Config, __doc__)
