"""The retry rule: which failures are retried, and after how long. No I/O."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

__all__ = ["Retries", "is_transient", "may_pass", "retry_after", "status_of"]

_TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another attempt may not meet."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential backoff with full jitter: each wait is drawn from zero to a limit that doubles.

    >>> retries = Retries(random=lambda: 0.5)
    >>> [retries.delay(failures, None) for failures in (1, 2, 3, 12)]
    [0.25, 0.5, 1.0, 60.0]

    Raises:
        TypeError: `count` is no int.
        ValueError: `count` or a wait is negative, or `first` is above `longest`.
    """

    count: int = 4
    """Attempts after the first."""
    first: float = 0.5
    """Limit of the first wait, in seconds."""
    longest: float = 120.0
    """Limit of any wait in seconds, including a wait that the server asks for."""
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)
    """Source of numbers in [0, 1)."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise TypeError(f"count must be an int, got {type(self.count).__name__}")
        if self.count < 0:
            raise ValueError(f"count must be 0 or more, got {self.count}")
        if not 0 <= self.first <= self.longest < math.inf:
            raise ValueError(
                f"first and longest must be finite, 0 or more, and first <= longest, got {self.first}, {self.longest}"
            )

    def delay(self, failures: int, requested: float | None) -> float:
        """Return the seconds to wait after this many failures, 1 or more.

        `requested` is the server's `Retry-After`, or None. It gets the first wait's jitter on top, so that clients
        which were refused together do not return together.
        """
        limit = min(self.longest, self.first * 2.0 ** min(failures - 1, 64))
        if requested is None:
            return self.random() * limit
        return min(self.longest, requested + self.random() * self.first)


def may_pass(error: Exception) -> bool:
    """Return True if the same request may succeed later: a transient status, or a failure without a status."""
    if isinstance(error, UnicodeError) or getattr(error, "code", None) == "insufficient_quota":
        return False
    status = status_of(error)
    return status is None or is_transient(status)


def is_transient(status: int) -> bool:
    """Return True if another attempt may not meet this HTTP status."""
    return status in _TRANSIENT or status >= 500


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of a failure, or of an error that was reported within a stream; None without one."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    try:
        return None if status is None else int(status)
    except (TypeError, ValueError):  # such as "server_error"
        return None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds from now that the server asks to wait; None if it does not.

    Reads `retry-after-ms`, then `Retry-After` in seconds or as a date. A time that has passed is 0.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None
