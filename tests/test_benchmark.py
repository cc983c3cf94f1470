"""Multiple choice, cloze and programs by fake models, by hand and by a real model row by row.

Proved alive by: pass@k of k - 1; a tie as the first one's; characters for bytes, no tokens;
examples that share the question, or are the item; a log-prob or its mask one token early, rows in
the order of lengths; a choice or a continuation without its room, prompts with too many examples,
`fewer` not counted, room one too small; no blank before a choice or a continuation, "Question: " in
a dialogue; a hit by the first token, perplexity a token, p of means; samples alike for all items or
of another item; examples that are measured, a change turned round, --chat unread, one norm for
another, cells not tried first, any outcome but "failed" as passed.
"""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import benchmark
import tasks
from common import UserError, keyed, save_checkpoint
from data.tokenizer import Tokenizer
from measures import best_of_k, mean_se, pass_at_k
from model import GPT, GPTConfig, pack
from tasks import (chance, choice_prompt, cloze, divided, drawn, judged, multiple_choice,
                   of_choices, of_cloze, programs, share)

TOK = Tokenizer({bytes([b]): b for b in range(256)})
ITEM = dict(query="Question: Which?", choices=["ab", "a", "cc"], gold=1)
POOL = [dict(query=f"Question: No {i}?", choices=["x", f"y{i}"], gold=1) for i in range(7)]


def cost(previous, token):
    """The fake models' -log p of a byte after another: any table would do."""
    return ((7 * previous + 3 * token) % 23 + 1) / 4


class Fake:
    """log p(b after a) = -cost(a, b), and rows of ids that it was asked."""

    def __init__(self, n_ctx=400):
        self.config, self.device, self.rows = SimpleNamespace(n_ctx=n_ctx), "cpu", []

    def logprobs(self, ids, mask, lengths):
        assert not mask[:, 0].any()
        out = torch.zeros(ids.shape)
        for b, row in enumerate(ids.tolist()):
            self.rows.append(row[:lengths[b]])
            assert set(row[lengths[b]:]) <= {TOK.pad} and not mask[b, lengths[b]:].any()
            for t in mask[b].nonzero()[:, 0].tolist():
                out[b, t] = -cost(row[t - 1], row[t])
        return out

    def generate(self, model, prompts, new, uniform=None, pad=0):
        """Bytes after each prompt: the one that is one more than the last."""
        tokens = [[(p[-1] + 1 + t) % 256 for t in range(new)] for p in prompts]
        return torch.tensor(tokens), None, None


def total(ids):
    return -sum(itertools.starmap(cost, itertools.pairwise(ids)))


@pytest.fixture(scope="module")
def model():
    """Random weights, lively log-probs."""
    model = GPT(GPTConfig(TOK.vocab, 64, 2, 2, 20)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return model


# ---------------------------------------------------------------- pass@k

def test_pass_at_k_by_hand():
    assert pass_at_k([2], 5, 1) == (pytest.approx(0.4), 0)
    assert pass_at_k([2], 5, 2) == (pytest.approx(0.7), 0)
    assert pass_at_k([0], 5, 5)[0] == 0 and pass_at_k([5], 5, 1)[0] == 1
    assert pass_at_k([1], 5, 5)[0] == 1 and pass_at_k([1], 1, 1)[0] == 1
    mean, se = pass_at_k([2, 0, 5], [5, 3, 10], 1)      # 0.4, 0, 0.5
    assert mean == pytest.approx(0.3) and se == pytest.approx(np.std([0.4, 0, 0.5], ddof=1) / 3**.5)
    assert pass_at_k([1000], 2000, 1000)[0] == pytest.approx(1)      # no overflow


def test_pass_at_k_over_all_subsets_and_as_best_of_k():
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1):
            if c <= n:
                draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k([c], n, k)[0] == pytest.approx(np.mean([max(x) for x in draws]))
    table = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 1]])
    for row in best_of_k(table):
        assert pass_at_k(table.sum(1), 5, row["k"]) == pytest.approx((row["value"], row["se"]))


@pytest.mark.parametrize("right, n, k", [([1], 5, 6), ([1, 1], [5, 3], 4), ([1], 5, 0), ([6], 5, 1),
                                         ([-1], 5, 1), ([0.5], 5, 1), ([1], 5, 1.5), ([], 5, 1)])
