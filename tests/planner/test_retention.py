"""Touches: named in time, only where they pay, and stopped by what the engine reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.cache_profiles import PROFILES, CacheProfile, MarkRules, llama_cpp
from warmprefix.plan import Retention, Scope, Touch
from warmprefix.planner import retention

Path = tuple[bytes, ...]
TOKENS = 100
CAPACITY = 6_000


class Engine:
    """Prefixes by last use, or by priority first; evicts the lowest one that no other continues."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.now = 0
        self.kept: OrderedDict[Path, tuple[int, int]] = OrderedDict()

    def serve(self, path: Path, priority: int = 0) -> int:
        """Return the cached tokens of a prompt."""
        self.now += 1
        cached = 0
        for end in range(1, len(path) + 1):
            prefix = path[:end]
            before = self.kept.get(prefix)
            cached += before is not None and cached == end - 1
            self.kept[prefix] = max(before[0] if before else 0, priority), self.now
        while TOKENS * len(self.kept) > self.capacity:
            parents = {prefix[:-1] for prefix in self.kept}
            del self.kept[min((self.kept[leaf], leaf) for leaf in self.kept if leaf not in parents)[1]]
        return TOKENS * cached


class Outcome(NamedTuple):
    orders: list[tuple[int, ...]]
    touches: list[Touch]
    cached: int
    computed: int
    """Tokens of contexts and touches that were not cached."""


def requests(count: int, hot: int = 4) -> Iterator[list[ContextBlock]]:
    """Yield requests of new blocks; every fourth one also has one of a few sets of blocks that return."""
    random = Random(7)
    for number in range(count):
        first = [f"hot {random.randrange(hot)} {i}" for i in range(3)] if number % 4 == 0 else []
        yield [ContextBlock(text, tokens=TOKENS) for text in [*first, *[f"new {number} {i}" for i in range(3)]]]


def run(
    planner: ContextPlanner,
    engine: Engine,
    count: int = 600,
    *,
    touches: bool = True,
    foreign: int = 0,
    tenant: str | None = None,
) -> Outcome:
    served: dict[str, Path] = {}
    outcome = Outcome([], [], 0, 0)
    cached = computed = 0
    is_priority = planner.profile.eviction == "priority"
    for number, blocks in enumerate(requests(count)):
        plan = planner.plan(blocks, tenant=tenant)
        path = served[plan.id] = keys(plan)
        found = engine.serve(path, engine.now if is_priority else 0)
        cached += found
        computed += TOKENS * len(path) - found
        planner.commit(plan, report=EngineReport(found, TOKENS * len(path)))
        outcome.orders.append(plan.order)
        for touch in planner.touches(plan.scope, 2) if touches else ():
            part = served[touch.plan_id][: touch.blocks]
            assert touch.tokens == TOKENS * touch.blocks == TOKENS * len(part)
            found = engine.serve(part, engine.now + touch.priority if is_priority else 0)
            computed += TOKENS * len(part) + 17 - found
            planner.touched(touch, EngineReport(found, TOKENS * len(part)))
            outcome.touches.append(touch)
        for other in range(foreign):
            engine.serve(tuple([b"foreign %d %d %d" % (number, other, i) for i in range(6)]))
    return outcome._replace(cached=cached, computed=computed)


def keys(plan: ContextPlan) -> Path:
    return tuple([planned.block.fingerprint for planned in plan.blocks])


def planner_of(profile: CacheProfile | str = "auto", capacity: int = CAPACITY) -> ContextPlanner:
    return ContextPlanner(capacity_tokens=capacity, profile=profile, annotate="none")


@pytest.mark.parametrize(("profile", "more"), [("auto", 1.15), ("priority-eviction", 1.5)])
def test_touches_keep_what_returns_later_than_the_lru_holds_it(profile: str, more: float) -> None:
    without = run(planner_of(profile), Engine(), touches=False)
    planner = planner_of(profile)
    touched = run(planner, Engine())
    assert touched.cached > more * without.cached
    assert touched.computed < without.computed
    stats = planner.stats()
    assert stats.touches == len(touched.touches) > 10
    assert stats.retaining_scopes == 1
    assert {touch.priority for touch in touched.touches} <= ({0} if profile == "auto" else {30, 60, 90, 200, 400, 600})
    assert all(touch.priority > 0 for touch in touched.touches) == (profile != "auto")
    again = run(planner_of(profile), Engine())  # deterministic but for the ids
    assert again[:1] + again[2:] == touched[:1] + touched[2:]
    assert [touch[2:] for touch in again.touches] == [touch[2:] for touch in touched.touches]


