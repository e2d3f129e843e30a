"""Choices among what a framework's retriever returned, and what is fed if nothing can be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from warmprefix import Choice, ContextBlock
from warmprefix.blocks import evidence_blocks

__all__ = ["UsableChoice", "usable_choice"]


class UsableChoice(NamedTuple):
    """A choice to plan a request with, or why there is none."""

    choice: Choice | None
    """None if the scores cannot be used: then plan the `first` blocks."""
    first: int
    """Number of blocks in front of the first one that relevance alone does not feed."""
    error: ValueError | None
    """What is wrong with the scores."""


def usable_choice(choose: Choice, blocks: Sequence[ContextBlock], items: Sequence[Any]) -> UsableChoice:
    """Check the scores of candidates, and let the choice see the framework's own objects.

    Args:
        choose: Its `twins` and `version`, if they are functions, take an item.
        blocks: The candidates in relevance order; blank ones need no score.
        items: The objects of the blocks, such as documents, with their metadata.
    """
    evidence, positions = evidence_blocks(blocks)
    first = positions[choose.k][0] if len(positions) > choose.k else len(blocks)
    try:
        choose.losses([block.score for block in evidence], [places[0] for places in positions])
    except ValueError as error:
        return UsableChoice(None, first, error)
    own = {id(block): item for block, item in zip(blocks, items, strict=True)}

    def of_items(function: Callable[[Any], Any]) -> Callable[[ContextBlock], Any]:
        return lambda block: function(own[id(block)])

    if choose.version is not None:
        choose = replace(choose, version=of_items(choose.version))
    if callable(choose.twins):
        choose = replace(choose, twins=of_items(choose.twins))
    return UsableChoice(choose, first, None)
