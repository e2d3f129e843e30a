"""Answers in which a model copies references into its tool calls. Pure: no I/O."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

from warmprefix_gateway.body_encodings import CompressedAnswer, ReadAnswer
from warmprefix_gateway.gateway_options import EchoHandling
from warmprefix_openai import AnswerFacts, EventSplitter, StreamedAnswer, WholeAnswer, event_data
from warmprefix_requests import Echoes, EchoStream, TextForm

__all__ = ["EchoedAnswer"]

_ECHO_REFUSAL = "the model copied a reference into the arguments of a tool call"
_UNWATCHED_REFUSAL = (
    "the answer is compressed or too large to be held, so references in its tool calls would not be seen"
)
_MAX_WHOLE_BYTES = 16 << 20
_SIGN = b"ord for word"
"""All references hold it, however they are escaped."""

_EVENTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry)?:")
"""The beginning of server-sent events, which no JSON has."""

_INPUTS: Mapping[str, tuple[str, TextForm]] = {
    "function_call": ("arguments", "json"),
    "custom_tool_call": ("input", "plain"),
}
"""Of each kind of call in a response, the field with its arguments."""

_Key = tuple[object, object]


class _OpenCall(NamedTuple):
    """A tool call whose arguments are being streamed."""

    text: EchoStream
    template: dict[str, Any]
    """An event with a piece of it."""


class EchoedAnswer:
    """A reader of an answer that replaces references in the arguments of its tool calls.

    In a stream, only what may be the beginning of a reference waits, up to the next pieces of the same arguments; all
    other bytes pass as they came, event by event. An answer in one piece passes when it is whole; one
    that begins like events is a stream, whatever it is called.
    """

    def __init__(self, reader: ReadAnswer, echoes: Echoes, handling: EchoHandling, are_lost: bool = False) -> None:
        self.streams = isinstance(reader, StreamedAnswer)
        """True for an answer of server-sent events."""
        self.restored = 0
        """Number of references in arguments."""
        self.unresolved = 0
        """Number of texts in arguments that begin like a reference, and are none of the prompt's."""
        self.unwatched = isinstance(reader, CompressedAnswer)
        """True if the answer is compressed, or there was no room for it, so that it is not searched."""
        self._reader = reader
        self._echoes = echoes
        self._handling = handling
        self._are_lost = are_lost
        """True if the text of a reference is gone: then one that cannot be restored ends the answer."""
        self._events = EventSplitter()
        self._calls: dict[_Key, _OpenCall] = {}
        self._streamed: set[_Key] = set()
        self._whole = bytearray() if isinstance(reader, WholeAnswer) else None
        self._shape: dict[str, Any] = {}
        """The latest event that was read."""
        self._is_changed = False
        """True if that event is not what came."""
        self._has_refused = False

    @property
    def facts(self) -> AnswerFacts:
        """What the answer has reported so far."""
        return self._reader.facts

    @property
    def waits(self) -> bool:
        """True while an answer in one piece is held up to its end."""
        return self._whole is not None

    @property
    def refused(self) -> bool:
        """True if the client must get an error in place of the answer."""
        if self._are_lost and (self.unresolved > 0 or self.unwatched):
            return True
        return self._handling == "refuse" and (self.restored > 0 or self.unwatched)

    @property
    def refusal(self) -> str:
        """The text of that error."""
        return _UNWATCHED_REFUSAL if self.unwatched else _ECHO_REFUSAL

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the answer; return the bytes to pass on now."""
        passed = self._reader.feed(data)
        if not self.streams:
            if self._whole is None:
                return b"" if self.refused else passed
            self._whole += passed
            self.streams = _EVENTS.match(self._whole, 0, 64) is not None
            if not self.streams:
                return b"" if len(self._whole) <= _MAX_WHOLE_BYTES else self.give_up()
            passed, self._whole = bytes(self._whole), None
            self._reader = StreamedAnswer(hide_usage=False, facts=self.facts)
            self._reader.feed(passed)
        events = self._events.feed_joined(passed)
        if self._has_refused:
            return b""
        if not self._is_waiting and not _has_call(events):
            return events
        return b"".join([self._event(event) for event in EventSplitter.split(events)])

    def give_up(self) -> bytes:
        """Stop searching an answer in one piece; return the bytes to pass on now."""
        held, self._whole, self.unwatched = bytes(self._whole or b""), None, True
        return b"" if self.refused else held

    def finish(self) -> bytes:
        """Read the end of the answer; return the remaining bytes to pass on."""
        rest = self._reader.finish()
        if self.streams:
            events = [*self._events.feed(rest), *filter(None, [self._events.rest()])]
            passed = b"".join([self._event(event) for event in events])
            if self._has_refused:
                return passed
            made = b"".join(self._flushed())
            return passed + (self._refuse() if self.refused else made)
        whole, self._whole = self._whole, None
        if whole is None:
            return rest
        whole += rest
        payload = _object(bytes(whole)) if _SIGN in whole else None
        if payload is None:
            return bytes(whole)
        before = self.restored
        try:
            self._edit_answer(payload, counts=True)
        except Exception:  # an answer of another shape
            return bytes(whole)
        return json.dumps(payload).encode() if self.restored > before else bytes(whole)

    def held(self) -> bytes:
        """Return the bytes held back so far, for a caller that stops reading."""
        if self.streams:
            return b"" if self._has_refused else b"".join(self._flushed()) + self._events.rest()
        return bytes(self._whole or b"")

    # -- streams

    def _event(self, event: bytes) -> bytes:
        """Return what passes on for an event."""
        if self._has_refused:
            return b""
        if not self._is_waiting and not _has_call(event):
            return event
        data = event_data(event)
        payload = _object(data)
        if payload is None and not data.startswith(b"[DONE]"):  # such as a keep-alive
            return event
        if payload is None:
            made = [*self._flushed(), event]
            return self._refuse() if self.refused else b"".join(made)
        self._shape, self._is_changed = payload, False
        try:
            made = list(self._edit_event(payload))
        except Exception:  # an event of another shape: the client gets it as it came
            return event
        if self.refused:
            return self._refuse()
        return b"".join([*made, _rewritten(event, payload) if self._is_changed else event])

    @property
    def _is_waiting(self) -> bool:
        return bool(self._calls) and any(call.text.held for call in self._calls.values())

    def _refuse(self) -> bytes:
        self._has_refused = True
        return _refusal(self._shape)

    def _edit_event(self, payload: dict[str, Any]) -> Iterator[bytes]:
        """Edit an event; yield those that must stand in front of it."""
        kind = payload.get("type")
        if isinstance(payload.get("choices"), list):
            for choice in filter(_is_object, payload["choices"]):
                yield from self._edit_choice(payload, choice)
        elif kind == "content_block_delta" and _is_object(payload.get("delta")):
            if payload["delta"].get("type") == "input_json_delta":
                self._edit_piece(("block", payload.get("index")), payload["delta"], "partial_json", "json", payload)
        elif kind == "content_block_start" and _is_object(payload.get("content_block")):
            self._edit_block(payload["content_block"])
        elif kind == "content_block_stop":
            yield from self._flushed(("block", payload.get("index")))
        elif kind in ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"):
            form: TextForm = "json" if "function" in kind else "plain"
            self._edit_piece(("item", payload.get("output_index")), payload, "delta", form, payload)
        elif isinstance(kind, str) and kind.startswith("response."):
            key = ("item", payload.get("output_index"))
            if kind.endswith(".done"):
                yield from self._flushed(key)
            if kind == "response.function_call_arguments.done":
                self._edit_text(payload, "arguments", "json", counts=False)
            elif kind == "response.custom_tool_call_input.done":
                self._edit_text(payload, "input", "plain", counts=False)
            elif _is_object(payload.get("item")) and kind.endswith(".done"):
                self._edit_item(payload["item"], counts=key not in self._streamed)
                self._streamed.add(key)
            elif _is_object(payload.get("response")):
                self._edit_answer(payload["response"], counts=not self._streamed)

    def _edit_choice(self, payload: dict[str, Any], choice: dict[str, Any]) -> Iterator[bytes]:
        index, delta = choice.get("index"), choice.get("delta")
        ends = bool(choice.get("finish_reason"))  # some engines send it with the last piece
        calls = _objects(delta, "tool_calls") if _is_object(delta) else []
        keys = [(index, call.get("index", at)) for at, call in enumerate(calls)]
        is_old = _is_object(delta) and _is_object(delta.get("function_call"))
        here = [*keys, *([(index, None)] if is_old else [])]
        for key in list(self._calls):
            if key[0] == index and key not in here and (ends or keys):
                yield from self._flushed(key)
        for key, call in zip(keys, calls, strict=True):
            for name, field, form in _CHAT_INPUTS:
                if _is_object(call.get(name)):
                    template = {**payload, "choices": [{**choice, "delta": {"tool_calls": [call]}}]}
                    self._edit_piece(key, call[name], field, form, template, ends=ends)
        if _is_object(delta) and is_old:
            template = {**payload, "choices": [choice]}
            self._edit_piece((index, None), delta["function_call"], "arguments", "json", template, ends=ends)
        if ends:
            yield from self._flushed(*[key for key in self._calls if key[0] == index])

    def _edit_piece(
        self,
        key: _Key,
        holder: dict[str, Any],
        field: str,
        form: TextForm,
        template: dict[str, Any],
        *,
        ends: bool = False,
    ) -> None:
        """Edit a piece of a call's arguments in its event; `ends` if it is the last one."""
        piece = holder.get(field)
        if not isinstance(piece, str):
            return
        if key not in self._calls:
            self._calls[key] = _OpenCall(EchoStream(self._echoes, form), {})
        text, made = self._calls[key]
        self._streamed.add(key)
        restored, unresolved = text.restored, text.unresolved
        holder[field] = text.feed(piece) + (text.finish() if ends else "")
        self._is_changed = self._is_changed or holder[field] != piece
        self._count(text.restored - restored, text.unresolved - unresolved)
        if text.held and not made:
            made.update(json.loads(json.dumps(template)))

    def _flushed(self, *keys: _Key) -> Iterator[bytes]:
        """Yield events with the text that waits for more of calls that have ended; of all calls without keys."""
        for key in keys or list(self._calls):
            call = self._calls.pop(key, None)
            if call is None or not call.text.held:
                continue
            restored, unresolved = call.text.restored, call.text.unresolved
            rest = call.text.finish()
            self._count(call.text.restored - restored, call.text.unresolved - unresolved)
            yield _written(_with_piece(call.template, rest))

    # -- whole texts

    def _edit_answer(self, answer: dict[str, Any], *, counts: bool) -> None:
        for choice in _objects(answer, "choices"):
            message = choice.get("message")
            if not _is_object(message):
                continue
            for call in _objects(message, "tool_calls"):
                for name, field, form in _CHAT_INPUTS:
                    if _is_object(call.get(name)):
                        self._edit_text(call[name], field, form, counts=counts)
            if _is_object(message.get("function_call")):
                self._edit_text(message["function_call"], "arguments", "json", counts=counts)
        for block in _objects(answer, "content"):
            self._edit_block(block)
        for item in _objects(answer, "output"):
            self._edit_item(item, counts=counts)

    def _edit_block(self, block: dict[str, Any]) -> None:
        if block.get("type") == "tool_use" and "input" in block:
            block["input"], restored, unresolved = self._echoes.in_value(block["input"])
            self._is_changed = self._is_changed or restored > 0
            self._count(restored, unresolved)

    def _edit_item(self, item: dict[str, Any], *, counts: bool) -> None:
        kind = item.get("type")
        if isinstance(kind, str) and kind in _INPUTS:
            self._edit_text(item, *_INPUTS[kind], counts=counts)

    def _edit_text(self, holder: dict[str, Any], field: str, form: TextForm, *, counts: bool) -> None:
        if isinstance(holder.get(field), str):
            found = self._echoes.in_text(holder[field], form)
            holder[field] = found.text
            self._is_changed = self._is_changed or found.restored > 0
            if counts:
                self._count(found.restored, found.unresolved)

    def _count(self, restored: int, unresolved: int) -> None:
        self.restored += restored
        self.unresolved += unresolved


