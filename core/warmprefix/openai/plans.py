"""Plans on their way to the engine: who has each, and what became of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from math import inf
from typing import Literal

from warmprefix.forks import in_each_process
from warmprefix.plan import ContextPlan
from warmprefix.routing.keys import session_key

__all__ = ["PlanBook", "SentPlan"]


class SentPlan:
    """A plan, and where it is. Only a `PlanBook` changes it."""

    __slots__ = (
        "__weakref__",
        "answer",
        "cache_salt",
        "deadline",
        "dropped",
        "id",
        "open_blocks",
        "plan",
        "session",
        "state",
        "was_taken",
    )

    def __init__(self, plan: ContextPlan) -> None:
        self.id = plan.id
        self.plan: ContextPlan | None = plan
        """None once it is over: its texts are not kept."""
        self.cache_salt = plan.cache_salt
        self.session = session_key(plan)
        """Names its conversation; None without one."""
        self.state: Literal["ready", "taken", "failed", "answered", "over"] = "ready"
        self.answer: object = None
        """When "answered": the commit to make if the block ends without an exception."""
        self.dropped = False
        """Whether an exception left a block of `sending` while a request had it: then its answer counts for nothing."""
        self.deadline = 0.0
        """When "failed": until when another attempt may come."""
        self.open_blocks = 0
        """Blocks of `sending` that it is in; as long as there is one, so long may another attempt come."""
        self.was_taken = False
        """Whether any request had it."""

    @property
    def is_sending(self) -> bool:
        """Whether a request has it, within a block of `sending`."""
        return self.open_blocks > 0 and self.state == "taken"


class PlanBook:
    """Every plan that a link was given lately. Thread-safe; a finalizer may call it in the middle of any other call."""

    def __init__(self, max_plans: int) -> None:
        self._max_plans = max_plans
        self._sent: OrderedDict[str, SentPlan] = OrderedDict()
        self._failed: dict[str, SentPlan] = {}
        in_each_process(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def enter(self, plan: ContextPlan) -> SentPlan:
        """The plan's entry, a new one if it has none. Beyond the bound the oldest entry is forgotten."""
        with self._lock:
            sent = self._sent.get(plan.id)
            if sent is None:
                sent = self._sent[plan.id] = SentPlan(plan)
                if len(self._sent) > self._max_plans:
                    self._sent.popitem(last=False)
            return sent

    def find(self, plan_id: str) -> SentPlan | None:
        return self._sent.get(plan_id)

    def take(self, sent: SentPlan) -> ContextPlan | None:
        """Its plan, for one request alone; None if another request has it, or it is over."""
        with self._lock:
            if sent.state not in ("ready", "failed"):
                return None
            self._failed.pop(sent.id, None)
            sent.state = "taken"
            sent.was_taken = True
            return sent.plan

    def put_back(self, sent: SentPlan) -> None:
        """The request has not come to anything yet; the next one may have it."""
        with self._lock:
            if sent.state == "taken":
                sent.state = "ready"

    def fail(self, sent: SentPlan, deadline: float) -> tuple[SentPlan, ContextPlan] | None:
        """The request failed; until the deadline, or the end of its blocks, another attempt may have it.

        Beyond the bound, the one that has waited longest is ended in its stead, and returned.
        """
        with self._lock:
            if sent.state != "taken":
                return None
            sent.state = "failed"
            sent.deadline = inf if sent.open_blocks else deadline
            self._failed[sent.id] = sent
            if len(self._failed) <= self._max_plans:
                return None
            oldest = next(iter(self._failed.values()))
            plan = self.end(oldest)
            return None if plan is None else (oldest, plan)

    def hold(self, sent: SentPlan, answer: object) -> bool:
        """Keep the plan of an answered request until its block of `sending` ends; False if it is in none."""
        with self._lock:
            if sent.state != "taken" or not sent.open_blocks:
                return False
            sent.state, sent.answer = "answered", answer
            return True

    def end(self, sent: SentPlan) -> ContextPlan | None:
        """Nobody gets it any more. Returns its plan, once."""
        with self._lock:
            plan, sent.plan, sent.answer, sent.state = sent.plan, None, None, "over"
            self._failed.pop(sent.id, None)
            return plan

    def enter_block(self, sent: SentPlan) -> None:
        """A block of `sending` begins, until whose end any number of attempts may fail."""
        with self._lock:
            sent.open_blocks += 1

    def leave_block(self, sent: SentPlan, *, raised: bool) -> tuple[ContextPlan | None, object]:
        """End the plan unless it is in another block, or a request has it; return it, and its held answer."""
        with self._lock:
            sent.open_blocks -= 1
            if sent.state == "taken":
                sent.dropped = sent.dropped or raised
            if sent.open_blocks or sent.state == "taken":
                return None, None
            answer = sent.answer
            return self.end(sent), answer

    def end_overdue(self, now: float) -> list[tuple[SentPlan, ContextPlan]]:
        """`end` of those that nobody tried again in time."""
        with self._lock:
            overdue = [sent for sent in self._failed.values() if sent.deadline <= now]
            return [(sent, plan) for sent in overdue if (plan := self.end(sent)) is not None]

    @property
    def next_deadline(self) -> float | None:
        with self._lock:
            return min((sent.deadline for sent in self._failed.values()), default=None)

    @property
    def failed(self) -> int:
        """How many wait for another attempt."""
        return len(self._failed)
