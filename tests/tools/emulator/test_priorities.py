"""Priorities as SGLang takes them: on chat completions, by eviction, and refused if the server is told to."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx
import openai
import pytest

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

MODEL = "warmprefix-emulator"
SMALL = EmulatorConfig(
    kv_blocks=60, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf, profile="priority-eviction"
)
"""Room for four of the prompts below."""


def cached(client: openai.OpenAI, name: str, priority: int | None = None) -> int:
    """Return the cached tokens of a prompt of some 200 tokens that begins like no other."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{name} {'warm ' * 190}"}],
        max_tokens=1,
        extra_body={} if priority is None else {"priority": priority},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize(("profile", "is_kept"), [("priority-eviction", True), ("full-attention", False)])
def test_prompt_with_a_priority_outlives_newer_ones_without(profile: str, is_kept: bool) -> None:
    with (
        EmulatorServer(replace(SMALL, profile=profile)) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
    ):
        assert cached(client, "kept", 5) < 100
        assert all(cached(client, f"other{number}") < 100 for number in range(8))
        assert (cached(client, "kept", 5) > 100) is is_kept


def test_refused_priorities_are_refused_as_sglang_does() -> None:
    message = "Using priority is disabled for this server. Please send a new request without a priority."
    with EmulatorServer(replace(SMALL, refuses_priorities=True)) as server, httpx.Client() as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        url = f"{server.base_url}/chat/completions"
        assert http.post(url, json={**body, "priority": None}).status_code == 200
        for priority in (0, 7):
            answer = http.post(url, json={**body, "priority": priority})
            assert answer.status_code == 503
            assert answer.json() == {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
        streamed = http.post(url, json={**body, "priority": 7, "stream": True})
        assert streamed.status_code == 200
        first, done = streamed.text.strip().split("\n\n")
        assert message in first
        assert done == "data: [DONE]"


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 1.5, "first"])
def test_priorities_are_integers_of_64_bits(priority: object) -> None:
    with EmulatorServer(SMALL) as server, httpx.Client() as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        answer = http.post(f"{server.base_url}/chat/completions", json={**body, "priority": priority})
        assert answer.status_code == 400
        assert "priority" in answer.text
