"""A tenant's request is refused where its salt would be ignored: by the engine's name, version and route."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import EngineLink, messages_for
from warmprefix_openai.salt_check import SaltCheck

ANSWER = {
    "chat": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]},
    "messages": {"type": "message", "content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn"},
}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}


class Engine:
    """An engine that names itself, and counts what it was asked."""

    def __init__(self, owner: str | None, version: str | None = None, *, status: int = 200) -> None:
        self.asked: list[str] = []
        self.salts: list[object] = []
        self.owner = owner
        self._version = version
        self._status = status

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.method == "GET":
            assert request.headers["authorization"] == "Bearer key"
            assert "content-length" not in request.headers
            models = {"data": [{"id": "m", "owned_by": self.owner}]}
            known = {"/v1/models": models, "/version": self._version and {"version": self._version}}
            content = known.get(request.url.path)
            return httpx.Response(self._status if content else 404, json=content)
        self.salts.append(json.loads(request.content).get("cache_salt"))
        return httpx.Response(200, json=ANSWER["messages" if request.url.path == PATHS["messages"] else "chat"])


def asked(
    engine: Engine, route: str, *, is_async: bool = False, tenant: str | None = "acme", times: int = 1, **options: Any
) -> tuple[httpx.Response, Any]:
    """Send a planned prompt with a link; return the last response and the planner's counts."""
    with ContextPlanner() as planner, EngineLink(planner, **options) as link:
        transport = httpx.MockTransport(engine.answer)
        plan_of = [planner.plan([ContextBlock("A passage.")], tenant=tenant) for _ in range(times)]
        bodies = [{"model": "m", "max_tokens": 1, "messages": messages_for(plan, "What?")} for plan in plan_of]
        headers = {"authorization": "Bearer key"}

        async def send() -> httpx.Response:
            client: httpx.AsyncClient
            response = httpx.Response(0)
            async with link.async_http_client(httpx.AsyncClient, transport=transport) as client:
                for plan, body in zip(plan_of, bodies, strict=True):
                    with link.sending(plan):
                        response = await client.post(f"http://engine{PATHS[route]}", json=body, headers=headers)
            return response

        if is_async:
            return asyncio.run(send()), planner.stats()
        response = httpx.Response(0)
        with link.http_client(httpx.Client, transport=transport) as client:
            for plan, body in zip(plan_of, bodies, strict=True):
                with link.sending(plan):
                    response = client.post(f"http://engine{PATHS[route]}", json=body, headers=headers)
        return response, planner.stats()


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize(
    ("owner", "version", "route"),
    [
        ("sglang", None, "messages"),
        ("vllm", "0.31.0", "messages"),
        ("llamacpp", None, "messages"),
        ("llamacpp", None, "chat"),
        ("vllm", "0.8.5", "chat"),
        ("vllm", None, "messages"),
        ("someone", None, "messages"),
        (None, None, "messages"),
    ],
)
def test_a_request_whose_salt_may_be_ignored_is_refused(
    owner: str | None, version: str | None, route: str, is_async: bool
) -> None:
    engine = Engine(owner, version)
    response, stats = asked(engine, route, is_async=is_async, times=2)
    assert engine.asked == ["/v1/models", "/version"], "the prompt reached the engine, or it was asked twice"
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert ("use chat completions" in error["message"]) is (route == "messages" and owner != "llamacpp")
    assert (stats.commits, stats.open_plans) == (0, 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize(
    ("owner", "version", "route"),
    [
        ("sglang", None, "chat"),
        ("vllm", "0.32.0", "messages"),
        ("vllm", None, "chat"),
        ("warmprefix-emulator", None, "messages"),
        ("someone", None, "chat"),
    ],
)
def test_a_request_whose_salt_separates_passes(owner: str, version: str | None, route: str, is_async: bool) -> None:
    engine = Engine(owner, version)
    response, stats = asked(engine, route, is_async=is_async, times=2)
    assert response.status_code == 200
    assert engine.asked == ["/v1/models", "/version", PATHS[route], PATHS[route]]
    assert None not in engine.salts
    assert (stats.commits, stats.open_plans) == (2, 0)


def test_an_engine_without_an_answer_counts_as_unknown() -> None:
    engine = Engine("vllm", "0.33.0", status=500)
    assert asked(engine, "messages")[0].status_code == 400
    assert asked(engine, "chat")[0].status_code == 200


@pytest.mark.parametrize(
    ("tenant", "options"), [(None, {}), ("acme", {"cache_salt": False})], ids=["no tenant", "no salt is sent"]
)
def test_engines_are_asked_for_salted_requests_only(tenant: str | None, options: dict[str, Any]) -> None:
    engine = Engine("sglang")
    response, _ = asked(engine, "messages", tenant=tenant, **options)
    assert (response.status_code, engine.asked, engine.salts) == (200, [PATHS["messages"]], [None])


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
def test_a_failure_to_reach_the_engine_is_the_requests_own(is_async: bool) -> None:
    """The plan waits for the next attempt, as after any failure."""

    class LateEngine(Engine):
        def answer(self, request: httpx.Request) -> httpx.Response:
            if not self.asked:
                self.asked.append("down")
                raise httpx.ConnectError("no engine", request=request)
            return super().answer(request)

    engine = LateEngine("vllm", "0.33.0")
    transport = httpx.MockTransport(engine.answer)
    with ContextPlanner() as planner, EngineLink(planner) as link:
        plan = planner.plan([ContextBlock("A passage.")], tenant="acme")
        call: dict[str, Any] = {
            "json": {"model": "m", "max_tokens": 1, "messages": messages_for(plan, "What?")},
            "headers": {"authorization": "Bearer key", **link.headers(plan)},
        }
        url = f"http://engine{PATHS['messages']}"

        async def send() -> None:
            async with link.async_http_client(httpx.AsyncClient, transport=transport) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.post(url, **call)
                assert (await client.post(url, **call)).status_code == 200

        if is_async:
            asyncio.run(send())
        else:
            with link.http_client(httpx.Client, transport=transport) as client:
                with pytest.raises(httpx.ConnectError):
                    client.post(url, **call)
                assert client.post(url, **call).status_code == 200
        stats = planner.stats()
    assert engine.asked == ["down", "/v1/models", "/version", PATHS["messages"]]
    assert engine.salts == [plan.cache_salt]
    assert (stats.commits, stats.open_plans) == (1, 0)


def test_another_engine_at_the_same_address_is_noticed() -> None:
    now = 0.0
    check = SaltCheck(clock=lambda: now)
    request = httpx.Request("POST", "http://engine/prefix/v1/messages")
    assert [str(question.url) for question in check.questions(request)] == [
        "http://engine/prefix/v1/models",
        "http://engine/prefix/version",
    ]
    assert check.decide(request, "messages", [b'{"data": [{"owned_by": "vllm"}]}', b'{"version": "0.33.0"}']) is None
    assert check.questions(request) == []
    assert check.decide(request, "messages") is None
    now = 61.0
    assert len(check.questions(request)) == 2
    assert check.decide(request, "messages", [b'{"data": [{"owned_by": "sglang"}]}', b""]) is not None


def test_a_busy_engine_is_still_the_same() -> None:
    """A server that loads its model, or has no time, must not let tenants share its cache for a minute."""
    now = 0.0
    check = SaltCheck(clock=lambda: now)
    request = httpx.Request("POST", "http://engine/v1/chat/completions")
    assert check.decide(request, "chat", [b'{"data": [{"owned_by": "llamacpp"}]}', b"{}"]) is not None
    now = 61.0
    assert len(check.questions(request)) == 2
    assert check.questions(request) == [], "a request beside this one asks too"
    assert check.decide(request, "chat", [b"", b""]) is not None
    now = 67.0
    assert len(check.questions(request)) == 2, "it is asked again soon"
    assert check.decide(request, "chat", [b'{"data": [{"owned_by": "vllm"}]}', b'{"version": "0.33.0"}']) is None
    assert check.decide(request, "messages", [b'{"data": [{"owned_by": "vllm"}]}', b""]) is None
    assert check.decide(request, "messages", [b"{}", b"{}"]) is not None, "another server without models is no vLLM"


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
def test_a_failed_question_is_no_failure_of_a_request_that_may_go_out(is_async: bool) -> None:
    class SilentEngine(Engine):
        def answer(self, request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                assert request.extensions["timeout"]["read"] <= 5
                self.asked.append(request.url.path)
                raise httpx.ReadTimeout("too slow", request=request)
            return super().answer(request)

    engine = SilentEngine(None)
    response, stats = asked(engine, "chat", is_async=is_async, times=2)
    assert (response.status_code, stats.commits) == (200, 2)
    assert engine.asked == ["/v1/models", PATHS["chat"], PATHS["chat"]]
    assert None not in engine.salts


def test_questions_go_where_the_request_goes_and_wait_no_longer_than_it() -> None:
    given = {"timeout": {"connect": 1.0, "read": 600.0, "write": None, "pool": 5.0}}
    request = httpx.Request("POST", "http://me:key@engine/a%2Fb/v1/chat/completions?x=/v1/y", extensions=given)
    models, version = SaltCheck().questions(request)
    assert str(models.url) == "http://me:key@engine/a%2Fb/v1/models"
    assert str(version.url) == "http://me:key@engine/a%2Fb/version"
    assert models.extensions["timeout"] == {"connect": 1.0, "read": 5.0, "write": 5.0, "pool": 5.0}


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"null", b'{"data": 5}'])
def test_any_answer_decides(content: bytes) -> None:
    request = httpx.Request("POST", "http://engine/v1/messages")
    assert SaltCheck().decide(request, "messages", [content, content]) is not None
    assert SaltCheck().decide(request, "chat", [content, content]) is None


def test_memory_is_bounded() -> None:
    check = SaltCheck()
    for number in range(1_000):
        check.decide(httpx.Request("POST", f"http://engine-{number}/v1/messages"), "messages", [b"", b""])
    assert len(check._engines) <= 64
