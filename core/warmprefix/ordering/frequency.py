"""CRAFT's access-frequency order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from warmprefix.ordering.base import BlockView, PrefixView, then_the_rest
from warmprefix.prefix.access import AccessWindow
from warmprefix.prefix.tree import PrefixTree

__all__ = ["FrequencyPolicy"]


class FrequencyPolicy:
    """The promoted prefix first, then by access frequency, ties by relevance (CRAFT).

    A table counts accesses in a sliding window. Of each served order the leading run of blocks that have reached the
    promotion threshold enters a prefix tree of the policy's own; later requests follow that tree as far as their
    blocks go, if only part of an edge ("prefix slicing").
    """

    def __init__(self, window: int = 1_000, promotion_threshold: int = 2, max_nodes: int = 65_536) -> None:
        if promotion_threshold < 1:
            raise ValueError(f"promotion_threshold must be 1 or more, got {promotion_threshold}")
        self.promotion_threshold = promotion_threshold
        self._window = AccessWindow[bytes](window)
        self._promoted = PrefixTree[bytes](max_nodes=max_nodes)

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        by_frequency = sorted(range(len(blocks)), key=lambda i: -self._window.count(blocks[i].fingerprint))
        keys = [blocks[i].fingerprint for i in by_frequency]
        return [by_frequency[i] for i in then_the_rest(self._promoted.greedy_path(keys), len(blocks))]

    def observe(self, served: Sequence[BlockView]) -> None:
        self._window.observe([block.fingerprint for block in served])
        promoted = list(takewhile(self._is_promoted, served))
        self._promoted.insert([block.fingerprint for block in promoted], [block.tokens for block in promoted])

    def _is_promoted(self, block: BlockView) -> bool:
        return self._window.count(block.fingerprint) >= self.promotion_threshold
