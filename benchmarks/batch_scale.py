"""Time and memory of planning a batch, from 1,000 requests to 200,000.

    python benchmarks/batch_scale.py [--quick] [--check]

Requests of 15 blocks of 50 to 400 tokens, seeded, from three generators. *clustered*: 12 blocks from one topic of 60
blocks and 3 from anywhere; the number of topics gives about 250 requests to each. *zipf*: by a Zipf law (exponent 1)
over as many blocks as a fifth of the requests. *topics*: four fifths from one of 400 topics of 60 blocks, by a Zipf law
over topics, the rest from anywhere.

The time is that of the whole `ContextPlanner().plan_batch(requests, "merge")`: with the upper bound, the run through
the model of the cache, and labels. Each line is measured in a process of its own, on one core. *first*: seconds of its
first call, which also loads the code that numba compiled earlier. *seconds*: the median of three calls, if the first
took less than five seconds; *CPU*: the same in CPU seconds. Stages are those of the fastest call. *peak*: most resident
memory of the process by the end of the first call, including the requests.

*walked*: entries of the blocks' lists of requests that were read in merging and moving, which is the number of
overlapping pairs that were compared, with repetitions. *pairs*: the number of such pairs, each pair of requests once
per shared block.

`--check` ends with status 1 if merge takes longer than `TARGETS` allow, or more than 2 GiB. `--quick` measures
the smallest batches only; a run of all is written to `results/`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from common import print_table, zipf_requests
from result_files import write_results

K = 15
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
QUICK_SIZES = (1_000, 2_000)
TARGETS: Mapping[int, float] = {2_000: 1.0, 10_000: 5.0, 100_000: 30.0}
"""Most seconds, by number of requests."""
MOST_MEGABYTES = 2_048.0
RUNS = 3
SHORT = 5.0
"""Seconds below which a call is repeated."""
GIVE_UP = 600
STAGES = ("preparing", "merging", "moving", "replanting", "laying out", "bound", "the rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest batches only")
    parser.add_argument("--check", action="store_true", help="status 1 if a target is missed")
    parser.add_argument("--measure", nargs=2, metavar=("GENERATOR", "REQUESTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        generator, requests = options.measure
        print(json.dumps(merge(generator, int(requests))))
        return
    measured("clustered", max(QUICK_SIZES))  # compiles the loops if needed
    sizes = QUICK_SIZES if options.quick else SIZES
    rows = [measured(generator, count) for generator in GENERATORS for count in sizes]
    print_rows(rows)
    print_stages(rows)
    if not options.quick:
        write_results("batch_scale", rows)
    if options.check:
        missed = [line for row in rows for line in misses(row)]
        print("\n".join(["\ntargets missed:", *missed]) if missed else "\nno target missed.")
        sys.exit(1 if missed else 0)


# -- requests ----------------------------------------------------------------------------------------------------------


def clustered(count: int, seed: int = 0) -> Iterator[list[int]]:
    rng = random.Random(seed)
    topics = max(count // 250, 1)
    for _ in range(count):
        topic = rng.randrange(topics)
        chosen = dict.fromkeys(rng.sample(range(60 * topic, 60 * topic + 60), 12))
        while len(chosen) < K:
            chosen[rng.randrange(60 * topics)] = None
        request = list(chosen)
        rng.shuffle(request)
        yield request


def zipf(count: int, seed: int = 0) -> Iterator[list[int]]:
    rng = random.Random(seed)
    blocks = range(max(count // 5, 2 * K))
    weights = list(accumulate(1 / (block + 1) for block in blocks))
    for _ in range(count):
        chosen: dict[int, None] = {}
        while len(chosen) < K:
            chosen.update(dict.fromkeys(rng.choices(blocks, cum_weights=weights, k=K - len(chosen))))
        yield list(chosen)


GENERATORS: Mapping[str, Callable[[int], Iterator[list[int]]]] = {
    "clustered": clustered,
    "zipf": zipf,
    "topics": zipf_requests,
}


def lengths(contexts: Sequence[Sequence[int]], seed: int = 1) -> list[int]:
    """Return the tokens of every block, by number."""
    rng = random.Random(seed)
    return [rng.randint(50, 400) for _ in range(1 + max(map(max, contexts)))]


# -- one measurement, in a process of its own --------------------------------------------------------------------------


class Call(NamedTuple):
    """The time of one call."""

    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    walked: int


def merge(generator: str, count: int) -> dict[str, Any]:
    from warmprefix_kernels.distinct_sets import DistinctSets

    contexts = list(GENERATORS[generator](count))
    tokens = lengths(contexts)
    row, calls = planned(contexts, tokens)
    batch = DistinctSets(contexts, tokens)
    fastest = min(calls, key=lambda call: call.seconds)
    return {
        **row,
        "stages": {stage: round(seconds, 3) for stage, seconds in fastest.stages.items()},
        "walked": fastest.walked,
        "all_pairs": (batch.work - batch.entries) // 2,
        "cpu_seconds_a_million_walked": round(1e6 * row["cpu_seconds"] / max(fastest.walked, 1), 4),
    }


def planned(contexts: Sequence[Sequence[int]], tokens: Sequence[int]) -> tuple[dict[str, Any], list[Call]]:
    """Plan several times; return the times, and the quality of the plan."""
    from warmprefix import ContextBlock, ContextPlanner
    from warmprefix.batch.plan import BatchRequest

    blocks = [ContextBlock(f"block {i}", id=i, tokens=length) for i, length in enumerate(tokens)]
    requests = [BatchRequest(i, [blocks[block] for block in context]) for i, context in enumerate(contexts)]
    calls: list[Call] = []
    row: dict[str, Any] = {}
    while not calls or (len(calls) < RUNS and calls[0].seconds < SHORT):
        watch = Watch()
        started, cpu_started = time.perf_counter(), cpu_seconds_used()
        plan = ContextPlanner().plan_batch(requests, "merge", progress=watch.progress)
        seconds, cpu_seconds = time.perf_counter() - started, cpu_seconds_used() - cpu_started
        calls.append(Call(seconds, cpu_seconds, watch.stages(started, started + seconds), watch.walked()))
        if len(calls) == 1:
            row = {
                "hit_percent": round(100 * plan.hit_ratio, 2),
                "bound_percent": round(100 * plan.upper_bound / plan.total_tokens, 2),
                "bound": plan.bound,
                "peak_megabytes": peak_megabytes(),
            }
        del plan
    times = {
        "seconds": round(statistics.median(call.seconds for call in calls), 3),
        "cpu_seconds": round(statistics.median(call.cpu_seconds for call in calls), 3),
        "first_seconds": round(calls[0].seconds, 3),
        "first_cpu_seconds": round(calls[0].cpu_seconds, 3),
        "calls": len(calls),
    }
    return {**times, **row}, calls


class Watch:
    """An observer of the stages of planning, and of the entries walked.

    Not all of these stages are reported. So functions of the planner are replaced by some that call
    them and note the time, and the working space of the loops, where they count what they walk, is remembered.
    """

    def __init__(self) -> None:
        from warmprefix.batch import bounds, merge, planners, scope_plan
        from warmprefix_kernels import machine

        self._began: list[tuple[str, float]] = []
        self._rooms: list[Any] = []

        def room_for(*arguments: Any) -> Any:
            self._rooms.append(machine.room_for(*arguments))
            return self._rooms[-1]

        def laid_out(*arguments: Any) -> Any:
            self._begin("laying out")
            return planners.laid_out(*arguments)

        def upper_bound(*arguments: Any, **named: Any) -> Any:
            self._begin("bound")
            bound = bounds.upper_bound(*arguments, **named)
            self._begin("the rest")
            return bound

        merge.__dict__.update(room_for=room_for, laid_out=laid_out)
        scope_plan.__dict__.update(upper_bound=upper_bound)

    def progress(self, stage: str, done: int, total: int) -> None:
        self._begin(stage)

    def _begin(self, stage: str) -> None:
        if not self._began or self._began[-1][0] != stage:
            self._began.append((stage, time.perf_counter()))

    def stages(self, started: float, ended: float) -> dict[str, float]:
        """Return the seconds of each stage."""
        began = [("preparing", started), *self._began, ("", ended)]
        seconds: dict[str, float] = {}
        for (stage, begin), (_, end) in pairwise(began):
            seconds[stage] = seconds.get(stage, 0.0) + end - begin
        return seconds

    def walked(self) -> int:
        return sum(int(room.walked[0]) for room in self._rooms)


def cpu_seconds_used() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def peak_megabytes() -> float:
    """Return the peak memory of this process alone."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


