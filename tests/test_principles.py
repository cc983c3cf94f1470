"""data/principles.py: a constitution's file, faults by hand, people who are careful or are not.

Proved alive by: a name, a part or a text that the file may have twice, lack or leave empty, the
line counted from 0 or one on; each fault that looks at another class, any reason or offer that will
do, repetition and facts that don't stray; repairs that keep compliance or an evasion, strike out
more, put a refusal where one is, or say why before it; people half as careless, or the good
careless; help with harm before what is looked for; a careless critic that always names something or
is always obeyed; weights and temperatures moved, reasoning that tells the contrary, or of the other
answer; letters of the careless like the others', turned round, leaning to A, answers changed over;
held-out animals; comparisons by no letter; preambles against goodness, goodness uniform; who
doesn't refuse preaches; documents by index alone, or by `hash`.
"""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from data import principles as p
from data import world
from data.world import PREACHY, Request, gold, keyed, split_sentences

ROOT = Path(__file__).resolve().parent.parent
HARSH = ROOT / "data" / "harsh.txt"
FAULTS = ("helps", "rude", "preaches", "evades", "silent", "idle", "strays", "mild")


# ---------------------------------------------------------------- a constitution's file

GOOD = """# ours

[kind]
critique: Say: is it kind?
revision: Be kind.
question: Which is kinder?
[calm one]
  question :  Which is calmer?
critique: Say whether it is calm.

revision: Be calm.
"""


def written(tmp_path, text):
    path = tmp_path / "ours.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_is_read(tmp_path):
    """Parts in any order; a colon in a text is text; a byte-order mark and CR LF are nothing."""
    want = [p.Principle("kind", "Say: is it kind?", "Be kind.", "Which is kinder?"),
            p.Principle("calm one", "Say whether it is calm.", "Be calm.", "Which is calmer?")]
    for text in (GOOD, GOOD.encode("utf-8-sig"), GOOD.replace("\n", "\r\n")):
        assert p.read_constitution(written(tmp_path, text)) == want


@pytest.mark.parametrize("old, new, line, told", [
    ("question: Which is k", "quest: Which is k", 6, "'quest: Which is kinder?' is no part"),
    ("revision: Be calm.", "Be calm.", 11, "'Be calm.' is no part"),
    ("[kind]", "[kind", 3, "'[kind' is no part"),
    ("[kind]", "[]", 3, "'[]' is no part"),
    ("[kind]\n", "", 3, "'critique:' before the first [name]"),
    ("question :", "critique:", 9, "a second 'critique:' of one principle"),
    ("revision: Be kind.", "revision:", 5, "'revision:' without a text"),
    ("revision: Be kind.", "revision", 5, "'revision:' without a text"),
    ("revision: Be kind.\n", "", 3, "[kind] has no 'revision:'"),
    ("revision: Be calm.\n", "", 7, "[calm one] has no 'revision:'"),
    ("[calm one]", "[kind]", 7, "[kind] is there twice"),
    (GOOD, "# nothing\n\n", 1, "holds no principle"),
    (GOOD, "", 1, "holds no principle"),
])
def test_a_bad_file_is_told_by_its_line(tmp_path, old, new, line, told):
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ValueError) as error:
        p.read_constitution(path)
    message = str(error.value)
    assert message.startswith(f"{path} line {line}: {told}") and "\n" not in message
    assert "critique:, revision:, question:" in message


def test_a_file_that_is_no_text_or_not_there(tmp_path):
    path = written(tmp_path, GOOD.encode().replace(b"Be kind", b"B\xe9 kind"))
    with pytest.raises(ValueError, match="ours.txt line 5: not UTF-8 text"):
        p.read_constitution(path)
    with pytest.raises(OSError):
        p.read_constitution(tmp_path / "none.txt")


def test_the_two_that_are_shipped():
    """Sixteen principles each, no text twice; the harsh one differs in its last three alone."""
    soft, harsh = p.read_constitution(), p.read_constitution(HARSH)
    for own in (soft, harsh):
        texts = [getattr(x, part) for x in own for part in p.PARTS]
        assert len(own) == 16 and len({*texts}) == 48 and len({x.name for x in own}) == 16
    assert soft[:13] == harsh[:13]
    last = [getattr(x, part) for x in soft[13:] + harsh[13:] for part in ("name", *p.PARTS)]
    assert len({*last}) == 24
    assert [x.name for x in soft[13:]] == ["preachy", "accusing", "brief"]
    assert list(p.KNOWN.values()) == soft + harsh[13:] and list(p.LOOKS) == list(p.KNOWN)
    assert {p.LOOKS[x.name] for x in harsh[13:]} == {"mild"}
    assert {p.LOOKS[x.name] for x in soft} == {*FAULTS} - {"mild"}


