"""What a planner has done, and how fast: plain counts, and whoever wants to look on."""

from __future__ import annotations

from warmprefix.telemetry.base import NoObserver, PlannerObserver
from warmprefix.telemetry.latency import LATENCY_BUCKETS, LatencyHistogram, LatencySnapshot
from warmprefix.telemetry.stats import PlannerStats

__all__ = [
    "LATENCY_BUCKETS",
    "LatencyHistogram",
    "LatencySnapshot",
    "NoObserver",
    "PlannerObserver",
    "PlannerStats",
]
