"""Marks: what a node carries from the postprocessor to the prompt, through whatever an engine makes of it.

They stand in the metadata, because that is what a `CitationQueryEngine` hands on to the nodes it cuts a node into.
No embedding is shown them, and a model only in `MetadataMode.ALL`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

from llama_index.core.schema import DEFAULT_METADATA_TMPL, BaseNode, MetadataMode, Node, NodeWithScore, TextNode

from warmprefix import Templates

__all__ = ["LABEL", "RANK", "Mark", "copied", "labelled", "mark_of", "marks", "rank_of"]

LABEL = "warmprefix_label"
"""What the prompt calls the node, as in `[Doc_1]`."""

RANK = "warmprefix_rank"
"""Its place in relevance order, from 0 on."""

ORDER = "warmprefix_order_template"
LOCATION = "warmprefix_location_template"
"""The wording of the annotations, where it is the application's own."""

_ALL = frozenset((LABEL, RANK, ORDER, LOCATION))

_DEFAULT = Templates()


class Mark(NamedTuple):
    """What a node is called in the prompt, where it stood, and in whose words that is told."""

    label: str
    rank: int
    templates: Templates


def copied(scored: NodeWithScore, marks: dict[str, Any]) -> NodeWithScore:
    """Return a copy of a node and of its metadata, with these marks and without older ones."""
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
    if type(scored) is NodeWithScore:  # the common case, and a third of the time
        return NodeWithScore(node=node, score=scored.score)
    return scored.model_copy(update={"node": node})


def marks(rank: int, label: str | None = None, templates: Templates = _DEFAULT) -> dict[str, Any]:
    """What to write into a node's metadata; no label if it shows no text."""
    written: dict[str, Any] = {RANK: rank}
    if label is not None:
        written[LABEL] = label
        if templates != _DEFAULT:
            written[ORDER] = templates.order
            written[LOCATION] = templates.location
    return written


def rank_of(scored: NodeWithScore) -> int | None:
    """A node's place in relevance order; None for one that came from elsewhere."""
    rank = scored.node.metadata.get(RANK)
    return rank if isinstance(rank, int) else None


def is_blank(node: BaseNode) -> bool:
    """Return whether a node without a label shows the model no text."""
    planned_as_blank = RANK in node.metadata and LABEL not in node.metadata
    return planned_as_blank or not node.get_content(MetadataMode.LLM).strip()


def mark_of(node: BaseNode) -> Mark | None:
    """A node's mark; None for one that has no label, or shows it already."""
    rank, label = node.metadata.get(RANK), node.metadata.get(LABEL)
    if not isinstance(rank, int) or not isinstance(label, str) or LABEL not in node.excluded_llm_metadata_keys:
        return None
    order, location = node.metadata.get(ORDER), node.metadata.get(LOCATION)
    return Mark(label, rank, _DEFAULT if order is None or location is None else _templates(order, location))


@lru_cache
def _templates(order: str, location: str) -> Templates:
    return Templates(order=order, location=location)


def labelled(node: BaseNode, mark: Mark, names: Collection[str], note: str | None = None) -> BaseNode | None:
    """Return a copy that shows the model `[label] text`, with the note behind it.

    None if the node's class renders its text in its own way. `names` are the labels of the whole prompt: the text is
    escaped where it could pass for one of them. The node's own text stays as it is, the template holds the shown text.
    """
    if type(node).get_content not in (TextNode.get_content, Node.get_content):
        return None
    shown = mark.templates.block(mark.label, node.get_content(MetadataMode.LLM), names)
    if note is not None:
        # Where no note follows, LlamaIndex strips what a template gives: the same bytes either way.
        shown = f"{shown.rstrip()}\n\n{note}"
    return node.model_copy(
        update={
            "text_template": shown.replace("{", "{{").replace("}", "}}"),
            # The template is used only where there is metadata to show.
            "metadata_template": DEFAULT_METADATA_TMPL,
            "excluded_llm_metadata_keys": [key for key in node.excluded_llm_metadata_keys if key != LABEL],
        }
    )
