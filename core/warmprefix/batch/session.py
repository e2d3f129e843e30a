"""The steps before and after planning: requests, planners, device, and results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from warmprefix.batch.merge import MergePlanner
from warmprefix.batch.plan import BatchRequest, PlannedRequest, SharedWording
from warmprefix.batch.planners import BatchPlanner, Device, RelevancePlanner
from warmprefix.batch.scope_plan import ScopePlan
from warmprefix.blocks import ContextBlock
from warmprefix.choice import Candidates
from warmprefix.extensions import extension, extension_names
from warmprefix_kernels.batch_device import DISTANCES_PAY_FROM, OVERLAPS_PAY_FROM, use_cuda

__all__ = ["BATCH_PLANNERS", "Requests", "as_requests", "device_for", "planned_requests", "planners_for"]

BATCH_PLANNERS = ("auto", "merge", "relevance", "window")
"""The planners of this package. Other packages bring planners by entry points of `warmprefix.batch_planners`."""

Requests = Iterable[BatchRequest] | Mapping[str, Iterable[ContextBlock | str]]
"""Requests, or the context of each by its id."""


def as_requests(requests: Requests) -> list[BatchRequest]:
    """Return the requests of a batch.

    Raises:
        TypeError: `requests` has a different type.
        ValueError: Two requests have the same id.
    """
    if isinstance(requests, Mapping):
        named = cast("Mapping[str, Iterable[ContextBlock | str]]", requests)
        requests = [BatchRequest(id, blocks) for id, blocks in named.items()]  # 1 and "1" become the same id
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
            f"requests must have distinct ids, got these repeated, with their places: {', '.join(again[:5])}{more}"
        )
    return listed


def planners_for(
    planner: str | BatchPlanner, blocks: int, time_budget: float | None, device: Device
) -> list[BatchPlanner]:
    """Return the planners to try; the first plan that saves most is used.

    Args:
        planner: A name of `BATCH_PLANNERS` or of an extension, or a planner.
        blocks: Number of blocks of all requests together.
        time_budget: Seconds for local search; None for a number of steps.
        device: Where distances and overlaps are computed.

    Raises:
        MissingExtraError: The planner needs an extra that is not installed.
        TypeError: `planner` or `time_budget` has a different type.
        ValueError: `planner` is unknown, or `time_budget` is negative or not finite.
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
        brought = extension("warmprefix.batch_planners", planner)
        if brought is None:
            known = sorted({*BATCH_PLANNERS, *extension_names("warmprefix.batch_planners")})
            raise ValueError(f"planner must be one of {', '.join(known)}, got {planner!r}")
        made: BatchPlanner = brought(device)
        return [made]
    if planner == "window":
        return []  # it plans without a copy of the tree
    if planner == "relevance":
        return [RelevancePlanner()]
    merge = MergePlanner(None if time_budget is None else time_budget / max(blocks, 1), device)
    return [RelevancePlanner(), merge] if planner == "auto" else [merge]


def device_for(planner: str | BatchPlanner, requests: int, device: Device) -> Literal["cpu", "cuda"]:
    """Return where a batch is computed whose largest scope has `requests` requests.

    Planners that compute neither distances nor overlaps run on the CPU.

    Raises:
        MissingExtraError: `device` is "cuda" and torch is missing.
        ValueError: `device` is an unknown name, or "cuda" without a CUDA device.
    """
    pays_from = {"auto": OVERLAPS_PAY_FROM, "merge": OVERLAPS_PAY_FROM, "context-index": DISTANCES_PAY_FROM}
    if not isinstance(planner, str) or planner not in pays_from:
        use_cuda(device, 0, 1)  # checks the name
        return "cpu"
    return "cuda" if use_cuda(device, requests, pays_from[planner]) else "cpu"


def planned_requests(
    requests: Sequence[BatchRequest],
    plan: ScopePlan,
    wording: SharedWording,
    batch_id: str,
    first: int,
    places: Sequence[Sequence[int]] | None,
    candidates: Mapping[str, Candidates],
) -> list[PlannedRequest]:
    """Return one scope's requests in execution order.

    `requests` are in the order that `plan` numbers. Their plan ids are `batch_id` and a number, from `first` on.
    If some of their `candidates`, by id, are fed, `plan` refers to the blocks at these `places`.
    """
    return [
        PlannedRequest(
            request=requests[placed.context],
            order=placed.order if places is None else tuple([places[placed.context][i] for i in placed.order]),
            saved_tokens=served.tokens,
            warmed_by=None if served.warmed_by is None else requests[served.warmed_by].id,
            plan_id=f"{batch_id}.{number}",
            wording=wording,
            candidates=candidates.get(requests[placed.context].id),
        )
        for number, (placed, served) in enumerate(zip(plan.placed, plan.served, strict=True), first)
    ]
