"""What every benchmark needs: a workload, percentiles, a table, and a result file that says where it was made."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import warmprefix

RESULTS = Path(__file__).parent / "results"


def zipf_requests(
    count: int, k: int = 15, topics: int = 400, per_topic: int = 60, seed: int = 0
) -> Iterator[list[int]]:
    """Retrievals of `k` distinct block numbers: four fifths from a Zipf-distributed topic, the rest from anywhere."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, topics + 1)]
    for topic in rng.choices(range(topics), weights, k=count):
        own = rng.sample(range(topic * per_topic, (topic + 1) * per_topic), k - k // 5)
        others: set[int] = set()
        while len(others) < k // 5:
            others.add(rng.randrange(topics * per_topic))
        request = list(dict.fromkeys([*own, *sorted(others)]))
        rng.shuffle(request)
        yield request


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def size(capacity: int | None) -> str:
    """How result files name a cache of so many tokens."""
    return "unbounded" if capacity is None else str(capacity)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for number, row in enumerate(cells):
        line = "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print(line)
        if number == 0:
            print("-" * len(line))


def write_results(name: str, results: Any) -> None:
    """Write `results/NAME.json` with the machine, the versions and the commit; for runs of full length only."""
    RESULTS.mkdir(exist_ok=True)
    document = {"benchmark": name, "environment": environment(), "results": results}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nwritten: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def environment() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "warmprefix": warmprefix.__version__,
        "commit": commit(),
        "command": " ".join(sys.argv),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """What is checked out, and whether the packages differ from it."""
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if git("status", "--porcelain", "--", "core", "integrations") else head or "unknown"


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
