"""Planning of many requests at once, before the first of them runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from warmprefix.batch.plan import (
    BatchPlan,
    BatchRequest,
    BoundKind,
    PlannedPrime,
    PlannedRequest,
    SharedWording,
)
from warmprefix.batch.planners import BatchPlanner, Device, Placed, Progress, no_progress

if TYPE_CHECKING:
    from warmprefix.batch.bounds import Bound
    from warmprefix.batch.merge import MergePlanner
    from warmprefix.batch.primes import planned_primes
    from warmprefix.batch.scope_plan import bound_of_all, plan_scope, serve
    from warmprefix.batch.session import (
        BATCH_PLANNERS,
        Requests,
        as_requests,
        device_for,
        planned_requests,
        planners_for,
    )

__all__ = [
    "BATCH_PLANNERS",
    "BatchPlan",
    "BatchPlanner",
    "BatchRequest",
    "Bound",
    "BoundKind",
    "Device",
    "MergePlanner",
    "Placed",
    "PlannedPrime",
    "PlannedRequest",
    "Progress",
    "Requests",
    "SharedWording",
    "as_requests",
    "bound_of_all",
    "device_for",
    "no_progress",
    "plan_scope",
    "planned_primes",
    "planned_requests",
    "planners_for",
    "serve",
]

_HOMES = {
    "bounds": ("Bound",),
    "merge": ("MergePlanner",),
    "scope_plan": ("bound_of_all", "plan_scope", "serve"),
    "session": ("BATCH_PLANNERS", "Requests", "as_requests", "device_for", "planned_requests", "planners_for"),
    "primes": ("planned_primes",),
}


def __getattr__(name: str) -> object:
    # `import warmprefix` needs the types above only; the modules that plan are imported on first use.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
