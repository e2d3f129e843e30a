"""Counts and latencies of a planner, and the exporters that read them."""

from __future__ import annotations

from warmprefix.telemetry.planner_stats import (
    LATENCY_BUCKETS,
    LatencyHistogram,
    LatencySnapshot,
    NoObserver,
    PlannerObserver,
    PlannerStats,
)

__all__ = ["LATENCY_BUCKETS", "LatencyHistogram", "LatencySnapshot", "NoObserver", "PlannerObserver", "PlannerStats"]
