"""An agent middleware that replaces repeated tool results by references."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from warmprefix import MissingExtraError
from warmprefix.forks import fork_safe_lock
from warmprefix_requests import Echoes, ToolOrders, Transcript

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
    from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.config import get_config
except ImportError as error:
    raise MissingExtraError("langchain", "langchain") from error

__all__ = ["ContextReuseMiddleware", "MiddlewareStats"]

_log = logging.getLogger("warmprefix")

_WRITTEN = "warmprefix"
"""Key in a copy's `response_metadata` that names the instance which wrote it.

LangChain's own middleware marks its copies in the same place, which is not sent to the model."""

ToolsMode = Literal["off", "order", "keep"]

_Answer = TypeVar("_Answer")
_Message = TypeVar("_Message")

_outer: ContextVar[tuple[Callable[[ToolMessage, str | None], bool], ...]] = ContextVar("warmprefix_outer", default=())
"""The `_handles` methods of the instances around this one, in the same model call."""


@dataclass(frozen=True, slots=True)
class MiddlewareStats:
    """A snapshot of a middleware's counters."""

    prompts: int = 0
    """Number of model calls, with and without references."""
    references: int = 0
    """Number of results and passages replaced by a reference, counted once per prompt."""
    reference_tokens: int = 0
    """Number of tokens in these results and passages, estimated as a quarter of their UTF-8 bytes."""
    restored: int = 0
    """Number of references that the model copied into tool calls, and that became their texts again."""
    errors: int = 0
    """Number of prompts sent unchanged, at least in part, because arranging them failed."""


