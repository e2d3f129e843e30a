from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.batch.plan import BatchPlan
from warmprefix.residency import EngineReport

AN_HOUR = 3_600.0
"""A delay that no test waits for."""


class Observer:
    def __init__(self) -> None:
        self.ids: list[str] = []

    def planned(self, plan: ContextPlan, seconds: float) -> None:
        self.ids.append(plan.id)

    def committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, seconds: float) -> None: ...
    def abandoned(self, plan: ContextPlan) -> None: ...


class WindowCounter(ContextPlanner):
    """A planner that records the sizes of its windows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.windows: list[int] = []

    def plan_window(self, requests: Any, **options: Any) -> BatchPlan:
        self.windows.append(len(requests))
        return super().plan_window(requests, **options)


def texts(plan: ContextPlan) -> list[str]:
    return [planned.block.text for planned in plan.blocks]


def test_requests_that_come_together_are_planned_as_one_window() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(AN_HOUR, max_requests=3) as batch:
            plans = await asyncio.gather(
                batch.plan(["aaaa", "bbbb"]), batch.plan(["cccc"]), batch.plan(["dddd", "bbbb"])
            )
        assert [texts(plan) for plan in plans] == [["bbbb", "aaaa"], ["cccc"], ["bbbb", "dddd"]]
        assert [plan.resident_tokens for plan in plans] == [0, 0, 1]
        assert all([await planner.acommit(plan) for plan in plans])
        assert planner.windows == [3]
        stats = planner.stats()
        assert (stats.plans, stats.commits, stats.open_plans) == (3, 3, 0)
        assert stats.hold_latency.total == stats.plan_latency.total == 3
        assert 0 < stats.hold_latency.seconds <= stats.plan_latency.seconds
        planner.reset()
        assert planner.stats().hold_latency.total == 0

    asyncio.run(main())


def test_delay_ends_the_wait() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(0.001, max_requests=100) as batch:
            for _ in range(2):
                await asyncio.gather(batch.plan(["a", "b"]), batch.plan(["b", "c"]))
        assert planner.windows == [2, 2]

    asyncio.run(main())


def test_more_requests_than_a_window_holds_start_the_next_one() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(0.001, max_requests=4) as batch:
            await asyncio.gather(*[batch.plan([f"block {i}"]) for i in range(10)])
        assert planner.windows == [4, 4, 2]

    asyncio.run(main())


def test_callers_receive_their_plans_in_execution_order() -> None:
    async def main() -> None:
        planner = ContextPlanner(annotate="none")
        received: list[str] = []

        async def caller(name: str, *blocks: str) -> None:
            await batch.plan(blocks)
            received.append(name)

        async with planner.micro_batch(AN_HOUR, max_requests=3) as batch:
            await asyncio.gather(caller("first", "aaaa", "bbbb"), caller("alone", "c"), caller("second", "bbbb", "d"))
        assert received == ["first", "second", "alone"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"conversation": "chat"},
        {"placement": "tail"},
        {"placement": "tail", "conversation": "chat"},
        {"placement": "tail", "history": []},
    ],
)
def test_requests_that_fit_in_no_window_are_planned_at_once(options: dict[str, Any]) -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(AN_HOUR) as batch:
            plan = await batch.plan(["a", "b"], **options)
        assert plan.conversation == options.get("conversation")
        assert plan.placement == options.get("placement", "head")
        assert planner.windows == []
        assert planner.stats().hold_latency.total == 0

    asyncio.run(main())


def test_end_of_the_context_plans_the_requests_that_wait() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(AN_HOUR) as batch:
            waiting = [asyncio.create_task(batch.plan([text])) for text in "ab"]
            await asyncio.sleep(0)
        assert [texts(plan) for plan in await asyncio.gather(*waiting)] == [["a"], ["b"]]
        assert texts(await batch.plan(["c"])) == ["c"]
        assert planner.windows == [2]

    asyncio.run(main())


def test_requests_of_other_scopes_share_nothing() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        scopes: Sequence[dict[str, Any]] = [
            {"tenant": "a"},
            {"tenant": "b"},
            {"model": "m"},
            {"preamble": "p"},
            {"order_locked": True},
        ]
        async with planner.micro_batch(AN_HOUR, max_requests=5) as batch:
            plans = await asyncio.gather(*[batch.plan(["own", "text"], **scope) for scope in scopes])
        assert planner.windows == [3, 1, 1]
        assert [(plan.scope.tenant, plan.scope.model) for plan in plans] == [
            ("a", None),
            ("b", None),
            (None, "m"),
            (None, None),
            (None, None),
        ]
        assert [plan.resident_tokens for plan in plans] == [0] * 5
        assert plans[0].cache_salt is not None is plans[4].cache_salt
        assert plans[3].scope.preamble is not None

    asyncio.run(main())


def test_cancelled_call_leaves_the_others_unharmed() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(AN_HOUR, max_requests=3) as batch:
            early = [asyncio.create_task(batch.plan(["x", text])) for text in "ab"]
            await asyncio.sleep(0)
            early[0].cancel()
            await asyncio.sleep(0)
            plan = await batch.plan(["x", "c"])
            assert texts(await early[1]) == ["x", "b"]
            assert texts(plan) == ["x", "c"]
        assert early[0].cancelled()
        assert planner.windows == [2]
        assert (planner.stats().plans, planner.stats().open_plans) == (2, 2)

    asyncio.run(main())


def test_plan_of_a_call_cancelled_after_planning_is_abandoned() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(AN_HOUR, max_requests=2) as batch:
            early = asyncio.create_task(batch.plan(["a"]))
            await asyncio.sleep(0)
            late = asyncio.create_task(batch.plan(["b"]))
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: loop.call_soon(early.cancel))  # after both are planned, before `early` resumes
            assert texts(await late) == ["b"]
        with pytest.raises(asyncio.CancelledError):
            await early
        stats = planner.stats()
        assert (planner.windows, stats.plans, stats.abandons, stats.open_plans) == ([2], 2, 1, 1)

    asyncio.run(main())


def test_bad_request_is_refused_alone() -> None:
    async def main() -> None:
        planner = WindowCounter(annotate="none")
        async with planner.micro_batch(0.001) as batch:
            results = await asyncio.gather(
                batch.plan(["a"]),
                batch.plan("text"),
                batch.plan([7]),  # type: ignore[list-item]
                batch.plan(["a"], model=7),  # type: ignore[arg-type]
                batch.plan(["a"], placement="middle"),  # type: ignore[arg-type]
                return_exceptions=True,
            )
        assert [type(result).__name__ for result in results] == [
            "ContextPlan",
            "TypeError",
            "TypeError",
            "TypeError",
            "ValueError",
        ]
        assert planner.windows == [1]

    asyncio.run(main())


def test_failure_of_the_planner_reaches_every_caller() -> None:
    class Broken(ContextPlanner):
        def plan_window(self, requests: Any, **options: Any) -> BatchPlan:
            raise RuntimeError("broken")

    async def main() -> None:
        async with Broken().micro_batch(AN_HOUR, max_requests=2) as batch:
            results = await asyncio.gather(batch.plan(["a"]), batch.plan(["b"]), return_exceptions=True)
        assert [str(result) for result in results] == ["broken", "broken"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_requests": 0}, "max_requests must be 1 or more, got 0"),
        ({"max_requests": 2.0}, "max_requests must be an int, got float"),
        ({"max_delay": -1}, "max_delay must be 0 seconds or more, got -1"),
        ({"max_delay": float("nan")}, "max_delay must be 0 seconds or more, got nan"),
        ({"max_delay": "1"}, "max_delay must be a number of seconds, got str"),
    ],
)
def test_bounds_are_checked(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        ContextPlanner(annotate="none").micro_batch(**arguments)
    assert error in str(raised.value)


def test_observer_is_notified_of_each_plan() -> None:
    async def main() -> None:
        observer = Observer()
        async with ContextPlanner(observer=observer).micro_batch(AN_HOUR, max_requests=2) as batch:
            plans = await asyncio.gather(batch.plan([ContextBlock("a")]), batch.plan([ContextBlock("b")]))
        assert observer.ids == [plan.id for plan in plans]

    asyncio.run(main())
