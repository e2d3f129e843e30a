"""Primes in front of single requests, over a real connection."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from openai import AsyncOpenAI, OpenAI

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix_openai import EngineLink, PrimeStats, messages_for
from warmprefix_openai.primer import Primer
from warmprefix_requests import OutgoingRequest

REST = " It is long." * 50
BLOCKS = [ContextBlock(f"The text of {name}.{REST}", id=name, tokens=200) for name in "ABCDEFGH"]
COMPLETION = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "model",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
}


class PrimedEngine(ThreadingHTTPServer):
    """An engine that records its requests, and answers primes with two statuses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PrimedEngineHandler)
        self.prime_status = self.exact_status = 200
        self.bodies: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class PrimedEngineHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast("PrimedEngine", self.server)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server.bodies.append(body)
        status = server.prime_status if body.get("max_tokens") == 1 else 200
        if "continue_final_message" in body:
            status = max(status, server.exact_status)
        answer = json.dumps(COMPLETION).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name there


@pytest.fixture
def engine() -> Iterator[PrimedEngine]:
    server = PrimedEngine()
    yield server
    server.shutdown()
    server.server_close()


def ask(link: EngineLink, planner: ContextPlanner, engine: PrimedEngine, blocks: list[ContextBlock]) -> None:
    plan = planner.plan(blocks, tenant="acme", order_locked=True)
    with OpenAI(base_url=engine.base_url, api_key="none", http_client=link.http_client(), max_retries=0) as client:
        client.chat.completions.create(
            model="model",
            messages=messages_for(plan, "Why?", preamble="Be brief."),
            extra_headers=link.headers(plan),
            max_completion_tokens=50,
            temperature=0.5,
        )


def checkpoint_planner() -> ContextPlanner:
    return ContextPlanner(profile="vllm-checkpoints(528,16)")


def test_a_prime_goes_out_before_the_first_request_with_its_blocks(engine: PrimedEngine) -> None:
    planner = checkpoint_planner()
    link = EngineLink(planner, primes=1)
    for last in (3, 4):
        ask(link, planner, engine, [*BLOCKS[:3], BLOCKS[last]])
    prime, first, second = engine.bodies
    assert prime["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"The text of A.{REST}\n\nThe text of B.{REST}\n\nThe text of C.{REST}\n\nT"},
    ]
    assert prime["max_tokens"] == 1
    assert prime["continue_final_message"] is True
    assert prime["add_generation_prompt"] is False
    assert prime["cache_salt"] == first["cache_salt"] == second["cache_salt"]
    assert prime["temperature"] == 0.5
    assert "max_completion_tokens" not in prime
    assert link.prime_stats() == PrimeStats(sent=1)
    assert link.stats().commits == 2


def test_two_primes_end_behind_the_second_and_the_fourth_block(engine: PrimedEngine) -> None:
    planner = checkpoint_planner()
    link = EngineLink(planner, primes=2)
    ask(link, planner, engine, BLOCKS[:6])
    texts = [body["messages"][-1]["content"] for body in engine.bodies[:2]]
    assert [text.count("The text") for text in texts] == [2, 4]
    assert link.prime_stats().sent == 2


@pytest.mark.parametrize(("profile", "primes"), [("full-attention", 1), ("vllm-checkpoints(528,16)", 0)])
def test_no_prime_unless_asked_for_and_of_use(engine: PrimedEngine, profile: str, primes: int) -> None:
    planner = ContextPlanner(profile=profile)
    link = EngineLink(planner, primes=primes)
    ask(link, planner, engine, BLOCKS[:5])
    assert len(engine.bodies) == 1
    assert link.prime_stats() == PrimeStats()


