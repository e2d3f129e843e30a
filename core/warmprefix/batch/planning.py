"""Plans the requests of one scope: numbers for blocks, pins, what the cache holds already, and what a plan is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, get_args

from warmprefix.batch.base import BatchPlanner, Placed, Progress, no_progress
from warmprefix.batch.bounds import Bound, BoundKind, upper_bound
from warmprefix.batch.execution import depth_first
from warmprefix.batch.plan import BatchRequest
from warmprefix.batch.served import Served, serve, serve_unbounded
from warmprefix.blocks import ContextBlock, evidence_blocks
from warmprefix.prefix.tree import PrefixMatch

__all__ = ["ResidentPaths", "ScopePlan", "bound_of_all", "plan_scope"]

_TIGHTEST_FIRST = get_args(BoundKind)


_PATH_WORTH = 0.4
"""The part of its shareable tokens that a request's resident path must hold to come first: tried in windows of 64
requests, where 0.3 to 0.5 do alike, and 0.2 and 0.7 worse."""


class ResidentPaths(Protocol):
    """What the engine's cache is predicted to hold, as `PrefixTree` tells it."""

    @property
    def resident_tokens(self) -> int: ...
    def match_prefix(self, keys: Sequence[bytes]) -> PrefixMatch: ...
    def deepest_path(self, keys: Sequence[bytes], after: Sequence[bytes] = ()) -> list[int]: ...
    def resident_paths(self) -> Iterator[tuple[list[bytes], list[int]]]: ...


class ScopePlan(NamedTuple):
    """The plan of one scope's requests."""

    placed: Sequence[Placed]
    """By the requests' numbers and their blocks' positions, in execution order."""
    served: Sequence[Served]
    total_tokens: int
    bound: Bound


class _Requests:
    """The requests with numbers for blocks; a request's own blocks are divided by where they may stand."""

    def __init__(self, requests: Sequence[BatchRequest], capacity_tokens: int | None) -> None:
        numbers: dict[bytes, int] = {}
        self.tokens: list[int] = []
        self.contexts: list[list[int]] = []
        self.positions: list[dict[int, int]] = []
        """For each request, where it lists each block first."""
        self.heads: list[tuple[int, ...]] = []
        self.middles: list[list[int]] = []
        self.ends: list[tuple[int, ...]] = []
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
            self._divide(request, blocks, context)
        self.keys = list(numbers)
        """Each block's fingerprint."""
        self.worth = self.tokens
        """What a cache that holds the block saves: nothing, if it can't hold it."""
        if capacity_tokens is not None:
            self.worth = [length if length <= capacity_tokens else 0 for length in self.tokens]

    def _divide(self, request: BatchRequest, blocks: Sequence[ContextBlock], context: list[int]) -> None:
        if request.order_locked:
            self.heads.append(tuple(context))
            self.middles.append([])
            self.ends.append(())
        elif all(block.pinned is None for block in blocks):
            self.heads.append(())
            self.middles.append(context)
            self.ends.append(())
        else:
            pins = [block.pinned for block in blocks]
            self.heads.append(tuple([number for number, pin in zip(context, pins, strict=True) if pin == "start"]))
            self.middles.append([number for number, pin in zip(context, pins, strict=True) if pin is None])
            self.ends.append(tuple([number for number, pin in zip(context, pins, strict=True) if pin == "end"]))


def plan_scope(
    requests: Sequence[BatchRequest],
    planners: Sequence[BatchPlanner],
    tree: ResidentPaths | None,
    capacity_tokens: int | None,
    progress: Progress = no_progress,
    *,
    quick: bool = False,
) -> ScopePlan:
    """Plan requests that may share a prefix.

    Args:
        requests: In the caller's order.
        planners: Arrange the blocks that are free to move; the first whose plan saves most is followed.
        tree: What the engine's cache is predicted to hold; None if nothing. It is not changed.
        capacity_tokens: The size of the cache; None for no bound.
        progress: Is told how far it is.
        quick: Be content with the bound that is quick to tell.

    Raises:
        ValueError: A planner leaves out a context or a block, or gives one twice.
    """
    batch = _Requests(requests, capacity_tokens)
    cache = _Cache(batch, tree if tree is not None and tree.resident_tokens else None, capacity_tokens)
    paths = None
    if cache.tree is not None:
        paths = [_resident_path(batch, i, cache.tree) for i in range(len(requests))]
    best: tuple[Sequence[Placed], Sequence[Served]] | None = None
    for planner in planners:
        for placed, served in _candidates(batch, cache, paths, planner, progress, quick):
            if best is None or _saved(served) > _saved(best[1]):
                best = placed, served
    assert best is not None
    placed, served = best
    held = None if paths is None else [_held_at_most(batch, i, path) for i, path in enumerate(paths)]
    bound = upper_bound(batch.contexts, batch.worth, held, quick=quick)
    return ScopePlan(
        [Placed(i, tuple([batch.positions[i][number] for number in order])) for i, order in placed],
        served,
        sum([batch.tokens[number] for context in batch.contexts for number in context]),
        Bound(max(bound.tokens, _saved(served)), bound.kind),  # a sample, or a search broken off, may fall short
    )


