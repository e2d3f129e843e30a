"""The plan of one scope's requests, and the tokens that it saves with a given prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, get_args

from warmprefix.batch.bounds import Bound, upper_bound
from warmprefix.batch.plan import BatchRequest, BoundKind
from warmprefix.batch.planners import BatchPlanner, Placed, Progress, depth_first, no_progress
from warmprefix.blocks import evidence_blocks
from warmprefix.prefix.tree import PrefixMatch, PrefixTree

__all__ = ["ResidentTree", "ScopePlan", "Served", "bound_of_all", "plan_scope", "serve", "serve_unbounded"]

_PATH_WORTH = 0.4
"""The least part of its shareable tokens that a request's resident path must hold to come first. In windows of 64
requests 0.3 to 0.5 did equally well; 0.2 and 0.7 did worse."""


class ResidentTree(Protocol):
    """The predicted content of the engine's cache; see `PrefixTree`."""

    @property
    def resident_tokens(self) -> int: ...
    def match_prefix(self, keys: Sequence[bytes]) -> PrefixMatch: ...
    def deepest_path(self, keys: Sequence[bytes], after: Sequence[bytes] = ()) -> list[int]: ...
    def resident_paths(self) -> Iterator[tuple[list[bytes], list[int]]]: ...


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


def plan_scope(
    requests: Sequence[BatchRequest],
    planners: Sequence[BatchPlanner],
    tree: ResidentTree | None,
    capacity_tokens: int | None,
    progress: Progress = no_progress,
    *,
    quick: bool = False,
) -> ScopePlan:
    """Plan requests that may share a prefix.

    Args:
        requests: In the caller's order.
        planners: Arrange the blocks that may move; the first plan that saves most is used.
        tree: The predicted content of the engine's cache; None if it is empty. It is not changed.
        capacity_tokens: The size of the cache; None for no bound.
        progress: Receives the progress of the planners.
        quick: Compute only the upper bound that is cheap to compute.

    Raises:
        ValueError: A planner omits a context or a block, or returns one twice.
    """
    batch = _NumberedRequests(requests, capacity_tokens)
    cache = _Cache(batch, tree if tree is not None and tree.resident_tokens else None, capacity_tokens)
    paths = None
    if cache.tree is not None:
        paths = [_resident_path(batch, i, cache.tree) for i in range(len(requests))]
    best: tuple[Sequence[Placed], Sequence[Served]] | None = None
    for planner in planners:
        for placed in _candidates(batch, paths, planner, progress, quick):
            found = cache.serve(placed)
            if best is None or _saved(found) > _saved(best[1]):
                best = placed, found
    assert best is not None
    placed, served = best
    held = None if paths is None else [_held_at_most(batch, i, path) for i, path in enumerate(paths)]
    bound = upper_bound(batch.contexts, batch.worth, held, quick=quick)
    return ScopePlan(
        [Placed(i, tuple([batch.positions[i][number] for number in order])) for i, order in placed],
        served,
        sum([batch.tokens[number] for context in batch.contexts for number in context]),
        Bound(max(bound.tokens, _saved(served)), bound.kind),  # a sample, or a search cut short, may be too low
    )


