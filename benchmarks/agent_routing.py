"""Documents that recur, shared out over agents in different ways: what is computed, how soon, and by whom.

    python benchmarks/agent_routing.py [TRACE_OR_FOLDER ...] [--only sessions,hot] [--limit N] [--jobs 2] [--no-http]

Without an argument the traces are those of `REPORTED` in the folder that the environment variable WARMPREFIX_TRACES
names, if it does, in addition to the generated workloads: questions on topics, the same with one document in 60 % of
them, single documents, and a control in which nothing recurs.

A discrete-event simulation in virtual time. Each agent is the emulator's engine: its exact KV cache, and its rates, one
prefill after the other. Each document of a request is a prompt of its own (unless the setting differs):
a preamble, the document, the question, what to do. A request is read when the last agent has its first token, and
answered when the last has answered. Every way sees the same requests; of one seed they also come at the same times.
Each seed has other agents' names, so that hashes fall differently.

`agent_http.py` asks emulated engines over HTTP instead, and what they report as cached is compared with the simulation.
A run with all traces, settings and requests is written to `results/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agent_arms import ARMS, MAIN, OURS, RouterArm
from agent_engines import Kill, Run, Sessions, roomy, simulate
from agent_http import measure_http
from agent_workloads import GENERATED, load
from common import percentile, print_table
from result_files import write_results
from traces import given_files

__all__ = ["SETTINGS", "Cell", "cells", "measure", "table", "verdicts"]

REPORTED = ("ragpulse_rag", "multihoprag_partial100_bm25_k20", "qasper80_1024_bm25_k20", "psi_hotpotqa_k5")
CONTROLS = ("generated_control", "psi_hotpotqa_k5")
HOT = ("ragpulse_rag", "generated_topics", "generated_single")
FEWER = 1_000
"""Requests of a trace in the settings that are about something else than its documents."""
BASE = "round robin"
SHOWN = (
    "documents_computed_percent",
    "documents_ratio",
    "read_mean_ms",
    "read_ratio",
    "worst_max_over_mean",
)
"""What is written of a way; the rest is only printed."""
SPREAD = ("hash", "affinity without a bound", OURS)
"""Ways to give out one hot document."""


@dataclass(frozen=True)
class Setting:
    """How a workload is run."""

    agents: tuple[int, ...]
    arms: tuple[str, ...]
    sessions: Sessions = "sessions"
    capacity_tokens: int | None = None
    """Of each agent's cache; None for one that does not get full."""
    base_ttft_ms: float = 20.0
    kill: bool = False
    seeds: int = 1
    limit: int | None = FEWER


SETTINGS = {
    "sessions": Setting((4, 15, 32), MAIN, seeds=3, limit=None),
    "hot": Setting((4, 15, 32), (BASE, *SPREAD), seeds=3),
    "tight": Setting((4, 15), (BASE, "hash", OURS), capacity_tokens=32_000),
    "turns": Setting((15,), (BASE, "hash", OURS), "turns"),
    "backlog": Setting((15,), (BASE, "least loaded", "hash", OURS), "backlog"),
    "light": Setting((4, 15), (BASE, "hash", OURS), base_ttft_ms=2.0),
    "together": Setting((4, 15), (BASE, f"{BASE}, one prompt an agent", f"{OURS}, one prompt an agent")),
    "killed": Setting((15,), (BASE, "hash", OURS), kill=True),
}


@dataclass(frozen=True)
class Cell:
    """Ways side by side: one workload, one setting, one number of agents."""

    source: str
    """A trace file or a generated workload; see `agent_workloads.load`."""
    setting: str
    agents: int
    limit: int | None
    seeds: int


def cells(paths: Sequence[Path], only: Sequence[str], limit: int | None) -> Iterator[Cell]:
    """Yield the runs, the longest first."""
    sources = [*map(str, paths), "generated_topics", "generated_single", "generated_control"]
    for source in sources:
        name = Path(source).name.partition(".")[0]
        for setting in only:
            options = SETTINGS[setting]
            if setting == "hot":
                if name not in HOT:
                    continue
            elif name == "generated_single" or (setting != "sessions" and name in CONTROLS):
                continue
            fewer = min(filter(None, (limit, options.limit)), default=None)
            for agents in options.agents:
                seeds = options.seeds if name in GENERATED else min(options.seeds, 2)
                yield Cell(source + ("+hot" if setting == "hot" else ""), setting, agents, fewer, seeds)


