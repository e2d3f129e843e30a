"""Primes of single requests: which prefixes get one, and its request. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from warmprefix.errors import check_count
from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency import EngineReport
from warmprefix_requests import Attempt, OutgoingRequest

if TYPE_CHECKING:
    from warmprefix.planner import ContextPlanner

__all__ = ["ANSWER_FIELDS", "EXACT_END", "PrimeStats", "Primer", "cut_chat", "prime_of"]

_DEPTHS = {0: (), 1: (3,), 2: (2, 4)}
"""Blocks in front of each prime, by the number of primes per request."""

_MAX_PREFIXES = 65_536
_MAX_FAILURES_IN_A_ROW = 3
_PAUSE_REQUESTS = 100
"""Requests without a prime after failures in a row."""
_BUDGET = 0.5
"""Most primes per request and depth."""
_BURST = 8
"""Primes that may go out before the budget counts."""
_BUSY_RATIO = 3.0
"""An engine whose latest times to first token are this many times its usual ones has a queue."""

_SYSTEM = ("system", "developer")

EXACT_END: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields of a chat request that make its prompt end with the text of the last message, without template tokens."""

ANSWER_FIELDS = frozenset(
    {
        *("stream", "stream_options", "n", "max_completion_tokens", "response_format", "logprobs", "top_logprobs"),
        *("stop", "return_token_ids", "return_prompt_token_ids"),
    }
)
"""Fields of a chat request that are about its answer, not about its prompt."""


@dataclass(frozen=True, slots=True)
class PrimeStats:
    """A snapshot of counters that only grow."""

    sent: int = 0
    """Primes that the engine answered."""
    failed: int = 0
    """Primes that failed; the requests that they prepare went on."""
    inexact: int = 0
    """Of the sent ones, those whose prompt ends in template tokens, because the endpoint refused the fields that leave
    these out."""
    skipped: int = 0
    """Primes that were due and not sent: the engine was busy or failed before, the budget was used up, or the chat has
    the shared blocks in several content parts."""