def test_pass_at_k_refuses(right, n, k):
    with pytest.raises(ValueError):
        pass_at_k(right, n, k)


# ---------------------------------------------------------------- multiple choice

def test_share_of_a_hit():
    assert share([1, 3, 2], 1) == 1 and share([1, 3, 2], 2) == 0
    assert share([3, 3, 2], 0) == share([3, 3, 2], 1) == 0.5 and share([3, 3, 2], 2) == 0
    assert share([2, 2, 2], 1) == pytest.approx(1 / 3)
    assert chance([ITEM, dict(choices="ab")]) == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_three_ways_to_be_the_likeliest():
    """Sums -2, -3, -4: by tokens -2, -1, -4/3; by bytes -1, -3/4, -1/2."""
    for gold, norm in enumerate(("sum", "token", "byte")):
        row = judged([-2.0, -3.0, -4.0], [1, 3, 3], ["ab", "éab", "abcdefgh"], gold)
        assert row["hits"] == {k: float(k == norm) for k in ("sum", "token", "byte")}
    assert judged([-2.0, -3.0], [1, 1], ["ab", "éa"], 1)["hits"]["byte"] == 0.5   # 2 and 3 bytes
    row = judged([-2.0, -3.0, -4.0], [1, 3, 3], ["ab", "éab", "abcdefgh"], 2)
    odds = [math.exp(-x) for x in (2, 3, 4)]
    assert row["p"] == pytest.approx([x / sum(odds) for x in odds])
    rows = [judged([-1.0, -2.0], [1, 1], ["a", "b"], g) for g in (0, 1, 0, 0)]
    assert of_choices(rows)["sum"] == pytest.approx((0.75, 0.25))
    p = 1 / (1 + math.exp(-1))
    assert of_choices(rows)["p"][0] == pytest.approx((3 * p + 1 - p) / 4)


@pytest.mark.parametrize("chat", [False, True])
def test_choices_by_the_table(chat):
    """Log-probs are those of the choice alone, after the whole prompt, in the items' order."""
    items = [dict(query=f"Question: {'q' * (9 * i % 7)}?", choices=["ab", "a", "ccc"][:2 + i % 2],
                  gold=i % 2) for i in range(9)]
    rows, counts = multiple_choice(Fake(), TOK, items, chat=chat, micro=4)
    assert counts == dict(items=9, used=9, too_long=0, fewer=0)
    assert [row["item"] for row in rows] == list(range(9)) and {r["shots"] for r in rows} == {0}
    for item, row in zip(items, rows, strict=True):
        end = TOK.assistant if chat else ord(":")
        own = [total([end, *(x if chat else " " + x).encode()]) for x in item["choices"]]
        assert row["logps"] == pytest.approx(own) and row["gold"] == item["gold"]
        assert row["hits"]["sum"] == (max(own) == own[item["gold"]])
        by_byte = [x / len(c) for x, c in zip(own, item["choices"])]
        assert row["hits"]["byte"] == (max(by_byte) == by_byte[item["gold"]])
        by_token = [x / (len(c) + (not chat)) for x, c in zip(own, item["choices"])]
        assert row["hits"]["token"] == (max(by_token) == by_token[item["gold"]])


def test_a_prompt_as_document_and_as_dialogue():
    ids = choice_prompt(TOK, POOL[:2], ITEM)
    assert ids[0] == TOK.eod and TOK.decode(ids) == (
        "Question: No 0?\nAnswer: y0\n\nQuestion: No 1?\nAnswer: y1\n\nQuestion: Which?\nAnswer:")
    assert TOK.decode(choice_prompt(TOK, [], ITEM, mark=" Answer:")) == "Question: Which? Answer:"
    turns = [("human", "No 0?"), ("assistant", "y0"), ("human", "Which?")]
    assert choice_prompt(TOK, POOL[:1], ITEM, chat=True) == TOK.render(turns, answer=True)


