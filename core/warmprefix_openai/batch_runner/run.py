"""One run of a batch: requests in execution order, warmers first, and results in the caller's order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from warmprefix.batch import BatchPlan, PlannedRequest, Progress
from warmprefix.errors import BatchError
from warmprefix_openai.batch_runner.asker import Asker
from warmprefix_openai.batch_runner.journal import (
    BatchResult,
    Journal,
    MemoryResults,
    Messages,
    Results,
    digest_of_request,
)
from warmprefix_openai.batch_runner.replica_run import MAX_REFUSED_IN_A_ROW, ReplicaRun, StartedRequest
from warmprefix_openai.shards import part_of, shards_of

__all__ = ["BatchRun", "open_journal"]

_MAX_LOSSES = 3
"""Replicas that may be lost while they work on one request; it may be the reason, so it is not asked again."""

_log = logging.getLogger("warmprefix")


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


class BatchRun:
    """The tasks of one run, in one event loop: which of them start, and how their ends affect the others."""

    _results: Results

    def __init__(
        self, batch: BatchPlan, askers: Sequence[Asker], concurrency: int, ordered: bool, progress: Progress
    ) -> None:
        """Prepare the run; `results` starts it."""
        self._changed = asyncio.Event()
        """Set when a task has ended."""
        self._failure: BaseException | None = None
        """The reason why the run ended early."""
        self._batch = batch
        self._ordered = ordered
        self._progress = progress
        self._losses = Counter[str]()
        self._moved: dict[str, PlannedRequest] = {}
        """Requests that were in flight at a replica that was lost, and have not started again."""
        self._stopping = False
        self._replicas = [ReplicaRun(asker, concurrency) for asker in askers]

    async def results(self, opening: Callable[[], Awaitable[Journal]] | None) -> AsyncGenerator[BatchResult, None]:
        """Run the batch and yield its results, as `BatchRunner.run` documents."""
        batch = self._batch
        self._results = MemoryResults() if opening is None else await opening()
        with closing(self._results):
            answered = self._results.answered
            for id in answered:
                batch.owner.abandon(batch[id].plan)  # this run does not send the prompt
                await asyncio.sleep(0)
            self._finished = set(answered)
            self._turns = deque(id for id in batch.positions if self._ordered or id in answered)
            # The cache may have lost the prefixes of an earlier run, so the rest is a batch of its own.
            left = [planned for planned in batch if planned.id not in answered]
            self._deal(part_of(batch, left) if answered else batch)
            try:
                self._report_progress()
                self._start_ready()
                while True:
                    for id in self._due():
                        await asyncio.sleep(0)  # many may be due, and other tasks want to run meanwhile
                        yield self._results.take(id)
                    if not self._is_running:
                        break
                    await self._changed.wait()
                    self._changed.clear()
                if self._failure is not None:
                    raise self._failure
            finally:
                await self._stop()

    def _deal(self, part: BatchPlan) -> None:
        """Give each replica that is left its share of some requests."""
        left = [replica for replica in self._replicas if not replica.lost]
        shards = [part] if len(left) == 1 else shards_of(part, len(left))
        for replica, shard in zip(left, shards, strict=True):
            replica.add(shard)

    @property
    def _is_running(self) -> bool:
        """True while requests are in flight."""
        return any(replica.tasks for replica in self._replicas)

    async def _stop(self) -> None:
        """Cancel the tasks that are left, and wait until they have ended."""
        self._stopping = True
        tasks = self._cancelled_tasks()
        await asyncio.gather(*tasks, return_exceptions=True)
        for planned in self._moved.values():
            self._batch.owner.abandon(planned.plan)

    def _cancelled_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [task for replica in self._replicas for task in replica.tasks]
        for task in tasks:
            task.cancel()
        return tasks

    def _due(self) -> Iterator[str]:
        """Yield the ids whose turn has come; after a failure, all that are finished."""
        while self._turns:
            if self._turns[0] in self._finished:
                yield self._turns.popleft()
            elif self._failure is not None and not self._is_running:
                self._turns.popleft()
            else:
                return

    def _start_ready(self) -> None:
        """Start as many requests as may run."""
        for replica in self._replicas:
            while not self._stopping and (started := replica.start()) is not None:
                name = f"batch request {started.planned.id}"
                task = asyncio.get_running_loop().create_task(self._serve(replica, started), name=name)
                replica.tasks[task] = started.planned
                self._moved.pop(started.planned.id, None)
                task.add_done_callback(partial(self._task_done, replica))

    async def _serve(self, replica: ReplicaRun, started: StartedRequest) -> None:
        planned = started.planned
        owner = self._batch.owner
        try:
            await replica.asker.prime(planned)
            result, error = await replica.asker.ask(planned, partial(self._prefilled, started))
        except BaseException:
            if not replica.lost:
                owner.abandon(planned.plan)
            raise
        alone = not any(other is not replica and not other.lost for other in self._replicas)
        is_lost = replica.fails_all(error, alone=alone)
        if is_lost and not alone:
            self._lose(replica, planned, result)
            return
        if error is None:
            owner.commit(planned.plan, result.cached_tokens)
            started.prefilled()
        else:
            owner.abandon(planned.plan)
        if is_lost:
            raise BatchError(self._end(result)) from error
        started.over()
        self._finish(result)

    def _end(self, last: BatchResult) -> str:
        """Return why the run ends with the last replica."""
        if not any(replica.reached for replica in self._replicas):
            return f"the run can't begin: {last.error}"
        if len(self._replicas) > 1:
            return f"the run ends: all {len(self._replicas)} replicas are lost, the last one with {last.error}"
        return f"the run ends: {MAX_REFUSED_IN_A_ROW} requests in a row failed, the last with {last.error}"

    def _finish(self, result: BatchResult) -> None:
        self._results.put(result)
        self._finished.add(result.id)
        if not self._ordered:
            self._turns.append(result.id)
        self._report_progress()

    def _prefilled(self, started: StartedRequest) -> None:
        started.prefilled()
        self._start_ready()

    def _lose(self, replica: ReplicaRun, planned: PlannedRequest, result: BatchResult) -> None:
        """Cancel what the replica works on. Once that has ended, `_task_done` moves its requests."""
        _log.warning(
            "Replica %d of %d is lost, and its requests go to the others: %s",
            self._replicas.index(replica) + 1,
            len(self._replicas),
            result.error,
        )
        replica.lost = True
        self._interrupt(replica, planned)
        for task in replica.tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _interrupt(self, lost: ReplicaRun, planned: PlannedRequest) -> None:
        lost.unanswered.append(planned)
        self._moved[planned.id] = planned

    def _move(self, lost: ReplicaRun) -> None:
        """Give the other replicas what a lost one has not answered."""
        ids = {planned.id for planned in lost.left()}
        for planned in lost.unanswered:
            self._losses[planned.id] += 1
            if self._losses[planned.id] < _MAX_LOSSES:
                ids.add(planned.id)
                continue
            self._batch.owner.abandon(self._moved.pop(planned.id).plan)
            error = f"it was in flight at {_MAX_LOSSES} replicas that were lost"
            self._finish(BatchResult(planned, None, error, 0, None))
        self._deal(part_of(self._batch, [planned for planned in self._batch if planned.id in ids]))

    def _task_done(self, replica: ReplicaRun, task: asyncio.Task[None]) -> None:
        planned = replica.tasks.pop(task)
        self._changed.set()
        if task.cancelled():
            if replica.lost:
                self._interrupt(replica, planned)
            elif not self._stopping:
                self._fail(BatchError(f"{task.get_name()} was cancelled from outside"))
        elif (error := task.exception()) is not None:
            self._fail(error)
        if self._stopping:
            return
        if replica.lost and not replica.tasks:
            self._move(replica)
        self._start_ready()

    def _fail(self, error: BaseException) -> None:
        """End the run with the first failure; finished results are handed out before it is raised."""
        if self._failure is None and not self._stopping:
            self._failure = error
        self._stopping = True
        self._cancelled_tasks()

    def _report_progress(self) -> None:
        self._progress("requests", len(self._finished), len(self._batch))
