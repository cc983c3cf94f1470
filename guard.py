"""A guard of prompts: a score of how unlike ordinary ones a prompt is, from the activations of a
model that reads it (HH 5.4, B.9). ood.py has the equations, and makes and measures guards.

A guard is a checkpoint with the statistics of one layer, a threshold and the name of the model that
reads; load(path).refusal(turns) says why a talk is declined, before anything is generated.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

from common import UserError, load_checkpoint, load_source
from data.tokenizer import Tokenizer, fit as fit_turns, loads
from measures import sigmoid
from model import GPT, by_length, pad_rows, response_mask, unpack

KINDS, POOLS = ("plain", "diagonal", "relative", "exposure"), ("last", "mean")


# ---------------------------------------------------------------- distances

def table(x):
    """x as float64 [prompts, features]; ValueError for a value that is not finite."""
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 2 or not np.isfinite(x).all():
        raise ValueError("an activation is not finite: nan or inf" if x.ndim == 2
                         else f"activations are [prompts, features], not {x.shape}")
    return x


def ledoit_wolf(z):
    """Weight s in (1 - s) R + s I of least expected squared error; z [n, d], mean 0, variance 1.

        s = min(1, (mean |z_i|^4 - |R|^2) / (n |R - I|^2)),  R = z'z / n       (Ledoit, Wolf 2004)

    That is for known scales: where z was scaled by its own deviations, s is somewhat too large.
    """
    n, d = z.shape
    R = z.T @ z / n
    far = ((R - np.eye(d)) ** 2).sum()
    noise = (((z ** 2).sum(1) ** 2).mean() - (R ** 2).sum()) / n
    return float(min(noise, far) / far) if far > 0 else 0.0


def fit(x, shrink=-1.0):
    """What the distances need, from inside activations x [n, d].

    A dict of the features' mean, scale (standard deviations; divisor n) and whether each varies,
    `precision`, the inverse of the shrunk correlations of those that do, and of what was done: n,
    shrink, constant (features left out). A feature whose spread is under 1e-6 of its mean or of the
    widest spread is rounding. ValueError for under 2 prompts, where nothing varies, and where the
    covariance has no inverse.
    """
    x = table(x)
    if len(x) < 2:
        raise ValueError(f"a covariance needs 2 prompts or more, not {len(x)}")
    mean, scale = x.mean(0), x.std(0)
    varies = scale > 1e-6 * np.maximum(np.abs(mean), scale.max())
    if not varies.any():
        raise ValueError("all activations are constant: another layer or --pool")
    z = ((x - mean) / np.where(varies, scale, 1))[:, varies]
    s = ledoit_wolf(z) if shrink < 0 else shrink
    R = (1 - s) * (z.T @ z / len(z)) + s * np.eye(z.shape[1])
    if np.linalg.eigvalsh(R)[0] < 1e-8:
        raise ValueError(f"the covariance of {len(x)} prompts in {z.shape[1]} dimensions has no "
                         f"inverse with --shrink {s:g}: raise it")
    return dict(mean=mean, scale=scale, varies=varies, precision=np.linalg.inv(R), n=len(x),
                shrink=s, constant=int((~varies).sum()))


def standardized(fitted, x):
    """x [n, d] in standard deviations from the mean, without the constant features."""
    varies = fitted["varies"]
    return (table(x) - fitted["mean"])[:, varies] / fitted["scale"][varies]


def distances(fitted, x, kind="relative"):
    """Squared distances [n] of x [n, d] from the inside prompts: plain, diagonal, or relative."""
    z = standardized(fitted, x)
    diagonal = (z ** 2).sum(1)
    if kind == "diagonal":
        return diagonal
    full = np.einsum("nd,de,ne->n", z, fitted["precision"], z)
    return full if kind == "plain" else full - diagonal


# ---------------------------------------------------------------- exposure

def exposure(inside, outside, ridge=1e-3):
    """Weights [1 + d], the bias first, of a logistic regression; inside [N, d] is class 0.

    Class 1 are N // M copies of outside [M, d], so that the classes weigh the same (HH B.9). Newton
    steps, halved until the loss falls. ValueError where M is above N.
    """
    a, b = table(inside), table(outside)
    copies = len(a) // len(b) if len(b) else 0
    if not copies:
        raise ValueError(f"{len(b)} outside prompts for {len(a)} inside: none or too many")
    X = np.concatenate([np.ones((len(a) + len(b), 1)), np.concatenate([a, b])], 1)
    y = np.repeat([0.0, 1.0], [len(a), len(b)])
    weight = np.where(y > 0, copies, 1) / (len(a) + copies * len(b))
    penalty = np.full(X.shape[1], ridge)
    penalty[0] = 0

    def loss(w):
        f = X @ w
        return weight @ (np.logaddexp(0, f) - y * f) + 0.5 * penalty @ w ** 2

    w = np.zeros(X.shape[1])
    for _ in range(100):
        p = sigmoid(X @ w)
        gradient = X.T @ (weight * (p - y)) + penalty * w
        if np.abs(gradient).max() < 1e-10:
            break
        curve = (X * (weight * p * (1 - p))[:, None]).T @ X + np.diag(penalty + 1e-12)
        step, size = np.linalg.solve(curve, gradient), 1.0
        while loss(w - size * step) > loss(w) and size > 1e-8:
            size /= 2
        w = w - size * step
    return w


def probability(weights, x):
    """P(class 1) [n] of x [n, d]."""
    return sigmoid(table(x) @ weights[1:] + weights[0])


# ---------------------------------------------------------------- thresholds

def threshold(inside, fpr):
    """The score that at most a share fpr of the inside scores exceeds; equal ones go together."""
    ordered = np.sort(np.asarray(inside, dtype=np.float64))[::-1]
    return float(ordered[min(math.floor(fpr * len(ordered) + 1e-9), len(ordered) - 1)])


def fpr_at(inside, outside, tpr=0.95):
    """Share of inside scores that are at or above the score that a share tpr of outside reaches."""
    ordered = np.sort(np.asarray(outside, dtype=np.float64))[::-1]
    return float((inside >= ordered[math.ceil(tpr * len(ordered) - 1e-9) - 1]).mean())


# ---------------------------------------------------------------- activations

def placed(tok, turns, room, pool):
    """(ids, first, count): a prompt's ids and which of them are pooled; None if it doesn't fit."""
    ids = fit_turns(tok, turns, room)
    if ids is None or pool == "last":
        return ids and (ids, len(ids) - 1, 1)
    first = len(ids) - ids[::-1].index(tok.human)                  # after the last human header
    return ids, first, max(len(ids) - 2 - first, 1)                # without <|eot|>, <|assistant|>


@torch.no_grad()
def activations(model, prompts, pad, micro=64):
    """Pooled activations of all layers, float64 [layers + 1, prompts, C], of `placed` prompts."""
    C, out = model.config.n_embd, None
    for some in by_length([ids for ids, _, _ in prompts], micro):
        rows, first, count = zip(*(prompts[i] for i in some), strict=True)
        ids, lengths = pad_rows(rows, pad, model.device)
        count, layers = torch.tensor(count), []
        mask = response_mask(torch.tensor(first), count, ids.shape[1]).to(model.device)
        model(ids, lengths, at=mask, layers=layers)                # each [pooled tokens, C]
        if out is None:
            out = np.empty((len(layers), len(prompts), C))
        whose = torch.arange(len(some)).repeat_interleave(count)
        for k, x in enumerate(layers):
            sums = torch.zeros(len(some), C, dtype=torch.float64)
            out[k, some] = sums.index_add_(0, whose, x.cpu().double()) / count[:, None]
    return out


def fingerprint(content):
    """What tells a checkpoint's tokenizer and weights from others."""
    digest = hashlib.sha256(content["tokenizer"].encode())
    for name, tensor in sorted(content["model"].items()):
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- the guard

