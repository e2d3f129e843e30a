"""The schedule by itself: every plan, every order of events, with and without failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmprefix import BatchPlan, BatchRequest, ContextBlock, PlannedRequest
from warmprefix_openai.batch_runner.start_order import StartOrder, first_holders, planned_holders

Plan = Callable[..., BatchPlan]

WORDS = [ContextBlock(word, id=word) for word in "abcdef"]
CONTEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=5, unique=True), max_size=14)


def planned_batch(plan: Plan, contexts: list[list[ContextBlock]]) -> BatchPlan:
    return plan([BatchRequest(i, context) for i, context in enumerate(contexts)])


def shared(one: PlannedRequest, other: PlannedRequest) -> int:
    """Blocks that both begin with."""
    count = 0
    for mine, theirs in zip(one.blocks, other.blocks, strict=False):
        if mine.block != theirs.block:
            break
        count += 1
    return count


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contexts=CONTEXTS, data=st.data())
def test_every_request_starts_once_and_none_before_its_prefix_is_there(
    plan: Plan, contexts: list[list[ContextBlock]], data: st.DataObject
) -> None:
    batch = planned_batch(plan, contexts)
    concurrency, lookahead = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 5))
    schedule = StartOrder(batch.requests, planned_holders(batch.requests), lookahead)
    started: list[int] = []
    running: list[int] = []
    warm: set[int] = set()
    while True:
        while len(running) < concurrency and (i := schedule.start()) is not None:
            before = [j for j in range(i) if j not in started]
            assert not before or len([j for j in started if j > min(before)]) < lookahead
            unsettled = [j for j in running if j not in warm]
            # A request that is bringing a part of i's prefix must not bring more of it than the cache holds already.
            there = max((shared(batch.requests[j], batch.requests[i]) for j in warm), default=0)
            assert all(shared(batch.requests[j], batch.requests[i]) <= there for j in unsettled if j < i)
            started.append(i)
            running.append(i)
        if not running:
            break
        i = data.draw(st.sampled_from(running))
        if i in warm or data.draw(st.booleans()):
            running.remove(i)
            schedule.over(i)
        else:
            warm.add(i)
            schedule.prefilled(i)
            schedule.prefilled(i)
    assert sorted(started) == list(range(len(batch)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contexts=CONTEXTS, data=st.data())
def test_the_first_holder_holds_the_shared_prefix_first(
    plan: Plan, contexts: list[list[ContextBlock]], data: st.DataObject
) -> None:
    batch = planned_batch(plan, contexts)
    assert first_holders(batch.requests) == planned_holders(batch.requests)
    some = [planned for planned in batch if data.draw(st.booleans())]
    for i, holder in enumerate(first_holders(some)):
        most = max((shared(some[j], some[i]) for j in range(i)), default=0)
        holding = [j for j in range(i) if most and shared(some[j], some[i]) == most]
        assert holder == (holding[0] if holding else None)


def test_tenants_hold_nothing_for_each_other(plan: Plan) -> None:
    batch = plan([BatchRequest(i, ["same"], tenant="ab"[i % 2]) for i in range(4)])
    by_id = {planned.id: i for i, planned in enumerate(batch)}
    holders = first_holders(batch.requests)
    assert [holders[by_id[str(i)]] for i in range(4)] == [None, None, by_id["0"], by_id["1"]]


def test_without_lookahead_the_plans_order_is_kept_and_waited_for(plan: Plan) -> None:
    batch = plan([BatchRequest(i, ["x"] if i < 3 else ["y"]) for i in range(5)])
    schedule = StartOrder(batch.requests, planned_holders(batch.requests), 0)
    assert [schedule.start(), schedule.start()] == [0, None]
    schedule.prefilled(0)
    assert [schedule.start() for _ in range(4)] == [1, 2, 3, None]


def test_lookahead_is_counted_from_the_earliest_that_waits(plan: Plan) -> None:
    batch = plan([BatchRequest(i, [str(i)] if i > 1 else ["x"]) for i in range(8)])
    schedule = StartOrder(batch.requests, planned_holders(batch.requests), 2)
    assert [schedule.start() for _ in range(4)] == [0, 2, 3, None]
    schedule.over(2)
    assert schedule.start() is None
    schedule.prefilled(0)
    assert [schedule.start() for _ in range(6)] == [1, 4, 5, 6, 7, None]


def test_a_thousand_warmers_that_fail_one_after_the_other(plan: Plan) -> None:
    batch = plan([BatchRequest(i, ["shared", str(i)]) for i in range(1_000)])
    schedule = StartOrder(batch.requests, planned_holders(batch.requests), 8)
    for expected in range(999):
        assert schedule.start() == expected
        assert schedule.start() is None
        schedule.over(expected)
    assert schedule.start() == 999


def test_a_plan_whose_warmer_comes_later_is_refused(plan: Plan) -> None:
    batch = plan([BatchRequest(0, ["x"]), BatchRequest(1, ["x"])])
    with pytest.raises(ValueError, match="warmed_by of request '1' must be an earlier request's id or None, got '0'"):
        planned_holders(batch.requests[::-1])
