"""What became of one request of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from warmprefix.batch.plan import PlannedRequest

__all__ = ["BatchResult"]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One request's answer, or why there is none: of `completion` and `error`, one is None."""

    request: PlannedRequest
    completion: Mapping[str, Any] | None = field(repr=False)
    """The chat completion as JSON, as it would have come without streaming."""
    error: str | None
    """The kind and message of what the last attempt failed with."""
    attempts: int
    """How often it was sent in the run that this is the result of; 0 where that is not known."""
    ttft: float | None
    """Seconds from sending the last attempt to its first token; None where not measured."""

    @property
    def id(self) -> str:
        """The request's own id."""
        return self.request.id

    @property
    def text(self) -> str | None:
        """The text of the first choice; None without an answer, or if it has no text, as with tool calls."""
        text: str | None = self._message.get("content")
        return text

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls of the first choice."""
        return self._message.get("tool_calls") or ()

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended."""
        reason: str | None = self._choice.get("finish_reason")
        return reason

    @property
    def prompt_tokens(self) -> int | None:
        """As the engine counted; None if it did not say, as for the next two."""
        return _number(self._usage.get("prompt_tokens"))

    @property
    def completion_tokens(self) -> int | None:
        """Tokens of the answer."""
        return _number(self._usage.get("completion_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were in the engine's prefix cache."""
        return _number((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens"))

    @property
    def _choice(self) -> Mapping[str, Any]:
        choices = (self.completion or {}).get("choices")
        return choices[0] if choices else {}

    @property
    def _message(self) -> Mapping[str, Any]:
        return self._choice.get("message") or {}

    @property
    def _usage(self) -> Mapping[str, Any]:
        return (self.completion or {}).get("usage") or {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