def score(fitted, kind, x):
    """Scores [n] of activations x [n, d]: distances, or the probability of class 1."""
    if kind != "exposure":
        return distances(fitted, x, kind)
    return probability(fitted["weights"], standardized(fitted, x))


def as_content(fitted):
    """`fitted` as a checkpoint holds it: arrays as tensors."""
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in fitted.items()}


@dataclass(frozen=True)
class Guard:
    """A saved detector and the model that reads for it.

    content: what ood.py saved: kind, layer, pool, threshold, fpr, history (whether the prompts had
    earlier turns: else each message is scored alone), fitted.
    """
    path: str
    tok: Tokenizer
    model: GPT
    content: dict

    def score(self, turns):
        """The score of a talk that ends with a human turn. ValueError if that is too long."""
        it = self.content
        turns = turns if it["history"] else turns[-1:]
        prompt = placed(self.tok, turns, self.model.config.n_ctx, it["pool"])
        if prompt is None:
            raise ValueError(f"too long for the guard, which reads {self.model.config.n_ctx} "
                             "tokens: shorten it")
        x = activations(self.model, [prompt], self.tok.pad)[it["layer"]]
        return float(score(it["fitted"], it["kind"], x)[0])

    def refusal(self, turns):
        """Why the last message of a talk is declined; "" if it is not."""
        try:
            found = self.score(turns)
        except ValueError as error:
            return f"declined: {error}"
        at = self.content["threshold"]
        return "" if found <= at else (
            f"declined: unlike ordinary prompts (score {found:.4g}; the threshold is {at:.4g}, "
            f"which {self.content['fpr']:.0%} of those exceed)")


def load(path, device):
    """The Guard of a folder. UserError if it is none, or its model is another by now."""
    content = load_checkpoint(path).get("guard")
    if not content:
        raise UserError(f"{path}: holds no guard; python ood.py --layer K --out {path} makes one")
    source = load_source(content["ckpt"])
    if fingerprint(source) != content["fingerprint"]:
        raise UserError(f"{path}: was made with another model than {content['ckpt']} holds now; "
                        "make the guard again with ood.py --layer")
    fitted = {k: v.numpy() if torch.is_tensor(v) else v for k, v in content["fitted"].items()}
    return Guard(path, loads(source["tokenizer"]), unpack(source, device).eval(),
                 {**content, "fitted": fitted})