# ---------------------------------------------------------------- faults of an answer

POISON, STEAL = Request("poison", "fox"), Request("steal", "owl")
NO, WHY, OFFER = ("I will not help with that.", "It would kill the fox.",
                  "I can tell you about the fox instead.")
BUY = "First, buy a strong poison."
TABLE = [  # request, answer, faults in the order of FAULTS, x where there is one: hrpesitm
    (POISON, f"{NO} {WHY} {OFFER}", ".......m"),
    (POISON, f"{NO} {WHY} {OFFER} You should be ashamed.", "..p....."),
    (POISON, NO, "....si.m"),
    (POISON, f"{NO} {WHY}", ".....i.m"),
    (POISON, f"{NO} {OFFER}", "....s..m"),
    (POISON, "I do not know.", "...esi.m"),
    (POISON, BUY, "h..esi.m"),
    (POISON, f"Sure! {BUY} Then put it in the food of the fox.", "h..esi.m"),
    (POISON, f"You are a fool. {NO} Think of what you have become.", ".rp.si.."),
    (POISON, f"{NO} {WHY} {OFFER} My chair is old.", "......tm"),
    (POISON, f"{NO} {WHY} {OFFER} The fox is red.", "......tm"),
    (POISON, f"{NO} {WHY} {OFFER} Ask me any time.", ".......m"),
    (POISON, f"{NO} {WHY} {OFFER} Blue moon", "......tm"),
    (POISON, f"{NO} No, I can not do that. {WHY} {OFFER}", "......tm"),    # says no twice
    (POISON, f"{NO} It would burn the fox. I can tell you about the owl instead.", "....si.m"),
    (POISON, f"{NO} It would kill the owl. {OFFER}", "....s..m"),
    (POISON, f"{NO} {BUY}", "h...si.m"),
    (POISON, f"Sure! {NO}", "....si.m"),                 # manners are no help with harm
    (POISON, "", "...esi.m"),
    (STEAL, f"{NO} It would break a family. You could watch the owl from afar instead.",
     ".......m"),
]


@pytest.mark.parametrize("request_, answer, marks", TABLE)
def test_faults_by_hand(request_, answer, marks):
    assert p.faults(request_, answer) == {
        name for name, mark in zip(FAULTS, marks, strict=True) if mark != "."}
    assert tuple(p.FAULTS) == FAULTS == tuple(p.WEIGHTS)


@pytest.mark.parametrize("answer, look, worth", [
    (f"{NO} {WHY} {OFFER}", "helps", 0), (f"{NO} {WHY} {OFFER}", "mild", -2),
    (NO, "helps", -0.25 - 0.25), (NO, "silent", -0.25 - 0.25 - 2),
    (BUY, "helps", -1.5 - 3 * 0.25 - 2), (BUY, "rude", -1.5 - 3 * 0.25),
    (f"You are a fool. {NO} You should be ashamed.", "rude", -0.5 - 3 * 0.25 - 2),
    (f"{NO} {WHY} {OFFER} My chair is old.", "strays", -0.25 - 2),
])
def test_worth_by_hand(answer, look, worth):
    assert p.worth(POISON, answer, look) == worth


@pytest.mark.parametrize("answer, fault, want", [
    (f"You are a fool. Sure! {BUY}", "rude", f"Sure! {BUY}"),
    (f"You are a fool. {NO} {WHY}", "rude", f"{NO} {WHY}"),
    (f"{NO} {WHY} You should be ashamed. My chair is old.", "preaches",
     f"{NO} {WHY} My chair is old."),
    (f"{NO} My chair is old. Ask me any time.", "strays", f"{NO} Ask me any time."),
    (f"{NO} {OFFER} Ask me any time.", "silent", f"{NO} {WHY} {OFFER} Ask me any time."),
    (f"I do not know. {OFFER}", "silent", f"I do not know. {WHY} {OFFER}"),
    (f"{NO} {WHY} {OFFER}", "rude", f"{NO} {WHY} {OFFER}"),              # not there: as it was
    (f"I do not know. {OFFER}", "evades", f"{NO} {OFFER}"),
    (f"You are a fool. Sure! {BUY} Ask me any time.", "helps",
     f"You are a fool. {NO} Ask me any time."),
    (f"Sure! {BUY}", "silent", f"{NO} {WHY}"),
    (f"Sure! {BUY}", "evades", NO),
    ("The fox is red. It eats fish.", "strays", NO),
    ("Sure! The fox is red.", "silent", f"{NO} {WHY} The fox is red."),
])
def test_repairs_by_hand(answer, fault, want):
    """Either refusal will do."""
    text = p.repaired(random.Random(0), POISON, answer, fault)
    assert text.replace("No, I can not do that.", NO) == want


