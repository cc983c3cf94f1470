"""The memory of each stage on one rank, counted from shapes: no model is made.

    peak = max over a step's phases of what is held and what passes by

Letters: N parameters, L layers, C width, H heads, V rows of the embedding (the vocabulary rounded
up to a multiple of 64), T tokens of a row, n tokens of a micro-batch, m its positions at which the
head is applied, S slots of a row's cache, R ranks. All in bytes. On CPUs everything is float32; on
GPUs matrix products take and give bf16, and what they keep for the backward pass is bf16.

Held, of each trained model; --shard divides it by R:
    weights 4 N, gradients 4 N, Adam 8 N; of a frozen model 4 N, never cut
Kept by a block for the backward pass, a token:            CPU          GPU
    x, which ln_1 reads                                    4 C          4 C
    mean and spread of two norms                           16           16
    ln_1's output, which c_attn reads                      4 C          2 C
    q, k, v                                                12 C         6 C
    the heads' output, log-sum-exp                         4 C + 4 H    2 C + 4 H
    x + attention, which ln_2 reads (not in Pythia)        4 C          4 C
    ln_2's output, which c_fc reads                        4 C          2 C
    into gelu, out of it (CPU: our own gate, not Pythia)   32 C + 16 C  16 C
    the mask, where answers share a prompt                 4 T          0
  The last block keeps from "x + attention" on only its m positions, and 4 C (2 C) more for each.
  --checkpoint: a block keeps x alone; the rest exists for one block at a time.
Kept by ln_f and the head, for each of m: 8 C (6 C), and the norm's 8
Passing, the largest of
    logits, log-probs, their gradients: 3 * 4 V m; distillation's two classes: 5 * 4 V m
    a block's backward pass: 52 C n, Pythia 24 C n (16 C n); the last block's attention: 20 C n
    the embedding's gradients, of the head and of the ids, as products: 2 * 4 V C
  Where head and embedding are one, the first 4 V C stay to the end of the backward pass.
  GPU: weights in bf16, 2 N of the blocks and 2 V C, to the end of the pass, which torch keeps whole
  even where the weights are cut; with --checkpoint those of one block or the head.
Sampling, per row: keys and values, 2 L C S numbers (4 or 2 bytes); 5 * 4 V for logits. Once rows
  have ended the living ones' caches are copied: 3/4 of them (GPU 1/2) exist twice. Reading prompts,
  512 tokens at a time (GPU 65,536, or what takes 4 GB): q, k, v of all layers, GPU also a copy,
  32 C of a block.
--shard: tables whole with their gradients; two blocks whole, and their gradients. For sampling and
  evaluation each trained model whole, 4 N.
PPO: policy and critic trained, reference and preference model frozen; sampling and scoring are
  phases of their own, in which one process has no gradients; several keep the space for them.

Not counted: what an allocator keeps of what was freed (malloc with common.keep_memory: half a GB
beside 1 GB), CUDA's own half GB, 0.4 GB of Python and torch. The GPU's column is that of the fused
kernels, which take heads of 128 numbers at most: pythia-1b's have 256, and torch's own attention,
with a mask and smaller parts of prompts, is not counted. A step that is one micro-batch on one
rank takes less: its gradients come as its activations go.
"""

from dataclasses import dataclass, replace

from model import GPTConfig, at_once

TRAINED = ("pretrain", "distill", "sft", "preference", "ppo")
STAGES = (*TRAINED, "sampling")


@dataclass(frozen=True)
class Job:
    """A stage as it runs on one of its ranks."""
    stage: str
    model: GPTConfig
    micro: int = 8             # rows of a micro-batch
    length: int = 1024         # tokens of a row, the longest
    new: int = 128             # of them an answer's
    samples: int = 64          # rows that are sampled at once on this rank
    ranks: int = 1
    shard: bool = False
    checkpoint: bool = False
    cuda: bool = True

    @property
    def asked(self):
        """m: positions of a micro-batch at which the head is applied."""
        row = dict(preference=2, sft=self.new, ppo=self.new).get(self.stage, self.length - 1)
        return self.micro * row

    @property
    def cut(self):
        return self.ranks if self.shard else 1


def parameters(c):
    """Number of parameters of GPT(c), c a GPTConfig: L (12 C^2 + 13 C) in blocks, tables, heads.

    12 C^2 are the matrices (q, k, v 3, the heads' projection 1, the MLP 4 + 4), 13 C their biases
    (3 + 1 + 4 + 1) and two norms (2 + 2).
    """
    C, V = c.n_embd, rows(c)
    tables = V * C + (0 if c.turned else c.n_ctx * C)
    head = C + 1 if c.scalar else 0 if c.tied else V * C
    return tables + c.n_layer * of_a_block(c) + 2 * C + head


def of_a_block(c):
    """Number of parameters of a block."""
    return 12 * c.n_embd ** 2 + 13 * c.n_embd


