"""Redis URLs, and the clients that a store opens from a URL or is given.

Clients opened here never retry: their callers have milliseconds, and decide themselves what a failure means.
"""

from __future__ import annotations

import asyncio

# redis-py imports these two on connecting. A process forked while a thread imports a module can never import it.
import email.parser  # noqa: F401
import encodings.idna  # noqa: F401
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url

from warmprefix.forks import in_each_process

__all__ = ["URL_SCHEMES", "Clients", "RedisTarget", "connect", "is_cluster", "parse_redis_url"]

URL_SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
"""Allowed beginnings of a URL; "valkey" may replace "redis". "rediss" and "valkeys" mean TLS."""

_PORTS = {"cluster": 6_379, "sentinel": 26_379}
_SYNC = (redis.Redis, redis.RedisCluster)
# Newer versions take this from `retry`, and warn about the older way.
_NO_CLUSTER_RETRIES: dict[str, Any] = (
    {"cluster_error_retry_attempts": 0} if int(redis.__version__.split(".")[0]) < 6 else {}
)


# -- URLs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RedisTarget:
    """The servers that a URL leads to."""

    kind: str
    """`"redis"`, `"sentinel"` or `"cluster"`."""
    url: str
    """URL for redis-py; of one server only."""
    nodes: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of Sentinels or of the cluster."""
    service: str = ""
    """Name of the service that the Sentinels watch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of every connection to data."""
    sentinel_options: dict[str, Any] = field(default_factory=dict)
    """Of every connection to a Sentinel."""


def parse_redis_url(url: str) -> RedisTarget:
    """Parse a URL without any I/O.

    Options of redis-py may follow behind a question mark, such as `?socket_timeout=0.5`; for Sentinels' own
    credentials, `?sentinel_username=...&sentinel_password=...`.

    Raises:
        ValueError: It cannot be used; names what is allowed, and never quotes a password.

    >>> parse_redis_url("redis+sentinel://:secret@one:26379,two/service/1").nodes
    (('one', 26379), ('two', 26379))
    """
    scheme, separator, rest = url.partition("://")
    canonical = scheme.lower().replace("valkey", "redis", 1)
    if not separator or f"{canonical}://" not in URL_SCHEMES:
        allowed = f"{', '.join(URL_SCHEMES)}, or with valkey in place of redis, such as valkey://"
        raise ValueError(f"url must begin with one of {allowed}, got {separator and scheme + separator!r}")
    secure, _, kind = canonical.partition("+")
    if not kind:
        url = f"{canonical}://{rest}"
        _check_port(url)
        _options(url)
        _database("" if canonical == "unix" else urlsplit(url).path)
        return RedisTarget("redis", url)
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    nodes = tuple(_node(host, kind) for host in hosts.split(","))
    options = _options(f"redis://?{query}")
    username, _, password = credentials.partition(":")
    options |= {name: unquote(value) for name, value in (("username", username), ("password", password)) if value}
    if secure == "rediss":
        options["ssl"] = True
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    if kind == "cluster":
        if _database(path) != 0:
            raise ValueError(f"url's database must be 0, the only one of a Cluster; got {path!r}")
        return RedisTarget(kind, "", nodes, options=options)
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("url must name the Sentinels' service behind the hosts: redis+sentinel://host:port/service")
    options["db"] = _database(database)
    sentinel_options = {name: value for name, value in own.items() if value is not None}
    if "ssl" in options:
        sentinel_options["ssl"] = True
    return RedisTarget(kind, "", nodes, unquote(service), options, sentinel_options)


def _options(url: str) -> dict[str, Any]:
    options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    if "decode_responses" in options:
        raise ValueError("url must not have the option decode_responses, because stored values are binary")
    return options


def _check_port(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:  # which quotes what may be a part of a password
        raise ValueError(
            "url's port must be a number; percent-encode everything but letters and digits in a user or a password"
        ) from None


def _node(host: str, kind: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{host}")
        if not parts.hostname:
            raise ValueError
        return parts.hostname, parts.port or _PORTS[kind]
    except ValueError:
        raise ValueError(f"url must list its hosts as host:port,host:port; got {host!r}") from None


def _database(path: str) -> int:
    number = path.strip("/") or "0"
    if not number.isdecimal():
        raise ValueError(f"url's database must be a number, got {number!r}")
    return int(number)


# -- clients -----------------------------------------------------------------------------------------------------------


def connect(target: RedisTarget, timeout: float, *, is_async: bool = False) -> list[Any]:
    """Return a client, and behind it the clients that it needs itself; close them all.

    Only a Cluster's client for threads does I/O now, and then raises what redis-py raises.

    Args:
        target: The servers.
        timeout: Seconds that connecting, and then each answer, may take.
        is_async: Return clients of `redis.asyncio`, for the tasks of one event loop.
    """
    library: Any = redis.asyncio if is_async else redis
    # RESP 2 needs no greeting on connecting, and every version of redis-py speaks it.
    common: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": library.retry.Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if target.kind == "redis":
        return [library.Redis.from_url(target.url, **common)]
    if target.kind == "sentinel":
        sentinel = library.sentinel.Sentinel(
            target.nodes, sentinel_kwargs=common | target.sentinel_options, **common | target.options
        )
        return [sentinel.master_for(target.service), *sentinel.sentinels]
    if is_async:
        common["max_connections"] = 2**31  # one per task, as without a Cluster
    return [
        library.RedisCluster(
            startup_nodes=[library.cluster.ClusterNode(host, port) for host, port in target.nodes],
            require_full_coverage=False,
            **_NO_CLUSTER_RETRIES,
            **common | target.options,
        )
    ]


def is_cluster(client: Any) -> bool:
    """Return whether a client of either kind is a Cluster's."""
    return isinstance(client, (redis.RedisCluster, redis.asyncio.RedisCluster))