def test_examples_are_drawn_by_the_key_and_never_the_item():
    seen = set()
    for item in POOL:
        for seed in range(9):
            some = drawn(item, POOL, 6, seed)
            assert item not in some and len({x["query"] for x in some}) == 6
            assert some == drawn(item, POOL, 6, seed) and some[:3] == drawn(item, POOL, 3, seed)
            seen.add(tuple(x["query"] for x in some))
    assert len(seen) == 63                                           # each has an order of its own
    again = dict(POOL[2], choices=["other", "choices"])              # the same question
    assert all(POOL[2] not in drawn(again, POOL, 6, seed) for seed in range(9))
    with pytest.raises(ValueError, match="7 examples a prompt are asked for, 6 are there"):
        drawn(POOL[0], POOL, 7, 0)
    assert drawn(POOL[0], (), 0) == []


def test_a_file_is_divided():
    for n, most, few in ((50, 100, 5), (2000, 100, 100), (9, 100, 0)):
        examples, test = divided([dict(query=str(i)) for i in range(n)], most)
        assert len(examples) == few and sorted(int(x["query"]) for x in examples + test) == list(
            range(n))
        assert (examples, test) == divided([dict(query=str(i)) for i in range(n)], most)
        assert [int(x["query"]) for x in test] == sorted(int(x["query"]) for x in test)
    assert divided(POOL * 10, seed=1)[0] != divided(POOL * 10)[0]


def test_examples_are_in_the_prompt():
    fake = Fake()
    rows, counts = multiple_choice(fake, TOK, POOL, shots=2, examples=POOL, seed=5)
    assert counts == dict(items=7, used=7, too_long=0, fewer=0)
    assert {r["shots"] for r in rows} == {2}
    asked = {TOK.decode(row) for row in fake.rows}
    for item in POOL:
        start = TOK.decode(choice_prompt(TOK, drawn(item, POOL, 2, 5), item))
        assert {f"{start} {c}" for c in item["choices"]} <= asked
    assert len(asked) == 14


def test_what_is_too_long_is_counted_and_never_cut():
    """An item of 24 + 3 ids; each example before it has 28."""
    assert len(choice_prompt(TOK, [], POOL[0])) == 24
    room = {26: (0, 7, 0, None), 27: (7, 0, 7, 0), 54: (7, 0, 7, 0), 55: (7, 0, 7, 1),
            82: (7, 0, 7, 1), 83: (7, 0, 0, 2)}
    for n_ctx, (used, too_long, fewer, shots) in room.items():
        fake = Fake(n_ctx)
        rows, counts = multiple_choice(fake, TOK, POOL, shots=2, examples=POOL)
        assert counts == dict(items=7, used=used, too_long=too_long, fewer=fewer)
        assert counts["used"] + counts["too_long"] == counts["items"]
        assert {r["shots"] for r in rows} == ({shots} if used else set())
        assert all(len(row) <= n_ctx and row[0] == TOK.eod for row in fake.rows)
        assert len(fake.rows) == 2 * used


def test_a_real_model_row_by_row(model):
    """Batches, order and pads change nothing: each choice alone in the model says the same."""
    items = [dict(query="Q" * i, choices=["a" * (1 + i % 3), "bcd", "é"], gold=0) for i in range(8)]
    rows, _ = multiple_choice(model, TOK, items, micro=5)
    for item, row in zip(items, rows, strict=True):
        for choice, logp in zip(item["choices"], row["logps"], strict=True):
            start, end = choice_prompt(TOK, [], item), TOK.encode(" " + choice)
            ids = torch.tensor([start + end])
            logps = model.logits(model(ids))[0].log_softmax(-1)
            own = sum(logps[len(start) + t - 1, x].item() for t, x in enumerate(end))
            assert logp == pytest.approx(own, abs=1e-4)


# ---------------------------------------------------------------- cloze

def test_cloze_by_the_table(monkeypatch):
    """The greedy fake counts on: "ab cd" is wrong after it, "x !" is right after a blank."""
    fake = Fake()
    monkeypatch.setattr(tasks, "generate", fake.generate)
    items = [dict(context="It is \x1f", continuation="!"), dict(context="It is", continuation="!"),
             dict(context="to the\x1f", continuation="!\"#"), dict(context="a\x1f",
                                                                    continuation="!#")]
    rows, counts = cloze(fake, TOK, items, micro=2)
    assert [(r["item"], r["hit"], r["tokens"], r["shots"]) for r in rows] == [
        (0, 1, 2, 0), (1, 0, 2, 0), (2, 1, 4, 0), (3, 0, 3, 0)]
    for item, row in zip(items, rows, strict=True):
        text = item["context"][-1] + " " + item["continuation"]
        assert row["logp"] == pytest.approx(total(text.encode()))
    found, logps = of_cloze(rows), [r["logp"] for r in rows]
    assert found["accuracy"] == pytest.approx((0.5, math.sqrt(1 / 12)))
    assert found["perplexity"] == pytest.approx(math.exp(-np.mean(logps)))
    assert counts == dict(items=4, used=4, too_long=0, fewer=0)


