"""One attempt at a request that carries a plan, from sending it to the plan's outcome. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from warmprefix.plan import ContextPlan
from warmprefix.residency import EngineReport
from warmprefix_openai.answer import AnswerFacts, AnswerReader, StreamedAnswer, WholeAnswer, is_stream
from warmprefix_openai.plans import SentPlan
from warmprefix_openai.primer import Prime
from warmprefix_openai.retry import is_transient, retry_after
from warmprefix_openai.server_turns import ServerTurn
from warmprefix_requests import Attempt, OutgoingRequest, block_ends
from warmprefix_requests.marks import CacheMarker, MarkedBody
from warmprefix_requests.touches import Toucher

__all__ = ["Exchange", "Verdict"]

_MAX_RETRY_AFTER = 60.0
"""Longest `Retry-After`, in seconds, that OpenAI's clients follow."""

Step = Literal["commit", "commit part", "abandon", "put back", "fail"]
"""The next step for a plan. "commit part": the application closed a stream before its end, and may keep the part that
it has read. "fail": another attempt may follow."""


class Verdict(NamedTuple):
    """The outcome of an exchange for its plan."""

    sent: SentPlan
    plan: ContextPlan
    step: Step
    report: EngineReport | None = None
    """The engine's report, for a commit."""
    delay: float = 0.0
    """Seconds that the server asked clients to wait, after a failure."""
    unread: bool = False
    """True if there was an answer that could not be read."""
    turn_id: str | None = None
    """The id under which the server keeps the turn, for a commit; None if it does not."""


