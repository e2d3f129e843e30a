"""The choice of the marks of one request: which prefixes to write, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    best = _Chain(0.0, ())
    chains: dict[tuple[int, int, int], _Chain] = {}
    unavoidable = -1
    """The last required candidate so far, which no chain may leave out."""
    for place, candidate in enumerate(compared):
        for lifetime, gain in enumerate(candidate.gains):
            if gain is None:
                continue
            for count in range(1, most + 1):
                chain = _extended(compared, chains, place, lifetime, gain, count, unavoidable, begin)
                if chain is None:
                    continue
                chains[place, lifetime, count] = chain
        if candidate.required:
            unavoidable = place
    ends = [chain for (place, _, _), chain in chains.items() if place >= unavoidable]
    if unavoidable >= 0:
        best = max(ends, key=lambda chain: chain.gain, default=best)
    else:
        best = max([best, *ends], key=lambda chain: chain.gain)
    return dict(best.marks)


def _extended(
    compared: Sequence[MarkCandidate],
    chains: Mapping[tuple[int, int, int], _Chain],
    place: int,
    lifetime: int,
    gain: float,
    count: int,
    unavoidable: int,
    begin: float,
) -> _Chain | None:
    """Return the best chain of `count` marks that ends with this one; None without such a chain."""
    candidate = compared[place]
    if count == 1:
        if unavoidable >= 0:
            return None
        return _Chain(max(candidate.end - begin, 0.0) * gain, ((candidate.part, lifetime),))
    best: _Chain | None = None
    for earlier in range(max(unavoidable, 0), place):
        for longer in range(lifetime, len(candidate.gains)):
            chain = chains.get((earlier, longer, count - 1))
            if chain is None:
                continue
            total = chain.gain + (candidate.end - max(compared[earlier].end, begin)) * gain
            if best is None or total > best.gain:
                best = _Chain(total, (*chain.marks, (candidate.part, lifetime)))
    return best


def _worth_comparing(candidates: Sequence[MarkCandidate], begin: float) -> list[MarkCandidate]:
    def most_gained(candidate: MarkCandidate) -> float:
        return (candidate.end - begin) * max((gain for gain in candidate.gains if gain is not None), default=-1.0)

    optional = [candidate for candidate in candidates if not candidate.required and most_gained(candidate) > 0]
    optional = sorted(optional, key=most_gained, reverse=True)[:_MOST_CANDIDATES]
    kept = {candidate.part for candidate in optional}
    return [candidate for candidate in candidates if candidate.required or candidate.part in kept]
