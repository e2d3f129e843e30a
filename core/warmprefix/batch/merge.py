"""The merge planner, which plans for the tokens that a batch really saves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from warmprefix.batch.planners import Device, Placed, Progress, depth_first, laid_out
from warmprefix_kernels.batch_device import OVERLAPS_PAY_FROM, use_cuda
from warmprefix_kernels.distinct_sets import DistinctSets, Group, renumbered, split
from warmprefix_kernels.machine import (
    COMPILING_PAYS_FROM,
    Machine,
    Merges,
    forest_of,
    index_of,
    machine,
    room_for,
    sets_of,
)
from warmprefix_kernels.overlap_loops import Index, Room, Sets
from warmprefix_kernels.tree_loops import Forest

__all__ = ["MergePlanner"]


class _Effort(NamedTuple):
    """Limits in steps, not seconds, so that a batch always gets the same plan."""

    group_work: int
    """Most `DistinctSets.work` that is merged bottom-up in one piece."""
    start_entries: int
    """Most blocks of all contexts for which several starts are compared."""
    moved_nodes: int
    """Nodes that are moved, in whole passes over all of them, at least one."""
    places: int
    """Nominees of each node."""
    walk: int
    """Entries that are walked to find a node's nominees."""
    replanted_entries: int
    """Blocks of all contexts, times rounds of replanting."""
    rounds: int
    """Most rounds of replanting."""


_PLAIN = _Effort(3_000_000, 8_000, 5_000, 16, 2_048, 60_000, 100)
_COMPILED = _Effort(300_000_000, 60_000, 250_000, 16, 4_096, 4_000_000, 1_000)

_MANY = 20_000
"""Contexts from which on each node gets half as many nominees."""
_TOP_DOWN_ENTRIES = 8_000
"""Most blocks of all contexts for which one of the starts is top-down to the end."""
_MOST_PASSES = 8
_WORTH_A_PASS = 3_000
"""Another pass follows if the last one gained more than this fraction, 1 / 3,000, of the saved tokens."""
_PATIENCE = 40
"""Replanting ends after this number of rounds without a gain."""
_REPLANTED = 10
"""Contexts that are taken out and put back in a round of replanting."""


