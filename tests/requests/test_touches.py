"""When a sender touches which path, and what it keeps for that."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.plan import Scope, Touch
from warmprefix_requests import OutgoingRequest, prepared, read_call
from warmprefix_requests.retention import RequestPriorities
from warmprefix_requests.touches import DueTouch, Toucher, TouchStats

BLOCKS = [ContextBlock(f"The text of {name}. " * 3, id=name) for name in "ABCD"]


class NamingPlanner(ContextPlanner):
    """Names one touch over the latest plan of each scope that it is asked for, as often as it is asked."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.latest: dict[Scope, ContextPlan] = {}
        self.asked: list[Scope] = []
        self.reports: list[tuple[Touch, EngineReport | None]] = []

    def touches(self, scope: Scope, most: int = 1) -> list[Touch]:
        self.asked.append(scope)
        plan = self.latest.get(scope)
        return [] if plan is None else [Touch(scope, plan.id, 1, 10, 0)]

    def touched(self, touch: Touch, report: EngineReport | None = None) -> None:
        self.reports.append((touch, report))


class Sender:
    """Sends requests and touches, and answers each touch at once."""

    def __init__(self, planner: NamingPlanner) -> None:
        self.planner = planner
        self.toucher = Toucher[str](planner, RequestPriorities(planner))

    def serve(self, tenant: str | None = None, size: int = 0) -> ContextPlan:
        plan = self.planner.plan(BLOCKS, tenant=tenant, order_locked=True)
        self.toucher.keep(plan, self.request(plan, size), "http://a", "way")
        self.planner.latest[plan.scope] = plan
        self.toucher.served(plan)
        return plan

    @staticmethod
    def request(plan: ContextPlan, size: int = 0) -> OutgoingRequest:
        body = {"model": "m", "prompt": f"{plan.render()}\n\nWhy?", "user": "u" * size}
        request = read_call("POST", "/v1/completions", {}, json.dumps(body).encode())
        assert request is not None
        return request

    def touch(self, status: int | None = 200, prompt: int | None = 100, cached: int | None = 96) -> bool:
        """Send the touch that is due; return False if there is none."""
        due = self.toucher.due()
        if due is not None:
            assert self.toucher.answered(due, status, prompt, cached) is None
        return due is not None


@pytest.fixture
def sender() -> Sender:
    return Sender(NamingPlanner())


def test_a_touch_is_cut_from_the_request_of_the_plan_and_reported(sender: Sender) -> None:
    plan = sender.serve("acme")
    due = sender.toucher.due()
    assert due is not None
    assert (due.way, due.touch.plan_id) == ("way", plan.id)
    assert due.attempt.request.body["prompt"] == f"{BLOCKS[0].text}\n\nT"
    assert sender.toucher.due() is None  # one at a time
    sender.toucher.answered(due, 200, 30, 16)
    assert sender.planner.reports == [(due.touch, EngineReport(16, 30))]
    assert sender.toucher.stats() == TouchStats(sent=1, computed_tokens=14, found_tokens=16)


def test_there_is_one_touch_per_request_beyond_a_few(sender: Sender) -> None:
    sender.serve()
    assert sum(sender.touch() for _ in range(50)) == 8
    for _ in range(20):
        sender.serve()
        assert sum(sender.touch() for _ in range(5)) == 1
    for _ in range(20):
        sender.serve()
    assert sum(sender.touch() for _ in range(50)) == 8


def test_nothing_is_touched_beside_many_requests(sender: Sender) -> None:
    sender.serve()
    for _ in range(9):
        sender.toucher.began()
    assert not sender.touch()
    assert not sender.planner.asked
    sender.toucher.ended()
    assert sender.touch()
    for _ in range(20):
        sender.toucher.ended()  # one too many changes nothing
    assert sender.touch()


@pytest.mark.parametrize("answer", [(500, 100, 96), (None, None, None), (200, None, None), (200, 100, None)])
def test_failures_in_a_row_pause_longer_each_time(sender: Sender, answer: Any) -> None:
    sender.serve()
    for pause in (100, 200, 400):
        assert [sender.touch(*answer) for _ in range(4)] == [True] * 3 + [False]
        for _ in range(pause - 1):
            sender.serve()
        assert not sender.touch()
        sender.serve()
    assert sender.touch()  # an answer ends that
    assert [sender.touch(*answer) for _ in range(4)] == [True] * 3 + [False]
    for _ in range(100):
        sender.serve()
    assert sender.touch()
    assert sender.toucher.stats().failed == 12
    assert len(sender.planner.reports) == 2


