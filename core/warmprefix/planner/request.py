"""From a request to its plan: a checked draft with labels, then the planned order."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypedDict, get_args

from warmprefix.annotate import Annotate, Annotation, Templates, annotation_for, has_labels
from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, evidence_blocks, joined_blocks
from warmprefix.errors import check_names
from warmprefix.history import Message, Resolution, VisibleHistory, header_lines, resolve_from_record, shown_labels
from warmprefix.labels import LabelRegistry, lasting_labels
from warmprefix.notes import NoteWriter, OrderNote
from warmprefix.plan import ContextPlan, Placement, PlannedBlock, Scope
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.open_plans import OpenPlans
from warmprefix.planner.queue import RequestQueue
from warmprefix.planner.scope import ScopeOptions, ScopeRegistry, ScopeState, make_scope
from warmprefix.stores import Conversation, PreparedTurn

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["DraftResolution", "PlanDraft", "PlanOptions", "QueuedRequest", "RequestPlanner", "let_others_announce"]

_PLACEMENTS = get_args(Placement)
_MOST_SEARCHED = 8
"""Blocks of one request for whose text the history is searched."""


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of `ContextPlanner.plan`, which documents them."""

    conversation: str | None
    placement: Placement
    tenant: str | None
    model: str | None
    preamble: str | None
    history: Iterable[Message] | None
    order_locked: bool
    annotate: Annotate | None


class DraftResolution(NamedTuple):
    """Which of a draft's blocks the prompt already holds, and what decided that."""

    opens_prompt: bool
    """True if the context follows the preamble directly."""
    turn: int | None
    blocks: Sequence[Resolution]
    tracked: bool
    """True if the store follows the plan until it is committed or abandoned."""
    names: Collection[str]
    """Labels that the texts must not imitate, besides those of the plan's blocks and of a shown history."""


