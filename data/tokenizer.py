"""Text to tokens and back: byte-pair encoding, six special tokens, the rendering of a dialogue.

A dialogue is a list of turns `(role, text)` with role "human" or "assistant". It has two forms:

    disk    "\\n\\nHuman: What color is the fox?\\n\\nAssistant: The fox is red."
    tokens  <|eod|> <|human|> What color is the fox? <|eot|> <|assistant|> The fox is red. <|eot|>

Each role header and the end of a turn is ONE special id. Text is encoded without specials, so no
text can forge a turn, and no merge can cross the border between a prompt and its answer.
Pretraining, distillation, the preference model, PPO, the evaluation and the chat all call
`Tokenizer.render`.

There are four kinds of tokenizer in the one class: a BPE of the toy world's text, a BPE of any
text, GPT-2's, and Pythia's, which reads a text in its composed form (Unicode's NFC).

    python data/tokenizer.py --train FILE ... --vocab 4096 --out my.tiktoken     a BPE of any text

8 MB of English take 5 to 10 seconds and 0.2 GB on one core.
"""

import argparse
import base64
import binascii
import hashlib
import heapq
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from itertools import count, islice
from pathlib import Path

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

if __name__ == "__main__":  # run as a program, the folder above this one holds `data`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import neox

SPECIALS = ("<|pad|>", "<|eod|>", "<|human|>", "<|assistant|>", "<|eot|>", "<|eoc|>")
HEADERS = {"human": "\n\nHuman:", "assistant": "\n\nAssistant:"}

# GPT-2's split into words, written so that Python's `re` (training) and tiktoken (encoding) both
# read it. Every character belongs to one of its branches: tiktoken drops what it does not match.
# The two differ in what \w is for accents by themselves and numerals like ²: there, training sees
# other words than encoding, which costs a few tokens and no letter.
PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
# GPT-2's own, which Python's `re` can't read.
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
PATTERNS = {"nanohh": PATTERN, "gpt2": GPT2, "neox": neox.WORDS}

# The two files of GPT-2's BPE: OpenAI's names and Hugging Face's, which spells the same content in
# other bytes at times. So the fingerprint of what they say counts, not their sums.
GPT2_FILES = (("vocab.bpe", "merges.txt"), ("encoder.json", "vocab.json"))
GPT2_FINGERPRINT = "b8d4dca54b3e"

DISTINCT = 1_000_000    # distinct words that training keeps at most: 0.7 GB


