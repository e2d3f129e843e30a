"""Chunks of streamed answers, put together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from warmprefix.openai.batch_runner.assembly import Assembly

FRAME = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}


def chunk(delta: dict[str, Any] | None, reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}]
    return {**FRAME, "choices": choices, **more}


def call(index: int, arguments: str, name: str | None = None, **more: str) -> dict[str, Any]:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"index": index, **more, "function": function}


CALLS = [
    chunk({"role": "assistant", "content": None}),
    chunk({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "find", "arguments": ""}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"q"'}}]}),
    chunk({"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "add", "arguments": "{"}}]}),
    chunk(
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}, {"index": 1, "function": {"arguments": "}"}}]}
    ),
    chunk({}, "tool_calls"),
    chunk(None, usage={"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}),
]
TEXT = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "A prefix"}),
    chunk({"content": " is warm."}),
    chunk({"content": ""}, "stop"),
    chunk(None, usage={"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}),
]


def assembled(chunks: list[dict[str, Any]]) -> Assembly:
    assembly = Assembly()
    for each in json.loads(json.dumps(chunks)):
        assembly.add(each)
    return assembly


@pytest.mark.parametrize("chunks", [TEXT, CALLS], ids=["text", "tool calls"])
def test_it_is_what_openais_own_helper_makes_of_them(chunks: list[dict[str, Any]]) -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for each in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(each))
    helped: dict[str, Any] = json.loads(state.current_completion_snapshot.to_json(warnings=False))
    for choice in helped["choices"]:
        for each in choice["message"].get("tool_calls") or ():
            del each["index"]  # which is of chunks only
    ours = assembled(chunks).completion()
    assert ours["object"] == "chat.completion"
    assert plain({**helped, "object": "chat.completion"}) == plain(ours)


def plain(completion: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's types know of it."""
    return ChatCompletion.model_validate(completion).model_dump(exclude_none=True)


def test_several_choices_come_interleaved() -> None:
    chunks = [chunk({"content": "b"}, None, 1), chunk({"content": "a"}, "stop", 0), chunk({"content": "c"}, None, 1)]
    assembly = assembled(chunks)
    assert not assembly.complete
    assembly.add(chunk({}, "length", 1))
    assert assembly.complete
    found = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in assembly.completion()["choices"]]
    assert found == [(0, "a", "stop"), (1, "bc", "length")]


def test_what_engines_add_is_kept() -> None:
    first = chunk({"role": "assistant", "reasoning_content": "Hm"})
    first["choices"][0]["logprobs"] = {"content": [{"token": "Hm"}], "refusal": None}
    last = chunk(
        {"role": "assistant", "reasoning_content": "m."}, "stop", system_fingerprint="x", usage={"prompt_tokens": 1}
    )
    last["choices"][0] |= {"stop_reason": 128009, "logprobs": {"content": [{"token": "m."}]}}
    completion = assembled([first, last, chunk(None, usage=None)]).completion()
    assert completion == {
        **FRAME,
        "object": "chat.completion",
        "usage": {"prompt_tokens": 1},
        "system_fingerprint": "x",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": None, "reasoning_content": "Hmm."},
                "logprobs": {"content": [{"token": "Hm"}, {"token": "m."}], "refusal": None},
                "finish_reason": "stop",
                "stop_reason": 128009,
            }
        ],
    }


def test_the_first_token_is_the_first_that_says_something() -> None:
    for quiet in ({"role": "assistant"}, {"role": "assistant", "content": ""}, {"content": None}, {}):
        assert not assembled([chunk(quiet)]).started
    assert not assembled([chunk(None, usage={"prompt_tokens": 1})]).started
    for telling in ({"content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}):
        assert assembled([chunk(telling)]).started
    assert assembled([chunk({}, "stop")]).started


def test_nothing_is_no_answer() -> None:
    assert not Assembly().complete
    assert Assembly().completion() == {"usage": None, "object": "chat.completion", "choices": []}
