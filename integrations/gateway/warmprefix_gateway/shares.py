"""Fair shares of places, bytes and turns, and work on bodies in turns of their tenants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["AbandonedWorkError", "FairTurns", "Preparation", "Shares"]

_GENEROSITY = 2
"""A party may hold this many times what is still free: alone two thirds of all, and each of many the same."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Party = str | None
"""Who shares; None if all requests come from one party, which then may have everything."""


class Shares:
    """Units of something bounded, such as places or bytes.

    A part is set aside for each party. What a party holds beyond it is bounded by what is still free of the rest (the
    dynamic thresholds of shared switch memory): a busy party leaves room for the others before they come, and gets
    nothing more until what it holds is back in proportion.

    Args:
        total: Number of units.
        parties: Number of parties, if they are counted: half of the units are set aside, in equal parts.
    """

    def __init__(self, total: int, parties: int = 0) -> None:
        self._part = total // (2 * parties) if parties else 0
        self._free = total - parties * self._part
        """Units that are free, and not set aside."""
        self._held: Counter[Party] = Counter()
        self.used = 0
        """Units that all parties hold."""

    def take(self, party: Party, units: int = 1) -> bool:
        """Take units for a party, and return True; return False, and take none, if that is more than its share."""
        before = self._beyond(party, 0)
        free = self._free - self._beyond(party, units) + before
        if free < self._free and (free < 0 or (party is not None and before > _GENEROSITY * free)):
            return False
        self._add(party, units)
        return True

    def give_back(self, party: Party, units: int = 1) -> None:
        """Return units that were taken."""
        self._add(party, -units)
        if not self._held[party]:
            del self._held[party]

    def _add(self, party: Party, units: int) -> None:
        self._free -= self._beyond(party, units) - self._beyond(party, 0)
        self._held[party] += units
        self.used += units

    def _beyond(self, party: Party, more: int) -> int:
        """Return the units that a party holds, with some more, beyond its part."""
        return max(self._held.get(party, 0) + more - self._part, 0)


class FairTurns(Generic[K]):
    """Turns at a few workers, in a circle of the parties that wait.

    Args:
        total: Turns at one time.
        most: Turns of one party at one time; fewer than `total` leave a worker to the others.
    """

    def __init__(self, total: int, most: int) -> None:
        self._total, self._most = total, most
        self._running: Counter[Party] = Counter()
        self._waiting: OrderedDict[Party, OrderedDict[K, None]] = OrderedDict()

    def enter(self, party: Party, ticket: K) -> bool:
        """Return True if the party has its turn now; otherwise its ticket waits until `leave` returns it."""
        if self._running.total() < self._total and self._running[party] < self._bound(party):
            self._running[party] += 1
            return True
        self._waiting.setdefault(party, OrderedDict())[ticket] = None
        return False

    def leave(self, party: Party) -> K | None:
        """End a turn of a party; return the ticket that has the next one."""
        self._running[party] -= 1
        if not self._running[party]:
            del self._running[party]
        for other, tickets in self._waiting.items():
            if self._running[other] < self._bound(other):
                self._running[other] += 1
                ticket, _ = tickets.popitem(last=False)
                self._waiting.move_to_end(other)
                if not tickets:
                    del self._waiting[other]
                return ticket
        return None

    def give_up(self, party: Party, ticket: K) -> None:
        """Remove a ticket that still waits."""
        tickets = self._waiting.get(party)
        if tickets is not None and tickets.pop(ticket, self) is None and not tickets:
            del self._waiting[party]

    def _bound(self, party: Party) -> int:
        return self._total if party is None else self._most


# -- work on bodies: small ones in the event loop, large ones in a few threads

_MOST_AT_ONCE = 256 * 1_024
"""Bytes; larger bodies take more than some milliseconds."""
_THREADS, _THREADS_OF_TENANT = 4, 2
"""Python works in one thread at a time, so more would only make each of them slower."""

_MAX_SECONDS = 20.0
"""Time of one function, after which its next check fails."""

_Ticket = tuple[str | None, asyncio.Future[None]]


class AbandonedWorkError(Exception):
    """The result is not wanted any more."""


class _WorkLimit:
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
        if size <= _MOST_AT_ONCE:
            await self._enter(self._in_loop, tenant)
            loop.call_soon(self._leave, self._in_loop, tenant)
            return work(_WorkLimit().check)
        await self._enter(self._in_threads, tenant)
        limit = _WorkLimit()
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
