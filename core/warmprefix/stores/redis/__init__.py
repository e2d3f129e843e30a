"""Conversation state in Redis or Valkey, shared by all workers and as durable as the server."""

from __future__ import annotations

from warmprefix.errors import MissingExtraError

try:
    import redis as _redis  # noqa: F401 - the modules below need it
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

from warmprefix.stores.redis.connections import URL_SCHEMES, RedisTarget, connect, parse_redis_url
from warmprefix.stores.redis.store import RedisSeenStore
from warmprefix.stores.redis.wire import (
    StoredLease,
    StoredRecord,
    check_prefix,
    conversation_key,
    conversation_pattern,
    unpack_hash,
    unpack_leases,
    unpack_record,
)

__all__ = [
    "URL_SCHEMES",
    "RedisSeenStore",
    "RedisTarget",
    "StoredLease",
    "StoredRecord",
    "check_prefix",
    "connect",
    "conversation_key",
    "conversation_pattern",
    "parse_redis_url",
    "unpack_hash",
    "unpack_leases",
    "unpack_record",
]
