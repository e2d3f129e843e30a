"""The default policy: resident blocks, then those that later requests may share."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Generic, NamedTuple, TypeVar

from warmprefix.errors import check_count
from warmprefix.ghosts import Ghosts
from warmprefix.ordering.policies import BlockView, PrefixView, ServedBlock
from warmprefix.ordering.positions import PositionProfile, place_well
from warmprefix.ordering.returns import MOST_RATE, Returns
from warmprefix.prefix.tree import PrefixMatch, PrefixTree

__all__ = ["AccessWindow", "BitCounter", "CoAccessPolicy", "Outcomes", "RecurrenceByRank"]

K = TypeVar("K", bound=Hashable)

_ESTIMATES = 4
"""Places of the tail for which odds are computed separately."""
_LEVELS = 3
"""Weights of similar requests, from 1 to this."""
_WAITING = (1 << 16) - 1
"""The bits of a request that waits: it weighs as much as five similar ones."""
_NEGLIGIBLE = 0.01
"""A probability at which nothing more is expected."""
_RETURNS_INTERVAL = 4
"""One request in this many is examined for what its order has found."""
_TRUSTS = (11.0, 3.0, 100.0)
"""Numbers of similar requests that weigh as much as rank, the default first."""
_GHOST_DECAY, _GHOST_MARGIN, _GHOST_LEAD = 0.998, 0.04, 3.0
"""A change of `trust` spoils paths, so the default stays until another one is clearly better."""
_LEAST_LEARNED = 16
"""Requests before there are ghosts."""
_GHOST_EDGES = 16
"""Most edges that a search in a ghost walks."""
_PERIOD, _SERVED = 8_192, 1_024
"""Requests of a period, and the first of them, which the ghosts serve: so a request costs little more in the mean."""


class CoAccessPolicy:
    """Deepest resident path, then blocks that similar requests are likely to share.

    *Head*: the resident path of most tokens among the request's blocks.

    *Tail*: later requests reuse a path as far as they hold its blocks. Blocks that recur independently of each other
    save most in the order of `tokens * p / (1 - p)`, where p is a block's probability to recur. The next block is
    always the one with the highest value; p is estimated from the requests of the window that hold all blocks placed
    so far. A request's weight is the number of its blocks that this request shares, in thirds of the highest such
    number. `trust` similar requests weigh as much as the block's rank, whose predictive value is learned too;
    ghosts show the best number.

    p is estimated separately for each of the first places, and once for the places after them, which are seldom
    reached. Once no request holds all placed blocks, the rest stays in relevance order. A request without a resident
    path and without blocks in the window stays in relevance order too. O(k) bitset operations and O(k log k) in all,
    for k blocks.
    """

    def __init__(self, window: int = 1_000, trust: float | None = None) -> None:
        """Start with nothing learned.

        Args:
            window: Number of requests that are remembered.
            trust: Number of similar requests that weigh as much as rank; above 0. None to learn it.

        Raises:
            TypeError: `window` is not an int.
            ValueError: An argument is too small.
        """
        check_count("window", window)
        if trust is not None and not trust > 0:
            raise ValueError(f"trust must be above 0, got {trust}")
        self.trust = _TRUSTS[0] if trust is None else trust
        self._ghosts = _TrustGhosts(window) if trust is None else None
        self._capacity: int | None = None
        self._window = AccessWindow[bytes](window)
        self._recurrence = RecurrenceByRank()
        self._returns = Returns()
        self._note_tokens = 0
        """Tokens of the last order's note; 0 until an order needed one."""
        self._tails: list[Sequence[frozenset[bytes]]] = [()] * window
        """For each place of the window, that request's blocks beyond its resident path, by third of the ranks."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        head = prefix.deepest_path(blocks)
        self._capacity = prefix.tree.capacity_tokens
        demand = self._demand(blocks, prefix.waiting)
        planned: Sequence[int] = demand.best_order(head)
        if prefix.reader is not None and planned != [*range(len(blocks))]:
            head, planned = self._readable(prefix.reader, blocks, prefix, demand, [(head, planned)])
        note = prefix.note_tokens(planned)
        if not note:
            return planned
        self._note_tokens = note
        in_relevance_order = range(len(blocks))
        held, reached = prefix.match_prefixes(blocks, [blocks[i] for i in head])
        saved = reached.tokens - held.tokens
        if saved <= note:
            later = demand.new_value(planned, len(head)) - demand.new_value(in_relevance_order, held.blocks)
            if saved + later * self._returns.rate <= note:
                return in_relevance_order
        return planned

    def _readable(
        self,
        reader: PositionProfile,
        blocks: Sequence[BlockView],
        prefix: PrefixView,
        demand: _Demand,
        orders: list[tuple[list[int], Sequence[int]]],
    ) -> tuple[list[int], Sequence[int]]:
        """Return the path and the order that are worth most to a model that reads some places better than others.

        The order may begin with the most relevant block and a path behind it. The most relevant blocks behind the path
        stand right behind it, at the end, or where they were. O(k) for k blocks, and one search for a path.

        Args:
            reader: Where the model reads best.
            blocks: The blocks.
            prefix: The content of the cache.
            demand: What later requests may share.
            orders: The order to improve, with its resident path.
        """
        as_given = [*range(len(blocks))]
        if not orders[0][0] or orders[0][0][0]:
            path = [0, *[i + 1 for i in prefix.behind(blocks[0]).deepest_path(blocks[1:])]]
            orders.append((path, demand.best_order(path)))
        matches = prefix.match_prefixes(blocks, *[[blocks[i] for i in path] for path, _ in orders])
        percent = 100 / (sum(demand.tokens) or 1)
        rate = self._returns.rate / MOST_RATE

        def value(held: PrefixMatch, order: Sequence[int]) -> float:
            saved = held.tokens + rate * demand.new_value(order, held.blocks) - prefix.note_tokens(order)
            return reader.value(order, percent * saved)

        best: tuple[float, list[int], Sequence[int]] = (value(matches[0], as_given), [], as_given)
        for (path, order), held in zip(orders, matches[1:], strict=True):
            worth, placed = place_well(order, len(path), partial(value, held))
            best = max(best, (worth, path, placed), key=itemgetter(0))
        return best[1:]

    def observe(self, served: Sequence[ServedBlock]) -> None:
        if not served:
            return
        ranked = sorted(served, key=attrgetter("rank"))
        keys = [block.fingerprint for block in ranked]
        ghosts = self._ghosts if self._ghosts is not None and self._ghosts.are_due() else None
        place = self._window.next_place
        learns = self._note_tokens and place % _RETURNS_INTERVAL == 0
        if ghosts is not None or learns:
            demand = self._demand(ranked)
            if learns:
                self._learn_returns(served, ranked, demand)
            if ghosts is not None:
                ghosts.serve(demand, keys, self._capacity, self._note_tokens)
                self.trust = ghosts.choice.best
        self._recurrence.learn(self._outcomes(BitCounter(self._window.requests(keys)), keys))
        tail: list[list[bytes]] = [[] for _ in range(_PARTS)]
        for rank, block in enumerate(ranked):
            if not block.resident:
                tail[_PARTS * rank // len(keys)].append(block.fingerprint)
        self._tails[place] = [*map(frozenset, tail)]
        self._window.observe(keys)

    def _demand(self, blocks: Sequence[BlockView], waiting: Sequence[Collection[bytes]] = ()) -> _Demand:
        """Return the requests that suggest what may follow `blocks`, in relevance order."""
        keys = [block.fingerprint for block in blocks]
        requests = self._window.requests(keys)
        counter = BitCounter(requests)
        similar, size = 0, self._window.size
        if counter.highest:
            # The requests of the window, each as many times as its weight. The copies stand next to each other in one
            # bitset, a window apart, so that one `bit_count` adds up weights.
            similar = least = counter.having_highest
            for level in range(_LEVELS - 1, 0, -1):
                least = counter.at_least(-(-counter.highest * level // _LEVELS))
                similar = similar << size | least
            requests = [
                similar & (held | held << size | held << 2 * size) if (held := every & least) else 0
                for every in requests
            ]
        place = _LEVELS * size
        for request in waiting:
            sharing = [i for i, key in enumerate(keys) if key in request]
            if sharing:
                bits = _WAITING << place
                similar |= bits
                for i in sharing:
                    requests[i] |= bits
                place += _WAITING.bit_length()
        chances = self._recurrence.chances(len(keys), self._outcomes(counter, keys)) if similar else ()
        # The ghosts see no queue, and what waits is known better than any count.
        trust = _TRUSTS[0] if waiting and self._ghosts is not None else self.trust
        return _Demand(similar, requests, [block.tokens for block in blocks], chances, trust * _LEVELS)

    def _outcomes(self, counter: BitCounter, keys: Sequence[bytes]) -> Outcomes:
        """Compare `keys` with the tail of the most similar request, the latest of equals."""
        if not counter.highest:
            return ()
        here = set(keys)
        tail = self._tails[self._window.latest(counter.having_highest)]
        return [(len(here & part), len(part)) for part in tail]

    def _learn_returns(self, served: Sequence[ServedBlock], ranked: Sequence[ServedBlock], demand: _Demand) -> None:
        """Compare what a reordered request found with what it was expected to leave for later ones."""
        ranks = {block.fingerprint: rank for rank, block in enumerate(ranked)}
        order = [ranks[block.fingerprint] for block in served]
        moved = [i for i, rank in enumerate(order) if i != rank]
        if not moved:
            return
        unmoved = moved[0]
        found = sum([block.resident for block in served])
        # What an earlier request left here costs a note again.
        net = sum([block.tokens for block in served[unmoved:found]]) - self._note_tokens
        self._returns.learn(
            max(net, 0),
            demand.new_value(order, found) - demand.new_value(range(len(order)), min(found, unmoved)),
            sum([block.tokens for block in served]),
        )


class _Demand(NamedTuple):
    """The requests that suggest what later ones will share with a request."""

    similar: int
    """Earlier requests alike, and those that wait, each as many bits as its weight."""
    holders: Sequence[int]
    """Those of them that hold each block, in relevance order."""
    tokens: Sequence[int]
    chances: Sequence[float]
    """Each block's probability to recur, by its rank alone."""
    trust: float
    """The weight of `chances`, in bits."""

    def trusting(self, trust: float) -> _Demand:
        """Return the same with another number of similar requests that weigh as much as rank."""
        return self._replace(trust=trust * _LEVELS)

    def best_order(self, head: Sequence[int]) -> list[int]:
        """Return all blocks: `head`, then always the best next one.

        Once no request holds all placed blocks, the rest follows in relevance order.
        """
        common = self.similar
        for i in head:
            common &= self.holders[i]
        placed, trust = set(head), self.trust
        order = [*head]
        tail = [
            (i, self.holders[i], self.tokens[i], trust * chance, trust - trust * chance)
            for i, chance in enumerate(self.chances if common else ())
            if i not in placed
        ]
        while tail and common and len(order) < len(head) + _ESTIMATES:
            savings = _savings(tail, common)
            index, holders, *_ = tail.pop(savings.index(max(savings)))
            order.append(index)
            common &= holders
        if tail and common:
            savings = _savings(tail, common)
            order += [tail[j][0] for j in sorted(range(len(tail)), key=savings.__getitem__, reverse=True)]
        placed.update(order)
        return order + [i for i in range(len(self.tokens)) if i not in placed]

    def new_value(self, order: Sequence[int], held: int) -> float:
        """Return the tokens that the next similar request is expected to find in `order`, beyond the held blocks.

        O(k), for k blocks, and fewer where few requests are similar.
        """
        if not self.similar:
            return 0.0
        value, chance, common, trust = 0.0, 1.0, self.similar, self.trust
        requests = common.bit_count()
        for place, i in enumerate(order):
            common &= self.holders[i]
            before, requests = requests, common.bit_count()
            chance *= (trust * self.chances[i] + requests) / (trust + before)
            if chance < _NEGLIGIBLE:
                break
            if place >= held:
                value += chance * self.tokens[i]
        return value


