"""data/hf.py against transformers, safetensors and tokenizers, on random weights of odd sizes.

Proved alive by: a linear layer not transposed; c_proj not; "transformer." kept, masks told by
"bias", a head that differs from the embedding taken, a missing tensor passed over, numel for shape,
NaN or whole numbers taken, lower precision kept; special rows of zeros, a table not rounded up on
the way in or rounded up on the way out; a vocabulary too large or too small taken; "gelu" taken or
written, 1e-6 written, "35" taken for 35; weights_only=False; safetensors' error passed on, its
mark left out, its file for its owner only, a view written with all behind it; without the package
another order of files, no hint, model.safetensors written; the index's names not compared with
a shard's, either way, a shard outside the folder; one stop only, another end or pad, no label
count, another class; U+200C and U+200D outside words or among signs, merges in alphabetical order,
the byte 173 printable, merges not ignored; a chat's texts trimmed, its user not human; a folder
with content overwritten, a half one left, the bias not told.
"""

import json
import random
import re
import sys
from dataclasses import asdict

import pytest
import torch

from data import gpt2, hf
from data.tokenizer import SPECIALS, Tokenizer, load, loads, train_bpe
from model import GPT, GPTConfig, generate, pack, sized, unpack
from preference import score_rows

SIZES = dict(vocab=257, n_ctx=37, n_layer=3, n_head=5, n_embd=35)
BYTES = {bytes([b]): b for b in range(256)}
TOK = Tokenizer(BYTES, "gpt2")  # in small what GPT-2's is: <|eod|> = 256 is the first special id
TEXT = ("Where does the fox live? It's in the barn, the_barn of 1842... \n\n  The OWL's\tnest; "
        "caf\u00e9 \u20ac5, \u0939\u093f\u0928\u094d\u0926\u0940 \u200d\U0001f98a\u00a0x \u2167\n")
OWN = train_bpe([TEXT] * 2, 300)

# as published for the smallest GPT-2, the sizes aside
PUBLISHED = dict(
    activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
    bos_token_id=256, embd_pdrop=0.1, eos_token_id=256, initializer_range=0.02,
    layer_norm_epsilon=1e-05, model_type="gpt2", n_ctx=37, n_embd=35, n_head=5, n_layer=3,
    n_positions=37, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
    summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True,
    task_specific_params={"text-generation": dict(do_sample=True, max_length=50)}, vocab_size=257)


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def theirs(transformers):
    """A GPT2LMHeadModel with 257 ids whose every weight is random, biases too."""
    keys = {key: SIZES[ours] for ours, key in gpt2.SIZES.items()}
    config = transformers.GPT2Config(**keys, bos_token_id=256, eos_token_id=256)
    return shaken(transformers.GPT2LMHeadModel(config).eval())


def shaken(model, seed=0):
    """Adds noise to every weight, so that none is 0 or 1 and the logits spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def ours(vocab=262, scalar=False, seed=0):
    return shaken(GPT(GPTConfig(**{**SIZES, "vocab": vocab}, scalar=scalar)), seed).eval()


def tokens(n, *shape):
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(1))


def opened(folder, tok=TOK):
    """(model, what was left out) of a folder, through a checkpoint's content."""
    gpt, weights, left_out = hf.load(folder, tok)
    return unpack(dict(gpt=gpt, model=weights)).eval(), left_out


def saved(folder, model, tok=TOK):
    content = pack(model, tok)
    hf.save(folder, content["gpt"], content["model"], tok)
    return folder


