"""The claims of the papers, measured.

    python eval.py                      what there is: each claim, its verdict so far, its minutes
    python eval.py H12 H20              measure these: records, figures, verdicts
    python eval.py --all                measure all, overnight on two cores; it goes on where it was
    python eval.py --all --quick        one seed, an eighth of the work (20 minutes): does it run?
    python eval.py --readme             rewrite README.md and docs/ from results/
    python eval.py --report             the report of --run: terminal, report.md, .json and .png
    python eval.py --report --record    the same, and its numbers to results/laptop.jsonl

A claim is measured from the stages' own records and checkpoints; what is missing is run, in units
of a seed and a setting, each under a quarter of an hour and skipped once its line is in
results/<source>.jsonl. It starts from the base, the policy and the comparisons of --run, which
runs/laptop.sh makes. The rule that decides is the docstring of a claim's verdict function, in
claims/. Verdicts go to results/results.json, figures to docs/claims/.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from claims import (closed_forms, constitution, demonstrations, distillation, full, online, ood,
                    pages, people, pm_scores, pm_training, records, repair, report, rl, robustness)
from common import UserError, entry, write_atomically

SOURCES = (closed_forms, constitution, demonstrations, distillation, full, online, ood, people,
           pm_scores, pm_training, repair, rl, robustness)


def place(name):
    """Where a claim stands in a list: HH's, InstructGPT's, Constitutional AI's, of KL; our own."""
    letter, number = name[0], name[1:]
    return ("HIAK".index(letter), int(number)) if number.isdigit() else (9, 0)


CLAIMS = {name: claim for name, claim in sorted(
    ((n, c) for source in SOURCES for n, c in source.CLAIMS.items()), key=lambda x: place(x[0]))}


@dataclass(frozen=True)
class Config:
    claims: tuple = field(default=(), metadata={"bare": True})  # ids to measure; none: list them
    all: bool = False                  # measure every claim
    run: str = "out/laptop"            # folder of a run: its stages' folders are inside
    seeds: int = 3                     # seeds of a claim
    quick: bool = False                # an eighth of the work and one seed: does it run at all?
    steps: int = 800                   # pretraining steps of a claim's base models
    readme: bool = False               # rewrite the tables of README.md and docs/ from results/
    report: bool = False               # write the report of the run
    record: bool = False               # append the report's numbers to results/laptop.jsonl
    prompts: int = 400                 # held-out prompts of each kind in the report
    new: int = 40                      # tokens of an answer at most
    seed: int = 0                      # of the report's prompts and answers
    device: str = "auto"               # auto, cpu, cuda or mps


# ---------------------------------------------------------------- verdicts

def verdict_of(name):
    """(records, Verdict) of a claim; Verdict is None where nothing is recorded.

    UserError if a record lacks what the rule needs.
    """
    claim = CLAIMS[name]
    try:
        rows = claim.rows(name)
        return rows, claim.judge(rows) if rows else None
    except KeyError as error:
        raise UserError(f"{records.FOLDER[0]}/{claim.source or name}.jsonl: no {error} in a record "
                        f"that {name} needs") from None
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"{records.FOLDER[0]}/{claim.source or name}.jsonl: {name} can't be judged "
                        f"by these records ({error})") from None


def verdicts(but=()):
    """{name: what results.json says} of the claims that have records, but for some."""
    out = {}
    for name, claim in CLAIMS.items():
        rows, found = verdict_of(name) if name not in but else ((), None)
        if found:
            out[name] = dict(verdict=found.word, measured=claim.told(found), says=claim.says,
                             where=claim.where, seeds=records.seeds_of(rows),
                             command=f"python eval.py {name}", minutes=claim.minutes)
    return out


def save(but=()):
    """Writes results.json of all claims but some; returns what it says."""
    done = verdicts(but)
    told = json.dumps(done, indent=1, ensure_ascii=False) + "\n"
    write_atomically(records.FOLDER[0] / "results.json", lambda f: f.write(told.encode()))
    return done


def overview():
    """A line a claim, and how many ended how."""
    done, words = verdicts(), {}
    for name, claim in CLAIMS.items():
        word = done[name]["verdict"].split(":")[0] if name in done else "no record"
        words[word] = words.get(word, 0) + 1
        print(f"{name:<11} {word:<13} {claim.minutes:>4} min   {claim.says} ({claim.where})")
    print("\n" + ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
          + "; python eval.py NAME measures one, --all the rest (claims of one source share runs)")


# ---------------------------------------------------------------- the runner

def measure(cfg, names):
    """Runs what is missing, draws, tells, writes results.json. A claim that can't be measured is
    told, the others go on. Returns the names of those.
    """
    failed = []
    for name in names:
        try:
            CLAIMS[name].measure(cfg)
            if not (found := verdict_of(name)[1]):
                raise UserError("no seed has all its records")
        except UserError as error:
            print(f"{name}: not measured: {error}")
            failed.append(name)
            continue
        if not cfg.quick:
            records.draw_curves(name, found.panels, found.log_x)
        print(f"{name} {found.word}: {CLAIMS[name].told(found)}")
    save(failed)
    return failed


def asked(cfg):
    """The claims to measure. UserError for a name that is none."""
    for name in cfg.claims:
        if name not in CLAIMS:
            raise UserError(f"{name}: no claim; known are {', '.join(CLAIMS)}")
    return list(CLAIMS) if cfg.all else list(dict.fromkeys(cfg.claims))


def main(cfg):
    if cfg.seeds < 1:
        raise UserError(f"--seeds {cfg.seeds}: at least 1")
    if cfg.report + cfg.readme + bool(cfg.all or cfg.claims) > 1:
        raise UserError("claims to measure, --readme and --report: one at a time")
    if cfg.report:
        return report.report(cfg)
    if cfg.readme:
        return pages.rewrite(CLAIMS, save())
    names = asked(cfg)
    if not names:
        return overview()
    if cfg.quick:
        records.FOLDER[0] = Path(cfg.run) / "quick" / "results"
        cfg = replace(cfg, seeds=1)
    failed = measure(cfg, names)
    if failed:
        raise UserError(f"{len(failed)} of {len(names)} claims not measured: {', '.join(failed)}")


if __name__ == "__main__":
    entry(main, Config, __doc__)
