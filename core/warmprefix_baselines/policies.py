"""The published policies that take few lines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from itertools import takewhile
from typing import TypeVar

from warmprefix.errors import check_count
from warmprefix.ordering import AccessWindow, BlockView, PrefixView, StatelessPolicy, places_of_runs
from warmprefix.prefix import SEARCH_BUDGET, PrefixTree, may_stand, ranks_of_children

__all__ = ["FrequencyPolicy", "GreedyPolicy", "OraclePolicy", "RecencyPolicy", "greedy_path", "greedy_path_of"]

K = TypeVar("K", bound=Hashable)


def then_the_rest(head: Sequence[int], total: int) -> list[int]:
    """Return `head`, then all other indices below `total` in relevance order."""
    placed = set(head)
    return [*head, *(i for i in range(total) if i not in placed)]


def greedy_path_of(prefix: PrefixView, blocks: Sequence[BlockView]) -> list[int]:
    """Return the path of a view's first resident children, as indices of blocks; see `greedy_path`."""
    single, joined = prefix.single_blocks(blocks) if prefix.runs else (blocks, ())
    path = greedy_path(prefix.tree, [block.fingerprint for block in single], prefix.after, joined)
    return places_of_runs(path, joined) if joined else path


def greedy_path(
    tree: PrefixTree[K], keys: Sequence[K], after: Sequence[K] = (), joined: Collection[int] = ()
) -> list[int]:
    """Return the path of the first resident children (CacheWeaver, Alg. 1).

    Arguments and result are those of `PrefixTree.deepest_path`. O(len(keys)) per placed block.
    """
    if (start := tree.locate(after)) is None:
        return []
    index = {key: i for i, key in enumerate(keys)}
    node, offset = start
    path: list[int] = []
    while True:
        for key in node.keys[offset:]:
            if key not in index or not may_stand(index[key], path[-1] if path else -1, joined):
                return path
            path.append(index[key])
        ranks = [i for i in ranks_of_children(node, index) if may_stand(i, path[-1] if path else -1, joined)]
        if not ranks:
            return path
        node, offset = node.children[keys[ranks[0]]], 0


class GreedyPolicy(StatelessPolicy):
    """The most relevant resident children, then the rest (CacheWeaver, Alg. 1).

    The walk never goes back, so it can miss a deeper path: see `OraclePolicy`.
    """

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return then_the_rest(greedy_path_of(prefix, blocks), len(blocks))


class OraclePolicy(StatelessPolicy):
    """The permutation with most resident tokens (CacheWeaver's exhaustive reference).

    It searches the tree, not the permutations, with the same result: only a path in the tree can be resident. Blocks
    beyond the path stay in relevance order, regardless of what the next request could share. Use it as a reference in
    measurements: its time grows with the tree.
    """

    def __init__(self, max_blocks: int = 20) -> None:
        """Search exhaustively up to `max_blocks` blocks, else with the default budget."""
        self.max_blocks = max_blocks
        """Most blocks for which the search has no limit."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        budget = None if len(blocks) <= self.max_blocks else SEARCH_BUDGET
        return then_the_rest(prefix.deepest_path(blocks, budget), len(blocks))


class RecencyPolicy:
    """Most recently served blocks first, then relevance (CacheWeaver's baseline).

    Blocks that one request served keep the order in which it served them.
    """

    def __init__(self, max_blocks: int = 65_536) -> None:
        """Remember at most `max_blocks` blocks, the most recently served."""
        check_count("max_blocks", max_blocks)
        self._served: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._max_blocks = max_blocks
        self._requests = 0

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        never = (1, 0)
        return sorted(range(len(blocks)), key=lambda i: self._served.get(blocks[i].fingerprint, never))

    def observe(self, served: Sequence[BlockView]) -> None:
        self._requests += 1
        for position, block in enumerate(served):
            self._served[block.fingerprint] = (-self._requests, position)
            self._served.move_to_end(block.fingerprint)
        while len(self._served) > self._max_blocks:
            self._served.popitem(last=False)


class FrequencyPolicy:
    """The promoted prefix first, then by access frequency, ties by relevance (CRAFT).

    A table counts accesses in a sliding window of requests. Of each served order, the leading run of blocks that have
    reached the promotion threshold enters a prefix tree of the policy's own. Later requests follow that tree as far as
    their blocks go, also through part of an edge ("prefix slicing").
    """

    def __init__(self, window: int = 1_000, promotion_threshold: int = 2, max_nodes: int = 65_536) -> None:
        check_count("window", window)
        check_count("promotion_threshold", promotion_threshold)
        self.promotion_threshold = promotion_threshold
        """Accesses in the window from which a block is promoted."""
        self._window = AccessWindow[bytes](window)
        self._promoted = PrefixTree[bytes](max_nodes=max_nodes)

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        by_frequency = sorted(range(len(blocks)), key=lambda i: -self._window.count(blocks[i].fingerprint))
        keys = [blocks[i].fingerprint for i in by_frequency]
        return [by_frequency[i] for i in then_the_rest(greedy_path(self._promoted, keys), len(blocks))]

    def observe(self, served: Sequence[BlockView]) -> None:
        self._window.observe([block.fingerprint for block in served])
        promoted = list(takewhile(self._is_promoted, served))
        self._promoted.insert([block.fingerprint for block in promoted], [block.tokens for block in promoted])

    def _is_promoted(self, block: BlockView) -> bool:
        return self._window.count(block.fingerprint) >= self.promotion_threshold
