"""`ServeRequestRouter` in a real Ray Serve, whose replicas are emulators that publish KV events."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from kv_publisher import KvPublisher, stored
from warmprefix_ray.request_prompts import prompt_of_request
from warmprefix_ray.serve import ServeRequestRouter
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer, block_hashes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.filterwarnings("ignore")]
"""Ray uses what it has deprecated itself."""

MODEL = "warmprefix-emulator"
SIZE = 16
QUEUE = 4
DEPLOYMENT = "warmprefix"


class Engine:
    """One replica: an emulator, and a publisher of its KV events."""

    def __init__(self, publishes: bool, seconds: float) -> None:
        self.server = EmulatorServer(
            EmulatorConfig(prefill_rate=1e9, base_ttft_ms=0, decode_rate=1 / max(seconds, 1e-6))
        )
        self.server.__enter__()
        self.publisher = KvPublisher() if publishes else None
        self.published: set[bytes] = set()
        self.client = httpx.AsyncClient(timeout=30)
        self.name = serve.get_replica_context().replica_id.unique_id

    def record_replica_metadata(self) -> dict[str, str]:
        if self.publisher is None:
            return {}
        return {
            "kv_events": self.publisher.endpoint,
            "kv_replay": self.publisher.replay_endpoint,
            "base_url": self.server.base_url,
        }

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("command") == "clear":
            assert self.publisher is not None
            self.publisher.publish({"type": "AllBlocksCleared"})
            return {"replica": self.name}
        if request.get("command") == "die":
            os._exit(1)
        if request.get("command") == "name":
            return {"replica": self.name}
        answer = (await self.client.post(f"{self.server.base_url}/chat/completions", json=request)).json()
        if self.publisher is not None:
            body = {"model": MODEL, "messages": request["messages"]}
            tokens = (await self.client.post(f"{self.server.url}/tokenize", json=body)).json()["tokens"]
            self._publish(self.publisher, tokens)
        return {"replica": self.name, "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}

    def _publish(self, publisher: KvPublisher, tokens: list[int]) -> None:
        parent = None
        for number, block in enumerate(block_hashes(tokens, SIZE)):
            if block not in self.published:
                self.published.add(block)
                publisher.publish(stored([block], parent, tokens[SIZE * number : SIZE * (number + 1)], SIZE))
            parent = block


def run(replicas: int, publishes: bool = False, seconds: float = 0.0) -> DeploymentHandle[Any]:
    """Deploy engines behind the router."""
    router: Any = ServeRequestRouter
    config = RequestRouterConfig(request_router_class=router, request_router_kwargs={"capacity_tokens": 60_000})
    options = {"num_cpus": 0}
    deploy: Any = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=replicas,
        max_ongoing_requests=QUEUE,
        health_check_period_s=1,
        ray_actor_options=options,
        request_router_config=config,
    )
    return serve.run(deploy(Engine).bind(publishes, seconds), name=DEPLOYMENT, route_prefix=None)


@pytest.fixture(autouse=True)
def serve_without_http() -> Iterator[None]:
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()  # type: ignore[no-untyped-call]


def chat(topic: int, question: str = "Why?", **fields: object) -> dict[str, Any]:
    text = f"Topic {topic}. " + " ".join(f"Fact {number} about topic {topic}." for number in range(100))
    system = {"role": "system", "content": "You answer from the facts that are given, and from nothing else. " * 3}
    messages = [system, {"role": "user", "content": f"{text}\n\n{question}"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 1, **fields}


def ask(handle: DeploymentHandle[Any], request: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = handle.remote(request).result(timeout_s=60)
    return answer


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def router_of_this_process(replicas: int) -> ServeRequestRouter:
    """Return the router that serves the handles of this process; Serve gives no access to it."""
    found: list[ServeRequestRouter] = []

    def find() -> bool:
        found[:] = [
            thing
            for thing in gc.get_objects()
            if isinstance(thing, ServeRequestRouter) and thing.stats().routes and len(thing.curr_replicas) == replicas
        ]
        return len(found) == 1

    until(find)
    return found[0]


def settle(replicas: int) -> None:
    """Wait until the router has noted the end of each request, which can be after its answer."""
    router = router_of_this_process(replicas)
    until(lambda: not router.stats().open_routes)


def test_prompts_that_begin_alike_meet_at_one_replica() -> None:
    handle = run(3)
    where = {topic: ask(handle, chat(topic)) for topic in range(12)}
    assert len({answer["replica"] for answer in where.values()}) == 3
    for topic, before in where.items():
        again = ask(handle, chat(topic, "And when?"))
        assert again["replica"] == before["replica"]
        assert again["cached"] > 500
    settle(3)
    assert router_of_this_process(3).stats().commits == 24


def test_tenants_share_no_prediction() -> None:
    handle = run(2)
    ask(handle, chat(1, cache_salt="a"))
    assert ask(handle, chat(1, cache_salt="b"))["cached"] == 0
    stats = router_of_this_process(2).stats()
    assert (stats.tenants, stats.resident_tokens) == (2, 0)


def test_a_session_goes_where_it_went_if_there_is_no_prompt_to_read() -> None:
    handle = run(3)
    for session in range(6):
        sticky = handle.options(session_id=f"s{session}")
        seen = set()
        for _ in range(3):
            seen.add(ask(sticky, {"command": "name"})["replica"])
            settle(3)
        assert len(seen) == 1


def test_a_request_that_cannot_be_read_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    handle = run(2)
    odd: dict[Any, Any] = {"role": "user", "content": "Why?", 1: "a name that is no text"}
    assert ask(handle, {**chat(0), "messages": [odd]})["replica"]
    assert "a request has no readable prompt" in caplog.text


def test_full_queues_and_cancelled_requests() -> None:
    """One prompt's replica takes as many as Serve lets it, the others the rest, and none is forgotten."""
    handle = run(3, seconds=0.5)
    ask(handle, chat(1))
    burst = [handle.remote(chat(1, f"Question {number}?", max_tokens=2)) for number in range(2 * QUEUE)]
    abandoned = [handle.remote(chat(1, f"Never mind {number}", max_tokens=2)) for number in range(QUEUE)]
    for response in abandoned:
        response.cancel()  # type: ignore[no-untyped-call]
    answers = Counter(response.result(timeout_s=60)["replica"] for response in burst)
    assert sum(answers.values()) == 2 * QUEUE
    assert max(answers.values()) <= QUEUE
    for response in abandoned:
        with suppress(Exception):  # cancelled, or too late for it
            response.result(timeout_s=60)
    settle(3)


