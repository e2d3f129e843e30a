"""Nodes of a plan with placement `"tail"`: what they show, and their whole texts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import MetadataMode, NodeWithScore

from warmprefix import ContextPlan
from warmprefix_llamaindex.node_marks import (
    LABEL,
    METADATA_TEMPLATE,
    RANK,
    TEXT_TEMPLATE,
    TURN,
    copied,
    showing,
    with_node,
)

__all__ = ["tail_nodes", "whole"]


def tail_nodes(nodes: Sequence[NodeWithScore], order: Sequence[int], plan: ContextPlan) -> list[NodeWithScore]:
    """Return copies in this order that show labelled texts or references, and the note behind the last text.

    Their own text stays whole.

    Raises:
        ValueError: The class of a node renders its text in its own way.
    """
    texts: dict[int, str] = {}
    own: dict[int, dict[str, Any]] = {}
    for planned, paragraph in zip(plan.blocks, plan.paragraphs(), strict=True):
        for number, position in enumerate(planned.positions):
            texts[position] = "" if number and planned.reference is not None else paragraph
            own[position] = {LABEL: planned.label} if planned.label else {}
    if plan.order_annotation is not None:
        last = [rank for rank in order if texts.get(rank)][-1]
        texts[last] = f"{texts[last]}\n\n{plan.order_annotation}"
    return [_shown(nodes[rank], texts.get(rank), {RANK: rank, TURN: plan.id, **own.get(rank, {})}) for rank in order]


def _shown(scored: NodeWithScore, text: str | None, marks: dict[str, Any]) -> NodeWithScore:
    """Return a copy that shows a text, and remembers its own templates; None for the text that it shows anyway."""
    node = scored.node
    if text is None or text == node.get_content(MetadataMode.LLM):
        return copied(scored, marks)
    own = {TEXT_TEMPLATE: getattr(node, "text_template", ""), METADATA_TEMPLATE: getattr(node, "metadata_template", "")}
    copy = copied(scored, {**marks, **own})
    shown = showing(copy.node, text)
    if shown is None:
        raise ValueError(f"a {type(node).__name__} shows its text in its own way, so it cannot show a label")
    return with_node(copy, shown)


def whole(scored: NodeWithScore) -> NodeWithScore:
    """Return a node that shows its whole text: itself, or a copy of one of `tail_nodes`."""
    metadata = scored.node.metadata
    own = {"text_template": metadata.get(TEXT_TEMPLATE), "metadata_template": metadata.get(METADATA_TEMPLATE)}
    if not all(isinstance(template, str) for template in own.values()):
        return scored
    copy = copied(scored, {})
    return with_node(copy, copy.node.model_copy(update=own))
