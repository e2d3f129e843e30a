"""Documents that recur, shared out over agents in different ways: what is computed, how soon, and by whom.

    python benchmarks/agent_routing.py [TRACE_OR_FOLDER ...] [--limit N] [--jobs 2]

Without an argument the traces are those of `REPORTED` in the folder that the environment variable WARMPREFIX_TRACES
names, if it does, in addition to the generated workloads: questions on topics, the same with one document in 60 % of
them, single documents, and a control in which nothing recurs.

A discrete-event simulation in virtual time. Each agent is the emulator's engine: its exact KV cache, and its rates, one
prefill after the other. Each document of a request is a prompt of its own: a preamble, the document, the question, what
to do. A request is read when the last agent has its first token. Every way sees the same requests; of one seed they
also come at the same times. Each seed has other agents' names, so that hashes fall differently. A run with all traces
and requests is written to `results/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agent_arms import ARMS, OURS
from agent_engines import Run, roomy, simulate
from agent_workloads import GENERATED, load
from common import print_table
from result_files import Row, write_results
from traces import given_files

__all__ = ["Cell", "cells", "measure", "table"]

REPORTED = ("ragpulse_rag", "multihoprag_partial100_bm25_k20", "qasper80_1024_bm25_k20", "psi_hotpotqa_k5")
HOT = ("ragpulse_rag", "generated_topics", "generated_single")
"""Workloads that are also measured with one hot document."""
FEWER = 1_000
"""Requests of a trace with a hot document."""
AGENTS = (4, 15, 32)
BASE = "round robin"
SPREAD = ("hash", "affinity without a bound", OURS)
"""Ways to give out one hot document."""


@dataclass(frozen=True)
class Cell:
    """Ways side by side: one workload and one number of agents."""

    source: str
    """A trace file or a generated workload; see `agent_workloads.load`."""
    agents: int
    limit: int | None
    seeds: int

    @property
    def is_hot(self) -> bool:
        return self.source.endswith("+hot")


def cells(paths: Sequence[Path], limit: int | None) -> Iterator[Cell]:
    for source in [*map(str, paths), "generated_topics", "generated_single", "generated_control"]:
        name = _stem(Path(source))
        seeds = 3 if name in GENERATED else 2
        for agents in AGENTS:
            if name != "generated_single":
                yield Cell(source, agents, limit, seeds)
            if name in HOT:
                yield Cell(f"{source}+hot", agents, min(limit or FEWER, FEWER), seeds)


def measure(cell: Cell) -> dict[str, Any]:
    """Return what each way came to, over all seeds."""
    workload = load(cell.source, cell.limit)
    capacity = roomy(workload, cell.agents)
    runs: dict[str, list[Run]] = {}
    for name in (BASE, *SPREAD) if cell.is_hot else (BASE, "hash", OURS):
        runs[name] = [
            simulate(workload, ARMS[name](cell.agents, seed, capacity), capacity, seed) for seed in range(cell.seeds)
        ]
    return {
        "workload": workload.name,
        "setting": "hot" if cell.is_hot else "sessions",
        "agents": cell.agents,
        "requests": len(workload.requests),
        "documents": workload.documents,
        "recurring_percent": round(100 * workload.recurring, 1),
        "seeds": cell.seeds,
        "arms": {name: _outcome(own, runs[BASE]) for name, own in runs.items()},
    }


def _outcome(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, float]:
    pairs = list(zip(runs, base, strict=True))
    return {
        "documents_computed_percent": _mean([100 * _computed(run) / run.context_tokens for run in runs], 1),
        "documents_ratio": _mean([_computed(other) / _computed(run) for run, other in pairs], 2),
        "read_mean_ms": _mean([1_000 * sum(run.reads) / len(run.reads) for run in runs], 1),
        "read_ratio": _mean([sum(other.reads) / sum(run.reads) for run, other in pairs], 2),
        "worst_max_over_mean": round(max(run.worst for run in runs), 3),
    }


def _computed(run: Run) -> int:
    return run.context_tokens - run.context_cached


def _mean(values: Sequence[float], digits: int) -> float:
    return round(sum(values) / len(values), digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--limit", type=int, help="requests of each workload")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    paths = given_files(options.traces)
    if not options.traces:
        paths = [path for path in paths if _stem(path) in REPORTED]
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, cells(paths, options.limit)):
            rows.append(row)
            print(f"\n{row['workload']}, {row['requests']} requests, {row['agents']} agents\n")
            print_table(
                ["", "documents computed, %", "times less", "read, ms", "times sooner", "max / mean"],
                [[name, *arm.values()] for name, arm in row["arms"].items()],
            )
            sys.stdout.flush()
    if options.limit is None and set(map(_stem, paths)) >= set(REPORTED):
        write_results("agent_routing", rows)


def table(rows: Sequence[Row], agents: int) -> str:
    """Return the table of docs/routing.md: tokens saved by each way, and its highest load over the mean."""
    lines = ["| workload | hash | affinity alone | AgentRouter |", "|---|---|---|---|"]
    for row in rows:
        if (row["setting"], row["agents"]) == ("hot", agents):
            arms = [row["arms"][way] for way in SPREAD]
            cells = [f"{arm['documents_ratio']:.2f} / {arm['worst_max_over_mean']:.2f}" for arm in arms]
            lines.append(f"| {' | '.join([row['workload'].removesuffix(', one hot document'), *cells])} |")
    return "\n".join(lines)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


if __name__ == "__main__":
    main()
