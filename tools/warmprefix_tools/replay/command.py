"""`warmprefix replay`: runs traces through policies and caches at the console."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from warmprefix.errors import MissingExtraError
from warmprefix.outputs import check_writable, standard_output, text_file
from warmprefix.traces import Trace
from warmprefix_tools.replay.arrange import Arranged
from warmprefix_tools.replay.engine import Replay
from warmprefix_tools.replay.export import as_json, order_line
from warmprefix_tools.replay.options import STDOUT, ReplayOptions
from warmprefix_tools.replay.page import replay_page
from warmprefix_tools.replay.results import Estimates, ReplayResult
from warmprefix_tools.replay.table import print_conversations, print_results
from warmprefix_tools.replay.workload import Request, Workload
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.visible import visible
from warmprefix_tools.traces.reader import read_trace

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_replay"]

_PLAIN_WIDTH = 200
_SHOWN_EVERY = 200

Write = Callable[[str], object]


def run_replay(options: ReplayOptions) -> None:
    """Run and report; write the files that are asked for.

    Raises:
        TraceError: A file is no trace. All are read before the first is run.
        OutputError: A file can't be written.
    """
    for file in options.outputs:
        check_writable(file)
    traces = _read(options.traces, options.limit)
    console = Console(stderr=options.json_file == STDOUT, highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    estimates = Estimates(options.prefill_rate, options.price, options.cached_price or 0.0)
    with ExitStack() as stack:
        write = None if options.orders_file is None else stack.enter_context(text_file(options.orders_file))
        results = _run(traces, options, write)
    numbers = "" if options.json_file is None else json.dumps(as_json(results, estimates), indent=1, allow_nan=False)
    if options.json_file is not None and options.json_file != STDOUT:
        _write(options.json_file, f"{numbers}\n")
    if options.html_file is not None:
        _write(options.html_file, replay_page(results, estimates))
    with standard_output():
        if options.json_file == STDOUT:
            print(numbers)  # noqa: T201
        print_results(results, estimates, console)
        if options.placement == "head":
            print_conversations(traces, console)


def _read(paths: Sequence[Path], limit: int | None) -> list[Trace]:
    """The traces; one whose name another has too is called by its path."""
    traces = [read_trace(path, limit) for path in paths]
    names = Counter(trace.name for trace in traces)
    return [
        trace if names[trace.name] == 1 else replace(trace, name=str(path))
        for trace, path in zip(traces, paths, strict=True)
    ]


def _run(traces: Sequence[Trace], options: ReplayOptions, write: Write | None) -> list[ReplayResult]:
    """Every trace through every cache and policy, with a progress bar where somebody watches."""
    console = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("{task.description:<44}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    runs = len(options.capacities) * len(options.policies)
    results: list[ReplayResult] = []
    if not console.is_terminal:
        console.print(f"Replaying {counted(len(traces), 'trace')}, {counted(runs, 'run')} each ...")
    with progress if console.is_terminal else nullcontext():
        task = progress.add_task("", total=runs * sum(len(trace.requests) for trace in traces))
        for trace in traces:
            replay = Replay(Workload(trace, options.k), options.placement, options.answer_tokens)
            for capacity in options.capacities:
                for policy in options.policies:
                    progress.update(task, description=f"{visible(trace.name)[:30]} {policy}")
                    observe = _Observer(trace.name, policy, capacity, write, partial(progress.advance, task))
                    results.append(replay.run(policy, capacity, observe=observe))
                    observe.finish()
    return results


class _Observer:
    """Moves the progress bar now and then, and writes the orders if they are wanted."""

    def __init__(
        self,
        trace: str,
        policy: str,
        capacity_tokens: int | None,
        write: Write | None,
        advance: Callable[[int], None],
    ) -> None:
        self._of = (trace, policy, capacity_tokens)
        self._write = write
        self._advance = advance
        self._served = 0

    def __call__(self, request: Request, arranged: Arranged) -> None:
        self._served += 1
        if self._served == _SHOWN_EVERY:
            self.finish()
        if self._write is not None:
            self._write(order_line(*self._of, request, arranged))

    def finish(self) -> None:
        self._advance(self._served)
        self._served = 0


def _write(path: Path, text: str) -> None:
    with text_file(path) as write:
        write(text)
