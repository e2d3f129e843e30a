"""What the engine's own count of cached tokens says about a prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from warmprefix.plan import PlannedBlock
from warmprefix.residency.base import EngineReport

__all__ = ["Comparison", "PredictionErrors", "UsageFeedback"]

_REMEMBERED = 64
"""Answers from which the length of what stands before the context is learned."""

_KV_BLOCK = 32
"""Tokens; engines count whole KV blocks, so what is cached may end this much before the context block that it holds."""

_DENSITY = 3.0
"""So many times as many tokens as another, of the same length in characters, a part of a prompt may have: prose, code,
numbers, and other scripts differ so much."""

_GUESSED = 0.5
"""By how much of its length in tokens a context may be off where only the caller's count is known."""


class Comparison(NamedTuple):
    """A prediction beside what the engine reported."""

    predicted: float
    """Cached tokens of the prompt, whatever stands before the context included."""
    actual: int
    resident_blocks: int
    """How many of the context's first blocks the engine held."""


class UsageFeedback:
    """Compares, for one scope, what was predicted to be cached with what was.

    Predictions are in tokens of context, by the callers' own count or an estimate; reports are in the engine's tokens
    of the whole prompt. Where each block ends in the prompt tells one from the other, if only in characters. Without
    it, what stands before the context is taken to be as long as what recent reports had beyond their predictions.

    A prediction is what is most likely. For a shortfall a report is taken only if no way to count explains it: what is
    taken for evicted by mistake costs hits.
    """

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_REMEMBERED)

    def compare(self, blocks: Sequence[PlannedBlock], resident_blocks: int, report: EngineReport) -> Comparison | None:
        """None if the engine did not report what was cached. O(blocks).

        Args:
            blocks: The plan's, in planned order; its context opens the prompt.
            resident_blocks: How many of the first were predicted to be resident.
            report: The engine's.
        """
        actual = report.cached_tokens
        if actual is None:
            return None
        before = max(sorted(self._before)[len(self._before) // 2], 0.0) if self._before else 0.0
        shares, prompt_tokens = report.block_ends, report.prompt_tokens
        is_counted = shares is not None and prompt_tokens is not None and len(shares) == len(blocks) and _ascend(shares)
        if is_counted:
            assert shares is not None
            assert prompt_tokens is not None
            ends = [share * prompt_tokens for share in shares]
            before = min(before, ends[0])
            at_least = [prompt_tokens * share / (share + _DENSITY * (1 - share)) for share in shares]
        else:
            lengths = [planned.block.tokens for planned in blocks]
            ends = [before + length for length in accumulate(lengths)]
            least_before = max(sorted(self._before)[len(self._before) // 10], 0.0) if self._before else 0.0
            at_least = [least_before + (1 - _GUESSED) * length for length in accumulate(lengths)]
        predicted = ends[resident_blocks - 1] if resident_blocks else before
        # What came with the context is no measure of what stands before it, unless nothing else is known.
        if resident_blocks == 0 or not is_counted:
            self._before.append(before + actual - predicted)
        held = 0
        for least in at_least:
            if least > actual + _KV_BLOCK:
                break
            held += 1
        return Comparison(predicted, actual, held)


def _ascend(shares: Sequence[float]) -> bool:
    """Whether they are shares of one thing, one after the other; NaN is none."""
    return all(before <= share <= 1 for before, share in zip((0, *shares), shares, strict=False))


class PredictionErrors:
    """The last predictions and what came of them."""

    def __init__(self, size: int = 1_024) -> None:
        self._compared: deque[tuple[float, int]] = deque(maxlen=size)

    def add(self, comparison: Comparison) -> None:
        self._compared.append((comparison.predicted, comparison.actual))

    def clear(self) -> None:
        self._compared.clear()

    def mean_and_p95(self) -> tuple[float, float]:
        """Of the distances between both, in tokens; 0 if there are none. O(n log n)."""
        errors = sorted(abs(predicted - actual) for predicted, actual in self._compared)
        if not errors:
            return 0.0, 0.0
        return sum(errors) / len(errors), errors[max(-(-len(errors) * 95 // 100) - 1, 0)]

    def agreement(self) -> float | None:
        """The sum of the lesser of both over that of the greater; None if there is nothing to compare."""
        if not self._compared:
            return None
        greater = sum(max(predicted, actual) for predicted, actual in self._compared)
        return sum(min(predicted, actual) for predicted, actual in self._compared) / greater if greater else 1.0
