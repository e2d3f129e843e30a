"""What engines hold in their prefix caches, by their KV events, reported cached tokens, or TTFT, in order of trust."""

from __future__ import annotations

from warmprefix.residency.feed_contract import (
    FeedStats,
    FoundCheckpoints,
    NoFeed,
    ResidencyFeed,
    ResidencyTarget,
    ServedPrompt,
)
from warmprefix.residency.report import (
    EngineProfile,
    EngineReport,
    UsageFeedback,
    capacity_from_metrics,
    report_from_metrics,
)

__all__ = [
    "EngineProfile",
    "EngineReport",
    "FeedStats",
    "FoundCheckpoints",
    "NoFeed",
    "ResidencyFeed",
    "ResidencyTarget",
    "ServedPrompt",
    "UsageFeedback",
    "capacity_from_metrics",
    "report_from_metrics",
]
