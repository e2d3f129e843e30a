"""Hit ratios of planned batches, per planner and trace.

    python benchmarks/batch_quality.py [TRACE_OR_FOLDER ...] [--check] [--limit N] [--budget SECONDS]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, three generated ones. Each is planned as one batch, of blocks with the trace's own lengths, by every
planner of warmprefix and by the published `contextpilot` package where that is installed. Each plan is then run through
the same model of a prefix cache (`PrefixTree`: least recently used path first, tails first), in the execution
order that its planner gave, one request after the other. A plan serves for both caches, unless there are requests that
the smaller one cannot hold: then ours are made for each. `k` is the trace's own, 15 at most, unless `REPORTED_K` has
otherwise.

*as it comes*: blocks in relevance order, requests in order of arrival. *relevance*: only the requests are ordered.
*top-down*: the greedy rule of GGR (arXiv 2403.05821), by count times tokens. *merge, 10 s*: with a time budget, to show
what is left to find. *bound*: no plan can save more, as `BatchPlan.upper_bound` has it; its kind stands next to it.
Hit ratios are gross: the plans of merge and the others are made without notes. Net is the prefill saved against *as it
comes*, in % of its prefill; labels and notes count as prefilled unless the cache holds them. For it, the planners of
warmprefix plan with the price of the short note, and the orders of the others are charged with it. In the last columns,
all orders but ours are charged with the published note: a label in front of each block, and a sentence that lists all
labels.

Seconds are those of the whole call, for ours with the bound, labels, and what warms what; for `contextpilot` those of
`reorder()` with one worker. Nothing else runs on a second core.

Then random small batches are solved exactly (`exact.py`), to measure how near to the optimum the planners come.

`--check` ends with status 1 unless merge saves more than contextpilot on every trace in both caches, no less than
`FLOORS`, and within 2 % of the optimum on every small batch. Only a run of whole traces that were given, with
contextpilot, is written to `results/`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from common import print_table, size, zipf_requests
from exact import fewest_prefilled, fewest_prefilled_of_all, small_batches
from result_files import measured_all, write_results
from traces import generated, given_files, reported_k, trace_of
from warmprefix import ContextPlanner
from warmprefix.annotate import Annotate, Templates, has_labels
from warmprefix.batch.plan import BatchPlan, BatchRequest
from warmprefix.batch.planners import BatchPlanner, Placed, Progress, depth_first
from warmprefix.labels import label_candidates
from warmprefix.plan import PlannedBlock
from warmprefix.prefix.tree import PrefixTree
from warmprefix.tokens import CheckedCounter, NoteWriter, as_counter, order_note
from warmprefix_kernels.distinct_sets import split
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace, TraceRequest

CAPACITIES = (None, 30_000)
OURS = "merge"
PEER = "contextpilot"
PLANNERS = ("relevance", "frequency", "context-index", PEER, "top-down", OURS)
AS_IT_COMES = "as it comes"
FIRST = 2_000
CUT = ("ragpulse_rag", "nqopen_records_bm25_k20")
"""Traces of which the first requests are also planned alone, as for the floors."""

FLOORS: Mapping[str, tuple[float, float]] = {
    "psi_multihoprag_summary_k5": (32.6, 32.6),
    "chroma_200_bm25_k20": (38.0, 38.0),
    "qasper80_1024_bm25_k20": (33.1, 33.1),
    "xquad_squad_bm25_k20": (41.3, 41.3),
    "ragpulse_rag, first 2000": (52.4, 52.4),
    "nqopen_records_bm25_k20, first 2000": (34.1, 34.1),
}
"""Published hit ratios in %, in the caches of `CAPACITIES`, of the first version of the merge planner. They have one
decimal place, to which others are rounded before the comparison."""

NET = {
    "net_percent": "net prefill saved in %, with the short note",
    "net_published_percent": f"net prefill saved in %, with the published note, but {OURS} with the short one",
}
"""Titles of net numbers, by their field in a row."""
SHORT_NOTE = NoteWriter(Templates(), "auto", CheckedCounter(as_counter(None), lambda: None))
PUBLISHED_NOTE = replace(SHORT_NOTE, templates=Templates(most_named=None), annotate="both")

SMALL = 500
NEAR = 0.98
"""The least share of the optimum that counts as close."""


class Planned(NamedTuple):
    """A plan by requests' numbers and blocks' keys, and the time of making it."""

    placed: Sequence[Placed]
    seconds: float
    cpu_seconds: float
    batch: BatchPlan | None
    """None for the plan of another package."""


def main() -> None:
    options = arguments()
    paths = given_files(options.traces)
    traces = [read_trace(path, options.limit) for path in paths] if paths else list(generated())
    peer = find_spec(PEER) is not None
    if options.check and not peer:
        sys.exit(f"--check compares with {PEER}, which is not installed")
    planners = [name for name in PLANNERS if name != PEER or peer]
    check_the_solver()
    warm_up()
    rows: list[dict[str, Any]] = []
    for trace, name in with_cuts(traces):
        row = measure(Workload(trace, reported_k(trace)), name, planners, options.budget)
        rows.append(row)
        print(f"{name}: done in {sum(row['seconds'].values()):.0f} s", file=sys.stderr)
    shown = [AS_IT_COMES, *planners, budgeted(options.budget)]
    for capacity in CAPACITIES:
        print_rows(rows, shown, capacity)
    for field, title in NET.items():
        for capacity in CAPACITIES:
            print_net(rows, planners, capacity, field, title)
    print_seconds(rows, shown)
    small = measure_small(planners)
    print_small(small)
    whole = paths and peer and options.limit is None and options.budget == 10
    if whole and measured_all("batch_quality_traces", "trace", rows):
        write_results("batch_quality", {"traces": rows, "small_batches": small})
    if options.check:
        below = [*chain.from_iterable(map(falls_short, rows)), *small_falls_short(small)]
        print("\n".join([f"\n{OURS} falls short:", *below]) if below else f"\n{OURS} falls short nowhere.")
        sys.exit(1 if below else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--limit", type=int, help="requests of each trace")
    parser.add_argument("--budget", type=float, default=10, help="seconds that merge may search on in its last column")
    parser.add_argument("--check", action="store_true", help="status 1 if merge falls short")
    return parser.parse_args()


def budgeted(seconds: float) -> str:
    return f"{OURS}, {seconds:g} s"


def with_cuts(traces: Sequence[Trace]) -> list[tuple[Trace, str]]:
    """Return the traces with their names, and again the first requests of some."""
    found: list[tuple[Trace, str]] = []
    for trace in traces:
        found.append((trace, trace.name))
        if trace.name in CUT and len(trace.requests) > FIRST:
            found.append((replace(trace, requests=trace.requests[:FIRST]), f"{trace.name}, first {FIRST}"))
    return found


# -- traces ------------------------------------------------------------------------------------------------------------


def measure(workload: Workload, name: str, planners: Sequence[str], budget: float) -> dict[str, Any]:
    """Return all hit ratios of one batch, in %, and the times of planning it."""
    as_it_comes = Planned([Placed(i, request.keys) for i, request in enumerate(workload.requests)], 0.0, 0.0, None)
    plans = {AS_IT_COMES: dict.fromkeys(CAPACITIES, as_it_comes)}
    plans |= {planner: plans_for(workload, planner) for planner in planners}
    plans[budgeted(budget)] = plans_for(workload, OURS, budget)
    total = max(sum(request.context_tokens for request in workload.requests), 1)
    ratios = {
        planner: {
            size(capacity): round(100 * saved(workload, plan, capacity) / total, 2) for capacity, plan in of.items()
        }
        for planner, of in plans.items()
    }
    ours = plans[OURS][None].batch
    assert ours is not None
    noted = {planner: plans_for(workload, planner, annotate="auto") for planner in planners}
    today = {capacity: total - saved(workload, as_it_comes, capacity) for capacity in CAPACITIES}

    def net(planner: str, capacity: int | None, writer: NoteWriter) -> float:
        prefilled = net_prefilled(workload, noted[planner][capacity], capacity, writer)
        return round(100 * (1 - prefilled / max(today[capacity], 1)), 2)

    writers = {
        "net_percent": dict.fromkeys(planners, SHORT_NOTE),
        "net_published_percent": {**dict.fromkeys(planners, PUBLISHED_NOTE), OURS: SHORT_NOTE},
    }
    return {
        "trace": name,
        "requests": len(workload.requests),
        "k": workload.k,
        "hit_percent": ratios,
        **{
            field: {
                planner: {size(capacity): net(planner, capacity, writer) for capacity in CAPACITIES}
                for planner, writer in of.items()
            }
            for field, of in writers.items()
        },
        "bound_percent": round(100 * ours.upper_bound / total, 2),
        "bound": ours.bound,
        "seconds": {planner: round(of[None].seconds, 3) for planner, of in plans.items()},
        "cpu_seconds": {planner: round(of[None].cpu_seconds, 3) for planner, of in plans.items()},
    }


def plans_for(
    workload: Workload, planner: str, budget: float | None = None, annotate: Annotate = "none"
) -> dict[int | None, Planned]:
    """Return a plan per cache size; one plan serves all that hold the longest request, or ignore the size."""
    unbounded = made(workload, planner, None, budget, annotate)
    longest = max((request.context_tokens for request in workload.requests), default=0)
    return {
        capacity: unbounded
        if capacity is None or longest <= capacity or planner == PEER
        else made(workload, planner, capacity, budget, annotate)
        for capacity in CAPACITIES
    }


def made(
    workload: Workload,
    planner: str,
    capacity: int | None = None,
    budget: float | None = None,
    annotate: Annotate = "none",
) -> Planned:
    if planner == PEER:
        return contextpilot(workload)
    chosen: str | BatchPlanner = TopDown() if planner == "top-down" else planner
    requests = [
        BatchRequest(i, request.blocks, tenant=request.source.scope) for i, request in enumerate(workload.requests)
    ]
    started, cpu_started = time.perf_counter(), cpu_seconds_used()
    batch = ContextPlanner(annotate=annotate).plan_batch(requests, chosen, capacity_tokens=capacity, time_budget=budget)
    seconds, cpu_seconds = time.perf_counter() - started, cpu_seconds_used() - cpu_started
    keys = [request.keys for request in workload.requests]
    placed = [Placed(int(r.id), tuple([keys[int(r.id)][position] for position in r.order])) for r in batch]
    return Planned(placed, seconds, cpu_seconds, batch)


class TopDown:
    """A planner that sets apart the contexts of the most valuable block, repeatedly."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        orders: list[tuple[int, ...]] = [()] * len(contexts)
        prefixes: list[tuple[int, ...]] = []
        for group in split(contexts, tokens, 0):  # parents come before their groups
            before = prefixes[group.parent] if group.parent >= 0 else ()
            prefixes.append((*before, *[block for block in group.blocks if block not in before]))
            for x in group.rest:
                orders[x] = (*prefixes[-1], *[block for block in contexts[x] if block not in prefixes[-1]])
        return [Placed(x, orders[x]) for x in depth_first(orders)]


