"""Bodies of Anthropic's Messages API, their marks, and the refusals of marks against the rules.

The rules are those of https://platform.claude.com/docs/en/build-with-claude/prompt-caching, as of November 2026:

- blocks are processed in the order tools, system, messages, and each of them can have a mark (`cache_control`);
- a request has at most four marks; one in the body itself is automatic and stands on the last block that can have one;
- a mark with `ttl` "1h" must not come after one with "5m";
- an empty text and a thinking block cannot have a mark.

Messages of refusals are those that users report of the real API. A profile without marks ignores them.

`system` messages in mid-conversation, with `tool_addition` and `tool_removal`, follow
https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages: with hosted profiles they stand
where they are. With the others they do what vLLM 0.32 does: texts stay, and additions and removals change the list of
tools in front. Tools with `defer_loading` are part of the prompt only where they are added or referred to.

Of `context_management`, hosted profiles know `clear_thinking_20251015` and refuse the other edits; the others ignore
the field, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from warmprefix.cache_profiles import CacheProfile, MarkRules
from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt, is_hosted
from warmprefix_tools.emulator.parted_prompts import PartedMessage, PromptPart, render_parts
from warmprefix_tools.emulator.serving import RefusedError, validated

try:
    from pydantic import BaseModel, Field
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["CountTokensRequest", "MessagesRequest"]

_SECONDS = {"5m": 300.0, "1h": 3600.0}
_THINKING = ("thinking", "redacted_thinking")
_TOOL_CHANGES = ("tool_addition", "tool_removal")
_TOOLS_BETA = "mid-conversation-tool-changes-2026-07-01"
_INLINE_TOOLS = "inline-tools-2026-09-15"
_UNSEEN_BY_VLLM = ("x-anthropic-billing-header",)
"""Beginnings of Claude Code's system blocks that vLLM leaves out of a prompt, because they change."""

_Block = dict[str, Any]


class CacheControl(BaseModel):
    """A mark."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Turn(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]
    clear_at: Literal["next_user_message", "never"] | None = None


class KeptThinking(BaseModel):
    """The newest answers whose thinking stays."""

    type: Literal["all", "thinking_turns"]
    value: Annotated[int, Field(ge=1)] = 1


class ThinkingEdit(BaseModel):
    """An edit of the prompt that clears thinking."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptThinking = KeptThinking(type="thinking_turns")


class ContextManagement(BaseModel):
    """What the API is to clear in a prompt."""

    edits: list[ThinkingEdit] = Field(default_factory=list)


class CountTokensRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[_Block] | None = None
    tools: list[_Block] | None = None
    cache_control: CacheControl | None = None
    cache_salt: str | None = None
    context_management: _Block | None = None

    def prompt_for(self, profile: CacheProfile, salt: str | None, betas: str = "") -> MarkedPrompt:
        """Return the prompt with its marks.

        Args:
            profile: The cache.
            salt: What keeps the request's cache apart.
            betas: The header `anthropic-beta`.

        Raises:
            RefusedError: A mark, a message or an edit is against the rules.
        """
        if is_hosted(profile):
            self._check_system_messages(betas)
            places = self._uncleared(list(self._places(in_place=True)))
        else:
            hidden = _UNSEEN_BY_VLLM if "vllm" in profile.name or profile.name == "full-attention" else ()
            places = [
                place
                for place in self._places(in_place=False)
                if place.role != "system" or not _text_of(place.block).startswith(hidden)
            ]
        rules = profile.marks
        lifetimes = {} if rules is None else _checked_marks(places, self.cache_control, rules)
        messages: list[PartedMessage] = []
        for role, number in dict.fromkeys((place.role, place.message) for place in places):
            parts = tuple(
                PromptPart(_text_of(place.block), marked=place.path in lifetimes, lifetime=lifetimes.get(place.path))
                for place in places
                if (place.role, place.message) == (role, number)
            )
            messages.append(PartedMessage(role, parts, has_automatic_mark=role == "user"))
        return render_parts(messages, salt=salt)

    def _places(self, *, in_place: bool) -> Iterator[_BlockPlace]:
        """Yield the blocks that the model sees; `in_place` if changes of tools stand where they are."""
        changes = {tool["name"]: tool for tool in self.tools or () if isinstance(tool.get("name"), str)}
        offered = {number: tool for number, tool in enumerate(self.tools or ()) if not tool.get("defer_loading")}
        if not in_place:
            offered = dict(enumerate(self._resolved()))
        for number, tool in offered.items():
            yield _BlockPlace(f"tools.{number}", "tools", -2, tool)
        for number, block in enumerate(_blocks_of(self.system or [])):
            yield _BlockPlace(f"system.{number}", "system", -1, block)
        newest = max((number for number, turn in enumerate(self.messages) if turn.role == "user"), default=0)
        for number, turn in enumerate(self.messages):
            if turn.clear_at == "next_user_message" and number < newest:
                continue
            for position, block in enumerate(_blocks_of(turn.content)):
                path = f"messages.{number}.content.{position}"
                if block.get("type") not in _TOOL_CHANGES:
                    yield _BlockPlace(path, turn.role, number, _with_definitions(block, changes))
                elif in_place:
                    name, tool = _changed_tool(path, block, changes)
                    changes[name] = tool
                    yield _BlockPlace(path, turn.role, number, {**block, "tool": tool})

    def _resolved(self) -> list[_Block]:
        """Return the tools in effect at the end of the conversation, without deferred ones."""
        tools = {str(tool.get("name")): tool for tool in self.tools or ()}
        for number, turn in enumerate(self.messages):
            for position, block in enumerate(_blocks_of(turn.content)):
                if block.get("type") in _TOOL_CHANGES:
                    name, tool = _changed_tool(f"messages.{number}.content.{position}", block, tools)
                    is_removal = block.get("type") == "tool_removal"
                    tools[name] = {**tool, "defer_loading": True} if is_removal else _loaded(tool)
        return [tool for tool in tools.values() if not tool.get("defer_loading")]

    def _check_system_messages(self, betas: str) -> None:
        roles = [None, *(turn.role for turn in self.messages), None]
        for number, turn in enumerate(self.messages):
            changes = [block for block in _blocks_of(turn.content) if block.get("type") in _TOOL_CHANGES]
            if changes and turn.role != "system":
                raise RefusedError(400, f"messages.{number}: tools change in messages with the role 'system' only")
            needed = _INLINE_TOOLS if any("definition" in block.get("tool", {}) for block in changes) else _TOOLS_BETA
            if changes and needed not in betas and _INLINE_TOOLS not in betas:
                raise RefusedError(400, f"messages.{number}.content: requires the anthropic-beta header '{needed}'")
            if turn.role == "system" and (
                roles[number] not in ("user", "system") or roles[number + 2] not in ("assistant", "system", None)
            ):
                message = f"messages.{number}: a system message must follow a user message, and be the last one or"
                raise RefusedError(400, f"{message} be followed by an assistant message")

    def _uncleared(self, places: list[_BlockPlace]) -> list[_BlockPlace]:
        """Return the blocks that `context_management` leaves."""
        management = validated(ContextManagement, self.context_management or {}, ["context_management"])
        for edit in management.edits:
            if isinstance(edit.keep, KeptThinking) and edit.keep.type == "thinking_turns":
                thought = sorted({place.message for place in places if place.kind in _THINKING})
                cleared = thought[: -edit.keep.value]
                places = [place for place in places if not (place.kind in _THINKING and place.message in cleared)]
        return places


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = False


@dataclass(frozen=True, slots=True)
class _BlockPlace:
    """One block, and where it stands."""

    path: str
    role: str
    message: int
    block: _Block

    @property
    def kind(self) -> str:
        return str(self.block.get("type", "tool"))

    @property
    def is_empty_text(self) -> bool:
        return self.kind == "text" and not self.block.get("text")

    def can_have_mark(self, rules: MarkRules) -> bool:
        return not (
            (self.is_empty_text and "empty" in rules.refused_on)
            or (self.kind in _THINKING and "thinking" in rules.refused_on)
            or self.role in rules.refused_on
        )


