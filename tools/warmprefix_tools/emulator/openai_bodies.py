"""Request bodies of OpenAI's APIs, with the fields of vLLM: what the emulator reads and checks of them.

Other fields are accepted and ignored, as in vLLM. `priority` is SGLang's, for chat completions. The rules of prompt
caching are those of https://developers.openai.com/api/docs/guides/prompt-caching and of the API reference, as of
November 2026:
`prompt_cache_breakpoint` on a content part marks the end of a prefix, on any part but an assistant's;
`prompt_cache_options.mode` is `implicit` unless the request turns the automatic mark off; 30 minutes is the only
lifetime; `prompt_cache_retention` excludes `prompt_cache_options`; models before GPT-5.6 refuse both new fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt, is_hosted
from warmprefix_tools.emulator.parted_prompts import PartedMessage, PromptPart, render_parts
from warmprefix_tools.emulator.serving import RefusedError, validated
from warmprefix_tools.emulator.tokenizer import ChatMessage, encode, render_chat

try:
    from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator
    from pydantic_core import PydanticCustomError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = [
    "AdvanceClockRequest",
    "ChatCompletionRequest",
    "ConversationRequest",
    "EmbeddingsRequest",
    "ItemsRequest",
    "ResponsesRequest",
    "TokenizeRequest",
]

_BREAKPOINT = "prompt_cache_breakpoint"

_Fields = dict[str, Any]


# -- prompt caching ----------------------------------------------------------------------------------------------------


class PromptCacheBreakpoint(BaseModel):
    """The end of a prefix to be cached."""

    mode: Literal["explicit"]


class PromptCacheOptions(BaseModel):
    """Options of one request."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class PromptCacheFields(BaseModel):
    """The fields that a request body has."""

    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None

    cache_salt: str | None = None

    def rendered(self, profile: CacheProfile, messages: list[PartedMessage]) -> MarkedPrompt:
        """Return the prompt of a chat, with marks if the profile has them."""
        options, marks = self.prompt_cache_options, profile.marks is not None
        automatic = options is None or options.mode == "implicit"
        return render_parts(messages, salt=self.salt(profile), automatic=automatic, marks=marks)

    def check(self, profile: CacheProfile) -> None:
        """Refuse fields that contradict each other, or that the profile's models do not have."""
        if self.prompt_cache_options is None:
            return
        if self.prompt_cache_retention is not None:
            message = "prompt_cache_retention and prompt_cache_options exclude each other."
            raise RefusedError(400, message, param="prompt_cache_retention")
        if _is_older(profile):
            raise _not_supported("prompt_cache_options")

    def salt(self, profile: CacheProfile) -> str | None:
        """Return what keeps the request's cache apart."""
        return self.prompt_cache_key if profile.isolation == "prompt_cache_key" else self.cache_salt


def _part(profile: CacheProfile, path: str, role: str, text: str, is_marked: bool) -> PromptPart:
    """Return a content part; a breakpoint on one that cannot have it is refused, and ignored by other engines."""
    if is_marked:
        _check_breakpoint(profile, f"{path}.{_BREAKPOINT}", role, text)
    return PromptPart(text, marked=is_marked)


def _check_breakpoint(profile: CacheProfile, path: str, role: str, text: str) -> None:
    if _is_older(profile):
        raise _not_supported(path)
    if profile.marks is None:
        return
    if role == "assistant" and "assistant" in profile.marks.refused_on:
        raise RefusedError(400, f"Unknown parameter: '{path}'.", param=path)
    if not text and "empty" in profile.marks.refused_on:
        raise RefusedError(400, f"'{path}' cannot be set on an empty text.", param=path)


def _is_older(profile: CacheProfile) -> bool:
    return is_hosted(profile) and profile.marks is None


def _not_supported(param: str) -> RefusedError:
    return RefusedError(400, f"'{param}' is not supported with this model.", param=param)


