"""The capacity of an engine's prefix cache for context: given, or learned from what the engine reports.

It is learned from reuse distances: tokens that were used since a path was last used. A cache that evicts the least
recently used path holds a block exactly if its reuse distance is within the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate, islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from warmprefix.errors import check_count
from warmprefix.fair_lru import FairLru
from warmprefix.plan import Scope
from warmprefix.prefix.eviction import TreeNode
from warmprefix.prefix.tree import PrefixMatch, PrefixTree

__all__ = [
    "DEFAULT_CAPACITY",
    "Capacities",
    "Capacity",
    "CapacitySource",
    "DistanceEvidence",
    "FixedCapacity",
    "ReuseClock",
    "ReuseTree",
    "StampedTree",
    "Visit",
    "contradictions_by_chance",
]

K = TypeVar("K", bound=Hashable)

CapacitySource: TypeAlias = Literal[
    "argument", "argument against reports", "default", "metrics", "reports", "reports against argument"
]
"""Where a capacity comes from; `against` names a source that contradicts it and lost."""

DEFAULT_CAPACITY = 500_000
"""Capacity in tokens, until reports or metrics of the engine arrive."""

_LEAST_CAPACITY = 4_096
_MAX_LEARNED = 64
"""Most pairs of tenant and model whose capacity is learned."""
_BUCKETS = 640
_PER_OCTAVE = 16
"""Buckets per doubling of the distance."""
_DECIDE_EVERY = 8
_DECAY = 2 ** (-_DECIDE_EVERY / 1_024)
"""Weight of older evidence at each decision: after 1,024 reports it counts half."""
_DECISIONS_AGAINST = 13
"""Decisions in a row, some 100 reports, that refute a given capacity."""
_LEAST_ERROR = math.log2(1.25)
"""Error of a given capacity, in doublings, that matters: questions and answers take room, and tokens are estimated."""
_NOISE = 0.1
"""Share of the reported tokens that may contradict what is true."""
_LEAST_SHARED = 0.25
"""Share of an earlier prompt that a later one must begin with to take its place, in an engine that keeps prompts."""
_PATIENCE = 32
"""Answers in a row without any of the predicted cached tokens after which a scope keeps relevance order: fewer may be
evictions."""
_PROBE_INTERVAL = 16
"""While ordering is off, one request in this many is ordered, to see whether the engine caches by now."""


class FixedCapacity(int):
    """A capacity in tokens that no report replaces.

    >>> from warmprefix import ContextPlanner
    >>> planner = ContextPlanner(capacity_tokens=FixedCapacity(100_000))
    """

    __slots__ = ()


class Capacity:
    """What the scopes of one tenant and model share: the size of the engine's cache for them, and whether it caches.

    Every report shows for each served block whether the engine still held it. A block with a reuse distance within the
    capacity is held, and any other is not. The capacity is the value that contradicts the fewest tokens of the latest
    reports, whatever else shares the cache: answers, questions, other applications. It is only believed if the
    distances explain the reports: where misses come at all distances, as behind several replicas, the stated number
    stays. That of the caller also stays until it was contradicted for some 100 reports, and for good if it is fixed.

    Unless it is the default, scopes share the capacity as they share the engine: what one of them serves
    evicts from the mirrors of the others.
    """

    def __init__(self, given: int | Literal["auto"] | None) -> None:
        self.tokens = DEFAULT_CAPACITY if given == "auto" else given
        self.source: CapacitySource = "default" if given == "auto" else "argument"
        self.is_off = False
        """True while requests keep relevance order, because the engine evidently caches nothing."""
        self._stated: tuple[int | None, CapacitySource] = self.tokens, self.source
        self._is_fixed = isinstance(given, FixedCapacity)
        self._against = 0
        """Decisions in a row that contradict a given capacity."""
        self._reuse = ReuseTree()
        self._evidence = DistanceEvidence()
        self._misses = self._requests = 0

    @property
    def stated(self) -> int | None:
        """The capacity that the caller or the engine states, whatever reports show."""
        return self._stated[0]

    @property
    def model(self) -> str:
        """What explains the reports, if it is not where the cache can match."""
        if self.is_off:
            return "off"
        if self.source.startswith("reports"):
            return "small cache"
        if self.tokens is not None and self._evidence.judge(self.tokens, None)[1]:
            return "replicas"
        return "prefix tree"

    def new_tree(self, max_nodes: int) -> PrefixTree[bytes]:
        """Return an empty mirror of this capacity, for one scope."""
        return StampedTree(self._reuse.clock, self.tokens, max_nodes)

    def fit(self, tree: PrefixTree[bytes]) -> None:
        """Evict from a mirror what the capacity leaves no room for."""
        if self.tokens is None:
            return
        if tree.capacity_tokens != self.tokens:
            tree.capacity_tokens = self.tokens
            tree.evict(tree.resident_tokens - self.tokens)
        if self.source != "default" and self._reuse.branches > 1 and isinstance(tree, StampedTree):
            tree.evict_unused(self._reuse.clock.first_within(self.tokens))

    def share_of(self, tree: PrefixTree[bytes]) -> int | None:
        """Return what the other scopes leave of the capacity to one scope's mirror."""
        if self.tokens is None or self.source == "default" or self._reuse.branches <= 1:
            return self.tokens
        return self.tokens - max(min(self._reuse.clock.in_use, self.tokens) - tree.resident_tokens, 0)

    def start(self, tokens: int) -> None:
        """Use the capacity in an engine's metrics until reports give a better one; of several, the smallest."""
        stated, source = self._stated
        if source == "default" or (source == "metrics" and tokens < (stated or 0)):
            self._stated = max(tokens, _LEAST_CAPACITY), "metrics"
            if self.source in ("default", "metrics"):
                self.tokens, self.source = self._stated

    def record(self, scope: Hashable, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        """Count a served order."""
        self._reuse.insert([scope, *keys], [0, *tokens])

    def visit(self, scope: Hashable, keys: Sequence[bytes]) -> Visit:
        """Return what an order has in common with recorded ones."""
        return self._reuse.visit([scope, *keys])

    def compare(self, distances: Sequence[int], tokens: Sequence[int], held: int) -> int | None:
        """Learn that the engine held the first `held` blocks of an order with these distances when it was planned.

        Returns a better capacity, once, if the reports refute a given one.
        """
        if not self._evidence.add(distances, tokens, held) or self.tokens is None:
            return None
        stated, source = self._stated
        better, is_random = self._evidence.judge(self.tokens, None if source == "default" else stated)
        if better is None:
            if is_random or self._is_fixed:
                self.tokens, self.source = self._stated
            self._against = 0
            return None
        was_given = self.source == "argument"
        if was_given:
            assert stated is not None
            self._against = self._against + 1 if abs(math.log2(better / stated)) > _LEAST_ERROR else 0
            if self._against < _DECISIONS_AGAINST:
                return None
        if self._is_fixed:
            self.source = "argument against reports"
        else:
            self.tokens, self.source = better, "reports against argument" if source == "argument" else "reports"
        return better if was_given else None

    def forget_reports(self) -> None:
        """Return to the stated capacity, or else to the default."""
        self._evidence = DistanceEvidence()
        self._against = 0
        self.tokens, self.source = self._stated

    def keeps_order(self) -> bool:
        """Return True if the request being planned keeps its order while ordering is off, and count it."""
        self._requests += 1
        return self._requests % _PROBE_INTERVAL != 0

    def learn_caching(self, expected: bool, cached_tokens: int) -> bool:
        """Add an answer, `expected` to reuse part of its context; return True if it turned ordering on or off.

        Evidence against caching is a run of answers without any cached token. Any cached token is evidence for it.
        """
        self._misses = 0 if cached_tokens else self._misses + expected
        was_off, self.is_off = self.is_off, self._misses >= _PATIENCE
        return self.is_off != was_off


class DistanceEvidence:
    """Tokens found and missed by reuse distance, where older reports count less."""

    def __init__(self) -> None:
        self._found = [0.0] * _BUCKETS
        self._missed = [0.0] * _BUCKETS
        self._served = self._count = 0.0
        self._reports = 0

    def add(self, distances: Sequence[int], tokens: Sequence[int], held: int) -> bool:
        """Add a report: of the blocks with these lengths, the first `held` were held.

        `distances` are those of the blocks that were served before. Returns True if it is time to decide.
        """
        for place, distance in enumerate(distances):
            (self._found if place < held else self._missed)[_bucket(distance)] += tokens[place]
        self._served += sum(tokens)
        self._count += 1
        self._reports += 1
        if self._reports % _DECIDE_EVERY:
            return False
        for values in (self._found, self._missed):
            values[:] = [_DECAY * value for value in values]
        self._served *= _DECAY
        self._count *= _DECAY
        return True

    def judge(self, current: int, stated: int | None) -> tuple[int | None, bool]:
        """Return a capacity that explains the reports better than `current`, and whether chance does. O(buckets).

        Better is what is contradicted by one mean context less; the capacity is None if there is no such one, or if
        chance explains the reports as well. The less is left of the capacity that the engine has `stated`, the more
        others would have to use of it, and the more evidence it takes.
        """
        found, missed = sum(self._found), sum(self._missed)
        differences = (miss - hit for hit, miss in zip(self._found, self._missed, strict=True))
        # Entry i: the tokens that contradict a capacity of all distances below bucket `_LEAST_BUCKET` + i.
        wrong = [*islice(accumulate(differences, initial=found), _LEAST_BUCKET, None)]
        least, now = min(wrong), wrong[max(_bucket(current) - _LEAST_BUCKET, 0)]
        first, last = wrong.index(least), len(wrong) - wrong[::-1].index(least)
        if last == len(wrong):  # nothing was missed beyond
            last = first + _PER_OCTAVE
        better = (_lower_end(_LEAST_BUCKET + first) + _lower_end(_LEAST_BUCKET + last)) // 2
        chance = contradictions_by_chance(found, missed)
        slack = context = self._served / max(self._count, 1)
        if stated is not None:  # hits beyond it are no accident; others that use a part of it are usual
            slack *= 1 + math.log2(stated / better) if better < stated else 0.25
        is_better = now > least + slack and least + context < chance
        return better if is_better else None, now > chance + context


def contradictions_by_chance(found: float, missed: float) -> float:
    """Return the contradicted tokens at which a rule is as likely as chance, which finds a fixed share of all tokens.

    A token contradicts a true rule with the probability `_NOISE`.
    """
    seen = found + missed
    share = min(max(found / seen, _NOISE), 1 - _NOISE) if seen else 0.5
    surprise = -found * math.log(share) - missed * math.log(1 - share) + seen * math.log(1 - _NOISE)
    return surprise / math.log((1 - _NOISE) / _NOISE)


def _bucket(distance: int) -> int:
    """Return the bucket of a distance; `_PER_OCTAVE` buckets have equal widths between two powers of two."""
    shift = max(distance.bit_length() - 5, 0)
    return min(shift * _PER_OCTAVE + (distance >> shift), _BUCKETS - 1)


def _lower_end(bucket: int) -> int:
    """Return the shortest distance of a bucket."""
    shift = max(bucket // _PER_OCTAVE - 1, 0)
    return (bucket - shift * _PER_OCTAVE) << shift


_LEAST_BUCKET = _bucket(_LEAST_CAPACITY)


class Capacities:
    """The capacity of the engine of each tenant and model.

    Tenants share an engine, but no tenant's plans may depend on the requests of another. So each learns the part of the
    cache that the others leave to it.
    """

    def __init__(self, given: int | Literal["auto"] | None) -> None:
        self._given: int | Literal["auto"] | None = given
        self._learned: FairLru[tuple[str | None, str | None], Capacity] = FairLru()

    def of_scope(self, scope: Scope) -> Capacity:
        """Return the capacity that the scopes of one tenant and model share."""
        owner = scope.tenant, scope.model
        capacity = self._learned.use(owner)
        if capacity is None:
            capacity = Capacity(self._given)
            self._learned.put(owner, capacity, scope.tenant)
            if len(self._learned) > _MAX_LEARNED:
                self._learned.evict()
        return capacity

    def forget_reports(self) -> None:
        """Return to the stated capacity, or else to the default."""
        for capacity in self._learned.values():
            capacity.forget_reports()

    def stats(self, match: str) -> dict[str, Any]:
        """Return the fields of `PlannerStats` that concern the capacity: the smallest one in use.

        `match` names where the engine's cache can match.
        """
        known = [*self._learned.values()] or [Capacity(self._given)]
        capacity = min(known, key=lambda capacity: math.inf if capacity.tokens is None else capacity.tokens)
        return {
            "capacity_tokens": capacity.tokens,
            "capacity_source": capacity.source,
            "engine_model": capacity.model if match == "prefix tree" or capacity.is_off else match,
        }

    def clear(self) -> None:
        """Forget what was learned."""
        self._learned.clear()


class Visit(NamedTuple):
    """What an order of blocks has in common with earlier ones."""

    distances: Sequence[int]
    """Reuse distances in tokens of the first blocks: those that were served before in this order, themselves included.
    They never fall."""
    junction: int
    """Number of the first blocks at whose end earlier orders parted."""
    leaf: int
    """Number of the first blocks that an engine holds that keeps whole prompts, and no longer those that a later
    prompt took the place of."""


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

    @property
    def in_use(self) -> int:
        """Tokens that requests of the window were the last to use."""
        return self._total

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
    """A prefix tree that counts requests by a clock shared with other trees."""

    def __init__(self, clock: ReuseClock, capacity_tokens: int | None = None, max_nodes: int = 65_536) -> None:
        self.clock = clock
        super().__init__(capacity_tokens, max_nodes)

    def evict_unused(self, since: int) -> None:
        """Remove the blocks that were last used before request `since`. O(1), amortised over the removed blocks."""
        while self._nodes:
            leaf = self.order.next_leaf()
            if leaf.used + leaf.age >= since:
                break
            self._pop_last_block(leaf)

    def _count_request(self) -> None:
        self.order.now = self.clock.now


class ReuseTree(StampedTree[Hashable]):
    """The paths of the last requests, held or not, with their reuse distances; it drives its clock."""

    def __init__(self, max_nodes: int = 8_192, window: int = 8_192) -> None:
        """Start empty.

        Args:
            max_nodes: Most nodes; the least recently used go.
            window: Number of requests that are remembered.
        """
        super().__init__(ReuseClock(window), None, max_nodes)

    def insert(self, keys: Sequence[Hashable], tokens: Sequence[int], served_by: str | None = None) -> PrefixMatch:
        """Count a request, and use this path."""
        self.evict_unused(self.clock.now + 2 - self.clock.window)
        self.clock.now += 1
        return super().insert(keys, tokens)

    @property
    def branches(self) -> int:
        """Number of different first keys."""
        return len(self._root.children)

    def visit(self, keys: Sequence[Hashable]) -> Visit:
        """Return what `keys` has in common with earlier ones, without the first key. O(blocks + nodes * log window)."""
        distances: list[int] = []
        junction = leaf = 0
        used, distance, held = -1, 0, 0
        lives = True
        for node, shared in self._walk(keys):
            if node.used != used:
                # A later prompt parted from this one here. It took its place if they share enough.
                lives = lives and (used < 0 or held < _LEAST_SHARED * (held + node.reach))
                used = node.used
                distance = self.clock.used_after(used) if used < self.clock.now else 0
            for tokens in node.tokens[:shared]:
                held += tokens
                distance += tokens
                distances.append(distance)
            if lives:
                leaf = len(distances)
            if node.is_junction and shared == len(node.keys):
                junction = len(distances)
        return Visit(distances[1:], max(junction - 1, 0), max(leaf - 1, 0))

    def _use(self, node: TreeNode[Hashable], age: int = 0) -> None:
        touched = node
        total = 0
        while touched.parent is not None:
            tokens = sum(touched.tokens)
            if touched.used:
                self.clock.add(touched.used, -tokens)
            total += tokens
            touched = touched.parent
        self.clock.add(self.clock.now, total)
        super()._use(node, age)

    def _pop_last_block(self, leaf: TreeNode[Hashable]) -> None:
        self.clock.add(leaf.used, -sum(leaf.tokens))
        while leaf.keys:  # all at once: there is no capacity to fill up to the last block
            super()._pop_last_block(leaf)
