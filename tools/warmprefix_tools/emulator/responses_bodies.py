"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Annotated, Any

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
from warmprefix_tools.emulator.serving import RefusedError, validated

try:
    from pydantic import Field
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["ResponsesRequest"]

_Fields = dict[str, Any]


class ResponsesRequest(PromptCacheFields):
    """Body of POST /v1/responses; other fields are accepted and ignored."""

    model: str | None = None
    input: str | list[_Fields]
    instructions: str | None = None
    tools: list[_Fields] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = False
    previous_response_id: str | None = None
    cache_salt: str | None = None

    def prompt_for(self, profile: CacheProfile) -> MarkedPrompt:
        """Return the prompt: tools, instructions, then the items of the input.

        Raises:
            RefusedError: The request continues a stored answer, an item is invalid, or a caching field is against
                the rules.
        """
        if self.previous_response_id is not None:
            message = f"Previous response with id '{self.previous_response_id}' not found: nothing is stored here."
            raise RefusedError(404, message, kind="NotFoundError", param="previous_response_id")
        check_fields(profile, self)
        messages: list[PartedMessage] = []
        if self.tools:
            messages.append(PartedMessage("tools", (PromptPart(json.dumps(self.tools)),)))
        if self.instructions:
            messages.append(PartedMessage("developer", (PromptPart(self.instructions),)))
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages += [_message_of(profile, f"input[{number}]", item) for number, item in enumerate(items)]
        return render_parts(
            messages,
            salt=self.salt(profile, self.cache_salt),
            automatic=self.wants_automatic_mark,
            marks=profile.marks is not None,
        )


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
    return PartedMessage("assistant", (PromptPart(json.dumps(item)),))


def _parts_of(profile: CacheProfile, path: str, role: str, content: object) -> tuple[PromptPart, ...]:
    if isinstance(content, str):
        return (PromptPart(content),)
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RefusedError(400, f"Invalid type for '{path}': expected a string or a list of objects.", param=path)
    return tuple(_part_of(profile, f"{path}[{number}]", role, part) for number, part in enumerate(content))


def _part_of(profile: CacheProfile, path: str, role: str, part: _Fields) -> PromptPart:
    mark = part.get("prompt_cache_breakpoint")
    text = part.get("text")
    written = text if isinstance(text, str) else json.dumps({name: part[name] for name in part if not _is_mark(name)})
    if mark is not None:
        validated(PromptCacheBreakpoint, mark, [path, "prompt_cache_breakpoint"])
        check_breakpoint(profile, f"{path}.prompt_cache_breakpoint", role, written)
    return PromptPart(written, marked=mark is not None)


def _is_mark(name: str) -> bool:
    return name == "prompt_cache_breakpoint"
