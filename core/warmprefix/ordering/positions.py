"""Where in a context a model reads best, and what an order costs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

__all__ = ["PositionProfile", "place_well", "profiles_of_models"]

_ANSWERING = (0.7, 0.11, 0.06)
"""Questions whose answer the block of each rank has, as shares of all that any block answers. The mean of three
retrievals with known answers: 0.94, 0.67 and 0.55 for the first. What is left belongs to ranks that seldom answer."""
_MOST_POINTS = 1_000


class PositionProfile(NamedTuple):
    """How often a model is right, by the place of the answer in its context ("lost in the middle", Liu et al. 2023).

    >>> profile = PositionProfile((94, 58, 74), points_per_percent=2.0)
    >>> round(profile.loss([1, 2, 0, 3, 4]), 1), round(profile.loss([1, 2, 3, 4, 0]), 1)
    (22.1, 10.9)
    """

    right: tuple[float, ...]
    """Right answers in percent, with the answer in places from the first to the last, evenly spaced."""
    points_per_percent: float
    """Points of right answers that one percent of saved prefill is worth; 0 for orders that cost no answer."""

    def loss(self, order: Sequence[int]) -> float:
        """Return the points that an order is expected to cost against relevance order; negative for a gain."""
        right = _right_by_place(self.right, len(order))
        return sum([share * (right[i] - right[order.index(i)]) for i, share in enumerate(_ANSWERING[: len(order)])])

    def value(self, order: Sequence[int], saved_percent: float) -> float:
        """Return the points that an order is worth, given the percentage of the prefill that it saves."""
        return self.points_per_percent * saved_percent - self.loss(order)


def place_well(order: Sequence[int], kept: int, value: Callable[[Sequence[int]], float]) -> tuple[float, Sequence[int]]:
    """Return the best order, and its value, with the most relevant blocks where they read well.

    They stand right behind the first `kept` blocks, at the end, or where they were. O(1) calls of `value`.
    """
    best = value(order), order
    for rank in range(min(len(_ANSWERING), len(order))):
        path, others = best[1][:kept], [i for i in best[1][kept:] if i != rank]
        if rank not in path:
            for moved in ([*path, rank, *others], [*path, *others, rank]):
                best = max(best, (value(moved), moved), key=itemgetter(0))
    return best


@lru_cache(maxsize=256)
def _right_by_place(right: tuple[float, ...], blocks: int) -> list[float]:
    """Return the right answers at each place of a context, on straight lines between the given places."""
    last = len(right) - 1
    ways = [place / max(blocks - 1, 1) * last for place in range(blocks)]
    return [right[int(way)] + (right[min(int(way) + 1, last)] - right[int(way)]) * (way % 1) for way in ways]


def profiles_of_models(
    positions: Mapping[str, Sequence[float]], points_per_percent: float
) -> Mapping[str, PositionProfile | None]:
    """Return each model's profile; None for a model that reads all places alike.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of bounds, or a model has none.
    """
    if not isinstance(positions, Mapping):
        raise TypeError(f"positions must be a mapping, got {type(positions).__name__}")
    profiles = {model: PositionProfile(tuple(right), points_per_percent) for model, right in positions.items()}
    numbers = [("points_per_percent", points_per_percent, _MOST_POINTS)]
    numbers += [(f"positions[{model!r}]", right, 100) for model, profile in profiles.items() for right in profile.right]
    for name, number, most in numbers:
        if not isinstance(number, int | float):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
        if not 0 <= number <= most:
            raise ValueError(f"{name} must be from 0 to {most}, got {number}")
    if any(not profile.right for profile in profiles.values()):
        raise ValueError("positions must have numbers for each model, got none")
    return {model: profile if len({*profile.right}) > 1 else None for model, profile in profiles.items()}
