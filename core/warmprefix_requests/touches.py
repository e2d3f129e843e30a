"""`Toucher`: requests for one token that keep paths in an engine's cache which would evict them. No I/O, no clock.

An LRU engine takes a path for new once a request reads it, and one that evicts by priority keeps the highest one. A
sender asks for what is due when little waits, sends it, and reports the answer; the planner decides which paths are
worth it.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.plan import ContextPlan, Scope, Touch
from warmprefix.residency import EngineReport
from warmprefix_requests.outgoing import OutgoingRequest
from warmprefix_requests.prefixes import end_of_blocks, prefix_request
from warmprefix_requests.refusals import Attempt, FieldRefusals
from warmprefix_requests.retention import RequestPriorities

if TYPE_CHECKING:
    from warmprefix.planner import ContextPlanner

__all__ = ["DueTouch", "TouchStats", "Toucher"]

W = TypeVar("W")

_MAX_BYTES = 32 << 20
_PER_REQUEST, _PER_BYTE = 5_000, 2
"""Bytes of memory that a kept request takes, with its plan, and that each of its bytes takes."""
_LARGEST = _MAX_BYTES // 32
"""Longest request that is kept."""
_MAX_SCOPES = 1_024
_SCOPES_ASKED = 4
"""Most scopes for which the planner is asked at a time."""
_MAX_IN_FLIGHT = 8
"""Most requests of the sender's own that may be in flight beside a touch."""
_MOST_SAVED_UP = 8
"""Most touches that requests without one allow later; each request allows one."""
_MAX_FAILURES_IN_A_ROW = 3
_PAUSE_REQUESTS, _LONGEST_PAUSE = 100, 6_400
"""Requests without a touch after failures in a row; twice as many each time."""


@dataclass(frozen=True, slots=True)
class TouchStats:
    """A snapshot of counters that only grow."""

    sent: int = 0
    """Touches that the engine answered."""
    failed: int = 0
    """Touches that failed, were cancelled, or whose answer did not report the cached tokens."""
    skipped: int = 0
    """Touches that were due and not sent: the request to cut was forgotten or cannot be cut."""
    computed_tokens: int = 0
    """Tokens of prefill that the engine reported for touches: what they cost."""
    found_tokens: int = 0
    """Tokens that touches found, and so kept, in the cache."""


@dataclass(frozen=True, slots=True)
class _KeptRequest(Generic[W]):
    plan: ContextPlan
    request: OutgoingRequest
    endpoint: str
    way: W


@dataclass(frozen=True, eq=False)  # without slots: it is referenced weakly
class DueTouch(Generic[W]):
    """A touch to send now."""

    touch: Touch
    way: W
    """What the sender kept with the request."""
    attempt: Attempt
    """Has the `request` to send."""


