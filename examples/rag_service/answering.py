"""Answers a question: retrieve, build the prompt, stream the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from warmprefix.plan import tenant_salt
from warmprefix_langchain import ContextReuseRetriever, context_prompt

from .settings import Settings

__all__ = ["Answerer", "Finished", "Question", "Sources"]


class Turn(BaseModel):
    """An earlier message of the conversation."""

    role: Literal["user", "assistant"]
    content: str


class Question(BaseModel):
    """The body of a request."""

    question: str = Field(min_length=1)
    conversation: str | None = None
    """Keeps the conversation at one replica of the engine."""
    history: list[Turn] = []
    """The conversation so far, without the passages."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The passages in the prompt, in the order of the prompt."""

    sources: list[str]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer, with the engine's own counts."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Answerer:
    """Answers questions of all tenants; each worker process has one."""

    settings: Settings
    retriever: ContextReuseRetriever
    http: httpx.AsyncClient
    salt_key: bytes
    _model: ChatOpenAI | None = None

    async def answer(self, asked: Question, tenant: str) -> AsyncGenerator[Sources | str | Finished, None]:
        """Yield the sources, the answer in pieces, and the engine's counts.

        If the client leaves, the web server cancels this generator, and with it the request to the engine.
        """
        found = await self.retriever.ainvoke(asked.question, {"configurable": {"tenant": tenant}})
        yield Sources([str(document.id) for document in found])
        messages = context_prompt().format_messages(
            context="\n\n".join(document.page_content for document in found),
            chat_history=_as_messages(asked.history),
            input=asked.question,
        )
        prompt_tokens = cached_tokens = 0
        headers = self._headers(asked, tenant)
        model = await self._chat_model(headers)
        # The salt keeps tenants apart in the engine's cache. The gateway derives its own salt from it.
        options: dict[str, Any] = {"extra_body": {"cache_salt": tenant_salt(self.salt_key, tenant)}}
        async for chunk in model.astream(messages, extra_headers=headers, **options):
            if chunk.text:
                yield chunk.text
            if isinstance(chunk, AIMessageChunk) and (usage := chunk.usage_metadata):
                prompt_tokens += usage["input_tokens"]
                cached_tokens += usage.get("input_token_details", {}).get("cache_read") or 0
        yield Finished(prompt_tokens, cached_tokens)

    def _headers(self, asked: Question, tenant: str) -> dict[str, str]:
        session = {"x-session-id": asked.conversation} if asked.conversation else {}
        return {self.settings.tenant_header: tenant, **session}

    async def _chat_model(self, headers: dict[str, str]) -> ChatOpenAI:
        if self._model is None:
            settings = self.settings
            self._model = ChatOpenAI(
                model=settings.model or await self._first_model(headers),
                base_url=settings.engine_url,
                api_key=settings.engine_key,
                max_completion_tokens=settings.max_tokens,
                stream_usage=True,
                http_async_client=self.http,
            )
        return self._model

    async def _first_model(self, headers: dict[str, str]) -> str:
        settings = self.settings
        key = settings.engine_key.get_secret_value()
        client = AsyncOpenAI(base_url=settings.engine_url, api_key=key, http_client=self.http)
        return (await client.models.list(extra_headers=headers)).data[0].id


def _as_messages(history: Sequence[Turn]) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in history]
