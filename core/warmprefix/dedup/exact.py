"""Exact de-duplication against a conversation's record (ContextPilot, Alg. 3)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence

from warmprefix.annotate import Templates, header_labels
from warmprefix.blocks import ContextBlock
from warmprefix.labels import content_label, lasting_label, seems_lasting
from warmprefix.plan import Reference
from warmprefix.stores.base import Prepared

__all__ = ["Resolved", "lasting_labels", "opened_labels", "resolve_from_record", "uncertain_labels"]

Resolved = tuple[str, Reference | None]
"""A block's label, and the reference that takes its place if the prompt already holds it."""

_MAX_OPENED = 64
"""Labels per request that the record remembers because a line of a text begins with them."""

_CONTENT_LABEL = re.compile(r"ctx-[0-9a-f]{32}")


def lasting_labels(blocks: Sequence[ContextBlock]) -> list[str]:
    """Return a label for each block that depends on its id and text alone; O(blocks).

    Where the conversation is not shown, an older version of a block may stand in it under the same id, and the record
    of that may be lost.
    """
    labels: dict[str, None] = {}
    for block in blocks:
        label = lasting_label(block)
        labels[content_label(block) if label in labels else label] = None
    return list(labels)


def opened_labels(blocks: Sequence[ContextBlock]) -> dict[bytes, str]:
    """Return labels of the planner's form that lines of the texts begin with, each under a key of its own.

    The record keeps them next to the labels of blocks: a block that comes later must not get one of them. At most 64;
    the others are `uncertain_labels`.
    """
    opened = [label for label in _lines(blocks) if not _CONTENT_LABEL.fullmatch(label)]
    return {_key(label): label for label in opened[:_MAX_OPENED]}


def uncertain_labels(blocks: Sequence[ContextBlock], known: Collection[str]) -> list[str]:
    """Return the labels of the planner's form that lines of the texts begin with and that are not in `known`.

    A block of this conversation may have one of them, or get it later.
    """
    return [label for label in _lines(blocks) if label not in known]


def _lines(blocks: Sequence[ContextBlock]) -> list[str]:
    lines = (label for block in blocks for label in header_labels(block.text))
    return list(dict.fromkeys(label for label in lines if seems_lasting(label)))


def _key(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=16, person=b"wp opened line").digest()


def resolve_from_record(
    blocks: Sequence[ContextBlock], labels: Sequence[str], record: Prepared, templates: Templates
) -> list[Resolved]:
    """Refer to each block that the record holds, uncontested; the others stay in full. O(len(blocks)).

    A seen block keeps the label it was sent under, contested or not. A new one whose label names another block in this
    conversation, or opened a line of a text in it, is labelled by its content instead.
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
