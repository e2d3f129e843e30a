"""Who arranges a request's blocks: a planner, or nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import Placement
from warmprefix.planner import ContextPlanner
from warmprefix.stores import MemorySeenStore
from warmprefix.traces.base import NoRecorder
from warmprefix_tools.replay.workload import Request, Workload, estimated_tokens

__all__ = ["TODAY", "Arranged", "Arranger", "AsToday", "Planned"]

TODAY = "relevance"
"""The policy that stands for an application without warmprefix: nothing ordered, nothing de-duplicated."""


class Arranged(NamedTuple):
    """One request's context, as it is sent."""

    order: tuple[int, ...]
    """For each place the block's position in the request; every block once, those referred to included."""
    references: tuple[tuple[int, int], ...] = ()
    """Positions of blocks that are referred to instead, each with the tokens of the note that does so."""
    plan_seconds: float = 0.0
    commit_seconds: float = 0.0


class Arranger(Protocol):
    """Is shown every request of a trace once, in order, and learns from each before the next."""

    def arrange(self, request: Request) -> Arranged:
        """Arrange a request, and count it as served."""
        ...


class AsToday:
    """Leaves everything as the retriever gave it."""

    def arrange(self, request: Request) -> Arranged:
        """All blocks, in relevance order."""
        return Arranged(request.relevance)


class Planned:
    """A planner of its own, as an application would have it, and the time that its calls take."""

    def __init__(
        self,
        workload: Workload,
        policy: str | Callable[[], OrderingPolicy],
        capacity_tokens: int | None,
        placement: Placement,
    ) -> None:
        """Give the planner's mirror the size of the cache; no other bound is in reach, and no time passes for it."""
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
        """Requests so far that were served in relevance order because the policy failed."""
        return self._planner.stats().policy_errors

    def arrange(self, request: Request) -> Arranged:
        """Plan, and commit what was planned."""
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
        return Arranged(plan.order, references, committed - planned, done - committed)
