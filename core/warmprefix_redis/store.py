"""Conversation state in Redis or Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import InvalidResponse, ReadOnlyError, ResponseError

from warmprefix.stores import (
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
from warmprefix_redis import wire
from warmprefix_redis.connections import Clients, is_cluster
from warmprefix_redis.server_trust import ForgetJournal, ServerTrust

__all__ = ["RedisSeenStore"]

T = TypeVar("T")

_KEYS_PER_SCAN = 500


class RedisSeenStore:
    """A `SeenStore` in Redis (6.2 or newer) or Valkey: one hash per conversation, one atomic script per operation.

    Text is never stored; only digests, labels, turns and token counts. Times are those of the server's clock. Every
    write renews a conversation's time to live. Its key is evicted, expired and moved as a whole. The store raises what
    redis-py raises, and never retries.

    A forgotten conversation may return when the server loses its last writes, in a failover or a restart. So the store
    keeps a journal of its last 10,000 forgets, which `maintain` replays to a new server. Until that server has settled,
    all blocks that it reports as seen are contested.

    Threads and tasks of any number of event loops may share a store. `close` and `aclose` close the clients that it
    opened itself.

    Args:
        target: A URL, such as `redis://host:6379/0`, `rediss://`, `unix:///path`,
            `redis+sentinel://host:port,host:port/service/0` or `redis+cluster://host:port,host:port`; or a client,
            which may be a Redis or RedisCluster of redis or of redis.asyncio, and then serves methods of its own
            kind only. A client's timeouts and retries are its own; it must not decode responses.
        async_client: The other kind of client, if `target` is one for threads and both kinds of method are needed.
        prefix: Beginning of all keys.
        max_blocks: Blocks remembered per conversation. When the count is an eighth above it (from 64 on), the oldest
            are dropped, and sent again. Of labels, four times as many.
        max_leases: Open plans per conversation; beyond it the oldest can no longer be committed.
        ttl: Seconds after its last use at which a conversation is dropped.
        lease_ttl: Seconds in which a plan must be committed.
        settle: Seconds for which a new server is not trusted; 0 if only one worker ever forgets anything.
        timeout: Seconds that a command may take, by clients of a URL. Well above what a request should wait: a commit
            that comes late is better than none.
        connect_timeout: Seconds that connecting may take, which needs several round trips.
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
            raise ValueError(f"settle must be 0 or more, got {settle}")
        self._prefix = wire.check_prefix(prefix)
        self._bounds = wire.pack_bounds(max_blocks, max_leases, ttl, lease_ttl)
        self._journal = ForgetJournal()
        self._trust = ServerTrust(settle, self._journal)
        self._clients = Clients(target, async_client, timeout, connect_timeout)
        self.serves_threads = self._clients.serve_threads
        """True if the store has a client for threads."""
        self.serves_tasks = self._clients.serve_tasks
        """True if the store has a client for tasks."""
        self._maintaining: set[asyncio.Task[None]] = set()

    # -- operations ----------------------------------------------------------------------------------------------

    def execute(self, operation: Operation[T]) -> T:
        """Execute one operation and return its result."""
        result: T = run_steps(self._execute(self._clients.sync, operation))
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
        """Forget all conversations under the prefix. Not atomic, and not replayed after a failover that loses it."""
        run_steps(self._clear(self._clients.sync()))

    async def aclear(self) -> None:
        """`clear`, for tasks."""
        client = self._clients.asynchronous()
        await client.initialize()  # otherwise the nodes of a Cluster are unknown
        await arun_steps(self._clear(client))

    def maintain(self) -> None:
        """Identify the server, or each primary of a Cluster, and replay the journal to a new one.

        Without a client for threads it does nothing: then `aexecute` starts `amaintain`.
        """
        if self.serves_threads:
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
        if self._maintaining:
            await asyncio.wait(self._maintaining)
        await self._clients.aclose()

    # -- the steps of each, for both kinds of client -------------------------------------------------------------

    def _execute(self, open_client: Callable[[], Any], operation: Operation[Any]) -> Steps[Any]:
        plan = b""
        arguments: tuple[bytes, ...] = ()
        if isinstance(operation, Prepare | Commit | Abandon):
            plan, digest = wire.pack_plan(operation.plan_id)
            arguments = (plan, digest)
        if isinstance(operation, Prepare):
            script = wire.PREPARE
            arguments += (wire.pack_proposed(operation.proposed), b"1" if self._trust.is_new else b"")
        elif isinstance(operation, Commit):
            script = wire.COMMIT
            arguments += wire.pack_sent(operation.sent)
        elif isinstance(operation, Abandon):
            script = wire.ABANDON
        elif isinstance(operation, Forget):
            script = wire.FORGET
        else:
            raise unknown_operation(operation)
        key = wire.conversation_key(self._prefix, operation.conversation)
        if isinstance(operation, Forget):
            self._journal.add(key)  # first, or a failover in between would lose it
        client = open_client()
        try:
            answer = yield from script.steps(client, key, self._bounds, *arguments)
            if isinstance(operation, Prepare):
                answer = wire.unpack_prepared(answer, operation.proposed, plan)
            if not isinstance(answer, wire.PrepareAnswer if isinstance(operation, Prepare) else int):
                raise InvalidResponse(f"the answer to {operation.name} was damaged, or belongs to another call")
        except (ReadOnlyError, InvalidResponse):
            yield self._clients.disconnect(client)
            raise
        if isinstance(answer, wire.PrepareAnswer):
            return self._prepared(answer)
        return None if isinstance(operation, Forget) else bool(answer)

    def _prepared(self, answer: wire.PrepareAnswer) -> PreparedTurn:
        if not self.serves_threads and self._trust.needs_replay(answer.server):
            self._maintain_soon()
        is_trusted = self._trust.is_trusted(answer.server)
        contested = answer.contested if is_trusted else frozenset(answer.seen)
        return PreparedTurn(answer.turn, answer.seen, answer.taken, contested, answer.damaged)

    def _inspect(self, client: Any, conversation: Conversation) -> Steps[Snapshot | None]:
        try:
            fields = yield partial(client.hgetall, wire.conversation_key(self._prefix, conversation))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):  # a key of another type is treated like a missing one
                raise
            return None
        return wire.unpack_hash(fields)

    def _clear(self, client: Any) -> Steps[None]:
        pattern = wire.conversation_pattern(self._prefix)
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

    def _maintain(self, client: Any) -> Steps[None]:
        failures: list[Exception] = []
        for target in _primaries(client):
            try:
                yield from self._replay_journal(client, target)
            except Exception as error:  # noqa: PERF203 - one node that is down must not keep the others waiting
                failures.append(error)
        if failures:
            raise failures[0]

    def _replay_journal(self, client: Any, target: Mapping[str, Any]) -> Steps[None]:
        """Identify a server, and forget there what it may have restored."""
        about_server = yield partial(client.info, "server", **target)
        about_replication = yield partial(client.info, "replication", **target)
        server = wire.read_info(about_server, about_replication)
        if self._trust.needs_replay(server):
            began = self._trust.now()
            for key in self._journal.recent():
                if not target or client.get_node_from_key(key).name == target["target_nodes"].name:
                    yield from wire.FORGET.steps(client, key, self._bounds)
            self._trust.replayed(server, began)

    def _maintain_soon(self) -> None:
        if not self._maintaining:
            task = asyncio.get_running_loop().create_task(self.amaintain())
            self._maintaining.add(task)
            task.add_done_callback(self._maintenance_ended)

    def _maintenance_ended(self, task: asyncio.Task[None]) -> None:
        self._maintaining.discard(task)
        if not task.cancelled():
            task.exception()  # the next request finds that it failed, and starts it again


def _primaries(client: Any) -> list[dict[str, Any]]:
    """Return the options that direct a command to each primary of a Cluster; of one server, no options."""
    return [{"target_nodes": node} for node in client.get_primaries()] if is_cluster(client) else [{}]
