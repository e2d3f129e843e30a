"""A batch as the planners that count tokens see it: distinct sets of the blocks that can be shared at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["DistinctSets", "counted", "renumbered"]


class DistinctSets:
    """The sets of a batch's contexts, each once, without the blocks that only one of them holds.

    Blocks are renumbered: one that few sets hold, for its tokens, comes before one that many do.
    """

    def __init__(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        members: dict[frozenset[int], list[int]] = {}
        for number, context in enumerate(contexts):
            members.setdefault(frozenset(context), []).append(number)
        self.members = list(members.values())
        """The contexts, by number, that have each set."""
        counts = Counter([block for blocks in members for block in blocks])
        shared = [block for block, count in counts.items() if count > 1 and tokens[block] > 0]
        shared.sort(key=lambda block: (counts[block] / tokens[block], block))
        rank = {block: i for i, block in enumerate(shared)}
        self.sets = [sorted([rank[block] for block in blocks if block in rank]) for blocks in members]
        """Each ascending."""
        self.tokens = [tokens[block] for block in shared]
        """Of each block, at least 1."""
        self.counts = [counts[block] for block in shared]
        """How many sets hold each block, at least 2."""
        self.repeated_tokens = sum(
            (len(same) - 1) * sum([tokens[block] for block in contexts[same[0]]]) for same in self.members
        )
        """Tokens of the contexts whose set an earlier one has."""

    @property
    def entries(self) -> int:
        """Blocks of all sets together."""
        return sum(self.counts)

    @property
    def total_tokens(self) -> int:
        """Tokens of all sets together."""
        return sum([length * count for length, count in zip(self.tokens, self.counts, strict=True)])

    @property
    def work(self) -> int:
        """How many entries are walked if every set asks for all others of each of its blocks."""
        return sum(count * count for count in self.counts)


def counted(contexts: Sequence[Sequence[int]], blocks: int) -> list[int]:
    """How many of the contexts hold each block."""
    counts = Counter([block for context in contexts for block in context])
    return [counts[block] for block in range(blocks)]


def renumbered(
    contexts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """The contexts with numbers for their own blocks alone, which keep their order, and these blocks' tokens."""
    used = sorted(set().union(*contexts))
    if len(used) == len(tokens):
        return contexts, tokens
    number = {block: i for i, block in enumerate(used)}
    return [[number[block] for block in context] for context in contexts], [tokens[block] for block in used]
