"""Where finished results wait until their turn comes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from warmprefix.openai.batch_runner.results import BatchResult

__all__ = ["InMemory", "KeptResults"]


class KeptResults(Protocol):
    """Takes every request's result once, and gives it back once."""

    @property
    def answered(self) -> Collection[str]:
        """The ids of requests that were answered before this run; they are not to be sent again."""
        ...

    def put(self, result: BatchResult) -> None: ...
    def take(self, id: str) -> BatchResult: ...
    def close(self) -> None: ...


class InMemory:
    """Keeps them until they are taken, and no longer."""

    answered: Collection[str] = ()

    def __init__(self) -> None:
        self._results: dict[str, BatchResult] = {}

    def put(self, result: BatchResult) -> None:
        self._results[result.id] = result

    def take(self, id: str) -> BatchResult:
        return self._results.pop(id)

    def close(self) -> None:
        """Nothing to let go of."""