def test_no_request_that_is_cancelled_at_any_moment_is_counted_for_ever() -> None:
    """Before a replica is found, before one accepts, while it works, and while the request is sent again."""
    handle = run(3, seconds=0.03)
    ask(handle, chat(1))
    rng = random.Random(1)
    for number in range(10):
        responses = [handle.remote(chat(rng.randrange(2), f"{number}, {part}?", max_tokens=2)) for part in range(24)]
        time.sleep(rng.random() / 10)
        for response in rng.sample(responses, 14):
            response.cancel()  # type: ignore[no-untyped-call]
            time.sleep(rng.choice([0.0, 0.0, rng.random() / 100]))
        for response in responses:
            with suppress(Exception):  # cancelled, or too late for it
                response.result(timeout_s=60)
    settle(3)
    assert router_of_this_process(3).stats().commits > 100


async def test_a_caller_may_only_ask_for_a_choice() -> None:
    handle = run(2)
    where = (await handle.remote(chat(1)))["replica"]
    chosen = []
    for reserve in (True, False):
        async with handle.choose_replica(chat(1), _reserve=reserve) as selection:
            chosen.append(selection.replica_id)
        settle(2)
    async with handle.choose_replica(chat(1)) as selection:
        chosen.append((await handle.dispatch(selection, chat(1)))["replica"])
    settle(2)
    assert chosen == [where] * 3
    assert router_of_this_process(2).stats().abandons == 3


def test_replicas_come_and_go() -> None:
    handle = run(2)
    where = {topic: ask(handle, chat(topic))["replica"] for topic in range(8)}
    assert len(set(where.values())) == 2
    dead = where[0]
    with suppress(Exception):  # its replica dies
        ask(handle, {**chat(0), "command": "die"})
    after = {topic: ask(handle, chat(topic))["replica"] for topic in range(8)}
    assert dead not in after.values()
    assert {topic: name for topic, name in after.items() if where[topic] != dead} == {
        topic: name for topic, name in where.items() if name != dead
    }
    until(lambda: len(router_of_this_process(2).curr_replicas) == 2)  # Serve starts another


def test_predictions_follow_the_events_of_each_replica() -> None:
    handle = run(2, publishes=True)
    first = ask(handle, chat(0))
    router = router_of_this_process(2)
    prompt = prompt_of_request(chat(0))
    assert prompt is not None
    feed = router._feeds[first["replica"]]
    until(lambda: feed.stats().prompts == 1 and feed.stats().kv_blocks > 10)
    assert feed.stats().unmapped == 0

    def resident() -> int:
        where = [first["replica"]]
        route = router._router.route(prompt.blocks, preamble=prompt.preamble, order_locked=True, replicas=where)
        router._router.abandon(route)
        return route.resident_tokens

    assert resident() > 500
    assert ask(handle, {**chat(0), "command": "clear"})["replica"] == first["replica"]
    until(lambda: resident() == 0)
    assert router.stats().feed_errors == 0


def test_addresses_that_cannot_be_used_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    handle = run(1)
    ask(handle, chat(0))
    router = router_of_this_process(1)
    assert router._feed_of("r", {"kv_events": "nonsense", "base_url": "http://a/v1"}) is None
    assert router._feed_of("r", {"kv_events": "tcp://a:1"}) is None
    assert caplog.text.count("replica r has no usable addresses") == 2


def test_a_wrong_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="capacity"):
        ServeRequestRouter.initialize_state(object.__new__(ServeRequestRouter), capacity=3)
