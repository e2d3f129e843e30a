"""Requests for one token over the beginning of a prompt: each route, and bodies that cannot be cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix_openai import messages_for
from warmprefix_requests import OutgoingRequest, read_call
from warmprefix_requests.prefixes import EXACT_END, end_of_blocks, prefix_request

BLOCKS = [ContextBlock(f"The text of {name}. " * 3, id=name) for name in "ABC"]
PATHS = {"chat": "chat/completions", "completions": "completions", "messages": "messages", "responses": "responses"}


@pytest.fixture(scope="module")
def plan() -> ContextPlan:
    return ContextPlanner().plan(BLOCKS, order_locked=True)


def sent(route: str, **body: Any) -> OutgoingRequest:
    request = read_call("POST", f"/v1/{PATHS[route]}", {}, json.dumps({"model": "m", **body}).encode())
    assert request is not None
    return request


def prefix_of(request: OutgoingRequest, plan: ContextPlan, blocks: int) -> OutgoingRequest:
    place = end_of_blocks(request, plan, blocks)
    assert place is not None
    return prefix_request(request, *place)


def test_a_chat_is_cut_behind_the_blocks_and_keeps_what_is_about_its_prompt(plan: ContextPlan) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chat = messages_for(plan, "Why?", preamble="Be brief.")
    more = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    about_prompt = {"tools": tools, "cache_salt": "s", "chat_template_kwargs": {"thinking": False}, "temperature": 0.5}
    about_answer = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "max_completion_tokens": 50}
    cut = prefix_of(sent("chat", messages=[*chat, *more], **about_prompt, **about_answer), plan, 2)
    text = f"{BLOCKS[0].text}\n\n{BLOCKS[1].text}\n\nT"
    messages = [chat[0], {"role": "user", "content": text}]
    assert cut.plain is not None
    assert cut.plain.body == {"model": "m", "messages": messages, "max_tokens": 1, **about_prompt}
    assert cut.body == {**cut.plain.body, **EXACT_END}
    assert json.loads(cut.encode()) == cut.body


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_prefix_has_the_bytes_of_the_prompt(plan: ContextPlan, blocks: int, parts: bool) -> None:
    request = sent("chat", messages=messages_for(plan, "Why?", preamble="Be brief.", parts=parts))
    cut = prefix_of(request, plan, blocks)
    whole, prefix = request.prompt.replace("\n", ""), cut.prompt.replace("\n", "")
    assert whole.startswith(prefix)
    assert [block.text.strip() in cut.prompt for block in BLOCKS] == [place < blocks for place in range(3)]


def test_other_routes_are_cut_too(plan: ContextPlan) -> None:
    text = f"{plan.render()}\n\nWhy?"
    first = f"{BLOCKS[0].text}\n\nT"
    completion = prefix_of(sent("completions", prompt=text, max_tokens=9, echo=True), plan, 1)
    assert completion.body == {"model": "m", "prompt": first, "max_tokens": 1}
    message = {"role": "user", "content": text}
    anthropic = prefix_of(sent("messages", system="S", messages=[message], max_tokens=9), plan, 1)
    assert anthropic.body["messages"] == [{"role": "user", "content": first}]
    assert (anthropic.body["system"], anthropic.body["max_tokens"], anthropic.plain) == ("S", 1, None)
    for given, left in (
        (text, first),
        ([message], [{"role": "user", "content": first}]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": text}]}, {"role": "user", "content": "x"}],
            [{"role": "user", "content": [{"type": "input_text", "text": first}]}],
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": text}],
            [{"type": "function_call_output", "call_id": "c", "output": first}],
        ),
    ):
        response = prefix_of(sent("responses", input=given, instructions="I", stream=True), plan, 1)
        assert response.body == {
            "model": "m",
            "instructions": "I",
            "input": left,
            "max_output_tokens": 1,
            "store": False,
        }


def test_a_prompt_that_ends_with_the_blocks_is_cut_at_its_end(plan: ContextPlan) -> None:
    cut = prefix_of(sent("completions", prompt=plan.render()), plan, 3)
    assert cut.body["prompt"] == plan.render()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat", {"messages": []}),
        ("chat", {"messages": None}),
        ("chat", {"messages": [None, 7, "x"]}),
        ("chat", {"messages": [{"role": "user", "content": "other"}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("chat", {"prompt": "x"}),
        ("completions", {"prompt": [1, 2, 3]}),
        ("completions", {"prompt": [[1, 2], [3]]}),
        ("responses", {"input": "TEXT", "previous_response_id": "resp_1"}),
        ("responses", {"input": "TEXT", "conversation": "conv_1"}),
        ("responses", {"input": [{"type": "item_reference", "id": "i"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "TEXT"}]}]}),
    ],
)
def test_what_does_not_show_the_blocks_is_not_cut(plan: ContextPlan, route: str, body: dict[str, Any]) -> None:
    body = json.loads(json.dumps(body).replace('"TEXT"', json.dumps(plan.render())))
    assert end_of_blocks(sent(route, **body), plan, 1) is None


@pytest.mark.parametrize("blocks", [-1, 0, 4])
def test_blocks_that_the_plan_lacks_have_no_end(plan: ContextPlan, blocks: int) -> None:
    assert end_of_blocks(sent("completions", prompt=plan.render()), plan, blocks) is None


def test_an_image_in_front_of_the_blocks_is_left_alone(plan: ContextPlan) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    content = [image, {"type": "text", "text": plan.render()}]
    assert end_of_blocks(sent("chat", messages=[{"role": "user", "content": content}]), plan, 1) is None


def test_surrogates_survive() -> None:
    plan = ContextPlanner().plan(["one \ud800 text", "two"], order_locked=True)
    cut = prefix_of(sent("completions", prompt=plan.render()), plan, 1)
    assert json.loads(cut.encode())["prompt"] == "one \ud800 text\n\nt"
