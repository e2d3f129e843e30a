"""Choosing which of more candidates than places are fed: the settings, and what a plan says of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from warmprefix.blocks import ContextBlock
from warmprefix.errors import check_count

__all__ = ["Candidates", "Choice", "LeftOut", "LeftOutReason"]

LeftOutReason = Literal["rank", "exchanged"]
"""Why a candidate is not fed. `"rank"`: there was no place for it. `"exchanged"`: one that costs less has its place."""

Scores = Literal["similarity", "distance"]

_KEPT = 3


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
    within: float = 0.3
    """How far below rank `k` a candidate may score, as a share of the spread between the scores of rank 1 and rank `k`.
    So it means the same for every scale of scores. One that leaves may score a third of that above rank `k`."""
    extra: int = 0
    """Most candidates beyond `k` places, with the same tolerance, where the engine holds them: nothing to compute."""
    scores: Scores = "similarity"
    """What scores are: `"similarity"`, where higher is better, or `"distance"`."""
    most: float = 0.05
    """Most requests of a scope in which one passage may enter by choice, as a share; older requests count less."""

    def __post_init__(self) -> None:
        check_count("k", self.k)
        for name, least, count in (("keep", 0, self.keep), ("extra", 0, self.extra)):
            if (isinstance(count, bool) or not isinstance(count, int)) and (name, count) != ("keep", None):
                raise TypeError(f"{name} must be an int{' or None' * (name == 'keep')}, got {type(count).__name__}")
            if count is not None and count < least:
                raise ValueError(f"{name} must be {least} or more, got {count}")
        if self.keep is not None and self.keep > self.k:
            raise ValueError(f"keep must be at most k, which is {self.k}, got {self.keep}")
        for name, share, greatest in (("within", self.within, math.inf), ("most", self.most, 1)):
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise TypeError(f"{name} must be a number, got {type(share).__name__}")
            if not 0 <= share <= greatest:
                raise ValueError(f"{name} must be from 0 to {greatest}, got {share}")
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
        checked: list[float] = []
        for place, score in enumerate(scores):
            position = place if positions is None else positions[place]
            try:
                is_number = not isinstance(score, bool) and math.isfinite(score)
            except (TypeError, ValueError, OverflowError):
                is_number = False
            if not is_number:
                raise ValueError(f"candidate {position} must have a finite score to choose by, got {score!r}")
            value = float(score) if self.scores == "similarity" else -float(score)
            if checked and value > checked[-1]:
                wanted = "descending" if self.scores == "similarity" else "ascending"
                raise ValueError(
                    f"candidates must come with {wanted} scores, but candidate {position} has {score!r} "
                    f"behind {scores[place - 1]!r}"
                )
            checked.append(value)
        if not checked:
            return []
        last = checked[: self.k][-1]
        spread = checked[0] / 4 - last / 4  # a quarter, so that no difference overflows
        return [
            (last / 4 - score / 4) / spread
            if spread
            else (0.0 if score == last else math.copysign(math.inf, last - score))
            for score in checked
        ]


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
    losses: Sequence[float]
    """See `Choice.losses`."""

    @classmethod
    def checked(
        cls, choice: Choice, blocks: Sequence[ContextBlock], positions: Sequence[tuple[int, ...]]
    ) -> Candidates:
        """Return distinct candidates with checked scores; see `Choice.losses`."""
        if not isinstance(choice, Choice):
            raise TypeError(f"choose must be a Choice or None, got {type(choice).__name__}")
        losses = choice.losses([block.score for block in blocks], [places[0] for places in positions])
        return cls(choice, blocks, positions, losses)

    @property
    def reach(self) -> int:
        """Number of first candidates that may be fed at all."""
        k, within = self.choice.k, self.choice.within
        return next((i for i, loss in enumerate(self.losses) if i >= k and not loss <= within), len(self.losses))

    def left_out(self, fed: Sequence[int]) -> tuple[LeftOut, ...]:
        """Return the candidates that are not fed, given the indices of the others, ascending.

        Those that enter have the places of those that leave the first `k`, in relevance order.
        """
        k, others = self.choice.k, {*fed}
        leaving = [i for i in range(min(k, len(self.blocks))) if i not in others]
        places = dict(zip(leaving, [i for i in fed if i >= k], strict=False))
        return tuple(
            [
                LeftOut(block, self.positions[i][0], "rank", None)
                if i >= k
                else LeftOut(block, self.positions[i][0], "exchanged", self.positions[places[i]][0])
                for i, block in enumerate(self.blocks)
                if i not in others
            ]
        )
