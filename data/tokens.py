"""A corpus of any size as one file of token ids, written once and read through memory maps.

    python data/tokens.py books,web.jsonl.gz --tokenizer gpt2 --out out/tokens
    python pretrain.py --tokens out/tokens --size gpt2 --context 1024 ...

Reads .txt (one document a file) and .jsonl or .jsonl.gz, a document a line: {"text": ...}, or a
comparison, of which it takes the prompt and the chosen answer as a dialogue. Writes

    tokens.bin           x_0 x_1 ...: all documents one after another, each opened by <|eod|>;
                         2 bytes an id, 4 where the vocabulary is over 65,536
    tokens.json          how many ids and documents, which tokenizer, of which files
    tokenizer.tiktoken   the tokenizer

tokens.json comes last: a folder with it is whole. What a kill left goes on from its last state: the
same command. Training reads rows of `context` ids (Blocks): row i is x from i (context - 1) on, so
that each id but the very first is predicted once. What that changes against pretrain.py --text: a
row may begin in a document's middle and hold several, which see one another, and nothing is padded.
--text keeps Python lists in each process, about 40 bytes a token; this, 2 bytes on the disk.

About 8 MB of text a second and core (GPT-2's ids): 5 billion tokens, 22 GB of English, in 45
minutes of one core; threads share documents out.
"""

import json
import os
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

if __name__ == "__main__":  # `python data/tokens.py` looks for modules beside itself only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.lines import read_rows, text_of
from data.program import flags, outcome
from data.text import text_files
from data.tokenizer import load, loads, parse_prompt

FORMAT = "nanohh-tokens-1"
KINDS = (".txt", ".jsonl", ".jsonl.gz")
PIECE = 1 << 20        # bytes of a .txt that are encoded at a time
BATCH = 16 * PIECE     # characters between two states


# ---------------------------------------------------------------- reading text

def pieces(path, place=0):
    """(text, whether it opens a document, place after it) of a .txt from byte `place` on.

    A piece ends after a blank line if it can, else after a line, else between two characters.
    ValueError where it is not UTF-8.
    """
    with open(path, "rb") as file:
        file.seek(place)
        while data := file.read(PIECE):
            if len(data) == PIECE:
                cut = data.rfind(b"\n\n") + 2 if b"\n\n" in data else data.rfind(b"\n") + 1
                last = range(PIECE - 1, PIECE - 5, -1)          # a character has 4 bytes at most
                cut = cut or next((i for i in last if data[i] & 0xC0 != 0x80), PIECE)
                data = data[:cut]
                file.seek(place + cut)
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8 text at byte {place + error.start}") from None
            text = text.removeprefix("\ufeff" if place == 0 else "").replace("\r\n", "\n")
            yield text, place == 0, place + len(data)
            place += len(data)


def document(row):
    """A line's text, or turns with the chosen answer; ValueError naming the field."""
    if isinstance(row.get("text"), str):            # of any length: a book may be one
        return row["text"]
    return [*parse_prompt(text_of(row, "prompt")), ("assistant", text_of(row, "chosen"))]


def documents(path, place=0):
    """(content, whether it opens a document, place after it) of a file from `place` on, which is
    a byte of a .txt and a line of others. Documents without text are left out.
    """
    if path.name.endswith(".txt"):
        yield from pieces(path, place)
        return
    rows = enumerate(read_rows(path, document, Counter()), 1)
    for number, content in islice(rows, place, None):
        if (content if isinstance(content, str) else content[-1][1]).strip():
            yield content, True, number


def encoded(tok, contents, threads):
    """Lists of ids of (content, opens, place), with <|eod|> where a document opens."""
    texts = iter(tok.encode_all([x for x, *_ in contents if isinstance(x, str)], threads))
    for content, opens, _ in contents:
        if isinstance(content, str):
            yield ([tok.eod] if opens else []) + next(texts)
        else:
            yield tok.render(content)


# ---------------------------------------------------------------- writing ids

def put(path, text):
    """A small file, the old one or the new one, whole."""
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def dtype_of(tok):
    """The numbers of tokens.bin."""
    return "<u2" if tok.vocab <= 1 << 16 else "<u4"


def header_of(tok, paths):
    """What a corpus is made of: equal headers, equal corpora."""
    return dict(format=FORMAT, dtype=dtype_of(tok), tokenizer=tok.fingerprint, vocab=tok.vocab,
                files=[[str(p), p.stat().st_size] for p in paths])


def state_of(out, header):
    """Where to go on: file, place in it, ids and documents so far. ValueError if the folder holds
    another corpus, or part of one.
    """
    state = dict(file=0, place=0, tokens=0, documents=0)
    path = out / ".state.json"
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["header"] != header:
            raise ValueError(f"{out}: holds part of a corpus of other files or another tokenizer: "
                             "choose another --out or delete it")
        state = kept["state"]
    return state


