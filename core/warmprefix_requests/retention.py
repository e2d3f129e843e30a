"""`RequestPriorities`: the form in which an engine is asked to keep a path longer than its LRU would. No I/O.

Only SGLang takes one over HTTP: `--radix-eviction-policy priority` evicts the lowest `priority` first, keeps for each
node the highest number of its requests, and never lowers it. A class such as 1 or 2 would pin paths for ever; so the
number is the time up to which a path counts as new, and newer requests overtake it. It is one number for a whole
prompt, whose new end would inherit what its beginning deserves; so only a touch, which ends with the path, adds to the
time. TensorRT-LLM's server refuses its `KvCacheRetentionConfig` as an unknown field, and vLLM has none; the `priority`
of vLLM and of SGLang with `--enable-priority-scheduling` is about the order of waiting requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from warmprefix.forks import fork_safe_lock
from warmprefix.plan import ContextPlan
from warmprefix_requests.outgoing import OutgoingRequest, Processor

if TYPE_CHECKING:
    from warmprefix.planner import ContextPlanner

__all__ = ["RequestPriorities"]

_FIELD = "priority"
_ROUTES = ("chat", "completions")
"""On the others SGLang ignores the field."""
_WEIGHT = 0.02
"""Of the latest pause in the mean, once there were as many as this stands for."""
_LONGEST = 10.0
"""A pause between two requests counts as at most this many mean ones: a night is not the pace of a day."""


class RequestPriorities:
    """Priorities of the requests of one sender. Thread-safe.

    The planner counts in requests of age; an engine that several processes share needs one clock. So the number is the
    time in milliseconds, and what a path deserves is added at the sender's pace. Once a request has had a number, all
    have: the engine takes a request without one for the oldest.
    """

    def __init__(self, planner: ContextPlanner, clock: Callable[[], float] = time.time) -> None:
        """Send none yet."""
        self._planner = planner
        self._clock = clock
        self._latest: float | None = None
        self._pace: float | None = None
        """Mean seconds between two requests."""
        self._gaps = 0
        self._longest_gap: float | None = None
        """Of the first ones. It does not count: an application may try one request long before it begins."""
        self._has_begun = False
        self._lock = fork_safe_lock()

    def processor(self, plan: ContextPlan | None) -> Processor | None:
        """Return the processor that adds the priority of a request, which may have no plan; None if it gets none."""
        if self._planner.profile.eviction != "priority":
            return None
        with self._lock:
            if plan is not None:
                self._observe(self._clock())
                self._has_begun = self._has_begun or plan.retention is not None
        return self._with_priority if self._has_begun else None

    def of_touch(self, request: OutgoingRequest, age: int) -> OutgoingRequest:
        """Return the request of a touch with its priority, which lasts for so many requests."""
        if self._planner.profile.eviction != "priority":
            return request
        self._has_begun = True
        return self._with_priority(request, age) or request

    def _with_priority(self, request: OutgoingRequest, age: int = 0) -> OutgoingRequest | None:
        if request.route not in _ROUTES or _FIELD in request.body:
            return None
        return request.with_fields({_FIELD: round(1_000 * (self._clock() + age * (self._pace or 0.0)))})

    def _observe(self, now: float) -> None:
        latest, self._latest = self._latest, now
        if latest is None or now < latest:  # a clock may be set back
            return
        gap = now - latest
        if self._longest_gap is None:
            self._longest_gap = gap
            return
        self._gaps += 1
        if self._gaps * _WEIGHT <= 1:
            gap, self._longest_gap = sorted((gap, self._longest_gap))
        else:
            gap = min(gap, _LONGEST * (self._pace or 0.0) + 0.001)
        pace = self._pace or 0.0
        self._pace = pace + max(1 / self._gaps, _WEIGHT) * (gap - pace)
