"""`MarkPlanner`: decides for each request where marks stand, and follows what the API keeps."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

from warmprefix.cache_profiles import CacheProfile, MarkRules, as_profile
from warmprefix.forks import fork_safe_lock
from warmprefix_requests.marks.choice import MarkCandidate, chosen_marks
from warmprefix_requests.marks.returns import ANSWER_SECONDS, PrefixRecord, ReturnRates

__all__ = ["CacheUsage", "MarkDecision", "MarkPlanner", "MarkedPart"]

PartKind = Literal["tools", "system", "inner", "past", "end"]

_CAUTION = 1.08
"""What a write is taken to cost more than it does, because the best of many estimates is too good on average."""
_MOST_SCOPES = 1_024
_MOST_PREFIXES = 32_768
_TOLERANCE = 0.03
"""Share by which token counts of this library and of the API may differ."""
_SCALE_STEP = 0.2
_MOST_MINIMUM = 8_192


class CacheUsage(NamedTuple):
    """Tokens of one prompt: read from the cache, written to it at a price, and neither."""

    read: int
    """Tokens read from the cache."""
    written: int
    """Tokens written to the cache at a price."""
    uncached: int
    """All other tokens."""


class MarkedPart(NamedTuple):
    """One part of a prompt, as `MarkPlanner` sees it."""

    content: bytes
    """What the model reads of it; equal parts have equal bytes."""
    kind: PartKind
    """Where it stands: a tool, the system prompt, inside a message, at the end of an earlier message, or at the end of
    the newest one."""
    tokens: int | None = None
    """None to count them with the planner's counter."""
    depth: int = 0
    """Number of the part in its message, from 0 on."""
    can_have_mark: bool = True
    """False if the API refuses a mark on this part."""
    lifetime: float | None = None
    """Seconds that the application's own mark asks for; None without a mark."""


@dataclass(frozen=True, slots=True, eq=False)
class MarkDecision:
    """The marks of one request."""

    lifetimes: Mapping[int, float]
    """Seconds for which each marked part's prefix is to be kept, by the number of the part; the application's marks
    are included."""
    scope: Hashable
    """The scope of the request."""
    marked: tuple[tuple[bytes, float], ...] = field(repr=False)
    """Key and estimated tokens of each marked prefix."""
    visited: tuple[bytes, ...] = field(repr=False)
    """Key of each prefix."""
    tokens: float = field(repr=False)
    """Estimated tokens of the prompt."""
    decided: float = field(repr=False)
    """Time of the decision, on the clock of the planner."""


class _Scope:
    """What is learned for one scope."""

    def __init__(self, lifetimes: Sequence[float], minimum: int) -> None:
        self.rates = ReturnRates(lifetimes)
        self.scale = 1.0
        """Tokens of the API per token counted here."""
        self.minimum = minimum


