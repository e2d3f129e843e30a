"""Hot loops over sets: best partners, agglomeration and the spanning forest.

These are plain Python over flat arrays of integers, which numba compiles unchanged. They do not recurse, keep no state,
allocate only what their arguments call for, and give the same answers compiled or not. Blocks are numbered so that one
with few contexts for its tokens comes before one with many, and a set is an ascending run of such numbers. So walking
a set meets short lists first.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

__all__ = ["HOT", "Index", "Ints", "Room", "Sets"]

HOT = ("overlap", "best_partner", "best_overlaps", "list_contexts", "unlist", "agglomerate", "spanning_forest")
"""The functions to compile, each after those that it calls."""

WALK_OR_COMPARE = 16
"""Entries of a block's list that are walked in the time of comparing two contexts."""

Ints = Any
"""A list of int; an int64 array where numba compiles these functions."""


class Sets(NamedTuple):
    """Sets of blocks: set v is the `size[v]` numbers of `items` from `start[v]` on."""

    items: Ints
    start: Ints
    size: Ints


class Index(NamedTuple):
    """The contexts of each block b: `size[b]` numbers of `entries` from `start[b]` on."""

    entries: Ints
    start: Ints
    size: Ints
    item: Ints
    """For each entry, the place in `Sets.items` where its context holds the block."""
    place: Ints
    """For each of `Sets.items`, the place of its entry."""
    tokens: Ints
    """Of each block, at least 1."""


class Room(NamedTuple):
    """Working space, one number per context or node; `shared` is all 0 between calls."""

    shared: Ints
    touched: Ints
    stack: Ints
    buffer: Ints
    """As long as the longest set."""
    nominees: Ints
    """As long as the number of places that are considered for a node."""
    path: Ints
    gains: Ints
    """As long as `path`, which is the longest way up a tree that is visited."""
    walked: Ints
    """One number, which counts the entries that were walked."""


def overlap(items: Ints, a: int, a_end: int, b: int, b_end: int, tokens: Ints) -> int:
    """Return the tokens of the blocks that two runs share."""
    shared = 0
    while a < a_end and b < b_end:
        if items[a] == items[b]:
            shared += tokens[items[a]]
            a += 1
            b += 1
        elif items[a] < items[b]:
            a += 1
        else:
            b += 1
    return shared


def best_partner(  # noqa: C901 - one loop, which calls would slow down where it is not compiled
    x: int, most: int, first: int, sets: Sets, index: Index, room: Room
) -> tuple[int, int]:
    """Return the context that shares most tokens with `x`, and their number.

    The result is exact; (-1, 0) if no context shares any. Lists are walked from the rarest block on. Once the remaining
    blocks weigh no more than the best partner shares, only contexts met so far can beat it; they are compared one by
    one if that costs less than walking the lists. The search ends when a context shares `most`.

    `most` is an upper bound on the tokens that any context shares with `x`, and `first` a context to compare before all
    others, or -1.
    """
    items, start, size = sets.items, sets.start, sets.size
    entries, list_start, list_size, tokens = index.entries, index.start, index.size, index.tokens
    shared, touched = room.shared, room.touched
    at, end = start[x], start[x] + size[x]
    rest = 0
    for i in range(at, end):
        rest += tokens[items[i]]
    most = min(most, rest)
    best, partner, met = 0, -1, 0
    if first >= 0 and first != x and size[first] > 0:
        best = overlap(items, at, end, start[first], start[first] + size[first], tokens)
        if best > 0:
            partner = first
    while at < end and rest > best and best < most:
        block = items[at]
        weight = tokens[block]
        at += 1
        rest -= weight
        leader, leading = -1, 0
        for p in range(list_start[block], list_start[block] + list_size[block]):
            other = entries[p]
            count = shared[other]
            if count == 0:
                touched[met] = other
                met += 1
            count += weight
            shared[other] = count
            if count > leading and other != x:
                leading = count
                leader = other
        room.walked[0] += list_size[block]
        if leader >= 0 and leader != partner:
            found = leading + overlap(items, at, end, start[leader], start[leader] + size[leader], tokens)
            if found > best:
                best, partner = found, leader
    shared[x] = 0  # x itself is no partner
    while best < most:
        able = 0
        for t in range(met):
            count = shared[touched[t]]
            if count > 0 and count + rest > best:
                able += 1
        if able == 0:
            break
        if at == end or list_size[items[at]] > WALK_OR_COMPARE * able:
            for t in range(met):
                other = touched[t]
                count = shared[other]
                if count > 0 and count + rest > best:
                    found = count + overlap(items, at, end, start[other], start[other] + size[other], tokens)
                    if found > best:
                        best, partner = found, other
            break
        block = items[at]
        weight = tokens[block]
        at += 1
        rest -= weight
        for p in range(list_start[block], list_start[block] + list_size[block]):
            other = entries[p]
            count = shared[other]
            if count > 0:
                count += weight
                shared[other] = count
                if count > best:
                    best, partner = count, other
        room.walked[0] += list_size[block]
    for t in range(met):
        shared[touched[t]] = 0
    return partner, best


