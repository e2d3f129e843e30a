"""Engine reports on answers correct the planner's prediction of the cache."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.prefix_integrity import check_integrity

import warmprefix.residency.capacity
from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport, Scope
from warmprefix.residency import FeedStats, NoFeed, ResidencyTarget, ServedPrompt

Engine = Any
Serve = Callable[[ContextPlanner, Engine, Sequence[ContextBlock]], tuple[ContextPlan, EngineReport]]
OpenEngine = Callable[[int], Engine]

PREAMBLE = "You answer from the context, and from nothing else. " * 6
BLOCKS = [ContextBlock(f"{name} " * 100, id=name) for name in "ABCDE"]
"""Each has 50 tokens."""


def committed(planner: ContextPlanner, blocks: Sequence[ContextBlock], report: EngineReport) -> ContextPlan:
    plan = planner.plan(blocks)
    planner.commit(plan, report=report)
    return plan


def ends(*tokens: int) -> list[float]:
    """Return the shares of these token positions in a prompt of 1,000 tokens."""
    return [end / 1_000 for end in tokens]


def test_predictions_hold_on_an_engine_that_evicts(
    open_engine: OpenEngine, serve: Serve, corpus: list[ContextBlock]
) -> None:
    engine = open_engine(200)  # 3,184 tokens, some four prompts
    planner = ContextPlanner(capacity_tokens=2_800)
    chance = random.Random(3)
    for _ in range(200):
        start = chance.randrange(12) * 4
        serve(planner, engine, chance.sample(corpus[start : start + 8], 5))
    stats = planner.stats()
    assert stats.compared_reports == stats.reports == 200
    assert stats.reported_cached_tokens > 200 * 60  # more than the preamble
    assert stats.prediction_error_p95 <= 170  # a block of 160 tokens
    assert stats.residency_confidence is not None
    assert stats.residency_confidence > 0.85


def test_a_surplus_counts_as_an_error_but_not_as_a_shortfall() -> None:
    planner = ContextPlanner()
    a, b, c, *_ = BLOCKS
    committed(planner, [a, b, c], EngineReport(200, 1_000, block_ends=ends(150, 200, 250)))
    stats = planner.stats()
    assert stats.stale_paths == 0
    assert stats.prediction_error_mean == stats.prediction_error_p95 == 200
    assert stats.predicted_cached_tokens == 0
    assert stats.residency_confidence == 0


def test_a_report_after_the_commit_is_accepted() -> None:
    planner = ContextPlanner()
    a, b, c, *_ = BLOCKS
    planner.commit(planner.plan([a, b, c]))
    plan = planner.plan([a, b, c])
    planner.commit(plan)
    planner.report(plan, EngineReport(0, 1_000, block_ends=ends(150, 200, 250)))
    stats = planner.stats()
    assert (stats.reports, stats.stale_paths, stats.commits) == (1, 0, 2)
    assert planner.plan([a, b, c]).resident_tokens == 150  # resident since that prompt


def test_a_count_without_block_ends_is_compared_with_the_usual_length_before_the_context() -> None:
    planner = ContextPlanner()
    preamble = 400
    for i in range(20):
        fresh = [ContextBlock(f"{i} {n} " * 50) for n in range(4)]
        planner.commit(planner.plan(fresh), cached_tokens=preamble if i else 0)
    planner.commit(planner.plan(BLOCKS), cached_tokens=preamble)
    before = planner.stats()
    for cached in (250, 350, 150):  # the caller's count of 250 tokens is not the engine's
        planner.commit(planner.plan(BLOCKS), cached_tokens=preamble + cached)
    after = planner.stats()
    assert after.predicted_cached_tokens - before.predicted_cached_tokens == 3 * (preamble + 250)
    assert after.stale_paths == 0


@pytest.mark.parametrize("placement", ["tail", "head"])
def test_only_a_context_that_opens_the_prompt_is_compared(placement: Any) -> None:
    planner = ContextPlanner()
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    plan = planner.plan(BLOCKS, placement=placement, history=history if placement == "tail" else None)
    planner.commit(plan, cached_tokens=64)
    assert planner.stats().reports == 1
    assert planner.stats().compared_reports == (placement == "head")


# -- TTFT ----------------------------------------------------------------------------------------------------------


def test_a_cold_ttft_marks_a_deep_path_stale() -> None:
    planner = ContextPlanner()
    for i in range(10):
        fresh = [ContextBlock(f"{i} {n} " * 50) for n in range(4)]
        plan = planner.plan(fresh)
        planner.commit(plan, report=EngineReport(ttft=0.001 * plan.total_tokens))
    a, b, c, d, e = BLOCKS
    planner.commit(planner.plan([a, b, c, d]))
    warm = planner.plan([a, b, c, e], order_locked=True)
    assert warm.resident_tokens == 150
    planner.commit(warm, report=EngineReport(ttft=0.06))
    assert planner.stats().stale_paths == 0
    planner.commit(planner.plan([a, b, c, d]), report=EngineReport(ttft=0.19))
    assert planner.stats().stale_paths == 1
    assert planner.plan([a, b, c, d]).resident_tokens == 200
    assert planner.plan([a, b, c, e], order_locked=True).resident_tokens == 150


def test_ttft_counts_only_where_cached_tokens_are_not_reported() -> None:
    planner = ContextPlanner()
    for i in range(10):
        fresh = [ContextBlock(f"{i} {n} " * 50) for n in range(4)]
        plan = planner.plan(fresh)
        planner.commit(plan, report=EngineReport(ttft=0.001 * plan.total_tokens))
    planner.commit(planner.plan(BLOCKS))
    planner.commit(
        planner.plan(BLOCKS), report=EngineReport(250, 1_000, ttft=9.0, block_ends=ends(50, 100, 150, 200, 250))
    )
    assert planner.stats().stale_paths == 0


# -- an engine that does not cache ---------------------------------------------------------------------------------


def test_ordering_is_off_while_the_engine_evidently_does_not_cache(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmprefix.residency.capacity, "_PATIENCE", 5)
    planner = ContextPlanner()
    a, b, c, d, e = BLOCKS
    nothing = EngineReport(0, 1_000, block_ends=ends(50, 100, 150))
    with caplog.at_level(logging.WARNING, logger="warmprefix"):
        for _ in range(7):  # the second one might find nothing because the engine keeps checkpoints
            assert planner.stats().disabled_scopes == 0
            committed(planner, [a, b, c], nothing)
    assert (planner.stats().disabled_scopes, planner.stats().engine_model) == (1, "off")
    assert len(caplog.records) == 1
    assert "evidently caches nothing" in caplog.text
    plans = [committed(planner, [c, b, a], nothing) for _ in range(32)]
    assert planner.stats().disabled_plans == 30
    assert sum(plan.resident_tokens > 0 for plan in plans) == 2
    assert not any(plan.reordered for plan in plans if plan.resident_tokens == 0)
    committed(planner, [d, e, a], EngineReport(64, 1_000, block_ends=ends(50, 100, 150)))
    assert planner.stats().disabled_scopes == 0
    assert len(caplog.records) == 2
    assert committed(planner, [c, b, a], nothing).resident_tokens == 150


def test_ordering_is_turned_off_per_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmprefix.residency.capacity, "_PATIENCE", 2)
    planner = ContextPlanner()
    a, b, c, *_ = BLOCKS
    for tenant in ("uncached", "fine"):
        planner.commit(planner.plan([a, b, c], tenant=tenant))
    for _ in range(3):
        planner.commit(planner.plan([a, b, c], tenant="uncached"), cached_tokens=0)
    assert not planner.plan([c, b, a], tenant="uncached").reordered
    assert planner.plan([c, b, a], tenant="fine").reordered


def test_misses_without_a_prediction_are_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmprefix.residency.capacity, "_PATIENCE", 2)
    planner = ContextPlanner()
    for i in range(10):
        committed(planner, [ContextBlock(f"{i} {n}") for n in range(4)], EngineReport(0, 1_000))
    assert planner.stats().disabled_scopes == 0


# -- feeds ---------------------------------------------------------------------------------------------------------


class Feed(NoFeed):
    """A feed that records the served prompts."""

    def __init__(self, connected: bool = True) -> None:
        self.remembered: list[ServedPrompt] = []
        self.is_connected = connected
        self.closed = False
        self.target: ResidencyTarget

    def follow(self, target: ResidencyTarget) -> None:
        self.target = target

    def remember(self, served: ServedPrompt) -> None:
        self.remembered.append(served)

    def is_complete(self, cache_salt: str | None) -> bool:
        return self.is_connected

    def stats(self) -> FeedStats:
        return FeedStats(connected=self.is_connected, events=7)

    def close(self) -> None:
        self.closed = True


def test_a_feed_receives_the_prompts_and_decides_about_residency() -> None:
    feed = Feed()
    a, b, c, *_ = BLOCKS
    with ContextPlanner(feed=feed) as planner:
        for _ in range(2):
            planner.commit(
                planner.plan([a, b, c], tenant="acme"), report=EngineReport(0, 1_000, prompt_token_ids=range(1_000))
            )
        plan = planner.plan([a, b, c], tenant="acme")
        assert planner.stats().stale_paths == 0
        assert planner.stats().feed.events == 7
        served = feed.remembered[0]
        assert served.scope == plan.scope
        assert served.cache_salt == plan.cache_salt
        assert served.keys == (a.fingerprint, b.fingerprint, c.fingerprint)
        assert "\n\n".join(served.paragraphs) == plan.render()
        feed.target.residency_changed(plan.scope, served.keys, 1)
        assert planner.plan([a, b, c], tenant="acme").resident_tokens == 50
        feed.target.residency_changed(plan.scope, served.keys, 3)
        assert planner.plan([a, b, c], tenant="acme").resident_tokens == 150
        feed.target.residency_changed(Scope("unseen", None, None), served.keys, 0)
        assert planner.stats().scopes == 1
    assert feed.closed


def test_times_show_nothing_if_there_is_a_feed() -> None:
    for feed, stale in ((None, 1), (NoFeed(), 1), (Feed(), 0)):
        planner = ContextPlanner(feed=feed)
        for i in range(10):
            plan = planner.plan([ContextBlock(f"{i} {n} " * 50) for n in range(4)])
            planner.commit(plan, report=EngineReport(ttft=0.001 * plan.total_tokens))
        planner.commit(planner.plan(BLOCKS))
        planner.commit(planner.plan(BLOCKS), report=EngineReport(ttft=9.0))
        assert planner.stats().stale_paths == stale


@pytest.mark.parametrize("characters_per_token", [(2, 2), (2, 5), (5, 2)])
def test_different_token_densities_are_no_shortfall(characters_per_token: tuple[int, int]) -> None:
    """Prose before data, or data before prose: the ends of blocks are given in characters only."""
    planner = ContextPlanner()
    first, second = [ContextBlock("x" * 1_000, tokens=1_000 // n) for n in characters_per_token]
    third = ContextBlock("y" * 1_000, tokens=1_000 // characters_per_token[1])
    planner.commit(planner.plan([first, second]))
    plan = planner.plan([first, third], order_locked=True)
    prompt_tokens = plan.total_tokens
    planner.commit(plan, report=EngineReport(first.tokens // 32 * 32, prompt_tokens, block_ends=[0.5, 1.0]))
    assert plan.resident_tokens == first.tokens
    assert planner.stats().stale_paths == 0


def test_pinned_blocks_keep_their_place_while_ordering_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmprefix.residency.capacity, "_PATIENCE", 1)
    planner = ContextPlanner()
    for _ in range(3):
        planner.commit(planner.plan(BLOCKS), cached_tokens=0)
    assert planner.stats().disabled_scopes == 1
    last, first = ContextBlock("The rules.", pinned="end"), ContextBlock("The start.", pinned="start")
    plan = planner.plan([last, BLOCKS[1], BLOCKS[0], first])
    assert [planned.block for planned in plan.blocks] == [first, BLOCKS[1], BLOCKS[0], last]


class Broken(NoFeed):
    def remember(self, served: ServedPrompt) -> None:
        raise RuntimeError("broken")

    def is_complete(self, cache_salt: str | None) -> bool:
        raise RuntimeError("broken")

    def stats(self) -> FeedStats:
        raise RuntimeError("broken")


def test_a_failing_feed_only_costs_a_count() -> None:
    planner = ContextPlanner(feed=Broken())
    plan = planner.plan(BLOCKS)
    assert planner.commit(plan, report=EngineReport(0, 10, prompt_token_ids=[1]))
    assert planner.stats().feed_errors >= 1


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"cached_tokens": 1, "report": EngineReport()}, TypeError, "cached_tokens must be None if a report is given"),
        ({"report": 5}, TypeError, "report must be an EngineReport or None, got int"),
        ({"report": EngineReport(-1)}, ValueError, "cached_tokens must be from 0 to 10\\*\\*15, got -1"),
        ({"report": EngineReport(prompt_tokens=-1)}, ValueError, "prompt_tokens must be from 0"),
        ({"report": EngineReport(prompt_tokens=True)}, TypeError, "prompt_tokens must be an int or None, got bool"),
        ({"report": EngineReport(block_ends=["a"])}, TypeError, "block_ends must be numbers or None"),  # type: ignore[list-item]
        ({"report": EngineReport(ttft=-0.5)}, ValueError, "ttft must be 0 or more, got -0.5"),
        ({"report": EngineReport(ttft=math.nan)}, ValueError, "ttft must be 0 or more, got nan"),
    ],
)
def test_invalid_reports_are_refused(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    planner = ContextPlanner()
    plan = planner.plan(BLOCKS)
    with pytest.raises(error, match=match):
        planner.commit(plan, **arguments)
    assert planner.commit(plan)


@pytest.mark.parametrize("shares", [[], [0.5], [math.nan] * 5, [2.0] * 5, [-1.0] * 5, [0.9, 0.1, 0.5, 0.2, 0.3]])
def test_invalid_block_ends_are_ignored(shares: list[float]) -> None:
    planner = ContextPlanner()
    for _ in range(3):
        committed(planner, BLOCKS, EngineReport(100, 1_000, block_ends=shares))
    assert planner.plan(BLOCKS).resident_tokens <= 250
    assert planner.stats().reports == 3
    [state] = planner._state
    check_integrity(state.tree)


@pytest.mark.parametrize(("name", "value"), [("feed", object()), ("observer", object())])
def test_objects_that_are_not_feeds_or_observers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a"):
        ContextPlanner(**{name: value})
