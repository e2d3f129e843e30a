"""CacheWeaver's greedy walk."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering.base import BlockView, PrefixView, then_the_rest

__all__ = ["GreedyPolicy"]


class GreedyPolicy:
    """Walk the resident children, the most relevant first; then the rest in relevance order (CacheWeaver, Alg. 1).

    The walk never looks back, so it can miss a deeper path: see `OraclePolicy`.
    """

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return then_the_rest(prefix.greedy_path(blocks), len(blocks))

    def observe(self, served: Sequence[BlockView]) -> None:
        """Nothing to learn: the prefix tree is the policy's only state."""
