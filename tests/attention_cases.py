"""Layouts, inputs and checks of attention.py's kernels, for test_attention.py and test_gpu.py.

They run on the GPU where there is one, else emulated on the CPU, which conftest.py asks triton for.
"""

import contextlib
import io
import json
import random
import re

import torch

import attention
import model
from common import uniforms
from model import (
    GPT,
    GPTConfig,
    attention_reference,
    generate,
    pad_rows,
    response_mask,
    shared_prompt_rows,
)

DEVICE = "cpu" if attention.INTERPRETED else "cuda"


def randn(*shape, seed=0, dtype=None):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# ---------------------------------------------------------------- who sees whom: until of T tokens

def rows(T, *lengths):
    """Rows of these lengths one after another, and one of what is left."""
    until = []
    for length in (*lengths, T):
        end = min(len(until) + length, T)
        until += [end] * (end - len(until))
    return until


def shared(T, prompt, *responses):
    """A prompt that all see, its responses, and one response of what is left."""
    return [T] * min(prompt, T) + rows(T, prompt, *responses)[prompt:]


def pads(T, real):
    """A row, and pads, each seen by itself alone."""
    return [*rows(real), *range(real + 1, T + 1)]


def tree(T, seed=0):
    """Branches that branch: the intervals [j, until[j]) nest, most of them far."""
    draw, until, ends = random.Random(seed), [], [T]
    for j in range(T):
        while ends[-1] == j:
            ends.pop()
        until.append(ends[-1] - int((ends[-1] - j) * draw.random() ** 3))
        ends.append(until[-1])
    return until


def anything(T, seed=0):
    """Intervals that need not nest, far and near."""
    draw = random.Random(seed)
    return [draw.randint(j + 1, T) for j in range(T)]


