"""How much of a stream is worth keeping."""

from __future__ import annotations

from collections import deque

__all__ = ["Retention"]


class Retention:
    """Tells where the newest `keep` orders of a stream begin, give or take one in 64.

    Entries hold from one order to dozens, so a bound on entries would be none on orders. Memory: O(64).

    >>> kept = Retention(keep=100)
    >>> for number in range(100):
    ...     kept.add(b"%d-0" % number, orders=2)
    >>> kept.start
    b'50-0'
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._step = max(keep // 64, 1)
        self._steps: deque[tuple[bytes, int]] = deque()
        self._orders = 0

    def add(self, id: bytes, orders: int) -> None:
        """Count an entry; entries come in the order of the stream."""
        if self._steps and self._steps[-1][1] < self._step:
            first, before = self._steps.pop()
            self._steps.append((first, before + orders))
        else:
            self._steps.append((id, orders))
        self._orders += orders
        while self._orders - self._steps[0][1] >= self._keep:
            self._orders -= self._steps.popleft()[1]

    @property
    def start(self) -> bytes | None:
        """The entry with which they begin; None if as many have not been seen."""
        return self._steps[0][0] if self._orders >= self._keep else None