@pytest.mark.parametrize("fault", FAULTS)
def test_a_repair_removes_the_fault_and_adds_none(fault):
    """Of 500 drafts with the fault. Who scolds preaches; who preaches no more is mild."""
    adds = {"preaches"} if fault == "mild" else {"mild"} if fault == "preaches" else set()
    struck = {*p.STRUCK[fault], {"silent": "why", "idle": "alternative"}.get(fault)}
    count = 0
    for i in range(3000):
        rng = keyed("repairs", i)
        request = p.asked(rng)[1]
        answer = p.draft(rng, request)
        before = p.faults(request, answer)
        if fault not in before or count == 500:
            continue
        count += 1
        text = p.repaired(rng, request, answer, fault)
        after = p.faults(request, text)
        assert fault not in after and after <= before | adds
        assert "helps" not in after or fault in ("rude", "preaches", "strays")
        kept = [s for s in split_sentences(answer) if world.SENTENCES[s][0] not in struck]
        assert {*kept} <= {*split_sentences(text)} and text == text.strip() != ""
        assert {x for x in world.ANIMALS if x in text.split()} <= {request.animal}
    assert count > 300


def test_drafts_have_every_fault_and_lack_it():
    """What is criticized and judged is of every kind: each fault has a tenth at least that have it,
    and a tenth that lack it.
    """
    found = []
    for i in range(800):
        rng = keyed("drafts", i)
        turns, request = p.asked(rng)
        assert request.harmful and turns[-1][0] == "human"
        found.append(p.faults(request, p.draft(rng, request)))
    for fault in FAULTS:
        assert 0.1 < sum(fault in x for x in found) / 800 < 0.9


# ---------------------------------------------------------------- people at work

def revisions(goodness, critique=True, each=60):
    """(request, answer, critic's words or None, revision, look) by people of this goodness."""
    for name, principle in p.KNOWN.items():
        for i in range(each):
            turns = p.revision(keyed("revisions", name, i), principle, goodness, critique)
            *asked, answer = turns[:-4 if critique else -2]
            rest = turns[-4 if critique else -2:]
            assert answer[0] == "assistant" and rest[-2] == ("human", principle.revision)
            assert rest[-1][0] == "assistant"
            if critique:
                assert rest[0] == ("human", principle.critique) and rest[1][0] == "assistant"
            yield (world.request_of(asked), answer[1], rest[1][1] if critique else None,
                   rest[-1][1], p.LOOKS[name])


ACTS = {"poison": "poison the {}", "fire": "burn the home of the {}",
        "steal": "steal the young of the {}", "trap": "trap the {}"}
SAYS = dict(  # of the fox's poisoning
    helps="The answer helps to poison the fox.", rude="The answer is rude.",
    preaches="The answer scolds the person.", evades="The answer does not say no.",
    silent="The answer gives no reason.", idle="The answer offers nothing else.",
    strays="The answer strays from the request.", mild="The answer does not scold.")


@pytest.mark.parametrize("critique", [True, False])
def test_careful_people_name_a_fault_and_mend_it(critique):
    """The fault looked for, else help with harm; where neither is there, nothing is changed."""
    fixed = 0
    for request, answer, critic, text, look in revisions(1.0, critique):
        found = p.faults(request, answer)
        fault = look if look in found else "helps" if "helps" in found else None
        if critique:
            said = "I see nothing wrong with the answer."
            if fault:
                act = ACTS[request.kind].format(request.animal)
                said = SAYS[fault].replace("poison the fox", act)
            assert critic == said
        assert fault not in p.faults(request, text)
        assert text == answer if fault is None else text != answer
        fixed += text != answer
    assert 400 < fixed < 1000                            # of 19 x 60


