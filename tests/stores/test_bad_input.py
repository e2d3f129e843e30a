"""Messages of errors for bad arguments: each names the argument, its value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import redis

from warmprefix.order_sharing import MAX_BLOCKS, LearnedOrder
from warmprefix.stores import Conversation, MemorySeenStore, Prepare, RecordBounds
from warmprefix_redis import RedisSeenStore, check_prefix, parse_redis_url
from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.order_codec import encode
from warmprefix_redis.settings import SharedSettings

URL = "redis://localhost"
CHAT = Conversation(None, "chat")
KEY = b"k" * 16
SENDER = b"sender 1"
OPERATIONS = "operation must be a Prepare, Commit, Abandon, Forget, ReadTurn or WriteTurn, got str"

MEMORY = ["max_conversations", "max_entries"]
RECORD = ["max_blocks", "max_leases", "ttl", "lease_ttl"]


def positive(make: Callable[..., object], names: list[str], value: int = 0) -> list[tuple[Callable[[], object], str]]:
    return [(partial(make, **{name: value}), f"{name} must be positive, got {value}") for name in names]


CASES: list[tuple[Callable[[], object], str]] = [
    *positive(MemorySeenStore, MEMORY),
    *positive(RecordBounds, RECORD),
    *positive(partial(RedisSeenStore, URL), ["timeout"], -1),
    (lambda: CircuitBreaker(6, 5), "first_pause must be 0 to longest_pause, which is 5, got 6"),
    (lambda: RedisSeenStore(6379), "target must be a URL, or a Redis or RedisCluster.*, got int"),
    (lambda: RedisSeenStore(redis.Redis(decode_responses=True)), "target must have decode_responses=False.*, got True"),
    (lambda: check_prefix(""), "prefix must not be empty, nor have braces.*; got ''"),
    (lambda: check_prefix("{a}"), "prefix must not be empty, nor have braces.*; got '{a}'"),
    (lambda: check_prefix(b"wp"), "prefix must be a str, got bytes"),  # type: ignore[arg-type]
    (lambda: parse_redis_url("http://host"), "url must begin with one of redis://, .*, got 'http://'"),
    (lambda: parse_redis_url("redis://host/first"), "url's database must be a number, got 'first'"),
    (lambda: parse_redis_url("redis+cluster://one,,two"), "url must list its hosts as host:port,host:port; got ''"),
    (
        lambda: encode(SENDER, LearnedOrder([], [], [])),
        f"order must have 1 to {MAX_BLOCKS} blocks.*, got 0 blocks",
    ),
    (lambda: encode(SENDER, LearnedOrder([b"k"], [1], [0])), r"order's keys must have 16 bytes, got \[1\]"),
    (lambda: encode(SENDER, LearnedOrder([KEY], [-1], [0])), "order's tokens must be 0 to 16777215, got -1 to -1"),
    (lambda: MemorySeenStore().execute("forget"), OPERATIONS),  # type: ignore[arg-type]
    (lambda: RedisSeenStore(URL).execute("forget"), OPERATIONS),  # type: ignore[arg-type]
    (lambda: RedisSeenStore(URL).execute(Prepare(CHAT, "p", {b"x": "x"})), "fingerprint must be 16 bytes, got 1"),
    (lambda: SharedSettings(store_budget=0), r"(?s)store_budget\n.*greater than 0"),
    (lambda: SharedSettings(key_prefix="{a}"), r"(?s)key_prefix\n.*match pattern"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_bad_argument_is_named_with_its_value_and_what_is_allowed(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert re.search(message, str(caught.value))
