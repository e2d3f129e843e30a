"""What travels to the scripts and back, and what the hash holds: packed, since redis-py's cost is by the element.

Each value is described in `lua/prelude.lua`; numbers are big-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from warmprefix.stores.operations import SeenBlock, Snapshot

__all__ = [
    "FORMAT",
    "Answer",
    "Lease",
    "Record",
    "Server",
    "pack_bounds",
    "pack_plan",
    "pack_proposed",
    "pack_sent",
    "read_info",
    "unpack_hash",
    "unpack_leases",
    "unpack_prepared",
    "unpack_record",
]

FORMAT = 1
"""The version of the hash's values, in the first byte of its record. Others are treated as if nothing were there."""

_BOUNDS = struct.Struct(">IIQQ")
_HEADER = struct.Struct(">IBBI")
_RECORD = struct.Struct(">BIIIII")
_BLOCK = struct.Struct(">IIII")
_LEASE = struct.Struct(">iQI")
_ENDED = -1
_DIGEST_SIZE = 16
_MOST_TOKENS = 0xFFFFFFFF
_SEEN, _CONTESTED, _TAKEN = 1, 2, 4


class Server(NamedTuple):
    """What a server says of itself."""

    identity: bytes
    """Of the line of its data: another after each restart of a master and each failover."""
    uptime: int
    """Seconds since it started; up to one more than there were."""
    promoted: bool
    """Whether it was ever a replica that was made the master; nobody says when."""


class Record(NamedTuple):
    """What a conversation's hash says of itself."""

    epoch: int
    turn: int
    blocks: int
    """How many there are."""
    labels: int
    """How many there are."""


class Lease(NamedTuple):
    """A plan in flight."""

    plan_id: str
    turn: int
    """Turns that had been committed when it was made."""
    ends_ms: int
    """By the server's clock."""


class Answer(NamedTuple):
    """What the prepare script tells."""

    server: Server
    turn: int
    seen: dict[bytes, SeenBlock]
    contested: frozenset[bytes]
    taken: frozenset[str]


def pack_bounds(max_blocks: int, max_leases: int, ttl: float, lease_ttl: float) -> bytes:
    """What limits a conversation; times in seconds, of which milliseconds count."""
    return _BOUNDS.pack(max_blocks, max_leases, max(1, round(ttl * 1_000)), max(1, round(lease_ttl * 1_000)))


def pack_plan(plan_id: str) -> tuple[bytes, bytes]:
    """A plan's id and its digest."""
    plan = _encode(plan_id)
    return plan, hashlib.blake2b(plan, digest_size=_DIGEST_SIZE).digest()


def pack_proposed(proposed: Mapping[bytes, str]) -> bytes:
    """The fields of the blocks and their labels."""
    return _pack_fields(proposed.items())


def pack_sent(sent: Sequence[SeenBlock]) -> tuple[bytes, bytes]:
    """The fields of the blocks and their labels; and the tokens, 4,294,967,295 at most. (The script knows the turn.)"""
    tokens = struct.pack(f">{len(sent)}I", *[min(block.tokens, _MOST_TOKENS) for block in sent])
    return _pack_fields([(block.fingerprint, block.label) for block in sent]), tokens


def unpack_prepared(answer: bytes, proposed: Mapping[bytes, str]) -> Answer:
    """O(blocks)."""
    uptime, promoted, size, turn = _HEADER.unpack_from(answer)
    at = _HEADER.size + size
    identity, flags = answer[_HEADER.size : at], answer[at : at + len(proposed)]
    at += len(flags)
    seen: dict[bytes, SeenBlock] = {}
    contested: list[bytes] = []
    taken: list[str] = []
    for (fingerprint, label), flag in zip(proposed.items(), flags, strict=True):
        if flag & _SEEN:
            _, since, tokens, size = _BLOCK.unpack_from(answer, at)
            at += _BLOCK.size + size
            seen[fingerprint] = SeenBlock(fingerprint, _decode(answer[at - size : at]), since, tokens)
            if flag & _CONTESTED:
                contested.append(fingerprint)
        elif flag & _TAKEN:
            taken.append(label)
    return Answer(Server(identity, uptime, bool(promoted)), turn, seen, frozenset(contested), frozenset(taken))


def read_info(server: Mapping[str, object], replication: Mapping[str, object]) -> Server:
    """The same from the sections of INFO."""
    identity = str(replication.get("master_replid", ""))
    promoted = str(replication.get("master_replid2", "")).strip("0") != ""
    return Server(identity.encode(), max(0, int(str(server.get("uptime_in_seconds", 0)))), promoted)


def unpack_hash(fields: Mapping[bytes, bytes]) -> Snapshot | None:
    """A conversation's whole hash; None if this version can't read it, or there is none. O(n log n)."""
    record = unpack_record(fields.get(b"m", b""))
    if record is None or b"p" not in fields or b"c" not in fields:
        return None
    numbered: list[tuple[int, SeenBlock]] = []
    for field, value in fields.items():
        if field[:1] == b"b":
            number, since, tokens, _ = _BLOCK.unpack_from(value)
            numbered.append((number, SeenBlock(field[1:], _decode(value[_BLOCK.size :]), since, tokens)))
    blocks = tuple(block for _, block in sorted(numbered))
    plans = tuple(lease.plan_id for lease in unpack_leases(fields[b"p"]))
    return Snapshot(record.epoch, record.turn, blocks, plans)


def unpack_record(packed: bytes) -> Record | None:
    """What the field `m` holds; None if this version can't read it."""
    if len(packed) != _RECORD.size or packed[0] != FORMAT:
        return None
    _, epoch, turn, _, blocks, labels = _RECORD.unpack(packed)
    return Record(epoch, turn, blocks, labels)


def unpack_leases(packed: bytes) -> list[Lease]:
    """What the field `p` holds, oldest first, without the plans whose leases `forget` has ended."""
    leases: list[Lease] = []
    at = 0
    while at < len(packed):
        turn, ends, size = _LEASE.unpack_from(packed, at)
        at += _LEASE.size + size
        if turn != _ENDED:
            leases.append(Lease(_decode(packed[at - size : at]), turn, ends))
    return leases


def _pack_fields(blocks: Collection[tuple[bytes, str]]) -> bytes:
    """Names of fields as a msgpack array, which Lua reads in one step."""
    parts = [b"\xdd", (2 * len(blocks)).to_bytes(4, "big")]
    for fingerprint, label in blocks:
        if len(fingerprint) != _DIGEST_SIZE:
            raise ValueError(f"fingerprint must be {_DIGEST_SIZE} bytes, got {len(fingerprint)}")
        name = _encode(label)
        parts.append(b"\xb1b%b\xdb%bl%b" % (fingerprint, (len(name) + 1).to_bytes(4, "big"), name))
    return b"".join(parts)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")
