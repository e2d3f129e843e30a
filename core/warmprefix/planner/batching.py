"""Batches and windows: requests that are planned together, scope by scope."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from warmprefix.annotate import has_labels
from warmprefix.batch.planners import BatchPlanner, Progress, no_progress
from warmprefix.blocks import ContextBlock, distinct_blocks, evidence_blocks, joined_blocks
from warmprefix.errors import check_count
from warmprefix.ordering import OrderingPolicy, PrefixView
from warmprefix.plan import Scope
from warmprefix.planner.request import policy_order
from warmprefix.planner.state import PlannerState, make_scope
from warmprefix.prefix.tree import PrefixMatch, PrefixTree
from warmprefix.tokens import needs_note, order_note

if TYPE_CHECKING:
    from warmprefix.batch.bounds import Bound
    from warmprefix.batch.plan import BatchPlan, BatchRequest, PlannedRequest, SharedWording
    from warmprefix.batch.planners import Device
    from warmprefix.batch.scope_plan import NoteTokens, ScopePlan
    from warmprefix.batch.session import Requests
    from warmprefix.choice import Candidates, Choice
    from warmprefix.ordering.positions import PositionProfile

__all__ = ["BatchSession"]


class BatchSession:
    """Plans batches from the state of their scopes, and opens their plans."""

    def __init__(self, state: PlannerState) -> None:
        self._state = state

    def plan_batch(
        self,
        owner: Any,
        requests: Requests,
        planner: str | BatchPlanner,
        capacity_tokens: int | None,
        model: str | None,
        preamble: str | None,
        time_budget: float | None,
        device: Device,
        progress: Progress | None,
        choose: Choice | None,
    ) -> BatchPlan:
        """Plan a batch; see `ContextPlanner.plan_batch`. `owner` commits its plans."""
        from warmprefix.batch.session import as_requests, device_for, planners_for

        started = time.perf_counter()
        check_count("capacity_tokens", capacity_tokens, optional=True)
        common = make_scope(None, model, preamble)
        listed = as_requests(requests)
        blocks = sum(len(request.blocks) for request in listed)
        if planner == "auto" and self._state.writer.separator is not None:
            planner = "relevance"
        planners = planners_for(planner, blocks, time_budget, device)
        greatest = max(Counter(request.tenant for request in listed).values(), default=0)
        computed_on = device_for(planner, greatest, device)
        report = no_progress if progress is None else progress

        def plan_own(own: Sequence[BatchRequest], learned: _Learned, note_tokens: NoteTokens) -> ScopePlan:
            return self._plan_scope(own, learned, planners, capacity_tokens, report, note_tokens)

        is_window = planner == "window"
        plan_scope = self._plan_window if is_window else plan_own
        plan = self._plan(owner, listed, plan_scope, capacity_tokens, common, preamble, choose, is_window)
        name = planner if isinstance(planner, str) else type(planner).__name__
        return replace(plan, planner=name, device=computed_on, seconds=time.perf_counter() - started)

    def _plan_window(self, own: Sequence[BatchRequest], learned: _Learned, note_tokens: NoteTokens) -> ScopePlan:
        """Plan requests that wait now from what is learned; O(n * n)."""
        from warmprefix.batch.merge import MergePlanner
        from warmprefix.batch.window import MOST_REQUESTS, plan_window

        def order(blocks: Sequence[ContextBlock], after: Sequence[bytes], joined: Collection[int]) -> Sequence[int]:
            with self._state.lock:
                return policy_order(self._state, learned.policy, blocks, PrefixView(learned.tree, after), joined)

        if len(own) > MOST_REQUESTS:
            return self._plan_scope(own, learned, [MergePlanner(seconds_per_block=0)], None, no_progress, note_tokens)
        return plan_window(own, _LockedTree(learned.tree, self._state.lock), order, note_tokens)

    def _plan_scope(
        self,
        requests: Sequence[BatchRequest],
        learned: _Learned,
        planners: Sequence[BatchPlanner],
        capacity_tokens: int | None,
        progress: Progress,
        note_tokens: NoteTokens,
    ) -> ScopePlan:
        """Plan one scope's requests on a copy of its tree, because that takes long."""
        from warmprefix.batch.scope_plan import plan_scope

        with self._state.lock:
            tree = learned.tree.copy()
        return plan_scope(
            requests, planners, tree, capacity_tokens, progress, note_tokens=note_tokens, reader=learned.reader
        )

    def _plan(
        self,
        owner: Any,
        requests: Sequence[BatchRequest],
        plan_own: Callable[[Sequence[BatchRequest], _Learned, NoteTokens], ScopePlan],
        capacity_tokens: int | None,
        common: Scope,
        preamble: str | None,
        choose: Choice | None,
        is_window: bool,
    ) -> BatchPlan:
        """Plan the requests of each scope by themselves, and count them as planned.

        Args:
            owner: Commits the plans.
            requests: Of all scopes.
            plan_own: Plans one scope's requests.
            capacity_tokens: The size of the cache that the plan assumes.
            common: The scope of the requests without a tenant.
            preamble: The text in front of every context.
            choose: Which candidates may be fed; None if all blocks are.
            is_window: True if the requests wait now, so that what the cache holds may matter more than what they share.
        """
        from warmprefix.batch import planned_requests
        from warmprefix.batch.choosing import candidates_of, feedings
        from warmprefix.batch.plan import BatchPlan
        from warmprefix.batch.primes import planned_primes
        from warmprefix.batch.scope_plan import bound_of_all

        candidates = (
            {}
            if choose is None
            else {
                request.id: candidates_of(request, choose, partial(self._state.metrics.degrade, "choice"))
                for request in requests
            }
        )
        with self._state.lock:
            batch_id = self._state.open_plans.new_id()
        scoped: dict[Scope, list[BatchRequest]] = {}
        for request in requests:
            scoped.setdefault(common._replace(tenant=request.tenant), []).append(request)
            if choose is None:
                recorded = distinct_blocks(request.blocks)[0]
                self._state.metrics.record_request(recorded, None, request.tenant, common.model, preamble)
        planned: list[PlannedRequest] = []
        scopes: list[Scope] = []
        bounds: list[Bound] = []
        total_tokens = 0
        for scope, own in scoped.items():
            plan_fed = partial(self._plan_fed, scope, own, plan_own, preamble)
            if choose is None:
                its = plan_fed(None)
            else:
                listed = [candidates[request.id] for request in own]
                resident = self._resident_choice(scope, listed) if is_window else None
                its = min(map(plan_fed, feedings(listed, choose, resident)), key=_cost)
            planned += planned_requests(own, its.plan, its.wording, batch_id, len(planned), its.places, candidates)
            scopes += [scope] * len(own)
            bounds.append(its.plan.bound)
            total_tokens += its.plan.total_tokens
        places = {request.id: place for place, request in enumerate(planned)}
        if choose is not None:
            for request in requests:
                blocks, id = candidates[request.id].blocks, planned[places[request.id]].plan_id
                self._state.metrics.record_request(
                    blocks, None, request.tenant, common.model, preamble, k=choose.k, request=id
                )
        saved_tokens = sum([request.saved_tokens for request in planned])
        note_tokens = sum([request.note_tokens for request in planned])
        reordered = sum([list(request.order) != sorted(request.order) for request in planned])
        blank = sum([block.is_blank for request in requests for block in request.blocks])
        checkpoints = self._state.profile.current.checkpoints
        with self._state.lock:
            self._state.open_plans.add_batch(batch_id, scopes)
            counts = self._state.metrics.counts
            counts["plans"] += len(planned)
            counts["planned_tokens"] += total_tokens
            counts["resident_tokens"] += saved_tokens
            counts["reordered_plans"] += reordered
            counts["note_tokens"] += note_tokens
            counts["blank_blocks"] += blank
            for chosen in planned:
                if chosen.candidates is not None:
                    self._state.metrics.count_choice(chosen.candidates, chosen.order)
        bound = bound_of_all(bounds)
        return BatchPlan(
            id=batch_id,
            requests=tuple(planned),
            positions={request.id: places[request.id] for request in requests},
            planner="",
            device="cpu",
            capacity_tokens=capacity_tokens,
            saved_tokens=saved_tokens,
            total_tokens=total_tokens,
            upper_bound=bound.tokens,
            bound=bound.kind,
            seconds=0.0,
            owner=owner,
            checkpoints=checkpoints,
            primes=planned_primes(planned, checkpoints),
        )

    def _resident_choice(self, scope: Scope, listed: Sequence[Candidates]) -> list[list[int]]:
        """Return what each request would be fed if it came alone."""
        with self._state.lock:
            state = self._state.use(scope)
            choices, flights = state.choices(), state.queue.flights.values()
            return [choices.choose(each, flights) for each in listed]

    def _plan_fed(
        self,
        scope: Scope,
        requests: Sequence[BatchRequest],
        plan_own: Callable[[Sequence[BatchRequest], _Learned, NoteTokens], ScopePlan],
        preamble: str | None,
        places: Sequence[Sequence[int]] | None,
    ) -> _PlannedScope:
        """Plan the blocks of one scope's requests at some places; at all if these are None."""
        from warmprefix.batch import SharedWording

        if places is not None:
            requests = [
                replace(request, blocks=tuple([request.blocks[place] for place in own]))
                for request, own in zip(requests, places, strict=True)
            ]
        distinct: dict[bytes, ContextBlock] = {}
        for block in (block for request in requests for block in request.blocks if not block.is_blank):
            distinct.setdefault(block.fingerprint, block)
        with self._state.lock:
            state = self._state.use(scope)
            source = state if places is None else state.choices()
            labels = dict[bytes, str]()
            if has_labels(self._state.writer.choose(None, scope.model)):
                labels = dict(zip(distinct, state.labels.labels(list(distinct.values())), strict=True))
        wording = SharedWording(scope, labels, self._state.writer, preamble, state.cache_salt)
        note_tokens = _note_tokens(requests, wording)
        plan = plan_own(requests, _Learned(source.tree, source.policy, state.reader), note_tokens)
        return _PlannedScope(plan, wording, note_tokens, places)


