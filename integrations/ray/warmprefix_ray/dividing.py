"""The first step of a job: the rows of a dataset, divided into partitions on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from warmprefix.errors import MissingExtraError
from warmprefix_ray.partitions import Outline, Partitions, outline_of
from warmprefix_ray.rows import ReadRequest, read_rows

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    from ray.data import Dataset
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DividedDataset", "divide"]

_COLUMN = "warmprefix_partition"
_MORE = 1.05
"""How many times the sample's size is expected below the threshold, so that it is rarely too small."""

_ROWS = 4_096
"""Requests that a worker has in memory at once; a block of Ray's can have a million."""

_log = logging.getLogger("warmprefix")


@dataclass(frozen=True, slots=True)
class DividedDataset:
    """The rows of a dataset in the partitions of a folder."""

    folder: Path
    rows: tuple[int, ...]
    """The number of rows of each partition."""
    source: str
    """The files and columns of the dataset, and the numbers that were asked for, as a hash."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return what an earlier job left; None if there is nothing complete. Damage is logged."""
        try:
            fields = json.loads((folder / "partitions.json").read_text())
            found = cls(folder, tuple(fields["rows"]), fields["source"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s: damaged (%s); the rows are divided again", folder / "partitions.json", error)
            return None
        for number, rows in enumerate(found.rows):
            try:
                left = sum([pq.read_metadata(file).num_rows for file in found.files(number)])
            except (OSError, pa.ArrowException) as error:
                _log.warning("%s: damaged (%s); the rows are divided again", found.place(number), error)
                return None
            if left != rows:
                _log.warning(
                    "%s: %s of %s rows are missing; all are divided again", found.place(number), rows - left, rows
                )
                return None
        return found

    def place(self, partition: int) -> Path:
        """Return the folder of a partition's rows."""
        return self.folder / "rows" / f"{_COLUMN}={partition}"

    def files(self, partition: int) -> list[Path]:
        """Return the files of a partition's rows, in a steady order."""
        return sorted(self.place(partition).glob("*.parquet"))


def divide(
    dataset: Dataset, folder: Path, read: ReadRequest, partitions: int, sample: int, total: int
) -> DividedDataset:
    """Write the rows of a dataset into partitions. Rows without a request are in the first.

    If the folder has these rows already, they are used.

    Raises:
        ValueError: The folder has the rows of another dataset, or divided otherwise.
    """
    names = [sorted(dataset.input_files()), dataset.columns(), total, partitions, sample]
    source = hashlib.blake2b(json.dumps(names).encode(), digest_size=8).hexdigest()
    found = DividedDataset.read(folder)
    if found is not None:
        if found.source != source:
            raise ValueError(f"folder must be that of this dataset and these numbers, or a new one, got {folder}")
        return found
    shutil.rmtree(folder / "rows", ignore_errors=True)
    learned = ray.put(Partitions(_sample(dataset, read, sample, total), partitions))
    dataset.map_batches(
        partial(_with_partitions, learned=learned, read=read),
        batch_size=_ROWS,
        batch_format="pyarrow",
        zero_copy_batch=True,
    ).write_parquet(str(folder / "rows"), partition_cols=[_COLUMN])
    written = DividedDataset(folder, (), source)
    rows = [sum([pq.read_metadata(file).num_rows for file in written.files(number)]) for number in range(partitions)]
    divided = DividedDataset(folder, tuple(rows), source)
    fields = {"rows": divided.rows, "source": divided.source}
    unfinished = folder / "partitions.json.unfinished"
    unfinished.write_text(json.dumps(fields))
    os.replace(unfinished, folder / "partitions.json")
    return divided


def _with_partitions(table: pa.Table, *, learned: ray.ObjectRef[Partitions], read: ReadRequest) -> pa.Table:
    partitions = ray.get(learned)  # a machine's workers share the arrays
    requests = list(read_rows(table, read))
    readable = [i for i, request in enumerate(requests) if not isinstance(request, str)]
    numbers = [0] * len(requests)
    outlines = [outline_of(request) for request in requests if not isinstance(request, str)]
    for i, number in zip(readable, partitions.assign(outlines), strict=True):
        numbers[i] = number
    return table.append_column(_COLUMN, pa.array(numbers, pa.int32()))


def _sample(dataset: Dataset, read: ReadRequest, size: int, total: int) -> Sequence[Outline]:
    """Return the outlines of the requests with the smallest hashes, which do not depend on how Ray reads the rows."""
    limit = min(int(2**64 * _MORE * size / max(total, 1)), 2**64)
    hashed = dataset.map_batches(
        partial(_outlines_below, read=read, limit=limit), batch_size=_ROWS, batch_format="pyarrow", zero_copy_batch=True
    )
    outlines = [Outline(row["id"], tuple(row["keys"]), tuple(row["tokens"])) for row in hashed.iter_rows()]
    return sorted(outlines)[:size]


def _outlines_below(table: pa.Table, *, read: ReadRequest, limit: int) -> pa.Table:
    outlines = [outline_of(request) for request in read_rows(table, read) if not isinstance(request, str)]
    chosen = [outline for outline in outlines if outline.id < limit]
    return pa.table(
        {
            "id": pa.array([outline.id for outline in chosen], pa.uint64()),
            "keys": pa.array([outline.keys for outline in chosen], pa.list_(pa.uint64())),
            "tokens": pa.array([outline.tokens for outline in chosen], pa.list_(pa.int64())),
        }
    )
