"""Anthropic's Messages API: marks, their refusals, usage and streams."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from warmprefix.cache_profiles import as_profile
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer, encode
from warmprefix_tools.emulator.anthropic_bodies import CountTokensRequest

Body = dict[str, Any]
Ask = Callable[..., Body]
INSTANT = EmulatorConfig(kv_blocks=2000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
MARK = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
TEXT = "warm prefix " * 600  # 1,201 tokens


@pytest.fixture
def server() -> Iterator[EmulatorServer]:
    with EmulatorServer(replace(INSTANT, profile="anthropic")) as server:
        yield server


@pytest.fixture
def ask(server: EmulatorServer, http: httpx.Client) -> Ask:
    """Return a function that sends a body and returns the answer, an error's included."""

    def ask(body: Body, key: str = "one", path: str = "") -> Body:
        request = {"max_tokens": 20, "messages": [{"role": "user", "content": "Hi."}], **body}
        answer = http.post(f"{server.base_url}/messages{path}", json=request, headers={"x-api-key": key})
        return {"status": answer.status_code, **answer.json()}

    return ask


def text(content: str, mark: Body | None = None) -> Body:
    return {"type": "text", "text": content} | ({} if mark is None else {"cache_control": mark})


def user(*parts: Body) -> list[Body]:
    return [{"role": "user", "content": list(parts)}]


def counts(answer: Body) -> tuple[int, int, int]:
    assert answer["status"] == 200, answer
    usage = answer["usage"]
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    return usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"], usage["input_tokens"]


def test_answer_has_the_apis_shape(ask: Ask) -> None:
    answer = ask({"max_tokens": 3})
    assert {name: answer[name] for name in ("type", "role", "model", "stop_reason", "stop_sequence")} == {
        "type": "message",
        "role": "assistant",
        "model": "warmprefix-emulator",
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }
    assert answer["content"] == [{"type": "text", "text": "[warmprefix"}]
    assert answer["usage"]["output_tokens"] == 3
    assert ask({"max_tokens": 1000})["stop_reason"] == "end_turn"


def test_marked_prefix_is_written_then_read(ask: Ask) -> None:
    body = {"system": [text(TEXT, MARK)]}
    written, read = counts(ask(body)), counts(ask(body))
    prefix = len(encode(TEXT)) + 1 + len(encode("system\n"))
    assert written == (0, prefix, written[2])
    assert read == (prefix, 0, written[2])
    other = ask({**body, "messages": [{"role": "user", "content": "Something else."}]})
    assert counts(other)[:2] == (prefix, 0)


def test_automatic_mark_stands_on_the_last_block(ask: Ask) -> None:
    turns: list[Body] = [{"role": "user", "content": TEXT}]
    first = counts(ask({"cache_control": MARK, "messages": turns}))
    turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    second = counts(ask({"cache_control": MARK, "messages": turns}))
    assert first[0] == 0
    assert second[0] == first[1] > 1_200
    assert second[1] > 0


def test_clock_can_be_advanced_past_a_lifetime(ask: Ask, server: EmulatorServer, http: httpx.Client) -> None:
    body = {"tools": [{"name": "search", "input_schema": {"description": TEXT}, "cache_control": LONG}]}
    marked = {**body, "system": [text(TEXT, MARK)]}
    assert ask(marked)["usage"]["cache_creation"]["ephemeral_1h_input_tokens"] > 1_200
    expected = [(240, "all"), (299, "all"), (301, "tools"), (3_599, "tools"), (3_601, "none")]
    for seconds, kept in expected:
        assert http.post(f"{server.url}/advance_clock", json={"seconds": seconds}).status_code == 200
        read, written, _ = counts(ask(marked))
        assert {"all": written == 0, "tools": 0 < written < read + 100, "none": read == 0}[kept], (
            seconds,
            read,
            written,
        )
    assert http.post(f"{server.url}/advance_clock", json={"seconds": -1}).status_code == 400


