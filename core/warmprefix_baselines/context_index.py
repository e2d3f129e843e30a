"""ContextPilot's context index, updated request by request."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from warmprefix.errors import check_count
from warmprefix.ordering import BlockView, PrefixView
from warmprefix_baselines.policies import then_the_rest

__all__ = ["ContextIndex", "ContextIndexPolicy", "context_distance"]

K = TypeVar("K", bound=Hashable)

_RECENT_CHILDREN = 16
"""Children remembered per block at each node, so that the cost of a search does not grow with the fan-out."""

_COMPARED_CHILDREN = 8
"""Of the children found, the number of those with most shared blocks whose distance is computed."""


def context_distance(a: Sequence[K], b: Sequence[K], alpha: float = 0.001) -> float:
    """Return the distance of two contexts (ContextPilot, Eq. 1).

    1 - |S| / max(|a|, |b|) + alpha * mean |position in a - position in b| over the shared blocks S; 1 if they share
    nothing. Blocks are distinct within a context. O(|a| + |b|).

    >>> round(context_distance([3, 5, 1, 7], [2, 6, 3, 5]), 6)
    0.502
    """
    position_in_b = {key: j for j, key in enumerate(b)}
    gaps = [abs(i - position_in_b[key]) for i, key in enumerate(a) if key in position_in_b]
    if not gaps:
        return 1.0
    return 1.0 - len(gaps) / max(len(a), len(b)) + alpha * sum(gaps) / len(gaps)


class ContextIndexPolicy:
    """The best match's blocks in its order, then relevance (ContextPilot, Alg. 1, 2)."""

    def __init__(self, alpha: float = 0.001, max_nodes: int = 65_536) -> None:
        self._index = ContextIndex[bytes](alpha, max_nodes)

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return self._index.order([block.fingerprint for block in blocks])

    def observe(self, served: Sequence[BlockView]) -> None:
        self._index.insert([block.fingerprint for block in served])


class ContextIndex(Generic[K]):
    """A tree of served contexts; inner nodes are prefixes that contexts share.

    Children are numbered in the order of insertion. Bounded in nodes: the least recently served context is dropped
    first. Not thread-safe.

    >>> index = ContextIndex[str]()
    >>> for served in (["A", "B", "C"], ["A", "B", "F"], ["A", "D", "E"]):
    ...     index.insert(served)
    (0,)
    (0, 1)
    (0, 1)
    >>> index.search(["B", "A", "D"])
    Match(blocks=('A', 'B'), path=(0, 0))
    >>> index.order(["B", "A", "D"])
    [1, 0, 2]
    """

    def __init__(self, alpha: float = 0.001, max_nodes: int = 65_536) -> None:
        """Start empty.

        Args:
            alpha: Weight of the positions in the distance, in [0.001, 0.01].
            max_nodes: Most nodes.

        Raises:
            TypeError: `max_nodes` is not an int.
            ValueError: An argument is out of range.
        """
        if not 0.001 <= alpha <= 0.01:
            raise ValueError(f"alpha must be in [0.001, 0.01], got {alpha}")
        check_count("max_nodes", max_nodes)
        self._alpha = alpha
        self._max_nodes = max_nodes
        self._root: _IndexNode[K] = _IndexNode((), None, 0)
        self._served: OrderedDict[_IndexNode[K], None] = OrderedDict()
        self._nodes = 0

    def search(self, context: Sequence[K]) -> Match[K]:
        """Go down to the nearest child while one shares a block that its parent lacks.

        O(depth * len(context)): of a node's children only the latest for each block are considered.
        """
        node = self._root
        path: list[int] = []
        while True:
            nearest = self._nearest_child(node, context)
            if nearest is None:
                return Match(node.blocks, tuple(path))
            node = nearest
            path.append(node.number)

    def order(self, context: Sequence[K]) -> list[int]:
        """Return indices: blocks shared with the best match in its order, then the rest."""
        rank = {key: i for i, key in enumerate(context)}
        shared = [rank[key] for key in self.search(context).blocks if key in rank]
        return then_the_rest(shared, len(context))

    def insert(self, served: Sequence[K]) -> tuple[int, ...]:
        """Add a context of distinct blocks in served order. O(len(served)).

        A node that shares only its first blocks is split behind them.

        Returns:
            The child numbers that lead to it from the root.
        """
        blocks = tuple(served)
        node = self._root
        path: list[int] = []
        while len(node.blocks) < len(blocks):
            child = node.child_at(blocks[len(node.blocks)])
            if child is None:
                child = node.add_child(blocks)
                self._nodes += 1
            elif (common := _common_prefix(child.blocks, blocks, len(node.blocks))) < len(child.blocks):
                child = node.split_child(child, common)
                self._nodes += 1
            node = child
            path.append(node.number)
        if node is not self._root:
            self._served[node] = None
            self._served.move_to_end(node)
        while self._nodes > self._max_nodes:
            self._drop(self._served.popitem(last=False)[0])
        return tuple(path)

    def _nearest_child(self, node: _IndexNode[K], context: Sequence[K]) -> _IndexNode[K] | None:
        shared: Counter[int] = Counter()
        for key in context:
            shared.update(node.recent.get(key, ()))
        candidates = [node.children[number] for number, _ in shared.most_common(_COMPARED_CHILDREN)]
        if len(candidates) == 1:
            return candidates[0]
        return min(
            candidates,
            key=lambda child: (context_distance(context, child.blocks, self._alpha), child.number),
            default=None,
        )

    def _drop(self, node: _IndexNode[K]) -> None:
        while node.parent is not None and not node.children and node not in self._served:
            node.parent.remove_child(node)
            self._nodes -= 1
            node = node.parent


