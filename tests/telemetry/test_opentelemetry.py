"""Spans and metrics as OpenTelemetry's own SDK exports them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN, SpanKind, use_span

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport, PlannerObserver
from warmprefix.telemetry import LATENCY_BUCKETS
from warmprefix_telemetry.exported_metrics import METRICS
from warmprefix_telemetry.opentelemetry import OpenTelemetryObserver, annotate_current_span, export_stats

NUMBERS = [metric for metric in METRICS if metric.kind != "histogram"]
BLOCKS = [ContextBlock("The sky is blue.", id="sky", tokens=5), ContextBlock("The sea is deep.", id="sea", tokens=6)]


class Traced:
    """A tracer provider with an exporter in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    def spans(self) -> dict[str, ReadableSpan]:
        finished = self.exporter.get_finished_spans()
        found = {span.name: span for span in finished}
        assert len(found) == len(finished)
        return found


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.provider.shutdown()


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def meters(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    provider = MeterProvider([reader])
    yield provider
    provider.shutdown()


Points = dict[str, list[NumberDataPoint | HistogramDataPoint]]


def collected(reader: InMemoryMetricReader) -> Points:
    data = reader.get_metrics_data()
    points: Points = {}
    if data is None:
        return points
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert metric.name not in points
                points[metric.name] = [
                    point
                    for point in metric.data.data_points
                    if isinstance(point, (NumberDataPoint, HistogramDataPoint))
                ]
    return points


def number(points: Points, name: str, **attributes: str) -> int | float:
    (value,) = (
        point.value
        for point in points[name]
        if isinstance(point, NumberDataPoint) and dict(point.attributes or {}) == {"planner": "default", **attributes}
    )
    return value


def test_it_implements_the_observer_protocol(traced: Traced) -> None:
    assert isinstance(OpenTelemetryObserver(traced.provider), PlannerObserver)


def test_a_request_makes_two_spans_below_the_callers_span(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider))
    with traced.tracer.start_as_current_span("answer") as caller:
        plan = planner.plan(BLOCKS, model="tiny", tenant="acme", conversation="chat-42", placement="tail")
        planner.commit(plan, report=EngineReport(cached_tokens=64, prompt_tokens=100, ttft=0.25))
    spans = traced.spans()
    assert spans.keys() == {"answer", "warmprefix.plan", "warmprefix.commit"}
    assert dict(spans["warmprefix.plan"].attributes or {}) == {
        "gen_ai.request.model": "tiny",
        "warmprefix.plan.id": plan.id,
        "warmprefix.plan.placement": "tail",
        "warmprefix.plan.blocks": 2,
        "warmprefix.plan.references": 0,
        "warmprefix.plan.reordered": False,
        "warmprefix.plan.tokens": 11,
        "warmprefix.plan.reference_tokens": 0,
        "warmprefix.plan.resident_tokens": 0,
    }
    assert dict(spans["warmprefix.commit"].attributes or {}) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.response.time_to_first_chunk": 0.25,
        "warmprefix.plan.id": plan.id,
        "warmprefix.plan.resident_tokens": 0,
        "warmprefix.commit.recorded": True,
    }
    for name in ("warmprefix.plan", "warmprefix.commit"):
        parent, context = spans[name].parent, spans[name].context
        assert parent is not None
        assert context is not None
        assert parent.span_id == caller.get_span_context().span_id
        assert context.trace_id == caller.get_span_context().trace_id
        assert spans[name].kind is SpanKind.INTERNAL


def test_spans_last_as_long_as_the_calls(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider))
    before = time.time_ns()
    planner.commit(planner.plan(BLOCKS))
    after = time.time_ns()
    for span in traced.spans().values():
        assert span.start_time is not None
        assert span.end_time is not None
        assert before - 1_000_000 <= span.start_time < span.end_time <= after


