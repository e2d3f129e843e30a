"""CacheWeaver's exhaustive reference."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering.base import BlockView, PrefixView, then_the_rest
from warmprefix.prefix.tree import SEARCH_BUDGET

__all__ = ["OraclePolicy"]


class OraclePolicy:
    """The order with the most resident tokens of all permutations, for this request alone.

    It searches the tree, not the permutations, which finds the same: only a path in the tree can be resident. Blocks
    beyond the path stay in relevance order, so what the *next* request could share is left to chance. A reference to
    measure against: its time grows with the tree.
    """

    def __init__(self, max_blocks: int = 20) -> None:
        """Exhaustive up to `max_blocks` blocks a request; beyond that the search has the default budget."""
        self.max_blocks = max_blocks

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        budget = None if len(blocks) <= self.max_blocks else SEARCH_BUDGET
        return then_the_rest(prefix.deepest_path(blocks, budget), len(blocks))

    def observe(self, served: Sequence[BlockView]) -> None:
        """Nothing to learn: the prefix tree is the policy's only state."""
