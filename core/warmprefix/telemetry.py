"""What a planner measures: counts, latencies, and calls of an observer."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from warmprefix.blocks import ContextBlock
from warmprefix.choice import Candidates
from warmprefix.errors import log_failure
from warmprefix.forks import fork_safe_lock
from warmprefix.plan import ContextPlan
from warmprefix.residency import EngineReport, FeedStats
from warmprefix.residency.capacity import DEFAULT_CAPACITY
from warmprefix.traces import RequestRecorder, recorder_from_environment

__all__ = [
    "LATENCY_BUCKETS",
    "LatencyHistogram",
    "LatencySnapshot",
    "NoObserver",
    "PlannerMetrics",
    "PlannerObserver",
    "PlannerStats",
]

LATENCY_BUCKETS = (
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
"""Upper bounds of the buckets in seconds, inclusive; the last bucket has no bound."""


class LatencySnapshot(NamedTuple):
    """The counts of a histogram at one moment."""

    counts: tuple[int, ...] = (0,) * (len(LATENCY_BUCKETS) + 1)
    """One per bucket, not cumulative."""
    seconds: float = 0.0
    """Sum of all observations."""

    @property
    def total(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class LatencyHistogram:
    """Thread-safe counts of durations; `observe` takes O(log buckets), well under a microsecond."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()  # re-entrant: a finalizer may call `observe` inside `observe`
        self.reset()

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        bucket = bisect_left(LATENCY_BUCKETS, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._seconds += seconds

    def snapshot(self) -> LatencySnapshot:
        """Return the counts and their sum."""
        with self._lock:
            return LatencySnapshot(tuple(self._counts), self._seconds)

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            self._counts = [0] * (len(LATENCY_BUCKETS) + 1)
            self._seconds = 0.0


_NO_LATENCY = LatencySnapshot()
_EMPTY_FEED = FeedStats()


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """A snapshot of a planner's counts; `exported_metrics.METRICS` and docs/telemetry.md describe each one.

    Counts before `plan_latency` only grow between two resets; fields after `store_latency` rise and fall.
    """

    plans: int = 0
    commits: int = 0
    abandons: int = 0
    late_commits: int = 0
    conflicts: int = 0
    withdrawn_commits: int = 0
    blank_blocks: int = 0
    reordered_plans: int = 0
    references: int = 0
    planned_tokens: int = 0
    resident_tokens: int = 0
    reference_tokens: int = 0
    note_tokens: int = 0
    """Tokens of labels, notes and references in all plans, counted or estimated."""
    candidate_blocks: int = 0
    """Candidates of all plans with `choose`, fed or not."""
    exchanged_blocks: int = 0
    """Candidates fed in place of one that relevance would have fed."""
    extra_blocks: int = 0
    twin_blocks: int = 0
    superseded_blocks: int = 0
    reports: int = 0
    reported_cached_tokens: int = 0
    reported_written_tokens: int = 0
    reported_uncached_tokens: int = 0
    compared_reports: int = 0
    predicted_cached_tokens: int = 0
    """The preamble's tokens included, as in `compared_cached_tokens`."""
    compared_cached_tokens: int = 0
    compared_prompt_tokens: int = 0
    stale_paths: int = 0
    disabled_plans: int = 0
    """Requests left in relevance order because their engine evidently does not cache."""
    choice_errors: int = 0
    """Exceptions of the functions of a `Choice`; the request was planned without them."""
    policy_errors: int = 0
    """Exceptions of the policy, whose request stayed in relevance order, or of the ghosts that choose touches."""
    store_errors: int = 0
    """Failed store operations; the request went on without de-duplication."""
    contested_blocks: int = 0
    shared_orders: int = 0
    published_orders: int = 0
    sharing_errors: int = 0
    """Orders that could not be shared or read, and transport failures; each only costs hits."""
    recorder_errors: int = 0
    """Exceptions of the recorder."""
    feed_errors: int = 0
    """Exceptions of the feed."""
    observer_errors: int = 0
    """Exceptions of the observer."""
    tokenizer_errors: int = 0
    """Counts of the caller's tokenizer that failed or made no sense; the estimate took their place."""
    plan_latency: LatencySnapshot = _NO_LATENCY
    """Of `plan` and `aplan`, with the store's part."""
    store_latency: LatencySnapshot = _NO_LATENCY
    """Of the store calls made by `plan`, `commit`, `abandon` and their async twins."""
    unsettled_conversations: int = 0
    """Those that the store must forget, because it failed; until then all of their blocks are sent."""
    touches: int = 0
    """Requests of one token that kept a path in the engine's cache."""
    touch_tokens: int = 0
    """Tokens that the engine has computed for them, as it reports."""
    queued_requests: int = 0
    """Announced requests that are not planned yet."""
    open_plans: int = 0
    fed_passages: int = 0
    """Different passages fed lately, in scopes that have chosen."""
    most_fed_share: float | None = None
    """Share of all fed passages that the most-fed 1 % of them make up: mean over scopes, weighted by requests."""
    scopes: int = 0
    retaining_scopes: int = 0
    """Scopes whose ghosts show that touches pay."""
    tree_nodes: int = 0
    disabled_scopes: int = 0
    prediction_error_mean: float = 0.0
    """In tokens."""
    prediction_error_p95: float = 0.0
    residency_confidence: float | None = None
    """Sum of the smaller of prediction and report over the sum of the larger; None before the first comparison."""
    capacity_tokens: int | None = DEFAULT_CAPACITY
    """Tokens of context that the engine is believed to hold, or None for no bound.

    Of several tenants and models, the smallest number.
    """
    capacity_source: str = "default"
    """Origin of that number: the planner's `argument`, the engine's `metrics` or `reports`, or the `default`; `reports
    against argument` if they replaced it, and `argument against reports` if they would have, but it is fixed."""
    engine_model: str = "prefix tree"
    """What explains the engine's reports best: a `prefix tree`, a `small cache` (or one that others use too),
    `checkpoints`, `leaves` (whole prompts), `replicas` (hits by chance), or `off`: it caches nothing."""
    profile: str = "full-attention"
    """Name of the cache profile that plans are for."""
    profile_source: str = "default"
    """Origin of the profile: the planner's `argument`, what the `engine` shows of itself, its `reports`, or the
    `default`."""
    feed: FeedStats = _EMPTY_FEED
    """Counts of the residency feed; empty without one."""


@runtime_checkable
class PlannerObserver(Protocol):
    """Called during a request, from any thread, so it must be quick; its exceptions are counted and dropped."""

    def planned(self, plan: ContextPlan, seconds: float) -> None:
        """Receive a new plan, and how long planning took."""

    def committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, seconds: float) -> None:
        """Receive a committed plan, the engine's report, and the result and duration of `commit`."""

    def abandoned(self, plan: ContextPlan) -> None:
        """Receive a plan that was open and is now abandoned."""


