"""Prefix caches of hosted APIs: those that match at marks, and those that match at every step of some tokens.

Where the vendors' documentation is silent, the weaker promise is assumed: a mark below a hit is not written again, and
a prefix that another request is still computing cannot be read.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from warmprefix.cache_profiles import CacheProfile, MarkRules
from warmprefix_tools.caches.kv_blocks import chained_hashes, root_hash
from warmprefix_tools.caches.prompts import CacheUse, MarkedPrompt

__all__ = ["HostedCache", "MarksRefusedError"]

_MOST_ENTRIES = 1_000_000


class MarksRefusedError(ValueError):
    """A request that the API refuses for its marks; the message has the reason."""


@dataclass(slots=True)
class _Entry:
    lifetime: float
    expires: float


@dataclass(slots=True, eq=False)
class _HostedAdmission:
    """A prompt that a hosted cache has looked up."""

    cache: HostedCache
    use: CacheUse
    writes: dict[bytes, float]
    """Lifetime of each prefix to write, by its key."""
    refreshed: list[bytes] = field(default_factory=list)

    def store(self, now: float) -> None:
        self.cache.write(self, now)

    def append(self, token_id: int) -> None:
        pass  # answers are cached when they come back in a prompt

    def free(self) -> None:
        self.cache.release(self)


class HostedCache:
    """The cache of one API key, or workspace.

    With marks (`CacheProfile.marks`):

    - Anthropic: https://platform.claude.com/docs/en/build-with-claude/prompt-caching. Each mark writes the prefix in
      front of it. A lookup starts at each mark and goes back over at most 20 content parts to where an earlier request
      had a mark. Reading renews the lifetime. What lies behind the read part is charged with the lifetime of the mark
      that it is in front of, and longer lifetimes come first.
    - OpenAI from GPT-5.6: https://developers.openai.com/api/docs/guides/prompt-caching. A request writes at its latest
      marks and at the end of its newest message, which is a mark unless it turns that off, and reads at its latest 80
      marks. Ends of earlier messages were automatic marks of earlier requests, and so can be read.

    Without marks, every prefix of a multiple of `CacheProfile.unit` tokens can be read for the profile's `lifetime`.

    All operations are O(tokens). The number of entries is bounded; the least recently used go first.
    """

    def __init__(self, profile: CacheProfile) -> None:
        self.profile = profile
        """The profile of the API."""
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._running: set[_HostedAdmission] = set()
        self._now = float("-inf")

    @property
    def usage(self) -> float:
        """Always 0, because vendors do not publish a capacity."""
        return 0.0

    @property
    def num_sequences(self) -> int:
        """Number of admitted prompts that are not free."""
        return len(self._running)

    def admit(self, prompt: MarkedPrompt, now: float = 0.0, *, room_for: int = 0) -> _HostedAdmission:
        """Look a prompt up at `now` in seconds; a time before the latest one counts as the latest one.

        Raises:
            MarksRefusedError: There are too many marks, a longer lifetime follows a shorter one, or the profile has
                no such lifetime.
        """
        self._now = max(self._now, now)
        rules = self.profile.marks
        admission = self._admit_in_steps(prompt) if rules is None else self._admit_with_marks(prompt, rules)
        self._running.add(admission)
        return admission

    def reset(self) -> bool:
        """Forget everything; return False, and do nothing, if requests are running."""
        if self._running:
            return False
        self._entries.clear()
        return True

    def write(self, admission: _HostedAdmission, now: float) -> None:
        """Record that the prompt has been computed; for the admission."""
        self._now = max(self._now, now)
        for key in admission.refreshed:
            entry = self._entries.get(key)
            if entry is not None:
                self._keep(key, entry.lifetime)
        for key, lifetime in admission.writes.items():
            self._keep(key, lifetime)
        while len(self._entries) > _MOST_ENTRIES:
            self._entries.popitem(last=False)

    def release(self, admission: _HostedAdmission) -> None:
        """Record that the request is over; for the admission."""
        self._running.discard(admission)

    # -- marks

    def _admit_with_marks(self, prompt: MarkedPrompt, rules: MarkRules) -> _HostedAdmission:
        lifetimes = self._checked_lifetimes(prompt, rules)
        if rules.automatic and prompt.automatic and prompt.message_ends:
            lifetimes.setdefault(prompt.message_ends[-1], rules.lifetimes[0])
        writable = dict(sorted(lifetimes.items())[-rules.most :])
        readable = self._readable_parts(prompt, rules, sorted(lifetimes))
        keys = self._keys_of_parts(prompt, readable | writable.keys())
        read_part = max((part for part in readable if self._is_alive(keys.get(part))), default=None)
        read = 0 if read_part is None else prompt.part_ends[read_part]

        written = [0] * len(rules.lifetimes)
        writes: dict[bytes, float] = {}
        refreshed: list[bytes] = []
        if read_part is not None:
            refreshed.append(keys[read_part])
        reached = read
        for part, lifetime in writable.items():
            end = prompt.part_ends[part]
            if part not in keys:
                continue  # too short
            if end <= read:
                refreshed.append(keys[part])
                continue
            writes[keys[part]] = lifetime
            written[rules.lifetimes.index(lifetime)] += end - reached
            reached = end
        use = CacheUse(read, tuple(written), len(prompt.tokens) - reached)
        return _HostedAdmission(self, use, writes, refreshed)

    def _checked_lifetimes(self, prompt: MarkedPrompt, rules: MarkRules) -> dict[int, float]:
        """Return the lifetime of each mark that the request sets, by part."""
        lifetimes = {mark.part: mark.lifetime or rules.lifetimes[0] for mark in prompt.marks}
        for lifetime in lifetimes.values():
            if lifetime not in rules.lifetimes:
                raise MarksRefusedError(f"a mark must live for one of {rules.lifetimes} seconds, got {lifetime:g}")
        if rules.most_read is None and len(lifetimes) > rules.most:
            raise MarksRefusedError(f"a request must have at most {rules.most} marks, got {len(lifetimes)}")
        in_order = [lifetimes[part] for part in sorted(lifetimes)]
        if in_order != sorted(in_order, reverse=True):
            raise MarksRefusedError(f"a mark must not live longer than one in front of it, got {in_order} seconds")
        return lifetimes

    def _readable_parts(self, prompt: MarkedPrompt, rules: MarkRules, marked: list[int]) -> set[int]:
        if rules.look_back is not None:
            return {part for mark in marked for part in range(max(mark - rules.look_back + 1, 0), mark + 1)}
        places = set(marked)
        if rules.automatic and prompt.automatic:
            places.update(prompt.message_ends)
        return set(sorted(places)[-(rules.most_read or rules.most) :])

    def _keys_of_parts(self, prompt: MarkedPrompt, parts: Iterable[int]) -> dict[int, bytes]:
        """Return the key of each prefix that is long enough to be cached."""
        keys: dict[int, bytes] = {}
        prefix, start = blake2b(root_hash(prompt.salt), digest_size=16), 0
        for part in range(max(parts, default=-1) + 1):
            end = prompt.part_ends[part]
            prefix.update(struct.pack(f"<{end - start}I", *prompt.tokens[start:end]))
            start = end
            if end >= self.profile.minimum_tokens:
                keys[part] = prefix.digest()
        return keys

    # -- steps

    def _admit_in_steps(self, prompt: MarkedPrompt) -> _HostedAdmission:
        unit, lifetime = self.profile.unit, self.profile.lifetime
        ends = range(unit, len(prompt.tokens) + 1, unit)
        keys = list(chained_hashes(root_hash(prompt.salt), prompt.tokens, unit))
        read = 0
        for end, key in zip(ends, keys, strict=True):
            if end >= len(prompt.tokens) or not self._is_alive(key):
                break  # the last token is always computed
            read = end
        if read < self.profile.minimum_tokens:
            read = 0
        kept = float("inf") if lifetime is None else lifetime
        keys.reverse()  # so that of the least recently used prefixes the longest go first
        writes = dict.fromkeys(keys, kept) if len(prompt.tokens) >= self.profile.minimum_tokens else {}
        return _HostedAdmission(self, CacheUse(read, (0,), len(prompt.tokens) - read), writes)

    # -- entries

    def _is_alive(self, key: bytes | None) -> bool:
        entry = None if key is None else self._entries.get(key)
        return entry is not None and self._now <= entry.expires

    def _keep(self, key: bytes, lifetime: float) -> None:
        self._entries[key] = _Entry(lifetime, self._now + lifetime)
        self._entries.move_to_end(key)
