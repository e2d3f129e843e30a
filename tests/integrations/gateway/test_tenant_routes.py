"""Which routes, bodies and headers of tenants reach an engine."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from starlette.routing import Match, Route
from tests.integrations.gateway.conftest import INSTANT, Handler, ScriptedUpstream, SeenRequest, answer, metric, send
from tests.integrations.gateway.test_hostile_requests import exchanged

from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.routes import Routes
from warmprefix_gateway.tenant_bodies import BodyRefusedError, refuse_fields
from warmprefix_gateway.upstreams import Upstreams
from warmprefix_requests.engine_salts import ENGINES, Engine, EngineName, recognised_engine
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}

OPEN = {
    "prompt": (
        *(f"POST {CHAT}", "POST /v1/completions", "POST /v1/messages", "POST /v1/responses", "POST /chat/completions"),
        *("POST /openai/v1/chat/completions", "POST /openai/deployments/gpt-5.6/chat/completions"),
    ),
    "embedding": ("POST /v1/embeddings", "POST /rerank"),
    "other": (
        *("POST /tokenize", "POST /v1/messages/count_tokens", "GET /version", "GET /v1/models"),
        *("HEAD /v1/models/Qwen%2FQwen3-0.6B", "GET /v1/models/Qwen/Qwen3-0.6B"),
    ),
}
CLOSED = (
    *("POST /abort_request", "POST /flush_cache", "POST /reset_prefix_cache", "POST /sleep", "POST /start_profile"),
    *("POST /update_weights_from_disk", "POST /v1/load_lora_adapter", "POST /release_memory_occupation"),
    *("POST /generate", "POST /inference/v1/generate", "POST /v1/files", "POST /v1/batches", "POST /v1/realtime"),
    *("POST /v1/responses/resp_1/cancel", "GET /v1/responses/resp_1", "POST /v1/threads/t/messages"),
    *("GET /server_info", "GET /get_server_info", "GET /v1/files/f/content", "GET /metrics/", "GET /openapi.json"),
    *("GET /v1/models/../files", "GET /v1/models/%2e%2e/x", "GET /v1/models//x", "GET /v1/models/a;b"),
    *("GET /v1/models/a%00", "GET /v1/models/a%2F..%2Ff", "GET /V1/models", "DELETE /v1/models/m"),
    *(f"{method} {CHAT}" for method in ("GET", "PUT", "PATCH", "OPTIONS", "TRACE", "post")),
    *(f"POST {CHAT}/", f"POST /{CHAT}", "POST /v1/./completions", "POST /v1/x/../messages", "POST /v1/messages%3F"),
    *("POST /v1/chat%2Fcompletions", "POST /v1/messages;a=1", "POST /v1\\messages", "POST /v1/messages\n"),
    *("POST http://a/v1/messages", "POST /v1/m\u0435ssages", "POST *", "POST ", "POST /V1/messages"),
)


def kind_of(route: str, *allowed: str) -> str | None:
    method, _, path = route.partition(" ")
    return Routes(allowed).kind(method, path)


def test_only_routes_of_the_table_are_open() -> None:
    assert {kind: tuple(route for route in routes if kind_of(route) == kind) for kind, routes in OPEN.items()} == OPEN
    assert [route for route in CLOSED if kind_of(route) is not None] == []


def test_an_operator_can_open_more() -> None:
    allowed = ("GET /v1/files/*", "/reset_prefix_cache")
    for route in ("GET /v1/files/file-1", "POST /reset_prefix_cache"):
        assert kind_of(route, *allowed) == "other"
    for route in ("POST /v1/files/f", "GET /v1/files/f/content", "GET /v1/files/../x", "GET /v1/files/%2e%2e"):
        assert kind_of(route, *allowed) is None
    for route in ("GET /v1/files/f%2Fcontent", "GET /v1/files/f%2fcontent"):
        assert kind_of(route, *allowed) is None
        assert kind_of(route, route) == "other"
    for wrong in ("v1/files", "get /v1/files", "/v1/../x", "GET  /x", "", "/v1/files?x"):
        with pytest.raises(ValueError, match="a route must be"):
            Routes([wrong])
    with pytest.raises(ValueError, match="allowed to tenants"):
        GatewayOptions(("http://a/v1",), allow_routes=("/x",))
    with pytest.raises(ValueError, match="got cache_salt"):
        GatewayOptions(("http://a/v1",), tenant_header="x", allow_fields=("rid", "cache_salt"))


PATHS_OF_ENGINES = {
    "prompt": ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
    "embedding": ("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
    "other": (
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/health", "/ping", "/version"),
        *("/v1/models", "/v1/models/{model:path}"),
    ),
    "": (
        *("/abort_request", "/flush_cache", "/generate", "/v1/files", "/v1/files/{file}", "/v1/files/{file}/content"),
        *("/v1/responses/{response}", "/v1/responses/{response}/cancel", "/v1/load_lora_adapter", "/metrics"),
        *("/v1/batches/{batch}/cancel", "/v1/chat/completions/render", "/v1/audio/speech", "/{rest:path}"),
    ),
}
PARTS = (
    *("v1", "v2", "openai", "chat", "completions", "messages", "responses", "models", "files", "score", "health"),
    *(
        "count_tokens",
        "flush_cache",
        "tokenize",
        "render",
        "m",
        "..",
        ".",
        "",
        "%2e%2e",
        "%2F",
        "a;b",
        "%00",
        "V1",
        "a.b",
    ),
    *("m%2F..%2F..%2Ffiles", "messages%2F", "content", "cancel", "%6dessages", "metrics"),
)


def test_an_engine_routes_each_open_path_as_the_gateway_does() -> None:
    kinds = {path: kind for kind, paths in PATHS_OF_ENGINES.items() for path in paths}
    table = [Route(path, lambda _: None, methods=["GET", "POST"]) for path in kinds]
    seeded = random.Random(1)
    opened = 0
    for _ in range(20_000):
        path = "/" + "/".join(seeded.choice(PARTS) for _ in range(seeded.randrange(1, 5)))
        method = seeded.choice(["GET", "POST"])
        kind = Routes().kind(method, path)
        if kind is None:
            continue
        opened += 1
        scope = {"type": "http", "method": method, "path": unquote(path), "root_path": ""}
        routed = next(route.path for route in table if route.matches(scope)[0] == Match.FULL)
        assert kinds[routed] == kind or routed == "/{rest:path}", (method, path, routed)
    assert opened > 200


def test_closed_routes_do_not_reach_the_upstream(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant", allow_routes=("POST /v1/files",))
    for target in ("/flush_cache", "/v1/batches", "/v1/messages/../../flush_cache"):
        reply = send(gateway, "POST", target, b"{}", x_tenant="acme")
        assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")
    head = b"POST http://example.org/flush_cache HTTP/1.1\r\nhost: a\r\nx-tenant: acme\r\ncontent-length: 2\r\n\r\n{}"
    assert b"HTTP/1.1 404" in exchanged(gateway, head)
    assert upstream.requests == []
    assert metric(gateway, "refused_total", reason="route") == 4
    assert send(gateway, "POST", "/v1/files", b"x", x_tenant="acme").status == 200
    assert send(gateway_of(upstream.base_url), "POST", "/flush_cache", b"{}").status == 200


IMAGE = {"type": "image_url", "image_url": None, "uuid": "a"}


@pytest.mark.parametrize(
    "change",
    [
        *[{name: "x"} for name in ("extra_key", "rid", "request_id", "session_id", "lora_path", "conversation")],
        *[{name: {}} for name in ("kv_transfer_params", "session_params", "nvext", "vllm_xargs", "custom_params")],
        *[{name: 0} for name in ("data_parallel_rank", "routed_dp_rank", "priority", "bootstrap_room", "id_slot")],
        *[{name: "x"} for name in ("input_ids", "cacheSalt", "Cache_Salt", "sessionId", "cache_\u017falt")],
        {"previous_response_id": "resp_1"},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://a", "content_hash": "a"}}]}]},
        {"messages": [{"content": [{"type": "document", "source": {"type": "file", "file_id": "file_1"}}]}]},
        {"messages": [{"content": [{"type": "tool_result", "content": [{"source": {"file_id": "file_1"}}]}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]},
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"]}}]},
        {"tools": [{"type": "image_generation", "input_image_mask": {"file_id": "file-1"}}]},
        {"tools": [{"type": "shell", "environment": {"type": "container_reference", "container_id": "cntr_1"}}]},
        {"messages": [{"content": [{"type": "audio", "audio": {"content_hash": "a"}}]}]},
        {"prompt": {"variables": {"image": {"type": "input_image", "file_id": "file-1"}}}},
        *[{name: {"content": [IMAGE]}} for name in ("query", "documents", "text_1", "text_2", "data_1", "data_2")],
        *[{name: ["Why?", {"content": [IMAGE]}]} for name in ("queries", "documents", "items", "data_1", "data_2")],
        {"documents": [IMAGE]},
    ],
)
def test_fields_that_reach_beyond_a_tenant_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BodyRefusedError) as refusal:
        refuse_fields({**BODY, **change}, ())
    assert refusal.value.status == 400


def test_ordinary_fields_pass() -> None:
    schema = {"type": "object", "properties": {"session_id": {"type": "string"}, "file_id": {}, "uuid": {}}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"file_id": "x", "uuid": "y"}}
    body = {
        "messages": [{"role": "assistant", "content": [call]}],
        "tools": [{"name": "f", "input_schema": schema}, {"type": "code_interpreter", "container": {"type": "auto"}}],
        "metadata": {"session_id": "s"},
        "prompt_cache_key": "k",
        "previous_response_id": None,
        "user": "u",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"x": 1},
        "input": [{"type": "function_call", "arguments": {"file_id": "x", "content": [{"uuid": "y"}]}}],
        "prompt": [1, 2],
        "documents": ["a", {"text": "b"}],
        "text_1": "uuid",
    }
    refuse_fields(body, ())
    refuse_fields({**body, "previous_response_id": "resp_1"}, ("previous_response_id",))


def test_a_tenants_headers_choose_nothing(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    chosen = {"x_data_parallel_rank": "1", "x_request_id": "a", "x_http_method_override": "PUT", "x_session_id": "s"}
    content = json.dumps(BODY).encode()
    assert send(gateway, "POST", CHAT, content, x_tenant="acme", **chosen).status == 200
    (request,) = upstream.prompts
    passed = {name.lower() for name, _ in request.headers}
    assert passed & {name.replace("_", "-") for name in chosen} == {"x-session-id"}
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-tenant: acme\r\ncontent-length: {len(content)}\r\n".encode()
    for twice in (b"x-tenant: initech", b"content-type: a\r\ncontent-type: application/json"):
        assert b"HTTP/1.1 400" in exchanged(gateway, head + twice + b"\r\n\r\n" + content)
    assert send(gateway, "POST", CHAT, content, x_tenant="acme", content_type="text/plain").status == 415
    assert len(upstream.prompts) == 1


def test_embeddings_get_the_salt_too(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    for path, body in (("/v1/embeddings", {"input": ["a"]}), (CHAT, BODY)):
        assert send(gateway, "POST", path, json.dumps(body).encode(), x_tenant="acme").status == 200
    salts = [json.loads(request.body)["cache_salt"] for request in upstream.prompts]
    assert salts[0] == salts[1]
    assert send(gateway, "POST", "/v1/embeddings", b"input=a", x_tenant="acme").status == 400


# -- engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "version", "takes"),
    [
        ("vllm", "0.33.0", {"chat": True, "responses": True, "messages": True}),
        ("vllm", "0.32.1.dev7+g1", {"messages": True}),
        ("vllm", "0.31.2", {"chat": True, "messages": False}),
        ("vllm", "0.1.dev1+g1", {"chat": None, "messages": None}),
        ("sglang", "", {"chat": True, "completions": True, "responses": True, "messages": False, "embeddings": None}),
        ("llamacpp", "", {"chat": False, "messages": False, "embeddings": False}),
        ("acme", "0.33.0", {"chat": None, "messages": None}),
    ],
)
def test_an_engine_is_recognised(owner: str, version: str, takes: dict[str, bool | None]) -> None:
    models = json.dumps({"data": [{"id": "m", "owned_by": owner}, {"id": "lora", "owned_by": owner}]}).encode()
    engine = recognised_engine(models, json.dumps({"version": version}).encode())
    assert {route: engine.takes_salt(route) for route in takes} == takes


def _letters(name: str) -> str:
    return re.sub(r"\W", "", name)


def test_the_page_on_engines_has_these_facts() -> None:
    page = (Path(__file__).parents[3] / "docs/engines.md").read_text("utf-8")
    table = page.partition("## Tenants' salts")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    routes = ("chat", "completions", "responses", "messages")
    shown = {
        _letters(name.partition("](")[0]).lower(): dict(zip(routes, cells, strict=True)) for name, *cells in rows[2:]
    }
    names: dict[str, EngineName] = {_letters(name).removeprefix("warmprefix"): name for name in ENGINES}
    assert shown.keys() == names.keys()
    for key, facts in shown.items():
        for route, first in facts.items():
            engine = Engine(names[key], None)
            if first in ("any", "never"):
                assert engine.takes_salt(route) is (first == "any")
                continue
            major, minor = map(int, first.split("."))
            versions = [(major, minor - 1), (major, minor), (major + 1, 0)]
            found = [engine._replace(version=version).takes_salt(route) for version in versions]
            assert found == [False, True, True]


@pytest.mark.parametrize("models", [b"", b"[]", b'{"data": [{"owned_by": ["vllm"]}]}', b'{"data": 7}', b"[" * 9_999])
def test_any_answer_leaves_an_engine_unknown(models: bytes) -> None:
    assert recognised_engine(models, models) == Engine()
    mixed = json.dumps({"data": [{"owned_by": "vllm"}, {"owned_by": "sglang"}]}).encode()
    assert recognised_engine(mixed, b"") == Engine()


def test_messages_of_tenants_share_no_cache(gateway_of: Make) -> None:
    body = json.dumps({**BODY, "max_tokens": 4, "system": "Be brief. " * 200, "model": INSTANT.model}).encode()
    with EmulatorServer(INSTANT) as engine:
        gateway = gateway_of(engine.base_url, tenant_header="x-tenant")
        replies = [send(gateway, "POST", "/v1/messages", body, x_tenant=name) for name in ("acme", "acme", "initech")]
    read = [reply.json["usage"]["cache_read_input_tokens"] for reply in replies]
    assert read[0] == read[2] == 0
    assert read[1] > 0


def test_messages_are_refused_where_their_salt_is_ignored(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = owned_by("sglang")
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    content = json.dumps(BODY).encode()
    for _ in range(3):
        reply = send(gateway, "POST", "/v1/messages", content, x_tenant="acme")
        assert (reply.status, reply.json["type"]) == (400, "error")
    assert send(gateway, "POST", CHAT, content, x_tenant="acme").status == 200
    asked = sorted((request.method, request.target) for request in upstream.requests)
    assert asked == [("GET", "/v1/models"), ("GET", "/version"), ("POST", CHAT)]  # asked once a minute
    assert send(gateway_of(upstream.base_url), "POST", "/v1/messages", content).status == 200
    stated = gateway_of(upstream.base_url, tenant_header="x-tenant", engine="vllm")
    assert send(stated, "POST", "/v1/messages", content, x_tenant="acme").status == 200
    assert "cache_salt" in json.loads(upstream.prompts[-1].body)


@pytest.mark.parametrize(
    ("owner", "path", "hint"),
    [
        ("llamacpp", "/v1/embeddings", ""),
        ("llamacpp", "/rerank", ""),
        ("llamacpp", CHAT, ""),
        ("sglang", "/v1/messages", "; use chat completions"),
    ],
)
def test_an_ignored_salt_is_an_error_of_the_route(
    upstream: ScriptedUpstream, other: ScriptedUpstream, gateway_of: Make, owner: str, path: str, hint: str
) -> None:
    upstream.handler, other.handler = owned_by(owner), owned_by("vllm")
    content = json.dumps({**BODY, "input": "Why?"}).encode()
    reply = send(gateway_of(upstream.base_url, tenant_header="x-tenant"), "POST", path, content, x_tenant="acme")
    assert reply.status == 400
    assert reply.json["error"]["message"].endswith(f"apart on this route{hint}")
    assert upstream.prompts == []
    for options in ({}, {"tenant_header": "x-tenant", "engine": "warmprefix-emulator"}):
        assert send(gateway_of(upstream.base_url, **options), "POST", path, content, x_tenant="acme").status == 200
    if path != "/v1/messages":
        both = gateway_of(upstream.base_url, other.base_url, tenant_header="x-tenant")
        assert send(both, "POST", path, content, x_tenant="acme").status == 200
        assert "cache_salt" in json.loads(other.prompts[-1].body)


def test_a_failure_moves_no_tenant_to_an_engine_without_salts(
    upstream: ScriptedUpstream, other: ScriptedUpstream, gateway_of: Make
) -> None:
    content = json.dumps(BODY).encode()

    def status_of(*failing: int) -> int:
        for number, each in enumerate((upstream, other)):
            works = owned_by("llamacpp" if number else "vllm")
            fails = answer(b"{}", "503 Service Unavailable")
            each.handler = by_method(works, fails if number in failing else works)
        gateway = gateway_of(upstream.base_url, other.base_url, tenant_header="x-tenant")
        return send(gateway, "POST", CHAT, content, x_tenant="acme").status

    assert [status_of(), status_of(1), status_of(0)] == [200, 200, 503]
    assert other.prompts == []
    gateway = gateway_of(other.base_url, other.base_url.removesuffix("/v1"), tenant_header="x-tenant")
    reply = send(gateway, "POST", CHAT, content, x_tenant="acme")
    assert reply.status == 400
    assert "keep tenants apart" in reply.json["error"]["message"]


def by_method(got: Handler, posted: Handler) -> Handler:
    async def handle(request: SeenRequest, writer: asyncio.StreamWriter) -> None:
        await (got if request.method == "GET" else posted)(request, writer)

    return handle


def test_a_busy_engine_stays_the_same_and_another_one_is_noticed(upstream: ScriptedUpstream) -> None:
    async def names() -> list[str | None]:
        now = [0.0]
        found: list[str | None] = []
        upstreams = Upstreams(GatewayOptions((upstream.base_url,)), GatewayMetrics(), lambda: now[0])
        async with aiohttp.ClientSession() as client:
            for reply in (owned_by("vllm"), answer(b"", "503 Service Unavailable"), owned_by("sglang"), owned_by("x")):
                upstream.handler = reply
                await upstreams.engine(client, upstream.base_url)
                await asyncio.gather(*upstreams._asking.values())
                found.append((await upstreams.engine(client, upstream.base_url)).name)
                now[0] += 61
        return found

    assert asyncio.run(names()) == ["vllm", "vllm", "sglang", None]
    assert len(upstream.requests) == 8


async def test_nothing_waits_again_for_an_engine_that_is_unknown(upstream: ScriptedUpstream) -> None:
    now = [0.0]
    upstreams = Upstreams(GatewayOptions((upstream.base_url,)), GatewayMetrics(), lambda: now[0])

    async def hang(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with aiohttp.ClientSession() as client:
        upstream.handler = owned_by("acme")
        for now[0] in (0.0, 59.0):
            assert await upstreams.engine(client, upstream.base_url) == Engine()
        assert len(upstream.requests) == 2
        now[0] = 61.0
        upstream.handler = hang
        assert await upstreams.engine(client, upstream.base_url) == Engine()
        assert list(upstreams._asking) == [upstream.base_url]  # still under way
        assert await upstreams.engine(client, upstream.base_url, is_needed=True) == Engine()
        assert upstreams._asking == {}
        now[0] += 6.0
        upstream.handler = owned_by("vllm")
        assert (await upstreams.engine(client, upstream.base_url, is_needed=True)).name == "vllm"


def owned_by(owner: str) -> Any:
    return answer(json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode())


# -- fields that upstreams refuse ----------------------------------------------------------------------------------
