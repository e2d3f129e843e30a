"""Requests of one scope that wait, and those that the model answers now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, islice
from typing import NamedTuple

__all__ = ["RequestQueue"]

_MOST_ANNOUNCED = 256
_MOST_WAITING = 32
"""Waiting requests that one plan considers, the first ones."""
_MOST_IN_FLIGHT = 64
_LONGEST_FLIGHT = 1_000
"""Later plans after which an open plan no longer counts as in flight: its caller seems to have lost it."""

_MirroredOrder = Callable[[Sequence[Sequence[bytes]]], Sequence[bytes]]


class _Flight(NamedTuple):
    """An open plan whose context opens its prompt."""

    number: int
    order: tuple[bytes, ...]
    mirrored: list[bytes]
    """The order of the scope's mirror; empty without one, and before it is decided."""


_NO_FLIGHT = _Flight(0, (), [])


class RequestQueue:
    """Announced requests and open plans of one scope. Bounded; callers hold the planner's lock."""

    __slots__ = ("_latest", "_numbers", "announced", "flights")

    def __init__(self) -> None:
        self._numbers = count()
        self.announced: OrderedDict[int, frozenset[bytes]] = OrderedDict()
        self.flights: OrderedDict[str, _Flight] = OrderedDict()
        self._latest: tuple[list[bytes], _MirroredOrder] | None = None
        """The latest open plan, if its order in the mirror is not decided yet."""

    def announce(self, keys: Iterable[bytes]) -> int:
        """Add a request that will be planned later; return a number to withdraw it."""
        number = next(self._numbers)
        self.announced[number] = frozenset(keys)
        if len(self.announced) > _MOST_ANNOUNCED:
            self.announced.popitem(last=False)
        return number

    def withdraw(self, number: int) -> None:
        """Remove an announced request, if it is still there."""
        self.announced.pop(number, None)

    def take(
        self, keys: Iterable[bytes], first: Iterable[bytes]
    ) -> tuple[list[tuple[bytes, ...]], list[Collection[bytes]]]:
        """Remove one announcement of exactly these blocks, or better, of those that relevance alone would feed.

        Returns:
            The orders of the open plans that begin with one of these blocks, oldest first, and the first of the other
            announcements.
        """
        own = frozenset(keys)
        if self.announced:
            for wanted in (frozenset(first), own):
                number = next((number for number, blocks in self.announced.items() if blocks == wanted), None)
                if number is not None:
                    del self.announced[number]
                    break
        in_flight = [order for _, order, _ in self.flights.values() if not own.isdisjoint(order[:1])]
        return in_flight, list(islice(self.announced.values(), _MOST_WAITING))

    def mirrored(self) -> list[list[bytes]]:
        """Return the mirror's orders of the open plans, oldest first."""
        if self._latest is not None:
            (order, decide), self._latest = self._latest, None
            order += decide(self.mirrored())
        return [flight.mirrored for flight in self.flights.values() if flight.mirrored]

    def awaits(self, path: Sequence[bytes]) -> bool:
        """Return True if an announced request has all blocks of a path, which its order can then begin with."""
        return any(blocks.issuperset(path) for blocks in self.announced.values())

    def start(self, plan_id: str, order: Sequence[bytes], mirrored: _MirroredOrder | None = None) -> None:
        """Add an open plan whose context opens its prompt.

        Args:
            plan_id: Its id.
            order: Its order; empty if it counts only in the mirror.
            mirrored: Returns the order of a mirror, given its orders of the plans in flight. It is called once that
                order matters: before the next plan, or else once the model has answered, when no request waits for it.
        """
        self.mirrored()
        number = next(self._numbers)
        self.flights[plan_id] = flight = _Flight(number, tuple(order), [])
        if mirrored is not None:
            self._latest = flight.mirrored, mirrored
        oldest = next(iter(self.flights.values()))
        if len(self.flights) > _MOST_IN_FLIGHT or oldest.number < number - _LONGEST_FLIGHT:
            self.flights.popitem(last=False)

    def end(self, plan_id: str) -> Sequence[bytes]:
        """Remove an open plan; return its order in the mirror, empty without one."""
        self.mirrored()
        return self.flights.pop(plan_id, _NO_FLIGHT).mirrored

    def __len__(self) -> int:
        """Return the number of announced requests."""
        return len(self.announced)
