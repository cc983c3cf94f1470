"""GPT-NeoX in Hugging Face folders, that is Pythia, 14M to 12B parameters: weights and tokenizer.

What data/gpt2.py says of GPT-2. Its linear layers are as ours; the rows of query_key_value come
head by head, [H, 3, D], ours by what they are, [3, H, D]. Positions turn `rotary_pct` of each
head; a block may add its two parts to one x (`use_parallel_residual`); the head is a table of its
own ("embed_out", in younger files "lm_head"). Published tables have some rows more than there are
ids: 50,304 for the 50,277 of Pythia's tokenizer.json, up to 50,688 in the largest.
"""

import json
from pathlib import Path

TITLE, PREFIX = "GPT-NeoX", "gpt_neox."
CLASSES = ("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification")
SIZES = dict(vocab="vocab_size", n_ctx="max_position_embeddings", n_layer="num_hidden_layers",
             n_head="num_attention_heads", n_embd="hidden_size")
HEADS = ("embed_out.weight", "lm_head.weight")
MASKS = r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq"
DROPOUT = dict(attention_dropout=0.0, hidden_dropout=0.0)
BASE = 10000                                         # of the angles, as model.py has it
BLOCK = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
         "attention.query_key_value": "attn.c_attn", "attention.dense": "attn.c_proj",
         "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}


def network(C):
    """What config.json may say: the first is what we write, and what a missing key means."""
    return dict(intermediate_size=(4 * C,), layer_norm_eps=(1e-5,), hidden_act=("gelu",),
                attention_bias=(True,), rope_scaling=(None,), use_parallel_residual=(True, False),
                tie_word_embeddings=(False, True))


def options(config, width):
    """GPTConfig's options by config.json, for heads of `width` numbers; ValueError for others.

    Younger files say rotary_pct and rotary_emb_base in "rope_parameters", by other names.
    """
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters is {rope!r}, not an object")
    kind, base = rope.get("rope_type", "default"), config.get("rotary_emb_base", BASE)
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    for key, value, only in (("rope_type", kind, "default"),
                             ("rotary_emb_base", rope.get("rope_theta", base), BASE)):
        if value != only:
            raise ValueError(f"{key} is {value!r}, this GPT has {only!r} only")
    number = int(width * share) if type(share) in (int, float) and 0 < share <= 1 else 0
    if number % 2 or not number:
        raise ValueError(f"rotary_pct is {share!r}, not a share that makes pairs of some of a "
                         f"head's {width} numbers")
    return dict(rotary=float(share), parallel=config.get("use_parallel_residual", True),
                tied=config.get("tie_word_embeddings", False), exact_gelu=True)


def written(gpt):
    """What config.json says beside sizes and `network`."""
    return dict(rotary_pct=gpt["rotary"], rotary_emb_base=BASE,
                use_parallel_residual=gpt["parallel"], tie_word_embeddings=gpt["tied"])


def names(gpt):
    """name there -> (our name, shape there) of each weight but the heads."""
    C = gpt["n_embd"]
    sizes = {"attn.c_attn": (3 * C, C), "attn.c_proj": (C, C), "mlp.c_fc": (4 * C, C),
             "mlp.c_proj": (C, 4 * C)}
    out = {"embed_in.weight": ("wte.weight", (gpt["vocab"], C))}
    for i in range(gpt["n_layer"]):
        for there, here in BLOCK.items():
            shape = sizes.get(here, (C,))
            out[f"layers.{i}.{there}.weight"] = f"h.{i}.{here}.weight", shape
            out[f"layers.{i}.{there}.bias"] = f"h.{i}.{here}.bias", shape[:1]
    return out | {f"final_layer_norm.{k}": (f"ln_f.{k}", (C,)) for k in ("weight", "bias")}


def turned(name, x, gpt, back):
    """A weight by our name, in their layout -> in ours; back: the other way."""
    if ".c_attn." not in name:
        return x
    order = (3, gpt["n_head"]) if back else (gpt["n_head"], 3)
    return x.reshape(*order, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


# ---------------------------------------------------------------- the tokenizer

ENDS = {"<|endoftext|>": 0, "<|padding|>": 1}        # special tokens; our <|eod|> and <|pad|>
BLANKS = tuple(" " * n for n in range(2, 25))        # taken out of a text before words are split
# The tokenizers library's GPT-2 words where those are gone: W is white space, no two blanks.
WORDS = (r" {2,24}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|W+(?!\S)|W+"
         ).replace("W", r"(?:[^\S ]| (?! ))")


def byte_names():
    """GPT-2's letter for each byte: itself if it is printable, else the next from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def read_tokenizer(path):
    """(token -> id, id -> token of ids that no text becomes) by Pythia's tokenizer.json.

    Runs of 2 to 24 blanks are tokens that the library takes out of a text first ("added"). So what
    merges make of blanks alone is never made; the model has those ids, too. tiktoken joins the
    neighbours that together have the lowest id, the library those whose merge is the earliest: the
    same if ids go by merges. ValueError, in one line, if they don't, or the file says other things.
    """
    def refused(field, what):
        return ValueError(f"{path}: {field} {what}; only Pythia's tokenizer.json is read")

    try:
        content = json.loads(Path(path).read_bytes())
        model, split = content["model"], content["pre_tokenizer"]
        added = {x["content"]: x["id"] for x in content["added_tokens"]}
        merges = [x.split(" ") if isinstance(x, str) else x for x in model["merges"]]
        kinds = dict(normalizer=content["normalizer"]["type"], pre_tokenizer=split["type"],
                     model=model["type"])
        vocab, letters = model["vocab"].items(), {name: b for b, name in byte_names().items()}
        words = {bytes(letters[x] for x in w): i for w, i in vocab if w not in ENDS}
        made = [words[bytes(letters[x] for x in "".join(pair))] for pair in merges]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__} {error}".splitlines()[0][:80]
        raise ValueError(f"{path}: not a byte-level tokenizer.json ({reason}); copy it again") \
            from None
    for field, wanted in dict(normalizer="NFC", pre_tokenizer="ByteLevel", model="BPE").items():
        if kinds[field] != wanted:
            raise refused(field, f"is {kinds[field]!r}, not {wanted!r}")
    if split.get("add_prefix_space", True) or not split.get("use_regex", True):
        raise refused("pre_tokenizer", "adds a blank or splits no words")
    if {name: i for name, i in added.items() if name not in BLANKS} != ENDS:
        raise refused("added_tokens", f"other than blanks are not {ENDS}")
    if set(BLANKS) - added.keys():
        raise refused("added_tokens", "lack a run of 2 to 24 blanks")
    if list(dict.fromkeys(made)) != sorted(i for w, i in words.items() if len(w) > 1):
        raise refused("model", "has merges in another order than ids, or none for some token")
    runs = {name.encode(): added[name] for name in BLANKS}
    return {**words, **runs}, {i: w for w, i in words.items() if w in runs}
