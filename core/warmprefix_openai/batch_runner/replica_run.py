"""What one replica has to do in a run of a batch, and how it has answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from warmprefix.batch import BatchPlan, PlannedRequest
from warmprefix_openai.asking import could_not_connect
from warmprefix_openai.batch_runner.asker import Asker
from warmprefix_openai.batch_runner.start_order import StartOrder, planned_holders
from warmprefix_openai.retry import status_of

__all__ = ["MAX_REFUSED_IN_A_ROW", "ReplicaRun", "StartedRequest"]

MAX_REFUSED_IN_A_ROW = 10
"""Failures in a row that concern all requests; after them a replica that had answers before is lost."""

_OF_ALL = frozenset({401, 402, 403, 404, 405})
"""Statuses that are about the key, the model or the address, and not about the one request."""


class StartedRequest(NamedTuple):
    """A request that has started, and the order that is to learn of its progress."""

    planned: PlannedRequest
    order: StartOrder
    place: int
    """Its number in the order."""

    def prefilled(self) -> None:
        self.order.prefilled(self.place)

    def over(self) -> None:
        self.order.over(self.place)


class ReplicaRun:
    """The parts of a batch that one replica runs, one after the other, and how it has answered."""

    def __init__(self, asker: Asker, concurrency: int) -> None:
        """Begin without requests."""
        self.asker = asker
        self.tasks: dict[asyncio.Task[None], PlannedRequest] = {}
        """The requests in flight."""
        self.unanswered: list[PlannedRequest] = []
        """Requests that were in flight when the replica was lost."""
        self.lost = False
        self.reached = False
        """True if a request was answered, or failed for a reason of its own."""
        self._refused_in_a_row = 0
        self._concurrency = concurrency
        self._parts: list[tuple[BatchPlan, StartOrder]] = []

    def add(self, part: BatchPlan) -> None:
        """Add requests, which start after those that it has already."""
        order = StartOrder(part.requests, planned_holders(part.requests), lookahead=(self._concurrency + 1) // 2)
        self.asker.expect(part)
        self._parts.append((part, order))

    def start(self) -> StartedRequest | None:
        """Return the request to start now; None if none may start."""
        if self.lost or len(self.tasks) >= self._concurrency:
            return None
        for part, order in self._parts:
            place = order.start()
            if place is not None:
                return StartedRequest(part.requests[place], order, place)
            if not order.all_started:
                return None
        return None

    def left(self) -> Iterator[PlannedRequest]:
        """Yield the requests that have not started."""
        for _, order in self._parts:
            yield from order.left()

    def fails_all(self, error: Exception | None, *, alone: bool) -> bool:
        """Record how a request ended; return True if the replica would fail others alike.

        Args:
            error: Its failure, if it failed.
            alone: No other replica is left, so this one gets more patience.
        """
        if error is None or not _concerns_all(error):
            self.reached = True
            self._refused_in_a_row = 0
            return False
        self._refused_in_a_row += 1
        if not alone and could_not_connect(error):
            return True
        return not self.reached or self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW


def _concerns_all(error: Exception) -> bool:
    """Return True if others would probably fail alike: no server is there, or nothing is permitted."""
    out_of_quota = getattr(error, "code", None) == "insufficient_quota"
    return out_of_quota or could_not_connect(error) or status_of(error) in _OF_ALL
