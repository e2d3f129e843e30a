"""Warming an engine that was just started."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.prefix.tree import PrefixTree, hottest_paths

Engine = Any
Serve = Callable[[ContextPlanner, Engine, Sequence[ContextBlock]], tuple[ContextPlan, EngineReport]]
OpenEngine = Callable[[int], Engine]

PREAMBLE = "You answer from the context, and from nothing else. " * 6


def test_warmed_prefixes_are_cached_for_the_first_request(
    open_engine: OpenEngine, serve: Serve, corpus: list[ContextBlock]
) -> None:
    planner = ContextPlanner()
    hot = corpus[:3]
    for block in corpus[3:20]:
        planner.commit(planner.plan([*hot, block], preamble=PREAMBLE, model="warmprefix-emulator"))
    engine = open_engine(2_000)
    sent = planner.warm(engine.client, PREAMBLE, corpus, model="warmprefix-emulator", max_paths=3)
    assert sent == 4
    plan = planner.plan([*hot, corpus[40]], preamble=PREAMBLE, model="warmprefix-emulator")
    report = engine.ask(plan)
    assert report.cached_tokens is not None
    assert report.block_ends is not None
    assert report.prompt_tokens is not None
    end_of_hot = report.block_ends[2] * report.prompt_tokens
    assert report.cached_tokens >= end_of_hot - 32
    planner.commit(plan, report=report)
    assert planner.stats().stale_paths == 0


def test_the_preamble_can_be_warmed_alone(open_engine: OpenEngine, corpus: list[ContextBlock]) -> None:
    planner, engine = ContextPlanner(), open_engine(2_000)
    assert planner.warm(engine.client, PREAMBLE, model="warmprefix-emulator") == 1
    report = engine.ask(planner.plan(corpus[:2], preamble=PREAMBLE))
    assert report.cached_tokens is not None
    assert report.cached_tokens >= len(PREAMBLE) // 4 - 32


def test_tenants_are_warmed_separately(open_engine: OpenEngine, corpus: list[ContextBlock]) -> None:
    planner, engine = ContextPlanner(salt_key=b"secret"), open_engine(2_000)
    planner.commit(planner.plan(corpus[:4], preamble=PREAMBLE, tenant="acme", model="warmprefix-emulator"))
    assert planner.warm(engine.client, PREAMBLE, corpus, model="warmprefix-emulator", tenant="other") == 1
    assert planner.warm(engine.client, PREAMBLE, corpus, model="warmprefix-emulator", tenant="acme") == 2
    acme = planner.plan(corpus[:4], preamble=PREAMBLE, tenant="acme", model="warmprefix-emulator")
    report = engine.ask(acme)
    assert report.cached_tokens > report.prompt_tokens - 32
    other = planner.plan(corpus[:4], preamble=PREAMBLE, tenant="other", model="warmprefix-emulator")
    assert engine.ask(other).cached_tokens < 200


async def test_async_warming(open_engine: OpenEngine, corpus: list[ContextBlock]) -> None:
    planner, engine = ContextPlanner(), open_engine(2_000)
    planner.commit(planner.plan(corpus[:4], preamble=PREAMBLE, model="warmprefix-emulator"))
    async with openai.AsyncOpenAI(base_url=engine.server.base_url, api_key="none") as client:
        assert await planner.awarm(client, PREAMBLE, corpus, model="warmprefix-emulator") == 2


def test_a_failing_engine_raises(open_engine: OpenEngine, corpus: list[ContextBlock]) -> None:
    planner, engine = ContextPlanner(), open_engine(20)  # too small for the preamble's prompt and a path
    plan = planner.plan(corpus[:9], preamble=PREAMBLE, model="warmprefix-emulator")
    planner.commit(plan)
    planner.residency_changed(plan.scope, [block.fingerprint for block in corpus[:9]], 0)
    with pytest.raises(openai.OpenAIError):
        planner.warm(engine.client, PREAMBLE, corpus, model="warmprefix-emulator")
    assert planner.plan(corpus[:9], preamble=PREAMBLE, model="warmprefix-emulator").resident_tokens == 0


# -- which paths ---------------------------------------------------------------------------------------------------


def test_shared_paths_are_hotter_than_long_ones() -> None:
    tree = PrefixTree[str]()
    for tail in "CDEF":
        tree.insert(["A", "B", tail], [100, 100, 10])
    tree.insert(["X", "Y"], [250, 250])
    tree.insert(["U"], [5])
    assert [path[:2] for path in hottest_paths(tree, 2)] == [["A", "B"], ["X", "Y"]]
    assert len(hottest_paths(tree, 100)) == 6
    assert hottest_paths(tree, 0) == []


def test_evicted_paths_stay_hot() -> None:
    tree = PrefixTree[str]()
    tree.insert(["A", "B"], [10, 10])
    tree.mark_stale([])
    assert hottest_paths(tree, 1) == [["A", "B"]]


def test_hottest_paths_are_distinct_served_paths() -> None:
    chance = random.Random(1)
    for _ in range(200):
        tree = PrefixTree[int](chance.choice([None, 300]), chance.choice([5, 60]))
        for _ in range(chance.randrange(30)):
            keys = chance.sample(range(8), chance.randrange(1, 6))
            tree.insert(keys, [10 + key for key in keys])
        paths = hottest_paths(tree, 50)
        assert len({tuple(path) for path in paths}) == len(paths)
        held = tree.copy()
        for path in paths:
            assert tree.mark_resident(path) == len(path)
        held.check_integrity()
        tree.check_integrity()
    assert hottest_paths(PrefixTree[int](), 3) == []


class RefusingCompletions:
    """A client's completions that record requests, and refuse fields as an endpoint with status 400 does."""

    def __init__(self, refused: str = "") -> None:
        self.chat = self
        self.completions = self
        self.refused = refused
        self.requests: list[dict[str, Any]] = []

    def create(self, **request: Any) -> None:
        self.requests.append(request)
        if self.refused in request.get("extra_body", {}):
            response = httpx.Response(400, request=httpx.Request("POST", "http://engine"))
            raise openai.BadRequestError("unknown field", response=response, body=None)


def warmed(client: RefusingCompletions, corpus: list[ContextBlock], profile: str) -> int:
    planner = ContextPlanner(profile=profile)
    planner.commit(planner.plan(corpus[:2], preamble=PREAMBLE, model="model"))
    return planner.warm(client, PREAMBLE, corpus, model="model")


def test_an_engine_with_checkpoints_is_warmed_one_token_behind_each_path(corpus: list[ContextBlock]) -> None:
    client = RefusingCompletions()
    assert warmed(client, corpus, "vllm-checkpoints(128)") == 2
    texts = [request["messages"][-1]["content"] for request in client.requests]
    assert texts == [".", f"{corpus[0].text}\n\n{corpus[1].text}\n\n."]
    exact = {"continue_final_message": True, "add_generation_prompt": False}
    assert [request["extra_body"] for request in client.requests] == [exact, exact]


def test_warming_leaves_out_fields_that_the_endpoint_refused(corpus: list[ContextBlock]) -> None:
    client = RefusingCompletions("continue_final_message")
    assert warmed(client, corpus, "vllm-checkpoints(128)") == 2
    assert ["extra_body" in request for request in client.requests] == [True, False, False]


def test_other_refusals_are_raised(corpus: list[ContextBlock]) -> None:
    client = RefusingCompletions("cache_salt")
    planner = ContextPlanner(profile="full-attention")
    with pytest.raises(openai.BadRequestError):
        planner.warm(client, PREAMBLE, corpus, model="model", tenant="acme")
