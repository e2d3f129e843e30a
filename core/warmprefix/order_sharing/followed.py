"""What a worker knows of the stream of a scope that it follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from warmprefix.order_sharing.base import Learn
from warmprefix.order_sharing.retention import Retention

__all__ = ["SELDOM", "FollowedStream", "Unlearned"]

_BUSY = 10.0
"""Seconds for which a scope counts as busy after this worker served it."""
_OFTEN = 0.05
"""Most seconds between two looks at what is busy."""
SELDOM = 1.0
"""Seconds between two looks at what is not."""


class Unlearned(NamedTuple):
    """An entry that was read and not learned yet."""

    id: bytes
    payload: bytes
    is_past: bool
    """Whether it was there before this worker followed."""


class FollowedStream:
    """Where reading stands, and when to go on. For one thread; times are seconds of its clock.

    Args:
        key: The stream's name.
        learn: Takes what others appended.
        keep: How many of the latest orders the stream is to keep.
        now: When following began.
    """

    def __init__(self, key: bytes, learn: Learn, keep: int, now: float) -> None:
        self.key = key
        self.learn = learn
        self.retention = Retention(keep)
        self.position = b""
        """The last entry read; empty before the tail was."""
        self.backlog: deque[Unlearned] = deque()
        self.due_at = now
        """When to look at it again."""
        self.taught_at = now
        self.has_caught_up = False
        """Whether the tail was learned."""
        self._busy_until = now + _BUSY
        self._wait = _OFTEN
        self._first_own: tuple[int, int] | None = None
        self._clock: float | None = None
        """From this clock to the one that numbers the entries."""

    # -- when --------------------------------------------------------------------------------------------------

    def served(self, now: float) -> None:
        """This worker serves the scope, so what others do matters soon."""
        self._busy_until = now + _BUSY
        self.due_at = min(self.due_at, now)

    def is_busy(self, now: float) -> bool:
        """Whether this worker served the scope lately."""
        return now < self._busy_until

    def is_new(self, now: float) -> bool:
        """Whether its tail has to be read."""
        return not self.position and self.due_at <= now

    def is_due(self, now: float) -> bool:
        """Whether it has to be looked at."""
        return bool(self.position) and not self.backlog and self.due_at <= now

    def was_read(self, now: float, found: int, most: int, least_wait: float) -> None:
        """A look found so many entries of at most so many: look again at once, soon, or less and less often."""
        self._wait = least_wait if found else min(2 * self._wait, _OFTEN)
        self.due_at = now if found == most else now + (self._wait if self.is_busy(now) else SELDOM)

    # -- what --------------------------------------------------------------------------------------------------

    def has_read(self, id: bytes, payload: bytes) -> None:
        """The next entry."""
        self.position = id
        self.backlog.append(Unlearned(id, payload, False))

    def has_read_tail(self, past: Iterable[tuple[bytes, bytes]]) -> None:
        """The latest entries, oldest first; what comes after them is to be read."""
        self.position = b"0-0"
        for id, payload in past:
            self.position = id
            self.backlog.append(Unlearned(id, payload, True))
        self.was_taught(self.taught_at)

    def was_taught(self, now: float) -> None:
        """What left the backlog was learned."""
        self.taught_at = now
        self.has_caught_up = self.has_caught_up or not (self.backlog and self.backlog[0].is_past)

    def has_appended(self, id: bytes, now: float) -> None:
        """This worker's own entry got this id."""
        place = _place(id)
        self._first_own = self._first_own or place
        self._clock = place[0] / 1_000 - now
        if self.position and place < _place(self.position):
            self.position = id  # the server lost the stream that we knew, or another one took over, whose clock is late

    def was_before(self, id: bytes) -> bool:
        """Whether an entry is older than all that this worker appended since it follows."""
        return self._first_own is None or _place(id) < self._first_own

    def age(self, id: bytes, now: float) -> float | None:
        """Seconds since an entry was appended; None while no own entry has told what the server's clock says."""
        return None if self._clock is None else max(now + self._clock - _place(id)[0] / 1_000, 0.0)


def _place(id: bytes) -> tuple[int, int]:
    milliseconds, _, number = id.partition(b"-")
    return int(milliseconds), int(number)
