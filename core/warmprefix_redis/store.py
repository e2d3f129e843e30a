"""Conversation state in Redis or Valkey."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import InvalidResponse, ReadOnlyError, ResponseError

from warmprefix.errors import StoreUnavailableError
from warmprefix.stores import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    Operation,
    Prepare,
    ReadTurn,
    RecordBounds,
    Snapshot,
    Steps,
    WriteTurn,
    arun_steps,
    check_positive,
    run_steps,
    unknown_operation,
)
from warmprefix_redis import record
from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.connections import Clients, is_cluster

__all__ = ["RedisSeenStore"]

T = TypeVar("T")

_KEYS_PER_SCAN = 500


class RedisSeenStore:
    """A `SeenStore` in Redis (6.2 or newer) or Valkey: one hash per conversation, one atomic script per operation; and
    one string per turn with a record of its own.

    Text is never stored; only digests, labels, turns and token counts. Times are those of the server's clock. Every
    write renews a conversation's time to live. Its key is evicted, expired and moved as a whole.

    A server that lost its last writes, in a failover or a restart, may lack a `Forget`. So a record counts as forgotten
    if another server wrote it, or this one before it started or became the primary.

    The store raises what redis-py raises, and never retries. After a failure, or an answer that took too long, it
    raises `StoreUnavailableError` without calling the server, except for one call after each pause.

    Threads and tasks of any number of event loops may share a store. A task that is cancelled drops its connection.

    Args:
        target: A URL, such as `redis://host:6379/0`, `rediss://`, `unix:///path`,
            `redis+sentinel://host:port,host:port/service/0` or `redis+cluster://host:port,host:port`; or a Redis or
            RedisCluster client, which then serves threads only, has timeouts of its own, and is not closed.
        prefix: Beginning of all keys.
        bounds: Bounds of each conversation; None for the defaults with 1,024 blocks. Blocks are dropped when their
            count is an eighth above the bound (from 64 on). Of labels, four times as many are kept.
        timeout: Seconds that connecting, and then each answer, may take.
    """

    def __init__(
        self,
        target: Any,
        *,
        prefix: str = "wp",
        bounds: RecordBounds | None = None,
        timeout: float = 0.020,
    ) -> None:
        check_positive(timeout=timeout)
        bounds = RecordBounds(max_blocks=1_024) if bounds is None else bounds
        self._prefix = record.check_prefix(prefix)
        milliseconds = {name: max(1, round(getattr(bounds, name) * 1_000)) for name in ("ttl", "lease_ttl")}
        self._max_blocks = bounds.max_blocks
        self._bounds: Mapping[str, object] = {**asdict(bounds), **milliseconds}
        self._timeout = timeout
        self._clients = Clients(target, timeout)
        self._calling = threading.local()
        self.breaker = CircuitBreaker()
        """Decides when the server is called again after a failure."""

    # -- operations ----------------------------------------------------------------------------------------------

    def execute(self, operation: Operation[T]) -> T:
        """Execute one operation and return its result."""
        steps = self._execute(self._clients.sync, operation)
        if getattr(self._calling, "now", False):  # the garbage collector abandons a plan while redis-py holds a lock
            raise StoreUnavailableError(operation.name, operation.conversation)
        self._calling.now = True
        began = time.monotonic()
        try:
            result: T = run_steps(steps)
        finally:
            self._calling.now = False
        if time.monotonic() - began > 2 * self._timeout:  # bytes came one by one: timeouts apply to each read
            self.breaker.failed()
        return result

    async def aexecute(self, operation: Operation[T]) -> T:
        """`execute`, for tasks."""
        result: T = await arun_steps(self._execute(self._clients.asynchronous, operation))
        return result

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        """Return a conversation's state, or None if it is unknown."""
        return run_steps(self._inspect(self._clients.sync(), conversation))

    async def ainspect(self, conversation: Conversation) -> Snapshot | None:
        """`inspect`, for tasks."""
        return await arun_steps(self._inspect(self._clients.asynchronous(), conversation))

    def clear(self) -> None:
        """Forget all conversations and turns under the prefix. Not atomic, and a failover may undo it."""
        client = self._clients.sync()
        for node in client.get_primaries() if is_cluster(client) else [None]:
            target = {} if node is None else {"target_nodes": node}
            for pattern in record.conversation_patterns(self._prefix):
                for keys in _batches(client.scan_iter(match=pattern, count=_KEYS_PER_SCAN, **target)):
                    client.unlink(*keys)

    def close(self) -> None:
        """Close the client for threads if this store opened it."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the clients that this store opened for the running event loop and for threads. Call it in each loop."""
        await self._clients.aclose()

    # -- the steps of each, for both kinds of client -------------------------------------------------------------

    def _execute(self, open_client: Callable[[], Any], operation: Operation[Any]) -> Steps[Any]:
        is_turn = isinstance(operation, ReadTurn | WriteTurn)
        request = {} if is_turn else {**self._bounds, **_request(operation)}
        key = record.conversation_key(self._prefix, operation.conversation)
        if not self.breaker.admits():
            raise StoreUnavailableError(operation.name, operation.conversation)
        with self._reporting():
            client = open_client()
            try:
                if isinstance(operation, ReadTurn | WriteTurn):
                    return (yield from self._turn(client, operation))
                answer = yield from record.SCRIPTS[operation.name].steps(client, key, request)
                if isinstance(operation, Prepare):
                    return record.decode_prepared(answer, operation.proposed, operation.plan_id)
                if not isinstance(answer, int):
                    raise InvalidResponse(f"the answer to {operation.name} was damaged, or belongs to another call")
            except (ResponseError, InvalidResponse) as error:
                if isinstance(error, ReadOnlyError | InvalidResponse) or "READONLY" in str(error):
                    yield self._clients.disconnect(client)
                raise
        return None if isinstance(operation, Forget) else bool(answer)

    def _turn(self, client: Any, operation: ReadTurn | WriteTurn) -> Steps[Any]:
        key = record.turn_key(self._prefix, operation.conversation)
        if isinstance(operation, ReadTurn):
            return record.decode_turn(key, (yield from self._value(client, key)))
        written = operation.record.bounded(self._max_blocks)
        write = partial(client.set, key, px=self._bounds["ttl"])
        if (yield partial(write, record.encode_turn(key, written), nx=True)):
            return True
        stored = yield from self._value(client, key)
        if not record.is_turn(key, stored):  # of another version, damaged, or just gone
            yield partial(write, record.encode_turn(key, written))
        elif not written.agrees(record.decode_turn(key, stored)):
            yield partial(write, record.encode_turn(key, None))
            return False
        return True

    def _value(self, client: Any, key: bytes) -> Steps[bytes | None]:
        """Return the value of a key; what is damaged may be the answer to another call, which ends the connection."""
        try:
            value: bytes | None = yield partial(client.get, key)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            return b""
        if record.is_damaged(key, value):
            yield self._clients.disconnect(client)
        return value

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report the outcome of a call to the breaker."""
        try:
            yield
        except Exception:
            self.breaker.failed()
            raise
        self.breaker.succeeded()

    def _inspect(self, client: Any, conversation: Conversation) -> Steps[Snapshot | None]:
        try:
            fields = yield partial(client.hgetall, record.conversation_key(self._prefix, conversation))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):  # a key of another type is treated like a missing one
                raise
            return None
        return record.decode_record(fields)


def _request(operation: Operation[Any]) -> dict[str, object]:
    """Return the part of a script's request that depends on the operation."""
    if isinstance(operation, Prepare):
        return {"plan": operation.plan_id, "fields": record.encode_proposed(operation.proposed)}
    if isinstance(operation, Commit):
        return {"plan": operation.plan_id, "sent": record.encode_sent(operation.sent)}
    if isinstance(operation, Abandon):
        return {"plan": operation.plan_id}
    if isinstance(operation, Forget):
        return {"ended": operation.ended, "open": operation.open, "sent": record.encode_sent(operation.sent)}
    raise unknown_operation(operation)


def _batches(keys: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Yield keys in lists of at most `_KEYS_PER_SCAN`."""
    batch: list[bytes] = []
    for key in keys:
        batch.append(key)
        if len(batch) == _KEYS_PER_SCAN:
            yield batch
            batch = []
    if batch:
        yield batch
