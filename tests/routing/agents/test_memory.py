"""All tenants together stay within a bound, and a tenant within its share is routed as if it were alone."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from warmprefix import ContextBlock
from warmprefix_routing import Agent, AgentBounds, AgentRouter

MAX_BYTES = 400_000
ACCURACY = 1.25
"""Factor by which the allocated memory may exceed the estimate."""


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


def agents(number: int, capacity_tokens: int | None = None) -> list[Agent]:
    return [Agent(f"agent-{i}", capacity_tokens) for i in range(number)]


NEVER_SEEN = count()


def new_blocks(number: int) -> list[ContextBlock]:
    """Return blocks without other references, so that the router's memory counts for itself."""
    return [ContextBlock(f"text {next(NEVER_SEEN)}", tokens=300 + i) for i in range(number)]


FILLINGS: dict[str, dict[str, Any]] = {
    "held blocks": {"of": agents(8), "blocks": 20},
    "held by several": {"of": agents(8), "blocks": 20, "readers": 8},
    "one long conversation each": {"of": agents(8, 1), "blocks": 20, "conversations": 1},
    "many short conversations": {"of": agents(8, 1), "blocks": 1, "conversations": 10**9},
    "conversations with all agents": {"of": agents(8, 1), "blocks": 3, "conversations": 10, "readers": 8},
    "open assignments": {"of": agents(8, 1), "blocks": 20, "commit": False},
    "open assignments of one block": {"of": agents(8, 1), "blocks": 1, "commit": False},
    "everything": {"of": agents(8), "blocks": 20, "conversations": 5, "readers": 2},
    "many agents": {"of": agents(64), "blocks": 15},
}


@pytest.mark.slow
@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("tenants", [1, 50])
def test_many_tenants_stay_within_the_bound(traced: None, filling: str, tenants: int) -> None:
    filled = FILLINGS[filling]
    router = AgentRouter(filled["of"], bounds=AgentBounds(max_bytes=MAX_BYTES, max_tenants=100))
    before = allocated()
    most = 0
    for number in range(2_000 // filled["blocks"]):
        blocks = new_blocks(filled["blocks"])
        conversation = f"chat {number // tenants % filled['conversations']}" if "conversations" in filled else None
        for reader in range(filled.get("readers", 1)):
            among = [f"agent-{reader}"] if "readers" in filled else None
            assignment = router.assign(blocks, among, conversation=conversation, tenant=f"tenant {number % tenants}")
            if filled.get("commit", True):
                router.commit(assignment)
            most = max(most, router._tenants.total_bytes)
    assert 0.9 * MAX_BYTES < most <= MAX_BYTES
    assert router.stats().memory_bytes <= MAX_BYTES
    assert allocated() - before <= ACCURACY * MAX_BYTES


@pytest.mark.slow
def test_tenants_that_shrank_release_their_tables(traced: None) -> None:
    router = AgentRouter(agents(2), bounds=AgentBounds(max_bytes=MAX_BYTES, max_tenants=100))
    before = allocated()
    for tenant in range(10):  # each fills the router alone
        for _ in range(60):
            router.commit(router.assign(new_blocks(20), tenant=f"tenant {tenant}"))
    assert router.stats().tenants == 10
    assert allocated() - before <= ACCURACY * MAX_BYTES


@pytest.mark.slow
def test_the_estimate_is_no_less_than_what_is_allocated(traced: None) -> None:
    for filling, filled in FILLINGS.items():
        router = AgentRouter(filled["of"])
        before = allocated()
        for i in range(2_000 // filled["blocks"]):
            assignment = router.assign(new_blocks(filled["blocks"]), conversation=f"chat {i}", tenant=f"tenant {i % 3}")
            if filled.get("commit", True):
                router.commit(assignment)
        assert allocated() - before <= ACCURACY * router.stats().memory_bytes, filling


def test_the_defaults_bound_the_worst_case_to_half_a_gigabyte() -> None:
    assert AgentRouter(agents(32))._tenants._max_bytes == 500_000_000


def a_life(router: AgentRouter, others: Random | None) -> list[object]:
    """Return the results of a small tenant's calls, while others fill the router's memory."""
    rng = Random(1)
    seen: list[object] = []
    mine = [ContextBlock(f"mine {i}", tokens=200 + i) for i in range(60)]
    for i in range(120):
        conversation = ("chat", None)[i % 2]
        assignment = router.assign(rng.sample(mine, 5), conversation=conversation, tenant="small")
        seen.append((assignment.agents, assignment.blocks))
        seen.append((router.commit, router.abandon)[i % 7 == 0](assignment))
        for _ in range(6 if others else 0):
            assert others is not None
            big = f"big {others.randrange(3)}"
            assignment = router.assign(new_blocks(20), conversation=f"chat {i % 3}", tenant=big)
            if others.random() < 0.8:
                router.commit(assignment)
    return [*seen, router.load("small")]


def test_a_tenant_within_its_share_is_routed_as_if_it_were_alone() -> None:
    bounds = AgentBounds(max_bytes=1_000_000, max_tenants=10, free_tokens=500)
    crowded, alone = AgentRouter(agents(4), bounds=bounds), AgentRouter(agents(4), bounds=bounds)
    assert a_life(crowded, Random(2)) == a_life(alone, None)
    stats = crowded.stats()
    assert 0.9 * 1_000_000 < stats.memory_bytes <= 1_000_000
    assert stats.tenants == 4


def test_least_recently_used_large_tenant_shrinks_first() -> None:
    router = AgentRouter(agents(2), bounds=AgentBounds(max_bytes=1_000_000, max_tenants=10))
    kept = {name: new_blocks(800) for name in ("idle", "active")}
    for tenant, blocks in kept.items():
        for start in range(0, 800, 20):
            router.commit(router.assign(blocks[start : start + 20], tenant=tenant))
    for _ in range(50):
        router.commit(router.assign(new_blocks(20), tenant="new"))
        router.commit(router.assign(kept["active"][-20:], tenant="active"))

    def held(tenant: str) -> int:
        return len(router._tenants.states[tenant].holders)

    assert held("active") > held("idle") > 0
    again = router.assign(kept["active"][-20:], tenant="active")
    assert again.held_tokens == again.total_tokens, "the most recently used blocks are forgotten last"


def test_too_many_agents_drop_the_oldest_tenants() -> None:
    router = AgentRouter(agents(200), bounds=AgentBounds(max_bytes=1_000_000, max_tenants=1_000))
    for i in range(50):
        router.commit(router.assign(new_blocks(2), tenant=f"tenant {i}"))
    stats = router.stats()
    assert 0 < stats.tenants < 15
    assert stats.memory_bytes <= 1_000_000
    assert list(router._tenants.states) == [f"tenant {i}" for i in range(50 - stats.tenants, 50)]
    for i in range(200, 400):
        router.join(f"agent-{i}")
    assert router.stats().memory_bytes <= 1_000_000
    assert router.assign(new_blocks(2), tenant="tenant 49").blocks


def test_router_routes_below_the_memory_of_one_tenant() -> None:
    router = AgentRouter(agents(3), bounds=AgentBounds(max_bytes=1))
    for i in range(10):
        assignment = router.assign(new_blocks(5), tenant=f"tenant {i % 2}", conversation="chat")
        assert len(assignment.blocks) == 5
        router.commit(assignment)
    assert router.stats().tenants == 1
    router.reset()
    assert router.stats().memory_bytes == 0
