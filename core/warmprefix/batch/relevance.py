"""Relevance order inside every context: the baseline of batch planning."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.batch.base import Placed, Progress
from warmprefix.batch.execution import depth_first

__all__ = ["RelevancePlanner"]


class RelevancePlanner:
    """Leaves every context as it came and only chooses when it runs; for prompts that must not change, the optimum."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        planned = [Placed(i, tuple(contexts[i])) for i in depth_first(contexts)]
        progress("execution order", len(contexts), len(contexts))
        return planned