class ContextReuseMiddleware(AgentMiddleware[Any, Any]):
    """Middleware that replaces repeated tool results by references to the calls that gave them first.

    For `create_agent`. This is tail placement: an agent keeps its tool messages, so every later prompt holds each
    result again. First occurrences keep their bytes. A repeated result becomes a sentence that names the earlier call.
    A repeated passage of a retrieval tool becomes a sentence that names the call and the first words of the passage. A
    prompt without repeats is passed on as the same request.

    Each prompt is computed from its own messages only, and the agent's state keeps the raw text. So retries, forks,
    time travel, parallel tool calls and checkpoints need no special handling, and a growing history keeps its bytes.
    References never name a call that was cut from the messages. Errors and parts that are not text stay unchanged.

    Put it last in `middleware=[...]`, nearest to the model. A middleware that removes or clears messages on their way
    to the model (`ContextEditingMiddleware`, a trimmer in `wrap_model_call`) must come before it; otherwise it may
    clear a result that a reference names. `SummarizationMiddleware` may come before or after: it works on the state,
    which holds no references. If it removed a result, the next occurrence is sent in full.

    If the model copies a reference into the arguments of a tool call, the tool gets the text that it stands for. Only
    references in the default wording are found.

    One agent may have several instances under different names, for example one per tool. An inner instance ignores
    the tools of the outer ones.

    An error while arranging never reaches the agent: the message that caused it and all later messages are passed on
    unchanged, and the error is logged.
    """

    def __init__(
        self,
        *,
        tools: Collection[str | BaseTool] | None = None,
        separator: str | None = None,
        min_tokens: int = 64,
        steady_tools: ToolsMode = "off",
        name: str | None = None,
    ) -> None:
        r"""Create a middleware for all tools, or for the given ones.

        A result has passages if the tool returns its documents as the message's `artifact`, as
        `create_retriever_tool(response_format="content_and_artifact")` does, or if `separator` splits it.

        Args:
            tools: Tools whose results may become references, or their names. Results of other tools stay unchanged,
                and no reference names them.
            separator: Text between the documents of a tool that returns only text: `"\n\n"` for
                `create_retriever_tool`.
            min_tokens: Minimum size of a result or passage that may become a reference.
            steady_tools: `"order"` keeps the order in which a conversation's tools came, for agents whose tools change,
                as when an MCP server connects late. `"keep"` also declares tools that are gone, in conversations with
                a `thread_id`: the agent answers a call of one as it does with any unknown tool. A conversation is
                known by its `thread_id` and the id of its first message.
            name: Name of this instance, unique in its agent; by default the name of the class.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `min_tokens` is negative, `separator` or `name` is empty, or `steady_tools` is unknown.
        """
        super().__init__()
        if steady_tools not in get_args(ToolsMode):
            raise ValueError(f"steady_tools must be one of {', '.join(get_args(ToolsMode))}, got {steady_tools!r}")
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"name must be a str or None, got {type(name).__name__}")
        if name == "":
            raise ValueError("name must be None or at least one character, got ''")
        self._new_transcript = partial(Transcript, separator=separator, min_tokens=min_tokens)
        self._new_transcript()  # checks both
        self._only = None if tools is None else _names(tools)
        self._name = type(self).__name__ if name is None else name
        self._tools_mode: ToolsMode = steady_tools
        self._tools: ToolOrders[BaseTool | dict[str, Any]] = ToolOrders()
        self._stats = MiddlewareStats()
        self._lock = fork_safe_lock()

    @property
    def name(self) -> str:
        """Name of this instance, unique in its agent."""
        return self._name

    def stats(self) -> MiddlewareStats:
        """Return the counters, summed over all agents and conversations that share this instance."""
        return self._stats

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Pass on the request with references; the same object if there are no repeats."""
        arranged, echoes = self._arrange(request)
        with self._around():
            return self._restored(handler(arranged), echoes)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Do the same as `wrap_model_call`."""
        arranged, echoes = self._arrange(request)
        with self._around():
            return self._restored(await handler(arranged), echoes)

    def _arrange(self, request: ModelRequest[Any]) -> tuple[ModelRequest[Any], Echoes]:
        transcript = self._new_transcript()
        messages: list[AnyMessage] = []
        echoes = Echoes({})
        references = reference_tokens = 0
        failure: Exception | None = None
        try:
            for message in self._with_references(request.messages, transcript):
                messages.append(message)
                echoes.add(transcript.latest)
                references, reference_tokens = transcript.references, transcript.reference_tokens
        except Exception as error:
            failure = error
            messages += request.messages[len(messages) :]  # the earlier ones keep the bytes that were already sent
        stats = self._count(1, references, reference_tokens, errors=int(failure is not None))
        if failure is not None:
            level = logging.WARNING if stats.errors == 1 else logging.DEBUG
            _log.log(level, "tool results stay as they are", exc_info=failure)
        changed = any(new is not old for new, old in zip(messages, request.messages, strict=True))
        request = request.override(messages=messages) if changed else request
        return self._with_steady_tools(request), echoes

    def _with_steady_tools(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """Return a request with its tools in the order in which the conversation had them first."""
        if self._tools_mode == "off" or not request.tools:
            return request
        try:
            thread, first = conversation = _conversation(request.messages)
            if not (thread or first):
                return request
            schemas = [tool if isinstance(tool, dict) else convert_to_openai_tool(tool) for tool in request.tools]
            body = {"tools": schemas, "tool_choice": request.tool_choice}
            tools = self._tools.ordered(conversation, request.tools, body, self._tools_mode if thread else "order")
            return request.override(tools=list(tools))
        except Exception as error:
            stats = self._count(errors=1)
            level = logging.WARNING if stats.errors == 1 else logging.DEBUG
            _log.log(level, "the tools stay as they are", exc_info=error)
            return request

    def _restored(self, response: _Answer, echoes: Echoes) -> _Answer:
        """Return the model's answer with the texts that references in its tool calls stand for."""
        if not echoes:
            return response
        try:
            if isinstance(response, AIMessage):
                return self._with_texts(response, echoes)
            if isinstance(response, ModelResponse):
                result = [self._with_texts(message, echoes) for message in response.result]
                changed = any(new is not old for new, old in zip(result, response.result, strict=True))
                return replace(response, result=result) if changed else response
        except Exception as error:
            stats = self._count(errors=1)
            level = logging.WARNING if stats.errors == 1 else logging.DEBUG
            _log.log(level, "tool calls stay as they are", exc_info=error)
        return response

    def _with_texts(self, message: _Message, echoes: Echoes) -> _Message:
        if not isinstance(message, AIMessage) or not message.tool_calls:
            return message
        calls, restored, _ = echoes.in_value([{**call} for call in message.tool_calls])
        if not restored:
            return message
        self._count(restored=restored)
        # Some model packages send the calls of an earlier message as its content or its other fields have them.
        others = message.additional_kwargs
        made = [
            {**call, "function": {**call["function"], "arguments": echoes.restored(call["function"]["arguments"])}}
            for call in others.get("tool_calls", ())
        ]
        if made:
            others = {**others, "tool_calls": made}
        content: Any = message.content
        if isinstance(content, list):
            content = [
                {**block, "input": echoes.restored(block.get("input"))}
                if isinstance(block, dict) and block.get("type") == "tool_use"
                else block
                for block in content
            ]
        return message.model_copy(update={"tool_calls": calls, "additional_kwargs": others, "content": content})

    def _with_references(self, messages: list[AnyMessage], transcript: Transcript) -> Iterator[AnyMessage]:
        """Yield the messages in order; the changed ones as copies."""
        outer = _outer.get()
        names: dict[str | None, str] = {}
        for message in messages:
            if isinstance(message, AIMessage):
                for call in message.tool_calls:
                    transcript.call(call["id"], call["name"], call["args"])
                    names[call["id"]] = call["name"]
            elif isinstance(message, ToolMessage):
                name = message.name or names.get(message.tool_call_id)
                # An outer instance may refer to its own results in this prompt or in a later one, so they stay.
                if self._handles(message, name) and not any(handles(message, name) for handles in outer):
                    message = self._rewritten(message, transcript)
                else:
                    transcript.skip(message.tool_call_id)
            yield message

    def _handles(self, message: ToolMessage, name: str | None) -> bool:
        if message.status == "error" or _WRITTEN in message.response_metadata:
            return False
        return self._only is None or name in self._only

    def _rewritten(self, message: ToolMessage, transcript: Transcript) -> ToolMessage:
        whole = isinstance(message.content, str)
        contents: list[Any] = [message.content] if whole else list(message.content)
        parts: list[str | None] = []
        for part in contents:
            # With None between two parts, no reference covers both: each keeps its place and its other fields.
            parts += (_text(part), None)
        sent = transcript.parts(message.tool_call_id, parts[:-1], _artifact_texts(message.artifact))
        rewritten = [
            part if text == _text(part) else text if isinstance(part, str) else {**part, "text": text}
            for part, text in zip(contents, sent[::2], strict=True)
        ]
        if rewritten == contents:
            return message
        metadata = {**message.response_metadata, _WRITTEN: self._name}
        content = rewritten[0] if whole else rewritten
        return message.model_copy(update={"content": content, "response_metadata": metadata})

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Let the inner instances see this one during the model call."""
        token = _outer.set((*_outer.get(), self._handles))
        try:
            yield
        finally:
            _outer.reset(token)

    def _count(
        self, prompts: int = 0, references: int = 0, reference_tokens: int = 0, *, restored: int = 0, errors: int = 0
    ) -> MiddlewareStats:
        with self._lock:
            so_far = self._stats
            self._stats = now = MiddlewareStats(
                prompts=so_far.prompts + prompts,
                references=so_far.references + references,
                reference_tokens=so_far.reference_tokens + reference_tokens,
                restored=so_far.restored + restored,
                errors=so_far.errors + errors,
            )
        return now


def _conversation(messages: list[AnyMessage]) -> tuple[str, str]:
    """Return the thread and the id of the first message, each empty if there is none."""
    try:
        thread = get_config().get("configurable", {}).get("thread_id")
    except RuntimeError:  # outside of a graph
        thread = None
    first = messages[0].id if messages else None
    return "" if thread is None else str(thread), first or ""


def _names(tools: object) -> frozenset[str]:
    if isinstance(tools, str) or not isinstance(tools, Collection):
        raise TypeError(f"tools must be a collection of tools or names, or None, got {type(tools).__name__}")
    names = [tool.name if isinstance(tool, BaseTool) else tool for tool in tools]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tools must contain only tools and names, got {type(name).__name__}")
    return frozenset(names)


def _text(part: str | dict[Any, Any]) -> str | None:
    """Return the text of a content part; None if it is not a text part."""
    if isinstance(part, str):
        return part
    text = part.get("text")
    return text if part.get("type") == "text" and isinstance(text, str) else None


def _artifact_texts(artifact: object) -> list[str]:
    """Return the texts of the documents in an artifact; empty if it holds no documents.

    A document has its text in `page_content`: an object, or the mapping that a checkpoint makes of it.
    """
    if not isinstance(artifact, list | tuple):
        return []
    texts: list[Any] = [
        item.get("page_content") if isinstance(item, Mapping) else getattr(item, "page_content", None)
        for item in artifact
    ]
    return [text for text in texts if isinstance(text, str)]
