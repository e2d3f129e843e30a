"""Clients from a URL: for one server, for the master that Sentinels name, or for a Cluster.

They never try again by themselves: whoever waits for an answer has milliseconds, and decides what failing means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
from redis.retry import Retry

__all__ = ["SCHEMES", "Opened", "Target", "connect", "connect_async", "parse_target"]

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)
"""What a URL may begin with; "valkey" may stand for "redis". "rediss" and "valkeys" mean TLS."""

_PORTS = {"cluster": 6_379, "sentinel": 26_379}
# Newer versions take this from `retry`, and warn of the older way.
_NO_CLUSTER_RETRIES: dict[str, Any] = (
    {"cluster_error_retry_attempts": 0} if int(redis.__version__.split(".")[0]) < 6 else {}
)


@dataclass(frozen=True)
class Target:
    """Where a URL leads; without I/O."""

    kind: str
    """One of "redis", "sentinel" and "cluster"."""
    url: str
    """What redis-py calls it; for one server only."""
    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """Of every connection to data."""
    sentinel_options: dict[str, Any] = field(default_factory=dict)
    """Of every connection to a Sentinel."""


def parse_target(url: str) -> Target:
    """Read a URL; ValueError naming what is allowed.

    Options of redis-py may follow behind a question mark, such as `?socket_timeout=0.5`; for Sentinels' own
    credentials, `?sentinel_username=...&sentinel_password=...`.

    >>> parse_target("redis+sentinel://:secret@one:26379,two/service/1").nodes
    (('one', 26379), ('two', 26379))
    """
    scheme, separator, rest = url.partition("://")
    known = scheme.lower().replace("valkey", "redis", 1)
    if not separator or f"{known}://" not in SCHEMES:
        allowed = f"{', '.join(SCHEMES)}, or with valkey in place of redis, such as valkey://"
        raise ValueError(f"url must begin with one of {allowed}, got {separator and scheme + separator!r}")
    secure, _, kind = known.partition("+")
    if not kind:
        url = f"{known}://{rest}"
        _check_port(url)
        _check_options(parse_url(url))  # type: ignore[no-untyped-call]
        _database("" if known == "unix" else urlsplit(url).path)
        return Target("redis", url)
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    nodes = tuple(_node(host, kind) for host in hosts.split(","))
    options: dict[str, Any] = dict(parse_url(f"redis://?{query}"))  # type: ignore[no-untyped-call]
    _check_options(options)
    username, _, password = credentials.partition(":")
    options |= {name: unquote(value) for name, value in (("username", username), ("password", password)) if value}
    if secure == "rediss":
        options["ssl"] = True
    own = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    if kind == "cluster":
        if _database(path) != 0:
            raise ValueError(f"url's database must be 0, the only one of a Cluster; got {path!r}")
        return Target(kind, "", nodes, options=options)
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("url must name the Sentinels' service behind the hosts: redis+sentinel://host:port/service")
    options["db"] = _database(database)
    sentinel_options = {name: value for name, value in own.items() if value is not None}
    if "ssl" in options:
        sentinel_options["ssl"] = True
    return Target(kind, "", nodes, unquote(service), options, sentinel_options)


def _check_port(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:  # which repeats what may be a part of a password
        raise ValueError(
            "url's port must be a number; percent-encode what is no letter or digit in a user or a password"
        ) from None


@dataclass(frozen=True)
class Opened:
    """A client that is ours to close, with those that it needs itself."""

    client: Any
    others: tuple[Any, ...] = ()

    def close(self) -> None:
        for client in (self.client, *self.others):
            client.close()

    async def aclose(self) -> None:
        for client in (self.client, *self.others):
            await client.aclose()


def connect(target: Target, timeout: float, connect_timeout: float) -> Opened:
    """A client for threads. Only for a Cluster this does I/O, and then raises what redis-py raises."""
    common = _common(timeout, connect_timeout, Retry(NoBackoff(), 0))
    if target.kind == "redis":
        return Opened(redis.Redis.from_url(target.url, **common))
    if target.kind == "sentinel":
        sentinel = redis.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            target.nodes, sentinel_kwargs=common | target.sentinel_options, **common | target.options
        )
        return Opened(sentinel.master_for(target.service), tuple(sentinel.sentinels))  # type: ignore[no-untyped-call]
    return Opened(
        redis.cluster.RedisCluster(
            startup_nodes=[redis.cluster.ClusterNode(host, port) for host, port in target.nodes],  # type: ignore[no-untyped-call]
            require_full_coverage=False,
            **_NO_CLUSTER_RETRIES,
            **common | target.options,
        )
    )


def connect_async(target: Target, timeout: float, connect_timeout: float) -> Opened:
    """A client for the tasks of one event loop; no I/O before its first command."""
    common = _common(timeout, connect_timeout, redis.asyncio.retry.Retry(NoBackoff(), 0))
    if target.kind == "redis":
        return Opened(redis.asyncio.Redis.from_url(target.url, **common))
    if target.kind == "sentinel":
        sentinel = redis.asyncio.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            target.nodes, sentinel_kwargs=common | target.sentinel_options, **common | target.options
        )
        return Opened(sentinel.master_for(target.service), tuple(sentinel.sentinels))
    return Opened(
        redis.asyncio.cluster.RedisCluster(
            startup_nodes=[redis.asyncio.cluster.ClusterNode(host, port) for host, port in target.nodes],
            require_full_coverage=False,
            max_connections=2**31,  # as many as there are tasks, as without a Cluster
            **_NO_CLUSTER_RETRIES,
            **common | target.options,
        )
    )


def _common(timeout: float, connect_timeout: float, retry: Any) -> dict[str, Any]:
    # RESP 2 needs no greeting when it connects, and every version of redis-py speaks it.
    return {"socket_timeout": timeout, "socket_connect_timeout": connect_timeout, "retry": retry, "protocol": 2}


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


def _check_options(options: dict[str, Any]) -> None:
    if "decode_responses" in options:
        raise ValueError("url must not have the option decode_responses: what is stored is binary")
