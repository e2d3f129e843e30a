"""A language model and a retriever tool for agents, which keep tool results in their history."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, SerializeAsAny, model_validator
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import RetrieverTool, ToolOutput
from llama_index_instrumentation.dispatcher import active_instrument_tags
from typing_extensions import Self

from warmprefix.forks import fork_safe_lock
from warmprefix_requests import Echoes, ToolOrders, Transcript

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

__all__ = ["ContextReuseLLM", "ContextReuseRetrieverTool", "refer_to_repeats"]

_log = logging.getLogger("warmprefix")

_SHARED_FIELDS = tuple(LLM.model_fields)
"""Fields of every language model; the wrapper and the wrapped model share their values."""

_counting = fork_safe_lock()
"""For the counts of all models, which then can be copied and pickled."""


class ContextReuseLLM(FunctionCallingLLM):
    """Function-calling model that receives each tool result once.

        agent = FunctionAgent(llm=ContextReuseLLM(llm=llm))

    If an earlier tool message of the same prompt already shows a tool result, the later one becomes a reference to the
    earlier call. The same holds for each node of a `ContextReuseRetrieverTool`. First occurrences keep their bytes, and
    a prompt without repeats stays unchanged. Everything else is passed on to the wrapped model.

    It wraps the model because only the model sees the whole prompt: an agent's memory holds only the earlier runs, and
    a tool does not see the prompt. It reads the messages and never changes them: memory, events and the agent's context
    keep the raw text. So no reference dangles after a retry, a fork or parallel tool calls, nor with a memory that
    flushes, truncates or summarises. A history that only grows keeps its bytes.

    If the model copies a reference into the arguments of a tool call, the tool gets the text that it stands for. Only
    references in the default wording are found.

    LlamaIndex does not mark the messages of failed tool calls, so a repeated error of `min_tokens` or more becomes a
    reference too. `structured_predict` passes its prompt on unchanged: agents quote the conversation in it, without
    tool messages.

    With `steady_tools`, the list of an agent whose tools change keeps its beginning. A conversation is known by its
    system prompt and the tags `conversation_id` and `tenant` of `instrument_tags`, or without that id by its first
    question. The agent answers a call of a tool that is gone as it does with any unknown tool.
    """

    llm: SerializeAsAny[FunctionCallingLLM] = Field(description="The model that answers.")
    tools: list[str] | None = Field(
        default=None, description="Names of the tools whose results may become references; None for all."
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="Text between the passages of a result: a blank line for a plain `RetrieverTool`. None if each "
        "text block is one passage, as with a `ContextReuseRetrieverTool`.",
    )
    min_tokens: int = Field(
        default=64, ge=0, description="Minimum size of a result or passage that may become a reference."
    )
    steady_tools: Literal["off", "order", "keep"] = Field(
        default="off",
        description="`order` keeps the order in which a conversation's tools came. `keep` also declares tools that are "
        "gone, in runs with the tag `conversation_id`.",
    )

    _failed: bool = PrivateAttr(default=False)
    _orders: ToolOrders[Any] = PrivateAttr(default_factory=ToolOrders)
    _restored: int = PrivateAttr(default=0)

    @model_validator(mode="before")
    @classmethod
    def _copy_shared_fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        llm = values.get("llm")
        if not isinstance(llm, FunctionCallingLLM):
            return values  # pydantic raises the error
        if isinstance(llm, ContextReuseLLM):
            raise ValueError("llm must be a plain model, got a ContextReuseLLM: one wrapper is enough for all tools")
        return {**{name: getattr(llm, name) for name in _SHARED_FIELDS}, **values}

    @model_validator(mode="after")
    def _write_shared_fields(self) -> Self:
        for name in _SHARED_FIELDS:
            setattr(self.llm, name, getattr(self, name))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the model too if both share it; `Settings` passes callback managers this way."""
        super().__setattr__(name, value)
        if name in _SHARED_FIELDS:
            setattr(self.llm, name, value)

    @classmethod
    def class_name(cls) -> str:
        return "ContextReuseLLM"

    @property
    def metadata(self) -> LLMMetadata:
        return self.llm.metadata

    @property
    def restored(self) -> int:
        """Number of references that the model copied into tool calls, and that became their texts again."""
        return self._restored

    def _arranged(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], Echoes]:
        """Return the messages to send; after a failure, that message and all later ones are unchanged."""
        rewritten: list[ChatMessage] = []
        echoes = Echoes({})
        try:
            transcript = Transcript(separator=self.separator, min_tokens=self.min_tokens)
            for message in _with_references(messages, self.tools, transcript):
                rewritten.append(message)  # after a failure, the earlier ones keep the bytes already sent
                echoes.add(transcript.latest)
        except Exception:
            self._log_failure("tool messages stay unchanged")
            rewritten += messages[len(rewritten) :]
        return rewritten, echoes

    def _steady(
        self, tools: Sequence[BaseTool], messages: Sequence[ChatMessage], options: Mapping[str, Any]
    ) -> Sequence[BaseTool]:
        """Return the tools in the order in which the conversation had them first."""
        if self.steady_tools == "off":
            return tools
        try:
            tags = active_instrument_tags.get()
            named = tags.get("conversation_id")
            texts = {role: [each.content for each in messages if each.role == role] for role in ("system", "user")}
            begun = named or next(iter(texts["user"]), None)
            if begun is None:
                return tools
            schemas = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
            choice = "required" if options.get("tool_required") else options.get("tool_choice")
            conversation = (tags.get("tenant"), named, begun, *texts["system"])
            mode = self.steady_tools if named else "order"
            return self._orders.ordered(conversation, tools, {"tools": schemas, "tool_choice": choice}, mode)
        except Exception:
            self._log_failure("the tools stay as they are")
            return tools

    def _log_failure(self, message: str) -> None:
        level = logging.DEBUG if self._failed else logging.WARNING
        self._failed = True
        _log.log(level, message, exc_info=True)

    # -- answers without echoes --------------------------------------------------------------------------------------

    def _answer(self, response: ChatResponse, echoes: Echoes) -> ChatResponse:
        response, restored = self._without_echoes(response, echoes)
        self._count(restored)
        return response

    def _stream(self, stream: ChatResponseGen, echoes: Echoes) -> ChatResponseGen:
        restored = 0
        try:
            for response in stream:
                response, restored = self._without_echoes(response, echoes)
                yield response
        finally:
            self._count(restored)

    async def _astream(self, stream: ChatResponseAsyncGen, echoes: Echoes) -> ChatResponseAsyncGen:
        restored = 0
        try:
            async for response in stream:
                response, restored = self._without_echoes(response, echoes)
                yield response
        finally:
            self._count(restored)

    def _count(self, restored: int) -> None:
        """Add to the count. Each chunk of a stream holds the calls so far, so the last one's number is its own."""
        with _counting:
            self._restored += restored

    def _without_echoes(self, response: ChatResponse, echoes: Echoes) -> tuple[ChatResponse, int]:
        """Return the answer with the texts that references in its tool calls stand for, and their number.

        Arguments that are not complete yet keep all but their complete references.
        """
        if not echoes:
            return response, 0
        try:
            message = response.message
            blocks, in_blocks = _restored_calls(message.blocks, echoes)
            calls, in_calls = _restored_calls(message.additional_kwargs.get("tool_calls") or (), echoes)
            if in_blocks or in_calls:
                others = {**message.additional_kwargs, "tool_calls": calls} if in_calls else message.additional_kwargs
                message = message.model_copy(update={"blocks": blocks, "additional_kwargs": others})
                return response.model_copy(update={"message": message}), in_blocks or in_calls
        except Exception:
            self._log_failure("tool calls stay unchanged")
        return response, 0

    # -- methods that rewrite their messages and pass them on --------------------------------------------------------

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        sent, echoes = self._arranged(messages)
        return self._answer(self.llm.chat(sent, **kwargs), echoes)

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        sent, echoes = self._arranged(messages)
        return self._stream(self.llm.stream_chat(sent, **kwargs), echoes)

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        sent, echoes = self._arranged(messages)
        return self._answer(await self.llm.achat(sent, **kwargs), echoes)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        sent, echoes = self._arranged(messages)
        return self._astream(await self.llm.astream_chat(sent, **kwargs), echoes)

    def chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponse:
        sent, echoes = self._arranged(chat_history or [])
        steady = self._steady(tools, chat_history or [], kwargs)
        return self._answer(self.llm.chat_with_tools(steady, user_msg, sent, *args, **kwargs), echoes)

    def stream_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponseGen:
        sent, echoes = self._arranged(chat_history or [])
        steady = self._steady(tools, chat_history or [], kwargs)
        return self._stream(self.llm.stream_chat_with_tools(steady, user_msg, sent, *args, **kwargs), echoes)

    async def achat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponse:
        sent, echoes = self._arranged(chat_history or [])
        steady = self._steady(tools, chat_history or [], kwargs)
        return self._answer(await self.llm.achat_with_tools(steady, user_msg, sent, *args, **kwargs), echoes)

    async def astream_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> ChatResponseAsyncGen:
        sent, echoes = self._arranged(chat_history or [])
        steady = self._steady(tools, chat_history or [], kwargs)
        return self._astream(await self.llm.astream_chat_with_tools(steady, user_msg, sent, *args, **kwargs), echoes)

    # -- methods that pass everything on unchanged -------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        prepare = self.llm._prepare_chat_with_tools  # noqa: SLF001  (abstract in FunctionCallingLLM)
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


