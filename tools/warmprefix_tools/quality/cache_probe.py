"""Finds out whether an engine reports cached tokens, and keeps the prompts of different salts apart."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

from warmprefix_requests.usage import TokenUsage

__all__ = ["PREFILL_PROBLEMS", "SaltSupport", "probe_cache"]

SaltSupport = Literal["kept", "ignored", "unreported", "refused"]
"""What an engine does with `cache_salt`."""

PREFILL_PROBLEMS: Mapping[str, str] = {
    "ignored": "the engine ignores cache_salt, so that the arms share its cache",
    "refused": "the engine refuses cache_salt, so that the arms share its cache",
    "unreported": "the engine reports no cached tokens",
}
"""Why the prefill of the arms is not measured, for a reader."""


async def probe_cache(ask: Callable[[str | None], Awaitable[TokenUsage | None]], salt: str) -> SaltSupport:
    """Ask the same prompt twice with one salt, and once with another one.

    Engines leave out the cached tokens if there are none, so only a prompt that must be cached shows that they report
    them.

    Args:
        ask: Asks the prompt with a salt, or without one; returns its usage, or None if the engine refuses the call.
        salt: Used for nothing else.
    """
    first = await ask(f"{salt}-1")
    if first is None:
        return "unreported" if await ask(None) is None else "refused"
    again, other = await ask(f"{salt}-1"), await ask(f"{salt}-2")
    if not (again and again.cached_tokens):
        return "unreported"
    return "ignored" if other and other.cached_tokens else "kept"
