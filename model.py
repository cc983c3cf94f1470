"""The GPT, all of it: attention, blocks, heads, log-probs, KV-cached generation.

GPT-2's architecture and parameter names; four options of GPTConfig make it GPT-NeoX's (Pythia).
Letters: B rows, T positions, P prompt tokens, R response tokens, C width, H heads, D = C / H head
width, V vocabulary, S cache slots.

`forward` returns hidden states [B, T, C], or those asked for; the language-model head is applied
only where a log-prob is needed (`logprobs`), and `score` is the scalar head of the preference model
and the critic.
"""

import contextlib
import functools
import math
import sys
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# By device type. Where attention.py's kernels run, if triton is installed; else it is torch's
# attention. And the dtype of matrix products; weights, sums, log-probs and scores stay float32.
FUSED = {"cuda"}
AUTOCAST = {"cuda": torch.bfloat16}


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = 512       # ids that exist; the embedding has a multiple of 64, the rest is unread
    n_ctx: int = 256       # positions
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128      # width C
    scalar: bool = False   # has the scalar head (preference model, critic), and no other
    rotary: float = 0.0       # share of each head that positions turn; 0: they have a table
    parallel: bool = False    # a block adds attention and MLP of one x, not one after the other
    tied: bool = True         # the language-model head is the embedding
    exact_gelu: bool = False  # x Phi(x) itself, not by tanh

    @property
    def turned(self):
        """Numbers of each head's D that positions turn."""
        return int(self.n_embd // self.n_head * self.rotary)


# name -> (layers, heads, width); the toy sizes grow by about 4x in parameters, four are GPT-2's
SIZES = {"nano": (2, 2, 48), "micro": (3, 3, 72), "toy": (4, 4, 128), "mini": (6, 6, 192),
         "small": (6, 6, 384), "gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024),
         "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600),
         "pythia-14m": (6, 4, 128), "pythia-31m": (6, 8, 256), "pythia-70m": (6, 8, 512),
         "pythia-160m": (12, 12, 768), "pythia-410m": (24, 16, 1024), "pythia-1b": (16, 8, 2048),
         "pythia-1.4b": (24, 16, 2048), "pythia-2.8b": (32, 32, 2560),
         "pythia-6.9b": (32, 32, 4096), "pythia-12b": (36, 40, 5120)}
PYTHIA = dict(rotary=0.25, parallel=True, tied=False, exact_gelu=True)


def sized(name, vocab, n_ctx, scalar=False):
    """The GPTConfig of a named size."""
    if name not in SIZES:
        raise ValueError(f"size {name!r}: choose from {', '.join(SIZES)}")
    return GPTConfig(vocab, n_ctx, *SIZES[name], scalar,
                     **(PYTHIA if name.startswith("pythia") else {}))


# ---------------------------------------------------------------- attention

def attention_reference(q, k, v, until=None):
    """Definition: softmax(q k^T / sqrt(D)) v over what a token sees; q, k, v [B, H, T, D].

    Token i sees j if j <= i < until[b, j]; until [B, T], None is causal.
    """
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    seen = i >= i.T if until is None else ((i >= i.T) & (i < until[:, None]))[:, None]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])    # [B, H, T, T] flows from j to i
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v  # [B, H, T, D]


@functools.cache
def kernels():
    """The module attention.py, or None without triton."""
    try:
        import attention
    except ImportError:
        print("model: triton is not installed; attention is torch's own", file=sys.stderr)
        return None
    return attention


def fused(model):
    """attention.py where this model's attention is done by it, else None. The only choice."""
    c = model.config
    here = model.device.type in FUSED and c.n_embd // c.n_head <= 128
    return kernels() if here else None


def layout_of(until):
    """until [B, T] as torch's attention wants it: a mask [B, 1, T, T]."""
    i = torch.arange(until.shape[1], device=until.device)[:, None]
    return ((i >= i.T) & (i < until[:, None]))[:, None]


