"""What a block's rank says about its coming back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = ["Outcome", "RecurrenceByRank", "part_of"]

_PARTS = 3
_FIRST_GUESS = (0.633, 0.5, 0.367)
_GUESS_WEIGHT = 60
"""The first guess counts as much as so many blocks a part."""
_LATEST_WEIGHT = 8
"""The latest request alike counts as much as so many others."""
_MEMORY = 10_000
"""After so many blocks a part what was learned of it counts half, so that a change is noticed."""
_LEAST, _MOST = 0.02, 0.98


Outcome = tuple[int, bool]
"""What became of a block of an earlier request: which third of the ranks it was in, and whether the next one has it."""


def part_of(rank: int, blocks: int) -> int:
    """Which third of the ranks of a request of so many blocks."""
    return _PARTS * rank // blocks


class RecurrenceByRank:
    """How likely a block is to come up again in the next request like its own, given its rank.

    How much a rank tells differs from one retriever to another: the first passage may be what all questions on a
    topic share, or the one that only this question needs. So it is learned: the shares of recurring blocks, for the
    first, the middle and the last third of the ranks, with straight lines between.
    """

    def __init__(self) -> None:
        self._recurred = [_GUESS_WEIGHT * share for share in _FIRST_GUESS]
        self._seen = [float(_GUESS_WEIGHT)] * _PARTS

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Of an earlier request's blocks, which ones its successor has."""
        for part, again in outcomes:
            self._recurred[part] += again
            self._seen[part] += 1
            if self._seen[part] > _MEMORY:
                self._recurred[part] /= 2
                self._seen[part] /= 2

    def chances(self, blocks: int, latest: Sequence[Outcome] = ()) -> list[float]:
        """For each rank below `blocks`, how likely that block is to come up again. O(blocks + len(latest)).

        Args:
            blocks: How many the request has.
            latest: Of the last request like this one, which blocks this one has: what holds here and now may differ
                from the average.
        """
        recurred, seen = self._recurred, self._seen
        if latest:
            recurred, seen = recurred.copy(), seen.copy()
            for part, again in latest:
                recurred[part] += _LATEST_WEIGHT * again
                seen[part] += _LATEST_WEIGHT
        shares = [min(max(a / b, _LEAST), _MOST) for a, b in zip(recurred, seen, strict=True)]
        return [shares[part] + (shares[part + 1] - shares[part]) * way for part, way in _between_parts(blocks)]


@lru_cache(maxsize=64)
def _between_parts(blocks: int) -> tuple[tuple[int, float], ...]:
    """For each rank: behind the middle of which part, and how far towards the middle of the next, from 0 to 1."""
    places: list[tuple[int, float]] = []
    for i in range(blocks):
        position = (i + 0.5) / blocks * _PARTS - 0.5
        part = min(max(int(position), 0), _PARTS - 2)
        places.append((part, min(max(position - part, 0.0), 1.0)))
    return tuple(places)