class NoObserver:
    """A `PlannerObserver` that does nothing."""

    def planned(self, plan: ContextPlan, seconds: float) -> None: ...
    def committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, seconds: float) -> None: ...
    def abandoned(self, plan: ContextPlan) -> None: ...


_FAILURES = {
    "choice": "a function of a choice failed",
    "feed": "residency feed failed",
    "observer": "observer failed",
    "policy": "ordering policy failed",
    "recorder": "request recorder failed",
    "store": "seen-block store failed",
}
"""Log message for each part whose failure a request survives."""


class PlannerMetrics:
    """Counts one planner's work, and passes it on to its observer and its recorder.

    Args:
        lock: The planner's lock, which guards `counts`.
        observer: Notified of each plan and its end; None for no observer.
        recorder: Receives each request; None for the one that the environment asks for.
    """

    def __init__(
        self, lock: threading.RLock, observer: PlannerObserver | None, recorder: RequestRecorder | None
    ) -> None:
        self._lock = lock
        self._observer: PlannerObserver = NoObserver() if observer is None else observer
        self.recorder = recorder_from_environment() if recorder is None else recorder
        """Receives each request; None without a recorder."""
        self.counts: Counter[str] = Counter()
        """The counters of `PlannerStats`, by name."""
        self.plan_latency = LatencyHistogram()
        self.store_latency = LatencyHistogram()

    def degrade(self, part: Literal["choice", "feed", "observer", "policy", "recorder", "store"]) -> None:
        """Count and log the exception being handled, as a failure of `part`.

        The request goes on without that part. The first failure of each part is logged as a warning, later ones at
        DEBUG.
        """
        import logging  # slow to import, and seldom needed

        name = f"{part}_errors"
        with self._lock:
            self.counts[name] += 1
            is_first = self.counts[name] == 1
        log_failure(logging.getLogger("warmprefix"), _FAILURES[part], first=is_first)

    def record_request(
        self,
        blocks: Sequence[ContextBlock],
        conversation: str | None,
        tenant: str | None,
        model: str | None,
        preamble: str | None,
        **choice: Any,
    ) -> None:
        """Pass a request to the recorder, if there is one, before it is planned; with its `k` and id if it has both."""
        if self.recorder is None:
            return
        try:
            self.recorder.record(
                tuple(blocks), conversation=conversation, tenant=tenant, model=model, preamble=preamble, **choice
            )
        except Exception:
            self.degrade("recorder")

    def count(self, name: str) -> None:
        """Add 1 to a counter. Called without the lock."""
        with self._lock:
            self.counts[name] += 1

    def count_plan(self, plan: ContextPlan, order: Sequence[int]) -> None:
        """Add a plan and its order of distinct blocks to the counters; the caller holds the lock."""
        counts = self.counts
        counts["plans"] += 1
        counts["planned_tokens"] += sum([planned.block.tokens for planned in plan.blocks])
        counts["resident_tokens"] += plan.resident_tokens
        counts["reordered_plans"] += [*order] != [*range(len(order))]
        counts["note_tokens"] += plan.note_tokens
        if plan.candidates is not None:
            self.count_choice(plan.candidates, plan.order)
        if not plan.opens_prompt:  # only then can there be references
            counts["references"] += len(plan.references)
            counts["reference_tokens"] += plan.reference_tokens

    def count_choice(self, candidates: Candidates, order: Collection[int]) -> None:
        """Add the positions of the candidates that are fed to the counters; the caller holds the lock."""
        counts, entered = self.counts, candidates.entered(order)
        counts["candidate_blocks"] += len(candidates.blocks)
        if not entered and candidates.are_single:  # what is not fed has no place
            return
        reasons = [left.reason for left in candidates.left_out(order)]
        exchanged = reasons.count("exchanged")
        counts["exchanged_blocks"] += exchanged
        counts["extra_blocks"] += len(entered) - exchanged
        counts["twin_blocks"] += reasons.count("twin")
        counts["superseded_blocks"] += reasons.count("superseded")

    def notify_planned(self, plan: ContextPlan, began: float) -> None:
        """Record the latency since `began`, and notify the observer."""
        seconds = time.perf_counter() - began
        self.plan_latency.observe(seconds)
        try:
            self._observer.planned(plan, seconds)
        except Exception:
            self.degrade("observer")

    def notify_committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, began: float) -> None:
        """Notify the observer of a commit and its result."""
        try:
            self._observer.committed(plan, report, recorded, time.perf_counter() - began)
        except Exception:
            self.degrade("observer")

    def notify_abandoned(self, plan: ContextPlan) -> None:
        """Notify the observer that an open plan was abandoned."""
        try:
            self._observer.abandoned(plan)
        except Exception:
            self.degrade("observer")

    def stats(self) -> dict[str, Any]:
        """Return the counts and latencies of `PlannerStats`; the caller holds the lock."""
        return {
            **self.counts,
            "plan_latency": self.plan_latency.snapshot(),
            "store_latency": self.store_latency.snapshot(),
        }

    def clear(self) -> None:
        """Set all counters and latencies to zero; the caller holds the lock."""
        self.counts.clear()
        self.plan_latency.reset()
        self.store_latency.reset()
