"""The reader of answers while they pass on: server-sent events, token counts and the time to first token. No I/O."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from warmprefix.cache_profiles import CacheProfile, llama_cpp
from warmprefix_requests.usage import TokenUsage, reported_usage, token_usage

__all__ = ["AnswerFacts", "AnswerReader", "EventSplitter", "StreamedAnswer", "WholeAnswer", "event_data", "is_stream"]

_MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Bytes kept of an event, or of an answer in one piece, that is not complete yet."""

_END = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r|\n)")
"""The end of a line followed by an empty line: `\\n`, `\\r\\n` or `\\r`, in any mixture."""

_DONE = b"[DONE]"
_SIGNS = re.compile(
    rb'"(?:usage"(?!: ?null)|finish_reason": ?"|message_|timings"|response\.(?:completed|incomplete|failed)")'
)
"""A usage or the end of an answer. It begins with one character alone, so that the search for it is fast."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FAILURES = ("error", "response.failed")
_NO_ANSWER = ("failed", "cancelled", "queued", "in_progress")
"""What a response without an answer has as its status; in the background it may still fail."""
_ENDS = ("response.completed", "response.incomplete", "message_stop")


class EventSplitter:
    r"""Splitter that returns whole events, each with its final empty line; joined, they are the stream again.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b"data: 1\n\ndata"), splitter.feed(b": 2\r\n\r"), splitter.feed(b"\ndata: 3"), splitter.rest()
    ([b'data: 1\n\n'], [b'data: 2\r\n\r'], [], b'\ndata: 3')
    """

    def __init__(self, max_bytes: int = _MAX_EVENT_BYTES) -> None:
        """Start empty. An event longer than `max_bytes` is returned in unreadable parts."""
        self._max_bytes = max_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes. Amortised linear in the bytes fed."""
        return self.split(self.feed_joined(data))

    def feed_joined(self, data: bytes) -> bytes:
        """Return the same events as one piece, which costs far less if no one reads them one by one."""
        held = self._held
        if not held and data.endswith(b"\n\n") and _is_usual(data):
            return data
        searched = max(0, len(held) - 3)  # the last three bytes may be the first part of an end
        held += data
        end = _last_end(held, searched)
        if len(held) - end > self._max_bytes:
            end = len(held)
        if end == len(held):
            joined = bytes(held)
            held.clear()
        else:
            joined = bytes(memoryview(held)[:end])
            del held[:end]
        return joined

    @staticmethod
    def split(joined: bytes) -> list[bytes]:
        """Return the events of which these bytes consist; the last one may lack its end. O(bytes)."""
        if _is_usual(joined):
            *whole, rest = joined.split(b"\n\n")
            return [event + b"\n\n" for event in whole] + ([rest] if rest else [])
        events = []
        begin = 0
        for end in _END.finditer(joined):
            events.append(joined[begin : end.end()])
            begin = end.end()
        if begin < len(joined):
            events.append(joined[begin:])
        return events

    def rest(self) -> bytes:
        """Return and drop the bytes of the event that has no end yet."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def _is_usual(data: bytes | bytearray, begin: int = 0) -> bool:
    """Return True if events end just where two line feeds are, so that no pattern need be searched."""
    return data.find(b"\r", begin) < 0 and data.find(b"\n\n\n", begin) < 0


def _last_end(held: bytearray, searched: int) -> int:
    """Return where the last event ends, of those whose end begins at `searched` or later; 0 without one."""
    if _is_usual(held, searched):
        found = held.rfind(b"\n\n", searched)
        return found + 2 if found >= 0 else 0
    return max((end.end() for end in _END.finditer(held, searched)), default=0)


def event_data(event: bytes, field: bytes = b"data") -> bytes:
    r"""Return the data lines of one event, or the lines of another field.

    >>> event_data(b"event: x\r\ndata: {\r\ndata:}\r\n\r\n")
    b'{\n}'
    """
    values = []
    for line in event.removeprefix(_BYTE_ORDER_MARK).splitlines():
        name, _, value = line.partition(b":")
        if name == field:
            values.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(values)


def is_stream(content_type: str, *, asked: bool) -> bool:
    """Return True if an answer with this type is a stream of events. `asked`: the request asked for one.

    Clients that asked read any answer as a stream; but some APIs answer them in one piece, as JSON.
    """
    kind = content_type.lower()
    return kind.startswith("text/event-stream") or (asked and "json" not in kind)


class AnswerFacts:
    """Facts that an answer has reported so far, and its time to first token."""

    def __init__(self, began: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without facts. `began` is the time on `clock` when the request was sent, now by default."""
        self._clock = clock
        self._began = clock() if began is None else began
        self.started = False
        """True from the first token on, when the model has read the whole prompt.

        The first token is the first piece of text, reasoning, refusal or tool call; in an answer without any, it is the
        finish reason or the final usage. A role alone does not count: engines send it before the prefill.
        """
        self.ttft: float | None = None
        """Seconds from sending the request to the first token of a stream; None without one."""
        self.ended = False
        """True if the answer reported that nothing follows: `[DONE]`, or the last event of a response."""
        self.complete = False
        """True if the answer reported its end: a reason to finish, or that nothing follows. A stream that breaks off
        may end without either."""
        self.failed = False
        """True if the answer reported an error."""
        self.unread = False
        """True if the answer could not be read."""
        self.prompt_token_ids: list[int] | None = None
        """The prompt's tokens; None if the answer lacks them."""
        self.usage: dict[str, Any] = {}
        """The reported usage, as it came."""
        self.response: Mapping[str, Any] | None = None
        """The whole response of the Responses API, once it is completed, or cut at a limit."""

    @property
    def tokens(self) -> TokenUsage:
        """The counts of the reported usage."""
        return token_usage(self.usage)

    @property
    def profile(self) -> CacheProfile | None:
        """The profile of an engine that is recognised by its answer: llama.cpp's server reports timings."""
        timings = self.usage.get("timings")
        return llama_cpp() if isinstance(timings, Mapping) and "cache_n" in timings else None

    def read_event(self, event: bytes) -> dict[str, Any] | None:
        """Read one event of a stream and return its JSON object; None if it holds none, as a keep-alive.

        Raises:
            ValueError: The event has data that is not JSON.
        """
        data = event_data(event)
        if data.startswith(_DONE):
            self.ended = self.complete = True
            return None
        self.failed = self.failed or event_data(event, b"event") == b"error"
        payload = _parsed(data) if data else None
        if not isinstance(payload, dict):
            return None
        self.ended = self.ended or payload.get("type") in _ENDS
        self._read_response(payload.get("response"))
        self.complete = self.complete or self.ended or _has_finished(payload)
        self.read_prompt(payload)
        self.failed = self.failed or _is_failure(payload)
        if not self.started and _has_token(payload):
            self.started = True
            self.ttft = self._clock() - self._began
        return payload

    def read_whole(self, payload: Mapping[str, Any] | None) -> None:
        """Read an answer that came in one piece; None if it is not a JSON object."""
        self.started = self.complete = True
        self.unread = payload is None
        if payload is not None:
            self.failed = _is_failure(payload) or payload.get("status") in _NO_ANSWER
            self.read_prompt(payload)
            self._read_response(payload)

    def _read_response(self, response: object) -> None:
        if isinstance(response, Mapping) and response.get("object") == "response":
            self.response = response if response.get("status") in ("completed", "incomplete") else None

    def read_prompt(self, payload: Mapping[str, Any]) -> None:
        """Read the usage and the prompt's tokens from an answer of any route, or from one event of it."""
        self.usage = reported_usage(payload, self.usage)
        ids = payload.get("prompt_token_ids")
        if ids is None and isinstance(choices := payload.get("choices"), list) and choices:
            ids = choices[0].get("prompt_token_ids") if isinstance(choices[0], dict) else None
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            self.prompt_token_ids = ids


