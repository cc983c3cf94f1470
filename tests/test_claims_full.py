"""claims/full.py and claims/skills.py: verdicts on records made up to hold and to fail; what is
measured of a policy, by hand; which runs are asked for, with stand-ins for training.

Proved alive by: each condition of a rule dropped or read at another size; errors ignored or taken
once; another policy in the base's place, or the change the other way round; a gap to the wrong
group, or one that counts with its sign; pass@10 for pass@1, sums for means a token, silence for
made-up content; a seed without its last size. Runs: another teacher or start, a PM without
summaries or tested on what it learned from, other prompts, the same for all seeds. Measures: signs,
temperatures and means of absolute biases; items, groups, tasks, pairs and choices mixed up; bugs
left out; the last temperature for the best; the world's prompt for that with programs, or none;
test items as examples; hits by bytes.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_claims_rl import of, unsure
from test_ppo import TOK, gpt

from claims import full as claims
from claims import records, skills
from claims.start import few
from data import full, probes, programs, world
from data.tokenizer import join, train_bpe
from model import GPT, GPTConfig
from prompts import read_prompts

SEEDS = range(3)
QUICK = SimpleNamespace(run="out/toy", quick=True, seeds=2, steps=800, device="cpu")
WHOLE = SimpleNamespace(run="out/toy", quick=False, seeds=1, steps=800, device="cpu")
NOTHING = ("", [])
HELPED = ("Kind.", [("human", "Hello."), ("assistant", "Hi.")])


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "FOLDER", [Path("results")])


# ---------------------------------------------------------------- rows of three seeds

KNOBS = dict(tests=0.05, mc1=0.2, rise=0.3, lake=0.3, wider=0.02, correlation=0.9, temperature=0.6,
             programs=0.04, better=0.1, loss=1.0, made_up=-0.2,      # what RLHF adds to the base;
             stated=0.8, silent=0.2)                                 # of RLHF itself
OWN = {"nano": dict(tests=-0.05, programs=-0.04), "micro": dict(tests=0.0, programs=0.0), "toy": {}}
PARAMETERS = dict(nano=100, micro=300, toy=900)
LIKED = dict(hill=0.5, lake=0.1, desert=-0.3)


def felt(k, rlhf):
    """Sentiment by group: a gap of 0.8, of which `wider` is added by RLHF at its lower end."""
    up = dict(hill=k["rise"], lake=k["lake"], desert=k["rise"] - k["wider"])
    return dict(groups={g: x + up[g] * rlhf for g, x in LIKED.items()},
                stated=k["stated"] if rlhf else 0.9)


def lines(sizes=None, **changed):
    """Lines of full.jsonl; sizes: {size: knobs of it alone}."""
    out = []
    for seed in SEEDS:
        for size, own in OWN.items():
            knobs = {**KNOBS, **own, **changed, **(sizes or {}).get(size, {})}
            k = {name: of(v, seed) for name, v in knobs.items()}
            test = {"base": 0, "distilled": -0.1, "rlhf": k["tests"]}
            code = {"base": 0, "prompted": 0.3, "rlhf": k["programs"], "base after bugs": -0.2,
                    "rlhf after bugs": -0.25}
            out.append(dict(
                seed=seed, size=size, parameters=PARAMETERS[size],
                tests={w: dict(exam=0.5 - x, sums=0.3 + 3 * x) for w, x in test.items()},
                misconceptions={w: dict(mc1=0.25 + x, popular=0.5 - x, p=0.1) for w, x in (
                    ("base", 0), ("prompted", 0.4), ("distilled", 0.3), ("rlhf", k["mc1"]))},
                sentiment={w: felt(k, w == "rlhf") for w in ("base", "distilled", "rlhf")},
                gender=dict(bias=dict(base=1.0, distilled=1.25, rlhf=1.75),
                            **{x: k[x] for x in ("correlation", "temperature")}),
                programs={w: {"1": 0.4 + x, "2": 0.5, "10": 0.7 - x} for w, x in code.items()},
                votes={w: dict(per_token=0.6 + a, sum=0.55, loss=1.0 + b) for w, a, b in (
                    ("base", 0, 0), ("distilled", 0.2, 0.5), ("rlhf", k["better"], k["loss"]))},
                summaries={w: dict(made_up=x, silent=y) for w, x, y in (
                    ("base", 0.1, 0.1), ("prompted", 0.5, 0.1), ("distilled", 0.2, 0.1),
                    ("rlhf", 0.5 + k["made_up"], k["silent"]))}))
    return out


def only(size, **knobs):
    return dict(sizes={size: knobs})


BAD = {
    "H24": [only("nano", tests=0.05), only("nano", tests=-0.009), only("toy", tests=-0.05),
            only("toy", tests=0.009), only("nano", tests=0.0)],
    "H25": [only("toy", mc1=0.019), only("toy", mc1=-0.1), only("toy", mc1=0.0)],
    "H26": [only("toy", lake=(0.049,) * 3), only("toy", lake=-0.1), only("toy", rise=-0.1),
            only("toy", rise=(0.049,) * 3), only("toy", wider=0.2), only("toy", wider=-0.2),
            only("toy", stated=0.4), only("toy", correlation=0.65), only("toy", temperature=1.2),
            only("toy", temperature=(0.951,) * 3)],
    "H28": [only("nano", programs=0.04), only("nano", programs=-0.009),
            only("toy", programs=-0.04), only("toy", programs=0.009)],
    "H29": [only("toy", better=-0.1), only("toy", better=0.009), only("toy", loss=-0.5),
            only("toy", loss=0.009)],
    "I10": [only("toy", made_up=0.1), only("toy", made_up=-0.019),
            only("toy", made_up=-0.5, silent=1.0)],                       # silence makes nothing up
}
OPEN = {
    "H24": [only("nano", tests=unsure(-0.05)), only("toy", tests=unsure(0.05))],
    "H25": [only("toy", mc1=unsure(0.2))],
    "H26": [only("toy", lake=unsure(0.3)), only("toy", rise=unsure(0.3)),
            only("toy", rise=1.0, wider=unsure(0.3)),                  # noise makes nothing equal
            only("toy", correlation=tuple(0.7 + x for x in unsure(0.2))),
            only("toy", temperature=tuple(1 + x for x in unsure(-0.4)))],
    "H28": [only("nano", programs=unsure(-0.04)), only("toy", programs=unsure(0.04))],
    "H29": [only("toy", better=unsure(0.1)), only("toy", loss=unsure(1.0))],
    "I10": [only("toy", made_up=unsure(-0.2))],
}
ALLOWED = {
    "H24": [only("micro", tests=-0.3)],
    "H25": [only("nano", mc1=-0.2), only("micro", mc1=-0.2)],
    "H26": [only("toy", wider=0.15), only("toy", stated=0.5),
            only("nano", rise=-1.0, temperature=2.0, correlation=0.0)],
    "H28": [only("micro", programs=0.3)],
    "H29": [only("nano", better=-0.1, loss=-0.5)],
    "I10": [only("nano", made_up=0.3)],
}


def judged(name, rows):
    """The verdict on the lines that eval.py would give it."""
    claim = claims.CLAIMS[name]
    return claim.judge(records.complete(rows, *claim.needs))


@pytest.mark.parametrize("name", claims.CLAIMS)
def test_a_verdict_holds_fails_and_waits(name):
    good = judged(name, lines())
    assert good.word == "held" and good.panels
    for _, _, _, some in good.panels:
        assert some and all(f[2] == 3 for points in some.values() for f in points.values())
    for changed in BAD[name]:
        assert judged(name, lines(**changed)).word == "not held", changed
    for changed in OPEN[name]:
        assert "seeds would tell" in judged(name, lines(**changed)).word, changed
    for changed in ALLOWED[name]:
        assert judged(name, lines(**changed)).word == "held", changed
    assert judged(name, [r for r in lines() if r["seed"] < 2]).word.startswith("inconclusive")
    half = [r for r in lines() if r["seed"] < 2 or r["size"] != "toy"]    # a seed without its last
    assert judged(name, half).word.startswith("inconclusive")
    assert judged(name, lines()[::-1]).told == good.told


def test_claims_and_their_rules():
    assert set(claims.CLAIMS) == set(BAD) == {"H24", "H25", "H26", "H28", "H29", "I10"}
    for name, claim in claims.CLAIMS.items():
        assert claim.judge is getattr(claims, f"verdict_{name.lower()}")
        assert claim.judge.__doc__.startswith("held: ") and claim.source == "full"
        assert claim.needs == ("size", ("nano", "micro", "toy"))


def test_numbers_are_told_as_they_are():
    told = judged("H24", lines()).told
    assert "nano -5.0 ± 0.1 (exam +5.0 ± 0.1 from 50.0%, sums -15.0 ± 0.2 from 30.0%; " in told
    assert "toy +5.0 ± 0.1 (exam -5.0 ± 0.1 from 50.0%, sums +15.0 ± 0.2 from 30.0%; " in told
    assert told.endswith("distilled -10.0 ± 0.0)")
    told = judged("H25", lines()).told
    assert ("toy: base 25.0 ± 0.0, prompted 65.0 ± 0.0, distilled 55.0 ± 0.0, rlhf 45.0 ± 0.2; "
            "what most people say") in told
    assert told.endswith("wins at toy: base 50.0 ± 0.0, prompted 10.0 ± 0.0, distilled 20.0 ± 0.0, "
                         "rlhf 30.0 ± 0.2")
    told = judged("H26", lines()).told
    assert ("sentiment at toy: hill +0.30 ± 0.00, lake +0.30 ± 0.00, desert +0.28 ± 0.00; gap +0.80"
            " ± 0.00 -> +0.82 ± 0.00") in told
    assert "answers that have any, %: 90.0 ± 0.0 -> 90.0 ± 0.0 -> 80.0 ± 0.9; mean" in told
    assert "professions 1.00 ± 0.00 -> 1.25 ± 0.00 -> 1.75 ± 0.00 (base, distilled, RLHF)" in told
    assert told.endswith("the base's 0.90 ± 0.01, as the base at T = 0.60 ± 0.01")
    told = judged("H28", lines()).told
    assert ("nano -4.0 ± 0.0 (pass@1: base 40.0 ± 0.0, prompted 70.0 ± 0.0, rlhf 36.0 ± 0.0, base "
            "after bugs 20.0 ± 0.0, rlhf after bugs 15.0 ± 0.0; pass@10: base 70.0 ± 0.0") in told
    told = judged("H29", lines()).told
    assert told.endswith("toy: base 60.0 ± 0.0 a token, 55.0 ± 0.0 in sum, loss 1.00 ± 0.00, "
                         "distilled 80.0 ± 0.0 a token, 55.0 ± 0.0 in sum, loss 1.50 ± 0.00, rlhf "
                         "70.0 ± 0.1 a token, 55.0 ± 0.0 in sum, loss 2.00 ± 0.01")
    told = judged("I10", lines()).told
    assert told.endswith("toy: base 10.0 ± 0.0 (silent 10.0 ± 0.0), prompted 50.0 ± 0.0 (silent "
                         "10.0 ± 0.0), distilled 20.0 ± 0.0 (silent 10.0 ± 0.0), rlhf 30.0 ± 0.2 "
                         "(silent 20.0 ± 0.2)")


def test_figures_show_what_was_measured():
    """Changes and rates by parameters; sentiment by group; pass@k by k, a panel a size."""
    def panel(name, number=0):
        return judged(name, lines()).panels[number][3]

    assert all(judged(n, lines()).log_x == (n not in ("H26", "H28")) for n in BAD)
    assert list(panel("H24")) == ["RLHF", "distilled"] and list(panel("H24", 1)) == ["exam"]
    assert {p: round(f[0], 4) for p, f in panel("H24")["RLHF"].items()} == {
        100: -0.05, 300: 0.0, 900: 0.05}
    assert panel("H24", 2)["sums"][100][0] == pytest.approx(-0.15)
    assert panel("H25")["prompted"][900][0] == pytest.approx(0.65)
    assert {i: round(f[0], 2) for i, f in panel("H26")["rlhf"].items()} == {
        1: 0.8, 2: 0.4, 3: -0.02}
    (_, _, y, bias), = judged("H26", lines()).panels[1:]
    assert {w: f[0] for w, f in bias[y].items()} == dict(base=1.0, distilled=1.25, rlhf=1.75)
    panels = judged("H28", lines()).panels
    assert [p[0] for p in panels] == ["nano", "micro", "toy"]
    assert {k: round(f[0], 2) for k, f in panels[2][3]["rlhf"].items()} == {1: 0.44, 2: 0.5,
                                                                            10: 0.66}
    assert panel("H29", 1)["rlhf"][900][0] == pytest.approx(2.0)
    assert panel("I10")["rlhf"][900][0] == pytest.approx(0.3)


# ---------------------------------------------------------------- what a speaker finds likely

class Cooler:
    """A model sampled at a lower temperature."""
    device = torch.device("cpu")

    def __init__(self, model, by):
        self.model, self.by = model, by

    def logprobs(self, ids, mask, temperature=1.0, lengths=None):
        return self.model.logprobs(ids, mask, temperature * self.by, lengths)


@pytest.fixture(scope="module")
def model():
    return gpt(1).eval()


def test_log_probs_by_brute_force(model):
    rows = [([1] * 9, [5, 6]), ([2, 3], [7]), ([4], [8, 9, 10, 11]), ([2, 3, 3], [7, 7, 7])]
    for T in (1.0, 0.5):
        sums, lengths = skills.log_probs(model, rows, T)
        assert lengths.tolist() == [2, 1, 4, 3]
        for (context, own), found in zip(rows, sums.tolist(), strict=True):
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([context + own])))[0] / T
            logp = logits.log_softmax(-1)
            want = sum(logp[len(context) + i - 1, t].item() for i, t in enumerate(own))
            assert found == pytest.approx(want, rel=1e-4)


def test_what_stands_before():
    turns = [("human", "Who?")]
    assert skills.asked((TOK, None, NOTHING), turns) == TOK.render(turns, answer=True)
    assert skills.asked((TOK, None, HELPED), turns) == TOK.render(HELPED[1] + turns, HELPED[0],
                                                                  answer=True)


def likely(monkeypatch, value):
    """value(text of the context, text of the continuation) for the model's log-prob; the rows."""
    seen = []

    def log_probs(model, rows, temperature=1.0):
        seen.extend(rows)
        sums = [value(TOK.decode(a), TOK.decode(b)) for a, b in rows]
        return torch.tensor(sums), torch.tensor([len(b) for _, b in rows])

    monkeypatch.setattr(skills, "log_probs", log_probs)
    return seen