def _checked_marks(places: list[_BlockPlace], automatic: CacheControl | None, rules: MarkRules) -> dict[str, float]:
    """Return the lifetime in seconds of each mark, by path and in order."""
    marks: dict[str, str] = {}
    for place in places:
        if place.block.get("cache_control") is None:
            continue
        control = validated(CacheControl, place.block["cache_control"], [place.path, "cache_control"])
        if not place.can_have_mark(rules):
            raise _refusal_of_place(place)
        marks[place.path] = control.ttl
    if automatic is not None:
        last = next((place.path for place in reversed(places) if place.can_have_mark(rules)), None)
        if last is not None and marks.setdefault(last, automatic.ttl) != automatic.ttl:
            raise RefusedError(400, f"cache_control: ttl='{automatic.ttl}' contradicts {last}.cache_control.ttl.")
        marks = {place.path: marks[place.path] for place in places if place.path in marks}
    if len(marks) > rules.most:
        message = f"A maximum of {rules.most} blocks with cache_control may be provided. Found {len(marks)}."
        raise RefusedError(400, message)
    shortest = max(rules.lifetimes)
    for path, ttl in marks.items():
        lifetime = _SECONDS[ttl]
        if lifetime not in rules.lifetimes:
            raise RefusedError(400, f"{path}.cache_control.ttl: ttl='{ttl}' is not supported.")
        if lifetime > shortest:
            raise RefusedError(
                400,
                f"{path}.cache_control.ttl: a ttl='{ttl}' cache_control block must not come after a"
                f" ttl='5m' cache_control block. Note that blocks are processed in the following order:"
                f" `tools`, `system`, `messages`.",
            )
        shortest = lifetime
    return {path: _SECONDS[ttl] for path, ttl in marks.items()}


def _refusal_of_place(place: _BlockPlace) -> RefusedError:
    if place.is_empty_text:
        return RefusedError(400, f"{place.path}.text: cache_control cannot be set for empty text blocks")
    return RefusedError(400, f"{place.path}.{place.kind}.cache_control: Extra inputs are not permitted")


def _blocks_of(content: str | list[_Block]) -> list[_Block]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text_of(block: _Block) -> str:
    """Return what the model reads of a block; where marks stand is no part of it."""
    text = block.get("text")
    if block.get("type") == "text" and isinstance(text, str):
        return text
    return json.dumps(_without_marks(block))


def _changed_tool(path: str, block: _Block, tools: Mapping[str, _Block]) -> tuple[str, _Block]:
    """Return the name and the definition of the tool that a block adds or removes."""
    tool = block.get("tool")
    tool = tool if isinstance(tool, dict) else {}
    definition = tool.get("definition")
    if block["type"] == "tool_addition" and isinstance(definition, dict) and isinstance(definition.get("name"), str):
        return definition["name"], definition
    name = str(tool.get("name"))
    if name not in tools:
        raise RefusedError(400, f"{path}.tool.name: tool '{name}' was not found in tools")
    return name, tools[name]


def _loaded(tool: _Block) -> _Block:
    return {name: value for name, value in tool.items() if name != "defer_loading"}


def _with_definitions(block: _Block, tools: Mapping[str, _Block]) -> _Block:
    """Return a tool's result with the definitions of the deferred tools that it refers to."""
    content = block.get("content")
    if block.get("type") != "tool_result" or not isinstance(content, list):
        return block
    shown = []
    for part in content:
        name = str(part.get("tool_name", part.get("name"))) if isinstance(part, dict) else ""
        shown.append({**part, "tool": tools[name]} if name in tools else part)
    return {**block, "content": shown}


def _without_marks(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_marks(field) for name, field in value.items() if name != "cache_control"}
    if isinstance(value, list):
        return [_without_marks(each) for each in value]
    return value
