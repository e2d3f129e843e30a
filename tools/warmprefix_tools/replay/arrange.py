"""Arrangers of a request's blocks: a planner, or relevance order as without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from warmprefix import ContextPlanner
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import Placement
from warmprefix.stores import MemorySeenStore
from warmprefix.traces import NoRecorder
from warmprefix_tools.replay.results import TODAY
from warmprefix_tools.replay.workload import ReplayRequest, Workload, estimated_tokens

__all__ = ["ContextOrder", "PlannerArranger", "RelevanceArranger", "RequestArranger"]


class ContextOrder(NamedTuple):
    """One request's context, as it is sent."""

    order: tuple[int, ...]
    """For each place the block's position in the request; every block once, including those that are references."""
    references: tuple[tuple[int, int], ...] = ()
    """Position of each block that a note refers to instead, with the tokens of the note."""
    plan_seconds: float = 0.0
    commit_seconds: float = 0.0


class RequestArranger(Protocol):
    """Receives every request of a trace once, in order, and learns from each."""

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        """Arrange a request, and count it as served."""
        ...


class RelevanceArranger:
    """The application as it is: blocks stay in the retriever's order."""

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        return ContextOrder(request.relevance)


class PlannerArranger:
    """A planner of its own, whose calls it also times."""

    def __init__(
        self,
        workload: Workload,
        policy: str | Callable[[], OrderingPolicy],
        capacity_tokens: int | None,
        placement: Placement,
    ) -> None:
        """Give the planner's mirror the size of the cache.

        Its other bounds exceed the trace, and its clock stands still.
        """
        self._planner = ContextPlanner(
            policy=policy,
            capacity_tokens=capacity_tokens,
            max_nodes=2 * len(workload.requests) + 1,
            max_scopes=workload.scopes + 1,
            store=MemorySeenStore(
                max_conversations=workload.conversations + 1,
                max_blocks=workload.keys + 1,
                clock=lambda: 0.0,
            ),
            recorder=NoRecorder(),
        )
        self._placement: Placement = placement
        self._remembers = policy != TODAY

    @property
    def policy_errors(self) -> int:
        """Number of requests served in relevance order because the policy failed."""
        return self._planner.stats().policy_errors

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        """Plan a request and commit the plan."""
        conversation = request.conversation if self._remembers else None
        planned = time.perf_counter()
        plan = self._planner.plan(
            request.blocks,
            conversation=conversation,
            placement=self._placement,
            tenant=request.source.scope,
        )
        committed = time.perf_counter()
        self._planner.commit(plan)
        done = time.perf_counter()
        references = (
            ()
            if plan.opens_prompt
            else tuple(
                (block.rank, estimated_tokens(paragraph))  # of several, the first has the sentence
                for block, paragraph in zip(plan.blocks, plan.paragraphs(), strict=True)
                if block.reference is not None
            )
        )
        return ContextOrder(plan.order, references, committed - planned, done - committed)
