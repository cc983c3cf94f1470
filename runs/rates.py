"""Learning rates of the stages for the published sizes: the paper's shares of pretraining's.

    python runs/rates.py                      # a table in Markdown, all sizes
    python runs/rates.py gpt2                 # a line a stage: distill 3e-05, ...
    python runs/rates.py pythia-1b ppo        # one number, for scripts
    python runs/rates.py FOLDER ppo           # of a Hugging Face folder, by its config.json
    python runs/rates.py 4e-4 ppo             # for a pretraining rate of one's own

Shares (SHARES): context distillation 0.05 (HH A.1), PM pretraining 0.1 and human feedback 0.01
(HH A.2), PPO 0.01 (HH B.1). Weights from elsewhere never saw our ids of roles and turns: they learn
them in some text and dialogues first, at 0.1, which is of this project.

Pretraining rates (RATES). Pythia's are those of its paper's table (Biderman et al. 2023) and of its
training files, models/*/*.yml in EleutherAI/pythia; the 1B file says 2.5e-4 where the table says
3e-4, which is taken here. GPT-2's were never published; taken are GPT-3's for the models of about
its sizes (Brown et al. 2020, table 2.1): 125M, 350M, 760M, 1.3B.

The toy world's stages have other defaults, far above these: a model of 0.9M parameters that trains
for minutes.
"""

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a program, the folder above this one holds `data`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import gpt2, neox

RATES = {"gpt2": 6e-4, "gpt2-medium": 3e-4, "gpt2-large": 2.5e-4, "gpt2-xl": 2e-4,
         "pythia-14m": 1e-3, "pythia-31m": 1e-3, "pythia-70m": 1e-3, "pythia-160m": 6e-4,
         "pythia-410m": 3e-4, "pythia-1b": 3e-4, "pythia-1.4b": 2e-4, "pythia-2.8b": 1.6e-4,
         "pythia-6.9b": 1.2e-4, "pythia-12b": 1.2e-4}
SHARES = dict(pretrain=1.0, dialogues=0.1, distill=0.05, pmp=0.1, pm=0.01, ppo=0.01)
FAMILIES = dict(gpt2=(gpt2, "gpt2"), gpt_neox=(neox, "pythia"))   # by config.json's model_type


def size_of(folder):
    """The published size that a Hugging Face folder's config.json has. ValueError if it has none.
    """
    from model import SIZES  # and torch, which takes seconds

    path = Path(folder) / "config.json"
    try:
        content = json.loads(path.read_text())
        family, start = FAMILIES[content["model_type"]]
        shape = tuple(content[family.SIZES[k]] for k in ("n_layer", "n_head", "n_embd"))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: no config.json of a GPT-2 or a GPT-NeoX") from None
    found = [name for name in RATES if name.startswith(start) and SIZES[name] == shape]
    if not found:
        raise ValueError(f"{path}: {shape} layers, heads, width are no published size: name its "
                         "pretraining rate in place of the folder")
    return found[0]


def pretraining(model):
    """The pretraining rate of a size, of a folder, or the number itself."""
    if model in RATES:
        return RATES[model]
    try:
        rate = float(model)
    except ValueError:
        if Path(model).is_dir():
            return RATES[size_of(model)]
        raise ValueError(f"{model}: neither a folder nor a size with a published rate "
                         f"({', '.join(RATES)})") from None
    if not 0 < rate < 1:
        raise ValueError(f"{model}: a pretraining rate is between 0 and 1")
    return rate


def rate(model, stage):
    """A stage's learning rate: its share of the model's pretraining rate."""
    return float(f"{SHARES[stage] * pretraining(model):.6g}")


def table():
    """Lines of Markdown, a size each."""
    lines = [f"| size | {' | '.join(SHARES)} |", "|---|" + "--:|" * len(SHARES)]
    return lines + [f"| {name} | {' | '.join(f'{rate(name, stage):g}' for stage in SHARES)} |"
                    for name in RATES]


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="a size, a folder or a rate")
    parser.add_argument("stage", nargs="?", default="", choices=["", *SHARES],
                        help=f"of which to print the rate: {', '.join(SHARES)}")
    args = parser.parse_args()
    if not args.model:
        return print("\n".join(table()))
    try:
        found = {stage: f"{rate(args.model, stage):g}" for stage in SHARES}
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(found[args.stage] if args.stage else "\n".join(map(" ".join, found.items())))


if __name__ == "__main__":
    main()
