"""ContextPilot's context index of a whole batch (Alg. 4) and schedule (Alg. 5)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, get_args

from warmprefix.batch import Device, Placed, Progress
from warmprefix.errors import MissingExtraError
from warmprefix_kernels.distances import condensed_distances, ragged

try:
    import numpy as np
    from scipy.cluster import hierarchy  # type: ignore[import-untyped]
except ImportError as exc:
    raise MissingExtraError("batch", "scipy") from exc

__all__ = [
    "MAX_DISTINCT",
    "ContextIndexPlanner",
    "IndexedContext",
    "Linkage",
    "context_index_planner",
    "index_contexts",
    "schedule",
]

Linkage = Literal["average", "complete", "single"]

MAX_DISTINCT = 15_000
"""Most distinct contexts: clustering takes 17 bytes per pair of contexts, 1.9 GB in all."""

_DECIMALS = 6
"""Distances are rounded to this, so that those that differ in the last bit of a float32 are ties."""


class ContextIndexPlanner:
    """Hierarchical clustering by distance (ContextPilot).

    Every context begins with the blocks that its clusters share. Equal contexts count as one and run next to each
    other. O(n²) time and memory for n distinct contexts. Merges at the same distance happen in scipy's order, which is
    the same every time.
    """

    def __init__(self, alpha: float = 0.001, linkage: Linkage = "average", device: Device = "auto") -> None:
        """Check the arguments.

        Args:
            alpha: Weight of the positions in the distance, in [0.001, 0.01].
            linkage: The pair of contexts that makes the distance of two clusters: the mean of all pairs ("average"),
                the most distant pair ("complete"), or the nearest pair ("single").
            device: Where distances are computed: "cpu", "cuda", or "auto", a CUDA device if there is one and it pays.

        Raises:
            ValueError: An argument has a value that is not allowed.
        """
        if not 0.001 <= alpha <= 0.01:
            raise ValueError(f"alpha must be in [0.001, 0.01], got {alpha}")
        for name, value, allowed in (("linkage", linkage, get_args(Linkage)), ("device", device, get_args(Device))):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        self.alpha = alpha
        self.linkage: Linkage = linkage
        self.device: Device = device

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        """Plan the contexts; see `BatchPlanner`.

        Raises:
            ValueError: There are more than `MAX_DISTINCT` distinct contexts, or the device is "cuda" without one.
            MissingExtraError: The device is "cuda", and torch is missing.
        """
        copies: dict[tuple[int, ...], list[int]] = {}
        for i, context in enumerate(contexts):
            copies.setdefault(tuple(context), []).append(i)
        distinct = list(copies)
        indexed = index_contexts(distinct, self._merges(distinct, progress))
        execution = schedule([context.path for context in indexed])
        return [Placed(i, indexed[at].order) for at in execution for i in copies[distinct[at]]]

    def _merges(self, contexts: Sequence[tuple[int, ...]], progress: Progress) -> list[tuple[int, int]]:
        """Return the two clusters of each merge, numbered as for `index_contexts`."""
        if len(contexts) > MAX_DISTINCT:
            raise ValueError(
                f"the planner 'context-index' takes at most {MAX_DISTINCT} distinct contexts, got {len(contexts)}; "
                "the planner 'merge' takes any number"
            )
        if len(contexts) < 2:
            return []
        distances = condensed_distances(ragged(contexts), self.alpha, self.device, progress).astype(np.float64)
        np.round(distances, _DECIMALS, out=distances)
        progress("linkage", 0, len(contexts) - 1)
        merges = hierarchy.linkage(distances, self.linkage)
        progress("linkage", len(contexts) - 1, len(contexts) - 1)
        return [(int(a), int(b)) for a, b in merges[:, :2].tolist()]


class IndexedContext(NamedTuple):
    """A context's place in the index."""

    order: tuple[int, ...]
    """Its blocks: those of the nodes that lead to it, then the rest in relevance order."""
    path: tuple[int, ...]
    """Its search path: the child numbers that lead to it from the root."""
    prefix: tuple[int, ...]
    """The blocks of the innermost node on that path that several contexts share."""


