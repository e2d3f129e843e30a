"""A planner with at least one of most things that it counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warmprefix import Choice, ContextBlock, ContextPlanner, EngineReport
from warmprefix.residency import FeedStats, ResidencyTarget, ServedPrompt


class SteadyFeed:
    """A feed with fixed counts of two engines."""

    def follow(self, target: ResidencyTarget) -> None:
        pass

    def remember(self, served: ServedPrompt) -> None:
        pass

    def is_complete(self, cache_salt: str | None) -> bool:
        return True

    def stats(self) -> FeedStats:
        return FeedStats(
            sources=2, connected=True, events=5_000, gaps=1, replayed=3, lag=0.25, kv_blocks=700, prompts=9
        )

    def close(self) -> None:
        pass


class FailingRecorder:
    """A recorder that always raises."""

    def record(self, *blocks: object, **request: object) -> None:
        raise RuntimeError("no disk")


@pytest.fixture
def busy_planner() -> Iterator[ContextPlanner]:
    """Serve 3 requests outside a conversation, one of them abandoned, and 2 turns of one; the recorder always fails.

    The first one chooses among its candidates.
    """
    sky, sea, land = (ContextBlock(name * 40, id=name, tokens=40, score=1) for name in ("sky ", "sea ", "land "))
    with ContextPlanner(feed=SteadyFeed(), recorder=FailingRecorder()) as planner:
        first = planner.plan([sky, sea], tenant="acme", model="tiny", choose=Choice(2))
        planner.commit(first, report=EngineReport(cached_tokens=0, prompt_tokens=100, ttft=0.5))
        second = planner.plan([sea, sky, land], tenant="acme", model="tiny")
        planner.commit(second, report=EngineReport(cached_tokens=75, prompt_tokens=140, ttft=0.1))
        planner.commit(second)
        planner.abandon(planner.plan([land]))
        for _ in range(2):
            with planner.planning([sky, sea], conversation="chat-42", placement="tail", tenant="acme"):
                pass
        yield planner
