"""Many at once, and cancelled at any moment: each plan meets its own fate, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from warmprefix import ContextBlock
from warmprefix_openai import EngineLink, messages_for

MODEL = "warmprefix-emulator"


def blocks_of(number: int) -> list[ContextBlock]:
    return [ContextBlock(f"Fact {number}.{n}. " * (5 + number % 7), id=f"f{number}-{n}") for n in range(3)]


def check(planner: Any, link: EngineLink, expected: dict[str, int]) -> None:
    """Every plan was committed once, with the usage of its own prompt."""
    assert Counter(plan for plan, _, _ in planner.outcomes) == dict.fromkeys(expected, 1)
    assert {plan: report.prompt_tokens for plan, _, report in planner.outcomes} == expected
    assert planner.stats().open_plans == 0
    assert (link.stats().errors, link.stats().commits) == (0, len(expected))


@pytest.mark.slow
async def test_fifty_tasks(planner: Any, link: EngineLink, emulator: Any) -> None:
    expected: dict[str, int] = {}

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        for turn in range(4):
            plan = await planner.aplan(blocks_of(number), tenant=f"t{number % 5}", conversation=f"c{number}")
            call: Any = {"model": MODEL, "messages": messages_for(plan, f"Q{turn}?"), "max_tokens": 3}
            counted = await client.chat.completions.create(**call)
            if turn % 2:
                async with link.sending(plan):
                    answer = await client.chat.completions.create(**call)
                    assert answer.usage is not None
            else:
                stream = await client.chat.completions.create(**call, stream=True, extra_headers=link.headers(plan))
                async for chunk in stream:
                    assert chunk.choices
            expected[plan.id] = counted.usage.prompt_tokens

    async with openai.AsyncOpenAI(
        base_url=emulator.base_url, api_key="none", http_client=link.async_http_client()
    ) as client:
        await asyncio.gather(*(ask(client, number) for number in range(50)))
    check(planner, link, expected)


def test_sixteen_threads(planner: Any, link: EngineLink, emulator: Any) -> None:
    expected: dict[str, int] = {}

    def ask(number: int) -> None:
        for turn in range(4):
            plan = planner.plan(blocks_of(number), tenant=f"t{number % 5}", conversation=f"c{number}")
            call: Any = {"model": MODEL, "messages": messages_for(plan, f"Q{turn}?"), "max_tokens": 3}
            counted = client.chat.completions.create(**call)
            if turn % 2:
                with link.sending(plan):
                    stream = client.chat.completions.create(**call, stream=True)
                assert all(chunk.choices for chunk in stream)
            else:
                client.chat.completions.create(**call, extra_headers=link.headers(plan))
            expected[plan.id] = counted.usage.prompt_tokens

    with (
        openai.OpenAI(base_url=emulator.base_url, api_key="none", http_client=link.http_client()) as client,
        ThreadPoolExecutor(16) as threads,
    ):
        list(threads.map(ask, range(48)))
    check(planner, link, expected)


@pytest.mark.parametrize("again", [False, True], ids=["once", "and again"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("own_kind", [False, True], ids=["default kind", "own kind"])
async def test_a_cancelled_request_has_one_fate_wherever_it_stood(
    planner: Any, link: EngineLink, scripted: Any, reply: Any, sse: Any, completion: Any,
    stream: bool, own_kind: bool, again: bool,
) -> None:  # fmt: skip
    events = sse("It ", "is.", usage=completion["usage"])
    answer = reply(events, content_type="text/event-stream") if stream else reply([json.dumps(completion).encode()])
    scripted.script.append(answer)
    http: Any = link.async_http_client(httpx.AsyncClient) if own_kind else link.async_http_client()

    async def ask(client: openai.AsyncOpenAI, plan: Any) -> None:
        call: Any = {"model": "m", "messages": messages_for(plan, "Q?"), "stream": stream}
        answer: Any = await client.chat.completions.create(**call, extra_headers=link.headers(plan))
        if stream:
            async for _ in answer:
                pass

    fates = Counter[str]()
    ends = Counter[bool]()
    async with openai.AsyncOpenAI(
        base_url=scripted.base_url, api_key="none", http_client=http, max_retries=0
    ) as client:
        steps = 0
        while ends[False] < 3:  # until it has been too late to cancel for some time
            plan = planner.plan(blocks_of(steps))
            asking = asyncio.ensure_future(ask(client, plan))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            if again:
                await asyncio.sleep(0)
                asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, openai.APIConnectionError):
                await asking
            ends[asking.cancelled()] += 1
            for _ in range(200):
                if any(id == plan.id for id, _, _ in planner.outcomes) or steps == 0:
                    break
                await asyncio.sleep(0)
            fate = [fate for id, fate, _ in planner.outcomes if id == plan.id]
            if not fate:  # cancelled before anything was sent
                assert not any(plan.render() in seen.body["messages"][0]["content"] for seen in scripted.seen)
                planner.abandon(plan)
                fate = ["unsent"]
            assert len(fate) == 1
            fates[fate[0]] += 1
            # Each step is tried while requests begin to be sent; a busy machine takes more of them to answer.
            steps += 1 if fates.total() - fates["unsent"] < 40 else max(9, steps // 8)
            assert steps < 500_000
    assert fates["abandon"] > 3
    assert fates["commit"] >= 3
    stats = planner.stats()
    assert (stats.open_plans, stats.late_commits) == (0, 0)
    assert link.stats().errors == 0
