"""Scripted answers with tool calls, to the real SDKs, streamed or not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
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


@pytest.mark.parametrize("text", ["", "{}", '["a"]', "[{}]", '[{"calls": [{}]}]', '[{"text": 7}]', BAD_ARGUMENTS])
def test_a_script_that_is_wrong_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(ScriptError):
        AnswerScript.read(tmp_path / "script.json")


def test_a_cut_answer_has_no_calls(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps(SCRIPT))
    answer = AnswerScript.read(tmp_path / "script.json").answer(0, 2)
    assert answer is not None
    assert (answer.finish_reason, answer.calls, len(answer.pieces)) == ("length", (), 2)