def published(folder, weights=None, write=torch.save, name="pytorch_model.bin", **changes):
    """A folder in the published form: a config.json and weights as a dictionary."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    if weights is not None:
        write(weights, folder / name)
    return folder


def close(x, y):
    torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- in

def test_sizes_of_the_published_models():
    """Parameters as the four are known by, the position table's and biases' included."""
    for name, count in {"gpt2": 124_439_808, "gpt2-medium": 354_823_168,
                        "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}.items():
        config = sized(name, 50257, 1024)
        shapes = [shape for _, shape in gpt2.names(asdict(config)).values()]
        assert sum(torch.Size(shape).numel() for shape in shapes) == count


FORMS = ("safetensors", "shards", "torch", "torch, old", "torch, shards", "no prefix")


@pytest.mark.parametrize("form", FORMS)
def test_what_transformers_has_gives_the_same_logits(theirs, tmp_path, form):
    if form in ("safetensors", "shards", "no prefix"):
        model = theirs.transformer if form == "no prefix" else theirs
        model.save_pretrained(tmp_path, max_shard_size="30KB" if form == "shards" else "1GB")
        assert len(list(tmp_path.glob("*.safetensors"))) == 1 or form == "shards"
    elif form == "torch, shards":
        published(tmp_path)
        names, shards = {}, [{}, {}, {}]
        for i, (name, x) in enumerate(theirs.state_dict().items()):
            names[name] = f"pytorch_model-{i % 3}.bin"
            shards[i % 3][name] = x
        for i, shard in enumerate(shards):
            torch.save(shard, tmp_path / f"pytorch_model-{i}.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(dict(weight_map=names)))
    else:
        published(tmp_path, theirs.state_dict())
        if form == "torch, old":  # the published .bin files have this form
            torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin",
                       _use_new_zipfile_serialization=False)
    model, left_out = opened(tmp_path)
    assert left_out == ({"tied head": 1} if form.startswith("torch") else {})
    ids = tokens(257, 2, 29)
    with torch.no_grad():
        wanted, logits = theirs(ids).logits, model.logits(model(ids))
    assert wanted.std() > 1 and logits.shape[-1] == 262
    close(logits[..., :257], wanted)


def test_special_tokens_start_at_the_mean(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    gpt, weights, _ = hf.load(tmp_path, TOK)
    table = theirs.transformer.wte.weight.detach()
    assert gpt == dict(SIZES, vocab=262, scalar=False)
    assert weights["wte.weight"].shape == (320, 35)  # a multiple of 64
    assert torch.equal(weights["wte.weight"][:257], table)
    close(weights["wte.weight"][257:], table.double().mean(0).float().expand(63, -1))
    assert (TOK.eod, TOK.pad, TOK.vocab) == (256, 257, 262)


def test_masks_of_old_files_are_left_out(theirs, tmp_path):
    weights = {name.removeprefix("transformer."): x for name, x in theirs.state_dict().items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 37, 37).tril().byte() for i in range(3)}
    weights |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    model, left_out = opened(published(tmp_path, weights))
    assert left_out == {"tied head": 1, "causal masks": 6}
    ids = tokens(257, 1, 11)
    with torch.no_grad():
        close(model.logits(model(ids))[..., :257], theirs(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_lower_precision_becomes_float32(library, theirs, tmp_path, dtype):
    low = {name: x.to(dtype) for name, x in theirs.transformer.state_dict().items()}
    published(tmp_path, low, library.save_file, "model.safetensors")
    _, weights, _ = hf.load(tmp_path, TOK)
    assert {x.dtype for x in weights.values()} == {torch.float32}
    assert torch.equal(weights["wpe.weight"], low["wpe.weight"].float())


# ---------------------------------------------------------------- out

def test_a_saved_model_gives_the_same_logits(transformers, tmp_path):
    model, ids = ours(), tokens(262, 2, 37)
    other, info = transformers.GPT2LMHeadModel.from_pretrained(
        saved(tmp_path / "x", model), output_loading_info=True)
    assert not any(map(len, info.values())), info
    assert other.get_input_embeddings().weight.shape == (262, 35)  # no row that rounds up
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    with torch.no_grad():
        wanted = model.logits(model(ids))
        assert wanted.std() > 1
        close(other.eval()(ids).logits, wanted)


def test_what_config_json_says(transformers, tmp_path):
    saved(tmp_path / "x", ours())
    config = transformers.AutoConfig.from_pretrained(tmp_path / "x")
    text = json.loads((tmp_path / "x" / "config.json").read_text())
    assert type(config) is transformers.GPT2Config and text["architectures"] == ["GPT2LMHeadModel"]
    for key, value in dict(vocab_size=262, n_positions=37, n_embd=35, n_layer=3, n_head=5,
                           n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5,
                           tie_word_embeddings=True, bos_token_id=TOK.eod, eos_token_id=TOK.eot,
                           pad_token_id=TOK.pad, attn_pdrop=0, resid_pdrop=0,
                           embd_pdrop=0).items():
        assert getattr(config, key) == text[key] == value, key
    note = (tmp_path / "x" / "README.md").read_text()
    names = ", ".join(f"<|{name}|> = {256 + i}" for i, name in enumerate(
        ("eod", "pad", "human", "assistant", "eot", "eoc")))
    assert f"Ids below 256 are text. Special ids: {names}.\n" in note


@pytest.mark.parametrize("scalar", [False, True])
def test_out_and_in_again_is_the_same(tmp_path, scalar):
    model = ours(scalar=scalar)
    again, left_out = opened(saved(tmp_path / "x", model))
    assert again.config == model.config and left_out == {}
    for name, p in model.named_parameters():
        q = dict(again.named_parameters())[name]
        cut = slice(262) if name == "wte.weight" else ...
        same = torch.equal(p[cut], q[cut])
        assert same or name == "score_head.bias" and q == 0, name


def test_the_same_greedy_text(transformers, tmp_path):
    """With cache and without, ended by a special id or by the limit."""
    model = ours()
    with torch.no_grad():
        model.wte.weight[256:262] *= 1.1  # likelier: some answers shall end
    saved(tmp_path / "x", model)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    prompts = [[256], *(tokens(256, n).tolist() for n in (1, 2, 5, 7, 13, 19, 20, 21))]
    rows, lengths, _ = generate(model, prompts, 16, stops=TOK.stops, pad=TOK.pad)
    assert len({*lengths.tolist()} - {16}) > 1 and 16 in lengths and len(rows.unique()) > 20
    for cache in (False, True):
        for prompt, row, length in zip(prompts, rows.tolist(), lengths.tolist(), strict=True):
            ids = torch.tensor([prompt])
            out = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16,
                                 use_cache=cache, do_sample=False)[0, len(prompt):].tolist()
            assert out == row[:length]
            assert reader.decode(out, skip_special_tokens=True) == TOK.decode(row[:length])


def test_a_preference_model_scores_the_same(transformers, tmp_path):
    """Answers of one prompt in a row here, each in its own row there, padded."""
    model = ours(scalar=True)
    shift = model.score_head.bias.item()
    prompts = [TOK.render([("human", text)], answer=True) for text in ("fox?", "")]
    rows = [(p, [TOK.render_answer(a) + [TOK.eoc] for a in ("barn", "a", "")]) for p in prompts]
    saved(tmp_path / "x", model)
    assert f"{shift:g}" in (tmp_path / "x" / "README.md").read_text() and abs(shift) > 0.01
    other = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "x").eval()
    assert other.config.num_labels == 1
    assert other.config.architectures == ["GPT2ForSequenceClassification"]
    again, _ = opened(tmp_path / "x")
    separate = [p + a for p, answers in rows for a in answers]
    ids = torch.full((6, max(map(len, separate))), TOK.pad)
    for i, row in enumerate(separate):
        ids[i, :len(row)] = torch.tensor(row)
    with torch.no_grad():
        wanted = other(ids, attention_mask=(ids != TOK.pad).long()).logits.view(2, 3)
        assert wanted.std() > 0.3
        close(score_rows(model, TOK, rows) - shift, wanted)
        close(score_rows(again, TOK, rows), wanted)


# ---------------------------------------------------------------- safetensors

@pytest.fixture
def no_library(monkeypatch):
    """As where safetensors is not installed; .undo() installs it."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    return monkeypatch