class WholeAnswer:
    """Reader of an answer in one piece: JSON, read once all of it is there."""

    def __init__(self) -> None:
        self.facts = AnswerFacts()
        """Facts that the answer has reported so far."""
        self._body: bytearray | None = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the answer; return the bytes to pass on now."""
        if self._body is not None:
            self._body += data
            if len(self._body) > _MAX_EVENT_BYTES:
                self._body = None
        return data

    def finish(self) -> bytes:
        """Read the end of the answer; return the remaining bytes to pass on."""
        body, self._body = self._body, None
        try:
            payload = None if body is None else _parsed(body)
        except ValueError:
            payload = None
            stream = StreamedAnswer(hide_usage=False, facts=self.facts)  # which only calls itself JSON
            stream.feed(bytes(body or b""))
            stream.finish()
            if self.facts.started or self.facts.failed:
                return b""
        self.facts.read_whole(payload if isinstance(payload, dict) else None)
        return b""

    def held(self) -> bytes:
        """Return the bytes held back so far, for a caller that stops reading."""
        return b""


class StreamedAnswer:
    """Reader of an answer of server-sent events.

    Bytes pass on at once. If the usage is hidden, each event passes on when it is complete.
    """

    def __init__(self, *, hide_usage: bool, facts: AnswerFacts | None = None) -> None:
        """Start reading. `hide_usage` leaves out the event with the usage and no choices, if only we asked for it."""
        self.facts = AnswerFacts() if facts is None else facts
        """Facts that the answer has reported so far."""
        self.hides_usage = hide_usage
        """True if events with the usage alone do not pass on."""
        self._events = EventSplitter()

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the answer; return the bytes to pass on now."""
        joined = self._events.feed_joined(data)
        # Once the answer has started, most events are words of it: parsing them would double the cost per token.
        if not self.facts.started or _matters(joined):
            joined = b"".join([event for event in EventSplitter.split(joined) if self._passes(event)])
        return joined if self.hides_usage else data

    def finish(self) -> bytes:
        """Read the end of the answer; return the remaining bytes to pass on."""
        rest = self._events.rest()
        passes = self._passes(rest)  # clients also accept an event that only the end of the stream ends
        return rest if passes and self.hides_usage else b""

    def held(self) -> bytes:
        """Return the bytes held back so far, for a caller that stops reading."""
        return self._events.rest() if self.hides_usage else b""

    def _passes(self, event: bytes) -> bool:
        """Read an event; return True if the application may see it."""
        if self.facts.started and not _matters(event):
            return True
        try:
            payload = self.facts.read_event(event)
        except ValueError:
            return True
        if payload is None or not self.hides_usage:
            return True
        return not payload.get("usage") or bool(payload.get("choices"))


