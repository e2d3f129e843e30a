"""The code of the page on batches, and the example, run as they stand."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parents[3]
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INSTANT = EmulatorConfig(base_ttft_ms=0, prefill_rate=float("inf"), decode_rate=float("inf"))
MODEL = INSTANT.model


async def run(block: str, names: dict[str, Any]) -> None:
    """Run code as in a coroutine, but with its names kept."""
    code = compile(block, "batch.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, names)
    else:
        exec(code, names)


async def test_the_pages_code_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = CODE.findall((ROOT / "docs/batch.md").read_text())
    assert len(blocks) == 9
    printed = []
    with EmulatorServer(INSTANT) as server, OpenAI(base_url=server.base_url, api_key="none") as blocking:
        names: dict[str, Any] = {"model": MODEL, "urls": [server.base_url] * 2}
        async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            for block in blocks:
                if "read_jsonl(" in block:
                    answer_file(server.base_url, Path("night.jsonl"), Path("answers.jsonl"))
                names["client"] = client if "async for" in block else blocking
                await run(block, names)
                printed.append(capsys.readouterr().out)
        for replica in names["replicas"]:
            await replica.close()
    plan, chosen, *answers, window = [text for text in printed if text]

    batch = names["batch"]
    assert {planned.id for planned in batch} == {"q1", "q2", "q3"}
    assert 0 < batch.saved_tokens <= batch.upper_bound
    assert re.search(r"^\d\d% saved, \d\d% at most \([a-z ]+\)$", plan, re.MULTILINE)
    assert chosen.count("('q") == 2
    assert chosen.count("LeftOut(") == 1
    assert len(answers) == 3  # from Python, with replicas, from files
    for text in answers:
        assert [line.split()[0] for line in text.splitlines()] == ["q1", "q2", "q3"]
        assert "warmprefix emulator" in text
    assert rows(Path("night.journal")) == 3
    assert names["completion"].choices[0].message.content
    assert sorted(re.findall(r"'(q\d)'", window)) == ["q1", "q2", "q3"]


def rows(journal: Path) -> int:
    """Return the number of results in a journal."""
    with closing(sqlite3.connect(journal)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM results").fetchone()
    return int(count)


def answer_file(base_url: str, source: Path, output: Path) -> None:
    """Answer a batch file as `vllm run-batch` does, with the emulator for an engine."""
    results = []
    for line in map(json.loads, source.read_text().splitlines()):
        body = httpx.post(base_url.removesuffix("/v1") + line["url"], json=line["body"]).raise_for_status().json()
        response = {"status_code": 200, "request_id": "r", "body": body}
        results.append(
            json.dumps({"id": "vllm-1", "custom_id": line["custom_id"], "response": response, "error": None})
        )
    output.write_text("\n".join(results))


@pytest.mark.slow
def test_the_example_runs_and_is_taken_up(tmp_path: Path) -> None:
    with EmulatorServer(INSTANT) as server:
        settings = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "none", "MODEL": MODEL}
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
