"""Learning from commits, the engine's reports, and its residency feed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from warmprefix.cache_profiles import CacheProfile, vllm_checkpoints
from warmprefix.plan import ContextPlan, Scope
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.open_plans import OpenPlans
from warmprefix.planner.scope import ScopeRegistry
from warmprefix.residency import EngineReport, FeedStats, FoundCheckpoints, ResidencyFeed, ServedPrompt
from warmprefix.residency.report import PredictionErrors

__all__ = ["PlanFeedback", "as_report", "check_plan"]

_log = logging.getLogger("warmprefix")


def check_plan(plan: ContextPlan) -> None:
    """Check the argument `plan` of a public method.

    Raises:
        TypeError: It is not a ContextPlan.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")


def as_report(cached_tokens: int | None, report: EngineReport | None) -> EngineReport:
    """Return the checked report, from one of the two arguments of `commit`.

    Raises:
        TypeError: An argument or a field has the wrong type, or both arguments are given.
        ValueError: A count or a duration is negative.
    """
    if report is not None and not isinstance(report, EngineReport):
        raise TypeError(f"report must be an EngineReport or None, got {type(report).__name__}")
    if report is not None and cached_tokens is not None:
        raise TypeError(f"cached_tokens must be None if a report is given, got {cached_tokens!r}")
    checked = EngineReport(cached_tokens) if report is None else report
    for name in ("cached_tokens", "prompt_tokens", "capacity_tokens", "written_tokens"):
        count = getattr(checked, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"{name} must be an int or None, got {type(count).__name__}")
        if count is not None and count < 0:
            raise ValueError(f"{name} must be 0 or more, got {count}")
    if checked.ttft is not None and not checked.ttft >= 0:
        raise ValueError(f"ttft must be 0 or more, got {checked.ttft}")
    if checked.block_ends is not None and not all(isinstance(share, (int, float)) for share in checked.block_ends):
        raise TypeError(f"block_ends must be numbers or None, got {checked.block_ends!r}")
    return checked


