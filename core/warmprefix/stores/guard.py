"""A store that may fail, hang or be cut off, made safe to ask on the way of a request."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from warmprefix.errors import StoreError, StoreUnavailableError
from warmprefix.forks import in_each_process
from warmprefix.stores.base import AsyncSeenStore, Conversation, Maintained, Prepared, SeenBlock, SeenStore, Snapshot
from warmprefix.stores.breaker import CircuitBreaker
from warmprefix.stores.lanes import Lanes
from warmprefix.stores.outbox import Abandon, Commit, Forget, Notice, Outbox, Reserve, unheard
from warmprefix.ticker import Ticker

if TYPE_CHECKING:
    import asyncio

__all__ = ["GuardedStore"]

T = TypeVar("T")

_TURNS_OF_THE_LOOP = 4
"""From the bytes of an answer on a socket to the task that waits for it."""

_LONGEST_SLEEP = 3_600.0
"""Seconds; a thread can't wait for ever with a time limit."""

_NEVER = (TypeError, ValueError, ArithmeticError, struct.error)
"""What a store raises that can't take what it is told, however often it is told."""

_LAST_TRY = 1.0
"""Seconds, at the end."""


def _nothing() -> None: ...


class GuardedStore:
    """A `SeenStore` and `AsyncSeenStore` that answers in time or raises `StoreError`, whatever the one behind it does.

    - A call gets `budget` seconds, then its caller goes on without an answer. One that fails or takes longer opens the
      breaker, and while that is open the store is not asked.
    - What a caller could not tell the store (a commit, an abandon, a forget) waits in an outbox. It is delivered
      before this conversation is next prepared, or in the background as soon as the store answers again; until then
      `prepare` fails for this conversation, rather than trust a record that was not corrected.
    - If `prepare` fails, the caller is taken to go on without: the store hears of that plan later, as `unheard`.
    - A task that is cancelled while it waits leaves the command to end by itself, so that the next one on its
      connection can't get its answer.

    `inspect` and `clear` are for operators: they take their time, and only translate errors.

    Args:
        store: What does the work. If it is an `AsyncSeenStore` too, tasks await it; if not, threads call it for them.
        budget: Seconds a call.
        breaker: Decides when a store that failed is asked again.
        max_notices: Most that waits in the outbox.
        threads: Most calls that may hang at once before further ones fail.
        interval: Seconds between two calls of `Maintained.maintain`.
        retry: Seconds until what could not be told is tried again. Not at once: the call that got no answer in time may
            still be on its way.
    """

    def __init__(
        self,
        store: SeenStore,
        *,
        budget: float = 0.020,
        breaker: CircuitBreaker | None = None,
        max_notices: int = 65_536,
        threads: int = 16,
        interval: float = 0.25,
        retry: float = 0.05,
    ) -> None:
        for name, value in (("budget", budget), ("interval", interval), ("retry", retry)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.store = store
        self.breaker = CircuitBreaker() if breaker is None else breaker
        self.outbox = Outbox(max_notices)
        self._budget = budget
        self._lanes = Lanes(threads)
        self._maintained = isinstance(store, Maintained)
        self._serves_threads = getattr(store, "serves_threads", True)
        self._awaited = store if isinstance(store, AsyncSeenStore) and getattr(store, "serves_tasks", True) else None
        self._interval = interval
        self._retry = retry
        in_each_process(self._keep_here)
        self._left_behind: set[asyncio.Task[object]] = set()

    def _keep_here(self) -> None:
        # Guards the time. Re-entrant, because the garbage collector may abandon plans in the middle of anything.
        self._lock = threading.RLock()
        self._due = math.inf
        self._ticker = Ticker(self._tick, _nothing, "warmprefix-keeper")

    # -- what a request asks -----------------------------------------------------------------------------------

    def prepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        # To be told only once the call has ended, for until then it may take a lease.
        owe = partial(self._owe, conversation, Abandon(plan_id))

        def ask() -> Prepared:
            try:
                self._deliver(conversation)
                return self.store.prepare(conversation, plan_id, proposed)
            except BaseException:
                owe()
                raise

        try:
            return self._call("prepare", conversation, ask, owe)
        except StoreError:
            self._owe(conversation, Reserve(unheard(plan_id)))
            raise

    def commit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        def tell(conversation: Conversation) -> bool:
            self._deliver(conversation)  # the plan may be one of those that the store did not hear of
            return self.store.commit(conversation, plan_id, sent)

        with self._withdrawn_if_interrupted(conversation):
            return self._tell("commit", conversation, Commit(plan_id, sent), tell)

    def abandon(self, conversation: Conversation, plan_id: str) -> bool:
        return self._tell("abandon", conversation, Abandon(plan_id), self.store.abandon, plan_id)

    def forget(self, conversation: Conversation) -> None:
        self._tell("forget", conversation, Forget(), self.store.forget)

    # -- the same, for tasks -----------------------------------------------------------------------------------

    async def aprepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        owe, store = partial(self._owe, conversation, Abandon(plan_id)), self._awaited
        if store is None:
            return await self._in_thread(self.prepare, conversation, plan_id, proposed, late=owe)

        async def ask() -> Prepared:
            try:
                await self._adeliver(store, conversation)
                return await store.aprepare(conversation, plan_id, proposed)
            except BaseException:
                owe()
                raise

        try:
            return await self._acall("prepare", conversation, ask, owe)
        except StoreError:
            self._owe(conversation, Reserve(unheard(plan_id)))
            raise

    async def acommit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        notice, store = Commit(plan_id, sent), self._awaited
        with self._withdrawn_if_interrupted(conversation):
            if store is None:
                owe = partial(self._owe, conversation, notice)
                return await self._in_thread(self.commit, conversation, plan_id, sent, late=owe)

            async def tell(conversation: Conversation) -> bool:
                await self._adeliver(store, conversation)
                return await store.acommit(conversation, plan_id, sent)

            return await self._atell("commit", conversation, notice, tell)

    async def aabandon(self, conversation: Conversation, plan_id: str) -> bool:
        notice, store = Abandon(plan_id), self._awaited
        if store is None:
            owe = partial(self._owe, conversation, notice)
            return await self._in_thread(self.abandon, conversation, plan_id, late=owe)
        return await self._atell("abandon", conversation, notice, store.aabandon, plan_id)

    async def aforget(self, conversation: Conversation) -> None:
        notice, store = Forget(), self._awaited
        if store is None:
            owe = partial(self._owe, conversation, notice)
            await self._in_thread(self.forget, conversation, late=owe)
        else:
            await self._atell("forget", conversation, notice, store.aforget)

    # -- commits that are taken back ---------------------------------------------------------------------------

    def forget_soon(self, conversation: Conversation) -> None:
        """Have the store forget a conversation before it is next prepared here, without waiting for it."""
        self._owe(conversation, Forget(), delay=0.0)

    @contextmanager
    def _withdrawn_if_interrupted(self, conversation: Conversation) -> Iterator[None]:
        """Take a commit back whose caller is cancelled or interrupted.

        The caller's application gets that exception in place of the answer, so its next prompt may lack this turn.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.forget_soon(conversation)
            raise

    # -- for operators -----------------------------------------------------------------------------------------

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        try:
            return self.store.inspect(conversation)
        except Exception as error:
            raise StoreError("inspect", conversation) from error

    def clear(self) -> None:
        try:
            self.store.clear()
        except Exception as error:
            raise StoreError("clear", "all conversations") from error
        self.outbox.clear()

    def start(self) -> None:
        """Have the store connect in the background, before the first request needs it. Not needed, but it helps."""
        self._keep_within(0.0)

    def close(self) -> None:
        """End the threads; what waits in the outbox gets one more try, of a second at most. The store stays open."""
        self._ticker.stop(0.0)
        if len(self.outbox) and self._serves_threads:
            with suppress(Exception):
                self._lanes.run(self._deliver_all, _LAST_TRY)
        self._lanes.close()

    # -- calls in time -----------------------------------------------------------------------------------------

    # `late` is called when a call ends, with or without success, for which nobody waits any more.

    def _call(self, operation: str, key: object, call: Callable[[], T], late: Callable[[], object] = _nothing) -> T:
        self._admit(operation, key)
        try:
            outcome = self._lanes.run(call, self._budget, late)
        except Exception as error:
            self.breaker.failed()
            raise StoreError(operation, key) from error
        self.breaker.succeeded()
        return outcome

    async def _acall(
        self, operation: str, key: object, call: Callable[[], Awaitable[T]], late: Callable[[], object] = _nothing
    ) -> T:
        import asyncio  # it takes long to import, and who calls this has it

        self._admit(operation, key)
        task = asyncio.ensure_future(call())
        self._left_behind.add(task)
        task.add_done_callback(self._done)
        try:
            await asyncio.wait({task}, timeout=self._budget)
            for _ in range(_TURNS_OF_THE_LOOP):  # if it was the loop that was late, the answer may be there
                if not task.done():
                    await asyncio.sleep(0)
        except BaseException:
            task.add_done_callback(lambda task: late())
            raise
        if not task.done():
            task.add_done_callback(lambda task: late())
        error = task.exception() if task.done() else TimeoutError(f"no answer in {self._budget * 1000:.0f} ms")
        if error is not None:
            self.breaker.failed()
            raise StoreError(operation, key) from error
        self.breaker.succeeded()
        return task.result()

    async def _in_thread(self, method: Callable[..., T], *args: object, late: Callable[[], object]) -> T:
        """One of the methods above, which keep to their time once a thread is free to run them."""
        import asyncio

        def ended(call: asyncio.Future[T]) -> None:
            if not call.cancelled():
                call.exception()  # or it is said at the end that nobody asked for it
            late()

        call = asyncio.get_running_loop().run_in_executor(None, method, *args)
        try:
            await asyncio.wait({call}, timeout=2 * self._budget)
        except BaseException:
            call.add_done_callback(ended)
            raise
        if not call.done():
            call.add_done_callback(ended)
            raise StoreError(method.__name__, args[0]) from TimeoutError("no thread is free")
        return call.result()

    def _admit(self, operation: str, key: object) -> None:
        if self._maintained and self._due == math.inf:
            self._keep_within(self._interval)
        if not self.breaker.admits():
            raise StoreUnavailableError(operation, key)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._left_behind.discard(task)
        if not task.cancelled():
            task.exception()  # or it is said at the end that nobody asked for it

    def _tell(
        self, operation: str, conversation: Conversation, notice: Notice, method: Callable[..., T], *args: object
    ) -> T:
        try:
            return self._call(operation, conversation, lambda: method(conversation, *args))
        except BaseException:
            self._owe(conversation, notice)
            raise

    async def _atell(
        self,
        operation: str,
        conversation: Conversation,
        notice: Notice,
        method: Callable[..., Awaitable[T]],
        *args: object,
    ) -> T:
        try:
            return await self._acall(operation, conversation, lambda: method(conversation, *args))
        except BaseException:
            self._owe(conversation, notice)
            raise

    # -- the outbox --------------------------------------------------------------------------------------------

    def _owe(self, conversation: Conversation, notice: Notice, delay: float | None = None) -> None:
        self.outbox.add(conversation, notice)
        self._keep_within(self._retry if delay is None else delay)

    def _deliver(self, conversation: Conversation) -> None:
        for notice in self.outbox.waiting(conversation):
            try:
                notice.tell(self.store, conversation)
            except _NEVER:
                self.store.forget(conversation)  # or this notice would hold up all others for ever
            self.outbox.delivered(conversation, notice)

    async def _adeliver(self, store: AsyncSeenStore, conversation: Conversation) -> None:
        for notice in self.outbox.waiting(conversation):
            try:
                await notice.atell(store, conversation)
            except _NEVER:
                await store.aforget(conversation)
            self.outbox.delivered(conversation, notice)

    def _deliver_all(self) -> None:
        for conversation in self.outbox.conversations():
            self._deliver(conversation)

    # -- in the background -------------------------------------------------------------------------------------

    def _keep_within(self, seconds: float) -> None:
        """Have `keep` called in so many seconds at the latest."""
        with self._lock:
            self._due = min(self._due, time.monotonic() + seconds)
        with suppress(RuntimeError):  # no more threads: notices are delivered when their conversation is next prepared
            self._ticker.start()
            self._ticker.wake()

    def _tick(self) -> float:
        if time.monotonic() >= self._due:
            with self._lock:
                self._due = math.inf
            self.keep()
            with self._lock:
                pause = self._retry if len(self.outbox) else self._interval if self._maintained else math.inf
                self._due = min(self._due, time.monotonic() + pause)
        return min(self._due - time.monotonic(), _LONGEST_SLEEP)

    def keep(self) -> None:
        """What a thread does now and then: hear whether the store answers, and tell it what waits.

        It maintains the store even while the breaker is open: a server that comes back must be told soon what it may
        have lost, and it is better asked from here than on the way of a request.
        """
        try:
            if isinstance(self.store, Maintained):
                self.store.maintain()
            elif not len(self.outbox) or not self.breaker.admits():
                return
            if self._serves_threads:
                self._deliver_all()
        except Exception:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
