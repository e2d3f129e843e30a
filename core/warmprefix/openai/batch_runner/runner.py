"""The run: requests in execution order, warmers first, so many at once; results in the caller's order."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from warmprefix.batch.plan import BatchPlan, PlannedRequest
from warmprefix.batch.planners import Progress, no_progress
from warmprefix.errors import BatchError
from warmprefix.openai.batch_runner.asked import Messages, digest_of_options, digest_of_request, digest_of_requests
from warmprefix.openai.batch_runner.client import Asker, Outcome
from warmprefix.openai.batch_runner.journal import Journal
from warmprefix.openai.batch_runner.kept import InMemory, KeptResults
from warmprefix.openai.batch_runner.results import BatchResult
from warmprefix.openai.batch_runner.scheduling import Schedule, first_holders, planned_holders
from warmprefix.retries import Retries

if TYPE_CHECKING:
    import openai

__all__ = ["run_batch"]

_IN_A_ROW = 10
"""So many requests refused in a row for what concerns all end a run that had been answered before."""


def run_batch(
    batch: BatchPlan,
    client: openai.AsyncOpenAI,
    model: str,
    *,
    concurrency: int = 8,
    ordered: bool = True,
    journal: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    retries: int | Retries = 4,
    messages: Messages | None = None,
    timeout: float | None = None,
    **request: Any,
) -> AsyncGenerator[BatchResult, None]:
    """See `BatchPlan.run`. Checks the arguments now; all else begins with the iteration."""
    if isinstance(concurrency, bool) or not isinstance(concurrency, int):
        raise TypeError(f"concurrency must be an int, got {type(concurrency).__name__}")
    if concurrency < 1:
        raise ValueError(f"concurrency must be 1 or more, got {concurrency}")
    if not isinstance(model, str):
        raise TypeError(f"model must be a str, got {type(model).__name__}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be above 0 or None, got {timeout}")
    if "stream" in request:
        raise ValueError("stream must not be given: a run streams, and puts the answers together")
    chat = PlannedRequest.messages if messages is None else messages
    asker = Asker(
        client,
        model,
        request,
        messages=chat,
        retries=retries if isinstance(retries, Retries) else Retries(retries),
        timeout=timeout,
    )
    opening = None if journal is None else partial(_journal, batch, journal, model, digest_of_options(request), chat)
    return _results(batch, asker, opening, concurrency, ordered, no_progress if progress is None else progress)


async def _journal(
    batch: BatchPlan, path: str | os.PathLike[str], model: str, options: str, messages: Messages
) -> Journal:
    """Open the batch's journal. Others may run meanwhile, for that takes a digest of every request."""
    digests: list[bytes] = []
    for planned in batch:
        digests.append(digest_of_request(planned, messages))
        await asyncio.sleep(0)
    requests = {planned.id: planned for planned in batch}
    return Journal(path, requests, model=model, options=options, asked=digest_of_requests(digests))


async def _results(
    batch: BatchPlan,
    asker: Asker,
    opening: Callable[[], Awaitable[Journal]] | None,
    concurrency: int,
    ordered: bool,
    progress: Progress,
) -> AsyncGenerator[BatchResult, None]:
    """What `BatchPlan.run` iterates over."""
    with closing(InMemory() if opening is None else await opening()) as kept:
        for id in kept.answered:
            batch.owner.abandon(batch[id].plan)  # nobody sees that prompt in this run
            await asyncio.sleep(0)
        run = _Run(batch, asker, kept, concurrency, ordered, progress)
        try:
            run.begin()
            while True:
                for id in run.due():
                    await asyncio.sleep(0)  # many may be due, and others want to run meanwhile
                    yield kept.take(id)
                if not run.tasks:
                    break
                await run.news.wait()
                run.news.clear()
            if run.failure is not None:
                raise run.failure
        finally:
            await run.stop()


class _Run:
    """The tasks of one run, in one event loop: who starts, and what their ends mean for the others."""

    def __init__(
        self,
        batch: BatchPlan,
        asker: Asker,
        kept: KeptResults,
        concurrency: int,
        ordered: bool,
        progress: Progress,
    ) -> None:
        answered = kept.answered
        self.tasks: set[asyncio.Task[None]] = set()
        self.news = asyncio.Event()
        """Set when a task has ended."""
        self.failure: BaseException | None = None
        """What ended the run before its time."""
        self._batch = batch
        self._asker = asker
        self._kept = kept
        self._concurrency = concurrency
        self._ordered = ordered
        self._progress = progress
        self._finished = set(answered)
        self._turns = deque(id for id in batch.positions if ordered or id in answered)
        self._requests = [planned for planned in batch if planned.id not in answered]
        # What an earlier run has brought may be gone from the cache, so then the rest is looked at by itself.
        holders = first_holders(self._requests) if answered else planned_holders(self._requests)
        self._schedule = Schedule(self._requests, holders, lookahead=(concurrency + 1) // 2)
        self._stopping = False
        self._reached = False
        self._refused_in_a_row = 0

    def begin(self) -> None:
        """Start as many as may run."""
        self._tell_progress()
        self._start_what_may()

    async def stop(self) -> None:
        """End the tasks that are left, and wait until they have."""
        self._stopping = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def due(self) -> Iterator[str]:
        """The ids whose turn has come; after a failure, all that are finished."""
        while self._turns:
            if self._turns[0] in self._finished:
                yield self._turns.popleft()
            elif self.failure is not None and not self.tasks:
                self._turns.popleft()
            else:
                return

    def _start_what_may(self) -> None:
        while not self._stopping and len(self.tasks) < self._concurrency:
            i = self._schedule.start()
            if i is None:
                return
            task = asyncio.get_running_loop().create_task(self._serve(i), name=f"batch request {self._requests[i].id}")
            self.tasks.add(task)
            task.add_done_callback(self._task_done)

    async def _serve(self, i: int) -> None:
        planned = self._requests[i]
        owner = self._batch.owner
        try:
            outcome = await self._asker.ask(planned, partial(self._prefilled, i))
        except BaseException:
            owner.abandon(planned.plan)
            raise
        result = outcome.result
        if result.error is None:
            owner.commit(planned.plan, result.cached_tokens)
            self._schedule.prefilled(i)
        else:
            owner.abandon(planned.plan)
        self._end_if_in_vain(outcome)
        self._schedule.over(i)
        self._kept.put(result)
        self._finished.add(planned.id)
        if not self._ordered:
            self._turns.append(planned.id)
        self._tell_progress()

    def _prefilled(self, i: int) -> None:
        self._schedule.prefilled(i)
        self._start_what_may()

    def _end_if_in_vain(self, outcome: Outcome) -> None:
        if not outcome.concerns_all:
            self._reached = True
            self._refused_in_a_row = 0
            return
        self._refused_in_a_row += 1
        if not self._reached:
            raise BatchError(f"the run can't begin: {outcome.result.error}") from outcome.cause
        if self._refused_in_a_row >= _IN_A_ROW:
            raise BatchError(
                f"the run ends: {_IN_A_ROW} requests in a row failed, the last with {outcome.result.error}"
            ) from outcome.cause

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.news.set()
        if task.cancelled():
            if not self._stopping:
                self._fail(BatchError(f"{task.get_name()} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._fail(error)
        else:
            self._start_what_may()

    def _fail(self, error: BaseException) -> None:
        """End the run with the first thing that went wrong; what is finished is handed out before it is raised."""
        if self.failure is None and not self._stopping:
            self.failure = error
        self._stopping = True
        for task in self.tasks:
            task.cancel()

    def _tell_progress(self) -> None:
        self._progress("requests", len(self._finished), len(self._batch))
