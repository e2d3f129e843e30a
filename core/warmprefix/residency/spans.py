"""Where in a prompt's tokens each paragraph ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from warmprefix.residency.base import ServedPrompt
from warmprefix.residency.kv_keys import TOKEN_BYTES, pack_tokens
from warmprefix.residency.kv_prompts import MappedPrompt

__all__ = ["SpanFinder"]

_EDGES = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1), (2, 2))
"""How many tokens at its beginning and at its end a paragraph may share with the text around it."""
_LEAST_TOKENS = 3
"""What is shorter without its edges could be anything."""


class SpanFinder:
    """Finds paragraphs in the prompts that hold them, token by token.

    A paragraph is tokenized alone, once, and looked for in the prompt's own tokens behind the paragraph before it.
    Tokenizers merge across a paragraph's edges, such as a full stop with the line breaks after it, so up to two tokens
    at either end may differ.

    Args:
        tokenizer: A paragraph's token ids, without special tokens.
        max_tokens: How many tokens of paragraphs are kept, those not used longest forgotten first.
    """

    def __init__(self, tokenizer: Callable[[str], Sequence[int]], *, max_tokens: int = 4_000_000) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
        self._tokenizer = tokenizer
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def map(self, served: ServedPrompt) -> MappedPrompt | None:
        """The prompt up to the end of its last context block, and where each ends; None if one can't be found.

        Raises whatever the tokenizer raises.
        """
        if not served.paragraphs or len(served.paragraphs) != len(served.keys):
            return None
        tokens = pack_tokens(served.token_ids)
        starts: list[int] = []
        ends: list[int] = []
        for paragraph in served.paragraphs:
            span = _find(self._tokens(paragraph), tokens, ends[-1] if ends else 0)
            if span is None:
                return None
            start, end = span
            if ends:  # the token that two paragraphs share counts for the former only if it must
                ends[-1] = min(ends[-1], start)
            starts.append(start)
            ends.append(min(end, len(tokens) // TOKEN_BYTES))
        return MappedPrompt(
            served.scope, served.cache_salt, tuple(served.keys), tokens[: ends[-1] * TOKEN_BYTES], tuple(ends)
        )

    def _tokens(self, paragraph: str) -> bytes:
        name = blake2b(paragraph.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        packed = self._kept.get(name)
        if packed is not None:
            self._kept.move_to_end(name)
            return packed
        packed = pack_tokens(self._tokenizer(paragraph))
        self._kept[name] = packed
        self._bytes += len(packed)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1])
        return packed


def _find(paragraph: bytes, prompt: bytes, start: int) -> tuple[int, int] | None:
    """The first place at or behind `start` with these tokens, or with most of them; in tokens."""
    length = len(paragraph) // TOKEN_BYTES
    for before, behind in _EDGES:
        if before + behind and length - before - behind < _LEAST_TOKENS:
            continue
        core = paragraph[before * TOKEN_BYTES : (length - behind) * TOKEN_BYTES]
        at = _find_aligned(core, prompt, start)
        if at is not None:
            return max(at - before, start), at + length - before
    return None


def _find_aligned(core: bytes, prompt: bytes, start: int) -> int | None:
    if not core:
        return None
    at = prompt.find(core, start * TOKEN_BYTES)
    while at % TOKEN_BYTES and at >= 0:
        at = prompt.find(core, at + 1)
    return at // TOKEN_BYTES if at >= 0 else None
