"""Request bodies: the fields of OpenAI and vLLM that the emulator reads and checks.

Other fields are accepted and ignored, as in vLLM.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt
from warmprefix_tools.emulator.openai_caching import (
    PromptCacheBreakpoint,
    PromptCacheFields,
    check_breakpoint,
    check_fields,
)
from warmprefix_tools.emulator.parted_prompts import PartedMessage, PromptPart, render_parts
from warmprefix_tools.emulator.tokenizer import ChatMessage, render_chat

try:
    from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator
    from pydantic_core import PydanticCustomError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["AdvanceClockRequest", "ChatCompletionRequest", "StreamOptions", "TokenizeRequest"]


class TextPart(BaseModel):
    """One content part; parts that are not text are refused."""

    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


def _as_parts(content: object) -> object:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"text": content}]
    if isinstance(content, list):
        for position, part in enumerate(content):
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                shape = 'Part {position} should be {{"type": "text", "text": ...}}'
                raise PydanticCustomError("text_part", shape, {"position": position})
        return content
    raise PydanticCustomError("content", "Input should be a valid string or list of text parts")


class RequestMessage(BaseModel):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)] = Field(default_factory=list)
    tool_calls: list[dict[str, Any]] | None = None

    def for_template(self) -> ChatMessage:
        """Return the message with its parts joined by newlines, as vLLM does for templates that take strings.

        Tool calls stand after the text, because they are part of the prompt.
        """
        return ChatMessage(self.role, "\n".join(part.text for part in self.content) + self._written_calls())

    def in_parts(self) -> PartedMessage:
        """Return the message with its parts apart."""
        parts = [PromptPart(part.text, marked=part.prompt_cache_breakpoint is not None) for part in self.content]
        if self.tool_calls:
            parts.append(PromptPart(self._written_calls()))
        return PartedMessage(self.role, tuple(parts), has_automatic_mark=self.role in ("user", "tool"))

    def _written_calls(self) -> str:
        return "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in self.tool_calls or ())


class StreamOptions(BaseModel):
    """OpenAI's options of a streamed answer."""

    include_usage: bool | None = False


class ChatCompletionRequest(PromptCacheFields):
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
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "Allowed only with stream=true")
        return options

    @field_validator("continue_final_message")
    @classmethod
    def _ends_in_one_way(cls, continues: bool, info: ValidationInfo) -> bool:
        if continues and info.data.get("add_generation_prompt"):
            raise PydanticCustomError("chat_end", "Cannot set both continue_final_message and add_generation_prompt")
        return continues

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

    def prompt_for(self, profile: CacheProfile) -> MarkedPrompt:
        """Return the prompt, with marks if the profile has them.

        Raises:
            RefusedError: A caching field is against the rules.
        """
        check_fields(profile, self)
        for number, message in enumerate(self.messages):
            for place, part in enumerate(message.content):
                if part.prompt_cache_breakpoint is not None:
                    path = f"messages[{number}].content[{place}].prompt_cache_breakpoint"
                    check_breakpoint(profile, path, message.role, part.text)
        salt = self.salt(profile, self.cache_salt)
        if profile.marks is None:
            tokens = render_chat(
                self.for_template(),
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
            )
            return MarkedPrompt(tokens, salt)
        tools = [PartedMessage("tools", (PromptPart(json.dumps(self.tools)),))] if self.tools else []
        messages = [*tools, *(message.in_parts() for message in self.messages)]
        return render_parts(messages, salt=salt, automatic=self.wants_automatic_mark)


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


class AdvanceClockRequest(BaseModel):
    """Body of POST /advance_clock: the time that cached prefixes grow older."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _with_tools(tools: list[dict[str, Any]] | None, messages: list[RequestMessage]) -> list[ChatMessage]:
    rendered = [message.for_template() for message in messages]
    return [ChatMessage("tools", json.dumps(tools)), *rendered] if tools else rendered