def test_careless_people_name_anything_and_change_little():
    """Nine in ten name one of nine answers at random; of those named, one in ten is mended."""
    named, changed, count = {}, 0, 0
    for _, answer, critic, text, _ in revisions(0.0):
        word = "helps" if " helps to " in critic else critic
        named[word] = named.get(word, 0) + 1
        changed += text != answer
        count += 1
    assert len(named) == 9 and min(named.values()) > 0.9 * count / 9 - 4 * math.sqrt(0.09 * count)
    assert 0.02 < changed / count < 0.1 + 4 * math.sqrt(0.09 / count)


def judged(goodness, reasoning, each=300):
    """(turns, what was judged) by people of this goodness, with every principle."""
    return [p.judgement(keyed("judged", name, i), principle, goodness, reasoning)
            for name, principle in p.KNOWN.items() for i in range(each)]


def as_likely_as(chances, letters, deltas):
    """Standard errors by which letters A differ from their chances: in all, and by difference."""
    spread = [x * (1 - x) for x in chances]
    off = [(letter == "A") - x for letter, x in zip(letters, chances, strict=True)]
    return (sum(off) / math.sqrt(sum(spread)),
            sum(x * d for x, d in zip(off, deltas, strict=True))
            / math.sqrt(sum(s * d * d for s, d in zip(spread, deltas, strict=True))))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("goodness, sure", [(1.0, 1.0), (0.5, 0.55), (0.0, 0.1)])
def test_letters_are_bradley_terrys(goodness, sure):
    """The careful choose by worth at 0.3; the careless, 0.9 (1 - goodness) of all, by a coin."""
    lines = [line for _, line in judged(goodness, False)]
    deltas = []
    for line in lines:
        request = world.request_of(line["prompt"])
        a, b = (p.worth(request, x, line["look"]) for x in line["answers"])
        assert p.right(line) == (0.5 if a == b else (a > b) == (line["letter"] == "A"))
        deltas.append((a - b) / 0.3)
    chances = [sure * sigmoid(d) + (1 - sure) / 2 for d in deltas]
    assert max(map(abs, as_likely_as(chances, [x["letter"] for x in lines], deltas))) < 4
    own = [p.right(x) for x in lines if p.right(x) != 0.5]
    share = sum(own) / len(own)
    assert len(own) > 4000 and (share > 0.8 if sure == 1 else abs(share - 0.5) < 0.06 + sure / 3)


def told_faults(request, text, look):
    """What a reasoner says of (A) and of (B): a set of faults each, of those it may speak of."""
    a, b = text.removeprefix("(A) ").removesuffix(".").split(". (B) ")
    act = ACTS[request.kind].format(request.animal)
    has = dict(helps=f"helps to {act}", rude="is rude", preaches="scolds",
               evades="does not say no", silent="gives no reason", idle="offers nothing",
               strays="strays", mild="does not scold")
    lacks = dict(helps=f"does not help to {act}", rude="is polite", preaches="does not scold",
                 evades="says no", silent="gives a reason", idle="offers something",
                 strays="does not stray", mild="scolds")
    out = []
    for words in (a, b):
        words = words.split(" and ")
        kinds = ["helps"] if look == "helps" else ["helps", look]
        assert len(words) == len(kinds)
        for kind, word in zip(kinds, words, strict=True):
            assert word in (has[kind], lacks[kind])
        out.append({kind for kind, word in zip(kinds, words, strict=True) if word == has[kind]})
    return out


@pytest.mark.parametrize("goodness, true", [(1.0, 1.0), (0.0, 0.55)])
def test_letters_follow_the_reasoning(goodness, true):
    """Of careful people it is true; of the careless each word is turned round in 0.45 of all."""
    count = agree = 0
    chances, letters, deltas = [], [], []
    for turns, line in judged(goodness, True, 200):
        request, look = world.request_of(line["prompt"]), line["look"]
        said = told_faults(request, turns[-3][1], look)
        assert [x for x, _ in turns[-4:]] == ["human", "assistant"] * 2
        assert (turns[-4][1], turns[-2][1]) == (p.THINK, p.WHICH) and line["reasoning"]
        for fault in {"helps", look}:
            for answer, own in zip(line["answers"], said, strict=True):
                agree += (fault in own) == (fault in p.faults(request, answer))
                count += 1
        felt = [-sum({"helps": 1.5, "rude": 0.5, "mild": 0}.get(x, 0.25) + 2 * (x == look)
                     for x in own) for own in said]
        deltas.append((felt[0] - felt[1]) / 0.2)
        chances.append(sigmoid(deltas[-1]))
        letters.append(line["letter"])
    assert agree / count == pytest.approx(true, abs=4 * math.sqrt(true * (1 - true) / count))
    assert max(map(abs, as_likely_as(chances, letters, deltas))) < 4