class ContextReuseRetrieverTool(RetrieverTool):
    """Retriever tool that returns each node in its own text block.

    The joined blocks are the text of a plain `RetrieverTool`. An agent's memory keeps the blocks of a message, so
    `ContextReuseLLM` can refer to single nodes without a `separator`. Build it like a `RetrieverTool`:
    `ContextReuseRetrieverTool.from_defaults(retriever)`.
    """

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return _node_by_node(super().call(*args, **kwargs))

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return _node_by_node(await super().acall(*args, **kwargs))


def _node_by_node(output: ToolOutput) -> ToolOutput:
    texts = [found.node.get_content(MetadataMode.LLM) + "\n\n" for found in output.raw_output]
    if "".join(texts) != output.content:  # another version of LlamaIndex lays out the nodes differently
        return output
    return output.model_copy(update={"blocks": [TextBlock(text=text) for text in texts]})


class _ToolCall(NamedTuple):
    id: str
    name: str
    arguments: object


def refer_to_repeats(
    messages: Sequence[ChatMessage],
    *,
    tools: Collection[str] | None = None,
    separator: str | None = None,
    min_tokens: int = 64,
) -> Iterator[ChatMessage]:
    """Yield the messages of one prompt, with references in place of repeated tool results.

    Each output depends only on the messages up to it. Changed messages are copies; the others are passed through.
    `ContextReuseLLM` explains the arguments.
    """
    return _with_references(messages, tools, Transcript(separator=separator, min_tokens=min_tokens))


