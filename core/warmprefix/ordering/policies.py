"""The contract of ordering policies, and the policies that take few lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import takewhile
from typing import NamedTuple, Protocol

from warmprefix.prefix.nodes import may_stand
from warmprefix.prefix.tree import SEARCH_BUDGET, PrefixMatch, PrefixTree

__all__ = [
    "BlockView",
    "OrderingPolicy",
    "PrefixView",
    "RelevancePolicy",
    "ServedBlock",
    "SortedPolicy",
    "StatelessPolicy",
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


class StatelessPolicy:
    """Base class of policies that do not learn."""

    def observe(self, served: Sequence[BlockView]) -> None:
        """Do nothing: the policy does not learn."""


class RelevancePolicy(StatelessPolicy):
    """Ordering switched off: the planned order is always relevance order."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return range(len(blocks))


class SortedPolicy(StatelessPolicy):
    """Order by fingerprint, on which all workers agree; reorders even without a gain."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return sorted(range(len(blocks)), key=lambda i: blocks[i].fingerprint)