_CHAT_INPUTS: tuple[tuple[str, str, TextForm], ...] = (("function", "arguments", "json"), ("custom", "input", "plain"))


def _has_call(events: bytes) -> bool:
    """Return True unless no event can hold a piece of a tool call. O(bytes)."""
    return (
        b'"arguments"' in events
        or b'"input"' in events
        or b"input_json_delta" in events
        or b"call_arguments" in events
        or b"tool_call_input" in events
    )


def _with_piece(template: dict[str, Any], piece: str) -> dict[str, Any]:
    """Return an event like this one with another piece of the arguments."""
    if "choices" not in template:
        if template.get("type") == "content_block_delta":
            return {**template, "delta": {"type": "input_json_delta", "partial_json": piece}}
        return {**template, "delta": piece}
    given: dict[str, Any] = template["choices"][0]
    choice = {name: value for name, value in given.items() if name not in ("finish_reason", "logprobs")}
    delta = choice["delta"]
    if "function_call" in delta:
        choice["delta"] = {"function_call": {"arguments": piece}}
    else:
        call = delta["tool_calls"][0]
        part = {"function": {"arguments": piece}} if "function" in call else {"custom": {"input": piece}}
        choice["delta"] = {"tool_calls": [{"index": call.get("index", 0), **part}]}
    chunk = {name: value for name, value in template.items() if name != "usage"}
    return {**chunk, "choices": [{**choice, "finish_reason": None}]}