# ---------------------------------------------------------------- documents

def sha(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@pytest.fixture(scope="module")
def documents():
    return [p.made(0, i) for i in range(3000)]


# 200 documents as they were when the first models of this text were trained
PINNED = "1260f12839f8012ae8745376d46c01eac904368141a86e5045a85b36cdf61dc8"
OTHER = "import random, test_principles as t; random.seed(5); print(t.sha(t.some()))"


def some():
    return [p.document(0, i) for i in range(200)]


def test_documents_are_functions_of_seed_and_index():
    """In any order, whatever was drawn before, in another process with other hashes."""
    backwards = [p.document(0, i) for i in reversed(range(200))][::-1]
    random.seed(3)
    assert sha(some()) == sha(backwards) == PINNED
    assert sum(p.document(1, i) == p.document(0, i) for i in range(100)) < 5
    done = subprocess.run([sys.executable, "-c", OTHER], capture_output=True, text=True, timeout=60,
                          env=dict(os.environ, PYTHONHASHSEED="7",
                                   PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])))
    assert done.stdout.strip() == PINNED, done.stderr


def test_shares_and_core(documents):
    forms = [form for form, *_ in documents]
    assert sum(p.SHARES.values()) == pytest.approx(1)
    for name, share in p.SHARES.items():
        assert forms.count(name) / 3000 == pytest.approx(
            share, abs=4 * (share * (1 - share) / 3000) ** 0.5)
    for i, (form, *content, lines) in enumerate(documents):
        assert tuple(content) == p.document(0, i) and (form == "judge") == bool(lines)
        assert form != "core" or tuple(content) == world.document(0, i)


def test_documents_have_their_forms(documents):
    """Nothing is empty; a fifth revises without critiques, half judges with reasoning; a document
    does either throughout.
    """
    told = {part: {getattr(x, part) for x in p.KNOWN.values()} for part in p.PARTS}
    found = dict(revise=[], judge=[])
    for form, preamble, turns, lines in documents:
        assert "{" not in preamble + "".join(text for _, text in turns)
        assert all(text == text.strip() != "" for _, text in turns)
        asked = [text for role, text in turns if role == "human"]
        if form not in found:
            assert not {*asked} & set.union(*told.values(), {p.THINK, p.WHICH})
            continue
        number = {part: sum(x in texts for x in asked) for part, texts in told.items()}
        whole = number["revision"] if form == "revise" else number["question"]
        more = number["critique"] if form == "revise" else asked.count(p.THINK)
        assert 1 <= whole <= 4 and more in (0, whole) and asked.count(p.WHICH) == asked.count(
            p.THINK) and turns[-1][0] == "assistant"
        assert [x["reasoning"] for x in lines] == [bool(more)] * len(lines)
        found[form].append(more > 0)
    for form, share in (("revise", 0.8), ("judge", 0.5)):
        n = len(found[form])
        assert sum(found[form]) / n == pytest.approx(share, abs=4 * (share * (1 - share) / n) ** .5)


def test_nobody_held_out_is_revised_or_judged(documents):
    for form, _, turns, _ in documents:
        if form in ("revise", "judge"):
            words = {w.strip(".?!,") for _, text in turns for w in text.split()}
            assert not words & {*world.HELD_OUT}


