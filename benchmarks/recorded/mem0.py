"""Chats with Mem0: memories next to each question, found by real searches in a real `Memory`."""

from __future__ import annotations

import math
import os
import random
import re
import tempfile
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("MEM0_TELEMETRY", "False")  # both are read when Mem0 is imported
os.environ.setdefault("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))

from mem0 import AsyncMemory, Memory
from mem0.embeddings.base import EmbeddingBase
from openai import AsyncOpenAI, OpenAI
from qdrant_client import QdrantClient

from recorded import INSTRUCTIONS, Application, Arm, Engine, How
from warmprefix import Branch, ContextBlock, ContextPlanner
from warmprefix.errors import StoreError
from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory, MemoryChat

_DIMENSIONS = 64

Messages = list[dict[str, Any]]


class _HashedWords(EmbeddingBase):  # type: ignore[misc]
    """Embedding by hashed word counts: texts that share more words are nearer."""

    def embed(self, text: str, memory_action: str | None = None) -> Any:
        vector = [0.0] * _DIMENSIONS
        for word in re.findall(r"\w{3,}", text.lower()):
            vector[zlib.crc32(word.encode("utf-8", "replace")) % _DIMENSIONS] += 1.0
        length = math.sqrt(sum(x * x for x in vector)) or 1.0
        return [x / length for x in vector]


class Mem0Application(Application):
    """A chat that appends what Mem0 found to its history; a subclass names the conversation.

    Every passage is stored as a memory of the tenant before the turn, and the search is restricted to the passages of
    the turn. With the history shown, `MemoryChat` holds it.
    """

    needs = ("mem0", "openai")

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self._client = OpenAI(base_url=engine.base_url, api_key="none", max_retries=0)
        self._async_client = AsyncOpenAI(base_url=engine.base_url, api_key="none", max_retries=0)
        self._plain, self._async_plain = _open(Memory), _open(AsyncMemory)
        self._memory = self._plain if planner is None else ContextReuseMemory(self._plain, planner)
        self._async_memory = (
            self._async_plain if planner is None else AsyncContextReuseMemory(self._async_plain, planner)
        )
        self._stored: set[tuple[object, str, str]] = set()

    def turn(
        self,
        state: Any,
        question: str,
        passages: Sequence[ContextBlock],
        *,
        conversation: str,
        tenant: str | None,
        how: How,
    ) -> Any:
        history: Messages = state["messages"] if state else [{"role": "system", "content": INSTRUCTIONS}]
        user = tenant or "everyone"
        if how == "cancel":
            work = self._aturn(history, question, passages, user, self._named(state, conversation))
            return self.cancelled(work)
        for passage in passages:
            if self._is_new(self._plain, passage, user):
                self._plain.add(passage.text, infer=False, **_owned(passage, user))
        found = self._memory.search(question, **_search(passages, user), **self._named(state, conversation))
        messages = self._messages(history, question, found)
        answer: str | None = None
        try:
            answer = self._answer(messages, how)
        finally:
            if answer is None and self.arm == "record":
                self._memory.abandon(found)
        if answer is None:  # the user has closed the stream, so the application keeps nothing
            return None
        turn_id = uuid.uuid4().hex
        if self.arm == "record":
            self._memory.commit(found, turn_id)
        return _kept(messages, answer, turn_id)

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns; the history that remains has an id without a record."""
        messages = state["messages"]
        if len(messages) < 2 or not self.may_cut(conversation, tenant):
            return None
        place = 1 + 2 * rng.randrange(len(messages) // 2)
        kept = messages[:place] if rng.random() < 0.5 else [messages[0], *messages[place:]]
        return {"messages": MemoryChat(history=kept).messages if self.arm == "shown" else kept, "id": uuid.uuid4().hex}

    def named(self, state: Any, conversation: str) -> dict[str, Any]:
        """Return how a search names its conversation."""
        raise NotImplementedError

    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        """Return True if the history may be cut now."""
        return True

    def close(self) -> None:
        self._client.close()
        self.run(self._async_client.close())
        self._plain.close()
        self._async_plain.close()
        super().close()

    async def _aturn(
        self,
        history: Messages,
        question: str,
        passages: Sequence[ContextBlock],
        user: str,
        named: dict[str, Any],
    ) -> Any:
        for passage in passages:
            if self._is_new(self._async_plain, passage, user):
                await self._async_plain.add(passage.text, infer=False, **_owned(passage, user))
        found = await self._async_memory.search(question, **_search(passages, user), **named)
        messages: Any = self._messages(history, question, found)
        completed = await self._async_client.chat.completions.create(model=self.engine.model, messages=messages)
        turn_id = uuid.uuid4().hex
        if self.arm == "record":
            await self._async_memory.commit(found, turn_id)
        return _kept(messages, completed.choices[0].message.content or "", turn_id)

    def _named(self, state: Any, conversation: str) -> dict[str, Any]:
        return self.named(state, conversation) if self.arm == "record" else {}

    def _is_new(self, memory: object, passage: ContextBlock, user: str) -> bool:
        key = (memory, user, _key(passage))
        is_new = key not in self._stored
        self._stored.add(key)
        return is_new

    def _messages(self, history: Messages, question: str, found: dict[str, Any]) -> Messages:
        if self.arm == "shown":
            return MemoryChat(history=history).ask(question, found)
        if self.arm == "record":
            context = found["context"]
        else:
            context = "\n".join(f"- {memory['memory']}" for memory in found["results"])
        return [*history, {"role": "user", "content": f"{context}\n\n{question}"}]

    def _answer(self, messages: Any, how: How) -> str | None:
        if how != "stream" and how != "close":
            completed = self._client.chat.completions.create(model=self.engine.model, messages=messages)
            return completed.choices[0].message.content or ""
        answer = ""
        with self._client.chat.completions.create(model=self.engine.model, messages=messages, stream=True) as stream:
            for chunk in stream:
                answer += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if how == "close" and answer:
                    return None
        return answer


class BranchApplication(Mem0Application):
    """It names the turn that each prompt continues."""

    def named(self, state: Any, conversation: str) -> dict[str, Any]:
        return {"conversation": Branch(after=state["id"] if state else None)}


class NameApplication(Mem0Application):
    """It names the conversation, which has one history."""

    forks = False

    def named(self, state: Any, conversation: str) -> dict[str, Any]:
        return {"conversation": conversation}

    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        try:
            self._memory.forget(conversation, {"user_id": tenant or "everyone"})
        except StoreError:
            return False
        return True


def _open(kind: Any) -> Any:
    never_called = {"provider": "openai", "config": {"api_key": "none"}}
    store = {"client": QdrantClient(":memory:"), "collection_name": "memories", "embedding_model_dims": _DIMENSIONS}
    memory = kind.from_config(
        {
            "vector_store": {"provider": "qdrant", "config": store},
            "embedder": never_called,
            "llm": never_called,
            "history_db_path": ":memory:",
        }
    )
    memory.embedding_model = _HashedWords()
    return memory


def _key(passage: ContextBlock) -> str:
    return passage.fingerprint.hex()


def _owned(passage: ContextBlock, user: str) -> dict[str, Any]:
    return {"user_id": user, "metadata": {"passage": _key(passage)}}


def _search(passages: Sequence[ContextBlock], user: str) -> dict[str, Any]:
    wanted = {"user_id": user, "passage": {"in": [_key(passage) for passage in passages]}}
    return {"filters": wanted, "top_k": max(len(passages), 1), "threshold": 0.0}


def _kept(messages: Messages, answer: str, turn_id: str) -> dict[str, Any]:
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "id": turn_id}
