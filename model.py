"""The GPT, all of it: attention, blocks, heads, log-probs, KV-cached generation.

GPT-2's architecture and parameter names. Letters: B rows, T positions, P prompt tokens, R response
tokens, C width, H heads, D = C / H head width, V vocabulary, S cache slots.

`forward` returns hidden states [B, T, C]; the language-model head is applied only where a log-prob
is needed (`logprobs`), and `score` is the scalar head of the preference model and the critic.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = 512       # ids that exist; the embedding has a multiple of 64, the rest is unread
    n_ctx: int = 256       # positions
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128      # width C
    scalar: bool = False   # has the scalar head (preference model, critic)


# name -> (layers, heads, width); the toy sizes grow by about 4x in parameters, four are GPT-2's
SIZES = {"nano": (2, 2, 48), "micro": (3, 3, 72), "toy": (4, 4, 128), "mini": (6, 6, 192),
         "small": (6, 6, 384), "gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024),
         "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}


def sized(name, vocab, n_ctx, scalar=False):
    """The GPTConfig of a named size."""
    if name not in SIZES:
        raise ValueError(f"size {name!r}: choose from {', '.join(SIZES)}")
    return GPTConfig(vocab, n_ctx, *SIZES[name], scalar)


# ---------------------------------------------------------------- attention

def attention_reference(q, k, v, mask=None):
    """Definition: softmax(q k^T / sqrt(D)) v, with q, k, v [B, H, T, D].

    mask [B, 1, T, T] is True where i may see j; None is causal.
    """
    T = q.shape[2]
    if mask is None:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])    # [B, H, T, T] flows from j to i
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v  # [B, H, T, D]


def attention(q, k, v, mask=None):
    """The same by torch's fused kernel."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def shared_prompt_rows(prompts, responses, pad):
    """Responses of one prompt in a row [prompt, r1, ..., rK]: each sees the prompt and itself.

    prompts: B lists of ids; responses: B lists of at most K lists of ids. Returns ids [B, T],
    positions [B, T] (each response goes on from its prompt), mask [B, 1, T, T], and ends [B, K],
    the index of each response's last token, 0 beyond a row's own number of them. Pads see only
    themselves, and nothing sees them.
    """
    B, K = len(prompts), max(map(len, responses))
    T = max(len(p) + sum(map(len, rs)) for p, rs in zip(prompts, responses, strict=True))
    ids, positions = torch.full((B, T), pad), torch.zeros(B, T, dtype=torch.long)
    segment = torch.full((B, T), -1)                      # -1 pad, 0 prompt, k response k
    ends = torch.zeros(B, K, dtype=torch.long)
    for b, (prompt, rs) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt)
        ids[b, :end], segment[b, :end] = torch.tensor(prompt), 0
        positions[b, :end] = torch.arange(end)
        for k, r in enumerate(rs):
            cut = slice(end, end + len(r))
            ids[b, cut], segment[b, cut] = torch.tensor(r), k + 1
            positions[b, cut] = torch.arange(len(prompt), len(prompt) + len(r))
            end += len(r)
            ends[b, k] = end - 1
    i, j = segment[:, :, None], segment[:, None, :]
    mask = ((j == 0) | (j == i)) & (i >= 0) & (j >= 0)
    mask &= torch.ones(T, T, dtype=torch.bool).tril()
    mask |= torch.eye(T, dtype=torch.bool)
    return ids, positions, mask[:, None], ends


