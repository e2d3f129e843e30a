"""The dashboard and the files for containers, against the gateway."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream

from warmprefix_gateway.metrics import GatewayMetrics

DOCS = Path(__file__).parents[3] / "docs"
COMPOSE = DOCS / "compose"


def exported() -> set[str]:
    types = re.findall(r"^# TYPE (warmprefix_gateway_\w+) (\w+)", GatewayMetrics().text().decode(), re.MULTILINE)
    return {name for name, kind in types if not name.endswith("_created")}


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_the_dashboard_shows_exactly_the_exported_series() -> None:
    dashboard = json.loads((DOCS / "grafana/gateway.json").read_text())
    used = {name for query in queries(dashboard) for name in re.findall(r"\bwarmprefix_\w+", query)}
    assert {name.removesuffix("_bucket") for name in used} == exported()
    assert dashboard["uid"] != json.loads((DOCS / "grafana/warmprefix.json").read_text())["uid"]
    for query in queries(dashboard):
        for function, name in re.findall(r"(\w+)\((warmprefix_\w+)", query):
            is_counter = name.endswith(("_total", "_bucket"))
            assert (function in ("rate", "increase")) == is_counter, query


def test_the_services_find_each_other(upstream: ScriptedUpstream) -> None:
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    gateway = services["gateway"]
    context = COMPOSE / gateway["build"]["context"]
    assert (context / "pyproject.toml").is_file()
    assert (context / gateway["build"]["dockerfile"]).is_file()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            assert (COMPOSE / volume.partition(":")[0]).exists()
    scraped = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["gateway:8080"]
    source = yaml.safe_load((COMPOSE / "grafana/datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    options = [part for part in gateway["command"] if not part.startswith(("--host", "--upstream"))]
    more = ["--host=127.0.0.1", "--port=0", f"--upstream={upstream.base_url}"]
    command = [sys.executable, "-m", "warmprefix_tools", *options, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("warmprefix gateway on http://127.0.0.1:")
        running.terminate()
