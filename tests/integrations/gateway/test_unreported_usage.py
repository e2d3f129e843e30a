"""An upstream that does not report cached tokens has not reported 0: nothing counts as lost, and the page shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, answer, metric, send

from warmprefix_gateway import GatewayServer
from warmprefix_gateway.sessions import TokenFates

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def body(*messages: dict[str, str], model: str = "m") -> bytes:
    return json.dumps({"model": model, "messages": messages}).encode()


def chat_answer(usage: dict[str, Any] | None) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], **({} if usage is None else {"usage": usage})}).encode()


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
def test_unreported_tokens_are_neither_cached_nor_lost(
    upstream: ScriptedUpstream, gateway_of: Make, details: dict[str, Any]
) -> None:
    upstream.handler = answer(chat_answer({"prompt_tokens": 2_000, "completion_tokens": 5, **details}))
    gateway = gateway_of(upstream.base_url)
    history = [user("A long document. " * 400)]
    for question in "abc":
        history.append(user(question))
        send(gateway, "POST", CHAT, body(*history))
        history.append({"role": "assistant", "content": "ok"})
    assert metric(gateway, "prompt_tokens_total") == metric(gateway, "unreported_tokens_total") == 6_000
    assert metric(gateway, "unreported_answers_total") == 3
    assert [metric(gateway, "uncached_tokens_total", cause=cause) for cause in TokenFates._fields] == [0] * 5
    page = send(gateway, "GET", "/").body.decode()
    assert "3 of 3 answers reported no cached tokens" in page
    assert "--enable-prompt-tokens-details" in page
    assert "<b>–</b><span>of the prompt tokens were cached" in page


def test_the_hit_ratio_is_that_of_reported_tokens(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    reported = {"prompt_tokens": 1_000, "prompt_tokens_details": {"cached_tokens": 750}}
    for model, usage in (("m", reported), ("n", {"prompt_tokens": 1_000}), ("m", None)):
        upstream.handler = answer(chat_answer(usage))
        send(gateway, "POST", CHAT, body(user("a"), model=model), x_session_id="one")
    assert metric(gateway, "prompt_tokens_total") == 2_000
    assert metric(gateway, "cached_tokens_total") == 750
    page = send(gateway, "GET", "/").body.decode()
    assert "<b>75.0 %</b><span>of the prompt tokens were cached" in page
    assert "2 of 3 answers reported no cached tokens" in page


def test_no_details_is_a_miss_of_an_engine_that_has_reported(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    """vLLM and SGLang leave the details out where nothing was cached, even if they report them otherwise."""
    gateway = gateway_of(upstream.base_url)
    hit = {"prompt_tokens": 1_000, "prompt_tokens_details": {"cached_tokens": 750}}
    miss = {"prompt_tokens": 1_000, "prompt_tokens_details": None}
    for usage in (miss, hit, miss, miss):  # nothing shows that the first one is a miss
        upstream.handler = answer(chat_answer(usage))
        send(gateway, "POST", CHAT, body(user("a")), x_session_id="one")
    assert metric(gateway, "unreported_tokens_total") == 1_000
    assert metric(gateway, "prompt_tokens_total") == 4_000
    assert metric(gateway, "cached_tokens_total") == 750
    assert sum([metric(gateway, "uncached_tokens_total", cause=cause) for cause in TokenFates._fields]) == 2_250


def test_the_page_has_no_notice_while_all_answers_report(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = answer(chat_answer({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}))
    gateway = gateway_of(upstream.base_url)
    send(gateway, "POST", CHAT, body(user("a")))
    page = send(gateway, "GET", "/").body.decode()
    assert "reported no cached tokens" not in page
    assert "<b>0.0 %</b>" in page
