"""Iteration over asynchronous generators in code that can't await."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, suppress
from typing import Generic, NamedTuple, TypeVar

__all__ = ["iterate"]

T = TypeVar("T")


def iterate(generator: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
    """Iterate over an asynchronous generator that runs in an event loop and a thread of its own.

    So the caller's thread may have a running loop; it is blocked, though. The generator runs ahead of its reader.
    Closing the iterator, or an exception in the reading thread, cancels the generator, and returns when that has ended.
    """
    pump = _Pump(generator)
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(pump.run,), name="warmprefix-chain-of-agents", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := pump.items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        pump.cancel()
        thread.join()


class _End(NamedTuple):
    """The end of the items."""

    error: BaseException | None


class _Pump(Generic[T]):
    """Runs the generator, and hands over its items."""

    def __init__(self, generator: Callable[[], AsyncGenerator[T, None]]) -> None:
        self.items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._generator = generator
        self._lock = threading.Lock()
        self._cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._pump())
        except BaseException as raised:  # the reader raises it
            error = raised
        self.items.put(_End(error))

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._loop is not None and self._task is not None:
                with suppress(RuntimeError):  # the loop is closed: everything has ended
                    self._loop.call_soon_threadsafe(self._task.cancel)

    async def _pump(self) -> None:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._cancelled:
                return
        async with aclosing(self._generator()) as items:
            async for item in items:
                self.items.put(item)