_Candidate = tuple[int, int, int, float, float]
"""A block that may come next: its index, the requests that hold it, its tokens, and the weight of its rank in requests
that hold it and in requests that do not."""


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

Outcomes = Sequence[tuple[int, int]]
"""For each third of the ranks of an earlier request: its blocks that the next similar request has, and all."""


class RecurrenceByRank:
    """The probability that a block recurs in the next similar request, given its rank.

    The predictive value of a rank differs between retrievers: the first passage may be the one that all questions on a
    topic share, or the one that only this question needs. So it is learned: the shares of recurring blocks in the
    first, middle and last third of the ranks, with straight lines between.
    """

    def __init__(self) -> None:
        self._recurred = [_GUESS_WEIGHT * share for share in _FIRST_GUESS]
        self._seen = [float(_GUESS_WEIGHT)] * _PARTS

    def learn(self, outcomes: Outcomes) -> None:
        """Add the outcomes of an earlier request's blocks."""
        for part, (again, blocks) in enumerate(outcomes):
            self._recurred[part] += again
            self._seen[part] += blocks
            if self._seen[part] > _MEMORY:
                self._recurred[part] /= 2
                self._seen[part] /= 2

    def chances(self, blocks: int, latest: Outcomes = ()) -> list[float]:
        """Return each rank's probability to recur. O(blocks).

        Args:
            blocks: Number of blocks of the request.
            latest: The outcomes of the last similar request, whose blocks may differ from the average.
        """
        recurred, seen = self._recurred, self._seen
        if latest:
            recurred = [a + _LATEST_WEIGHT * again for a, (again, _) in zip(recurred, latest, strict=True)]
            seen = [b + _LATEST_WEIGHT * blocks for b, (_, blocks) in zip(seen, latest, strict=True)]
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


