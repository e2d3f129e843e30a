"""What APIs report of a prompt and their cache, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["CacheUsage", "cache_usage"]


class CacheUsage(NamedTuple):
    """Tokens of one prompt: read from the cache, written to it at a price, and neither."""

    read: int
    """Tokens read from the cache."""
    written: int
    """Tokens written to the cache at a price."""
    uncached: int
    """All other tokens."""


def cache_usage(usage: Mapping[str, Any] | None) -> CacheUsage | None:
    """Return the usage of an answer of Anthropic, Bedrock, Gemini or OpenAI; None if it does not count the prompt.

    Anthropic and Bedrock count cached tokens apart from the others, OpenAI and Gemini count them among all.

    >>> cache_usage({"input_tokens": 50, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 0})
    CacheUsage(read=1000, written=0, uncached=50)
    >>> cache_usage({"prompt_tokens": 1050, "prompt_tokens_details": {"cached_tokens": 1000}})
    CacheUsage(read=1000, written=0, uncached=50)
    """
    if not isinstance(usage, Mapping):
        return None
    for total, read, written in (
        ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        ("inputTokens", "cacheReadInputTokens", "cacheWriteInputTokens"),
    ):
        if (uncached := _count(usage.get(total))) is not None and (read in usage or written in usage):
            return CacheUsage(_count(usage.get(read)) or 0, _count(usage.get(written)) or 0, uncached)
    if (tokens := _count(usage.get("promptTokenCount"))) is not None:
        cached = min(_count(usage.get("cachedContentTokenCount")) or 0, tokens)
        return CacheUsage(cached, 0, tokens - cached)
    for total in ("prompt_tokens", "input_tokens"):
        if (tokens := _count(usage.get(total))) is not None:
            details = usage.get(f"{total}_details")
            details = details if isinstance(details, Mapping) else {}
            cached = min(_count(details.get("cached_tokens")) or 0, tokens)
            stored = min(_count(details.get("cache_write_tokens")) or 0, tokens - cached)
            return CacheUsage(cached, stored, tokens - cached - stored)
    return None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