def contextpilot(workload: Workload) -> Planned:
    """Plan with ContextPilot, without its prints; empty contexts come last.

    The package does not accept empty contexts.
    """
    import contextpilot as package  # type: ignore[import-not-found,unused-ignore]

    numbers = [i for i, request in enumerate(workload.requests) if request.keys]
    contexts = [list(workload.requests[i].keys) for i in numbers]
    started, cpu_started = time.perf_counter(), cpu_seconds_used()
    with contextlib.redirect_stdout(io.StringIO()):
        pilot = package.ContextPilot(use_gpu=False)
        pilot.num_workers = 1
        orders, schedule = pilot.reorder(contexts)
    seconds, cpu_seconds = time.perf_counter() - started, cpu_seconds_used() - cpu_started
    # In a first batch, orders[j] belongs to the context at schedule[j]; `saved` checks this.
    placed = [Placed(numbers[at], tuple(order)) for order, at in zip(orders, schedule, strict=True)]
    placed += [Placed(i, ()) for i, request in enumerate(workload.requests) if not request.keys]
    return Planned(placed, seconds, cpu_seconds, None)


def saved(workload: Workload, planned: Planned, capacity: int | None) -> int:
    """Return the tokens that a cache finds of a plan, which must be complete."""
    requests = workload.requests
    if sorted([i for i, _ in planned.placed]) != list(range(len(requests))):
        raise ValueError(f"{workload.name}: not every request once")
    lengths = {key: tokens for request in requests for key, tokens in zip(request.keys, request.tokens, strict=True)}
    tree = PrefixTree[int](capacity, 2 * len(requests) + 1)
    found = 0
    for i, order in planned.placed:
        if sorted(order) != sorted(requests[i].keys):
            raise ValueError(f"{workload.name}: not the blocks of request {i}")
        found += tree.insert(order, [lengths[key] for key in order]).tokens
    batch = planned.batch
    if batch is not None and batch.capacity_tokens == capacity and batch.saved_tokens != found:
        raise ValueError(f"{workload.name}: the plan promises {batch.saved_tokens} tokens, {found} are found")
    return found