def test_misconceptions_by_hand(monkeypatch):
    """The truth wins the first four of 16 questions, the popular falsehood the next eight, another
    answer the rest.
    """
    items = full.misconceptions()
    wins = [x["choices"][x["gold"]] for x in items[:4]]
    wins += [x["choices"][x["popular"]] for x in items[4:12]]
    wins += [next(c for i, c in enumerate(x["choices"]) if i not in (x["gold"], x["popular"]))
             for x in items[12:]]
    seen = likely(monkeypatch, lambda asked, said: 0.0 if said in wins else -9.0)
    found = skills.misconceptions(QUICK, (TOK, None, HELPED), 0)
    sure = 1 / (1 + 3 * np.exp(-9))
    assert len(items) == 16 and found == pytest.approx(dict(
        mc1=0.25, popular=0.5, p=(4 * sure + 12 * np.exp(-9) * sure) / 16), rel=1e-4)
    asked = TOK.render([*HELPED[1], ("human", items[0]["query"])], HELPED[0], answer=True)
    assert [a for a, _ in seen[:4]] == [asked] * 4
    assert [TOK.decode(b) for _, b in seen[:4]] == items[0]["choices"]


def test_biases_by_hand(monkeypatch):
    """A smith is a man by 2 nats in each pair but the first, where he is one by 8: 3 on average."""
    men = {f" {a}" for a, _ in full.PAIRS}

    def value(context, term):
        smith = "smith" in context
        return (8.0 if term == f" {full.PAIRS[0][0]}" else 2.0) * smith if term in men else -1.0

    seen = likely(monkeypatch, value)
    found = skills.biases((TOK, None, NOTHING))
    n = len(full.PAIRS)
    want = [(8 + 2 * (n - 1)) / n + 1 if p == "smith" else 1.0 for p in full.PROFESSIONS]
    assert found.tolist() == pytest.approx(want)
    first = full.gender_prompts()[0]
    assert seen[0][0] == TOK.render(first["turns"], answer=True) + TOK.encode(first["context"])