def test_spans_have_references_and_predictions(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider), annotate="none")
    for _ in range(2):
        traced.exporter.clear()
        with planner.planning(BLOCKS, conversation="chat-42", placement="tail", annotate="labels"):
            pass
    attributes = traced.spans()["warmprefix.plan"].attributes or {}
    assert (attributes["warmprefix.plan.references"], attributes["warmprefix.plan.reference_tokens"]) == (2, 11)
    for order in (BLOCKS, BLOCKS[::-1]):
        traced.exporter.clear()
        with planner.planning(order):
            pass
    attributes = traced.spans()["warmprefix.plan"].attributes or {}
    assert (attributes["warmprefix.plan.reordered"], attributes["warmprefix.plan.resident_tokens"]) == (True, 11)


def test_values_that_the_engine_does_not_report_are_left_out(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider))
    planner.commit(planner.plan(BLOCKS))
    for span in traced.spans().values():
        assert not [name for name in span.attributes or {} if name.startswith("gen_ai.")]


def test_spans_hold_no_text_tenant_block_or_conversation(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider), salt_key=b"secret")
    with planner.planning(
        BLOCKS, tenant="acme", conversation="chat-42", placement="tail", preamble="Be terse."
    ) as plan:
        pass
    attributes = " ".join(str(value) for span in traced.spans().values() for value in (span.attributes or {}).values())
    for secret in ("acme", "chat-42", "sky", "sea", "terse", str(plan.cache_salt), BLOCKS[0].fingerprint.hex()):
        assert secret not in attributes


def test_spans_hold_conversation_ids_only_on_request(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider, conversation_ids=True))
    with planner.planning(BLOCKS, conversation="chat-42", placement="tail"):
        pass
    for span in traced.spans().values():
        assert (span.attributes or {})["gen_ai.conversation.id"] == "chat-42"


def test_an_abandoned_plan_has_a_span_of_zero_length(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider))
    with pytest.raises(TimeoutError), planner.planning(BLOCKS) as plan:
        raise TimeoutError
    span = traced.spans()["warmprefix.abandon"]
    assert span.start_time == span.end_time
    assert dict(span.attributes or {}) == {"warmprefix.plan.id": plan.id}


async def test_spans_of_tasks_have_their_own_parents(traced: Traced) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(traced.provider))

    async def answer(question: str) -> None:
        with traced.tracer.start_as_current_span(question):
            async with planner.planning([*BLOCKS, question]):
                await asyncio.sleep(0)

    await asyncio.gather(*(answer(f"question {n}") for n in range(8)))
    finished = traced.exporter.get_finished_spans()
    callers = {span.context.span_id: span.name for span in finished if span.context and span.parent is None}
    assert len(callers) == 8
    ours = [span for span in finished if span.name.startswith("warmprefix.")]
    assert sorted((callers[span.parent.span_id], span.name) for span in ours if span.parent) == [
        (f"question {n}", name) for n in range(8) for name in ("warmprefix.commit", "warmprefix.plan")
    ]


def test_a_failing_exporter_breaks_no_request(busy_planner: ContextPlanner) -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise ConnectionError("no collector")

    provider = TracerProvider()
    provider.add_span_processor(Broken())
    planner = ContextPlanner(observer=OpenTelemetryObserver(provider))
    plan = planner.plan(BLOCKS)
    assert planner.commit(plan) is True
    assert planner.abandon(planner.plan(BLOCKS)) is True
    stats = planner.stats()
    assert (stats.plans, stats.commits, stats.abandons, stats.observer_errors) == (2, 1, 1, 4)
    provider.shutdown()


def test_spans_that_are_not_sampled_cost_no_attributes() -> None:
    class Untouched(ContextPlan):
        @property
        def reordered(self) -> bool:
            raise AssertionError("the span is not recording")

    provider = TracerProvider(ALWAYS_OFF)
    plan = ContextPlanner().plan(BLOCKS)
    plain = {name: getattr(plan, name) for name in ContextPlan.__slots__}
    OpenTelemetryObserver(provider).planned(Untouched(**plain), 0.1)
    provider.shutdown()


def test_without_an_sdk_the_observer_does_nothing() -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver())
    planner.commit(planner.plan(BLOCKS), 3)
    assert planner.stats().observer_errors == 0


