"""Two real vLLM replicas on the CPU, and the simulation of `fleet.py` for the same prompts: what their caches hit.

    WARMPREFIX_VLLM=ENVIRONMENT python benchmarks/fleet_engines.py [TRACE] [--at-once 1] [--load 0.3] [--write]

Without TRACE, generated retrievals. Both get the same prompts, token for token, in the same order, through one
`ReplicaRouter` and one `ContextPlanner`, in front of caches of the same size. The real engines (a tiny model with
random weights) get `--at-once` requests at a time. The simulation has its own time: with one at a time its engines are
almost never busy, otherwise for `--load` of it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

import fleet
from common import print_table, zipf_requests
from replica_routing import ANSWER, ENGINE, MODEL, Job, prompt_of
from result_files import write_rows
from traces import trace_of
from vllm_server import VllmServer, engine_version
from warmprefix import ContextPlanner
from warmprefix_routing import ReplicaRouter
from warmprefix_tools.traces.reader import read_trace

VOCABULARY = 997
"""Ids of tokens in the prompts, from 3 on."""


def prompt(job: Job) -> list[int]:
    """Return a prompt of tokens that the model has."""
    return [3 + token % VOCABULARY for token in prompt_of(job)]


async def ask_all(servers: Sequence[VllmServer], arrivals: Sequence[fleet.Arrival], at_once: int) -> tuple[int, int]:
    """Serve the requests; return the tokens of their prompts, and how many were cached."""
    router = ReplicaRouter([server.base_url for server in servers], capacity_tokens=ENGINE.capacity_tokens)
    planner = ContextPlanner(capacity_tokens=ENGINE.capacity_tokens * len(servers))
    waiting = iter(enumerate(arrivals))
    total = cached = 0

    async def run(client: httpx.AsyncClient) -> None:
        nonlocal total, cached
        for number, arrival in waiting:
            with planner.planning(arrival.blocks, model=MODEL) as plan:
                job = Job(number, arrival.blocks, "", order=[planned.block for planned in plan.blocks])
                route = router.route(job.order, order_locked=True)
                body = {"model": servers[0].model, "prompt": prompt(job), "max_tokens": ANSWER, "ignore_eos": True}
                answer = await client.post(f"{route.replica}/completions", json=body)
                answer.raise_for_status()
            router.commit(route, plan=plan)
            usage = answer.json()["usage"]
            total += usage["prompt_tokens"]
            cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*[run(client) for _ in range(at_once)])
    return total, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    generated = trace_of("generated_topics", zipf_requests(options.requests, k=10, topics=20, per_topic=20, seed=7))
    trace = generated if options.trace is None else read_trace(options.trace)
    arrivals = fleet.recorded(trace)[: options.requests]
    times = fleet.random_times(len(arrivals))
    arrivals = [fleet.Arrival(at, arrival.blocks) for at, arrival in zip(times, arrivals, strict=False)]
    simulated = fleet.Fleet(fleet.SETUPS[1], 2, prompt=prompt).run(
        arrivals, 0.001 if options.at_once == 1 else options.load
    )
    with ExitStack() as stack:
        servers = [stack.enter_context(VllmServer(kv_blocks=ENGINE.kv_blocks)) for _ in range(2)]
        total, cached = asyncio.run(ask_all(servers, arrivals, options.at_once))
    row = {
        "stream": trace.name,
        "requests": len(arrivals),
        "at_once": options.at_once,
        "engine": engine_version(),
        "prompt_tokens": total,
        "engines_hit_percent": round(100 * cached / total, 2),
        "simulated_hit_percent": simulated["hit_percent"],
    }
    print_table(list(row), [list(row.values())])
    if options.write:
        write_rows("fleet_engines", [row], ["stream", "requests", "at_once"])


if __name__ == "__main__":
    main()
