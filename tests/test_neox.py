"""GPT-NeoX (Pythia) against transformers and tokenizers, on random weights of odd sizes.

"""

import json
import math
import random
import re

import pytest
import torch
from test_hf import close, shaken
from test_model import float64, randint, randn, scores_apart, scores_shared  # noqa: F401

from data import hf, neox, tokenizer
from data.tokenizer import SPECIALS, Tokenizer, load, loads
from model import (GPT, PYTHIA, SIZES, GPTConfig, Rows, attention_reference, generate, pack,
                   shared_prompt_rows, sized, turned, unpack)
from preference import score_rows
from pretrain import lm_loss

TOK = Tokenizer({bytes([b]): b for b in range(256)}, "gpt2")
KINDS = [dict(rotary=0.25), dict(rotary=1.0), dict(rotary=0.5, parallel=False),
         dict(rotary=0.25, tied=True), dict(rotary=1.0, parallel=False, tied=True)]
NAMES = ["pythia", "whole heads", "in a row", "tied", "none of it"]
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def config_of(kind, scalar=False, vocab=262):
    """7 heads of 12 numbers, of which positions turn 2, 6 or 12 (int(12 x 0.25) is odd: 8)."""
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


def opened(folder, tok=TOK):
    gpt, weights, left_out = hf.load(folder, tok)
    return unpack(dict(gpt=gpt, model=weights)).eval(), left_out


def saved(folder, model, tok=TOK):
    content = pack(model, tok)
    hf.save(folder, content["gpt"], content["model"], tok)
    return folder


# ---------------------------------------------------------------- positions that turn

def test_turned_by_hand():
    """A head of 6, positions turn 4: (1, 3) by 90 degrees, (2, 4) by 0; v and the rest stay."""
    qkv = torch.tensor([1.0, 2, 3, 4, 5, 6]).expand(1, 1, 3, 1, 6)
    cos, sin = torch.tensor([0.0, 1]).view(1, 1, 1, 1, 2), torch.tensor([1.0, 0]).view(1, 1, 1, 1, 2)
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
    weights, _ = hf.from_hf(other.state_dict().items(), vars(model.config), hf.neox)
    model.load_state_dict({k: torch.nn.functional.pad(x, (0, 0, 0, 63)) if k in hf.TABLES else x
                           for k, x in weights.items()})
    ids, g = randint(257, 2, 29), randn(2, 29, 257)
    wanted, logits = other(ids).logits, model.logits(model(ids))
    torch.testing.assert_close(logits, wanted, atol=1e-10, rtol=0)
    for x in (wanted, logits):
        (x * g).sum().backward()
    grads = {name: p.grad for name, p in other.named_parameters()}
    found, _ = hf.from_hf(grads.items(), vars(model.config), hf.neox)
    for name, p in model.named_parameters():
        want = found[name].double()
        torch.testing.assert_close(p.grad[:len(want)], want, atol=1e-6 * want.abs().max(), rtol=0)


@kinds
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
        assert wanted.std() > 0.3
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
                tie_word_embeddings=c.tied, bos_token_id=256, eos_token_id=TOK.eot, hidden_dropout=0,
                pad_token_id=TOK.pad, attention_dropout=0).items():
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
