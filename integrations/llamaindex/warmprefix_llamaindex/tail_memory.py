"""A memory whose blocks stand in front of the questions, behind a system prompt that stays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.memory import FactExtractionMemoryBlock, Memory, StaticMemoryBlock
from llama_index.core.storage.chat_store.base_db import MessageStatus
from pydantic import PrivateAttr

from warmprefix_requests import Memory as Remembered
from warmprefix_requests import MemoryNotes

__all__ = ["TailMemory"]

_UNITS = re.compile(r"\n(?=<fact>)|\n\n+")
"""What separates the memories in a block's text: facts stand in lines, others in paragraphs."""
_MESSAGE = "<message role='"
_NODES = re.compile(rf"\n\n+(?={_MESSAGE})")
"""What separates the nodes of a `VectorMemoryBlock`, whose messages have paragraphs of their own."""


class TailMemory(Memory):
    """A `Memory` that shows the texts of its blocks in front of the question for which they were found.

        memory = TailMemory.from_defaults(session_id="ann", memory_blocks=[...])
        await agent.run("What do I drink?", memory=memory)

    A plain `Memory` puts them into the system prompt, or into the newest message of the user only: the prompt changes,
    and the engine can reuse nothing behind the change. Here each question keeps its note, with what no earlier note
    shows, so the prompt only grows. Blocks are asked once per question.

    The stored messages stay as they are. The notes are in this object: in another process, they begin anew. They also
    do if they and the messages exceed `token_limit`. Blocks that return other things than text, and engines that read
    the memory before they put the question into it, get what a `Memory` returns.
    """

    _found: list[tuple[bytes, dict[str, str]]] = PrivateAttr(default_factory=list)
    """For each question that blocks were asked for, its digest and their texts, in order."""

    @classmethod
    def class_name(cls) -> str:
        """Name of this class."""
        return "TailMemory"

    async def aget(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002 - LlamaIndex's name
        **block_kwargs: Any,
    ) -> list[ChatMessage]:
        """Return the messages with the notes."""
        history = await self.sql_store.get_messages(self.session_id, status=MessageStatus.ACTIVE)
        questions = {
            place: _digest(history[max(place - 1, 0) : place + 1])
            for place, message in enumerate(history)
            if message.role == MessageRole.USER
        }
        found, newest = self._aligned(questions), max(questions, default=0)
        if questions and history[-1].role != MessageRole.ASSISTANT and newest not in found:
            contents = await self._get_memory_blocks_content(history, **block_kwargs)
            texts = {name: text for name, content in contents.items() if (text := _text(content)) is not None}
            if len(texts) < len(contents):
                found = {}
            else:
                sizes = [sum(map(self._estimate_token_count, parts)) for parts in (texts.values(), history)]
                kept = await self._truncate_memory_blocks(texts, *sizes)
                # A block that has no text now was emptied; one that was cut or dropped for want of room says nothing.
                emptied = dict.fromkeys(self._whole_blocks() - texts.keys(), "")
                found[newest] = emptied | {name: text for name, text in texts.items() if kept.get(name) == text}
        if not found:
            return await super().aget(input, **block_kwargs)
        noted = await self._noted(history, found)
        if sum(map(self._estimate_token_count, noted)) > self.token_limit:
            found = {place: texts for place, texts in found.items() if place == newest}
            noted = await self._noted(history, found)
        self._found = [(questions[place], texts) for place, texts in found.items()]
        return noted

    def _aligned(self, questions: Mapping[int, bytes]) -> dict[int, dict[str, str]]:
        """Return what was found for these questions, by their places."""
        found: dict[int, dict[str, str]] = {}
        begin = 0
        for place, digest in questions.items():
            for at in range(begin, len(self._found)):
                if self._found[at][0] == digest:
                    found[place], begin = self._found[at][1], at + 1
                    break
        return found

    def _whole_blocks(self) -> set[str]:
        """Return the names of the blocks that always return all that they have."""
        kinds = FactExtractionMemoryBlock, StaticMemoryBlock
        return {block.name for block in self.memory_blocks if isinstance(block, kinds)}

    async def _noted(self, history: Sequence[ChatMessage], found: Mapping[int, dict[str, str]]) -> list[ChatMessage]:
        messages = list(history)
        notes = {block.name: MemoryNotes() for block in self.memory_blocks}
        whole, kinds = self._whole_blocks(), {block.name: type(block) for block in self.memory_blocks}
        for place, texts in found.items():
            written: dict[str, Any] = {
                name: note
                for name in notes
                if name in texts
                and (note := notes[name].note(map(Remembered, _units(kinds[name], texts[name])), is_all=name in whole))
            }
            if written:
                shown, _ = await self._format_memory_blocks(written)
                blocks = self.memory_blocks_template.format_messages(memory_blocks=shown)[0].blocks
                message = messages[place]
                messages[place] = message.model_copy(
                    update={"blocks": [*blocks, TextBlock(text="\n"), *message.blocks]}
                )
        return messages


def _text(content: Any) -> str | None:
    """Return the text of a block's content; None if it is not only text."""
    if isinstance(content, str):
        return content
    if all(isinstance(part, TextBlock) for part in content):
        return "\n\n".join([part.text for part in content])
    return None


def _units(kind: type, text: str) -> list[str]:
    """Return the memories in a block's text; equal paragraphs of one memory stay."""
    if issubclass(kind, StaticMemoryBlock):
        return [text]
    return (_NODES if _MESSAGE in text else _UNITS).split(text)


def _digest(messages: Sequence[ChatMessage]) -> bytes:
    """Return a digest of a question and the message in front of it: short questions come again."""
    text = "".join([message.model_dump_json() for message in messages])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
