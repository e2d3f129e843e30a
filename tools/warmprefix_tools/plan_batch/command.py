"""`warmprefix plan-batch`: plans a trace as one batch at the console."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext

from warmprefix.batch.plan import BatchPlan, BatchRequest
from warmprefix.errors import MissingExtraError
from warmprefix.outputs import check_writable, standard_output, text_file
from warmprefix.planner import ContextPlanner
from warmprefix.traces.base import NoRecorder
from warmprefix_tools.plan_batch.errors import PlanBatchError
from warmprefix_tools.plan_batch.export import as_json, order_lines
from warmprefix_tools.plan_batch.options import PlanBatchOptions
from warmprefix_tools.plan_batch.table import print_plan
from warmprefix_tools.plan_batch.workload import as_batch, saved_as_they_came
from warmprefix_tools.replay.options import STDOUT
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.traces.reader import read_trace

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_plan_batch"]

_PLAIN_WIDTH = 200


def run_plan_batch(options: PlanBatchOptions) -> None:
    """Plan and report; write the files that are asked for.

    Raises:
        MissingExtraError: The planner or the device needs what is not installed.
        OutputError: A file can't be written.
        PlanBatchError: The planner or the device is not up to this trace, or to this machine.
        TraceError: The file is no trace.
    """
    for file in options.outputs:
        check_writable(file)
    trace = read_trace(options.trace, options.limit)
    requests = as_batch(trace, options.k)
    saved_before = saved_as_they_came(requests, options.capacity_tokens)
    plan = _plan(requests, options)
    numbers = "" if options.json_file is None else json.dumps(as_json(plan, trace.name), indent=1, allow_nan=False)
    if options.orders_file is not None:
        with text_file(options.orders_file) as write:
            for line in order_lines(plan, trace):
                write(line)
    if options.json_file is not None and options.json_file != STDOUT:
        with text_file(options.json_file) as write:
            write(f"{numbers}\n")
    console = Console(stderr=options.json_file == STDOUT, highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    with standard_output():
        if options.json_file == STDOUT:
            print(numbers)  # noqa: T201
        print_plan(plan, trace.name, saved_before, console)


def _plan(requests: Sequence[BatchRequest], options: PlanBatchOptions) -> BatchPlan:
    """The plan, with a progress bar where somebody watches."""
    console = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("{task.description:<12}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    if not console.is_terminal:
        console.print(f"Planning {counted(len(requests), 'request')} ...")
    with progress if console.is_terminal else nullcontext():
        task = progress.add_task("planning", total=None)
        try:
            return ContextPlanner(policy="relevance", recorder=NoRecorder()).plan_batch(
                requests,
                options.planner,
                capacity_tokens=options.capacity_tokens,
                time_budget=options.time_budget,
                device=options.device,
                progress=lambda stage, done, total: progress.update(
                    task, description=stage, completed=done, total=total
                ),
            )
        except ValueError as error:  # such as too many requests for the planner, or no such device here
            raise PlanBatchError(f"Cannot plan {options.trace}: {error}.") from error
