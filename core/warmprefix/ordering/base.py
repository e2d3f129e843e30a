"""The seam of ordering: what a policy sees, and what it owes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from warmprefix.prefix.tree import SEARCH_BUDGET, PrefixMatch, PrefixTree

__all__ = ["BlockView", "OrderingPolicy", "PrefixView", "ServedBlock"]


class BlockView(Protocol):
    """What a policy may know of a block: never its text."""

    @property
    def fingerprint(self) -> bytes:
        """The block's identity."""
        ...

    @property
    def tokens(self) -> int:
        """Its length."""
        ...


class OrderingPolicy(Protocol):
    """Decides the order of a request's blocks. One object serves one scope, one call at a time.

    A policy is pure but for what `observe` tells it: no clock, no random numbers, no I/O. The planner falls back to
    relevance order, and counts it, when a policy raises or answers with anything but a permutation.
    """

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        """A permutation of `range(len(blocks))`: the planned order.

        Args:
            blocks: Distinct blocks in relevance order; not to be changed.
            prefix: What the engine holds of the paths that these blocks can follow.
        """
        ...

    def observe(self, served: Sequence[BlockView]) -> None:
        """Learn from an order that reached the engine. A planner hands over `ServedBlock`s."""
        ...


class ServedBlock(NamedTuple):
    """A block in an order that reached the engine."""

    fingerprint: bytes
    tokens: int
    rank: int
    """Its place in relevance order."""
    resident: bool
    """Whether the engine was predicted to hold it, and all before it."""


class PrefixView:
    """A policy's read-only look at the prefix tree, from the end of the blocks already placed in front."""

    __slots__ = ("_after", "_tree")

    def __init__(self, tree: PrefixTree[bytes], after: Sequence[bytes] = ()) -> None:
        self._tree = tree
        self._after = after

    def match_prefix(self, blocks: Sequence[BlockView]) -> PrefixMatch:
        """How much of exactly this order is resident."""
        placed = self._tree.match_prefix(self._after)
        whole = self._tree.match_prefix([*self._after, *(block.fingerprint for block in blocks)])
        return PrefixMatch(whole.blocks - placed.blocks, whole.tokens - placed.tokens)

    def deepest_path(self, blocks: Sequence[BlockView], budget: int | None = SEARCH_BUDGET) -> list[int]:
        """Indices of the resident path of most tokens among `blocks`; see `PrefixTree.deepest_path`."""
        return self._tree.deepest_path([block.fingerprint for block in blocks], self._after, budget)

    def greedy_path(self, blocks: Sequence[BlockView]) -> list[int]:
        """Indices of the path that takes the first resident child in rank order; see `PrefixTree.greedy_path`."""
        return self._tree.greedy_path([block.fingerprint for block in blocks], self._after)


def then_the_rest(head: Sequence[int], total: int) -> list[int]:
    """`head`, then all other indices below `total` in relevance order."""
    placed = set(head)
    return [*head, *(i for i in range(total) if i not in placed)]


def by_rank(served: Sequence[BlockView]) -> list[BlockView]:
    """What was served, in relevance order; blocks that do not tell their rank stand as they were served."""
    return sorted(served, key=lambda block: getattr(block, "rank", 0))


def is_resident(served: BlockView) -> bool:
    """Whether the engine was predicted to hold it; not, if it does not tell."""
    return getattr(served, "resident", False)
