"""Request bodies in which repeated tool results are references, and the way back. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from warmprefix_requests.echoes import Echoes
from warmprefix_requests.prompts import (
    GivenResult,
    HistoryCut,
    MadeCall,
    Path,
    RewriteRoute,
    is_cut_elsewhere,
    tool_events,
)
from warmprefix_requests.transcript import Transcript, shown_call

__all__ = ["RepeatedResult", "Rewritten", "restored", "rewrite"]

_LEAST_CHARACTERS = 256

_WHOLE = re.compile(r"\[(?:W|Ran again; w)ord for word the result of the earlier call (.+)\.\]")
_NUMBERED = re.compile(r"(.+), number (\d{1,9}) of such calls")


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
    echoes: Echoes = Echoes({})
    """The references, to find them in the arguments of the tool calls that the model answers with."""


def rewrite(
    route: RewriteRoute,
    body: Mapping[str, Any],
    *,
    keep_tools: Collection[str] = (),
    check: Callable[[], object] | None = None,
) -> Rewritten:
    """Return a body whose repeated tool results are references to the call that gave the first.

    The first occurrence of each result keeps its bytes, so a body without repeats comes back as it is. Only tool
    results ever change: no text of a user or an assistant, no error, nothing under 256 characters, and nothing in a
    body that names text elsewhere or asks for a cut. A cache mark stays on its part, and decides nothing. The output
    for the beginning of a session is the beginning of the output for all of it, so a prefix cache keeps its hits. A
    result becomes a reference only if `restored` undoes that. O(bytes).

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
        check: Called before each result; an exception that it raises ends the work.
    """
    if is_cut_elsewhere(body):
        return Rewritten(body)
    events = list(tool_events(route, body))
    texts = [event.text for event in events if isinstance(event, GivenResult) and event.text is not None]
    if len(set(texts)) == len(texts):
        return Rewritten(body)
    prompt = _RewrittenPrompt(keep_tools)
    changes: dict[Path, str] = {}
    results: list[RepeatedResult] = []
    echoes = Echoes({})
    saved = 0
    for event in events:
        if isinstance(event, MadeCall):
            prompt.call(event)
            continue
        if isinstance(event, HistoryCut):
            prompt, echoes = _RewrittenPrompt(keep_tools), Echoes({})
            continue
        if check is not None:
            check()
        sent = prompt.result(event)
        if event.text is not None and sent is not None and sent != event.text:
            changes[event.path] = sent
            results.append(RepeatedResult(event.text, sent))
            echoes.add(prompt.latest)
            saved += (_size(event.text) - _size(sent)) // 4
        elif event.text is not None:
            results.append(RepeatedResult(event.text, None))
    replaced = {result.text for result in results if result.reference is not None}
    repeated = tuple([result for result in results if result.text in replaced]) if replaced else ()
    return Rewritten(_with_texts(body, changes), len(changes), saved, repeated, echoes)


class _RewrittenPrompt:
    """The calls and results of one prompt, or of what a compaction left of it."""

    def __init__(self, keep_tools: Collection[str]) -> None:
        self._keep_tools = keep_tools
        self._kept: set[str | None] = set()
        self._transcript = Transcript(min_tokens=_LEAST_CHARACTERS // 4, level="exact")
        self._originals = _Originals()

    @property
    def latest(self) -> dict[str, str]:
        """The references in the latest result, and the text that each stands for."""
        return self._transcript.latest

    def call(self, call: MadeCall) -> None:
        shown = shown_call(call.name, call.arguments)
        self._transcript.add_shown_call(call.id, shown)
        self._originals.call(call.id, shown)
        if call.name in self._keep_tools:
            self._kept.add(call.id)

    def result(self, result: GivenResult) -> str | None:
        """Return the text to send."""
        if result.text is None:
            self._transcript.skip(result.call_id)
            self._originals.result(result.call_id, None)
            return None
        sent = self._transcript.result(result.call_id, result.text)
        may_change = result.call_id not in self._kept and len(result.text) >= _LEAST_CHARACTERS
        if sent != result.text and not (may_change and self._originals.of(sent) == result.text):
            sent = result.text
        self._originals.result(result.call_id, sent)
        return sent


def restored(route: RewriteRoute, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body with the results that its references name: the inverse of `rewrite`.

    A reference that names no earlier result of the body stays as it is. A text that reads like a reference and does
    name one is taken for one, even if a tool gave it. Linear in the results' bytes.
    """
    originals = _Originals()
    changes: dict[Path, str] = {}
    for event in tool_events(route, body):
        if isinstance(event, MadeCall):
            originals.call(event.id, shown_call(event.name, event.arguments))
        elif isinstance(event, HistoryCut):
            originals = _Originals()
        else:
            original = originals.result(event.call_id, event.text)
            if original is not None and original != event.text:
                changes[event.path] = original
    return _with_texts(body, changes)


class _Originals:
    """The results of a body without references."""

    def __init__(self) -> None:
        self._results: dict[str, list[str | None]] = {}
        """The originals of the results of calls that are shown in the same way, in the order of the calls."""
        self._first: dict[str, str] = {}
        """The first of them that was given."""
        self._waiting: dict[str | None, tuple[str, int]] = {}

    def call(self, call_id: str | None, shown: str) -> None:
        results = self._results.setdefault(shown, [])
        self._waiting[call_id] = (shown, len(results))
        results.append(None)

    def result(self, call_id: str | None, sent: str | None) -> str | None:
        """Add a result and return its original."""
        original = None if sent is None else self.of(sent)
        if call_id in self._waiting:
            shown, number = self._waiting.pop(call_id)
            self._results[shown][number] = original
            if original is not None:
                self._first.setdefault(shown, original)
        return original

    def of(self, sent: str) -> str:
        """Return the original of a result, which is the result itself unless it is a reference."""
        whole = _WHOLE.fullmatch(sent)
        original = None if whole is None else self._named(whole[1])
        return sent if original is None else original

    def _named(self, name: str) -> str | None:
        """Return the result that a reference names, if there is one."""
        if name in self._results:
            return self._first.get(name)
        numbered = _NUMBERED.fullmatch(name)
        results = self._results.get(numbered[1], ()) if numbered is not None else ()
        number = int(numbered[2]) if numbered is not None else 0
        return results[number - 1] if 1 <= number <= len(results) else None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# -- writing -----------------------------------------------------------------------------------------------------------


def _with_texts(body: Mapping[str, Any], texts: Mapping[Path, str]) -> Mapping[str, Any]:
    """Return a copy of a body with new texts; what stands on none of the paths is shared. O(messages)."""
    if not texts:
        return body
    changes: dict[str | int, Any] = {}
    for path, text in texts.items():
        inner = changes
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = text
    changed: Mapping[str, Any] = _changed(body, changes)
    return changed


def _changed(value: Any, changes: str | dict[str | int, Any]) -> Any:
    if isinstance(changes, str):
        return changes
    copy: Any = list(value) if isinstance(value, list | tuple) else dict(value)
    for step, inner in changes.items():
        copy[step] = _changed(copy[step], inner)
    return copy
