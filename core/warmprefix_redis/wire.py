"""Names, values and scripts of conversation state in Redis.

Values are packed, because redis-py's cost grows with their number. `lua/prelude.lua` describes each; numbers are
big-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError

from warmprefix.stores import Conversation, SeenBlock, Snapshot, Steps

__all__ = [
    "ABANDON",
    "COMMIT",
    "FORGET",
    "FORMAT",
    "PREPARE",
    "PrepareAnswer",
    "Script",
    "ServerIdentity",
    "StoredLease",
    "StoredRecord",
    "check_prefix",
    "conversation_key",
    "conversation_pattern",
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
"""Version of the hash's values, in the first byte of its record. Other versions are treated like a missing key."""

_BOUNDS = struct.Struct(">IIQQ")
_HEADER = struct.Struct(">IBBI")
_RECORD = struct.Struct(">BIIIII")
_BLOCK = struct.Struct(">IIII8s")
_CHECK_SIZE = 8
_LEASE = struct.Struct(">iQI")
_ENDED = -1
_DIGEST_SIZE = 16
_SEAL_SIZE = 16
_MAX_TOKENS = 0xFFFFFFFF
_SEEN, _CONTESTED, _TAKEN = 1, 2, 4
_PROMOTED, _DAMAGED = 1, 2


class ServerIdentity(NamedTuple):
    """A server's description of itself."""

    identity: bytes
    """Identifies its version of the data: changes with each restart of a master and each failover."""
    uptime: int
    """Seconds since it started; up to one too many."""
    promoted: bool
    """True if a replica was ever made the master; Redis does not report when."""


class StoredRecord(NamedTuple):
    """The counts in a conversation's hash."""

    epoch: int
    """Number of times that the history was changed."""
    turn: int
    """Number of committed turns."""
    blocks: int
    """Number of blocks that count as seen."""
    labels: int
    """Number of labels that are taken."""


class StoredLease(NamedTuple):
    """A lease in a conversation's hash."""

    plan_id: str
    """The id of the plan."""
    turn: int
    """Turns committed when the plan was made."""
    ends_ms: int
    """By the server's clock."""


class PrepareAnswer(NamedTuple):
    """The answer of the prepare script."""

    server: ServerIdentity
    turn: int
    seen: dict[bytes, SeenBlock]
    contested: frozenset[bytes]
    taken: frozenset[str]
    damaged: bool


# -- keys --------------------------------------------------------------------------------------------------------------


def check_prefix(prefix: str) -> str:
    """Return a valid key prefix unchanged.

    Raises:
        TypeError: It is not a str.
        ValueError: It is empty or has braces.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    if not prefix or "{" in prefix or "}" in prefix:
        raise ValueError(f"prefix must not be empty, nor have braces, which choose the Cluster's slot; got {prefix!r}")
    return prefix


def conversation_key(prefix: str, conversation: Conversation) -> bytes:
    """Return the key of a conversation's state, `PREFIX:{DIGEST}:seen`.

    The digest has a fixed alphabet, so no id can end the braces that choose the Cluster's slot. No two conversations
    share a key, because the tenant's length is part of the hashed text.

    >>> conversation_key("wp", Conversation("acme", "chat"))
    b'wp:{c3c378e4f8cf000b27f719773db16536}:seen'
    """
    text = b""
    if conversation.tenant is not None:
        tenant = _encode(conversation.tenant)
        text = b"%d:%b" % (len(tenant), tenant)
    text += b"|" + _encode(conversation.id)
    return f"{prefix}:{{{hashlib.blake2b(text, digest_size=16).hexdigest()}}}:seen".encode()


def conversation_pattern(prefix: str) -> str:
    """Return the pattern by which SCAN finds exactly the keys of conversations under a prefix."""
    escaped = "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix)
    return f"{escaped}:{{{'?' * 32}}}:seen"


# -- scripts -----------------------------------------------------------------------------------------------------------


class Script:
    """One atomic operation on one key.

    It is sent by its digest. After NOSCRIPT it is sent once in full, which also loads it into the server; in a Cluster,
    into the node that owns the key.
    """

    def __init__(self, name: str) -> None:
        folder = resources.files("warmprefix_redis") / "lua"
        parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)]
        self.name = name
        self.text = "\n".join(parts).encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()

    def steps(self, client: Any, key: bytes, *arguments: bytes) -> Steps[Any]:
        """Run the script on the client's server and return its answer."""
        sealed = (1, key, *arguments, _seal(*arguments, key))
        try:
            return (yield partial(client.execute_command, "EVALSHA", self.digest, *sealed))
        except NoScriptError:
            return (yield partial(client.execute_command, "EVAL", self.text, *sealed))


PREPARE = Script("prepare")
COMMIT = Script("commit")
ABANDON = Script("abandon")
FORGET = Script("forget")


def _seal(*parts: bytes) -> bytes:
    """Return a checksum of a message: TCP's is weak, and a proxy renews it for data that it mixed up."""
    return hashlib.sha1(b"".join(parts), usedforsecurity=False).hexdigest()[:_SEAL_SIZE].encode()


def _checksum(*parts: bytes) -> bytes:
    """Return the checksum of a stored value."""
    return _seal(*parts)[:_CHECK_SIZE]


# -- to the scripts ----------------------------------------------------------------------------------------------------


def pack_bounds(max_blocks: int, max_leases: int, ttl: float, lease_ttl: float) -> bytes:
    """Pack a conversation's bounds; times in seconds, rounded to milliseconds."""
    return _BOUNDS.pack(max_blocks, max_leases, max(1, round(ttl * 1_000)), max(1, round(lease_ttl * 1_000)))


