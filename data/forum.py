"""Comparisons from forum answers and their votes, for preference-model pretraining (HH A.2).

    score = round(log2(1 + votes)), 1 more if the questioner accepted the answer; -1 if votes < 0

Two answers to one question whose scores differ are a comparison, the higher one chosen (Askell et
al. 2021). A row is an answer; other fields than these are ignored, site and title may be missing:

    {"site": "coffee", "question_id": "5", "title": "...", "question": "...", "answer": "...",
     "answer_score": 11, "accepted": false}

The prompt is one human turn: the title, a blank line and the question, or the question alone if it
holds the title. A question that is HH text already, up to its "\\n\\nAssistant:", is the prompt as
it is. A row's "objective" is kept; without one it is "helpful".

    python data/forum.py qa.jsonl                              # look at it: counts
    python data/forum.py qa.jsonl --out out/forum.jsonl        # and write the comparisons

Counts add up on three levels: answers (used, malformed, header: a text holds a role header after a
blank line, empty, identical: to an earlier answer), questions (with_pairs, single: one answer was
used, unpaired: all scores are equal) and pairs of answers (kept, equal_scores, surplus: over
--per-question).
"""

import itertools
import math
import sys
from pathlib import Path

if __name__ == "__main__":  # `python data/forum.py` looks for modules beside itself only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.hh import uniform
from data.lines import read_rows, text_of, write_lines
from data.program import flags, outcome
from data.tokenizer import join, parse_prompt

COUNTS = {"answers": ("rows", "used", "malformed", "header", "empty", "identical"),
          "questions": ("questions", "with_pairs", "single", "unpaired"),
          "pairs": ("pairs", "kept", "equal_scores", "surplus")}


def score(votes, accepted=False):
    """An answer's score, an integer. Below zero votes it is -1, accepted or not."""
    if votes < 0:
        return -1
    return round(math.log2(1 + votes)) + bool(accepted)


def is_prompt(text):
    """Whether it is HH text with a human turn that ends at an open "\\n\\nAssistant:"."""
    try:
        return any(role == "human" for role, _ in parse_prompt(text))
    except ValueError:
        return False


def prompt_of(title, question):
    """The HH text that an answer continues, "" if there is no text.

    ValueError if a role header is inside: it would come back as a turn.
    """
    if is_prompt(question):
        return question
    parts = [title, question] if title.strip() and title not in question else [question]
    text = "\n\n".join(part for part in parts if part.strip())
    return join([("human", text)], answer=True) if text else ""


def to_answer(row):
    """A row as (question, text, score, ""), or ("", "", 0, reason).

    question: what makes two answers comparable. ValueError naming the field if it is malformed.
    """
    question, answer = text_of(row, "question"), text_of(row, "answer")
    site, title, objective = (text_of({field: other, **row}, field) for field, other in (
        ("site", ""), ("title", ""), ("objective", "helpful")))
    for field, kinds in (("question_id", (str, int)), ("answer_score", (int,)),
                         ("accepted", (bool,))):
        if type(row.get(field)) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"field {field!r} must be {names}, found {str(row.get(field))[:40]!r}")
    if objective not in ("helpful", "harmless"):
        raise ValueError(f"field 'objective' must be helpful or harmless, found {objective[:40]!r}")
    try:
        prompt = prompt_of(title, question)
        join([("assistant", answer)])
    except ValueError:
        return "", "", 0, "header"
    if not prompt or not answer.strip():
        return "", "", 0, "empty"
    # One id with two texts (edited between two dumps) is two questions: each had its own votes.
    key = (site, str(row["question_id"]), prompt, objective)
    return key, answer, score(row["answer_score"], row["accepted"]), ""


def pairs_of(scores, counts, per_question=4, *key):
    """At most `per_question` (chosen, rejected) of a question's {answer: score}, in keyed order.

    A pair's place depends on its texts and the key alone, so no answer, the best one neither, is
    in every pair, and the order of the answers does not matter. counts: its "pairs" and what
    becomes of them grow.
    """
    found = []
    for a, b in itertools.combinations(scores, 2):
        counts["pairs"] += 1
        if scores[a] == scores[b]:
            counts["equal_scores"] += 1
        else:
            found.append((a, b) if scores[a] > scores[b] else (b, a))
    found.sort(key=lambda pair: uniform(*key, pair))
    counts["kept"] += len(found[:per_question])
    counts["surplus"] += len(found[per_question:])
    return found[:per_question]


def load(names, per_question=4, seed=0, skip_bad=False):
    """Comparison lines of files of answers, and counts {name: number} (see COUNTS).

    Answers to one question may lie in several files. ValueError naming file, line and reason.
    """
    counts = dict.fromkeys(itertools.chain(*COUNTS.values()), 0)
    questions, lines = {}, []
    for name in names:
        for key, answer, points, reason in read_rows(name, to_answer, counts, skip_bad):
            scores = {} if reason else questions.setdefault(key, {})
            reason = "identical" if answer in scores else reason
            counts[reason or "used"] += 1
            if not reason:
                scores[answer] = points
    for key, scores in questions.items():
        pairs = pairs_of(scores, counts, per_question, "forum", seed, key)
        counts["questions"] += 1
        counts["with_pairs" if pairs else "single" if len(scores) == 1 else "unpaired"] += 1
        _, _, prompt, objective = key
        lines += [dict(prompt=prompt, chosen=chosen, rejected=rejected, objective=objective,
                       tranche="forum", annotator="votes") for chosen, rejected in pairs]
    return lines, counts


def run(args):
    if args.per_question < 1:
        raise ValueError(f"--per-question {args.per_question}: at least 1")
    lines, counts = load(args.paths, args.per_question, args.seed, args.skip_bad)
    if args.out:
        if not lines:
            raise ValueError(f"no comparison to write: {counts}")
        write_lines({args.out: lines})
    for level, (first, *reasons) in COUNTS.items():
        print(f"{level:<9}  {counts[first]:>6}: "
              + ", ".join(f"{counts[reason]} {reason}" for reason in reasons))
    if args.out:
        print(f"{args.out}: {len(lines)} comparisons")


def main():
    parser = flags(__doc__)
    parser.add_argument("paths", nargs="+", metavar="FILE", help=".jsonl or .jsonl.gz of answers")
    parser.add_argument("--out", metavar="FILE", default="", help="the comparisons, JSON lines")
    parser.add_argument("--per-question", type=int, default=4,
                        help="pairs of a question at most (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the choice among them (default %(default)s)")
    parser.add_argument("--skip-bad", action="store_true",
                        help="count malformed lines and leave them out")
    outcome(run, parser.parse_args())


if __name__ == "__main__":
    main()