def test_mark_is_no_part_of_the_prompt(ask: Ask) -> None:
    marked = {"system": [text(TEXT, MARK)], "messages": user(text("Question?"))}
    assert counts(ask(marked))[1] > 0
    elsewhere = {"system": [text(TEXT)], "messages": user(text("Question?", MARK))}
    assert counts(ask(elsewhere))[0] > 1_200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"system": [text("a", MARK)], "messages": user(*(text(name, MARK) for name in "bcde"))},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {"cache_control": MARK, "messages": user(*(text(name, MARK) for name in "bcde"), text("f"))},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {"messages": user(text("a"), text("", MARK))},
            "messages.0.content.1.text: cache_control cannot be set for empty text blocks",
        ),
        ({"system": [text("", MARK)]}, "system.0.text: cache_control cannot be set for empty text blocks"),
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi."},
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "cache_control": MARK}]},
                    {"role": "user", "content": "Go on."},
                ]
            },
            "messages.1.content.0.thinking.cache_control: Extra inputs are not permitted",
        ),
        (
            {"tools": [{"name": "search", "cache_control": MARK}], "system": [text("a", LONG)]},
            "system.0.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' cache_control"
            " block. Note that blocks are processed in the following order: `tools`, `system`, `messages`.",
        ),
        (
            {"cache_control": LONG, "messages": user(text("a", MARK))},
            "cache_control: ttl='1h' contradicts messages.0.content.0.cache_control.ttl.",
        ),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: Input should be '5m' or '1h'"),
        ({"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ],
)
def test_request_against_the_rules_is_refused(ask: Ask, body: Body, message: str) -> None:
    answer = ask(body)
    assert (answer["status"], answer["type"]) == (400, "error")
    assert answer["error"] == {"type": "invalid_request_error", "message": message}


def test_tokens_can_be_counted(ask: Ask) -> None:
    body = {"system": [text(TEXT, MARK)]}
    assert ask(body, path="/count_tokens")["input_tokens"] == sum(counts(ask(body)))


def test_stream_has_the_apis_events(server: EmulatorServer, http: httpx.Client, ask: Ask) -> None:
    body = {"max_tokens": 1000, "system": [text(TEXT, MARK)], "messages": [{"role": "user", "content": "Hi."}]}
    whole = ask(body)
    with http.stream("POST", f"{server.base_url}/messages", json={**body, "stream": True}) as answer:
        lines = list(answer.iter_lines())
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [
        event["type"] for event in events
    ]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    first = ["message_start", "content_block_start", "ping"]
    assert kinds == [*first, "content_block_stop", "message_delta", "message_stop"]
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_engine_without_marks_ignores_them(http: httpx.Client) -> None:
    with EmulatorServer(INSTANT) as server:
        body = {"max_tokens": 1, "system": [text("", MARK), text(TEXT, MARK)], "messages": user(text("Hi."))}
        uses = [http.post(f"{server.base_url}/messages", json=body).json()["usage"] for _ in range(2)]
    assert [usage["cache_creation_input_tokens"] for usage in uses] == [0, 0]
    assert uses[1]["cache_read_input_tokens"] == uses[0]["input_tokens"] // 16 * 16


# -- the real SDK


@pytest.fixture
def sdk(server: EmulatorServer) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_sdk_reads_answers_and_usage(sdk: Any) -> None:
    arguments: Body = {
        "model": "warmprefix-emulator",
        "max_tokens": 500,
        "system": [text(TEXT, LONG)],
        "messages": [{"role": "user", "content": "Hi."}],
    }
    first = sdk.messages.create(**arguments)
    assert first.content[0].text.startswith("[warmprefix emulator: no model ran")
    assert first.usage.cache_creation.ephemeral_1h_input_tokens == first.usage.cache_creation_input_tokens > 1_200
    with sdk.messages.stream(**arguments) as stream:
        assert "".join(stream.text_stream) == first.content[0].text
        last = stream.get_final_message()
    assert last.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
    assert last.usage.output_tokens == first.usage.output_tokens


def test_sdk_raises_on_refusals(sdk: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.BadRequestError, match="Found 5"):
        sdk.messages.create(
            model="warmprefix-emulator", max_tokens=1, messages=user(*(text(name, MARK) for name in "abcde"))
        )


# -- in mid-conversation -----------------------------------------------------------------------------------------------

TOOLS = [{"name": "read", "input_schema": {"type": "object"}}]
LATE: Body = {"name": "look_up", "description": "Look up. " * 40, "input_schema": {"type": "object"}}
BETAS = {"anthropic-beta": "mid-conversation-tool-changes-2026-07-01,inline-tools-2026-09-15"}


def added(tool: Body) -> Body:
    return {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}


BY_VALUE = added({"type": "tool_definition", "definition": LATE})
BY_NAME = added({"type": "tool_reference", "name": "look_up"})
REMOVED = {
    "role": "system",
    "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "read"}}],
}


def prompt_of(profile: str, body: Body) -> list[int]:
    """Return the tokens of a prompt, up to the head of the answer."""
    tokens = CountTokensRequest.model_validate(body).prompt_for(as_profile(profile), None, BETAS["anthropic-beta"])
    return list(tokens.tokens[: -1 - len(encode("assistant\n"))])


@pytest.mark.parametrize("change", [BY_VALUE, REMOVED])
@pytest.mark.parametrize("profile", ["anthropic", "full-attention"])
def test_tools_that_change_keep_the_prefix_where_the_api_does(profile: str, change: Body) -> None:
    before = {"tools": TOOLS, "messages": user(text("How deep?"))}
    after = {**before, "messages": [*before["messages"], change]}
    first, second = prompt_of(profile, before), prompt_of(profile, after)
    assert (second[: len(first)] == first) is (profile == "anthropic")


def test_a_deferred_tool_is_shown_where_it_is_added_or_found() -> None:
    question = user(text("How deep?"))
    tools = [*TOOLS, {**LATE, "defer_loading": True}]
    unseen = prompt_of("anthropic", {"tools": tools, "messages": question})
    assert unseen == prompt_of("anthropic", {"tools": TOOLS, "messages": question})
    shown = prompt_of("anthropic", {"tools": tools, "messages": [*question, BY_NAME]})
    assert shown[: len(unseen)] == unseen
    assert len(shown) > len(unseen) + len(encode(LATE["description"]))
    loaded = prompt_of("full-attention", {"tools": tools, "messages": [*question, BY_NAME]})
    assert loaded == prompt_of("full-attention", {"tools": [*TOOLS, LATE], "messages": question})
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {}}]}
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "tool_reference", "tool_name": "look_up"}],
    }
    found = prompt_of("anthropic", {"tools": tools, "messages": [*question, call, *user(result)]})
    assert len(found) > len(unseen) + len(encode(LATE["description"]))


