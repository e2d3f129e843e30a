"""The contract of ordering policies, and the policies that take few lines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from typing import NamedTuple, Protocol

from warmprefix.errors import check_count
from warmprefix.prefix.access import AccessWindow
from warmprefix.prefix.nodes import may_stand
from warmprefix.prefix.tree import SEARCH_BUDGET, PrefixMatch, PrefixTree

__all__ = [
    "BlockView",
    "FrequencyPolicy",
    "GreedyPolicy",
    "OraclePolicy",
    "OrderingPolicy",
    "PrefixView",
    "RecencyPolicy",
    "RelevancePolicy",
    "ServedBlock",
    "SortedPolicy",
    "by_rank",
    "is_resident",
    "then_the_rest",
]


class BlockView(Protocol):
    """The part of a block that a policy may use: identity and length, not its text."""

    @property
    def fingerprint(self) -> bytes:
        """Digest of the text."""
        ...

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        ...


class OrderingPolicy(Protocol):
    """A policy that decides the order of a request's blocks.

    One object serves one scope, one call at a time. Its only input besides the arguments of `order` is `observe`: no
    clock, no random numbers, no I/O. If a policy raises, or returns anything but a permutation, the planner uses
    relevance order and counts it.
    """

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        """Return the planned order, a permutation of `range(len(blocks))`.

        Args:
            blocks: Distinct blocks in relevance order; not to be changed.
            prefix: The engine's content along the paths that these blocks can follow.
        """
        ...

    def observe(self, served: Sequence[BlockView]) -> None:
        """Learn from an order that reached the engine. A planner passes `ServedBlock`s."""
        ...


class ServedBlock(NamedTuple):
    """A block in an order that reached the engine."""

    fingerprint: bytes
    """Digest of the text."""
    tokens: int
    """Length in tokens."""
    rank: int
    """Its place in relevance order."""
    resident: bool
    """True if the engine was predicted to hold it and all blocks before it."""


def _without_note(order: Sequence[int]) -> int:
    """Return the tokens of the note that an order needs where none is written."""
    return 0


class PrefixView:
    """A read-only view of the engine's cache, behind the blocks already placed in front."""

    __slots__ = ("_after", "_in_flight", "_runs", "_tree", "note_tokens", "waiting")

    def __init__(
        self,
        tree: PrefixTree[bytes],
        after: Sequence[bytes] = (),
        *,
        in_flight: Iterable[Sequence[bytes]] = (),
        waiting: Sequence[Collection[bytes]] = (),
        note_tokens: Callable[[Sequence[int]], int] = _without_note,
    ) -> None:
        """Combine what is resident with what soon will be.

        Args:
            tree: The predicted content of the cache.
            after: Blocks already placed in front.
            in_flight: Planned orders of requests that are not answered yet. They count as resident, because engines
                share a prefix as soon as it is computed.
            waiting: The blocks of each request that is announced and not planned yet.
            note_tokens: Returns the tokens of the note that an order needs.
        """
        self._tree = tree
        self._after = after
        self._runs: Mapping[bytes, Sequence[BlockView]] = {}
        self._in_flight = _behind(after, in_flight) if after else list(in_flight)
        self.waiting = waiting
        """The blocks of each request that waits, without those of this request's own."""
        self.note_tokens = note_tokens
        """Returns the tokens of the note that the given order needs; 0 for relevance order."""

    def of_runs(
        self, runs: Mapping[bytes, Sequence[BlockView]], note_tokens: Callable[[Sequence[int]], int]
    ) -> PrefixView:
        """Return a view for blocks that each stand for a run, found by the fingerprint of its first block."""
        view = copy(self)
        view._runs, view.note_tokens = runs, note_tokens  # noqa: SLF001 - its own class
        return view

    def match_prefix(self, blocks: Sequence[BlockView]) -> PrefixMatch:
        """Return how much of exactly this order is resident or in flight. O(blocks + plans in flight).

        A run counts as a block if all of it is; its tokens count as far as they are.
        """
        single, joined = self._single_blocks(blocks)
        keys = [block.fingerprint for block in single]
        held = self._tree.match_prefix([*self._after, *keys])
        if self._after:
            placed = self._tree.match_prefix(self._after)
            held = PrefixMatch(held.blocks - placed.blocks, held.tokens - placed.tokens)
        for order in self._in_flight:
            shared = _shared_blocks(order, keys)
            if shared > held.blocks:
                held = PrefixMatch(shared, sum([block.tokens for block in single[:shared]]))
        if not joined:
            return held
        ends = [i for i in range(1, len(single) + 1) if i not in joined]
        return PrefixMatch(sum([end <= held.blocks for end in ends]), held.tokens)

    def deepest_path(self, blocks: Sequence[BlockView], budget: int | None = SEARCH_BUDGET) -> list[int]:
        """Return indices of a path that is resident or in flight; see `PrefixTree.deepest_path`.

        Of a run at its end, perhaps only the first blocks are.
        """
        single, joined = self._single_blocks(blocks)
        path = self._tree.deepest_path([block.fingerprint for block in single], self._after, budget, joined)
        if not self._in_flight:
            return _places_of_runs(path, joined)
        index = {block.fingerprint: i for i, block in enumerate(single)}
        most = sum([single[i].tokens for i in path])
        for order in self._in_flight:
            if order and order[0] in index:
                found: list[int] = []
                for i in [index[key] for key in takewhile(index.__contains__, order)]:
                    if joined and not may_stand(i, found[-1] if found else -1, joined):
                        break
                    found.append(i)
                tokens = sum([single[i].tokens for i in found])
                if tokens > most:
                    path, most = found, tokens
        return _places_of_runs(path, joined)

    def greedy_path(self, blocks: Sequence[BlockView]) -> list[int]:
        """Return indices of a resident path; see `PrefixTree.greedy_path`."""
        single, joined = self._single_blocks(blocks)
        path = self._tree.greedy_path([block.fingerprint for block in single], self._after, joined)
        return _places_of_runs(path, joined)

    def _single_blocks(self, blocks: Sequence[BlockView]) -> tuple[Sequence[BlockView], Collection[int]]:
        """Return the blocks of all runs, and which of them stay behind the one before them."""
        if not self._runs:
            return blocks, ()
        single: list[BlockView] = []
        joined: set[int] = set()
        for block in blocks:
            run = self._runs.get(block.fingerprint, (block,))
            joined.update(range(len(single) + 1, len(single) + len(run)))
            single += run
        return single, joined


