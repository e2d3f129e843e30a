"""What workers save that learn from each other through Redis, next to one planner that sees everything.

    python benchmarks/shared_learning.py [TRACE] [--rates 20,200,0] [--limit N]

Without an argument the trace is ragpulse_rag in the folder that the environment variable WARMPREFIX_TRACES names, or,
if there are none, a generated one. Needs a Redis or Valkey server's binary; it is started on a free port.

Four worker processes in turn serve the requests in order of arrival, each with a planner of its own, in front of one
engine with the prefix cache of `warmprefix replay`. Shared orders arrive with a delay, so the rate of requests matters:
*rate* is the total number of requests per second, 0 for the fastest possible, and *unseen* is the mean number of
earlier requests that a worker had not received when it planned. *relative* is the hit ratio relative to that of the one
planner.

Only a run on a given trace, without `--limit`, is written to `results/`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from common import percentile, print_table, size
from redis_servers import Server
from result_files import write_results
from traces import generated, given_files, reported_k
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.order_sharing import OrderSharing
from warmprefix.prefix import PrefixTree
from warmprefix.traces import NoRecorder
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_tools.replay.workload import ReplayRequest, Workload
from warmprefix_tools.traces.reader import read_trace

TRACE = "ragpulse_rag"
WORKERS = 4
CAPACITY = 500_000
OTHER_CAPACITIES = (None, 100_000)
RATE_OF_OTHERS = 200
"""The rate at which the other capacities are measured."""


class Workers(Protocol):
    """Workers that order requests, one at a time."""

    def order(self, number: int, request: ReplayRequest) -> Sequence[int]: ...


class Account(NamedTuple):
    """One run, with an entry per request."""

    saved: list[int]
    totals: list[int]

    def hit_percent(self) -> float:
        return 100 * sum(self.saved) / max(sum(self.totals), 1)


def main() -> None:
    options = arguments()
    paths = [path for path in given_files(options.traces) if options.traces or path.name.startswith(TRACE)]
    trace = read_trace(paths[0], options.limit) if paths else next(generated())
    workload = Workload(trace, reported_k(trace))
    rows: list[dict[str, object]] = []
    with Server() as server:
        for capacity in (CAPACITY, *OTHER_CAPACITIES):
            rows += measure(workload, server.url, capacity, options.rates if capacity == CAPACITY else [RATE_OF_OTHERS])
    header = ["cache", "workers", "rate", "unseen", "hit ratio, %", "relative, %"]
    print(f"{workload.name}: {len(workload.requests)} requests, {workload.k} blocks each at most\n")
    print_table(header, [[row[name] for name in header] for row in rows])
    if workload.name == TRACE and options.limit is None:
        write_results("shared_learning", rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="a trace file")
    parser.add_argument("--rates", type=rates, default=[20, 200, 0], help="requests a second, with commas between them")
    parser.add_argument("--limit", type=int, help="requests of the trace")
    return parser.parse_args()


def rates(text: str) -> list[int]:
    return [int(rate) for rate in text.split(",")]


def measure(workload: Workload, url: str, capacity: int | None, rates: Sequence[int]) -> list[dict[str, object]]:
    """Return all columns for one cache, as rows of the table."""
    one = serve(workload, Here([planner(capacity)]), capacity).hit_percent()
    rows: list[dict[str, object]] = []

    def add(workers: str, rate: object, unseen: object, percent: float) -> None:
        rows.append(
            {
                "cache": size(capacity),
                "workers": workers,
                "rate": rate,
                "unseen": unseen,
                "hit ratio, %": round(percent, 2),
                "relative, %": round(100 * percent / one, 1),
            }
        )
        print(rows[-1], file=sys.stderr)

    add("as retrieved", "-", "-", serve(workload, AsRetrieved(), capacity).hit_percent())
    apart = Here([planner(capacity) for _ in range(WORKERS)])
    add(f"{WORKERS} apart", "-", "-", serve(workload, apart, capacity).hit_percent())
    for rate in rates:
        with Processes(workload, url, f"{size(capacity)}-{rate}", capacity, rate) as processes:
            percent = serve(workload, processes, capacity).hit_percent()
        add(f"{WORKERS} sharing", rate or "most", round(fmean(processes.unseen), 1), percent)
        rows[-1]["unseen p99"] = percentile(processes.unseen, 99)
        rows[-1]["requests a second"] = round(processes.rate_reached)
    add("one", "-", "-", one)
    return rows


def serve(workload: Workload, workers: Workers, capacity: int | None) -> Account:
    """Send every request to the workers and every prompt to the engine."""
    cache = PrefixTree[int](capacity, 2 * len(workload.requests) + 1)
    account = Account([], [])
    for number, request in enumerate(workload.requests):
        order = workers.order(number, request)
        found = cache.insert([request.keys[i] for i in order], [request.tokens[i] for i in order])
        account.saved.append(found.tokens)
        account.totals.append(request.context_tokens)
    return account


def planner(capacity: int | None, sharing: OrderSharing | None = None) -> ContextPlanner:
    return ContextPlanner(capacity_tokens=capacity, sharing=sharing, recorder=NoRecorder())


class AsRetrieved:
    """Arrange nothing."""

    def order(self, number: int, request: ReplayRequest) -> Sequence[int]:
        return request.relevance


class Here:
    """Planners in this process, in turn."""

    def __init__(self, planners: Sequence[ContextPlanner]) -> None:
        self._planners = planners

    def order(self, number: int, request: ReplayRequest) -> Sequence[int]:
        return arrange(self._planners[number % len(self._planners)], request.source.scope, request.blocks)


class Processes:
    """Worker processes in turn; each answers before the next receives a request."""

    def __init__(self, workload: Workload, url: str, prefix: str, capacity: int | None, rate: int) -> None:
        contexts = [(request.source.scope, request.blocks) for request in workload.requests]
        self._arguments = (contexts, url, prefix, capacity)
        self._rate = rate
        self._workers = [self._start() for _ in range(WORKERS)]
        self._started = 0.0
        self._last = 0
        self.unseen: list[int] = []
        self.rate_reached = 0.0

    def _start(self) -> Any:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, *self._arguments), daemon=True).start()
        theirs.close()
        ours.recv()
        return ours

    def __enter__(self) -> Processes:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.rate_reached = len(self.unseen) / (time.perf_counter() - self._started)
        for worker in self._workers:
            end(worker)

    def order(self, number: int, request: ReplayRequest) -> Sequence[int]:
        if self._rate:
            time.sleep(max(self._started + number / self._rate - time.perf_counter(), 0.0))
        worker = self._workers[number % WORKERS]
        worker.send(number)
        order, received = worker.recv()
        self.unseen.append(number - received)
        return order  # type: ignore[no-any-return]


def end(worker: Any) -> None:
    worker.send(None)
    worker.recv()
    worker.close()


Context = tuple[str | None, tuple[ContextBlock, ...]]


def work(driver: Any, contexts: Sequence[Context], url: str, prefix: str, capacity: int | None) -> None:
    """Run a worker process: for each number, send that request's order and the count of received orders."""
    sharing = RedisOrderSharing(url, prefix=prefix)
    served = 0
    with planner(capacity, sharing) as own:
        driver.send("ready")
        while (number := driver.recv()) is not None:
            received = sharing.stats().received + served
            driver.send((arrange(own, *contexts[number]), received))
            served += 1
    driver.send("done")


def arrange(own: ContextPlanner, scope: str | None, blocks: Sequence[ContextBlock]) -> Sequence[int]:
    plan = own.plan(blocks, tenant=scope)
    own.commit(plan)
    return plan.order


if __name__ == "__main__":
    main()
