"""Benchmarks of language models before and after RLHF: the alignment tax (HH 4.6, 5.3, E).

    python benchmark.py --ckpt out/laptop/distill,out/laptop/ppo --arc arc_easy.jsonl --shots 0,5
    python benchmark.py --ckpt out/gpt2 --arc arc_easy.jsonl,arc_challenge.jsonl --chat
    python benchmark.py --ckpt out/gpt2 --lambada lambada_openai.jsonl --truthfulqa TruthfulQA.csv
    python benchmark.py --ckpt out/gpt2 --humaneval HumanEval.jsonl.gz --new 128

    ARC          accuracy of the choice with the highest log p, and log p a byte ("acc_norm")
    LAMBADA      accuracy of greedy decoding; perplexity of the last word
    TruthfulQA   MC1: the best answer against the incorrect ones, as ARC
    HumanEval    pass@k = 1 - C(n - c, k) / C(n, k) of n samples, run in data/sandbox.py's cells, so
                 on Linux only

Errors are over items; "change" is to the first checkpoint, on the items that both have, with the
error of the mean difference. These files have no validation part: a tenth of each, at most 100
items, is set apart for few-shot examples, of every run, so that 0 and 5 shots have the same items.
--chat asks multiple choice as dialogues. What is too long is left out or gets fewer examples, and
both are counted (tasks.py).

Mind chance: by bytes long choices win, and of TruthfulQA the best answers are longer, so a model of
0.2M parameters that knows nothing has 40% there, where a guess has 23%.

Writes benchmark.json and benchmark.md. On one core that model takes 12 seconds for 400 items each
of ARC (two files), LAMBADA and TruthfulQA, with 0 and with 2 examples.
"""

import json
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from common import UserError, device_of, entry, keyed, load_source, write_atomically
from data import items, sandbox
from data.tokenizer import loads
from measures import mean_se, pass_at_k
from model import unpack
from tasks import chance, cloze, divided, multiple_choice, of_choices, of_cloze, programs


@dataclass(frozen=True)
class Config:
    ckpt: str = "out/laptop/distill,out/laptop/ppo"  # language models, commas between
    arc: str = ""                      # files in ARC's form, commas between
    lambada: str = ""                  # files in LAMBADA's form
    truthfulqa: str = ""               # TruthfulQA.csv
    humaneval: str = ""                # HumanEval.jsonl or .jsonl.gz
    shots: str = "0"                   # examples in a prompt, commas between: 0,5
    count: int = 500                   # items of a file at most, drawn by the seed; 0: all
    chat: bool = False                 # ask multiple choice as dialogues
    samples: int = 10                  # completions of a program
    k: str = "1,10"                    # of pass@k, commas between
    new: int = 128                     # tokens of a completion at most
    temperature: float = 0.6           # of completions
    top_p: float = 0.95                # of completions
    seconds: float = 3.0               # a program may run
    micro: int = 16                    # rows in one forward pass
    seed: int = 0                      # of items, examples and completions
    out: str = "out/benchmark"         # folder of the results
    device: str = "auto"               # auto, cpu, cuda or mps


READERS = dict(arc=items.read_arc, lambada=items.read_lambada, truthfulqa=items.read_truthfulqa,
               humaneval=items.read_humaneval)
TITLES = dict(accuracy="accuracy", accuracy_byte="accuracy, a byte", perplexity="perplexity")


