"""Chats in LlamaIndex: a workflow with a persisted context, known by its turns, and a chat engine, known by a name."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai_like import OpenAILike
from llama_index_instrumentation.dispatcher import instrument_tags
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

from recorded import INSTRUCTIONS, Application, Arm, Engine, How
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.errors import StoreError
from warmprefix_llamaindex import ContextReusePostprocessor

_shown: ContextVar[list[ChatMessage]] = ContextVar("shown_messages")
"""The history of this task's turn, for arm `"shown"`."""


class LlamaIndexApplication(Application):
    """A model, and a postprocessor that a subclass tells what it knows of the history."""

    needs = ("llama_index.core", "llama_index.llms.openai_like", "workflows")

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self._client, self._async_client = DefaultHttpxClient(), DefaultAsyncHttpxClient()
        clients: Any = {"http_client": self._client, "async_http_client": self._async_client}  # they are no fields
        self.llm = OpenAILike(
            model=engine.model,
            api_base=engine.base_url,
            api_key="none",
            is_chat_model=True,
            context_window=10_000_000,
            max_retries=0,
            **clients,
        )
        self.warm: ContextReusePostprocessor | None = None
        if planner is not None:
            shown = (lambda query: _shown.get()) if arm == "shown" else None
            self.warm = ContextReusePostprocessor(planner=planner, placement="tail", conversation=shown)

    def close(self) -> None:
        self._client.close()
        self.run(self._async_client.aclose())
        super().close()


class Retrieved(Event):
    """What the retriever returned, as prompts show it."""

    text: str
    turn: str | None


class Chat(Workflow):
    """Retrieves in one step and answers in another; messages and turn live in the context."""

    def __init__(self, application: LlamaIndexApplication) -> None:
        super().__init__(timeout=60)
        self._application = application

    @step
    async def retrieve(self, ctx: Context, event: StartEvent) -> Retrieved:
        """Plan the passages; the planner sees the turn that the context continues."""
        nodes, warm = _nodes(event.passages), self._application.warm
        if warm is not None:
            _shown.set(await ctx.store.get("messages", default=_beginning()))
            tags = {"after_turn": await ctx.store.get("turn", default=None), "tenant": event.tenant}
            with instrument_tags(tags):
                nodes = await warm.apostprocess_nodes(nodes, query_bundle=QueryBundle(event.question))
        return Retrieved(text=f"{_text(nodes)}\n\n{event.question}", turn=nodes[0].metadata.get("warmprefix_turn"))

    @step
    async def answer(self, ctx: Context, event: Retrieved) -> StopEvent:
        """Ask the model, and store the turn."""
        start = await ctx.store.get("how")
        llm = self._application.llm
        messages = [*await ctx.store.get("messages", default=_beginning()), _message("user", event.text)]
        answer: ChatMessage | None = None
        if start == "plain":
            answer = (await llm.achat(messages)).message
        else:
            stream = await llm.astream_chat(messages)
            async for response in stream:
                answer = response.message
                if start == "close" and answer.content:
                    await stream.aclose()
                    return StopEvent(result=False)
        assert answer is not None, "the stream had no chunks"
        await ctx.store.set("messages", [*messages, _message("assistant", answer.content or "")])
        await ctx.store.set("turn", event.turn)
        return StopEvent(result=True)


class WorkflowApplication(LlamaIndexApplication):
    """A workflow whose context is persisted after each turn, resumed by any worker, and forked."""

    def __init__(self, arm: Arm, engine: Engine, planner: ContextPlanner | None, folder: Path) -> None:
        super().__init__(arm, engine, planner, folder)
        self._chat = Chat(self)

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
        return self.run(self._turn(state, question, passages, tenant, how))

    async def _turn(
        self, state: Any, question: str, passages: Sequence[ContextBlock], tenant: str | None, how: How
    ) -> Any:
        ctx = Context(self._chat) if state is None else Context.from_dict(self._chat, state)
        await ctx.store.set("how", "plain" if how == "cancel" else how)
        handler = self._chat.run(ctx=ctx, question=question, passages=list(passages), tenant=tenant)
        if how == "cancel":  # as the framework does: the run's tasks are cancelled wherever they are
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.002, 0.004, 0.008, 0.016)))
            await handler.cancel_run()
            return None
        return ctx.to_dict() if await handler else None

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns; no record knows what remains."""

        async def cut() -> Any:
            ctx = Context.from_dict(self._chat, state)
            await ctx.store.set("messages", _cut(await ctx.store.get("messages"), rng))
            await ctx.store.set("turn", f"cut-{uuid.uuid4().hex}")
            return ctx.to_dict()

        return self.run(cut())


class ChatEngineApplication(LlamaIndexApplication):
    """A chat engine whose messages hold the passages; its conversation is one linear history with a name."""

    forks = False

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
        history = [_message(*message) for message in state] if state else _beginning()
        memory = ChatMemoryBuffer.from_defaults(chat_history=history, token_limit=10_000_000)
        chat = SimpleChatEngine.from_defaults(llm=self.llm, memory=memory)
        _shown.set(history)
        with instrument_tags({"conversation_id": conversation, "tenant": tenant}):
            if how == "plain":
                nodes = _nodes(passages)
                if self.warm is not None:
                    nodes = self.warm.postprocess_nodes(nodes, query_str=question)
                chat.chat(f"{_text(nodes)}\n\n{question}")
                is_kept = True
            elif how == "cancel":
                is_kept = self.cancelled(self._aturn(chat, question, passages, False)) or False
            else:  # a chat engine reads the whole stream, whatever its caller does
                is_kept = self.run(self._aturn(chat, question, passages, True))
        return [(each.role.value, each.content) for each in memory.get_all()] if is_kept else None

    async def _aturn(
        self, chat: SimpleChatEngine, question: str, passages: Sequence[ContextBlock], stream: bool
    ) -> bool:
        nodes = _nodes(passages)
        if self.warm is not None:
            nodes = await self.warm.apostprocess_nodes(nodes, query_str=question)
        message = f"{_text(nodes)}\n\n{question}"
        if stream:
            response = await chat.astream_chat(message)
            assert response.awrite_response_to_history_task is not None
            await response.awrite_response_to_history_task  # a failure is raised here
            async for _ in response.async_response_gen():
                pass
        else:
            await chat.achat(message)
        return True

    def edit(self, state: Any, rng: random.Random, *, conversation: str, tenant: str | None) -> Any:
        """Drop the oldest or the newest turns, once the record is forgotten."""
        if self.planner is not None and self.arm == "record":
            try:
                self.planner.forget(conversation, tenant=tenant)
            except StoreError:
                return None
        return [(each.role.value, each.content) for each in _cut([_message(*message) for message in state], rng)]


def _nodes(passages: Sequence[ContextBlock]) -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=passage.text, id_=passage.id or f"passage-{rank}"), score=1 / (rank + 1))
        for rank, passage in enumerate(passages)
    ]


def _text(nodes: Sequence[NodeWithScore]) -> str:
    return "\n\n".join(text for scored in nodes if (text := scored.node.get_content(MetadataMode.LLM)))


def _message(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def _beginning() -> list[ChatMessage]:
    return [_message("system", INSTRUCTIONS)]


def _cut(messages: list[ChatMessage], rng: random.Random) -> list[ChatMessage]:
    if len(messages) < 2:
        return messages
    place = 1 + 2 * rng.randrange(len(messages) // 2)
    return messages[:place] if rng.random() < 0.5 else [messages[0], *messages[place:]]
