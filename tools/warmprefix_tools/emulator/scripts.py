"""Scripts: the answers that an emulator gives instead of its own, with tool calls, so that agents run real loops."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmprefix.errors import WarmprefixError
from warmprefix_tools.emulator.answers import ComposedAnswer, ToolCall, scripted_answer

__all__ = ["AnswerScript", "ScriptError", "turns_of"]

_Answer = tuple[str, tuple[tuple[str, str], ...]]
_ITEMS_OF_THE_MODEL = ("function_call", "custom_tool_call", "reasoning")


class ScriptError(WarmprefixError, ValueError):
    """A script could not be read; the message has the reason."""


@dataclass(frozen=True, slots=True)
class AnswerScript:
    """The answers of an agent's loop, in order.

    A file holds them as a JSON array of objects with `text`, `calls` or both, where a call has the `name` of a tool and
    its `arguments`. A request with tools gets the answer after those that its history shows; requests without tools,
    and those behind the last answer, get the emulator's own. An object with `when` stands outside of this order: its
    answer goes to all requests, with or without tools, whose body contains that text; of several, the first counts.
    """

    answers: tuple[_Answer, ...]
    """For each answer its text, and the name and the arguments of each of its calls."""
    by_text: tuple[tuple[str, _Answer], ...] = ()
    """Answers for bodies with a text, after that text."""

    @classmethod
    def read(cls, path: Path) -> AnswerScript:
        """Read a file.

        Raises:
            ScriptError: It can't be read, or is not of this form.
        """
        try:
            entries = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ScriptError(f"{path} could not be read: {error}") from error
        if not isinstance(entries, list):
            raise ScriptError(f"{path} must have a JSON array of answers, got {type(entries).__name__}")
        read = [(_when(path, number, entry), _read_answer(path, number, entry)) for number, entry in enumerate(entries)]
        return cls(
            tuple(answer for when, answer in read if when is None),
            tuple((when, answer) for when, answer in read if when is not None),
        )

    def answer(self, turns: int | None, max_tokens: int, body: bytes = b"") -> ComposedAnswer | None:
        """Return the answer to a body, or the one after this many; None behind the last one and without tools."""
        shown = json.dumps(json.loads(body)) if self.by_text and body else ""
        found = next((answer for when, answer in self.by_text if when in shown), None)
        if found is None and turns is not None and turns < len(self.answers):
            found = self.answers[turns]
        if found is None:
            return None
        text, calls = found
        made = [ToolCall(f"call_{turns or 0}_{number}", *call) for number, call in enumerate(calls)]
        return scripted_answer(text, made, max_tokens)


def turns_of(messages: Sequence[Any]) -> int:
    """Return the number of answers in a history; items of one answer that follow each other count once."""
    turns, was_model = 0, False
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        is_model = fields.get("role") == "assistant" or fields.get("type") in _ITEMS_OF_THE_MODEL
        turns += is_model and not (was_model and "type" in fields)
        was_model = is_model
    return turns


def _when(path: Path, number: int, entry: object) -> str | None:
    when = entry.get("when") if isinstance(entry, dict) else None
    if when is not None and not (when and isinstance(when, str)):
        raise ScriptError(f"{path}, answer {number}: `when` must be a text")
    return None if when is None else json.dumps(when)[1:-1]


def _read_answer(path: Path, number: int, entry: object) -> _Answer:
    fields: Any = entry if isinstance(entry, dict) else {}
    text, calls = fields.get("text", ""), fields.get("calls", [])
    is_valid = isinstance(text, str) and isinstance(calls, list) and bool(text or calls)
    if not is_valid or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ScriptError(f"{path}, answer {number}: an answer must have a text, or calls with names")
    try:
        return text, tuple((call["name"], _arguments(call.get("arguments", {}))) for call in calls)
    except ValueError as error:
        raise ScriptError(f"{path}, answer {number}: arguments in a string must be JSON: {error}") from error


def _arguments(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    json.loads(value)
    return value
