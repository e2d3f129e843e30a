"""What one answer says about what the engine holds, by the best that is known of it."""

from __future__ import annotations

from typing import NamedTuple

from warmprefix.plan import ContextPlan
from warmprefix.residency.base import EngineReport
from warmprefix.residency.health import CachingEvidence
from warmprefix.residency.ttft import TtftFeedback
from warmprefix.residency.usage import Comparison, UsageFeedback

__all__ = ["Heard", "ScopeFeedback"]


class Heard(NamedTuple):
    """What follows from an answer."""

    comparison: Comparison | None = None
    """The prediction beside the engine's own count, if it gave one."""
    resident_blocks: int | None = None
    """How many of the context's first blocks the engine held, if fewer than predicted."""
    has_turned: bool = False
    """Whether ordering is now off for this scope, or on again."""


class ScopeFeedback:
    """What the answers of one scope taught: cached tokens where the engine reports them, TTFT where it does not.

    Args:
        patience: As for `CachingEvidence`.
    """

    def __init__(self, patience: int | None) -> None:
        self.evidence = CachingEvidence(patience)
        self._usage = UsageFeedback()
        self._ttft = TtftFeedback()

    def hear(self, plan: ContextPlan, report: EngineReport) -> Heard:
        """Learn from the answer to a plan whose context opens its prompt. O(blocks)."""
        if not plan.blocks:
            return Heard()
        expected = _resident_blocks(plan)
        comparison = self._usage.compare(plan.blocks, expected, report)
        if comparison is not None:
            has_turned = self.evidence.hear(expected > 0, comparison.actual)
            held = comparison.resident_blocks
            return Heard(comparison, held if held < expected else None, has_turned)
        if report.ttft is not None and self._ttft.was_cold(plan.total_tokens, plan.resident_tokens, report.ttft):
            return Heard(resident_blocks=0)
        return Heard()


def _resident_blocks(plan: ContextPlan) -> int:
    """How many of a plan's first blocks it took for resident."""
    tokens = count = 0
    for planned in plan.blocks if plan.resident_tokens else ():
        tokens += planned.block.tokens
        if tokens > plan.resident_tokens:
            break
        count += 1
    return count
