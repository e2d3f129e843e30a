"""Segments that routers of the same agents share, as the `LearnedOrder`s that an `OrderSharing` carries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from warmprefix.order_sharing import MAX_BLOCKS, MAX_TOKENS, LearnedOrder
from warmprefix.plan import Scope

__all__ = ["Segment", "name_digest", "read_segment", "routing_scope", "write_segment"]

_AGENT, _CONVERSATION = 0xFFFF, 0xFFFE
"""Ranks of the keys that are not blocks. A block's rank is its place in the segment."""


class Segment(NamedTuple):
    """Blocks that a router assigned to one agent."""

    agent: bytes
    """`name_digest` of the agent's name."""
    conversation: bytes | None
    """`name_digest` of the conversation's name, if there is one."""
    blocks: Sequence[tuple[bytes, int]]
    """Fingerprints and tokens."""


def name_digest(kind: Literal["agent", "conversation", "tenant"], name: str) -> bytes:
    """Return 16 bytes that stand for a name, which is not shared."""
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16, person=b"wp-" + kind.encode()).digest()


def routing_scope(tenant: str | None) -> Scope:
    """Return the scope of a tenant's segments. No planner has it, because a preamble has 16 bytes there."""
    return Scope(tenant, None, b"warmprefix routing")


def write_segment(segment: Segment) -> Iterator[LearnedOrder]:
    """Yield the segment as orders; several if it is long."""
    marks = [(segment.agent, 0, _AGENT)]
    if segment.conversation is not None:
        marks.append((segment.conversation, 0, _CONVERSATION))
    most = MAX_BLOCKS - len(marks)
    for start in range(0, len(segment.blocks), most):
        part = segment.blocks[start : start + most]
        rows = [*marks, *((key, min(tokens, MAX_TOKENS), i) for i, (key, tokens) in enumerate(part))]
        keys, lengths, ranks = zip(*rows, strict=True)
        yield LearnedOrder(keys, lengths, ranks)


def read_segment(order: LearnedOrder) -> Segment | None:
    """Return what `write_segment` wrote; None if the order names no agent."""
    agent = conversation = None
    blocks: list[tuple[bytes, int]] = []
    for key, tokens, rank in zip(*order, strict=True):
        if rank == _AGENT:
            agent = key
        elif rank == _CONVERSATION:
            conversation = key
        else:
            blocks.append((key, tokens))
    return None if agent is None else Segment(agent, conversation, blocks)
