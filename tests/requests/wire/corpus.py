"""The corpus of wire shapes: see README.md next to it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from warmprefix_requests.usage import TokenUsage

__all__ = ["WireAnswer", "WireRequest", "wire_answers", "wire_requests"]

_FOLDER = Path(__file__).parent
_LINE = re.compile(r"\ufeff?(data|event|id|retry)?:")


@dataclass(frozen=True)
class WireAnswer:
    """An answer as a vendor writes it, and what is to be read of it."""

    vendor: str
    name: str
    source: str
    route: str
    usage: list[int | None]
    body: Any = None
    events: list[Any] | None = None
    raw: str | None = None
    line_end: str = "\n"
    text: str | None = None
    end: str = "well"

    @property
    def id(self) -> str:
        """Name of the test."""
        return f"{self.vendor}: {self.name}"

    @property
    def tokens(self) -> TokenUsage:
        """The counts to be read."""
        return TokenUsage(*self.usage)

    @property
    def streams(self) -> bool:
        """True if it is a stream."""
        return self.body is None and not (self.raw or "").startswith("{")

    @property
    def payload(self) -> Any:
        """The object of an answer in one piece."""
        return json.loads(self.content)

    @cached_property
    def content(self) -> bytes:
        """The bytes of the answer."""
        if self.raw is not None:
            return self.raw.encode()
        if self.events is None:
            return json.dumps(self.body).encode()
        return "".join([self._event(event) + self.line_end * 2 for event in self.events]).encode()

    def _event(self, event: Any) -> str:
        if isinstance(event, str):
            return event.replace("\n", self.line_end) if _LINE.match(event) else f"data: {event}"
        name = event.get("type") if self.route != "chat" else None
        front = f"event: {name}{self.line_end}" if isinstance(name, str) else ""
        return f"{front}data: {json.dumps(event)}"


@dataclass(frozen=True)
class WireRequest:
    """A request as a client writes it, and what is to be read of it."""

    client: str
    name: str
    source: str
    route: str
    body: dict[str, Any]
    messages: list[list[str]]
    prompt: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    is_text: bool = True
    references: int = 0

    @property
    def id(self) -> str:
        """Name of the test."""
        return f"{self.client}: {self.name}"


def _entries(folder: str) -> list[tuple[str, dict[str, Any]]]:
    files = sorted((_FOLDER / folder).glob("*.json"))
    return [(file.stem, entry) for file in files for entry in json.loads(file.read_text("utf-8"))]


def wire_answers() -> list[WireAnswer]:
    """Return all answers of the corpus."""
    return [WireAnswer(vendor, **entry) for vendor, entry in _entries("answers")]


def wire_requests() -> list[WireRequest]:
    """Return all requests of the corpus."""
    return [WireRequest(client, **entry) for client, entry in _entries("requests")]
