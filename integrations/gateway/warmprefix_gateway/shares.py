"""Fair shares of what a gateway has little of: room, places and turns. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["FairTable", "FairTurns", "Shares"]

_GENEROSITY = 8
"""A party may hold this many times what is still free, so one that is alone takes 8 ninths of all, and each of many the
same. What is left lets a party that holds nothing in at once, without taking anything from the others."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Party = str | None
"""Who shares; None if all requests come from one party, which then may have everything."""


class Shares:
    """Units of something bounded, such as places or bytes.

    The bound of a party follows what is free (the dynamic thresholds of shared switch memory): a busy party leaves room
    for the others before they come, and gets nothing more until what it holds is back in proportion.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: Counter[Party] = Counter()
        self.used = 0
        """Units that all parties hold."""

    def take(self, party: Party, units: int = 1) -> bool:
        """Take units for a party, and return True; return False, and take none, if that is more than its share."""
        free = self._total - self.used - units
        if free < 0 or (party is not None and self._held[party] > _GENEROSITY * free):
            return False
        self._held[party] += units
        self.used += units
        return True

    def give_back(self, party: Party, units: int = 1) -> None:
        """Return units that were taken."""
        self._held[party] -= units
        self.used -= units
        if not self._held[party]:
            del self._held[party]


class FairTable(Generic[K, V]):
    """The latest entries of all parties. Not thread-safe.

    When the table is full, a party with more than its equal share loses its oldest entry: the one that adds, or else
    the one with the most. So no party loses an entry to others while it has no more than its share.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[Party, OrderedDict[K, V]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[V]:
        """Yield all values, party by party, each party's oldest first."""
        for entries in self._entries.values():
            yield from entries.values()

    def get(self, party: Party, key: K) -> V | None:
        """Return a value, which is the party's latest then; None if it is not there."""
        entries = self._entries.get(party)
        if entries is None or key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key]

    def put(self, party: Party, key: K, value: V) -> V | None:
        """Add or replace an entry as the party's latest; return the value that had to make room. O(parties)."""
        entries = self._entries.setdefault(party, OrderedDict())
        self._size += key not in entries
        entries[key] = value
        entries.move_to_end(key)
        if self._size <= self._most:
            return None
        if len(entries) * len(self._entries) <= self._most:
            party = max(self._entries, key=lambda name: len(self._entries[name]))
        return self.pop(party, next(iter(self._entries[party])))

    def pop(self, party: Party, key: K) -> V | None:
        """Remove an entry; return its value, or None if it is not there."""
        entries = self._entries.get(party)
        if entries is None or key not in entries:
            return None
        value = entries.pop(key)
        self._size -= 1
        if not entries:
            del self._entries[party]
        return value


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