AnswerReader = WholeAnswer | StreamedAnswer
"""Reader of an answer's bytes that decides which of them pass on to the application."""


def _matters(events: bytes) -> bool:
    """Return True unless events of an answer that has started can hold nothing but words of it.

    If one event matters, so do all bytes with it: many are asked for at once.
    """
    return b"error" in events or _DONE in events or _SIGNS.search(events) is not None


def _is_failure(payload: Mapping[str, Any]) -> bool:
    # The last is an older vLLM's.
    return bool(payload.get("error")) or payload.get("type") in _FAILURES or payload.get("object") == "error"


def _has_finished(chunk: Mapping[str, Any]) -> bool:
    delta, choices = chunk.get("delta"), chunk.get("choices")
    if isinstance(delta, dict) and delta.get("stop_reason"):
        return True
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and bool(choice.get("finish_reason")) for choice in choices
    )


def _has_token(chunk: Mapping[str, Any]) -> bool:
    kind, choices = chunk.get("type"), chunk.get("choices")
    if not isinstance(choices, list):
        if not isinstance(kind, str):
            return False
        return kind in (*_ENDS, "content_block_delta") or (kind.endswith(".delta") and bool(chunk.get("delta")))
    if not choices:
        return bool(chunk.get("usage"))  # the prompt was read even if nothing had to be answered
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        has_piece = isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")
        if has_piece or choice.get("finish_reason") or choice.get("text"):
            return True
    return False


def _parsed(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("too deep") from error
