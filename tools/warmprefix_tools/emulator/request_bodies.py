"""Request bodies: the fields of OpenAI and vLLM that the emulator reads and checks.

Other fields are accepted and ignored, as in vLLM.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator.tokenizer import ChatMessage

try:
    from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator
    from pydantic_core import PydanticCustomError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["ChatCompletionRequest", "StreamOptions", "TokenizeRequest"]


def _joined_parts(content: object) -> object:
    """Join a list of text parts with newlines, as vLLM does for templates that take strings."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    for position, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            shape = 'Part {position} should be {{"type": "text", "text": ...}}'
            raise PydanticCustomError("text_part", shape, {"position": position})
    return "\n".join(part["text"] for part in content)


class RequestMessage(BaseModel):
    """One chat message, with its content parts joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined_parts)] = ""
    tool_calls: list[dict[str, Any]] | None = None

    def for_template(self) -> ChatMessage:
        """Return the message with its tool calls after the text, because they are part of the prompt."""
        calls = "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in self.tool_calls or ())
        return ChatMessage(self.role, self.content + calls)


class StreamOptions(BaseModel):
    """OpenAI's options of a streamed answer."""

    include_usage: bool | None = False


class ChatCompletionRequest(BaseModel):
    """Body of POST /v1/chat/completions."""

    model: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Literal[1] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "Allowed only with stream=true")
        return options

    @property
    def new_token_limit(self) -> int | None:
        """Limit of the client; OpenAI's newer name takes precedence over the older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_usage_chunk(self) -> bool:
        """True if a stream must end with a chunk that has the usage and no choices."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def for_template(self) -> list[ChatMessage]:
        """Return the tools, if any, and the messages."""
        return _with_tools(self.tools, self.messages)


class TokenizeRequest(BaseModel):
    """Body of POST /tokenize: a chat, or a plain text."""

    model: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    prompt: Annotated[str | None, Field(validate_default=True)] = None

    @field_validator("prompt")
    @classmethod
    def _one_of_two(cls, prompt: str | None, info: ValidationInfo) -> str | None:
        if "messages" in info.data and (prompt is None) == (info.data["messages"] is None):
            raise PydanticCustomError("prompt", "Give either messages or prompt")
        return prompt

    def for_template(self) -> list[ChatMessage]:
        """Return the tools, if any, and the messages; empty for a plain prompt."""
        return _with_tools(self.tools, self.messages or [])


def _with_tools(tools: list[dict[str, Any]] | None, messages: list[RequestMessage]) -> list[ChatMessage]:
    rendered = [message.for_template() for message in messages]
    return [ChatMessage("tools", json.dumps(tools)), *rendered] if tools else rendered
