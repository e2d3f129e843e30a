"""The plan of one scope's requests, and the tokens that a prefix cache saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, get_args

from warmprefix.batch.bounds import Bound, upper_bound
from warmprefix.batch.plan import BatchRequest, BoundKind
from warmprefix.batch.planners import BatchPlanner, Placed, Progress, depth_first, no_progress
from warmprefix.blocks import ContextBlock, evidence_blocks, joined_blocks, pins
from warmprefix.ordering import runs_of
from warmprefix.ordering.policies import shared_blocks
from warmprefix.ordering.positions import PositionProfile, place_well
from warmprefix.prefix.tree import PrefixMatch, PrefixTree

__all__ = [
    "NoteTokens",
    "NumberedRequests",
    "PathTree",
    "Paths",
    "ScopePlan",
    "Served",
    "bound_of_all",
    "plan_scope",
    "resident_path",
    "serve",
    "served_plan",
    "with_notes",
    "without_losses",
    "without_notes",
]

Paths = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Paths of blocks, by number, that a cache holds, each with their lengths."""

NoteTokens = Callable[[int, Sequence[int]], int | None]
"""Returns the tokens of the note that a request, by number, needs for an order of its blocks' positions. None if no
note can be written, so that the request keeps relevance order."""

_Order = tuple[int, ...]

_PATH_WORTH = 0.4
"""The least part of its shareable tokens that a request's resident path must hold to come first. In windows of 64
requests 0.3 to 0.5 did equally well; 0.2 and 0.7 did worse."""


class PathTree(Protocol):
    """The predicted content of the engine's cache, along given blocks; see `PrefixTree`."""

    def match_prefix(self, keys: Sequence[bytes]) -> PrefixMatch: ...
    def deepest_path(
        self, keys: Sequence[bytes], after: Sequence[bytes] = (), *, joined: Collection[int] = ()
    ) -> list[int]: ...


class Served(NamedTuple):
    """The part of one context that the cache held when it ran."""

    blocks: int
    """The number of first blocks of its order."""
    tokens: int
    warmed_by: int | None
    """The context, by number, that had computed the last of these; None if no context did."""


class ScopePlan(NamedTuple):
    """The plan of one scope's requests."""

    placed: Sequence[Placed]
    """By the requests' numbers and their blocks' positions, in execution order."""
    served: Sequence[Served]
    total_tokens: int
    bound: Bound


def without_notes(request: int, order: Sequence[int]) -> int:
    """Return the price of an order without notes."""
    return 0


def plan_scope(
    requests: Sequence[BatchRequest],
    planners: Sequence[BatchPlanner],
    tree: PrefixTree[bytes] | None,
    capacity_tokens: int | None,
    progress: Progress = no_progress,
    *,
    note_tokens: NoteTokens = without_notes,
    reader: PositionProfile | None = None,
) -> ScopePlan:
    """Plan requests that may share a prefix.

    Args:
        requests: In the caller's order.
        planners: Arrange the blocks that may move. Of several, the first plan that saves most, net of notes, is used,
            and requests whose order does not pay for their notes keep relevance order.
        tree: The predicted content of the engine's cache; None if it is empty. It is not changed.
        capacity_tokens: The size of the cache; None for no bound.
        progress: Receives the progress of the planners.
        note_tokens: Returns the tokens of notes.
        reader: Where the model reads best.

    Raises:
        ValueError: A planner omits a context or a block, or returns one twice.
    """
    batch = NumberedRequests(requests, capacity_tokens, note_tokens)
    if tree is not None and not tree.resident_tokens:
        tree = None
    before = () if tree is None or capacity_tokens is None else _numbered_paths(batch, tree)
    paths = None if tree is None else [resident_path(batch, i, tree) for i in range(len(requests))]
    best: tuple[int, Sequence[Placed], Sequence[Served]] | None = None
    for planner in planners:
        for arranged in _candidates(batch, paths, planner, progress):
            noted = with_notes(batch, arranged)
            placed = noted if len(planners) == 1 else without_losses(batch, noted, tree)
            resident = None
            if tree is not None and capacity_tokens is None:
                keys = batch.keys
                resident = [tree.match_prefix([keys[number] for number in order]).blocks for _, order in placed]
            found = batch.serve(placed, before, resident)
            net = _saved(found) - sum(map(batch.notes, placed))
            if best is None or net > best[0]:
                best = net, placed, found
    assert best is not None
    _, placed, served = best
    return served_plan(batch, placed if reader is None else _placed_well(batch, placed, served, reader), served, paths)


