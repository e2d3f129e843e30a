"""The planner for requests in flight: few of them, and milliseconds to plan them in."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from warmprefix.batch.base import Placed, Progress
from warmprefix.batch.layout import laid_out

__all__ = ["MOST_REQUESTS", "WindowPlanner"]

MOST_REQUESTS = 1_000
"""Beyond this many requests that share much, all pairs take longer than what `MergePlanner` does at least."""


class WindowPlanner:
    """Merges what shares most tokens, as `MergePlanner` begins, and leaves it at that.

    All pairs are looked at, and then kept up to date: O(n * n) in time and memory for n requests, which is least work
    for those 10 to 200 that wait at one time.
    """

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        members: dict[frozenset[int], list[int]] = {}
        for number, context in enumerate(contexts):
            members.setdefault(frozenset(context), []).append(number)
        left, right = _merged(list(members), tokens)
        return laid_out(left, right, list(members.values()), contexts)


def _merged(sets: list[frozenset[int]], tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The merges: what shares most tokens first; of equals, the earliest."""
    n = len(sets)
    shares = _shares(sets, tokens)
    left: list[int] = []
    right: list[int] = []
    # Each node with its best partner, which may be merged by the time it comes to the top.
    heap = [(-weight, x, y) for x in range(n) for y, weight in _best(shares[x])]
    heapq.heapify(heap)
    while heap:
        _, x, y = heapq.heappop(heap)
        if not shares[x]:
            continue  # merged, or alone by now
        if not shares[y]:
            for partner, weight in _best(shares[x]):
                heapq.heappush(heap, (-weight, x, partner))
            continue
        new = n + len(left)
        left.append(x)
        right.append(y)
        common = sets[x] & sets[y]
        sets.append(common)
        own, theirs = shares[x], shares[y]
        shares[x] = shares[y] = {}
        for z in own.keys() | theirs.keys():
            shares[z].pop(x, None)
            shares[z].pop(y, None)
        both: dict[int, int] = {}
        for z in own.keys() & theirs.keys():
            weight = sum([tokens[block] for block in common & sets[z]])
            if weight:
                both[z] = shares[z][new] = weight
        shares.append(both)
        for partner, weight in _best(both):
            heapq.heappush(heap, (-weight, new, partner))
    return left, right


def _best(shares: dict[int, int]) -> Iterator[tuple[int, int]]:
    """The partner that shares most, the first of equals, and how much; nothing if there is none."""
    if shares:
        most = max(shares.values())
        yield min(partner for partner, weight in shares.items() if weight == most), most


def _shares(sets: Sequence[frozenset[int]], tokens: Sequence[int]) -> list[dict[int, int]]:
    """For every set, the tokens that each other shares with it, if any."""
    holders: dict[int, list[int]] = {}
    for x, blocks in enumerate(sets):
        for block in blocks:
            holders.setdefault(block, []).append(x)
    shares: list[defaultdict[int, int]] = [defaultdict(int) for _ in sets]
    for block, held_by in holders.items():
        weight = tokens[block]
        if weight:
            for x, y in combinations(held_by, 2):
                shares[x][y] += weight
                shares[y][x] += weight
    return [dict(others) for others in shares]
