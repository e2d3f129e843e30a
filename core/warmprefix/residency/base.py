"""What an engine tells of its prefix cache, and who listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from warmprefix.plan import Scope

__all__ = ["EngineReport", "FeedStats", "NoFeed", "ResidencyFeed", "ResidencyTarget", "ServedPrompt"]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What became known of one answer; each field is None where the engine does not tell."""

    cached_tokens: int | None = None
    """Of the prompt's tokens, those that the prefix cache held: `usage.prompt_tokens_details.cached_tokens`."""
    prompt_tokens: int | None = None
    """Of the whole prompt: `usage.prompt_tokens`."""
    ttft: float | None = None
    """Seconds from the request to the first token of the answer."""
    prompt_token_ids: Sequence[int] | None = None
    """The whole prompt as the engine saw it."""
    block_ends: Sequence[float] | None = None
    """For each planned block, in planned order, the share of the prompt's characters that stands up to its end, from 0
    to 1."""


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt that an engine has seen, whose context blocks are to be found among its KV blocks."""

    scope: Scope
    cache_salt: str | None
    keys: tuple[bytes, ...]
    """Fingerprints of the context blocks, in planned order."""
    paragraphs: tuple[str, ...]
    """Each block as the prompt shows it; needed until it has been found once."""
    token_ids: Sequence[int]
    """The whole prompt."""


@dataclass(frozen=True, slots=True)
class FeedStats:
    """A snapshot; counts since the feed began."""

    sources: int = 0
    """Publishers heard of: engines, or their data-parallel ranks."""
    connected: bool = False
    """Whether what all of them hold is known: nothing was missed that could not be replayed."""
    events: int = 0
    gaps: int = 0
    """Times that batches were missing."""
    replayed: int = 0
    """Batches that were asked for again, and came."""
    wipes: int = 0
    """Times that a source was set to unknown, for its restart or a gap that could not be filled."""
    malformed: int = 0
    """Messages that could not be read."""
    unknown: int = 0
    """Events of a type, and stored blocks with a parent, that nothing is known of."""
    dropped: int = 0
    """KV blocks and prompts forgotten to keep within the bounds."""
    unmapped: int = 0
    """Prompts in which the context blocks could not be found."""
    lag: float = 0.0
    """Seconds between the last batch's own time and its being applied."""
    kv_blocks: int = 0
    """KV blocks known to be held."""
    prompts: int = 0
    """Prompts remembered."""
    failures: int = 0
    """Times that it failed and began anew."""


class ResidencyTarget(Protocol):
    """Who wants to know. A `ContextPlanner` is one."""

    def residency_changed(self, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None:
        """Of the blocks `keys`, which follow the preamble in this order, the engine holds the first so many."""


@runtime_checkable
class ResidencyFeed(Protocol):
    """Knows from the engine itself which context blocks are resident.

    No method blocks, nor raises for the engine's sake; all may be called from any thread.
    """

    def follow(self, target: ResidencyTarget) -> None:
        """Begin, and from now on tell `target`, which is held weakly, from a thread or task of the feed's own."""

    def remember(self, served: ServedPrompt) -> None:
        """A prompt was served: find its context blocks in it, and tell whenever another part of it is resident."""

    def knows(self, cache_salt: str | None) -> bool:
        """Whether all that engines hold of prompts with this salt is known now: then it knows better than a report."""
        ...

    def stats(self) -> FeedStats: ...

    def close(self) -> None:
        """End; idempotent."""


class NoFeed:
    """Nothing is known from the engine."""

    def follow(self, target: ResidencyTarget) -> None:
        pass

    def remember(self, served: ServedPrompt) -> None:
        pass

    def knows(self, cache_salt: str | None) -> bool:
        return False

    def stats(self) -> FeedStats:
        return FeedStats()

    def close(self) -> None:
        pass
