"""What routers of the same agents tell each other, in the form that `OrderSharing` carries.

One order is one agent's segment: the agent, the conversation if there is one, and the blocks, each as a key. Which is
which is told by the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from warmprefix.order_sharing import LearnedOrder
from warmprefix.order_sharing.codec import MAX_BLOCKS, MAX_TOKENS
from warmprefix.plan import Scope

__all__ = ["LearnedSegment", "name_digest", "read_segment", "routing_scope", "write_segments"]

_AGENT, _CONVERSATION = 0xFFFF, 0xFFFE
"""The ranks that say so; a block's is its place in the segment."""
_PREAMBLE = b"warmprefix routing"


class LearnedSegment(NamedTuple):
    """Blocks that a router gave to an agent."""

    agent: bytes
    """`name_digest` of its name."""
    conversation: bytes | None
    """`name_digest` of the conversation's; None without one."""
    blocks: Sequence[tuple[bytes, int]]
    """Fingerprints and tokens."""


def name_digest(kind: Literal["agent", "conversation", "tenant"], name: str) -> bytes:
    """16 bytes that stand for a name, which is not told."""
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16, person=b"wp-" + kind.encode()).digest()


def routing_scope(tenant: str | None) -> Scope:
    """Under which a tenant's segments are told. No planner's: there a preamble is a digest of 16 bytes."""
    return Scope(tenant, None, _PREAMBLE)


def write_segments(segment: LearnedSegment) -> Iterator[LearnedOrder]:
    """The segment as orders; several if it is long."""
    marks = [(segment.agent, 0, _AGENT)]
    if segment.conversation is not None:
        marks.append((segment.conversation, 0, _CONVERSATION))
    most = MAX_BLOCKS - len(marks)
    for start in range(0, len(segment.blocks), most):
        part = segment.blocks[start : start + most]
        rows = [*marks, *((key, min(tokens, MAX_TOKENS), i) for i, (key, tokens) in enumerate(part))]
        keys, lengths, ranks = zip(*rows, strict=True)
        yield LearnedOrder(keys, lengths, ranks)


def read_segment(order: LearnedOrder) -> LearnedSegment | None:
    """What `write_segments` wrote; None of an order that tells of no agent."""
    agent = conversation = None
    blocks: list[tuple[bytes, int]] = []
    for key, tokens, rank in zip(*order, strict=True):
        if rank == _AGENT:
            agent = key
        elif rank == _CONVERSATION:
            conversation = key
        else:
            blocks.append((key, tokens))
    return None if agent is None else LearnedSegment(agent, conversation, blocks)
