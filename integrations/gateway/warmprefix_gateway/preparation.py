"""Work on bodies, in turns of their tenants: small ones in the event loop, large ones in a few threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from warmprefix_gateway.shares import FairTurns

__all__ = ["MOST_AT_ONCE", "AbandonedWorkError", "Preparation", "WorkLimit"]

MOST_AT_ONCE = 256 * 1_024
"""Bytes; larger bodies take more than some milliseconds."""
_THREADS, _THREADS_OF_TENANT = 4, 2
"""Python works in one thread at a time, so more would only make each of them slower."""

_MAX_SECONDS = 20.0
"""Time of one function, after which its next check fails."""

T = TypeVar("T")
_Ticket = tuple[str | None, asyncio.Future[None]]


class AbandonedWorkError(Exception):
    """The result is not wanted any more."""


class WorkLimit:
    """What ends a function that runs too long, or whose result is not wanted any more."""

    def __init__(self) -> None:
        self.is_abandoned = False
        self._ends = time.monotonic() + _MAX_SECONDS

    def check(self) -> None:
        """Raise an error if the function is to end."""
        if self.is_abandoned:
            raise AbandonedWorkError
        if time.monotonic() > self._ends:
            raise TimeoutError


class Preparation:
    """Runs one function per body. For one event loop.

    In the loop one function runs between two looks at the sockets, so that no tenant can make the others wait for more
    than one body of each other tenant, however many requests it sends.
    """

    def __init__(self) -> None:
        self._in_loop: FairTurns[_Ticket] = FairTurns(1, 1)
        self._in_threads: FairTurns[_Ticket] = FairTurns(_THREADS, _THREADS_OF_TENANT)
        self._threads = ThreadPoolExecutor(_THREADS, "warmprefix-gateway")

    async def run(
        self,
        tenant: str | None,
        size: int,
        work: Callable[[Callable[[], None]], T],
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Return the result of the work on a body of `size` bytes.

        The work gets a function to call now and then. It raises `TimeoutError` if the work takes too long, and
        `AbandonedWorkError` if this is cancelled: until then, a thread that has begun goes on and keeps its turn.
        `undo` gets a result that comes after that.
        """
        loop = asyncio.get_running_loop()
        if size <= MOST_AT_ONCE:
            await self._enter(self._in_loop, tenant)
            loop.call_soon(self._leave, self._in_loop, tenant)
            return work(WorkLimit().check)
        await self._enter(self._in_threads, tenant)
        limit = WorkLimit()
        working = self._threads.submit(work, limit.check)

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._leave, self._in_threads, tenant)

        working.add_done_callback(done)
        try:
            return await asyncio.wrap_future(working)
        except asyncio.CancelledError:
            if undo is not None:
                working.add_done_callback(lambda _: _has_result(working) and undo(working.result()))
            raise
        finally:
            limit.is_abandoned = True

    async def _enter(self, turns: FairTurns[_Ticket], tenant: str | None) -> None:
        ticket = tenant, asyncio.get_running_loop().create_future()
        if turns.enter(tenant, ticket):
            return
        try:
            await ticket[1]
        except asyncio.CancelledError:
            if ticket[1].cancelled():
                turns.give_up(tenant, ticket)
            else:
                self._leave(turns, tenant)
            raise

    def _leave(self, turns: FairTurns[_Ticket], tenant: str | None) -> None:
        ticket = turns.leave(tenant)
        while ticket is not None and ticket[1].done():  # cancelled just now
            ticket = turns.leave(ticket[0])
        if ticket is not None:
            ticket[1].set_result(None)

    def close(self) -> None:
        """End the threads, without waiting for work that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _has_result(work: Future[T]) -> bool:
    return not work.cancelled() and work.exception() is None
