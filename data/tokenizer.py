"""Text to tokens and back: byte-pair encoding, six special tokens, the rendering of a dialogue.

A dialogue is a list of turns `(role, text)` with role "human" or "assistant". It has two forms:

    disk    "\\n\\nHuman: What color is the fox?\\n\\nAssistant: The fox is red."
    tokens  <|eod|> <|human|> What color is the fox? <|eot|> <|assistant|> The fox is red. <|eot|>

Each role header and the end of a turn is ONE special id. Text is encoded without specials, so no
text can forge a turn, and no merge can cross the border between a prompt and its answer.
Pretraining, distillation, the preference model, PPO, the evaluation and the chat all call
`Tokenizer.render`.

    python data/tokenizer.py --train FILE ... --vocab 4096 --out my.tiktoken     a BPE of any text
"""

import argparse
import base64
import binascii
import hashlib
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import tiktoken

SPECIALS = ("<|pad|>", "<|eod|>", "<|human|>", "<|assistant|>", "<|eot|>", "<|eoc|>")
HEADERS = {"human": "\n\nHuman:", "assistant": "\n\nAssistant:"}

# GPT-2's split into words, written so that Python's `re` (training) and tiktoken (encoding) both
# read it. Every character belongs to one of its branches: tiktoken drops what it does not match.
PATTERN = (r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class Tokenizer:
    """Mergeable ranks (bytes -> id) with the special ids after them.

    Attributes: `vocab` number of ids; `pad`, `eod` end of document (it also opens every row),
    `human` and `assistant` role headers, `eot` end of turn, `eoc` end of context, where the
    preference model is read (HH A.2).
    """

    def __init__(self, ranks):
        ids = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
        self.ranks = ranks
        self.encoding = tiktoken.Encoding("nanohh", pat_str=PATTERN, mergeable_ranks=ranks,
                                          special_tokens=ids)
        self.pad, self.eod, self.human, self.assistant, self.eot, self.eoc = ids.values()
        self.vocab = len(ranks) + len(ids)
        self.stops = tuple(ids.values())  # any special id ends an answer, only <|eot|> properly

    def encode(self, text):
        """Ids of ordinary text: special tokens that it spells out are just characters."""
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        """Text of ids; special ids have no text and are left out."""
        return self.encoding.decode([i for i in ids if i < len(self.ranks)])

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
        if token >= len(self.ranks):
            return SPECIALS[token - len(self.ranks)]
        return repr(self.decode([token]))[1:-1]

    def dumps(self):
        """The ranks in tiktoken's file form: one `base64 rank` a line."""
        return "".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in self.ranks.items())

    @property
    def fingerprint(self):
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:12]


def loads(text, name="tokenizer"):
    """Read `dumps()` back. A bad line is an error that names it."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{name} line {number}: expected 'base64 rank', "
                             f"found {line[:40]!r}") from None
    bytewise = all(bytes([b]) in ranks for b in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or not bytewise:
        raise ValueError(f"{name}: ranks must run from 0 without a gap and hold all 256 bytes")
    return Tokenizer(ranks)


def train_bpe(texts, vocab):
    """Byte-pair encoding: merge the most frequent pair of neighbours until `vocab` ids exist.

    `vocab` includes the specials; ValueError if it is below 256 bytes and them. Ties go to the
    pair of smaller ids, so the result depends on the text alone. Returns a Tokenizer.
    """
    target = vocab - len(SPECIALS)
    if target < 256:
        raise ValueError(f"vocab {vocab}: at least {256 + len(SPECIALS)} are needed "
                         "(256 bytes and the specials)")
    words = Counter()
    for text in texts:
        words.update(re.findall(PATTERN, text))
    counts = list(words.values())
    splits = [list(word.encode()) for word in words]        # each distinct word as a list of ids
    tokens = [bytes([b]) for b in range(256)]               # id -> bytes
    known = set(tokens)
    pairs, where = Counter(), defaultdict(set)              # pair -> frequency, -> words with it
    for w, ids in enumerate(splits):
        for pair in zip(ids, ids[1:], strict=False):
            pairs[pair] += counts[w]
            where[pair].add(w)
    while len(tokens) < target and pairs:
        best = max(pairs, key=lambda p: (pairs[p], -p[0], -p[1]))
        if pairs[best] <= 0:
            break
        merged = tokens[best[0]] + tokens[best[1]]
        if merged in known:                                 # the same bytes by another road
            new = tokens.index(merged)
        else:
            new = len(tokens)
            tokens.append(merged)
            known.add(merged)
        for w in where.pop(best):
            old, ids, i = splits[w], [], 0
            while i < len(old):
                if tuple(old[i:i + 2]) == best:
                    ids.append(new)
                    i += 2
                else:
                    ids.append(old[i])
                    i += 1
            for pair in zip(old, old[1:], strict=False):
                pairs[pair] -= counts[w]
                if pair != best:
                    where[pair].discard(w)
            for pair in zip(ids, ids[1:], strict=False):
                pairs[pair] += counts[w]
                where[pair].add(w)
            splits[w] = ids
        del pairs[best]
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
    try:
        texts = [Path(name).read_text(encoding="utf-8") for name in args.train]
        tok = train_bpe(texts, args.vocab)
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(tok.dumps())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        sys.exit(f"error: {error}")
    size, ids = sum(len(t.encode()) for t in texts), sum(len(tok.encode(t)) for t in texts)
    print(f"{args.out}: {tok.vocab} ids, {size / max(ids, 1):.2f} bytes a token on {size:,} bytes")


if __name__ == "__main__":
    main()
