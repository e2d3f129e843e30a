"""What routing is told of agents, and what it returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from warmprefix.blocks import ContextBlock

__all__ = ["Agent", "AssignedBlock", "Assignment", "Held", "RouterStats", "as_agent"]

Held = Literal["conversation", "cache"]


@dataclass(frozen=True, slots=True)
class Agent:
    """A named worker whose engine has a prefix cache of its own.

    Raises:
        TypeError: `name` is no `str`.
        ValueError: `name` is empty, `capacity_tokens` is below 1, or `weight` is not positive and finite.
    """

    name: str
    capacity_tokens: int | None = None
    """Tokens of context that its engine's prefix cache holds; None for no bound."""
    weight: float = 1.0
    """Its share of the load, relative to the others' weights: 2.0 for one that computes twice as fast."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a str, got {type(self.name).__name__}")
        if not self.name:
            raise ValueError("name must not be empty")
        if self.capacity_tokens is not None and self.capacity_tokens < 1:
            raise ValueError(f"capacity_tokens must be 1 or more, or None, got {self.capacity_tokens}")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be positive and finite, got {self.weight}")


def as_agent(agent: Agent | str) -> Agent:
    """A name stands for an agent of unbounded capacity and weight 1."""
    if isinstance(agent, str):
        return Agent(agent)
    if not isinstance(agent, Agent):
        raise TypeError(f"agent must be an Agent or its name, got {type(agent).__name__}")
    return agent


class AssignedBlock(NamedTuple):
    """A block and the agent that is to read it."""

    block: ContextBlock
    positions: tuple[int, ...]
    """Where the request listed it, ascending: more than one place if it came more than once."""
    agent: str
    held: Held | None
    """Where that agent was predicted to hold it: in its chat of this conversation, or in its engine's cache."""
    spilled: bool
    """Whether another agent holds it, but had no room for it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One request's blocks, shared out. It knows which request it is, and is handed to `commit` or `abandon` whole."""

    id: str
    """Names this assignment; unique among all routers."""
    tenant: str | None
    conversation: str | None
    agents: tuple[str, ...]
    """Among whom the blocks were shared out, those that got none included."""
    blocks: tuple[AssignedBlock, ...]
    """In relevance order, each distinct block once."""
    together: bool = field(repr=False)
    """Whether the blocks of one agent were to stand in one prompt."""

    @property
    def segments(self) -> dict[str, tuple[ContextBlock, ...]]:
        """What each agent is to read, in relevance order; the agent of the most relevant block first."""
        segments: dict[str, list[ContextBlock]] = {}
        for assigned in self.blocks:
            segments.setdefault(assigned.agent, []).append(assigned.block)
        return {agent: tuple(blocks) for agent, blocks in segments.items()}

    @property
    def total_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(assigned.block.tokens for assigned in self.blocks)

    @property
    def held_tokens(self) -> int:
        """Tokens of the blocks that their agents were predicted to hold."""
        return sum(assigned.block.tokens for assigned in self.blocks if assigned.held is not None)


@dataclass(frozen=True, slots=True)
class RouterStats:
    """A snapshot; counts since the router was made."""

    assignments: int = 0
    blocks: int = 0
    """Assigned; a block that was assigned again after its agent failed counts again."""
    held: int = 0
    """Of those, the ones whose agent was predicted to hold them."""
    spilled: int = 0
    """Of those, the ones that went elsewhere because those who hold them had no room."""
    tokens: int = 0
    held_tokens: int = 0
    abandoned: int = 0
    """Blocks that were taken back."""
    stale: int = 0
    """Blocks that a report showed not to be held although they should have been."""
    learned: int = 0
    """Blocks that other routers of the same agents assigned."""
    failures: int = 0
    """Agents that failed."""
    feed_errors: int = 0
    """Times that a feed failed."""
    open: int = 0
    """Assignments neither committed nor abandoned yet."""
    tenants: int = 0
    replicas: int = 0
    """Copies of blocks beyond the first, over all agents."""
    memory_bytes: int = 0
    """Estimated, of all tenants; the router's `max_bytes` bounds it."""
