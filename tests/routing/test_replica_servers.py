"""Routed requests at real servers, which count their own hits."""

from __future__ import annotations

import math
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import NamedTuple

import openai
import pytest

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix_openai import messages_for
from warmprefix_routing import ReplicaRouter
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

PREAMBLE = "Answer from the context."
CONFIG = EmulatorConfig(kv_blocks=1_500, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
"""24,000 tokens of cache: no server can hold all topics."""


class Counted(NamedTuple):
    """The counts of all servers."""

    hits: float
    queries: float

    @property
    def ratio(self) -> float:
        return self.hits / self.queries


class Servers:
    """Three replicas of one model."""

    def __init__(self, stack: ExitStack) -> None:
        self.names = ["one", "two", "three"]  # not their addresses, so that ties are decided alike in each run
        self._servers = {name: stack.enter_context(EmulatorServer(CONFIG)) for name in self.names}
        self.clients = {
            name: stack.enter_context(openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0))
            for name, server in self._servers.items()
        }

    def kill(self, name: str) -> None:
        self._servers[name].close()

    def counted(self) -> Counted:
        totals = [0.0, 0.0]
        for server in self._servers.values():
            with urllib.request.urlopen(f"{server.url}/metrics") as answer:
                text = answer.read().decode()
            for i, name in enumerate(("hits", "queries")):
                found = re.search(rf"^vllm:prefix_cache_{name}_total\S* ([\d.e+]+)$", text, re.MULTILINE)
                assert found is not None
                totals[i] += float(found[1])
        return Counted(*totals)


@pytest.fixture
def new_servers() -> Iterator[Callable[[], Servers]]:
    with ExitStack() as stack:
        yield lambda: Servers(stack)


def questions(number: int = 120) -> list[list[ContextBlock]]:
    """Return retrievals of six blocks in random order, each from one of nine topics of eight blocks."""
    rng = random.Random(1)
    topics = [
        [ContextBlock(f"{topic}.{n} is the subject. " * 40, id=f"{topic}.{n}") for n in range(8)] for topic in range(9)
    ]
    return [rng.sample(topic, 6) for topic in rng.choices(topics, k=number)]


def ask(client: openai.OpenAI, planner: ContextPlanner, replica: str, blocks: list[ContextBlock]) -> EngineReport:
    """Plan in a scope of the replica."""
    with planner.planning(blocks, model=f"{CONFIG.model}@{replica}", preamble=PREAMBLE) as plan:
        answer = client.chat.completions.create(
            model=CONFIG.model, messages=messages_for(plan, "What is the subject?", preamble=PREAMBLE), max_tokens=4
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return EngineReport(answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens)


@pytest.mark.slow
def test_replicas_hit_more_than_by_round_robin(new_servers: Callable[[], Servers]) -> None:
    servers, planner = new_servers(), ContextPlanner()
    router = ReplicaRouter(servers.names, capacity_tokens=CONFIG.capacity_tokens)

    def routed(blocks: list[ContextBlock]) -> None:
        with planner.planning(blocks, model=CONFIG.model, preamble=PREAMBLE) as plan:
            order = [planned.block for planned in plan.blocks]
            route = router.route(order, preamble=PREAMBLE, order_locked=True)
            answer = servers.clients[route.replica].chat.completions.create(
                model=CONFIG.model, messages=messages_for(plan, "What is the subject?", preamble=PREAMBLE), max_tokens=4
            )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        report = EngineReport(answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens)
        assert router.commit(route, report, plan)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(routed, questions()))
    stats = router.stats()
    assert (stats.commits, stats.reports, stats.open_routes) == (120, 120, 0)
    ours = servers.counted()
    assert stats.reported_cached_tokens == ours.hits

    others, turns = new_servers(), count()
    apart = ContextPlanner()

    def in_turn(blocks: list[ContextBlock]) -> None:
        name = others.names[next(turns) % 3]
        ask(others.clients[name], apart, name, blocks)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(in_turn, questions()))
    theirs = others.counted()
    assert theirs.queries == pytest.approx(ours.queries, rel=0.05)  # but for the notes on the order
    assert ours.ratio > 1.4 * theirs.ratio > 0


def test_a_server_that_dies_loses_only_its_share(new_servers: Callable[[], Servers]) -> None:
    servers, planner = new_servers(), ContextPlanner()
    router = ReplicaRouter(servers.names)
    contexts = [[ContextBlock(f"{topic} is this. " * 60, id=f"t{topic}")] for topic in range(30)]

    def answered(blocks: list[ContextBlock]) -> str:
        """Ask the routed replica, or another one if it can't be reached."""
        while True:
            route = router.route(blocks, preamble=PREAMBLE)
            try:
                report = ask(servers.clients[route.replica], planner, route.replica, blocks)
            except openai.APIConnectionError:
                router.abandon(route)
                router.fail(route.replica)
            else:
                assert router.commit(route, report)
                return route.replica

    before = [answered(blocks) for blocks in contexts]
    assert set(before) == set(servers.names)
    servers.kill(before[0])
    after = [answered(blocks) for blocks in contexts]
    assert set(after) == set(servers.names) - {before[0]}
    assert [(was, now) for was, now in zip(before, after, strict=True) if was not in (before[0], now)] == []
