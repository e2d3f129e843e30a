"""What a planner saves that learns the capacity of its engine's cache, next to planners that are given one.

    python benchmarks/capacity.py [TRACE ...] [--limit N]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, generated ones. The engine is a prefix cache that evicts the least recently used tails; it reports the
cached tokens of each prompt, in whole KV blocks, together with those of a preamble. Hit ratios are of the context, and
of the requests after the first 500.

*auto* is `capacity_tokens="auto"`, *right* the engine's capacity, and *default* the 500,000 from which auto starts.
In the worlds:

- *exact*: the planner's token counts are the engine's.
- *lengths*: each of them is wrong by up to 20 %.
- *foreign*: of the tokens that enter the engine, 30 % belong to prompts that the planner never sees.
- *in flight*: the reports come eight requests late.
- *tenants*: four tenants send the requests in turn and share nothing. *right* gives each the engine's capacity.
- *all*: wrong lengths, foreign tokens, late reports and tenants.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from common import print_table, size
from result_files import write_results
from traces import generated, given_files, reported_k
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.prefix import PrefixTree
from warmprefix.traces import NoRecorder
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

ENGINES = (30_000, 100_000, 300_000, 1_000_000)
DEFAULT = 500_000
SKIPPED = 500
KV_BLOCK = 16
PREAMBLE_TOKENS = 200


class World(NamedTuple):
    """The differences between the engine and what the planner sees of it."""

    name: str
    length_error: float = 0.0
    foreign: float = 0.0
    in_flight: int = 1
    tenants: int = 1


WORLDS = (
    World("exact"),
    World("lengths", length_error=0.2),
    World("foreign", foreign=0.3),
    World("in flight", in_flight=8),
    World("tenants", tenants=4),
    World("all", length_error=0.2, foreign=0.3, in_flight=8, tenants=4),
)


class Outcome(NamedTuple):
    """One run."""

    hit_percent: float
    belief: int | None
    source: str


def main() -> None:
    options = arguments()
    paths = given_files(options.traces)
    read: Iterator[Trace] = (read_trace(path, options.limit) for path in paths)
    workloads = [Workload(trace, reported_k(trace)) for trace in (read if paths else generated())]
    long_enough = [workload for workload in workloads if len(workload.requests) >= 1.5 * SKIPPED]
    cells = [(world, engine) for world in options.worlds for engine in options.engines]
    rows = [row for world, engine in cells for row in measure(long_enough, world, engine)]
    header = ["world", "engine", "trace", "default, %", "auto, %", "right, %", "auto - right", "belief"]
    print_table(header, [[row[name] for name in header] for row in rows])
    if paths and options.limit is None:
        write_results("capacity", [row for row in rows if row["trace"] == "mean" or row["world"] == "exact"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files or folders")
    parser.add_argument("--limit", type=int, help="requests per trace")
    parser.add_argument("--engines", type=sizes, default=ENGINES, help="capacities, with commas between them")
    parser.add_argument("--worlds", type=worlds, default=WORLDS, help="names of worlds, with commas between them")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def worlds(text: str) -> list[World]:
    return [world for world in WORLDS if world.name in text.split(",")]


def measure(workloads: list[Workload], world: World, engine: int) -> Iterator[dict[str, object]]:
    """Yield one row per trace, then the mean."""
    differences: list[list[float]] = []
    for workload in workloads:
        default, auto, right = (serve(workload, given, world, engine) for given in (DEFAULT, "auto", engine))
        differences.append([default.hit_percent, auto.hit_percent, right.hit_percent])
        yield row(world, engine, workload.name, differences[-1], auto.belief or 0)
    means = [fmean(values) for values in zip(*differences, strict=True)]
    yield row(world, engine, "mean", means, "")


def row(world: World, engine: int, name: str, ratios: list[float], belief: object) -> dict[str, object]:
    default, auto, right = ratios
    return {
        "world": world.name,
        "engine": size(engine),
        "trace": name,
        "default, %": round(default, 2),
        "auto, %": round(auto, 2),
        "right, %": round(right, 2),
        "auto - right": round(auto - right, 2),
        "belief": belief,
    }


def serve(workload: Workload, given: object, world: World, engine: int) -> Outcome:
    """Plan, serve and report every request of a trace."""
    chance = random.Random(f"{workload.name} {world.name} {engine}")
    planner = ContextPlanner(capacity_tokens=given, recorder=NoRecorder())  # type: ignore[arg-type]
    cache = PrefixTree[tuple[int, int]](engine, max_nodes=10**9)
    lengths: dict[int, int] = {}
    foreign = count(-1, -1)
    waiting: deque[tuple[ContextPlan, int]] = deque()
    hits = total = 0
    for number, request in enumerate(workload.requests):
        tenant = number % world.tenants
        for key, tokens in zip(request.keys, request.tokens, strict=True):
            if key not in lengths:
                lengths[key] = max(round(tokens * chance.uniform(1 - world.length_error, 1 + world.length_error)), 1)
        blocks = [
            ContextBlock(block.text, id=block.id, tokens=lengths[key])
            for key, block in zip(request.keys, request.blocks, strict=True)
        ]
        plan = planner.plan(blocks, tenant=f"{request.source.scope} {tenant}")
        order = [(tenant, request.keys[i]) for i in plan.order]
        found = cache.insert(order, [request.tokens[i] for i in plan.order]).tokens
        if world.foreign:
            share = world.foreign / (1 - world.foreign)
            cache.insert([(-1, next(foreign))], [round((request.context_tokens - found) * share)])
        cached = (found + PREAMBLE_TOKENS) // KV_BLOCK * KV_BLOCK
        waiting.append((plan, cached))
        while len(waiting) >= world.in_flight:
            ended, report = waiting.popleft()
            planner.commit(ended, cached_tokens=report)
        if number >= SKIPPED:
            hits += found
            total += request.context_tokens
    stats = planner.stats()
    return Outcome(100 * hits / max(total, 1), stats.capacity_tokens, stats.capacity_source)


if __name__ == "__main__":
    main()
