"""`plan_dataset`: plans more requests than fit into one machine's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from warmprefix.errors import MissingExtraError, check_count
from warmprefix_ray.dividing import DividedDataset, divide
from warmprefix_ray.partition_plan import DatasetPlanning, PartitionNumbers, write_plan

try:
    import ray.data
    from ray.data import Dataset
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

__all__ = ["DatasetPlan", "divided", "plan_dataset"]

_log = logging.getLogger("warmprefix")


@dataclass(frozen=True, slots=True)
class DatasetPlan:
    """A planned dataset: its rows, and what the plan saves."""

    rows: Dataset
    """The rows in execution order; see `plan_dataset`. Ray keeps it only with `execution_options.preserve_order`."""
    files: Sequence[Path]
    """The same as Parquet files, one per partition, in execution order."""
    partitions: Sequence[PartitionNumbers]
    """The numbers of each partition, in execution order."""

    @property
    def requests(self) -> int:
        """Number of planned requests."""
        return sum([numbers.requests for numbers in self.partitions])

    @property
    def unreadable(self) -> int:
        """Number of rows without a request."""
        return sum([numbers.unreadable for numbers in self.partitions])

    @property
    def saved_tokens(self) -> int:
        """Tokens of context that the cache will hold when their request runs, if each partition starts with none."""
        return sum([numbers.saved_tokens for numbers in self.partitions])

    @property
    def total_tokens(self) -> int:
        """Tokens of all contexts, without labels and annotations."""
        return sum([numbers.total_tokens for numbers in self.partitions])

    @property
    def hit_ratio(self) -> float:
        """Saved tokens over total tokens; 0 without requests."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0


def plan_dataset(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    planning: DatasetPlanning | None = None,
    *,
    replicas: int = 1,
) -> DatasetPlan:
    """Plan the requests of a Ray dataset, in partitions that fit into a worker's memory.

    A sample decides which requests meet in a partition, so that those with common blocks do. Each partition is planned
    by `plan_batch`, in a task of its own. With the same numbers and rows, the plan is the same, whatever Ray does.

    Each row keeps its columns and gets the column `plan`, a struct: the request's `id`; its `partition` and its `place`
    there; its `replica`, from 0 on; `order`, the positions of its blocks in planned order; `saved_tokens` and
    `warmed_by`, as of a `PlannedRequest`; `cache_salt`; and `messages`, its chat as JSON. A row without a request has
    the `error`, and so has all but one of the rows of a partition with the same id.

    The folder keeps the divided rows and one file per plan. Call again with the same folder and dataset to continue
    after a failure: finished plans are used, and damaged ones are made again with a warning. Datasets are compared by
    their files, columns and rows, and options too. Functions are not: use another folder for another `read`,
    `make_planner` or `messages`.

    Args:
        dataset: The rows.
        folder: A folder that all workers share. It is made if needed.
        planning: How requests are read and planned; None for the defaults.
        replicas: Replicas of the model. Each gets about as many partitions, one after the other.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is below 1, the dataset has a column `plan`, or the folder is that of another dataset or of
            other numbers.
    """
    planning = DatasetPlanning() if planning is None else planning
    parts = divided(dataset, Path(folder), planning, replicas)
    plans = parts.folder / f"plans-{planning.digest(parts.source)}"
    plans.mkdir(exist_ok=True)
    files = [plans / f"{number:05}.parquet" for number in range(len(parts.rows))]
    found = [_finished(number, file, rows) for number, (file, rows) in enumerate(zip(files, parts.rows, strict=True))]
    missing = [number for number, numbers in enumerate(found) if numbers is None]
    if missing:
        tasks = ray.data.from_items([{"partition": number} for number in missing], override_num_blocks=len(missing))
        planned = tasks.map(partial(_plan_task, parts=parts, planning=planning, plans=plans, replicas=replicas))
        for row in planned.iter_rows():
            numbers = PartitionNumbers(**row)
            found[numbers.partition] = numbers
    done = [numbers for numbers in found if numbers is not None]
    for numbers in done:
        _report(numbers)
    written = [file for file, numbers in zip(files, done, strict=True) if numbers.requests + numbers.unreadable]
    rows = ray.data.read_parquet([str(file) for file in written]) if written else dataset
    return DatasetPlan(rows, written, done)


def divided(dataset: Dataset, folder: Path, planning: DatasetPlanning, replicas: int) -> DividedDataset:
    """Check the numbers, and divide the dataset into at least one partition for each replica."""
    check_count("replicas", replicas)
    total = dataset.count()
    if total and "plan" in (dataset.columns() or ()):
        raise ValueError("dataset must have no column `plan`, because the plan gets that name")
    folder.mkdir(parents=True, exist_ok=True)
    partitions = max(-(-total // planning.partition_requests), min(replicas, max(total, 1)))
    return divide(dataset, folder, planning.read, partitions, planning.sample, total)


def _finished(partition: int, file: Path, rows: int) -> PartitionNumbers | None:
    """Return the numbers of a plan that was written earlier; None if it has to be made."""
    if not rows:
        return PartitionNumbers(partition)
    try:
        numbers = PartitionNumbers.read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s: damaged (%s); the partition is planned again", file, error)
        return None
    return numbers if numbers.requests + numbers.unreadable == rows else None


def _plan_task(
    row: dict[str, Any], *, parts: DividedDataset, planning: DatasetPlanning, plans: Path, replicas: int
) -> dict[str, Any]:
    partition: int = row["partition"]
    replica = partition * replicas // len(parts.rows)
    target = plans / f"{partition:05}.parquet"
    return asdict(write_plan(partition, replica, parts.files(partition), target, planning))


def _report(numbers: PartitionNumbers) -> None:
    if numbers.unreadable:
        _log.warning(
            "partition %s: %s rows have no request; the first: %s",
            numbers.partition,
            numbers.unreadable,
            numbers.first_error,
        )
    if numbers.pieces > 1:
        _log.warning(
            "partition %s: too large, and planned in %s pieces; blocks that they share are computed once in each",
            numbers.partition,
            numbers.pieces,
        )
