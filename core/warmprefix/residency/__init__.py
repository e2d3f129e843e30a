"""What the engine really holds, in order of trust: its KV events, the cached tokens that it reports, TTFT."""

from __future__ import annotations

from warmprefix.residency.base import EngineReport, FeedStats, NoFeed, ResidencyFeed, ResidencyTarget, ServedPrompt

__all__ = ["EngineReport", "FeedStats", "NoFeed", "ResidencyFeed", "ResidencyTarget", "ServedPrompt"]