def _places_of_runs(path: list[int], joined: Collection[int]) -> list[int]:
    """Return the places of the runs on a path of blocks."""
    if not joined:
        return path
    place = -1
    places: dict[int, int] = {}
    for i in range(max(path, default=-1) + 1):
        if i not in joined:
            places[i] = place = place + 1
    return [places[i] for i in path if i in places]


def _behind(after: Sequence[bytes], orders: Iterable[Sequence[bytes]]) -> list[Sequence[bytes]]:
    """Return what follows `after` in those orders that begin with it."""
    placed = len(after)
    return [order[placed:] for order in orders if tuple(order[:placed]) == tuple(after)]


def _shared_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Return the number of equal blocks that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def then_the_rest(head: Sequence[int], total: int) -> list[int]:
    """Return `head`, then all other indices below `total` in relevance order."""
    placed = set(head)
    return [*head, *(i for i in range(total) if i not in placed)]


def by_rank(served: Sequence[BlockView]) -> list[BlockView]:
    """Return served blocks by rank, or in served order if they have none."""
    return sorted(served, key=lambda block: getattr(block, "rank", 0))


def is_resident(served: BlockView) -> bool:
    """Return True if the block is marked as resident."""
    return getattr(served, "resident", False)


class _StatelessPolicy:
    def observe(self, served: Sequence[BlockView]) -> None:
        """Do nothing: the policy does not learn."""