class _TrustGhosts:
    """Caches of the same size, each with orders of another `trust`, which show the best one for a scope."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self.choice = Ghosts(_TRUSTS, decay=_GHOST_DECAY, margin=_GHOST_MARGIN, lead=_GHOST_LEAD)
        self._trees: list[PrefixTree[bytes]] = []
        self._requests = 0

    def are_due(self) -> bool:
        """Count a request; return True if the ghosts serve it: the first ones, and as many of each later period."""
        self._requests += 1
        if self._requests % _PERIOD == _SERVED:
            self._trees.clear()  # they would be old by the next period
        return self._requests > _LEAST_LEARNED and self._requests % _PERIOD < _SERVED

    def serve(self, demand: _Demand, keys: Sequence[bytes], capacity: int | None, note: int) -> None:
        """Serve a request, whose blocks are in relevance order, from each cache; another order costs `note` tokens."""
        if not self._trees:
            self._trees = [PrefixTree(None, self._max_nodes) for _ in _TRUSTS]
        total = sum(demand.tokens) or 1
        saved = []
        in_relevance_order = [*range(len(keys))]
        for trust, tree in zip(_TRUSTS, self._trees, strict=True):
            tree.capacity_tokens = capacity
            order = demand.trusting(trust).best_order(tree.deepest_path(keys, budget=_GHOST_EDGES))
            found = tree.insert([keys[i] for i in order], [demand.tokens[i] for i in order]).tokens
            saved.append((found - (note if order != in_relevance_order else 0)) / total)
        self.choice.score(saved)


class AccessWindow(Generic[K]):
    """Access counts over the last `size` requests.

    Each block has a bitset with one bit per request of the window. So counting the requests that hold a whole set of
    blocks takes one `&` and one `bit_count` per block, about 0.1 µs at the default size. Memory is bounded by the
    blocks of `size` requests. Not thread-safe.

    >>> window = AccessWindow[str]()
    >>> window.observe(["A", "B"]); window.observe(["B", "C"])
    >>> window.count("A"), window.count("B")
    (1, 2)
    """

    def __init__(self, size: int = 1_000) -> None:
        check_count("size", size)
        self.size = size
        self._slots: list[Sequence[K]] = [()] * size
        self.next_place = 0
        """Bit of the next observed request, which the oldest has while the window is full."""
        self._requests: dict[K, int] = {}

    def observe(self, keys: Sequence[K]) -> None:
        """Add a request's blocks; drop the oldest request if the window is full. O(keys)."""
        slot = self.next_place
        bit = 1 << slot
        requests = self._requests
        distinct = tuple(dict.fromkeys(keys))
        for key in self._slots[slot]:
            left = requests[key] & ~bit
            if left:
                requests[key] = left
            else:
                del requests[key]
        for key in distinct:
            requests[key] = requests.get(key, 0) | bit
        self._slots[slot] = distinct
        self.next_place = (slot + 1) % self.size

    def requests(self, keys: Iterable[K]) -> list[int]:
        """Return for each key the bitset of the requests that hold it; 0 for none."""
        requests = self._requests
        return [requests.get(key, 0) for key in keys]

    def latest(self, places: int) -> int:
        """Return the bit of the most recent of some requests, a bitset that is not 0."""
        before_the_wrap = places & ((1 << self.next_place) - 1)
        return (before_the_wrap or places).bit_length() - 1

    def count(self, key: K) -> int:
        """Return the number of requests of the window that hold `key`."""
        return self._requests.get(key, 0).bit_count()

    def __len__(self) -> int:
        """Return the number of different blocks in the window."""
        return len(self._requests)


