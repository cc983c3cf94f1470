"""attention.py's kernels, emulated on the CPU, against the definition in float64 and brute force.

Mutations tried, each caught here. Of the kernels: j < i, i <= until, until ignored or row 0's, a
scale without its root, log2(e) to 5 digits, dQ or dK without the scale or ln 2, dK and dV swapped,
no delta or another head's, lse to base e or without the sum, no running maximum or the block's
alone, -inf less -inf, sums not shrunk, the last block of a list left out, lists of row 0, k and v
or out and dO by each other's strides, last strides taken for 1, columns beyond the width read or
written. Of `plan`: a block whole that is not or the reverse, hidden ones listed, visible ones not,
whole ones not first, blocks of another dtype. Of decoding: a slot more or less of the prompt or of
the own tokens, another prompt or its length, another row's query or own tokens, unfilled slots
counted or read, the new token unseen, unscaled or stored late, k for v, rows and heads not turned,
ended rows' tokens kept. Of the model: packed rows a token late, until, place or `at` not moved,
pads computed or out of range, what is kept not put back, recomputed blocks without the layout, a
cache in float32, logits or scores in bf16, no autocast, wider heads than 128, kernels on a CPU by
default, a missing triton an error or told twice. Of the blocks: those that need more shared memory
than there is, and those that spill registers.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

if not (os.environ.get("CI") and sys.platform == "linux"):  # a test that never runs proves nothing
    pytest.importorskip("triton")

import attention
import model
from attention_cases import (
    DEVICE,
    GENERATE,
    LAYOUTS,
    WORK,
    apart,
    asked,
    check,
    check_decode,
    check_model,
    check_rounding,
    fused,
    generated,
    hidden,
    kept,
    logprobs,
    noisy,
    on_kernels,
    on_torch,
    randn,
    rows,
    scores,
    shared,
    until_of,
    with_grads,
)
from model import GPT, GPTConfig, layout_of, packed

FLOAT, HALF = torch.float32, torch.bfloat16
ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- forward and backward

@pytest.mark.parametrize("width, T, layouts, heads", [
    (32, 1, "causal tree", 1), (128, 1, "packed pads", 1), (32, 2, "shared anything", 1),
    (80, 2, "pads causal", 1), (48, 67, "anything packed", 3), (24, 131, "shared tree", 2),
    (128, 131, "packed causal", 1), (64, 131, "tree pads", 1), (32, 257, "packed shared", 1),
    (80, 131, "shared anything", 1)])
def test_float32(width, T, layouts, heads):
    check(until_of(T, *layouts.split()), *apart(2, heads, T, width))


@pytest.mark.parametrize("width, T, layouts, heads", [
    (64, 1, "causal tree", 1), (128, 2, "shared packed", 1), (24, 67, "tree anything", 2),
    (32, 131, "pads shared", 2), (128, 257, "tree causal", 1), (64, 389, "packed shared", 1)])
def test_bfloat16(width, T, layouts, heads):
    check_rounding(until_of(T, *layouts.split()), *apart(2, heads, T, width, HALF))


@pytest.mark.slow
@pytest.mark.parametrize("layouts", ["causal packed", "shared tree", "anything pads"])
@pytest.mark.parametrize("T", [1, 2, 67, 131, 257])
@pytest.mark.parametrize("width", [24, 32, 48, 64, 80, 128])
def test_all_sizes(width, T, layouts):
    check(until_of(T, *layouts.split()), *apart(2, 1, T, width))
    if width in (24, 64, 128) and T != 131:
        check_rounding(until_of(T, *layouts.split()), *apart(2, 1, T, width, HALF))


@pytest.mark.parametrize("size", [10, 100])
def test_large_scores(size):
    """Of up to several hundred: e to that power is infinite, and most probabilities are 0."""
    q, *others = apart(2, 1, 131, 32)
    check_rounding(until_of(131, "causal", "tree"), size * q, *others)


def test_split_views():
    """q, k, v as the model makes them: slices of one tensor, heads side by side."""
    with torch.no_grad():
        q, k, v = noisy().to(DEVICE).h[0].attn.split(randn(2, 67, 48), None)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and q.stride(2) == 144
    check(until_of(67, "packed", "tree"), q, k, v, randn(2, 2, 67, 24))


@pytest.mark.parametrize("do", [
    torch.ones(()).expand(2, 2, 67, 24), randn(1, 2, 67, 24).expand(2, -1, -1, -1),
    randn(2, 2, 24, 67).mT, randn(24, 67, 2, 2).permute(3, 2, 1, 0)], ids=lambda x: str(x.stride()))
def test_gradients_of_any_stride(do):
    """All ones are what `.sum()` sends back: one number in memory."""
    *x, _ = apart(2, 2, 67, 24)
    check(until_of(67, "packed", "tree"), *x, do.to(DEVICE))


def test_inputs_of_any_stride():
    q, k, v, do = apart(2, 2, 67, 24)
    k, v = k.mT.contiguous().mT, v[:, :1].expand(-1, 2, -1, -1)
    check(until_of(67, "packed", "tree"), q, k, v, do)


# ---------------------------------------------------------------- which blocks are visited

def check_plan(until, queries, keys, width=8, dtype=FLOAT):
    """A block is listed if a pair in it is visible, once; as whole if all keys exist and are seen.

    Queries that don't exist don't count: what a kernel computes for them goes nowhere.
    """
    made, T = attention.plan(until, width, dtype), until.shape[1]
    ends, seen = (0, -T % keys, 0, -T % queries), layout_of(until)[:, 0]              # [B, T, T]
    real = F.pad(torch.ones_like(seen[:, :, 0]), ends[2:])[:, :, None]                # [B, T', 1]
    blocks = F.pad(seen, ends), F.pad(seen, ends) | ~real
    blocks = [x.unflatten(2, (-1, keys)).unflatten(1, (-1, queries)) for x in blocks]
    some, whole = blocks[0].any(4).any(2), blocks[1].all(4).all(2)                    # [B, M, N]
    for lists, turn in ((made.by_query, lambda x: x), (made.by_key, lambda x: x.mT)):
        order, *counts = lists
        n = torch.arange(order.shape[-1], device=order.device)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists)
        assert torch.equal(order.sort(-1).values, n.expand(order.shape).int())
        for count, wanted in zip(counts, (whole, some), strict=True):
            listed = torch.zeros_like(turn(some)).scatter(-1, order.long(), n < count[..., None])
            assert torch.equal(listed, turn(wanted))
    assert (made.queries, made.keys) == (queries, keys) and torch.equal(made.until, until.int())


@pytest.mark.parametrize("queries, keys", [(1, 1), (2, 1), (2, 2), (4, 2), (3, 2), (2, 3)])
def test_plan_by_brute_force(monkeypatch, queries, keys):
    """Every `until` there is of up to 6 tokens: 873."""
    monkeypatch.setattr(attention, "blocks_of", lambda width, dtype: (queries, keys, 4, 4, 1))
    for T in range(1, 7):
        every = [*product(*(range(j + 1, T + 1) for j in range(T)))]
        check_plan(torch.tensor(every), queries, keys)


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_plan_of_real_blocks(width, dtype):
    queries, keys, *_ = attention.blocks_of(width, dtype)
    for T in (1, 64, 67, 128, 389):
        check_plan(until_of(T, *LAYOUTS), queries, keys, width, dtype)


def test_visits_by_hand():
    """1536 tokens, 12 blocks of 128 queries and 24 of 64 keys."""
    def visits(until):
        made = attention.plan(torch.tensor([until]), 64, HALF)
        assert made.by_query[2].sum() == made.by_key[2].sum()
        return made.by_query[1].sum().item(), made.by_query[2].sum().item()

    # the n-th block of queries sees 2 n blocks of keys, the last 2 of them in part
    assert visits(rows(1536)) == (132, 156)
    # a prompt of 8 blocks, then 4 responses: 2 * (1 + ... + 8), and 4 * (16 + 2)
    assert visits(shared(1536, 1024, 128, 128, 128)) == (56 + 64, 72 + 72)
    assert visits(rows(1536, *12 * [128])) == (0, 24)
    assert visits([*range(1, 1537)]) == (0, 24)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("dtype", [FLOAT, pytest.param(HALF, marks=pytest.mark.slow)], ids=str)
def test_hidden_blocks_are_not_read(dtype):
    """NaN in a row, in all that it has, reaches no other row and no other response."""
    def dirty(until, at):
        x = [y.contiguous() for y in apart(1, 1, 384, 24, dtype)]
        clean = fused(until, *x)
        for y in x:
            y[:, :, at] = torch.nan
        return zip(("out", "dq", "dk", "dv"), clean, fused(until, *x), strict=True)

    one, two, three = slice(0, 128), slice(128, 256), slice(256, 384)
    until = torch.tensor([rows(384, 128, 128)], device=DEVICE)
    for name, clean, x in dirty(until, two):
        assert all(torch.equal(x[:, :, y], clean[:, :, y]) for y in (one, three)), name
        assert x[:, :, two].isnan().all(), name
    until = torch.tensor([shared(384, 128, 128)], device=DEVICE)
    for name, clean, x in dirty(until, two):              # the prompt's keys have seen it, no more
        assert torch.equal(x[:, :, three], clean[:, :, three]), name
        assert torch.equal(x[:, :, one], clean[:, :, one]) == (name in ("out", "dq")), name


# ---------------------------------------------------------------- decoding

@pytest.mark.parametrize("m, t, width, dtype", [
    (1, 0, 24, FLOAT), (3, 1, 24, FLOAT), (1, 63, 128, FLOAT), (3, 64, 64, FLOAT), (1, 1, 24, HALF)
])
def test_decode(m, t, width, dtype):
    check_decode([1, 2, 64, 65, 131], m, t, width, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("t", [0, 1, 63, 64])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("width", [24, 64, 128])
def test_decode_of_all_sizes(m, t, width):
    check_decode([131, 1, 64, 2, 65], m, t, width)
    if t == 1:
        check_decode([131, 1, 64, 2, 65], m, t, width, HALF, slots=32)


# ---------------------------------------------------------------- the whole model

def test_packed_by_hand():
    """Rows of 2 and 1 tokens; a row without pads; responses of a prompt, and a pad."""
    ids, places = torch.tensor([[5, 6, 9], [7, 9, 9]]), torch.arange(3).expand(2, 3)
    for lengths, until, wanted in (
        ([2, 1], None, [[[5, 6, 7]], [[0, 1, 0]], [[2, 2, 3]], [[0, 1, 0], [2, 0, 0]], [0, 1, 3]]),
        (None, None, [[[5, 6, 9, 7, 9, 9]], [[0, 1, 2] * 2], [[3] * 3 + [6] * 3],
                      [[0, 1, 2], [3, 4, 5]], [*range(6)]]),
        ([2, 3], [[2, 2, 3], [3, 2, 3]], [[[5, 6, 7, 9, 9]], [[0, 1, 0, 1, 2]], [[2, 2, 5, 4, 5]],
                                          [[0, 1, 0], [2, 3, 4]], [0, 1, 3, 4, 5]])):
        lengths, until = (x and torch.tensor(x) for x in (lengths, until))
        assert [x.tolist() for x in packed(ids, lengths, places, until)] == wanted


@pytest.mark.parametrize("work", WORK, ids=lambda f: f.__name__)
def test_model_and_its_gradients(monkeypatch, work):
    check_model(monkeypatch, with_grads(work))


def test_kept_keys_and_values(monkeypatch):
    check_model(monkeypatch, kept)


@pytest.mark.parametrize("how", GENERATE)
def test_generate(monkeypatch, how):
    """By the kernels n samples a prompt, by torch as many prompts."""
    _, lengths, _ = check_model(monkeypatch, generated(how), generated(how, apart=True))
    assert len(set(lengths.tolist())) > 1 or "stopped" not in how


@pytest.mark.parametrize("work, last", [(hidden, 69), (asked, 3), (logprobs, 26), (kept, 69)])
def test_no_pad_is_computed(monkeypatch, work, last):
    """Rows of 61, 1 and 7 tokens; the last block ends only where it is asked."""
    def watched(m):
        seen = []
        for block in m.h:
            block.mlp.register_forward_hook(lambda _, x, y: seen.append(x[0].shape[:-1].numel()))
        work(m)
        return [torch.tensor(seen)]

    for found in (on_kernels(monkeypatch, watched), on_torch(watched)):
        assert found[0].tolist() == [69, last]


@pytest.mark.parametrize("on", [{DEVICE}, set()], ids=["kernels", "torch"])
def test_products_in_bfloat16(monkeypatch, on):
    """Weights, gradients, logits, log-probs and scores stay float32, and the cache does not."""
    exact, caches, prefill = on_torch(with_grads(hidden)), [], model.prefill
    monkeypatch.setattr(model, "FUSED", on)
    monkeypatch.setattr(model, "AUTOCAST", {DEVICE: HALF})
    monkeypatch.setattr(model, "prefill", lambda *a: [caches.append(prefill(*a)), caches[-1]][1])
    m = noisy().to(DEVICE)
    assert {x.dtype for x in kept(m)} == {HALF}
    for a, b in zip(with_grads(hidden)(m), exact, strict=True):
        assert a.dtype == FLOAT and (a.cpu() - b).norm() <= 0.03 * b.norm()
    assert not torch.equal(hidden(m).cpu(), exact[0])
    assert {p.dtype for p in m.parameters()} == {FLOAT}
    assert logprobs(m).dtype == scores(m).dtype == m.logits(hidden(m)).dtype == FLOAT
    for how in ("sampled", "greedy of 3"):
        _, _, logps = generated(how, new=2)(m)
        _, cache = caches[-1]
        assert {x.dtype for kv in (*cache.prompt, *cache.own) for x in kv} == {HALF}
        assert cache.ours is model.fused(m) and bool(cache.own) == bool(on or "3" in how)
        assert logps.dtype == FLOAT and logps.max() <= 0 and logps.min() < -0.1


# ---------------------------------------------------------------- who uses them

def test_who_uses_the_kernels(monkeypatch):
    wide = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=129))
    assert model.FUSED == {"cuda"} and model.fused(GPT(GPTConfig())) is None
    monkeypatch.setattr(model, "FUSED", {"cpu"})
    assert model.fused(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=128))) is attention
    assert model.fused(wide) is None


def test_without_triton(monkeypatch, capsys):
    """All works, and it is said once."""
    works = [with_grads(scores), generated("greedy of 3")]
    wanted = [on_torch(work) for work in works]
    monkeypatch.setitem(sys.modules, "attention", None)
    monkeypatch.setattr(model, "FUSED", {"cpu"})
    model.kernels.cache_clear()
    try:
        assert model.fused(noisy()) is None
        for work, want in zip(works, wanted, strict=True):
            assert all(map(torch.equal, on_torch(work), want))
    finally:
        model.kernels.cache_clear()
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "triton is not installed" in err


# ---------------------------------------------------------------- compiled

@pytest.mark.parametrize("width, dtype", [(64, "bfloat16"), *(
    pytest.param(*x, marks=pytest.mark.slow)
    for x in ((24, "bfloat16"), (128, "bfloat16"), (32, "float32"), (64, "float32")))])
def test_compiles_for_a_gpu(tmp_path, width, dtype):
    """One of compute capability 9.0, which need not be here: 227 KB of shared memory a block.

    Hardly any number that should be in a register is in memory; bf16 has its products in hardware.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
               TRITON_CACHE_DIR=str(tmp_path), TRITON_DUMP_PTXAS_LOG="1")
    code = f"import attention_cases; attention_cases.print_compiled({width}, '{dtype}')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert [x["name"] for x in made] == ["forward_kernel", "query_grad_kernel", "key_grad_kernel",
                                         "decode_kernel"]
    assert all(x["shared"] <= 227 * 1024 for x in made), made
    assert all(x["spilled"] <= 32 for x in made), made                     # bytes
    assert all(bool(x["tensor_cores"]) == (dtype == "bfloat16") for x in made[:3]), made
