"""The contract of ordering policies, and the policies that take few lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple, Protocol

from warmprefix.ordering.positions import PositionProfile
from warmprefix.prefix.tree import SEARCH_BUDGET, PrefixMatch, PrefixTree, may_stand

__all__ = [
    "BlockView",
    "OrderingPolicy",
    "PrefixView",
    "RelevancePolicy",
    "ServedBlock",
    "SortedPolicy",
    "StatelessPolicy",
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

    def observe(self, served: Sequence[ServedBlock]) -> None:
        """Learn from an order that reached the engine."""
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


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A read-only view of the engine's cache, behind the blocks already placed in front.

    It combines what is resident with what soon will be.
    """

    tree: PrefixTree[bytes]
    """The predicted content of the cache."""
    after: Sequence[bytes] = ()
    """Blocks already placed in front."""
    in_flight: Sequence[Sequence[bytes]] = ()
    """Planned orders of requests that are not answered yet, of those that begin with one of this request's blocks.

    They count as resident, because engines share a prefix as soon as it is computed."""
    waiting: Sequence[Collection[bytes]] = ()
    """The blocks of each request that is announced and not planned yet, without this request's own."""
    note_tokens: Callable[[Sequence[int]], int] = _without_note
    """Returns the tokens of the note that the given order needs; 0 for relevance order."""
    reader: PositionProfile | None = None
    """Where the model reads best; None if that is unknown, or the same everywhere."""
    runs: Mapping[bytes, Sequence[BlockView]] = field(default_factory=dict)
    """For blocks that each stand for a run: its blocks, by the fingerprint of the first one."""

    def match_prefix(self, blocks: Sequence[BlockView]) -> PrefixMatch:
        """Return how much of exactly this order is resident or in flight. O(blocks + plans in flight).

        A run counts as a block if all of it is; its tokens count as far as they are.
        """
        return self.match_prefixes(blocks)[0]

    def match_prefixes(self, *orders: Sequence[BlockView]) -> list[PrefixMatch]:
        """Return `match_prefix` of each order."""
        parts = [self.single_blocks(blocks) if self.runs else (blocks, ()) for blocks in orders]
        keys = [[block.fingerprint for block in single] for single, _ in parts]
        matches = [self.tree.match_prefix([*self.after, *own] if self.after else own) for own in keys]
        if not (self.runs or self.in_flight or self.after):
            return matches
        flights = self._flights()
        if self.after:
            placed = self.tree.match_prefix(self.after)
            matches = [PrefixMatch(held.blocks - placed.blocks, held.tokens - placed.tokens) for held in matches]
        for i, (single, joined) in enumerate(parts):
            for order in flights:
                shared = shared_blocks(order, keys[i])
                if shared > matches[i].blocks:
                    matches[i] = PrefixMatch(shared, sum([block.tokens for block in single[:shared]]))
            if joined:
                held = matches[i]
                ends = [end for end in range(1, len(single) + 1) if end not in joined]
                matches[i] = PrefixMatch(sum([end <= held.blocks for end in ends]), held.tokens)
        return matches

    def deepest_path(self, blocks: Sequence[BlockView], budget: int | None = SEARCH_BUDGET) -> list[int]:
        """Return indices of a path that is resident or in flight; see `PrefixTree.deepest_path`.

        Of a run at its end, perhaps only the first blocks are.
        """
        single, joined = self.single_blocks(blocks) if self.runs else (blocks, ())
        path = self.tree.deepest_path([block.fingerprint for block in single], self.after, budget, joined)
        if not self.in_flight:
            return places_of_runs(path, joined) if joined else path
        index = {block.fingerprint: i for i, block in enumerate(single)}
        most = sum([single[i].tokens for i in path])
        for order in self._flights():
            if order and order[0] in index:
                found: list[int] = []
                for i in [index[key] for key in takewhile(index.__contains__, order)]:
                    if joined and not may_stand(i, found[-1] if found else -1, joined):
                        break
                    found.append(i)
                tokens = sum([single[i].tokens for i in found])
                if tokens > most:
                    path, most = found, tokens
        return places_of_runs(path, joined) if joined else path

    def _flights(self) -> Iterable[Sequence[bytes]]:
        """Return what follows `after` in those planned orders that begin with it."""
        if not self.after:
            return self.in_flight
        after, placed = tuple(self.after), len(self.after)
        return [order[placed:] for order in self.in_flight if tuple(order[:placed]) == after]

    def behind(self, block: BlockView) -> PrefixView:
        """Return the view of what follows this block, placed in front of all others."""
        return replace(self, after=[*self.after, *[each.fingerprint for each in self.single_blocks([block])[0]]])

    def single_blocks(self, blocks: Sequence[BlockView]) -> tuple[Sequence[BlockView], Collection[int]]:
        """Return the blocks of all runs, and which of them stay behind the one before them."""
        single: list[BlockView] = []
        joined: set[int] = set()
        for block in blocks:
            run = self.runs.get(block.fingerprint, (block,))
            joined.update(range(len(single) + 1, len(single) + len(run)))
            single += run
        return single, joined


def places_of_runs(path: list[int], joined: Collection[int]) -> list[int]:
    """Return the places of the runs on a path of blocks."""
    place = -1
    places: dict[int, int] = {}
    for i in range(max(path, default=-1) + 1):
        if i not in joined:
            places[i] = place = place + 1
    return [places[i] for i in path if i in places]


def shared_blocks(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return the number of equal blocks that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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


class _RunAsBlock(NamedTuple):
    """A run, as a policy sees it. Contexts share it from its first block on, so it has that block's identity."""

    fingerprint: bytes
    tokens: int


class Runs:
    """The runs of a request, each in place of its blocks."""

    def __init__(self, blocks: Sequence[BlockView], joined: Collection[int]) -> None:
        """Divide `blocks` in front of each that is not `joined` to the one before it."""
        self._places = runs_of(len(blocks), joined)
        self._blocks = {blocks[run[0]].fingerprint: [blocks[i] for i in run] for run in self._places}
        self.units: Sequence[BlockView] = [
            _RunAsBlock(first, sum([block.tokens for block in run])) for first, run in self._blocks.items()
        ]
        """One block per run, in relevance order: a run ranks by its first block."""

    def blocks_in(self, order: Sequence[int]) -> list[int]:
        """Return the indices of the blocks, for an order of the runs."""
        return [i for run in order for i in self._places[run]]

    def view(self, view: PrefixView) -> PrefixView:
        """Return the same view for runs."""
        return replace(view, runs=self._blocks, note_tokens=lambda order: view.note_tokens(self.blocks_in(order)))


def runs_of(blocks: int, joined: Collection[int]) -> list[range]:
    """Return the runs of some blocks, as ranges of indices."""
    starts = [i for i in range(blocks) if i not in joined]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], blocks], strict=True)]