class _NumberedRequests:
    """The requests with numbers for blocks, and each request's blocks divided by where they may stand."""

    def __init__(self, requests: Sequence[BatchRequest], capacity_tokens: int | None) -> None:
        numbers: dict[bytes, int] = {}
        self.tokens: list[int] = []
        self.contexts: list[list[int]] = []
        self.positions: list[dict[int, int]] = []
        """For each request, the first position of each block in it."""
        self.heads: list[tuple[int, ...]] = []
        """For each request, blocks that stay in front: those pinned to the start, or all if the order is locked."""
        self.middles: list[list[int]] = []
        """For each request, blocks that may move."""
        self.ends: list[tuple[int, ...]] = []
        """For each request, blocks pinned to the end."""
        for request in requests:
            blocks, places = evidence_blocks(request.blocks)
            context: list[int] = []
            for block in blocks:
                number = numbers.setdefault(block.fingerprint, len(numbers))
                if number == len(self.tokens):
                    self.tokens.append(block.tokens)
                context.append(number)
            self.contexts.append(context)
            self.positions.append({number: place[0] for number, place in zip(context, places, strict=True)})
            pins = list(
                zip(context, ["start" if request.order_locked else block.pinned for block in blocks], strict=True)
            )
            some = any(pin for _, pin in pins)
            self.heads.append(tuple([number for number, pin in pins if pin == "start"]) if some else ())
            self.middles.append([number for number, pin in pins if pin is None] if some else context)
            self.ends.append(tuple([number for number, pin in pins if pin == "end"]) if some else ())
        self.keys = list(numbers)
        """Each block's fingerprint."""
        self.worth = self.tokens
        """The tokens that a cache saves if it holds the block: 0 if it is too small for it."""
        if capacity_tokens is not None:
            self.worth = [length if length <= capacity_tokens else 0 for length in self.tokens]


def _candidates(
    batch: _NumberedRequests,
    paths: Sequence[tuple[int, ...]] | None,
    planner: BatchPlanner,
    progress: Progress,
    quick: bool,
) -> Iterator[Sequence[Placed]]:
    """Yield a planner's plans: for an empty cache, and with the resident paths of some requests in front."""
    if paths is None or not quick:
        yield _arranged(batch, batch.heads, batch.middles, planner, progress)
    if paths is not None:
        heads = _heads_with_paths(batch, paths)
        if heads != batch.heads or quick:
            middles = [
                middle if head is own else _without(middle, head)
                for middle, head, own in zip(batch.middles, heads, batch.heads, strict=True)
            ]
            yield _arranged(batch, heads, middles, planner, progress)


def _arranged(
    batch: _NumberedRequests,
    heads: Sequence[tuple[int, ...]],
    middles: Sequence[Sequence[int]],
    planner: BatchPlanner,
    progress: Progress,
) -> list[Placed]:
    """Plan the blocks that may move, separately for the requests of each head."""
    behind: dict[tuple[int, ...], list[int]] = {}
    for i, head in enumerate(heads):
        behind.setdefault(head, []).append(i)
    placed: list[Placed] = []
    name = type(planner).__name__
    for head, members in behind.items():
        arranged = planner.arrange([middles[i] for i in members], batch.worth, progress)
        places = {place for place, _ in arranged}
        if not len(arranged) == len(places) == len(members):
            raise ValueError(
                f"{name} must place each of {len(members)} contexts once, got {len(arranged)} places of {len(places)}"
            )
        for place, order in arranged:
            i = members[place]
            if len(order) != len(middles[i]) or set(order) != set(middles[i]):
                raise ValueError(
                    f"{name} must place all of a context's blocks, each once, got {order} for {middles[i]}"
                )
            placed.append(Placed(i, (*head, *order, *batch.ends[i])))
    if len(behind) == 1:
        return placed
    return [placed[i] for i in depth_first([order for _, order in placed])]  # moved blocks may begin like a head


def _without(middle: list[int], head: Sequence[int]) -> list[int]:
    placed = set(head)
    return [number for number in middle if number not in placed]


