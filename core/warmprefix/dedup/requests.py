"""Request bodies in which repeated tool results are references, and the way back. Pure: no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from warmprefix.dedup.runs import cut_by_lines, cut_by_words
from warmprefix.dedup.transcript import Transcript, shown_call

__all__ = ["RepeatedResult", "RewriteLevel", "RewriteRoute", "Rewritten", "restored", "rewrite"]

RewriteRoute = Literal["chat", "messages", "responses"]
"""The shape of a body: OpenAI's Chat Completions, Anthropic's Messages, OpenAI's Responses."""

RewriteLevel = Literal["exact", "contained", "spans"]
"""Which repeats become references: whole results; results that stand inside an earlier one as well; large parts of a
result as well."""

_LEAST_CHARACTERS = 256
_CUT_BEHIND_US = ("previous_response_id", "conversation", "context_management", "truncate_prompt_tokens")
"""Fields with which the API adds or cuts text that the body does not show."""
_WHOLE = re.compile(r"\[Word for word the result of the earlier call (.+)\.\]")
_PART = re.compile(  # with bounds, so that a text that only begins like a reference costs no more than its length
    r"\[Word for word in the result of the earlier call (?P<call>[^\n]{1,400}?): "
    r'(?:from (?P<first>"(?:[^"\\\n]|\\.){1,400}") to (?P<last>"(?:[^"\\\n]|\\.){1,400}")'
    r"|lines (?P<line>\d{1,9}) to (?P<last_line>\d{1,9}))\.\]"
)
_NUMBERED = re.compile(r"(.+), number (\d{1,9}) of such calls")

_MAPPING = (dict, Mapping)
"""A plain dict is recognised several times faster than another mapping."""

_Path = tuple[str | int, ...]


class RepeatedResult(NamedTuple):
    """A result whose text a body has several times."""

    text: str
    """The text of the result."""
    reference: str | None
    """What takes its place; None if it stays."""


class Rewritten(NamedTuple):
    """A body, and what its references save."""

    body: Mapping[str, Any]
    """The given body itself if nothing is repeated."""
    references: int = 0
    """Number of results that became references."""
    saved_tokens: int = 0
    """Tokens of the replaced results without those of the references, estimated as a quarter of their UTF-8 bytes."""
    repeated: tuple[RepeatedResult, ...] = ()
    """All results with a text that is replaced somewhere, in the order of the body."""


class _MadeCall(NamedTuple):
    id: str | None
    name: str
    arguments: object


class _GivenResult(NamedTuple):
    call_id: str | None
    path: _Path
    """Where its text stands in the body."""
    text: str | None
    """None for an error, and for anything but a single text."""
    may_change: bool = True
    """False with a cache mark."""


