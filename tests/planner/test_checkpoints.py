"""Engines that continue only from checkpoints: their misses are no evidence against the cache."""

from __future__ import annotations

from itertools import count

import pytest

import warmprefix.residency.capacity
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.cache_profiles import CacheProfile, vllm_checkpoints
from warmprefix.residency import EngineReport

BLOCK = 128
SHARED = [ContextBlock(f"shared {i}", tokens=100) for i in range(3)]
numbers = count()


def ask(planner: ContextPlanner, cached_tokens: int | None, **report: float) -> ContextPlan:
    """Serve the shared blocks and one of its own, and report what the engine had cached."""
    with planner.planning([*SHARED, ContextBlock(f"own {next(numbers)}", tokens=100)]) as plan:
        planner.commit(plan, report=EngineReport(cached_tokens, 500, **report))  # type: ignore[arg-type]
        return plan


@pytest.fixture
def profile() -> CacheProfile:
    return vllm_checkpoints(BLOCK)


def test_the_third_visit_is_predicted_to_hit(profile: CacheProfile) -> None:
    planner = ContextPlanner(profile=profile)
    assert [ask(planner, cached).resident_tokens for cached in (0, 0, 256)] == [0, 0, 2 * BLOCK]
    stats = planner.stats()
    assert stats.compared_reports == 3
    assert stats.prediction_error_mean <= BLOCK


def test_patience_counts_visits_that_should_hit(profile: CacheProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmprefix.residency.capacity, "_PATIENCE", 3)
    planner = ContextPlanner(profile=profile)
    for _ in range(2):
        ask(planner, 0)
    for number in range(20):  # second visits of other prefixes
        other = [ContextBlock(f"{number} {i}", tokens=200) for i in range(3)]
        for _ in range(2):
            with planner.planning(other) as plan:
                planner.commit(plan, report=EngineReport(0, 700))
    assert planner.stats().disabled_scopes == 0
    for _ in range(3):
        ask(planner, 0)
    assert planner.stats().disabled_scopes == 1


def test_misses_and_slow_answers_shrink_no_cache(profile: CacheProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmprefix.residency.capacity, "_PATIENCE", 1_000)
    planner = ContextPlanner(profile=profile)
    for _ in range(200):
        ask(planner, 0)
    assert planner.stats().capacity_source == "default"
    for _ in range(20):
        ask(planner, None, ttft=1.0)
    assert planner.stats().stale_paths == 0


def test_a_shared_prefix_shorter_than_a_block_predicts_nothing() -> None:
    planner = ContextPlanner(profile=vllm_checkpoints(528))
    assert [ask(planner, 0).resident_tokens for _ in range(4)] == [0, 0, 0, 0]
