"""The run: requests in execution order, warmers first, so many at once; results in the caller's order."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from warmprefix.batch.base import Progress, no_progress
from warmprefix.batch.plan import BatchPlan, PlannedRequest
from warmprefix.batch.run.asked import Messages, digest_of_options, digest_of_request, digest_of_requests
from warmprefix.batch.run.client import Asker, Outcome
from warmprefix.batch.run.journal import Journal
from warmprefix.batch.run.kept import InMemory, KeptResults
from warmprefix.batch.run.results import BatchResult
from warmprefix.batch.run.retries import Retries
from warmprefix.batch.run.scheduling import Schedule, first_holders, planned_holders
from warmprefix.errors import BatchError

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
    asker = Asker(
        client,
        model,
        request,
        messages=PlannedRequest.messages if messages is None else messages,
        retries=retries if isinstance(retries, Retries) else Retries(retries),
        timeout=timeout,
    )
    keeper = _Keeper(batch, model, request, PlannedRequest.messages if messages is None else messages, journal)
    run = _Run(batch, asker, keeper, concurrency, ordered, no_progress if progress is None else progress)
    return run.results()


class _Keeper:
    """Opens what the results are kept in."""

    def __init__(
        self,
        batch: BatchPlan,
        model: str,
        request: Mapping[str, Any],
        messages: Messages,
        path: str | os.PathLike[str] | None,
    ) -> None:
        self._batch = batch
        self._model = model
        self._options = "" if path is None else digest_of_options(request)
        self._messages = messages
        self._path = path

    async def open(self) -> KeptResults:
        """The journal, if there is to be one. Others may run meanwhile: it renders every request."""
        if self._path is None:
            return InMemory()
        digests: list[bytes] = []
        for planned in self._batch:
            digests.append(digest_of_request(planned, self._messages))
            await asyncio.sleep(0)
        requests = {planned.id: planned for planned in self._batch}
        asked = digest_of_requests(digests)
        return Journal(self._path, requests, model=self._model, options=self._options, asked=asked)


class _Run:
    """One run, in one event loop. Tasks ask; the generator hands out what they have brought."""

    def __init__(
        self,
        batch: BatchPlan,
        asker: Asker,
        keeper: _Keeper,
        concurrency: int,
        ordered: bool,
        progress: Progress,
    ) -> None:
        self._batch = batch
        self._asker = asker
        self._keeper = keeper
        self._concurrency = concurrency
        self._ordered = ordered
        self._progress = progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failure: BaseException | None = None
        self._reached = False
        self._refused_in_a_row = 0

    async def results(self) -> AsyncGenerator[BatchResult, None]:
        """What `BatchPlan.run` iterates over."""
        self._kept = await self._keeper.open()
        try:
            self._begin()
            while True:
                for id in self._due():
                    await asyncio.sleep(0)  # many may be due, and others want to run meanwhile
                    yield self._kept.take(id)
                if not self._tasks:
                    break
                await self._news.wait()
                self._news.clear()
            if self._failure is not None:
                raise self._failure
            assert not self._turns
        finally:
            try:
                await self._stop()
            finally:
                self._kept.close()

    def _begin(self) -> None:
        """Start as many as may run."""
        self._news = asyncio.Event()
        answered = self._kept.answered
        self._finished = set(answered)
        self._turns = deque(id for id in self._batch.positions if self._ordered or id in answered)
        for id in answered:
            self._batch.owner.abandon(self._batch[id].plan)  # nobody sees that prompt in this run
        self._requests = [planned for planned in self._batch if planned.id not in answered]
        # What an earlier run has brought may be gone from the cache, so then the rest is looked at by itself.
        holders = first_holders(self._requests) if answered else planned_holders(self._requests)
        self._schedule = Schedule(self._requests, holders, lookahead=(self._concurrency + 1) // 2)
        self._tell_progress()
        self._start_what_may()

    def _due(self) -> Iterator[str]:
        """The ids whose turn has come; after a failure, all that are finished."""
        while self._turns:
            if self._turns[0] in self._finished:
                yield self._turns.popleft()
            elif self._failure is not None and not self._tasks:
                self._turns.popleft()
            else:
                return

    def _start_what_may(self) -> None:
        while not self._stopping and len(self._tasks) < self._concurrency:
            i = self._schedule.start()
            if i is None:
                return
            task = asyncio.get_running_loop().create_task(self._serve(i), name=f"batch request {self._requests[i].id}")
            self._tasks.add(task)
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
        self._tasks.discard(task)
        self._news.set()
        if task.cancelled():
            if not self._stopping:
                self._fail(BatchError(f"{task.get_name()} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._fail(error)
        else:
            self._start_what_may()

    def _fail(self, error: BaseException) -> None:
        """End the run with the first thing that went wrong; what is finished is handed out before it is raised."""
        if self._failure is None and not self._stopping:
            self._failure = error
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    async def _stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell_progress(self) -> None:
        self._progress("requests", len(self._finished), len(self._batch))