def test_what_is_written(library, tmp_path):
    """float32, without gaps, whole rows and not what they are views of, for other users too."""
    weights = {"a": torch.randn(3, 5).T, "b": torch.randn(999, 2)[:3], "c": torch.ones(2).half()}
    path = hf.write_weights(tmp_path, weights)
    read = library.load_file(path)
    assert read.keys() == weights.keys() and {x.dtype for x in read.values()} == {torch.float32}
    assert all(torch.equal(read[name], x.float()) for name, x in weights.items())
    assert library.safe_open(path, "pt").metadata() == {"format": "pt"}
    with pytest.raises(OSError, match="nowhere/model.safetensors"):
        hf.write_weights(tmp_path / "nowhere", weights)
    saved(tmp_path / "x", ours())
    assert len({p.stat().st_mode for p in (tmp_path / "x").iterdir()}) == 1


def test_safetensors_cut_off_or_foreign(library, theirs, tmp_path):
    published(tmp_path, theirs.transformer.state_dict(), library.save_file, "model.safetensors")
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    opened(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    for content in (b"", *(whole[:n] for n in (7, 8, 1000, -1)), whole + b"\0", pointer, bytes(64)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors: not a whole safetens") as error:
            hf.load(tmp_path, TOK)
        assert "\n" not in str(error.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="no weights here"):
        hf.load(tmp_path, TOK)


def test_reading_without_the_library(theirs, no_library, tmp_path):
    """pytorch_model.bin is read though model.safetensors, broken here, comes first; else a hint."""
    state = theirs.state_dict()
    published(tmp_path, state)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    _, weights, _ = hf.load(tmp_path, TOK)
    assert torch.equal(weights["wpe.weight"], state["transformer.wpe.weight"])
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="model.safetensors: .*: pip install safetensors$"):
        hf.load(tmp_path, TOK)
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = dict(weight_map={"wpe.weight": "x.safetensors"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="x.safetensors: .*: pip install safetensors$"):
        hf.load(tmp_path, TOK)
    no_library.undo()
    with pytest.raises(ValueError, match="x.safetensors: not a whole safetensors file"):
        hf.load(tmp_path, TOK)


def test_writing_without_the_library(transformers, no_library, tmp_path):
    model, ids = ours(), tokens(262, 2, 37)
    folder = saved(tmp_path / "x", model)
    files = {p.name for p in folder.iterdir()}
    assert "pytorch_model.bin" in files and not {n for n in files if "safetensors" in n}
    whole = sum(p.numel() for p in model.parameters()) * 4  # 320 rows of the table, written are 262
    assert (folder / "pytorch_model.bin").stat().st_size < whole - 58 * 35 * 4 + 20_000
    again, left_out = opened(folder)
    no_library.undo()
    other, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert left_out == {} and not any(map(len, info.values())), info
    with torch.no_grad():
        wanted = model.logits(model(ids))
        close(again.logits(again(ids)), wanted)
        close(other.eval()(ids).logits, wanted)


# ---------------------------------------------------------------- what is refused

@pytest.mark.parametrize("key, value", [
    ("model_type", "gpt_neo"), ("n_inner", 141), ("activation_function", "relu"),
    ("activation_function", "gelu"), ("layer_norm_epsilon", 1e-6), ("scale_attn_weights", False),
    ("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True),
    ("add_cross_attention", True), ("tie_word_embeddings", False), ("n_embd", "35"),
    ("n_layer", 0), ("n_head", None), ("vocab_size", 2.5), ("n_positions", True)])
def test_another_network_is_refused(tmp_path, key, value):
    with pytest.raises(ValueError, match=f"config.json: {key} is {re.escape(repr(value))}"):
        hf.load(published(tmp_path, {}, **{key: value}), TOK)


def test_what_means_the_same_is_not_refused(tmp_path):
    published(tmp_path, n_inner=140, activation_function="gelu_pytorch_tanh")
    assert hf.read_config(tmp_path)[:2] == (gpt2, SIZES)


def test_a_tokenizer_of_another_model(tmp_path):
    for vocab in (255, 263):
        with pytest.raises(ValueError, match=f"knows {vocab} ids, the tokenizer has 256 and 6"):
            hf.load(published(tmp_path, {}, vocab_size=vocab), TOK)


def put(name, value):
    return lambda weights: weights.update({name: value})


@pytest.mark.parametrize("change, words", [
    (lambda w: w.pop("transformer.h.2.mlp.c_fc.bias"), "'h.2.mlp.c_fc.bias' is missing"),
    (lambda w: w.pop("transformer.wte.weight"), "'wte.weight' is missing"),
    (put("transformer.wpe.weight", torch.ones(36, 35)), "wpe.weight' is .36, 35., by .* .37, 35."),
    (put("transformer.h.0.attn.c_attn.weight", torch.ones(105, 35)), "is .105, 35., by"),
    (put("transformer.h.3.ln_1.bias", torch.ones(35)), "'transformer.h.3.ln_1.bias' is unknown"),
    (put("transformer.h.0.attn.q.bias", torch.ones(35)), "unknown"),
    (put("ln_f.bias", torch.ones(35)), "'ln_f.bias' is doubled"),
    (put("lm_head.weight", torch.ones(257, 35)), "'lm_head.weight' differs from 'wte.weight'"),
    (put("lm_head.bias", torch.ones(257)), "'lm_head.bias' is unknown"),
    (put("score.weight", torch.ones(2, 35)), "'score.weight' is .2, 35., by .* .1, 35."),
    (put("transformer.ln_f.weight", torch.full((35,), torch.nan)), "ln_f.weight' holds what"),
    (put("transformer.ln_f.weight", torch.ones(35).int()), "ln_f.weight' holds what"),
    (put("transformer.ln_f.weight", torch.ones(35).double() * 1e40), "ln_f.weight' holds what"),
])
def test_a_wrong_tensor_is_named(theirs, tmp_path, change, words):
    weights = dict(theirs.state_dict())
    change(weights)
    with pytest.raises(ValueError, match=words) as error:
        hf.load(published(tmp_path, weights), TOK)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


class Code:
    """Unpickled by the usual loader, this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_runs_no_code(tmp_path):
    marker = tmp_path / "marker"
    published(tmp_path, {"wte.weight": Code(marker)})
    with pytest.raises(ValueError, match="pytorch_model.bin: not a readable file"):
        hf.load(tmp_path, TOK)
    assert not marker.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)["wte.weight"].close()
    assert marker.exists()  # it would have


def test_folders_that_are_none(theirs, tmp_path):
    def refused(words):
        with pytest.raises(ValueError, match=words) as error:
            hf.load(tmp_path, TOK)
        assert "\n" not in str(error.value)

    refused("config.json: no such file")
    (tmp_path / "config.json").write_text("{")
    refused("config.json: not JSON")
    (tmp_path / "config.json").write_text("[]")
    refused("config.json: not a JSON object")
    published(tmp_path)
    refused("no weights here, neither model.safetensors nor pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused("pytorch_model.bin: not a readable file")
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    refused("pytorch_model.bin: not a dictionary of tensors")
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(whole[:len(whole) // 2])
    refused("pytorch_model.bin: not a readable file")


def test_shards_that_do_not_fit_their_index(theirs, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = index["weight_map"]
    first, *_, last = sorted(names, key=names.get)
    moved = next(n for n in names if 1 < list(names.values()).count(names[n]) < len(names))

    def refused(words, **changes):
        path.write_text(json.dumps({**index, "weight_map": {**names, **changes}}))
        with pytest.raises(ValueError, match=words):
            hf.load(tmp_path, TOK)

    refused(f"no tensor 'new', though {path.name} names it", new=names[first])
    assert names[moved] != names[last]
    refused(f"tensor '{moved}' is not there by", **{moved: names[last]})
    refused("model-9.safetensors: missing", new="model-9.safetensors")
    for name in (tmp_path.parent / "outside.safetensors", "../outside.safetensors"):
        hf.write_weights(tmp_path.parent, {"new": torch.ones(1)}).rename(
            tmp_path.parent / "outside.safetensors")
        refused("outside.safetensors: missing", new=str(name))  # it does not leave the folder
    for wrong in ({}, {"weight_map": []}, {"weight_map": {}}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="index.json: its 'weight_map' names no tensor"):
            hf.load(tmp_path, TOK)


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    model = ours()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match=f"{name}: is there already"):
            saved(tmp_path / name, model)
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "empty", model)
    before = sorted(tmp_path.rglob("*"))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "dumps", full)
    content = dict(gpt=dict(SIZES, vocab=262, scalar=False), model=model.state_dict())
    with pytest.raises(OSError):
        hf.save(tmp_path / "new", content["gpt"], content["model"], TOK)
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.undo()
    (tmp_path / ".new.part").mkdir()  # what a kill left
    (tmp_path / ".new.part" / "model.safetensors").write_text("half")
    saved(tmp_path / "new", model)
    assert {p.name for p in tmp_path.iterdir()} == {"full", "file", "empty", "new"}
    assert len(list((tmp_path / "new").iterdir())) == 7


# ---------------------------------------------------------------- the tokenizer

def test_the_byte_names_are_gpt2s(transformers):
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    assert hf.byte_names() == convert.bytes_to_unicode()


def texts():
    yield TEXT
    yield from ("", " ", "\n\n", "a  b", "  a", "a \n\n b ", "don't DON'T 'll''s", "\u200ca\u200d")
    rng, parts = random.Random(0), "a b the fox ' s 't 1 2 _ . \u00e9 \u20ac \u0928 \u2167".split()
    for _ in range(1000):
        yield "".join(rng.choices([*parts, " ", "  ", "\n", "\t", "\u00a0"], k=rng.randint(1, 25)))
    yield from (f"a{chr(c)}1{chr(c)} {chr(c)}.{chr(c)}{chr(c)}" for c in range(0, 0xd800, 53))


def same_tokenizer(transformers, folder, tok):
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    some = list(texts())
    for text, ids in zip(some, reader(some)["input_ids"], strict=True):
        assert ids == tok.encode(text), text
    assert reader.decode(tok.encode(TEXT)) == TEXT
    assert len(reader) == tok.vocab
    for name in SPECIALS:
        assert reader.convert_tokens_to_ids(name) == getattr(tok, name.strip("<|>"))
    assert (reader.bos_token_id, reader.eos_token_id, reader.pad_token_id) == (tok.eod, tok.eot,
                                                                               tok.pad)
    assert loads((folder / "tokenizer.tiktoken").read_text()).dumps() == tok.dumps()
    return reader


def test_our_tokenizer_in_transformers(transformers, tmp_path):
    reader = same_tokenizer(transformers, saved(tmp_path / "x", ours(OWN.vocab), OWN), OWN)
    pytest.importorskip("jinja2")
    turns = [("human", "Where?\n\nHuman: it's"), ("assistant", " In the barn. "), ("human", "")]
    roles = dict(human="user", assistant="assistant")
    chat = [dict(role=roles[role], content=text) for role, text in turns]
    for preamble in ("", "The fox "):
        system = [dict(role="system", content=preamble)] * bool(preamble)
        for answer in (False, True):
            ids = reader.apply_chat_template(system + chat, add_generation_prompt=answer,
                                             return_dict=False)
            assert ids == OWN.render(turns, preamble, answer)


def test_words_are_split_alike(tmp_path):
    """Every pair of a letter, digit, sign or blank and a character is a token if it is one word."""
    tokenizers = pytest.importorskip("tokenizers")
    for pattern in ("nanohh", "gpt2"):
        for low in (0, 0x2000, 0x1f300):
            characters, ranks = range(low, low + 0x400), dict(BYTES)
            for pair in [f"{a}{chr(c)}" for a in "a1. " for c in characters]:
                ranks.setdefault(pair.encode(), len(ranks))
            tok = Tokenizer(ranks, pattern)
            other = tokenizers.Tokenizer.from_str(json.dumps(hf.tokenizer_json(tok)))
            for pair in [f"{a}{chr(c)}" for a in "a1. " for c in characters]:
                assert other.encode(pair).ids == tok.encode(pair), (pattern, pair)


def test_gpt2s_tokenizer_in_transformers(transformers, data_dir, tmp_path):
    """GPT-2's own ids, the five special ids after them, and a folder in small with all of them."""
    tok = load(data_dir / "gpt2-bpe")
    assert (tok.eod, tok.vocab) == (50256, 50262)
    model = GPT(GPTConfig(tok.vocab, 16, 1, 1, 2))
    folder = saved(tmp_path / "x", model, tok)
    reader = same_tokenizer(transformers, folder, tok)
    text = (data_dir / "text" / "sherlock.txt").read_text()[:50_000]
    assert reader(text)["input_ids"] == tok.encode(text)
    assert reader("Hello world")["input_ids"] == [15496, 995]
    assert torch.equal(opened(folder, tok)[0].wte.weight[:50262], model.wte.weight[:50262])