def net_prefilled(workload: Workload, planned: Planned, capacity: int | None, writer: NoteWriter) -> int:
    """Return the tokens that are prefilled of a plan, labels and notes included."""
    annotation = writer.choose(None, None)
    lengths: dict[int, int] = {}
    blocks: dict[int, PlannedBlock] = {}
    for request in workload.requests:
        for key, block in zip(request.keys, request.blocks, strict=True):
            if key not in blocks:
                label = next(label_candidates(block))
                blocks[key] = PlannedBlock(block, (0,), label, None, writer.templates)
                lengths[key] = block.tokens
                if has_labels(annotation):
                    lengths[key] += writer.tokens("labels", [blocks[key]])
    tree = PrefixTree[int](capacity, 2 * len(workload.requests) + 1)
    prefilled = 0
    for i, order in planned.placed:
        ranks = [workload.requests[i].keys.index(key) for key in order]
        labels, texts = [blocks[key].label for key in order], [blocks[key].block.text for key in order]
        note = order_note(writer.templates, annotation, ranks, labels, texts)
        prefilled += 0 if note is None else writer.count(note)
        prefilled += sum([lengths[key] for key in order]) - tree.insert(order, [lengths[key] for key in order]).tokens
    return prefilled


def cpu_seconds_used() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def warm_up() -> None:
    """Load the compiled loops, or compile them."""
    trace = trace_of("warm-up", zipf_requests(2_000, k=10, topics=50, per_topic=40))
    made(Workload(trace), OURS)