class Tokenizer:
    """Mergeable ranks (bytes -> id) with the special ids after them; pattern: a name in PATTERNS.

    GPT-NeoX's ranks leave 0 and 1 free, which are special, too. twins: id -> bytes of those that
    the ranks have under another id: no text becomes them, but they have a text.

    Attributes: `vocab` number of ids; `pad`, `eod` end of document (it also opens every row),
    `human` and `assistant` role headers, `eot` end of turn, `eoc` end of context, where the
    preference model is read (HH A.2); `stops` all six, `special_ids` by name.
    """

    def __init__(self, ranks, pattern="nanohh", twins=None):
        self.ranks, self.pattern, self.twins = ranks, pattern, twins or {}
        self.specials = list(SPECIALS)
        if pattern != "nanohh":  # <|eod|> is their <|endoftext|>, the first id that is no text
            self.specials.sort(key=lambda name: name != "<|eod|>")
        text = {*ranks.values(), *self.twins}
        ids = dict(zip(self.specials, (i for i in count() if i not in text)))
        unmade = {token.decode(): i for i, token in self.twins.items()}  # for tiktoken's `decode`
        self.encoding = tiktoken.Encoding(pattern, pat_str=PATTERNS[pattern], mergeable_ranks=ranks,
                                          special_tokens=ids | unmade)
        self.pad, self.eod, self.human, self.assistant, self.eot, self.eoc = map(ids.get, SPECIALS)
        self.vocab = len(text) + len(ids)
        self.special_ids = ids
        self.stops = tuple(ids.values())  # any special id ends an answer, only <|eot|> properly

    def encode(self, text):
        """Ids of ordinary text: special tokens that it spells out are just characters."""
        text = unicodedata.normalize("NFC", text) if self.pattern == "neox" else text
        return self.encoding.encode_ordinary(text)

    def encode_all(self, texts, threads=1):
        """`encode` of each text, on several threads."""
        if self.pattern == "neox":
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        return self.encoding.encode_ordinary_batch(texts, num_threads=threads)

    def decode(self, ids):
        """Text of ids; special ids have no text and are left out."""
        return self.encoding.decode([i for i in ids if i not in self.stops])

    def render(self, turns, preamble="", answer=False):
        """Turns -> ids, opened by <|eod|>; answer=True adds the assistant header of an answer."""
        ids = [self.eod] + self.encode(preamble)
        for role, text in turns:
            header = self.human if role == "human" else self.assistant
            ids += [header, *self.encode(text), self.eot]
        return ids + [self.assistant] if answer else ids

    def render_answer(self, text):
        """An answer's ids, end of turn included: what a policy would have sampled."""
        return self.encode(text) + [self.eot]

    def show(self, token):
        """One token as a printable name, for traces."""
        if token in self.stops:
            return self.specials[self.stops.index(token)]
        return repr(self.decode([token]))[1:-1]

    def dumps(self):
        """The ranks in tiktoken's file form: one `base64 rank` a line, those of twins, too.

        A first line names the pattern where it is not the project's own.
        """
        first = "" if self.pattern == "nanohh" else f"pattern {self.pattern}\n"
        lines = [*self.ranks.items(), *((t, r) for r, t in self.twins.items())]
        if self.pattern == "neox":  # a twin is the earlier of two lines with one token
            lines.sort(key=lambda line: line[1])
        return first + "".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in lines)

    @property
    def fingerprint(self):
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:12]


# ---------------------------------------------------------------- files

def loads(text, name="tokenizer"):
    """Read `dumps()` back. ValueError naming `name` and the bad line."""
    ranks, twins, pattern = {}, {}, "nanohh"
    for number, line in enumerate(text.splitlines(), 1):
        try:
            token, rank = line.split()
            if number == 1 and token == "pattern":
                pattern = rank
            else:
                token = base64.b64decode(token, validate=True)
                if pattern == "neox" and token in ranks:
                    twins[ranks[token]] = token
                ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{name} line {number}: expected 'base64 rank', "
                             f"found {line[:40]!r}") from None
    if pattern not in PATTERNS:
        raise ValueError(f"{name} line 1: pattern {pattern!r}: choose from {', '.join(PATTERNS)}")
    return made(ranks, pattern, twins, name)


def made(ranks, pattern, twins, name):
    """A Tokenizer; ValueError naming `name` if ids have a gap, or a byte that texts have is none.

    GPT-NeoX's begin at 2 and lack the 13 bytes that no UTF-8 has.
    """
    first, needed = (2, {*range(0xF5)} - {0xC0, 0xC1}) if pattern == "neox" else (0, range(256))
    ids = sorted([*ranks.values(), *twins])
    whole = ids == list(range(first, first + len(ids)))
    if not whole or any(bytes([b]) not in ranks for b in needed):
        raise ValueError(f"{name}: ranks must run from {first} without a gap and hold all "
                         f"{len(needed)} bytes")
    return Tokenizer(ranks, pattern, twins)


