"""Tasks that are cancelled while they wait for Redis, at every possible point."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from fault_proxy import Delay, FaultProxy
from redis_servers import Server
from true_prompts import Dialogue, Turn
from warmprefix import ContextPlan, ContextPlanner
from warmprefix_redis import RedisSeenStore

NEVER = 10_000


class Chats:
    """Conversations with different blocks, so that an answer to another call makes a dangling reference."""

    def __init__(self, planner: ContextPlanner) -> None:
        self.planner = planner
        self.talks = [Dialogue(f"chat-{i}") for i in range(3)]
        self._fresh = 0

    async def plan(self, talk: Dialogue, numbers: list[int]) -> Turn:
        request = talk.blocks(numbers)
        plan = await self.planner.aplan(request, conversation=talk.name, placement="tail")
        return talk.check(self.planner, plan, request)

    async def turn(self, talk: Dialogue, numbers: list[int]) -> ContextPlan:
        turn = await self.plan(talk, numbers)
        assert talk.store(turn)
        await self.planner.acommit(turn.plan)
        return turn.plan

    async def check_answers(self) -> None:
        """Send a new block to each conversation, then request the new blocks of all in each."""
        own = range(self._fresh, self._fresh + len(self.talks))
        self._fresh = own.stop
        for talk, number in zip(self.talks, own, strict=True):
            await self.turn(talk, [number])
        for talk in self.talks:
            await self.turn(talk, list(own))
            assert talk.findings.wrong == 0, talk.findings.examples


@pytest.fixture
async def chats() -> AsyncIterator[tuple[FaultProxy, Chats]]:
    with Server() as server, FaultProxy(server.port) as proxy:
        # Long times, because calls must not time out on a busy machine.
        store = RedisSeenStore(f"redis://127.0.0.1:{proxy.port}", timeout=5)
        async with ContextPlanner(store=store, annotate="both") as planner:
            chats = Chats(planner)
            await chats.check_answers()
            yield proxy, chats


async def cancelled_after(steps: int, work: Awaitable[Any]) -> tuple[bool, Any]:
    """Run `steps` cycles of the loop, then cancel. Return whether it was done before, and its outcome."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        if task.done():
            return True, task.result()
        await asyncio.sleep(0)
    task.cancel()
    try:
        return False, await task
    except asyncio.CancelledError:
        return False, None


@pytest.mark.sample(4)
@pytest.mark.parametrize("delay", [0.0, 0.002], ids=["at once", "2 ms later"])
@pytest.mark.parametrize("operation", ["plan", "commit", "abandon"])
async def test_cancelled_at_every_await(operation: str, delay: float, chats: tuple[FaultProxy, Chats]) -> None:
    proxy, all_chats = chats
    planner, talk = all_chats.planner, all_chats.talks[0]
    if delay:
        proxy.set(replies=Delay(delay))
    done = False
    steps = 1  # at 0 the call would never begin
    while not done and steps < NEVER:
        if operation == "plan":
            request = talk.blocks([0, 1, 2, 100 + steps])
            done, plan = await cancelled_after(steps, planner.aplan(request, conversation=talk.name, placement="tail"))
            if plan is not None:
                talk.check(planner, plan, request)
                await planner.aabandon(plan)
        else:
            turn = await all_chats.plan(talk, [0, 1, 2, 100 + steps])
            if operation == "commit":
                assert talk.store(turn)
            work = planner.acommit(turn.plan) if operation == "commit" else planner.aabandon(turn.plan)
            done, _ = await cancelled_after(steps, work)
        await all_chats.check_answers()
        # While bytes are on their way the loop turns hundreds of times; a sample of these turns is enough.
        steps += 1 if steps < 20 else steps // 3
    assert done
    assert steps > 2  # there was something to cancel
    proxy.heal()
    await wait_for_references(all_chats)


async def wait_for_references(chats: Chats) -> None:
    for talk in chats.talks:
        for _ in range(200):
            if len((await chats.turn(talk, [0, 1, 2])).references) == 3:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail(f"no references come back: {chats.planner.stats()}")
        assert talk.findings.wrong == 0, talk.findings.examples


async def test_clients_that_disconnect(chats: tuple[FaultProxy, Chats]) -> None:
    """The server cancels a request's task when its client disconnects, as web frameworks do."""
    proxy, all_chats = chats
    planner = all_chats.planner
    abandoned = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal abandoned
        talk = all_chats.talks[int(await reader.readline())]
        request = talk.blocks([0, 1, 2, 3])

        async def answer() -> None:
            async with planner.planning(request, conversation=talk.name, placement="tail") as plan:
                turn = talk.check(planner, plan, request)
                await asyncio.sleep(0.02)  # the model thinks
                talk.store(turn)
            writer.write(b"answer\n")

        answering = asyncio.ensure_future(answer())
        hanging_up = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({answering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        abandoned += answering.cancel()
        hanging_up.cancel()
        await asyncio.gather(answering, hanging_up, return_exceptions=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy.set(replies=Delay(0.002))
    async with server:
        for i in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"%d\n" % (i % 3))
            if i % 6 == 0:
                assert await reader.readline() == b"answer\n"
            else:
                await asyncio.sleep(0.0015 * (i % 16))
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.1)
    assert abandoned > 10
    proxy.heal()
    await all_chats.check_answers()
    await wait_for_references(all_chats)
