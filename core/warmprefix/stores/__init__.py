"""Where a conversation's seen blocks are remembered."""

from __future__ import annotations

from warmprefix.stores.base import (
    AsyncSeenStore,
    Conversation,
    Maintained,
    Prepared,
    SeenBlock,
    SeenStore,
    Snapshot,
)
from warmprefix.stores.memory import MemorySeenStore

__all__ = [
    "AsyncSeenStore",
    "Conversation",
    "Maintained",
    "MemorySeenStore",
    "Prepared",
    "SeenBlock",
    "SeenStore",
    "Snapshot",
]
