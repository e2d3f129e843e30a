"""The hot loops of batch planning: plain Python over flat arrays of integers, which numba compiles as it stands.

Nothing here recurses, keeps state, or allocates more than its arguments call for, and the same call gives the same
answer compiled or not. Blocks are numbered so that one with few contexts for its tokens comes before one with many; a
set is an ascending run of such numbers, so walking it meets the short lists first.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

__all__ = ["HOT", "Forest", "Index", "Room", "Sets"]

HOT = (
    "overlap",
    "best_partner",
    "best_overlaps",
    "list_contexts",
    "unlist",
    "agglomerate",
    "spanning_forest",
    "common",
    "is_set",
    "assign",
    "refit",
    "detach",
    "attach",
    "uproot",
    "nominate",
    "best_place",
    "regraft",
)
"""The functions to compile, each after those that it calls."""

WALK_OR_COMPARE = 16
"""Entries of a block's list that are walked in the time that it takes to compare two contexts."""

Ints = Any
"""A list of int, or numpy's array of them where numba compiles these functions."""


class Sets(NamedTuple):
    """Sets of blocks: the `size[v]` numbers of `items` from `start[v]` on are set v."""

    items: Ints
    start: Ints
    size: Ints


class Index(NamedTuple):
    """For every block the contexts that hold it: the `size[b]` numbers of `entries` from `start[b]` on."""

    entries: Ints
    start: Ints
    size: Ints
    item: Ints
    """For each entry, where in `Sets.items` its context holds the block."""
    place: Ints
    """For each of `Sets.items`, where its entry stands."""
    tokens: Ints
    """Of each block; none has 0."""


class Room(NamedTuple):
    """Working space, one number a context or node, all 0 in `shared` between calls."""

    shared: Ints
    touched: Ints
    stack: Ints
    buffer: Ints
    """As long as the longest set."""
    nominees: Ints
    """As long as the number of places that are considered for a node."""
    path: Ints
    gains: Ints
    """As long as `path`, as the longest way up a tree that is gone."""
    walked: Ints
    """One number: counts the entries that were walked."""


# -- who shares most ---------------------------------------------------------------------------------------------------


def overlap(items: Ints, a: int, a_end: int, b: int, b_end: int, tokens: Ints) -> int:
    """Tokens of the blocks that two runs share."""
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


def best_partner(x: int, most: int, first: int, sets: Sets, index: Index, room: Room) -> tuple[int, int]:
    """The context that shares most tokens with `x`, and how many these are; (-1, 0) if nobody shares any.

    Exact. Lists are walked from the rarest block on. Once the blocks not yet walked weigh no more than what the best
    partner shares, nobody new can beat it. From then on only those met so far count, and where their lists would be
    longer to walk than they are many, they are compared one by one. Ends as soon as somebody shares `most`.

    Args:
        x: Whose partner.
        most: A bound on what anybody shares with it.
        first: A context worth a look before all others, or -1.
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
    shared[x] = 0  # it shares everything with itself
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
    """Fill the lists of an index whose `size` is all 0 and whose `start` leaves room for them."""
    for x in range(len(sets.start)):
        for i in range(sets.start[x], sets.start[x] + sets.size[x]):
            block = sets.items[i]
            place = index.start[block] + index.size[block]
            index.size[block] += 1
            index.entries[place] = x
            index.item[place] = i
            index.place[i] = place


def best_overlaps(begin: int, end: int, step: int, best: Ints, sets: Sets, index: Index, room: Room) -> None:
    """Write into `best`, for every `step`-th context from `begin` on, the most tokens that any other shares with it."""
    first = -1
    for x in range(begin, end, step):
        first, best[x] = best_partner(x, best[x], first, sets, index, room)


# -- agglomeration -----------------------------------------------------------------------------------------------------


def unlist(i: int, sets: Sets, index: Index) -> None:
    """Take the context that holds item `i` off the list of that block; the last of the list moves to its place."""
    block = sets.items[i]
    index.size[block] -= 1
    last = index.start[block] + index.size[block]
    place = index.place[i]
    index.entries[place] = index.entries[last]
    index.item[place] = index.item[last]
    index.place[index.item[place]] = place


def agglomerate(
    sets: Sets, index: Index, room: Room, bound: Ints, node: Ints, left: Ints, right: Ints, first: int, merges: int,
    partner: Ints, met_version: Ints, version: Ints, hint: Ints,
) -> int:  # fmt: skip
    """Merge the two clusters that share most tokens, again and again, until no two share any.

    A cluster's set is what all of its contexts share: it only shrinks, so the most that anybody shared with it stays a
    bound. Bounds wait in a heap, and one is made exact when it comes to the top. A cluster is known by one of its
    contexts, which absorbs the other's: `sets` and `index` are cut down to what is left.

    Args:
        sets: Of the contexts to merge, an empty one for any that is to be left alone.
        index: Of these sets.
        room: To work in.
        bound: The most that each could share with another; kept up to date.
        node: Each cluster's number in the forest.
        left: Receives one child of every merge, by the merge's number less `first`.
        right: Receives the other.
        first: The number of the forest's first merge, which is how many contexts it has.
        merges: How many merges it has already.
        partner: The partner last found for each, at first -1.
        met_version: The version of that partner when it was found.
        version: How often each cluster has changed, at first 0.
        hint: A context likely to share much with each, or -1.

    Returns:
        How many merges the forest has now.
    """
    items, start, size = sets.items, sets.start, sets.size
    n = len(start)
    top = 0
    for x in range(n):
        top = max(top, bound[x])
    heap = [(top - bound[x], x) for x in range(n) if size[x] > 0 and bound[x] > 0]
    heapq.heapify(heap)
    while len(heap) > 0:
        short, x = heapq.heappop(heap)
        most = top - short
        if size[x] == 0 or most > bound[x]:
            continue  # absorbed, or its bound is lower by now
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


# -- the most that any plan could save ---------------------------------------------------------------------------------


def spanning_forest(best: Ints, done: Ints, sets: Sets, index: Index, room: Room) -> int:
    """Weight of a maximum spanning forest of the graph whose edges weigh what two contexts share (Prim).

    O(n * n + sum over the blocks of the square of their contexts), O(n) memory.

    Args:
        best: The most that each context shares with what is outside the graph, such as a cache; is overwritten.
        done: One number a context, all 0; is overwritten.
        sets: Of the contexts.
        index: Of these sets.
        room: To work in.
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


