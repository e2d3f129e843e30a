"""Arrange retrieved context so that the engine's prefix cache already holds it."""

from warmprefix.annotate import Templates
from warmprefix.batch.plan import BatchPlan, BatchRequest, PlannedRequest
from warmprefix.blocks import ContextBlock, fingerprint
from warmprefix.dedup.transcript import Transcript
from warmprefix.errors import BatchError, MissingExtraError, StoreError, TraceError, WarmprefixError
from warmprefix.ordering import BlockView, OrderingPolicy, PrefixView, ServedBlock
from warmprefix.plan import ContextPlan, Placement, PlannedBlock, Reference, Scope
from warmprefix.planner import ContextPlanner
from warmprefix.sharing.base import NoSharing, OrderSharing
from warmprefix.stores import MemorySeenStore, SeenStore
from warmprefix.stores.guard import GuardedStore
from warmprefix.telemetry import PlannerStats
from warmprefix.traces.base import NoRecorder, RequestRecorder
from warmprefix.traces.recorder import TraceRecorder

__all__ = [
    "BatchError",
    "BatchPlan",
    "BatchRequest",
    "BlockView",
    "ContextBlock",
    "ContextPlan",
    "ContextPlanner",
    "GuardedStore",
    "MemorySeenStore",
    "MissingExtraError",
    "NoRecorder",
    "NoSharing",
    "OrderSharing",
    "OrderingPolicy",
    "Placement",
    "PlannedBlock",
    "PlannedRequest",
    "PlannerStats",
    "PrefixView",
    "Reference",
    "RequestRecorder",
    "Scope",
    "SeenStore",
    "ServedBlock",
    "StoreError",
    "Templates",
    "TraceError",
    "TraceRecorder",
    "Transcript",
    "WarmprefixError",
    "fingerprint",
]

__version__ = "0.1.0.dev0"
