from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.batch.plan import BatchPlan, BatchRequest
from warmprefix.batch.window import MOST_REQUESTS
from warmprefix.telemetry import PlannerStats

windows = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=5), max_size=10)


def served(plan: BatchPlan, held: set[str]) -> list[int]:
    """Return the letters, one token each, that an unbounded cache finds."""
    found: list[int] = []
    for planned in plan:
        order = "".join(each.text for each in planned.blocks)
        prefixes = [order[:end] for end in range(1, len(order) + 1)]
        found.append(sum(prefix in held for prefix in prefixes))
        held.update(prefixes)
    return found


def requests_of(window: list[list[str]]) -> list[BatchRequest]:
    return [BatchRequest(i, [ContextBlock(letter, tokens=1) for letter in own]) for i, own in enumerate(window)]


@given(windows, windows)
def test_reported_savings_are_correct(before: list[list[str]], window: list[list[str]]) -> None:
    planner = ContextPlanner(capacity_tokens=None)
    held: set[str] = set()
    for own in before:
        with planner.planning([ContextBlock(letter, tokens=1) for letter in own]) as plan:
            order = "".join(each.text for each in plan.blocks)
            held.update(order[:end] for end in range(1, len(order) + 1))
    requests = requests_of(window)
    batch = planner.plan_batch(requests, "window")
    assert sorted(planned.id for planned in batch) == sorted(request.id for request in requests)
    for planned in batch:
        assert sorted({each.text for each in planned.blocks}) == sorted({each.text for each in planned.request.blocks})
    assert [planned.saved_tokens for planned in batch] == served(batch, held)
    assert batch.saved_tokens <= batch.upper_bound <= batch.total_tokens


def test_example() -> None:
    batch = ContextPlanner(annotate="none").plan_batch(
        {"1": ["aaaa", "bbbb"], "2": ["cccc"], "3": ["dddd", "bbbb"]}, "window"
    )
    assert [(planned.id, [each.text for each in planned.blocks]) for planned in batch] == [
        ("1", ["bbbb", "aaaa"]),
        ("3", ["bbbb", "dddd"]),
        ("2", ["cccc"]),
    ]
    assert (batch.planner, batch.saved_tokens, batch.upper_bound, batch.bound) == ("window", 1, 1, "every block once")
    assert batch["3"].warmed_by == "1"


def test_resident_blocks_come_first() -> None:
    planner = ContextPlanner(annotate="none")
    with planner.planning(["xxxx", "yyyy"]):
        pass
    batch = planner.plan_batch({"1": ["aaaa", "yyyy", "xxxx"], "2": ["aaaa"]}, "window")
    assert [each.text for each in batch["1"].blocks] == ["xxxx", "yyyy", "aaaa"]
    assert (batch.saved_tokens, batch["1"].warmed_by) == (2, None)


def test_windows_are_planned_one_after_another() -> None:
    rng = random.Random(0)
    planner = ContextPlanner()
    texts = [f"text {i}" for i in range(60)]
    total = saved = 0
    for _ in range(8):
        batch = planner.plan_batch({str(i): rng.sample(texts, 6) for i in range(64)}, "window")
        assert planner.plan_batch({}, "window").requests == ()
        for planned in batch:
            assert planner.commit(planned.plan)
        total, saved = total + batch.total_tokens, saved + batch.saved_tokens
    stats = planner.stats()
    assert (stats.plans, stats.commits, stats.open_plans) == (512, 512, 0)
    assert (stats.planned_tokens, stats.resident_tokens) == (total, saved)


@pytest.mark.parametrize("window", [{}, {"1": []}, {"1": ["text"]}, {"1": [], "2": []}])
def test_tiny_windows(window: dict[str, list[str]]) -> None:
    batch = ContextPlanner().plan_batch(window, "window")
    assert (len(batch), batch.saved_tokens, batch.upper_bound) == (len(window), 0, 0)


def test_bad_input_is_refused_and_leaves_no_trace() -> None:
    planner = ContextPlanner()
    with pytest.raises(ValueError, match="distinct ids"):
        planner.plan_batch([BatchRequest("a", []), BatchRequest("a", [])], "window")
    with pytest.raises(TypeError, match="got one str"):
        planner.plan_batch("text", "window")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model must be a str or None, got int$"):
        planner.plan_batch({}, "window", model=7)  # type: ignore[arg-type]
    assert planner.stats() == PlannerStats()


def test_window_of_too_many_requests_is_planned_too() -> None:
    requests = [BatchRequest(i, ["shared", f"own {i}"]) for i in range(MOST_REQUESTS + 1)]
    window = ContextPlanner().plan_batch(requests, "window")
    assert [planned.saved_tokens for planned in window] == [0, *[2] * MOST_REQUESTS]
