"""The link as HTTP client of an unmodified LangChain chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import InternalServerError
from pydantic import SecretStr

from warmprefix import ContextPlanner
from warmprefix_openai import PLAN_HEADER, EngineLink, messages_for


@pytest.fixture
async def linked(start_engine: Callable[[], Any]) -> AsyncIterator[tuple[Any, ContextPlanner, EngineLink, ChatOpenAI]]:
    engine, planner = start_engine(), ContextPlanner()
    with EngineLink(planner) as link, link.http_client() as client:
        async with link.async_http_client() as async_client:
            model = ChatOpenAI(
                base_url=engine.base_url, api_key=SecretStr("none"), model=engine.model, max_retries=0,
                http_client=client, http_async_client=async_client,
            )  # fmt: skip
            yield engine, planner, link, model


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_planner_receives_the_usage_of_each_answer(linked: Any, turns: list[Any], way: str) -> None:
    engine, planner, link, model = linked
    for turn in turns[:6]:
        plan = planner.plan(turn.passages, tenant="acme", conversation=turn.conversation)
        messages = messages_for(plan, turn.question)
        headers = link.headers(plan)
        if way == "invoke":
            model.invoke(messages, extra_headers=headers)
        elif way == "ainvoke":
            await model.ainvoke(messages, extra_headers=headers)
        elif way == "stream":
            assert "".join(chunk.text for chunk in model.stream(messages, extra_headers=headers))
        else:
            assert "".join([chunk.text async for chunk in model.astream(messages, extra_headers=headers)])
        assert engine.bodies[-1]["cache_salt"] == plan.cache_salt
        assert PLAN_HEADER not in str(engine.bodies[-1])
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (6, 6, 0)
    assert stats.reported_cached_tokens == engine.cached_tokens
    assert link.stats().errors == 0


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_chain_is_sent_within_a_block(linked: Any, turns: list[Any], way: str) -> None:
    engine, planner, link, model = linked
    rephrase = ChatPromptTemplate.from_messages([("user", "Rephrase: {question}")]) | model | StrOutputParser()
    answer = ChatPromptTemplate.from_messages([("system", "From this:\n\n{context}"), ("user", "{question}")]) | model
    chain = {"question": rephrase, "context": lambda given: given["context"]} | answer | StrOutputParser()
    for turn in turns[:4]:
        plan = planner.plan(turn.passages, tenant="acme")
        given = {"question": turn.question, "context": plan.render()}
        with link.sending(plan):
            if way == "invoke":
                chain.invoke(given)
            elif way == "ainvoke":
                await chain.ainvoke(given)
            elif way == "stream":
                assert list(chain.stream(given))
            else:
                assert [piece async for piece in chain.astream(given)]
        assert [body["cache_salt"] for body in engine.bodies[-2:]] == [plan.cache_salt] * 2
    stats = planner.stats()
    assert (stats.commits, stats.abandons, stats.reports) == (4, 0, 4)
    assert stats.reported_cached_tokens == sum(answered.cached_tokens for answered in engine.answered[1::2])
    assert link.stats().unmatched == 4


async def test_a_chain_that_fails_abandons(linked: Any, turns: list[Any]) -> None:
    engine, planner, link, model = linked
    for attempts, fates in ((1, (0, 1)), (2, (1, 1))):
        engine.fail_next(1)
        plan = planner.plan(turns[0].passages)
        messages = messages_for(plan, "Q?")
        if attempts == 1:
            with link.sending(plan), pytest.raises(InternalServerError):
                model.invoke(messages)
        else:
            async with link.sending(plan):
                await model.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).ainvoke(messages)
        stats = planner.stats()
        assert (stats.commits, stats.abandons) == fates
    assert planner.stats().open_plans == 0
