"""Messages of both exporters for bad arguments: they name the argument, what is allowed, and the value."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry

from warmprefix import ContextPlanner
from warmprefix_telemetry.exported_metrics import PlannerWithStats
from warmprefix_telemetry.opentelemetry import export_stats
from warmprefix_telemetry.prometheus import register

LABELS = "named with letters, digits and _, without a leading __ and other than planner, reason and le"


def with_prometheus() -> Callable[[PlannerWithStats, str], None]:
    registry = CollectorRegistry()
    return lambda planner, name: register(planner, registry, name=name)


def with_opentelemetry() -> Callable[[PlannerWithStats, str], None]:
    provider = MeterProvider()
    return lambda planner, name: export_stats(planner, provider, name=name)


@pytest.mark.parametrize("exporter", [with_prometheus, with_opentelemetry])
def test_a_name_in_use_is_named(exporter: Callable[[], Callable[[PlannerWithStats, str], None]]) -> None:
    export, first, second = exporter(), ContextPlanner(), ContextPlanner()
    export(first, "chat")
    with pytest.raises(ValueError, match=r"^name must differ from those of other registered planners, got 'chat'$"):
        export(second, "chat")


@pytest.mark.parametrize("label", ["planner", "reason", "le", "__name__", "a-b", "1st", ""])
def test_a_label_is_named_with_what_is_allowed(label: str) -> None:
    with pytest.raises(ValueError, match=f"^labels must be {re.escape(f'{LABELS}, got {label!r}')}$"):
        register(ContextPlanner(), CollectorRegistry(), labels={label: "x"})