def _heads_with_paths(batch: _NumberedRequests, paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the fixed heads, extended by a resident path if it holds much of what the batch could share."""
    holders = Counter([number for context in batch.contexts for number in context])
    heads: list[tuple[int, ...]] = []
    for head, path, context in zip(batch.heads, paths, batch.contexts, strict=True):
        shareable = sum([batch.tokens[number] for number in context if holders[number] > 1])
        held = sum([batch.tokens[number] for number in path])
        heads.append(path if len(path) > len(head) and held >= _PATH_WORTH * shareable else head)
    return heads


def _resident_path(batch: _NumberedRequests, i: int, tree: ResidentTree) -> tuple[int, ...]:
    """Return the resident path of most tokens that request `i` can begin with."""
    head, middle = batch.heads[i], batch.middles[i]
    after = [batch.keys[number] for number in head]
    held = tree.match_prefix(after).blocks
    if held < len(head):
        return head[:held]
    path = tree.deepest_path([batch.keys[number] for number in middle], after)
    return (*head, *[middle[place] for place in path])


def _held_at_most(batch: _NumberedRequests, i: int, path: tuple[int, ...]) -> tuple[int, ...]:
    """Return the path, and the blocks pinned behind it if it holds all blocks before them."""
    ends = batch.ends[i]
    return (*path, *ends) if ends and len(path) + len(ends) == len(batch.contexts[i]) else path


class _Cache:
    """The cache as the batch will find it."""

    def __init__(self, batch: _NumberedRequests, tree: ResidentTree | None, capacity_tokens: int | None) -> None:
        self.tree = tree
        self._batch = batch
        self._capacity_tokens = capacity_tokens
        self._before: list[tuple[list[int], Sequence[int]]] = []
        if tree is not None and capacity_tokens is not None:
            numbers = {key: number for number, key in enumerate(batch.keys)}
            self._before = [
                ([numbers.setdefault(key, len(numbers)) for key in path], lengths)
                for path, lengths in tree.resident_paths()
            ]

    def serve(self, placed: Sequence[Placed]) -> list[Served]:
        batch, tree = self._batch, self.tree
        if tree is None or self._capacity_tokens is not None:
            return serve(placed, batch.tokens, self._capacity_tokens, self._before)
        keys = batch.keys
        resident = [tree.match_prefix([keys[number] for number in order]).blocks for _, order in placed]
        return serve_unbounded(placed, batch.tokens, resident)


def serve(
    placed: Sequence[Placed],
    tokens: Sequence[int],
    capacity_tokens: int | None,
    before: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[Served]:
    """Run a plan through a cache that evicts the least recently used blocks, tails first.

    Args:
        placed: The plan.
        tokens: The length of every block, by number.
        capacity_tokens: The size of the cache; None for no bound.
        before: Paths that the cache holds before, oldest first: blocks and their lengths.

    Returns:
        One entry per context, in execution order.
    """
    found = None
    if not before and (
        capacity_tokens is None
        or all(sum([tokens[block] for block in order]) <= capacity_tokens for _, order in placed)
    ):
        found = _found_depth_first(placed)  # depth-first, only the path to the current context must fit
    found = found or _found_in_tree(placed, tokens, capacity_tokens, before)
    return _with_sources(placed, tokens, found)


def serve_unbounded(placed: Sequence[Placed], tokens: Sequence[int], resident: Sequence[int]) -> list[Served]:
    """Run a plan through an unbounded cache that holds the first `resident[i]` blocks of context i before."""
    found = _found_depth_first(placed) or _found_in_tree(placed, tokens, None, ())
    return _with_sources(placed, tokens, [max(blocks, held) for blocks, held in zip(found, resident, strict=True)])


def _found_in_tree(
    placed: Sequence[Placed],
    tokens: Sequence[int],
    capacity_tokens: int | None,
    before: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[int]:
    cache = PrefixTree[int](capacity_tokens, 2 * (len(placed) + len(before)) + 1)
    for path, lengths in before:
        cache.insert(path, lengths)
    return [cache.insert(order, [tokens[block] for block in order]).blocks for _, order in placed]


def _found_depth_first(placed: Sequence[Placed]) -> list[int] | None:
    """Return the blocks that each context shares with the one before it; None if the order is not depth-first."""
    left: set[tuple[int, ...]] = set()
    found: list[int] = []
    before: tuple[int, ...] = ()
    for _, order in placed:
        shared = 0
        for a, b in zip(before, order, strict=False):
            if a != b:
                break
            shared += 1
        if order[: shared + 1] in left:
            return None
        if len(before) > shared:
            left.add(before[: shared + 1])
        found.append(shared)
        before = order
    return found


def _with_sources(placed: Sequence[Placed], tokens: Sequence[int], found: Sequence[int]) -> list[Served]:
    """Add the tokens of the blocks found, and the context that had computed the last. O(blocks of all contexts)."""
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
