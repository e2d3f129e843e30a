"""One run of a batch: requests in execution order, warmers first, and results in the caller's order."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from warmprefix.batch.plan import BatchPlan, PlannedRequest
from warmprefix.batch.planners import Progress
from warmprefix.batch.primes import planned_primes
from warmprefix.errors import BatchError
from warmprefix.openai.asking import CallFailedError, ChatAsker, ask_with_retries, could_not_connect
from warmprefix.openai.batch_runner.journal import (
    BatchResult,
    Journal,
    MemoryResults,
    Messages,
    Results,
    digest_of_request,
)
from warmprefix.openai.batch_runner.primes import BatchPrimer
from warmprefix.openai.batch_runner.start_order import StartOrder, first_holders, planned_holders
from warmprefix.openai.call import chat_options
from warmprefix.openai.retry import Retries, status_of

__all__ = ["Asker", "open_journal", "results_of"]

_OF_ALL = frozenset({401, 402, 403, 404, 405})
"""Statuses that are about the key, the model or the address, and not about the one request."""

_MAX_REFUSED_IN_A_ROW = 10
"""Requests in a row that fail for a reason that concerns all; they end a run that had answers before."""


class Asker(NamedTuple):
    """Asks one model through one client, all requests with the same options."""

    chat: ChatAsker
    model: str
    options: Mapping[str, Any]
    messages: Messages
    retries: Retries
    primer: BatchPrimer

    async def ask(
        self, planned: PlannedRequest, prefilled: Callable[[], object]
    ) -> tuple[BatchResult, Exception | None]:
        """Ask until there is an answer or no hope; return the result and the last attempt's failure.

        `prefilled` is called at the first token. A failure that is not about the call, such as an option that the
        client does not have, is raised as it is.
        """
        options = chat_options(self.model, self.messages(planned), self.options, planned.cache_salt)
        try:
            answer, attempts = await ask_with_retries(lambda: self.chat.ask(options, on_start=prefilled), self.retries)
        except CallFailedError as failed:
            error = failed.error
            kind = "TimeoutError" if isinstance(error, TimeoutError) else type(error).__name__
            return BatchResult(planned, None, f"{kind}: {error}", failed.attempts, None), error
        return BatchResult(planned, answer.completion, None, attempts, answer.ttft), None


def _concerns_all(error: Exception) -> bool:
    """Return True if others would probably fail alike: no server is there, or nothing is permitted."""
    out_of_quota = getattr(error, "code", None) == "insufficient_quota"
    return out_of_quota or could_not_connect(error) or status_of(error) in _OF_ALL


async def open_journal(
    batch: BatchPlan, path: str | os.PathLike[str], model: str, options: str, messages: Messages
) -> Journal:
    """Open the batch's journal. Other tasks may run meanwhile: it takes a digest of every request."""
    digests: list[bytes] = []
    for planned in batch:
        digests.append(digest_of_request(planned, messages))
        await asyncio.sleep(0)
    requests = {planned.id: planned for planned in batch}
    return Journal(path, requests, model=model, options=options, digests=digests)


async def results_of(
    batch: BatchPlan,
    asker: Asker,
    opening: Callable[[], Awaitable[Journal]] | None,
    concurrency: int,
    ordered: bool,
    progress: Progress,
) -> AsyncGenerator[BatchResult, None]:
    """Run the batch and yield its results, as `BatchRunner.run` documents."""
    results: Results = MemoryResults() if opening is None else await opening()
    with closing(results):
        for id in results.answered:
            batch.owner.abandon(batch[id].plan)  # this run does not send the prompt
            await asyncio.sleep(0)
        run = _Run(batch, asker, results, concurrency, ordered, progress)
        try:
            run.report_progress()
            run.start_ready()
            while True:
                for id in run.due():
                    await asyncio.sleep(0)  # many may be due, and other tasks want to run meanwhile
                    yield results.take(id)
                if not run.tasks:
                    break
                await run.changed.wait()
                run.changed.clear()
            if run.failure is not None:
                raise run.failure
        finally:
            await run.stop()


