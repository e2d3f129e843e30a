"""The exported metrics, each declared once, and the planners that they are read from."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

from warmprefix.forks import fork_safe_lock
from warmprefix.residency import FeedStats
from warmprefix.telemetry import PlannerStats

__all__ = ["METRICS", "Metric", "PlannerWithStats", "RegisteredPlanners"]

_EMPTY_FEED = FeedStats()


class Metric(NamedTuple):
    """One metric: a number, one number per value of the label `reason`, or a histogram."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """Without a prefix, and without the suffixes `_total` and `_seconds` of Prometheus."""
    unit: str
    """In UCUM, as OpenTelemetry writes units; `s` for a histogram, whose bounds are `LATENCY_BUCKETS`."""
    description: str
    field: str
    """Path of the attribute of `PlannerStats`; of a metric with reasons, empty."""
    reasons: Mapping[str, str] = {}
    """For each value of the label `reason`, the path of its attribute."""

    def samples(self, stats: PlannerStats) -> list[tuple[dict[str, str], Any]]:
        """Return labels and value of each sample; none where nothing is measured."""
        if self.field.startswith("feed.") and stats.feed == _EMPTY_FEED:
            return []  # otherwise a planner without a feed would look like one whose feed is disconnected
        if self.reasons:
            return [({"reason": reason}, attrgetter(path)(stats)) for reason, path in self.reasons.items()]
        value = attrgetter(self.field)(stats)
        return [] if value is None else [({}, value)]


def _counter(name: str, unit: str, description: str, field: str = "") -> Metric:
    return Metric("counter", name, unit, description, field or name)


def _gauge(name: str, unit: str, description: str, field: str = "") -> Metric:
    return Metric("gauge", name, unit, description, field or name)


_MEAN_ERROR = "Mean absolute error of predicted cached tokens, over the last 1,024 compared reports."
_CONFIDENCE = "Agreement of prediction and report over those reports, 0 to 1; absent before the first one."
_CAPACITY = "Tokens of context that the engine is believed to hold; absent without a bound."
_MOST_FED = "Share of these that the most-fed 1 % make up, each time counted; absent before the first one."
_CONNECTED = "1 while the feed has every publisher's complete state, else 0; absent before the first event."
_WIPES = "Times that a publisher's state was discarded: it restarted, or a gap could not be filled."
_REASONS = {
    "choice": "choice_errors",
    "disabled_scope": "disabled_plans",
    "feed": "feed_errors",
    "observer": "observer_errors",
    "policy": "policy_errors",
    "recorder": "recorder_errors",
    "sharing": "sharing_errors",
    "store": "store_errors",
    "tokenizer": "tokenizer_errors",
}
"""Values of the label `reason`, and the field of each."""

METRICS = (
    # -- requests
    _counter("plans", "{plan}", "Requests whose context was planned."),
    _counter("commits", "{plan}", "Plans whose prompt the model received."),
    _counter("abandons", "{plan}", "Plans whose prompt the model did not receive: the call failed or was cancelled."),
    _counter("late_commits", "{plan}", "Commits of plans that had ended or expired; nothing is learned from them."),
    _counter("conflicts", "{plan}", "Commits whose blocks do not count as seen: lease expired, or another plan won."),
    _counter("withdrawn_commits", "{plan}", "Commits undone because the call was cancelled before its answer."),
    _counter("blank_blocks", "{block}", "Blocks left out of plans because their text is empty or blank."),
    _counter("reordered_plans", "{plan}", "Plans whose order differs from the retriever's."),
    _gauge("queued_requests", "{request}", "Announced requests that are not planned yet."),
    _gauge("open_plans", "{plan}", "Plans that are neither committed nor abandoned yet."),
    # -- tokens
    _counter("planned_tokens", "{token}", "Tokens of context in all plans, including those saved by references."),
    _counter("resident_tokens", "{token}", "Planned tokens predicted to be in the engine's prefix cache."),
    _counter("reference_tokens", "{token}", "Planned tokens not sent again because the conversation holds them."),
    _counter("note_tokens", "{token}", "Tokens of labels, notes and references in all plans, counted or estimated."),
    _counter("references", "{block}", "Blocks sent as a reference instead of their text."),
    _counter("contested_blocks", "{block}", "Seen blocks sent again because another plan's outcome was still open."),
    # -- evidence chosen in view of the cache
    _counter("candidate_blocks", "{block}", "Candidates of all requests that chose among them, fed or not."),
    _counter("exchanged_blocks", "{block}", "Candidates fed in place of one that relevance alone would have fed."),
    _counter("extra_blocks", "{block}", "Candidates fed beyond the places, because the cache holds them."),
    _counter("twin_blocks", "{block}", "Candidates left out because the request has a twin of them."),
    _counter("superseded_blocks", "{block}", "Candidates left out because the request has a newer version of them."),
    _gauge("fed_passages", "{passage}", "Different passages fed lately, in scopes that have chosen."),
    _gauge("most_fed_ratio", "1", _MOST_FED, "most_fed_share"),
    # -- reports of the engine
    _counter("reports", "{answer}", "Answers for which the engine reported the number of cached tokens."),
    _counter("reported_cached_tokens", "{token}", "Prompt tokens reported as cached, over all reports."),
    _counter("reported_written_tokens", "{token}", "Prompt tokens reported as written to the cache."),
    _counter("reported_uncached_tokens", "{token}", "All other prompt tokens of these reports."),
    _counter("compared_reports", "{answer}", "Reports on answers whose cached tokens had been predicted."),
    _counter("predicted_cached_tokens", "{token}", "Prompt tokens predicted as cached, over all compared reports."),
    _counter("compared_cached_tokens", "{token}", "Prompt tokens reported as cached, over all compared reports."),
    _counter("compared_prompt_tokens", "{token}", "Prompt tokens, over all compared reports that include them."),
    _gauge("prediction_error_mean_tokens", "{token}", _MEAN_ERROR, "prediction_error_mean"),
    _gauge("prediction_error_p95_tokens", "{token}", "95th percentile of that error.", "prediction_error_p95"),
    _gauge("residency_confidence_ratio", "1", _CONFIDENCE, "residency_confidence"),
    _counter("stale_paths", "{path}", "Paths held shorter by the engine than predicted; the rest counts as evicted."),
    _counter("touches", "{request}", "Requests of one token that kept a path in the engine's cache."),
    _counter("touch_tokens", "{token}", "Tokens that the engine has computed for these requests, as it reports."),
    # -- degradation
    Metric(
        "counter", "fallbacks", "{fallback}", "Requests that went on without a failed or disabled part.", "", _REASONS
    ),
    _gauge("disabled_scopes", "{scope}", "Scopes without ordering because their engine evidently does not cache."),
    _gauge("unsettled_conversations", "{conversation}", "Conversations that the store must forget, because it failed."),
    # -- learned state
    _counter("shared_orders", "{order}", "Orders learned from other planners."),
    _counter("published_orders", "{order}", "Orders that other planners can learn."),
    _gauge("scopes", "{scope}", "Scopes (tenant, model, preamble) with learned state."),
    _gauge("retaining_scopes", "{scope}", "Scopes whose ghosts show that touches pay."),
    _gauge("tree_nodes", "{node}", "Nodes of all prefix trees."),
    _gauge("capacity_tokens", "{token}", _CAPACITY),
    # -- the feed of KV events
    _gauge("feed_connected", "", _CONNECTED, "feed.connected"),
    _gauge("feed_sources", "{source}", "Publishers of KV events seen so far.", "feed.sources"),
    _gauge("feed_lag", "s", "Time between the last batch's own timestamp and its application.", "feed.lag"),
    _counter("feed_events", "{event}", "KV events applied.", "feed.events"),
    _counter("feed_gaps", "{gap}", "Times that batches of KV events were missing.", "feed.gaps"),
    _counter("feed_replayed_batches", "{batch}", "Batches of KV events received by replay.", "feed.replayed"),
    _counter("feed_wipes", "{wipe}", _WIPES, "feed.wipes"),
    _counter("feed_malformed_messages", "{message}", "Messages that could not be decoded.", "feed.malformed"),
    _counter("feed_unknown_events", "{event}", "KV events of an unknown type or parent block.", "feed.unknown"),
    _counter("feed_dropped", "{item}", "KV blocks and prompts dropped to stay within bounds.", "feed.dropped"),
    _counter("feed_unmapped_prompts", "{prompt}", "Prompts whose context blocks were not found.", "feed.unmapped"),
    _counter("feed_failures", "{failure}", "Failures after which the feed started over.", "feed.failures"),
    _gauge("feed_kv_blocks", "{block}", "KV blocks that engines hold.", "feed.kv_blocks"),
    _gauge("feed_prompts", "{prompt}", "Prompts remembered to find their blocks.", "feed.prompts"),
    # -- durations
    Metric("histogram", "plan_duration", "s", "Time to plan one request, with the store's part.", "plan_latency"),
    Metric("histogram", "store_duration", "s", "Time of one call to the store of conversations.", "store_latency"),
)

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = {"planner", "reason", "le"}


class PlannerWithStats(Protocol):
    """The part of a `ContextPlanner` that exporters use."""

    def stats(self) -> PlannerStats: ...


class RegisteredPlanners:
    """Planners by name, held weakly: a planner that is gone has no samples, and its name is free again."""

    def __init__(self) -> None:
        self._registered: dict[str, tuple[weakref.ref[PlannerWithStats], dict[str, str]]] = {}
        self._lock = fork_safe_lock()

    def add(self, planner: PlannerWithStats, name: str, labels: Mapping[str, str] | None = None) -> None:
        """Register a planner; raise ValueError for a name in use or a label that is not allowed."""
        for label in labels or ():
            if label in _RESERVED_LABELS or label.startswith("__") or not _LABEL.fullmatch(label):
                raise ValueError(
                    "labels must be named with letters, digits and _, without a leading __ and other than "
                    f"planner, reason and le, got {label!r}"
                )
        with self._lock:
            holder = self._registered[name][0]() if name in self._registered else None
            if holder is not None and holder is not planner:
                raise ValueError(f"name must differ from those of other registered planners, got {name!r}")
            self._registered[name] = weakref.ref(planner), {"planner": name, **(labels or {})}

    def discard(self, planner: PlannerWithStats) -> None:
        """Unregister a planner; does nothing for one that is not registered."""
        with self._lock:
            for name, (reference, _) in list(self._registered.items()):
                if reference() is planner:
                    del self._registered[name]

    def stats(self) -> list[tuple[dict[str, str], PlannerStats]]:
        """Return labels and counts of all registered planners that still exist."""
        with self._lock:
            planners = [(labels, reference()) for reference, labels in self._registered.values()]
        return [(labels, planner.stats()) for labels, planner in planners if planner is not None]