class RelevancePolicy(_StatelessPolicy):
    """Ordering switched off: the planned order is always relevance order."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return range(len(blocks))


class SortedPolicy(_StatelessPolicy):
    """Order by fingerprint, on which all workers agree; reorders even without a gain."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return sorted(range(len(blocks)), key=lambda i: blocks[i].fingerprint)


class GreedyPolicy(_StatelessPolicy):
    """The most relevant resident children, then the rest (CacheWeaver, Alg. 1).

    The walk never goes back, so it can miss a deeper path: see `OraclePolicy`.
    """

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return then_the_rest(prefix.greedy_path(blocks), len(blocks))


class OraclePolicy(_StatelessPolicy):
    """The permutation with most resident tokens (CacheWeaver's exhaustive reference).

    It searches the tree, not the permutations, with the same result: only a path in the tree can be resident. Blocks
    beyond the path stay in relevance order, regardless of what the next request could share. Use it as a reference in
    measurements: its time grows with the tree.
    """

    def __init__(self, max_blocks: int = 20) -> None:
        """Search exhaustively up to `max_blocks` blocks, else with the default budget."""
        self.max_blocks = max_blocks
        """Most blocks for which the search has no limit."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        budget = None if len(blocks) <= self.max_blocks else SEARCH_BUDGET
        return then_the_rest(prefix.deepest_path(blocks, budget), len(blocks))


class RecencyPolicy:
    """Most recently served blocks first, then relevance (CacheWeaver's baseline).

    Blocks that one request served keep the order in which it served them.
    """

    def __init__(self, max_blocks: int = 65_536) -> None:
        """Remember at most `max_blocks` blocks, the most recently served."""
        check_count("max_blocks", max_blocks)
        self._served: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._max_blocks = max_blocks
        self._requests = 0

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        never = (1, 0)
        return sorted(range(len(blocks)), key=lambda i: self._served.get(blocks[i].fingerprint, never))

    def observe(self, served: Sequence[BlockView]) -> None:
        self._requests += 1
        for position, block in enumerate(served):
            self._served[block.fingerprint] = (-self._requests, position)
            self._served.move_to_end(block.fingerprint)
        while len(self._served) > self._max_blocks:
            self._served.popitem(last=False)


class FrequencyPolicy:
    """The promoted prefix first, then by access frequency, ties by relevance (CRAFT).

    A table counts accesses in a sliding window of requests. Of each served order, the leading run of blocks that have
    reached the promotion threshold enters a prefix tree of the policy's own. Later requests follow that tree as far as
    their blocks go, also through part of an edge ("prefix slicing").
    """

    def __init__(self, window: int = 1_000, promotion_threshold: int = 2, max_nodes: int = 65_536) -> None:
        check_count("window", window)
        check_count("promotion_threshold", promotion_threshold)
        self.promotion_threshold = promotion_threshold
        """Accesses in the window from which a block is promoted."""
        self._window = AccessWindow[bytes](window)
        self._promoted = PrefixTree[bytes](max_nodes=max_nodes)

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        by_frequency = sorted(range(len(blocks)), key=lambda i: -self._window.count(blocks[i].fingerprint))
        keys = [blocks[i].fingerprint for i in by_frequency]
        return [by_frequency[i] for i in then_the_rest(self._promoted.greedy_path(keys), len(blocks))]

    def observe(self, served: Sequence[BlockView]) -> None:
        self._window.observe([block.fingerprint for block in served])
        promoted = list(takewhile(self._is_promoted, served))
        self._promoted.insert([block.fingerprint for block in promoted], [block.tokens for block in promoted])

    def _is_promoted(self, block: BlockView) -> bool:
        return self._window.count(block.fingerprint) >= self.promotion_threshold
