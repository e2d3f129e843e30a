"""The planner's prediction after a real engine is killed. `test_contract` has an emptied cache, and tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest

from redis_servers import wait_until
from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix_kv_events.kv_feed import KvEventFeed

pytestmark = pytest.mark.vllm

PREAMBLE = "You answer from the context."
ONE, OTHER = [1, 2, 3, 4, 5, 6], [101, 102, 103]

Serve = Callable[..., tuple[ContextPlan, int]]
Serving = Callable[[ContextPlanner], AbstractContextManager[Serve]]
Predict = Callable[..., int]


@pytest.fixture
def planner(server: VllmServer, feed_options: dict[str, Any]) -> Iterator[ContextPlanner]:
    with ContextPlanner(capacity_tokens=server.capacity_tokens, feed=KvEventFeed(**feed_options)) as planner:
        yield planner


@pytest.fixture
def predict(planner: ContextPlanner, passages: list[ContextBlock]) -> Predict:
    """Return a function that predicts the cached tokens of context."""

    def predicted(numbers: list[int], tenant: str | None = None) -> int:
        plan = planner.plan([passages[n] for n in numbers], tenant=tenant, preamble=PREAMBLE)
        planner.abandon(plan)
        return plan.resident_tokens

    return predicted


def test_a_killed_engine_starts_with_an_empty_cache(
    server: VllmServer, planner: ContextPlanner, serving: Serving, predict: Predict, requests: list[list[int]]
) -> None:
    with serving(planner) as serve:
        for request in requests[:20]:
            serve(request)
        serve(ONE)
        assert predict(ONE) > 0
        committed = planner.stats().commits
        server.kill()
        with pytest.raises(openai.APIConnectionError):
            serve(ONE)
        assert planner.stats().commits == committed
        server.start()
        serve(OTHER)
        wait_until(lambda: planner.stats().feed.wipes == 1, "the restart is received")
        wait_until(lambda: predict(ONE) == 0, "its earlier state is discarded")
        served = [serve(request) for request in requests[:20]]
    stats = planner.stats()
    assert stats.feed.connected
    assert stats.open_plans == 0
    too_much = sorted(plan.resident_tokens - cached for plan, cached in served)
    assert too_much[18] <= max(block.block.tokens for plan, _ in served for block in plan.blocks)