@dataclass(frozen=True, slots=True)
class PlanFeedback:
    """Ends open plans, and applies what the engine reports of them to their scopes."""

    feed: ResidencyFeed
    lock: threading.RLock
    scopes: ScopeRegistry
    open_plans: OpenPlans
    metrics: PlannerMetrics
    errors: PredictionErrors = field(default_factory=PredictionErrors)
    """Guarded by the lock."""

    def commit(self, plan: ContextPlan, report: EngineReport) -> bool:
        """Learn from a plan that the model saw, if it is still open; True if it was."""
        check_plan(plan)
        is_fed = self._is_fed(plan, report)
        with self.lock:
            in_time = self._close(plan)
            self.metrics.counts["commits" if in_time else "late_commits"] += 1
            if in_time:
                if plan.opens_prompt:  # a batch was planned long before its requests ran, so each is predicted now
                    self.open_plans.predict(plan, self.scopes.use(plan.scope).distances(plan.blocks))
                self._apply_report(plan, report, is_fed)
                if plan.opens_prompt:
                    self.scopes.learn(plan.scope, plan.blocks)
                if plan.placement == "tail":
                    self.scopes.use(plan.scope).label_savings.add(plan)
        if in_time:
            self._remember(plan, report)
        return in_time

    def abandon(self, plan: ContextPlan) -> bool:
        """Close a plan that the model did not see; True if it was open."""
        check_plan(plan)
        with self.lock:
            was_open = self._close(plan)
            self.metrics.counts["abandons"] += was_open
        if was_open:
            self.metrics.notify_abandoned(plan)
        return was_open

    def _close(self, plan: ContextPlan) -> bool:
        """Remove a plan from the open ones; True if it was one. The caller holds the lock."""
        state = self.scopes.find(plan.scope)
        if state is not None:
            state.queue.finish(plan.id)
        return self.open_plans.close(plan)

    def report(self, plan: ContextPlan, report: EngineReport) -> None:
        """Apply a report of a plan that is committed before or later, here or elsewhere. O(blocks)."""
        is_fed = self._is_fed(plan, report)
        with self.lock:
            self._apply_report(plan, report, is_fed)
            state = self.scopes.find(plan.scope)
            if state is not None and plan.opens_prompt:  # this very prompt has made its blocks resident again
                state.tree.mark_resident(_keys(plan))
        self._remember(plan, report)

    def apply_residency(
        self, scope: Scope, keys: Sequence[bytes], resident_blocks: int, checkpoints: FoundCheckpoints | None
    ) -> None:
        """Apply an event of the feed; see `ContextPlanner.residency_changed`."""
        with self.lock:
            if checkpoints is not None and self.scopes.profile.current.checkpoints is None:
                self._learn_profile(vllm_checkpoints(checkpoints.block))
            state = self.scopes.find(scope)
            if state is not None:
                state.tree.set_path(keys, resident_blocks, None if checkpoints is None else checkpoints.ends)

    def _apply_report(self, plan: ContextPlan, report: EngineReport, is_fed: bool) -> None:
        """Update counters, evidence and tree; the caller holds the lock.

        A report is judged by what was predicted when the plan was made. Only the first one of a plan counts.
        """
        counts = self.metrics.counts
        prediction = None if report.cached_tokens is None else self.open_plans.take_prediction(plan)
        if prediction is not None and prediction.is_reported:
            return
        if report.cached_tokens is not None:
            counts["reports"] += 1
            counts["reported_cached_tokens"] += report.cached_tokens
            written = report.written_tokens or 0
            counts["reported_written_tokens"] += written
            if report.prompt_tokens is not None:
                counts["reported_uncached_tokens"] += max(report.prompt_tokens - report.cached_tokens - written, 0)
        state = self.scopes.find(plan.scope)
        if state is None or not plan.opens_prompt:
            return
        if report.capacity_tokens:
            state.capacity.start(report.capacity_tokens)
        if report.profile is not None:
            self._learn_profile(report.profile)
        has_checkpoints = self.scopes.profile.current.checkpoints is not None
        outcome = state.feedback.learn(plan, report, has_checkpoints)
        if outcome.comparison is not None:
            self.errors.add(outcome.comparison)
            counts["compared_reports"] += 1
            counts["predicted_cached_tokens"] += round(outcome.comparison.predicted)
            counts["compared_cached_tokens"] += outcome.comparison.actual
            counts["compared_prompt_tokens"] += report.prompt_tokens or 0
            likely = outcome.comparison.likely_blocks
            if self.scopes.profile.observe(plan.scope, _keys(plan), likely, outcome.comparison.actual):
                _log.info("the engine's reports show the cache profile %s", self.scopes.profile.current.name)
                self.scopes.profile_changed()
            elif not has_checkpoints and prediction is not None:
                lengths = [planned.block.tokens for planned in plan.blocks]
                state.capacity.compare(prediction.distances, lengths, likely)
        if outcome.ordering_switched:
            change = (
                "left in relevance order, because the engine evidently caches nothing"
                if state.feedback.evidence.is_off
                else "reordered again"
            )
            _log.warning("requests of one scope, for model %r, are %s", plan.scope.model, change)
        if outcome.resident_blocks is not None and not is_fed:
            counts["stale_paths"] += 1
            state.tree.mark_stale(_keys(plan), outcome.resident_blocks)

    def _learn_profile(self, profile: CacheProfile) -> None:
        if self.scopes.profile.learn(profile):
            self.scopes.profile_changed()

    def _is_fed(self, plan: ContextPlan, report: EngineReport) -> bool:
        """Return True if the feed is a better source than `report`. Takes no lock."""
        if report.prompt_token_ids is None:  # then the feed never receives this prompt
            return False
        try:
            return self.feed.is_complete(plan.cache_salt)
        except Exception:
            self.metrics.degrade("feed")
            return False

    def _remember(self, plan: ContextPlan, report: EngineReport) -> None:
        """Have the feed find the plan's context blocks among the engine's KV blocks."""
        if report.prompt_token_ids is None or not plan.opens_prompt or not plan.blocks:
            return
        paragraphs = tuple([planned.render() for planned in plan.blocks])
        served = ServedPrompt(plan.scope, plan.cache_salt, _keys(plan), paragraphs, report.prompt_token_ids)
        try:
            self.feed.remember(served)
        except Exception:
            self.metrics.degrade("feed")

    def stats(self) -> dict[str, Any]:
        """Return the `PlannerStats` of predictions; the caller holds the lock."""
        mean, p95 = self.errors.mean_and_p95()
        return {
            "prediction_error_mean": mean,
            "prediction_error_p95": p95,
            "residency_confidence": self.errors.agreement(),
        }

    def feed_stats(self) -> FeedStats:
        """Return the feed's counts; all zero if it fails. Called without the lock."""
        try:
            return self.feed.stats()
        except Exception:
            self.metrics.degrade("feed")
            return FeedStats()


def _keys(plan: ContextPlan) -> tuple[bytes, ...]:
    return tuple([planned.block.fingerprint for planned in plan.blocks])
