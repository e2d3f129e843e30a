"""The result of one request of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from warmprefix.batch.plan import PlannedRequest
from warmprefix.openai.completion import ChatFields

__all__ = ["BatchResult"]


@dataclass(frozen=True, slots=True)
class BatchResult(ChatFields):
    """One request's answer, or its failure: of `completion` and `error`, one is None."""

    request: PlannedRequest
    completion: Mapping[str, Any] | None = field(repr=False)
    """The chat completion as JSON, as it would have come without streaming."""
    error: str | None
    """Kind and message of the last attempt's failure."""
    attempts: int
    """Number of attempts in the run that brought this result; 0 if unknown."""
    ttft: float | None
    """Seconds from sending the last attempt to its first token; None where not measured."""

    @property
    def id(self) -> str:
        """The request's own id."""
        return self.request.id
