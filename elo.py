"""Elo scores of policies, from choices between their answers (HH 2.4, 4.5, B.4-B.6, fig. 1).

    P(a is preferred to b) = 1 / (1 + 10^((E_b - E_a) / 400)) = sigmoid((E_a - E_b) ln 10 / 400)

which is Bradley-Terry in another unit, 400 / ln 10 = 173.7 points a nat (bradley_terry.py has the
fit). Only differences mean anything, so those to one policy, the reference, are told.

Every policy answers the toy world's prompts once, with random numbers of its own; of each two
answers to a prompt a simulated annotator chooses one, equal texts are a tie; with --no-engaged one
who weighs harm alone (data/world.py). Helpful and harmless prompts give a score each: HH's fig. 1
draws one against the other.

    python elo.py --policies out/laptop/distill out/laptop/ppo
    python elo.py --policies base=out/laptop/distill out/laptop/distill@best16 --pm out/laptop/pm
    python elo.py --lines out/laptop/elo/comparisons.jsonl --out out/again     # choices made before
    torchrun --nproc_per_node=2 elo.py --policies out/laptop/distill out/laptop/ppo

PATH@best16 is the best of 16 answers by --pm (rejection.py). out/comparisons.jsonl has the choices,
"models" those of chosen and rejected, "strength" 0 a tie; elo.json the scores, null where there is
none or no bound; frontier.png.

8 seconds of one core for four policies, of which the distilled one's helpful Elo is 80 above the
base model's and PPO's 230; harmless 95 and 360. Best of 16 takes 20 seconds more.
"""

import io
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import combinations, cycle
from pathlib import Path

import numpy as np
import torch

from bradley_terry import fit, of_pm, of_win_rate, scores, win_rate
from common import (LOOKS, Run, UserError, entry, everyones, load_source, mine, need_one_vocabulary,
                    start, uniforms, write_atomically)
from data import world
from data.lines import read_rows
from data.tokenizer import join, loads
from data.tokenizer import fit as fit_turns
from measures import arrays, mean_se, sigmoid
from model import generate, unpack
from preference import check_line
from rejection import gold_of
from rollout import pm_scores, ranking

OBJECTIVES = ("helpful", "harmless")


@dataclass(frozen=True)
class Config:
    policies: tuple = ()               # two or more: PATH, NAME=PATH, PATH@best16; blanks, commas
    reference: str = ""                # name of the policy whose Elo is 0; empty: the first
    lines: str = ""                    # files of choices to take instead of playing, commas
    pm: str = ""                       # preference model: picks for @best, and foretells Elo
    out: str = "out/laptop/elo"        # the stage's folder
    count: int = 300                   # prompts of each objective; every pair plays them all
    heldout: bool = False              # ask about the held-out animals
    new: int = 40                      # tokens of an answer at most
    temperature: float = 1.0           # of sampling
    noise: float = 0.6                 # temperature of the annotators, gold units; 0 is noise-free
    engaged: bool = True               # of equally harmless answers they prefer the engaged one
    draws: int = 200                   # resamples of the prompts for the second error; 0: none
    chunk: int = 128                   # answers sampled at once
    seed: int = 0                      # of prompts, answers and choices
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- the pure mathematics

def predicted(a, b):
    """Elo of policy a less that of b as a PM foretells it, from scores of answers to equal prompts.

    a, b: PM scores [N], prompt by prompt. Two numbers, which differ where scores spread or are
    skewed: from the mean scores, and from the mean chance sigmoid(a - b) that a's answer is
    preferred. HH find that it matters little for their gap to people's choices (B.4, fig. 35).
    """
    a, b = arrays(a, b)
    return float(of_pm(a.mean() - b.mean())), float(of_win_rate(sigmoid(a - b).mean()))


