"""The machine that runs the hot loops, compiled or not, and their arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate, chain
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from warmprefix_kernels import overlap_loops, tree_loops
from warmprefix_kernels.overlap_loops import Index, Room, Sets
from warmprefix_kernels.tree_loops import Forest

__all__ = [
    "COMPILING_PAYS_FROM",
    "PATH",
    "Machine",
    "Merges",
    "forest_of",
    "index_of",
    "machine",
    "room_for",
    "sets_of",
]

COMPILING_PAYS_FROM = 4_000_000
"""Steps of plain Python, half a second or more, that take longer than importing numba and loading compiled code."""

_LOADED_PAYS_FROM = 100_000
"""The same when compiled code is loaded already."""

PATH = 256
"""Most nodes on the way up a tree that are visited to compute the cost of a move."""

_LOOPS = (overlap_loops, tree_loops)
"""Modules of hot loops, each after those that it calls."""


class Machine(NamedTuple):
    """A way to run the hot loops. All machines give the same answers."""

    run: Any
    """Has the functions that `overlap_loops.HOT` and `tree_loops.HOT` name as attributes."""
    np: Any = None
    """numpy if the functions are compiled."""

    @property
    def compiled(self) -> bool:
        return self.np is not None

    def ints(self, values: Iterable[int]) -> Any:
        """Return an array for these functions: a list, or int64 if compiled."""
        return list(values) if self.np is None else self.np.fromiter(values, self.np.int64)

    def zeros(self, count: int, value: int = 0) -> Any:
        """Return an array of `count` equal numbers."""
        return [value] * count if self.np is None else self.np.full(count, value, self.np.int64)


def machine(steps: int, greatest: int = 0) -> Machine:
    """Return the machine for about `steps` steps of the innermost loops.

    It is numba's if numba is installed, compiling pays, and `greatest`, the largest number, fits in its 64 bits.
    """
    is_loaded = _compiled.cache_info().currsize > 0
    pays = steps >= (_LOADED_PAYS_FROM if is_loaded else COMPILING_PAYS_FROM) and greatest < 1 << 62
    return _compiled() or _PLAIN if pays else _PLAIN


@cache
def _compiled() -> Machine | None:
    try:
        from numba import njit
    except ImportError:  # the extra `batch` only makes planning faster
        return None
    import numpy as np  # numba needs it; without numba it would only take memory

    # A compiled function resolves its callees among its globals on its first call. So each module's functions get a
    # copy of its namespace in which everything that they call is compiled. nogil: other threads go on meanwhile.
    compiled: dict[str, Any] = {}
    for module in _LOOPS:
        namespace = {**vars(module), **compiled}
        for name in module.HOT:
            function = FunctionType(namespace[name].__code__, namespace, name)
            try:
                namespace[name] = njit(cache=True, nogil=True)(function)
            except RuntimeError:  # no folder for compiled code is writable
                namespace[name] = njit(nogil=True)(function)
            compiled[name] = namespace[name]
    return Machine(SimpleNamespace(**compiled), np)


_PLAIN = Machine(SimpleNamespace(**{name: vars(module)[name] for module in _LOOPS for name in module.HOT}))


class Merges:
    """Binary trees over contexts: node `first + i` merges `left[i]` and `right[i]`."""

    def __init__(self, contexts: int) -> None:
        self.first = contexts
        self.left: list[int] = []
        self.right: list[int] = []

    def join(self, nodes: Sequence[int]) -> int:
        """Merge all of `nodes` into a balanced tree and return its top."""
        while len(nodes) > 1:
            pairs = range(0, len(nodes) - 1, 2)
            joined = range(self.first + len(self.left), self.first + len(self.left) + len(pairs))
            self.left += [nodes[i] for i in pairs]
            self.right += [nodes[i + 1] for i in pairs]
            nodes = [*joined, *nodes[2 * len(pairs) :]]
        return nodes[0]


def sets_of(contexts: Sequence[Sequence[int]], machine: Machine) -> Sets:
    """Return the contexts, each ascending, as sets."""
    sizes = [len(context) for context in contexts]
    return Sets(machine.ints(chain.from_iterable(contexts)), machine.ints(_starts(sizes)), machine.ints(sizes))


def index_of(sets: Sets, tokens: Any, machine: Machine) -> Index:
    """Return the list of contexts of every block; `tokens` are the blocks' lengths."""
    entries, item, place = (machine.zeros(len(sets.items)) for _ in range(3))
    index = Index(entries, machine.zeros(len(tokens)), machine.zeros(len(tokens)), item, place, tokens)
    machine.run.list_contexts(sets, index)
    return index


def room_for(nodes: int, longest: int, places: int, machine: Machine) -> Room:
    """Return working space for nodes, sets of up to `longest` blocks, and nominees."""
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
    """Return the trees with their sets, and as much room again for sets to grow."""
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
    no_child = [-1] * n
    return Forest(
        parent=machine.ints(parent),
        left=machine.ints([*no_child, *merges.left, *no_child[:unused]]),
        right=machine.ints([*no_child, *merges.right, *no_child[:unused]]),
        weight=machine.ints([sum([tokens[block] for block in blocks]) for blocks in sets] + [0] * unused),
        sets=Sets(
            machine.ints(chain(chain.from_iterable(sets), spare)), machine.ints(_starts(sizes)), machine.ints(sizes)
        ),
        space=machine.ints(sizes),
        used=machine.ints([used]),
        free=machine.ints([unused, *range(2 * n - 1, 2 * n - 1 - unused, -1), *([0] * len(merges.left))]),
    )


def _starts(sizes: Sequence[int]) -> Iterable[int]:
    return accumulate(sizes[:-1], initial=0) if sizes else ()
