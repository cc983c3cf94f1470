"""GPT-2's and Pythia's weights in and out of Hugging Face folders: config.json, weights, tokenizer.

    python sample.py --import-hf FOLDER --tokenizer gpt2 --out out/gpt2   a checkpoint for an --init
    python sample.py --ckpt out/gpt2 --export FOLDER                      a folder for transformers

Reads the published gpt2, gpt2-medium, gpt2-large and gpt2-xl (124M to 1.5B parameters), the Pythia
family (14M to 12B; --tokenizer is the folder, too) and all that transformers saves of these two
architectures: model.safetensors or pytorch_model.bin, whole or in shards. The first needs the
package safetensors; without it the second is read and written, which transformers opens as well.
A pickle may hold tensors, no code.

data/gpt2.py and data/neox.py say how each names and shapes what. A preference model is their
...ForSequenceClassification with one label, which has no bias: ours goes into the README.md.

All is said in plain dicts, so the model's file is not needed. Letters: C width, V vocabulary.
"""

import json
import os
import re
import shutil
from pathlib import Path
from zipfile import is_zipfile

import torch

from data import gpt2, neox
from data.download import WEIGHTS
from data.neox import byte_names
from data.tokenizer import PATTERNS

FAMILIES = dict(gpt2=gpt2, gpt_neox=neox)        # by config.json's model_type
TABLES = {"wte.weight", "lm_head.weight"}            # a row for each id


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
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
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
    """(gpt2 or neox, our GPTConfig as a dict, config.json). ValueError for another network."""
    path = Path(folder, "config.json")
    if not path.exists():
        raise ValueError(f"{path}: no such file; name a folder that transformers can open")
    config = read_json(path)
    family, sizes = FAMILIES.get(str(config.get("model_type", "gpt2"))), {}
    if family is None:
        raise ValueError(f"{path}: model_type is {config['model_type']!r}, this GPT can be "
                         f"{' or '.join(FAMILIES)} only")
    for ours, key in family.SIZES.items():
        if type(config.get(key)) is not int or config[key] < 1:
            raise ValueError(f"{path}: {key} is {config.get(key)!r}, not a whole number above 0")
        sizes[ours] = config[key]
    for key, allowed in family.network(sizes["n_embd"]).items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise ValueError(f"{path}: {key} is {value!r}, this GPT has {allowed[0]!r} only")
    width, rest = divmod(sizes["n_embd"], sizes["n_head"])
    if rest:
        raise ValueError(f"{path}: {family.SIZES['n_head']} is {sizes['n_head']}, which does not "
                         f"divide the width {sizes['n_embd']}")
    try:
        return family, sizes | family.options(config, width), config
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def family_of(gpt):
    """gpt2 or neox, whichever a model is. ValueError if its options are a mixture of both."""
    kind = [gpt.get("rotary", 0.0) > 0, gpt.get("exact_gelu", False)]
    if all(kind):
        return neox
    if any(kind) or gpt.get("parallel", False) or not is_tied(gpt):
        raise ValueError("transformers has no network with some of rotary, parallel, exact_gelu, "
                         "untied: train one of GPT-2's or Pythia's kind to export it")
    return gpt2


def is_tied(gpt):
    return gpt.get("tied", True)


def heads(gpt, family):
    """name there -> (our name, shape): a language model's own head, the score of another."""
    return {family.HEADS[0]: ("lm_head.weight", (gpt["vocab"], gpt["n_embd"])),
            "score.weight": ("score_head.weight", (1, gpt["n_embd"]))}


