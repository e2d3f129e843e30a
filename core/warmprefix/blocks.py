"""Context blocks: the texts that a retriever returns, identified by their content."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, SupportsIndex, get_args

__all__ = [
    "ContextBlock",
    "Pin",
    "as_blocks",
    "distinct_blocks",
    "evidence_blocks",
    "fingerprint",
    "joined_blocks",
    "pins",
    "single_places",
]

Pin = Literal["start", "end"]

_PINS = (None, *get_args(Pin))
_DIGEST_BYTES = 16


def fingerprint(text: str) -> bytes:
    """Return the 16-byte BLAKE2b digest of `text`, which identifies a context block.

    Works for every `str`: a lone surrogate is hashed as its three bytes in WTF-8. Nothing is normalised, because
    another spelling of the same characters has other tokens.

    >>> fingerprint("evidence").hex()
    '2f235f9686cc7930960bbdcf87dc4e64'
    """
    return _digest(text.encode("utf-8", "surrogatepass"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True, init=False)
class ContextBlock:
    """One unit of external context: a document, passage, memory or tool result.

    Blocks are equal if their texts are: two ids with one text are one block, one id with two texts is two blocks.

    >>> ContextBlock("The sky is blue.", id="sky") == ContextBlock("The sky is blue.", id=7)
    True
    """

    text: str = field(compare=False)
    id: str | None = field(compare=False)
    tokens: int = field(compare=False)
    score: float | None = field(compare=False)
    pinned: Pin | None = field(compare=False)
    follows: str | bytes | None = field(compare=False)
    """Id or fingerprint of the block in front of it in its source."""
    fingerprint: bytes = field(init=False, repr=False)
    """128-bit digest of the text: the identity of the block."""

    def __init__(
        self,
        text: str,
        id: str | int | None = None,
        tokens: SupportsIndex | None = None,
        score: float | None = None,
        pinned: Pin | None = None,
        follows: ContextBlock | str | int | bytes | None = None,
    ) -> None:
        """Hash `text` (about 1 µs per kB) and check the other arguments.

        Args:
            text: The text for the prompt. Plans leave out a block whose text is empty or blank.
            id: The caller's name for the block. It is the label in the prompt if it is short and safe (see
                `warmprefix.labels`), and unused otherwise. An `int` stands for its decimal digits.
            tokens: Length in tokens, 0 or more; by default a quarter of the UTF-8 bytes, rounded up.
            score: The retriever's score, by which a `Choice` decides what is fed. It neither affects the order nor
                reaches the prompt, so without a choice NaN does no harm.
            pinned: `"start"` or `"end"` keeps the block at that end of the context.
            follows: The block directly in front of it in their source, or its id or fingerprint. If a request lists
                the two one after the other, plans keep them so. Otherwise it has no effect.

        Raises:
            TypeError: `text`, `id`, `tokens` or `follows` has the wrong type.
            ValueError: `tokens` is negative, `pinned` has another value, or the block follows itself.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        id = _as_id("id", id)
        if isinstance(follows, ContextBlock):
            follows = follows.fingerprint
        elif not isinstance(follows, bytes):
            follows = _as_id("follows", follows)
        if pinned not in _PINS:
            raise ValueError(f"pinned must be 'start', 'end' or None, got {pinned!r}")
        data = text.encode("utf-8", "surrogatepass")
        digest = _digest(data)
        if follows is not None and follows in (id, digest):
            raise ValueError(f"follows must name another block, got {follows!r}, which is this block")
        assign = object.__setattr__
        assign(self, "text", text)
        assign(self, "id", id)
        assign(self, "tokens", (len(data) + 3) // 4 if tokens is None else _token_count(tokens))
        assign(self, "score", score)
        assign(self, "pinned", pinned)
        assign(self, "follows", follows)
        assign(self, "fingerprint", digest)

    @property
    def is_blank(self) -> bool:
        """True if the text is empty or only white space."""
        return not self.text or self.text.isspace()


def _as_id(name: str, id: str | int | None) -> str | None:
    if id is None or isinstance(id, str):
        return id
    if isinstance(id, bool) or not isinstance(id, int):
        raise TypeError(f"{name} must be a str, an int or None, got {type(id).__name__}")
    return str(id)


def as_blocks(blocks: Iterable[ContextBlock | str]) -> list[ContextBlock]:
    """Return the blocks of a request as a list; a string is a block without an id.

    Raises:
        TypeError: `blocks` is a string, a mapping or not iterable, or contains something else.
    """
    if type(blocks) is list and {*map(type, listed := blocks[:])} == {ContextBlock}:  # for speed
        return listed
    if isinstance(blocks, str | bytes | Mapping) or not isinstance(blocks, Iterable):
        raise TypeError(f"blocks must be a sequence of ContextBlock or str, got one {type(blocks).__name__}")
    return [block if isinstance(block, ContextBlock) else _as_block(i, block) for i, block in enumerate(blocks)]


def _as_block(i: int, block: object) -> ContextBlock:
    if not isinstance(block, str):
        raise TypeError(f"blocks[{i}] must be a ContextBlock or a str, got {type(block).__name__}")
    return ContextBlock(block)


def distinct_blocks(listed: Sequence[ContextBlock]) -> tuple[Sequence[ContextBlock], list[tuple[int, ...]]]:
    """Return the first of equal blocks, and the places of each in `listed`."""
    return _distinct(listed, range(len(listed)))


def evidence_blocks(listed: Sequence[ContextBlock]) -> tuple[Sequence[ContextBlock], Sequence[tuple[int, ...]]]:
    """Do the same as `distinct_blocks`, without the blocks that are blank."""
    blank = [block for block in listed if not block.text or block.text.isspace()]  # `is_blank`, for speed
    if not blank and len({block.fingerprint for block in listed}) == len(listed):
        return listed, single_places(len(listed))
    return _distinct(listed, [i for i, block in enumerate(listed) if not block.is_blank])


@lru_cache(maxsize=64)
def single_places(blocks: int) -> tuple[tuple[int], ...]:
    """Return the places of this many blocks that a request lists once each."""
    return tuple([(i,) for i in range(blocks)])


def _distinct(
    listed: Sequence[ContextBlock], kept: Iterable[int]
) -> tuple[Sequence[ContextBlock], list[tuple[int, ...]]]:
    places: dict[bytes, list[int]] = {}
    for i in kept:
        places.setdefault(listed[i].fingerprint, []).append(i)
    return [listed[place[0]] for place in places.values()], [tuple(place) for place in places.values()]


def joined_blocks(listed: Sequence[ContextBlock], positions: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """Return which distinct blocks stay directly behind the one in front of them: all of a run but its first.

    A run is a longest stretch of a request in which each block follows the one before it, without regard to blank
    blocks between them. A block that the request has shown before is left out of its run. O(blocks).

    Args:
        listed: The request.
        positions: The places of each distinct block in it; see `evidence_blocks`.
    """
    if not [block for block in listed if block.follows is not None]:
        return frozenset()
    runs = list(range(len(listed)))
    """The place where the run of each block begins."""
    shown = 0
    """The last place with a text."""
    for i in range(1, len(listed)):
        block = listed[i]
        for before in (i - 1, shown):
            if _is_behind(block, listed[before]):
                runs[i] = runs[before]
                break
        if not block.is_blank:
            shown = i
    places = [place[0] for place in positions]
    return frozenset([i for i in range(1, len(places)) if runs[places[i]] == runs[places[i - 1]]])


def _is_behind(block: ContextBlock, before: ContextBlock) -> bool:
    if block.follows is not None and block.follows in (before.id, before.fingerprint):
        return True
    return block == before and not block.is_blank


def pins(blocks: Sequence[ContextBlock], joined: Collection[int]) -> list[Pin | None]:
    """Return the end at which each block is kept: that of the first pinned block of its run. O(blocks)."""
    ends: list[Pin | None] = [block.pinned for block in blocks]
    if not joined or not any(ends):
        return ends
    for places in (range(1, len(ends)), range(len(ends) - 1, 0, -1)):
        for i in places:
            if i in joined:
                first, second = ends[i - 1], ends[i]
                ends[i - 1] = ends[i] = first or second
    return ends


def _token_count(tokens: SupportsIndex) -> int:
    if isinstance(tokens, bool) or not hasattr(tokens, "__index__"):
        raise TypeError(f"tokens must be an int or None, got {type(tokens).__name__}")
    count = operator.index(tokens)
    if count < 0:
        raise ValueError(f"tokens must be 0 or more, got {count}")
    return count
