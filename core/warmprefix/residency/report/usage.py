"""The engine's report on an answer, and its comparison with the predicted cached tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.plan import PlannedBlock

__all__ = ["EngineReport", "PredictionErrors", "UsageComparison", "UsageFeedback"]

_REMEMBERED_ANSWERS = 64
"""Answers from which the length of the text before the context is learned."""

_KV_BLOCK_TOKENS = 32
"""Engines count whole KV blocks, so the cached part may end this much before the end of a context block."""

_DENSITY_RATIO = 3.0
"""Largest ratio of tokens per character between two parts of a prompt: prose, code, numbers and scripts differ."""

_MAX_ESTIMATE_ERROR = 0.5
"""Largest relative error of a context's length where only the caller's count is available."""


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
    """Prompt tokens written to the cache at a price, if the API reports them."""


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
