"""`PlanTracker`: follows each plan from its request to its commit or abandonment at the planner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmprefix.errors import log_failure
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.plan import ContextPlan
from warmprefix.ticker import Ticker
from warmprefix_openai.engine_metrics import EngineMetrics
from warmprefix_openai.exchange import Verdict
from warmprefix_openai.plans import PlanBook, SentPlan
from warmprefix_openai.primer import Primer
from warmprefix_openai.touching import LinkTouches

if TYPE_CHECKING:
    from warmprefix.planner import ContextPlanner

__all__ = ["LinkStats", "PlanTracker"]

_log = logging.getLogger("warmprefix")

_THREAD = "warmprefix-link"

_UNSENT = (
    "a block of sending(plan) ended and no request in it carried the plan: it is still to be sent, such as a stream "
    "that goes out when first read, or its prompt lacks the plan's blocks; the plan is abandoned, and requests sent "
    "from now on go without its cache_salt"
)

_COMMITS = ("commit", "commit part")

_GRACE_SECONDS = 30.0
"""Time for a client to try again; the longest pause of the clients' own is 8 seconds, and they may queue."""

_IDLE_SECONDS = 60.0
"""Time between two checks for overdue plans, while there are none."""


@dataclass(frozen=True, slots=True)
class LinkStats:
    """A snapshot of a link's counters; every field only ever grows, except the last."""

    requests: int = 0
    """Requests sent with a plan, each attempt counted."""
    commits: int = 0
    """Plans committed."""
    abandons: int = 0
    """Plans abandoned."""
    early_closes: int = 0
    """Of the abandoned plans, those of a conversation whose stream was closed, or stopped without an error, after its
    first content and before its end, outside of a block of `sending`: the link cannot see whether the application keeps
    such an answer."""
    withdrawn: int = 0
    """Commits taken back because the call was cancelled before the application had its answer."""
    refused_commits: int = 0
    """Of the commits, those that the planner did not record: another planner's plan, or one it had closed before."""
    unknown_plans: int = 0
    """Requests whose header named a plan that this link does not have; they went on without it."""
    repeated_plans: int = 0
    """Requests whose plan another one had; they got its `cache_salt` and nothing else."""
    unmatched: int = 0
    """Requests that could have carried a plan and did not: to another route, or, within `sending`, without its blocks
    in the prompt."""
    unsent: int = 0
    """Blocks of `sending` that ended, without an exception, before any request carried their plan: nothing was sent in
    them, or nothing that had its blocks."""
    priorities: int = 0
    """Requests that an engine which evicts by priority took with one."""
    refused_priorities: int = 0
    """Requests that it refused because of theirs; they went out once more without."""
    unread_answers: int = 0
    """Answers of the model that could not be read for usage: too large, or not JSON."""
    errors: int = 0
    """Failures of the link itself and of the planner; the request or its answer went on."""
    waiting: int = 0
    """Plans whose request failed, and which wait for the client to try again."""