# -- small batches -----------------------------------------------------------------------------------------------------


def measure_small(planners: Sequence[str]) -> dict[str, Any]:
    """Return each planner's share of the possible saving, and the batches on which ours is not near it."""
    shares: dict[str, list[float]] = {planner: [] for planner in planners}
    misses: list[dict[str, Any]] = []
    for contexts, tokens in small_batches(SMALL):
        workload = Workload(small_trace(contexts, tokens))
        most = sum(tokens[block] for context in contexts for block in context) - fewest_prefilled(contexts, tokens)
        for planner in planners:
            found = saved(workload, made(workload, planner), None)
            if found > most:
                raise ValueError(
                    f"{planner} saves {found} tokens of {contexts}, {tokens}, more than the optimum, {most}"
                )
            if most:
                shares[planner].append(found / most)
            if planner == OURS and found < NEAR * most:
                misses.append({"requests": contexts, "tokens": tokens, "saved": found, "optimum": most})
    return {
        "batches": SMALL,
        "with_something_to_save": len(shares[OURS]),
        "share_of_optimum": {
            planner: {
                "mean": round(statistics.fmean(found), 5),
                "worst": round(min(found), 5),
                "within_2_percent": sum(share >= NEAR for share in found),
                "exact": sum(share == 1 for share in found),
            }
            for planner, found in shares.items()
        },
        "misses": misses,
    }


