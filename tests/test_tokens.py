"""data/tokens.py: text of any size to a file of ids, and rows of it; pretrain.py on them.

Proved alive by: pieces cut at lines alone or inside a character, each of them a document, <|eod|>
before each, a byte order mark kept, lines counted from 0; ids after the last state kept, a file
begun where the last one ended, an end between characters looked for anywhere, another header gone
on with, files' sizes not in it; 2 bytes for any vocabulary; rows that don't overlap, held-out ones
trained on, every 50th of any number; a short file read; texts in another order; another tokenizer
taken; an epoch's order made each step.
"""

import gzip
import json
import os
import random

import numpy as np
import pytest
from tiny import checkpoint, same

from common import UserError, batch_rows, epoch_order
from data import tokens
from data.text import text_files
from data.tokenizer import Tokenizer, join
from data.tokens import Blocks, documents, pieces, read, write
from pretrain import Config, beginning, corpus, tokens_of

PROGRAM = tokens
BYTES = Tokenizer({bytes([b]): b for b in range(256)})
WIDE = Tokenizer({bytes([b]): b for b in range(256)} | {
    bytes([a, b, c]): 256 + i for i, (a, b, c) in enumerate(
        (a, b, c) for a in range(41) for b in range(41) for c in range(41))})
TALK = dict(prompt=join([("human", "Hi")], answer=True), chosen="Good", rejected="Bad")


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path):
    """Five documents in four files: a book, two texts, a dialogue, an archive with a text."""
    root = tmp_path / "texts"
    root.mkdir()
    (root / "a.txt").write_bytes("\ufeffbook\r\n\r\nof caf\u00e9\n".encode())
    (root / "b.jsonl").write_text(lines(dict(text="one"), dict(text=" \n"), TALK, dict(text="two")))
    (root / "c.jsonl.gz").write_bytes(gzip.compress(lines(dict(text="three", url="x")).encode()))
    (root / "d.txt").write_text("")
    (root / "e.md").write_text("not read")
    return root


def ids_of(folder):
    """What the corpus of that folder must be, written out."""
    e, E = BYTES.eod, BYTES
    book = [*"book\n\nof caf\u00e9\n".encode()]
    talk = [e, E.human, *b"Hi", E.eot, E.assistant, *b"Good", E.eot]
    return [e, *book, e, *b"one", *talk, e, *b"two", e, *b"three"]


def files(folder):
    return text_files(str(folder), tokens.KINDS)


def test_a_corpus_by_hand(folder, tmp_path):
    header = write(BYTES, files(folder), tmp_path / "out", threads=2)
    ids, tok = read(tmp_path / "out")
    assert ids.tolist() == ids_of(folder) and tok.fingerprint == BYTES.fingerprint
    assert (header["tokens"], header["documents"], header["dtype"]) == (len(ids), 5, "<u2")
    assert (tmp_path / "out" / "tokens.bin").stat().st_size == 2 * len(ids)
    assert [name.split("/")[-1] for name, _ in header["files"]] == [
        "a.txt", "b.jsonl", "c.jsonl.gz", "d.txt"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "tokenizer.tiktoken", "tokens.bin", "tokens.json"]
    with pytest.raises((ValueError, OSError)):
        ids[0] = 1                                           # a map for reading


def test_large_vocabularies_take_four_bytes(tmp_path):
    assert WIDE.vocab > 1 << 16
    (tmp_path / "a.txt").write_bytes(bytes([40, 40, 40]) + b"x")
    write(WIDE, files(tmp_path / "a.txt"), tmp_path / "out")
    ids, _ = read(tmp_path / "out")
    assert ids.dtype == np.uint32 and ids.tolist() == [WIDE.eod, *WIDE.encode("(((x")]
    assert ids.max() > 1 << 16


def test_a_text_comes_in_pieces(tmp_path, monkeypatch):
    """Cut after a blank line, else a line, else between characters; together they are the text."""
    monkeypatch.setattr(tokens, "PIECE", 16)
    rng = random.Random(0)
    for trial in range(300):
        text = "".join(rng.choices(["a", "\u00e9", "\U0001f98a", "\n", "\n\n", "word "], k=40))
        (tmp_path / "a.txt").write_text(text)
        found = [*pieces(tmp_path / "a.txt")]
        assert "".join(x for x, *_ in found) == text, trial
        assert [opens for _, opens, _ in found] == [True] + [False] * (len(found) - 1)
        size = len(text.encode())
        for (part, _, place), (after, _, _) in zip(found, found[1:]):
            assert len(part.encode()) <= 16 and place < size
            assert [x for x, *_ in pieces(tmp_path / "a.txt", place)][0] == after
            end = "\n\n" if "\n\n" in part else "\n"
            assert part.endswith(end) or end not in part
    (tmp_path / "a.txt").write_bytes(b"good\xff")
    with pytest.raises(ValueError, match="a.txt: not UTF-8 text at byte 4"):
        [*pieces(tmp_path / "a.txt")]
    for head in (b"", b"\xc3", b"\xf0", b"abcdefghijkl\xf0"):       # no character ends or begins
        (tmp_path / "a.txt").write_bytes(head + b"\x80" * 40)
        with pytest.raises(ValueError, match="a.txt: not UTF-8 text at byte"):
            for number, _ in enumerate(pieces(tmp_path / "a.txt")):
                assert number < 9


