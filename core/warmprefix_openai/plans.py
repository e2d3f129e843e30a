"""Plans on their way to the engine: which request has each of them, and how requests name their plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Literal

from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.plan import ContextPlan, PlannedBlock, Scope

__all__ = ["PLAN_HEADER", "PlanBook", "Sending", "SentPlan", "plan_in_context", "sending_now"]

PLAN_HEADER = "x-warmprefix-plan"
"""Header that names a request's plan; a link removes it from every request."""

_NAME_CHARACTERS = 32
_MAX_PLANS = 4_096
"""Plans that are kept, and of them those that wait for another attempt; beyond it the oldest are dropped."""


@dataclass(eq=False, slots=True)
class SentPlan:
    """A plan and its state. Only a `PlanBook` changes it."""

    id: str
    cache_salt: str | None
    plan: ContextPlan | None
    """None once the plan is over: its texts are not kept."""
    state: Literal["ready", "taken", "failed", "answered", "over"] = "ready"
    answer: object = None
    """When "answered": the commit to make if the block ends without an exception."""
    dropped: bool = False
    """True if an exception left a block of `sending` while a request had the plan: its answer does not count."""
    deadline: float = 0.0
    """When "failed": the time until which another attempt may come."""
    open_blocks: int = 0
    """Number of open blocks of `sending` with this plan; while there is one, another attempt may come."""
    was_taken: bool = False
    """True if any request had the plan."""
    turn_id: str | None = None
    """The id that the application gave its turn in a branch."""
    branch: tuple[Scope, Sequence[str]] | None = None
    """The scope of a plan that continues a branch, and the labels in brackets or first characters of its blocks."""

    @property
    def is_sending(self) -> bool:
        """True if a request has the plan, within a block of `sending`."""
        return self.open_blocks > 0 and self.state == "taken"


class PlanBook:
    """The plans that a link was given lately. Thread-safe; a finalizer may call it in the middle of any other call."""

    def __init__(self) -> None:
        self._sent: FairLru[str, SentPlan] = FairLru()
        self._failed: dict[str, SentPlan] = {}
        self._lock = fork_safe_lock()

    def enter(self, plan: ContextPlan) -> SentPlan:
        """Return the plan's entry, a new one if it has none. Beyond the bound an old entry is dropped."""
        with self._lock:
            sent = self._sent.get(plan.id)
            if sent is None:
                sent = SentPlan(plan.id, plan.cache_salt, plan)
                if plan.branch is not None:
                    sent.branch = (plan.scope, [_name(planned) for planned in plan.blocks])
                self._sent.put(plan.id, sent, plan.scope.tenant)
                if len(self._sent) > _MAX_PLANS:
                    self._sent.evict()
            return sent

    def find(self, plan_id: str) -> SentPlan | None:
        """Return the entry of a plan; None without one."""
        return self._sent.get(plan_id)

    def take(self, sent: SentPlan) -> ContextPlan | None:
        """Reserve the plan for one request and return it; None if another request has it, or it is over."""
        with self._lock:
            if sent.state not in ("ready", "failed"):
                return None
            self._failed.pop(sent.id, None)
            sent.state = "taken"
            sent.was_taken = True
            return sent.plan

    def put_back(self, sent: SentPlan) -> None:
        """Make the plan available again: its request had no outcome yet, such as a redirect."""
        with self._lock:
            if sent.state == "taken":
                sent.state = "ready"

    def fail(self, sent: SentPlan, deadline: float) -> tuple[SentPlan, ContextPlan] | None:
        """Keep the plan for another attempt, until the deadline or the end of its blocks.

        Beyond the bound, the plan that has waited longest is ended instead, and returned.
        """
        with self._lock:
            if sent.state != "taken":
                return None
            sent.state = "failed"
            sent.deadline = inf if sent.open_blocks else deadline
            self._failed[sent.id] = sent
            if len(self._failed) <= _MAX_PLANS:
                return None
            oldest = next(iter(self._failed.values()))
            plan = self.end(oldest)
            return None if plan is None else (oldest, plan)

    def hold(self, sent: SentPlan, answer: object) -> bool:
        """Keep the plan of an answered request until its block of `sending` ends; False if it is in no block."""
        with self._lock:
            if sent.state != "taken" or not sent.open_blocks:
                return False
            sent.state, sent.answer = "answered", answer
            return True

    def end(self, sent: SentPlan) -> ContextPlan | None:
        """End the plan for good; return it the first time."""
        with self._lock:
            plan, sent.plan, sent.answer, sent.state = sent.plan, None, None, "over"
            self._failed.pop(sent.id, None)
            return plan

    def enter_block(self, sent: SentPlan, turn_id: str | None = None) -> None:
        """Begin a block of `sending`; until it ends, any number of attempts may fail."""
        with self._lock:
            sent.open_blocks += 1
            sent.turn_id = turn_id

    def leave_block(self, sent: SentPlan, *, raised: bool) -> tuple[ContextPlan | None, object]:
        """End the plan unless it is in another block, or a request has it; return it with its held answer."""
        with self._lock:
            sent.open_blocks -= 1
            if sent.state == "taken":
                sent.dropped = sent.dropped or raised
            if sent.open_blocks or sent.state == "taken":
                return None, None
            answer = sent.answer
            return self.end(sent), answer

    def end_overdue(self, now: float) -> list[tuple[SentPlan, ContextPlan]]:
        """End the plans that had no other attempt in time, and return them."""
        with self._lock:
            overdue = [sent for sent in self._failed.values() if sent.deadline <= now]
            return [(sent, plan) for sent in overdue if (plan := self.end(sent)) is not None]

    @property
    def next_deadline(self) -> float | None:
        """Earliest deadline of the failed plans; None without any."""
        with self._lock:
            return min((sent.deadline for sent in self._failed.values()), default=None)

    @property
    def failed(self) -> int:
        """Number of plans that wait for another attempt."""
        return len(self._failed)


@dataclass(eq=False, slots=True)
class Sending:
    """A plan that requests made in this context may carry, and the one of the block around it."""

    book: PlanBook
    sent: SentPlan
    outer: Sending | None
    is_open: bool = True
    """False once the block ended: a task keeps the context that it was started in, however long it runs."""


sending_now: ContextVar[Sending | None] = ContextVar("warmprefix_sending", default=None)


def plan_in_context(book: PlanBook) -> SentPlan | None:
    """Return the plan that requests made here, through the link with this book, may carry."""
    sending = sending_now.get()
    while sending is not None:
        if sending.book is book and sending.is_open:
            return sending.sent
        sending = sending.outer
    return None


def _name(planned: PlannedBlock) -> str:
    """Return what a prompt has in it if it shows or names a block."""
    if planned.label:
        return f"[{planned.label}]"
    return planned.render()[:_NAME_CHARACTERS] if planned.reference is None else planned.reference.opening
