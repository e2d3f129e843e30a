"""What became of the prompt tokens that went through a gateway: in all, by minute, session and application."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.outgoing import AskedPrompt
from warmprefix_gateway.sessions import SessionBook
from warmprefix_requests import OutgoingRequest

__all__ = ["Ledger", "MinuteCount"]

_MINUTES = 120
_MAX_ENGINES, _MAX_NAME = 1_024, 256


@dataclass(slots=True)
class MinuteCount:
    """The prompt tokens of one minute."""

    minute: int
    """Minutes since 1970."""
    prompt_tokens: int = 0
    """Of answers that reported how many were cached."""
    cached_tokens: int = 0


@dataclass(slots=True)
class Ledger:
    """The counts of one gateway. Not thread-safe."""

    metrics: GatewayMetrics
    clock: Callable[[], float] = time.time
    sessions: SessionBook = field(default_factory=SessionBook)
    totals: Counter[str] = field(default_factory=Counter)
    """`requests`, `references`, `saved_tokens`, `prompt_tokens`, `cached_tokens`, `unreported_tokens`, `unreported`
    (requests), and each field of `TokenFates`."""
    minutes: deque[MinuteCount] = field(default_factory=lambda: deque(maxlen=_MINUTES))
    """The latest minutes with requests."""
    _reporting: dict[tuple[str | None, str], None] = field(default_factory=dict)
    """Upstreams and models with a report of cached tokens."""

    def record(
        self,
        asked: AskedPrompt,
        sent: OutgoingRequest,
        upstream: str | None,
        prompt_tokens: int | None,
        cached_tokens: int | None,
    ) -> None:
        """Count an answered request; a count is None if the upstream did not report it."""
        cached_tokens = self.with_zeros(upstream, asked.call.body.get("model"), prompt_tokens, cached_tokens)
        session = asked.session
        session.requests += 1
        self.totals["requests"] += 1
        if (made := sent.rewritten) is not None:
            session.references += made.references
            self.totals.update(references=made.references, saved_tokens=made.saved_tokens)
            self.metrics.references.inc(made.references)
            self.metrics.saved_tokens.inc(made.saved_tokens)
        if sent.marked is not None:
            self.metrics.marked.inc()
        if prompt_tokens is None or cached_tokens is None:
            self.totals["unreported"] += 1
            self.metrics.unreported.inc()
        if prompt_tokens is None:
            self.sessions.keep(session, asked.parts)
            return
        is_behind = asked.found is not None
        fates = self.sessions.record(session, asked.parts, prompt_tokens, cached_tokens, is_behind=is_behind)
        self.totals["prompt_tokens"] += prompt_tokens
        self.metrics.prompt_tokens.inc(prompt_tokens)
        if cached_tokens is None:
            self.totals["unreported_tokens"] += prompt_tokens
            self.metrics.unreported_tokens.inc(prompt_tokens)
            return
        self.totals.update(cached_tokens=cached_tokens, **fates._asdict())
        self.metrics.cached_tokens.inc(cached_tokens)
        for cause, tokens in fates._asdict().items():
            self.metrics.uncached_tokens.labels(cause).inc(tokens)
        minute = int(self.clock() // 60)
        if not self.minutes or self.minutes[-1].minute != minute:
            self.minutes.append(MinuteCount(minute))
        self.minutes[-1].prompt_tokens += prompt_tokens
        self.minutes[-1].cached_tokens += cached_tokens

    def with_zeros(
        self, upstream: str | None, model: object, prompt_tokens: int | None, cached_tokens: int | None
    ) -> int | None:
        """Return the cached tokens; 0 for an engine that reports them, but leaves them out where none were cached.

        vLLM and SGLang do so. Without this, their misses would be missing in the hit ratio.
        """
        engine = upstream, f"{model}"[:_MAX_NAME]
        if cached_tokens is None:
            return 0 if engine in self._reporting and prompt_tokens is not None else None
        self._reporting[engine] = None
        while len(self._reporting) > _MAX_ENGINES:
            del self._reporting[next(iter(self._reporting))]
        return cached_tokens
