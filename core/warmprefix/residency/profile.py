"""The engine behind a planner: the explanation of its reports that they contradict least."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

from warmprefix.cache_profiles import PROFILES, CacheProfile, as_profile, llama_cpp, vllm_checkpoints
from warmprefix.residency.capacity import Visit, contradictions_by_chance
from warmprefix.residency.usage import UsageComparison

__all__ = ["EngineProfile", "Explanations", "Match", "ProfileSource"]

_DECAY = 2 ** (-1 / 64)
"""Weight of older evidence at each report: after 64 of them it counts half."""
_LEAST_BLOCK = 64
"""Shorter units of hits are KV blocks of full attention."""

ProfileSource: TypeAlias = Literal["argument", "default", "engine", "reports"]
Match: TypeAlias = Literal["prefix tree", "checkpoints", "leaves"]
"""Where an engine can match: behind any block that it holds; at checkpoints; or within the latest of all prompts that
had a beginning in common, if it keeps whole prompts."""


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
        """The profile that plans are for."""
        self.source: ProfileSource = "default" if is_learned else "argument"
        """Where the profile comes from."""
        self._explanations = Explanations()

    @property
    def match(self) -> Match:
        """Where the engine can match."""
        if self.current.checkpoints is not None:
            return "checkpoints"
        return "leaves" if self.current.host_memory else "prefix tree"

    def learn(self, profile: CacheProfile) -> bool:
        """Believe what the engine shows of itself, unless the caller gave a profile; True if the profile changed."""
        if self.source == "argument":
            return False
        before, self.current, self.source = self.current, profile, "engine"
        return self.current != before

    def observe(self, visit: Visit, tokens: Sequence[int], comparison: UsageComparison, capacity: int | None) -> bool:
        """Learn from a report, unless the caller or the engine gave a profile; return True if the profile changed.

        Args:
            visit: What the order had in common with earlier ones when it was planned.
            tokens: The lengths of its blocks.
            comparison: The report.
            capacity: The size of the engine's cache; None for no bound.
        """
        if self.source in ("argument", "engine"):
            return False
        before = self.match
        self._explanations.add(visit, tokens, comparison, capacity)
        match = self._explanations.best(before, sum(tokens))
        if match == before:
            return False
        self.current, self.source = PROFILES["full-attention"], "default"
        if match != "prefix tree":
            self.current = llama_cpp() if match == "leaves" else vllm_checkpoints(self._explanations.unit)
            self.source = "reports"
        self._explanations = Explanations(self._explanations.unit if match == "checkpoints" else 0)
        return True


class Explanations:
    """Counts what each explanation of an engine's reports got wrong, where older reports count less.

    Each explanation predicts of every report how many of the prompt's blocks the engine held. Chance is one, too: a
    hit here and a miss there, as from several replicas. For the planner that is a prefix tree.
    """

    def __init__(self, unit: int = 0) -> None:
        self.unit = self._first_unit = unit
        """Greatest common divisor of the reported hits, and of those that earlier reports showed: where they may end.
        """
        self._wrong: dict[Match, float] = {"prefix tree": 0.0, "checkpoints": 0.0, "leaves": 0.0}
        self._found = self._missed = 0.0

    def add(self, visit: Visit, tokens: Sequence[int], comparison: UsageComparison, capacity: int | None) -> None:
        """Add a report. O(blocks)."""
        self.unit = math.gcd(self.unit, comparison.actual)
        ends, held = [0, *accumulate(tokens)], comparison.likely_blocks
        seen = len(visit.distances)
        at_junction = comparison.ends[visit.junction] if visit.junction else 0
        predicted: dict[Match, int] = {
            "prefix tree": seen if capacity is None else bisect_right(visit.distances, capacity),
            "checkpoints": comparison.blocks_in(at_junction // max(self.unit, 1) * max(self.unit, 1)),
            "leaves": visit.leaf,
        }
        for match, blocks in predicted.items():
            self._wrong[match] = _DECAY * self._wrong[match] + abs(ends[blocks] - ends[held])
        found = ends[min(held, seen)]
        self._found = _DECAY * self._found + found
        self._missed = _DECAY * self._missed + ends[seen] - found

    def best(self, current: Match, slack: int) -> Match:
        """Return the best explanation, or `current` unless another one got `slack` fewer tokens wrong."""
        if current == "checkpoints":
            # Primes make hits that look like those of a tree, but no hit ends between two possible checkpoints.
            return "prefix tree" if self.unit < self._first_unit else current
        wrong = self._wrong.copy()
        wrong["prefix tree"] = min(wrong["prefix tree"], contradictions_by_chance(self._found, self._missed))
        if self.unit < _LEAST_BLOCK:
            del wrong["checkpoints"]
        match: Match = min(wrong, key=wrong.__getitem__)
        return match if wrong[match] + slack < wrong[current] else current
