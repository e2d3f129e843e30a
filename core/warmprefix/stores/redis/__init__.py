"""Conversation state in Redis or Valkey, shared by all workers and as durable as the server."""

from __future__ import annotations

from warmprefix.stores.redis.store import RedisSeenStore

__all__ = ["RedisSeenStore"]
