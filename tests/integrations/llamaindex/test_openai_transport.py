"""The link as HTTP client of an unmodified LlamaIndex model for OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import InternalServerError

from warmprefix import ContextPlanner
from warmprefix_openai import EngineLink, messages_for


@pytest.fixture
async def linked(start_engine: Callable[[], Any]) -> AsyncIterator[tuple[Any, ContextPlanner, EngineLink, Any]]:
    engine, planner = start_engine(), ContextPlanner()
    model: Any = OpenAILike
    with EngineLink(planner) as link, link.http_client() as client:
        async with link.async_http_client() as async_client:
            llm = model(
                model=engine.model, api_base=engine.base_url, api_key="none", is_chat_model=True,
                context_window=65_536, max_tokens=24, max_retries=0,
                http_client=client, async_http_client=async_client,
            )  # fmt: skip
            yield engine, planner, link, llm


def chat(plan: Any, question: str) -> list[ChatMessage]:
    return [ChatMessage(role=message["role"], content=message["content"]) for message in messages_for(plan, question)]


@pytest.mark.parametrize("marked", ["by header", "by block"])
@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat", "astream_chat"])
async def test_planner_receives_the_usage_of_each_answer(linked: Any, turns: list[Any], way: str, marked: str) -> None:
    engine, planner, link, llm = linked
    for turn in turns[:5]:
        plan = planner.plan(turn.passages, tenant="acme", conversation=turn.conversation)
        messages = chat(plan, turn.question)
        headers = {"extra_headers": link.headers(plan)} if marked == "by header" else {}
        async with link.sending(plan if marked == "by block" else planner.plan([])):
            if way == "chat":
                llm.chat(messages, **headers)
            elif way == "achat":
                await llm.achat(messages, **headers)
            elif way == "stream_chat":
                assert list(llm.stream_chat(messages, **headers))
            else:
                assert [part async for part in await llm.astream_chat(messages, **headers)]
        assert engine.bodies[-1]["cache_salt"] == plan.cache_salt
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (5, 5, 0)
    assert stats.reported_cached_tokens == engine.cached_tokens
    assert link.stats().errors == 0


async def test_a_request_that_fails_abandons(linked: Any, turns: list[Any]) -> None:
    engine, planner, link, llm = linked
    engine.fail_next(1)
    plan = planner.plan(turns[0].passages)
    with pytest.raises(InternalServerError):
        async with link.sending(plan):
            await llm.achat(chat(plan, "Q?"))
    stats = planner.stats()
    assert (stats.commits, stats.abandons, stats.open_plans) == (0, 1, 0)
