"""GPT-2's weights in and out of Hugging Face folders: config.json, the weights, a tokenizer.

    python sample.py --import-hf FOLDER --tokenizer gpt2 --out out/gpt2   a checkpoint for an --init
    python sample.py --ckpt out/gpt2 --export FOLDER                      a folder for transformers

Reads the published gpt2, gpt2-medium, gpt2-large and gpt2-xl (124M to 1.5B parameters) and all that
transformers saves of this architecture: model.safetensors or pytorch_model.bin, whole or in shards.
The first needs the package safetensors; without it the second is read and written, which
transformers opens as well. A pickle may hold tensors, no code.

Our names are GPT-2's. Three things differ. Its linear layers ("Conv1D") keep [in, out], ours
[out, in]. Its language models put "transformer." before a name. Its table of embeddings has a row
for each id, ours is rounded up to a multiple of 64. A preference model is transformers'
GPT2ForSequenceClassification with one label, which has no bias: ours goes into the README.md.

All is said in plain dicts, so this file needs no other one. Letters: C width, V vocabulary.
"""

import json
import os
import re
import shutil
from pathlib import Path

import torch

from data.tokenizer import PATTERNS

CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # [in, out] over there
SIZES = dict(vocab="vocab_size", n_ctx="n_positions", n_layer="n_layer", n_head="n_head",
             n_embd="n_embd")
# What config.json may say of the network: the first is what we write, and what a missing key means.
NETWORK = dict(model_type=("gpt2",), n_inner=(None,), layer_norm_epsilon=(1e-5,),
               activation_function=("gelu_new", "gelu_pytorch_tanh"),  # two names of one formula
               scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,),
               reorder_and_upcast_attn=(False,), add_cross_attention=(False,),
               tie_word_embeddings=(True,))
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json")  # the first that can be read counts


# ---------------------------------------------------------------- files

def read_json(path):
    """The object of a JSON file. ValueError if it holds another thing."""
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def safetensors_library():
    """The package safetensors, or None where it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        return None
    return safetensors


def read_safetensors(path):
    """(name, tensor) of a safetensors file. ValueError if it is cut off or not of this form."""
    library = safetensors_library()
    if library is None:
        raise ValueError(f"{path}: its form needs a package: pip install safetensors")
    try:
        with library.safe_open(path, "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
    except library.SafetensorError as error:
        reason = str(error).splitlines()[0][:120]
        raise ValueError(f"{path}: not a whole safetensors file ({reason}); copy it again") \
            from None


def read_torch(path):
    """(name, tensor) of a file by torch.save. ValueError if it is cut off or holds anything else.

    Runs no code from it (weights_only).
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated zip, a pickle with code, text: torch raises many types
        reason = (str(error) or "it is empty").splitlines()[0][:120]
        raise ValueError(f"{path}: not a readable file of weights ({reason})") from None
    if not isinstance(content, dict) or not all(map(torch.is_tensor, content.values())):
        raise ValueError(f"{path}: not a dictionary of tensors")
    yield from content.items()


def read_weights(folder):
    """(name, tensor) of all weights of a folder, one after the other.

    ValueError if there are none, and if a shard is missing or holds what the index does not say.
    """
    names = WEIGHTS if safetensors_library() else WEIGHTS[2:] + WEIGHTS[:2]
    path = next((p for p in (Path(folder, n) for n in names) if p.is_file()), None)
    if path is None:
        raise ValueError(f"{folder}: no weights here, neither {' nor '.join(WEIGHTS[::2])}")
    index = read_json(path).get("weight_map") if path.suffix == ".json" else None
    if path.suffix == ".json" and not (index and isinstance(index, dict)):
        raise ValueError(f"{path}: its 'weight_map' names no tensor")
    for part in sorted(set(map(str, index.values()))) if index else [path.name]:
        file = path.with_name(Path(part).name)
        if not file.exists():
            raise ValueError(f"{file}: missing, though {path.name} names it")
        wanted = {name for name in index or () if index[name] == part}
        for name, x in (read_safetensors if file.suffix == ".safetensors" else read_torch)(file):
            if index and name not in wanted:
                raise ValueError(f"{file}: tensor {name!r} is not there by {path.name}")
            wanted.discard(name)
            yield name, x
        if wanted:
            raise ValueError(f"{file}: no tensor {min(wanted)!r}, though {path.name} names it")


def write_weights(folder, tensors):
    """name -> tensor into the folder's file of weights, as float32. Returns its path."""
    tensors = {name: x.detach().to("cpu", torch.float32, copy=True,
                                   memory_format=torch.contiguous_format)
               for name, x in tensors.items()}  # copied: a pickle holds the whole of what x views
    library = safetensors_library()
    path = Path(folder, WEIGHTS[0] if library else WEIGHTS[2])
    if library is None:
        torch.save(tensors, path)
        return path
    try:
        library.torch.save_file(tensors, path, metadata={"format": "pt"})
    except library.SafetensorError as error:  # a full disk, too, has this type
        raise OSError(f"{path}: {error}") from None
    return path


# ---------------------------------------------------------------- names and shapes

