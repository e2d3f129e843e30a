"""A tokenizer without a vocabulary file, and a chat template in the manner of ChatML.

Text is cut as a BPE pre-tokenizer cuts it, and pieces are hashed. The cut is greedy and looks at most one character
ahead. That gives the two properties that a prefix cache needs: a prefix of a text has a prefix of its tokens (except
the last one), and a text cut between two tokens has exactly the tokens before the cut. English prose has a little over
four characters per token.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MESSAGE_END", "MESSAGE_START", "ChatMessage", "encode", "render_chat", "split"]

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
    """Return the pieces of a text that become its tokens; joined, they are the text again.

    >>> split("Prefix caching pays, 100%!")
    ['Prefix', ' cachin', 'g', ' pays', ',', ' ', '100', '%!']
    """
    return _PIECE.findall(text)


def encode(text: str) -> list[int]:
    """Return the token ids of a text: 0 to 2**31 - 1, the same in every process and on every machine.

    >>> encode("warm prefix")
    [817094847, 1889714639]
    """
    return list(map(_ids.__getitem__, _PIECE.findall(text)))


class _PieceIds(dict[str, int]):
    """Memo of piece -> id, emptied when full: pieces repeat too often for a better policy to pay off."""

    _LIMIT = 1 << 18

    def __missing__(self, piece: str) -> int:
        if len(self) >= self._LIMIT:
            self.clear()
        token_id = self[piece] = zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFF_FFFF
        return token_id


_ids = _PieceIds()


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message as the template takes it: content parts joined, tool calls written out in `text`."""

    role: str
    """Role of the author."""
    text: str
    """Text of the message."""


def render_chat(
    messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, continue_final_message: bool = False
) -> list[int]:
    r"""Return the tokens of `<|im_start|>role\ntext<|im_end|>\n` for each message, then of the answer's head.

    Header, text and markers are encoded separately. So no text can look like a marker, and an answer sent back as an
    assistant message has exactly the tokens that were generated: chats hit the cache.

    >>> turn = [ChatMessage("user", "Hello.")]
    >>> longer = [*turn, ChatMessage("assistant", "Hi!"), ChatMessage("user", "Bye.")]
    >>> render_chat(longer)[: len(render_chat(turn))] == render_chat(turn)
    True

    Args:
        messages: The chat.
        add_generation_prompt: True to end with the answer's head.
        continue_final_message: True to end with the last message's text, without its end marker.
    """
    tokens: list[int] = []
    for message in messages:
        tokens += (MESSAGE_START, *encode(f"{message.role}\n"), *encode(message.text), MESSAGE_END, *encode("\n"))
    if continue_final_message:
        del tokens[-1 - len(encode("\n")) :]
    if add_generation_prompt:
        tokens += (MESSAGE_START, *encode("assistant\n"))
    return tokens
