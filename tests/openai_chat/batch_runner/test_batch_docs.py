"""The page on running a batch, and the example, run as they stand."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from warmprefix import BatchRequest, ContextPlanner
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parents[3]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODEL = EmulatorConfig().model


async def run(block: str, names: dict[str, Any]) -> None:
    """Run code as in a coroutine, but with its names kept."""
    code = compile(block, "batch-runs.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, names)
    else:
        exec(code, names)


async def test_the_pages_code_runs(
    requests: Callable[..., list[BatchRequest]],
    client: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = requests(2, 2)
    names: dict[str, Any] = {"planner": ContextPlanner(), "requests": asked, "client": client, "model": MODEL}
    blocks = CODE.findall((ROOT / "docs/batch-runs.md").read_text())
    names["urls"] = [str(client.base_url)] * 2
    assert len(blocks) == 8
    for block in blocks:
        if "read_jsonl(" in block:
            answer_file(str(client.base_url), Path("night.jsonl"), Path("answers.jsonl"))
        await run(block, names)
        printed = capsys.readouterr().out
        if "print(result.id" in block:
            assert [line.split()[0] for line in printed.splitlines()] == [request.id for request in asked]
            assert "warmprefix emulator" in printed
    for replica in names["replicas"]:
        await replica.close()
    assert rows(Path("night.journal")) == 4
    assert set(names["results"]) == {request.id for request in asked}
    assert len(names["answers"]) == 4
    assert names["files"] == (Path("night.jsonl"),)


def test_the_pages_hit_ratios_are_those_of_the_benchmark() -> None:
    page = (ROOT / "docs/batch-runs.md").read_text()
    measured = json.loads((ROOT / "benchmarks/results/batch_run.json").read_text())["results"]
    hits: dict[str, dict[int, list[float]]] = {}
    for row in measured:
        of_way = hits.setdefault(f"{row['engine']}, {row['way']}", {})
        of_way.setdefault(row["concurrency"], []).append(row["hit_percent"])
    expected = [[way, *(" / ".join(map(str, pair)) for pair in by.values())] for way, by in hits.items()]
    rows = re.findall(r"^\| ((?:one by one|side by side), .+) \|$", page, re.MULTILINE)
    assert [row.split(" | ") for row in rows] == expected
    assert [list(by) for by in hits.values()] == [[1, 8, 32]] * 6
    assert {row["predicted_percent"] for row in measured if row["way"] != "as given"} == {58.1}
    assert "predicts 58.1 in either cache" in " ".join(page.split())
    assert list(dict.fromkeys(row["cache"] for row in measured)) == ["1,048,576 tokens", "100,000 tokens"]


def rows(journal: Path) -> int:
    """Return the number of results in a journal."""
    with closing(sqlite3.connect(journal)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM results").fetchone()
    return int(count)


def answer_file(base_url: str, source: Path, output: Path) -> None:
    """Answer a batch file as `vllm run-batch` does, with the emulator for an engine."""
    results = []
    for line in map(json.loads, source.read_text().splitlines()):
        body = httpx.post(base_url.removesuffix("/v1/") + line["url"], json=line["body"]).raise_for_status().json()
        response = {"status_code": 200, "request_id": "r", "body": body}
        results.append(
            json.dumps({"id": "vllm-1", "custom_id": line["custom_id"], "response": response, "error": None})
        )
    output.write_text("\n".join(results))


@pytest.mark.slow
def test_the_example_runs_and_is_taken_up(tmp_path: Path) -> None:
    config = EmulatorConfig(base_ttft_ms=0, prefill_rate=float("inf"), decode_rate=float("inf"))
    with EmulatorServer(config) as server:
        settings = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none", "MODEL": config.model}
        command = [sys.executable, "-W", "error", str(ROOT / "examples/batch_run.py")]
        first, second = (
            subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        )
    ratio, *answers = first.splitlines()
    assert re.fullmatch(r"[1-9]\d?% of the context will be cached", ratio)
    assert [line.partition("?")[0] for line in answers] == [
        "How do I indent the output",
        "What is object_hook called with",
        "Which separators are compact",
    ]
    assert all("warmprefix emulator" in line for line in answers)
    assert first == second
    assert rows(tmp_path / "questions.journal") == 3
