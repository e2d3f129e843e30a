"""What a prefix cache finds of a batch's contexts, in execution order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from warmprefix.batch.base import Placed
from warmprefix.prefix.tree import PrefixTree

__all__ = ["ResidentPaths", "Served", "serve", "serve_unbounded"]

ResidentPaths = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Paths of blocks that a cache holds, each with their lengths."""


class Served(NamedTuple):
    """What one context found when its turn came."""

    blocks: int
    """How many first blocks of its order the cache held."""
    tokens: int
    warmed_by: int | None
    """The context, by number, that had computed the last of these; None if none did, or if they were there before."""


def serve(
    placed: Sequence[Placed], tokens: Sequence[int], capacity_tokens: int | None, before: ResidentPaths
) -> list[Served]:
    """Run a plan through a cache of blocks that drops what was not used longest, tails first.

    Args:
        placed: The plan.
        tokens: The length of every block, by number.
        capacity_tokens: The size of the cache; None for no bound.
        before: What it holds before, oldest first: paths of blocks and their lengths.

    Returns:
        One for each context, in execution order.
    """
    found = _found_depth_first(placed) if not before and _fits(placed, tokens, capacity_tokens) else None
    if found is None:
        cache = PrefixTree[int](capacity_tokens, 2 * (len(placed) + len(before)) + 1)
        for path, lengths in before:
            cache.insert(path, lengths)
        found = [cache.insert(order, [tokens[block] for block in order]).blocks for _, order in placed]
    return _told(placed, tokens, found)


def serve_unbounded(placed: Sequence[Placed], tokens: Sequence[int], resident: Sequence[int]) -> list[Served]:
    """Run a plan through a cache without bounds, which holds so many first blocks of each context before."""
    found = _found_depth_first(placed)
    if found is None:
        cache = PrefixTree[int](None, 2 * len(placed) + 1)
        found = [cache.insert(order, [tokens[block] for block in order]).blocks for _, order in placed]
    return _told(placed, tokens, [max(blocks, held) for blocks, held in zip(found, resident, strict=True)])


def _fits(placed: Sequence[Placed], tokens: Sequence[int], capacity_tokens: int | None) -> bool:
    """Whether a depth-first plan needs no more: the path to a context stays while those behind it are served."""
    longest = max((sum([tokens[block] for block in order]) for _, order in placed), default=0)
    return capacity_tokens is None or longest <= capacity_tokens


def _told(placed: Sequence[Placed], tokens: Sequence[int], found: Sequence[int]) -> list[Served]:
    """What was found, and by whom it had been computed. O(blocks of all contexts)."""
    below: dict[tuple[int, int], int] = {}
    """The tree of all that was found: each node's child by block. The root is 0."""
    for (_, order), blocks in zip(placed, found, strict=True):
        node = 0
        for block in order[:blocks]:
            node = below.setdefault((node, block), len(below) + 1)
    computed: dict[int, int] = {}
    served: list[Served] = []
    for (context, order), blocks in zip(placed, found, strict=True):
        node, warmed_by = 0, None
        for place, block in enumerate(order):
            child = below.get((node, block))
            if child is None:
                break  # nobody asks for what comes now
            node = child
            if place >= blocks:
                computed[node] = context
            elif place == blocks - 1:
                warmed_by = computed.get(node)
        served.append(Served(blocks, sum([tokens[block] for block in order[:blocks]]), warmed_by))
    return served


def _found_depth_first(placed: Sequence[Placed]) -> list[int] | None:
    """What each finds of the one before it; None if another found more, as the order is not depth-first."""
    left: set[tuple[int, ...]] = set()
    found: list[int] = []
    before: tuple[int, ...] = ()
    for _, order in placed:
        shared = 0
        for a, b in zip(before, order, strict=False):
            if a != b:
                break
            shared += 1
        if order[: shared + 1] in left:
            return None
        if len(before) > shared:
            left.add(before[: shared + 1])
        found.append(shared)
        before = order
    return found
