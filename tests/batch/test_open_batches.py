"""Open plans of batches: which can still be committed or abandoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import BatchPlan, BatchRequest, ContextPlanner


def batch_of(planner: ContextPlanner, requests: int, tenants: Sequence[str | None] = (None,)) -> BatchPlan:
    return planner.plan_batch(
        [BatchRequest(i, [f"Shared {i % 3}.", f"Own {i}."], tenant=tenants[i % len(tenants)]) for i in range(requests)]
    )


def test_plans_of_a_batch_beyond_the_bound_can_be_committed_once() -> None:
    planner = ContextPlanner(max_open_plans=10)
    batch = batch_of(planner, 25, ["acme", None])
    assert planner.stats().open_plans == planner.stats().plans == 25
    assert len({planned.plan_id for planned in batch}) == 25
    for closed, planned in enumerate(batch, start=1):
        assert planner.commit(planned.plan, cached_tokens=7) is True
        assert planner.stats().open_plans == 25 - closed
    for planned in batch:
        assert planner.commit(planned.plan, cached_tokens=7) is False
        assert planner.abandon(planned.plan) is False
    stats = planner.stats()
    assert (stats.commits, stats.late_commits, stats.abandons) == (25, 25, 0)
    assert (stats.reports, stats.reported_cached_tokens) == (25, 25 * 7)


def test_abandoned_plans_are_closed() -> None:
    planner = ContextPlanner()
    first, *others = batch_of(planner, 3)
    assert [planner.abandon(first.plan) for _ in range(2)] == [True, False]
    assert planner.commit(first.plan) is False
    assert planner.stats().tree_nodes == 0
    assert [planner.commit(planned.plan) for planned in others] == [True, True]
    assert (planner.stats().abandons, planner.stats().open_plans) == (1, 0)


def test_late_commit_of_a_dropped_batch_changes_nothing() -> None:
    planner = ContextPlanner(max_open_plans=10)
    oldest, older, newest = (batch_of(planner, size) for size in (4, 6, 1))
    assert planner.stats().open_plans == 7  # the oldest is dropped, the other two fit
    assert not any(planner.commit(planned.plan, cached_tokens=7) for planned in oldest)
    assert not any(planner.abandon(planned.plan) for planned in oldest)
    stats = planner.stats()
    assert (stats.late_commits, stats.commits, stats.abandons, stats.tree_nodes) == (4, 0, 0, 0)
    assert stats.reports == 0
    assert all(planner.commit(planned.plan) for planned in (*older, *newest))
    assert planner.stats().tree_nodes > 0


def test_batch_beyond_the_bound_drops_all_others() -> None:
    planner = ContextPlanner(max_open_plans=10)
    large = batch_of(planner, 25)
    window = planner.plan_batch([BatchRequest("one", ["text"])], "window")
    assert planner.stats().open_plans == 1
    assert planner.commit(large.requests[0].plan) is False
    assert planner.commit(window["one"].plan) is True


def test_batches_and_single_plans_share_the_bound() -> None:
    planner = ContextPlanner(max_open_plans=2)
    batch = batch_of(planner, 2)
    plans = [planner.plan(["text"]) for _ in range(3)]
    assert planner.stats().open_plans == 4
    assert [planner.commit(plan) for plan in plans] == [False, True, True]
    assert all(planner.commit(planned.plan) for planned in batch)


def test_empty_and_closed_batches_are_not_kept() -> None:
    planner = ContextPlanner(max_open_plans=10)
    for _ in range(50):
        planner.plan_batch([])
        planner.plan_batch([], "window")
    assert len(planner._state.open_plans) == 0
    for _ in range(50):
        for planned in planner.plan_batch({"a": ["x"], "b": ["x", "y"]}, "window"):
            assert planner.commit(planned.plan)
    assert len(planner._state.open_plans) == 0


@pytest.mark.parametrize(
    "number",
    ["", "x", "-1", "+1", "1.0", " 1", "1 ", "1_0", "0x1", "1e0", "²", "½", "12", "9" * 30, "9" * 5_000, "\ud83d"],
)
def test_malformed_id_is_no_open_plan(number: str) -> None:
    planner = ContextPlanner()
    batch = batch_of(planner, 12)
    made = replace(batch.requests[0].plan, id=f"{batch.id}.{number}")
    assert planner.commit(made) is False
    assert planner.abandon(made) is False
    assert planner.stats().open_plans == 12


@pytest.mark.parametrize("id", ["", ".", ".0", "0", "x.0", "..", "no-batch"])
def test_id_of_no_batch_is_no_open_plan(id: str) -> None:
    planner = ContextPlanner()
    batch = batch_of(planner, 2)
    for made in (replace(batch.requests[0].plan, id=id), replace(batch.requests[0].plan, id=batch.id)):
        assert planner.commit(made) is False
        assert planner.abandon(made) is False
    assert planner.stats().open_plans == 2


def test_batch_of_another_planner_is_ignored() -> None:
    one, other = ContextPlanner(), ContextPlanner()
    batch = batch_of(one, 2)
    batch_of(other, 2)
    assert not any(other.commit(planned.plan) or other.abandon(planned.plan) for planned in batch)
    assert one.stats().open_plans == other.stats().open_plans == 2


def test_reset_closes_all_batches() -> None:
    planner = ContextPlanner()
    before = batch_of(planner, 3)
    planner.commit(before.requests[0].plan)
    planner.reset()
    assert planner.stats() == ContextPlanner().stats()
    assert not any(planner.abandon(planned.plan) for planned in before)
    assert not any(planner.commit(planned.plan) for planned in before)
    after = batch_of(planner, 3)
    assert after.saved_tokens == before.saved_tokens  # nothing is predicted to be cached any more
    assert all(planner.commit(planned.plan) for planned in after)
    stats = planner.stats()
    assert (stats.plans, stats.commits, stats.late_commits, stats.abandons, stats.open_plans) == (3, 3, 3, 0, 0)


STEPS = st.lists(
    st.tuples(st.just("batch"), st.integers(0, 9))
    | st.tuples(st.sampled_from(["commit", "abandon"]), st.integers(0, 99)),
    max_size=30,
)


@given(steps=STEPS, most=st.integers(1, 12))
def test_open_plans_are_exactly_those_that_can_be_closed(steps: list[tuple[str, int]], most: int) -> None:
    planner = ContextPlanner(max_open_plans=most)
    batches = [planner.plan_batch({"first": ["text"]})]
    closed: set[str] = set()
    for step, number in steps:
        if step == "batch":
            requests = {str(i): [f"Text {i % 3}."] for i in range(number)}
            batch = planner.plan_batch(requests, "relevance")
            batches += [batch] if requests else []
            continue
        planned = [planned.plan for batch in batches for planned in batch]
        plan = planned[number % len(planned)]
        if planner.commit(plan) if step == "commit" else planner.abandon(plan):
            assert plan.id not in closed
            closed.add(plan.id)
    counted = planner.stats().open_plans
    assert counted <= max(most, len(batches[-1]))
    found = {planned.plan_id for batch in batches for planned in batch if planner.abandon(planned.plan)}
    assert len(found) == counted
    assert not found & closed
    assert {planned.plan_id for planned in batches[-1]} <= found | closed
    assert planner.stats().open_plans == 0
