"""Marks in requests of the real SDKs, sent over HTTP through an `EngineLink`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import EngineLink, messages_for
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

anthropic = pytest.importorskip("anthropic")

base = next(base for base in anthropic.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
HTTP: Any = sys.modules[base.__module__.partition(".")[0]]
"""The SDK's HTTP package: httpx or httpx2."""

INSTANT = EmulatorConfig(kv_blocks=4_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
PREAMBLE = "Answer the question from the passages. " * 40
BLOCKS = [ContextBlock(f"passage {number} " * 150, id=str(number)) for number in range(6)]
COUNT = 12


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[EmulatorServer]:
    with EmulatorServer(replace(INSTANT, profile=request.param)) as server:
        yield server


def ask_anthropic(server: EmulatorServer, link: EngineLink, planner: ContextPlanner, *, stream: bool) -> list[Any]:
    http = link.http_client(HTTP.Client)
    base_url = server.base_url.removesuffix("/v1")
    usages = []
    with anthropic.Anthropic(base_url=base_url, api_key="key", http_client=http) as client:
        for number in range(COUNT):
            plan = planner.plan(BLOCKS[:4] if number % 2 else BLOCKS, preamble=PREAMBLE)
            system = [{"type": "text", "text": PREAMBLE}]
            messages = messages_for(plan, f"question {number}", parts=True)
            call = {"model": INSTANT.model, "max_tokens": 5, "system": system, "messages": messages}
            with link.sending(plan):
                if stream:
                    with client.messages.stream(**call) as answer:
                        usages.append(answer.get_final_message().usage)
                else:
                    usages.append(client.messages.create(**call).usage)
    return usages


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", ["anthropic"], indirect=True)
def test_anthropic_reads_what_was_marked(server: EmulatorServer, stream: bool) -> None:
    planner = ContextPlanner(profile="anthropic")
    with EngineLink(planner) as link:
        usages = ask_anthropic(server, link, planner, stream=stream)
        stats, marks = link.stats(), link.mark_stats()
    assert (stats.commits, stats.errors, marks.errors, marks.refused) == (COUNT, 0, 0, 0)
    assert marks.read_tokens == sum(usage.cache_read_input_tokens for usage in usages)
    assert marks.written_tokens == sum(usage.cache_creation_input_tokens for usage in usages)
    assert marks.uncached_tokens == sum(usage.input_tokens for usage in usages)
    assert marks.read_tokens > marks.written_tokens > 0
    counted = planner.stats()
    assert counted.reports == COUNT
    assert (counted.reported_written_tokens, counted.reported_uncached_tokens) == (
        marks.written_tokens,
        marks.uncached_tokens,
    )


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("route", ["chat", "responses"])
@pytest.mark.parametrize("server", ["openai"], indirect=True)
def test_openai_writes_only_what_is_read(server: EmulatorServer, route: str, parts: bool) -> None:
    """The link makes the parts itself where the application sends one text."""
    planner = ContextPlanner(profile="openai")
    with (
        EngineLink(planner) as link,
        openai.OpenAI(base_url=server.base_url, api_key="key", http_client=link.http_client()) as client,
    ):
        for number in range(COUNT):
            plan = planner.plan(BLOCKS, tenant="one", preamble=PREAMBLE)
            with link.sending(plan):
                if route == "chat":
                    messages = messages_for(plan, f"question {number}", preamble=PREAMBLE, parts=parts)
                    client.chat.completions.create(model=INSTANT.model, messages=messages, max_tokens=5)
                else:
                    texts = [*plan.parts(), f"{number}?"]
                    split = [{"role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}]
                    items: Any = split if parts else "".join(texts)
                    client.responses.create(model=INSTANT.model, instructions=PREAMBLE, input=items)
        marks = link.mark_stats()
    assert (marks.requests, marks.errors, marks.refused) == (COUNT, 0, 0)
    assert marks.read_tokens > marks.written_tokens > 0
    assert marks.uncached_tokens > 0


@pytest.mark.parametrize("server", ["openai-before-5.6"], indirect=True)
def test_an_api_that_refuses_marks_gets_the_request_without(server: EmulatorServer) -> None:
    planner = ContextPlanner(profile="openai")
    with (
        EngineLink(planner) as link,
        openai.OpenAI(base_url=server.base_url, api_key="key", http_client=link.http_client()) as client,
    ):
        for number in range(3):
            plan = planner.plan(BLOCKS, preamble=PREAMBLE)
            messages = messages_for(plan, f"question {number}", preamble=PREAMBLE, parts=True)
            with link.sending(plan):
                client.chat.completions.create(model=INSTANT.model, messages=messages, max_tokens=5)
        stats, marks = link.stats(), link.mark_stats()
    assert (stats.requests, stats.commits, marks.requests, marks.refused) == (3, 3, 2, 2)


@pytest.mark.parametrize("server", ["openai"], indirect=True)
def test_another_mistake_is_the_applications_own(server: EmulatorServer) -> None:
    planner = ContextPlanner(profile="openai")
    with (
        EngineLink(planner) as link,
        openai.OpenAI(base_url=server.base_url, api_key="key", http_client=link.http_client()) as client,
    ):
        plan = planner.plan(BLOCKS, preamble=PREAMBLE)
        messages = messages_for(plan, "question", preamble=PREAMBLE, parts=True)
        with link.sending(plan), pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=INSTANT.model, messages=messages, max_tokens=-1)
        assert link.mark_stats().refused == 0


@pytest.mark.parametrize("server", ["full-attention", "anthropic"], indirect=True)
def test_messages_get_the_salt_where_the_profile_has_one(server: EmulatorServer) -> None:
    """vLLM takes the field on this route, and Anthropic's own API refuses it."""
    planner = ContextPlanner(salt_key=b"key", profile=server.config.profile)
    bodies: list[bytes] = []

    class Recorder(HTTP.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            bodies.append(request.read())
            return super().handle_request(request)

    read = []
    with EngineLink(planner) as link:
        http = link.http_client(HTTP.Client, transport=Recorder())
        with anthropic.Anthropic(
            base_url=server.base_url.removesuffix("/v1"), api_key="key", http_client=http
        ) as client:
            for tenant in ("acme", "acme", "initech"):
                plan = planner.plan(BLOCKS, tenant=tenant)
                with link.sending(plan):
                    answer = client.messages.create(
                        model=INSTANT.model, max_tokens=5, messages=messages_for(plan, "why", parts=True)
                    )
                read.append(answer.usage.cache_read_input_tokens)
        assert link.stats().commits == 3
    if server.config.profile == "full-attention":
        assert read[0] == read[2] == 0 < read[1]
    else:
        assert not any(b"cache_salt" in body for body in bodies)