def test_the_temperature_of_a_bias():
    """Terms of one token: a policy that is the base at T = 0.6 has its bias there, and the same
    biases but for their size.
    """
    tok = train_bpe([" ".join(f" {a} {b}" for a, b in full.PAIRS)] * 40, 400)
    assert all(len(tok.encode(f" {x}")) == 1 for pair in full.PAIRS for x in pair)
    model = GPT(GPTConfig(tok.vocab, 512, 1, 2, 24)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.12, generator=torch.Generator().manual_seed(p.shape[0]))
    speakers = {w: (tok, Cooler(model, T), NOTHING)
                for w, T in (("base", 1.0), ("distilled", 0.8), ("rlhf", 0.6))}
    found, own = skills.gender(speakers), np.abs(skills.biases(speakers["base"])).mean()
    assert found["temperature"] == pytest.approx(0.6, abs=1e-3)
    assert found["correlation"] == pytest.approx(1.0)
    assert found["bias"] == pytest.approx(dict(base=own, distilled=own / 0.8, rlhf=own / 0.6),
                                          rel=1e-4)
    warm = skills.gender(dict(speakers, rlhf=(tok, Cooler(model, 1.6), NOTHING)))
    assert warm["temperature"] == pytest.approx(1.6, abs=1e-3)
    other = skills.gender(dict(speakers, rlhf=(tok, Cooler(model, -1.0), NOTHING)))
    assert other["correlation"] == pytest.approx(-1.0)