def from_hf(tensors, gpt, family=gpt2):
    """Their weights -> ours (float32), and how many tensors were left out, by reason.

    tensors: pairs (name, tensor). A "score.weight" [1, C] makes the model a preference model. Left
    out are the causal masks of old files and a tied head, which must equal the embedding.
    ValueError names a tensor that is unknown, missing, doubled, not finite, or of another shape.
    """
    own, names = family.HEADS[0], family.names(gpt)
    known, state, left_out, head, tied = {**names, **heads(gpt, family)}, {}, {}, None, is_tied(gpt)
    for name, x in tensors:
        short = name.removeprefix(family.PREFIX)
        if re.fullmatch(family.MASKS, short):
            left_out["causal masks"] = left_out.get("causal masks", 0) + 1
            continue
        short = own if short in family.HEADS else short
        if short == own and tied:
            left_out["tied head"], head = 1, x
            continue
        if short not in known:
            doubled = short in names or short == own
            raise ValueError(f"tensor {name!r} is {'doubled' if doubled else 'unknown'}")
        ours, shape = known.pop(short)
        if tuple(x.shape) != shape:
            raise ValueError(f"tensor {name!r} is {list(x.shape)}, by config.json {list(shape)}")
        state[ours] = x.to(torch.float32, copy=True)
        if not x.is_floating_point() or not state[ours].isfinite().all():
            raise ValueError(f"tensor {name!r} holds what is no finite real number")
        state[ours] = family.turned(ours, state[ours], gpt, back=False).contiguous()
    scalar = "score_head.weight" in state
    missing = [name for name in known if name in names or name == own and not (tied or scalar)]
    if missing:
        raise ValueError(f"tensor {missing[0]!r} is missing")
    if head is not None and not torch.equal(head.float(), state["wte.weight"]):
        raise ValueError(f"tensor {own!r} differs from {next(iter(names))!r}: here they are one")
    if scalar:
        state["score_head.bias"] = torch.zeros(1)
    return state, left_out


def to_hf(state, gpt, family=gpt2):
    """Our weights -> theirs, without the rows that round a table up, and the score's bias."""
    out, last = {}, heads(gpt, family)
    wanted = {family.PREFIX + name: about for name, about in family.names(gpt).items()}
    for name in ("score.weight",) if gpt["scalar"] else () if is_tied(gpt) else family.HEADS[:1]:
        wanted[name] = last[name]
    for name, (ours, shape) in wanted.items():
        x = state[ours][:gpt["vocab"]] if ours in TABLES else state[ours]
        x = family.turned(ours, x, gpt, back=True)
        if tuple(x.shape) != shape:
            raise ValueError(f"tensor {name!r} is {list(x.shape)}, by its sizes {list(shape)}")
        out[name] = x
    return out


def load(folder, tok):
    """A folder -> (sizes, weights, counts of tensors left out), the parts of a checkpoint.

    The model gets the tokenizer's ids: ids that the folder does not know, our special ones, start
    at the mean of its embeddings, where they are neither likely nor unlikely (and equal, so
    that only training tells them apart). So do those that a published GPT-NeoX has beyond its
    tokenizer's, which nobody trained. ValueError, in one line, if the folder or a file of it is
    not what it should be, or the tokenizer is another model's.
    """
    family, gpt, config = read_config(folder)
    have, text = gpt["vocab"], max(tok.ranks.values()) + 1
    rounded = have > tok.vocab and family is neox and config.get("bos_token_id") == tok.eod
    if have < text or have > tok.vocab and not rounded:
        raise ValueError(f"{folder}: knows {have} ids, the tokenizer has {len(tok.ranks)} and "
                         f"{len(tok.specials)} special ones: name another --tokenizer")
    try:
        state, left_out = from_hf(read_weights(folder), gpt, family)
    except ValueError as error:
        named = str(error).startswith(str(folder))
        raise ValueError(error if named else f"{folder}: {error}") from None
    rows = text if rounded else have
    for name in TABLES & state.keys():
        table = state[name][:rows]                          # [rows, C] -> [V rounded up, C]
        new = -(-tok.vocab // 64) * 64 - rows
        state[name] = torch.cat([table, table.mean(0).expand(new, -1)])
    return dict(gpt, vocab=tok.vocab, scalar="score_head.weight" in state), state, left_out


# ---------------------------------------------------------------- the tokenizer

# Tokenizer.render in the language of chat templates; a system message is its preamble.
CHAT = ("<|eod|>{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% else %}"
        "{{ '<|human|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}<|eot|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")


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
    names, runs = byte_names(), {}
    if tok.pattern == "neox":  # taken out of a text first; their twins by merges stay unmade
        runs = {t: tok.ranks[t] for t in map(str.encode, neox.BLANKS)}
    words = {t: i for t, i in tok.ranks.items() if t not in runs}
    words |= {t: i for i, t in tok.twins.items()}
    spelled = {t: "".join(names[b] for b in t) for t in words}
    merges = []
    for token in sorted(words, key=words.get):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [f"{spelled[a]} {spelled[b]}" for a, b in cuts if a in words and b in words]
    plain = dict(single_word=False, lstrip=False, rstrip=False)
    added = [dict(id=i, content=t.decode(), normalized=True, special=False, **plain)
             for t, i in runs.items()]
    added += [dict(id=i, content=name, normalized=False, special=True, **plain)
              for name, i in tok.special_ids.items()]
    first = {name: i for name, i in tok.special_ids.items() if i < min(words.values())}
    split = dict(type="Split", pattern=dict(Regex=pattern_of(tok)), behavior="Isolated",
                 invert=False)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    return dict(
        version="1.0", truncation=None, padding=None, post_processor=None,
        normalizer=dict(type="NFC") if tok.pattern == "neox" else None,
        added_tokens=sorted(added, key=lambda token: token["id"]),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]), decoder=level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                   end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                   ignore_merges=True, merges=merges,  # a word that is a token is that token
                   vocab={**first, **{spelled[t]: i for t, i in words.items()}}))


