"""Conclusions from the answers of one scope: what the engine held, and whether it caches at all."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import NamedTuple

from warmprefix.plan import ContextPlan
from warmprefix.residency.report.usage import EngineReport, UsageComparison, UsageFeedback

__all__ = ["CachingEvidence", "ReportFindings", "ScopeFeedback", "TtftFeedback"]

_PROBE_INTERVAL = 16
"""One request in this many is still ordered while ordering is off; otherwise nothing could show that it pays again."""

_REMEMBERED_ANSWERS = 64
_MIN_COLD_ANSWERS = 8
"""Cold answers needed before TTFT allows a conclusion."""

_MIN_RESIDENT_SHARE = 0.5
"""Share of the context that must be predicted as resident, or a wrong prediction would not show in TTFT."""


class ReportFindings(NamedTuple):
    """The conclusions from one answer."""

    comparison: UsageComparison | None = None
    """Prediction and engine's count, if the engine reported one."""
    resident_blocks: int | None = None
    """The engine held this many of the context's first blocks; None unless fewer than predicted."""
    ordering_switched: bool = False
    """True if this answer turned ordering off for the scope, or on again."""


class ScopeFeedback:
    """Learns from the answers of one scope: from cached tokens where the engine reports them, otherwise from TTFT."""

    def __init__(self, patience: int | None) -> None:
        self.evidence = CachingEvidence(patience)
        """Evidence on whether the engine caches at all."""
        self._usage = UsageFeedback()
        self._ttft = TtftFeedback()

    def learn(self, plan: ContextPlan, report: EngineReport, has_checkpoints: bool = False) -> ReportFindings:
        """Learn from the answer to a plan whose context opens its prompt. O(blocks).

        `has_checkpoints` is True for an engine that continues only from checkpoints. It may hold a block and still not
        reuse it, so a shortfall shows nothing of residency there.
        """
        if not plan.blocks:
            return ReportFindings()
        ends = accumulate([planned.block.tokens for planned in plan.blocks])
        predicted = sum(end <= plan.resident_tokens for end in ends) if plan.resident_tokens else 0
        comparison = self._usage.compare(plan.blocks, predicted, report)
        if comparison is not None:
            switched = self.evidence.add(predicted > 0, comparison.actual)
            held = comparison.resident_blocks
            is_stale = held < predicted and not has_checkpoints
            return ReportFindings(comparison, held if is_stale else None, switched)
        if has_checkpoints:
            return ReportFindings()
        if report.ttft is not None and self._ttft.was_cold(plan.total_tokens, plan.resident_tokens, report.ttft):
            return ReportFindings(resident_blocks=0)
        return ReportFindings()


class CachingEvidence:
    """Turns ordering off for a scope whose engine evidently does not cache, and on again when it does.

    Evidence against caching is a run of answers with zero reported cached tokens to prompts predicted to be partly
    cached. Any cached token is evidence for it. An engine that reports nothing gives no evidence.

    Args:
        patience: Length of such a run; None to never turn ordering off.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._misses = self._requests = 0
        self.is_off = False
        """True while ordering is off."""

    def keeps_order(self) -> bool:
        """Return True if the request being planned keeps its order. Counts the request while ordering is off."""
        if not self.is_off:
            return False
        self._requests += 1
        return self._requests % _PROBE_INTERVAL != 0

    def add(self, expected: bool, cached_tokens: int) -> bool:
        """Add an answer, `expected` to reuse part of its context; return True if it turned ordering on or off."""
        was_off = self.is_off
        if cached_tokens > 0:
            self._misses, self.is_off = 0, False
        elif expected:
            self._misses += 1
            self.is_off = self._patience is not None and self._misses >= self._patience
        return self.is_off != was_off


class TtftFeedback:
    """Detects, for one scope, that a prompt predicted to be largely cached was prefilled from scratch.

    CacheWeaver, section 3.4. The time to prefill a token is learned from prompts without predicted cached tokens. A
    predicted deep hit that took longer than halfway between its expected time and that of a cold prompt was a miss.
    """

    def __init__(self) -> None:
        self._seconds_per_token: deque[float] = deque(maxlen=_REMEMBERED_ANSWERS)

    def was_cold(self, tokens: int, resident_tokens: int, ttft: float) -> bool:
        """Learn from an answer with `ttft` seconds, or return True if it was a miss. O(1).

        Of the `tokens` of its context, `resident_tokens` were predicted to be resident.
        """
        if tokens <= 0 or ttft <= 0:
            return False
        if resident_tokens == 0:
            self._seconds_per_token.append(ttft / tokens)
            return False
        if resident_tokens < _MIN_RESIDENT_SHARE * tokens or len(self._seconds_per_token) < _MIN_COLD_ANSWERS:
            return False
        cold = sorted(self._seconds_per_token)[len(self._seconds_per_token) // 2] * tokens
        warm = cold * (1 - resident_tokens / tokens)
        return ttft > (warm + cold) / 2
