"""The Prometheus metrics as a scraper sees them."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families

from warmprefix import ContextPlanner, PlannerStats
from warmprefix.telemetry import LATENCY_BUCKETS
from warmprefix_telemetry.exported_metrics import METRICS
from warmprefix_telemetry.prometheus import PlannerCollector, register, unregister


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@contextmanager
def served(registry: CollectorRegistry) -> Iterator[str]:
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def strictly_parsed(registry: CollectorRegistry) -> list[Any]:
    openmetrics: Any = exposition  # it carries no types
    return list(parser.text_string_to_metric_families(openmetrics.generate_latest(registry).decode()))  # type: ignore[no-untyped-call]


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def value_of(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return samples_of(registry)[name, tuple(sorted({"planner": "default", **labels}.items()))]


def test_each_scrape_over_http_reads_current_counts(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry)
    with served(registry) as url:
        texts = []
        for _ in range(2):
            with urllib.request.urlopen(url) as answer:
                texts.append(answer.read().decode())
            busy_planner.abandon(busy_planner.plan(["another"]))
    for text, plans in zip(texts, (5, 6), strict=True):
        assert f'warmprefix_plans_total{{planner="default"}} {plans}.0' in text.splitlines()


def test_every_metric_has_the_value_of_its_count(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry)
    stats = busy_planner.stats()
    assert value_of(registry, "warmprefix_plans_total") == stats.plans == 5
    assert value_of(registry, "warmprefix_commits_total") == stats.commits == 4
    assert value_of(registry, "warmprefix_late_commits_total") == stats.late_commits == 1
    assert value_of(registry, "warmprefix_abandons_total") == stats.abandons == 1
    assert value_of(registry, "warmprefix_planned_tokens_total") == stats.planned_tokens == 400
    assert value_of(registry, "warmprefix_resident_tokens_total") == stats.resident_tokens == 80
    assert value_of(registry, "warmprefix_references_total") == stats.references == 2
    assert value_of(registry, "warmprefix_reference_tokens_total") == stats.reference_tokens == 80
    assert value_of(registry, "warmprefix_reported_cached_tokens_total") == stats.reported_cached_tokens == 75
    assert value_of(registry, "warmprefix_fallbacks_total", reason="recorder") == stats.recorder_errors == 5
    assert value_of(registry, "warmprefix_fallbacks_total", reason="store") == 0
    assert value_of(registry, "warmprefix_residency_confidence_ratio") == stats.residency_confidence
    assert value_of(registry, "warmprefix_scopes") == stats.scopes
    assert value_of(registry, "warmprefix_feed_connected") == 1
    assert value_of(registry, "warmprefix_feed_lag_seconds") == 0.25
    assert value_of(registry, "warmprefix_feed_kv_blocks") == 700


def test_latencies_are_cumulative_histograms(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry)
    (family,) = (f for f in registry.collect() if f.name == "warmprefix_plan_duration_seconds")
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert [float(bound) for bound in buckets] == [*LATENCY_BUCKETS, math.inf]
    assert list(buckets.values()) == sorted(buckets.values())
    snapshot = busy_planner.stats().plan_latency
    assert value_of(registry, "warmprefix_plan_duration_seconds_count") == buckets["+Inf"] == 5
    assert value_of(registry, "warmprefix_plan_duration_seconds_sum") == snapshot.seconds > 0
    at_most = sum(count for bound, count in zip(LATENCY_BUCKETS, snapshot.counts, strict=False) if bound <= 0.001)
    assert buckets["0.001"] == at_most


def test_both_text_formats_can_be_parsed(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry)
    classic = list(text_string_to_metric_families(generate_latest(registry).decode()))
    openmetrics = strictly_parsed(registry)
    assert len(classic) == len(openmetrics) == len(METRICS)
    for family in openmetrics:
        assert family.samples
        assert family.documentation.endswith(".")


def test_names_follow_the_conventions_of_prometheus(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry)
    for family in registry.collect():
        assert family.name.startswith("warmprefix_")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_no_label_comes_from_a_request(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry, labels={"app": "chat"})
    values: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    reasons = {"choice", "disabled_scope", "feed", "observer", "policy", "recorder", "sharing", "store", "tokenizer"}
    assert values.pop("reason") == reasons
    assert len(values.pop("le")) == len(LATENCY_BUCKETS) + 1
    assert values == {"planner": {"default"}, "app": {"chat"}}


def test_several_planners_share_one_description_of_each_metric(registry: CollectorRegistry) -> None:
    chat, agents = ContextPlanner(), ContextPlanner()
    register(chat, registry, name="chat", labels={"team": "search"})
    register(agents, registry, name="agents")
    agents.plan(["a"])
    text = generate_latest(registry).decode()
    assert text.count("# HELP warmprefix_plans_total ") == 1
    assert samples_of(registry)["warmprefix_plans_total", (("planner", "agents"), ("team", ""))] == 1
    assert samples_of(registry)["warmprefix_plans_total", (("planner", "chat"), ("team", "search"))] == 0


def test_a_deleted_planner_has_no_series_and_frees_its_name(registry: CollectorRegistry) -> None:
    planner = ContextPlanner()
    register(planner, registry)
    assert samples_of(registry)
    del planner
    gc.collect()
    assert not samples_of(registry)
    successor = ContextPlanner()
    register(successor, registry)
    assert value_of(registry, "warmprefix_plans_total") == 0


def test_two_planners_cannot_share_a_name(registry: CollectorRegistry) -> None:
    first, second = ContextPlanner(), ContextPlanner()
    register(first, registry)
    register(first, registry)
    with pytest.raises(ValueError, match="name must differ from those of other registered planners, got 'default'"):
        register(second, registry)
    unregister(first, registry)
    register(second, registry)


def test_unregistering_an_unregistered_planner_does_nothing(registry: CollectorRegistry) -> None:
    planner, other = ContextPlanner(), ContextPlanner()
    unregister(planner, registry)
    register(planner, registry)
    unregister(other, registry)
    assert samples_of(registry)


@pytest.mark.parametrize("label", ["planner", "reason", "le", "__name__", "a-b", "1st", ""])
def test_labels_that_are_not_allowed_are_refused(registry: CollectorRegistry, label: str) -> None:
    planner = ContextPlanner()
    with pytest.raises(ValueError, match="labels must be named with"):
        register(planner, registry, labels={label: "x"})
    register(planner, registry)
    assert value_of(registry, "warmprefix_plans_total") == 0


def test_other_metrics_with_these_names_are_refused(registry: CollectorRegistry) -> None:
    Gauge("warmprefix_scopes", "Not ours.", registry=registry)
    for _ in range(2):
        with pytest.raises(ValueError, match="warmprefix_scopes"):
            register(ContextPlanner(), registry)


def test_registering_reads_nothing_and_keeps_other_metrics(registry: CollectorRegistry) -> None:
    class Unready:
        def stats(self) -> PlannerStats:
            raise AssertionError("read too early")

    Counter("requests", "The application's.", registry=registry).inc()
    unready = Unready()
    register(unready, registry)
    unregister(unready, registry)
    assert samples_of(registry)["requests_total", ()] == 1


def test_a_reset_sets_counters_to_zero(registry: CollectorRegistry, busy_planner: ContextPlanner) -> None:
    register(busy_planner, registry)
    before = samples_of(registry)
    busy_planner.reset()
    after = samples_of(registry)
    own = [key for key in before if "_feed_" not in key[0]]
    for name, labels in own:
        if name.endswith(("_total", "_bucket", "_count", "_sum")):
            assert after[name, labels] == 0
    busy_planner.plan(["a"])
    assert value_of(registry, "warmprefix_plans_total") == 1
    assert value_of(registry, "warmprefix_plan_duration_seconds_count") == 1


def test_a_collector_can_be_registered_by_the_application(busy_planner: ContextPlanner) -> None:
    registry = CollectorRegistry()
    collector = PlannerCollector()
    collector.planners.add(busy_planner, "mine")
    registry.register(collector)
    assert value_of(registry, "warmprefix_plans_total", planner="mine") == 5
    collector.planners.discard(busy_planner)
    assert not samples_of(registry)


def test_a_process_with_metrics_exits_without_output() -> None:
    code = """
from warmprefix import ContextPlanner
from warmprefix_telemetry.prometheus import register
planner = ContextPlanner()
register(planner)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