def write(tok, paths, out, threads=1):
    """The corpus of the files in folder `out`; its header. What is there already is not done again.
    """
    out.mkdir(parents=True, exist_ok=True)
    header = header_of(tok, paths)
    if (out / "tokens.json").exists():
        old = json.loads((out / "tokens.json").read_text())
        if {k: old.get(k) for k in header} != header:
            raise ValueError(f"{out}: holds a corpus of other files or another tokenizer: choose "
                             "another --out or delete it")
        return old
    state, size = state_of(out, header), np.dtype(header["dtype"]).itemsize
    bar = tqdm(total=sum(n for _, n in header["files"]), unit="B", unit_scale=True, desc="tokens",
               disable=None)
    with bar, open(out / "tokens.bin", "ab") as file:
        if file.tell() < state["tokens"] * size:
            raise ValueError(f"{out}/tokens.bin: shorter than its state says: delete the folder")
        file.truncate(state["tokens"] * size)           # what came after the last state
        for i in range(state["file"], len(paths)):
            state = add(tok, paths[i], file, dict(state, file=i), header, threads)
            bar.update(header["files"][i][1])
            state = dict(state, file=i + 1, place=0)
            keep(file, out, header, state)
    if not state["tokens"]:
        raise ValueError("the files hold no text")
    header |= {k: state[k] for k in ("tokens", "documents")}
    put(out / "tokenizer.tiktoken", tok.dumps())
    put(out / "tokens.json", json.dumps(header, indent=1) + "\n")
    (out / ".state.json").unlink(missing_ok=True)
    return header


def keep(file, out, header, state):
    """Ids on the disk, then the state that counts them."""
    file.flush()
    os.fsync(file.fileno())
    put(out / ".state.json", json.dumps(dict(header=header, state=state)))


def add(tok, path, file, state, header, threads):
    """Appends a file's ids, from the state's place on; returns the state after it."""
    found = documents(path, state["place"])
    while some := batch(found):
        for ids in encoded(tok, some, threads):
            file.write(np.array(ids, header["dtype"]).tobytes())
            state["tokens"] += len(ids)
        state = dict(state, place=some[-1][2],
                     documents=state["documents"] + sum(opens for _, opens, _ in some))
        keep(file, Path(file.name).parent, header, state)
    return state


def batch(found):
    """The next documents or pieces, BATCH characters or a little more."""
    out, size = [], 0
    for content, opens, place in found:
        out.append((content, opens, place))
        size += len(content) if isinstance(content, str) else sum(len(x) for _, x in content)
        if size >= BATCH:
            break
    return out


# ---------------------------------------------------------------- reading ids

class Blocks:
    """Rows of `context` ids of a corpus, read when they are asked for.

    number: which rows, {row here: row of the corpus}, a function; count: how many.
    """

    def __init__(self, ids, context, count=None, number=lambda i: i):
        self.ids, self.context, self.number = ids, context, number
        self.count = (len(ids) - 1) // (context - 1) if count is None else count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if not 0 <= i < self.count:
            raise IndexError(i)
        first = int(self.number(int(i))) * (self.context - 1)
        return self.ids[first:first + self.context].tolist()

    def split(self, share=50, most=2048):
        """(all others, held-out ones): every 50th, or of a large corpus `most`, evenly."""
        every = max(share, -(-self.count // most))
        held = -(-self.count // every)
        return (Blocks(self.ids, self.context, self.count - held,
                       lambda i: i + i // (every - 1) + 1),
                Blocks(self.ids, self.context, held, lambda i: i * every))


def read(folder):
    """(ids as a memory map, tokenizer) of a corpus. ValueError if it is none, or not whole."""
    folder = Path(folder)
    path = folder / "tokens.json"
    try:
        header = json.loads(path.read_text())
        if header["format"] != FORMAT:
            raise KeyError
        number, dtype = header["tokens"], np.dtype(header["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder}: no whole corpus of data/tokens.py is there; the same command "
                         "goes on if one was begun") from None
    tok = loads((folder / "tokenizer.tiktoken").read_text(), str(folder / "tokenizer.tiktoken"))
    ids, size = folder / "tokens.bin", number * dtype.itemsize
    if ids.stat().st_size != size or tok.fingerprint != header["tokenizer"]:
        raise ValueError(f"{folder}: tokens.bin or the tokenizer is not what tokens.json says: "
                         "delete the folder and make it again")
    return np.memmap(ids, dtype, "r", shape=(number,)), tok


def run(args):
    tok, paths = load(args.tokenizer), [p for x in args.texts for p in text_files(x, KINDS)]
    header, out = write(tok, paths, Path(args.out), args.threads), args.out
    print(f"{out}: {header['tokens']:,} tokens in {header['documents']:,} documents of "
          f"{len(paths)} files, {header['vocab']} ids")


def main():
    parser = flags(__doc__)
    parser.add_argument("texts", nargs="+", metavar="NAMES",
                        help="files and folders, blanks or commas between")
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME",
                        help="gpt2, a folder (GPT-2's, Pythia's) or a ranks file "
                             "(default %(default)s)")
    parser.add_argument("--out", default="out/tokens", metavar="DIR",
                        help="folder of the corpus (default %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1,
                        help="that encode (default: the cores)")
    outcome(run, parser.parse_args(), interrupted="the same command goes on from here")


if __name__ == "__main__":
    main()
