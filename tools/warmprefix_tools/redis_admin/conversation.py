"""One conversation's record, as it lies in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from warmprefix.stores import Conversation, SeenBlock
from warmprefix.stores.redis.codec import unpack_hash, unpack_leases
from warmprefix.stores.redis.keys import conversation_key

__all__ = ["OpenLease", "Record", "look"]


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A plan that was neither committed nor abandoned."""

    plan: str
    turn: int
    """Turns that had been committed when it was made."""
    expires_seconds: float
    """From now; below zero if it timed out."""


@dataclass(frozen=True, slots=True)
class Record:
    """What Redis holds of a conversation."""

    key: str
    format: int | None
    """The version of its values; None if they are nothing that any version writes."""
    readable: bool
    """Whether this version reads that format. If not, planners take it for nothing, and the four below are empty."""
    epoch: int
    turn: int
    blocks: tuple[SeenBlock, ...]
    """Oldest first."""
    leases: tuple[OpenLease, ...]
    """Oldest first."""
    may_ask: bool
    """Whether the URL's user may ask for the two below, which planners need not."""
    bytes: int | None
    """Of memory."""
    expires_seconds: float | None
    """From now, if nothing is written; None if never."""


def look(client: Any, prefix: str, conversation: Conversation) -> Record | None:
    """Read a conversation's record; None if there is none. Raises what redis-py raises."""
    key = conversation_key(prefix, conversation)
    try:
        fields: Mapping[bytes, bytes] = client.hgetall(key)
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        fields = {b"m": b""}
    if not fields:
        return None
    snapshot = unpack_hash(fields)
    head = fields.get(b"m", b"")[:1]
    leases: list[OpenLease] = []
    if snapshot is not None:
        now = _time(client, key)
        leases = [
            OpenLease(lease.plan_id, lease.turn, lease.ends_ms / 1_000 - now) for lease in unpack_leases(fields[b"p"])
        ]
    try:
        size, left = client.memory_usage(key, samples=0), client.pttl(key)
        may_ask = True
    except NoPermissionError:
        size, left, may_ask = None, -1, False
    return Record(
        key=key.decode(),
        format=head[0] if head else None,
        readable=snapshot is not None,
        epoch=0 if snapshot is None else snapshot.epoch,
        turn=0 if snapshot is None else snapshot.turn,
        blocks=() if snapshot is None else snapshot.blocks,
        leases=tuple(leases),
        may_ask=may_ask,
        bytes=size,
        expires_seconds=left / 1_000 if left >= 0 else None,
    )


def _time(client: Any, key: bytes) -> float:
    """Of the server that has the key, by whose clock leases end."""
    nodes = {"target_nodes": client.get_node_from_key(key)} if hasattr(client, "get_node_from_key") else {}
    seconds, microseconds = client.time(**nodes)
    return float(seconds + microseconds / 1_000_000)
