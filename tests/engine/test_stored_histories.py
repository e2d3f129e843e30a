"""Histories that a real engine keeps: what stands in front of a continuation, and what a link makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from vllm_server import VllmServer
from warmprefix import Branch, ContextBlock, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix_openai import EngineLink

pytestmark = pytest.mark.vllm


@pytest.fixture
def client(server: VllmServer, link: EngineLink) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="none", http_client=link.http_client(timeout=60.0)) as client:
        yield client


def ask(client: OpenAI, server: VllmServer, content: Any, after: str | None = None, **options: Any) -> Any:
    call: dict[str, Any] = {"model": server.model, "max_output_tokens": 8, **options}
    return client.responses.create(input=content, previous_response_id=after, **call)


def counted(client: OpenAI, server: VllmServer, content: Any, after: str | None = None, **options: Any) -> int:
    return int(ask(client, server, content, after, **options).usage.input_tokens)


def test_chain_gets_the_input_and_no_instructions(
    server: VllmServer, client: OpenAI, passages: Sequence[ContextBlock]
) -> None:
    text, short = passages[0].text, counted(client, server, "Why?")
    long = counted(client, server, text) - short

    def behind(content: Any, **options: Any) -> int:
        return counted(client, server, "Why?", ask(client, server, content, **options).id)

    kept = [
        behind(text),
        behind([{"role": "developer", "content": text}]),
        behind([{"type": "function_call_output", "call_id": "c1", "output": text}]),
        behind(text, stream=False, temperature=0.0),
    ]
    dropped = [
        behind("Why?", instructions=text),
        behind([{"role": "system", "content": text}, {"role": "user", "content": "Why?"}]),
    ]
    assert min(kept) > short + long * 0.9
    assert max(dropped) < short + 60


def test_link_refers_to_what_the_chain_holds(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, client: OpenAI, passages: Sequence[ContextBlock]
) -> None:
    def plan_after(after: str | None, *numbers: int) -> ContextPlan:
        blocks = [passages[number] for number in numbers]
        return planner.plan(blocks, placement="tail", conversation=Branch(after=after), tenant="acme")

    def send(plan: ContextPlan, after: str | None, **options: Any) -> Any:
        with link.sending(plan):
            return ask(client, server, f"{plan.render()}\n\nWhy?", after, **options)

    first = send(plan_after(None, 0, 1, 2), None)
    second = send(plan := plan_after(first.id, 1, 3), first.id)
    assert len(plan.references) == 1
    assert second.usage.input_tokens_details.cached_tokens > 0.9 * first.usage.input_tokens - 32
    again = send(plan := plan_after(second.id, 0, 1, 3), second.id)
    assert len(plan.references) == 3
    assert again.usage.input_tokens < second.usage.input_tokens + 80
    fork = send(plan := plan_after(first.id, 0, 3), first.id, store=False)
    assert len(plan.references) == 1
    assert plan_after(fork.id, 0, 3).references == ()
    with pytest.raises(NotFoundError, match=f"Response with id '{fork.id}' not found"):
        send(plan_after(fork.id, 0, 3), fork.id)
