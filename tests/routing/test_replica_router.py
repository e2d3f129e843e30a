"""`ReplicaRouter`: costs, conversations, ends of requests, replicas, feeds, tenants, bounds and bad input."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prefix_integrity import check_integrity

from warmprefix import ContextBlock, ContextPlanner, EngineReport, fingerprint
from warmprefix.errors import NoAgentError
from warmprefix.plan import Scope
from warmprefix.residency import FeedStats, FoundCheckpoints, ResidencyTarget, ServedPrompt
from warmprefix_routing import Replica, ReplicaBounds, ReplicaRouter, ReplicaStats, Route
from warmprefix_routing.replica_state import ReplicaCache, ReplicaTenant

NAMES = ["a", "b", "c", "d"]


def block(number: int, tokens: int = 100, **options: Any) -> ContextBlock:
    return ContextBlock(f"document {number}", tokens=tokens, **options)


def served(router: ReplicaRouter, blocks: Sequence[ContextBlock], **options: Any) -> Route:
    route = router.route(blocks, **options)
    assert router.commit(route)
    return route


def resident(router: ReplicaRouter, blocks: Sequence[ContextBlock], **options: Any) -> int:
    """Return the predicted tokens, without a request."""
    route = router.route(blocks, **options)
    router.abandon(route)
    return route.resident_tokens


def on(router: ReplicaRouter, replica: str, start: int = 0, **options: Any) -> ContextBlock:
    """Return a block whose requests go to this replica, other things being equal."""
    for number in range(start, start + 1_000):
        route = router.route([block(number)], **options)
        router.abandon(route)
        if route.replica == replica:
            return block(number)
    raise AssertionError("no block prefers it")


def caches_of(tenant: ReplicaTenant) -> Iterator[ReplicaCache]:
    for scope in tenant.scopes.values():
        yield from scope.caches.values()


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_request_goes_where_its_best_order_is_held() -> None:
    router = ReplicaRouter(NAMES)
    home = served(router, [block(1), block(2), block(3)]).replica
    again = router.route([block(9), block(3), block(2), block(1)])
    assert (again.replica, again.resident_tokens) == (home, 300)
    assert again.cost == again.costs[home] < min(cost for name, cost in again.costs.items() if name != home)


def test_a_locked_order_is_worth_its_own_prefix_only() -> None:
    router = ReplicaRouter(NAMES)
    served(router, [block(1), block(2), block(3)])
    locked = router.route([block(1), block(3), block(2)], order_locked=True)
    assert locked.resident_tokens == 100
    pinned = router.route([block(3), block(2), block(1, pinned="start")])
    assert pinned.resident_tokens == 300
    assert router.route([block(1), block(3, pinned="start")]).resident_tokens == 0


def test_equal_costs_are_decided_by_the_first_block_that_not_all_hold() -> None:
    router = ReplicaRouter(NAMES)
    shared = block(0, tokens=1_000)
    for name in NAMES:
        served(router, [shared], replicas=[name])
    chosen = {served(router, [shared, block(number)], order_locked=True).replica for number in range(1, 30)}
    assert chosen == set(NAMES)
    assert len({served(router, [shared], order_locked=True).replica for _ in range(5)}) == 1


def test_the_choice_can_be_among_some_replicas() -> None:
    router = ReplicaRouter(NAMES)
    home = served(router, [block(1)]).replica
    others = [name for name in NAMES if name != home]
    route = router.route([block(1)], replicas=others)
    assert route.replica in others
    assert sorted(route.costs) == others
    router.fail(home)
    with pytest.raises(NoAgentError, match=f"'{home}' failed"):
        router.route([block(1)], replicas=[home])


def test_the_cost_is_the_documented_one() -> None:
    router = ReplicaRouter(["a", Replica("b", weight=2.0)], bounds=ReplicaBounds(waiting_weight=0.5, held_weight=0.1))
    first = router.route([block(1, 400)], prompt_tokens=1_000)
    other = "b" if first.replica == "a" else "a"
    second = router.route([block(2)], prompt_tokens=600)
    weights = {"a": 1.0, "b": 2.0}
    assert second.costs[first.replica] == pytest.approx((600 + 0.5 * 1_000 + 0.1 * 1_000) / weights[first.replica])
    assert second.costs[other] == pytest.approx(600 / weights[other])
    router.abandon(second)
    assert router.prefilled(first)
    third = router.route([block(1, 400)], prompt_tokens=600)
    assert third.costs[first.replica] == pytest.approx((600 - 400 + 0.1 * 1_000) / weights[first.replica])


def test_a_burst_with_one_new_document_goes_to_one_replica() -> None:
    router = ReplicaRouter(NAMES)
    burst = [router.route([block(1, 2_000), block(10 + n, 50)]) for n in range(4)]
    assert len({route.replica for route in burst}) == 1
    assert [route.resident_tokens for route in burst] == [0, 2_000, 2_000, 2_000]
    for route in burst:
        assert router.abandon(route)
    assert router.route([block(1, 2_000)]).resident_tokens == 0


def test_a_request_follows_the_shared_part_of_a_prompt_in_flight() -> None:
    router = ReplicaRouter(["a"])
    first = router.route([block(1), block(2)])
    assert resident(router, [block(1), block(3)]) == 100
    router.abandon(first)
    assert resident(router, [block(1), block(3)]) == 0


def test_a_run_counts_as_held_only_from_its_first_block_on() -> None:
    router = ReplicaRouter(["a"])
    first, second, third = [
        ContextBlock(f"part {number}", id=number, tokens=100, follows=number - 1) for number in (1, 2, 3)
    ]
    served(router, [second, block(9)])
    assert resident(router, [block(9), second]) == 200
    assert resident(router, [block(9), first, second]) == 0
    assert resident(router, [block(9), second, third]) == 100


def test_a_block_that_is_pinned_to_the_end_opens_no_prompt() -> None:
    router = ReplicaRouter(["a"])
    served(router, [block(2), block(1)])
    assert resident(router, [block(1), block(3), block(2, pinned="end")]) == 0
    served(router, [block(1), block(2)])
    assert resident(router, [block(1), block(3), block(2, pinned="end")]) == 100
    assert resident(router, [block(2, pinned="end"), block(1)]) == 200


@pytest.mark.parametrize("digest", [bytes(8), b"\xff" * 8])
def test_every_digest_makes_a_place(digest: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logarithm of a draw must not be 0, as it is if one in 2**53 counts as 1."""

    class Hash:
        def digest(self) -> bytes:
            return digest

    monkeypatch.setattr("warmprefix_routing.replicas.blake2b", lambda *_, **__: Hash())
    assert ReplicaRouter(["b", "a"]).route([block(1)]).replica == "b"


