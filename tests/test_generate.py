"""`generate` against the full forward pass row by row, fake models, and distributions by hand.

Mutations tried, each caught here: causal prefill read at the last column, positions without the
row's own length, cache slot one late, bias that hides a new slot or shows a pad, layers that share
a cache, ended rows kept, their cache or bias not cut, length without the stop token, a stop in the
prompt that counts, uniforms indexed by live row or by 0, samples of a prompt in the wrong order,
prefill rows in sorted order, log-probs before temperature or before the filters, top-k one more,
nucleus with its mass included, at its border or summed in bf16, draws with `right=False`, draws
neither scaled to the sum nor clamped (either alone is enough), rounding ids sampled, a bias
that hides the last prompt slot or the first new one, keys and values swapped in the rows' own
cache, both scales, places of the ended kept, positions not cut with the rows, no overflow
error, tokens streamed by live row, `respond` that drops a chunk's uniforms or takes any stop for an
end of turn.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from common import uniforms
from data.tokenizer import Tokenizer
from model import (
    GPT,
    Cache,
    GPTConfig,
    draw,
    filter_logits,
    generate,
    pad_rows,
    respond,
    response_mask,
)

V = 67
SAMPLING = [dict(), dict(temperature=0.5), dict(temperature=1.3, top_k=5), dict(top_p=0.7),
            dict(temperature=0.5, top_k=11, top_p=0.9)]


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that the distributions are neither flat nor certain."""
    model = GPT(GPTConfig(vocab=V, n_ctx=41, n_layer=2, n_head=3, n_embd=21))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.25 * torch.randn(p.shape, generator=generator)
        model.wte.weight[V:] = 30.0          # rounding rows: whoever reads them is seen
    return model


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(V, (length,), generator=generator).tolist()


RAGGED = [prompt(9), prompt(2), prompt(5), prompt(1), prompt(20)]
U = uniforms(range(200), 20, 0, "test")


def allowed(probs, top_k=0, top_p=1.0):
    """The definition of both filters: the likeliest ids while the mass before them is < top_p."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    order = order[:top_k] if top_k else order
    total, before, kept = sum(probs[i] for i in order), 0.0, []
    for i in order:
        if before / total < top_p or not kept:
            kept.append(i)
        before += probs[i]
    return sorted(kept)


@torch.no_grad()
def slowly(model, ids, new, uniform=None, temperature=1.0, top_k=0, top_p=1.0, stops=()):
    """One row without cache, batch or torch's search: tokens and log-probs."""
    ids, tokens, logps = list(ids), [], []
    for t in range(new):
        logits = model.logits(model(torch.tensor([ids]))[0, -1]).double() / temperature
        probs = logits.softmax(-1).tolist()
        kept = allowed(probs, top_k, top_p)
        total = sum(probs[i] for i in kept)
        token = max(kept, key=lambda i: probs[i])
        if uniform is not None:
            below = 0.0
            for token in kept:
                below += probs[token] / total
                if below > uniform[t]:
                    break
        ids.append(token)
        tokens.append(token)
        logps.append(math.log(probs[token] / total))
        if token in stops:
            break
    return tokens, logps


def same(tokens, lengths, logps, row, wanted):
    """Row `row` holds exactly the wanted tokens and log-probs."""
    length = len(wanted[0])
    assert lengths[row] == length
    assert tokens[row, :length].tolist() == wanted[0]
    torch.testing.assert_close(logps[row, :length], torch.tensor(wanted[1]), atol=1e-5, rtol=0)
    assert not logps[row, length:].any()


# ---------------------------------------------------------------- against the full forward pass

def test_greedy_equals_the_full_forward(model):
    out = generate(model, RAGGED, 20)
    for row, ids in enumerate(RAGGED):
        same(*out, row, slowly(model, ids, 20))


