"""When a request that failed is sent again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Retries"]


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential backoff with full jitter: each wait is drawn from zero to a limit that doubles.

    >>> retries = Retries(random=lambda: 0.5)
    >>> [retries.delay(failures, None) for failures in (1, 2, 3, 12)]
    [0.25, 0.5, 1.0, 60.0]

    Raises:
        TypeError: `count` is no int.
        ValueError: `count` is negative, or the waits are.
    """

    count: int = 4
    """Attempts after the first."""
    first: float = 0.5
    """Limit of the first wait, in seconds."""
    longest: float = 120.0
    """Limit of any wait, one that the server asks for included."""
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)
    """Draws from [0, 1)."""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise TypeError(f"count must be an int, got {type(self.count).__name__}")
        if self.count < 0:
            raise ValueError(f"count must be 0 or more, got {self.count}")
        if not 0 <= self.first <= self.longest < math.inf:
            raise ValueError(f"waits must be finite, 0 or more, and first <= longest, got {self.first}, {self.longest}")

    def delay(self, failures: int, asked: float | None) -> float:
        """Seconds to wait after so many failures, 1 or more; `asked` is what the server wants, by `Retry-After`.

        That is kept, with the first wait's jitter on top, so that those who were sent away together do not come back
        together.
        """
        limit = min(self.longest, self.first * 2.0 ** min(failures - 1, 64))
        if asked is None:
            return self.random() * limit
        return min(self.longest, asked + self.random() * self.first)