def load(name):
    """The Tokenizer of a name.

    "gpt2": through tiktoken, which fetches it once; a folder with GPT-2's encoder.json and
    vocab.bpe, or vocab.json and merges.txt as beside its weights: the same without a network; a
    folder with Pythia's tokenizer.json, or the tokenizer.tiktoken of sample.py --export; else a
    file that --train wrote. ValueError if there is no such thing, or it is another thing.
    """
    path = Path(name)
    if name == "gpt2":
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # no network, or another file than expected
            raise ValueError(f"gpt2: not fetched ({type(error).__name__}); without a network, name "
                             "a folder that holds encoder.json and vocab.bpe") from None
        ids = range(encoding.eot_token)
        return Tokenizer({encoding.decode_single_token_bytes(i): i for i in ids}, "gpt2")
    if path.is_dir():
        own, other = path / "tokenizer.tiktoken", path / "tokenizer.json"
        if own.is_file():
            return loads(read_text(own), own)
        if other.is_file() and "<|padding|>" in read_text(other):
            ranks, twins = neox.read_tokenizer(other)
            return made(ranks, "neox", twins, other)
        return load_gpt2(path)
    if not path.exists():
        raise ValueError(f"{name}: no such tokenizer; name 'gpt2', a folder with encoder.json and "
                         "vocab.bpe, or a file of data/tokenizer.py --train")
    return loads(read_text(path), name)


def load_gpt2(folder):
    """The Tokenizer of GPT-2's two files. ValueError if one lacks or says other things."""
    paths = []
    for names in GPT2_FILES:
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            raise ValueError(f"{folder / names[0]}: no such file; GPT-2's tokenizer is vocab.bpe "
                             "and encoder.json in one folder, or merges.txt and vocab.json; "
                             "Pythia's a tokenizer.json")
        paths.append(path)
    # with the sums, or tiktoken would trust what it once read under the same path
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    try:
        tok = Tokenizer(data_gym_to_mergeable_bpe_ranks(*map(str, paths), *sums), "gpt2")
    except (ValueError, KeyError, AttributeError, AssertionError):  # tiktoken's for a wrong form
        tok = None
    if tok is None or tok.fingerprint != GPT2_FINGERPRINT:
        raise ValueError(f"{folder}: {' and '.join(path.name for path in paths)} are not GPT-2's: "
                         "cut off, or another model's; fetch them again")
    return tok


