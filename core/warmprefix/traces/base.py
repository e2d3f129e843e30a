"""Where a planner tells of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from warmprefix.blocks import ContextBlock

__all__ = ["NoRecorder", "RequestRecorder"]


@runtime_checkable
class RequestRecorder(Protocol):
    """Is told of every request that a planner plans, from any thread, before it is planned."""

    def record(
        self,
        blocks: Sequence[ContextBlock],
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
    ) -> None:
        """Note one request: its distinct blocks in relevance order, and what `ContextPlanner.plan` was told of it.

        It delays the request, so it should be quick. What it raises is counted and logged by the planner, and the
        request goes on.
        """
        ...


class NoRecorder:
    """Notes nothing."""

    def record(
        self,
        blocks: Sequence[ContextBlock],
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
    ) -> None: ...
