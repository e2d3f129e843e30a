"""Cost of planning per request, after 100 requests and after 100,000.

    python benchmarks/plan_overhead.py [--requests 100,10000,100000] [--choices] [--against FOLDER]

Requests of 15 blocks over 400 Zipf-distributed topics. Times are those of the CPU.
With a choice, plans of 8 out of 20 candidates are timed in turn with plans of the first 8, with and without a tenant,
and plans of 8 for a tenant that has chosen before; also on the traces with scores in the folder that the environment
variable WARMPREFIX_TRACES names, at most 1,000 requests each, of which the first hundred do not count. `--choices`
times nothing else.
`plan()` and `commit()` are timed on existing blocks. Where `blocks` are timed too, they are made from 4 kB texts,
which includes hashing, and the prompt is rendered. Text with brackets costs more, because it is searched for possible
labels. If the published `contextpilot` package is installed, its `reorder()`, which orders and records, is timed on
the same requests, to compare with our `plan() + commit()` (on at most 1,000 requests: its cost grows with their
number, and it fails at 1,000 children of one node). Only a run with the default `--requests`, or of `--choices`, is
written to `results/`.

With `--against`, the packages of another checkout are timed at the same time, by the same script: *before*.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from common import CLONE, measured_at_once, percentile, print_table, zipf_requests
from result_files import checkout_commit, write_rows
from traces import given_files
from warmprefix import Choice, ContextBlock, ContextPlanner
from warmprefix_tools.traces.reader import read_trace

SAMPLES = 3_000
LAST_SERVED = 100
PEER_CHECKPOINTS = (100, 1_000)
PLACES, CANDIDATES = 8, 20
TRACE_REQUESTS, FIRST = 1_000, 100
"""Requests of a trace, and the first of them, which are not timed."""
POLICIES = ["coaccess", "relevance", "greedy", "frequency", "context-index"]
WORDS = ["prefix", "cache", "of", "the", "engine", "holds", "a", "block", "and", "its", "tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="100,10000,100000", help="earlier requests, ascending")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout to time, too")
    parser.add_argument("--choices", action="store_true", help="time only plans with a choice, and those next to them")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asked: str = arguments.requests
    if arguments.measure:
        print(json.dumps(measure([int(number) for number in asked.split(",")], arguments.choices)))
        return
    against: Path | None = arguments.against
    checkouts = {"now": CLONE} | ({} if against is None else {"before": against})
    flags = ["--measure", "--choices"] if arguments.choices else ["--measure"]
    timed = measured_at_once([__file__, "--requests", asked, *flags], checkouts)
    results: list[dict[str, object]] = timed["now"]
    header = ["", "earlier requests", "p50 µs", "p99 µs"]
    if against is not None:
        header += ["before: p50 µs", "p99 µs"]
        before = {(row["what"], row["earlier_requests"]): row for row in timed["before"]}
        for row in results:
            other = before[row["what"], row["earlier_requests"]]
            row |= {"before_p50_us": other["p50_us"], "before_p99_us": other["p99_us"]}
    if not (arguments.choices or find_spec("contextpilot")):
        print("contextpilot is not installed, so it is not timed.\n")
    print_table(header, [[*row.values()] for row in results])
    if asked == parser.get_default("requests") or arguments.choices:
        made = {} if against is None else {"against": checkout_commit(against)}
        write_rows("plan_overhead", [{**row, "made": made} for row in results], ("what", "earlier_requests"))


def measure(checkpoints: list[int], is_choices: bool) -> list[dict[str, object]]:
    """Return a row of times for each way to plan and number of earlier requests."""
    rng = random.Random(1)
    blocks = [ContextBlock(f"block {i}", id=i, tokens=rng.randrange(50, 400)) for i in range(400 * 60)]
    results: list[dict[str, object]] = []

    def report(name: str, earlier: int, times: Sequence[float]) -> None:
        p50, p99 = percentile(times, 50) * 1e6, percentile(times, 99) * 1e6
        results.append({"what": name, "earlier_requests": earlier, "p50_us": round(p50, 1), "p99_us": round(p99, 1)})

    for number in checkpoints[:2]:
        drawn = islice(zipf_requests(number + SAMPLES, k=20), number + SAMPLES)
        listed = [[(str(i), blocks[i].tokens, 1 / (rank + 1)) for rank, i in enumerate(request)] for request in drawn]
        choosing_after(number, listed, report)
    for path in given_files([]):
        trace = read_trace(path, TRACE_REQUESTS)
        scored = [
            [
                (json.dumps(id), trace.tokens[id], score)
                for id, score in zip(request.blocks, request.scores, strict=True)
            ]
            for request in trace.requests
            if len(request.scores) > PLACES
        ]
        if len(scored) > FIRST:
            choosing_after(FIRST, scored, lambda name, n, times, of=trace.name: report(f"{name}, {of}", n, times))  # type: ignore[misc]
    if is_choices:
        return results
    for policy in POLICIES:
        planner = ContextPlanner(policy=policy)
        ordering_after(planner, blocks, checkpoints, lambda n, times, name=policy: report(f"plan(), {name}", n, times))  # type: ignore[misc]
    unbounded = ContextPlanner(capacity_tokens=None, max_nodes=10**9)
    ordering_after(unbounded, blocks, checkpoints, lambda n, times: report("plan(), coaccess, unbounded", n, times))
    for name, extra in (("plain text", []), ("text full of [1]", ["[1]"])):
        report(f"blocks + plan() + render() + commit(), {name}", checkpoints[0], whole(checkpoints[0], WORDS + extra))
    planner = ContextPlanner()
    serving(
        "plan() + commit(), coaccess",
        lambda number, request: planner.commit(planner.plan([blocks[i] for i in request])),
        sorted({*checkpoints, *PEER_CHECKPOINTS}),
        report,
    )
    if find_spec("contextpilot"):
        peer_after(PEER_CHECKPOINTS, report)
    return results


def ordering_after(
    planner: ContextPlanner,
    blocks: list[ContextBlock],
    checkpoints: list[int],
    report: Callable[[int, list[float]], None],
) -> None:
    """Serve requests up to each checkpoint, and time `SAMPLES` unserved plans there."""
    served = zipf_requests(checkpoints[-1])
    done = 0
    for checkpoint in checkpoints:
        while done < checkpoint:
            with planner.planning([blocks[i] for i in next(served)]):
                done += 1
        times: list[float] = []
        for request in zipf_requests(SAMPLES, seed=2):
            context = [blocks[i] for i in request]
            start = time.thread_time()
            plan = planner.plan(context)
            times.append(time.thread_time() - start)
            planner.abandon(plan)
        report(checkpoint, times)


def choosing_after(
    earlier: int,
    requests: Sequence[Sequence[tuple[str, int, float]]],
    report: Callable[[str, int, Sequence[float]], None],
) -> None:
    """Time plans of the first blocks and of more candidates in turn, once some requests were served.

    Args:
        earlier: Number of these.
        requests: The id, tokens and score of each candidate, in relevance order.
        report: Receives the times of each way to plan.
    """
    ways: dict[str, tuple[int, Choice | None, str | None]] = {
        "8 blocks": (PLACES, None, None),
        "8 of 20 candidates": (CANDIDATES, Choice(k=PLACES), None),
        "8 blocks, a tenant": (PLACES, None, "tenant"),
        "8 of 20 candidates, a tenant": (CANDIDATES, Choice(k=PLACES), "tenant"),
        "8 blocks, a tenant that has chosen": (PLACES, None, "tenant"),
    }
    planners = {name: ContextPlanner() for name in ways}
    with planners["8 blocks, a tenant that has chosen"].planning(
        [ContextBlock("one", score=1.0)], tenant="tenant", choose=Choice(k=1)
    ):
        pass
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number, request in enumerate(requests):
        listed = [ContextBlock(f"block {id}", id, tokens, score) for id, tokens, score in request[:CANDIDATES]]
        turn = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]  # the first one meets cold blocks
        for name in turn:
            count, choose, tenant = ways[name]
            context = listed[:count]
            start = time.thread_time()
            plan = planners[name].plan(context, choose=choose, tenant=tenant)
            times[name].append(time.thread_time() - start)
            planners[name].commit(plan)
    for name, taken in times.items():
        report(f"plan(), {name}", earlier, taken[earlier:])


def whole(earlier: int, words: list[str]) -> list[float]:
    rng = random.Random(3)
    texts = [" ".join(rng.choices(words, k=900))[:4_096] for _ in range(400 * 60 // 8)]
    planner = ContextPlanner()
    times: list[float] = []
    for number, request in enumerate(zipf_requests(earlier + SAMPLES, topics=50, seed=4)):
        context = [texts[i % len(texts)] for i in request]
        start = time.thread_time()
        plan = planner.plan([ContextBlock(text) for text in context])
        plan.render()
        planner.commit(plan)
        if number >= earlier:
            times.append(time.thread_time() - start)
    return times


def serving(
    name: str,
    serve: Callable[[int, list[int]], object],
    checkpoints: Sequence[int],
    report: Callable[[str, int, Sequence[float]], None],
) -> None:
    """Call `serve` per request; the last `LAST_SERVED` before each checkpoint count."""
    times: deque[float] = deque(maxlen=LAST_SERVED)
    for number, request in enumerate(zipf_requests(checkpoints[-1]), start=1):
        start = time.thread_time()
        serve(number, request)
        times.append(time.thread_time() - start)
        if number in checkpoints:
            report(name, number, times)


def peer_after(checkpoints: Sequence[int], report: Callable[[str, int, Sequence[float]], None]) -> None:
    """Time ContextPilot's online path, without its prints."""
    import contextpilot  # type: ignore[import-not-found]

    with contextlib.redirect_stdout(io.StringIO()):
        peer = contextpilot.ContextPilot(use_gpu=False)
        serving(
            "contextpilot reorder()",
            lambda number, request: peer.reorder(request, conversation_id=str(number)),
            checkpoints,
            report,
        )


if __name__ == "__main__":
    main()
