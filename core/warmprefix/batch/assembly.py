"""From what a caller hands over to a `BatchPlan`: everything about a batch but the planner's own state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from warmprefix.annotate import Templates
from warmprefix.batch.base import BatchPlanner
from warmprefix.batch.device import DISTANCES_PAY_FROM, OVERLAPS_PAY_FROM, Device, use_cuda
from warmprefix.batch.frequency import FrequencyPlanner
from warmprefix.batch.merge import MergePlanner
from warmprefix.batch.plan import BatchRequest, PlannedRequest
from warmprefix.batch.planning import ScopePlan
from warmprefix.batch.relevance import RelevancePlanner
from warmprefix.blocks import ContextBlock
from warmprefix.plan import Scope

__all__ = [
    "BATCH_PLANNERS",
    "Requests",
    "SharedWording",
    "as_requests",
    "device_for",
    "planned_requests",
    "planners_for",
]

BATCH_PLANNERS = ("auto", "merge", "context-index", "frequency", "relevance")

Requests = Iterable[BatchRequest] | Mapping[str, Iterable[ContextBlock | str]]
"""Requests as they are, or the context of each by its id."""


def as_requests(requests: Requests) -> list[BatchRequest]:
    """The requests of a batch.

    Raises:
        TypeError: `requests` is nothing of the kind.
        ValueError: Two of them have the same id.
    """
    if isinstance(requests, Mapping):
        named = cast("Mapping[str, Iterable[ContextBlock | str]]", requests)  # BatchRequests have no items
        requests = [BatchRequest(id, blocks) for id, blocks in named.items()]  # 1 and "1" are one id
    if isinstance(requests, str | bytes) or not isinstance(requests, Iterable):
        raise TypeError(f"requests must be BatchRequests, or contexts by id, got one {type(requests).__name__}")
    listed = list(requests)
    places: dict[str, list[int]] = {}
    for i, request in enumerate(listed):
        if not isinstance(request, BatchRequest):
            raise TypeError(f"requests[{i}] must be a BatchRequest, got {type(request).__name__}")
        places.setdefault(request.id, []).append(i)
    if len(places) < len(listed):
        again = [f"{id!r} ({', '.join(map(str, at))})" for id, at in places.items() if len(at) > 1]
        more = f" and {len(again) - 5} more" if len(again) > 5 else ""
        raise ValueError(
            f"requests must have distinct ids; given twice, with their places: {', '.join(again[:5])}{more}"
        )
    return listed


def planners_for(
    planner: str | BatchPlanner, blocks: int, time_budget: float | None, device: Device
) -> list[BatchPlanner]:
    """What a planner's name stands for. Of several, the first whose plan saves most is taken.

    Args:
        planner: One of `BATCH_PLANNERS`, or what arranges itself.
        blocks: Of all requests together.
        time_budget: Seconds for local search; None for a number of steps.
        device: Where distances and overlaps are computed.

    Raises:
        MissingExtraError: `context-index` is asked for, and scipy is missing.
        TypeError: `planner` is neither, or `time_budget` is no number.
        ValueError: Another name, or a budget that is negative or without end.
    """
    if time_budget is not None and (isinstance(time_budget, bool) or not isinstance(time_budget, int | float)):
        raise TypeError(f"time_budget must be a number of seconds or None, got {type(time_budget).__name__}")
    if time_budget is not None and not 0 <= time_budget < math.inf:
        raise ValueError(f"time_budget must be 0 seconds or more, or None, got {time_budget}")
    if not isinstance(planner, str):
        if not isinstance(planner, BatchPlanner):
            raise TypeError(f"planner must be a name or a BatchPlanner, got {type(planner).__name__}")
        return [planner]
    if planner not in BATCH_PLANNERS:
        raise ValueError(f"planner must be one of {', '.join(BATCH_PLANNERS)}, got {planner!r}")
    if planner == "relevance":
        return [RelevancePlanner()]
    if planner == "frequency":
        return [FrequencyPlanner()]
    if planner == "context-index":
        from warmprefix.batch.cluster import ContextIndexPlanner  # needs numpy and scipy

        return [ContextIndexPlanner(device=device)]
    merge = MergePlanner(None if time_budget is None else time_budget / max(blocks, 1), device)
    return [RelevancePlanner(), merge] if planner == "auto" else [merge]


def device_for(planner: str | BatchPlanner, requests: int, device: Device) -> Literal["cpu", "cuda"]:
    """Where a batch with so many requests in its greatest scope is computed, as far as `planner` asks for a device.

    Raises:
        MissingExtraError: `device` is "cuda" and torch is missing.
        ValueError: `device` is another name, or there is none.
    """
    pays_from = {"auto": OVERLAPS_PAY_FROM, "merge": OVERLAPS_PAY_FROM, "context-index": DISTANCES_PAY_FROM}
    if not isinstance(planner, str) or planner not in pays_from:
        use_cuda(device, 0, 1)
        return "cpu"
    return "cuda" if use_cuda(device, requests, pays_from[planner]) else "cpu"


@dataclass(frozen=True, slots=True)
class SharedWording:
    """What the requests of one scope have in common."""

    scope: Scope
    labels: Mapping[bytes, str]
    templates: Templates
    preamble: str | None
    cache_salt: str | None


def planned_requests(
    requests: Sequence[BatchRequest], plan: ScopePlan, wording: SharedWording, batch_id: str, first: int
) -> list[PlannedRequest]:
    """One scope's requests in execution order.

    Args:
        requests: By the numbers that the plan knows them by.
        plan: Their plan.
        wording: What they have in common.
        batch_id: Begins the ids of their plans.
        first: How many requests of the batch stand before them.
    """
    return [
        PlannedRequest(
            request=requests[placed.context],
            order=placed.order,
            saved_tokens=served.tokens,
            warmed_by=None if served.warmed_by is None else requests[served.warmed_by].id,
            plan_id=f"{batch_id}.{number}",
            wording=wording,
        )
        for number, (placed, served) in enumerate(zip(plan.placed, plan.served, strict=True), first)
    ]
