"""The cache profile of the engine behind a planner: given, or learned."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Literal, TypeAlias

from warmprefix.cache_profiles import PROFILES, CacheProfile, as_profile, vllm_checkpoints

__all__ = ["CheckpointBehaviour", "EngineProfile", "ProfileSource"]

_REMEMBERED_PREFIXES = 8_192
_REMEMBERED_VISITS = 32
_LEAST_VISITS = 8
"""Second visits, and later ones, before their hits allow a conclusion."""
_MOST_SECOND_HITS, _MOST_SECOND_HITS_TO_KEEP = 0.13, 0.5
"""Largest shares of second visits with a hit, to recognise checkpoints and to keep to that."""
_LEAST_THIRD_HITS = 0.6
"""Smallest share of later visits with a hit."""
_LEAST_BLOCK = 64
"""Shorter units of hits are KV blocks of full attention."""

ProfileSource: TypeAlias = Literal["argument", "default", "engine", "reports"]


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
        self._behaviour = CheckpointBehaviour()

    def learn(self, profile: CacheProfile) -> bool:
        """Believe what the engine shows of itself, unless the caller gave a profile; True if the profile changed."""
        if self.source == "argument":
            return False
        before, self.current, self.source = self.current, profile, "engine"
        return self.current != before

    def observe(self, scope: Hashable, keys: Sequence[bytes], held_blocks: int, cached_tokens: int) -> bool:
        """Learn from a report, unless the caller or the engine gave a profile; return True if the profile changed.

        Args:
            scope: Where the prompt can share prefixes.
            keys: The blocks of the prompt, which open it.
            held_blocks: The engine reused this many of them, most likely.
            cached_tokens: Tokens of the prompt that the engine reused.
        """
        if self.source in ("argument", "engine"):
            return False
        before = self.current
        self.current = self._behaviour.profile_after(self.current, scope, keys, held_blocks, cached_tokens)
        self.source = "default" if self.current.checkpoints is None else "reports"
        return self.current is not before


class CheckpointBehaviour:
    """Recognises an engine that keeps checkpoints by its reports.

    There the second visit to a shared prefix finds nothing of it, and the third one does (`Checkpoints`). With full
    attention both do. Evidence is bounded and ages, so that a mistake is corrected. Not thread-safe.
    """

    def __init__(self) -> None:
        self._visits: OrderedDict[bytes, int] = OrderedDict()
        self._answers = {visit: deque[bool](maxlen=_REMEMBERED_VISITS) for visit in (2, 3)}
        self._unit = 0
        """Greatest common divisor of the reported hits: where they may end."""

    def profile_after(
        self, current: CacheProfile, scope: Hashable, keys: Sequence[bytes], held_blocks: int, cached_tokens: int
    ) -> CacheProfile:
        """Return the profile to believe in after a report. O(blocks)."""
        visit = self._visit(scope, keys)
        if visit > 1:
            self._answers[min(visit, 3)].append(held_blocks > 0)
        self._unit = math.gcd(self._unit, cached_tokens)
        second, third = self._answers[2], self._answers[3]
        if len(second) < _LEAST_VISITS:
            return current
        found = sum(second) / len(second)
        if current.checkpoints is not None:
            return PROFILES["full-attention"] if found > _MOST_SECOND_HITS_TO_KEEP else current
        is_later = len(third) >= _LEAST_VISITS and sum(third) / len(third) >= _LEAST_THIRD_HITS
        if found > _MOST_SECOND_HITS or not is_later or self._unit < _LEAST_BLOCK:
            return current
        return vllm_checkpoints(self._unit)

    def _visit(self, scope: Hashable, keys: Sequence[bytes]) -> int:
        """Count a visit to each prefix; return which visit it is to the one that was visited most."""
        most = 0
        prefix = blake2b(repr(scope).encode(), digest_size=16)
        for key in keys:
            prefix.update(key)
            digest = prefix.digest()
            visits = self._visits[digest] = self._visits.get(digest, 0) + 1
            self._visits.move_to_end(digest)
            most = max(most, visits)
        while len(self._visits) > max(_REMEMBERED_PREFIXES, len(keys)):
            self._visits.popitem(last=False)
        return most
