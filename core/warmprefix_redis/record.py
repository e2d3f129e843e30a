"""Conversation state in Redis: names, stored values, and the scripts that change them.

`lua/prelude.lua` describes the fields of a conversation's hash.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

from redis.exceptions import InvalidResponse, NoScriptError

from warmprefix.stores import Conversation, PreparedTurn, SeenBlock, Snapshot, Steps, TurnRecord

__all__ = [
    "SCRIPTS",
    "Script",
    "check_prefix",
    "conversation_key",
    "conversation_patterns",
    "decode_prepared",
    "decode_record",
    "decode_turn",
    "encode_proposed",
    "encode_sent",
    "encode_turn",
    "is_damaged",
    "is_turn",
    "turn_key",
]

VERSION = "1"
"""Version of the stored values; a part of their checksums, so that other versions count as damaged."""

_TURN_VERSION = b"1"
"""Version of the records of turns, and their first byte."""
_WHOLE, _PARTIAL, _CONTRADICTED = range(3)
_HEAD = struct.Struct("<3I")

_FINGERPRINT_BYTES = 16
_MAX_TOKENS = 0xFFFFFFFF
_CHECK_DIGITS, _SEAL_DIGITS = 8, 16
_UNKNOWN, _TAKEN = 0, 1
_ENDED = -1


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
    return _key(prefix, conversation, "seen")


def turn_key(prefix: str, turn: Conversation) -> bytes:
    """Return the key of a turn's record, `PREFIX:{DIGEST}:turn`, made of tenant and id in the same way."""
    return _key(prefix, turn, "turn")


def _key(prefix: str, conversation: Conversation, kind: str) -> bytes:
    text = b""
    if conversation.tenant is not None:
        tenant = _encode(conversation.tenant)
        text = b"%d:%b" % (len(tenant), tenant)
    text += b"|" + _encode(conversation.id)
    return f"{prefix}:{{{hashlib.blake2b(text, digest_size=16).hexdigest()}}}:{kind}".encode()


def conversation_patterns(prefix: str) -> list[str]:
    """Return the patterns by which SCAN finds exactly the keys of conversations and of turns under a prefix."""
    escaped = "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix)
    return [f"{escaped}:{{{'?' * 32}}}:{kind}" for kind in ("seen", "turn")]


# -- scripts -----------------------------------------------------------------------------------------------------------


class Script:
    """One atomic operation on one key.

    It is sent by its digest. After NOSCRIPT it is sent once in full, which also loads it into the server; in a Cluster,
    into the node that owns the key.
    """

    def __init__(self, name: str) -> None:
        folder = resources.files("warmprefix_redis") / "lua"
        parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)]
        self.text = "\n".join(parts).encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()

    def steps(self, client: Any, key: bytes, request: Mapping[str, object]) -> Steps[Any]:
        """Run the script on the client's server and return its answer."""
        body = _encode(json.dumps(request, ensure_ascii=False))
        sealed = (1, key, body, _seal(key + body))
        try:
            return (yield partial(client.execute_command, "EVALSHA", self.digest, *sealed))
        except NoScriptError:
            return (yield partial(client.execute_command, "EVAL", self.text, *sealed))


SCRIPTS = {name: Script(name) for name in ("prepare", "commit", "abandon", "forget")}


def _seal(message: bytes) -> bytes:
    """Return a checksum of a message: TCP's is weak, and a proxy renews it for data that it mixed up."""
    return hashlib.sha1(message, usedforsecurity=False).hexdigest()[:_SEAL_DIGITS].encode()


def encode_proposed(proposed: Mapping[bytes, str]) -> list[str]:
    """Return the fields of the blocks and of their labels."""
    return [field for key, label in proposed.items() for field in (f"b{_hex(key)}", f"l{label}")]


def encode_sent(sent: Sequence[SeenBlock]) -> list[tuple[str, str, int]]:
    """Return fingerprints, labels and token counts, which are capped at 4,294,967,295."""
    return [(_hex(block.fingerprint), block.label, min(block.tokens, _MAX_TOKENS)) for block in sent]


def encode_turn(key: bytes, record: TurnRecord | None) -> bytes:
    """Return the stored value of a turn's record, or of one that contradicts another: version, checksum, body.

    The body has turn, mark and number of blocks, then the fingerprints, then compressed: turns, token counts and times
    of the blocks, and all labels, those of the blocks first. O(blocks).
    """
    turn, blocks, others, partial, _ = TurnRecord(0) if record is None else record
    mark = _CONTRADICTED if record is None else _PARTIAL if partial else _WHOLE
    keys = b"".join([_checked_fingerprint(block.fingerprint) for block in blocks])
    numbers = [number for block in blocks for number in (block.turn, min(block.tokens, _MAX_TOKENS), block.time)]
    labels = [*[block.label for block in blocks], *others]
    if any("\n" in label for label in labels):
        raise ValueError("label must be one line")
    columns = struct.pack(f"<{len(numbers)}I", *numbers) + _encode("\n".join(labels))
    body = _HEAD.pack(turn, mark, len(blocks)) + keys + zlib.compress(columns, 1)
    return _TURN_VERSION + _seal(_TURN_VERSION + key + body) + body