def numbers(name, text, least):
    """"0,5" -> [0, 5]. UserError naming the flag."""
    try:
        found = [int(x) for x in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise UserError(f"--{name} {text}: whole numbers from {least} on, commas between")
    return found


# ---------------------------------------------------------------- the files

@dataclass
class Part:
    """A file's items: those to measure, and those for examples."""
    kind: str
    path: str
    test: list
    examples: list
    counts: dict


def part_of(kind, path, count, seed):
    """The Part of a file: at most `count` of its items, 0 all, in the file's order."""
    try:
        found, counts = READERS[kind](path)
    except ValueError as error:
        raise UserError(error) from None
    if not found:
        raise UserError(f"{path}: no item to use: {counts}")
    examples, test = ([], found) if kind == "humaneval" else divided(found, seed=seed)
    if 0 < count < len(test):
        kept = keyed(seed, "count").permutation(len(test))[:count]
        test = [test[i] for i in sorted(kept.tolist())]
    counts.update(examples=len(examples), measured=len(test),
                  not_drawn=len(found) - len(examples) - len(test))
    return Part(kind, path, test, examples, counts)


def parts_of(cfg):
    """All Parts. UserError if there is none."""
    named = dict(arc=cfg.arc, lambada=cfg.lambada, truthfulqa=cfg.truthfulqa,
                 humaneval=cfg.humaneval)
    parts = [part_of(kind, path, cfg.count, cfg.seed) for kind, paths in named.items()
             for path in paths.split(",") if path]
    if not parts:
        raise UserError("name a file: --arc, --lambada, --truthfulqa or --humaneval")
    return parts


# ---------------------------------------------------------------- one model on one file

def measured_choices(cfg, model, tok, part, shots):
    rows, counts = multiple_choice(model, tok, part.test, shots, part.examples, cfg.chat, cfg.seed,
                                   micro=cfg.micro)
    if not rows:
        return counts, {}, {}
    found = of_choices(rows)
    hits = {name: {row["item"]: row["hits"][norm] for row in rows}
            for name, norm in (("accuracy", "sum"), ("accuracy_byte", "byte"))}
    values = dict(accuracy=found["sum"], accuracy_byte=found["byte"],
                  accuracy_token=found["token"], p=found["p"],
                  chance=(chance([part.test[row["item"]] for row in rows]), 0.0))
    return counts, values, hits


def measured_cloze(cfg, model, tok, part, shots):
    rows, counts = cloze(model, tok, part.test, shots, part.examples, cfg.seed, cfg.micro)
    if not rows:
        return counts, {}, {}
    found = of_cloze(rows)
    error = found["perplexity"] * found["logp"][1]                   # of exp(x): exp(x) dx
    return (counts, dict(accuracy=found["accuracy"], perplexity=(found["perplexity"], error)),
            dict(accuracy={row["item"]: row["hit"] for row in rows}))


def measured_programs(cfg, model, tok, part, _):
    """pass@k; of the outcomes, how many there are of each."""
    outcomes = Counter()

    def passes(item, text):
        outcome = sandbox.solve(part.test[item], text, seconds=cfg.seconds)
        outcomes[outcome] += 1
        return outcome == "passed"

    prompts = [tok.render([], item["prompt"]) for item in part.test]
    rows, counts = programs(model, tok, prompts, passes, cfg.samples, cfg.new, cfg.seed, "programs",
                            temperature=cfg.temperature, top_p=cfg.top_p)
    if not rows:
        return counts, {}, {}
    values, hits = {}, {}
    for k in numbers("k", cfg.k, 1):
        values[f"pass@{k}"] = pass_at_k([row["right"] for row in rows], cfg.samples, k)
        hits[f"pass@{k}"] = {row["item"]: pass_at_k([row["right"]], cfg.samples, k)[0]
                             for row in rows}
    return dict(**counts, outcomes=dict(outcomes.most_common())), values, hits


def change(hits, first):
    """{measure: (mean, error) of the difference to the first checkpoint on common items}."""
    out = {}
    for name in hits.keys() & first.keys():
        common = hits[name].keys() & first[name].keys()
        if common:
            out[name] = mean_se([hits[name][i] - first[name][i] for i in common])
    return out


MEASURES = dict(arc=measured_choices, truthfulqa=measured_choices, lambada=measured_cloze,
                humaneval=measured_programs)


def measure(cfg, parts, shots):
    """A dict of each checkpoint, file and number of examples: counts, values, changes."""
    names = [x for x in cfg.ckpt.split(",") if x]
    if not names:
        raise UserError("--ckpt: name one or more, commas between")
    sources, first, out = {x: load_source(x, scalar=False) for x in names}, {}, []
    jobs = [(part, n) for part in parts for n in (shots if part.kind != "humaneval" else [0])]
    bar = tqdm(total=len(names) * len(jobs), desc="benchmark", dynamic_ncols=True)
    for name in names:
        tok = loads(sources[name]["tokenizer"])
        model = unpack(sources[name], device_of(cfg.device)).eval()
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"{name}: a weight is not finite: nan or inf")
        for part, n in jobs:
            try:
                counts, values, hits = MEASURES[part.kind](cfg, model, tok, part, n)
            except ValueError as error:  # too few examples, nan, a cell that the machine refuses
                raise UserError(f"{name}, {part.path}: {error}") from None
            before = first.setdefault((part.path, n), hits)
            out.append(dict(ckpt=name, task=part.kind, file=part.path, shots=n, counts=counts,
                            values=values, change=change(hits, before) if name != names[0] else {}))
            bar.update()
    bar.close()
    return out