class MergePlanner:
    """Agglomeration by shared tokens, improved by local search.

    Requests that run in depth-first order of a tree of shared prefixes save exactly the sum, over the tree's merges,
    of the tokens that the merged contexts have in common. So the tree is built for that sum: agglomeration by largest
    intersection weight, started from several top-down groupings where the batch is small or dense, then local search.
    Deterministic without a time budget. O(n) memory.
    """

    def __init__(
        self,
        seconds_per_block: float | None = None,
        device: Device = "auto",
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the effort.

        Args:
            seconds_per_block: Time of local search per block of each context, up to part of a pass more; the steps
                before it are not limited. None for a number of steps that depends on the batch alone.
            device: Where overlaps are computed; the plan is the same on all devices.
            seed: Of the random choices of local search.
            clock: Returns the time in seconds.
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
        # By the steps alone: `machine_` also depends on whether compiled code is loaded already.
        effort = _COMPILED if machine_.compiled and steps >= COMPILING_PAYS_FROM else _PLAIN
        search = _Search(batch, machine_, effort, self._device, progress)
        forest = search.improved(search.best_start(), random.Random(self._seed), deadline, self._clock)  # noqa: S311
        n = len(batch.sets)
        left, right = ([int(v) for v in side[n:]] for side in (forest.left, forest.right))
        placed = laid_out(left, right, batch.members, contexts)
        return [placed[i] for i in depth_first([order for _, order in placed])]  # two trees may begin alike


class _Search:
    def __init__(
        self, batch: DistinctSets, machine_: Machine, effort: _Effort, device: Device, progress: Progress
    ) -> None:
        self._batch = batch
        self._machine = machine_
        self._effort = effort
        self._device: Device = device
        self._progress = progress

    def best_start(self) -> Merges:
        """Return the start that saves most."""
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
        """Merge each group's rest bottom-up, then its roots and subgroups."""
        merges = Merges(len(self._batch.sets))
        tops: list[list[int]] = [[] for _ in groups]
        for number in range(len(groups) - 1, -1, -1):  # a group's subgroups come after it
            group = groups[number]
            nodes = [*self._merged(group, merges), *tops[number]]
            if group.parent < 0:
                break
            if nodes:
                tops[group.parent].append(merges.join(nodes))
        return merges

    def _merged(self, group: Group, merges: Merges) -> list[int]:
        """Merge a group's rest by blocks that are not the group's; return the roots."""
        if len(group.rest) < 2:
            return group.rest
        own = set(group.blocks)
        contexts, tokens = renumbered(
            [[block for block in self._batch.sets[x] if block not in own] for x in group.rest], self._batch.tokens
        )
        machine_, n = self._machine, len(contexts)
        sets = sets_of(contexts, machine_)
        index = index_of(sets, machine_.ints(tokens), machine_)
        room = room_for(n, 0, 0, machine_)
        bound = self._best_overlaps(contexts, tokens, sets, index, room)
        node = machine_.ints(group.rest)
        left, right = machine_.zeros(n), machine_.zeros(n)
        made = len(merges.left)
        count = machine_.run.agglomerate(
            sets, index, room, bound, node, left, right, merges.first + made,
            machine_.zeros(n, -1), machine_.zeros(n), machine_.zeros(n), machine_.zeros(n, -1),
        )  # fmt: skip
        merges.left += [int(v) for v in left[:count]]
        merges.right += [int(v) for v in right[:count]]
        below = {*merges.left[made:], *merges.right[made:]}
        return [v for v in [*group.rest, *range(merges.first + made, merges.first + made + count)] if v not in below]

    def _best_overlaps(
        self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], sets: Sets, index: Index, room: Room
    ) -> Any:
        """Return for each context the most tokens that another shares with it.

        Partners are not returned, so that ties are broken in the same way on all devices.
        """
        machine_ = self._machine
        if use_cuda(self._device, len(contexts), OVERLAPS_PAY_FROM):
            from warmprefix_kernels.distances import best_overlaps_on_cuda  # needs numpy

            return machine_.ints(best_overlaps_on_cuda(contexts, tokens))
        best = machine_.ints([sum([tokens[block] for block in context]) for context in contexts])
        machine_.run.best_overlaps(0, len(contexts), 1, best, sets, index, room)
        return best

    def _saved(self, merges: Merges) -> int:
        """Return the tokens that merges save: those that the contexts of each share."""
        sets: list[frozenset[int]] = [frozenset(blocks) for blocks in self._batch.sets]
        saved = 0
        for left, right in zip(merges.left, merges.right, strict=True):
            sets.append(sets[left] & sets[right])
            saved += sum([self._batch.tokens[block] for block in sets[-1]])
        return saved

    def improved(
        self, merges: Merges, rng: random.Random, deadline: float | None, clock: Callable[[], float]
    ) -> Forest:
        """Move every node to its best place, pass by pass; then replant some contexts."""
        batch, machine_, effort = self._batch, self._machine, self._effort
        n = len(batch.sets)
        forest = forest_of(batch.sets, batch.tokens, merges, machine_)
        if n < 3 or not batch.tokens:
            return forest
        sets = sets_of(batch.sets, machine_)
        index = index_of(sets, machine_.ints(batch.tokens), machine_)
        places = effort.places if n < _MANY else effort.places // 2
        room = room_for(2 * n, max(map(len, batch.sets)), places, machine_)
        passes = min(max(effort.moved_nodes // (2 * n), 1), _MOST_PASSES)
        slice_size = 50_000 if machine_.compiled else 500
        for number in range(passes):
            gained = 0
            for begin in range(0, 2 * n, slice_size):
                if deadline is not None and clock() > deadline:
                    return forest
                self._progress("moving", 2 * n * number + begin, 2 * n * passes)
                nodes = machine_.ints(range(begin, min(begin + slice_size, 2 * n)))
                gained += machine_.run.regraft(nodes, n, forest, index, room, effort.walk)
            if gained * _WORTH_A_PASS < sum(forest.weight[n:]):
                break
        rounds = min(effort.replanted_entries // max(batch.entries, 1), effort.rounds)
        return self._replanted(forest, index, room, rounds, rng, deadline, clock)

    def _replanted(
        self, forest: Forest, index: Index, room: Room, rounds: int, rng: random.Random, deadline: float | None,
        clock: Callable[[], float],
    ) -> Forest:  # fmt: skip
        """Take some contexts out and put them back; keep each round that loses nothing."""
        batch, machine_, run = self._batch, self._machine, self._machine.run
        n = len(batch.sets)
        number = gained = 0
        while number < min(rounds, gained + _PATIENCE) if deadline is None else clock() < deadline:
            self._progress("replanting", number, max(rounds, number + 1))
            parts = {name: part.copy() for name, part in forest._asdict().items() if name != "sets"}
            changed = Forest(**parts, sets=Sets(*[part.copy() for part in forest.sets]))
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
    """Return some contexts that hold the same few blocks, in random order."""
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
