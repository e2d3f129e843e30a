"""References in place of the tool results that an agent's prompt already holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from warmprefix import ContextBlock, MissingExtraError, Templates, Transcript
from warmprefix_langchain.tool_results import cut, documents_of

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
    from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
    from langchain_core.tools import BaseTool
except ImportError as error:
    raise MissingExtraError("langchain", "langchain") from error

__all__ = ["ContextReuseMiddleware", "MiddlewareStats"]

_log = logging.getLogger("warmprefix")

_WRITTEN = "warmprefix"
"""Marks, in a copy's `response_metadata`, that an instance wrote it. LangChain's own middleware marks its copies there
too: it is not sent to the model."""

_inside_another: ContextVar[bool] = ContextVar("warmprefix_inside_another", default=False)


@dataclass(frozen=True, slots=True)
class MiddlewareStats:
    """A snapshot of what a middleware has done so far."""

    prompts: int = 0
    """Model calls, those included in which nothing came again."""
    references: int = 0
    """Blocks replaced by a reference, counted in every prompt that they would have stood in."""
    reference_tokens: int = 0
    """Tokens of these blocks."""
    errors: int = 0
    """Prompts that were sent as they were, in part at least, because arranging them failed."""


class ContextReuseMiddleware(AgentMiddleware[Any, Any]):
    """Tool results that come again become references to where the prompt already holds them.

    For `create_agent`, which is tail placement: an agent keeps its tool messages, so what a search has found once
    stands in every later prompt. The first time, a block is labelled and in full; from then on a sentence refers to
    it. Blocks keep their order: the question stands before them, and behind it no two conversations share a prefix.

    Each prompt is worked out from its own messages and nothing else; the state keeps the raw text. So retries, forks,
    time travel, parallel tool calls and checkpoints need no care, and a growing history keeps its bytes.

    Put it last in `middleware=[...]`, nearest to the model. One that removes or clears messages on their way to the
    model (`ContextEditingMiddleware`, a trimmer in `wrap_model_call`) must stand before it, or it may clear a block
    that a reference already names. `SummarizationMiddleware` may stand on either side: it works on the state before
    any of this, and what it took away is in full again when it comes again.

    Several instances, each for its own tools say, may stand in one agent under different names. An inner one leaves
    alone what an outer one wrote, and labels blocks by their content, so that no label gets two meanings.

    An error while arranging never reaches the agent: the message at fault and all behind it go on as they were, which
    is logged.
    """

    def __init__(
        self,
        *,
        tools: Collection[str | BaseTool] | None = None,
        separator: str | None = None,
        min_tokens: int = 64,
        templates: Templates | None = None,
        name: str | None = None,
    ) -> None:
        r"""Choose what to look at; the default is every tool's result.

        A result is cut into its documents where the tool hands these over as the message's `artifact`, as
        `create_retriever_tool(response_format="content_and_artifact")` does. Otherwise it is one block.

        Args:
            tools: The tools whose results are looked at, or their names; those of all others stay as they are.
            separator: What stands between the documents of a tool that hands over nothing but text:
                `create_retriever_tool` puts `"\n\n"` there.
            min_tokens: A block shorter than this stays as it is.
            templates: The wording of the references.
            name: Two instances in one agent need different ones; the class's by default.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `min_tokens` is negative, or `separator` or `name` is empty.
        """
        super().__init__()
        for option, value in (("separator", separator), ("name", name)):
            if not (value is None or isinstance(value, str)):
                raise TypeError(f"{option} must be a str or None, got {type(value).__name__}")
            if value == "":
                raise ValueError(f"{option} must not be empty")
        Transcript(templates=templates, min_tokens=min_tokens)  # checks both
        self._only = None if tools is None else _names(tools)
        self._separator = separator
        self._min_tokens = min_tokens
        self._templates = templates
        self._name = type(self).__name__ if name is None else name
        self._stats = MiddlewareStats()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The name of this instance, by which the agent tells middleware apart."""
        return self._name

    def stats(self) -> MiddlewareStats:
        """What it has done so far, in all agents and conversations that share it."""
        return self._stats

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Hand the request on with references in it; the very same one if nothing is to be changed."""
        arranged = self._arrange(request)
        with _others_inside():
            return handler(arranged)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        arranged = self._arrange(request)
        with _others_inside():
            return await handler(arranged)

    def _arrange(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        transcript = Transcript(templates=self._templates, min_tokens=self._min_tokens)
        messages: list[AnyMessage] = []
        references = reference_tokens = 0
        failure: Exception | None = None
        try:
            for message in self._told(request, transcript):
                messages.append(message)
                references, reference_tokens = transcript.references, transcript.reference_tokens
        except Exception as error:
            failure = error
            messages += request.messages[len(messages) :]  # those before it keep the bytes that were sent already
        stats = self._count(references, reference_tokens, errors=int(failure is not None))
        if failure is not None:
            level = logging.WARNING if stats.errors == 1 else logging.DEBUG
            _log.log(level, "tool results stay as they are", exc_info=failure)
        changed = any(new is not old for new, old in zip(messages, request.messages, strict=True))
        return request.override(messages=messages) if changed else request

    def _told(self, request: ModelRequest[Any], transcript: Transcript) -> Iterator[AnyMessage]:
        """The request's messages, told to the transcript in order; copies of those that it changes."""
        for text in _system_texts(request):
            transcript.read(text)
        called: dict[str | None, str] = {}
        for message in request.messages:
            if isinstance(message, AIMessage):
                called.update((call["id"], call["name"]) for call in message.tool_calls)
            if isinstance(message, ToolMessage) and self._handles(message, called):
                yield self._written(message, transcript)
                continue
            for text in _texts(message.content):
                transcript.read(text)
            yield message

    def _handles(self, message: ToolMessage, called: dict[str | None, str]) -> bool:
        if message.status == "error" or _WRITTEN in message.response_metadata:
            return False
        return self._only is None or (message.name or called.get(message.tool_call_id)) in self._only

    def _written(self, message: ToolMessage, transcript: Transcript) -> ToolMessage:
        documents = documents_of(message.artifact)
        if _inside_another.get():
            documents = [ContextBlock(document.text, tokens=document.tokens) for document in documents]

        def write(text: str) -> str:
            pieces = cut(text, documents, self._separator, self._min_tokens)
            return "".join([_write(piece, transcript) for piece in pieces])

        content: str | list[str | dict[Any, Any]]
        if isinstance(message.content, str):
            content = write(message.content)
        else:
            content = [_write_part(part, write, transcript) for part in message.content]
        if content == message.content:
            return message
        metadata = {**message.response_metadata, _WRITTEN: self._name}
        return message.model_copy(update={"content": content, "response_metadata": metadata})

    def _count(self, references: int, reference_tokens: int, errors: int) -> MiddlewareStats:
        with self._lock:
            so_far = self._stats
            self._stats = now = MiddlewareStats(
                prompts=so_far.prompts + 1,
                references=so_far.references + references,
                reference_tokens=so_far.reference_tokens + reference_tokens,
                errors=so_far.errors + errors,
            )
        return now


