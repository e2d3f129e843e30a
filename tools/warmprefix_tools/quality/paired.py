"""Statistics of paired differences: intervals, tests, and what a number of questions can show. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Comparison", "compare_pairs", "detectable_difference", "mcnemar"]

_RESAMPLES = 2_000
_Z_TWO_SIDED, _Z_POWER = 1.959964, 0.841621
"""Normal quantiles of 97.5 and 80 percent."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The scores of an arm minus those of its baseline, question by question."""

    pairs: int
    wins: int
    """Questions with a higher score than the baseline's."""
    losses: int
    difference: float
    """Mean difference; 0.01 is one point."""
    low: float
    high: float
    """Ends of the 95 % interval."""
    worst: float
    """Lower end of the one-sided 95 % interval."""
    p_value: float
    """Of McNemar's exact test on wins and losses."""

    @property
    def differs(self) -> bool:
        """True if the 95 % interval excludes 0."""
        return self.low > 0 or self.high < 0

    def is_not_worse(self, margin: float) -> bool:
        """Return True if a loss of `margin` or more is refuted, with an error rate of 5 %."""
        return self.worst > -margin


def compare_pairs(differences: Sequence[float], *, seed: int = 0, resamples: int = _RESAMPLES) -> Comparison:
    """Compare paired scores between 0 and 1.

    Intervals are percentiles of bootstrap means. One question won and one lost are added to the sample first: without
    them, few changed answers would give intervals that are too short (Agresti and Min, Statistics in Medicine 24,
    2005). O(resamples * differences).

    Raises:
        ValueError: There is no difference to compare.
    """
    if not differences:
        raise ValueError("differences must hold one number or more, got none")
    rng = random.Random(seed)  # noqa: S311
    sample = [*differences, 1.0, -1.0]
    size = len(sample)
    means = sorted([sum(rng.choices(sample, k=size)) / size for _ in range(resamples)])
    wins, losses = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    return Comparison(
        len(differences),
        wins,
        losses,
        sum(differences) / len(differences),
        means[int(0.025 * resamples)],
        means[math.ceil(0.975 * resamples) - 1],
        means[int(0.05 * resamples)],
        mcnemar(wins, losses),
    )


def mcnemar(wins: int, losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test.

    >>> mcnemar(0, 6), mcnemar(3, 3)
    (0.03125, 1.0)
    """
    changed = wins + losses
    tail = sum(math.comb(changed, count) for count in range(min(wins, losses) + 1))
    return min(1.0, tail / 2 ** (changed - 1)) if changed else 1.0


def detectable_difference(questions: int, changed_share: float) -> float:
    """Return the difference that a test with an error rate of 5 % finds in 80 % of all runs.

    `changed_share` is the share of questions whose answers are right in one arm only.

    >>> round(100 * detectable_difference(500, 0.02), 1)
    1.8
    """
    return (_Z_TWO_SIDED + _Z_POWER) * math.sqrt(changed_share / questions)
