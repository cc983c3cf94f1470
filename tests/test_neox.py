"""GPT-NeoX (Pythia) against transformers and tokenizers, on random weights of odd sizes.

Proved alive by: turned the other way round, v for k, pairs or base of the angles wrong, a decoded
token at position 0, the MLP after attention in parallel blocks or beside it in GPT-2's, gelu by
tanh, the keys' bias without a gradient or with all of it, the embedding for the head, a preference
model with the head or a language model's checkpoint without its options read as another; a scaling
of angles taken.
"""

import json
import math
import re
import shutil
from dataclasses import asdict

import pytest
import torch
from test_generate import RAGGED, U, same, slowly
from test_hf import TOK, close, opened, saved, shaken
from test_model import float64, randint, randn, scores_apart, scores_shared  # noqa: F401

import model as model_file
from common import adamw
from data import hf, neox
from model import (GPT, PYTHIA, SIZES, GPTConfig, generate, pack, pad_rows, shared_prompt_rows,
                   sized, turned, unpack)
from preference import score_rows
from pretrain import lm_loss
from runs import sizes

KINDS = [dict(rotary=0.25), dict(rotary=1.0), dict(rotary=0.5, parallel=False),
         dict(rotary=0.25, tied=True), dict(rotary=1.0, parallel=False, tied=True)]
NAMES = ["pythia", "whole heads", "in a row", "tied", "none of it"]
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def config_of(kind, scalar=False, vocab=262):
    """5 heads of 8 numbers, of which positions turn 2, or of 12, of which they turn 6 or 12."""
    width = 8 if kind["rotary"] == 0.25 else 12
    return GPTConfig(vocab, 37, 3, 5, 5 * width, scalar, **{**PYTHIA, **kind})


def ours(kind, scalar=False, vocab=262, seed=0):
    return shaken(GPT(config_of(kind, scalar, vocab)), seed).eval()


def theirs(transformers, kind, cls="GPTNeoXForCausalLM", vocab=257, **more):
    """Their network with every weight random, biases too."""
    c = config_of(kind)
    config = transformers.GPTNeoXConfig(
        vocab_size=vocab, hidden_size=c.n_embd, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, intermediate_size=4 * c.n_embd, rotary_pct=c.rotary,
        max_position_embeddings=37, use_parallel_residual=c.parallel, bos_token_id=256,
        eos_token_id=256, tie_word_embeddings=c.tied, **more)
    return shaken(getattr(transformers, cls)(config).eval())


# ---------------------------------------------------------------- positions that turn

def test_turned_by_hand():
    """A head of 6, positions turn 4: (1, 3) by 90 degrees, (2, 4) by 0; v and the rest stay."""
    qkv = torch.tensor([1.0, 2, 3, 4, 5, 6]).expand(1, 1, 3, 1, 6)
    cos, sin = (torch.tensor(x).view(1, 1, 1, 1, 2) for x in ([0.0, 1], [1.0, 0]))
    q, k, v = turned(qkv, cos, sin)[0, 0, :, 0].tolist()
    assert q == k == [-3, 2, 1, 4, 5, 6] and v == [1, 2, 3, 4, 5, 6]


def test_the_angles():
    """Position t turns pair i of d/2 by t / 10000^(2i/d): d = 6, t = 2."""
    model = GPT(GPTConfig(71, 9, 1, 1, 12, **{**PYTHIA, "rotary": 0.5}))
    x, (cos, sin) = model.embed(torch.tensor([[5]]), torch.tensor([[2]]))
    angles = [2.0, 2 / 10000 ** (1 / 3), 2 / 10000 ** (2 / 3)]
    assert torch.equal(x, model.wte(torch.tensor([[5]])))
    assert cos.flatten().tolist() == pytest.approx([math.cos(a) for a in angles])
    assert sin.flatten().tolist() == pytest.approx([math.sin(a) for a in angles])


def test_only_distances_matter():
    """All positions 11 later: the same hidden states; one of them later: others."""
    model, ids = ours(KINDS[0]), randint(262, 2, 9)
    here = torch.arange(9).expand(2, 9)
    with torch.no_grad():
        first, far, apart = (model(ids, positions=p) for p in (here, here + 11, here * 2))
    close(far, first)
    assert (apart - first).abs().max() > 0.1


