"""Exports planners' counts as Prometheus metrics, read on each scrape, so that requests pay nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from warmprefix.errors import MissingExtraError
from warmprefix.telemetry import LATENCY_BUCKETS, PlannerStats
from warmprefix_telemetry.exported_metrics import METRICS, PlannerWithStats, RegisteredPlanners

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.core import Metric as MetricFamily
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as exc:
    raise MissingExtraError("prometheus", "prometheus-client") from exc

__all__ = ["PlannerCollector", "register", "unregister"]

_collectors: weakref.WeakKeyDictionary[CollectorRegistry, PlannerCollector] = weakref.WeakKeyDictionary()
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_BOUNDS = [*map(floatToGoString, LATENCY_BUCKETS), "+Inf"]


def register(
    planner: PlannerWithStats,
    registry: CollectorRegistry = REGISTRY,
    *,
    name: str = "default",
    labels: Mapping[str, str] | None = None,
) -> None:
    """Export a planner's metrics through a registry, for as long as the planner lives.

    Args:
        planner: A `ContextPlanner`, which is not kept alive.
        registry: By default the one that `prometheus_client` serves.
        name: Value of the label `planner`, which distinguishes the planners of one process.
        labels: Further labels, the same for all metrics of this planner.

    Raises:
        ValueError: Another planner has this name there, a label has a name that is not allowed, or the registry has
            metrics with these names from another source.
    """
    created = PlannerCollector()
    collector = _collectors.setdefault(registry, created)
    if collector is created:
        try:
            registry.register(collector)
        except BaseException:
            del _collectors[registry]
            raise
    collector.planners.add(planner, name, labels)


def unregister(planner: PlannerWithStats, registry: CollectorRegistry = REGISTRY) -> None:
    """Undo `register`; does nothing for a planner that is not registered."""
    collector = _collectors.get(registry)
    if collector is not None:
        collector.planners.discard(planner)


class PlannerCollector(Collector):
    """Collects any number of planners, distinguished by the label `planner`.

    A registry accepts each metric's description only once, so it needs one collector; `register` sees to that.
    """

    def __init__(self) -> None:
        self.planners = RegisteredPlanners()
        """The planners whose counts are exported."""

    def describe(self) -> Iterator[MetricFamily]:
        """Yield all metrics without values, and read no planner."""
        return _families([])

    def collect(self) -> Iterator[MetricFamily]:
        """Yield all metrics with their current values."""
        return _families(self.planners.stats())


def _families(planners: Sequence[tuple[dict[str, str], PlannerStats]]) -> Iterator[MetricFamily]:
    names = ["planner", *sorted({label for labels, _ in planners for label in labels} - {"planner"})]
    for metric in METRICS:
        keys = [*names, "reason"] if metric.reasons else names
        name = f"warmprefix_{metric.name}{'_seconds' if metric.unit == 's' else ''}"
        family = _FAMILIES[metric.kind](name, metric.description, labels=keys)
        for labels, stats in planners:
            for own, value in metric.samples(stats):
                values = [{**labels, **own}.get(key, "") for key in keys]  # Prometheus treats "" as absent
                if isinstance(family, HistogramMetricFamily):
                    buckets = list(zip(_BOUNDS, accumulate(value.counts), strict=True))
                    family.add_metric(values, buckets, value.seconds)
                else:
                    family.add_metric(values, value)
        yield family
