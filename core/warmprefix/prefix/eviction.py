"""The order in which an engine evicts the paths of its prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import merge
from typing import Generic, TypeVar

__all__ = ["MOST_HITS", "EvictionOrder", "TreeNode", "path_to"]

K = TypeVar("K", bound=Hashable)

MOST_HITS = 3
"""More hits of a node do not count."""


class TreeNode(Generic[K]):
    """The run of blocks on one edge, and a place in the recency ring of the nodes of equal `age`."""

    __slots__ = (
        "age",
        "children",
        "hits",
        "is_junction",
        "keys",
        "older",
        "parent",
        "reach",
        "resident",
        "served_by",
        "tokens",
        "used",
        "younger",
    )

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
        """The last request that used the node, or gave it its age."""
        self.age = 0
        """Requests for which the engine then keeps it longer than its LRU would."""
        self.hits = 0
        """Requests that found it resident, without those that a touch has answered; at most `MOST_HITS`."""
        self.served_by: str | None = None
        """Name of the latest request that used it, if it has one."""
        # The end of a ring closes it: end.younger is the oldest node, end.older the youngest.
        self.older: TreeNode[K] = self
        self.younger: TreeNode[K] = self


class EvictionOrder(Generic[K]):
    """The nodes of one tree, the next one to evict first.

    It is the order of last use, or for paths that the engine keeps longer, of that and their age. Each age has a ring
    in the order of last use, so the next node to evict is the oldest one of a ring. No node goes before one below it:
    each request and each touch has used the path to a node as late as the node, and given it as much age.
    """

    def __init__(self, root: TreeNode[K]) -> None:
        """Start empty; `root` closes the ring of nodes without an age."""
        self.now = 0
        """Number of the latest request."""
        self._root = root
        self._ends = {0: root}
        """The nodes that close the rings, by age, ascending."""

    def __iter__(self) -> Iterator[TreeNode[K]]:
        """Yield the nodes, the next one to evict first."""
        return merge(*map(_ring, self._ends.values()), key=_due)

    @property
    def has_ages(self) -> bool:
        """True if touches have given ages, so that it is not the order of last use."""
        return len(self._ends) > 1

    def next_leaf(self) -> TreeNode[K]:
        """Return the leaf that the engine evicts next; one that the latest request used only if there is no other.

        Of a tree that is not empty. O(different ages).
        """
        heads = [end.younger for end in self._ends.values() if end.younger is not end]
        leaf = min(heads, key=_due)
        if leaf.used == self.now and len(heads) > 1:
            # The engine keeps what it has just used, and paths to that.
            others = (next((node for node in _ring(end) if not node.children), None) for end in self._ends.values())
            leaf = min([node for node in others if node is not None and node.used < self.now], key=_due, default=leaf)
        return leaf

    def use(self, node: TreeNode[K], age: int = 0) -> None:
        """Make the path to `node` the most recent, each node younger than those below it.

        The engine keeps it `age` requests longer than its LRU would. Nodes that it keeps longer anyway stay where they
        are.
        """
        now, end = self.now, self._end(age)
        while node.parent is not None:
            if not node.age or (node.used + node.age, node.age) <= (now + age, age):
                unlink(node)
                node.used, node.age = now, age
                link_before(end, node)
            node = node.parent

    def add_copy(self, node: TreeNode[K], twin: TreeNode[K]) -> None:
        """Put the copy of another tree's node in front of all others, if nodes come from the last one on."""
        twin.used, twin.age, twin.hits, twin.served_by = node.used, node.age, node.hits, node.served_by
        link_before(self._end(twin.age).younger, twin)

    def add_upper(self, node: TreeNode[K], upper: TreeNode[K]) -> None:
        """Put the beginning of a node that was split behind the rest of it."""
        upper.used, upper.age, upper.hits, upper.served_by = node.used, node.age, node.hits, node.served_by
        link_before(node.younger, upper)

    def _end(self, age: int) -> TreeNode[K]:
        """Return the end of a ring, made now if new."""
        end = self._ends.get(age)
        if end is None:
            end = TreeNode([], [], None, resident=True)
            self._ends = dict(sorted([*self._ends.items(), (age, end)]))
        return end


def _due(node: TreeNode[K]) -> int:
    return node.used + node.age


def path_to(node: TreeNode[K]) -> tuple[tuple[K, ...], tuple[int, ...]]:
    """Return the blocks from the root to the end of a node's edge, and their lengths."""
    parts = [node]
    while (above := parts[-1].parent) is not None:
        parts.append(above)
    parts.reverse()
    return tuple([key for part in parts for key in part.keys]), tuple(
        [length for part in parts for length in part.tokens]
    )


def unlink(node: TreeNode[K]) -> None:
    """Take a node out of the ring."""
    node.older.younger, node.younger.older = node.younger, node.older


def link_before(younger: TreeNode[K], node: TreeNode[K]) -> None:
    """Put a node into the ring, next to the given one, as the older of the two."""
    node.older, node.younger = younger.older, younger
    younger.older.younger = younger.older = node


def _ring(end: TreeNode[K]) -> Iterator[TreeNode[K]]:
    """Yield the nodes of a ring, oldest first."""
    node = end.younger
    while node is not end:
        yield node
        node = node.younger
