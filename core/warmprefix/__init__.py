"""Arrange retrieved context so that the engine's prefix cache already holds it.

The rest of the public names are in packages: `warmprefix.batch`, `errors`, `history`, `order_sharing`, `ordering`,
`prefix`, `residency`, `stores`, `telemetry` and `traces`. Packages of their own talk to servers and change requests:
`warmprefix_redis`, `warmprefix_openai`, `warmprefix_requests`, `warmprefix_routing`, `warmprefix_kv_events` and
`warmprefix_telemetry`.
"""

from warmprefix.annotate import Templates
from warmprefix.batch import BatchPlan, BatchRequest, PlannedRequest
from warmprefix.blocks import ContextBlock, fingerprint
from warmprefix.choice import Choice
from warmprefix.errors import MissingExtraError, StoreError, WarmprefixError
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import ContextPlan, PlannedBlock, Reference, Scope
from warmprefix.planner import ContextPlanner
from warmprefix.residency import EngineReport
from warmprefix.stores import Branch, SeenStore
from warmprefix.telemetry import PlannerObserver, PlannerStats

__all__ = [
    "BatchPlan",
    "BatchRequest",
    "Branch",
    "Choice",
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
    "WarmprefixError",
    "fingerprint",
]

__version__ = "0.1.0"