def test_cloze_with_examples(monkeypatch):
    fake = Fake(40)
    monkeypatch.setattr(tasks, "generate", fake.generate)
    pool = [dict(context=f"{i} a", continuation="bc") for i in range(4)]
    rows, counts = cloze(fake, TOK, [*pool, dict(context="x" * 36, continuation="abc"),
                                     dict(context="x" * 36, continuation="ab")], 3, pool, seed=2)
    assert counts == dict(items=6, used=5, too_long=1, fewer=1)
    assert [(r["item"], r["shots"]) for r in rows] == [(0, 3), (1, 3), (2, 3), (3, 3), (5, 0)]
    texts = {TOK.decode(row) for row in fake.rows}
    for item in pool:
        some = [f"{x['context']} bc\n\n" for x in drawn(item, pool, 3, 2)]
        assert "".join(some) + item["context"] + " bc" in texts


def test_greedy_of_a_real_model_is_its_own_likeliest_text(model):
    """Of what the model says itself each hit is one; a changed letter is none."""
    items = []
    for i in range(6):
        context, ending = "xyz"[:1 + i % 3] * 3, ""
        for _ in range(1 + i % 2):
            ids = torch.tensor([TOK.render([], f"{context} {ending}")])
            ending += chr(model.logits(model(ids))[0, -1, 33:127].argmax().item() + 33)
        items.append(dict(context=context, continuation=ending))
    rows, _ = cloze(model, TOK, items, micro=4)
    for item, row in zip(items, rows, strict=True):
        own, context = [], TOK.render([], item["context"])
        for _ in TOK.encode(" " + item["continuation"]):
            own.append(model.logits(model(torch.tensor([context + own])))[0, -1].argmax().item())
        assert row["hit"] == (own == TOK.encode(" " + item["continuation"]))


# ---------------------------------------------------------------- programs

def test_programs_count_what_passes(model):
    """What passes depends on the item and its text; samples differ, and come again by the key."""
    prompts = [TOK.render([], "p" * (1 + i)) for i in range(5)] + [[1] * 60]
    seen = []

    def passes(item, text):
        seen.append((item, text))
        return item == 1 or (item == 3 and len(seen) % 2)

    rows, counts = programs(model, TOK, prompts, passes, 4, 9, 0, "test", rows=8)
    assert counts == dict(items=6, used=5, too_long=1)
    assert [(r["item"], r["samples"]) for r in rows] == [(i, 4) for i in range(5)]
    assert [r["right"] for r in rows] == [0, 4, 0, 2, 0]
    assert seen == [(r["item"], text) for r in rows for text in r["texts"]]
    assert all(len({*r["texts"]}) > 1 for r in rows)
    twice, _ = programs(model, TOK, prompts[:1] * 2, passes, 4, 9, 0, "test")
    assert twice[0]["texts"] == rows[0]["texts"] and not {*twice[0]["texts"]} & {*twice[1]["texts"]}
    again, _ = programs(model, TOK, prompts, passes, 4, 9, 0, "test", rows=4)
    assert [r["texts"] for r in again] == [r["texts"] for r in rows]
    other, _ = programs(model, TOK, prompts, passes, 4, 9, 1, "test")
    assert [r["texts"] for r in other] != [r["texts"] for r in rows]
    cold, _ = programs(model, TOK, prompts, passes, 4, 9, 0, top_k=1)
    assert all(len({*r["texts"]}) == 1 for r in cold)


def test_the_context_holds_prompt_and_answer(model):
    for new, used in ((4, 1), (5, 0)):
        rows, counts = programs(model, TOK, [[1] * 60], lambda i, text: True, 2, new, 0)
        assert len(rows) == counts["used"] == used


