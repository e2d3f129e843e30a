"""Sharing of served orders between workers; `warmprefix.order_sharing.redis` does it through Redis Streams."""

from __future__ import annotations

from warmprefix.order_sharing.codec import MAX_BLOCKS, MAX_TOKENS
from warmprefix.order_sharing.sharing import Learn, LearnedOrder, NoSharing, OrderSharing, SharingStats

__all__ = ["MAX_BLOCKS", "MAX_TOKENS", "Learn", "LearnedOrder", "NoSharing", "OrderSharing", "SharingStats"]
