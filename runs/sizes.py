"""The named sizes counted: parameters, and what training one costs in memory before any token.

    python runs/sizes.py                # a table in Markdown of all names in model.SIZES; a second

Weights, gradients and Adam's two moments are float32, 4 bytes each: 16 bytes a parameter on each
rank of data parallelism, and 16 / N of N ranks that share them out (sharding). A frozen model (the
reference, the preference model in PPO) costs its 4. Activations and caches come on top: a token's
keys and values are 2 L C numbers of 2 bytes on GPUs, 4 on CPUs.

Letters: L layers, C width, V rows of the embedding, the vocabulary rounded up to a multiple of 64.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a program, the folder above this one holds `model`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import SIZES, sized


def parameters(c):
    """Number of parameters of GPT(c), c a GPTConfig: L (12 C^2 + 13 C) in blocks, tables, heads.

    12 C^2 are the matrices (q, k, v 3, the heads' projection 1, the MLP 4 + 4), 13 C their biases
    (3 + 1 + 4 + 1) and two norms (2 + 2).
    """
    C, V = c.n_embd, -(-c.vocab // 64) * 64
    tables = V * C + (0 if c.turned else c.n_ctx * C)
    head = C + 1 if c.scalar else 0 if c.tied else V * C
    return tables + c.n_layer * (12 * C * C + 13 * C) + 2 * C + head


def memory(c):
    """Bytes of training, by what: weights, gradients, adam (two moments), and all."""
    weights = 4 * parameters(c)
    return dict(weights=weights, gradients=weights, adam=2 * weights, all=4 * weights)


def published(name):
    """(vocabulary, positions) that a size is published with; the toy ones, as pretrain.py trains.

    GPT-2's and Pythia's tokenizers with our special ids: 50,262 and 50,281, in 50,304 rows.
    """
    family = name.split("-")[0]
    return {"gpt2": (50262, 1024), "pythia": (50281, 2048)}.get(family, (768, 256))


def table():
    """Lines of Markdown, a size each; GB are 10^9 bytes."""
    lines = ["| size | layers | heads | width | parameters | weights, GB | + gradients, Adam, GB |",
             "|---|--:|--:|--:|--:|--:|--:|"]
    for name, (layers, heads, width) in SIZES.items():
        c = sized(name, *published(name))
        cost = memory(c)
        lines.append(f"| {name} | {layers} | {heads} | {width} | {parameters(c):,} "
                     f"| {cost['weights'] / 1e9:.3g} | {cost['all'] / 1e9:.3g} |")
    return lines


def main():
    argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))


if __name__ == "__main__":
    main()
