"""Conclusions from the answers of one scope: how good predictions are, and whether the engine caches at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.plan import ContextPlan, PlannedBlock

__all__ = [
    "CachingEvidence",
    "EngineReport",
    "PredictionErrors",
    "ReportFindings",
    "ScopeFeedback",
    "TtftFeedback",
    "UsageComparison",
    "UsageFeedback",
]

_REMEMBERED_ANSWERS = 64
"""Answers from which the length of the text before the context, and the time to prefill a token, are learned."""

_KV_BLOCK_TOKENS = 32
"""Engines count whole KV blocks, so the cached part may end this much before the end of a context block."""

_DENSITY_RATIO = 3.0
"""Largest ratio of tokens per character between two parts of a prompt: prose, code, numbers and scripts differ."""

_MAX_ESTIMATE_ERROR = 0.5
"""Largest relative error of a context's length where only the caller's count is available."""


_PATIENCE = 32
"""Answers in a row without any of the predicted cached tokens after which a scope keeps relevance order: fewer may be
evictions."""
_PROBE_INTERVAL = 16
"""One request in this many is still ordered while ordering is off; otherwise nothing could show that it pays again."""

_MIN_COLD_ANSWERS = 8
"""Cold answers needed before TTFT allows a conclusion."""

_MIN_RESIDENT_SHARE = 0.5
"""Share of the context that must be predicted as resident, or a wrong prediction would not show in TTFT."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Measurements of one answer; a field is None if the engine does not report it."""

    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache: `usage.prompt_tokens_details.cached_tokens`."""
    prompt_tokens: int | None = None
    """Tokens of the whole prompt: `usage.prompt_tokens`."""
    ttft: float | None = None
    """Seconds from the request to the first token of the answer."""
    prompt_token_ids: Sequence[int] | None = None
    """The whole prompt as the engine saw it."""
    block_ends: Sequence[float] | None = None
    """For each planned block, in planned order, the share of the prompt's characters up to its end, from 0 to 1."""
    capacity_tokens: int | None = None
    """Tokens that the engine's prefix cache holds, if its metrics include them."""
    profile: CacheProfile | None = None
    """Where the engine's cache can match, if its metrics show that."""
    written_tokens: int | None = None
    """Prompt tokens written to the cache, if the API reports them."""


class UsageComparison(NamedTuple):
    """A prediction and the engine's report on it."""

    predicted: float
    """Cached tokens of the prompt, including the text before the context."""
    actual: int
    resident_blocks: int
    """The engine held this many of the context's first blocks, counted generously."""
    likely_blocks: int
    """The most likely number of them."""


class UsageFeedback:
    """Compares predicted with reported cached tokens, for one scope.

    Predictions are in tokens of context, by the callers' own count or an estimate; reports are in the engine's tokens
    of the whole prompt. The end of each block in the prompt relates the two, if only in characters. Without it, the
    text before the context counts as long as the excess of recent reports over their predictions.

    A prediction is the most likely value. A report counts as a shortfall only if no way to count explains it: a block
    wrongly taken for evicted costs hits.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_REMEMBERED_ANSWERS)

    def compare(
        self, blocks: Sequence[PlannedBlock], resident_blocks: int, report: EngineReport
    ) -> UsageComparison | None:
        """Return the comparison, or None if the engine did not report cached tokens. O(blocks).

        The planned `blocks` open the prompt; the first `resident_blocks` were predicted to be resident.
        """
        actual = report.cached_tokens
        if actual is None:
            return None
        before = max(sorted(self._before)[len(self._before) // 2], 0.0) if self._before else 0.0
        shares, prompt_tokens = report.block_ends, report.prompt_tokens
        if shares is not None and prompt_tokens is not None and len(shares) == len(blocks) and _ascend(shares):
            is_counted = True
            ends = [share * prompt_tokens for share in shares]
            before = min(before, ends[0])
            at_least = [prompt_tokens * share / (share + _DENSITY_RATIO * (1 - share)) for share in shares]
        else:
            is_counted = False
            lengths = [planned.block.tokens for planned in blocks]
            ends = [before + length for length in accumulate(lengths)]
            least_before = max(sorted(self._before)[len(self._before) // 10], 0.0) if self._before else 0.0
            at_least = [least_before + (1 - _MAX_ESTIMATE_ERROR) * length for length in accumulate(lengths)]
        predicted = ends[resident_blocks - 1] if resident_blocks else before
        # With resident blocks the difference also contains their error, so use it only where nothing better exists.
        if resident_blocks == 0 or not is_counted:
            self._before.append(before + actual - predicted)
        most = actual + _KV_BLOCK_TOKENS
        held = next((count for count, least in enumerate(at_least) if least > most), len(at_least))
        middles = [(start + end) / 2 for start, end in zip([before, *ends], ends, strict=False)]
        likely = next((count for count, middle in enumerate(middles) if middle > actual), len(middles))
        return UsageComparison(predicted, actual, held, likely)


def _ascend(shares: Sequence[float]) -> bool:
    """Return True if these are shares from 0 to 1 that never fall; False for NaN."""
    return all(before <= share <= 1 for before, share in zip((0, *shares), shares, strict=False))


class PredictionErrors:
    """The errors of the last `size` comparisons."""

    def __init__(self, size: int = 1_024) -> None:
        self._compared: deque[tuple[float, int]] = deque(maxlen=size)

    def add(self, comparison: UsageComparison) -> None:
        """Record one comparison, in place of the oldest if there are too many."""
        self._compared.append((comparison.predicted, comparison.actual))

    def clear(self) -> None:
        """Forget all comparisons."""
        self._compared.clear()

    def mean_and_p95(self) -> tuple[float, float]:
        """Return mean and 95th percentile of the absolute errors in tokens; 0 without any. O(n log n)."""
        errors = sorted(abs(predicted - actual) for predicted, actual in self._compared)
        if not errors:
            return 0.0, 0.0
        return sum(errors) / len(errors), errors[max(-(-len(errors) * 95 // 100) - 1, 0)]

    def agreement(self) -> float | None:
        """Return the sum of the smaller values over the sum of the larger; None without a comparison."""
        if not self._compared:
            return None
        larger = sum(max(predicted, actual) for predicted, actual in self._compared)
        return sum(min(predicted, actual) for predicted, actual in self._compared) / larger if larger else 1.0


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

    def __init__(self) -> None:
        self.evidence = CachingEvidence()
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
    """

    def __init__(self) -> None:
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
            self.is_off = self._misses >= _PATIENCE
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
