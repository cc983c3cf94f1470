"""model.py against transformers, a ten-line definition, finite differences and numbers by hand.

Mutations tried, each caught here: exact gelu, layer-norm epsilon 1e-3, no final layer norm, q and
v swapped, heads merged without the transpose, positions from 1 or ignored, mask ignored, the head
over the rounding rows, no rounding, shift by two or none, temperature multiplied, log-softmax in
bf16, no mask[:, 0] error, |score|, responses that see each other, see ahead or start at position
0, pads that are seen or see, ends one late, response mask by one, residual projections not
scaled, norms at 0, head not at 0, reset without its seed, `unpack` that keeps, drops or invents a
head, packed rows that start one late, either gradient of Spread and Gather misplaced, the first
block cut in place of the last, asked positions one late, gelu's slope.
"""

import math
import shutil

import pytest
import torch

from data.tokenizer import Tokenizer
from model import (
    GPT,
    SIZES,
    Gelu,
    GPTConfig,
    Rows,
    attention,
    attention_reference,
    by_length,
    gelu,
    generate,
    layout_of,
    pack,
    pad_rows,
    response_mask,
    shared_prompt_rows,
    sized,
    unpack,
)
from pretrain import lm_loss

CONFIG = GPTConfig(vocab=71, n_ctx=37, n_layer=3, n_head=3, n_embd=21, scalar=True)
TOK = Tokenizer({bytes([b]): b for b in range(256)})


def noisy(config=CONFIG, seed=0, scale=0.3):
    """A model with no weight at 0 or 1, so that a bias or a norm that is left out shows."""
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn(p.shape, generator=generator)
    return model


