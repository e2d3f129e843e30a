"""A planned batch, its planner, and an engine over HTTP that records its requests and fails on demand."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
import uvicorn
from openai import AsyncOpenAI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warmprefix import BatchPlan, BatchRequest, ContextPlan, ContextPlanner, EngineReport
from warmprefix_tools.emulator import EmulatorConfig, create_app

Json = dict[str, Any]


class Ledger(ContextPlanner):
    """A planner that records the commits and abandonments of its plans, by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[str, int | None] = {}
        """The cached tokens of each plan's last commit."""
        self.commits = 0
        self.abandoned: list[str] = []

    def commit(
        self,
        plan: ContextPlan,
        cached_tokens: int | None = None,
        *,
        report: EngineReport | None = None,
        turn_id: str | None = None,
    ) -> bool:
        self.commits += 1
        self.committed[plan.id] = cached_tokens
        return super().commit(plan, cached_tokens, report=report, turn_id=turn_id)

    def abandon(self, plan: ContextPlan) -> bool:
        self.abandoned.append(plan.id)
        return super().abandon(plan)


def make_batch(
    requests: Sequence[BatchRequest], planner: str = "auto", preamble: str | None = "Answer briefly."
) -> BatchPlan:
    """Plan requests with a new `Ledger`."""
    return Ledger().plan_batch(requests, planner, preamble=preamble)


def make_requests(groups: int, members: int, tenants: Sequence[str | None] = (None,)) -> list[BatchRequest]:
    """Make groups in turn: members of a group share their first block, and pairs of them a second one."""
    return [
        BatchRequest(
            f"g{group}m{member}",
            [
                f"Text of group {group}. " * 24,
                f"Text of group {group}, pair {member // 2}. " * 12,
                f"Own {member} of {group}. " * 6,
            ],
            f"This is question <g{group}m{member}>.",
            tenant=tenants[group % len(tenants)],
        )
        for member in range(members)
        for group in range(groups)
    ]


class Fault(NamedTuple):
    """The engine's failure in place of an answer."""

    kind: Literal["status", "break", "cut", "garble", "report", "hang", "body"]
    """Answer with a status; or begin to stream and then drop the line, end early, send what is no JSON, report an
    error; or do not answer at all; or stream `body`."""
    status: int = 500
    headers: Mapping[str, str] = {}
    chunks: int = 2
    """Chunks that come before it."""
    code: str | None = None
    """The error's code, in addition to its status."""
    body: str = ""
    """The body of the answer."""


class Event(NamedTuple):
    """An event of a request at the engine: it came, its first token went out, it was over."""

    what: Literal["came", "token", "over"]
    id: str


@dataclass
class Engine:
    """The emulator on a free port, behind an application that records requests and fails on demand."""

    config: EmulatorConfig
    fault: Callable[[str, int], Fault | None] = lambda id, attempt: None
    """Called for each request with its id and the number of the attempt, from 1 on."""
    events: list[Event] = field(default_factory=list)
    bodies: dict[str, Json] = field(default_factory=dict)
    attempts: Counter[str] = field(default_factory=Counter)
    usage: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._emulator: ASGIApp = create_app(self.config)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    @property
    def most_at_once(self) -> int:
        """Largest number of requests that had come and were not over."""
        running = most = 0
        for event in self.events:
            running += {"came": 1, "token": 0, "over": -1}[event.what]
            most = max(most, running)
        return most

    def when(self, what: str, id: str) -> int:
        """Return the place of a request's last such event among all events."""
        return max(i for i, event in enumerate(self.events) if event == (what, id))

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    @property
    def is_dead(self) -> bool:
        """True from the call of `die` on."""
        return self._server.should_exit

    def die(self) -> None:
        """Break off every request after a second, and refuse connections from then on."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/v1/chat/completions":
            await self._emulator(scope, receive, send)
            return
        data = b""
        more = True
        while more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(data)
        (id,) = re.findall(r"<(.+?)>", body["messages"][-1]["content"])
        self.bodies[id] = body
        self.attempts[id] += 1
        self.events.append(Event("came", id))
        over = False

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                self.events.append(Event("over", id))

        try:
            await self._serve(id, scope, data, receive, send, end)
        finally:
            end()

    async def _serve(
        self, id: str, scope: Scope, data: bytes, receive: Receive, send: Send, end: Callable[[], None]
    ) -> None:
        fault = self.fault(id, self.attempts[id])
        if fault is not None and fault.kind == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if fault is not None and fault.kind == "body":
            end()
            await _respond(send, 200, fault.body, {"content-type": "text/event-stream"})
            return
        if fault is not None and fault.kind == "status":
            end()
            await _respond(
                send, fault.status, json.dumps({"error": {"message": "on demand", "code": fault.code}}), fault.headers
            )
            return
        whole = [{"type": "http.request", "body": data, "more_body": False}]
        chunks = 0

        async def replayed() -> Message:
            return whole.pop() if whole else await receive()

        async def watched(message: Message) -> None:
            nonlocal chunks
            payload: bytes = message.get("body", b"")
            for line in payload.splitlines():
                if line.startswith(b"data: {"):
                    chunks += 1
                    if chunks == 2:  # behind the role
                        self.events.append(Event("token", id))
                    usage = json.loads(line[6:]).get("usage")
                    if usage:
                        self.usage[id] = usage
            if fault is not None and chunks > fault.chunks:
                if fault.kind != "cut":
                    await self._misbehave(fault, send, end)
                message = {**message, "body": b""}  # not even `[DONE]`, which ends an answer by itself
            if b"[DONE]" in payload:
                end()
            await send(message)

        await self._emulator(scope, replayed, watched)

    async def _misbehave(self, fault: Fault, send: Send, end: Callable[[], None]) -> None:
        end()
        if fault.kind == "garble":
            await send({"type": "http.response.body", "body": b"data: {no json\n\n", "more_body": True})
        elif fault.kind == "report":
            report = json.dumps(
                {"error": {"message": "engine died", "type": "InternalServerError", "code": fault.status}}
            )
            await send({"type": "http.response.body", "body": f"data: {report}\n\n".encode(), "more_body": True})
        raise ConnectionError("on demand")


async def _respond(send: Send, status: int, body: str, headers: Mapping[str, str]) -> None:
    given = [(name.encode(), value.encode()) for name, value in {"content-type": "application/json", **headers}.items()]
    await send({"type": "http.response.start", "status": status, "headers": given})
    await send({"type": "http.response.body", "body": body.encode()})


INSTANT = EmulatorConfig(kv_blocks=8_192, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)


@pytest.fixture
def plan() -> Callable[..., BatchPlan]:
    """Plans a batch; its owner is a `Ledger` of its own."""
    return make_batch


@pytest.fixture
def requests() -> Callable[..., list[BatchRequest]]:
    """Makes requests in groups: the number of groups, and of members per group."""
    return make_requests


@pytest.fixture
def fault() -> type[Fault]:
    """The engine's failures."""
    return Fault


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """Start engines; each has a cache of its own."""
    with ExitStack() as stack:
        yield lambda config=INSTANT: stack.enter_context(Engine(config))


@pytest.fixture
def engine(start_engine: Callable[[], Engine]) -> Engine:
    """One that takes no time."""
    return start_engine()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[AsyncOpenAI]:
    """Talks to that engine."""
    async with AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        yield client


@pytest.fixture(autouse=True)
async def nothing_leaks() -> AsyncIterator[None]:
    """Every task that a test began is over when it ends."""
    yield
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if "batch request" in task.get_name()] == []