def read_config(folder):
    """Our sizes, as a dict, from a folder's config.json. ValueError for another network."""
    path = Path(folder, "config.json")
    if not path.exists():
        raise ValueError(f"{path}: no such file; name a folder that transformers can open")
    config, sizes = read_json(path), {}
    for key, allowed in NETWORK.items():
        value = config.get(key, allowed[0])
        if key == "n_inner" and value == 4 * (config.get("n_embd") or 0):
            value = None
        if value not in allowed:
            raise ValueError(f"{path}: {key} is {value!r}, this GPT has {allowed[0]!r} only")
    for ours, key in SIZES.items():
        if type(config.get(key)) is not int or config[key] < 1:
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, not a whole number above 0")
        sizes[ours] = config[key]
    return sizes


def shapes(sizes, scalar=False):
    """name -> shape of each weight of a model, as GPT-2 keeps them."""
    C = sizes["n_embd"]
    norm = dict(weight=(C,), bias=(C,))
    linear = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C),
              "mlp.c_proj": (4 * C, C)}
    block = {f"{name}.{k}": v for name in ("ln_1", "ln_2") for k, v in norm.items()}
    block |= {f"{name}.weight": shape for name, shape in linear.items()}
    block |= {f"{name}.bias": shape[1:] for name, shape in linear.items()}
    out = {"wte.weight": (sizes["vocab"], C), "wpe.weight": (sizes["n_ctx"], C)}
    for i in range(sizes["n_layer"]):
        out |= {f"h.{i}.{name}": shape for name, shape in block.items()}
    out |= {f"ln_f.{k}": v for k, v in norm.items()}
    return out | {"score.weight": (1, C)} if scalar else out


def from_hf(tensors, sizes):
    """Their weights -> ours (float32), and how many tensors were left out, by reason.

    tensors: pairs (name, tensor). A "score.weight" [1, C] makes the model a preference model. Left
    out are the causal masks of old files and the head of a language model, which must equal the
    embedding. ValueError names a tensor that is unknown, missing, doubled, not finite, or of
    another shape.
    """
    state, known, left_out, head = {}, shapes(sizes, scalar=True), {}, None
    for name, x in tensors:
        short = name.removeprefix("transformer.")
        if re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", short):
            left_out["causal masks"] = left_out.get("causal masks", 0) + 1
            continue
        if short == "lm_head.weight":
            left_out["tied head"], head = 1, x
            continue
        if short not in known:
            raise ValueError(f"tensor {name!r} is {'doubled' if short in state else 'unknown'}")
        shape = known.pop(short)
        if tuple(x.shape) != shape:
            raise ValueError(f"tensor {name!r} is {list(x.shape)}, by config.json {list(shape)}")
        state[short] = x.to(torch.float32, copy=True)
        if not x.is_floating_point() or not state[short].isfinite().all():
            raise ValueError(f"tensor {name!r} holds what is no finite real number")
        if short.endswith(CONV1D):
            state[short] = state[short].T.contiguous()
    if known.keys() - {"score.weight"}:
        raise ValueError(f"tensor {next(iter(known))!r} is missing")
    if head is not None and not torch.equal(head.float(), state["wte.weight"]):
        raise ValueError("tensor 'lm_head.weight' differs from 'wte.weight': here they are one")
    if "score.weight" in state:
        state["score_head.weight"] = state.pop("score.weight")
        state["score_head.bias"] = torch.zeros(1)
    return state, left_out


def to_hf(state, sizes):
    """Our weights -> theirs, without the rows that round the embedding up, and the score's bias."""
    out = {}
    for name, shape in shapes(sizes, sizes["scalar"]).items():
        x = state["score_head.weight" if name == "score.weight" else name]
        x = x.T if name.endswith(CONV1D) else x[:sizes["vocab"]] if name == "wte.weight" else x
        if tuple(x.shape) != shape:
            raise ValueError(f"tensor {name!r} is {list(x.shape)}, by its sizes {list(shape)}")
        out[name if name == "score.weight" else f"transformer.{name}"] = x
    return out


