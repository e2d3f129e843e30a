"""CRAFT's access-frequency order, with the whole batch in view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from warmprefix.batch.base import Placed, Progress

__all__ = ["FrequencyPlanner"]


class FrequencyPlanner:
    """Blocks by the number of contexts that hold them, most first; ties in the order in which they first came (CRAFT).

    Every context follows this one order of all blocks, and the contexts run in lexicographic order of their ranks in
    it, which is depth-first over their prefix tree. O(blocks + contexts * log(contexts)).
    """

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        held_by = Counter(
            chain.from_iterable(contexts)
        )  # keeps the order of first appearance, and most_common does too
        by_frequency = [block for block, _ in held_by.most_common()]
        rank = {block: position for position, block in enumerate(by_frequency)}
        ranked = [sorted(map(rank.__getitem__, context)) for context in contexts]
        execution = sorted(range(len(contexts)), key=ranked.__getitem__)
        progress("execution order", len(contexts), len(contexts))
        return [Placed(i, tuple(by_frequency[position] for position in ranked[i])) for i in execution]
