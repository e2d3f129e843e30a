"""What routers return: the assignments of an `AgentRouter`, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from warmprefix.blocks import ContextBlock
from warmprefix.choice import LeftOut

__all__ = ["AssignedBlock", "Assignment", "Holding", "ReplicaStats", "RouterStats"]

Holding = Literal["conversation", "cache"]
"""Where an agent holds a block: in its chat of the conversation, or in its engine's cache."""


class AssignedBlock(NamedTuple):
    """A block, and the agent that is to read it."""

    block: ContextBlock
    """The block as it was given."""
    positions: tuple[int, ...]
    """Places in the request, ascending; several if the request listed the block more than once."""
    agent: str
    """Name of the agent."""
    held: Holding | None
    """Where the agent is predicted to hold the block; None if it has to compute it."""
    spilled: bool
    """True if another agent holds the block, but had no room for it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The agents of one request's blocks. It identifies its request: pass it whole to `commit` or `abandon`."""

    id: str
    """Unique among all routers."""
    tenant: str | None
    """Name of the tenant; None without one."""
    conversation: str | None
    """The id of the conversation; None without one."""
    agents: tuple[str, ...]
    """The agents that could be chosen, including those that got no block."""
    blocks: tuple[AssignedBlock, ...]
    """In relevance order, each distinct block once."""
    together: bool = field(repr=False)
    """True if the blocks of one agent stand in one prompt."""
    left_out: tuple[LeftOut, ...] = field(default=(), repr=False)
    """The candidates that no agent reads, in relevance order; empty without `choose`."""

    @property
    def segments(self) -> dict[str, tuple[ContextBlock, ...]]:
        """Blocks by agent, in relevance order; the agent of the most relevant block comes first."""
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
        """Tokens of the blocks that their agents are predicted to hold."""
        return sum(assigned.block.tokens for assigned in self.blocks if assigned.held is not None)


@dataclass(frozen=True, slots=True)
class RouterStats:
    """A snapshot of an `AgentRouter`; fields up to `feed_errors` count since it was created or reset."""

    assignments: int = 0
    """Requests whose blocks were assigned."""
    blocks: int = 0
    """Assigned blocks; one that was reassigned counts again."""
    held: int = 0
    """Blocks that their agents were predicted to hold."""
    spilled: int = 0
    """Blocks whose holders had no room."""
    tokens: int = 0
    """Tokens of the assigned blocks."""
    held_tokens: int = 0
    """Tokens of the blocks that their agents were predicted to hold."""
    abandoned: int = 0
    """Blocks that were taken back."""
    stale: int = 0
    """Blocks that counted as held until a report showed that they were not."""
    learned: int = 0
    """Blocks that other routers of the same agents assigned; those of the newest may count twice after a start."""
    failures: int = 0
    """Failures of agents that were reported to the router."""
    feed_errors: int = 0
    """Exceptions of residency feeds."""
    open: int = 0
    """Assignments neither committed nor abandoned."""
    tenants: int = 0
    """Tenants with learned state."""
    replicas: int = 0
    """Copies of blocks beyond the first, over all agents."""
    memory_bytes: int = 0
    """Estimated memory of all tenants; `max_bytes` bounds it."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A snapshot of a `ReplicaRouter`; fields up to `feed_errors` count since it was created or reset."""

    routes: int = 0
    """Requests for which a replica was chosen."""
    prompt_tokens: int = 0
    """Tokens of the prompts of all routes."""
    resident_tokens: int = 0
    """Part of `prompt_tokens` that the replicas were predicted to hold."""
    spilled: int = 0
    """Requests for which the cheapest replica had no room."""
    moved: int = 0
    """Turns of a conversation that went to another replica than the turn before."""
    commits: int = 0
    """Routes that were committed while they were open."""
    abandons: int = 0
    """Calls of `abandon`, without routes closed by a failure or a bound."""
    late_commits: int = 0
    """Commits of a route that was no longer open."""
    reports: int = 0
    """Reports with a count of cached tokens."""
    reported_cached_tokens: int = 0
    """Prompt tokens reported as cached, over all reports."""
    stale_paths: int = 0
    """Reports that an engine held less of a path than predicted."""
    feed_errors: int = 0
    """Exceptions of residency feeds."""
    open_routes: int = 0
    """Routes neither committed nor abandoned."""
    tenants: int = 0
    """Tenants with learned state."""
    scopes: int = 0
    """Scopes with learned state."""
    conversations: int = 0
    """Conversations with a replica."""
    replicas: int = 0
    """Replicas that get requests."""
    memory_bytes: int = 0
    """Estimated memory of all tenants; `max_bytes` bounds it."""
