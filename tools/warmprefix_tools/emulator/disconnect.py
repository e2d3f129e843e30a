"""Work that ends when the client goes away: an engine must not keep KV blocks for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

__all__ = ["unless_disconnected"]

T = TypeVar("T")


async def unless_disconnected(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Coroutine[Any, Any, T]
) -> T | None:
    """Await `work`, or cancel it and return None as soon as ASGI's `receive` reports a disconnect.

    The request's body must have been read. When this returns or raises, `work` is over, its cleanup included.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
