"""Planning many requests at once, before the first of them runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmprefix.batch.device import Device
from warmprefix.batch.plan import BatchPlan, BatchRequest, PlannedRequest

if TYPE_CHECKING:
    from warmprefix.batch.assembly import BATCH_PLANNERS
    from warmprefix.batch.bounds import BoundKind

__all__ = ["BATCH_PLANNERS", "BatchPlan", "BatchRequest", "BoundKind", "Device", "PlannedRequest"]


def __getattr__(name: str) -> object:
    # `import warmprefix` needs the types above only; the planners' modules wait until they are used.
    if name == "BATCH_PLANNERS":
        from warmprefix.batch.assembly import BATCH_PLANNERS

        return BATCH_PLANNERS
    if name == "BoundKind":
        from warmprefix.batch.bounds import BoundKind

        return BoundKind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
