"""What every benchmark needs: a workload, percentiles, a table, and a result file that names its machine."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import warmprefix

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]


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


def write_results(name: str, results: Any) -> None:
    """Write `results/NAME.json` with the machine, the versions and the commit.

    For complete runs that measured everything in the file: it replaces all earlier results. A script that may lack a
    part (a framework, a server, a trace) calls `write_rows`.
    """
    _write(RESULTS / f"{name}.json", {"benchmark": name, "environment": environment(), "results": results})


def write_rows(
    name: str,
    results: Sequence[Row] | Mapping[str, Sequence[Row]],
    identity: Sequence[str],
    *,
    path: Path | None = None,
) -> None:
    """Write measured rows into `results/NAME.json`, each with its environment.

    All other rows stay unchanged.

    Args:
        name: The name of the benchmark.
        results: Rows, or several lists of them by name.
        identity: The fields that identify a row. New rows replace all earlier rows with the same values in them.
        path: Another file to write.
    """
    path = RESULTS / f"{name}.json" if path is None else path
    if not (any(results.values()) if isinstance(results, Mapping) else results):
        print(f"\nnothing was measured: {path.name} stays as it is")
        return
    document = json.loads(path.read_text()) if path.exists() else {}
    earlier = document.get("results", {} if isinstance(results, Mapping) else [])
    made_then, made_now = document.get("environment"), environment()
    merged: Any
    if isinstance(results, Mapping):
        parts = dict.fromkeys([*earlier, *results])
        merged = {
            part: _merged(earlier.get(part, []), results.get(part, []), identity, made_then, made_now) for part in parts
        }
    else:
        merged = _merged(earlier, results, identity, made_then, made_now)
    _write(path, {"benchmark": name, "results": merged})


def _merged(
    earlier: Sequence[Row], measured: Sequence[Row], identity: Sequence[str], made_then: object, made_now: Row
) -> list[Row]:
    places: dict[tuple[object, ...], list[Row]] = {}
    for row in earlier:
        # Files of the older format have one environment for all rows without a commit of their own.
        stamped = row if "made" in row or "commit" in row else {**row, "made": made_then}
        places.setdefault(_named(row, identity), []).append(stamped)
    new: dict[tuple[object, ...], list[Row]] = {}
    for row in measured:
        new.setdefault(_named(row, identity), []).append({**row, "made": {**made_now, **row.get("made", {})}})
    return [row for rows in (places | new).values() for row in rows]


def _named(row: Row, identity: Sequence[str]) -> tuple[object, ...]:
    return tuple(row.get(field) for field in identity)


def measured_all(name: str, part: str, field: str, measured: Iterable[Row]) -> bool:
    """Return True if these rows have all values of a field in `results/NAME.json`.

    If they lack some, it reports that: a file that is written whole must not lose what was not measured.
    """
    path = RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text())["results"][part] if path.exists() else []
    lacking = sorted({row[field] for row in earlier} - {row[field] for row in measured})
    if lacking:
        print(f"\n{path.name} stays as it is: not measured were {', '.join(lacking)}")
    return not lacking


def _write(path: Path, document: object) -> None:
    path.parent.mkdir(exist_ok=True)
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
        "command": " ".join([Path(each).name if Path(each).is_absolute() else each for each in sys.argv]),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """Return the checked-out commit, marked if the packages differ from it."""
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if git("status", "--porcelain", "--", "core", "integrations") else head or "unknown"


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
