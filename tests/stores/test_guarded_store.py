"""Deadline, breaker, outbox and safe cancellation of `GuardedStore`."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import redis.asyncio

from redis_servers import Server
from warmprefix import ContextPlanner, StoreError
from warmprefix.errors import StoreUnavailableError
from warmprefix.stores import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    MemorySeenStore,
    Operation,
    Prepare,
    PreparedTurn,
    SeenBlock,
    Snapshot,
    unanswered_id,
)
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.breaker import CircuitBreaker
from warmprefix_redis.guard import GuardedStore

T = TypeVar("T")

CHAT = Conversation("acme", "chat")
BLOCK = SeenBlock(b"A" * 16, "Doc_A", 1, 100)
LONG = 30.0


class TroubledStore:
    """A memory store that can be made to fail or to hang, and records its calls."""

    def __init__(self) -> None:
        self.memory = MemorySeenStore()
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []

    def execute(self, operation: Operation[T]) -> T:
        self._trouble(operation.name)
        sent: Sequence[object] = getattr(operation, "sent", ())
        if any(not isinstance(block, SeenBlock) for block in sent):
            raise TypeError("no block")
        return self.memory.execute(operation)

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        self._trouble("inspect")
        return self.memory.inspect(conversation)

    def clear(self) -> None:
        self._trouble("clear")
        self.memory.clear()

    def _trouble(self, operation: str) -> None:
        self.asked.append(operation)
        self.gate.wait()
        if self.failing:
            raise ConnectionError(operation)


class TroubledAsyncStore(TroubledStore):
    """The same store for tasks; it waits without blocking the loop."""

    async def aexecute(self, operation: Operation[T]) -> T:
        self.asked.append(operation.name)
        while not self.gate.is_set():
            await asyncio.sleep(0.001)
        if self.failing:
            raise ConnectionError(operation.name)
        return self.memory.execute(operation)


@pytest.fixture(params=[TroubledStore, TroubledAsyncStore], ids=["threads", "tasks"])
def store(request: pytest.FixtureRequest) -> Iterator[TroubledStore]:
    made: TroubledStore = request.param()
    yield made
    made.gate.set()


@pytest.fixture
def guard(store: TroubledStore) -> Iterator[GuardedStore]:
    """Asks again at once after a failure, and looks at the outbox by itself only when a test hurries it."""
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(0, 0), interval=LONG, retry=LONG)
    yield guard
    store.gate.set()
    store.failing = False
    guard.close()


@pytest.fixture
def hasty(store: TroubledStore) -> Iterator[GuardedStore]:
    """Return the same guard, which soon gives up on a store that hangs."""
    guard = GuardedStore(store, budget=0.25, breaker=CircuitBreaker(0, 0), interval=LONG, retry=LONG)
    yield guard
    store.gate.set()
    guard.close()


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + LONG
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def seen(store: TroubledStore) -> set[bytes]:
    snapshot = store.memory.inspect(CHAT)
    return set() if snapshot is None else {block.fingerprint for block in snapshot.blocks}


def leases(store: TroubledStore) -> set[str]:
    snapshot = store.memory.inspect(CHAT)
    return set() if snapshot is None else set(snapshot.leases)


# -- in time or not at all -----------------------------------------------------------------------------------------


def test_guard_returns_the_store_s_results(store: TroubledStore, guard: GuardedStore) -> None:
    assert guard.execute(Prepare(CHAT, "p1", {BLOCK.fingerprint: "Doc_A"})) == PreparedTurn(0, {}, frozenset())
    assert guard.execute(Commit(CHAT, "p1", [BLOCK]))
    assert not guard.execute(Abandon(CHAT, "p1"))
    assert guard.execute(Prepare(CHAT, "p2", {BLOCK.fingerprint: "Doc_A"})).seen == {BLOCK.fingerprint: BLOCK}
    guard.execute(Forget(CHAT))
    assert guard.inspect(CHAT) == store.memory.inspect(CHAT)
    guard.clear()
    assert guard.inspect(CHAT) is None


async def test_guard_returns_the_store_s_results_to_tasks(store: TroubledStore, guard: GuardedStore) -> None:
    assert await guard.aexecute(Prepare(CHAT, "p1", {BLOCK.fingerprint: "Doc_A"})) == PreparedTurn(0, {}, frozenset())
    assert await guard.aexecute(Commit(CHAT, "p1", [BLOCK]))
    assert not await guard.aexecute(Abandon(CHAT, "p1"))
    assert (await guard.aexecute(Prepare(CHAT, "p2", {BLOCK.fingerprint: "Doc_A"}))).seen == {BLOCK.fingerprint: BLOCK}
    await guard.aexecute(Forget(CHAT))
    assert seen(store) == set()


def test_store_failures_become_store_errors(store: TroubledStore, guard: GuardedStore) -> None:
    store.failing = True
    calls: list[Callable[[], object]] = [
        lambda: guard.execute(Prepare(CHAT, "p", {})),
        lambda: guard.execute(Commit(CHAT, "p", [])),
        lambda: guard.execute(Abandon(CHAT, "p")),
        lambda: guard.execute(Forget(CHAT)),
        lambda: guard.inspect(CHAT),
        guard.clear,
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert isinstance(caught.value.__cause__, ConnectionError)


def test_hanging_store_costs_the_budget(store: TroubledStore, hasty: GuardedStore) -> None:
    store.gate.clear()
    with pytest.raises(StoreError) as caught:
        hasty.execute(Prepare(CHAT, "p", {}))
    assert isinstance(caught.value.__cause__, TimeoutError)


async def test_hanging_store_costs_tasks_the_budget(store: TroubledStore, hasty: GuardedStore) -> None:
    store.gate.clear()
    with pytest.raises(StoreError) as caught:
        await hasty.aexecute(Prepare(CHAT, "p", {}))
    assert isinstance(caught.value.__cause__, TimeoutError)
    store.gate.set()


def test_open_breaker_keeps_calls_from_the_store(store: TroubledStore) -> None:
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(LONG, LONG), interval=LONG, retry=LONG)
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Forget(CHAT))
    store.failing = False
    asked = list(store.asked)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            guard.execute(Prepare(CHAT, "p", {}))
    with pytest.raises(StoreUnavailableError):
        asyncio.run(guard.aexecute(Prepare(CHAT, "p", {})))
    assert store.asked == asked
    guard.close()


# -- the outbox ----------------------------------------------------------------------------------------------------


def test_failed_commit_is_delivered_before_the_next_prepare(store: TroubledStore, guard: GuardedStore) -> None:
    guard.execute(Prepare(CHAT, "p1", {BLOCK.fingerprint: "Doc_A"}))
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Commit(CHAT, "p1", [BLOCK]))
    assert len(guard.outbox) == 1
    store.failing = False
    assert set(guard.execute(Prepare(CHAT, "p3", {BLOCK.fingerprint: "Doc_A"})).seen) == {BLOCK.fingerprint}
    assert len(guard.outbox) == 0


def test_unanswered_plan_contests_later_blocks(store: TroubledStore, guard: GuardedStore) -> None:
    """The answer to that plan may be stored over it before anybody commits it."""
    guard.execute(Prepare(CHAT, "before", {BLOCK.fingerprint: "Doc_A"}))
    guard.execute(Commit(CHAT, "before", [BLOCK]))
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Prepare(CHAT, "p1", {}))
    store.failing = False
    assert guard.execute(Prepare(CHAT, "p2", {BLOCK.fingerprint: "Doc_A"})).seen == {}
    guard.execute(Commit(CHAT, "p2", [BLOCK]))
    assert guard.execute(Prepare(CHAT, "p3", {BLOCK.fingerprint: "Doc_A"})).contested == {BLOCK.fingerprint}
    guard.execute(Abandon(CHAT, unanswered_id("p1")))
    assert guard.execute(Prepare(CHAT, "p3", {BLOCK.fingerprint: "Doc_A"})).contested == set()


def test_commit_of_unanswered_plan_voids_the_record(store: TroubledStore, guard: GuardedStore) -> None:
    """Other workers may have such plans too."""
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Prepare(CHAT, "p1", {}))
    store.failing = False
    assert not guard.execute(Commit(CHAT, unanswered_id("p1"), [BLOCK]))
    assert guard.execute(Prepare(CHAT, "p2", {BLOCK.fingerprint: "Doc_A"})).seen == {}
    assert guard.execute(Commit(CHAT, "p2", [BLOCK]))


async def test_failed_operations_of_tasks_are_delivered(store: TroubledStore, guard: GuardedStore) -> None:
    await guard.aexecute(Prepare(CHAT, "p1", {BLOCK.fingerprint: "Doc_A"}))
    await guard.aexecute(Commit(CHAT, "p1", [BLOCK]))
    store.failing = True
    with pytest.raises(StoreError):
        await guard.aexecute(Forget(CHAT))
    store.failing = False
    assert (await guard.aexecute(Prepare(CHAT, "p3", {BLOCK.fingerprint: "Doc_A"}))).seen == {}
    assert len(guard.outbox) == 0


def test_rejected_operation_does_not_block_the_outbox(store: TroubledStore, guard: GuardedStore) -> None:
    other = Conversation("acme", "other")
    for conversation in (CHAT, other):
        guard.execute(Prepare(conversation, "p1", {}))
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Commit(CHAT, "p1", [("no", "block")]))  # type: ignore[list-item]
    with pytest.raises(StoreError):
        guard.execute(Commit(other, "p1", [BLOCK]))
    store.failing = False
    guard.run_upkeep()
    assert len(guard.outbox) == 0
    assert seen(store) == set()
    assert not guard.breaker.is_open
    assert set(guard.execute(Prepare(other, "p2", {BLOCK.fingerprint: "Doc_A"})).seen) == {BLOCK.fingerprint}


def test_outbox_is_delivered_in_the_background(store: TroubledStore) -> None:
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(0, 0), interval=0.01, retry=0.01)
    guard.execute(Prepare(CHAT, "p1", {BLOCK.fingerprint: "Doc_A"}))
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Commit(CHAT, "p1", [BLOCK]))
    assert eventually(lambda: store.asked.count("commit") > 2), "it goes on trying"
    store.failing = False
    assert eventually(lambda: seen(store) == {BLOCK.fingerprint})
    assert eventually(lambda: len(guard.outbox) == 0)
    guard.close()


def test_lease_of_unanswered_plan_is_returned(store: TroubledStore, hasty: GuardedStore) -> None:
    store.gate.clear()
    with pytest.raises(StoreError):
        hasty.execute(Prepare(CHAT, "p1", {}))
    store.gate.set()
    assert eventually(lambda: leases(store) == {"p1"} and len(hasty.outbox) == 2), "the store did it all the same"
    hasty.execute(Prepare(CHAT, "p2", {}))
    assert leases(store) == {"p2"}


def test_record_is_not_trusted_while_another_thread_corrects_it(store: TroubledStore, hasty: GuardedStore) -> None:
    hasty.execute(Prepare(CHAT, "p1", {BLOCK.fingerprint: "Doc_A"}))
    hasty.execute(Commit(CHAT, "p1", [BLOCK]))
    store.failing = True
    with pytest.raises(StoreError):
        hasty.execute(Forget(CHAT))
    store.failing = False
    store.gate.clear()
    correcting = threading.Thread(target=hasty.run_upkeep)
    correcting.start()
    with pytest.raises(StoreError):
        hasty.execute(Prepare(CHAT, "p2", {BLOCK.fingerprint: "Doc_A"}))
    store.gate.set()
    correcting.join()
    assert hasty.execute(Prepare(CHAT, "p3", {BLOCK.fingerprint: "Doc_A"})).seen == {}


def test_start_maintains_the_store_at_once() -> None:
    store = Maintainable()
    guard = GuardedStore(store, interval=LONG)
    guard.start()
    assert eventually(lambda: store.rounds == 1)
    guard.close()


def test_close_delivers_the_outbox_once_more(store: TroubledStore) -> None:
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(0, 0), interval=LONG, retry=LONG)
    guard.execute(Prepare(CHAT, "p1", {}))
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Commit(CHAT, "p1", [BLOCK]))
    store.failing = False
    guard.close()
    assert seen(store) == {BLOCK.fingerprint}


# -- cancellation --------------------------------------------------------------------------------------------------


async def cancelled(call: asyncio.Task[object], store: TroubledStore, asked: int) -> None:
    while len(store.asked) == asked:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_cancelled_prepare_leaves_no_lease(store: TroubledStore) -> None:
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(0, 0), interval=LONG, retry=LONG)
    store.gate.clear()
    await cancelled(asyncio.ensure_future(guard.aexecute(Prepare(CHAT, "p1", {}))), store, 0)
    store.gate.set()
    assert await asyncio.to_thread(eventually, lambda: len(guard.outbox))
    assert leases(store) == {"p1"}
    await guard.aexecute(Prepare(CHAT, "p2", {}))
    assert leases(store) == {"p2"}
    await asyncio.to_thread(guard.close)


async def test_cancelled_commit_is_withdrawn(store: TroubledStore) -> None:
    """Its caller has a CancelledError in place of the answer, so its next prompt may lack the turn."""
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(0, 0), interval=LONG, retry=LONG)
    await guard.aexecute(Prepare(CHAT, "p1", {}))
    store.gate.clear()
    await cancelled(asyncio.ensure_future(guard.aexecute(Commit(CHAT, "p1", [BLOCK]))), store, 1)
    store.gate.set()
    prepared = await guard.aexecute(Prepare(CHAT, "p2", {BLOCK.fingerprint: "Doc_A"}))
    assert not prepared.seen
    assert await asyncio.to_thread(eventually, lambda: not len(guard.outbox))
    assert seen(store) == set()
    await asyncio.to_thread(guard.close)


# -- the keeper ----------------------------------------------------------------------------------------------------


class Maintainable(TroubledStore):
    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def maintain(self) -> None:
        self.rounds += 1
        self._trouble("maintain")


def keepers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "warmprefix-keeper" and thread.is_alive()}


def test_store_is_maintained_while_the_guard_lives() -> None:
    others = keepers()
    store = Maintainable()
    guard = GuardedStore(store, budget=LONG, interval=0.01, retry=0.01)
    guard.execute(Prepare(CHAT, "p1", {}))
    assert eventually(lambda: store.rounds > 3)
    assert keepers() - others
    del guard

    def has_ended() -> bool:
        gc.collect()  # each time, because a round in progress keeps the guard
        return not keepers() - others

    assert eventually(has_ended)


def test_maintenance_closes_the_breaker() -> None:
    store = Maintainable()
    guard = GuardedStore(store, budget=LONG, breaker=CircuitBreaker(0.05, 0.05), interval=0.01, retry=0.01)
    store.failing = True
    with pytest.raises(StoreError):
        guard.execute(Prepare(CHAT, "p1", {}))
    store.failing = False
    assert eventually(lambda: not guard.breaker.is_open)
    assert guard.execute(Prepare(CHAT, "p2", {})).turn == 0
    guard.close()


@pytest.mark.parametrize("name", ["budget", "interval", "retry"])
def test_times_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be positive, got 0$"):
        GuardedStore(MemorySeenStore(), **{name: 0})  # type: ignore[arg-type]


# -- with a client of one kind only --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "tasks"])
async def test_store_with_one_kind_of_client_serves_planners(kind: str) -> None:
    with Server() as server:
        client: Any = server.client() if kind == "threads" else redis.asyncio.Redis.from_url(server.url)
        planner = ContextPlanner(store=GuardedStore(RedisSeenStore(client, settle=0), budget=LONG))
        for expected in (0, 1):
            async with planner.planning(["evidence"], conversation="chat", placement="tail") as plan:
                assert len(plan.references) == expected
        assert planner.stats().store_errors == 0
        if kind == "tasks":
            with planner.planning(["evidence"], conversation="chat", placement="tail") as plan:
                assert not plan.references, "it can't be asked from here, so nothing is de-duplicated"
        planner.close()
        await client.aclose() if kind == "tasks" else client.close()
