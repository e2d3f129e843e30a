"""A request on its way to a plan: checked, labelled, and not yet told what its conversation has seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock
from warmprefix.dedup.exact import Resolved, resolve_from_record
from warmprefix.dedup.history import VisibleHistory
from warmprefix.plan import Placement, Scope
from warmprefix.stores import Conversation, PreparedTurn

__all__ = ["Draft", "Past"]


class Past(NamedTuple):
    """What stands between the preamble and the context, and what of the context it already holds."""

    opens_prompt: bool
    """Whether nothing does: the context follows the preamble directly."""
    turn: int | None
    resolved: Sequence[Resolved]
    tracked: bool
    """Whether the store follows the plan, until it is committed or abandoned."""
    names: Collection[str]
    """Labels besides those of the plan's blocks, and of a shown history, that its texts must not imitate."""


class Draft(NamedTuple):
    """Distinct blocks in relevance order, each with its positions in the request and the label it would get."""

    plan_id: str
    scope: Scope
    placement: Placement
    conversation: str | None
    blocks: Sequence[ContextBlock]
    positions: Sequence[tuple[int, ...]]
    labels: Sequence[str]
    visible: VisibleHistory | None
    order_locked: bool
    imitable: Sequence[str]
    """Labels in the texts that a block of the conversation may have, where the history is not shown."""

    @property
    def key(self) -> Conversation | None:
        """Whose record the store must be asked for, or told that it no longer holds; None if it has no part in this.

        It has none where context is rebuilt each turn, for there is nothing to refer to.
        """
        if self.conversation is None or self.placement == "head":
            return None
        return Conversation(self.scope.tenant, self.conversation)

    def proposed(self) -> dict[bytes, str]:
        """Return the argument of `SeenStore.prepare`: the blocks' labels by their fingerprints."""
        return {block.fingerprint: label for block, label in zip(self.blocks, self.labels, strict=True)}

    def past(self, record: PreparedTurn | None, templates: Templates) -> Past:
        """Whatever decides here: the visible messages, else the store's record, else that there is no past.

        Args:
            record: The store's answer; None if it was not asked, or gave none.
            templates: The wording of references.
        """
        in_full: list[Resolved] = [(label, None) for label in self.labels]
        if self.placement == "head":
            return Past(True, None, in_full, tracked=False, names=())
        if self.visible is None and self.conversation is None:
            return Past(True, None, in_full, tracked=False, names=self.imitable)
        if self.visible is not None:
            resolved = self.visible.resolve(self.blocks, self.labels, templates)
            # A system prompt that holds one of the blocks is this request's own: nobody shares what follows it.
            opens_prompt = self.visible.is_empty and all(reference is None for _, reference in resolved)
            return Past(opens_prompt, None, resolved, tracked=False, names=())
        if record is None:
            return Past(False, None, in_full, tracked=True, names=self.imitable)
        resolved = resolve_from_record(self.blocks, self.labels, record, templates)
        return Past(record.turn == 0, record.turn + 1, resolved, tracked=True, names=self.imitable)
