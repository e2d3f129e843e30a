"""A tokenizer without a vocabulary file: text is cut as a BPE pre-tokenizer cuts it, and pieces are hashed.

The cut is greedy and looks one character ahead at most, which gives the two properties that a prefix cache
needs of a tokenizer: a prefix of a text has a prefix of its tokens (but for the last one), and a text cut
between two tokens has exactly the tokens before the cut. English prose has a little over four characters a
token.
"""

from __future__ import annotations

import re
import zlib

__all__ = ["MESSAGE_END", "MESSAGE_START", "encode", "split"]

MESSAGE_START = 1 << 31
"""The token of ChatML's `<|im_start|>`. Text has ids below 2**31, so no text can forge it."""

MESSAGE_END = MESSAGE_START + 1
"""The token of ChatML's `<|im_end|>`, which also ends an answer."""

_PIECE = re.compile(
    r" ?[A-Za-z\u00c0-\u024f]{1,6}"  # a word, or six letters of a longer one, with the space before it
    r"|[^\W\d_A-Za-z\u00c0-\u024f]{1,2}"  # letters of other scripts
    r"|\d{1,3}"
    r"| ?[^\w\s]{1,3}"  # punctuation, symbols, lone surrogates
    r"|_"
    r"|\s{1,8}"
)


def split(text: str) -> list[str]:
    """Cut `text` into the pieces that become its tokens; joined, they are `text` again.

    >>> split("Prefix caching pays, 100%!")
    ['Prefix', ' cachin', 'g', ' pays', ',', ' ', '100', '%!']
    """
    return _PIECE.findall(text)


def encode(text: str) -> list[int]:
    """Give the token ids of `text`: 0 to 2**31 - 1, the same in every process and on every machine.

    >>> encode("warm prefix")
    [817094847, 1889714639]
    """
    return list(map(_ids.__getitem__, _PIECE.findall(text)))


class _PieceIds(dict[str, int]):
    """Memo of piece -> id, emptied when full: pieces repeat so much that a better policy would not pay."""

    _LIMIT = 1 << 18

    def __missing__(self, piece: str) -> int:
        if len(self) >= self._LIMIT:
            self.clear()
        token_id = self[piece] = zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFF_FFFF
        return token_id


_ids = _PieceIds()