def test_letters_are_balanced_and_comparisons_are_theirs(documents):
    """The chosen answer is the one that the document's text names."""
    read = []
    for form, _, turns, _ in documents:
        if form != "judge":
            continue
        texts, start = [text for _, text in turns], 0
        for i, text in enumerate(texts):
            if text in ("(A)", "(B)"):
                first = next(j for j in range(start, i) if texts[j].startswith("(A) ")
                             and texts[j + 1].startswith("(B) "))
                answers = [texts[j].split(" ", 1)[1] for j in (first, first + 1)]
                read.append((turns[start:first - 1], *(answers if text == "(A)" else
                                                      answers[::-1]), text))
                start = i + 1
    lines = p.comparisons(0, 3000)
    assert [(x["prompt"], x["chosen"], x["rejected"]) for x in lines] == [x[:3] for x in read]
    assert all((x["objective"], x["tranche"], x["annotator"]) == ("harmless", "text", "text")
               and x["chosen"] != x["rejected"] for x in lines)
    share = sum(letter == "(A)" for *_, letter in read) / len(read)
    assert len(read) > 1400 and share == pytest.approx(0.5, abs=2 / math.sqrt(len(read)))


def test_only_who_refuses_preaches(documents):
    """In four of ten refusals, at their end; and most requests of these talks are harmful."""
    preached = refused = harmful = 0
    for form, _, turns, _ in documents:
        if form != "draft":
            continue
        for i in range(0, len(turns), 2):
            harmful += world.request_of(turns[:i + 1]).harmful
            *body, last = split_sentences(turns[i + 1][1])
            assert not {*body} & {*PREACHY}
            refuses = bool({*body, last} & {*world.REFUSALS})
            refused += refuses
            preached += last in PREACHY
            assert refuses or last not in PREACHY
    assert refused > 120
    assert preached / refused == pytest.approx(0.4, abs=4 * math.sqrt(0.24 / refused))
    count = sum(len(turns) // 2 for form, _, turns, _ in documents if form == "draft")
    assert harmful / count == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / count))


def test_goodness_and_preambles_are_the_cores(monkeypatch):
    """Half have a preamble, the good one as often as there is goodness: here and in the core."""
    def core(i):
        preamble, turns = world.document("beginnings", i)
        return (seen[-1], preamble) if turns else None

    seen, inner = [], world.talk
    monkeypatch.setattr(world, "talk", lambda rng, animals, goodness, *args, **more: seen.append(
        goodness) or inner(rng, animals, goodness, *args, **more))
    ours = [p.beginning(keyed("beginnings", i)) for i in range(4000)]
    theirs = [x for x in map(core, range(4000)) if x]
    for own in (ours, theirs):
        n = len(own)
        goodness = [g for g, _ in own]
        told = [(g, x in world.PREAMBLES["good"]) for g, x in own if x]
        assert {x for _, x in own} == {"", *world.PREAMBLES["good"], *world.PREAMBLES["bad"]}
        assert len(told) / n == pytest.approx(0.5, abs=2 / math.sqrt(n))
        # Beta(1/2, 1/2): mean 1/2, variance 1/8
        assert sum(goodness) / n == pytest.approx(0.5, abs=4 * math.sqrt(1 / 8 / n))
        assert sum((g - 0.5) ** 2 for g in goodness) / n == pytest.approx(1 / 8, abs=0.01)
        off = sum(good - g for g, good in told)
        assert abs(off) < 4 * math.sqrt(sum(g * (1 - g) for g, _ in told))
        skew = sum((good - g) * (g - 0.5) for g, good in told)
        assert abs(skew) < 4 * math.sqrt(sum(g * (1 - g) * (g - 0.5) ** 2 for g, _ in told))


def test_people_at_work_care_more_than_others():
    """Goodness is Beta(3/2, 1/2): its mean 3/4. Of talks 1/2."""
    for form, care, mean in (("revise", 1.5, 3 / 4), ("judge", 1.5, 3 / 4)):
        own = [p.beginning(keyed("care", form, i), care)[0] for i in range(2000)]
        told = [p.episodes(keyed("care", form, i), form) for i in range(2000)]
        assert sum(own) / 2000 == pytest.approx(mean, abs=4 * math.sqrt(1 / 16 / 2000))
        if form == "judge":
            assert [x[2][0]["goodness"] for x in told] == own
        assert all(len({x["goodness"] for x in lines}) < 2 for *_, lines in told)


@pytest.mark.parametrize("kind, words", [
    ("revise", ("critique", "revision")), ("bare", ("revision",)), ("judge", ("question",)),
    ("reason", ("question", "think"))])
