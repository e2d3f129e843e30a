"""Priorities of requests: one clock for all of them, the sender's pace, and engines that take none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from warmprefix import ContextPlan, ContextPlanner
from warmprefix.plan import Retention
from warmprefix_requests import OutgoingRequest, read_call
from warmprefix_requests.retention import RequestPriorities

NONE_YET = ContextPlanner().plan(["A passage."])
PLAN = replace(NONE_YET, retention=Retention(1, 90))


def sent(end: str = "chat/completions", **body: Any) -> OutgoingRequest:
    request = read_call("POST", f"/v1/{end}", {}, json.dumps({"model": "m", "messages": [], **body}).encode())
    assert request is not None
    return request


def number(priorities: RequestPriorities, plan: ContextPlan = PLAN, request: OutgoingRequest | None = None) -> Any:
    process = priorities.processor(plan)
    changed = None if process is None else process(request or sent())
    return None if changed is None else changed.body["priority"]


def test_requests_carry_the_time_and_touches_add_their_age_at_the_senders_pace() -> None:
    now = [1_000.0]
    priorities = RequestPriorities(ContextPlanner(profile="priority-eviction"), lambda: now[0])
    assert number(priorities, NONE_YET) is None
    for _ in range(3):
        now[0] += 0.5
        assert number(priorities) == now[0] * 1_000
    assert number(priorities, NONE_YET) == now[0] * 1_000
    now[0] += 0.5
    pace = (0.5 + 0.5 + 0.0) / 3  # without the longest
    touch = priorities.of_touch(sent(), 90)
    assert touch.body["priority"] == pytest.approx((now[0] + 90 * pace) * 1_000, rel=1e-6)
    assert priorities.of_touch(sent(), 0).body["priority"] == now[0] * 1_000


def test_a_night_without_requests_and_a_clock_set_back_hardly_change_the_pace() -> None:
    now = [1_000.0]
    priorities = RequestPriorities(ContextPlanner(profile="priority-eviction"), lambda: now[0])
    for _ in range(50):
        now[0] += 1.0
        number(priorities)
    now[0] += 40_000.0
    number(priorities)
    now[0] -= 90_000.0
    number(priorities)
    added = priorities.of_touch(sent(), 100).body["priority"] - now[0] * 1_000
    assert 100_000 <= added <= 125_000


def test_a_request_long_before_the_others_does_not_change_the_pace() -> None:
    now = [1_000.0]
    priorities = RequestPriorities(ContextPlanner(profile="priority-eviction"), lambda: now[0])
    number(priorities)
    now[0] += 100_000.0
    for _ in range(20):
        number(priorities)
        now[0] += 1.0
    added = priorities.of_touch(sent(), 100).body["priority"] - now[0] * 1_000
    assert added == 100_000


def test_the_applications_own_number_and_other_routes_are_left_alone() -> None:
    priorities = RequestPriorities(ContextPlanner(profile="priority-eviction"))
    assert number(priorities) is not None
    for request in (sent(priority=3), sent("responses"), sent("messages")):
        assert number(priorities, PLAN, request) is None
        assert priorities.of_touch(request, 90) is request


def test_an_engine_without_priorities_gets_none() -> None:
    priorities = RequestPriorities(ContextPlanner())
    assert number(priorities) is None
    request = sent()
    assert priorities.of_touch(request, 90) is request


def test_a_touch_makes_all_later_requests_carry_one() -> None:
    priorities = RequestPriorities(ContextPlanner(profile="priority-eviction"))
    assert number(priorities, NONE_YET) is None
    priorities.of_touch(sent(), 30)
    assert number(priorities, NONE_YET) is not None