def measure(cell: Cell) -> dict[str, Any]:
    """One row of the results: what each way came to, over all seeds."""
    setting = SETTINGS[cell.setting]
    workload = load(cell.source, cell.limit)
    capacity = setting.capacity_tokens or roomy(workload, cell.agents)
    arms: dict[str, dict[str, Any]] = {}
    base: list[Run] = []
    for name in setting.arms:
        runs: list[Run] = []
        seconds: list[float] = []
        spilled = replicas = 0
        for seed in range(cell.seeds):
            arm = ARMS[name](cell.agents, seed, capacity)
            kill = Kill(cell.agents // 2, len(workload.requests) // 2) if setting.kill else None
            runs.append(
                simulate(workload, arm, capacity, setting.sessions, seed, base_ttft_ms=setting.base_ttft_ms, kill=kill)
            )
            seconds += arm.seconds
            if isinstance(arm, RouterArm):
                spilled, replicas = arm.router.stats().spilled, arm.router.stats().replicas
        base = base or runs
        arms[name] = {**_outcome(runs, base), "decision_us_p50": round(1e6 * percentile(seconds, 50), 1)}
        if name == OURS:
            arms[name].update(spilled=spilled, replicas=replicas)
        if setting.kill:
            arms[name].update(_death(runs[0]))
    return {
        "workload": workload.name,
        "setting": cell.setting,
        "agents": cell.agents,
        "requests": len(workload.requests),
        "documents": workload.documents,
        "recurring_percent": round(100 * workload.recurring, 1),
        "capacity_tokens": capacity,
        "seeds": cell.seeds,
        "arms": arms,
    }


def _outcome(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    pairs = list(zip(runs, base, strict=True))
    fewer = [_computed(other) / _computed(run) for run, other in pairs]
    fewer_documents = [_documents(other) / _documents(run) for run, other in pairs]
    read = [sum(other.reads) / sum(run.reads) for run, other in pairs]
    return {
        "documents_computed_percent": _mean([100 * _documents(run) / run.context_tokens for run in runs], 1),
        "prompts_computed_percent": _mean([100 * _computed(run) / run.prompt_tokens for run in runs], 1),
        "prefix_hit_tokens": round(sum(run.cached_tokens for run in runs) / len(runs)),
        "documents_ratio": _mean(fewer_documents, 2),
        "documents_ratio_range": [round(min(fewer_documents), 2), round(max(fewer_documents), 2)],
        "prefill_ratio": _mean(fewer, 2),
        "prefill_ratio_range": [round(min(fewer), 2), round(max(fewer), 2)],
        "read_mean_ms": _mean([1_000 * sum(run.reads) / len(run.reads) for run in runs], 1),
        "read_p90_ms": _mean([1_000 * percentile(run.reads, 90) for run in runs], 1),
        "read_ratio": _mean(read, 2),
        "read_ratio_range": [round(min(read), 2), round(max(read), 2)],
        "makespan_mean_ms": _mean([1_000 * sum(run.makespans) / len(run.makespans) for run in runs], 1),
        "makespan_p90_ms": _mean([1_000 * percentile(run.makespans, 90) for run in runs], 1),
        "makespan_ratio": _mean([sum(other.makespans) / sum(run.makespans) for run, other in pairs], 2),
        "total_seconds": _mean([run.seconds for run in runs], 1),
        "total_ratio": _mean([other.seconds / run.seconds for run, other in pairs], 2),
        "worst_max_over_mean": round(max(run.worst for run in runs), 3),
        "worst_over_bound": round(max(run.beyond for run in runs), 3),
        "given_max_over_mean": _mean([max(run.given) * len(run.given) / sum(run.given) for run in runs], 2),
        "answered": runs[0].answered,
    }


def _death(run: Run) -> dict[str, Any]:
    moved = sum(run.moved_to.values())
    return {
        "lost_prompts": run.lost,
        "stayed_percent": round(100 * run.kept / run.kept_of, 1),
        "moved_documents": moved,
        "moved_to_agents": len(run.moved_to),
    }


def _documents(run: Run) -> int:
    return run.context_tokens - run.context_cached


def _computed(run: Run) -> int:
    return run.prompt_tokens - run.cached_tokens


def _mean(values: Sequence[float], digits: int) -> float:
    return round(sum(values) / len(values), digits)


def verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """Yield each claim, the smallest measured figure, and True if the claim holds."""
    ours = [(row, row["arms"][OURS]) for row in rows if OURS in row["arms"]]
    recurring = [pair for pair in ours if pair[0]["setting"] == "sessions" and pair[0]["recurring_percent"] > 50]
    control = [pair for pair in ours if pair[0]["setting"] == "sessions" and pair[0]["recurring_percent"] <= 50]
    hot = [pair for pair in ours if pair[0]["setting"] == "hot"]

    def least(claim: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], key: str, wanted: float) -> Any:
        row, arm = min(pairs, key=lambda pair: float(pair[1][key]))
        return claim, f"{arm[key]:.2f} ({row['workload']}, {row['agents']} agents)", arm[key] >= wanted

    if recurring:
        yield least("documents: 1.8 times less prefill than round robin", recurring, "documents_ratio", 1.8)
        yield least("whole prompts: 1.8 times less prefill than round robin", recurring, "prefill_ratio", 1.8)
        yield least("read no later than with round robin", recurring, "read_ratio", 1.0)
    if control:
        yield least("never more prefill where nothing recurs", control, "documents_ratio", 1.0)
        yield least("read no later where nothing recurs", control, "read_ratio", 1.0)
    if hot:
        yield least("one hot document: 1.3 times less prefill", hot, "documents_ratio", 1.3)
    bounded = [pair for pair in ours if pair[0]["setting"] != "killed"]
    row, arm = max(bounded, key=lambda pair: float(pair[1]["worst_over_bound"]))
    found = f"{arm['worst_over_bound']:.3f} times the bound ({row['workload']}, {row['agents']} agents)"
    yield "no load above max(free, (1 + eps) mean)", found, arm["worst_over_bound"] <= 1.0
    for row, arm in ours:
        if row["setting"] == "killed":
            found = f"{arm['answered']} of {row['documents']}, {arm['stayed_percent']} % stayed"
            yield f"an agent killed: all answered ({row['workload']})", found, arm["answered"] == row["documents"]


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    paths = given_files(options.traces)
    if not options.traces:
        paths = [path for path in paths if path.name.partition(".")[0] in REPORTED]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, cells(paths, options.only, options.limit)):
            rows.append(row)
            print_row(row)
    http = [*measure_http(60, 15), *measure_chain(60, 15)] if options.http else []
    for row in http:
        print(json.dumps(row))
    print()
    for claim, found, holds in verdicts(rows):
        print(f"{'holds' if holds else 'FAILS'}  {claim}: {found}")
    print(f"{time.perf_counter() - started:.0f} s in all")
    whole = options.limit is None and options.only == list(SETTINGS) and _complete(http)
    if whole and set(map(_stem, paths)) >= set(REPORTED):
        write_results("agent_routing", {"simulated": [*map(shown, rows)], "http": http})


