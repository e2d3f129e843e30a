"""What of a planner's counts is a metric, under which name: one list for every system that metrics are sent to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from warmprefix.residency.base import FeedStats
from warmprefix.telemetry.latency import LatencySnapshot
from warmprefix.telemetry.stats import PlannerStats

__all__ = ["DURATIONS", "MEASURES", "Duration", "Measure"]

_NOTHING_HEARD = FeedStats()


class Measure(NamedTuple):
    """A number, or one for each value of the label `reason`."""

    name: str
    """Without prefix, and without `_total` and `_seconds`, which Prometheus wants."""
    kind: Literal["counter", "gauge"]
    unit: str
    """As UCUM writes it, which OpenTelemetry does."""
    help: str
    read: Callable[[PlannerStats], float | None] | Mapping[str, Callable[[PlannerStats], float]]
    """None: there is nothing to tell."""

    def samples(self, stats: PlannerStats) -> list[tuple[dict[str, str], float]]:
        """What there is to tell of it, with the labels."""
        if callable(self.read):
            value = self.read(stats)
            return [] if value is None else [({}, value)]
        return [({"reason": reason}, read(stats)) for reason, read in self.read.items()]


class Duration(NamedTuple):
    """How long something takes, in seconds, with the bounds of `LATENCY_BUCKETS`."""

    name: str
    help: str
    read: Callable[[PlannerStats], LatencySnapshot]


def _feed(read: Callable[[FeedStats], float]) -> Callable[[PlannerStats], float | None]:
    """Of a feed, as soon as it has heard anything: a planner without one shall not look like one that is cut off."""
    return lambda stats: None if stats.feed == _NOTHING_HEARD else read(stats.feed)


DURATIONS = (
    Duration(
        "plan_duration", "Time to plan one request, what the store took of it included.", lambda s: s.plan_latency
    ),
    Duration(
        "store_duration",
        "Time that one call to the store of conversations took of a request.",
        lambda s: s.store_latency,
    ),
)

MEASURES = (
    # -- requests
    Measure("plans", "counter", "{plan}", "Requests whose context was planned.", lambda s: s.plans),
    Measure("commits", "counter", "{plan}", "Plans whose prompt the model saw.", lambda s: s.commits),
    Measure(
        "abandons",
        "counter",
        "{plan}",
        "Plans whose prompt the model did not see: the call failed or was cancelled.",
        lambda s: s.abandons,
    ),
    Measure(
        "late_commits",
        "counter",
        "{plan}",
        "Commits of plans that had ended, or were too many to wait for: nothing is learned from them.",
        lambda s: s.late_commits,
    ),
    Measure(
        "conflicts",
        "counter",
        "{plan}",
        "Commits whose blocks do not count as seen: the lease timed out, or another plan came first.",
        lambda s: s.conflicts,
    ),
    Measure(
        "withdrawn_commits",
        "counter",
        "{plan}",
        "Commits taken back, since the call was cancelled before the application had its answer.",
        lambda s: s.withdrawn_commits,
    ),
    Measure(
        "blank_blocks",
        "counter",
        "{block}",
        "Blocks left out of plans, since their text is empty or blank.",
        lambda s: s.blank_blocks,
    ),
    Measure(
        "reordered_plans",
        "counter",
        "{plan}",
        "Plans whose order differs from the retriever's.",
        lambda s: s.reordered_plans,
    ),
    Measure(
        "open_plans", "gauge", "{plan}", "Plans that were neither committed nor abandoned yet.", lambda s: s.open_plans
    ),
    # -- tokens
    Measure(
        "planned_tokens",
        "counter",
        "{token}",
        "Tokens of context in all plans, those that references spare included.",
        lambda s: s.planned_tokens,
    ),
    Measure(
        "resident_tokens",
        "counter",
        "{token}",
        "Of the planned tokens, those that the engine was predicted to hold in its prefix cache.",
        lambda s: s.resident_tokens,
    ),
    Measure(
        "reference_tokens",
        "counter",
        "{token}",
        "Of the planned tokens, those not sent again, since the conversation holds them.",
        lambda s: s.reference_tokens,
    ),
    Measure(
        "references",
        "counter",
        "{block}",
        "Blocks that a reference stands for instead of their text.",
        lambda s: s.references,
    ),
    Measure(
        "contested_blocks",
        "counter",
        "{block}",
        "Blocks sent again though seen, because another plan's outcome could still void that.",
        lambda s: s.contested_blocks,
    ),
    # -- what the engine says
    Measure(
        "reports",
        "counter",
        "{answer}",
        "Answers for which the engine told how many tokens were cached.",
        lambda s: s.reports,
    ),
    Measure(
        "reported_cached_tokens",
        "counter",
        "{token}",
        "Prompt tokens that the engine said were cached, over all reports.",
        lambda s: s.reported_cached_tokens,
    ),
    Measure(
        "compared_reports",
        "counter",
        "{answer}",
        "Reports on answers for which the cached tokens had been predicted.",
        lambda s: s.compared_reports,
    ),
    Measure(
        "predicted_cached_tokens",
        "counter",
        "{token}",
        "Prompt tokens predicted to be cached, over all compared reports.",
        lambda s: s.predicted_cached_tokens,
    ),
    Measure(
        "compared_cached_tokens",
        "counter",
        "{token}",
        "Prompt tokens that the engine said were cached, over all compared reports.",
        lambda s: s.compared_cached_tokens,
    ),
    Measure(
        "compared_prompt_tokens",
        "counter",
        "{token}",
        "Tokens of the whole prompts, over all compared reports that told.",
        lambda s: s.compared_prompt_tokens,
    ),
    Measure(
        "prediction_error_mean_tokens",
        "gauge",
        "{token}",
        "Mean difference of predicted and reported cached tokens, over the last 1,024 compared reports.",
        lambda s: s.prediction_error_mean,
    ),
    Measure(
        "prediction_error_p95_tokens",
        "gauge",
        "{token}",
        "95th percentile of that difference.",
        lambda s: s.prediction_error_p95,
    ),
    Measure(
        "residency_confidence_ratio",
        "gauge",
        "1",
        "How far prediction and report agree over those reports, 0 to 1; absent before there is one.",
        lambda s: s.residency_confidence,
    ),
    Measure(
        "stale_paths",
        "counter",
        "{path}",
        "Times that the engine held less of a path than predicted, so that the rest was taken for evicted.",
        lambda s: s.stale_paths,
    ),
    # -- what goes on without
    Measure(
        "fallbacks",
        "counter",
        "{fallback}",
        "Times that a request went on without a part of the planner, by the part that failed or was off.",
        {
            "disabled_scope": lambda s: s.disabled_plans,
            "feed": lambda s: s.feed_errors,
            "notice": lambda s: s.lost_notices,
            "observer": lambda s: s.observer_errors,
            "policy": lambda s: s.policy_errors,
            "recorder": lambda s: s.recorder_errors,
            "sharing": lambda s: s.sharing_errors,
            "store": lambda s: s.store_errors,
        },
    ),
    Measure(
        "disabled_scopes",
        "gauge",
        "{scope}",
        "Scopes in which ordering is off, because their engine evidently does not cache.",
        lambda s: s.disabled_scopes,
    ),
    Measure(
        "untold_notices",
        "gauge",
        "{notice}",
        "Commits, abandons and forgets that wait for the store to answer again.",
        lambda s: s.untold_notices,
    ),
    # -- what is learned, and held
    Measure("shared_orders", "counter", "{order}", "Orders learned from other planners.", lambda s: s.shared_orders),
    Measure(
        "published_orders", "counter", "{order}", "Orders that other planners can learn.", lambda s: s.published_orders
    ),
    Measure("scopes", "gauge", "{scope}", "Scopes (tenant, model, preamble) with learned state.", lambda s: s.scopes),
    Measure("tree_nodes", "gauge", "{node}", "Nodes of all prefix trees.", lambda s: s.tree_nodes),
    # -- the feed of KV events
    Measure(
        "feed_connected",
        "gauge",
        "",
        "1 while it is known what every publisher of KV events holds, else 0; absent before any was heard.",
        _feed(lambda f: f.connected),
    ),
    Measure("feed_sources", "gauge", "{source}", "Publishers of KV events heard of.", _feed(lambda f: f.sources)),
    Measure(
        "feed_lag", "gauge", "s", "Time from the last batch's making to its being applied.", _feed(lambda f: f.lag)
    ),
    Measure("feed_events", "counter", "{event}", "KV events applied.", _feed(lambda f: f.events)),
    Measure("feed_gaps", "counter", "{gap}", "Times that batches of KV events were missing.", _feed(lambda f: f.gaps)),
    Measure(
        "feed_replayed_batches",
        "counter",
        "{batch}",
        "Batches of KV events that came when asked for again.",
        _feed(lambda f: f.replayed),
    ),
    Measure(
        "feed_wipes",
        "counter",
        "{wipe}",
        "Times that nothing was known any more of what a publisher holds: it restarted, or a gap could not be filled.",
        _feed(lambda f: f.wipes),
    ),
    Measure(
        "feed_malformed_messages",
        "counter",
        "{message}",
        "Messages of the feed that could not be read.",
        _feed(lambda f: f.malformed),
    ),
    Measure(
        "feed_unknown_events",
        "counter",
        "{event}",
        "KV events of an unknown type, or on top of a KV block never heard of.",
        _feed(lambda f: f.unknown),
    ),
    Measure(
        "feed_dropped",
        "counter",
        "{item}",
        "KV blocks and prompts forgotten to keep within the feed's bounds.",
        _feed(lambda f: f.dropped),
    ),
    Measure(
        "feed_unmapped_prompts",
        "counter",
        "{prompt}",
        "Prompts in whose tokens the context blocks could not be found.",
        _feed(lambda f: f.unmapped),
    ),
    Measure(
        "feed_failures",
        "counter",
        "{failure}",
        "Times that the feed failed and began anew.",
        _feed(lambda f: f.failures),
    ),
    Measure("feed_kv_blocks", "gauge", "{block}", "KV blocks known to be held.", _feed(lambda f: f.kv_blocks)),
    Measure(
        "feed_prompts", "gauge", "{prompt}", "Prompts remembered, to tell their blocks by.", _feed(lambda f: f.prompts)
    ),
)