def test_a_share_without_pairs_is_refused():
    with pytest.raises(ValueError, match="rotary 0.25: 3 numbers of a head are no pairs"):
        GPT(GPTConfig(71, 9, 1, 1, 12, **PYTHIA))


# ---------------------------------------------------------------- transformers' GPT-NeoX

@kinds
def test_what_transformers_has_gives_the_same_logits(transformers, tmp_path, kind):
    other, ids = theirs(transformers, kind), randint(257, 2, 29)
    other.save_pretrained(tmp_path)
    model, left_out = opened(tmp_path)
    assert model.config == config_of(kind) and left_out == {}
    with torch.no_grad():
        wanted, logits = other(ids).logits, model.logits(model(ids))
    assert wanted.std() > 1 and logits.shape[-1] == 262
    torch.testing.assert_close(logits[..., :257], wanted, atol=1e-4, rtol=0)


@kinds
def test_logits_in_double_precision(transformers, float64, tmp_path, kind):  # noqa: F811
    """And the gradients of all weights: those of keys' biases that positions turn, too."""
    other = theirs(transformers, kind).to(torch.float32).to(torch.float64)
    model = GPT(config_of(kind, vocab=257)).to(torch.float64)
    weights, _ = hf.from_hf(other.state_dict().items(), asdict(model.config), neox)
    model.load_state_dict({k: torch.nn.functional.pad(x, (0, 0, 0, 63)) if k in hf.TABLES else x
                           for k, x in weights.items()})
    ids, g = randint(257, 2, 29), randn(2, 29, 257)
    wanted, logits = other(ids).logits, model.logits(model(ids))
    torch.testing.assert_close(logits, wanted, atol=1e-10, rtol=0)
    for x in (wanted, logits):
        (x * g).sum().backward()
    grads = {name: p.grad for name, p in other.named_parameters()}
    found, _ = hf.from_hf(grads.items(), asdict(model.config), neox)
    for name, p in model.named_parameters():
        want = found[name].double()
        torch.testing.assert_close(p.grad[:len(want)], want, atol=1e-6 * want.abs().max(), rtol=0)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=["untied", "tied"])
@pytest.mark.parametrize("form", ["published", "torch", "older and younger names"])
def test_the_forms_of_folders(transformers, tmp_path, kind, form):
    """rotary_pct beside rope_parameters, embd_out or lm_head, masks and angles of old files."""
    other, ids = theirs(transformers, kind), randint(257, 1, 11)
    other.save_pretrained(tmp_path, max_shard_size="30KB" if form == "published" else "1GB")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    assert (rope["partial_rotary_factor"], rope["rope_theta"]) == (config_of(kind).rotary, 10000)
    config |= dict(rotary_pct=config_of(kind).rotary, rotary_emb_base=10000)
    path.write_text(json.dumps(config))
    if form != "published":
        weights = dict(other.state_dict())
        for name in [n for n in weights if "lm_head" in n or "embed_out" in n]:
            head = weights.pop(name)
        weights["lm_head.weight" if form == "torch" else "embed_out.weight"] = head
        for i in range(3):
            layer = f"gpt_neox.layers.{i}.attention."
            weights |= {layer + "bias": torch.ones(1, 1, 37, 37).tril().bool(),
                        layer + "masked_bias": torch.tensor(-1e9),
                        layer + "rotary_emb.inv_freq": torch.ones(3)}
        (tmp_path / "model.safetensors").unlink()
        torch.save(weights, tmp_path / "pytorch_model.bin")
    model, left_out = opened(tmp_path)
    tied = {"tied head": 1} if kind.get("tied") else {}
    assert left_out == ({} if form == "published" else {"causal masks": 9, **tied})
    with torch.no_grad():
        close(model.logits(model(ids))[..., :257], other(ids).logits)


