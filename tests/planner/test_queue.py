"""Announced requests and open plans: what else a plan considers, for how long, and for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.planner.state import RequestQueue


def block(name: object, tokens: int = 100) -> ContextBlock:
    return ContextBlock(f"Everything about block {name}.", id=name, tokens=tokens)  # type: ignore[arg-type]


def blocks(names: Iterable[object]) -> list[ContextBlock]:
    return [block(name) for name in names]


def ids(plan: ContextPlan) -> str:
    return "".join(str(planned.block.id) for planned in plan.blocks)


def tried(planner: ContextPlanner, names: Iterable[object], **options: Any) -> str:
    """Return the order that a request would get now, without leaving a plan open."""
    plan = planner.plan(blocks(names), **options)
    planner.abandon(plan)
    return ids(plan)


# -- announced requests --------------------------------------------------------------------------------------------


def test_a_plan_begins_with_what_a_waiting_request_shares() -> None:
    planner = ContextPlanner()
    assert tried(planner, "abcdef") == "abcdef"
    with planner.queued(blocks("xeyf")):
        first = planner.plan(blocks("abcdef"))
        assert set(ids(first)[:2]) == {"e", "f"}
        second = planner.plan(blocks("xeyf"))
    assert ids(second)[:2] == ids(first)[:2]


def test_a_waiting_request_without_shared_blocks_changes_nothing() -> None:
    planner = ContextPlanner()
    with planner.queued(blocks("uvwxyz")):
        assert tried(planner, "abcdef") == "abcdef"


def test_a_waiting_request_does_not_change_an_order_that_is_locked() -> None:
    planner = ContextPlanner()
    with planner.queued(blocks("ef")):
        assert tried(planner, "abcdef", order_locked=True) == "abcdef"
        assert tried(planner, "abcdef", placement="tail", history=["Hello."]) == "abcdef"


def test_a_plan_of_the_same_blocks_ends_one_announcement() -> None:
    planner = ContextPlanner()
    planner.queued(blocks("ef"))
    planner.queued(blocks("ef"))
    planner.queued(blocks("fe"))  # relevance order does not matter: the first of equal announcements ends
    for left in (2, 1, 0, 0):
        planner.plan(blocks("fe"))
        assert planner.stats().queued_requests == left


def test_a_request_is_not_its_own_neighbour() -> None:
    planner = ContextPlanner()
    planner.queued([*blocks("abc"), "", block("a")])
    assert tried(planner, "abc") == "abc"
    assert planner.stats().queued_requests == 0


def test_an_announcement_ends_when_it_is_withdrawn_and_with_its_block() -> None:
    planner = ContextPlanner()
    waiting = planner.queued(blocks("ef"))
    other = planner.queued(blocks("gh"))
    assert planner.stats().queued_requests == 2
    waiting.withdraw()
    waiting.withdraw()
    assert planner.stats().queued_requests == 1
    assert tried(planner, "abcdef") == "abcdef"
    other.withdraw()
    with planner.queued(blocks("ef")):
        assert planner.stats().queued_requests == 1
    assert planner.stats().queued_requests == 0


def test_announcements_are_bounded() -> None:
    planner = ContextPlanner()
    first = planner.queued(blocks("ef"))
    announced = [planner.queued([f"text {i}"]) for i in range(1_000)]
    assert planner.stats().queued_requests == 256
    assert tried(planner, "abcdef") == "abcdef"  # the oldest are forgotten
    first.withdraw()
    for waiting in announced:
        waiting.withdraw()
    assert planner.stats().queued_requests == 0


def test_reset_ends_all_announcements() -> None:
    planner = ContextPlanner()
    waiting = planner.queued(blocks("ef"))
    planner.reset()
    assert planner.stats().queued_requests == 0
    planner.queued(blocks("gh"))
    waiting.withdraw()
    assert planner.stats().queued_requests == 1  # not that of another announcement


@pytest.mark.parametrize("scope", [{"tenant": "eve"}, {"model": "other"}, {"preamble": "Be brief."}, {}])
def test_scopes_do_not_share_their_queues(scope: Any) -> None:
    planner = ContextPlanner()
    with planner.queued(blocks("ef"), tenant="acme"):
        planner.plan(blocks("ef"), tenant="acme", preamble="Be polite.")  # in flight, in yet another scope
        assert planner.stats().queued_requests == 1
        assert tried(planner, "abcdef", **scope) == "abcdef"
        assert set(tried(planner, "abcdef", tenant="acme")[:2]) == {"e", "f"}


def test_queued_checks_its_arguments() -> None:
    planner = ContextPlanner()
    with pytest.raises(TypeError, match="tenant must be a str or None, got int"):
        planner.queued(blocks("ab"), tenant=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="blocks"):
        planner.queued("ab")
    assert planner.stats().queued_requests == 0


# -- aplan ---------------------------------------------------------------------------------------------------------

SHARED = "xyz"
EIGHT = [f"{own}{SHARED}" for own in "abcdefgh"]


async def test_tasks_that_are_started_together_share_their_prefix() -> None:
    planner = ContextPlanner()
    plans = await asyncio.gather(*[planner.aplan(blocks(names)) for names in EIGHT])
    assert {ids(plan)[:3] for plan in plans} == {ids(plans[0])[:3]}
    assert set(ids(plans[0])[:3]) == set(SHARED)
    assert planner.stats().queued_requests == 0


async def test_tasks_that_share_nothing_keep_relevance_order() -> None:
    planner = ContextPlanner()
    plans = await asyncio.gather(*[planner.aplan([f"{i} {j}" for j in range(5)]) for i in range(8)])
    assert not any(plan.reordered for plan in plans)
    assert planner.stats().note_tokens == 0


async def test_a_cancelled_task_leaves_no_announcement_and_no_plan() -> None:
    planner = ContextPlanner()
    others = [asyncio.ensure_future(planner.aplan(blocks(names))) for names in EIGHT[:4]]
    cancelled = [asyncio.ensure_future(planner.aplan(blocks(names))) for names in EIGHT[4:]]
    asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in cancelled])
    await asyncio.sleep(0)
    assert planner.stats().queued_requests == 8
    plans = await asyncio.gather(*others)
    assert [type(each) for each in await asyncio.gather(*cancelled, return_exceptions=True)] == (
        [asyncio.CancelledError] * 4
    )
    assert {"".join(sorted(ids(plan)[:3])) for plan in plans} == {SHARED}
    stats = planner.stats()
    assert (stats.queued_requests, stats.plans, stats.open_plans) == (0, 4, 4)


async def test_a_failed_call_leaves_no_announcement() -> None:
    planner = ContextPlanner()
    with pytest.raises(ValueError, match="placement"):
        await planner.aplan(blocks("ab"), placement="foot")  # type: ignore[arg-type]
    assert planner.stats().queued_requests == 0


async def test_later_turns_are_not_announced() -> None:
    planner = ContextPlanner()
    seen: list[int] = []

    async def look() -> None:
        seen.append(planner.stats().queued_requests)

    await asyncio.gather(
        planner.aplan(blocks("ab"), placement="tail", history=["[a] Hello."]),
        planner.aplan(blocks("cd"), placement="tail", conversation="chat"),
        planner.aplan(blocks("ef"), placement="tail", history=[]),
        planner.aplan(blocks("gh")),
        look(),
    )
    assert seen == [2]


def test_aplan_needs_no_asyncio() -> None:
    """Other frameworks, such as trio, drive coroutines themselves."""
    planner = ContextPlanner()
    coroutine = planner.aplan(blocks("ab"))
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    assert ids(end.value.value) == "ab"
    assert planner.stats().queued_requests == 0


# -- plans in flight -----------------------------------------------------------------------------------------------


def test_an_open_plan_leads_the_order_and_is_not_predicted() -> None:
    planner = ContextPlanner()
    open_plan = planner.plan(blocks("ab"))
    follower = planner.plan(blocks("cba"))
    assert (ids(follower), follower.resident_tokens) == ("abc", 0)
    planner.abandon(follower)
    planner.commit(open_plan)
    follower = planner.plan(blocks("cba"))
    assert (ids(follower), follower.resident_tokens) == ("abc", 200)


def test_a_batch_in_flight_is_none_of_single_plans() -> None:
    planner = ContextPlanner()
    planner.plan_batch({"1": blocks("ab"), "2": blocks("abc")})
    assert tried(planner, "cba") == "cba"


@pytest.mark.parametrize("end", ["abandon", "reset", "error"])
def test_an_ended_plan_leads_no_order(end: str) -> None:
    planner = ContextPlanner()
    if end == "error":
        with pytest.raises(ZeroDivisionError), planner.planning(blocks("ab")):
            raise ZeroDivisionError
    else:
        plan = planner.plan(blocks("ab"))
        assert tried(planner, "cba") == "abc"
        if end == "abandon":
            assert planner.abandon(plan)
        else:
            planner.reset()
    assert tried(planner, "cba") == "cba"


def test_a_plan_in_another_scope_leads_no_order() -> None:
    planner = ContextPlanner()
    planner.plan(blocks("ab"), tenant="acme")
    planner.plan(blocks("ab"), preamble="Be brief.")
    assert tried(planner, "cba") == "cba"
    assert tried(planner, "cba", tenant="acme") == "abc"


def test_a_later_turn_in_flight_leads_no_order() -> None:
    planner = ContextPlanner()
    planner.plan(blocks("ab"), placement="tail", history=["Hello."])
    assert tried(planner, "cba") == "cba"


def test_pinned_blocks_in_flight_are_followed() -> None:
    planner = ContextPlanner()
    first = ContextBlock("Everything about block p.", id="p", tokens=100, pinned="start")
    planner.plan([*blocks("ab"), first])
    assert tried(planner, "cba") == "cba"  # the plan in flight begins with the pinned block
    plan = planner.plan([*blocks("cba"), first])
    assert ids(plan) == "pabc"


def test_lost_plans_age_out() -> None:
    planner = ContextPlanner()
    planner.plan(blocks("ab"))  # the caller loses it
    for i in range(1_001):
        planner.abandon(planner.plan([f"text {i}"]))
    assert tried(planner, "cba") == "cba"
    assert planner.stats().open_plans == 1


def test_plans_in_flight_are_bounded() -> None:
    queue = RequestQueue()
    keys = [b"%d" % i for i in range(1_000)]
    for i in range(1_000):
        queue.start(f"plan-{i}", keys[i : i + 1], ())
    assert queue.take(keys, keys)[0] == [(key,) for key in keys[936:]]
    for i in range(1_000):
        queue.flights.pop(f"plan-{i}", None)
    assert queue.take(keys, keys)[0] == []


def test_only_plans_in_flight_that_begin_with_a_block_of_the_request_are_compared() -> None:
    queue = RequestQueue()
    queue.start("other", [b"x", b"a"], ())
    queue.start("own", [b"b", b"x"], ())
    queue.start("empty", [], ())
    assert queue.take([b"a", b"b"], [])[0] == [(b"b", b"x")]


def test_threads_announce_plan_and_end_requests_at_once() -> None:
    planner = ContextPlanner()
    failures: list[BaseException] = []

    def work(names: Sequence[str]) -> None:
        try:
            for turn in range(100):
                with planner.queued(blocks(names)), planner.queued([f"{names} {turn}"]):
                    plan = planner.plan(blocks(names))
                    assert sorted(ids(plan)) == sorted(names)
                    assert (planner.abandon if turn % 3 else planner.commit)(plan)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(names,)) for names in EIGHT[:4]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = planner.stats()
    assert failures == []
    assert (stats.plans, stats.open_plans, stats.queued_requests, stats.policy_errors) == (400, 0, 0, 0)