class Clients:
    """The clients of a store: its own, one for all threads and one for each event loop; or a given one for threads.

    Raises:
        TypeError: `target` is neither a URL nor a client for threads.
        ValueError: The URL cannot be used, or the client decodes responses.
    """

    def __init__(self, target: Any, timeout: float) -> None:
        self._timeout = timeout
        self._given = None if isinstance(target, str) else target
        if isinstance(target, str):
            self._target = parse_redis_url(target)
        elif not isinstance(target, _SYNC):
            raise TypeError(f"target must be a URL, or a Redis or RedisCluster of redis, got {type(target).__name__}")
        elif target.get_encoder().decode_responses:
            raise ValueError("target must have decode_responses=False, as stored values are binary, got True")
        self._of_parent: list[object] = []
        self._for_threads: list[Any] = []
        self._for_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Any]] = weakref.WeakKeyDictionary()
        in_each_process(self._start_process)

    def _start_process(self) -> None:
        # A parent's clients are not even closed, because that takes locks which may be held for ever.
        self._of_parent += [self._for_threads, self._for_loops]
        self._for_threads = []
        self._for_loops = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def sync(self) -> Any:
        """Return the client for threads."""
        if self._given is not None:
            return self._given
        opened = self._for_threads
        if not opened:
            with self._lock:
                opened = self._for_threads = self._for_threads or connect(self._target, self._timeout)
        return opened[0]

    def asynchronous(self) -> Any:
        """Return the client for the tasks of the running event loop."""
        if self._given is not None:
            raise TypeError("this store was given a client for threads: give it a URL, which serves tasks too")
        loop = asyncio.get_running_loop()
        opened = self._for_loops.get(loop)
        if opened is None:
            with self._lock:
                # An open connection keeps its loop alive, so the weak reference alone would not end this.
                for closed in [other for other in self._for_loops if other.is_closed()]:
                    del self._for_loops[closed]
                opened = self._for_loops[loop] = connect(self._target, self._timeout, is_async=True)
        return opened[0]

    def disconnect(self, client: Any) -> Callable[[], Any]:
        """Return a call that closes idle own connections, so that the next command finds out which server is master."""
        if self._given is not None or is_cluster(client):  # a Cluster's client finds its masters by itself
            return _nothing_async if isinstance(client, redis.asyncio.RedisCluster) else _nothing
        return partial(client.connection_pool.disconnect, inuse_connections=False)

    def close(self) -> None:
        """Close the own client for threads."""
        with self._lock:
            opened, self._for_threads = self._for_threads, []
        for client in opened:
            client.close()

    async def aclose(self) -> None:
        """Close the own clients for the running event loop and for threads."""
        with self._lock:
            opened = self._for_loops.pop(asyncio.get_running_loop(), [])
        for client in opened:
            await client.aclose()
        self.close()


def _nothing() -> None: ...


async def _nothing_async() -> None: ...
