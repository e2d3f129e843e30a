"""References that a model copies into its tool calls, and the texts that they stand for. Pure: no I/O."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

__all__ = ["EchoStream", "EchoedText", "Echoes", "TextForm"]

TextForm = Literal["json", "plain"]
"""How a text is written: as JSON, such as a function's arguments, or as it is, such as a custom tool's input."""

_LEAD_IN = re.compile(r"\[(?:W|Ran again; w)ord for word (?:(?:in )?the result|the bare output) of the earlier call ")
_LEAD_INS = tuple(
    f"[{first}ord for word {second} of the earlier call "
    for first in ("W", "Ran again; w")
    for second in ("the result", "in the result", "the bare output")
)
_END = ".]"
_DEPTHS: Mapping[TextForm, tuple[int, ...]] = {"json": (1, 2), "plain": (0, 1)}
"""How often a reference may be escaped, the usual number first: models write files that hold JSON, too."""
_INNER_QUOTES: Mapping[TextForm, str] = {"json": '\\"', "plain": '"'}
"""What stands in front of a string of such a file."""


class EchoedText(NamedTuple):
    """A text without echoes."""

    text: str
    """The text, with what its references stood for."""
    restored: int = 0
    """Number of references that were replaced."""
    unresolved: int = 0
    """Number of texts that begin like a reference, and are none of the prompt's."""


class _WrittenReferences:
    """References in each way in which they may be written in a text of this form."""

    def __init__(self, references: Mapping[str, str], form: TextForm) -> None:
        self._form: TextForm = form
        self._texts: dict[str, tuple[str, int, bool]] = {}
        for depth in _DEPTHS[form]:
            for is_ascii in (False, True):
                for reference, text in references.items():
                    self._texts.setdefault(_escaped(reference, depth, is_ascii), (text, depth, is_ascii))
        self._sorted = sorted(self._texts)
        self.longest = max(map(len, self._sorted), default=0)
        """Characters of the longest one."""

    def begins_with(self, text: str) -> bool:
        """Return True if one is longer than this text, and begins with it."""
        at = bisect_left(self._sorted, text)
        at += at < len(self._sorted) and self._sorted[at] == text
        return at < len(self._sorted) and self._sorted[at].startswith(text)

    def at(self, text: str, begin: int, front: str) -> tuple[int, str] | None:
        """Return the end of the longest one that stands here, behind these characters, and the text for it."""
        found: tuple[int, str] | None = None
        end = text.find(_END, begin, begin + self.longest)
        while end >= 0:
            reference = text[begin : end + len(_END)]
            if reference in self._texts:
                meant, depth, is_ascii = self._texts[reference]
                if front.endswith(_INNER_QUOTES[self._form]) and _escaped(reference, 1, is_ascii) == reference:
                    depth = _DEPTHS[self._form][-1]  # it looks the same at each depth
                found = end + len(_END), _escaped(meant, depth, is_ascii)
            end = text.find(_END, end + 1, begin + self.longest)
        return found