def read_text(path):
    """The text of a UTF-8 file, line breaks as "\\n". ValueError naming the line that is none."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[:error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line}: not UTF-8 text (byte 0x"
                         f"{error.object[error.start]:02x}); convert the file") from None


# ---------------------------------------------------------------- training

def count_words(texts):
    """(word -> how often, as a Counter; how many were left out).

    Only the DISTINCT most frequent are kept, so that memory is bounded.
    """
    words, dropped = Counter(), 0
    for text in texts:
        matches = re.finditer(PATTERN, text)
        while some := Counter(match[0] for match in islice(matches, DISTINCT)):
            words.update(some)
            if len(words) > DISTINCT:
                before = words.total()
                words = Counter(dict(words.most_common(DISTINCT)))
                dropped += before - words.total()
    return words, dropped


def merged(ids, pair, new):
    """ids with each `pair` of neighbours, from the left, made one id `new`."""
    out, i = [], 0
    while i < len(ids):
        if ids[i] == pair[0] and i + 1 < len(ids) and ids[i + 1] == pair[1]:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def train_bpe(texts, vocab):
    """Byte-pair encoding: merge the most frequent pair of neighbours until `vocab` ids exist.

    texts: strings, each read once. `vocab` includes the specials; ValueError if it is below 256
    bytes and them. Ties go to the pair of smaller ids, so the result depends on the text alone.
    Returns a Tokenizer.

    No bytes are made twice: inside a stretch that ends as one token, earlier merges went as if it
    stood alone (one across its border would have swallowed the border), so equal bytes always
    split alike.
    """
    target = vocab - len(SPECIALS)
    if target < 256:
        raise ValueError(f"vocab {vocab}: at least {256 + len(SPECIALS)} are needed "
                         "(256 bytes and the specials)")
    words, dropped = count_words(texts)
    if dropped:
        print(f"{dropped:,} rare words are left out: more than {DISTINCT:,} differ")
    counts = list(words.values())
    splits = [list(word.encode(errors="replace")) for word in words]  # JSON may hold a surrogate
    tokens = [bytes([b]) for b in range(256)]                   # id -> bytes
    pairs, where = Counter(), defaultdict(set)                  # pair -> frequency, -> words
    for w, ids in enumerate(splits):
        for pair in zip(ids, ids[1:], strict=False):
            pairs[pair] += counts[w]
            where[pair].add(w)
    # Once a pair's younger id is made it only becomes rarer: an entry may be too high, not too low.
    heap = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(heap)
    while len(tokens) < target and heap:
        n, best = heapq.heappop(heap)
        if -n != pairs[best]:
            if pairs[best] > 0:
                heapq.heappush(heap, (-pairs[best], best))
            continue
        new, fresh = len(tokens), set()
        tokens.append(tokens[best[0]] + tokens[best[1]])
        for w in where.pop(best):
            old, ids = splits[w], merged(splits[w], best, new)
            for pair in zip(old, old[1:], strict=False):
                pairs[pair] -= counts[w]
            for pair in zip(ids, ids[1:], strict=False):
                pairs[pair] += counts[w]
                if new in pair:
                    where[pair].add(w)
                    fresh.add(pair)
            splits[w] = ids
        for pair in fresh:
            heapq.heappush(heap, (-pairs[pair], pair))
    return Tokenizer({token: i for i, token in enumerate(tokens)})


# ---------------------------------------------------------------- dialogues

def parse(text):
    """HH text -> turns; ValueError if it does not begin with a header.

    A header counts only after a blank line. `join(parse(x)) == x` for text in HH form, in which a
    space follows each header; what lacks one comes back with it.
    """
    pieces = re.split(r"\n\n(Human|Assistant):", text)
    if pieces[0] or len(pieces) == 1:
        raise ValueError("a dialogue must begin with a blank line and 'Human:', "
                         f"found {text[:40]!r}")
    return [(role.lower(), body[1:] if body.startswith(" ") else body)
            for role, body in zip(pieces[1::2], pieces[2::2], strict=True)]


def join(turns, answer=False):
    """Turns -> HH text; answer=True adds the open "\\n\\nAssistant:" that a prompt ends with.

    ValueError for a text with a role header: it would come back as a turn.
    """
    for _, text in turns:
        if re.search(r"\n\n(Human|Assistant):", text):
            raise ValueError("a turn may not contain a role header after a blank line: "
                             f"{text[:60]!r}")
    text = "".join(f"{HEADERS[role]} {text}" for role, text in turns)
    return text + HEADERS["assistant"] if answer else text


def parse_prompt(text):
    """The turns before the open "\\n\\nAssistant:" that a prompt must end with; else ValueError."""
    if not text.endswith(HEADERS["assistant"]):
        raise ValueError(f"a prompt must end with 'Assistant:' after a blank line: {text[-40:]!r}")
    return parse(text)[:-1]


def fit(tok, turns, room):
    """Ids of a prompt in at most `room` tokens: the oldest turns go first, down to the last human.

    None if the last human turn does not fit, or there is none.
    """
    last = max((i for i, (role, _) in enumerate(turns) if role == "human"), default=0)
    for first in (i for i in range(last + 1) if turns[i][0] == "human"):
        ids = tok.render(turns[first:], answer=True)
        if len(ids) <= room:
            return ids
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", metavar="FILE", required=True,
                        help="UTF-8 text files")
    parser.add_argument("--vocab", type=int, default=4096, help="ids, special tokens included")
    parser.add_argument("--out", default="out/bpe.tiktoken", help="the ranks file to write")
    args = parser.parse_args()
    out, size, ids = Path(args.out), 0, 0
    part = out.with_name(f".{out.name}.part")
    try:
        tok = train_bpe(map(read_text, args.train), args.vocab)
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(tok.dumps())
        os.replace(part, out)                        # the old file or the new one, whole
    except (OSError, ValueError) as error:
        part.unlink(missing_ok=True)
        sys.exit(f"error: {error}")
    for text in map(read_text, args.train):
        size, ids = size + len(text.encode()), ids + len(tok.encode(text))
    print(f"{out}: {tok.vocab} ids, {size / max(ids, 1):.2f} bytes a token on {size:,} bytes")


if __name__ == "__main__":
    main()
