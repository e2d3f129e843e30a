"""A count of all state under a prefix, in bounded time and memory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from warmprefix_redis import unpack_leases, unpack_record
from warmprefix_tools.redis_admin.server_report import ServerReport, address_of, ask_server

__all__ = ["ConversationCounts", "OrderStream", "Survey", "take_survey"]

_KEYS_PER_SCAN = 1_000
_KEYS_PER_PIPELINE = 50


@dataclass(frozen=True, slots=True)
class ConversationCounts:
    """Totals of all conversations under a prefix."""

    count: int
    bytes: int | None
    """Of memory; None if the URL's user lacks the permission."""
    blocks: int
    open_leases: int
    """Plans neither committed nor abandoned, including those that timed out."""
    unreadable: int
    """Conversations of another format, which planners of this version ignore."""
    sampled: int
    """Number of conversations that were read."""
    estimated: bool
    """True if the other numbers were extrapolated from the sample."""


@dataclass(frozen=True, slots=True)
class OrderStream:
    """The learned orders of one scope."""

    key: str
    entries: int
    """Each has one or more orders."""
    bytes: int | None
    last_entry_seconds: float | None
    """Age of the last entry; None if there never was one."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The result of `warmprefix state stats`."""

    prefix: str
    servers: tuple[ServerReport, ...]
    conversations: ConversationCounts
    streams: tuple[OrderStream, ...]
    """Those that were read, the one written to last first."""
    stream_count: int
    """An estimate if the number of conversations is one."""


class _FoundKeys(NamedTuple):
    """One server's keys under the prefix."""

    conversations: list[bytes]
    streams: list[bytes]
    share: float
    """Fraction of all its keys that were scanned."""


def take_survey(
    client: Any,
    prefix: str,
    *,
    max_keys: int = 200_000,
    max_sampled: int = 1_000,
    max_streams: int = 100,
    seconds: float = 10.0,
) -> Survey:
    """Count the state on all primaries, without KEYS or any other slow command. Raises what redis-py raises.

    Args:
        client: A client of one server or of a Cluster.
        prefix: Beginning of all keys.
        max_keys: Most keys of any application to scan; beyond it counts are extrapolated.
        max_sampled: Most conversations to read.
        max_streams: Most streams to read.
        seconds: Time after which nothing more is read.
    """
    deadline = time.monotonic() + seconds
    nodes = list(_primaries(client))
    servers: list[ServerReport] = []
    parts: list[ConversationCounts] = []
    streams: list[OrderStream] = []
    stream_count = 0.0
    for address, node in nodes:
        remaining = max(deadline - time.monotonic(), 0.0) / (len(nodes) - len(servers))
        until = time.monotonic() + remaining
        server = ask_server(node, address)
        servers.append(server)
        found = _scan(node, prefix, max_keys // len(nodes), time.monotonic() + remaining / 2)
        parts.append(_conversations(node, found, max_sampled // len(nodes), until))
        streams += _streams(node, found.streams[: max_streams // len(nodes)])
        stream_count += len(found.streams) / found.share
    streams.sort(key=lambda stream: (stream.last_entry_seconds is None, stream.last_entry_seconds))
    return Survey(prefix, tuple(servers), _sum(parts), tuple(streams), round(stream_count))


def _primaries(client: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(client, "get_primaries"):
        for node in client.get_primaries():
            yield f"{node.host}:{node.port}", client.get_redis_connection(node)
        return
    yield address_of(client), client


def _scan(client: Any, prefix: str, max_keys: int, until: float) -> _FoundKeys:
    """Scan keys in the order of their hashes, so that those that come first are a fair sample."""
    conversations: dict[bytes, None] = {}
    streams: dict[bytes, None] = {}
    seen, cursor = 0, 0
    start = prefix.encode() + b":{"
    while True:
        cursor, keys = client.scan(cursor, count=_KEYS_PER_SCAN)
        seen += len(keys)
        for key in keys:
            if key.startswith(start):
                if key.endswith(b"}:seen"):
                    conversations[key] = None
                elif key.endswith(b"}:orders"):
                    streams[key] = None
        if cursor == 0:
            return _FoundKeys(list(conversations), list(streams), 1.0)
        if seen >= max_keys or time.monotonic() >= until:
            return _FoundKeys(list(conversations), list(streams), min(max(seen, 1) / max(client.dbsize(), 1), 1.0))


def _conversations(client: Any, found: _FoundKeys, max_sampled: int, until: float) -> ConversationCounts:
    chosen = found.conversations
    if len(chosen) > max_sampled:
        chosen = random.Random(0).sample(chosen, max_sampled)  # noqa: S311 - not a secret
    sampled = blocks = leases = unreadable = size = 0
    may_ask = True
    for first in range(0, len(chosen), _KEYS_PER_PIPELINE):
        if first and time.monotonic() >= until:
            break
        part = chosen[first : first + _KEYS_PER_PIPELINE]
        pipeline = client.pipeline(transaction=False)
        for key in part:
            pipeline.hmget(key, "m", "p")
            pipeline.execute_command("MEMORY USAGE", key, "SAMPLES", 0)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        for values, usage in zip(answers[::2], answers[1::2], strict=True):
            if isinstance(usage, int):
                size += usage
            elif isinstance(usage, NoPermissionError):
                may_ask = False
            else:  # the key has moved to another node, or is gone
                continue
            sampled += 1
            packed, packed_leases = values if isinstance(values, list) else (None, None)  # another type of key
            record = unpack_record(packed or b"")
            if record is None:
                unreadable += 1
            else:
                blocks += record.blocks
                leases += len(unpack_leases(packed_leases or b""))
    count = round(len(found.conversations) / found.share)
    scale = count / sampled if sampled else 0.0
    return ConversationCounts(
        count=count,
        bytes=round(size * scale) if may_ask else None,
        blocks=round(blocks * scale),
        open_leases=round(leases * scale),
        unreadable=round(unreadable * scale),
        sampled=sampled,
        estimated=sampled < count,
    )


def _sum(parts: Sequence[ConversationCounts]) -> ConversationCounts:
    sizes = [part.bytes for part in parts]
    return ConversationCounts(
        count=sum(part.count for part in parts),
        bytes=None if None in sizes else sum(size or 0 for size in sizes),
        blocks=sum(part.blocks for part in parts),
        open_leases=sum(part.open_leases for part in parts),
        unreadable=sum(part.unreadable for part in parts),
        sampled=sum(part.sampled for part in parts),
        estimated=any(part.estimated for part in parts),
    )


def _streams(client: Any, keys: Sequence[bytes]) -> Iterator[OrderStream]:
    for key in keys:
        try:
            about = client.xinfo_stream(key)
        except NoPermissionError:
            raise
        except ResponseError:  # gone in the meantime, or not a stream
            continue
        try:
            size = client.memory_usage(key)
        except NoPermissionError:
            size = None
        seconds, microseconds = client.time()
        last = about["last-generated-id"]
        appended = int((last if isinstance(last, str) else last.decode()).partition("-")[0]) / 1_000
        age = max(seconds + microseconds / 1_000_000 - appended, 0.0) if appended else None
        yield OrderStream(key.decode(), int(about["length"]), size, age)