def identity(rows, hidden=None):
    """A model of vocabulary `rows` whose logits are its hidden states, given ones if told so."""
    model = GPT(GPTConfig(vocab=rows, n_ctx=8, n_layer=1, n_head=1, n_embd=rows))
    with torch.no_grad():
        model.wte.weight[:rows] = torch.eye(rows)
    if hidden is not None:
        model.forward = lambda ids, lengths=None, at=...: hidden[at]
    return model


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=0, dtype=None):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def float64(monkeypatch):
    """Everything in double precision, `.float()` included."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield
    torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------- transformers' GPT-2

def theirs(model, transformers):
    """GPT2LMHeadModel with the same weights, by name; its Conv1D keeps [in, out]."""
    c = model.config
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab, n_positions=c.n_ctx, n_embd=c.n_embd, n_layer=c.n_layer,
        n_head=c.n_head, bos_token_id=0, eos_token_id=0)).eval()
    ours = {name: p for name, p in model.named_parameters() if not name.startswith("score_head")}
    with torch.no_grad():
        for name, p in other.transformer.named_parameters():
            q = ours.pop(name)
            q = q[:c.vocab] if name == "wte.weight" else q
            p.copy_(q.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else q)
    assert not ours, f"weights that GPT-2 does not have: {list(ours)}"
    return other


def test_logits_equal_transformers(transformers):
    model, ids = noisy(), randint(71, 2, 23)
    with torch.no_grad():
        logits, wanted = model.logits(model(ids)), theirs(model, transformers)(ids).logits
    assert wanted.std() > 1   # a flat distribution would hide errors
    assert logits.shape == wanted.shape == (2, 23, 71)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


# ---------------------------------------------------------------- attention

def test_reference_by_hand():
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    v = torch.tensor([1.0, 2, 6]).view(1, 1, 3, 1)
    assert attention_reference(q, k, v).flatten().tolist() == [1, 1.5, 3]
    until = torch.tensor([[3, 2, 3]])     # the second token is seen by itself alone
    assert attention_reference(q, k, v, until).flatten().tolist() == [1, 1.5, 3.5]
    assert attention_reference(q, k, v, torch.tensor([[1, 2, 3]])).flatten().tolist() == [1, 2, 6]
    # q . k / sqrt(4) = ln 3: weights 3/4 and 1/4
    q[..., 1, 0], k[..., 0, 0] = 2, math.log(3)
    out = attention_reference(q, k, v).flatten()
    torch.testing.assert_close(out, torch.tensor([1, 1.25, 3]))


@pytest.mark.parametrize("T", [1, 2, 7, 17])
def test_attention_equals_reference(T):
    q, k, v = randn(3, 2, 3, T, 5)
    torch.testing.assert_close(attention(q, k, v, Rows((2, T))), attention_reference(q, k, v))
    until = torch.arange(1, T + 1) + randint(T, 2, T) % torch.arange(T, 0, -1)   # j < until <= T
    torch.testing.assert_close(attention(q, k, v, Rows((2, T), layout_of(until))),
                               attention_reference(q, k, v, until))


def test_the_past_alone_matters():
    model, ids = noisy(), randint(71, 1, 11)
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 71
    before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:7], after[:7])
    assert all((before[t] - after[t]).abs().max() > 1e-3 for t in range(7, 11))


# ---------------------------------------------------------------- several responses in a row

def test_shared_rows_by_hand():
    ids, lengths, positions, until, ends = shared_prompt_rows(
        [[5, 6], [5]], [[[7], [8, 9]], [[7], [8]]], 0)
    mask = layout_of(until)
    assert lengths.tolist() == [5, 3] and until.tolist() == [[5, 5, 3, 5, 5], [3, 2, 3, 4, 5]]
    assert ids.tolist() == [[5, 6, 7, 8, 9], [5, 7, 8, 0, 0]]
    assert positions[0].tolist() == [0, 1, 2, 2, 3]
    assert positions[1, :3].tolist() == [0, 1, 1]
    assert ends.tolist() == [[2, 4], [1, 2]]
    assert mask.shape == (2, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0],
                                         [1, 1, 0, 0, 0],
                                         [1, 1, 1, 0, 0],
                                         [1, 1, 0, 1, 0],
                                         [1, 1, 0, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0, 0],
                                         [1, 1, 0, 0, 0],
                                         [1, 0, 1, 0, 0],
                                         [0, 0, 0, 1, 0],   # a pad sees itself alone
                                         [0, 0, 0, 0, 1]]


def ranking(seed=0):
    """3 prompts of 2, 11 and 5 tokens with 3 responses of 1 to 7 each."""
    sizes = [(2, (3, 1, 7)), (11, (2, 5, 3)), (5, (1, 1, 2))]
    draw = iter(randint(71, 99, seed=seed).tolist())
    return ([[next(draw) for _ in range(p)] for p, _ in sizes],
            [[[next(draw) for _ in range(r)] for r in rs] for _, rs in sizes])


def scores_apart(model, prompts, responses):
    """Each response in a row of its own, alone."""
    return torch.stack([torch.stack([model.score(model(torch.tensor([p + r]))[0, -1]) for r in rs])
                        for p, rs in zip(prompts, responses, strict=True)])


def scores_shared(model, prompts, responses, pad=0):
    *rows, ends = shared_prompt_rows(prompts, responses, pad)
    return model.score(model(*rows, at=(torch.arange(len(ends))[:, None], ends)))


def test_shared_rows_equal_separate_rows():
    model, (prompts, responses) = noisy(), ranking()
    with torch.no_grad():
        apart, shared = (f(model, prompts, responses) for f in (scores_apart, scores_shared))
        assert apart.std() > 0.1
        torch.testing.assert_close(shared, apart, atol=1e-5, rtol=0)
        # and not only the last token: every hidden state of every response
        *rows, ends = shared_prompt_rows(prompts, responses, 0)
        hidden = model(*rows)
        for b, (p, rs) in enumerate(zip(prompts, responses, strict=True)):
            for end, r in zip(ends[b].tolist(), rs, strict=True):
                alone = model(torch.tensor([p + r]))[0, len(p):]
                torch.testing.assert_close(hidden[b, end - len(r) + 1:end + 1], alone,
                                           atol=1e-5, rtol=0)


def test_shared_rows_have_the_gradients_of_separate_rows(float64):
    model, (prompts, responses) = noisy(), ranking()
    weights, grads = randn(3, 3), []
    for scores in (scores_apart, scores_shared):
        model.zero_grad()
        (scores(model, prompts, responses) * weights).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(g.abs().max() > 1e-3 for g in grads[0])
    for apart, shared in zip(*grads, strict=True):
        torch.testing.assert_close(shared, apart, atol=1e-10, rtol=1e-9)


def test_score_by_hand():
    """Head [2, 0, ...] and bias -1: twice the first hidden number less one, in float32."""
    model = GPT(CONFIG)
    with torch.no_grad():
        model.score_head.weight[0, 0], model.score_head.bias[0] = 2, -1
    hidden = torch.zeros(2, 1, 21)
    hidden[:, 0, 0] = torch.tensor([0.25, 3.0])
    assert model.score(hidden).tolist() == [[-0.5], [5.0]]
    assert model.bfloat16().score(hidden.bfloat16()).dtype == torch.float32


def test_a_score_does_not_depend_on_the_batch():
    model = noisy()
    p, r, long = [3, 0, 4], [5, 0], [9] * 12          # the id of padding inside the text, too
    with torch.no_grad():
        alone = scores_shared(model, [p], [[r]])
        for batch in ([[p], [[r]]], [[p, p], [[r], long[:5]]], [[long, p], [long[:7], [r]]]):
            batch[1] = [x if isinstance(x[0], list) else [x] for x in batch[1]]
            row = batch[0].index(p)
            torch.testing.assert_close(scores_shared(model, *batch)[row], alone[0],
                                       atol=1e-5, rtol=0)


# ---------------------------------------------------------------- padding

@pytest.mark.parametrize("poison", [0, 13, 70])
def test_pads_change_no_bit(poison):
    model = noisy()
    rows = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    prompts, responses = ranking()
    with torch.no_grad():
        (clean, lengths), (ids, _) = pad_rows(rows, 42), pad_rows(rows, poison)
        real = torch.arange(7) < lengths[:, None]
        assert lengths.tolist() == [3, 7, 1] and not torch.equal(clean, ids)
        assert torch.equal(model(clean)[real], model(ids)[real])
        mask = real.clone()
        mask[:, 0] = False
        assert torch.equal(model.logprobs(clean, mask),
                           model.logprobs(ids, mask))
        shared = [scores_shared(model, prompts, responses, pad) for pad in (42, poison)]
        assert torch.equal(*shared)


ASKED = torch.tensor([[0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]]).bool()


@pytest.mark.parametrize("at", [ASKED, (torch.tensor([1, 0]), torch.tensor([6, 2])),
                                (torch.arange(2)[:, None], torch.tensor([[0, 0, 3], [5, 6, 1]]))])
def test_what_is_asked_for_equals_its_part_of_the_whole(float64, at):
    """Hidden states and every gradient; a position asked twice counts twice."""
    model, ids, found = noisy(), randint(71, 2, 7), []
    for hidden in (model(ids)[at], model(ids, at=at)):
        model.zero_grad()
        (hidden * randn(*hidden.shape)).sum().backward()
        found.append([hidden.detach(), *(p.grad.clone() for n, p in model.named_parameters()
                                         if not n.startswith("score"))])
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, atol=1e-12, rtol=1e-9)
    assert found[0][0].abs().max() > 0.1


def test_the_last_block_ends_only_where_asked(monkeypatch):
    """Its projection and MLP see the asked positions, the other blocks all of them."""
    model, seen = noisy(), []
    for block in model.h:
        block.mlp.register_forward_hook(lambda _, x, y: seen.append(x[0].shape[:-1].numel()))
    model.logprobs(randint(71, 2, 7), ASKED)
    assert seen == [14, 14, 6]


def test_checkpointing_changes_no_bit():
    """Every block is computed twice, in training alone; gradients are the same to the last bit."""
    ids, grads, calls = randint(71, 3, 7), [], []
    mask = torch.arange(7).expand(3, 7) > 2
    for checkpoint in (False, True):
        model = noisy().train()
        model.use(checkpoint)
        for block in model.h:
            block.ln_1.register_forward_hook(lambda *_: calls.append(checkpoint))  # noqa: B023
        model.logprobs(ids, mask).sum().backward()
        grads.append([p.grad for n, p in model.named_parameters() if not n.startswith("score")])
        model.eval().logprobs(ids, mask)
    assert (calls.count(False), calls.count(True)) == (6, 9)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
def test_compiled_blocks_compute_the_same():
    """Log-probs, gradients and samples; skipped where no C++ compiler is."""
    if not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    plain, other, ids = noisy(), noisy(), randint(71, 3, 7)
    other.use(compile=True)
    mask = torch.arange(7).expand(3, 7) > 2
    found = []
    for model in (plain, other):
        logps = model.logprobs(ids, mask)
        logps.sum().backward()
        found.append([logps.detach(), *(p.grad for n, p in model.named_parameters()
                                        if not n.startswith("score"))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    drawn = [generate(m, [[1, 2, 3], [4]], 5, torch.full((2, 5), 0.5))[0] for m in (plain, other)]
    assert torch.equal(*drawn) and list(other.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("what", ["float32", "float64"])
def test_gelu_is_torch_s(what):
    """Value to rounding, slope to rounding; both ends of the scale."""
    x = torch.cat([torch.linspace(-9, 9, 1001), torch.tensor([-300.0, 300, 0])]).to(
        getattr(torch, what)).requires_grad_()
    want = torch.nn.functional.gelu(x, approximate="tanh")
    slope, = torch.autograd.grad(want.sum(), x)
    got, = torch.autograd.grad(gelu(x).sum(), x)
    close = dict(atol=1e-12, rtol=1e-12) if what == "float64" else dict(atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gelu(x), want, **close)
    torch.testing.assert_close(got, slope, **close)
    with torch.no_grad():
        assert torch.equal(gelu(x), Gelu.apply(x))


def test_pad_rows():
    ids, lengths = pad_rows([[5, 6, 0], [7]], 9)
    assert ids.tolist() == [[5, 6, 0], [7, 9, 9]] and lengths.tolist() == [3, 1]


def test_by_length():
    rows = [[0] * length for length in (5, 1, 4, 2, 3)]
    assert by_length(rows, 2) == [[1, 3], [4, 2], [0]]


def test_response_mask_comes_from_lengths():
    # prompts of 1, 2, 0 and 1 tokens; responses of 2, 2, 4 and 0, the second one cut by the row
    mask = response_mask(torch.tensor([1, 2, 0, 1]), torch.tensor([2, 2, 4, 0]), 4)
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]


# ---------------------------------------------------------------- log-probs

def test_logprobs_by_hand():
    """Prompt [0, 1], response [2, 0]: token t is predicted by the logits at t - 1."""
    hidden = torch.tensor([[[0.0, 0, 0], [1, 2, 3], [2, 0, 0], [9, 9, 9]]])   # logits, too
    ids, mask = torch.tensor([[0, 1, 2, 0]]), torch.tensor([[False, False, True, True]])
    logps = identity(3, hidden).logprobs(ids, mask)
    wanted = torch.tensor([[0, 0, -0.4076, -0.2395]])
    torch.testing.assert_close(logps, wanted, atol=1e-4, rtol=0)
    assert abs(-logps.sum().item() / 2 - 0.3236) < 1e-4                        # the SFT loss


def test_logprobs_refuses_the_first_token():
    model, ids = identity(3), torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[False, True, True], [True, False, False]])
    with pytest.raises(ValueError, match="first token"):
        model.logprobs(ids, mask)


def test_logprobs_temperature():
    """Logits [ln 3, 0] at T = 0.5 are [ln 9, 0]: ln 0.9, and ln 0.75 at T = 1."""
    hidden = torch.tensor([[[math.log(3), 0], [0, 0]]])
    ids, mask = torch.tensor([[1, 0]]), torch.tensor([[False, True]])
    for temperature, wanted in ((0.5, -0.1054), (1.0, -0.2877)):
        logp = identity(2, hidden).logprobs(ids, mask, temperature)[0, 1].item()
        assert abs(logp - wanted) < 1e-4


def test_logprobs_are_taken_in_float32():
    """p = 0.9985 in bf16 is 1; the log-softmax of logits [6.5, 0] is -ln(1 + e^-6.5)."""
    hidden = torch.tensor([[[6.5, 0], [0, 0]]]).bfloat16()
    model = identity(2, hidden).bfloat16()
    ids, mask = torch.tensor([[1, 0]]), torch.tensor([[False, True]])
    logp = model.logprobs(ids, mask)[0, 1]
    assert logp.dtype == torch.float32 and abs(logp.item() + 0.0015023) < 1e-6


def test_rounding_ids_do_not_exist():
    """71 ids in a table of 128 rows: the other 57 have no logit, whatever their rows hold."""
    model = noisy()
    with torch.no_grad():
        model.wte.weight[71:] = 1e3
    assert model.wte.weight.shape == (128, 21)
    ids = randint(71, 1, 5)
    hidden = model(ids).detach()
    assert model.logits(hidden).shape == (1, 5, 71)
    # one hidden state, asked for each of the 71 ids: the probabilities are all there is
    hidden = hidden[:1, 4:].expand(71, 2, 21)
    tokens = torch.stack([torch.zeros(71).long(), torch.arange(71)], 1)
    mask = torch.tensor([[False, True]]).expand(71, 2)
    model.forward = lambda ids, lengths=None, at=...: hidden[at]
    assert abs(model.logprobs(tokens, mask).exp()[:, 1].sum().item() - 1) < 1e-5


def test_lm_loss_counts_the_predicted_tokens():
    """Equal logits: ln 71 for each of the 4 + 2 + 0 tokens that have a real predecessor."""
    model = noisy()
    with torch.no_grad():
        model.wte.weight.zero_()
    loss = lm_loss(model, randint(71, 3, 5), torch.tensor([5, 3, 1])).item()
    assert loss == pytest.approx(6 * math.log(71))


@pytest.mark.parametrize("what", ["lm_loss", "logprobs"])
def test_gradients_equal_finite_differences(float64, what):
    config = GPTConfig(vocab=11, n_ctx=7, n_layer=2, n_head=1, n_embd=5)
    model, ids = noisy(config), randint(11, 3, 7)
    mask = randint(2, 3, 7, seed=1).bool()
    mask[:, 0] = False

    def value():
        if what == "lm_loss":
            return lm_loss(model, ids, torch.tensor([7, 4, 2]))
        return (model.logprobs(ids, mask, temperature=0.7) * randn(3, 7)).sum()

    value().backward()
    for seed in range(3):
        params = list(model.parameters())
        way = [randn(*p.shape, seed=seed) for p in params]
        slope = sum((p.grad * d).sum() for p, d in zip(params, way, strict=True)).item()
        ahead_and_back = []
        with torch.no_grad():
            for h in (1e-5, -2e-5, 1e-5):            # there, to the other side, home again
                for p, d in zip(params, way, strict=True):
                    p += h * d
                ahead_and_back.append(value().item())
        assert abs(slope) > 0.1
        assert (ahead_and_back[0] - ahead_and_back[1]) / 2e-5 == pytest.approx(slope, rel=1e-6)


# ---------------------------------------------------------------- sizes, weights, checkpoints

def test_initial_weights():
    """std 0.64 / sqrt(64) = 0.08; residual projections by sqrt(2 x 2) smaller, 0.04."""
    model = GPT(GPTConfig(vocab=96, n_ctx=64, n_layer=2, n_head=2, n_embd=64, scalar=True))
    for name, p in model.named_parameters():
        if p.ndim < 2 or name.startswith("score_head"):
            wanted = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            assert (p == wanted).all(), name
        else:
            std = 0.04 if name.endswith("c_proj.weight") else 0.08
            error = 4 * std / math.sqrt(2 * p.numel())                      # four sigmas
            assert abs(p.std().item() - std) < error, name
            assert abs(p.mean().item()) < 4 * std / math.sqrt(p.numel()), name
    loss = lm_loss(model, randint(96, 4, 64), torch.full((4,), 64)).item()
    assert abs(loss / (4 * 63) - math.log(96)) < 0.4                         # about a fair guess
    assert not model.score(model(randint(96, 2, 3))).any()


def test_reset_is_a_function_of_its_seed():
    a, b, c = (GPT(CONFIG).reset(seed) for seed in (1, 1, 2))
    torch.manual_seed(5)
    assert torch.equal(a.wte.weight, b.wte.weight)
    assert torch.equal(b.wte.weight, a.reset(1).wte.weight)
    assert not torch.equal(a.wte.weight, c.wte.weight)


def test_sizes():
    for name in SIZES:
        c = sized(name, 300, 128, scalar=True)
        assert (c.n_layer, c.n_head, c.n_embd) == SIZES[name]
        assert (c.vocab, c.n_ctx, c.scalar) == (300, 128, True) and c.n_embd % c.n_head == 0
    with pytest.raises(ValueError, match="'tyo'.*nano.*gpt2-xl"):
        sized("tyo", 300, 128)
    with pytest.raises(ValueError, match="10 .*3 heads"):
        GPT(GPTConfig(n_head=3, n_embd=10))


def same_weights(a, b, but=()):
    a, b = a.state_dict(), b.state_dict()
    return all(torch.equal(a[k], b[k]) for k in a.keys() | b.keys() if not k.startswith(but))


def test_checkpoint_round_trip(tmp_path):
    model = noisy()
    torch.save(pack(model, TOK), tmp_path / "ckpt.pt")
    content = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    back = unpack(content)
    assert back.config == CONFIG and same_weights(model, back)
    assert same_weights(model, unpack(content, scalar=True))
    assert content["tokenizer"] == TOK.dumps()


def test_checkpoint_gains_and_loses_the_scalar_head():
    plain = noisy(GPTConfig(vocab=71, n_ctx=37, n_layer=3, n_head=3, n_embd=21))
    gained = unpack(pack(plain, TOK), scalar=True)
    assert gained.config == CONFIG and not gained.score_head.weight.any()
    assert same_weights(plain, gained, but=("score_head",))
    scored = noisy()
    lost = unpack(pack(scored, TOK), scalar=False)
    assert lost.config == plain.config and not hasattr(lost, "score_head")
    assert same_weights(scored, lost, but=("score_head",))


def test_checkpoint_with_other_weights_is_refused():
    for gone in ("score_head.weight", "h.1.ln_2.bias"):
        content = pack(noisy(), TOK)
        content["model"] = {k: v for k, v in content["model"].items() if k != gone}
        with pytest.raises(ValueError, match=gone):
            unpack(content)
    content = pack(noisy(), TOK)
    content["model"] = {**content["model"], "h.7.ln_2.bias": torch.zeros(21)}
    with pytest.raises(ValueError, match="h.7"):
        unpack(content)
