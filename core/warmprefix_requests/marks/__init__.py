"""Cache marks for hosted APIs whose caches match only at marks.

`CacheMarker` puts them into request bodies. `MarkPlanner` decides where: which prefixes to write, how far and for how
long, by how often they will be read.
"""

from __future__ import annotations

from warmprefix_requests.marks.bodies import ApiShape, without_marks
from warmprefix_requests.marks.mark_planner import CacheUsage, MarkDecision, MarkedPart, MarkPlanner
from warmprefix_requests.marks.marker import CacheMarker, MarkedBody, MarkStats

__all__ = [
    "ApiShape",
    "CacheMarker",
    "CacheUsage",
    "MarkDecision",
    "MarkPlanner",
    "MarkStats",
    "MarkedBody",
    "MarkedPart",
    "without_marks",
]
