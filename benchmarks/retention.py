"""What retention and look-ahead save in bounded caches, next to the default before them and to published orders.

    python benchmarks/retention.py [TRACE_OR_FOLDER ...] [--caches 100000,30000] [--limit 1000] [--base COMMIT]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, those that any clone can make. `k` is the trace's own, 15 at most, unless `REPORTED_K` has otherwise.
The prefix cache is that of `warmprefix replay`, which shares no code with the planner's mirror of it. Touches are
charged: 18 tokens each, and what the cache had lost of their paths.

- *base*: the planner before retention: the packages of `--base`, from this repository's history, in their own process.
- *default*: the planner of this checkout, which sends no touches.
- *touches*: an LRU engine, and one token over paths that are about to be evicted and expected back.
- *priorities*: an engine that evicts the lowest priority first, and the same touches with priorities.
- *8 waiting*: with the next 8 requests announced, in their order of arrival.
- *oracle*, *CacheWeaver*, *ContextPilot*, *CRAFT*: published orders, as `warmprefix_baselines` has them.

*hit*: the share of context tokens found in the cache. *net*: the share of the prefill of the application without
warmprefix that is spared, less notes and touches. A run with given traces and the default limit
and base is written to `results/`; the means are those of all rows there.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import print_table, size
from result_files import read_rows, write_results, write_rows
from traces import from_a_clone, given_files, reported_k
from warmprefix_tools.replay.arrange import KeepBy
from warmprefix_tools.replay.replay_options import parse_capacities
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

BASE = "b08ec2948974cf0498f9344c4260bbe1c66540c7"
"""The last commit without retention."""
LIMIT = 1_000
WAITING = 8
ROOT = Path(__file__).parents[1]
KIND = ("trace", "cache", "arm")


class Arm(NamedTuple):
    """How requests are ordered, and what the engine is asked to keep."""

    retention: KeepBy = "none"
    waiting: int = 0
    policy: str = "coaccess"


ARMS = {
    "default": Arm(),
    "touches": Arm("touches"),
    "priorities": Arm("priorities"),
    "8 waiting": Arm(waiting=WAITING),
    "touches, 8 waiting": Arm("touches", WAITING),
    "priorities, 8 waiting": Arm("priorities", WAITING),
    "oracle": Arm(policy="oracle"),
    "CacheWeaver": Arm(policy="greedy"),
    "ContextPilot": Arm(policy="context-index"),
    "CRAFT": Arm(policy="frequency"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE_OR_FOLDER", type=Path)
    parser.add_argument("--caches", default="100000,30000")
    parser.add_argument("--arms", default=",".join(["base", *(name.replace(", ", "+") for name in ARMS)]))
    parser.add_argument("--limit", type=int, default=LIMIT, help="requests of each trace")
    parser.add_argument("--base", default=BASE, help="commit of the planner before")
    options = parser.parse_args()
    arms = [name.replace("+", ", ") for name in options.arms.split(",")]
    if unknown := set(arms) - {"base", *ARMS}:
        parser.error(f"--arms takes base, {', '.join(ARMS)} with + for a comma and a space; got {', '.join(unknown)}")
    paths = given_files(options.traces)
    traces: list[tuple[Path | None, Trace]] = [(path, read_trace(path, options.limit)) for path in paths]
    traces = traces or [(None, trace) for trace in from_a_clone()]
    capacities = parse_capacities(options.caches)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = unpack(options.base, Path(folder)) if "base" in arms and paths else None
        for path, trace in traces:
            if base is not None and path is not None:
                rows += base_rows(base, path, trace, options)
            rows += measured(trace, [arm for arm in arms if arm != "base"], capacities, options.limit)
            print(f"{trace.name}: done", file=sys.stderr)
    for capacity in capacities:
        report([row for row in rows if row["cache"] == size(capacity)])
    if paths and options.limit == LIMIT and options.base == BASE:
        write_rows("retention", rows, KIND)
        write_results("retention_means", [*means(read_rows("retention"))])


def measured(
    trace: Trace, arms: Sequence[str], capacities: Sequence[int | None], limit: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cache and arm of this checkout."""
    workload = Workload(trace, reported_k(trace))
    for name in arms:
        arm = ARMS[name]
        replay = Replay(workload, waiting=arm.waiting, retention=arm.retention)
        for capacity in capacities:
            result = replay.run(arm.policy, capacity)
            yield {
                "trace": trace.name,
                "requests": result.requests,
                "cache": size(capacity),
                "arm": name,
                "hit_percent": round(100 * result.hit_ratio, 2),
                "net_percent": round(-100 * result.prefill_change, 2),
                "touches_per_request": round(result.touches / max(result.requests, 1), 3),
            }


