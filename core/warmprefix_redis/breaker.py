"""A circuit breaker: calls that fail are not repeated for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from warmprefix.forks import fork_safe_lock

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Opens at the first failure; then admits one call, the probe, after each pause, until one succeeds.

    Each pause is twice the last. Thread-safe; O(1).

    Args:
        first_pause: Seconds from the failure to the first probe.
        longest_pause: Longest pause in seconds.
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
            raise ValueError(f"first_pause must be 0 to longest_pause, which is {longest_pause}, got {first_pause}")
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._clock = clock
        self._lock = fork_safe_lock()  # the garbage collector may make calls, in the middle of anything
        self.is_open = False
        """True if the last reported outcome is a failure."""
        self._pause = first_pause
        self._next_probe = 0.0

    def admits(self) -> bool:
        """Return whether a call may be made now. If so, report its outcome by `succeeded` or `failed`."""
        if not self.is_open:
            return True
        with self._lock:
            now = self._clock()
            if now < self._next_probe:
                return False
            # The probe's outcome may never be reported: so another one follows a pause later.
            self._pause = min(2 * self._pause, self._longest_pause)
            self._next_probe = now + self._pause
            return True

    def succeeded(self) -> None:
        """Report that a call succeeded, which closes the breaker."""
        self.is_open = False

    def failed(self) -> None:
        """Report that a call failed, which opens the breaker. Further failures do not lengthen the pause."""
        with self._lock:
            if not self.is_open:
                self.is_open = True
                self._pause = self._first_pause
                self._next_probe = self._clock() + self._pause
