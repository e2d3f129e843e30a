"""The cache profile of the engine behind a planner: given, or learned."""

from __future__ import annotations

from typing import Literal, TypeAlias

from warmprefix.cache_profiles import PROFILES, CacheProfile, as_profile

__all__ = ["EngineProfile", "ProfileSource"]

ProfileSource: TypeAlias = Literal["argument", "default", "engine"]


class EngineProfile:
    """What the planner believes of its engine's cache. Not thread-safe.

    Args:
        given: A profile or its name; `"auto"` to learn it, from full attention on.

    Raises:
        TypeError: `given` is neither a CacheProfile nor a str.
        ValueError: No profile has this name.
    """

    def __init__(self, given: CacheProfile | str) -> None:
        is_learned = isinstance(given, str) and given == "auto"
        self.current = PROFILES["full-attention"] if is_learned else as_profile(given)
        self.source: ProfileSource = "default" if is_learned else "argument"

    def learn(self, profile: CacheProfile) -> None:
        """Believe what the engine shows of itself, unless the caller gave a profile."""
        if self.source != "argument":
            self.current, self.source = profile, "engine"
