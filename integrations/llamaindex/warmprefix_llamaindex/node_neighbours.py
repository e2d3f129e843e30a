"""Nodes that follow each other in their source."""

from __future__ import annotations

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo

from warmprefix_requests.neighbours import SourcePlace

__all__ = ["follows_directly"]

_SENTENCE = "original_text"
"""Metadata key under which a `SentenceWindowNodeParser` keeps the sentence that its window surrounds."""


def follows_directly(node: BaseNode, before: BaseNode) -> bool:
    """Return True if a node continues the one before it, by their relationships, offsets or pages."""
    return (
        _related(node, NodeRelationship.PREVIOUS) == before.node_id
        or _related(before, NodeRelationship.NEXT) == node.node_id
        or _place(node).continues(_place(before))
    )


def _related(node: BaseNode, relationship: NodeRelationship) -> str | None:
    related = node.relationships.get(relationship)
    return related.node_id if isinstance(related, RelatedNodeInfo) else None


def _place(node: BaseNode) -> SourcePlace:
    """Return the place of a node's text, with the window around its sentence if it shows one."""
    place = SourcePlace.of_metadata(node.metadata, 0)
    # The offsets of a `HierarchicalNodeParser` count from the beginning of the parent.
    source = place.source if place.page is not None else _related(node, NodeRelationship.SOURCE)
    parent = _related(node, NodeRelationship.PARENT)
    start, end = getattr(node, "start_char_idx", None), getattr(node, "end_char_idx", None)
    if start is not None and end is not None:
        text, sentence = node.get_content(MetadataMode.NONE), node.metadata.get(_SENTENCE)
        if isinstance(sentence, str) and text != sentence and sentence in text:
            start -= text.index(sentence)
            end = start + len(text)
    return SourcePlace(None if source is None else (source, parent), start, end, place.page)
