"""Batches of a chain: each input is arranged in view of those behind it, and none stays announced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from warmprefix import ContextPlanner
from warmprefix_langchain import context_reuse

Results = Sequence[dict[str, Any]]
Batch = Callable[..., Awaitable[Results]]
ONE: RunnableConfig = {"max_concurrency": 1}


@pytest.fixture
def planner() -> Iterator[ContextPlanner]:
    planner = ContextPlanner()
    yield planner
    assert planner.stats().queued_requests == 0


def documents(names: str) -> list[Document]:
    return [Document(f"Everything about {name}. " + "It is deep. " * 60, id=name) for name in names]


def order(result: dict[str, Any]) -> str:
    return "".join([str(document.id) for document in result["context"]])


async def batch(chain: Runnable[Any, Any], inputs: list[Any], config: Any = ONE, **options: Any) -> Results:
    return chain.batch(inputs, config, **options)


async def abatch(chain: Runnable[Any, Any], inputs: list[Any], config: Any = ONE, **options: Any) -> Results:
    return await chain.abatch(inputs, config, **options)


both = pytest.mark.parametrize("run", [batch, abatch])


@both
@pytest.mark.parametrize("is_dict", [False, True], ids=["documents", "dicts"])
async def test_an_input_begins_with_what_a_later_one_shares(planner: ContextPlanner, run: Batch, is_dict: bool) -> None:
    chain: Runnable[Any, Any] = RunnableLambda(documents) | context_reuse(planner)
    if is_dict:
        asked = RunnableLambda[str, Any](lambda names: {"context": documents(names), "input": "?"})
        chain = asked | context_reuse(planner)
    first, _, second = await run(chain, ["abcdef", "uvw", "xeyf"])
    assert set(order(first)[:2]) == {"e", "f"}
    assert order(second)[:2] == order(first)[:2]


@both
async def test_another_tenant_or_a_history_changes_nothing(planner: ContextPlanner, run: Batch) -> None:
    chain = RunnableLambda(documents) | context_reuse(planner)
    configs = [{"configurable": {"tenant": name}, "max_concurrency": 1} for name in ("acme", "other")]
    first, _ = await run(chain, ["abcdef", "xeyf"], configs)
    assert order(first) == "abcdef"
    tail = RunnableLambda(documents) | context_reuse(planner, placement="tail")
    first, _ = await run(tail, ["abcdef", "xeyf"])
    assert order(first) == "abcdef"


@both
async def test_long_batches_announce_the_next_inputs(planner: ContextPlanner, run: Batch) -> None:
    names = [*[f"{chr(1_000 + i)}{chr(5_000 + i)}" for i in range(600)], "abcdef", "xeyf"]
    *_, first, second = await run(RunnableLambda(documents) | context_reuse(planner), names)
    assert set(order(first)[:2]) == {"e", "f"}
    assert order(second)[:2] == order(first)[:2]


@both
async def test_iterators_reach_the_step_whole(planner: ContextPlanner, run: Batch) -> None:
    results = await run(context_reuse(planner), [{"context": iter(documents(names))} for names in ("abc", "de")])
    assert [order(result) for result in results] == ["abc", "de"]


@both
async def test_failed_inputs_do_not_wait(planner: ContextPlanner, run: Batch) -> None:
    step = context_reuse(planner)
    inputs = [{"context": documents("abc")}, {"context": 7}, {}, {"context": documents("de")}]
    results = await run(step, inputs, return_exceptions=True)
    assert [type(result) for result in results] == [dict, TypeError, ValueError, dict]
    with pytest.raises(TypeError, match="documents must be a sequence"):
        await run(step, inputs[:2])
    assert await run(step, []) == []


async def test_a_cancelled_batch_does_not_wait(planner: ContextPlanner) -> None:
    step = context_reuse(planner)
    for rounds in range(5):
        running = asyncio.ensure_future(step.abatch([documents("abc"), documents("bcd")]))
        for _ in range(rounds):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
