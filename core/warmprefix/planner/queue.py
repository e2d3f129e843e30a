"""Requests of one scope that wait, or that the engine has not answered yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import count, islice
from typing import NamedTuple

__all__ = ["RequestQueue"]

_MOST_ANNOUNCED = 256
_MOST_WAITING = 32
"""Waiting requests that one plan considers, the first ones."""
_MOST_IN_FLIGHT = 64
_LONGEST_FLIGHT = 1_000
"""Later plans after which an open plan no longer counts as in flight: its caller seems to have lost it."""


class _Flight(NamedTuple):
    number: int
    order: tuple[bytes, ...]


class RequestQueue:
    """Announced requests and open plans of one scope. Bounded; callers hold the planner's lock."""

    __slots__ = ("_announced", "_flights", "_numbers")

    def __init__(self) -> None:
        self._numbers = count()
        self._announced: OrderedDict[int, frozenset[bytes]] = OrderedDict()
        self._flights: OrderedDict[str, _Flight] = OrderedDict()

    def announce(self, keys: Iterable[bytes]) -> int:
        """Add a request that will be planned later; return a number to withdraw it."""
        number = next(self._numbers)
        self._announced[number] = frozenset(keys)
        if len(self._announced) > _MOST_ANNOUNCED:
            self._announced.popitem(last=False)
        return number

    def withdraw(self, number: int) -> None:
        """Remove an announced request, if it is still there."""
        self._announced.pop(number, None)

    def take(self, keys: Iterable[bytes]) -> list[Collection[bytes]]:
        """Remove one announcement of exactly these blocks, and return the first of the others."""
        if not self._announced:
            return []
        own = frozenset(keys)
        number = next((number for number, blocks in self._announced.items() if blocks == own), None)
        if number is not None:
            del self._announced[number]
        return list(islice(self._announced.values(), _MOST_WAITING))

    def start(self, plan_id: str, order: Sequence[bytes]) -> None:
        """Add an open plan whose context opens its prompt."""
        number = next(self._numbers)
        self._flights[plan_id] = _Flight(number, tuple(order))
        oldest = next(iter(self._flights.values()))
        if len(self._flights) > _MOST_IN_FLIGHT or oldest.number < number - _LONGEST_FLIGHT:
            self._flights.popitem(last=False)

    def finish(self, plan_id: str) -> None:
        """Remove a plan that was committed or abandoned."""
        self._flights.pop(plan_id, None)

    @property
    def in_flight(self) -> list[tuple[bytes, ...]]:
        """Orders of the open plans, oldest first."""
        return [flight.order for flight in self._flights.values()]

    def __len__(self) -> int:
        """Return the number of announced requests."""
        return len(self._announced)
