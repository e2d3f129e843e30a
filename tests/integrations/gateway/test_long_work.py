"""Work on large bodies that is not wanted any more, or that takes too long."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, metric, send

from warmprefix_gateway import GatewayServer, shares
from warmprefix_gateway.shares import AbandonedWorkError, Preparation

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
LARGE = 300_000


def repeats(number: int) -> bytes:
    messages: list[dict[str, Any]] = []
    for at in range(number):
        function = {"name": "read", "arguments": f"{at}"}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"{at}", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"{at}", "content": "The sea is deep. " * 40})
    return json.dumps({"model": "m", "messages": messages}).encode()


async def test_work_ends_when_its_request_is_cancelled() -> None:
    preparing, begun, ended = Preparation(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work(check: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                check()
        except AbandonedWorkError:
            ended.set()
            raise

    running = asyncio.ensure_future(preparing.run(None, LARGE, work))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 20)
    assert await preparing.run(None, LARGE, lambda _: 7) == 7
    preparing.close()


async def test_a_result_that_comes_too_late_is_undone() -> None:
    preparing, begun, may_end, undone = Preparation(), asyncio.Event(), threading.Event(), asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def work(_: Callable[[], None]) -> int:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(20)
        return 7

    def undo(result: int) -> None:
        loop.call_soon_threadsafe(undone.put_nowait, result)

    running = asyncio.ensure_future(preparing.run(None, LARGE, work, undo))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert undone.empty()
    may_end.set()
    assert await asyncio.wait_for(undone.get(), 20) == 7
    assert await preparing.run(None, LARGE, work, undo) == 7
    assert undone.empty()
    preparing.close()


def test_work_ends_when_the_client_leaves(
    upstream: ScriptedUpstream, gateway_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_of(upstream.base_url)
    begun, ended = threading.Event(), threading.Event()

    def endless(_: object, __: object, ___: object, check: Callable[[], None]) -> None:
        begun.set()
        try:
            while True:
                check()
        except AbandonedWorkError:
            ended.set()
            raise

    monkeypatch.setattr("warmprefix_gateway.shared_beginnings.Rewriting.read", endless)
    body = repeats(600)
    assert len(body) > LARGE
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        assert begun.wait(20)
    assert ended.wait(20)
    assert upstream.prompts == []


def test_a_request_whose_references_take_too_long_goes_out_without(
    upstream: ScriptedUpstream, gateway_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_MAX_SECONDS", 0.0)
    gateway = gateway_of(upstream.base_url)
    body = repeats(600)
    assert send(gateway, "POST", CHAT, body).status == 200
    assert upstream.prompts[0].body == body
    assert metric(gateway, "failures_total") == 1
    assert metric(gateway, "references_total") == 0