# -- the planner before ------------------------------------------------------------------------------------------------


def unpack(commit: str, folder: Path) -> str:
    """Unpack the packages of a commit; return where Python finds them."""
    command = ["git", "-C", str(ROOT), "archive", commit, "core", "tools", "integrations"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return os.pathsep.join(map(str, [folder / "core", folder / "tools", *sorted((folder / "integrations").iterdir())]))


def base_rows(packages: str, path: Path, trace: Trace, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of `warmprefix replay` with these packages."""
    code = "from warmprefix_tools.cli import app; app()"
    arguments = ["--policies", "coaccess", "--capacity-tokens", options.caches, "--limit", str(options.limit)]
    command = [sys.executable, "-c", code, "replay", str(path), *arguments, "-k", str(reported_k(trace)), "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": packages}
    answer = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    for result in json.loads(answer)["results"]:
        capacity = result["capacity_tokens"]
        yield {
            "trace": trace.name,
            "requests": result["requests"],
            "cache": size(None if capacity == "unbounded" else capacity),
            "arm": "base",
            "hit_percent": round(100 * result["hit_ratio"], 2),
            "net_percent": round(-100 * result["prefill_change"], 2),
            "touches_per_request": 0.0,
        }


# -- tables ------------------------------------------------------------------------------------------------------------


def means(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the mean over traces of each cache and arm, and the least gain over the base and over the oracle."""
    by_kind = {tuple(row[name] for name in KIND): row for row in rows}
    for cache, arm in dict.fromkeys((row["cache"], row["arm"]) for row in rows):
        own = [row for row in rows if (row["cache"], row["arm"]) == (cache, arm)]
        line: dict[str, Any] = {"cache": cache, "arm": arm, "traces": len(own)}
        for field in ("hit_percent", "net_percent"):
            line[field] = round(statistics.fmean(row[field] for row in own), 2)
            for other in ("base", "oracle"):
                pairs = [(row[field], by_kind.get((row["trace"], cache, other), {}).get(field)) for row in own]
                gains = [ours - theirs for ours, theirs in pairs if theirs is not None]
                if gains:
                    line[f"{field.removesuffix('_percent')}_over_{other}"] = round(statistics.fmean(gains), 2)
                    line[f"least_{field.removesuffix('_percent')}_over_{other}"] = round(min(gains), 2)
        yield line


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print each trace of one cache, and the means."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    print(f"\ncache {rows[0]['cache']}: hit % (net %)\n")
    lines: list[list[object]] = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        own = {row["arm"]: row for row in rows if row["trace"] == trace}
        lines.append([trace, *(f"{own[arm]['hit_percent']:.1f} ({own[arm]['net_percent']:+.1f})" for arm in arms)])
    summary = [*means(rows)]
    lines.append(["mean", *(f"{line['hit_percent']:.2f} ({line['net_percent']:+.2f})" for line in summary)])
    for title, field in (("hits over base", "hit_over_base"), ("net over base", "net_over_base")):
        cells = [(line.get(field), line.get(f"least_{field}")) for line in summary]
        lines.append(
            [f"{title}, least", *("" if gain is None else f"{gain:+.2f}, {least:+.2f}" for gain, least in cells)]
        )
    print_table(["trace", *arms], lines)


if __name__ == "__main__":
    main()
