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

from warmprefix.dedup import RepeatTemplates
from warmprefix_llamaindex.tail import refer_to_repeats

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

__all__ = ["ContextReuseLLM"]

_log = logging.getLogger("warmprefix")

_SHARED = tuple(LLM.model_fields)
"""Settings that every language model has: one value for the wrapper and the model in it."""


class ContextReuseLLM(FunctionCallingLLM):
    """A function-calling model that receives each tool result once: `FunctionAgent(llm=ContextReuseLLM(llm=llm))`.

    In each prompt that passes through, a tool result that stands in an earlier tool message of the same prompt becomes
    a reference to the call that gave it; so does each node of a `ContextReuseRetrieverTool`. First occurrences keep
    their bytes, and a prompt without repeats stays as it is. Everything else is the model's own.

    It wraps the model because nothing before the model sees the whole prompt: an agent's memory holds only the runs
    before this one, and a tool cannot see what the prompt still holds. It reads only the messages, and changes none:
    memory, events and the agent's context keep the raw text. So retries, forks, parallel tool calls, and a memory that
    flushes, truncates or summarises leave no reference dangling, and a history that only grows keeps its bytes.

    LlamaIndex does not mark the messages of failed tool calls, so a repeated error of `min_tokens` or more becomes a
    reference too. `structured_predict` passes its prompt on unchanged: agents quote the conversation in it, without
    tool messages.
    """

    llm: SerializeAsAny[FunctionCallingLLM] = Field(description="The model that answers.")
    tools: list[str] | None = Field(
        default=None, description="Names of the tools whose results may become references; None for all."
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="Stands between the passages of a text: a blank line for a plain `RetrieverTool`. None if each "
        "text block is one passage, as those of a `ContextReuseRetrieverTool` are.",
    )
    min_tokens: int = Field(default=64, ge=0, description="Results and passages shorter than this stay as they are.")
    templates: InstanceOf[RepeatTemplates] | None = Field(
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

    def _arranged(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages to send. After a failure, that message and all behind it are the given ones."""
        rewritten: list[ChatMessage] = []
        try:
            for message in refer_to_repeats(
                messages,
                tools=self.tools,
                separator=self.separator,
                min_tokens=self.min_tokens,
                templates=self.templates,
            ):
                rewritten.append(message)  # noqa: PERF402  (those before a failure keep the bytes that were sent already)
        except Exception:
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            _log.log(level, "tool messages stay as they are", exc_info=True)
            rewritten += messages[len(rewritten) :]
        return rewritten

    # -- with messages: rewritten, then passed on ----------------------------------------------------------------

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.llm.chat(self._arranged(messages), **kwargs)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self.llm.stream_chat(self._arranged(messages), **kwargs)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self.llm.achat(self._arranged(messages), **kwargs)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return await self.llm.astream_chat(self._arranged(messages), **kwargs)

    def chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponse:
        return self.llm.chat_with_tools(tools, user_msg, self._arranged(chat_history or []), *args, **kwargs)

    def stream_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponseGen:
        return self.llm.stream_chat_with_tools(tools, user_msg, self._arranged(chat_history or []), *args, **kwargs)

    async def achat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponse:
        return await self.llm.achat_with_tools(tools, user_msg, self._arranged(chat_history or []), *args, **kwargs)

    async def astream_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponseAsyncGen:
        return await self.llm.astream_chat_with_tools(
            tools, user_msg, self._arranged(chat_history or []), *args, **kwargs
        )

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
