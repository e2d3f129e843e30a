"""Prompts with a history: which blocks become references, and which get labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from warmprefix.annotate import Annotation, Templates, has_labels, header_labels
from warmprefix.blocks import ContextBlock
from warmprefix.choice import Candidates
from warmprefix.history import (
    Resolution,
    VisibleHistory,
    header_lines,
    quotable_in,
    resolve_from_record,
    resolve_from_turn,
)
from warmprefix.plan import Placement, Reference
from warmprefix.planner.state import ScopeState
from warmprefix.quotes import OPENING_BYTES, folded, line_openings
from warmprefix.stores import Branch, Conversation, PreparedTurn, TurnRecord
from warmprefix.tokens import NoteWriter

__all__ = ["DraftResolution", "PlanDraft", "label_names", "resolve"]

_MARGIN = 1.25
"""Tokens that a reference must save for each of its own: lengths are estimates."""


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
    """The label that each block gets unless its conversation requires another one. Without labels, the key of its
    opening, by which the store finds another passage that begins like it."""
    visible: VisibleHistory | None
    order_locked: bool
    annotation: Annotation
    imitable: Sequence[str]
    """Labels in the texts that a block of the conversation may have, where the history is not shown."""
    candidates: Candidates | None = None
    """All candidates, of which the first ones are the draft's blocks until others are chosen; None without a choice."""

    def proposed(self) -> dict[bytes, str]:
        """Return the blocks' labels by fingerprint, as the store's `Prepare` takes them."""
        return {block.fingerprint: label for block, label in zip(self.blocks, self.labels, strict=True) if label}


def resolve(draft: PlanDraft, record: PreparedTurn | TurnRecord | None, writer: NoteWriter) -> DraftResolution:
    """Decide which blocks of a draft with placement `"tail"` become references, by the messages or the store's record.

    O(length of the history).

    Args:
        draft: The draft.
        record: The store's answer; None if it was not called or did not answer.
        writer: The wording of references, and their lengths.
    """
    blocks, labels, templates = draft.blocks, draft.labels, writer.templates
    is_labelled = has_labels(draft.annotation)
    if draft.visible is not None:
        if is_labelled:
            resolved = draft.visible.resolve(blocks, labels, templates)
        else:
            quotes = draft.visible.quotable([block.text for block in blocks], templates)
            resolved = _quoted(blocks, quotes, None, writer)
        # A system prompt that holds one of the blocks is this request's own, so no other request shares a prefix.
        is_first = draft.visible.is_empty and all(reference is None for _, reference in resolved)
        return DraftResolution(is_first, None, resolved)
    if draft.branch is not None:
        begins = draft.branch.after is None
        parent = record if isinstance(record, TurnRecord) else TurnRecord(0, partial=not begins)
        turn = parent.turn + 1 if begins or record is not None else None
        names = [*draft.imitable, *[block.label for block in parent.blocks if block.label]]
        if parent.partial:  # any id may be a label of the history
            names += [label for block in blocks for label in header_labels(block.text)]
        if not is_labelled:
            # What a partial record does not know may begin with the same words.
            quotes = [""] * len(blocks) if parent.partial else quotable_in(blocks, labels, parent)
            resolved = _quoted(blocks, quotes, parent, writer)
            return DraftResolution(begins, turn, resolved, False, names, parent)  # a later turn may have labels again
        resolved = resolve_from_turn(blocks, parent, templates)
        return DraftResolution(begins, turn, resolved, False, names, parent)
    if draft.conversation is not None and isinstance(record, PreparedTurn):
        if is_labelled:
            resolved = resolve_from_record(blocks, labels, record, templates)
        else:
            resolved = _quoted(blocks, quotable_in(blocks, labels, record), record, writer)
        return DraftResolution(record.turn == 0, record.turn + 1, resolved, True, draft.imitable)
    is_tracked = draft.conversation is not None
    unresolved = [(label if is_labelled else "", None) for label in labels]
    return DraftResolution(not is_tracked, None, unresolved, is_tracked, draft.imitable)


def _quoted(
    blocks: Sequence[ContextBlock], quotes: Sequence[str], record: PreparedTurn | TurnRecord | None, writer: NoteWriter
) -> list[Resolution]:
    """Return a reference for each block with a quote, where it costs less than the block.

    A block that begins like another line of this request, or like a note, is sent again. O(characters).
    """
    resolved: list[Resolution] = [("", None)] * len(blocks)
    if not any(quotes):
        return resolved
    times = Counter([words for block in blocks for words in line_openings(block.text)])
    turns = {} if record is None else _turns(record)
    templates, saved = writer.templates, 0.0
    for i, (block, quote) in enumerate(zip(blocks, quotes, strict=True)):
        is_named = quote and times[folded(quote)[:OPENING_BYTES]] == 1 and not templates.begins_like_note(quote)
        gain = block.tokens - _MARGIN * writer.count(f'"{quote}", ') if is_named else 0
        if gain > 0:
            saved += gain
            annotation = templates.again_annotation([quote])
            resolved[i] = "", Reference("", turns.get(block.fingerprint), annotation, quote)
    return resolved if saved > _MARGIN * writer.count(templates.again_annotation(())) else [("", None)] * len(blocks)


def _turns(record: PreparedTurn | TurnRecord) -> dict[bytes, int]:
    seen = record.blocks if isinstance(record, TurnRecord) else record.seen.values()
    return {block.fingerprint: block.turn for block in seen}


def label_names(draft: PlanDraft, resolution: DraftResolution, templates: Templates) -> frozenset[str]:
    """Return the labels that a prompt with placement `"tail"` must not imitate. The caller holds the lock."""
    if not has_labels(draft.annotation):
        return frozenset([*draft.imitable, *resolution.names])
    resolved, visible, registry = resolution.blocks, draft.visible, draft.scope.labels
    own = [label for label, _ in resolved]
    if visible is None:
        return frozenset([*own, *resolution.names])
    names = frozenset(visible.labels(templates, registry.is_text) | set(own))
    in_full = [
        (block, label) for block, (label, reference) in zip(draft.blocks, resolved, strict=True) if reference is None
    ]
    # Once a line that looks like the first line of a block is part of the history, it must not pass for one.
    lines = [found for block, _ in in_full for found in header_lines(block.text)]
    registry.add_opened([line for label, line in lines if label not in names])
    registry.discard_opened(f"[{label}] {block.text}".partition("\n")[0] for block, label in in_full)
    return names