def _placed_well(
    batch: NumberedRequests, placed: Sequence[Placed], served: Sequence[Served], reader: PositionProfile
) -> Sequence[Placed]:
    """Return the plan with the most relevant blocks where the model reads best, as far as no request shares them.

    That costs no hits, because each request keeps the blocks that it shares with any other one, or finds in the cache.
    Requests that share none keep relevance order, as do those with pinned blocks and runs. O(n log n).
    """
    kept = [found.blocks for found in served]
    for a, b in pairwise(sorted(range(len(placed)), key=lambda at: placed[at].order)):
        shared = shared_blocks(placed[a].order, placed[b].order)
        kept[a], kept[b] = max(kept[a], shared), max(kept[b], shared)
    moved: list[Placed] = []
    for (i, order), blocks in zip(placed, kept, strict=True):
        context = batch.contexts[i]
        is_free = blocks and not (batch.heads[i] or batch.ends[i] or batch.joined[i])
        if is_free and context[0] not in order[:blocks]:  # so that moving it changes no need for a note
            _, best = place_well([*map(context.index, order)], blocks, lambda ranks: -reader.loss(ranks))
            order = tuple([context[rank] for rank in best])
        moved.append(Placed(i, order))
    return moved


def with_notes(batch: NumberedRequests, placed: Sequence[Placed]) -> Sequence[Placed]:
    """Return relevance order to requests for whose order no note can be written."""
    return _unordered(batch, placed, {place.context for place in placed if not batch.can_be_noted(place)})


def without_losses(batch: NumberedRequests, placed: Sequence[Placed], tree: PathTree | None) -> Sequence[Placed]:
    """Return relevance order to groups of requests that save less than their notes cost.

    A group is all requests that begin with the same block. O(blocks), and one depth-first order if some lose.
    """
    groups: dict[int, list[Placed]] = {}
    for place in placed:
        if place.order:
            groups.setdefault(place.order[0], []).append(place)
    losing: set[int] = set()
    for group in groups.values():
        written = sum(map(batch.notes, group))
        if written:
            as_they_were = [batch.in_relevance_order(place.context) for place in group]
            kept = _found_tokens(batch, [as_they_were[i] for i in depth_first(as_they_were)], tree)
            if _found_tokens(batch, [place.order for place in group], tree) - written <= kept:
                losing.update(place.context for place in group)
    return _unordered(batch, placed, losing)


def _unordered(batch: NumberedRequests, placed: Sequence[Placed], contexts: Collection[int]) -> Sequence[Placed]:
    """Return relevance order to some requests, by number."""
    if not contexts:
        return placed
    orders = [batch.in_relevance_order(i) if i in contexts else order for i, order in placed]
    return [Placed(placed[i].context, orders[i]) for i in depth_first(orders)]


def _found_tokens(batch: NumberedRequests, orders: Sequence[_Order], tree: PathTree | None) -> int:
    """Return the tokens that orders share with the one before them, or with the tree."""
    total = 0
    before: _Order = ()
    for order in orders:
        shared = 0
        for a, b in zip(before, order, strict=False):
            if a != b:
                break
            shared += batch.tokens[a]
        held = 0 if tree is None else tree.match_prefix([batch.keys[number] for number in order]).tokens
        total += max(shared, held)
        before = order
    return total


