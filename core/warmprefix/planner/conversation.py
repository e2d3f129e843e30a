"""The seen-block store of one planner: timed, failing open, and never trusted after a lost operation."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from warmprefix.annotate import has_bracket, header_labels
from warmprefix.errors import StoreError, StoreUnavailableError
from warmprefix.labels import is_lasting_label, is_turn_label
from warmprefix.plan import ContextPlan
from warmprefix.planner.references import PlanDraft
from warmprefix.planner.unsettled import Unsettled, unanswered_id
from warmprefix.quotes import opening_keys
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
    ReadTurn,
    SeenBlock,
    SeenStore,
    Steps,
    TurnRecord,
    WriteTurn,
    arun_steps,
    run_steps,
)
from warmprefix.telemetry import PlannerMetrics

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["ConversationStore"]

T = TypeVar("T")

_LAST_ATTEMPT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 5.0
"""Between two attempts to forget a conversation whose commit was withdrawn."""
_MAX_TASKS = 256
"""Conversations that tasks forget at a time; others are forgotten after later commits."""


class ConversationStore:
    """What conversations have seen.

    If the store fails or is slow, a request goes on without its answer. Then the conversation is unsettled: the store
    may have executed the operation or not, and may still do so. Before its record is trusted again, the store must
    forget it: when the conversation next does anything, or after the commit of another one. The planner's lock is never
    held here.

    Args:
        store: None for one in this process. One that can be slow bounds the time of a call itself.
        metrics: Counts failures, and times the calls.
    """

    def __init__(self, store: SeenStore | None, metrics: PlannerMetrics) -> None:
        self._metrics = metrics
        self._store: SeenStore = MemorySeenStore() if store is None else store
        is_awaited = isinstance(self._store, AsyncSeenStore)
        self._async_store: AsyncSeenStore = self._store if is_awaited else _AsyncTwin(self._store)  # type: ignore[assignment]
        self._unsettled = Unsettled()
        self._forgetting: set[asyncio.Task[None]] = set()

    def prepare(self, draft: PlanDraft) -> PreparedTurn | TurnRecord | None:
        """Return what the conversation has seen of a draft's blocks, or a branch of all; None for nothing.

        If the draft shows its history, the store forgets the conversation instead: the record no longer follows it,
        so no later plan may trust the record.
        """
        operation = _first_operation(draft)
        return None if operation is None else self._checked(draft, self._execute(operation))

    async def aprepare(self, draft: PlanDraft) -> PreparedTurn | TurnRecord | None:
        operation = _first_operation(draft)
        return None if operation is None else self._checked(draft, await self._aexecute(operation))

    def _checked(self, draft: PlanDraft, record: PreparedTurn | TurnRecord | None) -> PreparedTurn | TurnRecord | None:
        """Return a record without the blocks whose values no planner wrote; count one failure if there are some.

        In the record of a turn, only the draft's blocks are checked, and one that no planner wrote voids all.
        """
        if record is None:
            return None
        turn = record.turn
        if isinstance(record, TurnRecord):
            keys = {block.fingerprint for block in draft.blocks}
            proposed = [block for block in record.blocks if block.fingerprint in keys]
            is_damaged = record.damaged or not all(_is_sound(block, turn, is_turn_label) for block in proposed)
            checked: PreparedTurn | TurnRecord | None = None if is_damaged else record.at(int(time.time()))
        else:
            seen = {
                key: block
                for key, block in record.seen.items()
                if block.label and _is_sound(block, turn, is_lasting_label)
            }
            is_damaged = record.damaged or len(seen) < len(record.seen)
            checked = record._replace(seen=seen)
        if is_damaged:
            self._metrics.count("store_errors")
        return checked

    def commit(self, plan: ContextPlan, in_time: bool, turn_id: str | None) -> bool:
        """Record the plan's blocks as seen; True if they were recorded.

        The store must receive late commits too: if the model saw that prompt, plans that were made at the same time
        may not be part of the history. In a branch that would be another turn, with another id.
        """
        operation = _commit(plan, turn_id)
        return operation is None or self._count_commit(plan, in_time, self._execute(operation))

    async def acommit(self, plan: ContextPlan, in_time: bool, turn_id: str | None) -> bool:
        operation = _commit(plan, turn_id)
        return operation is None or self._count_commit(plan, in_time, await self._aexecute(operation))

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
        """Forget the plan's conversation; a task does it if an event loop runs."""
        self._metrics.count("withdrawn_commits")
        conversation = _conversation(plan)
        self._unsettled.add(Forget(conversation, ended=(_id_in_store(plan),)))
        self._forget_soon(conversation)

    def forget(self, conversation: Conversation) -> None:
        """Forget a conversation.

        Raises:
            StoreError: The store failed.
        """
        self._unsettled.add(Forget(conversation))
        try:
            run_steps(self._forget_steps(conversation, self._store.execute))
        except Exception as error:
            raise StoreError("forget", conversation) from error

    # -- calls of the store --------------------------------------------------------------------------------------

    def _execute(self, operation: Operation[T]) -> T | None:
        """Return the result of an operation; None if the store failed."""
        return run_steps(self._steps(operation, self._store.execute))

    async def _aexecute(self, operation: Operation[T]) -> T | None:
        return await arun_steps(self._steps(operation, self._async_store.aexecute))

    def _steps(self, operation: Operation[T], execute: Callable[[Operation[Any]], Any]) -> Steps[T | None]:
        conversation = operation.conversation
        is_prepared = isinstance(operation, Prepare)
        # Records of turns are true from the beginning and never change, so they leave nothing to settle. Whether the
        # store executed a call that failed or not, or does it late: later plans find the record, or send the blocks
        # again. If the caller is cancelled, nobody learns the id of the turn, and no prompt continues it.
        is_turn = isinstance(operation, ReadTurn | WriteTurn)
        began = time.perf_counter()
        try:
            if not is_turn and self._unsettled.get(conversation) is not None:
                if not is_prepared:
                    self._unsettled.add(operation)
                if not (yield from self._settle(conversation, execute)) or not is_prepared:
                    if is_prepared:
                        self._unsettled.add(operation, was_sent=False)
                    return None
            result: T = yield partial(execute, operation)
            is_awaited = is_prepared or isinstance(operation, ReadTurn)  # by a request
            if not is_awaited and (other := self._unsettled.oldest()) is not None:
                yield from self._settle(other, execute)
        except Exception as error:
            self._metrics.degrade("store")
            if not is_turn:
                self._unsettled.add(operation, was_sent=not isinstance(error, StoreUnavailableError))
            return None
        except BaseException:
            # The application receives the exception in place of a plan, or of the answer that it commits.
            if not is_turn:
                self._unsettled.add(
                    Abandon(conversation, operation.plan_id) if isinstance(operation, Prepare) else operation
                )
            if isinstance(operation, Commit):
                self._forget_soon(conversation)
            raise
        finally:
            self._metrics.store_latency.observe(time.perf_counter() - began)
        return result

    def _settle(self, conversation: Conversation, execute: Callable[[Operation[Any]], Any]) -> Steps[bool]:
        """Have the store forget an unsettled conversation; False if it failed."""
        try:
            yield from self._forget_steps(conversation, execute)
        except Exception:
            self._metrics.degrade("store")
            return False
        return True

    def _settle_all(self, execute: Callable[[Operation[Any]], Any]) -> Steps[None]:
        deadline = time.monotonic() + _LAST_ATTEMPT_SECONDS
        while (oldest := self._unsettled.oldest()) is not None and time.monotonic() < deadline:
            if not (yield from self._settle(oldest, execute)):
                break

    def _forget_steps(self, conversation: Conversation, execute: Callable[[Operation[Any]], Any]) -> Steps[None]:
        forget = self._unsettled.get(conversation)
        if forget is None:  # another thread was faster
            return
        try:
            yield partial(execute, forget)
        except Exception as error:
            self._unsettled.failed(forget, error)
            raise
        self._unsettled.settled(forget)

    def _forget_soon(self, conversation: Conversation) -> None:
        """Forget an unsettled conversation: where an event loop runs, in a task that tries until it has succeeded."""
        if isinstance(self._store, AsyncSeenStore) and (loop := _running_loop()) is not None:
            if len(self._forgetting) < _MAX_TASKS:
                task = loop.create_task(self._forget_until_settled(conversation))
                self._forgetting.add(task)  # the loop itself holds tasks weakly
                task.add_done_callback(self._forgetting.discard)
        else:
            run_steps(self._settle(conversation, self._store.execute))

    async def _forget_until_settled(self, conversation: Conversation) -> None:
        import asyncio

        pause = _FIRST_PAUSE_SECONDS
        while not await arun_steps(self._settle(conversation, self._async_store.aexecute)):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    # -- upkeep --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the `PlannerStats` of conversations."""
        return {"unsettled_conversations": len(self._unsettled)}

    def clear(self) -> None:
        """Forget all conversations.

        Raises:
            StoreError: The store failed.
        """
        try:
            self._store.clear()
        except Exception as error:
            raise StoreError("clear", "all conversations") from error
        self._unsettled.clear()

    def close(self) -> None:
        """Try once more to settle all conversations, for one second at most; then close the store."""
        run_steps(self._settle_all(self._store.execute))
        close = getattr(self._store, "close", None)
        if close is not None:
            close()

    async def aclose(self) -> None:
        """Do the same as `close`, and close the connections of this event loop too."""
        for task in [task for task in self._forgetting if task.get_loop() is _running_loop()]:
            task.cancel()
        await arun_steps(self._settle_all(self._async_store.aexecute))
        aclose = getattr(self._store, "aclose", None)
        if aclose is None:
            close = getattr(self._store, "close", None)
            if close is not None:
                close()
        else:
            await aclose()


