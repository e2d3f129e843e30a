"""The cost of telemetry per request: the same planner with and without it, request by request.

    python benchmarks/telemetry_overhead.py [--requests 10000] [--samples 3000]

Requests of 15 blocks over 400 Zipf-distributed topics, as in plan_overhead.py. Each goes to one planner per row, in
turns that rotate, so that all have learned the same and are timed on the same requests at the same time. Ratios are
of the medians, to the planner without telemetry, with 95 % bootstrap intervals. Spans go through the SDK's batching
processor
to an exporter that drops them, because sending them is not part of the measurement.

A feed of KV events works in threads of its own, which share the interpreter with requests. So it is timed against a
planner without one in slices of time that alternate, at 100 requests a second: in the feed's slices another process
plays the engine, and publishes the blocks that the prompts add to a prefix cache of 200,000 tokens or evict from it.

Needs `opentelemetry-sdk` and the extras `prometheus` and `events`. Only a run with the defaults is written to
`results/`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection

import msgspec
import zmq
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from prometheus_client import CollectorRegistry, generate_latest

from common import percentile, print_table, zipf_requests
from result_files import write_results
from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix_kv_events.kv_feed import KvEventFeed
from warmprefix_telemetry.opentelemetry import OpenTelemetryObserver, export_stats
from warmprefix_telemetry.prometheus import register

RESAMPLES = 500
SCRAPES = 200
SLICE = 50
"""Number of requests."""
PAUSE = 0.01
"""Seconds between the starts of two requests, with a feed."""
KV_BLOCK = 16
KV_BLOCKS = 200_000 // KV_BLOCK
PREAMBLE = [1] * 100


class Dropping(SpanExporter):
    """An exporter that drops all spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="earlier requests")
    parser.add_argument("--samples", type=int, default=3_000, help="requests that are timed")
    asked = parser.parse_args()
    registry = CollectorRegistry()
    readers = [InMemoryMetricReader() for _ in range(3)]
    meters = [MeterProvider([reader]) for reader in readers]
    tracers = [tracer(ALWAYS_OFF), tracer(ALWAYS_ON)]
    planners = {
        "none": ContextPlanner(),
        "none, again": ContextPlanner(),
        "Prometheus": ContextPlanner(),
        "OpenTelemetry metrics": ContextPlanner(),
        "OpenTelemetry, no span sampled": ContextPlanner(observer=OpenTelemetryObserver(tracers[0], meters[1])),
        "OpenTelemetry, all spans sampled": ContextPlanner(observer=OpenTelemetryObserver(tracers[1], meters[2])),
        "OpenTelemetry API alone": ContextPlanner(observer=OpenTelemetryObserver()),
    }
    register(planners["Prometheus"], registry)
    export_stats(planners["OpenTelemetry metrics"], meters[0])
    planning, committing = serve(list(planners.values()), asked.requests, asked.samples)
    results: list[dict[str, object]] = []
    for name, plans, commits in zip(planners, planning, committing, strict=True):
        whole = [a + b for a, b in zip(plans, commits, strict=True)]
        base = [a + b for a, b in zip(planning[0], committing[0], strict=True)]
        results.append(
            {
                "telemetry": name,
                "plan_p50_us": round(percentile(plans, 50) * 1e6, 1),
                "plan_p99_us": round(percentile(plans, 99) * 1e6, 1),
                "plan_ratio": ratio(plans, planning[0]),
                "plan_commit_p50_us": round(percentile(whole, 50) * 1e6, 1),
                "plan_commit_ratio": ratio(whole, base),
            }
        )
    print_table(
        ["telemetry", "plan() p50 µs", "p99 µs", "ratio", "plan() + commit() p50 µs", "ratio"],
        [[shown(value) for value in row.values()] for row in results],
    )
    reading = {
        "Prometheus": each(lambda: generate_latest(registry)),
        "OpenTelemetry metrics": each(readers[0].get_metrics_data),
    }
    for name, milliseconds in reading.items():
        print(f"\n{name}: reading all metrics takes {milliseconds} ms, outside of requests")
    for provider in tracers:
        provider.shutdown()
    for meter in meters:
        meter.shutdown()
    fed, feed_counts = with_a_feed(asked.samples // 2)
    print()
    print_table(
        ["", "plan() p50 µs", "p99 µs", "ratio", "plan() + commit() p50 µs", "p99 µs", "ratio"],
        [[shown(value) for value in row.values()] for row in fed],
    )
    print(f"\nthe feed: {feed_counts}")
    if (asked.requests, asked.samples) == (parser.get_default("requests"), parser.get_default("samples")):
        results_of_all = {"requests": results, "reading_ms": reading, "with_a_feed": fed, "feed": feed_counts}
        write_results("telemetry_overhead", results_of_all)


def tracer(sampler: Sampler) -> TracerProvider:
    provider = TracerProvider(sampler)
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    return provider


def serve(planners: list[ContextPlanner], earlier: int, samples: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each `plan()` and each `commit()`, by planner."""
    rng = random.Random(1)
    blocks = [ContextBlock(f"block {i}", id=i, tokens=rng.randrange(50, 400)) for i in range(400 * 60)]
    planning: list[list[float]] = [[] for _ in planners]
    committing: list[list[float]] = [[] for _ in planners]
    for number, request in enumerate(zipf_requests(earlier + samples)):
        context = [blocks[i] for i in request]
        for turn in range(len(planners)):
            place = (number + turn) % len(planners)
            start = time.perf_counter()
            plan = planners[place].plan(context)
            planned = time.perf_counter()
            planners[place].commit(plan, report=EngineReport(plan.resident_tokens + 100, plan.total_tokens + 100, 0.1))
            committed = time.perf_counter()
            if number >= earlier:
                planning[place].append(planned - start)
                committing[place].append(committed - planned)
    return planning, committing


def with_a_feed(samples: int) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return a row without and one with feed and metrics, and the counts of the feed."""
    processes = multiprocessing.get_context("spawn")
    prompts, theirs = processes.Pipe()
    engine = processes.Process(target=publish, args=(theirs,), daemon=True)
    engine.start()
    port: int = prompts.recv()
    rng = random.Random(1)
    blocks = [ContextBlock(f"block {i}", id=i, tokens=rng.randrange(50, 400)) for i in range(400 * 60)]

    def tokens_of(paragraph: str) -> Sequence[int]:
        return tokens_of_block(blocks[int(paragraph[1 : paragraph.index("]")])])

    feed = KvEventFeed(f"tcp://127.0.0.1:{port}", tokenizer=tokens_of)
    planners = [ContextPlanner(), ContextPlanner(feed=feed)]
    registry = CollectorRegistry()
    register(planners[1], registry)
    time.sleep(1)  # until the feed has subscribed
    planning: list[list[float]] = [[], []]
    committing: list[list[float]] = [[], []]
    contexts = [[blocks[i] for i in request] for request in zipf_requests(2 * samples)]
    for first in range(0, len(contexts), SLICE):
        for place in (0, 1) if first // SLICE % 2 else (1, 0):
            planner = planners[place]
            for context in contexts[first : first + SLICE]:
                start = time.perf_counter()
                plan = planner.plan(context)
                planned = time.perf_counter()
                tokens = prompt_tokens(plan) if place else None
                report = EngineReport(plan.resident_tokens + 100, plan.total_tokens + 100, 0.1, tokens)
                answered = time.perf_counter()
                planner.commit(plan, report=report)
                committed = time.perf_counter()
                if tokens is not None:
                    prompts.send_bytes(tokens.tobytes())
                if first >= samples:
                    planning[place].append(planned - start)
                    committing[place].append(committed - answered)
                time.sleep(max(start + PAUSE - time.perf_counter(), 0.0))
            if place:
                generate_latest(registry)
                time.sleep(0.1)  # until the feed is idle
    feed_counts = feed.stats()
    prompts.send_bytes(b"")
    planners[1].close()
    engine.join()
    whole = [[a + b for a, b in zip(*both, strict=True)] for both in zip(planning, committing, strict=True)]
    rows: list[dict[str, object]] = [
        {
            "telemetry": name,
            "plan_p50_us": round(percentile(plans, 50) * 1e6, 1),
            "plan_p99_us": round(percentile(plans, 99) * 1e6, 1),
            "plan_ratio": ratio(plans, planning[0]),
            "plan_commit_p50_us": round(percentile(both, 50) * 1e6, 1),
            "plan_commit_p99_us": round(percentile(both, 99) * 1e6, 1),
            "plan_commit_ratio": ratio(both, whole[0]),
        }
        for name, plans, both in zip(("none", "feed and Prometheus"), planning, whole, strict=True)
    ]
    feed_row: dict[str, object] = {
        "connected": feed_counts.connected,
        "events": feed_counts.events,
        "kv_blocks": feed_counts.kv_blocks,
        "prompts": feed_counts.prompts,
    }
    if not feed_counts.connected or not feed_counts.prompts or feed_counts.unmapped:
        raise SystemExit(f"the feed did not work: {feed_counts}")
    return rows, feed_row


def tokens_of_block(block: ContextBlock) -> Sequence[int]:
    first = 2 + 512 * int(block.id or 0)
    return range(first, first + block.tokens)


def prompt_tokens(plan: ContextPlan) -> array[int]:
    return array("I", [*PREAMBLE, *(token for planned in plan.blocks for token in tokens_of_block(planned.block))])


def publish(prompts: Connection) -> None:
    """Play an engine: publish the KV blocks that each prompt adds to the prefix cache or evicts from it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUB)
    prompts.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    encode = msgspec.msgpack.Encoder().encode
    held: OrderedDict[int, None] = OrderedDict()
    sequence = 0
    while packed := prompts.recv_bytes():
        size = 4 * KV_BLOCK
        parent, chain = b"", []
        for place in range(0, len(packed) - size + 1, size):
            parent = blake2b(parent + packed[place : place + size], digest_size=8).digest()
            chain.append(int.from_bytes(parent, "big"))
        cached = next((place for place, kv_block in enumerate(chain) if kv_block not in held), len(chain))
        events: list[dict[str, object]] = []
        if cached < len(chain):
            stored: dict[str, object] = {
                "type": "BlockStored",
                "block_hashes": chain[cached:],
                "parent_block_hash": chain[cached - 1] if cached else None,
                "token_ids": array("I", packed).tolist()[cached * KV_BLOCK : len(chain) * KV_BLOCK],
                "block_size": KV_BLOCK,
                "lora_id": None,
                "medium": "GPU",
            }
            events.append(stored)
        for kv_block in reversed(chain):  # so that the end of a prompt is dropped first
            held[kv_block] = None
            held.move_to_end(kv_block)
        removed = [held.popitem(last=False)[0] for _ in range(len(held) - KV_BLOCKS)]
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"})
        if events:
            socket.send_multipart([b"", sequence.to_bytes(8, "big"), encode([time.time(), events, 0])])
            sequence += 1
    socket.close()
    context.term()


def ratio(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of the medians with a 95 % interval, resampling requests with both of their times."""
    rng = random.Random(0)
    pairs = list(zip(times, base, strict=True))
    drawn = []
    for _ in range(RESAMPLES):
        mine, others = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
        drawn.append(statistics.median(mine) / statistics.median(others))
    whole = statistics.median(times) / statistics.median(base)
    return [round(value, 3) for value in (whole, percentile(drawn, 2.5), percentile(drawn, 97.5))]


def each(read: Callable[[], object]) -> float:
    times = []
    for _ in range(SCRAPES):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 2)


def shown(value: object) -> object:
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"
    return value


if __name__ == "__main__":
    main()
