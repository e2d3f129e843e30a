"""Stores that fail, and what they must forget before a planner trusts their records again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, StoreError
from warmprefix.planner import conversation, unsettled
from warmprefix.planner.unsettled import Unsettled, unanswered_id
from warmprefix.stores import Abandon, Commit, Conversation, Forget, MemorySeenStore, Operation, Prepare, SeenBlock

T = TypeVar("T")

CHAT = Conversation(None, "chat")
OTHER = Conversation(None, "other")
BLOCKS = [ContextBlock(f"All facts of kind {number}.", id=f"doc-{number}") for number in range(4)]


class Failing(MemorySeenStore):
    """A store whose operations of some names fail, after or before they were executed, and which records all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()
        self.is_executed = False
        self.error: BaseException = ConnectionError("no answer")
        self.calls: list[Operation[Any]] = []

    def execute(self, operation: Operation[T]) -> T:
        self.calls.append(operation)
        if operation.name in self.fails:
            if self.is_executed:
                super().execute(operation)
            raise self.error
        return super().execute(operation)

    def names(self) -> list[str]:
        names = [operation.name for operation in self.calls]
        self.calls.clear()
        return names


class FailingForTasks(Failing):
    """The same store for tasks, which waits in each call."""

    async def aexecute(self, operation: Operation[T]) -> T:
        await asyncio.sleep(0)
        result = self.execute(operation)
        await asyncio.sleep(0)
        return result


ALL = {"prepare", "commit", "abandon", "forget"}


@pytest.fixture
def store() -> Failing:
    return Failing()


@pytest.fixture
def planner(store: Failing) -> Iterator[ContextPlanner]:
    with ContextPlanner(store=store, annotate="both") as planner:
        yield planner


def plan(planner: ContextPlanner, *numbers: int, chat: str = "chat") -> ContextPlan:
    return planner.plan([BLOCKS[number] for number in numbers], conversation=chat, placement="tail")


def serve(planner: ContextPlanner, *numbers: int, chat: str = "chat") -> int:
    """Plan and commit a turn; return its number of references."""
    made = plan(planner, *numbers, chat=chat)
    planner.commit(made)
    return len(made.references)


@pytest.mark.parametrize("is_executed", [False, True])
@pytest.mark.parametrize("fails", sorted(ALL - {"forget"}))
def test_a_failure_costs_one_turn(fails: str, is_executed: bool, store: Failing, planner: ContextPlanner) -> None:
    serve(planner, 0, 1)
    assert serve(planner, 0, 1) == 2
    store.fails, store.is_executed = {fails}, is_executed
    made = plan(planner, 0, 1)
    if fails == "abandon":
        planner.abandon(made)
    else:
        planner.commit(made)
    store.fails = set()
    serve(planner, 0, 1)
    assert serve(planner, 0, 1) == 2
    assert planner.stats().unsettled_conversations == 0
    assert planner.stats().contested_blocks == 0


def test_nothing_is_trusted_before_the_store_has_forgotten(store: Failing, planner: ContextPlanner) -> None:
    serve(planner, 0)
    made = plan(planner, 0)
    store.fails = {"commit", "forget"}
    planner.commit(made)
    store.names()
    assert serve(planner, 0) == 0
    assert store.names() == ["forget", "forget"], "no prepare, and the commit is a part of the forget"
    store.fails = set()
    assert serve(planner, 0) == 0
    assert store.names() == ["forget", "prepare", "commit"]


def test_a_long_outage_leaves_one_operation(store: Failing, planner: ContextPlanner) -> None:
    store.fails = ALL
    for number in range(100):
        serve(planner, number % 4)
    store.fails = set()
    store.calls.clear()
    assert serve(planner, 0, 1) == 0
    assert store.names() == ["forget", "prepare", "commit"]
    assert serve(planner, 0, 1) == 2


def test_unanswered_plan_contests_later_blocks(store: Failing, planner: ContextPlanner) -> None:
    """The answer to that plan may be stored over it before anybody commits it."""
    serve(planner, 0)
    store.fails = {"prepare"}
    unanswered = plan(planner, 1)
    store.fails = set()
    assert serve(planner, 0) == 0
    assert serve(planner, 0) == 0
    assert planner.stats().contested_blocks == 1
    planner.abandon(unanswered)
    assert serve(planner, 0) == 1


def test_commit_of_unanswered_plan_voids_the_record(store: Failing, planner: ContextPlanner) -> None:
    """Other workers may have such plans too."""
    store.fails = {"prepare"}
    unanswered = plan(planner, 1)
    store.fails = set()
    serve(planner, 0)
    assert not planner.commit(unanswered)
    assert serve(planner, 0) == 0


def test_commits_settle_other_conversations(store: Failing, planner: ContextPlanner) -> None:
    for chat in ("one", "two"):
        made = plan(planner, 0, chat=chat)
        store.fails = {"commit"}
        planner.commit(made)
        store.fails = set()
    assert planner.stats().unsettled_conversations == 2
    for left in (1, 0):
        serve(planner, 0)
        assert planner.stats().unsettled_conversations == left


def test_one_that_cannot_be_settled_does_not_keep_the_others_waiting(store: Failing, planner: ContextPlanner) -> None:
    conversations = planner._conversations
    bad: Any = SeenBlock(BLOCKS[0].fingerprint, [], 1, 1)  # type: ignore[arg-type] # cannot be hashed
    for chat in (CHAT, OTHER):
        conversations._unsettled.add(Commit(chat, "p", ()))
    forget = conversations._unsettled.get(CHAT)
    assert forget is not None
    conversations._unsettled._put(Forget(CHAT, sent=(bad,)))
    for _ in range(3):
        serve(planner, 0, chat="third")
    assert planner.stats().unsettled_conversations == 0
    assert planner.stats().store_errors == 1


