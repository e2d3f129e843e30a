"""`warmprefix plan-batch --ray`: plans files of requests on a Ray cluster."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from warmprefix import BatchRequest, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix.traces import NoRecorder
from warmprefix_openai.outputs import check_writable, standard_output
from warmprefix_ray import DatasetPlan, connect, plan_dataset, request_of_row
from warmprefix_tools.console import report_console, write_json
from warmprefix_tools.plan_batch.plan_batch_options import PlanBatchOptions
from warmprefix_tools.report.amounts import counted

try:
    import ray.data
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

__all__ = ["RequestFileError", "dataset_of_files", "request_of_line", "run_ray_plan"]

_PARTITION_REQUESTS = 50_000

_RANGE_BYTES = 16 * 1024 * 1024
"""Bytes of a file that one task reads."""


class RequestFileError(WarmprefixError):
    """A path has no files of requests."""


def run_ray_plan(options: PlanBatchOptions, folder: Path) -> None:
    """Plan files of requests in partitions, and print what the plan saves.

    Raises:
        OutputError: The file of numbers cannot be written.
        RayClusterError: There is no Ray cluster.
        RequestFileError: There are no files of requests.
    """
    for file in options.files:
        check_writable(file)
    connect(options.ray_address, local=options.ray_local)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = dataset_of_files(options.trace)
    are_lines = "byte" in (dataset.columns() or ())
    started = time.perf_counter()
    plan = plan_dataset(
        dataset,
        folder.resolve(),
        read=request_of_line if are_lines else request_of_row,
        make_planner=partial(_make_planner, options.annotate),
        replicas=options.replicas,
        partition_requests=options.partition_requests or _PARTITION_REQUESTS,
        planner=options.planner,
        capacity_tokens=options.capacity,
        device=options.device,
        time_budget=options.time_budget,
    )
    seconds = time.perf_counter() - started
    with standard_output():
        write_json(options.json_file, _numbers(plan, seconds))
        console = report_console(options.json_file)
        console.print(Text(f"{options.trace}: {counted(plan.requests, 'request')}", style="bold"))
        if plan.unreadable:
            console.print(f"{counted(plan.unreadable, 'row')} without a request")
        console.print(f"gross hit ratio: {plan.hit_ratio:.1%} planned, in {counted(len(plan.partitions), 'partition')}")
        console.print(f"planned in {seconds:,.1f} s; the plans are Parquet files:")
        for file in plan.files:
            console.print(Text(str(file)))


def _make_planner(annotate: Annotate) -> ContextPlanner:
    return ContextPlanner(policy="relevance", recorder=NoRecorder(), annotate=annotate)


def _numbers(plan: DatasetPlan, seconds: float) -> dict[str, Any]:
    return {
        "requests": plan.requests,
        "unreadable": plan.unreadable,
        "saved_tokens": plan.saved_tokens,
        "total_tokens": plan.total_tokens,
        "hit_ratio": round(plan.hit_ratio, 4),
        "seconds": round(seconds, 2),
        "files": [str(file) for file in plan.files],
    }


def dataset_of_files(path: Path) -> ray.data.Dataset:
    """Return the rows of Parquet or JSONL files. JSONL has one row per line, with its place; see `request_of_line`.

    Raises:
        RequestFileError: There are no such files, or of both kinds.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    parquet = [file for file in files if file.suffix == ".parquet"]
    lines = [file for file in files if file.name.removesuffix(".gz").endswith((".jsonl", ".json"))]
    if bool(parquet) == bool(lines) or not all(file.exists() for file in files):
        raise RequestFileError(f"{path}: there must be Parquet files or JSONL files of requests, and not both")
    if parquet:
        return ray.data.read_parquet([str(file) for file in parquet])
    ranges = [some for file in lines for some in _ranges(file)]
    return ray.data.from_items(ranges, override_num_blocks=len(ranges)).flat_map(_lines)


def _ranges(file: Path) -> Sequence[Mapping[str, Any]]:
    name = str(file.resolve())
    if file.suffix == ".gz":  # it can be read from its start only
        return [{"file": name, "start": 0, "end": None}]
    size = file.stat().st_size
    return [
        {"file": name, "start": start, "end": min(start + _RANGE_BYTES, size)} for start in range(0, size, _RANGE_BYTES)
    ]


def _lines(some: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines that begin in a range of a file."""
    rows: list[dict[str, Any]] = []
    with (gzip.open if some["file"].endswith(".gz") else open)(some["file"], "rb") as file:
        place = some["start"]
        if place:
            file.seek(place - 1)
            place += len(file.readline()) - 1  # the rest of a line that begins earlier, or its end
        while some["end"] is None or place < some["end"]:
            line = file.readline()
            if not line:
                break
            if not line.isspace():
                rows.append({"file": some["file"], "byte": place, "line": line})
            place += len(line)
    return rows


def request_of_line(row: Mapping[str, Any]) -> BatchRequest:
    """Return the request of a line of JSON, with the fields of `warmprefix_ray.request_of_row`.

    Raises:
        ValueError: The line has no request; names its file and place.
    """
    try:
        return request_of_row(json.loads(row["line"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{row['file']}, byte {row['byte']}: {type(error).__name__}: {error}") from error
