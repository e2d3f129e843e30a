"""Statistics of paired scores: intervals, tests, and what a number of questions can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["Comparison", "compare_pairs", "detectable_difference", "mcnemar"]

_TWO_SIDED, _ONE_SIDED, _POWER = (NormalDist().inv_cdf(share) for share in (0.975, 0.95, 0.8))
_PRECISION = 1e-9


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
        """True if the 95 % interval excludes 0, and the exact test agrees: it errs more rarely with few changes."""
        return (self.low > 0 or self.high < 0) and self.p_value < 0.05

    def is_not_worse(self, margin: float) -> bool:
        """Return True if a loss of `margin` or more is refuted, with an error rate of 5 %."""
        return self.worst > -margin


def compare_pairs(differences: Sequence[float]) -> Comparison:
    """Compare paired scores between 0 and 1. O(differences).

    Intervals are Tango's score intervals for paired proportions (Statistics in Medicine 17, 1998). Unlike percentiles
    of a bootstrap, they keep their error rates if only a few answers change. A difference between 0 and 1 counts as
    that part of a win or a loss, which makes the interval a little longer than needed.

    Raises:
        ValueError: There is no difference to compare.
    """
    if not differences:
        raise ValueError("differences must hold one number or more, got none")
    pairs = len(differences)
    won, lost = sum(max(each, 0.0) for each in differences), sum(max(-each, 0.0) for each in differences)
    wins, losses = sum(each > 0 for each in differences), sum(each < 0 for each in differences)
    return Comparison(
        pairs,
        wins,
        losses,
        (won - lost) / pairs,
        _bound(won, lost, pairs, _TWO_SIDED),
        -_bound(lost, won, pairs, _TWO_SIDED),
        _bound(won, lost, pairs, _ONE_SIDED),
        mcnemar(wins, losses),
    )


def _bound(won: float, lost: float, pairs: int, z: float) -> float:
    """Return the lowest difference that a score test with this quantile does not refute."""
    low, high = -1.0, (won - lost) / pairs
    refuted: Callable[[float], bool] = lambda difference: _score(won, lost, pairs, difference) > z  # noqa: E731
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return high


def _score(won: float, lost: float, pairs: int, difference: float) -> float:
    """Return how many standard errors the wins are above those that this difference would give."""
    b = -won - lost + (2 * pairs - won + lost) * difference
    c = -lost * difference * (1 - difference)
    share = (math.sqrt(max(b * b - 8 * pairs * c, 0.0)) - b) / (4 * pairs)
    variance = pairs * (2 * share + difference * (1 - difference))
    above = won - lost - pairs * difference
    return above / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, above) if above else 0.0


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
    return (_TWO_SIDED + _POWER) * math.sqrt(changed_share / questions)
