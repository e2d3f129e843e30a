"""A link reads the metrics of its engine in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix.cache_profiles import vllm_checkpoints
from warmprefix.errors import EngineError
from warmprefix_openai.engine_metrics import EngineMetrics


def capacity_of(
    planner: ContextPlanner, read: Callable[[str], EngineReport]
) -> tuple[EngineMetrics, Callable[[str], None]]:
    """Return the object under test, and a function that visits a URL and waits until its metrics are read."""
    capacity = EngineMetrics(planner, read)

    def visit(url: str) -> None:
        capacity.visit(httpx.URL(url))
        for thread in threading.enumerate():
            if thread.name == "warmprefix-metrics":
                thread.join()

    return capacity, visit


def test_each_engine_is_asked_once_and_the_smallest_counts() -> None:
    asked: list[str] = []

    def read(engine: str) -> EngineReport:
        asked.append(engine)
        return EngineReport(capacity_tokens={"http://a:1": 9_000, "https://b/base": 7_000, "http://c": 8_000}[engine])

    capacity, visit = capacity_of(ContextPlanner(), read)
    for url in ("http://a:1/v1/completions", "https://b/base/v1/chat/completions", "http://c/v1/responses") * 3:
        visit(url)
    assert asked == ["http://a:1", "https://b/base", "http://c"]
    assert capacity.added_to(EngineReport(5)) == EngineReport(5, capacity_tokens=7_000)
    assert capacity.added_to(None) == EngineReport(capacity_tokens=7_000)


@pytest.mark.parametrize("error", [EngineError("no metrics"), ValueError("no address")])
def test_an_engine_without_metrics_changes_nothing(error: Exception) -> None:
    def read(engine: str) -> EngineReport:
        raise error

    capacity, visit = capacity_of(ContextPlanner(), read)
    visit("http://a/v1/chat/completions")
    assert capacity.added_to(EngineReport(5)) == EngineReport(5)
    assert capacity.added_to(None) is None


def test_a_planner_that_learns_nothing_asks_no_engine() -> None:
    asked: list[str] = []

    def read(engine: str) -> EngineReport:
        asked.append(engine)
        return EngineReport(capacity_tokens=1)

    _, visit = capacity_of(ContextPlanner(capacity_tokens=1_000, profile="full-attention"), read)
    visit("http://a/v1/chat/completions")
    assert not asked


def test_a_hosted_api_is_not_asked() -> None:
    asked: list[str] = []

    def read(engine: str) -> EngineReport:
        asked.append(engine)
        return EngineReport()

    _, visit = capacity_of(ContextPlanner(), read)
    for host in ("api.openai.com", "eu.api.anthropic.com", "openai.com.example.org"):
        visit(f"https://{host}/v1/chat/completions")
    assert asked == ["https://openai.com.example.org"]


def test_the_profile_of_the_metrics_reaches_the_planner() -> None:
    profile = vllm_checkpoints(528)
    planner = ContextPlanner()
    metrics, visit = capacity_of(planner, lambda engine: EngineReport(profile=profile))
    visit("http://a/v1/chat/completions")
    planner.commit(planner.plan([ContextBlock("text")]), report=metrics.added_to(EngineReport(0, 20)))
    assert (planner.profile, planner.stats().profile_source) == (profile, "engine")