# ---------------------------------------------------------------- the program

HUMAN = dict(task_id="t", prompt="def f(x):\n    ''' Twice. '''\n", entry_point="f",
             canonical_solution="    return 2 * x\n", test="def check(f):\n    assert f(2) == 4\n")


@pytest.fixture
def files(tmp_path, model):
    """Two checkpoints and a small file of each kind."""
    other = GPT(GPTConfig(TOK.vocab, 64, 2, 2, 20))
    for name, one in (("a", model), ("b", other)):
        save_checkpoint(tmp_path / f"{name}.pt", **pack(one, TOK))
    rows = dict(arc=[dict(query=f"Q{i}?", choices=["a", "bb", "c"], gold=i % 3) for i in range(40)],
                lambada=[dict(context=f"It is {i}", continuation="x") for i in range(40)],
                humaneval=[HUMAN])
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "truthfulqa.csv").write_text("Question,Best Answer,Incorrect Answers\n" + "".join(
        f"Who {i}?,me,you;he\n" for i in range(40)))
    return tmp_path


def report(files, *kinds, **knobs):
    named = {k: str(next(files.glob(f"{k}.*"))) for k in kinds}
    knobs = {**dict(ckpt=f"{files}/a.pt,{files}/b.pt", out=str(files / "out"), device="cpu"),
             **named, **knobs}
    benchmark.main(benchmark.Config(**knobs))
    return json.loads((files / "out" / "benchmark.json").read_text())


def test_the_report(files, model, capsys):
    """Its numbers are those of tasks.py on the drawn items; the table has them; counts add up."""
    out = report(files, "arc", "lambada", "truthfulqa", shots="0,1", count=20)
    assert [(r["ckpt"][-4:], r["task"], r["shots"]) for r in out["results"]] == [
        (c, t, n) for c in ("a.pt", "b.pt") for t in ("arc", "lambada", "truthfulqa")
        for n in (0, 1)]
    arc = [json.loads(x) for x in (files / "arc.jsonl").read_text().splitlines()]
    examples, test = divided(arc)
    counts = out["files"][str(files / "arc.jsonl")]
    assert (counts["examples"], counts["measured"], counts["not_drawn"]) == (4, 20, 16)
    kept = sorted(keyed(0, "count").permutation(36)[:20].tolist())
    rows, _ = multiple_choice(model, TOK, [test[i] for i in kept], 1, examples)
    row = out["results"][1]
    assert row["values"]["accuracy"] == pytest.approx(of_choices(rows)["sum"])
    assert row["values"]["accuracy_byte"] == pytest.approx(of_choices(rows)["byte"])
    assert row["values"]["chance"][0] == pytest.approx(1 / 3) and row["change"] == {}
    other = GPT(GPTConfig(TOK.vocab, 64, 2, 2, 20)).eval()
    theirs, _ = multiple_choice(other, TOK, [test[i] for i in kept], 1, examples)
    for name, norm in (("accuracy", "sum"), ("accuracy_byte", "byte")):
        gaps = [y["hits"][norm] - x["hits"][norm] for x, y in zip(rows, theirs, strict=True)]
        assert out["results"][7]["change"][name] == pytest.approx(mean_se(gaps))
    table = (files / "out" / "benchmark.md").read_text()
    value, se = row["values"]["accuracy"]
    assert f"{value:.1%} ± {se:.1%}" in table and "33.3%" in table and "perplexity" in table
    assert table in capsys.readouterr().out


def test_change_is_paired(files):
    """To the first checkpoint, item by item; none fits in its own line, without a number."""
    a, b = {1: 1.0, 2: 0.0, 3: 1.0}, {2: 1.0, 3: 1.0, 4: 0.0}
    assert benchmark.change(dict(x=b), dict(x=a)) == {"x": (pytest.approx(0.5), pytest.approx(0.5))}
    assert benchmark.change(dict(x={9: 1}), dict(x=a)) == {}
    (files / "arc.jsonl").write_text(json.dumps(dict(ITEM, query="q" * 99)) + "\n")
    out = report(files, "arc")
    assert [r["values"] for r in out["results"]] == [{}, {}]
    assert "none fits" in (files / "out" / "benchmark.md").read_text()


