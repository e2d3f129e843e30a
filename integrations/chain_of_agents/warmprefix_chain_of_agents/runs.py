"""One run: documents go to agents, their summaries to the manager, and documents of failed agents to others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from typing import NamedTuple

from warmprefix import Choice, ContextBlock
from warmprefix.choice import LeftOut
from warmprefix_chain_of_agents.agents import Speaker, is_unreachable, refuses_all
from warmprefix_chain_of_agents.prompts import Unit
from warmprefix_chain_of_agents.results import (
    AgentReport,
    ChainAnswer,
    ChainProgress,
    ManagerError,
    StepKind,
    Usage,
    WorkersFailedError,
)
from warmprefix_chain_of_agents.turns import AgentTurn, ChainQuestion, ChainSetup, Turns
from warmprefix_openai import CallFailedError
from warmprefix_routing import Assignment

__all__ = ["Run", "RunEvent"]

RunEvent = ChainProgress | str
"""An event of a run; a str is a piece of the manager's answer."""

_MAX_REFUSALS = 2
"""Agents that may refuse a segment until it is skipped. Dead ones, and those that refuse everything, do not count."""


class _Segment(NamedTuple):
    """Documents that one agent reads in one prompt."""

    place: tuple[int, ...]
    """Sorts the summaries; a segment that replaces another has a place right after it."""
    assignment: Assignment
    agent: str
    blocks: tuple[ContextBlock, ...]
    refusals: int


class _Done(NamedTuple):
    """The outcome of a segment."""

    segment: _Segment
    report: AgentReport
    unit: Unit | None
    """None if the agent failed."""


