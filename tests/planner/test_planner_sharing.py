"""How a planner shares what it learns; what carries it between processes is tested in sharing/."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from warmprefix import Choice, ContextBlock, ContextPlan, ContextPlanner, Scope
from warmprefix.order_sharing import Learn, LearnedOrder, NoSharing, SharingStats
from warmprefix.ordering import BlockView, PrefixView, ServedBlock


class Wire:
    """Carries orders between the planners of one process, at once."""

    def __init__(self) -> None:
        self.ends: list[End] = []

    def end(self) -> End:
        self.ends.append(End(self))
        return self.ends[-1]


class End:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.followed: dict[Scope, Learn] = {}
        self.published = 0
        self.closed = False
        self.caught_up = True

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        self.published += 1
        for other in self.wire.ends:
            if other is not self and scope in other.followed:
                other.followed[scope]([order])

    def follow(self, scope: Scope, learn: Learn) -> None:
        self.followed[scope] = learn

    def unfollow(self, scope: Scope) -> None:
        del self.followed[scope]

    def has_caught_up(self, scope: Scope) -> bool:
        return self.caught_up

    def close(self) -> None:
        self.closed = True

    def stats(self) -> SharingStats:
        return SharingStats(published=self.published, dropped=1, malformed=2, errors=3)


def blocks(*numbers: int) -> list[ContextBlock]:
    return [ContextBlock(f"Text {n}.", id=f"Doc_{n}", tokens=100) for n in numbers]


def serve(planner: ContextPlanner, *numbers: int, **scope: str) -> ContextPlan:
    plan = planner.plan(blocks(*numbers), **scope)  # type: ignore[arg-type]
    assert planner.commit(plan)
    return plan


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_a_worker_plans_on_orders_that_another_served(wire: Wire) -> None:
    one, other = ContextPlanner(sharing=wire.end()), ContextPlanner(sharing=wire.end())
    other.plan([])  # so it follows the scope
    serve(one, 1, 2, 3)
    plan = other.plan(blocks(3, 2, 1))
    assert [planned.block.id for planned in plan.blocks] == ["Doc_1", "Doc_2", "Doc_3"]
    assert plan.resident_tokens == 300
    assert other.stats().shared_orders == 1
    assert other.stats().commits == 0
    assert one.stats().published_orders == 1
    assert one.stats().sharing_errors == 6


def test_shared_orders_are_learned_like_own_ones(wire: Wire) -> None:
    """Ranks too: policies estimate from them how often each rank recurs."""
    seen: list[list[ServedBlock]] = []

    class Noting:
        def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
            return list(reversed(range(len(blocks))))

        def observe(self, served: Sequence[BlockView]) -> None:
            seen.append([block for block in served if isinstance(block, ServedBlock)])

    one, other = (ContextPlanner(policy=Noting, sharing=wire.end()) for _ in range(2))
    other.plan([])
    serve(one, 1, 2, 3)
    serve(one, 1, 2, 3)
    other_saw, one_saw = seen[0::2], seen[1::2]
    assert other_saw == one_saw
    assert [block.rank for block in one_saw[0]] == [2, 1, 0]
    assert [block.resident for block in one_saw[1]] == [True, True, True]


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_orders_of_others_do_not_loosen_the_brake(wire: Wire, tenant: str | None) -> None:
    one, other = (ContextPlanner(sharing=wire.end(), capacity_tokens=400) for _ in range(2))
    places, scope = [1, 2, 3, 4, 5, 6], {} if tenant is None else {"tenant": tenant}
    scores = [9, 8, 7, 5, 4.9, 4.8]
    scored = [replace(block, score=score) for block, score in zip(blocks(*places), scores, strict=True)]
    serve(one, 1, 2, 3, 4, **scope)
    entered = 0
    for _ in range(100):
        for _ in range(9):
            serve(other, 1, 2, 3, 6, **scope)
        with one.planning(scored, choose=Choice(k=4, most=0.1), tenant=tenant) as plan:
            entered += plan.entered == (5,)
    assert one.stats().shared_orders == 900
    assert 0 < entered < 0.1 * (100 + 50) + 2


def test_nothing_is_learned_across_scopes(wire: Wire) -> None:
    one, other = ContextPlanner(sharing=wire.end()), ContextPlanner(sharing=wire.end())
    other.plan([], tenant="b")
    other.plan([], tenant="a", model="another")
    serve(one, 1, 2, tenant="a")
    assert other.plan(blocks(2, 1), tenant="b").order == (0, 1)
    assert other.plan(blocks(2, 1), tenant="a", model="another").order == (0, 1)
    assert other.stats().shared_orders == 0


def test_only_what_the_model_saw_is_shared(wire: Wire) -> None:
    planner = ContextPlanner(sharing=wire.end())
    planner.abandon(planner.plan(blocks(1, 2)))
    planner.plan(blocks(1, 2))
    planner.commit(planner.plan([]))
    assert planner.stats().published_orders == 0


def test_scopes_are_followed_as_long_as_they_are_remembered(wire: Wire) -> None:
    end = wire.end()
    planner = ContextPlanner(sharing=end, max_scopes=2)
    for tenant in "abc":
        planner.plan(blocks(1), tenant=tenant)
    assert [scope.tenant for scope in end.followed] == ["b", "c"]
    planner.reset()
    assert not end.followed
    planner.plan(blocks(1), tenant="b")
    assert [scope.tenant for scope in end.followed] == ["b"]


def test_orders_of_a_scope_that_was_just_dropped_are_ignored(wire: Wire) -> None:
    end = wire.end()
    planner = ContextPlanner(sharing=end)
    planner.plan(blocks(1))
    (learn,) = end.followed.values()
    planner.reset()
    learn([LearnedOrder([b"A" * 16], [1], [0])])
    assert planner.stats().shared_orders == 0
    assert planner.stats().scopes == 0


def test_sharing_does_not_keep_a_planner_alive(wire: Wire) -> None:
    end = wire.end()
    planner = ContextPlanner(sharing=end)
    planner.plan(blocks(1))
    (learn,) = end.followed.values()
    gone = weakref.ref(planner)
    del planner
    gc.collect()
    assert gone() is None
    learn([LearnedOrder([b"A" * 16], [1], [0])])


def test_close_ends_the_sharing(wire: Wire) -> None:
    end = wire.end()
    with ContextPlanner(sharing=end):
        assert not end.closed
    assert end.closed


async def test_aclose_ends_the_sharing(wire: Wire) -> None:
    end = wire.end()
    async with ContextPlanner(sharing=end):
        assert not end.closed
    assert end.closed


def test_no_sharing_is_an_object_too() -> None:
    off = NoSharing()
    planner = ContextPlanner(sharing=off)
    serve(planner, 1, 2)
    assert planner.stats().published_orders == 0
    with pytest.raises(TypeError, match="sharing must be an OrderSharing or None, got str"):
        ContextPlanner(sharing="redis://localhost")  # type: ignore[arg-type]
