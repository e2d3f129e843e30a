"""How likely it is that a prefix comes again in time, learned from the requests so far."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

__all__ = ["ANSWER_SECONDS", "PrefixRecord", "ReturnRates"]

_FIRST_SHARE = {"tools": 0.5, "system": 0.5, "inner": 0.15, "past": 0.4, "end": 0.05}
"""Share of new prefixes that come again in time, before there is any evidence, by the place of their last part."""
_QUICK_SHARE, _SLOW_SHARE = 0.4, 0.1
"""The same for prefixes that have come again, the last time within the lifetime or after it."""
_CLASS_WEIGHT = 4.0
"""Visits that the shares above count for."""
_OWN_WEIGHT = 16.0
"""Visits that the share of a prefix's class counts for, next to its own visits."""
_MOST_VISITS = 400.0
"""Visits of a class that are remembered; older ones count half, a quarter, and so on."""
_MOST_CLASSES = 4_096
ANSWER_SECONDS = 10.0
"""Time after which a request without a report is taken to be answered, and so to have written its marks."""
_DEEPEST = 15
"""Parts of a message that have classes of their own; later ones share one."""


@dataclass(eq=False, slots=True)
class PrefixRecord:
    """What is remembered of one prefix: its visits, and the time until which the API keeps it."""

    tokens: int
    """Tokens of its last part."""
    returns: list[int]
    """Visits that came within each lifetime of the one before."""
    visits: int = 0
    """Visits, of which those at the same time count as one."""
    last_visit: float = 0.0
    answered: float = -inf
    """Time from which a request can read what an earlier one could have written."""
    classes: list[Hashable] = field(default_factory=list)
    ready: float = -inf
    expires: float = -inf
    """Times between which the API can read it."""
    lifetime: int = 0
    """Number of the lifetime that it was written with."""


class ReturnRates:
    """Learns for one scope how likely prefixes are to be visited again within each lifetime.

    Requests that run at the same time cannot read what one of them writes, so together they are one visit.
    Evidence is a prefix's own visits, and those of its class: prefixes that end at the same kind of place at the same
    depth, with as many visits, and with a last pause of the same kind. A visit counts as not repeated until it is, so
    the future is taken to be as long as the past. Deterministic; memory is bounded. Not thread-safe.
    """

    def __init__(self, lifetimes: Sequence[float]) -> None:
        self._lifetimes = lifetimes
        self._classes: OrderedDict[Hashable, list[float]] = OrderedDict()

    def visit(self, record: PrefixRecord, kind: str, depth: int, now: float) -> None:
        """Count a request with this prefix. O(lifetimes)."""
        if not record.visits or now - record.last_visit > self._lifetimes[0]:
            record.answered = now + ANSWER_SECONDS
        elif now < record.answered:
            record.last_visit = now
            return
        pause = now - record.last_visit if record.visits else None
        quick = [pause is not None and pause <= lifetime for lifetime in self._lifetimes]
        for number, returned in enumerate(quick):
            if returned:
                record.returns[number] += 1
                if (counts := self._classes.get(record.classes[number])) is not None:
                    counts[1] += 1
        record.visits += 1
        record.last_visit = now
        place = (kind, min(depth, _DEEPEST), min(record.visits, 4))
        record.classes = [(number, *place, returned) for number, returned in enumerate(quick)]
        for each in record.classes:
            counts = self._classes.setdefault(each, [0.0, 0.0])
            self._classes.move_to_end(each)
            counts[0] += 1
            if counts[0] > _MOST_VISITS:
                counts[:] = counts[0] / 2, counts[1] / 2
        while len(self._classes) > _MOST_CLASSES:
            self._classes.popitem(last=False)

    def share(self, record: PrefixRecord, kind: str, number: int) -> float:
        """Return the likelihood that a prefix is visited again within a lifetime, given by its number. O(1)."""
        quick = record.visits > 1 and record.classes[number][-1]  # type: ignore[index]
        expected = _FIRST_SHARE[kind] if record.visits == 1 else _QUICK_SHARE if quick else _SLOW_SHARE
        visits, returns = self._classes.get(record.classes[number], (0.0, 0.0))
        share = (returns + expected * _CLASS_WEIGHT) / (visits + _CLASS_WEIGHT)
        pauses = record.visits - 1
        if pauses < 2:
            return share
        return (record.returns[number] + share * _OWN_WEIGHT) / (pauses + _OWN_WEIGHT)
