"""Where the blocks that a conversation has seen are remembered."""

from __future__ import annotations

from warmprefix.stores.breaker import CircuitBreaker
from warmprefix.stores.guard import GuardedStore
from warmprefix.stores.memory import MemorySeenStore
from warmprefix.stores.operations import (
    Abandon,
    AsyncSeenStore,
    Commit,
    Conversation,
    Forget,
    MaintainableStore,
    Operation,
    Prepare,
    PreparedTurn,
    SeenBlock,
    SeenStore,
    Snapshot,
    unanswered_id,
)

__all__ = [
    "Abandon",
    "AsyncSeenStore",
    "CircuitBreaker",
    "Commit",
    "Conversation",
    "Forget",
    "GuardedStore",
    "MaintainableStore",
    "MemorySeenStore",
    "Operation",
    "Prepare",
    "PreparedTurn",
    "SeenBlock",
    "SeenStore",
    "Snapshot",
    "unanswered_id",
]
