"""Learning from commits, the engine's reports, and its residency feed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from warmprefix.cache_profiles import CacheProfile, vllm_checkpoints
from warmprefix.plan import ContextPlan, Scope
from warmprefix.planner.state import PlannerState, ScopeState
from warmprefix.residency import EngineReport, FeedStats, FoundCheckpoints, NoFeed, ResidencyFeed, ServedPrompt
from warmprefix.residency.capacity import Visit
from warmprefix.residency.usage import UsageComparison

if TYPE_CHECKING:
    import logging

__all__ = ["PlanFeedback", "as_report", "check_plan"]

_NO_REPORT = EngineReport()


def check_plan(plan: ContextPlan) -> None:
    """Check the argument `plan` of a public method.

    Raises:
        TypeError: It is not a ContextPlan.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")


def as_report(plan: ContextPlan, cached_tokens: int | None, report: EngineReport | None) -> EngineReport:
    """Return the checked report, from the arguments of `commit`.

    Raises:
        TypeError: An argument or a field has the wrong type, or both arguments are given.
        ValueError: A count or a duration is negative.
    """
    if report is not None and not isinstance(report, EngineReport):
        raise TypeError(f"report must be an EngineReport or None, got {type(report).__name__}")
    if report is not None and cached_tokens is not None:
        raise TypeError(f"cached_tokens must be None if a report is given, got {cached_tokens!r}")
    if not isinstance(plan, ContextPlan):
        check_plan(plan)
    if report is None and cached_tokens is None:
        return _NO_REPORT
    checked = EngineReport(cached_tokens) if report is None else report
    for name in ("cached_tokens", "prompt_tokens", "capacity_tokens", "written_tokens"):
        count = getattr(checked, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"{name} must be an int or None, got {type(count).__name__}")
        if count is not None and not 0 <= count <= 10**15:
            raise ValueError(f"{name} must be from 0 to 10**15, got {count}")
    if checked.ttft is not None and not checked.ttft >= 0:
        raise ValueError(f"ttft must be 0 or more, got {checked.ttft}")
    if checked.block_ends is not None and not all(isinstance(share, (int, float)) for share in checked.block_ends):
        raise TypeError(f"block_ends must be numbers or None, got {checked.block_ends!r}")
    return checked


