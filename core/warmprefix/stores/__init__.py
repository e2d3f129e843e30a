"""Where a conversation's seen blocks are remembered."""

from __future__ import annotations

from warmprefix.stores.base import Conversation, Prepared, SeenBlock, SeenStore, Snapshot
from warmprefix.stores.memory import MemorySeenStore

__all__ = ["Conversation", "MemorySeenStore", "Prepared", "SeenBlock", "SeenStore", "Snapshot"]
