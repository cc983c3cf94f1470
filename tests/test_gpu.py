"""attention.py's kernels on a GPU: all sizes, 2048 tokens, the model by default, CUDA graphs.

Skipped without one; test_attention.py runs there too, and emulates the kernels elsewhere.
"""

import importlib.util

import pytest
import torch

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

import model
from attention_cases import (
    DEVICE,
    GENERATE,
    STOPS,
    WORK,
    apart,
    check,
    check_decode,
    check_model,
    check_rounding,
    generated,
    hidden,
    ids_of,
    kept,
    noisy,
    on_torch,
    randn,
    until_of,
    with_grads,
)
from common import uniforms
from model import generate, pad_rows, response_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

FLOAT, HALF = torch.float32, torch.bfloat16
WIDTHS = [8, 16, 24, 32, 40, 48, 64, 80, 96, 128]
PAIRS = [("causal", "packed"), ("shared", "tree"), ("anything", "pads")]


# ---------------------------------------------------------------- the kernels

@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_all_sizes(dtype, width):
    for T in (1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 191, 257, 389, 1021):
        for layouts in PAIRS:
            x = apart(2, 3, T, width, dtype, seed=T)
            if dtype == FLOAT:
                check(until_of(T, *layouts), *x, atol=1e-5)
            else:
                check_rounding(until_of(T, *layouts), *x)


@pytest.mark.parametrize("layouts", PAIRS, ids=" ".join)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_2048_tokens(width, layouts):
    check(until_of(2048, *layouts), *apart(2, 2, 2048, width), atol=1e-5)
    check_rounding(until_of(2048, *layouts), *apart(2, 2, 2048, width, HALF))


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("size", [10, 100])
def test_large_scores(dtype, size):
    q, *others = apart(2, 2, 389, 64, dtype)
    check_rounding(until_of(389, "causal", "tree"), size * q, *others)


def test_views_and_gradients_of_any_stride():
    with torch.no_grad():
        q, k, v = noisy().to(DEVICE).h[0].attn.split(randn(2, 389, 48))
    for do in (torch.ones((), device=DEVICE).expand(2, 2, 389, 24), randn(2, 2, 24, 389).mT):
        check(until_of(389, "packed", "tree"), q, k, v, do, atol=1e-5)
        check(until_of(389, "shared", "causal"), q.mT.contiguous().mT, k, v, do, atol=1e-5)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 16])
@pytest.mark.parametrize("width", WIDTHS)
def test_decode(width, m, dtype):
    for t in (0, 1, 63, 64, 65, 200):
        check_decode([131, 1, 64, 2, 65, 63, 1021], m, t, width, dtype)


# ---------------------------------------------------------------- the whole model

@pytest.mark.parametrize("work", WORK, ids=lambda f: f.__name__)
def test_model_and_its_gradients(monkeypatch, work):
    check_model(monkeypatch, with_grads(work), atol=1e-4)


def test_kept_keys_and_values(monkeypatch):
    check_model(monkeypatch, kept, atol=1e-4)


@pytest.mark.parametrize("how", GENERATE)
def test_generate(monkeypatch, how):
    """Replayed CUDA graphs against torch's attention on the CPU."""
    check_model(monkeypatch, generated(how, 5), generated(how, 5, apart=True), atol=1e-4)


def test_by_default():
    """A model that is moved here uses the kernels, with products in bf16."""
    m, exact = noisy().to(DEVICE), on_torch(with_grads(hidden))
    assert model.fused(m) and {x.dtype for x in kept(m)} == {HALF}
    for a, b in zip(with_grads(hidden)(m), exact, strict=True):
        assert a.dtype == FLOAT and (a.cpu() - b).norm() <= 0.03 * b.norm()


PROMPTS = ids_of(*range(1, 40, 3), seed=3)                     # 13 of 1 to 37 tokens


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("uniform", [False, True], ids=["greedy", "sampled"])
def test_graphs_equal_their_calls(monkeypatch, n, uniform):
    """Captured anew whenever rows have left."""
    made, replayed = [], model.replayed
    how = dict(prompts=PROMPTS, new=40, n=n, stops=STOPS)
    if uniform:
        how["uniform"] = uniforms(range(len(PROMPTS) * n), 40, 0, "graphs")
    monkeypatch.setattr(model, "AUTOCAST", {})
    monkeypatch.setattr(model, "replayed", lambda *x: [made.append(1), replayed(*x)][1])
    m = noisy().to(DEVICE)
    graphs = generate(m, **how)
    assert len(made) > 1
    monkeypatch.setattr(model, "replayed", lambda f, *inputs: f)
    for a, b in zip(graphs, generate(m, **how), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("n", [1, 3])
def test_sampled_log_probs_are_the_scorer_s(n):
    """By default, in bf16: tokens one at a time by the cache, and all of a row at once."""
    m, uniform = noisy().to(DEVICE), uniforms(range(13 * n), 40, 0, "scorer")
    tokens, lengths, logps = generate(m, PROMPTS, 40, uniform, n=n, stops=(3, 8))
    prompts = [p for p in PROMPTS for _ in range(n)]
    ids, all_of = pad_rows([p + t[:k] for p, t, k in zip(
        prompts, tokens.tolist(), lengths.tolist(), strict=True)], 0, DEVICE)
    starts = torch.tensor([len(p) for p in prompts], device=DEVICE)
    mask = response_mask(starts, lengths, ids.shape[1])
    with torch.no_grad():
        again = m.logprobs(ids, mask, lengths=all_of)[mask]
    sampled = logps[torch.arange(40, device=DEVICE) < lengths[:, None]]
    assert logps.dtype == FLOAT and (sampled - again).abs().mean() < 0.03 < sampled.std()