# -- local search ------------------------------------------------------------------------------------------------------


class Forest(NamedTuple):
    """Binary trees of merges. Nodes below n are contexts, the others merges, each known by its two children.

    A node's set is what all contexts below it share, so that every merge saves `weight`, its set's tokens.
    """

    parent: Ints
    """-1 of a root."""
    left: Ints
    right: Ints
    weight: Ints
    sets: Sets
    space: Ints
    """How many numbers a node's set may grow to where it stands."""
    used: Ints
    """One number: how much of `sets.items` is given out."""
    free: Ints
    """A stack of the merges that are in no tree; its first number is their count."""


def common(a: int, b: int, sets: Sets, buffer: Ints) -> int:
    """Write what two sets share into `buffer`; how many blocks that is."""
    items = sets.items
    i, i_end = sets.start[a], sets.start[a] + sets.size[a]
    j, j_end = sets.start[b], sets.start[b] + sets.size[b]
    count = 0
    while i < i_end and j < j_end:
        if items[i] == items[j]:
            buffer[count] = items[i]
            count += 1
            i += 1
            j += 1
        elif items[i] < items[j]:
            i += 1
        else:
            j += 1
    return count


def is_set(v: int, count: int, sets: Sets, buffer: Ints) -> bool:
    """Whether the first `count` blocks of `buffer` are the set of `v`."""
    if sets.size[v] != count:
        return False
    same = 0
    while same < count and sets.items[sets.start[v] + same] == buffer[same]:
        same += 1
    return same == count


def assign(v: int, count: int, forest: Forest, buffer: Ints, tokens: Ints) -> int:
    """Make the first `count` blocks of `buffer` the set of `v`; its weight. There must be room for it."""
    sets = forest.sets
    if count > forest.space[v]:
        sets.start[v] = forest.used[0]
        forest.space[v] = count
        forest.used[0] += count
    weight = 0
    for i in range(count):
        sets.items[sets.start[v] + i] = buffer[i]
        weight += tokens[buffer[i]]
    sets.size[v] = count
    forest.weight[v] = weight
    return weight


def refit(v: int, forest: Forest, buffer: Ints, tokens: Ints) -> int:
    """Set right the sets from `v` upwards after a child of `v` was exchanged; the tokens that this gains.

    Ends where a set stays as it was. Where the room for sets is used up, one takes no more blocks than fit where it
    stands: it is then a part of what its contexts share.
    """
    gain = 0
    while v >= 0:
        count = common(forest.left[v], forest.right[v], forest.sets, buffer)
        if count > forest.space[v] and forest.used[0] + count + len(buffer) > len(forest.sets.items):
            count = forest.space[v]  # what is left is for a merge to come
        if is_set(v, count, forest.sets, buffer):
            break
        gain -= forest.weight[v]
        gain += assign(v, count, forest, buffer, tokens)
        v = forest.parent[v]
    return gain


def detach(u: int, forest: Forest, buffer: Ints, tokens: Ints) -> tuple[int, int]:
    """Take `u`, which is no root, out of its tree with all that is below it; its sibling, and the tokens lost."""
    parent, left, right = forest.parent, forest.left, forest.right
    merge = parent[u]
    sibling = left[merge] + right[merge] - u
    above = parent[merge]
    lost = forest.weight[merge]
    parent[u] = -1
    parent[sibling] = above
    parent[merge] = left[merge] = right[merge] = -1
    forest.weight[merge] = 0
    forest.sets.size[merge] = 0
    forest.free[0] += 1
    forest.free[forest.free[0]] = merge
    if above >= 0:
        if left[above] == merge:
            left[above] = sibling
        else:
            right[above] = sibling
        lost -= refit(above, forest, buffer, tokens)
    return sibling, lost


