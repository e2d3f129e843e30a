"""One attempt at a request that carries a plan, from its being sent to what follows for the plan. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple

from warmprefix.openai.answers import AnswerReader, StreamedAnswer, WholeAnswer
from warmprefix.openai.calls import Additions, Call, block_ends
from warmprefix.openai.plans import SentPlan
from warmprefix.plan import ContextPlan
from warmprefix.residency import EngineReport

__all__ = ["Exchange", "Verdict"]

_MAY_PASS = frozenset({408, 409, 429})
"""Statuses below 500 after which OpenAI's clients try again by themselves."""

_LONGEST_DELAY = 60.0
"""Seconds that these clients let a server keep them waiting."""


Step = Literal["commit", "commit part", "abandon", "put back", "fail"]
"""What to do with a plan. "commit part": the application closed a stream before its end, and may keep what it has read.
"fail": another attempt may follow."""


class Verdict(NamedTuple):
    """What follows for the plan."""

    sent: SentPlan
    plan: ContextPlan
    step: Step
    report: EngineReport | None = None
    """Of a commit."""
    delay: float = 0.0
    """Of a failure: seconds that the server asked to be left alone."""
    unread: bool = False
    """Whether there was an answer that could not be read."""


class Exchange:
    """Told in turn that the request is sent, the answer's head, its body, and its end; says once what follows.

    It never raises for what an engine sends, nor for a mistake of its own: the bytes then pass as they are.
    """

    def __init__(
        self,
        sent: SentPlan,
        plan: ContextPlan,
        call: Call,
        *,
        additions: Additions,
        on_error: Callable[[str], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sent = sent
        self._plan = plan
        self._call: Call | None = call
        self._hide_usage = additions.hide_usage
        # Who looks for these tokens among an engine's KV blocks will look under the plan's salt.
        self._tells_tokens = additions.cache_salt == plan.cache_salt
        self._on_error = on_error
        self._clock = clock
        self._began = clock()
        self._status: int | None = None
        self._reader: AnswerReader | None = None
        self._ttft: float | None = None
        self._is_whole = False
        self._has_split = False
        self._has_passed_end = False
        """Whether the client has asked for the event that says that nothing follows."""
        self._over = False

    def sending(self) -> None:
        """The request goes to the wire now."""
        self._began = self._clock()

    def head(self, status: int, headers: Mapping[str, str]) -> Verdict | None:
        """The answer's status and headers have come. A verdict says that its body is of no interest."""
        self._status = status
        if 200 <= status < 300:
            is_stream = headers.get("content-type", "").lower().startswith("text/event-stream")
            self._reader = StreamedAnswer(hide_usage=self._hide_usage) if is_stream else WholeAnswer()
            return None
        if status < 400:
            return self._verdict("put back")
        asked = headers.get("x-should-retry")
        if asked == "true" or (asked != "false" and (status in _MAY_PASS or status >= 500)):
            return self._verdict("fail", delay=_asked_delay(headers))
        return self._verdict("abandon")

    @property
    def cuts(self) -> bool:
        """Whether the body may be passed on shorter than it comes."""
        return self._hide_usage and isinstance(self._reader, StreamedAnswer)

    @property
    def is_decided(self) -> bool:
        """Whether nothing that may still come changes what follows: a stream has said that there was an error."""
        return isinstance(self._reader, StreamedAnswer) and self._reader.heard.failed

    def feed(self, data: bytes) -> bytes:
        """A piece of the body, without its content encoding: what of it, and of earlier ones, to pass on."""
        reader = self._reader
        if reader is None:
            return data
        try:
            passed = reader.feed(data)
            if self._ttft is None and reader.heard.started:
                self._ttft = self._clock() - self._began
        except Exception:
            return self._unreadable(reader, data)
        return passed

    def split_before_end(self, passed: bytes) -> tuple[bytes, bytes]:
        """Split what `feed` returned before the event that says that nothing follows.

        Only a client that asks for that event has handed all earlier ones to its application. The second part is empty
        if there is nothing to hold back.
        """
        if not isinstance(self._reader, StreamedAnswer) or not self._reader.heard.ended or self._has_split:
            return passed, b""
        self._has_split = True
        events = passed.rstrip(b"\r\n")
        start = max(events.rfind(gap) + len(gap) if gap in events else 0 for gap in (b"\n\n", b"\r\n\r\n", b"\r\r"))
        return passed[:start], passed[start:]

    def passes_end(self) -> None:
        """Note that the client has asked for what `split_before_end` held back."""
        self._has_passed_end = True

    def finish(self) -> bytes:
        """Return what is still to be passed on of a body that has come to its end; nothing when called again."""
        reader = self._reader
        if reader is None or self._is_whole:
            self._is_whole = True
            return b""
        self._is_whole = True
        try:
            return reader.finish()
        except Exception:
            return self._unreadable(reader, b"")

    def _unreadable(self, reader: AnswerReader, data: bytes) -> bytes:
        self._on_error("an answer could not be read")
        self._reader = None
        return reader.held() + data

    def end(self, error: BaseException | None = None) -> Verdict | None:
        """The exchange is over: with an error, or since the body was read, or closed. None if it was over before."""
        if self._over:
            return None
        if self._status is None:
            # A client may try again after what is an Exception; never after a cancellation or an interrupt.
            return self._verdict("fail" if isinstance(error, Exception) else "abandon")
        reader = self._reader
        if reader is None:
            return self._verdict("commit" if self._is_whole and not (self._plan.tracked and error) else "abandon")
        # If the application gets an exception in place of the answer, it drops the turn, and its next prompt lacks what
        # a commit would record as seen. Where nothing is recorded, it only matters that the engine has read the prompt.
        is_dropped = self._plan.tracked and error is not None
        if isinstance(reader, StreamedAnswer):
            heard = reader.heard
            if not heard.started or is_dropped or (self._plan.tracked and heard.failed):
                return self._verdict("abandon")
            is_complete = self._is_whole or self._has_passed_end or not self._plan.tracked
            return self._verdict("commit" if is_complete else "commit part")
        if self._is_whole and not is_dropped:
            return self._verdict("abandon" if reader.heard.failed else "commit")
        # Clients read such a body before they return, so that they try again.
        return self._verdict("fail" if isinstance(error, Exception) else "abandon")

    def _verdict(self, step: Step, delay: float = 0.0) -> Verdict:
        self._over = True
        commits = step in ("commit", "commit part")
        report = self._report() if commits else None
        unread = commits and (self._reader is None or self._reader.heard.unread)
        self._call = None  # its texts are long
        return Verdict(self._sent, self._plan, step, report, delay, unread)

    def _report(self) -> EngineReport:
        ttft = self._ttft if isinstance(self._reader, StreamedAnswer) else None
        if self._reader is None:
            return EngineReport(ttft=ttft)
        heard = self._reader.heard
        ends = None
        if heard.cached_tokens is not None and self._call is not None and self._call.is_text:
            try:
                ends = block_ends(self._call.prompt, self._plan)
            except Exception:
                self._on_error("a prompt's blocks could not be looked for")
        token_ids = heard.prompt_token_ids if self._tells_tokens else None
        return EngineReport(heard.cached_tokens, heard.prompt_tokens, ttft, token_ids, ends)


def _asked_delay(headers: Mapping[str, str]) -> float:
    """What `Retry-After` asks for, in seconds from now, as far as clients heed it."""
    for name, seconds in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        asked = headers.get(name)
        if asked is None:
            continue
        try:
            delay = float(asked) * seconds
        except ValueError:
            try:
                delay = parsedate_to_datetime(asked).timestamp() - time.time()
            except ValueError:
                continue
        if 0 < delay <= _LONGEST_DELAY:
            return delay
    return 0.0
