"""Refused requests: errors in the shape that OpenAI clients read, with the name of the field."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

MESSAGES = [{"role": "user", "content": "Hi."}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "Hi."}]}, "messages.0.role"),
        ({"messages": [{"content": "Hi."}]}, "messages.0.role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["Hi."]}]}, "messages.0.content"),
        ({"messages": MESSAGES, "n": 2}, "n"),
        ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"messages": MESSAGES, "stream": "perhaps"}, "stream"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": MESSAGES, "cache_salt": ""}, "cache_salt"),
        ({"messages": MESSAGES, "cache_salt": "a/b"}, "cache_salt"),
        ({"messages": MESSAGES, "cache_salt": "x" * 129}, "cache_salt"),
        ({"messages": MESSAGES, "max_tokens": 10**9}, "input_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, "input_tokens"),
    ],
)
def test_bad_field_is_named(
    shared_server: EmulatorServer, http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = http.post(f"{shared_server.base_url}/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, 400, param)
    assert error["type"] == "BadRequestError"
    assert error["message"]
    assert response.headers["x-warmprefix-emulator"] == "1"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": "\\ud800"}', b"[" * 100_000])
def test_body_that_is_no_json_object_is_refused(shared_server: EmulatorServer, http: httpx.Client, body: bytes) -> None:
    response = http.post(f"{shared_server.base_url}/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_sdk_raises_its_own_errors(shared_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `gpt-9` does not exist"):
        shared_client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi."}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 31984 tokens"):
        shared_client.chat.completions.create(
            model="warmprefix-emulator", messages=[{"role": "user", "content": "word " * 40_000}], stream=True
        )


def test_prompt_may_fill_the_context_except_one_token(http: httpx.Client) -> None:
    with EmulatorServer(EmulatorConfig(kv_blocks=10, base_ttft_ms=0, prefill_rate=1e9)) as server:
        limit = 9 * 16
        count = http.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()["count"]
        for words, status in ((limit - count - 1, 200), (limit - count, 400)):
            messages = [{"role": "user", "content": "Hi." + " a" * words}]
            response = http.post(f"{server.base_url}/chat/completions", json={"messages": messages})
            assert response.status_code == status, response.text


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}])
def test_tokenize_takes_messages_or_a_prompt(
    shared_server: EmulatorServer, http: httpx.Client, body: dict[str, Any]
) -> None:
    response = http.post(f"{shared_server.url}/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
