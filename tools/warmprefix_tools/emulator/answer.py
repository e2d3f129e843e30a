"""What the emulator says: a plain statement that no model ran, then words that spell the prompt's digest."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from warmprefix_tools.emulator.tokenizer import MESSAGE_END, encode, split

__all__ = ["Answer", "FinishReason", "compose_answer"]

FinishReason = Literal["stop", "length"]

_STATEMENT = "[warmprefix emulator: no model ran, these words mean nothing]"


@dataclass(frozen=True, slots=True)
class Answer:
    """All tokens of one answer, known before the first is sent.

    `pieces[i]` is the text of `token_ids[i]`. An answer that ends by itself ends with the end-of-message
    token, whose piece is empty and which counts as a completion token, as an engine counts it.
    """

    pieces: tuple[str, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason

    @property
    def text(self) -> str:
        """What the client reads."""
        return "".join(self.pieces)


def compose_answer(prompt: Sequence[int], max_tokens: int) -> Answer:
    """Give the one answer that `prompt` ever gets, cut after `max_tokens` (at least 1).

    >>> answer = compose_answer([1, 2, 3], max_tokens=4)
    >>> answer.text, answer.finish_reason
    ('[warmprefix emulat', 'length')
    """
    text = _full_text(prompt)
    pieces = (*split(text), "")
    token_ids = (*encode(text), MESSAGE_END)
    reason: FinishReason = "stop" if len(token_ids) <= max_tokens else "length"
    return Answer(pieces[:max_tokens], token_ids[:max_tokens], reason)


def _full_text(prompt: Sequence[int]) -> str:
    digest = blake2b(struct.pack(f"<{len(prompt)}I", *prompt), digest_size=64).digest()
    numbers = struct.unpack("<32H", digest)
    words = " ".join(map(_proquint, numbers[1 : 9 + numbers[0] % 17]))
    return f"{_STATEMENT} Prompt of {len(prompt)} tokens: {words}."


def _proquint(number: int) -> str:
    """Spell 16 bits as a word that can be read out (arXiv 0901.4016)."""
    consonants, vowels = "bdfghjklmnprstvz", "aiou"
    return (
        consonants[number >> 12]
        + vowels[number >> 10 & 3]
        + consonants[number >> 6 & 15]
        + vowels[number >> 4 & 3]
        + consonants[number & 15]
    )
