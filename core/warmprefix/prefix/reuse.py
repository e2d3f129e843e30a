"""Reuse distances: tokens that were used since a path was last used.

A cache that evicts the least recently used path holds a block exactly if its reuse distance is within the capacity.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from warmprefix.errors import check_count
from warmprefix.prefix.nodes import TreeNode
from warmprefix.prefix.tree import PrefixMatch, PrefixTree

__all__ = ["ReuseClock", "ReuseTree", "StampedTree"]

K = TypeVar("K", bound=Hashable)


class ReuseClock:
    """A count of requests, and of the tokens that each of the last `window` requests was the last to use.

    The counts are a Fenwick tree over a ring of requests, so every method takes O(log window).
    """

    def __init__(self, window: int) -> None:
        check_count("window", window)
        self.window = window
        self.now = 0
        """Number of the latest request; the first one is 1."""
        self._sums = [0] * (window + 1)
        self._total = 0
        self._top = 1 << (window.bit_length() - 1)

    def add(self, request: int, tokens: int) -> None:
        """Count `tokens` more, or fewer, as last used by a request of the window."""
        self._total += tokens
        place = request % self.window + 1
        while place <= self.window:
            self._sums[place] += tokens
            place += place & -place

    def used_after(self, request: int) -> int:
        """Return the tokens that were last used after a request of the window."""
        before, latest = self._used_to(request), self._used_to(self.now)
        return latest - before if request % self.window <= self.now % self.window else self._total - before + latest

    def first_within(self, tokens: int) -> int:
        """Return the oldest request since which at most `tokens` tokens are in use."""
        latest = self._used_to(self.now)
        # The ring starts after the latest request. Requests to skip hold `excess` tokens or more.
        excess = self._total - tokens
        if excess <= 0:
            return self.now - self.window + 1
        behind = self._total - latest  # in the places after the latest request's, which are older
        target, turns = (excess + latest, 0) if excess <= behind else (excess - behind, 1)
        place, step = 0, self._top
        while step:
            if place + step <= self.window and self._sums[place + step] < target:
                place += step
                target -= self._sums[place]
            step >>= 1
        # `place` is the first place, from 0, at which the skipped requests hold enough tokens.
        start = self.now - self.now % self.window
        return start + place + 1 - (0 if turns else self.window)

    def _used_to(self, request: int) -> int:
        place, tokens = request % self.window + 1, 0
        while place:
            tokens += self._sums[place]
            place &= place - 1
        return tokens


class StampedTree(PrefixTree[K]):
    """A prefix tree whose nodes record the last request that used them, by a clock shared with other trees."""

    def __init__(self, clock: ReuseClock, capacity_tokens: int | None = None, max_nodes: int = 65_536) -> None:
        self.clock = clock
        super().__init__(capacity_tokens, max_nodes)

    def evict_unused(self, since: int) -> None:
        """Remove the blocks that no request from `since` on has used. O(1), amortised over the removed blocks."""
        while self._nodes and self._root.younger.used < since:
            self._pop_last_block(self._root.younger)

    def _touch(self, node: TreeNode[K]) -> None:
        super()._touch(node)
        while node.parent is not None:
            node.used = self.clock.now
            node = node.parent

    def _split(self, node: TreeNode[K], at: int) -> TreeNode[K]:
        upper = super()._split(node, at)
        upper.used = node.used
        return upper


class ReuseTree(StampedTree[Hashable]):
    """The paths of the last requests, held or not, with their reuse distances; it drives its clock."""

    def __init__(self, max_nodes: int = 8_192, window: int = 8_192) -> None:
        """Start empty.

        Args:
            max_nodes: Most nodes; the least recently used go.
            window: Number of requests that are remembered.
        """
        super().__init__(ReuseClock(window), None, max_nodes)

    def insert(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> PrefixMatch:
        """Count a request, and use this path."""
        oldest = self.clock.now + 2 - self.clock.window
        self.evict_unused(oldest)
        self.clock.now += 1
        return super().insert(keys, tokens)

    @property
    def branches(self) -> int:
        """Number of different first keys."""
        return len(self._root.children)

    def distances(self, keys: Sequence[Hashable]) -> list[int]:
        """Return the reuse distance in tokens of each block of the longest prefix that the tree has, itself included.

        The distances never fall along the path. O(blocks + nodes * log window).
        """
        found: list[int] = []
        used = -1
        distance = 0
        for node, shared in self._walk(keys):
            if node.used != used:
                used = node.used
                distance = self.clock.used_after(used)
            for tokens in node.tokens[:shared]:
                distance += tokens
                found.append(distance)
        return found

    def _touch(self, node: TreeNode[Hashable]) -> None:
        touched = node
        total = 0
        while touched.parent is not None:
            tokens = sum(touched.tokens)
            if touched.used:
                self.clock.add(touched.used, -tokens)
            total += tokens
            touched = touched.parent
        self.clock.add(self.clock.now, total)
        super()._touch(node)

    def _pop_last_block(self, leaf: TreeNode[Hashable]) -> None:
        self.clock.add(leaf.used, -sum(leaf.tokens))
        while leaf.keys:  # all at once: there is no capacity to fill up to the last block
            super()._pop_last_block(leaf)