# With one-token rows, rows that end at 64 and 128, borders of blocks, and one of over two blocks.
LAYOUTS = {
    "causal": rows,
    "packed": lambda T: rows(T, 1, 63, 1, 63, 259, 1),
    "shared": lambda T: shared(T, T // 2, T // 5, 1, T // 7),
    "tree": tree,
    "anything": anything,
    "pads": lambda T: pads(T, 1 + T // 3),
}


def until_of(T, *names):
    """A batch, a layout a row: [B, T]."""
    return torch.tensor([LAYOUTS[name](T) for name in names], device=DEVICE)


# ---------------------------------------------------------------- forward and backward

def apart(B, H, T, D, dtype=torch.float32, seed=0):
    """q, k, v and a gradient [B, H, T, D], no two with the same strides."""
    return (randn(B, H, T, D, seed=seed, dtype=dtype),
            randn(B, T, H, D, seed=seed + 1, dtype=dtype).transpose(1, 2),
            randn(B, H, T, D + 3, seed=seed + 2, dtype=dtype)[..., :D],
            randn(T, B, H, D, seed=seed + 3, dtype=dtype).permute(1, 2, 0, 3))


def outcome(f, q, k, v, do):
    """f(q, k, v), and the gradients of q, k and v when do is that of the output."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = f(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do)


def fused(until, q, k, v, do):
    plan = attention.plan(until, q.shape[-1], q.dtype)
    return outcome(lambda *x: attention.attention(*x, plan), q, k, v, do)


def defined(until, q, k, v, do):
    return outcome(lambda *x: attention_reference(*x, until), q, k, v, do)


def three(until, x):
    """(name, kernels, definition, definition in float64) of the output and of each gradient."""
    found = fused(until, *x), defined(until, *x), defined(until, *(y.double() for y in x))
    for name, a, b, exact in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        assert a.dtype == b.dtype == x[0].dtype and a.shape == b.shape and exact.isfinite().all()
        yield name, a, b, exact


def check(until, *x, atol=5e-6):
    """In float32 what the definition says, and what it says in float64; relative above 1."""
    for name, a, b, exact in three(until, x):
        limit = atol * max(1, exact.abs().max().item())
        for other, times in ((exact, 1), (b, 2)):
            error = (a - other).abs().max().item()
            assert error <= times * limit, f"{name}: {error:.2g} > {limit:.2g}"   # nor is it NaN


def check_rounding(until, *x):
    """The error is no larger than the definition's own in that dtype, on average.

    Sums stay in float32 and only probabilities are rounded, so it is 0.5 to 0.85 of that in bf16.
    The emulation cuts numbers off where a GPU rounds, which is twice the error. At least what the
    format of the numbers costs is granted.
    """
    dtype, rounds = x[0].dtype, DEVICE == "cuda" and x[0].dtype == torch.bfloat16
    for name, *found, exact in three(until, x):
        error, own = ((y - exact).pow(2).mean().sqrt().item() for y in found)
        limit = max((1.2 if rounds else 2.5) * own, torch.finfo(dtype).eps / 2)
        assert error <= limit, f"{name}: {error:.2g} > {limit:.2g}"


# ---------------------------------------------------------------- decoding

def check_decode(lengths, m, t, width, dtype=torch.float32, heads=2, slots=64):
    """Each row against a softmax of its own in float64; what is in no filled slot is NaN."""
    P, S, room = len(lengths), max(lengths) + 1, t + 3
    q = randn(P * m, heads, 1, width, dtype=dtype).view(P, m, heads, width).transpose(1, 2)
    far = [randn(P, heads, S, width, seed=i, dtype=dtype) for i in (1, 2)]
    near = [randn(P, heads, m, room, width, seed=i, dtype=dtype) for i in (3, 4)]
    new = [randn(P * m, heads, 1, width, seed=i, dtype=dtype).view(P, m, heads, width).transpose(
        1, 2) for i in (5, 6)]
    for x, y in zip(far, near, strict=True):
        y[..., t:, :] = torch.nan
        for p, length in enumerate(lengths):
            x[p, :, length:] = torch.nan
    out = attention.decode(q, *new, far, near, torch.tensor(lengths, device=DEVICE),
                           torch.tensor([t], device=DEVICE), slots)
    for x, y in zip(new, near, strict=True):
        assert torch.equal(y[..., t, :], x) and y[..., t + 1:, :].isnan().all()
    assert out.shape == (P, heads, m, width) and out.dtype == dtype
    for p, length in enumerate(lengths):
        for row in range(m):
            k, v = (torch.cat([x[p, :, :length], y[p, :, row, :t + 1]], 1).double()
                    for x, y in zip(far, near, strict=True))                 # [H, slots, D]
            seen = (k @ q[p, :, row, :, None].double() / width ** 0.5).softmax(1)
            wanted = (seen.mT @ v)[:, 0]
            rtol = {torch.float32: 0, torch.bfloat16: 2 ** (-7 if DEVICE == "cpu" else -8)}[dtype]
            torch.testing.assert_close(out[p, :, row].double(), wanted, atol=5e-6, rtol=rtol)


# ---------------------------------------------------------------- the whole model

CONFIG = GPTConfig(vocab=71, n_ctx=83, n_layer=2, n_head=2, n_embd=48, scalar=True)


def noisy(config=CONFIG, scale=0.2):
    """Weights away from 0 and 1: a flat distribution, or a bias of 0, would hide errors."""
    made, generator = GPT(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p += scale * torch.randn(p.shape, generator=generator)
    return made


def ids_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG.vocab, (n,), generator=generator).tolist() for n in lengths]


ROWS = ids_of(61, 1, 7)                                    # packed, over the border of a block
RESPONSES = [ids_of(3, 1, 7), ids_of(2, 5, 3, seed=1), ids_of(1, 1, 2, seed=2)]
RAGGED = ids_of(3, 67, 1)


def padded(m):
    ids, lengths = pad_rows(ROWS, 5, m.device)
    return ids, lengths, torch.arange(ids.shape[1], device=m.device) < lengths[:, None]


def hidden(m):
    ids, lengths, real = padded(m)
    return m(ids, lengths)[real]


def whole(m):
    """No lengths: every token is real."""
    return m(torch.tensor(ids_of(11, 11), device=m.device))


def asked(m):
    """Tokens of any row in any order, one of them twice."""
    ids, lengths, _ = padded(m)
    return m(ids, lengths, at=tuple(torch.tensor([[0, 2, 0], [60, 6, 60]], device=m.device)))


def logprobs(m):
    ids, lengths, _ = padded(m)
    starts = torch.tensor([40, 1, 2], device=m.device)
    mask = response_mask(starts, lengths - starts, ids.shape[1])
    return m.logprobs(ids, mask, 0.7, lengths)


def scores(m):
    *rows, ends = shared_prompt_rows(ids_of(2, 29, 5), RESPONSES, 5, m.device)
    return m.score(m(*rows, at=(torch.arange(3, device=m.device)[:, None], ends)))


def again(m):
    """Blocks computed a second time in the backward pass."""
    m.checkpoint = True
    return scores(m.train())


WORK = [hidden, whole, asked, logprobs, scores, again]


def with_grads(work):
    """What a piece of work returns, and its gradient of every parameter."""
    def do(m):
        y = work(m)
        (y * randn(*y.shape, seed=2).to(y)).mean().backward()
        return [y.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad
                              for p in m.parameters())]
    return do


STOPS = tuple(range(0, 71, 3))
ONE, THREE = uniforms(range(3), 5, 0, "kernels"), uniforms(range(6), 5, 13, "kernels")
GENERATE = {  # what generate is told
    "greedy": dict(prompts=RAGGED),
    "sampled": dict(prompts=RAGGED, uniform=ONE, temperature=1.3, top_k=20),
    "stopped": dict(prompts=RAGGED, uniform=ONE, stops=STOPS),
    "greedy of 3": dict(prompts=RAGGED[1:], n=3),
    "stopped of 3": dict(prompts=RAGGED[:2], uniform=THREE, n=3, stops=STOPS),  # 1, 2, 3, 4, 4, 2
}


def generated(how, new=4, apart=False):
    """Tokens, lengths and log-probs; apart: each sample has a prompt of its own."""
    told = GENERATE[how]
    if apart:
        n = told.get("n", 1)
        told = dict(told, n=1, prompts=[p for p in told["prompts"] for _ in range(n)])
    return lambda m: generate(m, new=new, **told)


def kept(m):
    """Keys and values of the real tokens, layer by layer."""
    (ids, lengths, real), keep = padded(m), []
    with torch.no_grad():
        m(ids, lengths, keep=keep)
    assert [x.shape for kv in keep for x in kv] == [(3, 2, 61, 24)] * 4
    return [x.transpose(1, 2)[real] for kv in keep for x in kv]


def on_torch(work):
    """work(model) by torch's attention on the CPU, in float32."""
    return [x.cpu() for x in work(noisy())]


def on_kernels(monkeypatch, work):
    """The same work by the kernels, in float32 as well."""
    with monkeypatch.context() as patch:
        patch.setattr(model, "FUSED", {DEVICE})
        patch.setattr(model, "AUTOCAST", {})
        return [x.cpu() for x in work(noisy().to(DEVICE))]


def check_model(monkeypatch, work, same=None, atol=1e-5):
    """work by the kernels equals the same work, told otherwise or not, by torch; returns that."""
    ours, theirs = on_kernels(monkeypatch, work), on_torch(same or work)
    assert theirs[0].float().std() > 0.1
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)
    return theirs


# ---------------------------------------------------------------- compiled for a GPU

class Recorder:
    """Stands in for a kernel: writes down what it is launched with."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **how: self.launches.append((self.kernel, args, how))


def launches(width, dtype, heads=3, T=128):
    """[(kernel, arguments, keywords)] of a forward, a backward and a decoding step; none is run."""
    found = []
    for name in ("forward_kernel", "query_grad_kernel", "key_grad_kernel", "decode_kernel"):
        setattr(attention, name, Recorder(getattr(attention, name), found))
    x = torch.zeros(1, T, 3, heads, width, dtype=dtype, requires_grad=True)
    plan = attention.plan(torch.full((1, T), T), width, dtype)
    attention.attention(*x.permute(2, 0, 3, 1, 4).unbind(0), plan).sum().backward()
    q, far, near = (torch.zeros(*shape, width, dtype=dtype)
                    for shape in ((2, heads, 3), (2, heads, 67), (2, heads, 3, 5)))
    attention.decode(q, q, q, (far, far), (near, near), torch.tensor([67, 3]), torch.tensor([4]))
    return found


def compiled(kernel, args, how):
    """What the compiler makes of a launch for compute capability 9.0.

    As a launch does it: integers divisible by 16 are told to be so, and pointers are.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32",
             torch.int64: "*i64"}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **how}
    signature, constants, even = {}, {}, {}
    for i, p in enumerate(kernel.params):
        x = given.pop(p.name)
        if p.is_constexpr or isinstance(x, int) and x == 1:
            signature[p.name], constants[p.name] = "constexpr", x
        elif isinstance(x, float):
            signature[p.name] = "fp32"
        else:
            signature[p.name] = types[x.dtype] if isinstance(x, torch.Tensor) else "i32"
            if isinstance(x, torch.Tensor) or x % 16 == 0:
                even[i,] = [["tt.divisibility", 16]]
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        made = compile(ASTSource(kernel, signature, constants, even),
                       target=GPUTarget("cuda", 90, 32), options=given)
    spilled = re.findall(r"(\d+) bytes spill stores", log.getvalue())
    return dict(name=kernel.__name__, shared=made.metadata.shared, spilled=int(spilled[-1]),
                tensor_cores=made.asm["ptx"].count("wgmma.mma_async"))


def print_compiled(width, dtype):
    print(json.dumps([compiled(*launch) for launch in launches(width, getattr(torch, dtype))]))
