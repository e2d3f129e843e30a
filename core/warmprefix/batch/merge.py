"""The merge planner: plans on what a batch really saves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from warmprefix.batch.base import Placed, Progress
from warmprefix.batch.compiled import COMPILING_PAYS_FROM, Machine, machine
from warmprefix.batch.device import OVERLAPS_PAY_FROM, Device, best_overlaps_on_cuda, use_cuda
from warmprefix.batch.distinct import DistinctSets, counted, renumbered
from warmprefix.batch.execution import depth_first
from warmprefix.batch.forest import Merges, forest_of, index_of, room_for, sets_of
from warmprefix.batch.layout import laid_out
from warmprefix.batch.loops import Forest, Index, Room, Sets
from warmprefix.batch.topdown import Group, split

__all__ = ["MergePlanner"]


class _Effort(NamedTuple):
    """How long to try, in steps rather than seconds, so that the same batch gets the same plan."""

    group_work: int
    """Most `work` of what is merged bottom-up in one piece."""
    start_entries: int
    """Most blocks of all contexts for which several starts are compared."""
    moved_nodes: int
    """Nodes that are moved, in whole passes over all of them, of which there is one at least."""
    places: int
    """Nominees of each."""
    walk: int
    """Entries that are walked to find a node's nominees."""
    replanted_entries: int
    """Blocks of all contexts, times rounds of replanting."""
    rounds: int
    """Most rounds of replanting."""


_PLAIN = _Effort(3_000_000, 8_000, 5_000, 16, 2_048, 60_000, 100)
_COMPILED = _Effort(300_000_000, 60_000, 250_000, 16, 4_096, 4_000_000, 1_000)
_MANY = 20_000
"""Contexts from which on half the nominees must do."""

_TOP_DOWN_ENTRIES = 8_000
"""Most blocks of all contexts for which one of the starts is top-down to the end."""

_MOST_PASSES = 8
_WORTH_A_PASS = 3_000
"""Another pass follows one that gained more than such a part of what is saved."""

_PATIENCE = 40
"""Rounds of replanting without a gain that end it."""

_REPLANTED = 10
"""Contexts that are taken out and put back in a round of replanting."""


