"""Scripted answers with tool calls, to the real SDKs, streamed or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer, encode
from warmprefix_tools.emulator.scripts import AnswerScript, ScriptError

anthropic = pytest.importorskip("anthropic")

SCRIPT = [
    {"text": "Let me look.", "calls": [{"name": "read", "arguments": {"path": "a"}}, {"name": "run"}]},
    {"calls": [{"name": "read", "arguments": '{"path":"b"}'}]},
    {"text": "It is deep."},
]
CALLS = [[("read", {"path": "a"}), ("run", {})], [("read", {"path": "b"})], [], []]
TEXTS = ["Let me look.", "", "It is deep."]
MODEL = "warmprefix-emulator"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmulatorServer]:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    config = EmulatorConfig(
        prefill_rate=math.inf, decode_rate=math.inf, base_ttft_ms=0, script=tmp_path / "script.json"
    )
    with EmulatorServer(config) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_runs_the_loop(server: EmulatorServer, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    messages: list[Any] = [{"role": "user", "content": "How deep?"}]
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        for turn in range(4):
            if stream:
                with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as events:
                    answer: Any = events.get_final_completion()
            else:
                answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            message = answer.choices[0].message
            made = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
            assert made == CALLS[turn]
            assert answer.choices[0].finish_reason == ("tool_calls" if made else "stop")
            assert turn == 3 or (message.content or "") == TEXTS[turn]
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls or []]
        plain = client.chat.completions.create(model=MODEL, messages=messages[:1])
        assert plain.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_runs_the_loop(server: EmulatorServer, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "How deep?"}]
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        for turn in range(4):
            if stream:
                with client.responses.stream(model=MODEL, input=items, tools=tools) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = client.responses.create(model=MODEL, input=items, tools=tools)
            calls = [item for item in answer.output if item.type == "function_call"]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS[turn]
            assert turn == 3 or answer.output_text == TEXTS[turn]
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_runs_the_loop(server: EmulatorServer, stream: bool) -> None:
    tools: Any = [{"name": "read", "input_schema": {"type": "object"}}]
    messages: list[Any] = [{"role": "user", "content": "How deep?"}]
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        for turn in range(4):
            asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": tools}
            if stream:
                with client.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
            uses = [block for block in answer.content if block.type == "tool_use"]
            assert [(use.name, use.input) for use in uses] == CALLS[turn]
            assert answer.stop_reason == ("tool_use" if uses else "end_turn")
            messages.append(
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}
            )
            if uses:
                results = [{"type": "tool_result", "tool_use_id": use.id, "content": "x"} for use in uses]
                messages.append({"role": "user", "content": results})


BAD_ARGUMENTS = '[{"calls": [{"name": "read", "arguments": "{"}]}]'


WHEN = '[{"when": "", "text": "a"}]'


@pytest.mark.parametrize("text", ["", "{}", '["a"]', "[{}]", '[{"calls": [{}]}]', '[{"text": 7}]', BAD_ARGUMENTS, WHEN])
def test_a_script_that_is_wrong_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(ScriptError):
        AnswerScript.read(tmp_path / "script.json")


def test_a_cut_answer_has_no_calls(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    answer = AnswerScript.read(tmp_path / "script.json").answer(0, 2)
    assert answer is not None
    assert (answer.finish_reason, answer.calls, len(answer.pieces)) == ("length", (), 2)


def test_an_answer_for_a_text_goes_to_all_bodies_that_have_it(tmp_path: Path) -> None:
    entries = [*SCRIPT, {"when": 'the "memory" of Ünal', "text": "{}"}, {"when": "memory", "text": "[]"}]
    (tmp_path / "script.json").write_text(json.dumps(entries))
    with (
        EmulatorServer(EmulatorConfig(base_ttft_ms=0, script=tmp_path / "script.json")) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
        anthropic.Anthropic(base_url=server.url, api_key="none") as claude,
    ):
        for question, wanted in (('Keep the "memory" of Ünal.', "{}"), ("A memory?", "[]")):
            messages: Any = [{"role": "user", "content": question}]
            assert client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == wanted
            assert client.responses.create(model=MODEL, input=question).output_text == wanted
            answer = claude.messages.create(model=MODEL, messages=messages, max_tokens=50)
            assert answer.content[0].text == wanted
        plain = client.responses.create(model=MODEL, input="How deep?")
        assert plain.output_text.startswith("[warmprefix emulator")


def test_texts_with_the_same_words_have_near_embeddings(server: EmulatorServer) -> None:
    texts = ["the sea is deep", "how deep is the sea", "", "prices fell in march"]
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        packed = client.embeddings.create(model=MODEL, input=texts)  # the SDK asks for base64
        plain = client.embeddings.create(model=MODEL, input=encode(texts[0]), encoding_format="float", dimensions=8)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model=MODEL, input=[])
    sea, question, nothing, prices = (each.embedding for each in packed.data)
    assert {len(each.embedding) for each in packed.data} == {1536}
    assert len(plain.data[0].embedding) == 8
    assert packed.usage.prompt_tokens == sum(len(encode(each)) for each in texts)
    assert math.isclose(math.hypot(*nothing), 1)

    def likeness(one: list[float], other: list[float]) -> float:
        return sum(left * right for left, right in zip(one, other, strict=True))

    assert likeness(sea, question) > likeness(sea, prices) + 0.3
