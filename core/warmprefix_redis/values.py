"""Values in Redis or Valkey that several processes share, each under a name of its own."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import Any

from redis.exceptions import ResponseError

from warmprefix.errors import StoreError
from warmprefix_redis import record
from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.connections import Clients

__all__ = ["RedisValues"]


class RedisValues:
    """One string per value, under `PREFIX:{DIGEST}:kept`, where the digest is that of the value's name. For tasks.

    All methods raise `StoreError` if the server does not answer in time, or refuses. After a failure it is not asked
    again, except for one call after each pause. Nothing checks the values: seal them.

    Args:
        url: As for `RedisSeenStore`.
        prefix: Beginning of all keys.
        ttl: Seconds after it was stored or renewed at which a value is dropped.
        timeout: Seconds that one call may take, connecting included.
    """

    def __init__(self, url: str, *, prefix: str = "wp", ttl: float = 86_400.0, timeout: float = 0.020) -> None:
        self._clients = Clients(url, timeout)
        self._prefix = record.check_prefix(prefix)
        self._milliseconds = max(1, round(ttl * 1_000))
        self._timeout = timeout
        self.breaker = CircuitBreaker()
        """Decides when the server is called again after a failure."""

    async def get(self, name: bytes, *, renew: bool = False) -> bytes | None:
        """Return the value with a name, and `renew` its time to live; None without one."""
        value: bytes | None = await self._call("get", name)
        if renew and value is not None:
            with suppress(StoreError):
                await self._call("pexpire", name, self._milliseconds)
        return value

    async def put(self, name: bytes, value: bytes, *, only_present: bool = False) -> None:
        """Store a value, or renew one; `only_present` stores none that is not there."""
        await self._call("set", name, value, px=self._milliseconds, xx=only_present)

    async def delete(self, name: bytes) -> None:
        """Drop a value."""
        await self._call("unlink", name)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._clients.aclose()

    async def _call(self, command: str, name: bytes, *args: object, **options: object) -> Any:
        key = f"{self._prefix}:{{{hashlib.blake2b(name, digest_size=16).hexdigest()}}}:kept"
        if not self.breaker.admits():
            raise StoreError(command, key)
        client = self._clients.asynchronous()
        try:
            answer = await asyncio.wait_for(getattr(client, command)(key, *args, **options), self._timeout)
        except Exception as error:  # whatever redis-py raises
            self.breaker.failed()
            if isinstance(error, ResponseError) and "READONLY" in f"{type(error).__name__} {error}".upper():
                await self._clients.disconnect(client)()
            raise StoreError(command, key) from error
        self.breaker.succeeded()
        return answer