def wins_of(lines):
    """(names, W) of comparison lines: W[i, j] wins of policy i over j, names in order.

    A line's "models" are the policies of chosen and rejected; "strength" 0 makes it a tie, half a
    win each. A line without two different models doesn't count.
    """
    told = [(tuple(x["models"]), 0.5 if x.get("strength") == 0 else 1.0) for x in lines
            if isinstance(x.get("models"), (list, tuple)) and len(x["models"]) == 2]
    told = [x for x in told if len(set(x[0])) == 2]
    names = sorted({name for pair, _ in told for name in pair})
    W = np.zeros((len(names), len(names)))
    for (won, lost), share in told:
        W[names.index(won), names.index(lost)] += share
        W[names.index(lost), names.index(won)] += 1 - share
    return names, W


def bootstrap(lines, reference, draws=200, seed=0):
    """Standard error of each policy's Elo, over resamples of the prompts: {name: error}.

    A prompt is drawn with all its choices, since one answer is in several of them.
    """
    (names, _), by_prompt, rng = wins_of(lines), {}, np.random.default_rng(seed)
    for line in lines:
        by_prompt.setdefault(str(line["prompt"]), []).append(line)
    tables = np.zeros((len(by_prompt), len(names), len(names)))
    for table, some in zip(tables, by_prompt.values(), strict=True):
        own, W = wins_of(some)
        at = [names.index(name) for name in own]
        table[np.ix_(at, at)] = W
    drawn = rng.multinomial(len(tables), np.full(len(tables), 1 / len(tables)), size=draws)
    found = [scores(np.tensordot(n, tables, 1), names.index(reference))[0] for n in drawn]
    return {name: float(np.nanstd(x, ddof=1)) if np.isfinite(x).sum() > 1 else math.nan
            for name, x in zip(names, np.transpose(found), strict=True)}


# ---------------------------------------------------------------- policies, prompts, choices

def policies_of(words):
    """{name: (path, k)} of --policies; k is 1, or of how many answers the best is taken."""
    out = {}
    for word in (x for given in words for x in given.split(",") if x):
        name, path, k = re.fullmatch(r"(?:([^=]+)=)?(.+?)(?:@best(\d+))?", word).groups()
        name = name or Path(path).name + (f"@best{k}" if k else "")
        if name in out or int(k or 2) < 2:
            raise UserError(f"--policies {word}: " + (
                "the best of 2 answers or more" if name not in out else
                f"a second one named {name}; NAME={path} gives it a name of its own"))
        out[name] = path, int(k or 1)
    if len(out) < 2:
        raise UserError("--policies: two or more, or stored --lines instead")
    return out


def checked_policies(cfg):
    """`policies_of`, none with --lines. UserError for knobs that can't be."""
    if min(cfg.count, cfg.new, cfg.chunk) < 1 or not (cfg.noise >= 0 < cfg.temperature):
        raise UserError("--count, --new, --chunk must be at least 1, --temperature above 0, "
                        "--noise at least 0")
    if bool(cfg.lines) == bool(cfg.policies):
        raise UserError("either --policies, to play, or --lines, choices made before")
    policies = {} if cfg.lines else policies_of(cfg.policies)
    if policies and cfg.reference not in ("", *policies):
        raise UserError(f"--reference {cfg.reference}: there are {', '.join(policies)}")
    if any(k > 1 for _, k in policies.values()) and not cfg.pm:
        raise UserError("--policies ...@best: the best by which --pm?")
    return policies


def load_models(cfg, policies):
    """Tokenizer and {path: checkpoint's content}, of the PM too. UserError if they do not match."""
    found = {path: load_source(path, scalar=False) for path, _ in policies.values()}
    if cfg.pm:
        found[cfg.pm] = load_source(cfg.pm, scalar=True)
    first = next(iter(found))
    need_one_vocabulary(first, found[first], found)
    for path, content in found.items():
        if not all(torch.isfinite(x).all() for x in content["model"].values()):
            raise UserError(f"{path}: a weight is nan or inf: its training diverged")
    return loads(found[first]["tokenizer"]), found


