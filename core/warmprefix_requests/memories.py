"""Memories that change from turn to turn, as notes next to the questions. Pure: no I/O.

Memories in the system prompt change all that stands behind them. A note stands in front of the question that it was
made for, and stays there, so a prompt that grows keeps its beginning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Memory", "MemoryNotes", "memories_of"]

_FIRST, _ANEW = "[Memories]", "[Memories, in place of all above]"
_LINE, _GONE = "- {}", "[Removed from the memories: {}]"
"""The second quotes a memory that an note before shows: the history keeps its text."""
_REMOVED = re.compile(r"\[Removed from the memories: (.*)\]", re.DOTALL)
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
    item: Any = found
    value = getattr(item, "value", None)
    if not isinstance(value, Mapping):
        raise TypeError(f"memories must contain texts, or mappings with a text under 'memory', got {found!r}")
    texts = [value[name] for name in _TEXT_FIELDS if isinstance(value.get(name), str)]
    text = texts[0] if texts else json.dumps(value, ensure_ascii=False, default=str)
    return Memory(text, json.dumps([*item.namespace, item.key]))


class MemoryNotes:
    """The notes of one prompt, in the order of its questions.

    Each note has what the notes before it do not show: new memories, and the old text of those that have another text
    now. So the notes depend only on the memories that were found for this question and those in front of it, and a
    prompt from which messages were cut has notes of its own. A memory that is merely not found again is not called
    wrong.
    """

    def __init__(self, texts: dict[str, dict[str, None]] | None = None) -> None:
        """Start a prompt.

        Args:
            texts: The texts that each id had so far, the latest one last; `note` adds to it. Pass one mapping for all
                prompts of a chat whose notes you `read`, as they do not show ids.
        """
        self._texts = {} if texts is None else texts
        self._shown: dict[str, None] = {}
        """Texts that hold, as far as the notes say, as they are written."""

    def read(self, message: str) -> None:
        """Take the note at the beginning of a message, if there is one, as the next note of the prompt."""
        lines = re.split(r"\n(?!  )", message.partition("\n\n")[0])
        if not lines[0].startswith((_FIRST, _ANEW, _GONE.partition("{")[0])):
            return
        for line in lines:
            if line == _ANEW:
                self._shown.clear()
            elif line.startswith("- "):
                self._shown[line[2:]] = None
            elif removed := _REMOVED.fullmatch(line):
                self._shown.pop(removed[1], None)

    def note(self, memories: Iterable[Memory], *, is_all: bool = False) -> str:
        """Return the note of the next question; empty if there is nothing to add. O(memories shown).

        Args:
            memories: What was found for the question, in the order in which new ones are shown.
            is_all: There are no other memories, so those that are missing were removed.
        """
        given = [(_one_item(memory.text), memory.id) for memory in memories if memory.text.strip()]
        found = dict.fromkeys([text for text, _ in given])
        outdated: set[str] = set()
        for text, id in given:  # several ids may have one text
            if id is not None:
                texts = self._texts.setdefault(id, {})
                texts.pop(text, None)
                outdated |= texts.keys()
                texts[text] = None
        if is_all:
            outdated = self._shown.keys() - found
        elif outdated:
            outdated -= {next(reversed(texts)) for texts in self._texts.values()} | found.keys()
        gone = [text for text in self._shown if text in outdated]
        new = [text for text in found if text not in self._shown]
        for text in gone:
            del self._shown[text]
        self._shown.update(dict.fromkeys(new))
        changes = [*([_FIRST] if new else []), *map(_LINE.format, new), *map(_GONE.format, gone)]
        anew = [_ANEW, *map(_LINE.format, found)]
        if gone and found and is_all and sum(map(len, anew)) < sum(map(len, changes)):
            self._shown = dict.fromkeys(found)
            return "\n".join(anew)
        return "\n".join(changes)


def _one_item(text: str) -> str:
    """Return a text in which no line but the first can be taken for one of a note."""
    return "\n  ".join(text.splitlines())
