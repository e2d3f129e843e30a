"""Whose clients a store uses: its own, of a URL, or those that it was given."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import redis
import redis.asyncio

from warmprefix.forks import in_each_process
from warmprefix.stores.redis.urls import Opened, Target, connect, connect_async, parse_target

__all__ = ["Clients", "is_cluster", "open_clients"]

_SYNC = (redis.Redis, redis.RedisCluster)
_ASYNC = (redis.asyncio.Redis, redis.asyncio.RedisCluster)


class Clients(Protocol):
    """The clients of a store, of both kinds or of one."""

    serve_threads: bool
    serve_tasks: bool

    def sync(self) -> Any: ...

    def asynchronous(self) -> Any: ...

    def disconnect(self, client: Any) -> Callable[[], Any]:
        """Return a call that closes idle connections, so that the next command finds out who is master now."""
        ...

    def close(self) -> None: ...

    async def aclose(self) -> None: ...


def open_clients(target: Any, async_client: Any, timeout: float, connect_timeout: float) -> Clients:
    """From a URL or from clients; TypeError and ValueError say what is allowed."""
    if isinstance(target, str):
        if async_client is not None:
            raise TypeError("async_client goes with a client; a URL serves both kinds of method")
        return _OwnClients(parse_target(target), timeout, connect_timeout)
    given: dict[str, Any] = {}
    for client in (target,) if async_client is None else (target, async_client):
        kind = "threads" if isinstance(client, _SYNC) else "tasks" if isinstance(client, _ASYNC) else None
        if kind is None or kind in given:
            raise TypeError(
                "target must be a URL, a Redis or RedisCluster of redis or of redis.asyncio, or one of each with "
                f"async_client; got {type(target).__name__} and {type(async_client).__name__}"
            )
        if client.get_encoder().decode_responses:
            raise ValueError("the client must have decode_responses=False: what is stored is binary")
        given[kind] = client
    return _GivenClients(given.get("threads"), given.get("tasks"))


def is_cluster(client: Any) -> bool:
    """Whether it is the client of a Cluster, of either kind."""
    return isinstance(client, (redis.RedisCluster, redis.asyncio.RedisCluster))


def _nothing() -> None: ...


async def _nothing_async() -> None: ...


class _GivenClients:
    """Somebody else's: they are used, and otherwise left alone."""

    def __init__(self, for_threads: Any, for_tasks: Any) -> None:
        self.serve_threads = for_threads is not None
        self.serve_tasks = for_tasks is not None
        self._for_threads = for_threads
        self._for_tasks = for_tasks

    def sync(self) -> Any:
        if self._for_threads is None:
            raise TypeError("this store was given a redis.asyncio client only: await the methods that begin with a")
        return self._for_threads

    def asynchronous(self) -> Any:
        if self._for_tasks is None:
            raise TypeError("this store was given no redis.asyncio client: give it one as async_client, or a URL")
        return self._for_tasks

    def disconnect(self, client: Any) -> Callable[[], Any]:
        return _nothing_async if isinstance(client, _ASYNC) else _nothing

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class _OwnClients:
    """One client for all threads and one for each event loop, opened when they are needed first."""

    serve_threads = True
    serve_tasks = True

    def __init__(self, target: Target, timeout: float, connect_timeout: float) -> None:
        self._target = target
        self._timeouts = (timeout, connect_timeout)
        self._for_threads: Opened | None = None
        self._for_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Opened] = weakref.WeakKeyDictionary()
        self._of_the_parent: list[object] = []
        in_each_process(self._start_anew)

    def _start_anew(self) -> None:
        # Not even closed, for that takes locks which may be held for ever.
        self._of_the_parent += [self._for_threads, self._for_loops]
        self._for_threads = None
        self._for_loops = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def sync(self) -> Any:
        opened = self._for_threads
        if opened is None:
            with self._lock:
                if self._for_threads is None:
                    self._for_threads = connect(self._target, *self._timeouts)
                opened = self._for_threads
        return opened.client

    def asynchronous(self) -> Any:
        loop = asyncio.get_running_loop()
        opened = self._for_loops.get(loop)
        if opened is None:
            with self._lock:
                # An open connection keeps its loop alive, so the weak reference alone would not end this.
                for closed in [other for other in self._for_loops if other.is_closed()]:
                    del self._for_loops[closed]
                opened = self._for_loops[loop] = connect_async(self._target, *self._timeouts)
        return opened.client

    def disconnect(self, client: Any) -> Callable[[], Any]:
        if is_cluster(client):  # which finds its masters by itself
            return _nothing_async if isinstance(client, _ASYNC) else _nothing
        return partial(client.connection_pool.disconnect, inuse_connections=False)

    def close(self) -> None:
        with self._lock:
            opened, self._for_threads = self._for_threads, None
        if opened is not None:
            opened.close()

    async def aclose(self) -> None:
        with self._lock:
            opened = self._for_loops.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.aclose()
        self.close()
