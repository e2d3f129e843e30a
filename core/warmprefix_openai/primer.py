"""Primes of single requests: which prefixes get one, and its request. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmprefix.cache_profiles import Checkpoints
from warmprefix.errors import check_count
from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.plan import ContextPlan, Scope
from warmprefix.residency import EngineReport
from warmprefix.tokens import estimated_tokens
from warmprefix_requests import Attempt, OutgoingRequest
from warmprefix_requests.prefixes import one_token, visible_end

if TYPE_CHECKING:
    from warmprefix.planner import ContextPlanner

__all__ = [
    "Prime",
    "PrimeCut",
    "PrimeLengths",
    "PrimeStats",
    "Primer",
    "cut_chat",
    "shortened",
]

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
    """Primes that were due and not sent: they would not have paid, the engine was busy or failed before, the budget was
    used up, or the chat has the shared blocks in several content parts."""
    computed_tokens: int = 0
    """Tokens of prefill that the engine reported for primes."""
    found_tokens: int = 0
    """Tokens that the request right behind each prime and the next one with its prefix found by it, as the engine
    reported them. Later requests may find more. Not counted in a run of a batch."""


class _FittedLine:
    """A line fitted to points, with more weight for later ones."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.points = 0
        self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self.points += 1
        weight = max(self._weight, 1 / self.points)
        self._x += weight * (x - self._x)
        self._y += weight * (y - self._y)
        self._xx += weight * (x * x - self._xx)
        self._xy += weight * (x * y - self._xy)

    @property
    def mean(self) -> float:
        """The mean of y."""
        return self._y

    @property
    def slope(self) -> float | None:
        """The change of y per x; None without different points."""
        variance = self._xx - self._x**2
        return None if variance <= 1e-9 * self._xx else (self._xy - self._x * self._y) / variance

    def at(self, x: float, slope: float) -> float:
        """Return y on the line of this slope through the mean point."""
        return self._y + slope * (x - self._x)

    def where(self, y: float, slope: float) -> float:
        """Return x on the line of this slope through the mean point."""
        return self._x + (y - self._y) / slope


class _Pace:
    """Times to first token: a line over the computed tokens."""

    _LATEST = 0.3
    """Weight of an answer in the latest times."""
    _USUAL = 0.02
    """Weight of an answer in the usual times and in the line."""

    def __init__(self) -> None:
        self._latest = 0.0
        self._line = _FittedLine(self._USUAL)

    def add(self, tokens: int, seconds: float) -> None:
        """Add an answer."""
        self._line.add(tokens, seconds)
        self._latest += max(self._LATEST, 1 / self._line.points) * (seconds - self._latest)

    @property
    def is_busy(self) -> bool:
        """True if the latest times are far above the usual ones."""
        return self._latest > _BUSY_RATIO * self._line.mean

    def saves_time(self, tokens: float) -> bool:
        """Return True if computing these tokens takes longer than a round trip, or if that is open yet."""
        per_token = self._line.slope
        return per_token is None or tokens * per_token > self._line.at(0, per_token)


@dataclass(frozen=True, slots=True)
class PrimeCut:
    """Where a prime ends."""

    characters: int
    """Characters of its last message."""
    estimated: int
    """Its tokens, as estimated."""
    reached: int
    """The engine's tokens up to the checkpoint that it leaves."""
    rest: int
    """The engine's tokens between this checkpoint and its end, which the next request computes again."""
    uncut: float
    """The engine's tokens of the whole chat that it was cut from."""


class PrimeLengths:
    """The engine's lengths of primes, by their estimated ones, and where primes should end. Not thread-safe.

    A prime leaves a checkpoint at the last multiple of the block or unit within it, and what follows is lost. So it
    ends as little behind that place as the error of earlier estimates allows.
    """

    _WEIGHT = 0.05
    _LEAST_PRIMES = 3
    """Primes that end with the shared blocks, before the error is known."""
    _LAST_TOKENS = 8
    """Tokens behind the checkpoint, in addition to the mean error: where a text is cut, its last token changes, and
    some engines add tokens of the template."""

    def __init__(self) -> None:
        self._line = _FittedLine(self._WEIGHT)
        self._error = 0.0

    def add(self, estimated: int, tokens: int) -> None:
        """Learn from a prime of this many tokens."""
        if self._line.points:
            error = abs(tokens - self._tokens(estimated))
            self._error += max(self._WEIGHT, 1 / self._line.points) * (error - self._error)
        self._line.add(estimated, tokens)

    def cut(self, chat: Sequence[Mapping[str, Any]], checkpoints: Checkpoints) -> PrimeCut:
        """Return where a prime ends that is made of a chat, as `cut_chat` returns it. O(text)."""
        text = "\n".join([content for message in chat if isinstance(content := message.get("content"), str)])
        estimated, last = estimated_tokens(text), len(chat[-1]["content"])
        tokens, step = self._tokens(estimated), checkpoints.unit or checkpoints.block
        reached = max(int(tokens), 0) // step * step
        target = reached + self._LAST_TOKENS + self._error
        if self._line.points < self._LEAST_PRIMES or target >= tokens:
            return PrimeCut(last, estimated, reached, round(tokens) - reached + 1, tokens)
        end = self._line.where(target, self._slope)
        kept = len(text) * end / estimated
        kept += (end - estimated_tokens(text[: int(kept)])) * len(text) / estimated  # parts differ in density
        characters = min(max(last - len(text) + int(kept), 1), last)
        end = estimated_tokens(text[: len(text) - last + characters])
        return PrimeCut(characters, end, reached, round(target) - reached, tokens)

    def _tokens(self, estimated: int) -> float:
        return self._line.at(estimated, self._slope) if self._line.points else estimated

    @property
    def _slope(self) -> float:
        """Tokens per estimated token, by no more than tokenizers differ."""
        return min(max(self._line.slope or 1.0, 0.5), 3.0)


