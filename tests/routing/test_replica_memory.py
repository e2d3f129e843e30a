"""All tenants of a `ReplicaRouter` together stay within a bound; a small one is routed as if it were alone."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest
from tests.prefix_integrity import check_integrity

from warmprefix import ContextBlock, EngineReport
from warmprefix_routing import ReplicaBounds, ReplicaRouter, replica_state
from warmprefix_routing.replica_state import ReplicaTenant

MAX_BYTES = 400_000
ACCURACY = 1.25
"""Factor by which the allocated memory may exceed the estimate."""
NAMES = ["a", "b", "c", "d"]
NEVER_SEEN = count()


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def new_blocks(number: int) -> list[ContextBlock]:
    return [ContextBlock(f"text {next(NEVER_SEEN)}", tokens=300 + i) for i in range(number)]


def recounted_bytes(state: ReplicaTenant) -> int:
    """Return the estimate, counted from scratch."""
    trees = sum(
        replica_state._SCOPE + sum(cache.memory_bytes for cache in scope.caches.values())
        for scope in state.scopes.values()
    )
    routes = sum(replica_state._ROUTE + replica_state._KEY * len(route.keys) for route in state.open.values())
    fixed = replica_state._TENANT + replica_state._REPLICA * len(state.loads.by_member)
    return fixed + trees + routes + replica_state._CONVERSATION * len(state.conversations)


def check(router: ReplicaRouter) -> None:
    for state in router._tenants.states.values():
        assert state.memory_bytes == recounted_bytes(state)
        for scope in state.scopes.values():
            for cache in scope.caches.values():
                check_integrity(cache.tree)
    recorded = [state.recorded_bytes for state in router._tenants.states.values()]
    assert router._tenants.total_bytes == sum(recorded)
    assert router._tenants.shared_bytes == router._served.trim()
    assert router.stats().memory_bytes <= sum(recorded) + router._tenants.shared_bytes
    check_integrity(router._served)


FILLINGS: dict[str, dict[str, Any]] = {
    "long paths": {"blocks": 20},
    "short paths": {"blocks": 1},
    "preambles": {"blocks": 2, "preambles": 100},
    "conversations": {"blocks": 0, "conversations": 10**9},
    "open routes": {"blocks": 20, "commit": False},
    "open routes without blocks": {"blocks": 0, "commit": False},
    "reports": {"blocks": 1, "report": EngineReport(cached_tokens=0)},
    "reports on long paths": {"blocks": 20, "preambles": 50, "report": EngineReport(cached_tokens=0)},
    "everything": {"blocks": 5, "preambles": 3, "conversations": 10**9},
}


@pytest.mark.slow
@pytest.mark.parametrize("share_load", [False, True])
@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("tenants", [1, 30])
def test_many_tenants_stay_within_the_bound(traced: None, filling: str, tenants: int, share_load: bool) -> None:
    filled = FILLINGS[filling]
    bounds = ReplicaBounds(max_bytes=MAX_BYTES, max_tenants=100)
    router = ReplicaRouter(NAMES, capacity_tokens=None, bounds=bounds, share_load=share_load)
    before = allocated()
    most = 0
    for number in range(5_000 // (filled["blocks"] + 3)):
        route = router.route(
            new_blocks(filled["blocks"]),
            tenant=f"tenant {number % tenants}",
            preamble=f"preamble {number % filled['preambles']}" if "preambles" in filled else None,
            conversation=f"chat {number % filled['conversations']}" if "conversations" in filled else None,
            prompt_tokens=1_000 + number,
        )
        if filled.get("commit", True):
            router.commit(route, filled.get("report"))
        most = max(most, router._tenants.total_bytes + router._tenants.shared_bytes)
    check(router)
    assert 0.9 * MAX_BYTES < most <= MAX_BYTES
    assert allocated() - before <= ACCURACY * MAX_BYTES


@pytest.mark.slow
def test_tenants_that_shrank_release_their_tables(traced: None) -> None:
    router = ReplicaRouter(NAMES, capacity_tokens=None, bounds=ReplicaBounds(max_bytes=MAX_BYTES, max_tenants=100))
    before = allocated()
    for tenant in range(10):  # each fills the router alone
        for _ in range(1_000):
            router.commit(router.route(new_blocks(1), tenant=f"tenant {tenant}"))
    check(router)
    assert router.stats().tenants == 10
    assert allocated() - before <= ACCURACY * MAX_BYTES


def test_the_default_bounds_the_worst_case_to_half_a_gigabyte() -> None:
    assert ReplicaRouter(NAMES)._tenants._max_bytes == 500_000_000


def a_life(router: ReplicaRouter, others: Random | None) -> list[object]:
    """Return the results of a small tenant's calls, while others fill the router's memory."""
    rng = Random(1)
    seen: list[object] = []
    mine = [ContextBlock(f"mine {i}", tokens=200 + i) for i in range(60)]
    for i in range(150):
        conversation = ("chat", None)[i % 2]
        route = router.route(rng.sample(mine, 5), tenant="small", conversation=conversation, preamble=f"{i % 2}")
        seen.append((route.replica, route.prompt_tokens, route.resident_tokens, route.costs, route.spilled))
        seen.append((router.commit, router.abandon)[i % 7 == 0](route))
        for _ in range(6 if others else 0):
            assert others is not None
            route = router.route(new_blocks(8), tenant=f"big {others.randrange(3)}", preamble=f"{others.randrange(5)}")
            if others.random() < 0.8:
                router.commit(route)
    return [*seen, router.load("small")]


def test_a_tenant_within_its_share_is_routed_as_if_it_were_alone() -> None:
    bounds = ReplicaBounds(max_bytes=800_000, max_tenants=5)
    crowded, alone = ReplicaRouter(NAMES, bounds=bounds), ReplicaRouter(NAMES, bounds=bounds)
    assert a_life(crowded, Random(2)) == a_life(alone, None)
    assert 0.9 * 800_000 < crowded.stats().memory_bytes <= 800_000
    assert crowded.stats().tenants == 4
    check(crowded)


@pytest.mark.parametrize("max_bytes", [1, 20_000, 60_000])
@pytest.mark.parametrize("share_load", [False, True])
def test_recorded_memory_stays_consistent(max_bytes: int, share_load: bool) -> None:
    rng = Random(max_bytes)
    router = ReplicaRouter(
        NAMES, share_load=share_load, bounds=ReplicaBounds(max_bytes=max_bytes, max_tenants=3, max_scopes=3)
    )
    blocks, opened = new_blocks(40), []
    for _ in range(1_500):
        what = rng.randrange(20)
        if what < 10:
            opened.append(
                router.route(
                    rng.sample(blocks, rng.randrange(6)),
                    tenant=rng.choice([None, "x", "y", "z"]),
                    preamble=rng.choice([None, "1", "2", "3", "4"]),
                    conversation=rng.choice([None, "one", "two"]),
                )
            )
        elif what < 18 and opened:
            end = rng.choice([router.commit, router.commit, router.abandon, router.prefilled])
            end(opened.pop(rng.randrange(len(opened))))
        elif what == 18 and "d" in {replica.name for replica in router.replicas}:
            router.fail("d")
        elif what == 19 and "d" not in {replica.name for replica in router.replicas}:
            router.join("d")
        check(router)
    shown = {id(state.loads): state.loads for state in router._tenants.states.values()}
    booked = sum(load.requests for loads in shown.values() for load in loads.by_member.values())
    assert booked == router.stats().open_routes
    router.reset()
    assert router.stats().memory_bytes == 0
