"""Results of a replay, and estimates of their cost.

With placement `head`, tokens are those of context: what an order can decide on. With `tail` they are those of the
whole prompt behind the preamble: the conversation so far, this turn's context, and its question. "Today" is the same
trace and cache if nothing is ordered and nothing de-duplicated.
"""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix.plan import Placement

__all__ = ["TODAY", "Estimates", "Misses", "Point", "ReplayResult"]

TODAY = "relevance"
"""Policy that stands for an application without warmprefix: nothing ordered, nothing de-duplicated."""


@dataclass(frozen=True, slots=True)
class Misses:
    """Prefilled tokens, by the reason why the cache did not hold them."""

    new: int = 0
    """Tokens of blocks that no earlier request of the scope had."""
    order: int = 0
    """Tokens of blocks that came before, but never behind this prefix."""
    evicted: int = 0
    """Tokens of blocks that the cache held behind this prefix, and has evicted since."""
    other: int = 0
    """Tokens of questions and references, which no other prompt can share; 0 with placement `head`."""

    @property
    def total(self) -> int:
        return self.new + self.order + self.evicted + self.other


@dataclass(frozen=True, slots=True)
class Point:
    """A stretch of the trace, and what its requests saved."""

    requests: int
    """Requests from the start of the trace to the end of the stretch."""
    saved_tokens: int
    """Tokens saved within the stretch."""
    total_tokens: int
    """Tokens within the stretch."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One trace through one policy and one cache; all counts are over all requests."""

    trace: str
    policy: str
    capacity_tokens: int | None
    """Capacity of the cache; None for no bound."""
    k: int
    """Most blocks of a request."""
    placement: Placement
    requests: int
    saved_tokens: int
    """Tokens found in the cache."""
    total_tokens: int
    gained_requests: int
    """Requests that prefilled less than today. With placement `head`, the cache held more of them."""
    reordered_requests: int
    reference_tokens: int
    """Tokens of blocks that references replaced, so that they are in no prompt; 0 with placement `head`."""
    misses: Misses
    over_time: tuple[Point, ...]
    """At most 100 stretches of equal length, the last one perhaps shorter."""
    plan_us_p50: float
    """Median time of `ContextPlanner.plan`, in microseconds; today's takes none."""
    plan_us_p99: float
    commit_us_p50: float = 0.0
    """Median time of `ContextPlanner.commit`, which comes after the answer."""
    commit_us_p99: float = 0.0
    today_saved_tokens: int = 0
    today_total_tokens: int = 0
    """Tokens sent today: more than `total_tokens` by what references spare."""
    lost_requests: int = 0
    """Requests that prefilled more than today."""
    referring_requests: int = 0
    """Requests with a reference; none of them is reordered too."""
    policy_errors: int = 0
    """Requests served in relevance order because the policy failed."""
    annotation_tokens: int = 0
    """Estimated tokens of the order annotations, one per reordered request. No other count includes them, although
    they are prefilled."""

    @property
    def hit_ratio(self) -> float:
        """Saved tokens divided by total tokens; 0 without tokens."""
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
        """Requests that prefilled as much as today."""
        return self.requests - self.gained_requests - self.lost_requests

    @property
    def untouched_requests(self) -> int:
        """Requests sent exactly as today; earlier ones may still make them gain or lose."""
        return self.requests - self.reordered_requests - self.referring_requests

    @property
    def prefill_change(self) -> float:
        """Change of the prefill against today, order annotations included.

        -0.2 is a fifth less; 0 if today prefills nothing.
        """
        if not self.today_prefilled_tokens:
            return 0.0
        return (self.prefilled_tokens + self.annotation_tokens) / self.today_prefilled_tokens - 1


@dataclass(frozen=True, slots=True)
class Estimates:
    """Speed and prices of an engine, to estimate seconds and money from tokens.

    None stands for an unknown rate or price, and for an estimate that needs it. Order annotations count as prefilled.
    The preamble, and with placement `head` the history and the question, are left out: they cost the same today.
    """

    prefill_rate: float | None = None
    """Tokens per second."""
    price: float | None = None
    """Price per million prefilled tokens."""
    cached_price: float = 0.0
    """Price per million tokens found in the cache."""

    def ttft_seconds(self, result: ReplayResult) -> float | None:
        """Return the mean time of a request's prefill on an idle engine."""
        return self._seconds(result.prefilled_tokens + result.annotation_tokens, result.requests)

    def ttft_seconds_today(self, result: ReplayResult) -> float | None:
        """Return the same time today."""
        return self._seconds(result.today_prefilled_tokens, result.requests)

    def cost(self, result: ReplayResult) -> float | None:
        """Return the cost of all prompts together."""
        return self._cost(result.prefilled_tokens + result.annotation_tokens, result.saved_tokens)

    def cost_today(self, result: ReplayResult) -> float | None:
        """Return the same cost today."""
        return self._cost(result.today_prefilled_tokens, result.today_saved_tokens)

    def _seconds(self, tokens: int, requests: int) -> float | None:
        return None if self.prefill_rate is None else tokens / self.prefill_rate / max(requests, 1)

    def _cost(self, prefilled: int, cached: int) -> float | None:
        return None if self.price is None else (prefilled * self.price + cached * self.cached_price) / 1e6
