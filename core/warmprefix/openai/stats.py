"""What a link has seen and done, in numbers an operator can alert on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LinkStats"]


@dataclass(frozen=True, slots=True)
class LinkStats:
    """A snapshot; every field only ever grows, but for the last."""

    requests: int = 0
    """Requests sent with a plan, each attempt for itself."""
    commits: int = 0
    """Plans committed."""
    abandons: int = 0
    """Plans abandoned."""
    early_closes: int = 0
    """Of the abandoned plans, those of a conversation whose stream was closed after its first content and before its
    end, outside of a block of `sending`: whether the application keeps such an answer is not known."""
    withdrawn: int = 0
    """Commits taken back because the call was cancelled before the application had its answer."""
    refused_commits: int = 0
    """Of the commits, those that the planner did not record: another planner's plan, or one it had closed before."""
    unknown_plans: int = 0
    """Requests whose header named a plan that this link does not know; they went on without it."""
    repeated_plans: int = 0
    """Requests whose plan another one had; they got its `cache_salt` and nothing else."""
    unmatched: int = 0
    """Requests beside a plan, not of it: to another route, or, within `sending`, without its blocks in the prompt."""
    unsent: int = 0
    """Blocks of `sending` that ended, without an exception, before any request was their plan's: nothing was sent in
    them, or nothing that had its blocks."""
    unread_answers: int = 0
    """Answers that the model gave and that could not be read for usage: too large, or no JSON."""
    errors: int = 0
    """Failures of the link's own, and of the planner; the request or its answer went on."""
    waiting: int = 0
    """Plans whose request failed, and which wait for the client to try again."""