def decode_turn(key: bytes, value: bytes | None) -> TurnRecord | None:
    """Decode the record of a turn; None if it is missing, of another version or contradicts another record."""
    if is_damaged(key, value):
        return TurnRecord(0, damaged=True)
    if value is None or value[:1] != _TURN_VERSION:
        return None
    body = value[1 + _SEAL_DIGITS :]
    turn, mark, count = _HEAD.unpack_from(body)
    if mark == _CONTRADICTED:
        return None
    end = _HEAD.size + _FINGERPRINT_BYTES * count
    keys = [body[i : i + _FINGERPRINT_BYTES] for i in range(_HEAD.size, end, _FINGERPRINT_BYTES)]
    columns = zlib.decompress(body[end:])
    numbers, text = struct.unpack_from(f"<{3 * count}I", columns), columns[12 * count :]
    labels = _decode(text).split("\n") if text else [""] * count
    blocks = tuple(map(SeenBlock, keys, labels, numbers[::3], numbers[1::3], numbers[2::3]))
    return TurnRecord(turn, blocks, tuple(labels[count:]), mark == _PARTIAL)


def is_turn(key: bytes, value: bytes | None) -> bool:
    """Return True if a value is the sound record of a turn, or of one that contradicts another."""
    return value is not None and value[:1] == _TURN_VERSION and not is_damaged(key, value)


def is_damaged(key: bytes, value: bytes | None) -> bool:
    """Return True if a value under the key of a turn was written by nobody, or under another key."""
    if value is None or (value and value[:1] != _TURN_VERSION):  # another version may have another checksum
        return False
    end = 1 + _SEAL_DIGITS
    return value[1:end] != _seal(_TURN_VERSION + key + value[end:])


def _hex(fingerprint: bytes) -> str:
    return _checked_fingerprint(fingerprint).hex()


def _checked_fingerprint(fingerprint: bytes) -> bytes:
    if len(fingerprint) != _FINGERPRINT_BYTES:
        raise ValueError(f"fingerprint must be {_FINGERPRINT_BYTES} bytes, got {len(fingerprint)}")
    return fingerprint


# -- from the server ---------------------------------------------------------------------------------------------------


def decode_prepared(answer: object, proposed: Mapping[bytes, str], plan_id: str) -> PreparedTurn:
    """Decode the answer of the prepare script.

    Raises:
        InvalidResponse: It was damaged, or belongs to another plan.
    """
    body = answer[_SEAL_DIGITS:] if isinstance(answer, bytes) else b""
    if not body or answer != _seal(_encode(plan_id) + body) + body:
        raise InvalidResponse("the answer to prepare was damaged, or belongs to another call")
    turn, damaged, found = json.loads(_decode(body))
    seen: dict[bytes, SeenBlock] = {}
    taken, contested = set(), set()
    for (fingerprint, label), state in zip(proposed.items(), found, strict=True):
        if state == _TAKEN:
            taken.add(label)
        elif state != _UNKNOWN:
            since, tokens, shown, is_contested = state
            seen[fingerprint] = SeenBlock(fingerprint, shown, since, tokens)
            if is_contested:
                contested.add(fingerprint)
    return PreparedTurn(turn, seen, frozenset(taken), frozenset(contested), bool(damaged))


def decode_record(fields: Mapping[bytes, bytes]) -> Snapshot | None:
    """Decode a conversation's hash; None if it is missing, damaged or of another version. O(n log n)."""
    text = _checked(b"state", fields.get(b"state", b""))
    if text is None:
        return None
    state = json.loads(text)
    blocks: list[tuple[int, SeenBlock]] = []
    for field, value in fields.items():
        if field[:1] == b"b" and (text := _checked(field, value)) is not None:
            turn, number, tokens, label = text.split(" ", 3)
            blocks.append((int(number), SeenBlock(bytes.fromhex(field[1:].decode()), label, int(turn), int(tokens))))
    plans = tuple(plan_id for plan_id, turn, _ in state["leases"] if turn != _ENDED)
    return Snapshot(state["epoch"], state["turn"], tuple(block for _, block in sorted(blocks)), plans)


def _checked(field: bytes, value: bytes) -> str | None:
    """Return a stored value without its checksum; None if it is damaged."""
    check, text = value[:_CHECK_DIGITS], value[_CHECK_DIGITS:]
    return _decode(text) if check == _seal(VERSION.encode() + field + text)[:_CHECK_DIGITS] else None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")
