"""Prompts as simulated caches see them, and what a cache had of one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from warmprefix.cache_profiles import CacheProfile

__all__ = ["Admission", "CacheUse", "Mark", "MarkedPrompt", "SimulatedCache", "UnitTokens"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark that the request sets: what is in front of it may be cached."""

    part: int
    """Number of the content part that it stands on, from 0."""
    lifetime: float | None = None
    """Seconds for which the prefix is kept after its last use; None for the shortest that the profile has."""


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """The tokens of one request, and what decides how a cache treats them.

    Raises:
        ValueError: The prompt is empty, `part_ends` does not rise up to at most its length, or a number in `marks` or
            `message_ends` is not one of a part.
    """

    tokens: Sequence[int]
    """The tokens of the prompt."""
    salt: str | None = None
    """Prompts with different salts share nothing."""
    part_ends: tuple[int, ...] = ()
    """Tokens up to the end of each content part; tools and system prompt are parts too. May be empty without marks."""
    marks: tuple[Mark, ...] = ()
    """Marks that the request sets, in the order of their parts."""
    message_ends: tuple[int, ...] = ()
    """Numbers of the parts that end a message of the user or of a tool; automatic marks stand there."""
    automatic: bool = True
    """False if the request turns the automatic mark off."""
    priority: int | None = None
    """For caches that evict by priority: prompts with a lower one leave first; None counts as 0."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens must have 1 token or more, got none")
        ends = self.part_ends
        if list(ends) != sorted(ends) or (ends and not 0 <= ends[0] <= ends[-1] <= len(self.tokens)):
            raise ValueError(f"part_ends must rise from 0 to at most {len(self.tokens)}, got {ends}")
        for name, numbers in (("marks", [mark.part for mark in self.marks]), ("message_ends", self.message_ends)):
            if any(not 0 <= number < len(ends) for number in numbers) or list(numbers) != sorted(set(numbers)):
                raise ValueError(f"{name} must rise and be numbers of {len(ends)} parts, got {tuple(numbers)}")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How many tokens of one prompt a cache had, and how many it keeps at a price; the rest is uncached."""

    read: int
    """Tokens that the cache had."""
    written: tuple[int, ...]
    """Tokens that are written, by lifetime, shortest first. Only caches with marks count them: others keep what they
    compute, at no price."""
    uncached: int
    """Tokens that are neither read nor written."""

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.read + sum(self.written) + self.uncached

    def cost(self, profile: CacheProfile) -> float:
        """Return the price of the prompt in uncached tokens.

        >>> from warmprefix.cache_profiles import as_profile
        >>> CacheUse(read=1000, written=(400, 0), uncached=100).cost(as_profile("anthropic"))
        700.0
        """
        writes = sum(tokens * price for tokens, price in zip(self.written, profile.write_prices, strict=False))
        return self.read * profile.read_price + writes + self.uncached


class Admission(Protocol):
    """One prompt that a cache has looked up, until `free`."""

    @property
    def use(self) -> CacheUse:
        """What the cache had when it looked the prompt up."""
        ...

    def store(self, now: float) -> None:
        """Record that the prompt has been computed, at `now` in seconds: later ones can read it."""
        ...

    def append(self, token_id: int) -> None:
        """Record one generated token whose KV is computed."""
        ...

    def free(self) -> None:
        """Record that the request is over."""
        ...


class SimulatedCache(Protocol):
    """The prefix cache that a profile describes."""

    @property
    def usage(self) -> float:
        """Share of the capacity in use by running requests, 0 to 1; 0 where there is no such limit."""
        ...

    @property
    def num_sequences(self) -> int:
        """Number of admitted prompts that are not free."""
        ...

    def admit(self, prompt: MarkedPrompt, now: float = 0.0, *, room_for: int = 0) -> Admission | None:
        """Look a prompt up at `now` in seconds, or return None if running requests leave no room for it.

        A time before the latest one counts as the latest one. `room_for` tokens can be appended.
        """
        ...

    def reset(self) -> bool:
        """Forget everything; return False, and do nothing, if requests are running."""
        ...


class UnitTokens:
    """Token ids for units that have a length instead of a text: equal units get equal ids.

    Use it to simulate prompts of which only the lengths of blocks matter. Memory grows with the number of different
    units.
    """

    def __init__(self) -> None:
        self._starts: dict[tuple[Hashable, int], int] = {}
        self._next = 0

    def encode(self, units: Iterable[tuple[Hashable, int]]) -> list[int]:
        """Return the ids of units, each with its length in tokens.

        >>> UnitTokens().encode([("a", 2), ("b", 1), ("a", 2)])
        [0, 1, 2, 0, 1]

        Raises:
            ValueError: A length is below 0.
        """
        tokens: list[int] = []
        for unit, length in units:
            if length < 0:
                raise ValueError(f"a unit must have 0 tokens or more, got {length} for {unit!r}")
            start = self._starts.setdefault((unit, length), self._next)
            if start == self._next:
                self._next += length
            tokens += range(start, start + length)
        return tokens
