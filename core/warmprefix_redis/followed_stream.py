"""The state of a followed scope's stream: read position, backlog, retention and the time of the next look."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from warmprefix.order_sharing import Learn

__all__ = ["IDLE_SECONDS", "FollowedStream", "Retention", "UnlearnedEntry"]

_BUSY_SECONDS = 10.0
"""How long a scope counts as busy after this worker served it."""
_MAX_BUSY_WAIT_SECONDS = 0.05
"""Longest time between two looks at a busy scope."""
IDLE_SECONDS = 1.0
"""Time between two looks at an idle scope."""


class UnlearnedEntry(NamedTuple):
    """An entry that was read and not learned yet."""

    id: bytes
    payload: bytes
    is_past: bool
    """True if it was there before this worker followed the scope."""


class Retention:
    """Finds where the newest `keep` orders of a stream start, to within one part in 64.

    Entries have between one and dozens of orders, so a bound on entries would not bound orders. Memory: O(64).

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
        """Count an entry; call in the order of the stream."""
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
        """Entry with which the newest `keep` orders start; None if fewer were counted."""
        return self._steps[0][0] if self._orders >= self._keep else None


class FollowedStream:
    """One scope's stream, for one thread. Times are seconds of that thread's clock.

    Args:
        key: The stream's key.
        learn: Receives what others appended.
        keep: Number of latest orders that the stream is to keep.
        now: When following began.
    """

    def __init__(self, key: bytes, learn: Learn, keep: int, now: float) -> None:
        self.key = key
        self.learn = learn
        self.retention = Retention(keep)
        self.position = b""
        """Last entry read; empty before the tail was read."""
        self.backlog: deque[UnlearnedEntry] = deque()
        self.due_at = now
        """When to look at it again."""
        self.learned_at = now
        self.has_caught_up = False
        """True once the tail was learned."""
        self._busy_until = now + _BUSY_SECONDS
        self._wait = _MAX_BUSY_WAIT_SECONDS
        self._first_own: tuple[int, int] | None = None
        self._server_offset: float | None = None
        """Seconds from this clock to the server's, which numbers the entries."""

    # -- time of the next look -----------------------------------------------------------------------------------

    def mark_served(self, now: float) -> None:
        """Make the scope busy, because this worker serves it."""
        self._busy_until = now + _BUSY_SECONDS
        self.due_at = min(self.due_at, now)

    def is_busy(self, now: float) -> bool:
        """Return whether this worker served the scope recently."""
        return now < self._busy_until

    def needs_tail(self, now: float) -> bool:
        """Return whether to read its tail now."""
        return not self.position and self.due_at <= now

    def is_due(self, now: float) -> bool:
        """Return whether to look for new entries now."""
        return bool(self.position) and not self.backlog and self.due_at <= now

    def schedule(self, now: float, found: int, limit: int, min_wait: float) -> None:
        """Set the next look after one that found `found` of at most `limit` entries: at once, soon, or ever later."""
        self._wait = min_wait if found else min(2 * self._wait, _MAX_BUSY_WAIT_SECONDS)
        self.due_at = now if found == limit else now + (self._wait if self.is_busy(now) else IDLE_SECONDS)

    # -- entries -------------------------------------------------------------------------------------------------

    def add_read(self, id: bytes, payload: bytes) -> None:
        """Add the next entry to the backlog."""
        self.position = id
        self.backlog.append(UnlearnedEntry(id, payload, False))

    def add_tail(self, past: Iterable[tuple[bytes, bytes]]) -> None:
        """Add the latest entries, oldest first, to the backlog; reading continues behind them."""
        self.position = b"0-0"
        for id, payload in past:
            self.position = id
            self.backlog.append(UnlearnedEntry(id, payload, True))
        self.mark_learned(self.learned_at)

    def mark_learned(self, now: float) -> None:
        """Record that all entries taken from the backlog were learned."""
        self.learned_at = now
        self.has_caught_up = self.has_caught_up or not (self.backlog and self.backlog[0].is_past)

    def add_own(self, id: bytes, now: float) -> None:
        """Record that this worker appended an entry."""
        place = _place(id)
        self._first_own = self._first_own or place
        self._server_offset = place[0] / 1_000 - now
        if self.position and place < _place(self.position):
            self.position = id  # the server lost the stream, or another one took over whose clock is behind

    def precedes_own(self, id: bytes) -> bool:
        """Return whether an entry is older than all that this worker appended since it follows the scope."""
        return self._first_own is None or _place(id) < self._first_own

    def age(self, id: bytes, now: float) -> float | None:
        """Return seconds since an entry was appended; None until an own entry shows the server's clock."""
        return None if self._server_offset is None else max(now + self._server_offset - _place(id)[0] / 1_000, 0.0)


def _place(id: bytes) -> tuple[int, int]:
    milliseconds, _, number = id.partition(b"-")
    return int(milliseconds), int(number)
