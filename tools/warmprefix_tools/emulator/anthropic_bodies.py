"""Bodies of Anthropic's Messages API, their marks, and the refusals of marks against the rules.

The rules are those of https://platform.claude.com/docs/en/build-with-claude/prompt-caching, as of November 2026:

- blocks are processed in the order tools, system, messages, and each of them can have a mark (`cache_control`);
- a request has at most four marks; one in the body itself is automatic and stands on the last block that can have one;
- a mark with `ttl` "1h" must not come after one with "5m";
- an empty text and a thinking block cannot have a mark.

Messages of refusals are those that users report of the real API. A profile without marks ignores them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from warmprefix.cache_profiles import CacheProfile, MarkRules
from warmprefix.errors import MissingExtraError
from warmprefix_tools.caches import MarkedPrompt
from warmprefix_tools.emulator.parted_prompts import PartedMessage, PromptPart, render_parts
from warmprefix_tools.emulator.serving import RefusedError, validated

try:
    from pydantic import BaseModel, Field
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["CountTokensRequest", "MessagesRequest"]

_SECONDS = {"5m": 300.0, "1h": 3600.0}
_THINKING = ("thinking", "redacted_thinking")

_Block = dict[str, Any]


class CacheControl(BaseModel):
    """A mark."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Turn(BaseModel):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[_Block]


class CountTokensRequest(BaseModel):
    """Body of POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[_Block] | None = None
    tools: list[_Block] | None = None
    cache_control: CacheControl | None = None
    cache_salt: str | None = None

    def prompt_for(self, profile: CacheProfile, salt: str | None) -> MarkedPrompt:
        """Return the prompt with its marks.

        Raises:
            RefusedError: A mark is against the rules.
        """
        places = list(self._places())
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

    def _places(self) -> Iterator[_BlockPlace]:
        for number, tool in enumerate(self.tools or ()):
            yield _BlockPlace(f"tools.{number}", "tools", -2, tool)
        for number, block in enumerate(_blocks_of(self.system or [])):
            yield _BlockPlace(f"system.{number}", "system", -1, block)
        for number, turn in enumerate(self.messages):
            for position, block in enumerate(_blocks_of(turn.content)):
                yield _BlockPlace(f"messages.{number}.content.{position}", turn.role, number, block)


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


def _without_marks(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_marks(field) for name, field in value.items() if name != "cache_control"}
    if isinstance(value, list):
        return [_without_marks(each) for each in value]
    return value
