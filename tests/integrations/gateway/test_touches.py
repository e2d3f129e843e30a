"""Touches and priorities: what they keep cached, what they may not do, and when they end."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import itertools
import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.gateway.conftest import INSTANT, ScriptedUpstream, SeenRequest, answer, metric, send

from redis_servers import wait_until
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_gateway.office import Office
from warmprefix_openai import WholeAnswer
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
KEPT = 9_600
"""Tokens that the engine's cache holds."""
WORDS = ["sea", "sand", "deep", "water", "floor", "north", "south", "east", "west", "up", "down", "rock"]


def contexts(seed: int, number: int) -> list[list[str]]:
    """Return contexts of which every other one is of a topic that comes again, after about as much as a cache holds."""
    rng = random.Random(seed)
    names = map("".join, itertools.product("abcdefghijklmnop", repeat=4))

    def topic() -> list[str]:
        return [f"About {seed}{next(names)}: {' '.join(rng.choices(WORDS, k=110))}" for _ in range(4)]

    topics = [topic() for _ in range(12)]
    return [rng.sample(rng.choice(topics) if rng.random() < 0.5 else topic(), 4) for _ in range(number)]


def body_of(blocks: Sequence[str], question: object, **fields: Any) -> bytes:
    sources = "\n".join([f"<source>{block}</source>" for block in blocks])
    message = {"role": "user", "content": f"Use these.\n{sources}\nQuestion {question}?"}
    return json.dumps({"model": INSTANT.model, "max_tokens": 2, "messages": [message], **fields}).encode()


def is_touch(request: SeenRequest) -> bool:
    return re.search(rb'"max_tokens": ?1[,}]', request.body) is not None


