"""Prompts with a history: which blocks become references, which get labels, and whether labels pay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from warmprefix.annotate import Annotation, Templates, header_labels
from warmprefix.blocks import ContextBlock
from warmprefix.history import Resolution, VisibleHistory, header_lines, resolve_from_record, resolve_from_turn
from warmprefix.plan import Placement
from warmprefix.planner.state import ScopeState
from warmprefix.stores import Branch, Conversation, PreparedTurn, TurnRecord

__all__ = ["DraftResolution", "PlanDraft", "resolve", "wording"]

_MOST_SEARCHED = 8
"""Blocks of one request for whose text the history is searched."""


class DraftResolution(NamedTuple):
    """Which of a draft's blocks the prompt already holds, and what decided that."""

    opens_prompt: bool
    """True if the context follows the preamble directly."""
    turn: int | None
    blocks: Sequence[Resolution]
    tracked: bool = False
    """True if the store follows the plan until it is committed or abandoned."""
    names: Collection[str] = ()
    """Labels that the texts must not imitate, besides those of the plan's blocks and of a shown history."""
    seen: Sequence[ContextBlock] | None = None
    """Blocks in full that the history has without a label; None if that is unknown, or labels pay."""
    parent: TurnRecord | None = None
    """The record of the turn that a branch continues."""


class PlanDraft(NamedTuple):
    """A checked request: distinct blocks in relevance order, with labels."""

    plan_id: str
    scope: ScopeState
    placement: Placement
    conversation: str | None
    branch: Branch | None
    key: Conversation | None
    """Conversation or turn whose record the plan reads or voids; None without one.

    With head placement it has none: the context is rebuilt each turn, so there is nothing to refer to.
    """
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

    def proposed(self) -> dict[bytes, str]:
        """Return the blocks' labels by fingerprint, as the store's `Prepare` takes them."""
        return {block.fingerprint: label for block, label in zip(self.blocks, self.labels, strict=True)}


def resolve(draft: PlanDraft, record: PreparedTurn | TurnRecord | None, templates: Templates) -> DraftResolution:
    """Decide which blocks of a draft with placement `"tail"` become references, by the messages or the store's record.

    O(length of the history).

    Args:
        draft: The draft.
        record: The store's answer; None if it was not called or did not answer.
        templates: The wording of references.
    """
    if draft.visible is not None:
        resolved = draft.visible.resolve(draft.blocks, draft.labels, templates)
        in_full = _in_full(draft, resolved)
        # A system prompt that holds one of the blocks is this request's own, so no other request shares a prefix.
        opens_prompt = draft.visible.is_empty and len(in_full) == len(resolved)
        seen = None
        if draft.omits_labels:
            seen = [block for block, _ in in_full[:_MOST_SEARCHED] if draft.visible.has(block.text)]
        return DraftResolution(opens_prompt, None, resolved, seen=seen)
    if draft.branch is not None:
        begins = draft.branch.after is None
        parent = record if isinstance(record, TurnRecord) else TurnRecord(0, partial=not begins)
        resolved = resolve_from_turn(draft.blocks, parent, templates, any(draft.labels))
        names = [*draft.imitable, *[block.label for block in parent.blocks if block.label]]
        if parent.partial:  # any id may be a label of the history
            names += [label for block in draft.blocks for label in header_labels(block.text)]
        unlabelled = {block.fingerprint for block in parent.blocks if not block.label} if draft.omits_labels else ()
        seen = [block for block in draft.blocks if block.fingerprint in unlabelled]
        turn = parent.turn + 1 if begins or record is not None else None
        return DraftResolution(begins, turn, resolved, False, names, seen, parent)
    if draft.conversation is not None and isinstance(record, PreparedTurn):
        resolved = resolve_from_record(draft.blocks, draft.labels, record, templates)
        return DraftResolution(record.turn == 0, record.turn + 1, resolved, True, draft.imitable)
    is_tracked = draft.conversation is not None
    return DraftResolution(not is_tracked, None, [(label, None) for label in draft.labels], is_tracked, draft.imitable)


def wording(
    draft: PlanDraft, resolution: DraftResolution, templates: Templates
) -> tuple[Annotation, Sequence[Resolution], frozenset[str]]:
    """Return what a prompt with placement `"tail"` shows, and the labels it must not imitate.

    Where labels do not pay, blocks in full show none, and no later turn refers to them. The caller holds the lock.
    """
    resolved, visible = resolution.blocks, draft.visible
    registry, savings = draft.scope.labels, draft.scope.label_savings
    own = [label for label, _ in resolved]
    if visible is None:
        names = frozenset([*own, *resolution.names])
    else:
        names = frozenset(visible.labels(templates, registry.is_text) | set(own))
    in_full = _in_full(draft, resolved)
    referred = [block for block, (_, reference) in zip(draft.blocks, resolved, strict=True) if reference is not None]
    pays = not draft.omits_labels or savings.pay(referred)
    # A text that imitates one of the names must be escaped, and so its block is labelled.
    if not pays and all(templates.escaped(block.text, names) == templates.escaped(block.text) for block, _ in in_full):
        unlabelled = [block for block, _ in in_full]
        returned = savings.returned(draft.conversation, unlabelled) if resolution.seen is None else resolution.seen
        savings.omit(len(unlabelled), returned)
        return "note", [(label if reference else "", reference) for label, reference in resolved], frozenset()
    if visible is not None:
        # Once a line that looks like the first line of a block is part of the history, it must not pass for one.
        lines = [found for block, _ in in_full for found in header_lines(block.text)]
        registry.add_opened([line for label, line in lines if label not in names])
        registry.discard_opened(f"[{label}] {block.text}".partition("\n")[0] for block, label in in_full)
    return draft.annotation, resolved, names


def _in_full(draft: PlanDraft, resolved: Sequence[Resolution]) -> list[tuple[ContextBlock, str]]:
    """Return the blocks that no reference replaces, each with its label."""
    return [
        (block, label) for block, (label, reference) in zip(draft.blocks, resolved, strict=True) if reference is None
    ]