def measured(generator: str, count: int) -> dict[str, Any]:
    print(f"{generator}, {count:,}", file=sys.stderr)
    command = [sys.executable, __file__, "--measure", generator, str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=GIVE_UP)
    return {"generator": generator, "requests": count, **json.loads(done.stdout)}


# -- reports -----------------------------------------------------------------------------------------------------------


def misses(row: Mapping[str, Any]) -> list[str]:
    name = f"  {row['generator']}, {row['requests']:,}"
    most = TARGETS.get(row["requests"], math.inf)
    found: list[str] = []
    if row["seconds"] > most:
        found.append(f"{name}: {row['seconds']} s, {most} s allowed")
    if row["peak_megabytes"] > MOST_MEGABYTES:
        found.append(f"{name}: {row['peak_megabytes']} MB, {MOST_MEGABYTES} MB allowed")
    return found


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    header = ["merge", "requests", "seconds", "CPU", "first", "allowed", "peak MB", "hit %", "bound %", ""]
    lines = [
        [
            row["generator"],
            f"{row['requests']:,}",
            *[f"{row[name]:.2f}" for name in ("seconds", "cpu_seconds", "first_seconds")],
            TARGETS.get(row["requests"], ""),
            *[row[name] for name in ("peak_megabytes", "hit_percent", "bound_percent", "bound")],
        ]
        for row in rows
    ]
    print_table(header, lines)


def print_stages(rows: Sequence[Mapping[str, Any]]) -> None:
    print("\nseconds of each stage, in the fastest call; millions of entries walked, and CPU seconds for each\n")
    lines = [
        [
            row["generator"],
            f"{row['requests']:,}",
            *[f"{row['stages'].get(stage, 0):.2f}" for stage in STAGES],
            f"{row['walked'] / 1e6:,.1f}",
            f"{row['all_pairs'] / 1e6:,.1f}",
            row["cpu_seconds_a_million_walked"],
        ]
        for row in rows
    ]
    print_table(["merge", "requests", *STAGES, "M walked", "M pairs", "s per M"], lines)


if __name__ == "__main__":
    main()