def list_contexts(sets: Sets, index: Index) -> None:
    """Fill `index`, whose `size` and `start` are all 0, with the lists of `sets`."""
    for block in sets.items:
        index.size[block] += 1
    for block in range(1, len(index.size)):
        index.start[block] = index.start[block - 1] + index.size[block - 1]
        index.size[block - 1] = 0
    if len(index.size) > 0:
        index.size[-1] = 0
    for x in range(len(sets.start)):
        for i in range(sets.start[x], sets.start[x] + sets.size[x]):
            block = sets.items[i]
            place = index.start[block] + index.size[block]
            index.size[block] += 1
            index.entries[place] = x
            index.item[place] = i
            index.place[i] = place


def best_overlaps(begin: int, end: int, step: int, best: Ints, sets: Sets, index: Index, room: Room) -> None:
    """Write the most tokens that another context shares with every `step`-th context."""
    first = -1
    for x in range(begin, end, step):
        first, best[x] = best_partner(x, best[x], first, sets, index, room)


# -- agglomeration -----------------------------------------------------------------------------------------------------


def unlist(i: int, sets: Sets, index: Index) -> None:
    """Remove item `i` from its block's list, whose last entry takes its place."""
    block = sets.items[i]
    index.size[block] -= 1
    last = index.start[block] + index.size[block]
    place = index.place[i]
    index.entries[place] = index.entries[last]
    index.item[place] = index.item[last]
    index.place[index.item[place]] = place


def agglomerate(
    sets: Sets, index: Index, room: Room, bound: Ints, node: Ints, left: Ints, right: Ints, first: int,
    partner: Ints, met_version: Ints, version: Ints, hint: Ints,
) -> int:  # fmt: skip
    """Merge the two clusters that share most tokens until no two share any.

    A cluster's set is the intersection of its contexts. It only shrinks, so the most that another shared with it stays
    an upper bound. Bounds wait in a heap, and one is made exact when it comes to the top. One context represents a
    cluster and absorbs the other cluster's: `sets` and `index` shrink to the remaining sets.

    Args:
        sets: Of the contexts to merge; an empty set leaves its context alone.
        index: Of these sets.
        room: Working space.
        bound: The most that each could share with another; updated.
        node: Each cluster's number in the forest; updated.
        left: Receives one child of every merge, by the merge's number less `first`.
        right: Receives the other child.
        first: The number of the first merge.
        partner: The partner last found for each, at first -1.
        met_version: The version of that partner when it was found.
        version: Number of changes of each cluster, at first 0.
        hint: A context likely to share much with each, or -1.

    Returns:
        The number of merges.
    """
    items, start, size = sets.items, sets.start, sets.size
    n = len(start)
    top = merges = 0
    for x in range(n):
        top = max(top, bound[x])
    heap = [(top - bound[x], x) for x in range(n) if size[x] > 0 and bound[x] > 0]
    heapq.heapify(heap)
    while len(heap) > 0:
        short, x = heapq.heappop(heap)
        most = top - short
        if size[x] == 0 or most > bound[x]:
            continue  # it was absorbed, or its bound has fallen
        other = partner[x]
        if other < 0 or met_version[x] != version[other] or size[other] == 0:
            other, best = best_partner(x, most, hint[x], sets, index, room)
            partner[x] = other
            bound[x] = best
            if other >= 0:
                met_version[x] = version[other]
                hint[x] = other
                if hint[other] < 0:
                    hint[other] = x
            if best < most:
                if best > 0:
                    heapq.heappush(heap, (top - best, x))
                continue
        left[merges], right[merges] = node[x], node[other]
        node[x] = first + merges
        merges += 1
        a, a_end = start[x], start[x] + size[x]
        b, b_end = start[other], start[other] + size[other]
        kept = a
        while a < a_end or b < b_end:
            if b == b_end or (a < a_end and items[a] < items[b]):
                unlist(a, sets, index)
                a += 1
            elif a == a_end or items[b] < items[a]:
                unlist(b, sets, index)
                b += 1
            else:
                unlist(b, sets, index)
                items[kept] = items[a]
                index.place[kept] = index.place[a]
                index.item[index.place[kept]] = kept
                kept += 1
                a += 1
                b += 1
        size[x] = kept - start[x]
        size[other] = 0
        version[x] += 1
        partner[x] = -1
        hint[x] = hint[other] if hint[other] != x else -1
        heapq.heappush(heap, (top - most, x))
    return merges


# -- upper bound -------------------------------------------------------------------------------------------------------


def spanning_forest(best: Ints, done: Ints, sets: Sets, index: Index, room: Room) -> int:
    """Return the weight of a maximum spanning forest of shared tokens (Prim).

    `best` is the most that each context shares with something outside the graph, such as a cache; `done` is all 0. Both
    are overwritten. O(n * n + sum over blocks of the square of their contexts) time, O(n) memory.
    """
    n = len(sets.start)
    weight = 0
    for _ in range(n):
        x, most = -1, -1
        for y in range(n):
            if done[y] == 0 and best[y] > most:
                x, most = y, best[y]
        weight += most
        done[x] = 1
        met = 0
        for i in range(sets.start[x], sets.start[x] + sets.size[x]):
            block = sets.items[i]
            for p in range(index.start[block], index.start[block] + index.size[block]):
                other = index.entries[p]
                if room.shared[other] == 0:
                    room.touched[met] = other
                    met += 1
                room.shared[other] += index.tokens[block]
        for t in range(met):
            other = room.touched[t]
            best[other] = max(best[other], room.shared[other])
            room.shared[other] = 0
    return weight
