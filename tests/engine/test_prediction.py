"""Predicted and reported cached tokens of a real engine, with and without its KV events."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix_kv_events.kv_feed import KvEventFeed

pytestmark = pytest.mark.vllm

Serve = Callable[..., tuple[ContextPlan, int]]
Serving = Callable[[ContextPlanner], AbstractContextManager[Serve]]


@pytest.mark.parametrize("fed", [False, True], ids=["usage alone", "with the feed"])
def test_predictions_match_reports_under_eviction(
    fed: bool,
    server: VllmServer,
    feed_options: dict[str, Any],
    serving: Serving,
    passages: list[ContextBlock],
    requests: list[list[int]],
) -> None:
    unbounded = ContextPlanner(capacity_tokens=None)
    reported = would_be_held = 0
    with (
        ContextPlanner(
            capacity_tokens=server.capacity_tokens, feed=KvEventFeed(**feed_options) if fed else None
        ) as planner,
        serving(planner) as serve,
    ):
        for request in requests:
            _, cached = serve(request)
            reported += cached
            with unbounded.planning([passages[n] for n in request]) as plan:
                would_be_held += plan.resident_tokens
        stats = planner.stats()
    assert 0 < reported < 0.7 * would_be_held, "too little was evicted for this to show much"
    assert stats.reports == len(requests) == 300
    assert stats.reported_cached_tokens == reported
    assert stats.prediction_error_p95 <= max(passage.tokens for passage in passages)
    # Questions and notes also take room in the cache, which the planner's own model lacks; only a feed shows it.
    assert stats.predicted_cached_tokens == pytest.approx(reported, rel=0.1 if fed else 0.25)
    if fed:
        assert stats.feed.connected
        assert stats.feed.gaps == stats.feed.malformed == stats.feed.unmapped == 0
