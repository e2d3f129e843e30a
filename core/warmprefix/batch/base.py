"""The seam of batch planning: what a batch planner is given, and what it owes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["BatchPlanner", "Placed", "Progress", "no_progress"]

Progress = Callable[[str, int, int], object]
"""Is told how far a long computation is: the name of its stage, and of how many steps so many are done."""


class Placed(NamedTuple):
    """A context in its place in the execution order."""

    context: int
    """Its index among the contexts that were to be planned."""
    order: tuple[int, ...]
    """Its block numbers in planned order."""


@runtime_checkable
class BatchPlanner(Protocol):
    """Decides on the order of blocks inside every context of a batch, and on the order of the contexts."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> Sequence[Placed]:
        """Every context once, in execution order, each with all of its blocks.

        Args:
            contexts: Distinct block numbers each, in relevance order. One may be empty, and several may be equal.
            tokens: The length of every block, by number; 0 of one that the cache can't hold.
            progress: To be told now and then; `no_progress` if nobody asks.
        """
        ...


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""
