"""A log as prompts: requests of messages, and messages of segments.

A segment is a sentence or line, with a small number; each distinct one is stored once. Logs repeat themselves;
otherwise there would be nothing to cache. Every cut lies between two tokens, and two texts with a common start are cut
in the same places up to where they differ. So the tokens of a text are those of its segments in order, and the common
start of two prompts follows from their numbers.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress, count
from operator import ne
from typing import TypeAlias, TypeVar

from warmprefix_tools.emulator import encode
from warmprefix_tools.emulator.tokenizer import MESSAGE_END, MESSAGE_START

__all__ = [
    "CUT_MARKS",
    "EMPTY",
    "PLAIN",
    "TOKEN_BYTES",
    "TOOLS",
    "WIDTH",
    "Ids",
    "LogMessage",
    "LogRequest",
    "LogVersion",
    "Memo",
    "PerSegment",
    "Prompt",
    "RequestLog",
    "SegmentPool",
    "common_length",
    "cut",
    "packed",
]

_K = TypeVar("_K")
_V = TypeVar("_V")

Ids: TypeAlias = "array[int]"
"""Numbers of segments, in an array of type "I". Only the code that made an array may change it."""

WIDTH = 4
"""Bytes per number."""

TOKEN_BYTES = 4
"""Bytes per token."""

EMPTY = 0
"""Number of the segment without text."""
_EMPTY_BYTES = bytes(WIDTH)

_SEGMENT = re.compile(r"\s*(?:[^\n.!?]*[^\s.!?]|[.!?]+(?![\s.!?]|\Z))*[.!?]*")
_LONG = 1_000
_RUN = 16
_PIECE_OF_LONG = re.compile(rf"(?s).{{{_LONG},}}?\S(?=\s)|.+")


class Memo(dict[_K, _V]):
    """A dictionary that computes a missing value once. Never forgets."""

    def __init__(self, compute: Callable[[_K], _V]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: _K) -> _V:
        value = self[key] = self._compute(key)
        return value


def cut(text: str) -> list[str]:
    r"""Cut a text at the ends of lines and sentences; white space goes to the segment after it.

    >>> cut("One. Two,\n\n three\n")
    ['One.', ' Two,', '\n\n three', '\n']
    """
    segments = _SEGMENT.findall(text)
    segments.pop()  # the last match is empty
    if len(text) > _LONG and max(map(len, segments)) > _LONG:
        return [piece for segment in segments for piece in _PIECE_OF_LONG.findall(segment)]
    return segments


def packed(ids: Ids) -> bytes:
    """Return the numbers as bytes, without those of empty segments."""
    data = ids.tobytes()
    if _EMPTY_BYTES not in data:  # four zero bytes may also lie across two numbers, so a match proves nothing
        return data
    return array("I", [number for number in ids if number != EMPTY]).tobytes()


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many elements two sequences share at their start."""
    return next(compress(count(), map(ne, one, other)), min(len(one), len(other)))


class PerSegment:
    """A small number, 0 to 255, for each text of a growing list; each is computed once."""

    def __init__(self, texts: list[str], compute: Callable[[str], int]) -> None:
        self._texts = texts
        self._compute = compute
        self._numbers = bytearray()

    def __call__(self) -> bytearray:
        """Return the numbers of all texts, for reading only. The next call may extend them in place."""
        done = len(self._numbers)
        if done < len(self._texts):
            self._numbers.extend(map(self._compute, self._texts[done:]))
        return self._numbers


class SegmentPool:
    """All distinct segments of a log and of its repaired versions. Never forgets."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self.token_counts: list[int] = [0]
        """Tokens of each segment, for reading only."""
        self._ids: dict[str, int] = {"": EMPTY}
        self._packed = [b""]
        self.packed_tokens = self._packed.__getitem__
        """Returns a segment's tokens, four big-endian bytes each, so that bytes compare as tokens do."""
        self._runs = Memo(self._add_marker)
        self._heads = Memo[str, int](lambda role: self._add_marker((MESSAGE_START, *encode(f"{role}\n"))))
        self.message_end = self._add_marker((MESSAGE_END, *encode("\n")))
        """Segment that closes a message."""

    def __len__(self) -> int:
        return len(self.texts)

    def intern(self, segment: str) -> int:
        """Return the number of one segment."""
        number = self._ids.get(segment)
        if number is None:
            number = self._ids[segment] = self._add(segment, encode(segment))
        return number

    def intern_all(self, segments: list[str]) -> Ids:
        """Return the numbers of consecutive segments."""
        ids = self._ids
        try:
            return array("I", [ids[segment] for segment in segments])
        except KeyError:
            return array("I", [self.intern(segment) for segment in segments])

    def ids(self, text: str) -> Ids:
        """Return the numbers of a whole text."""
        return self.intern_all(cut(text))

    def text(self, ids: Ids) -> str:
        """Return the text of these segments."""
        texts = self.texts
        return "".join([texts[i] for i in ids])

    def message_head(self, role: str) -> int:
        """Return the segment that opens a message of this role."""
        return self._heads[role]

    def token_ids(self, tokens: Sequence[int]) -> Ids:
        """Return segments for a prompt that was logged as token ids only."""
        return array("I", [self._runs[tuple(tokens[at : at + _RUN])] for at in range(0, len(tokens), _RUN)])

    def count_tokens(self, ids: Iterable[int]) -> int:
        """Return the number of tokens of all these segments together."""
        return sum(map(self.token_counts.__getitem__, ids))

    def _add_marker(self, tokens: tuple[int, ...]) -> int:
        return self._add("", tokens)

    def _add(self, text: str, tokens: Sequence[int]) -> int:
        self.texts.append(text)
        self.token_counts.append(len(tokens))
        self._packed.append(struct.pack(f">{len(tokens)}I", *tokens))
        return len(self.texts) - 1


