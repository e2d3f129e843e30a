"""Request bodies in which repeated tool results are references, and the way back. Pure: no I/O."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from warmprefix_requests.copies import Copied
from warmprefix_requests.echoes import Echoes
from warmprefix_requests.prompts import (
    GivenResult,
    HistoryCut,
    MadeCall,
    Path,
    RewriteRoute,
    hides_text,
    is_cut_elsewhere,
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

__all__ = ["Rewriting", "Rewritten", "restored", "rewrite"]

_NUMBERED = re.compile(r"(.+), number (\d{1,9}) of such calls")

_QUOTE = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_PASSAGES = re.compile(
    r"\[Word for word in the result of the earlier call (.{1,300}?): the (?:passage that begins|passages that begin) "
    rf"({_QUOTE.pattern}(?:, {_QUOTE.pattern})*)\.\]"
)
"""A reference to passages: the name of the call, and the quotes."""


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
    rewriting = Rewriting(route, body, earlier, keep_tools=keep_tools, passages=passages and earlier is None)
    if rewriting.leaves(body) or (earlier is None and not passages and not _has_repeats(route, body)):
        return Rewritten(body)
    rewriting.read(body, None, check)
    return rewriting.rewritten(body)


def _has_repeats(route: RewriteRoute, body: Mapping[str, Any]) -> bool:
    """Return True if two results have the same output. O(characters)."""
    texts = [event.text or "" for event in tool_events(route, body, 0, None) if isinstance(event, GivenResult)]
    outputs = [bare_output(text).text for text in texts if len(text) >= LEAST_CHARACTERS]
    return len({*outputs}) < len(outputs)


class Rewriting(Copied):
    """The work of `rewrite` on the messages of a body, from the first to the last.

    A copy goes on by itself, so the work on a beginning that many bodies have is done once.
    """

    def __init__(
        self,
        route: RewriteRoute,
        body: Mapping[str, Any],
        earlier: StoredHistory | None,
        *,
        keep_tools: Collection[str],
        passages: bool,
    ) -> None:
        self._route: RewriteRoute = route
        self._earlier = earlier
        self._is_cut = is_cut_elsewhere(body)
        self._after_response = earlier is not None and body.get("previous_response_id") is not None
        self._begin = partial(_RewrittenPrompt, keep_tools, after_response=self._after_response, passages=passages)
        self._prompt = self._begin(earlier)
        self._seen: list[MadeCall | StoredResult | HistoryCut] = []
        self._texts: dict[Path, str] = {}
        self._echoes: dict[str, str | None] = {}
        self._saved, self._fits = 0, True
        self._items = self._events = 0

    def leaves(self, body: Mapping[str, Any]) -> bool:
        """Return True if nothing in a body may become a reference."""
        return hides_text(body, after_response=self._after_response) or (
            self._earlier is None and is_cut_elsewhere(body)
        )

    def read(self, body: Mapping[str, Any], end: int | None, check: Callable[[], object] | None) -> None:
        """Go on with the messages of a body up to this one; those in front were read."""
        for event in tool_events(self._route, body, self._items, end):
            self._events += 1
            if isinstance(event, GivenResult):
                if check is not None:
                    check()
                self._result(event)
                continue
            if self._earlier is not None:
                self._seen.append(event)
            if isinstance(event, MadeCall):
                self._prompt.call(event)
            else:
                self._cut()
        self._items = end or 0

    def _cut(self) -> None:
        """Begin again: nothing may refer to what the API does not show any more."""
        earlier = self._earlier
        if earlier is not None:
            references = self._prompt.references
            known = earlier.extended(self._seen, references) if self._after_response else None
            earlier = known or StoredHistory(references=references)
        self._prompt = self._begin(earlier)
        self._echoes = {}

    def _result(self, event: GivenResult) -> None:
        text = event.text
        sent, references = (text, {}) if self._is_cut else self._prompt.result(event)
        if self._earlier is not None:
            is_imitation = text is None or REFERENCE.fullmatch(text)
            self._seen.append(StoredResult(event.call_id or "", None if is_imitation else text_key(text or "")))
        if text is None or sent is None or not references:
            return
        self._texts[event.path] = sent
        self._fits = self._fits and _size(text) <= MAX_TEXT_BYTES
        self._saved += (_size(text) - _size(sent)) // 4
        for reference, original in references.items():
            if self._echoes.setdefault(reference, original) != original:
                self._echoes[reference] = None

    @property
    def size(self) -> int:
        """Bytes in memory, besides the body, as an upper bound."""
        return _BYTES_AT_FIRST + _BYTES_PER_EVENT * self._events + self._prompt.size

    def rewritten(self, body: Mapping[str, Any]) -> Rewritten:
        """Return what `rewrite` does for a body of which all messages were read."""
        history = None
        if self._earlier is not None and not has_hidden_items(body.get("input")):
            history = self._earlier.extended(self._seen, self._prompt.references) if self._fits else None
            history = history.unnamed() if history is not None and self._is_cut else history
        if self._after_response and history is None:  # calls that look like these may be hidden
            return Rewritten(body)
        return Rewritten(
            _with_texts(body, self._texts), len(self._texts), self._saved, self._texts, Echoes(self._echoes), history
        )


_BYTES_AT_FIRST, _BYTES_PER_EVENT, _BYTES_PER_PARAGRAPH = 8_000, 1_000, 1_000


class _RewrittenPrompt(Copied):
    """The calls and results of one prompt, or of what a compaction left of it."""

    def __init__(
        self,
        keep_tools: Collection[str],
        earlier: StoredHistory | None,
        *,
        after_response: bool,
        passages: bool,
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
        self.size = 0
        """Bytes of parts of texts in memory, as an upper bound."""
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

    def result(self, result: GivenResult) -> tuple[str | None, Mapping[str, str]]:
        """Return the text to send, and the references in it with the texts that they stand for."""
        text = result.text
        # An imitation may name what was forgotten, and digests have no passages.
        hides = self._earlier is not None and text is not None and _PASSAGES.search(text)
        if text is None or hides or (self._after_response and REFERENCE.fullmatch(text)):
            self._skip(result.call_id)
            return text, {}
        output, bare = BareOutput("", text, ""), None
        if self._earlier is None:
            output = bare_output(text)
            bare = output.text, _size(output.text)
            self.size += 0 if output.text is text else sys.getsizeof(output.text)
        keys = _Keys(self._key(text), bare and bare[0])
        reference = None
        if len(text) >= LEAST_CHARACTERS:
            reference = self._transcript.keyed(result.call_id, keys.text, _size(text), bare)
        else:  # no source either
            self._transcript.skip(result.call_id)
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
        if self._originals.are_named_in(output, text):  # an imitation, of others maybe: what they mean can be endless
            if self._passages is not None:
                self._passages.skip(result.call_id)
            self._originals.add(result.call_id, _UNKNOWN)
            return text, {}
        sent, references = self._with_passages(result.call_id, text)
        self._originals.add(result.call_id, keys)
        return sent, references

    def _with_passages(self, call_id: str | None, text: str) -> tuple[str, Mapping[str, str]]:
        """Return the text to send for a result of which passages may be repeated, as `result` does."""
        if self._passages is not None:
            paragraphs = plain_paragraphs(text)
            if paragraphs:
                self.size += _BYTES_PER_PARAGRAPH * len(paragraphs)
                self.size += sum([2 * sys.getsizeof(each) for each in paragraphs if each is not text])
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
    for event in tool_events(route, body, 0, None):
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


_UNKNOWN = _Keys("")
"""What an imitation of a reference means: no text that may become a reference."""


class _Originals(Copied):
    """The results of a body without references, or what stands for each."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        """Number of calls that are shown in this way."""
        self._given: dict[tuple[str, int], _Keys] = {}
        """The originals of their results, by how they are shown and the number among these."""
        self._first: dict[str, _Keys] = {}
        """The first of them that was given."""
        self._waiting: dict[str | None, tuple[str, int]] = {}
        self._passages: dict[str, Mapping[str, str | None]] = {}
        """The passages of results that were named for these, by their first words."""

    def call(self, call_id: str | None, shown: str) -> None:
        number = self._calls[shown] = self._calls.get(shown, 0) + 1
        self._waiting[call_id] = shown, number

    def add(self, call_id: str | None, original: _Keys | None) -> None:
        """Add the original of a result."""
        call = self._waiting.pop(call_id, None)
        if call is not None and original is not None:
            self._given[call] = original
            self._first.setdefault(call[0], original)

    def named_in(self, output: BareOutput) -> tuple[str, _Keys] | None:
        """Return what a reference in this place stands for, and the result that it names, if there is one."""
        reference = REFERENCE.fullmatch(output.text)
        if reference is None or (reference[1] == "result" and (output.head or output.tail)):
            return None
        original = self._named(reference[2])
        return None if original is None else (reference[1], original)

    def are_named_in(self, output: BareOutput, text: str) -> bool:
        """Return True if `restored` may return another text for this one with this output. O(characters)."""
        if "ord for word " not in text:
            return False
        return self.named_in(output) is not None or any(map(self._passages_named, _PASSAGES.finditer(text)))

    def restored(self, text: str) -> str:
        """Return a text with what its references stand for. The originals must be texts."""
        output = bare_output(text)
        named = self.named_in(output)
        if named is None:
            return _PASSAGES.sub(self._with_named, text) if "ord for word in " in text else text
        what, original = named
        return original.text if what == "result" else output.with_text(bare_output(original.text).text)

    def _with_named(self, reference: re.Match[str]) -> str:
        return "\n\n".join(self._passages_named(reference) or [reference[0]])

    def _passages_named(self, reference: re.Match[str]) -> list[str]:
        """Return the passages that a reference stands for; none if one of them is not known."""
        original = self._named(reference[1])
        passages = {} if original is None else self._passages_of(original.text)
        found = [passages.get(quote) for quote in _QUOTE.findall(reference[2])]
        return [] if None in found else [str(passage) for passage in found]

    def _passages_of(self, text: str) -> Mapping[str, str | None]:
        """Return the passages of a text by their quotes; None for several."""
        if text not in self._passages:
            passages: dict[str, str | None] = {}
            for passage in plain_paragraphs(text):
                for quote in possible_quotes(passage):
                    passages[quote] = None if quote in passages else passage
            self._passages[text] = passages
        return self._passages[text]

    def _named(self, name: str) -> _Keys | None:
        """Return the result that a reference names, if there is one."""
        if name in self._calls:
            return self._first.get(name)
        numbered = _NUMBERED.fullmatch(name)
        return None if numbered is None else self._given.get((numbered[1], int(numbered[2])))


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
