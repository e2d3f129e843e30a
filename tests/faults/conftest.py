"""Planners on real servers, and conversations whose true prompts are recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.stores.conftest import with_bounds

from true_prompts import Dialogue
from warmprefix import ContextPlanner
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.breaker import CircuitBreaker

OpenPlanner = Callable[..., ContextPlanner]


def open_store(url: str, budget: float, breaker: CircuitBreaker | None = None, **options: Any) -> RedisSeenStore:
    store = RedisSeenStore(url, timeout=budget, **with_bounds(options))
    store.breaker = breaker or store.breaker
    return store


@pytest.fixture
def open_planner() -> Iterator[OpenPlanner]:
    """Return a function that makes workers, each with its own planner, store and connections.

    Calls of the store get 20 ms, so on a busy machine one may fail without a fault. Tests that must not see this pass a
    longer budget.
    """
    with contextlib.ExitStack() as opened:

        def open_planner(url: str, budget: float = 0.02, **options: Any) -> ContextPlanner:
            return opened.enter_context(ContextPlanner(store=open_store(url, budget, **options), annotate="both"))

        yield open_planner


@pytest.fixture
def dialogue() -> Iterator[Dialogue]:
    """Return a conversation; whatever the test does, no reference may dangle."""
    talk = Dialogue()
    yield talk
    assert talk.findings.wrong == 0, talk.findings.examples


@pytest.fixture
def recover() -> Callable[..., int]:
    """Play turns until a reference is made again, and return how many that took.

    Meanwhile the other workers serve other conversations: with their commits they settle this one.
    """

    def recover(dialogue: Dialogue, planner: ContextPlanner, *others: ContextPlanner) -> int:
        elsewhere = Dialogue("elsewhere")
        deadline = time.monotonic() + 20
        turns = 0
        while time.monotonic() < deadline:
            turns += 1
            for other in others:
                elsewhere.turn(other, [1])
            if dialogue.turn(planner, [1, 2, 3]).references:
                return turns
            time.sleep(0.02)
        raise AssertionError(f"no reference in {turns} turns, after {planner.stats()}")

    return recover
