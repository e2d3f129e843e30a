"""The contract of batch planners, the simplest planner, and execution orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "BatchPlanner",
    "Device",
    "Placed",
    "Progress",
    "RelevancePlanner",
    "depth_first",
    "laid_out",
    "no_progress",
]

Device = Literal["auto", "cpu", "cuda"]
"""Where distances and overlaps are computed; `auto` takes a CUDA device if it pays."""

Progress = Callable[[str, int, int], object]
"""Receives the progress of a long computation: the name of its stage, the steps done, and the steps in total."""


class Placed(NamedTuple):
    """A context in its place in the execution order."""

    context: int
    """Its index among the contexts to plan."""
    order: tuple[int, ...]
    """Its block numbers in planned order."""


@runtime_checkable
class BatchPlanner(Protocol):
    """A planner of the order of blocks in each context, and of the contexts."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> Sequence[Placed]:
        """Return every context once, in execution order, each with all of its blocks.

        Args:
            contexts: Distinct block numbers each, in relevance order. Contexts may be empty or equal.
            tokens: The length of every block, by number; 0 for a block that does not fit in the cache.
            progress: Call it now and then; `no_progress` if progress is not followed.
        """
        ...


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


class RelevancePlanner:
    """The best execution order of contexts in relevance order, which stay unchanged."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        planned = [Placed(i, tuple(contexts[i])) for i in depth_first(contexts)]
        progress("execution order", len(contexts), len(contexts))
        return planned


def depth_first(orders: Sequence[Sequence[int]]) -> list[int]:
    """Return the execution order that walks the prefix tree of `orders` depth-first.

    Equal prefixes stand together. At each node the orders that end there come first, then the children by first
    appearance. No other execution order of the same block orders reuses more, whatever the cache holds, because only
    the path to the current context must stay cached. O(blocks of shared prefixes + contexts).

    >>> depth_first([(1, 2), (3,), (1, 4), (3,), (1, 2, 5)])
    [0, 4, 2, 1, 3]
    """
    executed: list[int] = []
    waiting: list[tuple[int, Sequence[int]]] = [(0, range(len(orders)))]
    while waiting:
        depth, members = waiting.pop()
        if len(members) == 1:
            executed.append(members[0])
            continue
        children: dict[int, list[int]] = {}
        for i in members:
            order = orders[i]
            if depth < len(order):
                children.setdefault(order[depth], []).append(i)
            else:
                executed.append(i)
        waiting.extend((depth + 1, child) for child in reversed(children.values()))
    return executed


def laid_out(
    left: Sequence[int], right: Sequence[int], members: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]]
) -> list[Placed]:
    """Return the plan that a forest of merges describes.

    A context's order is the way down from its root: what each node adds to the prefix, then its own blocks. Of two
    trees, and of two children, the one with the earliest context comes first. The blocks that a node adds stand in the
    relevance order of the earliest context below it, and so do a context's own blocks. Contexts with equal sets stand
    together in one order. O(blocks of all contexts * depth), without recursion.

    Args:
        left: One of the two nodes of each merge, -1 for an unused merge. Nodes below the number of distinct sets are
            these sets, the others are merges.
        right: The other node of each merge.
        members: For each distinct set, the numbers of the contexts that have it, ascending.
        contexts: All contexts, in relevance order.
    """
    n = len(members)
    left, right = [*[-1] * n, *left], [*[-1] * n, *right]
    parent = [-1] * len(left)
    for v, (first, second) in enumerate(zip(left, right, strict=True)):
        if first >= 0:
            parent[first] = parent[second] = v
    shared: list[frozenset[int]] = [frozenset(contexts[same[0]]) for same in members]
    shared += [frozenset()] * (len(parent) - n)
    earliest = [same[0] for same in members] + [0] * (len(parent) - n)
    for v in _children_first(left, right, parent, n):
        shared[v] = shared[left[v]] & shared[right[v]]
        earliest[v] = min(earliest[left[v]], earliest[right[v]])
    roots = [v for v in range(len(parent)) if parent[v] < 0 and (v < n or left[v] >= 0)]
    placed: list[Placed] = []
    stack: list[tuple[int, tuple[int, ...]]] = [(v, ()) for v in sorted(roots, key=earliest.__getitem__, reverse=True)]
    while stack:
        v, prefix = stack.pop()
        before = set(prefix)
        blocks = (*prefix, *[b for b in contexts[earliest[v]] if b in shared[v] and b not in before])
        if v < n:
            placed += [Placed(number, blocks) for number in members[v]]
        else:
            first, second = sorted((left[v], right[v]), key=earliest.__getitem__)
            stack += [(second, blocks), (first, blocks)]
    return placed


def _children_first(left: Sequence[int], right: Sequence[int], parent: Sequence[int], n: int) -> list[int]:
    """Return the merges that are in a tree, each after those below it."""
    order = [v for v in range(n, len(parent)) if parent[v] < 0 and left[v] >= 0]
    for v in order:  # the list grows while it is read
        order += [child for child in (left[v], right[v]) if child >= n]
    order.reverse()
    return order
