"""From a request to its plan: a checked draft with labels, then the planned order."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict, get_args

from warmprefix.annotate import Annotate
from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, evidence_blocks, joined_blocks, pins
from warmprefix.choice import Candidates, Choice
from warmprefix.errors import check_names
from warmprefix.history import Message, VisibleHistory, shown_labels
from warmprefix.labels import lasting_labels
from warmprefix.ordering import BlockView, OrderingPolicy, PrefixView
from warmprefix.ordering.policies import Runs
from warmprefix.plan import ContextPlan, Placement, PlannedBlock, Scope
from warmprefix.planner.references import DraftResolution, PlanDraft, label_names, resolve
from warmprefix.planner.state import PlannerState, ScopeState, make_scope
from warmprefix.quotes import OPENING_CHARACTERS, opening_keys
from warmprefix.stores import Branch, Conversation, PreparedTurn, TurnRecord
from warmprefix.tokens import OrderNote

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["PlanOptions", "QueuedRequest", "RequestPlanner", "ScopeOptions", "let_others_announce", "policy_order"]

_PLACEMENTS = get_args(Placement)
_MOST_TWINS = 4
"""Most twins of a candidate that are looked up in the history."""


class ScopeOptions(TypedDict, total=False):
    """The arguments of `ContextPlanner.plan` that name a scope."""

    tenant: str | None
    model: str | None
    preamble: str | None


class PlanOptions(ScopeOptions, total=False):
    """The keyword arguments of `ContextPlanner.plan`, which documents them."""

    conversation: str | Branch | None
    placement: Placement
    history: Iterable[Message] | None
    order_locked: bool
    annotate: Annotate | None
    choose: Choice | None


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits. It ends when it is planned, withdrawn, or at the end of a `with` block."""

    _state: PlannerState = field(repr=False)
    _scope: ScopeState = field(repr=False)
    _number: int

    def withdraw(self) -> None:
        """End it without a plan. Idempotent."""
        with self._state.lock:
            self._scope.queue.withdraw(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.withdraw()


async def let_others_announce() -> None:
    """Let tasks that are ready announce their requests, in one round of the event loop."""
    import asyncio  # importing it takes long, and the caller has it already

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # another framework drives this coroutine
        return
    await asyncio.sleep(0)


class RequestPlanner:
    """Plans single requests: `draft`, and `arrange` once the store has answered.

    The store works between the two, without the lock.
    """

    def __init__(self, state: PlannerState) -> None:
        self._state = state

    def draft(
        self,
        blocks: Iterable[ContextBlock | str],
        conversation: str | Branch | None = None,
        placement: Placement = "head",
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        history: Iterable[Message] | None = None,
        order_locked: bool = False,
        annotate: Annotate | None = None,
        choose: Choice | None = None,
    ) -> PlanDraft:
        """Check a request and label its blocks; of candidates to choose from, the first ones."""
        listed = as_blocks(blocks)
        candidates = None
        if choose is None:
            distinct, positions = evidence_blocks(listed)
        else:
            on_error = partial(self._state.metrics.degrade, "choice")
            candidates = Candidates.checked(choose, listed, on_error, order_locked)
            distinct, positions = candidates.blocks, candidates.positions
        branch = None
        if isinstance(conversation, Branch):
            branch, conversation = conversation, None
        elif conversation is not None:
            check_names(conversation=conversation)
        if conversation == "":
            raise ValueError("conversation must be None or have at least one character, got ''")
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement must be 'head' or 'tail', got {placement!r}")
        state = self._state
        annotation = state.writer.choose(annotate, model)
        scope = make_scope(tenant, model, preamble)
        visible = None if history is None else VisibleHistory(history)
        blank = len(listed) - sum(map(len, positions)) if len(distinct) < len(listed) else 0
        is_tail = placement == "tail"
        is_unshown = is_tail and visible is None
        branch = branch if is_unshown else None
        key_id = conversation if branch is None else branch.after
        with state.lock:
            plan_id = state.open_plans.new_id()
            scope_state = state.use(scope)
            if blank:
                state.metrics.counts["blank_blocks"] += blank
        if state.metrics.recorder is not None:
            recorded = distinct_blocks(listed)[0] if blank and choose is None else distinct
            choice = {} if choose is None else {"k": choose.k, "request": plan_id}
            state.metrics.record_request(recorded, conversation, tenant, model, preamble, **choice)
        if candidates is None:
            joined = joined_blocks(listed, positions)
        else:
            distinct, positions, joined = candidates.feeding(candidates.first)
        draft = PlanDraft(
            plan_id,
            scope_state,
            placement,
            conversation,
            branch,
            Conversation(tenant, key_id) if is_tail and key_id is not None else None,
            distinct,
            positions,
            joined,
            ("",) * len(distinct),
            visible,
            order_locked,
            annotation,
            (),
            candidates,
        )
        is_unshown = is_tail and visible is None
        return self._labelled(draft) if is_unshown or annotation in ("labels", "both") else draft

    def _labelled(self, draft: PlanDraft) -> PlanDraft:
        """Give the blocks of a draft their labels."""
        blocks, labels = draft.blocks, draft.labels
        is_unshown = draft.placement == "tail" and draft.visible is None
        if draft.annotation not in ("labels", "both"):
            if is_unshown and draft.key is not None:
                labels = [opening_keys(block.text[:OPENING_CHARACTERS])[0] for block in blocks]
        elif is_unshown:
            labels = lasting_labels(blocks)
        else:
            with self._state.lock:
                labels = draft.scope.labels.labels(blocks)
        return draft._replace(labels=labels, imitable=shown_labels(blocks) if is_unshown else ())

    def _choose(self, draft: PlanDraft, candidates: Candidates, record: PreparedTurn | TurnRecord | None) -> PlanDraft:
        """Return a draft of the chosen candidates: the first ones, unless its context opens the prompt."""
        state, scope = self._state, draft.scope
        if not candidates.are_open or state.writer.separator is not None:
            return draft
        if draft.placement == "tail" and not resolve(draft, record, state.writer).opens_prompt:
            # A conversation's record answers for the blocks it was asked about; messages and branches for all.
            if candidates.are_single or isinstance(record, PreparedTurn):
                return draft
            return self._refer(draft, candidates, record)
        with state.lock:
            choices = scope.choices()
            if scope.capacity.is_off and not choices.is_isolated:
                return draft
            fed = choices.choose(candidates, scope.queue.flights.values())
        return self._feed(draft, candidates, fed)

    def _refer(self, draft: PlanDraft, candidates: Candidates, record: TurnRecord | None) -> PlanDraft:
        """Return a draft that feeds the twins that the history shows, so that references replace them."""
        places = candidates.places[: candidates.k]
        shown = set[bytes]()
        for number in range(min(_MOST_TWINS, max(map(len, places)))):
            tried = self._feed(draft, candidates, [place[: number + 1][-1] for place in places])
            resolved = resolve(tried, record, self._state.writer).blocks
            shown |= {block.fingerprint for block, (_, found) in zip(tried.blocks, resolved, strict=True) if found}
        known = [next((i for i in place if candidates.blocks[i].fingerprint in shown), place[0]) for place in places]
        return self._feed(draft, candidates, known)

    def _feed(self, draft: PlanDraft, candidates: Candidates, fed: Sequence[int]) -> PlanDraft:
        """Return the draft of a request with its first candidates as one of these."""
        if (fed := sorted(fed)) == candidates.first:
            return draft
        blocks, positions, joined = candidates.feeding(fed)
        labels = ("",) * len(blocks)
        return self._labelled(draft._replace(blocks=blocks, positions=positions, joined=joined, labels=labels))

    def queued(self, blocks: Iterable[ContextBlock | str], **scope: Unpack[ScopeOptions]) -> QueuedRequest:
        """Announce a request; see `ContextPlanner.queued`."""
        distinct, _ = evidence_blocks(as_blocks(blocks))
        return self._announce(make_scope(**scope), distinct)

    def announced(self, draft: PlanDraft) -> AbstractContextManager[object]:
        """Announce a draft while other requests are drafted, if its context will open its prompt."""
        if draft.placement == "tail" and (draft.visible is None or not draft.visible.is_empty):
            return nullcontext()
        return self._announce(draft.scope.scope, draft.blocks)

    def _announce(self, scope: Scope, blocks: Sequence[ContextBlock]) -> QueuedRequest:
        with self._state.lock:
            state = self._state.use(scope)
            return QueuedRequest(self._state, state, state.queue.announce([block.fingerprint for block in blocks]))

    def arrange(self, draft: PlanDraft, record: PreparedTurn | TurnRecord | None, began: float) -> ContextPlan:
        """Put the blocks of a draft in planned order, and open the plan.

        Args:
            draft: The draft.
            record: The store's answer; None if it was not called or did not answer.
            began: `time.perf_counter()` when the request came.
        """
        state, scope, candidates = self._state, draft.scope, draft.candidates
        if candidates is not None:
            draft = self._choose(draft, candidates, record)
        distinct, joined = draft.blocks, draft.joined
        writer, metrics = state.writer, state.metrics
        is_head, annotation = draft.placement == "head", draft.annotation
        if is_head:
            resolution = DraftResolution(True, None, [(label, None) for label in draft.labels])
        else:
            resolution = resolve(draft, record, writer)
        opens_prompt = resolution.opens_prompt and writer.separator is None
        keys = [block.fingerprint for block in distinct]
        with state.lock:
            queue = scope.queue
            first = keys if candidates is None else [candidates.blocks[i].fingerprint for i in candidates.first]
            in_flight, waiting = queue.take(keys, first) if queue.announced or queue.flights else ([], [])
            mirror = scope.chosen if candidates is None else scope.choices()
            if mirror is not None and not (opens_prompt and mirror.is_isolated):
                mirror = None
            is_left_alone = opens_prompt and scope.capacity.is_off and scope.capacity.keeps_order()
            reorders = opens_prompt and not is_left_alone
            if is_head:
                names = frozenset(draft.labels if annotation in ("labels", "both") else ())
            else:
                names = label_names(draft, resolution, writer.templates)
            resolved = resolution.blocks
            note = OrderNote(writer, annotation, [label for label, _ in resolved], distinct, joined)
            order: Sequence[int] = range(len(distinct))
            mirrored = None if mirror is None else order
            if not draft.order_locked:
                view = PrefixView(scope.tree, (), in_flight, waiting, note.price, scope.reader)
                order = self._order(scope.policy, distinct, view, note, joined, reorders)
                if mirror is not None:
                    view = replace(view, tree=mirror.tree, in_flight=queue.mirrored(keys))
                    mirrored = self._order(mirror.policy, distinct, view, note, joined, True)
            text, note_tokens = note.written(order)
            positions, templates = draft.positions, writer.templates
            new: type[tuple[object, ...]] = tuple
            planned = tuple(
                [
                    new.__new__(PlannedBlock, (distinct[i], positions[i], *resolved[i], templates, names, i in joined))
                    for i in order
                ]
            )
            if annotation != "note" or not is_head:
                note_tokens = writer.tokens(annotation, planned, text)
            keys = [keys[i] for i in order]
            resident_tokens, visit = scope.predict(keys, reorders, opens_prompt)
            plan = ContextPlan(
                id=draft.plan_id,
                scope=scope.scope,
                conversation=draft.conversation,
                placement=draft.placement,
                turn=resolution.turn,
                blocks=planned,
                resident_tokens=resident_tokens,
                cache_salt=scope.cache_salt,
                tracked=resolution.tracked,
                opens_prompt=opens_prompt,
                annotation=annotation,
                note_tokens=note_tokens or 0,
                order_annotation=text,
                retention=state.retention(scope, keys) if opens_prompt else None,
                branch=draft.branch,
                separator=writer.separator,
                parent=resolution.parent,
                candidates=candidates,
                mirrored=None if mirrored is None else tuple([positions[i][0] for i in mirrored]),
            )
            if reorders or mirrored is not None:
                queue.start(plan.id, keys if reorders else (), [distinct[i].fingerprint for i in mirrored or ()])
            state.open_plans.add(plan, visit)
            metrics.counts["disabled_plans"] += is_left_alone
            if isinstance(record, PreparedTurn):
                metrics.counts["contested_blocks"] += len(record.contested)
            metrics.count_plan(plan, order)
        metrics.notify_planned(plan, began)
        return plan

    def _order(
        self,
        policy: OrderingPolicy,
        blocks: Sequence[ContextBlock],
        view: PrefixView,
        note: OrderNote,
        joined: Collection[int],
        reorders: bool,
    ) -> Sequence[int]:
        """Return the planned order of distinct blocks as indices of the relevance order.

        An order that needs a note is used only if one can be written.

        Args:
            policy: The scope's.
            blocks: The blocks; pinned ones, with their runs, go to their end of the context.
            view: The content of the cache, for all blocks.
            note: The note on an order of all blocks.
            joined: The blocks that stay directly behind the one before them.
            reorders: True if the policy may order the blocks without a pin.
        """
        as_given: Sequence[int] = range(len(blocks))
        planned: Sequence[int] = as_given
        if not [block for block in blocks if block.pinned]:
            if reorders:
                planned = policy_order(self._state, policy, blocks, view, joined)
        else:
            kept_at = pins(blocks, joined)
            starts = [i for i, pin in enumerate(kept_at) if pin == "start"]
            ends = [i for i, pin in enumerate(kept_at) if pin == "end"]
            middle = [i for i, pin in enumerate(kept_at) if pin is None]
            planned = as_given = [*starts, *middle, *ends]
            if reorders:
                view = replace(
                    view,
                    after=[blocks[i].fingerprint for i in starts],
                    note_tokens=lambda order: note.price([*starts, *[middle[i] for i in order], *ends]),
                )
                joined = {place for place, i in enumerate(middle) if i in joined}
                ordered = policy_order(self._state, policy, [blocks[i] for i in middle], view, joined)
                planned = [*starts, *[middle[i] for i in ordered], *ends]
        return as_given if reorders and note.written(planned)[1] is None else planned


def policy_order(
    state: PlannerState,
    policy: OrderingPolicy,
    blocks: Sequence[ContextBlock],
    view: PrefixView,
    joined: Collection[int] = (),
) -> Sequence[int]:
    """Return the policy's order of distinct blocks; relevance order, counted, if it fails.

    The policy orders runs: a block that is `joined` to the one before it moves with it. The caller holds the lock.
    """
    units: Sequence[BlockView] = blocks
    runs = Runs(blocks, joined) if joined else None
    if runs is not None:
        units, view = runs.units, runs.view(view)
    try:
        order = list(map(operator.index, policy.order(units, view)))
        if sorted(order) != list(range(len(units))):
            raise ValueError(f"ordering policy must return a permutation of range({len(units)}), got {order}")
    except Exception:
        state.metrics.degrade("policy")
        return range(len(blocks))
    return order if runs is None else runs.blocks_in(order)
