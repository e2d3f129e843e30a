"""The API as applications use it, through the OpenAI SDK."""

from __future__ import annotations

import random
from typing import Any

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam

from warmprefix_tools.emulator import EmulatorServer, encode

MODEL = "warmprefix-emulator"


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def cached_tokens(usage: openai.types.CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    return usage.prompt_tokens_details.cached_tokens


def test_answer_is_marked_as_an_emulators(shared_client: openai.OpenAI) -> None:
    raw = shared_client.chat.completions.with_raw_response.create(model=MODEL, messages=user("Hello."))
    answer = raw.parse()
    assert raw.headers["x-warmprefix-emulator"] == "1"
    assert answer.system_fingerprint == "warmprefix-emulator"
    assert (answer.choices[0].message.content or "").startswith("[warmprefix emulator: no model ran")


def test_usage_counts_the_prompt_the_answer_and_the_hit(client: openai.OpenAI) -> None:
    messages = user("warm " * 100)
    first, second = (client.chat.completions.create(model=MODEL, messages=messages) for _ in range(2))
    assert first.usage is not None
    content = first.choices[0].message.content or ""
    assert first.usage.completion_tokens == len(encode(content)) + 1  # the end-of-message token
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert (cached_tokens(first.usage), cached_tokens(second.usage)) == (0, first.usage.prompt_tokens // 16 * 16)
    assert first.choices[0].finish_reason == "stop"
    assert second.choices[0].message == first.choices[0].message


def test_stream_has_the_same_answer_and_ends_with_the_usage(client: openai.OpenAI) -> None:
    messages = user("warm " * 100)
    whole = client.chat.completions.create(model=MODEL, messages=messages)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    *deltas, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == whole.choices[0].message.content
    assert deltas[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert cached_tokens(last.usage) == whole.usage.prompt_tokens // 16 * 16
    assert {chunk.system_fingerprint for chunk in chunks} == {"warmprefix-emulator"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_max_tokens_cuts_the_answer(shared_client: openai.OpenAI) -> None:
    old = shared_client.chat.completions.create(model=MODEL, messages=user("Hi."), max_tokens=3)
    new = shared_client.chat.completions.create(
        model=MODEL, messages=user("Hi."), max_tokens=7, max_completion_tokens=3
    )
    for answer in (old, new):
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "[warmprefix"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


def test_cached_tokens_equal_a_recomputation_from_scratch(
    client: openai.OpenAI, server: EmulatorServer, http: httpx.Client
) -> None:
    """Compare every prompt, token by token, with all prompts computed before under its salt."""
    rng = random.Random(7)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    documents = [" ".join(rng.choices(words, k=40)) for _ in range(6)]
    computed: list[tuple[str, list[int]]] = []
    hits = 0
    for _ in range(60):
        salt = rng.choice(["a", "b"])
        messages = user("\n\n".join(rng.sample(documents, 3)))
        messages.insert(0, {"role": "system", "content": rng.choice(["Be brief.", "Be thorough."])})
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=rng.randint(1, 40), extra_body={"cache_salt": salt}
        )
        tokens = http.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]

        shared = max((common_prefix(tokens, earlier) for other, earlier in computed if other == salt), default=0)
        expected = min(shared // 16, (len(tokens) - 1) // 16) * 16
        assert cached_tokens(answer.usage) == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens)
        generated = encode(answer.choices[0].message.content or "")
        computed.append((salt, [*tokens, *generated][: answer.usage.total_tokens - 1]))
        hits += expected
    assert hits > 0


def common_prefix(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_content_parts_tools_and_unknown_fields_are_accepted(
    shared_client: openai.OpenAI, shared_server: EmulatorServer, http: httpx.Client
) -> None:
    def tokens(**body: object) -> Any:
        response = http.post(f"{shared_server.url}/tokenize", json=body)
        assert response.status_code == 200, response.text
        return response.json()["tokens"]

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokens(messages=[{"role": "user", "content": parts}]) == tokens(
        messages=[{"role": "user", "content": "one\ntwo"}]
    )
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Search."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Found."},
    ]
    assert len(tokens(messages=history)) > len(
        tokens(messages=[{**history[1], "tool_calls": None}, history[0], history[2]])
    )
    tools = [{"type": "function", "function": {"name": name}} for name in ("search", "fetch")]
    assert tokens(messages=history, tools=tools) != tokens(messages=history, tools=tools[::-1])
    assert tokens(prompt="one two") == encode("one two")
    assert (
        tokens(messages=history, add_generation_prompt=False)
        == tokens(messages=history)[: -1 - len(encode("assistant\n"))]
    )

    answer = shared_client.chat.completions.create(
        model=MODEL, messages=user("Hi."), temperature=0, seed=1, extra_body={"no_such_field": {"x": 1}}
    )
    assert answer.choices[0].finish_reason == "stop"
