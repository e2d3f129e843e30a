"""The wording of references to repeated tool results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from warmprefix.annotate import check_template

__all__ = ["RepeatTemplates", "shown_call"]

_MAX_NAME_CHARACTERS = 64
_MAX_ARGUMENTS_CHARACTERS = 200

_PLACEHOLDERS = {
    "result": ("call",),
    "rerun": ("call",),
    "passage": ("call", "quote"),
    "passages": ("call", "quotes"),
    "number": ("call", "number"),
}


@dataclass(frozen=True, slots=True)
class RepeatTemplates:
    """The wording of references to repeated tool results.

    Raises:
        TypeError: A template is no str.
        ValueError: A template lacks one of its placeholders, has one twice, has another one, or spans several lines.
    """

    result: str = "[Word for word the result of the earlier call {call}.]"
    """Replaces a whole result. `{call}` stands for the call: ``read({"filePath":"/p/a.py"})``."""

    rerun: str = "[Ran again; word for word the result of the earlier call {call}.]"
    """Replaces a whole result of the same call, made again after other calls."""

    passage: str = "[Word for word in the result of the earlier call {call}: the passage that begins {quote}.]"
    """Replaces one passage of a result. `{quote}` stands for its first words, as a JSON string."""

    passages: str = "[Word for word in the result of the earlier call {call}: the passages that begin {quotes}.]"
    """Replaces neighbouring passages that stand in one earlier result. `{quotes}` stands for a list of their quotes."""

    number: str = "{call}, number {number} of such calls"
    """Takes the place of `{call}` where a call that looks the same may have given another result."""

    def __post_init__(self) -> None:
        for name, placeholders in _PLACEHOLDERS.items():
            check_template(name, getattr(self, name), placeholders)


def shown_call(name: str, arguments: object) -> str:
    """Return a call as references show it: in one line, with its arguments cut to 200 characters."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"), default=_type_name)
    return f"{_one_line(name, _MAX_NAME_CHARACTERS)}({_one_line(arguments, _MAX_ARGUMENTS_CHARACTERS)})"


def _one_line(text: str, max_characters: int) -> str:
    if len(text) <= max_characters and text.isprintable() and text == text.strip(" "):
        return text
    lines = text[: 2 * max_characters].splitlines()
    line = " ".join([stripped for line in lines if (stripped := line.strip())])
    if len(line) > max_characters or len(text) > 2 * max_characters:
        line = line[: max_characters - 1] + "…"
    # JSON can hold a lone surrogate in escaped form, but no client can encode it as UTF-8.
    return line.encode("utf-8", "backslashreplace").decode()


def _type_name(value: Any) -> str:
    return type(value).__name__
