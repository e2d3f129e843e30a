"""Histories that upstreams keep: references to what is stored, by OpenAI's SDK against emulators, and through Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.integrations.gateway.conftest import INSTANT, ScriptedUpstream, answer, metric, send

from redis_servers import Server
from warmprefix_gateway import GatewayServer
from warmprefix_requests import restored, rewrite
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
MODEL = INSTANT.model
SEA = "The sea is 3,688 metres deep on average. " * 30
LAKE = "The lake is 30 metres deep, and 40 in spring. " * 30
FILES = {"sea.txt": SEA, "lake.txt": LAKE}
REFERENCE = '[Word for word the result of the earlier call read({"path":"sea.txt"}).]'
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False} for name in ("read", "write")
]
SALT_KEY = b"a secret of all gateways"


def read(*paths: str) -> dict[str, Any]:
    return {
        "calls": [{"name": "read", "arguments": json.dumps({"path": path}, separators=(",", ":"))} for path in paths]
    }


SCRIPT = [read("sea.txt"), read("lake.txt", "sea.txt"), read("sea.txt"), read("lake.txt"), {"text": "Done."}]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., EmulatorServer]]:
    """Return a factory of emulators that follow a script."""
    with ExitStack() as running:

        def start(script: list[Any] = SCRIPT) -> EmulatorServer:
            path = tmp_path / f"script{len(list(tmp_path.iterdir()))}.json"
            path.write_text(json.dumps(script))
            return running.enter_context(EmulatorServer(replace(INSTANT, script=path)))

        yield start


@pytest.fixture
def redis_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("WARMPREFIX_STORE_BUDGET", "5")  # a busy machine is no fault
    server = Server()
    yield server
    server.close()


class Agent:
    """A client that leaves its history to the server."""

    def __init__(self, *bases: str, key: str = "none", stream: bool = False, **fields: Any) -> None:
        self.clients = [openai.OpenAI(base_url=base, api_key=key, max_retries=0) for base in bases]
        self.stream = stream
        self.fields = fields
        self.answers: list[Any] = []
        self.shown: list[Any] = []
        """The items of the whole history."""

    def ask(self, items: Any, after: str | None = None, **fields: Any) -> Any:
        client = self.clients[len(self.answers) % len(self.clients)]
        given: Any = {"model": MODEL, "input": items, "tools": TOOLS, **self.fields, **fields}
        if after is not None:
            given["previous_response_id"] = after
        if self.stream:
            with client.responses.stream(**given) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**given)
        self.answers.append(response)
        self.shown += [*items, *[item.model_dump(exclude_none=True) for item in response.output]]
        return response

    def run(self, **fields: Any) -> str:
        """Ask, and answer all calls, until there are none; return the last response's id."""
        response = self.ask([{"role": "user", "content": "How deep is the sea?"}])
        while calls := [item for item in response.output if item.type == "function_call"]:
            response = self.ask([self.result(call) for call in calls], response.id, **fields)
        return str(response.id)

    @staticmethod
    def result(call: Any) -> dict[str, Any]:
        output = FILES.get(json.loads(call.arguments).get("path"), "none")
        return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def stored_outputs(engine: EmulatorServer, id: str) -> list[str]:
    """Return the tools' results that an engine has stored up to a response."""
    url, headers = f"{engine.base_url}/responses/{id}/input_items", {"authorization": "Bearer none"}
    found = httpx.get(url, params={"order": "asc", "limit": 100}, headers=headers).json()
    items = [item for item in found["data"] if item["type"] in ("function_call", "function_call_output")]
    read = restored("responses", {"input": items})["input"]
    assert [item["output"] for item in read if "output" in item] == [
        FILES[path] for path in ("sea.txt", "lake.txt", "sea.txt", "sea.txt", "lake.txt")
    ]
    return [item["output"] for item in items if "output" in item]


@pytest.mark.parametrize("stream", [False, True])
def test_references_are_those_of_a_history_that_is_shown(
    engines: Callable[..., EmulatorServer], gateway_of: Make, stream: bool
) -> None:
    engine = engines()
    gateway = gateway_of(engine.base_url)
    agent = Agent(gateway.base_url, stream=stream)
    last = agent.run()
    shown = rewrite("responses", {"input": agent.shown})
    assert shown.references == 3
    sent = stored_outputs(engine, last)
    assert sent == [item["output"] for item in shown.body["input"] if "output" in item]
    assert sent[2:] == [
        REFERENCE.replace("[Word", "[Ran again; word"),
        REFERENCE.replace("[Word", "[Ran again; word"),
        REFERENCE.replace("[Word", "[Ran again; word").replace("sea", "lake"),
    ]
    assert metric(gateway, "references_total") == 3
    assert metric(gateway, "server_histories_total", outcome="known") == 4
    assert metric(gateway, "failures_total") == 0
    assert metric(gateway, "sessions") == 1
    assert metric(gateway, "uncached_tokens_total", cause="cut") == 0
    assert metric(gateway, "uncached_tokens_total", cause="lost") < 0.2 * metric(gateway, "prompt_tokens_total")


