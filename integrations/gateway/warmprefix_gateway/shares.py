"""Fair shares of places, bytes and turns. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairTurns", "Shares"]

_GENEROSITY = 2
"""A party may hold this many times what is still free: alone two thirds of all, and each of many the same."""

K = TypeVar("K", bound=Hashable)
Party = str | None
"""Who shares; None if all requests come from one party, which then may have everything."""


class Shares:
    """Units of something bounded, such as places or bytes.

    A part is set aside for each party. What a party holds beyond it is bounded by what is still free of the rest (the
    dynamic thresholds of shared switch memory): a busy party leaves room for the others before they come, and gets
    nothing more until what it holds is back in proportion.

    Args:
        total: Number of units.
        parties: Number of parties, if they are counted: half of the units are set aside, in equal parts.
    """

    def __init__(self, total: int, parties: int = 0) -> None:
        self._part = total // (2 * parties) if parties else 0
        self._free = total - parties * self._part
        """Units that are free, and not set aside."""
        self._held: Counter[Party] = Counter()
        self.used = 0
        """Units that all parties hold."""

    def take(self, party: Party, units: int = 1) -> bool:
        """Take units for a party, and return True; return False, and take none, if that is more than its share."""
        before = self._beyond(party, 0)
        free = self._free - self._beyond(party, units) + before
        if free < self._free and (free < 0 or (party is not None and before > _GENEROSITY * free)):
            return False
        self._add(party, units)
        return True

    def give_back(self, party: Party, units: int = 1) -> None:
        """Return units that were taken."""
        self._add(party, -units)
        if not self._held[party]:
            del self._held[party]

    def _add(self, party: Party, units: int) -> None:
        self._free -= self._beyond(party, units) - self._beyond(party, 0)
        self._held[party] += units
        self.used += units

    def _beyond(self, party: Party, more: int) -> int:
        """Return the units that a party holds, with some more, beyond its part."""
        return max(self._held.get(party, 0) + more - self._part, 0)


class FairTurns(Generic[K]):
    """Turns at a few workers, in a circle of the parties that wait.

    Args:
        total: Turns at one time.
        most: Turns of one party at one time; fewer than `total` leave a worker to the others.
    """

    def __init__(self, total: int, most: int) -> None:
        self._total, self._most = total, most
        self._running: Counter[Party] = Counter()
        self._waiting: OrderedDict[Party, OrderedDict[K, None]] = OrderedDict()

    def enter(self, party: Party, ticket: K) -> bool:
        """Return True if the party has its turn now; otherwise its ticket waits until `leave` returns it."""
        if self._running.total() < self._total and self._running[party] < self._bound(party):
            self._running[party] += 1
            return True
        self._waiting.setdefault(party, OrderedDict())[ticket] = None
        return False

    def leave(self, party: Party) -> K | None:
        """End a turn of a party; return the ticket that has the next one."""
        self._running[party] -= 1
        if not self._running[party]:
            del self._running[party]
        for other, tickets in self._waiting.items():
            if self._running[other] < self._bound(other):
                self._running[other] += 1
                ticket, _ = tickets.popitem(last=False)
                self._waiting.move_to_end(other)
                if not tickets:
                    del self._waiting[other]
                return ticket
        return None

    def give_up(self, party: Party, ticket: K) -> None:
        """Remove a ticket that still waits."""
        tickets = self._waiting.get(party)
        if tickets is not None and tickets.pop(ticket, self) is None and not tickets:
            del self._waiting[party]

    def _bound(self, party: Party) -> int:
        return self._total if party is None else self._most
