"""`ContextReuseLLM` is the model in it, except for what tool messages hold."""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import BaseModel, Field, ValidationError
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.llms import MockLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from warmprefix_llamaindex import ContextReuseLLM

EVIDENCE = "The sea covers seven tenths of the planet and is 3,688 metres deep on average. " * 4


def called(key: str) -> ChatMessage:
    call = {"id": key, "type": "function", "function": {"name": "search", "arguments": '{"input":"sea"}'}}
    return ChatMessage(role="assistant", content=None, additional_kwargs={"tool_calls": [call]})


def tool_message(key: str) -> ChatMessage:
    return ChatMessage(role="tool", content=EVIDENCE, additional_kwargs={"tool_call_id": key, "name": "search"})


HISTORY = [
    ChatMessage(role="user", content="How deep?"),
    called("call_1"),
    tool_message("call_1"),
    called("call_2"),
    tool_message("call_2"),
]
SENT = [message.content for message in HISTORY]
REFERENCE = '[Word for word the result of the earlier call search({"input":"sea"}).]'


@pytest.fixture
def engine(start_engine: Any) -> Any:
    return start_engine()


@pytest.fixture
async def model(engine: Any, open_model: Any) -> AsyncIterator[Any]:
    async with open_model(engine) as model:
        yield model


@pytest.fixture
def llm(model: Any) -> ContextReuseLLM:
    return ContextReuseLLM(llm=model)


def received(engine: Any) -> list[str]:
    """Of the last request, what the messages hold."""
    return [message["content"] for message in engine.bodies[-1]["messages"]]


async def test_every_way_to_chat_sends_a_repeat_as_a_reference(engine: Any, llm: ContextReuseLLM) -> None:
    tool = FunctionTool.from_defaults(fn=lambda query: query, name="search", description="Finds.")
    answers = [
        llm.chat(HISTORY),
        list(llm.stream_chat(HISTORY))[-1],
        await llm.achat(messages=HISTORY),
        [answer async for answer in await llm.astream_chat(HISTORY)][-1],
        llm.chat_with_tools([tool], chat_history=HISTORY),
        list(llm.stream_chat_with_tools([tool], chat_history=HISTORY))[-1],
        await llm.achat_with_tools([tool], chat_history=HISTORY, allow_parallel_tool_calls=True),
        [answer async for answer in await llm.astream_chat_with_tools([tool], "And how wide?", HISTORY)][-1],
    ]
    assert all(answer.message.content for answer in answers)
    assert len(engine.bodies) == 8
    for body in engine.bodies:
        question, _, first, _, second, *_ = (message["content"] for message in body["messages"])
        assert (question, first, second) == ("How deep?", EVIDENCE, REFERENCE)
    assert received(engine)[-1] == "And how wide?"
    assert [message.content for message in HISTORY] == SENT


async def test_what_has_no_messages_is_passed_on(engine: Any, llm: ContextReuseLLM) -> None:
    assert llm.complete("How deep?").text
    assert list(llm.stream_complete("How deep?"))[-1].text
    assert (await llm.acomplete("How deep?")).text
    assert [answer async for answer in await llm.astream_complete("How deep?")][-1].text
    assert llm.predict(PromptTemplate("How {what}?"), what="deep")
    assert [received(engine)] * 5 == [[m["content"] for m in body["messages"]] for body in engine.bodies]


class Depth(BaseModel):
    metres: int


def depth_call() -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "Depth", "arguments": '{"metres": 3688}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def test_structured_answers(engine: Any, llm: ContextReuseLLM) -> None:
    prompt = PromptTemplate("How deep?")
    engine.script(*[depth_call()] * 5)
    assert llm.structured_predict(Depth, prompt) == Depth(metres=3688)
    assert await llm.astructured_predict(Depth, prompt) == Depth(metres=3688)
    assert list(llm.stream_structured_predict(Depth, prompt))[-1] == Depth(metres=3688)
    stream = await llm.astream_structured_predict(Depth, prompt)
    assert [partial async for partial in stream][-1] == Depth(metres=3688)
    answer = await llm.as_structured_llm(Depth).achat(HISTORY)
    assert json.loads(answer.message.content or "") == {"metres": 3688}
    assert received(engine) == SENT