def attach(u: int, v: int, forest: Forest, buffer: Ints, tokens: Ints) -> int:
    """Make the root `u` the sibling of `v`; the tokens that this gains."""
    parent, left, right = forest.parent, forest.left, forest.right
    merge = forest.free[forest.free[0]]
    forest.free[0] -= 1
    gain = assign(merge, common(u, v, forest.sets, buffer), forest, buffer, tokens)
    above = parent[v]
    left[merge], right[merge], parent[merge] = v, u, above
    parent[u] = parent[v] = merge
    if above >= 0:
        if left[above] == v:
            left[above] = merge
        else:
            right[above] = merge
        gain += refit(above, forest, buffer, tokens)
    return gain


def uproot(nodes: Ints, forest: Forest, room: Room, tokens: Ints) -> int:
    """Make roots of all `nodes`; the tokens lost."""
    lost = 0
    for u in nodes:
        if forest.parent[u] >= 0 and forest.used[0] + len(room.buffer) <= len(forest.sets.items):
            lost += detach(u, forest, room.buffer, tokens)[1]
    return lost


def nominate(u: int, n: int, forest: Forest, index: Index, room: Room, budget: int) -> int:
    """Write into `room.nominees` the contexts outside `u` that share most with it; how many these are.

    Lists are walked from the rarest block on, until `budget` entries have been. A node with more than a quarter as
    many contexts below it gets no nominees: it is not worth its walk.
    """
    shared, touched, stack, nominees = room.shared, room.touched, room.stack, room.nominees
    own, depth = 0, 1
    stack[0] = u
    while depth > 0:
        depth -= 1
        v = stack[depth]
        if v < n:
            touched[own] = v
            shared[v] = -1  # not to be found
            own += 1
        elif own + depth + 2 > budget // 4:
            for t in range(own):
                shared[touched[t]] = 0
            return 0
        else:
            stack[depth], stack[depth + 1] = forest.left[v], forest.right[v]
            depth += 2
    met, spent = own, 0
    for i in range(forest.sets.start[u], forest.sets.start[u] + forest.sets.size[u]):
        block = forest.sets.items[i]
        begin, entries = index.start[block], min(index.size[block], budget)
        if spent > 0 and spent + entries > budget:
            break
        spent += entries
        for p in range(begin, begin + entries):
            other = index.entries[p]
            count = shared[other]
            if count >= 0:
                if count == 0:
                    touched[met] = other
                    met += 1
                shared[other] = count + index.tokens[block]
    room.walked[0] += spent
    chosen = 0
    for t in range(own, met):
        other = touched[t]
        place = chosen
        if chosen == len(nominees):
            place -= 1
            if shared[other] <= shared[nominees[place]]:
                continue
        while place > 0 and shared[nominees[place - 1]] < shared[other]:
            nominees[place] = nominees[place - 1]
            place -= 1
        nominees[place] = other
        chosen = min(chosen + 1, len(nominees))
    for t in range(met):
        shared[touched[t]] = 0
    return chosen


def best_place(u: int, nominated: int, forest: Forest, room: Room, tokens: Ints) -> tuple[int, int]:
    """Whose sibling the root `u` should be, a nominee or a node above one, and the tokens gained; (-1, 0) if nobody's.

    As the sibling of v it saves what both share, and every node above v loses what it does not share with u. Nothing
    is lost from the first node on that u includes, since those above it are smaller still.
    """
    sets, weight, path, gains = forest.sets, forest.weight, room.path, room.gains
    begin, end = sets.start[u], sets.start[u] + sets.size[u]
    best, place = 0, -1
    for c in range(nominated):
        v = room.nominees[c]
        steps, included = 0, False
        while v >= 0 and not included and steps < len(path):
            path[steps] = v
            gains[steps] = overlap(sets.items, begin, end, sets.start[v], sets.start[v] + sets.size[v], tokens)
            included = gains[steps] == weight[v]
            v = forest.parent[v]
            steps += 1
        if v >= 0 and not included:
            continue  # too deep to tell what is lost
        lost = 0
        for i in range(steps - 1, -1, -1):
            if gains[i] - lost > best:
                best, place = gains[i] - lost, path[i]
            lost += weight[path[i]] - gains[i]
    return place, best


def regraft(nodes: Ints, n: int, forest: Forest, index: Index, room: Room, budget: int) -> int:
    """Move each of `nodes`, with all below it, to where it gains most, unless it stands there; the tokens gained."""
    gained = 0
    for u in nodes:
        if forest.used[0] + len(room.buffer) > len(forest.sets.items):
            break
        if forest.sets.size[u] == 0:
            continue
        nominated = nominate(u, n, forest, index, room, budget)
        if nominated == 0:
            continue
        sibling, lost = -1, 0
        if forest.parent[u] >= 0:
            sibling, lost = detach(u, forest, room.buffer, index.tokens)
        place, gain = best_place(u, nominated, forest, room, index.tokens)
        if gain <= lost:
            place = sibling
        if place >= 0:
            gained += attach(u, place, forest, room.buffer, index.tokens)
        gained -= lost  # alone it may be better off than where it stood
    return gained