class MergePlanner:
    """Merges what shares most tokens, then moves contexts and whole subtrees to where they share more.

    Requests that are executed in depth-first order of a tree of shared prefixes save exactly the sum, over the tree's
    merges, of the tokens that the merged contexts have in common. So the tree is built for that sum: agglomeration by
    largest intersection weight, started from several top-down groupings where the batch is small or dense, then local
    search. Deterministic unless there is a time budget. O(n) memory.
    """

    def __init__(
        self,
        seconds_per_block: float | None = None,
        device: Device = "auto",
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Say how long to try.

        Args:
            seconds_per_block: How long local search goes on, for each block of each context, give or take a part of
                a pass; what comes before it takes what it takes. None for a number of steps that depends on the batch
                alone.
            device: Where overlaps are computed; on either the plan is the same.
            seed: Of the random choices of local search.
            clock: Tells the seconds.
        """
        self._seconds_per_block = seconds_per_block
        self._device: Device = device
        self._seed = seed
        self._clock = clock

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        deadline = None
        if self._seconds_per_block is not None:
            deadline = self._clock() + self._seconds_per_block * sum(map(len, contexts))
        batch = DistinctSets(contexts, tokens)
        steps = 4 * batch.work + 4_000 * len(batch.sets)
        machine_ = machine(steps, batch.total_tokens)
        effort = _COMPILED if machine_.compiled and steps >= COMPILING_PAYS_FROM else _PLAIN  # whatever ran before
        search = _Search(batch, machine_, effort, self._device, progress)
        merges = search.best_start()
        rng = random.Random(self._seed)  # noqa: S311 - nothing secret
        forest = search.improved(merges, rng, deadline, self._clock)
        n = len(batch.sets)
        left, right = ([int(v) for v in side[n:]] for side in (forest.left, forest.right))
        placed = laid_out(left, right, batch.members, contexts)
        return [placed[i] for i in depth_first([order for _, order in placed])]  # trees may happen to begin alike


class _Search:
    def __init__(
        self, batch: DistinctSets, machine_: Machine, effort: _Effort, device: Device, progress: Progress
    ) -> None:
        self._batch = batch
        self._machine = machine_
        self._effort = effort
        self._device: Device = device
        self._progress = progress
        self._tokens = machine_.ints(batch.tokens)

    def best_start(self) -> Merges:
        """The start that saves most."""
        load = self._batch.work
        limits = [min(load, self._effort.group_work)]
        if self._batch.entries <= self._effort.start_entries:
            limits += [limit for limit in (load // 2, load // 8) if limit < limits[0]]
        if self._batch.entries <= _TOP_DOWN_ENTRIES:
            limits.append(0)
        best: Merges | None = None
        most = -1
        for i, limit in enumerate(limits):
            self._progress("merging", i, len(limits))
            merges = self._start(split(self._batch.sets, self._batch.tokens, limit))
            saved = self._saved(merges) if len(limits) > 1 else 0
            if saved > most:
                best, most = merges, saved
        assert best is not None
        return best

    def _start(self, groups: Sequence[Group]) -> Merges:
        """Merge each group's rest bottom-up, and what shares a group's blocks under one node."""
        merges = Merges(len(self._batch.sets))
        tops: list[list[int]] = [[] for _ in groups]
        for number in range(len(groups) - 1, -1, -1):  # those below a group come after it
            group = groups[number]
            nodes = [*self._merged(group, merges), *tops[number]]
            if group.parent < 0:
                break
            if nodes:
                tops[group.parent].append(merges.join(nodes))
        return merges

    def _merged(self, group: Group, merges: Merges) -> list[int]:
        """The roots of a group's rest, merged by what is shared beside the group's own blocks."""
        if len(group.rest) < 2:
            return group.rest
        own = set(group.blocks)
        contexts, tokens = renumbered(
            [[block for block in self._batch.sets[x] if block not in own] for x in group.rest], self._batch.tokens
        )
        machine_, n = self._machine, len(contexts)
        sets = sets_of(contexts, machine_)
        index = index_of(sets, machine_.ints(tokens), counted(contexts, len(tokens)), machine_)
        room = room_for(n, 0, 0, machine_)
        bound = self._best_overlaps(contexts, tokens, sets, index, room)
        node = machine_.ints(group.rest)
        left, right = machine_.zeros(n), machine_.zeros(n)
        made = len(merges.left)
        count = machine_.run.agglomerate(
            sets, index, room, bound, node, left, right, merges.first + made, 0,
            machine_.zeros(n, -1), machine_.zeros(n), machine_.zeros(n), machine_.zeros(n, -1),
        )  # fmt: skip
        merges.left += [int(v) for v in left[:count]]
        merges.right += [int(v) for v in right[:count]]
        below = {*merges.left[made:], *merges.right[made:]}
        return [v for v in [*group.rest, *range(merges.first + made, merges.first + made + count)] if v not in below]

    def _best_overlaps(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], sets: Sets, index: Index, room: Room
    ) -> Any:
        """For each context the most tokens that another shares with it, on whichever device; only that, so that ties
        are broken in the same way on both.
        """
        machine_ = self._machine
        if use_cuda(self._device, len(contexts), OVERLAPS_PAY_FROM):
            return machine_.ints(best_overlaps_on_cuda(contexts, tokens))
        best = machine_.ints([sum([tokens[block] for block in context]) for context in contexts])
        machine_.run.best_overlaps(0, len(contexts), 1, best, sets, index, room)
        return best

    def _saved(self, merges: Merges) -> int:
        """Tokens that merges save: what the contexts of each share."""
        sets: list[frozenset[int]] = [frozenset(blocks) for blocks in self._batch.sets]
        saved = 0
        for left, right in zip(merges.left, merges.right, strict=True):
            sets.append(sets[left] & sets[right])
            saved += sum([self._batch.tokens[block] for block in sets[-1]])
        return saved

    def improved(
        self, merges: Merges, rng: random.Random, deadline: float | None, clock: Callable[[], float]
    ) -> Forest:
        """Local search: every node to its best place, pass by pass; then some contexts out and in again, many times."""
        batch, machine_, effort = self._batch, self._machine, self._effort
        n = len(batch.sets)
        forest = forest_of(batch.sets, batch.tokens, merges, machine_)
        if n < 3 or not batch.tokens:
            return forest
        sets = sets_of(batch.sets, machine_)
        index = index_of(sets, self._tokens, batch.counts, machine_)
        places = effort.places if n < _MANY else effort.places // 2
        room = room_for(2 * n, max(map(len, batch.sets)), places, machine_)
        passes = min(max(effort.moved_nodes // (2 * n), 1), _MOST_PASSES)
        for number in range(passes):
            gained = 0
            for nodes in _slices(2 * n, 50_000 if machine_.compiled else 500):
                if deadline is not None and clock() > deadline:
                    return forest
                self._progress("moving", 2 * n * number + nodes.start, 2 * n * passes)
                gained += machine_.run.regraft(machine_.ints(nodes), n, forest, index, room, effort.walk)
            if gained * _WORTH_A_PASS < sum(forest.weight[n:]):
                break
        rounds = min(effort.replanted_entries // max(batch.entries, 1), effort.rounds)
        return self._replanted(forest, index, room, rounds, rng, deadline, clock)

    def _replanted(
        self, forest: Forest, index: Index, room: Room, rounds: int, rng: random.Random, deadline: float | None,
        clock: Callable[[], float],
    ) -> Forest:  # fmt: skip
        batch, machine_, run = self._batch, self._machine, self._machine.run
        n = len(batch.sets)
        number = gained = 0
        while number < min(rounds, gained + _PATIENCE) if deadline is None else clock() < deadline:
            self._progress("replanting", number, max(rounds, number + 1))
            changed = _copy(forest)
            chosen = machine_.ints(_neighbours(index, rng, len(batch.tokens)))
            balance = -run.uproot(chosen, changed, room, index.tokens)
            for _ in range(2):
                balance += run.regraft(chosen, n, changed, index, room, self._effort.walk)
            if number % 50 == 49:
                balance += run.regraft(machine_.ints(range(n, 2 * n)), n, changed, index, room, self._effort.walk)
            number += 1
            if balance >= 0 and len(changed.sets.items) - changed.used[0] > 4 * len(room.buffer):
                forest = changed
                gained = number if balance > 0 else gained
        return forest


def _neighbours(index: Index, rng: random.Random, blocks: int) -> list[int]:
    """Some contexts that hold the same block, or a few, in random order."""
    chosen: dict[int, None] = {}
    for _ in range(_REPLANTED):
        block = rng.randrange(blocks)
        size = int(index.size[block])
        first = rng.randrange(size)
        for i in range(min(size, _REPLANTED - len(chosen))):
            chosen[int(index.entries[index.start[block] + (first + i) % size])] = None
        if len(chosen) == _REPLANTED:
            break
    shuffled = list(chosen)
    rng.shuffle(shuffled)
    return shuffled


def _copy(forest: Forest) -> Forest:
    parts = {name: part.copy() for name, part in forest._asdict().items() if name != "sets"}
    return Forest(**parts, sets=Sets(*[part.copy() for part in forest.sets]))


def _slices(count: int, size: int) -> Iterator[range]:
    for begin in range(0, count, size):
        yield range(begin, min(begin + size, count))
