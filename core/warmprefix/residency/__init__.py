"""What engines hold in their prefix caches, by their KV events, reported cached tokens, or TTFT, in order of trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmprefix.residency.feed_contract import (
    FeedStats,
    FoundCheckpoints,
    NoFeed,
    ResidencyFeed,
    ResidencyTarget,
    ServedPrompt,
)
from warmprefix.residency.profile import EngineProfile
from warmprefix.residency.usage import EngineReport, UsageFeedback

if TYPE_CHECKING:
    from warmprefix.residency.engine_metrics import capacity_from_metrics, report_from_metrics

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


def __getattr__(name: str) -> Any:
    if name not in ("capacity_from_metrics", "report_from_metrics"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from warmprefix.residency import engine_metrics  # compiles regular expressions, for functions that are called once

    return getattr(engine_metrics, name)
