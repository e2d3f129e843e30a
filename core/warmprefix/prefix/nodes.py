"""Nodes of a prefix tree, and the ring in which they stand by age."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = [
    "Places",
    "Trail",
    "TreeNode",
    "link_before",
    "may_stand",
    "ranks_of_children",
    "ring",
    "ring_backwards",
    "shared_prefix",
    "unlink",
    "unwind",
]

K = TypeVar("K", bound=Hashable)

Places = Collection[int]
"""Indices of blocks."""


class TreeNode(Generic[K]):
    """The run of blocks on one edge, and a place in the recency ring."""

    __slots__ = ("children", "is_junction", "keys", "older", "parent", "reach", "resident", "tokens", "used", "younger")

    def __init__(self, keys: list[K], tokens: list[int], parent: TreeNode[K] | None, resident: bool) -> None:
        self.keys = keys
        self.tokens = tokens
        self.parent = parent
        self.resident = resident
        self.reach = sum(tokens)
        """An upper bound on the tokens of any path from the start of this edge downwards."""
        self.is_junction = False
        """True if a later request left the path at the end of this edge, which leaves a checkpoint in some engines."""
        self.children: dict[K, TreeNode[K]] = {}
        self.used = 0
        """The last request that used the node, in trees that count requests; see `warmprefix.prefix.reuse`."""
        # The root closes the ring: root.younger is the oldest node, root.older the youngest.
        self.older: TreeNode[K] = self
        self.younger: TreeNode[K] = self


def unlink(node: TreeNode[K]) -> None:
    """Take a node out of the ring."""
    node.older.younger, node.younger.older = node.younger, node.older


def link_before(younger: TreeNode[K], node: TreeNode[K]) -> None:
    """Put a node into the ring, next to the given one, as the older of the two."""
    node.older, node.younger = younger.older, younger
    younger.older.younger = younger.older = node


def ring(root: TreeNode[K]) -> Iterator[TreeNode[K]]:
    """Yield the nodes, oldest first."""
    node = root.younger
    while node is not root:
        yield node
        node = node.younger


def ring_backwards(root: TreeNode[K]) -> Iterator[TreeNode[K]]:
    """Yield the nodes, youngest first."""
    node = root.older
    while node is not root:
        yield node
        node = node.older


def shared_prefix(edge: Sequence[K], keys: Sequence[K], start: int) -> int:
    """Return the length of the common prefix of `edge` and `keys[start:]`."""
    limit = min(len(edge), len(keys) - start)
    for i in range(limit):
        if edge[i] != keys[start + i]:
            return i
    return limit


def ranks_of_children(node: TreeNode[K], index: dict[K, int]) -> list[int]:
    """Return the places in `index`, ascending, of the resident children of `node`."""
    children = node.children
    shared = children.keys() & index.keys()
    return sorted([index[key] for key in shared if children[key].resident]) if shared else []


Trail = tuple["Trail", list[int]] | None
"""A path as a linked list of runs of indices, last run first, so that siblings share their beginning."""


def may_stand(i: int, last: int, joined: Places) -> bool:
    """Return True if block `i` may follow block `last` where the `joined` ones stay behind the block before them."""
    return i == last + 1 if last + 1 in joined else i not in joined


def unwind(trail: Trail) -> list[int]:
    """Return the path as one list of indices."""
    runs: list[list[int]] = []
    while trail is not None:
        trail, run = trail
        runs.append(run)
    return [i for run in reversed(runs) for i in run]
