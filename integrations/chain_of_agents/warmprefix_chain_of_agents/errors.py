"""What a run that yields no answer raises."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix import ContextBlock, WarmprefixError
from warmprefix_chain_of_agents.results import AgentReport

__all__ = ["ChainOfAgentsError", "ManagerError", "WorkersFailedError"]


class ChainOfAgentsError(WarmprefixError):
    """A run failed, and tells what its agents had done until then. The last failure is its cause."""

    def __init__(self, message: str, workers: Sequence[AgentReport]) -> None:
        super().__init__(message)
        self.workers = tuple(workers)
        """The workers' reports, those that failed included."""


class WorkersFailedError(ChainOfAgentsError):
    """Documents that no agent could read, which the policy for failures does not put up with; or none was read."""

    def __init__(self, unread: Sequence[ContextBlock], workers: Sequence[AgentReport]) -> None:
        failed = "; ".join(f"{report.agent}: {report.error}" for report in workers if report.error is not None)
        super().__init__(
            f"no agent could read {len(unread)} of the documents ({failed or 'no agent is live'})", workers
        )
        self.unread = tuple(unread)


class ManagerError(ChainOfAgentsError):
    """The manager did not answer. What the workers handed on is in `workers`."""

    def __init__(self, manager: AgentReport, workers: Sequence[AgentReport]) -> None:
        super().__init__(f"the manager {manager.agent!r} did not answer: {manager.error}", workers)
        self.manager = manager