def test_computed_tokens_are_those_of_a_history_that_is_shown(
    engines: Callable[..., EmulatorServer], gateway_of: Make
) -> None:
    tokens = {}
    for name, options in {"record": {}, "without": {"references": "off"}}.items():
        agent = Agent(gateway_of(engines().base_url, **options).base_url)
        agent.run()
        usages = [response.usage for response in agent.answers]
        tokens[name] = sum(usage.input_tokens - usage.input_tokens_details.cached_tokens for usage in usages)
    items: list[Any] = [{"role": "user", "content": "How deep is the sea?"}]
    tokens["shown"] = 0
    shower = Agent(gateway_of(engines().base_url).base_url)
    while True:
        response = shower.ask(list(items))
        tokens["shown"] += response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        items += [item.model_dump(exclude_none=True) for item in response.output] + [*map(Agent.result, calls)]
    assert abs(tokens["record"] - tokens["shown"]) <= 0.02 * tokens["shown"]
    assert tokens["record"] < 0.6 * tokens["without"]


def test_gateways_that_share_a_redis_server_agree(
    engines: Callable[..., EmulatorServer], gateway_of: Make, redis_server: Server
) -> None:
    engine = engines()
    options: Any = {"redis_url": redis_server.url, "salt_key": SALT_KEY}
    gateways = [gateway_of(engine.base_url, **options) for _ in range(2)]
    agent = Agent(*[gateway.base_url for gateway in gateways], stream=True)
    stored_outputs(engine, agent.run())
    assert [metric(gateway, "references_total") for gateway in gateways] == [2, 1]
    with redis_server.client() as client:
        values: list[Any] = [client.get(key) for key in client.keys("wp:*:kept")]
        assert len(values) == len(agent.answers) + 1 + 2  # turns, the history, texts
        assert not any(word in value for value in values for word in (b"sea", b"read", b"metres", b"resp_"))
        assert all(0 < client.ttl(key) <= 86_400 for key in client.keys("*"))


@pytest.mark.parametrize("fault", ["killed", "read-only", "flushed", "overwritten", "swapped"])
def test_what_redis_lost_counts_as_unseen(
    engines: Callable[..., EmulatorServer], gateway_of: Make, redis_server: Server, fault: str
) -> None:
    engine = engines()
    gateway = gateway_of(engine.base_url, redis_url=redis_server.url, salt_key=SALT_KEY)
    agent = Agent(gateway.base_url)
    first = agent.ask([{"role": "user", "content": "Read."}])
    second = agent.ask([agent.result(first.output[0])], first.id)
    with redis_server.client() as client:
        keys = client.keys("wp:*:kept")
        if fault == "read-only":
            client.replicaof("127.0.0.1", 1)
        elif fault == "flushed":
            client.flushall()
        elif fault == "overwritten":
            for key in keys:
                client.set(key, b"\x01" + b"x" * 500)
        elif fault == "swapped":
            values: list[Any] = [client.get(key) for key in keys]
            for key, value in zip(keys, values[1:] + values[:1], strict=True):
                client.set(key, value)
        else:
            redis_server.kill()
    third = agent.ask([agent.result(call) for call in second.output], second.id)
    assert third.output
    expected = 1 if fault == "read-only" else 0  # the record is still there
    assert metric(gateway, "references_total") == expected
    agent.ask([agent.result(call) for call in third.output], third.id)
    assert metric(gateway, "references_total") == expected  # nothing is known of the third one
    assert (metric(gateway, "server_histories_total", outcome="failed") > 0) == (fault in ("killed", "read-only"))


def answered(id: str, *calls: dict[str, Any], **fields: Any) -> bytes:
    output = [{"type": "function_call", "id": f"fc_{call['call_id']}", **call} for call in calls]
    return json.dumps({"object": "response", "id": id, "status": "completed", "output": output, **fields}).encode()