class MarkPlanner:
    """Decides which prefixes of a request to mark, so that prompts cost as little as possible.

    A mark pays if its prefix is read within its lifetime often enough: more than (w - 1) / (1 - r) times, for a write
    price w and a read price r. How often that will be is learned from the requests of a scope (`ReturnRates`). Of all
    sets of marks that the API allows, the one with the largest expected saving is written (`chosen_marks`). Parts that
    the API is believed to hold are marked so that it finds them and keeps them.

    While a request writes a prefix, requests that begin with it cannot read it, and would write it once more. So of
    such requests at the same time only the first one writes.

    Answers correct the picture: `report` passes on what the API has read and written. Without a report, a prefix is
    taken to be readable 10 s after its request. Thread-safe; memory is bounded.

    Args:
        profile: A profile with marks, or its name.
        count_tokens: Counter of the tokens of a part; it need not be exact, because reports calibrate it.
        clock: Seconds; a time before the latest one counts as the latest one.

    Raises:
        ValueError: The profile has no marks.
    """

    def __init__(
        self,
        profile: CacheProfile | str,
        *,
        count_tokens: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.profile = as_profile(profile)
        if self.profile.marks is None:
            raise ValueError(f"profile must be one with marks, got {self.profile.name}")
        self.rules: MarkRules = self.profile.marks
        """The rules of the profile."""
        self._count_tokens = count_tokens
        self._clock = clock
        self._now = float("-inf")
        self._scopes: OrderedDict[Hashable, _Scope] = OrderedDict()
        self._prefixes: OrderedDict[bytes, PrefixRecord] = OrderedDict()
        self._lock = fork_safe_lock()

    def decide(self, parts: Sequence[MarkedPart], scope: Hashable = None) -> MarkDecision:
        """Return the marks of a request that is about to be sent. O(bytes of the parts).

        Requests of different scopes share nothing.
        """
        with self._lock:
            now = self._now = max(self._now, self._clock())
            learned = self._scope(scope)
            keys, records = self._visit(parts, scope, learned, now)
            ends: list[float] = []
            for record in records:
                ends.append((ends[-1] if ends else 0.0) + record.tokens * learned.scale)
            lifetimes = self._lifetimes(parts, records, ends, learned, now)
            for part, number in lifetimes.items():
                self._mark(records[part], number, now)
            marked = tuple([(keys[part], ends[part]) for part in lifetimes])
            seconds = {part: self.rules.lifetimes[number] for part, number in lifetimes.items()}
            return MarkDecision(seconds, scope, marked, tuple(keys), ends[-1] if ends else 0.0, now)

    def report(self, decision: MarkDecision, usage: CacheUsage | None) -> None:
        """Apply what the API reports of a request; None if it has failed, or was sent without the marks. O(parts)."""
        with self._lock:
            now = self._now = max(self._now, self._clock())
            found = [(self._prefixes.get(key), end) for key, end in decision.marked]
            records = [(record, end) for record, end in found if record is not None]
            if usage is None:
                for record, _ in records:
                    if record.ready > decision.decided:
                        record.expires = float("-inf")
                return
            for key in decision.visited:
                if (visited := self._prefixes.get(key)) is not None:
                    visited.answered = min(visited.answered, now)
            learned = self._scope(decision.scope)
            tokens = sum(usage)
            factor = tokens / decision.tokens if tokens and decision.tokens else 1.0
            learned.scale *= 1 + _SCALE_STEP * (min(max(factor, 0.1), 10.0) - 1)
            covered = (usage.read + usage.written) * (1 + _TOLERANCE)
            for record, end in records:
                if end * factor <= covered:
                    record.ready = min(record.ready, now)
                    learned.minimum = min(learned.minimum, max(int(end * factor), 1))
                else:
                    record.expires = float("-inf")
            if records and not usage.read and not usage.written:
                longest = int(max(end for _, end in records) * factor)
                learned.minimum = min(max(learned.minimum, longest + 1), _MOST_MINIMUM)

    # -- what is remembered

    def _scope(self, scope: Hashable) -> _Scope:
        learned = self._scopes.get(scope)
        if learned is None:
            learned = self._scopes[scope] = _Scope(self.rules.lifetimes, self.profile.minimum_tokens)
            if len(self._scopes) > _MOST_SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(scope)
        return learned

    def _visit(
        self, parts: Sequence[MarkedPart], scope: Hashable, learned: _Scope, now: float
    ) -> tuple[list[bytes], list[PrefixRecord]]:
        """Count the visit of each prefix; return their keys and records."""
        keys: list[bytes] = []
        records: list[PrefixRecord] = []
        key = repr(scope).encode()
        for part in parts:
            key = blake2b(part.content, key=blake2b(key, digest_size=32).digest(), digest_size=16).digest()
            record = self._prefixes.get(key)
            if record is None:
                tokens = (
                    self._count_tokens(part.content.decode(errors="replace")) if part.tokens is None else part.tokens
                )
                record = self._prefixes[key] = PrefixRecord(tokens, [0] * len(self.rules.lifetimes))
            self._prefixes.move_to_end(key)
            learned.rates.visit(record, part.kind, part.depth, now)
            keys.append(key)
            records.append(record)
        while len(self._prefixes) > max(_MOST_PREFIXES, len(keys)):
            self._prefixes.popitem(last=False)
        return keys, records

    def _mark(self, record: PrefixRecord, number: int, now: float) -> None:
        """Expect that the API has a prefix, once the request that marks it is answered."""
        if not record.ready <= now <= record.expires:
            record.ready = now + ANSWER_SECONDS
            record.lifetime = number
        record.expires = now + self.rules.lifetimes[record.lifetime]

    # -- the decision

    def _lifetimes(
        self,
        parts: Sequence[MarkedPart],
        records: Sequence[PrefixRecord],
        ends: Sequence[float],
        learned: _Scope,
        now: float,
    ) -> dict[int, int]:
        """Return the number of each marked part's lifetime, in the order of the parts."""
        required = {
            number: self.rules.lifetimes.index(part.lifetime)
            for number, part in enumerate(parts)
            if part.lifetime is not None
        }
        if len(required) >= self.rules.most:
            return required
        held = [
            number
            for number, record in enumerate(records)
            if record.ready <= now <= record.expires and parts[number].can_have_mark
        ]
        deepest = held[-1] if held else None
        begin = 0.0 if deepest is None else ends[deepest]
        is_being_written = any(
            now < record.ready and now <= record.expires and end > begin
            for record, end in zip(records, ends, strict=True)
        )
        candidates = [
            MarkCandidate(number, ends[number], self._gains(part, records[number], learned), number in required)
            for number, part in enumerate(parts)
            if number in required or (part.can_have_mark and ends[number] >= learned.minimum and not is_being_written)
            if deepest is None or number > deepest or number in required
        ]
        reserved = deepest is not None and deepest not in required
        marks = dict(chosen_marks(candidates, begin, self.rules.most - reserved))
        if deepest is not None:
            marks.setdefault(deepest, records[deepest].lifetime)
        self._keep_alive(held, marks, records, ends)
        return _in_order(marks, required)

    def _gains(self, part: MarkedPart, record: PrefixRecord, learned: _Scope) -> tuple[float | None, ...]:
        asked = None if part.lifetime is None else self.rules.lifetimes.index(part.lifetime)
        gains: list[float | None] = []
        for number, write_price in enumerate(self.profile.write_prices):
            share = learned.rates.share(record, part.kind, number)
            read_gain = share * (write_price - self.profile.read_price)
            gain = read_gain - _CAUTION * (write_price - 1)
            gains.append(gain if asked in (None, number) else None)
        return tuple(gains)

    def _keep_alive(
        self, held: Sequence[int], marks: dict[int, int], records: Sequence[PrefixRecord], ends: Sequence[float]
    ) -> None:
        """Spend the marks that are left on shorter prefixes which the API holds: marks renew their lifetimes."""
        free = self.rules.most - len(marks)
        others = [number for number in held if number not in marks]
        others.sort(key=lambda number: ends[number] * (records[number].visits > 1), reverse=True)
        for number in others[: max(free, 0)]:
            marks[number] = records[number].lifetime


def _in_order(marks: Mapping[int, int], required: Mapping[int, int]) -> dict[int, int]:
    """Return the marks in the order of their parts, none with a longer lifetime than one in front of it.

    The application's marks stay as they are; the others adapt, or are left out.
    """
    ordered: dict[int, int] = {}
    shortest = 0
    for part in sorted(marks, reverse=True):
        shortest = required[part] if part in required else max(marks[part], shortest)
        ordered[part] = shortest
    longest = max(ordered.values(), default=0)
    kept: dict[int, int] = {}
    for part in sorted(ordered):
        if part not in required and ordered[part] > longest:
            continue
        longest = ordered[part]
        kept[part] = longest
    return kept
