"""A connection for a person who waits for an answer, and errors in words for that person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix_tools.redis_admin.errors import StateError

try:
    import redis
    import redis.exceptions
    import redis.sentinel
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

from warmprefix.stores.redis.urls import SCHEMES, connect, parse_target

__all__ = ["address_of", "connected"]

_TIMEOUT = 5.0
"""Seconds that one command may take."""


@contextmanager
def connected(url: str | None) -> Iterator[Any]:
    """A client as the URL wants it: of one server, of the master that Sentinels know, or of a Cluster.

    Whatever fails in the block is a StateError; it shows hosts and never the URL itself, which may hold a password.
    """
    if not url:
        raise StateError("There is no server to ask: give --url, or set WARMPREFIX_REDIS_URL.")
    try:
        target = parse_target(url)
    except ValueError as error:  # its own words may quote a part of the URL
        raise StateError(
            f"The URL can't be used: it begins with one of {', '.join(SCHEMES)}, or with valkey in place of redis, then"
            " come user:password@ if there are any (with what is no letter or digit as %XX), the hosts, and behind a"
            " slash a Sentinel's service or the number of a database."
        ) from error
    hosts = ", ".join(f"{host}:{port}" for host, port in target.nodes)
    place = {"cluster": f"the Cluster at {hosts}", "sentinel": f"{target.service}, for the Sentinels at {hosts}"}
    where = place.get(target.kind, "the server")
    try:
        opened = connect(target, _TIMEOUT, _TIMEOUT)
        try:
            where = place.get(target.kind) or address_of(opened.client)
            yield opened.client
        finally:
            opened.close()
    except redis.AuthenticationError as error:
        raise StateError(f"Refused by {where}: the URL's user or password is wrong, or it needs one.") from error
    except redis.sentinel.MasterNotFoundError as error:  # its own words are all that the driver knows of its clients
        raise StateError(f"No answer from {where}: none is there, or none knows of a master by that name.") from error
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        raise StateError(f"No answer from {where}: {_reason(error)}.") from error


def address_of(client: Any) -> str:
    """Of the one server that a client asks; where Sentinels name it, they are asked."""
    pool = client.connection_pool
    if hasattr(pool, "get_master_address"):
        host, port = pool.get_master_address()
        return f"{host}:{port}"
    options = pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _reason(error: BaseException) -> str:
    """The first line of what the driver says, without a full stop."""
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0].rstrip(".")