def call(id: str, path: str = "sea.txt") -> dict[str, Any]:
    return {"call_id": id, "name": "read", "arguments": json.dumps({"path": path}, separators=(",", ":"))}


def body(after: str | None, *results: tuple[str, str], **fields: Any) -> bytes:
    items = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]
    given = {} if after is None else {"previous_response_id": after}
    return json.dumps({"model": "m", "input": [*items, {"role": "user", "content": "Go."}], **given, **fields}).encode()


class Chain:
    """Two responses behind a gateway: the second one has read the sea."""

    def __init__(self, gateway: GatewayServer, upstream: ScriptedUpstream, **headers: str) -> None:
        self.gateway, self.upstream, self.headers = gateway, upstream, headers
        self.ask(None, answered("resp_1", call("a")))
        self.ask("resp_1", answered("resp_2", call("b"), call("c", "lake.txt")), ("a", SEA))

    def ask(self, after: str | None, answer_body: bytes, *results: tuple[str, str], **fields: Any) -> bytes:
        """Send a request; return what the upstream got."""
        self.upstream.handler = answer(answer_body)
        reply = send(self.gateway, "POST", "/v1/responses", body(after, *results, **fields), **self.headers)
        assert (reply.status, reply.body) == (200, answer_body)
        return self.upstream.prompts[-1].body

    def is_referred(self, after: str, **fields: Any) -> bool:
        """Return True if a repeat behind a response becomes a reference; otherwise it must keep its bytes."""
        results = [("b", SEA), ("c", LAKE)]
        sent = self.ask(after, answered("resp_x"), *results, **fields)
        if b"Word for word" not in sent and b"word for word" not in sent:
            assert sent == body(after, *results, **fields)
            return False
        return True


@pytest.fixture
def chain(gateway_of: Make, upstream: ScriptedUpstream) -> Chain:
    return Chain(gateway_of(upstream.base_url), upstream)


def test_a_repeat_behind_a_response_becomes_a_reference(chain: Chain) -> None:
    assert chain.is_referred("resp_2")
    assert json.loads(chain.upstream.prompts[-1].body)["input"][0]["output"].endswith(REFERENCE[5:])


def test_a_branch_is_a_branch(chain: Chain) -> None:
    chain.ask("resp_1", answered("resp_3", call("b"), call("c", "lake.txt")), ("a", LAKE))
    assert chain.is_referred("resp_2")
    sent = chain.ask("resp_3", answered("resp_4"), ("b", SEA), ("c", LAKE))
    outputs = [item.get("output") for item in json.loads(sent)["input"]]
    assert outputs == [
        SEA,
        '[Word for word the result of the earlier call read({"path":"sea.txt"}), number 1 of such calls.]',
        None,
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "auto"},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"conversation": "conv_1"},
        {"session_params": {"id": "s"}},
    ],
)
def test_where_the_server_may_cut_nothing_is_referred_to(chain: Chain, fields: dict[str, Any]) -> None:
    assert not chain.is_referred("resp_2", **fields)
    chain.ask("resp_2", answered("resp_3", call("d")), ("b", SEA), ("c", LAKE), **fields)
    sent = chain.ask("resp_3", answered("resp_4", call("e"), call("f", "x")), ("d", SEA))
    assert json.loads(sent)["input"][0]["output"] == SEA  # of calls that look like this one, some may be cut
    sent = chain.ask("resp_4", answered("resp_5", call("g")), ("e", "-"), ("f", SEA))
    assert json.loads(sent)["input"][1]["output"] == SEA
    sent = chain.ask("resp_5", answered("resp_6"), ("g", SEA))
    is_known = "conversation" not in fields and "session_params" not in fields
    assert (b'call read({\\"path\\":\\"x\\"}).]' in sent) == is_known


@pytest.mark.parametrize(
    "stored",
    [
        {"id": "resp_3", "store": False},
        {"id": "resp_3", "status": "incomplete"},
        {"id": "resp_3", "status": "queued", "background": True},
        {"id": "resp_3", "conversation": {"id": "conv_1"}},
        {"id": "resp_3", "previous_response_id": "resp_1"},
        {"id": "resp_3", "truncation": "auto"},
        {"id": "resp_3", "output": None},
        {"id": "resp_3", "output": [{"type": "item_reference", "id": "fc_1"}]},
        {"id": 3},
        {"id": ""},
    ],
)
def test_what_is_not_stored_in_this_chain_is_unseen(chain: Chain, stored: dict[str, Any]) -> None:
    given = json.loads(answered("resp_3", call("d"), call("e", "x")))
    chain.ask("resp_2", json.dumps({**given, **stored}).encode(), ("b", SEA), ("c", LAKE))
    for after in ("resp_3", "resp_unknown"):
        sent = chain.ask(after, answered("resp_4"), ("d", SEA), ("e", LAKE))
        assert sent == body(after, ("d", SEA), ("e", LAKE))
    assert chain.is_referred("resp_2")


