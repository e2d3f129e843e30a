"""Request bodies in which repeated tool results are references, and the way back. Pure: no I/O."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from warmprefix_requests.echoes import Echoes
from warmprefix_requests.prompts import (
    GivenResult,
    HistoryCut,
    MadeCall,
    Path,
    RewriteRoute,
    hides_text,
    is_cut_elsewhere,
    items_name,
    tool_events,
)
from warmprefix_requests.splicing import nested
from warmprefix_requests.stored_history import (
    MAX_REFERENCES,
    MAX_TEXT_BYTES,
    StoredCall,
    StoredHistory,
    StoredResult,
    has_hidden_items,
    text_key,
)
from warmprefix_requests.transcript import Transcript, possible_quotes, shown_call
from warmprefix_requests.wrappers import LEAST_CHARACTERS, REFERENCE, BareOutput, bare_output, plain_paragraphs

__all__ = ["KnownResults", "Rewritten", "known_results", "restored", "rewrite", "rewrite_behind"]

_NUMBERED = re.compile(r"(.+), number (\d{1,9}) of such calls")

_QUOTE = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_PASSAGES = re.compile(
    r"\[Word for word in the result of the earlier call (.{1,300}?): the (?:passage that begins|passages that begin) "
    rf"({_QUOTE.pattern}(?:, {_QUOTE.pattern})*)\.\]"
)
"""A reference to passages: the name of the call, and the quotes."""

_SIGNATURE_CHARACTERS = 64
_Signature = tuple[int, str, str]


class Rewritten(NamedTuple):
    """A body, and what its references save."""

    body: Mapping[str, Any]
    """The given body itself if nothing is repeated."""
    references: int = 0
    """Number of results that became references."""
    saved_tokens: int = 0
    """Tokens of the replaced results without those of the references, estimated as a quarter of their UTF-8 bytes."""
    texts: Mapping[Path, str] = {}
    """The new texts by their places in the body."""
    echoes: Echoes = Echoes({})
    """The references, to find them in the arguments of the tool calls that the model answers with."""
    history: StoredHistory | None = None
    """With `earlier`, the history with this body; None if it is not known in full, so that nothing may refer to it."""


def rewrite(
    route: RewriteRoute,
    body: Mapping[str, Any],
    *,
    keep_tools: Collection[str] = (),
    check: Callable[[], object] | None = None,
    earlier: StoredHistory | None = None,
    passages: bool = False,
) -> Rewritten:
    """Return a body whose repeated tool results are references to the call that gave the first.

    The first occurrence of each result keeps its bytes, so a body without repeats comes back as it is. Where results
    differ only around the output, such as in a time in front of it, white space, or a JSON object, this stays and the
    output becomes a reference; not with `earlier`, which has no outputs. Only tool results ever change: no text of a
    user or an assistant, no error, nothing under 256 characters, and nothing in a body that names text elsewhere or
    asks for a cut. A cache mark stays on its part, and decides nothing. The output for the beginning of a session is
    the beginning of the output for all of it, so a prefix cache keeps its hits. A result becomes a reference only if
    `restored` undoes that. O(bytes).

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
        earlier: The history that the server puts in front of a body with a `previous_response_id`; an empty one for a
            body that begins a history. References name its results as if they stood in the body. The result has the
            history with this body.
        passages: Whether paragraphs of 256 characters or more, between blank lines, become references where an earlier
            result has them, too; not with `earlier`, and not those with numbered lines.
    """
    after_response = earlier is not None and body.get("previous_response_id") is not None
    is_cut = is_cut_elsewhere(body)
    if hides_text(body, after_response=after_response) or (is_cut and earlier is None):
        return Rewritten(body)
    events = list(tool_events(route, body))
    passages = passages and earlier is None
    outputs = _repeated_outputs(events) if earlier is None else {}
    if earlier is None and not outputs and not passages:
        return Rewritten(body)
    prompt = _RewrittenPrompt(keep_tools, earlier, after_response=after_response, passages=passages)
    seen: list[MadeCall | StoredResult | HistoryCut] = []
    changes: dict[Path, str] = {}
    echoes = Echoes({})
    saved, fits = 0, True
    for event in events:
        if not isinstance(event, GivenResult):
            seen.append(event)
            if isinstance(event, MadeCall):
                prompt.call(event)
            else:
                history = None if earlier is None else StoredHistory(references=prompt.references)
                if earlier is not None and after_response:
                    history = earlier.extended(seen, prompt.references) or history
                prompt = _RewrittenPrompt(keep_tools, history, after_response=after_response, passages=passages)
                echoes = Echoes({})
            continue
        if check is not None:
            check()
        output = outputs.get(event.path)
        if output is None and passages and event.text is not None:
            output = bare_output(event.text)
        sent, references = (event.text, {}) if is_cut else prompt.result(event, output)
        if earlier is not None:
            is_imitation = event.text is None or REFERENCE.fullmatch(event.text)
            seen.append(StoredResult(event.call_id or "", None if is_imitation else text_key(event.text or "")))
        if event.text is not None and sent is not None and references:
            changes[event.path] = sent
            fits = fits and _size(event.text) <= MAX_TEXT_BYTES
            echoes.add(references)
            saved += (_size(event.text) - _size(sent)) // 4
    history = None
    if earlier is not None and not has_hidden_items(body.get("input")):
        history = earlier.extended(seen, prompt.references) if fits else None
        history = history.unnamed() if history is not None and is_cut else history
    if after_response and history is None:  # calls that look like these may be hidden
        return Rewritten(body)
    return Rewritten(_with_texts(body, changes), len(changes), saved, changes, echoes, history)


def _repeated_outputs(events: Iterable[MadeCall | GivenResult | HistoryCut]) -> dict[Path, BareOutput]:
    """Return the outputs of results that may be equal to others. Most are told apart by a few characters."""
    texts = {event.path: event.text for event in events if isinstance(event, GivenResult) and event.text is not None}
    outputs = {path: bare_output(text) for path, text in texts.items() if len(text) >= LEAST_CHARACTERS}
    signatures = {path: _signature(output) for path, output in outputs.items()}
    counts = Counter(signatures.values())
    if len(counts) == len(outputs):
        return {}
    if any(map(_imitates, texts.values())):  # such a text may name any other
        return {path: bare_output(text) for path, text in texts.items()}
    return {path: outputs[path] for path, signature in signatures.items() if counts[signature] > 1}


def _imitates(text: str) -> bool:
    return "ord for word " in text and bool(REFERENCE.fullmatch(bare_output(text).text) or _PASSAGES.search(text))


class KnownResults(NamedTuple):
    """What `rewrite` found in the beginning of a body. Immutable."""

    signatures: frozenset[_Signature]
    """Results with other signatures repeat none of its results."""
    rewritten: Rewritten | None
    """What `rewrite` returns for it, but for the body; None if that is not known."""


def rewrite_behind(
    route: RewriteRoute, body: Mapping[str, Any], known: KnownResults | None, begin: int
) -> Rewritten | None:
    """Return what `rewrite` does, if nothing behind the first messages is repeated; None if that must be asked."""
    if known is None or known.rewritten is None or hides_text(body) or is_cut_elsewhere(body):
        return None
    signatures = set(known.signatures)
    for event in _events_of(route, body, begin, None):
        if isinstance(event, HistoryCut):
            return None
        if isinstance(event, GivenResult) and event.text is not None:
            output = bare_output(event.text)
            signature = _signature(output)
            if signature in signatures or REFERENCE.fullmatch(output.text):
                return None
            signatures.add(signature)
    return known.rewritten._replace(body=_with_texts(body, known.rewritten.texts))


def known_results(
    route: RewriteRoute,
    body: Mapping[str, Any],
    rewritten: Rewritten,
    known: KnownResults | None,
    begin: int,
    end: int,
) -> KnownResults:
    """Return what is known of the first `end` messages of a body, from what is known of the first `begin`."""
    new = [
        _signature(bare_output(event.text))
        for event in _events_of(route, body, begin if known else 0, end)
        if isinstance(event, GivenResult) and event.text is not None
    ]
    signatures = known.signatures.union(new) if known else frozenset(new)
    has_more = (
        hides_text(body)
        or is_cut_elsewhere(body)
        or any(path[1] >= end for path in rewritten.texts)  # type: ignore[operator]
        or any(isinstance(event, HistoryCut) for event in _events_of(route, body, end, None))
    )
    return KnownResults(signatures, None if has_more else rewritten._replace(body={}))


def _events_of(
    route: RewriteRoute, body: Mapping[str, Any], begin: int, end: int | None
) -> Iterator[MadeCall | GivenResult | HistoryCut]:
    name = items_name(route)
    return tool_events(route, {name: body[name][begin:end]})


class _RewrittenPrompt:
    """The calls and results of one prompt, or of what a compaction left of it."""

    def __init__(
        self,
        keep_tools: Collection[str],
        earlier: StoredHistory | None = None,
        *,
        after_response: bool = False,
        passages: bool = False,
    ) -> None:
        self._keep_tools = keep_tools
        self._kept: set[str | None] = set()
        self._transcript = Transcript(min_tokens=LEAST_CHARACTERS // 4)
        self._passages = Transcript(min_tokens=LEAST_CHARACTERS // 4) if passages else None
        self._earlier = earlier
        self._after_response = after_response
        self._key: Callable[[str], str] = str if earlier is None else text_key
        self._originals = _Originals()
        self._calls = 0
        self.references: dict[str, str] = {}
        """The references in the prompt, and the key of the text that each stands for."""
        if earlier is not None:
            for event in earlier.events:
                if isinstance(event, StoredCall):
                    self._calls = event.place - 1
                    self._add(event.id, event.shown)
                elif event.key is None:
                    self._skip(event.id)
                else:
                    self._transcript.keyed(event.id, event.key, 0)
                    self._originals.add(event.id, _Keys(event.key))
            self._calls = earlier.calls
            self.references.update(earlier.references)

    def call(self, call: MadeCall) -> None:
        self._add(call.id, shown_call(call.name, call.arguments))
        if call.name in self._keep_tools:
            self._kept.add(call.id)

    def _add(self, call_id: str | None, shown: str) -> None:
        self._calls += 1
        can_name = self._earlier is None or self._earlier.can_name(shown)
        self._transcript.add_shown_call(call_id if can_name else None, shown, self._calls)
        if self._passages is not None:
            self._passages.add_shown_call(call_id, shown)
        if can_name:
            self._originals.call(call_id, shown)

    def _skip(self, call_id: str | None) -> None:
        self._transcript.skip(call_id)
        if self._passages is not None:
            self._passages.skip(call_id)
        self._originals.add(call_id, None)

    def result(self, result: GivenResult, output: BareOutput | None) -> tuple[str | None, Mapping[str, str]]:
        """Return the text to send, and the references in it with the texts that they stand for.

        Without `earlier`, a result that may be repeated comes with its output.
        """
        text = result.text
        cannot_repeat = output is None and self._earlier is None
        # An imitation may name what was forgotten, and digests have no passages.
        hides = self._earlier is not None and text is not None and _PASSAGES.search(text)
        if text is None or hides or cannot_repeat or (self._after_response and REFERENCE.fullmatch(text)):
            self._skip(result.call_id)
            return text, {}
        keys = _Keys(self._key(text), None if output is None else self._key(output.text))
        bare = None if output is None or keys.output is None else (keys.output, _size(output.text))
        reference = None
        if len(text) >= LEAST_CHARACTERS:
            reference = self._transcript.keyed(result.call_id, keys.text, _size(text), bare)
        else:  # no source either: only an imitation in this body, maybe a later one, lets it come so far
            self._transcript.skip(result.call_id)
        output = output or BareOutput("", text, "")
        if reference is not None and result.call_id not in self._kept and self._has_room(reference, text):
            whole = REFERENCE.fullmatch(reference)
            sent = reference if whole is not None and whole[1] == "result" else output.with_text(reference)
            if _size(sent) < _size(text) and self._is_undone(sent, text, output, keys):
                self._originals.add(result.call_id, keys)
                self.references[reference] = keys.text
                if self._passages is not None:
                    self._passages.skip(result.call_id)
                return sent, {reference: text if sent == reference else output.text}
        if self._earlier is not None:
            named = self._originals.named_in(output)
            self._originals.add(result.call_id, keys if named is None else named[1] if named[0] == "result" else None)
            return text, {}
        sent, references = self._with_passages(result.call_id, text)
        given = self._originals.restored(sent)  # another text for an imitation
        self._originals.add(result.call_id, keys if given == text else _Keys(given, bare_output(given).text))
        return sent, references

    def _with_passages(self, call_id: str | None, text: str) -> tuple[str, Mapping[str, str]]:
        """Return the text to send for a result of which passages may be repeated, as `result` does."""
        if self._passages is not None:
            paragraphs = plain_paragraphs(text)
            if paragraphs:
                sent = self._passages.result(call_id, text, paragraphs)
                if call_id not in self._kept and self._originals.restored(sent) == text:
                    return sent, self._passages.latest
            else:
                self._passages.skip(call_id)
        return text, {}

    def _is_undone(self, sent: str, text: str, output: BareOutput, keys: _Keys) -> bool:
        """Return True if `restored` gives this text for what is sent."""
        sent_output = bare_output(sent)
        named = self._originals.named_in(sent_output)
        if named is None or named[0] == "result":
            return named is not None and named[1].text == keys.text
        return named[1].output == keys.output is not None and sent_output.with_text(output.text) == text

    def _has_room(self, reference: str, text: str) -> bool:
        """Return True unless the text of a reference to a server's history could not be kept."""
        return not self._after_response or (
            _size(text) <= MAX_TEXT_BYTES and (reference in self.references or len(self.references) < MAX_REFERENCES)
        )


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
            original = event.text
            if original is not None:
                original = originals.restored(original)
                if original != event.text:
                    changes[event.path] = original
            originals.add(event.call_id, None if original is None else _Keys(original))
    return _with_texts(body, changes)


