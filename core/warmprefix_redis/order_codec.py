"""Learned orders as bytes, and the names of the streams that carry them."""

from __future__ import annotations

import struct
import zlib
from hashlib import blake2b

from warmprefix.order_sharing import MAX_BLOCKS, MAX_TOKENS, LearnedOrder
from warmprefix.plan import Scope

__all__ = ["SENDER_BYTES", "decode", "encode", "stream_key"]

VERSION = 1
SENDER_BYTES = 8
KEY_BYTES = 16

_HEADER = struct.Struct(f">BI{SENDER_BYTES}sH")
"""Version, the CRC-32 of everything else, sender, and number of blocks."""


def encode(sender: bytes, order: LearnedOrder) -> bytes:
    """Return an entry: 22 bytes per block, and 15.

    Raises:
        ValueError: The order has no block, a block or rank twice, too many blocks, or a value out of range.
    """
    keys, tokens, ranks = order
    count = len(keys)
    if (problem := _problem(order)) is not None:
        raise ValueError(problem)
    if {*map(len, keys)} != {KEY_BYTES}:
        raise ValueError(f"order's keys must have {KEY_BYTES} bytes, got {sorted({*map(len, keys)})}")
    try:
        body = b"".join((*keys, struct.pack(f">{count}I{count}H", *tokens, *ranks)))
    except struct.error as error:
        raise ValueError(f"order's ranks must be integers, 0 to 65535: {error}") from None
    return _HEADER.pack(VERSION, _checksum(sender, count, body), sender, count) + body


def decode(entry: bytes) -> tuple[bytes, LearnedOrder] | None:
    """Return an entry's sender and order; None if it is of another version, damaged, or not an entry. O(len(entry))."""
    if len(entry) < _HEADER.size or entry[0] != VERSION:
        return None
    _, checksum, sender, count = _HEADER.unpack_from(entry)
    body = entry[_HEADER.size :]
    if len(body) != count * (KEY_BYTES + 6) or _checksum(sender, count, body) != checksum:
        return None
    numbers = struct.unpack_from(f">{count}I{count}H", body, count * KEY_BYTES)
    keys = [body[i : i + KEY_BYTES] for i in range(0, count * KEY_BYTES, KEY_BYTES)]
    order = LearnedOrder(keys, numbers[:count], numbers[count:])
    return (sender, order) if _problem(order) is None else None


def _problem(order: LearnedOrder) -> str | None:
    """Return what is wrong with an order's values."""
    keys, tokens, ranks = order
    count = len(keys)
    if not 0 < count <= MAX_BLOCKS or len(tokens) != count or len(ranks) != count:
        return (
            f"order must have 1 to {MAX_BLOCKS} blocks, each with tokens and a rank,"
            f" got {count} blocks, {len(tokens)} tokens, {len(ranks)} ranks"
        )
    if len(set(keys)) != count or len(set(ranks)) != count:
        return "order must not have a block or a rank twice"
    if not (min(tokens) >= 0 and max(tokens) <= MAX_TOKENS):
        return f"order's tokens must be 0 to {MAX_TOKENS}, got {min(tokens)} to {max(tokens)}"
    return None


def _checksum(sender: bytes, count: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(_HEADER.pack(VERSION, 0, sender, count)))


def stream_key(prefix: str, scope: Scope) -> bytes:
    """Return the key of a scope's stream. It is a digest, so no name can break the hash tag or reach another key.

    >>> stream_key("wp", Scope("acme", None, None))
    b'wp:{73c0c1f9b56747277ed816fd5482dc64}:orders'
    """
    digest = blake2b(digest_size=16, person=b"wp-orders")
    for part in scope:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(b"\0" if data is None else b"\1" + struct.pack(">Q", len(data)) + data)
    return b"%s:{%s}:orders" % (prefix.encode("utf-8", "surrogatepass"), digest.hexdigest().encode())
