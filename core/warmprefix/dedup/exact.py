"""Exact de-duplication against a conversation's record (ContextPilot, Alg. 3)."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.annotate import Templates, bracketed, has_bracket
from warmprefix.blocks import ContextBlock
from warmprefix.labels import content_label, seems_lasting
from warmprefix.plan import Reference
from warmprefix.stores import PreparedTurn

__all__ = ["Resolved", "resolve_from_record", "shown_labels"]

Resolved = tuple[str, Reference | None]
"""A block's label, and the reference that takes its place if the prompt already holds it."""


def shown_labels(blocks: Sequence[ContextBlock]) -> list[str]:
    """Return the labels of `lasting_labels`' form that stand in brackets in the texts. O(len(texts)).

    Where the history is not shown, a block of the conversation may have one of them, or get it later.
    """
    inners = [inner for block in blocks if has_bracket(block.text) for inner in bracketed(block.text)]
    return list(dict.fromkeys([inner for inner in inners if seems_lasting(inner)]))


def resolve_from_record(
    blocks: Sequence[ContextBlock], labels: Sequence[str], record: PreparedTurn, templates: Templates
) -> list[Resolved]:
    """Refer to each block that the record holds, uncontested; the others stay in full. O(len(blocks)).

    A seen block keeps the label it was sent under, contested or not. A new one whose label names another block in this
    conversation is labelled by its content instead.
    """
    resolved: list[Resolved] = []
    for block, label in zip(blocks, labels, strict=True):
        seen = record.seen.get(block.fingerprint)
        if seen is not None and block.fingerprint in record.contested:
            resolved.append((seen.label, None))
        elif seen is not None:
            note = templates.location_annotation([seen.label])
            resolved.append((seen.label, Reference(seen.label, seen.turn, note)))
        else:
            resolved.append((content_label(block) if label in record.taken else label, None))
    return resolved
