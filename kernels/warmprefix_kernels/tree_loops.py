"""Hot loops over trees of merges: local search that moves nodes.

See `overlap_loops` for the rules that these functions follow.
"""

from __future__ import annotations

from typing import NamedTuple

# numba's cache notices changes to a function's own file only: after a change to `overlap`, touch this file too.
from warmprefix_kernels.overlap_loops import Index, Ints, Room, Sets, overlap

__all__ = ["HOT", "Forest"]

HOT = (
    *("common", "is_set", "assign", "refit", "detach", "attach", "uproot"),
    *("nominate", "best_place", "regraft"),
)
"""The functions to compile, each after those that it calls."""


class Forest(NamedTuple):
    """Binary trees of merges: nodes below n are contexts, others have two children.

    A node's set is the intersection of the contexts below it, so every merge saves `weight`, its set's tokens.
    """

    parent: Ints
    """-1 of a root."""
    left: Ints
    right: Ints
    weight: Ints
    sets: Sets
    space: Ints
    """The size to which each node's set may grow in its place."""
    used: Ints
    """One number: the part of `sets.items` that is in use."""
    free: Ints
    """A stack of the merges that are in no tree; its first number is their count."""


def common(a: int, b: int, sets: Sets, buffer: Ints) -> int:
    """Write the blocks that two sets share into `buffer` and return their number."""
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
    """Return True if the first `count` blocks of `buffer` are the set of `v`."""
    if sets.size[v] != count:
        return False
    same = 0
    while same < count and sets.items[sets.start[v] + same] == buffer[same]:
        same += 1
    return same == count


def assign(v: int, count: int, forest: Forest, buffer: Ints, tokens: Ints) -> int:
    """Make `count` fitting blocks of `buffer` the set of `v`; return its weight."""
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
    """Update the sets from `v` upwards; return the tokens gained.

    Call it after a child of `v` was exchanged. It ends at the first set that stays the same. If the room for sets is
    used up, a set takes only the blocks that fit in its place: a subset of the intersection of its contexts.
    """
    gain = 0
    while v >= 0:
        count = common(forest.left[v], forest.right[v], forest.sets, buffer)
        if count > forest.space[v] and forest.used[0] + count + len(buffer) > len(forest.sets.items):
            count = forest.space[v]  # the rest of the room is for a later merge
        if is_set(v, count, forest.sets, buffer):
            break
        gain -= forest.weight[v]
        gain += assign(v, count, forest, buffer, tokens)
        v = forest.parent[v]
    return gain


def detach(u: int, forest: Forest, buffer: Ints, tokens: Ints) -> tuple[int, int]:
    """Cut off the subtree of `u`, not a root; return its sibling and the tokens lost."""
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
    """Make the root `u` the sibling of `v`; return the tokens gained."""
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
    """Make all of `nodes` roots; return the tokens lost."""
    lost = 0
    for u in nodes:
        if forest.parent[u] >= 0 and forest.used[0] + len(room.buffer) <= len(forest.sets.items):
            lost += detach(u, forest, room.buffer, tokens)[1]
    return lost


def nominate(u: int, n: int, forest: Forest, index: Index, room: Room, budget: int) -> int:
    """Nominate the contexts outside `u` that share most with it; return their number.

    They are written into `room.nominees`. Lists are walked from the rarest block on, for up to `budget` entries. A node
    with more than `budget // 4` contexts below it gets no nominees: moving it is not worth the walk.
    """
    shared, touched, stack, nominees = room.shared, room.touched, room.stack, room.nominees
    own, depth = 0, 1
    stack[0] = u
    while depth > 0:
        depth -= 1
        v = stack[depth]
        if v < n:
            touched[own] = v
            shared[v] = -1  # marks it as inside u
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
    """Return the best sibling for the root `u`, and the tokens gained.

    (-1, 0) if no node gains. Candidates are the nominees and the nodes above them. As the sibling of v, u saves the
    tokens that both share, and every node above v loses its tokens that u lacks. From the first node on that u includes
    nothing is lost, because the sets above it are smaller still.
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
            continue  # too deep: the loss is not computed
        lost = 0
        for i in range(steps - 1, -1, -1):
            if gains[i] - lost > best:
                best, place = gains[i] - lost, path[i]
            lost += weight[path[i]] - gains[i]
    return place, best


def regraft(nodes: Ints, n: int, forest: Forest, index: Index, room: Room, budget: int) -> int:
    """Move each of `nodes` to where it gains most; return the tokens gained."""
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
        gained -= lost  # negative for a node that is better off as a root
    return gained
