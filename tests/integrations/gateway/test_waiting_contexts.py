"""Contexts that wait to be ordered: each plan considers those behind it, and none stays announced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from warmprefix.planner import ContextPlanner
from warmprefix_gateway import GatewayOptions
from warmprefix_gateway.office import Office
from warmprefix_gateway.outgoing import AskedPrompt
from warmprefix_gateway.tenant_bodies import BodyRefusedError

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
OPTIONS = GatewayOptions(("http://127.0.0.1:1/v1",), tenant_header="x-tenant", reorder=("tags",))


def body_of(names: str, more: str = "", **fields: Any) -> bytes:
    sources = "\n".join([f"<source>Everything about {name}. {'It is deep. ' * 30}</source>" for name in names])
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": f"{sources}\nWhy?{more}"}], **fields}
    ).encode()


def order(asked: AskedPrompt | None) -> str:
    assert asked is not None
    text = asked.sent.encode().decode()
    return "".join([part[0] for part in text.split("Everything about ")[1:]])


@pytest.fixture
async def office() -> AsyncIterator[Office]:
    office = Office(OPTIONS)
    await office.open()
    yield office
    assert planner_of(office).stats().queued_requests == 0
    await office.close()


def planner_of(office: Office) -> ContextPlanner:
    assert office.reorderer is not None
    return office.reorderer.planner


async def ask(office: Office, body: bytes, tenant: str | None = "acme") -> AskedPrompt | None:
    return await office.ask(body, CHAT, JSON, tenant)


LONG = "!" * 300_000


async def test_a_context_begins_with_what_the_one_behind_it_shares(office: Office) -> None:
    first, second = await asyncio.gather(*[ask(office, body_of(names)) for names in ("abcdef", "xeyf")])
    assert set(order(first)[:2]) == {"e", "f"}
    assert order(second)[:2] == order(first)[:2]


async def test_a_context_that_comes_alone_keeps_its_order(office: Office) -> None:
    assert order(await ask(office, body_of("abcdef"))) == "abcdef"


@pytest.mark.parametrize("other", [{"tenant": "other"}, {"tenant": None}])
async def test_a_waiting_context_of_another_tenant_changes_nothing(
    office: Office, other: dict[str, str | None]
) -> None:
    first, _ = await asyncio.gather(ask(office, body_of("abcdef")), ask(office, body_of("xeyf"), **other))
    assert order(first) == "abcdef"


async def test_another_model_or_instruction_changes_nothing(office: Office) -> None:
    asked: Sequence[bytes] = [body_of("abcdef"), body_of("xeyf", model="n"), body_of("xeyf", tools=[{"type": "f"}])]
    first, *_ = await asyncio.gather(*[ask(office, body) for body in asked])
    assert order(first) == "abcdef"


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("more", ["", LONG], ids=["in the loop", "in threads"])
async def test_requests_that_are_given_up_do_not_wait(office: Office, more: str, rounds: int) -> None:
    asking = [asyncio.ensure_future(ask(office, body_of(names, more))) for names in ("abcdef", "xeyf", "gh")]
    for _ in range(rounds):
        await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    office._preparing._threads.shutdown()  # a thread that had begun ends its announcement


async def test_refused_requests_do_not_wait(office: Office) -> None:
    refused = await asyncio.gather(
        *[ask(office, body_of("abcdef", cache_salt=[1], id=[[0]])), ask(office, body_of("xeyf", priority=1))],
        return_exceptions=True,
    )
    assert isinstance(refused[1], BodyRefusedError)


async def test_the_same_context_again_is_not_announced(office: Office) -> None:
    for _ in range(3):
        assert order(await ask(office, body_of("abcdef"))) == "abcdef"
    assert planner_of(office).stats().plans == 1
