"""Leave the retriever's order alone."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering.base import BlockView, PrefixView

__all__ = ["RelevancePolicy"]


class RelevancePolicy:
    """Ordering switched off: planned order is relevance order, always."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return range(len(blocks))

    def observe(self, served: Sequence[BlockView]) -> None:
        """Nothing to learn."""
