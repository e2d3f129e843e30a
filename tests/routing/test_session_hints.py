"""The headers and bodies that external routers receive."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, get_args

import openai
import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix_openai import EngineLink
from warmprefix_routing import SessionHints
from warmprefix_routing.hints import Router, session_key

ROUTERS: tuple[Router, ...] = get_args(Router)
SESSION_HEADERS = {
    "production-stack": "x-user-id",
    "vllm-router": "x-session-id",
    "sglang": "x-smg-routing-key",
    "llm-d": "x-session-id",
    "dynamo": "x-dynamo-session-id",
    "aibrix": "x-aibrix-session-key",
    "ray": "x-session-id",
}
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "It is."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
}


class Seen(NamedTuple):
    headers: dict[str, str]
    body: dict[str, Any]


class RecordingRouter:
    """Records every request, and always gives the same answer."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                router.seen.append(Seen({name.lower(): value for name, value in self.headers.items()}, body))
                content = json.dumps(ANSWER).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> RecordingRouter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def recording() -> Iterator[RecordingRouter]:
    with RecordingRouter() as router:
        yield router


@pytest.fixture
def planner() -> ContextPlanner:
    return ContextPlanner(salt_key=b"secret")


def plan_of(planner: ContextPlanner, *texts: str, **options: Any) -> ContextPlan:
    plan = planner.plan([ContextBlock(text, id=text[:4]) for text in texts], **options)
    planner.abandon(plan)
    return plan


def chat(planner: ContextPlanner, conversation: str = "chat-42", tenant: str | None = "acme") -> ContextPlan:
    return plan_of(planner, "The sea is deep.", conversation=conversation, placement="tail", tenant=tenant)


def sent(recording: RecordingRouter, hints: SessionHints, plan: ContextPlan, **options: Any) -> Seen:
    """Return a request with these hints, as the SDK sends it."""
    given = hints.for_plan(plan, **options)
    with openai.OpenAI(base_url=recording.base_url, api_key="none", max_retries=0) as client:
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": plan.render()}],
            extra_headers=given.headers,
            extra_body=given.extra_body,
        )
    return recording.seen[-1]


@pytest.mark.parametrize("router", ROUTERS)
def test_a_conversation_is_a_session_and_its_tenant_a_salt(
    router: Router, recording: RecordingRouter, planner: ContextPlanner
) -> None:
    plan = chat(planner)
    seen = sent(recording, SessionHints(router), plan)
    session = seen.headers[SESSION_HEADERS[router]]
    assert session == session_key(plan)
    salt = seen.body["nvext"]["cache_salt"] if router == "dynamo" else seen.body["cache_salt"]
    assert salt == plan.cache_salt
    assert "priority" not in json.dumps(seen.body)
    raw = json.dumps(seen)
    assert "acme" not in raw
    assert "chat-42" not in raw
    next_turn = sent(recording, SessionHints(router), chat(planner))
    assert next_turn.headers[SESSION_HEADERS[router]] == session
    for other in (chat(planner, "chat-43"), chat(planner, tenant="umbrella"), chat(planner, tenant=None)):
        assert sent(recording, SessionHints(router), other).headers[SESSION_HEADERS[router]] != session


@pytest.mark.parametrize(
    ("router", "options", "priority", "body", "header"),
    [
        ("production-stack", {}, 5, {"priority": -5}, None),
        ("vllm-router", {}, 5, {"priority": -5}, None),
        ("llm-d", {}, 5, {"priority": -5}, None),
        ("llm-d", {"engine": "sglang"}, 5, {"priority": 5}, None),
        ("aibrix", {}, -2, {"priority": 2}, None),
        ("ray", {}, 1, {"priority": -1}, None),
        ("ray", {}, 0, {"priority": 0}, None),
        ("dynamo", {}, 5, {"nvext": {"agent_hints": {"priority": 5}}}, None),
        ("sglang", {}, 7, {"priority": 7}, "interactive"),
        ("sglang", {}, 0, {"priority": 0}, "default"),
        ("sglang", {"engine": "vllm"}, -1, {"priority": 1}, "bulk"),
    ],
)
def test_priority_is_translated_to_each_routers_scale(
    router: Router,
    options: dict[str, Any],
    priority: int,
    body: dict[str, Any],
    header: str | None,
    recording: RecordingRouter,
    planner: ContextPlanner,
) -> None:
    seen = sent(recording, SessionHints(router, **options), chat(planner, tenant=None), priority=priority)
    assert {name: value for name, value in seen.body.items() if name not in ("model", "messages")} == body
    assert seen.headers.get("x-smg-priority") == header


