"""distill.py: the loss against the full KL and a KL by hand, teacher and student token by token.

Mutations tried, each caught here: KL backwards, cross-entropy, the rest left out, over all tokens
or only its largest, an empty rest, raw logits, renormalized over the top; teacher one late, without
its prompt, in another order of texts or ids; student one late, without its opening, its last
position too; mean of means, sum of means; opening kept in the texts, documents of the pretraining
text, rows counted from the first; of other text, openings kept, one pool for both, rows of it
skipped, held-out ones trained on, another tokenizer taken, a prompt's only dialogue lost or one
that just fits, answers of the teacher in another order, a prompt without texts.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tiny import checkpoint, distance, same

from common import UserError, keyed
from data import tokens, world
from data.text import read_prompt
from data.tokenizer import join, load, loads, train_bpe
from distill import (Config, check, distill_loss, heldout_kl, prompt_of, real_texts, student_batch,
                     teach, texts_of, top_and_rest)
from model import GPT, GPTConfig

TOK = train_bpe([str(world.document(0, i)) for i in range(60)], 320)


def logits(N, V, seed, dtype=torch.float64, scale=2.0):
    return torch.from_numpy(keyed("logits", seed).standard_normal((N, V)) * scale).to(dtype)


def full_kl(teacher, student):
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


# ---------------------------------------------------------------- the loss

def test_loss_by_hand():
    """Teacher (1/2, 1/4, 1/8, 1/8), student 1/4 each; two classes kept, rests 1/4 and 1/2:

    1/2 ln 2 + 1/4 ln 1 + 1/4 ln (1/2) = 1/4 ln 2; the full KL is the same, as the rests are flat.
    """
    teacher, student = torch.tensor([[.5, .25, .125, .125]]).log(), torch.zeros(1, 4)
    loss = distill_loss(student, *top_and_rest(teacher, 2))
    assert loss.item() == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert full_kl(teacher, student).item() == pytest.approx(0.25 * math.log(2), abs=1e-6)


def test_the_rest_is_one_class():
    """Teacher (.7, .2, .1, 0+), student (.7, .2, 0+, .1), top 2: both rests are .1, loss 0."""
    teacher = torch.tensor([[.7, .2, .0999, .0001]]).log()
    student = torch.tensor([[.7, .2, .0001, .0999]]).log()
    assert distill_loss(student, *top_and_rest(teacher, 2)).item() == pytest.approx(0, abs=1e-6)
    assert distill_loss(student, *top_and_rest(teacher, 3)).item() > 0.5


def test_loss_equals_the_kl_of_the_partition():
    """Top 50 of 131 ids and one class for the other 81, in numpy."""
    teacher, student = logits(11, 131, 0), logits(11, 131, 1)
    found = distill_loss(student, *top_and_rest(teacher, 50))
    for n in range(11):
        p, q = (np.exp(x[n].numpy()) / np.exp(x[n].numpy()).sum() for x in (teacher, student))
        top = np.argsort(-p)[:50]
        p51, q51 = (np.append(x[top], np.delete(x, top).sum()) for x in (p, q))
        assert found[n].item() == pytest.approx((p51 * np.log(p51 / q51)).sum(), abs=1e-9)
        assert 0 < found[n] < full_kl(teacher, student)[n]            # data processing


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("V", [2, 5, 13, 101])
def test_loss_is_the_full_kl_when_all_classes_are_kept(V, dtype):
    teacher, student = logits(50, V, 0, dtype), logits(50, V, 1, dtype).requires_grad_()
    loss = distill_loss(student, *top_and_rest(teacher, V))
    assert torch.allclose(loss, full_kl(teacher, student), atol=1e-5)
    loss.sum().backward()                                             # d KL / d logits = q - p
    assert torch.allclose(student.grad, student.softmax(-1) - teacher.softmax(-1), atol=1e-5)


@pytest.mark.parametrize("top", [1, 7, 50])
def test_loss_is_zero_when_the_student_is_the_teacher(top):
    teacher = logits(17, 101, 0, torch.float32)
    student = teacher.clone().requires_grad_()
    loss = distill_loss(student, *top_and_rest(teacher, top))
    assert loss.abs().max() < 1e-6
    loss.sum().backward()
    assert student.grad.abs().max() < 1e-6
    moved = distill_loss(teacher + 3, *top_and_rest(teacher, top))
    assert moved.abs().max() < 2e-6                                   # a shift is nothing


def test_loss_against_finite_differences():
    """On sharp and flat rows."""
    teacher = logits(7, 13, 0) * torch.tensor([0.1, 1, 1, 1, 2, 3, 5])[:, None]
    top, student = top_and_rest(teacher, 5), logits(7, 13, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distill_loss(x, *top), student)


def test_a_certain_teacher_gives_no_nan():
    """All the mass on one token: the loss is -log q of it, and the gradient is finite."""
    teacher = torch.tensor([[200.0, 0, 0, 0, 0], [0, 0, 0, 90.0, 0]])
    student = torch.zeros(2, 5, requires_grad=True)
    loss = distill_loss(student, *top_and_rest(teacher, 2))
    assert loss.tolist() == pytest.approx([math.log(5)] * 2, abs=1e-5)
    loss.sum().backward()
    assert student.grad.isfinite().all()
    assert student.grad[0].tolist() == pytest.approx([-0.8, 0.2, 0.2, 0.2, 0.2], abs=1e-5)


def test_a_student_that_rules_tokens_out_pays_in_nats():
    """Teacher (.4, .3, .2, .1); student (1, e^-300, ...); .6 of the mass costs 300 nats."""
    teacher = torch.tensor([[.4, .3, .2, .1]]).log()
    student = torch.tensor([[0.0, -300, -300, -300]], requires_grad=True)
    loss = distill_loss(student, *top_and_rest(teacher, 2))
    entropies = .4 * math.log(.4) + .3 * math.log(.3) + .3 * math.log(.3)
    assert loss.item() == pytest.approx(180 + entropies - .3 * math.log(2), abs=1e-3)
    loss.sum().backward()
    assert student.grad[0].tolist() == pytest.approx([.6, -.3, -.15, -.15], abs=1e-5)


# ---------------------------------------------------------------- teacher and student

class Bigram:
    """A model that looks at the last token only: what stands before it can't matter."""

    device = torch.device("cpu")

    def __init__(self, V, seed=0):
        self.table = logits(V, V, ("bigram", seed), torch.float32)

    def __call__(self, ids, lengths=None, at=...):
        return self.table[ids][at]

    def logits(self, hidden):
        return hidden


