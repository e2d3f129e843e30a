"""Counters, latencies and observers of one planner, and how it survives failures."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from warmprefix.blocks import ContextBlock
from warmprefix.errors import log_failure
from warmprefix.plan import ContextPlan
from warmprefix.residency import EngineReport
from warmprefix.telemetry import LatencyHistogram, NoObserver, PlannerObserver
from warmprefix.traces import RequestRecorder, recorder_from_environment

__all__ = ["PlannerMetrics"]

_log = logging.getLogger("warmprefix")

_FAILURES = {
    "feed": "residency feed failed",
    "observer": "observer failed",
    "policy": "ordering policy failed",
    "recorder": "request recorder failed",
    "store": "seen-block store failed",
}
"""Log message for each part whose failure a request survives."""


class PlannerMetrics:
    """Counts one planner's work, and passes it on to its observer and its recorder.

    Args:
        lock: The planner's lock, which guards `counts`.
        observer: Notified of each plan and its end; None for no observer.
        recorder: Receives each request; None for the one that the environment asks for.
    """

    def __init__(
        self, lock: threading.RLock, observer: PlannerObserver | None, recorder: RequestRecorder | None
    ) -> None:
        self._lock = lock
        self._observer: PlannerObserver = NoObserver() if observer is None else observer
        self.recorder = recorder_from_environment() if recorder is None else recorder
        """Receives each request; None without a recorder."""
        self.counts: Counter[str] = Counter()
        """The counters of `PlannerStats`, by name."""
        self.plan_latency = LatencyHistogram()
        self.store_latency = LatencyHistogram()

    def degrade(self, part: Literal["feed", "observer", "policy", "recorder", "store"]) -> None:
        """Count and log the exception being handled, as a failure of `part`.

        The request goes on without that part. The first failure of each part is logged as a warning, later ones at
        DEBUG.
        """
        name = f"{part}_errors"
        with self._lock:
            self.counts[name] += 1
            is_first = self.counts[name] == 1
        log_failure(_log, _FAILURES[part], first=is_first)

    def record_request(
        self,
        blocks: Sequence[ContextBlock],
        conversation: str | None,
        tenant: str | None,
        model: str | None,
        preamble: str | None,
    ) -> None:
        """Pass a request to the recorder, if there is one, before it is planned."""
        if self.recorder is None:
            return
        try:
            self.recorder.record(
                tuple(blocks), conversation=conversation, tenant=tenant, model=model, preamble=preamble
            )
        except Exception:
            self.degrade("recorder")

    def count(self, name: str) -> None:
        """Add 1 to a counter. Called without the lock."""
        with self._lock:
            self.counts[name] += 1

    def count_plan(self, plan: ContextPlan, order: Sequence[int]) -> None:
        """Add a plan and its order of distinct blocks to the counters; the caller holds the lock."""
        counts = self.counts
        counts["plans"] += 1
        counts["planned_tokens"] += sum([planned.block.tokens for planned in plan.blocks])
        counts["resident_tokens"] += plan.resident_tokens
        counts["reordered_plans"] += list(order) != sorted(order)
        counts["note_tokens"] += plan.note_tokens
        if not plan.opens_prompt:  # only then can there be references
            counts["references"] += len(plan.references)
            counts["reference_tokens"] += plan.reference_tokens

    def notify_planned(self, plan: ContextPlan, began: float) -> None:
        """Record the latency since `began`, and notify the observer."""
        seconds = time.perf_counter() - began
        self.plan_latency.observe(seconds)
        try:
            self._observer.planned(plan, seconds)
        except Exception:
            self.degrade("observer")

    def notify_committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, began: float) -> None:
        """Notify the observer of a commit and its result."""
        try:
            self._observer.committed(plan, report, recorded, time.perf_counter() - began)
        except Exception:
            self.degrade("observer")

    def notify_abandoned(self, plan: ContextPlan) -> None:
        """Notify the observer that an open plan was abandoned."""
        try:
            self._observer.abandoned(plan)
        except Exception:
            self.degrade("observer")

    def stats(self) -> dict[str, Any]:
        """Return the counts and latencies of `PlannerStats`; the caller holds the lock."""
        return {
            **self.counts,
            "plan_latency": self.plan_latency.snapshot(),
            "store_latency": self.store_latency.snapshot(),
        }

    def clear(self) -> None:
        """Set all counters and latencies to zero; the caller holds the lock."""
        self.counts.clear()
        self.plan_latency.reset()
        self.store_latency.reset()
