"""De-duplication against a conversation: its messages, or the store's record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, pairwise
from typing import Any, Protocol, runtime_checkable

from warmprefix.annotate import Templates, bracketed, has_bracket, header_labels
from warmprefix.blocks import ContextBlock
from warmprefix.labels import LABEL_CHARACTERS, content_label, label_candidates, seems_lasting, turn_labels
from warmprefix.plan import PlannedBlock, Reference
from warmprefix.quotes import OPENING_BYTES, folded, line_openings, opening
from warmprefix.stores import PreparedTurn, TurnRecord

__all__ = [
    "Message",
    "Resolution",
    "SdkMessage",
    "VisibleHistory",
    "as_mapping",
    "header_lines",
    "quotable_in",
    "resolve_from_record",
    "resolve_from_turn",
    "shown_labels",
]

Resolution = tuple[str, Reference | None]
"""A block's label, and the reference that replaces the block if the prompt already holds it."""


@runtime_checkable
class SdkMessage(Protocol):
    """A message as the OpenAI SDK returns it, or any other Pydantic model."""

    def model_dump(self, *, exclude_none: bool) -> Mapping[str, Any]:
        """Return the fields of the message."""
        ...


Message = str | Mapping[str, Any] | SdkMessage
"""A message's text, or an OpenAI-style message whose `content` is a string, a list of parts, or None."""

_HEADER = re.compile(rf"\[([{LABEL_CHARACTERS}]{{1,64}})\] ")
_NO_LINE_MORE = re.compile(r"\s*(?:\n|\Z)\s*(?:\n|\Z)")
"""What follows a passage: a line that follows directly may belong to it, as in another version of it."""
_BORDER = re.compile(rf"(?:^|\n)(?:{_HEADER.pattern})?\Z")
"""What may stand in front of a passage: the end of a line, and a label."""


