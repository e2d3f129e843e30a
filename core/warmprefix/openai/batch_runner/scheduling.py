"""Which request of a batch starts next, when several run at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from warmprefix.batch.plan import PlannedRequest
from warmprefix.plan import Scope

__all__ = ["Schedule", "first_holders", "planned_holders"]


class Schedule:
    """Keeps the execution order, but for requests whose prefix another one is just about to bring.

    Such a request waits until that other one, its warmer, is prefilled. If the warmer fails before that, the first of
    those that wait for it takes its place, so that a group never falls upon a cold cache together.

    While requests wait, later ones may start in their stead: always the earliest that need not wait, and at most
    `lookahead` beyond the earliest that has not started. So beside the path that the plan is on, no more than
    `lookahead` prompts and those in flight want room in the prefix cache, however large the batch.

    There is no deadlock: the warmer of the earliest request that has not started comes before it, so it has started;
    once it is prefilled or over, that request may start, whatever the lookahead.

    It knows requests by their place in `requests`. O(log n) a call, but for `prefilled` by one that took another's
    place, which compares the orders of those that wait for it. Not thread-safe.
    """

    def __init__(self, requests: Sequence[PlannedRequest], holders: Sequence[int | None], lookahead: int) -> None:
        """Start with nothing started.

        Args:
            requests: In execution order.
            holders: For each its warmer, an earlier one; or None.
            lookahead: 0 or more.
        """
        self._requests = requests
        self._lookahead = lookahead
        self._ready = [i for i, holder in enumerate(holders) if holder is None]  # a heap, as are those below
        self._waiting: dict[int, list[int]] = {}
        for i, holder in enumerate(holders):
            if holder is not None:
                self._waiting.setdefault(holder, []).append(i)
        self._stand_ins: set[int] = set()
        self._started = bytearray(len(requests))
        self._settled = bytearray(len(requests))
        self._earliest = 0
        self._ahead = 0

    def start(self) -> int | None:
        """The one to start now, which counts as started from here on; None if all that are left have to wait."""
        if not self._ready:
            return None
        i = self._ready[0]
        if i != self._earliest and self._ahead >= self._lookahead:
            return None
        heapq.heappop(self._ready)
        self._started[i] = True
        self._ahead += 1
        while self._earliest < len(self._started) and self._started[self._earliest]:
            self._earliest += 1
            self._ahead -= 1
        return i

    def prefilled(self, i: int) -> None:
        """It has brought its prefix: those that wait for it may start."""
        if self._settled[i]:
            return
        self._settled[i] = True
        heirs = self._waiting.pop(i, [])
        if i not in self._stand_ins:
            for heir in heirs:
                heapq.heappush(self._ready, heir)
            return
        # They waited for one that failed, with which they may have shared more than with its stand-in.
        chain = [i, *sorted(heirs)]
        for heir, holder in zip(chain[1:], first_holders([self._requests[j] for j in chain])[1:], strict=True):
            queue = self._waiting.setdefault(chain[holder], []) if holder else self._ready
            heapq.heappush(queue, heir)

    def over(self, i: int) -> None:
        """It has ended. Unless it was prefilled, the first of those that wait for it takes its place."""
        if self._settled[i]:
            return
        self._settled[i] = True
        heirs = self._waiting.pop(i, [])
        if not heirs:
            return
        first = heapq.heappop(heirs)
        heapq.heappush(self._ready, first)
        few, many = sorted((heirs, self._waiting.get(first, [])), key=len)
        for heir in few:
            heapq.heappush(many, heir)
        self._waiting[first] = many
        self._stand_ins.add(first)


def planned_holders(requests: Sequence[PlannedRequest]) -> list[int | None]:
    """The warmer of each, as planned.

    Raises:
        ValueError: The plan names one that does not come before it.
    """
    places: dict[str, int] = {}
    holders: list[int | None] = []
    for i, planned in enumerate(requests):
        if planned.warmed_by is not None and planned.warmed_by not in places:
            raise ValueError(f"request {planned.id!r} is to be warmed by {planned.warmed_by!r}, which is not before it")
        holders.append(None if planned.warmed_by is None else places[planned.warmed_by])
        places[planned.id] = i
    return holders


def first_holders(requests: Sequence[PlannedRequest]) -> list[int | None]:
    """For each, the first of those before it that holds all it shares with the one before; None if that is nothing.

    Made for some of a plan's requests, when others are out of it. Where equal prefixes stand together, as in every
    depth-first order, no earlier request shares more than the one before. O(blocks), and memory for one path a scope.
    """
    paths: dict[Scope, list[tuple[bytes, int]]] = {}
    holders: list[int | None] = []
    for i, planned in enumerate(requests):
        path = paths.setdefault(planned.wording.scope, [])
        keys = [planned.request.blocks[position].fingerprint for position in planned.order]
        shared = 0
        for key, (held, _) in zip(keys, path, strict=False):
            if key != held:
                break
            shared += 1
        holders.append(path[shared - 1][1] if shared else None)
        path[shared:] = [(key, i) for key in keys[shared:]]
    return holders