class PlanTracker:
    """State machine of the plans of one link: settles the verdicts of their exchanges.

    Thread-safe. Nothing that fails in here becomes a failure of a request. Memory is bounded.
    """

    def __init__(self, planner: ContextPlanner, metrics: EngineMetrics, primer: Primer, touches: LinkTouches) -> None:
        self.planner = planner
        self.metrics = metrics
        self.primer = primer
        self.touches = touches
        self.book = PlanBook()
        self._counts: Counter[str] = Counter()
        self._settling: set[asyncio.Task[None]] = set()
        self._lock = fork_safe_lock()
        in_each_process(self._renew)

    def _renew(self) -> None:
        self._ticker = Ticker(self._give_up_overdue, _do_nothing, _THREAD)

    def enter(self, plan: ContextPlan) -> SentPlan:
        """Return the plan's entry; a TypeError if it is no `ContextPlan`."""
        if not isinstance(plan, ContextPlan):
            raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
        return self.book.enter(plan)

    def stats(self) -> LinkStats:
        """Return the counts since the start."""
        with self._lock:
            return LinkStats(**self._counts, waiting=self.book.failed)

    def close(self) -> None:
        """Abandon the plans that wait for another attempt, and end touches. The tracker stays usable. Idempotent."""
        self.touches.close()
        with self._lock:
            ticker, self._ticker = self._ticker, Ticker(self._give_up_overdue, _do_nothing, _THREAD)
        ticker.stop(timeout=1.0)
        self._give_up(float("inf"))

    def settle(self, verdict: Verdict | None) -> None:
        """Carry out the verdict of an exchange. Never raises; a finalizer may call it."""
        if verdict is not None and (due := self._noted(verdict)) is not None:
            self._notify_planner(due)

    async def asettle(self, verdict: Verdict | None) -> None:
        """Do the same as `settle` in a task, even if the caller is cancelled; then withdraw the commit.

        A caller that is cancelled here has no answer: its application gets a CancelledError instead.
        """
        if verdict is None or (due := self._noted(verdict)) is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # another loop, such as Trio's, which has no asyncio tasks
            try:
                await self._anotify_planner(due, [])
            except BaseException:
                self._withdraw(due)
                raise
            return
        begun: list[bool] = []
        notifying = loop.create_task(self._anotify_planner(due, begun))
        self._settling.add(notifying)  # the loop itself holds tasks weakly

        def done(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            if not begun:  # the loop was closed before the task ran
                self._notify_planner(due)

        notifying.add_done_callback(done)
        try:
            await asyncio.shield(notifying)
        except BaseException:
            self._withdraw(due)
            raise

    def degrade(self, what: str) -> None:
        """Count and log a failure of the link or of the planner; the request goes on without its plan."""
        log_failure(_log, what, first=self.count("errors") == 1)

    def count_unsent(self) -> None:
        """Count and log a block of `sending` that ended without an exception and without a request."""
        _log.log(logging.WARNING if self.count("unsent") == 1 else logging.DEBUG, "%s", _UNSENT)

    def _noted(self, verdict: Verdict) -> Verdict | None:
        """Update the plan's state; return the verdict for the planner, on this plan or on one that it displaced."""
        if verdict.step == "put back":
            self.book.put_back(verdict.sent)
            return None
        commits = verdict.step in _COMMITS and verdict.plan.tracked
        if commits and self.book.hold(verdict.sent, verdict):  # the end of the block decides
            return None
        if commits and verdict.sent.dropped:
            verdict = verdict._replace(step="abandon", report=None)
        if verdict.step == "commit part":
            self.count("early_closes")
            verdict = verdict._replace(step="abandon", report=None)
        may_be_retried = verdict.step == "fail"
        # The SDK does not retry a refusal, but its caller may fall back on another model or endpoint.
        if may_be_retried or (verdict.step == "abandon" and verdict.sent.is_sending):
            grace = _GRACE_SECONDS + verdict.delay if may_be_retried else 0.0
            displaced = self.book.fail(verdict.sent, time.monotonic() + grace)
            self._watch()
            return None if displaced is None else Verdict(*displaced, "abandon")
        self.book.end(verdict.sent)
        self.primer.learn(verdict.plan, verdict.report)
        if verdict.unread:
            self.count("unread_answers")
        return verdict

    def _notify_planner(self, verdict: Verdict) -> None:
        try:
            if verdict.step in _COMMITS:
                report, turn_id = self.metrics.added_to(verdict.report), verdict.turn_id or verdict.sent.turn_id
                recorded = self.planner.commit(verdict.plan, report=report, turn_id=turn_id)
                self.count("commits", *(() if recorded else ("refused_commits",)))
                if recorded:
                    self.touches.served(verdict.plan)
            else:
                self.planner.abandon(verdict.plan)
                self.count("abandons")
        except Exception:
            self.degrade(f"the planner failed to {verdict.step} a plan")

    async def _anotify_planner(self, verdict: Verdict, begun: list[bool]) -> None:
        begun.append(True)
        try:
            if verdict.step in _COMMITS:
                report, turn_id = self.metrics.added_to(verdict.report), verdict.turn_id or verdict.sent.turn_id
                recorded = await self.planner.acommit(verdict.plan, report=report, turn_id=turn_id)
                self.count("commits", *(() if recorded else ("refused_commits",)))
                if recorded:
                    self.touches.served(verdict.plan)
            else:
                await self.planner.aabandon(verdict.plan)
                self.count("abandons")
        except Exception:
            self.degrade(f"the planner failed to {verdict.step} a plan")

    def _withdraw(self, verdict: Verdict) -> None:
        if verdict.step in _COMMITS and verdict.plan.tracked:
            try:
                self.planner.withdraw(verdict.plan)
                self.count("withdrawn")
            except Exception:  # the caller's cancellation goes on
                self.degrade("a commit could not be withdrawn")

    def count(self, *names: str) -> int:
        """Add one to these counts; return the first of them."""
        with self._lock:
            self._counts.update(names)
            return self._counts[names[0]]

    def _watch(self) -> None:
        try:
            with self._lock:
                self._ticker.start()
                self._ticker.wake()
        except RuntimeError:  # no more threads can start: the plans are given up with the next verdict or close
            self.degrade("no thread to give up plans in")

    def _give_up_overdue(self) -> float:
        self._give_up(time.monotonic())
        deadline = self.book.next_deadline
        return _IDLE_SECONDS if deadline is None else min(_IDLE_SECONDS, deadline - time.monotonic())

    def _give_up(self, now: float) -> None:
        for sent, plan in self.book.end_overdue(now):
            self._notify_planner(Verdict(sent, plan, "abandon"))


def _do_nothing() -> None:
    """End a thread whose link is gone."""
