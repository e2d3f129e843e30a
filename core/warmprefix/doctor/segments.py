"""Texts as sequences of small numbers: every sentence or line of the log is held once.

A log repeats itself: that is why it has a prefix cache. So a text is cut into segments, each distinct segment gets a
number, and its tokens are counted once. The cuts are chosen so that they always lie between two tokens, and so that
two texts with a common start are cut alike up to where they part: the tokens of a text are those of its segments, one
after another, and what two prompts share can be read off their numbers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from warmprefix.emulator import encode, split
from warmprefix.emulator.tokenizer import MESSAGE_END, MESSAGE_START
from warmprefix.errors import MissingExtraError

try:
    import numpy as np
    from numpy.typing import NDArray
except ImportError as exc:
    raise MissingExtraError("doctor", "numpy") from exc

__all__ = ["EMPTY", "Ids", "PerSegment", "SegmentPool", "cut"]

Ids = NDArray[np.uint32]

ItemT = TypeVar("ItemT")

EMPTY = 0
"""The segment without text."""

_SEGMENT = re.compile(r"\s*(?:[^\n.!?]+|[.!?]+(?![\s.!?]|\Z))*[.!?]*")
_LONG = 1_000
_RUN = 16
_PIECE_OF_LONG = re.compile(rf"(?s).{{{_LONG},}}?\S(?=\s)|.+")


def cut(text: str) -> list[str]:
    r"""Cut at the ends of lines and sentences; white space goes to what follows it.

    >>> cut("One. Two,\n\n three\n")
    ['One.', ' Two,', '\n\n three', '\n']
    """
    segments = _SEGMENT.findall(text)
    segments.pop()  # the last match is empty
    if " \n" in text or "\t\n" in text or "\r\n" in text or not text.isascii():
        segments = _with_space_in_front(segments)
    if len(text) > _LONG and max(map(len, segments)) > _LONG:
        return [piece for segment in segments for piece in _PIECE_OF_LONG.findall(segment)]
    return segments


def _with_space_in_front(segments: list[str]) -> list[str]:
    """Hand trailing white space on to the next segment: a cut within it could cut a token."""
    moved: list[str] = []
    space = ""
    for segment in segments[:-1]:
        stripped = segment.rstrip()
        moved.append(space + stripped)
        space = segment[len(stripped) :]
    return [*moved, space + segments[-1]] if segments else moved


class PerSegment(Generic[ItemT]):
    """A number for each item of a growing list, worked out once."""

    def __init__(self, items: list[ItemT], look: Callable[[ItemT], int], kind: type[np.generic]) -> None:
        self._items = items
        self._look = look
        self._numbers: NDArray[Any] = np.zeros(1_024, kind)
        self._done = 0

    def __call__(self) -> NDArray[Any]:
        """The numbers of all items there are now; not to be changed."""
        count, done = len(self._items), self._done
        if done < count:
            if count > len(self._numbers):
                more = np.zeros(max(count, 2 * len(self._numbers)) - len(self._numbers), self._numbers.dtype)
                self._numbers = np.concatenate((self._numbers, more))
            new = self._items[done:]
            self._numbers[done:count] = np.fromiter(map(self._look, new), self._numbers.dtype, len(new))
            self._done = count
        return self._numbers[:count]


class SegmentPool:
    """All distinct segments of a log, and of its mended versions. Never forgets."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._ids: dict[str, int] = {"": EMPTY}
        self._tokens: list[int] = [0]
        self._counts = PerSegment(self._tokens, int, np.int64)
        self._packed: dict[int, bytes] = {}
        self._heads: dict[str, int] = {}
        self._runs: dict[tuple[int, ...], int] = {}
        self.message_end = self._add_marker((MESSAGE_END, *encode("\n")))

    def __len__(self) -> int:
        return len(self.texts)

    def intern(self, segment: str) -> int:
        """The number of one segment."""
        number = self._ids.get(segment)
        if number is None:
            number = self._ids[segment] = len(self.texts)
            self.texts.append(segment)
            self._tokens.append(len(split(segment)))
        return number

    def ids(self, text: str) -> Ids:
        """The numbers of a whole text."""
        return self.intern_all(cut(text))

    def intern_all(self, segments: list[str]) -> Ids:
        """The numbers of segments that follow one another."""
        known = self._ids
        try:
            return np.array([known[segment] for segment in segments], np.uint32)
        except KeyError:
            return np.array([self.intern(segment) for segment in segments], np.uint32)

    def text(self, ids: Ids) -> str:
        """What the numbers stand for."""
        texts = self.texts
        return "".join([texts[i] for i in ids.tolist()])

    def message_head(self, role: str) -> int:
        """The marker that opens a message of this role, as a segment."""
        head = self._heads.get(role)
        if head is None:
            head = self._heads[role] = self._add_marker((MESSAGE_START, *encode(f"{role}\n")))
        return head

    def token_ids(self, tokens: Sequence[int]) -> Ids:
        """A prompt of which only the token ids are known."""
        runs = [tuple(tokens[start : start + _RUN]) for start in range(0, len(tokens), _RUN)]
        return np.array([self._runs.get(run) or self._add_run(run) for run in runs], np.uint32)

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """Tokens of each segment."""
        return self._counts()

    def packed_tokens(self, segment: int) -> bytes:
        """The segment's tokens, four bytes each, so that two of them compare as their tokens do."""
        packed = self._packed.get(segment)
        if packed is None:
            tokens = encode(self.texts[segment])
            packed = self._packed[segment] = struct.pack(f">{len(tokens)}I", *tokens)
        return packed

    def _add_run(self, run: tuple[int, ...]) -> int:
        number = self._runs[run] = self._add_marker(run)
        return number

    def _add_marker(self, tokens: tuple[int, ...]) -> int:
        number = len(self.texts)
        self.texts.append("")
        self._tokens.append(len(tokens))
        self._packed[number] = struct.pack(f">{len(tokens)}I", *tokens)
        return number
