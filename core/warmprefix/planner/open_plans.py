"""Plans that are neither committed nor abandoned, and predictions that wait for a report."""

from __future__ import annotations

import os
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from warmprefix.fair_lru import FairLru
from warmprefix.plan import ContextPlan, Scope

__all__ = ["OpenPlans", "Prediction"]


class _OpenBatch(NamedTuple):
    """The plans of a batch, in execution order."""

    is_open: bytearray
    """1 for each plan that is neither committed nor abandoned."""
    scopes: Sequence[Scope]


class Prediction(NamedTuple):
    """What the planner expected when it made a plan."""

    scope: Scope
    """The scope of the plan."""
    distances: array[int]
    """Reuse distances of the first blocks: those that were served before in this order."""
    is_reported: bool = False
    """True once the engine has reported the cached tokens of the plan."""


class OpenPlans:
    """Ids and scopes of open plans, and predictions of these and of plans closed lately.

    Bounded; callers hold the planner's lock.

    Args:
        max_open_plans: Beyond this number, the tenant with the most single plans loses the oldest of them. Whole
            batches whose plans are more than this together are dropped, oldest first, except the last batch.
    """

    def __init__(self, max_open_plans: int) -> None:
        self._max_open_plans = max_open_plans
        self._instance = uuid.uuid4().hex
        self._planned = 0
        self._scopes: FairLru[str, Scope] = FairLru()
        self._predictions: FairLru[str, Prediction] = FairLru()
        self._batches: OrderedDict[str, _OpenBatch] = OrderedDict()

    def new_id(self) -> str:
        """Return an id that no other plan has, whatever planner or process made it."""
        self._planned += 1
        # The process id matters after a fork: parent and child have the same `_instance`.
        return f"{self._instance}-{os.getpid()}-{self._planned}"

    def add(self, plan: ContextPlan) -> None:
        """Add a single plan. O(1)."""
        self._scopes.put(plan.id, plan.scope, plan.scope.tenant)
        if len(self._scopes) > self._max_open_plans:
            self._scopes.evict()

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
            self._scopes.pop(plan.id)
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

    def predict(self, plan: ContextPlan, distances: Sequence[int]) -> None:
        """Keep the reuse distances of a plan until the engine reports on it, unless they were kept before."""
        if self._predictions.get(plan.id) is None:
            self._keep(plan, Prediction(plan.scope, array("q", distances)))

    def take_prediction(self, plan: ContextPlan) -> Prediction | None:
        """Return the prediction of a plan that the engine reports on; None if it is forgotten."""
        prediction = self._predictions.get(plan.id)
        if prediction is None or prediction.scope != plan.scope:
            return None
        self._keep(plan, Prediction(plan.scope, array("q"), is_reported=True))
        return prediction

    def _keep(self, plan: ContextPlan, prediction: Prediction) -> None:
        self._predictions.put(plan.id, prediction, plan.scope.tenant)
        if len(self._predictions) > self._max_open_plans:
            self._predictions.evict()

    @property
    def open_batches(self) -> int:
        """Number of batches with open plans."""
        return len(self._batches)

    def clear(self) -> None:
        """Forget all open plans: none of them can be committed any more."""
        self._scopes.clear()
        self._predictions.clear()
        self._batches.clear()

    def __len__(self) -> int:
        return len(self._scopes) + sum(sum(batch.is_open) for batch in self._batches.values())
