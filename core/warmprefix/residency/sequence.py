"""What the sequence number of a publisher's message says of those before it. Pure."""

from __future__ import annotations

from enum import Enum

__all__ = ["Arrival", "Sequence"]


class Arrival(Enum):
    """How a message stands to what was applied before."""

    NEXT = "next"
    """Nothing is between them."""
    SEEN = "seen"
    """It was applied before, from a replay."""
    GAP = "gap"
    """Messages between them are missing."""
    RESTART = "restart"
    """The publisher began anew: it counts from 0 again, and holds nothing of what it held."""


class Sequence:
    """How far one publisher's messages were applied.

    Publishers count their messages from 0 on and don't say when they were started. What comes live comes in order, so
    a number that is not above the live one before it means a restart. One that is not above the last one *replayed* is
    no news, unless it was written later.
    """

    def __init__(self) -> None:
        self.applied: int | None = None
        """The last one applied; None if nothing is known."""
        self.applied_time = 0.0
        """What its batch had for time."""
        self._live: int | None = None

    def arrive(self, number: int, time: float) -> Arrival:
        """Judge a live message, whose batch has this time, and note that it came."""
        before, self._live = self._live, number
        if self.applied is None:
            return Arrival.NEXT if number == 0 else Arrival.GAP
        if before is not None and number <= before:
            return Arrival.RESTART
        if number > self.applied:
            return Arrival.NEXT if number == self.applied + 1 else Arrival.GAP
        return Arrival.RESTART if time > self.applied_time else Arrival.SEEN

    def apply(self, number: int, time: float) -> None:
        """Everything up to this message is applied, or given up."""
        self.applied, self.applied_time = number, time

    def reset(self) -> None:
        """Nothing is known any more. Live messages are still judged by those before."""
        self.applied, self.applied_time = None, 0.0
