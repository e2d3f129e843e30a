"""Statistics of paired scores: intervals, tests, and what a number of questions can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

__all__ = [
    "Comparison",
    "PairCounts",
    "compare_pairs",
    "detectable_difference",
    "loss_of",
    "mcnemar",
    "questions_needed",
]

_ERROR_RATE = 0.05
_quantile = NormalDist().inv_cdf
_POWER = _quantile(0.8)
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
    """Of McNemar's exact test on wins and losses, for readers who expect it: no verdict depends on it."""

    @property
    def differs(self) -> bool:
        """True if the 95 % interval excludes 0."""
        return self.low > 0 or self.high < 0

    def is_not_worse(self, margin: float) -> bool:
        """Return True if a loss of `margin` or more is refuted, with an error rate of 5 %."""
        return self.worst > -margin

    def verdict(self, margin: float) -> str:
        """Return in a word or two how the arm compares; it agrees with the ends of the intervals."""
        if self.low > 0:
            return "better"
        if self.is_not_worse(margin):
            return "worse, within margin" if self.differs else "not worse"
        return "worse" if self.differs else "open"


@dataclass(slots=True)
class PairCounts:
    """Counts of paired scores between 0 and 1, enough for every statistic here."""

    pairs: int = 0
    wins: int = 0
    losses: int = 0
    won: float = 0.0
    """Sum of the positive differences."""
    lost: float = 0.0

    def add(self, difference: float) -> None:
        """Count a pair. A difference between 0 and 1 is that part of a win or a loss."""
        self.pairs += 1
        self.wins += difference > 0
        self.losses += difference < 0
        self.won += max(difference, 0.0)
        self.lost += max(-difference, 0.0)

    @property
    def changed_share(self) -> float:
        """Share of pairs with different scores; 0 without pairs."""
        return (self.wins + self.losses) / self.pairs if self.pairs else 0.0

    def is_certain(self, margin: float, most: int | None) -> bool:
        """Return True if the interval of `compare_pairs` excludes 0, or a loss of `margin` or more is refuted. O(1)."""
        both, one = _quantiles(self.pairs, most)
        return (
            _score(self.won, self.lost, self.pairs, 0.0) > both
            or _score(self.lost, self.won, self.pairs, 0.0) > both
            or _score(self.won, self.lost, self.pairs, -margin) > one
        )


def compare_pairs(differences: Iterable[float], most: int | None = None) -> Comparison:
    """Compare paired scores between 0 and 1. O(differences).

    Intervals are Tango's score intervals for paired proportions (Statistics in Medicine 17, 1998). Unlike percentiles
    of a bootstrap, they keep their error rates if only a few answers change. A difference between 0 and 1 counts as
    that part of a win or a loss, which makes the interval a little longer than needed.

    Args:
        differences: One number per pair.
        most: The number of pairs that the run would have ended with, if it may stop early for what its answers show.
            Then the intervals hold at all looks together, and with any rule to stop.

    Raises:
        ValueError: There is no difference to compare.
    """
    counts = PairCounts()
    for each in differences:
        counts.add(each)
    pairs, won, lost = counts.pairs, counts.won, counts.lost
    if not pairs:
        raise ValueError("differences must hold one number or more, got none")
    both, one = _quantiles(pairs, most)
    return Comparison(
        pairs,
        counts.wins,
        counts.losses,
        (won - lost) / pairs,
        _bound(won, lost, pairs, both),
        -_bound(lost, won, pairs, both),
        _bound(won, lost, pairs, one),
        mcnemar(counts.wins, counts.losses),
    )


def _quantiles(pairs: int, most: int | None) -> tuple[float, float]:
    """Return how many standard errors the two-sided and the one-sided test need.

    With `most`, the boundary of O'Brien and Fleming (Biometrics 35, 1979) for looks at any time: the sum of the
    differences is compared with the same number at all looks, and the reflection principle doubles the error rate of
    the last look (Lan and DeMets, Biometrika 70, 1983). The intervals are the repeated ones of Jennison and Turnbull
    (Journal of the Royal Statistical Society B 51, 1989).
    """
    if most is None:
        return _quantile(1 - _ERROR_RATE / 2), _quantile(1 - _ERROR_RATE)
    growth = math.sqrt(max(most, pairs) / pairs) if pairs else math.inf
    return growth * _quantile(1 - _ERROR_RATE / 4), growth * _quantile(1 - _ERROR_RATE / 2)


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
    if not pairs:
        return 0.0
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
    return (_quantile(1 - _ERROR_RATE / 2) + _POWER) * math.sqrt(changed_share / questions)


def loss_of(margin: float) -> str:
    """Return a loss in words.

    >>> loss_of(0.01), loss_of(0.025)
    ('a loss of 1 point', 'a loss of 2.5 points')
    """
    return f"a loss of {100 * margin:g} point{'s' * (margin != 0.01)}"


def questions_needed(changed_share: float, margin: float, *, stops: bool = False) -> int:
    """Return the number of questions that refute a loss of `margin` in 80 % of all runs, if nothing is lost.

    >>> questions_needed(0.02, 0.01), questions_needed(0.14, 0.01), questions_needed(0.14, 0.01, stops=True)
    (1237, 8656, 10989)
    """
    z = _quantile(1 - _ERROR_RATE / (2 if stops else 1))
    least = z * z * (1 - margin) / margin  # with no changed answer at all
    return math.ceil(max(least, (z + _POWER) ** 2 * changed_share / margin**2))