async def test_predict_and_call(engine: Any, llm: ContextReuseLLM) -> None:
    tool = FunctionTool.from_defaults(fn=lambda metres: f"{metres} m", name="Depth", description="Formats a depth.")
    engine.script(depth_call(), depth_call())
    assert llm.predict_and_call([tool], chat_history=HISTORY).response == "3688 m"
    assert (await llm.apredict_and_call([tool], chat_history=HISTORY)).response == "3688 m"
    assert received(engine) == [*SENT[:4], REFERENCE]


def test_it_passes_for_the_model(model: Any, llm: ContextReuseLLM) -> None:
    assert isinstance(llm, FunctionCallingLLM)
    assert llm.metadata == model.metadata
    assert llm.class_name() == "ContextReuseLLM"


@pytest.fixture
def settings() -> Iterator[Any]:
    yield Settings
    Settings._llm = None
    Settings._callback_manager = None


async def test_one_model_one_set_of_settings(engine: Any, model: Any, settings: Any) -> None:
    model.system_prompt = "Be brief."
    llm = ContextReuseLLM(llm=model)
    assert llm.system_prompt == "Be brief."
    assert llm.callback_manager is model.callback_manager
    handler = LlamaDebugHandler(print_trace_on_end=False)
    settings.callback_manager = CallbackManager([handler])
    settings.llm = llm
    assert settings.llm is llm
    assert model.callback_manager is llm.callback_manager is settings.callback_manager
    await settings.llm.achat(HISTORY)
    [[start, end]] = handler.get_event_pairs(CBEventType.LLM)
    assert start.payload
    assert end.payload
    assert ContextReuseLLM(llm=model, system_prompt="Be kind.").llm.system_prompt == "Be kind."


def test_it_can_be_pickled_and_described(llm: ContextReuseLLM) -> None:
    chosen = ContextReuseLLM(llm=llm.llm, tools=["search"], separator="\n\n", min_tokens=9)
    again = pickle.loads(pickle.dumps(chosen))
    assert type(again.llm) is type(llm.llm)
    assert again.metadata == chosen.metadata
    for copy in (again, chosen.model_copy(), ContextReuseLLM.from_dict({**chosen.to_dict(), "llm": llm.llm})):
        assert (copy.tools, copy.separator, copy.min_tokens) == (["search"], "\n\n", 9)
    assert chosen.to_dict()["class_name"] == "ContextReuseLLM"
    assert chosen.to_dict()["llm"]["class_name"] == "OpenAILike"