class _Run:
    """The tasks of one run, in one event loop: which of them start, and how their ends affect the others."""

    def __init__(
        self, batch: BatchPlan, asker: Asker, results: Results, concurrency: int, ordered: bool, progress: Progress
    ) -> None:
        answered = results.answered
        self.tasks: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        """Set when a task has ended."""
        self.failure: BaseException | None = None
        """The reason why the run ended early."""
        self._batch = batch
        self._asker = asker
        self._results = results
        self._concurrency = concurrency
        self._ordered = ordered
        self._progress = progress
        self._finished = set(answered)
        self._turns = deque(id for id in batch.positions if ordered or id in answered)
        self._requests = [planned for planned in batch if planned.id not in answered]
        # The cache may have lost the prefixes of an earlier run, so the rest gets warmers of its own.
        holders = first_holders(self._requests) if answered else planned_holders(self._requests)
        asker.primer.expect(planned_primes(self._requests, batch.checkpoints) if answered else batch.primes)
        self._order = StartOrder(self._requests, holders, lookahead=(concurrency + 1) // 2)
        self._stopping = False
        self._reached = False
        self._refused_in_a_row = 0

    async def stop(self) -> None:
        """Cancel the tasks that are left, and wait until they have ended."""
        self._stopping = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def due(self) -> Iterator[str]:
        """Yield the ids whose turn has come; after a failure, all that are finished."""
        while self._turns:
            if self._turns[0] in self._finished:
                yield self._turns.popleft()
            elif self.failure is not None and not self.tasks:
                self._turns.popleft()
            else:
                return

    def start_ready(self) -> None:
        """Start as many requests as may run."""
        while not self._stopping and len(self.tasks) < self._concurrency:
            i = self._order.start()
            if i is None:
                return
            task = asyncio.get_running_loop().create_task(self._serve(i), name=f"batch request {self._requests[i].id}")
            self.tasks.add(task)
            task.add_done_callback(self._task_done)

    async def _serve(self, i: int) -> None:
        planned = self._requests[i]
        owner = self._batch.owner
        try:
            await self._asker.primer.send_before(planned)
            result, error = await self._asker.ask(planned, partial(self._prefilled, i))
        except BaseException:
            owner.abandon(planned.plan)
            raise
        if error is None:
            owner.commit(planned.plan, result.cached_tokens)
            self._order.prefilled(i)
        else:
            owner.abandon(planned.plan)
        self._end_if_in_vain(error, result)
        self._order.over(i)
        self._results.put(result)
        self._finished.add(planned.id)
        if not self._ordered:
            self._turns.append(planned.id)
        self.report_progress()

    def _prefilled(self, i: int) -> None:
        self._order.prefilled(i)
        self.start_ready()

    def _end_if_in_vain(self, error: Exception | None, result: BatchResult) -> None:
        if error is None or not _concerns_all(error):
            self._reached = True
            self._refused_in_a_row = 0
            return
        self._refused_in_a_row += 1
        if not self._reached:
            raise BatchError(f"the run can't begin: {result.error}") from error
        if self._refused_in_a_row >= _MAX_REFUSED_IN_A_ROW:
            refused = f"{_MAX_REFUSED_IN_A_ROW} requests in a row failed"
            raise BatchError(f"the run ends: {refused}, the last with {result.error}") from error

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.changed.set()
        if task.cancelled():
            if not self._stopping:
                self._fail(BatchError(f"{task.get_name()} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._fail(error)
        else:
            self.start_ready()

    def _fail(self, error: BaseException) -> None:
        """End the run with the first failure; finished results are handed out before it is raised."""
        if self.failure is None and not self._stopping:
            self.failure = error
        self._stopping = True
        for task in self.tasks:
            task.cancel()

    def report_progress(self) -> None:
        self._progress("requests", len(self._finished), len(self._batch))
