"""How long something takes, as counts by bucket: what a metric needs, at the cost of an addition."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import NamedTuple

from warmprefix.forks import in_each_process

__all__ = ["LATENCY_BUCKETS", "LatencyHistogram", "LatencySnapshot"]

LATENCY_BUCKETS = (
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
"""Upper bounds in seconds, inclusive; the last bucket has none."""


class LatencySnapshot(NamedTuple):
    """What a histogram has counted so far."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BUCKETS) + 1)
    """By bucket, not cumulated."""
    seconds: float = 0.0
    """The sum of all."""

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts)


class LatencyHistogram:
    """Thread-safe; `observe` takes O(log buckets), well under a microsecond."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self._seconds = 0.0
        in_each_process(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a finalizer may observe, in the middle of anything

    def observe(self, seconds: float) -> None:
        bucket = bisect_left(LATENCY_BUCKETS, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._seconds += seconds

    def snapshot(self) -> LatencySnapshot:
        with self._lock:
            return LatencySnapshot(tuple(self._counts), self._seconds)

    def reset(self) -> None:
        with self._lock:
            self._counts = [0] * (len(LATENCY_BUCKETS) + 1)
            self._seconds = 0.0