@dataclass(frozen=True, slots=True)
class Match(Generic[K]):
    """The end of a search: its node's blocks, and the child numbers from the root."""

    blocks: tuple[K, ...]
    path: tuple[int, ...]


class _IndexNode(Generic[K]):
    """The blocks from the root to here, and the children by number and added block."""

    __slots__ = ("_next", "_number_at", "blocks", "children", "number", "parent", "recent")

    def __init__(self, blocks: tuple[K, ...], parent: _IndexNode[K] | None, number: int) -> None:
        self.blocks = blocks
        self.parent = parent
        self.number = number
        self.children: dict[int, _IndexNode[K]] = {}
        self.recent: dict[K, list[int]] = {}
        """Numbers of the latest children that add each block, oldest first, at most `_RECENT_CHILDREN`."""
        self._number_at: dict[K, int] = {}
        self._next = 0

    def child_at(self, key: K) -> _IndexNode[K] | None:
        """Return the child whose first added block is `key`."""
        number = self._number_at.get(key)
        return None if number is None else self.children[number]

    def add_child(self, blocks: tuple[K, ...]) -> _IndexNode[K]:
        child = _IndexNode(blocks, self, self._next)
        self._next += 1
        self._attach(child)
        return child

    def split_child(self, child: _IndexNode[K], at: int) -> _IndexNode[K]:
        """Move the first `at` blocks of `child` into a new node, which takes its number."""
        self.remove_child(child)
        upper = _IndexNode(child.blocks[:at], self, child.number)
        self._attach(upper)
        child.parent, child.number = upper, 0
        upper._next = 1
        upper._attach(child)
        return upper

    def remove_child(self, child: _IndexNode[K]) -> None:
        added = child.blocks[len(self.blocks) :]
        del self.children[child.number]
        del self._number_at[added[0]]
        for key in added:
            numbers = self.recent.get(key, [])
            if child.number in numbers:
                numbers.remove(child.number)
                if not numbers:
                    del self.recent[key]

    def _attach(self, child: _IndexNode[K]) -> None:
        added = child.blocks[len(self.blocks) :]
        self.children[child.number] = child
        self._number_at[added[0]] = child.number
        for key in added:
            numbers = self.recent.setdefault(key, [])
            numbers.append(child.number)
            if len(numbers) > _RECENT_CHILDREN:
                del numbers[0]


def _common_prefix(a: Sequence[K], b: Sequence[K], equal: int) -> int:
    """Return the length of the common prefix, which is at least `equal`."""
    limit = min(len(a), len(b))
    return next((i for i in range(equal, limit) if a[i] != b[i]), limit)