def rewrite(
    route: RewriteRoute, body: Mapping[str, Any], *, keep_tools: Collection[str] = (), level: RewriteLevel = "exact"
) -> Rewritten:
    """Return a body whose repeated tool results are references to the call that gave the first.

    The first occurrence of each result keeps its bytes, so a body without repeats comes back as it is. Only tool
    results ever change: no text of a user or an assistant, no error, nothing with a cache mark, nothing under 256
    characters, and nothing in a body that names text elsewhere or asks for a cut. The output for the beginning of a
    session is the beginning of the output for all of it, so a prefix cache keeps its hits. A result becomes a reference
    only if `restored` undoes that. O(bytes); from the level `contained` on, see `Transcript`.

    >>> text = "The sea is 3,688 metres deep on average. " * 9
    >>> def call(id):
    ...     return {"id": id, "type": "function", "function": {"name": "read", "arguments": '{"path":"sea.txt"}'}}
    >>> messages = [
    ...     {"role": "assistant", "tool_calls": [call("1")]},
    ...     {"role": "tool", "tool_call_id": "1", "content": text},
    ...     {"role": "assistant", "tool_calls": [call("2")]},
    ...     {"role": "tool", "tool_call_id": "2", "content": text},
    ... ]
    >>> rewritten = rewrite("chat", {"messages": messages})
    >>> rewritten.body["messages"][3]["content"]
    '[Word for word the result of the earlier call read({"path":"sea.txt"}).]'
    >>> restored("chat", rewritten.body) == {"messages": messages}
    True

    Args:
        route: The shape of the body.
        body: A request's body. It is not changed; the result shares what stays the same.
        keep_tools: Names of tools whose results always stay.
        level: Which repeats become references.

    Raises:
        ValueError: `level` is unknown.
    """
    if level not in get_args(RewriteLevel):
        raise ValueError(f"level must be one of {', '.join(get_args(RewriteLevel))}, got {level!r}")
    if any(body.get(name) is not None for name in _CUT_BEHIND_US) or body.get("truncation") == "auto":
        return Rewritten(body)
    events = list(_events(route, body))
    texts = [event.text for event in events if isinstance(event, _GivenResult) and event.text is not None]
    if level == "exact" and len(set(texts)) == len(texts):
        return Rewritten(body)
    transcript = Transcript(min_tokens=_LEAST_CHARACTERS // 4, level=level)
    originals = _Originals()
    kept: set[str | None] = set()
    changes: dict[_Path, str] = {}
    results: list[RepeatedResult] = []
    saved = 0
    for event in events:
        if isinstance(event, _MadeCall):
            transcript.call(event.id, event.name, event.arguments)
            originals.call(event)
            if event.name in keep_tools:
                kept.add(event.id)
        elif event.text is None:
            transcript.skip(event.call_id)
            originals.result(event.call_id, None)
        else:
            sent = transcript.result(event.call_id, event.text)
            may_change = event.may_change and event.call_id not in kept and len(event.text) >= _LEAST_CHARACTERS
            if sent != event.text and not (may_change and originals.of(sent) == event.text):
                sent = event.text
            originals.result(event.call_id, sent)
            if sent != event.text:
                changes[event.path] = sent
                results.append(RepeatedResult(event.text, sent))
                saved += (_size(event.text) - _size(sent)) // 4
            else:
                results.append(RepeatedResult(event.text, None))
    replaced = {result.text for result in results if result.reference is not None}
    repeated = tuple([result for result in results if result.text in replaced]) if replaced else ()
    return Rewritten(_with_texts(body, changes), len(changes), saved, repeated)


def restored(route: RewriteRoute, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body with the results that its references name: the inverse of `rewrite`.

    A reference that names no earlier result of the body stays as it is. A text that reads like a reference and does
    name one is taken for one, even if a tool gave it. O(bytes + references * bytes of the results that they name).
    """
    originals = _Originals()
    changes: dict[_Path, str] = {}
    for event in _events(route, body):
        if isinstance(event, _MadeCall):
            originals.call(event)
            continue
        original = originals.result(event.call_id, event.text)
        if original is not None and original != event.text:
            changes[event.path] = original
    return _with_texts(body, changes)


class _SentResult(NamedTuple):
    sent: str
    original: str


class _Originals:
    """The results of a body without references."""

    def __init__(self) -> None:
        self._results: dict[str, list[_SentResult | None]] = {}
        """The results of the calls that are shown in the same way, in the order of the calls."""
        self._waiting: dict[str | None, tuple[str, int]] = {}

    def call(self, call: _MadeCall) -> None:
        shown = shown_call(call.name, call.arguments)
        results = self._results.setdefault(shown, [])
        self._waiting[call.id] = (shown, len(results))
        results.append(None)

    def result(self, call_id: str | None, sent: str | None) -> str | None:
        """Add a result and return its original."""
        original = None if sent is None else self.of(sent)
        if call_id in self._waiting:
            shown, number = self._waiting.pop(call_id)
            self._results[shown][number] = None if sent is None or original is None else _SentResult(sent, original)
        return original

    def of(self, sent: str) -> str:
        """Return the original of a result."""
        whole = _WHOLE.fullmatch(sent)
        if whole is not None:
            return next((result.original for result in self._named(whole[1])), sent)
        return _PART.sub(self._part, sent) if "[Word for word in" in sent else sent

    def _part(self, found: re.Match[str]) -> str:
        for result in self._named(found["call"]):
            try:
                if found["first"] is not None:
                    part = cut_by_words(result.sent, json.loads(found["first"]), json.loads(found["last"]))
                else:
                    part = cut_by_lines(result.sent, int(found["line"]), int(found["last_line"]))
            except ValueError:  # a tool's text that only begins like a reference
                return found[0]
            if part is not None:
                return part
        return found[0]

    def _named(self, name: str) -> list[_SentResult]:
        """Return the results that a reference may name."""
        if name in self._results:
            return [result for result in self._results[name] if result is not None]
        numbered = _NUMBERED.fullmatch(name)
        results = self._results.get(numbered[1], ()) if numbered is not None else ()
        number = int(numbered[2]) if numbered is not None else 0
        result = results[number - 1] if 1 <= number <= len(results) else None
        return [] if result is None else [result]


# -- reading -----------------------------------------------------------------------------------------------------------


def _events(route: RewriteRoute, body: Mapping[str, Any]) -> Iterator[_MadeCall | _GivenResult]:
    """Yield the tool calls and their results in the order of the body; what is not understood is left out."""
    name = "input" if route == "responses" else "messages"
    for number, message in enumerate(_list(body.get(name))):
        if not isinstance(message, _MAPPING):
            continue
        path = (name, number)
        if route == "responses":
            yield from _item_events(path, message)
        elif route == "messages":
            yield from _block_events(path, message)
        elif message.get("role") == "assistant":
            for call in _list(message.get("tool_calls")):
                inner = call.get("function", call.get("custom")) if isinstance(call, _MAPPING) else None
                if isinstance(inner, _MAPPING) and isinstance(inner.get("name"), str):
                    yield _MadeCall(_id(call.get("id")), inner["name"], inner.get("arguments", inner.get("input", "")))
        elif message.get("role") == "tool":
            yield _result((*path, "content"), message.get("tool_call_id"), message.get("content"), message)


def _item_events(path: _Path, item: Mapping[str, Any]) -> Iterator[_MadeCall | _GivenResult]:
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call") and isinstance(item.get("name"), str):
        yield _MadeCall(_id(item.get("call_id")), item["name"], item.get("arguments", item.get("input", "")))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        yield _result((*path, "output"), item.get("call_id"), item.get("output"), item)


def _block_events(path: _Path, message: Mapping[str, Any]) -> Iterator[_MadeCall | _GivenResult]:
    for number, block in enumerate(_list(message.get("content"))):
        if not isinstance(block, _MAPPING):
            continue
        if block.get("type") == "tool_use" and isinstance(block.get("name"), str):
            yield _MadeCall(_id(block.get("id")), block["name"], block.get("input", ""))
        elif block.get("type") == "tool_result":
            inner = (*path, "content", number, "content")
            yield _result(inner, block.get("tool_use_id"), block.get("content"), block)


def _result(path: _Path, call_id: object, content: object, holder: Mapping[str, Any]) -> _GivenResult:
    may_change = not _has_mark(holder)
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        part = content[0]
        is_text = part.get("type") in ("text", "input_text", "output_text")
        content, path = (part.get("text") if is_text else None), (*path, 0, "text")
        may_change = may_change and not _has_mark(part)
    is_text = isinstance(content, str) and not holder.get("is_error") and holder.get("status") != "error"
    return _GivenResult(_id(call_id), path, content if is_text and isinstance(content, str) else None, may_change)


def _has_mark(value: Mapping[str, Any]) -> bool:
    return value.get("cache_control") is not None or value.get("prompt_cache_breakpoint") is not None


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _id(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# -- writing -----------------------------------------------------------------------------------------------------------


def _with_texts(body: Mapping[str, Any], texts: Mapping[_Path, str]) -> Mapping[str, Any]:
    changed = body
    for path, text in texts.items():
        changed = _replaced(changed, path, text)
    return changed


def _replaced(value: Any, path: _Path, text: str) -> Any:
    """Return a copy of `value` with `text` at `path`; what is not on the path is shared."""
    if not path:
        return text
    copy: Any = list(value) if isinstance(value, list | tuple) else dict(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], text)
    return copy