@pytest.mark.parametrize("wrong", [{"min_tokens": -1}, {"separator": ""}, {"tools": "search"}])
def test_errors_name_the_option_and_its_value(model: Any, wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(ValidationError, match=rf"{name}\n.*{re.escape(repr(value))}"):
        ContextReuseLLM(llm=model, system_prompt="Be kind.", **wrong)
    assert model.system_prompt is None


def test_a_model_that_calls_no_functions_is_refused() -> None:
    mute: Any = MockLLM()
    with pytest.raises(ValidationError, match="FunctionCallingLLM"):
        ContextReuseLLM(llm=mute)


def test_wrapping_twice_is_refused(llm: ContextReuseLLM) -> None:
    with pytest.raises(ValidationError, match="llm must be a plain model, got a ContextReuseLLM"):
        ContextReuseLLM(llm=llm)


async def test_options_reach_the_messages(engine: Any, model: Any) -> None:
    llm = ContextReuseLLM(llm=model, tools=["calculator"])
    await llm.achat(HISTORY)
    assert received(engine) == SENT
    llm = ContextReuseLLM(llm=model, min_tokens=10_000)
    await llm.achat(HISTORY)
    assert received(engine)[4] == EVIDENCE


async def test_a_failure_is_logged_once_and_the_call_goes_on(
    engine: Any, llm: ContextReuseLLM, caplog: pytest.LogCaptureFixture
) -> None:
    odd = ChatMessage(role="tool", content="Odd.", additional_kwargs={"tool_call_id": ["unhashable"]})
    llm.tools = ["search"]
    await llm.achat(HISTORY)
    as_before = received(engine)
    assert as_before[4] == REFERENCE
    with caplog.at_level(logging.DEBUG, "warmprefix"):
        for _ in range(2):
            await llm.achat([*HISTORY, odd, tool_message("call_1")])
            assert received(engine) == [*as_before, "Odd.", EVIDENCE]
    assert [record.levelname for record in caplog.records if record.name == "warmprefix"] == ["WARNING", "DEBUG"]


# What the model copies from a reference

COPY = {"path": "copy.txt", "content": f"As {REFERENCE}"}
MEANT = {**COPY, "content": f"As {EVIDENCE}"}


async def answers_of(llm: ContextReuseLLM, history: list[ChatMessage]) -> list[list[Any]]:
    """Return the chunks of an answer in every way to chat."""
    tool = FunctionTool.from_defaults(fn=lambda path, content: "done", name="write", description="Writes a file.")
    return [
        [llm.chat(history)],
        list(llm.stream_chat(history)),
        [await llm.achat(history)],
        [chunk async for chunk in await llm.astream_chat(history)],
        [llm.chat_with_tools([tool], chat_history=history)],
        list(llm.stream_chat_with_tools([tool], chat_history=history)),
        [await llm.achat_with_tools([tool], chat_history=history)],
        [chunk async for chunk in await llm.astream_chat_with_tools([tool], chat_history=history)],
    ]


def arguments_in(chunk: Any) -> list[str]:
    blocks = [block.tool_kwargs for block in chunk.message.blocks if hasattr(block, "tool_kwargs")]
    return blocks + [call.function.arguments for call in chunk.message.additional_kwargs.get("tool_calls", ())]


def write_call(arguments: str) -> dict[str, Any]:
    call = {"id": "call_3", "type": "function", "function": {"name": "write", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def test_every_way_to_chat_restores_a_copied_reference(engine: Any, llm: ContextReuseLLM) -> None:
    engine.script(*[write_call(json.dumps(COPY))] * 8)
    restored = json.dumps(MEANT)
    for chunks in await answers_of(llm, HISTORY):
        assert [json.loads(arguments) for arguments in arguments_in(chunks[-1])] in ([MEANT], [MEANT, MEANT])
        [selection] = llm.get_tool_calls_from_response(chunks[-1])
        assert selection.tool_kwargs == MEANT
    assert llm.restored == 8
    assert pickle.loads(pickle.dumps(llm)).restored == 0

    engine.script(write_call(json.dumps(COPY)))
    shown = [arguments for chunk in llm.stream_chat(HISTORY) for arguments in arguments_in(chunk) if arguments]
    for arguments in shown:
        assert restored.startswith(arguments) or json.dumps(COPY).startswith(arguments)
    assert restored in shown


async def test_other_arguments_stay(engine: Any, llm: ContextReuseLLM) -> None:
    """As those of a prompt without references, those that are cut off, and a reference of another prompt."""
    cut = json.dumps(COPY)[:-20]
    forged = json.dumps({"content": REFERENCE.replace("sea", "secret"), "path": "[W"})
    for history, arguments in ((HISTORY[:3], json.dumps(COPY)), (HISTORY, cut), (HISTORY, forged)):
        engine.script(*[write_call(arguments)] * 8)
        for chunks in await answers_of(llm, history):
            assert set(arguments_in(chunks[-1])) == {arguments}
    assert llm.restored == 0


class OddCall:
    """A call that nothing can copy."""

    arguments = json.dumps(COPY)


class OddModel(OpenAILike):  # type: ignore[misc]
    """Answers with calls in the shapes of other model packages."""

    calls: list[Any] = Field(default_factory=list)

    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        return ChatResponse(message=ChatMessage(role="assistant", additional_kwargs={"tool_calls": self.calls}))


def test_calls_of_other_model_packages(caplog: pytest.LogCaptureFixture) -> None:
    function = {"name": "write", "arguments": COPY}
    calls: list[Any] = [{"id": "1", "name": "write", "input": COPY}, {"function": function}, {"arguments": None}]
    llm = ContextReuseLLM(llm=OddModel(model="m", is_chat_model=True, is_function_calling_model=True, calls=calls))
    answer = llm.chat(HISTORY)
    first, second, third = answer.message.additional_kwargs["tool_calls"]
    assert (first["input"], second["function"]["arguments"], third) == (MEANT, MEANT, calls[2])
    assert (calls[0]["input"], function["arguments"], llm.restored) == (COPY, COPY, 2)
    odd = OddCall()
    llm = ContextReuseLLM(llm=OddModel(model="m", is_chat_model=True, is_function_calling_model=True, calls=[odd]))
    with caplog.at_level(logging.DEBUG, "warmprefix"):
        assert llm.chat(HISTORY).message.additional_kwargs["tool_calls"] == [odd]
    assert [record.levelname for record in caplog.records if record.name == "warmprefix"] == ["WARNING"]
