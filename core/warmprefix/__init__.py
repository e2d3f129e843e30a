"""Arrange retrieved context so that the engine's prefix cache already holds it.

The rest of the public names are in packages: `warmprefix.batch`, `dedup`, `errors`, `openai`, `order_sharing`,
`ordering`, `prefix`, `residency`, `routing`, `stores`, `telemetry` and `traces`.
"""

from warmprefix.annotate import Templates
from warmprefix.batch import BatchPlan, BatchRequest, PlannedRequest
from warmprefix.blocks import ContextBlock, fingerprint
from warmprefix.dedup import Transcript
from warmprefix.errors import MissingExtraError, StoreError, WarmprefixError
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import ContextPlan, PlannedBlock, Reference, Scope
from warmprefix.planner import ContextPlanner
from warmprefix.residency import EngineReport
from warmprefix.stores import SeenStore
from warmprefix.telemetry import PlannerObserver, PlannerStats

__all__ = [
    "BatchPlan",
    "BatchRequest",
    "ContextBlock",
    "ContextPlan",
    "ContextPlanner",
    "EngineReport",
    "MissingExtraError",
    "OrderingPolicy",
    "PlannedBlock",
    "PlannedRequest",
    "PlannerObserver",
    "PlannerStats",
    "Reference",
    "Scope",
    "SeenStore",
    "StoreError",
    "Templates",
    "Transcript",
    "WarmprefixError",
    "fingerprint",
]

__version__ = "0.1.0"
