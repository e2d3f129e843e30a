"""Workers that learn from each other: `base` is the seam, `redis` shares through Redis Streams."""

from __future__ import annotations

from warmprefix.order_sharing.base import Learn, LearnedOrder, NoSharing, OrderSharing, SharingStats

__all__ = ["Learn", "LearnedOrder", "NoSharing", "OrderSharing", "SharingStats"]
