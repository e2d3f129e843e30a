"""Affinity without hotspots: streams in which one document comes again and again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from warmprefix import ContextBlock
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment

EPS, FREE = 0.25, 4_096
HOT = ContextBlock("The hot document.", tokens=600)


def stream(requests: int, k: int, seed: int = 0, documents: int = 400) -> Iterator[list[ContextBlock]]:
    """Requests of `k` documents, of which 60 % have the hot one; the others' popularity is Zipf's."""
    rng = random.Random(seed)
    others = [ContextBlock(f"document {i}", tokens=rng.randrange(100, 500)) for i in range(documents)]
    weights = [1 / rank for rank in range(1, documents + 1)]
    for _ in range(requests):
        wanted = list(dict.fromkeys(rng.choices(others, weights, k=k)))
        if rng.random() < 0.6:
            wanted[rng.randrange(len(wanted))] = HOT
        yield wanted


def check_bound(router: AgentRouter, before: dict[str, float], assignment: Assignment) -> None:
    """Check that only an agent that was the least loaded before its last block is above the bound."""
    load = router.load()
    mean = sum(load.values()) / len(load)
    limit = max(FREE, (1 + EPS) * mean) * (1 + 1e-9)
    for agent, blocks in assignment.segments.items():
        if load[agent] > limit:
            lowest = min(value for name, value in load.items() if name != agent)
            assert load[agent] - min(block.tokens for block in blocks) <= lowest * (1 + 1e-9)
    for agent in set(load) - set(assignment.segments):
        assert load[agent] <= before[agent]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("k", [1, 5, 15])
@pytest.mark.parametrize("agents", [4, 15, 32])
def test_the_bound_holds_after_every_request(agents: int, k: int, together: bool) -> None:
    router = AgentRouter([f"agent-{i}" for i in range(agents)], bounds=AgentBounds(eps=EPS, free_tokens=FREE))
    seen: set[ContextBlock] = set()
    held = again = 0
    before = dict.fromkeys([agent.name for agent in router.agents], 0.0)
    for request in stream(600, k):
        assignment = router.assign(request, together=together)
        check_bound(router, before, assignment)
        before = router.load()
        for assigned in assignment.blocks:
            if assigned.block in seen:
                again += 1
                held += assigned.held is not None
        seen.update(request)
        router.commit(assignment)
        before = router.load()
    assert held / again > (0.5 if together else 0.9)
    copies = sum(HOT.fingerprint in member.cache.blocks for member in router._tenants.states[None].agents.values())
    assert copies >= min(agents * 0.6 * HOT.tokens / (k * 450), agents / 2) * 0.5, "its load needs more holders"


@pytest.mark.parametrize("agents", [4, 15, 32])
def test_a_document_alone_is_spread_over_all(agents: int) -> None:
    """Requests for one document keep all agents equally busy, and each computes it once."""
    router = AgentRouter([f"agent-{i}" for i in range(agents)], bounds=AgentBounds(eps=EPS, free_tokens=FREE))
    new = 0
    for _ in range(100 * agents):
        assignment = router.assign([HOT])
        new += assignment.blocks[0].held is None
        router.commit(assignment)
    load = router.load().values()
    assert max(load) <= (1 + EPS) * sum(load) / agents + HOT.tokens
    assert agents / (1 + EPS) <= new <= agents


def test_a_tenant_of_little_traffic_spills_nothing() -> None:
    """Below `free_tokens` there is no hotspot, however uneven the loads."""
    router = AgentRouter([f"agent-{i}" for i in range(8)], bounds=AgentBounds(eps=EPS, free_tokens=FREE))
    agents = set()
    for _ in range(FREE // HOT.tokens):
        assignment = router.assign([HOT])
        agents.add(assignment.blocks[0].agent)
        router.commit(assignment)
    assert len(agents) == 1
    assert router.stats().spilled == 0


def test_heavier_agents_get_more_of_it() -> None:
    router = AgentRouter(
        [Agent("a"), Agent("b", weight=3.0)], bounds=AgentBounds(eps=0.1, free_tokens=0, window_tokens=10**9)
    )
    got = {"a": 0, "b": 0}
    for request in stream(400, 5):
        assignment = router.assign(request)
        for assigned in assignment.blocks:
            got[assigned.agent] += assigned.block.tokens
        router.commit(assignment)
    assert 2.5 < got["b"] / got["a"] < 3.5


def test_a_document_that_many_tenants_ask_for_a_little_is_spread_too() -> None:
    """Each tenant has its own hash, because its load stays below `free_tokens`."""
    router = AgentRouter([f"agent-{i}" for i in range(8)], bounds=AgentBounds(eps=EPS, free_tokens=FREE))
    got = dict.fromkeys([agent.name for agent in router.agents], 0)
    for tenant in range(200):
        first, again = router.assign([HOT], tenant=f"tenant {tenant}"), router.assign([HOT], tenant=f"tenant {tenant}")
        assert first.blocks[0].agent == again.blocks[0].agent
        got[first.blocks[0].agent] += 1
    assert max(got.values()) < 2 * 200 / 8
