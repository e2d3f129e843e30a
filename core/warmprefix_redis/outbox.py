"""Operations that a store has not executed yet."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.stores import Abandon, Commit, Conversation, Forget, Operation, Prepare, SeenBlock, unanswered_id

__all__ = ["Outbox", "PendingOperation", "Settlement", "UnansweredPlan", "operations_of"]

_MAX_PER_CONVERSATION = 64
_MAX_LABELS = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class UnansweredPlan:
    """A plan whose `Prepare` got no answer, so that its past is unknown.

    Its lease is taken late and ended at once. Nothing recorded before is certain any more, and blocks recorded later
    stay contested until the plan ends. Its commit voids them too, because other workers may have such plans as well.
    """

    conversation: Conversation
    plan_id: str

    def operations(self) -> tuple[Operation[Any], ...]:
        return Prepare(self.conversation, self.plan_id, {}), Forget(self.conversation)


@dataclass(frozen=True, slots=True, eq=False)
class Settlement:
    """Many plans that ended, replaced by a few operations: no recorded block is certain, but their labels stay taken.

    Their blocks are committed as those of an unanswered plan, which takes their labels and voids everything else. Each
    plan returns its lease only after that, because the voided commit must not contest blocks recorded later.
    """

    conversation: Conversation
    plan_id: str
    sent: Sequence[SeenBlock]
    ended: Sequence[str]

    @classmethod
    def of(cls, conversation: Conversation, replaced: Sequence[PendingOperation]) -> Settlement:
        """Return one settlement for many pending operations, oldest first. It keeps no more than a store would."""
        sent: dict[tuple[str, bytes], SeenBlock] = {}
        ended: dict[str, None] = {}
        for pending in replaced:
            if isinstance(pending, Commit | Settlement):
                sent.update({(block.label, block.fingerprint): block for block in pending.sent})
            if isinstance(pending, Settlement):
                ended.update(dict.fromkeys(pending.ended))
            elif isinstance(pending, Commit | Abandon):
                ended[pending.plan_id] = None
        for pending in replaced:
            if isinstance(pending, UnansweredPlan):
                ended.pop(pending.plan_id, None)  # the store has no lease of it
        plan_id = unanswered_id(f"settled-{uuid.uuid4().hex}")
        return cls(conversation, plan_id, tuple(sent.values())[-_MAX_LABELS:], tuple(ended)[-_MAX_PER_CONVERSATION:])

    def operations(self) -> tuple[Operation[Any], ...]:
        return (
            *UnansweredPlan(self.conversation, self.plan_id).operations(),
            Commit(self.conversation, self.plan_id, self.sent),
            *[Abandon(self.conversation, plan_id) for plan_id in self.ended],
        )


PendingOperation: TypeAlias = Commit | Abandon | Forget | UnansweredPlan | Settlement
"""Each may be executed twice, and late: the store's contract allows that."""


def operations_of(pending: PendingOperation) -> tuple[Operation[Any], ...]:
    """Return the operations to execute, in order."""
    return pending.operations() if isinstance(pending, UnansweredPlan | Settlement) else (pending,)


class Outbox:
    """Pending operations by conversation, oldest first. Thread-safe; each method takes O(1).

    An operation stays until it was executed: while one thread executes it, another must not trust the
    conversation's record. If a conversation has dozens of them, one `Settlement` replaces them.

    Args:
        max_pending: Most operations. Beyond it, the conversation that waits longest loses its operations, of the tenant
            with the most.
    """

    def __init__(self, max_pending: int = 65_536) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending must be 1 or more, got {max_pending}")
        self._max_pending = max_pending
        self._lock = fork_safe_lock()  # the garbage collector may abandon plans, in the middle of anything
        self._waiting: FairLru[Conversation, tuple[PendingOperation, ...]] = FairLru()
        self.dropped = 0
        """Operations dropped by the bound."""

    def add(self, pending: PendingOperation) -> None:
        """Add an operation behind the others of its conversation."""
        with self._lock:
            before = self.waiting(pending.conversation)
            after = (*(before if len(before) < _MAX_PER_CONVERSATION else _settled(before)), pending)
            self._put(pending.conversation, after)
            while self._waiting.size > self._max_pending:
                self.dropped += len(self._waiting.evict()[1])

    def _put(self, conversation: Conversation, pending: tuple[PendingOperation, ...]) -> None:
        self._waiting.put(conversation, pending, conversation.tenant, len(pending))

    def waiting(self, conversation: Conversation) -> tuple[PendingOperation, ...]:
        """Return a conversation's operations, in the order in which to execute them."""
        return self._waiting.get(conversation) or ()

    def remove(self, pending: PendingOperation) -> None:
        """Remove an operation that was executed; no effect if it was removed before."""
        with self._lock:
            before = self.waiting(pending.conversation)
            left = tuple(other for other in before if other is not pending)
            if left:
                self._put(pending.conversation, left)
            else:
                self._waiting.pop(pending.conversation)

    def conversations(self) -> list[Conversation]:
        """Return all conversations with pending operations, the one that waits longest first."""
        with self._lock:
            return list(self._waiting)

    def clear(self) -> None:
        """Drop everything without counting it."""
        with self._lock:
            self._waiting.clear()
            self.dropped = 0

    def __len__(self) -> int:
        return self._waiting.size


def _settled(pending: tuple[PendingOperation, ...]) -> tuple[PendingOperation, ...]:
    """Return a settlement of the ended plans, then the newest of the unanswered plans that are still open."""
    settlement = Settlement.of(pending[0].conversation, pending)
    ended = {each.plan_id for each in pending if isinstance(each, Commit | Abandon)}
    still_open = [each for each in pending if isinstance(each, UnansweredPlan) and each.plan_id not in ended]
    return (settlement, *still_open[-(_MAX_PER_CONVERSATION // 2) :])
