"""Reports of a run: its steps, its answer, or the error that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from warmprefix import ContextBlock, WarmprefixError
from warmprefix.choice import LeftOut

__all__ = [
    "AgentReport",
    "ChainAnswer",
    "ChainOfAgentsError",
    "ChainProgress",
    "ManagerError",
    "StepKind",
    "Usage",
    "WorkersFailedError",
]

StepKind = Literal["assigned", "asked", "retrying", "read", "failed", "skipped", "answering"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the engines count them; a count is None if no engine reported it.

    >>> Usage(100, 60, 5) + Usage(50, None, 5)
    Usage(prompt_tokens=150, cached_tokens=60, completion_tokens=10)
    """

    prompt_tokens: int | None = None
    """Tokens of the prompts."""
    cached_tokens: int | None = None
    """Of the prompts' tokens, those that a prefix cache held."""
    completion_tokens: int | None = None
    """Tokens of the answers."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(_sum, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The outcome of one segment at one agent, or of the manager's question."""

    agent: str
    """Name of the agent."""
    blocks: tuple[ContextBlock, ...]
    """The documents it was given, in relevance order; none for the manager."""
    text: str | None
    """A worker's summary, the manager's answer; None if it failed."""
    usage: Usage
    """Of the attempt that succeeded."""
    attempts: int
    """Number of requests that were sent, or could not be."""
    ttft: float | None
    """Seconds to the first token, in the attempt that succeeded."""
    error: Exception | None = None
    """The failure of the last attempt."""
    finish_reason: str | None = None
    """The engine's reason for the end of the text: `"length"` if it was cut; None if it failed."""


@dataclass(frozen=True, slots=True)
class ChainAnswer:
    """The manager's answer, and the reports of all agents."""

    text: str
    """The answer of the manager."""
    workers: tuple[AgentReport, ...]
    """A report for each segment that was tried, in the order in which the manager, or the next worker, got them.
    Documents of a failed segment are in a later report again, or among the skipped ones."""
    manager: AgentReport
    """The report of the manager."""
    skipped: tuple[ContextBlock, ...]
    """Documents that no agent could read, in relevance order."""
    left_out: tuple[LeftOut, ...] = ()
    """Candidates that were not read, in relevance order; empty without `choose`."""

    @property
    def usage(self) -> Usage:
        """Sum of all agents."""
        return sum((report.usage for report in (*self.workers, self.manager)), Usage())

    @property
    def usage_by_agent(self) -> dict[str, Usage]:
        """Sum of each agent that was asked, the manager included."""
        reports = (*self.workers, self.manager)
        names = dict.fromkeys(report.agent for report in reports)
        return {name: sum((report.usage for report in reports if report.agent == name), Usage()) for name in names}


@dataclass(frozen=True, slots=True)
class ChainProgress:
    """One step of a run.

    assigned: every document has its agent. asked: a segment's prompt is sent to `agent`. retrying: the attempt failed
    with `error`, and another will follow. read: `report` has the summary of `agent`. failed: `agent` gave up with
    `error`; its documents go to others, if there are any. skipped: no agent can read the documents that it had.
    answering: the manager, which is `agent`, is asked.
    """

    kind: StepKind
    """Kind of the step; see above."""
    done: int
    """Number of documents read or skipped so far."""
    total: int
    """Number of documents, each counted once however often it was listed."""
    agent: str | None = None
    """Name of the agent; None for a step of the whole run."""
    report: AgentReport | None = None
    """With read and failed."""
    error: Exception | None = None
    """With retrying and failed."""


class ChainOfAgentsError(WarmprefixError):
    """A run failed. It has the reports of its agents until then; the last failure is its cause."""

    def __init__(self, message: str, workers: Sequence[AgentReport]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)
        """The workers' reports, failed ones included."""


class WorkersFailedError(ChainOfAgentsError):
    """No agent could read some documents, and the policy does not skip them; or no document was read."""

    def __init__(self, unread: Sequence[ContextBlock], workers: Sequence[AgentReport]) -> None:
        failed = "; ".join(f"{report.agent}: {report.error}" for report in workers if report.error is not None)
        why = failed or "no agent is live"
        super().__init__(f"no agent could read {len(unread)} of the documents ({why})", workers)
        self.unread = tuple(unread)
        """The documents that no agent could read."""


class ManagerError(ChainOfAgentsError):
    """The manager did not answer. The workers' summaries are in `workers`."""

    def __init__(self, manager: AgentReport, workers: Sequence[AgentReport]) -> None:
        super().__init__(f"the manager {manager.agent!r} did not answer: {manager.error}", workers)
        self.manager = manager
        """The report of the manager."""


def _sum(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
