"""Calls that are cancelled at each of their awaits, up to the application's own next statement.

A cancelled application has a CancelledError in place of the answer and stores nothing. So nothing of that turn may
count as seen. `WARMPREFIX_CANCELLATIONS=10000` has each path and store cancelled that many times.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import openai
import pytest

from redis_servers import Server
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix_openai import EngineLink
from warmprefix_redis import RedisSeenStore

CANCELLATIONS = int(os.environ.get("WARMPREFIX_CANCELLATIONS", "0"))
BLOCKS = [ContextBlock(f"All facts about {name}.", id=name) for name in ("sea", "sky", "sun")]
ANSWER = {"role": "assistant", "content": "It is."}

Messages = Any
"""A list of mappings."""
Turn = Any
"""A coroutine function of an application, a plan and messages; `planned` makes its own plan."""


class CancelAt:
    """Awaits a coroutine, and cancels the task that awaits it in the await with this number.

    Either while it waits, or when what it waited for is there and the task has not gone on yet.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], at: int, *, late: bool) -> None:
        self._steps = coroutine.__await__()
        self._at = at
        self._late = late
        self.cancelled = False

    def __await__(self) -> Generator[Any, Any, None]:
        task = asyncio.current_task()
        assert task is not None
        step: Callable[[], Any] = partial(next, self._steps)
        for number in count(1):
            try:
                waiting = step()
            except StopIteration:
                return
            if number == self._at:
                self.cancelled = True
                if self._late and waiting is not None:
                    waiting.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            try:
                yield waiting
            except BaseException as error:
                step = partial(self._steps.throw, error)
            else:
                step = partial(next, self._steps)


async def pause() -> None:
    for _ in range(2):
        await asyncio.sleep(0)


STACK: Any = import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
"""httpx, or httpx2: what the SDK sends with."""


class Body(STACK.AsyncByteStream):  # type: ignore[misc]
    """An answer in pieces, with a pause before each and in closing."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            await pause()
            yield piece
        await pause()

    async def aclose(self) -> None:
        await pause()


class Engine(STACK.AsyncBaseTransport):  # type: ignore[misc]
    """Answers in this process."""

    async def handle_async_request(self, request: Any) -> Any:
        await pause()
        if not json.loads(request.content).get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "message": ANSWER}
            whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            data = json.dumps(whole).encode()
            body = Body([data[:9], data[9:]])
            return STACK.Response(200, headers={"content-type": "application/json"}, stream=body)
        chunks = [
            {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            for choice in (
                {"index": 0, "delta": {"role": "assistant", "content": "It "}},
                {"index": 0, "delta": {"content": "is."}},
                {"index": 0, "delta": {}, "finish_reason": "stop"},
            )
        ]
        events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
        body = Body([*events, b"data: [DONE]\n\n"])
        return STACK.Response(200, headers={"content-type": "text/event-stream"}, stream=body)


class Application:
    """One conversation, and what it holds as far as its turns came to their ends."""

    def __init__(self, planner: ContextPlanner, turn: Turn, link: EngineLink, client: openai.AsyncOpenAI) -> None:
        self.planner = planner
        self.link = link
        self.client = client
        self.history: Messages = []
        self.name = ""
        self._turn = turn

    async def go_on(self) -> None:
        if self._turn is planned:
            await planned(self)
            return
        plan = await self.planner.aplan(BLOCKS, conversation=self.name, placement="tail")
        self.check(plan)
        await self._turn(self, plan, [*self.history, {"role": "user", "content": plan.render()}])

    def check(self, plan: ContextPlan) -> None:
        for block in plan.blocks:
            if block.reference is not None:
                shown = f"[{block.label}] {block.block.text}"
                assert any(shown in message["content"] for message in self.history), f"dangling: {block.reference}"

    def keep(self, messages: Messages) -> None:
        """Run the application's next statement."""
        self.history = [*messages, ANSWER]


async def planned(app: Application) -> None:
    async with app.planner.planning(BLOCKS, conversation=app.name, placement="tail") as plan:
        app.check(plan)
        messages = [*app.history, {"role": "user", "content": plan.render()}]
        await pause()
    app.keep(messages)


