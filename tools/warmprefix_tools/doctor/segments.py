"""Texts as sequences of small numbers: every sentence or line of the log is held once.

A log repeats itself: that is why it has a prefix cache. So a text is cut into segments, each distinct segment gets a
number, and its tokens are counted once. The cuts are chosen so that they always lie between two tokens, and so that
two texts with a common start are cut alike up to where they part: the tokens of a text are those of its segments, one
after another, and what two prompts share can be read off their numbers.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from warmprefix_tools.emulator import encode, split
from warmprefix_tools.emulator.tokenizer import MESSAGE_END, MESSAGE_START

__all__ = ["EMPTY", "WIDTH", "Ids", "PerSegment", "SegmentPool", "cut", "packed"]

Ids: TypeAlias = "array[int]"
"""Numbers of segments: an array of type "I". Code that did not make one leaves it as it is."""

WIDTH = 4
"""Bytes per number."""

EMPTY = 0
"""The segment without text."""
_EMPTY_BYTES = bytes(WIDTH)

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


def packed(ids: Ids) -> bytes:
    """Return the numbers as bytes, without those of empty segments."""
    data = ids.tobytes()
    if _EMPTY_BYTES not in data:  # if it is, it may lie across two numbers
        return data
    return array("I", [number for number in ids if number != EMPTY]).tobytes()


class PerSegment:
    """A small number, 0 to 255, for each text of a growing list; each is computed once."""

    def __init__(self, texts: list[str], look: Callable[[str], int]) -> None:
        self._texts = texts
        self._look = look
        self._numbers = bytearray()

    def __call__(self) -> bytearray:
        """Return the numbers of all texts, for reading only. The next call may extend them in place."""
        done = len(self._numbers)
        if done < len(self._texts):
            self._numbers.extend(map(self._look, self._texts[done:]))
        return self._numbers


class SegmentPool:
    """All distinct segments of a log, and of its mended versions. Never forgets."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._ids: dict[str, int] = {"": EMPTY}
        self.token_counts: list[int] = [0]
        """Tokens of each segment, for reading only."""
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
            self.token_counts.append(len(split(segment)))
        return number

    def ids(self, text: str) -> Ids:
        """The numbers of a whole text."""
        return self.intern_all(cut(text))

    def intern_all(self, segments: list[str]) -> Ids:
        """The numbers of segments that follow one another."""
        known = self._ids
        try:
            return array("I", [known[segment] for segment in segments])
        except KeyError:
            return array("I", [self.intern(segment) for segment in segments])

    def text(self, ids: Ids) -> str:
        """What the numbers stand for."""
        texts = self.texts
        return "".join([texts[i] for i in ids])

    def message_head(self, role: str) -> int:
        """The marker that opens a message of this role, as a segment."""
        head = self._heads.get(role)
        if head is None:
            head = self._heads[role] = self._add_marker((MESSAGE_START, *encode(f"{role}\n")))
        return head

    def token_ids(self, tokens: Sequence[int]) -> Ids:
        """A prompt of which only the token ids are known."""
        runs = [tuple(tokens[start : start + _RUN]) for start in range(0, len(tokens), _RUN)]
        return array("I", [self._runs.get(run) or self._add_run(run) for run in runs])

    def count_tokens(self, ids: Iterable[int]) -> int:
        """Return the number of tokens of all these segments together."""
        return sum(map(self.token_counts.__getitem__, ids))

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
        self.token_counts.append(len(tokens))
        self._packed[number] = struct.pack(f">{len(tokens)}I", *tokens)
        return number
