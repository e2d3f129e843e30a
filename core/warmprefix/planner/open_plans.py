"""Plans that are neither committed nor abandoned."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from warmprefix.plan import ContextPlan, Scope

__all__ = ["OpenPlans"]


class _OpenBatch(NamedTuple):
    """The plans of a batch, in execution order."""

    is_open: bytearray
    """1 for each plan that is neither committed nor abandoned."""
    scopes: Sequence[Scope]


class OpenPlans:
    """Ids and scopes of open plans. Bounded; callers hold the planner's lock.

    Args:
        max_open_plans: Single plans beyond this number are dropped, oldest first. So are whole batches whose plans
            are more than this together, except the last batch.
    """

    def __init__(self, max_open_plans: int) -> None:
        self._max_open_plans = max_open_plans
        self._instance = uuid.uuid4().hex
        self._planned = 0
        self._scopes: OrderedDict[str, Scope] = OrderedDict()
        self._batches: OrderedDict[str, _OpenBatch] = OrderedDict()

    def new_id(self) -> str:
        """Return an id that no other plan has, whatever planner or process made it."""
        self._planned += 1
        # The process id matters after a fork: parent and child have the same `_instance`.
        return f"{self._instance}-{os.getpid()}-{self._planned}"

    def add(self, plan: ContextPlan) -> None:
        """Add a single plan. O(1)."""
        self._scopes[plan.id] = plan.scope
        if len(self._scopes) > self._max_open_plans:
            self._scopes.popitem(last=False)

    def add_batch(self, batch_id: str, scopes: Sequence[Scope]) -> None:
        """Add the plans `{batch_id}.{place}`, given the scope of each."""
        if scopes:
            self._batches[batch_id] = _OpenBatch(bytearray(b"\1" * len(scopes)), scopes)
        total = sum(len(batch.scopes) for batch in self._batches.values())
        while total > self._max_open_plans and len(self._batches) > 1:
            total -= len(self._batches.popitem(last=False)[1].scopes)

    def close(self, plan: ContextPlan) -> bool:
        """Remove a plan; True if it was open."""
        # A plan of another scope could be another tenant's, with an id that it must not close.
        if self._scopes.get(plan.id) == plan.scope:
            del self._scopes[plan.id]
            return True
        batch_id, _, number = plan.id.rpartition(".")
        batch = self._batches.get(batch_id)
        if batch is None:
            return False
        try:
            place = int(number)
        except ValueError:  # no planner makes such an id
            return False
        if str(place) != number or not 0 <= place < len(batch.scopes) or not batch.is_open[place]:
            return False
        if batch.scopes[place] != plan.scope:
            return False
        batch.is_open[place] = False
        if batch.is_open.rfind(1) < 0:
            del self._batches[batch_id]
        return True

    @property
    def open_batches(self) -> int:
        """Number of batches with open plans."""
        return len(self._batches)

    def clear(self) -> None:
        """Forget all open plans: none of them can be committed any more."""
        self._scopes.clear()
        self._batches.clear()

    def __len__(self) -> int:
        return len(self._scopes) + sum(sum(batch.is_open) for batch in self._batches.values())
