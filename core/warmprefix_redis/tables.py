"""Tables of small values in Redis or Valkey that several processes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from warmprefix_redis import record
from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.connections import Clients, is_cluster

__all__ = ["RedisTables"]

_ANSWER_SECONDS = 1.0
"""Longest time of one round trip, unless requests wait for longer."""
_MAX_WAITING = 256
"""Cells of one table that wait to be written, and the reads that wait; more are left out."""


class RedisTables:
    """One hash per table, under `PREFIX:{TABLE}:KIND`, whose cells are read and written in shared round trips.

    One round trip is under way at a time; what is asked meanwhile goes with the next one. Of one process, a write is
    done before each later read. A reader waits for its `patience` at most, and not at all after an answer that came
    later than that, or none, until one comes in time. Then cells are missing, and what was to be written is dropped.
    Nothing checks the values: seal them. Use all methods from the tasks of one event loop.

    Args:
        url: As for `RedisSeenStore`.
        prefix: Beginning of all keys.
        ttl: Seconds after its last write at which a table is dropped.
        patience: Seconds that `read` waits.
        fail: Called with the first error of several in a row.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "wp",
        ttl: float = 86_400.0,
        patience: float = 0.020,
        fail: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        self._longest = max(_ANSWER_SECONDS, patience)
        self._clients = Clients(url, self._longest)
        self._prefix = record.check_prefix(prefix)
        self._milliseconds = max(1, round(ttl * 1_000))
        self._patience = patience
        self._fail = fail
        self._breaker = CircuitBreaker()
        self._is_quick = True
        self._has_failed = False
        self._reads: list[_Read] = []
        self._writes: dict[str, dict[bytes, bytes | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def read(self, table: str, cells: Sequence[bytes] = ()) -> list[bytes | None] | None:
        """Return the values of cells, None for an empty one; None in all if there is no answer in time.

        Without `cells`, return all names and values, by turns.
        """
        if len(self._reads) >= _MAX_WAITING or not self._may_ask():
            return None
        answer: asyncio.Future[list[bytes | None] | None] = asyncio.get_running_loop().create_future()
        self._reads.append(_Read(self._key(table), cells, answer))
        self._start()
        if not self._is_quick or self._breaker.is_open:
            return None
        await asyncio.wait([answer], timeout=self._patience)
        if answer.done():
            return answer.result()
        self._is_quick = False
        return None

    def write(self, table: str, cells: Mapping[bytes, bytes | None]) -> None:
        """Write cells soon; None empties one."""
        if not self._may_ask():
            return
        waiting = self._writes.setdefault(self._key(table), {})
        if len(waiting) < _MAX_WAITING and len(self._writes) <= _MAX_WAITING:
            waiting.update(cells)
        self._start()

    @property
    def is_busy(self) -> bool:
        """True while a round trip is under way."""
        return self._task is not None

    async def aclose(self) -> None:
        """End what is under way, and close the connections of the running event loop. Nothing is asked from then on."""
        self._is_closed = True
        if (task := self._task) is not None:
            await asyncio.wait([task], timeout=self._patience)
            task.cancel()
            await asyncio.wait([task], timeout=self._longest)  # it gives its connection back
            await asyncio.wait([task], timeout=self._longest)  # it gives its connection back
        await self._clients.aclose()

    def _may_ask(self) -> bool:
        return not self._is_closed and (self._task is not None or self._breaker.admits())

    def _key(self, table: str) -> str:
        name, _, kind = table.partition(":")
        return f"{self._prefix}:{{{name}}}:{kind}"

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._exchange())

    async def _exchange(self) -> None:
        """Make round trips for as long as there is anything to ask."""
        try:
            while self._reads or self._writes:
                reads, writes, self._reads, self._writes = self._reads, self._writes, [], {}
                began = time.monotonic()
                answers: Sequence[Any] = [None] * len(reads)
                try:
                    answers = await asyncio.wait_for(self._round_trip(reads, writes), self._longest)
                    self._breaker.succeeded()
                    self._is_quick = time.monotonic() - began <= self._patience
                except Exception as error:  # whatever redis-py raises
                    self._breaker.failed()
                    self._report(error)
                    if is_cluster(client := self._clients.asynchronous()):
                        await client.aclose()  # unlike a command, a pipeline does not have it look for the new master
                for read, answer in zip(reads, answers, strict=True):
                    if not read.answer.done():
                        read.answer.set_result(answer)
                if self._breaker.is_open:
                    self._writes.clear()
        finally:
            for read in self._reads:
                if not read.answer.done():
                    read.answer.set_result(None)
            self._reads, self._task = [], None

    async def _round_trip(
        self, reads: Sequence[_Read], writes: Mapping[str, Mapping[bytes, bytes | None]]
    ) -> Sequence[Any]:
        client = self._clients.asynchronous()
        pipeline = client.pipeline(transaction=False)
        for key, cells in writes.items():
            full = {name: value for name, value in cells.items() if value is not None}
            if full:
                pipeline.hset(key, mapping=full)
            if len(full) < len(cells):
                pipeline.hdel(key, *[name for name in cells if name not in full])
            pipeline.pexpire(key, self._milliseconds)
        for read in reads:
            pipeline.hmget(read.key, read.cells) if read.cells else pipeline.hgetall(read.key)
        answers = await pipeline.execute(raise_on_error=False)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for error in errors:
            if not isinstance(error, ResponseError):
                raise error
        if any("READONLY" in f"{type(error).__name__} {error}".upper() for error in errors):
            await self._clients.disconnect(client)()
        if errors:
            self._report(errors[0])
        else:
            self._has_failed = False
        found = answers[len(answers) - len(reads) :]
        return [None if isinstance(each, Exception) else _as_list(each) for each in found]

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._fail(error)


class _Read(NamedTuple):
    key: str
    cells: Sequence[bytes]
    answer: asyncio.Future[list[bytes | None] | None]


def _as_list(answer: Any) -> list[bytes | None]:
    return [part for pair in answer.items() for part in pair] if isinstance(answer, dict) else answer