@pytest.mark.parametrize("how", SAMPLING, ids=str)
def test_samples_equal_the_full_forward(model, how):
    stops = tuple(range(0, V, 6))
    out = generate(model, RAGGED, 20, U[:5], stops=stops, **how)
    assert len(set(out[1].tolist())) > 1                           # rows of several lengths
    for row, ids in enumerate(RAGGED):
        same(*out, row, slowly(model, ids, 20, U[row], stops=stops, **how))


def test_a_row_is_the_same_in_any_batch(model):
    """37 prompts are more than one prefill chunk; each answers as it does alone."""
    prompts = [prompt(1 + (7 * i) % 13, seed=i) for i in range(37)]
    tokens, lengths, logps = generate(model, prompts, 9, U[:37], stops=(3, 8, 40))
    for i in range(37):
        alone = generate(model, prompts[i:i + 1], 9, U[i:i + 1], stops=(3, 8, 40))
        assert torch.equal(alone[0][0], tokens[i]) and alone[1] == lengths[i]
        torch.testing.assert_close(alone[2][0], logps[i], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pad", [1, 66])
def test_the_pad_id_changes_no_bit(model, pad):
    """Right-padded prompts of like lengths share a chunk; what pads them is never seen."""
    clean, other = (generate(model, RAGGED, 9, U[:5], stops=(3, 8), pad=p) for p in (0, pad))
    real = torch.arange(9) < clean[1][:, None]
    assert torch.equal(clean[0][real], other[0][real]) and (other[0][~real] == pad).all()
    assert torch.equal(clean[1], other[1]) and torch.equal(clean[2], other[2])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_returned_logprobs_are_those_of_the_scorer(model, temperature):
    """What PPO divides by what: the sampler's numbers and `logprobs` agree, so the ratio is 1."""
    tokens, lengths, logps = generate(model, RAGGED, 13, U[:5], temperature=temperature,
                                      stops=(8,))
    rows = [p + t[:n] for p, t, n in zip(RAGGED, tokens.tolist(), lengths.tolist(), strict=True)]
    ids, _ = pad_rows(rows, 0)
    starts = torch.tensor([len(p) for p in RAGGED])
    mask = response_mask(starts, lengths, ids.shape[1])
    with torch.no_grad():
        again = model.logprobs(ids, mask, temperature)[mask]
    torch.testing.assert_close(logps[torch.arange(13) < lengths[:, None]], again,
                               atol=1e-5, rtol=0)


def test_decode_equals_the_full_forward(model):
    """Incremental hidden states of a row, token by token from nothing, equal one full pass."""
    ids, c = torch.tensor([prompt(23), prompt(23, seed=1)]), model.config
    with torch.no_grad():
        full = model(ids)
        for m in (1, 2):           # two prompts of no token with a row each; one with two rows
            def empty(*shape):
                return [[torch.full(shape, math.nan) for _ in "kv"] for _ in range(c.n_layer)]
            prompts, own = (empty(2, c.n_head, 23, 7), []) if m == 1 else (
                empty(1, c.n_head, 0, 7), empty(1, c.n_head, 2, 23, 7))
            cache = Cache(prompts, own, torch.zeros(2 // m), 0, None)
            for t in range(23):
                hidden = model.decode(ids[:, t], torch.tensor([t, t]), t, cache)
                torch.testing.assert_close(hidden, full[:, t], atol=1e-5, rtol=0)


# ---------------------------------------------------------------- what is computed

def recorded(model, monkeypatch, name):
    """The number of rows of each call of model.name."""
    calls, real = [], getattr(model, name)

    def wrapper(ids, *args, **kwargs):
        calls.append(len(ids))
        return real(ids, *args, **kwargs)

    monkeypatch.setattr(model, name, wrapper)
    return calls


def test_ended_rows_leave_the_batch(model, monkeypatch):
    calls = recorded(model, monkeypatch, "decode")
    _, lengths, _ = generate(model, RAGGED, 20, U[:5], stops=tuple(range(0, V, 3)))
    assert lengths.max() < 20                                      # all ended early
    living = [int((lengths > t).sum()) for t in range(1, lengths.max())]
    assert len(calls) == len(living) and calls[-1] == 1
    assert all(n <= computed < n / 0.75 for n, computed in zip(living, calls))


def test_ended_samples_of_a_prompt_leave_the_batch(model, monkeypatch):
    """A prompt leaves with its last sample; the others close up to as many as any prompt has."""
    calls, n, stops = recorded(model, monkeypatch, "decode"), 16, tuple(range(0, V, 4))
    _, lengths, _ = generate(model, RAGGED, 20, U[:5 * n], n=n, stops=stops)
    for t, computed in enumerate(calls, 1):
        living = (lengths.view(5, n) > t).sum(1)
        assert living.sum() <= computed < (living > 0).sum() * living.max() / 0.75
    assert calls[0] > 60 and calls[-1] < 10


def test_n_samples_read_their_prompt_once(model, monkeypatch):
    calls = recorded(model, monkeypatch, "forward")
    many = generate(model, RAGGED, 9, U[:15], n=3, stops=(3, 8))
    assert sum(calls) == 5
    repeated = [p for p in RAGGED for _ in range(3)]
    for one, other in zip(many, generate(model, repeated, 9, U[:15], stops=(3, 8)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert len({tuple(row) for row in many[0].tolist()}) == 15     # and they are not copies


def test_context_overflow(model):
    out = generate(model, [prompt(31), prompt(2)], 10)              # 41 positions: exactly full
    same(*out, 0, slowly(model, prompt(31), 10))
    with pytest.raises(ValueError, match="31 tokens . 11 new ones > context of 41"):
        generate(model, [prompt(2), prompt(31)], 11)


@pytest.mark.parametrize("n", [1, 2])
def test_streamed_tokens_are_the_returned_ones(model, n):
    heard = []
    tokens, lengths, _ = generate(model, RAGGED, 9, U[:5 * n], n=n, stops=(3, 8, 13, 40),
                                  on_token=lambda row, token: heard.append((row, token)))
    for row in range(5 * n):
        assert [t for r, t in heard if r == row] == tokens[row, :lengths[row]].tolist()
    assert len(heard) == lengths.sum()
    rows = [row for row, _ in heard]
    assert rows[:5 * n] == list(range(5 * n))                      # a token each, then the next


# ---------------------------------------------------------------- a model that says "next"

class Next:
    """After id i it says follow[i]; a hidden state is (id, position), the position is checked."""

    def __init__(self, follow, prompts):
        self.config = GPTConfig(vocab=len(follow), n_ctx=30, n_layer=0, n_head=1, n_embd=2)
        self.follow, self.prompts, self.device = torch.tensor(follow), prompts, torch.device("cpu")

    def __call__(self, ids, lengths, at, keep):
        return torch.stack([ids, torch.arange(ids.shape[1]).expand(ids.shape)], -1).float()[at]

    def decode(self, ids, positions, t, cache):
        """The position is that of the row's prompt and its own tokens so far."""
        own = positions.view(len(cache.lengths), -1) - cache.lengths[:, None]
        assert (own == t).all() and sorted(cache.lengths.tolist()) == cache.lengths.tolist()
        return torch.stack([ids, positions], -1).float()

    def logits(self, hidden):
        return torch.where(torch.arange(self.config.vocab) == self.follow[hidden[:, :1].long()],
                           0.0, -50.0)


def test_previous_token_plus_one():
    """Stop 7: after 2 come 3 to 7, five tokens; after 6 the stop at once, one; after 9 no end."""
    prompts = [[0, 2], [6], [5, 5, 9]]
    fake = Next([*range(1, 20), 0], prompts)
    tokens, lengths, logps = generate(fake, prompts, 6, stops=(7,), pad=1)
    assert tokens.tolist() == [[3, 4, 5, 6, 7, 1], [7, 1, 1, 1, 1, 1], [10, 11, 12, 13, 14, 15]]
    assert lengths.tolist() == [5, 1, 6]
    assert logps.abs().max() < 1e-6
    sampled, lengths, _ = generate(fake, prompts, 6, U[:6], n=2, stops=(15, 7), pad=1)
    assert sampled.tolist() == [row for row in tokens.tolist() for _ in "ab"]
    assert lengths.tolist() == [5, 5, 1, 1, 6, 6]


def test_a_stop_in_the_prompt_stops_nothing():
    tokens, lengths, _ = generate(Next([1, 2, 3, 0], [[3, 0]]), [[3, 0]], 2, stops=(3,))
    assert tokens.tolist() == [[1, 2]] and lengths.tolist() == [2]


def test_all_rows_end_at_once():
    tokens, lengths, _ = generate(Next([1, 1], [[0]] * 3), [[0]] * 3, 4, stops=(1,))
    assert tokens.tolist() == [[1, 0, 0, 0]] * 3 and lengths.tolist() == [1, 1, 1]


def test_respond():
    """Assistant, h, i, end of turn; another special id or the limit is no end of turn."""
    tok = Tokenizer({bytes([b]): b for b in range(256)})
    for after_i, new, wanted in ((tok.eot, 3, ("hi", True)), (tok.eot, 2, ("hi", False)),
                                 (tok.human, 3, ("hi", False)), (ord(" "), 3, ("hi", False))):
        follow = list(range(tok.vocab))
        follow[tok.assistant], follow[ord("h")], follow[ord("i")] = ord("h"), ord("i"), after_i
        prompts = [[tok.eod, tok.assistant], [tok.assistant]]
        assert respond(Next(follow, prompts), tok, prompts, new) == [wanted] * 2


def test_respond_does_not_depend_on_the_chunk(model):
    tok = SimpleNamespace(decode=str, stops=(3, 8), eot=3, pad=0)
    prompts = [prompt(1 + i % 5, seed=i) for i in range(7)]
    one, other = (respond(model, tok, prompts, 9, U[:7], chunk=chunk) for chunk in (7, 3))
    assert one == other and len(one) == 7 and len({text for text, _ in one}) > 5


# ---------------------------------------------------------------- distributions

TOP_P = [(0.5, 1), (0.6, 2), (0.75, 2), (0.8, 3), (1.0, 4), (1e-9, 1), (0, 1)]
EXACT, ROUNDED = (torch.float32, torch.float64), (torch.bfloat16,)


@pytest.mark.parametrize("p, kept, dtypes",
                         [(p, kept, EXACT) for p, kept in TOP_P] +
                         # ln(1/2) has no bf16 value, so there the mass is not quite 1/2 or 3/4
                         [(p, kept, ROUNDED) for p, kept in TOP_P if p not in (0.5, 0.75)])
def test_top_p_boundary(p, kept, dtypes):
    """A token stays if the mass before it is under p; what stays sums to 1: 0.6 -> 2/3, 1/3."""
    probs = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]).double()
    wanted = probs[:kept] / probs[:kept].sum()
    for dtype in dtypes:
        for order in ([0, 1, 2, 3], [2, 1, 0, 3], [3, 2, 1, 0]):
            logits = probs[order].log().to(dtype)
            left = filter_logits(logits[None], top_p=p)[0].double().softmax(-1)
            close = dict(atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
            torch.testing.assert_close(left.sort(descending=True).values[:kept], wanted, **close)
            assert (left > 0).sum() == kept and left.argmax() == order.index(0)


def test_top_p_of_many_tokens_in_bf16():
    """1024 equal tokens, half of the mass: 512. A sum in bf16 stands still long before."""
    logits = torch.zeros(1, 1024, dtype=torch.bfloat16)
    assert (filter_logits(logits, top_p=0.5) > -math.inf).sum() == 512


def test_top_k_by_hand():
    logits = torch.tensor([[1.0, 3, 2, 0]])
    for k, kept in ((0, 4), (1, 1), (2, 2), (3, 3), (4, 4), (9, 4)):
        assert (filter_logits(logits, top_k=k) > -math.inf).sum() == kept
    assert filter_logits(logits, top_k=2).tolist() == [[-math.inf, 3, 2, -math.inf]]


def test_filters_equal_their_definition():
    logits = 2 * torch.randn(50, 13, generator=torch.Generator().manual_seed(0))
    for k, p in ((0, 0.3), (0, 0.9), (4, 1.0), (5, 0.8), (13, 0.999)):
        left = filter_logits(logits, k, p)
        for row, probs in zip(left, logits.double().softmax(-1).tolist(), strict=True):
            assert (row > -math.inf).nonzero()[:, 0].tolist() == allowed(probs, k, p)


def test_temperature_by_hand():
    """Logits [ln 3, 0] at T = 0.5: ln 0.9 for the sampler; `logprobs` has the same case."""
    fake = Next([0, 0], [[0]])
    fake.logits = lambda hidden: torch.tensor([[math.log(3), 0.0]]).expand(len(hidden), 2)
    for u, token, wanted in ((0.8, 0, -0.1054), (0.95, 1, -2.3026)):
        tokens, _, logps = generate(fake, [[0]], 1, torch.tensor([[u]]), temperature=0.5)
        assert tokens.tolist() == [[token]] and abs(logps.item() - wanted) < 1e-4
    _, _, logps = generate(fake, [[0]], 1, torch.tensor([[0.8]]), temperature=0.5, top_k=1)
    assert logps.item() == 0                                       # the filter leaves one token


def test_draw_by_hand():
    """Probabilities 0, 1/4, 0, 3/4, 0: the borders, both ends, and nothing of mass 0."""
    logits = torch.tensor([0, 0.25, 0, 0.75, 0]).log()
    u = torch.tensor([0.0, 0.2, 0.2499, 0.25, 0.9, 1 - 2**-24])
    assert draw(logits.expand(6, 5), u).tolist() == [1, 1, 1, 3, 3, 3]


def test_the_last_uniform_draws_an_allowed_token():
    """Sums of many small float32 numbers round; u next to 1 must not fall off the end."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 997, generator=generator)
    logits[:, 900:] = -math.inf
    drawn = draw(logits, torch.full((300,), 1 - 2**-24))
    assert drawn.max() < 900


def chi_square(counts, probs):
    expected = probs.double() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


def test_draws_have_the_softmax_as_their_distribution():
    """7 classes, 6 degrees of freedom: chi-square under 22.46 in 99.9% of honest samples."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, -2.0, 1.1, 0.5])
    drawn = draw(logits.expand(20000, 7), uniforms([0], 20000, "chi")[0])
    assert chi_square(drawn.bincount(minlength=7), logits.softmax(-1)) < 22.46


def test_samples_have_the_softmax_as_their_distribution(model):
    """3000 second tokens after one prompt and first token; ids under 1% make one class."""
    ids = prompt(5)
    with torch.no_grad():
        probs = (model.logits(model(torch.tensor([ids]))[0, -1]) / 1.5).softmax(-1)
    tokens, _, _ = generate(model, [ids], 1, uniforms(range(3000), 1, "chi 2"), n=3000,
                            temperature=1.5)
    counts, big = tokens[:, 0].bincount(minlength=V), probs > 0.01
    counts = torch.cat([counts[big], counts[~big].sum()[None]])
    probs = torch.cat([probs[big], probs[~big].sum()[None]])
    # 99.9% point of chi-square, by Wilson and Hilferty: df (1 - 2 / (9 df) + 3.09 sqrt(...))^3
    df = len(counts) - 1
    limit = df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3
    assert df > 5 and chi_square(counts, probs) < limit


def test_rounding_ids_are_never_sampled(model):
    """The 61 rounding rows have the largest logits by far, if anyone computed them."""
    tokens, _, logps = generate(model, RAGGED, 20, U[:100], n=20, temperature=3.0)
    assert tokens.max() < V and len(tokens.unique()) > 40 and logps.isfinite().all()
