"""Arrangers of a request's blocks: a planner, which may choose them too, or relevance order as without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, Protocol

from warmprefix import ContextPlanner
from warmprefix.annotate import Annotate, Templates, has_labels
from warmprefix.choice import LeftOut
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import ContextPlan, Placement, Scope, Touch
from warmprefix.residency import EngineReport
from warmprefix.stores import MemorySeenStore, RecordBounds
from warmprefix.tokens import CheckedCounter, NoteWriter, TokenCounter, as_counter
from warmprefix.traces import NoRecorder
from warmprefix_tools.replay.results import TODAY
from warmprefix_tools.replay.workload import ReplayRequest, Workload

__all__ = [
    "TOUCH_REST",
    "ArrangeOptions",
    "ContextOrder",
    "KeepBy",
    "Places",
    "PlannerArranger",
    "RelevanceArranger",
    "RequestArranger",
    "first_places",
]

KeepBy = Literal["none", "touches", "priorities"]
"""How the engine is asked to keep what is expected back: not at all, by touches, or by touches with priorities."""
_MOST_SAVED_UP = 8
"""Touches that may be sent in a row; each request allows one more."""
TOUCH_REST = 17
"""Tokens of a touch behind the blocks that it keeps: they are computed each time."""


@dataclass(frozen=True, slots=True)
class ArrangeOptions:
    """What a planner's prompts show, and what it sees of later requests."""

    placement: Placement = "head"
    annotate: Annotate = "auto"
    templates: Templates | None = None
    """The wording of the notes; the planner's default for None."""
    tokenizer: TokenCounter | None = None
    """Counts labels, notes and references; the planner's estimate for None."""
    waiting: int = 0
    """Number of requests of the same scope that wait while one is planned: those that follow in the trace."""
    retention: KeepBy = "none"
    """With `priorities` the planner has the profile of an engine that evicts by them."""


class ContextOrder(NamedTuple):
    """One request's context, as it is sent."""

    order: tuple[int, ...]
    """For each place the block's position in the request; every fed block once, including those that are references."""
    references: tuple[int, ...] = ()
    """Position of each block that a note refers to instead."""
    label_tokens: tuple[int, ...] = ()
    """Tokens of the label in front of each block of `order`, 0 for a reference; empty if there are no labels."""
    note_tokens: int = 0
    """Tokens of the notes behind the blocks: of the order annotation, and of the references."""
    plan_seconds: float = 0.0
    commit_seconds: float = 0.0
    plan_id: str = ""
    """Name of the plan, for touches."""
    left_out: tuple[LeftOut, ...] = ()
    """Candidates that are not fed, where a planner chose."""
    entered: int = 0
    """Number of candidates fed that relevance alone would not have fed, where a planner chose."""

    @property
    def written_tokens(self) -> int:
        """Tokens of labels, notes and references."""
        return sum(self.label_tokens) + self.note_tokens


class RequestArranger(Protocol):
    """Receives every request of a trace once, in order, and learns from each."""

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        """Arrange a request, and count it as served."""
        ...


class RelevanceArranger:
    """The application as it is: blocks stay in the retriever's order, without labels and notes."""

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        return ContextOrder(request.relevance)


Places = Callable[[ReplayRequest], Sequence[int]]
"""Returns the positions of the blocks that a planner receives, ascending."""


def first_places(request: ReplayRequest) -> Sequence[int]:
    """Return what relevance feeds."""
    return request.relevance


