"""Pretraining on text files: what becomes a document, what is left out, where a run begins.

Mutations tried, each caught here: windows one id too long, that lose their last piece, cut at the
first border, before it, in their first half, at lines before paragraphs, or at paragraphs only;
documents without <|eod|>; the end cut where the oldest turns could go, a cut counted as nothing,
empty answers kept or not counted; a folder's files in another order or all of them; held-out
documents trained on, every 49th, --documents the first ones or told wrong, too few for a batch;
roles in the text of a tokenizer, answers not in it, a named one ignored, another than the
checkpoint's taken; --init ignored, its positions, ids or kind not checked; gold of what the toy
world does not know, a text to continue as a question.
"""

import gzip
import json
import random
import unicodedata
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tiny import checkpoint, same

import pretrain
from common import UserError, save_checkpoint
from data.text import (dialogue, read_dialogues, read_texts, strings, text_documents, text_files,
                       windows)
from data.tokenizer import (Tokenizer, join, load, loads, parse, parse_prompt, read_text,
                            train_bpe)
from model import GPT, GPTConfig, pack
from pretrain import ENGLISH, SHOW, Config, beginning, corpus, show

BYTES = Tokenizer({bytes([b]): b for b in range(256)})
FRESH = SimpleNamespace(resume=None)


def dialogue_line(*texts, **more):
    """A comparison line; the last text is the chosen answer."""
    turns = [(("human", "assistant")[i % 2], text) for i, text in enumerate(texts[:-1])]
    return json.dumps(dict(prompt=join(turns, answer=True), chosen=texts[-1], **more),
                      ensure_ascii=False)


@pytest.fixture
def folder(tmp_path):
    """60 paragraphs of different lengths, 40 dialogues, and a file that is neither."""
    root = tmp_path / "texts"
    root.mkdir()
    (root / "b.txt").write_text("".join(f"{i} " + "lorem ipsum\n" * (i % 7 + 2) + "\n"
                                        for i in range(60)))
    lines = [dialogue_line(f"What is {i}?", f"It is {i}.", rejected="x") for i in range(40)]
    (root / "a.jsonl").write_text("\n".join(lines) + "\n")
    (root / "LICENSE").write_text("free")
    return root


# ---------------------------------------------------------------- windows of text

def cut(text, room):
    return [bytes(ids).decode(errors="replace") for ids in windows(BYTES, text, room)]


@pytest.mark.parametrize("text, room, wanted", [
    ("", 8, []), ("abc", 8, ["abc"]), ("abcdefgh", 8, ["abcdefgh"]),
    ("abcdefghi", 8, ["abcdefgh", "i"]),                            # no border: full
    ("abcde\nfghi", 8, ["abcde\n", "fghi"]),                        # a line
    ("abc\ndefghi", 8, ["abc\ndefg", "hi"]),                        # that ends in the first half
    ("abcdefg\nhi", 8, ["abcdefg\n", "hi"]),                        # just fits
    ("abcdefgh\ni", 8, ["abcdefgh", "\ni"]),                        # one too late
    ("abc\n\nd\nefg", 8, ["abc\n\n", "d\nefg"]),                    # a paragraph before a line
    ("abcd\n\ne\n\nfgh", 10, ["abcd\n\ne\n\n", "fgh"]),              # the last of two
    ("abc\n \t\nd\nefg", 8, ["abc\n \t\n", "d\nefg"]),              # blank, not empty
    ("\n\n\n\n\n\nabcd", 8, ["\n\n\n\n\n\n", "abcd"]),
    ("ab\n\ncde\nfgh\n\ni", 9, ["ab\n\ncde\n", "fgh\n\ni"]),
])
def test_windows_by_hand(text, room, wanted):
    assert cut(text, room) == wanted


