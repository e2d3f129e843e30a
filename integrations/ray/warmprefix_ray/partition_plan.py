"""The plan of one partition: in pieces that fit into a worker's memory, and as a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from warmprefix.batch import BatchPlan, BatchRequest, PlannedRequest
from warmprefix.blocks import ContextBlock, evidence_blocks
from warmprefix.choice import Choice
from warmprefix.errors import MissingExtraError, check_count
from warmprefix.planner import ContextPlanner
from warmprefix_ray.partitions import outline_of
from warmprefix_ray.rows import ROWS_AT_ONCE, ReadRequest, read_rows, request_of_row

try:
    import numpy as np
    import pyarrow as pa
    import pyarrow.dataset as pds
    import pyarrow.parquet as pq
except ImportError as exc:
    raise MissingExtraError("ray", "pyarrow") from exc

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PLAN_TYPE", "DatasetPlanning", "PartitionNumbers", "PiecePlan", "plan_pieces", "write_plan"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_TOO_LARGE = 1.5
"""How many times the wanted number of requests a partition may have before it is planned in pieces."""

PLAN_TYPE = pa.struct(
    {
        "id": pa.string(),
        "partition": pa.int32(),
        "place": pa.int64(),
        "replica": pa.int32(),
        "order": pa.list_(pa.int32()),
        "saved_tokens": pa.int64(),
        "warmed_by": pa.string(),
        "cache_salt": pa.string(),
        "messages": pa.string(),
        "error": pa.string(),
    }
)
"""The column `plan` of a planned row; see `plan_dataset`."""

Messages = Callable[[PlannedRequest], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class DatasetPlanning:
    """How the requests of a dataset are read, divided and planned.

    Raises:
        TypeError: A number is not an int.
        ValueError: A number is below 1.
    """

    read: ReadRequest = request_of_row
    """Makes a request from a row."""
    make_planner: Callable[[], ContextPlanner] = ContextPlanner
    """Makes the planner of one partition, in a worker."""
    messages: Messages = PlannedRequest.messages
    """Makes the chat for a request."""
    partition_requests: int = 50_000
    """Requests to plan at once; a worker's memory grows with it. A partition that gets over half more is planned in
    pieces."""
    sample: int = 100_000
    """Requests to learn partitions from, in this process, by memory for 100 bytes per block. If the dataset has no
    more, the partitions are cut from a plan of all of it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For `ContextPlanner.plan_batch`."""

    def __post_init__(self) -> None:
        check_count("partition_requests", self.partition_requests)
        check_count("sample", self.sample)

    def digest(self, source: str) -> str:
        """Return eight characters that differ for other rows, numbers and options."""
        text = json.dumps([source, self.partition_requests, sorted(self.options.items())], default=_without_address)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True, slots=True)
class PartitionNumbers:
    """The size of a partition, and what its plan saves. All tokens are of context."""

    partition: int
    requests: int = 0
    unreadable: int = 0
    pieces: int = 0
    """The number of its plans: more than one if the partition is too large."""
    saved_tokens: int = 0
    total_tokens: int = 0
    upper_bound: int = 0
    """The most tokens that any plan of the partition, or of its pieces, could save."""
    first_error: str | None = None
    """The reason of the first row without a request."""

    def with_piece(self, piece: PiecePlan) -> Self:
        """Return the numbers with those of one more piece."""
        plan = piece.plan
        return replace(
            self,
            requests=self.requests + len(plan),
            unreadable=self.unreadable + len(piece.errors),
            pieces=self.pieces + 1,
            saved_tokens=self.saved_tokens + plan.saved_tokens,
            total_tokens=self.total_tokens + plan.total_tokens,
            upper_bound=self.upper_bound + plan.upper_bound,
            first_error=self.first_error or next(iter(piece.errors.values()), None),
        )

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the numbers in a plan's file.

        Raises:
            OSError: There is no such file.
            ValueError: The file is damaged.
        """
        try:
            stored = json.loads(pq.read_metadata(file).metadata[b"warmprefix"])
        except (pa.ArrowException, KeyError) as error:
            raise ValueError(str(error)) from error
        return cls(**{field.name: stored[field.name] for field in fields(cls)})


class PiecePlan(NamedTuple):
    """The plan of a partition's requests, or of some of them if it is too large."""

    table: pa.Table
    """The rows."""
    plan: BatchPlan
    rows: Mapping[str, int]
    """The place of each request's row in the table, by its id."""
    errors: Mapping[int, str]
    """The reasons why rows have no request, by their places in the table."""


def plan_pieces(files: Sequence[Path], planning: DatasetPlanning) -> Iterator[PiecePlan]:
    """Plan a partition. Only one piece is in memory at a time.

    Raises:
        OSError: A file cannot be read.
        pyarrow.ArrowException: A file is damaged.
    """
    if not files:
        return
    rows = pds.dataset([str(file) for file in files], format="parquet")
    pieces = _pieces(rows, planning)
    for piece in range(int(pieces.max(initial=0)) + 1):
        kept: list[pa.RecordBatch] = []
        start = 0
        for batch in rows.to_batches():
            chosen = pieces[start : start + batch.num_rows] == piece
            start += batch.num_rows
            kept.append(batch if chosen.all() else batch.filter(pa.array(chosen)))
        yield _plan_piece(pa.Table.from_batches(kept, rows.schema), planning)


