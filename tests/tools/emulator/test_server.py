"""Concurrency, clients that leave, metrics, and a server that cleans up after itself."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

MODEL = "warmprefix-emulator"
NEVER_ENDS = EmulatorConfig(kv_blocks=200, base_ttft_ms=0, prefill_rate=math.inf, decode_rate=1e-4)
NEVER_BEGINS = EmulatorConfig(kv_blocks=200, prefill_rate=1e-4)

Scrape = Callable[[EmulatorServer], dict[str, float]]


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; fail only if it never is."""
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


async def test_concurrent_streams_get_their_own_answers_and_the_metrics_add_up(
    server: EmulatorServer, scrape: Scrape
) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:

        async def ask(number: int) -> tuple[str, openai.types.CompletionUsage]:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[
                    {"role": "system", "content": "shared words " * 30},
                    {"role": "user", "content": f"question {number % 20}"},
                ],
                max_tokens=10 + number,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, usage = "", None
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            assert usage is not None
            return text, usage

        answers = await asyncio.gather(*map(ask, range(40)))

    for number in range(20):
        assert answers[number + 20][0].startswith(answers[number][0])
    totals = scrape(server)
    prompt_tokens = sum(usage.prompt_tokens for _, usage in answers)
    details = [usage.prompt_tokens_details for _, usage in answers]
    cached_tokens = sum(detail.cached_tokens or 0 for detail in details if detail)
    assert totals["vllm:prompt_tokens_total"] == totals["vllm:prefix_cache_queries_total"] == prompt_tokens
    assert totals["vllm:prompt_tokens_cached_total"] == totals["vllm:prefix_cache_hits_total"] == cached_tokens
    assert totals["vllm:generation_tokens_total"] == sum(usage.completion_tokens for _, usage in answers)
    assert totals["vllm:request_success_total"] == totals["vllm:time_to_first_token_seconds_count"] == 40
    assert totals["vllm:num_requests_running"] == totals["vllm:num_requests_waiting"] == 0
    assert totals["vllm:kv_cache_usage_perc"] == 0
    assert cached_tokens > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_an_answer_frees_its_blocks(stream: bool, scrape: Scrape, http: httpx.Client) -> None:
    with EmulatorServer(NEVER_ENDS) as server:
        async with httpx.AsyncClient(timeout=None) as client:
            body = {"messages": [{"role": "user", "content": "warm " * 100}], "stream": stream}
            asking = asyncio.ensure_future(client.post(f"{server.base_url}/chat/completions", json=body))
            await asyncio.to_thread(eventually, lambda: scrape(server)["vllm:num_requests_running"] == 1)
            assert scrape(server)["vllm:kv_cache_usage_perc"] > 0
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(eventually, lambda: scrape(server)["vllm:num_requests_running"] == 0)
        totals = scrape(server)
        assert totals["vllm:kv_cache_usage_perc"] == 0
        assert totals["vllm:request_success_total"] == 1
        assert 'finished_reason="abort"' in http.get(f"{server.url}/metrics").text


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_is_removed_from_the_queue(stream: bool, scrape: Scrape, http: httpx.Client) -> None:
    with EmulatorServer(NEVER_BEGINS) as server:
        async with httpx.AsyncClient(timeout=None) as client:
            body = {"messages": [{"role": "user", "content": "Hi."}], "stream": stream}
            asking = [
                asyncio.ensure_future(client.post(f"{server.base_url}/chat/completions", json=body)) for _ in range(3)
            ]
            await asyncio.to_thread(eventually, lambda: scrape(server)["vllm:num_requests_waiting"] == 2)
            assert http.post(f"{server.url}/reset_prefix_cache").status_code == 409
            for request in asking:
                request.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.to_thread(
            eventually,
            lambda: scrape(server)["vllm:num_requests_waiting"] + scrape(server)["vllm:num_requests_running"] == 0,
        )
        assert http.post(f"{server.url}/reset_prefix_cache").status_code == 200


def test_reset_prefix_cache_makes_the_next_request_cold(
    client: openai.OpenAI, server: EmulatorServer, http: httpx.Client
) -> None:
    def cached_tokens() -> int | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "warm " * 100}], max_tokens=1
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached_tokens(), cached_tokens()] == [0, 96]
    assert http.post(f"{server.url}/reset_prefix_cache").status_code == 200
    assert cached_tokens() == 0


def test_server_leaves_neither_thread_nor_port_behind(http: httpx.Client) -> None:
    before = set(threading.enumerate())
    with EmulatorServer() as server:
        assert http.get(f"{server.url}/health").status_code == 200
        assert http.head(server.url).status_code == 200  # Claude Code asks first
        port = int(server.url.rpartition(":")[2])
    assert set(threading.enumerate()) == before
    with socket.create_server(("127.0.0.1", port)):
        pass
    server.close()


def test_unused_server_can_be_closed_and_occupied_port_is_an_error() -> None:
    server = EmulatorServer()
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        EmulatorServer(port=port)
    server.close()
    EmulatorServer(port=port).close()


def test_closing_with_a_request_in_progress_ends_it_with_an_error(scrape: Scrape, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    with ThreadPoolExecutor(1) as pool:
        with EmulatorServer(NEVER_BEGINS) as server:
            asking = pool.submit(http.post, f"{server.base_url}/chat/completions", json=body)
            eventually(lambda: scrape(server)["vllm:num_requests_running"] == 1)
        response = asking.result()
    assert response.status_code == 503
    assert response.headers["x-warmprefix-emulator"] == "1"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kv_blocks": 1}, "kv_blocks must be 2 or more .*, got 1"),
        ({"block_size": 0}, "block_size must be 1 or more, got 0"),
        ({"prefill_rate": 0}, "prefill_rate must be above 0, got 0"),
        ({"base_ttft_ms": -1}, "base_ttft_ms must be 0 or more, and finite, got -1"),
        ({"base_ttft_ms": math.inf}, "base_ttft_ms must be 0 or more, and finite, got inf"),
        ({"decode_rate": math.nan}, "decode_rate must be above 0, got nan"),
        ({"model": ""}, "model must be a name that is not empty, got ''"),
        ({"kv_blocks": 11, "max_model_len": 161}, "max_model_len must be from 2 to 160, .*, got 161"),
    ],
)
def test_bad_config_is_refused_with_name_value_and_rule(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EmulatorConfig(**wrong)