class PlanDraft(NamedTuple):
    """A checked request: distinct blocks in relevance order, with labels."""

    plan_id: str
    scope: Scope
    placement: Placement
    conversation: str | None
    blocks: Sequence[ContextBlock]
    positions: Sequence[tuple[int, ...]]
    """The places of each block in the request."""
    joined: frozenset[int]
    """The blocks that stay directly behind the one before them."""
    labels: Sequence[str]
    """The label that each block gets unless its conversation requires another one."""
    visible: VisibleHistory | None
    order_locked: bool
    annotation: Annotation
    omits_labels: bool
    """True if blocks in full need labels only for references of later turns, and these would not pay."""
    imitable: Sequence[str]
    """Labels in the texts that a block of the conversation may have, where the history is not shown."""

    @property
    def key(self) -> Conversation | None:
        """Conversation whose record the plan reads or voids; None without a conversation.

        With head placement it has none: the context is rebuilt each turn, so there is nothing to refer to.
        """
        if self.conversation is None or self.placement == "head":
            return None
        return Conversation(self.scope.tenant, self.conversation)

    def proposed(self) -> dict[bytes, str]:
        """Return the blocks' labels by fingerprint, as the store's `Prepare` takes them."""
        return {block.fingerprint: label for block, label in zip(self.blocks, self.labels, strict=True)}

    def seen_without_labels(self, resolution: DraftResolution) -> list[ContextBlock]:
        """Return some of the blocks in full whose text the shown history has; O(length of the history)."""
        in_full = [block for block, _ in _in_full(self, resolution.blocks)]
        return (
            []
            if self.visible is None
            else [block for block in in_full[:_MOST_SEARCHED] if self.visible.has(block.text)]
        )

    def resolve(self, record: PreparedTurn | None, templates: Templates) -> DraftResolution:
        """Decide which blocks become references, by the messages or the store's record.

        Args:
            record: The store's answer; None if it was not called or did not answer.
            templates: The wording of references.
        """
        in_full: list[Resolution] = [(label, None) for label in self.labels]
        if self.placement == "head":
            return DraftResolution(True, None, in_full, tracked=False, names=())
        if self.visible is None and self.conversation is None:
            return DraftResolution(True, None, in_full, tracked=False, names=self.imitable)
        if self.visible is not None:
            resolved = self.visible.resolve(self.blocks, self.labels, templates)
            # A system prompt that holds one of the blocks is this request's own, so no other request shares a prefix.
            opens_prompt = self.visible.is_empty and all(reference is None for _, reference in resolved)
            return DraftResolution(opens_prompt, None, resolved, tracked=False, names=())
        if record is None:
            return DraftResolution(False, None, in_full, tracked=True, names=self.imitable)
        resolved = resolve_from_record(self.blocks, self.labels, record, templates)
        return DraftResolution(record.turn == 0, record.turn + 1, resolved, tracked=True, names=self.imitable)


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits. It ends when it is planned, withdrawn, or at the end of a `with` block."""

    _lock: threading.RLock = field(repr=False)
    _queue: RequestQueue = field(repr=False)
    _number: int

    def withdraw(self) -> None:
        """End it without a plan. Idempotent."""
        with self._lock:
            self._queue.withdraw(self._number)

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


@dataclass(frozen=True, slots=True)
class RequestPlanner:
    """Plans single requests: `draft`, and `arrange` once the store has answered.

    The store works between the two, without the lock.
    """

    writer: NoteWriter
    lock: threading.RLock
    scopes: ScopeRegistry
    open_plans: OpenPlans
    metrics: PlannerMetrics

    def draft(
        self,
        blocks: Iterable[ContextBlock | str],
        conversation: str | None = None,
        placement: Placement = "head",
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        history: Iterable[Message] | None = None,
        order_locked: bool = False,
        annotate: Annotate | None = None,
    ) -> PlanDraft:
        """Check a request and label its blocks."""
        listed = as_blocks(blocks)
        distinct, positions = evidence_blocks(listed)
        check_names(conversation=conversation)
        scope = make_scope(tenant, model, preamble)
        if conversation == "":
            raise ValueError("conversation must be None or have at least one character, got ''")
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement must be 'head' or 'tail', got {placement!r}")
        resolved = self.writer.resolve(annotate, model)
        annotation = annotation_for(resolved, placement)
        visible = None if history is None else VisibleHistory(history)
        blank = len(listed) - sum(map(len, positions)) if len(distinct) < len(listed) else 0
        recorded = distinct_blocks(listed)[0] if blank else distinct
        self.metrics.record_request(recorded, conversation, tenant, model, preamble)
        is_unshown = placement == "tail" and visible is None
        imitable = shown_labels(distinct) if is_unshown else ()
        with self.lock:
            state = self.scopes.use(scope)
            if not has_labels(annotation):
                labels: Sequence[str] = ("",) * len(distinct)
            else:
                labels = lasting_labels(distinct) if is_unshown else state.labels.labels(distinct)
            omits_labels = placement == "tail" and resolved == "auto" and not state.label_savings.pay()
            if blank:
                self.metrics.counts["blank_blocks"] += blank
            plan_id = self.open_plans.new_id()
        return PlanDraft(
            plan_id,
            scope,
            placement,
            conversation,
            distinct,
            positions,
            joined_blocks(listed, positions),
            labels,
            visible,
            order_locked,
            annotation,
            omits_labels,
            imitable,
        )

    def queued(self, blocks: Iterable[ContextBlock | str], **scope: Unpack[ScopeOptions]) -> QueuedRequest:
        """Announce a request; see `ContextPlanner.queued`."""
        distinct, _ = evidence_blocks(as_blocks(blocks))
        return self._announce(make_scope(**scope), distinct)

    def announced(self, draft: PlanDraft) -> AbstractContextManager[object]:
        """Announce a draft while other requests are drafted, if its context will open its prompt."""
        if draft.placement == "tail" and (draft.visible is None or not draft.visible.is_empty):
            return nullcontext()
        return self._announce(draft.scope, draft.blocks)

    def _announce(self, scope: Scope, blocks: Sequence[ContextBlock]) -> QueuedRequest:
        with self.lock:
            queue = self.scopes.use(scope).queue
            return QueuedRequest(self.lock, queue, queue.announce([block.fingerprint for block in blocks]))

    def arrange(self, draft: PlanDraft, record: PreparedTurn | None, began: float) -> ContextPlan:
        """Put the blocks of a draft in planned order, and open the plan.

        Args:
            draft: The draft.
            record: The store's answer; None if it was not called or did not answer.
            began: `time.perf_counter()` when the request came.
        """
        distinct, positions, joined, metrics = draft.blocks, draft.positions, draft.joined, self.metrics
        templates = self.writer.templates
        resolution = draft.resolve(record, templates)
        opens_prompt = resolution.opens_prompt
        seen = draft.seen_without_labels(resolution) if draft.omits_labels and draft.visible is not None else None
        with self.lock:
            state = self.scopes.use(draft.scope)
            # Reordering is off for a scope whose engine evidently caches nothing.
            is_left_alone = opens_prompt and state.feedback.evidence.keeps_order()
            reorders = opens_prompt and not is_left_alone
            annotation, resolved, names = self._wording(draft, resolution, state, seen)
            waiting = state.queue.take([block.fingerprint for block in distinct]) if len(state.queue) else ()
            note = OrderNote(
                self.writer, annotation, [label for label, _ in resolved], [block.text for block in distinct], joined
            )
            order = (
                range(len(distinct))
                if draft.order_locked
                else state.order(distinct, reorders, joined=joined, waiting=waiting, note=note)
            )
            planned = tuple(
                [PlannedBlock(distinct[i], positions[i], *resolved[i], templates, names, i in joined) for i in order]
            )
            order_annotation = note.of(order)
            plan = ContextPlan(
                id=draft.plan_id,
                scope=draft.scope,
                conversation=draft.conversation,
                placement=draft.placement,
                turn=resolution.turn,
                blocks=planned,
                resident_tokens=state.resident_tokens(planned) if reorders else 0,
                cache_salt=state.cache_salt,
                tracked=resolution.tracked,
                opens_prompt=opens_prompt,
                annotation=annotation,
                note_tokens=(
                    note.tokens(order) or 0
                    if annotation == draft.annotation == "note"
                    else self.writer.tokens(annotation, planned, order_annotation)
                ),
                order_annotation=order_annotation,
            )
            self.open_plans.add(plan)
            if opens_prompt:
                self.open_plans.predict(plan, state.distances(planned))
            if reorders:
                state.queue.start(plan.id, [block.block.fingerprint for block in planned])
            metrics.count_plan(plan)
            metrics.counts["disabled_plans"] += is_left_alone
            if record is not None:
                metrics.counts["contested_blocks"] += len(record.contested)
        metrics.notify_planned(plan, began)
        return plan

    def _wording(
        self,
        draft: PlanDraft,
        resolution: DraftResolution,
        state: ScopeState,
        seen: Sequence[ContextBlock] | None,
    ) -> tuple[Annotation, Sequence[Resolution], frozenset[str]]:
        """Return what the prompt shows, and the labels it must not imitate; the caller holds the lock.

        Where labels do not pay, blocks in full show none, and no later turn refers to them. `seen` are the blocks that
        the shown history has without labels.
        """
        annotation, resolved = draft.annotation, resolution.blocks
        if not has_labels(annotation):
            return annotation, resolved, frozenset()
        names = self._names(draft, resolution, state.labels)
        referred = [
            block for block, (_, reference) in zip(draft.blocks, resolved, strict=True) if reference is not None
        ]
        pays = not draft.omits_labels or state.label_savings.pay(referred)
        if not pays and not self._escapes(draft, resolved, names):
            in_full = [block for block, _ in _in_full(draft, resolved)]
            returned = state.label_savings.returned(draft.conversation, in_full) if seen is None else seen
            state.label_savings.omit(len(in_full), returned)
            return "note", [(label if reference else "", reference) for label, reference in resolved], frozenset()
        self._open_lines(draft, resolved, names, state.labels)
        return annotation, resolved, names

    def _names(self, draft: PlanDraft, resolution: DraftResolution, registry: LabelRegistry) -> frozenset[str]:
        """Return the labels that this prompt must not imitate; the caller holds the lock."""
        own = [label for label, _ in resolution.blocks]
        if draft.visible is None or draft.placement == "head":
            return frozenset([*own, *resolution.names])
        return frozenset(draft.visible.labels(self.writer.templates, registry.is_text) | set(own))

    def _escapes(self, draft: PlanDraft, resolved: Sequence[Resolution], names: frozenset[str]) -> bool:
        """Return True if a text imitates one of the names, so that its block must be escaped, and so labelled."""
        escaped = self.writer.templates.escaped
        return any(escaped(block.text, names) != escaped(block.text) for block, _ in _in_full(draft, resolved))

    def _open_lines(
        self, draft: PlanDraft, resolved: Sequence[Resolution], names: frozenset[str], registry: LabelRegistry
    ) -> None:
        """Remember the lines of shown texts that look like the first line of a block; the caller holds the lock."""
        if draft.visible is None or draft.placement == "head":
            return
        in_full = _in_full(draft, resolved)
        lines = [found for block, _ in in_full for found in header_lines(block.text)]
        # Once such a line is part of the history, it must not pass for the first line of a block.
        registry.add_opened([line for label, line in lines if label not in names])
        registry.discard_opened(f"[{label}] {block.text}".partition("\n")[0] for block, label in in_full)


def _in_full(draft: PlanDraft, resolved: Sequence[Resolution]) -> list[tuple[ContextBlock, str]]:
    """Return the blocks that no reference replaces, each with its label."""
    return [
        (block, label) for block, (label, reference) in zip(draft.blocks, resolved, strict=True) if reference is None
    ]
