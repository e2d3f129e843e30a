"""What a planner has done so far, in numbers an operator can alert on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PlannerStats"]


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """A snapshot; every field only ever grows between two resets, but for the last four."""

    plans: int = 0
    commits: int = 0
    abandons: int = 0
    late_commits: int = 0
    """Commits of a plan already committed or abandoned, or that waited too long."""
    conflicts: int = 0
    """Commits whose blocks the store did not record as seen: lease timed out, or prepared beside another plan."""
    reordered_plans: int = 0
    """Plans whose order differs from relevance order."""
    references: int = 0
    """Blocks replaced by a reference."""
    planned_tokens: int = 0
    """Tokens of context in all plans, those spared by references included."""
    resident_tokens: int = 0
    """Of these, predicted to be in the engine's prefix cache."""
    reference_tokens: int = 0
    """Of these, spared by references."""
    reported_commits: int = 0
    """Commits that came with the engine's own count of cached tokens."""
    reported_cached_tokens: int = 0
    """The sum of those counts."""
    policy_errors: int = 0
    """Requests served in relevance order because the ordering policy failed."""
    store_errors: int = 0
    """Store operations that failed; the request went on with nothing de-duplicated."""
    lost_notices: int = 0
    """Commits, abandons and forgets that the store will never be told of: too many waited."""
    contested_blocks: int = 0
    """Blocks sent again although the conversation's record has them: another plan's outcome could still void that."""
    shared_orders: int = 0
    """Orders learned from other planners."""
    published_orders: int = 0
    """Orders that other planners can learn."""
    sharing_errors: int = 0
    """Orders that could not be shared, or read, and failures of what carries them; each costs hits and nothing else."""
    recorder_errors: int = 0
    """Requests of which the recorder raised; they went on."""
    untold_notices: int = 0
    """Commits, abandons and forgets that the store could not be told of yet."""
    open_plans: int = 0
    """Plans neither committed nor abandoned."""
    scopes: int = 0
    """Scopes with learned state."""
    tree_nodes: int = 0
    """Nodes of all prefix trees."""
