"""Which candidates are fed, in view of the engine's cache."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from warmprefix.choice import Candidates
from warmprefix.ordering.policies import PrefixView
from warmprefix.prefix.eviction import TreeNode

__all__ = ["FIRST_REQUESTS", "Exposure", "PathSearch", "choose_candidates"]

_EDGES = 128
"""Most edges that a search walks."""
_PRICE = 0.5
"""What a loss of score by the whole spread costs, in mean blocks of the first `k`."""
_EXTRA_WORTH = 0.001
"""What a candidate is worth that costs nothing, in tokens: less than any saving."""
_BEHIND = 0.5


def choose_candidates(
    candidates: Candidates, view: PrefixView, may_enter: Collection[int], may_leave: Collection[int]
) -> list[int]:
    """Return the indices of the candidates to feed, ascending: the first `k` unless others save more than they cost.

    A candidate beyond `k` is fed only where it stands on a path that is resident or in flight and whose other blocks
    are fed, too. Depth-first search; it walks a bounded number of edges.

    Args:
        candidates: The candidates.
        view: The content of the cache.
        may_enter: The indices of the candidates beyond the first places that may be fed.
        may_leave: The first places that may stay empty.
    """
    extra = candidates.choice.extra
    can_change = (may_enter and (may_leave or extra)) or not candidates.are_single
    if not (candidates.are_open and can_change):
        return candidates.first
    search = PathSearch(candidates, may_enter, may_leave, extra)
    search.walk_tree(view)
    for order in view.in_flight:
        search.extend(0, order)
    return search.fed()


class PathSearch:
    """The best path so far. The candidates on a path are the bits of an int; 0 is the empty path.

    Args:
        candidates: The candidates.
        may_enter: See `choose_candidates`.
        may_leave: See `choose_candidates`.
        extra: Most candidates in addition to the first places.
        behind: Share of the tokens of the first places that stand in front of candidates in addition to them, unless
            one of these places follows on the path: what is computed behind them can only be shared with them.
        least_saved: The least that an exchange saves, in mean blocks of the first places.
    """

    def __init__(
        self,
        candidates: Candidates,
        may_enter: Collection[int],
        may_leave: Iterable[int],
        extra: int,
        behind: float = _BEHIND,
        least_saved: float = 0.0,
    ) -> None:
        blocks, places, losses, k = candidates.blocks, candidates.places, candidates.losses, candidates.k
        self._tokens = tokens = [block.tokens for block in blocks]
        self._twins: Sequence[int] = ()
        held: Sequence[int]
        if candidates.are_single:  # the usual case
            held, entering = range(k), [(i, i) for i in may_enter]
            masks = [1 << i for i in held]
            total = sum(tokens[:k])
        else:
            held = [i for place in places[:k] for i in place]
            masks = [sum([1 << i for i in place]) for place in places]
            self._twins = [mask for mask in masks if mask.bit_count() > 1]
            entering = [(p, i) for p in candidates.entering for i in places[p] if i in may_enter]
            total = sum([tokens[place[0]] for place in places[:k]])
        self._enough = behind * total
        mean = total / max(k, 1)
        price, least = _PRICE * mean, least_saved * mean
        gains = [(gain, masks[p]) for p in may_leave if (gain := tokens[places[p][0]] + price * losses[p] - least) > 0]
        gains.sort(reverse=True)
        self._gains = gains
        """What it is worth to leave out each place that may stay empty, the best first."""
        self._least = max(min([tokens[i] for i in may_enter], default=0), 1)
        self._gained = [*accumulate([gain for gain, _ in gains], initial=0.0)]
        """An upper bound of what so many candidates gain that enter, each of which has the `_least` tokens or more."""
        self._costs = {1 << i: price * losses[p] for p, i in entering}
        self._enter = sum(self._costs)
        self._held = sum(masks[:k])
        self._free = sum([mask for _, mask in gains]) | self._enter
        """The candidates of which a path holds no more than there are `_places`: others are fed anyway."""
        self._places = len(gains) + extra
        self._index = {blocks[i].fingerprint: i for i in [*held, *may_enter]}
        self._saved = {0: 0}
        """The tokens of the first places on each path that was compared."""
        self._first = self._held if not self._twins else sum([1 << place[0] for place in places[:k]])
        self.value, self._best = 0.0, 0
        """The tokens that the best path saves, about, and the path."""

    def walk_tree(self, view: PrefixView) -> None:
        """Compare the resident paths behind the blocks already placed."""
        if (start := view.tree.locate(view.after)) is None:
            return
        index, edges_left, gained = self._index, _EDGES, self._gained
        stack: list[tuple[float, TreeNode[bytes], int, int]] = [(math.inf, *start, 0)]
        while stack and edges_left:
            most, node, offset, path = stack.pop()
            if most <= self.value:
                continue
            edges_left -= 1
            keys = node.keys[offset:] if offset else node.keys
            path, placed = self.extend(path, keys)
            if placed < len(keys) or not (shared := node.children.keys() & index.keys()):
                continue
            children, saved = node.children, self._saved[path]
            for key in sorted(shared, key=index.__getitem__, reverse=True):
                child = children[key]
                most = saved + (reach := child.reach) + gained[min(reach // self._least, len(gained) - 1)]
                if most > self.value and child.resident and not path >> index[key] & 1:
                    stack.append((most, child, 0, path))

    def extend(self, path: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return a path with the first `keys` that it may hold, and their number; compare all of its parts."""
        placed, saved, index = 0, self._saved[path], self._index
        for key in keys:
            i = index.get(key)
            if i is None:
                break
            bit = 1 << i
            longer = path | bit
            if bit & self._free and (longer & self._free).bit_count() > self._places:
                break
            if self._twins and [twins for twins in self._twins if (longer & twins).bit_count() > 1]:
                break
            if bit & self._held:
                saved += self._tokens[i]
            path, placed = longer, placed + 1
            self._saved[path] = saved
            value = self._worth(path) if path & self._enter else saved
            if value > self.value:
                self.value, self._best = value, path
        return path, placed

    def _worth(self, path: int) -> float:
        """Return the tokens that a path saves, about."""
        value: float = self._saved[path]
        entering = path & self._enter
        for gain, mask in self._gains:
            if not entering:
                return value
            if not path & mask:
                value += gain - self._costs[entering & -entering]
                entering &= entering - 1
        is_behind = self._saved[path] >= self._enough
        return value + _EXTRA_WORTH * entering.bit_count() * is_behind

    def fed(self) -> list[int]:
        """Return the indices of the candidates to feed, ascending."""
        path = self._best
        fed, entering = self._first | path & self._enter, (path & self._enter).bit_count()
        for twins in self._twins:
            if path & twins & self._held:
                fed = fed & ~twins | path & twins
        for mask in [mask for _, mask in self._gains if not path & mask][:entering]:
            fed &= ~mask
        return [i for i in range(len(self._tokens)) if fed >> i & 1]


