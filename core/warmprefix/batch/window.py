"""The planner for the few requests in flight, which plans in milliseconds."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from warmprefix.batch.planners import Placed, Progress, laid_out

__all__ = ["MOST_REQUESTS", "WindowPlanner"]

MOST_REQUESTS = 1_000
"""With more requests that share much, comparing all pairs takes longer than `MergePlanner` takes at least."""


class WindowPlanner:
    """Agglomeration by shared tokens, without the local search of `MergePlanner`.

    It computes all pairs and updates them: O(n * n) time and memory for n requests, which is the least work for the 10
    to 200 requests that wait at one time.
    """

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        members: dict[frozenset[int], list[int]] = {}
        for number, context in enumerate(contexts):
            members.setdefault(frozenset(context), []).append(number)
        left, right = _merged(list(members), tokens)
        return laid_out(left, right, list(members.values()), contexts)


def _merged(sets: list[frozenset[int]], tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the merges, those that share most tokens first, ties by position."""
    n = len(sets)
    shares = _shares(sets, tokens)
    left: list[int] = []
    right: list[int] = []
    # Each node with its best partner, which may have been merged when the entry comes to the top.
    heap = [(-weight, x, y) for x in range(n) for y, weight in _best(shares[x])]
    heapq.heapify(heap)
    while heap:
        _, x, y = heapq.heappop(heap)
        if not shares[x]:
            continue  # merged, or without a partner by now
        if not shares[y]:
            for partner, weight in _best(shares[x]):
                heapq.heappush(heap, (-weight, x, partner))
            continue
        new = n + len(left)
        left.append(x)
        right.append(y)
        common = sets[x] & sets[y]
        sets.append(common)
        of_x, of_y = shares[x], shares[y]
        shares[x] = shares[y] = {}
        for z in of_x.keys() | of_y.keys():
            shares[z].pop(x, None)
            shares[z].pop(y, None)
        both: dict[int, int] = {}
        for z in of_x.keys() & of_y.keys():
            weight = sum([tokens[block] for block in common & sets[z]])
            if weight:
                both[z] = shares[z][new] = weight
        shares.append(both)
        for partner, weight in _best(both):
            heapq.heappush(heap, (-weight, new, partner))
    return left, right


def _best(shares: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the first partner that shares most, and its tokens, if there is one."""
    if shares:
        most = max(shares.values())
        yield min(partner for partner, weight in shares.items() if weight == most), most


def _shares(sets: Sequence[frozenset[int]], tokens: Sequence[int]) -> list[dict[int, int]]:
    """Return for every set the tokens shared with each other set, without zeros."""
    holders: dict[int, list[int]] = {}
    for x, blocks in enumerate(sets):
        for block in blocks:
            holders.setdefault(block, []).append(x)
    shares: list[defaultdict[int, int]] = [defaultdict(int) for _ in sets]
    for block, sets_with_it in holders.items():
        weight = tokens[block]
        if weight:
            for x, y in combinations(sets_with_it, 2):
                shares[x][y] += weight
                shares[y][x] += weight
    return [dict(others) for others in shares]