class PlanFeedback:
    """Ends open plans, and applies what the engine reports of them to their scopes.

    A `ResidencyTarget`: the feed notifies it, and holds it weakly.
    """

    def __init__(self, state: PlannerState, feed: ResidencyFeed | None) -> None:
        self._state = state
        self._has_warned = False
        self.feed = NoFeed() if feed is None else feed
        self.feed.follow(self)

    def commit(self, plan: ContextPlan, report: EngineReport) -> bool:
        """Learn from a plan that the model saw, if it is still open; True if it was."""
        state = self._state
        with state.lock:
            in_time = state.close(plan)
            state.metrics.counts["commits" if in_time else "late_commits"] += 1
            if in_time:
                scope = state.use(plan.scope)
                keys = [planned.block.fingerprint for planned in plan.blocks]
                if plan.opens_prompt:  # a batch was planned long before its requests ran, so each is predicted now
                    state.open_plans.predict(plan, scope, keys)
                if report is not _NO_REPORT:
                    self._apply_report(plan, keys, report)
                if plan.opens_prompt:
                    state.learn(scope, plan)
        if in_time and report.prompt_token_ids is not None:
            self._remember(plan, report.prompt_token_ids)
        return in_time

    def abandon(self, plan: ContextPlan) -> bool:
        """Close a plan that the model did not see; True if it was open."""
        check_plan(plan)
        with self._state.lock:
            was_open = self._state.close(plan)
            self._state.metrics.counts["abandons"] += was_open
        if was_open:
            self._state.metrics.notify_abandoned(plan)
        return was_open

    def report(self, plan: ContextPlan, report: EngineReport) -> None:
        """Apply a report of a plan that is committed before or later, here or elsewhere. O(blocks)."""
        keys = [planned.block.fingerprint for planned in plan.blocks]
        with self._state.lock:
            self._apply_report(plan, keys, report)
            scope = self._state.find(plan.scope)
            if scope is not None and plan.opens_prompt:  # this very prompt has made its blocks resident again
                scope.tree.mark_resident(keys)
        if report.prompt_token_ids is not None:
            self._remember(plan, report.prompt_token_ids)

    def residency_changed(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None = None,
    ) -> None:
        """Apply an event of the feed.

        The engine holds the first `resident_blocks` of `keys`. These are fingerprints of blocks that follow the
        preamble in this order. It continues only behind the `checkpoints`, unless they are None. The first ones show a
        profile that is recognised by itself that the engine keeps checkpoints. O(blocks + nodes below them).
        """
        with self._state.lock:
            if checkpoints is not None and self._state.profile.current.checkpoints is None:
                self._learn_profile(vllm_checkpoints(checkpoints.block))
            state = self._state.find(scope)
            if state is not None:
                state.tree.set_path(keys, resident_blocks, None if checkpoints is None else checkpoints.ends)

    def _apply_report(self, plan: ContextPlan, keys: Sequence[bytes], report: EngineReport) -> None:
        """Update counters, evidence and tree; the caller holds the lock.

        A report is judged by what was predicted when the plan was made. Only the first one of a plan counts.
        """
        state, counts = self._state, self._state.metrics.counts
        prediction = None if report.cached_tokens is None else state.open_plans.take_prediction(plan)
        if prediction is not None and prediction.visit is None:
            return
        if report.cached_tokens is not None:
            counts["reports"] += 1
            counts["reported_cached_tokens"] += report.cached_tokens
            written = report.written_tokens or 0
            counts["reported_written_tokens"] += written
            if report.prompt_tokens is not None:
                counts["reported_uncached_tokens"] += max(report.prompt_tokens - report.cached_tokens - written, 0)
        scope = state.find(plan.scope)
        if scope is None or not plan.opens_prompt:
            return
        if report.capacity_tokens:
            scope.capacity.start(report.capacity_tokens)
        if report.profile is not None:
            self._learn_profile(report.profile)
        comparison = scope.usage.compare_plan(plan, report)
        if comparison is not None:
            visit = None if prediction is None else prediction.visit
            self._learn_comparison(plan, comparison, scope, visit)
            counts["compared_prompt_tokens"] += report.prompt_tokens or 0
        elif (
            report.ttft is not None
            and state.profile.match != "checkpoints"
            and type(self.feed) is NoFeed  # any other is more exact
            and scope.ttft.was_cold(plan.total_tokens, plan.resident_tokens, report.ttft)
        ):
            counts["stale_paths"] += 1
            scope.tree.mark_stale(keys)
        scope.capacity.fit(scope.tree)

    def _learn_comparison(
        self, plan: ContextPlan, comparison: UsageComparison, scope: ScopeState, visit: Visit | None
    ) -> None:
        """Learn from reported cached tokens; only counts without a `visit`, what was known of the order before."""
        state, counts = self._state, self._state.metrics.counts
        state.errors.add(comparison)
        counts["compared_reports"] += 1
        counts["predicted_cached_tokens"] += round(comparison.predicted)
        counts["compared_cached_tokens"] += comparison.actual
        if visit is None:
            return
        profile, capacity = state.profile, scope.capacity
        # Until the profile is recognised, only what every explanation predicts is expected.
        expected = plan.resident_tokens > 0 and (profile.source != "default" or min(visit.junction, visit.leaf) > 0)
        if capacity.learn_caching(expected, comparison.actual):
            change = "left in relevance order: it evidently caches nothing" if capacity.is_off else "reordered again"
            _logger().warning("requests of one tenant to model %r are %s", plan.scope.model, change)
        lengths = [planned.block.tokens for planned in plan.blocks]
        if profile.observe(visit, lengths, comparison, capacity.tokens):
            _logger().info("the engine's reports show the cache profile %s", profile.current.name)
            state.profile_changed()
        elif profile.match != "checkpoints" and not scope.tree.order.has_ages:  # evidence of an LRU's capacity
            distances = visit.distances[: visit.leaf] if profile.match == "leaves" else visit.distances
            given = capacity.tokens
            shown = capacity.compare(distances, lengths, comparison.likely_blocks)
            if shown is not None and not self._has_warned:
                self._has_warned = True
                outcome = "it stays, because it is fixed" if capacity.tokens == given else "that is used from now on"
                text = "reports of model %r contradict capacity_tokens=%d and show %d: %s"
                _logger().warning(text, plan.scope.model, given, shown, outcome)

    def _learn_profile(self, profile: CacheProfile) -> None:
        if self._state.profile.learn(profile):
            self._state.profile_changed()

    def _remember(self, plan: ContextPlan, token_ids: Sequence[int]) -> None:
        """Have the feed find the plan's context blocks among the engine's KV blocks."""
        if not plan.opens_prompt or not plan.blocks:
            return
        keys = tuple([planned.block.fingerprint for planned in plan.blocks])
        paragraphs = tuple([planned.render() for planned in plan.blocks])
        served = ServedPrompt(plan.scope, plan.cache_salt, keys, paragraphs, token_ids)
        try:
            self.feed.remember(served)
        except Exception:
            self._state.metrics.degrade("feed")

    def feed_stats(self) -> FeedStats:
        """Return the feed's counts; all zero if it fails. Called without the lock."""
        try:
            return self.feed.stats()
        except Exception:
            self._state.metrics.degrade("feed")
            return FeedStats()


def _logger() -> logging.Logger:
    import logging  # slow to import, and seldom needed

    return logging.getLogger("warmprefix")
