"""Memory of a planner after 100,000 requests, unbounded and with bounds.

    python benchmarks/memory.py [--requests 100000] [--against FOLDER]

Each line is the resident memory of a fresh process, less that before the first request, for requests of 15 blocks.
*Zipf*: 24,000 blocks under 400 topics. *All new*: every block appears once, the worst case for an unbounded planner.
With `--against`, the packages of another checkout are measured at the same time, as `before_megabytes`.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import CLONE, measured_at_once, print_table, zipf_requests
from result_files import checkout_commit, write_results
from warmprefix import ContextBlock, ContextPlanner

UNBOUNDED: dict[str, Any] = {"capacity_tokens": None, "max_nodes": 10**9, "max_labels": 10**9}
BOUNDS: dict[str, dict[str, Any]] = {
    "unbounded": UNBOUNDED,
    "default bounds": {},
    "16,384 nodes and labels": {"capacity_tokens": None, "max_nodes": 16_384, "max_labels": 16_384},
}
STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout to measure, too")
    parser.add_argument("--measure", nargs=2, metavar=("BOUNDS", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        bounds, workload = arguments.measure
        print(json.dumps(measure(bounds, workload, arguments.requests)))
        return
    results = []
    checkouts = {"megabytes": CLONE} | ({"before_megabytes": arguments.against} if arguments.against else {})
    for bounds in BOUNDS:
        for workload in ("Zipf", "all new"):
            command = [__file__, "--requests", str(arguments.requests), "--measure", bounds, workload]
            results.append({"bounds": bounds, "workload": workload, **measured_at_once(command, checkouts)})
    points = [str(arguments.requests * step // STEPS) for step in range(1, STEPS + 1)]
    print("MB by number of requests\n")
    for name, folder in checkouts.items():
        print(f"{name}, commit {checkout_commit(folder)}")
        print_table(["", *points], [[f"{r['bounds']}, {r['workload']}", *r[name]] for r in results])
        print()
    if arguments.requests == parser.get_default("requests"):
        made = {"against": checkout_commit(arguments.against)} if arguments.against else {}
        write_results("memory", [{**row, "requests": points, "made": made} for row in results])


def measure(bounds: str, workload: str, requests: int) -> list[float]:
    """Return the megabytes at each of `STEPS` points."""
    planner = ContextPlanner(**BOUNDS[bounds])
    before = resident_megabytes()
    measured: list[float] = []
    for number, request in enumerate(all_new(requests) if workload == "all new" else zipf_requests(requests), start=1):
        with planner.planning([ContextBlock(f"block {i}", id=i, tokens=200) for i in request]):
            pass
        if number % (requests // STEPS) == 0:
            gc.collect()
            measured.append(round(resident_megabytes() - before, 1))
    return measured


def all_new(requests: int) -> Iterator[range]:
    return (range(number * 15, number * 15 + 15) for number in range(requests))


def resident_megabytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmRSS in /proc/self/status: this benchmark needs Linux")


if __name__ == "__main__":
    main()
