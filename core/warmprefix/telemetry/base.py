"""Who is told what a planner does, as it does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from warmprefix.plan import ContextPlan
    from warmprefix.residency.base import EngineReport

__all__ = ["NoObserver", "PlannerObserver"]


@runtime_checkable
class PlannerObserver(Protocol):
    """Is called on the way of a request, from any thread, so it must be quick; what it raises is dropped."""

    def planned(self, plan: ContextPlan, seconds: float) -> None:
        """A plan was made, which took so long."""

    def committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, seconds: float) -> None:
        """A plan was committed, with what the engine said of it, and `commit`'s result."""

    def abandoned(self, plan: ContextPlan) -> None:
        """A plan that was open was abandoned."""


class NoObserver:
    """Nobody."""

    def planned(self, plan: ContextPlan, seconds: float) -> None:
        pass

    def committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, seconds: float) -> None:
        pass

    def abandoned(self, plan: ContextPlan) -> None:
        pass