def test_lines_that_are_no_documents(tmp_path):
    for row, words in ((dict(text=3), "no field 'prompt'"), (dict(prompt="x"), "must end with"),
                       (dict(TALK, chosen=None), "field 'chosen' must be text")):
        (tmp_path / "a.jsonl").write_text(lines(dict(text="x"), row))
        with pytest.raises(ValueError, match=f"a.jsonl line 2: .*{words}"):
            [*documents(tmp_path / "a.jsonl")]
    (tmp_path / "a.jsonl").write_text(lines(dict(text="x" * 2_000_000)))   # a book
    assert len([*documents(tmp_path / "a.jsonl")][0][0]) == 2_000_000


@pytest.mark.parametrize("batch", [1, 7, 1 << 20])
def test_killed_anywhere_it_goes_on(folder, tmp_path, monkeypatch, batch):
    """Before and after each file's rename, and between ids and the state that counts them."""
    monkeypatch.setattr(tokens, "BATCH", batch)
    monkeypatch.setattr(tokens, "PIECE", 8)
    assert write(BYTES, files(folder), tmp_path / "whole")["documents"] == 5
    replace, count = os.replace, 0

    def dies(*args):
        nonlocal count
        count -= 1
        if count == 0:
            raise KeyboardInterrupt
        replace(*args)
        count -= 1
        if count == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    for kill in range(1, 200):
        out, count = tmp_path / str(kill), kill
        try:
            write(BYTES, files(folder), out)
            break
        except KeyboardInterrupt:
            count = 0
            if not (out / "tokens.json").exists():
                with pytest.raises(ValueError, match="no whole corpus"):
                    read(out)
            write(BYTES, files(folder), out)
        for name in ("tokens.bin", "tokens.json", "tokenizer.tiktoken"):
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), kill
        assert read(out)[0].tolist() == ids_of(folder)
    assert 8 < kill < 199


def test_what_is_there_is_not_written_again(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = write(BYTES, files(folder), out)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "documents", None)
        assert write(BYTES, files(folder), out) == first
    with pytest.raises(ValueError, match="holds a corpus of other files or another tokenizer"):
        write(WIDE, files(folder), out)
    (folder / "d.txt").write_text("more")
    with pytest.raises(ValueError, match="holds a corpus of other files"):
        write(BYTES, files(folder), out)