def test_touches_come_in_time_where_the_engine_also_holds_other_text() -> None:
    capacity = round(0.95 * CAPACITY)
    without = run(planner_of(), Engine(capacity), touches=False)
    planner = planner_of()
    touched = run(planner, Engine(capacity))
    assert len(touched.touches) > 10
    assert touched.computed < without.computed
    assert planner.stats().touch_tokens < 0.1 * sum(touch.tokens for touch in touched.touches)


def test_a_planner_that_nobody_asks_touches_nothing() -> None:
    planner = planner_of()
    assert not run(planner, Engine(), touches=False).touches
    assert planner.stats().retaining_scopes == planner.stats().touches == 0
    assert not planner._state._retained


def test_touches_stop_where_others_use_most_of_the_engine() -> None:
    without = run(planner_of(), Engine(), touches=False, foreign=4)
    touched = run(planner_of(), Engine(), foreign=4)
    assert touched.computed <= 1.005 * without.computed


def test_touches_stop_if_the_engine_does_not_report_them() -> None:
    planner, engine = planner_of(), Engine()
    sent = 0
    for blocks in requests(600):
        plan = planner.plan(blocks)
        engine.serve(keys(plan))
        planner.commit(plan)
        for touch in planner.touches(plan.scope, 2):
            planner.touched(touch)
            sent += 1
    assert 0 < sent < 10


def test_a_path_is_named_once_until_it_is_answered() -> None:
    planner, engine = planner_of(), Engine()
    named: list[tuple[str, int]] = []
    for blocks in requests(300):
        plan = planner.plan(blocks)
        engine.serve(keys(plan))
        planner.commit(plan)
        named += [(touch.plan_id, touch.blocks) for _ in range(3) for touch in planner.touches(plan.scope, 9)]
    assert named
    assert len(named) == len(set(named))


def test_a_path_that_a_waiting_request_is_about_to_use_is_not_touched() -> None:
    planner, engine = planner_of(), Engine()
    hot = [[ContextBlock(f"hot {number} {i}", tokens=TOKENS) for i in range(3)] for number in range(4)]
    sets = [{block.fingerprint for block in blocks} for blocks in hot]
    served: dict[str, Path] = {}
    others = later = 0

    def touched(scope: Scope) -> Iterator[set[bytes]]:
        for touch in planner.touches(scope, 9):
            path = served[touch.plan_id][: touch.blocks]
            planner.touched(touch, EngineReport(engine.serve(path), touch.tokens))
            yield set(path)

    for number, blocks in enumerate(requests(600)):
        plan = planner.plan(blocks)
        served[plan.id] = keys(plan)
        found = engine.serve(keys(plan))
        planner.commit(plan, report=EngineReport(found, TOKENS * len(blocks)))
        with planner.queued([ContextBlock("new"), *reversed(hot[number % 4])]):
            for path in touched(plan.scope):
                assert not path <= sets[number % 4]
                others += 1
        for path in touched(plan.scope):
            assert path <= sets[number % 4]
            later += 1
    assert others > 5
    assert later > 5