@dataclass(slots=True)
class _SeenPrefix:
    """Blocks that a prompt began with."""

    visits: int = 0
    prime: Prime | None = None
    """The prime that was sent for it."""


@dataclass(slots=True)
class Prime:
    """A prime of one prefix."""

    cut: PrimeCut
    """Where it ends."""
    held: int
    """Tokens up to the checkpoint that the next request would find without it."""
    reached: int
    """Tokens up to the checkpoint that it leaves."""
    computed: int | None = None
    """Tokens that the engine computed for it; None as long as it has reported none."""
    reports: int = 0
    """Reports of later requests with this prefix."""

    def answered(self, step: int, tokens: int, cached: int) -> None:
        """Record the engine's report of it."""
        self.computed = tokens - cached
        self.held = max(self.held, cached)
        self.reached = max(tokens - 1, 0) // step * step

    @property
    def gain(self) -> int:
        """Tokens that a request finds by it."""
        return max(self.reached - self.held, 0)


class _PrimeGains:
    """What primes cost and what they find: learned from reports, to predict the next one's. Not thread-safe."""

    _PRIOR_TOKENS = 1_024
    """Tokens that are taken to be found as expected, before reports show more."""
    _PRIOR_REUSE = 1
    """Prefixes that are taken to come again, before requests show more."""
    _WEIGHT = 0.1
    _PROBE_INTERVAL = 64
    """One of this many primes that would not pay is sent; otherwise nothing could show that they pay again."""

    def __init__(self) -> None:
        self._new: Counter[int] = Counter()
        self._reused: Counter[int] = Counter()
        self._expected = self._found = self._PRIOR_TOKENS
        self._loss = 0.0
        self._unpaid = 0

    def visit(self, depth: int, visits: int) -> None:
        """Count a visit to a prefix of this depth."""
        self._new[depth] += visits == 1
        self._reused[depth] += visits == 2

    def chance(self, depth: int) -> float:
        """Return the chance that a new prefix comes again."""
        return (self._reused[depth] + self._PRIOR_REUSE) / (self._new[depth] + self._PRIOR_REUSE)

    def pays(self, depth: int, gain: int, rest: int) -> bool:
        """Return True if a prime is expected to find more than it costs, or to show whether that is still so."""
        expected = self.chance(depth) * gain * self._found / self._expected
        if gain <= 0 or expected > max(rest, self._loss):
            return gain > 0
        self._unpaid += 1
        return self._unpaid % self._PROBE_INTERVAL == 0

    def report(self, prime: Prime, cached: int) -> int:
        """Learn from the first or second request behind a prime; return the tokens that it found by it."""
        prime.reports += 1
        found = min(max(cached - prime.held, 0), prime.gain)
        if prime.reports == 1:
            self._loss += self._WEIGHT * ((prime.computed or 0) - found - self._loss)
        else:
            self._expected += prime.gain
            self._found += found
        return found


