"""Streamed chat completions, put together again."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from warmprefix_openai import BrokenStreamError
from warmprefix_openai.completion import Assembly, ChatReader, EngineFailedError

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
def test_the_result_is_that_of_openais_own_helper(chunks: list[dict[str, Any]]) -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for each in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(each))
    helped: dict[str, Any] = json.loads(state.current_completion_snapshot.to_json(warnings=False))
    for choice in helped["choices"]:
        for each in choice["message"].get("tool_calls") or ():
            del each["index"]  # a field of events only
    ours = assembled(chunks).completion()
    assert ours["object"] == "chat.completion"
    assert plain({**helped, "object": "chat.completion"}) == plain(ours)


def plain(completion: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that OpenAI's types define."""
    return ChatCompletion.model_validate(completion).model_dump(exclude_none=True)


def test_several_choices_may_come_interleaved() -> None:
    chunks = [chunk({"content": "b"}, None, 1), chunk({"content": "a"}, "stop", 0), chunk({"content": "c"}, None, 1)]
    assembly = assembled(chunks)
    assert not assembly.complete
    assembly.add(chunk({}, "length", 1))
    assert assembly.complete
    found = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in assembly.completion()["choices"]]
    assert found == [(0, "a", "stop"), (1, "bc", "length")]


def test_fields_that_engines_add_are_kept() -> None:
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


def events_of(chunks: list[dict[str, Any]], end: str = "\n") -> bytes:
    lines = [*(json.dumps(each, ensure_ascii=False) for each in chunks), "[DONE]"]
    return "".join(f": a comment{end}{end}event: x{end}data:{line}{end}{end}" for line in lines).encode()


def started(chunks: list[dict[str, Any]]) -> bool:
    reader = ChatReader()
    reader.feed(events_of(chunks))
    assert (reader.facts.ttft is not None) is reader.facts.started
    return reader.facts.started


def test_ttft_is_measured_at_the_first_token() -> None:
    for role in ({"role": "assistant"}, {"role": "assistant", "content": ""}, {"content": None}, {}):
        assert not started([chunk(role)])
        assert not started([chunk(role, usage={"prompt_tokens": 1})])
    for token in ({"content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}):
        assert started([chunk(token)])
    assert started([chunk({}, "stop")])
    assert started([chunk(None, usage={"prompt_tokens": 1})])  # the model has read the prompt, without any answer


def test_ttft_counts_from_the_request() -> None:
    times = iter((10.0, 10.5, 12.0, 13.0))
    reader = ChatReader(clock=lambda: next(times))
    assert reader.feed(events_of(TEXT[:1]).removesuffix(b"data:[DONE]\n\n")) == ""
    assert reader.feed(events_of(TEXT[1:])) == "A prefix is warm."
    assert (reader.facts.ttft, reader.latest) == (0.5, 12.0)


@given(cuts=st.sets(st.integers(0, 1_500)), end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_an_answer_is_the_same_however_its_stream_is_cut(cuts: set[int], end: str) -> None:
    text = "\u2028a\x85b\u2029\x7f\U0001f600\ufeff"
    stream = events_of([TEXT[0], chunk({"content": text}), *TEXT[1:]], end)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = ChatReader()
    pieces = [reader.feed(stream[start:stop]) for start, stop in itertools.pairwise(places)]
    answer = reader.answer()
    assert "".join(pieces) == answer.text == f"{text}A prefix is warm."
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == ("stop", 9, 2)


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (b"", BrokenStreamError, "the stream ended before the answer did"),
        (events_of(TEXT[:3]).partition(b"[DONE]")[0], BrokenStreamError, "the stream ended before the answer did"),
        (events_of(TEXT[:1]), BrokenStreamError, "the stream ended before the answer did"),
        (b"data: {no json\n\n", BrokenStreamError, "the stream broke: JSONDecodeError: "),
        (b"data: 5\n\n", BrokenStreamError, "the stream ended before the answer did"),
        (b"data: " + b"[" * 100_000 + b"\n\n", BrokenStreamError, "the stream broke: ValueError: too deep"),
        (b'data: {"error": {"message": "no", "code": [1]}}\n\n', EngineFailedError, "no"),
        (b'data: {"error": "no"}\n\n', EngineFailedError, "no"),
    ],
)
def test_a_stream_without_an_answer_is_an_error(stream: bytes, error: type[Exception], message: str) -> None:
    reader = ChatReader()
    with pytest.raises(error) as raised:
        reader.feed(stream), reader.answer()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "choices", [7, [7], [{"index": "0"}], [{"delta": 7}], [{"delta": {"tool_calls": [7, {"index": 0}]}, "message": 7}]]
)
def test_fields_of_another_type_are_skipped(choices: Any) -> None:
    reader = ChatReader()
    reader.feed(events_of([{"choices": choices, "usage": 7}, *TEXT]))
    answer = reader.answer()
    assert (answer.text, answer.prompt_tokens) == ("A prefix is warm.", 9)


def test_no_event_is_no_answer() -> None:
    assert not Assembly().complete
    assert Assembly().completion() == {"usage": None, "object": "chat.completion", "choices": []}
