"""The OpenAI SDK with `EngineLink` and a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk

from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix_openai import EngineLink, messages_for

pytestmark = pytest.mark.vllm


@pytest.fixture
def client(server: VllmServer, link: EngineLink) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="none", http_client=link.http_client(timeout=60.0)) as client:
        yield client


@pytest.fixture
async def async_client(server: VllmServer, link: EngineLink) -> AsyncIterator[AsyncOpenAI]:
    http_client = link.async_http_client(timeout=60.0)
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", http_client=http_client) as client:
        yield client


def request_for(server: VllmServer, plan: ContextPlan, **options: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": messages_for(plan, "What is it?"), "max_tokens": 4, **options}


def test_create_reports_usage(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, client: OpenAI, passages: list[ContextBlock]
) -> None:
    def create() -> CompletionUsage:
        plan = planner.plan(passages[:6], tenant="acme")
        answer = client.chat.completions.create(**request_for(server, plan, extra_headers=link.headers(plan)))
        usage = answer.usage
        assert isinstance(usage, CompletionUsage)
        return usage

    create()
    usage = create()
    details = usage.prompt_tokens_details
    assert details is not None
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens == details.cached_tokens
    assert (details.cached_tokens or 0) > 0.8 * usage.prompt_tokens


def test_a_stream_reports_usage_without_showing_it_to_the_application(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, client: OpenAI, passages: list[ContextBlock]
) -> None:
    for _ in range(2):
        plan = planner.plan(passages[:6])
        with link.sending(plan):
            chunks: list[ChatCompletionChunk] = list(
                client.chat.completions.create(**request_for(server, plan, stream=True))
            )
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens > 0


WITHOUT_SYSTEM_ROLE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"chat_template": WITHOUT_SYSTEM_ROLE}}, "System role not supported"),
    ],
)
def test_a_refused_request_is_not_learned(
    options: dict[str, Any],
    error: str,
    server: VllmServer,
    planner: ContextPlanner,
    link: EngineLink,
    client: OpenAI,
    passages: list[ContextBlock],
) -> None:
    plan = planner.plan(passages[:6], preamble="Be brief.")
    call = request_for(server, plan, **options)
    call["messages"] = messages_for(plan, "What is it?", preamble="Be brief.")
    with link.sending(plan), pytest.raises(BadRequestError, match=error):
        client.chat.completions.create(**call)
    assert planner.stats().commits == 0
    assert planner.stats().open_plans == 0


async def test_tasks(
    server: VllmServer,
    planner: ContextPlanner,
    link: EngineLink,
    async_client: AsyncOpenAI,
    passages: list[ContextBlock],
) -> None:
    async def ask(number: int) -> None:
        plan = await planner.aplan(passages[number : number + 3])
        headers = link.headers(plan)
        if number % 2:
            await async_client.chat.completions.create(**request_for(server, plan, extra_headers=headers))
        else:
            stream = await async_client.chat.completions.create(
                **request_for(server, plan, extra_headers=headers, stream=True)
            )
            async for _ in stream:
                pass

    await asyncio.gather(*map(ask, range(8)))
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (8, 8, 0)


def test_the_responses_api_reports_usage(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, client: OpenAI, passages: list[ContextBlock]
) -> None:
    def create() -> int:
        plan = planner.plan(passages[:6])
        answer = client.responses.create(
            model=server.model,
            instructions="You answer from the context.",
            input=f"{plan.render()}\n\nWhat is it?",
            max_output_tokens=4,
            extra_headers=link.headers(plan),
        )
        assert answer.usage is not None
        return answer.usage.input_tokens_details.cached_tokens

    assert create() == 0
    cached = create()
    stats = planner.stats()
    assert (stats.commits, stats.reports) == (2, 2)
    assert stats.reported_cached_tokens == cached > 0
