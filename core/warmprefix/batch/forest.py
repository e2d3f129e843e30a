"""What contexts share, as trees of merges: how the arrays are made, and how a plan is read off them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from warmprefix.batch.compiled import Machine
from warmprefix.batch.loops import Forest, Index, Room, Sets

__all__ = ["PATH", "Merges", "forest_of", "index_of", "room_for", "sets_of"]

PATH = 256
"""The longest way up a tree that is gone to tell what a move costs."""


class Merges:
    """Binary trees over contexts: node `first + i` is the merge of nodes `left[i]` and `right[i]`."""

    def __init__(self, contexts: int) -> None:
        self.first = contexts
        self.left: list[int] = []
        self.right: list[int] = []

    def join(self, nodes: Sequence[int]) -> int:
        """One node over all of these, each not far below it."""
        while len(nodes) > 1:
            pairs = range(0, len(nodes) - 1, 2)
            joined = range(self.first + len(self.left), self.first + len(self.left) + len(pairs))
            self.left += [nodes[i] for i in pairs]
            self.right += [nodes[i + 1] for i in pairs]
            nodes = [*joined, *nodes[2 * len(pairs) :]]
        return nodes[0]


def sets_of(contexts: Sequence[Sequence[int]], machine: Machine) -> Sets:
    """The contexts as sets; each must be ascending."""
    sizes = [len(context) for context in contexts]
    return Sets(
        machine.ints(chain.from_iterable(contexts)),
        machine.ints(accumulate(sizes[:-1], initial=0) if sizes else ()),
        machine.ints(sizes),
    )


def index_of(sets: Sets, tokens: Any, counts: Iterable[int], machine: Machine) -> Index:
    """The lists of contexts of every block; `counts` says how many each has."""
    sizes = list(counts)
    starts = machine.ints(accumulate(sizes[:-1], initial=0) if sizes else ())
    entries, item, place = (machine.zeros(len(sets.items)) for _ in range(3))
    index = Index(entries, starts, machine.zeros(len(sizes)), item, place, tokens)
    machine.run.list_contexts(sets, index)
    return index


def room_for(nodes: int, longest: int, places: int, machine: Machine) -> Room:
    """Working space for so many nodes, sets of so many blocks, and so many nominees."""
    return Room(
        shared=machine.zeros(nodes),
        touched=machine.zeros(nodes),
        stack=machine.zeros(nodes + 1),
        buffer=machine.zeros(longest + 1),
        nominees=machine.zeros(places),
        path=machine.zeros(PATH),
        gains=machine.zeros(PATH),
        walked=machine.zeros(1),
    )


def forest_of(contexts: Sequence[Sequence[int]], tokens: Sequence[int], merges: Merges, machine: Machine) -> Forest:
    """The trees of merges, with the set of every node; room for about as much again lets sets grow."""
    n = len(contexts)
    unused = n - len(merges.left)
    sets: list[Sequence[int]] = list(contexts)
    parent = [-1] * (2 * n)
    for merge, (left, right) in enumerate(zip(merges.left, merges.right, strict=True), n):
        parent[left] = parent[right] = merge
        other = set(sets[right])
        sets.append([block for block in sets[left] if block in other])
    sizes = [len(blocks) for blocks in sets] + [0] * unused
    used = sum(sizes)
    spare = [0] * (used + 4 * max(sizes, default=0) + 64)
    none = [-1] * n
    return Forest(
        parent=machine.ints(parent),
        left=machine.ints([*none, *merges.left, *none[:unused]]),
        right=machine.ints([*none, *merges.right, *none[:unused]]),
        weight=machine.ints([sum([tokens[block] for block in blocks]) for blocks in sets] + [0] * unused),
        sets=Sets(
            machine.ints(chain(chain.from_iterable(sets), spare)),
            machine.ints(accumulate(sizes[:-1], initial=0) if sizes else ()),
            machine.ints(sizes),
        ),
        space=machine.ints(sizes),
        used=machine.ints([used]),
        free=machine.ints([unused, *range(2 * n - 1, 2 * n - 1 - unused, -1), *([0] * len(merges.left))]),
    )
