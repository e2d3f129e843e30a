"""Primes that a run sends in front of its requests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from openai import AsyncOpenAI

from warmprefix import BatchPlan, BatchRequest, ContextBlock, ContextPlanner
from warmprefix_openai import BatchResult, BatchRunner, PrimeStats, cut_chat

BLOCKS = [ContextBlock(f"The text of {name}.", id=name, tokens=200) for name in "ABCDE"]


class Endpoint(ThreadingHTTPServer):
    """An endpoint that records its requests, and refuses those with one of `refused` fields, or all primes."""

    daemon_threads = True

    def __init__(self, *refused: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused = refused
        self.fails_primes = False
        self.failing: tuple[str, ...] = ()
        """Texts of requests that are refused."""
        self.bodies: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def primes(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if body.get("max_tokens") == 1]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast("Endpoint", self.server)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.bodies.append(body)
        is_prime = body.get("max_tokens") == 1
        if any(name in body for name in server.refused):
            self._answer(400, b'{"error": {"message": "unknown field"}}')
        elif not is_prime and any(text in body["messages"][-1]["content"] for text in server.failing):
            self._answer(400, b"{}")
        elif is_prime and server.fails_primes:
            self._answer(500, b"{}")
        else:
            delta = {"id": "1", "choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]}
            self._answer(200, f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name there


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def batch() -> BatchPlan:
    requests = [BatchRequest(i, [BLOCKS[0], BLOCKS[i]], f"Question {i}?") for i in range(1, 5)]
    return ContextPlanner(profile="vllm-checkpoints(128,16)").plan_batch(requests, preamble="Answer briefly.")


def run(runner: BatchRunner, base_url: str, **options: Any) -> list[BatchResult]:
    async def ask() -> list[BatchResult]:
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            return [result async for result in runner.run(client, "model", retries=0, **options)]

    return asyncio.run(ask())


def test_a_prime_is_sent_before_its_request(endpoint: Endpoint, batch: BatchPlan) -> None:
    runner = BatchRunner(batch)
    results = run(runner, endpoint.base_url, concurrency=4, temperature=0.5, n=1, stop=["x"])
    assert [result.id for result in results] == [str(i) for i in range(1, 5)]
    assert runner.prime_stats() == PrimeStats(sent=1)
    first = endpoint.bodies[0]
    assert first["max_tokens"] == 1
    assert first["continue_final_message"] is True
    assert first["add_generation_prompt"] is False
    assert first["temperature"] == 0.5
    assert "stop" not in first
    assert first["messages"] == cut_chat(batch.primes[0].before.messages(), batch.primes[0].shared_text)
    assert len(endpoint.bodies) == 5


def test_refused_fields_are_left_out_from_then_on(endpoint: Endpoint) -> None:
    requests = [BatchRequest(i, [BLOCKS[i % 2], BLOCKS[2 + i % 3]], f"Question {i}?") for i in range(6)]
    batch = ContextPlanner(profile="vllm-checkpoints(128)").plan_batch(requests)
    assert len(batch.primes) >= 2
    endpoint.refused = ("continue_final_message",)
    runner = BatchRunner(batch)
    results = run(runner, endpoint.base_url, concurrency=1)
    assert all(result.error is None for result in results)
    count = len(batch.primes)
    assert runner.prime_stats() == PrimeStats(sent=count, inexact=count)
    assert sum("continue_final_message" in body for body in endpoint.bodies) == 2


def test_a_failed_prime_costs_only_a_count(endpoint: Endpoint, batch: BatchPlan) -> None:
    endpoint.fails_primes = True
    runner = BatchRunner(batch)
    results = run(runner, endpoint.base_url)
    assert all(result.error is None for result in results)
    assert runner.prime_stats() == PrimeStats(failed=1)


def test_a_chat_of_content_parts_gets_no_prime(endpoint: Endpoint, batch: BatchPlan) -> None:
    def parts(planned: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": planned.render()}]}]

    runner = BatchRunner(batch)
    run(runner, endpoint.base_url, messages=parts)
    assert runner.prime_stats() == PrimeStats(skipped=1)
    assert endpoint.primes == []


def test_a_journal_of_some_answers_primes_the_rest(endpoint: Endpoint, batch: BatchPlan, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    endpoint.failing = ("Question 3", "Question 4")
    run(BatchRunner(batch), endpoint.base_url, journal=path)
    endpoint.failing = ()
    endpoint.bodies.clear()
    runner = BatchRunner(batch)
    results = run(runner, endpoint.base_url, journal=path)
    assert len(results) == 4
    assert len(endpoint.primes) == runner.prime_stats().sent == 1
    assert len(endpoint.bodies) == 3


def test_no_server_ends_the_run_as_without_primes(batch: BatchPlan) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        runner = BatchRunner(batch)
        with pytest.raises(Exception, match="can't begin"):
            run(runner, f"http://127.0.0.1:{held.getsockname()[1]}/v1")
    assert runner.prime_stats().failed >= 1
