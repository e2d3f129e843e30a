"""What a planner has done so far, in numbers an operator can alert on."""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix.residency.base import FeedStats
from warmprefix.telemetry.latency import LatencySnapshot

__all__ = ["PlannerStats"]

_NOTHING_TIMED = LatencySnapshot()
_NOTHING_HEARD = FeedStats()


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """A snapshot; each field only ever grows between two resets, but for those behind `store_latency`."""

    plans: int = 0
    commits: int = 0
    abandons: int = 0
    late_commits: int = 0
    """Commits of a plan already committed or abandoned, or that waited too long."""
    conflicts: int = 0
    """Commits whose blocks the store did not record as seen: lease timed out, or prepared beside another plan."""
    withdrawn_commits: int = 0
    """Commits taken back because the application did not get the answer."""
    blank_blocks: int = 0
    """Blocks left out of plans because their text is empty or blank."""
    reordered_plans: int = 0
    """Plans whose order differs from relevance order."""
    references: int = 0
    """Blocks replaced by a reference."""
    planned_tokens: int = 0
    """Tokens of context in all plans, those spared by references included."""
    resident_tokens: int = 0
    """Of these, predicted to be in the engine's prefix cache."""
    reference_tokens: int = 0
    """Of these, spared by references."""
    reports: int = 0
    """Answers for which the engine told its own count of cached tokens."""
    reported_cached_tokens: int = 0
    """The sum of those counts."""
    compared_reports: int = 0
    """Of these answers, those whose cached tokens had been predicted: their context opened the prompt."""
    predicted_cached_tokens: int = 0
    """The sum of these predictions, preamble included."""
    compared_cached_tokens: int = 0
    """The sum of what was reported of these answers."""
    compared_prompt_tokens: int = 0
    """The sum of their prompts' tokens, as far as they were reported too."""
    stale_paths: int = 0
    """Times that the engine turned out to hold less of a path than predicted, and the rest was marked stale."""
    disabled_plans: int = 0
    """Requests left in relevance order because their engine evidently does not cache."""
    policy_errors: int = 0
    """Requests served in relevance order because the ordering policy failed."""
    store_errors: int = 0
    """Store operations that failed; the request went on with nothing de-duplicated."""
    lost_notices: int = 0
    """Commits, abandons and forgets that the store will never be told of: too many waited."""
    contested_blocks: int = 0
    """Blocks sent again although the conversation's record has them: another plan's outcome could still void that."""
    shared_orders: int = 0
    """Orders learned from other planners."""
    published_orders: int = 0
    """Orders that other planners can learn."""
    sharing_errors: int = 0
    """Orders that could not be shared, or read, and failures of what carries them; each costs hits and nothing else."""
    recorder_errors: int = 0
    """Requests of which the recorder raised; they went on."""
    feed_errors: int = 0
    """Calls of the residency feed that raised; the requests went on."""
    observer_errors: int = 0
    """Calls of the observer that raised; the requests went on."""
    plan_latency: LatencySnapshot = _NOTHING_TIMED
    """Of `plan` and `aplan`, the store's part included."""
    store_latency: LatencySnapshot = _NOTHING_TIMED
    """Of what these, `commit`, `abandon` and their twins asked of a store."""
    untold_notices: int = 0
    """Commits, abandons and forgets that the store could not be told of yet."""
    open_plans: int = 0
    """Plans neither committed nor abandoned."""
    scopes: int = 0
    """Scopes with learned state."""
    tree_nodes: int = 0
    """Nodes of all prefix trees."""
    disabled_scopes: int = 0
    """Scopes whose engine evidently does not cache, so that ordering is off there."""
    prediction_error_mean: float = 0.0
    """Tokens between the cached tokens that were predicted and those reported, over the last 1,024 compared answers."""
    prediction_error_p95: float = 0.0
    """The same, 95th percentile."""
    residency_confidence: float | None = None
    """How far prediction and report agree over those answers, from 0 to 1: the sum of the lesser of both over that of
    the greater. None before there is anything to compare."""
    feed: FeedStats = _NOTHING_HEARD
    """What the engine's events told."""
