"""The contract between a planner and a feed that reports which blocks an engine holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from warmprefix.plan import Scope

__all__ = ["FeedStats", "FoundCheckpoints", "NoFeed", "ResidencyFeed", "ResidencyTarget", "ServedPrompt"]


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt that an engine has served, whose context blocks a feed looks for among the KV blocks."""

    scope: Scope
    """The scope of the prompt."""
    cache_salt: str | None
    """The salt that the prompt was sent with; None without one."""
    keys: tuple[bytes, ...]
    """Fingerprints of the context blocks, in planned order."""
    paragraphs: tuple[str, ...]
    """Each block as the prompt shows it; needed until it has been found once."""
    token_ids: Sequence[int] | Callable[[], Sequence[int]]
    """The whole prompt, or a function that returns it; a feed calls it in a thread of its own."""


@dataclass(frozen=True, slots=True)
class FeedStats:
    """A snapshot of a feed's counts since it began; docs/telemetry.md describes each one."""

    sources: int = 0
    """Publishers seen so far: engines, or their data-parallel ranks."""
    connected: bool = False
    """True if the state of all publishers is complete: no event was lost for good."""
    events: int = 0
    gaps: int = 0
    """Times that batches were missing."""
    replayed: int = 0
    """Batches received by replay."""
    wipes: int = 0
    """Times that a publisher's state was discarded: it restarted, or a gap could not be filled."""
    malformed: int = 0
    unknown: int = 0
    """Events of an unknown type, and stored blocks with an unknown parent."""
    dropped: int = 0
    """KV blocks and prompts dropped to stay within the bounds."""
    unmapped: int = 0
    """Prompts in which the context blocks were not found."""
    lag: float = 0.0
    """Seconds between the last batch's own timestamp and its application."""
    kv_blocks: int = 0
    prompts: int = 0
    failures: int = 0
    """Failures after which the feed started over."""


class FoundCheckpoints(NamedTuple):
    """Where on one path of context blocks an engine continues that keeps checkpoints."""

    block: int
    """Tokens between possible checkpoints."""
    ends: tuple[int, ...]
    """For each checkpoint, the number of context blocks up to its end, the last one perhaps in part. Ascending."""


class ResidencyTarget(Protocol):
    """Receives changes of residency. `ContextPlanner.residency` is one."""

    def residency_changed(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None = None,
    ) -> None:
        """Record that the engine holds the first `resident_blocks` of `keys`, in this order after the preamble.

        It continues only behind the `checkpoints`; with None, behind any of these blocks as far as the feed has seen.
        """


@runtime_checkable
class ResidencyFeed(Protocol):
    """Reports which context blocks are resident, as the engine itself publishes it.

    No method blocks, or raises because of the engine; all may be called from any thread.
    """

    def follow(self, target: ResidencyTarget) -> None:
        """Start to notify `target`, which is held weakly, from a thread or task of the feed."""

    def remember(self, served: ServedPrompt) -> None:
        """Find the context blocks of a served prompt, and notify the target whenever their residency changes."""

    def is_complete(self, cache_salt: str | None) -> bool:
        """Return True if the feed has the full state of all engines for prompts with this salt.

        It is then more reliable than an engine's report on one answer.
        """
        ...

    def stats(self) -> FeedStats:
        """Return a snapshot of the feed's counts."""
        ...

    def close(self) -> None:
        """Stop the feed. Idempotent."""


class NoFeed:
    """A `ResidencyFeed` that reports nothing."""

    def follow(self, target: ResidencyTarget) -> None: ...
    def remember(self, served: ServedPrompt) -> None: ...
    def is_complete(self, cache_salt: str | None) -> bool:
        return False

    def stats(self) -> FeedStats:
        return FeedStats()

    def close(self) -> None: ...