def test_order_of_replicas_does_not_matter() -> None:
    one, other = ReplicaRouter(NAMES), ReplicaRouter(reversed(NAMES))
    for number in range(200):
        blocks = [block(number % 37), block(number % 11)]
        first, second = one.route(blocks), other.route(blocks)
        assert (first.replica, first.costs) == (second.replica, second.costs)
        if number % 3:
            one.commit(first), other.commit(second)


def test_only_requests_of_a_leaving_replica_move() -> None:
    whole, rest = ReplicaRouter(NAMES), ReplicaRouter(NAMES)
    rest.leave("b")
    for number in range(200):
        before, after = whole.route([block(number)]), rest.route([block(number)])
        whole.abandon(before), rest.abandon(after)
        assert after.replica == before.replica or before.replica == "b"


def test_weights_divide_new_requests() -> None:
    router = ReplicaRouter([Replica("slow"), Replica("fast", weight=3.0)])
    shares = Counter(router.route([block(number)]).replica for number in range(400))  # all in flight at once
    assert 2.5 < shares["fast"] / shares["slow"] < 3.5


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_conversation_stays_where_its_history_is() -> None:
    router = ReplicaRouter(NAMES)
    home = served(router, [block(1)], conversation="chat").replica
    for turn in range(2, 30):
        route = served(router, [block(turn)], conversation="chat")
        assert (route.replica, route.resident_tokens) == (home, 100 * (turn - 1))
    assert router.stats().moved == 0


def test_history_is_lost_after_a_cache_full_of_other_tokens() -> None:
    router = ReplicaRouter([Replica("a", capacity_tokens=1_000)])
    for chat in range(100):
        router.commit(router.route(conversation=f"chat-{chat}", prompt_tokens=500))
    resident = [router.route(conversation=f"chat-{chat}", prompt_tokens=600).resident_tokens for chat in range(100)]
    assert resident == [0] * 98 + [500] * 2
    for turn in range(2, 9):  # its own turns do not push it out while it fits
        route = router.route(conversation="chat-99", prompt_tokens=100 * turn)
        router.commit(route, EngineReport(cached_tokens=100 * turn - 100, prompt_tokens=100 * turn))
    assert router.route(conversation="chat-99", prompt_tokens=900).resident_tokens == 800


