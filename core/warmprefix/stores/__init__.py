"""Where the blocks that a conversation has seen are remembered."""

from __future__ import annotations

from warmprefix.stores.memory import MemorySeenStore
from warmprefix.stores.operations import (
    Abandon,
    AsyncSeenStore,
    Commit,
    Conversation,
    Forget,
    Operation,
    Prepare,
    PreparedTurn,
    RecordBounds,
    SeenBlock,
    SeenStore,
    Snapshot,
    Steps,
    arun_steps,
    check_positive,
    run_steps,
    unknown_operation,
)

__all__ = [
    "Abandon",
    "AsyncSeenStore",
    "Commit",
    "Conversation",
    "Forget",
    "MemorySeenStore",
    "Operation",
    "Prepare",
    "PreparedTurn",
    "RecordBounds",
    "SeenBlock",
    "SeenStore",
    "Snapshot",
    "Steps",
    "arun_steps",
    "check_positive",
    "run_steps",
    "unknown_operation",
]