@kinds
def test_a_saved_model_gives_the_same_logits_and_text(transformers, tmp_path, kind):
    """Greedy, with cache and without, prompts of all lengths; special ids end some."""
    model, ids = ours(kind), randint(262, 2, 37)
    with torch.no_grad():
        head = model.wte if model.config.tied else model.lm_head
        head.weight[256:262] *= 1.1                      # likelier: some answers shall end
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        saved(tmp_path / "x", model), output_loading_info=True)
    assert not any(map(len, info.values())), info
    assert type(other) is transformers.GPTNeoXForCausalLM
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    assert other.get_input_embeddings().weight.shape[0] == 262       # no row that rounds up
    with torch.no_grad():
        wanted = model.logits(model(ids))
        assert wanted.std() > 1
        close(other.eval()(ids).logits, wanted)
    prompts = [[256], *(randint(256, n, seed=n).tolist() for n in (1, 2, 5, 7, 13, 20, 21))]
    rows, lengths, _ = generate(model, prompts, 16, stops=TOK.stops, pad=TOK.pad)
    assert 16 in lengths and len(rows.unique()) > 20
    for prompt, row, length in zip(prompts, rows.tolist(), lengths.tolist(), strict=True):
        ids = torch.tensor([prompt])
        out = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16,
                             do_sample=False)[0, len(prompt):].tolist()
        assert out == row[:length]


@kinds
@pytest.mark.parametrize("scalar", [False, True])
def test_out_and_in_again_is_the_same(tmp_path, kind, scalar):
    model = ours(kind, scalar)
    again, left_out = opened(saved(tmp_path / "x", model))
    assert again.config == model.config and left_out == {}
    named = dict(again.named_parameters())
    assert named.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        cut = slice(262) if name in hf.TABLES else ...
        assert torch.equal(p[cut], named[name][cut]) or name == "score_head.bias", name


@kinds
def test_a_preference_model_scores_the_same(transformers, tmp_path, kind):
    """Answers of one prompt in a row here, each in its own row there, padded."""
    model = ours(kind, scalar=True)
    shift = model.score_head.bias.item()
    prompts = [TOK.render([("human", text)], answer=True) for text in ("fox?", "")]
    rows = [(p, [TOK.render_answer(a) + [TOK.eoc] for a in ("barn", "a", "")]) for p in prompts]
    other, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        saved(tmp_path / "x", model), output_loading_info=True)
    assert type(other) is transformers.GPTNeoXForSequenceClassification
    assert not any(map(len, info.values())), info
    separate = [p + a for p, answers in rows for a in answers]
    ids = torch.full((6, max(map(len, separate))), TOK.pad)
    for i, row in enumerate(separate):
        ids[i, :len(row)] = torch.tensor(row)
    with torch.no_grad():
        wanted = other.eval()(ids, attention_mask=(ids != TOK.pad).long()).logits.view(2, 3)
        assert wanted.std() > 0.1
        close(score_rows(model, TOK, rows) - shift, wanted)
        other.save_pretrained(tmp_path / "y")
        close(score_rows(opened(tmp_path / "y")[0], TOK, rows), wanted)


def test_what_config_json_says(transformers, tmp_path):
    for kind in KINDS:
        name = f"{kind}"
        saved(tmp_path / name, ours(kind))
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        text = json.loads((tmp_path / name / "config.json").read_text())
        c = config_of(kind)
        for key, value in dict(
                vocab_size=262, max_position_embeddings=37, hidden_size=c.n_embd, hidden_act="gelu",
                num_hidden_layers=3, num_attention_heads=5, intermediate_size=4 * c.n_embd,
                layer_norm_eps=1e-5, use_parallel_residual=c.parallel, attention_bias=True,
                tie_word_embeddings=c.tied, bos_token_id=256, eos_token_id=TOK.eot,
                pad_token_id=TOK.pad, attention_dropout=0, hidden_dropout=0).items():
            assert getattr(config, key) == text[key] == value, key
        rope = config.rope_parameters
        assert (rope["partial_rotary_factor"], rope["rope_theta"]) == (c.rotary, 10000)
        assert (text["rotary_pct"], text["rotary_emb_base"]) == (c.rotary, 10000)
        assert text["architectures"] == ["GPTNeoXForCausalLM"]
        note = (tmp_path / name / "README.md").read_text()
        assert "GPT-NeoX's architecture. `transformers.GPTNeoXForCausalLM." in note


@pytest.mark.parametrize("options", [dict(rotary=0.5), dict(exact_gelu=True), dict(parallel=True),
                                     dict(tied=False), dict(rotary=0.5, parallel=True)])
def test_a_mixture_is_not_written(tmp_path, options):
    with pytest.raises(ValueError, match="transformers has no network with some of rotary"):
        saved(tmp_path / "x", GPT(GPTConfig(262, 37, 1, 1, 8, **options)))
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- what works for GPT-2 works for it