class Forwarder(ScriptedUpstream):
    """An emulated engine behind a server that records requests, and can hold touches back."""

    def __init__(self, profile: str = "full-attention", **info: object) -> None:
        super().__init__(self.forward)
        self.engine = EmulatorServer(replace(INSTANT, kv_blocks=KEPT // 16, profile=profile))
        self.info = json.dumps(info).encode()
        self.holds_touches = self.hides_metrics = False
        self.status_of_touches = ""
        self.lacks = b"nothing that is in a body"
        self.computed = 0
        """Tokens that the engine computed."""

    def __enter__(self) -> Forwarder:
        self.engine.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.engine.__exit__(None, None, None)

    @property
    def touches(self) -> list[SeenRequest]:
        return [request for request in self.prompts if is_touch(request)]

    async def forward(self, request: SeenRequest, writer: asyncio.StreamWriter) -> None:
        if is_touch(request):
            if self.status_of_touches:
                await answer(b"{}", self.status_of_touches)(request, writer)
                return
            while self.holds_touches:
                await asyncio.sleep(0.01)
        if self.lacks in request.body:
            await answer(b"{}", "503 Service Unavailable")(request, writer)
            return
        if request.target == "/metrics" and self.hides_metrics:
            await answer(b"{}", "404 Not Found")(request, writer)
            return
        if request.target == "/server_info":
            await answer(self.info)(request, writer)
            return
        content = await asyncio.to_thread(self.ask, request)
        await answer(content)(request, writer)

    def ask(self, request: SeenRequest) -> bytes:
        connection = http.client.HTTPConnection(self.engine.url.removeprefix("http://"), timeout=20)
        connection.request(request.method, request.target, request.body, {"Content-Type": "application/json"})
        content = connection.getresponse().read()
        connection.close()
        if b'"usage"' in content:
            usage = json.loads(content)["usage"]
            self.computed += usage["prompt_tokens"] - (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return content


@pytest.fixture
def engine() -> Iterator[Forwarder]:
    with Forwarder() as engine:
        yield engine


def settle(server: GatewayServer) -> None:
    """Wait until no touch is under way."""
    sender = server.gateway._office.touches
    assert sender is not None
    wait_until(lambda: sender._sending is None or sender._sending.done(), "the end of the touches")


def ask_all(server: GatewayServer, asked: Sequence[bytes], **headers: str) -> None:
    for body in asked:
        assert send(server, "POST", CHAT, body, **headers).status == 200
        if server.gateway._office.touches is not None:
            settle(server)


def asked(number: int = 300) -> list[bytes]:
    return [body_of(blocks, number) for number, blocks in enumerate(contexts(1, number))]


def test_touches_keep_what_comes_again(engine: Forwarder, gateway_of: Make) -> None:
    with Forwarder() as other:
        ask_all(gateway_of(other.base_url, reorder=("tags",), touches=False), asked())
        gateway = gateway_of(engine.base_url, reorder=("tags",))
        ask_all(gateway, asked())
        assert not other.touches
        assert engine.computed < 0.99 * other.computed
    assert metric(gateway, "touches_total", outcome="answered") == len(engine.touches) > 20
    assert metric(gateway, "touches_total", outcome="failed") == metric(gateway, "failures_total") == 0
    computed, cached = [metric(gateway, "touch_tokens_total", source=source) for source in ("computed", "cached")]
    assert 0 < computed < cached
    # What the pages show of requests and tokens is the clients' alone.
    assert gateway.gateway._office.ledger.totals["requests"] == 300
    assert metric(gateway, "requests_total", route="chat", status="200") == 300


def test_a_touch_is_the_beginning_of_a_request_with_nothing_of_the_client(
    engine: Forwarder, gateway_of: Make, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join([f"{name} {hashlib.sha256(name.encode()).hexdigest()}\n" for name in ("acme", "other")]))
    gateway = gateway_of(engine.base_url, reorder=("tags",), keys=keys, upstream_key="ours", salt_key=b"s" * 32)
    for number, body in enumerate(asked(400)):
        name = "acme" if number % 5 else "other"
        ask_all(gateway, [body], Authorization=f"Bearer {name}", X_Session_Id=name, User_Agent="client")
    assert len(engine.touches) > 20
    shown: dict[str, set[str]] = {}
    for request in engine.prompts:
        body = json.loads(request.body)
        text = body["messages"][0]["content"]
        if request not in engine.touches:
            shown.setdefault(body["cache_salt"], set()).add(text)
            continue
        # The prefix was sent by that very tenant before: one's path is never computed for the other.
        assert any(earlier.startswith(text[:-1]) for earlier in shown[body["cache_salt"]])
        assert body.keys() - {"continue_final_message", "add_generation_prompt"} == {
            *("model", "max_tokens", "messages", "cache_salt")
        }
        names = {name.lower() for name, _ in request.headers}
        assert names == {"host", "authorization", "content-type", "content-length", "accept-encoding", *()} | (
            names & {"accept", "user-agent"}
        )
        assert request.header("authorization") == "Bearer ours"
        assert request.header("user-agent") != "client"


def test_a_client_key_pays_no_touch(engine: Forwarder, gateway_of: Make) -> None:
    gateway = gateway_of(engine.base_url, reorder=("tags",))
    ask_all(gateway, asked(), Authorization="Bearer mine", X_Api_Key="mine")
    assert engine.touches
    assert not any(request.header("authorization") or request.header("x-api-key") for request in engine.touches)


def test_engines_that_are_not_recognised_get_no_touch(engine: Forwarder, gateway_of: Make) -> None:
    gateway = gateway_of(engine.base_url, reorder=("tags",), engine="llama.cpp")
    ask_all(gateway, asked())
    asked_for_more = [f"{CHAT}?api-key=secret", CHAT]
    for number, body in enumerate(asked(100)):
        assert send(gateway, "POST", asked_for_more[number % 2], body).status == 200
    assert not engine.touches


def test_a_host_that_shows_no_metrics_gets_no_touch(engine: Forwarder, gateway_of: Make) -> None:
    engine.hides_metrics = True  # it may bill by the token, whatever it says it is
    ask_all(gateway_of(engine.base_url, reorder=("tags",)), asked())
    assert not engine.touches


def test_touches_go_where_their_context_is(engine: Forwarder, gateway_of: Make) -> None:
    with Forwarder() as other:
        engine.lacks = b"<source>"  # so that contexts are computed at the other one only
        gateway = gateway_of(engine.base_url, other.base_url, reorder=("tags",))
        ask_all(gateway, asked())
        assert len(other.touches) > 5
        assert not engine.touches


def test_a_touch_delays_no_request_and_no_end(engine: Forwarder, gateway_of: Make) -> None:
    gateway = gateway_of(engine.base_url, reorder=("tags",))
    engine.holds_touches = True
    for body in asked():
        assert send(gateway, "POST", CHAT, body).status == 200
    assert len(engine.touches) == 1  # one at a time, however long it takes
    ended = threading.Thread(target=gateway.__exit__, args=(None, None, None))
    ended.start()
    ended.join(10)
    assert not ended.is_alive()


@pytest.mark.parametrize("status", ["500 Internal Server Error", "401 Unauthorized", "400 Bad Request", "200 OK"])
def test_failed_touches_end(engine: Forwarder, gateway_of: Make, status: str) -> None:
    engine.status_of_touches = status
    gateway = gateway_of(engine.base_url, reorder=("tags",))
    ask_all(gateway, asked(250))
    assert 0 < len(engine.touches) <= 18
    assert metric(gateway, "touches_total", outcome="answered") == 0
    assert metric(gateway, "requests_total", route="chat", status="200") == 250


def test_foreign_traffic_costs_nothing(engine: Forwarder, gateway_of: Make) -> None:
    """Four of five tokens come from clients that the gateway does not see."""
    texts = iter([text for blocks in contexts(2, 4 * 200) for text in blocks])
    foreign = [body_of(list(itertools.islice(texts, 16)), 0) for _ in range(200)]
    computed, touched = [], []
    with Forwarder() as untouched:
        for each in (untouched, engine):
            gateway = gateway_of(each.base_url, reorder=("tags",), touches=each is engine)
            for own, other in zip(asked(200), foreign, strict=True):
                ask_all(gateway, [own])
                each.ask(SeenRequest("POST", CHAT, [], other))
                touched.append(len(engine.touches))
            computed.append(each.computed)
    assert computed[1] <= 1.005 * computed[0]
    assert touched[-1] <= touched[-50] + 2  # they have stopped


async def test_thousands_of_scopes_stay_within_their_bytes(engine: Forwarder) -> None:
    office = Office(GatewayOptions((engine.base_url,), reorder=("tags",), tenant_header="x-tenant", engine="vllm"))
    await office.open()
    usage = {"prompt_tokens": 4_000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
    answered = WholeAnswer()
    answered.feed(json.dumps({"choices": [{"index": 0, "message": {"content": "."}}], "usage": usage}).encode())
    answered.finish()
    long = ["deep " * 30_000, "sand " * 30_000]
    for number in range(2_000):
        body = body_of([*(long if number % 10 == 0 else ()), f"{number} deep", f"{number} sand"], number)
        asked = await office.ask(body, CHAT, {"content-type": "application/json"}, f"t{number}")
        assert asked is not None
        office.answered(asked, asked.sent, answered.facts, engine.base_url, (CHAT.encode(), b""))
        while office.upstreams.capacity_tokens is None:  # its metrics are read behind the first answer
            await asyncio.sleep(0.01)
    assert office.touches is not None
    toucher = office.touches._toucher
    assert 300 < len(toucher._kept) < 2_000
    assert toucher._kept.size <= 32 << 20
    assert len(toucher._scopes) <= 1_024
    await office.close()


# -- priorities --------------------------------------------------------------------------------------------------------

SGLANG = {"radix_eviction_policy": "priority", "enable_priority_scheduling": False}


def test_requests_and_touches_have_priorities_where_the_engine_evicts_by_them(gateway_of: Make) -> None:
    with Forwarder("priority-eviction", **SGLANG) as engine:
        gateway = gateway_of(engine.base_url, reorder=("tags",), profile="priority-eviction")
        ask_all(gateway, asked())
        plain = json.dumps({"model": INSTANT.model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]})
        ask_all(gateway, [plain.encode()])
        assert len(engine.touches) > 5
        numbers = [json.loads(request.body).get("priority") for request in engine.prompts]
        begun = numbers.index(next(number for number in numbers if number is not None))
        assert None not in numbers[begun:]  # a request without one would be evicted first
        # A touch counts as newer than the next requests, and later ones overtake it.
        touched = [place for place, request in enumerate(engine.prompts) if is_touch(request)]
        served = [number or 0 for number, request in zip(numbers, engine.prompts, strict=True) if not is_touch(request)]
        assert all(numbers[place] > served[place - count - 1] for count, place in enumerate(touched))
        assert any(numbers[place] > numbers[place + 1] for place in touched)
        assert numbers[-1] > numbers[begun]


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"radix_eviction_policy": "lru"},
        {**SGLANG, "enable_priority_scheduling": True},
        {**SGLANG, "abort_on_priority_when_disabled": True},
    ],
)
def test_no_engine_gets_a_priority_that_it_does_not_show_to_evict_by(gateway_of: Make, info: dict[str, Any]) -> None:
    with Forwarder("priority-eviction", **info) as engine:
        ask_all(gateway_of(engine.base_url, reorder=("tags",), profile="priority-eviction"), asked())
        assert not any(b'"priority"' in request.body for request in engine.prompts)
        assert not engine.touches


def test_tenants_may_not_choose_their_priority() -> None:
    options: dict[str, Any] = {"tenant_header": "x-tenant", "allow_fields": ("priority",)}
    with pytest.raises(ValueError, match="priority would keep a tenant's prompts"):
        GatewayOptions(("http://127.0.0.1:1/v1",), profile="priority-eviction", **options)
    GatewayOptions(("http://127.0.0.1:1/v1",), **options)
