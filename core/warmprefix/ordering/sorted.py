"""One canonical order for every set of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering.base import BlockView, PrefixView

__all__ = ["SortedPolicy"]


class SortedPolicy:
    """Sort by fingerprint. Needs no state, so any number of workers agree, and reorders whether it pays or not."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return sorted(range(len(blocks)), key=lambda i: blocks[i].fingerprint)

    def observe(self, served: Sequence[BlockView]) -> None:
        """Nothing to learn."""
