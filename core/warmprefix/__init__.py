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
from warmprefix.order_sharing import NoSharing, OrderSharing
from warmprefix.ordering import BlockView, OrderingPolicy, PrefixView, ServedBlock
from warmprefix.plan import ContextPlan, Placement, PlannedBlock, Reference, Scope
from warmprefix.planner import ContextPlanner
from warmprefix.residency import EngineReport, FeedStats, NoFeed, ResidencyFeed, capacity_from_metrics
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
from warmprefix.stores import GuardedStore, MemorySeenStore, SeenStore
from warmprefix.telemetry import LatencySnapshot, NoObserver, PlannerObserver, PlannerStats
from warmprefix.traces import NoRecorder, RequestRecorder, TraceRecorder

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
