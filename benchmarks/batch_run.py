"""The hit ratio of a planned batch when several of its requests run at once, over HTTP.

    python benchmarks/batch_run.py [--requests 400] [--concurrency 1,8,32]

Questions and passages are those of the demo, on the Python standard library's documentation. Every run has an engine of
its own, the emulator, whose usage gives the hit ratio: cached tokens over prompt tokens, labels, notes and questions
included. The same plan is run in three ways: requests that share a prefix wait for the one that brings it ("warm
first", as `BatchRunner.run` does it); they start in execution order without waiting ("first come"); and that
again, with requests and blocks in the order in which they were given ("as given"). Predicted is the plan's own hit
ratio, of context tokens, for requests that run one after the other.

The emulator computes prefills one after the other, so later requests find the prefixes of earlier ones whether they
waited or not. So each plan also runs on an engine that computes all prefills at the same time and caches each prompt
at its end. Some engines cache a prompt only at the end of its prefill, and so do endpoints with several engines. Only
a run with the default options is written to `results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from openai import AsyncOpenAI

from common import print_table
from result_files import write_results
from warmprefix import BatchPlan, BatchRequest, ContextPlanner
from warmprefix.batch.planners import Placed, Progress
from warmprefix_openai import BatchRunner
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import Bm25Retriever

PASSAGES = 10
ROOMY, TIGHT = 65_537, 6_251  # KV blocks: a million tokens, and 100,000
HEADER = ["engine", "cache", "concurrency", "way", "hit ratio %", "predicted %", "p50 TTFT ms", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", default="1,8,32")
    options = parser.parse_args()
    requests = read_requests(options.requests)
    results: list[dict[str, Any]] = []
    for side_by_side in (False, True):
        for kv_blocks in (ROOMY, TIGHT):
            for concurrency in map(int, options.concurrency.split(",")):
                for way, batch in ways(requests, (kv_blocks - 1) * 16).items():
                    measured = asyncio.run(run(batch, kv_blocks, side_by_side, concurrency))
                    engine = "side by side" if side_by_side else "one by one"
                    predicted = round(100 * batch.hit_ratio, 1)
                    cache = f"{(kv_blocks - 1) * 16:,} tokens"
                    row = {"engine": engine, "cache": cache, "concurrency": concurrency, "way": way}
                    results.append({**row, **measured, "predicted_percent": predicted})
    keys = [
        "engine", "cache", "concurrency", "way", "hit_percent", "predicted_percent", "ttft_p50_ms", "seconds",
    ]  # fmt: skip
    print_table(HEADER, [[row[key] for key in keys] for row in results])
    if [options.requests, options.concurrency] == [parser.get_default(name) for name in ("requests", "concurrency")]:
        write_results("batch_run", results)


def read_requests(count: int) -> list[BatchRequest]:
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [
        BatchRequest(number, retriever.retrieve(asked.query, PASSAGES), asked.text)
        for number, asked in enumerate(ask(entries, count, seed=0))
    ]


class AsGiven:
    """A batch planner that changes nothing."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        return [Placed(number, tuple(context)) for number, context in enumerate(contexts)]


def ways(requests: Sequence[BatchRequest], capacity_tokens: int) -> dict[str, BatchPlan]:
    planned = ContextPlanner().plan_batch(requests, capacity_tokens=capacity_tokens)
    given = ContextPlanner().plan_batch(requests, AsGiven(), capacity_tokens=capacity_tokens)
    return {"warm first": planned, "first come": without_waiting(planned), "as given": without_waiting(given)}


def without_waiting(batch: BatchPlan) -> BatchPlan:
    return replace(batch, requests=tuple(replace(planned, warmed_by=None) for planned in batch))


async def run(batch: BatchPlan, kv_blocks: int, side_by_side: bool, concurrency: int) -> dict[str, Any]:
    """Run a batch, and return the engine's report on it."""
    config = EmulatorConfig(kv_blocks=kv_blocks, base_ttft_ms=2, prefill_rate=150_000, decode_rate=500)
    with EmulatorServer(config) as server:
        if side_by_side:
            app: Any = server._uvicorn.config.app  # noqa: SLF001 - no option makes such an engine
            app.state.engine._gpu = NoQueue()  # noqa: SLF001
        async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            started = time.perf_counter()
            run = BatchRunner(batch).run(client, config.model, concurrency=concurrency, ordered=False, max_tokens=4)
            results = [result async for result in run]
            seconds = time.perf_counter() - started
    assert len(results) == len(batch)
    assert all(result.error is None for result in results)
    prompt = sum(result.prompt_tokens or 0 for result in results)
    cached = sum(result.cached_tokens or 0 for result in results)
    waits = sorted(result.ttft or 0.0 for result in results)
    return {
        "hit_percent": round(100 * cached / prompt, 1),
        "prompt_tokens": prompt,
        "ttft_p50_ms": round(1000 * waits[len(waits) // 2], 1),
        "seconds": round(seconds, 1),
    }


class NoQueue(AbstractAsyncContextManager[None]):
    """A replacement of the emulator's lock that lets prefills wait for each other."""

    async def __aexit__(self, *_: object) -> None: ...


if __name__ == "__main__":
    main()