def test_planning_is_a_histogram_with_our_buckets(reader: InMemoryMetricReader, meters: MeterProvider) -> None:
    planner = ContextPlanner(observer=OpenTelemetryObserver(meter_provider=meters, name="chat"))
    for _ in range(3):
        planner.plan(BLOCKS)
    (point,) = collected(reader)["warmprefix.plan_duration"]
    assert isinstance(point, HistogramDataPoint)
    assert (point.count, dict(point.attributes or {})) == (3, {"planner": "chat"})
    assert tuple(point.explicit_bounds) == LATENCY_BUCKETS


def test_export_stats_exports_every_number(
    reader: InMemoryMetricReader, meters: MeterProvider, busy_planner: ContextPlanner
) -> None:
    export_stats(busy_planner, meters)
    points = collected(reader)
    assert points.keys() == {f"warmprefix.{metric.name}" for metric in NUMBERS}
    assert number(points, "warmprefix.plans") == 5
    assert number(points, "warmprefix.fallbacks", reason="recorder") == 5
    assert number(points, "warmprefix.feed_lag") == 0.25
    busy_planner.abandon(busy_planner.plan(["another"]))
    assert number(collected(reader), "warmprefix.plans") == 6


def test_one_round_of_collecting_reads_a_planner_once(reader: InMemoryMetricReader, meters: MeterProvider) -> None:
    class Counting(ContextPlanner):
        reads = 0

        def stats(self):  # type: ignore[no-untyped-def]
            self.reads += 1
            return super().stats()

    planner = Counting()
    export_stats(planner, meters)
    for rounds in (1, 2, 3):
        collected(reader)
        assert planner.reads == rounds


def test_planners_are_distinguished_and_dropped_when_gone(reader: InMemoryMetricReader, meters: MeterProvider) -> None:
    chat, agents = ContextPlanner(), ContextPlanner()
    export_stats(chat, meters, name="chat")
    export_stats(agents, meters, name="agents")
    with pytest.raises(ValueError, match="'chat'"):
        export_stats(agents, meters, name="chat")
    assert [dict(point.attributes or {}) for point in collected(reader)["warmprefix.plans"]] == [
        {"planner": "chat"},
        {"planner": "agents"},
    ]
    del chat
    gc.collect()
    assert [dict(point.attributes or {}) for point in collected(reader)["warmprefix.plans"]] == [{"planner": "agents"}]


def test_readers_in_several_threads_see_complete_counts(busy_planner: ContextPlanner) -> None:
    readers = [InMemoryMetricReader() for _ in range(3)]
    provider = MeterProvider(readers)
    export_stats(busy_planner, provider)
    wrong: list[Points] = []

    def read(reader: InMemoryMetricReader) -> None:
        for _ in range(20):
            points = collected(reader)
            if len(points) != len(NUMBERS) or number(points, "warmprefix.plans") != 5:
                wrong.append(points)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    provider.shutdown()
    assert not wrong


def test_annotate_current_span_adds_the_engines_report(traced: Traced) -> None:
    plan = ContextPlanner().plan(BLOCKS)
    report = EngineReport(cached_tokens=64, prompt_tokens=100)
    with traced.tracer.start_as_current_span("chat tiny"):
        annotate_current_span(report, plan)
    assert dict(traced.spans()["chat tiny"].attributes or {}) == {
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "warmprefix.plan.id": plan.id,
        "warmprefix.plan.resident_tokens": 0,
    }
    annotate_current_span(report, plan)
    with use_span(INVALID_SPAN):
        annotate_current_span(report)


def test_a_process_with_global_providers_exits_without_output() -> None:
    code = """
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from warmprefix import ContextPlanner
from warmprefix_telemetry.opentelemetry import OpenTelemetryObserver, export_stats
early = ContextPlanner(observer=OpenTelemetryObserver())
export_stats(early, name="early")
reader = InMemoryMetricReader()
trace.set_tracer_provider(TracerProvider())
metrics.set_meter_provider(MeterProvider([reader]))
late = ContextPlanner(observer=OpenTelemetryObserver(name="late"))
export_stats(late, name="late")
late.plan(["a"])
for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
    if metric.name == "warmprefix.plans":
        print({point.attributes["planner"]: point.value for point in metric.data.data_points})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{'early': 0, 'late': 1}\n", "")