def attention(q, k, v, layout):
    """The same, fused: by torch for Rows, by attention.py for its Plan."""
    if not isinstance(layout, Rows):
        return kernels().attention(q, k, v, layout)
    mask = layout.mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def autocast(device):
    """Matrix products in AUTOCAST's dtype of this device. No forward pass needs a weight twice, so
    its copy in that dtype is not kept until the end: of all blocks at once they are 2 bytes more a
    parameter.
    """
    dtype = AUTOCAST.get(device.type)
    return (torch.autocast(device.type, dtype, cache_enabled=False) if dtype
            else contextlib.nullcontext())


# ---------------------------------------------------------------- rows of tokens

def pad_rows(rows, pad, device="cpu"):
    """Lists of ids -> ids [B, T] padded on the right, lengths [B]."""
    T = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (T - len(row))] for row in rows], dtype=torch.long)
    return ids.to(device), torch.tensor([len(row) for row in rows], device=device)


def by_length(rows, micro):
    """Chunks of at most `micro` row numbers, like lengths together, so that little is padded."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    return [order[i:i + micro] for i in range(0, len(order), micro)]


def response_mask(starts, lengths, T):
    """mask [B, T], True at each row's response tokens: starts [B] <= t < starts + lengths [B].

    From lengths, never ids.
    """
    t = torch.arange(T, device=starts.device)
    return (t >= starts[:, None]) & (t < (starts + lengths)[:, None])


def shared_prompt_rows(prompts, responses, pad, device="cpu"):
    """Responses of one prompt in a row [prompt, r1, ..., rK]: each sees the prompt and itself.

    prompts: B lists of ids; responses: B lists of at most K lists of ids. Returns what `forward`
    takes, ids [B, T], lengths [B], positions [B, T] (each response goes on from its prompt) and
    until [B, T] (a prompt is seen to the row's end, a response to its own, a pad by itself), and
    ends [B, K], the index of each response's last token, 0 beyond a row's own number of them.
    """
    rows, K = [], max(map(len, responses))
    lengths = [len(p) + sum(map(len, rs)) for p, rs in zip(prompts, responses, strict=True)]
    T = max(lengths)
    for prompt, rs, length in zip(prompts, responses, lengths):
        ids, positions, until = list(prompt), list(range(len(prompt))), [length] * len(prompt)
        ends = []
        for r in rs:
            positions += range(len(prompt), len(prompt) + len(r))
            ids += r
            until += [len(ids)] * len(r)
            ends.append(len(ids) - 1)
        rows.append((ids + [pad] * (T - length), positions + [0] * (T - length),
                     [*until, *range(length + 1, T + 1)], ends + [0] * (K - len(ends))))
    ids, positions, until, ends = (torch.tensor(x, dtype=torch.long).to(device)
                                   for x in zip(*rows))
    return ids, torch.tensor(lengths, device=device), positions, until, ends


def packed(ids, lengths, positions, until):
    """Rows without their pads, one after another as one row of N tokens.

    Returns ids, positions, until, each [1, N]; place [B, T], where each token went; and real [N],
    where each came from in [B * T].
    """
    (B, T), device = ids.shape, ids.device
    lengths = torch.full((B,), T, device=device) if lengths is None else lengths
    until = lengths[:, None].expand(B, T) if until is None else until
    first = (lengths.cumsum(0) - lengths)[:, None]                       # [B, 1]
    t = torch.arange(T, device=device)
    real = (t < lengths[:, None]).flatten().nonzero()[:, 0]              # [N]
    place = torch.where(t < lengths[:, None], first + t, 0)
    return (*(x.flatten()[real][None] for x in (ids, positions, first + until)), place, real)


class Spread(torch.autograd.Function):
    """x [N, F] -> [B * T, F], its rows at the numbers `real`, 0 elsewhere."""

    @staticmethod
    def forward(ctx, x, real, number):
        ctx.save_for_backward(real)
        return x.new_zeros(number, x.shape[1]).index_copy_(0, real, x)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class Gather(torch.autograd.Function):
    """x [B * T, F] -> [N, F], its rows `real`, each of which is taken once: Spread turned round."""

    @staticmethod
    def forward(ctx, x, real):
        ctx.save_for_backward(real)
        ctx.number = len(x)
        return x.index_select(0, real)

    @staticmethod
    def backward(ctx, grad):
        real, = ctx.saved_tensors
        return grad.new_zeros(ctx.number, grad.shape[1]).index_copy_(0, real, grad), None


@dataclass(frozen=True)
class Rows:
    """What torch's attention sees: rows [B, T] with pads, and a mask (None: causal).

    real [N]: the numbers of the tokens that are no pads, which the rest of the network computes;
    None: all are.
    """
    shape: tuple
    mask: torch.Tensor | None = None
    real: torch.Tensor | None = None


# ---------------------------------------------------------------- the network

class Gelu(torch.autograd.Function):
    """GPT-2's gelu as x sigmoid(u), u = x (a + b x^2): torch's by tanh takes twice as long on CPUs.
    """
    a, b = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715

    @staticmethod
    def gate(x):
        return torch.addcmul(x.new_tensor(Gelu.a), x, x, value=Gelu.b).mul_(x).sigmoid_()

    @staticmethod
    def forward(ctx, x):
        s = Gelu.gate(x)
        y = x * s
        ctx.save_for_backward(x, s, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, s, y = ctx.saved_tensors                                  # y' = s + y (1 - s) u'
        slope = torch.addcmul(x.new_tensor(Gelu.a), x, x, value=3 * Gelu.b)
        return slope.mul_(torch.addcmul(y, y, s, value=-1)).add_(s).mul_(grad)


def gelu(x):
    """GPT-2's activation, x Phi(x) by its tanh approximation."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    return Gelu.apply(x) if torch.is_grad_enabled() else Gelu.gate(x).mul_(x)


def turned(qkv, cos, sin):
    """qkv [B, T, 3, H, D] with q and k turned by their positions (RoFormer, Su et al. 2021).

    Numbers i and i + d/2 of the first d of D are a point in a plane, cos and sin [B, T, 1, 1, d/2]
    those of its angle. So q . k depends on the distance of two positions alone.
    """
    half, (qk, v) = cos.shape[-1], qkv.split((2, 1), 2)
    a, b, rest = qk.split((half, half, qkv.shape[-1] - 2 * half), -1)
    qk = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    return torch.cat([qk.to(v.dtype), v], 2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head, self.turned = c.n_head, c.turned
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)

    def split(self, x, turns, rows=None):
        """x [B, T, C] -> q, k, v, each [B, H, T, D]; where Rows have pads, x is [1, N, C]."""
        (B, T, C), d = x.shape, self.turned
        bias = self.c_attn.bias
        if torch.is_grad_enabled():
            # The softmax does not see the keys' bias, but where positions turn it: the gradient of
            # the rest is rounding, Adam would grow it.
            q, k, v = bias.view(3, self.n_head, -1)
            bias = torch.stack([q, torch.cat([k[:, :d], k[:, d:].detach()], 1), v]).flatten()
        qkv = F.linear(x, self.c_attn.weight, bias)
        if turns is not None:
            qkv = turned(qkv.view(B, T, 3, self.n_head, -1), *turns).flatten(2)
        if rows is not None:
            B, T = rows.shape
            qkv = Spread.apply(qkv[0], rows.real, B * T)
        return qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4).unbind(0)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd)
        self.gelu = F.gelu if c.exact_gelu else gelu

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), MLP(c)
        self.parallel = c.parallel

    def forward(self, x, layout, turns=None, keep=None, asked=None):
        """x [B, T, C] -> the same, or only at `asked`, indices into the B * T tokens."""
        padded = layout if isinstance(layout, Rows) and layout.real is not None else None
        q, k, v = self.attn.split(self.ln_1(x), turns, padded)
        if keep is not None:
            keep.append((k, v))
        y = attention(q, k, v, layout).transpose(1, 2).flatten(2)    # [B, T, C] heads side by side
        if padded:
            y = Gather.apply(y.flatten(0, 1), padded.real)[None]     # [1, N, C]
        if asked is not None:
            x, y = x.flatten(0, 1)[asked], y.flatten(0, 1)[asked]    # [..., C]
        return self.add(x, y)

    def add(self, x, y):
        """x, and what the heads say to it, y [..., C] -> the block's end."""
        after = x + self.attn.c_proj(y)
        return after + self.mlp(self.ln_2(x if self.parallel else after))


