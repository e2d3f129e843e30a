"""The cost of telemetry per request: the same planner with and without it, request by request.

    python benchmarks/telemetry_overhead.py [--requests 10000] [--samples 3000]

Requests of 15 blocks over 400 Zipf-distributed topics, as in plan_overhead.py. Each goes to one planner per row, in
turns that rotate, so that all have learned the same and are timed on the same requests at the same time. Ratios are
of the medians, to the planner without telemetry, with 95 % bootstrap intervals. Spans go through the SDK's batching
processor to an exporter that drops them, because sending them is not part of the measurement.

Needs `opentelemetry-sdk` and the extra `prometheus`. Only a run with the defaults is written to
`results/`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from prometheus_client import CollectorRegistry

from common import percentile, print_table, zipf_requests
from result_files import write_results
from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix_telemetry.opentelemetry import OpenTelemetryObserver, export_stats
from warmprefix_telemetry.prometheus import register

RESAMPLES = 500


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
    for provider in tracers:
        provider.shutdown()
    for meter in meters:
        meter.shutdown()
    if (asked.requests, asked.samples) == (parser.get_default("requests"), parser.get_default("samples")):
        write_results("telemetry_overhead", results)


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


def shown(value: object) -> object:
    if isinstance(value, list):
        return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"
    return value


if __name__ == "__main__":
    main()
