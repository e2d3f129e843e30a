"""The seen-block store of one planner: timed, and failing open."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from warmprefix.plan import ContextPlan
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.request import PlanDraft
from warmprefix.stores import AsyncSeenStore, Conversation, MemorySeenStore, Prepared, SeenBlock, SeenStore
from warmprefix.stores.guard import GuardedStore
from warmprefix.stores.outbox import unheard

__all__ = ["ConversationStore"]


class _Closable(Protocol):
    def close(self) -> None: ...


@runtime_checkable
class _AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


class ConversationStore:
    """What conversations have seen. A request goes on without an answer if the store fails or is slow.

    The planner's lock is never held here. Each method has an async twin that differs in the await only.

    Args:
        store: None for one in this process. Any store but a `MemorySeenStore` is called through a `GuardedStore`.
        metrics: Counts failures, and times the calls.
    """

    def __init__(self, store: SeenStore | None, metrics: PlannerMetrics) -> None:
        self._metrics = metrics
        self._store: SeenStore
        self._async_store: AsyncSeenStore
        self._guard: GuardedStore | None = None
        self._resources: list[_Closable] = []
        if store is None or type(store) is MemorySeenStore:
            self._store = MemorySeenStore() if store is None else store
            self._async_store = _AsyncMemoryStore(self._store)
        else:
            self._guard = store if isinstance(store, GuardedStore) else GuardedStore(store)
            self._store = self._async_store = self._guard
            self._resources.append(self._guard)

    def prepare(self, draft: PlanDraft) -> Prepared | None:
        """Return what the conversation has seen of a draft's blocks; None if that plays no part in the plan.

        If the draft shows its history, the store forgets the conversation instead: the record no longer follows it,
        so no later plan may trust the record.
        """
        key = draft.key
        if key is None:
            return None
        with self._timed():
            if draft.visible is None:
                return self._store.prepare(key, draft.plan_id, draft.proposed())
            self._store.forget(key)
        return None

    async def aprepare(self, draft: PlanDraft) -> Prepared | None:
        key = draft.key
        if key is None:
            return None
        with self._timed():
            if draft.visible is None:
                return await self._async_store.aprepare(key, draft.plan_id, draft.proposed())
            await self._async_store.aforget(key)
        return None

    def commit(self, plan: ContextPlan, in_time: bool) -> bool:
        """Record the plan's blocks as seen; True if they were recorded.

        The store must receive late commits too: if the model saw that prompt, plans that were made at the same time
        may not be part of the history.
        """
        with self._timed():
            recorded = self._store.commit(_conversation(plan), _id_in_store(plan), _sent_blocks(plan))
            return self._count_conflict(plan, in_time, recorded)
        return False

    async def acommit(self, plan: ContextPlan, in_time: bool) -> bool:
        with self._timed():
            recorded = await self._async_store.acommit(_conversation(plan), _id_in_store(plan), _sent_blocks(plan))
            return self._count_conflict(plan, in_time, recorded)
        return False

    def _count_conflict(self, plan: ContextPlan, in_time: bool, recorded: bool) -> bool:
        if in_time and not recorded and plan.turn is not None:
            self._metrics.count("conflicts")
        return recorded

    def abandon(self, plan: ContextPlan) -> None:
        """Give back the plan's lease of a turn."""
        with self._timed():
            self._store.abandon(_conversation(plan), _id_in_store(plan))

    async def aabandon(self, plan: ContextPlan) -> None:
        with self._timed():
            await self._async_store.aabandon(_conversation(plan), _id_in_store(plan))

    def withdraw(self, plan: ContextPlan) -> None:
        """Forget the plan's conversation, without waiting for a shared store."""
        self._metrics.count("withdrawn_commits")
        if self._guard is None:
            self._store.forget(_conversation(plan))
        else:
            self._guard.forget_soon(_conversation(plan))

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation.

        Raises:
            StoreError: The store failed.
        """
        self._store.forget(conversation)

    async def aforget(self, conversation: Conversation) -> None:
        await self._async_store.aforget(conversation)

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
        """Return the fields of `PlannerStats` that count operations which a shared store has not received."""
        outbox = None if self._guard is None else self._guard.outbox
        return {} if outbox is None else {"untold_notices": len(outbox), "lost_notices": outbox.dropped}

    def clear(self) -> None:
        """Forget all conversations.

        Raises:
            StoreError: The store failed.
        """
        self._store.clear()

    def close_too(self, resource: _Closable) -> None:
        """Close `resource` after the store, in `close` and, if it has one, by its `aclose`."""
        self._resources.append(resource)

    def close(self) -> None:
        for resource in self._resources:
            resource.close()

    async def aclose(self) -> None:
        """Close the connections of this event loop; call `close` before."""
        for resource in self._resources:
            if isinstance(resource, _AsyncClosable):
                await resource.aclose()


class _AsyncMemoryStore:
    """The async twin of a store in this process, which answers at once."""

    def __init__(self, store: MemorySeenStore) -> None:
        self._store = store

    async def aprepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        return self._store.prepare(conversation, plan_id, proposed)

    async def acommit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        return self._store.commit(conversation, plan_id, sent)

    async def aabandon(self, conversation: Conversation, plan_id: str) -> bool:
        return self._store.abandon(conversation, plan_id)

    async def aforget(self, conversation: Conversation) -> None:
        self._store.forget(conversation)


def _conversation(plan: ContextPlan) -> Conversation:
    assert plan.conversation is not None
    return Conversation(plan.scope.tenant, plan.conversation)


def _id_in_store(plan: ContextPlan) -> str:
    """Return the plan's id in the store; another one if the store gave no answer when the plan was made."""
    return plan.id if plan.turn is not None else unheard(plan.id)


def _sent_blocks(plan: ContextPlan) -> list[SeenBlock]:
    turn = plan.turn or 0
    return [
        SeenBlock(planned.block.fingerprint, planned.label, turn, planned.block.tokens)
        for planned in plan.blocks
        if planned.reference is None
    ]
