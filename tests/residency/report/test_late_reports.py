"""A report is judged by what was predicted when its plan was made, whenever it comes."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import BatchRequest, ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.prefix import PrefixTree
from warmprefix.residency.capacity import DEFAULT_CAPACITY

TOKENS = 100
Request = Sequence[ContextBlock]


def requests(count: int, seed: int = 0, topics: int = 60) -> list[Request]:
    """Return requests of eight blocks on one of some topics, the first ones most often."""
    chance = random.Random(seed)
    weights = [1 / rank for rank in range(1, topics + 1)]
    chosen = chance.choices(range(topics), weights, k=count)
    return [[ContextBlock(f"{topic} {i}", tokens=TOKENS) for i in chance.sample(range(12), 8)] for topic in chosen]


def answer(engine: PrefixTree[object], plan: ContextPlan) -> EngineReport:
    keys = [planned.block.fingerprint for planned in plan.blocks]
    return EngineReport(cached_tokens=engine.insert(keys, [TOKENS] * len(keys)).tokens)


def learned(planner: ContextPlanner) -> tuple[object, ...]:
    stats = planner.stats()
    return stats.capacity_tokens, stats.capacity_source, stats.reports, stats.reported_cached_tokens


def capacity_after(delays: Sequence[int], engine_tokens: int | None, separately: bool) -> tuple[object, ...]:
    """Serve requests in relevance order, each reported once some others are committed; return what was learned."""
    planner, engine = ContextPlanner(), PrefixTree[object](engine_tokens)
    late: list[tuple[ContextPlan, EngineReport]] = []
    for number, blocks in enumerate(requests(160)):
        plan = planner.plan(blocks, order_locked=True)
        report = answer(engine, plan)
        if not separately:
            planner.commit(plan, report=report)
            continue
        assert planner.commit(plan)
        late.append((plan, report))
        if len(late) > delays[number % len(delays)]:
            for reported in late:
                planner.report(*reported)
            late.clear()
    for reported in late:
        planner.report(*reported)
    return learned(planner)


@cache
def capacity_at_once(engine_tokens: int | None) -> tuple[object, ...]:
    return capacity_after([0], engine_tokens, separately=False)


@pytest.mark.parametrize("engine_tokens", [None, 10_000])
@given(delays=st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_capacity_does_not_depend_on_when_reports_come(engine_tokens: int | None, delays: list[int]) -> None:
    at_once = capacity_at_once(engine_tokens)
    assert at_once[1] == ("default" if engine_tokens is None else "reports")
    assert capacity_after(delays, engine_tokens, separately=True) == at_once


@given(seed=st.integers(0, 2**32))
def test_reports_in_any_order_do_not_shrink_the_capacity_of_a_perfect_cache(seed: int) -> None:
    chance = random.Random(seed)
    planner, engine = ContextPlanner(), PrefixTree[object]()
    late: list[tuple[ContextPlan, EngineReport]] = []
    for blocks in requests(100):
        plan = planner.plan(blocks)
        late.append((plan, answer(engine, plan)))
        if chance.random() < 0.8:
            planner.commit(plan)
        if len(late) > chance.randrange(20):
            chance.shuffle(late)
            reported = late.pop()
            planner.report(*reported)
            if chance.random() < 0.2:
                planner.report(*reported)  # again
            if chance.random() < 0.2:
                late.clear()  # never
    assert planner.stats().capacity_tokens == DEFAULT_CAPACITY


def test_hits_are_the_same_with_separate_reports() -> None:
    hits = []
    for separately in (False, True):
        planner, engine = ContextPlanner(), PrefixTree[object](20_000)
        cached = 0
        for blocks in requests(400):
            plan = planner.plan(blocks)
            report = answer(engine, plan)
            assert report.cached_tokens is not None
            cached += report.cached_tokens
            if separately:
                planner.commit(plan)
                planner.report(plan, report)
            else:
                planner.commit(plan, report=report)
        hits.append(cached)
    assert hits[1] > 0.98 * hits[0]


def test_second_report_of_a_plan_is_ignored() -> None:
    planner = ContextPlanner()
    plan = planner.plan(["one", "two"])
    planner.commit(plan, cached_tokens=3)
    before = planner.stats()
    for _ in range(3):
        planner.report(plan, EngineReport(cached_tokens=500))
    after = planner.stats()
    assert (after.reports, after.reported_cached_tokens) == (before.reports, before.reported_cached_tokens) == (1, 3)


def test_report_may_come_before_the_commit() -> None:
    planner, engine = ContextPlanner(), PrefixTree[object]()
    for blocks in requests(100):
        plan = planner.plan(blocks)
        planner.report(plan, answer(engine, plan))
        planner.commit(plan)
    assert planner.stats().reports == 100
    assert planner.stats().capacity_tokens == DEFAULT_CAPACITY


def test_requests_of_a_batch_may_be_reported_after_their_commit() -> None:
    planner, engine = ContextPlanner(), PrefixTree[object]()
    for start in range(0, 200, 50):
        batch = planner.plan_batch([BatchRequest(i, blocks) for i, blocks in enumerate(requests(50, start))])
        for planned in batch:
            report = answer(engine, planned.plan)
            planner.commit(planned.plan)
            planner.report(planned.plan, report)
    assert planner.stats().capacity_tokens == DEFAULT_CAPACITY


def test_predictions_are_bounded_and_shared_fairly() -> None:
    planner = ContextPlanner(max_open_plans=20)
    own = [planner.plan([f"own {i}"], tenant="small") for i in range(5)]
    for i in range(500):
        planner.commit(planner.plan([f"flood {i}"], tenant="large"))
    assert len(planner._state.open_plans._predictions) == 20
    for plan in own:
        planner.report(plan, EngineReport(cached_tokens=0))
        planner.report(plan, EngineReport(cached_tokens=0))
    assert planner.stats().reports == 5, "each was remembered, so its second report is ignored"


def test_reports_may_come_from_another_thread() -> None:
    planner, engine = ContextPlanner(), PrefixTree[object]()
    served = []
    for blocks in requests(200):
        plan = planner.plan(blocks)
        report = answer(engine, plan)
        planner.commit(plan)
        served.append((plan, report))

    def report_all(part: Sequence[tuple[ContextPlan, EngineReport]]) -> None:
        for each in part:
            planner.report(*each)

    threads = [threading.Thread(target=report_all, args=(served[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert planner.stats().reports == 200
    assert planner.stats().capacity_tokens == DEFAULT_CAPACITY