def index_contexts(contexts: Sequence[Sequence[int]], merges: Iterable[tuple[int, int]]) -> list[IndexedContext]:
    """Return each context's place in the tree of intersections (ContextPilot, Alg. 4).

    A merge makes a node of the blocks that both its clusters hold. Nodes with the same blocks are one, and so are
    contexts. A node without blocks is left out; its children hang from the largest node whose blocks they all hold,
    where a search for them would end, or else from the root. So a node holds more blocks than its parent, and the
    tree is no deeper than the longest context.

    A node's prefix is its parent's, followed by its own blocks in ascending order ("sorted intersection"). Children
    are numbered by their first context.

    Args:
        contexts: Distinct blocks each, in relevance order.
        merges: The two clusters of each merge. The contexts are clusters 0 to n - 1, and the first merge makes n.

    >>> for context in index_contexts([[2, 1, 3], [2, 6, 1], [4, 1, 0]], [(0, 1), (2, 3)]):
    ...     print(*context)
    (1, 2, 3) (0, 0, 0) (1, 2)
    (1, 2, 6) (0, 0, 1) (1, 2)
    (1, 4, 0) (0, 1) (1,)
    """
    root, nodes = _tree(contexts, merges)
    for i, context in enumerate(contexts):
        node = nodes.get(frozenset(context), root)
        node.contexts += 1
        node.first = min(node.first, i)
    parents_first = sorted(nodes.values(), key=lambda node: len(node.blocks))
    for node in reversed(parents_first):
        node.parent.contexts += node.contexts
        node.parent.first = min(node.parent.first, node.first)
    children: dict[_ClusterNode, int] = {}
    for node in sorted(nodes.values(), key=lambda node: node.first):
        node.number = children.get(node.parent, 0)
        children[node.parent] = node.number + 1
    for node in parents_first:
        added = node.blocks - node.parent.blocks if node.contexts > 1 else ()
        node.prefix = (*node.parent.prefix, *sorted(added))
        node.path = (*node.parent.path, node.number)

    indexed: list[IndexedContext] = []
    for context in contexts:
        node = nodes.get(frozenset(context), root)
        placed = set(node.prefix)
        order = (*node.prefix, *(block for block in context if block not in placed))
        indexed.append(IndexedContext(order, node.path, node.prefix))
    return indexed


class _ClusterNode:
    """Blocks that some contexts share, or one has, and their place in the tree."""

    __slots__ = ("blocks", "contexts", "first", "number", "parent", "path", "prefix")

    def __init__(self, blocks: frozenset[int], parent: _ClusterNode | None) -> None:
        self.blocks = blocks
        self.parent: _ClusterNode = parent or self  # the root is its own parent
        self.contexts = 0
        """Number of contexts here or below."""
        self.first = sys.maxsize
        """The first of these contexts."""
        self.number = 0
        self.path: tuple[int, ...] = ()
        self.prefix: tuple[int, ...] = ()


def _tree(
    contexts: Sequence[Sequence[int]], merges: Iterable[tuple[int, int]]
) -> tuple[_ClusterNode, dict[frozenset[int], _ClusterNode]]:
    """Return the root, and the other nodes by their blocks, with their parents."""
    clusters = [frozenset(context) for context in contexts]
    above: dict[int, int] = {}
    for a, b in merges:
        above[a] = above[b] = len(clusters)
        clusters.append(clusters[a] & clusters[b])
    root = _ClusterNode(frozenset(), None)
    nodes: dict[frozenset[int], _ClusterNode] = {}
    for cluster in reversed(range(len(clusters))):  # the last merge first, so that a node comes after its parent
        blocks = clusters[cluster]
        parent = nodes.get(clusters[above[cluster]], root) if cluster in above else root
        node = nodes.get(blocks)
        if blocks and node is None:
            nodes[blocks] = _ClusterNode(blocks, parent)
        elif node is not None and len(node.parent.blocks) < len(parent.blocks) < len(blocks):
            node.parent = parent  # of two equal nodes, keep the deeper place
    # Hang the root's children from the largest node whose blocks they all hold.
    holders = Counter(chain.from_iterable(nodes))
    by_rarest: dict[int, list[_ClusterNode]] = {}
    for node in nodes.values():
        by_rarest.setdefault(min(node.blocks, key=lambda block: (holders[block], block)), []).append(node)
    for node in nodes.values():
        if node.parent is root:
            for candidate in chain.from_iterable(by_rarest.get(block, ()) for block in sorted(node.blocks)):
                if len(node.parent.blocks) < len(candidate.blocks) and candidate.blocks < node.blocks:
                    node.parent = candidate
    return root, nodes


def schedule(paths: Sequence[Sequence[int]]) -> list[int]:
    """Return the execution order of contexts by search path (ContextPilot, Alg. 5).

    A path holds the child numbers that lead to a context from the root. Paths that begin with the same number form a
    group; groups share no prefix and run one after another, by that number. Within a group the longest path runs
    first. The paper specifies no more. So that contexts that share most stay together, a group is grouped again by the
    next number, and so on: of the groups at one node, the one with the longest path runs first, ties by number, and
    contexts that end at the node run last. Equal paths keep their order; contexts at the root share nothing and run
    after all others.

    O(child numbers in all paths + n log n comparisons).

    >>> schedule([[0, 0, 2], [0, 1], [1], [0, 0, 3]])
    [0, 3, 1, 2]
    """
    child: dict[tuple[int, int], int] = {}
    longest = [0]  # of the paths through each node; the root is 0
    walks: list[list[int]] = []
    for path in paths:
        node = 0
        walk: list[int] = []
        for number in path:
            node = child.setdefault((node, number), len(longest))
            if node == len(longest):
                longest.append(0)
            longest[node] = max(longest[node], len(path))
            walk.append(node)
        walks.append(walk)

    def turns(i: int) -> list[tuple[int, int]]:
        steps = [(-longest[node], number) for node, number in zip(walks[i], paths[i], strict=True)]
        if steps:
            steps[0] = (-1, paths[i][0])
        return [*steps, (0, 0)]  # sorts after every step that goes deeper

    return sorted(range(len(paths)), key=turns)


def context_index_planner(device: Device) -> ContextIndexPlanner:
    """Return a planner for a device: the entry point `context-index`."""
    return ContextIndexPlanner(device=device)
