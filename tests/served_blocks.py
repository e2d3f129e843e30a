"""Served blocks as a planner passes them to policies."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering import BlockView, ServedBlock


def as_served(blocks: Sequence[BlockView]) -> list[ServedBlock]:
    """Return blocks that were served in relevance order, none of them resident."""
    return [ServedBlock(block.fingerprint, block.tokens, rank, False) for rank, block in enumerate(blocks)]
