"""The distinct sets of a batch's contexts, and a top-down grouping of them.

The grouping is the greedy rule of GGR (arXiv 2403.05821), by count times tokens: contexts that hold the block worth
most are set apart, repeatedly, to share it first. Run to the end it is a plan of its own; stopped early, it cuts a
batch into parts that are cheap to plan bottom-up.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["DistinctSets", "Group", "renumbered", "split"]


class DistinctSets:
    """The distinct sets of a batch's contexts, without blocks that only one holds.

    Blocks are renumbered: one with few holders for its tokens comes before one with many.
    """

    def __init__(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        members: dict[frozenset[int], list[int]] = {}
        for number, context in enumerate(contexts):
            members.setdefault(frozenset(context), []).append(number)
        self.members = list(members.values())
        """For each set, the numbers of the contexts that have it."""
        counts = Counter([block for blocks in members for block in blocks])
        shared = [block for block, count in counts.items() if count > 1 and tokens[block] > 0]
        shared.sort(key=lambda block: (counts[block] / tokens[block], block))
        rank = {block: i for i, block in enumerate(shared)}
        self.sets = [sorted([rank[block] for block in blocks if block in rank]) for blocks in members]
        """Each ascending."""
        self.tokens = [tokens[block] for block in shared]
        """Of each block, at least 1."""
        self.entries = sum([counts[block] for block in shared])
        """Number of blocks of all sets together."""
        self.total_tokens = sum([tokens[block] * counts[block] for block in shared])
        """Tokens of all sets together."""
        self.work = sum([counts[block] ** 2 for block in shared])
        """Number of entries walked if every set lists all holders of its blocks."""
        self.repeated_tokens = sum(
            (len(same) - 1) * sum([tokens[block] for block in contexts[same[0]]]) for same in self.members
        )
        """Tokens of the contexts whose set an earlier context has."""


def renumbered(
    contexts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """Return contexts and tokens with blocks renumbered without gaps, in order."""
    used = sorted(set().union(*contexts))
    if len(used) == len(tokens):
        return contexts, tokens
    number = {block: i for i, block in enumerate(used)}
    return [[number[block] for block in context] for context in contexts], [tokens[block] for block in used]


class Group(NamedTuple):
    """Contexts that all hold certain blocks."""

    parent: int
    """The number of the group that these contexts were set apart from, which has its blocks too. -1 for the first."""
    blocks: tuple[int, ...]
    """Blocks that all of the contexts hold."""
    rest: list[int]
    """Those of its contexts that are in no group below it."""


def split(contexts: Sequence[Sequence[int]], tokens: Sequence[int], limit: int) -> list[Group]:
    """Set contexts apart until no group's rest has more work than `limit`.

    Work is that of `DistinctSets`. A group's blocks are all that its contexts share, not only the block that they were
    chosen for. Every group comes after its parent. O(entries * depth * log(blocks)): each context is read once per
    group that it enters.
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
            if (1 - counts[block]) * tokens[block] > worth:  # some of its contexts have been set apart since
                heapq.heappush(heap, ((1 - counts[block]) * tokens[block], block))
                continue
            apart = [x for x in holders[block] if x in left]
            left.difference_update(apart)
            for x in apart:
                for other in contexts[x]:
                    if other not in shared:
                        load -= 2 * counts[other] - 1
                        counts[other] -= 1
            common = set(contexts[apart[0]]).intersection(*[contexts[x] for x in apart[1:]])
            stack.append((number, tuple(sorted(common)), apart))
        groups.append(Group(parent, blocks, [x for x in members if x in left]))
    return groups