def test_close_settles_once_more(store: Failing) -> None:
    planner = ContextPlanner(store=store)
    store.fails = ALL
    for chat in ("one", "two"):
        with pytest.raises(StoreError):
            planner.forget(chat)
    assert planner.stats().unsettled_conversations == 2
    store.fails = set()
    planner.close()
    assert planner.stats().unsettled_conversations == 0


def test_interrupted_commit_is_forgotten_at_once(store: Failing, planner: ContextPlanner) -> None:
    made = plan(planner, 0)
    store.fails, store.is_executed, store.error = {"commit"}, True, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        planner.commit(made)
    assert store.names()[-2:] == ["commit", "forget"]
    store.fails = set()
    assert serve(planner, 0) == 0


@pytest.mark.parametrize("steps", range(1, 6))
async def test_cancelled_commit_is_forgotten_by_a_task(steps: int) -> None:
    store = FailingForTasks()
    async with ContextPlanner(store=store, annotate="both") as planner:
        made = await planner.aplan(BLOCKS[:2], conversation="chat", placement="tail")
        task = asyncio.ensure_future(planner.acommit(made))
        for _ in range(steps):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        await asyncio.wait([task])
        for _ in range(5):
            await asyncio.sleep(0)
        snapshot = store.inspect(CHAT)
        assert snapshot is not None
        assert bool(snapshot.blocks) == was_done, "another worker must not find them"
        assert planner.stats().unsettled_conversations == 0


async def test_cancelled_commit_is_forgotten_once_the_store_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_FIRST_PAUSE_SECONDS", 0.001)
    store = FailingForTasks()
    async with ContextPlanner(store=store, annotate="both") as planner:
        made = await planner.aplan(BLOCKS[:2], conversation="chat", placement="tail")
        assert await planner.acommit(made)
        store.fails = {"forget"}
        planner.withdraw(made)
        while [operation.name for operation in store.calls].count("forget") < 3:
            await asyncio.sleep(0.001)
        store.fails = set()
        while planner.stats().unsettled_conversations:
            await asyncio.sleep(0.001)
        snapshot = store.inspect(CHAT)
        assert snapshot is not None
        assert snapshot.blocks == ()


async def test_close_ends_the_tasks_that_forget() -> None:
    store = FailingForTasks()
    async with ContextPlanner(store=store, annotate="both") as planner:
        for number in range(300):
            made = await planner.aplan(BLOCKS[:2], conversation=f"chat-{number}", placement="tail")
            await planner.acommit(made)
            store.fails = {"forget"}
            planner.withdraw(made)
            store.fails = set() if number == 299 else {"forget"}
    assert planner.stats().unsettled_conversations == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelled_prepare_leaves_no_lease() -> None:
    store = FailingForTasks()
    async with ContextPlanner(store=store, annotate="both") as planner:
        task = asyncio.ensure_future(planner.aplan(BLOCKS[:2], conversation="chat", placement="tail"))
        for _ in range(2):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        async with planner.planning(BLOCKS[:2], conversation="chat", placement="tail") as made:
            assert made.turn == 1
        snapshot = store.inspect(CHAT)
        assert snapshot is not None
        assert snapshot.leases == ()


# -- the set of unsettled conversations ----------------------------------------------------------------------------


def test_operations_are_merged() -> None:
    waiting = Unsettled()
    block, other = SeenBlock(b"A" * 16, "A", 1, 1), SeenBlock(b"B" * 16, "B", 1, 1)
    waiting.add(Prepare(CHAT, "p1", {}))
    waiting.add(Prepare(CHAT, "p2", {}), was_sent=False)
    waiting.add(Commit(CHAT, unanswered_id("p2"), [block, other]))
    waiting.add(Abandon(CHAT, "p3"))
    waiting.add(Commit(CHAT, "p4", [block]))
    waiting.add(Forget(CHAT, ended=("p5",)))
    ended = ("p1", unanswered_id("p2"), "p3", "p4", "p5")
    assert waiting.get(CHAT) == Forget(CHAT, ended, (unanswered_id("p1"),), (block, other))


def test_operation_added_meanwhile_stays() -> None:
    waiting = Unsettled()
    waiting.add(Abandon(CHAT, "p1"))
    before = waiting.get(CHAT)
    assert before is not None
    waiting.add(Abandon(CHAT, "p2"))
    waiting.settled(before)
    assert waiting.get(CHAT) == Forget(CHAT, ("p1", "p2"))


def test_all_conversations_are_unsettled_after_an_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsettled, "_MAX_ENTRIES", 10)
    waiting = Unsettled()
    chats = [Conversation("acme", str(number)) for number in range(9)]
    for chat in chats:
        waiting.add(Abandon(chat, "p"))
    assert len(waiting) == 5
    for chat in [*chats, OTHER]:
        forget = waiting.get(chat)
        assert forget is not None, "it may have been dropped"
        waiting.settled(forget)
        assert waiting.get(chat) is None
    assert waiting.get(Conversation("acme", "new")) is not None
    waiting.clear()
    assert waiting.get(Conversation("acme", "new")) is None


def test_a_tenant_drops_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsettled, "_MAX_ENTRIES", 10)
    waiting = Unsettled()
    waiting.add(Abandon(OTHER, "p"))
    for number in range(100):
        waiting.add(Abandon(Conversation("flood", str(number)), "p"))
    assert waiting.get(OTHER) == Forget(OTHER, ("p",))
