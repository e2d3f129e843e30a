"""`run_dataset`: plans a dataset and asks a model, each partition on one replica."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, NamedTuple, cast

from warmprefix.errors import BatchError, BatchFileError, MissingExtraError, check_count
from warmprefix_openai import BatchResult, BatchRunner, Retries
from warmprefix_ray.dataset_plan import divided
from warmprefix_ray.dividing import DividedDataset
from warmprefix_ray.partition_plan import DatasetPlanning, Messages, PiecePlan, plan_pieces
from warmprefix_ray.rows import ROWS_AT_ONCE

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import ray.data
    from openai import AsyncOpenAI
    from ray.data import Dataset
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

__all__ = ["run_dataset"]

_PARTITIONS_PER_REPLICA = 4
"""Least number, so that a lost or slow replica leaves work that can be divided."""

_ANSWER_TYPE = pa.struct(
    {
        "id": pa.string(),
        "text": pa.string(),
        "error": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens": pa.int64(),
        "cached_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "ttft": pa.float64(),
        "attempts": pa.int64(),
        "completion": pa.string(),
    }
)

_log = logging.getLogger("warmprefix")


def run_dataset(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    urls: Sequence[str],
    model: str,
    *,
    planning: DatasetPlanning | None = None,
    concurrency: int = 32,
    api_key: str = "none",
    retries: int | Retries = 4,
    timeout: float | None = None,
    **request: Any,
) -> Dataset:
    """Plan a dataset like `plan_dataset`, and ask every request with a `BatchRunner`.

    Ray runs one actor for each replica. An actor takes a partition, plans it, and asks all its requests on its replica;
    then it takes the next one. So each group of requests meets one cache, and slow replicas get fewer partitions. When
    a replica is lost, its actor goes on with another one, from the first request without an answer.

    Rows keep their columns and get the column `answer`, a struct: the request's `id`; `text`, or else `error`;
    `finish_reason`, `prompt_tokens`, `cached_tokens`, `completion_tokens`, `ttft` in seconds, `attempts`; and the whole
    `completion` as JSON. A row without a request has the `error`, and no `id`.

    The folder keeps a journal for each partition in work, and a file of answers for each that is done. Call again with
    the same folder, dataset and options to continue after a failure; only failed requests of partitions in work and
    unanswered ones are asked again.

    Args:
        dataset, folder, planning: See `plan_dataset`.
        urls: The base URL of each replica, with `/v1`. Workers must reach them.
        model: The model to ask.
        concurrency: Most requests in flight, for each replica.
        api_key: The key of all replicas.
        retries, timeout: See `BatchRunner.run`.
        **request: For `client.chat.completions.create`, with every request.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is below 1, there is no URL, the dataset has a column `plan` or `answer`, or the folder is
            that of another dataset, or of other numbers.
        BatchError: All replicas are lost. What was answered is kept.
    """
    check_count("concurrency", concurrency)
    if not urls:
        raise ValueError(f"urls must have the URL of at least one replica, got {urls!r}")
    if "answer" in (dataset.columns() or ()):
        raise ValueError("dataset must have no column `answer`, because the answers get that name")
    planning = DatasetPlanning() if planning is None else planning
    parts = divided(dataset, Path(folder), planning, _PARTITIONS_PER_REPLICA * len(urls))
    digest = hashlib.blake2b(
        json.dumps([planning.digest(parts.source), model, sorted(request.items())], default=str).encode(), digest_size=4
    ).hexdigest()
    answers = parts.folder / f"answers-{digest}"
    answers.mkdir(exist_ok=True)
    filled = [number for number, rows in enumerate(parts.rows) if rows]
    files = [answers / f"{number:05}.parquet" for number in filled]
    missing = [number for number, file in zip(filled, files, strict=True) if not _is_complete(file, parts.rows[number])]
    if missing:
        replicas = ray.remote(num_cpus=0)(_Replicas).remote(list(urls))
        asking = _Asking(model, concurrency, api_key, retries, timeout, request)
        tasks = ray.data.from_items([{"partition": number} for number in missing], override_num_blocks=len(missing))
        done = tasks.map(
            cast(Any, _PartitionAsker),  # Ray's types have no class of row functions
            fn_constructor_args=(parts, planning, answers, replicas, asking),
            compute=ray.data.ActorPoolStrategy(size=min(len(urls), len(missing)), max_tasks_in_flight_per_actor=1),
            num_cpus=0.25,  # an actor waits for its replica
        )
        failures = [row["failure"] for row in done.iter_rows() if row["failure"] is not None]
        if failures:
            raise BatchError(failures[0])
    return ray.data.read_parquet([str(file) for file in files]) if files else dataset


def _is_complete(file: Path, rows: int) -> bool:
    """Return True if an earlier run has written all answers of a partition."""
    try:
        return bool(pq.read_metadata(file).num_rows == rows)
    except FileNotFoundError:
        return False
    except (OSError, pa.ArrowException) as error:
        _log.warning("%s: damaged (%s); the partition is asked again", file, error)
        return False


class _Asking(NamedTuple):
    """How a replica is asked."""

    model: str
    concurrency: int
    api_key: str
    retries: int | Retries
    timeout: float | None
    request: Mapping[str, Any]

    async def results(self, url: str, piece: PiecePlan, messages: Messages, journal: Path) -> list[BatchResult]:
        """Ask all requests of a piece, except those that the journal has; return the results of all."""
        async with AsyncOpenAI(base_url=url, api_key=self.api_key) as client:
            run = BatchRunner(piece.plan).run(
                client,
                self.model,
                concurrency=self.concurrency,
                journal=journal,
                retries=self.retries,
                messages=messages,
                timeout=self.timeout,
                **self.request,
            )
            async with aclosing(run) as results:
                return [result async for result in results]


class _Replicas:
    """The replicas of a run, for an actor: each worker gets one of its own, while there are enough."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._workers: dict[str, set[str]] = {url: set() for url in urls}

    def take(self, worker: str) -> str | None:
        """Return the URL of the replica that the worker has, or else of the one with the fewest workers."""
        if not self._workers:
            return None
        url = min(self._workers, key=lambda url: (worker not in self._workers[url], len(self._workers[url])))
        self._workers[url].add(worker)
        return url

    def lose(self, url: str) -> None:
        """Remove a replica."""
        self._workers.pop(url, None)


