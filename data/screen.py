"""Answers on a screen: text as its tokens come, nothing that steers a terminal, columns."""

import codecs
import textwrap
from itertools import zip_longest


class Stream:
    """The on_token callback of `generate`: writes text once it is certain, collects it in `text`.

    A token may end inside a UTF-8 character, so bytes wait for the rest of theirs; blanks at both
    ends are left out. After `close`, `text` equals tok.decode(ids).strip() whatever the ids.
    """

    def __init__(self, tok, write):
        self.tok, self.write, self.text, self.blank = tok, write, "", ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, row, token):
        if token not in self.tok.stops:  # special ids have no text
            self.add(self.decoder.decode(self.tok.encoding.decode_single_token_bytes(token)))

    def close(self):
        self.add(self.decoder.decode(b"", final=True))

    def add(self, piece):
        piece = self.blank + piece if self.text else piece.lstrip()
        body = piece.rstrip()
        self.blank = piece[len(body):]  # belongs to the text only if more follows
        if body:
            self.text += body
            self.write(printable(body))


def printable(text):
    """Text that can't steer a terminal: byte tokens can spell control characters."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\ufffd"
                   for c in text)


def columns(cells, width):
    """Texts side by side, each wrapped into its share of `width` characters."""
    share = max(4, (width - 3 * (len(cells) - 1)) // len(cells))
    wrapped = [[line for part in cell.split("\n") for line in textwrap.wrap(part, share) or [""]]
               for cell in cells]
    return "\n".join(" | ".join(line.ljust(share) for line in row).rstrip()
                     for row in zip_longest(*wrapped, fillvalue=""))
