"""What every benchmark needs: a workload, percentiles and a table."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CLONE = Path(__file__).parents[1]


def zipf_requests(
    count: int, k: int = 15, topics: int = 400, per_topic: int = 60, seed: int = 0
) -> Iterator[list[int]]:
    """Yield retrievals of `k` distinct block numbers: four fifths from a Zipf-distributed topic."""
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


def measured_at_once(command: Sequence[str], checkouts: Mapping[str, Path]) -> dict[str, Any]:
    """Run a script of this folder with the packages of each checkout, all at the same time; return what each printed.

    So all of them run under the same load. The script prints JSON.
    """
    running = {}
    for name, folder in checkouts.items():
        packages = os.pathsep.join(str(folder / each) for each in ("core", "kernels"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])}
        running[name] = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
    printed = {name: process.communicate()[0] for name, process in running.items()}
    for process in running.values():
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return {name: json.loads(text) for name, text in printed.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def size(capacity: int | None) -> str:
    """Return the name of a cache of `capacity` tokens in result files."""
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
