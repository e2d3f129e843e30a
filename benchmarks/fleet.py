"""A fleet in virtual time: 1 to 256 replicas behind one or several application processes.

    python benchmarks/fleet.py [TRACE] [--replicas 1,4,16,64,256] [--load 0.3] [--write]

Each replica is the emulator's engine, with 100,000 tokens of cache; each process has a `ReplicaRouter` and a
`ContextPlanner`, and gets every n-th request. Requests come at the times of TRACE, compressed so that all replicas
would be busy for `--load` of the time, on average, if nothing was cached: its rush hours stay rush hours. Without TRACE
they come at random.

Two streams: TRACE itself, the same requests for fleets of all sizes; and generated retrievals (10 blocks, most from one
of 400 topics), 100 for each replica.

*one*: one process. *8, shared*: eight, whose planners exchange orders, which arrive after 50 ms, as through Redis.
*8, alone*: eight, and nothing is exchanged. Routers never exchange anything. *changes*: one process; after a third of
the time a quarter of the replicas is lost, with the requests there, which are sent again; after two thirds they come
back, with empty caches. *round robin*: one process, no routing; contexts are planned in one scope for all.

`hits`: cached tokens of all prompt tokens, in %. `load`: the busiest replica's prompt tokens over the mean, among those
that were never lost. `planner`: CPU seconds of planning and routing for 1,000 requests, ends included: the cores that
1,000 requests per second take.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from common import percentile, print_table, zipf_requests
from replica_routing import ANSWER, ENGINE, MODEL, PREAMBLE, QUESTION, Engine, Job, prompt_of
from result_files import write_rows
from traces import reported_k, trace_of
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.order_sharing import Learn, LearnedOrder, NoSharing
from warmprefix.plan import Scope
from warmprefix_routing import ReplicaRouter, Route
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

SIZES = (1, 4, 16, 64, 256)
PER_REPLICA = 100
SHARED_AFTER = 0.05
"""Seconds until the other processes have learned an order."""
PROCESSES = 8


@dataclass(frozen=True)
class Arrival:
    """One request of a stream."""

    at: float
    """Seconds; only their proportions matter."""
    blocks: Sequence[ContextBlock]


@dataclass(frozen=True)
class Setup:
    """What a fleet is like."""

    name: str
    processes: int = 1
    shares: bool = False
    changes: bool = False
    routes: bool = True


SETUPS = (
    Setup("round robin", routes=False),
    Setup("one"),
    Setup("8, shared", PROCESSES, shares=True),
    Setup("8, alone", PROCESSES),
    Setup("changes", changes=True),
)


class VirtualSharing(NoSharing):
    """One process's end of an exchange of orders: what others publish arrives later, in virtual time."""

    def __init__(self, fleet: Fleet, process: int) -> None:
        self._fleet = fleet
        self._process = process
        self.learns: dict[Scope, Learn] = {}

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        self._fleet.schedule(SHARED_AFTER, "order", (self._process, scope, order))

    def follow(self, scope: Scope, learn: Learn) -> None:
        self.learns[scope] = learn

    def unfollow(self, scope: Scope) -> None:
        self.learns.pop(scope, None)


@dataclass
class Process:
    """An application process."""

    planner: ContextPlanner
    router: ReplicaRouter
    sharing: VirtualSharing


