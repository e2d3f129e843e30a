"""Conversation state in Redis: names, stored values, and the scripts that change them.

`lua/prelude.lua` describes the fields of a conversation's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

from redis.exceptions import InvalidResponse, NoScriptError

from warmprefix.stores import Conversation, PreparedTurn, SeenBlock, Snapshot, Steps

__all__ = [
    "SCRIPTS",
    "Script",
    "check_prefix",
    "conversation_key",
    "conversation_pattern",
    "decode_prepared",
    "decode_record",
    "encode_proposed",
    "encode_sent",
]

VERSION = "1"
"""Version of the stored values; a part of their checksums, so that other versions count as damaged."""

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


def _hex(fingerprint: bytes) -> str:
    if len(fingerprint) != _FINGERPRINT_BYTES:
        raise ValueError(f"fingerprint must be {_FINGERPRINT_BYTES} bytes, got {len(fingerprint)}")
    return fingerprint.hex()


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