class _Learned(NamedTuple):
    """What a scope has learned."""

    tree: PrefixTree[bytes]
    policy: OrderingPolicy
    reader: PositionProfile | None


class _PlannedScope(NamedTuple):
    """A plan of one scope's requests."""

    plan: ScopePlan
    wording: SharedWording
    note_tokens: NoteTokens
    places: Sequence[Sequence[int]] | None
    """The places of the blocks that each request is fed; None for all."""


def _cost(planned: _PlannedScope) -> tuple[int, int]:
    """Return the tokens that requests compute, with notes; of equal costs, that of more evidence is less."""
    plan, places = planned.plan, planned.places or ()
    notes = sum([planned.note_tokens(*placed) or 0 for placed in plan.placed])
    return plan.total_tokens - sum([served.tokens for served in plan.served]) + notes, -sum(map(len, places))


def _note_tokens(requests: Sequence[BatchRequest], wording: SharedWording) -> NoteTokens:
    labels, writer, annotation = wording.labels, wording.writer, wording.annotation
    joined = [_joined_places(request.blocks) for request in requests]
    written: dict[int, int | None] = {}
    """The tokens of each request's note, which is the same for every order; None if none can be written."""

    def note_tokens(request: int, order: Sequence[int]) -> int | None:
        follows, templates = joined[request], writer.templates
        if not needs_note(templates, annotation, [place for place in order if place not in follows]):
            return 0
        if request not in written:
            blocks = [requests[request].blocks[place] for place in order]
            ranks = [None if place in follows else place for place in order]
            names = [labels[block.fingerprint] for block in blocks] if labels else ()
            note = order_note(templates, annotation, ranks, names, [block.text for block in blocks])
            written[request] = None if note is None else writer.count(note)
        return written[request]

    return note_tokens


def _joined_places(listed: Sequence[ContextBlock]) -> Collection[int]:
    """Return the places of the blocks that stay directly behind the one in front of them."""
    if all(block.follows is None for block in listed):
        return ()
    _, places = evidence_blocks(listed)
    return {places[i][0] for i in joined_blocks(listed, places)}


class _LockedTree:
    """A scope's tree, read while other requests change it: a copy would take longer than the plan."""

    def __init__(self, tree: PrefixTree[bytes], lock: threading.RLock) -> None:
        self._tree = tree
        self._lock = lock

    def match_prefix(self, keys: Sequence[bytes]) -> PrefixMatch:
        with self._lock:
            return self._tree.match_prefix(keys)

    def deepest_path(
        self, keys: Sequence[bytes], after: Sequence[bytes] = (), *, joined: Collection[int] = ()
    ) -> list[int]:
        with self._lock:
            return self._tree.deepest_path(keys, after, joined=joined)
