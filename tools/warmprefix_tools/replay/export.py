"""A replay's numbers and orders for other programs. docs/replay.md is their contract."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from warmprefix import __version__
from warmprefix_tools.replay.arrange import Arranged
from warmprefix_tools.replay.results import Estimates, ReplayResult
from warmprefix_tools.replay.workload import Request

__all__ = ["as_json", "capacity_name", "order_line"]


def as_json(results: Sequence[ReplayResult], estimates: Estimates) -> dict[str, Any]:
    """All results, and what made them."""
    return {
        "warmprefix": __version__,
        "python": platform.python_version(),
        "estimates": asdict(estimates),
        "results": [_row(result, estimates) for result in results],
    }


def order_line(trace: str, policy: str, capacity_tokens: int | None, request: Request, arranged: Arranged) -> str:
    """One served request, as a line of JSON; `references` only where there are some."""
    line: dict[str, Any] = {
        "trace": trace,
        "policy": policy,
        "capacity_tokens": capacity_name(capacity_tokens),
        "request": request.source.request,
        "order": [request.ids[i] for i in arranged.order],
    }
    if arranged.references:
        line["references"] = [request.ids[i] for i, _ in arranged.references]
    return json.dumps(line, separators=(",", ":")) + "\n"


def capacity_name(capacity_tokens: int | None) -> int | str:
    """As the command takes it: a number, or `unbounded`."""
    return "unbounded" if capacity_tokens is None else capacity_tokens


def _row(result: ReplayResult, estimates: Estimates) -> dict[str, Any]:
    row: dict[str, Any] = {
        "trace": result.trace,
        "policy": result.policy,
        "capacity_tokens": capacity_name(result.capacity_tokens),
        "k": result.k,
        "placement": result.placement,
        "requests": result.requests,
        "hit_ratio": result.hit_ratio,
        "saved_tokens": result.saved_tokens,
        "total_tokens": result.total_tokens,
        "prefilled_tokens": result.prefilled_tokens,
        "plan_us_p50": round(result.plan_us_p50, 1),
        "plan_us_p99": round(result.plan_us_p99, 1),
        "commit_us_p50": round(result.commit_us_p50, 1),
        "commit_us_p99": round(result.commit_us_p99, 1),
        "gained_requests": result.gained_requests,
        "lost_requests": result.lost_requests,
        "reordered_requests": result.reordered_requests,
        "referring_requests": result.referring_requests,
        "reference_tokens": result.reference_tokens,
        "annotation_tokens": result.annotation_tokens,
        "today_saved_tokens": result.today_saved_tokens,
        "today_total_tokens": result.today_total_tokens,
        "prefill_change": result.prefill_change,
        "policy_errors": result.policy_errors,
        "misses": asdict(result.misses),
        "over_time": [asdict(point) for point in result.over_time],
    }
    if estimates.prefill_rate is not None:
        row["ttft_seconds"] = estimates.ttft_seconds(result)
        row["ttft_seconds_today"] = estimates.ttft_seconds_today(result)
    if estimates.price is not None:
        row["cost"] = estimates.cost(result)
        row["cost_today"] = estimates.cost_today(result)
    return row