def test_a_conversation_moves_when_waiting_costs_more_than_its_history() -> None:
    router = ReplicaRouter(["a", "b"], bounds=ReplicaBounds(waiting_weight=1.0))
    home = served(router, [block(1)], conversation="chat").replica
    first = on(router, home, 100)
    waiting = router.route([first], prompt_tokens=150)
    assert waiting.replica == home
    moved = router.route([block(2)], conversation="chat")
    assert moved.replica != home
    assert router.stats().moved == 1
    router.commit(moved)
    router.abandon(waiting)
    assert router.route([block(3)], conversation="chat").replica == moved.replica


def test_a_conversation_may_take_its_replica_farther_above_the_mean_than_a_single_prompt() -> None:
    router = ReplicaRouter(["a", "b"], bounds=ReplicaBounds(eps=0.25, floor_tokens=0, waiting_weight=0, held_weight=0))
    home = served(router, [block(1)], conversation="chat").replica
    other = "b" if home == "a" else "a"
    for name, tokens in ((home, 3_000), (other, 2_000)):
        router.route(prompt_tokens=tokens, replicas=[name])
    assert router.load()[home] + 1_000 == pytest.approx(4_000, rel=0.05)  # above 1.25 times the mean, 3,000
    single = router.route([block(1)], prompt_tokens=1_000)
    assert single.replica == other
    router.abandon(single)
    assert router.route(conversation="chat", prompt_tokens=1_000).replica == home
    router.route(prompt_tokens=30_000, replicas=[home])
    assert router.route(conversation="chat", prompt_tokens=1_000).replica == other


def test_reported_prompt_tokens_set_the_length_of_the_history() -> None:
    router = ReplicaRouter(NAMES)
    route = router.route([block(1)], conversation="chat")
    router.commit(route, EngineReport(cached_tokens=0, prompt_tokens=900))
    assert router.route([block(2)], conversation="chat").resident_tokens == 900
    assert router.route([block(2)], conversation="chat", prompt_tokens=500).resident_tokens == 500
    assert router.stats().reports == 1


def test_truncated_history_has_the_reported_length() -> None:
    router = ReplicaRouter(NAMES)
    for turn in range(20):
        route = router.route([block(turn)], conversation="chat")
        assert route.prompt_tokens == (400 if turn else 100)
        router.commit(route, EngineReport(prompt_tokens=300))


def test_context_behind_a_history_is_not_learned_as_a_prefix() -> None:
    router = ReplicaRouter(["a"])
    served(router, [block(1)], conversation="chat")
    served(router, [block(2)], conversation="chat")
    assert router.route([block(1)]).resident_tokens == 100
    assert router.route([block(2)]).resident_tokens == 0


# -- the end of a request ----------------------------------------------------------------------------------------------


def test_a_route_ends_once() -> None:
    router = ReplicaRouter(NAMES)
    route = router.route([block(1)])
    assert router.load()[route.replica] == 100
    assert router.abandon(route)
    assert not router.abandon(route)
    assert not router.commit(route)
    assert not router.prefilled(route)
    assert set(router.load().values()) == {0.0}
    stats = router.stats()
    assert (stats.routes, stats.abandons, stats.commits, stats.late_commits) == (1, 1, 0, 1)


def test_planned_order_is_learned() -> None:
    router, planner = ReplicaRouter(["a", "b"]), ContextPlanner()
    route = router.route([block(1), block(2)], preamble="Answer.")
    scope = f"model@{route.replica}"
    with planner.planning([block(2), block(1)], model=scope, preamble="Answer.") as plan:
        assert router.commit(route, plan=plan)
    assert plan.order == (0, 1)
    locked = router.route([block(2), block(1)], preamble="Answer.", order_locked=True)
    assert (locked.replica, locked.resident_tokens) == (route.replica, 200)
    assert router.route([block(1)], preamble="Answer.", order_locked=True).resident_tokens == 0