def test_a_system_message_stays_where_it_is_and_may_end_with_its_turn() -> None:
    note = {"role": "system", "content": "Answer in French."}
    turns = [*user(text("How deep?")), note]
    answered = [*turns, {"role": "assistant", "content": "Deep."}]
    for profile in ("anthropic", "full-attention"):
        first, second = prompt_of(profile, {"messages": turns}), prompt_of(profile, {"messages": answered})
        assert second[: len(first)] == first
    passing = [turns[0], {**note, "clear_at": "next_user_message"}, answered[-1], *user(text("Sure?"))]
    kept = [turns[0], answered[-1], *user(text("Sure?"))]
    assert prompt_of("anthropic", {"messages": passing}) == prompt_of("anthropic", {"messages": kept})


@pytest.mark.parametrize(
    ("messages", "betas", "refusal"),
    [
        ([{"role": "system", "content": "Be brief."}], BETAS, "must follow a user message"),
        ([{"role": "system", "content": "Be brief."}, *user(text("Hi."))], BETAS, "must follow a user message"),
        ([*user(text("Hi.")), BY_VALUE], {}, "requires the anthropic-beta header 'inline-tools-2026-09-15'"),
        ([*user(text("Hi.")), BY_NAME], {}, "requires the anthropic-beta header 'mid-conversation-tool-changes-"),
        ([*user(text("Hi.")), BY_NAME], BETAS, "messages.1.content.0.tool.name: tool 'look_up' was not found in tools"),
        ([*user(*BY_VALUE["content"])], BETAS, "tools change in messages with the role 'system' only"),
        ([*user(text("Hi.")), added([])], BETAS, "tool 'None' was not found"),  # type: ignore[arg-type]
    ],
)
def test_a_system_message_against_the_rules_is_refused(
    server: EmulatorServer, http: httpx.Client, messages: list[Body], betas: dict[str, str], refusal: str
) -> None:
    body = {"max_tokens": 1, "tools": TOOLS, "messages": messages}
    answer = http.post(f"{server.base_url}/messages", json=body, headers=betas)
    assert answer.status_code == 400
    assert refusal in answer.json()["error"]["message"]


def test_an_edit_clears_old_thinking_only(ask: Ask, server: EmulatorServer) -> None:
    def turn(name: str) -> list[Body]:
        thinking = {"type": "thinking", "thinking": name * 50, "signature": "x"}
        return [*user(text(name)), {"role": "assistant", "content": [thinking, text("Yes.")]}]

    messages = [*turn("one "), *turn("two "), *user(text("Go on."))]
    ones, twos = (len(prompt_of("anthropic", {"messages": turn(name)})) for name in ("one ", "two "))
    edits: list[Body] = [{"type": "clear_thinking_20251015", "keep": "all"}]
    whole = prompt_of("anthropic", {"messages": messages})
    assert prompt_of("anthropic", {"messages": messages, "context_management": {"edits": edits}}) == whole
    edits = [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
    cut = prompt_of("anthropic", {"messages": messages, "context_management": {"edits": edits}})
    assert len(whole) - ones < len(cut) < len(whole) - 50
    assert cut[-twos:] == whole[-twos:]
    edits = [{"type": "clear_tool_uses_20250919"}]
    refused = ask({"messages": messages, "context_management": {"edits": edits}})
    assert refused["error"]["message"].startswith("context_management.edits.0.type: Input should be 'clear_thinking_")
    ignored = prompt_of("full-attention", {"messages": messages, "context_management": {"edits": edits}})
    assert ignored == prompt_of("full-attention", {"messages": messages})


def test_vllm_does_not_see_the_billing_header_of_claude_code() -> None:
    def system(session: str) -> Body:
        blocks = [text(f"x-anthropic-billing-header: cc_version=2.1.197.{session};"), text("You are an agent.")]
        return {"system": blocks, "messages": user(text("Hi."))}

    for profile, differs in (("full-attention", False), ("vllm-checkpoints(528,16)", False), ("anthropic", True)):
        assert (prompt_of(profile, system("709")) != prompt_of(profile, system("a1b"))) is differs
