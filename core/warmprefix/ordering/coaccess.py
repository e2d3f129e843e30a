"""The default: what is resident now, then what later requests are likely to share."""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.ordering.base import BlockView, PrefixView, by_rank, is_resident, then_the_rest
from warmprefix.ordering.recurrence import Outcome, RecurrenceByRank, part_of
from warmprefix.prefix.access import AccessWindow
from warmprefix.prefix.bitsets import BitCounter

__all__ = ["CoAccessPolicy"]

_ESTIMATES = 4
_LEVELS = 3


class CoAccessPolicy:
    """Deepest resident path, then by what similar requests are likely to share.

    *Head*: the resident path of most tokens among the request's blocks.

    *Tail*: a path serves the requests to come as far as they hold its blocks. Blocks that come up independently of
    each other then save most in the order of `tokens * p / (1 - p)`, where p is a block's chance to come up again.
    The next block is always the one where that is highest; p is estimated from the requests of the window that hold
    everything placed so far. A request counts the more the more of this one's blocks it has: a third for each third
    of the most that any request has. `trust` such requests weigh as much as the block's rank, and what the rank
    tells is learned too.

    p is estimated anew for each of the first places, and once for the places behind them, which are seldom reached.
    Once no request holds everything placed, the rest stays in relevance order: so does a request of which neither a
    path is resident nor a block came up in the window. O(k) bitset operations, O(k log k) in all, for k blocks.
    """

    def __init__(self, window: int = 1_000, trust: float = 11.0) -> None:
        """Start with nothing learned.

        Args:
            window: How many requests are remembered.
            trust: How many similar requests it takes to count as much as rank; above 0.
        """
        if not trust > 0:
            raise ValueError(f"trust must be above 0, got {trust}")
        self.trust = trust
        self._window = AccessWindow[bytes](window)
        self._recurrence = RecurrenceByRank()
        self._tails: list[Sequence[tuple[bytes, int]]] = [()] * window
        """For each place of the window that request's blocks beyond its resident path, with their part of the ranks."""

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
        """The requests of the window, each as many times as thirds of the most shared blocks it shares.

        The copies stand side by side in one bitset, a window apart, so that one `bit_count` adds up weights.
        """
        similar = 0
        for level in range(_LEVELS, 0, -1):
            similar = similar << self._window.size | counter.at_least(-(-counter.highest * level // _LEVELS))
        return similar

    def _outcomes(self, counter: BitCounter, keys: Sequence[bytes]) -> list[Outcome]:
        """Which blocks of its tail the request most like this one, the latest if several are, has in common with it."""
        if not counter.highest:
            return []
        here = set(keys)
        tail = self._tails[self._window.latest(counter.at_least(counter.highest))]
        return [(part, key in here) for key, part in tail]


_Candidate = tuple[int, int, int, float, float]
"""A block that may come next: its index, the requests that hold it, its tokens, and what its rank counts as: so many
requests that hold it, and so many that do not."""


def _most_saving_first(tail: list[_Candidate], common: int) -> list[int]:
    """Indices of the candidates, each the best behind those before it, as long as a request holds all of these.

    Args:
        tail: In relevance order.
        common: The requests that hold everything placed so far.
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
    """For each candidate, its tokens times the odds that it comes up again where everything placed does."""
    requests = common.bit_count()
    return [
        tokens * (expected + (count := (holders & common).bit_count())) / (requests - count + against)
        for _, holders, tokens, expected, against in tail
    ]
