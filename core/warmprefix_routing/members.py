"""Agents and replicas: the members of a fleet."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real

from warmprefix.errors import check_count
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency import FoundCheckpoints, ResidencyFeed
from warmprefix_routing.segments import name_digest

__all__ = ["Agent", "Member", "Replica", "check_number", "check_range", "check_type"]


def check_number(argument: str, number: object) -> None:
    """Check that an argument is a real number."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{argument} must be a number, got {type(number).__name__}")


def check_range(least: int, finite: bool = False, /, **numbers: float) -> None:
    """Check arguments that must be `least` or more, and perhaps finite."""
    for argument, number in numbers.items():
        check_number(argument, number)
        if not least <= number or (finite and number == math.inf):  # `not`, so that NaN is refused
            raise ValueError(f"{argument} must be {least} or more{', and finite' * finite}, got {number}")


def check_type(argument: str, value: object, expected: type, *, optional: bool = False) -> None:
    """Check that an argument is an instance of a class, or None if `optional`. A bool is not an int here."""
    if (not isinstance(value, expected) or isinstance(value, bool)) and not (optional and value is None):
        article = "an" if expected.__name__[0].lower() in "aeiou" else "a"
        or_none = " or None" if optional else ""
        raise TypeError(f"{argument} must be {article} {expected.__name__}{or_none}, got {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Agent:
    """A named worker whose engine has a prefix cache of its own.

    Raises:
        TypeError: A field has another type.
        ValueError: `name` is empty, `capacity_tokens` is below 1, or `weight` is not positive and finite.
    """

    name: str
    """Name of the agent, unique in its router."""
    capacity_tokens: int | None = None
    """Tokens of context that the engine's prefix cache holds; None for no bound."""
    weight: float = 1.0
    """Share of the load, relative to the other weights: 2.0 for an engine that computes twice as fast."""

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        if not self.name:
            raise ValueError("name must not be empty, got ''")
        check_count("capacity_tokens", self.capacity_tokens, optional=True)
        check_number("weight", self.weight)
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be positive and finite, got {self.weight}")


@dataclass(frozen=True, slots=True)
class Replica(Agent):
    """One of several endpoints of a model. Its fields are those of an `Agent`; its name may be its URL."""


@dataclass(eq=False)
class Member:
    """An agent or replica from when it joins until it leaves or fails: the `ResidencyTarget` of its feed.

    Feeds hold it weakly; the fleet keeps it.
    """

    spec: Agent
    feed: ResidencyFeed | None
    apply: Callable[[Member, Scope, Sequence[bytes], int, FoundCheckpoints | None], object]
    """Receives the feed's reports."""
    alive: bool = True
    first_blocks: OrderedDict[tuple[str | None, bytes], int] = field(default_factory=OrderedDict)
    """Tokens of the first blocks of the prompts that an agent's feed received, by tenant and fingerprint."""

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self.weight = self.spec.weight
        self.digest = name_digest("agent", self.name)  # stands for the name among routers that share

    def add_first_block(self, plan: ContextPlan, most: int) -> None:
        """Record the first block of a prompt that the feed received. Beyond `most` the oldest are forgotten."""
        first = plan.blocks[0].block
        self.first_blocks[plan.scope.tenant, first.fingerprint] = first.tokens
        while len(self.first_blocks) > most:
            self.first_blocks.popitem(last=False)

    def residency_changed(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None = None,
    ) -> None:
        self.apply(self, scope, keys, resident_blocks, checkpoints)