def test_report_of_fewer_cached_tokens_marks_the_rest_stale() -> None:
    router = ReplicaRouter(["a"])
    for last in (3, 4):
        served(router, [block(1, 1_000), block(2, 1_000), block(last, 1_000)])
    route = router.route([block(1, 1_000), block(2, 1_000), block(5, 1_000)])
    assert route.resident_tokens == 2_000
    router.commit(route, EngineReport(cached_tokens=0, prompt_tokens=3_000))
    assert router.stats().stale_paths == 1
    assert router.route([block(1, 1_000), block(2, 1_000), block(5, 1_000)]).resident_tokens == 3_000
    assert router.route([block(1, 1_000), block(2, 1_000), block(3, 1_000)]).resident_tokens == 2_000


def test_checkpoints_explain_a_shortfall() -> None:
    router = ReplicaRouter(["a"], profile="vllm-checkpoints(128)")
    served(router, [block(1, 1_000), block(2, 1_000)])
    router.commit(router.route([block(1, 1_000), block(3, 1_000)]), EngineReport(cached_tokens=0, prompt_tokens=2_000))
    assert router.stats().stale_paths == 0
    assert router.route([block(1, 1_000), block(2, 1_000)]).resident_tokens == 2_000


def test_simultaneous_requests_mark_nothing_stale() -> None:
    router = ReplicaRouter(["a"])
    report = EngineReport(cached_tokens=0, prompt_tokens=3_000)
    burst = [[block(1, 1_000), block(2, 1_000), block(last, 1_000)] for last in (3, 4, 5)]
    for route in [router.route(blocks) for blocks in burst]:
        assert router.commit(route, report)  # none of them could find what the others computed
    assert router.stats().stale_paths == 0
    assert [resident(router, blocks) for blocks in burst] == [3_000] * 3
    router.commit(router.route(burst[0]), report)
    assert router.stats().stale_paths == 1


def test_abandoned_requests_do_not_age_the_load() -> None:
    router = ReplicaRouter(NAMES, bounds=ReplicaBounds(window_tokens=1_000))
    home = served(router, [block(1)]).replica
    for number in range(100):
        router.abandon(router.route([block(number)]))
    assert router.load()[home] == 100


def test_predicted_cache_respects_the_replicas_capacity() -> None:
    router = ReplicaRouter([Replica("a", capacity_tokens=1_000)])
    for number in range(20):
        served(router, [block(number)])
    assert router.route([block(19)]).resident_tokens == 100
    assert router.route([block(0)]).resident_tokens == 0


# -- replicas come and go ----------------------------------------------------------------------------------------------


def test_returning_replica_holds_nothing() -> None:
    router = ReplicaRouter([Replica(name, capacity_tokens=5_000) for name in NAMES])
    route = served(router, [block(1)], conversation="chat")
    under_way = router.route([block(1)])
    router.fail(route.replica)
    router.fail(route.replica)
    assert route.replica not in router.load()
    assert not router.commit(under_way)
    elsewhere = served(router, [block(2)], conversation="chat")
    assert elsewhere.replica != route.replica
    assert elsewhere.resident_tokens == 0
    router.join(route.replica)
    back = next(replica for replica in router.replicas if replica.name == route.replica)
    assert back.capacity_tokens == 5_000
    again = router.route([block(1)])
    assert again.resident_tokens == 0
    assert set(again.costs.values()) == {100.0}


def test_joining_replica_is_not_flooded() -> None:
    router = ReplicaRouter(["a", "b", "c"], bounds=ReplicaBounds(floor_tokens=0))
    for number in range(300):
        served(router, [block(number)])
    router.join("d")
    shares = Counter(served(router, [block(1_000 + number)]).replica for number in range(400))
    assert 50 < shares["d"] < 150


def test_route_raises_without_a_replica() -> None:
    router = ReplicaRouter()
    with pytest.raises(NoAgentError, match="no replica is available"):
        router.route(["text"])
    router.join("a")
    router.fail("a")
    with pytest.raises(NoAgentError, match="'a' failed"):
        router.route(["text"])
    router.leave("a")
    with pytest.raises(ValueError, match="replica must be one of none, got 'a'"):
        router.leave("a")
    with pytest.raises(ValueError, match="replica must be one of none, got 'b'"):
        router.fail("b")
    with pytest.raises(ValueError, match="replica must be one of none, got 'b'"):
        router.target("b")


# -- feeds -------------------------------------------------------------------------------------------------------------


