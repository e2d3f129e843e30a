"""A batch plan's numbers and orders for other programs. docs/batch.md is their contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from warmprefix.batch.plan import BatchPlan
from warmprefix.traces import Trace

__all__ = ["as_json", "order_lines"]


def as_json(plan: BatchPlan, trace: str) -> dict[str, Any]:
    """What the plan is worth. These keys and no others."""
    return {
        "planner": plan.planner,
        "trace": trace,
        "requests": len(plan),
        "saved_tokens": plan.saved_tokens,
        "total_tokens": plan.total_tokens,
        "hit_ratio": plan.hit_ratio,
        "upper_bound": plan.upper_bound,
        "seconds": plan.seconds,
        "device": plan.device,
    }


def order_lines(plan: BatchPlan, trace: Trace) -> Iterator[str]:
    """Every request in execution order, as a line of JSON with the trace's own ids.

    Args:
        plan: Of requests that are called by their places in the trace.
        trace: What was planned.
    """
    encode = json.JSONEncoder(separators=(",", ":")).encode
    for planned in plan:
        source = trace.requests[int(planned.id)]
        order = [source.blocks[position] for position in planned.order]
        yield encode({"request": source.request, "order": order}) + "\n"
