"""What routers of the same agents share, in the form that `OrderSharing` carries.

One `LearnedOrder` is one agent's segment: the agent, the conversation if there is one, and the blocks, each as a key.
The rank distinguishes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing
from warmprefix.order_sharing.codec import MAX_BLOCKS, MAX_TOKENS
from warmprefix.plan import Scope

__all__ = ["Segment", "SegmentSharing", "name_digest", "read_segment", "routing_scope", "write_segment"]

_AGENT, _CONVERSATION = 0xFFFF, 0xFFFE
"""Ranks of keys that are not blocks; a block's rank is its place in the segment."""


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


class SegmentSharing:
    """Exchanges segments with other routers, by way of an `OrderSharing`.

    Args:
        sharing: Carries the segments.
        learn: A method that receives the tenant and the segment of another router; held weakly, so that the sharing
            does not keep its router alive.
    """

    def __init__(self, sharing: OrderSharing, learn: Callable[[str | None, Segment], object]) -> None:
        self.orders = sharing
        self.is_active = not isinstance(sharing, NoSharing)
        self._learn: weakref.WeakMethod[Any] = weakref.WeakMethod(learn)

    def publish(self, tenant: str | None, segment: Segment) -> None:
        for order in write_segment(segment):
            self.orders.publish(routing_scope(tenant), order)

    def follow(self, tenant: str | None) -> None:
        self.orders.follow(routing_scope(tenant), partial(self._receive, tenant))

    def unfollow(self, tenant: str | None) -> None:
        self.orders.unfollow(routing_scope(tenant))

    def _receive(self, tenant: str | None, orders: Sequence[LearnedOrder]) -> None:
        for order in orders:
            segment, learn = read_segment(order), self._learn()
            if segment is not None and learn is not None:
                learn(tenant, segment)