# ---------------------------------------------------------------- the report

def cells(row):
    """The lines of the table that a result of `measure` has."""
    counts, values = row["counts"], row["values"]
    guess = f"{values['chance'][0]:.1%}" if "chance" in values else ""
    start = [row["ckpt"], Path(row["file"]).name, row["shots"]]
    if not values:
        return [[*start, "none fits", "", "", "", f"0 of {counts['items']}", ""]]
    out = []
    for name, (value, se) in values.items():
        if name not in TITLES and not name.startswith("pass@"):
            continue
        form = ".4g" if name == "perplexity" else ".1%"
        delta = row["change"].get(name)
        out.append([*start, TITLES.get(name, name), f"{value:{form}} ± {se:{form}}",
                    guess if name.startswith("acc") else "",
                    f"{delta[0]:+.1%} ± {delta[1]:.1%}" if delta else "",
                    f"{counts['used']} of {counts['items']}", counts.get("fewer", 0) or ""])
    return out


def as_markdown(rows):
    lines = [["checkpoint", "file", "shots", "measure", "value", "chance", "change", "items",
              "fewer shots"]] + [line for row in rows for line in cells(row)]
    lines = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *text[1:]])


def check(cfg):
    """UserError for a knob that is out of range, before hours are lost."""
    for name, least in dict(count=0, samples=1, new=1, micro=1).items():
        if getattr(cfg, name) < least:
            raise UserError(f"--{name} {getattr(cfg, name)}: at least {least}")
    if not 0.01 <= cfg.temperature <= 100 or not 0 < cfg.top_p <= 1 or not 0 < cfg.seconds <= 1e6:
        raise UserError("--temperature goes from 0.01 to 100, --top-p from above 0 to 1, --seconds "
                        "from above 0 to 1e6")


def main(cfg):
    check(cfg)
    shots, ks = numbers("shots", cfg.shots, 0), numbers("k", cfg.k, 1)
    if cfg.humaneval:
        if cfg.samples < max(ks):
            raise UserError(f"--samples {cfg.samples}: at least the largest of --k {cfg.k}")
        try:
            sandbox.run("")                                          # refuses before hours are lost
        except ValueError as error:
            raise UserError(error) from None
    parts = parts_of(cfg)
    for part in parts:
        print(f"{part.path}: " + ", ".join(f"{n} {name}" for name, n in part.counts.items()))
    folder = Path(cfg.out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):                         # or all would be for nothing
        rows = measure(cfg, parts, shots)
    text = as_markdown(rows)
    report = dict(config=asdict(cfg), files={x.path: x.counts for x in parts}, results=rows)
    for name, content in (("benchmark.json", json.dumps(report, indent=1)),
                          ("benchmark.md", text + "\n")):
        write_atomically(folder / name, lambda f, content=content: f.write(content.encode()))
    print(f"{text}\nwritten: {folder}/benchmark.json, benchmark.md")


if __name__ == "__main__":
    entry(main, Config, __doc__, interrupted="the same command starts anew")
