"""OpenAI's Responses API and prompt caching from GPT-5.6, through the OpenAI SDK."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import openai
import pytest

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer, encode

INSTANT = EmulatorConfig(kv_blocks=2000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
MODEL = "warmprefix-emulator"
TEXT = "warm prefix " * 600  # 1,201 tokens
BREAKPOINT = {"mode": "explicit"}


@contextmanager
def serving(profile: str) -> Iterator[openai.OpenAI]:
    with (
        EmulatorServer(replace(INSTANT, profile=profile)) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with serving("openai") as client:
        yield client


def item(role: str, *texts: str, marked: int | None = None) -> Any:
    kind = "output_text" if role == "assistant" else "input_text"
    parts: list[dict[str, Any]] = [{"type": kind, "text": text} for text in texts]
    if marked is not None:
        parts[marked]["prompt_cache_breakpoint"] = BREAKPOINT
    return {"type": "message", "role": role, "content": parts}


def counts(response: Any) -> tuple[int, int, int]:
    """Return the tokens that were read, written and neither."""
    details = response.usage.input_tokens_details
    read, written = details.cached_tokens, details.cache_write_tokens
    return read, written, response.usage.input_tokens - read - written


def create(client: openai.OpenAI, items: Any, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input=items, max_output_tokens=5, **options)


def test_response_has_the_apis_shape(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hi.", instructions="Be brief.")
    assert response.output_text.startswith("[warmprefix emulator: no model ran")
    assert (response.status, response.model, response.error) == ("completed", MODEL, None)
    assert response.usage is not None
    assert response.usage.output_tokens == len(encode(response.output_text)) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    cut = client.responses.create(model=MODEL, input="Hi.", max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "[warmprefix")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_stream_has_the_same_answer_and_all_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Hi.")
    with client.responses.stream(model=MODEL, input="Hi.") as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_end_of_the_newest_message_is_written_and_read(client: openai.OpenAI) -> None:
    items = [item("developer", TEXT), item("user", "First question?")]
    first, again = counts(create(client, items)), counts(create(client, items))
    assert first[0] == 0
    assert first[1] > 1_200
    assert again == (first[1], 0, first[2])
    items += [item("assistant", "Yes."), item("user", "Second question?")]
    assert counts(create(client, items))[0] == first[1]
    changed = [item("developer", TEXT), item("user", "Another question?")]
    assert counts(create(client, changed))[0] == 0  # nothing was marked behind the developer's message


def test_breakpoint_keeps_a_stable_prefix(client: openai.OpenAI) -> None:
    def ask(question: str) -> tuple[int, int, int]:
        items = [item("developer", TEXT, marked=0), item("user", question)]
        return counts(create(client, items, prompt_cache_options={"mode": "explicit"}))

    first, second = ask("First question?"), ask("Second question?")
    assert (first[0], second[0], second[1]) == (0, first[1], 0)
    assert first[1] > 1_200


def test_tool_outputs_end_messages_too(client: openai.OpenAI) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
    items = [item("user", TEXT), call, {"type": "function_call_output", "call_id": "c1", "output": "Found."}]
    first = counts(create(client, items))
    more = [*items, item("assistant", "Good."), item("user", "And?")]
    assert counts(create(client, more))[0] == first[1] > 1_200


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        (
            [item("user", "a"), item("assistant", "b", marked=0), item("user", "c")],
            {},
            r"Unknown parameter: 'input\[1\].content\[0\].prompt_cache_breakpoint'.",
        ),
        ([item("user", "a", "", marked=1)], {}, r"'input\[0\].content\[1\].prompt_cache_breakpoint' cannot be set on"),
        ("a", {"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl: Input should be '30m'"),
        (
            "a",
            {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"},
            "prompt_cache_retention and prompt_cache_options exclude each other",
        ),
        ([{"role": "user", "content": 7}], {}, r"Invalid type for 'input\[0\].content'"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}]}],
            {},
            r"input\[0\].content\[0\].prompt_cache_breakpoint.mode: Field required",
        ),
    ],
)
def test_request_against_the_rules_is_refused(
    client: openai.OpenAI, items: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        create(client, items, **options)


def test_older_models_match_in_steps_and_refuse_the_new_fields() -> None:
    with serving("openai-before-5.6") as client:
        uses = [create(client, f"{TEXT} {question}").usage for question in ("First?", "Second?")]
        assert [use.input_tokens_details.cached_tokens for use in uses] == [0, 1_152]
        with pytest.raises(openai.BadRequestError, match="'prompt_cache_options' is not supported with this model"):
            create(client, "Hi.", prompt_cache_options={"mode": "explicit"})
        with pytest.raises(openai.BadRequestError, match="is not supported with this model"):
            create(client, [item("user", "a", marked=0)])


def test_engines_ignore_the_new_fields() -> None:
    with serving("full-attention") as client:
        items = [item("user", TEXT, marked=0)]
        uses = [counts(create(client, items, prompt_cache_options={"mode": "explicit"})) for _ in range(2)]
    assert [(read > 1_100, written) for read, written, _ in uses] == [(False, 0), (True, 0)]


# -- the same in chat completions


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> tuple[int, int]:
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, **options)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    details = answer.usage.prompt_tokens_details.model_dump()
    return details["cached_tokens"], details["cache_write_tokens"]


def test_chat_reads_and_writes_at_breakpoints(client: openai.OpenAI) -> None:
    part = {"type": "text", "text": TEXT, "prompt_cache_breakpoint": BREAKPOINT}
    options = {"extra_body": {"prompt_cache_options": {"mode": "explicit"}}}

    def ask(question: str) -> tuple[int, int]:
        messages = [{"role": "system", "content": [part]}, {"role": "user", "content": question}]
        return chat(client, messages, **options)

    first, second = ask("First question?"), ask("Second question?")
    assert first[0] == second[1] == 0
    assert second[0] == first[1] > 1_200
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].content\[0\].prompt_cache_breakpoint"):
        chat(client, [{"role": "user", "content": "a"}, {"role": "assistant", "content": [part]}])


# -- engines with checkpoints and slots, in chat completions


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("vllm-checkpoints(128)", [0, 0, 1_152]),
        ("vllm-checkpoints(528,16)", [0, 0, 1_056]),
        ("llama.cpp(1)", [0, 1_204, 1_204]),
    ],
)
def test_visits_to_a_shared_prefix_hit_as_on_the_engine(profile: str, expected: list[int]) -> None:
    with serving(profile) as client:
        assert [
            cached_tokens(client, [{"role": "user", "content": f"{TEXT} {question} {'word ' * 500}"}])
            for question in ("First?", "Second?", "Third?")
        ] == expected


def cached_tokens(client: openai.OpenAI, messages: Any) -> int:
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return cast(int, answer.usage.prompt_tokens_details.cached_tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profile": "nothing"}, "profile must be one of"),
        ({"window": 512}, "window must be None with the profile full-attention, got 512"),
        ({"profile": "vllm-checkpoints(128)", "window": 1}, "window must be 2 or more, got 1"),
        ({"profile": "vllm-checkpoints(128)", "kv_blocks": 5}, "max_model_len must be from 2 to 0"),
    ],
)
def test_contradictory_configuration_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(INSTANT, **fields)