def test_chat_asks_dialogues(files):
    plain, chat = (report(files, "arc", chat=c)["results"][0]["values"]["p"] for c in (False, True))
    assert plain != chat


def test_programs_are_run_in_cells(files, monkeypatch):
    """What goes to the cell is the item and the sample; pass@k of what comes back."""
    ran = []
    monkeypatch.setattr(benchmark.sandbox, "run", lambda code: ran.append(code) or "passed")
    monkeypatch.setattr(benchmark.sandbox, "solve", lambda item, text, seconds: ran.append(
        (item, text, seconds)) or ("passed" if len(ran) % 2 else "timeout"))
    out = report(files, "humaneval", ckpt=f"{files}/a.pt", samples=4, k="1,2", new=9, seconds=2.0)
    assert ran[0] == "" and len(ran) == 5 and {x[2] for x in ran[1:]} == {2.0}
    assert all(x[0] == HUMAN for x in ran[1:]) and len({x[1] for x in ran[1:]}) > 1
    row, = out["results"]
    assert row["values"]["pass@1"] == [0.5, 0]
    assert row["values"]["pass@2"][0] == pytest.approx(5 / 6)
    assert row["counts"]["outcomes"] == {"passed": 2, "timeout": 2}


@pytest.mark.parametrize("kinds, knobs, told", [
    ((), {}, "name a file: --arc"), (("arc",), dict(shots="0,x"), "--shots 0,x: whole numbers"),
    (("arc",), dict(shots="-1"), "--shots -1"), (("arc",), dict(ckpt=","), "--ckpt: name one"),
    (("arc",), dict(shots="5"), "5 examples a prompt are asked for, 4 are there"),
    (("humaneval",), dict(k="0"), "--k 0"),
    (("humaneval",), dict(k="20"), "--samples 10: at least"),
    (("humaneval",), dict(seconds=float("inf")), "--seconds from above 0"),
    (("humaneval",), dict(seconds=0.0), "--seconds from above 0"),
    (("humaneval",), dict(temperature=float("nan")), "--temperature goes from"),
    (("humaneval",), dict(top_p=0.0), "--top-p from"), (("arc",), dict(micro=0), "--micro 0"),
    (("humaneval",), dict(new=0), "--new 0: at least 1"), (("arc",), dict(count=-1), "--count -1"),
    (("arc",), dict(arc="nowhere.jsonl"), "nowhere.jsonl"),
    (("arc",), dict(ckpt="nowhere.pt"), "nowhere.pt: no checkpoint")])
def test_what_does_not_fit_is_refused(files, kinds, knobs, told):
    with pytest.raises((UserError, OSError), match=told) as error:
        report(files, *kinds, **knobs)
    assert "\n" not in str(error.value) and not [*files.glob("out/*")]


def test_a_model_that_is_broken_is_told(files, model):
    """As weights, and as log-probs of weights that are finite."""
    broken = GPT(GPTConfig(TOK.vocab, 64, 2, 2, 20))
    torch.nn.init.constant_(broken.ln_f.bias, float("nan"))
    save_checkpoint(files / "nan.pt", **pack(broken, TOK))
    with pytest.raises(UserError, match="nan.pt: a weight is not finite"):
        report(files, "arc", ckpt=f"{files}/nan.pt")
    fake = Fake()
    fake.logprobs = lambda ids, mask, lengths: torch.full(ids.shape, float("nan"))
    with pytest.raises(ValueError, match="a log-prob is not finite"):
        multiple_choice(fake, TOK, [ITEM])


def test_no_hours_are_lost_on_a_folder(files, monkeypatch):
    monkeypatch.setattr(benchmark, "measure", lambda *a: pytest.fail("too late"))
    with pytest.raises(FileExistsError):
        report(files, "arc", out=str(files / "arc.jsonl"))


def test_a_machine_without_cells_is_refused_first(files, monkeypatch):
    monkeypatch.setattr(benchmark.sandbox.sys, "platform", "darwin")
    monkeypatch.setattr(benchmark, "load_source", lambda *a, **k: pytest.fail("too late"))
    with pytest.raises(UserError, match="only in Linux namespaces.*darwin"):
        report(files, "humaneval")