def served_plan(
    batch: NumberedRequests,
    placed: Sequence[Placed],
    served: Sequence[Served],
    paths: Sequence[_Order] | None,
    *,
    quick: bool = False,
) -> ScopePlan:
    """Return the plan with positions for blocks, and its upper bound.

    Args:
        batch: The requests.
        placed: Their plan, by block numbers.
        served: The part of each context that the cache will hold.
        paths: The resident path of each request, if the cache is not empty; see `resident_path`.
        quick: Compute only the upper bound that is cheap to compute.
    """
    held = None if paths is None else [_held_at_most(batch, i, path) for i, path in enumerate(paths)]
    bound = upper_bound(batch.contexts, batch.worth, held, quick=quick)
    return ScopePlan(
        [Placed(i, tuple([batch.positions[i][number] for number in order])) for i, order in placed],
        served,
        sum([batch.tokens_of(context) for context in batch.contexts]),
        Bound(max(bound.tokens, _saved(served)), bound.kind),  # a sample, or a search cut short, may be too low
    )


class NumberedRequests:
    """Requests with numbers for blocks, divided by where each block may stand."""

    def __init__(
        self, requests: Sequence[BatchRequest], capacity_tokens: int | None, note_tokens: NoteTokens = without_notes
    ) -> None:
        numbers: dict[bytes, int] = {}
        self.blocks: list[ContextBlock] = []
        """By number."""
        self.tokens: list[int] = []
        self.contexts: list[list[int]] = []
        self.positions: list[dict[int, int]] = []
        """For each request, the first position of each block in it."""
        # For each request: blocks pinned to the start, or all if its order is locked; runs that may move; and blocks
        # pinned to the end.
        self.heads: list[_Order] = []
        self.middles: list[list[int]] = []
        self.ends: list[_Order] = []
        self.runs: dict[int, _Order] = {}
        """The blocks of each run of several ones, by its number. Other numbers of `middles` are blocks."""
        self.joined: list[frozenset[int]] = []
        """For each request, the blocks that stay directly behind the one before them."""
        for request in requests:
            blocks, places = evidence_blocks(request.blocks)
            context: list[int] = []
            for block in blocks:
                number = numbers.setdefault(block.fingerprint, len(numbers))
                if number == len(self.tokens):
                    self.blocks.append(block)
                    self.tokens.append(block.tokens)
                context.append(number)
            self.contexts.append(context)
            self.positions.append({number: place[0] for number, place in zip(context, places, strict=True)})
            joined = joined_blocks(request.blocks, places)
            kept_at = ["start"] * len(blocks) if request.order_locked else pins(blocks, joined)
            pinned = list(zip(context, kept_at, strict=True))
            some = any(kept_at)
            self.heads.append(tuple([number for number, pin in pinned if pin == "start"]) if some else ())
            self.middles.append([number for number, pin in pinned if pin is None] if some else context)
            self.ends.append(tuple([number for number, pin in pinned if pin == "end"]) if some else ())
            self.joined.append(frozenset([context[i] for i in joined]))
        self.keys = list(numbers)
        """Each block's fingerprint."""
        self._number_runs()
        self.worth = self.tokens
        """The tokens that a cache saves if it holds the block: 0 if the block does not fit in it."""
        if capacity_tokens is not None:
            self.worth = [length if length <= capacity_tokens else 0 for length in self.tokens]
        self._capacity_tokens = capacity_tokens
        self._note_tokens = note_tokens

    def _number_runs(self) -> None:
        """Put a number in place of the blocks of each run. Requests share a run if they share all of its blocks."""
        numbers: dict[_Order, int] = {}
        for i, joined in enumerate(self.joined):
            middle = self.middles[i]
            if joined and middle:
                divided = runs_of(len(middle), {place for place, number in enumerate(middle) if number in joined})
                runs = [tuple(middle[run.start : run.stop]) for run in divided]
                self.middles[i] = [
                    run[0] if len(run) == 1 else numbers.setdefault(run, len(self.keys) + len(numbers)) for run in runs
                ]
        self.runs = {number: run for run, number in numbers.items()}
        self.tokens += [self.tokens_of(run) for run in numbers]

    def blocks_of(self, order: Sequence[int]) -> Sequence[int]:
        """Return the blocks of some runs."""
        if not self.runs:
            return order
        return [block for number in order for block in self.runs.get(number, (number,))]

    def in_relevance_order(self, i: int) -> _Order:
        """Return the blocks of a request in relevance order, pinned ones at their ends."""
        return (*self.heads[i], *self.blocks_of(self.middles[i]), *self.ends[i])

    def notes(self, placed: Placed) -> int:
        """Return the tokens of the note that a request needs; 0 if none can be written."""
        return self._priced(placed) or 0

    def can_be_noted(self, placed: Placed) -> bool:
        """Return True unless a request needs a note and none can be written."""
        return self._priced(placed) is not None

    def _priced(self, placed: Placed) -> int | None:
        positions = self.positions[placed.context]
        return self._note_tokens(placed.context, [positions[number] for number in placed.order])

    def tokens_of(self, numbers: Iterable[int]) -> int:
        """Return the tokens of some blocks together."""
        return sum([self.tokens[number] for number in numbers])

    def serve(
        self, placed: Sequence[Placed], before: Paths = (), resident: Sequence[int] | None = None
    ) -> list[Served]:
        """Run a plan through a cache of the given size; see `serve`."""
        return serve(placed, self.tokens, self._capacity_tokens, before, resident)