def load(folder, tok):
    """A folder -> (sizes, weights, counts of tensors left out), the parts of a checkpoint.

    The model gets the tokenizer's ids: ids that the folder does not know, our special ones, start
    at the mean of its embeddings, where they are neither likely nor unlikely (and equal, so
    that only training tells them apart). ValueError, in one line, if the folder or a file of it
    is not what it should be, or the tokenizer is another model's.
    """
    sizes = read_config(folder)
    have = sizes["vocab"]
    if not len(tok.ranks) <= have <= tok.vocab:
        raise ValueError(f"{folder}: knows {have} ids, the tokenizer has {len(tok.ranks)} and "
                         f"{tok.vocab - len(tok.ranks)} special ones: name another --tokenizer")
    try:
        state, left_out = from_hf(read_weights(folder), sizes)
    except ValueError as error:
        named = str(error).startswith(str(folder))
        raise ValueError(error if named else f"{folder}: {error}") from None
    table = state["wte.weight"]                             # [have, C] -> [V rounded up, C]
    new = -(-tok.vocab // 64) * 64 - have
    state["wte.weight"] = torch.cat([table, table.mean(0).expand(new, -1)])
    return dict(sizes, vocab=tok.vocab, scalar="score_head.weight" in state), state, left_out


# ---------------------------------------------------------------- the tokenizer

# Tokenizer.render in the language of chat templates; a system message is its preamble.
CHAT = ("<|eod|>{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% else %}"
        "{{ '<|human|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}<|eot|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


def byte_names():
    """GPT-2's letter for each byte: itself if it is printable, else the next from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def specials_of(tok):
    """name -> id of the special tokens, in the order of ids."""
    return {name: len(tok.ranks) + i for i, name in enumerate(tok.specials)}


def pattern_of(tok):
    """The regular expression that splits words, as the tokenizers library must read it.

    Its \\w lacks two characters that tiktoken's has, the zero-width (non-)joiner.
    """
    text = PATTERNS[tok.pattern].replace(r"[^\W\d_]", "[[^\\W\\d_]\u200c\u200d]")
    return text.replace(r"[^\s\w]", "[^\\s\\w\u200c\u200d]")


def tokenizer_json(tok):
    """Our tokenizer as the tokenizers library reads it: tokenizer.json, as a dict.

    tiktoken joins the neighbours whose bytes together have the lowest rank. The library joins pairs
    from a list, the earliest first: so we list each way to cut each token in two.
    """
    names = byte_names()
    spelled = {t: "".join(names[b] for b in t) for t in tok.ranks}
    merges = []
    for token in sorted(tok.ranks, key=tok.ranks.get):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [f"{spelled[a]} {spelled[b]}" for a, b in cuts
                   if a in tok.ranks and b in tok.ranks]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    split = dict(type="Split", pattern=dict(Regex=pattern_of(tok)), behavior="Isolated",
                 invert=False)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    return dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None,
        added_tokens=[dict(id=i, content=name, **flags) for name, i in specials_of(tok).items()],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]), decoder=level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                   end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                   ignore_merges=True, merges=merges,  # a word that is a token is that token
                   vocab={spelled[t]: i for t, i in tok.ranks.items()}))


# ---------------------------------------------------------------- a folder

README = """# A {kind} model by nanoHH

GPT-2's architecture. `transformers.{cls}.from_pretrained` opens this folder, `AutoTokenizer` its
tokenizer; tokenizer.tiktoken has the same as tiktoken's ranks, for nanoHH.

Ids below {text} are text. Special ids: {specials}.
A dialogue is <|eod|> <|human|> text <|eot|> <|assistant|> text <|eot|> ..., see the chat template.
A special token spelled out in a text is text for nanoHH, but that token for transformers.
{more}
"""


def describe(gpt, state, tok):
    """(config.json as a dict, README.md) of a model."""
    cls = "GPT2ForSequenceClassification" if gpt["scalar"] else "GPT2LMHeadModel"
    config = dict(architectures=[cls], **{key: values[0] for key, values in NETWORK.items()},
                  **{key: gpt[ours] for ours, key in SIZES.items()},
                  embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
                  bos_token_id=tok.eod, eos_token_id=tok.eot, pad_token_id=tok.pad)
    more = "Each special token ends an answer; one that ended properly ends with <|eot|>."
    if gpt["scalar"]:
        config |= dict(id2label={"0": "score"}, label2id={"score": 0})
        more = ("The score of a dialogue is read at an <|eoc|> after its last <|eot|>. "
                f"nanoHH adds {state['score_head.bias'].item():g} to it.")
    specials = ", ".join(f"{name} = {i}" for name, i in specials_of(tok).items())
    return config, README.format(kind="preference" if gpt["scalar"] else "language", cls=cls,
                                 text=len(tok.ranks), specials=specials, more=more)


def save(folder, gpt, state, tok):
    """Write a model as a folder that transformers opens; it appears whole or not at all.

    gpt, state: sizes and weights as in a checkpoint. A language model becomes a GPT2LMHeadModel, a
    preference model a GPT2ForSequenceClassification. ValueError if the folder holds something.
    """
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{folder}: is there already; name a new folder")
    config, readme = describe(gpt, state, tok)
    names = specials_of(tok)
    options = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=gpt["n_ctx"],
                   clean_up_tokenization_spaces=False, bos_token="<|eod|>", eos_token="<|eot|>",
                   pad_token="<|pad|>", additional_special_tokens=list(names), chat_template=CHAT)
    stops = dict(bos_token_id=tok.eod, eos_token_id=sorted(tok.stops), pad_token_id=tok.pad)
    files = {"config.json": config, "generation_config.json": stops,
             "tokenizer.json": tokenizer_json(tok), "tokenizer_config.json": options}
    part = target.with_name(f".{target.name}.part")  # always the same: what a kill left goes
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        weights = write_weights(part, to_hf(state, gpt))
        for name, content in files.items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (part / name).write_text(text + "\n", encoding="utf-8")
        (part / "tokenizer.tiktoken").write_text(tok.dumps(), encoding="utf-8")
        (part / "README.md").write_text(readme, encoding="utf-8")
        shutil.copymode(part / "README.md", weights)  # the library lets only its owner read it
        os.replace(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
