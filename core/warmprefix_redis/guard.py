"""A store that may fail, hang or be cut off, made safe to call during a request."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from warmprefix.errors import StoreError, StoreUnavailableError, check_count
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.stores import (
    Abandon,
    AsyncSeenStore,
    Commit,
    Conversation,
    Forget,
    MaintainableStore,
    Operation,
    Prepare,
    SeenStore,
    Snapshot,
    Steps,
    arun_steps,
    run_steps,
    unanswered_id,
    unknown_operation,
)
from warmprefix.ticker import Ticker
from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.lanes import Lanes, give_up
from warmprefix_redis.outbox import Outbox, PendingOperation, UnansweredPlan, operations_of

if TYPE_CHECKING:
    import asyncio

__all__ = ["GuardedStore"]

T = TypeVar("T")

_LOOP_CYCLES = 4
"""Cycles of the event loop from the bytes of an answer on a socket to the task that awaits it."""

_MAX_SLEEP_SECONDS = 3_600.0
"""Longest sleep of the background thread; `queue.get` takes no infinite timeout."""

_PERMANENT_ERRORS = (TypeError, ValueError, ArithmeticError, struct.error)
"""Errors of a store that rejects an operation's values. Retrying cannot fix these."""

_LAST_DELIVERY_SECONDS = 1.0


def _nothing() -> None: ...