CUT_MARKS = {
    "litellm_truncated": "LiteLLM: raise MAX_STRING_LENGTH_PROMPT_IN_DB",
    "redacted-by-litellm": "LiteLLM: turn_off_message_logging",
    "<truncated due to size exceeding limit>": "Langfuse: its SDK drops items above its size limit",
    "__REDACTED__": "OpenInference: OPENINFERENCE_HIDE_INPUTS and similar settings",
    "[Scrubbed due to": "Logfire: its scrubbing option",
    "[REDACTED": "a masking function",
    "<REDACTED": "a masking function",
    "[redacted": "a masking function",
    "<redacted": "a masking function",
    "<truncated>": "a size limit of the logger",
}
"""Marks that loggers leave where they cut or mask a text, and what to change there."""

TOOLS = "tools"
"""Role of the message that a chat template makes of the tools; it opens the prompt."""

PLAIN = "prompt"
"""Role of a prompt without messages, which no chat template changes."""


@dataclass(frozen=True, slots=True, eq=False)
class LogMessage:
    """One message of one or many requests, compared by identity."""

    role: str
    ids: Ids
    origin: LogMessage | None = None
    """Message that this one was made from, segment by segment."""
    places: Sequence[int] | None = None
    """For each segment, the index of its counterpart in `origin`; None if equal indices are counterparts."""

    @property
    def source(self) -> LogMessage:
        """The message itself, or the one that it was made from."""
        return self if self.origin is None else self.origin

    def with_ids(self, ids: Ids) -> LogMessage:
        """Return the same message with other segments, index by index."""
        return self if ids is self.ids or ids == self.ids else LogMessage(self.role, ids, self.source, self.places)


Prompt = tuple[LogMessage, ...]


@dataclass(frozen=True, slots=True)
class LogRequest:
    """One prompt that was sent, and its sender as far as the record names it."""

    file: str
    line: int
    messages: Prompt
    model: str | None = None
    salt: str | None = None
    tenant: str | None = None
    user: str | None = None
    session: str | None = None
    """The conversation."""
    reported_prompt_tokens: int | None = None
    reported_cached_tokens: int | None = None
    seconds: float | None = None
    """Time at which it was sent, since 1970."""
    front: int = 0
    """Number of messages in front that its record has outside the list of messages: tools and system prompt."""
    marked: bool = False
    """True if it has cache marks."""

    @property
    def sender(self) -> str | None:
        """Tenant, user or session, which should have one cache salt; None if not recorded."""
        return self.tenant or self.user or self.session


@dataclass(slots=True)
class LogVersion:
    """The log as it was sent or with repairs, reduced to what the engine sees."""

    prompts: list[Prompt]
    models: Sequence[str | None]
    salts: list[str | None]
    kinds: frozenset[str] = frozenset()
    """Defects that are repaired in it."""

    def scopes(self) -> Iterator[tuple[str | None, str | None]]:
        """Yield model and salt of each request; requests with others share nothing."""
        return zip(self.models, self.salts, strict=True)


@dataclass(slots=True)
class RequestLog:
    """All requests in the order of arrival, and the pool of their segments."""

    pool: SegmentPool = field(default_factory=SegmentPool)
    requests: list[LogRequest] = field(default_factory=list)
    cut: dict[LogMessage, str] = field(default_factory=dict)
    """Messages that the log does not have in full, each with the mark that shows it."""
    _messages: dict[bytes, LogMessage] = field(default_factory=dict)

    def message(self, role: str, text: str) -> LogMessage:
        """Return the message of this role and text: the same object each time."""
        return self._message(role, text, lambda: self.pool.ids(text))

    def tools(self, texts: Sequence[str]) -> LogMessage:
        """Return the message of a list of tools, each given as JSON; it is cut between the tools."""
        segments = [f" {text}," for text in texts]
        segments[0] = "[" + segments[0][1:]
        segments[-1] = segments[-1][:-1] + "]"
        return self._message(TOOLS, "".join(segments), lambda: self.pool.intern_all(segments))

    def _message(self, role: str, text: str, ids: Callable[[], Ids]) -> LogMessage:
        key = blake2b(f"{role}\n{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = LogMessage(role, ids())
            mark = next((mark for mark in CUT_MARKS if mark in text), None)
            if mark is not None:
                self.cut[message] = mark
        return message

    def text(self, message: LogMessage) -> str:
        """Return the text of a message."""
        return self.pool.text(message.ids)

    def as_sent(self) -> LogVersion:
        """Return a new version without repairs."""
        requests = self.requests
        return LogVersion(
            [request.messages for request in requests],
            [request.model for request in requests],
            [request.salt for request in requests],
        )
