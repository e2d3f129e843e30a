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
from warmprefix.residency.report import EngineReport, capacity_from_metrics, report_from_metrics

if TYPE_CHECKING:
    from warmprefix.residency.kv.kv_feed import KvEventFeed
    from warmprefix.residency.kv.spans import EngineTokenizer, TokenizerError

__all__ = [
    "EngineReport",
    "EngineTokenizer",
    "FeedStats",
    "FoundCheckpoints",
    "KvEventFeed",
    "NoFeed",
    "ResidencyFeed",
    "ResidencyTarget",
    "ServedPrompt",
    "TokenizerError",
    "capacity_from_metrics",
    "report_from_metrics",
]

_LAZY = {"KvEventFeed": "kv_feed", "EngineTokenizer": "spans", "TokenizerError": "spans"}


def __getattr__(name: str) -> Any:
    """Import on first use: the feed needs the extra `events`, and the tokenizer a slow import."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.kv.{_LAZY[name]}"), name)