class _AsyncTwin:
    """The async twin of a store that answers at once."""

    def __init__(self, store: SeenStore) -> None:
        self._store = store

    async def aexecute(self, operation: Operation[T]) -> T:
        return self._store.execute(operation)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    import asyncio  # slow to import, and applications with tasks have imported it

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _first_operation(draft: PlanDraft) -> Operation[PreparedTurn | TurnRecord | None] | None:
    key = draft.key
    if key is None:
        return None
    if draft.branch is not None:
        return ReadTurn(key)
    return Prepare(key, draft.plan_id, draft.proposed()) if draft.visible is None else Forget(key)


def _is_sound(block: SeenBlock, turn: int, is_possible: Callable[[str, bytes], bool]) -> bool:
    is_key = block.label[:1] in ("", "^")  # a key that is not the text's own names no passage
    return block.turn <= turn and (is_key or is_possible(block.label, block.fingerprint))


def _commit(plan: ContextPlan, turn_id: str | None) -> Commit | WriteTurn | None:
    """Return the operation that records a plan; None for a turn of a branch without an id."""
    turn, parent = plan.turn or 0, plan.parent
    shown = [planned for planned in plan.blocks if planned.reference is None]
    sent = []
    # A label stays in the history where its block is sent again without one.
    labelled = {block.fingerprint for block in parent.blocks if block.label[:1] not in ("", "^")} if parent else ()
    for planned in shown:
        # Later references without labels must not name a labelled block; in a branch, its label tells that.
        keys = opening_keys(planned.block.text) if parent is None or not planned.label else []
        is_new = bool(planned.label) or planned.block.fingerprint not in labelled
        key, *inner = keys if is_new and not planned.label else [planned.label, *keys]
        sent += [SeenBlock(_paragraph(each), each, turn, 0) for each in dict.fromkeys(inner) if each not in ("", key)]
        if is_new:
            sent.append(SeenBlock(planned.block.fingerprint, key, turn, planned.block.tokens))
    if parent is None:
        return Commit(_conversation(plan), _id_in_store(plan), [block for block in sent if block.label])
    if turn_id is None:
        return None
    labels = [
        label for planned in shown if has_bracket(planned.block.text) for label in header_labels(planned.render())
    ]
    others = set(labels).difference([planned.label for planned in shown])
    record = parent.followed_by(sent, sorted(others), int(time.time()))
    return WriteTurn(Conversation(plan.scope.tenant, turn_id), record)


def _paragraph(key: str) -> bytes:
    """Return what stands for the fingerprint of a paragraph inside a block, by which no block is found."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"paragraph").digest()


def _conversation(plan: ContextPlan) -> Conversation:
    assert plan.conversation is not None
    return Conversation(plan.scope.tenant, plan.conversation)


def _id_in_store(plan: ContextPlan) -> str:
    """Return the plan's id in the store, which differs if its `Prepare` got no answer."""
    return plan.id if plan.turn is not None else unanswered_id(plan.id)
