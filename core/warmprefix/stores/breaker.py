"""A circuit breaker: what fails is left alone for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from warmprefix.forks import in_each_process

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Opens at the first failure; then admits one call, the probe, after each pause, until one succeeds.

    Each pause is twice the last. Thread-safe; O(1).

    Args:
        first_pause: Seconds from the failure to the first probe.
        longest_pause: Seconds beyond which pauses no longer grow.
        clock: Seconds from any origin, never backwards.

    >>> now = 0.0
    >>> breaker = CircuitBreaker(first_pause=0.1, clock=lambda: now)
    >>> breaker.failed(); breaker.admits()
    False
    >>> now = 0.2
    >>> breaker.admits(), breaker.admits()
    (True, False)
    >>> breaker.succeeded(); breaker.admits(), breaker.admits()
    (True, True)
    """

    def __init__(
        self,
        first_pause: float = 0.1,
        longest_pause: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= first_pause <= longest_pause:
            raise ValueError(
                f"first_pause must be from 0 to longest_pause, which is {longest_pause}; it is {first_pause}"
            )
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._clock = clock
        in_each_process(self._renew_lock)
        self._open = False
        self._pause = first_pause
        self._next_probe = 0.0

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may make calls, in the middle of anything

    @property
    def is_open(self) -> bool:
        """Whether the last that was heard is a failure."""
        return self._open

    def admits(self) -> bool:
        """Whether a call may be made now. Whoever is told so owes a `succeeded` or a `failed`."""
        if not self._open:
            return True
        with self._lock:
            now = self._clock()
            if now < self._next_probe:
                return False
            # The probe may never come back: so a pause later there is another.
            self._pause = min(2 * self._pause, self._longest_pause)
            self._next_probe = now + self._pause
            return True

    def succeeded(self) -> None:
        """A call was answered: closed."""
        if self._open:
            with self._lock:
                self._open = False

    def failed(self) -> None:
        """A call was not: open. Those that were made before it and fail too do not lengthen the pause."""
        with self._lock:
            if not self._open:
                self._open = True
                self._pause = self._first_pause
                self._next_probe = self._clock() + self._pause
