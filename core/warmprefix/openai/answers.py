"""What an answer says of its prompt, read while it passes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from warmprefix.openai.events import EventSplitter, event_data

__all__ = ["AnswerReader", "Heard", "StreamedAnswer", "WholeAnswer"]

_MAX_BYTES = 16 * 1024 * 1024
"""A longer answer is not kept to be read; it passes all the same."""

_DONE = b"[DONE]"


class Heard:
    """What became known of an answer so far."""

    __slots__ = ("cached_tokens", "ended", "failed", "prompt_token_ids", "prompt_tokens", "started", "unread")

    def __init__(self) -> None:
        self.started = False
        """Whether it has any content, so that the model has read the whole prompt."""
        self.ended = False
        """Whether it says that nothing follows: a stream's `[DONE]`, or the last event of a response."""
        self.failed = False
        """Whether it says that there was an error."""
        self.unread = False
        """Whether it could not be read."""
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.prompt_token_ids: list[int] | None = None

    def read(self, payload: Mapping[str, Any]) -> None:
        """Take what a payload of any route says of the prompt: an answer, or a chunk of one."""
        usage = payload.get("usage")
        if isinstance(usage, dict):
            for total, details in (
                ("prompt_tokens", "prompt_tokens_details"),
                ("input_tokens", "input_tokens_details"),
            ):
                self.prompt_tokens = _count(usage.get(total), self.prompt_tokens)
                if isinstance(found := usage.get(details), dict):
                    self.cached_tokens = _count(found.get("cached_tokens"), self.cached_tokens)
        ids = payload.get("prompt_token_ids")
        if ids is None and isinstance(choices := payload.get("choices"), list) and choices:
            ids = choices[0].get("prompt_token_ids") if isinstance(choices[0], dict) else None
        if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
            self.prompt_token_ids = ids


class AnswerReader(Protocol):
    """Is fed an answer's bytes as they come, and says which of them to pass on."""

    heard: Heard

    def feed(self, data: bytes) -> bytes: ...
    def finish(self) -> bytes:
        """The answer is over: what is still to be passed on."""
        ...

    def held(self) -> bytes:
        """What was fed and is neither passed on nor left out; for when reading is given up."""
        ...


class WholeAnswer:
    """An answer in one piece: JSON, which can be read when all of it has come."""

    def __init__(self) -> None:
        self.heard = Heard()
        self._body: bytearray | None = bytearray()

    def feed(self, data: bytes) -> bytes:
        if self._body is not None:
            self._body += data
            if len(self._body) > _MAX_BYTES:
                self._body = None
        return data

    def finish(self) -> bytes:
        payload = None if self._body is None else _object(self._body)
        self._body = None
        self.heard.started = True
        self.heard.unread = payload is None
        if payload is not None:
            self.heard.failed = bool(payload.get("error")) or payload.get("status") == "failed"
            self.heard.read(payload)
        return b""

    def held(self) -> bytes:
        return b""


class StreamedAnswer:
    """An answer as server-sent events, passed on at once; if one of them is to be left out, each when it is whole."""

    def __init__(self, *, hide_usage: bool) -> None:
        """`hide_usage` leaves out the chunk that has the usage and no choices, which only we have asked for."""
        self.heard = Heard()
        self._hides_usage = hide_usage
        self._events = EventSplitter(_MAX_BYTES)

    def feed(self, data: bytes) -> bytes:
        kept = [event for event in self._events.feed(data) if self._read(event)]
        return b"".join(kept) if self._hides_usage else data

    def finish(self) -> bytes:
        rest = self._events.rest()
        kept = self._read(rest)  # clients also take an event that the end of the stream ends
        return rest if kept and self._hides_usage else b""

    def held(self) -> bytes:
        return self._events.rest() if self._hides_usage else b""

    def _read(self, event: bytes) -> bool:
        """Whether to pass it on."""
        # Most events are words of the answer, and of no interest once it has begun.
        if self.heard.started and not any(sign in event for sign in _SIGNS):
            return True
        data = event_data(event)
        if data.startswith(_DONE):
            self.heard.ended = True
            return True
        payload = _object(data)
        if payload is None:
            return True
        self.heard.ended = self.heard.ended or payload.get("type") in _ENDS
        response = payload.get("response")
        if isinstance(response, dict):  # how `/v1/responses` begins and ends
            self.heard.read(response)
        self.heard.read(payload)
        self.heard.failed = self.heard.failed or bool(payload.get("error")) or payload.get("type") in _FAILURES
        self.heard.started = self.heard.started or _has_content(payload)
        return not (self._hides_usage and payload.get("usage") and payload.get("choices") == [])


_SIGNS = (b'"usage"', b'"error"', _DONE, b'"response.')
"""What an event of interest holds, once the answer has begun."""

_FAILURES = ("error", "response.failed")
_ENDS = ("response.completed", "response.incomplete")


def _has_content(chunk: Mapping[str, Any]) -> bool:
    kind = chunk.get("type")
    if isinstance(kind, str):
        return kind in _ENDS or (kind.endswith(".delta") and bool(chunk.get("delta")))
    choices = chunk.get("choices")
    if not isinstance(choices, list):
        return False
    if not choices:
        return bool(chunk.get("usage"))  # the prompt was read even if nothing was to be answered
    return any(_begins(choice) for choice in choices if isinstance(choice, dict))


def _begins(choice: Mapping[str, Any]) -> bool:
    if choice.get("finish_reason") or choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


def _object(data: bytes | bytearray) -> dict[str, Any] | None:
    try:
        payload = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return payload if isinstance(payload, dict) else None


def _count(value: object, otherwise: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else otherwise