def test_windows_lose_nothing():
    rng = random.Random(0)
    tok = train_bpe(["the cat\n\n sat \n on"] * 3, 280)
    for _ in range(500):
        some = rng.choices(["a", "é", "the", " cat", "\n", "\n\n", " "], k=rng.randint(0, 99))
        text = "".join(some)
        room = rng.randint(1, 20)
        parts = windows(tok, text, room)
        assert sum(parts, []) == tok.encode(text)
        assert all(1 <= len(part) <= room for part in parts)
        assert all(len(part) > room // 2 for part in parts[:-1])


def test_windows_of_a_tokenizer_that_changes_the_text():
    """Pythia's reads NFC: borders are those of what it read."""
    class NFC:
        encoding = BYTES.encoding

        def encode(self, text):
            return BYTES.encode(unicodedata.normalize("NFC", text))

    text = unicodedata.normalize("NFD", "caf\u00e9 caf\u00e9\n" * 9)
    assert [bytes(x).decode() for x in windows(NFC(), text, 20)] == ["caf\u00e9 caf\u00e9\n"] * 9


def test_windows_of_real_text_end_with_paragraphs(data_dir):
    text = read_text(data_dir / "text" / "sherlock.txt")[:200_000]
    tok = load(str(data_dir / "gpt2-bpe"))
    parts = windows(tok, text, 255)
    assert sum(parts, []) == tok.encode(text)
    assert sum(tok.decode(p).endswith("\n\n") for p in parts) > 0.7 * len(parts)
    assert sum(map(len, parts)) > 0.75 * 255 * len(parts)


# ---------------------------------------------------------------- dialogues

TURNS = [("human", "a" * 9), ("assistant", "b" * 9), ("human", "c" * 9)]


def test_a_dialogue_is_cut_to_the_context():
    """<|eod|>, 11 ids a turn, the answer's 3 and 2: 39 in all; 17 without its oldest two turns."""
    whole = BYTES.render([*TURNS, ("assistant", "ddd")])
    assert len(whole) == 39 and dialogue(BYTES, TURNS, "ddd", 39) == (whole, "")
    last = BYTES.render([TURNS[2], ("assistant", "ddd")])
    for context in (38, 17):
        assert dialogue(BYTES, TURNS, "ddd", context) == (last, "oldest turns left out")
    assert dialogue(BYTES, TURNS, "ddd", 16) == (whole[:16], "end cut")
    assert dialogue(BYTES, TURNS, "d" * 50, 40)[1] == "end cut"


def test_documents_and_what_was_done():
    texts = ["ab\n\ncd", "", [(TURNS, "ddd"), (TURNS[:1], "d"), (TURNS[:1], " \n"),
                              (TURNS, "d" * 40)]]
    documents, done = text_documents(BYTES, texts, 20)
    assert documents[0] == [BYTES.eod, *b"ab\n\ncd"] and len(documents) == 4
    assert documents[2] == BYTES.render([TURNS[0], ("assistant", "d")])
    assert all(ids[0] == BYTES.eod and len(ids) <= 20 for ids in documents)
    assert {k: v for k, v in done.items() if v} == {
        "windows of text": 1, "empty files": 1, "dialogues": 3, "oldest turns left out": 1,
        "end cut": 1, "empty answers left out": 1}


def test_windows_leave_room_for_the_opening():
    documents, _ = text_documents(BYTES, ["x" * 40], 20)
    assert list(map(len, documents)) == [20, 20, 3]


def test_real_dialogues_keep_their_answers(data_dir):
    """The last human turn and the whole answer are there, whatever was left out before them."""
    tok, seen = load(str(data_dir / "gpt2-bpe")), Counter()
    with gzip.open(data_dir / "hh-rlhf" / "helpful-base" / "test.jsonl.gz", "rt") as file:
        dialogues = [parse(json.loads(line)["chosen"]) for line, _ in zip(file, range(300))]
    for *turns, (_, answer) in dialogues:
        ids, change = dialogue(tok, turns, answer, 256)
        assert ids[0] == tok.eod and len(ids) <= 256
        whole, last = (tok.render([*x, ("assistant", answer)])[1:] for x in (turns, turns[-1:]))
        assert (ids[1:] == whole) == (change == "")
        assert ids[-len(last):] == last or change == "end cut"
        seen[change] += 1
    assert seen[""] > 100 and seen["oldest turns left out"] > 20, seen


# ---------------------------------------------------------------- files

def test_files_of_folders(folder):
    other = folder.parent / "c.txt"
    other.write_text("c")
    names = f" {folder}, {other},"
    assert [p.name for p in text_files(names)] == ["a.jsonl", "b.txt", "c.txt"]
    dialogues, book, c = read_texts(names)
    assert dialogues[1] == ([("human", "What is 1?")], "It is 1.") and c == "c"
    assert book.startswith("0 lorem") and len(dialogues) == 40
    assert list(strings([dialogues[:1], "c"])) == ["What is 0?", "It is 0.", "c"]


def test_files_that_are_none(folder):
    empty = folder.parent / "empty"
    empty.mkdir()
    for name, words in ((empty / "no", "no such file"), (empty, "not a .txt or .jsonl file, nor"),
                        (folder / "LICENSE", "LICENSE: not a .txt or .jsonl file")):
        with pytest.raises(ValueError, match=words):
            read_texts(f"{folder},{name}")
    (empty / "bad.txt").write_bytes(b"one\ntwo\xff")
    with pytest.raises(ValueError, match="^.*bad.txt line 2: not UTF-8"):
        read_texts(str(empty))


@pytest.mark.parametrize("line, words", [
    ('{"prompt": "x", "chosen"', "no JSON"), ("", "no JSON"), ("[1]", "a JSON object"),
    ('{"chosen": "x"}', "no field 'prompt'"),
    (dialogue_line("a", "b").replace("chosen", "x"), "no field 'chosen'"),
    ('{"prompt": "\\n\\nHuman: a\\n\\nAssistant:", "chosen": 3}', "field 'chosen' must be text"),
    ('{"prompt": "Human: a", "chosen": "b"}', "must end with 'Assistant:'"),
])
def test_a_bad_line_is_named(tmp_path, line, words):
    path = tmp_path / "my.jsonl"
    path.write_text("\n".join([dialogue_line("a", "b\u2028c"), line, dialogue_line("a", "b")]),
                    encoding="utf-8")
    with pytest.raises(ValueError, match=f".*my.jsonl line 2: .*{words}") as caught:
        read_texts(str(path))
    assert "\n" not in str(caught.value)


def test_a_dialogue_with_every_turn(tmp_path):
    path = tmp_path / "my.jsonl"
    path.write_text(dialogue_line("a", "b", "c\u2028", "d", strength=3) + "\n", encoding="utf-8")
    prompt = join([("human", "a"), ("assistant", "b"), ("human", "c\u2028")], answer=True)
    assert read_dialogues(path) == [(parse_prompt(prompt), "d")]


# ---------------------------------------------------------------- the corpus

def test_every_50th_is_held_out():
    texts = [[([("human", f"{i}")], f"{i}") for i in range(120)]]
    cfg = Config(text="x", context=80, batch=8)
    documents, heldout, told = corpus(cfg, BYTES, texts)
    numbers = [[BYTES.decode(ids) for ids in some] for some in (documents, heldout)]
    assert numbers[1] == ["00", "5050", "100100"]
    assert numbers[0] == [f"{i}{i}" for i in range(120) if i % 50]
    assert told == "1 files, 120 dialogues, 3 held out"


def test_documents_limits_and_says_so():
    """A sample of them all, another for another seed."""
    texts = [[([("human", f"{i}")], f"{i}") for i in range(120)]]
    picked = []
    for seed in (0, 0, 1):
        cfg = Config(text="x", context=80, batch=8, documents=20, seed=seed)
        documents, heldout, told = corpus(cfg, BYTES, texts)
        assert len(documents) == 20 and len(heldout) == 3 and "97 beyond --documents" in told
        assert not {*map(tuple, documents)} & {*map(tuple, heldout)}
        picked.append(documents)
    assert picked[0] == picked[1] != picked[2]


def test_fewer_documents_than_a_batch():
    cfg = Config(text="my.txt", context=80, batch=8)
    with pytest.raises(UserError, match="my.txt: 7 documents .*8 windows.*one --batch of 8: lower"):
        corpus(cfg, BYTES, ["x" * 79 * 8])
    assert len(corpus(cfg, BYTES, ["x" * 79 * 9])[0]) == 8
    with pytest.raises(UserError, match="0 documents .*1 empty files"):
        corpus(cfg, BYTES, [""])


def test_without_text_it_is_the_toy_world():
    tok = pretrain.toy_tokenizer(0, 400)
    cfg = Config(documents=5)
    documents, heldout, _ = corpus(cfg, tok, [])
    assert documents == pretrain.documents_of(tok, 0, 5, 256) and len(heldout) == 600


# ---------------------------------------------------------------- where a run begins

def test_a_tokenizer_of_the_text(tmp_path):
    texts = ["the cat " * 9, [([("human", "the hat")], "the bat")]]
    cfg = Config(text="x", vocab=270, size="nano", context=96, seed=5)
    tok, model = beginning(cfg, FRESH, texts)
    assert tok.dumps() == train_bpe([texts[0], "the hat", "the bat"], 270).dumps()
    assert (model.config.vocab, model.config.n_ctx) == (tok.vocab, 96)
    assert torch.equal(model.wpe.weight, GPT(model.config).reset(5).wpe.weight)
    named = tmp_path / "my.tiktoken"
    named.write_text(Tokenizer({**BYTES.ranks, b"zz": 256}, "gpt2").dumps())
    tok, model = beginning(Config(text="x", tokenizer=str(named), size="nano"), FRESH, texts)
    assert tok.encode("zz") == [256] and tok.eod == 257 and model.config.vocab == 263
    assert tok.dumps() == beginning(Config(tokenizer=str(named), size="nano"), FRESH, [])[0].dumps()
    with pytest.raises(UserError, match="^--tokenizer: nowhere: no such tokenizer"):
        beginning(Config(text="x", tokenizer="nowhere"), FRESH, texts)


@pytest.fixture
def base(tmp_path):
    """A checkpoint of 100 positions with weights that no seed gives."""
    model = GPT(GPTConfig(262, 100, 1, 2, 8))
    torch.nn.init.constant_(model.wpe.weight, 0.125)
    save_checkpoint(tmp_path / "base.pt", **pack(model, BYTES))
    return tmp_path / "base.pt"


def test_init_goes_on(base, tmp_path):
    cfg = Config(init=str(base), text="x", context=96)
    tok, model = beginning(cfg, FRESH, ["text"])
    assert tok.dumps() == BYTES.dumps() and model.config.n_ctx == 100
    assert (model.wpe.weight == 0.125).all()
    (tmp_path / "same").write_text(BYTES.dumps())
    assert beginning(Config(init=str(base), tokenizer=str(tmp_path / "same"), context=96), FRESH,
                     [])[0].vocab == 262
    (tmp_path / "other").write_text(Tokenizer(BYTES.ranks, "gpt2").dumps())
    for change, words in ((dict(tokenizer=str(tmp_path / "other")), "another one; leave it out"),
                          (dict(context=101), "--context 101: .*base.pt has 100 positions"),
                          (dict(init=str(tmp_path / "no.pt")), "no checkpoint here")):
        with pytest.raises(UserError, match=words):
            beginning(Config(**{**dict(init=str(base), context=96), **change}), FRESH, ["text"])


def test_init_with_another_vocabulary_or_kind(tmp_path):
    for name, config, words in (("a", GPTConfig(300, 100, 1, 2, 8), "300 ids, 262 in its"),
                                ("b", GPTConfig(262, 100, 1, 2, 8, True), "a preference model")):
        save_checkpoint(tmp_path / f"{name}.pt", **pack(GPT(config), BYTES))
        with pytest.raises(UserError, match=words):
            beginning(Config(init=str(tmp_path / f"{name}.pt"), context=96), FRESH, [])


# ---------------------------------------------------------------- samples

def test_samples_have_gold_where_the_toy_world_knows_it():
    said, model = [], GPT(GPTConfig(262, 96, 1, 2, 8))
    run = SimpleNamespace(say=said.append)
    show(run, model, BYTES, 0, "toy", shown=SHOW)
    assert said[0] == "\ntoy" and all("[gold helpful" in x for x in said[1:]) and len(said) == 4
    said.clear()
    show(run, model, BYTES, 0, "text", shown=ENGLISH)
    assert len(said) == 4 and not any("gold" in x for x in said)
    assert said[1].startswith(f"  {ENGLISH[0]} ") and said[2].startswith(f"  {ENGLISH[1][0][1]} ")
    assert all("\n" not in x for x in said[1:])


def test_text_to_continue_opens_a_document(monkeypatch):
    asked = []
    monkeypatch.setattr(pretrain, "respond", lambda model, tok, prompts, *args: (
        asked.extend(prompts) or [("", True)] * len(prompts)))
    show(SimpleNamespace(say=lambda text: None), None, BYTES, 0, "", shown=ENGLISH)
    assert asked[0] == [BYTES.eod, *ENGLISH[0].encode()]
    assert asked[1] == BYTES.render(ENGLISH[1], answer=True)


# ---------------------------------------------------------------- the command

def test_a_run_on_text(folder, tmp_path, nursery, tiny):
    """Interrupted it gives the same; another run goes on from it; what is wrong is one line."""
    flags = dict(text=folder, vocab=300, context=96, batch=8, steps=6, every=2)
    whole = nursery.run(tiny.command("pretrain", tmp_path / "whole", **flags))
    assert whole.code == 0, whole.err
    for words in ("2 files, 40 dialogues, ", " windows of text, ", " held out", "300 ids"):
        assert words in whole.out
    part = tiny.command("pretrain", tmp_path / "part", **flags)
    assert nursery.run(part, hooks=[("at_step", [2, "SIGTERM", 0])]).code == 130
    assert nursery.run(part).code == 0
    same(tmp_path / "whole", tmp_path / "part")
    losses = [json.loads(x) for x in open(tmp_path / "whole" / "metrics.jsonl")]
    assert losses[5]["loss"] < losses[0]["loss"] - 0.1
    more = nursery.run(tiny.command("pretrain", tmp_path / "more", init=tmp_path / "whole",
                                    **{**flags, "lr": 1e-9}))
    assert more.code == 0 and f"{tmp_path / 'whole'}:" in more.out, more.err
    first = [json.loads(x) for x in open(tmp_path / "more" / "metrics.jsonl")]
    assert first[0]["loss"] < losses[0]["loss"] - 0.1
    assert first[-1]["heldout_loss"] == pytest.approx(losses[-1]["heldout_loss"], abs=1e-4)
    assert loads(checkpoint(tmp_path / "more")["tokenizer"]).vocab == 300


def test_what_is_wrong_is_one_line(folder, tmp_path, nursery, tiny):
    argvs = [tiny.command("pretrain", tmp_path / f"run{i}", **{**dict(text=folder), **change})
             for i, change in enumerate([dict(batch=500), dict(text="nowhere"), dict(context=79),
                                         dict(tokenizer=folder)])]
    words = ["one --batch of 500", "--text: nowhere", "--context 79", "--tokenizer: "]
    for done, word in zip(nursery.run_all(argvs), words):
        assert done.code == 1 and done.last.startswith("error: ") and word in done.last, done.err
        assert "Traceback" not in done.err
