"""Exports a planner's requests as OpenTelemetry spans, and its counts as OpenTelemetry metrics."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from warmprefix.errors import MissingExtraError
from warmprefix.telemetry import LATENCY_BUCKETS, PlannerStats
from warmprefix_telemetry.exported_metrics import METRICS, Metric, PlannerWithStats, RegisteredPlanners

try:
    from opentelemetry import metrics, trace
except ImportError as exc:
    raise MissingExtraError("otel", "opentelemetry-api") from exc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

    from warmprefix.plan import ContextPlan
    from warmprefix.residency import EngineReport

__all__ = ["OpenTelemetryObserver", "annotate_current_span", "export_stats"]

_SCOPE = "warmprefix"
_PLANNING = next(metric for metric in METRICS if metric.name == "plan_duration")
_NUMBERS = [metric for metric in METRICS if metric.kind != "histogram"]
"""OpenTelemetry can observe numbers when it collects, but no histogram."""


class OpenTelemetryObserver:
    """A `PlannerObserver` that makes a span of each call, below the caller's current span.

    The spans are made after the fact, with the times of the call, so planning itself does not wait for them.
    `warmprefix.plan` and `warmprefix.commit` of one plan share `warmprefix.plan.id`. Texts, tenants and block ids are
    never sent. It also records the histogram `warmprefix.plan_duration`; `export_stats` exports all other metrics.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        name: str = "default",
        conversation_ids: bool = False,
    ) -> None:
        """Send to the global providers, or to others.

        Args:
            tracer_provider: Receives the spans.
            meter_provider: Receives the histogram.
            name: Value of the histogram's attribute `planner`.
            conversation_ids: True to send `gen_ai.conversation.id`, which may identify a person.
        """
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._planning = metrics.get_meter(_SCOPE, meter_provider=meter_provider).create_histogram(
            f"warmprefix.{_PLANNING.name}",
            unit=_PLANNING.unit,
            description=_PLANNING.description,
            explicit_bucket_boundaries_advisory=LATENCY_BUCKETS,
        )
        self._labels = {"planner": name}
        self._conversation_ids = conversation_ids

    def planned(self, plan: ContextPlan, seconds: float) -> None:
        """Make a span `warmprefix.plan`."""
        self._planning.record(seconds, self._labels)
        span, end = self._begin("warmprefix.plan", seconds)
        if span.is_recording():
            references = [planned for planned in plan.blocks if planned.reference is not None]
            span.set_attributes(
                {
                    **self._identity(plan),
                    "warmprefix.plan.placement": plan.placement,
                    "warmprefix.plan.blocks": len(plan.blocks),
                    "warmprefix.plan.references": len(references),
                    "warmprefix.plan.reordered": plan.reordered,
                    "warmprefix.plan.tokens": plan.total_tokens,
                    "warmprefix.plan.reference_tokens": sum([planned.block.tokens for planned in references]),
                    "warmprefix.plan.resident_tokens": plan.resident_tokens,
                }
            )
        span.end(end)

    def committed(self, plan: ContextPlan, report: EngineReport, recorded: bool, seconds: float) -> None:
        """Make a span `warmprefix.commit`, with the engine's report."""
        span, end = self._begin("warmprefix.commit", seconds)
        if span.is_recording():
            span.set_attributes(
                {
                    **self._identity(plan),
                    **_usage(report),
                    "warmprefix.plan.resident_tokens": plan.resident_tokens,
                    "warmprefix.commit.recorded": recorded,
                }
            )
        span.end(end)

    def abandoned(self, plan: ContextPlan) -> None:
        """Make a span `warmprefix.abandon` of zero length."""
        span, end = self._begin("warmprefix.abandon", 0.0)
        if span.is_recording():
            span.set_attributes(self._identity(plan))
        span.end(end)

    def _begin(self, name: str, seconds: float) -> tuple[Span, int]:
        """Return a span that began `seconds` ago, and its end in nanoseconds."""
        end = time.time_ns()
        return self._tracer.start_span(name, start_time=end - int(seconds * 1e9)), end

    def _identity(self, plan: ContextPlan) -> dict[str, str]:
        attributes = {"warmprefix.plan.id": plan.id}
        if plan.scope.model is not None:
            attributes["gen_ai.request.model"] = plan.scope.model
        if self._conversation_ids and plan.conversation is not None:
            attributes["gen_ai.conversation.id"] = plan.conversation
        return attributes


def annotate_current_span(report: EngineReport, plan: ContextPlan | None = None) -> None:
    """Add the engine's report, and the plan's prediction, to your own span around the call.

    Many client instrumentations leave out the cached tokens. Does nothing where no span is recording.
    """
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes(_usage(report))
        if plan is not None:
            span.set_attribute("warmprefix.plan.id", plan.id)
            span.set_attribute("warmprefix.plan.resident_tokens", plan.resident_tokens)


def _usage(report: EngineReport) -> dict[str, int | float]:
    """Return the reported values under the names of the conventions for generative AI."""
    values = {
        "gen_ai.usage.input_tokens": report.prompt_tokens,  # cached tokens included
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "gen_ai.response.time_to_first_chunk": report.ttft,
    }
    return {name: value for name, value in values.items() if value is not None}


def export_stats(
    planner: PlannerWithStats, meter_provider: MeterProvider | None = None, *, name: str = "default"
) -> None:
    """Export a planner's counts as metrics, read when they are collected, for as long as the planner lives.

    The names are those of the Prometheus metrics, with the prefix `warmprefix.` and without suffixes of type and unit;
    a collector that translates them to Prometheus restores these. Histograms cannot be read on collection:
    `OpenTelemetryObserver` records the one of planning, and the one of the store is not exported.

    Args:
        planner: A `ContextPlanner`, which is not kept alive.
        meter_provider: The global one by default.
        name: Value of the attribute `planner`; ValueError if another planner has it there.
    """
    created = _Instruments()
    instruments = _instruments.setdefault(metrics if meter_provider is None else meter_provider, created)
    if instruments is created:
        instruments.begin(metrics.get_meter(_SCOPE, meter_provider=meter_provider))
    instruments.planners.add(planner, name)


class _Instruments:
    """The instruments of one meter provider, for any number of planners."""

    def __init__(self) -> None:
        self.planners = RegisteredPlanners()
        self._round: tuple[set[str], Sequence[tuple[dict[str, str], PlannerStats]]]
        """Names of the metrics collected in this round, and the counts that they are read from."""
        self._round = {metric.name for metric in _NUMBERS}, ()

    def begin(self, meter: Meter) -> None:
        for metric in _NUMBERS:
            create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
            create(f"warmprefix.{metric.name}", [partial(self._observe, metric)], metric.unit, metric.description)

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        done, planners = self._round
        # A metric that comes a second time starts a new round. Each round reads every planner once.
        if metric.name in done:
            done, planners = self._round = set(), self.planners.stats()
        done.add(metric.name)
        return [
            metrics.Observation(value, {**labels, **own})
            for labels, stats in planners
            for own, value in metric.samples(stats)
        ]


_instruments: weakref.WeakKeyDictionary[object, _Instruments] = weakref.WeakKeyDictionary()
"""By meter provider; the module `metrics` stands for the global provider, which an application may replace."""