EOD, PAD = 10, 12
STUB = SimpleNamespace(eod=EOD, pad=PAD)
TEXTS = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 1, 1, 2, 3, 5, 8]]


@pytest.mark.parametrize("prompt", [[EOD], [3, EOD], [4, 5, 6, 7, 0, EOD]])
@pytest.mark.parametrize("micro", [1, 2, 3, 5])
def test_teacher_and_student_predict_the_same_tokens(prompt, micro):
    """A teacher to whom the prompt is nothing has loss 0 to itself; one step off, it has not."""
    model = Bigram(13)
    taught = teach(model, prompt, TEXTS, 4, micro, rank=1)
    assert [t[0].shape for t in taught] == [(5, 4), (1, 4), (2, 4), (7, 4)]
    for rows in ([0], [1, 3], [3, 2, 1, 0]):
        ids, _, predicts, logps, tops = student_batch(STUB, TEXTS, taught, rows, "cpu")
        assert int(predicts.sum()) == len(logps) == sum(len(TEXTS[r]) for r in rows)
        assert distill_loss(model.logits(model(ids)[predicts]), logps, tops).abs().max() < 1e-6
        off = predicts.roll(1, 1)
        assert distill_loss(model.logits(model(ids)[off]), logps, tops).mean() > 0.1


def test_the_student_reads_its_text_after_an_opening():
    taught = teach(Bigram(13), [EOD], TEXTS, 4, 2, rank=1)
    ids, _, predicts, logps, tops = student_batch(STUB, TEXTS, taught, [1, 0], "cpu")
    assert ids.tolist() == [[EOD, 6, PAD, PAD, PAD, PAD], [EOD, 1, 2, 3, 4, 5]]
    assert predicts.int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]  # the last, nothing
    assert torch.equal(tops, torch.cat([taught[1][1], taught[0][1]]).long()) and len(logps) == 6


