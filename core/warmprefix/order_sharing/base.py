"""The seam between workers that learn: what each served, told to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from warmprefix.plan import Scope

__all__ = ["Learn", "LearnedOrder", "NoSharing", "OrderSharing", "SharingStats"]


class LearnedOrder(NamedTuple):
    """One request's context as the model saw it, in planned order: what a worker learns from."""

    keys: Sequence[bytes]
    """Fingerprints; never a text, a label or an id."""
    tokens: Sequence[int]
    ranks: Sequence[int]
    """Each block's place in relevance order."""


Learn = Callable[[Sequence[LearnedOrder]], object]
"""Takes orders of other workers, oldest first, some at a time."""


@dataclass(frozen=True, slots=True)
class SharingStats:
    """A snapshot of one worker's counts; all but the last only ever grow."""

    published: int = 0
    """Orders of this worker that the others can read."""
    received: int = 0
    """Orders of others that were learned."""
    dropped: int = 0
    """Orders of this worker that the others will never read: they came faster than they could be sent, or could not be
    sent at all."""
    malformed: int = 0
    """Entries skipped: damaged, of another version, or from somebody else altogether."""
    errors: int = 0
    """Failures of what carries the orders, or of who learns them."""
    lag: float | None = None
    """Seconds from when the last order that was read had been sent to when it was learned; None where none was, or it
    can't be told yet."""


@runtime_checkable
class OrderSharing(Protocol):
    """Tells other workers what this one served, and this one what they did. One planner's.

    Nothing here is on the way of a request: no method does I/O or waits for any, and none but the constructor raises.
    An order that is lost, comes twice, or comes late costs hits and nothing else.
    """

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        """Let the others know, soon. O(1); the order must not change any more."""
        ...

    def follow(self, scope: Scope, learn: Learn) -> None:
        """From now on, tell `learn` what others serve in this scope, beginning with the latest of what they did before.

        `learn` is called from another thread, with no lock held, for one scope at a time. It takes the place of who
        followed this scope before.
        """
        ...

    def unfollow(self, scope: Scope) -> None:
        """Tell no more; what was being told when this was called may still come to its end."""
        ...

    def has_caught_up(self, scope: Scope) -> bool:
        """Whether what others did before this one followed the scope is learned; False if it does not follow it."""
        ...

    def close(self) -> None:
        """Send what waits, if that goes quickly, and end. Nothing is shared after it."""
        ...

    def stats(self) -> SharingStats:
        """Counts since the start."""
        ...


class NoSharing:
    """Learns from nobody, and tells nobody."""

    def publish(self, scope: Scope, order: LearnedOrder) -> None: ...
    def follow(self, scope: Scope, learn: Learn) -> None: ...
    def unfollow(self, scope: Scope) -> None: ...
    def close(self) -> None: ...

    def has_caught_up(self, scope: Scope) -> bool:
        """Always: there is nothing to learn."""
        return True

    def stats(self) -> SharingStats:
        """All zero."""
        return SharingStats()