def _pieces(rows: pds.Dataset, planning: DatasetPlanning) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the piece of each row. Requests with the same smallest block are neighbours, so they stay together."""
    count = rows.count_rows()
    if count <= _TOO_LARGE * planning.partition_requests:
        return np.zeros(count, np.int64)
    smallest, ids = array("Q"), array("Q")
    for batch in rows.to_batches():
        for request in read_rows(pa.Table.from_batches([batch]), planning.read):
            outline = None if isinstance(request, str) else outline_of(request)
            smallest.append(0 if outline is None else min(outline.keys, default=0))
            ids.append(0 if outline is None else outline.id)
    ranks = np.empty(count, np.int64)
    ranks[np.lexsort((np.array(ids), np.array(smallest)))] = np.arange(count)
    pieces = -(-count // planning.partition_requests)
    found: np.ndarray[Any, np.dtype[np.int64]] = ranks * pieces // count
    return found


def _plan_piece(table: pa.Table, planning: DatasetPlanning) -> PiecePlan:
    requests: dict[str, BatchRequest] = {}
    rows: dict[str, int] = {}
    errors: dict[int, str] = {}
    blocks: dict[object, ContextBlock] = {}  # equal texts are kept once
    for row, request in enumerate(read_rows(table, planning.read)):
        if isinstance(request, str):
            errors[row] = request
        elif (problem := _problem(request, planning.options.get("choose"))) is not None:
            errors[row] = problem
        elif request.id in requests:
            errors[row] = f"ValueError: another row of the partition has the id {request.id!r} too"
        else:
            rows[request.id] = row
            requests[request.id] = BatchRequest(
                request.id,
                [blocks.setdefault(_identity(block), block) for block in request.blocks],
                request.question,
                tenant=request.tenant,
                order_locked=request.order_locked,
            )
    in_order = [requests[id] for id in sorted(requests)]  # the plan must not depend on how Ray wrote the rows
    return PiecePlan(table, planning.make_planner().plan_batch(in_order, **planning.options), rows, errors)


def _without_address(value: object) -> str:
    """Return how a value is shown, which is the same in all processes, also for a choice with functions."""
    return _ADDRESS.sub("", str(value))


def _problem(request: BatchRequest, choice: Choice | None) -> str | None:
    """Return why nothing can be chosen for a request; None if it can, or need not."""
    try:
        if choice is not None and request.order_locked:
            raise ValueError("choose must be None with order_locked=True")
        if choice is not None:
            blocks, places = evidence_blocks(request.blocks)
            choice.losses([block.score for block in blocks], [place[0] for place in places])
    except ValueError as error:
        return f"ValueError: {error}"
    return None


def _identity(block: ContextBlock) -> object:
    return block.fingerprint, block.id, block.tokens, block.score, block.pinned, block.follows


def write_plan(
    partition: int, replica: int, files: Sequence[Path], target: Path, planning: DatasetPlanning
) -> PartitionNumbers:
    """Plan a partition and write its rows in execution order, with the column `plan`; those without a request are last.

    The file appears when it is complete.
    """
    numbers = PartitionNumbers(partition)
    unfinished = target.with_suffix(".unfinished")
    writer: pq.ParquetWriter | None = None
    for piece in plan_pieces(files, planning):
        if writer is None:
            writer = pq.ParquetWriter(unfinished, piece.table.schema.append(pa.field("plan", PLAN_TYPE)))
        for rows, planned in _planned_rows(piece, numbers, replica, planning.messages):
            writer.write_table(piece.table.take(rows).append_column("plan", pa.array(planned, PLAN_TYPE)))
        numbers = numbers.with_piece(piece)
    if writer is not None:
        writer.add_key_value_metadata({"warmprefix": json.dumps(asdict(numbers))})
        writer.close()
        os.replace(unfinished, target)
    return numbers


def _planned_rows(
    piece: PiecePlan, before: PartitionNumbers, replica: int, messages: Messages
) -> Iterator[tuple[list[int], list[Mapping[str, Any]]]]:
    """Yield places in the table and their plans, some rows at a time."""
    planned = iter(piece.plan)
    place = before.requests
    while some := list(islice(planned, ROWS_AT_ONCE)):
        fields: list[Mapping[str, Any]] = []
        for request in some:
            fields.append(
                {
                    "id": request.id,
                    "partition": before.partition,
                    "place": place,
                    "replica": replica,
                    "order": request.order,
                    "saved_tokens": request.saved_tokens,
                    "warmed_by": request.warmed_by,
                    "cache_salt": request.cache_salt,
                    "messages": json.dumps(list(messages(request))),
                }
            )
            place += 1
        yield [piece.rows[request.id] for request in some], fields
    if piece.errors:
        yield (
            list(piece.errors),
            [{"partition": before.partition, "error": error} for error in piece.errors.values()],
        )