# ---------------------------------------------------------------- the network

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n_head = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)

    def split(self, x):
        """x [B, T, C] -> q, k, v, each [B, H, T, D]."""
        B, T, C = x.shape
        q, k, v = self.c_attn.bias.split(C)
        # The softmax does not see the keys' bias: its gradient is rounding, and Adam would grow it.
        bias = torch.cat([q, k.detach(), v])
        qkv = F.linear(x, self.c_attn.weight, bias).view(B, T, 3, self.n_head, C // self.n_head)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def merge(self, y):
        """y [B, H, T, D] -> [B, T, C], heads side by side and mixed."""
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), MLP(c)

    def forward(self, x, mask, keep=None):
        q, k, v = self.attn.split(self.ln_1(x))
        if keep is not None:
            keep.append((k, v))
        x = x + self.attn.merge(attention(q, k, v, mask))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        if c.n_embd % c.n_head:
            raise ValueError(f"width {c.n_embd} is not divisible by {c.n_head} heads")
        self.wte = nn.Embedding(-(-c.vocab // 64) * 64, c.n_embd)
        self.wpe = nn.Embedding(c.n_ctx, c.n_embd)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        if c.scalar:
            self.score_head = nn.Linear(c.n_embd, 1)
        self.reset()

    def reset(self, seed=0):
        """Weights N(0, std), residual projections / sqrt(2 layers), layer norms 1, the others 0.

        The others are the biases and the scalar head. std = 0.64 / sqrt(C) is GPT-2's 0.02 at
        width 1024. Narrow models learn to copy many times later with 0.02.
        """
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

    @property
    def device(self):
        return self.wte.weight.device

    def forward(self, ids, positions=None, mask=None, keep=None):
        """Hidden states [B, T, C] of ids [B, T].

        mask None is causal; `keep` (a list) collects each layer's k, v.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)      # [B, T, C]
        for block in self.h:
            x = block(x, mask, keep)
        return self.ln_f(x)

    def logits(self, hidden):
        """hidden [..., C] -> logits [..., V] in float32, less the ids that round the table up."""
        return F.linear(hidden, self.wte.weight[:self.config.vocab]).float()

    def score(self, hidden):
        """hidden [..., C] -> scalar [...] in float32 (preference score, or value)."""
        return self.score_head(hidden).squeeze(-1).float()

    def logprobs(self, hidden, ids, mask, temperature=1.0):
        """log p(ids[b, t] | ids[b, <t]) [B, T] where mask [B, T] is True, 0 elsewhere.

        The only owner of the shift by one: the hidden state at t-1 predicts token t, so mask[:, 0]
        must be False. `temperature` divides the logits, as in the sampler.
        """
        if mask[:, 0].any():
            raise ValueError("the first token of a row has no prediction")
        flat = self.logits(hidden[:, :-1][mask[:, 1:]]) / temperature   # [N, V], only where asked
        picked = -F.cross_entropy(flat, ids[mask], reduction="none")    # [N]
        return torch.zeros(ids.shape, device=ids.device).masked_scatter(mask, picked)

    def decode(self, ids, positions, cache, slot, bias):
        """One token a row through the cache: ids, positions [B] -> hidden [B, C].

        cache: (k, v), each [layers, B, H, S, D], written at slot `slot`; bias [B * H, 1, slot + 1],
        -inf where a row has only padding. As batched matrix products: one query a row and head.
        """
        keys, values = cache
        x = (self.wte(ids) + self.wpe(positions))[:, None]                # [B, 1, C]
        for layer, block in enumerate(self.h):
            q, k, v = block.attn.split(block.ln_1(x))                     # [B, H, 1, D]
            keys[layer, :, :, slot], values[layer, :, :, slot] = k[:, :, 0], v[:, :, 0]
            k = keys[layer, :, :, :slot + 1].flatten(0, 1)                # [B * H, slot + 1, D]
            v = values[layer, :, :, :slot + 1].flatten(0, 1)
            scores = torch.baddbmm(bias, q.flatten(0, 1), k.mT, alpha=q.shape[-1] ** -0.5)
            y = torch.bmm(scores.softmax(-1), v)                          # [B * H, 1, D]
            x = x + block.attn.merge(y.view_as(q))
            x = x + block.mlp(block.ln_2(x))
        return self.ln_f(x)[:, 0]


def pad_rows(rows, pad, device="cpu"):
    """Lists of ids -> ids [B, T] padded on the right, lengths [B]."""
    lengths = torch.tensor([len(r) for r in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad)
    for b, row in enumerate(rows):
        ids[b, :len(row)] = torch.tensor(row)
    return ids.to(device), lengths.to(device)


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


def draw(logits, uniform):
    """Inverse-CDF draws: logits [B, V], uniform [B] in [0, 1), one a token -> ids [B]."""
    cdf = logits.softmax(-1).cumsum(-1)                                 # [B, V]
    picked = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0]
    last = (logits > -math.inf).int().cumsum(-1).argmax(-1)
    return torch.minimum(picked, last)                                  # rounding at the very end


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
    longest, c = max(map(len, prompts)), model.config
    if longest + new > c.n_ctx:
        raise ValueError(f"prompt of {longest} tokens + {new} new ones > context of {c.n_ctx}")
    device, B = model.device, len(prompts) * n
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    keys = torch.empty(c.n_layer, B, c.n_head, longest + new, c.n_embd // c.n_head, device=device)
    values, hidden = torch.empty_like(keys), torch.empty(B, c.n_embd, device=device)
    for cache in (keys, values):
        cache[:, :, :, :longest] = 0                                    # 0 times it must be 0
    for some in (order[i:i + 32] for i in range(0, len(order), 32)):    # prefill, similar lengths
        ids, lengths = pad_rows([prompts[i] for i in some], pad, device)
        kept = []
        out = model(ids, keep=kept)
        rows = torch.tensor([i * n + j for i in some for j in range(n)], device=device)
        last = out[torch.arange(len(some), device=device), lengths - 1]
        hidden[rows] = last.repeat_interleave(n, 0)
        for layer, (k, v) in enumerate(kept):
            for cache, x in ((keys, k), (values, v)):
                x = x.repeat_interleave(n, 0) if n > 1 else x
                cache[layer, rows, :, :ids.shape[1]] = x
    lengths = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(n)  # [B]
    # New tokens go to slots longest, longest + 1, ...; what is between a prompt and there, unseen.
    bias = torch.zeros(B, c.n_head, 1, longest + new, device=device)
    outside = torch.arange(longest, device=device) >= lengths[:, None]              # [B, longest]
    bias[..., :longest].masked_fill_(outside[:, None, None], -math.inf)
    tokens = torch.full((B, new), pad, device=device)
    logps, done_at = torch.zeros(B, new, device=device), torch.full((B,), new, device=device)
    live = torch.arange(B, device=device)
    stops = torch.tensor(stops, dtype=torch.long, device=device)
    uniform = uniform.to(device) if uniform is not None else None
    for t in range(new):
        logits = filter_logits(model.logits(hidden) / temperature, top_k, top_p)  # [live, V]
        picked = logits.argmax(-1) if uniform is None else draw(logits, uniform[live, t])
        tokens[live, t] = picked
        logps[live, t] = -F.cross_entropy(logits, picked, reduction="none")
        if on_token:
            for row, token in zip(live.tolist(), picked.tolist(), strict=True):
                on_token(row, token)
        ended = torch.isin(picked, stops)
        if ended.any():
            done_at[live[ended]] = t + 1
            keep = (~ended).nonzero()[:, 0]
            live, picked, lengths, bias = live[keep], picked[keep], lengths[keep], bias[keep]
            keys, values = keys[:, keep], values[:, keep]
        if not len(live) or t == new - 1:
            break
        hidden = model.decode(picked, lengths + t, (keys, values), longest + t,
                              bias[..., :longest + t + 1].flatten(0, 1))
    return tokens, done_at, logps


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

def pack(model, tok):
    """What a checkpoint says of a model: sizes, weights, tokenizer."""
    return dict(gpt=asdict(model.config), model=model.state_dict(), tokenizer=tok.dumps())


def unpack(content, device="cpu", scalar=None):
    """A GPT from `pack`; scalar=True adds a fresh scalar head to a language model, False drops it.

    ValueError if the weights do not fit the sizes.
    """
    config = GPTConfig(**content["gpt"])
    wanted = config if scalar is None else GPTConfig(**{**content["gpt"], "scalar": scalar})
    model = GPT(wanted)
    weights = {k: v for k, v in content["model"].items()
               if wanted.scalar or not k.startswith("score_head")}
    missing, extra = model.load_state_dict(weights, strict=False)
    if extra or [k for k in missing if config.scalar or not k.startswith("score_head")]:
        raise ValueError(f"weights do not fit the sizes: {(missing + extra)[:3]}")
    return model.to(device)
