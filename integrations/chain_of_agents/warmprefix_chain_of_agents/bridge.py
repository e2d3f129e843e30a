"""Iteration over asynchronous generators in code that can't await."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, suppress
from typing import Any, NamedTuple, TypeVar

__all__ = ["iterate"]

T = TypeVar("T")


class _End(NamedTuple):
    """The end of the items."""

    error: BaseException | None


def iterate(generator: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
    """Iterate over an asynchronous generator that runs in an event loop and a thread of its own.

    So the caller's thread may have a running loop; it is blocked, though. The generator runs ahead of its reader.
    Closing the iterator, or an exception in the reading thread, cancels the generator, and returns when that has ended.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def hand_over() -> None:
        items.put((asyncio.get_running_loop(), asyncio.current_task()))
        async with aclosing(generator()) as given:
            async for item in given:
                items.put(item)

    def work() -> None:
        error: BaseException | None = None
        try:
            asyncio.run(hand_over())
        except BaseException as raised:  # the reader raises it
            error = raised
        items.put(_End(error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="warmprefix-chain-of-agents", daemon=True)
    thread.start()
    begun = items.get()
    if isinstance(begun, _End):  # there is no event loop to be had
        raise begun.error or RuntimeError("the event loop ended before it began")
    loop, task = begun
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        with suppress(RuntimeError):  # the loop is closed: everything has ended
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