class VisibleHistory:
    """The messages that this very prompt will hold in front of the new context.

    They alone decide which blocks become references: a block counts as seen if one of them contains it, whole and as
    rendered. So a history that was cut, edited, summarised or forked can't leave a dangling reference.
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        """Extract the text of the messages; linear in its length.

        Raises:
            TypeError: `messages` is one string or message, or contains something else.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            raise TypeError(f"history must be a sequence of messages, got one {type(messages).__name__}")
        self.is_empty = True
        """True if all messages are system or developer prompts, so that the context opens the prompt."""
        self._headers: dict[str, list[tuple[str, int]]] = {}
        self._given: dict[str, list[tuple[str, int]]] = {}
        """The headers that may be those of blocks: the model's own messages contain no block."""
        self._texts: list[str] = []
        self._folds: list[bytes] | None = None
        self._openings: Counter[bytes] | None = None
        """How many lines begin with these letters and digits."""
        looks: Counter[str] = Counter()
        for given in messages:
            message = given if isinstance(given, str) else as_mapping(given)
            if isinstance(message, str) or message.get("role") not in ("system", "developer"):
                self.is_empty = False
            for text in _texts(message):
                self._texts.append(text)
                looks.update(header_labels(text))
                by_model = isinstance(message, Mapping) and message.get("role") in ("assistant", "ai")
                for label, start in _headers(text):
                    self._headers.setdefault(label, []).append((text, start))
                    if not by_model:
                        self._given.setdefault(label, []).append((text, start))
        self._forged = {label for label, times in looks.items() if times > len(self._headers.get(label, ()))}
        """Labels that some line seems to begin with, though not exactly as a block does."""

    def holds(self, planned: PlannedBlock) -> bool:
        """Return True if the messages contain a block as the plan's reference names it."""
        text, label, templates = planned.block.text, planned.label, planned.templates
        if label:
            return label in self._headers and label not in self._forged and self._holds(label, text, templates)
        return self.quotable([text], templates) == [opening(text)]

    def quotable(self, texts: Sequence[str], templates: Templates) -> list[str]:
        """Return the opening of each text that a message contains as whole paragraphs, and empty strings for others.

        No other line begins with the opening: applications may divide passages by the ends of lines. O(length of the
        history) for each text.
        """
        if not self._texts:
            return [""] * len(texts)
        if self._folds is None:
            self._texts = [templates.without_quotes(text) for text in self._texts]
            self._folds = [folded(text) for text in self._texts]
        return [self._quotable(text, templates) for text in texts]

    def _quotable(self, text: str, templates: Templates) -> str:
        shown = list(dict.fromkeys([text, templates.escaped(text)]))
        times = sum([_paragraphs_of(message, form) for message in self._texts for form in shown if form in message])
        words = opening(text) if times else ""
        if not words:
            return ""
        fold = folded(words)
        found = sum([each.count(fold) for each in self._folds or ()])
        if found > times:  # perhaps only in the middle of other lines
            if self._openings is None:
                self._openings = Counter(chain.from_iterable(map(line_openings, self._texts)))
            found = self._openings[fold[:OPENING_BYTES]]
        return words if found == times else ""

    def labels(self, templates: Templates, is_text: Callable[[str, str], bool]) -> set[str]:
        """Return the labels that a line of the history begins with or a note names.

        Args:
            templates: The wording of the notes.
            is_text: Returns True if a line, passed after the label that it begins with, belongs to a block's text.
        """
        noted = (label for text in self._texts for label in templates.noted_labels(text))
        headed = (
            label
            for label, places in self._given.items()
            if not all(is_text(label, _line(text, start)) for text, start in places)
        )
        return {*headed, *noted}

    def resolve(self, blocks: Sequence[ContextBlock], labels: Sequence[str], templates: Templates) -> list[Resolution]:
        """Return a reference for each block that a message contains.

        The others stay in full. A label that the history also shows in front of another text is ambiguous: no reference
        names it, and no block gets it. One comparison for each place where the history shows one of a block's possible
        labels.
        """
        given = set(labels)
        referred: set[str] = set()
        resolved: dict[int, Resolution] = {}
        # The longest text first: a shorter one that it begins with would match the same place in the history.
        for i in sorted(range(len(blocks)), key=lambda i: -len(blocks[i].text)):
            reference = self._reference(blocks[i], labels[i], referred, templates)
            if reference is not None:
                referred.add(reference.label)
                resolved[i] = reference.label, reference
            else:
                free = self._free_label(blocks[i], labels[i], given)
                given.add(free)
                resolved[i] = free, None
        return [resolved[i] for i in range(len(blocks))]

    def _reference(self, block: ContextBlock, label: str, referred: set[str], templates: Templates) -> Reference | None:
        for candidate in (label, *label_candidates(block)):
            if candidate not in self._headers or candidate in self._forged or candidate in referred:
                continue
            if self._holds(candidate, block.text, templates):
                return Reference(candidate, None, templates.location_annotation([candidate]))
        return None

    def _holds(self, label: str, text: str, templates: Templates) -> bool:
        """Return True if each header with this label begins this whole block."""
        places = self._headers[label]
        for (message, start), (other, behind) in pairwise(places):
            if other is message and behind - start < len(text):  # no room for two of them
                return False
        for message, start in places:
            end = templates.matching_end(message, start, label, text)
            if end is None or message[end : end + 1] not in ("", "\r", "\n"):
                return False
        return True

    def _free_label(self, block: ContextBlock, label: str, given: set[str]) -> str:
        if self._is_unused(label):
            return label
        # An attacker who has the text can forge all its candidates, but no history is long enough for all numbers.
        numbered = (f"{content_label(block)}~{number}" for number in count(2))
        candidates = chain(label_candidates(block), numbered)
        return next(free for free in candidates if free not in given and self._is_unused(free))

    def _is_unused(self, label: str) -> bool:
        return label not in self._headers and label not in self._forged


def _paragraphs_of(message: str, text: str) -> int:
    """Return how many times a message holds a text between borders of paragraphs."""
    times = 0
    at = message.find(text)
    while at >= 0:
        end = at + len(text)
        before = message[max(at - 68, 0) : at]
        times += (_BORDER.search(before) is not None or not before) and _NO_LINE_MORE.match(message, end) is not None
        at = message.find(text, end)
    return times