def test_a_request_that_is_not_to_be_stored_is_not(chain: Chain) -> None:
    chain.ask("resp_2", answered("resp_3", call("d")), ("b", SEA), ("c", LAKE), store=False)
    assert b"ord for word" not in chain.ask("resp_3", answered("resp_4"), ("d", SEA))


def test_results_of_unknown_calls_mean_that_the_history_is_not_known(chain: Chain) -> None:
    results = [("b", SEA), ("c", LAKE), ("z", SEA)]
    assert chain.ask("resp_2", answered("resp_3"), *results) == body("resp_2", *results)


def test_a_deleted_response_takes_its_history_along(chain: Chain) -> None:
    chain.upstream.handler = answer(b"{}")
    assert send(chain.gateway, "DELETE", "/v1/responses/resp_1").status == 200
    assert not chain.is_referred("resp_2")


def test_a_response_is_not_deleted_while_its_record_cannot_be(
    gateway_of: Make, upstream: ScriptedUpstream, redis_server: Server
) -> None:
    chain = Chain(gateway_of(upstream.base_url, redis_url=redis_server.url, salt_key=SALT_KEY), upstream)
    assert chain.is_referred("resp_2")
    redis_server.kill()
    seen = len(upstream.requests)
    assert send(chain.gateway, "DELETE", "/v1/responses/resp_1").status == 503
    assert len(upstream.requests) == seen
    redis_server.start()


def test_requests_go_to_the_upstream_that_keeps_the_response(
    gateway_of: Make, upstream: ScriptedUpstream, other: ScriptedUpstream, redis_server: Server
) -> None:
    options: Any = {"redis_url": redis_server.url, "salt_key": SALT_KEY}
    gateways = [gateway_of(*bases, **options) for bases in ((upstream.base_url, other.base_url),) * 2]
    kept = []
    for number in range(8):
        for each, name in ((upstream, "left"), (other, "right")):
            each.handler = answer(answered(f"resp_{name}_{number}"))
        reply = send(gateways[0], "POST", "/v1/responses", body(None), x_session_id=f"{number}")
        keeper = upstream if "left" in reply.json["id"] else other
        before = len(keeper.prompts)
        send(gateways[1], "POST", "/v1/responses", body(reply.json["id"]), x_session_id=f"other {number}")
        assert len(keeper.prompts) == before + 1
        send(gateways[1], "GET", f"/v1/responses/{reply.json['id']}")
        assert keeper.requests[-1].target == f"/v1/responses/{reply.json['id']}"
        kept.append((keeper, reply.json["id"]))
    keeper, response = kept[-1]
    keeper.handler = answer(b"busy", "503 Service Unavailable")
    counts = len(upstream.prompts) + len(other.prompts)
    reply = send(gateways[1], "POST", "/v1/responses", body(response))
    assert (reply.status, reply.body) == (503, b"busy")
    assert len(upstream.prompts) + len(other.prompts) == counts + 1  # another upstream has never seen it


# -- tenants


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join([f"{name} {sha256(f'key-{name}'.encode()).hexdigest()}\n" for name in ("ann", "bob")]))
    return path


