"""The capacity that a planner learns from the reports of simulated engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix.cache_profiles import as_profile
from warmprefix.prefix import PrefixTree
from warmprefix.residency import FixedCapacity
from warmprefix.residency.capacity import DEFAULT_CAPACITY, Capacity, DistanceEvidence

TOKENS = 100

Kind = Literal["tenant", "preamble"]


def requests(seed: int, topics: int = 150) -> Iterator[list[ContextBlock]]:
    """Yield requests of eight blocks on one of some topics, the first ones most often."""
    chance = random.Random(seed)
    weights = [1 / rank for rank in range(1, topics + 1)]
    while True:
        (topic,) = chance.choices(range(topics), weights)
        yield [ContextBlock(f"{topic} {i}", tokens=TOKENS) for i in chance.sample(range(12), 8)]


def serve(
    planner: ContextPlanner,
    engine: PrefixTree[object],
    count: int,
    kinds: int = 1,
    name: Kind = "tenant",
    *,
    seed: int = 0,
    topics: int = 150,
) -> list[tuple[int, ...]]:
    """Plan and commit some requests with the engine's reports; return the planned orders."""
    orders = []
    for number, blocks in enumerate(islice(requests(seed, topics), count)):
        kind = number % kinds
        plan = planner.plan(blocks, **{name: str(kind)})  # type: ignore[arg-type]
        keys = [(kind, planned.block.fingerprint) for planned in plan.blocks]
        planner.commit(plan, cached_tokens=engine.insert(keys, [TOKENS] * len(keys)).tokens // 16 * 16)
        orders.append(plan.order)
    return orders


@pytest.mark.parametrize("capacity", [10_000, 30_000, 60_000])
def test_a_smaller_engine_is_recognised(capacity: int) -> None:
    planner = ContextPlanner()
    serve(planner, PrefixTree(capacity), 600)
    stats = planner.stats()
    assert stats.capacity_source == "reports"
    assert stats.capacity_tokens == pytest.approx(capacity, rel=0.15)


def test_the_belief_follows_an_engine_that_grows_and_shrinks() -> None:
    planner = ContextPlanner()
    for seed, capacity in enumerate([10_000, 50_000, 20_000]):
        engine = PrefixTree[object](capacity)
        serve(planner, engine, 300, seed=seed)
        serve(planner, engine, 2_500, seed=seed)
        assert planner.stats().capacity_tokens == pytest.approx(capacity, rel=0.25)


def confidence(planner: ContextPlanner, kinds: int, name: Kind) -> float:
    serve(planner, PrefixTree(40_000), 2_500, kinds, name)
    agreement = planner.stats().residency_confidence
    assert agreement is not None
    return agreement


@pytest.mark.parametrize(("name", "share"), [("preamble", 40_000), ("tenant", 10_000)])
def test_scopes_in_front_of_one_engine(name: Kind, share: int) -> None:
    for tokens in ("auto", 40_000, 200_000):
        planner = ContextPlanner(capacity_tokens=tokens)
        assert confidence(planner, 4, name) > 0.9
        # Preambles share the capacity, and each tenant learns its part of it.
        assert planner.stats().capacity_tokens == pytest.approx(share, rel=0.2)


def test_without_reports_it_is_the_default() -> None:
    learning, given_default = ContextPlanner(), ContextPlanner(capacity_tokens=DEFAULT_CAPACITY)
    for number, blocks in enumerate(islice(requests(5, topics=2_000), 1_500)):
        plans = [planner.plan(blocks, tenant=str(number % 2)) for planner in (learning, given_default)]
        assert plans[0].order == plans[1].order
        assert plans[0].resident_tokens == plans[1].resident_tokens
        for planner, plan in zip((learning, given_default), plans, strict=True):
            planner.commit(plan)
    assert learning.stats().capacity_tokens == DEFAULT_CAPACITY
    assert learning.stats().capacity_source == "default"
    assert learning.stats().tree_nodes == given_default.stats().tree_nodes


def test_it_is_deterministic() -> None:
    assert serve(ContextPlanner(), PrefixTree(20_000), 400) == serve(ContextPlanner(), PrefixTree(20_000), 400)


def test_the_metrics_replace_the_default_only() -> None:
    planner = ContextPlanner()
    for tokens in (80_000, 60_000, 70_000):
        planner.commit(planner.plan(["text"]), report=EngineReport(capacity_tokens=tokens))
    stats = planner.stats()
    assert (stats.capacity_tokens, stats.capacity_source) == (60_000, "metrics")
    serve(planner, PrefixTree(20_000), 600)
    planner.commit(planner.plan(["text"]), report=EngineReport(capacity_tokens=60_000))
    assert planner.stats().capacity_source == "reports"


@pytest.mark.parametrize("topics", [150, 2_000])
@pytest.mark.parametrize("capacity", [6_000, 10_000, 30_000, 100_000])
def test_a_right_capacity_stays(capacity: int, topics: int, caplog: pytest.LogCaptureFixture) -> None:
    planner = ContextPlanner(capacity_tokens=capacity)
    serve(planner, PrefixTree(capacity), 800, seed=capacity, topics=topics)
    planner.commit(planner.plan(["text"]), report=EngineReport(capacity_tokens=5_000))
    assert (planner.stats().capacity_tokens, planner.stats().capacity_source) == (capacity, "argument")
    assert not caplog.records


@pytest.mark.parametrize("given", [10_000, 100_000, 500_000])
def test_reports_replace_a_wrong_capacity(given: int, caplog: pytest.LogCaptureFixture) -> None:
    planner = ContextPlanner(capacity_tokens=given)
    engine = PrefixTree[object](30_000)
    serve(planner, engine, 100)
    assert planner.stats().capacity_tokens == given
    serve(planner, engine, 900, seed=1)
    assert planner.stats().capacity_tokens == pytest.approx(30_000, rel=0.15)
    assert planner.stats().capacity_source == "reports against argument"
    (record,) = caplog.records
    assert f"contradict capacity_tokens={given} and show " in record.getMessage()
    assert "used from now on" in record.getMessage()


def test_reports_do_not_replace_a_fixed_capacity(caplog: pytest.LogCaptureFixture) -> None:
    planner = ContextPlanner(capacity_tokens=FixedCapacity(100_000))
    serve(planner, PrefixTree(10_000), 600, kinds=2)
    stats = planner.stats()
    assert (stats.capacity_tokens, stats.capacity_source) == (100_000, "argument against reports")
    (record,) = caplog.records  # of two tenants, the first one
    assert "fixed" in record.getMessage()


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_given_capacity_stays_behind_several_replicas(replicas: int) -> None:
    planner = ContextPlanner(capacity_tokens=100_000)
    engines = [PrefixTree[object](100_000) for _ in range(replicas)]
    chance = random.Random(0)
    for seed in range(600):
        serve(planner, chance.choice(engines), 1, seed=seed)
    assert planner.stats().capacity_source == "argument"
    assert planner.stats().engine_model == "replicas"


def test_a_capacity_that_was_replaced_returns_with_a_profile(caplog: pytest.LogCaptureFixture) -> None:
    planner = ContextPlanner(capacity_tokens=200_000)
    serve(planner, PrefixTree(10_000), 400)
    assert planner.stats().capacity_source == "reports against argument"
    planner.report(planner.plan(["text"]), EngineReport(profile=as_profile("vllm-checkpoints(128)")))
    assert (planner.stats().capacity_tokens, planner.stats().capacity_source) == (200_000, "argument")
    assert len(caplog.records) == 1


def test_a_reset_forgets_the_capacity() -> None:
    planner = ContextPlanner()
    serve(planner, PrefixTree(10_000), 300)
    assert planner.stats().capacity_source == "reports"
    planner.reset()
    assert planner.stats().capacity_tokens == DEFAULT_CAPACITY


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.integers(0, 8), st.integers(0, 10**12)
        ),
        max_size=60,
    ),
    st.sampled_from(["auto", 1, 10_000, FixedCapacity(1), FixedCapacity(10_000)]),
)
def test_any_report_leaves_a_usable_capacity(
    reports: list[tuple[list[int], int, int]], given: int | Literal["auto"]
) -> None:
    capacity = Capacity(given)
    for path, held, tokens in reports:
        keys = [bytes([key]) for key in path]
        lengths = [tokens] * len(path)
        capacity.compare(capacity.visit("scope", keys).distances, lengths, held)
        capacity.record("scope", keys, lengths)
        assert capacity.tokens is not None
        assert capacity.tokens >= 1


def test_evidence_stays_finite_over_any_number_of_reports() -> None:
    evidence = DistanceEvidence()
    for _ in range(80_000):
        evidence.add([1_000, 50_000], [100, 100], 1)
    better, _ = evidence.judge(DEFAULT_CAPACITY, None)
    assert better is not None
    assert 1_000 < better <= 50_000
