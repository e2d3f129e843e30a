"""docs/agents.md: its code runs, and its figures and picture come from the benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from agent_routing import SETTINGS, arguments, chart
from agent_tables import tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> Mapping[str, Any]:
    measured: Mapping[str, Any] = json.loads((ROOT / "benchmarks/results/agent_routing.json").read_text())["results"]
    return measured


def test_the_pages_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in CODE.findall(PAGE) if "warmprefix_" not in block]
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "agents.md", "exec"), {})
    printed = re.findall(r"'(d\d)'", capsys.readouterr().out)
    assert sorted(printed) == [f"d{number}" for number in range(6)]


def test_the_tables_are_those_of_the_benchmark(results: Mapping[str, Any]) -> None:
    for name, table in tables(results).items():
        assert table.count("\n") >= 3
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- end -->" in PAGE


def test_the_tables_leave_no_setting_out(results: Mapping[str, Any]) -> None:
    assert {row["setting"] for row in results["simulated"]} == set(SETTINGS)
    marked = re.findall(r"<!-- \w+ -->\n\n(.*?)\n\n<!-- end -->", PAGE, re.DOTALL)
    rows = sum(table.count("\n") - 1 for table in marked)  # without the headers
    shown = sum(table.count("\n") - 1 for table in tables(results).values())
    assert rows == shown


def test_the_picture_is_that_of_the_benchmark(results: Mapping[str, Any]) -> None:
    drawn = (ROOT / "docs/agent_load.svg").read_text()
    assert drawn == chart(dict(results))
    root = ElementTree.fromstring(drawn)
    panels = [group for group in root if group.tag.endswith("}g")]
    assert len(panels) == 3
    for panel in panels:
        lines = [line for line in panel if line.tag.endswith("}polyline")]
        assert len(lines) == 15 + 1
    assert "agent_load.svg" in PAGE


def test_the_commands_are_options_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = re.findall(r"^\$ python (benchmarks/agent_routing\.py.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        monkeypatch.setattr("sys.argv", command.split())
        assert arguments().only
