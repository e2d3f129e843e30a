"""An append-only chat, whose messages all stay in the engine's prefix cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from warmprefix import ContextBlock, ContextPlanner, Templates
from warmprefix.forks import fork_safe_lock
from warmprefix.traces import NoRecorder
from warmprefix_mem0.memory_order import short_id, text_of
from warmprefix_requests import MemoryNotes, memories_of

__all__ = ["MemoryChat"]

Message = dict[str, Any]

_TEMPLATES = Templates()
_BEFORE, _AFTER = map(re.escape, _TEMPLATES.location.split("{labels}"))
_REFERENCE = re.compile(rf"^{_BEFORE}(\[\S+\](?:, \[\S+\])*){_AFTER}\n?", re.MULTILINE)
_HEADER = re.compile(r"^\[(\S+)\] ", re.MULTILINE)


class MemoryChat:
    """Messages of one conversation, with each turn's memories next to its question.

    If each turn builds its memories into the system prompt, the prompt changes at its beginning, and the engine can
    reuse nothing of the history after it. Here each turn adds its memories after the history: memories that no message
    shows yet in full, and a reference to the others. The class calls no model, so it works with every client.

        chat = MemoryChat("You are Ann's assistant. A [label] marks what you remember of her.")
        messages = chat.ask(question, memory.search(question, filters={"user_id": "ann"}))
        answer = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        chat.commit(messages, answer)

    The prompt grows in each turn, so cut a long history and continue with the rest: references depend only on the
    messages in the prompt. An updated memory has another text and is sent in full. The history keeps its old text, and
    the text of deleted memories.

    With `repeats="omit"`, memories have no labels, and there are no references: each turn adds only what changed, and
    says which text an update replaces, if this object has seen both. Prompts are shorter.
    """

    def __init__(
        self,
        system: str | None = None,
        *,
        history: Iterable[Mapping[str, Any]] = (),
        repeats: Literal["refer", "omit"] = "refer",
    ) -> None:
        """Start a conversation, or continue one from saved, cut or edited messages.

        Args:
            system: The system prompt, before the history.
            history: OpenAI-style messages. References to memories that these messages do not show are removed.
            repeats: What a turn shows of memories that the history shows: a reference, or nothing. The same for all of
                a conversation.

        Raises:
            TypeError: A message is not a mapping.
            ValueError: `repeats` has another value.
        """
        if repeats not in ("refer", "omit"):
            raise ValueError(f"repeats must be 'refer' or 'omit', got {repeats!r}")
        self._omits = repeats == "omit"
        self._texts: dict[str, dict[str, None]] = {}
        before = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[Message] = [*before, *_without_stale_references(map(_copy, history))]
        self._lock = fork_safe_lock()

    @property
    def messages(self) -> list[Message]:
        """Copies of the committed messages."""
        return [dict(message) for message in self._messages]

    def ask(self, question: str, memories: Mapping[str, Any] | Iterable[Mapping[str, Any] | str] = ()) -> list[Message]:
        """Return the messages to send: the history, then the memories with the question. Changes nothing.

        New memories come first, in relevance order, then one sentence that refers to all the others.

        Args:
            question: Question of the user.
            memories: Result of a Mem0 `search`, or a sequence of memories or of their texts.

        Raises:
            TypeError: `memories` has another type, or a memory has no text.
        """
        messages = self.messages
        if self._omits:
            note = self._note(messages, memories)
            return [*messages, {"role": "user", "content": f"{note}\n\n{question}" if note else question}]
        blocks = [_block(memory) for memory in _listed(memories)]
        # A new planner per call: only the messages decide. They include the question, because a label that the user
        # writes must not name a memory.
        planner = ContextPlanner(policy="relevance", recorder=NoRecorder())
        plan = planner.plan(
            blocks, placement="tail", history=[*messages, question], order_locked=True, annotate="labels"
        )
        lines = [planned.render() for planned in plan.blocks if planned.reference is None]
        if plan.references:
            lines.append(_TEMPLATES.location_annotation([reference.label for reference in plan.references]))
        content = "\n".join(lines) + "\n\n" + question if lines else question
        return [*messages, {"role": "user", "content": content}]

    def _note(self, messages: Iterable[Message], memories: object) -> str:
        with self._lock:
            notes = MemoryNotes(self._texts)
            for message in messages:
                content = message.get("content")
                if message.get("role") == "user":
                    for part in content if isinstance(content, list) else [content]:
                        notes.read(_text(part))
            return notes.note(memories_of(memories))

    def commit(self, messages: Iterable[Mapping[str, Any]], answer: str) -> None:
        """Add a question and its answer to the history; a call that failed before leaves no trace.

        Args:
            messages: The result of `ask`, optionally followed by the messages of tool calls, each a mapping. For
                messages of the OpenAI client, use `model_dump(exclude_unset=True)`.
            answer: The assistant's answer.

        Raises:
            TypeError: A message is not a mapping.
            ValueError: `messages` does not continue the history, because another turn was committed in between.
        """
        extended = [*map(_copy, messages), {"role": "assistant", "content": answer}]
        with self._lock:
            if extended[: len(self._messages)] != self._messages:
                raise ValueError(
                    f"messages must begin with all of this chat's messages ({len(self._messages)}), got "
                    f"{len(extended) - 1} that begin otherwise: another turn was committed since `ask`"
                )
            self._messages = extended


def _copy(message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"messages must contain only mappings, got {type(message).__name__}")
    return dict(message)


def _without_stale_references(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages without references to memories that no earlier message shows; copy the changed ones."""
    shown: set[str] = set()

    def keep_valid(reference: re.Match[str]) -> str:
        labels = reference[1][1:-1].split("], [")
        kept = [label for label in labels if label in shown]
        if kept == labels:
            return reference[0]
        return _TEMPLATES.location_annotation(kept) + "\n" if kept else ""

    def checked(text: str, role: object) -> str:
        kept = _REFERENCE.sub(keep_valid, text) if role == "user" else text
        shown.update(_HEADER.findall(kept))
        return text if kept == text else kept.lstrip("\n")

    for message in messages:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            content = checked(content, role)
        elif isinstance(content, list):
            parts = [_with_text(part, checked(text, role)) if (text := _text(part)) else part for part in content]
            # Drop a part that held only references: some endpoints refuse an empty text.
            content = [part for part, before in zip(parts, content, strict=True) if part == before or _text(part)]
        if content == message.get("content"):
            yield message
        elif content:  # some endpoints refuse a message without content
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
        raise TypeError(f"memories must be a search result or a sequence of memories, got {kind}")
    listed: Iterable[Mapping[str, Any] | str] = found
    return listed


def _block(memory: Mapping[str, Any] | str) -> ContextBlock:
    text = memory if isinstance(memory, str) else text_of(memory)
    if text is None:
        raise TypeError(f"memories must contain texts, or mappings with a text under 'memory', got {memory!r}")
    return ContextBlock(text, id=short_id(text))
