"""Memory of a planner after 100,000 requests, unbounded and with bounds.

    python benchmarks/memory.py [--requests 100000]

Each line is the resident memory of a fresh process, less that before the first request, for requests of 15 blocks.
*Zipf*: 24,000 blocks under 400 topics. *All new*: every block appears once, the worst case for an unbounded planner.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import print_table, zipf_requests
from result_files import write_results
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
    parser.add_argument("--measure", nargs=2, metavar=("BOUNDS", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        bounds, workload = arguments.measure
        print(json.dumps(measure(bounds, workload, arguments.requests)))
        return
    results = []
    for bounds in BOUNDS:
        for workload in ("Zipf", "all new"):
            command = [sys.executable, __file__, "--requests", str(arguments.requests), "--measure", bounds, workload]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append({"bounds": bounds, "workload": workload, "megabytes": json.loads(done.stdout)})
    points = [str(arguments.requests * step // STEPS) for step in range(1, STEPS + 1)]
    print("MB by number of requests\n")
    print_table(["", *points], [[f"{r['bounds']}, {r['workload']}", *r["megabytes"]] for r in results])
    if arguments.requests == parser.get_default("requests"):
        write_results("memory", [{**row, "requests": points} for row in results])


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