def header_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield label and line for each line that begins like a block."""
    for label, start in _headers(text):
        yield label, _line(text, start)


def _headers(text: str) -> Iterator[tuple[str, int]]:
    if has_bracket(text):
        for header in _HEADER.finditer(text):
            if header.start() == 0 or text[header.start() - 1] == "\n":
                yield header[1], header.start()


def _line(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start:] if end < 0 else text[start:end]


def shown_labels(blocks: Sequence[ContextBlock]) -> list[str]:
    """Return the lasting labels that the texts contain in brackets.

    O(length of the texts). If the history is not shown, another block of the conversation may have such a label, or get
    it later.
    """
    inners = [inner for block in blocks if has_bracket(block.text) for inner in bracketed(block.text)]
    return list(dict.fromkeys([inner for inner in inners if seems_lasting(inner)]))


def quotable_in(blocks: Sequence[ContextBlock], keys: Sequence[str], record: PreparedTurn | TurnRecord) -> list[str]:
    """Return the opening of each block that the record holds, where no other passage in it has the block's key.

    Args:
        blocks: The blocks.
        keys: Their opening keys.
        record: The record of a named conversation, or of a turn.
    """
    if isinstance(record, TurnRecord):
        times = Counter([seen.label for seen in record.blocks])
        is_labelled = any(not label.startswith("^") for label in times if label)  # how those begin is unknown
        named = {seen.fingerprint: seen.label for seen in record.blocks if times[seen.label] == 1 and not is_labelled}
    else:
        named = {key: seen.label for key, seen in record.seen.items() if key not in record.contested}
    return [
        opening(block.text) if key and named.get(block.fingerprint) == key else ""
        for block, key in zip(blocks, keys, strict=True)
    ]


def resolve_from_record(
    blocks: Sequence[ContextBlock], labels: Sequence[str], record: PreparedTurn, templates: Templates
) -> list[Resolution]:
    """Return a reference for each block that the record holds, uncontested.

    ContextPilot, Alg. 3; O(len(blocks)). The other blocks stay in full. A seen block keeps the label it was sent with,
    contested or not. A new block whose label names another block of this conversation gets its content label instead.
    """
    resolved: list[Resolution] = []
    for block, label in zip(blocks, labels, strict=True):
        seen = record.seen.get(block.fingerprint)
        if seen is not None and seen.label.startswith("^"):  # it was sent without a label
            seen = None
        if seen is not None and block.fingerprint in record.contested:
            resolved.append((seen.label, None))
        elif seen is not None:
            note = templates.location_annotation([seen.label])
            resolved.append((seen.label, Reference(seen.label, seen.turn, note)))
        else:
            resolved.append((content_label(block) if label in record.taken else label, None))
    return resolved


def resolve_from_turn(blocks: Sequence[ContextBlock], record: TurnRecord, templates: Templates) -> list[Resolution]:
    """Return a reference for each block that the record of a turn holds with a label. O(len(blocks) + record).

    A new block gets a label that no text of the branch has. An id alone will do if the record is complete. Otherwise
    the label contains a part of the fingerprint: an unknown text may have the same id.
    """
    seen = {block.fingerprint: block for block in record.blocks if block.label and not block.label.startswith("^")}
    taken = {*record.others, *[block.label for block in seen.values()]}
    resolved: list[Resolution] = []
    for block in blocks:
        found, reference = seen.get(block.fingerprint), None
        if found is not None:
            label = found.label
            reference = Reference(label, found.turn, templates.location_annotation([label]))
        else:
            free = (label for label in turn_labels(block, record.partial) if label not in taken)
            label = next(free, content_label(block))
            taken.add(label)
        resolved.append((label, reference))
    return resolved


def as_mapping(message: object) -> Mapping[str, Any]:
    """Return a message as a mapping.

    Raises:
        TypeError: It is neither a mapping nor a message of the SDK.
    """
    if isinstance(message, SdkMessage) and not isinstance(message, type):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise TypeError(f"history must contain only str, mappings and messages of the OpenAI SDK, got {kind}")
    return message


def _texts(message: str | Mapping[str, Any], is_part: bool = False) -> Iterator[str]:
    """Yield all texts that a message shows; those of tools, too, which may be parts with parts of their own."""
    for content in (message,) if isinstance(message, str) else (message.get("content"), message.get("output")):
        if isinstance(content, str):
            yield content
        elif isinstance(content, Iterable):
            for part in content:
                text = part.get("text") if isinstance(part, Mapping) else part
                if isinstance(text, str):
                    yield text
                elif isinstance(part, Mapping) and not is_part:
                    yield from _texts(part, True)
