"""The retry rule: which failures are retried, and after how long. No I/O."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

__all__ = ["Retries", "is_transient", "may_pass", "retry_after", "status_of"]

_TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another attempt may not meet."""

_FIRST_SECONDS = 0.5
"""Limit of the first wait."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential backoff with full jitter: each wait is drawn from zero to a limit that doubles, from 0.5 s on.

    Raises:
        TypeError: `count` is no int.
        ValueError: `count` or `longest` is negative, or `longest` is not finite.
    """

    count: int = 4
    """Attempts after the first."""
    longest: float = 120.0
    """Limit of any wait in seconds, including a wait that the server asks for."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise TypeError(f"count must be an int, got {type(self.count).__name__}")
        if self.count < 0:
            raise ValueError(f"count must be 0 or more, got {self.count}")
        if not 0 <= self.longest < math.inf:
            raise ValueError(f"longest must be finite, and 0 or more, got {self.longest}")

    def delay(self, failures: int, requested: float | None) -> float:
        """Return the seconds to wait after this many failures, 1 or more.

        `requested` is the server's `Retry-After`, or None. It gets the first wait's jitter on top, so that clients
        which were refused together do not return together.
        """
        limit = min(self.longest, _FIRST_SECONDS * 2.0 ** min(failures - 1, 64))
        drawn = random.random()  # noqa: S311 - no secret
        if requested is None:
            return drawn * limit
        return min(self.longest, requested + drawn * _FIRST_SECONDS)


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
