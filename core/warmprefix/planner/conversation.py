"""The seen-block store of one planner: timed, and failing open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from warmprefix.labels import is_lasting_label
from warmprefix.plan import ContextPlan
from warmprefix.planner.references import PlanDraft
from warmprefix.stores import (
    Abandon,
    AsyncSeenStore,
    Commit,
    Conversation,
    Forget,
    MemorySeenStore,
    Operation,
    Prepare,
    PreparedTurn,
    SeenBlock,
    SeenStore,
    unanswered_id,
)
from warmprefix.telemetry import PlannerMetrics

__all__ = ["ConversationStore"]

T = TypeVar("T")


class ConversationStore:
    """What conversations have seen.

    If the store fails or is slow, a request goes on without its answer. The planner's lock is never held here.

    Args:
        store: None for one in this process. One that can be slow bounds the time of a call itself, as
            `warmprefix_redis.GuardedStore` does.
        metrics: Counts failures, and times the calls.
    """

    def __init__(self, store: SeenStore | None, metrics: PlannerMetrics) -> None:
        self._metrics = metrics
        self._store: SeenStore = MemorySeenStore() if store is None else store
        is_awaited = isinstance(self._store, AsyncSeenStore)
        self._async_store: AsyncSeenStore = self._store if is_awaited else _AsyncTwin(self._store)  # type: ignore[assignment]

    def prepare(self, draft: PlanDraft) -> PreparedTurn | None:
        """Return what the conversation has seen of a draft's blocks; None for nothing.

        If the draft shows its history, the store forgets the conversation instead: the record no longer follows it,
        so no later plan may trust the record.
        """
        operation = _first_operation(draft)
        return None if operation is None else self._checked(self._execute(operation))

    async def aprepare(self, draft: PlanDraft) -> PreparedTurn | None:
        operation = _first_operation(draft)
        return None if operation is None else self._checked(await self._aexecute(operation))

    def _checked(self, record: PreparedTurn | None) -> PreparedTurn | None:
        """Return a record without the blocks whose values no planner wrote; count one failure if there are some."""
        if record is None:
            return None
        seen = {
            key: block
            for key, block in record.seen.items()
            if is_lasting_label(block.label, key) and block.turn <= record.turn
        }
        if record.damaged or len(seen) < len(record.seen):
            self._metrics.count("store_errors")
        return record._replace(seen=seen)

    def commit(self, plan: ContextPlan, in_time: bool) -> bool:
        """Record the plan's blocks as seen; True if they were recorded.

        The store must receive late commits too: if the model saw that prompt, plans that were made at the same time
        may not be part of the history.
        """
        return self._count_commit(plan, in_time, self._execute(_commit(plan)))

    async def acommit(self, plan: ContextPlan, in_time: bool) -> bool:
        return self._count_commit(plan, in_time, await self._aexecute(_commit(plan)))

    def _count_commit(self, plan: ContextPlan, in_time: bool, recorded: bool | None) -> bool:
        """Return the result of a commit, None if the store failed, as a bool; count a conflict."""
        if in_time and recorded is not None and not recorded and plan.turn is not None:
            self._metrics.count("conflicts")
        return bool(recorded)

    def abandon(self, plan: ContextPlan) -> None:
        """Give back the plan's lease of a turn."""
        self._execute(Abandon(_conversation(plan), _id_in_store(plan)))

    async def aabandon(self, plan: ContextPlan) -> None:
        await self._aexecute(Abandon(_conversation(plan), _id_in_store(plan)))

    def withdraw(self, plan: ContextPlan) -> None:
        """Forget the plan's conversation, without waiting for a shared store."""
        self._metrics.count("withdrawn_commits")
        forget_soon = getattr(self._store, "forget_soon", None)
        if forget_soon is None:
            self._execute(Forget(_conversation(plan)))
        else:
            forget_soon(_conversation(plan))

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation.

        Raises:
            StoreError: The store failed.
        """
        self._store.execute(Forget(conversation))

    async def aforget(self, conversation: Conversation) -> None:
        await self._async_store.aexecute(Forget(conversation))

    def _execute(self, operation: Operation[T]) -> T | None:
        """Return the result of an operation; None if the store failed."""
        with self._timed():
            return self._store.execute(operation)
        return None

    async def _aexecute(self, operation: Operation[T]) -> T | None:
        with self._timed():
            return await self._async_store.aexecute(operation)
        return None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Time a call of the store; if it fails, count that and go on."""
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self._metrics.degrade("store")
        finally:
            self._metrics.store_latency.observe(time.perf_counter() - began)

    def stats(self) -> dict[str, Any]:
        """Return the `PlannerStats` of operations that a shared store has not received."""
        stats = getattr(self._store, "stats", dict)
        return dict(stats())

    def clear(self) -> None:
        """Forget all conversations.

        Raises:
            StoreError: The store failed.
        """
        self._store.clear()

    def close(self) -> None:
        close = getattr(self._store, "close", None)
        if close is not None:
            close()

    async def aclose(self) -> None:
        """Close the connections of this event loop too."""
        aclose = getattr(self._store, "aclose", None)
        if aclose is None:
            self.close()
        else:
            await aclose()


class _AsyncTwin:
    """The async twin of a store that answers at once."""

    def __init__(self, store: SeenStore) -> None:
        self._store = store

    async def aexecute(self, operation: Operation[T]) -> T:
        return self._store.execute(operation)


def _first_operation(draft: PlanDraft) -> Operation[PreparedTurn | None] | None:
    key = draft.key
    if key is None:
        return None
    return Prepare(key, draft.plan_id, draft.proposed()) if draft.visible is None else Forget(key)


def _commit(plan: ContextPlan) -> Commit:
    turn = plan.turn or 0
    sent = [
        SeenBlock(planned.block.fingerprint, planned.label, turn, planned.block.tokens)
        for planned in plan.blocks
        if planned.reference is None and planned.label
    ]
    return Commit(_conversation(plan), _id_in_store(plan), sent)


def _conversation(plan: ContextPlan) -> Conversation:
    assert plan.conversation is not None
    return Conversation(plan.scope.tenant, plan.conversation)


def _id_in_store(plan: ContextPlan) -> str:
    """Return the plan's id in the store, which differs if its `Prepare` got no answer."""
    return plan.id if plan.turn is not None else unanswered_id(plan.id)
