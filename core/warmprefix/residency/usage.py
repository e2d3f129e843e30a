"""Conclusions from the answers of one scope: how good predictions are, and whether the engine caches at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.plan import ContextPlan, PlannedBlock

__all__ = [
    "EngineReport",
    "PredictionErrors",
    "TtftFeedback",
    "UsageComparison",
    "UsageFeedback",
]

_REMEMBERED_ANSWERS = 64
"""Answers from which the length of the text before the context, and the time to prefill a token, are learned."""

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
    ends: Sequence[float]
    """Tokens of the prompt up to the context, and up to the end of each of its blocks, in the engine's count."""

    @property
    def likely_blocks(self) -> int:
        """The most likely number of the context's first blocks that the engine held."""
        return self.blocks_in(self.actual)

    def blocks_in(self, tokens: float) -> int:
        """Return how many of the context's first blocks lie, most likely, in this number of the prompt's tokens."""
        return sum([start + end <= 2 * tokens for start, end in pairwise(self.ends)])


class UsageFeedback:
    """Compares predicted with reported cached tokens, for one scope.

    Predictions are in tokens of context, by the callers' own count or an estimate; reports are in the engine's tokens
    of the whole prompt. The end of each block in the prompt relates the two, if only in characters. Without it, the
    text before the context counts as long as the excess of recent reports over their predictions.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_REMEMBERED_ANSWERS)

    def compare_plan(self, plan: ContextPlan, report: EngineReport) -> UsageComparison | None:
        """Return the comparison for a plan whose context opens its prompt, as `compare` does."""
        ends = accumulate([planned.block.tokens for planned in plan.blocks])
        return self.compare(plan.blocks, sum(end <= plan.resident_tokens for end in ends), report)

    def compare(
        self, blocks: Sequence[PlannedBlock], resident_blocks: int, report: EngineReport
    ) -> UsageComparison | None:
        """Return the comparison, or None without blocks or reported cached tokens. O(blocks).

        The planned `blocks` open the prompt; the first `resident_blocks` were predicted to be resident.
        """
        actual = report.cached_tokens
        if actual is None or not blocks:
            return None
        before = max(sorted(self._before)[len(self._before) // 2], 0.0) if self._before else 0.0
        shares, prompt_tokens = report.block_ends, report.prompt_tokens
        counted = None
        if shares is not None and prompt_tokens is not None and _ascend(shares, len(blocks)):
            counted = [share * prompt_tokens for share in shares]
            ends = [min(before, counted[0]), *counted]
        else:
            ends = [*accumulate([planned.block.tokens for planned in blocks], initial=before)]
        predicted = ends[resident_blocks]
        # With resident blocks the difference also contains their error, so use it only where nothing better exists.
        if resident_blocks == 0 or counted is None:
            self._before.append(ends[0] + actual - predicted)
        return UsageComparison(predicted, actual, ends)


def _ascend(shares: Sequence[float], blocks: int) -> bool:
    """Return True if these are shares of as many blocks from 0 to 1 that never fall; False for NaN."""
    return len(shares) == blocks and all(
        before <= share <= 1 for before, share in zip((0, *shares), shares, strict=False)
    )


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
