"""Conversation state in Redis or Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from warmprefix.errors import MissingExtraError
from warmprefix.stores.operations import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    Operation,
    Prepare,
    PreparedTurn,
    Snapshot,
    Steps,
    arun_steps,
    run_steps,
    unknown_operation,
)
from warmprefix.stores.redis import codec
from warmprefix.stores.redis.keys import check_prefix, conversation_key, keys_pattern
from warmprefix.stores.redis.servers import Journal, Servers

try:
    from redis.exceptions import InvalidResponse, ReadOnlyError, ResponseError
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

from warmprefix.stores.redis.clients import Clients, is_cluster, open_clients
from warmprefix.stores.redis.scripts import ABANDON, COMMIT, FORGET, PREPARE, SEAL_SIZE, Script, seal

__all__ = ["RedisSeenStore"]

T = TypeVar("T")

_KEYS_PER_SCAN = 500


class RedisSeenStore:
    """A `SeenStore` in Redis (6.2 or newer) or Valkey: one hash a conversation, one atomic script an operation.

    Text is never stored; only digests, labels, turns and token counts. Time is the server's. Every write renews the
    time that a conversation has to live, and its key is evicted, expired and moved as a whole. It raises what redis-py
    raises, and never tries again: that is left to the caller.

    A conversation that was forgotten may come back when the server loses its last writes, in a failover or a restart.
    So the store keeps a journal of the last 10,000 that it was asked to forget, which `maintain` repeats to a server
    not met before; and until that has settled, all that such a server calls seen is contested.

    Threads may share it, and tasks of any number of event loops. What it opened itself, `close` and `aclose` close.

    Args:
        target: A URL, such as `redis://host:6379/0`, `rediss://`, `unix:///path`,
            `redis+sentinel://host:port,host:port/service/0` or `redis+cluster://host:port,host:port`; or a client,
            which may be a Redis or RedisCluster of redis or of redis.asyncio, and then serves methods of its own
            kind only. A client's timeouts and retries are its own; it must not decode responses.
        async_client: The other kind of client, if `target` is one for threads and both kinds of method are needed.
        prefix: What all keys begin with.
        max_blocks: Blocks remembered a conversation; beyond it, and 64 or more an eighth beyond it, the oldest are
            dropped, and sent again. Of labels, four times as many.
        max_leases: Plans in flight a conversation; beyond it the oldest can no longer be committed.
        ttl: Seconds after its last use at which a conversation is dropped.
        lease_ttl: Seconds in which a plan must be committed.
        settle: Seconds for which a server not met before is not trusted; 0 if nothing is ever forgotten but by one
            worker.
        timeout: Seconds that a command may take, by clients of a URL. Well above what a request should wait: a commit
            that comes late is better than none.
        connect_timeout: Seconds that connecting may take; it takes several round trips.
    """

    def __init__(
        self,
        target: Any,
        *,
        async_client: Any = None,
        prefix: str = "wp",
        max_blocks: int = 1_024,
        max_leases: int = 64,
        ttl: float = 86_400.0,
        lease_ttl: float = 600.0,
        settle: float = 2.0,
        timeout: float = 0.1,
        connect_timeout: float = 0.5,
    ) -> None:
        for name, value in (
            ("max_blocks", max_blocks),
            ("max_leases", max_leases),
            ("ttl", ttl),
            ("lease_ttl", lease_ttl),
            ("timeout", timeout),
            ("connect_timeout", connect_timeout),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if settle < 0:
            raise ValueError(f"settle must not be negative, got {settle}")
        self._prefix = check_prefix(prefix)
        self._bounds = codec.pack_bounds(max_blocks, max_leases, ttl, lease_ttl)
        self._journal = Journal()
        self._servers = Servers(settle, self._journal)
        self._clients: Clients = open_clients(target, async_client, timeout, connect_timeout)
        self._repeating: set[asyncio.Task[None]] = set()

    @property
    def serves_threads(self) -> bool:
        """Whether it has a client for the methods that are not awaited."""
        return self._clients.serve_threads

    @property
    def serves_tasks(self) -> bool:
        """Whether it has a client for the methods that are awaited."""
        return self._clients.serve_tasks

    # -- operations ----------------------------------------------------------------------------------------------

    def execute(self, operation: Operation[T]) -> T:
        """Execute one operation and return its result."""
        return run_steps(self._execute(self._clients.sync, operation))

    async def aexecute(self, operation: Operation[T]) -> T:
        """`execute`, for tasks."""
        return await arun_steps(self._execute(self._clients.asynchronous, operation))

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        """Return a conversation's state, or None if it is unknown."""
        return run_steps(self._inspect(self._clients.sync(), conversation))

    async def ainspect(self, conversation: Conversation) -> Snapshot | None:
        """`inspect`, for tasks."""
        return await arun_steps(self._inspect(self._clients.asynchronous(), conversation))

    def clear(self) -> None:
        """Forget all conversations under the prefix. Not atomic, and not repeated after a failover that loses it."""
        run_steps(self._clear(self._clients.sync()))

    async def aclear(self) -> None:
        """`clear`, for tasks."""
        client = self._clients.asynchronous()
        await client.initialize()  # otherwise the nodes of a Cluster are unknown
        await arun_steps(self._clear(client))

    def maintain(self) -> None:
        """Identify the server, or each primary of a Cluster, and repeat the journal to a new one.

        Without a client for threads it does nothing: then `aexecute` starts `amaintain`.
        """
        if self._clients.serve_threads:
            run_steps(self._maintain(self._clients.sync()))

    async def amaintain(self) -> None:
        """`maintain`, for tasks."""
        client = self._clients.asynchronous()
        await client.initialize()  # otherwise the nodes of a Cluster are unknown
        await arun_steps(self._maintain(client))

    def close(self) -> None:
        """Close the client for threads if this store opened it."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the clients that this store opened for the running event loop and for threads. Call it in each loop."""
        if self._repeating:
            await asyncio.wait(self._repeating)
        await self._clients.aclose()

    # -- the commands of each, for both kinds of client ----------------------------------------------------------

    def _execute(self, open_client: Callable[[], Any], operation: Operation[T]) -> Steps[T]:
        key = conversation_key(self._prefix, operation.conversation)
        script, arguments = self._call(operation)
        if isinstance(operation, Forget):
            self._journal.add(key)  # first, or a failover in between would lose it
        client = open_client()
        try:
            answer = yield from script.steps(client, key, self._bounds, *arguments)
            if not _is_sound(script, answer, arguments):
                raise InvalidResponse(f"the answer to {script.name} was damaged, or belongs to another call")
        except (ReadOnlyError, InvalidResponse):
            yield self._clients.disconnect(client)
            raise
        if isinstance(operation, Prepare):
            answer = self._prepared(answer[:-SEAL_SIZE], operation)
        elif isinstance(operation, Forget):
            answer = None
        else:
            answer = bool(answer)
        return answer  # type: ignore[no-any-return]

    def _call(self, operation: Operation[Any]) -> tuple[Script, tuple[bytes, ...]]:
        """Return an operation's script and the arguments behind the bounds."""
        if isinstance(operation, Prepare):
            is_new = b"1" if self._servers.is_new else b""
            return PREPARE, (*codec.pack_plan(operation.plan_id), codec.pack_proposed(operation.proposed), is_new)
        if isinstance(operation, Commit):
            return COMMIT, (*codec.pack_plan(operation.plan_id), *codec.pack_sent(operation.sent))
        if isinstance(operation, Abandon):
            return ABANDON, codec.pack_plan(operation.plan_id)
        if isinstance(operation, Forget):
            return FORGET, ()
        raise unknown_operation(operation)

    def _prepared(self, packed: bytes, operation: Prepare) -> PreparedTurn:
        answer = codec.unpack_prepared(packed, operation.proposed)
        if not self._clients.serve_threads and self._servers.needs_repetition(answer.server):
            self._maintain_soon()
        is_trusted = self._servers.is_trusted(answer.server)
        contested = answer.contested if is_trusted else frozenset(answer.seen)
        return PreparedTurn(answer.turn, answer.seen, answer.taken, contested)

    def _inspect(self, client: Any, conversation: Conversation) -> Steps[Snapshot | None]:
        try:
            fields = yield partial(client.hgetall, conversation_key(self._prefix, conversation))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):  # a key of another type is nothing that this version can read
                raise
            return None
        return codec.unpack_hash(fields)

    def _clear(self, client: Any) -> Steps[None]:
        pattern = keys_pattern(self._prefix)
        for target in _primaries(client):
            cursor = 0
            while True:
                cursor, keys = yield partial(client.scan, cursor, match=pattern, count=_KEYS_PER_SCAN, **target)
                if keys:
                    yield partial(client.unlink, *keys)
                if isinstance(cursor, dict):  # a Cluster's client returns the cursor of each node that it asked
                    (cursor,) = cursor.values()
                if not cursor:
                    break

    # -- servers seen for the first time -------------------------------------------------------------------------

    def _maintain(self, client: Any) -> Steps[None]:
        failures: list[Exception] = []
        for target in _primaries(client):
            try:
                yield from self._repeat_journal(client, target)
            except Exception as error:  # noqa: PERF203 - one node that is down must not keep the others waiting
                failures.append(error)
        if failures:
            raise failures[0]

    def _repeat_journal(self, client: Any, target: Mapping[str, Any]) -> Steps[None]:
        about_server = yield partial(client.info, "server", **target)
        about_replication = yield partial(client.info, "replication", **target)
        server = codec.read_info(about_server, about_replication)
        if self._servers.needs_repetition(server):
            began = self._servers.now()
            for key in self._journal.recent():
                if not target or client.get_node_from_key(key).name == target["target_nodes"].name:
                    yield from FORGET.steps(client, key, self._bounds)
            self._servers.repeated(server, began)

    def _maintain_soon(self) -> None:
        if not self._repeating:
            task = asyncio.get_running_loop().create_task(self.amaintain())
            self._repeating.add(task)
            task.add_done_callback(self._maintenance_ended)

    def _maintenance_ended(self, task: asyncio.Task[None]) -> None:
        self._repeating.discard(task)
        if not task.cancelled():
            task.exception()  # the next request finds that it failed, and starts it again


def _is_sound(script: Script, answer: Any, arguments: tuple[bytes, ...]) -> bool:
    """Return whether a script's answer is complete and belongs to this call."""
    if script is not PREPARE:
        return isinstance(answer, int)
    return isinstance(answer, bytes) and answer[-SEAL_SIZE:] == seal(answer[:-SEAL_SIZE], arguments[0])


def _primaries(client: Any) -> list[dict[str, Any]]:
    """Return the options that direct a command to each primary of a Cluster; of one server, no options."""
    return [{"target_nodes": node} for node in client.get_primaries()] if is_cluster(client) else [{}]