@kinds
def test_shared_rows_equal_separate_rows(float64, kind):  # noqa: F811
    """Scores and every gradient: a response's positions go on from its prompt."""
    model, grads, weights = ours(kind, scalar=True), [], randn(2, 3)
    prompts = [randint(262, n).tolist() for n in (2, 11)]
    responses = [[randint(262, n, seed=n).tolist() for n in some]
                 for some in ((3, 1, 7), (2, 5, 3))]
    for scores in (scores_apart, scores_shared):
        model.zero_grad()
        found = scores(model, prompts, responses)
        (found * weights).sum().backward()
        grads.append([found.detach(), *(p.grad.clone() for p in model.parameters())])
    assert grads[0][0].std() > 0.05 and all(g.abs().max() > 1e-4 for g in grads[0])
    for apart, shared in zip(*grads, strict=True):
        torch.testing.assert_close(shared, apart, atol=1e-9, rtol=1e-8)


@kinds
@pytest.mark.parametrize("how", [dict(), dict(temperature=1.3, top_k=5)], ids=["greedy", "sampled"])
def test_generation_equals_the_full_forward(kind, how):
    """Ragged prompts, one row of each and three; rows that end leave, the others keep theirs."""
    model, stops = ours(kind, vocab=67), tuple(range(0, 67, 9))
    prompts = [[i % 67 for i in prompt] for prompt in RAGGED]
    for n in (1, 3):
        uniform = U[:5 * n, :13] if how else None
        out = generate(model, prompts, 13, uniform, n=n, stops=stops, **how)
        assert not how or len(set(out[1].tolist())) > 1
        for row in range(5 * n):
            u = None if uniform is None else uniform[row]
            same(*out, row, slowly(model, prompts[row // n], 13, u, stops=stops, **how))


@kinds
def test_pads_change_no_bit_and_checkpointing_neither(kind):
    model, found = ours(kind).train(), []
    for pad, again in ((0, False), (261, False), (0, True)):
        ids, lengths = pad_rows([randint(262, n, seed=n).tolist() for n in (3, 17, 1)], pad)
        model.checkpoint = again
        model.zero_grad()
        loss = lm_loss(model, ids, lengths)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("kind", KINDS[:2], ids=NAMES[:2])
def test_the_keys_bias_moves_only_where_it_is_seen(kind):
    """What positions don't turn of it has a gradient of exactly 0, the rest has not."""
    model = ours(kind)
    lm_loss(model, randint(262, 2, 19), torch.tensor([19, 19])).backward()
    c = model.config
    for block in model.h:
        q, k, v = block.attn.c_attn.bias.grad.view(3, c.n_head, -1)
        assert k[:, :c.turned].all() and k[:, :c.turned].abs().max() > 0.01
        assert not k[:, c.turned:].any() and q.all() and v.all()


@pytest.mark.parametrize("kind", KINDS[:2], ids=NAMES[:2])
def test_attention_by_the_kernels(monkeypatch, kind):
    """Packed rows, shared prompts, their gradients, decoding with one row of a prompt and three."""
    pytest.importorskip("triton")
    monkeypatch.setattr(model_file, "AUTOCAST", {})
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(model_file, "FUSED", devices)
        model = ours(kind, scalar=True)
        assert bool(model_file.fused(model)) == bool(devices)
        *rows, ends = shared_prompt_rows([[1, 2], [3, 4, 5]], [[[6], [7, 8]], [[9, 1], [2]]], 0)
        scores = model.score(model(*rows, at=(torch.arange(2)[:, None], ends)))
        (scores * randn(2, 2)).sum().backward()
        grads = [p.grad for p in model.parameters()]
        speaker = ours(kind, vocab=67)
        drawn = [generate(speaker, [[1, 2, 3], [4]], 3, U[:2 * n, :3], n=n) for n in (1, 3)]
        found.append([scores.detach(), *grads, *(x for out in drawn for x in out)])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.long
def test_compiled_blocks_compute_the_same():
    if not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    ids, lengths = randint(262, 3, 7), torch.tensor([7, 4, 2])
    plain, other = ours(KINDS[0]), ours(KINDS[0])
    other.use(compile=True)
    found = []
    for model in (plain, other):
        lm_loss(model, ids, lengths).backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- sizes and checkpoints

def test_old_checkpoints_load():
    """A config without the options is GPT-2's, as when it was written."""
    model = GPT(GPTConfig(71, 37, 1, 1, 8))
    content = pack(model, TOK)
    for name in ("rotary", "parallel", "tied", "exact_gelu"):
        del content["gpt"][name]
    c = unpack(content).config
    assert (c.rotary, c.parallel, c.tied, c.exact_gelu) == (0.0, False, True, False)


def test_a_preference_model_of_a_language_model_has_its_weights_but_the_head():
    model = ours(KINDS[0])
    scored = unpack(pack(model, TOK), scalar=True)
    assert {k for k, _ in model.named_parameters()} - {k for k, _ in scored.named_parameters()} == {
        "lm_head.weight"}
    assert scored.config == config_of(KINDS[0], scalar=True) and not scored.score_head.weight.any()
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in scored.named_parameters()
               if not name.startswith("score_head"))
    again = unpack(pack(scored, TOK))
    assert again.config == scored.config


PUBLISHED = {"14m": 14_067_712, "31m": 30_494_720, "70m": 70_426_624, "160m": 162_322_944,
             "410m": 405_334_016, "1b": 1_011_781_632, "1.4b": 1_414_647_808,
             "2.8b": 2_775_208_960, "6.9b": 6_857_302_016, "12b": 11_846_072_320}
ROWS = {"6.9b": 50432, "12b": 50688}                     # published tables, where not 50304


@pytest.mark.parametrize("name", SIZES)
def test_the_counted_parameters_are_the_modules(name):
    """On torch's device "meta" nothing is held: tensors are but shapes. Pythia's are known."""
    vocab, n_ctx = sizes.published(name)
    for scalar in (False, True):
        c = sized(name, vocab, n_ctx, scalar)
        with torch.device("meta"):
            model = GPT(c)
        number = sum(p.numel() for p in model.parameters())
        assert sizes.parameters(c) == number
        assert sizes.memory(c) == dict(weights=4 * number, gradients=4 * number, adam=8 * number,
                                       all=16 * number)
    short = name.removeprefix("pythia-")
    if short != name:
        assert sizes.parameters(sized(name, ROWS.get(short, 50304), 2048)) == PUBLISHED[short]
        assert (c.rotary, c.parallel, c.tied, c.exact_gelu) == (0.25, True, False, True)
        shapes = [shape for _, shape in neox.names(vars(sized(name, 50304, 2048))).values()]
        assert sum(math.prod(shape) for shape in shapes) == sizes.parameters(
            sized(name, 50304, 2048)) - 50304 * c.n_embd
    assert any(line.startswith(f"| {name} | {c.n_layer} | ") for line in sizes.table())


def test_training_takes_the_counted_memory():
    """16 bytes a parameter of a real step by common.adamw."""
    model = ours(KINDS[0])
    optimizer = adamw(model, 1e-3)
    lm_loss(model, randint(262, 2, 9), torch.tensor([9, 9])).backward()
    optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters()),
            *(x for state in optimizer.state.values() for x in state.values() if x.ndim)]
    assert sum(x.numel() * x.element_size() for x in held) == sizes.memory(model.config)["all"]


