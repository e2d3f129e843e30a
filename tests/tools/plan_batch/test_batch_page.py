"""The page on batches: its command, planners and bounds are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from warmprefix.batch import BoundKind
from warmprefix_baselines import BATCH_PLANNERS
from warmprefix_baselines.cluster import MAX_DISTINCT
from warmprefix_tools.cli import app
from warmprefix_tools.plan_batch.run_plan_batch import BOUNDS

PAGE = (Path(__file__).parents[3] / "docs/batch.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_command_on_the_page_writes_the_shown_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [{"block": f"b{i}", "tokens": 100} for i in range(10)]
    requests = [{"request": i, "blocks": ["b9", f"b{i}"]} for i in range(3)]
    Path("day.jsonl.gz").write_text("".join(json.dumps(line) + "\n" for line in [{"name": "day"}, *blocks, *requests]))
    (command,) = re.findall(r"^```console\nwarmprefix (.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    assert CliRunner().invoke(app, shlex.split(command), catch_exceptions=False).exit_code == 0
    numbers, line = (json.loads(shown) for shown in re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    assert list(json.loads(Path("numbers.json").read_text())) == list(numbers)
    assert list(line) == ["request", "order"]
    assert Path("orders.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_page_and_table_list_every_planner_and_bound() -> None:
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE))
    assert rows >= {*BATCH_PLANNERS} - {"auto"}
    assert set(BOUNDS) == set(get_args(BoundKind)) <= set(re.findall(r"`([a-z ]+)`", PAGE.replace("\n", " ")))
    assert f"at most {MAX_DISTINCT:,} distinct requests" in PAGE