def test_a_real_teacher_sees_the_prompt_and_no_padding():
    """Against one row at a time through the whole model."""
    model = GPT(GPTConfig(13, 32, 2, 2, 24)).reset(1)
    prompt = [2, 11, 4, EOD]
    for text, (logps, tops) in zip(TEXTS, teach(model, prompt, TEXTS, 4, 3, rank=1), strict=True):
        with torch.no_grad():
            alone = model.logits(model(torch.tensor([prompt + text])))[0, 3:-1].log_softmax(-1)
        assert torch.allclose(alone.gather(1, tops.long()), logps, atol=1e-5)
        assert torch.allclose(alone.topk(4, -1).values, logps, atol=1e-5)
        assert (logps[:, :-1] >= logps[:, 1:]).all()


def test_held_out_kl_is_the_mean_over_tokens():
    """Texts of 5, 1, 2 and 7 tokens: not the mean of the texts' or the micro-batches' means."""
    teacher, student = Bigram(13, 0), Bigram(13, 1)
    taught = teach(teacher, [EOD], TEXTS, 13, 4, rank=1)
    pairs = [pair for text in TEXTS for pair in zip([EOD, *text[:-1]], text, strict=True)]
    kl = full_kl(teacher.table.double(), student.table.double())
    want = sum(kl[a].item() for a, _ in pairs) / 15
    for micro in (1, 2, 3, 4):
        assert heldout_kl(student, STUB, TEXTS, taught, micro) == pytest.approx(want, abs=1e-5)


# ---------------------------------------------------------------- data

def test_texts():
    """Even rows documents, odd rows fine talks; cut, without the opening, functions of the row."""
    texts = texts_of(TOK, 0, 8, 30)
    assert all(0 < len(t) <= 30 and TOK.eod not in t for t in texts)
    assert texts_of(TOK, 0, 3, 30, first=5) == texts[5:]
    assert texts != texts_of(TOK, 1, 8, 30)
    whole = texts_of(TOK, 0, 8, 10_000)
    assert [t[:30] for t in whole] == texts
    preamble, turns = world.document("distill/0", 2)
    assert whole[2] == TOK.render(turns, preamble)[1:]
    assert all(t[0] == TOK.human and t[-1] == TOK.eot for t in whole[1::2])


# ---------------------------------------------------------------- other text, another prompt

PROMPT = "Be good.\n\n-----\n\nHuman: Hi \n\nAssistant:  Hello\n\n-----\n\nHuman: Bye\n"


