"""What a run tells: while it goes on, and in the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from warmprefix import ContextBlock

__all__ = ["AgentReport", "Answer", "Progress", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the engines count them; a count is None where no engine told it.

    >>> Usage(100, 60, 5) + Usage(50, None, 5)
    Usage(prompt_tokens=150, cached_tokens=60, completion_tokens=10)
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompts' tokens, those that a prefix cache held."""
    completion_tokens: int | None = None

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            _sum(self.prompt_tokens, other.prompt_tokens),
            _sum(self.cached_tokens, other.cached_tokens),
            _sum(self.completion_tokens, other.completion_tokens),
        )


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What became of one segment at one agent, or of the manager's question."""

    agent: str
    blocks: tuple[ContextBlock, ...]
    """The documents it was given, in relevance order; none for the manager."""
    text: str | None
    """A worker's communication unit, the manager's answer; None if it failed."""
    usage: Usage
    """Of the attempt that succeeded."""
    attempts: int
    """Requests sent, or tried to be."""
    ttft: float | None
    """Seconds to the first token, in the attempt that succeeded."""
    error: Exception | None = None
    """What the last attempt failed with."""
    finish_reason: str | None = None
    """Why the text ended, in the engine's word: `"length"` if it was cut; None if it failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The manager's answer, and how it came about."""

    text: str
    workers: tuple[AgentReport, ...]
    """A report for each segment that was tried, in the order in which the manager, or the next worker, was told of
    them. Documents of one that failed stand in a later report again, or among the skipped ones."""
    manager: AgentReport
    skipped: tuple[ContextBlock, ...]
    """Documents that no agent could read, in relevance order."""

    @property
    def usage(self) -> Usage:
        """Of all agents together."""
        return total(report.usage for report in (*self.workers, self.manager))

    @property
    def usage_by_agent(self) -> dict[str, Usage]:
        """Of each agent that was asked, the manager included."""
        reports = (*self.workers, self.manager)
        names = dict.fromkeys(report.agent for report in reports)
        return {name: total(report.usage for report in reports if report.agent == name) for name in names}


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a run.

    assigned: it is decided who reads what. asked: a segment's prompt is sent to `agent`. retrying: the attempt failed
    with `error`, and another will follow. read: `report` has what `agent` handed on. failed: `agent` gave up, as
    `error` says; its documents go to others, if there are any. skipped: nobody can read the documents that it had.
    answering: the manager, which is `agent`, is asked.
    """

    kind: Literal["assigned", "asked", "retrying", "read", "failed", "skipped", "answering"]
    done: int
    """Documents that were read or skipped so far."""
    total: int
    """Documents, each counted once however often it was listed."""
    agent: str | None = None
    report: AgentReport | None = None
    """With read and failed."""
    error: Exception | None = None
    """With retrying and failed."""


def total(usages: Iterable[Usage]) -> Usage:
    """The sum; of none, that nothing is known."""
    return sum(usages, Usage())


def _sum(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
