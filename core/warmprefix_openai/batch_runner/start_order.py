"""The order in which the requests of a batch start, when several run at once."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from warmprefix.batch import PlannedRequest
from warmprefix.plan import Scope

__all__ = ["StartOrder", "first_holders", "planned_holders"]


class StartOrder:
    """The execution order, except that a request waits while another one is about to bring its prefix.

    That other one is its warmer; the request may start once the warmer is prefilled. If the warmer fails before that,
    the first of the requests that wait for it takes its place, so that a group never meets a cold cache together.

    While requests wait, later ones may start instead: always the earliest that need not wait, and at most `lookahead`
    beyond the earliest that has not started. So besides the current path of the plan, at most `lookahead` prompts and
    those in flight need room in the prefix cache, however large the batch.

    There is no deadlock: the warmer of the earliest request that has not started comes before it, so it has started;
    once it is prefilled or over, that request may start, whatever the lookahead.

    Requests are numbered by their place in `requests`. O(log n) per call, except for `prefilled` by a request that took
    another's place, which compares the orders of the requests that wait for it. Not thread-safe.
    """

    def __init__(self, requests: Sequence[PlannedRequest], holders: Sequence[int | None], lookahead: int) -> None:
        """Begin with no request started. `holders` has the warmer of each, an earlier request or None."""
        self._requests = requests
        self._lookahead = lookahead
        self._ready = [i for i, holder in enumerate(holders) if holder is None]  # a heap, like the lists below
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
        """Return the request to start now, and count it as started; None if all that are left have to wait."""
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

    @property
    def all_started(self) -> bool:
        """True if no request is left to start."""
        return self._earliest == len(self._started)

    def left(self) -> Iterator[PlannedRequest]:
        """Yield the requests that have not started, in execution order."""
        for planned, started in zip(self._requests, self._started, strict=True):
            if not started:
                yield planned

    def prefilled(self, i: int) -> None:
        """Note that the request has brought its prefix: those that wait for it may start."""
        if self._settled[i]:
            return
        self._settled[i] = True
        heirs = self._waiting.pop(i, [])
        if i not in self._stand_ins:
            for heir in heirs:
                heapq.heappush(self._ready, heir)
            return
        # They waited for a request that failed, with which they may have shared more than with its stand-in.
        chain = [i, *sorted(heirs)]
        for heir, holder in zip(chain[1:], first_holders([self._requests[j] for j in chain])[1:], strict=True):
            queue = self._waiting.setdefault(chain[holder], []) if holder else self._ready
            heapq.heappush(queue, heir)

    def over(self, i: int) -> None:
        """Note that the request has ended. Unless it was prefilled, the first that waits for it takes its place."""
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
    """Return the planned warmer of each request.

    Raises:
        ValueError: The plan names a warmer that does not come before its request.
    """
    places: dict[str, int] = {}
    holders: list[int | None] = []
    for i, planned in enumerate(requests):
        if planned.warmed_by is not None and planned.warmed_by not in places:
            found = f"got {planned.warmed_by!r}"
            raise ValueError(f"warmed_by of request {planned.id!r} must be an earlier request's id or None, {found}")
        holders.append(None if planned.warmed_by is None else places[planned.warmed_by])
        places[planned.id] = i
    return holders


def first_holders(requests: Sequence[PlannedRequest]) -> list[int | None]:
    """Return for each request the first that holds all it shares with the one before it; None if nothing is shared.

    For some of a plan's requests, when others have their answers. In a depth-first order equal prefixes are neighbours,
    so no earlier request shares more than the one before. O(blocks), and memory for one path per scope.
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