async def sending(app: Application, plan: ContextPlan, messages: Messages) -> None:
    async with app.link.sending(plan):
        await app.client.chat.completions.create(model="m", messages=messages)
    app.keep(messages)


async def sending_and_keeping_within(app: Application, plan: ContextPlan, messages: Messages) -> None:
    with app.link.sending(plan):
        await app.client.chat.completions.create(model="m", messages=messages)
        await pause()
        app.keep(messages)


async def sending_a_stream(app: Application, plan: ContextPlan, messages: Messages) -> None:
    async with app.link.sending(plan):
        stream: Any = await app.client.chat.completions.create(model="m", messages=messages, stream=True)
        async with stream:
            async for _ in stream:
                await pause()  # as an endpoint does that passes it on to its own client
    app.keep(messages)


async def marked(app: Application, plan: ContextPlan, messages: Messages) -> None:
    headers = app.link.headers(plan)
    await app.client.chat.completions.create(model="m", messages=messages, extra_headers=headers)
    app.keep(messages)


async def marked_stream(app: Application, plan: ContextPlan, messages: Messages) -> None:
    stream: Any = await app.client.chat.completions.create(
        model="m", messages=messages, stream=True, extra_headers=app.link.headers(plan)
    )
    async with stream:
        async for _ in stream:
            await pause()
    app.keep(messages)


@asynccontextmanager
async def application(turn: Any, kind: str, client: str) -> AsyncIterator[Application]:
    if kind == "memory":
        async with _application(ContextPlanner(annotate="both"), turn, client) as app:
            yield app
        return
    with Server() as server:
        store = RedisSeenStore(f"redis://127.0.0.1:{server.port}", timeout=30)
        planner = ContextPlanner(store=store, annotate="both")
        async with planner, _application(planner, turn, client) as app:
            yield app


@asynccontextmanager
async def _application(planner: ContextPlanner, turn: Any, client: str) -> AsyncIterator[Application]:
    with EngineLink(planner) as link:
        if client == "default kind":
            http: Any = link.async_http_client(transport=Engine())
        else:
            http = link.async_http_client(STACK.AsyncClient, transport=Engine())
        async with openai.AsyncOpenAI(base_url="http://engine/v1", api_key="none", http_client=http) as sdk:
            yield Application(planner, turn, link, sdk)


@pytest.mark.sample(8)
@pytest.mark.parametrize("store", ["memory", "Redis"])
@pytest.mark.parametrize("client", ["default kind", "own kind"])
@pytest.mark.parametrize(
    "turn", [planned, sending, sending_and_keeping_within, sending_a_stream, marked, marked_stream]
)
async def test_a_cancelled_turn_is_not_seen(turn: Any, client: str, store: str, record_property: Any) -> None:
    if turn is planned and client == "own kind":
        pytest.skip("has no client")
    cancelled = 0
    async with application(turn, store, client) as app:
        for round_number in count():
            is_over = False
            for at, late in ((at, late) for at in count(1) for late in (False, True)):
                app.name, app.history = f"{round_number}-{at}-{late}", []
                if at % 2:  # in a first turn, and in a later one
                    await app.go_on()
                driver = CancelAt(app.go_on(), at, late=late)
                before = app.history
                try:
                    await asyncio.ensure_future(_awaited(driver))
                except asyncio.CancelledError:
                    cancelled += 1
                    if app.history is not before:
                        assert turn is sending_and_keeping_within
                else:
                    is_over = not driver.cancelled
                for _ in range(5):  # a shared store may still get a forget while the next turn is on its way
                    await app.go_on()
                    if "Please also use" in app.history[-2]["content"]:
                        break
                assert "Please also use" in app.history[-2]["content"], "what was kept is seen"
                if is_over or 0 < CANCELLATIONS <= cancelled:
                    break
            if cancelled >= CANCELLATIONS:
                break
    assert cancelled > 3
    record_property("cancellations", cancelled)


async def _awaited(driver: CancelAt) -> None:
    await driver