class Toucher(Generic[W]):
    """Chooses when to touch which path through one sender, such as a client. Thread-safe.

    It keeps the latest requests, to cut touches from them; their bytes are bounded and fair over tenants. There is one
    touch in flight at a time and at most one per request; none while more than a few requests are in flight, and none
    for a while after failures. Answers without a count of cached tokens are failures: nothing could show that touches
    cost more than they keep. A forked process starts with nothing.
    """

    def __init__(self, planner: ContextPlanner, priorities: RequestPriorities) -> None:
        """Start with nothing kept. `priorities` are those of the sender's requests."""
        self._planner = planner
        self._priorities = priorities
        self._refusals = FieldRefusals()
        self._lock = fork_safe_lock()
        in_each_process(self._renew)

    def _renew(self) -> None:
        self._kept: FairLru[str, _KeptRequest[W]] = FairLru()
        self._scopes: OrderedDict[Scope, None] = OrderedDict()
        """Those served lately; the one to ask first is in front."""
        self._counts: Counter[str] = Counter()
        self._in_flight = 0
        self._is_choosing = False
        self._touching: Callable[[], object] = _nothing
        """Returns the touch in flight; None without one, also if its sender is gone without a report."""
        self._allowed = _MOST_SAVED_UP
        self._requests = 0
        self._failures_in_a_row = 0
        self._pause = _PAUSE_REQUESTS
        self._paused_until = 0

    @property
    def is_possible(self) -> bool:
        """True if the engine continues a prefix from anywhere and does not bill what a request reads."""
        profile = self._planner.profile
        others = (profile.checkpoints, profile.marks, profile.slots, profile.lifetime, profile.separator)
        return all(other is None for other in others) and not profile.read_price

    def stats(self) -> TouchStats:
        """Return the counts since the start."""
        with self._lock:
            return TouchStats(**self._counts)

    def keep(self, plan: ContextPlan, request: OutgoingRequest, endpoint: str, way: W) -> None:
        """Keep the request of a plan as it goes out, so that touches can be cut from it.

        Args:
            plan: A plan that does not open its prompt is not kept.
            request: With its salt. The fields that the endpoint may refuse are left out.
            endpoint: Where it goes.
            way: What the sender needs to send there again.
        """
        request = request.plain or request
        size = len(request.content)
        if not plan.opens_prompt or size > _LARGEST or not self.is_possible:
            return
        with self._lock:
            kept = _KeptRequest(plan, replace(request, content=b""), endpoint, way)
            self._kept.put(plan.id, kept, plan.scope.tenant, _PER_REQUEST + _PER_BYTE * size)
            while self._kept.size > _MAX_BYTES:
                self._kept.evict()

    def began(self) -> None:
        """Count a request of the sender's own as in flight."""
        with self._lock:
            self._in_flight += 1

    def ended(self) -> None:
        """Count it as over."""
        with self._lock:
            self._in_flight = max(self._in_flight - 1, 0)

    def served(self, plan: ContextPlan) -> None:
        """Note that a plan was committed, which allows one touch."""
        with self._lock:
            self._requests += 1
            self._allowed = min(self._allowed + 1, _MOST_SAVED_UP)
            if self._kept.get(plan.id) is None:
                return
            self._scopes[plan.scope] = None
            self._scopes.move_to_end(plan.scope, last=False)
            if len(self._scopes) > _MAX_SCOPES:
                self._scopes.popitem()

    def due(self, accepts: Callable[[W], bool] | None = None) -> DueTouch[W] | None:
        """Return the touch to send now; None if none is due or may be sent. Its answer must be reported.

        `accepts` says whether the caller can send that way.
        """
        with self._lock:
            if not self._may_send:
                return None
            scopes = list(islice(self._scopes, _SCOPES_ASKED))
            for scope in scopes[1:]:  # another one's turn comes next time
                self._scopes.move_to_end(scope)
            self._is_choosing = True
        try:
            named = (touch for scope in scopes for touch in self._planner.touches(scope))
            due = next((due for touch in named if (due := self._made(touch, accepts)) is not None), None)
            if due is not None:
                self._touching = weakref.ref(due)
            return due
        finally:
            self._is_choosing = False

    @property
    def _may_send(self) -> bool:
        if self._is_choosing or self._touching() is not None or not self._scopes:
            return False
        if self._allowed < 1 or self._requests < self._paused_until:
            return False
        return self._in_flight <= _MAX_IN_FLIGHT and self.is_possible

    def _made(self, touch: Touch, accepts: Callable[[W], bool] | None) -> DueTouch[W] | None:
        kept = self._kept.get(touch.plan_id)
        place = None
        if kept is not None and (accepts is None or accepts(kept.way)):
            place = end_of_blocks(kept.request, kept.plan, touch.blocks)
        with self._lock:
            if kept is None or place is None:
                self._counts["skipped"] += 1
                return None
            self._allowed -= 1
        request = prefix_request(self._priorities.of_touch(kept.request, touch.priority), *place)
        return DueTouch(touch, kept.way, self._refusals.attempt(request, kept.endpoint, touch.scope.tenant))

    def answered(
        self, due: DueTouch[W], status: int | None, prompt_tokens: int | None, cached_tokens: int | None
    ) -> OutgoingRequest | None:
        """Report the answer to a touch to the planner; return a request to send in its place, after a refusal.

        A `status` of None stands for no answer, such as after a cancellation.
        """
        again = None if status is None else due.attempt.answered(status)
        if again is not None:
            return again
        is_answered = status is not None and status < 300
        with self._lock:
            self._touching = _nothing
            if not is_answered or prompt_tokens is None or cached_tokens is None:
                self._fail()
                return None
            self._failures_in_a_row, self._pause = 0, _PAUSE_REQUESTS
            self._counts["sent"] += 1
            self._counts["computed_tokens"] += max(prompt_tokens - cached_tokens, 0)
            self._counts["found_tokens"] += cached_tokens
        self._planner.touched(due.touch, EngineReport(cached_tokens, prompt_tokens))
        return None

    def _fail(self) -> None:
        self._counts["failed"] += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self._failures_in_a_row = 0
            self._paused_until = self._requests + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _nothing() -> None:
    """Return that there is no touch in flight."""
