"""`CacheMarker`: puts cache marks into request bodies."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import log_failure
from warmprefix.forks import fork_safe_lock
from warmprefix.tokens import as_counter
from warmprefix_requests.marks.bodies import ApiShape, read_parts, with_marks
from warmprefix_requests.marks.mark_planner import CacheUsage, MarkDecision, MarkPlanner
from warmprefix_requests.usage import token_usage

__all__ = ["CacheMarker", "MarkStats", "MarkedBody"]

_log = logging.getLogger("warmprefix")


@dataclass(frozen=True, slots=True)
class MarkStats:
    """A snapshot of a marker's counters; every field only ever grows."""

    requests: int = 0
    """Bodies that got marks or options."""
    marks: int = 0
    """Marks added to them."""
    unmarked: int = 0
    """Bodies left as they were: of an unknown shape, or with marks of their own that leave no room."""
    refused: int = 0
    """Bodies whose marks the API refused, so that they were sent again without."""
    read_tokens: int = 0
    """Reported tokens of prompts that were read from the cache."""
    written_tokens: int = 0
    """Reported tokens of prompts that were written to it."""
    uncached_tokens: int = 0
    """All other reported tokens of prompts."""
    errors: int = 0
    """Failures of the marker itself; the body went on as it was."""


class MarkedBody(NamedTuple):
    """A body with marks, and what `CacheMarker.report` needs of it."""

    body: dict[str, Any]
    """The body to send."""
    decision: MarkDecision | None = None
    """None if nothing was decided: the body has no change."""


class CacheMarker:
    """Puts cache marks into request bodies of APIs whose caches match only at marks.

        marker = CacheMarker("anthropic")
        marked = marker.mark("messages", {"model": model, "max_tokens": 500, "messages": messages})
        answer = client.messages.create(**marked.body)
        marker.report(marked, answer.usage.model_dump())

    A body gets what `MarkPlanner` decides; the application's own marks stay, and nothing else changes. Marks stand on
    content parts, so give each context block its own part (`messages_for(plan, question, parts=True)`). An `EngineLink`
    of a planner with such a profile does all this by itself.

    Thread-safe; memory is bounded.

    Args:
        profile: A profile with marks, or its name: `"anthropic"`, `"openai"` or `"bedrock"`.
        tokenizer: Counts the tokens of parts, as in `ContextPlanner`; None for the estimate.
        clock: Seconds.

    Raises:
        TypeError: An argument has another type than the above.
        ValueError: The profile is unknown or has no marks.
    """

    def __init__(
        self,
        profile: CacheProfile | str,
        *,
        tokenizer: object = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner = MarkPlanner(profile, count_tokens=as_counter(tokenizer), clock=clock)
        self._counts: Counter[str] = Counter()
        self._lock = fork_safe_lock()

    @property
    def profile(self) -> CacheProfile:
        """The profile whose rules the marks follow."""
        return self._planner.profile

    def mark(self, shape: ApiShape, body: Mapping[str, Any], *, tenant: str | None = None) -> MarkedBody:
        """Return a copy of a body with marks; the body itself if none are added. Never raises.

        Args:
            shape: `"messages"` of Anthropic, `"chat"` or `"responses"` of OpenAI, or `"converse"` of Bedrock.
            body: The request's body, or the arguments of the SDK's call.
            tenant: Requests of different tenants share nothing that is learned.
        """
        unchanged = MarkedBody(dict(body))
        try:
            rules = self._planner.rules
            found = read_parts(shape, body, rules)
            if found is None:
                self._count("unmarked")
                return unchanged
            decision = self._planner.decide(found.parts, (tenant, _model(body)))
            added = sum(1 for number in decision.lifetimes if found.parts[number].lifetime is None)
            self._count("requests", marks=added)
            return MarkedBody(with_marks(shape, body, found, decision.lifetimes, rules), decision)
        except Exception:
            log_failure(_log, "a request could not be marked", first=self._count("errors") == 1)
            return unchanged

    def report(self, marked: MarkedBody, usage: Mapping[str, Any] | None) -> None:
        """Take over what the API reports of a prompt, from `usage` of its answer; None if the request has failed."""
        tokens = token_usage(usage)
        reported: CacheUsage | None = None
        if tokens.cached_tokens is not None and tokens.uncached_tokens is not None:
            reported = CacheUsage(tokens.cached_tokens, tokens.written_tokens or 0, tokens.uncached_tokens)
            read, written, uncached = reported
            with self._lock:
                self._counts.update(read_tokens=read, written_tokens=written, uncached_tokens=uncached)
        if marked.decision is not None and (reported is not None or usage is None):
            self._planner.report(marked.decision, reported)

    def refused(self) -> None:
        """Count a body whose marks the API has refused, and which it took without them."""
        self._count("refused")

    def stats(self) -> MarkStats:
        """Return the counts since the start."""
        with self._lock:
            return MarkStats(**self._counts)

    def _count(self, name: str, **more: int) -> int:
        with self._lock:
            self._counts.update({name: 1, **more})
            return self._counts[name]


def _model(body: Mapping[str, Any]) -> str:
    return str(body.get("model", body.get("modelId")))
