"""SDKs and frameworks without plugins, through the gateway to a scripted emulator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integrations.gateway.conftest import INSTANT, metric

from warmprefix_gateway import GatewayServer
from warmprefix_tools.emulator import EmulatorServer

anthropic = pytest.importorskip("anthropic")

Make = Callable[..., GatewayServer]
SEA = "The sea is 3,688 metres deep on average. " * 30
CALL = {"calls": [{"name": "read", "arguments": {"path": "sea.txt"}}]}
ANSWER = "It is 3,688 metres deep."
MODEL = INSTANT.model
QUESTION = {"role": "user", "content": "How deep is the sea?"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmulatorServer]:
    """An emulator whose answers read one file three times."""
    (tmp_path / "script.json").write_text(json.dumps([CALL, CALL, CALL, {"text": ANSWER}]))
    with EmulatorServer(replace(INSTANT, script=tmp_path / "script.json")) as server:
        yield server


@pytest.fixture
def gateway(engine: EmulatorServer, gateway_of: Make) -> Iterator[GatewayServer]:
    gateway = gateway_of(engine.base_url)
    yield gateway
    assert metric(gateway, "references_total") == 1 + 2
    assert metric(gateway, "failures_total") == 0
    assert metric(gateway, "uncached_tokens_total", cause="lost") < 0.2 * metric(gateway, "prompt_tokens_total")


@pytest.mark.parametrize("stream", [False, True])
def test_chat(gateway: GatewayServer, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    messages: list[Any] = [QUESTION]
    with openai.OpenAI(base_url=gateway.base_url, api_key="none") as client:
        while True:
            if stream:
                with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as events:
                    answer: Any = events.get_final_completion()
            else:
                answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            message = answer.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": SEA} for call in message.tool_calls]
    assert message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_responses(gateway: GatewayServer, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}]
    items: list[Any] = [QUESTION]
    with openai.OpenAI(base_url=gateway.base_url, api_key="none") as client:
        while True:
            if stream:
                with client.responses.stream(model=MODEL, input=items, tools=tools) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = client.responses.create(model=MODEL, input=items, tools=tools)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": SEA} for call in calls]
    assert answer.output_text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_messages(gateway: GatewayServer, stream: bool) -> None:
    tools: Any = [{"name": "read", "input_schema": {"type": "object"}}]
    messages: list[Any] = [QUESTION]
    with anthropic.Anthropic(base_url=gateway.url, api_key="none") as client:
        while True:
            asked: Any = {"model": MODEL, "max_tokens": 500, "messages": messages, "tools": tools}
            if stream:
                with client.messages.stream(**asked) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(**asked)
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                break
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": SEA} for use in uses]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert answer.content[-1].text == ANSWER


def test_langchain(gateway: GatewayServer) -> None:
    agents = pytest.importorskip("langchain.agents")
    models = pytest.importorskip("langchain_openai")

    def read(path: str) -> str:
        """Read a file."""
        return SEA

    model = models.ChatOpenAI(model=MODEL, base_url=gateway.base_url, api_key="none")
    state = agents.create_agent(model, [read]).invoke({"messages": [QUESTION]})
    assert state["messages"][-1].content == ANSWER


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_llamaindex(gateway: GatewayServer) -> None:
    workflows = pytest.importorskip("llama_index.core.agent.workflow")
    llms = pytest.importorskip("llama_index.llms.openai_like")

    def read(path: str) -> str:
        """Read a file."""
        return SEA

    llm = llms.OpenAILike(
        model=MODEL,
        api_base=gateway.base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=60_000,
    )
    agent = workflows.FunctionAgent(tools=[read], llm=llm)
    assert str(await agent.run("How deep is the sea?")) == ANSWER


def test_the_example_of_a_sub_agent(engine: EmulatorServer, gateway_of: Make) -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    gateway = gateway_of(engine.base_url)
    with openai.OpenAI(base_url=gateway.base_url, api_key="none") as client:
        names: dict[str, Any] = {"client": client, "model_name": MODEL}
        exec(code, names)
    assert names["answer"].choices[0].message.content
    assert names["child"]["messages"][:1] == names["parent"]["messages"]
