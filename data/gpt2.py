"""GPT-2's weights as Hugging Face folders name and shape them; data/hf.py reads and writes by this.

Our names are GPT-2's. Three things differ. Its linear layers ("Conv1D") keep [in, out], ours
[out, in]. Its language models put "transformer." before a name. Its table of embeddings has a row
for each id, ours is rounded up to a multiple of 64.

data/neox.py says the same of GPT-NeoX. gpt: the fields of a GPTConfig, as a dict. C is the width.
"""

TITLE, PREFIX = "GPT-2", "transformer."
CLASSES = ("GPT2LMHeadModel", "GPT2ForSequenceClassification")  # of language, preference models
SIZES = dict(vocab="vocab_size", n_ctx="n_positions", n_layer="n_layer", n_head="n_head",
             n_embd="n_embd")
HEADS = ("lm_head.weight",)                          # names of the head; the first is what we write
MASKS = r"h\.\d+\.attn\.(bias|masked_bias)"          # what old files hold beside weights
DROPOUT = dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # [in, out] over there


def network(C):
    """What config.json may say: the first is what we write, and what a missing key means."""
    return dict(n_inner=(None, 4 * C), layer_norm_epsilon=(1e-5,),
                activation_function=("gelu_new", "gelu_pytorch_tanh"),  # two names of one formula
                scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,),
                reorder_and_upcast_attn=(False,), add_cross_attention=(False,),
                tie_word_embeddings=(True,))


def options(config, width):
    """GPTConfig's options: there are none here."""
    return {}


def written(gpt):
    """What config.json says beside sizes and `network`."""
    return {}


def names(gpt):
    """name there -> (our name, shape there) of each weight but the heads."""
    C = gpt["n_embd"]
    linear = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C),
              "mlp.c_proj": (4 * C, C)}
    block = {f"{norm}.{k}": (C,) for norm in ("ln_1", "ln_2") for k in ("weight", "bias")}
    block |= {f"{name}.weight": shape for name, shape in linear.items()}
    block |= {f"{name}.bias": shape[1:] for name, shape in linear.items()}
    out = {"wte.weight": (gpt["vocab"], C), "wpe.weight": (gpt["n_ctx"], C)}
    for i in range(gpt["n_layer"]):
        out |= {f"h.{i}.{name}": shape for name, shape in block.items()}
    out |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return {name: (name, shape) for name, shape in out.items()}


def turned(name, x, gpt, back):
    """A weight by our name, in their layout -> in ours; back: the other way."""
    return x.T if name.endswith(CONV1D) else x
