"""Memories that change from turn to turn, as notes next to the questions. Pure: no I/O.

Memories in the system prompt change all that stands behind them. A note stands in front of the question that it was
made for, and stays there, so a prompt that grows keeps its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Memory", "MemoryNotes", "memories_of"]

_FIRST, _ANEW = "[Memories]", "[Memories, in place of all above]"
_LINE, _GONE = "- {}", "[Removed from the memories: {}]"
"""The second quotes a memory that an note before shows: the history keeps its text."""
_TEXT_FIELDS = ("text", "content", "memory", "data")


class Memory(NamedTuple):
    """A text that an application remembers."""

    text: str
    id: str | None = None
    """What stays the same when the text changes; None if nothing does."""


def memories_of(found: object) -> list[Memory]:
    """Return the memories in the result of a search.

    Args:
        found: A result of Mem0's `search`, or a sequence of texts, of `Memory`, of Mem0's memories, or of the items of
            LangGraph's store. The text of such an item is the string under `text`, `content`, `memory` or `data` of its
            value, or else the value as JSON.

    Raises:
        TypeError: It is something else, or a memory has no text.
    """
    listed = found.get("results") if isinstance(found, Mapping) else found
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise TypeError(f"memories must be a search result or a sequence of memories, got {type(found).__name__}")
    return list(map(_memory, listed))


def _memory(found: Any) -> Memory:
    if isinstance(found, Memory):
        return found
    if isinstance(found, str):
        return Memory(found)
    if isinstance(found, Mapping) and isinstance(found.get("memory"), str):
        id = found.get("id")
        return Memory(found["memory"], id if isinstance(id, str) else None)
    value = getattr(found, "value", None)
    if not isinstance(value, Mapping):
        raise TypeError(f"memories must contain texts, or mappings with a text under 'memory', got {found!r}")
    texts = [value[name] for name in _TEXT_FIELDS if isinstance(value.get(name), str)]
    text = texts[0] if texts else json.dumps(value, ensure_ascii=False, default=str)
    return Memory(text, json.dumps([*found.namespace, found.key]))


class MemoryNotes:
    """The notes of one prompt, in the order of its questions.

    Each note has what the notes before it do not show: new memories, and the old text of those that have another text
    now. So the notes depend only on the memories that were found for this question and those in front of it, and a
    prompt from which messages were cut has notes of its own. A memory that is merely not found again is not called
    wrong.
    """

    def __init__(self) -> None:
        self._shown: dict[str, None] = {}
        """Texts that hold, as far as the notes say."""
        self._latest: dict[str, str] = {}
        """The latest text under each id."""

    def note(self, memories: Iterable[Memory], *, is_all: bool = False) -> str:
        """Return the note of the next question; empty if there is nothing to add. O(memories shown).

        Args:
            memories: What was found for the question, in the order in which new ones are shown.
            is_all: There are no other memories, so those that are missing were removed.
        """
        found = {memory.text: memory.id for memory in memories if memory.text.strip()}
        outdated = {
            old for text, id in found.items() if id is not None and (old := self._latest.get(id, text)) not in found
        }
        self._latest.update({id: text for text, id in found.items() if id is not None})
        outdated = self._shown.keys() - found if is_all else outdated and outdated - set(self._latest.values())
        gone = [text for text in self._shown if text in outdated]
        new = [text for text in found if text not in self._shown]
        for text in gone:
            del self._shown[text]
        self._shown.update(dict.fromkeys(new))
        changes = [*([_FIRST] if new else []), *_written(_LINE, new), *_written(_GONE, gone)]
        if gone and found and is_all:
            anew = [_ANEW, *_written(_LINE, found)]
            changes = min(changes, anew, key=lambda lines: sum(map(len, lines)))
        return "\n".join(changes)


def _written(form: str, texts: Iterable[str]) -> list[str]:
    """Return the texts in a form, so that no line but the first can be taken for one of a note."""
    return [form.format("\n  ".join(text.splitlines())) for text in texts]
