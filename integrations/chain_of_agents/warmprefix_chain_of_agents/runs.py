"""One run: documents to agents, what they hand on to the manager, and whoever fails on the way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

from warmprefix import AgentRouter, Assignment, ContextBlock, PlannedBlock
from warmprefix.openai import Retries
from warmprefix_chain_of_agents.agents import Manager, Worker
from warmprefix_chain_of_agents.calls import Call, CallFailedError
from warmprefix_chain_of_agents.crew import Crew
from warmprefix_chain_of_agents.errors import ManagerError, WorkersFailedError
from warmprefix_chain_of_agents.prompts import Prompts, Unit
from warmprefix_chain_of_agents.results import AgentReport, Answer, Progress, Usage
from warmprefix_chain_of_agents.turns import Turn, Turns

__all__ = ["Event", "Mode", "OnFailure", "Question", "Run", "RunOptions"]

Mode = Literal["chain", "map"]
OnFailure = Literal["skip", "raise"]
Event = Progress | str
"""What a run tells on its way; a str is a piece of the manager's answer."""

_MOST_REFUSALS = 2
"""Agents that may refuse a segment until it is skipped. Those that are dead, or refuse whatever they are given, do not
count."""


class Question(NamedTuple):
    """What is asked."""

    text: str
    documents: Sequence[ContextBlock]
    """In relevance order; at least one, none of them blank."""
    conversation: str | None
    tenant: str | None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What all runs of a chain have in common; `ChainOfAgents` documents it."""

    mode: Mode
    on_failure: OnFailure
    together: bool | None
    max_segment_tokens: int
    concurrency: int
    timeout: float | None
    retries: Retries
    prompts: Prompts


class _Segment(NamedTuple):
    """Documents that one agent is to read in one prompt."""

    place: tuple[int, ...]
    """In the order in which communication units are told; whoever reads for another has a place behind its."""
    assignment: Assignment
    agent: str
    blocks: tuple[ContextBlock, ...]
    refusals: int


class _Done(NamedTuple):
    """What became of a segment."""

    segment: _Segment
    report: AgentReport
    unit: Unit | None
    """None if the agent failed."""
    unreachable: bool = False
    refused: bool = False
    """Whether what it was given may be the reason."""


class Run:
    """Answers one question. Await it once; until it ends, everything it does can be taken back."""

    def __init__(
        self,
        question: Question,
        manager: Manager,
        crew: Crew,
        turns: Turns,
        options: RunOptions,
        threads: Executor,
        tell: Callable[[Event], None],
        *,
        streaming: bool,
    ) -> None:
        """Prepare.

        Args:
            question: What is asked.
            manager: Who answers.
            crew: Who reads.
            turns: Asks them.
            options: How.
            threads: Where clients that can't be awaited are asked.
            tell: Is given every event, in the event loop's thread; must not fail.
            streaming: Whether the manager's answer is told as it comes.
        """
        self._question = question
        self._manager = manager
        self._crew = crew
        self._router: AgentRouter = crew.router
        self._turns = turns
        self._options = options
        self._tell = tell
        self._streaming = streaming
        self._call = Call(threads, timeout=options.timeout, retries=options.retries, on_retry=self._retrying)
        self._slots = asyncio.Semaphore(options.concurrency)
        self._chats = {name: asyncio.Lock() for name in crew.workers}
        self._together = question.conversation is not None or options.mode == "chain"
        if options.together is not None:
            self._together = options.together
        self._owed: dict[tuple[int, ...], _Segment] = {}
        """Segments that were neither committed nor abandoned, by place."""
        self._done: list[_Done] = []
        self._skipped: list[ContextBlock] = []
        self._read = 0
        self._total = 0

    async def __call__(self) -> Answer:
        """Run to the end.

        Raises:
            WorkersFailedError: Documents could not be read, which is not to be put up with; or none could.
            ManagerError: The manager failed.
        """
        try:
            segments = self._assigned()
            if self._options.mode == "map":
                await self._read_all(segments)
            else:
                await self._read_in_turn(segments)
        finally:
            for segment in self._owed.values():
                self._router.abandon(segment.assignment, segment.agent, blocks=segment.blocks)
        self._done.sort(key=_place)
        units = [done.unit for done in self._done if done.unit is not None]
        if self._skipped and not units:
            raise self._workers_failed()
        return await self._answered(units if self._options.mode == "map" else units[-1:])

    # -- reading -----------------------------------------------------------------------------------------------

    def _assigned(self) -> list[_Segment]:
        documents = list(dict.fromkeys(self._question.documents))
        self._total = len(documents)
        self._crew.recover()
        segments = self._shared_out(documents, self._crew.workers, (), refusals=0)
        self._progress("assigned")
        if documents and not segments:
            self._skipped += documents
            raise self._workers_failed()
        return segments

    def _shared_out(
        self, blocks: Sequence[ContextBlock], among: Collection[str], place: tuple[int, ...], refusals: int
    ) -> list[_Segment]:
        """The prompts in which these workers are to read the blocks; none if no worker lives."""
        assignment = None
        if blocks:
            assignment = self._crew.assign(
                blocks,
                among,
                conversation=self._question.conversation,
                tenant=self._question.tenant,
                together=self._together,
            )
        if assignment is None:
            return []
        if self._together:
            prompts = [
                (agent, part)
                for agent, read in assignment.segments.items()
                for part in _parts(read, self._options.max_segment_tokens)
            ]
        else:
            prompts = [(assigned.agent, (assigned.block,)) for assigned in assignment.blocks]
        segments = [
            _Segment((*place, number), assignment, agent, read, refusals)
            for number, (agent, read) in enumerate(prompts)
        ]
        self._owed.update({segment.place: segment for segment in segments})
        return segments

    async def _read_all(self, segments: Sequence[_Segment]) -> None:
        """All at once; whatever has to be read again joins in."""
        started: list[asyncio.Task[_Done]] = []

        def start(segments: Sequence[_Segment]) -> set[asyncio.Task[_Done]]:
            tasks = [asyncio.ensure_future(self._read_one(segment, None)) for segment in segments]
            started.extend(tasks)
            return set(tasks)

        try:
            reading = start(segments)
            while reading:
                finished, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    reading |= start(self._settled(task.result()))
        finally:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _read_in_turn(self, segments: Sequence[_Segment]) -> None:
        """One after the other, each with what the one before handed on; whatever has to be read again comes next."""
        waiting = deque(segments)
        unit: Unit | None = None
        while waiting:
            done = await self._read_one(waiting.popleft(), unit)
            waiting.extendleft(reversed(self._settled(done)))
            unit = done.unit or unit

    async def _read_one(self, segment: _Segment, previous: Unit | None) -> _Done:
        worker, question, prompts = self._crew.workers[segment.agent], self._question, self._options.prompts
        blocks, handed_on = segment.blocks, None if previous is None else previous.text
        async with self._chat_of(worker), self._slots:
            if worker.name not in self._crew.live():  # lost while this was waiting: another wait would tell the same
                gone = CallFailedError(ConnectionError("the agent failed or left before it was asked"), 0)
                return _Done(segment, _failure(worker, blocks, gone), None, unreachable=True)
            self._progress("asked", worker.name)
            try:
                turn = await self._turns.take(
                    worker,
                    prompts.worker_role,
                    blocks,
                    lambda documents: prompts.for_worker(documents, handed_on, question.text),
                    self._call,
                    conversation=question.conversation,
                    tenant=question.tenant,
                )
            except CallFailedError as failed:
                refused = not failed.unreachable and not failed.agents_own
                return _Done(segment, _failure(worker, blocks, failed), None, failed.unreachable, refused)
        self._router.commit(segment.assignment, segment.agent, turn.report, blocks=blocks, plan=turn.plan)
        del self._owed[segment.place]
        return _Done(segment, _success(worker, blocks, turn), Unit(turn.reply.text, _labels(turn.plan.blocks)))

    def _settled(self, done: _Done) -> list[_Segment]:
        """Tell what became of a segment, and return what has to be read in its stead."""
        self._done.append(done)
        segment, report = done.segment, done.report
        if done.unit is not None:
            self._read += len(report.blocks)
            self._progress("read", report.agent, report)
            return []
        self._progress("failed", report.agent, report, report.error)
        if done.unreachable:
            self._crew.lost(segment.agent)
        self._router.abandon(segment.assignment, segment.agent, blocks=segment.blocks)
        del self._owed[segment.place]
        refusals = segment.refusals + done.refused
        if refusals < _MOST_REFUSALS:
            others = [name for name in segment.assignment.agents if name != segment.agent]
            again = self._shared_out(segment.blocks, others, segment.place, refusals)
            if again:
                return again
        self._skipped += report.blocks
        self._progress("skipped", report.agent)
        if self._options.on_failure == "raise":
            raise self._workers_failed()
        return []

    def _chat_of(self, worker: Worker) -> AbstractAsyncContextManager[object]:
        """A conversation's chat with an agent has one end to go on from, so one segment follows the other there."""
        return nullcontext() if self._question.conversation is None else self._chats[worker.name]

    # -- answering ---------------------------------------------------------------------------------------------

    async def _answered(self, units: Sequence[Unit]) -> Answer:
        manager, question, prompts = self._manager, self._question, self._options.prompts
        message = prompts.for_manager(units, len(self._skipped), question.text)
        self._progress("answering", manager.name)
        reports = tuple(done.report for done in self._done)
        try:
            turn = await self._turns.take(
                manager,
                prompts.manager_role,
                (),
                lambda _: message,
                self._call,
                conversation=question.conversation,
                tenant=question.tenant,
                on_text=self._tell if self._streaming else None,
            )
        except CallFailedError as failed:
            raise ManagerError(_failure(manager, (), failed), reports) from failed.error
        return Answer(turn.reply.text, reports, _success(manager, (), turn), tuple(self._in_order(self._skipped)))

    def _in_order(self, blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        wanted = set(blocks)
        return [block for block in dict.fromkeys(self._question.documents) if block in wanted]

    # -- telling -----------------------------------------------------------------------------------------------

    def _progress(
        self,
        kind: Literal["assigned", "asked", "retrying", "read", "failed", "skipped", "answering"],
        agent: str | None = None,
        report: AgentReport | None = None,
        error: Exception | None = None,
    ) -> None:
        self._tell(Progress(kind, self._read + len(self._skipped), self._total, agent, report, error))

    def _retrying(self, speaker: Worker | Manager, error: Exception) -> None:
        self._progress("retrying", speaker.name, error=error)

    def _workers_failed(self) -> WorkersFailedError:
        reports = [done.report for done in sorted(self._done, key=_place)]
        error = WorkersFailedError(self._in_order(self._skipped), reports)
        error.__cause__ = next((report.error for report in reversed(reports) if report.error is not None), None)
        return error


def _parts(blocks: Sequence[ContextBlock], most_tokens: int) -> Iterator[tuple[ContextBlock, ...]]:
    """The blocks in order, in parts of at most so many tokens; one that is longer is a part by itself."""
    part: list[ContextBlock] = []
    tokens = 0
    for block in blocks:
        if part and tokens + block.tokens > most_tokens:
            yield tuple(part)
            part, tokens = [], 0
        part.append(block)
        tokens += block.tokens
    if part:
        yield tuple(part)


def _place(done: _Done) -> tuple[int, ...]:
    return done.segment.place


def _labels(planned: Sequence[PlannedBlock]) -> tuple[str, ...]:
    return tuple(block.label for block in sorted(planned, key=lambda block: block.rank))


def _success(speaker: Worker | Manager, blocks: tuple[ContextBlock, ...], turn: Turn) -> AgentReport:
    reply = turn.reply
    return AgentReport(
        speaker.name, blocks, reply.text, reply.usage, reply.attempts, reply.ttft, finish_reason=reply.finish_reason
    )


def _failure(speaker: Worker | Manager, blocks: tuple[ContextBlock, ...], failed: CallFailedError) -> AgentReport:
    return AgentReport(speaker.name, blocks, None, Usage(), failed.attempts, None, failed.error)
