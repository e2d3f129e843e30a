"""Ghosts: bounded mirrors of the cache under other settings of one constant, which show the best setting of a scope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["GhostSample", "Ghosts"]

C = TypeVar("C")

_ALL_SEEN = 1_024
"""Requests after which only a sample is seen."""
_LEAST_HELD = 256
"""Requests that a mirror of the sample can hold: with fewer it is no model of the whole."""
_MOST_RATE = 8


class GhostSample:
    """The requests of one scope that its ghosts see: the first ones, then all whose order begins with certain blocks.

    Requests that compete for the same part of the cache are seen together, so a mirror of the sample is a model of the
    whole, smaller by the rate (SHARDS, Waldspurger et al. 2015). The larger the cache, the fewer requests are seen.
    """

    __slots__ = ("_requests", "rate")

    def __init__(self) -> None:
        self._requests = 0
        self.rate = 1
        """One request in this many is seen."""

    def fit(self, capacity_tokens: int, request_tokens: float) -> int:
        """Choose the rate for a cache and the mean length of requests; return the part of the cache for the sample."""
        held = capacity_tokens / max(request_tokens, 1)
        self.rate = 1
        while self._requests > _ALL_SEEN and self.rate < _MOST_RATE and held >= 2 * self.rate * _LEAST_HELD:
            self.rate *= 2
        return max(capacity_tokens // self.rate, 1)

    def sees(self, first: bytes) -> bool:
        """Count a request whose order begins with the block `first`; return True if the ghosts see it."""
        self._requests += 1
        return int.from_bytes(first[-4:], "big") % self.rate == 0


class Ghosts(Generic[C]):
    """Scores of the candidates for one constant, where older requests count less.

    Deterministic: the scores are sums of what each candidate's mirror would have saved.

    >>> ghosts = Ghosts((0, 30))
    >>> ghosts.score([0.5, 0.75])
    >>> ghosts.best
    30
    """

    def __init__(
        self, candidates: Sequence[C], *, decay: float = 0.99, margin: float = 0.02, lead: float = 0.0
    ) -> None:
        """Start with the first candidate, the default.

        Args:
            candidates: The values to choose from.
            decay: Weight of the earlier scores at each request.
            margin: Share by which another candidate must be better than the default.
            lead: Score that the default begins with, as if it alone had saved this many whole requests.
        """
        self.candidates = candidates
        self.best = candidates[0]
        self._decay = decay
        self._margin = margin
        self._scores = [lead, *[0.0] * (len(candidates) - 1)]

    def score(self, saved: Sequence[float]) -> None:
        """Add what each candidate would have saved of a request, as a share of its tokens."""
        self._scores = [self._decay * score + more for score, more in zip(self._scores, saved, strict=True)]
        default, *others = self._scores
        most = max(others, default=0.0)
        is_better = most > default + self._margin * abs(default)
        self.best = self.candidates[1 + others.index(most) if is_better else 0]