def test_tasks_send_primes_too(engine: PrimedEngine) -> None:
    planner = checkpoint_planner()
    link = EngineLink(planner, primes=1)
    plan = planner.plan(BLOCKS[:5])

    async def run() -> None:
        client = AsyncOpenAI(
            base_url=engine.base_url, api_key="none", http_client=link.async_http_client(), max_retries=0
        )
        async with client, link.sending(plan):
            await client.chat.completions.create(model="model", messages=messages_for(plan, "Why?"))

    asyncio.run(run())
    assert len(engine.bodies) == 2
    assert link.prime_stats() == PrimeStats(sent=1)


def test_refused_fields_are_left_out_from_then_on(engine: PrimedEngine) -> None:
    planner = checkpoint_planner()
    link = EngineLink(planner, primes=1)
    engine.exact_status = 400
    for first in range(4):
        ask(link, planner, engine, BLOCKS[first : first + 4])
    assert link.prime_stats() == PrimeStats(sent=4, inexact=4)
    assert sum("continue_final_message" in body for body in engine.bodies) == 2
    assert link.stats().commits == 4


def test_failed_primes_cost_a_count_and_then_stop(engine: PrimedEngine) -> None:
    planner = checkpoint_planner()
    link = EngineLink(planner, primes=1)
    engine.prime_status = 503
    for first in range(5):
        ask(link, planner, engine, [*BLOCKS[first:], *BLOCKS[:first]])
    assert link.prime_stats() == PrimeStats(failed=3, skipped=2)
    assert link.stats().commits == 5


def bodies(primer: Primer, planner: ContextPlanner, blocks: list[ContextBlock]) -> int:
    """Return the number of primes for a request."""
    plan = planner.plan(blocks, order_locked=True)
    body = {"messages": messages_for(plan, "Why?")}
    request = OutgoingRequest("chat", json.dumps(body).encode(), body)
    return len(list(primer.requests(plan, request)))


def orders(count: int) -> Iterator[list[ContextBlock]]:
    for number in range(count):
        yield [ContextBlock(f"{number} {place}{REST}", tokens=200) for place in range(4)]


def test_primes_stay_within_their_budget() -> None:
    planner = checkpoint_planner()
    primer = Primer(planner, 1)
    twice = [blocks for blocks in orders(20) for _ in range(2)]  # so that each prime may pay
    assert sum(bodies(primer, planner, blocks) for blocks in twice) == 20
    primer = Primer(planner, 1)
    sent = sum(bodies(primer, planner, blocks) for blocks in orders(24))
    assert sent == 8 + 12
    assert primer.stats().skipped == 24 - sent


def test_a_busy_engine_gets_no_primes() -> None:
    planner = checkpoint_planner()
    primer, plan = Primer(planner, 1), planner.plan(BLOCKS[:1])
    for _ in range(100):
        primer.learn(plan, EngineReport(0, 1_000, 0.5))
    waiting = orders(2)
    assert bodies(primer, planner, next(waiting)) == 1
    for _ in range(8):
        primer.learn(plan, EngineReport(0, 1_000, 5.0))
    assert bodies(primer, planner, next(waiting)) == 0


def test_a_prime_that_saves_less_than_a_round_trip_is_not_sent() -> None:
    planner = checkpoint_planner()
    primer, plan = Primer(planner, 1), planner.plan(BLOCKS[:1])
    primer.learn(plan, EngineReport(900, 1_000, 0.5))
    primer.learn(plan, EngineReport(0, 10_000, 0.51))  # 0.5 s for the round trip, and 1 us per token
    assert bodies(primer, planner, next(orders(1))) == 0


def test_long_prefills_alone_do_not_look_like_round_trips() -> None:
    planner = checkpoint_planner()
    primer, plan = Primer(planner, 1), planner.plan(BLOCKS[:1])
    primer.learn(plan, EngineReport(0, 1_000, 0.5))
    primer.learn(plan, EngineReport(0, 2_000, 0.98))
    assert bodies(primer, planner, next(orders(1))) == 1


@pytest.mark.parametrize("primes", [-1, 3, True, "1", None])
def test_bad_numbers_of_primes_are_refused(primes: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="primes must be"):
        EngineLink(ContextPlanner(), primes=primes)
