"""Calls that may hang, waited for no longer than their time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from warmprefix.forks import in_each_process

__all__ = ["Lanes"]

T = TypeVar("T")


class Lanes:
    """Makes calls in a few threads of its own, so that who waits for one can stop waiting.

    Only so is a call's time bounded whatever it does: time-outs of sockets are a matter of each read, and looking up a
    host's name has none. It costs two switches of threads, some 50 µs. Threads are started as they are needed, and end
    with the process, with this object, or at `close`. Thread-safe; works on in a forked process.

    Args:
        size: Most threads, and so most calls that can hang at once; further ones then wait their time in vain.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be 1 or more, got {size}")
        self._size = size
        in_each_process(self._hire)

    def run(self, call: Callable[[], T], seconds: float, late: Callable[[], object] = lambda: None) -> T:
        """The call's outcome, or what it raises.

        Args:
            call: What may hang.
            seconds: How long to wait for it.
            late: Called by its thread if it ends after all when nobody waits any more.

        Raises:
            TimeoutError: It took longer. It may still be going on; if it had not begun, it never will.
        """
        job = _Job(call, late)
        self._crew.take(job)
        return job.outcome(seconds)

    def close(self) -> None:
        """End the threads, each after the call that it is making. A later call starts new ones."""
        self._crew.dismiss()

    def _hire(self) -> None:
        self._crew = _Crew(self._size)
        weakref.finalize(self, self._crew.dismiss)


class _Crew:
    """The threads of one process."""

    def __init__(self, size: int) -> None:
        self.process = os.getpid()
        self._size = size
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        # Re-entrant, as the queue is: the garbage collector may make calls, in the middle of anything.
        self._lock = threading.RLock()
        self._threads = 0
        self._busy = 0
        """Jobs taken and not yet put away."""

    def take(self, job: _Job[Any]) -> None:
        with self._lock:
            if self._busy >= self._threads and self._threads < self._size:
                threading.Thread(target=self._work, name="warmprefix-store", daemon=True).start()
                self._threads += 1
            self._busy += 1
        self._jobs.put(job)

    def dismiss(self) -> None:
        if self.process == os.getpid():
            with self._lock:
                for _ in range(self._threads):
                    self._jobs.put(None)
                self._threads = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # nor what it holds, while waiting for the next
            with self._lock:
                self._busy -= 1


class _Job(Generic[T]):
    __slots__ = ("_call", "_claim", "_done", "_end", "_error", "_given_up", "_late", "_result")

    def __init__(self, call: Callable[[], T], late: Callable[[], object]) -> None:
        self._call = call
        self._late = late
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self._end = threading.Lock()
        self._given_up = False
        self._error: BaseException | None = None

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        with self._end:
            self._done.release()
            is_late = self._given_up
        if is_late:
            self._late()

    def outcome(self, seconds: float) -> T:
        try:
            in_time = self._done.acquire(timeout=max(seconds, 0))
        except BaseException:  # such as KeyboardInterrupt
            if not self._give_up():
                self._late()
            raise
        if not in_time and self._give_up():
            raise TimeoutError(f"no answer in {seconds * 1000:.0f} ms")
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # or it and its traceback would hold each other
        return self._result

    def _give_up(self) -> bool:
        """Withdraw the call if it has not begun; False if it has ended."""
        self._claim.acquire(blocking=False)
        with self._end:
            self._given_up = not self._done.acquire(blocking=False)
            return self._given_up
