"""Conclusions from an engine's own reports: cached tokens, TTFT, and the capacity of its cache."""

from __future__ import annotations

from warmprefix.residency.report.capacity import (
    DEFAULT_CAPACITY,
    Capacities,
    Capacity,
    CapacitySource,
    FixedCapacity,
    LearnedCapacity,
)
from warmprefix.residency.report.evidence import ScopeFeedback
from warmprefix.residency.report.profile import EngineProfile
from warmprefix.residency.report.startup import (
    capacity_from_metrics,
    paths_to_warm,
    report_from_metrics,
    warming_request,
)
from warmprefix.residency.report.usage import EngineReport, PredictionErrors, UsageFeedback

__all__ = [
    "DEFAULT_CAPACITY",
    "Capacities",
    "Capacity",
    "CapacitySource",
    "EngineProfile",
    "EngineReport",
    "FixedCapacity",
    "LearnedCapacity",
    "PredictionErrors",
    "ScopeFeedback",
    "UsageFeedback",
    "capacity_from_metrics",
    "paths_to_warm",
    "report_from_metrics",
    "warming_request",
]
