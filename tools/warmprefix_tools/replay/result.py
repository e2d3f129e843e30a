"""What a replay found out.

With placement `head`, tokens are those of context: what an order can decide on. With `tail` they are those of the
whole prompt behind the preamble: the conversation so far, this turn's context, and its question.
"""

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
    """Of questions and references, which no other prompt can share; 0 with placement `head`."""

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
    """One trace through one policy and one cache; all counts are over all requests.

    "Today" is the same trace and cache if nothing is ordered and nothing de-duplicated.
    """

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
    """Requests of which less was prefilled than today. With placement `head`: of which the cache held more."""
    reordered_requests: int
    reference_tokens: int
    """Of blocks that were replaced by references, and so are in no prompt; 0 with placement `head`."""
    misses: Misses
    over_time: tuple[Point, ...]
    """At most 100 stretches of equal length, in order."""
    plan_us_p50: float
    """Microseconds of `ContextPlanner.plan`."""
    plan_us_p99: float
    commit_us_p50: float = 0.0
    """Microseconds of `ContextPlanner.commit`, where a planner learns: after the answer, so no request waits for it."""
    commit_us_p99: float = 0.0
    today_saved_tokens: int = 0
    today_total_tokens: int = 0
    """Sent then: more than `total_tokens` by what references spare."""
    lost_requests: int = 0
    """Requests of which more was prefilled than today."""
    referring_requests: int = 0
    """Requests with a reference; none of them is reordered too."""
    policy_errors: int = 0
    """Requests served in relevance order because the policy failed."""
    annotation_tokens: int = 0
    """Estimated, of the order annotations, one a reordered request. In no other count, although they are prefilled."""

    @property
    def hit_ratio(self) -> float:
        """Saved tokens by total tokens; 0 of nothing."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def prefilled_tokens(self) -> int:
        return self.total_tokens - self.saved_tokens

    @property
    def today_hit_ratio(self) -> float:
        return self.today_saved_tokens / self.today_total_tokens if self.today_total_tokens else 0.0

    @property
    def today_prefilled_tokens(self) -> int:
        return self.today_total_tokens - self.today_saved_tokens

    @property
    def even_requests(self) -> int:
        """Requests of which as much was prefilled as today."""
        return self.requests - self.gained_requests - self.lost_requests

    @property
    def untouched_requests(self) -> int:
        """Requests sent exactly as today. What was sent before may still make them gain or lose."""
        return self.requests - self.reordered_requests - self.referring_requests

    @property
    def prefill_change(self) -> float:
        """What is prefilled against today, order annotations included: -0.2 is a fifth less; 0 if nothing was."""
        if not self.today_prefilled_tokens:
            return 0.0
        return (self.prefilled_tokens + self.annotation_tokens) / self.today_prefilled_tokens - 1