@dataclass
class Fleet:
    """The simulation: events in virtual time, and what they do."""

    setup: Setup
    replicas: int
    prompt: Callable[[Job], list[int]] = prompt_of
    engines: dict[str, Engine] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    routes: dict[int, Route] = field(default_factory=dict)
    served: list[Job] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    now: float = 0.0
    planner_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = count()
        self._turn = 0
        names = [f"r{number}" for number in range(self.replicas)]
        self.engines = {name: Engine() for name in names}
        capacity = ENGINE.capacity_tokens
        for number in range(self.setup.processes):
            sharing = VirtualSharing(self, number)
            planner = ContextPlanner(
                capacity_tokens=capacity * self.replicas,
                sharing=sharing if self.setup.shares else None,
            )
            self.processes.append(Process(planner, ReplicaRouter(names, capacity_tokens=capacity), sharing))

    def schedule(self, seconds: float, what: str, about: object) -> None:
        """Let something happen later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what, about))

    def run(self, arrivals: Sequence[Arrival], load: float) -> dict[str, object]:
        """Serve all requests, and return the figures."""
        tokens = sum(sum(block.tokens for block in one.blocks) + len(PREAMBLE) + QUESTION for one in arrivals)
        seconds = ENGINE.prefill_seconds(round(tokens / len(arrivals))) * len(arrivals) / (self.replicas * load)
        scale = seconds / (arrivals[-1].at - arrivals[0].at)
        for number, one in enumerate(arrivals):
            job = Job(number, one.blocks, "")
            job.arrival = (one.at - arrivals[0].at) * scale
            self.schedule(job.arrival, "arrival", job)
        if self.setup.changes:
            self.schedule(seconds / 3, "lost", None)
            self.schedule(seconds * 2 / 3, "back", None)
        while self._events:
            self.now, _, what, about = heapq.heappop(self._events)
            self._happen(what, about)
        return self._figures()

    def _happen(self, what: str, about: object) -> None:
        if what == "order":
            self._learn(*about)  # type: ignore[misc]
        elif what == "lost":
            self._lose()
        elif what == "back":
            for process in self.processes:
                for name in self.lost:
                    process.router.join(name)
        elif what == "arrival":
            assert isinstance(about, Job)
            self._send(about)
        else:
            assert isinstance(about, tuple)
            name, engine, job = about
            if self.engines[name] is engine:  # otherwise it is lost, and the request was sent again
                self._answer(what, name, engine, job)

    def _send(self, job: Job) -> None:
        process = self.processes[job.number % len(self.processes)]
        began = time.thread_time()
        job.plan = process.planner.plan(job.blocks, model=MODEL)
        job.order = [planned.block for planned in job.plan.blocks]
        if self.setup.routes:
            route = self.routes[job.number] = process.router.route(job.order, order_locked=True)
            name = route.replica
        else:
            self._turn += 1
            name = f"r{self._turn % self.replicas}"
        self.planner_seconds += time.thread_time() - began
        job.prompt = self.prompt(job)
        self.engines[name].queue.append(job)
        self._begin(name)

    def _begin(self, name: str) -> None:
        engine = self.engines[name]
        seconds = engine.start()
        if seconds is not None and engine.computing is not None:
            self.schedule(seconds, "first token", (name, engine, engine.computing[0]))

    def _answer(self, what: str, name: str, engine: Engine, job: Job) -> None:
        process = self.processes[job.number % len(self.processes)]
        began = time.thread_time()
        if what == "first token":
            engine.prefilled()
            job.ttft = self.now - job.arrival
            if self.setup.routes:
                process.router.prefilled(self.routes[job.number])
            self.schedule((ANSWER - 1) / ENGINE.decode_rate, "done", (name, engine, job))
        else:
            engine.finished(job)
            assert job.plan is not None
            if self.setup.routes:
                process.router.commit(self.routes.pop(job.number), plan=job.plan)
            process.planner.commit(job.plan)
            job.prompt_tokens = len(job.prompt)
            job.prompt, job.plan = [], None
            self.served.append(job)
        self.planner_seconds += time.thread_time() - began
        self._begin(name)

    def _learn(self, publisher: int, scope: Scope, order: LearnedOrder) -> None:
        for number, process in enumerate(self.processes):
            learn = process.sharing.learns.get(scope)
            if number != publisher and learn is not None:
                learn([order])

    def _lose(self) -> None:
        """Lose a quarter of the replicas; their requests are sent to others."""
        self.lost = list(self.engines)[: self.replicas // 4]
        again: list[Job] = []
        for name in self.lost:
            engine = self.engines[name]
            again += [*engine.queue, *engine.unanswered]
            self.engines[name] = Engine()
        for process in self.processes:
            for name in self.lost:
                process.router.fail(name)
        for job in sorted(again, key=lambda job: job.number):
            process = self.processes[job.number % len(self.processes)]
            assert job.plan is not None
            process.planner.abandon(job.plan)
            self._send(job)

    def _figures(self) -> dict[str, object]:
        prompts = sum(job.prompt_tokens for job in self.served)
        ttfts = [job.ttft for job in self.served]
        loads = [engine.served_tokens for name, engine in self.engines.items() if name not in self.lost]
        return {
            "replicas": self.replicas,
            "processes": self.setup.name,
            "requests": len(self.served),
            "hit_percent": round(100 * sum(job.cached for job in self.served) / prompts, 1),
            "ttft_p50_ms": round(1_000 * percentile(ttfts, 50)),
            "ttft_p95_ms": round(1_000 * percentile(ttfts, 95)),
            "max_over_mean": round(max(loads) * len(loads) / sum(loads), 2),
            "planner_seconds": round(1_000 * self.planner_seconds / len(self.served), 2),
        }


# -- streams -----------------------------------------------------------------------------------------------------------


def recorded(trace: Trace) -> list[Arrival]:
    """Return the requests of a trace with its arrival times."""
    requests = [request for request in Workload(trace, reported_k(trace)).requests if request.blocks]
    return [Arrival(request.source.seconds or 0.0, request.blocks) for request in requests]


def generated(replicas: int, times: Sequence[float]) -> list[Arrival]:
    """Return some generated retrievals for each replica, at recorded times, again and again."""
    total = max(PER_REPLICA * replicas, 1_000)
    trace = trace_of("generated_topics", zipf_requests(total, k=10, seed=7))
    span = times[-1] - times[0] + (times[-1] - times[0]) / len(times)
    requests = Workload(trace, 10).requests
    return [
        Arrival(times[number % len(times)] + number // len(times) * span, request.blocks)
        for number, request in enumerate(requests)
    ]


def random_times(total: int = 3_000) -> list[float]:
    rng = random.Random(9)
    times = [0.0]
    for _ in range(total):
        times.append(times[-1] + rng.expovariate(1))
    return times


def main() -> None:
    options = arguments()
    trace = None if options.trace is None else read_trace(options.trace)
    own = None if trace is None else recorded(trace)
    times = random_times() if own is None else [one.at for one in own]
    rows: list[dict[str, object]] = []
    for replicas in options.replicas:
        streams = {"generated_topics": generated(replicas, times)}
        if trace is not None and own is not None:
            streams[trace.name] = own
        for name, arrivals in streams.items():
            for setup in SETUPS:
                if replicas >= 4 or (setup.processes == 1 and not setup.changes):
                    rows.append({"stream": name, **Fleet(setup, replicas).run(arrivals, options.load)})
                    print(*rows[-1].values(), sep=" | ", flush=True)
        if options.write:
            write_rows("fleet", rows, ["stream", "replicas", "processes"])
    print_table(list(rows[0]), [list(row.values()) for row in rows])


def table(rows: Sequence[dict[str, object]], stream: str) -> str:
    """Return the table of docs/routing.md: hits in %, and the p95 of the TTFT in ms."""
    sizes = dict.fromkeys(row["replicas"] for row in rows)
    cells = {
        (row["processes"], row["replicas"]): f"{row['hit_percent']} / {row['ttft_p95_ms']}"
        for row in rows
        if row["stream"] == stream
    }
    lines = ["| processes | " + " | ".join(map(str, sizes)) + " |", "|---|" + "---|" * len(sizes)]
    for setup in SETUPS:
        found = [cells.get((setup.name, size), "-") for size in sizes]
        lines.append(f"| {' | '.join([setup.name, *found])} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--replicas", type=lambda text: [int(part) for part in text.split(",")], default=list(SIZES))
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--write", action="store_true", help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
