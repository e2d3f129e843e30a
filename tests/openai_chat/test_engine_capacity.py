"""A link reads the capacity of its engine in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from warmprefix import ContextPlanner, EngineReport
from warmprefix.errors import EngineError
from warmprefix.openai.engine_capacity import EngineCapacity


def capacity_of(planner: ContextPlanner, read: Callable[[str], int]) -> tuple[EngineCapacity, Callable[[str], None]]:
    """Return the object under test, and a function that visits a URL and waits until its metrics are read."""
    capacity = EngineCapacity(planner, read)

    def visit(url: str) -> None:
        capacity.visit(httpx.URL(url))
        for thread in threading.enumerate():
            if thread.name == "warmprefix-capacity":
                thread.join()

    return capacity, visit


def test_each_engine_is_asked_once_and_the_smallest_counts() -> None:
    asked: list[str] = []

    def read(engine: str) -> int:
        asked.append(engine)
        return {"http://a:1": 9_000, "https://b/base": 7_000, "http://c": 8_000}[engine]

    capacity, visit = capacity_of(ContextPlanner(), read)
    for url in ("http://a:1/v1/completions", "https://b/base/v1/chat/completions", "http://c/v1/responses") * 3:
        visit(url)
    assert asked == ["http://a:1", "https://b/base", "http://c"]
    assert capacity.added_to(EngineReport(5)) == EngineReport(5, capacity_tokens=7_000)
    assert capacity.added_to(None) == EngineReport(capacity_tokens=7_000)


@pytest.mark.parametrize("error", [EngineError("no metrics"), ValueError("no address")])
def test_an_engine_without_metrics_changes_nothing(error: Exception) -> None:
    def read(engine: str) -> int:
        raise error

    capacity, visit = capacity_of(ContextPlanner(), read)
    visit("http://a/v1/chat/completions")
    assert capacity.added_to(EngineReport(5)) == EngineReport(5)
    assert capacity.added_to(None) is None


def test_a_planner_with_a_given_capacity_asks_no_engine() -> None:
    asked: list[str] = []

    def read(engine: str) -> int:
        asked.append(engine)
        return 1

    _, visit = capacity_of(ContextPlanner(capacity_tokens=1_000), read)
    visit("http://a/v1/chat/completions")
    assert not asked
