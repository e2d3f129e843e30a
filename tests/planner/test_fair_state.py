"""A tenant that uses many names changes no prompt of another tenant."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.stores import MemorySeenStore

DOCUMENTS = [ContextBlock(f"Document {i}: " + "word " * 40) for i in range(40)]

Flood = Callable[[ContextPlanner, int], None]


def name_models(planner: ContextPlanner, number: int) -> None:
    planner.commit(planner.plan(DOCUMENTS[:1], tenant="large", model=f"model {number}"))


def name_preambles(planner: ContextPlanner, number: int) -> None:
    planner.commit(planner.plan(DOCUMENTS[:1], tenant="large", preamble=f"preamble {number}"))


def name_conversations(planner: ContextPlanner, number: int) -> None:
    plan = planner.plan(DOCUMENTS[:3], tenant="large", conversation=f"chat {number}", placement="tail")
    planner.commit(plan)


def open_plans(planner: ContextPlanner, number: int) -> None:
    planner.plan(DOCUMENTS[:3], tenant="large")


def name_all_without_tenant(planner: ContextPlanner, number: int) -> None:
    planner.commit(
        planner.plan(DOCUMENTS[:3], model=f"model {number}", conversation=f"chat {number}", placement="tail")
    )


def prompts(flood: Flood | None) -> list[str]:
    """Return the prompts of a small tenant, some of whose plans are open while another tenant floods the planner."""
    planner = ContextPlanner(max_scopes=32, max_open_plans=64, store=MemorySeenStore(max_conversations=50))
    chance = random.Random(1)
    shown: list[str] = []
    for number in range(300):
        blocks = [DOCUMENTS[min(int(chance.paretovariate(1)), 39)] for _ in range(6)]
        head = planner.plan(blocks, tenant="small", model="model", preamble=f"preamble {number % 3}")
        tail = planner.plan(blocks, tenant="small", model="model", conversation=f"c{number % 9}", placement="tail")
        if flood is not None and number % 100 == 50:
            for other in range(150):
                flood(planner, number * 1_000 + other)
        assert planner.commit(head)
        assert planner.commit(tail)
        shown += [head.render(), tail.render()]
    return shown


@pytest.mark.parametrize(
    "flood", [name_models, name_preambles, name_conversations, open_plans, name_all_without_tenant]
)
def test_flood_of_names_changes_no_prompt_of_others(flood: Flood) -> None:
    assert prompts(flood) == prompts(None)


def test_bounds_still_hold() -> None:
    planner = ContextPlanner(max_scopes=8)
    for tenant in range(20):
        for number in range(20):
            planner.commit(planner.plan(DOCUMENTS[:2], tenant=f"tenant {tenant}", model=f"model {number}"))
    assert planner.stats().scopes == 8