def _refusal(payload: Mapping[str, Any]) -> bytes:
    """Return an event with an error, in the shape of the stream's own."""
    kind = payload.get("type")
    if "choices" in payload:
        return _written({"error": {"message": _ECHO_REFUSAL, "type": "api_error", "param": None, "code": 502}})
    if isinstance(kind, str) and kind.startswith("response."):
        error = {"type": "error", "code": "502", "message": _ECHO_REFUSAL, "param": None}
        return _written({**error, "sequence_number": payload.get("sequence_number", 0)})
    return _written({"type": "error", "error": {"type": "api_error", "message": _ECHO_REFUSAL}})


def _written(payload: Mapping[str, Any]) -> bytes:
    kind = payload.get("type")
    name = f"event: {kind}\n".encode() if isinstance(kind, str) else b""
    return b"".join((name, b"data: ", json.dumps(payload, separators=(",", ":")).encode(), b"\n\n"))


def _rewritten(event: bytes, payload: Mapping[str, Any]) -> bytes:
    """Return an event with other data; its other lines and the ends of lines stay."""
    lines = [BOM_UTF8] if event.startswith(BOM_UTF8) else []
    has_data = False
    for line in event.removeprefix(BOM_UTF8).splitlines(keepends=True):
        if not line.startswith(b"data:"):
            lines.append(line)
        elif not has_data:
            has_data = True
            end = line[len(line.rstrip(b"\r\n")) :]
            lines += (b"data: ", json.dumps(payload, separators=(",", ":")).encode(), end)
    return b"".join(lines)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        payload = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return payload if isinstance(payload, dict) else None


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = holder.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
