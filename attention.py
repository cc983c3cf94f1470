"""Fused attention in Triton: forward, backward, and decoding over a cache.

What they compute is defined by `attention_reference` in model.py:

    out_i = sum_j softmax_j( q_i . k_j / sqrt(D) ) v_j    over the j that i sees: j <= i < until[j]

No [T, T] matrix is ever stored. A program holds a block of queries and walks over blocks of keys
with the online softmax: of the scores seen so far it keeps their largest m, the sum z of e^(s - m),
and the sum o of e^(s - m) v. A block with a larger maximum m' multiplies z and o by e^(m - m')
first; at the end the answer is o / z. Only log-sum-exp = m + log z is kept for the backward pass,
which computes the probabilities again, P = e^(S - lse), and from dO

    dV = P' dO,   dS = P * (dO V' - delta),   delta_i = dO_i . O_i,   dQ = dS K,   dK = dS' Q

`plan` lists which blocks have any visible pair, so that others are never touched, and which are
visible as a whole, so that they need no mask. One `until` a token says it all: causal rows (until =
T), rows packed one after another (until = the row's end), answers that share a prompt (the prompt's
until is the row's end, an answer's its own end).

Exponentials are base 2, which GPUs have in hardware: scores are scaled by log2(e) / sqrt(D).
This file needs triton; model.py uses it where that is installed and the device is CUDA.
"""

import math
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own emulation on the CPU


def blocks_of(width, dtype):
    """Queries and keys in a block, warps forward and backward, stages of loads in flight.

    Compiled for an H100 these fit into shared memory (227 KB) and into registers, but for float32
    heads wider than 64, of which about 1 KB a thread goes to memory.
    """
    if dtype == torch.float32:
        return (32, 32, 4, 8, 1) if width > 32 else (64, 64, 8, 8, 2)
    return (128, 64, 8, 8, 2) if width > 64 else (128, 64, 4, 8, 3)


# ---------------------------------------------------------------- which blocks are visible

@dataclass(frozen=True)
class Plan:
    """`until` [B, T], and for blocks of `queries` x `keys` tokens the lists of those to visit.

    by_query: for each block of queries the key blocks (wholly visible ones first), how many are
    wholly visible, how many are visible; by_key the same with the roles turned round.
    """
    until: torch.Tensor
    queries: int
    keys: int
    by_query: tuple
    by_key: tuple


def plan(until, width, dtype):
    """The Plan of until [B, T] (integers, j < until[j] <= T) for heads of `width` and dtype."""
    T, (queries, keys, *_) = until.shape[1], blocks_of(width, dtype)
    q0 = torch.arange(0, T, queries, device=until.device)[:, None]   # [M, 1] first query of a block
    k0 = torch.arange(0, T, keys, device=until.device)               # [N] first key
    q1, k1 = (q0 + queries).clamp(max=T), k0 + keys                  # and the ends; k1 may be > T
    padded = torch.nn.functional.pad(until, (0, -T % keys)).unflatten(1, (-1, keys))
    latest, soonest = padded.amax(2)[:, None], padded.amin(2)[:, None]        # [B, 1, N]
    visible = (k0 < q1) & (latest > q0)                                       # [B, M, N]
    whole = visible & (k1 <= q0 + 1) & (soonest >= q1)
    return Plan(until.int().contiguous(), queries, keys, lists(visible, whole),
                lists(visible.mT, whole.mT))


def lists(visible, whole):
    """[B, M, N] -> block numbers [B, M, N], whole ones first, hidden ones last; both counts."""
    order = (2 - visible.int() - whole.int()).argsort(dim=-1, stable=True)
    return tuple(x.int().contiguous() for x in (order, whole.sum(-1), visible.sum(-1)))


# ---------------------------------------------------------------- kernels

@triton.jit
def load_rows(X, rows, stride, T, width, D: tl.constexpr):
    """X[rows] as a block [rows, D], 0 beyond T rows and `width` columns."""
    d = tl.arange(0, D)
    inside = (rows[:, None] < T) & (d[None, :] < width)
    return tl.load(X + rows[:, None].to(tl.int64) * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(X, x, rows, stride, T, width, D: tl.constexpr):
    d = tl.arange(0, D)
    inside = (rows[:, None] < T) & (d[None, :] < width)
    tl.store(X + rows[:, None].to(tl.int64) * stride + d[None, :], x.to(X.dtype.element_ty),
             mask=inside)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Matrix product, summed in float32. UPCAST: the interpreter has no bf16 product."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def scores(q, k, i, j, UNTIL, T, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr,
           UPCAST: tl.constexpr):
    """log2(e) q_i . k_j / sqrt(D) [queries, keys], -inf where i does not see j."""
    s = product(q, tl.trans(k), PRECISION, UPCAST) * scale
    if MASKED:
        until = tl.load(UNTIL + j, mask=j < T, other=0)
        s = tl.where((j[None, :] <= i[:, None]) & (i[:, None] < until[None, :]), s, float("-inf"))
    return s