# ---------------------------------------------------------------- what is refused

def published(folder, weights=None, **changes):
    """A folder in the published form."""
    folder.mkdir(exist_ok=True)
    c = config_of(KINDS[0])
    config = dict(
        architectures=["GPTNeoXForCausalLM"], bos_token_id=256, eos_token_id=256, hidden_act="gelu",
        hidden_size=c.n_embd, initializer_range=0.02, intermediate_size=4 * c.n_embd,
        layer_norm_eps=1e-5, max_position_embeddings=37, model_type="gpt_neox",
        num_attention_heads=5, num_hidden_layers=3, rotary_emb_base=10000, rotary_pct=0.25,
        tie_word_embeddings=False, torch_dtype="float16", use_cache=True,
        use_parallel_residual=True, vocab_size=257)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if weights is not None:
        torch.save(weights, folder / "pytorch_model.bin")
    return folder


YARN = dict(rope_type="yarn", factor=2.0, rope_theta=10000)


@pytest.mark.parametrize("key, value", [
    ("intermediate_size", 100), ("hidden_act", "gelu_new"), ("layer_norm_eps", 1e-6),
    ("attention_bias", False), ("rope_scaling", dict(type="linear", factor=2.0)),
    ("use_parallel_residual", None), ("tie_word_embeddings", "no"), ("hidden_size", 40.0),
    ("num_hidden_layers", 0), ("max_position_embeddings", None), ("num_attention_heads", 7),
    ("rotary_emb_base", 500), ("rotary_pct", 0), ("rotary_pct", 0.2), ("rotary_pct", 1.5),
    ("rotary_pct", "0.25"), ("rotary_pct", 0.375), ("rope_parameters", [1])])