class Primer:
    """Chooses the primes that go out right in front of a request, for engines that keep checkpoints. Thread-safe.

    The request continues from the checkpoint of its prime, so both together compute little more than the request
    alone; a prime behind the answer would compute the prefix again. A prefix gets one prime, when it is first planned,
    if it is expected to pay. Memory is bounded.
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
        self._seen: FairLru[tuple[Scope, tuple[bytes, ...]], _SeenPrefix] = FairLru()
        """The prefixes planned lately."""
        self._requests = 0
        self._chosen = 0
        self._failures_in_a_row = 0
        self._paused_until = 0
        self._pace = _Pace()
        self._lengths = PrimeLengths()
        self._gains = _PrimeGains()
        self._lock = fork_safe_lock()

    def stats(self) -> PrimeStats:
        """Return the counts since the start."""
        with self._lock:
            return PrimeStats(**self._counts)

    def requests(self, plan: ContextPlan, request: OutgoingRequest) -> Iterator[tuple[Prime, OutgoingRequest]]:
        """Yield the primes for the request of a plan, as it goes out without marks; the shortest first."""
        checkpoints = self._planner.profile.checkpoints if self._depths and plan.opens_prompt else None
        if checkpoints is None or request.route != "chat":
            return
        with self._lock:
            self._requests += 1
            seen = [self._visit(plan.scope, keys) for keys in _prefixes(plan, self._depths[-1])]
        due = [depth for depth in self._depths if depth < len(plan.blocks) and seen[depth - 1].visits == 1]
        if not due:
            return
        paragraphs = plan.paragraphs()
        for depth in due:
            cut = cut_chat(request.body["messages"], _joined(paragraphs[:depth]))
            with self._lock:
                prime = None if cut is None else self._choose(cut, seen[:depth], paragraphs, checkpoints)
                if cut is None or prime is None:
                    self._counts["skipped"] += 1
                    continue
            yield prime, one_token("chat", {**request.body, "messages": shortened(cut, prime.cut)})

    def _visit(self, scope: Scope, keys: tuple[bytes, ...]) -> _SeenPrefix:
        prefix = self._seen.use((scope, keys)) or _SeenPrefix()
        prefix.visits += 1
        self._gains.visit(len(keys), prefix.visits)
        self._seen.put((scope, keys), prefix, scope.tenant)
        if len(self._seen) > _MAX_PREFIXES:
            self._seen.evict()
        return prefix

    def _choose(
        self,
        chat: Sequence[Mapping[str, Any]],
        seen: Sequence[_SeenPrefix],
        paragraphs: Sequence[str],
        checkpoints: Checkpoints,
    ) -> Prime | None:
        """Return the prime for a chat that ends with the last of these prefixes; None if it does not pay."""
        cut = self._lengths.cut(chat, checkpoints)
        behind = held = 0
        for prefix, paragraph in zip(reversed(seen), reversed(paragraphs[: len(seen)]), strict=True):
            if prefix.visits > 1:
                break
            behind += len(paragraph) + 2
        for prefix in seen:
            held = held if prefix.prime is None else max(held, prefix.prime.reached)
        # Where the request parts from earlier ones it leaves a checkpoint by itself.
        whole = sum([len(content) for message in chat if isinstance(content := message.get("content"), str)])
        parted = int(cut.uncut * max(whole - behind, 0) / whole)
        prime = Prime(cut, max(held, parted // checkpoints.block * checkpoints.block), cut.reached)
        if not self._gains.pays(len(seen), prime.gain, cut.rest) or not self._may_send(len(seen), prime.gain):
            return None
        self._chosen += 1
        seen[-1].prime = prime
        return prime

    def _may_send(self, depth: int, gain: int) -> bool:
        if self._requests < self._paused_until or self._pace.is_busy:
            return False
        if not self._pace.saves_time(gain * self._gains.chance(depth)):
            return False
        return self._chosen < _BURST + _BUDGET * len(self._depths) * self._requests

    def learn(self, plan: ContextPlan, report: EngineReport | None) -> None:
        """Learn the engine's speed, and what the plan's primes found, from the report of an answer."""
        if report is None or not self._depths:
            return
        with self._lock:
            if report.ttft is not None and report.prompt_tokens is not None:
                self._pace.add(max(report.prompt_tokens - (report.cached_tokens or 0), 1), report.ttft)
            if report.cached_tokens is None or not plan.opens_prompt:
                return
            for keys in _prefixes(plan, self._depths[-1]):
                prefix = self._seen.get((plan.scope, keys))
                prime = None if prefix is None else prefix.prime
                if prime is not None and prime.computed is not None and prime.reports < 2:
                    self._counts["found_tokens"] += self._gains.report(prime, report.cached_tokens)

    def answered(
        self, prime: Prime, sent: Attempt, status: int | None, prompt_tokens: int | None, cached_tokens: int | None
    ) -> OutgoingRequest | None:
        """Count the answer to a prime, and return a request to send in its place; None stands for no status."""
        again = None if status is None else sent.answered(status)
        if again is not None:
            return again
        checkpoints = self._planner.profile.checkpoints
        with self._lock:
            if status is not None and status < 300:
                self._counts.update(("sent",) if sent.request.optional else ("sent", "inexact"))
                self._failures_in_a_row = 0
                if prompt_tokens and cached_tokens is not None and checkpoints is not None:
                    self._lengths.add(prime.cut.estimated, prompt_tokens)
                    prime.answered(checkpoints.unit or checkpoints.block, prompt_tokens, cached_tokens)
                    self._counts["computed_tokens"] += prompt_tokens - cached_tokens
                return None
            self._counts["failed"] += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
                self._paused_until = self._requests + _PAUSE_REQUESTS
                self._failures_in_a_row = 0
            return None


def _prefixes(plan: ContextPlan, most: int) -> list[tuple[bytes, ...]]:
    """Return the keys of the plan's first blocks, one more each time."""
    keys = tuple([planned.block.fingerprint for planned in plan.blocks[:most]])
    return [keys[:depth] for depth in range(1, len(keys) + 1)]


def _joined(paragraphs: Sequence[str]) -> str:
    return "\n\n".join([text for text in paragraphs if text])


def shortened(chat: Sequence[Mapping[str, Any]], cut: PrimeCut) -> list[Mapping[str, Any]]:
    """Return the chat up to where a prime ends."""
    return [*chat[:-1], {**chat[-1], "content": chat[-1]["content"][: cut.characters]}]


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
        end = visible_end(content, begin + len(shared))
        return [*map(dict, messages[:i]), {**message, "content": content[:end]}] if end else None
    return None