def test_biases_of_both_signs_do_not_cancel(monkeypatch):
    table = dict(base=[2.0, -1.0, 0.0], distilled=[1.0, 1.0, 1.0], rlhf=[6.0, -4.0, 2.0])
    monkeypatch.setattr(skills, "biases", lambda who, T=1.0: np.array(table[who]) / T)
    found = skills.gender({who: who for who in table})
    assert found["bias"] == dict(base=1.0, distilled=1.0, rlhf=4.0)
    assert found["temperature"] == pytest.approx(0.26)
    assert found["correlation"] == pytest.approx(np.corrcoef([2, -1, 0], [6, -4, 2])[0, 1])


def test_votes_by_hand(monkeypatch):
    """Where each token has the same log-prob pairs tie a token, and the shorter answer is likelier
    in sum; where better-voted ones have more, they are likelier.
    """
    threads = [sorted(world.forum("claims/3", i), key=lambda x: -x["answer_score"])
               for i in range(few(QUICK, 600))]
    pairs = [(t[0], t[-1]) for t in threads if t[0]["answer_score"] > t[-1]["answer_score"]]
    sizes = [[len(TOK.render_answer(x["answer"])) for x in pair] for pair in pairs]
    seen = likely(monkeypatch, lambda asked, said: -0.5 * len(TOK.render_answer(said)))
    found = skills.votes(QUICK, (TOK, None, NOTHING), 3)
    shorter = np.mean([(a < b) + 0.5 * (a == b) for a, b in sizes])
    assert found == pytest.approx(dict(per_token=0.5, sum=shorter, loss=0.5))
    assert len(seen) == 2 * len(pairs) and 0.1 < shorter < 0.9
    assert seen[0] == (TOK.render(pairs[0][0]["question"], answer=True),
                       TOK.render_answer(pairs[0][0]["answer"]))
    for better, want in ((-1.0, 1.0), (-3.0, 0.0)):
        monkeypatch.setattr(skills, "log_probs", lambda model, rows, x=better: (torch.tensor([
            (-2.0 if i % 2 else x) * len(b) for i, (_, b) in enumerate(rows)]),
            torch.tensor([len(b) for _, b in rows])))
        assert skills.votes(QUICK, (TOK, None, NOTHING), 3)["per_token"] == want


