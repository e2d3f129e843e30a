"""Tenants of one gateway: what one of them takes, the others still have."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, metric, send
from tests.integrations.gateway.test_edge import connected

from warmprefix_gateway import GatewayServer
from warmprefix_gateway.shares import Preparation

Make = Callable[..., GatewayServer]
UNFINISHED = b"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer ka\r\ncontent-length: 1000\r\n\r\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(
        "\n".join([f"{tenant} {hashlib.sha256(f'k{tenant[0]}'.encode()).hexdigest()}" for tenant in TENANTS])
    )
    return path


TENANTS = ("alice", "bob", "carol")


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    with ExitStack() as connections:
        yield connections


def test_unfinished_bodies_of_one_tenant_leave_places_to_the_others(
    upstream: ScriptedUpstream, gateway_of: Make, keys: Path, crowd: ExitStack
) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, max_in_flight=12)
    for _ in range(40):
        crowd.enter_context(connected(gateway)).sendall(UNFINISHED + b"{")
    refused = crowd.enter_context(connected(gateway))
    refused.sendall(UNFINISHED)
    assert refused.recv(65_536).startswith(b"HTTP/1.1 429 ")
    for key in ("kb", "kc", "kb"):
        assert send(gateway, "POST", "/v1/chat/completions", b'{"a": 1}', Authorization=f"Bearer {key}").status == 200
    assert metric(gateway, "refused_total", reason="busy") > 20


def test_buffered_bytes_of_one_tenant_leave_room_to_the_others(
    upstream: ScriptedUpstream, gateway_of: Make, keys: Path, crowd: ExitStack
) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, max_buffered_bytes=12_000)
    for _ in range(40):
        crowd.enter_context(connected(gateway)).sendall(UNFINISHED + b"{" * 900)
    body = b'{"model": "m", "padding": "%s"}' % (b"x" * 1_000)
    for key in ("kb", "kc", "kb"):
        assert send(gateway, "POST", "/v1/chat/completions", body, Authorization=f"Bearer {key}").status == 200
    assert metric(gateway, "refused_total", reason="size") > 0


async def test_small_bodies_are_prepared_in_turns() -> None:
    preparation = Preparation()
    order: list[str] = []
    busy = [asyncio.create_task(preparation.run("busy", 1, lambda _: order.append("busy"))) for _ in range(100)]
    other = asyncio.create_task(preparation.run("other", 1, lambda _: order.append("other")))
    await asyncio.gather(other, *busy)
    assert order.index("other") <= 2
    assert len(order) == 101
    preparation.close()


async def test_other_work_goes_on_between_small_bodies() -> None:
    preparation = Preparation()
    order: list[str] = []
    busy = [asyncio.create_task(preparation.run(None, 1, lambda _: order.append("body"))) for _ in range(100)]

    async def look() -> None:
        for _ in range(5):
            order.append("look")
            await asyncio.sleep(0)

    await asyncio.gather(look(), *busy)
    assert order.index("body") < len(order) - 1 - order[::-1].index("look") < 20
    preparation.close()


async def test_large_bodies_of_one_tenant_leave_threads_to_the_others() -> None:
    preparation, may_end = Preparation(), threading.Event()
    busy = [asyncio.create_task(preparation.run("busy", 1 << 20, lambda _: may_end.wait())) for _ in range(20)]
    try:
        assert await asyncio.gather(*[preparation.run(name, 1 << 20, lambda _: 7) for name in "abcdef"]) == [7] * 6
    finally:
        may_end.set()
    assert await asyncio.gather(*busy) == [True] * 20
    preparation.close()


async def test_work_that_was_cancelled_gives_its_turn_away() -> None:
    preparation, may_end, ended = Preparation(), threading.Event(), []

    def waits(_: object) -> bool:
        return may_end.wait()

    for size in (1, 1 << 20):
        busy = [
            asyncio.create_task(preparation.run("a", size, waits if size > 1 else lambda _: True)) for _ in range(20)
        ]
        await asyncio.sleep(0)
        for task in busy[1:]:
            task.cancel()
        may_end.set()
        await asyncio.gather(*busy, return_exceptions=True)
        ended += [await preparation.run("a", size, lambda _: "next") for _ in range(5)]
    assert ended == ["next"] * 10
    preparation.close()


async def test_a_failure_gives_the_turn_away() -> None:
    preparation = Preparation()
    for size in (1, 1 << 20):
        for _ in range(6):
            with pytest.raises(ZeroDivisionError):
                await preparation.run("a", size, lambda _: 1 // 0)
    preparation.close()


@pytest.mark.parametrize("with_tenants", [True, False])
def test_a_body_of_countless_parts_is_refused_unread(
    upstream: ScriptedUpstream, gateway_of: Make, keys: Path, with_tenants: bool
) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys if with_tenants else None)
    key = "Bearer kb"
    for part in (b"[],", b"{},", b"1,", b'"a":1,'):
        body = b'{"a": [' + part * 2_000_001 + b"0]}"
        assert send(gateway, "POST", "/v1/chat/completions", body, Authorization=key).status == 413
    many = b'{"model": "m", "prompt": [' + b"1," * 500_000 + b"0]}"
    assert send(gateway, "POST", "/v1/completions", many, Authorization=key).status == 200