class Echoes:
    """The references of one prompt, to find them in the arguments of the tool calls that the model answers with.

    A model that copies a reference into a call means the text that it stands for: `write_file` would otherwise write
    the reference. Only references that were made in this prompt count: one that a tool's text imitates stays as it is,
    so that no text can ask for another one's contents. `rewrite` returns the echoes of a body.

    >>> echoes = Echoes({'[Word for word the result of the earlier call read({"path":"a"}).]': "The sea is deep."})
    >>> echoes.restored({"path": "b", "content": '[Word for word the result of the earlier call read({"path":"a"}).]'})
    {'path': 'b', 'content': 'The sea is deep.'}

    Args:
        references: The references of the prompt, in the default wording, and the text that each stands for.
    """

    def __init__(self, references: Mapping[str, str | None]) -> None:
        self._texts: dict[str, str | None] = dict(references)
        """None for a reference that stood for several texts, or for one that is not known."""
        self._written: dict[TextForm, _WrittenReferences] = {}

    @property
    def texts(self) -> Mapping[str, str | None]:
        """The references and their texts; None for one that stood for several."""
        return self._texts

    def add(self, references: Mapping[str, str | None]) -> None:
        """Add references of the same prompt; None for one whose text is not known."""
        for reference, text in references.items():
            if self._texts.setdefault(reference, text) != text:
                self._texts[reference] = None
        self._written.clear()

    def __bool__(self) -> bool:
        """Return True if the prompt has references."""
        return bool(self._texts)

    def restored(self, arguments: Any) -> Any:
        """Return the arguments of a call with the texts that references in them stand for.

        Args:
            arguments: A JSON text, as in chat completions and responses, or the value of one, as in messages. An input
                that is no JSON, as custom tools have it, needs `in_text` with the form "plain".
        """
        if isinstance(arguments, str):
            return self.in_text(arguments, "json").text
        return self.in_value(arguments)[0]

    def in_text(self, text: str, form: TextForm) -> EchoedText:
        """Return a text without echoes. O(characters)."""
        if _LEAD_IN.search(text) is None:
            return EchoedText(text)
        stream = EchoStream(self, form)
        whole = stream.feed(text) + stream.finish()
        return EchoedText(whole, stream.restored, stream.unresolved)

    def in_value(self, value: Any) -> tuple[Any, int, int]:
        """Return a JSON value without echoes in its strings, how many there were, and how many are unresolved."""
        restored = unresolved = 0

        def changed(value: Any) -> Any:
            nonlocal restored, unresolved
            if isinstance(value, str):
                found = self.in_text(value, "plain")
                restored += found.restored
                unresolved += found.unresolved
                return found.text
            if isinstance(value, dict):
                return {name: changed(inner) for name, inner in value.items()}
            return [changed(inner) for inner in value] if isinstance(value, list) else value

        return changed(value), restored, unresolved

    def written(self, form: TextForm) -> _WrittenReferences:
        """Return the references as they may be written in a text; made when it is first asked for."""
        if form not in self._written:
            texts = {reference: text for reference, text in self._texts.items() if text is not None}
            self._written[form] = _WrittenReferences(texts, form)
        return self._written[form]


class EchoStream:
    """A text that comes in pieces; what may be the beginning of a reference waits for its next piece."""

    def __init__(self, echoes: Echoes, form: TextForm) -> None:
        self.restored = 0
        """Number of references that were replaced."""
        self.unresolved = 0
        """Number of texts that begin like a reference, and are none of the prompt's."""
        self._echoes = echoes
        self._form: TextForm = form
        self._held = ""
        self._front = ""
        """The last two characters in front of the text that waits."""

    @property
    def held(self) -> str:
        """The text that waits."""
        return self._held

    def feed(self, piece: str) -> str:
        """Add a piece, and return the text that can pass on now. Amortised linear in the characters."""
        if not self._held and "[" not in piece:
            self._front = (self._front + piece[-2:])[-2:]
            return piece
        return self._passed(piece, is_end=False)

    def finish(self) -> str:
        """Return the text that waits; nothing follows it."""
        return self._passed("", is_end=True)

    def _passed(self, piece: str, *, is_end: bool) -> str:
        text, self._held = self._held + piece, ""
        passed: list[str] = []
        done = searched = 0
        while (begin := text.find("[", searched)) >= 0:
            found = None
            if _LEAD_IN.match(text, begin):
                references = self._echoes.written(self._form)
                rest = text[begin : begin + references.longest]
                if not is_end and begin + len(rest) == len(text) and references.begins_with(rest):
                    self._held = text[begin:]
                    text = text[:begin]
                    break
                found = references.at(text, begin, self._front + text[max(0, begin - 2) : begin])
                self.unresolved += found is None
            elif not is_end and any(lead.startswith(text[begin : begin + len(lead)]) for lead in _LEAD_INS):
                self._held = text[begin:]  # too short yet
                text = text[:begin]
                break
            searched = begin + 1
            if found is not None:
                passed += (text[done:begin], found[1])
                done = searched = found[0]
                self.restored += 1
        self._front = (self._front + text[-2:])[-2:]
        return "".join([*passed, text[done:]])


def _escaped(text: str, depth: int, is_ascii: bool) -> str:
    for _ in range(depth):
        text = json.dumps(text, ensure_ascii=is_ascii)[1:-1]
    return text