def test_part_of_another_corpus_is_not_gone_on_with(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "put", lambda path, text: (path.write_text(text), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        write(BYTES, files(folder), tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds part of a corpus of other files"):
        write(WIDE, files(folder), tmp_path / "out")
    (tmp_path / "out" / "tokens.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="shorter than its state says"):
        write(BYTES, files(folder), tmp_path / "out")


def test_damaged_corpora(folder, tmp_path):
    out = tmp_path / "out"
    write(BYTES, files(folder), out)
    whole = (out / "tokens.bin").read_bytes()
    (out / "tokens.bin").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="not what tokens.json says"):
        read(out)
    (out / "tokens.bin").write_bytes(whole)
    (out / "tokenizer.tiktoken").write_text(WIDE.dumps())
    with pytest.raises(ValueError, match="not what tokens.json says"):
        read(out)
    (out / "tokens.json").write_text("{}")
    with pytest.raises(ValueError, match="no whole corpus"):
        read(out)


def test_the_program(folder, tmp_path, program):
    ranks = tmp_path / "bytes.tiktoken"
    ranks.write_text(BYTES.dumps())
    code, out, err = program(folder, "--tokenizer", ranks, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    assert f"{len(ids_of(folder))} tokens in 5 documents of 4 files, 262 ids" in out
    code, _, err = program(folder / "d.txt", "--tokenizer", ranks, "--out", tmp_path / "no")
    assert code == 1 and err == "error: the files hold no text\n"
    code, _, err = program(folder / "e.md", "--tokenizer", ranks, "--out", tmp_path / "no")
    assert code == 1 and "not a .txt or .jsonl or .jsonl.gz file" in err


# ---------------------------------------------------------------- rows

def test_rows_predict_each_id_once():
    blocks = Blocks(np.arange(50, dtype=np.uint16), 8)
    assert len(blocks) == 7 and blocks[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    predicted = [x for row in blocks for x in row[1:]]
    assert predicted == list(range(1, 50)) and type(predicted[0]) is int
    with pytest.raises(IndexError):
        blocks[7]
    assert len(Blocks(np.arange(49), 8)) == 6 and len(Blocks(np.arange(7), 8)) == 0


@pytest.mark.parametrize("number, held", [(7, 1), (50, 1), (51, 2), (200, 4), (10_000, 200)])
def test_held_out_rows_are_not_trained_on(number, held):
    ids = np.arange(1 + 3 * number, dtype=np.uint32)
    train, test = Blocks(ids, 4).split()
    assert (len(train), len(test)) == (number - held, held)
    assert sorted(row[0] for part in (train, test) for row in part) == [*range(0, 3 * number, 3)]
    assert [row[0] // 3 % 50 for row in test] == [0] * held


def test_of_many_rows_no_more_than_2048_are_held_out():
    train, test = Blocks(np.zeros(3_000_001, dtype=np.uint16), 4).split()
    assert len(train) + len(test) == 1_000_000 and 2000 < len(test) <= 2048


def test_an_epochs_order_is_made_once():
    first = epoch_order(1000, 0, "x", "epoch", 3)
    assert epoch_order(1000, 0, "x", "epoch", 3) is first
    assert sorted(first) == [*range(1000)]
    rows = batch_rows(1000, 7, 3 * 142 + 2, 0, "x")
    assert rows.tolist() == first[14:21].tolist()
    rows[:] = 0                                   # a copy: the next step's order stays
    assert batch_rows(1000, 7, 3 * 142 + 2, 0, "x").tolist() == first[14:21].tolist() != [0] * 7


# ---------------------------------------------------------------- pretraining on it

@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpora")
    rng = random.Random(0)
    (root / "a.txt").write_text(" ".join(rng.choices(["fox", "owl", "sleeps", "eats\n\n"], k=6000)))
    write(BYTES, [root / "a.txt"], root / "bytes")
    write(WIDE, [root / "a.txt"], root / "wide")
    return root


def test_pretraining_on_tokens(nursery, tiny, corpora, tmp_path):
    """Killed at a checkpoint and gone on with: the unbroken run; two ranks: the same."""
    flags = dict(tokens=corpora / "bytes", context=80, documents=52000)
    whole = nursery.run(tiny.command("pretrain", tmp_path / "whole", **flags))
    assert whole.code == 0, whole.err
    rows = (corpora / "bytes" / "tokens.bin").stat().st_size // 2 // 79
    assert f"{rows - -(-rows // 50)} rows, {-(-rows // 50)} held out" in whole.out
    assert checkpoint(tmp_path / "whole")["tokenizer"] == BYTES.dumps()
    part = tiny.command("pretrain", tmp_path / "part", **flags)
    assert nursery.run(part, hooks=[("at_event", [9, "SIGKILL"])]).code == -9
    assert nursery.run(part).code == 0
    same(tmp_path / "whole", tmp_path / "part")
    done = nursery.ranks(2, tiny.command("pretrain", tmp_path / "two", **flags))
    assert [x.code for x in done] == [0, 0], done
    same(tmp_path / "whole", tmp_path / "two", 1e-5)


def test_what_does_not_go_with_tokens(corpora, tmp_path):
    def begin(**knobs):
        cfg = Config(**{**dict(tokens=str(corpora / "bytes"), size="nano", context=80), **knobs})
        ids, own = tokens_of(cfg)
        tok, _ = beginning(cfg, type("Run", (), dict(resume=None, dir="x")), [], own)
        return tok, corpus(cfg, tok, [], ids)

    tok, (train, heldout, told) = begin()
    assert tok.fingerprint == BYTES.fingerprint and len(train[0]) == 80
    assert len(heldout) == -(-(len(train) + len(heldout)) // 50)
    with pytest.raises(UserError, match="fewer than one --batch of 4000"):
        begin(batch=4000)
    with pytest.raises(UserError, match="no whole corpus"):
        begin(tokens=str(tmp_path))
    (tmp_path / "wide.tiktoken").write_text(WIDE.dumps())
    with pytest.raises(UserError, match="has another one; leave it out"):
        begin(tokenizer=str(tmp_path / "wide.tiktoken"))


def test_tokens_of_another_model(nursery, tiny, corpora, tmp_path):
    done = nursery.run(tiny.command("pretrain", tmp_path / "a", tokens=corpora / "wide", context=80,
                                    init=tiny.whole("pretrain")))
    assert done.code == 1 and "has another tokenizer; make the corpus with that one" in done.last
    done = nursery.run(tiny.command("pretrain", tmp_path / "a", tokens=corpora / "wide", text="x"))
    assert done.code == 1 and "--text and --tokens: one of them" in done.last