@triton.jit
def fold(o, z, m, s, v, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """One step of the online softmax: the scores s [queries, keys] and values v join (o, z, m)."""
    larger = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(larger == float("-inf"), 0.0, larger)    # nothing seen yet: avoid inf - inf
    p = tl.exp2(s - shift[:, None])
    shrink = tl.exp2(m - shift)                               # for what was summed under m
    z = z * shrink + tl.sum(p, 1)
    o = o * shrink[:, None] + product(p.to(v.dtype), v, PRECISION, UPCAST)
    return o, z, larger


@triton.jit
def forward_kernel(Q, K, V, OUT, LSE, UNTIL, LIST, WHOLE, VISIBLE, qb, qh, qt, kb, kh, kt, vb, vh,
                   vt, ob, oh, ot, H, T, width, scale, M: tl.constexpr, N: tl.constexpr,
                   D: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    last = tl.num_programs(0) - 1
    block, b, h = last - tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H  # long first
    Q, K, V = Q + b * qb + h * qh, K + b * kb + h * kh, V + b * vb + h * vh
    UNTIL += b * T
    at = b * tl.num_programs(0) + block
    LIST += at * tl.cdiv(T, N)
    whole, visible = tl.load(WHOLE + at), tl.load(VISIBLE + at)

    i = block * M + tl.arange(0, M)
    q = load_rows(Q, i, qt, T, width, D)
    o, z = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32)
    m = tl.full([M], float("-inf"), tl.float32)
    for n in range(0, whole):                                 # no mask
        j = tl.load(LIST + n) * N + tl.arange(0, N)
        k, v = load_rows(K, j, kt, T, width, D), load_rows(V, j, vt, T, width, D)
        s = scores(q, k, i, j, UNTIL, T, scale, False, PRECISION, UPCAST)
        o, z, m = fold(o, z, m, s, v, PRECISION, UPCAST)
    for n in range(whole, visible):                           # the diagonal, and borders of rows
        j = tl.load(LIST + n) * N + tl.arange(0, N)
        k, v = load_rows(K, j, kt, T, width, D), load_rows(V, j, vt, T, width, D)
        s = scores(q, k, i, j, UNTIL, T, scale, True, PRECISION, UPCAST)
        o, z, m = fold(o, z, m, s, v, PRECISION, UPCAST)

    z = tl.where(i < T, z, 1.0)                               # queries past the end see nothing
    store_rows(OUT + b * ob + h * oh, o / z[:, None], i, ot, T, width, D)
    tl.store(LSE + tl.program_id(1) * T + i, m + tl.log2(z), mask=i < T)


@triton.jit
def probabilities_and_grad(q, k, v, do, lse, delta, i, j, UNTIL, T, scale, MASKED: tl.constexpr,
                           PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """P and dS, both [queries, keys]."""
    p = tl.exp2(scores(q, k, i, j, UNTIL, T, scale, MASKED, PRECISION, UPCAST) - lse[:, None])
    return p, p * (product(do, tl.trans(v), PRECISION, UPCAST) - delta[:, None])


@triton.jit
def query_grad_kernel(Q, K, V, OUT, DO, LSE, DELTA, DQ, UNTIL, LIST, WHOLE, VISIBLE, qb, qh, qt, kb,
                      kh, kt, vb, vh, vt, ob, oh, ot, db, dh, dt, gb, gh, gt, H, T, width, scale,
                      M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
                      UPCAST: tl.constexpr):
    """dQ of a block of queries, and delta, which the other kernel reads."""
    last = tl.num_programs(0) - 1
    block, b, h = last - tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    K, V = K + b * kb + h * kh, V + b * vb + h * vh
    UNTIL += b * T
    at = b * tl.num_programs(0) + block
    LIST += at * tl.cdiv(T, N)
    whole, visible = tl.load(WHOLE + at), tl.load(VISIBLE + at)

    i = block * M + tl.arange(0, M)
    q = load_rows(Q + b * qb + h * qh, i, qt, T, width, D)
    do = load_rows(DO + b * db + h * dh, i, dt, T, width, D)
    out = load_rows(OUT + b * ob + h * oh, i, ot, T, width, D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + tl.program_id(1) * T + i, delta, mask=i < T)
    lse = tl.load(LSE + tl.program_id(1) * T + i, mask=i < T, other=float("inf"))
    dq = tl.zeros([M, D], tl.float32)
    for n in range(0, whole):
        j = tl.load(LIST + n) * N + tl.arange(0, N)
        k, v = load_rows(K, j, kt, T, width, D), load_rows(V, j, vt, T, width, D)
        _, ds = probabilities_and_grad(q, k, v, do, lse, delta, i, j, UNTIL, T, scale, False,
                                       PRECISION, UPCAST)
        dq += product(ds.to(k.dtype), k, PRECISION, UPCAST)
    for n in range(whole, visible):
        j = tl.load(LIST + n) * N + tl.arange(0, N)
        k, v = load_rows(K, j, kt, T, width, D), load_rows(V, j, vt, T, width, D)
        _, ds = probabilities_and_grad(q, k, v, do, lse, delta, i, j, UNTIL, T, scale, True,
                                       PRECISION, UPCAST)
        dq += product(ds.to(k.dtype), k, PRECISION, UPCAST)
    dq *= scale * 0.6931471805599453                          # ln 2: scale has log2(e) in it
    store_rows(DQ + b * gb + h * gh, dq, i, gt, T, width, D)


@triton.jit
def key_grad_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, UNTIL, LIST, WHOLE, VISIBLE, qb, qh, qt, kb,
                    kh, kt, vb, vh, vt, db, dh, dt, gb, gh, gt, H, T, width, scale,
                    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
                    UPCAST: tl.constexpr):
    """dK and dV of a block of keys, from all the queries that see it."""
    block, b, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    Q, DO = Q + b * qb + h * qh, DO + b * db + h * dh
    LSE, DELTA, UNTIL = LSE + tl.program_id(1) * T, DELTA + tl.program_id(1) * T, UNTIL + b * T
    at = b * tl.num_programs(0) + block
    LIST += at * tl.cdiv(T, M)
    whole, visible = tl.load(WHOLE + at), tl.load(VISIBLE + at)

    j = block * N + tl.arange(0, N)
    k = load_rows(K + b * kb + h * kh, j, kt, T, width, D)
    v = load_rows(V + b * vb + h * vh, j, vt, T, width, D)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for n in range(0, whole):
        i = tl.load(LIST + n) * M + tl.arange(0, M)
        q, do = load_rows(Q, i, qt, T, width, D), load_rows(DO, i, dt, T, width, D)
        lse = tl.load(LSE + i, mask=i < T, other=float("inf"))  # of no query: P is 0
        delta = tl.load(DELTA + i, mask=i < T, other=0.0)
        p, ds = probabilities_and_grad(q, k, v, do, lse, delta, i, j, UNTIL, T, scale, False,
                                       PRECISION, UPCAST)
        dv += product(tl.trans(p.to(do.dtype)), do, PRECISION, UPCAST)
        dk += product(tl.trans(ds.to(q.dtype)), q, PRECISION, UPCAST)
    for n in range(whole, visible):
        i = tl.load(LIST + n) * M + tl.arange(0, M)
        q, do = load_rows(Q, i, qt, T, width, D), load_rows(DO, i, dt, T, width, D)
        lse = tl.load(LSE + i, mask=i < T, other=float("inf"))
        delta = tl.load(DELTA + i, mask=i < T, other=0.0)
        p, ds = probabilities_and_grad(q, k, v, do, lse, delta, i, j, UNTIL, T, scale, True,
                                       PRECISION, UPCAST)
        dv += product(tl.trans(p.to(do.dtype)), do, PRECISION, UPCAST)
        dk += product(tl.trans(ds.to(q.dtype)), q, PRECISION, UPCAST)
    store_rows(DV + b * gb + h * gh, dv, j, gt, T, width, D)
    store_rows(DK + b * gb + h * gh, dk * (scale * 0.6931471805599453), j, gt, T, width, D)


@triton.jit
def fold_slots(o, z, m, q, K, V, slots, count, stride, width, scale, D: tl.constexpr):
    """The online softmax for one query [D] and a block of cache slots, of which `count` exist."""
    k = load_rows(K, slots, stride, count, width, D).to(tl.float32)
    v = load_rows(V, slots, stride, count, width, D).to(tl.float32)
    s = tl.sum(k * q[None, :], 1) * scale
    s = tl.where(slots < count, s, float("-inf"))
    larger = tl.maximum(m, tl.max(s, 0))
    p, shrink = tl.exp2(s - larger), tl.exp2(m - larger)
    return o * shrink + tl.sum(p[:, None] * v, 0), z * shrink + tl.sum(p, 0), larger


@triton.jit
def decode_kernel(Q, NEW_K, NEW_V, K, V, OWN_K, OWN_V, OUT, LENGTHS, SLOT, qb, qh, qm, kb, kh, kt,
                  wb, wh, wm, wt, H, n, width, scale, S: tl.constexpr, D: tl.constexpr):
    """One query of a row and head: over itself, its prompt's slots, and its own earlier tokens."""
    b, h, row, d = tl.program_id(0) // n, tl.program_id(1), tl.program_id(0) % n, tl.arange(0, D)
    at, real = b * qb + h * qh + row * qm + d, d < width
    q = tl.load(Q + at, mask=real, other=0.0).to(tl.float32)
    k, v = tl.load(NEW_K + at, mask=real, other=0.0), tl.load(NEW_V + at, mask=real, other=0.0)
    K, V = K + b.to(tl.int64) * kb + h * kh, V + b.to(tl.int64) * kb + h * kh
    own = b.to(tl.int64) * wb + h * wh + row * wm
    length, before, slot = tl.load(LENGTHS + b), tl.load(SLOT), tl.arange(0, S)
    tl.store(OWN_K + own + before * wt + d, k, mask=real)     # for the tokens that come after it
    tl.store(OWN_V + own + before * wt + d, v, mask=real)
    m = tl.sum(k.to(tl.float32) * q, 0) * scale               # the token sees itself: weight 1
    o, z = v.to(tl.float32), 1.0
    for first in range(0, length, S):
        o, z, m = fold_slots(o, z, m, q, K, V, first + slot, length, kt, width, scale, D)
    for first in range(0, before, S):
        o, z, m = fold_slots(o, z, m, q, OWN_K + own, OWN_V + own, first + slot, before, wt, width,
                             scale, D)
    tl.store(OUT + ((b * H + h) * n + row) * width + d, (o / z).to(OUT.dtype.element_ty), mask=real)


# ---------------------------------------------------------------- as functions of tensors

def padded(width):
    """Columns of a block: tl.dot needs a power of two, 16 at least."""
    return max(16, triton.next_power_of_2(width))


def settings(x, layout, backward=False):
    """What all three kernels are told: sizes, scale, block sizes, how to multiply."""
    width = x.shape[-1]
    _, _, *warps, stages = blocks_of(width, x.dtype)
    exact = torch.get_float32_matmul_precision() == "highest"
    return dict(H=x.shape[1], T=x.shape[2], width=width, scale=math.log2(math.e) / width ** 0.5,
                M=layout.queries, N=layout.keys, D=padded(width), UPCAST=INTERPRETED,
                PRECISION="ieee" if exact else "tf32", num_warps=warps[backward],
                num_stages=stages)


class Attention(torch.autograd.Function):
    """q, k, v [B, H, T, D] -> [B, H, T, D], stored as [B, T, H, D]: heads merge at no cost."""

    @staticmethod
    def forward(ctx, q, k, v, layout):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        B, H, T, D = q.shape
        out = q.new_empty(B, T, H, D).transpose(1, 2)
        lse = q.new_empty(B, H, T, dtype=torch.float32)
        forward_kernel[triton.cdiv(T, layout.queries), B * H](
            q, k, v, out, lse, layout.until, *layout.by_query, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *out.stride()[:3], **settings(q, layout))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout = layout
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, lse = ctx.saved_tensors
        do, layout = do if do.stride(-1) == 1 else do.contiguous(), ctx.layout
        B, H, T, D = q.shape
        delta = torch.empty_like(lse)
        dq, dk, dv = q.new_empty(3, B, T, H, D).transpose(2, 3)
        steps, told = dq.stride()[:3], settings(q, layout, backward=True)
        query_grad_kernel[triton.cdiv(T, layout.queries), B * H](
            q, k, v, out, do, lse, delta, dq, layout.until, *layout.by_query, *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *do.stride()[:3], *steps, **told)
        key_grad_kernel[triton.cdiv(T, layout.keys), B * H](
            q, k, v, do, lse, delta, dk, dv, layout.until, *layout.by_key, *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *steps, **told)
        return dq, dk, dv, None


def attention(q, k, v, layout):
    """q, k, v [B, H, T, D], layout from `plan` -> [B, H, T, D]; differentiable."""
    return Attention.apply(q, k, v, layout)


def decode(q, k, v, prompt, own, lengths, t, slots=64):
    """One query a row over the cache: q, k, v [P, H, m, D], of m rows for each of P prompts; [P, H,
    m, D] comes back.

    prompt: (k, v), each [P, H, S, D] of which lengths [P] slots are filled; own: (k, v), each
    [P, H, m, new, D] with the rows' own tokens in slots 0 to t - 1; the new ones are written to
    slot t [1]. lengths and t are read on the device, so a captured graph can be replayed.
    """
    (far_k, far_v), (own_k, own_v), (P, H, m, D) = prompt, own, q.shape
    assert far_v.stride() == far_k.stride() and own_v.stride() == own_k.stride()
    assert q.stride() == k.stride() == v.stride() and q.stride(-1) == 1
    out = q.new_empty(P, H, m, D)
    decode_kernel[P * m, H](
        q, k, v, far_k, far_v, own_k, own_v, out, lengths, t, *q.stride()[:3], *far_k.stride()[:3],
        *own_k.stride()[:4], H, m, D, math.log2(math.e) / D ** 0.5, S=slots, D=padded(D))
    return out