class Exchange:
    """State of one attempt: call `sending`, `head`, `feed` and `finish` in turn, and `end`, which returns the verdict.

    It never raises for what an engine sends, nor for an error of its own: the bytes then pass on unread.
    """

    def __init__(
        self,
        sent: SentPlan,
        plan: ContextPlan,
        asked: OutgoingRequest,
        attempt: Attempt,
        *,
        marker: CacheMarker | None,
        toucher: Toucher[Any],
        count: Callable[[str], object],
        on_error: Callable[[str], object],
        turn: ServerTurn | None = None,
    ) -> None:
        self._sent = sent
        self._plan = plan
        self._asked: OutgoingRequest | None = asked
        self._attempt: Attempt | None = attempt
        self._marker = marker
        self._refused: MarkedBody | None = None
        """The marks that an answer may have refused."""
        self._toucher = toucher
        self._count = count
        self._on_error = on_error
        self._is_in_flight = False
        self._has_priority = "retention" in attempt.request.optional
        self._turn = turn
        """None if the request shows the whole prompt."""
        self._began = time.perf_counter()
        self._status: int | None = None
        self._reader: AnswerReader | None = None
        self._is_whole = False
        self._has_split = False
        self._has_passed_end = False
        """True once the client has asked for the event that ends the stream."""
        self._over = False
        self.primes: tuple[tuple[Prime, Attempt], ...] = ()
        """Requests to send in front of this one."""

    @property
    def _outgoing(self) -> OutgoingRequest | None:
        """The request that was sent last; None once its outcome is known."""
        return None if self._attempt is None else self._attempt.request

    def sending(self) -> None:
        """Note that the request is sent now."""
        self._began = time.perf_counter()
        if not self._is_in_flight:
            self._is_in_flight = True
            self._toucher.began()

    def answered(self, status: int) -> OutgoingRequest | None:
        """Note the status of an answer; return a request to send once more, without refused fields, or None."""
        if (attempt := self._attempt) is None:
            return None
        marked = attempt.request.marked
        again = attempt.answered(status)
        if again is not None:
            self._refused = marked
        elif attempt.is_refused and self._refused is not None and self._marker is not None:
            self._marker.refused()
        if again is None and status < 300 and self._has_priority:
            is_taken = "retention" in attempt.request.optional
            self._count("priorities" if is_taken else "refused_priorities")
        return again

    def head(self, status: int, headers: Mapping[str, str]) -> Verdict | None:
        """Read the answer's status and headers. Returns a verdict if the body does not matter."""
        self._status = status
        if 200 <= status < 300:
            sent = self._outgoing
            if is_stream(headers.get("content-type", ""), asked=sent is not None and sent.streams):
                facts = AnswerFacts(self._began)
                self._reader = StreamedAnswer(hide_usage=sent is not None and sent.hides_usage, facts=facts)
            else:
                self._reader = WholeAnswer()
            return None
        if status < 400:
            return self._verdict("put back")
        should_retry = headers.get("x-should-retry")
        if should_retry == "true" or (should_retry != "false" and is_transient(status)):
            delay = retry_after(headers) or 0.0
            return self._verdict("fail", delay=delay if delay <= _MAX_RETRY_AFTER else 0.0)
        return self._verdict("abandon")

    @property
    def cuts(self) -> bool:
        """True if the body may pass on shorter than it came."""
        return isinstance(self._reader, StreamedAnswer) and self._reader.hides_usage

    @property
    def is_decided(self) -> bool:
        """True if the rest of the answer cannot change the verdict: a stream has reported an error."""
        return isinstance(self._reader, StreamedAnswer) and self._reader.facts.failed

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the body, without its content encoding; return the bytes to pass on now."""
        reader = self._reader
        if reader is None:
            return data
        try:
            return reader.feed(data)
        except Exception:
            return self._unreadable(reader, data)

    def split_before_end(self, passed: bytes) -> tuple[bytes, bytes]:
        """Split the result of `feed` before the event that ends the stream.

        Only a client that asks for that event has handed all earlier ones to its application. The second part is empty
        if there is nothing to hold back.
        """
        if not isinstance(self._reader, StreamedAnswer) or not self._reader.facts.ended or self._has_split:
            return passed, b""
        self._has_split = True
        events = passed.rstrip(b"\r\n")
        start = max(events.rfind(gap) + len(gap) if gap in events else 0 for gap in (b"\n\n", b"\r\n\r\n", b"\r\r"))
        return passed[:start], passed[start:]

    def passes_end(self) -> None:
        """Note that the client has asked for the part that `split_before_end` held back."""
        self._has_passed_end = True

    def finish(self) -> bytes:
        """Read the end of the body; return the remaining bytes to pass on. Returns nothing when called again."""
        reader = self._reader
        was_whole, self._is_whole = self._is_whole, True
        if reader is None or was_whole:
            return b""
        try:
            return reader.finish()
        except Exception:
            return self._unreadable(reader, b"")

    def _unreadable(self, reader: AnswerReader, data: bytes) -> bytes:
        self._on_error("an answer could not be read")
        self._reader = None
        return reader.held() + data

    def end(self, error: BaseException | None = None) -> Verdict | None:
        """End the exchange: by an error, or because the body was read or closed. None if it had ended before."""
        if self._over:
            return None
        if self._status is None:
            # A client may try again after an Exception; never after a cancellation or an interrupt.
            return self._verdict("fail" if isinstance(error, Exception) else "abandon")
        reader = self._reader
        if reader is None:
            return self._verdict("commit" if self._is_whole and not (self._plan.tracked and error) else "abandon")
        # If the application gets an exception instead of the answer, it drops the turn, and its next prompt lacks the
        # blocks that a commit would record as seen. If nothing is recorded, it only matters that the engine has read
        # the prompt.
        is_dropped = self._plan.tracked and error is not None
        if isinstance(reader, StreamedAnswer):
            facts = reader.facts
            if not facts.started or is_dropped or (self._plan.tracked and facts.failed):
                return self._verdict("abandon")
            is_complete = (self._is_whole and facts.complete) or self._has_passed_end or not self._plan.tracked
            return self._verdict("commit" if is_complete else "commit part")
        if self._is_whole and not is_dropped:
            return self._verdict("abandon" if reader.facts.failed else "commit")
        # Clients read such a body before they return, so they may try again.
        return self._verdict("fail" if isinstance(error, Exception) else "abandon")

    def _verdict(self, step: Step, delay: float = 0.0) -> Verdict:
        self._over = True
        if self._is_in_flight:
            self._toucher.ended()
        turn_id = self._kept_turn() if step == "commit" else None
        commits = step in ("commit", "commit part")
        if commits and turn_id is None and self._plan.tracked and self._turn is not None and self._turn.adds_text:
            # What the server does not keep is in no later prompt, whatever the application has of the answer.
            step, commits = "abandon", False
        if self._marker is not None and self._refused is not None:
            self._marker.report(self._refused, None)
        elif self._marker is not None and (sent := self._outgoing) is not None and sent.marked is not None:
            usage = None if self._reader is None else self._reader.facts.usage
            # An answer without usage has not failed: it does not show what became of its marks.
            self._marker.report(sent.marked, usage if commits else usage or None)
        report = self._report() if commits else None
        unread = commits and (self._reader is None or self._reader.facts.unread)
        self._asked = self._attempt = None  # their texts are long
        self.primes = ()
        return Verdict(self._sent, self._plan, step, report, delay, unread, turn_id)

    def _kept_turn(self) -> str | None:
        if self._turn is None or self._reader is None:
            return None
        try:
            return self._turn.id_in(self._reader.facts.response)
        except Exception:
            self._on_error("an answer's turn could not be read")
            return None

    def _report(self) -> EngineReport:
        if self._reader is None:
            return EngineReport()
        facts, tokens = self._reader.facts, self._reader.facts.tokens
        ends = None
        is_whole = self._asked is not None and self._asked.is_text and not (self._turn and self._turn.adds_text)
        if tokens.cached_tokens is not None and self._asked is not None and is_whole:
            try:
                ends = block_ends(self._asked.prompt, self._plan)
            except Exception:
                self._on_error("a prompt's blocks could not be located")
        # A feed looks for the prompt's tokens among the KV blocks under the plan's salt; under another they mean
        # nothing.
        is_own_salt = self._outgoing is not None and self._outgoing.salt == self._plan.cache_salt
        token_ids = facts.prompt_token_ids if is_own_salt else None
        return EngineReport(
            tokens.cached_tokens,
            tokens.prompt_tokens,
            facts.ttft,
            token_ids,
            ends,
            profile=facts.profile,
            written_tokens=tokens.written_tokens,
        )