def test_a_sender_that_is_gone_without_a_report_blocks_nothing(sender: Sender) -> None:
    sender.serve()
    due: DueTouch[str] | None = sender.toucher.due()
    assert due is not None
    assert sender.toucher.due() is None
    del due
    assert sender.touch()


def test_what_was_forgotten_or_goes_another_way_is_skipped(sender: Sender) -> None:
    plan = sender.serve()
    assert sender.toucher.due(lambda way: way != "way") is None
    sender.planner.latest[plan.scope] = sender.planner.plan(BLOCKS)
    assert not sender.touch()
    assert sender.toucher.stats() == TouchStats(skipped=2)


def test_an_error_of_the_planner_leaves_the_sender_usable(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    sender.serve()
    with monkeypatch.context() as patched:
        patched.setattr(sender.planner, "touches", lambda scope: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sender.toucher.due()
    assert sender.touch()


def test_scopes_take_turns(sender: Sender) -> None:
    plans = [sender.serve(f"tenant {number}") for number in range(12)]
    sender.planner.latest.clear()
    for _ in range(8):
        sender.toucher.due()
    assert {scope.tenant for scope in sender.planner.asked} == {plan.scope.tenant for plan in plans}


def test_a_tenant_that_fills_the_memory_loses_only_its_own(sender: Sender) -> None:
    small = [sender.serve("small", 100_000) for _ in range(10)]
    for _ in range(100):
        sender.serve("large", 2_000_000)
    kept = sender.toucher._kept
    assert kept.size <= 32 << 20
    assert all(kept.get(plan.id) is not None for plan in small)
    assert kept.get(sender.serve("huge", 3 << 20).id) is None


def test_thousands_of_tenants_stay_within_the_bounds(sender: Sender) -> None:
    for number in range(3_000):
        sender.serve(f"tenant {number}")
    assert len(sender.toucher._scopes) <= 1_024
    sender.planner.asked.clear()
    assert sender.touch()
    assert len(sender.planner.asked) <= 4


def test_a_plan_behind_a_history_is_not_kept(sender: Sender) -> None:
    plan = sender.planner.plan(BLOCKS, placement="tail", history=[{"role": "user", "content": "Hello."}])
    sender.toucher.keep(plan, sender.request(plan), "http://a", "way")
    assert plan.opens_prompt or sender.toucher._kept.get(plan.id) is None
    sender.toucher.served(plan)
    assert not sender.touch()


@pytest.mark.parametrize("profile", ["anthropic", "openai-before-5.6", "gemini", "deepseek", "llama.cpp(4)", "blend"])
def test_profiles_that_bill_or_keep_no_paths_keep_no_requests(profile: str) -> None:
    sender = Sender(NamingPlanner(profile=profile))
    plan = sender.serve()
    assert sender.toucher._kept.get(plan.id) is None
    assert not sender.touch()


def test_a_touch_has_its_own_priority_and_not_that_of_its_request() -> None:
    planner = NamingPlanner(profile="priority-eviction")
    priorities = RequestPriorities(planner)
    toucher = Toucher[str](planner, priorities)
    plan = planner.plan(BLOCKS, order_locked=True)
    planner.latest[plan.scope] = plan
    request = prepared(Sender.request(plan), (), {"retention": lambda request: request.with_fields({"priority": 5})})
    toucher.keep(plan, request, "http://a", "way")
    toucher.served(plan)
    due = toucher.due()
    assert due is not None
    assert due.attempt.request.body["priority"] > 1_000_000_000_000


def test_short_requests_take_no_more_memory_than_long_ones(sender: Sender) -> None:
    plan = sender.planner.plan(BLOCKS, order_locked=True)
    request = Sender.request(plan)
    for number in range(10_000):
        sender.toucher.keep(replace(plan, id=str(number)), request, "http://a", "way")
    assert len(sender.toucher._kept) < 7_000
