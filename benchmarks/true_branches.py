"""The branching application of `true_histories`: it continues, retries and forks any turn that it ever stored."""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from store_faults import Laboratory
from true_prompts import TENANTS, Findings, Message
from true_world import LONGEST_HISTORY, AsyncWorker, Library, Worker
from warmprefix import Branch, ContextBlock, ContextPlan, ContextPlanner

__all__ = ["BranchWorld"]

_POINTS_PER_TENANT = 60


@dataclass(frozen=True, eq=False)
class _Point:
    """A turn that the application has stored, which any number of turns may continue."""

    tenant: str | None
    id: str | None
    """None before the first turn."""
    history: tuple[Message, ...]
    topic: Sequence[int]
    story: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Answer:
    """A plan and what its prompt was."""

    worker: Worker
    plan: ContextPlan
    point: _Point
    message: Message


@dataclass
class BranchWorld:
    """The application and its users; `step` executes one random operation.

    Every stored turn has an id of its own. Most turns continue a late one; the others travel back in time. Answers are
    thrown away, committed late, twice, under two ids or never, and tasks are cancelled. A cut history goes on behind an
    id without a record, as does one whose server stored nothing.
    """

    laboratory: Laboratory
    seed: int
    findings: Findings = field(default_factory=Findings)
    operations: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    """Number of turns that ended, in any way."""
    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of each call."""
    errors: int = 0
    contested: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} branching")
        self.library = Library(random.Random(self.seed))
        self._ids = 0
        self._started = 0
        self.workers = [self._worker(i) for i in range(2)]
        self.points = {tenant: deque([self._root(tenant)], maxlen=_POINTS_PER_TENANT) for tenant in TENANTS}
        self.open: list[_Answer] = []
        """Turns that wait for their answer."""
        self.stored: list[tuple[_Answer, str]] = []
        """Turns in the history that are not committed yet."""
        operations: Sequence[tuple[Callable[[], None], int]] = (
            (self.turn, 50),
            (self.begin, 12),
            (self.answer, 12),
            (self.fail, 4),
            (self.store_nothing, 2),
            (self.commit_again, 3),
            (self.catch_up, 3),
            (self.crash, 1),
            (self.cut, 3),
            (self.shown, 3),
            (self.ask_for_foreign_turn, 2),
            (self.cancel, 4),
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
        self._store(self._plan(self._any_point()))

    def begin(self) -> None:
        """Plan a turn that is answered later."""
        self.open.append(self._plan(self._any_point()))
        if len(self.open) > 40:
            self._store(self.open.pop(0))

    def answer(self) -> None:
        if self.open:
            self._store(self._take(self.open))

    def fail(self) -> None:
        """Abandon a turn: the model did not answer, or the user left."""
        if self.open:
            answer = self._take(self.open)
            answer.worker.abandon(answer.plan)
            self.turns += 1

    def store_nothing(self) -> None:
        """Commit a turn without an id; the history goes on with it, behind an id that nobody has recorded."""
        answer = self._plan(self._any_point())
        answer.worker.commit(answer.plan)
        self._keep(answer)
        self.turns += 1

    def commit_again(self) -> None:
        """Commit a plan twice under one id, then under another: a second answer to the same prompt."""
        answer = self._plan(self._any_point())
        for turn_id in [self._keep(answer)] * 2 + [self._keep(answer)]:
            answer.worker.commit(answer.plan, turn_id)
        self.turns += 1

    def catch_up(self) -> None:
        """Commit a turn long after it was stored."""
        if self.stored:
            answer, turn_id = self._take(self.stored)
            answer.worker.commit(answer.plan, turn_id)

    def crash(self) -> None:
        """Kill a worker with its plans and commits."""
        if self.rng.random() < 0.5 or not self.laboratory.may_lose_worker():
            return
        index = self.rng.randrange(len(self.workers))
        worker = self.workers[index]
        self.open = [answer for answer in self.open if answer.worker is not worker]
        self.stored = [stored for stored in self.stored if stored[0].worker is not worker]
        self._count(worker)
        worker.die()
        self.workers[index] = self._worker(index)

    def cut(self) -> None:
        """Cut, edit or summarise a history; what is left is continued behind an id without a record."""
        point = self._any_point()
        history = point.history
        if history:
            place = self.rng.randrange(len(history))
            summary = Message("So far they spoke of facts, of [doc-1] above all.")
            ways = (
                (summary,),
                history[:place],
                history[place + 1 :],
                (*history[:place], summary, *history[place + 1 :]),
            )
            self._add(point, self._new_id(), self.rng.choice(ways), "cut")

    def shown(self) -> None:
        """Show a history, which then decides, whatever the branch is."""
        point = self._any_point()
        answer = self._plan(point, history=[{"role": "user", "content": message.text} for message in point.history])
        answer.worker.commit(answer.plan, self._keep(answer))
        self.turns += 1

    def ask_for_foreign_turn(self) -> None:
        """Continue a turn of another tenant, which does not exist for this one."""
        tenant, other = self.rng.sample(TENANTS, 2)
        foreign = self.points[other][-1]
        if foreign.id is not None:
            self._plan(_Point(tenant, foreign.id, (), foreign.topic))
            self.turns += 1

    def cancel(self) -> None:
        """Cancel a task while it plans or commits; the application keeps the turn or not."""
        worker = self.rng.choice(self.workers)
        if not isinstance(worker, AsyncWorker):
            return
        point = self._any_point()
        request, options = self._request(point, worker), self._options(point)
        plan = worker.plan_and_cancel(self.rng.randrange(8), request, **options)
        answer = self._plan(point, worker) if plan is None else self._check(point, worker, plan, request)
        keeps = self.rng.random() < 0.5
        turn_id = self._keep(answer) if keeps else self._new_id()
        worker.commit_and_cancel(self.rng.randrange(1, 9), answer.plan, turn_id)
        self.turns += 1

    def wait(self) -> None:
        """Let time pass."""
        self.laboratory.wait(self.rng)

    # -- steps of operations -----------------------------------------------------------------------------------

    def _plan(self, point: _Point, worker: Worker | None = None, **options: Any) -> _Answer:
        worker = self.rng.choice(self.workers) if worker is None else worker
        request = self._request(point, worker)
        plan = worker.plan(request, **self._options(point), **options)
        return self._check(point, worker, plan, request)

    def _options(self, point: _Point) -> dict[str, Any]:
        return {"conversation": Branch(point.id), "tenant": point.tenant, "placement": "tail"}

    def _check(self, point: _Point, worker: Worker, plan: ContextPlan, request: Sequence[ContextBlock]) -> _Answer:
        """Make the message for the model, and check it."""
        question = f"Question {len(point.history)}: what does [doc-{self.rng.randrange(9)}] add?"
        message = Message(f"{plan.render()}\n\n{question}")
        self.findings.check(plan, request, point.history, message, (*point.story, f"planned {plan.id[-6:]}"))
        return _Answer(worker, plan, point, message)

    def _store(self, answer: _Answer) -> None:
        """Keep an answered turn or throw it away; commit it now, later or never."""
        self.turns += 1
        chance = self.rng.random()
        if chance < 0.1:  # a retry will answer instead
            answer.worker.commit(answer.plan, self._new_id())
        elif chance < 0.15:
            self.stored.append((answer, self._keep(answer)))
        elif chance < 0.18:  # the process dies before the commit
            self._keep(answer)
        else:
            answer.worker.commit(answer.plan, self._keep(answer))

    def _keep(self, answer: _Answer) -> str:
        """Store a turn; return its id."""
        turn_id = self._new_id()
        self._add(answer.point, turn_id, (*answer.point.history, answer.message), f"kept {answer.plan.id[-6:]}")
        return turn_id

    def _add(self, point: _Point, turn_id: str, history: tuple[Message, ...], event: str) -> None:
        story = (*point.story[-20:], f"{event} as {turn_id}")
        if len(history) <= LONGEST_HISTORY:
            self.points[point.tenant].append(_Point(point.tenant, turn_id, history, point.topic, story))

    def _any_point(self) -> _Point:
        points = self.points[self.rng.choice(TENANTS)]
        if self.rng.random() < 0.06:
            points.append(self._root(points[-1].tenant))
        if self.rng.random() < 0.25:  # any turn, however old
            return self.rng.choice(points)
        return points[-self.rng.randrange(1, min(len(points), 6) + 1)]

    def _root(self, tenant: str | None) -> _Point:
        return _Point(tenant, None, (), self.rng.sample(range(self.library.size), 14))

    def _request(self, point: _Point, worker: Worker) -> list[ContextBlock]:
        numbers = [
            self.rng.choice(point.topic) if self.rng.random() < 0.85 else self.rng.randrange(self.library.size)
            for _ in range(self.rng.choice((0, 1, 2, 3, 3, 4, 5, 6)))
        ]
        return [self.library.block(point.tenant, worker.name, number) for number in numbers]

    def _new_id(self) -> str:
        self._ids += 1
        return f"turn-{self._ids}"

    def _take(self, things: list[Any]) -> Any:
        return things.pop(self.rng.randrange(len(things)))

    def _worker(self, index: int) -> Worker:
        self._started += 1
        planner = ContextPlanner(store=self.laboratory.store(index), annotate="both")
        kind = AsyncWorker if index % 2 else Worker
        return kind(f"w{self._started}", planner, self.times)

    def _count(self, worker: Worker) -> None:
        stats = worker.planner.stats()
        self.errors += stats.store_errors
        self.contested += stats.contested_blocks
