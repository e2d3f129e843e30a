"""The interface through which workers learn from the orders that others served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from warmprefix.plan import Scope

__all__ = ["MAX_BLOCKS", "MAX_TOKENS", "Learn", "LearnedOrder", "NoSharing", "OrderSharing", "SharingStats"]

MAX_BLOCKS = 1_024
"""Per order."""
MAX_TOKENS = (1 << 24) - 1
"""Per block."""


class LearnedOrder(NamedTuple):
    """One request's context as the model saw it, in planned order."""

    keys: Sequence[bytes]
    """Fingerprints; never a text, a label or an id."""
    tokens: Sequence[int]
    """Length of each block in tokens."""
    ranks: Sequence[int]
    """Each block's position in relevance order."""


Learn: TypeAlias = Callable[[Sequence[LearnedOrder]], object]
"""Receives orders of other workers in batches, oldest first."""


@dataclass(frozen=True, slots=True)
class SharingStats:
    """A snapshot of one worker's counts; all but `lag` only ever grow."""

    published: int = 0
    """Orders of this worker that the others can read."""
    received: int = 0
    """Orders of others that were learned."""
    dropped: int = 0
    """Orders of this worker that the others will never read: the queue was full, or they could not be sent."""
    malformed: int = 0
    """Entries skipped because they are damaged, of another version, or from another application."""
    errors: int = 0
    """Failures of the transport or of a `Learn` function."""
    lag: float | None = None
    """Seconds from sending the last order that was read to learning it; None while unknown."""


@runtime_checkable
class OrderSharing(Protocol):
    """Publishes the orders that one planner served, and delivers those of other workers.

    Nothing here runs during a request: no method does I/O or waits for any, and only the constructor raises. An order
    that is lost, arrives twice or arrives late costs cache hits and nothing else.
    """

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        """Send an order to the other workers soon. O(1); the order must not change any more."""
        ...

    def follow(self, scope: Scope, learn: Learn) -> None:
        """Pass the orders that others serve in this scope to `learn`, starting with the latest earlier ones.

        `learn` is called from another thread, with no lock held, for one scope at a time. It replaces the scope's
        previous `learn`.
        """
        ...

    def unfollow(self, scope: Scope) -> None:
        """Stop calling `learn` for a scope; a call in progress may still finish."""
        ...

    def close(self) -> None:
        """Send queued orders, if that is quick, and end. Nothing is shared after it."""
        ...

    def stats(self) -> SharingStats:
        """Return counts since the start."""
        ...


class NoSharing:
    """An `OrderSharing` that shares nothing."""

    def publish(self, scope: Scope, order: LearnedOrder) -> None: ...
    def follow(self, scope: Scope, learn: Learn) -> None: ...
    def unfollow(self, scope: Scope) -> None: ...
    def close(self) -> None: ...

    def stats(self) -> SharingStats:
        """Return zeros."""
        return SharingStats()