@pytest.mark.parametrize("profile", ["auto", "priority-eviction"])
def test_a_failure_of_the_ghosts_does_not_reach_the_caller(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(profile)

    def fail(*args: object) -> None:
        raise ArithmeticError("the ghosts have half learned an order")

    with monkeypatch.context() as broken:
        broken.setattr(retention, "at_risk", fail)
        failing = run(planner, Engine())
    errors = planner.stats().policy_errors
    assert errors > 1
    assert not failing.touches
    assert failing.orders == run(planner_of(profile), Engine(), touches=False).orders
    assert run(planner, Engine()).touches  # they start again
    assert planner.stats().policy_errors == errors


@pytest.mark.parametrize(
    "profile",
    [
        PROFILES["sglang-checkpoints"],
        PROFILES["anthropic"],
        PROFILES["deepseek"],
        PROFILES["openai-before-5.6"],
        llama_cpp(),
        replace(PROFILES["full-attention"], marks=MarkRules()),
    ],
    ids=lambda profile: profile.name,
)
def test_caches_in_which_a_touch_keeps_nothing_are_not_touched(profile: CacheProfile) -> None:
    assert not run(planner_of(profile), Engine(), 200).touches


def test_plans_say_what_they_deserve_of_an_engine_with_priorities() -> None:
    planner = planner_of("priority-eviction")
    plan = planner.plan(next(requests(1)))
    assert plan.retention is None
    run(planner, Engine())
    hot = [ContextBlock(f"hot 1 {i}", tokens=TOKENS) for i in range(3)]
    for _ in range(5):
        with planner.planning(hot) as plan:
            pass
    assert plan.retention in {Retention(3, bonus * 3) for bonus in (30, 200)}
    with planner.planning(["never seen"]) as plan:
        assert plan.retention == Retention(0, 0)


def test_a_path_is_kept_as_long_as_was_named_whatever_the_answer_says() -> None:
    planner = planner_of("priority-eviction")
    named = next(iter(unanswered(planner)))
    planner.touched(named._replace(priority=10**9), EngineReport(named.tokens, named.tokens))
    state = planner._state.find(named.scope)
    assert state is not None
    assert {node.age for node in state.tree.order} == {0, named.priority}


def unanswered(planner: ContextPlanner) -> list[Touch]:
    """Return touches that a planner names after some requests, none of which was answered."""
    engine = Engine()
    named: list[Touch] = []
    for blocks in requests(300):
        plan = planner.plan(blocks)
        found = engine.serve(keys(plan))
        planner.commit(plan, report=EngineReport(found, TOKENS * len(blocks)))
        named += planner.touches(plan.scope)
    return named


def test_answers_of_unknown_touches_change_nothing() -> None:
    planner = planner_of()
    outcome = run(planner, Engine())
    before = planner.stats()
    touch = outcome.touches[-1]
    for unknown in (
        touch,  # answered before
        touch._replace(plan_id="none"),
        touch._replace(scope=Scope("other", None, None)),
        touch._replace(blocks=10**9),
    ):
        planner.touched(unknown, EngineReport(0, 10**15))
    after = planner.stats()
    assert (after.touches, after.touch_tokens) == (before.touches, before.touch_tokens)
    assert planner.touches(Scope("never", "used", None), 10**9) == []
    with pytest.raises(ValueError, match="most must be 1 or more"):
        planner.touches(touch.scope, 0)


def test_a_reset_forgets_touches() -> None:
    planner = planner_of()
    outcome = run(planner, Engine())
    planner.reset()
    assert planner.touches(outcome.touches[0].scope) == []
    assert planner.stats().retaining_scopes == 0
    assert run(planner, Engine()).cached == outcome.cached


def test_tenants_are_touched_by_themselves() -> None:
    alone = run(planner_of(), Engine(), tenant="a")
    planner, engines = planner_of(), {"a": Engine(), "b": Engine()}
    of_b = run(planner, engines["b"], 300, tenant="b")
    of_a = run(planner, engines["a"], tenant="a")
    assert [touch[2:] for touch in of_a.touches] == [touch[2:] for touch in alone.touches]
    assert {touch.scope.tenant for touch in of_a.touches} == {"a"}
    assert not {touch.plan_id for touch in of_a.touches} & {touch.plan_id for touch in of_b.touches}


def test_scopes_that_share_a_capacity_are_touched_within_their_part() -> None:
    planner, engine = ContextPlanner(annotate="none"), Engine()
    served: dict[str, Path] = {}
    named = 0
    for number, blocks in enumerate(requests(1_000)):
        plan = planner.plan(blocks, preamble=f"You are {number % 2}.")
        path = served[plan.id] = (b"%d" % (number % 2), *keys(plan))
        found = engine.serve(path)
        context = max(found - TOKENS, 0)
        planner.commit(plan, report=EngineReport(context, TOKENS * len(path) - TOKENS, capacity_tokens=CAPACITY))
        for touch in planner.touches(plan.scope, 2):
            found = max(engine.serve(served[touch.plan_id][: touch.blocks + 1]) - TOKENS, 0)
            planner.touched(touch, EngineReport(found, touch.tokens))
            named += 1
    assert planner.stats().capacity_source != "default"
    assert named


def test_ghosts_of_thousands_of_scopes_are_bounded() -> None:
    planner = planner_of(capacity=500)
    for number in range(3_000):
        blocks = [ContextBlock(f"{number % 1_000} {i}", tokens=TOKENS) for i in range(6)]
        with planner.planning(blocks, tenant=f"tenant {number % 1_000}") as plan:
            pass
        planner.touches(plan.scope)
    retained = planner._state._retained
    assert len(retained) <= 32
    assert not any(kept._ghosts for kept in retained.values())
