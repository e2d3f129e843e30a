"""Top-down grouping: contexts that hold the block worth most are set apart, again and again, to share it first.

The greedy rule of GGR (arXiv 2403.05821), by count times tokens. To the end it is a planner of its own; broken off
early, it cuts a batch into parts that are cheap to plan bottom-up.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Group", "split"]


class Group(NamedTuple):
    """Contexts that all hold certain blocks."""

    parent: int
    """The group, by number, whose contexts these were set apart from, with its blocks. -1 of the first."""
    blocks: tuple[int, ...]
    """What they share for certain."""
    rest: list[int]
    """Those of its contexts that are in no group below it."""


def split(contexts: Sequence[Sequence[int]], tokens: Sequence[int], limit: int) -> list[Group]:
    """Set contexts apart until no group's rest has more than `limit` of work, as `DistinctSets.work` has it.

    With them goes all that they share beside the block that they were chosen for. Every group comes after its parent.
    O(entries * depth * log(blocks)), as each context is looked at once a group that it comes into.
    """
    groups: list[Group] = []
    stack: list[tuple[int, tuple[int, ...], list[int]]] = [(-1, (), list(range(len(contexts))))]
    while stack:
        parent, blocks, members = stack.pop()
        number = len(groups)
        shared = set(blocks)
        counts = Counter([block for x in members for block in contexts[x] if block not in shared])
        load = sum(count * count for count in counts.values())
        if load <= limit:
            groups.append(Group(parent, blocks, members))
            continue
        holders: dict[int, list[int]] = {block: [] for block, count in counts.items() if count > 1}
        for x in members:
            for block in contexts[x]:
                if block in holders:
                    holders[block].append(x)
        heap = [((1 - counts[block]) * tokens[block], block) for block in holders]
        heapq.heapify(heap)
        left = set(members)
        while heap and load > limit:
            worth, block = heapq.heappop(heap)
            if counts[block] < 2:
                continue
            if (1 - counts[block]) * tokens[block] > worth:  # some of its contexts are gone
                heapq.heappush(heap, ((1 - counts[block]) * tokens[block], block))
                continue
            apart = [x for x in holders[block] if x in left]
            left.difference_update(apart)
            for x in apart:
                for other in contexts[x]:
                    if other not in shared:
                        load -= 2 * counts[other] - 1
                        counts[other] -= 1
            stack.append((number, _shared_by_all([contexts[x] for x in apart]), apart))
        groups.append(Group(parent, blocks, [x for x in members if x in left]))
    return groups


def _shared_by_all(contexts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted(set(contexts[0]).intersection(*contexts[1:])))