def measure_chain(count: int, agents: int) -> list[dict[str, Any]]:
    """Those of `agent_chain.py`, where the package that it is about is installed."""
    if find_spec("warmprefix_chain_of_agents") is None:
        print("warmprefix_chain_of_agents is not installed: left out")
        return []
    chain = import_module("agent_chain")
    rows: list[dict[str, Any]] = chain.measure_chain(count, agents)
    return rows


def table(rows: Sequence[dict[str, Any]], agents: int) -> str:
    """Return the table of docs/routing.md: tokens saved by each way, and its highest load over the mean."""
    lines = ["| workload | hash | affinity alone | AgentRouter |", "|---|---|---|---|"]
    for row in rows:
        if (row["setting"], row["agents"]) == ("hot", agents):
            arms = [row["arms"][way] for way in SPREAD]
            cells = [f"{arm['documents_ratio']:.2f} / {arm['worst_max_over_mean']:.2f}" for arm in arms]
            lines.append(f"| {' | '.join([row['workload'].removesuffix(', one hot document'), *cells])} |")
    return "\n".join(lines)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the numbers that pages show."""
    return {**row, "arms": {name: {field: arm[field] for field in SHOWN} for name, arm in row["arms"].items()}}


def _complete(http: Sequence[dict[str, Any]]) -> bool:
    return {row["arm"] for row in http} == {BASE, OURS, "ChainOfAgents"}


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(SETTINGS), help=f"of {', '.join(SETTINGS)}"
    )
    parser.add_argument("--limit", type=int, help="requests of each workload")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--no-http", dest="http", action="store_false", help="simulate only")
    options = parser.parse_args()
    unknown = [name for name in options.only if name not in SETTINGS]
    if unknown:
        parser.error(f"--only takes {', '.join(SETTINGS)}, not {', '.join(unknown)}")
    return options


def print_row(row: dict[str, Any]) -> None:
    print(f"\n{row['workload']}, {row['setting']}, {row['requests']} requests, {row['agents']} agents\n")
    columns = {
        "documents computed, %": "documents_computed_percent",
        "times less": "documents_ratio",
        "prompts": "prefill_ratio",
        "read, ms": "read_mean_ms",
        "p90": "read_p90_ms",
        "ratio": "read_ratio",
        "answered": "makespan_ratio",
        "all": "total_ratio",
        "max / mean": "worst_max_over_mean",
        "µs": "decision_us_p50",
    }
    print_table(["", *columns], [[name, *(arm[key] for key in columns.values())] for name, arm in row["arms"].items()])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