def test_another_network_is_refused(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"json: {key} is {re.escape(repr(value))}") as error:
        hf.load(published(tmp_path, {}, **{key: value}), TOK)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rope, words", [
    (YARN, "rope_type is 'yarn', this GPT has 'default' only"),
    (dict(rope_type="default", rope_theta=5), "rotary_emb_base is 5, this GPT has 10000 only"),
    (dict(partial_rotary_factor=0.1), "rotary_pct is 0.1, not a share that makes pairs")])
def test_other_angles_are_refused(tmp_path, rope, words):
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        hf.load(published(tmp_path, {}, rope_parameters=rope), TOK)


def test_another_model_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model_type is 'gptj', this GPT can be gpt2 or gpt_neox"):
        hf.load(published(tmp_path, {}, model_type="gptj"), TOK)


def put(name, value):
    return lambda weights: weights.update({name: value})


@pytest.mark.parametrize("change, words", [
    (lambda w: w.pop("gpt_neox.layers.2.mlp.dense_h_to_4h.bias"),
     "'layers.2.mlp.dense_h_to_4h.bias' is missing"),
    (lambda w: w.pop("embed_out.weight"), "'embed_out.weight' is missing"),
    (put("gpt_neox.layers.0.attention.query_key_value.weight", torch.ones(40, 120)),
     "query_key_value.weight' is .40, 120., by config.json .120, 40."),
    (put("gpt_neox.layers.3.mlp.dense_h_to_4h.bias", torch.ones(160)), "unknown"),
    (put("lm_head.weight", torch.ones(257, 40)), "'lm_head.weight' is doubled"),
    (put("embed_in.weight", torch.ones(257, 40)), "'embed_in.weight' is doubled"),
    (put("score.weight", torch.ones(2, 40)), "'score.weight' is .2, 40., by .* .1, 40."),
    (put("gpt_neox.final_layer_norm.bias", torch.full((40,), torch.nan)), "no finite real")])
def test_a_wrong_tensor_is_named(tmp_path, change, words):
    model = ours(KINDS[0], vocab=257)
    weights = hf.to_hf(model.state_dict(), asdict(model.config), neox)
    change(weights)
    with pytest.raises(ValueError, match=words) as error:
        hf.load(published(tmp_path, weights), TOK)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_tied_head_that_differs(tmp_path):
    model = ours(KINDS[0], vocab=257)
    weights = hf.to_hf(model.state_dict(), asdict(model.config), neox)
    with pytest.raises(ValueError, match="'embed_out.weight' differs from 'embed_in.weight'"):
        hf.load(published(tmp_path, weights, tie_word_embeddings=True), TOK)


def test_rows_beyond_the_tokenizer(tmp_path):
    """Published tables are rounded up: ids that nobody trained start at the mean of the others."""
    model = ours(KINDS[0], vocab=300)
    weights = hf.to_hf(model.state_dict(), asdict(model.config), neox)
    gpt, state, _ = hf.load(published(tmp_path, weights, vocab_size=300), TOK)
    assert gpt["vocab"] == 262
    for name, module in (("wte.weight", model.wte), ("lm_head.weight", model.lm_head)):
        assert state[name].shape == (320, 40)
        assert torch.equal(state[name][:256], module.weight[:256])
        close(state[name][256:], module.weight[:256].double().mean(0).float().expand(64, -1))
    for changes in (dict(bos_token_id=0), dict(bos_token_id=None)):
        published(tmp_path, weights, vocab_size=300, **changes)
        with pytest.raises(ValueError, match="knows 300 ids, the tokenizer has 256 and 6 special"):
            hf.load(tmp_path, TOK)
    with pytest.raises(ValueError, match="knows 255 ids, the tokenizer has 256 and 6"):
        hf.load(published(tmp_path, weights, vocab_size=255), TOK)
