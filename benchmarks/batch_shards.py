"""Tokens that several replicas compute for one batch, against one replica that runs all of it.

    python benchmarks/batch_shards.py [TRACE_OR_FOLDER ...] [--replicas 2,4,8,16] [--limit N]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names, or, if
there are none, three generated ones. Each way distributes the same requests over replicas with unbounded caches:

*shards*: `shards_of`, cuts of the one plan. *round robin, planned*: requests in turn, and each replica plans its own.
*first block, planned*: requests by a hash of their most relevant block, and each replica plans its own. *round robin of
the plan*: the requests of the one plan in turn, in its execution order. *round robin, unplanned*: in relevance order.

`computed` is all replicas' tokens over those of one replica that runs the plan. `greatest` and `least` are the costs of
replicas over their mean; a cost counts computed tokens, and 256 for each request's question and answer. Only a run of
whole traces that were given is written to `results/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from common import print_table
from result_files import write_rows
from traces import generated, given_files, reported_k
from warmprefix import ContextPlanner
from warmprefix.batch import BatchPlan, BatchRequest
from warmprefix.traces import NoRecorder
from warmprefix_openai.shards import REQUEST_TOKENS, shards_of
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace

Cost = tuple[int, int]
"""Requests and computed tokens of one replica."""


def planned(requests: Sequence[BatchRequest], planner: str = "auto") -> BatchPlan:
    return ContextPlanner(policy="relevance", recorder=NoRecorder()).plan_batch(requests, planner)


def cost_of(plan: BatchPlan) -> Cost:
    return len(plan), plan.total_tokens - plan.saved_tokens


def dealt(requests: Sequence[BatchRequest], replicas: int) -> list[list[BatchRequest]]:
    return [list(requests[number::replicas]) for number in range(replicas)]


def by_first_block(requests: Sequence[BatchRequest], replicas: int) -> list[list[BatchRequest]]:
    parts: list[list[BatchRequest]] = [[] for _ in range(replicas)]
    for request in requests:
        key = request.blocks[0].fingerprint if request.blocks else b""
        parts[int.from_bytes(key[:8], "big") % replicas].append(request)
    return parts


def kept_order(plan: BatchPlan, replicas: int) -> list[BatchPlan]:
    """Return what replicas run that get the plan's requests in turn, with its order of blocks."""
    parts: list[BatchPlan] = []
    for number in range(replicas):
        own = [
            BatchRequest(
                request.id,
                [request.request.blocks[position] for position in request.order],
                tenant=request.request.tenant,
            )
            for request in plan.requests[number::replicas]
        ]
        parts.append(planned(own, "relevance"))
    return parts


WAYS: dict[str, Callable[[Sequence[BatchRequest], BatchPlan, int], Sequence[BatchPlan]]] = {
    "shards": lambda requests, plan, replicas: shards_of(plan, replicas),
    "round robin, planned": lambda requests, plan, replicas: list(map(planned, dealt(requests, replicas))),
    "first block, planned": lambda requests, plan, replicas: list(map(planned, by_first_block(requests, replicas))),
    "round robin of the plan": lambda requests, plan, replicas: kept_order(plan, replicas),
    "round robin, unplanned": lambda requests, plan, replicas: [
        planned(part, "relevance") for part in dealt(requests, replicas)
    ],
}


def measure(name: str, requests: Sequence[BatchRequest], replicas: Sequence[int]) -> list[dict[str, object]]:
    plan = planned(requests)
    alone = plan.total_tokens - plan.saved_tokens
    rows: list[dict[str, object]] = []
    for count in replicas:
        for way, parts_of in WAYS.items():
            costs = list(map(cost_of, parts_of(requests, plan, count)))
            loads = [REQUEST_TOKENS * asked + computed for asked, computed in costs]
            mean = sum(loads) / count
            rows.append(
                {
                    "trace": name,
                    "requests": len(requests),
                    "replicas": count,
                    "way": way,
                    "computed": round(sum(computed for _, computed in costs) / alone, 3),
                    "greatest": round(max(loads) / mean, 3),
                    "least": round(min(loads) / mean, 3),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--replicas", default="2,4,8,16", help="with commas between them")
    parser.add_argument("--limit", type=int, help="requests of each trace")
    options = parser.parse_args()
    replicas = [int(number) for number in options.replicas.split(",")]
    files = given_files(options.traces)
    rows: list[dict[str, object]] = []
    for trace in map(read_trace, files) if files else generated():
        workload = Workload(trace, reported_k(trace))
        requests = [
            BatchRequest(place, request.blocks, tenant=request.source.scope)
            for place, request in enumerate(workload.requests[: options.limit])
        ]
        measured = measure(trace.name, requests, replicas)
        rows += measured
        print(f"\n{trace.name}, {len(requests):,} requests\n")
        columns = ("replicas", "way", "computed", "greatest", "least")
        print_table(columns, [[row[column] for column in columns] for row in measured])
    if files and options.limit is None:
        write_rows("batch_shards", rows, ("trace", "replicas", "way"))


if __name__ == "__main__":
    main()
