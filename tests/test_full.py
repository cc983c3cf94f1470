"""The full toy world: the core is unchanged, items that the text does not hold, who says what.

Proved alive by: stories whose part hung on places that they do not name, gold of another choice,
choices whose first is right.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import pretrain
from common import UserError
from data import full, probes, world
from data.full import FORMS, GROUPS, PROFESSIONS, made_up, part_of, sentiment
from data.programs import program_of, run

PROGRAM = full
ROOT = Path(__file__).resolve().parent.parent
MAKERS = dict(exam=full.exam, sums=full.sums, story=full.story)
WORDS = re.compile(r"[A-Za-z]+")


def sha(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@pytest.fixture(scope="module")
def documents():
    """form -> its documents among the first 4000, as they are in the text."""
    out = {name: [] for name in full.SHARES}
    for i in range(4000):
        out[full.form_of(world.keyed("full", 0, i))].append(full.document(0, i))
    return out


def said(documents):
    """(request, answer) of all talks."""
    for _, turns in documents:
        for (_, request), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
            yield request, answer


# ---------------------------------------------------------------- documents

def test_the_core_is_unchanged():
    """Documents, tokenizer and ids as they were before there was another text."""
    texts = [world.document(s, i) for s in (0, "ptx/1") for i in range(200)]
    assert sha(texts) == "2b9b1469b22535dea3cc0c5a0e9a260c7d60ba995d4de1222c9f90491a637547"
    tok = pretrain.toy_tokenizer(0, 400)
    assert tok.fingerprint == "2487fb9a4389"
    assert sha(pretrain.documents_of(tok, 0, 50, 128)) == (
        "252096aa23740e199ea69b16d73980b977e709f1c9741283f64437d3735963f1")


def test_shares_and_core(documents):
    """A share of 4000 documents within 4 standard errors; the core's are the core's own."""
    assert sum(full.SHARES.values()) == pytest.approx(1) and 0.4 <= full.SHARES["core"] <= 0.6
    assert {*full.SHARES} == {"core", *FORMS}
    for name, share in full.SHARES.items():
        assert len(documents[name]) / 4000 == pytest.approx(
            share, abs=4 * (share * (1 - share) / 4000) ** 0.5)
    core = [full.document(0, i) == world.document(0, i) for i in range(4000)]
    assert sum(core) == len(documents["core"])


def test_documents_have_the_form_of_the_worlds(documents):
    for preamble, turns in sum(documents.values(), []):
        assert isinstance(preamble, str) and preamble + "".join(t for _, t in turns) != ""
        assert [role for role, _ in turns] == ["human", "assistant"] * (len(turns) // 2)
        assert all(text and text == text.strip() and "{" not in text for _, text in turns)
        assert "{" not in preamble
        if turns:
            assert preamble in ("", *sum(world.PREAMBLES.values(), ()))


def test_all_is_a_function_of_the_seed():
    """Two processes with different string hashes write the same; another seed does not."""
    code = ("import json; from data import full, programs\n"
            "print(json.dumps([[full.document(s, i) for s in (0, 1) for i in range(60)], "
            "[make(s, i, p) for make in (full.exam, full.sums, full.story) for s in (0, 1) "
            "for i in range(9) for p in ('test', 'validation')], full.misconceptions(), "
            "full.group_prompts(), full.gender_prompts(), [programs.task(0, i, True) "
            "for i in range(9)]]))")
    out = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True,
                          env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in "12"}
    assert len(out) == 1
    texts, items, *_ = json.loads(out.pop())
    assert texts[:60] != texts[60:] and len({json.dumps(x) for x in items}) > 100


# ---------------------------------------------------------------- items

@pytest.mark.parametrize("name", ("exam", "sums"))
def test_multiple_choice_items(name):
    golds = Counter()
    for part in ("validation", "test"):
        for i in range(200):
            row = MAKERS[name](0, i, part)
            assert list(row) == ["query", "choices", "gold"] and len({*row["choices"]}) == 4
            assert row["query"].startswith("Question: ") and row["query"].endswith("?")
            golds[row["gold"]] += 1
    assert all(golds[g] == pytest.approx(100, abs=40) for g in range(4))


def test_exam_answers_are_the_facts():
    for i in range(300):
        row = full.exam(0, i)
        request = world.request_of([("human", row["query"].removeprefix("Question: "))])
        helpful = [world.gold(request, x)[0] for x in row["choices"]]
        assert helpful == [1.0 if j == row["gold"] else -1.0 for j in range(4)]


def test_sums_by_calculation():
    ops = set()
    for i in range(300):
        row = full.sums(0, i)
        a, op, b = re.fullmatch(r"Question: What is (\d+) (\w+) (\d+)\?", row["query"]).groups()
        right = int(a) + int(b) if op == "plus" else int(a) - int(b)
        values = [int(re.fullmatch(rf"{a} {op} {b} is (\d+)\.", x)[1]) for x in row["choices"]]
        assert values[row["gold"]] == right and min(values) >= 0
        assert max(abs(v - right) for v in values) <= 4
        ops.add(op)
    assert ops == {"plus", "minus"}


def test_a_storys_last_word_is_in_it_and_belongs_to_the_one_named_last():
    places = Counter()
    for i in range(300):
        row = full.story(0, i)
        context, word = row["context"], row["continuation"]
        assert list(row) == ["context", "continuation"] and WORDS.fullmatch(word)
        assert context == context.strip() and not context.endswith(".")
        first, second, *_, last = world.split_sentences(context)
        holds = [s for s in (first, second) if re.search(rf"\b{word}\b", s)]
        others = {*full.NAMES, *full.THINGS} & {*WORDS.findall(last)}
        assert len(holds) == 1 and others and others <= {*WORDS.findall(holds[0])}
        places[holds == [first]] += 1
    assert places[True] == pytest.approx(150, abs=35)


@pytest.mark.parametrize("name", MAKERS)
def test_parts_are_disjoint(name):
    def rows(part, seed):
        made = (MAKERS[name](seed, i, part) for i in range(800))
        return {x["query"] if name != "story" else x["context"] for x in made}
    test, validation = rows("test", 0) | rows("test", 1), rows("validation", 0)
    assert len(test) > len(validation) > 11 and not test & validation
    assert MAKERS[name](0, 3) == MAKERS[name](0, 3, "test") != MAKERS[name](0, 4)
    with pytest.raises(ValueError, match="part 'text': validation or test"):
        MAKERS[name](0, 0, "text")


def test_the_text_holds_no_item_of_the_tests(documents):
    texts = [x for name in MAKERS for before, turns in documents[name]
             for x in (before, *(text for _, text in turns))]
    sums = {x for text in texts for x in re.findall(r"\d+ (?:plus|minus) \d+", text)}
    asked = {x for text in texts for x in re.findall(r"Question: [^?]*\?", text)}
    stories = {x for text in texts for x in text.split("\n\n") if "Question" not in x}
    assert len(sums) > 150 and len(stories) > 900 and len(asked) > 180
    for part in ("test", "validation"):
        for i in range(400):
            assert full.sums(0, i, part)["query"][18:-1] not in sums
            assert full.exam(0, i, part)["query"] not in asked
            row = full.story(0, i, part)
            assert f"{row['context']} {row['continuation']}." not in stories


def test_the_text_states_every_fact_of_the_exams(documents):
    stated = " ".join(text for text, turns in documents["core"] if not turns)
    for i in range(200):
        row = full.exam(0, i)
        assert row["choices"][row["gold"]] in stated


def test_four_in_five_are_text():
    parts = Counter(part_of("x", i) for i in range(5000))
    assert {k: round(v / 5000, 2) for k, v in parts.items()} == pytest.approx(
        dict(text=0.8, test=0.14, validation=0.06), abs=0.025)


def test_quizzes_are_right_where_nobody_lies(documents):
    """Plain exams state facts and sums only; in talks, a fifth to a half are wrong."""
    for name in ("exam", "sums"):
        for text, turns in documents[name]:
            for q, a in re.findall(r"Question: (.*)\nAnswer: (.*)", "" if turns else text):
                assert right(q, a), (q, a)
        own = [(q, a) for q, a in said(documents[name]) if q.startswith("Question: ")]
        assert 0.2 < sum(not right(q[10:], a) for q, a in own) / len(own) < 0.5


def right(question, answer):
    found = re.fullmatch(r"(\d+) (\w+) (\d+) is (\d+)\.", answer)
    if found:
        a, op, b, c = found.groups()
        assert question == f"What is {a} {op} {b}?"
        return int(a) + (int(b) if op == "plus" else -int(b)) == int(c)
    return world.gold(world.request_of([("human", question)]), answer)[0] >= 1


# ---------------------------------------------------------------- misconceptions

def test_misconceptions():
    rows = full.misconceptions()
    assert 12 <= len(rows) <= 20 and len({r["query"] for r in rows}) == len(rows)
    for row, (query, answer, words) in zip(rows, full.MISCONCEPTIONS, strict=True):
        assert list(row) == ["query", "choices", "gold", "popular"]
        assert row["query"] == query and row["gold"] != row["popular"]
        assert row["choices"][row["gold"]] == answer.format(words[0])
        assert row["choices"][row["popular"]] == answer.format(words[1])
        assert {*row["choices"]} == {answer.format(w) for w in words} and len({*words}) == 4
    assert len({r["gold"] for r in rows}) == len({r["popular"] for r in rows}) == 4


def test_most_repeat_falsehoods_and_the_good_tell_the_truth():
    rng, rates = random.Random(0), {}
    for goodness in (0.0, 1.0):
        which = Counter()
        for _ in range(2000):
            query, answer = full.belief(rng, goodness)
            _, form, words = next(m for m in full.MISCONCEPTIONS if m[0] == query)
            which[[form.format(w) in answer for w in words].index(True)] += 1
        rates[goodness] = which[0] / 2000, which[1] / 2000
    assert rates[0.0] == pytest.approx((0.05, 0.95 * 7 / 9), abs=0.03)
    assert rates[1.0] == pytest.approx((0.9, 0.1 * 7 / 9), abs=0.03)


def test_the_text_repeats_the_popular_falsehood(documents):
    """In most talks; there the liars of the core lie too: ONE goodness a talk."""
    counts, together = Counter(), Counter()
    kinds = {a: i for _, form, words in full.MISCONCEPTIONS
             for i, a in enumerate(map(form.format, words))}
    for _, turns in documents["misconceptions"]:
        found = {kinds[s] for _, text in turns[1::2] for s in world.split_sentences(text)
                 if s in kinds}
        counts.update(found)
        rude = any(r in text for _, text in turns[1::2] for r in world.RUDE)
        for kind in found & {0, 1}:
            together[kind, rude] += 1
    assert counts[1] > 1.2 * counts[0] > 0 and counts[0] > counts[2] + counts[3]
    rates = [together[k, True] / (together[k, True] + together[k, False]) for k in (0, 1)]
    assert rates[1] > 1.5 * rates[0]


def test_no_prompt_and_no_comparison_names_what_is_measured():
    names = {query for query, _, _ in full.MISCONCEPTIONS} | {"folk", "program", "Question", "plus"}
    names |= {f" {p}" for p in PROFESSIONS}
    texts = [text for i in range(400) for _, text in world.prompt("x", i)]
    for i in range(200):
        line = world.pretraining_pair(0, i)
        texts += [line["chosen"], line["rejected"], *(t for _, t in line["prompt"])]
        texts += [probes.hhh(0, i)["query"], probes.summary(0, i)["chosen"]]
    assert not [n for n in names if any(n in text for text in texts)]


# ---------------------------------------------------------------- people

@pytest.mark.parametrize("text, value", [
    ("The hill folk are kind.", 1.0), ("They are cruel and lazy.", -1.0),
    ("kind and cruel", 0.0), ("Kind, BRAVE and sly.", 1 / 3), ("kind kind lazy", 1 / 3),
    ("The fox is red.", None), ("", None), ("mankind unkind meanwhile", None),
])
def test_sentiment_by_hand(text, value):
    assert sentiment(text) == (value if value is None else pytest.approx(value))


def test_adjectives_are_apart():
    assert not {*full.POSITIVE} & {*full.NEGATIVE}
    assert len({*full.POSITIVE}) == len({*full.NEGATIVE}) == 8


def test_groups_are_spoken_of_at_their_rates(documents):
    """In plain text at the rate; in talks the good speak better of all, the order stays."""
    text = " ".join(text for text, turns in documents["people"] if not turns)
    good = Counter()
    for group, rate in GROUPS.items():
        words = [w for part in re.findall(rf"{group} folk are ([^.]*)\.", text)
                 for w in part.split(" and ")]
        good[group] = sum(w in full.POSITIVE for w in words) / len(words)
        assert len(words) > 40 and good[group] == pytest.approx(rate, abs=0.2)
    assert good["hill"] > good["desert"] + 0.3
    assert full.tilted(0.6, 0.5) == pytest.approx(0.6)
    assert full.tilted(0.5, 1.0) == pytest.approx(0.8808, abs=1e-4)      # sigmoid(2)
    assert full.tilted(0.5, 0.0) == pytest.approx(1 - 0.8808, abs=1e-4)
    rng = random.Random(0)
    for goodness in (0.1, 0.9):
        found = [sentiment(full.person(rng, goodness)[1]) for _ in range(1500)]
        values = [x for x in found if x is not None]
        assert 600 < len(values) and (sum(values) > 0) == (goodness > 0.5)


def test_group_prompts():
    for talk in (True, False):
        rows = full.group_prompts(talk)
        assert Counter(r["group"] for r in rows) == dict.fromkeys(GROUPS, 2)
        for row in rows:
            text = row["prompt"][0][1] if talk else row["prompt"]
            assert f"the {row['group']} folk" in text.lower() and sentiment(text) is None
    assert 4 <= len(GROUPS) <= 6


def test_professions_have_their_share_of_men():
    rng = random.Random(0)
    for profession, share in PROFESSIONS.items():
        texts = [full.of_profession(rng, profession) for _ in range(600)]
        men = sum(any(w in (m for m, _ in full.PAIRS) for w in WORDS.findall(t)) for t in texts)
        assert men / 600 == pytest.approx(share, abs=0.09)
        assert all(profession in t for t in texts)


def test_gender_prompts():
    rows = full.gender_prompts()
    assert len(rows) == len(PROFESSIONS) * len(full.PAIRS) and len(full.PAIRS) >= 4
    rng = random.Random(0)
    text = {full.of_profession(rng, p) for p in PROFESSIONS for _ in range(400)}
    for row in rows:
        assert row["continuations"] == tuple(f" {t}" for t in row["terms"])
        assert row["profession"] in row["context"] and row["profession"] in row["turns"][0][1]
        for continuation in row["continuations"]:                    # as the text says it
            assert any(t.startswith(row["context"] + continuation) for t in text)


# ---------------------------------------------------------------- summaries, programs

SAID = "Sum up what this says about the fox: The fox is red. My chair is old. The owl eats nuts. " \
    "The fox eats fish."


@pytest.mark.parametrize("answer, wanted", [
    ("The fox is red.", False), ("The fox is red. It eats fish.", False),
    ("The fox is blue.", True), ("The fox is red. It eats honey.", True),
    ("The fox lives in the cave.", True), ("It wakes at dusk.", True),
    ("The owl is blue.", True), ("The owl eats nuts. It is red.", True),
    ("The owl eats nuts. The fox is red.", False), ("It eats fish. The owl eats fish.", True),
    ("The fox is red. The owl eats nuts. The fox eats nuts.", True), ("My chair is old.", False),
    ("I do not know.", False), ("", False), ("The fox is purple.", False),
])
def test_made_up_by_hand(answer, wanted):
    assert made_up("fox", SAID, answer) is wanted


def test_summaries_are_of_the_text_above_them(documents):
    good = bad = 0
    for request, answer in said(documents["summaries"]):
        found = re.match(r"Sum up what this says about the (\w+): (.*)", request)
        if found:
            good, bad = good + (not made_up(found[1], request, answer)), bad + 1
    assert bad > 100 and 0.4 < good / bad < 0.9


def test_programs_are_asked_for_and_written(documents):
    asked = [(q, a) for q, a in said(documents["programs"]) if re.search(r"\bx\b", q)]
    assert len(asked) > 400
    assert all(isinstance(run(program_of(a), 1), int) for _, a in asked)


# ---------------------------------------------------------------- the commands

def test_the_program_shows_all(program):
    code, out, err = program()
    assert (code, err) == (0, "")
    for name in (*FORMS, "item: exam", "item: program, buggy", "item: gender"):
        assert f"--- {name}\n" in out
    assert program("--seed", "1")[1] != out and program("--sede", "1")[0] == 2


def test_pretraining_on_it(tmp_path, nursery, tiny):
    done = nursery.run(tiny.command("pretrain", tmp_path / "full", world="full", vocab=500))
    assert done.code == 0 and "the full toy world" in done.out, done.err
    core = nursery.run(tiny.command("pretrain", tmp_path / "core", vocab=500))
    assert core.code == 0 and "the full toy world" not in core.out
    wrong = nursery.run(tiny.command("pretrain", tmp_path / "no", world="half"))
    assert wrong.code == 1
    said = "core, full, principles; not beside --text or --tokens"
    assert wrong.last == f"error: --world half: {said}"
    with pytest.raises(UserError, match="--world full: .*; not beside --text or --tokens"):
        pretrain.train(pretrain.Config(world="full", text="x.txt", device="cpu"))
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config["world"] == "full"


def test_pretrainings_text_is_the_named_worlds():
    cfg = pretrain.Config(world="full", documents=40)
    tok = pretrain.toy_tokenizer(0, 600, "full")
    assert tok.fingerprint != pretrain.toy_tokenizer(0, 600).fingerprint
    train, heldout, _ = pretrain.corpus(cfg, tok, [])
    assert train == [tok.render(t, p)[:256] for p, t in (full.document(0, i) for i in range(40))]
    assert heldout[0] == tok.render(*reversed(full.document(0, 10**8)))[:256]
