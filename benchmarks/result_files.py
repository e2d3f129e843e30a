"""Result files: one CSV file per table of measured rows, in `results/`, and where each row was measured.

A cell is a text, or a number, list, true, false or null as in JSON; a text that looks like one of these, or
cannot be printed, stands in double quotes. `a:b` is the field b of the mapping a. An empty cell means that the row
lacks the field. The column `run` names a row of `runs.csv`: the machine, the versions, the commit and the command.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import warmprefix

__all__ = [
    "RESULTS",
    "Row",
    "checkout_commit",
    "commit",
    "measured_all",
    "processor",
    "read_rows",
    "write_results",
    "write_rows",
]

RESULTS = Path(__file__).parent / "results"
RUNS = "runs"
Row = Mapping[str, Any]


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of `results/NAME.csv`, without the column `run`; none if there is no such file.

    If `results/NAME` is a folder, its files are those of `warmprefix quality report --publish`: one row per arm.
    """
    if (RESULTS / name).is_dir():
        reports = [json.loads(file.read_text("utf-8")) for file in sorted((RESULTS / name).glob("*.json"))]
        return [{**report, "arms": len(report["arms"]), **arm} for report in reports for arm in report["arms"]]
    return [{field: value for field, value in row.items() if field != "run"} for row in _read(name)]


def write_results(name: str, results: Sequence[Row] | Row) -> None:
    """Write rows to `results/NAME.csv`, or each table or single row of a mapping to `results/NAME_PART.csv`.

    For complete runs that measured everything in the file: it replaces all earlier results. A script that may lack a
    part (a framework, a server, a trace) calls `write_rows`.
    """
    parts = results if isinstance(results, Mapping) else {"": results}
    for part, measured in parts.items():
        rows = [measured] if isinstance(measured, Mapping) else measured
        _write("_".join(filter(None, (name, part))), _stamped(rows))
    _drop_unnamed_runs()


def write_rows(name: str, results: Sequence[Row], identity: Sequence[str]) -> None:
    """Write measured rows to `results/NAME.csv`, in place of those with the same values in the fields `identity`.

    All other rows stay unchanged.
    """
    if not results:
        print(f"\nnothing was measured: {name}.csv stays as it is")
        return
    rows: dict[tuple[object, ...], list[Row]] = {}
    for row in _read(name):
        rows.setdefault(_named(row, identity), []).append(row)
    new: dict[tuple[object, ...], list[Row]] = {}
    for measured in _stamped(results):
        new.setdefault(_named(measured, identity), []).append(measured)
    _write(name, [row for each in (rows | new).values() for row in each])
    _drop_unnamed_runs()


def measured_all(name: str, field: str, measured: Iterable[Row]) -> bool:
    """Return True if these rows have all values of a field in `results/NAME.csv`.

    If they lack some, it reports that: a file that is written whole must not lose what was not measured.
    """
    lacking = sorted({row[field] for row in _read(name)} - {row[field] for row in measured})
    if lacking:
        print(f"\n{name}.csv stays as it is: not measured were {', '.join(lacking)}")
    return not lacking


def _named(row: Row, identity: Sequence[str]) -> tuple[object, ...]:
    return tuple(row.get(field) for field in identity)


# -- cells -------------------------------------------------------------------------------------------------------------


def _read(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [_nested({field: _value(cell) for field, cell in row.items() if cell}) for row in csv.DictReader(file)]


def _write(name: str, rows: Sequence[Row]) -> None:
    flat = [dict(_flat(row)) for row in rows]
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(field for row in flat for field in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows({field: _cell(value) for field, value in row.items()} for row in flat)
    if name != RUNS:
        print(f"\nwritten: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{field}:")
        else:
            yield f"{prefix}{field}", value


def _nested(row: Row) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in row.items():
        *outer, field = name.split(":")
        inner = nested
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[field] = value
    return nested


def _cell(value: object) -> str:
    if isinstance(value, str):
        return (
            value if value and value.isprintable() and _value(value) is value else json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value, ensure_ascii=False)


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


# -- where a row was measured ------------------------------------------------------------------------------------------


def _stamped(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the name of this run, which is added to the file of runs.

    A row may have more to say of it, under `made`.
    """
    runs = {row["run"]: row for row in _read(RUNS)}
    stamped: list[Row] = []
    for row in rows:
        run = {**environment(), **row.get("made", {})}
        name = f"r{blake2b(json.dumps(run, sort_keys=True).encode(), digest_size=3).hexdigest()}"
        runs[name] = {"run": name, **run}
        stamped.append({**{field: value for field, value in row.items() if field != "made"}, "run": name})
    _write(RUNS, list(runs.values()))
    return stamped


def _drop_unnamed_runs() -> None:
    files = {path.stem for path in RESULTS.glob("*.csv")} - {RUNS}
    named = {row["run"] for name in files for row in _read(name)}
    _write(RUNS, [row for row in _read(RUNS) if row["run"] in named])


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
    return checkout_commit(Path(__file__).parent.parent)


def checkout_commit(folder: Path) -> str:
    """Return the commit of a checkout, marked if the packages differ from it."""
    head = git("rev-parse", "--short=12", "HEAD", folder=folder)
    changed = git("status", "--porcelain", "--", "core", "integrations", folder=folder)
    return f"{head}-dirty" if changed else head or "unknown"


def git(*arguments: str, folder: Path = Path(__file__).parent.parent) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