class Run:
    """Answers one question. Await it once; until it ends, all of its effects can be withdrawn."""

    def __init__(
        self,
        setup: ChainSetup,
        question: ChainQuestion,
        threads: Executor,
        report: Callable[[RunEvent], None],
        *,
        streaming: bool,
    ) -> None:
        """Prepare the run. `report` gets every event, in the event loop's thread, and must not fail."""
        self._setup = setup
        self._question = question
        self._crew = setup.crew
        self._router = setup.crew.router
        self._turns = Turns(setup, question, threads, lambda agent, e: self._report_step("retrying", agent, error=e))
        self._threads = threads
        self._report = report
        self._streaming = streaming
        self._slots = asyncio.Semaphore(setup.concurrency)
        self._chats = {name: asyncio.Lock() for name in setup.crew.workers}
        in_one_prompt = question.conversation is not None or setup.mode == "chain"
        self._together = in_one_prompt if setup.together is None else setup.together
        self._open: dict[tuple[int, ...], _Segment] = {}
        """Segments that were neither committed nor abandoned, by place."""
        self._done: list[_Done] = []
        self._skipped: list[ContextBlock] = []
        self._left_out: tuple[LeftOut, ...] = ()
        self._read = 0
        self._total = 0

    async def __call__(self) -> ChainAnswer:
        """Run to the end.

        Raises:
            WorkersFailedError: Documents could not be read, and the policy is to raise; or none could.
            ManagerError: The manager failed.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._router.catch_up, self._question.tenant)
        try:
            segments = self._assigned()
            if self._setup.mode == "map":
                await self._read_all(segments)
            else:
                await self._read_in_turn(segments)
        finally:
            for segment in self._open.values():
                self._router.abandon(segment.assignment, segment.agent, blocks=segment.blocks)
        self._done.sort(key=lambda done: done.segment.place)
        units = [done.unit for done in self._done if done.unit is not None]
        if self._skipped and not units:
            raise self._workers_failed()
        return await self._answered(units if self._setup.mode == "map" else units[-1:])

    def _assigned(self) -> list[_Segment]:
        documents = list(dict.fromkeys(self._question.documents))
        self._crew.recover()
        segments = self._shared_out(documents, self._crew.workers, (), refusals=0, choose=self._question.choose)
        if segments:
            self._left_out = segments[0].assignment.left_out
        self._total = len(documents) - len(self._left_out)
        self._report_step("assigned")
        if documents and not segments:
            self._skipped += documents
            raise self._workers_failed()
        return segments

    def _shared_out(
        self,
        blocks: Sequence[ContextBlock],
        among: Collection[str],
        place: tuple[int, ...],
        refusals: int,
        choose: Choice | None = None,
    ) -> list[_Segment]:
        """Share the blocks out over these workers, a segment per prompt; empty if no worker is live."""
        conversation, tenant = self._question.conversation, self._question.tenant
        assignment = None
        if blocks:
            together = self._together
            assignment = self._crew.assign(blocks, among, conversation, tenant, together=together, choose=choose)
        if assignment is None:
            return []
        max_tokens = 3 * self._setup.max_chat_tokens // 4  # the rest is for the other parts of the prompt
        if self._together:
            prompts = [
                (agent, part) for agent, read in assignment.segments.items() for part in _parts(read, max_tokens)
            ]
        else:
            prompts = [(assigned.agent, (assigned.block,)) for assigned in assignment.blocks]
        segments = [
            _Segment((*place, number), assignment, agent, read, refusals)
            for number, (agent, read) in enumerate(prompts)
        ]
        self._open.update({segment.place: segment for segment in segments})
        return segments

    async def _read_all(self, segments: Sequence[_Segment]) -> None:
        """Read all segments at once; segments that replace failed ones join in."""
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
        """Read one after the other, each with the summary before it; segments that replace failed ones come next."""
        waiting = deque(segments)
        unit: Unit | None = None
        while waiting:
            done = await self._read_one(waiting.popleft(), unit)
            waiting.extendleft(reversed(self._settled(done)))
            unit = done.unit or unit

    async def _read_one(self, segment: _Segment, previous: Unit | None) -> _Done:
        worker, question, prompts = self._crew.workers[segment.agent], self._question, self._setup.prompts
        blocks, summary = segment.blocks, None if previous is None else previous.text
        # A chat of a conversation has one end to continue from, so its segments are read one after the other.
        chat = nullcontext() if question.conversation is None else self._chats[worker.name]
        async with chat, self._slots:
            if worker.name not in self._crew.live():  # lost while this was waiting: another attempt would fail too
                gone = CallFailedError(ConnectionError("the agent failed or left before it was asked"), 0)
                return _Done(segment, _failure(worker, blocks, gone), None)
            self._report_step("asked", worker.name)
            try:
                turn = await self._turns.take(
                    worker,
                    prompts.worker_role,
                    blocks,
                    lambda documents: prompts.for_worker(documents, summary, question.text),
                )
            except CallFailedError as failed:
                return _Done(segment, _failure(worker, blocks, failed), None)
        self._router.commit(segment.assignment, segment.agent, turn.report, blocks=blocks, plan=turn.plan)
        del self._open[segment.place]
        labels = tuple(planned.label for planned in sorted(turn.plan.blocks, key=lambda planned: planned.rank))
        return _Done(segment, _success(worker, blocks, turn), Unit(turn.text, labels))

    def _settled(self, done: _Done) -> list[_Segment]:
        """Report the outcome of a segment, and return the segments that replace it."""
        self._done.append(done)
        segment, report = done.segment, done.report
        if (error := report.error) is None:
            self._read += len(report.blocks)
            self._report_step("read", report.agent, report)
            return []
        self._report_step("failed", report.agent, report, error)
        is_dead = is_unreachable(error)
        if is_dead:
            self._crew.lost(segment.agent)
        self._router.abandon(segment.assignment, segment.agent, blocks=segment.blocks)
        del self._open[segment.place]
        refusals = segment.refusals + (not is_dead and not refuses_all(error))
        if refusals < _MAX_REFUSALS:
            others = [name for name in segment.assignment.agents if name != segment.agent]
            if again := self._shared_out(segment.blocks, others, segment.place, refusals):
                return again
        self._skipped += report.blocks
        self._report_step("skipped", report.agent)
        if self._setup.on_failure == "raise":
            raise self._workers_failed()
        return []

    async def _answered(self, units: Sequence[Unit]) -> ChainAnswer:
        manager, prompts = self._setup.manager, self._setup.prompts
        message = prompts.for_manager(units, len(self._skipped), self._question.text)
        self._report_step("answering", manager.name)
        reports = tuple(done.report for done in self._done)
        try:
            on_text = self._report if self._streaming else None
            turn = await self._turns.take(manager, prompts.manager_role, (), lambda _: message, on_text)
        except CallFailedError as failed:
            raise ManagerError(_failure(manager, (), failed), reports) from failed.error
        skipped = tuple(self._in_order(self._skipped))
        return ChainAnswer(turn.text, reports, _success(manager, (), turn), skipped, self._left_out)

    def _in_order(self, blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
        wanted = set(blocks)
        return [block for block in dict.fromkeys(self._question.documents) if block in wanted]

    def _report_step(
        self,
        kind: StepKind,
        agent: str | None = None,
        report: AgentReport | None = None,
        error: Exception | None = None,
    ) -> None:
        self._report(ChainProgress(kind, self._read + len(self._skipped), self._total, agent, report, error))

    def _workers_failed(self) -> WorkersFailedError:
        reports = [done.report for done in sorted(self._done, key=lambda done: done.segment.place)]
        error = WorkersFailedError(self._in_order(self._skipped), reports)
        error.__cause__ = next((report.error for report in reversed(reports) if report.error is not None), None)
        return error


def _parts(blocks: Sequence[ContextBlock], max_tokens: int) -> Iterator[tuple[ContextBlock, ...]]:
    """Yield the blocks in order, in parts of at most this many tokens; a longer block is a part by itself."""
    part: list[ContextBlock] = []
    tokens = 0
    for block in blocks:
        if part and tokens + block.tokens > max_tokens:
            yield tuple(part)
            part, tokens = [], 0
        part.append(block)
        tokens += block.tokens
    if part:
        yield tuple(part)


def _success(speaker: Speaker, blocks: tuple[ContextBlock, ...], turn: AgentTurn) -> AgentReport:
    answer = turn.answer
    usage = Usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
    return AgentReport(
        speaker.name, blocks, turn.text, usage, turn.attempts, answer.ttft, finish_reason=answer.finish_reason
    )


def _failure(speaker: Speaker, blocks: tuple[ContextBlock, ...], failed: CallFailedError) -> AgentReport:
    return AgentReport(speaker.name, blocks, None, Usage(), failed.attempts, None, failed.error)
