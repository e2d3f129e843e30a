"""What routing costs a request, and that it costs the same after 100,000 requests as after 100.

    python benchmarks/agent_router_overhead.py [--requests 100,10000,100000]

Requests of 15 blocks over 400 Zipf-distributed topics go to 4, 15 and 32 agents. `assign()` and `commit()` are timed on
blocks that exist already, in rounds that alternate between all cases, so that whatever else the machine does meets each
of them. Times are CPU time of the thread: neither call waits for anything. It also prints the memory that a router
takes, as allocated by its process. Only a run with the default `--requests` is written to `results/`.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections.abc import Iterator

from common import percentile, print_table, zipf_requests
from result_files import write_results
from warmprefix import ContextBlock
from warmprefix_routing import Agent, AgentRouter

AGENTS = (4, 15, 32)
CAPACITY = 500_000
"""Tokens an agent."""
ROUNDS, SAMPLES = 20, 100
QUICKLY_MADE = 1_000
"""Earlier requests up to which each round creates a new router; measuring hardly changes the others."""
TENANTS, REQUESTS_OF_EACH = 32, 20
HEADER = ["agents", "earlier requests", "assign() p50 µs", "p99 µs", "commit() p50 µs", "p99 µs"]

Requests = Iterator[list[ContextBlock]]


class Case:
    """A router with `agents` agents and `earlier` requests served, and times of the next requests in µs."""

    def __init__(self, agents: int, earlier: int, blocks: list[ContextBlock]) -> None:
        self.agents = agents
        self.earlier = earlier
        self.assign: list[float] = []
        self.commit: list[float] = []
        self._blocks = blocks
        self._router = self._served()
        self._measured = self._requests(seed=2)

    def measure(self) -> None:
        """One round."""
        if self.earlier <= QUICKLY_MADE:
            self._router = self._served()
        router = self._router
        for _ in range(SAMPLES):
            context = next(self._measured)
            start = time.thread_time()
            assignment = router.assign(context)
            assigned = time.thread_time()
            router.commit(assignment)
            committed = time.thread_time()
            self.assign.append((assigned - start) * 1e6)
            self.commit.append((committed - assigned) * 1e6)

    def _served(self) -> AgentRouter:
        router = new_router(self.agents)
        requests = self._requests(seed=0)
        for _ in range(self.earlier):
            router.commit(router.assign(next(requests)))
        return router

    def _requests(self, seed: int) -> Requests:
        for request in zipf_requests(self.earlier + ROUNDS * SAMPLES, seed=seed):
            yield [self._blocks[i] for i in request]


def new_router(agents: int) -> AgentRouter:
    return AgentRouter([Agent(f"agent-{i}", CAPACITY) for i in range(agents)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="100,10000,100000", help="earlier requests")
    asked: str = parser.parse_args().requests
    rng = random.Random(1)
    blocks = [ContextBlock(f"block {i}", id=i, tokens=rng.randrange(50, 400)) for i in range(400 * 60)]
    cases = [Case(agents, int(earlier), blocks) for earlier in asked.split(",") for agents in AGENTS]
    for _ in range(ROUNDS):
        for case in cases:
            case.measure()
    times = [
        {
            "agents": case.agents,
            "earlier_requests": case.earlier,
            "assign_p50_us": round(percentile(case.assign, 50), 1),
            "assign_p99_us": round(percentile(case.assign, 99), 1),
            "commit_p50_us": round(percentile(case.commit, 50), 1),
            "commit_p99_us": round(percentile(case.commit, 99), 1),
        }
        for case in cases
    ]
    print_table(HEADER, [list(row.values()) for row in times])
    memory = remembered(blocks)
    print()
    print_table(["what is remembered", "bytes"], [[name, count] for name, count in memory.items()])
    if asked == parser.get_default("requests"):
        write_results("agent_router_overhead", {"times": times, "memory": memory})


def remembered(blocks: list[ContextBlock]) -> dict[str, int]:
    """Bytes a tenant of which there is nothing but its name, and bytes a block that an agent holds."""
    tracemalloc.start()
    try:
        before = allocated()
        router = new_router(max(AGENTS))
        for tenant in range(TENANTS):
            router.assign([], tenant=f"tenant {tenant}")
        empty = (allocated() - before) / TENANTS
        before = allocated()
        requests = zipf_requests(TENANTS * REQUESTS_OF_EACH)
        for number, request in enumerate(requests):
            router.commit(router.assign([blocks[i] for i in request], tenant=f"tenant {number % TENANTS}"))
        held = sum(len(m.cache.blocks) for state in router._tenants.states.values() for m in state.agents.values())  # noqa: SLF001
        return {"a tenant, 32 agents": round(empty), "a block an agent": round((allocated() - before) / held)}
    finally:
        tracemalloc.stop()


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


if __name__ == "__main__":
    main()
