"""distill.py: the loss against the full KL and a KL by hand, teacher and student token by token.

Mutations tried, each caught here: KL backwards, cross-entropy, the rest left out, over all tokens
or only its largest, an empty rest, raw logits, renormalized over the top; teacher one late, without
its prompt, in another order of texts or ids; student one late, without its opening, its last
position too; mean of means, sum of means; opening kept in the texts, documents of the pretraining
text, rows counted from the first.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import keyed
from data import world
from data.tokenizer import train_bpe
from distill import distill_loss, heldout_kl, student_batch, teach, texts_of, top_and_rest
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