def _arranged(
    batch: _Requests,
    heads: Sequence[tuple[int, ...]],
    middles: Sequence[Sequence[int]],
    planner: BatchPlanner,
    progress: Progress,
) -> list[Placed]:
    """Plan what may move, separately for the requests behind each head."""
    behind: dict[tuple[int, ...], list[int]] = {}
    for i, head in enumerate(heads):
        behind.setdefault(head, []).append(i)
    placed: list[Placed] = []
    for head, members in behind.items():
        arranged = planner.arrange([middles[i] for i in members], batch.worth, progress)
        if len(arranged) != len(members) or len({place for place, _ in arranged}) != len(members):
            raise ValueError(f"{type(planner).__name__} must place every context once")
        for place, order in arranged:
            i = members[place]
            if len(order) != len(middles[i]) or set(order) != set(middles[i]):
                raise ValueError(f"{type(planner).__name__} must place all of a context's blocks, each once")
            placed.append(Placed(i, (*head, *order, *batch.ends[i])))
    if len(behind) == 1:
        return placed
    return [placed[i] for i in depth_first([order for _, order in placed])]  # what moved may begin as a head does


def _candidates(
    batch: _Requests,
    cache: _Cache,
    paths: Sequence[tuple[int, ...]] | None,
    planner: BatchPlanner,
    progress: Progress,
    quick: bool,
) -> Iterator[tuple[Sequence[Placed], Sequence[Served]]]:
    """A planner's plans: as if nothing were cached; and with what is cached of some requests in front of them."""
    if paths is None or not quick:
        placed = _arranged(batch, batch.heads, batch.middles, planner, progress)
        yield placed, cache.serve(placed)
    if paths is not None:
        heads = _heads_with_paths(batch, paths)
        if heads != batch.heads or quick:
            middles = [
                middle if head is own else _without(middle, head)
                for middle, head, own in zip(batch.middles, heads, batch.heads, strict=True)
            ]
            placed = _arranged(batch, heads, middles, planner, progress)
            yield placed, cache.serve(placed)


def _without(middle: list[int], head: Sequence[int]) -> list[int]:
    placed = set(head)
    return [number for number in middle if number not in placed]


def _heads_with_paths(batch: _Requests, paths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The fixed beginnings, prolonged by a resident path where that holds much of what the batch could share anyway."""
    holders = Counter([number for context in batch.contexts for number in context])
    heads: list[tuple[int, ...]] = []
    for head, path, context in zip(batch.heads, paths, batch.contexts, strict=True):
        shareable = sum([batch.tokens[number] for number in context if holders[number] > 1])
        held = sum([batch.tokens[number] for number in path])
        heads.append(path if len(path) > len(head) and held >= _PATH_WORTH * shareable else head)
    return heads


def _resident_path(batch: _Requests, i: int, tree: ResidentPaths) -> tuple[int, ...]:
    """What the cache holds most of as a prefix of the request, in the order in which it does."""
    head, middle = batch.heads[i], batch.middles[i]
    after = [batch.keys[number] for number in head]
    held = tree.match_prefix(after).blocks
    if held < len(head):
        return head[:held]
    path = tree.deepest_path([batch.keys[number] for number in middle], after)
    return (*head, *[middle[place] for place in path])


def _held_at_most(batch: _Requests, i: int, path: tuple[int, ...]) -> tuple[int, ...]:
    """The path, and what is pinned behind it if it holds all that comes before."""
    ends = batch.ends[i]
    return (*path, *ends) if ends and len(path) + len(ends) == len(batch.contexts[i]) else path


class _Cache:
    """The cache that a plan will meet."""

    def __init__(self, batch: _Requests, tree: ResidentPaths | None, capacity_tokens: int | None) -> None:
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


def _saved(served: Sequence[Served]) -> int:
    return sum([found.tokens for found in served])


def bound_of_all(bounds: Sequence[Bound]) -> Bound:
    """The bound of several scopes together."""
    loosest = max((_TIGHTEST_FIRST.index(bound.kind) for bound in bounds), default=0)
    return Bound(sum(bound.tokens for bound in bounds), _TIGHTEST_FIRST[loosest])