class _Keys(NamedTuple):
    """What stands for a result's text, and for the output in it."""

    text: str
    output: str | None = None


class _Originals:
    """The results of a body without references, or what stands for each."""

    def __init__(self) -> None:
        self._results: dict[str, list[_Keys | None]] = {}
        """The originals of the results of calls that are shown in the same way, in the order of the calls."""
        self._first: dict[str, _Keys] = {}
        """The first of them that was given."""
        self._waiting: dict[str | None, tuple[str, int]] = {}
        self._passages: dict[str, dict[str, str | None]] = {}
        """The passages of results that were named for these, by their first words."""

    def call(self, call_id: str | None, shown: str) -> None:
        results = self._results.setdefault(shown, [])
        self._waiting[call_id] = (shown, len(results))
        results.append(None)

    def add(self, call_id: str | None, original: _Keys | None) -> None:
        """Add the original of a result."""
        if call_id in self._waiting:
            shown, number = self._waiting.pop(call_id)
            self._results[shown][number] = original
            if original is not None:
                self._first.setdefault(shown, original)

    def named_in(self, output: BareOutput) -> tuple[str, _Keys] | None:
        """Return what a reference in this place stands for, and the result that it names, if there is one."""
        reference = REFERENCE.fullmatch(output.text)
        if reference is None or (reference[1] == "result" and (output.head or output.tail)):
            return None
        original = self._named(reference[2])
        return None if original is None else (reference[1], original)

    def restored(self, text: str) -> str:
        """Return a text with what its references stand for. The originals must be texts."""
        output = bare_output(text)
        named = self.named_in(output)
        if named is None:
            return _PASSAGES.sub(self._passages_named, text) if "ord for word in " in text else text
        what, original = named
        return original.text if what == "result" else output.with_text(bare_output(original.text).text)

    def _passages_named(self, reference: re.Match[str]) -> str:
        original = self._named(reference[1])
        passages = {} if original is None else self._passages_of(original.text)
        found = [passages.get(quote) for quote in _QUOTE.findall(reference[2])]
        return reference[0] if None in found else "\n\n".join(map(str, found))

    def _passages_of(self, text: str) -> dict[str, str | None]:
        """Return the passages of a text by their quotes; None for several."""
        if text not in self._passages:
            passages = self._passages[text] = {}
            for passage in plain_paragraphs(text):
                for quote in possible_quotes(passage):
                    passages[quote] = None if quote in passages else passage
        return self._passages[text]

    def _named(self, name: str) -> _Keys | None:
        """Return the result that a reference names, if there is one."""
        if name in self._results:
            return self._first.get(name)
        numbered = _NUMBERED.fullmatch(name)
        results = self._results.get(numbered[1], ()) if numbered is not None else ()
        number = int(numbered[2]) if numbered is not None else 0
        return results[number - 1] if 1 <= number <= len(results) else None


def _signature(output: BareOutput) -> _Signature:
    """Return what equal outputs have in common; it is quick to compare."""
    text = output.text
    return len(text), text[:_SIGNATURE_CHARACTERS], text[-_SIGNATURE_CHARACTERS:]


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


# -- writing -----------------------------------------------------------------------------------------------------------


def _with_texts(body: Mapping[str, Any], texts: Mapping[Path, str]) -> Mapping[str, Any]:
    """Return a copy of a body with new texts; what stands on none of the paths is shared. O(messages)."""
    if not texts:
        return body
    changed: Mapping[str, Any] = _changed(body, nested(texts))
    return changed


def _changed(value: Any, changes: Any) -> Any:
    if isinstance(changes, str):
        return changes
    copy: Any = list(value) if isinstance(value, list | tuple) else dict(value)
    for step, inner in changes.items():
        copy[step] = _changed(copy[step], inner)
    return copy