# ---------------------------------------------------------------- a folder

README = """# A {kind} model by nanoHH

{title}'s architecture. `transformers.{cls}.from_pretrained` opens this folder, `AutoTokenizer` its
tokenizer; tokenizer.tiktoken has the same as tiktoken's ranks, for nanoHH.

Ids {text} are text. Special ids: {specials}.
A dialogue is <|eod|> <|human|> text <|eot|> <|assistant|> text <|eot|> ..., see the chat template.
A special token spelled out in a text is text for nanoHH, but that token for transformers.
{more}
"""


def describe(gpt, state, tok):
    """(config.json as a dict, README.md) of a model."""
    family = family_of(gpt)
    cls = family.CLASSES[gpt["scalar"]]
    config = dict(architectures=[cls],
                  model_type=next(name for name, x in FAMILIES.items() if x is family),
                  **{key: values[0] for key, values in family.network(gpt["n_embd"]).items()},
                  **{key: gpt[ours] for ours, key in family.SIZES.items()}, **family.DROPOUT,
                  bos_token_id=tok.eod, eos_token_id=tok.eot, pad_token_id=tok.pad)
    config |= family.written(gpt)
    more = "Each special token ends an answer; one that ended properly ends with <|eot|>."
    if gpt["scalar"]:
        config |= dict(id2label={"0": "score"}, label2id={"score": 0})
        more = ("The score of a dialogue is read at an <|eoc|> after its last <|eot|>. "
                f"nanoHH adds {state['score_head.bias'].item():g} to it.")
    specials = ", ".join(f"{name} = {i}" for name, i in tok.special_ids.items())
    first, last = min(tok.ranks.values()), max(tok.ranks.values())
    text = f"{first} to {last}" if first else f"below {last + 1}"
    return config, README.format(kind="preference" if gpt["scalar"] else "language", cls=cls,
                                 title=family.TITLE, text=text, specials=specials, more=more)


def save(folder, gpt, state, tok):
    """Write a model as a folder that transformers opens; it appears whole or not at all.

    gpt, state: sizes and weights as in a checkpoint. A language model becomes a ...ForCausalLM (of
    GPT-2 a GPT2LMHeadModel), a preference model a ...ForSequenceClassification. ValueError if the
    folder holds something, or transformers has no such network.
    """
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{folder}: is there already; name a new folder")
    config, readme = describe(gpt, state, tok)
    names = tok.special_ids
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
        weights = write_weights(part, to_hf(state, gpt, family_of(gpt)))
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
