"""ContextPilot's schedule of contexts by their search paths."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["schedule"]


def schedule(paths: Sequence[Sequence[int]]) -> list[int]:
    """The execution order of contexts, given the child numbers that lead to each from the root (ContextPilot, Alg. 5).

    Contexts whose path begins with the same child number form a group; groups share no prefix and run one after the
    other, by that number. Within a group the longest path runs first. The paper says no more; so that what shares most
    stays together, a group's contexts are grouped again by the next child number, and so on down: of the groups at one
    node the one with the longest path runs first, ties by child number, and last what ends at the node. Equal paths
    keep the order in which they came; contexts at the root share nothing and run last of all.

    O(child numbers in all paths + n log n comparisons).

    >>> schedule([[0, 0, 2], [0, 1], [1], [0, 0, 3]])
    [0, 3, 1, 2]
    """
    child: dict[tuple[int, int], int] = {}
    longest = [0]  # of the paths through each node, the root being 0
    walks: list[list[int]] = []
    for path in paths:
        node = 0
        walk: list[int] = []
        for number in path:
            node = child.setdefault((node, number), len(longest))
            if node == len(longest):
                longest.append(0)
            longest[node] = max(longest[node], len(path))
            walk.append(node)
        walks.append(walk)

    def turns(i: int) -> list[tuple[int, int]]:
        steps = [(-longest[node], number) for node, number in zip(walks[i], paths[i], strict=True)]
        if steps:
            steps[0] = (-1, paths[i][0])
        return [*steps, (0, 0)]  # behind every step that leads on

    return sorted(range(len(paths)), key=turns)