def _candidates(
    batch: NumberedRequests, paths: Sequence[_Order] | None, planner: BatchPlanner, progress: Progress
) -> Iterator[Sequence[Placed]]:
    """Yield a planner's plans: for an empty cache, and with resident paths in front."""
    yield _arranged(batch, batch.heads, batch.middles, planner, progress)
    if paths is not None:
        heads = _heads_with_paths(batch, paths)
        if heads != batch.heads:
            middles = [
                middle if head is own else [run for run in middle if batch.blocks_of([run])[0] not in placed]
                for middle, head, own, placed in zip(batch.middles, heads, batch.heads, map(set, heads), strict=True)
            ]
            yield _arranged(batch, heads, middles, planner, progress)


def _arranged(
    batch: NumberedRequests,
    heads: Sequence[_Order],
    middles: Sequence[Sequence[int]],
    planner: BatchPlanner,
    progress: Progress,
) -> list[Placed]:
    """Plan the blocks that may move, separately for the requests of each head."""
    behind: dict[_Order, list[int]] = {}
    for i, head in enumerate(heads):
        behind.setdefault(head, []).append(i)
    placed: list[Placed] = []
    name = type(planner).__name__
    for head, members in behind.items():
        arranged = planner.arrange([middles[i] for i in members], batch.worth, progress)
        places = {place for place, _ in arranged}
        if not len(arranged) == len(places) == len(members):
            got = f"got {len(arranged)} places, {len(places)} distinct"
            raise ValueError(f"{name} must place each of {len(members)} contexts once, {got}")
        for place, order in arranged:
            i = members[place]
            if len(order) != len(middles[i]) or set(order) != set(middles[i]):
                raise ValueError(
                    f"{name} must place all of a context's blocks, each once, got {order} for {middles[i]}"
                )
            placed.append(Placed(i, (*head, *batch.blocks_of(order), *batch.ends[i])))
    if len(behind) == 1:
        return placed
    return [placed[i] for i in depth_first([order for _, order in placed])]  # moved blocks may begin like a head


def _heads_with_paths(batch: NumberedRequests, paths: Sequence[_Order]) -> list[_Order]:
    """Return the fixed heads, replaced by the resident path where that pays."""
    holders = Counter([number for context in batch.contexts for number in context])
    heads: list[_Order] = []
    for head, path, context in zip(batch.heads, paths, batch.contexts, strict=True):
        shareable = sum([batch.tokens[number] for number in context if holders[number] > 1])
        held = sum([batch.tokens[number] for number in path])
        heads.append(path if len(path) > len(head) and held >= _PATH_WORTH * shareable else head)
    return heads


def resident_path(batch: NumberedRequests, i: int, tree: PathTree) -> _Order:
    """Return the resident path of most tokens that request `i` can begin with, to the end of its last run."""
    head, middle = batch.heads[i], batch.blocks_of(batch.middles[i])
    after = [batch.keys[number] for number in head]
    held = tree.match_prefix(after).blocks
    if held < len(head):
        return head[:held]
    keys = [batch.keys[number] for number in middle]
    joined = {place for place, number in enumerate(middle) if number in batch.joined[i]}
    path = tree.deepest_path(keys, after, joined=joined)
    while path and path[-1] + 1 in joined:
        path.append(path[-1] + 1)
    return (*head, *[middle[place] for place in path])


