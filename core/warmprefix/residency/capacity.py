"""The capacity of an engine's prefix cache for context: given, or learned from what the engine reports.

It is learned from reuse distances: tokens that were used since a path was last used. A cache that evicts the least
recently used path holds a block exactly if its reuse distance is within the capacity.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeAlias, TypeVar

from warmprefix.errors import check_count
from warmprefix.fair_lru import FairLru
from warmprefix.plan import Scope
from warmprefix.prefix.tree import PrefixMatch, PrefixTree, TreeNode

__all__ = [
    "DEFAULT_CAPACITY",
    "Capacities",
    "Capacity",
    "CapacitySource",
    "DistanceEvidence",
    "FixedCapacity",
    "LearnedCapacity",
    "ReuseClock",
    "ReuseTree",
    "StampedTree",
]

K = TypeVar("K", bound=Hashable)

CapacitySource: TypeAlias = Literal["argument", "default", "metrics", "reports"]
"""Where a capacity comes from."""

DEFAULT_CAPACITY = 500_000
"""Capacity in tokens, until reports or metrics of the engine arrive."""

_LEAST_CAPACITY = 4_096
_MAX_LEARNED = 64
"""Most pairs of tenant and model whose capacity is learned."""
_BUCKETS = 640
_PER_OCTAVE = 16
"""Buckets per doubling of the distance."""
_HALF_LIFE = 1_024
"""Reports after which evidence counts half."""
_DECIDE_EVERY = 8
_LEAST_GAIN = 0.001
"""A move must explain at least this share of the reported context."""
_CONTEXTS_TO_SHRINK = 2.0
"""A smaller capacity must explain at least this number of mean contexts."""
_CONTEXTS_TO_GROW = 0.5
"""For a larger one, fewer are enough: a context can be missed for many reasons, and found only if it was held."""
_CORRECTION = 0.25
_SLACK_OF_CORRECTION = 0.125
"""Capacities that differ by less than the share `_CORRECTION` need only this part of the evidence."""


class FixedCapacity:
    """A capacity from the caller. Each scope has a mirror of this size."""

    source: CapacitySource = "argument"

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens

    def new_tree(self, max_nodes: int) -> PrefixTree[bytes]:
        return PrefixTree(self.tokens, max_nodes)

    def fit(self, tree: PrefixTree[bytes]) -> None: ...
    def start(self, tokens: int) -> None: ...
    def record(self, scope: Hashable, keys: Sequence[bytes], tokens: Sequence[int]) -> None: ...

    def distances(self, scope: Hashable, keys: Sequence[bytes]) -> Sequence[int]:
        return ()

    def compare(self, distances: Sequence[int], tokens: Sequence[int], held: int) -> None: ...
    def forget_reports(self) -> None: ...


class LearnedCapacity:
    """A capacity learned from reports.

    Every report shows for each served block whether the engine still held it. A block with a reuse distance within the
    capacity is held, and any other is not. The capacity is the value that contradicts the fewest tokens of the latest
    reports, whatever else shares the cache: answers, questions, other applications.

    From the first such value on, scopes share the capacity as they share the engine: what one of them serves
    evicts from the mirrors of the others.
    """

    def __init__(self) -> None:
        self.tokens = DEFAULT_CAPACITY
        self.source: CapacitySource = "default"
        self._in_metrics: int | None = None
        self._reuse = ReuseTree()
        self._evidence = DistanceEvidence()

    def new_tree(self, max_nodes: int) -> PrefixTree[bytes]:
        """Return an empty mirror of this capacity, for one scope."""
        return StampedTree(self._reuse.clock, self.tokens, max_nodes)

    def fit(self, tree: PrefixTree[bytes]) -> None:
        """Evict from a mirror what the capacity leaves no room for."""
        if tree.capacity_tokens != self.tokens:
            tree.capacity_tokens = self.tokens
            tree.evict(tree.resident_tokens - self.tokens)
        if self.source != "default" and self._reuse.branches > 1 and isinstance(tree, StampedTree):
            tree.evict_unused(self._reuse.clock.first_within(self.tokens))

    def start(self, tokens: int) -> None:
        """Use the capacity in an engine's metrics until reports give a better one; of several, the smallest."""
        if self._in_metrics is None or tokens < self._in_metrics:
            self._in_metrics = max(tokens, _LEAST_CAPACITY)
            if self.source != "reports":
                self.tokens, self.source = self._in_metrics, "metrics"

    def record(self, scope: Hashable, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Count a served order."""
        self._reuse.insert([scope, *keys], [0, *tokens])

    def distances(self, scope: Hashable, keys: Sequence[bytes]) -> Sequence[int]:
        """Return the reuse distances of the first blocks of an order: of those that were recorded in this order."""
        return self._reuse.distances([scope, *keys])[1:]

    def compare(self, distances: Sequence[int], tokens: Sequence[int], held: int) -> None:
        """Learn that the engine held the first `held` blocks of an order with these distances when it was planned."""
        self._evidence.add(distances, tokens, held)
        if self._evidence.reports % _DECIDE_EVERY == 0:
            better = self._evidence.better_capacity(self.tokens)
            if better is not None:
                self.tokens, self.source = max(better, _LEAST_CAPACITY), "reports"

    def forget_reports(self) -> None:
        """Return to the capacity in the engine's metrics, or else to the default."""
        self._evidence = DistanceEvidence()
        if self._in_metrics is None:
            self.tokens, self.source = DEFAULT_CAPACITY, "default"
        else:
            self.tokens, self.source = self._in_metrics, "metrics"


class DistanceEvidence:
    """Tokens found and missed by reuse distance, where older reports count less."""

    def __init__(self) -> None:
        self._found = [0.0] * _BUCKETS
        self._missed = [0.0] * _BUCKETS
        self._weight = 1.0
        self._served = 0.0
        self._count = 0.0
        self.reports = 0

    def add(self, distances: Sequence[int], tokens: Sequence[int], held: int) -> None:
        """Add a report: of the blocks with these lengths, the first `held` were held.

        `distances` are those of the blocks that were served before.
        """
        self._weight *= 2 ** (1 / _HALF_LIFE)
        for place, distance in enumerate(distances):
            (self._found if place < held else self._missed)[_bucket(distance)] += self._weight * tokens[place]
        self._served += self._weight * sum(tokens)
        self._count += self._weight
        self.reports += 1
        if self._weight > 2.0**64:
            for values in (self._found, self._missed):
                values[:] = [value / self._weight for value in values]
            self._served /= self._weight
            self._count /= self._weight
            self._weight = 1.0

    def better_capacity(self, current: int) -> int | None:
        """Return a capacity that explains the reports clearly better than `current`; None without one. O(buckets)."""
        # Entry i: the tokens that contradict a capacity of all distances below bucket i.
        wrong = list(accumulate((miss - hit for hit, miss in zip(self._found, self._missed, strict=True)), initial=0.0))
        least = min(wrong)
        first, last = wrong.index(least), _BUCKETS - wrong[::-1].index(least)
        if last == _BUCKETS:  # nothing was missed beyond
            last = first + _PER_OCTAVE
        better = (_lower_end(first) + _lower_end(last)) // 2
        contexts = _CONTEXTS_TO_SHRINK if better < current else _CONTEXTS_TO_GROW
        slack = max(_LEAST_GAIN, contexts * self._weight / self._count) * self._served if self._count else 0.0
        if abs(better - current) < _CORRECTION * current:
            slack *= _SLACK_OF_CORRECTION
        return better if wrong[_bucket(current)] > least + slack else None


def _bucket(distance: int) -> int:
    """Return the bucket of a distance; `_PER_OCTAVE` buckets have equal widths between two powers of two."""
    shift = max(distance.bit_length() - 5, 0)
    return min(shift * _PER_OCTAVE + (distance >> shift), _BUCKETS - 1)


def _lower_end(bucket: int) -> int:
    """Return the shortest distance of a bucket."""
    shift = max(bucket // _PER_OCTAVE - 1, 0)
    return (bucket - shift * _PER_OCTAVE) << shift


Capacity: TypeAlias = "FixedCapacity | LearnedCapacity"
"""The capacity that the scopes of one engine share."""


class Capacities:
    """The capacity of the engine of each tenant and model: given for all of them, or learned for each.

    Tenants share an engine, but no tenant's plans may depend on the requests of another. So each learns the part of the
    cache that the others leave to it.
    """

    def __init__(self, tokens: int | Literal["auto"] | None) -> None:
        self._given = None if tokens == "auto" else FixedCapacity(tokens)
        self._learned: FairLru[tuple[str | None, str | None], LearnedCapacity] = FairLru()

    def of_scope(self, scope: Scope) -> Capacity:
        """Return the capacity that the scopes of one tenant and model share."""
        if self._given is not None:
            return self._given
        owner = scope.tenant, scope.model
        capacity = self._learned.use(owner)
        if capacity is None:
            capacity = LearnedCapacity()
            self._learned.put(owner, capacity, scope.tenant)
            if len(self._learned) > _MAX_LEARNED:
                self._learned.evict()
        return capacity

    def forget_reports(self) -> None:
        """Return to the capacity in the engine's metrics, or else to the default."""
        for capacity in self._learned.values():
            capacity.forget_reports()

    def stats(self) -> dict[str, Any]:
        """Return the fields of `PlannerStats` that concern the capacity: the smallest one in use."""
        if self._given is not None:
            return {"capacity_tokens": self._given.tokens, "capacity_source": self._given.source}
        if not len(self._learned):
            return {"capacity_tokens": DEFAULT_CAPACITY, "capacity_source": "default"}
        capacity = min(self._learned.values(), key=lambda capacity: capacity.tokens)
        return {"capacity_tokens": capacity.tokens, "capacity_source": capacity.source}

    def clear(self) -> None:
        """Forget what was learned."""
        self._learned.clear()


class ReuseClock:
    """A count of requests, and of the tokens that each of the last `window` requests was the last to use.

    The counts are a Fenwick tree over a ring of requests, so every method takes O(log window).
    """

    def __init__(self, window: int) -> None:
        check_count("window", window)
        self.window = window
        self.now = 0
        """Number of the latest request; the first one is 1."""
        self._sums = [0] * (window + 1)
        self._total = 0
        self._top = 1 << (window.bit_length() - 1)

    def add(self, request: int, tokens: int) -> None:
        """Count `tokens` more, or fewer, as last used by a request of the window."""
        self._total += tokens
        place = request % self.window + 1
        while place <= self.window:
            self._sums[place] += tokens
            place += place & -place

    def used_after(self, request: int) -> int:
        """Return the tokens that were last used after a request of the window."""
        before, latest = self._used_to(request), self._used_to(self.now)
        return latest - before if request % self.window <= self.now % self.window else self._total - before + latest

    def first_within(self, tokens: int) -> int:
        """Return the oldest request since which at most `tokens` tokens are in use."""
        latest = self._used_to(self.now)
        # The ring starts after the latest request. Requests to skip hold `excess` tokens or more.
        excess = self._total - tokens
        if excess <= 0:
            return self.now - self.window + 1
        behind = self._total - latest  # in the places after the latest request's, which are older
        target, turns = (excess + latest, 0) if excess <= behind else (excess - behind, 1)
        place, step = 0, self._top
        while step:
            if place + step <= self.window and self._sums[place + step] < target:
                place += step
                target -= self._sums[place]
            step >>= 1
        # `place` is the first place, from 0, at which the skipped requests hold enough tokens.
        start = self.now - self.now % self.window
        return start + place + 1 - (0 if turns else self.window)

    def _used_to(self, request: int) -> int:
        place, tokens = request % self.window + 1, 0
        while place:
            tokens += self._sums[place]
            place &= place - 1
        return tokens


class StampedTree(PrefixTree[K]):
    """A prefix tree whose nodes record the last request that used them, by a clock shared with other trees."""

    def __init__(self, clock: ReuseClock, capacity_tokens: int | None = None, max_nodes: int = 65_536) -> None:
        self.clock = clock
        super().__init__(capacity_tokens, max_nodes)

    def evict_unused(self, since: int) -> None:
        """Remove the blocks that no request from `since` on has used. O(1), amortised over the removed blocks."""
        while self._nodes and self._root.younger.used < since:
            self._pop_last_block(self._root.younger)

    def _touch(self, node: TreeNode[K]) -> None:
        super()._touch(node)
        while node.parent is not None:
            node.used = self.clock.now
            node = node.parent

    def _split(self, node: TreeNode[K], at: int) -> TreeNode[K]:
        upper = super()._split(node, at)
        upper.used = node.used
        return upper


class ReuseTree(StampedTree[Hashable]):
    """The paths of the last requests, held or not, with their reuse distances; it drives its clock."""

    def __init__(self, max_nodes: int = 8_192, window: int = 8_192) -> None:
        """Start empty.

        Args:
            max_nodes: Most nodes; the least recently used go.
            window: Number of requests that are remembered.
        """
        super().__init__(ReuseClock(window), None, max_nodes)

    def insert(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> PrefixMatch:
        """Count a request, and use this path."""
        oldest = self.clock.now + 2 - self.clock.window
        self.evict_unused(oldest)
        self.clock.now += 1
        return super().insert(keys, tokens)

    @property
    def branches(self) -> int:
        """Number of different first keys."""
        return len(self._root.children)

    def distances(self, keys: Sequence[Hashable]) -> list[int]:
        """Return the reuse distance in tokens of each block of the longest prefix that the tree has, itself included.

        The distances never fall along the path. O(blocks + nodes * log window).
        """
        found: list[int] = []
        used = -1
        distance = 0
        for node, shared in list(self._walk(keys)):
            if node.used != used:
                used = node.used
                distance = self.clock.used_after(used)
            for tokens in node.tokens[:shared]:
                distance += tokens
                found.append(distance)
        return found

    def _touch(self, node: TreeNode[Hashable]) -> None:
        touched = node
        total = 0
        while touched.parent is not None:
            tokens = sum(touched.tokens)
            if touched.used:
                self.clock.add(touched.used, -tokens)
            total += tokens
            touched = touched.parent
        self.clock.add(self.clock.now, total)
        super()._touch(node)

    def _pop_last_block(self, leaf: TreeNode[Hashable]) -> None:
        self.clock.add(leaf.used, -sum(leaf.tokens))
        while leaf.keys:  # all at once: there is no capacity to fill up to the last block
            super()._pop_last_block(leaf)
