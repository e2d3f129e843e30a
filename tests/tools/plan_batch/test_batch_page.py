"""The page on planning a batch: its code runs, and its numbers are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
from openai import OpenAI
from typer.testing import CliRunner

from warmprefix.batch import BATCH_PLANNERS, BatchPlan, BoundKind, bounds
from warmprefix.batch.cluster import MAX_DISTINCT
from warmprefix.batch.device import DISTANCES_PAY_FROM, OVERLAPS_PAY_FROM
from warmprefix.batch.machine import COMPILING_PAYS_FROM
from warmprefix_tools.cli import app
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.plan_batch.run_plan_batch import BOUNDS

PAGE = (Path(__file__).parents[3] / "docs/batch.md").read_text()
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    config = EmulatorConfig(base_ttft_ms=0, prefill_rate=float("inf"), decode_rate=float("inf"))
    with EmulatorServer(config) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        names: dict[str, Any] = {"client": client, "model": config.model}
        printed: list[str] = []
        for block in CODE.findall(PAGE):
            exec(compile(block, "batch.md", "exec"), names)
            printed.append(capsys.readouterr().out)
    plan, commit, shards, window, held, own = printed

    batch = names["batch"]
    assert isinstance(batch, BatchPlan)
    first = next(iter(batch))
    assert first.warmed_by is None
    assert {planned.id for planned in batch} == {"q1", "q2", "q3"}
    assert all(
        f"{planned.id} {planned.saved_tokens} {planned.warmed_by} {planned.blocks[0].text}" in plan for planned in batch
    )
    assert 0 < batch.saved_tokens <= batch.upper_bound
    assert re.search(r"^\d\d% saved, \d\d% at most \([a-z ]+\)$", plan, re.MULTILINE)

    assert commit == ""
    stats = names["planner"].stats()
    assert stats.commits == 3 + 2  # of the batch, and of the micro batch
    assert names["completion"].choices[0].message.content

    counts = [int(count) for count in re.findall(r"Replica \d: (\d) requests", shards)]
    assert (len(counts), sum(counts)) == (2, 3)
    assert sorted(re.findall(r"'(q\d)'", window)) == ["q1", "q2", "q3"]
    assert names["window"].saved_tokens > batch.saved_tokens  # all of it was committed
    assert int(held.split()[0]) == 2
    assert own == f"{names['theirs'].saved_tokens} {names['theirs'].upper_bound}\n"
    assert names["theirs"].planner == "LongestBlocksFirst"


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
    assert "gzipped if the name ends in `.gz`" in PAGE
    assert Path("orders.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_page_lists_every_option_and_no_other() -> None:
    help_text = CliRunner().invoke(app, ["plan-batch", "--help"], env={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"--[a-z-]+", help_text)) - {"--help"}
    assert set(re.findall(r"^\| `(-[a-z-]+)` \|", PAGE, re.MULTILINE)) == options | {"-k"}


def test_page_and_table_list_every_planner_and_bound() -> None:
    rows = set(re.findall(r"^\| `([a-z -]+)` \|", PAGE, re.MULTILINE))
    assert rows >= {*BATCH_PLANNERS, *get_args(BoundKind)}
    assert set(BOUNDS) == set(get_args(BoundKind))


def test_sizes_on_the_page_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    steps = re.findall(r"up to (\d+) million steps", text)
    assert [int(number) * 1_000_000 for number in steps] == [bounds._FOREST_STEPS, bounds._PARTNER_STEPS]
    assert f"Without numba it is {COMPILING_PAYS_FROM // 1_000_000} million steps for either" in text
    assert f"from {bounds._LEAST_SAMPLE} requests or more" in text
    assert f"at most {MAX_DISTINCT:,} distinct requests" in text
    assert (
        f"from {OVERLAPS_PAY_FROM:,} requests on for `merge` and from {DISTANCES_PAY_FROM:,} for `context-index`"
        in text
    )
