"""Learned orders as bytes, and the names of the streams that carry them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from warmprefix.order_sharing import MAX_BLOCKS, MAX_TOKENS, LearnedOrder
from warmprefix.plan import Scope

__all__ = [
    "MAX_ORDERS",
    "WORKER_BYTES",
    "Entry",
    "decode",
    "encode",
    "orders_in",
    "pack",
    "stream_key",
]

VERSION = 1
WORKER_BYTES = 8
KEY_BYTES = 16
MAX_ORDERS = 256
"""Per entry."""

_HEADER = struct.Struct(f">B{WORKER_BYTES}sHI")
"""Version, sender, number of orders, and the CRC-32 of everything else."""
_LENGTH = struct.Struct(">H")


class Entry(NamedTuple):
    """Orders that one worker appended together."""

    worker: bytes
    """Random identifier of the worker process."""
    orders: Sequence[LearnedOrder]


def pack(order: LearnedOrder) -> bytes:
    """Pack one order, to be joined with others in an entry: 22 bytes per block, and 2.

    Raises:
        ValueError: It has no block, a block or rank twice, too many blocks, or a value out of range.
    """
    keys, tokens, ranks = order
    count = len(keys)
    if not 0 < count <= MAX_BLOCKS or len(tokens) != count or len(ranks) != count:
        raise ValueError(
            f"order must have 1 to {MAX_BLOCKS} blocks, each with tokens and a rank,"
            f" got {count} blocks, {len(tokens)} tokens, {len(ranks)} ranks"
        )
    if len(set(keys)) != count or len(set(ranks)) != count:
        raise ValueError("order must not have a block or a rank twice")
    if {*map(len, keys)} != {KEY_BYTES}:
        raise ValueError(f"order's keys must have {KEY_BYTES} bytes, got {sorted({*map(len, keys)})}")
    if not (min(tokens) >= 0 and max(tokens) <= MAX_TOKENS):
        raise ValueError(f"order's tokens must be 0 to {MAX_TOKENS}, got {min(tokens)} to {max(tokens)}")
    try:
        return b"".join((_LENGTH.pack(count), *keys, struct.pack(f">{count}I{count}H", *tokens, *ranks)))
    except struct.error as error:
        raise ValueError(f"order's ranks must be integers, 0 to 65535: {error}") from None


def encode(worker: bytes, packed: Sequence[bytes]) -> bytes:
    """Return an entry of packed orders, `MAX_ORDERS` at most."""
    body = b"".join(packed)
    unchecked = _HEADER.pack(VERSION, worker, len(packed), 0)
    return _HEADER.pack(VERSION, worker, len(packed), zlib.crc32(body, zlib.crc32(unchecked))) + body


def orders_in(payload: bytes) -> int:
    """Return the number of orders in an entry's header; 0 if it is not an entry of this version."""
    if len(payload) < _HEADER.size or payload[0] != VERSION:
        return 0
    return int(_HEADER.unpack_from(payload)[2])


def decode(payload: bytes) -> Entry:
    """Return the content of an entry. O(len(payload)).

    Raises:
        ValueError: It is of another version, damaged, or not an entry.
    """
    if not payload or payload[0] != VERSION:
        raise ValueError(f"version {payload[0] if payload else 'none'}, not {VERSION}")
    if len(payload) < _HEADER.size:
        raise ValueError("shorter than a header")
    version, worker, count, checksum = _HEADER.unpack_from(payload)
    unchecked = _HEADER.pack(version, worker, count, 0)
    if zlib.crc32(memoryview(payload)[_HEADER.size :], zlib.crc32(unchecked)) != checksum:
        raise ValueError("damaged")
    if not 0 < count <= MAX_ORDERS:
        raise ValueError(f"{count} orders")
    orders = list(_unpack(payload, count))
    return Entry(worker, orders)


def _unpack(payload: bytes, count: int) -> Iterator[LearnedOrder]:
    at = _HEADER.size
    for _ in range(count):
        if at + _LENGTH.size > len(payload):
            raise ValueError("ends before its orders do")
        blocks: int = _LENGTH.unpack_from(payload, at)[0]
        at += _LENGTH.size
        end = at + blocks * KEY_BYTES
        if not 0 < blocks <= MAX_BLOCKS or end + 6 * blocks > len(payload):
            raise ValueError(f"{blocks} blocks")
        keys = [payload[i : i + KEY_BYTES] for i in range(at, end, KEY_BYTES)]
        numbers = struct.unpack_from(f">{blocks}I{blocks}H", payload, end)
        at = end + 6 * blocks
        tokens, ranks = numbers[:blocks], numbers[blocks:]
        if len(set(keys)) != blocks or len(set(ranks)) != blocks or max(tokens) > MAX_TOKENS:
            raise ValueError("a block or a rank twice, or too many tokens")
        yield LearnedOrder(keys, tokens, ranks)
    if at != len(payload):
        raise ValueError("continues behind its orders")


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