_DECAY = 0.999
_MOST_PASSAGES = 8_192
FIRST_REQUESTS = 50
"""Requests that count as served before the first one, so that a few choices are no large share."""
_LARGEST = 2.0**64
_NEVER = 0.0, 0.0
_PASSAGES_PER_REQUEST = 128
"""Passages that are sorted per request to find the most-fed ones."""


class Exposure:
    """How often each passage of a scope was fed, and how often it entered by choice; older requests count less.

    Bounded: beyond 8,192 passages, the one that was not fed for the longest time is forgotten.
    """

    def __init__(self) -> None:
        self._weight = 1.0
        """The weight of the next request, which grows instead of that of all others falling."""
        self._requests = 0.0
        self._passages: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """How often each passage was fed, and entered by choice."""
        self._added, self._top_share = 0, 0.0

    def add(self, fed: Iterable[bytes], entered: Collection[bytes] | None) -> None:
        """Count a request that fed these passages, of which some have entered by choice. O(passages).

        If that is unknown (None), they count as fed, but the request does not: the others would enter more often.
        """
        weight, own = self._weight, entered or ()
        for key in fed:
            times, choices = self._passages.pop(key, (0.0, 0.0))
            self._passages[key] = times + weight, choices + weight * (key in own)
        while len(self._passages) > _MOST_PASSAGES:
            self._passages.popitem(last=False)
        self._added += 1
        if entered is None:
            return
        self._requests += weight
        self._weight = weight / _DECAY
        if self._weight > _LARGEST:
            self._weight /= _LARGEST
            self._requests /= _LARGEST
            for key, (times, choices) in self._passages.items():
                self._passages[key] = times / _LARGEST, choices / _LARGEST

    def allowed(self, candidates: Candidates) -> tuple[list[int], list[int]]:
        """Return `may_enter` and `may_leave` of `choose_candidates`."""
        blocks, places, seen = candidates.blocks, candidates.places, self._passages
        limit = candidates.choice.most * (self._requests + FIRST_REQUESTS * self._weight)
        may_enter: Sequence[int] = candidates.entering
        if not candidates.are_single:
            may_enter = [i for p in may_enter for i in places[p]]
        may_enter = [i for i in may_enter if seen.get(blocks[i].fingerprint, _NEVER)[1] < limit]
        # A passage that was never fed is likelier the answer to a new question, and so each passage is fed once.
        may_leave = [p for p in candidates.leaving if [i for i in places[p] if blocks[i].fingerprint in seen]]
        return may_enter, may_leave

    @property
    def passages(self) -> int:
        """Number of different passages that were fed lately."""
        return len(self._passages)

    @property
    def requests(self) -> float:
        """Number of requests; older ones count less."""
        return self._requests / self._weight

    def top_share(self) -> float:
        """Return the share of all that was fed that the most-fed 1 % of the passages have, at least one.

        Amortised O(1) per request: it may be 64 requests old.
        """
        if self._added * _PASSAGES_PER_REQUEST >= len(self._passages) > 0:
            times = sorted([times for times, _ in self._passages.values()], reverse=True)
            self._added, self._top_share = 0, sum(times[: max(1, round(len(times) / 100))]) / sum(times)
        return self._top_share
