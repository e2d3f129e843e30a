"""Answers as they come, and runs that are left before their end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

import pytest

from warmprefix_chain_of_agents import ChainAnswer, ChainOfAgents, ChainProgress, Manager, ManagerError, Worker
from warmprefix_openai import Retries

QUESTION = "Which fact is worth a mention?"


def check_events(events: list[Any], mode: str) -> None:
    *before, answer = events
    assert isinstance(answer, ChainAnswer)
    texts = [event for event in before if isinstance(event, str)]
    assert "".join(texts) == answer.text
    steps = [event for event in before if isinstance(event, ChainProgress)]
    kinds = [step.kind for step in steps]
    assert kinds[0] == "assigned"
    assert kinds[-1] == "answering"
    assert before.index(steps[-1]) < before.index(texts[0])
    assert kinds.count("asked") == kinds.count("read") == len(answer.workers)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert steps[-1].done == steps[-1].total == 5
    assert {step.report for step in steps if step.kind == "read"} == set(answer.workers)
    if mode == "chain":
        assert kinds[1:-1] == ["asked", "read"] * len(answer.workers)


@pytest.mark.parametrize("mode", ["map", "chain"])
def test_stream(start_team: Any, documents: Any, mode: str) -> None:
    team = start_team(mode=mode)
    check_events(list(team.chain.stream(QUESTION, documents(5))), mode)


@pytest.mark.parametrize("mode", ["map", "chain"])
async def test_astream(start_async_team: Any, documents: Any, mode: str) -> None:
    team = start_async_team(mode=mode)
    check_events([event async for event in team.chain.astream(QUESTION, documents(5))], mode)


def test_text_comes_before_the_answer_is_complete(start_faulty: Any, faults: Any, connect: Any, documents: Any) -> None:
    done = threading.Event()
    client = connect(start_faulty(faults.text("A unit."), faults.drip(done)))
    chain = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"))
    with closing(chain.stream(QUESTION, documents(1))) as events:
        assert next(event for event in events if isinstance(event, str)) == "word "
    done.set()


def nothing_is_left(chain: ChainOfAgents) -> None:
    assert chain.planner.stats().open_plans == 0
    assert chain.router.stats().open == 0
    assert chain.planner.stats().abandons >= 1
    assert all(load == 0 for load in chain.router.load().values())


@pytest.mark.parametrize("place", ["worker", "manager"])
def test_closing_a_stream_ends_its_requests(
    start_faulty: Any, faults: Any, connect: Any, documents: Any, place: str
) -> None:
    done = threading.Event()
    server = start_faulty(*([faults.text("A unit.")] if place == "manager" else []), faults.drip(done))
    client = connect(server)
    chain = ChainOfAgents([Worker("w", client, "m"), Worker("v", client, "m")], Manager(client, "m"))
    with closing(chain.stream(QUESTION, documents(1), conversation="c")) as events:
        wanted = "asked" if place == "worker" else "answering"
        assert any(isinstance(event, ChainProgress) and event.kind == wanted for event in events)
        while len(server.bodies) < (1 if place == "worker" else 2):
            time.sleep(0.01)
    assert server.left.wait(10)
    assert chain.planner.stats().open_plans == chain.router.stats().open == 0
    if place == "worker":
        nothing_is_left(chain)
    done.set()


@pytest.mark.parametrize("mode", ["map", "chain"])
@pytest.mark.parametrize("awaited", [True, False])
async def test_cancelling_takes_back_what_was_not_answered(
    start_faulty: Any, faults: Any, connect: Any, connect_async: Any, documents: Any, mode: Any, awaited: bool
) -> None:
    done = threading.Event()
    server = start_faulty(faults.drip(done))
    client = (connect_async if awaited else connect)(server)
    workers = [Worker(f"w{number}", client, "m") for number in range(3)]
    chain = ChainOfAgents(workers, Manager(client, "m"), mode=mode, concurrency=2)
    running = asyncio.ensure_future(chain.arun(QUESTION, documents(6), conversation="c"))
    while not server.bodies:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    nothing_is_left(chain)
    assert await asyncio.to_thread(server.left.wait, 10)
    done.set()


async def test_leaving_an_astream_early(start_faulty: Any, faults: Any, connect_async: Any, documents: Any) -> None:
    done = threading.Event()
    server = start_faulty(faults.drip(done))
    client = connect_async(server)
    chain = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"))
    async with aclosing(chain.astream(QUESTION, documents(2))) as events:
        async for event in events:
            if isinstance(event, ChainProgress) and event.kind == "asked":
                break
        while not server.bodies:
            await asyncio.sleep(0.01)
    nothing_is_left(chain)
    assert await asyncio.to_thread(server.left.wait, 10)
    done.set()


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_a_beginning_though_no_text(
    start_faulty: Any, faults: Any, connect: Any, documents: Any, field: str
) -> None:
    """The time to the first token is that of the prefill, not of the thoughts."""
    done = threading.Event()

    def think(handler: Any) -> None:
        faults.deltas({"role": "assistant", "content": ""}, {field: "Well."}, end=None)(handler)
        done.wait(0.5)
        handler.wfile.write(
            b'data: {"choices": [{"index": 0, "delta": {"content": "A unit."}, "finish_reason": "stop"}]}\n\n'
        )

    client = connect(start_faulty(think, faults.text("An answer.")))
    answer = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m")).run(QUESTION, documents(1))
    assert answer.workers[0].text == "A unit."
    assert answer.workers[0].ttft is not None
    assert answer.workers[0].ttft < 0.5


def test_text_that_was_streamed_is_not_streamed_again(
    start_faulty: Any, faults: Any, connect: Any, documents: Any
) -> None:
    broken = faults.deltas({"role": "assistant", "content": "Half an"}, end=None)
    for streaming in (True, False):
        client = connect(start_faulty(faults.text("A unit."), broken, faults.text("A whole answer.")))
        chain = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"), retries=Retries(longest=0.0))
        if streaming:
            with pytest.raises(ManagerError, match="the stream ended before the answer did"):
                list(chain.stream(QUESTION, documents(1)))
        else:
            answer = chain.run(QUESTION, documents(1))
            assert (answer.text, answer.manager.attempts) == ("A whole answer.", 2)


def test_a_failing_callback_is_logged_once(start_team: Any, documents: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(progress: ChainProgress) -> None:
        raise ValueError(progress.kind)

    team = start_team(on_progress=fail)
    assert team.chain.run(QUESTION, documents(4)).text
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warnings] == ["on_progress of a chain of agents failed"]


def test_the_callback_gets_the_steps_of_a_stream(start_team: Any, documents: Any) -> None:
    steps: list[ChainProgress] = []
    team = start_team(on_progress=steps.append)
    events = list(team.chain.stream(QUESTION, documents(4)))
    assert steps == [event for event in events if isinstance(event, ChainProgress)]


def test_threads_end_with_the_run(start_team: Any, documents: Any) -> None:
    team = start_team(mode="map")
    team.chain.run(QUESTION, documents(6))
    ours: Callable[[], list[str]] = lambda: [  # noqa: E731
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("warmprefix-chain", "warmprefix-agent"))
    ]
    deadline = time.monotonic() + 10
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ours() == []
