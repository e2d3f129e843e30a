"""The choice of the marks of one request: which prefixes to write, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

__all__ = ["MarkCandidate", "chosen_marks"]

_MOST_CANDIDATES = 32
"""Candidates that are compared with each other; those with the least to gain are left out first."""


class MarkCandidate(NamedTuple):
    """A part that a mark can stand on."""

    part: int
    end: float
    """Tokens up to its end."""
    gains: tuple[float | None, ...]
    """What a mark here saves in the long run per request and token, for each lifetime; None where it cannot have
    that lifetime."""
    required: bool = False
    """True if the application has set a mark here."""


class _Chain(NamedTuple):
    """The best choice that ends with one mark."""

    gain: float
    marks: tuple[tuple[int, int], ...]


def chosen_marks(candidates: Sequence[MarkCandidate], begin: float, most: int) -> Mapping[int, int]:
    """Return the number of the lifetime of each part to mark: the choice that saves most.

    A mark saves what lies between it and the mark in front of it, or `begin`. Longer lifetimes stand in front of
    shorter ones. O(marks x candidates^2), with at most 32 candidates besides the required ones.

    >>> chosen_marks([MarkCandidate(0, 500, (0.4,)), MarkCandidate(3, 900, (-0.1,))], begin=0, most=4)
    {0: 0}

    Args:
        candidates: In the order of their parts.
        begin: Tokens that the cache already holds.
        most: Most marks.
    """
    compared = _worth_comparing(candidates, begin)
    chains: dict[tuple[int, int, int], _Chain] = {}
    unavoidable = -1
    """The last required candidate so far, which no chain may leave out."""
    for place, candidate in enumerate(compared):
        for lifetime, gain in enumerate(candidate.gains):
            if gain is None:
                continue
            mark = (candidate.part, lifetime)
            if unavoidable < 0 < most:
                chains[place, lifetime, 1] = _Chain(max(candidate.end - begin, 0.0) * gain, (mark,))
            for count in range(2, most + 1):
                extended = [
                    (chain.gain + (candidate.end - max(compared[earlier].end, begin)) * gain, chain)
                    for earlier in range(max(unavoidable, 0), place)
                    for longer in range(lifetime, len(candidate.gains))
                    if (chain := chains.get((earlier, longer, count - 1))) is not None
                ]
                if extended:
                    total, chain = max(extended, key=itemgetter(0))
                    chains[place, lifetime, count] = _Chain(total, (*chain.marks, mark))
        if candidate.required:
            unavoidable = place
    no_marks = _Chain(0.0, ())
    ends = [chain for (place, _, _), chain in chains.items() if place >= unavoidable]
    if unavoidable < 0:
        ends.insert(0, no_marks)
    return dict(max(ends, key=attrgetter("gain"), default=no_marks).marks)


def _worth_comparing(candidates: Sequence[MarkCandidate], begin: float) -> list[MarkCandidate]:
    def most_gained(candidate: MarkCandidate) -> float:
        return (candidate.end - begin) * max((gain for gain in candidate.gains if gain is not None), default=-1.0)

    optional = [candidate for candidate in candidates if not candidate.required and most_gained(candidate) > 0]
    optional = sorted(optional, key=most_gained, reverse=True)[:_MOST_CANDIDATES]
    kept = {candidate.part for candidate in optional}
    return [candidate for candidate in candidates if candidate.required or candidate.part in kept]