# ---------------------------------------------------------------- what a speaker says

def test_sentiments_by_hand(monkeypatch):
    """Hill folk are kind, desert folk cruel, or in half of the answers to the second request not
    spoken of; nothing is said of the others.
    """
    asked = full.group_prompts()

    def generate(model, prompts, new, uniform, n, stops, pad):
        assert uniform.shape == (len(prompts) * n, new) and n == few(QUICK, 60) == 7
        assert prompts == [TOK.render(r["prompt"], answer=True) for r in asked]
        texts = []
        for i, r in enumerate(asked):
            own = dict(hill="They are kind.", desert="They are cruel.").get(r["group"], "Hello.")
            texts += [own if i % 2 == 0 or j < 3 else "I do not know." for j in range(n)]
        rows = [TOK.encode(t) for t in texts]
        wide = max(map(len, rows))
        return (torch.tensor([r + [TOK.encode("!")[0]] * (wide - len(r)) for r in rows]),
                torch.tensor([len(r) for r in rows]), None)

    monkeypatch.setattr(skills, "generate", generate)
    found = skills.sentiments(QUICK, (TOK, None, NOTHING), 0)
    assert list(found["groups"]) == sorted(full.GROUPS, key=lambda g: -full.GROUPS[g])
    assert found["groups"] == {g: dict(hill=1.0, desert=-1.0).get(g, 0.0) for g in full.GROUPS}
    assert found["stated"] == pytest.approx(2 * 10 / (14 * len(full.GROUPS)))


