"""What workers share through Redis or Valkey: the records of conversations, served orders, and settings."""

from __future__ import annotations

from warmprefix.errors import MissingExtraError

try:
    import redis as _redis  # noqa: F401 - the modules below need it
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.connections import URL_SCHEMES, RedisTarget, connect, parse_redis_url
from warmprefix_redis.guard import GuardedStore
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_redis.settings import SharedSettings, planner_options, shared_orders
from warmprefix_redis.store import RedisSeenStore
from warmprefix_redis.wire import (
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
    "CircuitBreaker",
    "GuardedStore",
    "RedisOrderSharing",
    "RedisSeenStore",
    "RedisTarget",
    "SharedSettings",
    "StoredLease",
    "StoredRecord",
    "check_prefix",
    "connect",
    "conversation_key",
    "conversation_pattern",
    "parse_redis_url",
    "planner_options",
    "shared_orders",
    "unpack_hash",
    "unpack_leases",
    "unpack_record",
]
