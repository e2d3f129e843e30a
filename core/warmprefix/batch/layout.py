"""Reads a plan off a forest of merges: every context's blocks in prefix order, and contexts in depth-first order."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.batch.base import Placed

__all__ = ["laid_out"]


def laid_out(
    left: Sequence[int], right: Sequence[int], members: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]]
) -> list[Placed]:
    """Every context as its way down from its root: what each node adds to the prefix, and last its own blocks.

    Of two trees, and of two children, that with the earliest context comes first. What a node adds stands in the
    order of relevance for the earliest context below it; so do a context's own blocks. Contexts with equal sets stand
    together in one order. O(blocks of all contexts * depth), without recursion.

    Args:
        left: For every merge one of its two nodes, -1 if it is none. Nodes below the number of distinct sets are
            these, the others merges.
        right: The other.
        members: For each distinct set the numbers of the contexts that have it, ascending.
        contexts: All of them, in relevance order.
    """
    n = len(members)
    left, right = [*[-1] * n, *left], [*[-1] * n, *right]
    parent = _parents(left, right)
    bottom_up = _children_first(left, right, parent, n)
    shared: list[frozenset[int]] = [frozenset(contexts[same[0]]) for same in members]
    shared += [frozenset()] * (len(parent) - n)
    earliest = [same[0] for same in members] + [0] * (len(parent) - n)
    for v in bottom_up:
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
            first, second = left[v], right[v]
            if earliest[first] > earliest[second]:
                first, second = second, first
            stack += [(second, blocks), (first, blocks)]
    return placed


def _parents(left: Sequence[int], right: Sequence[int]) -> list[int]:
    parent = [-1] * len(left)
    for v, (first, second) in enumerate(zip(left, right, strict=True)):
        if first >= 0:
            parent[first] = parent[second] = v
    return parent


def _children_first(left: Sequence[int], right: Sequence[int], parent: Sequence[int], n: int) -> list[int]:
    """The merges that are in a tree, each after those below it."""
    order = [v for v in range(n, len(parent)) if parent[v] < 0 and left[v] >= 0]
    for v in order:  # grows as it is read
        order += [child for child in (left[v], right[v]) if child >= n]
    order.reverse()
    return order
