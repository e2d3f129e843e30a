"""When each context runs, once the order of its blocks is settled."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["depth_first"]


def depth_first(orders: Sequence[Sequence[int]]) -> list[int]:
    """The execution order in which equal prefixes stand together: depth-first over the prefix tree of `orders`.

    At each node first the orders that end there, then the children in the order in which they first came. No other
    execution order reuses more, whatever the cache holds: only the path to the current context must stay in it.

    O(blocks of shared prefixes + contexts).

    >>> depth_first([(1, 2), (3,), (1, 4), (3,), (1, 2, 5)])
    [0, 4, 2, 1, 3]
    """
    executed: list[int] = []
    waiting: list[tuple[int, Sequence[int]]] = [(0, range(len(orders)))]
    while waiting:
        depth, members = waiting.pop()
        if len(members) == 1:
            executed.append(members[0])
            continue
        children: dict[int, list[int]] = {}
        for i in members:
            order = orders[i]
            if depth < len(order):
                children.setdefault(order[depth], []).append(i)
            else:
                executed.append(i)
        waiting.extend((depth + 1, child) for child in reversed(children.values()))
    return executed