class PlannerArranger:
    """A planner of its own, whose calls it also times."""

    def __init__(
        self,
        workload: Workload,
        policy: str | Callable[[], OrderingPolicy],
        capacity_tokens: int | None,
        options: ArrangeOptions,
        *,
        places: Places | None = first_places,
    ) -> None:
        """Give the planner's mirror the size of the cache.

        Its other bounds exceed the trace, and its clock stands still. `TODAY` neither refers nor writes anything. The
        planner receives the blocks at `places`; for None it chooses among all candidates.
        """
        self._places = places
        is_today = policy == TODAY
        self._placement: Placement = "head" if is_today else options.placement
        annotate: Annotate = "none" if is_today else options.annotate
        templates = options.templates or Templates()
        self._planner = ContextPlanner(
            policy=policy,
            capacity_tokens=capacity_tokens,
            max_nodes=2 * len(workload.requests) + 1,
            max_scopes=workload.scopes + 1,
            max_labels=workload.keys + 1,
            store=MemorySeenStore(
                max_conversations=workload.conversations + 1,
                bounds=RecordBounds(max_blocks=workload.keys + 1),
                clock=lambda: 0.0,
            ),
            recorder=NoRecorder(),
            templates=templates,
            annotate=annotate,
            tokenizer=options.tokenizer,
            profile="priority-eviction" if options.retention == "priorities" else "auto",
        )
        self._retention: KeepBy = "none" if is_today else options.retention
        self._allowed = _MOST_SAVED_UP
        self._scope: Scope | None = None
        # The planner counts failures of the tokenizer; this writer repeats its calls.
        counter = CheckedCounter(as_counter(options.tokenizer), lambda: None)
        self._writer = NoteWriter(templates, annotate, counter)
        self._queue = _Queue(workload, self._placement, options.waiting) if options.waiting else None

    @property
    def policy_errors(self) -> int:
        """Number of requests served in relevance order because the policy failed."""
        return self._planner.stats().policy_errors

    @property
    def tokenizer_errors(self) -> int:
        """Number of texts whose tokens were estimated because the tokenizer failed."""
        return self._planner.stats().tokenizer_errors

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        """Announce the requests that wait, plan a request, and commit the plan."""
        if self._queue is not None:
            for later in self._queue.behind(request):
                self._planner.queued([later.blocks[i] for i in later.relevance], tenant=later.source.scope)
        places: Sequence[int] = range(len(request.blocks))
        choice = request.choice
        if self._places is not None:
            places, choice = self._places(request), None
        blocks = [request.blocks[i] for i in places]
        planned = time.perf_counter()
        plan = self._planner.plan(
            blocks,
            conversation=request.conversation,
            placement=self._placement,
            tenant=request.source.scope,
            choose=choice,
        )
        committed = time.perf_counter()
        self._planner.commit(plan)
        done = time.perf_counter()
        self._scope = plan.scope
        labels = self._label_tokens(plan)
        return ContextOrder(
            order=tuple([places[i] for i in plan.order]),
            references=tuple([places[block.rank] for block in plan.blocks if block.reference is not None]),
            label_tokens=labels,
            note_tokens=plan.note_tokens - sum(labels),
            plan_seconds=committed - planned,
            commit_seconds=done - committed,
            plan_id=plan.id,
            left_out=plan.left_out,
            entered=len(plan.entered or ()),
        )

    def touches(self) -> list[Touch]:
        """Return what to touch in the scope of the latest request, as far as requests have allowed touches."""
        if self._retention == "none" or self._scope is None:
            return []
        self._allowed = min(self._allowed + 1, _MOST_SAVED_UP)
        touches = self._planner.touches(self._scope, self._allowed)
        self._allowed -= len(touches)
        return touches

    def touched(self, touch: Touch, found_tokens: int) -> None:
        """Pass on the engine's answer to a touch."""
        report = EngineReport(cached_tokens=found_tokens, prompt_tokens=touch.tokens + TOUCH_REST)
        self._planner.touched(touch, report)

    def _label_tokens(self, plan: ContextPlan) -> tuple[int, ...]:
        if not has_labels(plan.annotation):
            return ()
        return tuple(
            [0 if block.reference is not None else self._writer.tokens("labels", [block]) for block in plan.blocks]
        )


class _Queue:
    """The requests of a trace that follow each request, scope by scope."""

    def __init__(self, workload: Workload, placement: Placement, waiting: int) -> None:
        self._waiting = waiting
        self._planned: set[str | None] = set()
        """Scopes with a planned request."""
        by_scope: dict[str | None, list[tuple[ReplayRequest, bool]]] = {}
        begun: set[tuple[str | None, str | None]] = set()
        for request in workload.requests:
            conversation = request.source.scope, request.conversation
            # The order of a context behind a history is fixed, so it need not be announced.
            opens = placement == "head" or request.conversation is None or conversation not in begun
            begun.add(conversation)
            by_scope.setdefault(request.source.scope, []).append((request, opens))
        self._later: dict[str | None, Iterator[tuple[ReplayRequest, bool]]] = {
            scope: iter(requests) for scope, requests in by_scope.items()
        }

    def behind(self, request: ReplayRequest) -> list[ReplayRequest]:
        """Return the requests that begin to wait before this one is planned."""
        scope = request.source.scope
        later, number = self._later[scope], 1
        if scope not in self._planned:
            self._planned.add(scope)
            next(later)  # the request itself
            number = self._waiting
        return [each for each, opens in islice(later, number) if opens]
