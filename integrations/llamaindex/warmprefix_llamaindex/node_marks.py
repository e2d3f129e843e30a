"""Marks that nodes carry from the postprocessor to the prompt: label, relevance rank and templates.

Marks are metadata, because a `CitationQueryEngine` copies metadata to the nodes into which it splits a node. They are
excluded from embeddings; a model sees them only in `MetadataMode.ALL`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

from llama_index.core.schema import DEFAULT_METADATA_TMPL, BaseNode, MetadataMode, Node, NodeWithScore, TextNode

from warmprefix import Templates

__all__ = ["LABEL", "RANK", "NodeMark", "copied", "labelled", "mark_of", "marks", "rank_of"]

LABEL = "warmprefix_label"
"""Metadata key of a node's label in the prompt, such as `Doc_1`."""

RANK = "warmprefix_rank"
"""Metadata key of a node's place in relevance order, from 0."""

ORDER = "warmprefix_order_template"
LOCATION = "warmprefix_location_template"
"""Metadata keys of the annotation templates, if they are not the default ones."""

_ALL = frozenset((LABEL, RANK, ORDER, LOCATION))

_DEFAULT = Templates()


class NodeMark(NamedTuple):
    """A node's label in the prompt, its relevance rank, and the templates of the annotations."""

    label: str
    rank: int
    templates: Templates


def copied(scored: NodeWithScore, marks: dict[str, Any]) -> NodeWithScore:
    """Return a copy of a node with copied metadata: these marks, and no older ones."""
    node = scored.node
    metadata = node.metadata
    hidden_from_llm, hidden_from_embedding = node.excluded_llm_metadata_keys, node.excluded_embed_metadata_keys
    if not _ALL.isdisjoint(metadata):
        metadata = {key: value for key, value in metadata.items() if key not in _ALL}
        hidden_from_llm = [key for key in hidden_from_llm if key not in _ALL]
        hidden_from_embedding = [key for key in hidden_from_embedding if key not in _ALL]
    copy = node.model_copy(
        update={
            "metadata": {**metadata, **marks},
            "excluded_llm_metadata_keys": [*hidden_from_llm, *marks],
            "excluded_embed_metadata_keys": [*hidden_from_embedding, *marks],
        }
    )
    return with_node(scored, copy)


def with_node(scored: NodeWithScore, node: BaseNode) -> NodeWithScore:
    """Return a copy of a scored node, of the same class, around another node."""
    if type(scored) is NodeWithScore:  # the common case, in a third of the time
        return NodeWithScore(node=node, score=scored.score)
    return scored.model_copy(update={"node": node})


def marks(rank: int, label: str | None = None, templates: Templates = _DEFAULT) -> dict[str, Any]:
    """Return the metadata entries for a node; `label` is None if it shows no text."""
    written: dict[str, Any] = {RANK: rank}
    if label is not None:
        written[LABEL] = label
        if templates != _DEFAULT:
            written[ORDER] = templates.order
            written[LOCATION] = templates.location
    return written


def rank_of(scored: NodeWithScore) -> int | None:
    """Return a node's place in relevance order; None if the postprocessor did not plan it."""
    rank = scored.node.metadata.get(RANK)
    return rank if isinstance(rank, int) else None


def is_blank(node: BaseNode) -> bool:
    """Return whether an unlabelled node shows the model no text."""
    planned_as_blank = RANK in node.metadata and LABEL not in node.metadata
    return planned_as_blank or not node.get_content(MetadataMode.LLM).strip()


def mark_of(node: BaseNode) -> NodeMark | None:
    """Return a node's mark; None if the node has no label, or already shows it."""
    rank, label = node.metadata.get(RANK), node.metadata.get(LABEL)
    if not isinstance(rank, int) or not isinstance(label, str) or LABEL not in node.excluded_llm_metadata_keys:
        return None
    order, location = node.metadata.get(ORDER), node.metadata.get(LOCATION)
    return NodeMark(label, rank, _DEFAULT if order is None or location is None else _templates(order, location))


@lru_cache
def _templates(order: str, location: str) -> Templates:
    return Templates(order=order, location=location)


def labelled(node: BaseNode, mark: NodeMark, names: Collection[str], note: str | None = None) -> BaseNode | None:
    """Return a copy that shows the model `[label] text`, followed by the note.

    None if the node's class renders its text in its own way. `names` are the labels of the whole prompt: the text is
    escaped where it could pass for one of them. The node's own text stays unchanged; the template holds the shown text.
    """
    if type(node).get_content not in (TextNode.get_content, Node.get_content):
        return None
    shown = mark.templates.block(mark.label, node.get_content(MetadataMode.LLM), names)
    if note is not None:
        # Without a note LlamaIndex strips the result of the template, so this gives the same bytes.
        shown = f"{shown.rstrip()}\n\n{note}"
    return node.model_copy(
        update={
            "text_template": shown.replace("{", "{{").replace("}", "}}"),
            # LlamaIndex uses the template only if there is metadata to show.
            "metadata_template": DEFAULT_METADATA_TMPL,
            "excluded_llm_metadata_keys": [key for key in node.excluded_llm_metadata_keys if key != LABEL],
        }
    )
