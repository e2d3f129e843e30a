"""Results of a replay, and estimates of their cost.

With placement `head`, tokens are those of context: what an order can decide on. With `tail` they are those of the
whole prompt behind the preamble: the conversation so far, this turn's context, and its question. Labels, notes and
references are counted apart from these, as note tokens. Gross savings are without note tokens, net savings with them.
"Today" is the same trace and cache if nothing is ordered, nothing de-duplicated and nothing written.
"""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix.plan import Placement
from warmprefix_tools.caches import CacheUse

__all__ = ["DEFAULT_POLICY", "TODAY", "ChoiceResult", "Estimates", "EvidenceCounts", "Misses", "Point", "ReplayResult"]

TODAY = "relevance"
"""Policy that stands for an application without warmprefix: nothing ordered, nothing de-duplicated."""

DEFAULT_POLICY = "coaccess"
"""Policy of a planner to which no other is given."""


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
    """Tokens of questions, which no other prompt can share; 0 with placement `head`."""

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
class EvidenceCounts:
    """Which passages a run fed, next to those that relevance feeds; all counts are over all requests."""

    fed: int
    """Passages in all contexts, a repeated one each time."""
    distinct: int
    """Different passages among them; a passage of two scopes counts twice."""
    most_fed: int
    """Those of `fed` that are one of the most-fed passages; see `most_fed_share`."""
    exchanged: int
    """Passages fed in place of one that relevance feeds."""
    extra: int
    """Passages fed beyond the places."""
    twins: int
    """Passages left out of the places because the request has a twin."""
    superseded: int
    """Passages left out because the request has a newer version."""
    gold: int = 0
    """Passages of gold, fed or not."""
    gold_fed: int = 0
    gold_requests: int = 0
    """Requests with gold."""
    gold_lost_requests: int = 0
    """Requests that lack a passage of gold which relevance feeds."""
    gold_won_requests: int = 0
    """Requests with a passage of gold which relevance does not feed."""
    gold_twins: int = 0
    """Passages of gold that relevance feeds, and a twin stands for."""

    @property
    def gold_share(self) -> float | None:
        """Share of the gold that was fed; None without gold."""
        return self.gold_fed / self.gold if self.gold else None

    @property
    def most_fed_share(self) -> float:
        """Share of all fed passages that the most-fed 1 % make up; 1 % of those that relevance feeds."""
        return self.most_fed / self.fed if self.fed else 0.0


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
    """Tokens found in the cache, without note tokens."""
    total_tokens: int
    """All tokens, without note tokens."""
    gained_requests: int
    """Requests that prefilled less than today, note tokens included."""
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
    """Requests that prefilled more than today, note tokens included."""
    worst_request_change: float = 0.0
    """Largest part by which a request prefilled more than today, note tokens included: 0.02 is 2 %."""
    untouched_requests: int = 0
    """Requests sent exactly as today; earlier ones may still make them gain or lose."""
    referring_requests: int = 0
    """Requests with a reference; none of them is reordered too."""
    policy_errors: int = 0
    """Requests served in relevance order because the policy failed."""
    tokenizer_errors: int = 0
    """Texts whose tokens were estimated because the tokenizer failed."""
    note_tokens: int = 0
    """Tokens of the labels, notes and references in all prompts; with `tail` also of those in the history."""
    saved_note_tokens: int = 0
    """Those of them that were found in the cache."""
    touches: int = 0
    """Requests that only kept something in the cache; the other counts are without them."""
    touch_tokens: int = 0
    """What they cost: prefilled tokens, and an answer of one token each."""
    profile_use: CacheUse | None = None
    """Tokens of all whole prompts in the cache of a profile, if there is one."""
    today_profile_use: CacheUse | None = None
    evidence: EvidenceCounts | None = None
    """What was fed, if the workload has candidates to choose from."""

    @property
    def hit_ratio(self) -> float:
        """Saved tokens divided by total tokens, both without note tokens; 0 without tokens."""
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
    def profile_saved_share(self) -> float:
        """Share of today's prefill in the profile's cache that is saved, net; 0 without a profile."""
        ours, today = self.profile_use, self.today_profile_use
        if ours is None or today is None or today.tokens == today.read:
            return 0.0
        return 1 - (ours.tokens - ours.read) / (today.tokens - today.read)

    @property
    def even_requests(self) -> int:
        """Requests that prefilled as much as today."""
        return self.requests - self.gained_requests - self.lost_requests

    @property
    def prefilled_note_tokens(self) -> int:
        """Tokens of labels, notes and references that the cache did not hold."""
        return self.note_tokens - self.saved_note_tokens

    @property
    def net_prefilled_tokens(self) -> int:
        """Tokens to compute: of prompts, labels, notes, references, and touches."""
        return self.prefilled_tokens + self.prefilled_note_tokens + self.touch_tokens

    @property
    def net_saved_tokens(self) -> int:
        """Tokens that need no prefill any more, less what warmprefix adds; negative for a loss."""
        return self.today_prefilled_tokens - self.net_prefilled_tokens

    @property
    def prefill_change(self) -> float:
        """Change of the prefill against today, note tokens included.

        -0.2 is a fifth less; 0 if today prefills nothing.
        """
        if not self.today_prefilled_tokens:
            return 0.0
        return self.net_prefilled_tokens / self.today_prefilled_tokens - 1


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One trace and one cache, with evidence chosen in view of the cache, and without."""

    relevance: ReplayResult
    """The first `k` in relevance order: the application as it is."""
    first: ReplayResult
    """The first `k`, ordered."""
    chosen: ReplayResult
    """Those that a planner chose, ordered."""
    chance: ReplayResult
    """The first `k` with as many exchanged and extra passages of the same tolerance, drawn by lot, ordered."""
    candidates: int
    """Most candidates of a request."""
    errors: tuple[str, ...] = ()
    """Why nothing could be chosen for some requests, which count with their first blocks."""

    @property
    def arms(self) -> dict[str, ReplayResult]:
        """The results by name, as people read it."""
        return {
            "relevance order": self.relevance,
            "the same, ordered": self.first,
            "chosen, ordered": self.chosen,
            "by chance, ordered": self.chance,
        }

    @property
    def change(self) -> float:
        """Change of the prefill against the first `k`, ordered; note tokens included."""
        before = self.first.net_prefilled_tokens
        return self.chosen.net_prefilled_tokens / before - 1 if before else 0.0


@dataclass(frozen=True, slots=True)
class Estimates:
    """Speed and prices of an engine, to estimate seconds and money from tokens.

    None stands for an unknown rate or price, and for an estimate that needs it. Labels, notes and references count.
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
        return self._seconds(result.net_prefilled_tokens, result.requests)

    def ttft_seconds_today(self, result: ReplayResult) -> float | None:
        """Return the same time today."""
        return self._seconds(result.today_prefilled_tokens, result.requests)

    def cost(self, result: ReplayResult) -> float | None:
        """Return the cost of all prompts together."""
        return self._cost(result.net_prefilled_tokens, result.saved_tokens + result.saved_note_tokens)

    def cost_today(self, result: ReplayResult) -> float | None:
        """Return the same cost today."""
        return self._cost(result.today_prefilled_tokens, result.today_saved_tokens)

    def _seconds(self, tokens: int, requests: int) -> float | None:
        return None if self.prefill_rate is None else tokens / self.prefill_rate / max(requests, 1)

    def _cost(self, prefilled: int, cached: int) -> float | None:
        return None if self.price is None else (prefilled * self.price + cached * self.cached_price) / 1e6