class FakeFeed:
    """A feed that records its calls, or fails; and a listener."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.followed: list[ResidencyTarget] = []
        self.remembered: list[ServedPrompt] = []
        self.changes: list[tuple[Scope, int]] = []
        self.closed = 0

    def follow(self, target: ResidencyTarget) -> None:
        self._failing()
        self.followed.append(target)

    def remember(self, served: ServedPrompt) -> None:
        self._failing()
        self.remembered.append(served)

    def is_complete(self, cache_salt: str | None) -> bool:
        self._failing()
        return True

    def stats(self) -> FeedStats:
        return FeedStats()

    def close(self) -> None:
        self.closed += 1

    def residency_changed(
        self, scope: Scope, keys: Sequence[bytes], resident_blocks: int, checkpoints: FoundCheckpoints | None = None
    ) -> None:
        self.changes.append((scope, resident_blocks))

    def _failing(self) -> None:
        if self.fails:
            raise OSError("the feed is broken")


def test_feed_overrides_predictions_and_reports() -> None:
    feed, listener = FakeFeed(), FakeFeed()
    planner = ContextPlanner()
    with ReplicaRouter(listener=listener) as router:
        router.join("a", feed=feed)
        blocks = [block(n, 1_000) for n in range(3)]
        for _ in range(2):
            route = router.route(blocks, tenant="acme")
            with planner.planning(blocks, tenant="acme", model="m@a") as plan:
                report = EngineReport(cached_tokens=0, prompt_tokens=3_000, prompt_token_ids=[1, 2, 3])
                router.commit(route, report, plan)
        assert router.stats().stale_paths == 0
        (target,) = feed.followed
        remembered = feed.remembered[-1]
        assert remembered.scope == Scope("acme", "m@a", None)
        target.residency_changed(remembered.scope, remembered.keys, 1)
        assert listener.changes == [(remembered.scope, 1)]
        assert resident(router, blocks, tenant="acme") == 1_000
        router.target("a").residency_changed(Scope("acme", None, None), remembered.keys, 2)
        assert resident(router, blocks, tenant="acme") == 2_000
        target.residency_changed(Scope("other", None, None), remembered.keys, 3)
        assert resident(router, blocks, tenant="other") == 0
        router.fail("a")
        target.residency_changed(remembered.scope, remembered.keys, 3)
        router.join("a")
        assert len(feed.followed) == 2
        assert resident(router, blocks, tenant="acme") == 0
    assert feed.closed == 1


def test_a_feed_ends_with_its_replica() -> None:
    feeds = [FakeFeed() for _ in range(3)]
    router = ReplicaRouter(["z"])
    router.join("a", feed=feeds[0])
    router.fail("a")
    assert feeds[0].closed == 0  # it is needed when the replica is back
    router.join("a", feed=feeds[1])
    router.join("b", feed=feeds[2])
    assert [feed.closed for feed in feeds] == [1, 0, 0]
    router.leave("a")
    router.fail("b")
    router.leave("b")
    assert [feed.closed for feed in feeds] == [1, 1, 1]
    router.close()
    assert [feed.closed for feed in feeds] == [1, 1, 1]


def test_reports_on_a_replica_that_left_are_ignored() -> None:
    listener = FakeFeed()
    router = ReplicaRouter(["a"], listener=listener)
    before = router.target("a")
    router.fail("a")
    router.join("a")
    before.residency_changed(Scope(None, None, None), [b"key"], 1)
    assert listener.changes == []
    router.target("a").residency_changed(Scope(None, None, None), [b"key"], 1)
    assert len(listener.changes) == 1


def test_failing_feed_counts_as_none() -> None:
    feed, planner = FakeFeed(fails=True), ContextPlanner()
    with ReplicaRouter() as router:
        router.join("a", feed=feed)
        route = router.route([block(1)])
        with planner.planning([block(1)]) as plan:
            assert router.commit(route, EngineReport(prompt_token_ids=[1]), plan)
        assert router.stats().feed_errors == 3
        assert router.route([block(1)]).resident_tokens == 100


# -- tenants -----------------------------------------------------------------------------------------------------------


def test_one_tenant_does_not_influence_another() -> None:
    alone, shared = ReplicaRouter(NAMES), ReplicaRouter(NAMES)
    for number in range(150):
        for _ in range(3):  # of one that does much, and has everything in flight
            shared.route([block(number), block(number % 7)], tenant="busy", conversation=f"chat {number % 5}")
        blocks = [block(number % 13), block(number % 7)]
        chat = f"chat {number % 5}" if number % 2 else None
        first = alone.route(blocks, tenant="quiet", conversation=chat)
        second = shared.route(blocks, tenant="quiet", conversation=chat)
        expected = replace(first, id=second.id)
        assert second == expected
        assert second.costs == expected.costs
        assert alone.load("quiet") == shared.load("quiet")
        if number % 4:
            alone.commit(first), shared.commit(second)


def test_bounds_are_per_tenant() -> None:
    router = ReplicaRouter(NAMES, bounds=ReplicaBounds(max_scopes=3, max_conversations=3, max_open_routes=3))
    home = served(router, [block(1)], tenant="acme", conversation="chat").replica
    under_way = router.route([block(1)], tenant="acme", preamble="Answer.")
    for number in range(50):
        served(router, [block(number)], tenant="other", preamble=f"p{number}", conversation=f"c{number}")
        router.route([block(number)], tenant="other", preamble=f"p{number}")
    again = router.route([block(2)], tenant="acme", conversation="chat")
    assert (again.replica, again.resident_tokens) == (home, 100)
    assert resident(router, [block(1)], tenant="acme") == 100
    assert router.commit(under_way)


def test_tenants_that_share_load_share_nothing_else() -> None:
    router = ReplicaRouter(["a", "b"], share_load=True)
    rival = on(router, "a", 50, tenant="two")
    first = router.route([on(router, "a", tenant="one")], prompt_tokens=4_000, tenant="one")
    second = router.route([rival], prompt_tokens=4_000, tenant="two")
    assert first.replica == "a"
    assert second.replica != first.replica
    assert router.load("one") == router.load("two") == router.load() == {"a": 4_000.0, "b": 4_000.0}
    router.commit(first)
    assert resident(router, first.blocks, tenant="two") == 0
    assert resident(router, first.blocks, tenant="one") == 100


def test_another_tenants_route_or_plan_is_refused() -> None:
    router, planner = ReplicaRouter(NAMES), ContextPlanner()
    route = router.route([block(1)], tenant="one")
    stolen = replace(route, tenant="two")
    assert not router.commit(stolen)
    assert not router.abandon(stolen)
    assert not router.prefilled(stolen)
    with planner.planning([block(1)], tenant="two") as plan, pytest.raises(ValueError, match="tenant 'one', got 'two'"):
        router.commit(route, plan=plan)
    assert router.commit(route)


def test_preambles_share_no_prefix() -> None:
    router = ReplicaRouter(NAMES)
    served(router, [block(1)], preamble="one")
    assert router.route([block(1)], preamble="two").resident_tokens == 0
    assert router.route([block(1)], preamble="one").preamble == fingerprint("one")


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_load", [False, True])
def test_memory_is_bounded(share_load: bool) -> None:
    router = ReplicaRouter(
        NAMES,
        share_load=share_load,
        bounds=ReplicaBounds(max_tenants=2, max_scopes=5, max_conversations=7, max_open_routes=11, max_nodes=3),
    )
    for number in range(600):
        tenant, preamble = f"t{number // 200}", f"p{number % 20}"
        router.commit(router.route([block(number)], tenant=tenant, preamble=preamble, conversation=f"c{number}"))
        router.route([block(number)], tenant=tenant, preamble=preamble)
    stats = router.stats()
    assert (stats.tenants, stats.scopes, stats.conversations, stats.open_routes) == (2, 10, 14, 22)
    trees = [cache.tree for tenant in router._tenants.states.values() for cache in caches_of(tenant)]
    assert trees
    assert max(tree.nodes for tree in trees) <= 3
    loads = router._tenants.states["t2"].loads
    assert sum(load.requests for load in loads.by_member.values()) == (22 if share_load else 11)
    router.reset()
    assert router.stats() == ReplicaStats(replicas=4)
    assert set(router.load("t1").values()) == {0.0}


def test_threads_share_a_router() -> None:
    router = ReplicaRouter(NAMES)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for number in range(150):
                route = router.route(
                    [block(number % 9), block(number)], conversation=f"{thread}" if number % 2 else None
                )
                if number % 5 == 4:
                    router.abandon(route)
                else:
                    router.prefilled(route)
                    router.commit(route, EngineReport(cached_tokens=0, prompt_tokens=200))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    router.fail("c")
    router.join("c")
    for thread in threads:
        thread.join()
    assert not errors
    stats = router.stats()
    assert stats.routes == 900
    assert stats.commits + stats.late_commits + stats.abandons >= 900 - 1
    assert stats.open_routes == 0
    for tenant in router._tenants.states.values():
        loads = tenant.loads.by_member.values()
        assert all((load.requests, load.in_flight, load.waiting) == (0, 0, 0) for load in loads)


@settings(max_examples=settings().max_examples // 3)
@given(st.data())
def test_bookings_balance_and_the_guard_holds(data: st.DataObject) -> None:
    router = ReplicaRouter(NAMES, bounds=ReplicaBounds(eps=0.25, floor_tokens=1_000, window_tokens=20_000))
    opened: list[Route] = []
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["route"] * 4 + ["commit", "abandon", "prefilled", "fail"]))
        if what == "route":
            before, busy = router.load(), {route.replica for route in opened}
            blocks = [block(n, 10 * (1 + n % 9)) for n in data.draw(st.lists(st.integers(0, 12), max_size=5))]
            tokens = data.draw(st.integers(500, 900))
            route = router.route(blocks, prompt_tokens=tokens)
            limit = max(1_000, 1.25 * (sum(before.values()) + tokens) / len(before))
            least = min(before.values())
            had = before[route.replica]
            assert had + tokens <= limit or had <= least or route.replica not in busy
            assert 0 <= route.resident_tokens <= route.prompt_tokens
            assert set(route.costs) == set(before)
            opened.append(route)
        elif what == "fail" and len(router.replicas) > 1:
            name = data.draw(st.sampled_from([replica.name for replica in router.replicas]))
            router.fail(name)
            opened = [route for route in opened if route.replica != name]
            if data.draw(st.booleans()):
                router.join(name)
        elif opened and what != "fail":
            route = opened[data.draw(st.integers(0, len(opened) - 1))]
            assert getattr(router, what)(route)
            if what != "prefilled":
                opened.remove(route)
        for member, load in router._tenants.use(None).loads.by_member.items():
            own = [route for route in opened if route.replica == member.name]
            assert load.requests == len(own)
            assert load.in_flight == sum(route.prompt_tokens for route in own)
            assert 0 <= load.waiting <= load.in_flight
        for cache in caches_of(router._tenants.use(None)):
            check_integrity(cache.tree)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_process_has_a_router_of_its_own(busy: bool) -> None:
    router = ReplicaRouter(["a"])
    router.route([block(1)])
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with router._lock:
            is_held.set()
            may_go.wait(10)

    holder = threading.Thread(target=hold)
    if busy:
        holder.start()
        is_held.wait(10)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a lock that stays locked
        under_way = router.stats().open_routes
        os.write(writing, f"{under_way} {router.route([block(2)]).id}".encode())
        os._exit(0)
    may_go.set()
    _, status = os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    if busy:
        holder.join()
    assert status == 0
    assert output.split()[0] == "0"
    assert output.split()[1] != router.route([block(2)]).id
    assert router.stats().open_routes == 2


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_refused_requests_change_nothing() -> None:
    router = ReplicaRouter(NAMES)
    refused: list[dict[str, Any]] = [{"conversation": ""}, {"prompt_tokens": -1}]
    for options in refused:
        with pytest.raises(ValueError, match="must"):
            router.route(**options)
    assert router.stats() == ReplicaStats(replicas=4)


def test_bad_ends_are_refused() -> None:
    router = ReplicaRouter(NAMES)
    route = router.route()
    bad: Any = "route"
    for end in (router.commit, router.abandon, router.prefilled):
        with pytest.raises(TypeError, match="route must be a Route"):
            end(bad)
    with pytest.raises(TypeError, match="report must be an EngineReport"):
        router.commit(route, bad)
    with pytest.raises(TypeError, match="plan must be a ContextPlan"):
        router.commit(route, plan=bad)
    with pytest.raises(TypeError, match="feed must be a ResidencyFeed"):
        router.join("e", feed=bad)
    assert router.commit(route)


def test_requests_without_tokens_are_routed() -> None:
    router = ReplicaRouter(NAMES)
    for blocks in ((), [ContextBlock("")], [ContextBlock(""), ContextBlock("")]):
        route = served(router, blocks)
        assert (route.prompt_tokens, route.resident_tokens, route.spilled) == (0, 0, False)
