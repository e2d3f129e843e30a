"""A planner's counts as Prometheus metrics, read when they are scraped, so that requests pay nothing for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from warmprefix.errors import MissingExtraError
from warmprefix.telemetry.latency import LATENCY_BUCKETS, LatencySnapshot
from warmprefix.telemetry.measures import DURATIONS, MEASURES, Measure
from warmprefix.telemetry.stats import PlannerStats
from warmprefix.telemetry.watched import CountingPlanner, WatchedPlanners

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as exc:
    raise MissingExtraError("prometheus", "prometheus-client") from exc

__all__ = ["PlannerCollector", "register", "unregister"]

_collectors: weakref.WeakKeyDictionary[CollectorRegistry, PlannerCollector] = weakref.WeakKeyDictionary()
_BOUNDS = [*map(floatToGoString, LATENCY_BUCKETS), "+Inf"]


def register(
    planner: CountingPlanner,
    registry: CollectorRegistry = REGISTRY,
    *,
    name: str = "default",
    labels: Mapping[str, str] | None = None,
) -> None:
    """Have a planner's metrics among those of a registry, for as long as the planner lives.

    Args:
        planner: A `ContextPlanner`, which is not kept alive.
        registry: By default the one that `prometheus_client` serves.
        name: The value of the label `planner`, which tells the planners of one process apart.
        labels: More labels, the same for all of its metrics.

    Raises:
        ValueError: Another planner has this name there; a label has a name that labels can't have; or the registry has
            metrics of these names from somebody else.
    """
    made = PlannerCollector()
    collector = _collectors.setdefault(registry, made)
    if collector is made:
        try:
            registry.register(collector)
        except BaseException:
            del _collectors[registry]
            raise
    collector.watch(planner, name=name, labels=labels)


def unregister(planner: CountingPlanner, registry: CollectorRegistry = REGISTRY) -> None:
    """Undo `register`."""
    collector = _collectors.get(registry)
    if collector is not None:
        collector.unwatch(planner)


class PlannerCollector(Collector):
    """Any number of planners, told apart by the label `planner`.

    One a registry, since each metric's description may come but once: `register` sees to that.
    """

    def __init__(self) -> None:
        self._planners = WatchedPlanners()

    def watch(
        self, planner: CountingPlanner, *, name: str = "default", labels: Mapping[str, str] | None = None
    ) -> None:
        """As `register` does."""
        self._planners.add(planner, name, labels)

    def unwatch(self, planner: CountingPlanner) -> None:
        """Leave it out from now on."""
        self._planners.discard(planner)

    def describe(self) -> Iterator[Metric]:
        """All metrics, without a value."""
        return _families([])

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        return _families(self._planners.stats())


def _families(planners: Sequence[tuple[dict[str, str], PlannerStats]]) -> Iterator[Metric]:
    names = ["planner", *sorted({label for labels, _ in planners for label in labels} - {"planner"})]
    for measure in MEASURES:
        family_of = CounterMetricFamily if measure.kind == "counter" else GaugeMetricFamily
        keys = names if callable(measure.read) else [*names, "reason"]
        family = family_of(_name(measure), measure.help, labels=keys)
        for labels, stats in planners:
            for own, value in measure.samples(stats):
                family.add_metric(_values(keys, {**labels, **own}), value)
        yield family
    for duration in DURATIONS:
        histogram = HistogramMetricFamily(f"warmprefix_{duration.name}_seconds", duration.help, labels=names)
        for labels, stats in planners:
            snapshot = duration.read(stats)
            histogram.add_metric(_values(names, labels), _buckets(snapshot), snapshot.seconds)
        yield histogram


def _name(measure: Measure) -> str:
    """Without the `_total` of a counter, which prometheus_client adds."""
    return f"warmprefix_{measure.name}{'_seconds' if measure.unit == 's' else ''}"


def _values(keys: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    return [labels.get(key, "") for key in keys]  # to Prometheus an empty label is none


def _buckets(snapshot: LatencySnapshot) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, accumulate(snapshot.counts), strict=True))