def _numbered_paths(batch: NumberedRequests, tree: PrefixTree[bytes]) -> Paths:
    numbers = {key: number for number, key in enumerate(batch.keys)}
    return [
        ([numbers.setdefault(key, len(numbers)) for key in path], lengths) for path, lengths in tree.resident_paths()
    ]


def _held_at_most(batch: NumberedRequests, i: int, path: _Order) -> _Order:
    """Return the path, and the blocks at the end if it holds all before them."""
    ends = batch.ends[i]
    return (*path, *ends) if ends and len(path) + len(ends) == len(batch.contexts[i]) else path


def serve(
    placed: Sequence[Placed],
    tokens: Sequence[int],
    capacity_tokens: int | None = None,
    before: Paths = (),
    resident: Sequence[int] | None = None,
) -> list[Served]:
    """Run a plan through a cache that evicts the least recent blocks, tails first.

    Args:
        placed: The plan.
        tokens: The length of every block, by number.
        capacity_tokens: The size of the cache; None for no bound.
        before: Paths that the cache holds before, oldest first: blocks and their lengths.
        resident: For each place of the plan, the first blocks that an unbounded cache holds before.

    Returns:
        One entry per context, in execution order.
    """
    fits = capacity_tokens is None or all(
        sum([tokens[block] for block in order]) <= capacity_tokens for _, order in placed
    )
    # In a depth-first plan, only the path to the current context must fit.
    found = _found_depth_first(placed) if fits and not before else None
    if found is None:
        cache = PrefixTree[int](capacity_tokens, 2 * (len(placed) + len(before)) + 1)
        for path, lengths in before:
            cache.insert(path, lengths)
        found = [cache.insert(order, [tokens[block] for block in order]).blocks for _, order in placed]
    if resident is not None:
        found = [max(blocks, held) for blocks, held in zip(found, resident, strict=True)]
    return _with_sources(placed, tokens, found)


def _found_depth_first(placed: Sequence[Placed]) -> list[int] | None:
    """Return the blocks that each context shares with the one before it.

    None if the order is not depth-first.
    """
    left: set[_Order] = set()
    found: list[int] = []
    before: _Order = ()
    for _, order in placed:
        shared = shared_blocks(before, order)
        if order[: shared + 1] in left:
            return None
        if len(before) > shared:
            left.add(before[: shared + 1])
        found.append(shared)
        before = order
    return found


def _with_sources(placed: Sequence[Placed], tokens: Sequence[int], found: Sequence[int]) -> list[Served]:
    """Add tokens, and the context that had computed the last block. O(all blocks)."""
    below: dict[tuple[int, int], int] = {}
    """The tree of all found prefixes: each node's child by block. The root is 0."""
    for (_, order), blocks in zip(placed, found, strict=True):
        node = 0
        for block in order[:blocks]:
            node = below.setdefault((node, block), len(below) + 1)
    computed: dict[int, int] = {}
    served: list[Served] = []
    for (context, order), blocks in zip(placed, found, strict=True):
        node, warmed_by = 0, None
        for place, block in enumerate(order):
            child = below.get((node, block))
            if child is None:
                break  # no context finds the blocks from here on
            node = child
            if place >= blocks:
                computed[node] = context
            elif place == blocks - 1:
                warmed_by = computed.get(node)
        served.append(Served(blocks, sum([tokens[block] for block in order[:blocks]]), warmed_by))
    return served


def _saved(served: Sequence[Served]) -> int:
    return sum([found.tokens for found in served])


def bound_of_all(bounds: Sequence[Bound]) -> Bound:
    """Return the bound of several scopes together."""
    tightest_first = get_args(BoundKind)
    loosest = max((tightest_first.index(bound.kind) for bound in bounds), default=0)
    return Bound(sum(bound.tokens for bound in bounds), tightest_first[loosest])