# -- chat completions ------------------------------------------------------------------------------------------------


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

    def in_parts(self, profile: CacheProfile, path: str) -> PartedMessage:
        """Return the message with its parts apart."""
        parts = [
            _part(profile, f"{path}.content[{place}]", self.role, part.text, part.prompt_cache_breakpoint is not None)
            for place, part in enumerate(self.content)
        ]
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
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
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
        self.check(profile)
        tools = [PartedMessage("tools", (PromptPart(json.dumps(self.tools)),))] if self.tools else []
        messages = [message.in_parts(profile, f"messages[{number}]") for number, message in enumerate(self.messages)]
        if profile.marks is not None:
            return self.rendered(profile, [*tools, *messages])
        tokens = render_chat(
            self.for_template(),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        return MarkedPrompt(tokens, self.salt(profile), priority=self.priority)


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


class EmbeddingsRequest(BaseModel):
    """Body of POST /v1/embeddings."""

    model: str | None = None
    input: Annotated[str | list[int] | list[str] | list[list[int]], Field(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=16_384)] = 1536

    @property
    def token_lists(self) -> list[list[int]]:
        """The tokens of each input."""
        inputs: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        if isinstance(inputs[0], int):
            return [inputs]
        return [encode(each) if isinstance(each, str) else each for each in inputs]


class AdvanceClockRequest(BaseModel):
    """Body of POST /advance_clock: the time that cached prefixes grow older."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _with_tools(tools: list[dict[str, Any]] | None, messages: list[RequestMessage]) -> list[ChatMessage]:
    rendered = [message.for_template() for message in messages]
    return [ChatMessage("tools", json.dumps(tools)), *rendered] if tools else rendered


# -- responses ---------------------------------------------------------------------------------------------------------


class ConversationReference(BaseModel):
    """The conversation of a response."""

    id: str


def _as_reference(conversation: object) -> object:
    return {"id": conversation} if isinstance(conversation, str) else conversation


class ResponsesRequest(PromptCacheFields):
    """Body of POST /v1/responses; other fields are accepted and ignored."""

    model: str | None = None
    input: str | list[_Fields] = Field(default_factory=list)
    instructions: str | None = None
    tools: list[_Fields] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = False
    store: bool | None = True
    background: Literal[False] | None = False
    previous_response_id: str | None = None
    conversation: Annotated[ConversationReference | None, BeforeValidator(_as_reference)] = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    metadata: dict[str, str] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the response joins; None without one."""
        return None if self.conversation is None else self.conversation.id

    @property
    def items(self) -> list[_Fields]:
        """The items of the input."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def messages_for(self, profile: CacheProfile, history: Sequence[_Fields]) -> tuple[list[PartedMessage], int]:
        """Return the prompt's messages: tools, instructions, stored items, input; and the number of those that stay.

        Raises:
            RefusedError: An item is invalid, or a caching field is against the rules.
        """
        self.check(profile)
        messages: list[PartedMessage] = []
        if self.tools:
            messages.append(PartedMessage("tools", (PromptPart(json.dumps(self.tools)),)))
        if self.instructions:
            messages.append(PartedMessage("developer", (PromptPart(self.instructions),)))
        fixed = len(messages)
        messages += [_message_of(profile, "conversation", item) for item in history]
        messages += [_message_of(profile, f"input[{number}]", item) for number, item in enumerate(self.items)]
        return messages, fixed


class ConversationRequest(BaseModel):
    """Body of POST /v1/conversations, and of an update, which has no items."""

    metadata: dict[str, str] | None = None
    items: Annotated[list[_Fields], Field(max_length=20)] | None = None


class ItemsRequest(BaseModel):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[list[_Fields], Field(max_length=20)]


_NOT_SHOWN = ("id", "status")
"""Fields of a stored item that no model sees: the client's own has neither."""


def _message_of(profile: CacheProfile, path: str, item: _Fields) -> PartedMessage:
    """Return an item of the input as a message: a message, a tool's output, or anything that the model produced."""
    kind = item.get("type", "message")
    if kind == "message":
        role = str(item.get("role", "user"))
        parts = _parts_of(profile, f"{path}.content", role, item.get("content"))
        return PartedMessage(role, parts, has_automatic_mark=role == "user")
    if kind.endswith("_output"):
        parts = _parts_of(profile, f"{path}.output", "tool", item.get("output"))
        return PartedMessage("tool", (PromptPart(str(item.get("call_id"))), *parts), has_automatic_mark=True)
    shown = {name: value for name, value in item.items() if name not in _NOT_SHOWN}
    return PartedMessage("assistant", (PromptPart(json.dumps(shown)),))


def _parts_of(profile: CacheProfile, path: str, role: str, content: object) -> tuple[PromptPart, ...]:
    if isinstance(content, str):
        return (PromptPart(content),)
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RefusedError(400, f"Invalid type for '{path}': expected a string or a list of objects.", param=path)
    return tuple(_part_of(profile, f"{path}[{number}]", role, part) for number, part in enumerate(content))


def _part_of(profile: CacheProfile, path: str, role: str, part: _Fields) -> PromptPart:
    mark, text = part.get(_BREAKPOINT), part.get("text")
    if mark is not None:
        validated(PromptCacheBreakpoint, mark, [path, _BREAKPOINT])
    if not isinstance(text, str):
        text = json.dumps({name: part[name] for name in part if name != _BREAKPOINT})
    return _part(profile, path, role, text, mark is not None)
