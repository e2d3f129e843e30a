"""What a seen-block store must forget, because it failed in an operation and may have executed it or not."""

from __future__ import annotations

from typing import Any

from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.stores import Abandon, Commit, Conversation, Forget, Operation, Prepare

__all__ = ["Unsettled", "unanswered_id"]

_MAX_ENTRIES = 65_536
"""Plans and blocks over all conversations."""
_MAX_ENDED, _MAX_OPEN = 1_024, 32
"""Plans per conversation."""
_MAX_BLOCKS = 4_096
"""Per conversation."""

_PERMANENT_ERRORS = (TypeError, ValueError, ArithmeticError)
"""Errors of a store that rejects an operation's values. Retrying cannot fix these."""


class Unsettled:
    """One `Forget` for each conversation whose record is not up to date. Thread-safe; each method O(blocks).

    Beyond its bound the conversation that waits longest is dropped, of the tenant with the most. Then it is unknown
    which conversations were dropped: so each counts as unsettled until the store has forgotten it.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock(self._drop)  # the garbage collector may abandon plans, in the middle of anything
        self._forgets: FairLru[Conversation, Forget] = FairLru()
        self._settled: FairLru[Conversation, bool] | None = None
        """The conversations that the store has forgotten since the overflow; None without one."""

    def get(self, conversation: Conversation) -> Forget | None:
        """Return what the store must execute before the conversation's record is trusted; None for nothing."""
        with self._lock:
            forget = self._forgets.get(conversation)
            if forget is None and self._settled is not None and not self._settled.use(conversation):
                return Forget(conversation)
            return forget

    def oldest(self) -> Conversation | None:
        """Return the conversation that waits longest; None if all are settled."""
        with self._lock:
            return next(iter(self._forgets), None)

    def add(self, operation: Operation[Any], *, was_sent: bool = True) -> None:
        """Add an operation that the store may have executed or not; it has not if it `was_sent` not."""
        conversation = operation.conversation
        with self._lock:
            self._put(_merged(self._forgets.get(conversation) or Forget(conversation), operation, was_sent))
            if self._settled is not None:
                self._settled.pop(conversation)
            if self._forgets.size > _MAX_ENTRIES:
                self._overflow()
                while self._forgets.size > _MAX_ENTRIES:
                    self._forgets.evict()

    def settled(self, forget: Forget) -> None:
        """Remove a `Forget` that was executed, unless operations were added meanwhile."""
        conversation = forget.conversation
        with self._lock:
            if self._forgets.get(conversation) is forget:
                self._forgets.pop(conversation)
            if self._settled is not None and self._forgets.get(conversation) is None:
                self._settled.put(conversation, True, conversation.tenant)
                if len(self._settled) > _MAX_ENTRIES:
                    self._settled.evict()

    def failed(self, forget: Forget, error: Exception) -> None:
        """Let other conversations go first; drop values that the store rejects."""
        with self._lock:
            if self._forgets.use(forget.conversation) is forget and isinstance(error, _PERMANENT_ERRORS):
                self._put(Forget(forget.conversation))

    def clear(self) -> None:
        """Count all conversations as settled, because the store has forgotten them."""
        with self._lock:
            self._forgets.clear()
            self._settled = None

    def __len__(self) -> int:
        return len(self._forgets)

    def _put(self, forget: Forget) -> None:
        size = 1 + len(forget.ended) + len(forget.open) + len(forget.sent)
        self._forgets.put(forget.conversation, forget, forget.conversation.tenant, size)

    def _drop(self) -> None:
        self._forgets.clear()
        self._overflow()

    def _overflow(self) -> None:
        self._settled = FairLru()


def unanswered_id(plan_id: str) -> str:
    """Return the id to use for a plan after its `Prepare` got no answer in time.

    The plan's own id is unusable then, because that `Prepare` may still reach the store late.
    """
    return f"{plan_id}?"


def _merged(forget: Forget, operation: Operation[Any], was_sent: bool) -> Forget:
    ended, opened = dict.fromkeys(forget.ended), dict.fromkeys(forget.open)
    sent = {(block.label, block.fingerprint): block for block in forget.sent}
    if isinstance(operation, Prepare):
        if was_sent:  # it may take a lease late
            ended[operation.plan_id] = None
        opened[unanswered_id(operation.plan_id)] = None
    elif isinstance(operation, Commit | Abandon):
        ended[operation.plan_id] = None
    elif isinstance(operation, Forget):
        ended.update(dict.fromkeys(operation.ended))
    if isinstance(operation, Commit):
        sent.update({(block.label, block.fingerprint): block for block in operation.sent})
    still_open = [plan_id for plan_id in opened if plan_id not in ended]
    return Forget(
        forget.conversation,
        tuple(ended)[-_MAX_ENDED:],
        tuple(still_open[-_MAX_OPEN:]),
        tuple(sent.values())[-_MAX_BLOCKS:],
    )
