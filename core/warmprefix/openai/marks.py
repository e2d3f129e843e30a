"""How a request names its plan: a header that never leaves the process, or the context that it is made in."""

from __future__ import annotations

from contextvars import ContextVar

from warmprefix.openai.plans import PlanBook, SentPlan

__all__ = ["PLAN_HEADER", "Sending", "plan_in_context", "sending_now"]

PLAN_HEADER = "x-warmprefix-plan"
"""Is taken off every request that passes a link."""


class Sending:
    """A plan that requests made in this context may be of, and what was so before."""

    __slots__ = ("book", "is_open", "outer", "sent")

    def __init__(self, book: PlanBook, sent: SentPlan, outer: Sending | None) -> None:
        self.book = book
        self.sent = sent
        self.outer = outer
        self.is_open = True
        """Tasks keep the context that they were started in, however long they run."""


sending_now: ContextVar[Sending | None] = ContextVar("warmprefix_sending", default=None)


def plan_in_context(book: PlanBook) -> SentPlan | None:
    """The one that requests made here, through the link with this book, may be of."""
    sending = sending_now.get()
    while sending is not None:
        if sending.book is book and sending.is_open:
            return sending.sent
        sending = sending.outer
    return None