class _PartitionAsker:
    """An actor of Ray Data, which plans partitions and asks their requests on one replica."""

    def __init__(
        self, parts: DividedDataset, planning: DatasetPlanning, answers: Path, replicas: Any, asking: _Asking
    ) -> None:
        self._parts = parts
        self._planning = planning
        self._answers = answers
        self._replicas = replicas
        self._asking = asking
        self._worker = ray.get_runtime_context().get_actor_id() or ""

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write the answers of a partition; return why it failed, if it did."""
        partition: int = row["partition"]
        target = self._answers / f"{partition:05}.parquet"
        unfinished = target.with_suffix(".unfinished")
        journals: list[Path] = []
        try:
            with ExitStack() as stack:
                writer: pq.ParquetWriter | None = None
                for number, piece in enumerate(plan_pieces(self._parts.files(partition), self._planning)):
                    journals.append(self._answers / f"{partition:05}-{number}.journal")
                    if writer is None:
                        schema = piece.table.schema.append(pa.field("answer", _ANSWER_TYPE))
                        writer = stack.enter_context(pq.ParquetWriter(unfinished, schema))
                    for rows, answers in _answered_rows(piece, self._results(piece, journals[-1])):
                        answered = piece.table.take(rows).append_column("answer", pa.array(answers, _ANSWER_TYPE))
                        writer.write_table(answered)
        except BatchError as error:
            return {"failure": str(error)}
        os.replace(unfinished, target)
        for journal in journals:
            journal.unlink(missing_ok=True)
        return {"failure": None}

    def _results(self, piece: PiecePlan, journal: Path) -> list[BatchResult]:
        """Ask the requests of a piece on one replica after the other, until one answers to the end.

        Raises:
            BatchError: No replica is left.
        """
        lost: BatchError | None = None
        while True:
            url: str | None = ray.get(self._replicas.take.remote(self._worker))
            if url is None:
                raise BatchError(f"all replicas are lost: {lost or 'by other workers'}") from lost
            try:
                return asyncio.run(self._asking.results(url, piece, self._planning.messages, journal))
            except BatchFileError:
                raise
            except BatchError as error:
                lost = error
                ray.get(self._replicas.lose.remote(url))


def _answered_rows(
    piece: PiecePlan, results: Sequence[BatchResult]
) -> Iterator[tuple[list[int], list[Mapping[str, Any]]]]:
    """Yield places in the table and their answers, some rows at a time."""
    for start in range(0, len(results), ROWS_AT_ONCE):
        some = results[start : start + ROWS_AT_ONCE]
        yield [piece.rows[result.id] for result in some], [_answer(result) for result in some]
    if piece.errors:
        yield list(piece.errors), [{"error": error} for error in piece.errors.values()]


def _answer(result: BatchResult) -> Mapping[str, Any]:
    return {
        "id": result.id,
        "text": result.text,
        "error": result.error,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "completion_tokens": result.completion_tokens,
        "ttft": result.ttft,
        "attempts": result.attempts,
        "completion": None if result.completion is None else json.dumps(result.completion),
    }