def asked_of(cfg, objective, tok, room):
    """(row, turns, ids) of the prompts of an objective, their oldest turns cut where room lacks."""
    animals = world.HELD_OUT if cfg.heldout else world.TRAIN
    talks = [world.prompt(f"elo/{cfg.seed}", row, animals, harmful=objective == "harmless")
             for row in range(cfg.count)]
    asked = [(row, turns, fit_turns(tok, turns, room)) for row, turns in enumerate(talks)]
    asked = [x for x in asked if x[2]]
    if not asked:
        raise UserError(f"no prompt leaves room for {cfg.new} tokens; a smaller --new leaves more")
    return asked


def answer(cfg, tok, policy, pm, k, key, some):
    """(text, PM score or nan) of the answer to each of the (row, turns, ids), best of k by PM.

    It depends on (seed, key, row) alone.
    """
    if not some:                                         # a rank without rows
        return []
    rows, _, prompts = zip(*some, strict=True)
    random = torch.stack([uniforms(rows, cfg.new, cfg.seed, "elo", *key, j) for j in range(k)], 1)
    tokens, lengths, _ = generate(policy, list(prompts), cfg.new, random.flatten(0, 1), k,
                                  temperature=cfg.temperature, stops=tok.stops, pad=tok.pad)
    told = [t[:n] for t, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    scored = (pm_scores(pm, tok, [prompts[i // k] + ids for i, ids in enumerate(told)]).cpu()
              if pm else torch.full((len(told),), math.nan)).view(-1, k).numpy()
    finished = np.array([ids[-1] == tok.eot for ids in told]).reshape(-1, k)
    best = ranking(scored, finished).argmax(1) if k > 1 else [0] * len(some)
    return [(tok.decode(told[i * k + j]).strip(), float(scored[i, j])) for i, j in enumerate(best)]


def choices(cfg, objective, asked, texts):
    """A comparison line for each two policies and each prompt; texts {name: [an answer each]}."""
    person, lines = world.Annotator(temperature=cfg.noise, engaged=cfg.engaged), []
    for a, b in combinations(sorted(texts), 2):
        for (row, turns, _), *two in zip(asked, texts[a], texts[b], strict=True):
            rng = world.keyed("elo", cfg.seed, objective, row, a, b)
            line = world.judge(rng, turns, two, person, tranche="elo", models=[a, b]) or dict(
                objective=objective, tranche="elo", annotator=person.name, chosen=two[0],
                rejected=two[1], gold=gold_of(turns, two)["gold"], soft=0.5, strength=0,
                models=[a, b])
            lines.append({**line, "prompt": join(turns, answer=True)})
    return lines


def play(cfg, run, policies, device, rank, world_size):
    """Lines of choices; {objective: {name: [(text, PM score, gold)] by prompt}}; and the turns."""
    tok, found = load_models(cfg, policies)
    room = min(x["gpt"]["n_ctx"] for x in found.values()) - cfg.new - 1      # 1: the PM's <|eoc|>
    asked = {objective: asked_of(cfg, objective, tok, room) for objective in OBJECTIVES}
    pm = unpack(found[cfg.pm], device).eval() if cfg.pm else None
    answered = {objective: {} for objective in OBJECTIVES}
    bar = run.bar(sum(map(len, asked.values())) * len(policies), 0)
    for name, (path, k) in policies.items():
        model, size = unpack(found[path], device).eval(), max(1, cfg.chunk // k) * world_size
        for objective, some in asked.items():
            told = []
            while len(told) < len(some):
                if run.stopping():
                    raise KeyboardInterrupt
                own = mine(some[len(told):len(told) + size], rank, world_size)
                new = everyones(answer(cfg, tok, model, pm, k, (name, objective), own), world_size)
                told += new
                bar.update(len(new))
            answered[objective][name] = [
                (text, score, *gold_of(turns, [text])["gold"])
                for (_, turns, _), (text, score) in zip(some, told, strict=True)]
    bar.close()
    lines = [line for objective, some in answered.items() for line in choices(
        cfg, objective, asked[objective], {n: [x[0] for x in own] for n, own in some.items()})]
    return lines, answered, {o: [turns for _, turns, _ in some] for o, some in asked.items()}


def check_choice(line):
    """A comparison with the two policies' names. ValueError naming the bad field."""
    line, models, strength = check_line(line), line.get("models"), line.get("strength", 1)
    if "responses" in line:
        raise ValueError("a ranking, where a choice of two is needed")
    if not (isinstance(models, list) and [type(x) for x in models] == [str, str]):
        raise ValueError("field 'models' is not two names, of the chosen's policy and the other's")
    if not isinstance(strength, (int, float)) or not math.isfinite(strength):
        raise ValueError("field 'strength' is not a number")
    return line


def read_choices(paths):
    """The lines of files, or of folders' comparisons.jsonl, commas between. UserError if bad."""
    lines = []
    for path in map(Path, paths.split(",")):
        path = path / "comparisons.jsonl" if path.is_dir() else path
        try:
            lines += read_rows(path, check_choice, Counter())
        except OSError as error:
            raise UserError(f"{path}: not read ({error.strerror or error})") from None
        except ValueError as error:
            raise UserError(error) from None
    if not wins_of(lines)[0]:
        raise UserError(f"--lines {paths}: holds no choice between two different policies")
    return lines


# ---------------------------------------------------------------- the report

def result_of(cfg, reference, objective, lines, own):
    """An objective's part of elo.json: columns in the order of names, and the table of wins."""
    names, W = wins_of(lines)
    if reference not in names:
        raise UserError(f"--reference {reference}: the {objective} choices are of "
                        f"{', '.join(names)}")
    out = dict(names=names, **fit(W, names.index(reference)), wins=W.tolist())
    if cfg.draws > 1:
        errors = bootstrap(lines, reference, cfg.draws, cfg.seed)
        out["bootstrap"] = [errors[name] for name in names]
    if own:
        out["gold"], out["gold_se"] = zip(*(mean_se([x[2] for x in own[n]]) for n in names))
    if own and cfg.pm:
        pm = {name: [x[1] for x in own[name]] for name in names}
        told = zip(*(predicted(pm[name], pm[reference]) for name in names))
        out |= dict(zip(("pm_means", "pm_chances"), told))
    return out


def table(objective, reference, out):
    """A result as text, the best policy first."""
    more = {key: title for key, title in dict(
        bootstrap="by prompts", pm_means="PM: means", pm_chances="chances").items() if key in out}
    width = max(10, *map(len, out["names"]))
    lines = [f"{objective}: Elo less {reference}'s, {sum(out['games']) / 2:.0f} choices",
             f"  {'':<{width}}    Elo  95% interval    wins  games" + "".join(
                 f"{x:>12}" for x in more.values()) + ("           gold" if "gold" in out else "")]
    for i in np.argsort(-np.array(out["elo"]), kind="stable"):
        elo, ends = out["elo"][i], f"{out['low'][i]:+.0f} to {out['high'][i]:+.0f}"
        gold = f"  {out['gold'][i]:+.2f} ± {out['gold_se'][i]:.2f}" if "gold" in out else ""
        lines.append(f"  {out['names'][i]:<{width}} {elo:+6.0f}  {ends:<15} {win_rate(elo):>5.0%}"
                     f"{out['games'][i]:>7.0f}" + "".join(f"{out[x][i]:>12.0f}" for x in more)
                     + gold)
    return "\n".join([*lines, *([f"  {out['note']}"] if out["note"] else [])])


def draw(results, reference, file):
    """Helpful Elo against harmless Elo with their intervals, a point a policy (HH fig. 1)."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    told = [{n: (r["elo"][i], r["low"][i], r["high"][i]) for i, n in enumerate(r["names"])
             if math.isfinite(r["elo"][i])} for r in (results[x] for x in OBJECTIVES)]
    both = [name for name in told[0] if name in told[1]]
    ends = [abs(x) for own in told for n in both for x in own[n] if math.isfinite(x)]
    far = 1.2 * max(ends) + 50                           # where a bar without a bound is cut off
    figure, ax = plt.subplots(figsize=(6, 5), layout="constrained")
    for name, (color, marker) in zip(both, cycle(LOOKS)):
        (x, *across), (y, *up) = (own[name] for own in told)
        bars = [np.abs(np.clip(e, -far, far) - at)[:, None] for e, at in ((across, x), (up, y))]
        ax.errorbar(x, y, xerr=bars[0], yerr=bars[1], color=color, marker=marker, capsize=3)
        ax.annotate(name, (x, y), xytext=(6, 6), textcoords="offset points", color=color)
    ax.set(xlabel=f"helpful Elo less {reference}'s, 95%", ylabel="harmless Elo, 95%",
           title="Helpful against harmless (HH fig. 1)")
    for line in (ax.axhline, ax.axvline):
        line(0, color="0.85", zorder=0)
    ax.margins(0.2)
    figure.savefig(file, dpi=130, format="png")
    plt.close(figure)


def plain(x):
    """What JSON has: nan and infinities become null."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def samples(run, turns, answered, count=2):
    """Every policy's answer to the first few prompts of each objective, with its gold."""
    for objective, own in answered.items():
        for i, talk in enumerate(turns[objective][:count]):
            run.say(f"  {talk[-1][1][:80]}")
            for name, told in own.items():
                run.say(f"    {name:<12} gold {told[i][2]:+.2f}  {' '.join(told[i][0].split())}")


def report(cfg, run, policies, lines, answered):
    """Writes comparisons.jsonl, elo.json and frontier.png, and tells the tables."""
    reference = cfg.reference or next(iter(policies), wins_of(lines)[0][0])
    parts = {kind: [] for kind in OBJECTIVES}
    for line in lines:
        parts.setdefault(line.get("objective", "all"), []).append(line)
    results = {kind: result_of(cfg, reference, kind, some, answered.get(kind))
               for kind, some in parts.items() if wins_of(some)[0]}
    about = dict(reference=reference, lines=cfg.lines, pm=cfg.pm, seed=cfg.seed, policies={
        name: dict(path=path, best_of=k) for name, (path, k) in policies.items()})
    written = {"elo.json": json.dumps(plain({**about, **results}), indent=1).encode()}
    if answered:
        written["comparisons.jsonl"] = "".join(json.dumps(x) + "\n" for x in lines).encode()
    if set(OBJECTIVES) <= set(results):
        picture = io.BytesIO()
        draw(results, reference, picture)
        written["frontier.png"] = picture.getvalue()
    for name, content in written.items():
        write_atomically(run.dir / name, lambda f, content=content: f.write(content))
    for kind, out in results.items():
        run.say(table(kind, reference, out))


def rate(cfg):
    """Policies' choices, played or read -> their Elo scores in out/."""
    rank, world_size, device = start(cfg.device)
    policies = checked_policies(cfg)
    run = Run(cfg, "elo", rank)
    if run.finished:
        return print(f"elo: {run.dir} is finished, skipped") if rank == 0 else None
    if cfg.lines:
        lines, answered, turns = read_choices(cfg.lines), {}, {}
    else:
        lines, answered, turns = play(cfg, run, policies, device, rank, world_size)
    if rank == 0:
        report(cfg, run, policies, lines, answered)
        samples(run, turns, answered)
    run.save(len(lines), finished=True)


if __name__ == "__main__":
    entry(rate, Config, __doc__)
