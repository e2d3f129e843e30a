"""A planner's requests as OpenTelemetry spans, and its counts as OpenTelemetry metrics."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.telemetry.latency import LATENCY_BUCKETS
from warmprefix.telemetry.measures import DURATIONS, MEASURES, Measure
from warmprefix.telemetry.stats import PlannerStats
from warmprefix.telemetry.watched import CountingPlanner, WatchedPlanners

try:
    from opentelemetry import metrics, trace
except ImportError as exc:
    raise MissingExtraError("otel", "opentelemetry-api") from exc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, TracerProvider

    from warmprefix.plan import ContextPlan
    from warmprefix.residency.base import EngineReport

__all__ = ["OpenTelemetryObserver", "annotate_current_span", "export_stats"]

_SCOPE = "warmprefix"
_PLANNING = DURATIONS[0]


class OpenTelemetryObserver:
    """A `PlannerObserver` that makes a span of each call, below the span that was current when it was made.

    The spans are made after the fact, with the times of the call, so that planning itself does not wait for them.
    `warmprefix.plan` and `warmprefix.commit` tell one plan by `warmprefix.plan.id`. Texts, tenants and block ids are
    never sent. It also records the histogram `warmprefix.plan_duration`; all other metrics are those of `export_stats`.
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
            tracer_provider: Where spans go.
            meter_provider: Where the histogram goes.
            name: The value of the histogram's attribute `planner`.
            conversation_ids: Whether spans tell `gen_ai.conversation.id`, which may identify somebody.
        """
        self._tracer = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        self._planning = metrics.get_meter(_SCOPE, meter_provider=meter_provider).create_histogram(
            f"warmprefix.{_PLANNING.name}",
            unit="s",
            description=_PLANNING.help,
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
        """Make a span `warmprefix.commit`, with what the engine said."""
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
        """Make a span `warmprefix.abandon`, of no length."""
        span, end = self._begin("warmprefix.abandon", 0.0)
        if span.is_recording():
            span.set_attributes(self._identity(plan))
        span.end(end)

    def _begin(self, name: str, seconds: float) -> tuple[Span, int]:
        """A span that began so long ago, and when it is to end, in nanoseconds."""
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
    """Say on the current span what the engine reported, and what was predicted; for a span of your own around the call.

    Many client instrumentations leave out the cached tokens. Does nothing where no span is recording.
    """
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes(_usage(report))
        if plan is not None:
            span.set_attributes(
                {"warmprefix.plan.id": plan.id, "warmprefix.plan.resident_tokens": plan.resident_tokens}
            )


def export_stats(
    planner: CountingPlanner, meter_provider: MeterProvider | None = None, *, name: str = "default"
) -> None:
    """Have a planner's counts exported as metrics, read when they are collected, for as long as the planner lives.

    They have the names of the Prometheus metrics, with `warmprefix.` in front and without suffixes of type and unit;
    a collector that translates them to Prometheus makes them the same again. The two histograms can't be read that way:
    `OpenTelemetryObserver` records that of planning, and that of the store is left out.

    Args:
        planner: A `ContextPlanner`, which is not kept alive.
        meter_provider: The global one by default.
        name: The value of the attribute `planner`, which tells the planners of one process apart.

    Raises:
        ValueError: Another planner has this name there.
    """
    made = _Export()
    export = _exports.setdefault(metrics if meter_provider is None else meter_provider, made)
    if export is made:
        export.begin(metrics.get_meter(_SCOPE, meter_provider=meter_provider))
    export.planners.add(planner, name)


def _usage(report: EngineReport) -> dict[str, int | float]:
    """What an engine told, under the names of the conventions for generative AI."""
    told = {
        "gen_ai.usage.input_tokens": report.prompt_tokens,  # those that were cached included
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "gen_ai.response.time_to_first_chunk": report.ttft,
    }
    return {name: value for name, value in told.items() if value is not None}


class _Round(NamedTuple):
    """What is told in one round of collecting."""

    counted: Sequence[tuple[Mapping[str, str], PlannerStats]]
    told: set[str]
    """The measures that it was told of already."""


class _Export:
    """The instruments of one meter provider, for any number of planners."""

    def __init__(self) -> None:
        self.planners = WatchedPlanners()
        self._round = _Round((), {measure.name for measure in MEASURES})

    def begin(self, meter: Meter) -> None:
        for measure in MEASURES:
            create = meter.create_observable_counter if measure.kind == "counter" else meter.create_observable_gauge
            create(f"warmprefix.{measure.name}", [partial(self._observe, measure)], measure.unit, measure.help)

    def _observe(self, measure: Measure, options: CallbackOptions) -> Iterable[Observation]:
        current = self._round
        if measure.name in current.told:  # a new one: planners are asked once for all that it tells
            current = self._round = _Round(self.planners.stats(), set())
        current.told.add(measure.name)
        return [
            metrics.Observation(value, {**labels, **own})
            for labels, stats in current.counted
            for own, value in measure.samples(stats)
        ]


_exports: weakref.WeakKeyDictionary[object, _Export] = weakref.WeakKeyDictionary()
"""By meter provider; the module `metrics` stands for the global one, which may be another one tomorrow."""
