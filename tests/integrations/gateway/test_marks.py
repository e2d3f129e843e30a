"""Cache marks that the gateway sets, with the real SDKs and an emulated API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from tests.integrations.gateway.conftest import INSTANT, metric

from warmprefix_gateway import GatewayServer
from warmprefix_tools.emulator import EmulatorServer

anthropic = pytest.importorskip("anthropic")

SYSTEM = "Answer the question from the passages. " * 400
COUNT = 12


def test_anthropic_reads_what_the_gateway_marked(gateway_of: Callable[..., GatewayServer]) -> None:
    usages: list[Any] = []
    with EmulatorServer(replace(INSTANT, profile="anthropic")) as engine:
        gateway = gateway_of(engine.base_url, profile="anthropic")
        with anthropic.Anthropic(base_url=gateway.url, api_key="key") as client:
            for number in range(COUNT):
                asked: Any = {"model": INSTANT.model, "max_tokens": 5, "system": SYSTEM}
                messages = [{"role": "user", "content": f"question {number}"}]
                usages.append(client.messages.create(**asked, messages=messages).usage)
        assert sum(usage.cache_read_input_tokens for usage in usages) > 0.5 * metric(gateway, "prompt_tokens_total")
        assert metric(gateway, "marked_requests_total") == COUNT
        assert metric(gateway, "failures_total") == 0


def test_an_api_that_refuses_marks_gets_none(gateway_of: Callable[..., GatewayServer]) -> None:
    with EmulatorServer(replace(INSTANT, profile="openai-before-5.6")) as engine:
        gateway = gateway_of(engine.base_url, profile="openai")
        with openai.OpenAI(base_url=gateway.base_url, api_key="key") as client:
            for number in range(3):
                messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{number}?"}]
                client.chat.completions.create(model=INSTANT.model, messages=messages, max_tokens=5)
        assert metric(gateway, "retries_total", reason="field") == 2  # and the third goes out without marks
        assert metric(gateway, "failures_total") == 0