class _Pace:
    """Times to first token: a line over the computed tokens, fitted with more weight for later answers."""

    _LATEST = 0.3
    """Weight of an answer in the latest times."""
    _USUAL = 0.02
    """Weight of an answer in the usual times and in the line."""

    def __init__(self) -> None:
        self._answers = 0
        self._latest = 0.0
        self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add an answer."""
        self._answers += 1
        weight = max(self._USUAL, 1 / self._answers)
        self._latest += max(self._LATEST, weight) * (seconds - self._latest)
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self._squares += weight * (tokens * tokens - self._squares)
        self._products += weight * (tokens * seconds - self._products)

    @property
    def is_busy(self) -> bool:
        """True if the latest times are far above the usual ones."""
        return self._latest > _BUSY_RATIO * self._seconds

    def saves_time(self, tokens: float) -> bool:
        """Return True if computing these tokens takes longer than a round trip, or if that is open yet."""
        variance = self._squares - self._tokens**2
        if variance <= 1e-9 * self._squares:
            return True
        per_token = (self._products - self._tokens * self._seconds) / variance
        round_trip = self._seconds - per_token * self._tokens
        return tokens * per_token > round_trip


class Primer:
    """Chooses the primes that go out right in front of a request, for engines that keep checkpoints. Thread-safe.

    The request continues from the checkpoint of its prime, so both together compute little more than the request
    alone; a prime behind the answer would compute the prefix again. A prefix gets one prime, when it is first planned.
    Memory is bounded.
    """

    def __init__(self, planner: ContextPlanner, primes: int) -> None:
        """Start with nothing primed. `primes` is 0, 1 or 2 per request; other values raise a ValueError."""
        if primes:
            check_count("primes", primes)
        if primes not in _DEPTHS:
            raise ValueError(f"primes must be 0, 1 or 2, got {primes}")
        self._planner = planner
        self._depths = _DEPTHS[primes]
        self._counts: Counter[str] = Counter()
        self._seen: FairLru[tuple[Scope, tuple[bytes, ...]], bool] = FairLru()
        """The prefixes planned lately; True for those that came again."""
        self._requests = 0
        self._chosen = 0
        self._reused = 0
        self._failures_in_a_row = 0
        self._paused_until = 0
        self._pace = _Pace()
        self._lock = fork_safe_lock()

    def stats(self) -> PrimeStats:
        """Return the counts since the start."""
        with self._lock:
            return PrimeStats(**self._counts)

    def requests(self, plan: ContextPlan, request: OutgoingRequest) -> Iterator[OutgoingRequest]:
        """Yield the primes for the request of a plan, as it goes out without marks; the shortest first."""
        checkpoints = self._planner.profile.checkpoints if self._depths and plan.opens_prompt else None
        if checkpoints is None or request.route != "chat":
            return
        paragraphs = plan.paragraphs()
        for depth in self._chosen_depths(plan, checkpoints.unit or checkpoints.block):
            messages = cut_chat(request.body["messages"], "\n\n".join([text for text in paragraphs[:depth] if text]))
            if messages is None:
                with self._lock:
                    self._counts["skipped"] += 1
            else:
                yield prime_of(request.body, messages)

    def _chosen_depths(self, plan: ContextPlan, unit: int) -> list[int]:
        keys = tuple([planned.block.fingerprint for planned in plan.blocks])
        chosen: list[int] = []
        with self._lock:
            self._requests += 1
            for depth in self._depths:
                if depth >= len(keys):
                    break
                tokens = sum([planned.block.tokens for planned in plan.blocks[:depth]])
                prefix = plan.scope, keys[:depth]
                if self._came_before(prefix) or tokens < unit:
                    continue
                if not self._pays(tokens - tokens % unit) or not self._may_send():
                    self._counts["skipped"] += 1
                    continue
                self._chosen += 1
                chosen.append(depth)
        return chosen

    def _came_before(self, prefix: tuple[Scope, tuple[bytes, ...]]) -> bool:
        came_again = self._seen.use(prefix)
        self._seen.put(prefix, came_again is not None, prefix[0].tenant)
        self._reused += came_again is False
        if len(self._seen) > _MAX_PREFIXES:
            self._seen.evict()
        return came_again is not None

    def _pays(self, tokens: int) -> bool:
        chance = (self._reused + 1) / (len(self._seen) + 1)
        return self._pace.saves_time(tokens * chance)

    def _may_send(self) -> bool:
        if self._requests < self._paused_until or self._pace.is_busy:
            return False
        return self._chosen < _BURST + _BUDGET * len(self._depths) * self._requests

    def learn(self, report: EngineReport | None) -> None:
        """Learn the engine's speed from the report of an answer."""
        if report is None or report.ttft is None or report.prompt_tokens is None or not self._depths:
            return
        with self._lock:
            self._pace.add(max(report.prompt_tokens - (report.cached_tokens or 0), 1), report.ttft)

    def answered(self, prime: Attempt, status: int | None) -> OutgoingRequest | None:
        """Count the answer to a prime, and return a request to send in its place; None stands for no status."""
        again = None if status is None else prime.answered(status)
        if again is not None:
            return again
        with self._lock:
            if status is not None and status < 300:
                self._counts.update(("sent",) if prime.request.optional else ("sent", "inexact"))
                self._failures_in_a_row = 0
                return None
            self._counts["failed"] += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
                self._paused_until = self._requests + _PAUSE_REQUESTS
                self._failures_in_a_row = 0
            return None


def prime_of(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> OutgoingRequest:
    """Return a prime with these messages and the fields of a body that are about its prompt.

    Fields that end its prompt exactly are optional. It is not encoded yet.
    """
    kept = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    content = repr(messages).encode("utf-8", "surrogatepass")
    plain = OutgoingRequest("chat", content, {**kept, "messages": messages, "max_tokens": 1}, is_rewritten=True)
    return replace(plain.with_fields(EXACT_END), optional=("exact end",), plain=plain)


def cut_chat(messages: Sequence[Mapping[str, Any]], shared: str) -> list[dict[str, Any]] | None:
    """Return the chat up to the end of `shared`, and what follows it up to the first visible character.

    That character is the token behind the boundary which a checkpoint needs. It is the real prompt's own, so that the
    tokens in front of it are too. An empty `shared` ends in front of the first message that is no system prompt. None
    if no message has the text, or only as one of several content parts. O(text).
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or (not shared and message.get("role") in _SYSTEM):
            continue
        begin = content.find(shared)
        if begin < 0:
            continue
        end = begin + len(shared)
        rest = content[end:]
        visible = rest.lstrip()
        if visible:
            end += len(rest) - len(visible) + 1
        return [*map(dict, messages[:i]), {**message, "content": content[:end]}] if end else None
    return None
