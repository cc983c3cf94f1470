"""Pythia's tokenizer.json against the tokenizers library: one in its form, trained in small.

Proved alive by: GPT-2's white space beside runs of blanks, merges' ids for runs, merges in any
order, no composing, twins without a text, whose ids are special, lost or after the others in the
file; in what is written, ids 0 and 1 not in the vocabulary, runs as special tokens.
"""

import json
import random
import unicodedata

import pytest

from data import hf, neox
from data.tokenizer import SPECIALS, load, loads

TEXT = ("def f(x):\n    if x:\n        return 'a  b'\n\n\n    it's   1842,\tcaf\u00e9 caf\u00e9  \n"
        "                                  deep;    the fox  the fox\u3000\u00a0 \r\n" * 3)
MISSING = {0xC0, 0xC1, *range(0xF5, 0x100)}           # bytes that no UTF-8 has


def trained(text, size):
    """A tokenizer in Pythia's form that the library trains: special ids, 243 bytes, merges, blanks.
    """
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.BPE())
    made.normalizer = library.normalizers.NFC()
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = library.processors.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel(add_prefix_space=False)
    letters = [name for b, name in neox.byte_names().items() if b not in MISSING]
    made.train_from_iterator([text], library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(neox.ENDS), initial_alphabet=letters,
        show_progress=False))
    made.add_tokens([library.AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, made = tmp_path_factory.mktemp("pythia"), trained(TEXT, 330)
    made.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tok(folder):
    return load(str(folder))


def texts():
    yield from (TEXT, "", " ", "  ", "\n  ", "  \n", " \n ", "a  b", "a\n  b", "a \n  \n b", "\t  ")
    yield from (" " * n + end for n in range(60) for end in ("", "x", "\n", "\n\n x"))
    rng = random.Random(0)
    parts = [*"ab1.,_'", *"  \n\n\t\u00a0\u3000", "  ", "   ", "the fox", "'s",
             "e\u0301", "\u00e9", "\u212b", "\uac00", "\u1100\u1161", "\U0001f98a", "\u200d", "caf"]
    for _ in range(3000):
        yield "".join(rng.choices(parts, k=rng.randint(1, 25)))


def test_ids_are_the_librarys(tok, theirs):
    for text in texts():
        ids = tok.encode(text)
        assert ids == theirs.encode(text).ids, repr(text)
        assert tok.decode(ids) == unicodedata.normalize("NFC", text)


def test_every_id_has_the_librarys_text(tok, theirs):
    """Those, too, that no text becomes: what merges make of blanks alone."""
    assert len(tok.twins) > 2 and all(not t.strip(b" ") for t in tok.twins.values())
    assert tok.vocab == theirs.get_vocab_size() + 4
    for i in range(2, theirs.get_vocab_size()):
        assert tok.decode([i]) == theirs.decode([i]), i
    assert tok.decode([0, 1, theirs.token_to_id("a"), *range(tok.vocab - 4, tok.vocab)]) == "a"


def test_special_ids(tok, theirs):
    """<|endoftext|> and <|padding|> are ours, 0 and 1; four follow the text's."""
    n = theirs.get_vocab_size()
    assert (tok.eod, tok.pad, tok.human, tok.assistant, tok.eot, tok.eoc) == (
        0, 1, n, n + 1, n + 2, n + 3)
    assert sorted(tok.stops) == [0, 1, n, n + 1, n + 2, n + 3]
    assert set(tok.special_ids) == {*SPECIALS}
    assert [tok.show(i) for i in (0, 1, n)] == ["<|eod|>", "<|pad|>", "<|human|>"]
    assert tok.show(theirs.token_to_id("a")) == "a"
    for text in ("<|endoftext|>", "<|padding|>", "<|human|>"):
        assert tok.decode(tok.encode(text)) == text and not {*tok.encode(text)} & {*tok.stops}


def test_dumps_and_back(tok):
    back = loads(tok.dumps())
    assert tok.dumps().startswith("pattern neox\n") and back.dumps() == tok.dumps()
    assert (back.ranks, back.twins, back.special_ids) == (tok.ranks, tok.twins, tok.special_ids)
    assert all(back.encode(text) == tok.encode(text) for text in texts())
    lines = tok.dumps().splitlines()
    without = [line for line in lines if not line.startswith("QQ== ")]
    for bad in ([*lines[:270], *lines[271:]], [*lines, "QUJD 9999"], without):
        with pytest.raises(ValueError, match="must run from 2 without a gap and hold all 243"):
            loads("\n".join(bad))


def test_an_exported_folder_reads_alike(tok, tmp_path):
    """Its tokenizer.json by the library, its tokenizer.tiktoken by us, the folder's name given."""
    library = pytest.importorskip("tokenizers")
    other = library.Tokenizer.from_str(json.dumps(hf.tokenizer_json(tok)))
    for text in texts():
        assert other.encode(text).ids == tok.encode(text), repr(text)
    for i in set(range(tok.vocab)) - {*tok.stops}:
        assert other.decode([i]) == tok.decode([i]), i
    assert other.get_vocab_size() == tok.vocab
    assert {name: other.token_to_id(name) for name in SPECIALS} == tok.special_ids
    (tmp_path / "tokenizer.tiktoken").write_text(tok.dumps())
    assert load(str(tmp_path)).dumps() == tok.dumps()


def test_by_transformers(transformers, tok, tmp_path):
    """Where the folder is a GPT-NeoX's, AutoTokenizer must not make a tokenizer of its own."""
    from model import GPT, GPTConfig
    model = GPT(GPTConfig(tok.vocab, 37, 1, 1, 8, rotary=0.5, exact_gelu=True))
    hf.save(tmp_path / "x", vars(model.config), model.state_dict(), tok)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
    for text in list(texts())[::7]:
        assert reader(text)["input_ids"] == tok.encode(text), repr(text)
    assert (reader.bos_token_id, reader.eos_token_id, reader.pad_token_id) == (0, tok.eot, 1)
    note = (tmp_path / "x" / "README.md").read_text()
    assert f"Ids 2 to {tok.vocab - 5} are text. Special ids: <|eod|> = 0, <|pad|> = 1" in note


def change(content, *keys, value):
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value


@pytest.mark.parametrize("keys, value, words", [
    (("normalizer",), dict(type="NFKC"), "normalizer is 'NFKC', not 'NFC'; only Pythia's"),
    (("pre_tokenizer", "type"), "Metaspace", "pre_tokenizer is 'Metaspace'"),
    (("pre_tokenizer", "add_prefix_space"), True, "pre_tokenizer adds a blank or splits no words"),
    (("pre_tokenizer", "use_regex"), False, "pre_tokenizer adds a blank or splits no words"),
    (("model", "type"), "Unigram", "model is 'Unigram', not 'BPE'"),
    (("added_tokens", 5, "content"), "<|x|>", "added_tokens other than blanks are not"),
    (("added_tokens", 0, "id"), 9, "added_tokens other than blanks are not"),
    (("added_tokens", 5, "content"), "  ", "added_tokens lack a run of 2 to 24 blanks"),
    (("normalizer",), None, "not a byte-level tokenizer.json .TypeError"),
    (("model", "merges", 0), "a", "model has merges in another order"),
    (("model", "merges", 0), "\u4e2d a", "not a byte-level tokenizer.json .KeyError"),
    (("model", "vocab", "a"), 9999, "ranks must run from 2 without a gap")])
def test_another_tokenizer_is_refused(folder, tmp_path, keys, value, words):
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content, *keys, value=value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"tokenizer.json: {words}") as error:
        load(str(tmp_path))
    assert "\n" not in str(error.value)


def test_merges_in_another_order_are_refused(folder, tmp_path):
    """tiktoken merges by ids. One merge less, or two in the other order: not what the ids say."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    merges = whole["model"]["merges"]
    for changed in (merges[:-1], [*merges[:-2], merges[-1], merges[-2]]):
        whole["model"]["merges"] = changed
        (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
        with pytest.raises(ValueError, match="model has merges in another order than ids"):
            load(str(tmp_path))


def test_a_folder_that_lacks_it_or_has_half(folder, tmp_path):
    with pytest.raises(ValueError, match="vocab.bpe and .*Pythia's a tokenizer.json"):
        load(str(tmp_path))
    text = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text[:len(text) // 2])
    with pytest.raises(ValueError, match="not a byte-level tokenizer.json .JSONDecodeError"):
        load(str(tmp_path))
    old = json.loads(text)                              # merges as strings, in older files
    old["model"]["merges"] = [m if isinstance(m, str) else " ".join(m)
                              for m in old["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(old))
    assert load(str(tmp_path)).dumps() == load(str(folder)).dumps()
