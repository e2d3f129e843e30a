"""Additions to a request, the bytes that stay, and the places of its blocks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import messages_for
from warmprefix_requests import (
    OutgoingRequest,
    block_ends,
    holds_blocks,
    prepared,
    read_call,
    with_salt,
    with_token_ids,
    with_usage,
)

CHAT = "/v1/chat/completions"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def call_of(body: dict[str, Any], path: str = CHAT) -> OutgoingRequest:
    call = read_call("POST", path, {}, json.dumps(body).encode())
    assert call is not None
    return call


@given(body=st.dictionaries(st.text(), JSON, min_size=1), stream=st.booleans(), spaces=st.sampled_from(["", " \n"]))
def test_additions_keep_every_byte_that_was_there(body: dict[str, Any], stream: bool, spaces: str) -> None:
    body = {**body, "stream": stream}
    body.pop("stream_options", None)
    content = (spaces + json.dumps(body) + spaces).encode()
    call = read_call("POST", CHAT, {}, content)
    assert call is not None
    more = prepared(call, [with_salt("salt"), with_token_ids("vllm"), with_usage])
    expected = {"cache_salt": "salt", "return_token_ids": True}
    if stream:
        expected["stream_options"] = {"include_usage": True}
    assert json.loads(more.content) == {**expected, **body}
    assert more.content.startswith(content.rstrip()[:-1])
    assert more.hides_usage is stream
    assert prepared(call, [with_salt(None)]).content is content


def test_fields_of_the_application_stay() -> None:
    own = {"cache_salt": "mine", "return_token_ids": False, "stream": True, "stream_options": {"include_usage": False}}
    call = call_of({"messages": [], **own})
    more = prepared(call, [with_salt("salt"), with_token_ids("vllm"), with_usage])
    assert (more.content, more.hides_usage, more.salt) == (call.content, False, "mine")
    asked = call_of({"messages": [], "stream": True, "stream_options": {"include_usage": True}})
    more = prepared(asked, [with_salt(None), with_usage])
    assert (more.content, more.hides_usage, more.salt) == (asked.content, False, None)
    other = call_of({"messages": [], "stream": True, "stream_options": {"include_obfuscation": False}})
    more = prepared(other, [with_usage])
    assert json.loads(more.content)["stream_options"] == {"include_obfuscation": False, "include_usage": True}
    assert more.hides_usage


def test_each_engine_is_asked_in_its_own_way() -> None:
    whole, stream = call_of({"messages": []}), call_of({"messages": [], "stream": True})
    sglang = [prepared(call, [with_token_ids("sglang")]).content for call in (whole, stream)]
    assert json.loads(sglang[0]) == {"messages": [], "return_prompt_token_ids": True}
    assert sglang[1] == stream.content
    responses = call_of({"input": "Q?", "stream": True}, "/v1/responses")
    more = prepared(responses, [with_salt("salt"), with_token_ids("vllm"), with_usage])
    assert json.loads(more.content) == {"input": "Q?", "stream": True, "cache_salt": "salt"}
    assert not more.hides_usage
    messages = call_of({"messages": [], "stream": True}, "/v1/messages")
    more = prepared(messages, [with_salt("salt"), with_token_ids("vllm"), with_usage])
    assert json.loads(more.content) == {"messages": [], "stream": True, "cache_salt": "salt"}
    keyed = prepared(messages, [with_salt("salt", "prompt_cache_key"), with_usage])
    assert (keyed.content, keyed.hides_usage, keyed.salt) == (messages.content, False, None)


@pytest.mark.parametrize(
    ("method", "path", "headers", "content"),
    [
        ("GET", CHAT, {}, b"{}"),
        ("POST", "/v1/embeddings", {}, b'{"input": "x"}'),
        ("POST", CHAT, {"content-encoding": "gzip"}, b'{"messages": []}'),
        ("POST", CHAT, {}, b"no JSON"),
        ("POST", CHAT, {}, b"[1]"),
        ("POST", CHAT, {}, b"{}"),
        ("POST", CHAT, {}, '{"messages": []}'.encode("utf-16")),
        ("POST", CHAT, {}, b"\xff"),
    ],
)
def test_every_other_request_is_no_call(method: str, path: str, headers: dict[str, str], content: bytes) -> None:
    assert read_call(method, path, headers, content) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "{}\n\nQ?"}]}),
        (CHAT, {"messages": [{"content": "S"}, {"content": [{"type": "text", "text": "{}"}, {"type": "image_url"}]}]}),
        ("/v1/completions", {"prompt": "S {} Q?"}),
        ("/v1/completions", {"prompt": ["S {} Q?", "another"]}),
        ("/v1/responses", {"instructions": "S", "input": "{} Q?"}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "{} Q?"}]}]}),
        ("/v1/responses", {"input": [{"type": "function_call_output", "output": "{}"}]}),
        (CHAT, {"tools": [{"type": "function"}], "messages": [7, {"content": None}, {"content": "{}"}]}),
    ],
)
def test_blocks_are_found_in_every_kind_of_prompt(path: str, body: dict[str, Any]) -> None:
    plan = ContextPlanner().plan(["First passage.", 'Second, "quoted" ß.'])
    text = json.dumps(plan.render())[1:-1]
    call = read_call("POST", path, {}, json.dumps(body).replace("{}", text).encode())
    assert call is not None
    assert holds_blocks(call.prompt, plan)
    ends = block_ends(call.prompt, plan)
    assert ends is not None
    for planned, end in zip(plan.blocks, ends, strict=True):
        assert call.prompt[: round(end * len(call.prompt))].endswith(planned.render())
    assert call.is_text is ("image_url" not in json.dumps(body))
    without = call_of({"messages": [{"role": "user", "content": "Q?"}]})
    assert not holds_blocks(without.prompt, plan)
    assert block_ends(without.prompt, plan) is None


@pytest.mark.parametrize(
    ("path", "body", "is_text"),
    [
        (CHAT, {"messages": [{"content": ["Q?", {"type": "text", "text": "Q?"}, {"text": "Q?"}]}, {}]}, True),
        (CHAT, {"messages": [{"content": None, "tool_calls": []}, {"content": []}]}, True),
        (CHAT, {"messages": [{"content": [{"type": "input_audio", "input_audio": {}}]}]}, False),
        (CHAT, {"messages": [{"content": [{"type": "image", "text": "A caption."}]}]}, False),
        (CHAT, {"messages": [{"content": [{"type": ["text"], "text": 7}]}]}, False),
        ("/v1/completions", {"prompt": "Q?"}, True),
        ("/v1/completions", {"prompt": [1, 2, 3]}, False),
        ("/v1/responses", {"instructions": None, "input": [{"content": [{"type": "input_text", "text": "Q?"}]}]}, True),
        ("/v1/responses", {"input": [{"content": [{"type": "output_text", "text": "A."}]}]}, True),
        ("/v1/responses", {"input": [{"content": [{"type": "input_image", "image_url": "data:"}]}]}, False),
        ("/v1/responses", {"input": [{"output": {"type": "computer_screenshot", "image_url": "data:"}}]}, False),
    ],
)
def test_what_is_no_text_is_noticed(path: str, body: dict[str, Any], is_text: bool) -> None:
    assert call_of(body, path).is_text is is_text


def test_blocks_without_labels_are_found_in_planned_order_only() -> None:
    plan = ContextPlanner().plan(["One passage.", "Another one."])
    assert block_ends("One passage. Another one. Q?", plan) == [12 / 28, 25 / 28]
    assert block_ends("Another one. One passage. Q?", plan) is None
    assert holds_blocks("Another one. One passage. Q?", plan)
    assert block_ends("", ContextPlanner().plan([])) == []


def test_behind_a_history_the_last_places_count() -> None:
    planner = ContextPlanner()
    blocks = [ContextBlock("The same passage, at some length, so that it is worth a note. " * 3, id="p")]
    earlier = [{"role": "user", "content": f"{blocks[0].text} and more"}, {"role": "assistant", "content": "A."}]
    plan = planner.plan(blocks, placement="tail", history=earlier)
    assert not plan.references
    prompt = "\n".join(message["content"] for message in messages_for(plan, "Q?", earlier))
    ends = block_ends(prompt, plan)
    assert ends is not None
    assert round(ends[0] * len(prompt)) == prompt.rindex(blocks[0].text) + len(blocks[0].text)
