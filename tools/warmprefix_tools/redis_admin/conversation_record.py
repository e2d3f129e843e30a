"""One conversation's record in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from warmprefix.stores import Conversation, SeenBlock, Snapshot
from warmprefix_redis import conversation_key, unpack_hash, unpack_leases

__all__ = ["ConversationRecord", "OpenLease", "read_record"]


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A plan that was neither committed nor abandoned."""

    plan: str
    turn: int
    """Turns committed when it was made."""
    expires_seconds: float
    """From now; below zero if it timed out."""


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """A conversation's state in Redis."""

    key: str
    format: int | None
    """Version of its values; None if no version writes such values."""
    readable: bool
    """True if this version reads that format. If not, planners ignore it, and the four fields below are empty."""
    epoch: int
    turn: int
    blocks: tuple[SeenBlock, ...]
    """Oldest first."""
    leases: tuple[OpenLease, ...]
    """Oldest first."""
    may_ask: bool
    """True if the URL's user has the permissions for the two fields below, which planners do not need."""
    bytes: int | None
    """Of memory."""
    expires_seconds: float | None
    """From now, unless it is used again; None if never."""


def read_record(client: Any, prefix: str, conversation: Conversation) -> ConversationRecord | None:
    """Return a conversation's record, or None. Raises what redis-py raises."""
    key = conversation_key(prefix, conversation)
    try:
        fields: Mapping[bytes, bytes] = client.hgetall(key)
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        fields = {b"m": b""}  # a key of another type
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
    found = snapshot or Snapshot(0, 0, (), ())
    return ConversationRecord(
        key=key.decode(),
        format=head[0] if head else None,
        readable=snapshot is not None,
        epoch=found.epoch,
        turn=found.turn,
        blocks=found.blocks,
        leases=tuple(leases),
        may_ask=may_ask,
        bytes=size,
        expires_seconds=left / 1_000 if left >= 0 else None,
    )


def _time(client: Any, key: bytes) -> float:
    """Return the time of the server that has the key: leases end by its clock."""
    nodes = {"target_nodes": client.get_node_from_key(key)} if hasattr(client, "get_node_from_key") else {}
    seconds, microseconds = client.time(**nodes)
    return float(seconds + microseconds / 1_000_000)