def table(rows, width):
    """An embedding, not filled: what nn.Embedding draws takes long, on device "meta" an import of
    two seconds.
    """
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        if c.n_embd % c.n_head:
            raise ValueError(f"width {c.n_embd} is not divisible by {c.n_head} heads")
        if c.turned % 2:
            raise ValueError(f"rotary {c.rotary}: {c.turned} numbers of a head are no pairs")
        self.wte = table(-(-c.vocab // 64) * 64, c.n_embd)
        if not c.turned:
            self.wpe = table(c.n_ctx, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        if c.scalar:
            self.score_head = nn.Linear(c.n_embd, 1)
        elif not c.tied:
            self.lm_head = nn.Linear(*self.wte.weight.shape[::-1], bias=False)
        self.checkpoint = False   # in training, compute each block again in the backward pass
        self.reset()

    def reset(self, seed=0):
        """Weights N(0, std), residual projections / sqrt(2 layers), layer norms 1, the others 0.

        The others are the biases and the scalar head. std = 0.64 / sqrt(C) is GPT-2's 0.02 at
        width 1024. Narrow models learn to copy many times later with 0.02. On torch's device
        "meta", where tensors are but shapes, nothing is done.
        """
        if self.device.type == "meta":
            return self
        wide = 0.64 / math.sqrt(self.config.n_embd)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim < 2 or name.startswith("score_head"):
                nn.init.constant_(p, float(name.endswith("weight") and "ln_" in name))
            else:
                residual = name.endswith("c_proj.weight")
                std = wide / math.sqrt(2 * self.config.n_layer) if residual else wide
                with torch.no_grad():
                    p.copy_(torch.randn(p.shape, generator=generator) * std)
        return self

    def use(self, checkpoint=False, compile=False):
        """For training: blocks computed again in the backward pass; blocks through torch.compile,
        at once, so that what that lacks is told here.
        """
        self.checkpoint = checkpoint
        if compile:
            if ours := fused(self):
                ours.attention = torch.compiler.disable(ours.attention)
            for block in self.h:
                block.compile(dynamic=True)
            self(torch.zeros(2, 3, dtype=torch.long, device=self.device)).sum().backward()
            self.zero_grad(set_to_none=True)

    @property
    def device(self):
        return self.wte.weight.device

    def forward(self, ids, lengths=None, positions=None, until=None, at=None, keep=None,
                layers=None):
        """Hidden states [B, T, C] of ids [B, T], of which lengths [B] are real (None: all).

        at: an index of [B, T] (a mask, or a tuple of index tensors); only those hidden states are
        returned, and the last block ends there only. positions, until: of `shared_prompt_rows`;
        None is causal rows. `keep` (a list) collects each layer's k, v [B, H, T, D]; `layers`, with
        `at`, what enters each block there, and what leaves the last. At pads, what is returned has
        no meaning.
        """
        (B, T), ours, place, real = ids.shape, fused(self), None, None
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand(B, T)
        mask = None if until is None or ours else layout_of(until)
        if ours or lengths is not None and int(lengths.min()) < T:        # no pad is computed
            ids, positions, until, place, real = packed(ids, lengths, positions, until)
        if ours:
            width, dtype = self.config.n_embd // self.config.n_head, AUTOCAST.get(ids.device.type)
            layout = ours.plan(until, width, dtype or self.wte.weight.dtype)
        else:
            layout = Rows((B, T), mask, real)
        if at is not None:
            every = torch.arange(B * T, device=ids.device).view(B, T) if place is None else place
            asked = every[at]                             # numbers of tokens, of any shape
        with autocast(ids.device):
            x, turns = self.embed(ids, positions)         # [B, T, C], or [1, N, C] packed
            for i, block in enumerate(self.h):
                last = at is not None and i == len(self.h) - 1
                if layers is not None:
                    layers.append(x.flatten(0, 1)[asked])
                more = layout, turns, keep, asked if last else None
                if self.checkpoint and self.training:
                    x = checkpoint(block, x, *more, use_reentrant=False)
                else:
                    x = block(x, *more)
            if layers is not None:
                layers.append(x)
            x = self.ln_f(x)
        if ours and keep is not None:
            keep[:] = [[y[0].transpose(0, 1)[place].transpose(1, 2) for y in kv] for kv in keep]
        return x if at is not None or place is None else x[0][place]

    def embed(self, ids, positions):
        """ids, positions [B, T] -> x [B, T, C], and what `turned` takes (None: x has positions)."""
        d = self.config.turned
        if not d:
            return self.wte(ids) + self.wpe(positions), None
        steps = torch.arange(0, d, 2, dtype=torch.float32, device=ids.device) / d
        angles = positions[..., None, None, None].float() * (1 / 10000 ** steps)
        return self.wte(ids), (angles.cos(), angles.sin())

    def logits(self, hidden):
        """hidden [..., C] -> logits [..., V] in float32, less the ids that round the table up."""
        table = (self.wte if self.config.tied else self.lm_head).weight
        with autocast(hidden.device):
            return F.linear(hidden, table[:self.config.vocab]).float()

    def score(self, hidden):
        """hidden [..., C] -> scalar [...] in float32 (preference score, or value)."""
        weight, bias = self.score_head.weight.float(), self.score_head.bias.float()
        return F.linear(hidden.float(), weight, bias).squeeze(-1)

    def logprobs(self, ids, mask, temperature=1.0, lengths=None):
        """log p(ids[b, t] | ids[b, <t]) [B, T] where mask [B, T] is True, 0 elsewhere.

        The only owner of the shift by one: the hidden state at t-1 predicts token t, so mask[:, 0]
        must be False. `temperature` divides the logits, as in the sampler.
        """
        if mask[:, 0].any():
            raise ValueError("the first token of a row has no prediction")
        hidden = self(ids, lengths, at=F.pad(mask[:, 1:], (0, 1)))      # [N, C], only where asked
        logits = self.logits(hidden)
        logits = logits if temperature == 1 else logits / temperature
        picked = -F.cross_entropy(logits, ids[mask], reduction="none")  # [N]
        return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, picked)

    def decode(self, ids, positions, t, cache):
        """One token a row, the t-th after its prompt: ids, positions [B] -> hidden [B, C]."""
        with autocast(ids.device):
            x, turns = self.embed(ids[:, None], positions[:, None])        # [B, 1, C]
            for layer, block in enumerate(self.h):
                q, k, v = block.attn.split(block.ln_1(x), turns)           # [B, H, 1, D]
                x = block.add(x, cache.attend(layer, q, k, v, t))
            return self.ln_f(x)[:, 0]


# ---------------------------------------------------------------- generation

def filter_logits(logits, top_k=0, top_p=1.0):
    """-inf outside the top_k largest and outside the nucleus.

    Nucleus: a token stays if the mass BEFORE it is under top_p.
    """
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p < 1:
        ordered, order = logits.cpu().double().sort(descending=True, stable=True)  # mps: no float64
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        keep = before < max(top_p, 1e-12)
        keep[..., 0] = True
        outside = ~torch.zeros_like(keep).scatter(-1, order, keep)
        logits = logits.masked_fill(outside.to(logits.device), -math.inf)
    return logits


def draw(logps, uniform):
    """Inverse-CDF draws: log-probs [B, V], uniform [B] in [0, 1), one a token -> ids [B]."""
    cdf = logps.exp().cumsum(-1)                                        # [B, V]
    picked = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())            # rounding at the very end
    return torch.minimum(picked, last)[:, 0]


class Cache:
    """Keys and values of P prompts, each read once, and of the m rows that go on from each.

    For each layer a pair (k, v): prompt [P, H, S, D], of whose slots lengths [P] are filled, and
    own [P, H, m, new, D], the rows' own tokens, equally many in all. No own: each prompt has one
    row, whose tokens go to the prompt's slots from `first` on; what is between, nobody sees.
    """

    def __init__(self, prompt, own, lengths, first, ours):
        self.prompt, self.own, self.lengths = prompt, own, lengths
        self.first, self.ours = first, ours
        if prompt:
            P, H, S, _ = prompt[0][0].shape
            slots = torch.arange(S, device=lengths.device)
            unseen = (slots >= lengths[:, None]) & (slots < first)                    # [P, S]
            bias = torch.zeros_like(unseen, dtype=prompt[0][0].dtype)
            self.bias = bias.masked_fill_(unseen, -math.inf).repeat_interleave(H, 0)[:, None]

    def attend(self, layer, q, k, v, t):
        """Attention of one new token a row: q, k, v [P m, H, 1, D] -> [P m, 1, C], heads merged.

        k and v are written to slot t first. t is a number, or for attention.py a tensor [1].
        """
        P, H, D = len(self.lengths), q.shape[1], q.shape[3]
        m, (far_k, far_v) = len(q) // P, self.prompt[layer]
        if not self.own:                                                      # one row a prompt
            end = self.first + t + 1
            far_k[:, :, end - 1], far_v[:, :, end - 1] = k[:, :, 0], v[:, :, 0]
            far_k, far_v = far_k[:, :, :end].flatten(0, 1), far_v[:, :, :end].flatten(0, 1)
            scores = torch.baddbmm(self.bias[..., :end], q.flatten(0, 1), far_k.mT, alpha=D ** -0.5)
            return torch.bmm(scores.softmax(-1), far_v).view(P, 1, H * D)
        q, k, v = (x.view(P, m, H, D).transpose(1, 2) for x in (q, k, v))     # [P, H, m, D]
        near_k, near_v = self.own[layer]
        if self.ours:
            y = self.ours.decode(q, k, v, self.prompt[layer], self.own[layer], self.lengths, t)
        else:
            near_k[..., t, :], near_v[..., t, :] = k, v
            far_k, far_v = far_k.flatten(0, 1), far_v.flatten(0, 1)           # [P H, S, D]
            near_k, near_v = (x[..., :t + 1, :].flatten(0, 2) for x in (near_k, near_v))
            q = (q * D ** -0.5).reshape(P * H, m, D)
            far = torch.baddbmm(self.bias, q, far_k.mT)                       # [P H, m, S]
            near = torch.bmm(q.reshape(-1, 1, D), near_k.mT).view(P * H, m, t + 1)
            far, near = torch.cat([far, near], -1).softmax(-1).split([far.shape[-1], t + 1], -1)
            y = torch.bmm(near.flatten(0, 1)[:, None], near_v).view(P * H, m, D)
            y = (y + torch.bmm(far, far_v)).view(P, H, m, D)
        return y.transpose(1, 2).reshape(P * m, 1, H * D)

    def select(self, prompts, places):
        """The Cache of some prompts, and of them the rows at places [len(prompts), m]."""
        def of(kv):
            chosen = kv[prompts]                                              # [P, H, m, new, D]
            index = places[:, None, :, None, None].expand(-1, kv.shape[1], -1, *kv.shape[3:])
            return chosen.gather(2, index)
        return Cache([(k[prompts], v[prompts]) for k, v in self.prompt],
                     [(of(k), of(v)) for k, v in self.own], self.lengths[prompts], self.first,
                     self.ours)


def at_once(c):
    """Tokens of prompts that a GPU reads at a time: more give it no more work, and take memory, of
    which this is 4 GB at most ((10 L + 32) C bytes a token, runs/counts.py).
    """
    return min(65536, 2 ** 32 // ((10 * c.n_layer + 32) * c.n_embd))


def prefill(model, prompts, n, new, pad):
    """Reads the prompts, of like lengths together: hidden state of each one's last token, Cache."""
    c, device, ours = model.config, model.device, fused(model)
    longest, P, D, apart = max(map(len, prompts)), len(prompts), c.n_embd // c.n_head, n > 1 or ours
    like = dict(dtype=AUTOCAST.get(device.type, torch.get_default_dtype()), device=device)

    def pairs(*shape):  # a tensor each: one of all layers is new memory each time, slow to touch
        return [(torch.empty(shape, **like), torch.empty(shape, **like)) for _ in range(c.n_layer)]

    prompt = pairs(P, c.n_head, longest if apart else longest + new, D)
    own = pairs(P, c.n_head, n, new, D) if apart else []
    hidden, lengths = [], torch.tensor([len(p) for p in prompts], device=device)
    many = max(1, (at_once(c) if ours else 512) // longest)                  # rows at a time
    for i in range(0, P, many):
        ids, some = pad_rows(prompts[i:i + many], pad, device)
        kept, last = [], (torch.arange(len(some), device=device), some - 1)
        hidden.append(model(ids, some, at=last, keep=kept))
        for slots, kv in zip(prompt, kept):
            for part, x in zip(slots, kv):
                part[i:i + many, :, :ids.shape[1]] = x
                part[i:i + many, :, ids.shape[1]:longest] = 0                # times 0 it must be 0
    return torch.cat(hidden), Cache(prompt, own, lengths, longest, ours)


def replayed(f, *inputs):
    """f as a CUDA graph: captured with these inputs, whose values each call replaces."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f(*inputs), f(*inputs)           # compiles what there is to compile
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f(*inputs)

    def replay(*values):
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        graph.replay()
        return out
    return replay


@torch.no_grad()
def generate(model, prompts, new, uniform=None, n=1, temperature=1.0, top_k=0, top_p=1.0, stops=(),
             pad=0, on_token=None):
    """Sample up to `new` tokens after each prompt, n samples a prompt (read once).

    prompts: lists of ids, of any lengths. uniform [B * n, new] in [0, 1) are the random numbers
    (row-major by prompt); None takes the likeliest token. A row ends after an id of `stops`, which
    is part of it. on_token(row, id) is told each token as it comes.

    Returns tokens [B * n, new] (padded), lengths [B * n] and logps [B * n, new]: the log-probs of
    exactly the distribution that was sampled, temperature and filters included.
    """
    longest, n_ctx = max(map(len, prompts)), model.config.n_ctx
    if longest + new > n_ctx:
        raise ValueError(f"prompt of {longest} tokens + {new} new ones > context of {n_ctx}")
    device, B = model.device, len(prompts) * n
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    hidden, cache = prefill(model, [prompts[i] for i in order], n, new, pad)
    hidden, at = (x.repeat_interleave(n, 0) for x in (hidden, cache.lengths))        # [P m, ...]
    # The row of the result that a computed one fills; those that have ended fill row B, cut off.
    rows = (torch.tensor(order)[:, None] * n + torch.arange(n)).flatten().to(device)
    tokens = torch.full((B + 1, new), pad, device=device)
    logps = torch.zeros(B + 1, new, device=device)
    done_at = torch.full((B + 1,), new, device=device)
    stops = torch.tensor(stops, dtype=torch.long, device=device)
    uniform = F.pad(uniform.to(device), (0, 0, 0, 1)) if uniform is not None else None
    step, graphs = None, cache.ours and device.type == "cuda"
    for t in range(new):
        logits = model.logits(hidden)                                                # [P m, V]
        logits = logits if temperature == 1 else logits / temperature
        logp = filter_logits(logits, top_k, top_p).log_softmax(-1)
        picked = logp.argmax(-1) if uniform is None else draw(logp, uniform[rows, t])
        tokens[rows, t], logps[rows, t] = picked, logp.gather(1, picked[:, None])[:, 0]
        if on_token:
            for row, token in sorted(zip(rows.tolist(), picked.tolist(), strict=True)):
                if row < B:
                    on_token(row, token)
        if len(stops):
            ended = torch.isin(picked, stops) & (rows < B)
            done_at[rows[ended]] = t + 1
            rows = rows.masked_fill(ended, B)
            left = without_ended(rows < B, cache, 0.5 if graphs else 0.75)
            if left:
                cache, index, step = *left, None
                rows, picked, at = rows[index], picked[index], at[index]
        if t == new - 1 or not len(rows):
            break
        slot = torch.tensor([t], device=device) if cache.ours else t
        if step is None:
            step = functools.partial(model.decode, cache=cache)
            step = replayed(step, picked.clone(), at + t, slot) if graphs else step
        hidden = step(picked, at + t, slot)
    return tokens[:B], done_at[:B], logps[:B]


def without_ended(living, cache, full):
    """(Cache, numbers of the rows kept) once at most `full` of the rows would be left, else None.

    living [P m]: prompts leave with their last row; each keeps as many as the one with most.
    """
    living = living.view(len(cache.lengths), -1)                                      # [P, m]
    count = living.sum(1)
    most, prompts = int(count.max()), count.nonzero()[:, 0]
    if len(prompts) * most > full * living.numel():
        return None
    places = (~living[prompts]).int().argsort(dim=1, stable=True)[:, :most]
    return cache.select(prompts, places), (prompts[:, None] * living.shape[1] + places).flatten()


@torch.no_grad()
def respond(model, tok, prompts, new, uniform=None, chunk=128, **sampling):
    """Answers as text to prompts (lists of ids up to an assistant header), `chunk` rows at a time.

    uniform [len(prompts), new] or None for the likeliest tokens. Returns a list of (text, whether
    it ended its turn).
    """
    out = []
    for i in range(0, len(prompts), chunk):
        part = None if uniform is None else uniform[i:i + chunk]
        tokens, lengths, _ = generate(model, prompts[i:i + chunk], new, part, stops=tok.stops,
                                      pad=tok.pad, **sampling)
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            out.append((tok.decode(row[:length]).strip(), row[length - 1] == tok.eot))
    return out


# ---------------------------------------------------------------- checkpoints

def averaged(a, b, weight):
    """(1 - weight) a + weight b of two state dicts; weight 0 is a and 1 is b, bit for bit.

    ValueError for other names or shapes: broadcasting would hide them.
    """
    if {k: x.shape for k, x in a.items()} != {k: x.shape for k, x in b.items()}:
        raise ValueError("tensors of other names or shapes")
    if weight in (0, 1):                                 # else -0.0 would become 0.0
        return dict(b if weight else a)
    return {k: (1 - weight) * x + weight * b[k] for k, x in a.items()}


def pack(model, tok):
    """What a checkpoint says of a model: sizes, weights, tokenizer."""
    return dict(gpt=asdict(model.config), model=model.state_dict(), tokenizer=tok.dumps())


def unpack(content, device="cpu", scalar=None):
    """A GPT from `pack`; scalar=True adds a fresh scalar head to a language model, False drops it.

    Its weights are a copy, the only memory that this takes. ValueError if they don't fit the sizes.
    """
    config = GPTConfig(**content["gpt"])
    wanted = config if scalar is None else GPTConfig(**{**content["gpt"], "scalar": scalar})
    with torch.device("meta"):                            # nothing is drawn that is replaced
        model = GPT(wanted)
    weights, other = {}, "lm_head" if wanted.scalar else "score_head"
    if wanted.scalar and not config.scalar:               # as `reset` has it
        weights = {k: torch.zeros(x.shape, device=device) for k, x in model.state_dict().items()
                   if k.startswith("score_head")}
    for name, x in content["model"].items():
        if not name.startswith(other):
            weights[name] = x.detach().to(device, torch.float32, copy=True,
                                          memory_format=torch.contiguous_format)
    missing, extra = model.load_state_dict(weights, strict=False, assign=True)
    if missing or extra:
        raise ValueError(f"weights do not fit the sizes: {(missing + extra)[:3]}")
    return model