def _names(tools: object) -> frozenset[str]:
    if isinstance(tools, str) or not isinstance(tools, Collection):
        raise TypeError(f"tools must be a collection of tools or names, or None, got one {type(tools).__name__}")
    names = [tool.name if isinstance(tool, BaseTool) else tool for tool in tools]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"tools must hold tools or names, got {type(name).__name__}")
    return frozenset(names)


@contextmanager
def _others_inside() -> Iterator[None]:
    token = _inside_another.set(True)
    try:
        yield
    finally:
        _inside_another.reset(token)


def _write(piece: ContextBlock | str, transcript: Transcript) -> str:
    if isinstance(piece, ContextBlock):
        return transcript.write(piece)
    transcript.read(piece)
    return piece


def _write_part(
    part: str | dict[Any, Any], write: Callable[[str], str], transcript: Transcript
) -> str | dict[Any, Any]:
    if isinstance(part, str):
        return write(part)
    text = part.get("text")
    if not isinstance(text, str):
        return part
    if part.get("type") == "text":
        return {**part, "text": write(text)}
    transcript.read(text)
    return part


def _system_texts(request: ModelRequest[Any]) -> Iterator[str]:
    message = getattr(request, "system_message", None)
    if message is not None:
        yield from _texts(message.content)
    elif request.system_prompt:  # all that langchain 1.0 has
        yield request.system_prompt


def _texts(content: str | Sequence[str | dict[Any, Any]]) -> Iterator[str]:
    for part in [content] if isinstance(content, str) else content:
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str):
            yield text
