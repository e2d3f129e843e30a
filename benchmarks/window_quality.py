"""Hit ratios of planned windows against requests planned one by one.

    python benchmarks/window_quality.py [TRACE_OR_FOLDER ...] [--check] [--windows 2,8,64] [--caches 30000,unbounded]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, three generated ones. A trace is cut into windows of consecutive requests. *one by one*: each request is
planned with `ContextPlanner.plan` and committed before the next one comes. *window*: each window is planned with
`plan_batch` with `"window"`, and its requests are committed in execution order before the next window comes. The same
model of a prefix cache counts the hits of both (`PrefixTree`: least recently used path first, tails first). The planner
has the size of this cache as `capacity_tokens`, starts empty, and counts no notes. `k` is the trace's own, 15 at most,
unless `REPORTED_K` has otherwise.

`--check` ends with status 1 if windows save less than one by one anywhere, by more than `TOLERANCE` points. Only a run
with all windows and caches is written to `results/`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from common import print_table, size
from result_files import write_rows
from traces import generated, given_files, reported_k
from warmprefix import ContextPlanner
from warmprefix.batch.plan import BatchRequest
from warmprefix.plan import ContextPlan
from warmprefix.prefix.tree import PrefixTree
from warmprefix_tools.replay.workload import ReplayRequest, Workload
from warmprefix_tools.traces.reader import read_trace

WINDOWS = (2, 4, 8, 16, 32, 64, 200)
CAPACITIES = (30_000, 100_000, None)
TOLERANCE = 0.1
"""Points of hit ratio. On the shortest traces, one request more or less is as much."""


def main() -> None:
    options = arguments()
    paths = given_files(options.traces)
    traces = [read_trace(path, None) for path in paths] if paths else list(generated())
    rows: list[dict[str, Any]] = []
    for trace in traces:
        workload = Workload(trace, reported_k(trace))
        rows += [measure(workload, capacity, options.windows) for capacity in options.caches]
        print(f"{trace.name}: done", file=sys.stderr)
    for capacity in options.caches:
        print_rows([row for row in rows if row["cache"] == size(capacity)], options.windows)
    if options.windows == list(WINDOWS) and options.caches == list(CAPACITIES):
        write_rows("window_quality", rows, ("trace", "cache"))
    below = [line for row in rows for line in falls_short(row)]
    if options.check:
        name = f"below one by one by more than {TOLERANCE} points"
        print("\n".join([f"\n{name}:", *below]) if below else f"\nNo window is {name}.")
        sys.exit(1 if below else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--windows", type=numbers(int), default=list(WINDOWS), help="with commas between them")
    parser.add_argument("--caches", type=numbers(capacity_of), default=list(CAPACITIES), help="tokens, or unbounded")
    parser.add_argument("--check", action="store_true", help="status 1 if a window is below one by one")
    return parser.parse_args()


def numbers(each: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [each(part) for part in text.split(",")]


def capacity_of(text: str) -> int | None:
    return None if text == "unbounded" else int(text)


def measure(workload: Workload, capacity: int | None, windows: Sequence[int]) -> dict[str, Any]:
    """Return the hit ratios of one trace in one cache, in %."""
    total = sum(request.context_tokens for request in workload.requests)
    ratios: dict[str, float] = {}
    planner = ContextPlanner(capacity_tokens=capacity)
    one_by_one = 100 * found(one_at_a_time(planner, workload.requests), capacity) / total
    for window in windows:
        planner = ContextPlanner(capacity_tokens=capacity)
        served = in_windows(planner, workload.requests, window)
        ratios[str(window)] = round(100 * found(served, capacity) / total, 2)
    return {
        "trace": workload.name,
        "requests": len(workload.requests),
        "k": workload.k,
        "cache": size(capacity),
        "one_by_one_percent": round(one_by_one, 2),
        "window_percent": ratios,
    }


Served = Iterator[tuple[ReplayRequest, ContextPlan]]
"""Requests in execution order, each with its plan."""


def one_at_a_time(planner: ContextPlanner, requests: Sequence[ReplayRequest]) -> Served:
    for request in requests:
        plan = planner.plan(request.blocks, tenant=request.source.scope)
        planner.commit(plan)
        yield request, plan


def in_windows(planner: ContextPlanner, requests: Iterable[ReplayRequest], window: int) -> Served:
    coming = iter(requests)
    while waiting := list(islice(coming, window)):
        batch = planner.plan_batch(
            [BatchRequest(i, request.blocks, tenant=request.source.scope) for i, request in enumerate(waiting)],
            "window",
        )
        for planned in batch:
            planner.commit(planned.plan)
            yield waiting[int(planned.id)], planned.plan


def found(served: Served, capacity: int | None) -> int:
    """Return the tokens that a cache finds; every plan must be complete."""
    cache = PrefixTree[int](capacity, 1_000_000)
    tokens = 0
    for request, plan in served:
        key_of = {block.fingerprint: key for block, key in zip(request.blocks, request.keys, strict=True)}
        order = [key_of[planned.block.fingerprint] for planned in plan.blocks]
        if sorted(order) != sorted(request.keys):
            raise ValueError(f"not the blocks of request {request.source}")
        tokens += cache.insert(order, [planned.block.tokens for planned in plan.blocks]).tokens
    return tokens


def falls_short(row: dict[str, Any]) -> list[str]:
    alone = row["one_by_one_percent"]
    return [
        f"  {row['trace']}, {row['cache']}, windows of {window}: {ratio} %, one by one {alone} %"
        for window, ratio in row["window_percent"].items()
        if ratio < alone - TOLERANCE
    ]


def print_rows(rows: Sequence[dict[str, Any]], windows: Sequence[int]) -> None:
    print(f"\nhit ratio in %, and what windows add to it in points; cache: {rows[0]['cache']}\n")
    lines: list[list[str]] = []
    for row in rows:
        gains = [row["window_percent"][str(window)] - row["one_by_one_percent"] for window in windows]
        lines.append([row["trace"], f"{row['one_by_one_percent']:.2f}", *[f"{gain:+.2f}" for gain in gains]])
    gains_of = [[row["window_percent"][str(window)] - row["one_by_one_percent"] for row in rows] for window in windows]
    mean = statistics.fmean(row["one_by_one_percent"] for row in rows)
    lines.append(["mean", f"{mean:.2f}", *[f"{statistics.fmean(gains):+.2f}" for gains in gains_of]])
    lines.append(["worst", "", *[f"{min(gains):+.2f}" for gains in gains_of]])
    print_table(["trace", "one by one", *map(str, windows)], lines)


if __name__ == "__main__":
    main()