def small_trace(contexts: Sequence[Sequence[int]], tokens: Sequence[int]) -> Trace:
    return Trace(
        "small batch",
        tuple(TraceRequest(i, tuple(blocks)) for i, blocks in enumerate(contexts)),
        dict(enumerate(tokens)),
    )


def check_the_solver() -> None:
    """Compare the solver with all orders of all requests, on tiny batches."""
    for contexts, tokens in small_batches(200, requests=4, blocks=3, seed=1):
        found, least = fewest_prefilled(contexts, tokens), fewest_prefilled_of_all(contexts, tokens)
        if found != least:
            raise ValueError(f"exact.py finds {found} tokens to prefill of {contexts}, {tokens}; {least} will do")


# -- reports -----------------------------------------------------------------------------------------------------------


def falls_short(row: Mapping[str, Any]) -> list[str]:
    ratios, found = row["hit_percent"], list[str]()
    for number, capacity in enumerate(CAPACITIES):
        merge, peer = ratios[OURS][size(capacity)], ratios[PEER][size(capacity)]
        if merge <= peer and row["bound_percent"] > 0:
            found.append(f"  {row['trace']}, {size(capacity)}: {merge} %, {PEER} {peer} %")
        if row["trace"] in FLOORS and round(merge, 1) < FLOORS[row["trace"]][number]:
            found.append(
                f"  {row['trace']}, {size(capacity)}: {merge} %, the floor is {FLOORS[row['trace']][number]} %"
            )
    return found


def small_falls_short(small: Mapping[str, Any]) -> list[str]:
    return [f"  small batch: {miss['saved']} of {miss['optimum']} tokens" for miss in small["misses"]]


def print_rows(rows: Sequence[Mapping[str, Any]], planners: Sequence[str], capacity: int | None) -> None:
    print(f"\nhit ratio in %, cache {'without bound' if capacity is None else f'of {capacity:,} tokens'}\n")
    number = CAPACITIES.index(capacity)
    lines: list[list[object]] = []
    for row in rows:
        ratios = row["hit_percent"]
        floor = FLOORS[row["trace"]][number] if row["trace"] in FLOORS else ""
        bound = (f"{row['bound_percent']:.2f}", row["bound"])
        cells = [f"{ratios[planner][size(capacity)]:.2f}" for planner in planners]
        lines.append([f"{row['trace']} ({row['requests']}, {row['k']})", *cells, floor, *bound])
    print_table(["trace (requests, k)", *planners, "floor", "bound", ""], lines)


def print_net(
    rows: Sequence[Mapping[str, Any]], planners: Sequence[str], capacity: int | None, field: str, title: str
) -> None:
    print(f"\n{title}, cache {'without bound' if capacity is None else f'of {capacity:,} tokens'}\n")
    lines: list[list[object]] = [
        [row["trace"], *[f"{row[field][planner][size(capacity)]:.2f}" for planner in planners]] for row in rows
    ]
    print_table(["trace", *planners], lines)


def print_seconds(rows: Sequence[Mapping[str, Any]], planners: Sequence[str]) -> None:
    print("\nplanning seconds\n")
    shown = [planner for planner in planners if planner != AS_IT_COMES]
    print_table(
        ["trace", *shown], [[row["trace"], *[f"{row['seconds'][planner]:.2f}" for planner in shown]] for row in rows]
    )
    if PEER not in planners:
        print(f"\n{PEER} is not installed, so its column is missing.")


def print_small(small: Mapping[str, Any]) -> None:
    count = small["with_something_to_save"]
    print(f"\nshare of the optimum, {small['batches']} small batches, in {count} of which something can be saved\n")
    lines = [
        [planner, f"{found['mean']:.2%}", f"{found['worst']:.2%}", found["within_2_percent"], found["exact"]]
        for planner, found in small["share_of_optimum"].items()
    ]
    print_table(["", "mean", "worst", "within 2 %", "optimal"], lines)
    for miss in small["misses"]:
        print(f"{OURS} saves {miss['saved']} of {miss['optimum']}: {miss['requests']}, tokens {miss['tokens']}")


if __name__ == "__main__":
    main()
