"""Prefill of conversations whose history keeps the context, in all and by request.

    python benchmarks/conversation_net.py TRACE_OR_FOLDER ... [--limit 1000] [--caches 100000,unbounded]

Traces without conversations of several turns are left out. Each arm is a `ContextPlanner` with placement `"tail"`. Its
mirror has the size of the cache. It is compared with the application without warmprefix: relevance order, nothing
de-duplicated, nothing written. Labels, notes and references are counted by the planner's estimate.

- *labels*: each block has a label, and references name labels.
- *default*: no labels; references quote the first words of blocks, where that pays.

*net*: the share of the prefill that is spared. *above*: the share of requests that prefill more than without
warmprefix. *worst*: the largest excess of a request.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import print_table, size
from result_files import write_rows
from traces import files, reported_k
from warmprefix.annotate import Annotate
from warmprefix_tools.replay.replay_options import parse_capacities
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace

ARMS: dict[str, Annotate] = {"labels": "both", "default": "auto"}
KIND = ("trace", "cache", "arm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE_OR_FOLDER", type=Path)
    parser.add_argument("--limit", type=int, default=1_000)
    parser.add_argument("--caches", default="100000,unbounded")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for path in files(options.traces):
        trace = read_trace(path, None)
        trace = replace(trace, requests=trace.requests[: options.limit])
        if not trace.conversations:
            continue
        for name, annotate in ARMS.items():
            replay = Replay(Workload(trace, reported_k(trace)), "tail", annotate=annotate)
            for capacity in parse_capacities(options.caches):
                result = replay.run("coaccess", capacity)
                rows.append(
                    {
                        "trace": trace.name,
                        "cache": size(capacity),
                        "arm": name,
                        "requests": result.requests,
                        "net_percent": round(-100 * result.prefill_change, 2),
                        "above_percent": round(100 * result.lost_requests / result.requests, 1),
                        "worst_percent": round(100 * result.worst_request_change, 2),
                        "written_percent": round(100 * result.prefilled_note_tokens / result.net_prefilled_tokens, 1),
                    }
                )
    print_table(
        ("trace", "cache", "arm", "net", "above", "worst"),
        [
            (row["trace"], row["cache"], row["arm"], row["net_percent"], row["above_percent"], row["worst_percent"])
            for row in rows
        ],
    )
    write_rows("conversation_net", rows, KIND)


if __name__ == "__main__":
    main()
