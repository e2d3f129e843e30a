"""What a replay found out."""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix.plan import Placement

__all__ = ["Misses", "Point", "ReplayResult"]


@dataclass(frozen=True, slots=True)
class Misses:
    """Prefilled tokens by the reason why the cache did not hold them."""

    new: int = 0
    """Of blocks that no earlier request of the scope had."""
    order: int = 0
    """Of blocks that came before, but never behind this prefix."""
    evicted: int = 0
    """Of blocks that the cache held behind this prefix, and has evicted since."""
    other: int = 0
    """Of questions and answers, which no other conversation can share; 0 with placement `head`."""

    @property
    def total(self) -> int:
        return self.new + self.order + self.evicted + self.other


@dataclass(frozen=True, slots=True)
class Point:
    """A stretch of the trace: what its requests saved."""

    requests: int
    """Requests since the start of the trace, to the end of the stretch."""
    saved_tokens: int
    """Within the stretch."""
    total_tokens: int
    """Within the stretch."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One trace through one policy and one cache. Tokens are those of context, over all requests."""

    trace: str
    policy: str
    capacity_tokens: int | None
    """Of the cache; None for no bound."""
    k: int
    """Most blocks of a request."""
    placement: Placement
    requests: int
    saved_tokens: int
    """Found in the cache."""
    total_tokens: int
    gained_requests: int
    """Requests of which the cache held more than it would have in relevance order."""
    reordered_requests: int
    reference_tokens: int
    """Of blocks that were replaced by references, and so are in no prompt; 0 with placement `head`."""
    misses: Misses
    over_time: tuple[Point, ...]
    """At most 100 stretches of equal length, in order."""
    plan_us_p50: float
    plan_us_p99: float

    @property
    def hit_ratio(self) -> float:
        """Saved tokens by total tokens; 0 of nothing."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def prefilled_tokens(self) -> int:
        return self.total_tokens - self.saved_tokens
