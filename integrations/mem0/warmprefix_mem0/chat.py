"""A chat whose messages are only ever appended to, so that all of them stay in the engine's prefix cache."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from warmprefix import ContextBlock, ContextPlanner, Templates, fingerprint
from warmprefix.traces import NoRecorder
from warmprefix_mem0.arrange import text_of

__all__ = ["MemoryChat"]

Message = dict[str, Any]

_TEMPLATES = Templates()
_BEFORE, _AFTER = map(re.escape, _TEMPLATES.location.split("{labels}"))
_REFERENCE = re.compile(rf"^{_BEFORE}(\[\S+\](?:, \[\S+\])*){_AFTER}\n?", re.MULTILINE)
_HEADER = re.compile(r"^\[(\S+)\] ", re.MULTILINE)


class MemoryChat:
    """One conversation's messages, with each turn's memories next to its question instead of in the system prompt.

    Memories that are put into the system prompt anew each turn change the prompt at its beginning, so the engine can
    keep nothing of the history behind them. Here a turn adds its memories behind the history: those that no message
    shows yet in full, the others by a reference. It calls no model, so it goes with every client.

        chat = MemoryChat("You are Ann's assistant. A [label] marks what you remember of her.")
        messages = chat.ask(question, memory.search(question, filters={"user_id": "ann"}))
        answer = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        chat.commit(messages, answer)

    The prompt grows by what is new in each turn, so cut a long history and go on with the rest: the messages that the
    prompt holds decide alone what is referred to. A memory that was updated has another text and is sent in full; what
    the history says of it stays there, and so does a memory that was deleted.
    """

    def __init__(self, system: str | None = None, *, history: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin, or go on with messages that were saved, cut or edited.

        Args:
            system: The system prompt, in front of the history.
            history: OpenAI-style messages. References in them to memories that were cut off are taken out.

        Raises:
            TypeError: A message is no mapping.
        """
        before = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[Message] = [*before, *_without_stale_references(map(_copy, history))]
        self._lock = threading.Lock()

    @property
    def messages(self) -> list[Message]:
        """The history: what was committed, in copies."""
        return [dict(message) for message in self._messages]

    def ask(self, question: str, memories: Mapping[str, Any] | Iterable[Mapping[str, Any] | str] = ()) -> list[Message]:
        """The messages to send: the history, then the question behind its memories. Nothing is remembered of it.

        Of the memories, new ones come first, in relevance order, then one sentence that refers to all the others.

        Args:
            question: What the user says.
            memories: What `search` of Mem0's memories returned, or such memories, or their texts.

        Raises:
            TypeError: A memory has no text, or `memories` are none of these.
        """
        messages = self.messages
        blocks = [_block(memory) for memory in _listed(memories)]
        # This planner remembers nothing: the messages alone decide. The question is one of them, since a label that the
        # user writes must not name a memory.
        planner = ContextPlanner(policy="relevance", recorder=NoRecorder())
        plan = planner.plan(blocks, placement="tail", history=[*messages, question], order_locked=True)
        lines = [planned.render() for planned in plan.blocks if planned.reference is None]
        if plan.references:
            lines.append(_TEMPLATES.location_annotation([reference.label for reference in plan.references]))
        content = "\n".join(lines) + "\n\n" + question if lines else question
        return [*messages, {"role": "user", "content": content}]

    def commit(self, messages: Iterable[Mapping[str, Any]], answer: str) -> None:
        """The model answered: both become history. Until then, a failed call leaves nothing behind.

        Args:
            messages: What `ask` returned, or that and the messages of tool calls that followed, each a mapping: of a
                message of the OpenAI client's, `model_dump(exclude_unset=True)`.
            answer: The assistant's.

        Raises:
            TypeError: A message is no mapping.
            ValueError: `messages` does not continue the history, as another turn was committed since it was made.
        """
        extended = [*map(_copy, messages), {"role": "assistant", "content": answer}]
        with self._lock:
            if extended[: len(self._messages)] != self._messages:
                raise ValueError("messages must begin with all of this chat's messages; it has gone on since")
            self._messages = extended


def _copy(message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"a message must be a mapping, got {type(message).__name__}")
    return dict(message)


def _without_stale_references(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages, copied where a reference names a memory that no message in front of it shows."""
    shown: set[str] = set()

    def still_true(reference: re.Match[str]) -> str:
        labels = reference[1][1:-1].split("], [")
        kept = [label for label in labels if label in shown]
        if kept == labels:
            return reference[0]
        return _TEMPLATES.location_annotation(kept) + "\n" if kept else ""

    def checked(text: str, role: object) -> str:
        kept = _REFERENCE.sub(still_true, text) if role == "user" else text
        shown.update(_HEADER.findall(kept))
        return text if kept == text else kept.lstrip("\n")

    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            content = checked(content, role)
        elif isinstance(content, list):
            parts = [_with_text(part, checked(text, role)) if (text := _text(part)) else part for part in content]
            # A part that held nothing else is left out: some endpoints refuse an empty text.
            content = [part for part, before in zip(parts, content, strict=True) if part == before or _text(part)]
        if content == message.get("content"):
            yield message
        elif content:  # some endpoints refuse a message without any
            yield {**message, "content": content}


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _with_text(part: Any, text: str) -> Any:
    return {**part, "text": text} if isinstance(part, Mapping) else text


def _listed(memories: Mapping[str, Any] | Iterable[Mapping[str, Any] | str]) -> Iterable[Mapping[str, Any] | str]:
    found = memories.get("results") if isinstance(memories, Mapping) else memories
    if isinstance(found, str) or not isinstance(found, Iterable):
        kind = type(memories).__name__
        raise TypeError(f"memories must be a search result or a sequence of memories, got one {kind}")
    listed: Iterable[Mapping[str, Any] | str] = found
    return listed


def _block(memory: Mapping[str, Any] | str) -> ContextBlock:
    text = memory if isinstance(memory, str) else text_of(memory)
    if text is None:
        raise TypeError(f"a memory must have its text under 'memory', got {memory!r}")
    # Of its text, as the labels made by default, but half as long: it is shown again each time the memory comes again.
    return ContextBlock(text, id=f"m{fingerprint(text).hex()[:4]}")
