"""docs/telemetry.md, the dashboard and the alerts against the exported metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from warmprefix import ContextPlanner, PlannerObserver
from warmprefix_telemetry.exported_metrics import METRICS
from warmprefix_telemetry.prometheus import PlannerCollector, unregister

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "telemetry.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana/warmprefix.json").read_text())
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SERIES = re.compile(r"\bwarmprefix_\w+")


def exported() -> dict[str, str]:
    """Return the exported series, with the type of their metric."""
    suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    return {
        f"{family.name}{suffix}": family.type
        for family in PlannerCollector().describe()
        for suffix in suffixes[family.type]
    }


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", [])


def queries() -> list[str]:
    variables = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"][1:]]
    return variables + [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def test_the_table_of_the_page_lists_the_declared_metrics() -> None:
    names = [family.name for family in PlannerCollector().describe()]
    rows = re.findall(r"^\| `(warmprefix_\w+)` \| (counter|gauge|histogram) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (f"{name}_total" if metric.kind == "counter" else name, metric.kind, metric.description.removesuffix("."))
        for name, metric in zip(names, METRICS, strict=True)
    ]


def test_the_reasons_of_the_page_are_the_exported_ones(busy_planner: ContextPlanner) -> None:
    collector = PlannerCollector()
    collector.planners.add(busy_planner, "default")
    exported_reasons = {
        sample.labels["reason"] for f in collector.collect() for sample in f.samples if "reason" in sample.labels
    }
    assert listed_reasons() == exported_reasons


def listed_reasons() -> set[str]:
    (sentence,) = re.findall(r"the request went on without: (.*?)\. ", PAGE, re.DOTALL)
    return set(re.findall(r"`(\w+)`", sentence))


def test_the_alerts_match_the_page_and_use_exported_series() -> None:
    rules = (DOCS / "grafana/alerts.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert re.findall(r"^\| `(Warmprefix\w+)` \|", PAGE, re.MULTILINE) == alerts
    expressions = re.findall(r"^\s+expr: (.+)$", rules, re.MULTILINE)
    assert len(expressions) == len(alerts)
    for expression in expressions:
        assert set(SERIES.findall(expression)) <= exported().keys()
        assert SERIES.findall(expression)
    for matched in re.findall(r'reason=~?"([^"]+)"', rules):
        assert set(matched.split("|")) <= listed_reasons()


def test_the_dashboard_shows_exactly_the_exported_series() -> None:
    used = {series for query in queries() for series in SERIES.findall(query)}
    assert used <= exported().keys()
    shown = {re.sub(r"_(bucket|sum|count)$", "", series) for series in used}
    assert shown == {re.sub(r"_(bucket|sum|count)$", "", series) for series in exported()}


def test_the_dashboard_uses_rates_only_for_counters() -> None:
    types = exported()
    for query in queries()[2:]:
        for function, series in re.findall(r"(\w+)\((warmprefix_\w+)\{", query):
            assert (types[series] != "gauge") == (function in ("rate", "increase")), query


def test_every_query_of_the_dashboard_uses_its_variables() -> None:
    for query in queries()[2:]:
        assert query.count('{instance=~"$instance", planner=~"$planner"') == len(SERIES.findall(query)), query
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "instance", "planner"]
    for panel in panels():
        for part in (panel, *panel.get("targets", [])):
            assert panel["type"] == "row" or part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_panels_do_not_overlap_and_have_descriptions() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []
    serve = prometheus_client.start_http_server

    def start_http_server(port: int) -> None:
        assert port == 9464
        servers.append(serve(0, "127.0.0.1"))

    monkeypatch.setattr(prometheus_client, "start_http_server", start_http_server)
    prometheus, *others = CODE.findall(PAGE)
    names: dict[str, Any] = {}
    exec(compile(prometheus, "telemetry.md", "exec"), names)
    names["planner"].plan(["A passage."])
    ((server, thread),) = servers
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert 'warmprefix_plans_total{planner="default"} 1.0' in answer.read().decode().splitlines()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        unregister(names["planner"])
    (spans,) = others
    names = {}
    exec(compile(spans, "telemetry.md", "exec"), names)
    stats = names["planner"].stats()
    assert (stats.observer_errors, stats.reported_cached_tokens) == (0, 64)
    assert issubclass(names["OpenTelemetryObserver"], PlannerObserver)
