"""The default policy: resident blocks, then those that later requests may share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from warmprefix.errors import check_count
from warmprefix.ordering.policies import BlockView, PrefixView, by_rank, is_resident, then_the_rest
from warmprefix.prefix.access import AccessWindow
from warmprefix.prefix.bitsets import BitCounter

__all__ = ["CoAccessPolicy", "Outcome", "RecurrenceByRank", "part_of"]

_ESTIMATES = 4
"""Places of the tail for which odds are computed separately."""
_LEVELS = 3
"""Weights of similar requests, from 1 to this."""


class CoAccessPolicy:
    """Deepest resident path, then blocks that similar requests are likely to share.

    *Head*: the resident path of most tokens among the request's blocks.

    *Tail*: later requests reuse a path as far as they hold its blocks. Blocks that recur independently of each other
    save most in the order of `tokens * p / (1 - p)`, where p is a block's probability to recur. The next block is
    always the one with the highest value; p is estimated from the requests of the window that hold all blocks placed
    so far. A request's weight is the number of its blocks that this request shares, in thirds of the highest such
    number. `trust` similar requests weigh as much as the block's rank, whose predictive value is learned too.

    p is estimated separately for each of the first places, and once for the places after them, which are seldom
    reached. Once no request holds all placed blocks, the rest stays in relevance order. A request without a resident
    path and without blocks in the window stays in relevance order too. O(k) bitset operations and O(k log k) in all,
    for k blocks.
    """

    def __init__(self, window: int = 1_000, trust: float = 11.0) -> None:
        """Start with nothing learned.

        Args:
            window: Number of requests that are remembered.
            trust: Number of similar requests that weigh as much as rank; above 0.

        Raises:
            TypeError: `window` is not an int.
            ValueError: An argument is too small.
        """
        check_count("window", window)
        if not trust > 0:
            raise ValueError(f"trust must be above 0, got {trust}")
        self.trust = trust
        self._window = AccessWindow[bytes](window)
        self._recurrence = RecurrenceByRank()
        self._tails: list[Sequence[tuple[bytes, int]]] = [()] * window
        """For each place of the window, that request's blocks beyond its resident path, with their part of ranks."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        head = prefix.deepest_path(blocks)
        keys = [block.fingerprint for block in blocks]
        requests = self._window.requests(keys)
        counter = BitCounter(requests)
        if not counter.highest or len(head) == len(blocks):
            return then_the_rest(head, len(blocks))
        similar = self._weighted_by_likeness(counter)
        size = self._window.size
        holders = [similar & (held | held << size | held << 2 * size) if held else 0 for held in requests]
        for i in head:
            similar &= holders[i]
        chances = self._recurrence.chances(len(blocks), self._outcomes(counter, keys))
        trust = self.trust * _LEVELS
        placed = set(head)
        tail = [
            (i, holders[i], blocks[i].tokens, trust * chance, trust - trust * chance)
            for i, chance in enumerate(chances)
            if i not in placed
        ]
        return then_the_rest(head + _most_saving_first(tail, similar), len(blocks))

    def observe(self, served: Sequence[BlockView]) -> None:
        ranked = by_rank(served)
        keys = [block.fingerprint for block in ranked]
        self._recurrence.learn(self._outcomes(BitCounter(self._window.requests(keys)), keys))
        self._tails[self._window.next_place] = [
            (key, part_of(rank, len(keys)))
            for rank, (key, block) in enumerate(zip(keys, ranked, strict=True))
            if not is_resident(block)
        ]
        self._window.observe(keys)

    def _weighted_by_likeness(self, counter: BitCounter) -> int:
        """Return the requests of the window, each as many times as its weight.

        The copies stand next to each other in one bitset, a window apart, so that one `bit_count` adds up weights.
        """
        similar = 0
        for level in range(_LEVELS, 0, -1):
            similar = similar << self._window.size | counter.at_least(-(-counter.highest * level // _LEVELS))
        return similar

    def _outcomes(self, counter: BitCounter, keys: Sequence[bytes]) -> list[Outcome]:
        """Compare `keys` with the tail of the most similar request, the latest of equals."""
        if not counter.highest:
            return []
        here = set(keys)
        tail = self._tails[self._window.latest(counter.at_least(counter.highest))]
        return [(part, key in here) for key, part in tail]


_Candidate = tuple[int, int, int, float, float]
"""A block that may come next: its index, the requests that hold it, its tokens, and the weight of its rank in requests
that hold it and in requests that do not."""


def _most_saving_first(tail: list[_Candidate], common: int) -> list[int]:
    """Return indices of candidates, always the best next one.

    It ends when no request holds all placed blocks.

    Args:
        tail: In relevance order.
        common: The requests that hold all blocks placed so far.
    """
    order: list[int] = []
    while tail and common and len(order) < _ESTIMATES:
        savings = _savings(tail, common)
        index, holders, *_ = tail.pop(savings.index(max(savings)))
        order.append(index)
        common &= holders
    if tail and common:
        savings = _savings(tail, common)
        order += [tail[j][0] for j in sorted(range(len(tail)), key=savings.__getitem__, reverse=True)]
    return order


def _savings(tail: Sequence[_Candidate], common: int) -> list[float]:
    """Return each candidate's tokens times its odds to recur with all placed blocks."""
    requests = common.bit_count()
    return [
        tokens * (expected + (count := (holders & common).bit_count())) / (requests - count + against)
        for _, holders, tokens, expected, against in tail
    ]


_PARTS = 3
_FIRST_GUESS = (0.633, 0.5, 0.367)
_GUESS_WEIGHT = 60
"""Blocks per part of the ranks that the first guess counts as."""
_LATEST_WEIGHT = 8
"""Requests that the latest similar request counts as."""
_MEMORY = 10_000
"""Blocks per part after which the learned counts are halved, so that a change is noticed."""
_LEAST, _MOST = 0.02, 0.98

Outcome = tuple[int, bool]
"""A block of an earlier request: its third of the ranks, and whether the next similar request has it."""


def part_of(rank: int, blocks: int) -> int:
    """Return the third of the ranks that `rank` is in, among `blocks` ranks."""
    return _PARTS * rank // blocks


class RecurrenceByRank:
    """The probability that a block recurs in the next similar request, given its rank.

    The predictive value of a rank differs between retrievers: the first passage may be the one that all questions on a
    topic share, or the one that only this question needs. So it is learned: the shares of recurring blocks in the
    first, middle and last third of the ranks, with straight lines between.
    """

    def __init__(self) -> None:
        self._recurred = [_GUESS_WEIGHT * share for share in _FIRST_GUESS]
        self._seen = [float(_GUESS_WEIGHT)] * _PARTS

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Add the outcomes of an earlier request's blocks."""
        for part, again in outcomes:
            self._recurred[part] += again
            self._seen[part] += 1
            if self._seen[part] > _MEMORY:
                self._recurred[part] /= 2
                self._seen[part] /= 2

    def chances(self, blocks: int, latest: Sequence[Outcome] = ()) -> list[float]:
        """Return each rank's probability to recur. O(blocks + len(latest)).

        Args:
            blocks: Number of blocks of the request.
            latest: The outcomes of the last similar request, whose blocks may differ from the average.
        """
        recurred, seen = self._recurred, self._seen
        if latest:
            recurred, seen = recurred.copy(), seen.copy()
            for part, again in latest:
                recurred[part] += _LATEST_WEIGHT * again
                seen[part] += _LATEST_WEIGHT
        shares = [min(max(a / b, _LEAST), _MOST) for a, b in zip(recurred, seen, strict=True)]
        return [shares[part] + (shares[part + 1] - shares[part]) * way for part, way in _between_parts(blocks)]


@lru_cache(maxsize=64)
def _between_parts(blocks: int) -> tuple[tuple[int, float], ...]:
    """Return for each rank the part whose middle it follows, and its way to the next."""
    places: list[tuple[int, float]] = []
    for i in range(blocks):
        position = (i + 0.5) / blocks * _PARTS - 0.5
        part = min(max(int(position), 0), _PARTS - 2)
        places.append((part, min(max(position - part, 0.0), 1.0)))
    return tuple(places)
