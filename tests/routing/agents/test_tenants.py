"""One tenant's documents go to the same agents, whatever another tenant does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from warmprefix import ContextBlock, EngineReport
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment

VICTIM = "acme"
BLOCKS = [ContextBlock(f"A document of the victim's, number {i}.", tokens=100 + 37 * i) for i in range(40)]


def new_router() -> AgentRouter:
    return AgentRouter(
        [Agent(f"agent-{i}", capacity_tokens=20_000) for i in range(5)],
        bounds=AgentBounds(max_open=100, free_tokens=500),
    )


def victims_life(router: AgentRouter, meanwhile: Callable[[list[Assignment]], object]) -> list[object]:
    """Return the results of all the victim's calls."""
    rng = random.Random(3)
    seen: list[object] = []
    made: list[Assignment] = []
    for i in range(120):
        wanted = rng.sample(BLOCKS, rng.randrange(1, 9))
        assignment = router.assign(wanted, conversation=(None, "chat")[i % 2], tenant=VICTIM, together=i % 3 == 0)
        made.append(assignment)
        meanwhile(made)
        seen.append((assignment.agents, assignment.blocks))
        if i % 7 == 3:
            seen.append(router.abandon(assignment))
        elif i % 7 == 5:
            again = router.reassign(assignment, assignment.blocks[0].agent)
            seen += [again.agents, again.blocks, router.commit(assignment), router.commit(again)]
        elif i % 7 != 6:  # some are ended late
            seen.append(router.commit(assignment, report=EngineReport(cached_tokens=rng.choice([None, 0, 900]))))
        meanwhile(made)
        if i % 10 == 9:
            seen.append(router.commit(made[i - 3]))
    return [*seen, router.load(VICTIM)]


ATTACKERS = [None, "", "evil", "acm", "acme\0", "ACME"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("me", ATTACKERS)
def test_attacker_does_not_move_the_victims_documents(me: str | None) -> None:
    attacked, alone = new_router(), new_router()
    rng = random.Random(5)

    def attack(made: list[Assignment]) -> None:
        """A hot document, thousands of blocks, far too many open ones, the victim's own, and its forged assignments."""
        for stolen in made[-2:]:
            forged = replace(stolen, tenant=me)
            assert not attacked.commit(forged, report=EngineReport(cached_tokens=0))
            assert not attacked.abandon(forged)
            attacked.reassign(forged, stolen.agents[0])
        for conversation in (None, "chat"):
            for wanted in (BLOCKS, BLOCKS[:1], [f"evil {rng.random()}" for _ in range(40)]):
                attacked.assign(wanted, conversation=conversation, tenant=me)
                attacked.commit(attacked.assign(wanted, conversation=conversation, tenant=me))
        for _ in range(20):
            attacked.assign(BLOCKS[3:4], ["agent-2"], tenant=me)
        attacked.end("chat", me)

    assert victims_life(attacked, attack) == victims_life(alone, lambda made: None)


def test_assignments_reveal_nothing_about_other_tenants() -> None:
    """It cannot see whether another tenant has the same documents."""
    router, empty = new_router(), new_router()
    victims_life(router, lambda made: None)
    for other in (router, empty):
        assert other.load("evil") == {}
    for i in range(30):
        wanted = BLOCKS[i : i + 10]
        one, two = (each.assign(wanted, conversation="chat", tenant="evil") for each in (router, empty))
        assert (one.agents, one.blocks) == (two.agents, two.blocks)
        router.commit(one)
        empty.commit(two)
    assert router.load("evil") == empty.load("evil")
