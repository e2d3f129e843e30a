"""Names of applications: their own header, user agents, and the beginnings of public system prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, answer, chat_answer, send
from tests.integrations.gateway.test_sessions_and_tenants import CHAT, Make, body, user

from warmprefix_gateway.applications import application_of

Body = dict[str, Any]
OPENCLAW = "<!-- openclaw:attempt:STABLE -->\nYou are a personal assistant running inside OpenClaw.\n## Tooling"
HERMES = "You are Hermes Agent, an intelligent AI assistant created by Nous Research."
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.709;"}


def system(content: object, role: str = "system") -> Body:
    return {"messages": [{"role": role, "content": content}, user("How deep?")]}


@pytest.mark.parametrize(
    ("headers", "request_body", "name"),
    [
        ({"user-agent": "OpenAI/JS 6.37.0"}, system(OPENCLAW), "OpenClaw"),
        ({"user-agent": "OpenAI/Python 2.24.0"}, system([{"type": "text", "text": HERMES}]), "Hermes"),
        ({"user-agent": "Agents/Python 0.20.0"}, {"instructions": "You are PageIndex by Vectify AI."}, "PageIndex"),
        ({"user-agent": "OpenAI/Python 2.24.0"}, system("# ROLE\n\nYou are a Memory Extractor — a precise"), "Mem0"),
        ({"user-agent": "claude-cli/2.1.197 (external, sdk-cli)"}, {"system": [BILLING]}, "Claude Code"),
        ({"user-agent": "codex_exec/0.169.0 (Debian 12)"}, {"input": "Hi."}, "Codex"),
        ({"user-agent": "Python/3.11 aiohttp/3.12", "X-OpenWebUI-Chat-Id": "7"}, system("Be brief."), "Open WebUI"),
        ({"user-agent": "OpenAI/Python 2.24.0", "x-warmprefix-application": "Hermes"}, {}, "Hermes"),
        ({"user-agent": "OpenAI/Python 2.24.0"}, {"messages": [user(OPENCLAW)]}, "OpenAI"),
        ({"user-agent": "OpenAI/Python 2.24.0", "x-warmprefix-application": "a\u0007b"}, {}, "OpenAI"),
        ({}, {"messages": [7], "system": [None, {"text": 3}]}, ""),
        ({"x-warmprefix-application": "y" * 99}, {}, "y" * 40),
    ],
)
def test_an_application_is_named_by_what_it_is(headers: dict[str, str], request_body: Body, name: str) -> None:
    assert application_of(headers, request_body) == name


def test_a_header_that_names_the_application_goes_no_further(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = answer(chat_answer(cached=64))
    gateway = gateway_of(upstream.base_url)
    send(gateway, "POST", CHAT, body(user("Hi.")), x_warmprefix_application="Sea Reader")
    assert upstream.requests[-1].header("x-warmprefix-application") is None
    assert "Sea Reader" in send(gateway, "GET", "/").body.decode()
    assert "Sea Reader" not in send(gateway, "GET", "/metrics").body.decode()


def test_results_of_codex_become_references(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    """It sends its whole history, which is not to be stored."""
    upstream.handler = answer(b'{"output": [], "usage": {"input_tokens": 9}}')
    sea = "The sea is 3,688 metres deep.\n" * 30
    items: list[Body] = []
    for number in range(2):
        arguments = '{"cmd":"cat sea.txt"}'
        output = f"Chunk ID: 7555a{number}\nWall time: 0.{number}000 seconds\nOutput:\n{sea}"
        items.append({"type": "function_call", "call_id": f"{number}", "name": "exec", "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": f"{number}", "output": output})
    content = json.dumps({"model": "m", "input": items, "store": False}).encode()
    send(gateway_of(upstream.base_url), "POST", "/v1/responses", content)
    first, second = (item["output"] for item in json.loads(upstream.requests[-1].body)["input"][1::2])
    assert first == items[1]["output"]
    assert second.startswith("Chunk ID: 7555a1\n")
    assert "[Word for word the bare output of the earlier call exec(" in second