class GuardedStore:
    """A store that answers in time or raises `StoreError`, however the store behind it fails.

    - A call gets `budget` seconds, then its caller continues without an answer. A failed or slower call opens the
      breaker. While that is open, the store is not called.
    - A `Commit`, `Abandon` or `Forget` that failed waits in an outbox. It is executed before this conversation is next
      prepared, or in the background as soon as the store answers again. Until then `Prepare` fails for this
      conversation, because its record is not up to date.
    - When `Prepare` fails, the caller is expected to continue without an answer: the store receives that plan later,
      under `unanswered_id`.
    - When a waiting task is cancelled, the command still runs to its end in the background, so that the next command on
      its connection cannot receive its answer.
    - When a task is cancelled or interrupted in a `Commit`, the commit is withdrawn: the application receives the
      exception in place of the answer, so that its next prompt may lack this turn.

    `inspect` and `clear` are for operators: they have no time limit, and only translate errors.

    Args:
        store: The store that does the work. If it is an `AsyncSeenStore` too, tasks await it; if not, threads call it
            for them.
        budget: Seconds per call.
        breaker: Decides when a store that failed is called again.
        max_pending: Most operations in the outbox.
        threads: Most calls that may hang at once before further ones fail.
        interval: Seconds between two calls of `MaintainableStore.maintain`.
        retry: Seconds until operations in the outbox are tried again. Not at once, because a call that got no answer
            in time may still be running.
        owned: True if `close` closes the store too.
    """

    def __init__(
        self,
        store: SeenStore,
        *,
        budget: float = 0.020,
        breaker: CircuitBreaker | None = None,
        max_pending: int = 65_536,
        threads: int = 16,
        interval: float = 0.25,
        retry: float = 0.05,
        owned: bool = False,
    ) -> None:
        for name, value in (("budget", budget), ("interval", interval), ("retry", retry)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        check_count("threads", threads)
        self.store = store
        self.breaker = CircuitBreaker() if breaker is None else breaker
        self.outbox = Outbox(max_pending)
        """The operations that wait until the store answers again."""
        self._budget = budget
        self._lanes = Lanes(threads)
        self._is_maintained = isinstance(store, MaintainableStore)
        self._serves_threads = getattr(store, "serves_threads", True)
        self._awaited = store if isinstance(store, AsyncSeenStore) and getattr(store, "serves_tasks", True) else None
        self._interval = interval
        self._retry = retry
        self._closed_too: Any = store if owned else None
        # Guards `_due`. Re-entrant, because the garbage collector may abandon plans in the middle of anything.
        self._lock = fork_safe_lock()
        in_each_process(self._start_process)
        self._running: set[asyncio.Future[Any]] = set()

    def _start_process(self) -> None:
        self._due = math.inf
        self._ticker = Ticker(self._tick, _nothing, "warmprefix-keeper")

    # -- operations ----------------------------------------------------------------------------------------------

    def execute(self, operation: Operation[T]) -> T:
        """Execute one operation within the budget.

        Raises:
            StoreError: The store failed, or did not answer in time.
        """
        with self._attempt(operation):
            steps = self._steps(operation, self.store.execute)
            return self._lanes.run(partial(run_steps, steps), self._budget, self._abandon_if_late(operation))

    async def aexecute(self, operation: Operation[T]) -> T:
        """`execute`, for tasks."""
        import asyncio  # slow to import, and every caller has imported it

        with self._attempt(operation):
            late = self._abandon_if_late(operation)
            if self._awaited is None:
                job = self._lanes.submit(partial(run_steps, self._steps(operation, self.store.execute)))
                return await self._within_budget(asyncio.wrap_future(job), partial(give_up, job, late))
            task = asyncio.ensure_future(arun_steps(self._steps(operation, self._awaited.aexecute)))
            return await self._within_budget(task, lambda: task.add_done_callback(lambda task: late()))

    def forget_soon(self, conversation: Conversation) -> None:
        """Have the store forget a conversation before it is next prepared here, without waiting for it."""
        self._queue(Forget(conversation), delay=0.0)

    @contextmanager
    def _attempt(self, operation: Operation[Any]) -> Iterator[None]:
        """Admit a call, report its outcome to the breaker, and queue the operation if it failed."""
        if not isinstance(operation, Prepare | Commit | Abandon | Forget):
            raise unknown_operation(operation)
        try:
            if self._is_maintained and self._due == math.inf:
                self._schedule_upkeep(self._interval)
            if not self.breaker.admits():
                raise StoreUnavailableError(operation.name, operation.conversation)
            try:
                yield
            except Exception as error:
                self.breaker.failed()
                raise StoreError(operation.name, operation.conversation) from error
            self.breaker.succeeded()
        except BaseException as error:
            if not isinstance(operation, Prepare):
                self._queue(operation)
            elif isinstance(error, StoreError):
                self._queue(UnansweredPlan(operation.conversation, unanswered_id(operation.plan_id)))
            if isinstance(operation, Commit) and not isinstance(error, Exception):
                self.forget_soon(operation.conversation)
            raise

    def _steps(self, operation: Operation[T], execute: Callable[[Operation[Any]], Any]) -> Steps[T]:
        """Empty the conversation's outbox where the record matters, then execute the operation."""
        try:
            if isinstance(operation, Prepare | Commit):  # the outbox may hold the `Prepare` of the plan to commit
                yield from self._delivery(operation.conversation, execute)
            return (yield partial(execute, operation))  # type: ignore[no-any-return]
        except BaseException:
            # Not before the call has ended, because until then it may take a lease.
            self._abandon_if_late(operation)()
            raise

    def _abandon_if_late(self, operation: Operation[Any]) -> Callable[[], None]:
        """Return what to do when a call ends, with or without success, after its caller stopped waiting."""
        if not isinstance(operation, Prepare):
            return _nothing
        return partial(self._queue, Abandon(operation.conversation, operation.plan_id))

    async def _within_budget(self, call: asyncio.Future[T], give_up: Callable[[], object]) -> T:
        """Await a call that is not cancelled together with its caller, or the next command could get its answer."""
        import asyncio

        self._running.add(call)
        call.add_done_callback(self._call_ended)
        try:
            await asyncio.wait({call}, timeout=self._budget)
            for _ in range(_LOOP_CYCLES):  # if the loop itself was late, the answer may have arrived
                if not call.done():
                    await asyncio.sleep(0)
        except BaseException:
            give_up()
            raise
        if not call.done():
            give_up()
            raise TimeoutError(f"no answer in {self._budget * 1000:.0f} ms")
        return call.result()

    def _call_ended(self, call: asyncio.Future[Any]) -> None:
        self._running.discard(call)
        if not call.cancelled():
            call.exception()  # asyncio logs exceptions that were never retrieved

    # -- for operators -------------------------------------------------------------------------------------------

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        """Return a conversation's state, or None if it is unknown."""
        try:
            return self.store.inspect(conversation)
        except Exception as error:
            raise StoreError("inspect", conversation) from error

    def clear(self) -> None:
        """Forget all conversations, and empty the outbox."""
        try:
            self.store.clear()
        except Exception as error:
            raise StoreError("clear", "all conversations") from error
        self.outbox.clear()

    def start(self) -> None:
        """Connect in the background now instead of at the first request."""
        self._schedule_upkeep(0.0)

    def close(self) -> None:
        """End the threads, after one last attempt of 1 s at most to empty the outbox."""
        self._ticker.stop(0.0)
        if len(self.outbox) and self._serves_threads:
            with suppress(Exception):
                self._lanes.run(self._deliver_all, _LAST_DELIVERY_SECONDS)
        self._lanes.close()
        if self._closed_too is not None:
            self._closed_too.close()

    async def aclose(self) -> None:
        """`close`, and close the connections of this event loop too."""
        self.close()
        if self._closed_too is not None:
            await self._closed_too.aclose()

    def stats(self) -> dict[str, int]:
        """Return the `PlannerStats` of operations that the store has not received."""
        return {"pending_notices": len(self.outbox), "lost_notices": self.outbox.dropped}

    # -- the outbox ----------------------------------------------------------------------------------------------

    def _queue(self, pending: PendingOperation, delay: float | None = None) -> None:
        self.outbox.add(pending)
        self._schedule_upkeep(self._retry if delay is None else delay)

    def _delivery(self, conversation: Conversation, execute: Callable[[Operation[Any]], Any]) -> Steps[None]:
        for pending in self.outbox.waiting(conversation):
            try:
                for operation in operations_of(pending):
                    yield partial(execute, operation)
            except _PERMANENT_ERRORS:
                yield partial(execute, Forget(conversation))  # or it would block all others for ever
            self.outbox.remove(pending)

    def _deliver_all(self) -> None:
        for conversation in self.outbox.conversations():
            run_steps(self._delivery(conversation, self.store.execute))

    # -- in the background ---------------------------------------------------------------------------------------

    def _schedule_upkeep(self, seconds: float) -> None:
        """Have `run_upkeep` called in `seconds` at the latest."""
        with self._lock:
            self._due = min(self._due, time.monotonic() + seconds)
        with suppress(RuntimeError):  # no more threads: the outbox is emptied when a conversation is next prepared
            self._ticker.start()
            self._ticker.wake()

    def _tick(self) -> float:
        if time.monotonic() >= self._due:
            with self._lock:
                self._due = math.inf
            self.run_upkeep()
            with self._lock:
                pause = self._retry if len(self.outbox) else self._interval if self._is_maintained else math.inf
                self._due = min(self._due, time.monotonic() + pause)
        return min(self._due - time.monotonic(), _MAX_SLEEP_SECONDS)

    def run_upkeep(self) -> None:
        """Maintain the store and empty the outbox. A background thread calls this; it never raises.

        It maintains the store even while the breaker is open: a server that returns may have lost forgets, and finding
        that out here is better than during a request.
        """
        try:
            if isinstance(self.store, MaintainableStore):
                self.store.maintain()
            elif not len(self.outbox) or not self.breaker.admits():
                return
            if self._serves_threads:
                self._deliver_all()
        except Exception:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
