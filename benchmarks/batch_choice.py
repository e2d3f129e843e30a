"""What choosing evidence saves in a batch, and what of the gold is still fed, next to a control by chance.

    python benchmarks/batch_choice.py [TRACE_OR_FOLDER ...]

Without an argument the traces are those in the folder that the environment variable WARMPREFIX_TRACES names. Only
traces with scores take part; the first 1,000 requests of each are one batch, for an unbounded cache. `k` is the trace's
own, 15 at most, and a request has up to twelve candidates more.

`batch` and `choice` are the tokens that the plans of the first `k` and of the chosen candidates compute, with notes;
`extra` those with two further candidates. Gold is the share of the passages that the data set names which are fed; by
`chance`, the mean of five draws of as many exchanges within the same tolerance. Only a run of given traces is written
to `results/`.
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import print_table
from result_files import write_rows
from trace_lines import MORE_CANDIDATES
from traces import given_files, reported_k
from warmprefix import Choice, ContextPlanner
from warmprefix.batch import BatchPlan, BatchRequest
from warmprefix.traces import NoRecorder
from warmprefix_tools.chance_swaps import chance_swaps
from warmprefix_tools.replay.workload import DEFAULT_K
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

REQUESTS = 1_000
DRAWS = 5


def planned(requests: Sequence[BatchRequest], choose: Choice | None = None) -> BatchPlan:
    return ContextPlanner(policy="relevance", recorder=NoRecorder()).plan_batch(requests, choose=choose)


def computed(plan: BatchPlan) -> int:
    return plan.total_tokens - plan.saved_tokens + sum(request.note_tokens for request in plan)


def measured(trace: Trace) -> dict[str, Any] | None:
    """Return the row of a trace; None if it has no scores."""
    k = min(reported_k(trace), DEFAULT_K)
    blocks = {id: trace.block(id) for id in trace.tokens}
    sources = [request for request in trace.requests if request.blocks and request.scores]
    if not sources:
        return None
    requests: list[BatchRequest] = []
    gold: dict[str, set[bytes]] = {}
    for place, source in enumerate(sources):
        listed = list(zip(source.blocks, source.scores, strict=True))[: k + MORE_CANDIDATES]
        requests.append(BatchRequest(place, [replace(blocks[id], score=score) for id, score in listed]))
        gold[str(place)] = {blocks[id].fingerprint for id in source.gold if id in blocks}
    first = planned([BatchRequest(request.id, request.blocks[:k]) for request in requests])
    chosen, extra = planned(requests, Choice(k)), planned(requests, Choice(k, extra=2))
    row: dict[str, Any] = {"trace": trace.name, "requests": len(requests), "k": k, "batch": computed(first)}
    for name, plan in (("choice", chosen), ("extra", extra)):
        row[name] = computed(plan)
        row[f"{name}_percent"] = round(100 * (computed(plan) / computed(first) - 1), 2)
    row["entered"] = round(sum(len(request.entered or ()) for request in chosen) / len(requests), 2)
    golds = sum(map(len, gold.values()))
    fed = {name: by_id(plan) for name, plan in (("batch", first), ("choice", chosen), ("extra", extra))}
    for name, its in fed.items():
        row[f"gold_{name}"] = share(sum(len(gold[id] & own) for id, own in its.items()), golds)
    row["gold_chance"] = share(sum(by_chance(chosen, k, gold, seed) for seed in range(DRAWS)) / DRAWS, golds)
    return row


def by_id(plan: BatchPlan) -> Mapping[str, set[bytes]]:
    return {request.id: {block.block.fingerprint for block in request.blocks} for request in plan}


def share(found: float, golds: int) -> float | None:
    return round(100 * found / golds, 2) if golds else None


def by_chance(plan: BatchPlan, k: int, gold: Mapping[str, set[bytes]], seed: int) -> int:
    """Return the gold passages that are fed with as many exchanges by lot."""
    rng, found = random.Random(seed), 0
    for request in plan.in_callers_order():
        candidates = request.candidates
        assert candidates is not None
        scores = [block.score or 0.0 for block in candidates.blocks]
        losses = Choice(k).losses(scores)
        in_reach = bisect_right(losses, Choice(k).within / 2)  # no others enter in batches
        places = chance_swaps(scores[:in_reach], Choice(k), len(request.entered or ()), rng)
        found += len(gold[request.id] & {candidates.blocks[place].fingerprint for place in places})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE_OR_FOLDER", type=Path)
    options = parser.parse_args()
    files = given_files(options.traces)
    rows = [row for file in files if (row := measured(read_trace(file, REQUESTS)))]
    columns = ["trace", "requests", "k", "choice_percent", "extra_percent", "entered", "gold_batch", "gold_choice"]
    columns += ["gold_extra", "gold_chance"]
    print_table(columns, [[row[column] for column in columns] for row in rows])
    if files:
        write_rows("batch_choice", rows, ("trace",))


if __name__ == "__main__":
    main()
