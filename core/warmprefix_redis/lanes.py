"""Calls that may hang, with a bound on the time that their callers wait."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, TypeVar

from warmprefix.errors import check_count
from warmprefix.forks import fork_safe_lock, in_each_process

__all__ = ["Lanes", "give_up"]

T = TypeVar("T")


class Lanes:
    """A few daemon threads that make calls, so that callers can stop waiting.

    Nothing else bounds a call's time: timeouts of sockets apply to each read, and looking up a host name has none. It
    costs two thread switches, about 50 µs per call. Threads start as needed, and end with the process, with this object
    or at `close`. Thread-safe; also works in a forked process.

    Args:
        size: Most threads, and so most calls that can hang at once. Further calls wait for a free thread.
    """

    def __init__(self, size: int) -> None:
        check_count("size", size)
        self._size = size
        in_each_process(self._start_crew)

    def run(self, call: Callable[[], T], seconds: float, late: Callable[[], object] = lambda: None) -> T:
        """Return the call's result, or raise its exception.

        Args:
            call: The call that may hang.
            seconds: How long to wait for it.
            late: Called if the call ends after its caller stopped waiting.

        Raises:
            TimeoutError: The call took longer. It may still be running; if it had not started, it never will.
        """
        job = self.submit(call)
        try:
            return job.result(max(seconds, 0))
        except FutureTimeoutError:
            if job.done():  # in the meantime; or the call itself raised a TimeoutError
                return job.result()
            give_up(job, late)
            raise TimeoutError(f"no answer in {seconds * 1000:.0f} ms") from None
        except BaseException:  # such as KeyboardInterrupt
            if not job.done() or job.exception() is None:
                give_up(job, late)
            raise
        finally:
            del job  # or its exception and the traceback would reference each other

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have a thread make the call. See `give_up` for callers that stop waiting."""
        job: Future[T] = Future()
        self._crew.take(job, call)
        return job

    def close(self) -> None:
        """End the threads, each after its current call. A later call starts new ones."""
        self._crew.dismiss()

    def _start_crew(self) -> None:
        self._crew = _Crew(self._size)
        weakref.finalize(self, self._crew.dismiss)


def give_up(job: Future[Any], late: Callable[[], object]) -> None:
    """Withdraw a call that has not started; otherwise call `late` once it has ended."""
    if not job.cancel():
        job.add_done_callback(lambda job: late())


class _Crew:
    """The threads of one process."""

    def __init__(self, size: int) -> None:
        self._process = os.getpid()
        self._size = size
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # Re-entrant, as the queue is: the garbage collector may make calls, in the middle of anything.
        self._lock = fork_safe_lock()
        self._threads = 0
        self._busy = 0
        """Jobs that are queued or running."""

    def take(self, job: Future[T], call: Callable[[], T]) -> None:
        with self._lock:
            if self._busy >= self._threads and self._threads < self._size:
                threading.Thread(target=self._work, name="warmprefix-store", daemon=True).start()
                self._threads += 1
            self._busy += 1
        self._jobs.put((job, call))

    def dismiss(self) -> None:
        if self._process == os.getpid():
            with self._lock:
                for _ in range(self._threads):
                    self._jobs.put(None)
                self._threads = 0

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None:
            _make(*work)
            del work  # and everything that it references, while this thread waits for the next
            with self._lock:
                self._busy -= 1


def _make(job: Future[T], call: Callable[[], T]) -> None:
    if not job.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        job.set_exception(error)
        del job  # or it and the exception's traceback would reference each other
    else:
        job.set_result(result)
