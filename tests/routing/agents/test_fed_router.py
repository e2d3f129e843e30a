"""A router with feeds of its engines' KV events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kv_publisher import KvPublisher, removed, stored
from redis_servers import wait_until
from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.residency import FeedStats, NoFeed, ResidencyTarget, ServedPrompt
from warmprefix_kv_events.kv_feed import FeedBounds, KvEventFeed
from warmprefix_routing import Agent, AgentRouter, AssignedBlock

KV = 4
"""Tokens per KV block; the tokenizer returns one per character."""
TENANT = "acme"


class Engine:
    """Publishes, as an engine would, that it stores prompts and evicts them."""

    def __init__(self) -> None:
        self.publisher = KvPublisher()
        self._names: dict[tuple[int, ...], int] = {}

    def store(self, tokens: Sequence[int], salt: str | None) -> None:
        names, new, parent = [], [], None
        for end in range(KV, len(tokens) + 1, KV):
            path = (*map(ord, salt or ""), *tokens[:end])
            if path not in self._names:
                self._names[path] = len(self._names) + 1
                new.append((self._names[path], tokens[end - KV : end], end == KV))
            elif not new:
                parent = self._names[path]
            names.append(self._names[path])
        if new:
            keys = [[salt] if first and salt is not None else None for _, _, first in new]
            run = [token for _, part, _ in new for token in part]
            self.publisher.publish(stored([name for name, _, _ in new], parent, run, KV, extra_keys=keys))

    def evict_all(self) -> None:
        self.publisher.publish(removed(*reversed(self._names.values())))
        self._names.clear()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    with engine.publisher:
        yield engine


@pytest.fixture
def feed(engine: Engine) -> Iterator[KvEventFeed]:
    publisher = engine.publisher
    feed = KvEventFeed(
        publisher.endpoint,
        replay=publisher.replay_endpoint,
        tokenizer=lambda text: [*map(ord, text)],
        bounds=FeedBounds(replay_timeout=5.0),
    )
    yield feed
    feed.close()


@pytest.fixture
def router(engine: Engine, feed: KvEventFeed) -> AgentRouter:
    """Two agents; one of them has a feed."""
    router = AgentRouter(["mute"])
    router.join(Agent("fed"), feed)
    engine.publisher.wait_for_subscriber()
    receiver = feed._receiver
    wait_until(lambda: receiver._subscriptions and not receiver.replaying, "it has asked for what came before")
    return router


planner = ContextPlanner()


def block(name: str) -> ContextBlock:
    text = f"A document on {name}, of some length: " + name * 40
    return ContextBlock(text, id=name, tokens=len(text))


def serve(
    router: AgentRouter, engine: Engine, name: str, agent: str = "fed", cached: int = 0
) -> tuple[list[int], ContextPlan]:
    """One document read by an agent, in a prompt of its own."""
    assignment = router.assign([block(name)], [agent], tenant=TENANT)
    plan = planner.plan([block(name)], tenant=TENANT, model=agent, preamble="You answer.")
    tokens = [*map(ord, "You answer.\n\n" + plan.render() + "\n\nWhy?")]
    if agent == "fed":
        engine.store(tokens, plan.cache_salt)
    report = EngineReport(cached_tokens=cached, prompt_tokens=len(tokens), prompt_token_ids=tokens)
    assert router.commit(assignment, agent, report, plan=plan)
    return tokens, plan


def held(router: AgentRouter, name: str) -> list[str]:
    """Return the agents that are predicted to hold a document."""
    return [member.name for member in router._tenants.states[TENANT].holders.get(block(name).fingerprint, [])]


def given(router: AgentRouter, name: str) -> AssignedBlock:
    """Return the assignment that a document would get now."""
    assignment = router.assign([block(name)], tenant=TENANT)
    router.abandon(assignment)
    return assignment.blocks[0]


def test_evicted_blocks_no_longer_count_as_held(router: AgentRouter, engine: Engine, feed: KvEventFeed) -> None:
    tokens, plan = serve(router, engine, "sky")
    wait_until(lambda: feed.stats().prompts == 1, "the prompt is found")
    assert held(router, "sky") == ["fed"]
    assert given(router, "sky")[2:] == ("fed", "cache", False)
    engine.evict_all()
    wait_until(lambda: held(router, "sky") == [], "the eviction arrives")
    assert given(router, "sky").held is None
    router._tenants.states[TENANT].drop(router._tenants.states[TENANT].agents["fed"], block("sky").fingerprint)
    engine.store(tokens, plan.cache_salt)
    wait_until(lambda: held(router, "sky") == ["fed"], "the block counts as held again")
    assert given(router, "sky")[2:] == ("fed", "cache", False)
    serve(router, engine, "sky", "mute")
    engine.publisher.publish({"type": "AllBlocksCleared"})
    wait_until(lambda: held(router, "sky") == ["mute"], "only the other agent holds it")
    assert given(router, "sky")[2:] == ("mute", "cache", False)


def test_current_feed_overrides_reports(router: AgentRouter, engine: Engine, feed: KvEventFeed) -> None:
    for name in ("sky", "sea", "sun"):
        serve(router, engine, name)
    wait_until(lambda: feed.stats().prompts == 3 and feed.is_complete("a salt"), "the feed is current")
    serve(router, engine, "sun", cached=0)
    assert router.stats().stale == 0
    assert all(held(router, name) == ["fed"] for name in ("sky", "sea", "sun"))
    for name in ("sky", "sea", "sun"):
        serve(router, engine, name, "mute")
    serve(router, engine, "sun", "mute", cached=0)
    assert router.stats().stale == 3, "this agent has no feed"
    assert [held(router, name) for name in ("sky", "sea", "sun")] == [["fed"], ["fed"], ["fed", "mute"]]


def test_report_without_an_agent_belongs_to_the_only_one(
    router: AgentRouter, engine: Engine, feed: KvEventFeed
) -> None:
    assignment = router.assign([block("sky")], ["fed"], tenant=TENANT)
    plan = planner.plan([block("sky")], tenant=TENANT)
    tokens = [*map(ord, plan.render())]
    assert router.commit(assignment, report=EngineReport(0, len(tokens), None, tokens), plan=plan)
    wait_until(lambda: feed.stats().prompts == 1, "the prompt is found")


def test_returning_agent_keeps_its_feed(router: AgentRouter, engine: Engine, feed: KvEventFeed) -> None:
    for agent in ("fed", Agent("fed", capacity_tokens=10_000)):
        serve(router, engine, "sky")
        wait_until(lambda: feed.stats().prompts == 1, "the prompt is found")
        router.fail("fed")
        engine.evict_all()
        engine.store([1] * 8, None)
        router.join(agent)
        serve(router, engine, "sky")
        wait_until(lambda: feed.is_complete("a salt"), "the feed is current")
        wait_until(lambda: held(router, "sky") == ["fed"], "the block counts as held again")
        engine.evict_all()
        wait_until(lambda: held(router, "sky") == [], "the eviction arrives")


def test_events_of_forgotten_prompts_are_ignored(router: AgentRouter, engine: Engine, feed: KvEventFeed) -> None:
    tokens, plan = serve(router, engine, "sky")
    wait_until(lambda: feed.stats().prompts == 1, "the prompt is found")
    router.reset()
    engine.evict_all()
    engine.store(tokens, plan.cache_salt)
    router.assign(["something else"], tenant=TENANT)
    engine.evict_all()
    engine.store(tokens, plan.cache_salt)
    events = feed.stats().events
    engine.publisher.publish(removed(99))
    wait_until(lambda: feed.stats().events > events, "all earlier events are applied")
    assert held(router, "sky") == []
    router.leave("fed")
    engine.evict_all()


class FailingFeed(NoFeed):
    """Fails wherever it can."""

    def follow(self, target: ResidencyTarget) -> None:
        raise OSError("no such engine")

    def remember(self, served: ServedPrompt) -> None:
        raise OSError("no such engine")

    def is_complete(self, cache_salt: str | None) -> bool:
        raise OSError("no such engine")

    def stats(self) -> FeedStats:
        raise OSError("no such engine")


def test_a_feed_that_fails_is_counted_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    router = AgentRouter()
    with caplog.at_level(logging.DEBUG, "warmprefix"):
        router.join("a", FailingFeed())
        plan = planner.plan([block("sky")])
        for _ in range(3):
            assignment = router.assign([block("sky")])
            assert router.commit(assignment, "a", EngineReport(0, prompt_token_ids=[1, 2, 3]), plan=plan)
    assert router.stats().feed_errors == 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING] + [logging.DEBUG] * 3
    assert router.assign([block("sky")]).blocks[0].held == "cache"


def test_feed_receives_only_context_that_opens_the_prompt() -> None:
    remembered: list[ServedPrompt] = []

    class CollectingFeed(NoFeed):
        def remember(self, served: ServedPrompt) -> None:
            remembered.append(served)

    router = AgentRouter()
    router.join("a", CollectingFeed())
    opening = planner.plan([block("sky"), block("sea")], tenant=TENANT)
    behind = planner.plan(
        [block("sky")], tenant=TENANT, placement="tail", history=[{"role": "user", "content": "Hello"}]
    )
    reported: Callable[..., Any] = EngineReport
    for plan, report in (
        (opening, reported(0)),
        (behind, reported(0, prompt_token_ids=[1])),
        (opening, reported(0, prompt_token_ids=[1, 2])),
    ):
        router.commit(router.assign([block("sky"), block("sea")], tenant=TENANT), "a", report, plan=plan)
    (served,) = remembered
    assert (served.scope, served.cache_salt) == (opening.scope, opening.cache_salt)
    assert served.keys == (block("sky").fingerprint, block("sea").fingerprint)
    assert served.paragraphs == tuple(planned.render() for planned in opening.blocks)
    assert served.token_ids == [1, 2]
