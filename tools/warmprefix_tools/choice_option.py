"""The option `--choose`: which of more candidates than places are fed, in the words of a command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warmprefix import Choice

__all__ = ["ChoiceOption", "parse_choice"]


def _flag(word: str) -> bool:
    return {"yes": True, "no": False}[word]


_FIELDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "k": (int, "an integer"),
    "keep": (int, "an integer"),
    "within": (float, "a number"),
    "extra": (int, "an integer"),
    "twins": (_flag, "yes or no"),
    "scores": (str, "similarity or distance"),
    "most": (float, "a number"),
}
"""How the value of each field is read, and what it may be."""


@dataclass(frozen=True, slots=True)
class ChoiceOption:
    """A choice whose places may differ from request to request."""

    text: str
    """As it was given."""
    fields: dict[str, Any]
    """Fields of `Choice`, without those that were not given."""

    def of(self, k: int | None) -> Choice | None:
        """Return the choice of a request with `k` places of its own; None if neither says how many there are."""
        k = self.fields.get("k", k)
        if k is None:
            return None
        fields = {**self.fields, "k": k}
        if "k" not in self.fields and "keep" in fields:
            fields["keep"] = min(fields["keep"], k)
        return Choice(**fields)


def parse_choice(text: str) -> ChoiceOption:
    """Return the choice in a list such as `k=8,keep=3,within=0.2,extra=2`.

    Without `k`, each request has its own.

    >>> parse_choice("k=8,extra=2").of(None)
    Choice(k=8, keep=None, within=0.2, extra=2, ...)

    Raises:
        ValueError: A field is unknown, comes twice, or has a value that `Choice` refuses.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _FIELDS:
            raise ValueError(f"--choose takes {', '.join(_FIELDS)}, as k=8,keep=3; got {part!r}")
        if name in fields:
            raise ValueError(f"--choose takes each field once, got {name} twice in {text!r}")
        read, allowed = _FIELDS[name]
        try:
            fields[name] = read(value)
        except (ValueError, KeyError):
            raise ValueError(f"--choose: {name} must be {allowed}, got {value!r}") from None
    option = ChoiceOption(text, fields)
    try:
        option.of(fields.get("keep") or 1)
    except ValueError as error:
        raise ValueError(f"--choose: {error}") from None
    return option