class BitCounter:
    """The number of bitsets that have each bit set.

    The counts are bit-sliced: plane p holds binary digit p of all counts. Adding n bitsets takes about 2n operations
    on whole integers, whatever their length.

    >>> counter = BitCounter([0b0111, 0b0110, 0b0100])
    >>> counter.highest
    3
    >>> bin(counter.at_least(2))
    '0b110'
    """

    __slots__ = ("_planes", "having_highest", "highest")

    def __init__(self, bitsets: Iterable[int]) -> None:
        self._planes: list[int] = []
        planes = self._planes
        for bitset in bitsets:
            carry, p = bitset, 0
            while carry:
                if p == len(planes):
                    planes.append(carry)
                    break
                planes[p], carry = planes[p] ^ carry, planes[p] & carry
                p += 1
        self.highest = 0
        """The highest count of any bit; 0 if no bit is set."""
        self.having_highest = -1 if planes else 0
        """The bits that have it; 0 if no bit is set."""
        for p in reversed(range(len(planes))):
            if having_it := self.having_highest & planes[p]:
                self.having_highest = having_it
                self.highest |= 1 << p

    def at_least(self, count: int) -> int:
        """Return the bits that are set in `count` bitsets or more; `count` is 1 or more."""
        if count.bit_length() > len(self._planes):
            return 0
        more, equal = 0, -1
        for p in reversed(range(len(self._planes))):
            if count >> p & 1:
                equal &= self._planes[p]
            else:
                more |= equal & self._planes[p]
                equal &= ~self._planes[p]
        return more | equal
