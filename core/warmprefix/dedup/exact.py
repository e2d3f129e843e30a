"""Exact de-duplication against a conversation's record (ContextPilot, Alg. 3)."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.annotate import Templates, has_bracket, header_labels
from warmprefix.blocks import ContextBlock
from warmprefix.labels import content_label, seems_lasting
from warmprefix.plan import Reference
from warmprefix.stores.base import Prepared

__all__ = ["Resolved", "opened_labels", "resolve_from_record"]

Resolved = tuple[str, Reference | None]
"""A block's label, and the reference that takes its place if the prompt already holds it."""


def opened_labels(blocks: Sequence[ContextBlock]) -> list[str]:
    """Return the labels of `lasting_labels`' form that lines of the texts begin with. O(len(texts)).

    Where the history is not shown, a block of the conversation may have one of them, or get it later.
    """
    texts = [block.text for block in blocks if has_bracket(block.text)]
    lines = [label for text in texts for label in header_labels(text)]
    return list(dict.fromkeys([label for label in lines if seems_lasting(label)]))


def resolve_from_record(
    blocks: Sequence[ContextBlock], labels: Sequence[str], record: Prepared, templates: Templates
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
