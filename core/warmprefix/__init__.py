"""Arrange retrieved context so that the engine's prefix cache already holds it."""

from warmprefix.annotate import Templates
from warmprefix.batch.plan import BatchPlan, BatchRequest, PlannedRequest
from warmprefix.blocks import ContextBlock, fingerprint
from warmprefix.dedup.transcript import RepeatTemplates, Transcript
from warmprefix.errors import (
    BatchError,
    EngineError,
    MissingExtraError,
    NoAgentError,
    StoreError,
    TraceError,
    WarmprefixError,
)
from warmprefix.order_sharing.base import NoSharing, OrderSharing
from warmprefix.ordering import BlockView, OrderingPolicy, PrefixView, ServedBlock
from warmprefix.plan import ContextPlan, Placement, PlannedBlock, Reference, Scope
from warmprefix.planner.planner import ContextPlanner
from warmprefix.residency.base import EngineReport, FeedStats, NoFeed, ResidencyFeed
from warmprefix.residency.capacity import capacity_from_metrics
from warmprefix.routing import (
    Agent,
    AgentRouter,
    AssignedBlock,
    Assignment,
    Replica,
    ReplicaRouter,
    ReplicaStats,
    RequestHints,
    Route,
    RouterStats,
    SessionHints,
)
from warmprefix.stores import MemorySeenStore, SeenStore
from warmprefix.stores.guard import GuardedStore
from warmprefix.telemetry import LatencySnapshot, NoObserver, PlannerObserver, PlannerStats
from warmprefix.traces.base import NoRecorder, RequestRecorder
from warmprefix.traces.recorder import TraceRecorder

__all__ = [
    "Agent",
    "AgentRouter",
    "AssignedBlock",
    "Assignment",
    "BatchError",
    "BatchPlan",
    "BatchRequest",
    "BlockView",
    "ContextBlock",
    "ContextPlan",
    "ContextPlanner",
    "EngineError",
    "EngineReport",
    "FeedStats",
    "GuardedStore",
    "LatencySnapshot",
    "MemorySeenStore",
    "MissingExtraError",
    "NoAgentError",
    "NoFeed",
    "NoObserver",
    "NoRecorder",
    "NoSharing",
    "OrderSharing",
    "OrderingPolicy",
    "Placement",
    "PlannedBlock",
    "PlannedRequest",
    "PlannerObserver",
    "PlannerStats",
    "PrefixView",
    "Reference",
    "RepeatTemplates",
    "Replica",
    "ReplicaRouter",
    "ReplicaStats",
    "RequestHints",
    "RequestRecorder",
    "ResidencyFeed",
    "Route",
    "RouterStats",
    "Scope",
    "SeenStore",
    "ServedBlock",
    "SessionHints",
    "StoreError",
    "Templates",
    "TraceError",
    "TraceRecorder",
    "Transcript",
    "WarmprefixError",
    "capacity_from_metrics",
    "fingerprint",
]

__version__ = "0.1.0.dev0"