def test_tenants_continue_their_own_responses_only(gateway_of: Make, upstream: ScriptedUpstream, keys: Path) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, engine="vllm")
    upstream.handler = answer(answered("resp_1", call("a")))
    headers = {name: {"authorization": f"Bearer key-{name}"} for name in ("ann", "bob")}

    def ask(name: str, after: str | None, **fields: Any) -> Any:
        return send(gateway, "POST", "/v1/responses", body(after, **fields), **headers[name])

    assert ask("ann", None).status == 200
    assert ask("ann", "resp_1").status == 200
    foreign, unknown = ask("bob", "resp_1"), ask("bob", "resp_unknown")
    assert (foreign.status, foreign.body) == (unknown.status, unknown.body) == (400, ask("ann", "resp_9").body)
    assert foreign.headers == unknown.headers
    for value in ("", 1, ["resp_1"], {"id": "resp_1"}, True, "resp_1\x00", "RESP_1", "r" * 2_000):
        given = json.dumps({"model": "m", "input": "Go.", "previous_response_id": value}).encode()
        assert send(gateway, "POST", "/v1/responses", given, **headers["ann"]).status == 400, value
        given = given.replace(b"previous_response_id", b"Previous_Response_Id")
        assert send(gateway, "POST", "/v1/responses", given, **headers["ann"]).status == 400, value
    escaped = body("resp_1").replace(b"previous_response", b"previous\\u005fresponse")
    assert send(gateway, "POST", "/v1/responses", escaped, **headers["ann"]).status == 400
    chat = json.dumps({"model": "m", "messages": [], "previous_response_id": "resp_1"}).encode()
    assert send(gateway, "POST", "/v1/chat/completions", chat, **headers["ann"]).status == 400
    assert ask("ann", "resp_1", conversation="conv_1").status == 400
    assert len(upstream.prompts) == 2


def test_tenants_delete_their_own_responses_only(gateway_of: Make, upstream: ScriptedUpstream, keys: Path) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, engine="vllm", allow_routes=("DELETE /v1/responses/*",))
    ann, bob = [{"authorization": f"Bearer key-{name}"} for name in ("ann", "bob")]
    upstream.handler = answer(answered("resp_1"))
    assert send(gateway, "POST", "/v1/responses", body(None), **ann).status == 200
    assert send(gateway, "DELETE", "/v1/responses/resp_1", None, **bob).status == 404
    assert send(gateway, "POST", "/v1/responses", body("resp_1"), **ann).status == 200
    assert send(gateway, "DELETE", "/v1/responses/resp_1", None, **ann).status == 200
    assert send(gateway, "POST", "/v1/responses", body("resp_1"), **ann).status == 400
    assert [request.method for request in upstream.requests] == ["POST", "POST", "DELETE"]


def test_tenants_get_another_error_while_records_cannot_be_read(
    gateway_of: Make, upstream: ScriptedUpstream, keys: Path, redis_server: Server
) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, engine="vllm", redis_url=redis_server.url, salt_key=SALT_KEY)
    headers = {"authorization": "Bearer key-ann"}
    upstream.handler = answer(answered("resp_1"))
    assert send(gateway, "POST", "/v1/responses", body(None), **headers).status == 200
    assert send(gateway, "POST", "/v1/responses", body("resp_1"), **headers).status == 200
    redis_server.kill()
    for after in ("resp_1", "resp_unknown"):
        assert send(gateway, "POST", "/v1/responses", body(after), **headers).status == 503
    assert send(gateway, "POST", "/v1/responses", body(None), **headers).status == 200


# -- copies of references


@pytest.mark.parametrize("stream", [False, True])
def test_a_copied_reference_of_an_earlier_turn_is_restored(
    engines: Callable[..., EmulatorServer], gateway_of: Make, stream: bool
) -> None:
    copied = REFERENCE.replace("[Word", "[Ran again; word")
    write = {"calls": [{"name": "write", "arguments": {"file": "b", "content": copied}}]}
    engine = engines([read("sea.txt"), read("lake.txt"), read("sea.txt"), read("lake.txt"), write, {"text": "Done."}])
    agent = Agent(gateway_of(engine.base_url).base_url, stream=stream)
    agent.run()
    (call,) = [item for item in agent.answers[4].output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"file": "b", "content": SEA}


def test_a_copied_reference_whose_text_is_gone_ends_the_answer(
    engines: Callable[..., EmulatorServer], gateway_of: Make, redis_server: Server
) -> None:
    copied = REFERENCE.replace("[Word", "[Ran again; word")
    write = {"calls": [{"name": "write", "arguments": {"file": "b", "content": copied}}]}
    engine = engines([read("sea.txt"), read("lake.txt"), read("sea.txt"), read("x"), write])
    agent = Agent(gateway_of(engine.base_url, redis_url=redis_server.url, salt_key=SALT_KEY).base_url)
    response = agent.ask([{"role": "user", "content": "Read."}])
    for _ in range(3):
        response = agent.ask([agent.result(call) for call in response.output], response.id)
    with redis_server.client() as client:
        largest = max(client.keys("wp:*:kept"), key=client.strlen)
        assert client.strlen(largest) > len(SEA)
        client.delete(largest)
    with pytest.raises(openai.InternalServerError, match="copied a reference"):
        agent.ask([agent.result(call) for call in response.output], response.id)