def test_programs_at_their_best_temperature(monkeypatch):
    """Hot sampling is better for 10 samples, cool for one; the same tasks, with bugs before them
    where asked.
    """
    seen, checked = [], []

    def sampled(model, tok, prompts, passes, samples, new, *key, temperature):
        seen.append((prompts, samples, key, temperature))
        n = len(prompts)
        if not checked:                                       # each by its own tests
            checked.extend(passes(i, "text") for i in range(n))
        return [dict(right={0.4: 20 * (i < n // 2), 0.7: 2, 1.0: 4}[temperature])
                for i in range(n)], {}

    monkeypatch.setattr(skills.tasks, "programs", sampled)
    n = few(QUICK, 60)
    with monkeypatch.context() as m:
        m.setattr(skills.programs, "passes", lambda job, text: (job, text))
        found = skills.coding(QUICK, (TOK, None, HELPED), 5)
    assert checked == [(programs.task("claims/5", i), "text") for i in range(n)]
    misses = 1 - np.prod([(16 - i) / (20 - i) for i in range(10)])
    assert found == pytest.approx({"1": (n // 2) / n, "2": (n // 2) / n, "10": misses,
                                   "5": 1 - np.prod([(16 - i) / (20 - i) for i in range(5)])})
    assert [x[3] for x in seen] == [0.4, 0.7, 1.0] and {x[1] for x in seen} == {20}
    assert len({x[2] for x in seen}) == 1
    turns = [programs.task("claims/5", i)["turns"] for i in range(n)]
    assert seen[0][0] == [TOK.render(HELPED[1] + t, HELPED[0], answer=True) for t in turns]
    seen.clear()
    assert skills.coding(QUICK, (TOK, None, NOTHING), 5, buggy=True)["2"] == (n // 2) / n
    assert seen[0][0][1] == TOK.render(programs.task("claims/5", 1, True)["turns"], answer=True)


def test_summaries_by_hand(monkeypatch):
    """Summaries of what is said, some with a value of their own; evasions; nothing."""
    texts = [probes.summary_text(world.keyed("claims", 4, i)) for i in range(few(QUICK, 400))]
    told = []
    for i, (_, animal, said) in enumerate(texts):
        key, value = next(iter(said.items()))
        other = next(v for v in world.VALUES[key] if v != value)
        line = world.STATE[key].format(s=f"The {animal}", v=(value, other)[i % 8 == 1])
        told.append((line if i % 4 < 2 else ("I do not know.", "")[i % 2], True))

    def respond(model, tok, prompts, new, uniform):
        assert prompts == [TOK.render([*HELPED[1], ("human", t)], HELPED[0], answer=True)
                           for t, _, _ in texts] and uniform.shape == (len(prompts), new)
        return told

    monkeypatch.setattr(skills, "respond", respond)
    found = skills.summaries(QUICK, (TOK, None, HELPED), 4)
    assert len(texts) == 50 and found == pytest.approx(dict(made_up=7 / 26, silent=24 / 50))
    told[:] = [("", True)] * len(texts)
    assert skills.summaries(QUICK, (TOK, None, HELPED), 4) == dict(made_up=0.0, silent=1.0)


def test_what_exams_are_asked(monkeypatch):
    """Test items, with examples of the validation part; accuracy by the sum of log-probs."""
    seen = []

    def choice(model, tok, items, shots=0, pool=(), chat=False, seed=0):
        seen.append((items, shots, pool, chat))
        hits = dict(sum=1.0 if chat else shots / 10, token=0.9, byte=0.9)
        return [dict(hits=hits, p=[1.0], gold=0)] * 2, {}

    monkeypatch.setattr(skills.tasks, "multiple_choice", choice)
    monkeypatch.setattr(skills.tasks, "cloze", lambda model, tok, items, shots, pool, seed: (
        seen.append((items, shots, pool, False)) or [dict(hit=1 - shots / 4, logp=-1.0)], {}))
    found = skills.tests(QUICK, (TOK, None, NOTHING), 2)
    assert found == {"exam, 0 shots": 0.0, "exam, 5 shots": 0.5, "exam, dialogue": 1.0,
                     "sums, 0 shots": 0.0, "sums, 5 shots": 0.5, "story, 0 shots": 1.0,
                     "story, 2 shots": 0.5}
    makers = [full.exam] * 3 + [full.sums] * 2 + [full.story] * 2
    for (items, shots, pool, _), make in zip(seen, makers, strict=True):
        assert items == [make("claims/2", i) for i in range(25)]
        assert not shots or pool == [make("claims/2", i, "validation") for i in range(60)]
    assert [(x[1], x[3]) for x in seen] == [(0, False), (5, False), (0, True), (0, False),
                                            (5, False), (0, False), (2, False)]


def test_who_is_asked_what(monkeypatch):
    """The base behind the HHH prompt where it talks; for programs behind that with programs."""
    for name in ("tests", "misconceptions", "sentiments", "votes", "summaries"):
        monkeypatch.setattr(skills, name, lambda cfg, speaker, seed, n=name: (n, speaker, seed))
    monkeypatch.setattr(skills, "gender", lambda speakers: [*speakers])
    monkeypatch.setattr(skills, "coding",
                        lambda cfg, speaker, seed, buggy=False: (speaker, seed, buggy))
    speakers = {w: (w, w, "before") for w in claims.POLICIES}
    found = skills.of(QUICK, speakers, 6)
    assert found["gender"] == list(claims.POLICIES)
    for name, measure, who in (("tests", "tests", claims.PLAIN), ("votes", "votes", claims.PLAIN),
                               ("sentiment", "sentiments", claims.PLAIN),
                               ("misconceptions", "misconceptions", claims.POLICIES),
                               ("summaries", "summaries", claims.POLICIES)):
        assert found[name] == {w: (measure, speakers[w], 6) for w in who}
    assert found["programs"] == {
        "base": (speakers["base"], 6, False), "rlhf": (speakers["rlhf"], 6, False),
        "prompted": (("base", "base", programs.hhh_prompt()), 6, False),
        "base after bugs": (speakers["base"], 6, True),
        "rlhf after bugs": (speakers["rlhf"], 6, True)}


# ---------------------------------------------------------------- which runs are asked for

@pytest.fixture
def runs(here, monkeypatch):
    """claims/full.py with stand-ins for training: the Configs asked for, by program."""
    asked = dict(pretrain=[], distill=[], collect=[], preference=[], ppo=[], pms=[], of=[])
    for name in ("pretrain", "distill", "preference", "ppo"):
        monkeypatch.setattr(getattr(claims, name), "train", asked[name].append)
    monkeypatch.setattr(claims.collect, "collect", asked["collect"].append)
    monkeypatch.setattr(claims.preference, "read_comparisons", lambda folder: [
        dict(objective="helpful", n=i) for i in range(asked["collect"][-1].count)])

    def train_pm(cfg, name, init, train, test, seed, **knobs):
        asked["pms"].append((name, init, train, test, knobs))
        return Path(name), dict(helpful=0.75)

    monkeypatch.setattr(claims, "train_pm", train_pm)
    monkeypatch.setattr(claims, "load", lambda path: (Path(path).name, gpt(0)))
    monkeypatch.setattr(claims, "blocks", lambda folder, keys, size: [Path(folder).name, size])
    monkeypatch.setattr(claims.skills, "of", lambda cfg, who, seed: asked["of"].append(
        {w: (name, before) for w, (name, _, before) in who.items()}) or dict(votes=seed))
    return asked


def test_a_unit_is_a_seed_and_a_size(runs):
    claims.measure(QUICK)
    claims.measure(QUICK)                                                # nothing is left
    rows = records.records("full")
    assert [(r["seed"], r["size"]) for r in rows] == [
        (s, size) for s in range(2) for size in ("nano", "micro", "toy")]
    assert [r["votes"] for r in rows] == [0] * 3 + [1] * 3 and rows[0]["pm"] == dict(helpful=0.75)
    assert rows[0]["parameters"] == sum(p.numel() for p in gpt(0).parameters())
    assert rows[1]["curve"] == ["full-ppo-micro-0", 1] and len(rows[1]["minutes"]) == 2
    nothing, helped = ("", []), world.hhh_prompt()
    assert runs["of"][1] == dict(base=("pretrain-micro", nothing), prompted=("pretrain-micro",
                                 helped), distilled=("distill-micro", nothing),
                                 rlhf=("full-ppo-micro-0", nothing))
    assert runs["of"][2]["base"] == ("pretrain", nothing)
    assert [(c.policy, c.out, c.seed) for c in runs["ppo"][-2:]] == [
        (f"out/toy/quick/full/distill{x}", f"out/toy/quick/full-ppo-{n}-1", 1)
        for x, n in (("-micro", "micro"), ("", "toy"))]
    assert {(c.pm, c.prompts) for c in runs["ppo"]} == {
        (f"full-pm-{s}", f"out/toy/quick/full-prompts-{s}.jsonl") for s in range(2)}
    assert {c.iterations for c in runs["ppo"]} == {few(QUICK, claims.ITERATIONS)}


def test_bases_and_distilled_policies(runs):
    """Of the full text; the teacher is the toy base."""
    assert claims.distilled(WHOLE, "nano") == "out/toy/full/distill-nano"
    assert [(c.size, c.out, c.world) for c in runs["pretrain"]] == [
        ("nano", "out/toy/full/pretrain-nano", "full"), ("toy", "out/toy/full/pretrain", "full")]
    c = runs["distill"][0]
    assert (c.init, c.teacher, c.out) == ("out/toy/full/pretrain-nano", "out/toy/full/pretrain",
                                          "out/toy/full/distill-nano")


def test_a_pm_knows_summaries_too(runs):
    """Three comparisons of the policy's answers to one of summaries; tests are others."""
    claims.trained_pm(WHOLE, 4)
    lot, own = runs["collect"][0], runs["preference"][0]
    assert (lot.policy, lot.seed, lot.count) == ("out/toy/full/distill", 4, 6400)
    assert (own.init, own.pairs, own.data) == ("out/toy/full/pretrain", 16000, "")
    name, init, train, test, knobs = runs["pms"][0]
    assert (name, init) == ("full-pm-4", own.out) and knobs == dict(lr=claims.LR_AFTER)
    assert [x["n"] for x in train if "n" in x] == list(range(6000))
    assert [x["n"] for x in test if "n" in x] == list(range(6000, 6400))
    short = [[x for x in part if x["objective"] == "summary"] for part in (train, test)]
    assert [len(x) for x in short] == [2000, 133] and len(train) == 8000
    assert short[0] + short[1] == [probes.summary("full/4", i) for i in range(2133)]


def test_rl_prompts_name_no_skill(here):
    """Plain, harmful and summary prompts, other ones for each seed, not those that are measured."""
    Path("out/toy/claims").mkdir(parents=True)
    turns = read_prompts(claims.prompts_of(WHOLE, 1))
    texts = [join(t) for t in turns]
    kinds = [r.objective if (r := world.request_of(t)) else "any" for t in turns]
    assert len(turns) == 4000 and kinds.count("any") == 1000
    assert 0.35 < kinds.count("harmless") / 3000 < 0.45
    assert all(t[-1][1].startswith("Sum up what this says about")
               for t, k in zip(turns, kinds, strict=True) if k == "any")
    words = ["program", " folk", "Question:", " plus ", *full.PROFESSIONS,
             *(x["query"] for x in full.misconceptions())]
    assert not [t for t in texts for w in words if w in t]
    measured = {probes.summary_text(world.keyed("claims", 1, i))[0] for i in range(400)}
    assert not measured & {t[-1][1] for t in turns}
    other = [join(t) for t in read_prompts(claims.prompts_of(WHOLE, 2))]
    assert texts[:3000] != other[:3000] and texts[3000:] != other[3000:]
