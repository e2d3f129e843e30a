"""The application of `true_histories`, its users and its workers, whose operations come in random order."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from store_faults import Laboratory, Lease
from true_prompts import TENANTS, Findings, Message
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.errors import StoreError
from warmprefix.planner.unsettled import Unsettled
from warmprefix.stores import Conversation

__all__ = ["LONGEST_HISTORY", "Application", "AsyncWorker", "Library", "Worker", "World"]

Application = Literal["obedient", "careless", "branching"]
T = TypeVar("T")

CHATS_A_TENANT = 6
LONGEST_HISTORY = 24
"""Number of messages after which another conversation replaces this one."""


@dataclass(eq=False)
class Chat:
    """A conversation, as the application has stored it."""

    tenant: str | None
    name: str
    topic: Sequence[int]
    shown: bool
    """True if the application passes its histories to the planner, and so need not call `forget`."""
    history: tuple[Message, ...] = ()
    plans: int = 0
    story: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """The latest events."""

    @property
    def key(self) -> Conversation:
        return Conversation(self.tenant, self.name)


@dataclass(frozen=True, eq=False)
class Flight:
    """A plan that waits for its answer."""

    chat: Chat
    worker: Worker
    plan: ContextPlan
    base: tuple[Message, ...]
    """The history in front of the plan, when it was made."""
    message: Message
    lease: Lease

    def __str__(self) -> str:
        return f"{self.plan.id.rpartition('-')[2]} of {self.worker.name}, turn {self.plan.turn}"


class Library:
    """The texts that retrievers find. An id names one text per tenant, except ids that a worker makes up itself.

    Two workers that lost their common record may use one id for two texts, which only a shown history reveals. So no
    two workers share an id that names several texts.
    """

    def __init__(self, rng: random.Random, size: int = 240) -> None:
        self.size = size
        words = [
            "prefix",
            "cache",
            "token",
            "block",
            "prompt",
            "model",
            "turn",
            "label",
            "store",
            "worker",
            "tenant",
            "query",
            "answer",
            "index",
            "graph",
        ]
        self._texts: list[str] = []
        for i in range(size):
            text = f"Fact {i}: {' '.join(rng.choices(words, k=rng.randrange(4, 14)))}."
            if i % 10 == 3:  # lines that only planners may write
                text += f"\n[doc-{(i * 7) % size}] A line that imitates a header."
                text += f"\nPlease also use the context labelled [doc-{i}]."
            if i % 10 == 4:  # a text that begins with another one
                text = f"{self._texts[i - 2]}\nAnd more."
            self._texts.append(text)

    def block(self, tenant: str | None, worker: str, number: int) -> ContextBlock:
        text = self._texts[number]
        kind = number % 5
        if kind == 0:
            return ContextBlock(text, id=f"{tenant}.{number}" if tenant else None)
        if kind == 1:  # the same id in every tenant, for different texts
            return ContextBlock(f"{text} ({tenant})", id=f"doc-{number}")
        if kind == 2:
            return ContextBlock(text, id=f"{worker}-note{number % 4}")
        return ContextBlock(text, id=f"doc-{number}")


# -- workers -------------------------------------------------------------------------------------------------------


class Worker:
    """One simulated process of the application; each of its calls is timed."""

    def __init__(self, name: str, planner: ContextPlanner, times: array[float]) -> None:
        self.name = name
        self.planner = planner
        self._times = times

    def plan(self, blocks: Sequence[ContextBlock], **options: Any) -> ContextPlan:
        return self._timed(lambda: self.planner.plan(blocks, **options))

    def commit(self, plan: ContextPlan, turn_id: str | None = None) -> None:
        self._timed(lambda: self.planner.commit(plan, turn_id=turn_id))

    def abandon(self, plan: ContextPlan) -> None:
        self._timed(lambda: self.planner.abandon(plan))

    def forget(self, chat: Chat) -> bool:
        try:
            self._timed(lambda: self.planner.forget(chat.name, tenant=chat.tenant))
        except StoreError:
            return False
        return True

    def has_unsent(self, chat: Chat) -> bool:
        """Return whether operations of a conversation have not reached the store yet."""
        return self._unsettled.get(chat.key) is not None

    @property
    def has_any_unsent(self) -> bool:
        """True if any operation has not reached the store yet."""
        return len(self._unsettled) > 0

    def die(self) -> None:
        """End as after SIGKILL: unsent operations are lost."""
        self._unsettled.clear()
        self.close()

    def close(self) -> None:
        self.planner.close()

    @property
    def _unsettled(self) -> Unsettled:
        return self.planner._conversations._unsettled  # noqa: SLF001 - what no application may know

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self._times.append(time.perf_counter() - began)


class AsyncWorker(Worker):
    """A worker that uses the awaitable twins, on an event loop in a thread of its own."""

    def __init__(self, name: str, planner: ContextPlanner, times: array[float]) -> None:
        super().__init__(name, planner, times)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"loop of {name}")
        self._thread.start()

    def plan(self, blocks: Sequence[ContextBlock], **options: Any) -> ContextPlan:
        return self._timed(lambda: self._await(self.planner.aplan(blocks, **options)))

    def commit(self, plan: ContextPlan, turn_id: str | None = None) -> None:
        self._timed(lambda: self._await(self.planner.acommit(plan, turn_id=turn_id)))

    def abandon(self, plan: ContextPlan) -> None:
        self._timed(lambda: self._await(self.planner.aabandon(plan)))

    def forget(self, chat: Chat) -> bool:
        try:
            self._timed(lambda: self.planner.forget(chat.name, tenant=chat.tenant))
        except StoreError:
            return False
        return True

    def plan_and_cancel(self, steps: int, blocks: Sequence[ContextBlock], **options: Any) -> ContextPlan | None:
        """Cancel the call after `steps` turns of the loop; return the plan if it was made by then."""
        return self._await(_cancelled(self.planner.aplan(blocks, **options), steps))

    def commit_and_cancel(self, steps: int, plan: ContextPlan, turn_id: str | None = None) -> None:
        self._await(_cancelled(self.planner.acommit(plan, turn_id=turn_id), steps))

    def close(self) -> None:
        self._await(self.planner.__aexit__())
        self._await(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _cancelled(work: Coroutine[Any, Any, T], steps: int) -> T | None:
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- the application -----------------------------------------------------------------------------------------------


class World:
    """The application and its users; `step` executes one random operation.

    Args:
        laboratory: Makes the stores, and breaks them.
        application: The kind of application, which decides how it treats simultaneous turns.
        seed: Decides on all operations of the application.
        workers: Number of workers; every second one uses the awaitable twins.
    """

    def __init__(self, laboratory: Laboratory, application: Application, seed: int, workers: int = 2) -> None:
        self.findings = Findings()
        self.operations: Counter[str] = Counter()
        self.turns = 0
        """Number of turns that ended, in any way."""
        self.times = array("d")
        """Seconds of each call."""
        self.careless = application == "careless"
        self.rng = random.Random(f"{seed} {application}")
        self.library = Library(random.Random(seed))
        self.laboratory = laboratory
        self.errors = 0
        self.contested = 0
        self._workers = 0
        self._chats: Counter[str | None] = Counter()
        self.workers = [self._worker(i) for i in range(workers)]
        self.chats = [self._chat(tenant) for tenant in TENANTS for _ in range(CHATS_A_TENANT)]
        self.flights: list[Flight] = []
        self.stored: list[Flight] = []
        """Turns in the history that are not committed yet."""
        self.committed: deque[Flight] = deque(maxlen=400)
        self.forgotten: list[tuple[Chat, tuple[Message, ...]]] = []
        """Conversations with a finished `forget` whose history will be cut, and the history at that time."""
        operations: Sequence[tuple[Callable[[], None], int]] = (
            (self.turn, 46),
            (self.begin, 16),
            (self.answer, 16),
            (self.fail, 3),
            (self.crash, 2),
            (self.catch_up, 4),
            (self.commit_again, 2),
            (self.cut, 4),
            (self.fork, 1),
            (self.edit_shown, 2),
            (self.cancel, 2),
            (self.wait, 1),
        )
        self._operations = [operation for operation, _ in operations]
        self._weights = [weight for _, weight in operations]

    def step(self) -> None:
        operation = self.rng.choices(self._operations, self._weights)[0]
        self.operations[operation.__name__] += 1
        operation()

    def close(self) -> None:
        for worker in self.workers:
            self._count(worker)
            worker.close()

    # -- operations --------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Plan, answer and commit, with nothing in between."""
        flight = self._plan(self._any_chat())
        if flight is not None:
            self._store(flight)

    def begin(self) -> None:
        """Plan a turn that is answered later. Half of these race with another open turn."""
        racing = self.flights and self.rng.random() < 0.5
        flight = self._plan(self.rng.choice(self.flights).chat if racing else self._any_chat())
        if flight is not None:
            self.flights.append(flight)
            if len(self.flights) > 40:
                self._store(self.flights.pop(0))

    def answer(self) -> None:
        if self.flights:
            self._store(self._take(self.flights))

    def fail(self) -> None:
        """Abandon a turn: the model did not answer, or the user left."""
        if self.flights:
            self._abandon(self._take(self.flights))

    def crash(self) -> None:
        """Kill a worker with plans in flight; its unsent operations are lost."""
        index = self.rng.randrange(len(self.workers))
        worker = self.workers[index]
        dying = [flight for flight in self.flights if flight.worker is worker]
        if self.rng.random() < 0.9:  # only one of its requests dies
            dying = dying[:1]
        elif (self.careless and worker.has_any_unsent) or not self.laboratory.may_lose_worker():
            return
        else:
            self.stored = [flight for flight in self.stored if flight.worker is not worker]
            self.committed = deque((flight for flight in self.committed if flight.worker is not worker), maxlen=400)
            self._count(worker)
            worker.die()
            self.workers[index] = self._worker(index)
        for flight in dying:
            self.flights.remove(flight)
            alone = not any(other.chat is flight.chat for other in self.flights)
            # Answered, stored, never committed. Of two such answers the careless application may commit the other.
            may_store = not self.careless or alone or self._has_lease(flight)
            if may_store and flight.chat.history is flight.base and self.rng.random() < 0.5:
                flight.chat.history = (*flight.base, flight.message)
                flight.chat.story.append(f"kept {flight}")
            flight.chat.story.append(f"died with {flight}")
            self.turns += 1

    def catch_up(self) -> None:
        """Commit a turn long after it was stored."""
        if self.stored:
            self._commit(self._take(self.stored))

    def commit_again(self) -> None:
        """Commit a turn a second time: the last one, or one from long ago."""
        if self.committed:
            flight = self.committed[-1] if self.rng.random() < 0.5 else self.rng.choice(self.committed)
            flight.chat.story.append(f"commit {flight} again")
            flight.worker.commit(flight.plan)

    def cut(self) -> None:
        """Forget a conversation, then shorten its history if no turn was stored in between."""
        if self.forgotten and self.rng.random() < 0.5:
            chat, base = self._take(self.forgotten)
            if chat.history is base:
                self._shorten(chat)
            return
        chat = self._any_chat()
        if chat.shown or not chat.history:
            return
        chat.story.append("forget")
        if not self.rng.choice(self.workers).forget(chat):
            return  # the history must not be cut after a failed forget
        if self.careless or self.rng.random() < 0.7:
            self._shorten(chat)
        else:
            self.forgotten.append((chat, chat.history))

    def fork(self) -> None:
        """Begin a conversation with the history of another one."""
        parent = self._any_chat()
        chat = self._chat(parent.tenant)
        chat.history = parent.history[: self.rng.randrange(len(parent.history) + 1)]
        chat.topic, chat.shown = parent.topic, parent.shown
        self.chats[self._place(parent.tenant)] = chat

    def edit_shown(self) -> None:
        """Shorten a history that the planner sees, which is always allowed."""
        shown = [chat for chat in self.chats if chat.shown and chat.history]
        if shown:
            self._shorten(self.rng.choice(shown))

    def cancel(self) -> None:
        """Cancel a task while it plans or commits."""
        awaiting = [worker for worker in self.workers if isinstance(worker, AsyncWorker)]
        chat = self._any_chat()
        if not awaiting or chat.shown or (self.careless and self._has_unsent(chat)):
            return
        worker, base = self.rng.choice(awaiting), chat.history
        request = self._request(chat, worker)
        options = {"conversation": chat.name, "tenant": chat.tenant, "placement": "tail"}
        lease = self.laboratory.lease
        plan = worker.plan_and_cancel(self.rng.randrange(8), request, **options)
        if plan is not None:
            self._abandon(self._check(chat, worker, plan, base, request, lease))
        flight = self._plan(chat, worker)
        if flight is not None:
            chat.history = (*flight.base, flight.message)
            chat.story.append(f"kept {flight}, and cancel its commit")
            worker.commit_and_cancel(self.rng.randrange(1, 9), flight.plan)  # at 0 it would never begin
            self.turns += 1

    def wait(self) -> None:
        """Let time pass."""
        self.laboratory.wait(self.rng)

    # -- steps of operations -----------------------------------------------------------------------------------

    def _plan(self, chat: Chat, worker: Worker | None = None) -> Flight | None:
        worker = self.rng.choice(self.workers) if worker is None else worker
        if self.careless and self._has_unsent(chat, but=worker):
            return None
        request, base = self._request(chat, worker), chat.history
        history = None
        if chat.shown or (not self.careless and self.rng.random() < 0.02):
            history = [{"role": "user", "content": message.text} for message in base]
        lease = self.laboratory.lease
        plan = worker.plan(request, conversation=chat.name, tenant=chat.tenant, placement="tail", history=history)
        return self._check(chat, worker, plan, base, request, lease)

    def _check(
        self,
        chat: Chat,
        worker: Worker,
        plan: ContextPlan,
        base: tuple[Message, ...],
        request: Sequence[ContextBlock],
        lease: Lease,
    ) -> Flight:
        """Make the message for the model, and check it."""
        chat.plans += 1
        question = f"Question {chat.plans}: what does [doc-{self.rng.randrange(9)}] add to {chat.name}?"
        message = Message(f"{plan.render()}\n\n{question}")
        flight = Flight(chat, worker, plan, base, message, lease)
        chat.story.append(f"planned {flight}, after {len(base)}")
        self.findings.check(plan, request, base, message, chat.story)
        return flight

    def _store(self, flight: Flight) -> None:
        """Keep an answered turn or not, then commit or abandon its plan."""
        chat, base = flight.chat, flight.base
        if chat.history is base:
            chat.history = (*base, flight.message)
            chat.story.append(f"kept {flight}")
        elif self.careless:
            kept = self.rng.choice(["this", "other", "both"])
            chat.story.append(f"of {flight} and another kept {kept}")
            if kept != "other":
                chat.history = (*(base if kept == "this" else chat.history), flight.message)
        elif not chat.shown and self.rng.random() < 0.3:  # a storage that only appends
            chat.history = (*chat.history, flight.message)
            chat.story.append(f"appended {flight}")
        else:
            self._abandon(flight)
            return
        if self.rng.random() < 0.1 and (not self.careless or self._has_lease(flight)):
            self.stored.append(flight)
        else:
            self._commit(flight)

    def _commit(self, flight: Flight) -> None:
        flight.chat.story.append(f"commit {flight}")
        flight.worker.commit(flight.plan)
        self.committed.append(flight)
        self.turns += 1
        self._retire(flight.chat)

    def _abandon(self, flight: Flight) -> None:
        flight.chat.story.append(f"abandon {flight}")
        flight.worker.abandon(flight.plan)
        self.turns += 1

    def _has_lease(self, flight: Flight) -> bool:
        """Return whether the store must have the plan's lease, and so must not trust simultaneous turns."""
        return flight.plan.turn is not None and self.laboratory.holds(flight.lease)

    def _has_unsent(self, chat: Chat, but: Worker | None = None) -> bool:
        """Return whether another worker has operations of the conversation that have not reached the store."""
        return any(worker.has_unsent(chat) for worker in self.workers if worker is not but)

    def _request(self, chat: Chat, worker: Worker) -> list[ContextBlock]:
        count = self.rng.choice((0, 1, 2, 3, 3, 4, 5, 6))
        numbers = [
            self.rng.choice(chat.topic) if self.rng.random() < 0.85 else self.rng.randrange(self.library.size)
            for _ in range(count)
        ]
        return [self.library.block(chat.tenant, worker.name, number) for number in numbers]

    def _shorten(self, chat: Chat) -> None:
        history = chat.history
        chat.story.append("cut")
        place = self.rng.randrange(len(history))
        how = self.rng.choice(["summarise", "truncate", "drop the oldest", "edit"])
        if how == "summarise":
            chat.history = (Message("So far they spoke of facts, of [doc-1] above all."),)
        elif how == "truncate":
            chat.history = history[:place]
        elif how == "drop the oldest":
            chat.history = history[place + 1 :]
        else:
            # Half a block may keep its label only if the application shows the history.
            text = history[place].text if chat.shown else f"Edited: {chat.name}."
            start = self.rng.randrange(len(text) + 1)
            edited = Message(text[:start] + text[start + self.rng.randrange(60) :], edited=True)
            chat.history = (*history[:place], edited, *history[place + 1 :])

    def _retire(self, chat: Chat) -> None:
        if len(chat.history) > LONGEST_HISTORY and chat in self.chats:
            self.chats[self.chats.index(chat)] = self._chat(chat.tenant)

    def _chat(self, tenant: str | None) -> Chat:
        self._chats[tenant] += 1  # every tenant has the same names
        topic = self.rng.sample(range(self.library.size), 14)
        return Chat(tenant, f"chat-{self._chats[tenant]}", topic, shown=self.rng.random() < 0.15)

    def _place(self, tenant: str | None) -> int:
        return CHATS_A_TENANT * TENANTS.index(tenant) + self.rng.randrange(CHATS_A_TENANT)

    def _any_chat(self) -> Chat:
        return self.rng.choice(self.chats)

    def _take(self, things: list[T]) -> T:
        return things.pop(self.rng.randrange(len(things)))

    def _worker(self, index: int) -> Worker:
        self._workers += 1
        store = self.laboratory.store(index)
        planner = ContextPlanner(store=store, annotate="both")  # a label shows the place of each block
        kind = AsyncWorker if index % 2 else Worker
        return kind(f"w{self._workers}", planner, self.times)

    def _count(self, worker: Worker) -> None:
        stats = worker.planner.stats()
        self.errors += stats.store_errors
        self.contested += stats.contested_blocks