def pack_plan(plan_id: str) -> tuple[bytes, bytes]:
    """Return a plan's id and its digest."""
    plan = _encode(plan_id)
    return plan, hashlib.blake2b(plan, digest_size=_DIGEST_SIZE).digest()


def pack_proposed(proposed: Mapping[bytes, str]) -> bytes:
    """Pack the field names of the blocks and of their labels."""
    return _pack_fields(proposed.items())


def pack_sent(sent: Sequence[SeenBlock]) -> tuple[bytes, bytes]:
    """Pack the field names of the blocks and of their labels, and the token counts, capped at 4,294,967,295 each."""
    tokens = struct.pack(f">{len(sent)}I", *[min(block.tokens, _MAX_TOKENS) for block in sent])
    return _pack_fields([(block.fingerprint, block.label) for block in sent]), tokens


def _pack_fields(blocks: Collection[tuple[bytes, str]]) -> bytes:
    """Pack field names as a msgpack array, which Lua reads in one step."""
    parts = [b"\xdd", (2 * len(blocks)).to_bytes(4, "big")]
    for fingerprint, label in blocks:
        if len(fingerprint) != _DIGEST_SIZE:
            raise ValueError(f"fingerprint must be {_DIGEST_SIZE} bytes, got {len(fingerprint)}")
        name = _encode(label)
        parts.append(b"\xb1b%b\xdb%bl%b" % (fingerprint, (len(name) + 1).to_bytes(4, "big"), name))
    return b"".join(parts)


# -- from the server ---------------------------------------------------------------------------------------------------


def unpack_prepared(answer: object, proposed: Mapping[bytes, str], plan: bytes) -> PrepareAnswer | None:
    """Unpack the answer of the prepare script; None if it was damaged, or belongs to another plan. O(blocks)."""
    if not isinstance(answer, bytes) or answer[-_SEAL_SIZE:] != _seal(answer[:-_SEAL_SIZE], plan):
        return None
    uptime, state, size, turn = _HEADER.unpack_from(answer)
    at = _HEADER.size + size
    identity, flags = answer[_HEADER.size : at], answer[at : at + len(proposed)]
    at += len(flags)
    seen: dict[bytes, SeenBlock] = {}
    contested: list[bytes] = []
    taken: list[str] = []
    for (fingerprint, label), flag in zip(proposed.items(), flags, strict=True):
        if flag & _SEEN:
            _, since, tokens, size, _ = _BLOCK.unpack_from(answer, at)
            at += _BLOCK.size + size
            seen[fingerprint] = SeenBlock(fingerprint, _decode(answer[at - size : at]), since, tokens)
            if flag & _CONTESTED:
                contested.append(fingerprint)
        elif flag & _TAKEN:
            taken.append(label)
    server = ServerIdentity(identity, uptime, bool(state & _PROMOTED))
    return PrepareAnswer(server, turn, seen, frozenset(contested), frozenset(taken), bool(state & _DAMAGED))


def read_info(server: Mapping[str, object], replication: Mapping[str, object]) -> ServerIdentity:
    """Return a server's identity from two sections of INFO."""
    identity = str(replication.get("master_replid", ""))
    promoted = str(replication.get("master_replid2", "")).strip("0") != ""
    return ServerIdentity(identity.encode(), max(0, int(str(server.get("uptime_in_seconds", 0)))), promoted)


def unpack_hash(fields: Mapping[bytes, bytes]) -> Snapshot | None:
    """Unpack a conversation's whole hash; None if it is missing, damaged or of another version. O(n log n)."""
    packed = fields.get(b"m", b"")
    record = unpack_record(packed)
    if record is None or b"p" not in fields or b"c" not in fields:
        return None
    if packed[_RECORD.size :] != _checksum(packed[: _RECORD.size], fields[b"p"], fields[b"c"]):
        return None
    numbered: list[tuple[int, SeenBlock]] = []
    for field, value in fields.items():
        label = value[_BLOCK.size :]
        if field[:1] == b"b" and len(value) >= _BLOCK.size:
            number, since, tokens, _, check = _BLOCK.unpack_from(value)
            if check == _checksum(field, value[: _BLOCK.size - _CHECK_SIZE], label):
                numbered.append((number, SeenBlock(field[1:], _decode(label), since, tokens)))
    blocks = tuple(block for _, block in sorted(numbered))
    plans = tuple(lease.plan_id for lease in unpack_leases(fields[b"p"]))
    return Snapshot(record.epoch, record.turn, blocks, plans)


def unpack_record(packed: bytes) -> StoredRecord | None:
    """Unpack the field `m`; None if it is unreadable for this version."""
    if len(packed) != _RECORD.size + _CHECK_SIZE or packed[0] != FORMAT:
        return None
    _, epoch, turn, _, blocks, labels = _RECORD.unpack_from(packed)
    return StoredRecord(epoch, turn, blocks, labels)


def unpack_leases(packed: bytes) -> list[StoredLease]:
    """Unpack the field `p`, oldest first, without the leases that `Forget` ended."""
    leases: list[StoredLease] = []
    at = 0
    while at < len(packed):
        turn, ends, size = _LEASE.unpack_from(packed, at)
        at += _LEASE.size + size
        if turn != _ENDED:
            leases.append(StoredLease(_decode(packed[at - size : at]), turn, ends))
    return leases


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")
