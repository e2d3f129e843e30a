"""Parts of a batch plan, one for each replica of a model."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from warmprefix.batch import BatchPlan, Placed, PlannedRequest, planned_primes, serve
from warmprefix.errors import check_count
from warmprefix.plan import Scope

__all__ = ["REQUEST_TOKENS", "cut_places", "part_of", "shards_of"]

REQUEST_TOKENS = 256
"""Cost of a request in addition to its context: its question and answer, in tokens of prefill."""

_SLACK = 0.05
"""The share of one part's cost by which each of its ends may move to a cheaper place."""


def shards_of(plan: BatchPlan, replicas: int) -> tuple[BatchPlan, ...]:
    """Return one plan for each replica of the model, with about equal costs.

    The execution order is cut, so that requests with a common beginning stay together; only what the requests around a
    cut share is computed twice. Each part has its requests in execution order, and counts `saved_tokens` from an empty
    cache of `capacity_tokens`; its other fields are those of the whole plan. Parts may be empty if there are fewer
    requests than replicas. Commit each request once, from a part or from the whole plan.

    A part costs the tokens that it computes, with `REQUEST_TOKENS` for each request. Costs differ by about 10 %, or by
    one request that is longer. O(all blocks).

    Args:
        plan: The plan of all requests.
        replicas: Number of replicas, each with a prefix cache of its own.

    Raises:
        TypeError: `replicas` is no int.
        ValueError: `replicas` is below 1.
    """
    check_count("replicas", replicas)
    requests = plan.requests
    costs = [_context_tokens(planned) - planned.saved_tokens + REQUEST_TOKENS for planned in requests]
    cuts = cut_places(costs, [planned.saved_tokens for planned in requests], replicas)
    return tuple([part_of(plan, requests[begin:end]) for begin, end in pairwise([0, *cuts, len(requests)])])


def _context_tokens(planned: PlannedRequest) -> int:
    blocks = planned.request.blocks
    return sum([blocks[position].tokens for position in planned.order])


def cut_places(costs: Sequence[int], lost: Sequence[int], parts: int) -> list[int]:
    """Return the places of the first requests of all parts but the first.

    A cut may stand up to `_SLACK` of a part's cost next to the place that makes the parts equal, where the first
    request behind it loses least.

    Args:
        costs: What each request computes.
        lost: What each request computes in addition if it is the first one of its part.
        parts: Number of parts.
    """
    if not costs:
        return [0] * (parts - 1)
    ends = list(accumulate(costs))
    share = ends[-1] / parts
    lost_behind = [*lost[1:], 0]  # nothing stands behind the last request
    cuts: list[int] = []
    for number in range(1, parts):
        target = number * share
        first = bisect_left(ends, target - _SLACK * share) + 1
        last = bisect_right(ends, target + _SLACK * share) + 1
        nearest = min(bisect_left(ends, target) + 1, len(ends))
        places = [*range(first, min(last, len(ends))), nearest]
        best = min(places, key=lambda at: (lost_behind[at - 1], abs(ends[at - 1] - target)))
        cuts.append(max([best, *cuts[-1:]]))
    return cuts


def part_of(plan: BatchPlan, requests: Sequence[PlannedRequest]) -> BatchPlan:
    """Return some of a plan's requests, in execution order, as a plan of their own for an empty cache."""
    numbers: dict[tuple[Scope, bytes], int] = {}
    tokens: list[int] = []
    placed: list[Placed] = []
    for at, planned in enumerate(requests):
        order: list[int] = []
        for position in planned.order:
            block = planned.request.blocks[position]
            number = numbers.setdefault((planned.wording.scope, block.fingerprint), len(numbers))
            if number == len(tokens):
                tokens.append(block.tokens)
            order.append(number)
        placed.append(Placed(at, tuple(order)))
    own = tuple(
        [
            replace(
                planned,
                saved_tokens=served.tokens,
                warmed_by=None if served.warmed_by is None else requests[served.warmed_by].id,
            )
            for planned, served in zip(requests, serve(placed, tokens, plan.capacity_tokens), strict=True)
        ]
    )
    ids = {planned.id: place for place, planned in enumerate(own)}
    total = sum(map(_context_tokens, own))
    return replace(
        plan,
        requests=own,
        positions={id: ids[id] for id in plan.positions if id in ids},
        saved_tokens=sum([planned.saved_tokens for planned in own]),
        total_tokens=total,
        upper_bound=min(total, plan.upper_bound),
        primes=planned_primes(own, plan.checkpoints),
    )
