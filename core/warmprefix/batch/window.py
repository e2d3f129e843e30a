"""The plan of requests that wait at one time, from what their scope has learned."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from warmprefix.batch.plan import BatchRequest
from warmprefix.batch.planners import Placed, depth_first
from warmprefix.batch.scope_plan import (
    NoteTokens,
    NumberedRequests,
    PathTree,
    ScopePlan,
    resident_path,
    served_plan,
    with_notes,
    without_losses,
    without_notes,
)
from warmprefix.blocks import ContextBlock

__all__ = ["MOST_REQUESTS", "PolicyOrder", "plan_window"]

MOST_REQUESTS = 1_000
"""With more requests that share much, comparing all pairs takes longer than `MergePlanner` takes at least."""

_LEAST_GAIN = 0.05
"""The least part of the shortest request that a merge must gain. Less than that now is worth less than what the
policy's own order saves later requests. With 0 or 0.1 some small windows save less; with 0.2 most windows do."""

PolicyOrder = Callable[[Sequence[ContextBlock], Sequence[bytes], Collection[int]], Sequence[int]]
"""Returns the policy's order of blocks behind a path, given by fingerprints, as indices of the blocks.

The last argument lists the blocks that stay directly behind the one before them."""


def plan_window(
    requests: Sequence[BatchRequest], tree: PathTree, order: PolicyOrder, note_tokens: NoteTokens = without_notes
) -> ScopePlan:
    """Plan requests of one scope that wait at one time.

    Requests are merged, those first that gain most by it, as long as they save more together than each saves by its own
    resident path. The policy orders the blocks that merged requests share, and each request's other blocks behind them.
    So a request that shares nothing with the window is ordered as if it came alone. Groups whose order does not pay
    for their notes keep relevance order. The requests with the longest
    resident paths run first, before the cache evicts these paths. O(n * n) merges and 2 * n calls of the policy, for n
    requests.

    Args:
        requests: In the caller's order.
        tree: The predicted content of the engine's cache.
        order: The scope's ordering policy.
        note_tokens: Returns the tokens of notes.
    """
    window = NumberedRequests(requests, None, note_tokens)
    paths = [resident_path(window, i, tree) for i in range(len(requests))]
    behind: dict[tuple[int, ...], list[int]] = {}
    for i, head in enumerate(window.heads):
        behind.setdefault(head, []).append(i)
    roots = [
        (head, cluster)
        for head, members in behind.items()
        for cluster in _merged(_single_clusters(window, members, paths), window.tokens)
    ]
    roots.sort(key=lambda root: (-root[1].held_tokens, root[1].earliest))
    placed = [each for head, cluster in roots for each in _laid_out(window, cluster, head, order)]
    placed = [placed[i] for i in depth_first([blocks for _, blocks in placed])]
    placed = list(without_losses(window, with_notes(window, placed), tree))
    held = [tree.match_prefix([window.keys[number] for number in blocks]).blocks for _, blocks in placed]
    return served_plan(window, placed, window.serve(placed, resident=held), paths, quick=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Cluster:
    """Requests that run one after another and begin with the same blocks."""

    blocks: frozenset[int]
    """The blocks and runs that all of them have, without pinned ones."""
    path: tuple[int, ...]
    """The resident path that they can begin with, of most tokens."""
    held_tokens: int
    """Tokens of this path."""
    least_tokens: int
    """Tokens of the shortest request."""
    earliest: int
    """The first of the requests, in the caller's order."""
    members: Sequence[int] = ()
    """The requests of a single cluster, which have the same blocks; of a merged one, none."""
    parts: tuple[_Cluster, ...] = ()
    """The two clusters that were merged, the one with the earliest request first."""


def _single_clusters(
    window: NumberedRequests, members: Sequence[int], paths: Sequence[Sequence[int]]
) -> list[_Cluster]:
    """Return one cluster for each distinct set of blocks, of requests with the same head."""
    same: dict[frozenset[int], list[int]] = {}
    for i in members:
        same.setdefault(frozenset(window.middles[i]), []).append(i)
    clusters: list[_Cluster] = []
    for blocks, own in same.items():
        path = tuple(paths[own[0]][len(window.heads[own[0]]) :])
        if window.runs:
            at = {window.blocks_of([run])[0]: run for run in blocks}
            path = tuple([at[block] for block in path if block in at])
        held, tokens = window.tokens_of(path), window.tokens_of(blocks)
        clusters.append(_Cluster(blocks, path, held, tokens, own[0], own))
    return clusters


def _merged(clusters: list[_Cluster], tokens: Sequence[int]) -> list[_Cluster]:
    """Return clusters of which no two gain by being merged."""
    everything: list[_Cluster | None] = []
    holders: dict[int, set[int]] = {}
    merges: list[tuple[float, int, int]] = []

    def add(cluster: _Cluster) -> None:
        number = len(everything)
        partners = set[int]().union(*[holders.setdefault(block, set()) for block in cluster.blocks])
        for partner in partners:
            other = everything[partner]
            assert other is not None
            gain = _gain(other, cluster, tokens)
            if gain > 0:
                heapq.heappush(merges, (-gain, partner, number))
        for block in cluster.blocks:
            holders[block].add(number)
        everything.append(cluster)

    for cluster in clusters:
        add(cluster)
    while merges:
        _, x, y = heapq.heappop(merges)
        first, second = everything[x], everything[y]
        if first is None or second is None:
            continue  # one of them was merged with another cluster
        for number, cluster in ((x, first), (y, second)):
            everything[number] = None
            for block in cluster.blocks:
                holders[block].discard(number)
        add(_merge(first, second, tokens))
    return [cluster for cluster in everything if cluster is not None]


def _gain(first: _Cluster, second: _Cluster, tokens: Sequence[int]) -> float:
    """Return the tokens that a merge saves, less the least that it must gain."""
    common = first.blocks & second.blocks
    gain = sum([tokens[block] for block in common]) - _LEAST_GAIN * min(first.least_tokens, second.least_tokens)
    if not first.held_tokens and not second.held_tokens:
        return gain
    # Of the two resident paths, at most the longer one is left.
    if gain <= min(first.held_tokens, second.held_tokens):
        return 0.0
    held = max(_held_within(first, common, tokens), _held_within(second, common, tokens))
    return gain + held - first.held_tokens - second.held_tokens


def _held_within(cluster: _Cluster, blocks: frozenset[int], tokens: Sequence[int]) -> int:
    """Return the tokens of a cluster's resident path as far as it is among `blocks`."""
    held = 0
    for block in cluster.path:
        if block not in blocks:
            break
        held += tokens[block]
    return held


def _merge(first: _Cluster, second: _Cluster, tokens: Sequence[int]) -> _Cluster:
    common = first.blocks & second.blocks
    held, path = max(
        (_held_within(each, common, tokens), tuple(takewhile(common.__contains__, each.path)))
        for each in (first, second)
    )
    parts = (first, second) if first.earliest < second.earliest else (second, first)
    least = min(first.least_tokens, second.least_tokens)
    return _Cluster(common, path, held, least, parts[0].earliest, parts=parts)


def _laid_out(window: NumberedRequests, root: _Cluster, head: tuple[int, ...], order: PolicyOrder) -> Iterator[Placed]:
    """Yield the requests of a cluster, each after `head` and the blocks that it shares with others."""
    stack = [(root, head)]
    while stack:
        cluster, prefix = stack.pop()
        before = set(prefix)
        runs = [run for run in window.middles[cluster.earliest] if run in cluster.blocks]
        added = [block for block in window.blocks_of(runs) if block not in before]
        if len(added) > 1:
            views = [window.blocks[block] for block in added]
            joined = {i for i, block in enumerate(added) if block in window.joined[cluster.earliest]}
            added = [added[i] for i in order(views, [window.keys[block] for block in prefix], joined)]
        prefix = (*prefix, *added)
        yield from [Placed(i, (*prefix, *window.ends[i])) for i in cluster.members]
        stack += [(part, prefix) for part in reversed(cluster.parts)]