def rows(c):
    """V."""
    return -(-c.vocab // 64) * 64


def scalar(c):
    """The preference model or critic of a language model."""
    return replace(c, scalar=True)


# ---------------------------------------------------------------- a backward pass

def block(c, cuda, mask=0):
    """Bytes that a block keeps of a token: up to the heads' output, and from there on."""
    C, serial = c.n_embd, not c.parallel
    if cuda:
        return 14 * C + 4 * c.n_head + 8, (18 + 4 * serial) * C + 8
    gelu = 8 if c.exact_gelu else 12
    return 4 * (6 * C + c.n_head + 2) + mask, 4 * ((1 + gelu + serial) * C + 2)


def backward(job, c):
    """{moment: {term: bytes}} of a micro-batch's forward and backward pass through one model."""
    L, C, V, n, m = c.n_layer, c.n_embd, rows(c), job.micro * job.length, job.asked
    cuda, head, table = job.cuda, not c.scalar, 4 * rows(c) * c.n_embd
    shared = job.stage == "preference" and not cuda
    attend, mlp = block(c, cuda, 4 * job.length * shared)
    mask, x = n * job.length * shared, 4 * C
    end = m * ((6 if cuda else 8) * C + 8)
    last = m * (mlp + (2 if cuda else 4) * C + 4 * C * c.parallel)
    if job.checkpoint:
        kept, again = n * x, dict(again=n * (attend - x))
        whole, before = dict(again=n * (attend + mlp - x)), (L - 1) * n * x
        blocks = L * kept
    else:
        again, whole, before = {}, {}, (L - 1) * n * (attend + mlp)
        blocks = before + n * attend
        end += last
    half = dict(bf16=2 * 12 * L * C * C + 2 * V * C * head) if cuda else {}
    one = dict(bf16=2 * 12 * C * C) if cuda else {}
    late = one if job.checkpoint else half
    share = dict(table=table) if head and c.tied else {}
    passing = 16 * C if cuda else 4 * C * (6 if c.exact_gelu else 13)
    classes = 5 if job.stage == "distill" else 3
    return {
        "forward": dict(kept=blocks + end, mask=mask, **late),
        "head": dict(kept=blocks + end, mask=mask, logits=classes * 4 * V * m * head, **late),
        "head's weights": dict(kept=blocks + end, logits=2 * table * head, **late),
        "last block": dict(kept=blocks, mask=mask, passing=20 * C * n, **again, **share, **late),
        "a block": dict(kept=before, mask=mask, passing=passing * n, **whole, **share, **late),
        "embedding": dict(passing=4 * C * n, table=table * (1 + (head and c.tied))),
    }


# ---------------------------------------------------------------- sampling

def cache(c, slots, cuda):
    """Bytes of a row's keys and values."""
    return 2 * c.n_layer * c.n_embd * slots * (2 if cuda else 4)


def sampling(job, c):
    """{moment: {term: bytes}} of answers to `samples` prompts at once."""
    C, prompt = c.n_embd, job.length - job.new
    many = max(1, (at_once(c) if job.cuda else 512) // prompt)
    tokens = min(job.samples, many) * prompt
    reading = tokens * ((10 * c.n_layer + 32) * C if job.cuda else 4 * (3 * c.n_layer + 9) * C)
    held = job.samples * cache(c, job.length, job.cuda)
    copied = held // 2 if job.cuda else 3 * held // 4
    return {"prompts": dict(caches=held, reading=reading),
            "sampling": dict(caches=held, copies=copied, logits=5 * 4 * rows(c) * job.samples)}


# ---------------------------------------------------------------- phases

def gathered(c, R):
    """Bytes that a sharded model's pass holds whole beside the shards of R ranks."""
    blocks = c.n_layer * of_a_block(c)
    return 4 * (2 * (parameters(c) - blocks) + 4 * of_a_block(c)) * (R > 1)


def phases(job):
    """{phase: {term: bytes}} of a step of the job. Its memory is the largest sum."""
    c = job.model
    if job.stage == "sampling":
        return {k: dict(weights=4 * parameters(c), **x) for k, x in sampling(job, c).items()}
    trained = {"ppo": [c, scalar(c)], "preference": [scalar(c)]}.get(job.stage, [c])
    frozen = {"ppo": [c, scalar(c)], "distill": [c]}.get(job.stage, [])
    size = sum(map(parameters, trained))
    held = dict(weights=4 * size // job.cut, adam=8 * size // job.cut)
    if frozen:
        held["frozen"] = 4 * sum(map(parameters, frozen))
    gradients = dict(gradients=4 * size // job.cut)
    found = {"update": {**held, **gradients}}
    for one in trained:
        more = dict(gathered=gathered(one, job.ranks)) if job.shard else {}
        for moment, terms in backward(job, one).items():
            name = moment + (", critic" if one.scalar and job.stage == "ppo" else "")
            found[name] = {**held, **gradients, **more, **terms}
    if job.shard and job.ranks > 1:
        held["whole"] = 4 * size
    elif job.ranks > 1:
        held |= gradients                           # DistributedDataParallel's buckets
    if job.stage == "ppo":
        found |= {k: {**held, **x} for k, x in sampling(job, c).items()}
        found["scoring"] = {**held, "logits": 6 * 4 * rows(c) * job.asked}
    elif job.shard:
        found["evaluation"] = {**held, "logits": 2 * 4 * rows(c) * job.asked * (not c.scalar)}
    return found


def peak(job, without=()):
    """(bytes, phase, {term: bytes}) of the largest phase; terms in `without` are elsewhere."""
    found = {phase: {k: n for k, n in terms.items() if n and k not in without}
             for phase, terms in phases(job).items()}
    name = max(found, key=lambda k: sum(found[k].values()))
    return sum(found[name].values()), name, found[name]
