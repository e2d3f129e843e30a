"""The most tokens that any plan of a batch could save.

In any plan a request finds at most the tokens that it shares with one earlier request, or with the cache as it was
before. These pairs form a forest. So no plan saves more than a maximum spanning forest of the graph in which an edge
weighs the tokens that two requests share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from warmprefix.batch.plan import BoundKind
from warmprefix_kernels.distinct_sets import DistinctSets
from warmprefix_kernels.machine import COMPILING_PAYS_FROM, index_of, machine, room_for, sets_of

__all__ = ["Bound", "upper_bound"]

_FOREST_STEPS = 200_000_000
"""Most steps for a spanning forest with numba, about 10,000 requests of 15 blocks. Without numba the limit is
`COMPILING_PAYS_FROM`."""
_PARTNER_STEPS = 500_000_000
"""Most steps for the best partners of all requests with numba; without numba as above."""
_LEAST_SAMPLE = 500


class Bound(NamedTuple):
    """An upper bound, and how it was computed."""

    tokens: int
    """Most tokens that any plan could save."""
    kind: BoundKind
    """`spanning forest` is the maximum spanning forest. `best partners` is never below it: every request counts with
    what it shares with its best partner, although two requests cannot both come second. `sampled` estimates that from
    some of the requests, plus three standard errors. `every block once` counts all tokens except one prefill of each
    block that the cache lacks."""


def upper_bound(
    contexts: Sequence[Sequence[int]],
    tokens: Sequence[int],
    resident: Sequence[Sequence[int]] | None = None,
    *,
    quick: bool = False,
) -> Bound:
    """Return the most tokens that any plan could save, the lowest of several bounds.

    Args:
        contexts: Distinct block numbers each.
        tokens: Of each block.
        resident: For each context, the blocks of most tokens that the cache holds as a prefix; None if it is empty.
        quick: Use only the bound `every block once`. O(blocks of all contexts).
    """
    held = set() if resident is None else {block for path in resident for block in path}
    once = sum([tokens[block] for block in {block for context in contexts for block in context} - held])
    most = sum([tokens[block] for context in contexts for block in context]) - once
    if quick:
        return Bound(most, "every block once")
    batch = DistinctSets(contexts, tokens)
    found = [0] * len(batch.sets)
    if resident is not None:
        found = [sum([tokens[block] for block in resident[same[0]]]) for same in batch.members]
    bound = _of_distinct(batch, found)
    bound = bound._replace(tokens=bound.tokens + batch.repeated_tokens)
    return bound if bound.tokens <= most else Bound(most, "every block once")


def _of_distinct(batch: DistinctSets, found: list[int]) -> Bound:
    n = len(batch.sets)
    if n == 0:
        return Bound(0, "spanning forest")
    steps = batch.work + n * n
    machine_ = machine(steps, batch.total_tokens + sum(found))
    sets = sets_of(batch.sets, machine_)
    index = index_of(sets, machine_.ints(batch.tokens), machine_)
    room = room_for(n, 0, 0, machine_)
    if steps <= (_FOREST_STEPS if machine_.compiled else COMPILING_PAYS_FROM):
        weight = machine_.run.spanning_forest(machine_.ints(found), machine_.zeros(n), sets, index, room)
        return Bound(int(weight), "spanning forest")
    affordable = _PARTNER_STEPS if machine_.compiled else COMPILING_PAYS_FROM
    step = max(min(math.ceil(batch.work / affordable), n // _LEAST_SAMPLE), 1)
    best = machine_.ints([sum([batch.tokens[block] for block in blocks]) for blocks in batch.sets])
    machine_.run.best_overlaps(0, n, step, best, sets, index, room)
    chosen = [max(int(best[x]), found[x]) for x in range(0, n, step)]
    if step == 1:
        first = 0 if any(found) else max(chosen)  # in an empty cache the first request finds nothing
        return Bound(sum(chosen) - first, "best partners")
    error = stdev(chosen) / math.sqrt(len(chosen))
    return Bound(math.ceil(n * (fmean(chosen) + 3 * error)), "sampled")