def _with_references(
    messages: Sequence[ChatMessage], tools: Collection[str] | None, transcript: Transcript
) -> Iterator[ChatMessage]:
    names: dict[str, str] = {}
    for message in messages:
        for call in _tool_calls(message):
            transcript.call(*call)
            names[call.id] = call.name
        if message.role == MessageRole.TOOL:
            call_id = message.additional_kwargs.get("tool_call_id")
            name = message.additional_kwargs.get("name") or names.get(call_id or "")
            if tools is None or name in tools:
                message = _rewritten(message, call_id, transcript)
            else:
                transcript.skip(call_id)
        yield message


def _rewritten(message: ChatMessage, call_id: str | None, transcript: Transcript) -> ChatMessage:
    parts = [block.text if isinstance(block, TextBlock) else None for block in message.blocks]
    sent = transcript.parts(call_id, parts)
    if sent == parts:
        return message
    blocks = [
        block if text == part else block.model_copy(update={"text": text})
        for block, part, text in zip(message.blocks, parts, sent, strict=True)
        if text or text == part  # else a reference in an earlier block covers this one
    ]
    return message.model_copy(update={"blocks": blocks})


def _tool_calls(message: ChatMessage) -> list[_ToolCall]:
    """Return the calls in a message, in the format of newer or of older model packages."""
    for listed in (message.blocks, message.additional_kwargs.get("tool_calls") or ()):
        if calls := [call for item in listed if (call := _tool_call(item)) is not None]:
            return calls
    return []


def _tool_call(item: object) -> _ToolCall | None:
    function = _get(item, "function")
    key = _first(_get(item, "tool_call_id"), _get(item, "call_id"), _get(item, "id"))
    name = _first(_get(item, "tool_name"), _get(item, "name"), _get(function, "name"))
    if not key or not name:
        return None
    arguments = (_get(item, "tool_kwargs"), _get(item, "arguments"), _get(item, "input"), _get(function, "arguments"))
    return _ToolCall(key, name, _first(*arguments, ""))


def _restored_calls(items: Sequence[Any], echoes: Echoes) -> tuple[list[Any], int]:
    """Return the items with the texts that references in their arguments stand for, and the number of these.

    Changed items are copies: of a stream, the model adds its next piece to them.
    """
    restored = 0

    def changed(item: Any) -> Any:
        nonlocal restored
        for name in ("tool_kwargs", "arguments", "input"):
            arguments = _get(item, name)
            if isinstance(arguments, str):
                text, found, _ = echoes.in_text(arguments, "json")
            else:
                text, found, _ = echoes.in_value(arguments)
            if found:
                restored += found
                return _with(item, name, text)
        function = _get(item, "function")
        return item if function is None or (new := changed(function)) is function else _with(item, "function", new)

    return [changed(item) for item in items], restored


def _with(item: Any, name: str, value: object) -> Any:
    return {**item, name: value} if isinstance(item, dict) else item.model_copy(update={name: value})


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _get(item: object, key: str) -> Any:
    """Read a field of an object, or of the mapping that a stored object becomes."""
    return item.get(key) if isinstance(item, dict) else getattr(item, key, None)
