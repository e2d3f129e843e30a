"""A background thread that calls an object's method repeatedly without keeping the object alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from warmprefix.forks import fork_safe_lock

__all__ = ["Ticker"]


class Ticker:
    """A daemon thread that calls `tick`, again after the seconds that it returns, until its object is collected.

    `wake` and `stop` may be called from anywhere, including signal handlers and finalizers. A forked process does not
    have the thread: its object needs a new ticker there.
    """

    def __init__(self, tick: Callable[[], float], end: Callable[[], object], name: str) -> None:
        """Create the ticker; nothing runs before `start`.

        Args:
            tick: A bound method. Its object is referenced only during a call.
            end: Called last, by the thread; must not reference the object.
            name: The thread's name.
        """
        owner: Any = getattr(tick, "__self__")  # noqa: B009
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._tick: Callable[[Any], float] = getattr(tick, "__func__")  # noqa: B009
        self._end = end
        self._name = name
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._starting = fork_safe_lock()
        self._thread: threading.Thread | None = None
        weakref.finalize(owner, self._wake.put, False).atexit = False

    def start(self) -> None:
        """Start the thread unless it was started before. Raises RuntimeError if no thread can start."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(
                    target=_run,
                    args=(self._owner, self._tick, self._wake, self._end),
                    name=self._name,
                    daemon=True,
                )
                self._thread = thread
                try:
                    thread.start()
                except RuntimeError:
                    self._thread = None
                    raise

    def wake(self) -> None:
        """Have `tick` called now, or again as soon as it returns."""
        self._wake.put(True)

    def stop(self, timeout: float) -> None:
        """Have `tick` called once more, then end the thread; wait `timeout` seconds for that at most."""
        self._wake.put(False)
        with self._starting:  # another thread may be starting it
            thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout)


def _run(
    reference: weakref.ref[Any], tick: Callable[[Any], float], wake: SimpleQueue[bool], end: Callable[[], object]
) -> None:
    try:
        goes_on = True
        while goes_on:
            owner = reference()
            if owner is None:
                return
            pause = tick(owner)
            del owner
            goes_on = _sleep(wake, pause)
        owner = reference()
        if owner is not None:
            tick(owner)
    finally:
        end()


def _sleep(wake: SimpleQueue[bool], pause: float) -> bool:
    """Wait for a wake-up or until the time is over; False to end the thread."""
    try:
        if not wake.get(timeout=max(pause, 0.0)):
            return False
        while wake.get_nowait():
            pass
        return False
    except Empty:
        return True