@pytest.mark.parametrize("router", ROUTERS)
def test_first_blocks_are_the_routing_key_where_the_router_takes_one(
    router: Router, recording: RecordingRouter, planner: ContextPlanner
) -> None:
    def key(plan: ContextPlan, **options: Any) -> str | None:
        return sent(recording, SessionHints(router, **options), plan).headers.get(SESSION_HEADERS[router])

    sea, sky, sand = "The sea is deep.", "The sky is blue.", "The sand is warm."
    plan = plan_of(planner, sea, sky, tenant="acme")
    if router not in ("vllm-router", "sglang", "aibrix"):
        assert key(plan) is None
        return
    assert key(plan) is not None
    assert key(plan) == key(plan_of(planner, sea, sand, tenant="acme"))
    assert key(plan, head_blocks=2) != key(plan_of(planner, sea, sand, tenant="acme"), head_blocks=2)
    assert key(plan) != key(plan_of(planner, sky, sea, tenant="acme"))
    assert key(plan) != key(plan_of(planner, sea, sky, tenant="umbrella"))
    assert key(plan) != key(plan_of(planner, sea, sky, tenant="acme", preamble="Answer."))
    assert key(plan, head_blocks=0) is None
    assert key(plan_of(planner, tenant="acme")) is None
    history = [{"role": "user", "content": "Hello."}]
    assert key(plan_of(planner, sea, placement="tail", history=history)) is None


def test_llm_d_distinguishes_tenants_without_their_salt(recording: RecordingRouter, planner: ContextPlanner) -> None:
    plan = chat(planner)
    fairness = [
        sent(recording, SessionHints("llm-d"), one).headers.get("x-llm-d-inference-fairness-id")
        for one in (plan, chat(planner, "chat-43"), chat(planner, tenant="umbrella"), chat(planner, tenant=None))
    ]
    assert fairness[0] == fairness[1] != fairness[2]
    assert fairness[0] not in (None, plan.cache_salt)
    assert fairness[3] is None


def test_no_hint_is_sent_without_a_reason(planner: ContextPlanner) -> None:
    for router in ROUTERS:
        hints = SessionHints(router, head_blocks=0).for_plan(plan_of(planner, "The sea is deep."))
        assert (hints.headers, hints.extra_body) == ({}, {})


def test_session_header_can_be_renamed(recording: RecordingRouter, planner: ContextPlanner) -> None:
    plan = chat(planner)
    seen = sent(recording, SessionHints("production-stack", session_header="x-my-session"), plan)
    assert seen.headers["x-my-session"] == session_key(plan)
    assert "x-user-id" not in seen.headers


def test_hints_and_a_link_agree(recording: RecordingRouter, planner: ContextPlanner) -> None:
    """The link's header has the same session, and its cache_salt does not conflict with Dynamo's."""
    plan = planner.plan(["The sea is deep."], conversation="chat-42", placement="tail", tenant="acme")
    added = SessionHints("dynamo").for_plan(plan, priority=1)
    with EngineLink(planner) as link:
        client = openai.OpenAI(
            base_url=recording.base_url, api_key="none", max_retries=0, http_client=link.http_client()
        )
        with client:
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": plan.render()}],
                extra_headers={**link.headers(plan), **added.headers},
                extra_body=added.extra_body,
            )
    seen = recording.seen[-1]
    assert seen.headers["x-dynamo-session-id"] == session_key(plan)
    assert seen.body["cache_salt"] == seen.body["nvext"]["cache_salt"] == plan.cache_salt
    assert planner.stats().commits == 1
