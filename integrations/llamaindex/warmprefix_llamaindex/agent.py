"""`ContextReuseLLM`: tail placement for agents, whose retrievals are tool messages and stay in the history."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, SerializeAsAny, model_validator
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from pydantic import InstanceOf
from typing_extensions import Self

from warmprefix import Templates
from warmprefix_llamaindex.tail import refer_to_repeats

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

__all__ = ["ContextReuseLLM"]

_log = logging.getLogger("warmprefix")

_SHARED = tuple(LLM.model_fields)
"""Settings that every language model has: one value for the wrapper and the model in it."""


class ContextReuseLLM(FunctionCallingLLM):
    """A function-calling model that is told nothing twice: `FunctionAgent(tools=..., llm=ContextReuseLLM(llm=llm))`.

    In each prompt that passes through, a context block in a tool message is labelled, and a block that an earlier tool
    message of the same prompt holds becomes a reference to it. All else is the model's own.

    It stands at the model because nothing before it sees the whole prompt: an agent's memory holds the runs before
    this one only, and a tool does not know what the model still sees. It looks at no state but the messages, and
    changes none: memory, events and the agent's context keep the raw text. So a retry, a fork, parallel tool calls, a
    memory that flushes, truncates or summarises can't leave a reference dangling, and a history that only grows
    keeps its bytes. The order stays, for behind a question of its own nobody shares a prompt.

    Failed tool calls are not marked in a message; what makes them stay as they are is that they are short.
    `structured_predict` passes its prompt on unchanged: agents quote the conversation in it, without tool messages.
    """

    llm: SerializeAsAny[FunctionCallingLLM] = Field(description="The model that answers.")
    tools: list[str] | None = Field(default=None, description="Names of the tools to look at; None for all.")
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="What stands between the blocks of a text: a blank line for a plain `RetrieverTool`. None if a "
        "text is one block, as those of a `ContextReuseRetrieverTool` are.",
    )
    min_tokens: int = Field(default=64, ge=0, description="A block shorter than this stays as it is.")
    templates: InstanceOf[Templates] | None = Field(
        default=None, exclude=True, description="The wording of the references."
    )

    _failed: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _take_settings(cls, values: dict[str, Any]) -> dict[str, Any]:
        llm = values.get("llm")
        if not isinstance(llm, FunctionCallingLLM):
            return values  # and let pydantic say so
        if isinstance(llm, ContextReuseLLM):
            raise ValueError("llm is a ContextReuseLLM already; one is enough for any number of tools")
        return {**{name: getattr(llm, name) for name in _SHARED}, **values}

    @model_validator(mode="after")
    def _give_settings(self) -> Self:
        for name in _SHARED:
            setattr(self.llm, name, getattr(self, name))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it on the model too, if that has it: `Settings` and others hand callback managers over so."""
        super().__setattr__(name, value)
        if name in _SHARED:
            setattr(self.llm, name, value)

    @classmethod
    def class_name(cls) -> str:
        return "ContextReuseLLM"

    @property
    def metadata(self) -> LLMMetadata:
        return self.llm.metadata

    def _told(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """What the model is told. The one place where a failure degrades: from there on, messages are as they came."""
        told: list[ChatMessage] = []
        try:
            for message in refer_to_repeats(
                messages,
                tools=self.tools,
                separator=self.separator,
                min_tokens=self.min_tokens,
                templates=self.templates,
            ):
                told.append(message)  # noqa: PERF402  (those before a failure keep the bytes that were sent already)
        except Exception:
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            _log.log(level, "tool messages stay as they are", exc_info=True)
            told += messages[len(told) :]
        return told

    # -- with messages: told, then passed on ---------------------------------------------------------------------

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.llm.chat(self._told(messages), **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self.llm.stream_chat(self._told(messages), **kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self.llm.achat(self._told(messages), **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return await self.llm.astream_chat(self._told(messages), **kwargs)

    def chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponse:
        return self.llm.chat_with_tools(tools, user_msg, self._told(chat_history or []), *args, **kwargs)

    def stream_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponseGen:
        return self.llm.stream_chat_with_tools(tools, user_msg, self._told(chat_history or []), *args, **kwargs)

    async def achat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponse:
        return await self.llm.achat_with_tools(tools, user_msg, self._told(chat_history or []), *args, **kwargs)

    async def astream_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponseAsyncGen:
        return await self.llm.astream_chat_with_tools(tools, user_msg, self._told(chat_history or []), *args, **kwargs)

    # -- without: passed on --------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        prepare = self.llm._prepare_chat_with_tools  # noqa: SLF001  (abstract in the base class of both)
        return prepare(tools, user_msg, chat_history, *args, **kwargs)

    def get_tool_calls_from_response(self, response: ChatResponse, *args: Any, **kwargs: Any) -> list[ToolSelection]:
        return self.llm.get_tool_calls_from_response(response, *args, **kwargs)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self.llm.complete(prompt, formatted, **kwargs)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self.llm.stream_complete(prompt, formatted, **kwargs)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await self.llm.acomplete(prompt, formatted, **kwargs)

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return await self.llm.astream_complete(prompt, formatted, **kwargs)

    def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm.structured_predict(*args, **kwargs)

    async def astructured_predict(self, *args: Any, **kwargs: Any) -> Any:
        return await self.llm.astructured_predict(*args, **kwargs)

    def stream_structured_predict(self, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        return self.llm.stream_structured_predict(*args, **kwargs)

    async def astream_structured_predict(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        return await self.llm.astream_structured_predict(*args, **kwargs)
