"""Replicas whose engines publish their KV events."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from kv_publisher import KvPublisher, removed, stored
from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix_kv_events.kv_feed import KvEventFeed
from warmprefix_routing import ReplicaRouter

SIZE = 4
"""Tokens per KV block; a token is a character."""


def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Served:
    """A prompt that one replica served, with its KV events."""

    def __init__(self, router: ReplicaRouter, planner: ContextPlanner, blocks: list[ContextBlock], name: str) -> None:
        route = router.route(blocks)
        assert route.replica == name
        self.plan = planner.plan(blocks, model=f"m@{name}")
        self.prompt = self.plan.render() + "\n\nWhy?"
        self.tokens = [ord(character) for character in self.prompt]
        self.kv_blocks = list(range(1, len(self.tokens) // SIZE + 1))
        report = EngineReport(cached_tokens=0, prompt_tokens=len(self.tokens), prompt_token_ids=self.tokens)
        planner.commit(self.plan)
        assert router.commit(route, report, self.plan)

    def publish(self, publisher: KvPublisher, feed: KvEventFeed) -> None:
        publisher.publish(stored(self.kv_blocks, None, self.tokens[: SIZE * len(self.kv_blocks)], SIZE))
        until(lambda: feed.stats().kv_blocks == len(self.kv_blocks))
        until(lambda: feed.stats().prompts == 1)


def test_eviction_changes_only_its_own_replica() -> None:
    blocks = [ContextBlock(f"passage {number} " * 4, id=f"p{number}") for number in range(3)]
    whole = sum(block.tokens for block in blocks)
    planner = ContextPlanner()
    with ExitStack() as stack:
        router = stack.enter_context(ReplicaRouter(listener=planner.residency))
        publishers = {name: stack.enter_context(KvPublisher()) for name in ("a", "b")}
        served: dict[str, Served] = {}
        for name, publisher in publishers.items():
            feed = KvEventFeed(
                publisher.endpoint, replay=publisher.replay_endpoint, tokenizer=lambda text: [*map(ord, text)]
            )
            router.join(name, feed=feed)
            publisher.wait_for_subscriber()
            served[name] = Served(router, planner, blocks, name)
            served[name].publish(publisher, feed)
            router.fail(name)  # so that the next replica gets the prompt too
        router.join("a")  # with an empty predicted cache
        router.join("b")

        def resident(name: str) -> int:
            """Return the prediction for this replica, wherever the request would go."""
            route = router.route(blocks)
            router.abandon(route)
            return round(route.prompt_tokens - route.costs[name])

        def planned(name: str) -> int:
            plan = planner.plan(blocks, model=f"m@{name}")
            planner.abandon(plan)
            return plan.resident_tokens

        assert (resident("a"), resident("b")) == (0, 0)
        again = router.route(blocks)
        router.commit(again)
        name = again.replica
        other = "b" if name == "a" else "a"
        until(lambda: (resident(name), resident(other)) == (whole, 0))
        assert (planned(name), planned(other)) == (whole, whole)
        prompt = served[name]
        last = prompt.prompt.index(prompt.plan.blocks[2].render()) // SIZE + 1
        publishers[name].publish(removed(*reversed(prompt.kv_blocks[last:])))
        kept = sum(planned_block.block.tokens for planned_block in prompt.plan.blocks[:2])
        until(lambda: resident(name) == kept)
        until(lambda: planned(name) == kept)  # the router notifies the planner
        assert (resident(other), planned(other)) == (0, whole)
        publishers[name].publish({"type": "AllBlocksCleared"})
        until(lambda: resident(name) == 0)
        assert router.stats().feed_errors == 0