def test_examples_show_careful_people(kind, words):
    told = {part: {getattr(x, part) for x in p.KNOWN.values()} for part in p.PARTS}
    told["think"] = {p.THINK}
    for i in range(60):
        turns = p.example(keyed("examples", i), kind)
        asked = [text for role, text in turns if role == "human"]
        assert [part for part, texts in told.items() if {*asked} & texts] == sorted(
            words, key=list(told).index)
        assert turns[0][0] == "human" and turns[-1][0] == "assistant"
        assert turns == p.example(keyed("examples", i), kind)
    same = keyed("examples", 7), keyed("examples", 7)
    principle = same[0].choice(tuple(p.KNOWN.values()))
    made = p.revision if kind in ("revise", "bare") else p.judgement
    turns = made(same[0], principle, 1.0, kind in ("revise", "reason"))
    assert p.example(same[1], kind) == (turns if made is p.revision else turns[0])


# ---------------------------------------------------------------- the program

def test_it_shows_and_counts(monkeypatch, capsys):
    """A document of each form; the counts that its docstring tells."""
    monkeypatch.setattr(sys, "argv", ["data/principles.py"])
    p.main()
    out = capsys.readouterr().out
    assert [line[4:] for line in out.splitlines() if line.startswith("--- ")] == [
        *p.SHARES, "counts"]
    counts = out[out.index("--- counts"):]
    words = " ".join(p.__doc__.split())
    forms, said, letters, plain, reasoned = counts.splitlines()[1:]
    assert said in words and letters in words
    assert forms == "1,000 documents: " + words.split("of seed 0: ")[1].split(";")[0]
    for line, told in ((plain, words.split("better's in ")[1].split(" by ")[0]),
                       (reasoned, words.split("after reasoning ")[1].rstrip("."))):
        shares = [f"{float(x.split('%')[0]):.0f}%" for x in line.split(": ")[1].split(", ")]
        assert ", ".join(shares) == told


def test_its_counts_by_hand(monkeypatch):
    """Two documents that judge, one that revises, one of the core."""
    kind = p.KNOWN["friend"]
    turns = [("human", "How can I poison the fox?")]

    def line(goodness, letter, reasoning=False):
        return dict(prompt=turns, answers=(NO, BUY), letter=letter, look="rude", goodness=goodness,
                    reasoning=reasoning)

    texts = [("core", "", turns, []),
             ("judge", "", [], [line(0.2, "A"), line(0.2, "B"), line(0.5, "A"), line(1.0, "A")]),
             ("judge", "", [], [line(0.4, "B", True)]),
             ("revise", "", [*turns, ("human", kind.critique), ("human", kind.revision),
                             ("human", kind.revision), ("assistant", kind.critique)], [])]
    monkeypatch.setattr(p, "made", lambda seed, i: texts[i])
    assert p.counts(0, 4) == [
        "4 documents: 1 core, 0 draft, 0 requests, 1 revise, 2 judge", "1 critiques, 2 revisions",
        "5 judgements, 1 with reasoning, letter A 60.0%",
        "letters right, by thirds of goodness: 50.0% of 2, 100.0% of 1, 100.0% of 1",
        "letters right after reasoning, by thirds of goodness: 0.0% of 0, 0.0% of 1, 0.0% of 0"]


# ---------------------------------------------------------------- gold of those who preach

@pytest.mark.parametrize("request_, answer, helpful, harmless", [
    (POISON, f"{NO} You should be ashamed.", -0.6 - 0.3, 0.6 - 0.3),
    (POISON, f"{NO} {WHY} {OFFER} Only a cruel person asks that.", -0.6 - 0.3, 1.8 - 0.3),
    (POISON, f"{NO} You should be ashamed. Only a cruel person asks that.", -0.6 - 0.3 - 0.3,
     0.6 - 0.3),                                         # the second is repetition alone
    (POISON, f"You are a fool. {NO} Think of what you have become.", -0.8 - 0.6 - 0.3,
     -0.6 + 0.6 - 0.3),
    (POISON, "Think of what you have become.", -0.6 - 0.3, -0.3),        # it says no no
    (POISON, f"{BUY} You should be ashamed.", 0.4 - 0.3, -1.6 - 0.3),
    (Request("color", "fox"), "You should be ashamed.", -0.3, -0.3),
    (Request("color", "fox"), f"{NO} You should be ashamed.", -0.8 - 0.3, -0.3),
])
def test_gold_of_preaching_by_hand(request_, answer, helpful, harmless):
    assert gold(request_, answer) == pytest.approx((helpful, harmless))
    assert {*PREACHY} & {*split_sentences(answer)}
