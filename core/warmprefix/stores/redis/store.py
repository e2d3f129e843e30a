"""Conversation state in Redis or Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix.stores.base import Conversation, Prepared, SeenBlock, Snapshot
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

_KEYS_AT_ONCE = 500


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

    # -- the contract ------------------------------------------------------------------------------------------

    def prepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        arguments = (*codec.pack_plan(plan_id), codec.pack_proposed(proposed), b"1" if self._servers.is_new else b"")
        return self._prepared(codec.unpack_prepared(self._run(PREPARE, self._key(conversation), *arguments), proposed))

    def commit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        arguments = (*codec.pack_plan(plan_id), *codec.pack_sent(sent))
        return bool(self._run(COMMIT, self._key(conversation), *arguments))

    def abandon(self, conversation: Conversation, plan_id: str) -> bool:
        return bool(self._run(ABANDON, self._key(conversation), *codec.pack_plan(plan_id)))

    def forget(self, conversation: Conversation) -> None:
        key = self._key(conversation)
        self._journal.add(key)  # first, or a failover in between would lose it
        self._run(FORGET, key)

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        try:
            return codec.unpack_hash(self._clients.sync().hgetall(self._key(conversation)))
        except ResponseError as error:
            _check_no_hash(error)
            return None

    def clear(self) -> None:
        """Forget all conversations under the prefix. Not atomic; and not repeated after a failover that loses it."""
        client = self._clients.sync()
        found: list[bytes] = []
        for key in client.scan_iter(match=keys_pattern(self._prefix), count=_KEYS_AT_ONCE):
            found.append(key)
            if len(found) == _KEYS_AT_ONCE:
                client.unlink(*found)
                found.clear()
        if found:
            client.unlink(*found)

    # -- the contract, awaited ---------------------------------------------------------------------------------

    async def aprepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        arguments = (*codec.pack_plan(plan_id), codec.pack_proposed(proposed), b"1" if self._servers.is_new else b"")
        answer = codec.unpack_prepared(await self._arun(PREPARE, self._key(conversation), *arguments), proposed)
        if not self._clients.serve_threads and self._servers.needs_repetition(answer.server):
            self._repeat_soon()
        return self._prepared(answer)

    async def acommit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        arguments = (*codec.pack_plan(plan_id), *codec.pack_sent(sent))
        return bool(await self._arun(COMMIT, self._key(conversation), *arguments))

    async def aabandon(self, conversation: Conversation, plan_id: str) -> bool:
        return bool(await self._arun(ABANDON, self._key(conversation), *codec.pack_plan(plan_id)))

    async def aforget(self, conversation: Conversation) -> None:
        key = self._key(conversation)
        self._journal.add(key)
        await self._arun(FORGET, key)

    async def ainspect(self, conversation: Conversation) -> Snapshot | None:
        try:
            return codec.unpack_hash(await self._clients.asynchronous().hgetall(self._key(conversation)))
        except ResponseError as error:
            _check_no_hash(error)
            return None

    async def aclear(self) -> None:
        client = self._clients.asynchronous()
        found: list[bytes] = []
        async for key in client.scan_iter(match=keys_pattern(self._prefix), count=_KEYS_AT_ONCE):
            found.append(key)
            if len(found) == _KEYS_AT_ONCE:
                await client.unlink(*found)
                found.clear()
        if found:
            await client.unlink(*found)

    # -- servers not met before --------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Ask the server, or each primary of a Cluster, who it is; repeat the journal to one not met before.

        Without a client for threads there is nothing that it could do: then `aprepare` sees to it.
        """
        if not self._clients.serve_threads:
            return
        client = self._clients.sync()
        failures: list[Exception] = []
        for node in _primaries(client):
            try:
                self._meet(client, node)
            except Exception as error:  # noqa: PERF203  (such as of a node that is down: the others go first)
                failures.append(error)
        if failures:
            raise failures[0]

    async def amaintain(self) -> None:
        """The same for tasks."""
        client = self._clients.asynchronous()
        await client.initialize()  # a Cluster's nodes are not known before
        failures: list[Exception] = []
        for node in _primaries(client):
            try:
                await self._ameet(client, node)
            except Exception as error:  # noqa: PERF203
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Close the client for threads if it is this store's own."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close this store's own clients, that of the running event loop and that for threads; each loop calls it."""
        if self._repeating:
            await asyncio.wait(self._repeating)
        await self._clients.aclose()

    # -- how ---------------------------------------------------------------------------------------------------

    def _key(self, conversation: Conversation) -> bytes:
        return conversation_key(self._prefix, conversation)

    def _run(self, script: Script, key: bytes, *arguments: bytes) -> Any:
        try:
            return _sound(script, script.run(self._clients.sync(), key, self._bounds, *arguments), *arguments)
        except (ReadOnlyError, InvalidResponse):
            self._clients.reconnect()
            raise

    async def _arun(self, script: Script, key: bytes, *arguments: bytes) -> Any:
        try:
            return _sound(
                script, await script.arun(self._clients.asynchronous(), key, self._bounds, *arguments), *arguments
            )
        except (ReadOnlyError, InvalidResponse):
            await self._clients.areconnect()
            raise

    def _prepared(self, answer: codec.Answer) -> Prepared:
        is_trusted = self._servers.is_trusted(answer.server)
        return Prepared(
            answer.turn, answer.seen, answer.taken, answer.contested if is_trusted else frozenset(answer.seen)
        )

    def _meet(self, client: Any, node: Any) -> None:
        options = {} if node is None else {"target_nodes": node}
        server = codec.read_info(client.info("server", **options), client.info("replication", **options))
        if self._servers.needs_repetition(server):
            began = self._servers.now()
            for key in self._journalled(client, node):
                FORGET.run(client, key, self._bounds)
            self._servers.repeated(server, began)

    async def _ameet(self, client: Any, node: Any) -> None:
        options = {} if node is None else {"target_nodes": node}
        server = codec.read_info(await client.info("server", **options), await client.info("replication", **options))
        if self._servers.needs_repetition(server):
            began = self._servers.now()
            for key in self._journalled(client, node):
                await FORGET.arun(client, key, self._bounds)
            self._servers.repeated(server, began)

    def _journalled(self, client: Any, node: Any) -> list[bytes]:
        keys = self._journal.keys()
        if node is None:
            return keys
        return [key for key in keys if client.get_node_from_key(key).name == node.name]

    def _repeat_soon(self) -> None:
        if not self._repeating:
            task = asyncio.get_running_loop().create_task(self.amaintain())
            self._repeating.add(task)
            task.add_done_callback(self._repetition_ended)

    def _repetition_ended(self, task: asyncio.Task[None]) -> None:
        self._repeating.discard(task)
        if not task.cancelled():
            task.exception()  # the next request sees that it failed, and begins anew


def _sound(script: Script, answer: Any, *arguments: bytes) -> Any:
    """A script's answer, if it is whole, and the one to this very call."""
    if script is not PREPARE:
        is_sound = isinstance(answer, int)
    else:
        is_sound = isinstance(answer, bytes) and answer[-SEAL_SIZE:] == seal(answer[:-SEAL_SIZE], arguments[0])
    if not is_sound:
        raise InvalidResponse(f"the answer to {script.name} was damaged on the way, or belongs to another call")
    return answer[:-SEAL_SIZE] if script is PREPARE else answer


def _primaries(client: Any) -> list[Any]:
    """A Cluster's primaries; None for a client of one server."""
    return list(client.get_primaries()) if is_cluster(client) else [None]


def _check_no_hash(error: ResponseError) -> None:
    """Another type of key is nothing that this version can read; all else is an error."""
    if not str(error).startswith("WRONGTYPE"):
        raise error
