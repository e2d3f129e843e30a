"""Marks that nodes carry from the postprocessor to the prompt: rank, label, kind of annotation and templates.

Marks are metadata, because a `CitationQueryEngine` copies metadata to the nodes into which it splits a node. They are
excluded from embeddings; a model sees them only in `MetadataMode.ALL`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple, cast, get_args

from llama_index.core.schema import DEFAULT_METADATA_TMPL, BaseNode, MetadataMode, Node, NodeWithScore, TextNode

from warmprefix import ContextPlan, PlannedBlock, Templates
from warmprefix.annotate import Annotation

__all__ = [
    "LABEL",
    "METADATA_TEMPLATE",
    "RANK",
    "TEXT_TEMPLATE",
    "TURN",
    "NodeMark",
    "annotated",
    "copied",
    "is_blank",
    "mark_of",
    "marks",
    "rank_of",
    "showing",
    "with_node",
]

LABEL = "warmprefix_label"
"""Metadata key of a node's label in the prompt, such as `Doc_1`."""

RANK = "warmprefix_rank"
"""Metadata key of a node's place in relevance order, from 0."""

ANNOTATION = "warmprefix_annotation"
"""Metadata key of what the prompt shows of the relevance order; only on nodes that show the model a text."""

BLOCK = "warmprefix_block"
"""Metadata key of a digest of the text, which distinguishes nodes of two plans; on the same nodes."""

JOINED = "warmprefix_joined"
"""Metadata key of True on nodes that belong to the run of the node before them; only on these."""

ORDER = "warmprefix_order_template"
QUOTES = "warmprefix_quotes_template"
MOST_QUOTED = "warmprefix_most_quoted"
MOST_NAMED = "warmprefix_most_named"
LOCATION = "warmprefix_location_template"
"""Metadata keys of the annotation templates, if they are not the default ones."""

TURN = "warmprefix_turn"
"""Metadata key of the id of the turn that shows the node, for the next turn's `Branch`; with placement `"tail"`."""

TEXT_TEMPLATE = "warmprefix_text_template"
METADATA_TEMPLATE = "warmprefix_metadata_template"
"""Metadata keys of a node's own templates, which hold its whole text; with placement `"tail"`."""

_ALL = frozenset(
    (
        LABEL,
        RANK,
        ANNOTATION,
        BLOCK,
        JOINED,
        ORDER,
        QUOTES,
        MOST_QUOTED,
        MOST_NAMED,
        LOCATION,
        TURN,
        TEXT_TEMPLATE,
        METADATA_TEMPLATE,
    )
)

_ANNOTATIONS = get_args(Annotation)
_DEFAULT = Templates()


class NodeMark(NamedTuple):
    """A node's label in the prompt, its relevance rank, and the annotations of its prompt."""

    label: str
    """Empty without labels."""
    rank: int
    block: str
    """The same for all pieces of a node, and for nodes with equal texts."""
    annotation: Annotation
    templates: Templates
    joined: bool = False
    """True if the node belongs to the run of the node before it; see `follows` of `ContextBlock`."""


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


def marks(rank: int, plan: ContextPlan | None = None, planned: PlannedBlock | None = None) -> dict[str, Any]:
    """Return the metadata entries for a node; without a plan if it shows no text."""
    written: dict[str, Any] = {RANK: rank}
    if plan is None or planned is None:
        return written
    if planned.label:
        written[LABEL] = planned.label
    written[ANNOTATION] = plan.annotation
    written[BLOCK] = planned.block.fingerprint.hex()[:12]
    if planned.joined:
        written[JOINED] = True
    templates = planned.templates
    if templates != _DEFAULT:
        written[ORDER] = templates.order
        written[QUOTES] = templates.quotes
        written[MOST_QUOTED] = templates.most_quoted
        written[MOST_NAMED] = templates.most_named
        written[LOCATION] = templates.location
    return written


def rank_of(scored: NodeWithScore) -> int | None:
    """Return a node's place in relevance order; None if the postprocessor did not plan it."""
    rank = scored.node.metadata.get(RANK)
    return rank if isinstance(rank, int) else None


def is_blank(node: BaseNode) -> bool:
    """Return whether an unmarked node shows the model no text."""
    planned_as_blank = RANK in node.metadata and ANNOTATION not in node.metadata
    return planned_as_blank or not node.get_content(MetadataMode.LLM).strip()


def mark_of(node: BaseNode) -> NodeMark | None:
    """Return a node's mark; None if the node shows no text, or already shows its annotation."""
    rank, annotation = node.metadata.get(RANK), node.metadata.get(ANNOTATION)
    if not isinstance(rank, int) or annotation not in _ANNOTATIONS:
        return None
    if ANNOTATION not in node.excluded_llm_metadata_keys:
        return None
    wording = [node.metadata.get(key) for key in (ORDER, QUOTES, LOCATION)]
    numbers = [node.metadata.get(key) for key in (MOST_QUOTED, MOST_NAMED)]
    templates = _DEFAULT if None in wording else _templates(*wording, *numbers)
    label, block = (str(node.metadata.get(key, "")) for key in (LABEL, BLOCK))
    return NodeMark(label, rank, block, cast(Annotation, annotation), templates, node.metadata.get(JOINED) is True)


@lru_cache
def _templates(order: str, quotes: str, location: str, most_quoted: int | None, most_named: int | None) -> Templates:
    return Templates(order=order, quotes=quotes, most_quoted=most_quoted, most_named=most_named, location=location)


def annotated(node: BaseNode, mark: NodeMark, names: Collection[str], note: str | None = None) -> BaseNode | None:
    """Return a node that shows the model its label, if it has one, its text and the note.

    Itself if there is neither label nor note, and nothing to escape, else a copy. None if its class renders its text in
    its own way. `names` are the labels of the whole prompt: a text is escaped where it could pass for one of them, or
    for a note. The node's own text stays unchanged; the template holds the shown text.
    """
    text = node.get_content(MetadataMode.LLM)
    shown = mark.templates.block(mark.label, text, names) if mark.label else mark.templates.escaped(text)
    if shown == text and note is None:
        return node
    # Without a note LlamaIndex strips the result of the template, so this gives the same bytes.
    return showing(node, shown if note is None else f"{shown.rstrip()}\n\n{note}")


def showing(node: BaseNode, text: str) -> BaseNode | None:
    """Return a copy that shows the model this text; None if its class renders its text in its own way."""
    if type(node).get_content not in (TextNode.get_content, Node.get_content):
        return None
    hidden = node.excluded_embed_metadata_keys
    return node.model_copy(
        update={
            "text_template": text.replace("{", "{{").replace("}", "}}"),
            # LlamaIndex uses the template only if there is metadata to show.
            "metadata_template": DEFAULT_METADATA_TMPL,
            "metadata": {ANNOTATION: "none", **node.metadata},
            "excluded_llm_metadata_keys": [key for key in node.excluded_llm_metadata_keys if key != ANNOTATION],
            "excluded_embed_metadata_keys": hidden if ANNOTATION in hidden else [*hidden, ANNOTATION],
        }
    )
