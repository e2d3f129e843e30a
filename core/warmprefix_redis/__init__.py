"""What workers share through Redis or Valkey: the records of conversations, served orders, and settings."""

from __future__ import annotations

from warmprefix.errors import MissingExtraError

try:
    import redis as _redis  # noqa: F401 - the modules below need it
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

from warmprefix_redis.connections import URL_SCHEMES, RedisTarget, connect, parse_redis_url
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_redis.record import check_prefix, conversation_key, turn_key
from warmprefix_redis.settings import SharedSettings, planner_options, shared_orders
from warmprefix_redis.store import RedisSeenStore
from warmprefix_redis.tables import RedisTables
from warmprefix_redis.values import RedisValues

__all__ = [
    "URL_SCHEMES",
    "RedisOrderSharing",
    "RedisSeenStore",
    "RedisTables",
    "RedisTarget",
    "RedisValues",
    "SharedSettings",
    "check_prefix",
    "connect",
    "conversation_key",
    "parse_redis_url",
    "planner_options",
    "shared_orders",
    "turn_key",
]
