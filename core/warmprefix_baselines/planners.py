"""The batch planner of CRAFT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from warmprefix.batch import Device, Placed, Progress

__all__ = ["FrequencyPlanner", "frequency_planner"]


class FrequencyPlanner:
    """Blocks by the number of contexts that hold them, most first (CRAFT).

    Ties are broken by first appearance. Every context follows this one order of all blocks. The contexts run in
    lexicographic order of their ranks in it, which is depth-first. O(blocks + contexts * log(contexts)).
    """

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        holders = Counter(chain.from_iterable(contexts))
        by_frequency = [block for block, _ in holders.most_common()]  # ties keep the order of first appearance
        rank = {block: position for position, block in enumerate(by_frequency)}
        ranked = [sorted(map(rank.__getitem__, context)) for context in contexts]
        execution = sorted(range(len(contexts)), key=ranked.__getitem__)
        progress("execution order", len(contexts), len(contexts))
        return [Placed(i, tuple(by_frequency[position] for position in ranked[i])) for i in execution]


def frequency_planner(device: Device) -> FrequencyPlanner:
    """Return a planner, which computes on the CPU only: the entry point `frequency`."""
    return FrequencyPlanner()
