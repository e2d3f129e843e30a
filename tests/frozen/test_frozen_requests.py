"""What goes to an engine over HTTP, and the files for batch services, are the committed ones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

# All names of the library that are used here.
from warmprefix import BatchPlan, BatchRequest, ContextBlock, ContextPlan, ContextPlanner
from warmprefix_openai import PLAN_HEADER, BatchRunner, EngineLink, messages_for

Json = dict[str, Any]

SDK_HEADERS = ("x-stainless-", "user-agent", "host", "accept-encoding", "connection", "idempotency-key")
"""Beginnings of the names of headers that depend on the SDK, its version or the port."""

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 2,
    "total_tokens": 102,
    "prompt_tokens_details": {"cached_tokens": 64},
}


async def ask_batch(batch: BatchPlan, client: openai.AsyncOpenAI, **options: Any) -> list[Json]:
    """Run a batch; return the id and the error of each result."""
    async with aclosing(BatchRunner(batch).run(client, "m", concurrency=1, **options)) as results:
        return [{"request": result.request.id, "error": result.error} async for result in results]


def export_batch(batch: BatchPlan, path: Path, **options: Any) -> tuple[Path, ...]:
    return BatchRunner(batch).write_jsonl(path, "m", **options)


class Engine:
    """A server on loopback that records requests and gives each the same answer; it fails those that ask for it."""

    def __init__(self) -> None:
        self.requests: list[Json] = []
        self.failures = 0
        """Number of requests that it will answer with status 500."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                kept = {name: value for name, value in headers.items() if not name.startswith(SDK_HEADERS)}
                engine.requests.append({"path": self.path, "headers": kept, "body": body})
                failed = engine.failures > 0
                engine.failures -= failed
                kind, content = _answer(self.path, body)
                self.send_response(500 if failed else 200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _answer(path: str, body: Json) -> tuple[str, bytes]:
    frame = {"id": "c", "created": 1, "model": "m"}
    if path.endswith("/responses"):
        usage = {"input_tokens": 100, "output_tokens": 2, "total_tokens": 102}
        whole = {**frame, "object": "response", "output": [], "usage": usage}
        return "application/json", json.dumps(whole).encode()
    if not body.get("stream"):
        message = {"role": "assistant", "content": "It is."}
        choice = {"index": 0, "message": message, "text": "It is.", "logprobs": None, "finish_reason": "stop"}
        whole = {**frame, "object": "chat.completion", "choices": [choice], "usage": USAGE}
        return "application/json", json.dumps(whole).encode()
    chunks: list[Json] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "It is."}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": USAGE})
    events = [json.dumps({**frame, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "text/event-stream", "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


BLOCKS = [ContextBlock(f"Passage {n} is about subject {n}. " * 4, id=f"p{n}") for n in range(6)]
BLOCKS.append(ContextBlock("[p1] A text that begins with a label.\nÜmlaut and 日本.", id="odd [id]"))


@contextmanager
def connected(engine: Engine, planner: ContextPlanner, own_kind: bool, **options: Any) -> Iterator[Any]:
    with EngineLink(planner, **options) as link:
        http: Any = link.http_client(httpx.Client) if own_kind else link.http_client()
        with openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=1, http_client=http) as client:
            yield link, client


def converse(engine: Engine, planner: ContextPlanner, link: EngineLink, client: openai.OpenAI) -> list[Any]:
    """Ask in every way that the SDK has; return what the application receives."""
    create: Any = client.chat.completions.create
    received: list[Any] = []

    def ask(plan: ContextPlan, question: str, history: Any = (), **call: Any) -> Any:
        messages = messages_for(plan, question, history, preamble=call.pop("preamble", None))
        answer = create(model="m", messages=messages, extra_headers=link.headers(plan), **call)
        received.append([chunk.to_dict() for chunk in answer] if call.get("stream") else answer.to_dict())
        return messages

    # The context in front of the history, for a tenant.
    head: Json = {"conversation": "head", "tenant": "acme", "preamble": "Be brief."}
    history: list[Any] = []
    for turn in range(3):
        plan = planner.plan(BLOCKS[turn : turn + 4][::-1], **head)
        ask(plan, f"Question {turn}?", history, preamble="Be brief.")
        history += [{"role": "user", "content": f"Question {turn}?"}, {"role": "assistant", "content": "It is."}]

    # The context behind the history, recorded by the planner and then shown.
    history = []
    for turn in range(4):
        shown: Json = {"history": history} if turn > 1 else {}
        plan = planner.plan(BLOCKS[turn : turn + 4], conversation="tail", placement="tail", **shown)
        history = [*ask(plan, f"Question {turn}?", history), {"role": "assistant", "content": "It is."}]

    # Streams, whose usage the application sees only if it asked for it.
    ask(planner.plan(BLOCKS[:3], tenant="acme"), "Streamed?", stream=True)
    ask(planner.plan(BLOCKS[:3], tenant="acme"), "Usage?", stream=True, stream_options={"include_usage": True})
    ask(planner.plan(BLOCKS[:3]), "Usage?", stream=True, stream_options={"include_usage": False})
    ask(planner.plan(BLOCKS[:3], tenant="acme"), "Own salt?", extra_body={"cache_salt": "mine", "top_k": 3})

    # Requests within a block of `sending`: another one, the plan's own, and the same again.
    plan = planner.plan(BLOCKS[2:5], tenant="globex")
    with link.sending(plan):
        create(model="m", messages=[{"role": "user", "content": "Rephrase."}])
        create(model="m", messages=messages_for(plan, "Q?"))
        create(model="m", messages=messages_for(plan, "Q?"))
    with link.sending(planner.plan(BLOCKS[:2])):
        received.append(create(model="m", messages=[{"role": "user", "content": "Not the plan's."}]).to_dict())

    # A failure that the SDK tries again, a request without a plan, and one with an unknown plan.
    engine.failures = 1
    ask(planner.plan(BLOCKS[:3], tenant="acme"), "Again?")
    received.append(create(model="m", messages=[{"role": "user", "content": "No plan."}]).to_dict())
    unknown = {PLAN_HEADER: "unknown"}
    received.append(create(model="m", messages=[{"role": "user", "content": "?"}], extra_headers=unknown).to_dict())

    # The other routes.
    plan = planner.plan(BLOCKS[:3], tenant="acme")
    prompt = f"{plan.render()}\n\nQ?"
    client.completions.create(model="m", prompt=prompt, extra_headers=link.headers(plan))
    plan = planner.plan(BLOCKS[1:4], tenant="acme")
    prompt = f"{plan.render()}\n\nQ?"
    client.responses.create(model="m", input=prompt, extra_headers=link.headers(plan))
    return received


@pytest.mark.parametrize("own_kind", [False, True], ids=["default kind", "own kind"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("defaults", {}),
        ("vllm", {"token_ids": "vllm"}),
        ("sglang", {"token_ids": "sglang", "cache_salt": False}),
    ],
)
def test_a_conversation_sends_the_committed_requests(
    engine: Engine, name: str, options: Json, own_kind: bool, freeze: Callable[..., None]
) -> None:
    planner = ContextPlanner(salt_key=b"frozen")
    with connected(engine, planner, own_kind, **options) as (link, client):
        received = converse(engine, planner, link, client)
        stats = asdict(link.stats())
    assert all(PLAN_HEADER not in request["headers"] for request in engine.requests)
    conversation = {
        "requests": engine.requests,
        "received": [json.dumps(answer, sort_keys=True) for answer in received],
        "counters": stats,
    }
    freeze("requests.json", conversation, name)  # whichever of the two ways the application took


def batch(planner: ContextPlanner) -> BatchPlan:
    requests = [
        BatchRequest(f"g{group}m{member}", [f"Text of {group}. " * 9, f"Own {member} of {group}. ", BLOCKS[-1]], "Q?",
                     tenant=("acme", None)[group % 2])
        for member in range(3)
        for group in range(4)
    ]  # fmt: skip
    return planner.plan_batch(requests, "merge", preamble="Answer briefly.")


def test_a_batch_sends_the_committed_requests(engine: Engine, freeze: Callable[..., None]) -> None:
    planner = ContextPlanner(salt_key=b"frozen")

    async def ask() -> list[Json]:
        async with openai.AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
            return await ask_batch(batch(planner), client, max_tokens=4)

    results = asyncio.run(ask())
    requests = [{key: request[key] for key in ("path", "body")} for request in engine.requests]
    stats = planner.stats()
    counts = {"plans": stats.plans, "commits": stats.commits, "reported": stats.reported_cached_tokens}
    freeze("batch_requests.json", {"requests": requests, "results": results, "counters": counts}, "run")


@pytest.mark.parametrize(
    ("name", "options"),
    [("whole", {"max_tokens": 4}), ("parts", {"max_requests": 5}), ("bytes", {"max_bytes": 2500, "temperature": 0})],
)
def test_an_export_holds_the_committed_lines(
    tmp_path: Path, name: str, options: Json, freeze: Callable[..., None]
) -> None:
    paths = export_batch(batch(ContextPlanner(salt_key=b"frozen")), tmp_path / "night.jsonl", **options)
    files = {path.name: [json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in paths}
    if name != "whole":  # the lines are the same; what matters is where each file ends
        files = {path: [line["custom_id"] for line in lines] for path, lines in files.items()}
    freeze("batch_requests.json", files, name)
