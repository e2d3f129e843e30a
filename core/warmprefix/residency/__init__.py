"""What engines hold in their prefix caches, by their KV events, reported cached tokens, or TTFT, in order of trust."""

from __future__ import annotations

from warmprefix.residency.capacity import FixedCapacity, ReuseTree
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

__all__ = [
    "EngineProfile",
    "EngineReport",
    "FeedStats",
    "FixedCapacity",
    "FoundCheckpoints",
    "NoFeed",
    "ResidencyFeed",
    "ResidencyTarget",
    "ReuseTree",
    "ServedPrompt",
    "UsageFeedback",
]