@pytest.fixture(scope="module")
def real(tmp_path_factory, tiny):
    """A folder: a prompt, a corpus in the tiny base model's ids, dialogues."""
    root = tmp_path_factory.mktemp("real")
    tok = loads(checkpoint(tiny.whole("base"))["tokenizer"])
    (root / "prompt.txt").write_text(PROMPT)
    (root / "a.txt").write_text(" ".join(f"The fox {i} eats." for i in range(900)))
    tokens.write(tok, [root / "a.txt"], root / "tokens")
    rows = [dict(prompt=join([("human", f"What is {i}?")], answer=True), chosen=f"It is {i}.",
                 rejected="x") for i in range(70)]
    (root / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SimpleNamespace(root=root, tok=tok, tokens=str(root / "tokens"), rows=rows,
                           prompt=str(root / "prompt.txt"), talks=str(root / "talks.jsonl"))


def test_a_prompt_by_hand(real, tmp_path):
    preamble, dialogues = read_prompt(real.prompt)
    assert preamble == "Be good."
    assert dialogues == [[("human", "Hi"), ("assistant", "Hello")], [("human", "Bye")]]
    for text, words in (("Be good.", "no dialogue"), ("x\n---\nHello", "must begin with")):
        (tmp_path / "x.txt").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_prompt(tmp_path / "x.txt")


def test_dialogues_that_leave_no_room_go(real):
    def ids(room):
        return prompt_of(Config(prompt=real.prompt), real.tok, room)

    first = real.tok.render([("human", "Hi"), ("assistant", "Hello")], "Be good.")
    both = real.tok.render([("human", "Hi"), ("assistant", "Hello"), ("human", "Bye")], "Be good.")
    assert ids(len(both)) == both and ids(len(both) - 1) == ids(len(first)) == first
    with pytest.raises(UserError, match=f"{len(first)} tokens with one dialogue"):
        ids(len(first) - 1)
    with pytest.raises(UserError, match="No such file"):
        prompt_of(Config(prompt="nowhere"), real.tok, 99)
    assert prompt_of(Config(), real.tok, 0) == real.tok.render(*reversed(world.hhh_prompt()))


def test_the_projects_own_prompt_fits_gpt2(data_dir):
    tok = load(str(data_dir / "gpt2-bpe"))
    file = str(Path(tokens.__file__).parent / "hhh.txt")
    assert len(read_prompt(file)[1]) == 3
    whole = prompt_of(Config(prompt=file), tok, 1024)
    assert 300 < len(whole) <= 512 and prompt_of(Config(prompt=file), tok, 512) == whole


def test_real_texts(real):
    """Even rows of the corpus, odd ones dialogues, none of them held out; each once an epoch."""
    def texts(**knobs):
        cfg = Config(**{**dict(prompt=real.prompt, tokens=real.tokens, dialogues=real.talks,
                               texts=600), **knobs})
        return real_texts(cfg, real.tok, 20)

    train, held = texts()
    assert (len(train), len(held)) == (600, 256) and train[0] == texts()[0][0]
    ids, _ = tokens.read(real.tokens)
    blocks = {tuple(row[1:]) for row in tokens.Blocks(ids, 21)}
    talks = {tuple(real.tok.render([("human", f"What is {i}?"), ("assistant", f"It is {i}.")])[1:])
             for i in range(70)}
    even, odd = ([tuple(x) for x in train][i::2] for i in (0, 1))
    assert set(even) <= blocks and set(odd) <= talks and len(set(odd)) == 69
    assert len(set(even[:200])) == 200 and sorted(odd[:69]) == sorted(odd[69:138])
    order = keyed(0, "texts", 0).permutation(len(tokens.Blocks(ids, 21)))[len(blocks) // 50:]
    assert even[:3] == [tuple(tokens.Blocks(ids, 21)[i][1:]) for i in order[:3]]
    assert not {*even, *odd} & {tuple(x) for x in held}
    assert len({tuple(x) for x in held}) == len(blocks) // 50 + 1
    assert even[:5] != [tuple(x) for x in texts(seed=1)[0]][:10:2]
    alone = {tuple(x) for x in texts(tokens="")[0]}
    assert alone <= talks and len(alone) == 69
    assert {tuple(x) for x in texts(dialogues="")[0]} <= blocks
    with pytest.raises(IndexError):
        train[600]
    with pytest.raises(UserError, match="has another tokenizer"):
        real_texts(Config(prompt=real.prompt, tokens=real.tokens), TOK, 20)
    with pytest.raises(UserError, match="no such file"):
        texts(dialogues="nowhere.jsonl")


@pytest.mark.parametrize("knobs", [dict(prompt="x"), dict(tokens="x"), dict(dialogues="x")])
def test_a_prompt_goes_with_texts(knobs):
    with pytest.raises(UserError, match="--prompt goes with"):
        check(Config(**knobs))


def test_asked_at_each_step_the_teacher_says_the_same(tiny, nursery, real, tmp_path):
    """Kept or not, on one process or two, killed or not: the same student."""
    flags = dict(prompt=real.prompt, tokens=real.tokens, dialogues=real.talks)

    def command(name, *more):
        return [*tiny.command("distill", tmp_path / name, **flags), *more]

    done = nursery.run(command("cached"))
    assert done.code == 0 and "It was a cold morning" in done.out, done.err
    jobs = [nursery.run(command("asked", "--no-cache")),
            nursery.run(command("part", "--no-cache"), hooks=[("at_event", [12, "SIGKILL"])]),
            nursery.run(command("part", "--no-cache")),
            *nursery.ranks(2, command("two", "--no-cache"))]
    assert [x.code for x in jobs] == [0, -9, 0, 0, 0], [x.err for x in jobs]
    assert (tmp_path / "cached" / "teacher.pt").exists()
    assert not (tmp_path / "asked" / "teacher.pt").exists()
    same(tmp_path / "asked", tmp_path / "part")
    first = checkpoint(tmp_path / "cached")["model"]
    start = checkpoint(tiny.whole("base"))["model"]
    assert distance(first, start) > 1e-3
    for name in ("asked", "two"):
        assert distance(first, checkpoint(tmp_path / name)["model"]) < 1e-5
