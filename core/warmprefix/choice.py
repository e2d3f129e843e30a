"""Choosing which of more candidates than places are fed: the settings, and what a plan says of the others."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from warmprefix.blocks import ContextBlock, evidence_blocks, joined_blocks, single_places
from warmprefix.errors import check_count
from warmprefix.twins import newest_candidates, twin_groups

__all__ = ["Candidates", "Choice", "LeftOut", "LeftOutReason", "within_noise"]

LeftOutReason = Literal["rank", "exchanged", "twin", "superseded"]
"""Why a candidate is not fed. `"rank"`: there was no place for it. `"exchanged"`: one that costs less has its place.
`"twin"`: another candidate says the same. `"superseded"`: there is a newer version of it."""

Scores = Literal["similarity", "distance"]

_KEPT = 3
_LEAVING_SHARE = 1 / 2
"""How far above rank `k` a candidate that leaves may score, as a share of what those that enter may score below."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of a request's candidates may be fed in place of others, because the engine holds them already.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `k` is below 1, `keep` above `k`, another number out of bounds, or `scores` has another value.
    """

    k: int
    """Places: the candidates that relevance alone would feed."""
    keep: int | None = None
    """The first candidates, which are always fed; by default 3, or all `k` if these are fewer."""
    within: float = 0.2
    """How far below rank `k` a candidate may score, as a share of the spread between the scores of rank 1 and rank `k`.
    So it means the same for every scale of scores. One that leaves may score half of that above rank `k`."""
    extra: int = 0
    """Most candidates beyond `k` places, with the same tolerance, where the engine holds them: nothing to compute."""
    scores: Scores = "similarity"
    """What scores are: `"similarity"`, where higher is better, or `"distance"`."""
    twins: bool | Callable[[Any], Hashable | None] = False
    """True to feed one of the candidates that are equal but for white space, quotation marks, and a version in their
    first line: the one that the engine holds, else the first. The places of the others stay empty. Or a function of a
    block that returns what twins have in common, None without twins. Pinned blocks and runs have no twins."""
    version: Callable[[Any], tuple[Hashable, Any] | None] | None = None
    """A function that returns the source of a block and its version, or None: of one source only candidates of the
    greatest version are fed, whatever their scores, in the places of the older ones. If one of these functions fails,
    the request is planned without it, and that is counted."""
    most: float = 0.1
    """Most requests of a scope in which one passage may enter by choice, as a share; older requests count less."""

    def __post_init__(self) -> None:
        check_count("k", self.k)
        check_count("keep", self.keep, optional=True, least=0)
        check_count("extra", self.extra, least=0)
        if self.keep is not None and self.keep > self.k:
            raise ValueError(f"keep must be at most k, which is {self.k}, got {self.keep}")
        for name, share, greatest in (("within", self.within, math.inf), ("most", self.most, 1)):
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise TypeError(f"{name} must be a number, got {type(share).__name__}")
            if not 0 <= share <= greatest:
                raise ValueError(f"{name} must be from 0 to {greatest}, got {share}")
        if not (isinstance(self.twins, bool) or callable(self.twins)):
            raise TypeError(f"twins must be a bool or a function, got {type(self.twins).__name__}")
        if not (self.version is None or callable(self.version)):
            raise TypeError(f"version must be a function or None, got {type(self.version).__name__}")
        if self.scores not in get_args(Scores):
            raise ValueError(f"scores must be 'similarity' or 'distance', got {self.scores!r}")

    @property
    def kept(self) -> int:
        """Number of first candidates that are always fed."""
        return min(_KEPT, self.k) if self.keep is None else self.keep

    def losses(self, scores: Sequence[Any], positions: Sequence[int] | None = None) -> list[float]:
        """Return how far each score is below that of rank `k`, as a share of the spread of the first `k` scores.

        Candidates beyond `k` may be fed if that is at most `within`. Negative for scores above that of rank `k`.

        Args:
            scores: Of all candidates, in relevance order.
            positions: The places that errors name; by default those in `scores`.

        Raises:
            ValueError: A score is missing, no finite number, or better than the one before it.
        """
        places = range(len(scores)) if positions is None else positions
        if not _are_scores(scores):
            place = next(i for i, score in enumerate(scores) if not _are_scores([score]))
            got = f"got {scores[place]!r}"
            raise ValueError(f"candidate {places[place]} must have a finite score to choose by, {got}")
        sign = 0.25 if self.scores == "similarity" else -0.25  # a quarter, so that no difference overflows
        values = [sign * float(score) for score in scores]
        if values != sorted(values, reverse=True):
            place = next(i for i in range(1, len(values)) if values[i] > values[i - 1])
            wanted = "descending" if sign > 0 else "ascending"
            raise ValueError(
                f"candidates must come with {wanted} scores, but candidate {places[place]} has {scores[place]!r} "
                f"behind {scores[place - 1]!r}"
            )
        last = values[: self.k][-1] if values else 0.0
        spread = values[0] - last if values else 0.0
        if spread:
            return [(last - value) / spread for value in values]
        return [0.0 if value == last else math.copysign(math.inf, last - value) for value in values]

    def near_equals(self, losses: Sequence[float], k: int) -> tuple[range, range]:
        """Return the places of which some may be exchanged for others, as far as scores tell: before and beyond `k`.

        Args:
            losses: Of all places; see `losses`.
            k: Number of places that relevance alone fills.
        """
        first = max(min(self.kept, k), bisect_left(losses, -self.within * _LEAVING_SHARE))
        return range(first, k), range(k, max(k, bisect_right(losses, self.within)))


def _are_scores(scores: Sequence[Any]) -> bool:
    try:
        return all(map(math.isfinite, scores)) and bool not in {*map(type, scores)}
    except (TypeError, ValueError, OverflowError):
        return False


def within_noise(runs: Iterable[tuple[Mapping[Any, float], Mapping[Any, float]]], k: int) -> float:
    """Return a value for `Choice.within` from two retrieval runs or rerankers: how far they disagree.

    That is the median difference of the losses of candidates that one of them has below rank `k`; see `Choice.losses`.
    Candidates that only one of them has are ignored. 0 if there are none to compare.

    Args:
        runs: For each question, the scores of its candidates by both; higher is better.
        k: Number of candidates that relevance alone would feed.

    >>> within_noise([({"a": 9, "b": 5, "c": 4}, {"a": 0.9, "b": 0.5, "c": 0.3})], k=2)
    0.25
    """
    found: list[float] = []
    for first, second in runs:
        pairs: dict[Any, list[float]] = {key: [] for key in first if key in second}
        for scores in (first, second):
            ranked = sorted(pairs, key=scores.__getitem__, reverse=True)
            for key, loss in zip(ranked, Choice(k).losses([scores[key] for key in ranked]), strict=True):
                pairs[key].append(loss)
        found += [abs(a - b) for a, b in pairs.values() if max(a, b) > 0 and math.isfinite(a - b)]
    return sorted(found)[len(found) // 2] if found else 0.0


_NO_PLACE: tuple[LeftOutReason, None] = "rank", None


class LeftOut(NamedTuple):
    """A candidate that is not fed."""

    block: ContextBlock
    """The candidate as it was given."""
    position: int
    """Its first place among the candidates."""
    reason: LeftOutReason
    """Why it is not fed."""
    instead: int | None
    """The position of the candidate that has its place; None if none has."""


class Candidates(NamedTuple):
    """The distinct candidates of a request, without blank ones, in relevance order."""

    choice: Choice
    blocks: Sequence[ContextBlock]
    positions: Sequence[tuple[int, ...]]
    """The places of each candidate in the request."""
    places: Sequence[Sequence[int]]
    """For each place of the context, the best first, the indices of the candidates of which one may be fed there: the
    first one, or a twin."""
    losses: Sequence[float]
    """Of each place; see `Choice.losses`."""
    leaving: range
    """Of the places that relevance alone would fill, those that may stay empty; see `Choice.near_equals`."""
    entering: range
    """The places behind these that may be filled."""
    newer: Mapping[int, Sequence[int]]
    """The newer candidates of each that is superseded."""
    listed: Sequence[ContextBlock]
    """The request, if some of its blocks follow others; else nothing."""
    are_open: bool
    """True if the candidates that relevance alone would feed have twins, or may be exchanged."""

    @classmethod
    def checked(
        cls,
        choice: Choice,
        listed: Sequence[ContextBlock],
        on_error: Callable[[], object],
        order_locked: bool = False,
    ) -> Candidates:
        """Return the candidates of a request, with checked scores.

        Args:
            choice: The settings.
            listed: The request.
            on_error: Called while an exception of a caller's function is handled.
            order_locked: True if the request keeps its order.

        Raises:
            TypeError: `choice` is not a `Choice`.
            ValueError: The order is locked, or as for `Choice.losses`.
        """
        if not isinstance(choice, Choice):
            raise TypeError(f"choose must be a Choice or None, got {type(choice).__name__}")
        if order_locked:
            raise ValueError("choose must be None with order_locked=True: a choice pays by the order that it allows")
        blocks, positions = evidence_blocks(listed)
        scores = [block.score for block in blocks]
        losses = choice.losses(scores, [places[0] for places in positions])
        k = min(choice.k, len(blocks))
        places: Sequence[Sequence[int]] = single_places(len(blocks))
        newer: Mapping[int, Sequence[int]] = {}
        if choice.version is not None:
            try:
                standing, newer = newest_candidates(listed, positions, choice.version)
            except Exception:
                on_error()
            else:
                losses = choice.losses([scores[place] for place, _ in standing])
                places, k = [(i,) for _, i in standing], min(k, len(standing))
        if choice.twins:
            joined = joined_blocks(listed, positions)
            in_runs = joined | {i - 1 for i in joined}
            free = [place for place, (i,) in enumerate(places) if i not in in_runs and not blocks[i].pinned]
            try:
                groups = twin_groups(
                    [blocks[places[place][0]] for place in free], None if choice.twins is True else choice.twins
                )
            except Exception:
                on_error()
            else:
                alike = {free[group[0]]: [places[free[i]][0] for i in group] for group in groups}
                first = sorted(alike.keys() | {*range(len(places))}.difference(free))
                places, losses = [alike.get(place, places[place]) for place in first], [losses[i] for i in first]
                k = sum([place < k for place in first])
        runs = listed if [block for block in listed if block.follows is not None] else ()
        leaving, entering = choice.near_equals(losses, k)
        if choice.version is not None or callable(choice.twins):
            choice = replace(choice, twins=False, version=None)  # their work is done, and plans are pickled
        can_change = bool(entering) or len(places) < len(blocks)
        candidates = cls(choice, blocks, positions, places, losses, leaving, entering, newer, runs, can_change)
        usable = candidates.usable if can_change else ()
        if [i for i in usable if blocks[i].pinned] or (runs and candidates.joined(usable)):
            return candidates._replace(are_open=False)  # each would restrict the places of others
        return candidates

    @property
    def k(self) -> int:
        """Number of places that relevance alone would fill."""
        return self.entering.start

    @property
    def are_single(self) -> bool:
        """True if each candidate is the only one of its place: none has twins or is superseded."""
        return len(self.places) == len(self.blocks)

    @property
    def usable(self) -> list[int]:
        """Indices of the candidates that may be fed, ascending."""
        if self.are_single:
            return [*range(self.entering.stop)]
        return sorted([i for place in self.places[: self.entering.stop] for i in place])

    @property
    def first(self) -> list[int]:
        """Indices of the candidates that relevance alone would feed, ascending."""
        if self.are_single:
            return [*range(self.k)]
        return sorted([place[0] for place in self.places[: self.k]])

    def feeding(self, fed: Sequence[int]) -> tuple[Sequence[ContextBlock], Sequence[tuple[int, ...]], frozenset[int]]:
        """Return these candidates, their places in the request, and those that stay behind the one before them.

        The most relevant places come first, whichever twin or version stands there, unless that would tear a run.
        """
        blocks, joined = [self.blocks[i] for i in fed], self.joined(fed)
        if not self.are_single and not joined:
            ranks = {i: rank for rank, place in enumerate(self.places) for i in place}
            fed = sorted(fed, key=ranks.__getitem__)
            blocks = [self.blocks[i] for i in fed]
        return blocks, [self.positions[i] for i in fed], joined

    def joined(self, some: Sequence[int]) -> frozenset[int]:
        """Return which of some candidates, given by index, stay directly behind the one before them.

        That is as in a request that has these candidates alone, as often as this one has them.
        """
        if not self.listed:
            return frozenset()
        places = sorted([place for i in some for place in self.positions[i]])
        number = {place: n for n, place in enumerate(places)}
        firsts = [(number[self.positions[i][0]],) for i in some]
        return joined_blocks([self.listed[place] for place in places], firsts)

    def fed_at(self, positions: Collection[int]) -> list[int]:
        """Return the indices of the candidates at these positions, ascending."""
        fed = {*positions}
        return [i for i, places in enumerate(self.positions) if places[0] in fed]

    def entered(self, order: Collection[int]) -> tuple[int, ...]:
        """Return which of the fed positions relevance alone would have left out, ascending."""
        beyond = [self.positions[i][0] for place in self.places[self.k :] for i in place]
        return tuple(sorted({*order}.intersection(beyond)))

    def left_out(self, order: Collection[int]) -> tuple[LeftOut, ...]:
        """Return the candidates that are not fed, given the positions of the others.

        Those that enter have the places of those that leave the first places, in relevance order.
        """
        chosen, k, positions = {*self.fed_at(order)}, self.k, self.positions
        found: dict[int, tuple[LeftOutReason, int | None]] = {
            i: ("superseded", next((j for j in newer if j in chosen), None)) for i, newer in self.newer.items()
        }
        entering = iter([i for place in self.places[k:] for i in place if i in chosen])
        for place in self.places[:k]:
            if chosen.isdisjoint(place):
                found[place[0]] = "exchanged", next(entering, None)
        if not self.are_single:
            for place in self.places:
                standing = next((i for i in place if i in chosen), None)
                found |= dict.fromkeys(place[standing is None :], ("twin", standing))
        left = []
        for i, block in enumerate(self.blocks):
            if i not in chosen:
                reason, other = found.get(i, _NO_PLACE)
                left.append(LeftOut(block, positions[i][0], reason, None if other is None else positions[other][0]))
        return tuple(left)
